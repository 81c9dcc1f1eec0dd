"""Tests of one file's mutants in a process that has everything loaded: a fork of it tries one in milliseconds.

A fork replaces the code of the functions that are loaded already; what they start finds the damaged file on disk.
Does not choose mutants: see mutate.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from mutants import Mutant, with_hits

SLOW = 4.0  # a mutant that takes so many times as long as a test usually does hangs
PATIENCE = 20.0  # seconds more, for a machine that others load
ALL_PASSED, DOES_NOT_FIT = 42, 43  # how a fork ends


@dataclass(frozen=True)
class Usual:
    """What a test does with the sound file."""

    passed: bool
    skipped: bool
    seconds: float
    lines: frozenset[int]


class Session:
    """The tests of *name* in a copy of the project at *place*; answers what comes through *pipe*."""

    def __init__(self, place: Path, name: str, tests: Sequence[str], pipe: Connection, show: bool) -> None:
        self.place, self.name, self.tests, self.pipe, self.show = place, name, tests, pipe, show
        self.file, self.module = place / name, name.removesuffix(".py").replace("/", ".")
        self.sound = self.file.read_text(encoding="utf-8")
        self.hits = place / "hits"
        self.usual: dict[str, Usual] = {}
        self.failed = False
        self.speaks_to = os.dup(2)

    def run(self) -> None:
        """Load everything, and serve until the pipe is closed."""
        os.chdir(self.place)
        os.environ |= {"PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.place / "t")}
        sys.path.insert(0, str(self.place))
        sys.dont_write_bytecode, tempfile.tempdir = True, None
        self.hits.touch()
        self.hits.chmod(0o666)  # some tests run as other users
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        import pytest

        counted = with_hits(self.sound, str(self.hits))
        self.keys: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
        for key, code in _codes(compile(counted, str(self.file), "exec", dont_inherit=True)):
            self.keys.setdefault((code.co_name, code.co_firstlineno), []).append(key)
        self.file.write_text(counted, encoding="utf-8")
        pytest.main(["-q", "-s", "-p", "no:cacheprovider", *self.tests], plugins=[self])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Pytest says what became of a test."""
        self.failed |= report.failed
        self.skipped |= report.skipped
        if report.failed and self.show:
            os.write(self.speaks_to, f"{report.nodeid}\n{report.longreprtext}\n".encode())

    def pytest_runtestloop(self, session: Any) -> bool:
        """Pytest has loaded the tests, and would run them now."""
        self.items = {item.nodeid: item for item in session.items}
        self.last = SimpleNamespace(listchain=lambda: [session])  # keeps what a session sets up once
        with contextlib.suppress(EOFError):
            while True:
                word, *what = self.pipe.recv()
                self.pipe.send(getattr(self, word)(*what))
        self._clear_away()
        return True

    # What is asked for.

    def measure(self, part: int, parts: int) -> dict[str, Usual]:
        """What each test of this part does with the sound file; leaves the sound file behind."""
        answer = {}
        for nodeid, item in list(self.items.items())[part::parts]:
            for _ in range(2):  # one that fails gets a second try, as in CI
                open(self.hits, "w").close()
                if self.module in sys.modules:
                    sys.modules[self.module].hit_.seen.clear()
                began = time.monotonic()
                passed = self._passes(item)
                seconds = time.monotonic() - began
                if passed or self.skipped:
                    break
            lines = frozenset(map(int, self.hits.read_text().split()))
            answer[nodeid] = Usual(passed and not self.skipped, self.skipped, seconds, lines)
        return answer

    def remember(self, usual: dict[str, Usual]) -> None:
        """What all parts have measured."""
        self.usual = usual
        self.file.write_text(self.sound, encoding="utf-8")

    def kill(self, mutant: Mutant, tests: list[str]) -> tuple[str | None, list[str]]:
        """The test that fails with *mutant* and passes without, if there is one; and those that fail without it too."""
        fail: list[str] = []
        while tests:
            culprit = self._culprit(mutant, tests)
            if culprit is None or self._culprit(None, [culprit]) is None:
                return culprit, fail
            fail.append(culprit)
            tests = tests[tests.index(culprit) + 1 :]
        return None, fail

    def _culprit(self, mutant: Mutant | None, tests: list[str]) -> str | None:
        self.file.write_text(mutant.source if mutant else self.sound, encoding="utf-8")
        try:
            code = compile(mutant.source, str(self.file), "exec", dont_inherit=True) if mutant else None
            number, fits = (-1, False) if mutant and mutant.at_import else self._in_fork(code, tests)
            if mutant and not fits:
                return self._anew(tests)
            return None if number < 0 else tests[number]
        finally:
            self.file.write_text(self.sound, encoding="utf-8")

    def _in_fork(self, code: CodeType | None, tests: list[str]) -> tuple[int, bool]:
        """(The place of the test that fails or -1, whether the functions could be replaced)."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                if code:
                    self._transplant(code)
                for number, test in enumerate(tests):
                    os.write(writing, number.to_bytes(4, "big"))
                    if not self._passes(self.items[test]):
                        os._exit(1)
                os._exit(ALL_PASSED)
            except _DoesNotFit:
                os._exit(DOES_NOT_FIT)
            finally:
                os._exit(1)
        os.close(writing)
        pidfd, number, deadline = os.pidfd_open(pid), 0, time.monotonic() + PATIENCE
        try:
            while True:
                ready, _, _ = select.select([reading, pidfd], [], [], max(0.0, deadline - time.monotonic()))
                if reading in ready and (sign := os.read(reading, 4)):
                    number = int.from_bytes(sign, "big")
                    deadline = time.monotonic() + SLOW * self.usual[tests[number]].seconds + PATIENCE
                elif pidfd in ready or not ready:
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # not waited for yet, so the number is still its own
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status != ALL_PASSED:
                self._clear_away()
        finally:
            os.close(pidfd)
            os.close(reading)
        return -1 if status == ALL_PASSED else number, status != DOES_NOT_FIT

    def _anew(self, tests: list[str]) -> str | None:
        """The same in a process of its own, which loads the damaged file."""
        limit = SLOW * sum(self.usual[test].seconds for test in tests) + 2 * PATIENCE
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider", "--basetemp",
             str(self.place / "t" / "anew"), *tests],
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as run:  # fmt: skip
            try:
                said = run.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                said = ""
                os.killpg(run.pid, signal.SIGKILL)
        self._clear_away()
        if self.show:
            os.write(self.speaks_to, said.encode())
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        known = [test for test in tests if failed and failed[1].startswith(test)]
        return None if run.returncode == 0 else max(known, key=len, default=tests[0])

    def _clear_away(self) -> None:
        """End what a mutant has left behind: whatever was started with our directory for temporary files."""
        mark = f"TMPDIR={os.environ['TMPDIR']}".encode()
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                    os.kill(int(pid), signal.SIGKILL)

    def _passes(self, item: Any) -> bool:
        self.failed = self.skipped = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=self.last)
        return not self.failed

    def _transplant(self, code: CodeType) -> None:
        new = dict(_codes(code))
        gc.unfreeze()  # a test may have frozen all there was: nothing of that would be listed
        replaced = 0
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename == str(self.file):
                keys = self.keys.get((one.__code__.co_name, one.__code__.co_firstlineno), [])
                try:
                    one.__code__ = new[keys[0]]
                    replaced += 1
                except (KeyError, IndexError):
                    continue  # what counts hits, or an inner one that is there no more
                except ValueError as error:  # another number of closed-over names
                    raise _DoesNotFit from error
                if len(keys) > 1:  # two in one line
                    raise _DoesNotFit
        if not replaced:
            raise _DoesNotFit


class _DoesNotFit(Exception):
    pass


def _codes(code: CodeType, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], CodeType]]:
    """Each function of a file by the names around it, and which of that name it is."""
    count: dict[str, int] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name != "hit_":
            count[inner.co_name] = count.get(inner.co_name, 0) + 1
            key = (*path, inner.co_name, count[inner.co_name])
            yield key, inner
            yield from _codes(inner, key)
