"""What a user mounts over a file of his keeps nobody waiting who reads the files of all users."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Machine, a_device
from own_claims import acquire
from queues import a_ticket

from gpuguard import files
from gpuguard.claims import holders
from gpuguard.claims.directory import LockDirectory, existing_locks, lock_directory
from gpuguard.files import device_of, open_in_place, open_or_create, status_in_place
from gpuguard.queue.tickets import OwnTicket, ticket_content
from gpuguard.request import Request

# A file system of FUSE that everybody may enter (user_allow_other), and whose server answers nothing.
COVER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(3)
for path in sys.argv[2:]:
    try:
        options = f"fd={os.open('/dev/fuse', os.O_RDWR)},rootmode=100644,user_id=1,group_id=1,allow_other"
    except OSError:
        sys.exit(3)
    if libc.mount(b"none", path.encode(), b"fuse", 6, options.encode()):
        sys.exit(3)
"""
ADMINS = """
from gpuguard.claims import disk_room, records, unlock as releasing
from gpuguard.claims.directory import is_same_file, lock_directory
from gpuguard.cli.setup import installation as setup_service
from gpuguard.queue import reservations, tickets
from gpuguard.model import ClaimRecord
from gpuguard.daemon import release as asking
records.MOST_OF_ONE = reservations.MOST_OF_ONE = 1
directory = lock_directory(sys.argv[1])
print([one.note for one in records.read_records(directory)])
found, read = tickets.read_tickets(directory)[0], reservations.read_reservations(directory, 0.0)[0]
print(found, read, tickets.last_started(directory, 1))
tickets.record_start(directory, 1)
print(disk_room.room_for_records(directory).path, is_same_file(0, sys.argv[2]))
asking._holders, asking.listens = lambda *_: (os.getpid(),), lambda pid: True
with asking.SupervisorChannel(directory, ClaimRecord("a", 1, "eve", (), pid=os.getpid())) as nobody:
    path = records.record_path(directory, 1, "a")
    print(setup_service.lock_all(sys.argv[1], []), nobody, releasing._descriptors_of(path, 1))
"""
# Where setup was never run: the first who needs a lock file makes it, for all.
STICKY = """
from gpuguard import source as state
from gpuguard.claims import directory as daemonfiles, holders, directory as lockfiles, records
lockfiles.FALLBACK_DIRECTORIES, lockfiles.ADMIN_DIRECTORY = (sys.argv[1],), "/none"
directory = lockfiles.lock_directory()
print(sorted(records.locked_devices(directory, ["GPU-a", "GPU-b", "GPU-c"])))
print(holders.holders_of(directory, {"GPU-a"}, lambda uid: True), holders.inode_of(sys.argv[2]) == "")
print(state.read_state(directory, 1.0, simulated=False), state.daemon_lives(directory))
try:
    daemonfiles.open_lock_file(daemonfiles.daemon_files(directory), "daemon.lock")
except OSError as error:
    print(error.strerror)
"""
NAMES = (
    "claim.1.a.json", "claim.2.b.json", "ticket.1.a.json", "ticket.1.b.json", "bell.1.a", "reserve.1.a.json",
    "arrived.1.0.x", "served.1", "served.0", "unfinished.1.new",
)  # fmt: skip
STICKY_NAMES = ("claim.1.a.json", "GPU-a", "GPU-b.slot0", "state.json", "daemon.lock")


def test_who_looks_holds_nothing_afterwards_and_waits_for_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bell")
    waker, before = str(tmp_path / "bell"), len(os.listdir("/proc/self/fd"))
    os.close(open_in_place(waker))

    assert status_in_place(waker).st_size == 0
    assert existing_locks(LockDirectory("", str(tmp_path), ""), ("bell", "bell.none", "bell\0")) == ["bell"]
    assert holders.inode_of(f"{waker}\0") == ""
    assert holders.inode_of(waker).endswith(f":{os.stat(waker).st_ino}")
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_link_is_followed_and_what_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_in_place(str(tmp_path / "link"))
    with pytest.raises(FileNotFoundError):
        status_in_place(str(tmp_path / "none"))


def test_of_a_mount_that_is_not_ours_the_device_is_what_stat_says(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "_mount_of", lambda descriptor: b"0")
    with (tmp_path / "borrowed").open("x") as file:
        assert device_of(file.fileno()) == os.fstat(file.fileno()).st_dev


@pytest.mark.parametrize("looks", [open_in_place, status_in_place, lambda path: open_or_create(path, os.O_RDONLY, 0)])
def test_what_is_mounted_there_is_not_entered_and_nothing_stays_open(looks) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="mounted") as raised:
        looks("/proc")

    assert (raised.value.errno, len(os.listdir("/proc/self/fd"))) == (errno.EXDEV, before)


def told(script: str, place: Path, covered: list[str]) -> list[str]:
    """What *script* says where these files are covered."""
    words = [sys.executable, "-c", COVER + script, str(place), *covered]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 3:
        pytest.skip("files of other file systems (no /dev/fuse, or no mount namespace)")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.root
def test_whoever_reads_the_files_of_all_users_passes_over_what_one_has_mounted_over_his(tmp_path: Path) -> None:
    place = tmp_path / "claims"
    for name in ("lock", "claims"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "claims").chmod(0o1777)
    for name in NAMES:
        (place / "claims" / name).write_text("{}")
    covered = [str(place / "claims" / name) for name in NAMES]

    first, second, third, last = told(ADMINS, place, covered)
    assert (first, second) == ("[]", "[] [] None")
    assert third == f"{place}/claims False"
    assert last == "None None None"


@pytest.mark.root
def test_nor_does_he_who_covers_lock_files_and_the_daemons_where_users_make_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    covered = [tmp_path / f"gpuguard.{name}" for name in STICKY_NAMES]
    for path in (*covered, tmp_path / "gpuguard.GPU-b", tmp_path / "gpuguard.GPU-c"):
        path.touch(0o444)

    assert told(STICKY, tmp_path, [str(path) for path in covered]) == [
        "['GPU-a', 'GPU-b']",  # nobody gets them before root has looked at these files
        "{} True",
        "None False",
        "a file system is mounted over it",
    ]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_who_can_open_nothing_more_has_lost_neither_his_claim_nor_his_place(tmp_path, monkeypatch, code):
    """A training that had opened all that it may was told CLAIM LOST, and its notebook gave the claim back."""
    directory = lock_directory(str(tmp_path))

    def full(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    with acquire(Machine(a_device(0)), Request(), directory) as claim:
        waits = OwnTicket(directory, ticket_content(a_ticket()))
        with monkeypatch.context() as exhausted:
            exhausted.setattr(files.os, "open", full)
            claim.reassert()
            assert waits.counts
        waits.withdraw()
