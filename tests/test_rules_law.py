"""What holds for every rule, those of tomorrow too: unknown is innocent, and a finding says why.

Every rule is taken as its docstring shows it, and the machine is one on which it finds somebody.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from builders import GIB, MIB, Scripted, a_claim_record, a_device, a_process, a_snapshot, claims_first
from chances import often
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import CLOCK, a_bad_day, examples, shown

from gpuguard.errors import InvalidRequest
from gpuguard.model import Device, Finding, GpuProcess
from gpuguard.policies.expression import ExpressionRule, parse_expression
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Exemption, Policy, Scope, Step
from gpuguard.policies.rule import Rule, RuleKind
from gpuguard.policies.rules import RULES, needs_of
from gpuguard.policies.thresholds import ProcessesRule
from gpuguard.policies.view import HostUse, RuleView, device_subject, process_subject
from gpuguard.units import parse_bytes, parse_celsius, parse_duration, parse_percent, parse_rate, parse_watts
from gpuguard.watchdog import Watchdog

PARSERS = (parse_bytes, parse_percent, parse_duration, parse_celsius, parse_watts)
RECORDED = {"memory_used", "utilization", "temperature", "power_draw"}
ALWAYS_THERE = {"index", "uuid", "pid", "kind", "processes_plausible"}
UNKNOWABLE = [
    (noun, each.name) for noun in (Device, GpuProcess) for each in fields(noun) if each.name not in ALWAYS_THERE
]

ALL = [rule for name in RULES for rule in shown(name, RULES[name])]
every_rule = pytest.mark.parametrize("rule", ALL, ids=lambda rule: type(rule).__name__)


def hit(findings: Iterable[Finding]) -> set[tuple[int, float | None]]:
    """The processes that an action would mean."""
    return {(process.pid, process.start_time) for finding in findings for process in finding.processes}


def with_devices(view: RuleView, change: Callable[[Device], Device]) -> RuleView:
    devices = tuple(change(device) for device in view.snapshot.devices)
    return replace(view, snapshot=replace(view.snapshot, devices=devices))


def with_processes(view: RuleView, **fields: object) -> RuleView:
    def change(device: Device) -> Device:
        processes = tuple(replace(process, **fields) for process in device.processes or ())
        return replace(device, processes=processes)

    return with_devices(view, change)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_shows_itself_in_yaml(name):
    assert examples(RULES[name]), "an indented block that begins with `when:`"
    assert all(is_frozen(rule) for rule in shown(name, RULES[name]))


def is_frozen(rule: Rule) -> bool:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, fields(rule)[0].name if fields(rule) else "anything", 1)
    return dataclasses.is_dataclass(rule)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_explains_each_of_its_keys(name):
    help_text = RULES[name].__doc__ or ""

    assert [key.name for key in fields(RULES[name]) if not re.search(rf"^ +{key.name}[,:]", help_text, re.M)] == []


@every_rule
def test_a_finding_carries_the_name_of_its_rule(rule):
    assert {finding.rule for finding in rule.check(a_bad_day())} == {
        name for name, its_class in RULES.items() if its_class is type(rule)
    }


@every_rule
def test_a_finding_says_why_with_a_unit(rule):
    unit = r"\d ?(GiB|MiB|B|%|C|W|s|m|h|d)\b|\d%|\d \w+|'|/|lost|slowdown"
    assert [finding.why for finding in rule.check(a_bad_day()) if not re.search(unit, finding.why)] == []


@every_rule
def test_a_finding_names_a_limit_of_its_rule(rule):
    limits = [limit for each in fields(rule) if (limit := getattr(rule, each.name)) is not None]
    values = [getattr(limit, "value", limit) for limit in limits]
    numbers = {float(value) for value in values if type(value) in (int, float) and value != 0}
    texts = [limit.text for limit in limits if hasattr(limit, "text")]
    if not numbers and not texts:
        return  # its limits are names

    for finding in rule.check(a_bad_day()):
        named = quantities(finding.why)
        assert any(text in finding.why for text in texts) or numbers & named, finding.why


def quantities(text: str) -> set[float]:
    found = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}
    found |= {hours * 3600 for hours in found}  # "100 GPU-hours"
    for word in re.findall(r"[\w.%]+", text):
        for parse in PARSERS:
            try:
                found.add(float(parse(word.strip("."))))
            except InvalidRequest:
                continue
    return found


@every_rule
def test_a_rule_finds_the_same_when_it_is_asked_again_and_each_once_and_a_tick_later(rule):
    view = a_bad_day()
    findings = list(rule.check(view))
    keys = [finding.subject for finding in findings]

    assert (list(rule.check(view)), view) == (findings, a_bad_day())
    assert len(keys) == len(set(keys))
    assert {finding.subject for finding in rule.check(a_bad_day(CLOCK + 1))} == set(keys)


@every_rule
def test_a_rule_asks_only_for_a_past_that_is_recorded(rule):
    assert all(field in RECORDED and seconds > 0 for field, seconds in rule.needs.past)


@every_rule
def test_a_process_subject_is_never_a_pid_alone(rule):
    for finding in rule.check(a_bad_day()):
        assert (finding.subject.pid is None) == (finding.subject.start_time is None)
        assert all(process.start_time is not None and process.uid is not None for process in finding.processes)


@every_rule
def test_an_unknown_value_accuses_nobody(rule):
    known = list(rule.check(a_bad_day()))

    assert [field for noun, field in UNKNOWABLE if not no_worse(rule.check(without(noun, field)), known)] == []


def without(noun: type, field: str) -> RuleView:
    """The bad day, with nobody knowing that field of any device or process."""
    if noun is GpuProcess:
        return with_processes(a_bad_day(), **{field: None})
    return with_devices(a_bad_day(), lambda device: replace(device, **{field: None}))


def no_worse(now: Iterable[Finding], before: Iterable[Finding]) -> bool:
    """Whether no process is hit and no device accused *now* that was not *before*."""
    now, before = list(now), list(before)
    devices = [{finding.subject.device for finding in findings} for findings in (now, before)]
    return hit(now) <= hit(before) and devices[0] <= devices[1]


@every_rule
def test_where_nothing_is_known_nobody_is_found(rule):
    blank = {field: None for noun, field in UNKNOWABLE if noun is Device}
    view = RuleView(replace(with_devices(a_bad_day(), lambda device: replace(device, **blank)).snapshot, claims=()))

    assert list(rule.check(view)) == []


@every_rule
def test_no_process_is_accused_by_a_list_that_is_not_plausible_or_while_nobody_knows_it(rule):
    assert_nobody_is_accused(
        rule.check(with_devices(a_bad_day(), lambda device: replace(device, processes_plausible=False)))
    )
    for field in ("start_time", "uid"):
        assert_nobody_is_accused(rule.check(with_processes(a_bad_day(), **{field: None})))


def assert_nobody_is_accused(findings: Iterable[Finding]) -> None:
    findings = list(findings)
    assert hit(findings) == set()
    # What a user takes of the machine is no matter of the list of processes.
    of_machine = {rule.kind.name for rule in ALL if rule.needs.machine is not None}
    kinds = {finding.subject.kind for finding in findings if finding.rule not in of_machine}
    assert kinds <= {"device", "node", "claim"}


@every_rule
def test_a_desktop_is_not_accused(rule):
    assert hit(rule.check(with_processes(a_bad_day(), kind="graphics", memory_used=MIB))) == set()


def test_the_machine_of_these_tests_shows_the_fault_of_a_rule_that_takes_unknown_for_zero():
    @dataclass(frozen=True)
    class Naive(Rule):
        kind = RuleKind("naive", innocent=False)

        def check(self, view: RuleView) -> Iterable[Finding]:
            for device in view.snapshot.devices:
                if (device.utilization or 0) < 5:
                    yield Finding("naive", device_subject(device), "is idle", device.processes or ())

    rule: Rule = Naive()
    unknown = with_devices(a_bad_day(), lambda device: replace(device, utilization=None))
    assert not no_worse(rule.check(unknown), rule.check(a_bad_day()))
    with pytest.raises(AssertionError):
        assert_nobody_is_accused(rule.check(with_processes(a_bad_day(), uid=None)))


BYTES = st.integers(0, 100 * GIB)
PERCENT = st.floats(0, 100)
maybe = {
    "memory_used": BYTES, "memory_total": BYTES, "memory_free": BYTES, "utilization": PERCENT, "power_draw": PERCENT,
    "temperature": PERCENT, "power_limit": PERCENT, "problems": st.tuples(st.text(max_size=3)), "name": st.text(),
    "throttle_reasons": st.just(()), "retired_pages": st.integers(0, 9), "ecc_uncorrected_volatile": st.integers(0, 9),
}  # fmt: skip
some_process = st.builds(
    lambda pid, given: a_process(pid, **given),
    st.integers(0, 2**32),
    st.fixed_dictionaries(
        {},
        optional={
            "memory_used": st.none() | BYTES,
            "kind": st.sampled_from(["compute", "graphics", "compute+graphics", "mps", "new"]),
            "start_time": st.none() | st.floats(0, 2e6),
            "uid": st.none() | st.integers(-1, 2**32),
            "user": st.none() | st.text(max_size=4),
            "utilization": st.none() | PERCENT,
            "command": st.none() | st.lists(st.text(max_size=4), max_size=2).map(tuple),
            "executable": st.none() | st.text(max_size=4),
            "container": st.none() | st.text(max_size=4),
        },
    ),
)
some_device = st.builds(
    lambda index, given: a_device(index, **given),
    st.integers(0, 3),
    st.fixed_dictionaries(
        {},
        optional={field: st.none() | values for field, values in maybe.items()}
        | {
            "processes": st.none() | st.lists(some_process, max_size=3).map(tuple),
            "processes_plausible": st.booleans(),
            "parent_uuid": st.none() | st.just(a_device(0).uuid),
        },
    ),
)
some_claim = st.builds(
    lambda index, uid, since: a_claim_record(a_device(index), id=f"c{index}", uid=uid, user="", since=since),
    st.integers(0, 4),
    st.integers(-1, 2000),
    st.none() | st.floats(-1e9, 2e9),
)
some_series = st.lists(st.tuples(st.floats(0, 600), st.floats(0, 1e12)), max_size=40).map(sorted)


@st.composite
def views(draw: st.DrawFn) -> RuleView:
    devices = draw(st.lists(some_device, max_size=4, unique_by=lambda device: device.index))
    now = replace(a_snapshot(clock=600.0), devices=tuple(devices), claims=tuple(draw(st.lists(some_claim, max_size=3))))
    processes = [(device, process) for device in devices for process in device.processes or ()]
    subjects = [device_subject(device) for device in devices] + [process_subject(*each) for each in processes]
    past = {(subject, field): draw(some_series) for subject in subjects for field in sorted(RECORDED)}
    numbers = st.none() | st.floats(0, 1e9)
    uses = st.builds(HostUse, cpu=numbers, network=numbers)
    host = {(process.pid, process.start_time or 0.0): draw(uses) for _, process in processes}
    scheduled = draw(st.none() | st.just({device.uuid: frozenset({1001}) for device in devices}))
    arrivals = claims_first(now.claims, *devices)
    return RuleView(now, past=past, host=host, scheduled=scheduled, arrivals=arrivals)


@settings(max_examples=often(300), suppress_health_check=list(HealthCheck))
@given(view=views())
def test_no_machine_makes_a_rule_fail_or_accuse_the_unknown(view):
    plausible = {device.uuid for device in view.snapshot.devices if device.processes_plausible}
    for rule in ALL:
        for finding in rule.check(view):
            assert all(process.start_time is not None and process.uid is not None for process in finding.processes)
            assert finding.subject.kind != "process" or finding.subject.device in plausible


CALM = ProcessesRule(above=9)


def a_policy(rule: Rule = CALM, **fields: Any) -> Policy:
    return Policy("p", (CALM, rule), **{"steps": (Step("log"),), **fields})


@pytest.mark.parametrize(
    ("policy", "host"),
    [
        (a_policy(), False),
        (a_policy(IdleRule(below=5.0)), False),
        (a_policy(IdleRule(below=5.0, cpu_below=2.0)), True),
        (a_policy(IdleRule(below=5.0, network_below=parse_rate("1MB/s"))), True),
        (a_policy(ExpressionRule(parse_expression("memory_used > 1GiB"))), False),
        (a_policy(ExpressionRule(parse_expression("memory_used > 1GiB and cpu < 5%"))), True),
        (a_policy(only=Scope(users=frozenset({1}))), False),
        (a_policy(only=Scope(kinds=frozenset({"batch"}))), True),
        (a_policy(exempt=(Exemption(users=frozenset({1})), Exemption(kinds=frozenset({"interactive"})))), True),
    ],
)
def test_the_host_is_wanted_by_those_who_judge_by_it(policy: Policy, host: bool) -> None:
    assert needs_of([a_policy(), policy]).host is host
    assert not needs_of([]).host


def test_targets_are_those_of_all_steps_each_once() -> None:
    steps = (Step("notify", options=(("to", "mail"),)), Step("notify", options=(("to", "chat"),)), Step("log"))
    hooked = (Step("hook", options=(("hook", "page"),)), Step("notify", options=(("to", "mail"),)))

    assert needs_of([a_policy(steps=steps), a_policy(steps=hooked)]).targets == ("chat", "mail", "page")


def test_what_stands_is_told_of_the_policies_that_it_was_judged_by() -> None:
    """Somebody may ask between the moment in which a policy is replaced and the next look."""
    row = a_process(4711, start_time=5.0)
    snapshots = [a_snapshot(a_device(0, processes=(row,)), clock=100.0 + second) for second in range(3)]
    many = a_policy(ProcessesRule(above=0), hold=0.0, join="any", steps=(Step("log"), Step("log", after=3600.0)))
    guard = Watchdog(Scripted(*snapshots), [many])
    assert guard.status() == ()
    guard.step()
    guard.step()
    before = guard.status()
    guard.policies = (replace(many, steps=()),)

    assert [(one.last, one.next) for one in before] == [("log", "log")]
    assert guard.status() == before
    guard.step()
    assert [(one.last, one.next) for one in guard.status()] == [(None, None)]
