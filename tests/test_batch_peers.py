"""benchmarks/batch_peers.py: a cell of its table is what was seen."""

import subprocess
from pathlib import Path

import pytest
from batch_peers import cell
from batch_queues import QUEUES, BatchQueue, NotOffered, why_missing


class Trivial(BatchQueue):
    """Accepts everything, and has one job that has printed what is in *printed*."""

    name, program = "trivial", "no-such-program"
    printed = "hello\nerror\n"

    def submit(self, *command, **variables):
        return "1"

    def nine(self):
        return "2"

    def state(self, job):
        return "done"

    def log(self, job):
        return self.printed


class Strict(Trivial):
    """Refuses nine GPUs, and has prompts of a shell in its log."""

    printed = "\x1b[0m$ hello\nerror\n"

    def nine(self):
        raise subprocess.CalledProcessError(1, "nine", stderr="there are eight")


class Broken(Trivial):
    """Fails at once, and starts no job."""

    def submit(self, *command, **variables):
        raise subprocess.CalledProcessError(1, "submit", stderr="one\nno such socket\n")

    def nine(self):
        raise NotOffered("knows no GPUs")


@pytest.mark.parametrize(
    ("queue", "row", "says"),
    [
        (Trivial, "log", "yes"),
        (Trivial, "nine of eight", "no: accepted"),
        (Strict, "log", "no: escapes and prompts of a terminal in it"),
        (Strict, "nine of eight", "yes"),
        (Broken, "log", "no: no such socket"),
        (Broken, "nine of eight", "- knows no GPUs"),
        (Trivial, "sweep", "- no sweep"),
    ],
)
def test_a_cell_says_what_was_seen(tmp_path, queue, row, says):
    assert cell(queue, row, tmp_path) == says


def test_what_is_not_installed_is_named(tmp_path: Path):
    (tmp_path / "bin").mkdir()

    assert why_missing(Trivial, tmp_path) == "no-such-program is not installed"
    assert why_missing(QUEUES[-1], tmp_path) == "submitit is not installed"
    assert why_missing(QUEUES[0], tmp_path) == ""
