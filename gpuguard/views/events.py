"""The audit log for people: which lines are wanted, and each of them as one line of text.

What users wrote (notes, commands, names) is neutralised.  Does not find or open the files: see the command `events`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard.jsonio import loads
from gpuguard.model import Event
from gpuguard.sanitize import neutralise
from gpuguard.units import format_bytes, format_duration
from gpuguard.users import user_name

Line = Mapping[str, Any]

# By these the guard knows its deeds again; people know them by user, pid and policy.
_FOR_THE_GUARD = frozenset({"start_time_seconds", "signature", "clock_seconds", "boot"})


@dataclass(frozen=True)
class Wanted:
    """Which events are asked for; what is empty or None restricts nothing."""

    users: frozenset[str] = frozenset()
    devices: tuple[str, ...] = ()  # uuids or their beginnings
    policies: frozenset[str] = frozenset()
    since: float | None = None  # unix time

    def __contains__(self, line: object) -> bool:
        """Whether the event *line* is one of them."""
        assert isinstance(line, Mapping)
        if self.since is not None and line["time_unix_seconds"] < self.since:
            return False
        # In a tuple: of another writer they may be lists, which nobody can look up in a set.
        if self.users and line.get("user") not in tuple(self.users):
            return False
        if self.policies and facts_of(line).get("policy") not in tuple(self.policies):
            return False
        uuids = devices_of(line)
        return not self.devices or any(uuid.startswith(one) for uuid in uuids for one in self.devices)


def decoded(lines: Iterable[bytes]) -> tuple[list[Line], int]:
    """The events of a log, and how many of its lines are none: torn by a full disk, or of something else."""
    events: list[Line] = []
    torn = 0
    for encoded in filter(None, map(bytes.strip, lines)):
        try:
            content = loads(encoded)
        except ValueError:
            content = None
        if isinstance(content, dict) and _is_event(content):
            events.append(_named(content))
        else:
            torn += 1
    return events, torn


def _named(line: Line) -> Line:
    """*line* with the name of its uid: a job writes down what $LOGNAME says, which anybody can set."""
    uid = facts_of(line).get("uid")
    name = user_name(uid) if type(uid) is int else None
    return {**line, "user": name} if name not in (None, str(uid)) else line


def line_of(event: Event) -> Line:
    """*event* as a line of the log is decoded."""
    return {
        "time_unix_seconds": event.time,
        **{name: value for name, value in vars(event).items() if name != "time"},
        "devices": list(event.devices),
        "facts": {name: value for name, value in event.facts if value is not None},
    }


def in_order(events: Iterable[Line], wanted: Wanted) -> list[Line]:
    """Those that are wanted, oldest first."""
    return sorted((line for line in events if line in wanted), key=lambda line: line["time_unix_seconds"])


def to_json(events: Sequence[Line], torn: int) -> dict[str, Any]:
    """The object that docs/json.md describes."""
    return {"schema": 1, "events": [dict(line) for line in events], "unreadable_lines": torn}


def to_text(line: Line) -> str:
    """``"11-20 17:40:02  terminate  sent  alice  pid 4711  GPU-1f2e3d4c  uses 41.0GiB (hogs)"``."""
    when = _moment(line["time_unix_seconds"])
    pid, uuids = line.get("pid"), devices_of(line)
    parts = [
        when,
        str(line.get("kind", "n/a")),
        str(line.get("outcome", "n/a")),
        str(line.get("user") or ""),
        f"pid {pid}" if pid is not None else "",
        " ".join(uuid[:12] for uuid in uuids),
        f"claim {line['claim']}" if line.get("claim") else "",
        str(line.get("message") or ""),
        _remarks(facts_of(line)),
    ]
    return "  ".join(neutralise(part) for part in parts if part)


def facts_of(line: Line) -> Mapping[str, Any]:
    """The further facts of an event."""
    facts = line.get("facts")
    return facts if isinstance(facts, Mapping) else {}


def devices_of(line: Line) -> list[str]:
    """The uuids that an event is about."""
    devices = line.get("devices")
    return [each for each in devices if isinstance(each, str)] if isinstance(devices, list) else []


def _remarks(facts: Mapping[str, Any]) -> str:
    shown = [_remark(name, value) for name, value in facts.items() if name not in _FOR_THE_GUARD]
    return f"({', '.join(shown)})" if shown else ""


def _remark(name: str, value: object) -> str:
    """``"peak_memory=10.0GiB"`` of ``peak_memory_bytes``: the number itself stands in the JSON."""
    if _is_number(value):
        for unit, words in _WORDS.items():
            if name.endswith(unit):
                return f"{name.removesuffix(unit)}={words(value)}"
    return f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"


def _moment(unix: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(unix))


_WORDS: Mapping[str, Callable[[Any], str]] = {  # the first that fits
    "_unix_seconds": _moment,
    "_seconds": format_duration,
    "_bytes": format_bytes,
    "_percent": "{:g}%".format,
}


def _is_event(content: Line) -> bool:
    return _is_number(content.get("time_unix_seconds")) and content.get("schema") == 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**40
