"""Before a sampler is ready: it is asked already, and may end, be of another version, or never be."""

from __future__ import annotations

import errno
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from nodes import beginning_with, change, eventually, start

from gpuguard.backends import client, worker
from gpuguard.backends.client import WorkerBackend, open_worker
from gpuguard.errors import BackendError, DriverUnresponsive, InvalidRequest
from gpuguard.model import MEMORY, SELECT_FIELDS


@pytest.mark.parametrize("told", [("ready",), ("ready", "9.9")], ids=["before it was told", "9.9"])
def test_a_sampler_of_another_version_is_not_believed(told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    requests_read, requests = os.pipe()
    replies, replies_write = os.pipe()
    life, life_held = os.pipe()
    worker.send(replies_write, told)
    channel = worker.Channel(subprocess.Popen(["true"]), requests, replies, os.memfd_create("mark"), life_held)
    monkeypatch.setattr(worker, "start", lambda name: channel)
    source = WorkerBackend("nvml")

    with pytest.raises(BackendError, match=r"was installed while.*Start it again; the guard by `systemctl restart"):
        source.sample(SELECT_FIELDS)
    channel.process.wait()
    assert os.read(life, 1) == b""  # which ends a sampler
    for each in (requests_read, replies_write, life):
        os.close(each)


def test_a_sampler_that_has_ended_before_it_is_asked_has_said_why() -> None:
    source = open_worker("nothing")
    assert source._channel
    end = os.pidfd_open(source._channel.process.pid)
    assert select.select([end], [], [], 30)[0]
    os.close(end)

    with pytest.raises(InvalidRequest, match="no backend 'nothing'"):
        source.sample(SELECT_FIELDS)


def test_a_sampler_that_never_becomes_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(client, "INIT_SECONDS", 0.2)
    told: list[str] = []
    reply, _hold = os.pipe()
    requests, write = os.pipe()
    place = os.memfd_create("place")
    channel = worker.Channel(subprocess.Popen(["sleep", "600"]), write, reply, place, os.dup(place))
    monkeypatch.setattr(worker, "start", lambda name: channel)
    source = WorkerBackend("nvml", told.append)
    with pytest.raises(DriverUnresponsive, match="did not initialise"):
        source.sample(SELECT_FIELDS)
    os.close(requests)
    os.close(_hold)
    channel.process.kill()
    channel.process.wait()

    assert len(told) == 1


def full(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_sampler_that_cannot_be_started_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard tries it again and again; with all descriptors gone it was blind for good."""
    monkeypatch.setattr(subprocess, "Popen", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        worker.start("simulated")

    assert os.listdir("/proc/self/fd") == before


def test_a_sampler_that_cannot_be_started_again_is_a_driver_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job of a `gpuguard run` lost its wrapper, with its limits, and who waited his place in line."""
    start(str(tmp_path / "node"))
    with open_worker(f"simulated:{tmp_path / 'node'}") as source:
        assert samples(source)
        source.close()  # as when it has died
        with monkeypatch.context() as crowded:
            crowded.setattr(subprocess, "Popen", full)
            with pytest.raises(BackendError, match=r"no further process.*see `ulimit -u`"):
                source.sample({MEMORY})

        assert samples(source)


def test_a_sampler_that_may_start_no_thread_does_not_blame_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = (
        'import threading\ndef full(*_):\n    raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = full"
    )
    monkeypatch.setattr(worker, "interpreter", beginning_with(crowded))

    with open_worker("simulated") as source, pytest.raises(BackendError, match="see `ulimit -u`"):
        source.sample(SELECT_FIELDS)


@contextmanager
def a_library_that_prints(place: Path, text: bytes) -> Iterator[WorkerBackend]:
    """A source that has answered, and *text* in front of its next answer."""
    start(str(place / "node"))
    with open_worker(f"simulated:{place / 'node'}") as source:
        assert source.sample({MEMORY}).devices and source._channel
        with open(f"/proc/{source._channel.process.pid}/fd/1", "wb", buffering=0) as out:
            out.write(text)
        yield source


@pytest.mark.parametrize(
    "text",
    [
        b"ok\n\x00",
        b"\x00",
        b"\x00\x00\x00\x02",
        b"Loading the driver ...\n",
        b"\x09\x00\x00\x00garbage..",
        b"\x02\x00\x00\x00((more",
    ],
)
def test_what_a_library_prints_into_the_pipe_blinds_nobody_for_long(tmp_path: Path, text: bytes) -> None:
    with a_library_that_prints(tmp_path, text) as source:
        with suppress(BackendError):
            source.sample({MEMORY})

        assert eventually(lambda: samples(source))


def samples(source: WorkerBackend) -> bool:
    try:
        # The device that was just being read is suspected of it, and left out for a while.
        return sum(device.memory_used is not None for device in source.sample({MEMORY}).devices) >= 3
    except BackendError:
        return False


@pytest.mark.parametrize("text", [b".", b"\x10\x00\x00\x00half"])
def test_a_driver_that_prints_and_then_hangs_keeps_nobody_waiting(tmp_path: Path, text: bytes) -> None:
    with a_library_that_prints(tmp_path, text) as source:
        change(str(tmp_path / "node"), 0, faults=("hang",))

        assert source.sample({MEMORY}).devices[0].problems == ("unresponsive",)
