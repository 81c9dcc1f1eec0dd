"""Pauses: processes that a policy has stopped, and to which the guard owes a SIGCONT, whatever happens to the guard.

Each pause is a file, ``paused.BOOT.PID.START``, written before the SIGSTOP and removed when the process goes on, which
needs no room on a disk.  The end of a pause needs the identity in that name and nothing else: no switch, rule, sample
or rate.  When in doubt, the process goes on.  This module does not decide on pauses: see actions, and the watchdog for
when a pause is over.
"""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from gpuguard.claims.directory import DaemonFiles, LockDirectory, daemon_files
from gpuguard.enforcement import identity, signals
from gpuguard.enforcement.terminals import write_to_terminal
from gpuguard.files import closed_after, read_file, status_in_place, write_file
from gpuguard.history.audit_log import line_of
from gpuguard.jsonio import decode, loads
from gpuguard.locale.messages import sentence
from gpuguard.model import Event, PauseEnd, ProcessIdentity
from gpuguard.notify.templates import deed_text
from gpuguard.procfs import Stat, boot_id, parse_stat, read_proc, stat_of, status_words

MAX_BYTES = 4096
AGAIN_SECONDS = 60.0  # between two tries to write down that a pause has ended
LATE_CPU_SECONDS = 0.1  # of each CPU: what a thread used before it stopped may be counted after we see it stopped
_NAME = re.compile(r"paused\.([0-9a-f-]{8})\.(\d{1,7})\.(\d{1,12}\.\d{1,6})")
_OVER = sentence("pause.over", "its pause is over")
_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


@dataclass(frozen=True)
class Pause:
    """A process that a policy has stopped.  All fields except the process are for people."""

    process: ProcessIdentity
    policy: str = ""
    uid: int | None = None
    user: str | None = None
    devices: tuple[str, ...] = ()
    claim: str | None = None
    traced: bool = False  # it had a debugger before
    on_terminal: bool = False  # its user is informed on its terminal, because no `gpuguard run` does so


class Pauses:
    """The pauses of one machine.  The files are the truth, because `gpuguard resume` ends pauses beside a daemon."""

    def __init__(self, directory: LockDirectory | None, append: Callable[[Event], bool]) -> None:
        self._directory, self._append = directory, append
        self._rehearsed: dict[ProcessIdentity, Pause] = {}  # of policies that only observe: no process is stopped
        self._stood_at: dict[ProcessIdentity, float] = {}  # CPU seconds, at most, when all its threads were stopped
        # The outcomes of pauses that have ended but could not be written down yet, and when that is tried again.
        self._unwritten, self._try_at = dict[ProcessIdentity, tuple[PauseEnd, str]](), 0.0

    @property
    def _files(self) -> DaemonFiles | None:
        return daemon_files(self._directory) if self._directory else None

    def begin(self, pause: Pause) -> None:
        """Write down a pause that is about to begin.  Raises OSError if that fails: then nothing may be stopped."""
        if self._directory is None:
            raise OSError(sentence("claims.no_directory", "there is no directory of claims"))
        if pause.process in self._unwritten:  # its file would be taken for that of this pause
            raise OSError(sentence("pause.end_unwritten", "the end of its last pause is not written down yet"))
        # Everybody may read it, as `gpuguard resume --list` does.  A crash of the machine ends the process as well.
        write_file(self._path(pause.process), json.dumps(asdict(pause)).encode("ascii"))

    def rehearse(self, pause: Pause) -> None:
        """Remember a pause that would have begun, so that its end is written down like that of a real one."""
        self._rehearsed[pause.process] = pause

    def of(self, process: ProcessIdentity, *, live: bool) -> Pause | None:
        """Return the pause of a process, or None if it has none that still lasts."""
        pauses = self.read() if live else self._rehearsed.values()
        is_over = live and process in self._unwritten
        return next((pause for pause in pauses if pause.process == process and not is_over), None)

    def read(self) -> tuple[Pause, ...]:
        """Return all pauses, the oldest process first.  Those of another boot are removed, because they are over."""
        files, found = self._files, []
        with suppress(OSError):
            for name in os.listdir(files.path) if files else ():
                if files and (named := _NAME.fullmatch(name.removeprefix(files.prefix))):
                    path, process = os.path.join(files.path, name), (int(named[2]), float(named[3]))
                    if named[1] != boot_id():
                        _remove(path)
                    elif status_in_place(path).st_uid in files.owners():
                        found.append(_read(path, process, files.owners()))
        return tuple(sorted(found, key=_by_age))

    def processes(self, *, rehearsed: bool) -> frozenset[ProcessIdentity]:
        """Return the processes that are paused; with *rehearsed*, also those that would be."""
        pauses = (*self.read(), *(self._rehearsed.values() if rehearsed else ()))
        return frozenset(pause.process for pause in pauses)

    def settle(self, why_over: Callable[[Pause, bool], str | None], *, owed: bool = True) -> None:
        """End each pause for which *why_over* has a reason, and forget those that another hand has ended.

        *why_over* is also told whether the process is really stopped.  Without *owed*, real pauses are left alone,
        because they are another guard's.
        """
        for pause in sorted(self._rehearsed.values(), key=_by_age):
            if (why := why_over(pause, False)) or not identity.is_alive(pause.process):
                self.end(pause, why or _OVER, live=False)
        pauses = self.read() if owed else ()
        self._stood_at = {pause.process: cpu for pause in pauses if (cpu := self._cpu_when_it_stood(pause)) is not None}
        for pause in pauses:
            if pause.process in self._unwritten and time.monotonic() < self._try_at:
                continue
            now = stat_of(pause.process[0])
            went_on = pause.process in self._stood_at and now and now.state in "RSD" and not _is_being_stopped(now)
            if (why := why_over(pause, True)) or went_on or not identity.is_alive(pause.process):
                self.end(pause, why or _OVER)

    def end(self, pause: Pause, why: str, *, live: bool = True) -> PauseEnd | Literal[""]:
        """Let a process go on, and write down the outcome: "done", "gone", "left" or "not permitted".

        Without *live*, it is "dry run" instead of "done".

        The result is "" if the outcome is not known, because no descriptor is left to look: the next settle() tries
        again.
        """
        stood_at = self._stood_at.get(pause.process) if live else None
        outcome = self._unwritten.pop(pause.process, None) if live else None
        outcome = outcome or _continue(pause, stood_at, live=live)
        if outcome is None:
            return ""
        word, reason = outcome
        event = Event(
            time=time.time(),
            kind="resume",
            outcome=word,
            user=pause.user,
            devices=pause.devices,
            pid=pause.process[0],
            claim=pause.claim,
            message=sentence("because", "{what}: {why}", what=why, why=reason) if reason else why,
            facts=(("policy", pause.policy), ("uid", pause.uid), ("start_time_seconds", pause.process[1])),
        )
        written = self._append(event)
        if not live:
            del self._rehearsed[pause.process]
        elif written:
            _remove(self._path(pause.process))
            _tell_on_terminal(pause, event)
        else:  # The disk is full: the process does not wait for that, and its line is written later.
            self._unwritten[pause.process], self._try_at = outcome, time.monotonic() + AGAIN_SECONDS
        return word

    def drop(self, process: ProcessIdentity) -> None:
        """Forget a pause that did not begin."""
        _remove(self._path(process))

    def _path(self, process: ProcessIdentity) -> str:
        assert self._files
        return self._files.file(f"paused.{boot_id()}.{process[0]}.{process[1]!r}")

    def _cpu_when_it_stood(self, pause: Pause) -> float | None:
        """Return the CPU seconds of a process when all its threads were first seen to be stopped, or None before that.

        They include those that may be counted late.
        """
        if (known := self._stood_at.get(pause.process)) is not None:
            return known
        pid = pause.process[0]
        threads = [parse_stat(read_proc(f"{path}/stat") or b"") for path in glob.glob(f"/proc/{pid}/task/*")]
        now = stat_of(pid)  # after the threads, because one that still runs uses more of the CPU before it stops
        stands = now is not None and all(thread and thread.state in "TtZX" for thread in threads)
        late = LATE_CPU_SECONDS * min(len(threads), os.cpu_count() or 1)
        return now.cpu_seconds + late if now and stands else None


def _by_age(pause: Pause) -> tuple[float, int]:
    return pause.process[1], pause.process[0]


def _read(path: str, process: ProcessIdentity, owners: tuple[int, ...]) -> Pause:
    try:
        pause = decode(Pause, loads(read_file(path, MAX_BYTES, owners)))
    except (OSError, ValueError):  # its name says enough
        return Pause(process)
    return pause if pause.process == process else Pause(process)


def _remove(path: str) -> None:
    with suppress(OSError):  # a file that is left is found and its pause ended once more, which changes nothing
        os.unlink(path)


def _continue(pause: Pause, stood_at: float | None, *, live: bool) -> tuple[PauseEnd, str] | None:
    """Send SIGCONT unless another user stops the process.  Returns the outcome, or None if there is no way to look."""
    pid, started = pause.process
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return "gone", ""
    except OSError:
        return None
    with closed_after(pidfd):
        now = stat_of(pid)
        if identity.has_ended(pidfd) or (now and now.start_time != started):
            return "gone", ""
        if now is None:
            return None
        if left := _why_left(pause, now, stood_at):
            return "left", left
        word = signals.forward(pidfd, signal.SIGCONT) if live else "dry run"
        return "done" if word == "sent" else word, ""


def _why_left(pause: Pause, now: Stat, stood_at: float | None) -> str | None:
    if not pause.traced and status_words(pause.process[0], b"TracerPid") not in ([], [b"0"]):
        return sentence("pause.debugged", "a debugger has it")
    if stood_at is None:
        return None  # our SIGSTOP may still be on its way
    if _is_being_stopped(now):
        return sentence("pause.other_signal", "another signal stops it")
    if now.state == "T" and now.cpu_seconds > stood_at:
        return sentence("pause.stopped_anew", "another hand let it go on meanwhile, and stopped it")
    return sentence("pause.went_on", "another hand let it go on") if now.state in "RSD" else None


def _is_being_stopped(now: Stat) -> bool:
    """Return whether a signal that would stop the process waits to be delivered, because SIGCONT would drop it."""
    pid = int(now.name.partition(b" ")[0])
    masks = [status_words(pid, name) for name in (b"ShdPnd", b"SigPnd", b"SigBlk")]
    shared, own, blocked = (int(words[0], 16) if words else 0 for words in masks)
    return any((shared | own) & ~blocked & 1 << (number - 1) for number in _STOPS)


def _tell_on_terminal(pause: Pause, event: Event) -> None:
    now, text = stat_of(pause.process[0]), deed_text(line_of(event))
    if now and pause.uid is not None and pause.on_terminal and text:
        write_to_terminal(now.terminal, pause.uid, f"gpuguard: {text}")
