"""Which programs may compute.  A program is the file that runs: the name of a process is whatever its user likes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, GpuProcess
from gpuguard.policies.people import everywhere
from gpuguard.policies.view import View, process_subject
from gpuguard.units import format_bytes

LONGEST = 4096  # characters of a command line that are looked at: its user writes as many as he likes
_DELETED = " (deleted)"  # what the kernel appends to the path of a program whose file is gone


@dataclass(frozen=True)
class Command:
    """A program runs that is named, or that is not among those that are.

    executables: globs of whole paths; the process runs one of these files.
    executables_other_than: globs of whole paths; the process runs none of these files.
    arguments: globs of the whole command line, one of which must match, too.  Users write their command lines
        themselves, so that this only narrows the paths down.

        when: {command: {executables: ["/usr/bin/python3*", "/home/*/bin/python3*"], arguments: ["* ipykernel*"]}}
    """

    executables: tuple[str, ...] = ()
    executables_other_than: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.executables or self.executables_other_than):
            raise InvalidRequest("no program is named: write executables or executables_other_than.")
        for glob in (*self.executables, *self.executables_other_than):
            if not glob.startswith("/"):
                raise InvalidRequest(f"{glob!r} is no path: write it in full from / on, like '/usr/bin/{glob}'.")

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device."""
        for device, process in everywhere(view):
            if process.executable and self._means(process, process.executable.removesuffix(_DELETED)):
                why = f"runs {process.executable} and uses {format_bytes(process.memory_used)}"
                yield Finding("command", process_subject(device, process), why, (process,))

    def _means(self, process: GpuProcess, path: str) -> bool:
        if self.executables and not _is_one(path, self.executables):
            return False
        if self.executables_other_than and _is_one(path, self.executables_other_than):
            return False
        if not self.arguments:
            return True
        return process.command is not None and _is_one(" ".join(process.command), self.arguments)


def _is_one(text: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text[:LONGEST], glob) for glob in globs)
