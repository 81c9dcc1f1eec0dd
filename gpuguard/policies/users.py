"""Who may compute here at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, GpuProcess
from gpuguard.policies.people import called, everywhere
from gpuguard.policies.view import View, process_subject
from gpuguard.units import format_bytes


@dataclass(frozen=True)
class Users:
    """A user computes who may not: one who is denied, or, where somebody is allowed, anybody else.

    allow: users who may; all others may not.
    allow_groups: likewise, whole groups.
    deny: users who may not, whatever else allows them.
    deny_groups: likewise, whole groups.

    `hours` and `days` of the policy say when.  A user whose groups are not known is innocent of them.

        when: {users: {allow_groups: [root], deny: [nobody]}}
    """

    allow: tuple[Annotated[int, "user"], ...] = ()
    allow_groups: tuple[Annotated[str, "group"], ...] = ()
    deny: tuple[Annotated[int, "user"], ...] = ()
    deny_groups: tuple[Annotated[str, "group"], ...] = ()

    def __post_init__(self) -> None:
        if not (self.allow or self.allow_groups or self.deny or self.deny_groups):
            raise InvalidRequest("nobody is named: name somebody in allow, allow_groups, deny or deny_groups.")

    def check(self, view: View) -> Iterator[Finding]:
        """A finding per process and device."""
        for device, process in everywhere(view):
            reason = self._against(process, view)
            if reason:
                used = format_bytes(process.memory_used)
                why = f"{called(process.user, process.uid)} {reason} and uses {used}"
                yield Finding("users", process_subject(device, process), why, (process,))

    def _against(self, process: GpuProcess, view: View) -> str | None:
        assert process.uid is not None  # judged() leaves out the others
        groups = view.groups.get(process.uid)
        denied = sorted(groups.intersection(self.deny_groups)) if groups is not None else []
        if process.uid in self.deny:
            return "is denied"
        if denied:
            return f"is in the group {denied[0]}, which is denied,"
        if not (self.allow or self.allow_groups) or process.uid in self.allow:
            return None
        if self.allow_groups and (groups is None or groups.intersection(self.allow_groups)):
            return None
        return "is not among those who are allowed"
