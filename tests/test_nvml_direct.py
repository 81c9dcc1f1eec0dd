"""What is asked past the functions of nvidia-ml-py: the same answers, and the same faults, as through them."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml
from nvml_child import answer_of

BOTH_WAYS = """
from gpuguard.backends import nvml_calls, nvml_direct
import pynvml
binding = nvml_calls.start()
handle = binding.nvmlDeviceGetHandleByIndex(0)
ARGUMENTS = {
    "nvmlDeviceGetTemperature": (0,), "nvmlDeviceGetTemperatureThreshold": (1,), "nvmlDeviceGetClockInfo": (2,),
    "nvmlDeviceGetMaxClockInfo": (2,), "nvmlDeviceGetPcieThroughput": (1,), "nvmlDeviceGetSamples": (1, 0),
}

def plain(value):
    if isinstance(value, tuple):
        kind, rows = value
        return [getattr(row.sampleValue, ("dVal", "uiVal")[kind]) for row in rows]
    if isinstance(value, list) and value and not isinstance(value[0], (tuple, int)):
        return [(row.pid, row.usedGpuMemory) for row in value]
    return value

def asked(name, made):
    nvml_calls._known.clear()
    nvml_calls.DIRECT = made
    answer = nvml_calls.call(binding, name, handle, *ARGUMENTS.get(name, ()))
    return plain(answer.value), answer.code, answer.reason

def different(names, codes):
    for name in names:
        for code in codes:
            if code:
                fake.fail(name, code, device=0)
            ways = asked(name, nvml_direct.DIRECT), asked(name, {})
            fake.heal()
            if ways[0] != ways[1]:
                yield name, code, ways

# An older binding has no function for some of them, and an older driver none of the newer names.
names = [name for name in nvml_direct.DIRECT if hasattr(binding, name)]
"""
CODES = (0, 1, 2, 3, 4, 6, 7, 10, 13, 15, 16, 19, 21, 26, 27, 999, 12345)


@pytest.mark.parametrize("driver", [580, 470, 418])
def test_every_call_answers_what_the_binding_answers_whatever_its_code(tmp_path: Any, driver: int) -> None:
    with FakeNvml(tmp_path, devices=1, driver=driver) as fake:
        device = fake.devices[0]
        device.minor, device.pstate, device.compute_mode, device.samples = 3, 2, 1, [0, 70, 100]
        device.energy_mj, device.throttle_reasons = 2**40 + 1, 2**33 + 1
        fake.add_process(0, os.getpid(), GIB, "compute+graphics")
        fake.add_process(0, os.getppid(), -1, "mps")
        asked, wrong = answer_of(fake, f"{BOTH_WAYS}\nanswer = names, list(different(names, {CODES}))")

    assert wrong == []
    assert len(asked) > 15


def test_the_comparison_notices_a_number_of_another_size(fake: FakeNvml) -> None:
    fake.devices[0].energy_mj = 2**40 + 1
    cut = BOTH_WAYS + "nvml_direct._LONG = ()\nanswer = [name for name, *_ in different(names, (0,))]"

    assert answer_of(fake, cut) == ["nvmlDeviceGetTotalEnergyConsumption"]


def test_a_list_that_is_longer_than_its_room_is_asked_for_again(fake: FakeNvml) -> None:
    for _ in range(100):
        fake.add_process(0, os.getpid(), GIB, stays=1)
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    rows, calls = answer_of(
        fake, f"{BOTH_WAYS}\nanswer = asked({name!r}, nvml_direct.DIRECT)[0], fake.calls()[{name!r}]"
    )

    assert rows == [(os.getpid(), GIB)] * 100
    assert calls == 2


@pytest.mark.parametrize(
    ("now", "calls"),
    [([10] * 4, 1), ([10] * 7, 1), ([10] * 8, 3), ([10, 90] * 10, 3)],
)
def test_a_buffer_of_samples_is_read_in_one_call_and_whole_when_it_has_grown(
    fake: FakeNvml, now: list[int], calls: int
) -> None:
    fake.devices[0].samples = [50] * 4
    again = f"fake.devices[0].samples = {now}"
    ask = "nvml_calls.call(binding, 'nvmlDeviceGetSamples', handle, 1, 0).value"
    first, second, count = answer_of(
        fake, f"{BOTH_WAYS}\nfirst = {ask}\n{again}\nfake.reset_calls()\nanswer = first, {ask}, fake.calls()"
    )

    assert first == [50] * 4
    assert second == now
    assert count == {"nvmlDeviceGetSamples": calls}
