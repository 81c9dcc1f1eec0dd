"""The watchdog: sample, judge, act, record, in a loop that nothing ends and that looks sooner when something rises."""

import os
import threading
import time
from dataclasses import dataclass, replace

import pytest
from builders import GIB, Scripted, a_claim_record, a_device, a_process, a_snapshot
from ladders import Finds
from nodes import clock, eventually, start
from own_claims import acquire

from gpuguard import procfs, watchdog
from gpuguard.claims.directory import lock_directory
from gpuguard.enforcement import actions, preflight
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.enforcement.guard_limits import PastAction
from gpuguard.enforcement.identity import Protected
from gpuguard.errors import DriverUnresponsive
from gpuguard.model import Event, Finding, Subject, Verdict
from gpuguard.notify.templates import Template, message_for
from gpuguard.policies import engine
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import KILL_AFTER, Policy, Step
from gpuguard.policies.rule import Rule, RuleKind
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.request import Request
from gpuguard.units import parse_memory_amount
from gpuguard.watchdog import SiteRules, Watchdog, pace

HOGS = Policy(
    "hogs", (MemoryRule(above=parse_memory_amount("20GiB")),), hold=0.0, steps=(Step("terminate"),), enforce=True
)


@pytest.fixture
def log():
    return []


@pytest.fixture
def a_watchdog(log):
    def make(backend, policies=(HOGS,), **options):
        options.setdefault("append", lambda event: log.append(event) or True)
        return Watchdog(backend, policies, **options)

    return make


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "node")


def snapshots(*devices, number=3, every=1.0):
    """Samples of the same machine."""
    return [
        a_snapshot(*devices, clock=10_000.0 + i * every, taken_at=1_700_000_000.0 + i * every) for i in range(number)
    ]


class Rounds(threading.Event):
    """Ends a loop after so many rounds; keeps what *look* gives at each."""

    def __init__(self, number, look):
        super().__init__()
        self.number, self.look, self.seen = number, look, []

    def wait(self, timeout=None):
        self.seen.append(self.look())
        if len(self.seen) >= self.number:
            self.set()
        return self.is_set()


A_HOG = a_device(memory_used=40 * GIB, processes=(a_process(memory_used=40 * GIB),))


def looks(guard, number):
    """What is judged at so many looks."""
    return [guard.step() for _ in range(number)]


def written(log, *kinds):
    """The whole lines of these kinds, but for the time, which is now."""
    assert all(abs(event.time - time.time()) < 60 for event in log)
    return [replace(event, time=0.0) for event in log if event.kind in kinds]


def outcomes(log, kind="terminate"):
    return [event.outcome for event in log if event.kind == kind]


def test_a_step_that_a_check_holds_up_is_tried_again_and_the_next_one_waits(a_watchdog, monkeypatch):
    tried = []
    waits, sent = ActionOutcome("refused", wait=5.0), ActionOutcome("sent")
    answers = iter([waits, waits, sent, sent])

    def act(verdict, snapshot, context):
        tried.append(verdict.action)
        return (next(answers),)

    monkeypatch.setattr(actions, "act", act)
    policy = replace(HOGS, steps=(Step("pause"), Step("resume")), cooldown=1000.0)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=6)), (policy,))
    looks(guard, 6)

    assert tried == ["pause", "pause", "pause", "resume"]


def test_a_step_that_is_due_once_more_while_it_waits_is_taken_once(a_watchdog, monkeypatch):
    """Its limit is longer than the cooldown: a second one at once would find the process gone, or be refused."""
    tried = []

    def act(verdict, snapshot, context):
        tried.append(snapshot.clock)
        return (ActionOutcome("refused", wait=5.0) if len(tried) < 4 else ActionOutcome("sent"),)

    monkeypatch.setattr(actions, "act", act)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=6)), (replace(HOGS, cooldown=1.0),))
    looks(guard, 5)

    assert tried == [10_001.0, 10_002.0, 10_003.0, 10_004.0]


NOT_TAKEN = ["refused", "failed", "not recorded", "not permitted"]
COOLING = replace(HOGS, cooldown=1000.0)


@pytest.fixture
def tries(a_watchdog, monkeypatch):
    """(policy, action, seconds) of each step that is tried in samples 10 s apart, if the tries come out as *words*."""

    def run(words, *policies, edited=None, number=16):
        tried, left = [], iter(words)

        def act(verdict, snapshot, context):
            tried.append((verdict.policy, verdict.action, snapshot.clock - 10_000.0))
            return (ActionOutcome(next(left)),)

        monkeypatch.setattr(actions, "act", act)
        guard = a_watchdog(Scripted(*snapshots(A_HOG, number=number, every=10.0)), policies, interval=(10.0, 10.0))
        looks(guard, 2)
        if edited:
            guard.policies = (edited,)
        looks(guard, number - 2)
        return tried

    return run


@pytest.mark.parametrize("word", NOT_TAKEN)
def test_a_step_that_was_not_taken_is_tried_again_and_only_one_that_was_begins_a_cooldown(tries, word):
    tried = tries([word, word, "sent"], COOLING)

    assert tried == [("hogs", "terminate", 10.0), ("hogs", "terminate", 70.0), ("hogs", "terminate", 130.0)]


def test_who_could_not_be_asked_to_end_as_the_disk_was_full_is_asked_later_and_then_killed(tries):
    ladder = (Step("pause"), Step("terminate"), Step("kill", KILL_AFTER))
    tried = tries(["sent", "not recorded", "sent", "sent"], replace(COOLING, steps=ladder))

    assert [row[1:] for row in tried] == [("pause", 10.0), ("terminate", 20.0), ("terminate", 80.0), ("kill", 110.0)]


def test_an_edit_after_a_refusal_leaves_nobody_alone_for_the_cooldown(tries):
    tried = tries(["refused", "sent"], COOLING, edited=replace(COOLING, cooldown=900.0))

    assert tried == [("hogs", "terminate", 10.0), ("hogs", "terminate", 30.0)]


def test_a_refused_step_holds_up_no_step_of_another_policy_on_the_same_gpu(tries):
    later = replace(HOGS, name="later", hold=20.0)
    tried = tries(["refused", "sent"], COOLING, later, number=4)

    assert tried == [("hogs", "terminate", 10.0), ("later", "terminate", 20.0)]


def test_a_message_that_reached_nobody_is_done_and_the_ladder_goes_on(tries):
    tried = tries(["undelivered", "sent"], replace(COOLING, steps=(Step("warn"), Step("terminate"))))

    assert tried == [("hogs", "warn", 10.0), ("hogs", "terminate", 20.0)]


def test_a_policy_about_those_who_were_told_takes_nothing_from_others_and_tells_them_again(tries, monkeypatch):
    monkeypatch.setattr(engine, "UNTOLD_SECONDS", 40.0)
    told = replace(COOLING, told=True, steps=(Step("warn"), Step("terminate")))
    tried = tries(["undelivered", "undelivered", "undelivered", "logged", "sent"], told)

    assert tried == [("hogs", action, clock) for action, clock in zip(
        ("warn", "warn", "warn", "warn", "terminate"), (10.0, 20.0, 60.0, 100.0, 110.0), strict=True
    )]  # fmt: skip


@pytest.mark.parametrize(("target", "acts"), [("owner", True), ("operators", False)])
def test_a_message_to_another_target_has_not_reached_the_user(a_watchdog, monkeypatch, target, acts):
    tried = []
    monkeypatch.setattr(actions, "act", lambda verdict, *_: (tried.append(verdict.action), ActionOutcome("done"))[1:])
    policy = replace(COOLING, told=True, steps=(Step("notify", options=(("to", target),)), Step("terminate")))
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=5)), (policy,))
    guard.site_rules = replace(guard.site_rules, personal=frozenset({"owner"}))
    looks(guard, 5)

    assert ("terminate" in tried) == acts


@pytest.mark.parametrize(
    ("lives", "used", "seconds", "said"),
    [
        (False, 1, 2.0, ("ended", "ended within 2s, and its memory is back")),
        (False, None, 2.0, ("ended", "ended within 2s")),
        (False, 40, 2.0, None),
        (False, 40, 60.0, ("ended", "ended, but its memory is still in use after 1m")),
        (True, 40, 60.0, ("still there", "still there after 1m")),
        (True, 40, 2.0, None),
    ],
)
def test_what_came_of_an_end_is_written_down_once(a_watchdog, log, monkeypatch, lives, used, seconds, said):
    process, uuid = (4711, 9_000.0), a_device().uuid
    before = ((uuid, 40 * GIB),) if used is not None else ()
    sent = PastAction(10_000.0, "terminate", process, (uuid,), True, "", before, 39 * GIB, "hogs", 0)
    monkeypatch.setattr(actions, "act", lambda *of: (ActionOutcome("sent", sent=sent),))
    monkeypatch.setattr(watchdog, "is_alive", lambda process: lives)
    monkeypatch.setattr(preflight.identity, "is_alive", lambda process: lives)
    monkeypatch.setattr(watchdog, "boot_clock", lambda: 10_000.0 + seconds)
    after = a_device(memory_used=None if used is None else used * GIB)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=2), *snapshots(after, number=3)))
    looks(guard, 5)

    facts = (("policy", "hogs"), ("uid", 0), ("start_time_seconds", 9_000.0))
    line = Event(time=0.0, kind="terminate", outcome="", user="root", devices=(uuid,), pid=4711, facts=facts)
    assert written(log, "terminate") == ([replace(line, outcome=said[0], message=said[1])] if said else [])


@pytest.mark.parametrize(("pause", "tries"), [(100.0, 3), (700.0, 1)])
def test_a_step_that_a_check_holds_up_goes_on_waiting_after_a_pause_that_is_not_too_long(
    a_watchdog, monkeypatch, pause, tries
):
    tried = []

    def act(verdict, *more):
        tried.append(verdict.action)
        return (ActionOutcome("refused", wait=5.0),)

    monkeypatch.setattr(actions, "act", act)
    before, after = snapshots(A_HOG, number=2), snapshots(A_HOG, number=2)
    after = [replace(sample, clock=sample.clock + pause) for sample in after]
    guard = a_watchdog(Scripted(*before, *after), (replace(HOGS, hold=1.0, cooldown=1000.0),), interval=(1.0, 1.0))
    looks(guard, 4)

    assert tried == ["terminate"] * tries


def test_what_a_policy_file_says_of_the_guard_is_so_for_each_action(a_watchdog, directory, monkeypatch):
    seen = []
    monkeypatch.setattr(actions, "act", lambda verdict, snapshot, context: seen.append((snapshot, context)) or ())
    step = Step("notify", 0.0, (("to", "ops"),))
    monkeypatch.setattr(watchdog, "groups_of_users", lambda snapshot: {1001: frozenset({"staff"})})
    before, *later = snapshots(A_HOG, number=4)
    empty = replace(before, devices=(replace(A_HOG, processes=(), memory_used=0),))
    policy, backend = replace(HOGS, steps=(step,)), Scripted(empty, *later)
    guard = a_watchdog(backend, (policy,), directory=directory, enforce=True, share_host_pids=True)
    guard.site_rules = SiteRules(
        policies=(policy,),
        interval=(1.0, 7.0),
        protected=Protected(uids=frozenset({7}), groups=frozenset({"staff"}), executables=("/opt/*",)),
        per_minute=17,
        per_hour=23,
        longest_keep=99.0,
        notifier=Post(),
        language="zh",
        templates={"zh": Template(body="x")},
    )
    looks(guard, 3)

    [(snapshot, context)] = seen
    process = (4711, 1000.0)
    assert (snapshot.devices, context.backend, context.directory) == ((A_HOG,), backend, directory)
    assert (context.enforce, context.share_host_pids, context.interval) == (True, True, 7.0)
    assert (context.protected, context.protected_executables) == (frozenset({7, 1001}), ("/opt/*",))
    assert (context.limits.per_minute, context.limits.per_hour, context.longest_keep) == (17, 23, 99.0)
    assert (context.notifier, context.language, context.alarm) == (guard.site_rules.notifier, "zh", ("ops",))
    assert context.templates == guard.site_rules.templates
    assert context.arrived(A_HOG.uuid, process) == later[0].clock
    assert [context.member(one).process for one in (process, (4711, 9999.0))] == [process, (4711, 9999.0)]


@pytest.mark.parametrize("only_looks", [False, True])
def test_a_guard_that_only_looks_ends_no_quarantine(a_watchdog, monkeypatch, only_looks):
    asked = []
    monkeypatch.setattr(actions, "give_up_unkillable", lambda *of: asked.append(of))
    guard = a_watchdog(Scripted(*snapshots(A_HOG)))
    guard.only_looks = only_looks
    looks(guard, 1)

    assert bool(asked) is not only_looks


def test_of_what_is_due_the_small_ones_of_a_user_keep_nothing_from_its_turn(a_watchdog, log):
    rows = [(0, 1001, 21 * GIB), (1, 1002, 70 * GIB), (2, 1003, 30 * GIB)]  # of the same user
    devices = [a_device(i, memory_used=used, processes=(a_process(pid, memory_used=used),)) for i, pid, used in rows]
    guard = a_watchdog(Scripted(*snapshots(*devices)), (replace(HOGS, steps=(Step("log"),)),))
    looks(guard, 2)

    assert [event.pid for event in log] == [1002, 1003, 1001]


@pytest.mark.parametrize("end", ["cleared", "policy gone", "policy changed", "user kept", "device kept"])
def test_a_step_that_waits_is_forgotten_when_its_reason_ends(a_watchdog, monkeypatch, end):
    tried = []

    def act(*each):
        tried.append(each)
        return (ActionOutcome("refused", wait=5.0),)

    monkeypatch.setattr(actions, "act", act)
    samples = snapshots(A_HOG, number=4)
    if end == "cleared":
        samples[2:] = snapshots(a_device(), number=4)[2:]
    guard = a_watchdog(Scripted(*samples))
    guard.step()
    guard.step()
    if end.startswith("policy"):
        guard.policies = (replace(HOGS, hold=30.0),) if end == "policy changed" else ()
    elif end == "user kept":
        guard.keep(samples[0].clock + 1000, uid=1001)
    elif end == "device kept":
        guard.keep(samples[0].clock + 1000, device=A_HOG.uuid)
    guard.step()

    assert len(tried) == 1
    assert not guard._memory.cooling and not guard._memory.effects  # by what was never done


def test_a_callback_that_fails_comes_after_everything_is_done(a_watchdog, log):
    def fail(event):
        raise RuntimeError("not my day")

    guard = a_watchdog(Scripted(*snapshots(A_HOG)), on_event=fail)
    guard.step()
    with pytest.raises(RuntimeError):
        guard.step()

    assert len(log) == 1


def test_the_condition_is_looked_at_again_with_everything_that_the_policy_says(a_watchdog):
    """What preflight asks just before a signal: on the devices of the target alone, which the driver read again."""
    judged = a_watchdog(Scripted(*snapshots(A_HOG)))
    judged.step()
    verdict = judged.step().verdicts[0]
    [sample] = snapshots(A_HOG, number=1)

    def still(device, **change):
        judged.policies = (replace(HOGS, **change),)
        return judged._still_true(verdict, replace(sample, devices=(device,)))

    assert still(A_HOG)
    assert not still(replace(A_HOG, processes=()))
    assert not still(replace(A_HOG, processes=(a_process(memory_used=40 * GIB, start_time=2000.0),)))
    assert not still(replace(A_HOG, processes_plausible=False))
    assert not still(replace(A_HOG, processes=(a_process(memory_used=None),)))
    assert not still(A_HOG, devices_at_least=2)
    assert not still(A_HOG, name="other")


def test_the_condition_is_looked_at_again_for_each_process_that_is_meant(a_watchdog):
    """A step may wait for minutes: meanwhile one process of a user may be spared, and another one not."""
    both = a_process(1001, memory_used=20 * GIB), a_process(1002, memory_used=20 * GIB)
    device = replace(A_HOG, processes=both)
    policy = replace(HOGS, rules=(MemoryRule(above=parse_memory_amount("15GiB"), per="user"),))
    judged = a_watchdog(Scripted(*snapshots(device)), (policy,))
    judged.step()
    verdict = judged.step().verdicts[0]
    [sample] = snapshots(
        replace(device, processes=(both[0], replace(both[1], kind="graphics", memory_used=GIB))), number=1
    )

    def still(*processes):
        return judged._still_true(replace(verdict, finding=replace(verdict.finding, processes=processes)), sample)

    assert verdict.finding.processes == both
    assert still(both[0])
    assert not still(both[1])


def test_the_loop_survives_everything_and_says_so_once(a_watchdog, log):
    faults = [*[DriverUnresponsive("no answer")] * 2, ValueError("odd"), *snapshots(A_HOG, every=0.001)]
    guard = a_watchdog(Scripted(*faults), interval=(0.001, 0.001))
    guard.run(Rounds(9, lambda: None))

    assert outcomes(log)
    assert written(log, "watchdog") == [
        Event(time=0.0, kind="watchdog", outcome="driver unresponsive", message="no answer"),
        Event(time=0.0, kind="watchdog", outcome="failed", message="a fault inside gpuguard: ValueError('odd')"),
        Event(time=0.0, kind="watchdog", outcome="watching again"),
    ]


def test_a_driver_that_does_not_answer_is_asked_less_and_less(a_watchdog):
    guard = a_watchdog(Scripted(DriverUnresponsive("no answer")), interval=(0.001, 0.001))
    guard.run(rounds := Rounds(20, lambda: guard.pause))

    assert rounds.seen[:4] == [0.002, 0.004, 0.008, 0.016]


def test_the_loop_waits_for_what_is_left_of_the_pause_after_a_step(a_watchdog, monkeypatch):
    now, waits = [100.0], []

    def step():
        now[0] += 0.25 if not waits else 5.0

    class Waits(threading.Event):
        def wait(self, timeout=None):
            waits.append((timeout, guard.last_round))
            if len(waits) == 2:
                self.set()
            return self.is_set()

    guard = a_watchdog(Scripted(*snapshots(A_HOG)), interval=(1.0, 1.0))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(guard, "step", step)
    guard.run(Waits())

    assert waits == [(guard.pause - 0.25, 100.25), (0.01, 105.25)]


def test_what_policies_judge_by_is_read_whole_for_a_recording(directory, monkeypatch):
    row = a_process(17)
    snapshot, joined = a_snapshot(a_device(0, processes=(row,))), a_snapshot(a_device(1, processes=(row,)))
    stats, read = {17: "stat of 17"}, []

    class Uses:
        def sample(self, *words, **more):
            read.append(("host", words, more))
            return {"host": 1}

        def machine(self, limits):
            read.append(("machine", limits))
            return "machine"

    def sample(fields):
        read.append(("sample", fields))
        return snapshot

    monkeypatch.setattr(watchdog, "HostUses", Uses)
    monkeypatch.setattr(
        watchdog, "groups_of_users", lambda snapshot: {7: frozenset({"lab"})} if snapshot is joined else {}
    )
    monkeypatch.setattr(watchdog, "stat_of", lambda pid: f"stat of {pid}")
    monkeypatch.setattr(
        watchdog, "with_claims", lambda given, place: (given, place()) == (snapshot, directory) and joined
    )
    monkeypatch.setattr(watchdog, "process_facts", lambda *words: {"facts": words})
    backend = Scripted(snapshot)
    monkeypatch.setattr(backend, "sample", sample)
    view = watchdog.ViewReader(backend, directory).read()

    assert {name: getattr(view, name) for name in ("snapshot", "host", "machine", "groups", "seen")} == {
        "snapshot": joined,
        "host": {"host": 1},
        "machine": "machine",
        "groups": {7: frozenset({"lab"})},
        "seen": {"facts": (joined, stats)},
    }
    assert read == [
        ("sample", watchdog.RECORDED_FIELDS),
        ("host", (joined, stats), {"debuggers": True}),
        ("machine", watchdog.RECORDED_LIMITS),
    ]


def test_the_pause_after_a_fault_is_never_longer_than_a_minute(a_watchdog):
    guard = a_watchdog(Scripted(DriverUnresponsive("no answer")), interval=(1.0, 600.0))
    guard.run(Rounds(9, lambda: None))

    assert guard.pause == watchdog.DRIVER_RETRY_SECONDS


def test_a_thread_of_its_own_ends_with_the_block(a_watchdog, place):
    seen = []
    with a_watchdog(start(place), (), interval=(0.01, 0.01), on_sample=lambda *each: seen.append(each)):
        assert eventually(lambda: len(seen) > 2)
    number = len(seen)

    # By its name: pytest has threads of its own where tests run side by side.
    assert "gpuguard-watchdog" not in [thread.name for thread in threading.enumerate()]
    assert len(seen) == number


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        ({}, 6.0),
        ({"memory_used": 15 * GIB}, 2.0),
        ({"memory_used": 5 * GIB}, 6.0),
        ({"memory_used": None}, 6.0),
        ({"temperature": 45.0}, 2.0),
        ({"temperature": 36.0}, 6.0),
        ({"temperature": None}, 6.0),
    ],
)
def test_it_looks_soon_when_something_rises_and_later_when_nothing_does(change, seconds):
    before = a_device(memory_used=10 * GIB, temperature=35.0)

    assert pace(a_snapshot(before), a_snapshot(replace(before, **change)), 4.0, (2.0, 10.0)) == seconds


def test_an_idle_node_is_looked_at_more_and_more_seldom(a_watchdog):
    guard = a_watchdog(Scripted(*snapshots(a_device(), number=8)), interval=(1.0, 5.0))
    pauses = []
    for _ in range(6):
        guard.step()
        pauses.append(guard.pause)

    assert pauses == [1.0, 1.5, 2.25, 3.375, 5.0, 5.0]


def test_a_note_is_written_down_when_it_is_new(a_watchdog, log):
    unreadable = replace(A_HOG, processes=None)
    samples = snapshots(A_HOG, number=6)
    for i in (3, 4):
        samples[i] = replace(samples[i], devices=(unreadable,))
    guard = a_watchdog(Scripted(*samples), (replace(HOGS, hold=100.0),))
    looks(guard, 6)

    assert written(log, "note") == [
        Event(
            time=0.0,
            kind="note",
            outcome="gap",
            user="alice",
            devices=(A_HOG.uuid,),
            pid=4711,
            message="the driver gives no list of processes: the time starts anew",
            facts=(("policy", "hogs"), ("uid", 1001)),
        )
    ]


def test_a_lock_of_several_users_or_of_no_process_that_shows_is_told_once_while_it_lasts(
    a_watchdog, log, directory, monkeypatch
):
    monkeypatch.setattr(watchdog, "with_claims", lambda snapshot, *of: snapshot)
    monkeypatch.setattr(watchdog, "hidden_claim_text", lambda paths: " and ".join(paths))
    several = a_claim_record("d0", id="c1", user="al and bob", holders=(7, 8), hidden=True)
    unseen = a_claim_record("d1", "d2", id="c2", hidden=True)
    shared = a_claim_record("d3", id="c3", slots=("d3.slot0",), hidden=True)
    good = a_claim_record("d4", id="c4", holders=(9,))
    rounds = ((several, good), (several, unseen, shared, good), (unseen,), (several, unseen))
    samples = [
        replace(sample, claims=claims) for sample, claims in zip(snapshots(A_HOG, number=4), rounds, strict=True)
    ]
    looks(a_watchdog(Scripted(*samples), (), directory=directory), 4)

    of_several = Event(
        time=0.0,
        kind="claim",
        outcome="held by several users",
        devices=("d0",),
        claim="c1",
        message="the lock of the GPU is held by processes of al and bob together, and no record says whose it is.  It "
        "counts as no claim, and is free when all of them have ended",
    )
    paths = [directory.lock_path(name) for name in ("d1", "d2", "d3.slot0")]
    hidden = Event(
        time=0.0, kind="claim", outcome="hidden", devices=("d1", "d2"), claim="c2", message=" and ".join(paths[:2])
    )
    of_share = replace(hidden, devices=("d3",), claim="c3", message=paths[2])
    assert written(log, "claim") == [of_several, hidden, of_share, of_several]


@dataclass(frozen=True)
class Trespass(Rule):
    """Makes the guard look who came after a claim."""

    kind = RuleKind("trespass", innocent=False, finds_trespassers=True)

    def check(self, view):
        return ()


@pytest.mark.parametrize("rules", [(Trespass(),), HOGS.rules])
def test_the_admin_is_told_once_of_a_process_that_was_there_before_a_claim_of_another_user(
    a_watchdog, log, monkeypatch, rules
):
    monkeypatch.setattr(watchdog, "with_claims", lambda snapshot, *of: snapshot)
    claim = a_claim_record(A_HOG, id="c1", uid=1002, user="bob", since=1_700_000_001.0)
    before, *later = snapshots(A_HOG, number=4)
    claimed = [replace(sample, claims=(claim,)) for sample in later]
    guard = a_watchdog(Scripted(before, *claimed), (replace(HOGS, rules=rules, hold=100.0),))
    looks(guard, 4)

    line = Event(
        time=0.0,
        kind="claim",
        outcome="others were there first",
        user="alice",
        devices=(A_HOG.uuid,),
        pid=4711,
        claim="c1",
        message="no trespasser on the claim of bob: the process used the GPU before the claim came, or may have",
        facts=(("uid", 1001),),
    )
    assert written(log, "claim") == ([line] if rules == (Trespass(),) else [])


def test_the_admin_is_told_once_of_a_process_that_is_listed_after_its_end_and_of_none_that_is_just_ending(
    a_watchdog, log
):
    ends, stays = a_process(31), a_process(32)
    lists = [(ends, stays), (replace(ends, ended=True), stays), (stays,)]
    lists += [(replace(stays, ended=True, user=None, uid=None, start_time=None),)] * 3 + [()]
    devices = [a_device(processes=processes, memory_used=20 * GIB) for processes in lists]
    samples = [a_snapshot(device, clock=10_000.0 + number) for number, device in enumerate(devices)]
    guard = a_watchdog(Scripted(*samples), ())
    looks(guard, 4)
    assert log == [], "it may be just ending"
    looks(guard, 1)
    assert len(log) == 1
    looks(guard, 2)

    assert written(log, "note") == [
        Event(
            time=0.0,
            kind="note",
            outcome="process ended",
            user="alice",
            devices=(devices[0].uuid,),
            pid=32,
            message="the driver lists a process that has ended: a child of it may still hold the GPU",
        )
    ]
    assert len(log) == 1


def test_time_is_that_of_the_machine_and_goes_on_while_it_sleeps(a_watchdog, place):
    seen = []
    a_watchdog(start(place), (), on_sample=lambda *each: seen.append(each)).step()

    assert abs(seen[0][0].clock - clock()) < 60
    assert abs(seen[0][0].taken_at - time.time()) < 60


def test_a_claim_is_seen_and_missed_at_the_next_sample(a_watchdog, place):
    backend, directory, seen = start(place), lock_directory(place), []
    guard = a_watchdog(backend, directory=directory, on_sample=lambda snapshot, _: seen.append(snapshot.claims))
    guard.step()
    with acquire(backend, Request(devices=("0",)), directory) as claim:
        looks(guard, 2)
    guard.step()

    assert [[record.id for record in claims] for claims in seen] == [[], [claim.id], [claim.id], []]


def test_a_claim_is_as_old_as_the_first_sample_with_it_whatever_its_record_says(a_watchdog, monkeypatch):
    monkeypatch.setattr(watchdog, "with_claims", lambda snapshot, *of: snapshot)
    claim, seen = a_claim_record(A_HOG, id="c1", since=1.0), []
    first, *later = snapshots(A_HOG, number=3)
    samples = (first, *(replace(sample, claims=(claim,)) for sample in later))
    looks(a_watchdog(Scripted(*samples), (), on_sample=lambda snapshot, _: seen.append(snapshot.claims)), 3)

    assert seen == [(), *[(replace(claim, since=later[0].taken_at),)] * 2]


def test_the_host_is_looked_at_only_while_a_policy_judges_by_it():
    us = os.getpid()
    row = a_process(us, start_time=procfs.start_time(us))
    about_the_host = Policy("h", (IdleRule(below=5.0, cpu_below=2.0),), steps=(Step("log"),))
    looked = Scripted(a_snapshot(a_device(0, processes=(row,))))
    guard = Watchdog(looked)
    rates = []
    about_the_gpu = replace(HOGS, steps=(Step("warn"),))  # no step for which it counts who sits in front of it
    for policy in about_the_host, about_the_host, about_the_gpu, about_the_host, about_the_host:
        guard.policies = (policy,)
        looked.shown = [replace(looked.shown[0], clock=looked.shown[0].clock + 1.0)]
        guard.step()
        assert guard._view
        rates.append([use.cpu is not None for use in guard._view.host.values()])

    # A rate is never one over the time in which nobody looked.
    assert rates == [[False], [True], [], [False], [True]]


class Post:
    """A sender that only writes down to whom it would send, and what."""

    def __init__(self):
        self.verdicts, self.bodies = [], []

    def notify(self, name, verdict, snapshot):
        self.verdicts.append((name, verdict))
        self.bodies.append(message_for(verdict, snapshot).body)
        return "queued"


def test_only_the_administrator_is_told_that_the_breaker_holds_a_policy_back(a_watchdog, log):
    """The mail to the user who had caused it said which number made everybody immune."""
    rows = [a_process(4711 + n, memory_used=40 * GIB, uid=2000 + n, user=f"user{n}") for n in range(5)]
    crowd = [a_device(index, memory_used=40 * GIB, processes=(row,)) for index, row in enumerate(rows)]
    targets = (Step("notify", 60.0, (("to", name),)) for name in ("ops", "owner"))
    policy = replace(HOGS, steps=(Step("terminate"), *targets))
    post = Post()
    guard = a_watchdog(Scripted(*snapshots(*crowd, number=4)), (policy,), enforce=True, notifier=post)
    guard.site_rules = replace(guard.site_rules, personal=frozenset({"owner"}))
    looks(guard, 4)

    said = (
        "5 users would be acted on at once, more than 3, and the finding rests on readings, which can go wrong for "
        "everybody: no user is (user0, user1, user2, user3, user4)"
    )
    facts = (("policy", "hogs"), ("uid", None))
    assert written(log, "note") == [Event(time=0.0, kind="note", outcome="breaker", message=said, facts=facts)]
    [(target, verdict)] = post.verdicts
    assert (target, verdict) == (
        "ops",
        Verdict(
            policy="hogs",
            finding=Finding("breaker", Subject("node"), said),
            action="notify",
            step=0,
            since=10_001.0,
            enforce=True,
            options=(("to", "ops"),),
            kind=watchdog.BREAKER,
        ),
    )
    assert said in post.bodies[0] and "at_most" not in post.bodies[0]
    assert watchdog.BREAKER.advice["en"] in post.bodies[0]
    assert outcomes(log) == []


@pytest.mark.parametrize(
    ("action", "word", "pids", "told"),
    [
        ("terminate", "sent", (1, 2, 3), {"alice": [1, 2], "bob": [3]}),
        ("terminate", "sent", (3,), {"bob": [3]}),
        ("terminate", "refused", (1, 2, 3), {}),
        ("terminate", "dry run", (1, 2, 3), {}),
        ("renice", "sent", (1, 2, 3), {}),
        ("deny", "done", (None,), {"alice": [1, 2]}),
    ],
)
def test_users_are_written_to_about_what_was_done_to_them_if_it_does_harm(
    a_watchdog, monkeypatch, action, word, pids, told
):
    messages = []

    def act(verdict, *_):
        if verdict.action == "notify":
            messages.append(verdict)
        return tuple(ActionOutcome(word, pid=pid) for pid in pids)

    alice, second, bob = a_process(1), a_process(2), a_process(3, uid=1002, user="bob")
    found = Finding("x", Subject("user", uid=1001, user="alice"), "why", (alice, second, bob))
    rule = Finds(lambda view: [found])
    monkeypatch.setattr(actions, "act", act)
    policy = replace(
        HOGS, rules=(rule,), steps=(Step(action), *(Step("notify", 600.0, (("to", to),)) for to in PEOPLE))
    )
    machine = replace(A_HOG, processes=(alice, second, bob))
    guard = a_watchdog(Scripted(*snapshots(machine, number=3)), (policy,), enforce=word != "dry run")
    guard.site_rules = replace(guard.site_rules, personal=frozenset({"owner", "of another policy"}))
    looks(guard, 3)

    assert {
        verdict.finding.subject.user: [process.pid for process in verdict.finding.processes] for verdict in messages
    } == told
    assert {verdict.options for verdict in messages} == ({(("to", "owner"), ("done", action))} if told else set())
    for verdict in messages:
        [first, *_] = verdict.finding.processes
        assert verdict.finding.subject == replace(found.subject, uid=first.uid, user=first.user)


PEOPLE = ("owner", "ops", "owner")


@dataclass(frozen=True)
class Broken(Rule):
    """A rule that fails: a user who found out how could else switch off the guard for all."""

    kind = RuleKind("broken", innocent=False)

    def check(self, view):
        raise ZeroDivisionError("a value that nobody foresaw")


BROKEN = Policy("broken", (Broken(),), hold=0.0, steps=(Step("log"),))


def failures(log):
    return [(dict(event.facts)["policy"], event.message) for event in log if event.outcome == "failed"]


@pytest.mark.parametrize("policies", [(BROKEN, HOGS), (HOGS, BROKEN)])
def test_a_rule_that_fails_keeps_no_other_policy_from_anything(a_watchdog, log, policies):
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=5)), policies)
    looks(guard, 4)

    assert outcomes(log)  # what became of the hog
    [(policy, message)] = failures(log)
    assert policy == "broken"
    assert "the others go on: ZeroDivisionError('a value that nobody foresaw')" in message


def test_a_rule_that_goes_on_failing_is_named_once_a_minute(a_watchdog, log, monkeypatch):
    monkeypatch.setattr(watchdog, "DRIVER_RETRY_SECONDS", 0.0)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=3)), (BROKEN,))
    looks(guard, 2)

    assert len(failures(log)) == 2


def test_a_rule_that_failed_says_nothing_of_what_was_before(monkeypatch):
    policy, memory = Policy("p", HOGS.rules, hold=20.0, steps=(Step("log"),)), EngineMemory()
    first, second, third, *later = snapshots(A_HOG, number=5, every=10.0)
    evaluate(first, [policy], memory)
    evaluate(second, [policy], memory, isolate=lambda policy, judge: None)
    assert evaluate(third, [policy], memory).verdicts == ()

    assert [len(evaluate(snapshot, [policy], memory).verdicts) for snapshot in later] == [0, 1]


def test_a_step_that_fails_is_not_tried_again_and_the_others_are_done(a_watchdog, log, monkeypatch):
    def act(verdict, snapshot, context, before=actions.act):
        if verdict.finding.subject.pid == 1001:
            raise ValueError("of one process alone")
        return before(verdict, snapshot, context)

    monkeypatch.setattr(actions, "act", act)
    processes = [a_process(pid, memory_used=30 * GIB) for pid in (1001, 1002)]
    hogs = replace(A_HOG, memory_used=60 * GIB, processes=tuple(processes))
    policy = Policy("hogs", HOGS.rules, hold=0.0, steps=(Step("log"),), cooldown=3600.0)
    guard = a_watchdog(Scripted(*snapshots(hogs, number=6)), (policy,))
    looks(guard, 5)

    assert [(event.kind, event.pid) for event in log if event.kind == "log"] == [("log", 1002)]
    text = "the policy hogs meets a fault inside gpuguard, and the others go on: ValueError('of one process alone')"
    assert failures(log) == [("hogs", text)]


def fail(*_, **__):
    raise OverflowError("nobody foresaw that")


def test_a_condition_that_cannot_be_judged_again_does_not_hold(a_watchdog, log, monkeypatch):
    """Before each signal it is asked; who could make that fail must not be hit for it, and no innocent either."""
    holds = []
    monkeypatch.setattr(actions, "act", lambda verdict, now, context: holds.append(context.still_true(verdict, now)))
    monkeypatch.setattr(watchdog.engine, "still_holds", fail)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=3)), (HOGS,))
    looks(guard, 2)

    assert holds == [False]
    assert [policy for policy, _ in failures(log)] == ["hogs"]


def test_a_fault_in_looking_after_the_unkillable_keeps_nothing_from_being_done(a_watchdog, log, monkeypatch):
    monkeypatch.setattr(actions, "give_up_unkillable", fail)
    guard = a_watchdog(Scripted(*snapshots(A_HOG, number=3)), (replace(HOGS, steps=(Step("log"),)),))
    looks(guard, 2)

    assert [event.kind for event in log if event.outcome == "done"] == ["log"]
    assert failures(log)


def test_a_callback_that_fails_keeps_no_duration_from_being_over(a_watchdog, log):
    """Looks that come after a minute, as for a driver that does not answer, would start all durations anew."""
    guard = a_watchdog(Scripted(*snapshots(A_HOG)), on_sample=fail, interval=(1.0, 2.0))
    guard.run(rounds := Rounds(10, lambda: guard.pause))

    assert max(rounds.seen) <= 2.0


def test_a_callback_that_fails_does_not_end_the_loop(a_watchdog):
    """A guard whose standard error was a pipe that nobody read any more guarded nothing from its next event on."""

    def unread(event):
        raise BrokenPipeError("planted")

    a_watchdog(Scripted(*snapshots(A_HOG)), on_event=unread).run(rounds := Rounds(4, lambda: None))

    assert len(rounds.seen) == 4
