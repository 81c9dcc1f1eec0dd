"""The error tree is what its drawing says, and each error carries its facts."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from gpuguard import errors
from gpuguard.cli.dispatch import (
    EXIT_NO,
    EXIT_NO_DRIVER,
    EXIT_NOT_NOW,
    EXIT_RUN_FAILED,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    exit_code,
)
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
