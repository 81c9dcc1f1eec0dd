"""Fixtures that many tests share."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chances  # noqa: F401  (what hypothesis throws, before any test is read)
import pytest
from fake_nvml import FakeNvml
from parallel import (  # noqa: F401
    alone,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_xdist_auto_num_workers,
)
from sentences_said import sentences_are_heard  # noqa: F401
from surroundings import (  # noqa: F401
    clean_environment,
    keep_files_in_memory,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
)

if TYPE_CHECKING:
    from broker_machine import Brokered
    from guard_scene import Scene
    from nodes import Gpuguard
    from supervised_job import Wrapped
    from users import Machine

    from gpuguard.claims.directory import LockDirectory

keep_files_in_memory()
gc.disable()  # while thousands of tests are collected, which are no garbage: see pytest_collection_finish()

# A shell starts what runs in the background with these ignored, and our children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Leave what was collected out of every later collection of garbage: it lives as long as the tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def site() -> Iterator[Path]:
    """gpuguard where every user can read it, copied once per session."""
    from users import a_site

    with a_site() as place:
        yield place


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can reach."""
    from users import an_open_place

    with an_open_place() as place:
        yield place


@pytest.fixture
def machine(request: pytest.FixtureRequest, site: Path) -> Iterator[Machine]:
    """A machine of two users with a sticky directory, for tests as root; IN_BOTH_DIRECTORIES: also with root's."""
    from users import a_shared_machine

    with a_shared_machine(site, getattr(request, "param", "sticky")) as machine:
        yield machine


@pytest.fixture
def admin(site: Path) -> Iterator[Machine]:
    """One whose directory root has made, by `gpuguard setup`."""
    from users import a_shared_machine

    with a_shared_machine(site, "admin") as machine:
        yield machine


@pytest.fixture
def broker(request: pytest.FixtureRequest, site: Path) -> Iterator[Brokered]:
    """A machine whose daemon, of a user of its own, gives the locks, as root; FOR_BOTH_BROKERS: also one of root."""
    from broker_machine import a_machine

    with a_machine(site, getattr(request, "param", "keeper")) as machine:
        yield machine


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with 8 idle devices behind the fake driver library."""
    with FakeNvml(tmp_path) as machine:
        yield machine


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    """Where claims are made, of this user alone."""
    from gpuguard.claims.directory import lock_directory

    return lock_directory(str(tmp_path / "claims"))


@pytest.fixture
def gpuguard(tmp_path: Path) -> Gpuguard:
    """The command on a simulated node of two devices."""
    from nodes import Gpuguard, start

    start(str(tmp_path / "node"), "2xH100-80GB")
    return Gpuguard(tmp_path, None)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process; comes back with (exit code, standard output, standard error)."""
    from gpuguard.cli import run_command_line

    def run(*words: str) -> tuple[int, str, str]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            status = run_command_line(list(words))
        finally:  # what the command does at these would keep processes that are forked later from ending
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The directory of a simulated node of four devices, which commands in this process and their children read."""
    from nodes import start

    monkeypatch.setenv("GPUGUARD_BACKEND", "simulated")
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    start(str(tmp_path / "node"))
    return str(tmp_path / "node")


@pytest.fixture
def both_taken(gpuguard: Gpuguard) -> Iterator[subprocess.Popen[str]]:
    """A job that has both devices of that node, for two hours."""
    with gpuguard.start("run", "-n", "2", "--time-limit", "2h", "--", "sh", "-c", "echo ready; exec sleep 600") as job:
        job.stdout.readline()
        yield job
        job.terminate()


@pytest.fixture
def scene() -> Iterator[Scene]:
    """An offender whom nothing protects, and the guard."""
    from guard_scene import a_scene

    with a_scene() as scene:
        yield scene


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Wrapped]:
    """A machine on which `gpuguard run` can be started."""
    from supervised_job import Wrapped

    with Wrapped(tmp_path) as machine:
        yield machine


@pytest.fixture(scope="module")
def fresh() -> Iterator[Callable[..., Any]]:
    """Call a function that forks often in an interpreter with little in its memory: a fork of this one takes long."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as interpreter:
        yield lambda function, *words, **named: interpreter.submit(function, *words, **named).result()


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The pid of a child that does nothing: a second process beside our own, whose parent may be pid 1."""
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()
