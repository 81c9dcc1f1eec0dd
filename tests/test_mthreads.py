"""The backend mthreads behind a stand-in for the binding of Moore Threads' library."""

from __future__ import annotations

import sys

import pytest
from fake_mtml import GIB, LOST, FakeMtml
from nvml_child import gaps_of

from gpuguard.backends import mthreads, open_backend
from gpuguard.errors import BackendError, DriverNotFound, InvalidRequest
from gpuguard.model import ALL_FIELDS, DEVICE_FIELDS, SELECT_FIELDS, VERIFY_FIELDS
from gpuguard.request import Request
from gpuguard.select import choose


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMtml:
    made = FakeMtml()
    monkeypatch.setitem(sys.modules, "pymtml", made)
    return made


def test_it_says_what_the_library_tells(fake: FakeMtml) -> None:
    snapshot = open_backend("mthreads").sample(ALL_FIELDS)
    device = snapshot.devices[1]
    told = {name: getattr(device, name) for name in ("index", "vendor", *DEVICE_FIELDS)}

    assert {name: value for name, value in told.items() if value is not None} == {
        "index": 1, "vendor": "mthreads", "name": "Moore Threads MTT S4000", "pci_bus_id": "0000:01:00.0",
        "minor_number": 1, "integrated": False, "asleep": False, "memory_shared_with_host": False,
        "memory_total": 48 * GIB, "memory_used": GIB, "memory_free": 47 * GIB, "utilization": 77.0,
        "memory_utilization": 12.0, "mig_mode": False, "problems": (), "temperature": 51.0, "fan_speed": 30.0,
        "power_draw": 81.5, "clock_sm": 1700, "clock_sm_max": 1750, "clock_memory": 8000, "clock_memory_max": 9000,
        "clock_graphics": 1700, "clock_video": 1200, "encoder_utilization": 3.0, "decoder_utilization": 4.0,
        "ecc_mode": True, "ecc_corrected_volatile": 1, "ecc_uncorrected_volatile": 11, "ecc_corrected_aggregate": 2,
        "ecc_uncorrected_aggregate": 12, "retired_pages": 3, "pcie_generation": 4, "pcie_width": 16,
    }  # fmt: skip
    assert (
        told.keys() - {"index", "vendor"}
        <= {name for name in told if told[name] is not None} | gaps_of(snapshot, device).keys()
    )
    assert [device.uuid[-1] for device in snapshot.devices] == ["0", "1"]


def test_a_gpu_whose_processes_are_not_listed_is_judged_by_its_memory(fake: FakeMtml) -> None:
    fake.devices[0].used = 3 * GIB
    snapshot = open_backend("mthreads").sample(VERIFY_FIELDS)
    choice = choose(snapshot, Request(), {})

    assert [device.processes for device in snapshot.devices] == [None, None]
    assert gaps_of(snapshot, snapshot.devices[0])["processes"] == "this driver lists no processes"
    assert [device.index for device in choice.eligible] == [1]
    assert "3.0GiB in use, the driver gives no list of processes" in choice.refused[0].reasons[0].text


@pytest.mark.parametrize("code", [4, 5, 7, 11, 12, 667, 999])
@pytest.mark.parametrize("function", [row.function for row in mthreads._ROWS] + ["mtmlGpuContext"])
def test_what_the_library_refuses_is_a_gap_and_never_0(fake: FakeMtml, function: str, code: int) -> None:
    healthy = mthreads.open().sample(ALL_FIELDS).devices[0]
    fake.fail(function, code, device=0)
    snapshot = mthreads.open().sample(ALL_FIELDS)
    device, gaps = snapshot.devices[0], gaps_of(snapshot, snapshot.devices[0])
    changed = [name for name in DEVICE_FIELDS if getattr(device, name) != getattr(healthy, name)]

    assert changed or function == "mtmlDeviceGetMpcMode"
    assert [name for name in changed if getattr(device, name) is not None or name not in gaps] == []
    assert snapshot.devices[1].memory_free == 47 * GIB


def test_a_binding_that_lacks_a_function_costs_its_field_alone(fake: FakeMtml) -> None:
    fake.missing = {"mtmlGpuGetTemperature"}
    snapshot = mthreads.open().sample(ALL_FIELDS)

    assert snapshot.devices[0].temperature is None
    assert gaps_of(snapshot, snapshot.devices[0])["temperature"] == "this driver does not have it"


def test_a_text_that_is_not_utf8_is_a_gap(fake: FakeMtml) -> None:
    fake.fail("mtmlDeviceGetName", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    snapshot = mthreads.open().sample(ALL_FIELDS)

    assert (snapshot.devices[0].name, gaps_of(snapshot, snapshot.devices[0])["name"]) == (
        None,
        "the text is not UTF-8",
    )


def test_more_memory_in_use_than_there_is_leaves_what_is_free_unknown(fake: FakeMtml) -> None:
    fake.devices[0].used = 49 * GIB

    assert mthreads.open().sample(SELECT_FIELDS).devices[0].memory_free is None


def test_without_ecc_there_are_no_counts_of_errors(fake: FakeMtml) -> None:
    fake.devices[0].ecc = 0
    snapshot = mthreads.open().sample(ALL_FIELDS)

    assert (snapshot.devices[0].ecc_mode, snapshot.devices[0].ecc_corrected_volatile) == (False, None)
    assert gaps_of(snapshot, snapshot.devices[0])["ecc_corrected_volatile"] == "ECC is off"


def test_a_divided_gpu_is_not_handed_out(fake: FakeMtml) -> None:
    fake.devices[0].divided = 1

    assert [device.index for device in choose(mthreads.open().sample(VERIFY_FIELDS), Request(), {}).eligible] == [1]


def test_pages_to_be_retired_are_a_problem(fake: FakeMtml) -> None:
    fake.devices[0].pending = 1
    fake.fail("mtmlMemoryGetRetiredPagesPendingStatus", 4, device=1)

    assert [device.problems for device in mthreads.open().sample(VERIFY_FIELDS).devices] == [
        ("page retirement pending",),
        (),
    ]


@pytest.mark.parametrize("function", ["mtmlGpuGetTemperature", "mtmlLibraryInitDeviceByIndex"])
def test_a_lost_device_is_named_and_hides_no_other(fake: FakeMtml, function: str) -> None:
    fake.fail(function, LOST, device=0)
    snapshot = mthreads.open().sample(ALL_FIELDS)

    assert [device.problems for device in snapshot.devices] == [("lost",), ()]
    assert snapshot.devices[0].memory_used is None
    assert gaps_of(snapshot, snapshot.devices[0])["device"] == "the GPU is lost"


@pytest.mark.parametrize("uuid", ["", "no uuid", "8f3c0a7e-0000-4000-8000-000000000000"])
def test_a_uuid_that_names_no_device_or_two_is_not_used(fake: FakeMtml, uuid: str) -> None:
    fake.devices[1].uuid = uuid
    device = mthreads.open().sample(ALL_FIELDS).devices[1]

    assert (device.uuid, device.problems) == ("unknown-1", ("cannot be opened: nothing found",))


@pytest.mark.parametrize("told", ["8f3c0a7e-0000-4000-8000-000000000001", "GPU-8f3c0a7e-0000-4000-8000-000000000001"])
def test_a_uuid_has_the_prefix_by_which_locks_and_selectors_know_a_device(fake: FakeMtml, told: str) -> None:
    fake.devices[1].uuid = told

    assert mthreads.open().sample(()).devices[1].uuid == "GPU-8f3c0a7e-0000-4000-8000-000000000001"


def test_only_the_devices_that_are_asked_for_are_read(fake: FakeMtml) -> None:
    backend, read = mthreads.open(), list[int | None]()
    uuid = f"GPU-{fake.devices[1].uuid}"

    assert [device.uuid for device in backend.sample(SELECT_FIELDS, [uuid]).devices] == [uuid]

    backend.progress = read.append

    assert [device.uuid for device in backend.sample(SELECT_FIELDS, [uuid]).devices] == [uuid]
    assert read == [1]
    assert [vars(device)["memory_total"] for device in backend.sample(()).devices] == [None, None]


def test_closing_twice_is_closing_once_and_a_sample_opens_it_again(fake: FakeMtml) -> None:
    backend = mthreads.open()
    backend.close()
    backend.close()

    assert fake.initialised == 0
    assert len(backend.sample(SELECT_FIELDS).devices) == 2


def test_a_library_that_does_not_close_is_left(fake: FakeMtml) -> None:
    fake.fail("mtmlLibraryShutDown", 999)
    backend = mthreads.open()
    backend.close()

    assert len(backend.sample(SELECT_FIELDS).devices) == 2


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("libmtml.so: cannot open shared object file"), "libmtml.so was not found"),
        (1, r"cannot be initialised: error 1 \(code 1\)"),
    ],
    ids=["no library", "no driver"],
)
def test_a_driver_that_cannot_be_reached_says_why(fake: FakeMtml, error: int | Exception, text: str) -> None:
    fake.fail("mtmlLibraryInit", error)

    with pytest.raises(BackendError, match=text):
        mthreads.open()


def test_a_count_that_cannot_be_is_refused(fake: FakeMtml) -> None:
    fake.count = 2**31

    with pytest.raises(BackendError, match="counts 2147483648 GPUs"):
        mthreads.open()


def test_without_the_binding_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymtml", None)

    with pytest.raises(DriverNotFound, match=r"pip install 'gpuguard\[mthreads\]'"):
        mthreads.open()


def test_it_takes_no_place(fake: FakeMtml) -> None:
    with pytest.raises(InvalidRequest, match="takes no"):
        open_backend("mthreads:elsewhere")
