"""`gpuguard sim`: a simulated node as a user makes, steers and breaks it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpuguard.backends import simulated
from gpuguard.model import HEALTH, MEMORY, POWER, PROCESSES, THERMAL, UTILIZATION


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    return str(tmp_path / "node")


@pytest.fixture
def sim(command):
    return lambda *words: command("sim", *words)


@pytest.fixture
def a_node(place, sim):
    assert sim("start", "4xRTX4090")[0] == 0
    return place


@pytest.fixture
def devices(sim):
    """What `gpuguard sim show` says of the devices."""
    return lambda: json.loads(sim("show", "--json")[1])["devices"]


def using(*words: str, **options) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "gpuguard", "sim", "use"]
    return subprocess.Popen([*program, *words], stdout=subprocess.PIPE, text=True, **options)


def test_start_says_what_there_is_where_it_is_and_what_to_try(place, sim):
    status, said, _ = sim("start", "2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")

    assert status == 0 and said.startswith("SIMULATED node of 3 devices") and place in said
    assert "Try: gpuguard run --backend simulated -n 1 -- gpuguard sim use" in said


def test_start_names_a_node_elsewhere_as_the_other_commands_must_which_steers_it(tmp_path, sim, devices, monkeypatch):
    elsewhere = f"simulated:{tmp_path}/a node"

    assert f"Try: gpuguard run --backend '{elsewhere}' -n 1 -- " in sim("start", "2xT4", "--backend", elsewhere)[1]
    monkeypatch.setenv("GPUGUARD_BACKEND", elsewhere)
    assert len(devices()) == 2


def test_a_running_node_is_replaced_only_with_force(a_node, sim, devices):
    status, _, complaint = sim("start", "2xT4")

    assert status == 1 and "--force" in complaint
    assert sim("start", "2xT4", "--force")[0] == 0
    assert len(devices()) == 2


def test_a_damaged_node_is_replaced_with_force_and_removed_by_stop(a_node, sim):
    file = Path(a_node, "node.json")
    file.write_text("{")
    assert [sim(*words)[0] for words in (("show",), ("start", "2xT4", "--force"))] == [4, 0]
    file.write_text("{")

    assert sim("stop")[0] == 0
    assert sim("stop") == (0, f"No simulated node was in {a_node}.\n", "")


def test_use_holds_memory_until_it_is_ended_and_show_lists_it(a_node, devices):
    with using("--device", "0,1", "--memory", "10GiB", "--utilization", "90%") as child:
        assert child.stdout.readline().startswith(f"SIMULATED: pid {child.pid} uses 10.0GiB on 2 devices")
        busy, _, idle, _ = devices()
        child.terminate()

    assert [process["pid"] for process in busy["processes"]] == [child.pid]
    assert (busy["utilization_percent"], idle["utilization_percent"]) == (90.0, 0)
    assert devices()[0]["processes"] == []


def test_use_for_a_while_ends_by_itself(a_node, sim):
    assert sim("use", "--device", "0", "--memory", "1GiB", "--for", "10ms")[0] == 0


def test_use_with_a_command_becomes_that_command(a_node, devices):
    program = "import os; print(os.getpid(), flush=True); input()"
    words = ("--device", "3", "--memory", "2GiB", "--", sys.executable, "-c", program)
    with using(*words, stdin=subprocess.PIPE) as child:
        assert int(child.stdout.readline()) == child.pid
        assert [process["pid"] for process in devices()[3]["processes"]] == [child.pid]
        child.communicate("\n")
    assert child.returncode == 0


def test_set_moves_a_temperature_along_the_clock(a_node, sim):
    assert sim("set", "--device", "3", "--temperature", "40C..95C", "--over", "100ms")[0] == 0
    backend = simulated.open()
    deadline, seen = time.monotonic() + 10, [40.0]
    while seen[-1] != 95.0 and time.monotonic() < deadline:
        seen.append(backend.sample({THERMAL}).devices[3].temperature)

    assert seen[-1] == 95.0 and seen == sorted(seen)
    assert sim("set", "--device", "3", "--temperature", "auto")[0] == 0
    assert backend.sample({THERMAL}).devices[3].temperature == 34.0


def test_set_sets_everything_else_too(a_node, sim, devices):
    words = "set --device 1 --utilization 50% --memory 3GiB --latency 1ms --compute-mode prohibited --release-delay 3s"
    assert sim(*words.split())[0] == 0
    device: Any = simulated.open().sample({MEMORY, UTILIZATION, HEALTH, POWER, PROCESSES}).devices[1]

    assert (device.utilization, device.compute_mode, device.processes) == (50.0, "prohibited", ())
    assert device.memory_used > 3 * 2**30 and device.power_draw > 200
    assert [shown["latency_seconds"] for shown in devices()] == [0.0, 0.001, 0.0, 0.0]


def test_faults_come_on_top_of_each_other_and_go_together(a_node, sim, devices):
    assert sim("fault", "--device", "1,2", "unlisted")[0] == 0
    assert sim("fault", "--device", "1", "na:power_draw", "hang")[0] == 0
    assert [device["faults"] for device in devices()] == [[], ["unlisted", "hang", "na:power_draw"], ["unlisted"], []]

    assert sim("fault", "--device", "all", "none")[0] == 0
    assert [device["faults"] for device in devices()] == [[]] * 4


def test_show_reads_the_state_itself_so_no_fault_can_stop_it(a_node, sim):
    sim("fault", "--device", "all", "hang", "lost", "implausible")
    status, said, _ = sim("show")

    assert status == 0 and "hang, lost, implausible" in said


def test_a_mig_instance_cannot_be_broken_alone(sim, devices):
    sim("start", "1xA100-40GB:mig=3g.20gb")
    status, _, complaint = sim("fault", "--device", devices()[0]["instances"][0]["uuid"], "lost")

    assert status == 2 and "the device that it belongs to" in complaint
