"""Simulated nodes: what uses them, how they are written down, and their faults."""

import os
import re
import signal
import stat
from dataclasses import fields, replace
from pathlib import Path

import pytest
from nodes import GIB, a_user, change, eventually, one, start

from gpuguard.backends import simulated, simulated_node
from gpuguard.backends.drm import ASLEEP
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.model import ALL_FIELDS, HEALTH, Device
from gpuguard.vendors import VENDORS


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "node")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_is_gone_with_its_memory_however_it_died_even_before_it_is_reaped(place, signum):
    backend = start(place)
    with a_user(place, "0", 10 * GIB) as child:
        child.send_signal(signum)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert one(backend).processes == ()
        assert one(backend).memory_used == simulated_node.IDLE_MEMORY


def test_whoever_got_the_pid_of_a_dead_process_is_not_shown_for_it(place):
    backend = start(place)
    with a_user(place, "0", 10 * GIB):
        # The same pid with another start time is what reuse looks like.
        simulated_node.update(
            place,
            lambda state: replace(state, uses=tuple(replace(use, start_time=use.start_time - 1) for use in state.uses)),
        )

        assert one(backend).processes == ()


def test_released_memory_stays_visible_for_the_delay_but_its_process_does_not(place):
    backend = start(place)
    simulated_node.update(place, lambda state: replace(state, release_delay=0.5))
    with a_user(place, "0", 10 * GIB) as child:
        child.kill()
        assert eventually(lambda: one(backend).processes == ())

    assert one(backend).memory_used > 10 * GIB
    assert eventually(lambda: one(backend).memory_used == simulated_node.IDLE_MEMORY)


def test_everything_that_a_real_h100_tells_is_told(place):
    device = one(start(place))
    unknown = {field.name for field in fields(Device) if getattr(device, field.name) is None}

    mig = {"parent_uuid", "mig_profile", "gpu_instance_id", "compute_instance_id"}
    assert unknown == mig | {"fan_speed", "retired_pages", "ordinal"}
    assert device.memory_total == device.memory_used + device.memory_free + device.memory_reserved


def test_instances_are_devices_behind_their_parent_and_share_its_memory(place):
    backend = start(place, "1xA100-40GB+1xA100-40GB:mig=3g.20gb,2g.10gb")
    _, parent, first, second = backend.sample(ALL_FIELDS).devices
    with a_user(place, first.uuid, 5 * GIB):
        seen = {device.uuid: device for device in backend.sample(ALL_FIELDS, [second.uuid]).devices}

    assert first.power_draw is None
    assert [first.mig_profile, second.mig_profile] == ["3g.20gb", "2g.10gb"]
    assert seen[first.uuid].memory_used == seen[parent.uuid].memory_used == 5 * GIB + simulated_node.IDLE_MEMORY
    assert seen[second.uuid].processes == ()


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("", "8xH100-80GB"),
        ("8", "8xH100-80GB"),
        ("0xH100-80GB", "1 to 64"),
        ("65xH100-80GB", "1 to 64"),
        ("40xT4+40xT4", "at most 64"),
        ("4xFoo", "'Foo-24GB'"),
        ("4xRTX4080", "did you mean RTX4090"),
        ("1xH100-40GB", "write H100-80GB"),
        ("4xFoo-0GB", "'Foo-24GB'"),
        ("1xRTX4090:mig=1g.5gb", "cannot be divided"),
        ("1xH100-80GB:partition=cpx", "no partition mode 'cpx'"),
        ("1xMI300X:partition=tpx", "have spx, dpx, qpx, cpx"),
        ("1xMI300X:mig=1g.5gb", "cannot be divided"),
        ("1xA100-40GB:mig=3g20gb", "no MIG profile"),
        ("1xA100-40GB:mig=,", "no MIG profile"),
        ("1xA100-40GB:mig=4g.20gb,4g.20gb", "7 slices"),
        ("1xA100-40GB:mig=3g.40gb,3g.40gb", "40 GiB"),
    ],
)
def test_a_fault_in_a_spec_says_what_would_be_right(spec, advice):
    with pytest.raises(InvalidRequest, match=advice):
        simulated_node.parse_spec(spec)


@pytest.mark.parametrize(
    ("spec", "vendor", "uuid", "bus", "minor"),
    [
        ("1xH100", "nvidia", "GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "00000000:1B:00.0", 0),
        ("1xMI300X", "amd", "GPU-[0-9a-f]{16}", "0000:1b:00.0", 128),
        ("1xRX6600", "amd", "PCI-0000-1b-00-0", "0000:1b:00.0", 128),
        ("1xArc-B60-24GB", "intel", "PCI-0000-1b-00-0", "0000:1b:00.0", 128),
        ("1xS4000", "mthreads", "GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "00000000:1B:00.0", 0),
    ],
)
def test_a_device_is_named_as_its_vendor_names_it(place, spec, vendor, uuid, bus, minor):
    device = one(start(place, spec))

    assert re.fullmatch(uuid, device.uuid)
    assert (device.vendor, device.pci_bus_id, device.minor_number) == (vendor, bus, minor)
    assert device.name.startswith(VENDORS[vendor].title)


def test_each_vendor_counts_its_own_devices(place):
    devices = start(place, "1xMI210+2xArc-B60+1xRTX4090+1xMI210").sample(()).devices

    assert [(device.vendor, device.number) for device in devices] == [
        ("amd", 0), ("intel", 0), ("intel", 1), ("nvidia", 0), ("amd", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("mode", "count"), [("spx", 0), ("dpx", 2), ("qpx", 4), ("cpx", 8)])
def test_a_mode_divides_a_gpu_of_amd_into_equal_partitions(place, mode, count):
    _, parent, *parts = start(place, f"1xMI300X+1xMI300X:partition={mode}").sample(ALL_FIELDS).devices

    assert (parent.mig_mode, len(parts)) == (count > 0, count)
    minors = [device.minor_number for device in (parent, *parts)]
    assert minors[1:] == list(range(136, 136 + count)) and minors[0] == 136
    for number, part in enumerate(parts):
        assert (part.uuid, part.label) == (f"XCP-{parent.uuid[4:]}-{number}", f"1.{number}")
        assert (part.parent_uuid, part.mig_profile, part.name) == (parent.uuid, mode, parent.name)
        assert part.memory_total == parent.memory_total // count
        assert (parent.utilization, part.utilization) == (0.0, None)


def test_partitions_are_used_one_by_one(place):
    backend = start(place, "1xMI300X:partition=cpx")
    parts = backend.sample({HEALTH}).devices[1:]
    with a_user(place, parts[5].uuid, 5 * GIB):
        seen = backend.sample(ALL_FIELDS, [parts[5].uuid]).devices[1:]

    assert [device.gpu_instance_id for device in seen if device.processes] == [5]
    assert [device.gpu_instance_id for device in seen if (device.memory_used or 0) > GIB] == [5]


def test_a_process_uses_the_devices_that_the_variable_of_their_vendor_names(place, monkeypatch):
    backend = start(place, "1xRTX4090+2xMI210")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # HIP reads it, too, and counts what ROCR leaves
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("GPUGUARD_GPUS", backend.sample(()).devices[2].uuid)  # as in a job on that one

    assert simulated.use(None, GIB, spec=place) == (backend.sample(()).devices[2].uuid,)


@pytest.mark.parametrize(("spec", "integrated"), [("1xStrixHalo", True), ("1xGB10", True), ("1xH100", False)])
def test_a_gpu_that_is_part_of_the_cpu_has_the_memory_of_the_host(place, spec, integrated):
    device = one(start(place, spec))

    assert (device.integrated, device.memory_shared_with_host) == (integrated, integrated)
    assert (device.memory_reserved is None) == integrated


def test_a_gpu_sleeps_until_a_process_uses_it_and_tells_only_what_the_kernel_knows(place):
    backend = start(place, "2xMI210")
    change(place, 1, asleep=True)
    snapshot = backend.sample(ALL_FIELDS)
    awake, asleep = snapshot.devices
    reasons = {gap.field: gap.reason for gap in snapshot.gaps if gap.device == asleep.uuid}

    assert (awake.asleep, asleep.asleep) == (False, True)
    assert (asleep.memory_used, asleep.processes) == (awake.memory_used, ())
    assert (asleep.utilization, asleep.memory_utilization) == (0.0, 0.0)
    assert (asleep.temperature, asleep.power_draw, asleep.clock_sm, asleep.encoder_utilization) == (None,) * 4
    assert {reasons[name] for name in ("temperature", "power_draw", "clock_sm", "encoder_utilization")} == {ASLEEP}
    with a_user(place, "1", GIB):
        assert (one(backend, 1).asleep, one(backend, 1).temperature) == (False, 32.0)


def test_uuids_come_back_with_the_node_and_are_never_those_of_another_node():
    first, again, elsewhere = (simulated_node.new_node("4xH100-80GB", place, 0.0) for place in ("/a", "/a", "/b"))

    assert [device.uuid for device in first.devices] == [device.uuid for device in again.devices]
    assert len({device.uuid for node in (first, elsewhere) for device in node.devices}) == 8


@pytest.mark.parametrize("names", ["3", "-1", "", ",", "GPU-", "x", "0,nonsense"])
def test_what_names_no_single_device_is_refused(names):
    with pytest.raises(InvalidRequest):
        simulated_node.find(simulated_node.new_node("3xT4", "/a", 0.0), names)


@pytest.mark.parametrize("name", ["temperature", "memory_used", "processes", "power_draw", "name", "utilization"])
def test_a_field_that_the_driver_does_not_tell_is_unknown_and_a_gap(place, name):
    backend = start(place)
    change(place, 1, unknown=(name,))
    snapshot = backend.sample(ALL_FIELDS)

    assert getattr(snapshot.devices[1], name) is None
    told = [(gap.device, gap.field) for gap in snapshot.gaps if "simulated driver" in gap.reason]
    assert told == [(snapshot.devices[1].uuid, name)]


def test_a_state_survives_being_written_and_read(place):
    backend = start(place, "1xA100-40GB:mig=1g.5gb+1xRTX4090")
    simulated.use("1", GIB, 10.0, ramp=(2 * GIB, 5.0), lasting=60.0, spec=place)
    moving = simulated_node.WorkPattern(1.0, 2.0, 3.0, 4.0)
    change(place, 1, temperature=moving, faults=("hang",), unknown=("name",), latency=0.5)
    state = simulated_node.load(backend.directory)

    assert isinstance(state, simulated_node.SimulatedNode)
    assert simulated_node.update(place, lambda same: same) == state
    assert simulated_node.load(place) == state


def test_the_directory_is_private_to_its_user_unless_another_was_named(tmp_path, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    default = Path(simulated.directory())
    named = tmp_path / "named"
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(named))

    assert default == runtime / "gpuguard-sim"
    assert stat.S_IMODE(default.stat().st_mode) == 0o700
    assert simulated.directory() == str(named)
    assert simulated.directory(str(tmp_path / "spec")) == str(tmp_path / "spec")


def test_a_default_directory_that_others_may_write_to_or_that_points_elsewhere_is_refused(tmp_path, monkeypatch):
    runtime = tmp_path / "run"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    open_to_all = runtime / "gpuguard-sim"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(BackendError, match="not a directory of ours alone"):
        simulated.directory()

    open_to_all.rmdir()
    open_to_all.symlink_to(tmp_path)
    with pytest.raises(BackendError, match="not a directory of ours alone"):
        simulated.directory()
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(open_to_all))
    assert simulated.directory() == str(open_to_all)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(BackendError, match="not a directory"):
        simulated.directory(str(tmp_path / "file"))
