"""What a rule is: how it judges, and all that others need to know of its kind.

A rule is a frozen dataclass.  Its fields are its keys in policy files, its docstring is their help.  The rules stand in
files of their own, by what they judge; their table is in rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Protocol

from gpuguard.model import Finding
from gpuguard.policies.view import RuleView
from gpuguard.units import Amount


class Evidence(Enum):
    """The evidence that a finding rests on, the least certain first."""

    SENSOR = "readings"  # of a driver, the kernel, a directory service
    MISSING_CLAIMS = "claims that are missing"  # of ours or of an outer scheduler
    CLOCK = "clocks, and claims that are there"


@dataclass(frozen=True)
class RuleNeeds:
    """The data that one rule needs beyond what is read for every rule.  The daemon reads nothing else for it."""

    fields: frozenset[str] = frozenset()  # groups of fields of devices, beyond model.WHO_FIELDS
    past: tuple[tuple[str, float], ...] = ()  # (field, seconds) of RuleView.past
    host: bool = False  # RuleView.host
    # RuleView.machine: the amounts of memory from which a user counts, or () for the cores alone
    machine: tuple[Amount, ...] | None = None
    scheduler: bool = False  # RuleView.scheduled
    gpu_seconds: tuple[float, ...] = ()  # the windows of RuleView.gpu_seconds, in seconds
    claims: bool = False  # it finds less if no claims are known; the daemon always reads them
    memory_size: bool = False  # it judges by how much memory a GPU has or has free, unless that is the host's


@dataclass(frozen=True)
class RuleKind:
    """The properties of a kind of rule.  No other place lists rules by their properties."""

    name: str  # in policy files, and in its findings
    innocent: bool  # whether the user of a process that it finds may not be the cause
    advice: Mapping[str, str] = field(default_factory=dict)  # language -> how a user stops it; {}: end the process
    needs: RuleNeeds = RuleNeeds()  # the most that a rule of this kind can need
    rests_on: Evidence = Evidence.SENSOR
    protects_others: bool = False  # no user can ask by `gpuguard keep` to be spared
    suggests_keep: bool = False  # users may need more time, and are told how to ask for it
    by_content: bool = False  # two rules with different keys may have no process in common
    newest_first: bool = False  # what came last is in excess, and is hit first
    outlasts_boot: bool = False  # a reboot does not mend what it finds
    spares: tuple[str, ...] = ()  # its keys that name users or groups who are innocent
    accuses: tuple[str, ...] = ()  # its keys that name users who are not innocent
    limits: str = ""  # the field of a device that its keys `above` and `below` are about
    # key -> (what `above` cannot pass, or what `below` cannot fall under; why)
    bounds: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # key -> what the rule does not look at while it is false
    finds_trespassers: bool = False  # but none who used a GPU before it was claimed, which is worth an event
    of_whole: bool = False  # the instances of a GPU are judged by the readings of the whole
    not_in_tables: str = ""  # what it cannot know from a table of samples without a column of its name


class Rule(Protocol):
    """One condition.  The fields of a rule are its keys in policy files, and its docstring is their help.

    Each rule is a frozen dataclass that names this class as its base, says its kind, and overrides what else differs.
    """

    kind: ClassVar[RuleKind]

    def check(self, view: RuleView) -> Iterable[Finding]:
        """Return a finding for each subject for which it holds now, judged by *view* alone."""

    @property
    def needs(self) -> RuleNeeds:
        """The data that it needs with these keys."""
        return self.kind.needs

    @property
    def judges_by(self) -> frozenset[str]:
        """The fields of a device without which nothing is found there with these keys."""
        of_device = vars(self).get("per", "device") == "device"
        return frozenset({self.kind.limits} if of_device and self.kind.limits else ())

    @property
    def rests_on(self) -> Evidence:
        """The evidence that its findings rest on with these keys."""
        return self.kind.rests_on

    @property
    def reaches(self) -> frozenset[str]:
        """The kinds that an action can mean: "process", "claim" (without a process), or neither for devices alone."""
        return frozenset() if vars(self).get("per") == "device" else frozenset({"process"})
