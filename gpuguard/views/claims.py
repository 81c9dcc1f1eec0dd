"""What each claim took, out of the audit log: the usage store knows users and devices, but no claims.

A claim counts in the time in which it ended, and whole.  One whose end is not in the log runs still, or its wrapper was
killed: of those only the number is told.  Does not read the log: see the command `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.history.audit_log import Line, devices_of, facts_of


@dataclass(frozen=True)
class ClaimRow:
    """A claim that has ended."""

    id: str
    user: str | None
    devices: tuple[str, ...]  # uuids
    ended: float  # unix time
    seconds: float | None
    utilization: float | None  # percent, mean over the job and its devices
    energy: float | None  # joules
    peak_memory: int | None  # bytes, of the job
    exit_status: int | None
    command: str | None

    @property
    def gpu_seconds(self) -> float | None:
        """Its time, times its devices."""
        return None if self.seconds is None else self.seconds * len(self.devices)


def ended_claims(
    lines: Iterable[Line], begin: float, end: float, name_of: Callable[[int], str] = str
) -> tuple[list[ClaimRow], int]:
    """The claims that ended between two unix times, the largest first, and how many began there without an end.

    Args:
        lines: of the audit log.
        begin: unix time.
        end: unix time.
        name_of: uid -> the user's name, for whoever had none in the environment of his job.
    """
    commands: dict[str, str] = {}
    begun: set[str] = set()
    rows: dict[str, ClaimRow] = {}
    ended: set[str] = set()
    for line in sorted(lines, key=lambda one: float(one["time_unix_seconds"])):
        claim, when = line.get("claim"), float(line["time_unix_seconds"])
        if not isinstance(claim, str):
            continue
        if line.get("kind") == "claim" and line.get("outcome") == "started":
            commands[claim] = str(line.get("message") or "")
            if begin <= when < end:
                begun.add(claim)
        elif line.get("kind") == "release" and "wall_time_seconds" in facts_of(line):
            ended.add(claim)
            if begin <= when < end:
                rows[claim] = _row(claim, line, when, commands.get(claim), name_of)
    largest = sorted(rows.values(), key=lambda row: -(row.gpu_seconds or 0.0))
    return largest, len(begun - ended)


def _row(claim: str, line: Line, when: float, command: str | None, name_of: Callable[[int], str]) -> ClaimRow:
    facts = facts_of(line)
    uid = _number(facts, "uid")
    peak, status = (_number(facts, name) for name in ("peak_memory_bytes", "exit_status"))
    user = line.get("user")
    return ClaimRow(
        claim,
        user if isinstance(user, str) else None if uid is None else name_of(int(uid)),
        tuple(devices_of(line)),
        when,
        _number(facts, "wall_time_seconds"),
        _number(facts, "mean_utilization_percent"),
        _number(facts, "energy_joules"),
        None if peak is None else int(peak),
        None if status is None else int(status),
        command or None,
    )


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return float(value)
