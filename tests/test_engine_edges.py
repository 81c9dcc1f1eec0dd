"""The engine at its edges: the hour without a zone, a rhythm of fractions, what is recorded, noted and comes next."""

import copy
from dataclasses import dataclass, replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_uuid
from ladders import Finds, Processes, Watch, a_policy, actions, busy, kinds, pids
from worlds import CLOCK, a_bad_day, shown

from gpuguard.backtest.backtest import rehearse
from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess, Subject
from gpuguard.policies.engine import EngineMemory, evaluate, still_holds
from gpuguard.policies.policy import ON_PROCESSES, Exemption, Policy, Step, why_inapplicable
from gpuguard.policies.rules import RULES
from gpuguard.policies.view import HostUse, RuleView, computing_processes, process_subject

HOUR = 3600.0
MIDNIGHT = 1_699_920_000.0  # of 2023-11-14, UTC


def test_without_a_zone_hours_are_those_of_utc_to_the_second():
    policy = a_policy("warn", hours=(12 * HOUR, 13 * HOUR), hold=0)
    noted = []
    for second in (12 * HOUR - 1, 12 * HOUR, 13 * HOUR - 1, 13 * HOUR):
        sample = busy(0, taken_at=MIDNIGHT + second)
        noted.append((kinds(evaluate(sample, (policy,), EngineMemory())), holds(policy, sample)))

    assert noted == [({"hours"}, False), (set(), True), (set(), True), ({"hours"}, False)]


def holds(policy, sample) -> bool:
    [process] = sample.devices[0].processes
    subject = Subject("process", sample.devices[0].uuid, process.pid, process.start_time, process.uid)
    return still_holds(policy, subject, RuleView(sample), EngineMemory())


def test_samples_may_be_a_fraction_of_a_second_apart():
    watch = Watch(a_policy("warn", hold=0.5), interval=0.25)

    assert [actions(watch.sees(busy(clock))) for clock in (0, 0.25, 0.5)] == [[], [], ["warn"]]


def test_a_cancelled_ladder_says_whether_its_policy_was_changed_or_is_gone():
    texts = []
    for later in ((a_policy("warn", "terminate", hold=31.0),), ()):
        watch = Watch(a_policy("warn", "terminate"))
        watch.until(80)
        watch.policies = later
        texts += [note.text for note in watch.sees(busy(90)).notes]

    assert texts == ["the policy was changed, its steps are cancelled", "the policy is gone, its steps are cancelled"]


NOBODY = a_device(processes=())


@pytest.mark.parametrize("unknown", [{"start_time": None}, {"uid": None}])
def test_a_process_with_an_unknown_identity_never_appears(unknown):
    process = a_process(**unknown)
    subject = Subject("process", a_uuid(0), process.pid, process.start_time, process.uid)
    rule = Finds(lambda view: [Finding("x", subject, "why", (process,))])
    watch = Watch(a_policy("warn", rules=(rule,)))

    assert watch.until(100, a_device(processes=(process,))) == []


def test_unknown_processes_are_left_out_of_a_finding_about_a_device():
    known, unknown = a_process(1000), a_process(1001, uid=None)
    device = a_device(processes=(known, unknown))
    rule = Finds(lambda view: [Finding("x", Subject("device", a_uuid(0)), "why", (known, unknown))])
    watch = Watch(a_policy("terminate", rules=(rule,), hold=10))
    watch.sees(busy(0, device))

    assert pids(watch.sees(busy(10, device)).verdicts) == {1000}


def test_a_claim_whose_devices_cannot_be_seen_is_left_alone():
    claim = a_claim_record()
    rule = Finds(lambda view: [Finding("x", Subject("claim", uid=1001, claim=claim.id), "idle")])
    watch = Watch(a_policy("release", rules=(rule,)))

    assert watch.until(100, a_device(processes=None), claims=(claim,)) == []
    assert watch.until(200, a_device(), claims=(claim,), begin=110) == [(140, "release"), (180, "release")]


def test_a_process_on_several_devices_is_asked_once():
    both = [a_device(0, processes=(a_process(),)), a_device(1, processes=(a_process(),))]
    watch = Watch(a_policy("warn", "terminate", cooldown=1000))
    watch.until(20, *both)

    (verdict,) = watch.sees(busy(30, *both)).verdicts

    assert verdict.finding.why == "uses memory (and the like on 1 more GPUs)"
    assert watch.until(300, *both, begin=40) == [(90, "terminate")]


def test_what_several_rules_have_against_the_same_process_is_said_together():
    watch = Watch(a_policy("warn", rules=(Processes(), Processes(1)), join="any", hold=10))
    watch.sees(busy(0))

    (verdict,) = watch.sees(busy(10)).verdicts

    assert verdict.finding.why == "uses memory; uses memory"
    assert len(verdict.finding.processes) == 1


@pytest.mark.parametrize(
    ("device", "kept", "holds"),
    [
        (a_device(processes=(a_process(),)), None, True),
        (NOBODY, None, False),
        (a_device(processes=(a_process(start_time=9_000.0),)), None, False),  # its pid is another process now
        (a_device(processes=(a_process(),), processes_plausible=False), None, False),
        (a_device(processes=(a_process(),)), 1001, False),
    ],
)
def test_a_condition_is_looked_at_once_more_without_a_sample_of_its_own(device, kept, holds):
    policy = a_policy("warn")
    watch = Watch(policy)
    watch.until(30)
    if kept:
        watch.memory.kept["uid", kept] = 20_000.0
    before = copy.deepcopy(watch.memory)
    subject = process_subject(a_device(), a_process())

    assert still_holds(policy, subject, RuleView(busy(35, device)), watch.memory) is holds
    assert (watch.memory.states, watch.memory.past) == (before.states, before.past)


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
    for name in RULES for place, rule in enumerate(shown(name, RULES[name])) for scoped in (0, 1)
)  # fmt: skip


def others(noun):
    """(what is other, the noun) for each field and each value that it may have."""
    for name, hint in type(noun).__annotations__.items():
        plain = hint.removesuffix(" | None")
        values = [(), *([each] for each in TEXTS)] if plain.startswith("tuple[str") else OF_HINT.get(plain, ())
        for value in (*values, *([None] if plain != hint else [])):
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
    class Dividing:
        def check(self, view):
            for device, process in computing_processes(view):
                yield Finding("d", process_subject(device, process), f"{1 / (process.memory_used or 0)}", (process,))

    assert "GpuProcess.memory_used = 0: ZeroDivisionError" in fails_of(GpuProcess, [Policy("p", (Dividing(),))])


CLAIM = Subject("claim", uid=1001, claim="c1")
FOUND = Finding("age", CLAIM, "held without a process")
UNUSED = Finds(lambda view: [FOUND])
HELD = (a_claim_record(a_device(), id="c1", uid=1001),)


@pytest.mark.parametrize("action", sorted(ON_PROCESSES))
def test_a_step_on_processes_is_passed_over_for_a_claim_without_any(action):
    why = why_inapplicable(Step(action), FOUND)

    assert why and "no process is meant" in why and "release" in why
    assert why_inapplicable(Step("release"), FOUND) is None


def test_release_is_passed_over_for_processes_and_for_what_is_no_claim():
    device, process = a_device(), a_process()
    about_process = Finding("age", process_subject(device, process), "runs", (process,))
    claim_with_process = Finding("idle", CLAIM, "idle", (process,))

    for found in (about_process, claim_with_process, Finding("health", Subject("device", device.uuid), "lost")):
        assert why_inapplicable(Step("release"), found)
    assert why_inapplicable(Step("terminate"), about_process) is None


def test_a_terminate_without_a_victim_is_no_verdict_but_a_note_and_release_comes_after_it():
    watch = Watch(a_policy("warn", "terminate", "kill", "release", rules=(UNUSED,), cooldown=1000))
    assert watch.until(80, a_device(), claims=HELD) == [(30, "warn")]

    passed_over = watch.sees(busy(90, a_device(), claims=HELD))
    assert (passed_over.verdicts, kinds(passed_over)) == ((), {"nobody"})
    assert watch.until(300, a_device(), claims=HELD, begin=100) == [(150, "release")]


def test_a_step_that_means_nobody_delays_no_real_one_on_the_same_device():
    full = a_device(processes=(a_process(1000, uid=1002),), memory_used=20 * GIB)
    idle = Finds(lambda view: [Finding("idle", Subject("claim", full.uuid, uid=1001, claim="c1"), "rests")])
    watch = Watch(
        a_policy("terminate", name="idle", rules=(idle,), cooldown=1000),
        a_policy("terminate", name="real", cooldown=1000),
    )
    watch.until(20, full, claims=HELD)

    assert actions(watch.sees(busy(30, full, claims=HELD))) == ["terminate"]


def test_a_claim_that_is_released_in_a_rehearsal_is_gone_from_its_next_sample_on():
    samples = [RuleView(busy(clock, a_device(), claims=HELD)) for clock in range(0, 200, 10)]
    held = Finds(lambda view: [FOUND] if view.snapshot.claims else [])
    judged = list(rehearse(samples, [a_policy("release", rules=(held,), cooldown=0.0)], interval=10))

    assert [verdict.action for _, judgement in judged for verdict in judgement.verdicts] == ["release"]
    assert [len(view.snapshot.claims) for view, _ in judged][:6] == [1, 1, 1, 1, 0, 0]
