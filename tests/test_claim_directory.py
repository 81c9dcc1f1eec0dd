"""The directory of the lock files and its files: what is accepted, what is refused, and what a planted file can do."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sources import ROOT

from gpuguard.claims import claim as hold
from gpuguard.claims import directory as lockfiles
from gpuguard.claims.claim import lock_device
from gpuguard.claims.directory import Gate, LockDirectory, is_same_file, lock_directory, open_lock, try_flock
from gpuguard.claims.records import locked_devices, locked_slots, probe_in_gate
from gpuguard.errors import LockDirectoryError
from gpuguard.files import file_system

UUID = "GPU-00000000-0000-4000-8000-000000000000"


def test_a_directory_that_the_user_names_and_owns_is_made_ready(directory: LockDirectory) -> None:
    assert directory.owner == os.geteuid()
    assert Path(directory.locks).stat().st_mode & 0o777 == 0o755


def test_a_lock_file_is_readable_for_everybody_and_writable_for_nobody_whatever_the_umask_which_stays(directory):
    before = os.umask(0o077)
    try:
        os.close(open_lock(directory, UUID))
    finally:
        during = os.umask(before)

    assert (Path(directory.lock_path(UUID)).stat().st_mode & 0o777, during) == (0o444, 0o077)


@pytest.mark.parametrize(
    ("part", "mode"), [("lock", 0o777), ("lock", 0o1777), ("lock", 0o775), ("claims", 0o777)], ids=str
)
def test_a_directory_that_others_may_write_to_is_refused_with_advice(directory, part, mode):
    Path(directory.path, part).chmod(mode)

    with pytest.raises(LockDirectoryError, match=r"writable for others.*gpuguard setup"):
        lock_directory(directory.path)


def test_records_may_lie_in_a_sticky_directory(directory: LockDirectory) -> None:
    Path(directory.records).chmod(0o1777)

    assert lock_directory(directory.path) == directory


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
33 25 0:43 / /merged rw - overlay overlay rw
34 25 0:44 / /disk9p rw - 9p host rw
35 25 0:45 / /windows rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes/x", "ext4"),
        ("/home/alice/claims", "nfs4"),
        ("/run/gpuguard", "tmpfs"),
        ("/run/with space/x", "fuse.sshfs"),
        ("/merged/tmp", "overlay"),
        ("/disk9p", "9p"),
        ("/windows/x", "cifs"),
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
    assert "apptainer exec --bind /run/gpuguard" in done.stderr


def plant(kind: str, path: Path, precious: Path) -> None:
    precious.write_text("mine")
    precious.chmod(0o444)
    match kind:
        case "symbolic link":
            path.symlink_to(precious)
        case "hard link":
            os.link(precious, path)
        case "fifo":
            os.mkfifo(path, 0o444)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("symbolic link", "is a symbolic link"), ("hard link", "hard link"), ("fifo", "not a regular file")],
)
def test_what_is_planted_in_place_of_a_lock_file_is_not_followed_and_hangs_nobody(directory, tmp_path, kind, fault):
    plant(kind, Path(directory.lock_path(UUID)), precious := tmp_path / "precious")

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


def test_the_descriptor_is_not_inherited_by_accident(directory: LockDirectory) -> None:
    descriptor = open_lock(directory, UUID)
    inheritable = os.get_inheritable(descriptor)
    os.close(descriptor)

    assert not inheritable


def test_a_missing_lock_file_in_roots_directory_says_to_run_setup_again(directory, monkeypatch):
    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        raise PermissionError(13, "Permission denied") if flags & os.O_CREAT else FileNotFoundError(2, "No such file")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LockDirectoryError, match="Run `sudo gpuguard setup` again"):
        open_lock(directory, UUID)


def test_the_gate_lets_one_in_at_a_time(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockfiles, "GATE_SECONDS", 60.0)
    inside: list[int] = []
    most = []

    def enter() -> None:
        for _ in range(50):
            with Gate(directory):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert max(most) == 1


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
