"""Tell monitoring systems what the GPUs do, who claims them, who waits, and what policies did.

gpuguard metrics                               the page for Prometheus, once
gpuguard metrics --serve                       serve it at http://127.0.0.1:9835/metrics
gpuguard metrics --textfile DIR --every 15s    write it for the textfile collector of node_exporter
gpuguard metrics --influx http://127.0.0.1:8086/write?db=gpuguard --every 15s
gpuguard metrics --influx -                    the lines for InfluxDB, once

A daemon that runs can serve the same without asking the driver again: `gpuguard daemon --metrics`.  Names and units,
alarms and a dashboard: docs/metrics.md.
Exit codes: 0, 1 it could not be written or sent, 2 usage, 4 the driver cannot be reached.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gpuguard import __version__
from gpuguard.backends import Backend
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import QUARANTINED, read_restrictions
from gpuguard.claims.watch import ClaimWatcher
from gpuguard.cli.options import add_source_options, backend_of, directory_of, quantity
from gpuguard.daemon.service import Daemon
from gpuguard.device_state import DeviceUse, uses
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.errors import BackendError, ClaimError, GpuguardError, InvalidRequest, shortage
from gpuguard.history import audit_log
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.exposition import CONTENT_TYPE, to_influx, to_prometheus
from gpuguard.metrics.families import ERRORS, Action, MetricFacts, MetricFamily, metric_families
from gpuguard.metrics.server import Page, Pages, Server
from gpuguard.model import CLOCKS, ECC, WHO_FIELDS, Device, Event, Gap, Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue.tickets import who_waits
from gpuguard.source import daemon_lives, read_state
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    import argparse

    from gpuguard.metrics.server import Pages, Server
    from gpuguard.queue.priority import Ticket

# Where the numbers of `gpuguard metrics` come from: a daemon's last look, or the driver; and its page.
#
# What a daemon tells of itself is in daemon_metrics.


_errors = attrgetter(*ERRORS)
_NOTHING = (None,) * len(ERRORS)
ERRORS_SECONDS = 60.0
ASKED_SECONDS = 300.0  # who has not asked for so long does not ask any more
PAGE_SECONDS = 1.0  # for so long a page is not made anew: who asks a thousand times costs no more than who asks once


class Seldom:
    """What is read only while somebody asks: clocks, and now and then the errors of memory.

    Those are 9 of 30 driver calls per device, and change once in months.
    """

    def __init__(self) -> None:
        self._asked_at = self._seen_at = -math.inf
        self._known: dict[str, Device] = {}

    def groups(self) -> frozenset[str]:
        """What the next sample should read beside what it reads anyway."""
        now = time.monotonic()
        if now - self._asked_at > ASKED_SECONDS:
            return frozenset()
        return frozenset({CLOCKS, ECC} if now - self._seen_at >= ERRORS_SECONDS else {CLOCKS})

    def asked(self) -> None:
        """Somebody asks."""
        self._asked_at = time.monotonic()

    def errors(self, snapshot: Snapshot) -> tuple[Device, ...]:
        """The devices of *snapshot* as they were when their errors were read last."""
        now = time.monotonic()
        if any(_errors(device) != _NOTHING for device in snapshot.devices) or any(
            gap.field in ERRORS for gap in snapshot.gaps
        ):
            self._known, self._seen_at = {device.uuid: device for device in snapshot.devices}, now
        if now - self._seen_at >= 3 * ERRORS_SECONDS:
            return snapshot.devices
        return tuple([self._known.get(device.uuid, device) for device in snapshot.devices])


class DriverSource:
    """What `gpuguard metrics` sees: the daemon's last look where that has all that is asked for, else the driver."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._backend: Backend | None = None
        self._last: Snapshot | None = None
        self._seldom = Seldom()
        self._lookout = ClaimWatcher()
        self.trouble: BackendError | None = None  # of the last look

    def facts(self) -> MetricFacts:
        """The machine now."""
        directory = self._directory()
        self.trouble = None
        try:
            self._last = self._sample(directory)
        except BackendError as error:
            self.trouble = error
        snapshot = self._last
        facts = MetricFacts(time.time(), __version__, snapshot, current=not self.trouble, driver_up=not self.trouble)
        if snapshot and not self.trouble:
            facts = replace(facts, uses=uses(snapshot, process_facts(snapshot)), errors=self._seldom.errors(snapshot))
        return with_directory(facts, directory)

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _directory(self) -> LockDirectory | None:
        try:
            return directory_of(self._args)
        except ClaimError:
            return None

    def _sample(self, directory: LockDirectory | None) -> Snapshot:
        if directory and not self._args.fresh:
            clock = time.clock_gettime(time.CLOCK_BOOTTIME)
            seen = read_state(directory, clock, simulated=self._args.backend.startswith("simulated"))
            if seen and (not self._args.compat or any(device.clock_sm is not None for device in seen.devices)):
                return seen
        self._backend = self._backend or backend_of(self._args)
        self._seldom.asked()
        snapshot = self._backend.sample(WHO_FIELDS | self._seldom.groups())
        try:
            if directory is None:
                raise ClaimError("there is no directory of claims that can be used")
            return replace(snapshot, claims=self._lookout.look(directory, [device.uuid for device in snapshot.devices]))
        except ClaimError as error:
            return replace(snapshot, gaps=(*snapshot.gaps, Gap(None, "claims", " ".join(str(error).split()))))


def with_directory(facts: MetricFacts, directory: LockDirectory | None) -> MetricFacts:
    """*facts* with what lies among the claims and is not known yet: who waits, what is out of service, and a daemon."""
    if directory is None:
        return facts
    return replace(
        facts,
        waiting=facts.waiting if facts.waiting is not None else lines_of(who_waits(directory)),
        quarantined=frozenset(read_restrictions(directory, QUARANTINED, facts.now)),
        daemon_up=facts.daemon_up or daemon_lives(directory),
    )


def lines_of(waiting: Iterable[Ticket] | None) -> tuple[tuple[str, float], ...] | None:
    """What Facts tell of those who wait."""
    return None if waiting is None else tuple([(ticket.user, ticket.since) for ticket in waiting])


def text_of(facts: MetricFacts, compat: list[str]) -> str:
    """The page for Prometheus: our own names, and those of other exporters."""
    found = metric_families(facts)
    for name in dict.fromkeys(compat):
        found += _compat()[name](facts)
    return to_prometheus(found)


def _compat() -> Mapping[str, Callable[[MetricFacts], list[MetricFamily]]]:
    from gpuguard.metrics.compat import COMPAT  # few ask for it, and a daemon without it is 0.2 MiB smaller

    return COMPAT


def pages(facts: Callable[[], MetricFacts], compat: list[str]) -> Pages:
    """/metrics, in which ?compat=dcgm adds names to those of *compat*."""
    made: dict[tuple[str, ...], tuple[float, str]] = {}
    usual = tuple(name for name in _compat() if name in compat) if compat else ()

    def page(path: str, query: Mapping[str, list[str]]) -> Page:
        if path == "/":
            return Page(f"gpuguard {__version__} on {os.uname().nodename}: the numbers are at /metrics\n")
        if path != "/metrics":
            return Page("there is only /metrics\n", status=404)
        names = usual
        if asked := query.get("compat"):
            if unknown := set(asked) - set(_compat()):
                return Page(f"compat: there is no {min(unknown)!r}, but {' and '.join(_compat())}\n", status=400)
            names = tuple(name for name in _compat() if name in (*compat, *asked))
        now = time.monotonic()
        if names not in made or now - made[names][0] >= PAGE_SECONDS:
            made[names] = now, text_of(facts(), list(names))
        return Page(made[names][1], CONTENT_TYPE)

    return page


# Where numbers are served, for `gpuguard metrics --serve` and `gpuguard daemon --metrics`.


ADDRESS = "127.0.0.1:9835"


def add_expose_option(parser: argparse.ArgumentParser, name: str) -> None:
    """The option without which no other machine can reach us."""
    parser.add_argument(
        name,
        metavar="NAMES",
        nargs="?",
        const="",
        help="allow an address that other machines reach; NAMES: host names, with commas, by which they ask for us",
    )


def server_at(address: str, expose: str | None, pages: Pages) -> Server:
    """A server of *pages* at *address*; see add_expose_option.

    Raises:
        InvalidRequest: it cannot be served there.
    """
    from gpuguard.metrics.server import Server, host_names, listen

    names = [name.strip() for name in (expose or "").split(",")]
    return Server(listen(address, exposed=expose is not None), pages, host_names(names))


FILE = "gpuguard.prom"
TOKEN = "GPUGUARD_INFLUX_TOKEN"
_SHORTEST_SECONDS = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--serve", metavar="ADDRESS", nargs="?", const=ADDRESS, help=f"over HTTP, until Ctrl-C (default: {ADDRESS})"
    )
    where.add_argument(
        "--textfile", metavar="DIR", help=f"as {FILE} in this directory; with --every it goes when we end"
    )
    where.add_argument("--influx", metavar="URL", help="as InfluxDB's line protocol, by POST; - is standard output")
    parser.add_argument("--every", metavar="DURATION", help="again and again, until Ctrl-C (default: once)")
    parser.add_argument(
        "--compat",
        metavar="EXPORTER",
        action="append",
        default=[],
        choices=sorted(COMPAT),
        help="tell it under the names of that exporter, too: dcgm or nvitop (repeatable)",
    )
    parser.add_argument("--token-file", metavar="FILE", help=f"InfluxDB's token (default: ${TOKEN})")
    parser.add_argument("--fresh", action="store_true", help="ask the driver, even if the daemon did so just now")
    add_expose_option(parser, "--expose")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    every = quantity("--every", args.every, parse_duration)
    if every is not None and every < _SHORTEST_SECONDS:
        raise InvalidRequest("--every needs at least 1s.")
    if args.serve and every is not None:
        raise InvalidRequest("--every does not go with --serve: whoever asks decides when.")
    if args.expose is not None and not args.serve:
        raise InvalidRequest("--expose is about --serve.")
    if args.compat and args.influx:
        raise InvalidRequest("--compat does not go with --influx: those are names for Prometheus.")
    if args.token_file and not args.influx:
        raise InvalidRequest("--token-file is about --influx.")
    signal.signal(signal.SIGTERM, _end)
    looking = DriverSource(args)
    try:
        if args.serve:
            return _serve(args, looking)
        return _again_and_again(_output(args, looking), every, args.textfile)
    except KeyboardInterrupt:
        return 0
    finally:
        looking.close()


def _serve(args: argparse.Namespace, looking: DriverSource) -> int:
    server = server_at(args.serve, args.expose, pages(looking.facts, args.compat))
    print(f"gpuguard: serving http://{server.address}/metrics", file=sys.stderr, flush=True)
    server.run()
    return 0


def _output(args: argparse.Namespace, looking: DriverSource) -> Callable[[], None]:
    """A function that looks once and puts it where it is wanted; raises when the driver cannot be reached."""
    put = _put_lines(args) if args.influx else _put_page(args)

    def once() -> None:
        put(looking)
        if looking.trouble:
            raise looking.trouble  # behind the page, which says so, too

    return once


def _put_page(args: argparse.Namespace) -> Callable[[DriverSource], None]:
    directory = os.path.abspath(args.textfile) if args.textfile else None
    if directory and not os.path.isdir(directory):
        raise InvalidRequest(f"--textfile: {directory} is no directory: make it, and give it to node_exporter, too.")

    def put(looking: DriverSource) -> None:
        text = text_of(looking.facts(), args.compat)
        if directory:
            _replace(directory, text)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    return put


def _put_lines(args: argparse.Namespace) -> Callable[[DriverSource], None]:
    from gpuguard.metrics.influx import Outbox

    outbox = None if args.influx == "-" else Outbox(args.influx, _token(args))

    def put(looking: DriverSource) -> None:
        facts = looking.facts()
        host = facts.snapshot.host if facts.snapshot else os.uname().nodename
        lines = to_influx(metric_families(facts), host, facts.now)
        if outbox:
            outbox.send(lines)
        else:
            print("\n".join(lines), flush=True)

    return put


def _token(args: argparse.Namespace) -> str | None:
    from gpuguard.notify.secrets import Secret, Undelivered

    try:
        if args.token_file:
            return Secret(file=os.path.abspath(args.token_file)).read()
    except Undelivered as error:
        raise InvalidRequest(f"--token-file: {error}.") from None
    return os.environ.get(TOKEN) or None


def _again_and_again(once: Callable[[], None], every: float | None, directory: str | None) -> int:
    if every is None:
        once()
        return 0
    told = ""
    try:
        while True:
            begun = time.monotonic()
            try:
                once()
                told = ""
            except (GpuguardError, OSError) as error:
                text = str(error) if isinstance(error, GpuguardError) else shortage(error)
                if isinstance(error, InvalidRequest) or not text:
                    raise
                if text != told:  # it may pass
                    told = text
                    _say(told)
            time.sleep(max(0.1, every - (time.monotonic() - begun)))
    finally:
        if directory:
            _remove(directory)


def _replace(directory: str, text: str) -> None:
    """Put *text* where the old page is: readers see one or the other, whole."""
    unfinished = os.path.join(directory, f".{FILE}.{os.getpid()}")  # node_exporter reads *.prom alone
    try:
        _tidy(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o644), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        os.rename(unfinished, os.path.join(directory, FILE))
    except OSError as error:
        if os.path.lexists(unfinished):
            os.unlink(unfinished)
        raise GpuguardError(f"{directory}/{FILE} cannot be written: {error.strerror}.") from error


def _tidy(directory: str) -> None:
    """Remove what writers left that were killed."""
    for name in os.listdir(directory):
        pid = name.removeprefix(f".{FILE}.")
        if pid != name and (pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")):
            with suppress(OSError):  # somebody else's, or a directory of that name: no reason not to write ours
                os.unlink(os.path.join(directory, name))


def _remove(directory: str) -> None:
    """Old numbers would look like new ones: nobody writes them any more."""
    try:
        os.unlink(os.path.join(directory, FILE))
    except OSError:
        return  # it is gone, or not ours to take


def _say(text: str) -> None:
    from gpuguard.sanitize import neutralise

    print(f"gpuguard: {neutralise(' '.join(text.split()))}", file=sys.stderr, flush=True)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


# What a daemon that was started with --metrics tells: its last look, and what it has counted.
#
# A scrape is answered in a thread of its own, and asks neither the driver nor the daemon's loop.


END_SECONDS = 0.2  # for a page that is being made when the daemon ends
STALE_INTERVALS = 3  # a sample that is older says nothing about now


class DaemonNumbers:
    """The page of one daemon.

    Args:
        address: where it is served.
        expose: see add_expose_option.
        directory: of the claims.

    Raises:
        InvalidRequest: it cannot be served there.
    """

    def __init__(self, address: str, expose: str | None, directory: LockDirectory) -> None:
        self.counting, self._directory = Counting(), directory
        self._told: Callable[[], MetricFacts] | None = None
        self._server: Server = server_at(address, expose, pages(self._facts, []))

    def start(self, guard: Daemon) -> str:
        """Serve what *guard* sees, which reads more while somebody asks; returns where, in words."""
        seldom = Seldom()
        guard.watchdog.further = seldom.groups
        self._told = facts_of(guard, self._directory, self.counting, seldom)
        self._server.start()
        return f"serving http://{self._server.address}/metrics"

    def close(self) -> None:
        """Serve no more."""
        self._server.close(END_SECONDS)

    def _facts(self) -> MetricFacts:
        return self._told() if self._told else MetricFacts(time.time(), __version__)


@dataclass(frozen=True)
class Counted:
    """What a daemon has done since it started."""

    actions: dict[Action, int]
    unrecorded: int
    troubles: int


class Counting:
    """Counts Events on their way into the audit log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: Counter[Action] = Counter()
        self._unrecorded = self._troubles = 0

    def append(self, event: Event) -> bool:
        """As history.append."""
        written = audit_log.append(event)
        policy = dict(event.facts).get("policy")
        with self._lock:
            self._unrecorded += not written
            self._troubles += event.kind == "watchdog" and event.outcome != "watching again"
            if event.kind in ACTIONS and policy is not None:
                self._actions[str(policy), event.kind, event.outcome] += 1
        return written

    def counted(self) -> Counted:
        """So far."""
        with self._lock:
            return Counted(dict(self._actions), self._unrecorded, self._troubles)


def facts_of(guard: Daemon, directory: LockDirectory, counting: Counting, seldom: Seldom) -> Callable[[], MetricFacts]:
    """What a daemon saw last, without asking the driver; to be called in any thread."""
    known: tuple[Snapshot | None, tuple[DeviceUse, ...]] = (None, ())

    def facts() -> MetricFacts:
        nonlocal known
        dog, snapshot, waiting, counted = guard.watchdog, guard.last, guard.waiting, counting.counted()
        longest = max(dog.interval[1], dog.pause)
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - snapshot.clock
        current = dog.trouble is None and age <= STALE_INTERVALS * longest
        seldom.asked()
        if current and known[0] is not snapshot:
            known = snapshot, uses(snapshot, dog.seen(snapshot))
        seen = bool(snapshot.taken_at)
        found = MetricFacts(
            time.time(),
            __version__,
            snapshot if seen else None,
            current=current,
            errors=seldom.errors(snapshot),
            uses=known[1] if current else (),
            waiting=lines_of(waiting) if current else None,
            driver_up=current if seen or dog.trouble else None,  # None: it has not been asked yet
            interval=longest,
            troubles=counted.troubles,
            actions=counted.actions,
            unrecorded=counted.unrecorded,
            daemon_up=True,
        )
        return with_directory(found, directory)

    return facts
