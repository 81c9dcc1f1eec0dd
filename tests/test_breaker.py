"""Not too many at once: the breaker, turns, and one destructive step per device."""

import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest
from builders import GIB, MIB, a_claim_record, a_device, a_process
from daemons import ANOTHER, DaemonUnderTest, somebodys
from ladders import START, Devices, Finds, Processes, Watch, a_policy, busy, kinds, pids

from gpuguard.model import Finding, Gap, Subject
from gpuguard.policies.idle import AgeRule
from gpuguard.policies.policy import Step
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.rule import Evidence
from gpuguard.policies.thresholds import MemoryRule
from gpuguard.policies.usage import TrespassRule, UnclaimedRule, UsersRule
from gpuguard.policies.view import RuleView, process_subject


def crowd(users: int, each: int = 1, **fields):
    """A device for every process of so many users."""
    names = [(user, number) for user in range(users) for number in range(each)]
    return [
        a_device(place, processes=(a_process(1000 + place, uid=2000 + user, **fields),), memory_used=20 * GIB)
        for place, (user, number) in enumerate(names)
    ]


@pytest.mark.parametrize("action", ["terminate", "pause", "deny", "quarantine"])
def test_nobody_is_hit_when_readings_are_wrong_for_many_users_at_once(action):
    judgement = ladder_at_its_end(a_policy(action), *crowd(5))

    assert (judgement.verdicts, kinds(judgement)) == ((), {"breaker"})


@pytest.mark.parametrize(("action", "users"), [("terminate", 3), ("deny", 3), ("quarantine", 3), ("warn", 8)])
def test_as_many_users_as_the_breaker_allows_are_hit_and_warnings_are_not_counted(action, users):
    assert len(ladder_at_its_end(a_policy(action), *crowd(users)).verdicts) == users


def test_the_note_of_the_breaker_is_about_no_user_and_says_nothing_of_how_to_be_spared():
    [note] = ladder_at_its_end(a_policy("terminate"), *crowd(4)).notes

    assert (note.kind, note.subject) == ("breaker", None)
    assert note.text.startswith("4 users would be acted on at once, more than 3, and the finding rests on readings")
    assert "at_most" not in note.text


def test_nobody_is_hit_when_the_directory_of_the_claims_is_lost_under_ten_users():
    machine = crowd(10)
    claims = tuple(a_claim_record(device, uid=2000 + place) for place, device in enumerate(machine))
    watch = Watch(a_policy("terminate", rules=(UnclaimedRule(),)))
    assert watch.until(100, *machine, claims=claims) == []

    assert watch.until(300, *machine, begin=110) == []
    assert kinds(watch.sees(busy(310, *machine))) == {"breaker"}


def test_nobody_is_hit_who_comes_after_one_claim_on_a_machine_whose_others_were_lost():
    watch = Watch(a_policy("terminate", rules=(TrespassRule(),)))
    machine = crowd(10, start_time=START + 15)
    claim = a_claim_record(*machine, uid=3000)
    watch.until(10, *(replace(device, processes=()) for device in machine), claims=(claim,))

    assert watch.until(300, *machine, claims=(claim,), begin=20) == []
    assert kinds(watch.sees(busy(310, *machine, claims=(claim,)))) == {"breaker"}


def test_nothing_is_hit_while_the_claims_cannot_be_read():
    unread = {"gaps": (Gap(None, "claims", "broken"),)}

    assert Watch(a_policy("terminate", rules=(UnclaimedRule(),))).until(100, *crowd(1), **unread) == []


def six_tiny_ones(**fields):
    rows = tuple(a_process(4000 + number, uid=2001, memory_used=120 * MIB, **fields) for number in range(6))
    return a_device(0, processes=rows, memory_used=GIB)


@pytest.mark.parametrize("rule", [UnclaimedRule(), Processes()], ids=["claims", "a sensor"])
def test_six_tiny_processes_of_one_user_switch_the_policy_off_for_nobody(rule):
    large = a_device(1, processes=(a_process(5000, uid=2002, memory_used=70 * GIB),), memory_used=70 * GIB)

    judgement = ladder_at_its_end(a_policy("terminate", rules=(rule,)), six_tiny_ones(), large)

    assert pids(judgement.verdicts) == {4000, 5000}
    assert kinds(judgement) == {"waiting"}


def test_the_small_processes_of_one_user_keep_no_other_user_from_their_turn():
    many = crowd(1, each=8, memory_used=30 * GIB)
    small = a_device(8, processes=(a_process(5000, uid=2002, memory_used=GIB),), memory_used=GIB)

    judgement = ladder_at_its_end(a_policy("terminate", at_most_processes=2), *many, small)

    assert pids(judgement.verdicts) == {1000, 5000}


@pytest.mark.parametrize("accountable", [{}, dict.fromkeys(range(100000, 100021), 1001)])
def test_uids_without_a_name_and_uids_that_root_gave_to_one_user_are_one_user(accountable):
    nameless = [
        a_device(place, processes=(a_process(1000 + place, uid=100_000 + place, user=str(100_000 + place)),))
        for place in range(21)
    ]
    bob = a_device(21, processes=(a_process(5000, uid=2002, user="bob", memory_used=70 * GIB),))
    watch = Watch(a_policy("terminate"))
    for clock in (0, 10, 20, 30):
        judgement = watch.sees(RuleView(busy(clock, *nameless, bob), accountable=accountable))

    assert 5000 in pids(judgement.verdicts)
    assert len(judgement.verdicts) == 5


def test_the_rest_follows_when_the_effect_is_seen_and_readings_have_held_for_as_long_once_more():
    sizes = [
        a_device(n, processes=(a_process(1000 + n, memory_used=size),), memory_used=size)
        for n, size in enumerate(range(10 * GIB, 17 * GIB, GIB))
    ]
    watch = Watch(a_policy("terminate", cooldown=1000))
    watch.until(20, *sizes)
    first = watch.sees(busy(30, *sizes))
    ended = [a_device(n, processes=(), memory_used=0) for n in range(2, 7)]

    assert (pids(first.verdicts), kinds(first)) == ({1002, 1003, 1004, 1005, 1006}, {"waiting"})
    assert watch.until(60, *sizes[:2], *ended, begin=40) == [(60, "terminate"), (60, "terminate")]


def test_who_no_longer_breaks_the_rule_after_the_first_turn_is_spared():
    watch = Watch(a_policy("terminate", at_most_processes=1, cooldown=1000))
    watch.until(30, *crowd(2))
    calm = [a_device(n, processes=(a_process(1000 + n, uid=2000 + n, memory_used=0),), memory_used=0) for n in range(2)]

    assert watch.until(300, *calm, begin=40) == []


QUOTA = QuotaRule(devices=0)


@pytest.mark.parametrize(
    "rule",
    [QUOTA, AgeRule(run_time_above=60.0), UsersRule(allow=(1,))],
    ids=["quota", "age", "users"],
)
def test_what_rests_on_clocks_and_on_claims_that_are_there_goes_on_in_turns(rule):
    """Monday at eight: four users are each one GPU over the limit of the day."""
    machine = crowd(4)
    watch = Watch(a_policy("terminate", rules=(rule,), hold=60, cooldown=1000))
    watch.until(50, *machine)
    first = watch.sees(busy(60, *machine))
    ended = [a_device(n, processes=(), memory_used=0) for n in range(3)]

    assert (len(first.verdicts), kinds(first)) == (3, {"waiting"})
    assert watch.until(70, *ended, machine[3], begin=70) == [(70, "terminate")]


def test_several_rules_rest_on_the_least_certain_of_them():
    of = {
        (QUOTA,): Evidence.CLOCK,
        (QUOTA, UnclaimedRule()): Evidence.MISSING_CLAIMS,
        (QUOTA, UnclaimedRule(), MemoryRule(10.0)): Evidence.SENSOR,
        (AgeRule(claim_without_process_above=60.0),): Evidence.SENSOR,
        (QuotaRule(memory=50.0),): Evidence.SENSOR,
        (UsersRule(allow_groups=("staff",)),): Evidence.SENSOR,
    }

    assert {rules: a_policy(rules=rules).rests_on for rules in of} == of


def test_beyond_some_hits_as_many_users_as_allowed_in_turns():
    watch = Watch(a_policy("terminate", some_beyond=True, cooldown=1000))
    watch.until(20, *crowd(5))
    first = watch.sees(busy(30, *crowd(5)))
    ended = [a_device(n, processes=(), memory_used=0) for n in range(3)]

    assert (len({verdict.finding.subject.uid for verdict in first.verdicts}), kinds(first)) == (3, {"waiting"})
    assert len(watch.until(60, *ended, *crowd(5)[3:], begin=40)) == 2


def test_of_equally_large_ones_the_oldest_breach_comes_first():
    later, earlier = crowd(2)
    watch = Watch(a_policy("terminate", at_most_processes=1, hold=25), interval=30)
    watch.sees(busy(0, earlier))
    watch.sees(busy(4, later, earlier))

    assert pids(watch.sees(busy(30, later, earlier)).verdicts) == {1001}


def test_the_processes_of_one_finding_are_hit_together_however_many_they_are():
    def all_of_alice(view):
        rows = tuple(row for device in view.snapshot.devices for row in device.processes)
        return [Finding("x", Subject("user", uid=rows[0].uid, user="alice"), "why", rows)]

    judgement = ladder_at_its_end(a_policy("terminate", rules=(Finds(all_of_alice),)), *crowd(1, each=8))

    assert (len(judgement.verdicts), len(pids(judgement.verdicts))) == (1, 8)


def test_a_kill_does_not_wait_for_as_long_once_more():
    """The first two live on after SIGTERM; the third waits for its turn meanwhile."""
    policy = a_policy("terminate", Step("kill", 30), at_most_processes=2, cooldown=1000)

    assert Watch(policy).until(65, *crowd(3)) == [(30, "terminate")] * 2 + [(60, "kill")] * 2


def test_a_process_that_outlived_sigkill_takes_no_turn_of_another_on_its_device():
    stuck, other = a_process(1000, memory_used=70 * GIB), a_process(1001, uid=2002, memory_used=GIB)
    full = a_device(processes=(stuck, other), memory_used=71 * GIB)
    watch = Watch(a_policy("terminate", at_most_processes=1))
    watch.memory.unkillable = frozenset({(1000, 1000.0)})
    watch.until(20, full)

    assert 1001 in pids(watch.sees(busy(30, full)).verdicts)


UNCLAIMED = """
version: 1
mode: enforce
policies:
  - {name: unclaimed, when: {unclaimed: {}}, for: 300ms, steps: [terminate]}
"""


@pytest.mark.root
def test_a_daemon_ends_a_large_process_beside_six_tiny_ones_of_another_user(tmp_path):
    daemon = DaemonUnderTest(tmp_path)
    daemon.policy.write_text(UNCLAIMED)
    with ExitStack() as stack:
        tiny = [stack.enter_context(somebodys(daemon.node, "0", 120 * MIB)) for _ in range(6)]
        large = stack.enter_context(somebodys(daemon.node, "1", 70 * GIB, uid=ANOTHER))
        daemon.start("--interval", "200ms", "--enforce", named=True)  # only now: a program that comes again after its
        stack.enter_context(daemon.begun())  # end, twice, is one that something starts again

        assert large.wait(60) == -signal.SIGTERM, daemon.said()
        assert [event for event in daemon.events("note") if event["outcome"] == "breaker"] == []
        assert [child.wait(60) for child in tiny] == [-signal.SIGTERM] * 6  # this test is their launcher: one job


def test_the_breaker_of_one_policy_does_not_stop_another():
    calm = a_policy("terminate", name="calm", rules=(Processes(15 * GIB),))
    devices = [*crowd(4), a_device(4, processes=(a_process(memory_used=20 * GIB),))]

    judgement = ladder_at_its_end((a_policy("terminate"), calm), *devices)

    assert [verdict.policy for verdict in judgement.verdicts] == ["calm"]


def ladder_at_its_end(policies, *devices):
    watch = Watch(*(policies if isinstance(policies, tuple) else (policies,)))
    watch.until(20, *devices)
    return watch.sees(busy(30, *devices))


ALICE, BOB = a_process(1000, uid=1001), a_process(1001, uid=1002)


@pytest.mark.parametrize("enforce", [False, True])
def test_one_process_per_device_is_hit_until_its_effect_is_seen(enforce):
    full = a_device(processes=(ALICE, BOB), memory_used=20 * GIB)
    watch = Watch(a_policy("terminate", cooldown=1000, enforce=enforce))
    watch.until(20, full)
    judgement = watch.sees(busy(30, full))
    assert (pids(judgement.verdicts), kinds(judgement)) == ({1000}, {"waiting"})

    dead_but_not_yet_given_back = a_device(processes=(BOB,), memory_used=20 * GIB)
    assert watch.sees(busy(40, dead_but_not_yet_given_back)).verdicts == ()

    given_back = a_device(processes=(BOB,), memory_used=10 * GIB + MIB)
    assert pids(watch.sees(busy(50, given_back)).verdicts) == {1001}


def test_who_is_listed_may_still_be_there_however_little_memory_is_in_use():
    watch = Watch(a_policy("terminate", cooldown=1000))
    watch.until(30, a_device(processes=(ALICE, BOB), memory_used=20 * GIB))

    still_there = a_device(processes=(replace(ALICE, memory_used=MIB), BOB), memory_used=10 * GIB)
    assert watch.sees(busy(40, still_there)).verdicts == ()


def test_after_fifty_seconds_without_an_effect_the_next_one_may_be_hit():
    full = a_device(processes=(ALICE, BOB), memory_used=20 * GIB)

    assert Watch(a_policy("terminate", cooldown=1000)).until(200, full) == [(30, "terminate"), (80, "terminate")]


def test_a_reused_pid_on_the_device_does_not_count_as_alive():
    reused = a_process(1000, uid=1003, start_time=10_035.0, memory_used=GIB)
    watch = Watch(a_policy("terminate", cooldown=1000))
    watch.until(30, a_device(processes=(ALICE, BOB), memory_used=20 * GIB))

    judgement = watch.sees(busy(40, a_device(processes=(reused, BOB), memory_used=10 * GIB)))

    assert pids(judgement.verdicts) == {1001}


def everybody(view):
    return [
        Finding("x", process_subject(device, each), "why", (each,))
        for device in view.snapshot.devices
        for each in device.processes or ()
    ]


@pytest.mark.parametrize(
    ("device", "next_one"),
    [
        ({"processes": (ALICE, BOB), "memory_used": 20 * GIB}, 40),
        ({"processes": (ALICE, BOB), "memory_used": None, "memory_free": None}, 80),
        (
            {"processes": (replace(ALICE, memory_used=None), replace(BOB, memory_used=None)), "memory_used": 20 * GIB},
            80,
        ),
    ],
)
def test_where_nobody_knows_what_the_victim_held_no_memory_shows_the_effect(device, next_one):
    watch = Watch(a_policy("terminate", rules=(Finds(everybody),), cooldown=1000))
    assert watch.until(30, a_device(**device)) == [(30, "terminate")]

    assert watch.until(100, a_device(processes=(BOB,), memory_used=GIB), begin=40) == [(next_one, "terminate")]


def test_memory_that_cannot_be_read_any_more_shows_no_effect():
    watch = Watch(a_policy("terminate", rules=(Finds(everybody),), cooldown=1000))
    watch.until(30, a_device(processes=(ALICE, BOB), memory_used=20 * GIB))

    unread = a_device(processes=(BOB,), memory_used=None, memory_free=None)
    assert watch.until(100, unread, begin=40) == [(80, "terminate")]


def test_a_list_that_is_not_plausible_shows_no_effect():
    full = a_device(processes=(ALICE, BOB), memory_used=20 * GIB)
    watch = Watch(a_policy("terminate", hold=10, cooldown=1000))
    assert len(watch.until(10, full)) == 1
    watch.sees(busy(20, a_device(processes=(), processes_plausible=False, memory_used=0)))

    assert watch.until(50, full, begin=30) == []


def test_the_ladder_that_acted_may_go_on_on_its_device():
    watch = Watch(a_policy("terminate", Step("kill", 30), cooldown=1000))

    assert watch.until(100) == [(30, "terminate"), (60, "kill")]


def test_two_policies_do_not_hit_the_same_device_at_once():
    judgement = ladder_at_its_end((a_policy("terminate"), a_policy("pause", name="q")), *crowd(1))

    assert len(judgement.verdicts) == 1
    assert kinds(judgement) == {"waiting"}


def test_a_policy_that_only_watches_does_not_delay_one_that_is_enforced():
    rehearsed, enforced = a_policy("terminate", name="a"), a_policy("terminate", name="b", enforce=True)

    assert len(ladder_at_its_end((rehearsed, enforced), *crowd(1)).verdicts) == 2


def test_a_process_on_two_devices_keeps_both_from_the_next():
    wide, other = a_process(1000), a_process(1001, memory_used=5 * GIB)
    devices = [a_device(0, processes=(wide,)), a_device(1, processes=(wide, other))]

    judgement = ladder_at_its_end(a_policy("terminate"), *devices)

    assert pids(judgement.verdicts) == {1000}
    assert kinds(judgement) == {"waiting"}


def test_nothing_destructive_happens_on_a_device_whose_processes_cannot_be_seen():
    watch = Watch(a_policy("warn", "terminate", rules=(Devices(),)))

    assert watch.until(200, a_device(processes=None)) == [(30, "warn")]
