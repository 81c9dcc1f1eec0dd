"""Processes that hold claims and do nothing else, as an idle notebook does; and records that say what they like.

with a_holder(directory, uuid, other) as holder: holder.id, holder.pid; holder.does("claim.reassert()")
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import RELEASED, ReleaseRequest, read_record
from gpuguard.claims.unlock import LockHandle, lock_handle, release_locks
from gpuguard.model import ClaimRecord

HOLD = """
import fcntl, json, os, pwd, subprocess, sys  # before it becomes somebody who may not read our Python
from types import SimpleNamespace
from gpuguard.errors import GpuguardError
from gpuguard.claims.claim import Claim, JobDetails, lock_device as take_lock
from gpuguard.claims.directory import lock_directory
path, uid, name, *uuids = sys.argv[1:]
if int(uid):
    os.setgroups([]); os.setresgid(*[int(uid)] * 3); os.setresuid(*[int(uid)] * 3)
directory = lock_directory(path)
locks = tuple(take_lock(directory, uuid, fcntl.LOCK_EX) for uuid in uuids)
assert all(locks)
claim = Claim(name, tuple(SimpleNamespace(uuid=uuid, index=place) for place, uuid in enumerate(uuids)), locks)
claim.write_record(directory, JobDetails("an idle notebook", ["jupyter"]))
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except GpuguardError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


BY_HAND = """
import fcntl, os, sys
path, *uids = sys.argv[1:]
lock = os.open(path, os.O_RDONLY | os.O_CREAT, 0o444)
fcntl.flock(lock, fcntl.LOCK_EX)
print("ready", flush=True)
for uid in uids[1:]:  # they are given a copy
    if not os.fork():
        uids[0] = uid
        break
os.setgroups([]); os.setresgid(*[int(uids[0])] * 3); os.setresuid(*[int(uids[0])] * 3)
sys.stdin.read()
"""


def by_hand(path: str, *uids: int) -> list[str]:
    """A command that locks the file at *path* without a record, as the first of *uids*; the others get copies."""
    return [sys.executable, "-c", BY_HAND, path, *map(str, uids)]


class Holder:
    """A process with a claim."""

    def __init__(self, directory: LockDirectory, child: subprocess.Popen[str], name: str, uid: int) -> None:
        self.directory, self.child, self.id, self.uid, self.pid = directory, child, name, uid, child.pid

    def does(self, expression: str) -> str:
        """What becomes of a Python expression in there."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(expression + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().rstrip("\n")

    def record(self) -> ClaimRecord | None:
        """What its claim says of itself; None when it is over."""
        return read_record(self.directory, self.uid, self.id)

    def lives(self) -> bool:
        return self.child.poll() is None


@contextlib.contextmanager
def a_holder(
    directory: LockDirectory, *uuids: str, name: str = "1dea1234", uid: int | None = None, **more: Any
) -> Iterator[Holder]:
    """A process of *uid* that claims *uuids*; killed at the end."""
    owner = os.geteuid() if uid is None else uid
    words = [sys.executable, "-c", HOLD, directory.path, str(0 if owner == os.geteuid() else owner), name, *uuids]
    with a_ready_child(words, **more) as child:
        yield Holder(directory, child, name, owner)


@contextlib.contextmanager
def a_ready_child(words: Sequence[str], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it is ready; killed at the end."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, text=True, **pipes, **more) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def see_locks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a guard with CAP_SYS_PTRACE sees others: that opens /proc/PID/fdinfo and not /proc/PID/fd."""
    really = os.listdir

    def listdir(path: str) -> list[str]:
        if path.startswith("/proc/") and path.endswith("/fd"):
            raise PermissionError(13, "Permission denied")
        return really(path)

    monkeypatch.setattr(os, "listdir", listdir)


@contextlib.contextmanager
def a_record(place: Path, uid: int, name: str, **says: Any) -> Iterator[None]:
    """A living record of *uid* among those of *place*."""
    with (place / f"claim.{uid}.{name}.json").open("x") as file:
        os.fchown(file.fileno(), uid, uid)
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"id": name, **says}, file)
        file.flush()
        yield


GPUS = tuple(f"GPU-{index:08x}-0000-4000-8000-{index:012x}" for index in range(4))
BY_ROOT = ReleaseRequest(RELEASED, "root", "another user waits")


def is_free(directory: LockDirectory, name: str) -> bool:
    descriptor = open_lock(directory, name)
    try:
        return try_flock(descriptor)
    finally:
        os.close(descriptor)


def free(directory: LockDirectory, names: Sequence[str] = GPUS) -> list[str]:
    return [name for name in names if is_free(directory, name)]


def release(directory: LockDirectory, record: ClaimRecord) -> LockHandle:
    """By root; what the claim was released by."""
    with lock_handle(directory, record) as handle:
        release_locks(handle, BY_ROOT)
    return handle
