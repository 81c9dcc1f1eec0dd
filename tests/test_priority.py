"""The order of the queue at its edges, and the numbers by which it goes where the site says no others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queues import HOUR, a_ticket

from gpuguard.queue.priority import PRIORITIES, QueueRules, ReservationKeys, Ticket, due_at, order, overdue, permitted
from gpuguard.request import Request

NOW = 1_000_000.0
DAY = 86400.0


def ids(tickets, usage=None, now=NOW, **rules):
    return [ticket.id for ticket in order(tickets, usage or {}, QueueRules(**rules), now)]


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
        ("high", {}, "normal"),
        ("low", {}, "low"),
        ("high", {"highest": 1}, "high"),
        ("high", {"highest_of": {1001: 1}}, "high"),
        ("normal", {"highest": 1, "highest_of": {1001: -1}}, "low"),
    ],
)
def test_a_priority_above_the_permitted_one_counts_as_the_permitted_one(asked, rules, real):
    ticket = a_ticket(user=1001, priority=PRIORITIES[asked])

    assert permitted(ticket, QueueRules(**rules)) == PRIORITIES[real]
    assert order([ticket], {}, QueueRules(**rules), NOW)[0].priority == PRIORITIES[real]


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
def test_a_user_who_was_served_within_the_bound_is_not_lifted(ago, first):
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY, served=NOW - ago)
    young = a_ticket(id="young", user=2, since=NOW - 10)

    assert ids([young, late], {1: 9e9})[0] == first


def test_without_fair_share_it_goes_by_arrival_whatever_is_overdue():
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY)
    later = a_ticket(id="later", user=2, since=NOW - 2 * DAY)
    early = a_ticket(id="early", user=3, since=NOW - 4 * DAY, promise=NOW + DAY)

    assert ids([later, late, early], fair_share=False) == ["early", "late", "later"]
    assert ids([later, late, early])[:2] == ["late", "later"]


def test_a_user_who_used_nothing_comes_before_one_who_used_half_a_second():
    tickets = [a_ticket(id="a", user=1, since=NOW - 20), a_ticket(id="b", user=2, since=NOW - 10)]

    assert ids(tickets, {1: 0.5}) == ["b", "a"]


def test_of_users_to_whom_as_much_is_charged_the_one_who_was_served_longest_ago_is_next():
    tickets = [
        a_ticket(id="lately", user=1, since=NOW - 30, served=NOW - 60),
        a_ticket(id="long ago", user=2, since=NOW - 20, served=NOW - HOUR),
        a_ticket(id="never", user=3, since=NOW - 10, served=None),
    ]

    assert ids(tickets) == ["never", "long ago", "lately"]


@pytest.mark.parametrize(
    ("gpus", "fields", "charged"),
    [
        (1, {}, HOUR),  # it is not known how long
        (1, {"expected": 100.0}, 100.0),
        (1, {"expected": 100.0, "time_limit": 500.0}, 500.0),
        (4, {"time_limit": 100.0}, 400.0),
        (1, {"after": "another"}, 0.0),  # it is not queued yet
    ],
)
def test_each_ticket_counts_as_if_its_job_had_run_already(gpus, fields, charged):
    mine = [a_ticket(1, gpus, id=f"mine {n}", since=NOW - 20 + n, **fields) for n in range(2)]

    def second(used):
        return ids([*mine, a_ticket(id="another user's", user=2, since=NOW - 10)], {2: used})[1]

    assert second(charged + 0.5) == "mine 1"
    assert charged == 0.0 or second(charged - 0.5) == "another user's"


def test_500_tickets_get_a_user_no_further_than_one():
    flood = [a_ticket(1, since=NOW - 1000 + number) for number in range(500)]

    assert ids([*flood, a_ticket(2, id="another user's", since=NOW)])[1] == "another user's"


def test_a_higher_class_goes_first_and_in_it_the_same_order():
    tickets = [
        a_ticket(id=f"{name} {n}", user=1, since=NOW + n, priority=PRIORITIES[name])
        for name in ("low", "high", "normal")
        for n in (2, 1)
    ]

    assert ids(tickets, now=NOW + 10, highest=1) == ["high 1", "high 2", "normal 1", "normal 2", "low 1", "low 2"]


def test_a_ticket_that_was_promised_an_earlier_start_is_first_in_its_class():
    late = a_ticket(1, id="late", since=NOW - 5, promise=NOW - 1)

    assert ids([a_ticket(2, id="a", since=NOW - 9), late], {1: 1e9}) == ["late", "a"]
    assert ids([a_ticket(2, id="a", since=NOW - 9, priority=1), late], {1: 1e9}, highest=1) == ["a", "late"]


TODAY = 30 * HOUR
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
def test_each_ticket_has_one_position_and_classes_do_not_mix(waiting, usage, fair):
    queue = order(waiting, usage, QueueRules(fair_share=fair, highest=1), TODAY)

    assert sorted(ticket.id for ticket in queue) == sorted(ticket.id for ticket in waiting)
    priorities = [ticket.priority for ticket in queue]
    assert priorities == sorted(priorities, reverse=True)


@given(st.lists(tickets, max_size=20), usages)
def test_the_order_does_not_depend_on_the_order_in_which_files_are_found(waiting, usage):
    assert order(waiting, usage, QueueRules(), TODAY) == order(waiting[::-1], usage, QueueRules(), TODAY)


@given(st.lists(tickets, max_size=20), usages)
def test_no_user_gets_before_the_first_request_of_one_who_had_less_except_with_what_is_overdue(waiting, usage):
    waiting = [ticket for ticket in waiting if ticket.priority == 0 and ticket.after is None]
    queue = order(waiting, usage, QueueRules(bound=1e9), TODAY)
    in_time = [ticket for ticket in queue if ticket.promise is None or ticket.promise >= TODAY]
    first = {ticket.uid: ticket.id for ticket in reversed(queue)}
    for number, ticket in enumerate(in_time):
        if ticket.id == first[ticket.uid]:
            used = [usage.get(other.uid, 0.0) for other in in_time[:number]]
            assert all(other <= usage.get(ticket.uid, 0.0) for other in used)
