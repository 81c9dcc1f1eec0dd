from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from gpuguard.backends import node, node_file, simulated
from gpuguard.backends.isolated import open_isolated
from gpuguard.backends.node import Course, Node
from gpuguard.errors import BackendError, GpuguardError, InvalidRequest
from gpuguard.model import (
    ALL_FIELDS,
    HEALTH,
    MEMORY,
    MODEL,
    PROCESS_DETAILS,
    PROCESSES,
    TOPOLOGY,
    VERIFY_FIELDS,
    Device,
)

GIB = 2**30
USE = """
import sys, time
from gpuguard.backends import simulated
simulated.use(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), spec=sys.argv[1])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "node")


def start(place: str, spec: str = "4xH100-80GB") -> simulated.Simulated:
    node_file.create(simulated.directory(place), lambda: node.new_node(spec, place, clock()))
    return simulated.open(place)


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def change(place: str, index: int, **change: object) -> None:
    node_file.update(place, lambda state: node.changed(state, (state.devices[index].uuid,), change))


def one(backend: simulated.Simulated, index: int = 0, groups: frozenset[str] = ALL_FIELDS) -> Any:
    return next(device for device in backend.sample(groups).devices if device.index == index)


@contextmanager
def a_user(place: str, devices: str, memory: int, utilization: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", USE, place, devices, str(memory), str(utilization)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_that_registers_is_seen_with_its_memory_by_everybody(place):
    backend = start(place)
    with a_user(place, "1,2", 10 * GIB, 80.0) as child:
        used, free = one(backend, 1), one(backend, 0)

        assert used.processes and [process.pid for process in used.processes] == [child.pid]
        assert used.processes[0].memory_used == 10 * GIB
        assert used.memory_used == 10 * GIB + node.IDLE_MEMORY
        assert (used.utilization, free.utilization, free.processes) == (80.0, 0.0, ())
        assert used.temperature > free.temperature
        assert used.power_draw > free.power_draw


def test_process_details_say_who_it_is(place):
    backend = start(place)
    with a_user(place, "0", GIB, 30.0) as child:
        (process,) = one(backend, 0, frozenset({PROCESSES, PROCESS_DETAILS})).processes or ()
        (plain,) = one(backend, 0, frozenset({PROCESSES})).processes or ()

    assert (process.pid, process.uid, process.utilization) == (child.pid, os.getuid(), 30.0)
    assert process.command and process.command[1] == "-c"
    assert (plain.command, plain.start_time) == (None, process.start_time)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_is_gone_with_its_memory_however_it_died_even_before_it_is_reaped(place, signum):
    backend = start(place)
    with a_user(place, "0", 10 * GIB) as child:
        child.send_signal(signum)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

        assert one(backend).processes == ()
        assert one(backend).memory_used == node.IDLE_MEMORY


def test_whoever_got_the_pid_of_a_dead_process_is_not_shown_for_it(place):
    backend = start(place)
    with a_user(place, "0", 10 * GIB):
        # The same pid with another start time is what reuse looks like.
        node_file.update(
            place,
            lambda state: replace(state, uses=tuple(replace(use, start_time=use.start_time - 1) for use in state.uses)),
        )

        assert one(backend).processes == ()


def test_many_processes_that_register_at_once_are_all_there(place):
    backend = start(place, "2xH100-80GB")
    register = (
        "import os, sys\nfrom gpuguard.backends import simulated\n"
        "for name in '0', '1', '0':\n    simulated.use(name, 2**30, 1.0, spec=sys.argv[1])\n"
        "print('ready', flush=True)\nsys.stdin.read()"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", register, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(16)
    ]
    try:
        assert all(child.stdout and child.stdout.readline() for child in crowd)
        seen = backend.sample({PROCESSES}).devices

        for device in seen:
            assert {process.pid for process in device.processes or ()} == {child.pid for child in crowd}
    finally:
        for child in crowd:
            child.communicate()
    assert [device.processes for device in backend.sample({PROCESSES}).devices] == [(), ()]


def test_registering_again_replaces_what_was_registered(place):
    backend = start(place)
    simulated.use([0], 10 * GIB, spec=place)
    simulated.use([0], 2 * GIB, spec=place)

    assert [process.memory_used for process in one(backend).processes or ()] == [2 * GIB]


def test_a_use_that_lasts_for_a_while_ends_although_its_process_lives(place):
    backend = start(place)
    simulated.use([0], GIB, lasting=0.1, spec=place)

    assert eventually(lambda: one(backend).processes == ())


def test_memory_that_a_process_grows_to_is_reached_in_time(place):
    backend = start(place)
    simulated.use([0], GIB, ramp_to=3 * GIB, over=1000.0, spec=place)
    first = one(backend).memory_used

    assert eventually(lambda: one(backend).memory_used > first)


def test_released_memory_stays_visible_for_the_delay_but_its_process_does_not(place):
    backend = start(place)
    node_file.update(place, lambda state: replace(state, release_delay=0.5))
    with a_user(place, "0", 10 * GIB) as child:
        child.kill()
        assert eventually(lambda: one(backend).processes == ())

    assert one(backend).memory_used > 10 * GIB
    assert eventually(lambda: one(backend).memory_used == node.IDLE_MEMORY)


def test_more_memory_than_there_is_cannot_be_had(place):
    backend = start(place)
    with a_user(place, "0", 60 * GIB), pytest.raises(GpuguardError, match="out of memory"):
        simulated.use([1, 0], 30 * GIB, spec=place)

    assert one(backend, 1).processes == ()


@pytest.mark.parametrize(
    ("state", "welcome"),
    [
        ({"compute_mode": "prohibited"}, False),
        ({"compute_mode": "exclusive_process"}, False),
        ({"compute_mode": "default"}, True),
        ({"faults": ("lost",)}, False),
    ],
)
def test_a_device_lets_in_whom_its_mode_and_health_allow(place, state, welcome):
    start(place)
    with a_user(place, "0", GIB):
        change(place, 0, **state)
        if welcome:
            assert simulated.use([0], GIB, spec=place)
        else:
            with pytest.raises(GpuguardError, match="device 0"):
                simulated.use([0], GIB, spec=place)


def test_without_names_the_visible_devices_are_used(place, monkeypatch):
    backend = start(place)
    uuids = [device.uuid for device in backend.sample({MODEL}).devices]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{uuids[0]},-1,3")

    assert simulated.use(None, GIB, spec=place) == (uuids[2], uuids[0])

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidRequest, match="gpuguard run"):
        simulated.use(None, GIB, spec=place)


# -- readings ----------------------------------------------------------------------------------------------------------


def test_what_was_not_asked_for_stays_unknown(place):
    backend = start(place)

    (device, *_) = backend.sample({MEMORY}).devices
    known = {field.name for field in fields(Device) if getattr(device, field.name) is not None}

    memory = {"memory_total", "memory_used", "memory_free", "memory_reserved"}
    assert known == {"index", "uuid", "processes_plausible"} | memory
    assert backend.sample({MEMORY}).topology is None


def test_everything_that_a_real_h100_tells_is_told(place):
    device = one(start(place))
    unknown = {field.name for field in fields(Device) if getattr(device, field.name) is None}

    mig = {"parent_uuid", "mig_profile", "gpu_instance_id", "compute_instance_id"}
    assert unknown == mig | {"fan_speed", "retired_pages"}
    assert device.memory_total == device.memory_used + device.memory_free + device.memory_reserved


def test_only_the_named_devices_are_read(place):
    backend = start(place)
    uuids = [device.uuid for device in backend.sample({MODEL}).devices]
    touched: list[int] = []
    backend.progress = touched.append

    assert [device.index for device in backend.sample({MEMORY}, [uuids[2]]).devices] == [2]
    assert touched == [2]


def test_instances_are_devices_behind_their_parent_and_share_its_memory(place):
    backend = start(place, "1xA100-40GB+1xA100-40GB:mig=3g.20gb,2g.10gb")
    _, parent, first, second = backend.sample(ALL_FIELDS).devices
    with a_user(place, first.uuid, 5 * GIB):
        seen = {device.uuid: device for device in backend.sample(ALL_FIELDS, [second.uuid]).devices}

    assert (parent.mig_mode, parent.utilization) == (True, None)
    assert [(each.parent_uuid, each.mig_profile, each.index) for each in (first, second)] == [
        (parent.uuid, "3g.20gb", 1),
        (parent.uuid, "2g.10gb", 1),
    ]
    assert seen[first.uuid].memory_used == seen[parent.uuid].memory_used == 5 * GIB + node.IDLE_MEMORY
    assert seen[second.uuid].processes == ()
    assert len(backend.sample({MEMORY}).devices) == 2


def test_a_process_on_a_divided_device_gets_its_first_instance(place):
    backend = start(place, "1xA100-40GB:mig=3g.20gb,3g.20gb")
    _, first, _ = backend.sample({HEALTH}).devices

    assert simulated.use("0", GIB, spec=place) == (first.uuid,)


def test_devices_are_connected_as_their_model_allows(place, tmp_path):
    kinds = [{kind for _, _, kind in start(place, spec).sample({TOPOLOGY}).topology or ()} for spec in ("4xH100-80GB",)]
    plain = start(str(tmp_path / "other"), "4xRTX4090").sample({TOPOLOGY}).topology

    assert kinds == [{"NVLINK"}]
    assert plain and [kind for _, _, kind in plain] == ["PIX", "SYS", "SYS", "SYS", "SYS", "PIX"]


def test_a_course_is_followed_from_its_start_to_its_end():
    course = Course(40.0, 95.0, since=100.0, over=120.0)

    assert [course.at(clock) for clock in (50, 100, 160, 220, 900)] == [40.0, 40.0, 67.5, 95.0, 95.0]


def test_energy_adds_up_power_over_time_also_across_ramps_and_ends():
    idle = node.new_node("1xH100-80GB", "/a", 0.0)
    (device,) = idle.devices
    power = device.model.idle_power
    busy = node.BUSY_POWER_SHARE * device.model.power_limit
    ramp = replace(device, utilization=Course(0.0, 100.0, since=10.0, over=10.0))
    use = node.Use(device.uuid, 1, 0.0, Course(0, 0), 100.0, until=5.0)

    assert node.total_energy(idle, device, 10.0) == pytest.approx(10 * power)
    assert node.total_energy(idle, ramp, 30.0) == pytest.approx(10 * power + 10 * (power + busy) / 2 + 10 * busy)
    assert node.total_energy(replace(idle, uses=(use,)), device, 10.0) == pytest.approx(5 * busy + 5 * power)
    halfway = node.settled(replace(idle, uses=(use,)), 7.0, lambda use: True)
    assert node.total_energy(halfway, halfway.devices[0], 10.0) == pytest.approx(5 * busy + 5 * power)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "problem"), [("lost", "lost"), ("reset", "reset required")])
def test_a_broken_device_is_named_with_its_problem_and_the_others_are_read(place, fault, problem):
    backend = start(place)
    change(place, 1, faults=(fault,))
    snapshot = backend.sample(ALL_FIELDS)
    broken = snapshot.devices[1]

    assert (broken.problems, broken.memory_used, broken.processes) == ((problem,), None, None)
    assert [gap.device for gap in snapshot.gaps] == [broken.uuid]
    assert [device.problems for device in snapshot.devices if device.index != 1] == [()] * 3


@pytest.mark.parametrize("name", ["temperature", "memory_used", "processes", "power_draw", "name", "utilization"])
def test_a_field_that_the_driver_does_not_tell_is_unknown_and_a_gap(place, name):
    backend = start(place)
    change(place, 1, unknown=(name,))
    snapshot = backend.sample(ALL_FIELDS)

    assert getattr(snapshot.devices[1], name) is None
    assert [(gap.device, gap.field) for gap in snapshot.gaps] == [(snapshot.devices[1].uuid, name)]


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

    patient = simulated.open(place)
    patient.skip = {1}
    snapshot = patient.sample({MEMORY})
    assert snapshot.devices[1].problems == ("unresponsive",)
    assert [gap.device for gap in snapshot.gaps] == [snapshot.devices[1].uuid]

    change(place, 1, faults=())
    reader.join(10)
    assert len(samples) == 1


def test_the_isolated_backend_answers_for_the_others_when_one_device_hangs(place):
    start(place)
    change(place, 2, faults=("hang",))
    backend = open_isolated(f"simulated:{place}")
    try:
        begin = time.monotonic()
        snapshot = backend.sample(VERIFY_FIELDS)
        elapsed = time.monotonic() - begin
    finally:
        backend.close()

    assert elapsed < 5
    assert [device.problems for device in snapshot.devices] == [(), (), ("unresponsive",), ()]


# -- the file and its directory ----------------------------------------------------------------------------------------


def test_a_default_node_is_made_on_first_use(place):
    snapshot = simulated.open(place).sample({MODEL})

    assert snapshot.simulated
    assert [device.name for device in snapshot.devices] == ["NVIDIA H100 80GB HBM3"] * 8


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 99}', '{"schema": 1, "spec": "x"}', "\x00" * 100])
def test_a_damaged_state_is_an_error_that_says_how_to_start_again(place, text):
    start(place)
    Path(place, node_file.STATE).write_text(text)

    with pytest.raises(BackendError, match="sim start --force"):
        simulated.open(place)


def test_a_state_survives_being_written_and_read(place):
    backend = start(place, "1xA100-40GB:mig=1g.5gb+1xRTX4090")
    simulated.use("1", GIB, 10.0, ramp_to=2 * GIB, over=5.0, lasting=60.0, spec=place)
    change(place, 1, temperature=Course(1.0, 2.0, 3.0, 4.0), faults=("hang",), unknown=("name",), latency=0.5)
    state = node_file.load(backend.directory)

    assert isinstance(state, Node)
    assert node_file.update(place, lambda same: same) == state
    assert node_file.load(place) == state


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
        state = node_file.load(place)
        assert state and len(state.devices) == 8
        reads += 1
    writer.join()


def test_a_stopped_node_is_an_error_with_the_next_step(place):
    backend = start(place)
    assert node_file.remove(place)

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

    assert json.loads(Path(place, node_file.STATE).read_text())["schema"] == 1
