"""Reading NVIDIA devices, through the real nvidia-ml-py and a fake driver library behind it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import (
    ABORT,
    GIB,
    HANG,
    LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    FakeNvml,
)  # fmt: skip
from nodes import Gpuguard
from nvml_child import answer_of, sampled

from gpuguard.backends.nvml import THREADS, Ahead
from gpuguard.model import Gap


def test_a_device_is_read_in_full(fake: FakeNvml) -> None:
    fake.add_process(3, os.getpid(), 5 * GIB, sm_utilization=40, time_stamp=100)
    fake.devices[3].samples = [0, 100, 50]
    device = sampled(fake).devices[3]

    assert (device.index, device.uuid) == (3, "GPU-00000003-fa4e-4000-8000-000000000003")
    assert (device.name, device.pci_bus_id, device.minor_number) == ("NVIDIA H100 80GB HBM3", "00000000:4B:00.0", 3)
    assert (device.numa_node, device.cpu_affinity) == (0, "0-15")
    assert (device.memory_total, device.memory_reserved) == (81559 * MIB, 540 * MIB)
    assert (device.memory_used, device.memory_free) == (5 * GIB + 4 * MIB, 81015 * MIB - 5 * GIB)
    assert device.utilization == 50
    assert (device.problems, device.compute_mode, device.mig_mode) == ((), "default", False)
    assert (device.temperature, device.temperature_slowdown, device.temperature_shutdown) == (34, 89, 92)
    assert (device.fan_speed, device.power_draw, device.power_limit, device.total_energy) == (30, 71, 700, 5000)
    assert (device.clock_sm, device.clock_sm_max, device.clock_memory, device.clock_memory_max) == (
        345,
        1980,
        2619,
        2619,
    )
    assert (device.pstate, device.throttle_reasons, device.persistence_mode) == (0, ("gpu_idle",), True)
    assert (device.ecc_mode, device.ecc_uncorrected_aggregate, device.retired_pages, device.remapped_rows) == (
        True,
        0,
        0,
        0,
    )
    assert (device.pcie_generation, device.pcie_width, device.pcie_tx, device.pcie_rx) == (5, 16, 102400, 204800)


def test_a_process_is_read_in_full(fake: FakeNvml, sleeper: int) -> None:
    fake.add_process(3, os.getpid(), 5 * GIB, sm_utilization=40, time_stamp=100)
    fake.add_process(3, sleeper, GIB, "compute+graphics")
    first, second = sampled(fake, "WHO_FIELDS").devices[3].processes or ()

    assert (first.pid, first.memory_used, first.kind, first.utilization) == (os.getpid(), 5 * GIB, "compute", 40)
    assert (first.uid, first.working_directory) == (os.getuid(), str(Path.cwd()))
    assert (second.kind, second.utilization) == ("compute+graphics", None)


def test_versions_come_with_the_model(fake: FakeNvml) -> None:
    snapshot = sampled(fake, "{MODEL}")

    assert (snapshot.driver_version, snapshot.nvml_version) == ("580.65.06", "13.580.65.06")
    assert snapshot.cuda_version == "13.0"


def kinds(fake: FakeNvml, fields: str) -> list[str]:
    return [process.kind for process in sampled(fake, fields).devices[0].processes or ()]


@pytest.mark.parametrize("kind", ["graphics", "mps"])
def test_graphics_and_mps_processes_come_with_the_details_only(fake: FakeNvml, kind: str) -> None:
    fake.add_process(0, os.getpid(), 100 * MIB, kind)

    assert kinds(fake, "{MEMORY, PROCESSES}") == []
    assert kinds(fake, "WHO_FIELDS") == [kind]


def test_a_desktop_shows_without_the_details_where_what_is_in_use_may_be_its(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB, "graphics")

    assert kinds(fake, "{MEMORY, PROCESSES}") == ["graphics"]

    fake.add_process(0, os.getppid(), 25 * MIB)
    fake.add_process(0, os.getppid(), 25 * MIB, "graphics")

    assert kinds(fake, "{MEMORY, PROCESSES}") == ["compute+graphics", "graphics"]

    fake.add_process(0, 1, GIB)

    assert kinds(fake, "{MEMORY, PROCESSES}") == ["compute", "compute"]  # a job: nothing more need be known


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        ("pass", 0),
        ("fake.clear_processes(0)", 0),
        ("fake.add_process(0, os.getpid(), GIB)", 1),
        ("backend.sample({MEMORY, PROCESSES})", 0),
        ("fake.add_process(0, os.getpid(), GIB); backend.sample({MEMORY, PROCESSES})", 1),
        ("nvml.SETTINGS_SECONDS = -1.0", 2),
        ("uuids = [device.uuid for device in backend.sample(WHO_FIELDS).devices]", 2),
    ],
)
def test_for_clients_of_mps_nobody_is_asked_again_who_had_none_unless_somebody_new_computes(
    tmp_path: Path, between: str, asked: int
) -> None:
    with FakeNvml(tmp_path, devices=2) as fake:
        for index in (0, 1):
            fake.add_process(index, os.getpid(), GIB)
        answer = answer_of(
            fake,
            f"backend, uuids = nvml.open(), None; backend.sample(WHO_FIELDS); fake.reset_calls(); {between}\n"
            "backend.sample(WHO_FIELDS, uuids)\n"
            "count = fake.calls().get('nvmlDeviceGetMPSComputeRunningProcesses_v3', 0)\n"
            "fake.add_process(0, os.getpid(), GIB, 'mps'); nvml.SETTINGS_SECONDS = -1.0\n"
            "answer = count, {each.kind for each in backend.sample(WHO_FIELDS).devices[0].processes}",
        )

    assert answer[0] == asked
    assert "mps" in answer[1]


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        ("pass", 0),
        ("fake.devices[0].memory_used -= GIB", 0),
        ("fake.devices[0].memory_used += 1", 1),
        ("fake.devices[0].memory_used += GIB; backend.sample({MEMORY, PROCESSES})", 0),  # which has asked already
        ("fake.add_process(0, os.getpid(), GIB)", 1),
        ("fake.fail('nvmlDeviceGetMemoryInfo', 999, device=0); backend.sample({MEMORY, PROCESSES}); fake.heal()", 1),
        ("nvml.SETTINGS_SECONDS = -1.0", 2),
        ("uuids = [device.uuid for device in backend.sample(WHO_FIELDS).devices]", 2),
    ],
)
def test_who_draws_is_asked_again_where_nobody_did_only_when_somebody_may_have_begun(
    tmp_path: Path, between: str, asked: int
) -> None:
    with FakeNvml(tmp_path, devices=2) as fake:
        for row in fake.devices[:2]:
            row.memory_used = 10 * GIB
        answer = answer_of(
            fake,
            f"backend, uuids = nvml.open(), None; backend.sample(WHO_FIELDS); {between}\n"
            "fake.reset_calls(); backend.sample(WHO_FIELDS, uuids)\n"
            "count = fake.calls().get('nvmlDeviceGetGraphicsRunningProcesses_v3', 0)\n"
            "fake.add_process(0, os.getpid(), GIB, 'graphics'); fake.devices[0].memory_used += GIB\n"
            "answer = count, {each.kind for each in backend.sample(WHO_FIELDS).devices[0].processes}",
        )

    assert answer[0] == asked
    assert "graphics" in str(answer[1])


def test_only_the_devices_that_are_asked_for_are_touched(fake: FakeNvml) -> None:
    touched = answer_of(
        fake,
        "backend = nvml.open(); uuids = [device.uuid for device in backend.sample({MEMORY, PROCESSES}).devices]\n"
        "answer = []; backend.progress = answer.append\n"
        "assert [d.uuid for d in backend.sample(ALL_FIELDS, [uuids[6], uuids[2]]).devices] == [uuids[2], uuids[6]]",
    )

    assert set(touched) == {2, 6}


def test_a_fresh_backend_finds_a_device_by_its_uuid(fake: FakeNvml) -> None:
    uuid = fake.devices[5].uuid

    assert [device.index for device in sampled(fake, "VERIFY_FIELDS", [uuid]).devices] == [5]
    assert "nvmlDeviceGetMemoryInfo_v2" not in fake.calls() or fake.calls()["nvmlDeviceGetMemoryInfo_v2"] == 1
    assert sampled(fake, "VERIFY_FIELDS", ["GPU-nobody"]).devices == ()


def test_progress_is_told_before_each_device_and_skipped_ones_are_not_touched(fake: FakeNvml) -> None:
    fake.hang("nvmlDeviceGetHandleByIndex", device=2)
    snapshot, touched = answer_of(
        fake,
        "backend = nvml.open(); touched = []; backend.progress = touched.append; backend.skip = {2}\n"
        "answer = backend.sample(WHO_FIELDS), touched",
    )

    assert touched == [0, 1, 3, 4, 5, 6, 7]
    assert (snapshot.devices[2].uuid, snapshot.devices[2].problems) == ("unknown-2", ("unresponsive",))
    assert Gap("unknown-2", "device", "a driver call did not come back") in snapshot.gaps


def test_utilization_is_one_reading_where_there_is_no_sample_buffer(fake: FakeNvml) -> None:
    fake.devices[0].utilization = 73
    fake.fail("nvmlDeviceGetSamples", NOT_SUPPORTED, device=0)

    assert sampled(fake, "{UTILIZATION}").devices[0].utilization == 73


def test_sm_utilization_is_asked_since_the_last_time_and_kept_for_the_next_look(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB, sm_utilization=30, time_stamp=1234)
    means = answer_of(fake, f"{UTILIZATION}\nanswer = [utilization(), utilization()]")

    assert means == [30, 30]
    assert fake.devices[0].last_seen_time_stamp == 1234


OTHER_PROCESS = "procfs.parse_stat = lambda line, parse=procfs.parse_stat: parse(line)._replace(start_time=1.0)"
UTILIZATION = """
from gpuguard.backends import nvml_fields
from gpuguard import procfs
backend = nvml.open()
utilization = lambda: backend.sample(WHO_FIELDS).devices[0].processes[0].utilization
row = fake._state.devices[0].processes[0]
"""


@pytest.mark.parametrize(
    ("event", "known"),
    [
        ("pass", 30),
        ("nvml_fields.KEPT_SECONDS = -1.0", None),  # too long ago
        (
            "procfs.parse_stat = lambda line, parse=procfs.parse_stat: parse(line)._replace(start_time=1.0)",
            None,
        ),  # another process has its pid
        ("fake.fail('nvmlDeviceGetProcessUtilization', UNKNOWN)", None),
        ("row.sm_utilization, row.time_stamp = 2**32 - 1, 1235", None),
        ("row.sm_utilization, row.time_stamp = 40, 1235", 40),
        ("fake.clear_processes(0); backend.sample(WHO_FIELDS); fake._state.devices[0].process_count = 1", None),
    ],
)
def test_sm_utilization_is_kept_for_the_same_process_and_not_for_long(fake: FakeNvml, event: str, known: int) -> None:
    fake.add_process(0, os.getpid(), GIB, sm_utilization=30, time_stamp=1234)

    assert answer_of(fake, f"{UTILIZATION}\nutilization()\n{event}\nanswer = utilization()") == known


def test_instances_follow_the_device_that_is_divided(fake: FakeNvml) -> None:
    first, second = fake.add_mig(1, "3g.40gb", gi=1), fake.add_mig(1, "1g.10gb", gi=9)
    fake.add_process(1, os.getpid(), 2 * GIB, gi=9, ci=0)
    snapshot = sampled(fake, "WHO_FIELDS")
    parent, three, one = snapshot.devices[1:4]

    assert [device.index for device in snapshot.devices] == [0, 1, 1, 1, 2, 3, 4, 5, 6, 7]
    assert (parent.mig_mode, parent.utilization) == (True, None)
    assert (three.uuid, three.parent_uuid, three.mig_profile) == (first, parent.uuid, "3g.40gb")
    assert (one.uuid, one.gpu_instance_id, one.compute_instance_id) == (second, 9, 0)
    assert (one.memory_total, one.memory_used, three.memory_used) == (10 * GIB, 2 * GIB + 13 * MIB, 13 * MIB)
    assert [process.pid for process in one.processes or ()] == [os.getpid()]
    assert three.processes == ()
    assert (one.utilization, one.temperature) == (None, parent.temperature)


def test_an_instance_is_found_by_its_uuid_and_read_with_its_parent(fake: FakeNvml) -> None:
    uuid = fake.add_mig(1, "3g.40gb", gi=1)
    fresh, again = answer_of(
        fake,
        f"backend = nvml.open(); fresh = backend.sample({{MEMORY, PROCESSES}}, [{uuid!r}])\n"
        f"touched = []; backend.progress = touched.append; backend.sample({{MEMORY, PROCESSES}}, [{uuid!r}])\n"
        "answer = fresh, touched",
    )

    assert [device.uuid for device in fresh.devices] == [fake.devices[1].uuid, uuid]
    assert again == [1]


def test_a_profile_follows_from_the_slices_where_the_name_does_not_tell(fake: FakeNvml) -> None:
    uuid = fake.add_mig(1, "3g.40gb", gi=1)
    fake.fail("nvmlDeviceGetName", NO_PERMISSION, device=1)
    device = sampled(fake, "{HEALTH}").device(uuid)

    assert device and device.mig_profile == "3g.40gb"


def test_links_connect_devices_directly_and_through_switches(fake: FakeNvml) -> None:
    fake.device_count = 5
    fake.connect(0, 0, fake.devices[1].bus_id)
    for device in (2, 3):
        fake.connect(device, 4, "00000000:C4:00.0", remote_type=2)
    fake.set_topology(0, 4, 10)
    names = {device.uuid: device.index for device in sampled(fake, "{MODEL}").devices}
    found = {(names[one], names[other]): how for one, other, how in sampled(fake, "{NVLINK, TOPOLOGY}").topology or ()}

    assert {pair for pair, how in found.items() if how == "NVLINK"} == {(0, 1), (2, 3)}
    assert (found[0, 4], found[0, 2], found[3, 4]) == ("PIX", "NODE", "SYS")
    assert len(found) == 10


def test_a_connection_never_changes_and_is_asked_once(fake: FakeNvml) -> None:
    calls = answer_of(
        fake,
        "backend = nvml.open(); backend.sample({TOPOLOGY}); fake.reset_calls()\n"
        "backend.sample({TOPOLOGY}); answer = fake.calls()",
    )

    assert calls == {}


def test_what_goes_over_nvlink_is_a_mean_between_two_looks(fake: FakeNvml) -> None:
    for link in range(4):
        fake.connect(0, link, "00000000:1b:00.0")
    script = """
backend, looks, device = nvml.open(), [], fake.devices[0]
for sent, received, at in ((1000, 9000, 10**6), (3000, 9000, 3 * 10**6), (3000, 9000, 3 * 10**6), (0, 0, 4 * 10**6)):
    device.nvlink_tx_kib, device.nvlink_rx_kib, device.nvlink_time_us = sent, received, at
    looks.append(backend.sample({NVLINK_FLOW}))
answer = [[(one.nvlink_tx, one.nvlink_rx) for one in look.devices[:2]] for look in looks], looks[0].gaps, fake.calls()
"""
    looks, gaps, calls = answer_of(fake, script)

    unknown = (None, None)
    assert looks == [[unknown] * 2, [(4 * 1000 * 1024, 0), unknown], [unknown] * 2, [unknown] * 2]
    assert {gap.reason for gap in gaps} == {"a rate needs two looks", "no link tells"}
    assert calls["nvmlDeviceGetFieldValues"] == 4 * 8


# Lists of processes, read past the functions of nvidia-ml-py: the same answers and faults, in one call.


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
    looks = [replace(backend.sample(FIELDS), taken_at=0.0, clock=0.0) for _ in range(2)]
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
    real, begun, asked = threading.Thread.start, [], []

    def start(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
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
