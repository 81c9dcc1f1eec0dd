"""Query hosts over the system's ssh, many at once, each with its own time-out; replies are returned as they come.

This is the user's own ssh with the user's own configuration, keys, agent and jump hosts, except that it never prompts
(BatchMode), forwards nothing, and runs no command of ~/.ssh/config besides the query.  One epoll serves all, without
threads.  This module does not interpret the replies: see answers.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from gpuguard.enforcement import signals
from gpuguard.errors import GpuguardError
from gpuguard.locale import _
from gpuguard.units import format_duration

TIMEOUT = 10.0  # seconds per host
PARALLEL = 64  # a fleet of up to 64 answers within one time-out, however many of its hosts hang
OUT_MOST = 2 * 2**20  # bytes; `who --json` with 8 devices and 40 processes has 40 KB, with 2,000 processes 1 MB
ERR_MOST = 8 * 2**10
_KILL_AFTER = 1.0  # seconds between the two signals to an ssh whose time is over

# RemoteCommand, LocalCommand and forwardings of ~/.ssh/config are for people who work there.
_OPTIONS = (
    "BatchMode=yes", "ConnectionAttempts=1", "ClearAllForwardings=yes", "PermitLocalCommand=no", "RemoteCommand=none",
    "LogLevel=ERROR",
)  # fmt: skip


@dataclass(frozen=True)
class FleetQuery:
    """How hosts are queried."""

    command: str  # for the shell of the other side
    ssh: tuple[str, ...] = ("ssh",)
    timeout: float = TIMEOUT
    parallel: int = PARALLEL


@dataclass(frozen=True)
class Reply:
    """The outcome of one ssh."""

    host: str
    seconds: float  # since it was asked
    status: int | None = None
    out: bytes = b""
    err: bytes = b""
    fault: str | None = None  # why there is no reply


@dataclass
class _HostQuery:
    host: str
    process: subprocess.Popen[bytes]
    pidfd: int
    began: float
    said: dict[int, bytearray] = field(default_factory=dict)  # by descriptor: standard output, standard error


def ssh_words(how: FleetQuery, host: str) -> list[str]:
    """Return the command line of one query.  Whatever follows ``--`` is no option, even if it looks like one."""
    options = [f"-o{option}" for option in (*_OPTIONS, f"ConnectTimeout={max(1, round(how.timeout))}")]
    return [*how.ssh, "-T", "-n", "-x", "-a", *options, "--", host, how.command]


class Pool:
    """The hosts to query and the queries that are running; close() ends those."""

    def __init__(self, how: FleetQuery) -> None:
        self._how = how
        self._todo: deque[str] = deque()
        self._running: dict[int, _HostQuery] = {}  # by pidfd
        self._ending: list[tuple[_HostQuery, float]] = []
        self._selector = selectors.DefaultSelector()

    @property
    def waiting_for(self) -> list[str]:
        """The hosts that have not answered yet, beginning with those that were asked first."""
        return [*(query.host for query in self._running.values()), *self._todo]

    def query(self, hosts: Sequence[str]) -> None:
        """Query these hosts as well, as soon as there is room."""
        self._todo.extend(hosts)

    def step(self, seconds: float) -> list[Reply]:
        """Wait at most *seconds* for replies and return them, or [] if none came."""
        with _undisturbed():
            self._start()
        now = time.monotonic()
        soonest = min((query.began + self._how.timeout - now for query in self._running.values()), default=seconds)
        ended: list[Reply] = []
        for key, _events in self._selector.select(max(0.0, min(seconds, soonest))):
            query: _HostQuery = key.data
            if query.pidfd not in self._running:
                continue  # it was given up in this very step
            ended += [self._ended(query)] if key.fd == query.pidfd else self._read(query, key.fd)
        now = time.monotonic()
        late = [query for query in self._running.values() if now - query.began >= self._how.timeout]
        ended += [
            self._given_up(query, _("no answer within {timeout}").format(timeout=format_duration(self._how.timeout)))
            for query in late
        ]
        self._reap()
        return ended

    def close(self) -> None:
        """End the queries that have no reply yet."""
        for query in list(self._running.values()):
            self._given_up(query, "")
        self._todo.clear()
        until = time.monotonic() + _KILL_AFTER + 1.0
        while self._ending and time.monotonic() < until:
            self._reap()
            time.sleep(0.01 if self._ending else 0.0)
        self._selector.close()

    def _start(self) -> None:
        # One time for all that start now: 50 processes take seconds on a busy machine, and would end as much later.
        began = time.monotonic()
        while self._todo and len(self._running) < self._how.parallel:
            host = self._todo.popleft()
            try:
                process = subprocess.Popen(
                    ssh_words(self._how, host),
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN):
                    if not self._running:
                        raise
                    self._todo.appendleft(host)  # as many run at once as this machine allows
                    return
                raise GpuguardError(
                    _(
                        "{ssh} cannot be run: {strerror}.  Install it (apt-get install openssh-client), or name "
                        "another one with --ssh."
                    ).format(ssh=self._how.ssh[0], strerror=error.strerror)
                ) from None
            query = _HostQuery(host, process, os.pidfd_open(process.pid), began)
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                query.said[pipe.fileno()] = bytearray()
                self._selector.register(pipe.fileno(), selectors.EVENT_READ, query)
            self._selector.register(query.pidfd, selectors.EVENT_READ, query)
            self._running[query.pidfd] = query

    def _read(self, query: _HostQuery, descriptor: int) -> list[Reply]:
        """Read what is there; return [] unless that ended the query."""
        assert query.process.stderr is not None
        # Of an answer one byte more than is allowed, which shows that it is too long; of errors the beginning.
        most = ERR_MOST if descriptor == query.process.stderr.fileno() else OUT_MOST + 1
        try:
            piece = os.read(descriptor, 2**16)
        except BlockingIOError:
            return []
        if not piece:
            self._selector.unregister(descriptor)
            return []
        said = query.said[descriptor]
        said += piece[: max(0, most - len(said))]
        if len(said) > OUT_MOST:
            return [
                self._given_up(query, _("it answered with more than {out_most}MiB").format(out_most=OUT_MOST // 2**20))
            ]
        return []

    def _ended(self, query: _HostQuery) -> Reply:
        # The end of ssh counts, not that of its pipes: a master connection that it left may hold them open for hours.
        for descriptor in query.said:
            while descriptor in self._selector.get_map() and query.pidfd in self._running:
                before = len(query.said[descriptor])
                if too_much := self._read(query, descriptor):
                    return too_much[0]
                if len(query.said[descriptor]) == before:
                    break
        out, err = (bytes(said) for said in query.said.values())
        status = query.process.wait()
        self._forget(query)
        os.close(query.pidfd)
        return Reply(query.host, time.monotonic() - query.began, status, out, err)

    def _given_up(self, query: _HostQuery, fault: str) -> Reply:
        self._forget(query)
        signals.forward(query.pidfd, signal.SIGTERM)
        self._ending.append((query, time.monotonic() + _KILL_AFTER))
        return Reply(query.host, time.monotonic() - query.began, fault=fault)

    def _forget(self, query: _HostQuery) -> None:
        for descriptor in (*query.said, query.pidfd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        for pipe in (query.process.stdout, query.process.stderr):
            assert pipe is not None
            pipe.close()
        del self._running[query.pidfd]

    def _reap(self) -> None:
        still: list[tuple[_HostQuery, float]] = []
        for query, until in self._ending:
            if query.process.poll() is not None:
                os.close(query.pidfd)
                continue
            if time.monotonic() >= until:
                signals.forward(query.pidfd, signal.SIGKILL)
            still.append((query, until))
        self._ending = still


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold Ctrl-C back until what was started is noted, because otherwise an ssh would be left running."""
    came: list[tuple[int, FrameType | None]] = []
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in former.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda *which: came.append(which))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
    for which in came:
        ours[signal.Signals(which[0])](*which)
