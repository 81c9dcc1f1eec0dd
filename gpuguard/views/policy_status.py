"""The state of policies as lines: for whom which condition holds since when, what was done, what comes when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuguard.sanitize import neutralise
from gpuguard.units import format_duration


def lines(answer: Mapping[str, Any], now: float, whom: str = "you") -> list[str]:
    """An answer of the daemon in words.

    Args:
        answer: what it says to `status`.
        now: unix time.
        whom: against whom there is nothing where there is nothing.
    """
    rows = [_line(row, now, bool(answer["enforcing"])) for row in answer["standing"]]
    if answer["left_out"]:
        rows.append(f"and {answer['left_out']} more")
    return [neutralise(row) for row in rows] or [f"no policy has anything against {whom} now."]


def _line(row: Mapping[str, Any], now: float, enforcing: bool) -> str:
    since = format_duration(max(0, round(now - row["since_unix_seconds"])))
    done = f", last step {row['last']}" if row["last"] else ""
    return f"{_whom(row)}: {row['policy']} for {since}{done}; {_next(row, now, enforcing and row['enforce'])}"


def _whom(row: Mapping[str, Any]) -> str:
    what = {"process": f"pid {row['pid']}", "claim": f"claim {row['claim']}", "user": "all of it"}.get(row["kind"])
    user = f"{row['user']}, " if row["user"] else ""
    where = f" on {row['device']}" if row["device"] else ""
    return f"{user}{what or row['kind']}{where}"


def _next(row: Mapping[str, Any], now: float, live: bool) -> str:
    if row["next"] is None:
        return "no step is left"
    if row["next_unix_seconds"] is None:
        return f"{row['next']} waits for the step before it"
    left = round(row["next_unix_seconds"] - now)
    when = f"in {format_duration(left)}" if left > 0 else "with the next look"
    return f"{row['next']} {when}, if nothing changes" + ("" if live else " (a dry run: only written down)")
