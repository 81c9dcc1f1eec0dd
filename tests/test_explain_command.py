"""`gpuguard explain`: why each device would or would not be taken."""

from __future__ import annotations

import json

import pytest
from builders import GIB, a_device, a_process
from machines import Machine

from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.lock import acquire, sample_and_lock
from gpuguard.request import Request

BOB = a_process(pid=812, user="bob", uid=1002, memory_used=41 * GIB, start_time=10_000.0 - 3600)


@pytest.fixture
def machine(monkeypatch):
    """Device 0 is bob's, 1 is lost, 2 and 3 are free."""
    devices = (a_device(0, processes=(BOB,), memory_used=41 * GIB), a_device(1, problems=("lost",)))
    machine = Machine(*devices, a_device(2), a_device(3))
    monkeypatch.setattr("gpuguard.cli.explain.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def explain(machine, tmp_path, capsys):
    lock_directory(str(tmp_path))

    def run(*words):
        status = run_command_line(["explain", "--dir", str(tmp_path), *words])
        output, error = capsys.readouterr()
        assert error == ""
        return status, output

    return run


def test_each_device_has_its_line_and_then_comes_what_run_would_do(explain):
    status, output = explain("-n", "2")

    assert status == 0
    assert output.splitlines() == [
        "node1  SIMULATED: gpuguard run -n 2" if "SIMULATED" in output else "node1: gpuguard run -n 2",
        "device 0  REFUSED  41.0GiB used by bob (pid 812, python train.py, 1h)",
        "device 1  REFUSED  lost",
        "device 2  CHOSEN   choice 2, 80.0GiB free",
        "device 3  CHOSEN   choice 1, 80.0GiB free",
        "It would start at once on device 2, device 3.",
    ]


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["-n", "3"], "It would wait: wanted 3 GPUs, but only 2 are free now."),
        (["-n", "4"], "It can never start: wanted 4 GPUs, but only 3 exist that can be used.\nAsk for 3."),
        (["--model", "A*"], "It can never start: wanted 1 GPU, but none exists that can satisfy --model 'A*'."),
    ],
)
def test_a_request_that_does_not_fit_now_is_exit_code_1(explain, words, verdict):
    status, output = explain(*words)

    assert status == 1 and verdict in output


def test_a_claim_is_named_with_its_holder(explain, machine, tmp_path):
    with acquire(machine, Request(devices=("2",)), lock_directory(str(tmp_path)), note="my paper"):
        _, output = explain()

    assert "device 2  REFUSED  claimed by " in output and "my paper" in output


def test_every_reason_is_shown(explain, machine):
    machine.change(0, problems=("reset required",))
    _, output = explain("--model", "A*")

    lines = output.splitlines()
    assert lines[1:4] == [
        "device 0  REFUSED  its model is NVIDIA H100 80GB HBM3",
        "                   reset required",
        "                   41.0GiB used by bob (pid 812, python train.py, 1h)",
    ]


def test_limits_from_outside_are_named(explain, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    _, output = explain()

    assert output.splitlines()[1] == "limit: CUDA_VISIBLE_DEVICES=3 allows only device 3"


def test_json_says_for_each_device_whether_and_why_not(explain):
    status, output = explain("-n", "3", "--json")
    answer = json.loads(output)

    assert status == 1
    assert (answer["schema"], answer["outcome"], answer["chosen"], answer["request"]) == (1, "wait", [], "-n 3")
    told = [(each["index"], each["eligible"], each["rank"], each["permanent"]) for each in answer["devices"]]
    assert told == [(0, False, None, False), (1, False, None, True), (2, True, 2, False), (3, True, 1, False)]
    assert answer["devices"][1]["reasons"] == ["lost"]


def test_what_is_unknown_is_said_and_never_shown_as_0(explain, machine):
    machine.change(3, memory_free=None, memory_used=None)
    machine.change(2, processes=None)
    _, output = explain()

    assert "device 3  ELIGIBLE  choice 2, free memory unknown" in output
    assert "its list of processes is unknown: judged by memory alone" in output


def test_it_chooses_what_run_would_choose(explain, machine, tmp_path):
    machine.devices = [a_device(i, temperature=90.0 - 10 * i, utilization=10.0 * i) for i in range(4)]
    _, choice = sample_and_lock(machine, Request(2), lock_directory(str(tmp_path)))
    _, output = explain("-n", "2")

    assert f"on {', '.join(f'device {device.index}' for device in choice.devices)}." in output
