"""The claim directory: which is accepted, what a planted file can do, and records: alive by the kernel, harmless."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import MIB
from sources import ROOT
from users import ALICE

from gpuguard.claims import claim as hold
from gpuguard.claims import directory as lockfiles
from gpuguard.claims import disk_room, records
from gpuguard.claims.claim import Claim, lock_device
from gpuguard.claims.directory import (
    BROKERED,
    Gate,
    LockDirectory,
    is_same_file,
    lock_directory,
    open_lock,
    try_flock,
)
from gpuguard.claims.disk_room import Room, RoomUsage, room_for_records
from gpuguard.claims.records import (
    MAX_BYTES,
    ClaimWatcher,
    locked_devices,
    locked_slots,
    probe,
    probe_in_gate,
    read_records,
    write_record,
)
from gpuguard.errors import LockDirectoryError
from gpuguard.files import file_system
from gpuguard.users import user_name

UUID = "GPU-00000000-0000-4000-8000-000000000000"
OTHER = "GPU-00000001-0000-4000-8000-000000000001"


def test_records_may_lie_in_a_sticky_directory(directory: LockDirectory) -> None:
    Path(directory.records).chmod(0o1777)

    assert lock_directory(directory.path) == directory


@pytest.mark.root
def test_who_acts_for_a_user_opens_what_that_user_may_open(open_place: Path) -> None:
    """As the hooks of Slurm do, whose real user stays root."""
    directory = lock_directory(f"{open_place}/claims")
    Path(directory.lock_path("gate")).touch(BROKERED)
    roots = lock_directory(directory.path)
    os.seteuid(ALICE.pw_uid)
    try:
        theirs = lock_directory(directory.path)
    finally:
        os.seteuid(0)

    assert [(found.keeper, found.closed) for found in (roots, theirs)] == [(0, False), (0, True)]


def test_a_symbolic_link_in_place_of_the_lock_directory_is_refused(tmp_path: Path) -> None:
    lock_directory(str(tmp_path / "real"))
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(LockDirectoryError, match="symbolic link is not followed"):
        lock_directory(str(tmp_path / "link"))


def test_an_admin_directory_that_is_there_but_unusable_is_an_error_and_no_silent_fallback(tmp_path, monkeypatch):
    (tmp_path / "run").write_text("not a directory")
    monkeypatch.setattr(lockfiles, "ADMIN_DIRECTORY", str(tmp_path / "run"))

    with pytest.raises(LockDirectoryError, match="gpuguard setup"):
        lock_directory()


def test_without_an_admin_directory_the_first_sticky_directory_of_root_is_used(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir(mode=0o777)
    monkeypatch.setattr(lockfiles, "ADMIN_DIRECTORY", str(tmp_path / "absent"))
    monkeypatch.setattr(lockfiles, "FALLBACK_DIRECTORIES", (str(tmp_path / "open"), str(tmp_path / "absent"), "/tmp"))
    monkeypatch.setattr(lockfiles, "_UNSAFE_FILE_SYSTEMS", ())

    directory = lock_directory()

    assert (directory.locks, directory.prefix, directory.owner) == ("/tmp", "gpuguard.", None)


MOUNTS = """\
25 1 8:1 / / rw - ext4 /dev/sda1 rw
30 25 0:40 / /home rw - nfs4 server:/home rw
31 25 0:41 / /run rw - tmpfs tmpfs rw
32 31 0:42 / /run/with\\040space rw - fuse.sshfs x rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes/x", "ext4"),
        ("/home/alice/claims", "nfs4"),
        ("/run/gpuguard", "tmpfs"),
        ("/run/with space/x", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, path: str, kind: str) -> None:
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTS)

    assert file_system(path, str(mountinfo)) == kind


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "smb3", "9p", "overlay", "fuse.sshfs", "lustre"])
def test_a_file_system_on_which_locks_do_not_exclude_everybody_is_refused_by_name_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(lockfiles, "file_system", lambda path: kind)

    with pytest.raises(LockDirectoryError, match=rf"{kind}.*-v /run/gpuguard:/run/gpuguard"):
        lock_directory(str(tmp_path))


READ_ONLY = """
mount -t tmpfs -o mode=1777,size=64k image "$2" && mount -o remount,ro "$2" && exec "$1" -c '
import sys
from gpuguard.claims import directory as lockfiles
lockfiles.FALLBACK_DIRECTORIES, lockfiles.ADMIN_DIRECTORY = (sys.argv[1],), "/none"
lockfiles.open_lock(lockfiles.lock_directory(), "gate")
' "$2"
"""


@pytest.mark.root
def test_in_the_read_only_image_of_a_container_the_directory_of_the_machine_is_advised(tmp_path: Path) -> None:
    words = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", sys.executable, str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    assert "Read-only file system" in done.stderr
    assert "apptainer exec --bind /none" in done.stderr


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (os.symlink, "is a symbolic link"),
        (os.link, "hard link"),
        (lambda precious, path: os.mkfifo(path, 0o444), "not a regular file"),
    ],
)
def test_what_is_planted_in_place_of_a_lock_file_is_not_followed_and_hangs_nobody(directory, tmp_path, plant, fault):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    precious.chmod(0o444)
    plant(precious, directory.lock_path(UUID))

    with pytest.raises(LockDirectoryError, match=fault):
        open_lock(directory, UUID)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["../gate", "a/b", "", ".hidden", "x" * 200, "a\nb"])
def test_a_name_that_is_no_uuid_never_becomes_a_path(directory: LockDirectory, name: str) -> None:
    with pytest.raises(LockDirectoryError, match="no name for a lock file"):
        open_lock(directory, name)


def test_a_file_that_was_unlinked_or_replaced_under_its_holder_is_noticed(directory: LockDirectory) -> None:
    descriptor = open_lock(directory, UUID)
    path = directory.lock_path(UUID)
    assert is_same_file(descriptor, path)
    os.unlink(path)
    unlinked = is_same_file(descriptor, path)
    os.close(open_lock(directory, UUID))
    replaced = is_same_file(descriptor, path)
    os.close(descriptor)

    assert (unlinked, replaced) == (False, False)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_lock_file_that_cannot_be_opened_for_lack_of_descriptors_was_planted_by_nobody(directory, monkeypatch, left):
    """A guard without descriptors took each device for claimed by an unknown user; others were told to remove it."""
    os.close(open_lock(directory, "GPU-1"))

    opened, really = 0, os.open

    def full(*words: Any) -> int:
        nonlocal opened
        opened += 1
        if opened > left:
            raise OSError(errno.EMFILE, "Too many open files")
        return really(*words)

    monkeypatch.setattr(lockfiles.os, "open", full)
    for look in (open_lock, lambda directory, name: probe_in_gate(directory, [name])):
        opened = 0
        with pytest.raises(OSError, match="Too many open files"):
            look(directory, "GPU-1")


@pytest.mark.parametrize(
    "use",
    [
        lambda directory: Gate(directory).__enter__(),
        lambda directory: lock_device(directory, "GPU-1", fcntl.LOCK_EX),
        lambda directory: probe_in_gate(directory, ["GPU-1"]),
        lambda directory: locked_slots(directory, "GPU-1"),
    ],
    ids=["gate", "lock", "look", "slots"],
)
def test_a_file_that_cannot_be_locked_is_an_error_and_no_descriptor_of_it_stays_open(directory, monkeypatch, use):
    """A guard looks at each lock each second: without memory for locks it had no descriptor left within minutes."""
    for name in ("gate", "GPU-1", "GPU-1.slot0"):
        os.close(open_lock(directory, name))
    before = os.listdir("/proc/self/fd")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(LockDirectoryError, match="No locks available"):
        use(directory)

    assert os.listdir("/proc/self/fd") == before


def test_an_interrupt_while_a_lock_is_taken_leaves_none(directory, monkeypatch):
    """Ctrl-C in a notebook: a lock that nobody knows of would last as long as the notebook does."""
    before = os.listdir("/proc/self/fd")

    def interrupted(descriptor: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(hold, "_identity", interrupted)  # what comes right behind the flock
    with pytest.raises(KeyboardInterrupt):
        lock_device(directory, UUID, fcntl.LOCK_EX)

    assert os.listdir("/proc/self/fd") == before
    assert not locked_devices(directory, [UUID])


def test_a_lock_file_that_its_maker_has_only_just_made_is_waited_for(directory, monkeypatch):
    """Others cannot open it before its maker has changed its mode."""
    os.close(open_lock(directory, UUID))
    really, refusals = os.open, [PermissionError(13, "Permission denied")] * 2

    def opened(path: str, *how: int) -> int:
        if path == directory.lock_path(UUID) and refusals:
            raise refusals.pop()
        return really(path, *how)

    monkeypatch.setattr(os, "open", opened)
    os.close(open_lock(directory, UUID))

    assert not refusals


def test_a_missing_lock_file_in_roots_directory_says_to_run_setup_again(directory, monkeypatch):
    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(13, "Permission denied") if flags & os.O_CREAT else FileNotFoundError(2, "No such file")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LockDirectoryError, match=r"Run `sudo gpuguard setup --dir .*`: it makes the lock files"):
        open_lock(directory, UUID)


def test_a_forked_child_of_another_thread_does_not_keep_the_gate(directory: LockDirectory) -> None:
    with Gate(directory):
        # A child that inherits everything and lives on: what fork() in another thread does.
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        descriptor = open_lock(directory, "gate")
        free = try_flock(descriptor)
        os.close(descriptor)
    finally:
        child.communicate(b"\n")

    assert free


def test_locks_of_other_tools_on_filelock_and_ours_exclude_each_other(directory: LockDirectory) -> None:
    filelock = pytest.importorskip("filelock")
    if not hasattr(filelock, "lock_descriptor"):
        pytest.skip("this filelock locks no descriptor")
    ours = open_lock(directory, UUID)
    theirs = open_lock(directory, UUID)
    assert try_flock(ours)
    while_ours = filelock.lock_descriptor(theirs, blocking=False)
    fcntl.flock(ours, fcntl.LOCK_UN)
    after_ours = filelock.lock_descriptor(theirs, blocking=False)
    while_theirs = try_flock(ours)
    os.close(ours)
    os.close(theirs)

    assert (while_ours, after_ours, while_theirs) == (False, True, False)


def content(**fields: object) -> dict[str, object]:
    return {"id": "abc", "devices": [UUID], "pid": os.getpid(), "since": 5.0, "note": "n", "command": ["a"], **fields}


@contextmanager
def a_lock(directory: LockDirectory, uuid: str = UUID) -> Iterator[int]:
    """The lock of a device, held by this process."""
    lock = open_lock(directory, uuid)
    try:
        assert try_flock(lock)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def a_claim(directory: LockDirectory, uuid: str = UUID, **fields: object) -> Iterator[str]:
    """A lock with a record of it; the path of the record."""
    path, record = write_record(directory, content(**fields))
    try:
        with a_lock(directory, uuid):
            yield path
    finally:
        os.close(record)


def test_a_record_says_who_holds_what_as_long_as_its_descriptor_lives(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    (alive,), written = read_records(directory), Path(path).stat().st_ctime
    os.close(descriptor)

    assert (alive.id, alive.uid, alive.devices, alive.note) == ("abc", os.geteuid(), (UUID,), "n")
    assert alive.written == written
    assert read_records(directory) == []
    assert not Path(path).exists(), "the file of a dead claim is removed by the next reader"


def test_how_many_processes_of_others_a_claim_accepts_stands_in_its_record(directory: LockDirectory) -> None:
    with Claim("abc", (), (), max_processes=2) as claim:
        claim.write_record(directory)
        (record,) = read_records(directory)

    assert record.max_processes == 2


AT = time.mktime((2027, 1, 15, 15, 4, 30, 0, 0, -1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "by root"),
        ({"at": AT}, "by root at 15:04"),
        ({"why": "others wait"}, "by root: others wait"),
        ({"at": AT, "why": "others wait"}, "by root at 15:04: others wait"),
    ],
)
def test_a_request_to_release_says_who_made_it_when_and_why(fields, words):
    assert records.ReleaseRequest("yield", "root", **fields).in_words() == words


def test_requests_come_back_as_they_were_written_and_only_the_last_one_waits_for_an_answer(directory):
    descriptor = write_record(directory, content())[1]
    long = "x" * (records.LONGEST + 1)
    asked = [
        records.ReleaseRequest("yield", "root", "others wait", at=1.2346),
        records.ReleaseRequest("refused", "alice", long, at=2.0),
        records.ReleaseRequest("stop", long, at=3.0),
    ]
    for request in asked:
        records.write_request(descriptor, request)
    before = time.time()
    records.write_request(descriptor, records.ReleaseRequest("yield", "bob"))
    *found, last = records.read_requests(descriptor)

    assert found == [
        replace(asked[0], at=1.235), replace(asked[1], why=long[:-1]), replace(asked[2], by=long[:-1])
    ]  # fmt: skip
    assert (last.by, records.pending_request(descriptor)) == ("bob", last)
    assert before - 0.001 <= last.at <= time.time() + 0.001
    records.write_request(descriptor, records.ReleaseRequest("refused", "alice"))
    assert records.pending_request(descriptor) is records.released_by(descriptor) is None
    records.write_request(descriptor, records.ReleaseRequest("released", "root"))
    assert records.released_by(descriptor).by == "root"
    os.close(descriptor)


def test_when_a_job_should_end_is_written_between_what_stands_in_its_record(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    before = Path(path).stat()
    records.write_request(descriptor, records.ReleaseRequest("yield", "root"))
    for when in (1.5, 2**32 + 0.1234, 2.0**60):  # the last one has no room
        records.write_expected(descriptor, when)
    (record,), requests, after = read_records(directory), records.read_requests(descriptor), Path(path).stat()
    os.close(descriptor)

    assert (record.note, record.expected, after.st_ino) == ("n", 2**32 + 0.123, before.st_ino)
    assert [request.by for request in requests] == ["root"]


def test_a_record_that_its_owner_has_overwritten_is_left_alone(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    Path(path).write_bytes(b"{}")
    records.write_expected(descriptor, 1.5)
    os.close(descriptor)

    assert Path(path).read_bytes() == b"{}"


def test_a_record_never_exceeds_its_bound_however_long_the_command_is(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content(command=["x" * 900] * 50, note="y" * 9000))
    size = Path(path).stat().st_size
    (record,) = read_records(directory)
    os.close(descriptor)

    assert size <= MAX_BYTES
    assert record.devices == (UUID,)


def test_a_record_that_cannot_be_opened_for_lack_of_descriptors_is_not_gone(directory, monkeypatch):
    """A guard in that state judged the jobs of all by claims of which it knew no details."""
    _, descriptor = write_record(directory, {"id": "1dea1234"})

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(records, "open_regular", full)
    with pytest.raises(OSError, match="Too many open files"):
        read_records(directory)
    os.close(descriptor)


def test_a_record_without_the_lock_is_no_claim_on_the_device(directory: LockDirectory) -> None:
    with a_claim(directory, OTHER, devices=[UUID, OTHER]):
        (claim,) = probe(directory, [UUID, OTHER])

    assert claim.devices == (OTHER,)


def test_a_known_holder_of_a_lock_is_believed_without_asking_every_process_until_it_ends(directory, monkeypatch):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with a_claim(directory):
        (found,) = probe(directory, [UUID])
        known = [replace(found, holders=(*found.holders, gone.pid))]
        monkeypatch.setattr(records, "holders_of", lambda *_, **_how: pytest.fail("every process was asked"))
        (claim,) = probe(directory, [UUID], known=known)

    assert claim == found
    assert probe(directory, [UUID], known=known) == ()


@pytest.mark.parametrize("change", [{"id": "another"}, {"uid": 54321}, {"devices": (OTHER,)}, {"holders": ()}])
def test_what_is_known_of_another_claim_counts_for_nothing(directory: LockDirectory, change: dict[str, object]) -> None:
    with a_claim(directory):
        (found,) = probe(directory, [UUID])
        known = replace(found, **{"holders": (1,), **change})  # type: ignore[arg-type]

        assert probe(directory, [UUID], known=[known]) == (found,)


def test_a_watcher_asks_every_process_now_and_then(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    clock = [1000.0]
    monkeypatch.setattr("gpuguard.claims.records.time.monotonic", lambda: clock[0])
    really = records.holders_of
    monkeypatch.setattr(records, "holders_of", lambda *some, **how: asked.append(clock[0]) or really(*some, **how))
    watcher = ClaimWatcher()
    with a_claim(directory):
        for clock[0] in (1000.0, 1001.0, 1009.9, 1010.0, 1011.0):
            assert [claim.holders for claim in watcher.probe(directory, [UUID])] == [(os.getpid(),)]

    assert asked == [1000.0, 1010.0]


@pytest.mark.parametrize(
    ("hidden", "searches"), [(False, [1000.0, 1010.0]), (True, [1000.0, 1001.0, 1009.9, 1010.0, 1011.0])]
)
def test_a_watcher_searches_all_processes_for_an_unseen_holder_now_and_then_and_for_a_hidden_lock_at_each_look(
    directory, monkeypatch, hidden, searches
):
    asked: list[float] = []
    clock = [1000.0]
    monkeypatch.setattr("gpuguard.claims.records.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(records, "holders_of", lambda *_, **_how: asked.append(clock[0]) or {})
    monkeypatch.setattr(records, "held_by_no_process", lambda _directory, names: set(names) if hidden else set())
    watcher = ClaimWatcher()
    with a_lock(directory):
        for clock[0] in (1000.0, 1001.0, 1009.9, 1010.0, 1011.0):
            assert [claim.hidden for claim in watcher.probe(directory, [UUID])] == [hidden]

    assert sorted(set(asked)) == searches


def test_a_new_claim_of_a_device_whose_holder_was_sought_in_vain_is_seen_at_once(directory, monkeypatch):
    really = records.holders_of
    watcher = ClaimWatcher()
    monkeypatch.setattr(records, "holders_of", lambda *_, **_how: {})
    with a_lock(directory):
        watcher.probe(directory, [UUID])
    monkeypatch.setattr(records, "holders_of", really)
    with a_claim(directory):
        (claim,) = watcher.probe(directory, [UUID])

    assert claim.holders == (os.getpid(),)


def test_asking_does_not_make_lock_files(directory: LockDirectory) -> None:
    probe(directory, [UUID])

    assert not Path(directory.lock_path(UUID)).exists()


ROOM = Room("/run/x", True, size=64 * MIB, size_free=32 * MIB, files=1000, files_free=100)
ALICES, BOBS = RoomUsage(1, 500, 2 * MIB), RoomUsage(2, 300, MIB)


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({}, 0.9),
        ({"files_free": 600}, 0.5),
        ({"files_free": 0}, 1.0),
        ({"files": 0, "files_free": 0}, 0.5),
        ({"size_free": 4095}, 1.0),
        ({"size_free": 4096, "files": 0}, 1 - 4096 / (64 * MIB)),
        ({"files": 0, "size": 0, "size_free": 4096}, 0.0),
    ],
)
def test_of_room_that_part_is_used_of_which_less_is_left(fields, used):
    assert replace(ROOM, **fields).used == used


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"taken": (ALICES, BOBS)}, "{alice} has 500 of 1,000 files and 2MiB of 64MiB there"),
        ({"taken": (replace(ALICES, files=450),)}, "{alice} has 450 of 1,000 files and 2MiB of 64MiB there"),
        (
            {"taken": (replace(ALICES, files=449), replace(BOBS, files=400))},
            "900 of 1,000 files and 32MiB of 64MiB are taken",
        ),
        ({"taken": (ALICES,), "files_free": 201}, "799 of 1,000 files and 32MiB of 64MiB are taken"),
        ({"taken": (ALICES,), "files_free": 200}, "{alice} has 500 of 1,000 files and 2MiB of 64MiB there"),
        ({"taken": (replace(BOBS, files=400),)}, "900 of 1,000 files and 32MiB of 64MiB are taken"),
        (
            {"taken": (RoomUsage(2, 399, 28 * MIB),)},
            "900 of 1,000 files and 32MiB of 64MiB are taken, of which files without a name take 501 and 4MiB",
        ),
        (
            {"taken": (RoomUsage(2, 399, 40 * MIB),), "size": 640 * MIB, "size_free": 620 * MIB},
            "900 of 1,000 files and 20MiB of 640MiB are taken, of which files without a name take 501 and 0B",
        ),
    ],
)
def test_who_has_taken_the_room_is_said_where_it_is_scarce_and_one_user_has_half_of_it(fields, words):
    assert replace(ROOM, **fields).in_words() == words.format(alice=user_name(1))


def test_the_room_for_records_is_what_the_file_system_has_and_what_users_have_made(directory, monkeypatch):
    folder = Path(directory.records, "folder")
    folder.mkdir()
    names = [Path(directory.records, "file"), folder / "inner", folder]
    for name in names[:2]:
        name.write_bytes(b"x" * 5000)
    system = SimpleNamespace(f_blocks=100, f_frsize=4096, f_bfree=10, f_files=50, f_ffree=5)
    monkeypatch.setattr(disk_room.os, "statvfs", lambda path: system)
    status, usage = os.stat(directory.records), RoomUsage(os.geteuid(), 3, sum(n.stat().st_blocks for n in names) * 512)

    assert room_for_records(directory) == Room(directory.records, False, 409_600, 40_960, 50, 5, (usage,))
    monkeypatch.setattr(disk_room, "MOST_FILES", 1)
    assert [each.files for each in room_for_records(directory).taken] == [1]
    monkeypatch.undo()
    unnamed = os.open(path := f"{directory.records}/unnamed", os.O_WRONLY | os.O_CREAT)
    os.unlink(path)
    monkeypatch.setattr(disk_room.os, "statvfs", lambda path: system)
    real = os.lstat
    parent = os.path.dirname(directory.records)
    other = SimpleNamespace(st_dev=status.st_dev + 1)
    monkeypatch.setattr(disk_room.os, "lstat", lambda path: other if path == parent else real(path))
    room = room_for_records(directory)
    os.close(unnamed)
    assert (room.own, room.taken) == (True, (replace(usage, files=4),))


@pytest.mark.parametrize(
    ("code", "room", "said"),
    [
        (errno.ENOSPC, ROOM, f"No space left on device: {ROOM.in_words()}"),
        (errno.EDQUOT, ROOM, f"Disk quota exceeded: {ROOM.in_words()}"),
        (errno.ENOSPC, replace(ROOM, own=False), "No space left on device"),
        (errno.ENOSPC, None, "No space left on device"),
        (errno.EACCES, ROOM, "Permission denied"),
    ],
)
def test_why_nothing_can_be_written_is_said_with_who_has_the_room(directory, monkeypatch, code, room, said):
    def read(asked):
        assert asked is directory
        if room is None:
            raise OSError(errno.EIO, "x")
        return room

    monkeypatch.setattr(disk_room, "room_for_records", read)

    assert disk_room.why_full(directory, OSError(code, os.strerror(code))) == said
