"""The error tree is what its drawing says, and each error carries its facts."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import re
import subprocess
import sys

import pytest

from gpuguard import cli, errors
from gpuguard.cli import EXIT_NO, EXIT_NO_DRIVER, EXIT_NOT_NOW, EXIT_RUN_FAILED, EXIT_TIMEOUT, EXIT_USAGE, exit_code
from gpuguard.errors import BackendError, DriverMismatch, GpuguardError, InvalidRequest, NotEnoughGpus

CLASSES = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, GpuguardError)
}


def drawn() -> dict[str, str]:
    """Parent of each class in the drawing at the top of errors.py."""
    parents: dict[str, str] = {}
    path = ["GpuguardError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:    |\|   )*)\+-- (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            path = [*path[:depth], match[2]]
            parents[match[2]] = path[-2]
    return parents


def test_the_drawing_is_the_tree():
    real = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items() if kind is not GpuguardError}

    assert drawn() == real


def test_a_request_that_cannot_be_understood_is_also_a_value_error():
    assert issubclass(InvalidRequest, ValueError)


def test_facts_are_attributes():
    error = NotEnoughGpus("wanted 5 GPUs", wanted=5, available=4, refused=())

    assert (error.wanted, error.available, error.refused, str(error)) == (5, 4, (), "wanted 5 GPUs")


def test_a_mismatch_names_both_versions():
    error = DriverMismatch("x", library_version="550.1", kernel_version="535.2")

    assert (error.library_version, error.kernel_version) == ("550.1", "535.2")


@pytest.mark.parametrize("kind", CLASSES.values())
def test_an_error_can_be_made_from_its_message_alone_and_survives_a_process_border(kind):
    assert str(pickle.loads(pickle.dumps(kind("what to do")))) == "what to do"


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_has_an_exit_code_for_every_kind_of_command(name):
    error = CLASSES[name]("x")
    run = {"NotEnoughGpus": EXIT_NOT_NOW, "WaitTimeout": EXIT_TIMEOUT}.get(name, EXIT_RUN_FAILED)
    usual = EXIT_USAGE if name == "InvalidRequest" else EXIT_NO_DRIVER if isinstance(error, BackendError) else EXIT_NO

    assert (exit_code("run", error), exit_code("who", error)) == (run, usual)


def test_too_few_descriptors_are_told_as_such():
    def limited(most: int) -> subprocess.CompletedProcess[str]:
        code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))\n"
        words = "from gpuguard.cli import main; import sys; sys.exit(main(['select']))"
        return subprocess.run([sys.executable, "-c", code + words], capture_output=True, text=True, check=False)

    assert [limited(most).stderr for most in (6, 7)] == [
        f"gpuguard: no more than {most} files may be open here, which is too few: see `ulimit -n`, and raise it.\n"
        for most in (6, 7)
    ]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EMFILE, "see `ulimit -n`"),
        (errno.ENFILE, "/proc/sys/fs/file-nr"),
        (errno.EDQUOT, "Make room"),
        (errno.EAGAIN, "see `ulimit -u`"),
        (errno.ENOMEM, "`free -h`"),
        (errno.EIO, "an error inside gpuguard"),
    ],
)
def test_a_fault_of_the_machine_is_told_as_such(monkeypatch, capsys, code, said):
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cli, "_dispatch", fail)

    assert cli.run_command_line(["who"]) == EXIT_NO
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status"), [(["select", "-n", "x"], EXIT_USAGE), (["run", "-n", "x", "--", "true"], 125)]
)
def test_a_failure_that_cannot_be_told_has_its_exit_code_all_the_same(words, status):
    """With standard error on a full disk a traceback was tried instead, and `run` ended as a job that ends with 1."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "gpuguard", *words], stderr=full, check=False)

    assert done.returncode == status


@pytest.mark.parametrize("words", [["--version"], ["policy", "rules"]], ids=["a line", "more than a buffer"])
def test_an_answer_for_which_the_disk_is_full_is_no_success_and_no_fault_of_gpuguard(words):
    with open("/dev/full", "w") as full:
        call = [sys.executable, "-m", "gpuguard", *words]
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    told = "what this command prints could not be written: No space left on device."
    assert done.returncode == EXIT_NO
    assert done.stderr.startswith(f"gpuguard: {told}") and done.stderr.count("\n") == 1
