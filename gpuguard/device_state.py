"""The one place that decides the state of a device, which processes compute there, whose they are, and its name.

All views, metrics, choices and rules go by these functions.  They read nothing, because /proc comes in as `Processes`;
but where the desktops of a device are large together, they ask users to whom root has given a uid.

A process belongs to the claim on the same device whose lock it holds; otherwise to the claim that one of its ancestors
holds or made (a child started with close_fds does not inherit the lock); otherwise to the claim of the same user;
otherwise, if root owns the process (a container) or its owner is not known, to the only claim there.  The last two are
guesses in favour of the process.  A record says whatever its owner likes, so the pid in it counts only where the
holders cannot be seen, and never for a process of another user.  An id alone is no claim, because others may have
copied it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from gpuguard.locale.messages import all_of, nsentence, sentence
from gpuguard.model import DRAWING, IDLE_TOLERANCE, ClaimRecord, Device, GpuProcess, ProcessStat, Snapshot
from gpuguard.units import NOT_AVAILABLE
from gpuguard.users import accountable_uid
from gpuguard.vendors import NVIDIA, VENDORS, Vendor

Key = TypeVar("Key")
Value = TypeVar("Value")

# The plain states, the most remarkable first.  JSON and metrics use them, because scripts know only these words.
PlainDeviceState = Literal["unhealthy", "unclaimed_use", "in_use", "idle", "claimed", "unknown", "free"]
DeviceState = Literal[PlainDeviceState, "quarantined", "divided", "reserved", "asleep"]
STATES: tuple[PlainDeviceState, ...] = get_args(PlainDeviceState)
FREE: tuple[DeviceState, ...] = ("free", "asleep")  # that any request may take
EXACT_STATES: tuple[DeviceState, ...] = get_args(DeviceState)

BEYOND_LIMIT = 2.0  # times its power limit: real peaks last only for milliseconds, so a higher mean is no true reading
MOST_WATTS = 10_000.0  # no device draws as much: a counter that says so is a different one, or began anew
IDLE_BELOW = 1.0  # percent, mean of the driver's sample buffer
# The memory that driver and firmware may keep for themselves on an idle device, where the driver counts it as used
# (before 510 there is no other figure): nvidia-smi -q shows 205 MiB on an 8 GB board, 614 on an H200, 869 on an A100
# 80GB.
UNKNOWN_RESERVE = 2**30

# pid -> what /proc says, or None if there is no such process; a pid that is absent could not be looked up.
Processes = Mapping[int, ProcessStat | None]


# The use of a device.


def desktop_limit(device: Device, tolerance: int = IDLE_TOLERANCE) -> int:
    """Return the bytes of *device* that a user's desktop may hold: as the site allows, or a raised *tolerance*."""
    return max(device.desktop_memory, tolerance) if tolerance > IDLE_TOLERANCE else device.desktop_memory


def beyond_desktop(device: Device, tolerance: int = IDLE_TOLERANCE) -> frozenset[int]:
    """Return the pids that draw on *device* but are more than a desktop, such as a program that computes by Vulkan.

    All processes of one user that draw count as a desktop while together they hold no more than desktop_limit().
    Beyond that the largest ones count as use, until the rest is within the limit.  Nothing else tells the two apart,
    because any user can make a process draw, and choose its name.
    """
    drawing = [process for process in device.processes or () if process.kind in DRAWING and not process.ended]
    sizes = [(process.memory_used, -process.pid, process.uid) for process in drawing if process.memory_used is not None]
    most, held, beyond = desktop_limit(device, tolerance), Counter[int | None](), set[int]()
    for memory, pid, uid in sorted(sizes, key=lambda row: row[:2]) if sum(row[0] for row in sizes) > most else ():
        owner = None if uid is None else accountable_uid(uid)
        held[owner] += memory
        if held[owner] > most:
            beyond.add(-pid)
    return frozenset(beyond)


def computes(process: GpuProcess, device: Device, tolerance: int = IDLE_TOLERANCE) -> bool | None:
    """Return whether *process*, which *device* lists, is more than a desktop there, or None if that is unknown.

    A process that has ended no longer computes.  Memory that it left on the device is not accounted for by any process.
    """
    if process.ended or process.kind not in DRAWING:
        return not process.ended
    if process.memory_used is None:
        return False if process.kind == "graphics" else None
    return process.pid in beyond_desktop(device, tolerance)


def may_compute(process: GpuProcess, device: Device, tolerance: int = IDLE_TOLERANCE) -> bool:
    """Return whether *process* computes, or nothing says that it does not."""
    return computes(process, device, tolerance) is not False


def occupants(device: Device, tolerance: int = IDLE_TOLERANCE) -> tuple[GpuProcess, ...]:
    """Return the listed processes that keep others off the device.  A desktop counts only in exclusive-process mode."""
    exclusive = device.compute_mode == "exclusive_process"
    return tuple(
        [
            process
            for process in device.processes or ()
            if may_compute(process, device, tolerance)
            or (exclusive and process.kind != "graphics")  # even if it has ended
        ]
    )


def idle_limit(device: Device | None, tolerance: int = IDLE_TOLERANCE) -> int:
    """Return the bytes that may be in use on *device*, or on any device if it is None, while nothing uses it."""
    return tolerance if device and device.memory_reserved is not None else tolerance + UNKNOWN_RESERVE


def unlisted_memory(device: Device, tolerance: int = IDLE_TOLERANCE) -> int | None:
    """Return the bytes in use that no listed process accounts for, or None if that is unknown.

    A list that is not plausible is not believed about processes that compute.
    """
    if device.memory_used is None:
        return None
    accounted = 0
    for process in device.processes or ():
        if process.ended:
            continue
        if may_compute(process, device, tolerance):
            if not device.processes_plausible:
                continue
            if process.memory_used is None:
                return None
        accounted += process.memory_used or 0
    return max(0, device.memory_used - accounted)


def hides_use(device: Device, tolerance: int = IDLE_TOLERANCE) -> bool:
    """Return whether processes that are not listed use more memory than an idle device may hold."""
    unlisted = unlisted_memory(device, tolerance)
    return unlisted is not None and unlisted > idle_limit(device, tolerance)


def hiding_use(devices: Sequence[Device], tolerance: int = IDLE_TOLERANCE) -> frozenset[str]:
    """Return the uuids of the *devices* of which hides_use() is true."""
    return frozenset(device.uuid for device in devices if hides_use(device, tolerance))


def almost_empty(devices: Sequence[Device], tolerance: int = IDLE_TOLERANCE) -> frozenset[str]:
    """Return the uuids of the *devices* on which no more memory is known to be in use than an idle device may hold."""
    known = [(device.memory_used, device) for device in devices if device.memory_used is not None]
    return frozenset(device.uuid for used, device in known if used <= idle_limit(device, tolerance))


def is_idle(device: Device) -> bool:
    """Return whether the utilization of *device* is known to be next to nothing."""
    return device.utilization is not None and device.utilization < IDLE_BELOW


def usable_devices(snapshot: Snapshot) -> tuple[Device, ...]:
    """Return the devices on which jobs can compute: the instances of divided devices take the place of those."""
    divided = {device.parent_uuid for device in snapshot.devices}
    if divided == {None}:
        return snapshot.devices
    return tuple([device for device in snapshot.devices if device.uuid not in divided])


# The owner of a process or a claim.


def claims_readable(snapshot: Snapshot) -> bool:
    """Return whether all claims of *snapshot* could be read; otherwise the absence of a claim means nothing."""
    return not any(gap.device is None and gap.field == "claims" for gap in snapshot.gaps)


def claims_on(snapshot: Snapshot, device: Device) -> tuple[ClaimRecord, ...]:
    """Return the living claims that name *device* or the device that it is a part of.  Hidden claims do not count."""
    family = {device.uuid, device.parent_uuid}
    counted = [claim for claim in snapshot.claims if claim.alive and not claim.hidden]
    return tuple([claim for claim in counted if not family.isdisjoint(claim.devices)])


def claims_by_device(snapshot: Snapshot) -> dict[str, tuple[ClaimRecord, ...]] | None:
    """Return claims_on() each device of *snapshot*, by uuid, or None if not all claims could be read."""
    readable = claims_readable(snapshot)
    return {device.uuid: claims_on(snapshot, device) for device in snapshot.devices} if readable else None


def lock_identity(claim: ClaimRecord, *uuids: str | None) -> tuple[object, ...]:
    """Return a key that *claim* keeps from sample to sample: the devices *uuids*, its owner, its id, its locks there.

    Its record can be written anew at any time, and a claim that releases a lock and takes another one is a newer claim.
    """
    names = [name for name in claim.slots or claim.devices if name.partition(".slot")[0] in uuids]
    return *uuids, claim.uid, claim.id, *names


def claim_of(process: GpuProcess, claims: Sequence[ClaimRecord], stats: Processes) -> ClaimRecord | None:
    """Return the claim, of *claims* on its device, that *process* belongs to, or None if it belongs to none."""
    return started_by(process, claims, stats) or _guessed_claim(process, claims)


def _guessed_claim(process: GpuProcess, claims: Sequence[ClaimRecord]) -> ClaimRecord | None:
    if process.uid:
        return next((claim for claim in claims if process.uid == claim.uid), None)
    return claims[0] if len(claims) == 1 else None


def started_by(process: GpuProcess, claims: Sequence[ClaimRecord], stats: Processes) -> ClaimRecord | None:
    """Return the claim, of *claims*, whose lock *process* or one of its ancestors holds, or which one of them made.

    A claim of the process's own user comes first, because a lock of another user may be a copy that it was sent.
    """
    own = [claim for claim in claims if claim.uid == process.uid]
    return _nearest(process, own, stats) or _nearest(process, claims, stats)


def innermost_claim(process: GpuProcess, claims: Sequence[ClaimRecord], stats: Processes) -> ClaimRecord | None:
    """Return the claim of its own user whose lock *process* or an ancestor holds, the nearest one; or None."""
    stat = stats.get(process.pid)
    if stat is None or process.uid is None or stat.start_time != process.start_time:
        return None
    return _nearest(process, [claim for claim in claims if claim.alive and claim.uid == process.uid], stats)


def is_blamed_on(process: GpuProcess, claim: ClaimRecord, stats: Processes) -> bool:
    """Return whether more ties *process* to *claim* than a copy of its lock, which another user may have been sent."""
    stat = stats.get(process.pid)
    return process.uid in (0, claim.uid) or bool(stat and _nearest(replace(process, pid=stat.parent), (claim,), stats))


def lineage(pid: int, stats: Processes) -> list[int]:
    """Return *pid* and its ancestors, as far as they are known."""
    found = [pid]
    while (stat := stats.get(pid)) and (pid := stat.parent) > 1 and pid not in found:
        found.append(pid)
    return found


def _nearest(process: GpuProcess, claims: Sequence[ClaimRecord], stats: Processes) -> ClaimRecord | None:
    for pid in lineage(process.pid, stats) if claims else ():
        for claim in claims:
            if pid in claim.holders or (pid == claim.pid and _may_have_made(claim, pid, process, stats)):
                return claim
    return None


def _may_have_made(claim: ClaimRecord, pid: int, process: GpuProcess, stats: Processes) -> bool:
    if claim.holders:
        return False  # its maker is one of them, or has ended; in a container the maker's pid is another one
    stat = stats.get(pid)
    uid = process.uid if pid == process.pid else stat.uid if stat else None
    return uid is None or uid == claim.uid


# Each device of a snapshot with what is on it.


@dataclass(frozen=True)
class ClaimUse:
    """A claim on one device."""

    record: ClaimRecord
    idle: bool | None  # its processes do no work there
    orphaned: bool | None  # the job lives, the wrapper that supervised it does not
    stopped: bool | None  # the job is stopped (Ctrl-Z) and still holds the device

    @property
    def user(self) -> str | None:
        """The owner, or None for a lock that is held without a record."""
        return self.record.user if self.record.uid >= 0 else None


@dataclass(frozen=True)
class ProcessUse:
    """A process on one device."""

    process: GpuProcess
    claim: str | None  # id, or None if it uses the device without a claim
    stopped: bool | None
    guessed: bool = False  # whether the claim is a guess: one of the same user, or the only one there


@dataclass(frozen=True)
class DeviceUse:
    """A device with its state, claims and processes."""

    device: Device
    state: DeviceState
    # The state for scripts: for a divided device the most remarkable state of its instances, "unhealthy" for a
    # quarantined device, and "free" for a reserved one and for one that sleeps.
    plain_state: PlainDeviceState
    reason: str | None  # why unhealthy, quarantined, reserved or unknown; or about use that no process accounts for
    problems: tuple[str, ...] | None  # those of the device, and the quarantine; None if they were not read
    claims: tuple[ClaimUse, ...]
    processes: tuple[ProcessUse, ...] | None  # None if the driver gives no list


@dataclass(frozen=True)
class UserTotal:
    """The devices, processes and claims of one user on the whole machine."""

    user: str | None  # None for processes whose owner cannot be seen
    devices: int  # with processes of the user
    processes: int
    memory_used: int | None  # bytes
    claimed: int  # devices
    idle: int  # claimed devices on which nothing works


def uses(snapshot: Snapshot, stats: Processes | None = None) -> tuple[DeviceUse, ...]:
    """Return each device of *snapshot* with its state, claims and processes, in the order of the snapshot."""
    quarantined = dict(snapshot.quarantined)
    by_device = grouped((uuid, claim) for claim in snapshot.claims for uuid in claim.devices)
    # Each device is given only the claims and gaps that can concern it: to go through all of them for each device is
    # quadratic work.
    gaps = tuple(gap for gap in snapshot.gaps if gap.device is None)
    found = []
    for device in snapshot.devices:
        claims = snapshot.claims if device.parent_uuid else tuple(by_device.get(device.uuid, ()))
        found.append(_use(device, replace(snapshot, claims=claims, gaps=gaps), stats or {}, quarantined))
    return tuple(_divided(use, found) if use.device.mig_mode and not use.device.parent_uuid else use for use in found)


def _use(device: Device, snapshot: Snapshot, stats: Processes, quarantined: Mapping[str, str]) -> DeviceUse:
    owners = claims_on(snapshot, device)
    # For a pid from another namespace, we would see the owner and the ancestors of another process.
    processes = _processes_on(device, owners if device.processes_plausible else (), stats)
    held = [claim for claim in snapshot.claims if claim.alive and device.uuid in claim.devices]
    of_whole = any(claim.alive and device.parent_uuid in claim.devices for claim in snapshot.claims)
    barred = quarantined.get(device.uuid) or quarantined.get(device.parent_uuid or "")
    problems = device.problems if barred is None else (*(device.problems or ()), barred)
    state: Literal[PlainDeviceState, "quarantined", "reserved", "asleep"]
    reason: str | None
    if device.problems:
        state, reason = "unhealthy", all_of(problems or (), ", ")
    elif device.compute_mode == "prohibited":
        prohibited = sentence("state.prohibited", "its compute mode is 'prohibited'")
        state, reason = "unhealthy", all_of(filter(None, (prohibited, barred)), ", ")
    elif barred:
        state, reason = "quarantined", barred
    elif not claims_readable(snapshot):
        state, reason = "unknown", sentence("state.claims_unknown", "the claims cannot be read")
    else:
        state, reason = _usage(device, bool(held) or of_whole, bool(owners), processes)
        reserved = dict(snapshot.reserved)
        if state == "free" and (kept := reserved.get(device.uuid) or reserved.get(device.parent_uuid or "")):
            state, reason = "reserved", kept
        elif state == "free" and device.asleep:
            state = "asleep"
    plain: PlainDeviceState = "unhealthy" if state == "quarantined" else state if state in STATES else "free"
    claims = tuple(_claim_use(claim, plain, snapshot, stats) for claim in held)
    return DeviceUse(device, state, plain, reason, problems, claims, processes)


def _usage(
    device: Device, locked: bool, owned: bool, processes: tuple[ProcessUse, ...] | None
) -> tuple[PlainDeviceState, str | None]:
    """Return the state of a healthy device, and why it is in that state.

    *locked* says whether a claim is on it, and *owned* whether a process has the lock of that claim open.
    """
    listed = occupants(device)
    working: PlainDeviceState = "idle" if is_idle(device) else "in_use"
    if listed and device.processes_plausible:
        belongs = any(use.claim is not None and use.process in listed for use in processes or ())
        return (working if belongs else "unclaimed_use"), None
    if hides_use(device):
        unlisted = sentence("state.unlisted", "memory is in use, by processes that are not listed")
        return (working, None) if owned else ("unclaimed_use", unlisted)
    if listed:
        return "unknown", sentence("state.implausible_list", "the process list makes no sense")
    if processes is None and (device.memory_used is None or (locked and not device.asleep)):
        return "unknown", sentence("state.no_list", "no process list")
    if locked:
        return "claimed", None
    by_memory = sentence("state.judged_by_memory", "no process list: judged by its memory in use")
    return "free", by_memory if processes is None and not device.asleep else None


def _processes_on(device: Device, claims: Sequence[ClaimRecord], stats: Processes) -> tuple[ProcessUse, ...] | None:
    if device.processes is None:
        return None
    found = []
    for process in device.processes:
        starter = started_by(process, claims, stats)
        claim = starter or _guessed_claim(process, claims)
        stat = stats.get(process.pid)
        stopped = stat.state in "Tt" if stat else None
        found.append(ProcessUse(process, claim.id if claim else None, stopped, guessed=claim is not starter))
    return tuple(found)


def _divided(use: DeviceUse, found: Sequence[DeviceUse]) -> DeviceUse:
    """Return *use* of a divided device, where jobs run on its instances instead of on the device itself."""
    instances = [other for other in found if other.device.parent_uuid == use.device.uuid]
    if use.plain_state == "unhealthy":
        return use
    if not instances:
        reason = sentence("state.no_instance", "divided, and without an instance")
        return replace(use, state="unhealthy", plain_state="unhealthy", reason=reason)
    elsewhere = {running.process.pid for other in instances for running in other.processes or ()}
    own = tuple(running for running in use.processes or () if running.process.pid not in elsewhere)
    plain = min((other.plain_state for other in instances), key=STATES.index)
    return replace(use, state="divided", plain_state=plain, reason=None, processes=own)


def _claim_use(claim: ClaimRecord, state: PlainDeviceState, snapshot: Snapshot, stats: Processes) -> ClaimUse:
    idle = {"idle": True, "claimed": True, "unclaimed_use": True, "in_use": False}.get(state)
    job = [pid for pid in claim.holders if pid != claim.pid]
    known = [stat for pid in job or (claim.pid,) if pid is not None and (stat := stats.get(pid))]
    stopped = all(stat.state in "Tt" for stat in known) if known else None
    return ClaimUse(claim, idle, _orphaned(claim, snapshot, stats), stopped)


def _orphaned(claim: ClaimRecord, snapshot: Snapshot, stats: Processes) -> bool | None:
    if claim.pid is None:
        return None
    if claim.holders and claim.pid not in claim.holders:
        # The record of a job in a container names the pid that its wrapper has in there.
        holders = [stats.get(pid) for pid in claim.holders]
        return not any(holder and holder.inner_pid == claim.pid for holder in holders)
    if claim.pid not in stats:
        return None
    wrapper = stats[claim.pid]
    if wrapper is None or wrapper.state == "Z":
        return True
    if claim.since is None or wrapper.start_time is None:
        return False
    # Other users' holders cannot be seen, and the pid may be that of another process by now.  The 2 s allow for clocks
    # that are adjusted.
    born = snapshot.taken_at - snapshot.clock + wrapper.start_time
    return born > claim.since + 2


def user_totals(found: Sequence[DeviceUse]) -> tuple[UserTotal, ...]:
    """Return one row per user, the one with the most devices first.  A memory sum with an unknown part is unknown."""
    memory: dict[str | None, dict[tuple[int, str], int | None]] = {}  # of a pid on a device
    claimed: dict[str | None, dict[str, bool]] = {}  # whether one of the user's claims on a device is idle
    for use in found:
        uuid = use.device.uuid
        for held in use.claims:
            own = claimed.setdefault(held.user, {})
            own[uuid] = own.get(uuid, False) or bool(held.idle)
        for running in use.processes or ():
            process = running.process
            memory.setdefault(process.user, {})[process.pid, uuid] = process.memory_used
    rows = []
    for user in {*memory, *claimed}:
        used = memory.get(user, {})
        known = [bytes_used for bytes_used in used.values() if bytes_used is not None]
        rows.append(
            UserTotal(
                user,
                devices=len({uuid for _, uuid in used}),
                processes=len({pid for pid, _ in used}),
                memory_used=sum(known) if len(known) == len(used) else None,
                claimed=len(claimed.get(user, ())),
                idle=sum(claimed.get(user, {}).values()),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.devices, -row.claimed, row.user is None, row.user or "")))


def chosen(found: Sequence[DeviceUse], users: frozenset[str], devices: frozenset[str]) -> tuple[DeviceUse, ...]:
    """Return only the use of *devices* (uuids) by *users* (names); an empty set stands for all."""
    kept = tuple(use for use in found if not devices or use.device.uuid in devices)
    if not users:
        return kept
    own = (
        replace(
            use,
            claims=tuple(held for held in use.claims if held.user in users),
            processes=tuple(running for running in use.processes or () if running.process.user in users),
        )
        for use in kept
    )
    return tuple(use for use in own if use.claims or use.processes)


# Names of devices and users.


def vendor_of(device: Device) -> Vendor:
    """Return the vendor of a device, or NVIDIA if only the later gpuguard that recorded the device knows its vendor."""
    return VENDORS.get(device.vendor, NVIDIA)


def device_title(device: Device) -> str:
    """Return its name in sentences: ``"GPU 3"``, ``"MIG instance 3.1 (3g.40gb)"`` or ``"partition 3.1 (cpx)"``."""
    if device.parent_uuid is None:
        return f"GPU {device.label}"
    label = device.label + (f" ({device.mig_profile})" if device.mig_profile else "")
    if vendor_of(device).partitions:
        return sentence("gpu.partition", "partition {label}", label=label)
    return sentence("gpu.mig_instance", "MIG instance {label}", label=label)


def instances_title(count: int, device: Device) -> str:
    """Return ``"2 MIG instances"`` or ``"2 partitions"``, as the vendor of *device* calls the parts of its GPUs."""
    if vendor_of(device).partitions:
        return nsentence("count.partitions", "{number} partition", "{number} partitions", count)
    return nsentence("count.mig_instances", "{number} MIG instance", "{number} MIG instances", count)


def model_name(device: Device) -> str:
    """Return ``"H100 80GB HBM3"`` as the driver writes it, with the profile of an instance, or ``"n/a"`` if unknown."""
    name = (device.name or NOT_AVAILABLE).removeprefix(f"{vendor_of(device).title} ")
    return name if (device.mig_profile or "") in name else f"{name} {device.mig_profile}"


def user_label(user: str | None, uid: int | None = None) -> str:
    """Return the name of a user, or ``"uid 1002"`` without a name, or ``"unknown"`` without both."""
    return user or ("unknown" if uid is None or uid < 0 else f"uid {uid}")


def mean_watts(before: Device, now: Device, seconds: float) -> float | None:
    """Return a device's mean power between two samples by the driver's counter of joules, or None if it is unknown."""
    if before.total_energy is None or now.total_energy is None:
        return None
    watts = (now.total_energy - before.total_energy) / seconds
    most = MOST_WATTS if now.power_limit is None else BEYOND_LIMIT * now.power_limit
    return watts if 0 <= watts <= most else None


# Values that belong to one device, process or user.


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of *pairs* (key, value) by their keys; keys and values keep their order."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
