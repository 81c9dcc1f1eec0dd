"""A guard goes on while its policy file has faults, as far as that is certain, and says so."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from daemons import SOMEBODY, a_daemon, somebodys
from nodes import eventually

from gpuguard.claims.directory import daemon_files
from gpuguard.daemon.queue_settings import QueueSettingsFile
from gpuguard.policies.usage import UsersRule
from gpuguard.policy_files import last_good
from gpuguard.policy_files.loader import parse
from gpuguard.queue import settings
from gpuguard.queue.priority import QueueRules
from gpuguard.queue.settings import keep_last_good, read_queue_settings
from gpuguard.yaml_files.decoder import Accounts

GOOD = """\
version: 1
mode: enforce
policies:
  - {name: hogs, when: {memory: {above: 20GiB}}, for: 1s, steps: [warn, {after: 1s, do: terminate}]}
  - {name: idle, when: {idle: {below: 5%}}, for: 2h, steps: [warn, {after: 1h, do: release}, terminate]}
"""
CHANGES = {
    "a fault elsewhere": (GOOD + "  - {name: x}\n", {"hogs", "idle"}),
    "another order, and comments": (
        GOOD.replace("  - {name: hogs", "  # first\n  - {name: x}\n  - {name: hogs"),
        {"hogs", "idle"},
    ),
    "a fault in one": (GOOD.replace("for: 2h", "for: 2"), {"hogs"}),
    "one is gone": (GOOD.partition("  - {name: idle")[0] + "  - {name: x}\n", {"hogs"}),
    "a key of one is there twice": (GOOD.replace("name: hogs,", "name: hogs, for: 9s,"), {"idle"}),
    "one is there twice": (GOOD + GOOD.splitlines()[3] + "\n", {"idle"}),
    "a common setting": (GOOD.replace("mode: enforce", "mode: enforced"), set()),
    "a new common setting": (GOOD + "protect: {users: [no-such-user]}\n", set()),
    "no YAML": (GOOD + "}", set()),
    "no text": ("", set()),
    "a list": ("- a\n- b\n", set()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_not_changed_stays_in_force_and_the_rest_takes_nothing_away(change):
    text, unchanged = CHANGES[change]
    last = parse(GOOD)
    now = last_good.still_in_force(last, text.encode())

    assert [policy.name for policy in now.policies] == ["hogs", "idle"]
    assert {policy.name for policy in now.policies if policy in last.policies} == unchanged
    for policy in now.policies:
        if policy.name not in unchanged:
            assert [step.action for step in policy.steps] == ["warn"]
            assert policy.enforce


NAMED = """\
version: 1
mode: enforce
policies:
  - {name: p, when: {memory: {above: 20GiB}}, steps: [warn], WHOM}
"""


def of_people(whom, remembered, **people):
    """The policy about *whom*, where only *people* are known now."""
    accounts = Accounts(people.__getitem__, people.__getitem__, remembered=remembered)
    return parse(NAMED.replace("WHOM", whom), accounts=accounts)


def test_an_account_that_is_gone_accuses_nobody():
    """Its number may be that of another user by now."""
    file = of_people("only: {users: [bob, alice]}", {("user", "bob"): 1002}, alice=1001)

    assert not file.faults
    assert file.policies[0].only.users == {1001}
    assert file.policies[0].enforce
    assert file.gone == ("there is no user 'bob' on this machine.",)
    assert of_people("only: {users: [bob]}", {}).policies[0].only.users == frozenset()


def test_an_account_that_is_gone_stays_spared_by_the_number_that_it_had():
    file = of_people("except: {users: [bob]}", {("user", "bob"): 1002})

    assert file.policies[0].exempt[0].users == {1002}
    assert file.policies[0].enforce


@pytest.mark.parametrize(
    "whom", ["except: {users: [bob]}", "except: {groups: [admins]}", "except: [{users: [0]}, {groups: [admins]}]"]
)
def test_where_who_is_spared_was_never_known_the_policy_only_observes(whom):
    file = of_people(whom, {})

    assert not file.faults and file.gone
    assert not file.policies[0].enforce


@pytest.mark.parametrize(
    ("remembered", "enforces", "spared"), [({("user", "bob"): 1002}, True, {1002}), ({}, False, {-1})]
)
def test_so_it_is_with_those_whom_no_policy_touches(remembered, enforces, spared):
    accounts = Accounts({}.__getitem__, {}.__getitem__, remembered=remembered)
    file = parse(GOOD + "protect: {users: [bob]}\n", accounts=accounts)

    assert file.protected.uids == spared
    assert {policy.enforce for policy in file.policies} == {enforces}


def test_a_rule_that_denies_an_account_that_is_gone_finds_nobody():
    text = NAMED.replace("memory: {above: 20GiB}", "users: {deny: [bob]}").replace(", WHOM", "")
    file = parse(text, accounts=Accounts({}.__getitem__, {}.__getitem__, remembered={("user", "bob"): 1002}))

    [rule] = file.policies[0].rules
    assert rule == UsersRule(deny=(-1,))


def test_the_check_of_a_file_is_strict():
    assert parse(
        NAMED.replace("WHOM", "only: {users: [bob]}"), accounts=Accounts({}.__getitem__, {}.__getitem__)
    ).faults


def test_what_is_kept_is_for_the_daemon_alone_and_what_another_user_could_have_written_counts_for_nothing(tmp_path):
    last_good.keep(str(tmp_path), GOOD.encode(), {("user", "bob"): 1002})
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert last_good.kept_text(str(tmp_path)) == GOOD.encode()
    assert last_good.kept_names(str(tmp_path)) == {("user", "bob"): 1002}

    for path in tmp_path.iterdir():
        path.chmod(0o666)
    assert last_good.kept_text(str(tmp_path)) is None
    assert last_good.kept_names(str(tmp_path)) == {}


@pytest.mark.root
def test_a_daemon_that_starts_with_a_faulty_file_guards_by_the_last_good_one_and_says_so(tmp_path):
    with a_daemon(tmp_path, GOOD, "--enforce", named=True) as daemon:
        daemon.until("policy")
        daemon.end()
        daemon.policy.write_text(GOOD.replace("for: 2h", "for: 2"))
        daemon.start("--interval", "200ms", "--enforce", named=True)
        with somebodys(daemon.node, "0", 40 * 2**30, uid=SOMEBODY) as hog:
            assert hog.wait(60) < 0
        assert eventually(lambda: len(daemon.events("daemon")) >= 3)
        said = daemon.events("daemon")[-1]["message"]
        assert "policies of the last good one: 1 in force, 1 that only warn" in said
        doctor = daemon.gpuguard("doctor")
        assert (doctor.returncode, "does not guard as its policy file says" in doctor.stdout) == (1, True)

        daemon.policy.write_text(GOOD)
        assert eventually(lambda: any(event["outcome"] == "faults mended" for event in daemon.events("policy")))
        assert "does not guard" not in daemon.gpuguard("doctor").stdout


def test_without_last_good_a_daemon_that_starts_with_a_faulty_file_only_observes(tmp_path):
    with a_daemon(tmp_path, GOOD) as daemon:
        daemon.until("policy")
        daemon.end()
        daemon.policy.write_text(GOOD.replace("for: 2h", "for: 2"))
        daemon.start("--interval", "200ms", "--no-last-good")
        assert eventually(lambda: len(daemon.events("daemon")) >= 3)

        assert "observing only: the policy file has faults" in daemon.events("daemon")[-1]["message"]
        assert daemon.end() == 0


def test_an_account_that_is_deleted_switches_the_guard_off_for_nobody_else(tmp_path):
    """One deleted account, named anywhere in the file, and after the next start nothing was enforced."""
    with_name = GOOD.replace("steps: [warn, {after: 1s", "except: {users: [no-such-user]}, steps: [warn, {after: 1s")
    with a_daemon(tmp_path, with_name, "--enforce") as daemon:
        assert eventually(lambda: bool(daemon.events("daemon")))
        events = daemon.events()
        assert "names unknown" in [event["outcome"] for event in events if event["kind"] == "policy"]
        status = daemon.events("daemon")[0]["message"]
        assert "2 policies, enforcing" in status and "there is no user 'no-such-user'" in status
        assert "no-such-user" in daemon.gpuguard("doctor").stdout
        assert json.loads(daemon.gpuguard("doctor", "--json").stdout)["checks"]
        assert os.path.exists(daemon.place / "claims")


WITH_DEVICES = """\
version: 1
policies:
  - {name: last, when: {memory: {above: 20GiB}}, for: 1h, only: {devices: [12], models: ["*", "H900*"]}, steps: [warn]}
"""


def test_gpus_and_models_that_are_not_here_are_said_once_and_doctor_is_red(tmp_path):
    """A policy about GPU 12 on a machine with fewer looked like one that guards."""
    with a_daemon(tmp_path, WITH_DEVICES) as daemon:
        assert eventually(lambda: any(event["outcome"] == "devices unknown" for event in daemon.events("policy")))
        status = json.loads(daemon.gpuguard("doctor", "--json").stdout)["checks"]
        daemon.policy.write_text(WITH_DEVICES.replace("[12]", "[0]").replace(', "H900*"', ""))
        assert eventually(lambda: any(event["outcome"] == "devices known" for event in daemon.events("policy")))

        [said] = [event["message"] for event in daemon.events("policy") if event["outcome"] == "devices unknown"]
        assert said == "last: no GPU here is 12; last: no model here is H900*"
        assert any("no GPU here is 12" in json.dumps(row) for row in status)


# line.yaml: the rules of the queue, which every command reads by itself.


@pytest.fixture
def line(tmp_path, monkeypatch):
    """The site's file, which $GPUGUARD_LINE names."""
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))
    return tmp_path / "line.yaml"


def kept(directory) -> Path:
    return Path(daemon_files(directory).file(settings.LAST_GOOD))


def test_with_faults_in_it_the_last_good_line_yaml_holds_and_both_are_said(directory, line):
    line.write_text("bound: 7h  # ...\n")
    keep_last_good(directory, read_queue_settings(directory))
    line.write_text("bound: 8\n")
    site = read_queue_settings(directory)

    assert (site.rules, site.is_last_good) == (QueueRules(bound=7 * 3600.0), True)
    assert "unit" in site.faults[0].text
    assert read_queue_settings().rules == QueueRules()
    line.write_text("bound: 8h\n")
    assert read_queue_settings(directory).rules.bound == 8 * 3600.0
    assert not read_queue_settings(directory).is_last_good


def test_that_there_was_no_line_yaml_is_a_good_one_too(directory, line):
    keep_last_good(directory, read_queue_settings(directory))
    line.write_text("bound: 8\n")

    assert (read_queue_settings(directory).rules, read_queue_settings(directory).is_last_good) == (QueueRules(), True)


@pytest.mark.parametrize("damage", ["mode", "content", "another's path", "text with faults", "sticky", "none"])
def test_what_is_not_the_daemons_word_on_this_file_counts_for_nothing(directory, line, damage, monkeypatch):
    line.write_text("bound: 7h\n")
    keep_last_good(directory, read_queue_settings(directory))
    line.write_text("bound: 8\n")
    content = json.loads(kept(directory).read_text())
    if damage == "mode":
        kept(directory).chmod(0o666)
    elif damage == "content":
        kept(directory).write_text("{")
    elif damage == "another's path":
        kept(directory).write_text(json.dumps({**content, "path": "/etc/gpuguard/line.yaml"}))
    elif damage == "text with faults":
        kept(directory).write_text(json.dumps({**content, "text": "bound: 7"}))
    elif damage == "none":
        kept(directory).unlink()
    else:
        files = daemon_files(directory)
        monkeypatch.setattr(settings, "daemon_files", lambda directory: type(files)(files.path, None, files.prefix))

    assert (read_queue_settings(directory).rules, read_queue_settings(directory).is_last_good) == (QueueRules(), False)


def test_that_nothing_can_be_opened_now_says_nothing_of_the_last_good_one(directory, line, monkeypatch):
    def fail(*_):
        raise OSError(24, "Too many open files")

    line.write_text("bound: 8\n")
    monkeypatch.setattr(settings.files, "read_file", fail)

    with pytest.raises(OSError, match="Too many"):
        read_queue_settings(directory)


def test_an_account_in_line_yaml_that_is_deleted_changes_nothing_for_others(directory, line, monkeypatch):
    numbers = {"alice": 1001, "bob": 1002}
    monkeypatch.setattr(settings, "Accounts", lambda: Accounts(numbers.__getitem__, numbers.__getitem__))
    line.write_text("priority: {everybody: normal, high: [alice, bob]}\n")
    keep_last_good(directory, read_queue_settings(directory))
    del numbers["bob"]
    site = read_queue_settings(directory)

    assert "there is no user 'bob'" in site.faults[0].text
    assert [site.rules.highest(uid) for uid in (1001, 1002)] == [1, 0]


def test_while_the_directory_service_is_silent_it_is_awaited_once(directory, line, monkeypatch):
    silent, asked = threading.Event(), []

    def hang(name: str) -> int:
        asked.append(name)
        silent.wait(60)
        raise KeyError(name)

    line.write_text("bound: 7h\n")
    keep_last_good(directory, read_queue_settings(directory))
    monkeypatch.setattr(settings, "Accounts", lambda: Accounts(hang, hang, seconds=0.05))
    line.write_text("bound: 7h\npriority: {everybody: normal, low: [bob]}\n")
    site = read_queue_settings(directory)
    silent.set()

    assert (site.is_last_good, site.rules.bound, asked) == (True, 7 * 3600.0, ["bob"])


def test_a_copy_of_the_last_good_line_yaml_outlives_a_boot(directory, line, tmp_path, monkeypatch):
    place = tmp_path / "state" / "gpuguard"
    monkeypatch.setattr(settings, "COPIES", {daemon_files(directory).path: str(place)})
    line.write_text("bound: 7h\n")
    keep_last_good(directory, read_queue_settings(directory))

    assert (place / settings.LAST_GOOD).read_bytes() == kept(directory).read_bytes()


def test_a_daemon_keeps_the_last_good_line_yaml_for_all_and_says_when_its_faults_begin_and_end(line, tmp_path):
    line.write_text("fair_share: false\n")
    with a_daemon(tmp_path) as daemon:
        assert eventually(lambda: bool(list(tmp_path.rglob(settings.LAST_GOOD))))
        line.write_text("fair_share: maybe\n")
        [refused] = daemon.until("queue")
        queue = json.loads(daemon.gpuguard("queue", "--json").stdout)
        doctor = daemon.gpuguard("doctor")
        daemon.end()
        daemon.start("--interval", "200ms")
        assert len(daemon.until("queue", 2)) == 2
        still = json.loads(daemon.gpuguard("queue", "--json").stdout)
        line.write_text("fair_share: true\n")
        mended = daemon.until("queue", 3)[-1]

        assert (refused["outcome"], mended["outcome"]) == ("refused", "faults mended")
        assert "1 fault, the first: " in refused["message"] and "line.yaml:1:13" in refused["message"]
        assert (queue["fair_share"], still["fair_share"], len(queue["faults"])) == (False, False, 1)
        assert (doctor.returncode, "the last good" in doctor.stdout) == (1, True)
        assert "The last good rules of this site hold" not in daemon.gpuguard("queue").stdout


def test_where_no_descriptor_is_left_the_daemon_lives_on_and_reads_line_yaml_later(directory, line, monkeypatch):
    line.write_text("bound: 7h\n")
    said: list[object] = []
    rules = QueueSettingsFile(directory, lambda *words: said.append(words), said.append)
    with monkeypatch.context() as exhausted:
        exhausted.setattr(settings, "read_file", no_descriptor)
        rules.look()
    assert not kept(directory).exists()
    rules.look()

    assert kept(directory).exists()
    assert (rules.faults, said) == (0, [])


def no_descriptor(*_: object, **__: object) -> bytes:
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
