"""Rules about who computes where, and with what.

``unclaimed``, ``trespass``, ``users``, ``command`` and ``outside_scheduler``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from gpuguard.device_state import claim_of, claims_on, claims_readable, lineage, usable_devices, user_label
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.locale.messages import Sentence, all_of, sentence
from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess
from gpuguard.policies.policy import parse_path
from gpuguard.policies.rule import Evidence, Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import RuleView, claim_subject, computing, computing_processes, process_subject
from gpuguard.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class UnclaimedRule(Rule):
    """A process computes on a GPU without a claim.

    min_memory: processes with less memory there do not count; absent: all count.
    on_claimed: true also finds those on a GPU that another user has claimed, and spares there whom trespass spares;
        without it only GPUs without a claim are looked at.

    Does not hold while the claims cannot be read, and never for desktops.

        when: {unclaimed: {min_memory: 1GiB, on_claimed: true}}
    """

    kind = RuleKind(
        "unclaimed",
        innocent=False,
        left_out={
            "on_claimed": N_("GPUs that another user has claimed are left out; `on_claimed: true` has them, too.")
        },
        needs=RuleNeeds(claims=True),
        rests_on=Evidence.MISSING_CLAIMS,
        protects_others=True,
        advice={
            "en": "Claim the GPU as it runs: `gpuguard adopt PID`.  Next time start it with `gpuguard run`.",
            "zh": "请运行 `gpuguard adopt PID` 占用该设备，无需结束进程；下次请用 `gpuguard run` 启动。",
        },
    )

    min_memory: Annotated[int, parse_bytes] = 0
    on_claimed: bool = False

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device."""
        if not claims_readable(view.snapshot):
            return
        for device, process, owners in (*_on_unclaimed(view), *(trespassers(view) if self.on_claimed else ())):
            if not self.min_memory or (process.memory_used is not None and process.memory_used >= self.min_memory):
                why = self._why(format_bytes(process.memory_used), owners)
                yield Finding("unclaimed", process_subject(device, process), why, (process,))

    def _why(self, size: str, owners: str) -> str:
        limit = format_bytes(self.min_memory)
        if owners and self.min_memory:
            return sentence(
                "unclaimed.above_on_claimed",
                "uses {size} of a GPU that {user} has claimed, without a claim, and less than {limit} would be allowed",
                size=size,
                user=owners,
                limit=limit,
            )
        if owners:
            return sentence(
                "unclaimed.on_claimed",
                "uses {size} of a GPU that {user} has claimed, without a claim",
                size=size,
                user=owners,
            )
        if self.min_memory:
            return sentence(
                "unclaimed.above",
                "uses {size} of a GPU without a claim, and less than {limit} would be allowed",
                size=size,
                limit=limit,
            )
        return sentence("unclaimed.use", "uses {size} of a GPU without a claim", size=size)


def _on_unclaimed(view: RuleView) -> Iterator[tuple[Device, GpuProcess, str]]:
    for device in usable_devices(view.snapshot):
        if not claims_on(view.snapshot, device):
            yield from ((device, process, "") for process in computing(device))


@dataclass(frozen=True)
class TrespassRule(Rule):
    """A process computes on a GPU that another user has claimed.

    The holder of the lock of the claim is at home there, and so are the other processes of its owner.  In favour of
    the process: root's are taken for containers of the claim, and a lock without a record may be anybody's.  One that
    used the GPU before the claim came is no trespasser, whatever the claim says of its own age; nor is a child that it
    starts, while it uses the GPU itself.  A claim with --max-processes accepts other users.

    containers: judge processes in containers, too; their user often is not the user who started the container.
    Those that a user runs without root (rootless) are always judged: they are no containers here.

        when: {trespass: {}}
    """

    kind = RuleKind(
        "trespass",
        innocent=False,
        needs=RuleNeeds(claims=True),
        finds_trespassers=True,
        rests_on=Evidence.MISSING_CLAIMS,
        protects_others=True,
        advice={
            "en": "End the process: the GPU is claimed by another user.  `gpuguard select` names a free one.",
            "zh": "请结束进程：该设备已被其他用户占用。`gpuguard select` 可列出空闲设备。",
        },
    )

    containers: bool = False

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device."""
        for device, process, owners in trespassers(view, containers=self.containers):
            size = format_bytes(process.memory_used)
            why = sentence("trespass.use", "uses {size} of a GPU that {user} has claimed", size=size, user=owners)
            yield Finding("trespass", process_subject(device, process), why, (process,))


def trespassers(view: RuleView, *, containers: bool = False) -> Iterator[tuple[Device, GpuProcess, str]]:
    """Yield (device, process, owners) for each process that came to a device after claims it does not belong to."""
    for device, process, claims in strangers(view, containers=containers):
        job = [other for other in device.processes or () if other.pid in lineage(process.pid, view.seen)]
        older = [
            claim for claim in claims if not any(view.arrivals.was_there_before(claim, device, other) for other in job)
        ]
        if older:
            yield device, process, all_of((user_label(claim.user, claim.uid) for claim in older), ", ")


def strangers(
    view: RuleView, *, containers: bool = False
) -> Iterator[tuple[Device, GpuProcess, tuple[ClaimRecord, ...]]]:
    """Yield each process that computes on a claimed device but belongs to no claim, and the claims it may trespass on.

    Root's processes are left out, because they may be containers of any claim.  Without *containers*, processes in a
    container are left out as well.
    """
    for device in usable_devices(view.snapshot):
        here = claims_on(view.snapshot, device)
        if not here or any(claim.uid < 0 for claim in here):
            continue
        exclusive = tuple(claim for claim in here if not claim.max_processes)
        for process in computing(device):
            if not process.uid or (process.container and not containers):
                continue
            if claim_of(process, here, view.seen) is None:
                yield device, process, exclusive


_Refusals = tuple[Callable[..., Sentence], Callable[..., Sentence]]  # of a process of a user, and of a claim
_REFUSALS: Mapping[str, _Refusals] = {
    "denied": (
        lambda **facts: sentence("users.denied", "{user} is denied and uses {size}", **facts),
        lambda **facts: sentence("users.denied_claim", "{user} is denied and has a claim", **facts),
    ),
    "group denied": (
        lambda **facts: sentence(
            "users.group_denied", "{user} is in the group {group}, which is denied, and uses {size}", **facts
        ),
        lambda **facts: sentence(
            "users.group_denied_claim", "{user} is in the group {group}, which is denied, and has a claim", **facts
        ),
    ),
    "not allowed": (
        lambda **facts: sentence(
            "users.not_allowed", "{user} is not among those who are allowed and uses {size}", **facts
        ),
        lambda **facts: sentence(
            "users.not_allowed_claim", "{user} is not among those who are allowed and has a claim", **facts
        ),
    ),
}


@dataclass(frozen=True)
class UsersRule(Rule):
    """A user computes who may not: one who is denied, or, where users are allowed by name, any other.

    allow: users who may; all others may not.
    allow_groups: likewise, whole groups.
    deny: users who may not, whatever else allows them.
    deny_groups: likewise, whole groups.
    claims: true also finds the claims of such users under which no process computes, for `release`.

    `hours` and `days` of the policy say when.  A user whose groups are not known is innocent of them.

        when: {users: {allow_groups: [root], deny: [nobody]}}
    """

    kind = RuleKind(
        "users",
        innocent=False,
        protects_others=True,
        by_content=True,
        spares=("allow", "allow_groups"),
        accuses=("deny",),
    )

    allow: tuple[Annotated[int, "user"], ...] = ()
    allow_groups: tuple[Annotated[str, "group"], ...] = ()
    deny: tuple[Annotated[int, "user"], ...] = ()
    deny_groups: tuple[Annotated[str, "group"], ...] = ()
    claims: bool = False

    @property
    def rests_on(self) -> Evidence:
        """SENSOR if groups are allowed, otherwise CLOCK.

        A directory service that forgets who is in an allowed group makes culprits of all its members.
        """
        return Evidence.SENSOR if self.allow_groups else Evidence.CLOCK

    @property
    def reaches(self) -> frozenset[str]:
        """Processes, and claims if `claims` is true."""
        return frozenset({"process", "claim"} if self.claims else {"process"})

    def __post_init__(self) -> None:
        if not (self.allow or self.allow_groups or self.deny or self.deny_groups):
            raise InvalidRequest(
                _("no user is named: write users or groups in allow, allow_groups, deny or deny_groups.")
            )

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device, and per claim without a process."""
        for device, process in computing_processes(view):
            assert process.uid is not None  # judged_processes() leaves out the others
            if reason := self._against(process.uid, view):
                user, size = user_label(process.user, process.uid), format_bytes(process.memory_used)
                why = _REFUSALS[reason[0]][0](user=user, size=size, **reason[1])
                yield Finding("users", process_subject(device, process), why, (process,))
        for claim in view.snapshot.claims if self.claims else ():
            unused = claim.alive and claim.uid > 0 and claim.devices and not _is_used(claim, view)
            if unused and (reason := self._against(claim.uid, view)):
                why = _REFUSALS[reason[0]][1](user=user_label(claim.user, claim.uid), **reason[1])
                yield Finding("users", claim_subject(claim), why)

    def _against(self, uid: int, view: RuleView) -> tuple[str, Mapping[str, str]] | None:
        """Return which of _REFUSALS there is for a user, and what stands in it about their group, or None."""
        groups = view.groups.get(uid)
        denied = sorted(groups.intersection(self.deny_groups)) if groups is not None else []
        by_name = uid in self.allow or not (self.allow or self.allow_groups)
        by_group = self.allow_groups and (groups is None or groups.intersection(self.allow_groups))
        if uid in self.deny:
            return "denied", {}
        if denied:
            return "group denied", {"group": denied[0]}
        return None if by_name or by_group else ("not allowed", {})


def _is_used(claim: ClaimRecord, view: RuleView) -> bool:
    """Return whether something may compute under *claim*: its devices have a process, or that cannot be seen."""
    parts = {device.uuid: device for device in usable_devices(view.snapshot)}
    own = [parts.get(uuid) for uuid in claim.devices]
    return any(
        device is None
        or not device.processes_plausible
        or device.processes is None
        or any(process.uid in (0, None, claim.uid) for process in device.processes)
        for device in own
    )


LONGEST = 4096  # characters of a command line that are read, because its user can write as many as they like
_DELETED = " (deleted)"  # what the kernel appends to the path of a program whose file is gone


@dataclass(frozen=True)
class CommandRule(Rule):
    """A program runs that is named, or that is not among those that are.

    executables: globs of whole paths; the process runs one of these files.
    executables_other_than: globs of whole paths; the process runs none of these files.
    arguments: globs of the whole command line, one of which must match, too.  Users write their command lines
        themselves, so that this only narrows the paths down.

        when: {command: {executables: ["/usr/bin/python3*", "/home/*/bin/python3*"], arguments: ["* ipykernel*"]}}
    """

    kind = RuleKind("command", innocent=False, by_content=True)

    executables: tuple[Annotated[str, parse_path], ...] = ()
    executables_other_than: tuple[Annotated[str, parse_path], ...] = ()
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.executables or self.executables_other_than):
            raise InvalidRequest(_("no program is named: write executables or executables_other_than."))

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device."""
        for device, process in computing_processes(view):
            path = (process.executable or "").removesuffix(_DELETED)
            if not path or (self.executables and not _matches(path, self.executables)):
                continue
            if self.executables_other_than and _matches(path, self.executables_other_than):
                continue
            command = None if process.command is None else " ".join(process.command)
            if self.arguments and (command is None or not _matches(command, self.arguments)):
                continue
            why = sentence(
                "command.runs",
                "runs {program} and uses {size}",
                program=str(process.executable),
                size=format_bytes(process.memory_used),
            )
            yield Finding("command", process_subject(device, process), why, (process,))


def _matches(text: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(text[:LONGEST], glob) for glob in globs)


_OTHER_USERS = sentence("outside_scheduler.other_users", "other users")
_NO_USER = sentence("outside_scheduler.no_user", "no user")


@dataclass(frozen=True)
class OutsideSchedulerRule(Rule):
    """A process computes on a GPU that the scheduler (Slurm, for one) has not given to its user.

    containers: false spares processes in containers, where jobs start some whose user is not the user of the job.

    Holds nowhere without a scheduler, and not on GPUs of which it says nothing.

        when: {outside_scheduler: {}}
    """

    kind = RuleKind(
        "outside_scheduler",
        innocent=False,
        needs=RuleNeeds(scheduler=True),
        rests_on=Evidence.MISSING_CLAIMS,
        protects_others=True,
    )

    containers: bool = True

    def check(self, view: RuleView) -> Iterator[Finding]:
        """Yield a finding per process and device."""
        if view.scheduled is None:
            return
        for device, process in computing_processes(view):
            given = view.scheduled.get(device.uuid, view.scheduled.get(device.parent_uuid or device.uuid))
            if given is None or process.uid in given or (process.container and not self.containers):
                continue
            why = sentence(
                "outside_scheduler.use",
                "uses {size} of a GPU that the scheduler has given to {user}",
                size=format_bytes(process.memory_used),
                user=_OTHER_USERS if given else _NO_USER,
            )
            yield Finding("outside_scheduler", process_subject(device, process), why, (process,))
