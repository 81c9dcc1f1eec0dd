"""The screen of `gpuguard top --hosts`: a line per host, with the utilization of each device as one character.

Does not ask: see gpuguard.fleet; all text of hosts comes through views.fleet.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuguard import device_state
from gpuguard.fleet.answers import HostReply
from gpuguard.sanitize import neutralise
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.charts import sparkline
from gpuguard.views.fleet import FleetSums, added, in_words, sums
from gpuguard.views.text import Paint, shorten, table

_USERS = 6  # that are named per host


@dataclass(frozen=True)
class KnownHost:
    """The last that is known of a host."""

    counted: FleetSums | None = None  # None: it has never answered
    at: float = 0.0  # monotonic, of that answer
    error: str | None = None  # why the last question has no answer


def after(known: KnownHost, answer: HostReply, now: float) -> KnownHost:
    """*known* and what came now: an error keeps the last answer, and its age tells how old that is."""
    if answer.facts is None:
        return KnownHost(known.counted, known.at, answer.error or answer.refusal)
    return KnownHost(sums(answer.facts), now)


def page(
    hosts: Sequence[str],
    fleet: Mapping[str, KnownHost],
    now: float,
    *,
    width: int | None,
    paint: Paint,
    ascii_only: bool = False,
) -> list[str]:
    """Lines: the fleet in sums, then each host; *now* is monotonic, *fleet* has those of which anything is known."""
    counted = [known.counted for known in fleet.values() if known.counted]
    silent = sum(known.error is not None for known in fleet.values())
    title = f"{len(hosts)} host{'s' * (len(hosts) != 1)}, {in_words(added(counted))}"
    title += f"; {silent} do{'es' * (silent == 1)} not answer" if silent else ""
    names = max(map(len, hosts))
    body = [_row(host.ljust(names), fleet.get(host), now, ascii_only) for host in hosts]
    heads = ["HOST", "GPUS", "FREE", "UTILIZATION", "MEMORY", "WAIT", "AGE", "USERS"]
    whole = iter(table([row for row in body if len(row) > 2], heads, align="<>><>>>", width=width) or [heads[0]])
    lines = [next(whole)]
    for row in body:  # why a host is unknown needs the room that its numbers do not take
        line = next(whole) if len(row) > 2 else "  ".join(row)
        lines.append(shorten(line, width) if width else line)
    painted = [lines[0], *(paint(line, _colour(fleet.get(host))) for host, line in zip(hosts, lines[1:], strict=True))]
    stamp = time.strftime("%H:%M:%S")
    return [paint(shorten(f"{stamp}  {title}", width) if width else f"{stamp}  {title}", "bold"), *painted]


def _row(host: str, known: KnownHost | None, now: float, ascii_only: bool) -> list[str]:
    if known is None or (known.counted is None and known.error is None):
        return [host, "asked"]
    error = shorten(neutralise(known.error[:800]), 200) if known.error is not None else ""
    if known.counted is None:
        return [host, error]
    one = known.counted
    values = one.utilization[:16]
    users = ", ".join(f"{user} {count}" for user, count in one.users.most_common(_USERS))
    users += f" and {len(one.users) - _USERS} more" if len(one.users) > _USERS else ""
    return [
        host,
        str(one.devices),
        str(one.states[device_state.FREE]),
        f"{_drawn(values, ascii_only)} {_mean(one.utilization)}",
        f"{format_bytes(one.memory_used)}/{format_bytes(one.memory_total)}",
        str(one.waiting or ""),
        format_duration(round(max(0.0, now - known.at))),
        "; ".join(filter(None, (error, users))),
    ]


def _drawn(values: Sequence[float | None], ascii_only: bool) -> str:
    drawn = sparkline(values, len(values), 100.0, ascii_only=ascii_only)
    return "".join("?" if value is None else height for value, height in zip(values, drawn, strict=True))


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.0f}%" if known and len(known) == len(values) else "n/a"


def _colour(known: KnownHost | None) -> str:
    if known is None:
        return "dim"
    return "red" if known.error is not None else ""
