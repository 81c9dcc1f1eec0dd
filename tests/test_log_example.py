"""The example of numbers in a training log, run as its page says."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys

import pytest
from nodes import start
from sources import ROOT

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


@pytest.mark.skipif(importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed")
def test_the_example_writes_for_tensorboard(tmp_path):
    run(tmp_path, "--tensorboard", str(tmp_path / "runs"))

    assert [name for name in os.listdir(tmp_path / "runs") if name.startswith("events.out")]
