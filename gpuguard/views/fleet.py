"""What other hosts said, for people and for programs: the screens of `who`, `queue` and `select` with --hosts.

Each host is shown under the name by which it was asked for.  All of its text is a stranger's: it is bounded and made
neutral here, and what has another type than it should is not shown.  Does not ask: see gpuguard.fleet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard import device_state
from gpuguard.fleet.answers import Facts, HostReply, number, rows, text, texts
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.text import Paint, shorten, table
from gpuguard.views.who import LABELS

ROWS = 256  # of one host that are shown: a machine has 8 devices, or 56 instances
_CELL = 200  # columns of one stranger's word
_UUID = re.compile(r"[A-Za-z0-9-]{1,80}")
_ORDER = (
    device_state.FREE,
    device_state.CLAIMED,
    device_state.IDLE,
    device_state.IN_USE,
    device_state.UNCLAIMED_USE,
    device_state.UNHEALTHY,
    device_state.UNKNOWN,
)


@dataclass(frozen=True)
class FleetSums:
    """One host in numbers, or a fleet."""

    states: Counter[str]  # of devices; a divided one counts with its instances
    memory_used: float | None
    memory_total: float | None
    utilization: tuple[float | None, ...]  # percent, per device
    users: Counter[str]  # devices per user
    waiting: int

    @property
    def devices(self) -> int:
        """How many."""
        return self.states.total()


def sums(facts: Facts) -> FleetSums:
    """What `who --json` of one host comes to."""
    devices = rows(facts, "devices")
    divided = {text(one, "parent_uuid") for one in devices} - {None}
    whole = [one for one in devices if text(one, "uuid") not in divided]
    known = [text(one, "state") or device_state.UNKNOWN for one in whole]
    return FleetSums(
        Counter(state if state in LABELS else device_state.UNKNOWN for state in known),
        _sum(number(one, "memory_used_bytes") for one in whole),
        _sum(number(one, "memory_total_bytes") for one in whole),
        tuple(number(one, "utilization_percent") for one in whole),
        Counter({_clean(text(one, "user") or "unknown", 40): int(count) for one in rows(facts, "users")[:ROWS]
                 if (count := number(one, "devices"))}),
        len(rows(facts, "waiting")),
    )  # fmt: skip


def in_words(counted: FleetSums) -> str:
    """``"8 GPUs: 3 free, 5 in use; 2 wait"``."""
    states = [f"{counted.states[state]} {LABELS[state][0]}" for state in _ORDER if counted.states[state]]
    words = f"{counted.devices} GPU{'s' * (counted.devices != 1)}"
    words += f": {', '.join(states)}" if states else ""
    return words + (f"; {counted.waiting} wait{'s' * (counted.waiting == 1)}" if counted.waiting else "")


def added(all_of_them: Iterable[FleetSums]) -> FleetSums:
    """The sums of a fleet."""
    found = list(all_of_them)
    states: Counter[str] = Counter()
    users: Counter[str] = Counter()
    for one in found:
        states += one.states
        users += one.users
    return FleetSums(
        states,
        _sum(one.memory_used for one in found),
        _sum(one.memory_total for one in found),
        tuple(value for one in found for value in one.utilization),
        users,
        sum(one.waiting for one in found),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    """Unknown as soon as one of them is: a sum without it would be too small."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if known and len(known) == len(found) else None


def host_lines(answer: HostReply, width: int | None, paint: Paint) -> list[str]:
    """A host of `who --hosts`: its name and sums, and a line per device."""
    if answer.facts is None:
        return []  # the end tells of all of those together
    facts, devices = answer.facts, rows(answer.facts, "devices")
    kind = f"{'RECORDED ' * (facts.get('recorded') is True)}{'SIMULATED node ' * (facts.get('simulated') is True)}"
    lines = [paint(_fit(f"{kind}{answer.host}: {in_words(sums(facts))}", width), "bold")]
    body = table(
        [_device_row(device, facts) for device in devices[:ROWS]],
        align="><>>",
        width=None if width is None else width - 2,
        paint=lambda cell, place: paint(cell, _colour(cell)) if place == 4 else cell,
    )
    lines += [f"  {line}" for line in body]
    return lines + ([f"  ... and {len(devices) - ROWS} more"] if len(devices) > ROWS else [])


def _device_row(device: Facts, facts: Facts) -> list[str]:
    state = text(device, "state")
    utilization = number(device, "utilization_percent")
    used, total = number(device, "memory_used_bytes"), number(device, "memory_total_bytes")
    index = number(device, "index")
    inside = "." * (text(device, "parent_uuid") is not None)
    return [
        f"{inside}{'?' if index is None else round(index)}",
        _clean((text(device, "name") or "n/a").removeprefix("NVIDIA "), 40),
        f"{format_bytes(used)}/{format_bytes(total)}",
        "n/a" if utilization is None else f"{utilization:.0f}%",
        LABELS.get(state or "", LABELS[device_state.UNKNOWN])[0],
        _who(device, facts),
    ]


def _who(device: Facts, facts: Facts) -> str:
    """``'alice for 2h "note" train.py'`` of the claims, then the users of processes that have none."""
    now, claims = number(facts, "taken_at"), rows(device, "claims")[:8]
    found = []
    for claim in claims:
        since, note = number(claim, "since"), text(claim, "note")
        words = [_clean(text(claim, "user") or "unknown", 40)]
        if now is not None and since is not None:
            words.append(f"for {format_duration(round(max(0.0, now - since)))}")
        if note:
            words.append(f'"{_clean(note, 60)}"')
        if command := [word[:_CELL] for word in texts(claim, "command")[:20]]:
            words.append(shorten(neutral_command(command, brief=True), _CELL))
        found.append(" ".join(words))
    claimants = {text(claim, "user") for claim in claims}
    users = [text(one, "user") or "unknown" for one in rows(device, "processes")[:ROWS] if text(one, "claim") is None]
    without = "" if text(device, "state") == device_state.UNCLAIMED_USE and not claims else " without a claim"
    found += [_clean(user, 40) + without for user in dict.fromkeys(users) if user not in claimants]
    return ", ".join(found)


def queue_lines(answer: HostReply, width: int | None, paint: Paint) -> list[str]:
    """A host of `queue --hosts`: who waits there, and when each is expected to start."""
    places = rows(answer.facts, "places") if answer.facts is not None else []
    if not places or answer.facts is None:
        return []  # of most hosts: the end tells how many
    simulated = "SIMULATED node " * (answer.facts.get("simulated") is True)
    lines = [paint(_fit(f"{simulated}{answer.host}: {len(places)} in line", width), "bold")]
    cells = [
        [
            _count(number(place, "number")),
            _clean(text(place, "user") or "unknown", 40),
            _count(number(place, "num_gpus")),
            format_duration(waited if (waited := number(place, "waited_seconds")) is None else round(waited)),
            _clean(text(place, "why") or ""),
        ]
        for place in places[:ROWS]
    ]
    heads = ["#", "USER", "GPUS", "WAITED", "STARTS"]
    body = table(cells, heads, align="><>>", width=None if width is None else width - 2)
    return [*lines, *(f"  {line}" for line in body)]


def nobody_lines(answers: Sequence[HostReply]) -> list[str]:
    """On how many hosts nobody waits."""
    count = sum(answer.facts is not None and not rows(answer.facts, "places") for answer in answers)
    return [f"Nobody waits on {count} host{'s' * (count != 1)}."] if count else []


def room(answer: HostReply, form: str, separator: str) -> str | None:
    """``"0,3"``, the devices of `select --json` there, judged by chosen(); None where there is no room."""
    devices = rows(answer.facts, "devices") if answer.facts is not None else []
    if not devices:
        return None
    by_uuid = form == "uuid" or any((text(one, "uuid") or "").startswith("MIG-") for one in devices)
    return separator.join(str(one["uuid"] if by_uuid else one["index"]) for one in devices)


def chosen(answer: HostReply) -> HostReply:
    """*answer* to `select`; an error where it names something else than devices, because scripts pass them on."""
    devices = answer.facts.get("devices") if answer.facts is not None else None
    if answer.facts is None:
        return answer
    if not (devices and isinstance(devices, list) and all(map(_is_device, devices))):
        return HostReply(answer.host, answer.seconds, error="its answer names no devices")
    names = (room(answer, "index", ",") or "").split(",")
    if len(set(names)) < len(names):  # of such a list CUDA sees none
        return HostReply(answer.host, answer.seconds, error="its answer names a device twice")
    return answer


def _is_device(one: object) -> bool:
    return (
        isinstance(one, dict)
        and type(one.get("index")) is int
        and 0 <= one["index"] < 10_000
        and _UUID.fullmatch(text(one, "uuid") or "") is not None
    )


def room_line(answer: HostReply, devices: str | None, hosts: Sequence[str], width: int | None, paint: Paint) -> str:
    """A line of `select --hosts` on a terminal: the host, and its devices or why there are none."""
    name = answer.host.ljust(max(map(len, hosts)))
    if devices is not None and answer.facts is not None:
        models = Counter(_clean(text(one, "name") or "n/a", 40) for one in rows(answer.facts, "devices"))
        what = ", ".join(f"{count} x {model}" for model, count in models.items())
        return paint(_fit(f"{name}  {devices}  ({what})", width), "green")
    why = f"no room: {answer.refusal}" if answer.refusal else answer.error or ""
    return paint(_fit(f"{name}  {_clean(why)}", width), "" if answer.refusal else "red")


def total_lines(answers: Sequence[HostReply], width: int | None) -> list[str]:
    """What users have on all hosts together."""
    totals: dict[str, list[list[float | None]]] = {}
    names = ("devices", "processes", "claimed", "idle", "memory_used_bytes")
    for answer in answers:
        for row in rows(answer.facts, "users")[:ROWS] if answer.facts is not None else []:
            here = totals.setdefault(_clean(text(row, "user") or "unknown", 40), [])
            here.append([number(row, name) for name in names])
    added_up = {user: [_sum(column) for column in zip(*found, strict=True)] for user, found in totals.items()}
    cells = []
    for user, sums_of in sorted(added_up.items(), key=lambda item: (-(item[1][0] or 0), item[0])):
        devices, processes, claimed, idle = map(_count, sums_of[:4])
        cells.append([user, str(len(totals[user])), devices, processes, format_bytes(sums_of[4]), claimed, idle])
    heads = ["USER", "HOSTS", "GPUS", "PROCESSES", "MEMORY", "CLAIMED", "IDLE"]
    return table(cells, heads, align="<>>>>>>", width=width) if cells else []


def end_lines(answers: Sequence[HostReply], width: int | None, paint: Paint) -> list[str]:
    """How many hosts answered, and which did not, each with its reason."""
    silent = [answer for answer in answers if answer.error is not None]
    lines = [f"{len(answers) - len(silent)} of {len(answers)} hosts answered{'.' if not silent else '; not these:'}"]
    cells = [[answer.host, _clean(answer.error or "")] for answer in silent]
    return lines + [paint(f"  {line}", "red") for line in table(cells, width=None if width is None else width - 2)]


def to_json(answers: Sequence[HostReply], timeout: float) -> dict[str, Any]:
    """The object that docs/json.md describes: one object per host, whether it answered or not."""
    return {
        "schema": 1,
        "asked": len(answers),
        "answered": sum(answer.error is None for answer in answers),
        "timeout_seconds": timeout,
        "hosts": [
            {
                "host": answer.host,
                "seconds": round(answer.seconds, 3),
                "error": answer.error,
                "refusal": answer.refusal,
                "answer": answer.facts,
            }
            for answer in answers
        ],
    }


def _count(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}"


def _clean(words: str, most: int = _CELL) -> str:
    return shorten(neutralise(words[: 4 * most]), most)


def _fit(line: str, width: int | None) -> str:
    return line if width is None else shorten(line, width)


def _colour(label: str) -> str:
    return next((colour for words, colour in LABELS.values() if label.strip() == words), "")
