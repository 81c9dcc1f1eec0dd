"""What is said is what is done: warning, status, message and rehearsal name the deed and the time that then come."""

from dataclasses import replace

import pytest
from builders import GIB, a_claim_record, a_device, a_process
from ladders import START, Watch, busy

from gpuguard.backtest.backtest import rehearse
from gpuguard.enforcement.identity import ProcessFacts
from gpuguard.enforcement.preflight import LATE, ActionContext, Preflight, targets
from gpuguard.notify.templates import message_for
from gpuguard.policies.engine import policy_status
from gpuguard.policies.idle import AgeRule
from gpuguard.policies.policy import INTERACTIVE_SECONDS, KILL_AFTER, KeptMark, Policy, Step
from gpuguard.policies.thresholds import MemoryRule, TemperatureRule
from gpuguard.policies.usage import UnclaimedRule, UsersRule
from gpuguard.policies.view import HostUse, RuleView
from gpuguard.units import local_time, parse_memory_amount

ALICE = 1001
RULES = {
    "memory": MemoryRule(parse_memory_amount("20GiB")),
    "temperature": TemperatureRule(80.0, per="process"),
    "unclaimed": UnclaimedRule(),
    "users": UsersRule(deny=(ALICE,)),
    "age": AgeRule(run_time_above=0.0),
}
# (what the process is beside the GPU, its command) of who sits in front of it
WHERE = {
    "batch": (HostUse(terminal=""), ("python", "train.py")),
    "terminal": (HostUse(terminal="/dev/pts/3"), ("python",)),
    "notebook": (HostUse(terminal=""), ("python", "-m", "ipykernel_launcher")),
    "debugger": (HostUse(terminal="", traced=True), ("python", "train.py")),
}
LADDERS = {
    "ends": (Step("warn"), Step("terminate", 120.0), Step("kill", KILL_AFTER)),
    "guest": (Step("warn"), Step("deny", 30.0), Step("terminate", 20.0)),
}
EVERY = 10


def views(where, seconds=3000):
    """Samples of a process that breaks all rules."""
    use, command = WHERE[where]
    row = a_process(4711, uid=ALICE, memory_used=30 * GIB, command=command, start_time=1000.0)
    device = a_device(0, processes=(row,), memory_used=30 * GIB, temperature=90.0)
    for clock in range(0, seconds, EVERY):
        yield RuleView(busy(clock, device), host={(4711, 1000.0): use})


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("rule", RULES)
def test_the_worst_step_is_named_with_its_time_and_comes_then(rule, where, ladder):
    policy = Policy("p", (RULES[rule],), hold=60.0, steps=LADDERS[ladder], enforce=True, cooldown=1e6)
    watch, promised, came = Watch(policy, interval=EVERY), [], {}
    for view in views(where):
        for verdict in watch.sees(view).verdicts:
            came.setdefault(verdict.action, view.clock)
            if verdict.action == "warn":
                promised.append((verdict.harm_action, view.clock + verdict.harm_after))
                at = local_time(view.snapshot.taken_at + verdict.harm_after, "%Y-%m-%d %H:%M:%S")
                assert (
                    f"At {at} or later, if nothing changes: the process, or its whole claimed job, is asked to end"
                    in message_for(verdict, view.snapshot).body
                )
        [row] = policy_status(watch.policies, watch.memory, {}) or [None]
        if row and "warn" in came and "terminate" not in came:
            promised.append((row.harm, row.harm_due))

    assert set(promised) == {("terminate", came["terminate"])}
    grace = 0 if where == "batch" else INTERACTIVE_SECONDS
    wait = sum(step.after for step in policy.steps[: [step.action for step in policy.steps].index("terminate") + 1])
    assert came["terminate"] == came["warn"] + wait + grace
    rehearsed = rehearse(views(where), (policy,), interval=float(EVERY))
    assert came["terminate"] == min(
        view.clock for view, judged in rehearsed for verdict in judged.verdicts if verdict.action == "terminate"
    )


@pytest.mark.parametrize("where", WHERE)
def test_each_step_comes_when_the_status_says(where):
    policy = Policy("p", (RULES["memory"],), hold=60.0, steps=LADDERS["ends"], enforce=True, cooldown=1e6)
    watch, told, came = Watch(policy, interval=EVERY), {}, {}
    for view in views(where):
        for verdict in watch.sees(view).verdicts:
            came[verdict.action] = view.clock
        for row in policy_status(watch.policies, watch.memory, {}):
            if row.last != "kill":
                told.setdefault(row.next, set()).add(row.due)

    assert told == {action: {clock} for action, clock in came.items()}
    assert came.keys() == {"warn", "terminate", "kill"}


def test_who_is_kept_is_told_at_once_that_nothing_comes():
    policy = Policy("p", (RULES["age"],), hold=0.0, steps=LADDERS["ends"], enforce=True, cooldown=1e6)
    watch = Watch(policy, interval=EVERY)
    for view in views("batch", 100):
        watch.sees(view)
    assert policy_status(watch.policies, watch.memory, {})

    kept = {("uid", ALICE): KeptMark(START + 7200.0)}
    assert not policy_status(watch.policies, watch.memory, {}, kept=kept)
    assert policy_status(watch.policies, watch.memory, {}, kept={("uid", 1002): KeptMark(START + 7200.0)})


def test_the_time_that_the_engine_has_waited_for_a_person_is_not_waited_for_again():
    policy = Policy("p", (RULES["memory"],), hold=0.0, steps=(Step("terminate"),), enforce=True)
    watch = Watch(policy, interval=EVERY)
    [(view, verdict)] = [(view, verdict) for view in views("terminal", 1000) for verdict in watch.sees(view).verdicts]
    facts = ProcessFacts(1000.0, (ALICE,) * 4, 1, 4711, 0, 0, None, None, "python", True, None)
    context = ActionContext(None, lambda event: True, lambda *_: True)
    [process] = targets(verdict, view.snapshot)
    target = Preflight(verdict, view.snapshot, context, view.clock, process, facts=facts)

    assert LATE["interactive"].check(target) is None
    refused = LATE["interactive"].check(replace(target, verdict=replace(verdict, graced=0.0, policy="q")))
    assert refused[0].wait == INTERACTIVE_SECONDS


def test_a_step_that_was_refused_does_not_count_the_time_for_a_person_as_waited_for():
    """They may have sat down in front of it since."""
    policy = Policy("p", (RULES["memory"],), hold=0.0, steps=(Step("terminate"),), enforce=True)
    watch, graced = Watch(policy, interval=EVERY), []
    for view in views("terminal", 1000):
        for verdict in watch.sees(view).verdicts:
            graced.append(verdict.graced)
            watch.memory.not_taken(verdict, view.clock)

    assert graced[:2] == [INTERACTIVE_SECONDS, 0.0]


def test_the_mail_after_a_release_says_neither_what_does_not_come_nor_how_to_prevent_what_was_done():
    claim = a_claim_record(a_device(0), uid=ALICE)
    rule = AgeRule(claim_without_process_above=0.0)
    policy = Policy("p", (rule,), hold=0.0, steps=(Step("warn"), Step("release"), Step("terminate")), enforce=True)
    watch, body = Watch(policy, interval=EVERY), ""
    for clock in range(0, 100, EVERY):
        snapshot = busy(clock, a_device(0), claims=(claim,))
        for verdict in watch.sees(snapshot).verdicts:
            if verdict.action == "release":
                told = replace(verdict, action="notify", options=(("to", "owner"), ("done", "release")))
                body = message_for(told, snapshot).body

    assert "What was done:  the claim is released" in body
    assert "What is next:   Nothing: this was the last step." in body
    assert "How to stop it" not in body
    assert "gpuguard release" not in body


def test_a_rehearsal_takes_nothing_from_root():
    row = a_process(4711, uid=0, user="root", memory_used=30 * GIB)
    device = a_device(0, processes=(row,), memory_used=30 * GIB)
    policy = Policy("p", (RULES["memory"],), hold=0.0, steps=(Step("warn"), Step("terminate")))
    samples = [RuleView(busy(clock, device)) for clock in range(0, 300, EVERY)]
    did = [verdict.action for _, judged in rehearse(samples, (policy,), interval=EVERY) for verdict in judged.verdicts]

    assert did == ["warn"]
