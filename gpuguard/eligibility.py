"""The devices that are eligible for a request, and in words why the others are not: who or what stands in the way.

The two-key rule: the device is not claimed, *and* it looks free (no compute process of others, hardly any memory in
use, healthy).  An unknown value never satisfies a condition.  On a shared device, a share counts with the memory that
it was promised or that its user's processes hold, whichever is more; all other memory in use counts as strangers'.
This module does not rank (see select) and reads nothing (see claims.claim for the claims that share a device).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

from gpuguard.device_state import (
    desktop_limit,
    grouped,
    hiding_use,
    idle_limit,
    instances_title,
    may_compute,
    occupants,
    unlisted_memory,
    user_label,
    vendor_of,
)
from gpuguard.locale.messages import sentence
from gpuguard.model import DRAWING, MOST_DESKTOP_MEMORY, ClaimRecord, Device, Gap, GpuProcess, Snapshot
from gpuguard.request import Request, resolve
from gpuguard.sanitize import neutralise
from gpuguard.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# The keys of problems that may pass by themselves, so that waiting makes sense; the others need an administrator.
_PASSING = (
    "problem.unresponsive",
    "problem.call_failed",
    "unresponsive",
)  # the last: of a recording, or of a daemon before an upgrade

_ITS_MEMORY = sentence("refused.its_memory", "its memory")
_ITS_FREE_MEMORY = sentence("refused.its_free_memory", "its free memory")

MIG_SET: Final = "--allow-mig-set"  # without it a job of several devices takes no instance
# The option of the command line that asks for something that a device lacks; "outer limit" if CUDA_VISIBLE_DEVICES,
# Slurm or a container asks for it, or "" if none does.
RefusalKey = Literal[
    "", "outer limit", "--devices", "--exclude", "--mig", "--allow-mig-set", "--model", "--vendor", "--min-total",
    "--min-free", "--memory", "--slots", "--tolerance", "--max-processes", "--mine-as-free", "--share", "--max-util",
    "--max-memory-util", "--max-temperature",
]  # fmt: skip


@dataclass(frozen=True)
class Reason:
    """One reason why a device is refused."""

    text: str
    permanent: bool = False  # waiting will not change it
    option: RefusalKey = ""


@dataclass(frozen=True)
class Refusal:
    """A device that is refused, with all reasons."""

    device: Device
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Sharing:
    """The claims that share a device."""

    claims: tuple[ClaimRecord, ...] = ()  # one per locked slot, if its record can be believed
    unknown: int = 0  # how many locked slots have no record that can be believed
    owners: Mapping[int, int] | None = None  # pid -> uid of the share that the process belongs to

    @property
    def count(self) -> int:
        """The number of claims that share the device."""
        return len(self.claims) + self.unknown

    def belongs(self, pid: int) -> bool:
        """Return whether the process belongs to one of the shares."""
        return pid in (self.owners or {})


UNSHARED = Sharing()


@dataclass(frozen=True)
class Terms:
    """A request whose selectors are resolved on one machine, with the claims on that machine."""

    request: Request
    snapshot: Snapshot
    taken: Mapping[str, str]
    wanted: frozenset[str] | None
    excluded: frozenset[str]
    preferred: Mapping[str, int]  # uuid -> position in the list, 0 is the best
    instances: Mapping[str, int]  # uuid of a divided GPU -> how many instances
    sharing: Mapping[str, Sharing]  # uuid -> the claims that share the device, if it is shared
    hidden: frozenset[str]  # uuids of devices of which processes that are not listed use more than is tolerated

    def sharing_of(self, device: Device) -> Sharing:
        """Return the claims that share the device."""
        return self.sharing.get(device.uuid, UNSHARED)


def terms_of(
    snapshot: Snapshot, request: Request, taken: Mapping[str, str], sharing: Mapping[str, Sharing] | None = None
) -> Terms:
    """Resolve the selectors of *request* on this machine.  Raises InvalidRequest if one names no device, or two."""
    devices = snapshot.devices
    preferred = resolve(request.prefer, devices, "--prefer")
    parents = [device.parent_uuid for device in devices if device.parent_uuid]
    return Terms(
        request,
        snapshot,
        taken,
        None if request.devices is None else frozenset(resolve(request.devices, devices, "--devices")),
        frozenset(resolve(request.exclude, devices, "--exclude")),
        {uuid: place for place, uuid in enumerate(preferred)},
        {uuid: parents.count(uuid) for uuid in parents},
        sharing or {},
        hiding_use(devices, request.tolerance),
    )


def _others_on(device: Device, terms: Terms) -> list[GpuProcess]:
    """Return the processes that make the device busy for this request, except those of shares that it would join."""
    request, sharing = terms.request, terms.sharing_of(device)
    return [
        process
        for process in device.processes or ()
        if may_compute(process, device, request.tolerance)
        and process.uid not in request.mine_as_free
        and not sharing.belongs(process.pid)
    ]


def _has_no_list(device: Device, terms: Terms) -> bool:
    """Return whether the device's list of processes cannot be read.  A list that was not read yet counts as good."""
    return device.processes is None and _gap(device, "processes", terms) is not None


def occupancy(device: Device, terms: Terms) -> tuple[bool, bool, int]:
    """Return whether others may use it, whether its process list is unreadable, and how many of theirs are known."""
    request, others = terms.request, len(_others_on(device, terms))
    # Hidden use is a reason for refusal unless the request allows processes there, so it matters here only then.
    hidden = bool(request.max_processes) and device.uuid in terms.hidden
    return bool(others) or device.memory_used is None or hidden, _has_no_list(device, terms), others


def no_share_left(device: Device, terms: Terms) -> Iterator[Reason]:
    """Yield the reasons why no further share of the device can be had."""
    request, sharing = terms.request, terms.sharing_of(device)
    if not request.share or request.memory is None:
        return
    if device.compute_mode == "exclusive_process":
        text = sentence(
            "refused.exclusive", "in exclusive-process mode: only one process can use it (nvidia-smi -c DEFAULT)"
        )
        yield Reason(text, True)
    if sharing.unknown:
        text = sentence(
            "refused.unknown_share", "shared by a claim whose record cannot be read: how much is left is unknown"
        )
        yield Reason(text)
        return
    if not slots_left(sharing, request.slots):
        yield Reason(
            sentence(
                "refused.no_slot",
                "shared by {count} already, and no more may join: {shared_by}",
                count=sharing.count,
                shared_by=shared_by(sharing),
            ),
            False,
            "--slots",
        )
    room, left = capacity(device), memory_left(device, sharing)
    if room is not None and room < request.memory:
        yield Reason(_too_little(room), True, "--memory")
    elif room is None:
        yield _unknown(device, "memory_total", _ITS_MEMORY, terms)
    elif left is None:
        yield _unknown(device, "memory_used", sentence("refused.its_memory_used", "its memory in use"), terms)
    elif left < request.memory:
        among = sentence("refused.beside", " beside {shared_by}", shared_by=shared_by(sharing)) if sharing.count else ""
        text = sentence("refused.left", "only {left} left{among}", left=format_bytes(max(0, left)), among=among)
        yield Reason(text, False, "--memory")


def _too_little(room: int) -> str:
    return sentence("refused.too_little", "has {room} of memory even when it is empty", room=format_bytes(room))


def used_by(processes: Sequence[GpuProcess], clock: float) -> str:
    """Return a text such as ``"bob (pid 812, python train.py, 3h12m) and 2 more"``."""
    biggest = sorted(processes, key=lambda process: (-(process.memory_used or 0), process.pid))
    texts = []
    for process in biggest[:2]:
        facts = [f"pid {process.pid}"]
        if process.command:
            facts.append(shown(" ".join(process.command), 40))
        if process.start_time is not None:
            facts.append(format_duration(clock - process.start_time))
        text = ", ".join(facts)
        is_owned = process.user is not None or process.uid is not None
        texts.append(f"{shown(user_label(process.user, process.uid))} ({text})" if is_owned else text)
    first = ", ".join(texts)
    if len(biggest) <= 2:
        return first
    return sentence("refused.and_more", "{users} and {count} more", users=first, count=len(biggest) - 2)


def shown(text: str, width: int = 60) -> str:
    """Return the text of another user, made harmless and cut to *width*."""
    plain = neutralise(text if len(text) <= width else text[: width + 1])
    return plain if len(plain) <= width else plain[: width - 1] + "…"


def _out_of_scope(device: Device, terms: Terms) -> Iterator[Reason]:
    request, family = terms.request, {device.uuid, device.parent_uuid}
    if terms.wanted is not None and not family & terms.wanted:
        devices = ",".join(request.devices or ())
        text = sentence("refused.not_in_devices", "not in --devices {devices}", devices=devices)
        yield Reason(text, True, "--devices")
    if family & terms.excluded:
        text = sentence("refused.excluded", "in --exclude {exclude}", exclude=",".join(request.exclude))
        yield Reason(text, True, "--exclude")
    if request.within is not None and not family & set(request.within):
        outside = sentence("refused.outside", "outside the GPUs that are allowed here")
        yield Reason(request.within_reason or outside, True, "outer limit")


def _wrongly_divided(device: Device, terms: Terms) -> Iterator[Reason]:
    wanted, count = terms.request.mig, terms.instances.get(device.uuid, 0)
    if device.parent_uuid is None and device.mig_mode and count:
        instances = instances_title(count, device)
        text = sentence("refused.divided", "divided into {instances}: jobs run on those", instances=instances)
        yield Reason(text, True)
    elif device.parent_uuid is None and device.mig_mode:
        text = sentence(
            "refused.no_instance",
            "MIG mode is on, but it has no MIG instance (an administrator makes them: nvidia-smi mig)",
        )
        yield Reason(text, True)
    elif _is_lone(device) and terms.request.num_gpus > 1 and not terms.request.takes_mig_set:
        text = sentence(
            "refused.lone_instance", "a MIG instance: one process can use only one ({mig_set})", mig_set=MIG_SET
        )
        yield Reason(text, True, MIG_SET)
    elif wanted is None:
        return
    elif device.parent_uuid is None:
        yield Reason(sentence("refused.not_divided", "not divided into instances"), True, "--mig")
    elif device.mig_profile is None:
        what = sentence("refused.its_profile", "its profile")
        yield _unknown(device, "mig_profile", what, terms, "--mig", permanent=True)
    elif device.mig_profile.lower() != wanted.lower():
        text = sentence("refused.profile", "its profile is {name}", name=shown(device.mig_profile))
        yield Reason(text, True, "--mig")


def _wrong_model(device: Device, terms: Terms) -> Iterator[Reason]:
    globs = terms.request.models
    if globs and device.name is None:
        what = sentence("refused.its_model", "its model")
        yield _unknown(device, "name", what, terms, "--model", permanent=True)
    elif globs and not is_one_of_models(device.name or "", globs):
        text = sentence("refused.model", "its model is {name}", name=shown(device.name or ""))
        yield Reason(text, True, "--model")


def _of_another_vendor(device: Device, terms: Terms) -> Iterator[Reason]:
    if terms.request.vendor not in (None, device.vendor):
        text = sentence("refused.vendor", "its vendor is {vendor}", vendor=vendor_of(device).title)
        yield Reason(text, True, "--vendor")


def _too_small(device: Device, terms: Terms) -> Iterator[Reason]:
    request, room, free, total = terms.request, capacity(device), device.memory_free, device.memory_total
    if request.min_total is not None and total is None:
        yield _unknown(device, "memory_total", _ITS_MEMORY, terms, "--min-total", permanent=True)
    elif request.min_total is not None and (total or 0) < request.min_total:
        text = sentence("refused.too_small", "has {total} of memory in all", total=format_bytes(total))
        yield Reason(text, True, "--min-total")

    if request.min_free is not None and room is not None and room < request.min_free:
        yield Reason(_too_little(room), True, "--min-free")
    elif request.min_free is not None and free is None:
        yield _unknown(device, "memory_free", _ITS_FREE_MEMORY, terms, "--min-free")
    elif request.min_free is not None and (free or 0) < request.min_free:
        text = sentence("refused.free", "only {free} free", free=format_bytes(free))
        yield Reason(text, False, "--min-free")

    fraction = request.min_free_fraction
    if fraction is not None and room is None:
        yield _unknown(device, "memory_total", _ITS_MEMORY, terms)
    elif fraction is not None and free is None:
        yield _unknown(device, "memory_free", _ITS_FREE_MEMORY, terms)
    elif fraction is not None and room is not None and free is not None and free < fraction * room:
        text = sentence(
            "refused.free_part",
            "only {part} of its memory is free, less than {least}",
            part=f"{free / room:.1%}",
            least=f"{fraction:.1%}",
        )
        yield Reason(text)


def _unhealthy(device: Device, terms: Terms) -> Iterator[Reason]:
    why = _gap(device, "problems", terms)
    for problem in device.problems or ():
        text = shown(problem, 200)
        if why is not None:
            text = sentence("refused.problem", "{problem} ({why})", problem=text, why=shown(why.reason))
        yield Reason(text, getattr(problem, "key", problem) not in _PASSING)
    if device.compute_mode == "prohibited":
        text = sentence(
            "refused.prohibited",
            "its compute mode is prohibited (an administrator permits work: nvidia-smi -c DEFAULT)",
        )
        yield Reason(text, True)
    if device.compute_mode == "exclusive_process" and (owners := occupants(device)):
        text = sentence(
            "refused.taken",
            "in exclusive-process mode and taken by {used_by}",
            used_by=used_by(owners, terms.snapshot.clock),
        )
        yield Reason(text)


def _claimed(device: Device, terms: Terms) -> Iterator[Reason]:
    # A claim on a GPU that was divided later still covers all of it.
    holder = terms.taken.get(device.uuid) or terms.taken.get(device.parent_uuid or "")
    whole = terms.sharing.get(device.parent_uuid or "", UNSHARED)
    if not holder and whole.count:
        holder = sentence("refused.whole_shared", "its whole GPU is shared by {shared_by}", shared_by=shared_by(whole))
    if holder:
        yield Reason(holder)


def _busy(device: Device, terms: Terms) -> Iterator[Reason]:
    request, others = terms.request, _others_on(device, terms)
    allowed, shared = request.max_processes or 0, terms.sharing_of(device).count
    if not device.processes_plausible and occupants(device, request.tolerance):
        text = sentence("refused.implausible_list", "its process list is not plausible, so who uses it is unknown")
        yield Reason(text)
        return
    if device.processes is None and (request.max_processes or request.mine_as_free or shared):
        option: RefusalKey = (
            "--max-processes" if request.max_processes else "--mine-as-free" if request.mine_as_free else "--share"
        )
        reason = _unknown(
            device, "processes", sentence("refused.its_processes", "its list of processes"), terms, option
        )
        yield replace(reason, permanent=reason.permanent and not shared)  # a share may end
    elif len(others) > allowed:
        yield Reason(_used(device, others, terms))
    elif not allowed and device.memory_used is None:
        if (unseen := _use_is_hidden(device, terms)) and device.uuid not in (terms.wanted or ()):
            yield unseen
        elif device.processes is None and not device.problems and not unseen:
            text = sentence(
                "refused.nothing_known",
                "neither its processes nor its memory in use are known, so nothing says that it is free",
            )
            fields = ("processes", "memory_used")
            yield Reason(text, all((gap := _gap(device, field, terms)) and gap.is_lasting for field in fields))
    elif not allowed and device.uuid in terms.hidden:
        yield Reason(_in_use(device, terms), False, "--tolerance")


def _used(device: Device, others: Sequence[GpuProcess], terms: Terms) -> str:
    """Return that *others* use the device."""
    request, shared = terms.request, terms.sharing_of(device).count
    memory = "" if device.memory_used is None else f"{format_bytes(device.memory_used)} "
    limit = sentence("refused.processes", " ({count} processes)", count=len(others)) if request.max_processes else ""
    whose = sentence("refused.whose_share", ", whose share is unknown") if shared else ""
    desktop = ""
    drawn = sum(process.memory_used or 0 for process in device.processes or () if process.kind in DRAWING)
    if all(process.kind in DRAWING for process in others) and drawn <= MOST_DESKTOP_MEMORY:
        desktop = sentence(
            "refused.desktop",
            ", more than the {desktop} that a desktop may hold: --tolerance {size} starts beside it",
            desktop=format_bytes(desktop_limit(device, request.tolerance)),
            size=f"{drawn // 2**30 + 1}GiB",
        )
    return sentence(
        "refused.used",
        "{memory}used by {used_by}{limit}{whose}{desktop}",
        memory=memory,
        used_by=used_by(others, terms.snapshot.clock),
        limit=limit,
        whose=whose,
        desktop=desktop,
    )


def _in_use(device: Device, terms: Terms) -> str:
    """Return that memory is in use that no process in the list has."""
    tolerance = terms.request.tolerance
    whose = "" if device.processes is None else sentence("refused.by_none", ", by no process that is visible")
    if _has_no_list(device, terms):
        whose = sentence("refused.no_list", ", the driver gives no list of processes")
    most = format_bytes(idle_limit(device, tolerance))
    return sentence(
        "refused.in_use",
        "{rest} in use{whose}; {holds}",
        rest=format_bytes(unlisted_memory(device, tolerance)),
        whose=whose,
        holds=sentence("refused.idle_gpu", "an idle GPU may hold {most} (--tolerance)", most=most),
    )


def _use_is_hidden(device: Device, terms: Terms) -> Reason | None:
    """Return the reason if only this user's lack of rights keeps the use of the device from being seen.

    Then a request has to name the device, because all that keeps it from a device that is in use are the claims.
    """
    gap = _gap(device, "processes", terms) if device.processes is None else None
    if gap is None or not gap.is_of_this_user:
        return None
    text = sentence(
        "refused.use_unseen",
        "unclaimed use cannot be seen: {why}; --devices {index} takes it nevertheless",
        why=shown(gap.reason),
        index=device.index,
    )
    return Reason(text, True)


def usable_with_others(devices: Sequence[Device]) -> list[Device]:
    """Return *devices* without the instances of which a process can use only one."""
    return [device for device in devices if not _is_lone(device)]


def _is_lone(device: Device) -> bool:
    return device.parent_uuid is not None and not vendor_of(device).partitions


# option, the request's limit, the device's value, what it is, its unit
_LIMITS: tuple[tuple[RefusalKey, str, str, str, str], ...] = (
    ("--max-util", "max_util", "utilization", sentence("field.utilization", "utilization"), "%"),
    (
        "--max-memory-util",
        "max_memory_util",
        "memory_utilization",
        sentence("field.memory_utilization", "memory utilization"),
        "%",
    ),
    ("--max-temperature", "max_temperature", "temperature", sentence("field.temperature", "temperature"), "C"),
)


def _above_limit(device: Device, terms: Terms) -> Iterator[Reason]:
    request = terms.request
    for option, limit_name, field, what, unit in _LIMITS:
        limit, value = getattr(request, limit_name), getattr(device, field)
        if limit is None or (option == "--max-util" and request.share and limit >= 100):
            continue
        if value is None and device.asleep:
            continue  # it is switched off, and only a job would wake it
        if value is None:
            yield _unknown(device, field, sentence("refused.its", "its {what}", what=what), terms, option)
        elif value > limit:
            text = sentence(
                "refused.above",
                "{what} is {value}, more than {limit} ({option})",
                what=what,
                value=f"{value:.0f}{unit}",
                limit=f"{limit:g}{unit}",
                option=option,
            )
            yield Reason(text, False, option)


_RULES: tuple[Callable[[Device, Terms], Iterator[Reason]], ...] = (
    _out_of_scope,
    _wrongly_divided,
    _wrong_model,
    _of_another_vendor,
    _too_small,
    _unhealthy,
    _claimed,
    no_share_left,
    _busy,
    _above_limit,
)


def refusals(terms: Terms) -> list[Refusal]:
    """Return the devices that are refused, each with all its reasons, in the order of the snapshot."""
    reasons = [
        (device, tuple(reason for rule in _RULES for reason in rule(device, terms)))
        for device in terms.snapshot.devices
    ]
    return [Refusal(device, why) for device, why in reasons if why]


@lru_cache(256)  # a machine has many devices of one name
def is_one_of_models(name: str, globs: tuple[str, ...]) -> bool:
    """Return whether one of *globs* matches the name, as is_model() says."""
    return any(is_model(name, glob) for glob in globs)


def is_model(name: str, glob: str) -> bool:
    """Return whether *glob* matches the name, or its end from some word on.

    "A100*" and "A100" match NVIDIA A100-SXM4-80GB.
    """
    text = " ".join(name.lower().split())
    starts = 1 | sum(2 << number for number, letter in enumerate(text) if letter == " ")
    reached = _reached(text, glob.lower(), starts) if text else 0
    # The match must cover the whole ending, or its beginning up to a blank or a hyphen.
    return any(reached >> number & 1 for number in range(len(text) + 1) if text[number : number + 1] in ("", " ", "-"))


def _reached(text: str, glob: str, at: int) -> int:
    """Return a number whose bit n says whether *glob* matches the text from any of the places *at* to its nth letter.

    fnmatchcase() is not used because it compiles each glob: those of one user's tickets held up all others for minutes.
    """
    place, beyond, where = 0, 2 << len(text), dict[str, int]()
    for number, letter in enumerate(text):
        where[letter] = where.get(letter, 0) | 1 << number
    while place < len(glob) and at:
        letter, place = glob[place], place + 1
        end = glob.find("]", place + 1 + (glob[place : place + 1] == "!")) if letter == "[" else -1
        if letter == "*":
            at = beyond - (at & -at)
            continue
        if end < 0:
            here = (beyond >> 1) - 1 if letter == "?" else where.get(letter, 0)
        else:
            here = sum(bits for other, bits in where.items() if _is_one_of(glob[place:end], other))
            place = end + 1
        at = (at & here) << 1
    return at


def _is_one_of(letters: str, letter: str) -> bool:
    """Return whether *letter* is one of *letters*, such as ``abc`` or ``a-z``; for ``!abc``, whether it is none."""
    other, place, found = letters[0] == "!", 0, False
    letters = letters[other:]
    while place < len(letters):
        last = place + 2 if letters[place + 1 : place + 2] == "-" and place + 2 < len(letters) else place
        found = found or letters[place] <= letter <= letters[last]
        place = last + 1
    return found != other


def _unknown(
    device: Device, field: str, what: str, terms: Terms, option: RefusalKey = "", *, permanent: bool = False
) -> Reason:
    """Return the reason for a value that is not known.  Waiting does not help if the driver never reports it."""
    gap = _gap(device, field, terms)
    if gap is None:
        return Reason(sentence("refused.unknown", "{what} is unknown", what=what), permanent, option)
    text = sentence("refused.unknown_because", "{what} is unknown ({why})", what=what, why=shown(gap.reason))
    return Reason(text, permanent or gap.is_lasting, option)


def _gap(device: Device, field: str, terms: Terms) -> Gap | None:
    """Return why the driver did not report a field of the device, or the group of fields to which it belongs."""
    return next((gap for gap in terms.snapshot.gaps if gap.device == device.uuid and field.startswith(gap.field)), None)


# The memory and the slots that are left on a shared device.


def is_share_of(record: ClaimRecord, uuid: str) -> bool:
    """Return whether the claim shares the device instead of having it alone."""
    return any(slot.startswith(f"{uuid}.") for slot in record.slots)


def sharing_on(device: Device, claims: Sequence[ClaimRecord], owners: Mapping[int, int] | None = None) -> Sharing:
    """Return which of the living *claims*, whose slots are locked, share *device*.

    If several records name one slot, the one with the most memory counts, so that a small lie beside it changes
    nothing.
    """
    of_slot = grouped(
        (slot, record) for record in claims for slot in record.slots if slot.startswith(f"{device.uuid}.")
    )
    best = [max(records, key=lambda record: _believed(record, device)) for records in of_slot.values()]
    known = tuple(record for record in best if _believed(record, device))
    return Sharing(known, len(best) - len(known), owners)


def capacity(device: Device) -> int | None:
    """Return the bytes that all claims on the device can have together, or None if that is unknown."""
    return None if device.memory_total is None else device.memory_total - (device.memory_reserved or 0)


def memory_left(device: Device, sharing: Sharing) -> int | None:
    """Return the bytes that a further share can have, or None if that is unknown."""
    room, in_use = capacity(device), device.memory_used
    if room is None or in_use is None:
        return None
    if device.memory_shared_with_host and device.memory_free is not None:
        room = min(room, device.memory_free + in_use)  # programs that use no GPU have the rest
    owners, processes = sharing.owners or {}, device.processes or ()
    used, promised = Counter[int](), Counter[int]()
    for process in processes:
        if process.pid in owners:
            used[owners[process.pid]] += process.memory_used or 0
    for record in sharing.claims:
        promised[record.uid] += record.memory or 0
    strangers = max(0, in_use - sum(used.values()))
    return room - strangers - sum(max(count, used[uid]) for uid, count in promised.items())


def share_left(device: Device, sharing: Sharing) -> int | None:
    """Return the bytes of a shared *device* that are not claimed, or None if unknown."""
    left = None if sharing.unknown else memory_left(device, sharing)
    return None if left is None else max(0, left)


def slots_left(sharing: Sharing, slots: int) -> int:
    """Return how many further claims can share the device.  Each claim that shares it may have set a bound."""
    bounds = [record.most for record in sharing.claims if record.most is not None and record.most > 0]
    return max(0, min([slots, *bounds]) - sharing.count)


def shared_by(sharing: Sharing) -> str:
    """Return a text such as ``"alice (10GiB) and bob (20GiB)"``."""
    names = [f"{neutralise(record.user)} ({format_bytes(record.memory)})" for record in sharing.claims]
    if sharing.unknown:
        names.append(sentence("share.unknown", "{unknown} without a record", unknown=sharing.unknown))
    if len(names) < 2:
        return names[0] if names else ""
    return sentence("share.by", "{others} and {last}", others=", ".join(names[:-1]), last=names[-1])


def _believed(record: ClaimRecord, device: Device) -> int:
    """Return the bytes of a share, or 0 if its record says nothing that can be true of this device."""
    if record.memory is None or record.memory <= 0:
        return 0
    return record.memory if device.memory_total is None or record.memory <= device.memory_total else 0
