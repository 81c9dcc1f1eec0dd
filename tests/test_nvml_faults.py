"""Drivers and devices that are broken, through the real nvidia-ml-py and a fake driver library behind it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    INSUFFICIENT_SIZE,
    LOST,
    MIB,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeNvml,
)  # fmt: skip
from nvml_child import answer_of, gaps_of, sampled

from gpuguard import errors
from gpuguard.backends.nvml_calls import has_glibc


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
def test_a_value_that_cannot_be_is_unknown_and_says_so(
    fake: FakeNvml, device_field: str, value: Any, field: str
) -> None:
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


PIDS_OF_NOBODY = [0, 1, -1, 4294967295, 2**31 - 1]


@pytest.mark.parametrize("pid", PIDS_OF_NOBODY)
def test_an_impossible_pid_makes_the_whole_list_implausible(fake: FakeNvml, pid: int) -> None:
    fake.add_process(0, os.getpid(), GIB)
    fake.add_process(0, pid, GIB, stays=1)
    snapshot = sampled(fake, "WHO_FIELDS")

    assert not snapshot.devices[0].processes_plausible
    assert "implausible list: pid" in gaps_of(snapshot, snapshot.devices[0])["processes"]
    assert {process.user for process in snapshot.devices[0].processes or ()} == {None}
    assert snapshot.devices[1].processes_plausible


@pytest.mark.parametrize("stride", [16, 32])
def test_rows_of_another_version_are_not_believed(fake: FakeNvml, stride: int) -> None:
    fake.devices[0].process_stride = stride
    for pid in (os.getpid(), os.getppid(), 1):
        fake.add_process(0, pid, GIB)

    assert not sampled(fake, "{MEMORY, PROCESSES}").devices[0].processes_plausible


def test_processes_with_more_memory_than_is_used_are_not_believed(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), 60 * GIB, counted=0)

    assert not sampled(fake, "{MEMORY, PROCESSES}").devices[0].processes_plausible


def test_a_dead_pid_is_read_once_more_before_the_list_is_doubted(fake: FakeNvml) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    fake.add_process(0, gone.pid, GIB, stays=1)
    snapshot = sampled(fake, "{MEMORY, PROCESSES}")

    assert gaps_of(snapshot, snapshot.devices[0])["processes"].endswith(f"pid {gone.pid} is not in this pid namespace")
    assert fake.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] == 7 + 2


def test_a_list_that_grows_too_fast_is_read_again(fake: FakeNvml) -> None:
    fake.add_process(0, os.getpid(), GIB)
    # The first call of each pair always says INSUFFICIENT_SIZE, so this lets three second calls fail.
    fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", INSUFFICIENT_SIZE, device=0, times=7)
    devices = sampled(fake, "{MEMORY, PROCESSES}").devices

    assert devices[0].processes and devices[0].processes[0].pid == os.getpid()


def test_a_device_without_a_process_list_is_not_an_empty_one(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetComputeRunningProcesses", NOT_SUPPORTED, device=0)
    snapshot = sampled(fake, "{MEMORY, PROCESSES}")

    assert snapshot.devices[0].processes is None
    assert gaps_of(snapshot, snapshot.devices[0])["processes"] == "not supported"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"remap_pending": 1}, "row remap pending"),
        ({"remap_failed": 1}, "row remap failed"),
        ({"error": LOST}, "lost"),
        ({"error": RESET_REQUIRED}, "reset required"),
    ],
)
def test_a_sick_device_has_a_problem(fake: FakeNvml, fault: dict[str, int], problem: str) -> None:
    for field, value in fault.items():
        setattr(fake.devices[4], field, value)
    problems = [device.problems or () for device in sampled(fake, "VERIFY_FIELDS").devices]

    assert problems[4] == (problem,)
    assert [*problems[:4], *problems[5:]] == [()] * 7


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


def test_an_unknown_driver_error_in_a_vital_call_is_a_problem(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", UNKNOWN, device=1)
    device = sampled(fake, "{MEMORY, PROCESSES}").devices[1]

    assert device.problems == ("nvmlDeviceGetMemoryInfo: unknown driver error",)


def test_an_unknown_driver_error_that_passes_is_not(fake: FakeNvml) -> None:
    fake.fail("nvmlDeviceGetMemoryInfo", UNKNOWN, device=1, times=1)
    device = sampled(fake, "{MEMORY, PROCESSES}").devices[1]

    assert device.problems is None and device.memory_used


def test_a_device_that_is_lost_while_it_is_known_keeps_its_name(fake: FakeNvml) -> None:
    before, after = answer_of(
        fake,
        "backend = nvml.open(); before = backend.sample(WHO_FIELDS); fake.lose(2)\n"
        "answer = before, backend.sample(WHO_FIELDS)",
    )

    lost = after.devices[2]
    assert (lost.uuid, lost.name, lost.problems) == (before.devices[2].uuid, before.devices[2].name, ("lost",))
    assert (lost.memory_used, lost.processes, lost.temperature) == (None, None, None)
    assert after.devices[3].memory_used == before.devices[3].memory_used


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


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (DRIVER_NOT_LOADED, "DriverNotFound", ["580.65.06", "modprobe nvidia", "--backend simulated"]),
        (NO_PERMISSION, "DriverPermission", ["/dev/nvidiactl"]),
        (UNKNOWN, "BackendError", ["unknown driver error", "dmesg"]),
        (12345, "BackendError", ["12345"]),
    ],
)
def test_a_driver_that_does_not_start_says_why_and_what_to_do(
    fake: FakeNvml, code: int, kind: str, words: list[str]
) -> None:
    fake.fail("nvmlInitWithFlags", code)
    name, text, _ = answer_of(fake, OPEN_ERROR)

    assert name == kind and issubclass(getattr(errors, name), errors.BackendError)
    assert [word for word in words if word not in text] == []


def test_a_version_mismatch_names_both_versions(fake: FakeNvml, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.129.03  Release Build\nGCC version: 12\n"
    )
    fake.fail("nvmlInitWithFlags", VERSION_MISMATCH)
    patch = f"from gpuguard import backends; backends._VERSIONS = ({str(version)!r},)\n"
    name, text, facts = answer_of(fake, patch + OPEN_ERROR)

    assert name == "DriverMismatch"
    assert facts == {"library_version": "580.65.06", "kernel_version": "535.129.03"}
    assert "580.65.06" in text and "535.129.03" in text and "Reboot" in text


def test_a_machine_without_the_library_says_so(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    name, text, _ = answer_of(fake, OPEN_ERROR, LD_LIBRARY_PATH=str(tmp_path))

    assert name == "DriverNotFound"
    assert ("no NVIDIA driver" if has_glibc() else "needs glibc") in text and "--backend simulated" in text


@pytest.mark.parametrize("said", ["ValueError('unknown name')", "OSError(22, 'Invalid argument')"])  # musl: the second
def test_without_glibc_nobody_is_told_to_start_a_container_with_gpus(fake: FakeNvml, tmp_path: Path, said: str) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    without = f"def confstr(name): raise {said}\nos.confstr = confstr\n"
    name, text, _ = answer_of(fake, without + OPEN_ERROR, LD_LIBRARY_PATH=str(tmp_path))

    assert name == "DriverNotFound"
    assert "needs glibc" in text and "--backend simulated" in text and "--gpus" not in text


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


def test_a_slow_start_is_waited_for(fake: FakeNvml) -> None:
    fake.init_delay_ms = 300

    assert len(sampled(fake, "{MEMORY, PROCESSES}").devices) == 8


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
            if [name for name, value in vars(now).items() if name in DYNAMIC and value not in (None, True)]:
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

DYNAMIC = [name for name in vars(Device(0, "")) if name not in ("index", "uuid", "name", "problems")]
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
def test_whatever_one_call_answers_the_other_devices_are_read_and_nothing_unknown_is_zero(
    tmp_path: Path, divided: bool
) -> None:
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
