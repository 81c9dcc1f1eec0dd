"""How fast messages follow each other: with a clock that only these tests move."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from targets import a_message

from gpuguard.notify.sender import CAPACITY, FIRST_PAUSE, INTERVAL, LONGEST_PAUSE, MOST_PER_INTERVAL, SETTLE, Pace

MESSAGE = a_message()


def a_message_of(policy="idle-gpus", user="alice"):
    return replace(MESSAGE, key=policy, user=user)


def sent(pace: Pace, start: float, seconds: int) -> list[tuple[float, int]]:
    """(when, count) of what goes out in that time, looked at every half second."""
    found = []
    for tick in range(seconds * 2):
        now = start + tick / 2
        while batch := pace.take(now):
            pace.succeeded(batch, now)
            found.append((now, batch.joined().count))
    return found


def test_the_messages_of_one_moment_go_out_as_one_with_their_number():
    pace = Pace()
    for _ in range(40):
        assert pace.put(a_message_of(), 0.0)

    assert pace.take(0.0) is None
    assert sent(pace, 0.0, 10) == [(SETTLE, 40)]


def test_a_policy_gets_one_message_per_minute_however_often_it_has_something_to_say():
    pace, found = Pace(), []
    for second in range(300):
        pace.put(a_message_of(), float(second))
        found += sent(pace, float(second), 1)

    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(found)]
    assert min(gaps) >= INTERVAL
    assert len(found) == 5
    assert sum(count for _, count in found) + pace.waiting[("idle-gpus", None)].count == 300


def test_all_policies_together_get_no_more_than_the_target_may():
    pace = Pace()
    for number in range(30):
        pace.put(a_message_of(f"p{number}"), 0.0)
    found = sent(pace, 0.0, 300)

    assert len(found) == 30
    for start in range(300):
        assert sum(start <= when < start + INTERVAL for when, _ in found) <= MOST_PER_INTERVAL


def test_what_is_about_one_user_is_never_joined_to_what_goes_to_another():
    personal, common = Pace(personal=True), Pace()
    for pace in (personal, common):
        for user in ("alice", "bob", "alice"):
            pace.put(a_message_of(user=user), 0.0)

    assert sorted(count for _, count in sent(common, 0.0, 2)) == [3]
    batches = [personal.take(SETTLE), personal.take(SETTLE)]
    assert [{message.user for message in batch.messages} for batch in batches] == [{"alice"}, {"bob"}]


def test_at_the_end_each_user_gets_his_own():
    pace = Pace(personal=True)
    for user in ("alice", "bob", None):
        for policy in ("a", "b"):
            pace.put(a_message_of(policy, user), 0.0)

    batches = pace.take_all()
    assert [(batch.count, {message.user for message in batch.messages}) for batch in batches] == [
        (2, {"alice"}), (2, {"bob"}), (2, {None}),
    ]  # fmt: skip
    assert pace.waiting == {}


def test_a_target_that_fails_is_left_alone_for_a_time_that_doubles_up_to_a_limit():
    pace, now, pauses = Pace(), 0.0, []
    pace.put(a_message_of(), now)
    for _ in range(20):
        now += pace.wait(now) or 0.0
        batch = pace.take(now)
        pace.failed(batch, now)
        pauses.append(pace.wait(now))

    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_nothing_is_lost_while_a_target_fails():
    pace = Pace()
    pace.put(a_message_of("a"), 0.0)
    batch = pace.take(SETTLE)
    pace.put(a_message_of("a"), 2.0)
    pace.put(a_message_of("b"), 2.0)
    pace.failed(batch, 3.0)

    assert pace.take(3.0 + FIRST_PAUSE - 0.1) is None
    assert [count for _, count in sent(pace, 3.0 + FIRST_PAUSE, 5)] == [1, 2]
    assert pace.pause == 0.0


def test_a_message_that_always_fails_does_not_keep_the_others_back():
    # A server that refuses one message is no target that is away; nobody can tell which it is before the next goes.
    pace, out = Pace(), []
    pace.put(a_message_of("bad"), 0.0)
    for second in range(3600):
        if second % 120 == 60:
            pace.put(a_message_of(f"good {second}"), float(second))
        if batch := pace.take(float(second)):
            good = batch.key[0] != "bad"
            (pace.succeeded if good else pace.failed)(batch, float(second))
            out.append(good)

    assert out.count(True) == 30
    assert out.count(False) < 15, "and it is tried less and less often"


def test_a_message_that_never_can_go_out_is_told_once_a_minute_and_stops_nothing():
    pace, dropped = Pace(personal=True), 0
    for second in range(600):
        pace.put(a_message_of("p", None), float(second))
        if batch := pace.take(float(second)):
            pace.dropped(batch, float(second))
            dropped += 1
    pace.put(a_message_of("p", "alice"), 600.0)

    assert dropped == 10
    assert ("p", "alice") in [pace.take(600.0 + SETTLE).key for _ in range(2)]


def test_a_full_queue_refuses_what_is_new_and_still_counts_what_it_knows():
    pace = Pace()
    for number in range(CAPACITY):
        assert pace.put(a_message_of(f"p{number}"), 0.0)

    assert not pace.put(a_message_of("one more"), 0.0)
    assert pace.put(a_message_of("p0"), 0.0)
    assert len(pace.waiting) == CAPACITY


def test_a_flood_takes_no_memory_but_its_number():
    pace = Pace()
    for _ in range(10_000):
        pace.put(a_message_of(), 0.0)

    batch = pace.take(SETTLE)
    assert batch.count == 10_000
    assert len(batch.messages) < 30
    assert len(batch.joined().body) < 10_000


def test_nothing_waits_for_nothing():
    assert Pace().wait(0.0) is None


@pytest.mark.parametrize("personal", [False, True])
@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["u", "v"]), st.floats(0, 50), st.booleans())))
def test_whatever_happens_every_message_is_counted_once(personal, steps):
    pace, now, put, out = Pace(personal=personal), 0.0, 0, 0
    for policy, user, seconds, works in steps:
        now += seconds
        put += pace.put(a_message_of(policy, user), now)
        if batch := pace.take(now):
            out += batch.count if works else 0
            (pace.succeeded if works else pace.failed)(batch, now)

    assert out + sum(batch.count for batch in pace.take_all()) == put
