"""The order of the line at its edges, and the numbers by which it goes where nobody says others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queues import a_ticket

from gpuguard.queue.priority import PRIORITIES, QueueRules, ReservationKeys, Ticket, due_at, order, overdue, permitted
from gpuguard.request import Request

NOW = 1_000_000.0
HOUR, DAY = 3600.0, 86400.0


def ids(tickets, usage=None, rules=None, now=NOW):
    return [one.id for one in order(tickets, usage or {}, rules or QueueRules(), now)]


def test_where_the_site_says_nothing_it_goes_by_these_numbers():
    assert QueueRules() == QueueRules(True, 7 * DAY, 0.25, 24 * HOUR, 0, {})
    assert ReservationKeys() == ReservationKeys(2, DAY, 14 * DAY, 30 * 60.0)
    assert PRIORITIES == {"low": -1, "normal": 0, "high": 1}  # these stand in tickets, of other versions too


def test_a_ticket_is_of_normal_priority_and_knows_nothing_unless_it_says_so():
    ticket = Ticket("1001.a", 1001, "alice", NOW, (Request(num_gpus=2), Request()))

    assert (ticket.priority, ticket.lasts, ticket.num_gpus, ticket.after) == (0, None, 2, None)


@pytest.mark.parametrize(
    ("asked", "rules", "real"),
    [
        ("high", QueueRules(), "normal"),
        ("low", QueueRules(), "low"),
        ("high", QueueRules(highest=1), "high"),
        ("high", QueueRules(highest_of={1001: 1}), "high"),
        ("normal", QueueRules(highest=1, highest_of={1001: -1}), "low"),
    ],
)
def test_nobody_stands_higher_than_the_site_permits_him(asked, rules, real):
    assert permitted(a_ticket(user=1001, priority=PRIORITIES[asked]), rules) == PRIORITIES[real]


def test_a_promise_that_ends_now_is_kept_yet_and_a_moment_later_it_is_not():
    ticket = a_ticket(id="a", since=NOW - HOUR, promise=NOW)

    assert overdue([ticket], QueueRules(), NOW) == frozenset()
    assert overdue([ticket], QueueRules(), NOW + 1) == {"a"}


def test_without_a_promise_patience_ends_with_the_bound_and_no_promise_is_in_the_past():
    assert due_at(a_ticket(since=NOW, promise=None), QueueRules(bound=60.0)) == NOW + 60
    assert due_at(a_ticket(since=NOW, promise=NOW - HOUR), QueueRules(bound=60.0)) == NOW


def test_of_one_users_tickets_only_the_oldest_that_could_start_is_overdue():
    tickets = [
        a_ticket(id="waits", user=1, since=1.0, after="another"),
        a_ticket(id="younger", user=1, since=3.0),
        a_ticket(id="older", user=1, since=2.0),
    ]

    assert overdue(tickets, QueueRules(), NOW) == overdue(tickets[::-1], QueueRules(), NOW) == {"older"}


@pytest.mark.parametrize(("ago", "first"), [(DAY, "late"), (DAY - 1, "young")])
def test_who_was_served_within_the_bound_is_not_lifted(ago, first):
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY, served=NOW - ago)
    young = a_ticket(id="young", user=2, since=NOW - 10)

    assert ids([young, late], {1: 9e9})[0] == first


def test_without_fair_share_it_goes_by_arrival_whoever_is_overdue():
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY)
    later = a_ticket(id="later", user=2, since=NOW - 2 * DAY)
    early = a_ticket(id="early", user=3, since=NOW - 4 * DAY, promise=NOW + DAY)

    assert ids([later, late, early], rules=QueueRules(fair_share=False)) == ["early", "late", "later"]
    assert ids([later, late, early])[:2] == ["late", "later"]


def test_whoever_used_nothing_comes_before_whoever_used_half_a_second():
    assert ids([a_ticket(id="a", user=1, since=NOW - 20), a_ticket(id="b", user=2, since=NOW - 10)], {1: 0.5}) == [
        "b",
        "a",
    ]


def test_whoever_was_served_longest_ago_is_next_of_those_to_whom_as_much_is_charged():
    tickets = [
        a_ticket(id="lately", user=1, since=NOW - 30, served=NOW - 60),
        a_ticket(id="long ago", user=2, since=NOW - 20, served=NOW - HOUR),
        a_ticket(id="never", user=3, since=NOW - 10, served=None),
    ]

    assert ids(tickets) == ["never", "long ago", "lately"]


@pytest.mark.parametrize(
    ("gpus", "fields", "charged"),
    [
        (1, {}, HOUR),  # nobody knows how long
        (1, {"expected": 100.0}, 100.0),
        (1, {"expected": 100.0, "time_limit": 500.0}, 500.0),
        (4, {"time_limit": 100.0}, 400.0),
        (1, {"after": "another"}, 0.0),  # it has no place yet
    ],
)
def test_each_place_counts_as_if_it_were_used_already(gpus, fields, charged):
    mine = [a_ticket(1, gpus, id=f"mine {n}", since=NOW - 20 + n, **fields) for n in range(2)]

    def second(used):
        his = a_ticket(id="his", user=2, since=NOW - 10)
        return ids([*mine, his], {2: used})[1]

    assert second(charged + 0.5) == "mine 1"
    assert charged == 0.0 or second(charged - 0.5) == "his"


def test_a_higher_class_goes_first_and_in_it_the_same_order():
    tickets = [
        a_ticket(id=f"{name} {n}", user=1, since=NOW + n, priority=PRIORITIES[name])
        for name in ("low", "high", "normal")
        for n in (2, 1)
    ]

    assert ids(tickets, rules=QueueRules(highest=1), now=NOW + 10) == [
        "high 1", "high 2", "normal 1", "normal 2", "low 1", "low 2",
    ]  # fmt: skip


TODAY = 30 * HOUR


def names(tickets: list[Ticket], usage: dict[int, float] | None = None, **rules: object) -> list[str]:
    return [
        ticket.user
        for ticket in order(
            tickets, usage or {}, QueueRules(bound=100 * HOUR) if not rules else QueueRules(**rules), TODAY
        )
    ]  # type: ignore[arg-type]


def test_a_priority_above_the_permitted_one_counts_as_the_permitted_one() -> None:
    line = order([a_ticket(1, since=1.0), a_ticket(2, since=2.0, priority=1)], {}, QueueRules(bound=100 * HOUR), TODAY)

    assert [(ticket.uid, ticket.priority) for ticket in line] == [(1, 0), (2, 0)]


def test_a_user_who_may_have_a_priority_stands_before_the_others() -> None:
    tickets = [a_ticket(1, since=1.0), a_ticket(2, since=2.0, priority=1)]

    assert names(tickets, {2: 1e9}, highest_of={2: 1}, bound=100 * HOUR) == ["u2", "u1"]


def test_500_tickets_get_a_user_no_further_than_one() -> None:
    flood = [a_ticket(1, since=float(number)) for number in range(500)]
    line = names([*flood, a_ticket(2, since=1000.0)])

    assert line.index("u2") == 1


def test_with_equal_use_places_go_by_turns() -> None:
    tickets = [a_ticket(user, since=user * 10.0 + number, time_limit=HOUR) for user in (1, 2) for number in range(3)]

    assert names(tickets) == ["u1", "u2"] * 3


def test_each_place_counts_what_its_job_would_use() -> None:
    wide = [a_ticket(1, 8, since=number, time_limit=HOUR) for number in (1.0, 2.0)]
    narrow = [a_ticket(2, 1, since=10.0 + number, time_limit=HOUR) for number in range(8)]

    assert names([*wide, *narrow]) == ["u1", *["u2"] * 8, "u1"]


def test_whoever_was_promised_an_earlier_start_stands_first_in_his_class() -> None:
    late = a_ticket(1, since=5.0, promise=TODAY - 1)

    assert names([a_ticket(2, since=1.0), late], {1: 1e9}) == ["u1", "u2"]
    assert names([a_ticket(2, since=1.0, priority=1), late], {1: 1e9}, highest=1, bound=100 * HOUR) == ["u2", "u1"]


def test_only_the_oldest_request_of_a_user_is_lifted_when_it_is_overdue() -> None:
    flood = [a_ticket(1, since=float(number), promise=TODAY - 1) for number in range(5)]

    assert names([*flood, a_ticket(2, since=100.0)], {1: 1e9}) == ["u1", "u2", *["u1"] * 4]


def test_a_request_that_is_not_in_line_yet_is_neither_lifted_nor_charged() -> None:
    tickets = [a_ticket(1, since=1.0, after="4711", promise=0.0), a_ticket(1, since=2.0), a_ticket(2, since=3.0)]

    assert names(tickets) == ["u1", "u1", "u2"]
    assert (
        names([*tickets, a_ticket(1, since=0.5, after="x", promise=0.0), a_ticket(1, since=9.0, promise=TODAY - 1)])[0]
        == "u1"
    )


tickets = st.builds(
    a_ticket,
    user=st.integers(1, 4),
    gpus=st.integers(1, 8),
    since=st.floats(0, TODAY),
    priority=st.integers(-1, 1),
    time_limit=st.none() | st.floats(1, 100 * HOUR),
    promise=st.none() | st.floats(0, 2 * TODAY),
    after=st.none() | st.just("x"),
)
usages = st.dictionaries(st.integers(1, 4), st.floats(0, 1e9))


@given(st.lists(tickets, max_size=20), usages, st.booleans())
def test_everybody_has_one_place_and_classes_do_not_mix(waiting, usage, fair):
    line = order(waiting, usage, QueueRules(fair_share=fair, highest=1), TODAY)

    assert sorted(ticket.id for ticket in line) == sorted(ticket.id for ticket in waiting)
    priorities = [ticket.priority for ticket in line]
    assert priorities == sorted(priorities, reverse=True)


@given(st.lists(tickets, max_size=20), usages)
def test_the_order_does_not_depend_on_the_order_in_which_files_are_found(waiting, usage):
    assert order(waiting, usage, QueueRules(), TODAY) == order(waiting[::-1], usage, QueueRules(), TODAY)


@given(st.lists(tickets, max_size=20), usages)
def test_more_tickets_of_one_user_move_nobody_who_had_less_of_his_first_place(waiting, usage):
    """Nobody gets in front of the first request of somebody who had less, except with what is overdue."""
    waiting = [one for one in waiting if one.priority == 0 and one.after is None]
    line = order(waiting, usage, QueueRules(bound=1e9), TODAY)
    seen: set[int] = set()
    for place, ticket in enumerate(line):
        if ticket.uid not in seen and not (ticket.promise is not None and ticket.promise < TODAY):
            before = [other for other in line[:place] if not (other.promise is not None and other.promise < TODAY)]
            assert all(
                usage.get(other.uid, 0.0) <= usage.get(ticket.uid, 0.0) or other.uid == ticket.uid for other in before
            )
        seen.add(ticket.uid)
