"""The fake driver library itself: the real binding must not be able to tell it from a driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_nvml
import pytest
from fake_nvml import GIB, HANG, LOST, MIB, NOT_SUPPORTED, SUCCESS, FakeNvml

PRELUDE = "import pynvml as n\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(3)\n"


def started(fake: FakeNvml, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-c", PRELUDE + script],
        env={**os.environ, **fake.environment()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(fake: FakeNvml, script: str) -> str:
    with started(fake, script) as child:
        out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    return out.strip()


def test_a_running_program_sees_what_the_test_changes(fake: FakeNvml) -> None:
    fake.devices[3].temperature = 41
    with started(fake, "while input() != 'end': print(n.nvmlDeviceGetTemperature(h, 0))") as child:
        assert child.stdin and child.stdout
        print("next", file=child.stdin, flush=True)
        first = child.stdout.readline()
        fake.devices[3].temperature = 77
        print("next\nend", file=child.stdin, flush=True)

        assert (first, child.stdout.readline()) == ("41\n", "77\n")


def test_calls_are_counted_over_all_processes(fake: FakeNvml) -> None:
    for _ in range(2):
        printed(fake, "n.nvmlDeviceGetTemperature(h, 0)")

    assert fake.calls()["nvmlDeviceGetTemperature"] == 2
    fake.reset_calls()
    assert fake.calls() == {}


def test_one_function_can_be_slower_than_the_others(fake: FakeNvml) -> None:
    fake.slow("nvmlDeviceGetFanSpeed", 300_000)
    script = "import time\nbegun = time.monotonic()\nn.{}(h)\nprint(time.monotonic() - begun >= 0.3)"

    assert printed(fake, script.format("nvmlDeviceGetFanSpeed")) == "True"
    assert printed(fake, script.format("nvmlDeviceGetPowerUsage")) == "False"


def test_both_memory_versions_tell_of_the_same_bytes(fake: FakeNvml) -> None:
    fake.devices[3].memory_used = 7 * GIB
    fake.devices[3].memory_reserved = 500 * MIB
    script = "v1, v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)\n"

    told = printed(fake, f"{script}print(v1.used, v2.used, v2.reserved)")
    assert told == f"{7 * GIB + 500 * MIB} {7 * GIB} {500 * MIB}"


@pytest.mark.parametrize(("driver", "missing"), [(580, 0), (470, 3), (418, 5)])
def test_an_old_driver_does_not_have_the_newer_functions(tmp_path: Path, driver: int, missing: int) -> None:
    functions = [
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses_v2",
    ]
    with FakeNvml(tmp_path, driver=driver) as fake:
        there = printed(fake, f"print([hasattr(n.nvmlLib, name) for name in {functions}].count(False))")

    assert int(there) == missing


def test_a_process_is_listed_until_it_dies_and_its_memory_goes_with_it(fake: FakeNvml) -> None:
    script = "print(len(n.nvmlDeviceGetComputeRunningProcesses(h)), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used)"
    fake.devices[3].memory_used = 0
    with subprocess.Popen(["sleep", "60"]) as job:
        fake.add_process(3, job.pid, GIB)
        alive = printed(fake, script)
        job.kill()

    assert (alive, printed(fake, script)) == (f"1 {GIB}", "0 0")


CODE = """
def code(*words):
    try: return n.{}(h, *words)
    except n.NVMLError as error: return -error.value
"""


def test_a_fault_can_be_late_and_can_pass(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetTemperature", LOST, device=3, after=1, times=2)
    script = f"{CODE.format('nvmlDeviceGetTemperature')}print([code(0) for _ in range(4)])"

    assert printed(fake, script) == f"[34, {-LOST}, {-LOST}, 34]"


def test_a_fault_of_a_name_without_version_is_one_of_all_versions(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    script = f"{CODE.format('nvmlDeviceGetMemoryInfo')}print(code(), code(n.nvmlMemory_v2))"

    assert printed(fake, script) == "-3 -3"


def test_a_hanging_call_comes_back_when_it_is_healed(fake: FakeNvml) -> None:
    fake.hang("nvmlDeviceGetTemperature", device=3)
    with started(fake, "print('before')\nprint(n.nvmlDeviceGetTemperature(h, 0))") as child:
        assert child.stdout
        child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
        fake.fail("nvmlDeviceGetTemperature", SUCCESS, device=3)

        assert child.stdout.readline() == "34\n"


def test_the_library_can_crash(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetTemperature", fake_nvml.ABORT, device=3)
    with started(fake, "n.nvmlDeviceGetTemperature(h, 0)") as child:
        child.communicate(timeout=30)

    assert child.returncode == -signal.SIGABRT


def test_every_call_takes_the_latency(fake: FakeNvml) -> None:
    fake.latency_us = 20_000
    began = time.monotonic()
    printed(fake, "for _ in range(10): n.nvmlDeviceGetTemperature(h, 0)")

    assert time.monotonic() - began > 0.2


def test_without_a_compiler_the_message_names_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(RuntimeError, match="pip install ziglang"):
        fake_nvml._compiler()


def test_a_misspelt_function_or_field_is_caught(fake: FakeNvml) -> None:
    with pytest.raises(ValueError, match="nvmlDeviceGetTemperatures"):
        fake.fail("nvmlDeviceGetTemperatures", HANG)
    with pytest.raises(AttributeError, match="memory_usd"):
        fake.devices[0].memory_usd = 1
