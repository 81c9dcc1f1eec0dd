"""What /proc says of a process, where its owner writes as he likes, and where a read fails or tells a part.

What the kernel says of it comes back as it is or not at all, whatever stands beside it: nobody is taken for another.
"""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_snapshot

from gpuguard import deadline, host, procfs
from gpuguard.claims import holders
from gpuguard.clusters import slurm
from gpuguard.enforcement import identity
from gpuguard.model import GpuProcess

NAMED = """
import ctypes, os, sys, time
library = ctypes.CDLL(None)
library.prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)
print(flush=True)
time.sleep(600)
"""
# At most 15 bytes; behind a name that its owner chose the kernel writes ") S 4711 ...".
NAMES = (
    b"", b")", b") Z 1 1 1", b"x) S 1 1 1 0 ", b") R 0 0 0 0 0 0", b"a b c", b"\n", b"a\nUid:\t7\t7", b"\nUid: 7 7 7 7",
    b"\nTracerPid: 1", b"\rUid:\t7\r", b"\x0bUid:\t7", b"\x0cNSpid: 1 2", b"\nSigCgt:\tff", b"\xff\xfe",
    b"\xe2\x80\xa8Uid: 7", b"slurmstepd: [7.", b"kworker/0:0", b"\x1b[2J", b"\\n\\t\\", b"\t\t", b"(" * 15,
    b")" * 15,
)  # fmt: skip


@contextmanager
def a_process_called(name: bytes) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", NAMED, name.hex()], stdout=subprocess.PIPE) as child:
        assert child.stdout
        try:
            assert child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def snapshot_of(pid: int) -> Any:
    return a_snapshot(a_device(processes=(GpuProcess(pid),)))


def facts(pid: int) -> Any:
    found = identity.facts_of(pid)
    return found and (found.start_time, found.uids, found.parent, found.group, found.tracer, found.terminal)


# Each says who a process is; None: it cannot tell.
READERS: dict[str, Callable[[int], Any]] = {
    "start_time": procfs.start_time,
    "identified": lambda pid: (one := procfs.identified(GpuProcess(pid))) and (one.start_time, one.uid),
    "described": lambda pid: (one := procfs.described(GpuProcess(pid))) and (one.start_time, one.uid),
    "uid_behind": procfs.uid_behind,
    "owner": procfs.uid_of,
    "facts": facts,
    "ancestors": lambda pid: set(procfs.ancestors(pid)),
    "look_up": lambda pid: (one := procfs.process_facts(snapshot_of(pid)).get(pid)) and (one.parent, one.start_time),
    "tree": lambda pid: (one := procfs.read_stat(pid)) and (one.parent, one.group, one.session, one.start_time),
    "below": lambda pid: (one := procfs.descendants(os.getpid()).get(pid)) and (one.parent, one.start_time),
    "numbers": lambda pid: host.HostNumbers().tree(pid, host.members_of(pid)).get("processes"),
    "step": slurm.step_of,
    "job": lambda pid: slurm.job_of([pid]),
    "holder": lambda pid: holders.locked_inode(str(pid), "1"),
}


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has nobody known from before."""

    def forget() -> None:
        monkeypatch.setattr(procfs, "_known", {})
        monkeypatch.setattr(deadline, "_hanging", {})

    forget()
    return forget


def truth_of(pid: int) -> dict[str, Any]:
    """What the readers must say of a child of ours."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    told = stat[stat.rindex(b")") + 2 :].split()
    start, uid, me = int(told[19]) / os.sysconf("SC_CLK_TCK"), os.getuid(), os.getpid()
    return {
        "start_time": start,
        "identified": (start, uid),
        "described": (start, uid),
        "uid_behind": uid,
        "owner": uid,
        "facts": (start, (uid,) * 4, me, os.getpgid(pid), 0, int(told[4])),
        "ancestors": {me, *procfs.ancestors(me)},
        "look_up": (me, start),
        "tree": (me, os.getpgid(pid), os.getsid(pid), start),
        "below": (me, start),
        "numbers": 1.0,
        "step": None,
        "job": None,
        "holder": "",
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_name_makes_a_process_another_one(name: bytes, forgetful: object) -> None:
    with a_process_called(name) as pid:
        assert {what: reader(pid) for what, reader in READERS.items()} == truth_of(pid)


def test_a_reader_that_takes_the_first_bracket_for_the_end_of_a_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = procfs.parse_stat
    monkeypatch.setattr(
        procfs, "parse_stat", lambda line: read(b"1 (x) " + line.partition(b") ")[2].replace(b")", b""))
    )

    with pytest.raises(AssertionError):
        test_no_name_makes_a_process_another_one(b") Z 1 1 1", None)


# What becomes of a read: it fails, tells nothing, or less than there is.
Fate = Callable[[bytes], bytes]


def fails(code: int) -> Fate:
    def fate(_: bytes) -> bytes:
        raise OSError(code, os.strerror(code))

    return fate


FATES: dict[str, Fate] = {
    **{f"error {code}": fails(code) for code in (1, 2, 3, 5, 13, 22)},  # EPERM, ENOENT, ESRCH, EIO, EACCES, EINVAL
    "nothing": lambda told: b"",
    "half": lambda told: told[: len(told) // 2],
    "a line": lambda told: told.partition(b"\n")[0],
    "NULs": lambda told: bytes(len(told)),
    "no text": lambda told: b"\xff\xfe" * 40,
    "lines alone": lambda told: b"\n" * 40,
    "no numbers": lambda told: bytes(120 if 48 <= one < 58 else one for one in told),
}


@contextmanager
def fated(pid: int, which: int, fate: Fate, patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The read number *which* of a file of *pid*'s has that fate; [how many there were]."""
    count, opened = [0], {}
    really = {name: getattr(os, name) for name in ("open", "read", "pread", "close")}
    plainly = builtins.open

    def met(told: bytes) -> bytes:
        count[0] += 1
        return fate(told) if count[0] == which + 1 else told

    def open_it(path: Any, *more: Any, **options: Any) -> int:
        descriptor: int = really["open"](path, *more, **options)
        opened[descriptor] = str(path).startswith(f"/proc/{pid}/")
        return descriptor

    def read_it(descriptor: int, *more: Any) -> bytes:
        told: bytes = really["pread" if len(more) > 1 else "read"](descriptor, *more)
        return met(told) if opened.get(descriptor) else told

    def open_file(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if not str(path).startswith(f"/proc/{pid}/"):
            return plainly(path, mode, *more, **options)
        with plainly(path, "rb") as file:
            told = io.BytesIO(met(file.read()))
        return told if "b" in mode else io.TextIOWrapper(told, **options)

    with patch.context() as now:
        for name, ours in {"open": open_it, "read": read_it, "pread": read_it}.items():
            now.setattr(os, name, ours)
        now.setattr("builtins.open", open_file)
        yield count


@pytest.mark.parametrize("what", READERS)
def test_a_read_that_fails_or_tells_a_part_makes_nobody_another_one(
    what: str, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of it in turn; what was read in part counts for nothing, or is as true as before."""
    with a_process_called(b"x") as pid:
        true = truth_of(pid)[what]
        for name, fate in FATES.items():
            which, reads = 0, 1
            while which < reads:
                forgetful()
                with fated(pid, which, fate, monkeypatch) as count:
                    found = READERS[what](pid)
                reads, which = count[0], which + 1
                assert is_part_of(found, true), f"{what}: read {which}: {name}: {found}"


def is_part_of(found: Any, true: Any) -> bool:
    """Whether all that is told is true."""
    if isinstance(found, frozenset | set):
        return bool(found <= true)
    if isinstance(found, tuple) and isinstance(true, tuple):
        return all(one is None or one == other for one, other in zip(found, true, strict=True))
    return bool(found == true) or not found


def test_a_reader_that_lets_a_failing_read_through_is_found(
    forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: str, limit: int = 4096) -> bytes:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.read(descriptor, limit)
        finally:
            os.close(descriptor)

    monkeypatch.setattr(procfs, "read_proc", read)
    with pytest.raises(PermissionError):
        test_a_read_that_fails_or_tells_a_part_makes_nobody_another_one("start_time", forgetful, monkeypatch)
