"""A recording: how it is written and read, and the backend that shows one again as it happened.

    replay:FILE                   from its beginning on, as fast as it was
    replay:FILE?speed=60&at=10m   an hour per minute, from ten minutes after the beginning on; at=end: the last sample

The first sample() is the beginning; each later one is as far after it as the time that has passed since, times the
speed.  At the end the last sample stays.  The snapshots say that they are of another time: see Snapshot.recorded.

The file is gzip, one JSON object per line and sample; every line that was written whole can be read.  The first line is
the head, {"gpuguard_recording": 1, ...}.  Each further line is a sample: now and then a whole one, {"whole": {...}},
and in between only the changes since the sample before, {"changed": {...}}.  Each whole sample begins a gzip member and
each line is flushed, so a killed recorder loses at most the line that it was writing, and a file that was cut off is
read up to there.
"""

from __future__ import annotations

import gzip
import os
import time
import zlib
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.files import open_file, open_named, write_all
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import dumps, sentence
from gpuguard.model import Snapshot
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

VERSION = 1
WHOLE_EVERY = 60  # samples
MAX_LINE = 16 * 2**20  # bytes of one sample: 1,000 times one of a large machine
_GZIP = 31  # window bits of zlib that mean gzip

# The marks of a change; no key of a sample looks like them.
_SET, _ITEMS, _GONE = "=", "#", "-"


class RecordingWriter:
    """A writer of one recording, which begins another file when the first grows too large."""

    def __init__(self, path: str, head: dict[str, Any], *, most: int | None = None, append: bool = False) -> None:
        """Open *path*.

        Args:
            path: of a new file; it is readable by this user alone, because command lines are in it.
            head: the further content of the first line.
            most: bytes after which it becomes PATH.1, in place of an older one, and a new file begins; None: never.
            append: go on after the last line that a former recorder has written.

        Raises InvalidRequest if the file exists already or cannot be written.
        """
        self.path, self._head, self._most = path, {"gpuguard_recording": VERSION, **head}, most
        self._begin(append)

    def _begin(self, append: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if append else os.O_EXCL)
        try:
            self._descriptor = open_named(self.path, flags)
        except FileExistsError:
            raise InvalidRequest(
                sentence(
                    "recording.exists",
                    "{path} is there already: name another file, or add --append.",
                    path=self.path,
                )
            ) from None
        except OSError as error:
            raise InvalidRequest(
                sentence(
                    "recording.not_written",
                    "{path} cannot be written: {error}.",
                    path=self.path,
                    error=str(error.strerror),
                )
            ) from error
        self._size = os.fstat(self._descriptor).st_size
        self._squeeze = zlib.compressobj(9, zlib.DEFLATED, _GZIP)
        self._before: Any = None
        self._count = 0
        self._line(self._head)

    def write(self, sample: dict[str, Any]) -> None:
        """Add one sample, which is in the file afterwards.  Raises OSError."""
        if self._most is not None and self._size >= self._most:
            self.close()
            os.replace(self.path, f"{self.path}.1")
            self._begin(append=False)
        whole = self._before is None or self._count % WHOLE_EVERY == 0
        if whole and self._count:
            self._put(self._squeeze.flush(zlib.Z_FINISH))
            self._squeeze = zlib.compressobj(9, zlib.DEFLATED, _GZIP)
        self._line({"whole": sample} if whole else {"changed": _change(self._before, sample)})
        self._before, self._count = sample, self._count + 1

    def close(self) -> None:
        """End the file.  Idempotent."""
        if self._descriptor >= 0:
            self._put(self._squeeze.flush(zlib.Z_FINISH))
            os.close(self._descriptor)
            self._descriptor = -1

    def _line(self, line: dict[str, Any]) -> None:
        text = dumps(line, separators=(",", ":")) + b"\n"
        self._put(self._squeeze.compress(text) + self._squeeze.flush(zlib.Z_SYNC_FLUSH))

    def _put(self, piece: bytes) -> None:
        self._size += len(piece)
        write_all(self._descriptor, piece)


def read_samples(path: str, advance: Callable[[float], None] = lambda share: None) -> Iterator[dict[str, Any]]:
    """Yield the samples of a recording, the oldest first, up to where it was cut off.  Raises BackendError.

    *advance* gets the share of the file that has been read.
    """
    before: Any = None
    for number, line in enumerate(_lines(path, advance)):
        try:
            content = loads(line)
            if not isinstance(content, dict):
                raise ValueError("it is no object")
            if number == 0 and "gpuguard_recording" not in content:
                raise BackendError(
                    sentence(
                        "recording.none", "{path} is no recording: `gpuguard record {path}` would make one.", path=path
                    )
                )
            if "gpuguard_recording" in content:
                if (version := content["gpuguard_recording"]) != VERSION:
                    raise BackendError(
                        sentence(
                            "recording.version",
                            "{path} is of version {version}, and this gpuguard reads {own}: update it.",
                            path=path,
                            version=f"{version!r:.20}",
                            own=VERSION,
                        )
                    )
                before = None
                continue
            before = content["whole"] if "whole" in content else _changed(before, content["changed"])
            if not isinstance(before, dict):
                raise ValueError("it is no object")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BackendError(
                sentence(
                    "recording.no_sample",
                    "{path}, line {number}: this is no sample: {error}.",
                    path=path,
                    number=number + 1,
                    error=f"{error!r:.100}",
                )
            ) from None
        yield before


def _lines(path: str, advance: Callable[[float], None]) -> Iterator[bytes]:
    """Yield the whole lines of a gzip file of any number of members, up to where it is cut off or damaged."""
    begun = False
    try:
        with open_file(path) as raw, gzip.open(raw, "rb") as file:
            size = os.fstat(raw.fileno()).st_size or 1
            while line := file.readline(MAX_LINE + 1):
                begun = True
                advance(raw.tell() / size)
                if len(line) > MAX_LINE:
                    raise BackendError(
                        sentence("recording.long_line", "{path}: a line is longer than any sample.", path=path)
                    )
                if line.endswith(b"\n"):
                    yield line
    except EOFError:
        pass
    except (zlib.error, gzip.BadGzipFile) as error:
        if not begun:
            raise BackendError(
                sentence(
                    "recording.no_gzip",
                    "{path} is no recording, which is a gzip file: {error}.",
                    path=path,
                    error=str(error),
                )
            ) from None
    except OSError as error:
        raise BackendError(
            sentence("file.not_read", "{path} cannot be read: {error}.", path=path, error=str(error.strerror))
        ) from None
    if not begun:
        raise BackendError(sentence("recording.empty", "{path} is empty: nothing was recorded.", path=path))


def _change(before: Any, after: Any) -> Any:
    """Return the change that makes *after* of *before*; only for values that differ, or for whole samples."""
    if isinstance(before, dict) and isinstance(after, dict):
        # To Python 1 == 1.0 == True, but not to a reader of the file.
        same = {key for key in before.keys() & after.keys() if before[key] == after[key]}
        same = {key for key in same if type(before[key]) is type(after[key])}
        change = {key: _change(before.get(key), value) for key, value in after.items() if key not in same}
        gone = [key for key in before if key not in after]
        return {**change, _GONE: gone} if gone else change
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        changed = (index for index, item in enumerate(after) if item != before[index])
        return {_ITEMS: {str(index): _change(before[index], after[index]) for index in changed}}
    return {_SET: after} if isinstance(after, dict | list) else after


def _changed(before: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    if _SET in change:
        return change[_SET]
    if _ITEMS in change:
        items = list(before)
        for index, item in change[_ITEMS].items():
            items[int(index)] = _changed(items[int(index)], item)
        return items
    whole = {key: value for key, value in before.items() if key not in change.get(_GONE, ())}
    return whole | {key: _changed(before.get(key), value) for key, value in change.items() if key != _GONE}


def pack(record: object) -> dict[str, Any]:
    """Return a dataclass of the model as plain JSON values, without fields that have their default."""
    missing, kind = object(), type(record)
    return {name: _plain(value) for name, value in vars(record).items() if value != getattr(kind, name, missing)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return pack(value) if is_dataclass(value) else value


def unpack(packed: object) -> Snapshot:
    """Return the snapshot that pack() made plain, marked as one of another time.

    A recording may come from anywhere, so every field is checked: a text where a number should be must not reach a view
    or a rule.  Raises BackendError.
    """
    try:
        snapshot = decode(Snapshot, packed)
    except ValueError as error:
        raise BackendError(
            sentence("recording.damaged", "this recording is damaged: {error}.", error=str(error))
        ) from None
    return replace(snapshot, recorded=True)


def open(spec: str = "") -> Replay:
    """Open the recording that *spec* names, FILE or FILE?speed=60&at=10m.  Raises InvalidRequest or BackendError."""
    path, _, options = spec.partition("?")
    if not path:
        raise InvalidRequest(
            sentence("replay.which", "say which recording is meant, as in --backend replay:node7.rec.")
        )
    chosen = {"speed": "1", "at": "0s"}
    for option in filter(None, options.split("&")):
        name, _, value = option.partition("=")
        if name not in chosen:
            raise InvalidRequest(
                sentence(
                    "replay.option", "a replay has no option {name}: replay:FILE?speed=60&at=10m.", name=repr(name)
                )
            )
        chosen[name] = value
    at = float("inf") if chosen["at"] == "end" else parse_duration(chosen["at"])
    try:
        speed = float(chosen["speed"])
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1e6:
        raise InvalidRequest(
            sentence(
                "replay.speed",
                "speed={speed}: write how many times faster, as in speed=60.",
                speed=f"{chosen['speed']!r:.20}",
            )
        )
    return Replay(path, speed, at)


class Replay:
    """A Backend."""

    name = "replay"
    simulated = False

    def __init__(self, path: str, speed: float = 1.0, at: float = 0.0) -> None:
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self._samples: Iterator[dict[str, Any]] = read_samples(path)
        self._now = self._next = next(self._samples, None)
        if self._now is None:
            raise BackendError(
                sentence("recording.no_whole_sample", "{path} has no whole sample: nothing was recorded.", path=path)
            )
        self._first, self._speed, self._at = _clock(self._now), speed, at
        self._began: float | None = None

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does, with all fields that were recorded."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        until = self._first + self._at + (now - self._began) * self._speed
        while self._next is not None and _clock(self._next) <= until:
            self._now, self._next = self._next, next(self._samples, None)
        assert self._now is not None
        snapshot = unpack(self._now.get("snapshot"))
        if devices is None:
            return replace(snapshot, backend=self.name)
        wanted = {*devices, *(device.parent_uuid for device in snapshot.devices if device.uuid in devices)} - {None}
        chosen = (device for device in snapshot.devices if device.uuid in wanted or device.parent_uuid in wanted)
        return replace(snapshot, backend=self.name, devices=tuple(chosen))

    def close(self) -> None:
        """Close the file."""
        self._samples = iter(())


def _clock(sample: dict[str, Any]) -> float:
    try:
        clock = sample["snapshot"]["clock"]
        return float(clock)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        raise BackendError(sentence("recording.no_clock", "a sample of this recording has no clock.")) from None
