"""What `gpuguard top` shows: the nouns.  A Scene is one look at the machine, a View says how it is to be shown.

Reads nothing and draws nothing: see cli.top_feed and top_page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuguard.model import Snapshot
from gpuguard.policies.view import HostUse
from gpuguard.views.bars import Part
from gpuguard.views.usage import DeviceUse

Identity = tuple[int, float]  # pid, start time

MODES = ("auto", "full", "compact")
SORTS = ("gpu", "pid", "user", "memory", "sm", "cpu", "host", "time", "command")
SLOWDOWN_MARGIN = 10.0  # degrees below the slowdown temperature from which on a device is worth a look


@dataclass(frozen=True)
class Ancestor:
    """A process above one that computes."""

    parent: int
    user: str | None
    command: tuple[str, ...] | None


@dataclass(frozen=True)
class Waits:
    """A request in line."""

    user: str
    num_gpus: int
    since: float  # unix time
    when: str  # in words: "starts in about 2h"
    note: str | None = None


@dataclass(frozen=True)
class Thresholds:
    """From where on the site's policies find something; None: they say nothing of it."""

    temperature: float | None = None
    power: float | None = None  # watts
    power_share: float | None = None  # of the limit, 0..1
    memory: float | None = None  # bytes
    memory_share: float | None = None


@dataclass(frozen=True)
class Scene:
    """One look at the machine.

    Args:
        snapshot: of the machine, with its claims.
        found: its devices with their claims and processes.
        host: what processes do beside the GPU.
        waiting: who waits, first in line first.
        ancestors: pid -> a process above one that computes; filled for the tree alone.
        age: seconds since the daemon looked; None: the driver was asked.
        load: the machine's load average over a minute.
        thresholds: of the site's policies.
    """

    snapshot: Snapshot
    found: tuple[DeviceUse, ...]
    host: Mapping[Identity, HostUse] = field(default_factory=dict)
    waiting: tuple[Waits, ...] = ()
    ancestors: Mapping[int, Ancestor] = field(default_factory=dict)
    age: float | None = None
    load: float | None = None
    thresholds: Thresholds = Thresholds()


@dataclass(frozen=True)
class View:
    """How it is shown.

    Args:
        mode: one of MODES.
        sort: one of SORTS.
        reverse: the other way round.
        users: only theirs; empty: everybody's.
        devices: uuids, only these; empty: all.
        text: words that a process must contain in its user, pid or command; user:NAME and gpu:0 are exact.
        compute_only: no desktop processes.
        tree: processes below their parents.
        ascii_only: no characters beyond ASCII in bars and trees.
        past: with sparklines.
        selected: the process under the cursor.
    """

    mode: str = "auto"
    sort: str = "gpu"
    reverse: bool = False
    users: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    text: str = ""
    compute_only: bool = False
    tree: bool = False
    ascii_only: bool = False
    past: bool = True
    selected: Identity | None = None


@dataclass(frozen=True)
class Line:
    """A line of the screen; *process* is whose row it is, *keys* what a click on its columns sorts by."""

    parts: tuple[Part, ...]
    process: Identity | None = None
    keys: tuple[tuple[int, int, str], ...] = ()  # first column, column behind the last, one of SORTS

    @property
    def text(self) -> str:
        """Without colours."""
        return "".join(text for text, _ in self.parts).rstrip()
