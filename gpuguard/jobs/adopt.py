"""A claim for a job that runs already: the devices that it uses, for as long as it lives.

The locks cannot be put into a running process, so another one holds them and watches the job: see family.  The two-key
rule holds but for the job itself: its devices look busy because of it, and must because of nobody else.
Does not detach the holder: see the command adopt.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpuguard.ancestry import in_first_pid_namespace
from gpuguard.attribution import places
from gpuguard.backends.processes import uid_of
from gpuguard.claims.hold import Claim, unlock
from gpuguard.claims.lockfiles import Gate, LockDirectory
from gpuguard.claims.records import probe
from gpuguard.claims.taking import take
from gpuguard.errors import ClaimError
from gpuguard.jobs.family import Family
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES, Device, GpuProcess, Snapshot
from gpuguard.request import ANY_MEMORY, Request, computes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gpuguard.backends import Backend
    from gpuguard.claims.hold import Lock

_FIELDS = frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, HEALTH})  # HEALTH shows MIG instances
_TICKS = os.sysconf("SC_CLK_TCK")


def adopt(
    backend: Backend, directory: LockDirectory, pids: Sequence[int], *, tree: bool = False, note: str | None = None
) -> tuple[Claim, Family]:
    """Claim what the processes *pids* use, all of it or nothing.

    Args:
        backend: of the machine.
        directory: of the locks.
        pids: of processes of this user.
        tree: also what they started and will start.
        note: for people.

    Returns:
        The claim, held by this process, and whom it is for: release it when they have ended.

    Raises:
        ClaimError: it cannot be, and why; nothing is claimed.
        GpuguardError: one of the processes does not exist any more.
        BackendError: the devices cannot be read.
    """
    if not backend.simulated and in_first_pid_namespace() is False:
        raise ClaimError("pids in a container are not those that the driver names: adopt the job from the host.")
    family = Family(pids, tree=tree)
    held: list[Lock] = []
    try:
        command = _check_owners(pids)
        snapshot = backend.sample(_FIELDS)
        devices = _used(snapshot, family, pids)
        _check_marks(directory, devices)
        given = _from_daemon(directory, snapshot, devices, held) if directory.closed else None
        with Gate(directory):
            refused = next((device for device in devices if not given and not _lock(directory, device, held)), None)
            if refused is None:
                # Whatever happened between the look and the lock shows now.
                again = backend.sample(_FIELDS, [device.uuid for device in devices])
                family.refresh()  # behind the look: a pid in it that is another process by now is nobody's
                devices = _confirmed(again, devices, family)
        if refused:
            raise ClaimError(_claimed(directory, refused))
        claim = Claim(given or os.urandom(4).hex(), devices, tuple(held))
        claim.explain(directory, note, command)
    except BaseException:
        unlock(held)
        family.close()
        raise
    return claim, family


def _check_owners(pids: Iterable[int]) -> tuple[str, ...]:
    """The command line of the first; refuse those of others."""
    from gpuguard.users import user_name

    commands = []
    for pid in pids:
        uid = uid_of(pid)
        if uid is not None and uid != os.geteuid():
            raise ClaimError(f"process {pid} belongs to {user_name(uid)}: only its owner or root can adopt it.")
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as words:
                commands.append(words.read().rstrip(b"\0").decode(errors="replace").split("\0"))
        except OSError:
            raise ClaimError(f"there is no process {pid} any more.") from None
    return tuple(commands[0])


def _used(snapshot: Snapshot, family: Family, pids: Sequence[int]) -> tuple[Device, ...]:
    """The devices that the family uses, its own alone."""
    devices = tuple(device for device in places(snapshot) if any(_is_member(one, family) for one in _on(device)))
    if devices:
        _refuse_others(devices, family)
        return devices
    who = f"process {pids[0]}" if len(pids) == 1 else "none of these processes"
    what = f"{who} {'uses no GPU' if len(pids) == 1 else 'uses a GPU'} now"
    if not family.tree:
        whole = Family(pids, tree=True)
        children = sorted({one.pid for device in places(snapshot) for one in _on(device) if _is_member(one, whole)})
        whole.close()
        if children:
            raise ClaimError(f"{what}, but what it started does (pid {', '.join(map(str, children))}): add --tree.")
    unknown = [str(device.index) for device in places(snapshot) if device.processes is None]
    if unknown:
        raise ClaimError(f"{what}, as far as can be seen: the driver does not list the processes on {_gpus(unknown)}.")
    raise ClaimError(f"{what}: adopt it when it does, or start such a job with `gpuguard run`.")


def _on(device: Device) -> tuple[GpuProcess, ...]:
    return tuple(process for process in device.processes or () if computes(process))


def _is_member(process: GpuProcess, family: Family) -> bool:
    started = family.members.get(process.pid)
    return started is not None and process.start_time is not None and round(process.start_time * _TICKS) == started


def _refuse_others(devices: Iterable[Device], family: Family) -> None:
    for device in devices:
        if not device.processes_plausible:
            raise ClaimError(f"the driver's list of the processes on GPU {device.index} contradicts itself: try again.")
        for process in _on(device):
            if _is_member(process, family):
                continue
            whose = process.user or "somebody"
            if process.uid == os.geteuid():
                hint = " adopt both (several pids can be named), or --tree if one started the other."
                raise ClaimError(f"process {process.pid} of yours computes on GPU {device.index} too:{hint}")
            raise ClaimError(f"{whose} computes on GPU {device.index} too (pid {process.pid}): it is not yours alone.")


def _check_marks(directory: LockDirectory, devices: Sequence[Device]) -> None:
    if directory.owner is None:
        return
    from gpuguard.marks import against

    barred = against(directory, [device.uuid for device in devices], os.geteuid(), time.time())
    for device in devices:
        if device.uuid in barred:
            raise ClaimError(f"GPU {device.index} cannot be claimed: {barred[device.uuid]}.")


def _lock(directory: LockDirectory, device: Device, held: list[Lock]) -> bool:
    locks = take(directory, device, Request(), None)
    held.extend(locks or ())
    return locks is not None


def _from_daemon(directory: LockDirectory, snapshot: Snapshot, devices: Sequence[Device], held: list[Lock]) -> str:
    """The id of a claim of *devices* that the daemon gave; fills *held* with its locks.

    The daemon sees for itself that no process of anybody else is on them, and whose turn it is.
    """
    from gpuguard.petition import ask_for

    uuids = tuple(device.uuid for device in devices)
    # The memory that the job uses is no reason against it.
    way = Request(num_gpus=len(uuids), devices=uuids, mine_as_free=frozenset({os.geteuid()}), tolerance=ANY_MEMORY)
    taken: dict[str, str] = {}
    claim = ask_for(snapshot, way, directory, None, taken, None)
    if claim is None:
        for device in devices:
            if "claimed" in taken.get(device.uuid, ""):
                raise ClaimError(_claimed(directory, device))
            if device.uuid in taken:
                raise ClaimError(f"GPU {device.index} cannot be claimed: {taken[device.uuid]}.")
        raise ClaimError("the GPUs of this job cannot be claimed now: `gpuguard explain` says why.")
    held.extend(claim.locks)
    return claim.id


def _claimed(directory: LockDirectory, device: Device) -> str:
    """Who has the device."""
    uuids = [device.uuid, *([device.parent_uuid] if device.parent_uuid else [])]
    for record in probe(directory, uuids):
        note = f" ({record.note})" if record.note else ""
        whose = "you" if record.uid == os.geteuid() else record.user
        return f"GPU {device.index} is claimed already, by {whose}: claim {record.id}{note}.  `gpuguard who` shows it."
    return f"GPU {device.index} was being claimed by somebody else at this moment: try again."


def _confirmed(again: Snapshot, devices: Sequence[Device], family: Family) -> tuple[Device, ...]:
    """The devices as they are now, if nothing has changed that matters."""
    fresh = [again.device(device.uuid) for device in devices]
    found = tuple(device for device in fresh if device and any(_is_member(one, family) for one in _on(device)))
    if len(found) < len(devices):
        raise ClaimError("the job ended, or left one of its devices, while it was adopted: nothing is claimed.")
    _refuse_others(found, family)
    return found


def _gpus(indices: Sequence[str]) -> str:
    return f"GPU {', '.join(indices)}"
