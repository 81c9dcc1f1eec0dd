"""Unit tests of policies: invented machines, sample by sample, and the steps that the policies must take.

A file of tests is YAML beside the policy file; the fields of File and Test are its keys.  Every step must be expected,
and each expectation must be met by a step of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from gpuguard.backtest.backtest import rehearse
from gpuguard.backtest.recordings import Numbering, people
from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.model import DEVICE_FIELDS, ClaimRecord, Device, GpuProcess, Snapshot, Verdict
from gpuguard.policies.policy import Policy
from gpuguard.policies.rules import needs_of
from gpuguard.policies.view import HostUse, MachineUse, RuleView, UserUse
from gpuguard.policy_files.keys import parse_count, parse_interval
from gpuguard.policy_files.loader import PolicyFile, content_of, load_policies
from gpuguard.units import (
    parse_bytes,
    parse_celsius,
    parse_cores,
    parse_duration,
    parse_field,
    parse_percent,
    parse_rate,
    parse_watts,
)
from gpuguard.yaml_files.decoder import Accounts, Decoder, parse_whole
from gpuguard.yaml_files.yaml_text import Fault, YamlSource, in_order

T = TypeVar("T")

_CLOCK = 1e9  # of the first sample; so high that even an old process began after the machine did
_PID = 1000  # of the first process
_MOST = 20_000  # samples of one test: two weeks, one per minute
_REPEATED = re.compile(r"(.*?)(?:\s+x\s?([1-9][0-9]{0,4}))?", re.DOTALL)
_START = "2026-01-05T08:00"  # a Monday


@dataclass(frozen=True)
class TestSeries:
    """One value per sample, or None if it is unknown; the last one stays."""

    values: tuple[float | None, ...]


def series_of(parse: Callable[[str], float]) -> Callable[[str], TestSeries]:
    """Return a reader of ``"0% x120, 90%"``, ``"40C..95C x10"`` (a ramp) and ``"_ x3"`` (unknown)."""

    def read(text: str) -> TestSeries:
        values: list[float | None] = []
        for part in text.split(","):
            match = _REPEATED.fullmatch(part.strip())
            assert match  # it matches every text
            value, count = match.group(1), int(match.group(2) or 1)
            first, ramp, last = value.partition("..")
            if value == "_":
                values += [None] * count
            else:
                begin = parse(first.strip())
                end = parse(last.strip()) if ramp else begin
                values += [begin + (end - begin) * step / max(1, count - 1) for step in range(count)]
            if len(values) > _MOST:
                raise InvalidRequest(
                    _("{count} samples: at most {most} are looked at.").format(count=len(values), most=_MOST)
                )
        return TestSeries(tuple(values))

    return read


def parse_network(text: str) -> float:
    """Return the bytes per second of ``"5MB/s"``."""
    return parse_rate(text).per_second


def parse_words(text: str) -> tuple[str, ...]:
    """Return the words of a command line."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InvalidRequest(_("{text!r} is no command line: {error}.").format(text=text, error=error)) from None


def parse_start(text: str) -> float:
    """Return the unix time of ``"2026-11-20T09:00"`` in the local time zone."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(_("{text!r} is no time: write it like '2026-11-20T09:00'.").format(text=text)) from None


def parse_action(text: str) -> str:
    """Return *text*, which must be the name of an action."""
    if text not in ACTION_KEYS:
        raise InvalidRequest(
            _("{text!r} is no action: known are {actions}.").format(text=text, actions=", ".join(ACTION_KEYS))
        )
    return text


Place = Annotated[int, parse_whole]
_Percent = Annotated[TestSeries | None, series_of(parse_percent)]
_Bytes = Annotated[TestSeries | None, series_of(parse_bytes)]


_SAID_OTHERWISE = frozenset({
    "memory_total", "memory_used", "memory_free", "utilization", "temperature", "power_draw", "power_limit",
})  # fmt: skip
_OTHER_FIELDS = [known for known in DEVICE_FIELDS.values() if known.is_number and known.name not in _SAID_OTHERWISE]


def _with_other_fields(keys: type[T]) -> type[T]:
    """Add a key of the same name for each other number that a device can report."""
    for known in _OTHER_FIELDS:
        read = series_of(partial(parse_field, unit=known.unit))
        keys.__annotations__[known.name] = Annotated[TestSeries | None, read]
        setattr(keys, known.name, None)
    return keys


@dataclass(frozen=True)
@_with_other_fields
class DeviceKeys:
    """One device; the first is 0.  All values are series but the model and its size.

    Every other number that a device can report is a key, too: see model.DEVICE_FIELDS.
    """

    model: str = "NVIDIA A100-SXM4-80GB"
    memory_total: Annotated[float, parse_bytes] = 80 * 2**30
    memory_used: _Bytes = None  # that of the processes
    utilization: _Percent = TestSeries((0.0,))
    temperature: Annotated[TestSeries | None, series_of(parse_celsius)] = TestSeries((40.0,))
    power: Annotated[TestSeries | None, series_of(parse_watts)] = TestSeries((100.0,))
    power_limit: Annotated[float, parse_watts] = 400.0
    problems: tuple[str, ...] = ()
    scheduled: tuple[str, ...] | None = None  # users to whom an outer scheduler has given it


@dataclass(frozen=True)
class ProcessKeys:
    """One process of a user, from `begins` to `ends`; it is `age` old when it is first seen."""

    user: str
    devices: tuple[Place, ...] = (0,)
    memory: _Bytes = TestSeries((10 * 2**30,))
    utilization: _Percent = None
    cpu: Annotated[TestSeries | None, series_of(parse_cores)] = None
    host_memory: _Bytes = None
    network: Annotated[TestSeries | None, series_of(parse_network)] = None
    kind: Literal["compute", "graphics", "compute+graphics", "mps"] = "compute"
    is_: Literal["interactive", "batch", "container"] = "batch"
    command: Annotated[tuple[str, ...], parse_words] = ("python", "train.py")
    executable: str = "/usr/bin/python3"
    begins: Annotated[float, parse_duration] = 0.0
    ends: Annotated[float, parse_duration] | None = None
    age: Annotated[float, parse_duration] = 0.0


@dataclass(frozen=True)
class UserKeys:
    """What all processes of one user together take of the machine."""

    cpu: Annotated[TestSeries | None, series_of(parse_cores)] = None
    host_memory: _Bytes = None


@dataclass(frozen=True)
class ClaimKeys:
    """One claim of a user, from `begins` to `ends`; it is `age` old when it is first seen."""

    user: str
    devices: tuple[Place, ...] = (0,)
    begins: Annotated[float, parse_duration] = 0.0
    ends: Annotated[float, parse_duration] | None = None
    age: Annotated[float, parse_duration] = 0.0


@dataclass(frozen=True)
class Expected:
    """One step that must come within one sample after `at`; only the keys that are written are compared."""

    at: Annotated[float, parse_duration]
    action: Annotated[str, parse_action]
    policy: str | None = None
    user: str | None = None
    device: Place | None = None


@dataclass(frozen=True)
class Test:
    """One test.

    Args:
        name: a sentence.
        of: names of the policies that are judged; all by default.
        every: the time between two samples.
        for: how long the test goes on; by default as long as the longest series and the last expectation.
        starts: local time of the first sample.
        cores, memory: of the machine.
        users: user -> what all their processes take of the machine, cpu in percent of one core.
        groups: user -> names of groups.
        gpu_hours: user -> GPU time claimed before, in any window that a quota asks for.
        expect: exactly these steps, in any order.
        expect_none: true if no step at all may come.
    """

    __test__ = False  # pytest takes every class with this name for its own

    name: str
    devices: tuple[DeviceKeys, ...] = (DeviceKeys(),)
    processes: tuple[ProcessKeys, ...] = ()
    claims: tuple[ClaimKeys, ...] = ()
    expect: tuple[Expected, ...] = ()
    expect_none: bool = False
    of: tuple[str, ...] = ()
    every: Annotated[float, parse_interval] = 60.0
    for_: Annotated[float, parse_duration] | None = None
    starts: Annotated[float, parse_start] = field(default_factory=lambda: parse_start(_START))
    cores: Annotated[int, parse_count] = 64
    memory: Annotated[float, parse_bytes] = 512 * 2**30
    users: Mapping[str, UserKeys] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gpu_hours: Mapping[str, Annotated[float, parse_duration]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.expect) == self.expect_none:
            raise InvalidRequest(_("exactly one of expect and `expect_none: true` is needed."))
        holders: tuple[ProcessKeys | ClaimKeys, ...] = (*self.processes, *self.claims)
        last = max((index for holder in holders for index in holder.devices), default=0)
        if last >= len(self.devices):
            raise InvalidRequest(
                _("there is no GPU {last}: the test has {count}.").format(last=last, count=len(self.devices))
            )
        if self.samples > _MOST:
            raise InvalidRequest(
                _("{count} samples: at most {most}, write a longer `every`.").format(count=self.samples, most=_MOST)
            )

    @property
    def samples(self) -> int:
        """The number of samples."""
        if self.for_ is not None:
            return int(self.for_ // self.every) + 1
        nouns = (*self.devices, *self.processes, *self.users.values())
        series = (value for noun in nouns for value in vars(noun).values() if isinstance(value, TestSeries))
        last = max((step.at for step in self.expect), default=0.0)
        return max(int(last // self.every) + 2, *(len(values.values) for values in series))


@dataclass(frozen=True)
class File:
    """A file of tests.

    Args:
        policies: path of the policy file, relative to this one.
        tests: at least one.
    """

    policies: str
    tests: tuple[Test, ...]


def read_tests(content: bytes | str) -> tuple[File | None, tuple[Fault, ...]]:
    """Return the tests that *content* describes, or None and its faults."""
    source = YamlSource(content, begin="policies: FILE")
    file = Decoder(source, {}).root(File)
    return (None if source.faults else file), in_order(source.faults)


def accounts(uid_of: Numbering) -> Accounts:
    """Return the accounts of a rehearsal, whose users and groups need not exist on this machine."""
    return Accounts(user_number=uid_of, group_number=lambda name: 1)


def _uuid_of(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-{index:012x}"


def views(test: Test, policies: Sequence[Policy], number_of: Numbering) -> Iterator[RuleView]:
    """Yield the samples of *test*, in the order of time."""

    def uid_of(user: str) -> int:
        return int(user) if user.isdecimal() else number_of(user)

    holders: tuple[ProcessKeys | ClaimKeys, ...] = (*test.processes, *test.claims)
    groups = {uid_of(holder.user): frozenset[str]() for holder in holders}
    groups |= {uid_of(user): frozenset(names) for user, names in test.groups.items()}
    spent = {uid_of(user): dict.fromkeys(needs_of(policies).gpu_seconds, used) for user, used in test.gpu_hours.items()}
    given = {
        _uuid_of(index): frozenset(map(uid_of, device.scheduled))
        for index, device in enumerate(test.devices)
        if device.scheduled is not None
    }
    for sample in range(test.samples):
        elapsed = sample * test.every
        running = [
            (keys, _process(number, keys, sample, uid_of))
            for number, keys in enumerate(test.processes)
            if _lives(keys, elapsed)
        ]
        snapshot = Snapshot(
            "rehearsal",
            "rehearsal",
            test.starts + elapsed,
            _CLOCK + elapsed,
            tuple(_device(index, keys, sample, running) for index, keys in enumerate(test.devices)),
            simulated=True,
            claims=tuple(
                _claim(number, keys, test, uid_of) for number, keys in enumerate(test.claims) if _lives(keys, elapsed)
            ),
        )
        host = {
            (process.pid, process.start_time or 0.0): HostUse(
                cpu=_at(keys.cpu, sample),
                memory=_whole(keys.host_memory, sample),
                network=_at(keys.network, sample),
                terminal="/dev/pts/0" if keys.is_ == "interactive" else "",
            )
            for keys, process in running
        }
        users = {
            uid_of(user): UserUse(user, _at(keys.cpu, sample), _whole(keys.host_memory, sample))
            for user, keys in test.users.items()
        }
        machine = MachineUse(int(test.memory), test.cores, users)
        yield RuleView(snapshot, host=host, machine=machine, groups=groups, scheduled=given or None, gpu_seconds=spent)


def _lives(keys: ProcessKeys | ClaimKeys, elapsed: float) -> bool:
    return keys.begins <= elapsed and (keys.ends is None or elapsed < keys.ends)


def _process(number: int, keys: ProcessKeys, sample: int, uid_of: Numbering) -> GpuProcess:
    return GpuProcess(
        pid=_PID + number,
        memory_used=_whole(keys.memory, sample),
        kind=keys.kind,
        start_time=_CLOCK + keys.begins - keys.age,
        uid=uid_of(keys.user),
        user=keys.user,
        utilization=_at(keys.utilization, sample),
        command=keys.command,
        executable=keys.executable,
        container="c0ffee" if keys.is_ == "container" else None,
    )


def _claim(number: int, keys: ClaimKeys, test: Test, uid_of: Numbering) -> ClaimRecord:
    """Return a claim that lives as long as the first process of its user on its devices, if there is one."""
    own = [other.user == keys.user and not set(other.devices).isdisjoint(keys.devices) for other in test.processes]
    return ClaimRecord(
        id=f"claim{number}",
        uid=uid_of(keys.user),
        user=keys.user,
        devices=tuple(map(_uuid_of, keys.devices)),
        pid=_PID + own.index(True) if any(own) else None,
        since=test.starts + keys.begins - keys.age,
    )


def _device(index: int, keys: DeviceKeys, sample: int, running: Sequence[tuple[ProcessKeys, GpuProcess]]) -> Device:
    here = tuple(process for its_keys, process in running if index in its_keys.devices)
    of_processes = sum(process.memory_used or 0 for process in here)
    used = of_processes if keys.memory_used is None else _whole(keys.memory_used, sample)
    total = int(keys.memory_total)
    return Device(
        index=index,
        uuid=_uuid_of(index),
        name=keys.model,
        memory_total=total,
        memory_used=used,
        memory_free=None if used is None else max(0, total - used),
        processes=here,
        utilization=_at(keys.utilization, sample),
        problems=keys.problems,
        temperature=_at(keys.temperature, sample),
        power_draw=_at(keys.power, sample),
        power_limit=keys.power_limit,
        **_others(keys, sample),
    )


def _others(keys: DeviceKeys, sample: int) -> dict[str, Any]:
    values = {known: _at(getattr(keys, known.name), sample) for known in _OTHER_FIELDS}
    return {known.name: None if value is None else known.number(value) for known, value in values.items()}


def _at(series: TestSeries | None, sample: int) -> float | None:
    """Return the value of the sample with this number, counted from 0."""
    return series.values[min(sample, len(series.values) - 1)] if series else None


def _whole(series: TestSeries | None, sample: int) -> int | None:
    value = _at(series, sample)
    return None if value is None else int(value)


@dataclass(frozen=True)
class Got:
    """A step that the engine asked for; *at* is seconds since the first sample."""

    at: float
    policy: str
    action: str
    users: tuple[str, ...]
    device: int | None
    why: str


@dataclass(frozen=True)
class TestOutcome:
    """The result of one test: the steps that are missing or unexpected; it passed if there are none."""

    name: str
    got: tuple[Got, ...]
    missing: tuple[Expected, ...]
    surplus: tuple[Got, ...]

    @property
    def passed(self) -> bool:
        """Whether all expected steps came, and no others."""
        return not (self.missing or self.surplus)


@dataclass(frozen=True)
class Trial:
    """The result of a file of tests."""

    path: str  # of the tests
    policies: str = ""  # path of the policy file, or "" if it is not known
    outcomes: tuple[TestOutcome, ...] = ()  # of all tests; () if there is a fault
    faults: tuple[tuple[str, Fault], ...] = ()  # of either file, with the path of that file
    warnings: tuple[Fault, ...] = ()  # of the policy file: what the daemon may judge otherwise


def run_tests(path: str) -> Trial:
    """Run all tests of a file.  It never raises for the content of the file: see Trial.faults."""
    content = content_of(path, trusted_owner=False)
    file, faults = (None, content.faults) if isinstance(content, PolicyFile) else read_tests(content)
    if file is None:
        return Trial(path, faults=tuple((path, fault) for fault in faults))
    uid_of = people()
    where = os.path.join(os.path.dirname(path), file.policies)
    policies = load_policies(where, trusted_owner=False, accounts=accounts(uid_of))
    if policies.faults:
        return Trial(path, where, faults=tuple((where, fault) for fault in policies.faults))
    known = {policy.name for policy in policies.policies}
    unknown = [
        (test.name, name)
        for test in file.tests
        for name in sorted({*test.of, *(step.policy for step in test.expect if step.policy is not None)} - known)
    ]
    if unknown:
        hint = _("Its policies: {known}.").format(known=", ".join(sorted(known)))
        texts = (
            _("test {test!r}: {policies} has no policy {name!r}.").format(test=test, policies=file.policies, name=name)
            for test, name in unknown
        )
        return Trial(path, where, faults=tuple((path, Fault(0, 0, text, hint)) for text in texts))
    outcomes = []
    for test in file.tests:
        judged = [policy for policy in policies.policies if not test.of or policy.name in test.of]
        steps = [
            _step(verdict, view, view.snapshot.taken_at - test.starts)
            for view, judgement in rehearse(
                views(test, judged, uid_of),
                judged,
                interval=test.every,
                zone=float(time.localtime(test.starts).tm_gmtoff),
                desktop_memory=policies.desktop_memory,
            )
            for verdict in judgement.verdicts
        ]
        outcomes.append(_compare(test, steps))
    return Trial(path, where, tuple(outcomes), warnings=policies.warnings)


def _step(verdict: Verdict, view: RuleView, at: float) -> Got:
    finding = verdict.finding
    users = {process.user for process in finding.processes} | {finding.subject.user}
    device = view.snapshot.device(finding.subject.device) if finding.subject.device else None
    names = tuple(sorted(user for user in users if user))
    return Got(at, verdict.policy, verdict.action, names, device.index if device else None, finding.why)


def _compare(test: Test, got: Sequence[Got]) -> TestOutcome:
    """Give each expectation a step of its own; the expectation with the most demands chooses first."""
    left = list(got)
    missing = []
    for expected in sorted(test.expect, key=lambda step: -sum(value is not None for value in vars(step).values())):
        for step in left:
            if (
                expected.at <= step.at < expected.at + test.every
                and step.action == expected.action
                and expected.policy in (None, step.policy)
                and (expected.user is None or expected.user in step.users)
                and expected.device in (None, step.device)
            ):
                left.remove(step)
                break
        else:
            missing.append(expected)
    return TestOutcome(test.name, tuple(got), tuple(sorted(missing, key=lambda step: step.at)), tuple(left))
