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
from gpuguard.cli import run_command_line as main
from gpuguard.model import HEALTH, MEMORY, POWER, PROCESSES, THERMAL, UTILIZATION


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    return str(tmp_path / "node")


@pytest.fixture
def a_node(place: str) -> str:
    assert main(["sim", "start", "4xRTX4090"]) == 0
    return place


def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["sim", "show", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def sim(*words: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gpuguard", "sim", *words], stdout=subprocess.PIPE, text=True, **options
    )


def test_start_says_what_there_is_where_it_is_and_what_to_try(place, capsys):
    assert main(["sim", "start", "2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb"]) == 0

    said = capsys.readouterr().out
    assert said.startswith("SIMULATED node of 3 devices")
    assert place in said
    assert "Try: gpuguard run --backend simulated -n 1 -- gpuguard sim use" in said


def test_start_names_a_node_elsewhere_as_the_other_commands_must_which_steers_it(tmp_path, capsys, monkeypatch):
    elsewhere = f"simulated:{tmp_path}/a node"
    assert main(["sim", "start", "2xT4", "--backend", elsewhere]) == 0

    assert f"Try: gpuguard run --backend '{elsewhere}' -n 1 -- " in capsys.readouterr().out
    monkeypatch.setenv("GPUGUARD_BACKEND", elsewhere)
    assert len(shown(capsys)["devices"]) == 2


def test_a_running_node_is_replaced_only_with_force(a_node, capsys):
    assert main(["sim", "start", "2xT4"]) == 1
    assert "--force" in capsys.readouterr().err

    assert main(["sim", "start", "2xT4", "--force"]) == 0
    assert len(shown(capsys)["devices"]) == 2


def test_a_damaged_node_is_replaced_with_force_and_removed_by_stop(a_node, capsys):
    Path(a_node, "node.json").write_text("{")
    assert main(["sim", "show"]) == 4
    assert main(["sim", "start", "2xT4", "--force"]) == 0
    Path(a_node, "node.json").write_text("{")

    assert main(["sim", "stop"]) == 0
    assert main(["sim", "stop"]) == 0
    assert "No simulated node" in capsys.readouterr().out


def test_use_holds_memory_until_it_is_ended_and_show_lists_it(a_node, capsys):
    with sim("use", "--device", "0,1", "--memory", "10GiB", "--utilization", "90%") as child:
        assert child.stdout and child.stdout.readline().startswith(
            f"SIMULATED: pid {child.pid} uses 10.0GiB on 2 devices"
        )
        busy, _, idle, _ = shown(capsys)["devices"]
        child.terminate()

    assert [process["pid"] for process in busy["processes"]] == [child.pid]
    assert (busy["utilization_percent"], idle["utilization_percent"]) == (90.0, 0)
    assert shown(capsys)["devices"][0]["processes"] == []


def test_use_for_a_while_ends_by_itself(a_node):
    assert main(["sim", "use", "--device", "0", "--memory", "1GiB", "--for", "10ms"]) == 0


def test_use_with_a_command_becomes_that_command(a_node, capsys):
    program = "import os; print(os.getpid(), flush=True); input()"
    words = ("use", "--device", "3", "--memory", "2GiB", "--", sys.executable, "-c", program)
    with sim(*words, stdin=subprocess.PIPE) as child:
        assert child.stdout and int(child.stdout.readline()) == child.pid
        assert [process["pid"] for process in shown(capsys)["devices"][3]["processes"]] == [child.pid]
        child.communicate("\n")
    assert child.returncode == 0


def test_use_takes_what_cuda_visible_devices_names(a_node, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with sim("use", "--memory", "1GiB") as child:
        assert child.stdout and child.stdout.readline()
        assert [bool(device["processes"]) for device in shown(capsys)["devices"]] == [False, False, True, False]
        child.terminate()


def test_set_moves_a_temperature_along_the_clock(a_node):
    assert main(["sim", "set", "--device", "3", "--temperature", "40C..95C", "--over", "100ms"]) == 0
    backend = simulated.open()
    deadline = time.monotonic() + 10
    seen: list[Any] = [40.0]
    while seen[-1] != 95.0 and time.monotonic() < deadline:
        seen.append(backend.sample({THERMAL}).devices[3].temperature)

    assert seen[-1] == 95.0
    assert seen == sorted(seen)
    assert main(["sim", "set", "--device", "3", "--temperature", "auto"]) == 0
    assert backend.sample({THERMAL}).devices[3].temperature == 34.0


def test_set_sets_everything_else_too(a_node, capsys):
    words = "set --device 1 --utilization 50% --memory 3GiB --latency 1ms --compute-mode prohibited --release-delay 3s"
    assert main(["sim", *words.split()]) == 0
    device: Any = simulated.open().sample({MEMORY, UTILIZATION, HEALTH, POWER, PROCESSES}).devices[1]
    latencies = [device["latency_seconds"] for device in shown(capsys)["devices"]]

    assert (device.utilization, device.compute_mode, device.processes) == (50.0, "prohibited", ())
    assert device.memory_used > 3 * 2**30
    assert device.power_draw > 200
    assert latencies == [0.0, 0.001, 0.0, 0.0]


def test_faults_come_on_top_of_each_other_and_go_together(a_node, capsys):
    assert main(["sim", "fault", "--device", "1,2", "unlisted"]) == 0
    assert main(["sim", "fault", "--device", "1", "na:power_draw", "hang"]) == 0
    broken, other = (device["faults"] for device in shown(capsys)["devices"][1:3])
    assert (broken, other) == (["unlisted", "hang", "na:power_draw"], ["unlisted"])

    assert main(["sim", "fault", "--device", "all", "none"]) == 0
    assert [device["faults"] for device in shown(capsys)["devices"]] == [[]] * 4


def test_show_reads_the_state_itself_so_no_fault_can_stop_it(a_node, capsys):
    main(["sim", "fault", "--device", "all", "hang", "lost", "implausible"])
    capsys.readouterr()

    assert main(["sim", "show"]) == 0
    assert "hang, lost, implausible" in capsys.readouterr().out


def test_a_mig_instance_cannot_be_broken_alone(capsys):
    main(["sim", "start", "1xA100-40GB:mig=3g.20gb"])
    instance = shown(capsys)["devices"][0]["instances"][0]["uuid"]

    assert main(["sim", "fault", "--device", instance, "lost"]) == 2
    assert "the device that it belongs to" in capsys.readouterr().err
