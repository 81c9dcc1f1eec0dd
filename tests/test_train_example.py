import csv
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from nodes import start
from sources import ROOT

from gpuguard.backends import simulated
from gpuguard.model import PROCESSES, UTILIZATION

TRAIN = str(Path(__file__).resolve().parent.parent / "examples" / "train.py")


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "node")


@contextmanager
def training(place: str, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    # Without torch and without a driver library, wherever the tests run.
    nothing = Path(place).parent / "nothing"
    nothing.mkdir(exist_ok=True)
    (nothing / "torch.py").write_text("raise ImportError('no torch in this test')\n")
    (nothing / "libcuda.so.1").touch()
    own = {"GPUGUARD_SIM_DIR": place, "PYTHONPATH": str(nothing), "LD_LIBRARY_PATH": str(nothing)}
    environment = {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, TRAIN, *words], env=environment | variables, text=True, **pipes) as child:
        try:
            yield child
        finally:
            child.kill()


def test_it_trains_on_the_visible_devices_of_the_simulated_node_and_says_that_they_are_simulated(place):
    backend = simulated.open(place)
    words = ("--memory", "2GiB", "--step-time", "10ms", "--steps", "10000")
    with training(place, *words, CUDA_VISIBLE_DEVICES="1,3") as child:
        said = [child.stdout.readline() for _ in range(3)]
        devices = backend.sample({PROCESSES, UTILIZATION}).devices

    assert said[0] == "SIMULATED: training on 2 GPUs of the simulated node\n"
    assert said[1].startswith("step 1/10000  loss 2.4")
    used = [sum(process.memory_used or 0 for process in device.processes or ()) for device in devices[:4]]
    assert used == [0, 2 * 2**30, 0, 2 * 2**30]
    assert devices[1].utilization == 90.0


def test_it_saves_and_ends_cleanly_when_it_is_told_to_stop(place):
    simulated.open(place)
    with training(place, "--steps", "10000", "--step-time", "10ms") as child:
        child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        said = child.communicate()[0]

    assert child.returncode == 0
    assert "told to stop by SIGTERM" in said.splitlines()[-1]


def test_without_a_gpu_and_without_a_node_it_says_what_to_do(place):
    with training(place) as child:
        said = child.communicate()

    assert child.returncode == 1
    assert "gpuguard sim start" in said[1]
    assert said[0] == ""


EXAMPLE = str(ROOT / "examples" / "log_numbers.py")


def run(place, *words):
    start(str(place / "node"), "2xH100-80GB")
    environment = {**os.environ, "GPUGUARD_BACKEND": f"simulated:{place}/node", "CUDA_VISIBLE_DEVICES": "1"}
    words = (sys.executable, EXAMPLE, "--csv", str(place / "numbers.csv"), "--epochs", "2", "--seconds", "0.3", *words)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)


def test_the_example_writes_the_numbers_of_each_epoch(tmp_path):
    assert "2 epochs with" in run(tmp_path).stdout
    with open(tmp_path / "numbers.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    assert {row["epoch"] for row in rows} == {"0", "1"}
    names = {row["number"] for row in rows}
    assert {"train/gpu:1/memory_used (MiB)/mean", "train/host/cpu (%)/max", "train/duration (s)"} <= names
    assert not [name for name in names if "gpu:0" in name]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None,
    reason="numbers for tensorboard (no tensorboardX: pip install -e '.[dev]')",
)
def test_the_example_writes_for_tensorboard(tmp_path):
    run(tmp_path, "--tensorboard", str(tmp_path / "runs"))

    assert [name for name in os.listdir(tmp_path / "runs") if name.startswith("events.out")]
