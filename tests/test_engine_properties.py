"""Laws of the engine, over random histories of a small machine, and over all that its rules may see."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process
from chances import THE_SAME
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ladders import Devices, Processes, Watch, a_policy, busy
from worlds import CLOCK, a_bad_day, shown

from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess, Snapshot
from gpuguard.policies.action_kinds import DESTRUCTIVE
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.policy import KILL_AFTER, Exemption, Policy, Step
from gpuguard.policies.rule import Rule, RuleKind
from gpuguard.policies.rules import RULES
from gpuguard.policies.view import HostUse, computing_processes, process_subject

DEVICES, USERS, INTERVAL, LENGTH = 3, 3, 10, 24
FULL, GARBLED, LISTLESS, ABSENT = "full", "garbled", "listless", "absent"

LADDER = (Step("warn"), Step("terminate", 20), Step("kill", KILL_AFTER))
POLICIES = (
    a_policy(*LADDER, name="a", hold=20, cooldown=30, at_most_users=2),
    a_policy("terminate", name="b", hold=30, rules=(Processes(15 * GIB),), at_most_processes=1),
    a_policy("warn", "pause", name="c", hold=10, rules=(Devices(80, means=True),)),
)

process = st.builds(
    lambda pid, start, gib: a_process(pid, start_time=float(start), uid=2000 + pid % USERS, memory_used=gib * GIB),
    st.integers(1000, 1004),
    st.integers(1, 2),
    st.sampled_from([0, 10, 20]),
)
state = st.sampled_from([FULL] * 9 + [GARBLED, LISTLESS, ABSENT])
content = st.tuples(
    state, st.lists(process, max_size=3, unique_by=lambda each: each.pid), st.sampled_from([50.0, 90.0])
)
moment = st.tuples(*[content] * DEVICES)


# Without shrinking, which takes minutes here.
laws = settings(max_examples=60, phases=(Phase.explicit, Phase.generate))


@st.composite
def histories(draw: Any) -> list[Snapshot]:
    """Samples 10 s apart, in which most things stay as they are."""
    now, samples = draw(moment), list[Snapshot]()
    for place in range(LENGTH):
        if draw(st.integers(0, 4)) == 0:
            now = draw(moment)
        samples.append(sample(place * INTERVAL, now))
    return samples


def sample(clock: float, now: Any) -> Snapshot:
    devices = []
    for index, (what, processes, temperature) in enumerate(now):
        if what == ABSENT:
            continue
        used = sum(each.memory_used for each in processes)
        device = {"temperature": temperature, "memory_used": used, "processes_plausible": what != GARBLED}
        devices.append(a_device(index, processes=None if what == LISTLESS else tuple(processes), **device))
    return replace(busy(clock), devices=tuple(devices))


def story(samples: list[Snapshot], *policies: Any) -> list[Any]:
    """The judgements of a whole history."""
    watch = Watch(*policies, interval=INTERVAL)
    return [watch.sees(sample) for sample in samples]


@laws
@given(histories(), st.permutations(POLICIES))
def test_the_order_of_the_policies_does_not_matter(samples, policies):
    assert story(samples, *policies) == story(samples, *POLICIES)


@laws
@given(histories())
def test_at_most_one_destructive_step_per_device_and_never_more_than_the_breaker_allows(samples):
    for judgement in story(samples, *POLICIES):
        hits = [verdict for verdict in judgement.verdicts if verdict.action in DESTRUCTIVE]
        places = [verdict.finding.subject.device for verdict in hits]
        assert len(places) == len(set(places))
        for policy in POLICIES:
            mine = [one for verdict in hits if verdict.policy == policy.name for one in verdict.finding.processes]
            assert len({one.uid for one in mine}) <= policy.at_most_users
            assert len({(one.pid, one.start_time) for one in mine}) <= (policy.at_most_processes or policy.at_most_jobs)


# Every value under every rule: here, and not in a file of scripts/coverage, under which that takes thrice as long.
NUMBERS = (0, -1, 1, 255, 65534, 2**31, 2**32 - 1, 2**50, 2**53, -(2**53))
FLOATS = (0.0, -1.0, 0.5, 1e-300, 1e300, 100.0, 2.0**53)
TEXTS = (
    "", "\ud800", "\0", "x" * 5000, "a\nb", "%s %(a)s {0} {x!r} $user $", "[!\x00-\uffff]*[", "\u0663.\u00b2", "../..",
    "9" * 5000,
)  # fmt: skip
OF_HINT = {"int": NUMBERS, "float": FLOATS + NUMBERS, "str": TEXTS, "bool": (True, False)}
EXEMPTION = Exemption(frozenset({5}), frozenset({"g"}), ("0", "GPU"), ("A*",), frozenset({"batch"}), 1e12)
EVERY_RULE = tuple(
    Policy(
        f"{name} {place} {scoped}", (rule,), hold=0.0, start_grace=10.0 * scoped, devices_at_least=1 + scoped,
        exempt=(EXEMPTION,) * scoped,
        steps=(Step("warn"), Step("terminate")), at_most_users=99, at_most_processes=999,
    )
    for number, name in enumerate(RULES) for place, rule in enumerate(shown(name, RULES[name]))
    for scoped in ((number % 2,) if THE_SAME else (0, 1))
)  # fmt: skip


def others(noun):
    """(what is other, the noun) for each field and each third value that it may have (in campaigns: each)."""
    for place, (name, hint) in enumerate(type(noun).__annotations__.items()):
        plain = hint.removesuffix(" | None")
        values = [(), *([each] for each in TEXTS)] if plain.startswith("tuple[str") else OF_HINT.get(plain, ())
        for value in (*(values[place % 3 :: 3] if THE_SAME else values), *([None] if plain != hint else [])):
            value = tuple(value) if isinstance(value, list) else value
            yield f"{type(noun).__name__}.{name} = {value!r:.40}", replace(noun, **{name: value})


def worlds(kind):
    """(what is other, three looks at the bad day) for each field of one kind of noun."""
    days = [a_bad_day(CLOCK + 10.0 * look) for look in range(3)]
    first, rest = days[0].snapshot.devices[0], days[0].snapshot.devices[1:]
    noun = {Device: first, GpuProcess: first.processes[0], HostUse: HostUse()}.get(
        kind, a_claim_record(rest[0], uid=1002)
    )
    for what, other in others(noun):
        device = {Device: other, GpuProcess: replace(first, processes=(other,))}.get(kind, first)
        used = {(each.pid, each.start_time): other for each in first.processes} if kind is HostUse else {}
        claims = (other,) if kind is ClaimRecord else ()
        yield what, [_with(day, (device, *rest), claims, used) for day in days]


def _with(day, devices, claims, used):
    snapshot = replace(day.snapshot, devices=devices, claims=(*day.snapshot.claims, *claims))
    return replace(day, snapshot=snapshot, host={**day.host, **used})


def fails_of(kind, policies):
    """The first of these values at which somebody fails, or None."""
    for what, looks in worlds(kind):
        memory = EngineMemory()
        for look in looks:
            try:
                evaluate(look, policies, memory, interval=10.0)
            except Exception as error:  # noqa: BLE001  whatever it is fails the test
                return f"{what}: {error!r}"
        assert memory.states, what
    return None


@pytest.mark.parametrize("kind", [Device, GpuProcess, ClaimRecord, HostUse])
def test_no_rule_fails_of_what_is_seen(kind):
    assert fails_of(kind, EVERY_RULE) is None


def test_a_rule_that_fails_of_a_value_is_found():
    """A fault is planted: a rule divides by what a process has."""

    @dataclass(frozen=True)
    class Dividing(Rule):
        kind = RuleKind("d", innocent=False)

        def check(self, view):
            for device, process in computing_processes(view):
                yield Finding("d", process_subject(device, process), f"{1 / (process.memory_used or 0)}", (process,))

    found = fails_of(GpuProcess, [Policy("p", (Dividing(),))])
    assert found.startswith("GpuProcess.memory_used = ") and "ZeroDivisionError" in found
