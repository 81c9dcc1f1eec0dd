"""`gpuguard select`: devices on standard output, or nothing at all; `gpuguard explain`: why, for each device."""

import json
from dataclasses import replace
from functools import partial

import pytest
from builders import GIB, Machine, a_device, a_process, a_uuid

BUSY = a_device(2, processes=(a_process(pid=812, user="bob"),), memory_used=10 * GIB)


@pytest.fixture
def machine(monkeypatch):
    """Four devices; a process of bob's is on device 2."""
    machine = Machine(a_device(0), a_device(1), BUSY, a_device(3))
    monkeypatch.setattr("gpuguard.cli.options.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def select(machine, directory, command):
    return partial(command, "select", "--dir", directory.path)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ([], "3\n"),
        (["-n", "2"], "1,3\n"),
        (["-n", "3"], "0,1,3\n"),
        (["--devices", "0,1"], "0,1\n"),
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
        (["-n", "4"], 1, "wanted 4 GPUs, but only 3 are free now.\n  GPU 2: 10.0GiB used by bob (pid 812"),
        (["--devices", "GPU-ffff"], 2, f"names no GPU of this machine.  It has\n  0  {a_uuid(0)}"),
        (["-i", "0", "--devices", "1"], 2, "use one of them"),
    ],
)
def test_when_it_fails_nothing_is_printed_but_the_reason(select, words, status, message):
    code, output, error = select(*words)

    assert (code, output) == (status, "")
    assert message in error and "Traceback" not in error


def test_json_names_the_devices(select):
    status, output, _ = select("-n", "2", "--json")

    name = "NVIDIA H100 80GB HBM3"
    devices = [{"index": index, "uuid": a_uuid(index), "name": name} for index in (1, 3)]
    assert (status, json.loads(output)) == (0, {"schema": 1, "devices": devices})


def test_it_stays_inside_cuda_visible_devices(select, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert select() == (0, "0\n", "")

    status, output, error = select("-n", "3")
    assert (status, output) == (1, "") and "CUDA_VISIBLE_DEVICES=0,2 allows only GPUs 0, 2" in error


BOB = a_process(pid=812, user="bob", uid=1002, memory_used=41 * GIB, start_time=10_000.0 - 3600)


@pytest.fixture
def three_devices(monkeypatch):
    """Device 0 is bob's, 1 is lost, 2 and 3 are free."""
    devices = (a_device(0, processes=(BOB,), memory_used=41 * GIB), a_device(1, problems=("lost",)))
    machine = Machine(*devices, a_device(2), a_device(3))
    monkeypatch.setattr("gpuguard.cli.explain.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def explain(three_devices, directory, command):
    return lambda *words: command("explain", "--dir", directory.path, *words)[:2]


def test_each_device_has_its_line_and_then_comes_what_run_would_do(explain):
    status, output = explain("-n", "2")

    assert status == 0
    assert output.splitlines() == [
        "node1: gpuguard run -n 2",
        "GPU 0  REFUSED  41.0GiB used by bob (pid 812, python train.py, 1h)",
        "GPU 1  REFUSED  lost",
        "GPU 2  CHOSEN   choice 2, 80.0GiB free",
        "GPU 3  CHOSEN   choice 1, 80.0GiB free",
        "It would start at once on GPU 2, GPU 3.",
    ]


def test_a_device_that_is_passed_over_has_its_reason(command, directory, monkeypatch):
    class LinkedMachine(Machine):
        def sample(self, *words):
            return replace(super().sample(*words), topology=((a_uuid(0), a_uuid(1), "NVLINK"),))

    machine = LinkedMachine(*map(a_device, range(3)))
    monkeypatch.setattr("gpuguard.cli.explain.backend_of", lambda args: machine)
    _, output = command("explain", "--dir", directory.path, "-n", "2")[:2]

    assert output.splitlines()[1:4] == [
        "GPU 0  CHOSEN    choice 3, 80.0GiB free",
        "GPU 1  CHOSEN    choice 2, 80.0GiB free",
        "GPU 2  ELIGIBLE  choice 1, 80.0GiB free, not chosen: the others are closer to each other (nvidia-smi topo -m)",
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


def test_every_reason_is_shown(explain, three_devices):
    three_devices.change(0, problems=("reset required",))
    _, output = explain("--model", "A*")

    lines = output.splitlines()
    assert lines[1:4] == [
        "GPU 0  REFUSED  its model is NVIDIA H100 80GB HBM3",
        "                reset required",
        "                41.0GiB used by bob (pid 812, python train.py, 1h)",
    ]


def test_json_says_for_each_device_whether_and_why_not(explain):
    status, output = explain("-n", "3", "--json")
    answer = json.loads(output)

    assert status == 1
    assert (answer["schema"], answer["outcome"], answer["chosen"], answer["request"]) == (1, "wait", [], "-n 3")
    devices = [tuple(device[name] for name in ("eligible", "rank", "permanent")) for device in answer["devices"]]
    assert devices == [(False, None, False), (False, None, True), (True, 2, False), (True, 1, False)]
    assert answer["devices"][1]["reasons"] == ["lost"]


def test_what_is_unknown_is_said_and_never_shown_as_0(explain, three_devices):
    three_devices.change(3, memory_free=None, memory_used=None)
    three_devices.change(2, processes=None)
    _, output = explain()

    assert "GPU 3  ELIGIBLE  choice 2, free memory unknown" in output
    assert "its list of processes is unknown: judged by memory alone" in output
