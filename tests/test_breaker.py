"""Not too many at once: the breaker, and one destructive step per device."""

from dataclasses import replace

import pytest
from builders import GIB, MIB, a_device, a_process
from ladders import Devices, Finds, Processes, Watch, a_policy, busy, kinds, pids

from gpuguard.model import Finding
from gpuguard.policies.policy import Step
from gpuguard.policies.view import process_subject


def crowd(users: int, each: int = 1, **fields):
    """A device for every process of so many users."""
    names = [(user, number) for user in range(users) for number in range(each)]
    return [
        a_device(place, processes=(a_process(1000 + place, uid=2000 + user, **fields),), memory_used=20 * GIB)
        for place, (user, number) in enumerate(names)
    ]


@pytest.mark.parametrize("devices", [crowd(4), crowd(1, each=6)], ids=["users", "processes"])
@pytest.mark.parametrize("action", ["terminate", "deny", "quarantine"])
def test_the_breaker_lets_nobody_be_hit_when_too_many_would_be(action, devices):
    judgement = ladder_at_its_end(a_policy(action, at_most_users=3, at_most_processes=5), *devices)

    assert (judgement.verdicts, kinds(judgement)) == ((), {"breaker"})


@pytest.mark.parametrize(("action", "users"), [("terminate", 3), ("deny", 3), ("quarantine", 3), ("warn", 8)])
def test_as_many_as_the_breaker_allows_are_hit_and_warnings_are_not_counted(action, users):
    assert len(ladder_at_its_end(a_policy(action), *crowd(users)).verdicts) == users


def test_one_user_with_too_many_processes_is_named_with_the_number_that_lets_them_through():
    [of_several] = ladder_at_its_end(a_policy("terminate"), *crowd(4)).notes
    [note] = ladder_at_its_end(a_policy("terminate"), *crowd(1, each=6, user="mallory")).notes

    assert of_several.subject is None
    assert (note.subject.kind, note.subject.uid, note.subject.user) == ("user", 2000, "mallory")
    assert "mallory alone has more than that.  `at_most: {processes: 6}` lets all through" in note.text


def test_beyond_some_hits_as_many_as_allowed_so_that_nobody_is_safe_by_having_many():
    policy = a_policy("terminate", at_most_processes=5, some_beyond=True)
    judgement = ladder_at_its_end(policy, *crowd(1, each=7))

    assert (len(judgement.verdicts), kinds(judgement)) == (5, {"breaker"})
    assert "only 5 are, the oldest breach first" in judgement.notes[0].text
    users = ladder_at_its_end(a_policy("terminate", at_most_users=3, some_beyond=True), *crowd(5))
    assert len({verdict.finding.subject.uid for verdict in users.verdicts}) == 3


def test_beyond_some_begins_with_the_oldest_breach():
    later, earlier = crowd(2)
    watch = Watch(a_policy("terminate", at_most_processes=1, some_beyond=True, hold=25), interval=30)
    watch.sees(busy(0, earlier))
    watch.sees(busy(4, later, earlier))

    assert pids(watch.sees(busy(30, later, earlier)).verdicts) == {1001}


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
        ({"processes": (replace(ALICE, memory_used=None), BOB), "memory_used": 20 * GIB}, 80),
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
