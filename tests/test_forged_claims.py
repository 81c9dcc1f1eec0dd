"""Records that copy what others have: nobody is hit for what another user writes."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from claimholders import GPUS, Holder, a_holder, a_record, free, release
from daemons import SOMEBODY, a_daemon, somebodys
from fake_nvml import FakeNvml
from guarded import set_user_id_program
from nodes import Gpuguard, eventually

from gpuguard import source
from gpuguard.claims import release as releasing
from gpuguard.claims.directory import lock_directory, open_lock
from gpuguard.claims.records import probe, record_path
from gpuguard.claims.release import lock_handle
from gpuguard.errors import ClaimError
from gpuguard.files import file_system
from gpuguard.jobs import isolation
from gpuguard.model import ClaimRecord, ProcessStat
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.policies.view import RuleView
from gpuguard.units import parse_memory_amount

MALLORY = 20002
QUOTA = """
version: 1
mode: enforce
policies:
  - {name: quota, for: 400ms, when: {quota: {claims: 1}}, steps: [terminate]}
  - {name: hogs, for: 400ms, when: {memory: {above: 35GiB}}, steps: [terminate]}
"""


@pytest.mark.root
def test_who_gives_a_claim_in_excess_the_id_of_hers_has_her_job_live(tmp_path: Path) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon, ExitStack() as stack:
        hers, records, now = daemon.uuid(0), tmp_path / "claims" / "claims", time.time()
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, str(tmp_path / "claims" / "lock" / hers)))
        stack.enter_context(a_record(records, SOMEBODY, "c0ffee", since=now - 60, devices=[hers]))
        stack.enter_context(a_record(records, MALLORY, "1", since=now - 20, devices=[]))
        stack.enter_context(a_record(records, MALLORY, "c0ffee", since=now - 10, devices=[]))

        assert eventually(lambda: any(event.get("claim") == "c0ffee" for event in daemon.events())), daemon.said()
        assert (job.poll(), daemon.events("terminate")) == (None, [])


@pytest.mark.root
@pytest.mark.parametrize("since", [10**400, float("nan")], ids=["huge", "none"])
def test_no_record_switches_the_guard_off(tmp_path: Path, since: float) -> None:
    with a_daemon(tmp_path, QUOTA, "--enforce", named=True) as daemon:
        lock = str(tmp_path / "claims" / "lock" / daemon.uuid(0))
        with (
            a_record(tmp_path / "claims" / "claims", MALLORY, "f00", since=since, devices=[]),
            somebodys(daemon.node, "0", 40 * GIB, lock) as offender,
        ):
            assert offender.wait(20) == -signal.SIGTERM, daemon.said()


@pytest.mark.parametrize(
    "forged",
    [
        {"id": "c1"},  # that of her claim
        {"pid": 21},  # her process
        {"pid": 11},  # what started it
        {"pid": 11, "holders": (31,)},  # the same by a user whose own processes can be seen
    ],
)
def test_what_a_record_copies_from_another_accuses_nobody(forged):
    device = a_device(processes=(a_process(21, memory_used=12 * GIB),))
    slot = f"{device.uuid}.slot"
    hers = a_claim_record(device, id="c1", memory=20 * GIB, slots=(f"{slot}0",), holders=(11,), since=2.0)
    bobs = {"id": "c2", "uid": 1002, "user": "bob", "pid": 31, "since": 1.0, "memory": GIB, "slots": (f"{slot}1",)}
    his = a_claim_record(device, **{**bobs, **forged})
    seen = {21: ProcessStat(parent=11, state="S"), 11: ProcessStat(parent=0, state="S", uid=1001)}

    rule = MemoryRule(parse_memory_amount("share"), per="claim")
    assert list(rule.check(RuleView(a_snapshot(device, claims=(his, hers)), seen=seen))) == []


# A claim whose only holder is a program that is root in effect.
HELD_BY_ROOTS_PROGRAM = """
import fcntl, json, os, pwd, sys
from types import SimpleNamespace
from gpuguard.claims.claim import Claim, JobDetails, lock_device as take_lock
from gpuguard.claims.directory import lock_directory
path, uuid, program = sys.argv[1:]
os.setgroups([]); os.setresgid(*[20001] * 3); os.setresuid(*[20001] * 3)
directory = lock_directory(path)
claim = Claim("c0ffee", (SimpleNamespace(uuid=uuid, index=0),), (take_lock(directory, uuid, fcntl.LOCK_EX),))
claim.write_record(directory, JobDetails(command=["x"]))
for descriptor in claim.pass_fds:
    os.set_inheritable(descriptor, True)
os.execv(program, ["sleep", "600"])
"""


@pytest.mark.root
def test_a_claim_held_by_a_program_with_the_set_user_id_bit_is_not_roots(tmp_path: Path) -> None:
    """It was, to the guard: and what is root's is out of every policy's reach."""
    program, place = set_user_id_program(tmp_path), tmp_path / "claims"
    directory = lock_directory(str(place))
    os.close(open_lock(directory, "GPU-a"))
    with subprocess.Popen([sys.executable, "-c", HELD_BY_ROOTS_PROGRAM, str(place), "GPU-a", program]) as holder:
        try:
            assert eventually(lambda: Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n")
            [claim] = probe(directory, ["GPU-a"])
            handle = release(directory, claim)
        finally:
            holder.kill()

    assert (claim.uid, claim.id, claim.holders, handle.holder) == (SOMEBODY, "c0ffee", (holder.pid,), holder.pid)


@pytest.mark.parametrize("torn", ['{"id": "c0', "{", '{"since": "\\q"}', "{1: 2}", "[" * 4000])
@pytest.mark.parametrize("words", [["who"], ["select"], ["explain"], ["queue"], ["run", "--", "true"], ["release"]])
def test_a_file_that_is_no_json_stops_nobody(fake: FakeNvml, tmp_path: Path, torn: str, words: list[str]) -> None:
    """In a process that has not loaded json the parser has another error of its own: this stopped everybody once."""
    gpuguard = Gpuguard(tmp_path, fake)
    with gpuguard.start("run", "--", "sleep", "60") as job, ExitStack() as stack:
        stack.callback(job.terminate)
        assert eventually(lambda: any((tmp_path / "claims" / "claims").glob("claim.*")))
        for kind in ("claim", "ticket", "reserve"):
            file = stack.enter_context((tmp_path / f"claims/claims/{kind}.{os.getuid()}.torn.json").open("x"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(torn)
            file.flush()
        done = gpuguard(*words)

    assert (done.returncode, "inside gpuguard" in done.stderr) == (0, False), done.stderr


def rewritten(holder: Holder, descriptors: object) -> ClaimRecord | None:
    """Its record, which lists these descriptors from now on."""
    path = Path(record_path(holder.directory, holder.uid, holder.id))
    content = path.read_text()
    path.write_text(content[: content.index('"descriptors"')] + f'"descriptors": {json.dumps(descriptors)}}}')
    return holder.record()


@pytest.mark.parametrize("descriptors", [[], [0], [2**19], [-1], ["3"], None, "3", [True], {}, 7, list(range(500))])
def test_whatever_a_record_says_of_descriptors_its_claim_is_released_and_no_other_one(directory, descriptors):
    """A user who wrote nonsense there, or nothing, kept the devices for ever, whatever a policy says."""
    with a_holder(directory, GPUS[0]) as holder, a_holder(directory, GPUS[1], name="other"):
        release(directory, rewritten(holder, descriptors))

        assert free(directory) == [GPUS[0], *GPUS[2:]]
        assert holder.does("claim.reassert()").startswith("ClaimLost")


def test_two_who_release_the_claims_of_one_user_at_once_do_not_take_each_other_for_silent(directory, monkeypatch):
    real, both = releasing._is_lock, threading.Barrier(2)
    monkeypatch.setattr(releasing, "_is_lock", lambda *some: both.wait(10) >= 0 and real(*some))
    with a_holder(directory, GPUS[0]) as one, a_holder(directory, GPUS[1], name="other") as two:
        found: list[int] = []

        def released(holder: Holder) -> None:
            found.append(release(directory, holder.record()).holder)

        threads = [threading.Thread(target=released, args=(holder,)) for holder in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert ({*found}, free(directory)) == ({one.pid, two.pid}, list(GPUS))


def test_a_record_that_lists_any_number_of_files_fills_nobodys_table_of_open_files(directory, monkeypatch):
    seen, real = [], releasing._is_lock

    def is_lock(*each: Any) -> bool:
        seen.append(len(os.listdir("/proc/self/fd")))
        return real(*each)

    monkeypatch.setattr(releasing, "_is_lock", is_lock)
    with a_holder(directory, GPUS[0]) as holder, ExitStack() as stack:
        holder.does("globals().update(files=[os.open('/dev/null', os.O_RDONLY) for _ in range(100)])")
        for _ in range(3):
            fork = int(holder.does("os.fork() or __import__('time').sleep(60)"))
            stack.callback(os.kill, fork, signal.SIGKILL)
        before = len(os.listdir("/proc/self/fd"))
        with suppress(ClaimError), lock_handle(directory, rewritten(holder, list(range(100)))):
            pass

    assert len(seen) > 100 and max(seen) < before + 10


ROOT = Path(__file__).resolve().parent.parent
PLACES = ["a\rb", "a\vb\fc", "m\ra\vb\vc\vd\v/proc", "\x1c\x85\u2028", "a b\tc\nd\\040e", "#", "0::", " - cgroup2 "]
LOOK = """
import os, subprocess, sys
sys.path[:0] = sys.argv[1:3]
import test_forged_claims
told = [test_forged_claims.all_that_is_read()]
for place in map(os.fsencode, sys.argv[4:]):
    os.makedirs(os.fsencode(sys.argv[3]) + b"/" + place)
    subprocess.run(["mount", "-t", "ramfs", "none", os.fsencode(sys.argv[3]) + b"/" + place], check=True)
    told.append(test_forged_claims.all_that_is_read())
assert told == told[:1] * len(told), told
"""


def all_that_is_read() -> list[object]:
    """What is asked of the mounts of this machine."""
    hidden = source._processes_are_hidden(), source.hidepid_in(Path("/proc/self/mountinfo").read_bytes())
    return [*hidden, *map(file_system, ("/", "/proc", "/sys", "/dev/shm"))]


@pytest.mark.root
@pytest.mark.parametrize("options", ["hidepid=0", "hidepid=2"])
def test_a_mount_of_a_users_changes_nothing_that_is_known_of_others(tmp_path: Path, options: str) -> None:
    """It hid that users do not see each other, so that the daemon showed everybody's command lines to all."""
    mount = f'mount -t proc -o {options} proc /proc && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", LOOK, str(ROOT), str(ROOT / "tests")]
    done = subprocess.run([*words, str(tmp_path), *PLACES], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", "\r\v\f\x1c\x1d\x1e\x85\u2028")
def test_the_name_of_a_cgroup_is_one_name(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the hierarchy of version 1 stands in front, and both are their user's who may make some below."""
    files = {
        "/proc/self/cgroup": f"1:name=systemd:/u{end}0::/other\n0::/mine{end}0::/another\n",
        "/proc/self/mountinfo": f"24 22 0:22 / /home/u/{end}x rw - fuse x rw\n"
        "25 22 0:23 / /sys/fs/cgroup rw - cgroup2 c rw\n",
    }
    monkeypatch.setattr("builtins.open", lambda path, **how: io.TextIOWrapper(io.BytesIO(files[path].encode()), **how))
    monkeypatch.setattr(os, "access", lambda path, how: True)

    assert isolation.own_cgroup() == f"/sys/fs/cgroup/mine{end}0::/another"
