"""Exemptions that users ask for: "I know that it looks idle; keep it until tonight."

Every user may exempt their own processes and claims, for as long as the policy file allows at most, and none of them
for more than 72 h in 7 days.  Root may exempt any user and whole devices.  What a user asks for holds only in policies
about what concerns that user alone, or where the file says so; what root grants, and what an older version granted,
holds in all policies.  Exemptions lie in kept.json, so they outlive the daemon.  They only protect: they prevent steps,
and cause none.  This module does not listen: see server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpuguard.claims.daemon_client import EndedReply, ExemptionReply
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import KEPT, MAX_REASON, MAX_RESTRICTIONS, Restriction, change, read_restrictions
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Device, Event, EventOutcome
from gpuguard.notify.templates import LONGEST_KEEP
from gpuguard.policies.policy import KEPT_SECONDS, KEPT_WITHIN, Kept, KeptMark, TimeSpan, seconds_within
from gpuguard.procfs import boot_clock
from gpuguard.request import resolve
from gpuguard.units import format_duration, local_time
from gpuguard.users import NAMELESS, accountable_uids, user_name

MAX_SECONDS_OF_ROOT = 365 * 86400.0
MAX_PER_USER = 16
MAX_CHANGES, CHANGES_SECONDS = 10, 60.0  # changes by one user within that time, because each is a line of the audit log
BREAK_SECONDS = 3600.0  # a shorter break between two times for which a user asked also counts as kept
SLACK_SECONDS = 60.0
MAX_SPANS = 20  # times of one user that are kept apart: beyond that, breaks of any length count as kept


class Exemptions:
    """Handles requests, and tells the watchdog what is exempt.

    Args:
        use: called with all exemptions whenever they change.
        devices: returns the devices of the latest sample, to which names of devices refer.
        report: called with an Event for each change.
    """

    def __init__(
        self,
        directory: LockDirectory,
        use: Callable[[Kept], object],
        devices: Callable[[], Sequence[Device]],
        report: Callable[[Event], object],
    ) -> None:
        self.max_seconds = LONGEST_KEEP
        self._directory, self._use, self.devices, self._report = directory, use, devices, report
        self._changes: dict[int, list[float]] = {}  # of a uid, monotonic
        self._apply(read_restrictions(directory, KEPT, time.time() - KEPT_WITHIN))

    def keep(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Exempt what *uid* asks for.  Raises GpuguardError if it is refused."""
        seconds, longest = request.get("for_seconds"), MAX_SECONDS_OF_ROOT if uid == 0 else self.max_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidRequest(sentence("keep.how_long", "say for how long: --for 4h."))
        if seconds > longest:
            raise InvalidRequest(
                sentence(
                    "keep.longest",
                    "{time} is the longest here: ask for less, and again when it is nearly over.",
                    time=format_duration(longest),
                )
                if longest
                else sentence(
                    "keep.users_may_not",
                    "here no user can ask for that: the policy file says so.  Talk to the administrator.",
                )
            )
        owner, uuid = self._target(uid, request)
        reason = str(request.get("reason") or "")[:MAX_REASON]
        now = time.time()
        user = None if owner is None else user_name(owner)
        exemption = Restriction(_name(owner, uuid), now, now + seconds, reason, user_name(uid), user)
        since = self._oldest_start(owner, uuid, now)
        self.count_change(uid)

        def add(exemptions: dict[str, Restriction]) -> None:
            before = exemptions.get(exemption.name)
            if uid != 0 and before and before.asked is None and before.holds(now):
                raise GpuguardError(
                    sentence("keep.already", "it is kept already, in all policies: see `gpuguard keep --list`.")
                )
            exemptions[exemption.name] = exemption
            if uid != 0:
                exemptions[exemption.name] = replace(exemption, asked=(before.asked if before else None) or ())
                _refuse_too_much(_count(exemptions, uid, now), since, now, seconds)
            own = [
                other
                for other in exemptions.values()
                if (other.user, other.by) == (user, exemption.by) and other.holds(now)
            ]
            if len(own) > MAX_PER_USER:
                raise GpuguardError(
                    sentence(
                        "keep.too_much",
                        "there is too much that you keep: end some of it with `gpuguard keep --end`.",
                    )
                )
            # A user with user namespaces has 65536 uids without a name, which must not fill everybody's file.
            if len(exemptions) > MAX_RESTRICTIONS // 2 and exemption.by == str(uid):
                raise GpuguardError(
                    sentence("keep.nameless", "very much is kept here already, and uid {uid} has no name.", uid=uid)
                )

        self._apply(change(self._directory, KEPT, add))
        self._log("kept", uid, exemption)
        return asdict(ExemptionReply(now + seconds, user, uuid))

    def end(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """End exemptions before their time.  Raises GpuguardError if it is refused."""
        owner, uuid = self._target(uid, request)
        now, ended = time.time(), list[Restriction]()

        def remove(exemptions: dict[str, Restriction]) -> None:
            for name in [name for name, exemption in exemptions.items() if exemption.holds(now)]:
                of_owner, on_device = _parts(name)
                if (owner is None or of_owner == owner) and (uuid is None or on_device == uuid):
                    ended.append(exemptions.pop(name))
                    if ended[-1].asked is not None:  # the time that was used of it counts
                        exemptions[name] = replace(ended[-1], until=now)
                        _count(exemptions, of_owner or 0, now)

        self.count_change(uid)
        self._apply(change(self._directory, KEPT, remove))
        for exemption in ended:
            self._log("ended", uid, exemption)
        return asdict(EndedReply(len(ended)))

    def count_change(self, uid: int) -> None:
        """Count a change by *uid*; all users without a name count as one.

        Raises:
            GpuguardError: there were too many within a minute.
        """
        now = time.monotonic()
        recent = {
            user: [moment for moment in moments if now - moment < CHANGES_SECONDS]
            for user, moments in self._changes.items()
        }
        self._changes = {user: moments for user, moments in recent.items() if moments}
        own = self._changes.setdefault(uid if user_name(uid) != str(uid) else NAMELESS, [])
        if len(own) >= MAX_CHANGES and uid != 0:
            raise GpuguardError(
                sentence("keep.too_often", "that was {count} times within a minute: wait a little.", count=MAX_CHANGES)
            )
        own.append(now)

    def _target(self, uid: int, request: Mapping[str, Any]) -> tuple[int | None, str | None]:
        """Return (uid or None for all users, uuid or None for all devices)."""
        wanted, device = request.get("uid"), request.get("device")
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted < 2**32):
            raise InvalidRequest(sentence("keep.no_user", "that is no user."))
        if uid != 0 and wanted not in (None, uid):
            raise GpuguardError(sentence("keep.only_root", "only root may do that for other users: run it with sudo."))
        owner = wanted if uid == 0 else uid
        if owner is None and device is None:
            raise InvalidRequest(
                sentence(
                    "keep.of_root",
                    "root's own processes are never touched: say by --user or --device whom is meant.",
                )
            )
        if device is None:
            return owner, None
        return owner, resolve([str(device)], self.devices(), "--device")[0]

    def _oldest_start(self, owner: int | None, uuid: str | None, now: float) -> float:
        """Return the unix time from which kept time counts: the start of the oldest process meant, or 0 without one."""
        there = [device for device in self.devices() if uuid in (None, device.uuid, device.parent_uuid)]
        rows = [row for device in there for row in device.processes or () if row.uid == owner]
        starts = [row.start_time for row in rows if row.start_time is not None]
        return now - boot_clock() + min(starts) if starts else 0.0

    def _apply(self, exemptions: Mapping[str, Restriction]) -> None:
        now, clock = time.time(), boot_clock()
        exempt = dict[tuple[str, int | str], KeptMark]()
        for exemption in exemptions.values():
            owner, uuid = _parts(exemption.name)
            if exemption.until is None or exemption.until <= now or (owner is None and uuid is None):
                continue
            key: tuple[str, int | str] = ("uid", owner) if owner is not None else ("device", uuid or "")
            if owner is not None and uuid is not None:
                key = "uid on device", f"{owner} {uuid}"
            asked = exemption.asked
            spans = None if asked is None else tuple((begin - now + clock, end - now + clock) for begin, end in asked)
            exempt[key] = KeptMark(clock + exemption.until - now, spans)
        self._use(exempt)

    def _log(self, outcome: EventOutcome, asked_by: int, exemption: Restriction) -> None:
        owner, uuid = _parts(exemption.name)
        self._report(
            Event(
                time=time.time(),
                kind="keep",
                outcome=outcome,
                user=exemption.user,
                devices=(uuid,) if uuid else (),
                message=exemption.reason or None,
                facts=(("uid", owner), ("asked_by_uid", asked_by), ("until_unix_seconds", exemption.until)),
            )
        )


def _count(exemptions: dict[str, Restriction], owner: int, now: float) -> tuple[TimeSpan, ...]:
    """Record until when a user now keeps anything, wherever it is, because what they run may be there at any time.

    A short break between two times counts as well, so that a user who asks again and again does not fill the file.
    """
    uids = {each.name: _parts(each.name)[0] or 0 for each in exemptions.values() if each.asked is not None}
    whose = accountable_uids(uids.values())  # a process may take on another uid that root has given to the same user
    own = [exemptions[name] for name, uid in uids.items() if whose[uid] == whose[owner]]
    known: tuple[TimeSpan, ...] = max((each.asked or () for each in own), key=len)
    begin, end = now, max(now, *(each.until or now for each in own))
    spans = [span for span in known if span[1] > now - KEPT_WITHIN]
    if spans and (spans[-1][1] > now - BREAK_SECONDS or len(spans) >= MAX_SPANS):
        begin, _ = spans.pop()
    counted = (*spans, (begin, end))
    exemptions.update({each.name: replace(each, asked=counted) for each in own})
    return counted


def _refuse_too_much(spans: tuple[TimeSpan, ...], since: float, now: float, seconds: float) -> None:
    """Raise GpuguardError if *spans*, with *seconds* of them from *now* on, keep for too long what began at *since*."""
    end, begin = spans[-1][1], max(since, now - KEPT_WITHIN)
    # A user who asks for the time that a refusal says is left gets it.
    if seconds_within(spans, max(since, end - KEPT_WITHIN), end) > KEPT_SECONDS + SLACK_SECONDS:
        left = max(0.0, seconds + KEPT_SECONDS - seconds_within(spans, begin, end))
        oldest = min(max(begin, span[0]) for span in spans if span[1] > begin)
        raise GpuguardError(
            sentence(
                "keep.over_quota",
                "no process or claim can be kept for more than {hours} h in {days} days.  Now {time} is left, and more "
                "from {when} on.",
                hours=f"{KEPT_SECONDS / 3600:.0f}",
                days=f"{KEPT_WITHIN / 86400:.0f}",
                time=format_duration(round(left)),
                when=local_time(oldest + KEPT_WITHIN, "%m-%d %H:%M"),
            )
        )


def _name(owner: int | None, uuid: str | None) -> str:
    return " ".join(str(part) for part in (owner, uuid) if part is not None)


def _parts(name: str) -> tuple[int | None, str | None]:
    """Return (uid, uuid) of the name of an exemption."""
    first, _, second = name.partition(" ")
    if first.isdecimal() and len(first) <= 10:
        return int(first), second or None
    return None, first or None
