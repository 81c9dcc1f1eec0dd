"""Records that copy what others have, and locks that only seem to be held: they harm no other user."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from claimholders import GPUS, Holder, a_holder, a_ready_child, a_record, by_hand, free, release, see_locks_alone
from daemons import SOMEBODY, a_daemon, somebodys
from fake_nvml import FakeNvml
from guard_scene import set_user_id_program
from nodes import Gpuguard, eventually
from sources import ROOT

from gpuguard import procfs, source
from gpuguard.claims import unlock as releasing
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.claims.holders import holders_of, inode_of, locked_inode
from gpuguard.claims.records import probe, record_path
from gpuguard.claims.unlock import lock_handle
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
        for device, name in ((1, "1"), (2, "c0ffee")):
            uuid = daemon.uuid(device)
            stack.enter_context(a_ready_child(by_hand(str(tmp_path / "claims" / "lock" / uuid), MALLORY)))
            stack.enter_context(a_record(records, MALLORY, name, since=now - 10, devices=[uuid]))

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
            assert offender.wait(60) == -signal.SIGTERM, daemon.said()


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


def test_a_record_that_lasts_for_ages_says_nothing_of_its_end(tmp_path: Path) -> None:
    directory = lock_directory(str(tmp_path / "claims"))
    with a_holder(directory, "GPU-a") as holder:
        path = Path(record_path(directory, holder.uid, holder.id))
        path.write_text(json.dumps({**json.loads(path.read_text()), "ends": 2**50, "since": 2**34, "expected": 5e9}))
        [claim] = probe(directory, ["GPU-a"])

    assert (claim.ends, claim.since, claim.expected) == (None, None, 5e9)


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


def test_a_file_that_is_no_json_stops_nobody(fake: FakeNvml, tmp_path: Path) -> None:
    """In a process that has not loaded json the parser has another error of its own: this stopped everybody once."""
    gpuguard = Gpuguard(tmp_path, fake)
    with gpuguard.start("run", "--", "sleep", "60") as job, ExitStack() as stack:
        stack.callback(job.terminate)
        assert eventually(lambda: any((tmp_path / "claims" / "claims").glob("claim.*")))
        torn = ('{"id": "c0', "{", '{"since": "\\q"}', "{1: 2}", "[" * 4000)
        for kind, (number, text) in product(("claim", "ticket", "reserve"), enumerate(torn)):
            file = stack.enter_context((tmp_path / f"claims/claims/{kind}.{os.getuid()}.torn{number}.json").open("x"))
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(text)
            file.flush()
        for words in ("who", "select", "explain", "queue", "run -- true", "release"):
            done = gpuguard(*words.split())
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


PLACES = ["a\rb", "a\vb\fc", "m\ra\vb\vc\vd\v/proc", "\x1c\x85\u2028", "a b\tc\nd\\040e", "#", "0::", " - cgroup2 "]
LOOK = """
import os, subprocess, sys
sys.path[:0] = sys.argv[1].split(":")
import test_forged_claims
told = [test_forged_claims.all_that_is_read()]
for place in map(os.fsencode, sys.argv[3:]):
    os.makedirs(os.fsencode(sys.argv[2]) + b"/" + place)
    subprocess.run(["mount", "-t", "ramfs", "none", os.fsencode(sys.argv[2]) + b"/" + place], check=True)
    told.append(test_forged_claims.all_that_is_read())
assert told == told[:1] * len(told), told
"""


def all_that_is_read() -> list[object]:
    """What is asked of the mounts of this machine."""
    hidden = source._processes_are_hidden(), source.hidepid()
    return [*hidden, *map(file_system, ("/", "/proc", "/sys", "/dev/shm"))]


@pytest.mark.root
@pytest.mark.parametrize("options", ["hidepid=0", "hidepid=2"])
def test_a_mount_of_a_users_changes_nothing_that_is_known_of_others(tmp_path: Path, options: str) -> None:
    """It hid that users do not see each other, so that the daemon showed everybody's command lines to all."""
    mount = f'mount -t proc -o {options} proc /proc && exec "$@"'
    places = f"{ROOT}:{ROOT}/tests/support:{ROOT}/tests"
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", LOOK, places]
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


POLICY = """
version: 1
mode: enforce
policies:
  - {name: shares, for: 400ms, when: {memory: {above: share, per: claim}}, steps: [terminate]}
  - {name: strangers, for: 400ms, when: {trespass: {}}, steps: [terminate]}
"""
PRETEND = """
import fcntl, os, subprocess, sys
way, path, uid = sys.argv[1:]
if way == "a file of his own at that path":
    subprocess.run(["mount", "-t", "tmpfs", "none", os.path.dirname(path)], check=True)
    with open(path, "x") as file:
        os.fchmod(file.fileno(), 0o444)
file = os.open(path, os.O_RDONLY)
(fcntl.lockf if way == "another kind of lock" else fcntl.flock)(file, fcntl.LOCK_SH)
os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
print("ready", flush=True)
sys.stdin.read()
"""
WAYS = {"another kind of lock": [], "a file of his own at that path": ["unshare", "-m"]}


@contextmanager
def a_pretender(way: str, path: str, uid: int = MALLORY) -> Iterator[int]:
    """A process of *uid*'s that does as if it held the lock at *path*."""
    with a_ready_child([*WAYS[way], sys.executable, "-c", PRETEND, way, path, str(uid)]) as child:
        yield child.pid


@pytest.mark.root
@pytest.mark.parametrize("explained", [True, False], ids=["with a record", "without one"])
@pytest.mark.parametrize("way", WAYS)
def test_who_pretends_to_hold_her_lock_has_her_job_live(tmp_path: Path, way: str, explained: bool) -> None:
    """Her process was counted to his claim, whose record promised a byte, or was a stranger there: she was ended."""
    with a_daemon(tmp_path, POLICY, "--enforce", named=True) as daemon, ExitStack() as stack:
        hers, records = daemon.uuid(0), tmp_path / "claims" / "claims"
        lock = str(tmp_path / "claims" / "lock" / hers)
        job = stack.enter_context(somebodys(daemon.node, "0", 30 * GIB, lock))
        if explained:
            stack.enter_context(a_record(records, SOMEBODY, "1", devices=[hers], since=2.0, memory=40 * GIB))
        pid = stack.enter_context(a_pretender(way, lock))
        stack.enter_context(a_record(records, MALLORY, "1", devices=[hers], since=1.0, memory=1))
        before = daemon.state()["snapshot"]["clock"]
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > before + 1.5), daemon.said()

        assert (job.poll(), daemon.events("terminate")) == (None, [])
        claims = {one["uid"]: one["holders"] for one in daemon.state()["snapshot"]["claims"]}
        assert claims[SOMEBODY] == [job.pid]
        assert pid not in claims.get(MALLORY, [])


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    found = lock_directory(str(tmp_path / "claims"))
    os.close(open_lock(found, "GPU-a"))
    return found


def seen(directory: LockDirectory) -> dict[str, dict[int, int]]:
    return holders_of(directory, {"GPU-a"}, lambda uid: True)


@pytest.mark.root
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shown", ["all files", "locks alone"])
def test_a_pretender_is_no_holder(directory, way, shown, monkeypatch):
    """Also where the guard may not look at what a file is, but only at what is locked."""
    if shown == "locks alone":
        see_locks_alone(monkeypatch)
    with a_pretender(way, directory.lock_path("GPU-a")):
        assert seen(directory) == {}
        with a_pretender("another kind of lock", directory.lock_path("GPU-a"), SOMEBODY):
            assert seen(directory) == {}


# Of an overlay, as of a Btrfs, stat() says another device than the kernel does of its locks.
TWO_NUMBERS = """
import fcntl, os, subprocess
from gpuguard import source as state
from gpuguard.claims import holders
from gpuguard.claims.directory import LockDirectory
for name in ("low", "high"):
    os.mkdir(name)
    subprocess.run(["mount", "-t", "tmpfs", "none", name], check=True)
layers = [f"low/{name}" for name in ("files", "work")] + ["high/files", "both"]
for place in (*layers, "high/work"):
    os.mkdir(place)
subprocess.run(["mount", "-t", "overlay", "none", "-o", "lowerdir=low/files,upperdir=high/files,workdir=high/work",
    "both"], check=True)
place = os.path.abspath("both")
file = os.open("both/GPU-a", os.O_RDWR | os.O_CREAT)
before = state._is_locked("both/GPU-a")
fcntl.flock(file, fcntl.LOCK_EX)
device = os.stat("both/GPU-a").st_dev
told = holders.inode_of("both/GPU-a")
print(told.startswith(f"{os.major(device):02x}:{os.minor(device):02x}:"), before, state._is_locked("both/GPU-a"))
found = holders.holders_of(LockDirectory(place, place, place), {"GPU-a"}, lambda uid: True)
print(found == {"GPU-a": {os.getpid(): 0}})
print(list(holders.locked_by(os.getpid(), 0, 5.0)) == [file])
print(holders.flock_holder(file) == os.getpid())
"""


ELSEWHERE = """
import fcntl, json, os, subprocess, sys
locks, place, record, uid = sys.argv[1:]
subprocess.run(["mount", "--bind", locks, place], check=True)
file, said = os.open(f"{place}/GPU-a", os.O_RDONLY), os.open(record, os.O_RDWR | os.O_CREAT, 0o644)
os.write(said, json.dumps({"schema": 1, "devices": ["GPU-a"], "pid": 2, "descriptors": []}).encode())
os.fchown(said, int(uid), -1)
[fcntl.flock(one, fcntl.LOCK_EX) for one in (file, said)]
os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_a_lock_that_was_opened_where_the_directory_is_mounted_elsewhere_has_a_holder_and_can_be_released(
    directory: LockDirectory, tmp_path: Path
) -> None:
    """Any user can mount it so in namespaces of their own, and would hold a GPU that no policy can take back."""
    os.close(open_lock(directory, "GPU-a"))
    record, place = record_path(directory, MALLORY, "abcdef12"), tmp_path / "elsewhere"
    place.mkdir()
    words = ["unshare", "-m", sys.executable, "-c", ELSEWHERE, directory.locks, str(place), record, str(MALLORY)]
    with a_ready_child(words) as child:
        (claim,) = probe(directory, ["GPU-a"])
        assert (claim.id, claim.holders) == ("abcdef12", (child.pid,))
        with lock_handle(directory, claim) as handle:
            assert (len(handle.locks), handle.holder) == (1, child.pid)


@pytest.mark.root
def test_a_holder_is_found_where_the_kernel_counts_devices_in_two_ways(tmp_path: Path) -> None:
    words = ["unshare", "-m", sys.executable, "-c", TWO_NUMBERS]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert told.stdout.split() == ["False", "False", "True", "True", "True", "True"], told.stderr


OF_EVERY_FILE = b"pos:\t0\nflags:\t0100000\nmnt_id:\t29\nino:\t88\n"
HELD = b"lock:\t1: FLOCK  ADVISORY  WRITE 4711 00:1a:57 0 EOF\n"
READ = b"lock:\t1: POSIX  ADVISORY  READ 4711 00:1a:57 0 EOF\n"


@pytest.mark.parametrize(
    ("told", "inode"),
    [
        (OF_EVERY_FILE + HELD, "00:1a:57"),
        (OF_EVERY_FILE + READ + HELD, "00:1a:57"),
        (OF_EVERY_FILE + READ, ""),
        (OF_EVERY_FILE + HELD.replace(b"FLOCK", b"LEASE"), ""),
        (OF_EVERY_FILE + b"size:\t4096\ncount:\t2\nexp_name:\tudmabuf\nname:\tx\n" + HELD, ""),  # the name of a dma-buf
        (OF_EVERY_FILE + b"name:\tx\r" + HELD, ""),
        (OF_EVERY_FILE + b"lock:\t1: FLOCK\n", ""),
        (OF_EVERY_FILE + b"lock:\xff\n", ""),
        (b"", ""),
        (None, ""),
    ],
)
def test_a_lock_is_what_the_kernel_says_in_front(told, inode, monkeypatch):
    monkeypatch.setattr(procfs, "read_proc", lambda path: told)

    assert locked_inode("1", "3") == inode


@pytest.mark.parametrize(
    ("line", "lives"),
    [
        ("1: FLOCK  ADVISORY  WRITE 1 {inode} 0 EOF", True),
        ("1: FLOCK  ADVISORY  WRITE 0 {inode} 0 EOF", True),  # of another pid namespace
        ("1: POSIX  ADVISORY  WRITE 1 {inode} 0 EOF", False),
        ("1: FLOCK  ADVISORY  WRITE 1 f{inode} 0 EOF", False),
        ("1: FLOCK  ADVISORY  WRITE 1 {inode}1 0 EOF", False),
        ("", False),
    ],
)
def test_a_daemon_lives_as_long_as_its_file_is_locked(tmp_path, line, lives, monkeypatch):
    lock = tmp_path / "daemon.lock"
    lock.touch()
    told = line.format(inode=inode_of(str(lock))).encode() + b"\n"
    monkeypatch.setattr("builtins.open", lambda *how: io.BytesIO(told))

    assert source._is_locked(str(lock)) is lives


@pytest.mark.root
@pytest.mark.parametrize(("owner", "counts"), [(0, True), (MALLORY, False)])
def test_a_cgroup_that_was_given_to_a_user_names_no_container_that_trespass_would_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, counts: bool
) -> None:
    (tmp_path / "system.slice/his.service").mkdir(parents=True)
    os.chown(tmp_path / "system.slice/his.service", owner, -1)
    monkeypatch.setattr(procfs, "_CGROUPS", str(tmp_path))

    assert bool(procfs.container_of(f"0::/system.slice/his.service/docker-{'c0ffee00' * 8}/x")) is counts
