"""Who asked the guard to be left alone: "I know that it looks idle; keep it until tonight."

Everybody may ask for his own processes and claims, for as long as the policy file allows at most; root for anybody and
for whole devices.  What was granted lies in kept.json, so that it outlives the daemon.  It only ever protects: a step
that would be taken is not.  Does not listen: see door.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import KEPT, MAX_MARKS, MAX_REASON, Restriction, change, read_restrictions
from gpuguard.enforcement import identity
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import Device, Event
from gpuguard.procfs import boot_clock
from gpuguard.request import resolve
from gpuguard.units import format_duration
from gpuguard.users import user_name

LONGEST_SECONDS = 86400.0  # unless the policy file says otherwise
LONGEST_OF_ROOT = 365 * 86400.0
MOST_OF_ONE = 16  # marks of one user
CHANGES, CHANGES_SECONDS = 10, 60.0  # so many within so long: each is a line of the audit log
_NOBODY = -1  # all whom nobody knows: who may use user namespaces has 65536 such uids

Kept = dict[tuple[str, int | str], float]  # as policies.ladder remembers it: until which CLOCK_BOOTTIME


class Exemptions:
    """Answers requests, and tells the watchdog who is kept.

    Args:
        directory: where kept.json lies.
        use: told everything that is kept, whenever that changes.
        devices: those of the last sample, to which names of devices refer.
        report: told an Event for each change.
    """

    def __init__(
        self,
        directory: LockDirectory,
        use: Callable[[Kept], object],
        devices: Callable[[], Sequence[Device]],
        report: Callable[[Event], object],
    ) -> None:
        self.longest = LONGEST_SECONDS
        self._directory, self._use, self.devices, self._report = directory, use, devices, report
        self._changed: dict[int, list[float]] = {}  # uid -> when he changed something, monotonic
        self._tell(read_restrictions(directory, KEPT, time.time()))

    def answer(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """What becomes of a request of *uid*.

        Raises:
            GpuguardError: nothing, and why.
        """
        does = {"keep": self._keep, "end": self._end}.get(str(request.get("do")))
        if does is None:
            raise InvalidRequest("this daemon can be asked to `keep` and to `end` that.")
        return does(uid, request)

    def _keep(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        seconds, longest = request.get("for_seconds"), LONGEST_OF_ROOT if uid == 0 else self.longest
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise InvalidRequest("say for how long: --for 4h.")
        if seconds > longest:
            raise InvalidRequest(
                f"{format_duration(longest)} is the longest here: ask for less, and again when it is nearly over."
                if longest
                else "here nobody can ask for that: the policy file says so.  Talk to the administrator."
            )
        whom, uuid = self._meant(uid, request)
        reason = str(request.get("reason") or "")[:MAX_REASON]
        now = time.time()
        user = None if whom is None else user_name(whom)
        mark = Restriction(_name(whom, uuid), now, now + seconds, reason, user_name(uid), user)
        self.count(uid)

        def add(marks: dict[str, Restriction]) -> None:
            marks[mark.name] = mark
            if sum(each.user == user and each.by == mark.by for each in marks.values()) > MOST_OF_ONE:
                raise GpuguardError("there is too much that you keep: end some of it with `gpuguard keep --end`.")
            # Whoever may use user namespaces has 65536 uids without a name: they must not fill the file of all others.
            if len(marks) > MAX_MARKS // 2 and mark.by == str(uid):
                raise GpuguardError(f"very much is kept here already, and nobody knows who uid {uid} is.")

        self._tell(change(self._directory, KEPT, add))
        self._write_down("kept", uid, whom, uuid, mark)
        return {"until_unix_seconds": mark.until, "user": user, "device": uuid}

    def _end(self, uid: int, request: Mapping[str, Any]) -> Mapping[str, Any]:
        whom, uuid = self._meant(uid, request)
        ended: list[Restriction] = []

        def remove(marks: dict[str, Restriction]) -> None:
            for name in list(marks):
                one, on = _parts(name)
                if (whom is None or one == whom) and (uuid is None or on == uuid):
                    ended.append(marks.pop(name))

        self.count(uid)
        self._tell(change(self._directory, KEPT, remove))
        for mark in ended:
            self._write_down("ended", uid, *_parts(mark.name), mark)
        return {"ended": len(ended)}

    def _meant(self, uid: int, request: Mapping[str, Any]) -> tuple[int | None, str | None]:
        """(uid or None for all, uuid or None for all)."""
        wanted, device = request.get("uid"), request.get("device")
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted < 2**32):
            raise InvalidRequest("that is no user.")
        if uid == identity.overflow_uid():
            raise GpuguardError("who you are is not known here: you are in a user namespace of your own.")
        if uid != 0 and wanted not in (None, uid):
            raise GpuguardError("only root may do that for somebody else: run it with sudo.")
        whom = wanted if uid == 0 else uid
        if whom is None and device is None:
            raise InvalidRequest("root's own processes are never touched: say by --user or --device whom is meant.")
        if device is None:
            return whom, None
        return whom, resolve([str(device)], self.devices(), "--device")[0]

    def count(self, uid: int) -> None:
        """Count a change that *uid* asks for; all without a name count as one.

        Raises:
            GpuguardError: there were too many within a minute.
        """
        now = time.monotonic()
        self._changed = {
            one: left
            for one, times in self._changed.items()
            if (left := [t for t in times if now - t < CHANGES_SECONDS])
        }
        times = self._changed.setdefault(uid if user_name(uid) != str(uid) else _NOBODY, [])
        if len(times) >= CHANGES and uid != 0:
            raise GpuguardError(f"that was {CHANGES} times within a minute: wait a little.")
        times.append(now)

    def _tell(self, marks: Mapping[str, Restriction]) -> None:
        now, clock = time.time(), boot_clock()
        kept: Kept = {}
        for mark in marks.values():
            whom, uuid = _parts(mark.name)
            if mark.until is None or (whom is None and uuid is None):
                continue
            key: tuple[str, int | str] = ("uid", whom) if whom is not None else ("device", uuid or "")
            kept[key if whom is None or uuid is None else ("uid on device", f"{whom} {uuid}")] = (
                clock + mark.until - now
            )
        self._use(kept)

    def _write_down(self, outcome: str, asked_by: int, whom: int | None, uuid: str | None, mark: Restriction) -> None:
        facts = (("uid", whom), ("asked_by_uid", asked_by), ("until_unix_seconds", mark.until))
        devices = (uuid,) if uuid else ()
        self._report(Event(time.time(), "keep", outcome, mark.user, devices, message=mark.reason or None, facts=facts))


def _name(whom: int | None, uuid: str | None) -> str:
    return " ".join(str(part) for part in (whom, uuid) if part is not None)


def _parts(name: str) -> tuple[int | None, str | None]:
    """(uid, uuid) of the name of a mark."""
    first, _, second = name.partition(" ")
    if first.isdecimal() and len(first) <= 10:
        return int(first), second or None
    return None, first or None
