"""Reading NVIDIA devices, through the real nvidia-ml-py and a fake driver library behind it."""

import os
import subprocess
from pathlib import Path

import psutil
import pynvml
import pytest
from fake_nvml import (
    ABORT,
    GIB,
    HANG,
    INSUFFICIENT_SIZE,
    LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeNvml,
)
from nodes import Gpuguard
from nvml_child import answer_of, gaps_of, sampled

from gpuguard.backends.nvml_calls import has_glibc

knows_fabrics = pytest.mark.skipif(
    not hasattr(pynvml, "c_nvmlGpuFabricInfo_v2_t"), reason="nvidia-ml-py is older than NVLink fabrics with a health"
)


def test_a_device_is_read_in_full(fake: FakeNvml) -> None:
    fake.add_process(3, os.getpid(), 5 * GIB, sm_utilization=40, time_stamp=100)
    fake.devices[3].samples = [0, 100, 50]
    snapshot = sampled(fake)
    told = {
        "index": 3, "uuid": "GPU-00000003-fa4e-4000-8000-000000000003", "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": "00000000:4B:00.0", "minor_number": 3, "numa_node": 0, "cpu_affinity": "0-15",
        "memory_total": 81559 * MIB, "memory_reserved": 540 * MIB, "memory_used": 5 * GIB + 4 * MIB,
        "memory_free": 81015 * MIB - 5 * GIB, "utilization": 50, "problems": (), "compute_mode": "default",
        "mig_mode": False, "temperature": 34, "temperature_slowdown": 89, "temperature_shutdown": 92, "fan_speed": 30,
        "power_draw": 71, "power_limit": 700, "total_energy": 5000, "clock_sm": 345, "clock_sm_max": 1980,
        "clock_memory": 2619, "clock_memory_max": 2619, "pstate": 0, "throttle_reasons": ("gpu_idle",),
        "persistence_mode": True, "display_active": False, "ecc_mode": True, "ecc_uncorrected_aggregate": 0,
        "retired_pages": 0, "remapped_rows": 0, "pcie_generation": 5, "pcie_width": 16, "pcie_tx": 102400,
        "pcie_rx": 204800, "remapped_rows_uncorrected": 0, "clock_graphics": 345, "clock_video": 765,
        "encoder_utilization": 12, "decoder_utilization": 34,
    }  # fmt: skip

    assert {name: getattr(snapshot.devices[3], name) for name in told} == told
    versions = (snapshot.driver_version, snapshot.nvml_version, snapshot.cuda_version)
    assert versions == ("580.65.06", "13.580.65.06", "13.0")


def test_a_process_is_read_in_full(fake: FakeNvml, sleeper: int) -> None:
    video = {"memory_utilization": 9, "encoder_utilization": 41, "decoder_utilization": 101}  # more than there can be
    fake.add_process(3, os.getpid(), 5 * GIB, sm_utilization=40, time_stamp=100, **video)
    fake.add_process(3, sleeper, GIB, "compute+graphics")
    first, second = sampled(fake, "WHO_FIELDS").devices[3].processes or ()

    assert (first.pid, first.memory_used, first.kind, first.utilization) == (os.getpid(), 5 * GIB, "compute", 40)
    assert (first.memory_utilization, first.encoder_utilization, first.decoder_utilization) == (9, 41, None)
    assert (first.uid, first.working_directory) == (os.getuid(), str(Path.cwd()))
    assert (second.kind, second.utilization) == ("compute+graphics", None)


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

    fake.add_process(0, 1, 9 * GIB)

    assert kinds(fake, "{MEMORY, PROCESSES}") == ["compute", "compute"]  # a job: nothing more need be known


def asked_anew(fake: FakeNvml, kind: str, function: str, between: str) -> int:
    """How often two devices that were read before are asked for their processes of *kind*; one is seen thereafter."""
    count, kinds = answer_of(
        fake,
        f"backend, uuids = nvml.open(), None; backend.sample(WHO_FIELDS); fake.reset_calls(); {between}\n"
        "backend.sample(WHO_FIELDS, uuids)\n"
        f"count = fake.calls().get({function!r}, 0); nvml.SETTINGS_SECONDS = -1.0\n"
        f"fake.add_process(0, os.getpid(), GIB, {kind!r}); fake.devices[0].memory_used += GIB\n"
        "answer = count, {each.kind for each in backend.sample(WHO_FIELDS).devices[0].processes}",
    )
    assert kind in str(kinds)
    return int(count)


ANYTHING_CAN_BE = [
    ("pass", 0),
    ("nvml.SETTINGS_SECONDS = -1.0", 2),
    ("uuids = [device.uuid for device in backend.sample(WHO_FIELDS).devices]", 2),
]


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        *ANYTHING_CAN_BE,
        ("fake.clear_processes(0)", 0),
        ("fake.add_process(0, os.getpid(), GIB)", 1),
        ("backend.sample({MEMORY, PROCESSES})", 0),
        ("fake.add_process(0, os.getpid(), GIB); backend.sample({MEMORY, PROCESSES})", 1),
    ],
)
def test_for_clients_of_mps_nobody_is_asked_again_who_had_none_unless_somebody_new_computes(tmp_path, between, asked):
    with FakeNvml(tmp_path, devices=2) as fake:
        for index in (0, 1):
            fake.add_process(index, os.getpid(), GIB)

        assert asked_anew(fake, "mps", "nvmlDeviceGetMPSComputeRunningProcesses_v3", between) == asked


@pytest.mark.parametrize(
    ("between", "asked"),
    [
        *ANYTHING_CAN_BE,
        ("fake.devices[0].memory_used -= GIB", 0),
        ("fake.devices[0].memory_used += 1", 1),
        # It has asked already.
        ("fake.devices[0].memory_used += GIB; backend.sample({MEMORY, PROCESSES}); fake.reset_calls()", 0),
        ("fake.add_process(0, os.getpid(), GIB)", 1),
        ("fake.fail('nvmlDeviceGetMemoryInfo', 999, device=0); backend.sample({MEMORY, PROCESSES}); fake.heal()", 1),
    ],
)
def test_who_draws_is_asked_again_where_nobody_did_only_when_somebody_may_have_begun(tmp_path, between, asked):
    with FakeNvml(tmp_path, devices=2) as fake:
        for row in fake.devices[:2]:
            row.memory_used = 10 * GIB

        assert asked_anew(fake, "graphics", "nvmlDeviceGetGraphicsRunningProcesses_v3", between) == asked


def test_only_the_devices_that_are_asked_for_are_touched_by_a_backend_that_knows_them_and_by_a_fresh_one(fake):
    uuid = fake.devices[5].uuid
    assert [device.index for device in sampled(fake, "VERIFY_FIELDS", [uuid]).devices] == [5]
    assert fake.calls()["nvmlDeviceGetMemoryInfo_v2"] == 1

    touched = answer_of(
        fake,
        "backend = nvml.open(); uuids = [device.uuid for device in backend.sample({MEMORY, PROCESSES}).devices]\n"
        "answer = []; backend.progress = answer.append\n"
        "assert [d.uuid for d in backend.sample(ALL_FIELDS, [uuids[6], uuids[2]]).devices] == [uuids[2], uuids[6]]",
    )
    assert set(touched) == {2, 6}


def test_utilization_is_one_reading_where_there_is_no_sample_buffer(fake: FakeNvml) -> None:
    fake.devices[0].utilization = 73
    fake.fail("nvmlDeviceGetSamples", NOT_SUPPORTED, device=0)

    assert sampled(fake, "{UTILIZATION}").devices[0].utilization == 73


def test_sm_utilization_is_asked_since_the_last_time_and_kept_for_the_next_look(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB, sm_utilization=30, time_stamp=1234)
    means = answer_of(fake, f"{UTILIZATION}\nanswer = [utilization(), utilization()]")

    assert means == [30, 30]
    assert fake.devices[0].last_seen_time_stamp == 1234


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
        # Another process has its pid.
        ("procfs.parse_stat = lambda line, parse=procfs.parse_stat: parse(line)._replace(start_time=1.0)", None),
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

    assert (three.uuid, three.parent_uuid, three.mig_profile) == (first, parent.uuid, "3g.40gb")
    assert (one.uuid, one.gpu_instance_id, one.compute_instance_id) == (second, 9, 0)
    assert (one.memory_total, one.memory_used, three.memory_used) == (10 * GIB, 2 * GIB + 13 * MIB, 13 * MIB)
    assert [process.pid for process in one.processes or ()] == [os.getpid()]
    assert three.processes == ()
    assert one.temperature == parent.temperature


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


def test_what_goes_over_nvlink_is_a_mean_between_two_looks(fake: FakeNvml) -> None:
    for link in range(4):
        fake.connect(0, link, "00000000:1b:00.0")
    script = """
backend, looks, device = nvml.open(), [], fake.devices[0]
for sent, received, at in ((1000, 9000, 10**6), (3000, 9000, 3 * 10**6), (3000, 9000, 3 * 10**6), (0, 0, 4 * 10**6)):
    device.nvlink_tx_kib, device.nvlink_rx_kib, device.nvlink_time_us = sent, received, at
    looks.append(backend.sample({NVLINK_FLOW}))
flows = [[(one.nvlink_tx, one.nvlink_rx, one.nvlink_flow) for one in look.devices[:2]] for look in looks]
answer = flows, looks[0].gaps, fake.calls()
"""
    looks, gaps, calls = answer_of(fake, script)

    unknown = (None, None, None)
    known = (4 * 1000 * 1024, 0, tuple((link, 1000 * 1024, 0) for link in range(4)))
    assert looks == [[unknown] * 2, [known, unknown], [unknown] * 2, [unknown] * 2]
    assert {gap.reason for gap in gaps} == {"a rate needs two looks", "no link tells"}
    assert calls["nvmlDeviceGetFieldValues"] == 4 * 8


# Lists of processes are read past the functions of nvidia-ml-py: the same answers and faults, in one call.
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
ANSWER_CODES = (0, 1, 2, 3, 4, 6, 7, 10, 13, 15, 16, 19, 21, 26, 27, 999, 12345)


@pytest.mark.parametrize("driver", [580, 470, 418])
def test_a_list_is_what_the_binding_answers_whatever_the_code_of_the_driver(tmp_path: Path, driver: int) -> None:
    with FakeNvml(tmp_path, devices=1, driver=driver) as fake:
        fake.add_process(0, os.getpid(), GIB, "compute+graphics")
        fake.add_process(0, os.getppid(), -1, "mps")
        asked, wrong = answer_of(fake, f"{COMPARED}\nanswer = names, list(different(names, {ANSWER_CODES}))")

    assert wrong == []
    assert len(asked) >= 3


def test_the_comparison_notices_a_list_that_differs(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB)
    planted = f"{COMPARED}\nby_the_binding = lambda name: ([], 0)\nanswer = list(different(names, (0,)))"

    assert answer_of(fake, planted) != []


DEVICES = 8
BOTH_WAYS = """
from dataclasses import replace
import psutil
from gpuguard.backends import nvml_calls
host = psutil.virtual_memory()  # where a GPU has no memory of its own, it has the host's, which moves
psutil.virtual_memory = lambda: host
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


@pytest.mark.parametrize("begin", [0, 1])
def test_where_no_more_threads_may_begin_the_others_are_not_waited_for(fake: FakeNvml, begin: int) -> None:
    crowded = f"""
import threading
really, begun = threading.Thread.start, []
def start(thread):
    begun.append(thread)
    if len(begun) > {begin}:
        raise RuntimeError("can't start new thread")
    really(thread)
threading.Thread.start = start
FIELDS = SELECT_FIELDS
"""
    (alone, _), (ahead, _), tried = answer_of(fake, f"{crowded}{BOTH_WAYS}\nanswer = *answer, len(begun)")

    assert ahead == alone
    assert tried > begin


@pytest.mark.parametrize("one_at_a_time", [0, 1])
@pytest.mark.parametrize("code", [HANG, ABORT], ids=["hangs", "crashes"])
@pytest.mark.parametrize("bad", [(1,), (3, 7)], ids=str)
def test_the_device_at_fault_is_named_and_no_other_one(fake, tmp_path, bad, code, one_at_a_time):
    """Also by a driver that a call which hangs blocks for all: then another one seems to be at fault at first."""
    fake.latency_us, fake.one_at_a_time = 500, one_at_a_time
    for index in bad:
        fake.fail("nvmlDeviceGetMemoryInfo", code, index)
    good = [index for index in range(DEVICES) if index not in bad]
    found = Gpuguard(tmp_path, fake)("select", "-n", str(len(good)))

    assert found.stdout == ",".join(map(str, good)) + "\n", found.stderr


@pytest.mark.parametrize(
    ("device_field", "value", "field"),
    [
        ("temperature", -5, "temperature"),
        ("temperature", 131, "temperature"),
        ("fan", 255, "fan_speed"),
        ("utilization", 101, "utilization"),
        ("memory_utilization", 4_294_967_295, "memory_utilization"),
        ("power_mw", 4_294_967_295, "power_draw"),
        ("pstate", 32, "pstate"),
        ("compute_mode", 9, "compute_mode"),
        ("pcie_width", 0, "pcie_width"),
        ("memory_total", 0, "memory_total"),
        ("memory_used", 2**60, "memory_used"),
        ("memory_reserved", 2**60, "memory_free"),
        ("numa_node", -1, "numa_node"),
        ("name", b"\xff\xfe", "name"),
        ("bus_id", b"\xff\xfe", "pci_bus_id"),
    ],
)
def test_a_value_that_cannot_be_is_unknown_and_says_so(fake, device_field, value, field):
    setattr(fake.devices[2], device_field, value)
    snapshot = sampled(fake)

    assert getattr(snapshot.devices[2], field) is None
    assert field in gaps_of(snapshot, snapshot.devices[2])
    assert getattr(snapshot.devices[3], field) is not None


def test_memory_of_a_process_that_the_driver_does_not_tell_is_unknown(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), -1)
    device = sampled(fake, "{MEMORY, PROCESSES}").devices[0]

    assert device.processes and device.processes[0].memory_used is None
    assert device.processes_plausible


@pytest.mark.parametrize("pid", [0, 1, -1, 4294967295, 2**31 - 1])
def test_an_impossible_pid_makes_the_whole_list_implausible(fake: FakeNvml, pid: int) -> None:
    fake.add_process(0, os.getpid(), GIB)
    fake.add_process(0, pid, GIB, stays=1)
    snapshot = sampled(fake, "WHO_FIELDS")

    assert not snapshot.devices[0].processes_plausible
    assert "implausible list: pid" in gaps_of(snapshot, snapshot.devices[0])["processes"]
    assert {process.user for process in snapshot.devices[0].processes or ()} == {None}
    assert snapshot.devices[1].processes_plausible


@pytest.mark.parametrize(("stride", "memory"), [(16, GIB), (32, GIB), (24, 30 * GIB)])
def test_rows_of_another_version_and_more_memory_than_is_used_are_not_believed(fake, stride, memory):
    fake.devices[0].process_stride = stride
    for pid in (os.getpid(), os.getppid()):
        fake.add_process(0, pid, memory, counted=0)

    assert not sampled(fake, "{MEMORY, PROCESSES}").devices[0].processes_plausible


@pytest.fixture
def gone() -> int:
    """The pid of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    return child.pid


def test_a_process_that_has_ended_is_unknown_alone_once_the_list_was_read_again(fake: FakeNvml, gone: int) -> None:
    fake.add_process(0, os.getpid(), 2 * GIB)
    fake.add_process(0, gone, GIB, stays=1)
    fake.add_process(0, gone, GIB, "graphics", stays=1)
    device = sampled(fake, "WHO_FIELDS").devices[0]

    assert device.processes_plausible and device.processes
    assert [(row.pid, row.ended, row.uid) for row in device.processes] == [
        (os.getpid(), False, os.getuid()),
        (gone, True, None),
    ]
    assert fake.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] == 7 + 2


IN_ANOTHER_NAMESPACE = "from gpuguard import procfs; procfs.in_first_pid_namespace = lambda: {said}\n"


@pytest.mark.parametrize("said", [False, None])
def test_where_the_pids_are_not_surely_ours_one_that_nobody_has_condemns_the_list(fake, gone, said):
    fake.add_process(0, os.getpid(), 2 * GIB)
    fake.add_process(0, gone, GIB, stays=1)
    script = IN_ANOTHER_NAMESPACE.format(said=said)
    snapshot = answer_of(fake, f"{script}answer = nvml.open().sample(WHO_FIELDS)")

    assert not snapshot.devices[0].processes_plausible
    assert gaps_of(snapshot, snapshot.devices[0])["processes"].endswith(f"pid {gone} is not in this pid namespace")


def test_memory_that_is_no_whole_number_of_pages_beside_a_dead_pid_condemns_the_list(fake: FakeNvml, gone: int) -> None:
    fake.add_process(0, os.getpid(), 2 * GIB)
    fake.add_process(0, gone, os.getpid() | 1, stays=1)

    assert not sampled(fake, "WHO_FIELDS").devices[0].processes_plausible


PID_IN_OTHER_HANDS = """
from gpuguard import procfs
backend, stat_of, alive = nvml.open(), procfs.stat_of, procfs.alive
procfs.stat_of = procfs.alive = lambda pid: None
first = backend.sample(WHO_FIELDS).devices[0]
procfs.stat_of, procfs.alive = stat_of, alive
second = backend.sample(WHO_FIELDS).devices[0]
fake.clear_processes(0)
backend.sample(WHO_FIELDS)
fake.add_process(0, {pid}, GIB)
answer = [device.processes[0] for device in (first, second, backend.sample(WHO_FIELDS).devices[0])]
"""


def test_who_gets_the_pid_of_an_ended_process_is_not_taken_for_it_while_the_driver_lists_it(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB)
    rows = answer_of(fake, PID_IN_OTHER_HANDS.format(pid=os.getpid()))

    assert [(row.ended, row.uid) for row in rows] == [(True, None), (True, None), (False, os.getuid())]


def test_a_list_that_grows_too_fast_is_read_again(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB)
    # The first call of each pair always says INSUFFICIENT_SIZE, so this lets three second calls fail.
    fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", INSUFFICIENT_SIZE, device=0, times=7)
    devices = sampled(fake, "{MEMORY, PROCESSES}").devices

    assert devices[0].processes and devices[0].processes[0].pid == os.getpid()


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"remap_pending": 1}, "row remap pending"),
        ({"remap_failed": 1}, "row remap failed"),
        pytest.param(
            {"fabric_health": 1 << 4 | 2 << 2 | 2}, "the NVLink fabric has an unhealthy route", marks=knows_fabrics
        ),
        ({"error": RESET_REQUIRED}, "reset required"),
    ],
)
def test_a_sick_device_has_a_problem(fake: FakeNvml, fault: dict[str, int], problem: str) -> None:
    for field, value in fault.items():
        setattr(fake.devices[4], field, value)
    problems = [device.problems or () for device in sampled(fake, "VERIFY_FIELDS").devices]

    assert problems[4] == (problem,)
    assert [*problems[:4], *problems[5:]] == [()] * 7


@pytest.mark.parametrize("mask", [0, 2 << 4, 1 | 1 << 2 | 2 << 4 | 1 << 6])
def test_a_device_in_a_fabric_whose_routes_are_sound_or_unknown_has_no_problem(fake: FakeNvml, mask: int) -> None:
    fake.devices[4].fabric_health = mask

    assert [device.problems for device in sampled(fake, "VERIFY_FIELDS").devices] == [()] * 8


@knows_fabrics
def test_a_device_in_no_fabric_is_asked_for_it_once(fake: FakeNvml) -> None:
    calls = answer_of(
        fake, "backend = nvml.open(); backend.sample({HEALTH}); backend.sample({HEALTH})\nanswer = fake.calls()"
    )

    assert calls["nvmlDeviceGetGpuFabricInfoV"] == 8


def test_a_gpu_without_memory_of_its_own_has_what_the_host_can_still_give(fake: FakeNvml) -> None:
    fake.become_gb10(2)
    with subprocess.Popen(["sleep", "600"]) as other:
        fake.add_process(2, os.getpid(), 3 * GIB)
        fake.add_process(2, other.pid, 2 * GIB)
        whole, memory = sampled(fake), sampled(fake, "{MEMORY}")
        other.kill()
    device, discrete = whole.devices[2], whole.devices[3]
    host = psutil.virtual_memory()

    assert (device.name, device.problems, device.integrated, device.memory_shared_with_host) == (
        "NVIDIA GB10", (), True, True,
    )  # fmt: skip
    assert (device.memory_total, device.memory_used, device.memory_reserved) == (host.total, 5 * GIB, None)
    assert device.memory_free is not None and 0 < device.memory_free < host.total
    assert [process.memory_used for process in device.processes or ()] == [3 * GIB, 2 * GIB]
    assert (discrete.integrated, discrete.memory_shared_with_host) == (False, False)
    assert (memory.devices[2].memory_total, memory.devices[2].memory_used) == (host.total, None)
    assert gaps_of(memory, memory.devices[2])["memory_used"] == "its memory is the host's"


@pytest.mark.parametrize("fault", ["unknown memory", "no list"])
def test_what_processes_use_of_the_hosts_memory_is_unknown_unless_all_of_it_is_told(fake: FakeNvml, fault: str) -> None:
    fake.become_gb10(0)
    fake.add_process(0, os.getpid(), -1 if fault == "unknown memory" else GIB)
    if fault == "no list":
        fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", NOT_SUPPORTED, device=0)
    snapshot = sampled(fake, "VERIFY_FIELDS")

    assert snapshot.devices[0].memory_used is None
    assert "memory_used" in gaps_of(snapshot, snapshot.devices[0])


def test_pending_page_retirement_of_an_older_device_is_a_problem(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetRemappedRows", NOT_SUPPORTED)
    fake.devices[4].retired_pages_pending = 1
    calls, problems = answer_of(
        fake,
        "backend = nvml.open(); backend.sample({HEALTH}); fake.reset_calls()\n"
        "problems = [device.problems for device in backend.sample({HEALTH}).devices]\n"
        "answer = fake.calls(), problems",
    )

    assert problems[3:5] == [(), ("page retirement pending",)]
    assert "nvmlDeviceGetRemappedRows" not in calls


@pytest.mark.parametrize(
    ("times", "problems"),
    [(-1, ("nvmlDeviceGetMemoryInfo: unknown driver error",)), (1, None)],
    ids=["stays", "passes"],
)
def test_an_unknown_driver_error_in_a_vital_call_is_a_problem_unless_it_passes(fake, times, problems):
    fake.fail("nvmlDeviceGetMemoryInfo", UNKNOWN, device=1, times=times)
    device = sampled(fake, "{MEMORY, PROCESSES}").devices[1]

    assert (device.problems, bool(device.memory_used)) == (problems, not problems)


@pytest.mark.parametrize("driver", [470, 418])
def test_an_old_driver_is_read_as_far_as_it_goes(tmp_path: Path, driver: int) -> None:
    with FakeNvml(tmp_path, devices=2, driver=driver) as fake:
        fake.add_process(0, os.getpid(), GIB)
        snapshot = sampled(fake)

    device = snapshot.devices[0]
    assert device.memory_reserved is None and device.memory_used == GIB + 544 * MIB
    assert (device.throttle_reasons, device.mig_mode, device.problems) == (("gpu_idle",), False, ())
    pids = None if device.processes is None else [process.pid for process in device.processes]
    listed = driver == 470  # by every binding, also by those that know only the newer list
    assert pids == ([os.getpid()] if listed else None)
    assert ("processes" in gaps_of(snapshot, device)) == (not listed)


OPEN_ERROR = """
try:
    answer = nvml.open()
except Exception as error:
    answer = type(error).__name__, str(error), vars(error)
"""


def test_a_version_mismatch_names_both_versions(fake: FakeNvml, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.129.03  Release Build\nGCC: 12\n")
    fake.fail("nvmlInitWithFlags", VERSION_MISMATCH)
    patch = (
        "from dataclasses import replace\nfrom gpuguard.backends import nvml_calls\n"
        f"nvml_calls.NVIDIA = replace(nvml_calls.NVIDIA, versions=({str(version)!r},))\n"
    )
    name, text, facts = answer_of(fake, patch + OPEN_ERROR)

    assert (name, facts["library_version"], facts["kernel_version"]) == ("DriverMismatch", "580.65.06", "535.129.03")
    assert "580.65.06" in text and "535.129.03" in text and "Reboot" in text


@pytest.mark.parametrize("raised", ["", "ValueError('unknown name')", "OSError(22, 'Invalid argument')"])  # musl: both
def test_a_machine_without_the_library_says_so_and_one_without_glibc_is_told_of_no_container(fake, tmp_path, raised):
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    without = f"def confstr(name): raise {raised}\nos.confstr = confstr\n" if raised else ""
    name, text, _ = answer_of(fake, without + OPEN_ERROR, LD_LIBRARY_PATH=str(tmp_path))
    needs_glibc = bool(raised) or not has_glibc()

    assert name == "DriverNotFound" and "--backend simulated" in text
    assert ("needs glibc" in text, "no NVIDIA driver" in text, "--gpus" in text) == (
        needs_glibc, not needs_glibc, not needs_glibc,
    )  # fmt: skip


def test_a_driver_that_cannot_count_its_devices_is_an_error_and_none_is_not(fake: FakeNvml) -> None:
    fake.device_count = 0
    assert sampled(fake).devices == ()

    fake.fail("nvmlDeviceGetCount", UNKNOWN)
    script = "backend = nvml.open()\n" + OPEN_ERROR.replace("nvml.open()", "backend.sample({MEMORY, PROCESSES})")
    assert answer_of(fake, script)[0] == "BackendError"


def test_the_library_is_initialised_once_and_again_in_a_forked_child(fake: FakeNvml) -> None:
    inits = answer_of(
        fake,
        "backend = nvml.open(); backend.sample({MEMORY, PROCESSES}); before = backend.sample({MEMORY, PROCESSES})\n"
        "first = fake.calls()['nvmlInitWithFlags']\n"
        "if not (child := os.fork()):\n"
        "    same = backend.sample({MEMORY, PROCESSES}).devices == before.devices\n"
        "    backend.close()\n"
        "    os._exit(0 if same else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert backend.sample({MEMORY, PROCESSES}).devices == before.devices\n"
        "backend.close(); backend.close()\n"
        "answer = first, fake.calls()['nvmlInitWithFlags'], fake.calls()['nvmlShutdown']",
    )

    assert inits == (1, 2, 2)


# Every function that a full sample uses x every code x one device.  In the child, because there are a thousand of them.
SWEEP = """
CODES = (1, 2, 3, 4, 6, 7, 10, 13, 15, 16, 19, 21, 26, 27, 999, 12345)
EMPTY = (("nvmlDeviceGetProcessUtilization", 6), ("nvmlDeviceGetMigDeviceHandleByIndex", 6))
NEVER = (3, 13, 26)  # not supported, not found, deprecated

def by_index(snapshot):
    families = {}
    for device in snapshot.devices:
        families.setdefault(device.index, []).append(device)
    return families

def faults(before, after, code):
    \"\"\"What is wrong with the readings of the device that had the fault.\"\"\"
    gaps = {(gap.device, gap.field.split()[0]) for gap in after.gaps}
    old, new = by_index(before)[1], by_index(after)[1]
    for was, now in zip(old, new):
        if (now.uuid, "device") in gaps or "lost" in (now.problems or ()):
            told = [name for name, value in vars(now).items() if value not in (None, True) and name in DYNAMIC]
            if set(told) - {"asleep", "integrated", "memory_shared_with_host"}:  # False unless a driver says otherwise
                yield "a value of a lost device"
            continue
        for name, value in vars(was).items():
            got = getattr(now, name)
            if got == value or name == "problems":
                continue
            if (was.uuid, name) in gaps and (got is None or name in ("processes", "mig")):
                continue
            if name == "processes_plausible" and (was.uuid, "processes") in gaps:
                continue  # a desktop may be among them
            if code in NEVER and name in ("memory_used", "mig_mode"):
                continue  # version 1 counts the reserve as used; a driver that has no MIG is not in MIG mode
            yield f"{name} was {value!r:.60}, is {got!r:.60}, no gap"
    if len(new) < len(old) and not new[0].problems and not [gap for gap in gaps if gap[1].startswith("mig")]:
        if not (code in NEVER and new[0].mig_mode is False):
            yield "instances are gone without a word"

FIXED = "index", "uuid", "name", "vendor", "problems", "desktop_memory"
DYNAMIC = [name for name in vars(Device(0, "")) if name not in FIXED]
before = nvml.open().sample(ALL_FIELDS)
names = [name for name in fake.calls() if "Device" in name and name != "nvmlDeviceGetCount_v2"]
answer, cases = [], 0
for name in names:
    for code in CODES:
        fake.fail(name, code, device=1)
        after = nvml.Nvml().sample(ALL_FIELDS)
        fake.heal()
        cases += 1
        # "Nothing there" is an ordinary answer of some functions.
        wrong = [] if (name, code) in EMPTY else list(faults(before, after, code))
        others = [index for index in (0, 2) if by_index(before)[index] != by_index(after).get(index)]
        if others:
            wrong.append(f"devices {others} changed, too")
        if wrong:
            answer.append((name, code, wrong))
answer = cases, answer
"""


@pytest.mark.parametrize("divided", [False, True])
def test_whatever_one_call_answers_the_other_devices_are_read_and_nothing_unknown_is_zero(tmp_path, divided):
    with FakeNvml(tmp_path, devices=3) as fake:
        for index in range(3):
            fake.add_process(index, os.getpid(), GIB, "compute+graphics", sm_utilization=40, time_stamp=100)
            fake.add_process(index, os.getppid(), GIB, "mps")
            fake.connect(index, 0, fake.devices[(index + 1) % 3].bus_id)
            device = fake.devices[index]
            device.utilization = device.memory_utilization = 50
            device.minor, device.pstate, device.retired_pages, device.remapped_corrected = index + 1, 2, 3, 4
            device.ecc_corrected_volatile = device.ecc_uncorrected_volatile = 5
            device.ecc_corrected_aggregate = device.ecc_uncorrected_aggregate = 6
        if divided:
            fake.add_mig(1, "3g.40gb", gi=1)
            fake.add_mig(1, "2g.20gb", gi=2)
        cases, wrong = answer_of(fake, SWEEP)

    assert wrong == []
    assert cases > 500


def test_the_sweep_catches_an_unknown_that_is_shown_as_zero(tmp_path: Path) -> None:
    broken = """
from gpuguard.backends import nvml_calls
def gap(reading, name, reason):
    reading.gaps.append(Gap(reading.device.uuid, name, reason))
    if name == "temperature":
        reading.values[name] = 0
nvml_calls.Reading.gap = gap
"""
    with FakeNvml(tmp_path, devices=3) as fake:
        _, wrong = answer_of(fake, broken + SWEEP.replace("CODES = (1, 2, 3", "CODES = (3,) or (1, 2, 3"))

    assert ("nvmlDeviceGetTemperature", 3) in [(name, code) for name, code, _ in wrong]
