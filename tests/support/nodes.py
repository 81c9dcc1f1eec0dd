"""Simulated nodes for tests, and real processes that use them.

from nodes import a_user, change, one, start
backend = start(place, "4xH100-80GB"); change(place, 1, faults=("lost",)); one(backend, 1)
with a_user(place, "0", 10 * GIB) as child: ...
"""

import fcntl
import io
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fake_nvml import FakeNvml

from gpuguard.backends import simulated, simulated_node, spawn
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.model import ALL_FIELDS

GIB = 2**30
USE = """
import sys, time
from gpuguard.backends import simulated
simulated.use(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), spec=sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


def start(place: str, spec: str = "4xH100-80GB") -> simulated.Simulated:
    simulated_node.create(
        simulated.directory(place), lambda: simulated_node.new_node(spec, place, clock()), replace=True
    )
    return simulated.open(place)


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def change(place: str, index: int, **change: object) -> None:
    simulated_node.update(place, lambda state: simulated_node.changed(state, (state.devices[index].uuid,), change))


def one(backend: simulated.Simulated, index: int = 0, groups: Collection[str] = ALL_FIELDS) -> Any:
    return next(device for device in backend.sample(groups).devices if device.index == index)


@contextmanager
def a_user(
    place: str, devices: str, memory: int, utilization: float = 0.0, *words: str | bytes, pass_fds: Collection[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", USE, place, devices, str(memory), str(utilization), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def beginning_with(code: str) -> Callable[[str, str], list[str]]:
    """In place of spawn.interpreter: the workers that read the driver run *code* before all else."""
    proper = spawn.interpreter
    return lambda main, word: proper(f"exec({code!r}); {main}", word)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def until(holds: Callable[[], Any], what: str = "", seconds: float = 60.0) -> Any:
    """Wait until *holds()* is true, and return what it returned."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or holds}"
        time.sleep(0.005)
    return found


def remove(place: Path | str) -> None:
    """Remove a directory in which processes that are just ending may still write."""

    def gone() -> bool:
        shutil.rmtree(place, ignore_errors=True)
        return not Path(place).exists()

    assert eventually(gone), f"{place} is still written to"


# Far beyond any answer, even on a busy machine: whatever takes so long hangs.
SECONDS = 60


@contextmanager
def on_terminal(
    words: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, **options: Any
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[..., str]]]:
    """A command on a terminal, and a function that gives what it shows: once that is as asked, or all in the end."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs, **options}
    shown = bytearray()

    def shown_until(holds: Callable[[str], object] = lambda text: False) -> str:
        ends = time.monotonic() + SECONDS
        with suppress(OSError):  # how Linux says that nobody has the terminal open any more
            while not holds(shown.decode(errors="replace")):
                assert time.monotonic() < ends, shown
                if select.select([ours], [], [], 0.1)[0]:
                    shown.extend(os.read(ours, 65536))
        assert b"Traceback" not in shown
        return shown.decode()

    with subprocess.Popen(words, env=environment, **streams) as process:
        os.close(theirs)
        yield process, shown_until
        process.kill()
    os.close(ours)


# The command line, but jobs are looked after every 0.2 s instead of every 2.5 s.
FAST = """
import sys
from gpuguard import run
from gpuguard.jobs import limits
run.TICK_SECONDS, run.FIRST_SAMPLE_SECONDS, limits.TEMPERATURE_SECONDS = 0.2, 0.1, 0.6
from gpuguard.cli import main
main(sys.argv[1:])
"""


# Commands that start no process which outlives them, and leave this one as it was: an interpreter for each takes longer
# than they do.
IN_THIS_PROCESS = frozenset(
    (
        "completion", "deny", "events", "explain", "history", "keep", "policy", "quarantine", "query", "queue",
        "release", "report", "reserve", "select", "setup", "sim", "who",
    )
)  # fmt: skip


class Gpuguard:
    """`gpuguard` with claims and events of its own; a traceback or a hang fails the test."""

    def __init__(self, place: Path, fake: FakeNvml | None, *, fast: bool = False, **variables: str) -> None:
        self.program = ["-c", FAST] if fast else ["-m", "gpuguard"]
        own = {"GPUGUARD_DIR": str(place / "claims"), "GPUGUARD_EVENTS": str(place / "events.jsonl")}
        if fake is None and "LD_LIBRARY_PATH" not in variables:
            own |= {"GPUGUARD_BACKEND": "simulated", "GPUGUARD_SIM_DIR": str(place / "node")}
        lock_directory(own["GPUGUARD_DIR"])
        self.environment = {**os.environ, **own, **(fake.environment() if fake else {}), **variables}

    def words(self, *words: str) -> list[str]:
        """The command line."""
        return [sys.executable, *self.program, *words]

    def __call__(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        plain = self.program == ["-m", "gpuguard"] and not options and not self._other_python()
        if plain and words[0] in IN_THIS_PROCESS:
            return self._here(*words)
        done = subprocess.run(
            self.words(*words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
            **options,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def _other_python(self) -> bool:
        """Whether its interpreter would be told other things than this one."""
        variables = {name: value for name, value in self.environment.items() if name.startswith("PYTHON")}
        return any(os.environ.get(name) != value for name, value in variables.items())

    def _here(self, *words: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with patch.dict(os.environ, self.environment, clear=True), redirect_stdout(out), redirect_stderr(err):
            status = run_command_line(list(words))
        assert "inside gpuguard" not in err.getvalue(), err.getvalue()
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    def json(self, *words: str) -> Any:
        """What it prints with --json."""
        return json.loads(self(*words, "--json").stdout)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The audit log, or what is of one kind in it."""
        path = Path(self.environment["GPUGUARD_EVENTS"])
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if kind in (None, event["kind"])]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start it."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(self.words(*words), env=self.environment, text=True, **options)
