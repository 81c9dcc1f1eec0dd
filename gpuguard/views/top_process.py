"""One process of `gpuguard top`: over time, and its environment.

Values of variables whose names speak of secrets are hidden until they are asked for: screens are shared.
"""

from __future__ import annotations

import re
from typing import Protocol

from gpuguard.backends.processes import read_memory, start_time
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.bars import sparkline
from gpuguard.views.text import neutralise
from gpuguard.views.top_history import History
from gpuguard.views.top_processes import Row
from gpuguard.views.top_scene import View

_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
_LARGEST = 1 << 20  # bytes of an environment: the kernel allows 6 MiB, nobody reads that


class Shown(Protocol):
    """What the screen keeps."""

    history: History
    view: View


def heading(row: Row) -> str:
    """``"pid 4711 of alice: python train.py"``."""
    return f"pid {row.pid} of {neutralise(row.user or 'unknown')}: {row.command}"


def lines(row: Row) -> list[str]:
    """Who it is, for somebody who is about to signal it."""
    memory = format_bytes(row.memory)
    since = "an unknown time" if row.seconds is None else format_duration(round(row.seconds))
    claim = f"claim {neutralise(row.claim)}" if row.claim else "no claim"
    return [
        f"  pid {row.pid} of {neutralise(row.user or 'unknown')}",
        f"  GPU {','.join(row.devices)}, {memory}, for {since}, {claim}",
        f"  {row.command}",
    ]


def over_time(shown: Shown, row: Row, width: int) -> str:
    """Plots of its memory, SM and CPU utilization and host memory, the newest at the right."""
    moments = list(shown.history.processes.get(row.identity, ())) if row.identity else []
    if not moments:
        return "nothing is known of it over time"
    room = max(10, width - 1)
    found: list[str] = [f"the last {len(moments[-room:])} looks, the newest at the right", ""]
    series = (
        ("GPU memory", [None if one.memory is None else float(one.memory) for one in moments], None, format_bytes),
        ("SM utilization", [one.sm for one in moments], 100.0, _percent),
        ("CPU", [one.cpu for one in moments], None, _percent),
        ("host memory", [None if one.host is None else float(one.host) for one in moments], None, format_bytes),
    )
    for name, values, top, words in series:
        known = [value for value in values if value is not None]
        if not known:
            found += [f"{name}: n/a", ""]
            continue
        mean = sum(known) / len(known)
        most = max(known)
        now = "n/a" if values[-1] is None else words(values[-1])
        found.append(f"{name}: now {now}, mean {words(mean)}, most {words(most)}")
        found += [sparkline(values, room, (top or most) * 1.0001, ascii_only=shown.view.ascii_only), ""]
    return "\n".join(found)


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}%"


def environment(row: Row, *, hide: bool = True) -> str:
    """The variables of a process, one per line; why not, for one that is not ours."""
    if row.identity is None or start_time(row.pid) != row.identity[1]:
        return "it has ended"
    text = read_memory(row.pid, "environ", _LARGEST)
    if text is None:
        return "its environment cannot be read: it belongs to somebody else, or has ended"
    found = []
    for word in sorted(filter(None, text.split(b"\0"))):
        name, _, value = word.decode("utf-8", "surrogateescape").partition("=")
        hidden = hide and value and _SECRET.search(name)
        found.append(neutralise(f"{name}={'(hidden)' if hidden else value}"))
    return "\n".join(found) or "it has no variables"
