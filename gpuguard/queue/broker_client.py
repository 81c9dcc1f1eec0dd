"""Requests for locks where the daemon alone gives them, and the check of what comes back.

The daemon takes the locks, samples the devices again after that, and hands over the locked descriptors.  Which devices
to ask for is decided here, as everywhere.  Nothing is claimed when no daemon answers.  The other side is broker.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from gpuguard.claims.claim import Claim, Lock, lock_of, sharing_now
from gpuguard.claims.daemon_client import GrantReply, NoDaemonSocket, decoded, exchange, retried
from gpuguard.claims.directory import LockDirectory, is_same_file
from gpuguard.claims.records import slot_names
from gpuguard.device_state import device_title
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.files import close_all
from gpuguard.locale import _, translated
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import as_json
from gpuguard.request import Request
from gpuguard.select import choose

REPLY_SECONDS = 60.0  # the daemon's driver may have to start first
BUSY_SECONDS = 10.0  # many may ask at once, because requests that wait are woken together
_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-.")  # of a claim


def request_grant(
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    ticket: Ticket | None,
    *,
    once: bool = False,
) -> Claim | None:
    """Get the best devices from the daemon, or return None if they cannot be had; add those that it refused to *taken*.

    With *once*, do not ask for other devices if another request starts first.

    Raises:
        ClaimError: there is no daemon, and the request has not waited before.
    """
    if request.share and outer and not _excludes_nothing(outer):
        raise InvalidRequest(
            _("inside a claim the daemon gives whole GPUs alone ({id}): leave out --share.").format(id=outer.id)
        )
    while True:
        # This is read anew each time, because a request that was quicker may have a share by now.
        sharing = sharing_now(directory, {}, snapshot) if request.share and not outer else {}
        devices = choose(snapshot, request, taken, sharing).devices
        if not devices:
            return None
        if outer and _excludes_nothing(outer):
            return Claim(f"{outer.id}.{os.urandom(4).hex()}", devices, ())
        try:
            content, descriptors = _exchange(directory, _message(devices, request, outer, ticket))
        except GpuguardError as error:
            if ticket is None or not ticket.id:
                raise _refusal(directory, error) from error
            # A request that waits goes on, because a restart of the daemon must not cost it its position.
            taken.update((device.uuid, str(error)) for device in devices)
            return None
        if "refused" not in content:
            name, locks = _checked_locks(directory, devices, content, descriptors, shared=request.share)
            return Claim(
                name,
                devices,
                locks,
                memory=request.memory,
                most=request.most_sharers,
                max_processes=request.max_processes,
            )
        close_all(descriptors)
        uuids, rows = [device.uuid for device in devices], content["refused"]
        refused = {uuid: translated(str(why)) for uuid, why in rows.items()} if isinstance(rows, dict) else {}
        taken.update(
            refused if not refused.keys().isdisjoint(uuids) else dict.fromkeys(uuids, _("refused by the daemon"))
        )
        if once and content.get("later"):
            return None


def refuse_without_daemon(directory: LockDirectory) -> None:
    """Raise the ClaimError that a request would meet if no daemon gives the locks, for `select` and the like."""
    try:
        _exchange(directory, {"do": "claims"})
    except GpuguardError as error:
        raise _refusal(directory, error) from error


def _excludes_nothing(outer: ClaimRecord) -> bool:
    """Return whether commands in this claim do not exclude each other: see lock."""
    return "." in outer.id or outer.memory is not None


def _message(
    devices: Sequence[Device], request: Request, outer: ClaimRecord | None, ticket: Ticket | None
) -> dict[str, Any]:
    # Conditions that choose among devices are left out, because the devices are named.
    choice: dict[str, Any] = {"max_gpus": None, "devices": None, "within": None, "within_reason": ""}
    bare = replace(request, num_gpus=len(devices), exclude=(), prefer=(), **choice)
    message: dict[str, Any] = {
        "do": "claim",
        "devices": [device.uuid for device in devices],
        "conditions": as_json(bare),
        "inside": outer.id if outer else None,
        "ticket": ticket.id if ticket else None,
    }
    if ticket and not ticket.id:
        times = {"time_limit_seconds": ticket.time_limit, "expected_seconds": ticket.expected}
        message |= {"priority": ticket.priority, **times}
    return message


def _exchange(directory: LockDirectory, message: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Call exchange(), again and again while the daemon is busy."""
    return retried(partial(exchange, directory, message, REPLY_SECONDS), BUSY_SECONDS)


def _refusal(directory: LockDirectory, error: GpuguardError) -> ClaimError:
    if isinstance(error, NoDaemonSocket):
        return ClaimError(
            _(
                "{error}.  It alone gives the GPUs of this machine, so nothing can be claimed until it runs; "
                "what is claimed already stays claimed."
            ).format(error=translated(str(error)).rstrip("."))
        )
    return ClaimError(str(error))


def _checked_locks(
    directory: LockDirectory,
    devices: Sequence[Device],
    content: Mapping[str, Any],
    descriptors: tuple[int, ...],
    *,
    shared: bool,
) -> tuple[str, tuple[Lock, ...]]:
    """Return the id of the claim and its locks.

    Raises ClaimError, with all of them closed: one of them is not the locked file of its device.
    """
    with ExitStack() as stack:
        stack.callback(close_all, descriptors)  # also when no descriptor is left to check them with
        try:
            reply = decoded(content, GrantReply)
            paths = [directory.lock_path(name) for name in reply.locks]
            fault = _fault_of_reply(reply, devices, len(descriptors), shared=shared)
            for descriptor, path in zip(descriptors, paths, strict=False):
                fault = fault or _fault_of_lock(directory, descriptor, path)
        except GpuguardError as error:
            fault = translated(str(error))
        if fault:
            raise ClaimError(
                _("what the daemon gave is no claim: {fault}.  Nothing is claimed; ask an administrator.").format(
                    fault=fault
                )
            )
        stack.pop_all()
    locks = zip(descriptors, paths, strict=True)
    return reply.claim, tuple(lock_of(descriptor, path, fcntl.LOCK_EX) for descriptor, path in locks)


def _fault_of_reply(reply: GrantReply, devices: Sequence[Device], received: int, *, shared: bool) -> str | None:
    if not _ID_CHARACTERS.issuperset(reply.claim):
        return _("its id is none")  # a record of that name would lie elsewhere
    if not len(reply.locks) == received == len(devices):
        return _("there are fewer locks than GPUs")
    for device, name in zip(devices, reply.locks, strict=True):
        allowed = slot_names(device.uuid) if shared else (device.uuid, f"{device.uuid}.nested")
        if name not in allowed:
            return _("{name} is no lock of {gpu}").format(name=name[:80], gpu=translated(device_title(device)))
    return None


def _fault_of_lock(directory: LockDirectory, descriptor: int, path: str) -> str | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_same_file(descriptor, path, unsure=None):
        return _("it is not {path}").format(path=path)
    if status.st_uid not in (0, directory.owner, directory.keeper):
        return _("{path} belongs to uid {st_uid}").format(path=path, st_uid=status.st_uid)
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
        if not any(line.startswith("lock:") and " FLOCK " in line and " WRITE " in line for line in lines):
            return _("{path} is not locked").format(path=path)
    return None
