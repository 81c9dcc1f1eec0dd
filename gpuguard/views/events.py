"""Events of the audit log for people: the wanted ones, each as a row of a table or, for a journal, as a line.

Text that users wrote (notes, commands, names) is neutralised.  This module does not read the log: see
history.audit_log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard.history.audit_log import Line, devices_of, facts_of, is_number
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import Sentence
from gpuguard.notify.templates import deed_text
from gpuguard.sanitize import neutralise
from gpuguard.tables import padded, table
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_energy, local_time
from gpuguard.users import user_name
from gpuguard.views.text import folded

MOST_DEEDS = 5  # that `who` shows a user
# The guard recognises its actions by these facts after a restart; people recognise them by user, pid and policy.
_FOR_THE_GUARD = frozenset({"start_time_seconds", "signature", "job", "launch", "clock_seconds", "boot"})
_HEADERS = (N_("TIME"), N_("EVENT"), "GPU", N_("USER"), N_("NOTE"))
_LEAST = (14, 16, 5, 8, 0)  # columns, so that later rows line up with earlier ones (--follow)
_STOP = re.compile(r"(?<!\.)[.。]$")  # at the end of a sentence, if facts follow
_OUTCOMES = {"settled": "ended"}  # outcomes of the JSON, in words for people
_FACTS_IN_WORDS = {"harm_action": "then", "harm": "not before"}  # and names of its facts
# Other words that have translations: the names of facts, and outcomes of older versions.
FACTS = (
    N_("pid"), N_("by"), N_("rule"), N_("step"), N_("exit_status"), N_("wall_time"), N_("peak_memory"),
    N_("mean_utilization"), N_("energy"), N_("until"), N_("container"), N_("target"), N_("users"), N_("count"),
    N_("retry_after"), N_("num_gpus"), N_("begins"), N_("ends"), N_("then"), N_("not before"), N_("path"),
    N_("slurm_job"), N_("ticket"), N_("lines"), N_("waited"), N_("written"), N_("no terminal"), N_("over"),
    N_("the terminal belongs to another user"), N_("the terminal takes no messages"), N_("the terminal does not read"),
)  # fmt: skip


@dataclass(frozen=True)
class EventFilter:
    """Which events are wanted; a field that is empty or None restricts nothing."""

    users: frozenset[str] = frozenset()
    devices: tuple[str, ...] = ()  # uuids or their beginnings
    policies: frozenset[str] = frozenset()
    since: float | None = None  # unix time

    def __contains__(self, line: object) -> bool:
        """Return whether the event *line* is wanted."""
        assert isinstance(line, Mapping)
        if self.since is not None and line["time_unix_seconds"] < self.since:
            return False
        # In a tuple, because another writer's values may be lists, which cannot be looked up in a set.
        about = (line.get("user"), *str(facts_of(line).get("users") or "").split(", "))  # if it is about several
        if self.users and not any(user in about for user in self.users):
            return False
        if self.policies and facts_of(line).get("policy") not in tuple(self.policies):
            return False
        uuids = devices_of(line)
        return not self.devices or any(uuid.startswith(device) for uuid in uuids for device in self.devices)


def in_order(events: Iterable[Line], wanted: EventFilter) -> list[Line]:
    """Return the events that are wanted, oldest first."""
    return sorted((line for line in events if line in wanted), key=lambda line: line["time_unix_seconds"])


def to_json(events: Sequence[Line], torn: int) -> dict[str, Any]:
    """Return the object that docs/json.md describes."""
    return {"schema": 1, "events": [dict(line) for line in events], "unreadable_lines": torn}


def to_text(line: Line, labels: Mapping[str, str] | None = None) -> str:
    """Return ``"11-20 17:40:02  terminate  sent  alice  pid 4711  GPU 3 (GPU-1f2e3d4c)  uses 41.0GiB (hogs)"``.

    *labels* holds the numbers of the devices by uuid, as far as they are known.
    """
    pid, uuids = line.get("pid"), devices_of(line)
    facts = [_fact_text(name, value) for name, value in facts_of(line).items() if name not in _FOR_THE_GUARD]
    parts = [
        _moment(line["time_unix_seconds"]),
        str(line.get("kind", NOT_AVAILABLE)),
        str(line.get("outcome", NOT_AVAILABLE)),
        str(line.get("user") or ""),
        f"pid {pid}" if pid is not None else "",
        " ".join(f"GPU {labels[uuid]} ({uuid[:12]})" if labels and uuid in labels else uuid[:12] for uuid in uuids),
        f"claim {line['claim']}" if line.get("claim") else "",
        _in_one_line(line, str),
        f"({', '.join(facts)})" if facts else "",
    ]
    return "  ".join(neutralise(part) for part in parts if part)


def to_table(lines: Sequence[Line], labels: Mapping[str, str], *, headers: bool = True) -> list[str]:
    """Return rows like ``11-20 17:40:02  terminate sent  3  alice  uses 41.0GiB; pid 4711, policy hogs`` under headers.

    *labels* holds the numbers of the devices by uuid; a device without a number is shown by the beginning of its uuid.
    """
    rows = [_row(line, labels) for line in lines]
    cells = [
        [padded(cell, least) for cell, least in zip(row, _LEAST, strict=True)]
        for row in (list(map(_, _HEADERS)), *rows)
    ]
    return table(cells[0 if headers else 1 :]) if rows else []


def _row(line: Line, labels: Mapping[str, str]) -> list[str]:
    outcome = str(line.get("outcome", NOT_AVAILABLE))
    told = []
    for name, value in _facts_shown(line):
        what, _equals, text = _fact_text(name, value).partition("=")
        told.append(f"{_(_FACTS_IN_WORDS.get(what, what)).replace('_', ' ')} {text}")
    cells = [
        _moment(line["time_unix_seconds"]),
        f"{_(str(line.get('kind', NOT_AVAILABLE)))} {_(_OUTCOMES.get(outcome, outcome))}",
        ",".join(_devices_shown(line, labels)),
        str(line.get("user") or ""),
        "; ".join(filter(None, [_STOP.sub("", _in_one_line(line, translated)), ", ".join(told)])),
    ]
    return [neutralise(cell) for cell in cells]


def _in_one_line(line: Line, in_words: Callable[[str], str]) -> str:
    """Return the message in words; the lines of our own sentences are joined, those of users stay visible."""
    message = line.get("message") or ""
    text = in_words(str(message))
    return text.replace("\n", "  ") if isinstance(message, Sentence) else text


def to_row(line: Line, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the cells of to_table() for a page with words of its own: numbers stay numbers, named with their unit."""
    outcome = str(line.get("outcome", NOT_AVAILABLE))
    return {
        "time": line["time_unix_seconds"],
        "kind": str(line.get("kind", NOT_AVAILABLE)),
        "outcome": _OUTCOMES.get(outcome, outcome),
        "devices": _devices_shown(line, labels),
        "user": str(line.get("user") or ""),
        "message": str(line.get("message") or ""),
        "facts": [[name, value if is_number(value) else str(value)] for name, value in _facts_shown(line)],
    }


def _devices_shown(line: Line, labels: Mapping[str, str]) -> list[str]:
    return [labels.get(uuid, uuid[:12]) for uuid in devices_of(line)]


def _facts_shown(line: Line) -> Iterator[tuple[str, object]]:
    """Yield the facts, as (name, value), that a note shows behind its message."""
    facts = facts_of(line)
    by = facts.get("by_uid")
    if line.get("pid") is not None:
        yield "pid", str(line["pid"])
    if line.get("claim"):
        yield "claim", line["claim"]
    if isinstance(by, int):
        yield "by", user_name(by)
    for name, value in facts.items():
        if name not in {*_FOR_THE_GUARD, "uid", "owner_uid", "by_uid"}:
            yield name, value


def deeds(events: Iterable[Line], width: int | None = None) -> list[str]:
    """Return the newest lines on what policies did to a user, under a heading, or [] if they did nothing."""
    texts = [f"{_moment(line['time_unix_seconds'])}  {text}" for line in events if (text := deed_text(line))]
    lines = [line for text in texts[-MOST_DEEDS:] for line in folded(text, "  ", width)]
    return [_("what policies did to you within the hour:"), *lines] if texts else []


def _fact_text(name: str, value: object) -> str:
    """Return ``"peak_memory=10.0GiB"`` for ``peak_memory_bytes``; the number itself is in the JSON."""
    if is_number(value):
        for unit, words in _WORDS.items():
            if name.endswith(unit):
                return f"{name.removesuffix(unit)}={words(value)}"
    return f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"


def _moment(unix: float) -> str:
    return local_time(unix, "%m-%d %H:%M:%S")


_WORDS: Mapping[str, Callable[[Any], str]] = {  # the first ending that fits is used
    "_unix_seconds": _moment,
    "_seconds": format_duration,
    "_bytes": format_bytes,
    "_percent": "{:.3g}%".format,
    "_joules": format_energy,
}
