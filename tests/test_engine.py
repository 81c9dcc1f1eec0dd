"""The engine: since when, which step, and who is left alone."""

from dataclasses import dataclass, replace

import pytest
from builders import a_claim_record, a_device, a_process, a_uuid
from ladders import START, Devices, Finds, Processes, Watch, a_policy, actions, busy, kinds

from gpuguard.errors import InvalidRequest
from gpuguard.locale import translated
from gpuguard.locale.messages import sentence
from gpuguard.model import Finding, Gap, Subject, Verdict
from gpuguard.policies.engine import Effect, EngineMemory, EscalationState, Hit, next_step
from gpuguard.policies.policy import KILL_AFTER, KeptMark, Step
from gpuguard.policies.rule import RuleKind
from gpuguard.policies.view import HostUse, RuleView, claim_subject, process_subject

NOBODY = a_device(processes=())


def test_a_spike_in_one_sample_never_fires():
    watch = Watch(a_policy("warn", hold=0))

    assert watch.sees(busy(0)).verdicts == ()
    assert watch.until(100, NOBODY, begin=10) == []


def test_the_same_sample_twice_is_no_second_sample_and_costs_no_time():
    watch = Watch(a_policy("warn", hold=10))
    watch.sees(busy(0))

    assert (watch.sees(busy(0)).verdicts, kinds(watch.sees(busy(0)))) == ((), {"resampling"})
    assert actions(watch.sees(busy(10))) == ["warn"]


@pytest.mark.parametrize(
    "blind", [a_device(processes=(a_process(),), processes_plausible=False), a_device(1)], ids=["garbled", "missing"]
)
def test_a_device_that_cannot_be_seen_ends_the_condition_with_a_note(blind):
    watch = Watch(a_policy("warn", hold=30))
    watch.until(20)

    judgement = watch.sees(busy(30, blind))

    assert (judgement.verdicts, kinds(judgement)) == ((), {"gap"})
    assert watch.until(100, begin=40) == [(70, "warn")]


def test_nothing_is_known_of_a_device_whose_list_is_garbled():
    rule = Finds(lambda view: [Finding("x", Subject("process", a_uuid(0), 4711, 1000.0, 1001), "why", (a_process(),))])
    garbled = a_device(processes=(a_process(),), processes_plausible=False)

    assert Watch(a_policy("warn", rules=(rule,))).until(100, garbled) == []


def test_a_value_that_could_not_be_read_ends_the_condition_with_a_note():
    watch = Watch(a_policy("warn", hold=30, rules=(Devices(80),)))
    watch.until(20, a_device(temperature=90.0))

    lost = watch.sees(busy(30, a_device(temperature=None), gaps=(Gap(a_uuid(0), "temperature", "timeout"),)))

    assert [(note.kind, note.text) for note in lost.notes] == [
        ("gap", "temperature could not be read, timeout: the time starts anew")
    ]
    assert watch.until(100, a_device(temperature=90.0), begin=40) == [(70, "warn")]


FANS = (Gap(a_uuid(0), "fan_speed", "not supported"),)


@pytest.mark.parametrize("before", [(), FANS], ids=["asked for now", "never known"])
def test_a_value_that_was_not_known_before_either_is_no_gap(before):
    watch = Watch(a_policy("warn", hold=30, rules=(Devices(80),)))
    watch.until(20, a_device(temperature=90.0), gaps=before)

    assert kinds(watch.sees(busy(30, a_device(temperature=60.0), gaps=FANS))) == set()


@pytest.mark.parametrize(
    ("clock", "note"), [(30, None), (31, "late"), (600, "late"), (601, "resampling"), (-5, "resampling")]
)
def test_a_pause_of_more_than_three_intervals_counts_for_no_duration(clock, note):
    watch = Watch(a_policy("warn", hold=30), interval=10)
    watch.sees(busy(0))
    judgement = watch.sees(busy(clock))

    assert (actions(judgement), kinds(judgement)) == ((["warn"], set()) if note is None else ([], {note}))


PAUSES = {  # which no sample was taken in -> when the step after it comes, which would come at 90 without
    40.0: 130,
    600.0: 690,
    601.0: None,  # everything begins again
}


@pytest.mark.parametrize("pause", PAUSES)
def test_an_escalation_goes_on_after_a_pause_where_it_stood(pause):
    watch = Watch(a_policy("warn", "terminate", cooldown=5000), interval=10)
    watch.until(60)
    after = watch.until(800, begin=60 + pause, every=1 if pause % 10 else 10)

    assert [clock for clock, action in after if action == "terminate"][:1] == [PAUSES[pause] or 60 + pause + 90]


def test_a_guard_that_a_flood_keeps_from_looking_runs_an_escalation_to_its_end():
    watch = Watch(a_policy("warn", "terminate", Step("kill", 30), cooldown=5000), interval=2)
    clock, done = 0.0, []
    while clock < 900 and "kill" not in done:
        done += actions(watch.sees(busy(clock)))
        clock += 7.7 if clock % 3 < 1 else 2.0

    assert [action for action in done if action != "warn"] == ["terminate", "kill"]
    assert 1 < done.count("warn") <= 3 + clock / 60  # each new time is told, but not with every late sample


@pytest.mark.parametrize("seen", [90, 120], ids=["at the next look", "after a pause"])
def test_a_reused_pid_starts_with_a_clean_slate(seen):
    watch = Watch(a_policy("warn", "terminate"), interval=10)
    watch.until(80)
    another = a_device(processes=(a_process(start_time=10_085.0),))

    assert watch.until(seen + 30, another, begin=seen) == [(seen + 30, "warn")]


@pytest.mark.parametrize("slept", [0.0, 20.0])
def test_a_machine_that_has_slept_begins_anew(slept):
    watch = Watch(a_policy("warn", hold=30), interval=10)
    for clock in (0, 10, 20):
        watch.sees(RuleView(busy(clock), suspended=5.0))
    judgement = watch.sees(RuleView(busy(45), suspended=5.0 + slept))

    assert (actions(judgement), kinds(judgement)) == (([], {"resampling"}) if slept else (["warn"], set()))


def test_a_warning_whose_time_has_shifted_is_said_again_before_the_step():
    steps = Step("warn"), Step("notify", 10, (("to", "ops"),)), Step("log", 10), Step("terminate", 100)
    watch = Watch(a_policy(*steps), interval=10)
    [first] = [verdict for clock in (0, 10, 20, 30) for verdict in watch.sees(busy(clock)).verdicts]
    watch.until(60, begin=40)
    again = watch.sees(busy(160)).verdicts

    assert (first.harm_action, first.harm_after) == ("terminate", 120)
    assert [(verdict.action, verdict.step, dict(verdict.options)) for verdict in again] == [
        ("warn", 0, {}),
        ("notify", 1, {"to": "ops"}),
    ]
    assert {(verdict.harm_action, verdict.harm_after, verdict.next_after) for verdict in again} == {
        ("terminate", 90, 90)  # 10 of 100 seconds had passed before the pause
    }
    assert watch.until(260, begin=170) == [(250, "terminate")]


@pytest.mark.parametrize("steps", [("warn",), ("warn", "log"), ("log", "terminate"), ("warn", "terminate")])
def test_nothing_is_said_again_where_no_message_told_a_time(steps):
    watch = Watch(a_policy(*steps), interval=10)
    watch.until(20)
    said = actions(watch.sees(busy(120)))  # before the first step: nothing was said yet

    assert said == []
    if steps != ("warn", "terminate"):
        watch.until(150, begin=130)
        assert actions(watch.sees(busy(210))) == []


def test_a_process_on_eight_devices_is_told_once_more_alone():
    wide = a_process()
    devices = [a_device(n, processes=(wide,)) for n in range(8)]
    watch = Watch(a_policy("warn", "terminate"), interval=10)
    watch.until(40, *devices)

    assert actions(watch.sees(busy(100, *devices))) == ["warn"]


def test_a_slower_rhythm_is_learnt_after_five_samples():
    watch = Watch(a_policy("warn", hold=400, cooldown=5000))
    watch.until(100)

    assert watch.until(2000, begin=200, every=100) == [(900, "warn")]


def test_the_ladder_is_climbed_one_step_after_the_other_and_none_is_repeated():
    watch = Watch(a_policy("warn", "terminate", "kill", cooldown=1000))

    assert watch.until(600) == [(30, "warn"), (90, "terminate"), (150, "kill")]


def test_the_time_to_the_next_step_counts_from_when_the_last_was_asked_for():
    watch = Watch(a_policy("warn", "notify", cooldown=1000), interval=30)

    assert watch.until(200, every=25) == [(50, "warn"), (125, "notify")]


def test_a_condition_that_ends_cancels_the_ladder_with_a_note():
    watch = Watch(a_policy("warn", "terminate"))
    watch.until(40)

    assert kinds(watch.sees(busy(50, NOBODY))) == {"cleared"}
    assert watch.until(90, begin=60) == [(90, "warn")]


def told_at_the_end(watch, clock, *devices):
    return [note.text for note in watch.sees(busy(clock, *devices)).notes if note.kind in ("cleared", "cancelled")]


@pytest.mark.parametrize("since", [40, 90])
def test_the_end_is_told_behind_the_last_step_too_once_and_also_when_its_cooldown_is_over(since):
    watch = Watch(a_policy("warn", cooldown=40, hold=30))
    watch.until(since)

    assert told_at_the_end(watch, since + 10, NOBODY) == [
        "the condition holds no more" if since == 40 else "the condition holds no more, its steps are cancelled"
    ]
    assert told_at_the_end(watch, since + 20, NOBODY) == []


def test_the_end_of_a_breach_whose_only_step_was_refused_is_told():
    watch = Watch(a_policy("terminate"))
    watch.until(20)
    [verdict] = watch.sees(busy(30)).verdicts
    [state] = watch.memory.states["p"].values()
    assert state.terminated_at == START + 30
    watch.memory.not_taken(verdict, START + 30)
    assert state.terminated_at is None  # nor does a kill follow it

    assert told_at_the_end(watch, 40, NOBODY) == ["the condition holds no more, its steps are cancelled"]


def test_the_end_of_the_hours_of_a_policy_is_told_to_whom_it_has_warned():
    at = 1_700_000_000.0 % 86400  # of the first sample
    watch = Watch(a_policy("warn", "terminate", hours=(at, at + 45.0)))
    watch.until(40)

    assert told_at_the_end(watch, 50) == ["the condition holds no more, its steps are cancelled"]


def test_a_condition_that_ends_because_somebody_is_kept_is_told_once():
    watch = Watch(a_policy("warn", "terminate"))
    watch.until(80)
    watch.memory.kept["uid", 1001] = KeptMark(20_000.0)

    assert [note.kind for note in watch.sees(busy(90)).notes] == ["kept"]


@pytest.mark.parametrize("in_between", [a_device(processes=(a_process(),)), NOBODY])
def test_after_the_last_step_comes_the_cooldown_and_then_the_start(in_between):
    watch = Watch(a_policy("warn", hold=30, cooldown=100))

    assert watch.until(40) == [(30, "warn")]
    watch.sees(busy(50, in_between))
    assert watch.until(170, begin=60) == [(160, "warn")]


@dataclass(frozen=True)
class Lasting(Processes):
    """One whose user has not caused what it finds."""

    kind = RuleKind("processes", innocent=True)


@pytest.mark.parametrize("rule", [Processes(), Lasting()])
def test_a_verdict_carries_all_that_is_known_of_its_step_and_of_the_coming_ones(rule):
    steps = Step("checkpoint", 10, (("signal", "USR1"),)), Step("terminate", 600), Step("kill", 60)
    watch = Watch(a_policy(*steps, rules=(Devices(), rule), enforce=True, keep=False, hold=20))
    watch.until(20)

    (verdict,) = watch.sees(busy(30)).verdicts

    assert verdict == Verdict(
        policy="p",
        finding=Finding("devices", process_subject(a_device(), a_process()), "is hot; uses memory", (a_process(),)),
        action="checkpoint",
        step=0,
        since=START,
        enforce=True,
        options=(("signal", "USR1"),),
        next_action="terminate",
        next_after=600.0,
        harm_action="terminate",
        harm_after=600.0,
        graced=0.0,
        may_be_kept=False,
        kind=Devices.kind,
    )


def test_the_release_of_a_claim_is_seen_when_the_claim_is_gone():
    claims = [a_claim_record(id=name, slots=(f"{a_uuid(0)}.{name}",)) for name in ("c1", "c2")]
    rule = Finds(lambda view: [Finding("x", claim_subject(claim), "idle") for claim in view.snapshot.claims])
    watch = Watch(a_policy("release", rules=(rule,), cooldown=1000))

    assert watch.until(40, a_device(), claims=tuple(claims)) == [(30, "release")]
    [waits] = [note for note in watch.sees(busy(45, a_device(), claims=tuple(claims))).notes if note.kind == "waiting"]
    assert (waits.text, waits.subject.claim) == (
        "a step of p on the same GPU has not shown its effect yet", "c2",
    )  # fmt: skip
    assert watch.until(60, a_device(), claims=(claims[1],), begin=50) == [(50, "release")]


def test_a_message_about_a_process_on_two_gpus_is_one_message_for_both():
    both = [a_device(number, processes=(a_process(),)) for number in (0, 1)]
    watch = Watch(a_policy("warn", "terminate", told=True, cooldown=1000))
    [warning] = [verdict for clock in (0, 10, 20, 30) for verdict in watch.sees(busy(clock, *both)).verdicts]
    watch.memory.told(warning)
    watch.until(80, *both, begin=40)

    judgement = watch.sees(busy(90, *both))
    assert judgement.notes == ()
    assert [verdict.finding.why for verdict in judgement.verdicts] == ["uses memory (and the like on 1 more GPU)"]
    watch.memory.not_taken(judgement.verdicts[0], START + 90)
    assert watch.until(150, *both, begin=100) == [(150, "terminate")]


def test_a_step_that_was_not_taken_is_tried_again_without_a_further_grace():
    at_terminal = {(4711, 1000.0): HostUse(terminal="/dev/pts/1")}
    watch = Watch(a_policy("terminate", cooldown=1000))
    for clock in range(0, 640, 10):
        verdicts = [*watch.sees(RuleView(busy(clock), host=at_terminal)).verdicts]
    assert [verdict.graced for verdict in verdicts] == [600.0]
    watch.memory.not_taken(verdicts[0], START + 630)

    again = [watch.sees(RuleView(busy(clock), host=at_terminal)).verdicts for clock in range(640, 700, 10)]
    assert [[verdict.graced for verdict in verdicts] for verdicts in again] == [[], [], [], [], [], [0.0]]


TOO_EARLY = (
    (Step("kill"),),
    (Step("warn"), Step("kill", 3600)),
    (Step("terminate"), Step("kill", KILL_AFTER - 1)),
    (Step("kill", 60), Step("terminate", 60)),
    (Step("terminate"), Step("log", 10), Step("kill", 19)),
    (Step("terminate"), Step("kill", 60), Step("terminate", 60), Step("kill", 29)),
)


@pytest.mark.parametrize(
    ("contradiction", "said"),
    [
        *(({"steps": steps}, "kills without warning") for steps in TOO_EARLY),
        ({"rules": ()}, "no rule"),
        ({"join": "some"}, "write all or any"),
        ({"hold": -1.0}, "negative or endless"),
        ({"start_grace": float("inf")}, "negative or endless"),
        ({"cooldown": float("nan")}, "negative or endless"),
        ({"steps": (Step("warn", -1.0),)}, "negative or endless"),
    ],
)
def test_a_policy_that_contradicts_itself_or_kills_too_early_is_refused(contradiction, said):
    with pytest.raises(InvalidRequest, match=said):
        a_policy(**contradiction)


def test_no_kill_is_due_before_a_terminate_was_asked_for_whatever_the_policy_says():
    policy = a_policy("terminate", Step("kill", 30))
    standing = EscalationState(Subject("process"), since=0.0, samples=9, done=1)

    assert next_step(standing, policy, clock=1000.0) is None
    standing.terminated_at = 980.0
    assert next_step(standing, policy, clock=1000.0) is None
    assert next_step(standing, policy, clock=980.0 + KILL_AFTER) is not None


def test_a_step_that_means_nobody_does_not_call_off_the_kill_after_a_terminate():
    watch = Watch(a_policy("terminate", "release", Step("kill", 60.0)))

    assert watch.until(150) == [(30, "terminate"), (150, "kill")]


def test_a_kill_thirty_seconds_after_a_terminate_is_accepted():
    watch = Watch(a_policy(Step("terminate"), Step("log", 10), Step("kill", 20), cooldown=1000))

    assert watch.until(200) == [(30, "terminate"), (40, "log"), (60, "kill")]


def test_a_refusal_undoes_no_step_of_another_subject_or_policy():
    """Two idle claims have no process: that the release of one is refused says nothing of the other."""
    memory, subjects = EngineMemory(), [Subject("claim", claim=name) for name in ("c1", "c2")]
    for subject in subjects:
        key = subject
        memory.states.setdefault("hogs", {})[key] = EscalationState(subject, 0.0, done=1)
        memory.cooling["hogs", key] = 1000.0
        for name in ("hogs", "other"):
            nobody = Hit(frozenset(), frozenset(), frozenset())
            effect = Effect(name, key, 0.0, frozenset(), None, nobody)
            memory.effects[True, f"{name} {subject.claim}"] = effect
    memory.not_taken(
        Verdict(policy="hogs", finding=Finding("idle", subjects[0], ""), action="release", step=0, since=0.0), 5.0
    )

    assert [state.done for state in memory.states["hogs"].values()] == [0, 1]
    assert list(memory.cooling) == [("hogs", subjects[1])]
    assert sorted(name for _, name in memory.effects) == ["hogs c2", "other c1", "other c2"]
    before = [replace(state) for state in memory.states["hogs"].values()]
    memory.not_taken(
        Verdict(policy="hogs", finding=Finding("idle", subjects[0], ""), action="release", step=0, since=0.0), 500.0
    )
    assert list(memory.states["hogs"].values()) == before, "it was not taken before: it has its time already"


def test_a_pause_lasts_as_long_as_the_condition_also_in_the_escalation_after_the_cooldown():
    watch = Watch(a_policy("pause", cooldown=20))
    process = (a_process().pid, a_process().start_time)
    watch.until(20)
    assert not watch.memory.pauses("p", process)
    for clock in (30, 50, 60, 70):
        watch.sees(busy(clock))
        assert watch.memory.pauses("p", process)
    assert not watch.memory.pauses("q", process)

    watch.sees(busy(80, a_device()))
    assert not watch.memory.pauses("p", process)


def test_a_policy_about_those_who_were_told_waits_until_a_message_has_reached_them():
    watch = Watch(a_policy("warn", "terminate", told=True))
    assert watch.until(1000) == [(30, "warn"), (90, "warn"), (690, "warn")]

    [state] = watch.memory.states["p"].values()
    watch.memory.told(
        Verdict(
            policy="p",
            finding=Finding("processes", state.subject, "", state.processes),
            action="warn",
            step=0,
            since=START,
        )
    )
    assert watch.until(1030, begin=1010) == [(1010, "terminate")]


def test_a_user_whom_no_message_has_reached_is_told_that_an_overdue_step_comes_at_once():
    watch = Watch(a_policy("warn", "terminate", told=True))
    watch.until(680)

    [again] = watch.sees(busy(690)).verdicts

    assert (again.next_after, again.harm_action, again.harm_after) == (0, "terminate", 0)


@pytest.mark.parametrize("change", [{"hold": 31.0}, {"enforce": True}, {"rules": (Processes(1),)}, None])
def test_a_policy_that_was_changed_cancels_its_ladders(change):
    policy = a_policy("warn", "terminate")
    watch = Watch(policy)
    watch.until(80)
    watch.policies = (replace(policy, **change),) if change else ()

    judgement = watch.sees(busy(90))

    text = f"the policy {'was changed' if change else 'is gone'}, its steps are cancelled"
    assert (judgement.verdicts, [(note.kind, note.text) for note in judgement.notes]) == ((), [("cancelled", text)])


def test_a_policy_that_was_changed_before_its_first_step_begins_again_without_a_word():
    policy = a_policy("warn")
    watch = Watch(policy)
    watch.until(20)
    watch.policies = (replace(policy, enforce=True),)

    assert watch.sees(busy(30)).notes == ()
    assert watch.until(60, begin=40) == [(60, "warn")]


def test_the_same_policy_loaded_again_goes_on():
    watch = Watch(a_policy("warn", "terminate"))
    watch.until(80)
    watch.policies = (a_policy("warn", "terminate"),)

    assert actions(watch.sees(busy(90))) == ["terminate"]


def test_two_policies_with_one_name_are_refused():
    with pytest.raises(InvalidRequest, match="same name"):
        Watch(a_policy("warn"), a_policy("log")).sees(busy(0))


def test_memory_does_not_grow_with_those_who_are_gone():
    watch = Watch(a_policy("warn", hold=10, cooldown=50), a_policy("terminate", name="q", cooldown=50))
    watch.memory.kept["uid", 1001] = KeptMark(10_050.0)
    for number in range(300):
        process = a_process(1000 + number, start_time=5000.0 + number)
        for moment in range(6):
            watch.sees(busy(number * 60 + moment * 10, a_device(processes=(process,))))
    watch.sees(busy(300 * 60 + 60, NOBODY))

    left = watch.memory
    assert [len(one) for one in left.states.values()] == [0, 0]
    assert len(left.cooling) + len(left.effects) + len(left.kept) <= 3


def test_a_policy_tells_users_its_own_sentence_before_what_was_seen():
    watch = Watch(a_policy("warn", "terminate", message="Jobs without a claim end at night."))
    watch.until(20)

    [verdict] = watch.sees(busy(30)).verdicts
    assert verdict.finding.why == "Jobs without a claim end at night. (uses memory)"


def test_what_several_rules_have_seen_can_be_said_in_another_language():
    process = a_process()
    places = [Subject("process", a_uuid(index), process.pid, process.start_time, process.uid) for index in (0, 1)]

    def saying(key: str) -> Finds:
        why = sentence(key, "seen {size}", size="1GiB")
        return Finds(lambda view: [Finding("x", place, why, (process,)) for place in places])

    rules = tuple(map(saying, ("first", "second", "third")))
    watch = Watch(a_policy("warn", rules=rules, join="any", message="It is night."))
    watch.until(20, a_device(0, processes=(process,)), a_device(1, processes=(process,)))

    [verdict] = watch.sees(busy(30, a_device(0, processes=(process,)), a_device(1, processes=(process,)))).verdicts
    words = {"first": "A{size}", "second": "B{size}", "third": "C{size}", "; ": "+"}
    words |= {"policy.message": "{message} <{why}>", "rule.more_gpus": "{why} und {number}"}
    assert verdict.finding.processes == (process,)
    assert verdict.finding.why == ("It is night. (seen 1GiB; seen 1GiB; seen 1GiB) (and the like on 1 more GPU)")
    assert translated(verdict.finding.why, lambda key: words.get(key, key)) == (
        "It is night. <A1GiB+B1GiB+C1GiB> und 1"
    )
