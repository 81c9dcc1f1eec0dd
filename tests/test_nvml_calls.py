"""Lists of processes, read past the functions of nvidia-ml-py: the same answers and faults, in one call."""

from __future__ import annotations

import _thread
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from commands import Gpuguard
from fake_nvml import ABORT, GIB, HANG, LOST, NOT_SUPPORTED, UNKNOWN, FakeNvml
from nvml_child import answer_of

from gpuguard.backends import nvml
from gpuguard.backends.nvml import THREADS, Ahead

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


# The first look at many devices, for which several threads ask: the same answers, and the same device at fault.


DEVICES = 8
BOTH_WAYS = """
from dataclasses import replace
from gpuguard.backends import nvml_calls
def looked(ahead):
    nvml.SLOW_SECONDS = -1.0
    fake.reset_calls()
    backend = nvml.open()
    backend.ahead = ahead
    looks = [replace(backend.sample(FIELDS), taken_at=0.0, clock=0.0, stats=None) for _ in range(2)]
    return looks, fake.calls()
answer = looked(False), looked(True)
"""


@pytest.mark.parametrize("fields", ["SELECT_FIELDS", "WHO_FIELDS", "TEXT_FIELDS", "ALL_FIELDS"])
@pytest.mark.parametrize("code", [0, NOT_SUPPORTED, UNKNOWN, LOST])
def test_whoever_asks_ahead_sees_the_same_and_asks_no_more(fake: FakeNvml, fields: str, code: int) -> None:
    for index in (0, 3, 4, 7):
        fake.add_process(index, os.getpid(), GIB, "compute+graphics", stays=1)
    fake.add_mig(5, "3g.40gb", gi=1)
    for index, name in enumerate(("GetMemoryInfo", "GetComputeRunningProcesses", "GetUUID", "GetHandleByIndex"), 1):
        if code:
            fake.fail(f"nvmlDevice{name}", code, device=index)
    alone, ahead = answer_of(fake, f"FIELDS = {fields}\n{BOTH_WAYS}")

    assert ahead == alone
    assert len(ahead[0][0].devices) >= DEVICES


def test_several_are_asked_at_once_each_when_its_turn_comes_at_the_latest() -> None:
    together = threading.Barrier(THREADS, timeout=30)
    asked: list[int] = []

    def ask(index: int) -> int:
        if index < THREADS:
            together.wait()  # nobody passes unless so many are here
        asked.append(index)
        return 10 * index

    ahead = Ahead(range(21), ask)

    assert [ahead.of(index) for index in range(21)] == [10 * index for index in range(21)]
    assert sorted(asked) == list(range(21))
    assert (ahead.of(3), ahead.of(99)) == (None, None), "there is nothing more to wait for"


def test_where_no_more_threads_may_begin_the_others_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun, asked = _thread.start_new_thread, [], []

    def start(*arguments: Any) -> int:
        begun.append(arguments)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        return real(*arguments)

    monkeypatch.setattr(nvml._thread, "start_new_thread", start)
    ahead = Ahead(range(2 * THREADS), lambda index: asked.append(index) or index + 1)

    told = {index: answer for index in range(2 * THREADS) if (answer := ahead.of(index))}
    assert told == {0: 1, THREADS: THREADS + 1}
    assert asked == [0, THREADS]


def test_an_ask_that_fails_holds_nobody_up(capfd: pytest.CaptureFixture[str]) -> None:
    def ask(index: int) -> None:
        raise ValueError(index)

    ahead = Ahead(range(8), ask)

    assert [ahead.of(index) for index in range(8)] == [None] * 8
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("one_at_a_time", [0, 1])
@pytest.mark.parametrize("code", [HANG, ABORT], ids=["hangs", "crashes"])
@pytest.mark.parametrize("bad", [(1,), (7,), (2, 5), (3, 7)], ids=str)
def test_the_device_at_fault_is_named_and_no_other_one(
    fake: FakeNvml, tmp_path: Path, bad: tuple[int, ...], code: int, one_at_a_time: int
) -> None:
    """Also by a driver that a call which hangs blocks for all: then another one seems to be at fault at first."""
    fake.latency_us, fake.one_at_a_time = 500, one_at_a_time
    for index in bad:
        fake.fail("nvmlDeviceGetMemoryInfo", code, index)
    good = [index for index in range(DEVICES) if index not in bad]
    found = Gpuguard(tmp_path, fake)("select", "-n", str(len(good)))

    assert found.stdout == ",".join(map(str, good)) + "\n", found.stderr
