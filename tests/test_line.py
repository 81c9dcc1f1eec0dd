"""Who stands where in the waiting line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lines import HOUR, a_ticket

from gpuguard.queue.priority import Rules, Ticket, order

NOW = 30 * HOUR


def names(tickets: list[Ticket], usage: dict[int, float] | None = None, **rules: object) -> list[str]:
    return [
        ticket.user
        for ticket in order(tickets, usage or {}, Rules(bound=100 * HOUR) if not rules else Rules(**rules), NOW)
    ]  # type: ignore[arg-type]


def test_whoever_came_first_stands_first_among_equals() -> None:
    assert names([a_ticket(2, since=2.0), a_ticket(1, since=1.0)]) == ["u1", "u2"]


def test_whoever_had_less_gpu_time_stands_first() -> None:
    assert names([a_ticket(1, since=1.0), a_ticket(2, since=2.0)], {1: 5 * HOUR}) == ["u2", "u1"]


def test_without_fair_share_arrival_alone_counts() -> None:
    assert names([a_ticket(1, since=1.0), a_ticket(2, since=2.0)], {1: 5 * HOUR}, fair_share=False) == ["u1", "u2"]


def test_a_priority_above_the_permitted_one_counts_as_the_permitted_one() -> None:
    line = order([a_ticket(1, since=1.0), a_ticket(2, since=2.0, priority=1)], {}, Rules(bound=100 * HOUR), NOW)

    assert [(ticket.uid, ticket.priority) for ticket in line] == [(1, 0), (2, 0)]


def test_a_user_who_may_have_a_priority_stands_before_the_others() -> None:
    tickets = [a_ticket(1, since=1.0), a_ticket(2, since=2.0, priority=1)]

    assert names(tickets, {2: 1e9}, highest_of={2: 1}, bound=100 * HOUR) == ["u2", "u1"]


def test_a_low_priority_stands_behind_everybody() -> None:
    assert names([a_ticket(1, since=1.0, priority=-1), a_ticket(2, since=2.0)], {2: 1e9}) == ["u2", "u1"]


def test_the_permitted_priority_of_one_user_can_be_below_that_of_all() -> None:
    tickets = [a_ticket(1, since=1.0, priority=1), a_ticket(2, since=2.0, priority=1)]

    assert names(tickets, highest=1, highest_of={1: -1}, bound=100 * HOUR) == ["u2", "u1"]


def test_500_tickets_get_a_user_no_further_than_one() -> None:
    flood = [a_ticket(1, since=float(number)) for number in range(500)]
    line = names([*flood, a_ticket(2, since=1000.0)])

    assert line.index("u2") == 1


def test_with_equal_use_whoever_was_served_longest_ago_is_next() -> None:
    flood = [a_ticket(1, since=float(number), served=90.0) for number in range(3)]

    assert names([*flood, a_ticket(2, since=100.0, served=80.0)])[0] == "u2"
    assert names([*flood, a_ticket(2, since=100.0)])[0] == "u2"
    assert names([*flood, a_ticket(2, since=100.0, served=80.0)], {2: 1.0})[0] == "u1"


def test_with_equal_use_places_go_by_turns() -> None:
    tickets = [a_ticket(user, since=user * 10.0 + number, time_limit=HOUR) for user in (1, 2) for number in range(3)]

    assert names(tickets) == ["u1", "u2"] * 3


def test_each_place_counts_what_its_job_would_use() -> None:
    wide = [a_ticket(1, 8, since=number, time_limit=HOUR) for number in (1.0, 2.0)]
    narrow = [a_ticket(2, 1, since=10.0 + number, time_limit=HOUR) for number in range(8)]

    assert names([*wide, *narrow]) == ["u1", *["u2"] * 8, "u1"]


def test_whoever_was_promised_an_earlier_start_stands_first_in_his_class() -> None:
    late = a_ticket(1, since=5.0, promise=NOW - 1)

    assert names([a_ticket(2, since=1.0), late], {1: 1e9}) == ["u1", "u2"]
    assert names([a_ticket(2, since=1.0, priority=1), late], {1: 1e9}, highest=1, bound=100 * HOUR) == ["u2", "u1"]


def test_without_a_promise_the_bound_of_the_site_says_who_has_waited_long_enough() -> None:
    tickets = [a_ticket(1, since=NOW - 25 * HOUR), a_ticket(2, since=NOW - HOUR)]

    assert names(tickets, {1: 1e9}, bound=24 * HOUR) == ["u1", "u2"]
    assert names(tickets, {1: 1e9}, bound=26 * HOUR) == ["u2", "u1"]


def test_only_the_oldest_request_of_a_user_is_lifted_when_it_is_overdue() -> None:
    flood = [a_ticket(1, since=float(number), promise=NOW - 1) for number in range(5)]

    assert names([*flood, a_ticket(2, since=100.0)], {1: 1e9}) == ["u1", "u2", *["u1"] * 4]


def test_a_request_that_is_not_in_line_yet_is_neither_lifted_nor_charged() -> None:
    tickets = [a_ticket(1, since=1.0, after="4711", promise=0.0), a_ticket(1, since=2.0), a_ticket(2, since=3.0)]

    assert names(tickets) == ["u1", "u1", "u2"]
    assert (
        names([*tickets, a_ticket(1, since=0.5, after="x", promise=0.0), a_ticket(1, since=9.0, promise=NOW - 1)])[0]
        == "u1"
    )


tickets = st.builds(
    a_ticket,
    user=st.integers(1, 4),
    gpus=st.integers(1, 8),
    since=st.floats(0, NOW),
    priority=st.integers(-1, 1),
    time_limit=st.none() | st.floats(1, 100 * HOUR),
    promise=st.none() | st.floats(0, 2 * NOW),
    after=st.none() | st.just("x"),
)
usages = st.dictionaries(st.integers(1, 4), st.floats(0, 1e9))


@given(st.lists(tickets, max_size=20), usages, st.booleans())
def test_everybody_has_one_place_and_classes_do_not_mix(
    waiting: list[Ticket], usage: dict[int, float], fair: bool
) -> None:
    line = order(waiting, usage, Rules(fair_share=fair, highest=1), NOW)

    assert sorted(ticket.id for ticket in line) == sorted(ticket.id for ticket in waiting)
    priorities = [ticket.priority for ticket in line]
    assert priorities == sorted(priorities, reverse=True)


@given(st.lists(tickets, max_size=20), usages)
def test_the_order_does_not_depend_on_the_order_in_which_files_are_found(
    waiting: list[Ticket], usage: dict[int, float]
) -> None:
    assert order(waiting, usage, Rules(), NOW) == order(waiting[::-1], usage, Rules(), NOW)


@given(st.lists(tickets, max_size=20), usages)
def test_more_tickets_of_one_user_move_nobody_who_had_less_of_his_first_place(
    waiting: list[Ticket], usage: dict[int, float]
) -> None:
    """Nobody gets in front of the first request of somebody who had less, except with what is overdue."""
    waiting = [one for one in waiting if one.priority == 0 and one.after is None]
    line = order(waiting, usage, Rules(bound=1e9), NOW)
    seen: set[int] = set()
    for place, ticket in enumerate(line):
        if ticket.uid not in seen and not (ticket.promise is not None and ticket.promise < NOW):
            before = [other for other in line[:place] if not (other.promise is not None and other.promise < NOW)]
            assert all(
                usage.get(other.uid, 0.0) <= usage.get(ticket.uid, 0.0) or other.uid == ticket.uid for other in before
            )
        seen.add(ticket.uid)
