"""Recordings of whole machines: everything that policies judge by, sample after sample.

A sample is a View: the snapshot with its claims, what processes do beside the GPU, who is in which group, who descends
from whom.  What an outer scheduler gave out and the GPU-hours of the past are not in it.  See tape_file for the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuguard.backends.replay import pack as pack_noun
from gpuguard.backends.replay import read_samples
from gpuguard.backends.replay import unpack as unpack_snapshot
from gpuguard.errors import BackendError
from gpuguard.model import ProcessStat
from gpuguard.policies.view import HostUse, RuleView


def pack(view: RuleView) -> dict[str, Any]:
    """A sample as plain values."""
    host = {f"{pid}@{start}": _known(use) for (pid, start), use in view.host.items()}
    return {
        "snapshot": pack_noun(view.snapshot),
        "host": host,
        "groups": {str(uid): sorted(names) for uid, names in view.groups.items()},
        "seen": {
            str(pid): None if one is None else [one.parent, one.state, one.start_time, one.inner_pid]
            for pid, one in view.seen.items()
        },
    }


def unpack(sample: Mapping[str, Any]) -> RuleView:
    """The View that pack() made plain.  Raises BackendError."""
    snapshot = unpack_snapshot(sample.get("snapshot"))
    try:
        return RuleView(
            snapshot,
            host={_identity(key): _host_use(use) for key, use in sample.get("host", {}).items()},
            groups={int(uid): frozenset(map(_text, names)) for uid, names in sample.get("groups", {}).items()},
            seen={int(pid): _seen(one) for pid, one in sample.get("seen", {}).items()},
        )
    except (ValueError, ArithmeticError, TypeError, AttributeError, KeyError) as error:
        raise BackendError(f"what this recording says of processes cannot be understood: {error!r:.100}.") from None


def views(path: str) -> Iterator[RuleView]:
    """The samples of a recording, the oldest first.  Raises BackendError."""
    for sample in read_samples(path):
        yield unpack(sample)


def is_tape(path: str) -> bool:
    """Whether a file is compressed, as recordings are and tables are not."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"\x1f\x8b"
    except OSError:
        return False


def _known(use: HostUse) -> dict[str, Any]:
    return {name: value for name, value in vars(use).items() if value is not None}


def _identity(key: str) -> tuple[int, float]:
    pid, _, start = key.partition("@")
    return int(pid), float(start)


def _host_use(use: Mapping[str, Any]) -> HostUse:
    numbers = {name: use.get(name) for name in ("cpu", "memory", "network")}
    if any(type(value) not in (int, float, type(None)) for value in numbers.values()):
        raise TypeError("a rate is no number")
    terminal, traced = use.get("terminal"), use.get("traced")
    if traced not in (True, False, None):
        raise TypeError("whether it is debugged is neither true nor false")
    return HostUse(terminal=None if terminal is None else _text(terminal), traced=traced, **numbers)


def _seen(one: list[Any] | None) -> ProcessStat | None:
    if one is None:
        return None
    parent, state, start_time, inner_pid = one
    started = None if start_time is None else float(start_time)
    return ProcessStat(int(parent), _text(state), started, None if inner_pid is None else int(inner_pid))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
