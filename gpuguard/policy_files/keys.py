"""The language of policy files: what may be written where.  The fields are the keys, and the docstrings are their help.

Rules have their own keys (policies/), and so do actions.  This module does not read files (see loader), and does not
judge what the keys mean together (see checks).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.enforcement.guard_limits import JOBS_PER_HOUR, JOBS_PER_MINUTE, MOST_JOBS
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.model import DESKTOP_MEMORY, MOST_DESKTOP_MEMORY
from gpuguard.notify.targets import TARGETS
from gpuguard.notify.templates import Template
from gpuguard.policies.policy import Audience, Exemption, Until, parse_path
from gpuguard.policies.rule import Rule
from gpuguard.policies.rules import RULES
from gpuguard.units import parse_bytes, parse_duration, parse_percent
from gpuguard.yaml_files.decoder import GROUP, USER, Tagged, TaggedChoice, TaggedValue

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

LONGEST_MESSAGE = 300
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_HOURS = re.compile(r"(\d\d):([0-5]\d) ?- ?(\d\d):([0-5]\d)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d(?:T\d\d:\d\d)?")


def parse_name(text: str) -> str:
    """Return *text* if it is a name that is safe in logs, mails and file names."""
    if not _NAME.fullmatch(text):
        raise InvalidRequest(
            _("{text!r} is no name: write small letters, digits and dashes, like 'idle-gpus'.").format(text=text)
        )
    return text


def parse_message(text: str) -> str:
    """Return *text* as a sentence in one line of at most LONGEST_MESSAGE characters."""
    if not text.strip() or not text.isprintable() or len(text) > LONGEST_MESSAGE:
        raise InvalidRequest(
            _("{text!r:.60} is no message: write one line of 1 to {longest} characters.").format(
                text=text, longest=LONGEST_MESSAGE
            )
        )
    return text.strip()


def parse_hours(text: str) -> tuple[float, float]:
    """Return (begin, end) of ``"22:00-07:30"`` in seconds since midnight."""
    match = _HOURS.fullmatch(text.strip())
    if not match:
        raise InvalidRequest(_("{text!r} are no hours: write them like '22:00-07:30'.").format(text=text))
    begin, end = (int(hour) * 3600 + int(minute) * 60 for hour, minute in (match.group(1, 2), match.group(3, 4)))
    if begin >= 86400 or end > 86400:
        raise InvalidRequest(_("{text!r} are no hours: a day has the hours 00:00 to 24:00.").format(text=text))
    if begin == end:
        raise InvalidRequest(_("{text!r} begins when it ends: leave hours out to mean always.").format(text=text))
    return float(begin), float(end)


def parse_until(text: str) -> float:
    """Return the unix time at which the day ``"2026-12-24"`` is over here, or that of ``"2026-12-24T18:00"``."""
    try:
        if not _DATE.fullmatch(text):
            raise ValueError
        moment = datetime.fromisoformat(text)
        return (moment if "T" in text else moment + timedelta(days=1)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            _("{text!r} is no date: write it like '2026-12-24' or '2026-12-24T18:00'.").format(text=text)
        ) from None


def parse_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise InvalidRequest(
            _("{text!r} is not a whole number from 1 on: write plain digits, like 3.").format(text=text)
        )
    return int(text)


def parse_limit(text: str) -> int:
    """Return a whole number from 1 to MOST_JOBS."""
    number = parse_count(text)
    if number > MOST_JOBS:
        raise InvalidRequest(_("{text!r} is no limit any more: write 1 to {most}.").format(text=text, most=MOST_JOBS))
    return number


def parse_interval(text: str) -> float:
    """Return seconds, from 100 ms to 1 h."""
    seconds = parse_duration(text)
    if not 0.1 <= seconds <= 3600:
        raise InvalidRequest(_("{text!r} is out of range: write 100ms to 1h.").format(text=text))
    return seconds


def parse_desktop_memory(text: str) -> int:
    """Return bytes, up to 8 GiB."""
    most = parse_bytes(text)
    if most > MOST_DESKTOP_MEMORY:
        raise InvalidRequest(_("{text!r} is out of range: write 0B to 8GiB.").format(text=text))
    return most


_Rule = Annotated[tuple[str, Rule], TaggedChoice(RULES, N_("rule"))]
# One rule, or one of the two ways to join several, by name.
CONDITIONS: Mapping[str, Any] = {**RULES, "all": tuple[_Rule, ...], "any": tuple[_Rule, ...]}


@dataclass(frozen=True)
class BreakerKeys:
    """How many are acted on destructively at once; the others follow, of each user one job after the other.

    A job is the processes of one claim; without a claim those of one process group, or those that a launcher starts of
    the same program within a minute, as far as the rule finds them.  It is hit whole.

    Args:
        users: different users at once.  If there would be more, no user is hit, unless the rules rest on clocks and on
            claims that are there (age, quota, users): readings, and claims that are missing, can fail for everybody.
        jobs: jobs at once (default 5).  The others follow when the effect is seen; after readings of the driver or of
            the kernel, when the condition has held for a whole `for` once more.
        processes: counts processes in place of jobs.
        order: which job comes first: newest, oldest, most_memory, least_used (of the GPU) or most_power.  By default
            the newest for the rules quota and processes, else the one with the most memory.
        beyond: what happens if there would be more users: "nobody" is hit, or "some", as many as allowed at once.
    """

    users: Annotated[int, parse_count] = 3
    jobs: Annotated[int, parse_count] | None = None
    processes: Annotated[int, parse_count] | None = None
    order: Literal["newest", "oldest", "most_memory", "least_used", "most_power"] | None = None
    beyond: Literal["nobody", "some"] = "nobody"

    def __post_init__(self) -> None:
        if self.jobs and self.processes:
            raise InvalidRequest(_("jobs and processes both say how many: delete one of them."))


@dataclass(frozen=True)
class StepKeys:
    """One step of an escalation: the name of an action alone, or its keys.

    Args:
        after: since the step before; for the first step, since the condition has held for `for`.
        even_if_innocent: must be true to terminate, kill, pause, deny, release, cancel or requeue for the state of a
            GPU (rules temperature, power, forecast, health): the user of a hot or full GPU may not be the cause.
    """

    after: Annotated[float, parse_duration] = 0.0
    even_if_innocent: bool = False


@dataclass(frozen=True)
class PolicyKeys:
    """One policy: when something holds for so long, take these steps.

    Args:
        name: unique; small letters, digits and dashes.
        when: one rule with its keys, {all: [rules]} or {any: [rules]}.
        steps: the escalation, from mild to severe.
        for: how long the condition must hold without a break.
        start_grace: processes and claims younger than this are innocent.
        only: whom it is about; everybody by default.
        except: whom it spares; one group of keys, or a list of them.
        devices_at_least: the condition must hold on so many GPUs of the same user at once.
        hours: only then, local time, as in 22:00-07:30.
        days: only on these days; hours that pass midnight belong to the day on which they begin.
        claimed_above: only while more than this share of the GPUs is claimed.
        at_most: how many are acted on at once.
        until: how far a pause must take the GPU before it ends, as {temperature: {below: 75C}}.
        message: a sentence of one's own, which users are told before what was seen.
        keep: true or false, whether `gpuguard keep` spares those who ask for it.  By default it does, unless the policy
            has a rule that protects others: unclaimed, trespass, users, quota or outside_scheduler.
        cooldown: after the last step, the subject is left alone for so long (default 15m).
        mode: observe or enforce; the file's when absent.
    """

    name: Annotated[str, parse_name]
    when: Annotated[tuple[str, Any], TaggedChoice(CONDITIONS, N_("rule"))]
    steps: tuple[Annotated[TaggedValue, Tagged("do", StepKeys, ACTION_KEYS, N_("action"))], ...]
    for_: Annotated[float, parse_duration] = 30.0
    start_grace: Annotated[float, parse_duration] = 0.0
    only: Audience | None = None
    except_: Exemption | tuple[Exemption, ...] | None = None
    devices_at_least: Annotated[int, parse_count] = 1
    hours: Annotated[tuple[float, float], parse_hours] | None = None
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] | None = None
    claimed_above: Annotated[float, parse_percent] | None = None
    at_most: BreakerKeys = field(default_factory=BreakerKeys)
    until: Until | None = None
    message: Annotated[str, parse_message] | None = None
    keep: bool | None = None
    cooldown: Annotated[float, parse_duration] = 900.0
    mode: Literal["observe", "enforce"] | None = None


@dataclass(frozen=True)
class IntervalKeys:
    """How often the machine is looked at: seldom while nothing changes, often while something does.

    Args:
        shortest: while values rise or an escalation goes on.
        longest: on a quiet machine.
    """

    shortest: Annotated[float, parse_interval] = 2.0
    longest: Annotated[float, parse_interval] = 10.0

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise InvalidRequest(_("shortest is longer than longest: exchange them."))


@dataclass(frozen=True)
class KeepKeys:
    """What users may ask for by `gpuguard keep`: that their own processes and claims are left alone.

    No process or claim can be kept by its user for more than 72 h in 7 days.  What root keeps is not counted.

    Args:
        longest: for how long at once; 0s: not at all.
    """

    longest: Annotated[float, parse_duration] = 86400.0


@dataclass(frozen=True)
class EventKeys:
    """How long the daemon keeps its log, events.jsonl; a file of it is set aside at 10 MiB.

    Args:
        keep: for so long after its last line; the newest that was set aside is always kept.
    """

    keep: Annotated[float, parse_duration] | None = None


@dataclass(frozen=True)
class LimitKeys:
    """How much the guard does at most, by all policies together, whatever they say: more at once is always a mistake.

    Args:
        per_minute: jobs that are signalled.
        per_hour: jobs that are ended; of those that are left each user has half.
    """

    per_minute: Annotated[int, parse_limit] = JOBS_PER_MINUTE
    per_hour: Annotated[int, parse_limit] = JOBS_PER_HOUR


@dataclass(frozen=True)
class ProtectKeys:
    """Whose processes no policy touches, beside those of root and of the system; who is meant is still warned.

    One entry that matches is enough.

    Args:
        users: names or uids.
        groups: names; all members, and users whose groups cannot be learned.
        executables: globs of whole paths of programs, of files that belong to root or to the owner of that path.
    """

    users: tuple[Annotated[int, USER], ...] = ()
    groups: tuple[Annotated[str, GROUP], ...] = ()
    executables: tuple[Annotated[str, parse_path], ...] = ()

    def __post_init__(self) -> None:
        if not any(vars(self).values()):
            raise InvalidRequest(_("no user or program is named: write users, groups or executables."))


@dataclass(frozen=True)
class FileKeys:
    """A policy file.

    Args:
        version: of this language: 1.
        policies: at least one; each judges by itself.
        mode: observe (default): nothing is done, what would be done is logged.  enforce: it is done, if the daemon
            was started with --enforce, too.
        notify: names of one's own, each with one way to send messages.
        messages: texts of one's own, per language.
        interval: how often the machine is looked at.
        keep: what users may ask for by `gpuguard keep`.
        limits: how much is done at most, whatever the policies say.
        events: how long the daemon keeps its log.
        protect: whose processes are never touched, whatever the policies say.
        desktop_memory: what all programs of one user that draw may hold of a GPU before they count as use of it; up to
            8GiB, 2GiB when absent.  The commands of all users go by it, too.
    """

    version: Literal["1"]
    policies: tuple[PolicyKeys, ...]
    mode: Literal["observe", "enforce"] = "observe"
    notify: Mapping[
        Annotated[str, parse_name], Annotated[tuple[str, Any], TaggedChoice(TARGETS, N_("way to send"))]
    ] = field(default_factory=dict)
    messages: Mapping[Literal["en", "zh"], Template] = field(default_factory=dict)
    interval: IntervalKeys = field(default_factory=IntervalKeys)
    keep: KeepKeys = field(default_factory=KeepKeys)
    limits: LimitKeys = field(default_factory=LimitKeys)
    events: EventKeys = field(default_factory=EventKeys)
    protect: ProtectKeys | None = None
    desktop_memory: Annotated[int, parse_desktop_memory] = DESKTOP_MEMORY
