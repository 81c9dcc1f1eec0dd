"""Who pretends to hold the lock of somebody else's device: another kind of lock, another file at its path, other lines.

Whose a process is hangs on who holds the lock.  Whoever is believed to hold that of others says with a record of his
own what their processes may do.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from builders import GIB
from claimholders import a_ready_child, a_record, see_locks_alone
from daemons import SOMEBODY, a_daemon, somebodys
from nodes import eventually

from gpuguard import procfs, source
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.claims.holders import holders_of, inode_of, locked_inode

MALLORY = 20002
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
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > before + 3.0, 20.0), daemon.said()

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
from gpuguard.queue import leader as wakeup
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
print(wakeup.flock_holder(file) == os.getpid())
"""


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


# Of two file systems a file of the same number each; somebody has locked that of the second one.
TWINS = """
import fcntl, os, subprocess, sys
from gpuguard import source
from gpuguard.claims.directory import daemon_files, lock_directory
for name in ("a", "b"):
    os.mkdir(name)
    subprocess.run(["mount", "-t", "tmpfs", "none", name], check=True)
directory = lock_directory(os.path.abspath("a/claims"))
os.close(source.lock_daemon(directory))
number = os.stat(daemon_files(directory).file("daemon.lock")).st_ino
for each in range(1000):
    twin = os.open(f"b/{each}", os.O_RDWR | os.O_CREAT)
    if os.fstat(twin).st_ino >= number:
        break
    os.close(twin)
ready, done = os.pipe(), os.pipe()
if not os.fork():
    os.setgroups([]); os.setresuid(20002, 20002, 20002)
    fcntl.flock(twin, fcntl.LOCK_EX)
    if sys.argv[1] == "by one who has ended" and os.fork():
        os._exit(0)
    os.write(ready[1], b".")
    os.close(done[1])
    os._exit(len(os.read(done[0], 1)))
os.read(ready[0], 1)
if sys.argv[1] == "by one who has ended":
    os.wait()
told = [os.fstat(twin).st_ino == number, b":%d " % number in open("/proc/locks", "rb").read()]
print(*told, source.daemon_lives(directory), (held := source.lock_daemon(directory)) and source.daemon_lives(directory))
"""


@pytest.mark.root
@pytest.mark.parametrize("taken", ["by one who lives", "by one who has ended"])
def test_a_lock_on_another_file_of_that_number_is_not_the_daemons(tmp_path: Path, taken: str) -> None:
    words = ["unshare", "-m", sys.executable, "-c", TWINS, taken]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert told.stdout == "True True False True\n", told.stderr


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
