"""Giving the locks of devices to whoever may have them, where nobody but the daemon can open the lock files.

For machines with hostile users.  Everything that a command elsewhere does of its own free will is done here for it, by
the daemon's own look: denials and quarantines hold, nobody passes the waiting line or a reservation, a device must be
free of processes, and it is all or nothing.  What was given is the job's, and the kernel keeps it as long as the job
has it: the descriptor is locked before it is handed over, and the daemon closes its own.  So a daemon that dies, at
any instant, loses no claim and leaves no lock behind.

Does not listen: see door.  What excludes what: see giving.  A kept descriptor is worth nothing: see grants.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from dataclasses import replace as replace_noun
from typing import Any

from gpuguard.backends import Backend
from gpuguard.claims.directory import Gate, LockDirectory, open_lock, try_flock
from gpuguard.claims.grants import Grant, give, grant_of, names_of, replace_file
from gpuguard.claims.records import probe_in_gate
from gpuguard.claims.restrictions import SET_BACK, Restriction, against, change, read_restrictions
from gpuguard.claims.shares import sharing_of
from gpuguard.claims.slots import slot_names
from gpuguard.daemon.client import MOST_DESCRIPTORS
from gpuguard.daemon.server import Handover
from gpuguard.enforcement import identity
from gpuguard.errors import GpuguardError, InvalidRequest, LockDirectoryError
from gpuguard.model import MEMORY, PROCESSES, Event, Snapshot
from gpuguard.queue import tickets as served
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.explain import in_words, new_ticket, stand
from gpuguard.queue.leader import YOUR_TURN
from gpuguard.queue.priority import PRIORITIES, Ticket
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import QueueState
from gpuguard.queue.tickets import as_request, read_tickets, wake
from gpuguard.request import Request, fields_needed, fields_to_verify
from gpuguard.select import choose
from gpuguard.sharing import Sharing
from gpuguard.users import user_name

# All the locks of one claim or none of them, where the daemon gives them: of devices, of parts of them, of shares.
#
#     a device, a MIG instance    its lock
#     a share of either           one of its slots, in which stands what was promised to it
#
# No lock is held shared here: whoever was given one could hold it past his claim, and nobody could renew the file.
# So the daemon keeps apart what excludes each other, by the locks that it has given and what stands in them: it is
# the only one who can open the files.  A lock is taken first and everything else looked at then; root takes locks
# himself in the same order, so one of the two sees the other.  Does not decide whose turn it is: see broker.


BY_SOMEBODY = "claimed by somebody just now"
IN_PART = "a part of the device, or the whole of it, is claimed"


def grant_all(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], to: Grant, descriptors: list[int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the locks of the devices *names*, or uuid -> why not.

    Args:
        directory: of the locks.
        snapshot: says which device is a part of which.
        names: uuids.
        to: whose they become; with memory they are shares.
        descriptors: filled with the locked ones; the caller closes them, also when it was refused.
    """
    given: list[str] = []
    with Gate(directory):
        for name in names:
            own = replace(to, parent=_parent(snapshot, name, None))
            lock = (
                _give_slot(directory, name, own, descriptors) if to.memory else _give(directory, name, own, descriptors)
            )
            if lock is None:
                return (), {name: "it has no slot left" if to.memory else BY_SOMEBODY}
            given.append(lock)
        refused = conflicts(directory, snapshot, names, given, shared=to.memory is not None)
        if not refused and to.memory is None:
            for name in names:
                # What an earlier owner's jobs have locked inside of it must not stand in this one's way.
                replace_file(directory, f"{name}.nested")
    return tuple(given), refused


def conflicts(
    directory: LockDirectory, snapshot: Snapshot | None, names: Sequence[str], own: Collection[str], *, shared: bool
) -> dict[str, str]:
    """uuid -> why it cannot be had, of the devices *names*, by the locks of others; the caller has the gate.

    Args:
        directory: of the locks.
        snapshot: says which device is a part of which; None when that does not matter yet.
        names: uuids.
        own: names of locks that are not others'.
        shared: whether shares of them are wanted.
    """
    held = grant_of(
        directory, [name for name in names_of(directory) if name not in own and not name.endswith(".nested")]
    )
    found: dict[str, str] = {}
    for lock, grant in held.items():
        uuid = lock.partition(".slot")[0]
        is_slot = lock != uuid
        for name in names:
            if uuid == name and not (is_slot and shared):
                found[name] = "shared by others just now" if is_slot else BY_SOMEBODY
                continue
            is_part = snapshot and _parent(snapshot, uuid, grant) == name
            is_whole = snapshot and _parent(snapshot, name, None) == uuid
            if is_part or (is_whole and (is_slot or grant or _is_alone(directory, uuid))):
                found[name] = IN_PART
    return found


def sharing_beside(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], own: Collection[str]
) -> dict[str, Sharing]:
    """uuid -> who else shares the device, by what was given to them; *own* slots do not count."""
    devices = tuple(device for device in snapshot.devices if device.uuid in names)
    here, found = replace_noun(snapshot, devices=devices, claims=()), dict[str, Sharing]()
    for holders in (False, True):  # all of /proc only where a process is nobody's without it
        with Gate(directory):
            records = probe_in_gate(directory, names, holders=holders)
        # What a record says of its own processes is anybody's word.
        claims = [
            replace_noun(one, pid=None, slots=tuple(slot for slot in one.slots if slot not in own)) for one in records
        ]
        found = sharing_of(here, claims)
        if all(
            found[each.uuid].belongs(one.pid) for each in devices if each.uuid in found for one in each.processes or ()
        ):
            break
    return found


def _give(directory: LockDirectory, name: str, to: Grant, descriptors: list[int]) -> str | None:
    descriptor = give(directory, name, to)
    if descriptor is None:
        return None
    descriptors.append(descriptor)
    return name


def _give_slot(directory: LockDirectory, name: str, to: Grant, descriptors: list[int]) -> str | None:
    return next((slot for slot in slot_names(name) if _give(directory, slot, to, descriptors)), None)


def _parent(snapshot: Snapshot, name: str, grant: Grant | None) -> str | None:
    """The GPU of which it is a part, as the driver shows it or did when it was given."""
    device = snapshot.device(name)
    return device.parent_uuid if device else grant.parent if grant else None


def _is_alone(directory: LockDirectory, name: str) -> bool:
    """Whether root, who took it himself, has all of the device, not a part of it."""
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True
    try:
        return not try_flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


_MAX_SECONDS = 10 * 365 * 86400.0
OFFER_SECONDS = 5.0  # a request that may start, is told so, and does not claim within so many goes to the end
SET_BACK_SECONDS = 3600.0  # for so long; the second time within them all requests of its user do


class Broker:
    """Who takes all the locks of *directory*.

    Args:
        directory: whose lock files are this process's alone.
        open_backend: called once, for looks of its own: those of the watchdog may be seconds old.
    """

    def __init__(self, directory: LockDirectory, open_backend: Callable[[], Backend]) -> None:
        self._directory, self._open_backend = directory, open_backend
        self._backend: Backend | None = None
        self._offers: dict[str, float] = {}  # id of a ticket that may start -> since when, monotonic

    def trouble(self) -> str | None:
        """Why it cannot give locks, in words."""
        if os.access(self._directory.locks, os.W_OK, effective_ids=True):
            return None
        return (
            f"{self._directory.locks} cannot be written, so no locks can be given: run `sudo gpuguard setup --broker` "
            f"again, and see that the service has ReadWritePaths={self._directory.locks}."
        )

    def tend(self) -> None:
        """Make anew what was given away and is free again."""
        with Gate(self._directory):
            grant_of(self._directory, names_of(self._directory))

    def watch_offers(self, snapshot: Snapshot) -> list[Event]:
        """Set back who keeps devices from others by never claiming what is offered, and say so; call it every second.

        Args:
            snapshot: the last look at the machine.
        """
        line, now = stand(self._directory, snapshot, read_queue_settings().rules), time.monotonic()
        offered = [place for place in line.places if place.now]
        # The leader may be hostile, and an offer that nobody has heard of cannot be taken.
        wake(self._directory, [place.ticket for place in offered], YOUR_TURN)
        since = {place.ticket.id: self._offers.get(place.ticket.id, now) for place in offered}
        refused = [place for place in offered if now - since[place.ticket.id] >= OFFER_SECONDS]
        self._offers = {name: now if now - began >= OFFER_SECONDS else began for name, began in since.items()}
        return [event for place in refused if (event := self._set_back(place))]

    def _set_back(self, place: QueuePosition) -> Event | None:
        """Write down that the request has not taken its offer; None where it, or its user, is set back already."""
        ticket, now = place.ticket, time.time()
        user, before = str(ticket.whose), read_restrictions(self._directory, SET_BACK, now)
        if user in before or ticket.id in before:
            return None
        reason = f"did not claim {len(place.devices)} GPU{'s' * (len(place.devices) != 1)} within {OFFER_SECONDS:.0f}s"
        again = any(mark.user == user for mark in before.values())
        name = user if again else ticket.id
        mark = Restriction(name, now, now + SET_BACK_SECONDS, reason, "the daemon", user)
        change(self._directory, SET_BACK, lambda marks: marks.update({name: mark}))
        what = "all its requests go" if again else "it goes"
        message = f"a request of {ticket.user} {reason}, though they were offered to it: {what} to the end of the queue"
        facts = (("uid", ticket.uid), ("ticket", ticket.id), ("seconds", SET_BACK_SECONDS))
        outcome = "user set back" if again else "request set back"
        return Event(now, "queue", outcome, ticket.user, place.devices, ticket.pid, None, message, facts)

    def claims(self) -> dict[str, Any]:
        """Which locks are held, and to whom they were given."""
        with Gate(self._directory):
            held = grant_of(self._directory, names_of(self._directory))
        rows = {name: grant and [grant.uid, grant.claim, grant.memory, grant.most] for name, grant in held.items()}
        return {"held": rows}

    def claim(self, uid: int, asked: Mapping[str, Any]) -> Mapping[str, Any] | Handover:
        """The locks of the devices that *uid* asks for, all of them, or why not.

        Raises:
            GpuguardError: it makes no sense, or nobody can tell now.
        """
        if uid == identity.overflow_uid():
            raise GpuguardError("who you are is not known here: you are in a user namespace of your own.")
        names = _names(asked)
        try:
            if asked.get("inside") is not None:
                return self._inside(uid, names, str(asked["inside"]))
            return self._outside(uid, names, asked)
        except OSError as error:
            raise GpuguardError(f"the daemon cannot give locks now: {error.strerror}.") from error

    def close(self) -> None:
        """Look no more."""
        if self._backend:
            self._backend.close()

    def _outside(self, uid: int, names: list[str], asked: Mapping[str, Any]) -> Mapping[str, Any] | Handover:
        mine = self._ticket(uid, names, asked)
        if not mine.requests:
            return _refused(dict.fromkeys(names, "that is not what you wait for"))
        shared = any(way.share for way in mine.requests)
        if refused := against(self._directory, names, uid, time.time()) or self._held(names, shared=shared):
            return _refused(refused)
        snapshot = self._sample(mine)
        if strange := [name for name in names if snapshot.device(name) is None]:
            return _refused(dict.fromkeys(strange, "the driver does not show it"))
        line = stand(self._directory, snapshot, read_queue_settings().rules, mine)
        way, refused = _due(line, names, mine)
        if refused:
            return _refused(refused)
        answer = self._given(uid, names, way, snapshot)
        self._offers.pop(mine.id, None)  # it has tried to take its offer
        if isinstance(answer, Handover) and len(line.places) > 1:
            served.note(self._directory, uid, by_daemon=True)
        return answer

    def _held(self, names: list[str], *, shared: bool) -> dict[str, str]:
        with Gate(self._directory):
            return conflicts(self._directory, None, names, (), shared=shared)

    def _given(self, uid: int, names: list[str], way: Request, snapshot: Snapshot) -> Mapping[str, Any] | Handover:
        grant, descriptors = Grant(uid, os.urandom(4).hex(), way.memory, way.most_sharers), list[int]()
        try:
            locks, refused = grant_all(self._directory, snapshot, names, grant, descriptors)
            refused = refused or self._seen(names, way, snapshot, locks)
        except BaseException:
            _close(descriptors)
            raise
        if refused:
            _close(descriptors)
            return _refused(refused)
        return Handover({"claim": grant.claim, "locks": locks}, tuple(descriptors))

    def _sample(self, mine: Ticket) -> Snapshot:
        if self._backend is None:
            self._backend = self._open_backend()
        waiting, _ = read_tickets(self._directory)
        ways = [way for ticket in (mine, *waiting) for way in ticket.requests]
        return self._backend.sample({MEMORY, PROCESSES}.union(*map(fields_needed, ways)))

    def _ticket(self, uid: int, names: list[str], asked: Mapping[str, Any]) -> Ticket:
        """The place that he has in line; else one at its end, by his own word, as that of everybody who waits.

        It asks for these devices alone: his turn on others of them does not let him have what somebody else waits for.
        """
        if name := asked.get("ticket"):
            tickets, _ = read_tickets(self._directory)
            mine = next((one for one in tickets if (one.id, one.uid) == (name, uid)), None)
            if mine is None:
                raise GpuguardError("you have no such place in line.")
            count, alone = len(names), len(tickets) == 1
            ways = [way for way in mine.requests if way.num_gpus <= count <= (way.most if alone else way.num_gpus)]
            return replace(mine, requests=tuple(dict.fromkeys(_named(way, names, uid) for way in ways)))
        try:
            way = as_request(dict(asked.get("conditions") or {}))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"the conditions cannot be understood: {error}") from error
        own = new_ticket(
            [_named(way, names, uid)],
            priority=int(_number(asked, "priority", min(PRIORITIES.values()), max(PRIORITIES.values())) or 0),
            time_limit=_number(asked, "time_limit_seconds", 0, _MAX_SECONDS),
            expected=_number(asked, "expected_seconds", 0, _MAX_SECONDS),
        )
        return replace(own, uid=uid, user=user_name(uid), pid=None)

    def _seen(self, names: list[str], way: Request, snapshot: Snapshot, locks: Sequence[str]) -> dict[str, str]:
        """uuid -> what is against it; behind the locks, so that whatever happened before them shows."""
        assert self._backend is not None
        fresh = self._backend.sample(fields_to_verify(way), names)
        if gone := set(names) - {device.uuid for device in fresh.devices}:
            return dict.fromkeys(gone, "the driver does not show it any more")
        now = snapshot.updated(fresh)
        # All shares with their locks are counted, so of two that come at once neither is overlooked.
        sharing = sharing_beside(self._directory, now, names, locks) if way.share else {}
        choice = choose(now, way, {}, sharing)
        if {device.uuid for device in choice.devices} == set(names):
            return {}
        against_it = {each.device.uuid: "; ".join(reason.text for reason in each.reasons) for each in choice.refused}
        found = {name: against_it[name] for name in names if name in against_it}
        return found or dict.fromkeys(names, "they cannot be had together")

    def _inside(self, uid: int, names: list[str], outer: str) -> Mapping[str, Any] | Handover:
        """Locks inside a claim, for its owner alone: they exclude its other commands and nobody else."""
        grant, descriptors = Grant(uid, f"{outer}.{os.urandom(4).hex()}"), list[int]()
        try:
            with Gate(self._directory):
                held = grant_of(self._directory, names)
                if any(_whose(held.get(name)) != (uid, outer) for name in names):
                    raise GpuguardError("these devices are not yours by that claim.")
                for name in names:
                    descriptor = give(self._directory, f"{name}.nested", grant)
                    if descriptor is None:
                        _close(descriptors)
                        return _refused({name: f"used by another command inside the claim {outer}"})
                    descriptors.append(descriptor)
        except BaseException:
            _close(descriptors)
            raise
        return Handover({"claim": grant.claim, "locks": [f"{name}.nested" for name in names]}, tuple(descriptors))


def _due(line: QueueState, names: list[str], mine: Ticket) -> tuple[Request, dict[str, str]]:
    """What he may have now, and uuid -> why not, by the daemon's own look at the line."""
    place = line.of(mine.id)
    if place is None or not place.now or place.request is None:
        why = f"it is not your turn: {in_words(place, line)}" if place else "it is not your turn"
        return mine.requests[0], dict.fromkeys(names, why)
    kept = line.kept_from(mine.id)
    return place.request, {name: kept[name] for name in names if name in kept}


def _names(asked: Mapping[str, Any]) -> list[str]:
    names = asked.get("devices")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise InvalidRequest("say which devices, by their uuids.")
    if not 0 < len(names) <= MOST_DESCRIPTORS or len(set(names)) < len(names):
        raise InvalidRequest(f"name 1 to {MOST_DESCRIPTORS} devices, each of them once.")
    return names


def _named(way: Request, names: Sequence[str], uid: int) -> Request:
    """*way* for these devices; nobody can have processes overlooked that are not his."""
    everywhere: dict[str, Any] = {"within": None, "within_reason": "", "exclude": (), "prefer": (), "max_gpus": None}
    mine_as_free = way.mine_as_free & {uid}
    return replace_noun(way, num_gpus=len(names), devices=tuple(names), mine_as_free=mine_as_free, **everywhere)


def _number(asked: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    value = asked.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"{key} is no number that makes sense.")
    return float(value)


def _whose(grant: Grant | None) -> tuple[int, str] | None:
    """(uid, claim) of whom a whole device is; a lock beside a share, or inside of an inner one, would be nobody's."""
    whole = grant and grant.memory is None and "." not in grant.claim
    return (grant.uid, grant.claim) if grant and whole else None


def _refused(reasons: Mapping[str, str]) -> dict[str, Any]:
    return {"refused": {name: why[:600] for name, why in reasons.items()}}


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
