"""What stands before every job, counted: calls of the driver, and modules that are loaded.  Times depend on the day."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Gpuguard
from fake_nvml import GIB, FakeNvml

import gpuguard

DEVICES = 8
IDLE = ["GetMemoryInfo_v2"] * DEVICES  # the first look
ONCE = ["InitWithFlags", "GetCount_v2"] + ["GetHandleByIndex_v2", "GetUUID"] * DEVICES
WINNER = [  # the second look, behind the lock
    "GetMemoryInfo_v2", "GetComputeRunningProcesses_v3", "GetComputeMode", "GetMigMode", "GetRemappedRows",
]  # fmt: skip
AFTERWARDS = ["GetMemoryInfo_v2"]  # whether it is free again
PYTHON = "import gpuguard; gpuguard.select_devices(1)"


@pytest.fixture
def half_busy(fake: FakeNvml) -> Iterator[FakeNvml]:
    """Eight devices, four of them in use by five processes each."""
    for index in range(DEVICES // 2):
        for _ in range(5):
            fake.add_process(index, os.getpid(), GIB, stays=1)
    fake.reset_calls()
    yield fake


def asked(fake: FakeNvml) -> list[str]:
    """The calls by their names, without nvml and Device."""
    names = {name: name.removeprefix("nvml").removeprefix("Device") for name in fake.calls()}
    return sorted(names[name] for name, count in fake.calls().items() for _ in range(count))


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        (["select"], ONCE + IDLE + WINNER),
        (["run", "--exec", "--", "true"], ONCE + IDLE + WINNER),
        (["run", "--", "true"], ONCE + IDLE + WINNER + AFTERWARDS),
    ],
)
def test_a_start_asks_the_driver_no_more_than_this(
    half_busy: FakeNvml, tmp_path: Path, words: list[str], calls: list[str]
) -> None:
    assert Gpuguard(tmp_path, half_busy)(*words).returncode == 0

    assert asked(half_busy) == sorted(calls)


def test_a_selection_in_python_asks_the_same(half_busy: FakeNvml, tmp_path: Path) -> None:
    environment = Gpuguard(tmp_path, half_busy).environment
    subprocess.run([sys.executable, "-c", PYTHON], env=environment, check=True, timeout=60)

    assert asked(half_busy) == sorted(ONCE + IDLE + WINNER)


def loaded_by(code: str, environment: dict[str, str]) -> set[str]:
    """The modules that *code* adds to a bare interpreter, in which it runs to its end."""
    root = gpuguard.__path__[0].rpartition("/")[0]
    # -S: what an installation runs at start (the finder of an editable install, coverage) is not ours.
    code = f"""
import sys
before = set(sys.modules)
sys.path += [{root!r}, *{sys.path!r}]
{code}
print(*sorted(set(sys.modules) - before), file=sys.stderr)
"""
    words = [sys.executable, "-S", "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


COMMAND = "from gpuguard.cli.dispatch import run_command_line as run\nassert run({!r}) == 0"
SAMPLER = """
from gpuguard.backends import nvml, nvml_loading, sampler
nvml_loading.load_bindings()
nvml.open().sample({'memory', 'processes', 'health'})
"""


# Six more than with Python 3.11: the standard library's own differ.  Since 3.14 ctypes loads sysconfig and threading.
@pytest.mark.parametrize(
    ("code", "most"),
    [
        (COMMAND.format(["run", "--", "true"]), 100),
        (COMMAND.format(["select"]), 80),
        (PYTHON, 41),
        (SAMPLER, 28 if sys.version_info < (3, 14) else 42),
    ],
    ids=["run", "select", "select_devices", "sampler"],
)
def test_a_start_loads_no_more_modules_than_this(fake: FakeNvml, tmp_path: Path, code: str, most: int) -> None:
    loaded = loaded_by(code, Gpuguard(tmp_path, fake).environment)

    assert len(loaded) <= most, sorted(loaded)


def test_a_selection_in_python_needs_next_to_nothing_of_the_standard_library(fake: FakeNvml, tmp_path: Path) -> None:
    loaded = loaded_by(PYTHON, Gpuguard(tmp_path, fake).environment)

    assert {name for name in loaded if not name.startswith("gpuguard")} <= {
        *("__future__", "errno", "fcntl", "select"),
        *("os", "os.path", "posixpath", "genericpath", "stat", "_stat", "_collections_abc"),  # of each interpreter
    }


def test_a_claim_in_python_loads_what_its_record_needs_while_the_driver_initialises(
    fake: FakeNvml, tmp_path: Path
) -> None:
    code = """
import gpuguard
from gpuguard.backends import sampler
receive = sampler.receive
def first(descriptor, ready=None):
    sampler.receive = receive
    for name in set(sys.modules):
        sys.modules.setdefault("seen." + name, None)  # which loaded_by() tells
    return receive(descriptor, ready)
sampler.receive = first
gpuguard.grab_gpus(1)
"""
    loaded = loaded_by(code, Gpuguard(tmp_path, fake).environment)

    assert {name for name in loaded if not name.startswith("seen.") and f"seen.{name}" not in loaded} == set()


def test_a_sampler_loads_nothing_for_instances_and_names_of_users_until_there_are_some(
    fake: FakeNvml, tmp_path: Path
) -> None:
    loaded = loaded_by(SAMPLER, Gpuguard(tmp_path, fake).environment)

    assert loaded.isdisjoint({"gpuguard.backends.nvml_mig", "gpuguard.users", "select"})


def test_a_selection_in_python_starts_its_sampler_before_it_loads_anything_else(fake: FakeNvml, tmp_path: Path) -> None:
    code = f"""
import os, sys
def look():
    for name in set(sys.modules) - before:
        sys.modules.setdefault("seen." + name, None)  # which loaded_by() tells
os.register_at_fork(before=look)
{PYTHON}
"""
    loaded = loaded_by(code, Gpuguard(tmp_path, fake).environment)
    first = {name.removeprefix("seen.") for name in loaded if name.startswith("seen.")}

    assert {name for name in first if name.startswith("gpuguard.")} == {
        *("gpuguard.grab", "gpuguard.errors"),
        *("gpuguard.backends", "gpuguard.backends.sampler"),
    }
    assert first.isdisjoint({"collections", "contextlib", "functools", "importlib", "select", "types", "warnings"})


def test_a_copy_that_becomes_a_sampler_loads_next_to_nothing_before_it_serves(fake: FakeNvml, tmp_path: Path) -> None:
    code = """
from gpuguard.backends import sampler
sampler.serve = lambda name, requests, replies, *_: sampler.send(replies, tuple(sys.modules))
channel = sampler.start_by_fork("nvml")
for name in set(sampler.receive(channel[2])) - set(sys.modules):
    sys.modules["copy." + name] = None
"""
    loaded = loaded_by(code, Gpuguard(tmp_path, fake).environment)

    assert {name for name in loaded if name.startswith("copy.")} <= {"copy._signal"}
