"""Denied users and quarantined devices: for everybody, without a daemon, from files that root alone can write."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import Machine as Devices
from builders import a_device
from chances import luck
from daemons import a_daemon, somebodys
from guard_scene import SOMEBODY, a_scene
from nodes import GIB, Gpuguard, eventually
from own_claims import acquire, preview
from users import ALICE, BOB

from gpuguard.claims import restrictions
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.restrictions import DENIED, KEPT, QUARANTINED, Restriction, change, read_restrictions
from gpuguard.enforcement import actions
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.errors import LockDirectoryError
from gpuguard.model import Device, Event, Finding, Subject, Verdict
from gpuguard.policies.rules import RULES
from gpuguard.request import Request
from gpuguard.vendors import is_whole_uuid

root = pytest.mark.root
NOW = 1_800_000_000.0


def restrict(directory, kind, name, **fields):
    """Write a restriction of *name*."""
    restriction = Restriction(name, **{"since": time.time(), "reason": "a good reason", **fields})
    change(directory, kind, lambda restrictions: restrictions.update({name: restriction}))


def test_restrictions_come_back_as_they_were_written(directory):
    now = time.time()
    written = [
        Restriction("1001", NOW, now + 60, 'x"\u4f60\n', "the policy p", "bob"),
        Restriction("7", now),
        Restriction("8", now, now + 60, asked=((1.0, 2.5), (7.0, 8.0)), begins=now - 5, until_reboot=True),
        Restriction("9", now, process=(4711, 1.5)),
    ]
    change(directory, DENIED, lambda found: found.update({mark.name: mark for mark in written}))

    assert list(read_restrictions(directory, DENIED, now).values()) == written


def test_no_more_restrictions_are_kept_than_a_reader_takes(directory):
    many = {str(uid): Restriction(str(uid), NOW) for uid in range(restrictions.MAX_RESTRICTIONS)}
    change(directory, DENIED, lambda found: found.update(many))

    with pytest.raises(LockDirectoryError) as full:
        restrict(directory, DENIED, "one more")
    path = f"{directory.path}/denied.json"
    assert str(full.value) == f"{path} would become too long: end some of what is denied first."
    assert read_restrictions(directory, DENIED, NOW).keys() == many.keys()


def test_without_a_descriptor_left_no_restriction_is_overlooked_and_none_is_lost(directory, monkeypatch):
    restrict(directory, QUARANTINED, "GPU-1")
    really, file = os.open, str(Path(directory.path, "quarantined.json"))

    def full(path: str, *words: Any) -> int:
        if path == file:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return really(path, *words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OSError, match="Too many open files in system"):
            read_restrictions(directory, QUARANTINED, NOW)
        with pytest.raises(LockDirectoryError, match="Too many open files in system"):
            restrict(directory, QUARANTINED, "GPU-2")

    assert read_restrictions(directory, QUARANTINED, NOW).keys() == {"GPU-1"}


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_setting_the_clock_makes_no_restriction_shorter_or_longer(directory, monkeypatch, step):
    now, real = time.time(), time.time
    restrict(directory, KEPT, "1001", since=now, until=now + 3600)
    restrict(directory, DENIED, "1002", since=now)

    monkeypatch.setattr(time, "time", lambda: real() + step)
    restrict(directory, KEPT, "1003", until=time.time() + 60)  # the file is written anew
    until = read_restrictions(directory, KEPT, time.time())["1001"].until

    assert until and 3500 < until - time.time() <= 3600
    assert read_restrictions(directory, DENIED, time.time())["1002"].since == pytest.approx(now + step, abs=100)


def test_what_a_process_has_caused_ends_with_the_boot_of_that_process(directory, monkeypatch):
    restrict(directory, QUARANTINED, "GPU-1", process=(4711, 60.5))
    restrict(directory, QUARANTINED, "GPU-2")

    assert read_restrictions(directory, QUARANTINED, time.time())["GPU-1"].process == (4711, 60.5)
    monkeypatch.setattr(restrictions, "boot_id", lambda: "another")
    assert read_restrictions(directory, QUARANTINED, time.time()).keys() == {"GPU-2"}


def test_of_another_boot_only_the_time_of_day_is_known(directory, monkeypatch):
    restrict(directory, KEPT, "1001", until=NOW)

    monkeypatch.setattr(restrictions, "boot_id", lambda: "another")
    monkeypatch.setattr(restrictions, "_booted", lambda: 0.0)

    assert read_restrictions(directory, KEPT, NOW - 1)["1001"].until == NOW


def test_everybody_can_read_the_file_whatever_the_umask_and_without_restrictions_there_is_none(directory):
    file, before = Path(directory.path, "quarantined.json"), os.umask(0o077)
    try:
        restrict(directory, QUARANTINED, "GPU-1")
    finally:
        os.umask(before)

    assert file.stat().st_mode & 0o777 == 0o644
    change(directory, QUARANTINED, dict.clear)
    assert not file.exists()


def forged(path: Path, how: str) -> None:
    if how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "writable":
        path.chmod(0o646)
    elif how == "foreign":
        os.chown(path, SOMEBODY, SOMEBODY)
    else:
        path.unlink()
        {"fifo": os.mkfifo, "directory": os.mkdir}[how](path, 0o644)


@pytest.mark.parametrize("how", ["link", "fifo", "directory", "writable", pytest.param("foreign", marks=root)])
def test_a_forged_file_counts_for_nothing(directory, how):
    restrict(directory, QUARANTINED, "GPU-1")
    forged(Path(directory.path, "quarantined.json"), how)

    assert read_restrictions(directory, QUARANTINED, time.time()) == {}


def test_where_anybody_may_make_files_there_are_no_restrictions(tmp_path):
    flat = LockDirectory(str(tmp_path), str(tmp_path), str(tmp_path), prefix="gpuguard.")
    restrict(lock_directory(str(tmp_path / "own")), QUARANTINED, "GPU-1")
    shutil.copy(tmp_path / "own" / "quarantined.json", tmp_path)

    assert read_restrictions(flat, QUARANTINED, time.time()) == {}
    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup"):
        restrict(flat, QUARANTINED, "GPU-1")


WRITER = """
import sys, time
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.restrictions import Restriction, change
directory = lock_directory(sys.argv[1])
print("ready", flush=True)
while True:
    for number in range(1, 100):
        restriction = Restriction(f"GPU-{number}", time.time(), None, "x" * 200)
        change(directory, "quarantined", lambda others: others.update({restriction.name: restriction}))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_restrictions(directory):
    dice = luck(1)
    restrict(directory, QUARANTINED, "GPU-0")
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, directory.path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout and writer.stdout.readline()
            deadline = time.monotonic() + dice.uniform(0.0, 0.08)
            seen = []
            while time.monotonic() < deadline:
                seen.append("GPU-0" in read_restrictions(directory, QUARANTINED, time.time()))
            writer.send_signal(signal.SIGKILL)

        before = read_restrictions(directory, QUARANTINED, time.time())
        restrict(directory, QUARANTINED, "GPU-last")  # and the next writer is not held up

        assert all(seen) and "GPU-0" in before
        assert read_restrictions(directory, QUARANTINED, time.time()).keys() == before.keys() | {"GPU-last"}


def test_two_writers_lose_nothing(directory):
    patient = "from gpuguard.claims import restrictions; restrictions.WRITE_SECONDS = 60.0"
    code = WRITER.replace("while True:", "for _ in [1]:").replace('f"GPU-{number}"', 'f"{sys.argv[2]}-{number}"')
    words = [sys.executable, "-c", patient + code, directory.path]
    writers = [subprocess.Popen([*words, name], stdout=subprocess.DEVNULL) for name in "ab"]
    assert [writer.wait(120) for writer in writers] == [0, 0]

    assert len(read_restrictions(directory, QUARANTINED, time.time())) == 198


def test_a_writer_that_gets_one_of_two_locks_alone_keeps_neither(directory):
    """With a full disk under the daemon's files a daemon of root's kept the first, and no restriction changed again."""
    os.mkdir(f"{directory.path}/daemon", 0o755)
    os.mkdir(f"{directory.path}/daemon/marks.lock")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LockDirectoryError, match="Is a directory"):
        restrict(directory, DENIED, "1001")

    assert os.listdir("/proc/self/fd") == before
    os.rmdir(f"{directory.path}/daemon/marks.lock")
    restrict(directory, DENIED, "1001")
    assert read_restrictions(directory, DENIED, time.time()).keys() == {"1001"}


AN_HOUR = Restriction("1", NOW, NOW + 3600, "first")


@pytest.mark.parametrize(
    ("before", "fields", "counts"),
    [
        (None, {"until": NOW + 60}, True),
        (AN_HOUR, {"until": NOW + 3600}, False),
        (AN_HOUR, {"until": NOW + 3601}, True),
        (AN_HOUR, {"until": None}, True),
        (AN_HOUR, {"until": None, "process": (7, 1.0)}, False),  # it may end before the hour is over
        (replace(AN_HOUR, until=None), {"until": NOW + 9000}, False),
        (replace(AN_HOUR, until=None, process=(7, 1.0)), {"until": NOW + 9000}, False),
    ],
)
def test_of_two_restrictions_about_one_subject_the_longer_one_counts(before, fields, counts):
    new = Restriction("1", NOW, reason="then", **fields)
    found = {"1": before} if before else {}
    restrictions.extend(found, new)

    assert found == {"1": new if counts else before}


def test_a_reason_is_cut_where_it_is_longer_than_a_restriction_keeps():
    found: dict[str, Restriction] = {}
    for name, length in (("1", restrictions.MAX_REASON), ("2", restrictions.MAX_REASON + 1)):
        restrictions.extend(found, Restriction(name, NOW, None, "x" * length))

    assert {mark.reason for mark in found.values()} == {"x" * restrictions.MAX_REASON}


def test_a_restriction_holds_from_its_beginning_until_just_before_its_end():
    mark = Restriction("1", NOW, NOW + 20, begins=NOW + 10)

    assert [mark.holds(NOW + second) for second in (9, 10, 19, 20)] == [False, True, True, False]
    assert [mark.is_over(NOW + second) for second in (9, 10, 19, 20)] == [False, False, False, True]
    assert Restriction("1", NOW).holds(NOW)


UNTIL = time.strftime("%m-%d %H:%M", time.localtime(NOW))


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        (restrictions.denial_text, {}, "new claims of uid 7 are denied by the administrator"),
        (
            restrictions.denial_text,
            {"user": "bob\n", "by": "the policy\tp", "until": NOW, "reason": "too many\njobs"},
            f"new claims of bob\\n are denied by the policy\\tp until {UNTIL}: too many\\njobs",
        ),
        (restrictions.quarantine_text, {}, "quarantined by the administrator"),
        (
            restrictions.quarantine_text,
            {"by": "bob\n", "until": NOW, "reason": "XID 79\n"},
            f"quarantined by bob\\n until {UNTIL}: XID 79\\n",
        ),
    ],
)
def test_a_restriction_says_who_decided_until_when_and_why(text, fields, said):
    assert text(Restriction("7", NOW, **fields)) == said


def test_a_user_is_told_what_keeps_them_from_each_device(directory):
    restrict(directory, DENIED, "7", reason="")
    restrict(directory, QUARANTINED, "GPU-1", reason="XID 79")
    denied, quarantined = (
        "new claims of uid 7 are denied by the administrator",
        "quarantined by the administrator: XID 79",
    )

    def against(uid):
        return restrictions.restrictions_against(directory, ["GPU-0", "GPU-1"], uid, time.time())

    assert against(7) == {"GPU-0": denied, "GPU-1": quarantined}
    assert against(8) == against(None) == {"GPU-1": quarantined}


def test_a_quarantined_gpu_takes_its_instances_along(directory):
    parent = a_device(0, mig_mode=True)
    child = a_device(0, uuid="MIG-1", parent_uuid=parent.uuid, gpu_instance_id=1)
    restrict(directory, QUARANTINED, parent.uuid)

    _, choice = preview(Devices(parent, child), Request(num_gpus=1), directory)

    assert choice.devices == ()


def test_a_denied_user_may_divide_the_claim_that_they_have(directory):
    with acquire(Devices(a_device(0)), Request(), directory, environ={}) as claim:
        restrict(directory, DENIED, str(os.geteuid()))

        acquire(Devices(a_device(0)), Request(), directory, environ={"GPUGUARD_CLAIM": claim.id}).release()


def test_a_waiting_user_gets_the_device_when_the_denial_is_over(directory):
    over = time.time() + 1.0
    restrict(directory, DENIED, str(os.geteuid()), until=over)

    acquire(Devices(a_device(0)), Request(), directory, wait=60.0, environ={}).release()

    assert time.time() >= over


def a_verdict(action: str, subject: Subject, enforce: bool = True, **options: float) -> Verdict:
    finding = Finding("quota", subject, "has 6 GPUs, 4 are allowed", ())
    return Verdict(
        policy="greedy",
        finding=finding,
        action=action,
        step=0,
        since=0.0,
        enforce=enforce,
        options=tuple(options.items()),
    )


class Acting:
    """A guard with a directory."""

    def __init__(self, directory: LockDirectory, *devices: Device, writes: bool = True) -> None:
        self.machine, self.events = Devices(*(devices or gpus(4))), []
        self.directory, self.writes = directory, writes
        self.context = ActionContext(
            self.machine, self.write, lambda verdict, snapshot: True, enforce=True, directory=directory
        )

    def write(self, event: Event) -> bool:
        self.events.append((event.outcome, self.marks()))
        return self.writes

    def marks(self) -> list[str]:
        return sorted(
            name for kind in (DENIED, QUARANTINED) for name in read_restrictions(self.directory, kind, time.time())
        )

    def act(self, verdict: Verdict) -> str:
        [outcome] = actions.act(verdict, self.machine.sample((), None), self.context)
        return outcome.word


BOBS = Subject("user", None, uid=SOMEBODY, user="bob")


@pytest.mark.parametrize("action", ["deny", "quarantine"])
@pytest.mark.parametrize(
    ("enforce", "writes", "word"), [(False, True, "dry run"), (True, False, "not recorded"), (True, True, "done")]
)
def test_only_what_is_enforced_and_was_written_down_before_is_done(directory, action, enforce, writes, word):
    guard = Acting(directory, writes=writes)
    subject = replace(BOBS, device=guard.machine.devices[0].uuid)

    assert guard.act(a_verdict(action, subject, enforce, **{"for": 60.0})) == word

    found = read_restrictions(directory, DENIED if action == "deny" else QUARANTINED, time.time()).values()
    about = (str(SOMEBODY), "bob") if action == "deny" else (subject.device, None)
    facts = [(one.name, one.user, one.by, (one.until or 0.0) - one.since) for one in found]
    assert facts == [(*about, "the policy greedy", 60.0)] * (word == "done")
    assert guard.events == [("dry run" if word == "dry run" else "about to", [])]


def gpus(count: int, *, instances: int = 0) -> list[Device]:
    """So many GPUs, each divided into that many instances."""
    wholes = [a_device(index, mig_mode=bool(instances)) for index in range(count)]
    parts = [a_device(one.index, uuid=f"MIG-{one.index}-{number}", parent_uuid=one.uuid, gpu_instance_id=number)
             for one in wholes for number in range(1, instances + 1)]  # fmt: skip
    return [*wholes, *parts]


@pytest.mark.parametrize(
    ("devices", "meant", "most"),
    [
        *((gpus(count), slice(None), most) for count, most in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 2))),
        (gpus(1, instances=7), slice(1), 0),  # a GPU takes its instances along
        (gpus(1, instances=7), slice(1, None), 3),
        (gpus(2, instances=2), slice(2), 1),
    ],
)
def test_a_policy_takes_at_most_half_of_what_can_be_claimed_out_of_service(directory, devices, meant, most):
    guard = Acting(directory, *devices)
    words = [guard.act(a_verdict("quarantine", Subject("device", one.uuid))) for one in devices[meant]]

    assert words == ["done"] * most + ["refused"] * (len(words) - most)


def test_an_action_that_cannot_be_done_says_so(directory, monkeypatch):
    def fail(*of):
        raise LockDirectoryError("the disk is full")

    monkeypatch.setattr("gpuguard.claims.restrictions.change", fail)
    with a_scene() as scene:
        assert scene.act("deny").word == "failed"
        scene.context(directory=directory)
        assert (scene.act("deny").word, scene.events[-1].outcome) == ("failed", "failed")
        assert "the disk is full" in str(scene.events[-1].message)


POLICY = """
version: 1
mode: enforce
policies:
  - name: hogs
    when: {memory: {above: 20GiB}}
    for: 300ms
    steps: [deny, {do: quarantine, for: 2h}]
"""


@root
@pytest.mark.parametrize(("options", "done"), [(["--enforce"], True), ([], False)])
def test_a_daemon_denies_and_quarantines_by_policy(tmp_path, options, done):
    with a_daemon(tmp_path, POLICY, *options, named=True) as daemon, somebodys(daemon.node, "0", 40 * GIB) as offender:
        [event] = daemon.until("quarantine")
        if done:  # what it is about to do is in the log before it is done
            assert eventually(lambda: json.loads(daemon.gpuguard("quarantine", "--json").stdout)["quarantined"])
        outcomes = {each["outcome"] for each in (event, *daemon.events("deny"))}
        explained = daemon.gpuguard("explain", "--devices", "0", "--mine-as-free").stdout
        denied = json.loads(daemon.gpuguard("deny", "--json").stdout)["denied"]

        assert offender.poll() is None
    # On a stalled machine the sample may be too old at first.
    assert outcomes - {"refused"} == ({"about to"} if done else {"dry run"})
    assert ("quarantined by the policy hogs until " in explained) == done
    assert [(each["name"], each["by"]) for each in denied] == [(str(SOMEBODY), "the policy hogs")] * done


def test_a_device_is_quarantined_and_put_back_by_command(gpuguard):
    done = gpuguard("quarantine", "1", "--reason", "XID 79")
    [found] = json.loads(gpuguard("quarantine", "--json").stdout)["quarantined"]
    listed = gpuguard("quarantine").stdout
    chosen = gpuguard("select", "--devices", "1")
    seen = json.loads(gpuguard("who", "--json").stdout)["devices"]
    ended = [gpuguard("quarantine", found["name"][:12], "--end").returncode for _ in "12"]

    assert (done.returncode, found["reason"], done.stdout) == (0, "XID 79", listed)
    assert listed.startswith(f"GPU 1 (H100 80GB HBM3, {found['name']})  until it is ended  by ")
    assert (chosen.returncode, chosen.stdout) == (1, "") and "quarantined" in chosen.stderr
    assert [device["state"] for device in seen] == ["free", "unhealthy"]
    who = "the administrator" if os.geteuid() == 0 else "the owner of the directory"
    assert seen[1]["reason"] == f"quarantined by {who}: XID 79"
    assert ended == [0, 1]
    assert [event["outcome"] for event in gpuguard.events("quarantine")] == ["quarantined", "ended"]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("GPU-01234567-89ab-cdef-0123-456789abcdef", True),
        ("MIG-01234567-89ab-cdef-0123-456789abcdef", True),
        ("GPU-e3aa140f9a5f9e31", True),
        ("XCP-e3aa140f9a5f9e31-7", True),
        ("XCP-0000-03-00-0-1", True),
        ("PCI-0000-03-00-0", True),
        ("GPU-01234567-89ab", False),
        ("GPU-e3aa140f9a5f", False),
        ("XCP-e3aa140f9a5f9e31", False),
        ("PCI-0000-03", False),
        ("3", False),
    ],
)
def test_of_every_vendor_it_is_known_what_a_whole_uuid_is(text, whole):
    assert is_whole_uuid(text) is whole


def test_a_whole_uuid_is_quarantined_without_asking_the_driver(tmp_path):
    uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_BACKEND="nvml", LD_LIBRARY_PATH="/nonexistent")

    assert gpuguard("quarantine", uuid).returncode == 0
    assert gpuguard("quarantine").stdout.startswith(f"{uuid}  until it is ended  ")
    assert gpuguard("quarantine", uuid, "--end").returncode == 0


@root
def test_root_denies_one_user_and_not_the_other(admin):
    denied = admin(None, "deny", BOB.pw_name, "--for", "2h", "--reason", "ask me first")
    refused = admin(BOB, "run", "--no-wait", "--", "true")
    waited = admin(BOB, "run", "--wait", "300ms", "--", "true")
    allowed = admin(ALICE, "run", "--no-wait", "--", "true")
    ended = admin(None, "deny", BOB.pw_name, "--end")
    again = admin(BOB, "run", "--no-wait", "--", "true")

    assert (denied.returncode, refused.returncode, allowed.returncode) == (0, 75, 0), denied.stderr
    assert "ask me first" in refused.stderr and " until " in refused.stderr
    assert "not queued yet: new claims of " in waited.stderr
    assert (ended.returncode, again.returncode) == (0, 0)


@root
def test_a_quarantine_holds_for_everybody_and_only_root_can_make_or_end_it(admin):
    quarantined = admin(None, "quarantine", "3", "--reason", "XID 79")
    theirs = [admin(BOB, "quarantine", *words) for words in (["3", "--end"], ["2"])]
    refused = [admin(user, "run", "--no-wait", "--devices", "3", "--", "true") for user in (ALICE, BOB, None)]

    assert quarantined.returncode == 0, quarantined.stderr
    assert [done.returncode for done in theirs] == [1, 1] and "sudo" in theirs[0].stderr
    assert [done.returncode for done in refused] == [75, 75, 75]
    assert all("quarantined by the administrator: XID 79" in done.stderr for done in refused)


# Over a boot.


@pytest.fixture
def copies(directory, tmp_path, monkeypatch):
    """Where the copies lie that outlive a boot: root's, and the daemon's."""
    places = {directory.path: str(tmp_path / "admin"), f"{directory.path}/daemon": str(tmp_path / "state")}
    monkeypatch.setattr(restrictions, "COPIES", places)
    return tmp_path / "admin"


@pytest.fixture
def boots(monkeypatch):
    """Let the machine be started again."""

    def boot() -> None:
        monkeypatch.setattr(restrictions, "boot_id", lambda: "another0")

    return boot


def brought_back(directory, copies, kind) -> dict[str, Restriction]:
    """What holds after the directory was made anew, as systemd-tmpfiles does it."""
    file = Path(directory.path, f"{kind}.json")
    file.unlink(missing_ok=True)
    copy = copies / f"{kind}.json"
    if copy.exists():
        file.write_bytes(copy.read_bytes())
    return read_restrictions(directory, kind, time.time())


@pytest.mark.parametrize("kind", [DENIED, QUARANTINED])
def test_what_was_decided_outlives_a_boot_and_what_is_until_then_does_not(directory, copies, boots, kind):
    """A GPU set aside for XID 79 was free after the reboot that one does for it."""
    restrict(directory, kind, "lasts", until=time.time() + 3600)
    restrict(directory, kind, "until a boot", until_reboot=True)
    restrict(directory, kind, "of a process", process=(4711, 1.0))
    assert read_restrictions(directory, kind, time.time()).keys() == {"lasts", "until a boot", "of a process"}
    boots()

    [left] = brought_back(directory, copies, kind).values()
    assert (left.name, left.reason) == ("lasts", "a good reason")
    assert left.until and left.until > time.time() + 3500


def test_a_directory_that_is_not_lost_by_a_boot_forgets_what_was_until_then(directory, boots):
    restrict(directory, QUARANTINED, "lasts")
    restrict(directory, QUARANTINED, "until a boot", until_reboot=True)
    boots()

    assert read_restrictions(directory, QUARANTINED, time.time()).keys() == {"lasts"}


def test_what_is_ended_does_not_come_back_with_a_boot(directory, copies, boots):
    restrict(directory, QUARANTINED, "GPU-1")
    change(directory, QUARANTINED, lambda found: found.clear())
    boots()

    assert brought_back(directory, copies, QUARANTINED) == {}
    assert not (copies / "quarantined.json").exists()


def test_root_takes_over_the_copy_of_what_the_daemon_decided(directory, copies):
    Path(directory.path, "daemon").mkdir(mode=0o755)
    of_the_daemon = copies.with_name("state") / "quarantined.json"
    of_the_daemon.parent.mkdir()
    of_the_daemon.touch()
    restrict(directory, QUARANTINED, "GPU-1")

    assert (copies / "quarantined.json").exists()
    assert not of_the_daemon.exists()


@root
def test_a_copy_that_cannot_be_written_is_a_fault_and_changes_nothing(directory, copies):
    copies.write_text("a file in its place")

    with pytest.raises(LockDirectoryError, match="cannot be written"):
        restrict(directory, QUARANTINED, "GPU-1")
    assert read_restrictions(directory, QUARANTINED, time.time()) == {}


def test_one_that_begins_later_holds_from_then_on_and_is_shown_before(directory):
    now = time.time()
    restrict(directory, QUARANTINED, "GPU-1", begins=now + 600, until=now + 1200)
    restrict(directory, QUARANTINED, "GPU-2")

    def names(at: float, **how: bool) -> set[str]:
        return set(read_restrictions(directory, QUARANTINED, at, **how))

    assert (names(now), names(now, planned=True)) == ({"GPU-2"}, {"GPU-1", "GPU-2"})
    assert (names(now + 700), names(now + 1300, planned=True)) == ({"GPU-1", "GPU-2"}, {"GPU-2"})


@pytest.mark.parametrize(("rule", "lasts"), [("health", True), ("temperature", False)])
def test_what_a_policy_quarantines_outlives_a_boot_only_where_a_boot_mends_nothing(directory, boots, rule, lasts):
    guard = Acting(directory, *[a_device(n) for n in range(4)])
    verdict = a_verdict("quarantine", Subject("device", a_device(0).uuid))
    guard.act(replace(verdict, finding=replace(verdict.finding, rule=rule), kind=RULES[rule].kind))
    assert read_restrictions(directory, QUARANTINED, time.time())
    boots()

    assert bool(read_restrictions(directory, QUARANTINED, time.time())) is lasts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quarantine", "1", "--until-reboot"), "until it is ended, until the next boot"),
        (("quarantine", "1", "--from", "in 2h", "--for", "1h"), "from "),
        (("quarantine", "1", "--from", "mon 08:00"), "from "),
    ],
)
def test_the_command_says_when_it_begins_and_that_it_ends_with_a_boot(gpuguard, words, said):
    done = gpuguard(*words)

    assert done.returncode == 0 and said in done.stdout
    assert gpuguard("quarantine", "1", "--end").returncode == 0
    assert gpuguard("quarantine", "--from", "in 2h").returncode != 0


def test_one_that_begins_later_frees_nothing_that_is_set_aside_now(gpuguard):
    assert gpuguard("quarantine", "1", "--reason", "XID 79").returncode == 0
    later = gpuguard("quarantine", "1", "--from", "in 2h")

    assert later.returncode != 0 and "already" in later.stderr
    assert "XID 79" in gpuguard("quarantine").stdout
