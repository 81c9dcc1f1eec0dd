"""What `run` and `wait` say of a job and of its wait in the queue: on stderr, in --log-file, to those of --notify.

A terminal gets short notices and one line that is written anew, anything else lines with their time.  What has no
reader is not composed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuguard.cli.terminal import is_terminal, print_notice, rewrites, write
from gpuguard.device_state import vendor_of
from gpuguard.errors import InvalidRequest, NotEnoughGpus, WaitTimeout
from gpuguard.files import open_named
from gpuguard.jobs.processes import exec_fault
from gpuguard.locale import N_, _, translated
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.units import format_bytes, format_duration, format_energy, local_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.model import Device
    from gpuguard.notify.targets import Target
    from gpuguard.run import JobEnd

STANDS_ASIDE = N_(
    "stopped, so it stands aside: others in the queue may start first.  It keeps its place; `fg` goes on."
)
LONGEST_MESSAGE_SECONDS = 60.0  # how long a job that has ended still waits for the message of its start
MOST_CHARACTERS = 200  # of a command line in the log of its job
WAITING_LINE_SECONDS = 60.0  # between two lines about waiting in a log file; a terminal has one line, rewritten


class JobLog:
    """The messages of `run` about its job: short on a terminal, elsewhere lines with their time; in a file all of them.

    Args:
        quiet: print only what goes wrong; the file still gets all lines.
        path: of the file, to which lines are added.
    """

    def __init__(self, *, quiet: bool = False, path: str | None = None) -> None:
        self.quiet, self._file = quiet, -1
        if path is not None:
            try:
                self._file = open_named(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.set_blocking(self._file, False)  # a pipe that is not read must not let a job go on beyond its limits
            except OSError as error:
                raise InvalidRequest(
                    _("--log-file {path}: {strerror}.").format(path=path, strerror=error.strerror)
                ) from None

    @property
    def is_read(self) -> bool:
        """Whether anything besides problems is reported anywhere."""
        return not self.quiet or self._file >= 0

    def say(self, text: str, on_terminal: str | None = None) -> None:
        """Report how the job goes; a terminal gets *on_terminal* instead of *text*."""
        self.only_in_file(text)
        if self.quiet:
            return
        if not is_terminal():
            print_notice(_with_time(text))
        elif on_terminal is not None:
            print_notice(on_terminal)

    def warn(self, text: str) -> None:
        """Report a problem."""
        self.only_in_file(text)
        print_notice(text if is_terminal() else _with_time(text))

    def only_in_file(self, text: str) -> None:
        """Write *text* into the file alone, because the user is told in another way as well."""
        if self._file >= 0:
            lines = "".join(f"{neutralise(line)}\n" for line in _with_time(text).splitlines())
            with suppress(OSError):  # a full disk ends no job
                os.write(self._file, lines.encode(errors="replace"))


def _with_time(text: str) -> str:
    return f"{local_time(time.time(), '%Y-%m-%d %H:%M:%S')} {text}"


class JobReport:
    """Reports how a job starts and ends, in its log and by --notify.

    Only the end of `run` waits for an endpoint of --notify, for the last message.
    """

    def __init__(self, log: JobLog, targets: Sequence[str | Target], command: Sequence[str]) -> None:
        self.log, self._targets, self._command = log, targets, command
        self._started = ""
        self._thread: threading.Thread | None = None
        if targets:
            from gpuguard.notify import sender  # noqa: F401  # now: gpuguard may be upgraded under the job

    def started(self, claim: Claim, waited: float, *, simulated: bool, several_vendors: bool = False) -> None:
        """Log on which devices the job starts, and of which vendor; send_start() sends the message."""
        if not (self.log.is_read or self._targets):
            return
        vendor = f" ({vendor_of(claim.devices[0]).title})" if several_vendors else ""
        devices = f"{gpus(claim.devices)}{vendor}{_(' (SIMULATED)') if simulated else ''}"
        after = _(" after {waited} in the queue").format(waited=format_duration(waited)) if waited >= 1 else ""
        self._started = _("started on {devices}, claim {id}{after}: {command_line}").format(
            devices=devices, id=claim.id, after=after, command_line=self._command_line
        )
        if exec_fault(self._command[0]) is None:  # otherwise it will not start, and that is reported then
            self.log.say(self._started, _("{devices} · claim {id}").format(devices=devices, id=claim.id))

    def send_start(self) -> None:
        """Send the message in a thread while the job runs; signals are blocked by now and stay with the main thread."""
        if self._targets:
            self._thread = threading.Thread(target=self._send, args=("started", self._started, None), daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no thread is left for this user
                self._thread = None
                self.log.warn(_("the message (started) could not be sent: no thread can be started."))

    def not_started(self, why: str, ended: JobEnd | None = None) -> None:
        """Send that the job could not start, which stderr says already; *ended* is how it ended if it was tried."""
        self._send_last("not_started", _("not started: {why}").format(why=translated(why)), ended)

    def ended(self, claim: Claim, ended: JobEnd) -> None:
        """Log and send how the job ended."""
        if self.log.is_read or self._targets:
            text = _("ended on {gpus}: {end}").format(gpus=gpus(claim.devices), end=end_in_words(ended))
            self.log.say(text, summary_line(claim.devices, ended))
            self._send_last("ended_by_policy" if ended.policy else "failed" if ended.status else "ended", text, ended)

    @property
    def _command_line(self) -> str:
        return neutral_command(self._command)[:MOST_CHARACTERS]

    def _send_last(self, event: str, text: str, ended: JobEnd | None) -> None:
        if self._thread:
            self._thread.join(LONGEST_MESSAGE_SECONDS)
        if self._targets:
            self._send(event, text, ended)

    def _send(self, event: str, text: str, ended: JobEnd | None) -> None:
        from gpuguard.notify.sender import attempt  # 30 ms, for --notify alone
        from gpuguard.notify.templates import Fact, Message

        host, command = os.uname().nodename, self._command_line
        facts: list[Fact] = [("event", event), ("host", host), ("command", command)]
        if ended:
            facts += [
                ("exit_status", ended.status),
                ("wall_time_seconds", round(ended.wall_time, 3)),
                ("why", ended.why),
                ("policy", ended.policy),
            ]
        body = _("{text}\n\nCommand: {command}\nHost: {host}\n").format(text=text, command=command, host=host)
        message = Message(f"{event.replace('_', ' ')} on {host}: {command}"[:MOST_CHARACTERS], body, tuple(facts))
        for target in self._targets:
            if isinstance(target, str):
                tell_terminals(f"gpuguard: {message.subject}\n{text}")
                continue
            sent, why = attempt(target, message)
            if not sent:
                self.log.warn(
                    _("the message ({event}) could not be sent: {why}.").format(event=event, why=translated(why))
                )


def tell_terminals(text: str) -> None:
    """Ring the bell of this terminal; without one, write *text* to all terminals of this user that take messages."""
    if is_terminal():
        write("\a")
        return
    with suppress(OSError, ImportError):  # gpuguard was upgraded while the job ran
        from gpuguard.enforcement.terminals import write_to_terminal  # for --notify terminal alone

        for terminal in os.scandir("/dev/pts"):
            if (status := terminal.stat()).st_uid == os.getuid():
                write_to_terminal(status.st_rdev, status.st_uid, text)


class WaitProgress:
    """Reports what a command waits for: in one line of the terminal that is rewritten, or once a minute in a log."""

    def __init__(self, quiet: bool, log: JobLog | None = None) -> None:
        self._quiet, self._began, self._last = quiet, time.monotonic(), 0.0
        self.log, self.logged_at, self.logged = log, 0.0, ""
        self._told: tuple[str, ...] | None = None  # the reasons that stand in the log, if all lines were printed

    def without_what_was_told(self, error: WaitTimeout) -> WaitTimeout:
        """Return *error* without its reasons if the log has had the very same ones."""
        if error.reasons != self._told:
            return error
        return WaitTimeout(error.headline, error.wanted, error.available, error.refused)

    def missing(self, missing: NotEnoughGpus) -> None:
        """Report what is missing; on a terminal, whose one line is soon full, without repeating the request."""
        if self._told is None and not (self._quiet or rewrites()):
            self._told = missing.reasons
        self.report(translated(missing.brief if missing.brief and rewrites() else str(missing)))

    def report(self, text: str) -> None:
        """Print *text* if it is time; the first time with all of its lines in a log."""
        now, terminal = time.monotonic(), rewrites()
        if self.log:
            self._add_to_log(self.log, text, now)
            if not terminal:
                return
        if self._quiet or (self._last and now - self._last < (1.0 if terminal else WAITING_LINE_SECONDS)):
            return
        shown = text.splitlines()[0] if self._last else text
        self._last = now
        print_notice(
            _("waiting for {time}: {shown}").format(time=format_duration(round(now - self._began)), shown=shown),
            again=terminal,
        )

    def _add_to_log(self, log: JobLog, text: str, now: float) -> None:
        """Add a line when the wait begins, and then one for each new text, at most once a minute."""
        first, *_more = text.splitlines()
        if self.logged == first or (self.logged and now - self.logged_at < WAITING_LINE_SECONDS):
            return
        waited = _("waiting for {time}").format(time=format_duration(round(now - self._began)))
        log.say(f"{waited}: {first}" if self.logged else _("queued: {text}").format(text=text))
        self.logged, self.logged_at = first, now

    def stopped(self) -> None:
        """Report that others go first while this process is stopped.  A signal handler calls this, at any moment."""
        if not self._quiet:
            clear = "\r\x1b[K" if self._last and rewrites() else ""
            # print() cannot be used, because the signal may have come while it writes.
            with suppress(OSError):
                os.write(2, f"{clear}gpuguard: {_(STANDS_ASIDE)}\n".encode())

    def done(self) -> None:
        """Clear the line of the terminal."""
        if self._last and rewrites():
            write("\r\x1b[K")
        self._last = 0.0


def summary_line(devices: Sequence[Device], ended: JobEnd) -> str:
    """Return ``"GPU 2,3 · 12m31s · peak 61.2GiB · mean 87% · 0.14kWh · exit 0"``; unknown numbers are left out."""
    return " · ".join(
        [
            gpus(devices),
            format_duration(ended.wall_time),
            *_numbers(ended),
            _("exit {status}").format(status=ended.status),
            *map(translated, ended.remarks),
        ]
    )


def _numbers(ended: JobEnd) -> list[str]:
    parts = (
        None
        if ended.peak_memory is None
        else _("peak {peak_memory}").format(peak_memory=format_bytes(ended.peak_memory)),
        None if ended.utilization is None else _("mean {utilization:.0f}%").format(utilization=ended.utilization),
        None if ended.energy is None else format_energy(ended.energy),
    )
    return [part for part in parts if part is not None]


def end_in_words(ended: JobEnd) -> str:
    """Return ``"exit 137, killed by SIGKILL; ran 12m31s; peak 61.2GiB, mean 87%, 0.14kWh"``."""
    how = _("exit {status}").format(status=ended.status)
    if ended.why:
        how += f", {translated(ended.why)}"
    elif ended.killed_by is not None:
        how += _(", killed by {signal}").format(signal=signal_name(ended.killed_by))
        how += (
            _(", not by gpuguard run: perhaps memory of the host ran out") if ended.killed_by == signal.SIGKILL else ""
        )
    parts = [how, _("ran {wall_time}").format(wall_time=format_duration(ended.wall_time)), ", ".join(_numbers(ended))]
    parts += map(translated, ended.remarks)
    if ended.outcome == "left to its processes":
        parts.append(_("the claim is {left}").format(left="left to its processes"))
    return "; ".join(filter(None, parts))


def signal_name(signum: int) -> str:
    """Return ``"SIGKILL"``, or a real-time signal as its number."""
    return signal.Signals(signum).name if signum in set(signal.Signals) else _("signal {signum}").format(signum=signum)


def gpus(devices: Sequence[Device]) -> str:
    """Return ``"GPU 2,3"``, with a MIG instance as ``"0.1[3g.40gb]"``."""
    names = [f"{device.label}[{device.mig_profile}]" if device.parent_uuid else device.label for device in devices]
    return f"GPU {','.join(names)}"
