"""The fake driver library itself: the real binding must not be able to tell it from a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import fake_nvml
import pytest
from fake_nvml import HANG, SUCCESS, FakeNvml

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


def test_one_function_can_be_slower_than_the_others(fake: FakeNvml) -> None:
    fake.slow("nvmlDeviceGetFanSpeed", 300_000)
    script = "import time\nbegun = time.monotonic()\nn.{}(h)\nprint(time.monotonic() - begun >= 0.3)"

    assert printed(fake, script.format("nvmlDeviceGetFanSpeed")) == "True"
    assert printed(fake, script.format("nvmlDeviceGetPowerUsage")) == "False"


def test_a_hanging_call_comes_back_when_it_is_healed(fake: FakeNvml) -> None:
    fake.hang("nvmlDeviceGetTemperature", device=3)
    with started(fake, "print('before')\nprint(n.nvmlDeviceGetTemperature(h, 0))") as child:
        assert child.stdout
        child.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
        fake.fail("nvmlDeviceGetTemperature", SUCCESS, device=3)

        assert child.stdout.readline() == "34\n"


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
