"""Choosing devices: which are free, which of those are best, and why the others are refused.

Eligible devices are ordered by: known before unknown memory, --prefer, own memory before the host's, no running work,
most free memory, least utilization, fewest processes (for a share: least utilization, shared already, most memory
left); then, for several devices, the best connected set; then health marks, temperature and the highest index, because
most people take GPU 0.
Memory and utilization are compared coarsely, because 3 MiB are no reason to prefer a device.  This module claims
nothing: see lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING

from gpuguard.device_state import almost_empty, device_title, grouped, instances_title, vendor_of
from gpuguard.eligibility import (
    MIG_SET,
    Refusal,
    Sharing,
    Terms,
    capacity,
    is_one_of_models,
    is_share_of,
    memory_left,
    occupancy,
    refusals,
    shown,
    terms_of,
    usable_with_others,
)
from gpuguard.errors import ImpossibleRequest, InvalidRequest, NotEnoughGpus
from gpuguard.locale import _, translated
from gpuguard.locale.messages import all_of, nsentence, sentence
from gpuguard.model import ClaimRecord, Device, Gap, Snapshot, devices_of
from gpuguard.request import Request, options_of, resolve, spelled
from gpuguard.units import format_bytes, format_bytes_within, format_count, format_duration
from gpuguard.vendors import VENDORS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpuguard.eligibility import RefusalKey

_GRAIN = 512 * 2**20  # bytes of free memory that count as equal
_UTILIZATION_GRAIN = 5  # percent
_TEMPERATURE_GRAIN = 5  # Celsius
_MOST_FACTS = 5  # about devices that cannot satisfy a request


# Options that ask for a size, and a function that returns how much of it a device has.
_SIZES: Mapping[RefusalKey, Callable[[Device], int | None]] = {
    "--min-free": capacity,
    "--min-total": lambda device: device.memory_total,
    "--memory": capacity,
}


@dataclass(frozen=True)
class Choice:
    """The result of choose()."""

    devices: tuple[Device, ...]  # the chosen ones in index order, or () if fewer than wanted are eligible
    eligible: tuple[Device, ...]  # all that would do, the best first
    refused: tuple[Refusal, ...]  # all others in index order, each with all its reasons
    sharing: Mapping[str, Sharing] | None = None  # uuid -> who shares the device, where the request may join them


def choose(
    snapshot: Snapshot, request: Request, taken: Mapping[str, str], sharing: Mapping[str, Sharing] | None = None
) -> Choice:
    """Choose the best devices of *snapshot* for *request*.

    A device whose problems or processes were not read yet (None) counts as healthy and idle.  So read the winners again
    with fields_to_verify(), and choose again, until all winners have been read.

    Args:
        taken: uuid -> a text for people that says who has claimed the device.
        sharing: uuid -> who shares the device, for the devices of which a request for a share may have a part.

    Raises:
        InvalidRequest: a selector names no device of this machine.
    """
    terms = terms_of(snapshot, request, taken, sharing)
    refused = refusals(terms)
    refused_uuids = {refusal.device.uuid for refusal in refused}
    eligible = [device for device in snapshot.devices if device.uuid not in refused_uuids]
    nodes = Counter(device.numa_node for device in eligible)
    empty = almost_empty(eligible, request.tolerance)
    tiers = {device.uuid: _tier(device, terms, nodes, is_empty=device.uuid in empty) for device in eligible}
    eligible.sort(key=lambda device: (tiers[device.uuid], _tie(device)))
    usable = _usable(eligible, request)
    wanted = min(request.most, len(usable)) if len(usable) >= request.num_gpus else 0
    chosen = usable[:wanted]
    if wanted > 1:
        # Take the best tiers whole.  Of the last tier that is needed, take the devices that are best connected with
        # those and with each other.
        last = tiers[usable[wanted - 1].uuid]
        fixed = [device for device in usable if tiers[device.uuid] < last]
        pool = [device for device in usable if tiers[device.uuid] == last]
        chosen = best_connected(fixed, pool, wanted - len(fixed), snapshot.topology or ())
    return Choice(
        tuple(sorted(chosen, key=_index_order)),
        tuple(eligible),
        tuple(sorted(refused, key=lambda refusal: _index_order(refusal.device))),
        terms.sharing,
    )


def unread_devices(snapshot: Snapshot, taken: Mapping[str, str]) -> set[str]:
    """Return the uuids of devices for which it is not known yet who computes there, or whether they are divided.

    Memory in use may belong to a visible desktop, which does not keep jobs away, and an instance of a divided GPU may
    be free although the GPU is busy.
    """
    told = {gap.device for gap in snapshot.gaps if gap.field == "processes"}
    return {
        device.uuid
        for device in snapshot.devices
        if device.uuid not in taken
        and (device.problems is None or (device.processes is None and device.uuid not in told))
    }


def unread_vendor(snapshot: Snapshot, request: Request) -> Gap | None:
    """Return the gap of a vendor none of whose devices could be read, if *request* could take one of them, or None.

    Its devices may be the best ones, or the only ones that will do, so that they must not be missing without a word.
    """
    for gap in snapshot.gaps:
        name = gap.field.removesuffix(devices_of(""))
        if gap.device is None and gap.field == devices_of(name) and _could_be_of(name, snapshot, request):
            return gap
    return None


def _could_be_of(name: str, snapshot: Snapshot, request: Request) -> bool:
    """Return whether *request* can mean a device of the vendor *name*, by what is known of the other devices."""
    if name in VENDORS and request.vendor not in (None, name):
        return False
    if request.devices is not None:
        try:
            resolve(request.devices, snapshot.devices)
        except InvalidRequest:
            return True
        return False
    if not request.models:
        return True
    title = VENDORS[name].title if name in VENDORS else ""
    known = any(device.name and is_one_of_models(device.name, request.models) for device in snapshot.devices)
    return not known or is_one_of_models(title, request.models)


def possible(choice: Choice) -> Choice:
    """Return which devices could ever satisfy the request, and the reasons that will always rule out the others.

    The answer is only as good as the snapshot behind *choice*: a broken or a divided device shows only if HEALTH was
    read.
    """
    lasting = {
        refusal.device.uuid: Refusal(refusal.device, permanent)
        for refusal in choice.refused
        if (permanent := tuple(reason for reason in refusal.reasons if reason.permanent))
    }
    passing = [refusal.device for refusal in choice.refused if refusal.device.uuid not in lasting]
    devices = tuple(sorted((*choice.eligible, *passing), key=_index_order))
    return Choice(devices, devices, tuple(lasting.values()))


def not_enough(snapshot: Snapshot, request: Request, choice: Choice) -> NotEnoughGpus:
    """Return the error that says what was wanted, what stands in the way, and what to do.

    It is an ImpossibleRequest if waiting cannot help.  It never is if the HEALTH of a device in the snapshot is still
    unread, because that device may turn out to be divided into more.
    """
    could = possible(choice)
    read = all(device.problems is not None for device in snapshot.devices)
    if read and len(_usable(could.devices, request)) < request.num_gpus:
        available = len(_usable(choice.eligible, request)) or min(1, _lone_instances(choice))
        return _never(request, could, available)
    lasting = {refusal.device.uuid for refusal in could.refused}
    passing = [refusal for refusal in choice.refused if refusal.device.uuid not in lasting]
    usable = len(_usable(choice.eligible, request))
    headline = sentence(
        "select.not_free",
        "wanted {count}, but {there} free now.",
        count=_gpus(request.num_gpus),
        there=nsentence("select.only_is", "only {number} is", "only {number} are", usable)
        if usable
        else sentence("select.none_is", "none is"),
    )
    outer = [f"  {limit}" for limit in _outer_limits(could)]
    reasons = [*outer, *_explained(passing), *_mixed(choice.eligible)]
    return NotEnoughGpus(headline, request.num_gpus, usable, choice.refused, reasons=reasons, see=_see(request))


def waiting_error(wanted: int, why: str = "", missing: NotEnoughGpus | None = None) -> NotEnoughGpus:
    """Return the error of a request that waits: *why*, and below it the reasons of *missing* if they are known."""
    first = sentence("select.wanted", "wanted {count}.", count=_gpus(wanted))
    if why:
        first = sentence("select.wanted_but", "wanted {count}: {why}.", count=_gpus(wanted), why=why)
    error = NotEnoughGpus.under(first, missing) if missing else NotEnoughGpus(first, wanted)
    error.brief = translated(why)
    return error


def instances_note(devices: Sequence[Device], request: Request) -> str | None:
    """Return a note on a claim of several MIG instances, or None if it is none, or if the request allows several."""
    if request.allow_mig_set or len(devices) < 2 or usable_with_others(devices):
        return None
    return _(
        "these are {devices} MIG instances, of which one process can use only one: start one process "
        "for each, or ask for one larger instance with --mig."
    ).format(devices=len(devices))


def refusal_text(refusal: Refusal, devices: Sequence[Device] = ()) -> str:
    """Return, for example, ``"GPU 2: claimed by bob, 5m ago: python train.py; 12.0GiB in use"``, for the user.

    With *devices* it names all of them, which are refused for the same reasons.
    """
    titles = all_of(map(device_title, devices or (refusal.device,)), ", ")
    reasons = all_of(reason.text for reason in refusal.reasons)
    return translated(all_of((titles, reasons), ": "))


def _gpus(count: int) -> str:
    return nsentence("count.gpus", "{number} GPU", "{number} GPUs", count)


def claimed_by(claims: Sequence[ClaimRecord], now: float) -> dict[str, str]:
    """Return uuid -> "claimed by bob, 2h ago: python train.py", for each device of a living claim."""
    taken: dict[str, str] = {}
    shares: dict[str, list[str]] = {}
    for claim in claims:
        if not claim.alive:
            continue
        ago = ""
        if claim.since is not None:
            ago = sentence("claim.ago", ", {now} ago", now=format_duration(int(now - claim.since)))
        what = f'"{shown(claim.note)}"' if claim.note else shown(" ".join(claim.command or ()))
        text = sentence("claim.claimed", "claimed by {shown}{ago}", shown=shown(claim.user), ago=ago)
        for uuid in claim.devices:
            if is_share_of(claim, uuid):
                part = f" ({format_bytes(claim.memory)})" if claim.memory is not None else ""
                shares.setdefault(uuid, []).append(f"{shown(claim.user)}{part}")
            else:
                taken[uuid] = all_of((text, what), ": ") if what else text
    shared = {uuid: sentence("claim.shared", "shared by {users}", users=", ".join(of)) for uuid, of in shares.items()}
    return shared | taken


def usable_together(devices: Sequence[Device], wanted: int, free: Collection[str] | None = None) -> Sequence[Device]:
    """Return those of *devices* that one job can use together: of one vendor, and either whole GPUs or instances.

    A kind of which *wanted* devices are *free* now comes first, then one that has as many at all, then the kind of the
    first device, then the kind with more devices.  *free* holds uuids, or is None if all are free.
    """
    kinds = [[device for device in devices if _kind(device) == kind] for kind in dict.fromkeys(map(_kind, devices))]

    def rank(kind: Sequence[Device]) -> tuple[bool, bool, bool, int]:
        free_now = len(kind) if free is None else sum(device.uuid in free for device in kind)
        return free_now >= wanted, len(kind) >= wanted, bool(kind) and kind[0] is devices[0], len(kind)

    return max(kinds, key=rank, default=())


def _kind(device: Device) -> tuple[str, bool]:
    return device.vendor, bool(device.parent_uuid)


def _usable(devices: Sequence[Device], request: Request) -> Sequence[Device]:
    if request.most == 1:
        return devices
    if not request.takes_mig_set:  # one instance at most, for a request for one device or more
        devices = usable_with_others(devices) or devices[:1]
    return usable_together(devices, request.num_gpus)


def _lone_instances(choice: Choice) -> int:
    """Return how many MIG instances a request for one device could have, but one for several devices cannot."""
    return sum({reason.option for reason in refusal.reasons} == {MIG_SET} for refusal in choice.refused)


def _tier(device: Device, terms: Terms, nodes: Mapping[int | None, int], *, is_empty: bool) -> tuple[float, ...]:
    """Return a device's tier: devices of one tier are equally good for this request, and smaller is better.

    *nodes* counts the eligible devices of each NUMA node; *is_empty* is whether no more is in use than on an idle one.
    """
    request, free = terms.request, device.memory_free
    of_host, last = bool(device.memory_shared_with_host), len(terms.preferred)
    preferred = min(terms.preferred.get(uuid, last) for uuid in (device.uuid, device.parent_uuid or ""))
    # The memory of a host is large, and slow beside a GPU's own.
    first = free is None, preferred, of_host
    if request.strategy == "first":
        return *first, device.index
    load = (device.utilization is None, (device.utilization or 0) // _UTILIZATION_GRAIN)
    if request.share:
        # Of equally idle devices take one that is shared already, so that whole devices stay whole.
        sharing = terms.sharing_of(device)
        left, unshared = (memory_left(device, sharing) or 0) // _GRAIN, not sharing.count
        in_pack, spread = (unshared, left, *load), (*load, unshared, -left)
        return *first, *(in_pack if request.strategy == "pack" else spread)
    # The memory in use on an idle device differs by some MiB from day to day.  Such a device counts as empty, so that
    # noise never decides.
    room = ((device.memory_total if is_empty and not of_host else None) or free or 0) // _GRAIN
    if request.strategy == "pack":
        crowd = len(terms.snapshot.devices) if device.numa_node is None else nodes[device.numa_node]
        return *first, room, *load, crowd
    in_use, has_no_list, others = occupancy(device, terms)
    return *first, load[0], in_use, -room, load[1], has_no_list, others


def _tie(device: Device) -> tuple[float, float, float, tuple[int, int, int, int, str]]:
    """Return what decides within a tier, after the connections: health marks, temperature, the highest index."""
    marks = (
        device.retired_pages,
        device.remapped_rows,
        device.ecc_uncorrected_aggregate,
        device.ecc_uncorrected_volatile,
    )
    hot = float("inf") if device.temperature is None else device.temperature // _TEMPERATURE_GRAIN
    place = _index_order(device)
    return (sum(bool(mark) for mark in marks), float(None in marks), hot, (-place[0], *place[1:]))


def _index_order(device: Device) -> tuple[int, int, int, int, str]:
    """Return a key that sorts by index; the instances of a GPU come behind it in the order of the driver."""
    return (
        device.index,
        device.parent_uuid is not None,
        device.gpu_instance_id or 0,
        device.compute_instance_id or 0,
        device.uuid,
    )


def _never(request: Request, could: Choice, available: int) -> ImpossibleRequest:
    alone, kinds = _lone_instances(could), set(map(_kind, could.devices))
    fit = len(_usable(could.devices, request)) or min(1, alone)
    lacking = {reason.option for refusal in could.refused for reason in refusal.reasons}
    asked = [option for option in options_of(request) if option.split()[0] in lacking]
    names = list(dict.fromkeys(option.split()[0] for option in asked))
    faults = [refusal for refusal in could.refused if not any(reason.option for reason in refusal.reasons)]
    outer = _outer_limits(could)
    there = sentence(
        "select.exist",
        "{there}{condition}",
        there=nsentence("select.only_exist", "only {number} exists", "only {number} exist", fit)
        if fit
        else sentence("select.none_exists", "none exists"),
        condition=_condition(asked, several=len(kinds) > 1, limited=bool(faults or outer)),
    )
    if alone and not asked:
        there = sentence("select.only_one", "one process can use only {count} here", count=fit)
    sizes = [size for name in names for size in _SIZES if size == name]
    largest: Mapping[str, int] = {size: _largest(request, could, size) for size in sizes}
    droppable = [name for name in names if name != "--memory" and not largest.get(name)]
    models = Counter(shown(device.name) for device in _only_lacking(could, "--model") if device.name)
    enough = [f"'{name}'" for name, count in models.most_common(_MOST_FACTS) if count >= request.num_gpus]
    advice = [_("ask for {count}").format(count=fit)] if fit else []
    advice += [
        _("ask for at most {size} ({option})").format(size=format_bytes_within(size), option=option)
        for option, size in largest.items()
        if size
    ]
    advice += [_("drop {options}").format(options=_(" or ").join(droppable))] if droppable else []
    advice += [_("ask for --model {models}").format(models=_(" or ").join(enough))] if enough else []
    advice += [_("ask for less --memory")] if largest.get("--memory") == 0 else []
    if alone >= request.num_gpus:
        advice.append(_("add {mig_set} if a launcher starts one process for each instance").format(mig_set=MIG_SET))
    hint = _(", or ").join(advice)
    return ImpossibleRequest(
        sentence("select.never", "wanted {count}, but {there}.", count=_gpus(request.num_gpus), there=there),
        request.num_gpus,
        available,
        could.refused,
        reasons=[
            *(f"  {limit}" for limit in outer),
            *_explained(faults),
            *_lacking(could),
            *_profiles(request, could),
            *_mixed(could.devices),
        ],
        advice=_("{advice}.").format(advice=hint[:1].upper() + hint[1:]) if hint else "",
        see=_see(request),
    )


def _condition(asked: Sequence[str], *, several: bool, limited: bool) -> str:
    """Return what the devices that exist do, to be counted, or ""."""
    if asked:
        return sentence("select.satisfy", " that can satisfy {asked}", asked=" ".join(asked))
    if several:
        return sentence("select.together", " that one job can use together")
    return sentence("select.usable", " that can be used") if limited else ""


def _see(request: Request) -> str:
    return _("`gpuguard explain {spelled}` shows each GPU.").format(spelled=spelled(request))


def _outer_limits(could: Choice) -> list[str]:
    """Say in words what leaves only some devices to this process, such as CUDA_VISIBLE_DEVICES."""
    reasons = (reason for refusal in could.refused for reason in refusal.reasons if reason.option == "outer limit")
    return list(dict.fromkeys(translated(reason.text) for reason in reasons))


def _largest(request: Request, could: Choice, option: RefusalKey) -> int:
    """Return the largest size of *option* with which there would be enough devices, or 0 if no size helps by itself."""
    devices = _usable([*could.devices, *_only_lacking(could, option)], request)
    sizes = sorted((_SIZES[option](device) or 0 for device in devices), reverse=True)
    return sizes[request.num_gpus - 1] if len(sizes) >= request.num_gpus else 0


def _only_lacking(could: Choice, option: RefusalKey) -> list[Device]:
    return [refusal.device for refusal in could.refused if {reason.option for reason in refusal.reasons} == {option}]


def _explained(refusals: Sequence[Refusal], most: int = 16) -> list[str]:
    """Say why devices are refused, in at most *most* lines: those with the same reasons share one."""
    alike = grouped((tuple(reason.text for reason in refusal.reasons), refusal) for refusal in refusals)
    groups = list(alike.values())
    lines = [f"  {refusal_text(group[0], [refusal.device for refusal in group])}" for group in groups[:most]]
    left = sum(map(len, groups[most:]))
    return lines + ([_("  and {count} more").format(count=left)] if left else [])


def _lacking(could: Choice) -> list[str]:
    """Say what the devices have instead of what is asked for: ``"  its model is NVIDIA L40S (4 GPUs)"``."""
    own_words = ("", "outer limit", "--devices", "--exclude", "--mig")  # said elsewhere, or typed by the user
    reasons = (reason for refusal in could.refused for reason in refusal.reasons if reason.option not in own_words)
    counts = Counter(reason.text for reason in reasons)
    lines = [
        _("  {text} ({count})").format(text=translated(text), count=format_count(count, "GPU"))
        for text, count in counts.most_common(_MOST_FACTS)
    ]
    return lines + (
        [_("  and {count} more").format(count=len(counts) - len(lines))] if len(counts) > len(lines) else []
    )


def _profiles(request: Request, could: Choice) -> list[str]:
    """Say which MIG profiles there are, for a request that names another one."""
    if request.mig is None:
        return []
    every = [*could.devices, *(refusal.device for refusal in could.refused)]
    names = [device.mig_profile or "unknown" for device in every if device.parent_uuid]
    if not names:
        return [_("  no GPU here is divided into instances (an administrator does it: nvidia-smi mig, amd-smi set -C)")]
    counts = ", ".join(f"{shown(name)} ({names.count(name)})" for name in sorted(set(names)))
    return [_("  the profiles here: {counts}").format(counts=counts)]


def _mixed(devices: Sequence[Device]) -> list[str]:
    divided = [device for device in devices if device.parent_uuid]
    both = []
    if 0 < len(divided) < len(devices):
        whole = format_count(len(devices) - len(divided), "whole GPU")
        instances = translated(instances_title(len(divided), divided[0]))
        text = _("  {whole} and {instances}: one job cannot use both kinds")
        both = [text.format(whole=whole, instances=instances)]
    vendors = Counter(vendor_of(device).title for device in devices)
    counts = ", ".join(f"{format_count(count, 'GPU')} ({title})" for title, count in vendors.items())
    several = _("  {counts}: one job cannot use GPUs of several vendors").format(counts=counts)
    return [*both, *([several] if len(vendors) > 1 else [])]


# Of equally good devices, those with the shortest paths between them work best together.

# How close two devices are, by the driver's names; a pair that is not known counts as the farthest.
LEVELS = {"SYS": 1, "NODE": 2, "PHB": 3, "PXB": 4, "PIX": 5, "NVLINK": 6}
_UNKNOWN, _SAME_GPU = 0, 7

# The most sets that are compared one by one: choosing any number of up to 16 devices makes at most 12870 sets.
MOST_SETS = 13_000


def best_connected(
    fixed: Sequence[Device], pool: Sequence[Device], need: int, topology: Sequence[tuple[str, str, str]]
) -> list[Device]:
    """Return *fixed* and *need* devices of *pool*: the set whose worst connection is best.

    Ties are decided by the sum of all connections, then the fewest NUMA nodes, then the first devices of *pool*.  The
    result is exact up to MOST_SETS sets.  Beyond that, one set is grown from each device of the pool, and the best of
    these is taken.
    """
    devices = [*fixed, *pool]
    links = _links(devices, topology)
    start, rest = tuple(range(len(fixed))), range(len(fixed), len(devices))
    if comb(len(pool), need) <= MOST_SETS:
        sets = [start + more for more in combinations(rest, need)]
    else:
        sets = [_grown(start, seed, rest, need, links) for seed in rest]
    nodes = [device.numa_node if device.numa_node is not None else f"unknown {i}" for i, device in enumerate(devices)]

    def quality(members: tuple[int, ...]) -> tuple[int, int, int]:
        levels = [links[first][second] for first, second in combinations(members, 2)]
        return min(levels), sum(levels), -len({nodes[member] for member in members})

    # max() keeps the first of equals, and the sets come in rank order.
    return [devices[member] for member in max(sets, key=quality)]


def _grown(start: tuple[int, ...], seed: int, rest: range, need: int, links: list[list[int]]) -> tuple[int, ...]:
    members = [*start, seed]
    left = [number for number in rest if number != seed]
    worst = {number: min(links[number][member] for member in members) for number in left}
    total = {number: sum(links[number][member] for member in members) for number in left}
    while len(members) < len(start) + need:
        best = max(left, key=lambda number: (worst[number], total[number], -number))
        members.append(best)
        left.remove(best)
        for number in left:
            worst[number] = min(worst[number], links[number][best])
            total[number] += links[number][best]
    return tuple(sorted(members))


def _links(devices: Sequence[Device], topology: Sequence[tuple[str, str, str]]) -> list[list[int]]:
    known = {}
    for first, second, level in topology:
        known[first, second] = known[second, first] = LEVELS.get(level, _UNKNOWN)
    # The driver knows connections only between GPUs, so a MIG instance has those of its GPU.
    gpus = [device.parent_uuid or device.uuid for device in devices]
    return [[_SAME_GPU if gpu == other else known.get((gpu, other), _UNKNOWN) for other in gpus] for gpu in gpus]
