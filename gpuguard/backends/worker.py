"""The process that reads the devices for another one, its client: it answers over two pipes.

A frame is a 4-byte length and a marshal of a tuple: a request is (fields, devices, skip, ahead), a reply ("ready",
version), ("snapshot", packed) or ("error", class, message, attributes).  Which device is being read is no frame, of
which each would wake the client up: it is written into a file in memory, which the client reads when it has waited too
long.  How it is started: see spawn; what is too long: see client.
"""

from __future__ import annotations

import marshal
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from gpuguard import __version__
from gpuguard.backends import open_backend
from gpuguard.errors import CROWDED, BackendError, GpuguardError
from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, Snapshot

LONGEST = 2**26  # bytes of a frame: as a length any four letters are more

SentProcesses = dict[str, tuple[GpuProcess, ...]]  # by uuid: the processes of a device that were sent last
Mark = tuple["int | None", float]  # the index of the device that is read, None: none; and since when (monotonic)


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
    packed["claims"] = tuple(ClaimRecord(**fields) for fields in packed["claims"])  # of a recording
    return Snapshot(**packed)
