"""What others have locked is learned by a process apart; who hides a lock, or never answers, harms nobody else."""

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, found, found_later
from claimholders import a_ready_child, see_locks_alone
from daemons import SOMEBODY, a_daemon, somebodys
from guard_scene import SLEEP, a_child
from nodes import eventually
from proc import state

from gpuguard import procfs, users
from gpuguard.backends import spawn
from gpuguard.claims import holders
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.claims.holders import as_written, hidden_claim_text, inode_of
from gpuguard.policies.usage import TrespassRule, UnclaimedRule

UNKNOWN = 20002  # another user
# Readers that never answer, and end when nobody asks any more; the second one has begun.
SILENT = "import os\nwhile os.read(0, 1000): pass"
READY = (
    "import marshal, os\nbody = marshal.dumps(('ready',))\nos.write(1, len(body).to_bytes(4, 'little') + body)\n"
    + SILENT
)
LATE = """
import sys, time
time.sleep(3.0)
sys.path[:] = sys.argv[1:]
import gpuguard.claims.holders as h
h.holders_answer()
"""
# One that learns of each process what it has locked just in time.
SLOW = """
import sys, time
sys.path[:] = sys.argv[1:]
import gpuguard.claims.holders as h
h.os.listdir, h.locked_inode = lambda path: ["1"], lambda pid, number: time.sleep(0.05) or "an inode"
h.holders_answer()
"""
# A file of FUSE whose server never answers a read, and an epoll that is handing over an event to a page of it.
ATTACK = """
import ctypes, os, select, struct, sys
place, libc = sys.argv[1], ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=100644,user_id=0,group_id=0".encode()
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(3)
if libc.mount(b"none", place.encode(), b"fuse", 6, options):
    sys.exit(3)
server = os.fork()
if not server:
    libc.prctl(1, 9)
    while True:
        size, kind, unique, node = struct.unpack_from("<IIQQ", request := os.read(fuse, 2**20))
        answers = {26: struct.pack("<4I2H2I2H8I", 7, 31, 65536, 0, 12, 10, 65536, 1, 16, *[0] * 9),
            3: bytes(16) + struct.pack("<6Q10I", 1, 4096, 8, *[0] * 6, 0o100644, 1, *[0] * 5),
            14: struct.pack("<QII", 1, 0, 0)}
        if kind != 15:
            answer = answers.get(kind, b"")
            os.write(fuse, struct.pack("<IiQ", 16 + len(answer), 0 if kind in answers else -38, unique) + answer)
os.close(fuse)
os.stat(place)
memory = os.open(place, os.O_RDONLY)
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, 4096, 3, 2, memory, ctypes.c_long(0))
one, other = os.pipe()
os.write(other, b"1")
waits = select.epoll()
waits.register(one, select.EPOLLIN)
print("ready", flush=True)
libc.epoll_wait(waits.fileno(), ctypes.c_void_p(page), 10, -1)
"""


@pytest.fixture(autouse=True)
def _no_reader_before_or_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLACK_SECONDS", "SLACK_AGAIN", "START_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(holders, name, 60.0)  # no reader of these tests is too slow by accident
    monkeypatch.setattr(procfs, "_spent", {})
    holders._close()
    yield
    holders._close()
    assert eventually(lambda: holders._reap() or not (holders._ended or holders._hanging))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "locked", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def silent(monkeypatch: pytest.MonkeyPatch, reader: str = SILENT) -> None:
    monkeypatch.setattr(holders, "SLACK_SECONDS", 0.0)
    monkeypatch.setattr(holders, "SLACK_AGAIN", 0.0)
    monkeypatch.setattr(spawn, "interpreter", lambda code, word: [sys.executable, "-c", reader, *sys.path])


def test_what_a_process_has_locked_is_what_the_kernel_says(locked):
    inode = as_written(locked)

    assert inode in holders.locked_files(os.getpid(), os.getuid(), 5).values()
    assert holders.locked_by(os.getpid(), os.getuid(), 5)[locked] == inode


def test_a_lock_is_found_too_where_the_claims_lie_in_shared_memory():
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        assert holders.locked_by(os.getpid(), os.getuid(), 5)[file.fileno()] == as_written(file.fileno())


def test_where_it_can_be_seen_what_is_no_file_nobody_asks_it_what_is_locked(monkeypatch, locked):
    asked: list[int] = []
    monkeypatch.setattr(holders, "locked_inode", lambda pid, number: asked.append(int(number)))
    with select.epoll() as waits, open("/dev/null", "rb") as device:
        holders.locked_by(os.getpid(), os.getuid(), 5)

        assert locked in asked
        assert not {waits.fileno(), device.fileno()} & {*asked}


def test_of_a_user_of_whom_a_look_does_not_come_back_nothing_more_is_asked_until_it_does(monkeypatch, locked):
    with monkeypatch.context() as patch:
        silent(patch, READY)
        assert holders.locked_files(os.getpid(), UNKNOWN, 0.01) == {}
    readers = list(holders._hanging.values())
    monkeypatch.setattr(holders, "_reap", lambda: None)

    assert holders.hangs(UNKNOWN)
    assert holders.locked_files(os.getpid(), UNKNOWN, 5) == {}
    assert holders.locked_files(os.getpid(), os.getuid(), 5), "others are looked at meanwhile, by another reader"
    monkeypatch.undo()
    assert eventually(lambda: not holders.hangs(UNKNOWN)), f"{readers} ended: nobody asks any more"


def test_a_reader_that_begins_late_is_waited_for(monkeypatch, locked):
    """On a loaded machine it began so late that nobody knew what an honest user had locked."""
    silent(monkeypatch, LATE)

    assert holders.locked_files(os.getpid(), UNKNOWN, 2.5)
    assert not holders.hangs(UNKNOWN)


def test_a_reader_that_never_begins_is_nobodys_fault(monkeypatch, locked):
    silent(monkeypatch)
    monkeypatch.setattr(holders, "START_SECONDS", 0.01)

    assert holders.locked_files(os.getpid(), UNKNOWN, 0.01) == {}
    assert len(holders._ended) == 1, "it is reaped later"
    assert not holders.hangs(UNKNOWN)


def test_while_many_hang_nobody_without_a_name_is_asked(monkeypatch, locked):
    """One user can have 65536 such uids, each of which would take another reader."""
    with monkeypatch.context() as patch:
        for name, value in (("MOST_HANGING", 1), ("_hanging", {4711: 1}), ("_reap", lambda: None)):
            patch.setattr(holders, name, value)

        assert holders.locked_files(os.getpid(), UNKNOWN, 5) == {}
        assert holders.locked_files(os.getpid(), os.getuid(), 5)


def test_a_user_who_answers_each_look_just_in_time_gets_no_more_time_than_one_who_never_does(monkeypatch, locked):
    now = [0.0]
    monkeypatch.setattr(holders, "monotonic", lambda: now[0])
    monkeypatch.setattr(holders, "MOST_SECONDS", 0.1)
    silent(monkeypatch, SLOW)
    looks = [holders.locked_files(os.getpid(), UNKNOWN, 5) for _ in range(20)]

    assert 0 < sum(map(bool, looks)) <= 2
    assert holders.hangs(UNKNOWN)
    assert holders.locked_files(os.getpid(), os.getuid(), 5), "nobody else is hidden"
    now[0] += 20 / procfs.SHARE
    assert holders.locked_files(os.getpid(), UNKNOWN, 5), "once it is paid off"


def test_looks_that_take_next_to_nothing_are_never_too_many(locked):
    assert all(holders.locked_files(os.getpid(), UNKNOWN, 5) for _ in range(200))


def test_a_reader_that_has_ended_is_replaced(locked):
    holders.locked_files(os.getpid(), os.getuid(), 5)
    _, process, ask, _ = holders._reader[0]
    spawn.send(ask, ())  # what ends it

    assert eventually(lambda: os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT) is not None)
    holders.locked_files(os.getpid(), os.getuid(), 5)
    assert holders.locked_files(os.getpid(), os.getuid(), 5)


def test_where_no_process_can_be_started_nothing_is_known(monkeypatch, locked):
    def refuse(*_: object, **__: object) -> int:
        raise BlockingIOError

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)

    assert holders.locked_files(os.getpid(), os.getuid(), 5) == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_guard_that_may_not_see_where_descriptors_lead_asks_the_reader_alone(monkeypatch, locked):
    place = os.readlink(f"/proc/self/fd/{locked}")
    see_locks_alone(monkeypatch)
    monkeypatch.setattr(holders, "locked_inode", lambda *_: pytest.fail("a text was read that may never come back"))

    assert inode_of(place) in holders.locked_by(os.getpid(), os.getuid(), 5, paths={place}).values()


@pytest.mark.root
def test_a_user_whose_epoll_hands_over_an_event_to_a_file_system_of_their_own_is_hidden_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(holders, "SLACK_SECONDS", 0.2)
    place = tmp_path / "place"
    place.write_bytes(b"x" * 4096)
    words = [sys.executable, "-c", ATTACK, str(place)]
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(words, text=True, **quiet) as attack:
        try:
            assert attack.stdout is not None
            if attack.stdout.readline() != "ready\n":
                pytest.skip("files of other file systems (no /dev/fuse, or no mount namespace)")
            assert eventually(lambda: state(attack.pid) in "SD")
            assert eventually(lambda: holders.locked_files(attack.pid, UNKNOWN, 0.1) == {} and holders.hangs(UNKNOWN))
            [reader] = holders._hanging.values()

            assert state(reader.pid) == "D"
            with a_child(*SLEEP) as other:
                assert holders.locked_by(other.pid, os.getuid(), 5) == {}
        finally:
            os.killpg(attack.pid, signal.SIGKILL)  # its server, too: it does not end before that
    assert eventually(lambda: not holders.hangs(UNKNOWN))


POLICY = """
version: 1
mode: enforce
policies: [{name: no-claim, for: 400ms, when: {unclaimed: {}}, steps: [terminate]}]
"""
HIDE = """
import fcntl, os, socket, sys, time
path, uid, node = sys.argv[1:]
if node:
    from gpuguard.backends import simulated
    simulated.use("0", 30 * 2**30, 50.0, spec=node)
lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o444)
fcntl.flock(lock, fcntl.LOCK_EX)
ends = socket.socketpair()
socket.send_fds(ends[0], [b"x"], [lock])
os.close(lock)
os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def a_hider(path: str, node: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process of uid 20001 that keeps the lock at *path*, and has no descriptor of it; it may compute on a node."""
    words = [sys.executable, "-c", HIDE, path, str(SOMEBODY), node]
    with a_ready_child(words) as child:
        yield child


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    found = lock_directory(str(tmp_path / "claims"))
    os.close(open_lock(found, "GPU-a"))
    return found


@pytest.mark.root
def test_who_hides_a_lock_computes_without_a_claim_and_root_is_told_what_it_is(tmp_path: Path) -> None:
    with a_daemon(tmp_path, POLICY, "--enforce", named=True) as daemon:
        device = daemon.uuid(0)
        with a_hider(str(tmp_path / "claims" / "lock" / device), daemon.node) as job:
            [hidden] = daemon.until("claim")
            assert (hidden["outcome"], hidden["devices"]) == ("hidden", [device])
            assert "descriptors in flight over a unix socket" in hidden["message"]
            assert f"the process ends that keeps it, which may be: pid {job.pid} of " in hidden["message"]
            assert eventually(lambda: job.poll() == -15), daemon.said()

        assert len(daemon.events("claim")) == 1, "once, as long as it lasts"
        shown = daemon.gpuguard("who").stdout
        assert "no process holds it" not in shown, "it is free when that process has ended"


@pytest.mark.root
def test_who_holds_a_lock_by_hand_has_a_claim(tmp_path: Path) -> None:
    with a_daemon(tmp_path, POLICY, "--enforce", named=True) as daemon:
        lock = str(tmp_path / "claims" / "lock" / daemon.uuid(0))
        with somebodys(daemon.node, "0", 30 * GIB, lock) as job:
            before = daemon.state()["snapshot"]["clock"]
            assert eventually(lambda: daemon.state()["snapshot"]["clock"] > before + 3.0), daemon.said()

            assert (job.poll(), daemon.events("terminate"), daemon.events("claim")) == (None, [], [])


def test_a_hidden_claim_is_none_for_the_rules() -> None:
    device = a_device(memory_used=50 * GIB, processes=(a_process(uid=1002, user="bob"),))
    hidden = a_claim_record(device, uid=-1, user="unknown", hidden=True)
    hers = a_claim_record(device, uid=1001, user="alice")

    assert found(UnclaimedRule(), device, claims=[hidden])
    assert found_later(TrespassRule(), device, claims=[hidden, hers])
    assert not found_later(TrespassRule(), device, claims=[hidden])


@pytest.mark.root
def test_a_lock_in_a_message_is_held_by_no_process(directory: LockDirectory) -> None:
    with a_hider(directory.lock_path("GPU-a")):
        assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}
    assert holders.held_by_no_process(directory, ["GPU-a"]) == set(), "free again"


@pytest.mark.root
def test_a_lock_that_a_process_has_open_is_not(directory: LockDirectory) -> None:
    with open(directory.lock_path("GPU-a")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders.held_by_no_process(directory, ["GPU-a"]) == set()


@pytest.mark.root
def test_nor_one_that_nobody_can_tell_about(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process it cannot be read what it has open: it may be the one, and unknown is innocent."""
    really = os.listdir

    def refused(path: str) -> list[str]:
        if path.startswith(f"/proc/{other.pid}/fd"):
            raise PermissionError(13, "Permission denied")
        return really(path)

    with a_hider(directory.lock_path("GPU-a")), subprocess.Popen(["sleep", "600"]) as other:
        try:
            monkeypatch.setattr(os, "listdir", refused)
            assert holders.held_by_no_process(directory, ["GPU-a"]) == set()
        finally:
            other.kill()


MANY_LOCKS = """
import fcntl, os, struct, sys, time
os.setgroups([]); os.setresgid(*[20001] * 3); os.setresuid(*[20001] * 3)
files = [os.memfd_create("locks") for _ in range(20)]
for number in range(int(sys.argv[1])):
    fcntl.lockf(files[number % 20], fcntl.LOCK_EX, 1, 2 * number)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.root
def test_any_number_of_locks_of_a_user_keeps_no_reader_busy(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million took the kernel ten minutes to list: the daemon gave no offers, and `who` took half a minute."""
    path = directory.lock_path("GPU-a")
    monkeypatch.setattr(holders, "MOST_LOCKS", 1000)
    with a_ready_child([sys.executable, "-c", MANY_LOCKS, "1100"]):
        with a_hider(path):
            assert holders.takers_of([inode_of(path)]) is None
            assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}, "no user can bring that doubt about"
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert holders.held_by_no_process(directory, ["GPU-a"]) == set()


CROWD = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
first = os.open("/etc/passwd", os.O_RDONLY)
for _ in range(int(sys.argv[2])):
    os.dup(first)
os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def a_crowd(uid: int, descriptors: int = 3000) -> Iterator[subprocess.Popen[str]]:
    """A process of that uid with so much open that it takes too long to read."""
    with a_ready_child([sys.executable, "-c", CROWD, str(uid), str(descriptors)]) as child:
        yield child


@pytest.mark.root
@pytest.mark.parametrize("uid", [SOMEBODY, SOMEBODY + 1])
def test_any_number_of_open_files_of_the_same_or_of_another_user_makes_no_claim_of_a_hidden_lock(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr(holders, "MOST_SECONDS", 0.001)
    path = directory.lock_path("GPU-a")
    with a_crowd(uid), a_hider(path):
        assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}
        text = hidden_claim_text([path])
        assert f"a process of {uid}, whose open files cannot be read to the end in time" in text
        assert "in a message that no process receives (descriptors in flight over a unix socket), in a mapping" in text
    with a_crowd(uid), open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders.held_by_no_process(directory, ["GPU-a"]) == set(), "its holder is read first"


@pytest.mark.root
def test_all_uids_of_a_user_have_the_time_of_one(tmp_path, directory, monkeypatch):
    (tmp_path / "subuid").write_text(f"{SOMEBODY}:100000:65536\n")
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    monkeypatch.setattr(holders, "MOST_SECONDS", 0.02)
    read, really = list[int](), holders.locked_inode
    monkeypatch.setattr(holders, "locked_inode", lambda pid, number: read.append(int(pid)) or really(pid, number))
    with ExitStack() as stack:
        crowd = {stack.enter_context(a_crowd(100000 + number)).pid for number in range(6)}
        stack.enter_context(a_hider(directory.lock_path("GPU-a")))
        holders.held_by_no_process(directory, ["GPU-a"])

    assert len([pid for pid in read if pid in crowd]) < 6 * 3000, "not each of them has the whole time"


@pytest.mark.root
def test_also_a_guard_that_may_not_see_what_files_are_finds_it(directory, monkeypatch):
    see_locks_alone(monkeypatch)
    with a_hider(directory.lock_path("GPU-a")):
        assert holders.held_by_no_process(directory, ["GPU-a"]) == {"GPU-a"}
    with open(directory.lock_path("GPU-a")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert holders.held_by_no_process(directory, ["GPU-a"]) == set()
