"""Ctrl-C in a notebook while a claim is being made: at whatever point it comes, nobody is kept away.

The interpreter runs a signal's handler at the entry of a function and behind a call of one that is written in C, whose
result is lost then: each of them in gpuguard is one such point.
"""

import fcntl
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import GIB, Machine
from chances import NUMBER, often
from grab_node import a_node, claimed, visible  # noqa: F401  (a fixture)
from own_claims import acquire

import gpuguard
from gpuguard import api
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import lock_directory
from gpuguard.request import Request

MOST = 1_000_000  # points; there are 12,000 at most
LAST = often(200)
# Of one who came not to its __exit__.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
PACKAGE = str(Path(gpuguard.__file__).parent)


class Interrupt:
    """A Ctrl-C at point number *countdown* in gpuguard, counted from 0."""

    def __init__(self, countdown: int) -> None:
        self.left = countdown
        self.point = ""

    def __call__(self, frame, event: str, _: object) -> None:
        code = frame.f_code
        counts = code.co_filename.startswith(PACKAGE) and not code.co_flags & inspect.CO_GENERATOR  # it may be closing
        if event in ("call", "c_return") and counts:
            if self.left == 0:
                self.point = f"{code.co_name}, line {frame.f_lineno}"
                sys.setprofile(None)
                raise KeyboardInterrupt
            self.left -= 1


def first_leftover(
    do: Callable[[], Claim], left: Callable[[], object], each: int = 1, undo: Callable[[Claim], object] = Claim.release
) -> tuple[str, object] | None:
    """The first point at which an interrupt of *do* leaves something, with what *left* says; None when none does.

    Tries the last LAST points, from the end on, and *each* so many-th before (in a campaign: more of them): a file that
    stays open, of an open() whose result was lost, adds some points to those that come.
    """
    each = each if NUMBER else 4 * each + 1
    whole = interrupted(do, MOST, undo)
    assert not whole.point
    points = MOST - whole.left
    for countdown in [*reversed(range(max(0, points - LAST), points)), *range(0, points - LAST, each)]:
        interrupt = interrupted(do, countdown, undo)
        if remains := left():
            return interrupt.point, remains
    return None


def interrupted(do: Callable[[], Claim], countdown: int, undo: Callable[[Claim], object]) -> Interrupt:
    interrupt = Interrupt(countdown)
    sys.setprofile(interrupt)
    try:
        claim = do()
    except KeyboardInterrupt:
        return interrupt
    finally:
        sys.setprofile(None)
    undo(claim)
    assert not interrupt.point, "swallowed"
    return interrupt


def locked_files(place: Path) -> list[str]:
    found = []
    for path in (*(place / "lock").iterdir(), *(place / "claims").glob("ticket.*")):
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
    for record in (place / "claims").iterdir():  # adds some, too
        record.unlink()
    return found


@pytest.mark.parametrize(
    "request_", [Request(num_gpus=2), Request(share=True, memory=10 * GIB)], ids=["whole GPUs", "a share"]
)
def test_an_interrupt_leaves_nothing_locked(tmp_path: Path, request_: Request) -> None:
    machine, directory = Machine(), lock_directory(str(tmp_path / "locks"))
    acquire(machine, request_, directory).release()  # what is loaded once is loaded now

    assert (
        first_leftover(lambda: acquire(machine, request_, directory), lambda: locked_files(tmp_path / "locks")) is None
    )


class Enough(Exception):
    """Whoever waits has waited for long enough."""


def give_up(_: object) -> None:
    raise Enough


@pytest.mark.parametrize("served", [True, False], ids=["is served", "gives up"])
def test_an_interrupt_leaves_no_place_in_line(tmp_path: Path, served: bool) -> None:
    machine, directory = Machine(), lock_directory(str(tmp_path / "locks"))
    holders = [acquire(machine, Request(num_gpus=4), directory)]

    def wait() -> Claim:
        with unwatched():
            holders.append(acquire(machine, Request(num_gpus=4), directory))
        on_wait = (lambda _: holders[-1].release()) if served else give_up
        try:
            return acquire(machine, Request(), directory, wait=60, on_wait=on_wait, environ={})
        except Enough:
            return holders[-1]

    def left() -> object:
        holders[-1].release()
        return locked_files(tmp_path / "locks")

    holders[-1].release()
    wait().release()  # what is loaded once is loaded now
    left()
    assert first_leftover(wait, left, each=101) is None


@contextmanager
def unwatched() -> Iterator[None]:
    interrupt = sys.getprofile()
    sys.setprofile(None)
    yield
    sys.setprofile(interrupt)


def test_an_interrupt_while_the_environment_is_written_leaves_it_as_it_was(node: str) -> None:
    """grab_gpus() has the claim by then; what it does before is the same as above, with a process for the driver."""

    def grabbed() -> Claim:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(api, "_apply", started(sys.getprofile(), api._apply))
            sys.setprofile(None)
            return gpuguard.grab_gpus(1)

    def left() -> list[object]:
        return [each for each in (claimed(), visible(), os.environ.get("GPUGUARD_CLAIM")) if each]

    assert first_leftover(grabbed, left, undo=lambda claim: claim.release() or api._restore(claim)) is None


def started(interrupt: object, function: Callable[..., object]) -> Callable[..., object]:
    def then(*arguments: object) -> object:
        sys.setprofile(interrupt)
        return function(*arguments)

    return then
