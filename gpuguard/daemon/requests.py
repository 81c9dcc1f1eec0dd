"""What the daemon does for whoever asks at its door: a table of requests.

    keep, end                   everybody, for what is his own: see keeping
    release                     everybody his own claims, while nobody computes under them; the administrator any
    claim, claims               everybody, where the daemon gives the locks: see broker
    status                      what policies have against the asker now, and what comes when; the administrator: all
    reload, deny, quarantine    the administrator: root, or the user as whom the daemon runs

Who asks is what the kernel said (see door), never what a request says.  Does not listen, and judges nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.release import lock_handle, users_of
from gpuguard.claims.release_requests import RELEASED, ReleaseRequest
from gpuguard.claims.restrictions import DENIED, MAX_REASON, QUARANTINED, Restriction, change
from gpuguard.daemon.exemptions import LONGEST_OF_ROOT, Exemptions
from gpuguard.daemon.release import find
from gpuguard.daemon.server import Handover
from gpuguard.enforcement import actions
from gpuguard.enforcement.preflight import INTERVALS
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.model import Event, Snapshot, claim_named
from gpuguard.policies.escalation import PolicyStatus
from gpuguard.policies.files.loader import load_in_time
from gpuguard.procfs import boot_clock, process_facts
from gpuguard.request import resolve
from gpuguard.users import user_name

if TYPE_CHECKING:
    from gpuguard.daemon.broker import Broker

ROOM = 3600  # characters of an answer, which has 4 KiB, for its rows

Request = Mapping[str, Any]


@dataclass(frozen=True)
class RequestHandlers:
    """What the daemon has at hand for those who ask.

    Args:
        directory: of the claims.
        keeping: answers keep and end.
        snapshot: the last look, with claims.
        pause: seconds between two looks, at most.
        outlook: what stands against whom.
        append: writes an Event down; False when it could not.
        reload: has the policy file read again soon.
        policy: path of that file, None without one.
        enforcing: whether the daemon's own switch is on.
        broker: gives the locks, where that is the daemon's business.
    """

    directory: LockDirectory
    keeping: Exemptions
    snapshot: Callable[[], Snapshot]
    pause: Callable[[], float]
    outlook: Callable[[], tuple[PolicyStatus, ...]]
    append: Callable[[Event], bool]
    reload: Callable[[], object]
    policy: str | None = None
    enforcing: bool = False
    broker: Broker | None = None


def handle(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any] | Handover:
    """What becomes of a request of *uid*.

    Raises:
        GpuguardError: nothing, and why.
    """
    name = request.get("do")
    does = VERBS.get(name) if isinstance(name, str) else None
    if does is None:
        raise InvalidRequest(f"this daemon can be asked to {', '.join(VERBS)}.")
    if name in ADMINISTRATION and not is_administrator(uid):
        raise GpuguardError("only root may ask for that: run it with sudo.")
    if name in FIELDS:
        _check_fields(str(name), request)
    return does(desk, uid, request)


def _check_fields(name: str, request: Request) -> None:
    """Refuse what *name* does not take, null included: what is left out means all, and nobody may say that by mistake.

    Raises:
        InvalidRequest: a field has another name or another type.
    """
    for field, value in request.items():
        if field == "do":
            continue
        kinds = FIELDS[name].get(field)
        if kinds is None:
            takes = f"it takes {', '.join(FIELDS[name])}" if FIELDS[name] else "it takes nothing"
            raise InvalidRequest(f"{name} has no field {field[:40]!r}: {takes}.")
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not _TRUTH):
            raise InvalidRequest(f"{field} must be {_WORDS[kinds]}; to mean none, leave it out.")


def is_administrator(uid: int) -> bool:
    """Whether that is root, or the user as whom this daemon runs."""
    return uid in (0, os.geteuid())


def _release(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any]:
    claim = find(desk.directory, _text(request, "claim"), 0 if is_administrator(uid) else uid)
    if claim.id != request.get("claim") or request.get("uid") not in (None, claim.uid):
        raise ClaimError("write the whole id of the claim.")
    desk.keeping.count(uid)
    snapshot = desk.snapshot()
    if boot_clock() - snapshot.clock > INTERVALS * desk.pause():
        raise ClaimError("the daemon does not see the devices now, so nobody knows whether they are used.  Try again.")
    seen = claim_named(snapshot.claims, claim.uid, claim.id) or claim
    users, unknown = users_of(seen, snapshot, process_facts(snapshot))
    if users or unknown:
        raise ClaimError(unknown or f"pid {users[0].pid} computes under it: end it first.")
    by, reason = user_name(uid), str(request.get("reason") or "")[:MAX_REASON]
    facts = (("uid", claim.uid), ("asked_by_uid", uid))
    with lock_handle(desk.directory, claim) as grip:
        named = claim.user, claim.devices, None, claim.id, reason or None
        event = Event(time.time(), "release", "about to", *named, facts)
        if not desk.append(event):
            raise GpuguardError("nothing can be written into the log, so nothing was done.")
        try:
            actions.release_claim(grip, ReleaseRequest(RELEASED, by, reason))
        except OSError as error:
            raise ClaimError(f"the claim cannot be released: {error.strerror}.") from error
    return {"released": claim.id, "devices": len(claim.devices)}


def _status(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any]:
    whom = request.get("uid") if is_administrator(uid) else uid
    if whom is not None and (isinstance(whom, bool) or not isinstance(whom, int)):
        raise InvalidRequest("that is no user.")
    if request.get("uid") not in (None, whom):
        raise GpuguardError("only root may see what concerns somebody else.")
    mine = [one for one in desk.outlook() if whom is None or one.subject.uid == whom]
    boot, rows, room = time.time() - boot_clock(), [], ROOM
    for one in mine:
        rows.append(row_of(one, boot))
        room -= len(json.dumps(rows[-1])) + 2
        if room < 0:
            rows.pop()
            break
    return {"enforcing": desk.enforcing, "standing": rows, "left_out": len(mine) - len(rows)}


def row_of(one: PolicyStatus, boot: float) -> dict[str, Any]:
    """One row of what `gpuguard keep --status` is told; *boot*: unix time of the boot."""
    subject = one.subject
    return {
        "policy": one.policy,
        "kind": subject.kind,
        "user": subject.user,
        "pid": subject.pid,
        "claim": subject.claim,
        "device": subject.device,
        "since_unix_seconds": round(one.since + boot, 1),
        "last": one.last,
        "next": one.next,
        "next_unix_seconds": None if one.due is None else round(one.due + boot, 1),
        "enforce": one.enforce,
    }


def _reload(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any]:
    if desk.policy is None:
        raise InvalidRequest("this daemon was started without a policy file.")
    file = load_in_time(desk.policy)
    desk.reload()  # also one with faults: the daemon says so, and keeps the last good one
    first = file.faults[0].lines(file.path)[0] if file.faults else None
    return {"path": file.path, "policies": len(file.policies), "faults": len(file.faults), "first": first}


def _deny(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any]:
    whom = request.get("uid")
    if isinstance(whom, bool) or not isinstance(whom, int) or not 0 < whom < 2**32:
        raise InvalidRequest("say which user, by his uid; root cannot be denied anything.")
    return _marked(desk, uid, request, DENIED, str(whom), user_name(whom), needs_end=True)


def _quarantine(desk: RequestHandlers, uid: int, request: Request) -> Mapping[str, Any]:
    uuid = resolve([_text(request, "device")], desk.keeping.devices(), "device")[0]
    return _marked(desk, uid, request, QUARANTINED, uuid, None, needs_end=False)


def _marked(
    desk: RequestHandlers, uid: int, request: Request, kind: str, name: str, user: str | None, *, needs_end: bool
) -> Mapping[str, Any]:
    """Set or end one mark of a kind."""
    seconds, ends, now = request.get("for_seconds"), request.get("end") is True, time.time()
    sound = not isinstance(seconds, bool) and isinstance(seconds, int | float) and 0 < seconds <= LONGEST_OF_ROOT
    if not (sound or (seconds is None and (ends or not needs_end))):
        raise InvalidRequest("say for how long, in for_seconds: up to a year; or end: true.")
    reason = str(request.get("reason") or "")[:MAX_REASON]
    mark = Restriction(name, now, None if seconds is None else now + seconds, reason, user_name(uid), user)
    found: list[Restriction] = []

    def update(marks: dict[str, Restriction]) -> None:
        found.extend([marks.pop(name)] if name in marks else [])
        if not ends:
            marks[name] = mark

    change(desk.directory, kind, update)
    outcome = "ended" if ends else kind
    devices = () if user else (name,)
    facts = (("until_unix_seconds", mark.until), ("by_uid", uid))
    verb = "deny" if kind == DENIED else "quarantine"
    desk.append(Event(now, verb, outcome, user, devices, message=reason or None, facts=facts))
    return {"until_unix_seconds": mark.until, "ended": len(found) if ends else 0}


def _broker(desk: RequestHandlers) -> Broker:
    if desk.broker is None:
        raise GpuguardError("this daemon gives no locks: it was started before they were made its own.  Restart it.")
    return desk.broker


def _text(request: Request, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value or "/" in value:
        raise InvalidRequest(f"{key} is missing.")
    return value


VERBS: Mapping[str, Callable[[RequestHandlers, int, Request], Mapping[str, Any] | Handover]] = {
    "keep": lambda desk, uid, request: desk.keeping.answer(uid, request),
    "end": lambda desk, uid, request: desk.keeping.answer(uid, request),
    "release": _release,
    "claim": lambda desk, uid, request: _broker(desk).claim(uid, request),
    "claims": lambda desk, uid, request: _broker(desk).claims(),
    "status": _status,
    "reload": _reload,
    "deny": _deny,
    "quarantine": _quarantine,
}
_TEXT, _WHOLE, _NUMBER, _TRUTH = (str,), (int,), (int, float), (bool,)
_WORDS = {_TEXT: "a text", _WHOLE: "a whole number", _NUMBER: "a number", _TRUTH: "true or false"}
# What each request takes beside `do`.  Not of claim: the broker reads those, and jobs that wait, also of an older
# gpuguard, send null for what they do not mean.
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "keep": {"for_seconds": _NUMBER, "uid": _WHOLE, "device": _TEXT, "reason": _TEXT},
    "end": {"uid": _WHOLE, "device": _TEXT},
    "release": {"claim": _TEXT, "uid": _WHOLE, "reason": _TEXT},
    "claims": {},
    "status": {"uid": _WHOLE},
    "reload": {},
    "deny": {"uid": _WHOLE, "for_seconds": _NUMBER, "end": _TRUTH, "reason": _TEXT},
    "quarantine": {"device": _TEXT, "for_seconds": _NUMBER, "end": _TRUTH, "reason": _TEXT},
}
ADMINISTRATION = frozenset({"reload", "deny", "quarantine"})
