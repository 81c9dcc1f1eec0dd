"""The watchdog as the service of a machine: a single instance that rereads its policies and reports to systemd.

The main thread handles signals, reads the policy file again when it changes, and tells systemd that the watchdog's
thread still completes its rounds.  So the daemon ends within a second, whatever the driver does.  This module judges
and signals nothing: see watchdog.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuguard.backends import Backend
from gpuguard.backends.client import open_worker
from gpuguard.claims.directory import LockDirectory, daemon_files, stamp_path
from gpuguard.clusters.slurm_node import SlurmNode
from gpuguard.daemon.broker import Broker
from gpuguard.daemon.exemptions import Exemptions
from gpuguard.daemon.jobs_seen import JobsSeen
from gpuguard.daemon.queue_settings import REREAD_SECONDS, QueueSettingsFile
from gpuguard.daemon.requests import RequestContext, handle
from gpuguard.daemon.socket_server import SocketServer
from gpuguard.daemon.upkeep import ClaimUpkeep
from gpuguard.enforcement.guard_limits import recover_actions
from gpuguard.errors import EXIT_NO, EXIT_NO_DRIVER, BackendError, GpuguardError, InvalidRequest
from gpuguard.files import version_of, write_file
from gpuguard.history import audit_log
from gpuguard.history.queries import query_store, store_path
from gpuguard.history.recorder import Recorder
from gpuguard.locale.messages import all_of, nsentence, sentence
from gpuguard.model import Event, EventKind, EventOutcome, Snapshot
from gpuguard.notify.sender import Sender, problems
from gpuguard.notify.targets import Email
from gpuguard.notify.templates import ENGLISH, TEMPLATES
from gpuguard.policies.policy import Judgement, absent, unjudged
from gpuguard.policies.rules import needs_of
from gpuguard.policy_files import last_good
from gpuguard.policy_files.loader import PolicyFile, load_in_time, parse
from gpuguard.procfs import boot_clock
from gpuguard.queue.priority import Ticket
from gpuguard.queue.reservations import record_arrivals_seen
from gpuguard.queue.tickets import touch, waiting_tickets, wanted
from gpuguard.source import (
    desktop_memory,
    lock_daemon,
    publish_desktop_memory,
    read_last_state,
    write_state,
)
from gpuguard.units import local_time
from gpuguard.users import missing_capabilities
from gpuguard.watchdog import INTERVAL, SiteRules, Watchdog
from gpuguard.yaml_files.decoder import Accounts

GAP_INTERVALS = 3  # between two samples, from which on it is unknown what GPUs were used for
PUBLISH_SECONDS = 3.0  # between two publications: no reader needs to know more exactly who uses which GPU
TICK_SECONDS = 2.0  # between two looks at the policy file; a signal is handled at once
STOP_SECONDS = 0.6  # for a step that is under way when the daemon ends
SEND_SECONDS = 0.2  # for data that is still to be sent then
OPEN_SECONDS = 2.0  # for the usage store, whose trouble is reported with the policies that need it
PING_SECONDS = 10.0  # between two signs of life for systemd
LOG_BYTES = 2**20  # of the log that are searched for the end of the previous daemon
BEAT_SECONDS = 180.0  # no step takes this long, even if every device hangs; after it, systemd restarts the daemon
NEVER_FIRES = "a quota of gpu_hours does not fire while it is unknown what was used"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# These could put another user's code into root's daemon: a fake driver library, a module, a start-up file.
_DANGEROUS = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT")

Report = Callable[[str], object]


@dataclass(frozen=True)
class DaemonSettings:
    """The settings from the command line."""

    policy: str | None = None  # path of the policy file, or None to only observe
    enforce: bool = False  # the first switch
    interval: float | None = None  # seconds at most between samples, or None for those of the policy file
    share_host_pids: bool = False  # act although this is not the first pid namespace
    last_good: bool = True  # guard by the last good text while the policy file has faults
    once: bool = False  # only look, while another daemon may run: change nothing that others read

    def intervals(self, of_file: tuple[float, float]) -> tuple[float, float]:
        """Return the shortest and the longest seconds between samples; *of_file* are those of the policy file."""
        return of_file if self.interval is None else (min(of_file[0], self.interval), self.interval)


def clean_environment(environ: MutableMapping[str, str], *, root: bool) -> None:
    """Make *environ* safe for root's daemon.

    Raises:
        InvalidRequest: libraries of its caller's choice are loaded already.
    """
    if not root:
        return
    libraries = environ.get("LD_LIBRARY_PATH", "")
    trouble = next((found for path in libraries.split(":") if (found := _not_roots_alone(path))), None)
    safe = {"LD_LIBRARY_PATH"} if trouble is None else set()
    if dangerous := [name for name in _DANGEROUS if environ.get(name) and name not in safe]:
        where = f" ({trouble})" if "LD_LIBRARY_PATH" in dangerous else ""
        raise InvalidRequest(
            f"{' and '.join(dangerous)}{where} must not be set for a daemon that can signal others: it would run "
            f"whatever library lies there.  Start it by systemd, or with `env -u {dangerous[0]} gpuguard daemon`."
        )
    for name in [name for name in environ if name.startswith("PYTHON")]:
        del environ[name]
    environ["PATH"] = PATH


def _not_roots_alone(path: str) -> str | None:
    """Return why users other than root could put a library into the directory *path*, or None if they could not."""
    if not os.path.isabs(path):
        return f"{path!r} is no absolute path"
    if (real := os.path.realpath(path)) != os.path.normpath(path):  # else the directories of all links would count
        return f"{path} goes over a link: write {real}"
    for directory in (Path(real), *Path(real).parents):
        try:
            status = directory.lstat()
        except OSError as error:
            return f"{directory}: {error.strerror}"
        if status.st_uid or status.st_mode & 0o022 or not stat.S_ISDIR(status.st_mode):
            return f"{directory} can be changed by others than root, or is no directory"
    return None


class Daemon:
    """One daemon of one machine.

    Args:
        report: called with what an admin should read in the journal.
        on_event: called with each Event.
        append: writes an Event down.
    """

    def __init__(
        self,
        backend: Backend,
        directory: LockDirectory,
        settings: DaemonSettings,
        report: Report,
        on_event: Callable[[Event], object],
        append: Callable[[Event], bool] = audit_log.append,
    ) -> None:
        self._directory, self._settings, self._report, self._append = directory, settings, report, append
        self._lacking = missing_capabilities()  # no process gains capabilities while it runs
        self._on_event = on_event
        self._sender: Sender | None = None
        self._file_status: tuple[int, ...] | None = None  # of the policy file when it was read
        self._fingerprint: str | None = None  # of the policies in force
        self._faults, self._read_at = 0, 0.0  # of the policy file
        self._last_good: PolicyFile | None = None
        self._state = os.path.dirname(store_path(directory))
        self._unknown: tuple[str, ...] = ()  # names in the file that mean no user any more, as last reported
        self._absent: tuple[str, ...] = ()  # what in the policies fits no GPU here, as last reported
        self._published, self._published_at = True, 0.0
        self._jobs_seen = JobsSeen()
        self._lost = 0, 0.0  # how many events the log could not take, and the time of the first
        self._trouble: str | None = None  # with the broker when it was last tended
        self._metrics_trouble: str | None = None  # why the metrics are not served, though they should be
        self.last = Snapshot("", backend.name, 0.0, 0.0, ())  # the last sample
        self.waiting: tuple[Ticket, ...] | None = None  # those that waited then, or None if the queue is unreadable
        self._reload_requested = threading.Event()
        self._recorder = Recorder(store_path(directory), report)
        self._slurm = SlurmNode(say=report)
        self.watchdog = Watchdog(
            backend,
            (),
            directory,
            enforce=settings.enforce,
            on_event=on_event,
            on_sample=self._publish,
            interval=settings.intervals(INTERVAL),
            append=self._write,
            share_host_pids=settings.share_host_pids,
        )
        self.watchdog.scheduled, self.watchdog.only_looks = self._slurm.given, settings.once
        # There is a broker only where this process alone opens the lock files.
        reader = partial(open_worker, backend.name, desktop_memory=lambda: desktop_memory(lambda: directory))
        self._broker = None if directory.keeper is None else Broker(directory, reader)
        self._upkeep = ClaimUpkeep(directory, self._log)
        self.queue_settings = QueueSettingsFile(directory, partial(self._log, "queue"), report)
        exempt = partial(setattr, self.watchdog, "kept")
        self._exemptions = Exemptions(directory, exempt, lambda: self.last.devices, self._record)

    def once(self) -> tuple[int, Judgement | None]:
        """Sample twice, because no action follows from one sample; return the exit code and the last judgement."""
        file = self._start() if self._settings.policy else None
        self._remember()
        windows = self._recorder.windows
        try:  # no recorder runs here, so the usage store is queried once, as other processes do
            spent = query_store(self._recorder.path, lambda usage: usage.gpu_seconds(windows)) if windows else {}
            self.watchdog.gpu_seconds = lambda: spent
        except GpuguardError as error:
            self._report(f"{NEVER_FIRES}: {error}")
        if file:
            self._slurm.refresh()
        try:
            self.watchdog.step()
            time.sleep(self.watchdog.site_rules.interval[0])
            judgement = self.watchdog.step()
        except BackendError as error:
            self._report(f"nothing can be judged: {error}")
            return EXIT_NO_DRIVER, None
        finally:
            if self._sender:
                self._sender.stop(5.0)
        return (EXIT_NO if file and file.faults else 0), judgement

    def serve(self, open_metrics: Callable[[], object] | None = None) -> int:
        """Watch until SIGTERM or SIGINT, and return the exit code.

        *open_metrics* begins to serve the metrics.  It is called again after a GpuguardError, because any user can
        listen at the address first, and the guard must go on even without its numbers.
        """
        with signal_waiter(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as wait:
            self.watchdog.gpu_seconds = self._recorder.spent
            self._recorder.start()
            with suppress(OSError):  # the policies of the previous daemon
                os.unlink(daemon_files(self._directory).file(last_good.POLICIES))
            if self._settings.policy:
                self._start()
            self._remember()
            cut_off = sentence("daemon.cut_off", "the daemon before was killed, or the machine went down")
            self._log("daemon", "started", all_of([self.status(), *([cut_off] if _was_cut_off() else [])]))
            self.watchdog.start()
            server = self.open_socket()
            open_metrics = self._open_metrics(open_metrics)
            notify_systemd("READY=1")
            self._loop(wait, open_metrics)
            notify_systemd("STOPPING=1")
            self.watchdog.stop(STOP_SECONDS)
            if server:
                server.close()
            if self._broker:
                self._broker.close()
            self._recorder.stop(SEND_SECONDS)
            if self._sender:
                self._sender.stop(SEND_SECONDS)
            self._log("daemon", "stopped")
            return 0

    def _loop(self, wait: Callable[[float], set[int]], open_metrics: Callable[[], object] | None) -> None:
        """Do the work of the main thread until a signal ends it."""
        received: set[int] = set()
        sent, pinged = "", 0.0
        while not received & {signal.SIGTERM, signal.SIGINT}:
            received = wait(TICK_SECONDS)
            # This is not done in the thread that samples, because users may have many files.
            self.waiting = waiting_tickets(self._directory)
            if not self.watchdog.problem:
                with suppress(GpuguardError, OSError):  # about the files: the next round tries again
                    record_arrivals_seen(self._directory, self.last, self.waiting or (), time.time())
            self.reload_if_changed(requested=self._reload_requested.is_set() or signal.SIGHUP in received)
            self._look_for_devices()
            self.queue_settings.look()
            if self._broker:
                self._tend(self._broker)
            open_metrics = self._open_metrics(open_metrics)
            if self.waiting is not None:
                self._upkeep.look(ticket.pid for ticket in self.waiting)
            now = time.monotonic()
            if (status := self.status()) != sent:
                sent = status
                notify_systemd(f"STATUS={status}")
            if now - pinged >= PING_SECONDS and now - self.watchdog.last_round < BEAT_SECONDS:
                pinged = now
                notify_systemd("WATCHDOG=1")

    def status(self) -> str:
        """Return the state of the daemon in one line, for `systemctl status`."""
        if number := len(self.watchdog.policies):
            switches = self._settings.enforce, any(policy.enforce for policy in self.watchdog.policies)
            what = (
                nsentence("daemon.enforcing", "{number} policy, enforcing", "{number} policies, enforcing", number)
                if all(switches)
                else nsentence("daemon.dry_run", "{number} policy, dry run", "{number} policies, dry run", number)
            )
            if switches == (True, False):
                what = sentence("daemon.no_policy_enforces", "{status}: no policy has mode: enforce", status=what)
            elif switches == (False, True):
                what = sentence("daemon.enforce_missing", "{status}: --enforce is missing", status=what)
            if self._lacking and all(switches):
                what = sentence("daemon.not_others", "{status}, but not against other users", status=what)
        elif self._faults:
            what = sentence("daemon.observing_faults", "observing only: the policy file has faults")
        else:
            what = sentence("daemon.observing", "observing only: no policy file was named")
        troubles = [self.unguarded() if number else None]
        if reason := self._metrics_trouble:
            troubles.append(sentence("daemon.no_metrics", "the metrics are not served: {reason}", reason=reason))
        if problem := self.watchdog.problem:
            troubles.append(sentence("driver.unresponsive", "driver unresponsive: {problem}", problem=problem))
        return all_of([what, *filter(None, troubles)])

    @property
    def faults(self) -> int:
        """The number of faults in the policy file, including the names in it that mean no user or GPU here."""
        return self._faults + len(self._unknown) + len(self._absent)

    def unguarded(self) -> str | None:
        """Return in words which parts of the policy file the daemon does not carry out, or None if there are none."""
        if not self._faults or not self._settings.policy:
            return all_of((*self._unknown, *self._absent)) or None
        if not self.watchdog.policies:
            return sentence(
                "daemon.nothing_guarded",
                "the policy file has faults, and there is no earlier one: nothing is guarded",
            )
        good = self._last_good.policies if self._last_good else ()
        whole = sum(policy in good for policy in self.watchdog.policies)
        return sentence(
            "daemon.last_good",
            "the policy file has faults; policies of the last good one: {whole} in force, {changed} that only warn",
            whole=whole,
            changed=len(self.watchdog.policies) - whole,
        )

    def _remember(self) -> None:
        """Recall past actions, so that the limits on signals hold across restarts.

        A guard in a crash loop is therefore no more dangerous than another.
        """
        past = recover_actions(audit_log.events_path(), boot_clock(), time.time())
        last = read_last_state(self._directory, boot_clock(), time.time())
        self.watchdog.remember(past.actions, last)
        if past.problem:
            self._log("daemon", "past unknown", past.problem)

    def open_socket(self) -> SocketServer | None:
        """Listen for requests, or return None if that is not possible.

        Raises:
            GpuguardError: that is not possible, and nothing could be claimed without it.
        """
        if self._directory.owner is None:
            self._report("`gpuguard keep` does not work without a directory of root's: run `sudo gpuguard setup` once.")
            return None
        if self._broker:
            if trouble := self._broker.trouble():
                self._report(trouble)
            with suppress(GpuguardError, OSError):  # leftovers lock nothing, so they do no harm
                self._broker.remove_leftovers()
        watchdog = self.watchdog
        context = RequestContext(
            self._directory,
            self._exemptions,
            snapshot=lambda: self.last,
            interval=lambda: max(watchdog.site_rules.interval[1], watchdog.pause),
            status=watchdog.status,
            append=self._record,
            reload=self._reload_requested.set,
            policy=self._settings.policy,
            enforcing=self._settings.enforce,
            broker=self._broker,
            trouble=lambda: self._metrics_trouble,
            unguarded=self.unguarded,
        )
        try:
            return SocketServer(self._directory, partial(handle, context))
        except OSError as error:
            if self._broker:  # the service manager will start the daemon again
                raise GpuguardError(f"no user can claim, as no socket can be made: {error}.  See `df`.") from error
            self._report(f"`gpuguard keep` does not work: the socket cannot be made: {error}")
            return None

    def _tend(self, broker: Broker) -> None:
        """Let *broker* do the tasks that are due; log a failure once, until it is mended or another one occurs."""
        try:
            latest = None if self.watchdog.problem else self.last
            for event in (*broker.tend(), *(broker.watch_offers(latest) if self.waiting else ())):
                self._record(event)
            trouble = None
        except (GpuguardError, OSError) as error:
            trouble = str(error)
        if trouble and trouble != self._trouble:
            text = sentence("queue.not_tended", "requests that never claim are not set back: {error}", error=trouble)
            self._log("queue", "not tended", text)
        self._trouble = trouble

    def _open_metrics(self, open_metrics: Callable[[], object] | None) -> Callable[[], object] | None:
        """Try to serve the metrics, and log once why that fails.  Returns *open_metrics* if it must be tried again."""
        if open_metrics is None:
            return None
        try:
            open_metrics()
            trouble = open_metrics = None
        except GpuguardError as error:
            trouble = str(error)
        if trouble != self._metrics_trouble:
            self._log("daemon", "metrics not served" if trouble else "metrics served", trouble)
        self._metrics_trouble = trouble
        return open_metrics

    def reload_if_changed(self, *, requested: bool = False) -> None:
        """Read the policy file again if that is requested or due."""
        if self._settings.policy and (requested or version_of(self._settings.policy) != self._file_status):
            self._reload()
        elif (self._faults or self._unknown) and time.monotonic() - self._read_at >= REREAD_SECONDS:
            self._reload(quiet=True)

    def _look_for_devices(self) -> None:
        """Report once the devices that the policies name and this machine does not have, or that they cannot judge."""
        found = tuple(
            text
            for policy in self.watchdog.policies
            for text in (*absent(policy, self.last), *unjudged(policy, self.last))
        )
        if self.last.devices and found != self._absent:
            self._absent = found
            self._log("policy", "devices unknown" if found else "devices known", all_of(found) or None)

    def _start(self) -> PolicyFile:
        for capability in self._lacking:
            self._report(capability)
        return self._reload()

    def _reload(self, *, quiet: bool = False) -> PolicyFile:
        """Read the policy file, and report its faults unless *quiet*.  If it has any, the last good one guards on."""
        assert self._settings.policy
        self._reload_requested.clear()
        self._file_status = version_of(self._settings.policy)
        accounts = Accounts(remembered=last_good.kept_names(self._state))
        file = load_in_time(self._settings.policy, self._settings.interval, accounts)
        before, self._faults, self._read_at = self._faults, len(file.faults), time.monotonic()
        if quiet and file.faults:
            return file
        for fault in (*file.faults, *file.warnings) if not quiet else ():
            for line in fault.lines(file.path, excerpt=False):  # it may hold a secret, such as a token
                self._report(line)
        if file.faults:
            first = file.faults[0].lines(file.path)[0]
            text = nsentence(
                "faults.first",
                "{number} fault, the first: {fault}",
                "{number} faults, the first: {fault}",
                len(file.faults),
                fault=first,
            )
            self._log("policy", "refused", text, file)
            if self._settings.last_good:
                self._use_last_good(file, accounts)
            return file
        if file.gone != self._unknown:
            self._unknown = file.gone
            self._log("policy", "names unknown" if file.gone else "names known", all_of(file.gone) or None, file)
        if before:
            self._log("policy", "faults mended", file=file)
        if before or file.fingerprint != self._fingerprint or file.policies != self.watchdog.policies:
            self._use(file, file)
            self._keep(file, accounts)
        for problem in problems(file.notify):  # reported now, not when the first alarm is lost
            self._log("notify", "will fail", problem)
        return file

    def _use_last_good(self, faulty: PolicyFile, accounts: Accounts) -> None:
        """Guard by the parts of the last good text (of this or the previous daemon) that *faulty* leaves unchanged."""
        if self._last_good is None and (text := last_good.kept_text(self._state)) is not None:
            kept = parse(text, faulty.path, accounts=accounts, longest=self._settings.interval)
            self._last_good = None if kept.faults else kept
        if self._last_good:
            self._use(last_good.still_in_force(self._last_good, faulty.text), self._last_good)

    def _keep(self, file: PolicyFile, accounts: Accounts) -> None:
        self._last_good = file
        if self._settings.once:
            return
        try:
            remembered = {**(accounts.remembered or {}), **accounts.known}
            wanted = accounts.known.keys() | accounts.gone.keys()
            os.makedirs(self._state, exist_ok=True)
            last_good.keep(self._state, file.text, {name: remembered[name] for name in wanted if name in remembered})
        except OSError as error:
            self._report(f"the policy file cannot be kept for the next start: {error}")

    def _use(self, file: PolicyFile, last: PolicyFile) -> None:
        """Judge by *file*, which is *last* (a good one) or the parts of it that are still in force."""
        templates, former, self._sender = {**TEMPLATES, **file.messages}, self._sender, None
        if file.notify:
            self._sender = Sender(file.notify, self._record, templates, file.longest_keep)
        audit_log.keep_older(file.keep_events)
        self._fingerprint = file.fingerprint
        self._exemptions.max_seconds = file.longest_keep
        try:
            if not self._settings.once:  # the snapshots of all commands depend on it
                publish_desktop_memory(self._directory, file.desktop_memory)
                shown = last_good.public(file, last, enforcing=self._settings.enforce)
                write_file(daemon_files(self._directory).file(last_good.POLICIES), shown)
        except OSError as error:
            self._report(f"policies and desktop_memory cannot be published, so both stay as they were: {error}")
        self.watchdog.site_rules = SiteRules(
            policies=file.policies,
            interval=self._settings.intervals(file.interval),
            protected=file.protected,
            per_minute=file.limits.per_minute,
            per_hour=file.limits.per_hour,
            longest_keep=file.longest_keep,
            notifier=self._sender,
            personal=frozenset(
                name for name, target in file.notify.items() if isinstance(target, Email) and target.personal
            ),
            language=next(iter(file.messages)) if len(file.messages) == 1 else ENGLISH,
            templates=templates,
        )
        self._log("policy", "in force", self.status(), file)
        self._recorder.windows = frozenset(needs_of(file.policies).gpu_seconds)
        if self._recorder.windows and (reason := self._recorder.why_unknown(OPEN_SECONDS)):
            self._report(f"{NEVER_FIRES}: {reason}")
        if former:
            former.stop(0.0)  # messages that wait in it are still sent

    def _publish(self, snapshot: Snapshot, pause: float) -> None:
        self.last = snapshot
        if self._settings.once:
            return
        for event in self._jobs_seen.look(snapshot):
            self._write(event)  # but not into the journal
        self._recorder.record(snapshot, GAP_INTERVALS * self.watchdog.site_rules.interval[1], wanted(self.waiting))
        if snapshot.clock - self._published_at < PUBLISH_SECONDS - pause / 1.5:  # no sample comes on the dot
            return
        try:
            write_state(self._directory, snapshot, max(pause, PUBLISH_SECONDS))
            self._published, self._published_at = True, snapshot.clock
        except OSError as error:
            if self._published:
                self._report(f"state.json cannot be written, so `gpuguard who` asks the driver itself: {error}")
            self._published = False

    def _log(
        self, kind: EventKind, outcome: EventOutcome, message: str | None = None, file: PolicyFile | None = None
    ) -> None:
        facts = (("path", file.path), ("sha256", file.fingerprint)) if file else ()
        self._record(Event(time=time.time(), kind=kind, outcome=outcome, message=message, facts=facts))

    def _write(self, event: Event) -> bool:
        """Write *event* down, and let the users whom it is about know that there is something to read."""
        if self._lost[0]:
            number, since = self._lost
            text = nsentence(
                "log.missing",
                "{number} event of {time} and later are missing",
                "{number} events of {time} and later are missing",
                number,
                time=local_time(since, "%Y-%m-%d %H:%M:%S"),
            )
            again = Event(time=time.time(), kind="log", outcome="writable again", message=text)
            if self._append(again):
                self._lost = 0, 0.0
                self._on_event(again)
        if not self._append(event):
            self._lost = self._lost[0] + 1, self._lost[1] or event.time
            return False
        if self._directory.owner is not None and not self._settings.once:
            for uid in audit_log.uids_of(audit_log.line_of(event)):
                touch(stamp_path(self._directory, uid))
        return True

    def _record(self, event: Event) -> bool:
        if not (written := self._write(event)):
            why = f"{audit_log.complaint()}.  Mend that, or name another file by --events."
            self._report(f"the audit log cannot be written, so no process will be signalled: {why}")
        self._on_event(event)
        return written


@contextmanager
def single_daemon(directory: LockDirectory) -> Iterator[bool]:
    """Yield whether this is the only daemon of the directory, which it then stays until the block ends."""
    descriptor = lock_daemon(directory)
    if descriptor is None:  # the other daemon may be just ending: systemd starts the next at once
        time.sleep(0.2)
        descriptor = lock_daemon(directory)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def notify_systemd(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send *state* to the service manager that started us, if one did: sd_notify(3)."""
    address = environ.get("NOTIFY_SOCKET", "")
    if address[:1] in ("/", "@"):
        # The service manager may be restarting, and then it will expect signs of life again; or no descriptor is free.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            messenger.settimeout(1.0)
            messenger.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


@contextmanager
def signal_waiter(*numbers: signal.Signals) -> Iterator[Callable[[float], set[int]]]:
    """Yield a function that waits at most so many seconds for these signals and returns those that came."""
    # A pipe is used instead of blocked signals, because hooks would inherit those.
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(reader, select.POLLIN)

    def wait(seconds: float) -> set[int]:
        return set(os.read(reader, 1024)) if poll.poll(seconds * 1000) else set()

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _was_cut_off() -> bool:
    """Return whether the last daemon in this log was started and never said that it stopped."""
    try:
        lines = [line for line in audit_log.read_log(audit_log.events_path(), LOG_BYTES) if b'"kind": "daemon"' in line]
    except OSError:
        return False
    outcomes = [line.get("outcome") for line in audit_log.decoded(lines)[0]]
    return [outcome for outcome in outcomes if outcome in ("started", "stopped")][-1:] == ["started"]
