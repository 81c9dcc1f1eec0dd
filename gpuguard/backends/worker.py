"""The process that reads the devices for another process, its client, which it answers over two pipes.

A request is (fields, devices, skip, ahead), a reply ("ready", version), ("snapshot", packed, message ids) or ("error",
class, message, attributes); the attributes have the message ids of an error.  See locale.messages for what these are,
spawn for how the worker is started and how both travel, and client for calls that take too long.
"""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

from gpuguard import __version__
from gpuguard.backends import open_backend
from gpuguard.backends.spawn import receive, send, write_mark
from gpuguard.errors import CROWDED, BackendError, GpuguardError
from gpuguard.locale.messages import message_ids, plain, sentence, with_ids
from gpuguard.model import Device, GpuProcess, Snapshot

SentProcesses = dict[str, tuple[GpuProcess, ...]]  # by uuid: the processes of a device that were sent last


def serve(name: str, requests: int, replies: int, mark: int, life: int) -> NoReturn:
    """Answer requests until the client is gone.  Never returns."""
    try:
        try:
            threading.Thread(target=_end_with_the_client, args=(life,), daemon=True).start()
        except RuntimeError:
            raise BackendError(CROWDED) from None
        _serve_requests(name, requests, replies, mark)
    except GpuguardError as error:
        send(replies, _told(error))
    except BrokenPipeError:
        pass
    except BaseException as error:  # noqa: BLE001  the border of this process: a fault must reach the parent as a message
        text = sentence("worker.fault", "reading the GPUs failed inside gpuguard: {error}", error=repr(error))
        send(replies, _told(BackendError(text)))
    os._exit(0)


def _serve_requests(name: str, requests: int, replies: int, mark: int) -> None:
    backend = open_backend(name)
    backend.progress = lambda index: write_mark(mark, index)
    write_mark(mark, None)  # the first request is there already
    send(replies, ("ready", __version__))
    sent: SentProcesses = {}
    while request := receive(requests):
        fields, devices, skip, backend.ahead = request
        backend.skip = set(skip)
        try:
            snapshot = backend.sample(fields, devices)
        except BackendError as error:
            send(replies, _told(error))
        else:
            send(replies, ("snapshot", pack(snapshot, sent), message_ids(_sentences_in(snapshot))))


def _told(error: GpuguardError) -> tuple[str, str, str, dict[str, Any]]:
    text = str(error)
    return "error", type(error).__name__, plain(text), plain(with_ids(vars(error) | {"text": text}))


def _sentences_in(snapshot: Snapshot) -> list[Any]:
    return [*(gap.reason for gap in snapshot.gaps), *(device.problems for device in snapshot.devices)]


def _end_with_the_client(life: int) -> None:
    """End this process when the client closes its end or dies, even while a driver call hangs in the main thread."""
    os.read(life, 1)
    os._exit(0)


def pack(snapshot: Snapshot, sent: SentProcesses) -> dict[str, Any]:
    """Return a snapshot as plain values, with True in place of a device's processes if they are as the last time.

    Values that are a field's default are left out, because a program from before an upgrade starts the worker of the
    new version and does not know the fields that are new.

    Args:
        snapshot: the one to send.
        sent: the processes of each device the last time; changed in place, as unpack() does at the other end.
    """
    devices = [{**_without_defaults(device), "processes": _packed(device, sent)} for device in snapshot.devices]
    gaps = [vars(gap) | {"reason": plain(gap.reason)} for gap in snapshot.gaps]
    return {**vars(snapshot), "devices": devices, "gaps": gaps, "claims": [vars(claim) for claim in snapshot.claims]}


def _without_defaults(device: Device) -> dict[str, Any]:
    values = {name: value for name, value in vars(device).items() if value != getattr(Device, name, ...)}
    return values | {"problems": plain(device.problems)} if device.problems else values


def _packed(device: Device, sent: SentProcesses) -> Any:
    processes = device.processes
    if not processes:
        return processes
    if sent.get(device.uuid) == processes:
        return True
    sent[device.uuid] = processes
    return [vars(process) for process in processes]
