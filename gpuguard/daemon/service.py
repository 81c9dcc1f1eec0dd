"""The watchdog for a whole machine, as a service: one instance, policies that are read again, systemd told how it is.

The main thread answers signals, reads the policy file again when it changes, and tells systemd that the watchdog's
thread comes round; so it ends within a second whatever the driver does.  Judges and signals nothing itself: see
watchdog.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from gpuguard import capabilities
from gpuguard.backends import Backend
from gpuguard.backends.client import open_worker
from gpuguard.claims.directory import LockDirectory
from gpuguard.daemon.exemptions import Exemptions
from gpuguard.enforcement.limits import recover_actions
from gpuguard.errors import BackendError, GpuguardError, InvalidRequest
from gpuguard.history import audit_log
from gpuguard.history.queries import query_store, store_path
from gpuguard.history.recorder import Recorder
from gpuguard.model import Event, Snapshot
from gpuguard.notify.templates import ENGLISH, TEMPLATES
from gpuguard.policies.files.loader import PolicyFile, load_in_time
from gpuguard.policies.policy import Judgement
from gpuguard.policies.quota import windows_of
from gpuguard.procfs import boot_clock
from gpuguard.queue.tickets import wanted, who_waits
from gpuguard.source import lock_daemon, write_state
from gpuguard.units import format_count
from gpuguard.watchdog import INTERVAL, Watchdog

if TYPE_CHECKING:
    from gpuguard.clusters.slurm_node import SlurmNode
    from gpuguard.daemon.broker import Broker
    from gpuguard.daemon.server import SocketServer
    from gpuguard.notify.sender import Sender
    from gpuguard.queue.priority import Ticket

# What a service owes its manager: telling systemd how it is, and hearing signals between two of its rounds.
#
# Does nothing of its own: see daemon.


def notify_systemd(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send *state* to the service manager that started us, if one did: sd_notify(3)."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # It restarts, and will ask for signs of life again; or there is no descriptor left for now.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            messenger.settimeout(1.0)
            messenger.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


@contextmanager
def signals(*numbers: signal.Signals) -> Iterator[Callable[[float], set[int]]]:
    """A function that waits so many seconds for these signals and returns those that came."""
    # A pipe instead of blocked signals: hooks would inherit those.
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    former = {number: signal.signal(number, lambda *_: None) for number in numbers}
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)

    def wait(seconds: float) -> set[int]:
        return set(os.read(reader, 1024)) if poll.poll(seconds * 1000) else set()

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in former.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


EXIT_FAULTY, EXIT_RUNNING, EXIT_NO_DRIVER = 1, 3, 4
GAP_INTERVALS = 3  # between two samples, from which on nobody knows what GPUs were used for
PUBLISH_SECONDS = 3.0  # nobody needs to know who uses what more exactly than that
TICK_SECONDS = 2.0  # how often the policy file is looked at; a signal is heard at once
AGAIN_SECONDS = 60.0  # between two readings of a file with faults: LDAP may be up by now, or room for a process
END_SECONDS = 0.6  # for a step that is under way when the daemon is told to end
SEND_SECONDS = 0.2  # and for what is still to be sent
OPEN_SECONDS = 2.0  # for the usage store, whose trouble is told with the policies that need it
PING_SECONDS = 10.0  # between two signs of life for systemd
BEAT_SECONDS = 180.0  # no step takes so long, even if every device hangs; then systemd starts us anew
NEVER_FIRES = "a quota of gpu_hours does not fire while nobody knows what was used"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# What could put a stranger's code into a daemon of root: a fake driver library, a module, a start-up file.
_DANGEROUS = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT")


Say = Callable[[str], object]


@dataclass(frozen=True)
class Settings:
    """What the command line said.

    Args:
        policy: path of the policy file; None: only observe.
        enforce: the first switch.
        interval: seconds at most between samples; None: as the policy file says.
        share_host_pids: act although this is not the first pid namespace.
    """

    policy: str | None = None
    enforce: bool = False
    interval: float | None = None
    share_host_pids: bool = False


def clean_environment(environ: MutableMapping[str, str], *, root: bool) -> None:
    """Make *environ* one in which a daemon of root runs nobody else's code.

    Raises:
        InvalidRequest: it was started with libraries of somebody's choice, which are loaded already.
    """
    if not root:
        return
    if found := [name for name in _DANGEROUS if environ.get(name)]:
        raise InvalidRequest(
            f"{' and '.join(found)} must not be set for a daemon that can signal others: it would run "
            f"whatever library lies there.  Start it by systemd, or with `env -u {found[0]} gpuguard daemon`."
        )
    for name in [name for name in environ if name.startswith("PYTHON")]:
        del environ[name]
    environ["PATH"] = PATH


class Daemon:
    """One daemon of one machine.

    Args:
        backend: where samples come from.
        directory: of the claims; state.json and daemon.lock lie in it, too.
        settings: from the command line.
        say: told in words what an admin should read in the journal.
        on_event: told each Event.
        append: writes an Event down.
    """

    def __init__(
        self,
        backend: Backend,
        directory: LockDirectory,
        settings: Settings,
        say: Say,
        on_event: Callable[[Event], object],
        append: Callable[[Event], bool] = audit_log.append,
    ) -> None:
        self._directory, self._settings, self._say, self._append = directory, settings, say, append
        self._powers = capabilities.lacking()  # which no process gains while it runs
        self._on_event = on_event
        self._sender: Sender | None = None
        self._seen: tuple[int, ...] | None = None  # what the policy file looked like when it was read
        self._fingerprint: str | None = None  # of the policies in force
        self._faulty, self._read_at = False, 0.0
        self._published, self._published_at = True, 0.0
        self.last = Snapshot("", backend.name, 0.0, 0.0, ())  # sample, and ...
        self.waiting: tuple[Ticket, ...] | None = None  # ... who waited then; None: the line could not be read
        self._again = threading.Event()  # somebody asks that the policy file be read again
        self._recorder = Recorder(store_path(directory), say)
        self.watchdog = Watchdog(
            backend,
            (),
            directory,
            enforce=settings.enforce,
            on_event=on_event,
            on_sample=self._publish,
            interval=_interval(settings, INTERVAL),
            append=append,
            share_host_pids=settings.share_host_pids,
        )
        self.watchdog.scheduled = lambda snapshot: self._slurm.given(snapshot)
        self._broker: Broker | None = None  # where this process alone opens the lock files
        if directory.keeper is not None:
            from gpuguard.daemon.broker import Broker

            self._broker = Broker(directory, lambda: open_worker(backend.name))
        use = partial(setattr, self.watchdog, "kept")
        self._keeping = Exemptions(directory, use, lambda: self.last.devices, self._report)

    def once(self) -> tuple[int, Judgement | None]:
        """Look twice, since nobody acts on what was seen once: the exit code, and what was judged at the end."""
        file = self._start() if self._settings.policy else None
        self._remember()
        self._look_back()
        if file:
            self._slurm.learn()
        try:
            self.watchdog.step()
            time.sleep(self.watchdog.interval[0])
            judgement = self.watchdog.step()
        except BackendError as error:
            self._say(f"nothing can be judged: {error}")
            return EXIT_NO_DRIVER, None
        finally:
            if self._sender:
                self._sender.stop(5.0)
        return (EXIT_FAULTY if file and file.faults else 0), judgement

    def serve(self) -> int:
        """Watch until SIGTERM or SIGINT; the exit code."""
        with signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as wait:
            self.watchdog.gpu_seconds = self._recorder.spent
            self._recorder.start()
            if self._settings.policy:
                self._start()
            self._remember()
            self._record("daemon", "started", self.status())
            self.watchdog.start()
            door = self._open_door()
            notify_systemd("READY=1")
            arrived: set[int] = set()
            told, pinged = "", 0.0
            while not arrived & {signal.SIGTERM, signal.SIGINT}:
                arrived = wait(TICK_SECONDS)
                self._reload_if_changed(asked=self._again.is_set() or signal.SIGHUP in arrived)
                self._tend()
                now = time.monotonic()
                if (status := self.status()) != told:
                    told = status
                    notify_systemd(f"STATUS={status}")
                if now - pinged >= PING_SECONDS and now - self.watchdog.last_round < BEAT_SECONDS:
                    pinged = now
                    notify_systemd("WATCHDOG=1")
            notify_systemd("STOPPING=1")
            self.watchdog.stop(END_SECONDS)
            if door:
                door.close()
            if self._broker:
                self._broker.close()
            self._recorder.stop(SEND_SECONDS)
            if self._sender:
                self._sender.stop(SEND_SECONDS)
            self._record("daemon", "stopped")
            return 0

    def status(self) -> str:
        """In one line, for `systemctl status`."""
        number = len(self.watchdog.policies)
        if not number:
            what = "observing only: " + ("the policy file has faults" if self._faulty else "no policy file was named")
        else:
            what = f"{format_count(number, 'policy', 'policies')}, "
            switches = self._settings.enforce, any(policy.enforce for policy in self.watchdog.policies)
            what += "enforcing" if all(switches) else "dry run"
            if any(switches) and not all(switches):
                what += f": {'no policy has mode: enforce' if switches[0] else '--enforce is missing'}"
            what += "" if not self._powers else ", but not against other users"
            if self._faulty:
                what += "; the changed policy file has faults, the last good one is in force"
        return what + (f"; driver unresponsive: {self.watchdog.problem}" if self.watchdog.problem else "")

    def _remember(self) -> None:
        """The limits on signals hold over restarts: a guard in a crash loop is no more dangerous than another."""
        past = recover_actions(audit_log.events_path(), boot_clock(), time.time())
        self.watchdog.remember(past.actions)
        if past.problem:
            self._record("daemon", "past unknown", past.problem)

    def _look_back(self) -> None:
        """Without a recorder: ask the store once, as others do."""
        windows = self._recorder.windows
        try:
            spent = query_store(self._recorder.path, lambda usage: usage.gpu_seconds(windows)) if windows else {}
            self.watchdog.gpu_seconds = lambda: spent
        except GpuguardError as error:
            self._say(f"{NEVER_FIRES}: {error}")

    def _open_door(self) -> SocketServer | None:
        if self._directory.owner is None:
            self._say("`gpuguard keep` does not work without a directory of root's: run `sudo gpuguard setup` once.")
            return None
        if self._broker and (trouble := self._broker.trouble()):
            self._say(trouble)
        from gpuguard.daemon.requests import RequestHandlers, handle
        from gpuguard.daemon.server import SocketServer

        dog, settings = self.watchdog, self._settings
        looks = lambda: self.last, lambda: max(dog.interval[1], dog.pause), dog.status
        does, policy = (self._report, self._again.set), settings.policy
        desk = RequestHandlers(self._directory, self._keeping, *looks, *does, policy, settings.enforce, self._broker)
        try:
            return SocketServer(self._directory, partial(handle, desk))
        except OSError as error:
            if self._broker:  # whoever started us tries it again
                raise GpuguardError(f"nobody can claim, as no socket can be made: {error}.  See `df`.") from error
            self._say(f"`gpuguard keep` does not work: the socket cannot be made: {error}")
            return None

    @cached_property
    def _slurm(self) -> SlurmNode:
        from gpuguard.clusters.slurm_node import SlurmNode

        return SlurmNode(say=self._say)

    def _tend(self) -> None:
        if self._broker:
            with suppress(GpuguardError, OSError):  # doctor says what is wrong with the directory
                self._broker.tend()
                if self.waiting:
                    for event in self._broker.watch_offers(self.last):
                        self._report(event)

    def _reload_if_changed(self, *, asked: bool) -> None:
        if self._settings.policy and (asked or _stat_of(self._settings.policy) != self._seen):
            self._reload()
        elif self._faulty and time.monotonic() - self._read_at >= AGAIN_SECONDS:
            self._reload(said=True)

    def _start(self) -> PolicyFile:
        for lack in self._powers:
            self._say(lack)
        return self._reload()

    def _reload(self, *, said: bool = False) -> PolicyFile:
        """Read the policy file; one with faults changes nothing, and it is said which unless it was *said* before."""
        assert self._settings.policy
        self._again.clear()
        self._seen = _stat_of(self._settings.policy)
        file = load_in_time(self._settings.policy)
        self._faulty, self._read_at = bool(file.faults), time.monotonic()
        if said and file.faults:
            return file
        for fault in (*file.faults, *file.warnings):
            for line in fault.lines(file.path):
                self._say(line)
        if file.faults:
            first = file.faults[0].lines(file.path)[0]
            count = f"{len(file.faults)} fault{'s' * (len(file.faults) != 1)}"
            self._record("policy", "refused", f"{count}, the first: {first}", file)
            return file
        if file.fingerprint != self._fingerprint:
            self._use(file)
        if file.notify:
            from gpuguard.notify.sender import problems

            for problem in problems(file.notify):  # said now, not when the first alarm is lost
                self._record("notify", "will fail", problem)
        return file

    def _use(self, file: PolicyFile) -> None:
        if self._settings.enforce:
            _load_what_acts()
        former, self._sender = self._sender, None
        templates = {**TEMPLATES, **file.messages}
        if file.notify:
            from gpuguard.notify.sender import Sender

            self._sender = Sender(file.notify, self._report, templates=templates)
        self.watchdog.templates = templates
        self.watchdog.language = next(iter(file.messages)) if len(file.messages) == 1 else ENGLISH
        self._fingerprint = file.fingerprint
        self.watchdog.notifier = self._sender
        self._keeping.longest = file.longest_keep
        self.watchdog.interval = _interval(self._settings, file.interval)
        self.watchdog.protected = file.protected
        self.watchdog.policies = file.policies  # last: from here on they are judged by
        self._record("policy", "in force", self.status(), file)
        self._recorder.windows = windows_of(file.policies)
        if self._recorder.windows and (why := self._recorder.why_unknown(OPEN_SECONDS)):
            self._say(f"{NEVER_FIRES}: {why}")
        if former:
            former.stop(0.0)  # what waits in it still goes out

    def _publish(self, snapshot: Snapshot, pause: float) -> None:
        self.last = snapshot
        self.waiting = who_waits(self._directory)
        self._recorder.record(snapshot, GAP_INTERVALS * self.watchdog.interval[1], wanted(self.waiting))
        if snapshot.clock - self._published_at < PUBLISH_SECONDS - pause / 1.5:  # no look comes on the dot
            return
        try:
            write_state(self._directory, snapshot, max(pause, PUBLISH_SECONDS))
            self._published, self._published_at = True, snapshot.clock
        except OSError as error:
            if self._published:
                self._say(f"state.json cannot be written, so `gpuguard who` asks the driver itself: {error}")
            self._published = False

    def _record(self, kind: str, outcome: str, message: str | None = None, file: PolicyFile | None = None) -> None:
        facts = (("path", file.path), ("sha256", file.fingerprint)) if file else ()
        self._report(Event(time.time(), kind, outcome, message=message, facts=facts))

    def _report(self, event: Event) -> bool:
        if not (written := self._append(event)):
            why = f"{audit_log.complaint()}.  Mend that, or name another file by --events."
            self._say(f"the audit log cannot be written, so no process will be signalled: {why}")
        self._on_event(event)
        return written


@contextmanager
def only_one(directory: LockDirectory) -> Iterator[bool]:
    """Whether this is the one daemon of the directory, for as long as the block lasts.

    Raises:
        LockDirectoryError: the lock file cannot be used.
    """
    descriptor = lock_daemon(directory)
    if descriptor is None:  # it may be the one that is just ending: systemd starts the next at once
        time.sleep(0.2)
        descriptor = lock_daemon(directory)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _load_what_acts() -> None:
    """Now: where gpuguard is installed anew under a daemon of months, none of the new one acts for the old one."""
    from gpuguard.enforcement import actions, preflight  # noqa: F401
    from gpuguard.history import queries  # noqa: F401


def _interval(settings: Settings, bounds: tuple[float, float]) -> tuple[float, float]:
    return bounds if settings.interval is None else (min(bounds[0], settings.interval), settings.interval)


def _stat_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
