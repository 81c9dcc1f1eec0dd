"""The broker, which gives out the locks of devices where only the daemon can open the lock files.

It is for machines with hostile users.  The daemon does here what a command elsewhere does for itself, and decides by
its own sample.  The descriptor is locked before it is handed over, and the daemon closes its own copy, so that a daemon
that dies at any instant loses no claim and leaves no lock behind.

    a device, a MIG instance    its lock
    a share of either           one of its slots, whose file says what was promised to the share

No lock is held shared here, because its owner could hold it beyond the claim, and then the file could not be renewed.
Instead the daemon keeps conflicting claims apart by the locks that it has given and by what their files say.  It takes
a lock first and checks everything else then; root takes locks directly in the same order, so one of the two sees the
other.

This module does not listen: see server.  See claims.grants for what makes a used descriptor worthless.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from gpuguard.backends import Backend
from gpuguard.claims.claim import sharing_of
from gpuguard.claims.daemon_client import MAX_DESCRIPTORS, GrantReply
from gpuguard.claims.directory import Gate, LockDirectory, open_lock, try_flock
from gpuguard.claims.grants import Grant, grant_of, lock_for, names_of, replace_file
from gpuguard.claims.records import probe_in_gate, slot_names
from gpuguard.claims.restrictions import SET_BACK, Restriction, change, read_restrictions, restrictions_against
from gpuguard.daemon.socket_server import DescriptorReply, Reply
from gpuguard.eligibility import Sharing
from gpuguard.errors import GpuguardError, InvalidRequest, LockDirectoryError
from gpuguard.files import close_all, closed_after
from gpuguard.locale.messages import Sentence, all_of, cut, nsentence, sentence
from gpuguard.model import MEMORY, MODEL, PROCESSES, Event, Snapshot
from gpuguard.queue.leader import MAY_START
from gpuguard.queue.priority import PRIORITIES, Ticket
from gpuguard.queue.reasons import kept_for_others, start_text
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import QueueState, WaitingTickets, queue_state, read_queue_facts, used_by
from gpuguard.queue.tickets import (
    LONGEST_SECONDS,
    as_request,
    has_started,
    new_ticket,
    read_ticket,
    read_tickets,
    record_start,
    wake,
)
from gpuguard.request import Request, fields_needed, fields_to_verify
from gpuguard.select import choose
from gpuguard.users import accountable_uid, user_name

CLAIMED = sentence("claimed.now", "claimed just now")
PART_CLAIMED = sentence("claimed.part", "a part of the GPU, or the whole of it, is claimed")
SHARED = sentence("claimed.shared", "shared by others just now")
THE_DAEMON = sentence("by.daemon", "the daemon")
MOST = 600  # characters of the reason why a device is refused
OFFER_SECONDS = 5.0  # a request that may start and was woken goes to the end of the queue if it has not claimed by then
LEAST_SECONDS = 60.0  # of fair share that a grant costs for each device, however short it was
SET_BACK_SECONDS = 3600.0  # how long it stays there; the second time within this, all requests of its user go there
COUNT_SECONDS, BUSY_SECONDS = 60.0, 20.0  # the administrator is told of users whose requests take 20 of these 60 s


class Broker:
    """Gives out the locks of *directory* by samples of its own, because those of the watchdog may be seconds old."""

    def __init__(self, directory: LockDirectory, open_backend: Callable[[], Backend]) -> None:
        self._directory, self._open_backend = directory, open_backend
        self._backend: Backend | None = None
        self._offers: dict[str, float] = {}  # id of a ticket that may start -> since when, monotonic
        # (ticket, uuids, id of the claim, unix time) of what was given to tickets since the last tend().
        self._given: list[tuple[Ticket, tuple[str, ...], str, float]] = []
        self._used = set[str]()  # ids of tickets that were given locks and are still there
        self._charged: dict[int, float] = {}  # uid -> GPU-seconds that grants cost besides what was used
        self._decayed_at = self._counted_at = time.monotonic()
        self._spent = defaultdict[int, float](float)  # user -> seconds that their requests took since then
        self._busy: Collection[int] = ()  # users whose requests took long in the minute before

    def trouble(self) -> str | None:
        """Return why the broker cannot give locks, in words, or None if it can."""
        if os.access(self._directory.locks, os.W_OK, effective_ids=True):
            return None
        return (
            f"{self._directory.locks} cannot be written, so no locks can be given: run `sudo gpuguard setup --broker` "
            f"again, and see that the service has ReadWritePaths={self._directory.locks}."
        )

    def remove_leftovers(self) -> None:
        """Remove the unfinished files of a broker that was killed.  Call this before any lock is given."""
        with Gate(self._directory):
            for name in os.listdir(self._directory.locks):
                if name.endswith(".new"):
                    os.unlink(os.path.join(self._directory.locks, name))

    def tend(self) -> list[Event]:
        """Replace locks that were given away and are free again; set back users who return GPUs that they waited for.

        Call this every second.
        """
        with Gate(self._directory):
            grants = grant_of(self._directory, names_of(self._directory))
        living = {grant.claim for grant in grants.values() if grant}
        given, self._given, events = self._given, [], list[Event | None]()
        for ticket, devices, claim, since in given:
            if claim not in living and not has_started(self._directory, ticket.uid, since):
                events.append(self._set_back(ticket, devices, gave_back=True))
        self._used -= {
            name for name in [*self._used] if not read_ticket(self._directory, int(name.partition(".")[0]), name)
        }
        if time.monotonic() - self._counted_at >= COUNT_SECONDS:
            spent, self._spent, self._counted_at = self._spent, defaultdict(float), time.monotonic()
            before, self._busy = self._busy, [uid for uid, seconds in spent.items() if seconds >= BUSY_SECONDS]
            events += [_busy_event(uid, spent[uid]) for uid in self._busy if uid not in before]
        return [event for event in events if event]

    def _charge(self, uid: int, seconds: float) -> None:
        """Count GPU-seconds in fair share besides what was used; what was charged before decays as usage does."""
        now, half_life = time.monotonic(), read_queue_settings(self._directory).rules.half_life
        left, self._decayed_at = 0.5 ** ((now - self._decayed_at) / half_life), now
        self._charged = {user: charged * left for user, charged in self._charged.items()}
        self._charged[uid] = self._charged.get(uid, 0.0) + seconds

    def _queue(
        self, snapshot: Snapshot, mine: Ticket | None = None, waiting: WaitingTickets | None = None
    ) -> QueueState:
        """Return the queue as the daemon decides it: a ticket starts only once, and each grant costs, however short."""
        rules = read_queue_settings(self._directory).rules
        facts = read_queue_facts(self._directory, snapshot, rules)
        used = used_by(facts.claims, time.time()) if facts.usage is None else facts.usage
        usage = {uid: used.get(uid, 0.0) + self._charged.get(uid, 0.0) for uid in used.keys() | self._charged.keys()}
        facts = replace(facts, usage=usage, set_back=facts.set_back | self._used)
        return queue_state(self._directory, snapshot, facts, rules, mine, waiting)

    def watch_offers(self, snapshot: Snapshot | None) -> list[Event]:
        """Set back requests that do not claim what is offered to them.

        Call this every second with the latest snapshot, or with None if the driver does not answer and so no request
        can claim.
        """
        if snapshot is None:
            self._offers.clear()
            return []
        queue, now = self._queue(snapshot), time.monotonic()
        offered = [position for position in queue.positions if position.now]
        # The leader may be hostile and not wake them, and a request cannot take an offer that it does not know of.
        wake(self._directory, [position.ticket for position in offered], MAY_START)
        since = {position.ticket.id: self._offers.get(position.ticket.id, now) for position in offered}
        refused = [position for position in offered if now - since[position.ticket.id] >= OFFER_SECONDS]
        self._offers = {name: now if now - began >= OFFER_SECONDS else began for name, began in since.items()}
        events = [self._set_back(position.ticket, position.devices, gave_back=False) for position in refused]
        return [event for event in events if event]

    def _set_back(self, ticket: Ticket, devices: tuple[str, ...], *, gave_back: bool) -> Event | None:
        """Record why the request is set back to the end; return the event, or None if it or its user already is."""
        now = time.time()
        user, before = str(ticket.owner), read_restrictions(self._directory, SET_BACK, now)
        if user in before or ticket.id in before:
            return None
        again = any(restriction.user == user for restriction in before.values())
        name = user if again else ticket.id
        words = {"count": nsentence("count.gpus", "{number} GPU", "{number} GPUs", len(devices)), "user": ticket.user}
        words["time"] = f"{OFFER_SECONDS:.0f}s"
        reason, message = (_gave_back if gave_back else _did_not_claim)(words, again)
        restriction = Restriction(name, now, now + SET_BACK_SECONDS, reason, THE_DAEMON, user)
        change(self._directory, SET_BACK, lambda restrictions: restrictions.update({name: restriction}))
        return Event(
            time=now,
            kind="queue",
            outcome="user set back" if again else "request set back",
            user=ticket.user,
            devices=devices,
            pid=ticket.pid,
            claim=None,
            message=message,
            facts=(("uid", ticket.uid), ("ticket", ticket.id), ("seconds", SET_BACK_SECONDS)),
        )

    def claims(self) -> dict[str, Any]:
        """Return which locks are held, and to whom they were given."""
        with Gate(self._directory):
            held = grant_of(self._directory, names_of(self._directory))
        return {"held": {name: grant and list(vars(grant).values()) for name, grant in held.items()}}

    def claim(self, uid: int, message: Mapping[str, Any]) -> Reply:
        """Return the locks of all devices that *uid* requests, or why they are refused.

        Raises:
            GpuguardError: the request makes no sense.
        """
        names, began = _device_names(message), time.monotonic()
        try:
            if message.get("inside") is not None:
                return self._claim_inside(uid, names, str(message["inside"]))
            return self._claim(uid, names, message)
        except OSError as error:
            raise GpuguardError(
                sentence("broker.no_locks_now", "the daemon cannot give locks now: {error}.", error=str(error.strerror))
            ) from error
        finally:
            self._spent[accountable_uid(uid)] += time.monotonic() - began

    def close(self) -> None:
        """Close the driver."""
        if self._backend:
            self._backend.close()

    def _claim(self, uid: int, names: list[str], message: Mapping[str, Any]) -> Reply:
        ticket = self._ticket(uid, names, message)
        if not ticket.requests:
            return _refusal(dict.fromkeys(names, sentence("broker.other_wish", "that is not what you wait for")))
        refused = restrictions_against(self._directory, names, uid, time.time())
        if not refused:
            with Gate(self._directory):
                shared = any(request.share for request in ticket.requests)
                refused = conflicts(self._directory, None, names, (), shared=shared)
        if refused:
            return _refusal(refused)
        snapshot, needed = self._sample(ticket.requests)
        if unknown := [name for name in names if snapshot.device(name) is None]:
            return _refusal(dict.fromkeys(unknown, sentence("driver.not_shown", "the driver does not show it")))
        # A request that cannot be met now is refused before the queue is read and planned, which costs others time.
        if refused := _unfit(names, ticket.requests, snapshot):
            return _refusal(refused)
        waiting = read_tickets(self._directory)
        requests = [request for waiter in waiting[0] for request in waiter.requests]
        if not all(fields_needed(request) <= needed for request in requests):
            snapshot, _ = self._sample([*ticket.requests, *requests])
        # Decide by the daemon's own view of the queue what the ticket may have now.
        queue = self._queue(snapshot, ticket, waiting)
        position, kept = queue.of(ticket.id), kept_for_others(queue, ticket.id)
        if not kept.keys().isdisjoint(names):
            return _refusal(kept)
        if not position.now or position.request is None:
            turn = sentence("broker.not_your_turn", "it is not your turn: {why}", why=start_text(position, queue))
            return {**_refusal(dict.fromkeys(names, turn)), "later": True}
        reply = self._grant(uid, names, position.request, snapshot)
        self._offers.pop(ticket.id, None)  # it has tried to take its offer
        if isinstance(reply, DescriptorReply):
            self._charge(uid, LEAST_SECONDS * len(names))
            if ticket.id:
                self._used.add(ticket.id)
                self._given.append((position.ticket, tuple(names), reply.content["claim"], time.time()))
            if len(queue.positions) > 1:
                record_start(self._directory, uid, by_daemon=True)
        return reply

    def _grant(self, uid: int, names: list[str], request: Request, snapshot: Snapshot) -> Reply:
        grant = Grant(
            uid, os.urandom(4).hex(), request.memory, request.most_sharers, max_processes=request.max_processes
        )
        descriptors = list[int]()
        with ExitStack() as stack:
            stack.callback(close_all, descriptors)
            locks, refused = lock_all(self._directory, snapshot, names, grant, descriptors)
            if refused := refused or self._verify(names, request, snapshot, locks):
                return _refusal(refused)
            stack.pop_all()
        return DescriptorReply(asdict(GrantReply(grant.claim, locks)), tuple(descriptors))

    def _sample(self, requests: Iterable[Request]) -> tuple[Snapshot, set[str]]:
        """Return a sample of what a plan of these requests needs, and the field groups that are in it."""
        self._backend = self._backend or self._open_backend()
        needed = {MEMORY, PROCESSES, MODEL}.union(*map(fields_needed, requests))
        return self._backend.sample(needed), needed

    def _ticket(self, uid: int, names: list[str], message: Mapping[str, Any]) -> Ticket:
        """Return the ticket of *uid* in the queue, or else one at its end with the values of the message, as all have.

        It requests these devices alone: if it could start on other ones, that would not entitle *uid* to these, for
        which another request may wait.
        """
        if name := message.get("ticket"):
            own = read_ticket(self._directory, uid, str(name))
            if own is None:
                raise GpuguardError(sentence("broker.no_ticket", "you have no such ticket in the queue."))
            count, alone = len(names), self._directory.count("ticket.") == 1
            fitting = [
                request for request in own.requests
                if request.num_gpus <= count <= (request.most if alone else request.num_gpus)
            ]  # fmt: skip
            return replace(own, requests=tuple(dict.fromkeys(_for_devices(request, names, uid) for request in fitting)))
        try:
            request = as_request(dict(message.get("conditions") or {}))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(
                sentence("broker.conditions", "the conditions cannot be understood: {error}", error=str(error))
            ) from error
        own = new_ticket(
            [_for_devices(request, names, uid)],
            priority=int(_number(message, "priority", min(PRIORITIES.values()), max(PRIORITIES.values())) or 0),
            time_limit=_number(message, "time_limit_seconds", 0, LONGEST_SECONDS),
            expected=_number(message, "expected_seconds", 0, LONGEST_SECONDS),
        )
        return replace(own, uid=uid, user=user_name(uid), pid=None)

    def _verify(self, names: list[str], request: Request, snapshot: Snapshot, locks: Sequence[str]) -> dict[str, str]:
        """Return uuid -> why it is refused, by a sample under the locks, so that what happened before them shows."""
        assert self._backend is not None
        fresh = self._backend.sample(fields_to_verify(request), names)
        if gone := set(names) - {device.uuid for device in fresh.devices}:
            return dict.fromkeys(gone, sentence("driver.not_shown_any_more", "the driver does not show it any more"))
        now = snapshot.updated(fresh)
        # All shares that hold locks are counted, so that of two that come at once neither is overlooked.
        sharing = sharing_beside(self._directory, now, names, locks) if request.share else {}
        return _unfit(names, [request], now, sharing)

    def _claim_inside(self, uid: int, names: list[str], outer: str) -> Reply:
        """Return locks inside a claim, for its owner alone: they exclude other commands in it, and no other claims."""
        grant, descriptors = Grant(uid, f"{outer}.{os.urandom(4).hex()}"), list[int]()
        with ExitStack() as stack, Gate(self._directory):
            stack.callback(close_all, descriptors)
            held = grant_of(self._directory, names)
            for name in names:
                owned = held.get(name)
                # A user who has a share, or a lock inside a claim, does not own the device.
                whole = owned is not None and owned.memory is None and "." not in owned.claim
                if not (owned and whole and (owned.uid, owned.claim) == (uid, outer)):
                    raise GpuguardError(sentence("broker.not_yours", "these GPUs are not yours by that claim."))
            for name in names:
                descriptor = lock_for(self._directory, f"{name}.nested", grant)
                if descriptor is None:
                    why = sentence("claimed.inside", "used by another command inside the claim {id}", id=outer)
                    return _refusal({name: why})
                descriptors.append(descriptor)
            stack.pop_all()
        reply = GrantReply(grant.claim, tuple(f"{name}.nested" for name in names))
        return DescriptorReply(asdict(reply), tuple(descriptors))


def _gave_back(words: Mapping[str, str], again: bool) -> tuple[Sentence, Sentence]:
    """Return the reason for a restriction, and the message about it."""
    return sentence("setback.gave_back", "gave {count} back that no process has held", **words), (
        sentence(
            "setback.gave_back_again",
            "a request of {user} gave {count} back that no process has held: all its requests go to the end of the "
            "queue",
            **words,
        )
        if again
        else sentence(
            "setback.gave_back_once",
            "a request of {user} gave {count} back that no process has held: it goes to the end of the queue",
            **words,
        )
    )


def _did_not_claim(words: Mapping[str, str], again: bool) -> tuple[Sentence, Sentence]:
    return sentence("setback.did_not_claim", "did not claim {count} within {time}", **words), (
        sentence(
            "setback.did_not_claim_again",
            "a request of {user} did not claim {count} within {time}, though they were offered to it: all its requests "
            "go to the end of the queue",
            **words,
        )
        if again
        else sentence(
            "setback.did_not_claim_once",
            "a request of {user} did not claim {count} within {time}, though they were offered to it: it goes to the "
            "end of the queue",
            **words,
        )
    )


def _device_names(message: Mapping[str, Any]) -> list[str]:
    names = message.get("devices")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise InvalidRequest(sentence("broker.which", "say which GPUs, by their uuids."))
    if not 0 < len(names) <= MAX_DESCRIPTORS or len(set(names)) < len(names):
        raise InvalidRequest(
            sentence("broker.how_many", "name 1 to {most} GPUs, each of them once.", most=MAX_DESCRIPTORS)
        )
    return names


def _for_devices(request: Request, names: Sequence[str], uid: int) -> Request:
    """Return *request* for these devices alone, which may leave only processes of *uid* out of account."""
    everywhere: dict[str, Any] = {"within": None, "within_reason": "", "exclude": (), "prefer": (), "max_gpus": None}
    mine_as_free = request.mine_as_free & {uid}
    return replace(request, num_gpus=len(names), devices=tuple(names), mine_as_free=mine_as_free, **everywhere)


def _busy_event(uid: int, seconds: float) -> Event:
    user = user_name(uid)
    message = sentence(
        "broker.busy",
        "requests of {user} for GPUs took {time} of the last minute, so requests of others wait longer",
        user=user,
        time=f"{seconds:.0f}s",
    )
    return Event(time=time.time(), kind="queue", outcome="busy", user=user, message=message, facts=(("uid", uid),))


def _unfit(
    names: Sequence[str], requests: Sequence[Request], snapshot: Snapshot, sharing: Mapping[str, Sharing] | None = None
) -> dict[str, str]:
    """Return uuid -> why it will not do for any of *requests*.  A share is judged only with *sharing*."""
    refused: dict[str, str] = {}
    for request in requests:
        if request.share and sharing is None:
            return {}
        choice = choose(snapshot, request, {}, sharing)
        if {device.uuid for device in choice.devices} == set(names):
            return {}
        refused = refused or {
            refusal.device.uuid: all_of(reason.text for reason in refusal.reasons)
            for refusal in choice.refused
            if refusal.device.uuid in names
        }
    return refused or dict.fromkeys(names, sentence("broker.not_together", "they cannot be had together"))


def _number(message: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    value = message.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(sentence("broker.no_number", "{field} is no number that makes sense.", field=key))
    return float(value)


def _refusal(reasons: Mapping[str, str]) -> dict[str, Any]:
    return {"refused": {name: cut(why, MOST) for name, why in reasons.items()}}


def lock_all(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], to: Grant, descriptors: list[int]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Lock the devices *names* (uuids); return the names of the locks, and uuid -> why it is refused.

    Args:
        to: the grant that the locks get; with memory they are shares.
        descriptors: filled with the locked descriptors; the caller closes them, even after a refusal.
    """
    locked: list[str] = []
    with Gate(directory):
        for name in names:
            grant = replace(to, parent=_parent(snapshot, name, None))
            for lock in slot_names(name) if to.memory else (name,):
                descriptor = lock_for(directory, lock, grant)
                if descriptor is not None:
                    descriptors.append(descriptor)
                    locked.append(lock)
                    break
            else:
                return (), {name: sentence("claimed.slots", "it has no slot left") if to.memory else CLAIMED}
        refused = conflicts(directory, snapshot, names, locked, shared=to.memory is not None)
        if not refused and to.memory is None:
            for name in names:
                # Locks inside of it that jobs of an earlier owner still have must not be in this owner's way.
                replace_file(directory, f"{name}.nested")
    return tuple(locked), refused


def conflicts(
    directory: LockDirectory, snapshot: Snapshot | None, names: Sequence[str], own: Collection[str], *, shared: bool
) -> dict[str, str]:
    """Return uuid -> why it cannot be had, of the devices *names*, by the locks of others.  The caller has the gate.

    Args:
        snapshot: says which device is a part of which, or None if that does not matter yet.
        own: the names of locks that do not belong to others.
        shared: whether shares of the devices are wanted.
    """
    others = [name for name in names_of(directory) if name not in own and not name.endswith(".nested")]
    reasons: dict[str, str] = {}
    for lock, grant in grant_of(directory, others).items():
        uuid = lock.partition(".slot")[0]
        is_slot = lock != uuid
        for name in names:
            if uuid == name and not (is_slot and shared):
                reasons[name] = SHARED if is_slot else CLAIMED
                continue
            is_part = snapshot and _parent(snapshot, uuid, grant) == name
            is_whole = snapshot and _parent(snapshot, name, None) == uuid
            if is_part or (is_whole and (is_slot or grant or _root_has_all(directory, uuid))):
                reasons[name] = PART_CLAIMED
    return reasons


def sharing_beside(
    directory: LockDirectory, snapshot: Snapshot, names: Sequence[str], own: Collection[str]
) -> dict[str, Sharing]:
    """Return uuid -> who else shares the device, by what was granted to them.  Slots in *own* do not count."""
    devices = tuple(device for device in snapshot.devices if device.uuid in names)
    here, sharing = replace(snapshot, devices=devices, claims=()), dict[str, Sharing]()
    for holders in (False, True):  # all of /proc is read only if some process has no claim without it
        with Gate(directory):
            records = probe_in_gate(directory, names, holders=holders)
        # What a record says about its own processes is only its owner's word.
        claims = [
            replace(record, pid=None, slots=tuple(slot for slot in record.slots if slot not in own))
            for record in records
        ]
        sharing = sharing_of(here, claims)
        shared = [device for device in devices if device.uuid in sharing]
        if all(sharing[device.uuid].belongs(process.pid) for device in shared for process in device.processes or ()):
            break
    return sharing


def _parent(snapshot: Snapshot, name: str, grant: Grant | None) -> str | None:
    """Return the GPU of which the device is a part, as the driver shows it or did when it was granted."""
    device = snapshot.device(name)
    return device.parent_uuid if device else grant.parent if grant else None


def _root_has_all(directory: LockDirectory, name: str) -> bool:
    """Return whether root, who takes locks without the broker, has the whole device and not just a part of it."""
    try:
        descriptor = open_lock(directory, name)
    except LockDirectoryError:
        return True
    with closed_after(descriptor):
        return not try_flock(descriptor, fcntl.LOCK_SH)
