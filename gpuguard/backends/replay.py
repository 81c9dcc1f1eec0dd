"""A recording, shown again as it happened.

    replay:FILE                   from its beginning on, as fast as it was
    replay:FILE?speed=60&at=10m   an hour per minute, from ten minutes behind the beginning on; at=end: the last sample

The first sample() is the beginning; each later one is as far behind it as time has passed since, times the speed.
At the end the last sample stays.  Its snapshots say that they are of another time: see Snapshot.recorded.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.backends.recording import read_tape, unpack
from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

    from gpuguard.model import Snapshot


def open(spec: str = "") -> Replay:
    """The recording that *spec* names, FILE or FILE?speed=60&at=10m.

    Raises:
        InvalidRequest: an option cannot be understood.
        BackendError: the file cannot be read, or has no sample.
    """
    path, _, options = spec.partition("?")
    if not path:
        raise InvalidRequest("say which recording is meant, as in --backend replay:node7.rec.")
    chosen = {"speed": "1", "at": "0s"}
    for option in filter(None, options.split("&")):
        name, _, value = option.partition("=")
        if name not in chosen:
            raise InvalidRequest(f"a replay has no option {name!r}: replay:FILE?speed=60&at=10m.")
        chosen[name] = value
    at = float("inf") if chosen["at"] == "end" else parse_duration(chosen["at"])
    return Replay(path, _speed(chosen["speed"]), at)


class Replay:
    """A Backend."""

    name = "replay"
    simulated = False

    def __init__(self, path: str, speed: float = 1.0, at: float = 0.0) -> None:
        self.progress: Callable[[int], object] = lambda index: None
        self.skip: Collection[int] = ()
        self._samples: Iterator[dict[str, Any]] = read_tape(path)
        self._now = self._next = next(self._samples, None)
        if self._now is None:
            raise BackendError(f"{path} has no whole sample: nothing was recorded.")
        self._first, self._speed, self._at = _clock(self._now), speed, at
        self._began: float | None = None

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """See Backend.sample.  All fields that were recorded come along."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        until = self._first + self._at + (now - self._began) * self._speed
        while self._next is not None and _clock(self._next) <= until:
            self._now, self._next = self._next, next(self._samples, None)
        assert self._now is not None
        snapshot = unpack(self._now.get("snapshot"))
        if devices is None:
            return replace(snapshot, backend=self.name)
        wanted = {*devices, *(one.parent_uuid for one in snapshot.devices if one.uuid in devices)} - {None}
        chosen = (one for one in snapshot.devices if one.uuid in wanted or one.parent_uuid in wanted)
        return replace(snapshot, backend=self.name, devices=tuple(chosen))

    def close(self) -> None:
        """Let go of the file."""
        self._samples = iter(())


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1e6:
        raise InvalidRequest(f"speed={text!r:.20}: write how many times faster, as in speed=60.")
    return speed


def _clock(sample: dict[str, Any]) -> float:
    try:
        clock = sample["snapshot"]["clock"]
        return float(clock)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise BackendError("a sample of this recording has no clock.") from None
