"""Policy files that are right: what the keys become; who may have written the file; names that do not resolve."""

import os
import threading
import time

import pytest
from policies import accounts, document, good, marked, read

from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Audience, Exemption, Step
from gpuguard.policies.usage import UnclaimedRule, UsersRule
from gpuguard.policy_files.loader import load_policies, parse
from gpuguard.yaml_files.decoder import Accounts

EVERY_KEY = """\
version: 1
mode: enforce
policies:
  - name: idle-gpus
    when: {idle: {below: 5%}}
    for: 2h
    start_grace: 30m
    only: {users: [alice, 1005], groups: [staff], devices: [0, GPU-8f31], models: ["A100*"], kinds: [interactive]}
    except: {users: [no], until: 2026-12-24T18:00}
    devices_at_least: 2
    hours: 22:00-07:30
    days: [mon, tue]
    claimed_above: 80%
    at_most: {users: 1, processes: 2}
    keep: false
    cooldown: 15m
    mode: observe
    steps:
      - warn
      - {after: 30m, do: notify, to: ops}
      - {after: 30m, do: checkpoint, signal: USR1}
      - {after: 1h, do: terminate}
      - {after: 60s, do: kill}
notify:
  ops: {email: ops@example.org}
interval: {shortest: 1s, longest: 5s}
messages: {en: {subject: "$host: $policy"}}
limits: {per_minute: 6, per_hour: 30}
events: {keep: 400d}
"""


def policy(**pieces):
    return good(document(**pieces)).policies[0]


def test_every_key_and_step_reaches_the_policy_and_the_file():
    file = good(EVERY_KEY)
    [found] = file.policies

    assert (file.limits.per_minute, file.limits.per_hour, file.keep_events) == (6, 30, 400 * 86400.0)

    assert found.rules == (IdleRule(below=5.0),)
    assert (found.hold, found.start_grace, found.cooldown) == (7200.0, 1800.0, 900.0)
    assert found.only == Audience(
        frozenset({1000, 1005}), frozenset({"staff"}), ("0", "GPU-8f31"), ("A100*",), frozenset({"interactive"})
    )
    assert found.exempt == (Exemption(frozenset({1002}), until=time.mktime((2026, 12, 24, 18, 0, 0, 0, 0, -1))),)
    assert (found.devices_at_least, found.claimed_above, found.enforce) == (2, 80.0, False)
    assert (found.hours, found.days) == ((79200.0, 27000.0), frozenset({0, 1}))
    assert (found.at_most_users, found.at_most_processes, found.may_be_kept) == (1, 2, False)
    assert found.steps == (
        Step("warn"),
        Step("notify", 1800.0, (("to", "ops"),)),
        Step("checkpoint", 1800.0, (("signal", 10),)),
        Step("terminate", 3600.0),
        Step("kill", 60.0),
    )
    assert file.notify["ops"].to == "ops@example.org"
    assert file.interval == (1.0, 5.0)
    assert file.messages["en"].subject == "$host: $policy"


def test_what_is_not_written_is_mild():
    found = policy()

    assert (found.hold, found.enforce, found.at_most_users, found.at_most_jobs) == (30.0, False, 3, 5)
    assert (found.at_most_processes, found.order) == (None, "most_memory")
    assert found.only is None
    assert found.may_be_kept and not policy(when="{trespass: {}}").may_be_kept
    assert policy(when="{trespass: {}}", more="keep: true").may_be_kept


@pytest.mark.parametrize(
    ("of_file", "of_policy", "enforced"),
    [
        ("", "", False),
        ("mode: enforce", "", True),
        ("mode: enforce", "mode: observe", False),
        ("", "mode: enforce", True),
    ],
)
def test_the_mode_of_a_policy_overrides_the_files(of_file, of_policy, enforced):
    assert policy(top=of_file, more=of_policy).enforce is enforced


BOTH_RULES = "[{idle: {below: 5%}}, {memory: {above: 40GiB}}]"


@pytest.mark.parametrize(
    ("pieces", "field", "value"),
    [
        ({"when": f"{{all: {BOTH_RULES}}}"}, "join", "all"),
        ({"when": f"{{any: {BOTH_RULES}}}"}, "join", "any"),
        (
            {"when": "{users: {deny: [alice, 7], allow_groups: [staff]}}"},
            "rules",
            (UsersRule(deny=(1000, 7), allow_groups=("staff",)),),
        ),
        ({"when": "{unclaimed: {}}"}, "rules", (UnclaimedRule(),)),
        (
            {"more": "except: [{users: [alice]}, {groups: [staff], until: 2026-12-24}]"},
            "exempt",
            (
                Exemption(frozenset({1000})),
                Exemption(groups=frozenset({"staff"}), until=time.mktime((2026, 12, 25, 0, 0, 0, 0, 0, -1))),
            ),
        ),
        (  # for the reader of the file, not for the action
            {
                "when": "{temperature: {above: 95C, per: process}}",
                "steps": "[warn, {do: terminate, even_if_innocent: true}]",
            },
            "steps",
            (Step("warn"), Step("terminate")),
        ),
    ],
    ids=["all", "any", "users are uids", "a rule without keys", "several exemptions", "even if innocent"],
)
def test_what_is_written_is_what_the_policy_has(pieces, field, value):
    assert getattr(policy(**pieces), field) == value


@pytest.mark.parametrize("name", ["no", "on", "'no'", '"on"'])
def test_a_user_whose_name_yaml_takes_for_a_truth_is_a_user(name):
    assert policy(more=f"only: {{users: [{name}]}}").only.users in ({1002}, {1003})


def test_another_text_has_another_fingerprint():
    assert good(document()).fingerprint != good(document() + "# why\n").fingerprint


WARNINGS = [
    (document(when="{memory: {above: «100%}}"), "can never fire"),
    (document(when="{memory: {above: «share, per: user}}"), "only a claim has a share"),
    (document(when="{temperature: {above: «130C}}", steps="[log]"), "not believed"),
    (document(when="{utilization: {above: «100%}}", steps="[log]"), "can never fire"),
    (document(when="{utilization: {below: «0%}}", steps="[log]"), "nothing is below"),
    (document(when="{idle: {below: «100%}}"), "fires for every GPU, a busy one too"),
    (document(when="{utilization: {below: «100%}}", steps="[log]"), "fires for every GPU"),
    (document(more="for: «1s"), "one reading decides"),
    (document(when="{age: {claim_without_process_above: «20s}}", steps="[log]"), "20s is shorter than 10 times"),
    (document(when="{idle: {below: 5%, window: sliding, over: «90s}}"), "10 times the 10s between two samples"),
    (document(more="claimed_above: «100%"), "not more than 100%"),
    (document(more="only: {users: «[root]}"), "always protected"),
    (document(more="only: {groups: «[staff]}\nexcept: {groups: [staff, students]}"), "none is left"),
    (document(more="except: {users: [alice], until: «2020-01-01}"), "is over"),
    (document(steps="[warn, terminate, {after: 30s, do: kill}, «warn]"), "no process is left"),
    (document(steps="[warn, «warn]"), "twice at the same moment"),
    (document(when="{memory: {above: 90%, per: device}}", steps="[log, «warn]"), "reaches no process"),
    (document(steps="[warn, {after: 1h, do: log}, «{after: 1h, do: warn}]", more="hours: 20:00-21:30"), "never"),
    (document(steps="[«terminate]", top="mode: enforce"), "without a warning"),
    (document(steps="[«{do: warn, even_if_innocent: true}]"), "no meaning"),
    (document(when="{all: [{memory: «{above: 1GiB}}, {memory: «{above: 1GiB}}]}"), "twice"),
    (document(when="{expression: {expr: 'utilization < 5%'}}", steps="[log, «terminate]"), "reaches no process"),
    (document(when="{all: [{utilization: {below: 5%}}, {utilization: «{above: 90%}}]}", steps="[log]"), "never holds"),
    (document(when="{all: [{idle: {below: 5%}}, {utilization: «{above: 5%}}]}", steps="[log]"), "never holds together"),
    (document(more="until: «{temperature: {below: 75C}}"), "without a step that pauses"),
    (document(when="{temperature: {above: 85C, per: process}}", steps="[warn, {do: pause, even_if_innocent: true}]",
              more="until: {temperature: «{below: 85C}}"), "ends no later than without it"),
    (document(when="{power: {above: 90%, per: process}}", steps="[warn, {do: pause, even_if_innocent: true}]",
              more="until: {power: «{below: 95%}}"), "ends no later than without it"),
    (document(when="{unclaimed: «{}}", steps="[warn, {after: 1h, do: terminate}]"), "another user has claimed"),
    (
        document(steps="[warn, terminate]")
        + "  - {name: q, when: {idle: «{below: 1%}}, steps: [warn, {after: 1h, do: pause}]}\n",
        "'p' ends processes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("longest", "warnings"), [(None, 1), (1.0, 0), (60.0, 1)])
def test_an_interval_that_the_daemon_was_given_counts_instead_of_the_files(longest, warnings):
    """`gpuguard daemon --interval 1s` warned of the 10 s between two samples."""
    file = parse(document(more="for: 5s"), longest=longest)

    assert len(file.warnings) == warnings


@pytest.mark.parametrize(("text", "part"), WARNINGS)
def test_what_is_hardly_meant_is_a_warning_at_its_place(text, part):
    plain, places = marked(text)
    file = good(plain)

    assert {(warning.line, warning.column) for warning in file.warnings} == places
    assert all(part in warning.text for warning in file.warnings)


IN_ORDER = [
    document(
        when="{temperature: {above: 85C, per: process}}",
        steps="[warn, {do: pause, even_if_innocent: true}]",
        more="until: {temperature: {below: 75C}, power: {below: 60%}}",
    ),
    document(when="{unclaimed: {}}"),
    document(when="{unclaimed: {on_claimed: false}}", steps="[warn, {after: 1h, do: terminate}]"),
    document(when="{any: [{unclaimed: {}}, {trespass: {}}]}", steps="[warn, {after: 1h, do: terminate}]"),
    document(when="{any: [{utilization: {below: 5%}}, {utilization: {above: 90%}}]}", steps="[log]"),
    document(when="{all: [{utilization: {above: 5%}}, {utilization: {below: 90%}}]}", steps="[log]"),
    document(when="{expression: {expr: 'memory_used > 1GiB'}}"),
    document(when="{users: {deny: [alice], claims: true}}", steps="[warn, {after: 1h, do: release}]"),
]


@pytest.mark.parametrize("text", IN_ORDER)
def test_what_can_hold_and_reaches_whom_it_means_has_no_warning(text):
    assert good(text).warnings == ()


@pytest.mark.parametrize("text", [document(), EVERY_KEY.replace("2h", "1h").replace("1h, do", "30m, do")])
def test_a_sensible_file_has_no_warnings(text):
    assert good(text).warnings == ()


def test_a_directory_service_that_hangs_is_a_fault_and_is_waited_for_once():
    never, asked = threading.Event(), []

    def hang(name):
        asked.append(name)
        never.wait(60)
        raise KeyError(name)

    file = parse(document(more="only: {users: [alice, bob, no], groups: [staff]}"), accounts=Accounts(hang, hang, 0.2))
    never.set()

    assert len(file.faults) == 4
    assert all("did not answer" in fault.text for fault in file.faults)
    assert asked == ["alice"]


def test_slow_answers_are_waited_for_in_all_not_each():
    def slow(name):
        time.sleep(0.02)
        return 1000

    names = ", ".join(f"user{n}" for n in range(200))
    faults = parse(document(more=f"only: {{users: [{names}]}}"), accounts=Accounts(slow, slow, 0.1)).faults

    assert len(faults) >= 190


def test_a_long_value_is_cut_in_a_fault():
    [fault] = read(document(more=f"only: {{users: [{'x' * 5000}]}}")).faults

    assert len(fault.text) < 400


def test_a_directory_service_that_fails_is_a_fault():
    def fail(name):
        raise OSError("no LDAP")

    [fault] = parse(document(more="only: {users: [alice]}"), accounts=Accounts(fail, fail)).faults

    assert "there is no user 'alice'" in fault.text


def test_a_uid_in_digits_needs_no_directory_service():
    def ask(name):
        raise AssertionError(name)

    [found] = parse(document(more="only: {users: [1234]}"), accounts=Accounts(ask, ask)).policies
    assert found.only.users == frozenset({1234})


def test_the_accounts_of_this_machine_are_asked():
    assert parse(document(more="only: {users: [root], groups: [root]}")).policies[0].only.users == frozenset({0})
    assert parse(document(more="only: {users: [no-such-user-here]}")).faults


def loaded(path, *, trusted_owner=False):
    return load_policies(str(path), trusted_owner=trusted_owner, accounts=accounts())


@pytest.mark.parametrize("kind", ["absent", "directory", "fifo", "unreadable name", "huge"])
def test_what_cannot_be_read_is_a_fault_of_the_whole_file(tmp_path, kind):
    path = tmp_path / "policy.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        path.write_text("#" * 70000)
    [fault] = loaded("" if kind == "unreadable name" else path).faults

    assert (fault.line, fault.excerpt) == (0, "")
    assert len(fault.lines(str(path))) <= 2


@pytest.fixture
def of_root(open_place):
    """A file that only root can have written, all the way from /."""
    (open_place / "etc").mkdir(mode=0o755)
    (open_place / "etc" / "policy.yaml").write_text(document())
    return str(open_place / "etc" / "policy.yaml")


def turn_into_a_link(path):
    os.rename(path, path + ".real")
    os.symlink(path + ".real", path)


# How another user than root could have written the file or turned the way to it.
WAYS = {
    "its owner": lambda path: os.chown(path, 12345, -1),
    "its group": lambda path: os.chmod(path, 0o664),
    "everybody": lambda path: os.chmod(path, 0o646),
    "the owner of its directory": lambda path: os.chown(os.path.dirname(path), 12345, -1),
    "the group of its directory": lambda path: os.chmod(os.path.dirname(path), 0o775),
    "a link": turn_into_a_link,
    "a link above": lambda path: turn_into_a_link(os.path.dirname(path)),
}


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777])  # in a sticky directory nobody can replace what is root's
def test_a_file_that_only_root_can_change_is_trusted(of_root, mode):
    os.chmod(os.path.dirname(of_root), mode)

    assert loaded(of_root, trusted_owner=True).faults == ()


@pytest.mark.root
@pytest.mark.parametrize("how", WAYS)
def test_a_file_that_another_user_can_change_is_refused(of_root, how):
    WAYS[how](of_root)

    [fault] = loaded(of_root, trusted_owner=True).faults
    assert fault.hint
    assert loaded(of_root).policies  # it is the trust alone that is lacking


def test_a_policy_about_those_who_were_told_alone_is_about_everybody_who_was():
    [policy] = read(document(more="only: {told: true}")).policies

    assert policy.told
    assert (policy.only.users, policy.only.kinds) == (None, None)
