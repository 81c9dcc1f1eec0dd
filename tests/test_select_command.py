"""`gpuguard select`: devices on standard output, or nothing at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from builders import GIB, a_device, a_mig_instance, a_process, a_uuid
from machines import Machine

from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.errors import DriverNotFound
from gpuguard.lock import acquire
from gpuguard.model import HEALTH
from gpuguard.request import Request

BUSY = a_device(2, processes=(a_process(pid=812, user="bob"),), memory_used=10 * GIB)


@pytest.fixture
def machine(monkeypatch):
    """Four devices; a process of bob's is on device 2."""
    machine = Machine(a_device(0), a_device(1), BUSY, a_device(3))
    for command in ("select", "explain"):
        monkeypatch.setattr(f"gpuguard.cli.{command}.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def select(machine, tmp_path, capsys):
    """Run the command; returns (exit code, standard output, standard error)."""

    lock_directory(str(tmp_path))

    def run(*words):
        status = run_command_line(["select", "--dir", str(tmp_path), *words])
        return (status, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "3\n"),
        (["-n", "2"], "1,3\n"),
        (["-n", "3"], "0,1,3\n"),
        (["--gpus", "0,1"], "0,1\n"),
        (["-n", "2", "-O", "uuid"], f"{a_uuid(1)},{a_uuid(3)}\n"),
        (["-n", "2", "-s", " "], "1 3\n"),
        (["-n", "2", "--newline"], "1\n3\n"),
        (["-n", "2", "-0"], "1\x003\x00"),
        (["-n", "2", "-S"], "0,1\n"),
        (["-c", "2"], "1,3\n"),
        (["-C", "8"], "0,1,3\n"),
        (["-c", "2", "-C", "2"], "1,3\n"),
        (["-f", "20GiB", "-t", "80GiB", "-G", "10%", "-M", "10%"], "3\n"),
        (["-i", "0,2"], "0\n"),
        (["-i"], "3\n"),
        (["--prefer", "0"], "0\n"),
    ],
)
def test_the_chosen_devices_are_printed(select, words, output):
    assert select(*words) == (0, output, "")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["-n", "4"], 1, "wanted 4 GPUs, but only 3 are free now.\n  device 2: 10.0GiB used by bob (pid 812"),
        (["-n", "9"], 1, "wanted 9 GPUs, but only 4 exist.\nAsk for 4."),
        (["--gpus", "2"], 1, "used by bob"),
        (["--model", "A100"], 1, "none exists that can satisfy --model 'A100'.\nDrop --model."),
        (["-n", "0"], 2, "ask for at least 1"),
        (["--gpus", "0,0"], 2, "names device 0 twice"),
        (["--gpus", "GPU-ffff"], 2, f"names no device of this machine.  It has\n  0  {a_uuid(0)}"),
        (["-G", "10"], 2, "write a percentage like '10%'"),
        (["-n", "1", "-c", "1"], 2, "leave it out with -c"),
        (["-i", "0", "--gpus", "1"], 2, "use one of them"),
        (["-C", "0"], 2, "at most 0 GPUs"),
        (["--min-free", "20"], 2, "'20' has no unit"),
        (["--what"], 2, "unrecognized arguments: --what"),
    ],
)
def test_when_it_fails_nothing_is_printed_but_the_reason(select, words, status, message):
    code, output, error = select(*words)

    assert (code, output) == (status, "")
    assert message in error and "Traceback" not in error


def test_no_driver_is_exit_code_4(select, monkeypatch):
    def no_driver(args):
        raise DriverNotFound("there is no libnvidia-ml.so.1")

    monkeypatch.setattr("gpuguard.cli.select.backend_of", no_driver)

    assert select() == (4, "", "gpuguard: there is no libnvidia-ml.so.1\n")


def test_json_names_the_devices(select):
    status, output, _ = select("-n", "2", "--json")

    name = "NVIDIA H100 80GB HBM3"
    devices = [{"index": index, "uuid": a_uuid(index), "name": name} for index in (1, 3)]
    assert (status, json.loads(output)) == (0, {"schema": 1, "devices": devices})


def test_mig_instances_go_by_uuid(select, machine):
    gpu = a_device(0, mig_mode=True)
    instance = a_mig_instance(gpu)
    machine.devices = [gpu, instance]

    assert select() == (0, f"{instance.uuid}\n", "")


def test_claimed_devices_are_not_chosen(select, machine, tmp_path):
    with acquire(machine, Request(devices=("3",)), lock_directory(str(tmp_path))):
        assert select() == (0, "1\n", "")

    assert select() == (0, "3\n", "")


def test_it_stays_inside_cuda_visible_devices(select, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert select() == (0, "0\n", "")

    status, output, error = select("-n", "3")
    assert (status, output) == (1, "") and "CUDA_VISIBLE_DEVICES=0,2 allows only devices 0, 2" in error


def test_an_unhealthy_winner_is_replaced_although_only_winners_are_examined(select, machine):
    machine.change(3, problems=("row remap pending",))

    assert select() == (0, "1\n", "")
    assert HEALTH not in machine.asked[0][0]


def test_a_shell_sees_the_failure(tmp_path):
    gpuguard = f"{sys.executable} -m gpuguard"
    script = f'export GPUGUARD_BACKEND=simulated:{tmp_path}/node; X="$({gpuguard} select -n 99)" || echo "none:$X"'
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert result.stdout == "none:\n"
    assert "wanted 99 GPUs, but only 8 exist." in result.stderr


def test_one_of_eight_costs_at_most_forty_driver_calls(fake, tmp_path):
    fake.reset_calls()
    lock_directory(str(tmp_path))
    words = [sys.executable, "-m", "gpuguard", "select", "-n", "1", "--backend", "nvml", "--dir", str(tmp_path)]
    result = subprocess.run(words, env=fake.environment(), capture_output=True, text=True, timeout=60, check=False)
    calls = fake.calls()

    assert (result.stdout, result.stderr) == ("7\n", "")
    assert sum(calls.values()) <= 40, calls
