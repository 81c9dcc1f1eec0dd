"""How the daemon treats line.yaml: it keeps a good file for all readers, and reports a faulty one until it is mended.

This module decides nothing by the file: every reader asks queue.settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuguard.claims.directory import LockDirectory
from gpuguard.files import version_of
from gpuguard.locale.messages import nsentence
from gpuguard.model import EventOutcome
from gpuguard.queue.settings import keep_last_good, read_queue_settings, settings_path

# Between two readings of a file with faults: by then LDAP may be up, or a process may find room.
REREAD_SECONDS = 60.0


class QueueSettingsFile:
    """line.yaml, the settings of the queue of one claim directory.

    Args:
        say: called with the outcome and the message of an event of the queue.
        report: called with what an admin should read in the journal.
    """

    def __init__(
        self,
        directory: LockDirectory,
        say: Callable[[EventOutcome, str | None], object],
        report: Callable[[str], object],
    ) -> None:
        self._directory, self._say, self._report = directory, say, report
        self._version: tuple[int, ...] | None = None  # of the file when it was last read
        self._read_at, self._said = 0.0, ""
        self.faults = 0  # how many the file has

    def look(self) -> None:
        """Read the file if it has changed, or if it had faults a while ago.  Call this again and again."""
        version = version_of(settings_path())
        if version == self._version and not (self.faults and time.monotonic() - self._read_at >= REREAD_SECONDS):
            return
        try:
            site = read_queue_settings(self._directory)
        except OSError:  # no descriptor or memory is left, which says nothing about the file; the next look reads it
            return
        self._version, self._read_at = version, time.monotonic()
        self.faults = len(site.faults)
        said = ""
        if site.faults:
            said = nsentence(
                "faults.first",
                "{number} fault, the first: {fault}",
                "{number} faults, the first: {fault}",
                self.faults,
                fault=site.faults[0].lines(site.path)[0],
            )
        else:
            try:
                keep_last_good(self._directory, site)
            except OSError as error:
                self._report(f"{site.path} cannot be kept for the time when it has faults: {error}")
        if said != self._said:
            self._say("refused" if said else "faults mended", said or None)
        self._said = said
