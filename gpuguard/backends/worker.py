"""The process that reads the devices for another one, its client: it answers over two pipes, and how it is started.

It is a fresh interpreter: safe beside threads, CUDA and whatever else the client has loaded.  It inherits nothing but
its pipes, and is no part of the client's process group.

A frame is a 4-byte length and a marshal of a tuple: a request is (fields, devices, skip, ahead), a reply ("ready",
version), ("snapshot", packed) or ("error", class, message, attributes).  Which device is being read is no frame, of
which each would wake the client up: it is written into a file in memory, which the client reads when it has waited too
long.  Does not decide what is too long: see client.
"""

from __future__ import annotations

import atexit
import marshal
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn
from weakref import finalize

from gpuguard import __version__, capabilities
from gpuguard.backends import open_backend
from gpuguard.errors import CROWDED, BackendError, GpuguardError
from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, Snapshot

LONGEST = 2**26  # bytes of a frame: as a length any four letters are more
LEAVING_SECONDS = 0.5  # a worker that hangs in the driver never leaves

SentProcesses = dict[str, tuple[GpuProcess, ...]]  # by uuid: the processes of a device that were sent last
Mark = tuple["int | None", float]  # the index of the device that is read, None: none; and since when (monotonic)


# Not reaped yet -> what ends it, and whose worker it is: a forked process leaves those of its parent alone.
_workers: dict[subprocess.Popen[bytes], tuple[finalize[..., Any], int]] = {}


class Channel:
    """A worker, and the client's descriptors.  One that is forgotten or left over at the end of the program is closed.

    Args:
        process: the worker.
        requests: to write to.
        replies: to read from.
        mark: in which the worker marks what it reads.
        life: never written to: when it is closed, the worker ends.
    """

    def __init__(self, process: subprocess.Popen[bytes], requests: int, replies: int, mark: int, life: int) -> None:
        self.process, self.requests, self.replies, self.mark = process, requests, replies, mark
        self._end = finalize(self, os.close, life)
        self._close = finalize(self, close_all, (requests, replies, mark))
        # A thread may still read from them while the program ends: only _end_all() ends a worker then.
        self._close.atexit = self._end.atexit = False
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        _workers[process] = self._end, os.getpid()

    def close(self) -> None:
        """End the worker, unless it hangs in the driver; reap() takes note of its end."""
        self._close()
        self._end()


def reap() -> None:
    """Reap the workers that have ended.

    Never a blocking wait: a worker in an uninterruptible driver call ends only when the driver lets it.
    """
    for process in tuple(_workers):
        if process.poll() is not None:
            _workers.pop(process, None)


def _end_all() -> None:
    """End what is left when the program ends, and reap what ends in time."""
    until = time.monotonic() + LEAVING_SECONDS
    own = {process: end for process, (end, pid) in tuple(_workers.items()) if pid == os.getpid()}
    for end in own.values():
        end()
    for process in own:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))


def start(name: str) -> Channel:
    """Start a worker that reads the backend *name*.

    Raises:
        OSError: there can be no further process.
        BackendError: there is no interpreter here but a program that has one in it.
    """
    if getattr(sys, "frozen", False):
        # What PyInstaller makes is its own sys.executable: it would start itself, and that one itself again.
        raise BackendError(
            "this program brings its own Python, so no process can be started that reads the devices.  Ask for GPUs "
            "before threads are started and much is imported; or start it with `gpuguard run`."
        )
    request_read, request_write, reply_read, reply_write, life_read, life_write = opened = pipes(3)
    try:
        mark = os.memfd_create("gpuguard-mark")
        opened.append(mark)
        code = f"import gpuguard.backends.worker as worker; worker.serve(sys.argv[1], 0, 1, {mark}, {life_read})"
        process = start_interpreter(code, name, (request_read, reply_write), pass_fds=(mark, life_read))
    except BaseException:  # whatever interrupts it: without its pipes a worker ends
        close_all(opened)
        raise
    channel = Channel(process, request_write, reply_read, mark, life_write)
    close_all((request_read, reply_write, life_read))
    return channel


def start_interpreter(
    code: str, word: str, standard: Sequence[int], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A fresh interpreter for *code*, that may read what we may read.

    Args:
        code: Python.
        word: sys.argv[1] for it.
        standard: descriptors that become its 0 and 1.
        pass_fds: further ones, of the same number there.

    Raises:
        OSError: there can be no further process.
    """
    stdin, stdout = standard
    lent = capabilities.lend_for_reading()
    try:
        return subprocess.Popen(
            interpreter(code, word),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        if lent:
            capabilities.keep_to_ourselves()


def interpreter(code: str, word: str) -> list[str]:
    """The words that start an interpreter like this one, for *code*, in which sys.argv[1] is *word*."""
    # -S: what an environment runs at the start of each interpreter is not for this one, and so an editable install
    # must be named.
    ours = __file__.rpartition("/gpuguard/")[0]
    path = sys.path if ours in sys.path else [*sys.path, ours]
    ignoring = ["-E"] if sys.flags.ignore_environment else []  # the service does, by -I
    return [sys.executable, *ignoring, "-S", "-c", f"import sys; sys.path[:] = sys.argv[2:]; {code}", word, *path]


def pipes(number: int) -> list[int]:
    """Both ends of so many pipes; all of them or an OSError."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened += os.pipe()
    except OSError:
        close_all(opened)
        raise
    return opened


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def serve(name: str, requests: int, replies: int, mark: int, life: int) -> NoReturn:
    """Answer requests until the client is gone.  Never returns."""
    try:
        try:
            threading.Thread(target=_end_with_the_client, args=(life,), daemon=True).start()
        except RuntimeError:
            raise BackendError(CROWDED) from None
        _serve_requests(name, requests, replies, mark)
    except GpuguardError as error:
        send(replies, ("error", type(error).__name__, str(error), vars(error)))
    except BrokenPipeError:
        pass
    except BaseException as error:  # noqa: BLE001  the border of this process: a fault must reach the parent as a message
        send(replies, ("error", "BackendError", f"reading the devices failed inside gpuguard: {error!r}", {}))
    os._exit(0)


def _serve_requests(name: str, requests: int, replies: int, mark: int) -> None:
    backend: Any = open_backend(name)
    backend.progress = lambda index: write_mark(mark, index)
    write_mark(mark, None)  # the first request is there already
    send(replies, ("ready", __version__))
    sent: SentProcesses = {}
    while request := receive(requests):
        fields, devices, skip, backend.ahead = request
        backend.skip = set(skip)
        try:
            reply = ("snapshot", pack(backend.sample(fields, devices), sent))
        except BackendError as error:
            reply = ("error", type(error).__name__, str(error), vars(error))  # type: ignore[assignment]
        send(replies, reply)


def _end_with_the_client(life: int) -> None:
    """End this process when the client closes its end or dies, even while a driver call hangs in the main thread."""
    os.read(life, 1)
    os._exit(0)


def write_mark(mark: int, index: int | None) -> None:
    """Mark that device *index* is about to be read; None: none of them."""
    number = -1 if index is None else index
    os.pwrite(mark, number.to_bytes(8, "little", signed=True) + time.monotonic_ns().to_bytes(8, "little"), 0)


def read_mark(mark: int) -> Mark:
    """What was marked last; one that is just being written may be read half."""
    marked = os.pread(mark, 16, 0)
    index = int.from_bytes(marked[:8], "little", signed=True)
    return None if index < 0 else index, int.from_bytes(marked[8:], "little") / 1e9


def send(descriptor: int, message: Any) -> None:
    """Write one frame."""
    body = marshal.dumps(message)
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int, ready: Callable[[], object] | None = None) -> Any:
    """Read one frame; None when the other end is gone, or of no use: a library has printed into the pipe.

    What follows that could not be told apart, and text taken for a length would be waited for.

    Args:
        descriptor: to read from.
        ready: called before each piece of it is read; returns when one is there, or raises what this raises then.
    """
    head = _read(descriptor, 4, ready)
    size = int.from_bytes(head, "little")
    try:
        body = _read(descriptor, size, ready) if size <= LONGEST else b""
        found = marshal.loads(body) if body else None
        return found if type(found) is tuple else None
    except (ValueError, EOFError, TypeError):
        return None


def _read(descriptor: int, count: int, ready: Callable[[], object] | None) -> bytes:
    parts = b""
    while len(parts) < count:
        if ready:
            ready()
        part = os.read(descriptor, count - len(parts))
        if not part:
            return b""
        parts += part
    return parts


def pack(snapshot: Snapshot, sent: SentProcesses) -> dict[str, Any]:
    """A snapshot as plain values; of a device whose processes are as they were the last time, True in their place.

    Args:
        snapshot: to send.
        sent: what each device's were the last time; changed in place, and so at the other end by unpack().
    """
    devices = [{**vars(device), "processes": _packed(device, sent)} for device in snapshot.devices]
    further = {"gaps": [vars(gap) for gap in snapshot.gaps], "claims": [vars(claim) for claim in snapshot.claims]}
    return {**vars(snapshot), "devices": devices, **further}


def _packed(device: Device, sent: SentProcesses) -> Any:
    processes = device.processes
    if not processes:
        return processes
    if sent.get(device.uuid) == processes:
        return True
    sent[device.uuid] = processes
    return [vars(process) for process in processes]


def unpack(packed: dict[str, Any], sent: SentProcesses) -> Snapshot:
    """The snapshot that pack() made plain; its processes are the same objects as the last time, if they may be."""
    for device in packed["devices"]:
        if processes := device["processes"]:
            if processes is not True:
                sent[device["uuid"]] = tuple(GpuProcess(**fields) for fields in processes)
            device["processes"] = sent[device["uuid"]]
    packed["devices"] = tuple(Device(**fields) for fields in packed["devices"])
    packed["gaps"] = tuple(Gap(**fields) for fields in packed["gaps"])
    packed["claims"] = tuple(
        ClaimRecord(**fields) for fields in packed["claims"]
    )  # of a recording: drivers know of none
    return Snapshot(**packed)
