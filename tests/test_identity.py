"""What /proc says of a process to a guard that may look into processes, but not open every file of the machine."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from gpuguard import procfs
from gpuguard.claims.release import listens
from gpuguard.enforcement import identity
from gpuguard.enforcement.actions import write

MAPPED = b"7f0-7f1 rw-s 00000000 00:06 451                              /dev/nvidiactl\n"
OTHERS = b"7f0-7f1 r-xp 00000000 fe:00 1 /home/alice/dev/nvidiactl.py\n7f0-7f1 rw-p 00000000 00:00 0 [heap]\n"
MADE_UP = (
    b"7f0-7f1 r-xp 00000000 fe:00 1      /home/eve/x\r7f0-7f1 r-xp 0 00:06 1 /dev/nvidia0\n"
    b"7f0-7f1 rw-p 00000000 00:00 0      [anon: /dev/nvidia0]\n"
)


def refused(*_: object) -> list[str]:
    raise PermissionError(13, "Permission denied")


def shows(monkeypatch: pytest.MonkeyPatch, maps: Callable[[str], bytes | None]) -> None:
    """Have *maps* tell what stands in /proc/PID/maps; None: it cannot be read."""

    def opened(path: str, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return refused() if (told := maps(path)) is None else io.BytesIO(told)  # type: ignore[return-value]

    monkeypatch.setattr("builtins.open", opened)


@pytest.mark.parametrize(
    ("maps", "uses"),
    [
        (OTHERS + MAPPED, True),
        (MAPPED.replace(b"ctl", b"-uvm"), True),
        (MAPPED.replace(b"ctl", b"-caps/nvidia-cap1"), True),
        (OTHERS, None),
        (MADE_UP, None),  # by whoever maps it
        (b"", None),
        (None, None),
    ],
)
def test_where_its_files_cannot_be_seen_its_mappings_say_that_it_uses_the_driver(monkeypatch, maps, uses):
    monkeypatch.setattr(identity, "DRIVER_FILE", "/dev/null")
    monkeypatch.setattr(identity.os, "listdir", refused)
    shows(monkeypatch, lambda path: maps)

    assert identity._has_open(os.getpid(), "/dev/null") is uses, "what cannot be seen is not known, never False"


def test_what_a_process_has_mapped_is_never_in_memory_at_once(monkeypatch):
    """65,530 mappings of a file with a long name, one letter of which was a smiley, took more than the service has."""

    class Endless(io.RawIOBase):
        left = 2**26

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            given = (OTHERS * (len(buffer) // len(OTHERS) + 1))[: min(len(buffer), self.left)]
            buffer[: len(given)] = given
            self.left -= len(given)
            return len(given)

    monkeypatch.setattr("builtins.open", lambda *how: io.BufferedReader(Endless()))
    tracemalloc.start()
    try:
        assert not identity._maps_the_driver("/proc/1/maps")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_where_its_files_can_be_seen_they_decide():
    with open("/dev/null", "rb"):
        assert identity._has_open(os.getpid(), "/dev/null") is True
    assert identity._has_open(os.getpid(), "/dev/full") is False


@pytest.mark.parametrize("files", [(), ("0",)])
def test_who_lets_another_thread_than_the_first_open_the_driver_uses_it_no_less(monkeypatch, files):
    """A thread can have files of its own, and the first one may have ended: then /proc/PID shows neither."""
    monkeypatch.setattr(identity.os, "listdir", lambda path: files if path.endswith("/fd") else ["17", "18"])
    shows(monkeypatch, lambda path: OTHERS + MAPPED if path == "/proc/17/task/18/maps" else b"")
    monkeypatch.setattr(identity, "in_time", lambda pid, kind, look: look())

    assert identity._has_open(17, "/dev/full") is True


def test_a_program_on_a_file_system_that_tells_root_nothing_is_known_by_its_path(monkeypatch):
    """One of FUSE, say: whose process spared him was out of every policy's reach."""
    stat = os.stat

    def closed(path, **more):
        return refused() if str(path).endswith("/exe") else stat(path, **more)

    path = identity.facts_of(os.getpid()).executable
    monkeypatch.setattr(identity.os, "stat", closed)

    facts = identity.facts_of(os.getpid())
    assert (facts.executable, facts.executable_owner) == (path, None)
    assert not identity.runs_one_of(facts, (path,)), "a path is nothing that protects: anybody can mount there"


@pytest.mark.terminal
def test_a_terminal_that_may_not_be_opened_takes_no_messages(monkeypatch):
    ours, theirs = os.openpty()
    number, uid = os.fstat(theirs).st_rdev, os.fstat(theirs).st_uid
    monkeypatch.setattr(os, "open", refused)

    assert write(number, uid, "hello", last=True) == "the terminal takes no messages"
    os.close(ours)
    os.close(theirs)


MOUNTED = 'mount --bind "$0" /usr/bin/login && exec /usr/bin/login -c "import time; print(flush=True); time.sleep(600)"'
# From outside of that namespace: whoever runs it there sees what everybody sees.
THROUGH = r"""
unshare -Urm sh -c 'mount --bind "$0" /usr/bin/login && exec sleep 600' "$0" &
until cmp -s "$0" /proc/$!/root/usr/bin/login; do kill -0 $! || exit; sleep 0.01; done
exec /proc/$!/root/usr/bin/login -c "import time; print(flush=True); time.sleep(600)"
"""


@pytest.mark.root
@pytest.mark.parametrize("way", ["mounted", "through", "in a container"])
def test_a_program_of_roots_that_somebody_mounted_at_the_path_of_another_is_not_that_one(way):
    """In a namespace of one's own /usr/bin/login can be Python: whoever ran that was out of every policy's reach."""
    python = os.path.realpath("/usr/bin/python3")
    if not os.path.exists("/usr/bin/login") or not os.path.exists(python):
        pytest.skip("no login or no Python of the system's")
    own = ["setpriv", "--reuid=20001", "--regid=20001", "--clear-groups"]
    words = {
        "mounted": [*own, "unshare", "-Urm", "sh", "-c", MOUNTED, python],
        "through": [*own, "sh", "-c", THROUGH, python],
        # Root made what it sees, so its paths are what root says.
        "in a container": ["unshare", "-m", "sh", "-c", MOUNTED.replace("exec", f"exec {' '.join(own)}"), python],
    }[way]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as child:
        try:
            if not child.stdout.readline():
                pytest.skip(f"no namespaces here: {child.stderr.read().decode()}")
            facts = identity.facts_of(child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    assert (facts.executable, facts.executable_owner, facts.uids[0]) == ("/usr/bin/login", 0, 20001)
    of_root = way == "in a container"
    assert identity.belongs_to_the_system(facts) is of_root
    assert identity.runs_one_of(facts, ("/usr/bin/login",)) is of_root


NAMED = """
import ctypes, os, sys, time
library = ctypes.CDLL(None)
library.prctl(15, os.fsencode(sys.argv[1]), 0, 0, 0)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "name", ["\rUid: 7 7 7", "\rSigCgt:", "\rSigCgt: x", "\rSigCgt:400000", "\x0bUid:\t0", "a\nUid: 3"]
)
def test_nobody_has_another_owner_or_other_signals_by_the_name_that_he_gives_himself(name):
    with subprocess.Popen([sys.executable, "-c", NAMED, name], stdout=subprocess.PIPE) as child:
        try:
            child.stdout.readline()
            owners = procfs.uid_of(child.pid), procfs.uid_behind(child.pid), identity.facts_of(child.pid).uids[0]
            assert (owners, listens(child.pid)) == ((os.getuid(),) * 3, False)
        finally:
            child.kill()
