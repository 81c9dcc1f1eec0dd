from __future__ import annotations

import json
import stat
import threading
import time
from pathlib import Path

import pytest
from nodes import GIB, a_user, change, one, start

from gpuguard.backends import simulated, simulated_node
from gpuguard.backends.simulated_node import SimulatedNode, WorkPattern
from gpuguard.errors import BackendError
from gpuguard.model import ALL_FIELDS, MEMORY, MODEL, VERIFY_FIELDS


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "node")


@pytest.mark.parametrize(("fault", "problem"), [("lost", "lost"), ("reset", "reset required")])
def test_a_broken_device_is_named_with_its_problem_and_the_others_are_read(place, fault, problem):
    backend = start(place)
    change(place, 1, faults=(fault,))
    snapshot = backend.sample(ALL_FIELDS)
    broken = snapshot.devices[1]

    assert (broken.problems, broken.memory_used, broken.processes) == ((problem,), None, None)
    assert {gap.field for gap in snapshot.gaps if gap.device == broken.uuid} == ALL_FIELDS
    assert [device.problems for device in snapshot.devices if device.index != 1] == [()] * 3


@pytest.mark.parametrize("name", ["temperature", "memory_used", "processes", "power_draw", "name", "utilization"])
def test_a_field_that_the_driver_does_not_tell_is_unknown_and_a_gap(place, name):
    backend = start(place)
    change(place, 1, unknown=(name,))
    snapshot = backend.sample(ALL_FIELDS)

    assert getattr(snapshot.devices[1], name) is None
    told = [(gap.device, gap.field) for gap in snapshot.gaps if "simulated driver" in gap.reason]
    assert told == [(snapshot.devices[1].uuid, name)]


def test_a_driver_without_a_process_list_leaves_the_processes_unknown(place):
    backend = start(place)
    change(place, 0, faults=("unlisted",))
    snapshot = backend.sample(VERIFY_FIELDS)

    assert snapshot.devices[0].processes is None
    assert [gap.field for gap in snapshot.gaps] == ["processes"]


def test_an_implausible_process_list_is_marked_as_such(place):
    backend = start(place)
    change(place, 0, faults=("implausible",))
    device = one(backend)

    assert not device.processes_plausible
    assert 4294967295 in {process.pid for process in device.processes or ()}


def test_processes_that_grow_together_stop_at_what_the_device_has(place):
    backend = start(place, "T4")
    with a_user(place, "0", 9 * GIB):
        simulated.use("0", GIB, ramp=(9 * GIB, 0.0), spec=place)
        device = one(backend)

    assert len(device.processes) == 2
    assert sum(process.memory_used for process in device.processes) <= device.memory_total
    assert device.memory_free == 0


def test_a_slow_driver_takes_its_time_for_each_device(place):
    backend = start(place, "2xT4")
    for index in (0, 1):
        change(place, index, latency=0.05)
    begin = time.monotonic()
    backend.sample({MEMORY})

    assert time.monotonic() - begin >= 0.1


def test_a_hanging_device_hangs_until_it_is_mended_and_is_left_alone_when_told_so(place):
    backend = start(place)
    change(place, 1, faults=("hang",))
    samples = []
    reader = threading.Thread(target=lambda: samples.append(backend.sample({MEMORY})), daemon=True)
    reader.start()
    reader.join(0.2)
    assert samples == []

    mender = threading.Timer(10, lambda: change(place, 1, faults=()))  # else a fault here would hang the tests
    mender.start()
    patient = simulated.open(place)
    patient.skip = {1}
    begin = time.monotonic()
    snapshot = patient.sample({MEMORY})
    mender.cancel()
    assert time.monotonic() - begin < 10
    assert snapshot.devices[1].problems == ("unresponsive",)
    assert [gap.device for gap in snapshot.gaps] == [snapshot.devices[1].uuid]

    change(place, 1, faults=())
    reader.join(10)
    assert len(samples) == 1


def test_a_default_node_is_made_on_first_use(place):
    snapshot = simulated.open(place).sample({MODEL})

    assert snapshot.simulated
    assert [device.name for device in snapshot.devices] == ["NVIDIA H100 80GB HBM3"] * 8


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "spec": "x"}', "\x00" * 100])
def test_a_damaged_state_is_an_error_that_says_how_to_start_again(place, text):
    start(place)
    Path(place, simulated_node.STATE).write_text(text)

    with pytest.raises(BackendError, match="sim start --force"):
        simulated.open(place)


def test_a_state_survives_being_written_and_read(place):
    backend = start(place, "1xA100-40GB:mig=1g.5gb+1xRTX4090")
    simulated.use("1", GIB, 10.0, ramp=(2 * GIB, 5.0), lasting=60.0, spec=place)
    change(place, 1, temperature=WorkPattern(1.0, 2.0, 3.0, 4.0), faults=("hang",), unknown=("name",), latency=0.5)
    state = simulated_node.load(backend.directory)

    assert isinstance(state, SimulatedNode)
    assert simulated_node.update(place, lambda same: same) == state
    assert simulated_node.load(place) == state


def test_readers_never_see_half_a_state_while_it_is_written(place):
    start(place, "8xH100-80GB")
    done = threading.Event()

    def write() -> None:
        for latency in range(200):
            change(place, 0, latency=latency / 1e9)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or not reads:
        state = simulated_node.load(place)
        assert state and len(state.devices) == 8
        reads += 1
    writer.join()


def test_a_stopped_node_is_an_error_with_the_next_step(place):
    backend = start(place)
    assert simulated_node.remove(place)

    with pytest.raises(BackendError, match="gpuguard sim start"):
        backend.sample({MEMORY})


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


def test_the_state_is_json_that_says_its_version(place):
    start(place)

    assert json.loads(Path(place, simulated_node.STATE).read_text())["schema"] == 1
