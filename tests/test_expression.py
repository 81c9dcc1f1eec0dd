"""The language of conditions: what it says, what it refuses, and that nobody can turn it against the daemon."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from sources import ROOT

from gpuguard.model import Gap
from gpuguard.policies.expression import ExpressionRule
from gpuguard.policies.expression_language import NAMES, NameSource, parse_expression
from gpuguard.policies.view import HostUse, RuleView

BOB = a_process(
    memory_used=40 * GIB, uid=1002, user="bob", utilization=3.0, start_time=1000.0, executable="/opt/conda/bin/python"
)
A_DEVICE = a_device(
    processes=(BOB,), memory_used=41 * GIB, utilization=2.0, temperature=80.0, temperature_slowdown=90.0
)


def holds(text: str, process=BOB, device=A_DEVICE, **view) -> bool:
    snapshot = a_snapshot(device, **view.pop("snapshot", {}))
    return parse_expression(text).holds(NameSource(RuleView(snapshot, **view), device, process))


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "memory_used > 30GiB and utilization < 5% and user not in ('alice',)",
        "memory_used > 30GiB",
        "memory_used >= 40GiB",
        "memory_used == 40GiB",
        "memory_used != 41GiB",
        "42949673kB > memory_used",
        "not memory_used < 30GiB",
        "not (memory_used < 30GiB or utilization > 50%)",
        "utilization > 50% or user == 'bob'",
        "user == 'alice' or user == 'bob' and utilization < 5%",
        "user in ('alice', 'bob')",
        "user in ['bob']",
        'user == "bob"',
        "uid in (1002, 1003)",
        "uid >= 1000",
        "device_index == 0",
        "device_index in (0, 1)",
        "run_time > 2h",
        "run_time == 2h30m",
        "run_time < 1w",
        "process_utilization < 5%",
        "temperature > temperature_slowdown - 15C",
        "temperature + 10.5C > temperature_slowdown",
        "memory_used > device_memory_total * 0.25",
        "memory_used > 0.25 * device_memory_total",
        "memory_used / device_memory_total > 0.25",
        "memory_used * 2 / 4 > 19GiB",
        "2 * (memory_used + 1GiB) == 82GiB",
        "executable like '/opt/*'",
        "executable not like '/usr/*'",
        "model like '*H100*'",
        "not claimed",
        "processes == 1",
        "power_draw < 300W and power_limit > 0.5kW",
        "command like 'python *'",
        "((((memory_used > 30GiB))))",
        " and ".join(["(not claimed)"] * 30),
        "memory_used > 30GiB\n  and utilization < 5%",
    ],
)
def test_what_is_true_of_bob(text):
    assert holds(text)


@pytest.mark.parametrize(
    "text",
    [
        "memory_used > 50GiB",
        "user == 'alice'",
        "user in ('alice',)",
        "executable like '/usr/*'",
        "memory_used > 30GiB and utilization > 5%",
        "not (memory_used > 30GiB)",
        "claimed",
        "run_time < 1h",
        "user == 'Bob'",
        "user like 'b'",
    ],
)
def test_what_is_not_true_of_bob(text):
    assert not holds(text)


def test_claims_groups_and_the_host_have_names():
    view = {
        "snapshot": {"claims": (a_claim_record(A_DEVICE),)},
        "groups": {1002: frozenset({"students"})},
        "host": {(BOB.pid, 1000.0): HostUse(cpu=250.0, memory=GIB, network=5e5)},
    }

    assert holds("claimed and user not in claimed_by and 'alice' in claimed_by", **view)
    assert holds("'students' in groups and not 'staff' in groups and 'staff' not in groups", **view)
    assert holds("cpu > 200% and host_memory < 2GiB and network < 1MB/s", **view)


# --- unknown is innocent ----------------------------------------------------------------------------------------------

AMOUNTS = {
    "memory size": "1GiB",
    "percentage": "1%",
    "duration": "1h",
    "temperature": "1C",
    "power": "1W",
    "rate": "1MB/s",
}


def conditions_about(name: str) -> list[str]:
    """Every kind of condition about *name*, in pairs of a condition and its opposite."""
    kind = NAMES[name].type
    if kind == "truth":
        return [name, f"not {name}"]
    if kind == "list of texts":
        return [f"'x' in {name}", f"'x' not in {name}", f"not 'x' in {name}"]
    if kind == "text":
        tests = ["== 'x'", "!= 'x'", "in ('x',)", "not in ('x',)", "like 'x'", "not like 'x'"]
        return [f"{name} {test}" for test in tests] + [f"not {name} {test}" for test in tests]
    amount = AMOUNTS.get(kind, "1")
    tests = [f"{sign} {amount}" for sign in ("<", "<=", ">", ">=", "==", "!=")]
    return [f"{form} {test}" for test in tests for form in (name, f"not {name}", f"0 * {name}", f"{name} - {name}")]


@pytest.mark.parametrize("name", sorted(NAMES.keys() - {"device_index"}))  # which is the identity
def test_a_condition_on_something_unknown_is_false_and_so_is_its_opposite(name):
    nothing = a_device(
        name=None, memory_used=None, memory_free=None, memory_total=None, utilization=None, memory_utilization=None,
        temperature=None, power_draw=None, power_limit=None, processes=None,
    )  # fmt: skip
    process = a_process(memory_used=None, uid=None, user=None, start_time=None, command=None)
    unreadable = RuleView(a_snapshot(nothing, gaps=(Gap(None, "claims", "no permission"),)))
    place = NameSource(unreadable, nothing, process)

    assert [text for text in conditions_about(name) if parse_expression(text).holds(place)] == []


def test_a_known_part_decides_where_the_unknown_one_cannot():
    nobody = a_process(user=None, memory_used=40 * GIB)

    assert holds("user == 'bob' or memory_used > 30GiB", nobody)
    assert holds("not (user == 'bob' and memory_used < 30GiB)", nobody)
    assert not holds("user == 'bob' and memory_used > 30GiB", nobody)
    assert not holds("not (user == 'bob' or memory_used < 30GiB)", nobody)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400, "40"])
def test_a_value_that_is_no_number_is_unknown(number):
    strange = replace(A_DEVICE, memory_total=number)

    assert not holds("device_memory_total > 1GiB", device=strange)
    assert not holds("not device_memory_total > 1GiB", device=strange)


@pytest.mark.parametrize("text", ["memory_used / 0 > 1GiB", "memory_used / (memory_used - memory_used) < 5"])
def test_a_division_by_zero_is_unknown(text):
    assert not holds(text)
    assert not holds(f"not ({text})")


def test_what_grows_beyond_every_number_is_unknown():
    huge = "memory_used" + " * 999999999999999" * 50

    assert not holds(f"{huge} > 1GiB")
    assert not holds(f"not {huge} > 1GiB")


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_a_finding_says_what_was_seen_and_what_is_allowed():
    rule = ExpressionRule(parse_expression("memory_used > 30GiB and  utilization < 5%"))

    [finding] = rule.check(RuleView(a_snapshot(A_DEVICE)))
    assert finding.why == "memory_used is 40.0GiB, utilization is 2%: true is memory_used > 30GiB and utilization < 5%"
    assert finding.processes == (BOB,)
    assert (finding.subject.kind, finding.subject.pid, finding.subject.start_time) == ("process", BOB.pid, 1000.0)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("claimed or memory_used > 30GiB", "claimed is false, memory_used is 40.0GiB"),
        ("power_draw > 300W or memory_used > 30GiB", "power_draw is unknown, memory_used is 40.0GiB"),
    ],
)
def test_a_finding_says_what_is_false_and_what_is_unknown(text, seen):
    device = replace(A_DEVICE, power_draw=None)

    [finding] = ExpressionRule(parse_expression(text)).check(RuleView(a_snapshot(device)))
    assert finding.why == f"{seen}: true is {text}"


def test_without_a_name_about_processes_it_is_about_the_device():
    rule = ExpressionRule(parse_expression("temperature > 70C and processes > 0"))

    [finding] = rule.check(RuleView(a_snapshot(A_DEVICE, a_device(1))))
    assert (finding.subject.kind, finding.processes) == ("device", ())


@pytest.mark.parametrize(
    "device",
    [
        a_device(processes=(BOB,), processes_plausible=False),
        a_device(processes=(a_process(uid=None, memory_used=40 * GIB),)),
        a_device(processes=(a_process(start_time=None, memory_used=40 * GIB),)),
        a_device(processes=(a_process(kind="graphics", memory_used=40 * GIB),)),
        a_device(processes=(a_process(kind="compute+graphics", memory_used=40 * GIB),)),
    ],
)
def test_who_may_not_be_judged_is_not_judged(device):
    assert list(ExpressionRule(parse_expression("memory_used > 30GiB")).check(RuleView(a_snapshot(device)))) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_name_stands_in_the_help_and_on_the_page(name):
    of = "process" if NAMES[name].of_process else "device"
    row = f"| `{name}` | {NAMES[name].type} | {NAMES[name].meaning} | {of} |"

    assert re.search(rf"\b{name}\b", ExpressionRule.__doc__ or "")
    assert row in (ROOT / "docs" / "expressions.md").read_text(encoding="utf-8")


def test_the_same_text_is_the_same_condition():
    assert parse_expression("claimed") == parse_expression("claimed")
    assert repr(parse_expression("claimed")) == repr(parse_expression("claimed"))
