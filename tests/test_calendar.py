"""Reservations in the plan: what is kept for them, and that no job that keeps its limit ever breaks one."""

from dataclasses import replace

import pytest
from chances import often
from hypothesis import example, given, settings
from hypothesis import strategies as st
from queues import HOUR, a_fit, a_ticket

from gpuguard.queue import backfill as plans
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, plan
from gpuguard.queue.calendar import (
    Calendars,
    DeviceAvailability,
    Reservation,
    StartingJob,
    calendar,
    can_be_met,
    clear_at,
)
from gpuguard.queue.priority import QueueRules, Ticket, order
from gpuguard.request import Request

NAMES = ("d0", "d1", "d2", "d3")
FREE = DeviceAvailability(dict.fromkeys(NAMES, 0.0))


def a_reservation(gpus: int = 1, begins: float = 1.0, ends: float = 2.0, *devices: str, user: int = 9) -> Reservation:
    """Begin and end in hours."""
    name = f"{user}.{gpus}.{begins}.{ends}"
    return Reservation(name, 0, user, f"u{user}", gpus, begins * HOUR, ends * HOUR, devices or NAMES)


def a_group(of: Reservation, *members: int) -> Reservation:
    """The same, for a group of these."""
    return replace(of, uid=None, user=None, gid=50, group="vision", members=frozenset(members))


def kept(
    reservations: list[Reservation], availability: DeviceAvailability = FREE, liked: tuple[str, ...] = NAMES
) -> dict[str, set[int | None]]:
    """uuid -> for whom."""
    last = {uuid: float(position) for position, uuid in enumerate(reversed(liked), 1)}
    found = calendar(reservations, availability, 0.0, last)
    return {uuid: {span.reservation.uid for span in spans} for uuid, spans in found.items()}


def test_as_many_devices_are_kept_as_are_reserved_and_those_that_are_liked_least() -> None:
    assert kept([a_reservation(2)]) == {"d2": {9}, "d3": {9}}


def test_reservations_at_the_same_time_get_devices_of_their_own_and_later_ones_the_same() -> None:
    together, later = a_reservation(2, 1, 2, user=7), a_reservation(2, 2, 3, user=7)

    assert sorted(kept([a_reservation(2), together])) == list(NAMES)
    assert kept([a_reservation(2), later]) == {"d2": {7, 9}, "d3": {7, 9}}


def test_one_that_needs_a_certain_device_gets_it_although_another_one_came_first() -> None:
    assert kept([a_reservation(1), a_reservation(1, 1, 2, "d3", user=7)]) == {"d2": {9}, "d3": {7}}


def test_what_its_user_holds_is_kept_first_and_then_what_is_free_in_time_by_a_limit() -> None:
    limited = DeviceAvailability({"d0": HOUR, "d1": 1.5 * HOUR, "d2": 0.0, "d3": 0.0})

    assert kept([a_reservation(1)], replace(limited, users={"d1": {9}})) == {"d1": {9}}
    assert kept([a_reservation(1)], replace(limited, users={"d1": {8}})) == {"d0": {9}}
    assert kept([a_reservation(3)], limited) == {"d0": {9}, "d2": {9}, "d3": {9}}


def test_reservations_one_after_the_other_keep_the_same_device_although_not_all_of_them_could_have_it_always() -> None:
    first, second = a_reservation(1, 1, 2), a_reservation(1, 2, 3, "d3", user=7)

    assert kept([first, second]) == kept([second, first]) == {"d3": {7, 9}}


def test_nothing_is_kept_for_a_reservation_past_its_end() -> None:
    assert kept([a_reservation(1, 1, 2), a_reservation(1, 1, 3, user=7)]) == {"d3": {7, 9}, "d2": {7}}
    assert kept([a_reservation(1, -1, 0), a_reservation(1, -1, 0, "d3", user=7)]) == {}


def test_one_that_needs_a_device_gets_it_over_several_that_can_have_others() -> None:
    others = [a_reservation(1, 1, 2, "d3", "d1", user=1), a_reservation(1, 1, 2, "d3", "d2", user=2)]

    assert kept([*others, a_reservation(1, 1, 2, "d2", user=3)]) == {"d1": {1}, "d3": {2}, "d2": {3}}


def test_what_a_user_may_leave_behind_is_kept_where_something_is_kept_for_that_user_already() -> None:
    calendars = Calendars([a_reservation(2, 0, 1)], FREE, 0.0)
    coming = [StartingJob(id="job", uid=9, devices=("d3",), until=float("inf"))]

    assert set(calendars.reserved_beside(coming, NAMES, 1)) == {"d2", "d3"}


def test_what_is_kept_for_a_group_is_kept_from_all_but_its_members() -> None:
    (span,) = calendar([a_group(a_reservation(1), 8, 9)], FREE, 0.0)["d0"]

    assert [span.excludes(uid, 1.0, 1e9) for uid in (7, 8, 9)] == [True, False, False]


def test_members_of_a_group_go_first_on_what_is_reserved_for_it_and_together_no_further() -> None:
    queue = [a_ticket(1, 2), a_ticket(8, 1), a_ticket(9, 1), a_ticket(9, 1)]
    positions = planned(queue, [a_group(a_reservation(2, 0, 1), 8, 9)])
    others = planned(queue, [a_group(a_reservation(2, 0, 1), 8)])

    assert [position.now for position in positions] == [True, True, True, False]
    assert [position.now for position in others] == [True, True, False, False]


def test_what_a_member_holds_counts_as_used_by_the_group_and_what_another_member_may_leave_is_kept() -> None:
    reservation = a_group(a_reservation(2, 0, 1), 8, 9)
    calendars = Calendars([replace(reservation, held=("d3",))], FREE, 0.0)
    coming = [StartingJob(id="job", uid=8, devices=("d2",), until=float("inf"))]

    assert calendars.uses_own_reservations(9, ["d2"], [])
    assert not calendars.uses_own_reservations(9, ["d1"], coming)
    assert not calendars.uses_own_reservations(7, ["d2"], [])
    assert set(calendars.reserved_beside(coming, NAMES, 1)) == {"d2", "d3"}
    assert calendars.reserved_beside(coming, NAMES, 9) == {}


def test_it_is_called_by_its_group_and_where_that_has_no_name_any_more_it_says_so() -> None:
    group = a_group(a_reservation())

    assert (a_reservation().whose, group.whose) == ("u9", "group vision")
    assert replace(group, group=None).whose == "group 50 (unknown here)"


def test_a_reservation_has_begun_from_its_begin_until_its_end() -> None:
    reservation = a_reservation(1, 1, 2)

    assert [Calendars([reservation], FREE, hour * HOUR).begun_for(9) for hour in (0.9, 1, 2)] == [[], [reservation], []]


def test_what_is_missing_is_kept_as_soon_as_a_limit_sets_it_free() -> None:
    (span,) = calendar([a_reservation(2)], DeviceAvailability({"d0": 0.0, "d1": 1.5 * HOUR}), 0.0)["d1"]

    assert (span.begins, span.ends) == (1.5 * HOUR, 2 * HOUR)


def test_an_instance_is_kept_and_the_others_of_its_gpu_are_not() -> None:
    family = DeviceAvailability({"i0": 0.0, "i1": 0.0}, relatives={"i0": ("g",), "i1": ("g",)})

    assert set(kept([a_reservation(1, 1, 2, "i0", "i1")], family, ("i0", "i1"))) == {"i1"}


def test_a_job_finds_its_devices_before_between_and_after_reservations() -> None:
    spans = calendar([a_reservation(4, 1, 2), a_reservation(4, 3, 4)], FREE, 0.0)["d0"]

    assert clear_at(spans, 1, 0.0, HOUR) == 0.0
    assert clear_at(spans, 1, 1.0, HOUR) == 2 * HOUR
    assert clear_at(spans, 1, 1.0, HOUR + 1) == 4 * HOUR
    assert clear_at(spans, 9, 1.0, HOUR + 1) == 1.0
    assert [span.excludes(1, 0.0, HOUR) for span in spans] == [False, False]
    assert [span.excludes(1, 0.0, HOUR + 1) for span in spans] == [True, False]
    assert [span.excludes(1, 2 * HOUR, HOUR) for span in spans] == [False, False]


def test_what_can_be_met_together() -> None:
    assert can_be_met(a_reservation(4), [], NAMES)
    assert not can_be_met(a_reservation(4), [], NAMES[:3])
    assert not can_be_met(a_reservation(3), [a_reservation(2, 1.5, 3)], NAMES)
    assert can_be_met(a_reservation(3), [a_reservation(2, 2, 3)], NAMES)
    assert can_be_met(a_reservation(2, 0, 2), [a_reservation(2, 0, 1), a_reservation(2, 1, 2)], NAMES)
    assert not can_be_met(a_reservation(1, 1, 2, "d0"), [a_reservation(1, 1, 2, "d0")], NAMES)


def test_a_job_cannot_move_for_a_reservation_that_needs_its_device_later() -> None:
    first, second = a_reservation(1, 0, 2, "d0", "d1"), a_reservation(1, 0, 1, "d1", user=8)

    assert can_be_met(second, [first], NAMES)
    assert not can_be_met(a_reservation(1, 1, 3, "d0", user=7), [first, second], NAMES)


def planned(
    queue: list[Ticket], reservations: list[Reservation], fits: dict[Request, Fit] | None = None
) -> list[QueuePosition]:
    fits = fits or {request: a_fit(" ".join(NAMES)) for ticket in queue for request in ticket.requests}
    machine = Machine(fits, reservations=tuple(reservations), free=frozenset(NAMES))
    return plan(queue, machine, {}, QueueRules(), 0.0)


@pytest.mark.parametrize(
    ("gpus", "own", "starts"),
    [(4, [2], [False, True]), (4, [4], [False, False]), (2, [1, 1, 1, 1], [True, True, True, False, False])],
    ids=["no more", "more", "two jobs of one"],
)
def test_its_user_goes_before_all_others_on_what_is_reserved_and_no_further(gpus, own, starts) -> None:
    queue = [a_ticket(1, gpus), *(a_ticket(9, number) for number in own)]

    assert [position.now for position in planned(queue, [a_reservation(2, 0, 1)])] == starts


def test_its_user_goes_first_on_a_certain_device_that_others_like_too() -> None:
    only = Request(devices=("d0",))
    queue = [a_ticket(1, 1, time_limit=60.0), a_ticket(9, requests=[only])]
    fits = {queue[0].requests[0]: a_fit(" ".join(NAMES)), only: a_fit("d0")}
    positions = planned(queue, [a_reservation(1, 0, 1)], fits)

    assert [position.now for position in positions] == [True, True]
    assert positions[1].devices == ("d0",)


def test_what_is_reserved_for_a_user_pushes_others_onto_no_better_devices() -> None:
    own, others = a_reservation(1, 1, 2), a_reservation(1, 1, 2, user=8)
    (position,) = planned([a_ticket(9, 3)], [own, others])

    assert (position.now, set(position.kept)) == (True, {"d3"})


def test_a_start_is_promised_with_the_reservations_in_mind() -> None:
    first, second = a_ticket(1, 4, time_limit=HOUR), a_ticket(2, 2, time_limit=HOUR)

    assert [position.in_order for position in planned([first, second], [a_reservation(4, 1, 2)])] == [0.0, 2 * HOUR]


class Server:
    """A server that is used as the plan says; jobs end in time, which is not known of those without a limit."""

    def __init__(self, reservations: list[Reservation]) -> None:
        self.reservations = reservations
        self.running: dict[str, tuple[Ticket, float, tuple[str, ...]]] = {}  # id -> ticket, end, devices
        self.queue: list[Ticket] = []

    def look(self, now: float) -> list[str]:
        """Ids of the tickets that start."""
        self.running = {name: job for name, job in self.running.items() if job[1] > now}
        busy = {uuid: ticket for ticket, _, devices in self.running.values() for uuid in devices}
        limits = {uuid: ticket.since + ticket.time_limit for uuid, ticket in busy.items() if ticket.time_limit}
        free = frozenset(NAMES) - busy.keys()
        reservations = tuple(
            replace(kept, held=tuple(uuid for uuid in kept.devices if uuid in busy and kept.admits(busy[uuid].uid)))
            for kept in self.reservations
            if kept.ends > now
        )
        requests = {request: request.devices or NAMES for ticket in self.queue for request in ticket.requests}
        fits = {request: Fit(devices, free & set(devices)) for request, devices in requests.items()}
        machine = Machine(fits, limits, reservations=reservations, free=free)
        positions = plan(order(self.queue, {}, QueueRules(), now), machine, {}, QueueRules(), now)
        for position in (position for position in positions if position.now):
            ticket = replace(position.ticket, since=now)
            lasts = ticket.time_limit or ticket.expected or HOUR
            assert not {uuid for uuid in position.devices if uuid in busy}
            self.running[ticket.id] = (ticket, now + lasts, position.devices)
            self.queue.remove(position.ticket)
        return [position.ticket.id for position in positions if position.now]


spells = st.tuples(
    st.integers(1, 3), st.integers(0, 8), st.integers(1, 4), st.sampled_from([NAMES, NAMES[:2], NAMES[1:]])
)
jobs = st.tuples(
    st.integers(0, 8), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.sampled_from([NAMES, NAMES[2:]])
)


def broken(
    wanted: list[tuple[int, int, int, tuple[str, ...]]],
    others: list[tuple[int, int, int, bool, tuple[str, ...]]],
    grouped: bool = False,
) -> list[str]:
    """The users who could not start when their reservations began, on a server of four devices.

    *grouped*: each is for a group of two, of whom both come, if they can have devices both.
    """
    reservations: list[Reservation] = []
    for number, (gpus, begins, hours, devices) in enumerate(wanted):
        reservation = a_reservation(gpus, begins, begins + hours, *devices, user=100 + number)
        reservation = a_group(reservation, 100 + number, 200 + number) if grouped else reservation
        if can_be_met(reservation, reservations, NAMES):
            reservations.append(reservation)
    server, failed = Server(reservations), []
    for now in range(0, 13):
        for number, (at, gpus, hours, limited, devices) in enumerate(others):
            if at == now:
                length = {"time_limit": hours * HOUR} if limited else {"expected": hours * HOUR}
                request = Request(num_gpus=min(gpus, len(devices)), devices=devices)
                server.queue.append(a_ticket(number % 3 + 1, requests=[request], since=now * HOUR, **length))
        coming = []
        for reservation in (one for one in reservations if one.begins == now * HOUR):
            users = [user for user in range(300) if reservation.admits(user)][: reservation.num_gpus]
            counts = [reservation.num_gpus - len(users) + 1, 1]
            for user, count in zip(users, counts, strict=False):
                request = Request(num_gpus=count, devices=reservation.devices)
                limit = reservation.ends - reservation.begins
                coming.append(a_ticket(user, requests=[request], since=now * HOUR, time_limit=limit))
        server.queue += coming
        started = server.look(now * HOUR)
        failed += [ticket.user for ticket in coming if ticket.id not in started]
    return failed


@settings(max_examples=often(300))
@given(st.lists(spells, min_size=1, max_size=4), st.lists(jobs, max_size=8), st.booleans())
@example(
    [(1, 0, 1, NAMES), (1, 0, 1, NAMES), (1, 2, 1, NAMES[:2]), (2, 1, 2, NAMES)],
    [(0, 2, 1, False, NAMES), (0, 2, 2, True, NAMES)],
    False,
)
@example([(1, 0, 2, NAMES[:2]), (1, 0, 1, NAMES[1:]), (1, 1, 2, NAMES[:2])], [], False)
def test_no_reservation_is_ever_broken_while_limits_are_kept(wanted, others, grouped) -> None:
    assert broken(wanted, others, grouped) == []


@pytest.mark.parametrize("fault", ["clear_at", "surely_over_after"])
def test_the_property_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"clear_at": lambda spans, uid, earliest, lasts: earliest, "surely_over_after": lambda ticket: 60.0}
    monkeypatch.setattr(plans, fault, wrong[fault])

    assert broken([(3, 2, 1, NAMES)], [(1, 2, 3, True, NAMES), (1, 2, 3, False, NAMES)])
