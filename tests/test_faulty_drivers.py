"""Every command on drivers that hang, fail, crash, lack or lie: the others are served and the bad device is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import a_device, a_snapshot, a_uuid
from chances import THE_SAME
from fake_nvml import (
    ABORT,
    DRIVER_NOT_LOADED,
    GIB,
    HANG,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeNvml,
)
from nodes import Gpuguard
from nvml_child import answer_of
from smi_files import write_smi

from gpuguard.backends import open_backend
from gpuguard.claims.directory import lock_directory
from gpuguard.model import ALL_FIELDS

BAD = 3
Command = Callable[..., tuple[int, str, str]]

# Functions that all or some commands call on a device.
CALLED, SOMETIMES_CALLED = (
    [f"nvmlDeviceGet{name}" for name in names.split()]
    for names in ("HandleByIndex UUID MemoryInfo ComputeRunningProcesses", "Temperature Samples RemappedRows Name")
)

ONE_BAD_DEVICE: dict[str, Callable[[FakeNvml], None]] = {
    **{f"{name} hangs": lambda fake, name=name: fake.fail(name, HANG, BAD) for name in CALLED},  # type: ignore[misc]
    **{f"{name} crashes": lambda fake, name=name: fake.fail(name, ABORT, BAD) for name in CALLED},  # type: ignore[misc]
    "all calls say that it is lost": lambda fake: fake.lose(BAD, LOST),
    "all calls say that it needs a reset": lambda fake: fake.lose(BAD, RESET_REQUIRED),
    "it is lost half-way": lambda fake: fake.fail("nvmlDeviceGetMemoryInfo", LOST, BAD, after=0),
    "its memory is an unknown error": lambda fake: fake.fail("nvmlDeviceGetMemoryInfo", UNKNOWN, BAD),
    "its handle is an unknown error": lambda fake: fake.fail("nvmlDeviceGetHandleByIndex", UNKNOWN, BAD),
}


@pytest.fixture
def gpuguard(fake: FakeNvml, tmp_path: Path) -> Gpuguard:
    return Gpuguard(tmp_path, fake)


@pytest.fixture
def answer(fake: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """As `command`; the devices are read by a process of its own there, too."""
    for name, value in {**fake.environment(), "GPUGUARD_DIR": lock_directory(str(tmp_path / "claims")).path}.items():
        monkeypatch.setenv(name, value)
    return command


@pytest.fixture(params=ONE_BAD_DEVICE)
def one_bad_device(fake: FakeNvml, request: pytest.FixtureRequest) -> FakeNvml:
    ONE_BAD_DEVICE[request.param](fake)
    return fake


def test_run_gets_the_other_devices_and_not_the_bad_one(one_bad_device, gpuguard):
    done = gpuguard("run", "--no-wait", "-n", "7", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")

    assert (done.returncode, done.stdout) == (0, "0,1,2,4,5,6,7\n")


def test_the_bad_one_is_named_and_the_others_are_described(one_bad_device, answer):
    code, out, refused = answer("select", "-n", "8")
    explained, seen = (json.loads(answer(name, "--json")[1])["devices"] for name in ("explain", "who"))

    eligible = {device["index"]: device["eligible"] for device in explained}
    states = {device["index"]: device["state"] for device in seen}
    assert (code, out) == (1, "")
    assert f"GPU {BAD}:" in refused
    assert [index for index, fits in eligible.items() if not fits] == [BAD]
    assert [index for index, state in states.items() if state != "free"] == [BAD]


@pytest.mark.parametrize("name", SOMETIMES_CALLED)
@pytest.mark.parametrize("code", [HANG, ABORT, NOT_SUPPORTED, UNKNOWN, LOST], ids=str)
def test_no_command_ends_in_a_traceback_or_not_at_all(fake, answer, name, code):
    fake.fail(name, code, BAD)

    assert [answer(command)[0] for command in ("who", "explain", "select")] == [0, 0, 0]


NO_DRIVER = {
    "no driver": (DRIVER_NOT_LOADED, "modprobe nvidia"),
    "library and kernel of different versions": (VERSION_MISMATCH, "580.65.06"),
    "no permission": (NO_PERMISSION, "/dev/nvidiactl"),
    "unknown error": (UNKNOWN, "dmesg"),
    "a code that nobody knows": (12345, "12345"),
}


@pytest.mark.parametrize("case", NO_DRIVER)
def test_without_a_working_driver_each_command_says_what_to_do(fake, answer, gpuguard, case):
    code, hint = NO_DRIVER[case]
    fake.fail("nvmlInitWithFlags", code)

    for words in (["who"], ["explain"], ["select"]):
        status, out, error = answer(*words)
        assert (status, out) == (4, "")
        assert hint.lower() in error.lower()
    assert gpuguard("run", "--no-wait", "--", "true").returncode == 125


def test_without_process_lists_memory_alone_decides(fake, gpuguard):
    fake.fail("nvmlDeviceGetComputeRunningProcesses", NOT_SUPPORTED)
    fake.devices[0].memory_used = 20 * GIB

    seven, eight = gpuguard("select", "-n", "7"), gpuguard("select", "-n", "8")

    assert seven.stdout == "1,2,3,4,5,6,7\n"
    assert "20.0GiB" in eight.stderr


def test_a_pid_of_another_namespace_makes_its_device_busy_and_the_list_untrusted(fake, gpuguard):
    fake.add_process(0, 4_000_000, 10 * GIB, stays=1)

    seven, explained = gpuguard("select", "-n", "7"), gpuguard("explain")

    assert seven.stdout == "1,2,3,4,5,6,7\n"
    assert "GPU 0  REFUSED" in explained.stdout


def test_slow_calls_are_not_taken_for_hanging_ones(fake, gpuguard):
    fake.latency_us = 20_000

    assert gpuguard("select", "-n", "8").stdout == "0,1,2,3,4,5,6,7\n"


def test_a_driver_that_takes_seconds_to_start_is_waited_for_with_a_hint(fake, gpuguard):
    fake.init_delay_ms = 5000

    done = gpuguard("select")

    assert done.returncode == 0
    assert "takes long to start" in done.stderr


FEW = (-1, 2**63 - 1)
SWEEP = "import hostile_driver; answer = hostile_driver.findings(fake, {place!r}, {numbers}, {only!r})"


def sweep(place: Path, only: str = "") -> str:
    return SWEEP.format(place=str(place / "claims"), numbers=FEW if THE_SAME else "hostile_driver.NUMBERS", only=only)


@pytest.fixture
def three(tmp_path: Path) -> FakeNvml:
    return FakeNvml(tmp_path, devices=3)


def test_no_answer_of_a_driver_stops_a_command_or_gives_a_device_twice(three: FakeNvml, tmp_path: Path) -> None:
    assert answer_of(three, sweep(tmp_path)) == []


def test_who_takes_any_text_for_the_name_of_a_device_is_found(three: FakeNvml, tmp_path: Path) -> None:
    found = answer_of(three, f"nvml.Nvml._named = lambda backend, place: place\n{sweep(tmp_path, 'uuid')}")

    assert any("['1', '1']" in one for one in found)
    assert any(one.startswith("uuid = b'': select") and "claimed by unknown" in one for one in found)


WHOSE = {
    "another GPU's": lambda devices: devices[2],
    "its own GPU's": lambda devices: devices[1],
    "that of an instance of another GPU": lambda devices: devices[0].mig[0],
    "its sibling's": lambda devices: devices[1].mig[1],
}


@pytest.mark.parametrize("whose", WHOSE)
def test_an_instance_whose_name_is_something_elses_is_nobodys(three: FakeNvml, whose: str) -> None:
    for device, number in ((0, 1), (1, 1), (1, 2)):
        three.add_mig(device, "3g.40gb", number)
    devices = three._state.devices
    devices[1].mig[0].uuid = WHOSE[whose](devices).uuid
    look = "found = nvml.open().sample(ALL_FIELDS)\nanswer = [one.uuid for one in found.devices], len(found.gaps)"
    found, gaps = answer_of(three, look)

    assert (len(found), len(set(found)), gaps > 0) == (5, 5, True)


@pytest.mark.parametrize("count", [1025, 10**6, 2**32 - 1])
def test_a_driver_that_counts_what_cannot_be_is_not_believed(three: FakeNvml, count: int) -> None:
    three.device_count = count
    look = "try:\n    answer = nvml.open().sample(ALL_FIELDS)\nexcept Exception as error:\n    answer = str(error)"

    assert answer_of(three, look) == f"the driver counts {count} GPUs, which cannot be.  Try `nvidia-smi`."


@pytest.mark.parametrize("uuid", [a_uuid(0), "", "GPU-", "gate", "GPU-../gate", "GPU-1/gate", "GPU-\u202e"])
def test_what_nvidia_smi_does_not_tell_from_another_device_is_nobodys(tmp_path: Path, uuid: str) -> None:
    file = write_smi(tmp_path / "smi.xml", a_snapshot(a_device(0), a_device(1)))
    file.write_text(file.read_text().replace(a_uuid(1), uuid))
    first, second = open_backend(f"smi:{file}").sample(ALL_FIELDS).devices
    why = "another GPU has the same uuid" if uuid == a_uuid(0) else "nvidia-smi does not tell its uuid"

    assert (first.uuid, first.problems) == (a_uuid(0), ())
    assert (second.uuid, second.problems) == ("unknown-1", (why,))
