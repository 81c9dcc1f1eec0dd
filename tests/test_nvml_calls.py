"""Lists of processes, read past the functions of nvidia-ml-py: the same answers and faults, in one call."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fake_nvml import GIB, FakeNvml
from nvml_child import answer_of

COMPARED = """
from gpuguard.backends import nvml_calls
binding = nvml_calls.start()
handle = binding.nvmlDeviceGetHandleByIndex(0)

def by_the_binding(name):
    try:
        rows = getattr(binding, name)(handle)
    except binding.NVMLError as error:
        return None, error.value
    return [(row.pid, row.usedGpuMemory) for row in rows], 0

def different(names, codes):
    for name in names:
        for code in codes:
            if code:
                fake.fail(name, code, device=0)
            answer = nvml_calls.call(binding, name, handle)
            expected = by_the_binding(name)
            fake.heal()
            if (answer.value, answer.code) != expected:
                yield name, code, answer.value, answer.code, expected

# An older binding has no function for some of them.
names = sorted(name for name in nvml_calls.PROCESS_LISTS if hasattr(binding, name))
"""
CODES = (0, 1, 2, 3, 4, 6, 7, 10, 13, 15, 16, 19, 21, 26, 27, 999, 12345)


@pytest.mark.parametrize("driver", [580, 470, 418])
def test_a_list_is_what_the_binding_answers_whatever_the_code_of_the_driver(tmp_path: Any, driver: int) -> None:
    with FakeNvml(tmp_path, devices=1, driver=driver) as fake:
        fake.add_process(0, os.getpid(), GIB, "compute+graphics")
        fake.add_process(0, os.getppid(), -1, "mps")
        asked, wrong = answer_of(fake, f"{COMPARED}\nanswer = names, list(different(names, {CODES}))")

    assert wrong == []
    assert len(asked) >= 3


def test_the_comparison_notices_a_list_that_differs(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB)
    planted = f"{COMPARED}\nby_the_binding = lambda name: ([], 0)\nanswer = list(different(names, (0,)))"

    assert answer_of(fake, planted) != []


def test_a_list_takes_one_call_and_one_that_is_longer_than_its_room_two(fake: FakeNvml) -> None:
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    ask = f"{COMPARED}\nanswer = nvml_calls.call(binding, {name!r}, handle).value, fake.calls()[{name!r}]"
    fake.add_process(0, os.getpid(), GIB, stays=1)
    short, one_call = answer_of(fake, ask)
    for _ in range(99):
        fake.add_process(0, os.getpid(), GIB, stays=1)
    long, calls = answer_of(fake, f"fake.reset_calls()\n{ask}")

    assert (short, one_call) == ([(os.getpid(), GIB)], 1)
    assert (long, calls) == ([(os.getpid(), GIB)] * 100, 2)
