"""The handlers of the daemon's requests: one table, request -> handler.

    keep, end                   every user, for their own processes and claims: see exemptions
    release                     every user their own claims, while nothing computes under them; the administrator any
    claim, claims               every user, where the daemon gives the locks: see broker
    events                      the newest lines of the log about the user
    status                      the findings of policies about the user, and the next steps; the administrator: all
    reload, deny, quarantine    the administrator: root, or the user that the daemon runs as

The user is the one that the kernel names (see server), never the one that a request names.  This module does not listen
and judges nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpuguard.claims.daemon_client import (
    MAX_REQUEST_BYTES,
    EventRow,
    EventsReply,
    PolicyStatusReply,
    ReloadReply,
    StatusReply,
)
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import RELEASED, ReleaseRequest
from gpuguard.claims.restrictions import DENIED, MAX_REASON, QUARANTINED, Restriction, change
from gpuguard.claims.unlock import computing_under, lock_handle
from gpuguard.daemon.exemptions import MAX_SECONDS_OF_ROOT, Exemptions
from gpuguard.daemon.release import releasable_claim
from gpuguard.daemon.socket_server import Reply
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.preflight import INTERVALS
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.history.audit_log import decoded, events_path, facts_of, read_log, uids_of
from gpuguard.jsonio import decode
from gpuguard.locale.messages import cut, dumps, sentence
from gpuguard.model import Event, Snapshot, claim_named
from gpuguard.policies.action_kinds import PRIVATE
from gpuguard.policies.engine import PolicyStatus
from gpuguard.policy_files.loader import load_in_time
from gpuguard.procfs import boot_clock, process_facts
from gpuguard.request import resolve
from gpuguard.users import user_name

if TYPE_CHECKING:
    from gpuguard.daemon.broker import Broker

_EVENTS_BYTES = 2**15  # of a reply to `events`: it fits into the buffer of a socket
_LOG_BYTES = 2**19  # of the log that are searched for it: about 1,500 lines
_NOT_FOR_THE_OWNER = frozenset({"uids", "signature", "job", "launch", "clock_seconds", "boot"})
# For the texts of the rows of a reply to `status`, whose messages come on top: those that do not fit are counted.
_STATUS_BYTES = MAX_REQUEST_BYTES - 496

Request = Mapping[str, Any]


@dataclass(frozen=True)
class RequestContext:
    """The data and functions that the handlers use."""

    directory: LockDirectory  # of the claims
    exemptions: Exemptions  # handles keep and end
    snapshot: Callable[[], Snapshot]  # the latest one, with claims
    interval: Callable[[], float]  # seconds between two samples, at most
    status: Callable[[], tuple[PolicyStatus, ...]]  # the findings of policies
    append: Callable[[Event], bool]  # writes an Event down; False if it could not
    reload: Callable[[], object]  # has the policy file read again soon
    policy: str | None = None  # path of that file, or None without one
    enforcing: bool = False  # whether the daemon's own switch is on
    broker: Broker | None = None  # gives the locks, where that is the daemon's task
    unguarded: Callable[[], str | None] = lambda: None  # the parts of the policy file that are not carried out
    trouble: Callable[[], str | None] = lambda: None  # why the daemon cannot do a task besides guarding


def handle(context: RequestContext, uid: int, request: Request) -> Reply:
    """Return the reply to a request of *uid*.  Raises GpuguardError if it is refused."""
    name = request.get("do")
    handler = HANDLERS.get(name) if isinstance(name, str) else None
    if handler is None:
        raise InvalidRequest(
            sentence("daemon.can", "this daemon can be asked to {requests}.", requests=", ".join(HANDLERS))
        )
    if name in PERSONAL and uid == identity.overflow_uid():
        raise GpuguardError(
            sentence("daemon.unknown_user", "who you are is not known here: you are in a user namespace of your own.")
        )
    if name in ADMINISTRATION and not _is_administrator(uid):
        raise GpuguardError(sentence("daemon.only_root", "only root may ask for that: run it with sudo."))
    # A field with a wrong name or with null may be a mistake, and it must not pass for a missing one, which means all.
    for field, value in request.items() if name in FIELDS else ():
        if field == "do":
            continue
        kinds = FIELDS[str(name)].get(field)
        if kinds is None:
            raise InvalidRequest(
                sentence(
                    "daemon.no_field",
                    "{request} has no field {field}: it takes {fields}.",
                    request=str(name),
                    field=repr(field[:40]),
                    fields=", ".join(FIELDS[str(name)]) or "nothing",
                )
            )
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not _BOOLEAN):
            raise InvalidRequest(
                sentence(
                    "daemon.field_must_be",
                    "{field} must be {what}; to mean none, leave it out.",
                    field=field,
                    what=_WORDS[kinds],
                )
            )
    return handler(context, uid, request)


def _is_administrator(uid: int) -> bool:
    """Return whether *uid* is root or the user that this daemon runs as."""
    return uid in (0, os.geteuid())


def _release(context: RequestContext, uid: int, request: Request) -> Reply:
    claim = releasable_claim(context.directory, _name(request, "claim"), 0 if _is_administrator(uid) else uid)
    if claim.id != request.get("claim") or request.get("uid") not in (None, claim.uid):
        raise ClaimError(sentence("release.whole_id", "write the whole id of the claim."))
    context.exemptions.count_change(uid)
    snapshot = context.snapshot()
    if boot_clock() - snapshot.clock > INTERVALS * context.interval():
        raise ClaimError(
            sentence(
                "release.blind",
                "the daemon does not see the GPUs now, so it is unknown whether they are used.  Try again.",
            )
        )
    known = claim_named(snapshot.claims, claim.uid, claim.id) or claim
    processes, unknown = computing_under(known, snapshot, process_facts(snapshot))
    if processes or unknown:
        raise ClaimError(
            unknown or sentence("release.in_use", "pid {pid} computes under it: end it first.", pid=processes[0].pid)
        )
    by, reason = user_name(uid), _reason(request)
    with lock_handle(context.directory, claim) as locks:
        event = Event(
            time=time.time(),
            kind="release",
            outcome="about to",
            user=claim.user,
            devices=claim.devices,
            claim=claim.id,
            message=reason or None,
            facts=(("uid", claim.uid), ("asked_by_uid", uid)),
        )
        if not context.append(event):
            raise GpuguardError(sentence("daemon.no_log", "nothing can be written into the log, so nothing was done."))
        try:
            actions.release_claim(locks, ReleaseRequest(RELEASED, by, reason))
        except OSError as error:
            raise ClaimError(
                sentence("release.fails", "the claim cannot be released: {error}.", error=str(error.strerror))
            ) from error
    return {"released": claim.id, "devices": len(claim.devices)}


def _status(context: RequestContext, uid: int, request: Request) -> Reply:
    wanted = request.get("uid") if _is_administrator(uid) else uid
    if request.get("uid") not in (None, wanted):
        raise GpuguardError(sentence("daemon.of_others", "only root may see what concerns other users."))
    findings = [status for status in context.status() if wanted is None or status.subject.uid == wanted]
    rows, left = [], _STATUS_BYTES
    for status in findings:
        row = status_reply(status, context.snapshot())
        left -= len(json.dumps(asdict(row))) + 2
        if left < 0:
            break
        rows.append(row)
    return asdict(
        StatusReply(context.enforcing, tuple(rows), len(findings) - len(rows), context.trouble(), context.unguarded())
    )


def status_reply(status: PolicyStatus, snapshot: Snapshot | None = None) -> PolicyStatusReply:
    """Return one finding in the form of a reply to `status`."""
    subject, boot = status.subject, time.time() - boot_clock()  # unix time of the boot
    device = snapshot.device(subject.device) if snapshot and subject.device else None
    return PolicyStatusReply(
        policy=status.policy,
        kind=subject.kind,
        user=subject.user,
        pid=subject.pid,
        claim=subject.claim,
        device=subject.device,
        since_unix_seconds=round(status.since + boot, 1),
        last=status.last,
        next=status.next,
        next_unix_seconds=None if status.due is None else round(status.due + boot, 1),
        enforce=status.enforce,
        refused=cut(status.refused or "", MAX_REASON) or None,
        harm=status.harm,
        harm_unix_seconds=None if status.harm_due is None else round(status.harm_due + boot, 1),
        device_label=device.label if device else None,
        rule=status.rule or None,
        why=cut(status.why, MAX_REASON) or None,
    )


def _events(context: RequestContext, uid: int, request: Request) -> Reply:
    """Return the newest lines of the log about the user who asks, as many as fit; none about others or messages."""
    try:
        written = read_log(events_path(), _LOG_BYTES)
        about = deque((line for line in written if b'"uid": %d' % uid in line or b'"uids": "' in line), maxlen=500)
    except OSError as error:
        raise GpuguardError(
            sentence("daemon.log_unread", "the log of the daemon cannot be read: {error}.", error=str(error.strerror))
        ) from error
    rows, left = list[EventRow](), _EVENTS_BYTES
    for line in reversed(decoded(about)[0]):
        if uid not in uids_of(line) or line.get("kind") in PRIVATE:
            continue
        facts = {name: value for name, value in facts_of(line).items() if name not in _NOT_FOR_THE_OWNER}
        try:
            row = decode(EventRow, {**line, "facts": facts}).for_older_jobs()
        except ValueError:  # of another version
            continue
        left -= len(dumps(asdict(row))) + 2
        if left < 0:
            break
        rows.append(row)
    return asdict(EventsReply(tuple(reversed(rows))))


def _reload(context: RequestContext, uid: int, request: Request) -> Reply:
    if context.policy is None:
        raise InvalidRequest(sentence("daemon.no_policy", "this daemon was started without a policy file."))
    file = load_in_time(context.policy)
    context.reload()  # even if it has faults: the daemon reports them, and keeps the last good one
    first = file.faults[0].lines(file.path)[0] if file.faults else None
    return asdict(ReloadReply(file.path, len(file.policies), len(file.faults), first))


def _deny(context: RequestContext, uid: int, request: Request) -> Reply:
    target = request.get("uid")
    if target is None or not 0 < target < 2**32:
        raise InvalidRequest(sentence("deny.whom", "say which user, by uid; root cannot be denied anything."))
    return _restrict(context, uid, request, DENIED, str(target), user_name(target))


def _quarantine(context: RequestContext, uid: int, request: Request) -> Reply:
    uuid = resolve([_name(request, "device")], context.exemptions.devices(), "device")[0]
    return _restrict(context, uid, request, QUARANTINED, uuid, None)


def _restrict(
    context: RequestContext,
    uid: int,
    request: Request,
    kind: Literal["denied", "quarantined"],
    name: str,
    user: str | None,
) -> Reply:
    """Set or end one restriction of a kind.  Only a quarantine, which has no *user*, may be set without an end."""
    seconds, now, ends = request.get("for_seconds"), time.time(), request.get("end") is True
    if not (0 < seconds <= MAX_SECONDS_OF_ROOT if seconds is not None else user is None or ends):
        raise InvalidRequest(
            sentence("restriction.how_long", "say for how long, in for_seconds: up to a year; or end: true.")
        )
    until = None if seconds is None else now + seconds
    restriction = Restriction(name, now, until, _reason(request), user_name(uid), user)
    ended = 0

    def update(restrictions: dict[str, Restriction]) -> None:
        nonlocal ended
        ended = int(restrictions.pop(name, None) is not None)
        if not ends:
            restrictions[name] = restriction

    change(context.directory, kind, update)
    context.append(
        Event(
            time=now,
            kind="deny" if kind == DENIED else "quarantine",
            outcome="ended" if ends else kind,
            user=user,
            devices=() if user else (name,),
            message=restriction.reason or None,
            facts=(("until_unix_seconds", until), ("by_uid", uid), *((("uid", int(name)),) if user else ())),
        )
    )
    return {"until_unix_seconds": until, "ended": ended if ends else 0}


def _broker(context: RequestContext) -> Broker:
    if context.broker is None:
        raise GpuguardError(
            sentence(
                "broker.none",
                "this daemon gives no locks: it was started before they were made its own.  Restart it.",
            )
        )
    return context.broker


def _reason(request: Request) -> str:
    return str(request.get("reason") or "")[:MAX_REASON]


def _name(request: Request, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str) or not value or "/" in value:
        raise InvalidRequest(sentence("daemon.field_missing", "{field} is missing.", field=key))
    return value


HANDLERS: Mapping[str, Callable[[RequestContext, int, Request], Reply]] = {
    "keep": lambda context, uid, request: context.exemptions.keep(uid, request),
    "end": lambda context, uid, request: context.exemptions.end(uid, request),
    "release": _release,
    "claim": lambda context, uid, request: _broker(context).claim(uid, request),
    "claims": lambda context, uid, request: _broker(context).claims(),
    "status": _status,
    "events": _events,
    "reload": _reload,
    "deny": _deny,
    "quarantine": _quarantine,
}
_TEXT, _INTEGER, _NUMBER, _BOOLEAN = (str,), (int,), (int, float), (bool,)
_WORDS = {
    _TEXT: sentence("field.text", "a text"),
    _INTEGER: sentence("field.integer", "a whole number"),
    _NUMBER: sentence("field.number", "a number"),
    _BOOLEAN: sentence("field.boolean", "true or false"),
}
# The fields that each request takes besides `do`.  Those of claim are not listed, because the broker reads them and
# because waiting jobs, including those of an older gpuguard, send null for the fields that they do not use.
FIELDS: Mapping[str, Mapping[str, tuple[type, ...]]] = {
    "keep": {"for_seconds": _NUMBER, "uid": _INTEGER, "device": _TEXT, "reason": _TEXT},
    "end": {"uid": _INTEGER, "device": _TEXT},
    "release": {"claim": _TEXT, "uid": _INTEGER, "reason": _TEXT},
    "claims": {},
    "status": {"uid": _INTEGER},
    "events": {},
    "reload": {},
    "deny": {"uid": _INTEGER, "for_seconds": _NUMBER, "end": _BOOLEAN, "reason": _TEXT},
    "quarantine": {"device": _TEXT, "for_seconds": _NUMBER, "end": _BOOLEAN, "reason": _TEXT},
}
ADMINISTRATION = frozenset({"reload", "deny", "quarantine"})
PERSONAL = frozenset({"keep", "end", "claim", "events"})  # which mean something else for each user
