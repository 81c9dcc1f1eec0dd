"""The records of a user's jobs: a directory for each, below $XDG_STATE_HOME/gpuguard/jobs/HOST.

    17/job.json           what was submitted; it is replaced whole when the user changes a job that waits
    17/environment.json   the environment of the submission; a file of its own, because only the start reads it
    17/events             what happened since, one JSON object in each line; lines are only appended
    17/0.1.log            what the first attempt of task 0 printed
    last                  the highest id of the jobs that were removed
    .changed              a random word, written anew after each change of a record
    .ended                the jobs that were seen to have ended, each with the size of its events at that time

Events are only appended.  So what .ended says of a job is true as long as its events have that size, however old the
file is, and otherwise the job is read: without the file all are.

A record appears whole or not at all, and is on the disk before its id is printed.  Homes may be shared by several hosts
(NFS), so each host has its own ids and nothing here is locked: a claim and the dispatcher's lock lie beside the other
claims.  This module does not say what the state of a job is: see states.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpuguard.errors import InvalidRequest
from gpuguard.files import closed_after, create_file, write_all, write_file
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import dumps, sentence
from gpuguard.procfs import boot_id

MOST_TASKS = 10_000  # of one job
_LONGEST = 64 * 2**20  # bytes of a record
_NEW, _CHANGED, _ENDED = ".new.", ".changed", ".ended"

# What happens to a task: the kinds of events.  WITHDRAW undoes the start of a job that was changed at that moment.
START, WITHDRAW, END = "start", "withdraw", "end"
CANCEL, RETRY, RESUME, SKIP = "cancel", "retry", "resume", "skip"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a job gets its devices: the options --backend and --dir, or None for the default."""

    backend: str | None = None
    dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """A job as it was submitted."""

    id: int = 0
    command: tuple[str, ...]
    options: str  # of `gpuguard run`, as JSON
    source: Source
    working_directory: str
    submitted: float  # unix time
    boot: str  # in which it may start, see procfs.boot_id
    tasks: tuple[dict[str, str], ...] = ({},)  # the values of the names in the command
    gpus: int = 1  # for each task
    within: tuple[str, ...] | None = None  # uuids of devices, if CUDA_VISIBLE_DEVICES or the like allowed only these
    within_reason: str = ""  # for people
    note: str | None = None
    git: str | None = None  # commit, with "+" behind it if files were changed
    at_most: int | None = None  # tasks at the same time
    after: tuple[int, ...] = ()  # jobs that must have ended
    after_ok: tuple[int, ...] = ()  # jobs that must have succeeded
    begin: float | None = None  # unix time before which it does not start
    held: bool = False
    held_by: str | None = None  # the user who holds it, if that is not its owner
    rank: float = 0.0  # jobs with a lower one start first
    retries: int = 0
    retry_on: tuple[int, ...] | None = None  # exit statuses, or None for all but 0
    retry_delay: float = 0.0  # seconds, doubled for each further attempt
    requeue: int = 0  # how often a task starts again that exits with REQUEUE, or of which a policy asks it


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """One line of a job's events."""

    kind: str  # START, END, ...
    time: float  # unix
    task: int | None = None  # None for all tasks
    attempt: int = 0  # that starts, that has ended, or that is tried again
    boot: str = ""  # of a start, a retry or a resume
    claim: str | None = None
    gpus: tuple[str, ...] = ()  # labels of the devices
    status: int | None = None  # of an end: the exit status as a shell shows it
    outcome: str | None = None  # of an end: its EndCause
    why: str | None = None  # of an end or a skip, and of a cancel that was not its user's


_BLANK = {name: value for name, value in asdict(JobEvent(kind="", time=0.0)).items() if name not in ("kind", "time")}


@dataclass(frozen=True)
class StoredJob:
    """A job with everything that happened to it."""

    record: JobRecord
    events: tuple[JobEvent, ...] = field(default=())
    size: int = 0  # of the file of the events, in bytes

    @property
    def id(self) -> int:
        """The id of the record."""
        return self.record.id


@dataclass(frozen=True)
class EndedJobs:
    """The content of .ended."""

    sizes: dict[str, int] = field(default_factory=dict)  # of the events of each job, by its id


class JobStore:
    """The records of this user on this host."""

    def __init__(self, place: str | None = None) -> None:
        """Use the directory *place*, by default that of this user on this host."""
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        self.place = place or os.path.join(state, "gpuguard", "jobs", os.uname().nodename)

    def path(self, job: int, name: str = "") -> str:
        """Return the path of the directory of a job, or of a file in it."""
        return os.path.join(self.place, str(job), name) if name else os.path.join(self.place, str(job))

    def log_path(self, job: int, task: int, attempt: int) -> str:
        """Return the path of what an attempt of a task prints."""
        return self.path(job, f"{task}.{attempt}.log")

    def add(self, record: JobRecord, environment: Mapping[str, str]) -> JobRecord:
        """Store a new job and return it with its id.  Raises OSError.

        When this returns, the job is on the disk.  If this process is killed before, the job is there or it is not, and
        no other job ever gets its id.
        """
        os.makedirs(self.place, mode=0o700, exist_ok=True)
        new = os.path.join(self.place, f"{_NEW}{os.getpid()}.{time.monotonic_ns()}")
        os.mkdir(new, 0o700)
        try:
            os.close(create_file(os.path.join(new, "events"), 0o600))
            _write(os.path.join(new, "environment.json"), json.dumps(dict(environment)).encode())
            number = max([self._last(), *self.ids()]) + 1
            while True:
                numbered = replace(record, id=number)
                _write(os.path.join(new, "job.json"), _encoded(numbered))
                _sync(new)
                try:
                    os.rename(new, self.path(number))  # fails if another process has just taken this id
                    break
                except OSError:
                    if not os.path.lexists(self.path(number)):
                        raise
                    number += 1
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        _sync(self.place)
        return numbered

    def replace(self, record: JobRecord) -> None:
        """Store a changed record of a job.  Raises OSError."""
        _write(self.path(record.id, "job.json"), _encoded(record))

    def append(self, job: int, *events: JobEvent) -> None:
        """Add events to a job, on the disk.  Raises OSError; then none of them, or only the first ones, are there."""
        # A line begins with its end of line, so that one that a full disk has cut off does not spoil the next one.
        lines = "".join(f"\n{_line(event)}" for event in events)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        with closed_after(os.open(self.path(job, "events"), flags)) as descriptor:
            write_all(descriptor, lines.encode())
            os.fsync(descriptor)

    def tell(self) -> None:
        """Write into the store that a record has changed.  Raises OSError."""
        write_file(os.path.join(self.place, _CHANGED), os.urandom(8).hex().encode(), mode=0o600)

    def change(self) -> bytes:
        """Return a word that differs after each tell()."""
        with suppress(OSError), open(os.path.join(self.place, _CHANGED), "rb") as file:
            return file.read(100)
        return b""

    def ids(self) -> list[int]:
        """Return the ids of all jobs, the oldest first."""
        try:
            return sorted(int(name) for name in os.listdir(self.place) if name.isdecimal())
        except FileNotFoundError:
            return []

    def read(self, job: int) -> StoredJob | None:
        """Return a job, or None if there is none or its record cannot be read."""
        try:
            record = decode(JobRecord, loads(_content(self.path(job, "job.json"))))
            events = _content(self.path(job, "events"))
        except (OSError, ValueError):
            return None
        if not record.tasks:
            return None
        return StoredJob(record if record.id == job else replace(record, id=job), tuple(_events(events)), len(events))

    def ended(self) -> dict[int, int]:
        """Return the jobs that keep_ended() was told of and to which nothing happened since, with their sizes."""
        try:
            sizes = decode(EndedJobs, loads(_content(os.path.join(self.place, _ENDED)))).sizes
            return {int(job): size for job, size in sizes.items() if self._size(job) == size}
        except (OSError, ValueError):
            return {}

    def keep_ended(self, sizes: Mapping[int, int]) -> None:
        """Remember jobs that have ended, each with the size of the events that say so.  Raises OSError."""
        ended = EndedJobs({str(job): size for job, size in sizes.items()})
        write_file(os.path.join(self.place, _ENDED), json.dumps(asdict(ended)).encode(), mode=0o600)

    def environment(self, job: int) -> dict[str, str]:
        """Return the environment in which a job was submitted.  Raises OSError, ValueError."""
        content = loads(_content(self.path(job, "environment.json")))
        if not isinstance(content, dict):
            raise ValueError(sentence("job.no_environment", "the environment of the job cannot be read"))
        return {str(name): str(value) for name, value in content.items()}

    def remove(self, job: int) -> None:
        """Remove a job with its logs; its id is not given again.  Raises OSError."""
        _write(os.path.join(self.place, "last"), str(max([self._last(), *self.ids()])).encode())
        _sync(self.place)
        shutil.rmtree(self.path(job))

    def remove_unfinished(self, older: float) -> None:
        """Remove what a killed add() has left before *older* (unix time)."""
        with suppress(OSError):
            for entry in os.scandir(self.place):
                if entry.name.startswith(_NEW) and entry.stat().st_mtime < older:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def _size(self, job: str) -> int | None:
        try:
            return os.stat(os.path.join(self.place, job, "events")).st_size
        except OSError:
            return None

    def _last(self) -> int:
        with suppress(OSError, ValueError), open(os.path.join(self.place, "last"), encoding="ascii") as file:
            return int(file.read(20))
        return 0


def _write(path: str, content: bytes) -> None:
    write_file(path, content, mode=0o600, sync=True)


def _sync(directory: str) -> None:
    with closed_after(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor:
        os.fsync(descriptor)


def _encoded(record: JobRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(min(_LONGEST, os.fstat(file.fileno()).st_size))


def _line(event: JobEvent) -> str:
    return dumps({name: value for name, value in asdict(event).items() if value != _BLANK.get(name)}).decode()


def _events(content: bytes) -> Iterator[JobEvent]:
    """Yield the events in *content*; a line that was not finished, or is of a later version, is left out."""
    for line in content.splitlines():
        with suppress(ValueError):
            yield decode(JobEvent, loads(line))


def new_record(command: tuple[str, ...], options: str, source: Source, **facts: Any) -> JobRecord:
    """Return the record of a job that is submitted now and here."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise InvalidRequest(
            sentence("submit.no_directory", "the directory that you are in was removed: `cd` to another one.")
        ) from None
    return JobRecord(
        command=command,
        options=options,
        source=source,
        working_directory=directory,
        submitted=round(time.time(), 3),
        boot=boot_id(),
        **facts,
    )
