"""Giving the locks of devices to whoever may have them, where nobody but the daemon can open the lock files.

For machines with hostile users.  Everything that a command elsewhere does of its own free will is done here for it, by
the daemon's own look: denials and quarantines hold, nobody passes the waiting line or a reservation, a device must be
free of processes, and it is all or nothing.  What was given is the job's, and the kernel keeps it as long as the job
has it: the descriptor is locked before it is handed over, and the daemon closes its own.  So a daemon that dies, at
any instant, loses no claim and leaves no lock behind.

Does not listen: see door.  What excludes what: see giving.  A kept descriptor is worth nothing: see grants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from dataclasses import replace as replace_noun
from typing import Any

from gpuguard.backends import Backend
from gpuguard.claims.calling import MOST_DESCRIPTORS
from gpuguard.claims.grants import Grant, give, look, names_of
from gpuguard.claims.lockfiles import Gate, LockDirectory
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.guards import identity
from gpuguard.line import served
from gpuguard.line.file import read_line_file
from gpuguard.line.order import PRIORITIES, Ticket
from gpuguard.line.standing import Standing
from gpuguard.line.tickets import as_request, read_tickets
from gpuguard.line.turn import in_words, new_ticket, stand
from gpuguard.marks import against
from gpuguard.model import MEMORY, PROCESSES, Snapshot
from gpuguard.request import Request, fields_needed, fields_to_verify
from gpuguard.select import choose
from gpuguard.services.door import Handover
from gpuguard.services.giving import conflicts, give_all, sharing_beside
from gpuguard.users import user_name

_MAX_SECONDS = 10 * 365 * 86400.0


class Broker:
    """Who takes all the locks of *directory*.

    Args:
        directory: whose lock files are this process's alone.
        open_backend: called once, for looks of its own: those of the watchdog may be seconds old.
    """

    def __init__(self, directory: LockDirectory, open_backend: Callable[[], Backend]) -> None:
        self._directory, self._open_backend = directory, open_backend
        self._backend: Backend | None = None

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
            look(self._directory, names_of(self._directory))

    def claims(self) -> dict[str, Any]:
        """Which locks are held, and to whom they were given."""
        with Gate(self._directory):
            held = look(self._directory, names_of(self._directory))
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
        line = stand(self._directory, snapshot, read_line_file().rules, mine)
        way, refused = _due(line, names, mine)
        if refused:
            return _refused(refused)
        answer = self._given(uid, names, way, snapshot)
        if isinstance(answer, Handover) and len(line.places) > 1:
            served.note(self._directory, uid, by_daemon=True)
        return answer

    def _held(self, names: list[str], *, shared: bool) -> dict[str, str]:
        with Gate(self._directory):
            return conflicts(self._directory, None, names, (), shared=shared)

    def _given(self, uid: int, names: list[str], way: Request, snapshot: Snapshot) -> Mapping[str, Any] | Handover:
        grant, descriptors = Grant(uid, os.urandom(4).hex(), way.memory, way.most_sharers), list[int]()
        try:
            locks, refused = give_all(self._directory, snapshot, names, grant, descriptors)
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
                held = look(self._directory, names)
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


def _due(line: Standing, names: list[str], mine: Ticket) -> tuple[Request, dict[str, str]]:
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
