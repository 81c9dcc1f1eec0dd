"""Ctrl-C in a notebook while a claim is being made: at whatever point it comes, nobody is kept away.

The interpreter runs a signal's handler at the entry of a function and behind a call of one that is written in C, whose
result is lost then: each of them in gpuguard is one such point.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import GIB
from grabbing import a_node, claimed, visible  # noqa: F401  (a fixture)
from machines import Machine

import gpuguard
from gpuguard import grab
from gpuguard.claims.hold import Claim
from gpuguard.claims.lockfiles import lock_directory
from gpuguard.lock import acquire
from gpuguard.request import Request

MOST = 3000  # points; half as many are there
PACKAGE = str(Path(gpuguard.__file__).parent)


class Interrupt:
    """A Ctrl-C at point number *countdown* in gpuguard, counted from 0."""

    def __init__(self, countdown: int) -> None:
        self.left = countdown
        self.point = ""

    def __call__(self, frame, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            if self.left == 0:
                self.point = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                sys.setprofile(None)
                raise KeyboardInterrupt
            self.left -= 1


def first_leftover(do: Callable[[], Claim], left: Callable[[], object]) -> tuple[str, object] | None:
    """The first point at which an interrupt of *do* leaves something, with what *left* says; None when none does."""
    for countdown in range(MOST):
        interrupt = Interrupt(countdown)
        sys.setprofile(interrupt)
        try:
            claim = do()
        except KeyboardInterrupt:
            claim = None
        finally:
            sys.setprofile(None)
        if claim is not None:
            claim.release()
            assert (interrupt.point, countdown > 20) == ("", True), "swallowed"
            return None
        if remains := left():
            return interrupt.point, remains
    raise AssertionError("there is no end")


def locked_files(place: Path) -> list[str]:
    for record in (place / "claims").iterdir():  # of an open() whose result was lost: it would lengthen the next round
        record.unlink()
    found = []
    for path in (place / "lock").iterdir():
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
    return found


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the gate, of one who came not to its __exit__
@pytest.mark.parametrize(
    "request_", [Request(num_gpus=2), Request(share=True, memory=10 * GIB)], ids=["whole devices", "a share"]
)
def test_an_interrupt_leaves_nothing_locked(tmp_path: Path, request_: Request) -> None:
    machine, directory = Machine(), lock_directory(str(tmp_path / "locks"))
    acquire(machine, request_, directory).release()  # what is loaded once is loaded now

    assert (
        first_leftover(lambda: acquire(machine, request_, directory), lambda: locked_files(tmp_path / "locks")) is None
    )


def test_an_interrupt_while_the_environment_is_written_leaves_it_as_it_was(node: str) -> None:
    """grab_gpus() has the claim by then; what it does before is the same as above, with a process for the driver."""

    def grabbed() -> Claim:
        with pytest.MonkeyPatch.context() as patched:
            interrupt = sys.getprofile()
            sys.setprofile(None)
            patched.setattr(grab, "_enter", started(interrupt, grab._enter))
            return gpuguard.grab_gpus(1)

    def left() -> list[object]:
        return [each for each in (claimed(), visible(), os.environ.get("GPUGUARD_CLAIM")) if each]

    assert first_leftover(grabbed, left) is None


def started(interrupt: object, function: Callable[..., object]) -> Callable[..., object]:
    def interrupted(*arguments: object) -> object:
        sys.setprofile(interrupt)
        return function(*arguments)

    return interrupted
