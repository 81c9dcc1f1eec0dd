"""What `gpuguard who` asks the driver for its text: no more than it shows, and nothing that it shows is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_nvml import GIB, MIB, FakeNvml
from nvml_child import answer_of

from gpuguard.backends.nvml_usage import MPS_SERVER

EACH_LOOK = (
    *("MemoryInfo_v2", "ComputeRunningProcesses_v3", "GraphicsRunningProcesses_v3", "Samples"),
    *("ComputeMode", "MigMode", "RemappedRows", "Temperature", "PowerUsage"),
)
OF_A_MOMENT_AGO = ("Temperature", "PowerUsage")
FIRST_LOOK = ("HandleByIndex_v2", "UUID", "Name")  # of each device; and four calls for all
BOTH = """
from gpuguard.nouns import replace
from gpuguard.views.usage import uses
from gpuguard.views.who import to_text
backend = nvml.open()
looks = [backend.sample(fields) for fields in (TEXT_FIELDS, WHO_FIELDS)]
answer = [to_text(replace(look, taken_at=0.0, clock=10**6), uses(look)) for look in looks]
"""


@pytest.fixture
def started() -> Iterator[Callable[..., int]]:
    """Starts a program that does nothing; returns its pid."""
    with ExitStack() as stack:

        def start(program: str = "sleep") -> int:
            job = stack.enter_context(subprocess.Popen([program, "600"]))
            stack.callback(job.kill)
            return job.pid

        yield start


@pytest.fixture
def busy(fake: FakeNvml, started: Callable[..., int]) -> FakeNvml:
    """8 devices with 5 processes each."""
    for number in range(40):
        fake.add_process(number // 5, started(), GIB, stays=1)
    return fake


def test_the_text_costs_100_driver_calls_on_eight_busy_devices(busy: FakeNvml, tmp_path: Path) -> None:
    """It was 213; nvitop -1 makes 189."""
    busy.reset_calls()
    words = [sys.executable, "-m", "gpuguard", "who", "--dir", str(tmp_path)]
    subprocess.run(words, env=busy.environment(), stdout=subprocess.DEVNULL, timeout=120, check=True)
    calls = busy.calls()

    assert sum(calls.values()) == 8 * len(EACH_LOOK + FIRST_LOOK) + 4, calls


def test_a_look_that_follows_asks_only_for_what_can_change(busy: FakeNvml) -> None:
    twice = "held = nvml.open(); held.sample(TEXT_FIELDS); fake.reset_calls(); held.sample(TEXT_FIELDS)"
    calls = answer_of(busy, f"{twice}; answer = fake.calls()")

    kept = {"ComputeMode", "RemappedRows", "MigMode", "GraphicsRunningProcesses_v3"}  # for ten seconds
    assert calls == {f"nvmlDeviceGet{name}": 8 for name in EACH_LOOK if name not in {*kept, *OF_A_MOMENT_AGO}}


@pytest.mark.parametrize(
    "seconds, fields, devices, asked",
    [
        (1.0, "TEXT_FIELDS", "None", 0),
        (2.0, "TEXT_FIELDS", "None", 8),  # as often as `who --watch` looks unless told otherwise
        (1.0, "WHO_FIELDS", "None", 8),  # as a guard that judges by them, and programs
        (1.0, "TEXT_FIELDS", "[fake.devices[3].uuid]", 1),
    ],
)
def test_who_looks_often_sees_a_temperature_and_a_power_draw_of_a_moment_ago(
    fake: FakeNvml, seconds: float, fields: str, devices: str, asked: int
) -> None:
    script = f"""
import time
held = nvml.open()
held.sample(TEXT_FIELDS)
real = time.clock_gettime
time.clock_gettime = lambda clock: real(clock) + {seconds}
for device in fake.devices:
    device.temperature, device.power_mw = 77, 377_000
fake.reset_calls()
look = held.sample({fields}, {devices})
answer = fake.calls(), {{(one.temperature, one.power_draw) for one in look.devices}}
"""
    before = (fake.devices[0].temperature, fake.devices[0].power_mw / 1000)
    calls, told = answer_of(fake, script)

    assert {calls.get(f"nvmlDeviceGet{name}", 0) for name in OF_A_MOMENT_AGO} == {asked}
    assert told == {(77.0, 377.0) if asked else before}


def test_a_temperature_that_could_not_be_read_is_asked_for_again_at_once(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetTemperature", 999, 2)
    script = """
held = nvml.open()
failed = held.sample(TEXT_FIELDS)
fake.fail("nvmlDeviceGetTemperature", 0, 2)
answer = [look.devices[2].temperature for look in (failed, held.sample(TEXT_FIELDS))]
"""
    assert answer_of(fake, script) == [None, float(fake.devices[2].temperature)]


def test_a_device_without_any_memory_in_use_has_no_graphics_process_either(fake: FakeNvml) -> None:
    for device in fake.devices[:7]:
        device.memory_used = MIB
    answer_of(fake, "nvml.open().sample(TEXT_FIELDS); answer = None")

    assert fake.calls()["nvmlDeviceGetGraphicsRunningProcesses_v3"] == 1


def test_json_and_everybody_else_ask_for_everything(busy: FakeNvml) -> None:
    calls = answer_of(busy, "nvml.open().sample(WHO_FIELDS); answer = fake.calls()")

    assert {"nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetProcessUtilization"} <= calls.keys()


@pytest.mark.parametrize("kind", ["compute", "graphics", "compute+graphics", "mps"])
def test_the_text_is_the_same_as_if_everything_had_been_asked_for(
    busy: FakeNvml, started: Callable[..., int], kind: str, tmp_path: Path
) -> None:
    busy.add_process(3, started(), GIB, "compute+mps" if kind == "mps" else kind)
    busy.add_process(3, started(shutil.copy(shutil.which("sleep") or "", tmp_path / MPS_SERVER.decode())), 30 * MIB)
    busy.devices[5].samples[0], busy.devices[5].sample_count = 255, 1  # none that can be: the rates tell
    text, everything = answer_of(busy, BOTH)

    assert text == everything
    assert sum(f" {kind} " in line for line in text) == (kind != "compute")


@pytest.mark.parametrize("fault", ["lost", "no list of graphics processes", "no samples"])
def test_what_cannot_be_read_is_said_in_the_same_words(busy: FakeNvml, fault: str) -> None:
    if fault == "lost":
        busy.lose(2)
    else:
        busy.fail("nvmlDeviceGetSamples" if fault == "no samples" else "nvmlDeviceGetGraphicsRunningProcesses", 999, 2)
    text, everything = answer_of(busy, BOTH)

    assert text == everything
