from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nodes import GIB, a_user, change, eventually, one, start

from gpuguard.backends import simulated, simulated_node
from gpuguard.backends.simulated_node import (
    DEVICES_AT_MOST,
    MODELS,
    WorkPattern,
    find,
    instance_memory,
    new_node,
    parse_spec,
)
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import ALL_FIELDS, HEALTH, MEMORY, MODEL, PROCESSES, TOPOLOGY, Device


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "node")


def test_a_process_that_registers_is_seen_with_its_memory_by_everybody(place):
    backend = start(place)
    with a_user(place, "1,2", 10 * GIB, 80.0) as child:
        used, free = one(backend, 1), one(backend, 0)

        assert used.processes and [process.pid for process in used.processes] == [child.pid]
        assert used.processes[0].memory_used == 10 * GIB
        assert used.memory_used == 10 * GIB + simulated_node.IDLE_MEMORY
        assert (used.utilization, free.utilization, free.processes) == (80.0, 0.0, ())
        assert used.temperature > free.temperature
        assert used.power_draw > free.power_draw


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
    simulated.use([0], GIB, ramp=(3 * GIB, 1000.0), spec=place)
    first = one(backend).memory_used

    assert eventually(lambda: one(backend).memory_used > first)


def test_released_memory_stays_visible_for_the_delay_but_its_process_does_not(place):
    backend = start(place)
    simulated_node.update(place, lambda state: replace(state, release_delay=0.5))
    with a_user(place, "0", 10 * GIB) as child:
        child.kill()
        assert eventually(lambda: one(backend).processes == ())

    assert one(backend).memory_used > 10 * GIB
    assert eventually(lambda: one(backend).memory_used == simulated_node.IDLE_MEMORY)


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


def test_everything_that_a_real_h100_tells_is_told(place):
    device = one(start(place))
    unknown = {field.name for field in fields(Device) if getattr(device, field.name) is None}

    mig = {"parent_uuid", "mig_profile", "gpu_instance_id", "compute_instance_id"}
    assert unknown == mig | {"fan_speed", "retired_pages"}
    assert device.memory_total == device.memory_used + device.memory_free + device.memory_reserved


def test_instances_are_devices_behind_their_parent_and_share_its_memory(place):
    backend = start(place, "1xA100-40GB+1xA100-40GB:mig=3g.20gb,2g.10gb")
    _, parent, first, second = backend.sample(ALL_FIELDS).devices
    with a_user(place, first.uuid, 5 * GIB):
        seen = {device.uuid: device for device in backend.sample(ALL_FIELDS, [second.uuid]).devices}

    assert (parent.mig_mode, parent.utilization, first.power_draw) == (True, None, None)
    assert [(each.parent_uuid, each.mig_profile, each.index) for each in (first, second)] == [
        (parent.uuid, "3g.20gb", 1),
        (parent.uuid, "2g.10gb", 1),
    ]
    assert seen[first.uuid].memory_used == seen[parent.uuid].memory_used == 5 * GIB + simulated_node.IDLE_MEMORY
    assert seen[second.uuid].processes == ()
    assert len(backend.sample({MEMORY}).devices) == 2


def test_a_process_on_a_divided_device_gets_its_first_instance(place):
    backend = start(place, "1xA100-40GB:mig=3g.20gb,3g.20gb")
    _, first, _ = backend.sample({HEALTH}).devices

    assert simulated.use("0", GIB, spec=place) == (first.uuid,)


def test_devices_are_connected_as_their_model_allows(place, tmp_path):
    kinds = [{kind for _, _, kind in start(place, spec).sample({TOPOLOGY}).topology or ()} for spec in ("4xH100-80GB",)]
    plain = start(str(tmp_path / "other"), "4xRTX4090").sample({TOPOLOGY}).topology

    change(place, 0, faults=("lost",))

    assert kinds == [{"NVLINK"}]
    assert len(simulated.open(place).sample({TOPOLOGY}).topology or ()) == 3
    assert plain and [kind for _, _, kind in plain] == ["PIX", "SYS", "SYS", "SYS", "SYS", "PIX"]


def test_a_course_is_followed_from_its_start_to_its_end():
    course = WorkPattern(40.0, 95.0, since=100.0, over=120.0)

    assert [course.at(clock) for clock in (50, 100, 160, 220, 900)] == [40.0, 40.0, 67.5, 95.0, 95.0]


def test_energy_adds_up_power_over_time_also_across_ramps_and_ends():
    idle = simulated_node.new_node("1xH100-80GB", "/a", 0.0)
    (device,) = idle.devices
    power = device.model.idle_power
    busy = simulated_node.BUSY_POWER_SHARE * device.model.power_limit
    ramp = replace(device, utilization=WorkPattern(0.0, 100.0, since=10.0, over=10.0))
    use = simulated_node.Use(device.uuid, 1, 0.0, WorkPattern(0, 0), 100.0, until=5.0)

    assert simulated_node.total_energy(idle, device, 10.0) == pytest.approx(10 * power)
    assert simulated_node.total_energy(idle, ramp, 30.0) == pytest.approx(
        10 * power + 10 * (power + busy) / 2 + 10 * busy
    )
    assert simulated_node.total_energy(replace(idle, uses=(use,)), device, 10.0) == pytest.approx(5 * busy + 5 * power)
    halfway = simulated_node.settled(replace(idle, uses=(use,)), 7.0, lambda use: True)
    assert simulated_node.total_energy(halfway, halfway.devices[0], 10.0) == pytest.approx(5 * busy + 5 * power)


# .


def a_group() -> st.SearchStrategy[tuple[str, int]]:
    known = st.sampled_from(sorted(MODELS)).map(lambda key: f"{key[0]}-{key[1]}GB")
    own = st.tuples(st.from_regex(r"Own[A-Za-z0-9_]{0,9}", fullmatch=True), st.integers(1, 999)).map(
        lambda facts: f"{facts[0]}-{facts[1]}GB"
    )
    return st.tuples(st.integers(1, 8), known | own).map(lambda facts: (f"{facts[0]}x{facts[1]}", facts[0]))


@given(st.lists(a_group(), min_size=1, max_size=8))
def test_a_spec_gives_as_many_devices_as_it_says(groups):
    parts = parse_spec("+".join(text for text, _ in groups))

    assert len(parts) == sum(count for _, count in groups)
    assert all(part.model.memory_total >= GIB for part in parts)


@given(st.text(max_size=30) | st.text("0123456789xAH10-GB:mig=.,+", max_size=30))
def test_any_other_text_is_refused_with_a_message_and_nothing_else(text):
    try:
        parts = parse_spec(text)
    except InvalidRequest as error:
        assert str(error)
    else:
        assert 1 <= len(parts) <= DEVICES_AT_MOST


def test_models_have_the_facts_of_the_real_ones():
    (h100,) = parse_spec("1xH100-80GB")
    (other,) = parse_spec("rtx4090")

    assert (h100.model.name, h100.model.memory_total) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
    assert (other.model.name, other.model.nvlinks) == ("NVIDIA GeForce RTX 4090", 0)


def test_a_divided_device_knows_its_profiles():
    parts = parse_spec("2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")

    assert [part.profiles for part in parts] == [(), (), ("3g.20gb", "3g.20gb")]
    assert instance_memory("3g.20gb") < 20 * GIB


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
        ("1xA100-40GB:mig=3g20gb", "no MIG profile"),
        ("1xA100-40GB:mig=,", "no MIG profile"),
        ("1xA100-40GB:mig=4g.20gb,4g.20gb", "7 slices"),
        ("1xA100-40GB:mig=3g.40gb,3g.40gb", "40 GiB"),
    ],
)
def test_a_fault_in_a_spec_says_what_would_be_right(spec, advice):
    with pytest.raises(InvalidRequest, match=advice):
        parse_spec(spec)


def test_uuids_come_back_with_the_node_and_are_never_those_of_another_node():
    first, again, elsewhere = (new_node("4xH100-80GB", place, 0.0) for place in ("/a", "/a", "/b"))

    assert [device.uuid for device in first.devices] == [device.uuid for device in again.devices]
    assert len({device.uuid for node in (first, elsewhere) for device in node.devices}) == 8


def test_devices_are_found_by_index_by_uuid_and_by_the_beginning_of_a_uuid():
    node = new_node("3xT4", "/a", 0.0)
    uuids = [device.uuid for device in node.devices]

    assert find(node, f"1, {uuids[0]},{uuids[2][:12]}") == (uuids[1], uuids[0], uuids[2])
    assert find(node, "all") == tuple(uuids)


@pytest.mark.parametrize("names", ["3", "-1", "", ",", "GPU-", "x", "0,nonsense"])
def test_what_names_no_single_device_is_refused(names):
    with pytest.raises(InvalidRequest):
        find(new_node("3xT4", "/a", 0.0), names)
