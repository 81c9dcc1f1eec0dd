"""Devices from the daemon, where it alone gives the locks: what it is asked, and what came back is looked at.

Takes the place of locking in an attempt to claim; the daemon takes the locks, looks at the devices again behind them,
and hands the locked descriptors over.  Which of the devices are wanted is decided here, as everywhere.  Claims nothing
when nobody answers.  The other side is broker.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuguard.claims.claim import Claim, Lock, lock_of
from gpuguard.claims.directory import LockDirectory, is_same_file
from gpuguard.claims.shares import sharing_now
from gpuguard.claims.slots import slot_names
from gpuguard.daemon.client import DaemonBusy, GrantReply, NoDaemonSocket, call, checked
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.model import ClaimRecord, Device, Snapshot
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import as_json
from gpuguard.request import Request
from gpuguard.select import choose

_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-.")  # of the id of a claim
ANSWER_SECONDS = 60.0  # the daemon's driver may have to start first
BUSY_SECONDS = 10.0  # many may ask at once: those who wait are woken together


def request_grant(
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: dict[str, str],
    ticket: Ticket | None,
) -> Claim | None:
    """The best devices from the daemon; None when they cannot be had.  Fills *taken* with those that it refused.

    Args:
        ticket: of whoever waits or would wait; without one he comes last.

    Raises:
        ClaimError: there is no daemon, and nobody has waited for it before.
    """
    if request.share and outer and not _is_free_inside(outer):
        raise InvalidRequest(f"inside a claim the daemon gives whole devices alone ({outer.id}): leave out --share.")
    while devices := _best(snapshot, request, directory, outer, taken):
        if outer and _is_free_inside(outer):
            return Claim(f"{outer.id}.{os.urandom(4).hex()}", devices, ())
        try:
            answer, descriptors = _call(directory, _grant_request(devices, request, outer, ticket))
        except GpuguardError as error:
            if ticket is None or not ticket.id:
                raise _refusal(directory, error) from error
            # Whoever waits already goes on: a daemon that is started again is no reason to lose his place.
            taken.update((device.uuid, str(error)) for device in devices)
            return None
        if "refused" in answer:
            _close(descriptors)
            taken.update(_reasons(answer["refused"], devices))
            continue
        locks = _locks(directory, devices, answer, descriptors, shared=request.share)
        return Claim(str(answer["claim"]), devices, locks, memory=request.memory, most=request.most_sharers)
    return None


def _is_free_inside(outer: ClaimRecord) -> bool:
    """Whether commands in it exclude nobody: see taking."""
    return "." in outer.id or outer.memory is not None


def _best(
    snapshot: Snapshot,
    request: Request,
    directory: LockDirectory,
    outer: ClaimRecord | None,
    taken: Mapping[str, str],
) -> tuple[Device, ...]:
    # Anew each time: whoever was quicker has a share now.
    sharing = sharing_now(directory, {}, snapshot) if request.share and not outer else {}
    return choose(snapshot, request, taken, sharing).devices


def _grant_request(
    devices: Sequence[Device], request: Request, outer: ClaimRecord | None, ticket: Ticket | None
) -> dict[str, Any]:
    # What chose among the devices is left out: they are named.
    bare = replace(
        request,
        num_gpus=len(devices),
        max_gpus=None,
        devices=None,
        within=None,
        within_reason="",
        exclude=(),
        prefer=(),
    )
    asked: dict[str, Any] = {
        "do": "claim",
        "devices": [device.uuid for device in devices],
        "conditions": as_json(bare),
        "inside": outer.id if outer else None,
        "ticket": ticket.id if ticket else None,
    }
    if ticket and not ticket.id:
        times = {"time_limit_seconds": ticket.time_limit, "expected_seconds": ticket.expected}
        asked |= {"priority": ticket.priority, **times}
    return asked


def _call(directory: LockDirectory, asked: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    deadline, pause = time.monotonic() + BUSY_SECONDS, 0.02
    while True:
        try:
            return call(directory, asked, ANSWER_SECONDS)
        except DaemonBusy:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause * (1 + os.urandom(1)[0] / 255))
        pause = min(2 * pause, 0.5)


def refuse_without_daemon(directory: LockDirectory) -> None:
    """What a request would be told while nobody gives the locks, for who asks what he would get.

    Raises:
        ClaimError: there is no daemon.
    """
    try:
        _call(directory, {"do": "claims"})
    except GpuguardError as error:
        raise _refusal(directory, error) from error


def _refusal(directory: LockDirectory, error: GpuguardError) -> ClaimError:
    if isinstance(error, NoDaemonSocket):
        return ClaimError(
            f"{str(error).rstrip('.')}.  It alone gives the GPUs of this machine, so nothing can be claimed until it "
            "runs; what is claimed already stays claimed."
        )
    return ClaimError(str(error))


def _reasons(refused: object, devices: Sequence[Device]) -> dict[str, str]:
    """uuid -> why; of all, if nothing can be understood."""
    uuids = [device.uuid for device in devices]
    rows = refused if isinstance(refused, dict) else {}
    return {uuid: str(rows[uuid]) for uuid in uuids if uuid in rows} or dict.fromkeys(uuids, "refused by the daemon")


def _locks(
    directory: LockDirectory,
    devices: Sequence[Device],
    answer: Mapping[str, Any],
    descriptors: tuple[int, ...],
    *,
    shared: bool,
) -> tuple[Lock, ...]:
    """What came, if each is the locked lock file of its device, or of a slot of it."""
    fault = None
    try:
        checked(answer, GrantReply)
    except GpuguardError as error:
        fault = str(error)
    named = answer["locks"] if fault is None else []
    if fault is None and not _LETTERS.issuperset(answer["claim"]):
        fault = "its id is none"  # a record of that name would lie elsewhere
    paths = [directory.lock_path(name) for name in named]
    if not len(paths) == len(descriptors) == len(devices):
        fault = fault or "there are fewer locks than devices"
    for device, name in zip(devices, named, strict=False):
        allowed = slot_names(device.uuid) if shared else (device.uuid, f"{device.uuid}.nested")
        fault = fault or (None if name in allowed else f"{str(name)[:80]} is no lock of device {device.index}")
    try:
        for descriptor, path in zip(descriptors, paths, strict=False):
            fault = fault or _fault(directory, descriptor, path)
        if fault:
            raise ClaimError(f"what the daemon gave is no claim: {fault}.  Nothing is claimed; ask an administrator.")
    except BaseException:  # also where no file is left to look at them with
        _close(descriptors)
        raise
    return tuple(lock_of(descriptor, path, fcntl.LOCK_EX) for descriptor, path in zip(descriptors, paths, strict=True))


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _fault(directory: LockDirectory, descriptor: int, path: str) -> str | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not is_same_file(descriptor, path, unsure=None):
        return f"it is not {path}"
    if status.st_uid not in (0, directory.owner, directory.keeper):
        return f"{path} belongs to uid {status.st_uid}"
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
        if not any(line.startswith("lock:") and " FLOCK " in line and " WRITE " in line for line in lines):
            return f"{path} is not locked"
    return None
