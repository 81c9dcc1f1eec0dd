"""Whom a policy is about, whom it spares, and when it applies."""

import os
from dataclasses import replace

import pytest
from builders import a_claim_record, a_device, a_mig_instance, a_process, a_snapshot, a_uuid
from ladders import Devices, Finds, Processes, Watch, a_policy, actions, busy, kinds, pids

from gpuguard.enforcement import identity
from gpuguard.errors import InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Finding, Gap, Subject
from gpuguard.policies import policy as policy_module
from gpuguard.policies.expression import ExpressionRule, parse_expression
from gpuguard.policies.policy import (
    Exemption,
    KeptMark,
    Note,
    Scope,
    absent,
    drop_protected,
    is_within,
    on_enough_devices,
    parse_device,
    parse_path,
    seconds_within,
    unjudged,
)
from gpuguard.policies.thresholds import HealthRule, MemoryRule, PowerRule
from gpuguard.policies.view import HostUse, RuleView, claim_subject, index_sample, process_subject, reach_of
from gpuguard.units import parse_memory_amount, parse_power_amount

ALICE, BOB = 1001, 1002
SINCE_BOOT = 1000.0  # start_time of a_process()
HOUR, DAY = 3600, 86400
MONDAY = 4 * DAY  # 5 January 1970


def judged(policy, *devices, host=None, groups=None, begin=0, mark=None, **fields):
    """The judgement when the condition has held for long enough."""
    watch = Watch(policy)
    if mark:
        watch.memory.kept = dict.fromkeys(mark.items(), KeptMark(20_000.0))
    for clock in range(begin, begin + 40, 10):
        judgement = watch.sees(RuleView(busy(clock, *devices, **fields), host=host or {}, groups=groups or {}))
    return judgement


def users(*uids: int) -> Exemption:
    return Exemption(users=frozenset(uids))


BOTH = a_device(processes=(a_process(1, uid=ALICE), a_process(2, uid=BOB, user="bob")))


def test_those_who_are_exempt_are_left_out_with_a_note():
    judgement = judged(a_policy("warn", exempt=(users(BOB),)), BOTH)

    assert pids(judgement.verdicts) == {1}
    assert [(note.kind, note.subject and note.subject.uid) for note in judgement.notes] == [("exempt", BOB)]


def test_a_finding_about_a_device_is_narrowed_to_those_in_the_scope():
    hot = a_policy("terminate", rules=(Devices(means=True),), exempt=(users(BOB),))

    assert pids(judged(hot, BOTH).verdicts) == {1}


DEVICE_0, DEVICE_1 = a_device(0, processes=(a_process(1),)), a_device(1, processes=(a_process(2),))
PARENT = a_device(0, mig_mode=True)
INSTANCE = a_mig_instance(PARENT, processes=(a_process(1),))
ALSO_ON_1 = a_device(1, processes=(a_process(1), a_process(2)))


@pytest.mark.parametrize(
    ("scope", "devices", "meant", "left"),
    [
        (users(), [BOTH], set(), {1, 2}),
        (Exemption(users=frozenset({ALICE}), devices=("1",)), [DEVICE_0, DEVICE_1], {2}, {1}),
        *(
            (Exemption(devices=(name,)), [DEVICE_0, DEVICE_1], {2}, {1})
            for name in ("1", "GPU-00000001", "gpu-00000001-0000", a_uuid(1))
        ),
        (Exemption(devices=(PARENT.uuid,)), [PARENT, INSTANCE], {1}, set()),
        (Exemption(devices=("0",)), [DEVICE_0, ALSO_ON_1], {1}, {2}),
    ],
    ids=["nobody", "all keys", "index", "beginning", "small letters", "uuid", "instances", "on a spared GPU, too"],
)
def test_whom_a_scope_means_as_only_and_leaves_as_except(scope, devices, meant, left):
    found = [
        pids(judged(a_policy("warn", **keys), *devices).verdicts) for keys in ({"only": scope}, {"exempt": (scope,)})
    ]

    assert found == [meant, left]


def meant_and_spared(scope: Exemption, device, **view) -> tuple[int, int]:
    """How many it has in it as `only`, and how many it spares as `except`, of one."""
    only, exempt = a_policy("warn", only=scope), a_policy("warn", exempt=(scope,))
    return len(judged(only, device, **view).verdicts), 1 - len(judged(exempt, device, **view).verdicts)


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", {ALICE: frozenset({"students"})}, (1, 1)),
        ("Tesla T4", {ALICE: frozenset({"staff"})}, (0, 0)),
        (None, {}, (0, 1)),
    ],
)
def test_an_unknown_model_or_group_is_never_in_the_scope_and_always_spared(name, groups, expected):
    device = a_device(name=name, processes=(a_process(),))

    assert meant_and_spared(Exemption(models=("A100*",)), device) == expected
    assert meant_and_spared(Exemption(groups=frozenset({"students"})), device, groups=groups) == expected


@pytest.mark.parametrize(
    ("facts", "terminal", "kind", "meant", "spared"),
    [
        ({}, "/dev/pts/3", "interactive", 1, 1),
        ({}, "", "interactive", 0, 0),
        ({}, "", "batch", 1, 1),
        ({}, None, "interactive", 0, 1),
        ({}, None, "batch", 0, 1),
        ({"command": ("python", "-m", "ipykernel_launcher", "-f", "x.json")}, "", "interactive", 1, 1),
        ({"container": "ab12"}, "", "container", 1, 1),
        ({"container": "ab12"}, "", "batch", 1, 1),
        ({"container": "ab12"}, None, "container", 1, 1),
        ({"container": "ab12"}, None, "batch", 0, 1),
        ({}, "", "container", 0, 0),
    ],
)
def test_kinds_of_processes(facts, terminal, kind, meant, spared):
    device, host = a_device(processes=(a_process(4711, **facts),)), {(4711, SINCE_BOOT): HostUse(terminal=terminal)}

    assert meant_and_spared(Exemption(kinds=frozenset({kind})), device, host=host) == (meant, spared)


@pytest.mark.parametrize("tracer", [0, 7])
@pytest.mark.parametrize("terminal", [0, 34817])
@pytest.mark.parametrize("command", ["python train.py", "python -m ipykernel_launcher -f x.json"])
def test_what_gets_more_time_before_a_signal_is_of_the_kind_interactive(tracer, terminal, command):
    process = a_process(4711, command=tuple(command.split()))
    use = HostUse(terminal="/dev/pts/1" if terminal else "", traced=bool(tracer))
    index = index_sample(RuleView(busy(50, a_device(processes=(process,))), host={(4711, SINCE_BOOT): use}))
    target = policy_module.target_of_process(
        process, Subject("process", a_device().uuid, 4711, SINCE_BOOT, process.uid), index
    )
    facts = identity.facts_of(os.getpid())
    assert facts

    waits = replace(facts, tracer=tracer, terminal=terminal, command=command).interactive is not None
    assert policy_module.certain_kinds(target, index) == {"interactive" if waits else "batch"}


def test_what_is_no_process_is_of_no_kind():
    hot = a_policy(
        "quarantine", rules=(Devices(),), only=Exemption(kinds=frozenset({"interactive", "batch", "container"}))
    )

    assert judged(hot, a_device(temperature=90.0)).verdicts == ()


@pytest.mark.parametrize(
    ("subject", "kind", "said"),
    [
        (Subject("device", "GPU-gone"), "gap", "the GPU is missing from the sample"),
        (Subject("claim", uid=ALICE, claim="gone"), "gap", "the claim is missing from the sample"),
        (Subject("user"), "unknown", "the user is unknown"),
        (Subject("claim", uid=-1, claim="?"), "gap", "the claim is missing from the sample"),
        (Subject("user", uid=-1), "unknown", "the user is unknown"),
        (Subject("claim"), "unknown", "the owner of the claim is unknown"),
        (Subject("process", a_uuid(0), 1, None, ALICE), "unknown", "the identity of process 1 is not known"),
        (Subject("process", a_uuid(0), 9, SINCE_BOOT, ALICE), "gap", "process 9 is missing from the sample"),
    ],
)
def test_nobody_is_meant_by_what_the_sample_does_not_show(subject, kind, said):
    judgement = judged(a_policy("warn", rules=(Finds(lambda view: [Finding("x", subject, "why")]),)), BOTH)

    assert judgement.verdicts == ()
    assert [(note.kind, note.text) for note in judgement.notes] == [(kind, said)]


def test_a_claim_is_not_judged_while_one_of_its_devices_is_missing_from_the_sample():
    held = a_claim_record(a_uuid(0), "GPU-gone", uid=ALICE)
    finding = Finding("x", claim_subject(held), "why")

    judgement = judged(a_policy("warn", rules=(Finds(lambda view: [finding]),)), BOTH, claims=(held,))

    assert judgement.verdicts == ()
    assert [(note.kind, note.text) for note in judgement.notes] == [("gap", "the GPU is missing from the sample")]


def test_a_finding_about_a_device_means_no_process_that_is_not_on_it():
    here, elsewhere = BOTH.processes or ()
    rule = Finds(lambda view: [Finding("x", Subject("device", a_uuid(0)), "why", (here, elsewhere))])
    devices = a_device(0, processes=(here,)), a_device(1, processes=(elsewhere,))

    assert pids(judged(a_policy("terminate", rules=(rule,)), *devices).verdicts) == {1}


def test_a_finding_without_its_process_is_narrowed_by_that_process():
    rule = Finds(lambda view: [Finding("x", Subject("process", a_uuid(0), 1, SINCE_BOOT, ALICE), "why")])

    assert len(judged(a_policy("warn", rules=(rule,)), BOTH).verdicts) == 1
    assert judged(a_policy("warn", rules=(rule,), exempt=(users(ALICE),)), BOTH).verdicts == ()


def test_an_exemption_is_over_at_its_end():
    def spared(until: float) -> Exemption:
        return Exemption(users=frozenset({ALICE}), until=1_700_000_000.0 + until)

    device = a_device(processes=(a_process(),))

    assert kinds(judged(a_policy("warn", exempt=(spared(31),)), device)) == {"exempt"}
    assert judged(a_policy("warn", exempt=(spared(0),)), device).verdicts != ()


@pytest.mark.parametrize("mark", [{"uid": ALICE}, {"device": a_uuid(0)}, {"claim": "a1b2c3"}])
def test_who_asked_to_be_kept_is_left_alone(mark):
    device, claim = a_device(processes=(a_process(),)), a_claim_record()
    judgement = judged(a_policy("warn"), device, claims=(claim,), mark=mark)
    assert (judgement.verdicts, kinds(judgement)) == ((), {"kept"})

    of_others = dict.fromkeys(mark, {"uid": BOB, "device": a_uuid(1), "claim": "other"}[next(iter(mark))])
    assert judged(a_policy("warn"), device, claims=(claim,), mark=of_others).verdicts != ()


PARENT = a_device(0, mig_mode=True)
INSTANCE = a_mig_instance(PARENT, processes=(a_process(),))


@pytest.mark.parametrize("mark", [{"device": PARENT.uuid}, {"uid on device": f"{ALICE} {PARENT.uuid}"}])
@pytest.mark.parametrize("instance", [INSTANCE, replace(INSTANCE, processes=())], ids=["a process", "an idle claim"])
def test_what_is_kept_on_a_divided_device_is_kept_on_its_instances(mark, instance):
    claim = a_claim_record(instance)
    rule = Finds(lambda view: [Finding("x", claim_subject(claim, instance), "why", instance.processes or ())])
    policy = a_policy("warn", rules=(rule,))

    assert judged(policy, PARENT, instance, claims=(claim,)).verdicts != ()
    assert kinds(judged(policy, PARENT, instance, claims=(claim,), mark=mark)) == {"kept"}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("spans", [None, ()], ids=["root", "user"])
def test_what_root_keeps_is_kept_from_every_policy_and_what_a_user_keeps_where_the_policy_allows_it(keep, spans):
    watch = Watch(a_policy("warn", keep=keep))
    watch.memory.kept = {("uid", ALICE): KeptMark(20_000.0, spans)}

    assert (watch.until(30) == []) is (keep or spans is None)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [((), 0), (((0, 10),), 5), (((0, 10), (20, 30)), 10), (((0, 5), (25, 30)), 0), (((6, 7), (10, 12)), 3)],
)
def test_of_the_times_at_which_a_user_kept_something_those_within_a_week_count(spans, seconds):
    assert seconds_within(spans, 5, 25) == seconds


@pytest.mark.parametrize("process", [True, False], ids=["a process", "a claim"])
@pytest.mark.parametrize(("age", "kept"), [(3600.0, True), (400_000.0, False)])
def test_for_what_began_a_while_ago_only_the_time_since_then_counts_as_kept(process, age, kept):
    running = a_process(start_time=10_000.0 - age)
    device = a_device(processes=(running,) if process else ())
    claim = a_claim_record(since=1_700_000_000.0 - age)
    rules = (Processes(),) if process else (Finds(lambda view: [Finding("x", claim_subject(claim), "why")]),)
    watch = Watch(a_policy("warn", rules=rules, hold=0, cooldown=1000))
    watch.memory.kept = {("uid", ALICE): KeptMark(20_000.0, ((-300_000.0, 9_000.0),))}  # for more than 72 hours

    assert (watch.until(20, device, claims=(claim,)) == []) is kept


SPARED = {
    "kept": ({}, {"uid": ALICE}, "kept for another 2h46m"),
    "grace": ({"start_grace": 36_000}, {}, "2h30m old, innocent for the first 10h"),
    "exempt": ({"exempt": (users(ALICE),)}, {}, "inside `except`"),
    "hours": ({"hours": (0.0, 1.0)}, {}, "outside the hours or days of the policy"),
    "load": ({"claimed_above": 12.5}, {}, "0% of the GPUs are claimed, not above 12.5%"),
    "devices": ({"devices_at_least": 2}, {}, "on fewer than 2 GPUs of the same user"),
}


@pytest.mark.parametrize(("kind", "fields", "mark", "said"), [(kind, *facts) for kind, facts in SPARED.items()])
def test_why_a_process_is_spared_is_said(kind, fields, mark, said):
    watch = Watch(a_policy("warn", **fields))
    watch.memory.kept = dict.fromkeys(mark.items(), KeptMark(20_030.0))
    [note] = watch.sees(busy(30)).notes

    of_all = kind in ("hours", "load")
    assert note == Note(kind, said, "p", None if of_all else process_subject(a_device(), a_process()))


@pytest.mark.parametrize(
    ("subject", "age", "text"),
    [
        (Subject("device", a_uuid(0)), 60, "1m old, innocent for the first 1h"),
        (Subject("user", uid=ALICE, user="alice"), 60, "1m old, innocent for the first 1h"),
        (Subject("device", a_uuid(0)), None, "of unknown age, innocent for the first 1h"),
        (Subject("claim", uid=ALICE, claim="new"), 3599, "59m59s old, innocent for the first 1h"),
        (Subject("claim", uid=ALICE, claim="new"), 3600, None),
        (Subject("claim", uid=ALICE, claim="new"), None, "of unknown age, innocent for the first 1h"),
    ],
)
def test_what_has_no_process_is_as_young_as_the_newest_claim_on_it(subject, age, text):
    old = a_claim_record(uid=ALICE)
    new = a_claim_record(id="new", uid=ALICE, since=None if age is None else 1_700_000_000.0 - age)
    of_others = a_claim_record(a_uuid(1), id="other", uid=BOB, since=1_700_000_000.0)
    watch = Watch(a_policy("warn", rules=(Finds(lambda view: [Finding("x", subject, "why")]),), start_grace=HOUR))
    judgement = watch.sees(busy(0, a_device(0), a_device(1), claims=(old, new, of_others)))

    assert judgement.notes == ((Note("grace", text, "p", subject),) if text else ())


def test_what_has_no_process_is_spared_with_the_owner_of_a_claim_on_it():
    hot = a_policy("quarantine", rules=(Devices(80),), exempt=(users(BOB),))
    devices = a_device(0, temperature=90.0), a_device(1, temperature=90.0)
    claims = a_claim_record(devices[0], uid=ALICE), a_claim_record(devices[1], uid=BOB)

    judgement = judged(hot, *devices, claims=claims)
    assert [verdict.finding.subject.device for verdict in judgement.verdicts] == [a_uuid(0)]
    assert [(note.kind, note.subject.device) for note in judgement.notes] == [("exempt", a_uuid(1))]


def test_a_claim_mark_does_not_keep_a_stranger_on_the_device():
    judgement = judged(a_policy("warn"), BOTH, claims=(a_claim_record(uid=ALICE),), mark={"claim": "a1b2c3"})

    assert pids(judgement.verdicts) == {2}


def test_a_mark_ends_at_its_clock():
    watch = Watch(a_policy("warn", cooldown=1000))
    watch.memory.kept["uid", ALICE] = KeptMark(10_100.0)

    assert watch.until(200) == [(130, "warn")]


def test_a_young_process_is_innocent_and_its_time_counts_from_then():
    device = a_device(processes=(a_process(start_time=9_990.0),))
    watch = Watch(a_policy("warn", start_grace=100, cooldown=1000))

    assert kinds(watch.sees(busy(0, device))) == {"grace"}
    assert watch.until(300, device, begin=10) == [(120, "warn")]


def test_the_id_of_a_claim_copied_by_somebody_else_changes_nothing():
    claim, copy = a_claim_record(a_uuid(0)), a_claim_record(a_uuid(1), uid=BOB)
    rule = Finds(lambda view: [Finding("x", Subject("claim", uid=ALICE, claim=claim.id), "idle")])

    (verdict,) = judged(
        a_policy("release", rules=(rule,), only=Exemption(devices=("0",))),
        a_device(0),
        a_device(1),
        claims=(claim, copy),
    ).verdicts

    assert verdict.finding.subject.uid == ALICE


@pytest.mark.parametrize(
    ("hours", "days", "local", "inside"),
    [
        ((9, 17), None, 9, True),
        ((9, 17), None, 17, False),
        ((22, 7.5), None, 22, True),
        ((22, 7.5), None, 7.25, True),
        ((22, 7.5), None, 7.5, False),
        ((22, 7.5), {0}, 23, True),
        ((22, 7.5), {0}, 24 + 3, True),  # the night from Monday to Tuesday
        ((22, 7.5), {0}, 3, False),  # the night from Sunday to Monday
        ((22, 7.5), {0}, 24 + 23, False),
        (None, {0, 1}, 0, True),
        (None, {5, 6}, 0, False),
        ((0, 0), None, 12, True),
    ],
)
def test_hours_and_days(hours, days, local, inside):
    seconds = hours and (hours[0] * HOUR, hours[1] * HOUR)

    assert is_within(seconds, days and frozenset(days), MONDAY + local * HOUR) is inside


@pytest.mark.parametrize("zone", [0, HOUR])
def test_outside_its_hours_a_policy_does_nothing_and_no_time_passes(zone):
    at_night = a_policy("warn", hours=(0.0, 6.0 * HOUR), cooldown=1000)
    watch = Watch(at_night, zone=zone)
    midnight = 1_700_006_400.0 - zone

    def sees(clock):
        return watch.sees(busy(clock, taken_at=midnight - 100 + clock))

    assert [kinds(sees(clock)) for clock in (80, 90)] == [{"hours"}, {"hours"}]
    assert [actions(sees(clock)) for clock in (100, 110, 120, 130)] == [[], [], [], ["warn"]]


@pytest.mark.parametrize(("claimed", "fires"), [(0, False), (1, False), (2, True)])
def test_a_tighter_rule_applies_only_under_load(claimed, fires):
    devices = [a_device(0, processes=(a_process(),)), a_device(1)]
    claims = [a_claim_record(device, id=device.uuid) for device in devices[:claimed]]

    judgement = judged(a_policy("warn", claimed_above=50), *devices, claims=tuple(claims))

    assert (judgement.verdicts != ()) is fires
    assert kinds(judgement) == (set() if fires else {"load"})


def test_the_load_of_a_node_without_devices_is_unknown():
    nothing = replace(busy(0), devices=())
    rule = Finds(lambda view: [Finding("x", Subject("node"), "why")])
    judgement = Watch(a_policy("warn", rules=(rule,), claimed_above=0)).sees(nothing)

    assert [note.text for note in judgement.notes] == ["unknown of the GPUs are claimed, not above 0%"]


def test_a_divided_device_counts_as_its_parts():
    parent = a_device(0, mig_mode=True)
    parts = [a_mig_instance(parent, 0, processes=(a_process(),)), a_mig_instance(parent, 1)]
    claims = (a_claim_record(parts[0], parts[1]),)

    assert judged(a_policy("warn", claimed_above=90), parent, *parts, claims=claims).verdicts != ()


def test_of_a_finding_about_a_gpu_those_are_left_who_have_the_condition_on_enough_gpus():
    alice, bob, elsewhere = a_process(1, uid=ALICE), a_process(2, uid=BOB), a_process(3, uid=ALICE)
    index = index_sample(RuleView(busy(0, a_device(0, processes=(alice, bob)), a_device(1, processes=(elsewhere,)))))
    subjects = [Subject("device", a_uuid(number)) for number in (0, 1)]
    both = [Finding("x", subjects[0], "w", (alice, bob)), Finding("x", subjects[1], "w", (elsewhere,))]
    of_bob = Finding("x", Subject("user", uid=BOB), "w", (bob,))
    kept, notes = on_enough_devices([*both, of_bob], a_policy(devices_at_least=2), index)

    assert kept == [Finding("x", subjects[0], "w", (alice,)), both[1]]
    assert notes == [Note("devices", "on fewer than 2 GPUs of the same user", "p", of_bob.subject)]
    assert on_enough_devices(both, a_policy(devices_at_least=1), index) == (both, ())


@pytest.mark.parametrize(
    ("text", "good"),
    [
        *((text, True) for text in ("0", "9", "999", "0.0", "12.34", "GPU-8", "GPU-8f3-1", "MIG-0", "XCP-a")),
        *(
            (text, False)
            for text in ("", "00", "1000", "0.", "0.123", "01.1", "-1", "gpu-8", "GPU-", "GPU-x", "GPU--1")
        ),
    ],
)
def test_a_gpu_is_an_index_a_number_of_an_instance_or_the_beginning_of_a_uuid(text, good):
    if good:
        assert parse_device(text) == text
        return
    with pytest.raises(InvalidRequest) as refused:
        parse_device(text)
    assert str(refused.value) == f"{text!r} is no GPU: write an index like 0, or a uuid like 'GPU-8f31c2'."


def test_a_program_is_named_by_its_whole_path():
    assert parse_path("/usr/bin/python3*") == "/usr/bin/python3*"
    with pytest.raises(InvalidRequest) as refused:
        parse_path("python3")
    assert str(refused.value) == "'python3' is no path: write it in full from / on, like '/usr/bin/python3'."


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("0", [0, 0]), ("1", [1]), ("01", [1]), ("00", [0, 0]), ("0.1", [0]), ("0.2", []), ("10", []),
        (a_uuid(1)[:12].lower(), [1]), (PARENT.uuid, [0, 0]), (INSTANCE.uuid.upper(), [0]),
    ],
)  # fmt: skip
def test_a_name_means_the_devices_of_that_index_or_uuid_and_the_instances_of_a_gpu(name, devices):
    rule = Devices(80)
    hot = [replace(device, temperature=90.0) for device in (PARENT, INSTANCE, a_device(1))]
    index = index_sample(RuleView(busy(0, *hot)))
    policy = a_policy("quarantine", rules=(rule,), only=Exemption(devices=(name,)))
    left, _ = drop_protected(list(rule.check(index.view)), policy, index, {})

    assert [index.devices[finding.subject.device].index for finding in left] == devices


def test_a_process_of_nobody_known_is_on_no_devices_of_the_same_user():
    devices = [a_device(number, processes=(a_process(1, uid=None),)) for number in range(2)]
    sight = index_sample(RuleView(busy(0, *devices)))
    findings = [Finding("x", Subject("device", each.uuid), "why", each.processes) for each in devices]
    kept, notes = on_enough_devices(findings, a_policy("warn", devices_at_least=2), sight)

    assert kept == []
    assert {note.kind for note in notes} == {"devices"}


def test_a_mig_instance_and_its_gpu_are_one_device_of_a_user():
    """Root is told of the processes of all instances on their GPU, too."""
    process = a_process(1, uid=ALICE)
    parent = a_device(0, mig_mode=True, processes=(process,))
    instance, other = a_mig_instance(parent, 0, processes=(process,)), a_mig_instance(parent, 1, processes=(process,))
    rule = Finds(lambda view: [Finding("x", Subject("user", uid=ALICE), "why", (process,))])
    policy = a_policy("warn", rules=(rule,), devices_at_least=2)

    assert kinds(judged(policy, parent, instance)) == {"devices"}
    assert judged(policy, parent, instance, other).verdicts != ()


def test_k_of_n_for_devices_is_counted_by_their_claims():
    devices = [a_device(number, temperature=90.0) for number in range(3)]
    claims = (a_claim_record(devices[0], devices[1]), a_claim_record(devices[2], id="b", uid=BOB))

    judgement = judged(a_policy("warn", rules=(Devices(80),), devices_at_least=2), *devices, claims=claims)

    assert [verdict.finding.subject.device for verdict in judgement.verdicts] == [a_uuid(0), a_uuid(1)]


def test_a_policy_that_cannot_judge_the_memory_of_a_gpu_says_so():
    machine = a_snapshot(a_device(0), a_device(1, memory_shared_with_host=True))
    in_percent, in_bytes = (
        replace(a_policy(), rules=(MemoryRule(parse_memory_amount(above)),)) for above in ("90%", "9GiB")
    )

    assert list(unjudged(in_percent, machine)) == [
        "p: the memory of GPU 1 is the host's, so its size and what is free of it are not judged"
    ]
    assert list(unjudged(in_percent, a_snapshot(a_device()))) == list(unjudged(in_bytes, machine)) == []


@pytest.mark.parametrize(
    ("key", "told"), [("drm.not_supported", True), ("amd.of_the_whole", True), ("drm.hidden", False)]
)
def test_a_policy_that_judges_by_what_a_driver_never_tells_says_so(key, told):
    never = sentence(key, "not told")
    gaps = [Gap(a_uuid(number), field, never) for number, field in ((0, "power_draw"), (2, "power_draw"), (1, "fan"))]
    machine = a_snapshot(*(a_device(number) for number in range(3)), gaps=(*gaps, Gap(None, "power_draw", never)))
    per_device, per_process = (
        replace(a_policy(), rules=(rule,))
        for rule in (PowerRule(parse_power_amount("9W")), PowerRule(parse_power_amount("9W"), per="process"))
    )

    said = "p: power cannot judge GPU 0, GPU 2 by power_draw: not told"
    assert list(unjudged(per_device, machine)) == ([said] if told else [])
    assert list(unjudged(per_process, machine)) == []


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        (ExpressionRule(parse_expression("temperature > 9C and power_draw > 1W and memory_used > 1GiB")),
         {"temperature", "power_draw"}),
        (HealthRule(ecc_corrected_above=1, retired_pages_above=1, throttle_reasons=("hw_*",)),
         {"ecc_corrected_volatile", "retired_pages", "throttle_reasons"}),
        (HealthRule(ecc_uncorrected_above=1), {"ecc_uncorrected_volatile"}),
        (HealthRule(problems=("lost",)), set()),
    ],
)  # fmt: skip
def test_a_rule_judges_by_the_fields_that_its_keys_name(rule, fields):
    assert rule.judges_by == fields


def test_what_is_done_to_a_process_reaches_all_its_devices_and_an_unknown_one_reaches_none_further():
    known, unknown = a_process(1), a_process(2, start_time=None)
    devices = [a_device(0, processes=(known, unknown)), a_device(1, processes=(known,))]
    sight, here = index_sample(RuleView(busy(0, *devices))), Subject("device", a_uuid(0))

    assert reach_of(here, (known,), sight) == (a_uuid(0), a_uuid(1))
    assert reach_of(here, (unknown,), sight) == (a_uuid(0),)
    assert reach_of(here, (a_process(9),), sight) == (a_uuid(0),), "it is not in this sample"


def test_what_means_no_gpu_here_is_named_unless_one_cannot_be_read():
    about = a_policy(
        only=Scope(devices=("0", "12"), models=("*", "H900*")),
        exempt=(Exemption(devices=("GPU-ffff",)), Exemption(users={1})),
    )
    said = ["p: no GPU here is 12", "p: no model here is H900*", "p: no GPU here is GPU-ffff"]

    assert list(absent(about, a_snapshot(a_device()))) == said
    assert list(absent(a_policy(), a_snapshot(a_device()))) == []
    assert list(absent(about, a_snapshot(a_device(), a_device(1, name=None)))) == []
    assert list(absent(about, a_snapshot(a_device(), gaps=(Gap(a_uuid(1), "device", "lost"),)))) == []
    assert list(absent(about, replace(a_snapshot(), devices=()))) == []
