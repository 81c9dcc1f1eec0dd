"""The fake driver library itself: the real binding must not be able to tell it from a driver."""

import os
import subprocess
import sys

import pytest
from fake_nvml import HANG, SUCCESS, FakeNvml

READS = """
import pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(3)
print("before")
print(n.nvmlDeviceGetTemperature(h, 0))
"""


def test_a_hanging_call_comes_back_when_it_is_healed(fake: FakeNvml) -> None:
    fake.hang("nvmlDeviceGetTemperature", device=3)
    words, environment = [sys.executable, "-u", "-c", READS], {**os.environ, **fake.environment()}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout and child.stdout.readline() == "before\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.2)
        fake.fail("nvmlDeviceGetTemperature", SUCCESS, device=3)

        assert child.stdout.readline() == "34\n"


def test_a_misspelt_function_or_field_is_caught(fake: FakeNvml) -> None:
    with pytest.raises(ValueError, match="nvmlDeviceGetTemperatures"):
        fake.fail("nvmlDeviceGetTemperatures", HANG)
    with pytest.raises(AttributeError, match="memory_usd"):
        fake.devices[0].memory_usd = 1
