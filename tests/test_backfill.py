"""Who of the line starts now, who when, and why not earlier."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queues import HOUR, a_machine, a_ticket, planned, started

from gpuguard.queue import backfill as plans
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, plan, promise
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import QueueRules, Ticket, order
from gpuguard.request import Request

SHARE = Request(share=True, memory=2**30)


def test_whoever_fits_starts_now_on_the_devices_that_he_likes_best() -> None:
    (position,) = planned(line := [a_ticket(gpus=2)], a_machine(line))

    assert position.now
    assert position.devices == ("d0", "d1")
    assert position.start == position.in_order == 0.0


def test_several_start_at_once_and_never_on_the_same_devices() -> None:
    positions = planned(line := [a_ticket(gpus=2), a_ticket(2, 1), a_ticket(3, 1)], a_machine(line, 4))

    assert len(started(positions)) == 3
    assert sorted(uuid for position in positions for uuid in position.devices) == ["d0", "d1", "d2", "d3"]


def test_the_start_of_a_request_is_the_end_of_the_last_claim_that_it_waits_for() -> None:
    (position,) = planned(
        line := [a_ticket(gpus=2)], a_machine(line, 3, free=0, ends={"d0": 9.0, "d1": 5.0, "d2": 7.0})
    )

    assert (position.start, position.devices, position.now) == (7.0, ("d1", "d2"), False)


@pytest.mark.parametrize("end", [-1.0, 0.0])
def test_a_claim_that_should_have_ended_tells_nothing(end: float) -> None:
    (position,) = planned(line := [a_ticket()], a_machine(line, 1, free=0, ends={"d0": end}))

    assert (position.start, position.in_order) == (None, None)
    assert position.request == Request()  # it can start some day


def test_a_request_for_more_than_there_is_can_never_start() -> None:
    (position,) = planned(line := [a_ticket(gpus=9)], a_machine(line))

    assert (position.request, position.devices, position.now) == (None, (), False)


def test_a_short_job_goes_first_where_it_puts_off_nobody() -> None:
    line = [a_ticket(1, 2, time_limit=10.0), a_ticket(2, 1, time_limit=4.0)]

    assert started(planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))) == [line[1].id]


def test_a_long_job_that_would_put_off_the_first_waits_and_says_for_whom() -> None:
    line = [a_ticket(1, 2, time_limit=10.0), a_ticket(2, 1, time_limit=6.0)]
    positions = planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))

    assert started(positions) == []
    assert [position.held_back_by for position in positions] == [None, line[0].id]


def test_a_job_of_unknown_length_never_goes_before_a_planned_start_on_its_devices() -> None:
    line = [a_ticket(1, 2), a_ticket(2, 1)]

    assert started(planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))) == []


def test_a_job_of_unknown_length_takes_a_device_that_the_first_does_not_need() -> None:
    line = [a_ticket(1, 2), a_ticket(2, 1)]

    assert started(planned(line, a_machine(line, 3, free=["d2"], ends={"d0": 5.0, "d1": 5.0}))) == [line[1].id]
    assert started(planned(line, a_machine(line, 3, free=["d2"], ends={"d0": 5.0}))) == []


def test_a_start_may_be_put_off_until_the_promise_and_no_further() -> None:
    def passing(limit: float, promised: float) -> list[str]:
        line = [a_ticket(1, 2, promise=promised, time_limit=1.0), a_ticket(2, 1, time_limit=limit)]
        return started(planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0})))

    assert passing(6.0, promised=6.25)
    assert not passing(6.5, promised=6.25)


def test_of_two_that_fit_the_shorter_one_goes_first_if_the_other_one_can_wait_by_his_promise() -> None:
    line = [a_ticket(1, time_limit=50.0, promise=5.0), a_ticket(2, time_limit=5.0)]

    assert started(planned(line, a_machine(line, 1))) == [line[1].id]


def test_whoever_is_put_off_hears_when_he_starts_then() -> None:
    line = [a_ticket(1, 2, promise=6.25, time_limit=1.0), a_ticket(2, 1, time_limit=6.0)]
    first, second = planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))

    assert second.now
    assert (first.in_order, first.start) == (5.0, 6.0)


def test_nobody_whose_user_had_more_puts_off_a_start_even_within_the_promise() -> None:
    line = [a_ticket(1, 2, promise=10.0, time_limit=1.0), a_ticket(2, 1, time_limit=6.0)]
    machine = a_machine(line, 2, free=1, ends={"d1": 5.0})

    assert started(planned(line, machine, {2: 0.5})) == []
    assert started(planned([line[0], replace(line[1], owner_uid=7)], machine, {7: 0.5})) == []
    assert started(planned(line, machine, {1: 0.5})) == [line[1].id]
    assert started(planned(line, machine, {2: 0.5}, fair_share=False)) == [line[1].id]


def test_a_lower_class_puts_off_nobody() -> None:
    line = [a_ticket(1, 2, promise=10.0, time_limit=1.0), a_ticket(2, 1, time_limit=6.0, priority=-1)]

    assert started(planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))) == []


def test_where_no_start_can_be_planned_small_requests_pass_until_the_bound() -> None:
    def passing(waited: float, **fields: float) -> list[str]:
        line = [a_ticket(1, 2, since=-waited, **fields), a_ticket(2, 1)]
        return started(planned(line, a_machine(line, 2, free=1), bound=HOUR))

    assert passing(waited=HOUR)
    assert passing(waited=HOUR, promise=-1.0)  # no promise makes the bound shorter
    assert not passing(waited=HOUR + 1)


def test_a_device_is_drained_only_for_whoever_could_use_it() -> None:
    wide = Request(num_gpus=2, devices=("d0", "d1"))
    line = [a_ticket(1, requests=[wide], since=-2 * HOUR), a_ticket(2)]
    fits = {wide: Fit(("d0", "d1"), frozenset({"d0"})), Request(): Fit(("d0", "d1", "d2"), frozenset({"d0", "d2"}))}
    (first, second) = planned(
        line, Machine({**fits, Request(): Fit(("d2", "d0"), frozenset({"d0", "d2"}))}), bound=HOUR
    )

    assert (first.now, second.now, second.devices) == (False, True, ("d2",))


def test_during_draining_a_job_with_a_limit_may_use_the_device_if_the_end_is_planned() -> None:
    def passing(**fields: float) -> list[str]:
        line = [a_ticket(1, 2, since=-30 * HOUR, promise=-1.0), a_ticket(2, 1, **fields)]
        return started(planned(line, a_machine(line, 2, free=1, ends={"d1": 50.0})))

    assert passing(time_limit=40.0)
    assert not passing(time_limit=60.0)
    assert not passing(expected=40.0)  # nobody sees to it that it ends then


def test_the_promise_is_a_quarter_more_than_the_planned_wait() -> None:
    (position,) = planned(line := [a_ticket()], a_machine(line, 1, free=0, ends={"d0": 8.0}))

    assert (promise(position, QueueRules(), 0.0), promise(position, QueueRules(), 4.0)) == (10.0, 9.0)
    assert promise(QueuePosition(line[0], 1, None, None), QueueRules(), 0.0) is None


def test_the_second_way_is_taken_where_it_starts_earlier() -> None:
    wide, narrow = Request(num_gpus=2), Request(num_gpus=1)
    line = [a_ticket(requests=[wide, narrow])]

    assert planned(line, a_machine(line, 2))[0].request == wide
    assert planned(line, a_machine(line, 2, free=1))[0].request == narrow
    assert planned(line, a_machine(line, 2, free=0))[0].request == wide


def test_a_gpu_and_its_instances_are_never_planned_beside_each_other() -> None:
    gpu, part = Request(devices=("g",)), Request(mig="3g.40gb")
    line = [a_ticket(1, requests=[gpu]), a_ticket(2, requests=[part]), a_ticket(3, requests=[part])]
    fits = {gpu: Fit(("g",), frozenset("g")), part: Fit(("m1", "m2"), frozenset({"m1", "m2"}))}
    relatives = {"g": ("m1", "m2"), "m1": ("g",), "m2": ("g",)}

    assert started(planned(line, Machine(fits, relatives=relatives))) == [line[0].id]
    assert started(planned(line[1:], Machine(fits, relatives=relatives))) == [line[1].id, line[2].id]


def test_shares_start_beside_each_other_and_not_beside_whoever_wants_the_device_alone() -> None:
    line = [a_ticket(1, requests=[SHARE]), a_ticket(2, requests=[SHARE]), a_ticket(3)]

    assert started(planned(line, a_machine(line, 1))) == [line[0].id, line[1].id]
    assert started(planned(line[::-1], a_machine(line, 1))) == [line[2].id]


def beside_an_endless_share(*line: Ticket) -> list[QueuePosition]:
    """The plan where d1 is somebody's, and shares fit beside the one on d0, both without end; d1 is liked best."""
    fits = dict.fromkeys((request for ticket in line for request in ticket.requests), Fit(("d1", "d0"), frozenset()))
    return planned(line, Machine(fits | {SHARE: Fit(("d0",), frozenset({"d0"}))}))


def test_the_end_of_a_share_that_joins_another_one_tells_nothing_of_the_device() -> None:
    share, alone = beside_an_endless_share(a_ticket(1, requests=[SHARE], time_limit=2.0), a_ticket(2))

    assert (share.now, alone.start, alone.in_order) == (True, None, None)


def test_two_shares_are_not_held_back_for_each_other_by_one_who_wants_the_device_alone() -> None:
    line = [a_ticket(1), a_ticket(2, requests=[SHARE], time_limit=9.0), a_ticket(3, requests=[SHARE], time_limit=2.0)]

    assert started(beside_an_endless_share(*line)) == [line[1].id, line[2].id]


def test_a_gpu_is_shared_when_the_last_of_its_instances_is_free() -> None:
    part = Request(mig="3g.40gb")
    line = [
        *(a_ticket(1, requests=[part], time_limit=seconds) for seconds in (9.0, 5.0)),
        a_ticket(2, requests=[SHARE]),
    ]
    fits = {part: Fit(("m1", "m2"), frozenset({"m1", "m2"})), SHARE: Fit(("g",), frozenset("g"))}
    relatives = {"g": ("m1", "m2"), "m1": ("g",), "m2": ("g",)}

    assert planned(line, Machine(fits, relatives=relatives))[2].start == 9.0


def test_whoever_has_no_place_yet_holds_up_nobody() -> None:
    line = [a_ticket(1, 2, after="4711"), a_ticket(2, 1)]

    assert started(planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))) == [line[1].id]


def test_no_user_can_fill_the_line_before_another_one() -> None:
    flood = [a_ticket(1, 8) for _ in range(plans.MOST_PLANNED + 50)]
    line = [*flood, a_ticket(2)]

    assert started(planned(line, a_machine(line, free=1))) == [line[-1].id]


def test_256_places_are_planned_and_of_each_user_his_first_four_wherever_they_stand() -> None:
    flood, his = [a_ticket(1) for _ in range(300)], [a_ticket(2) for _ in range(6)]

    assert plans.planned_for([*flood, *his]) == [*flood[:256], *his[:4]]


def test_whoever_stands_too_far_behind_for_a_plan_is_not_refused() -> None:
    line = [a_ticket(1, 8) for _ in range(plans.MOST_PLANNED + 50)]
    last = planned(line, a_machine(line, free=1))[-1]

    assert (last.request, last.devices, last.start) == (line[-1].requests[0], (), None)


def test_it_is_nobodys_turn_unless_the_plan_says_so() -> None:
    assert not QueuePosition(a_ticket(), 1, None, None).now


def test_a_reason_to_wait_is_the_last_one() -> None:
    """What stood in the way of a request when others had not started yet does not, once they have."""
    line = [a_ticket(1, 1, time_limit=9.0), a_ticket(2, 1, time_limit=5.0)]
    positions = planned(line, a_machine(line, 1))

    assert [(position.now, position.start, position.held_back_by) for position in positions] == [
        (True, 0.0, None),
        (False, 9.0, None),
    ]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Ticket], Machine, dict[int, float]]:
    devices = [f"d{number}" for number in range(draw(st.integers(1, 6)))]
    asked = [Request(num_gpus=count) for count in (1, 2, 4)]
    fits = {}
    opened = draw(st.sets(st.sampled_from(devices)))
    for request in asked:
        eligible = draw(st.permutations(devices))[: draw(st.integers(0, len(devices)))]
        fits[request] = Fit(tuple(eligible), frozenset(eligible) & opened)
    ends = draw(st.dictionaries(st.sampled_from(devices), st.floats(1, 100)))
    lasts = st.none() | st.integers(1, 50).map(float)
    tickets = st.builds(
        a_ticket,
        user=st.integers(1, 3),
        requests=st.lists(st.sampled_from(asked), min_size=1, max_size=2, unique=True),
        since=st.floats(-100, 0),
        time_limit=lasts,
        expected=lasts,
        promise=st.none() | st.floats(-50, 100),
        priority=st.integers(-1, 0),
    )
    usage = draw(st.dictionaries(st.integers(1, 3), st.floats(0, 100)))
    line = order(draw(st.lists(tickets, max_size=8)), usage, QueueRules(bound=50.0), 0.0)
    return line, Machine(fits, {uuid: end for uuid, end in ends.items() if uuid not in opened}), usage


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_a_free_device_is_left_idle_only_where_it_would_put_off_somebody(world):
    """Of whoever would fit onto what is left free, the plan names whom he would pass; and no device is given twice."""
    line, machine, usage = world
    positions = plan(line, machine, usage, QueueRules(bound=50.0), 0.0)
    used = [uuid for position in positions if position.now for uuid in position.devices]
    assert len(used) == len(set(used))

    for position in positions:
        fits = any(
            len(machine.fits[request].open - set(used)) >= request.num_gpus
            for request in position.ticket.requests
            if request in machine.fits
        )
        assert position.now or fits == (position.held_back_by is not None)
        if position.now:
            assert position.request and set(position.devices) <= machine.fits[position.request].open


@settings(max_examples=400, deadline=None)
@given(worlds())
def test_the_first_in_line_starts_if_he_fits_unless_he_can_wait_within_his_promise(world):
    line, machine, usage = world
    positions = plan(line, machine, usage, QueueRules(bound=50.0), 0.0)

    if positions and positions[0].in_order == 0.0 and not positions[0].now:
        first = positions[0]
        assert first.ticket.promise is not None
        assert any(position.now for position in positions)
        assert (first.start if first.start is not None else math.inf) <= first.ticket.promise + 1e-3


def test_the_first_starts_however_many_shorter_ones_were_refused_for_him() -> None:
    line = [a_ticket(1, time_limit=1000.0), *(a_ticket(1, time_limit=1.0 + n) for n in range(70))]

    assert started(planned(line, a_machine(line, 1))) == [line[0].id]


def test_however_many_behind_one_who_waits_too_long_are_refused_those_before_him_are_not() -> None:
    first = a_ticket(1, time_limit=2000.0, promise=5000.0)
    before, behind = a_ticket(2, time_limit=1000.0), [a_ticket(2, time_limit=1.0 + n) for n in range(70)]
    line = [first, before, a_ticket(3, 2, since=-2 * HOUR), *behind]

    assert started(planned(line, a_machine(line, 2, free=1), bound=HOUR)) == [before.id]


def test_of_lengths_that_all_differ_the_first_63_are_tried_and_what_is_longer_is_refused_with_them(monkeypatch):
    tried, held_back = [], plans._Planner._held_back_by

    def counted(self: plans._Planner, ticket: Ticket, *of: Any) -> str | None:
        tried.append(ticket.id)
        return held_back(self, ticket, *of)

    monkeypatch.setattr(plans._Planner, "_held_back_by", counted)
    line = [a_ticket(1, 2), *(a_ticket(2, time_limit=6.0 + n) for n in range(100))]

    assert {position.held_back_by for position in planned(line, a_machine(line, 2, free=1, ends={"d1": 5.0}))[1:]} == {
        line[0].id
    }
    assert tried == [ticket.id for ticket in line[1:64]]


def test_the_plan_of_500_requests_for_8_devices_takes_a_bounded_number_of_steps() -> None:
    """No time: the number of planned starts that are computed, in the worst line we know: all lengths differ."""
    line = [a_ticket(user % 60 + 1, 1 + user % 2, time_limit=1000.0 + user) for user in range(500)]
    line.insert(0, a_ticket(99, 8, since=-1.0, time_limit=HOUR))
    machine = a_machine(line, 8, free=4, ends={f"d{number}": 900.0 for number in range(4, 8)})
    count, earliest = 0, plans._Planner.earliest

    def counted(self: plans._Planner, *args: object) -> plans.PlannedStart:
        nonlocal count
        count += 1
        return earliest(self, *args)  # type: ignore[arg-type]

    plans._Planner.earliest = counted  # type: ignore[method-assign, assignment]
    try:
        assert started(planned(line, machine)) == []
    finally:
        plans._Planner.earliest = earliest  # type: ignore[method-assign]
    assert count < 10 * len(line)


def a_reservation(gpus: int, begins: float, *devices: str, user: int = 9, **fields: Any) -> Reservation:
    return Reservation("b1", 0, user, f"u{user}", gpus, begins, begins + HOUR, devices or ("d0", "d1"), **fields)


def test_a_reservation_keeps_its_devices_from_jobs_that_may_last_until_then() -> None:
    def passing(user: int = 1, gpus: int = 2, begins: float = 100.0, **fields: float) -> bool:
        line = [a_ticket(user, **fields)]
        machine = Machine(
            a_machine(line, 2).fits, reservations=(a_reservation(gpus, begins),), free=frozenset({"d0", "d1"})
        )
        return bool(started(planned(line, machine)))

    assert not passing()
    assert passing(time_limit=100.0)
    assert not passing(time_limit=101.0)
    assert passing(user=9)
    assert passing(gpus=1)
    assert passing(begins=plans.HORIZON_SECONDS + 1.0)


def test_a_reservation_counts_what_its_user_has_already() -> None:
    line = [a_ticket()]
    fits = a_machine(line, ["d1"]).fits

    assert not started(planned(line, Machine(fits, reservations=(a_reservation(2, 0.0),), free=frozenset({"d1"}))))
    assert started(
        planned(line, Machine(fits, reservations=(a_reservation(1, 0.0, held=("d0",)),), free=frozenset({"d1"})))
    )


def test_devices_that_nobody_in_line_wants_are_free_for_a_reservation() -> None:
    line = [a_ticket(requests=[only := Request(devices=("d0",))])]
    fits = {only: Fit(("d0",), frozenset({"d0"}))}
    machine = Machine(fits, reservations=(a_reservation(1, 0.0, "d0", "d1"),), free=frozenset({"d0", "d1"}))

    assert started(planned(line, machine)) == [line[0].id]


def test_whoever_a_reservation_holds_back_hears_of_the_one_that_has_his_device() -> None:
    line = [a_ticket(requests=[only := Request(devices=("d0",))])]
    others = [replace(a_reservation(1, 10.0, f"d{number}"), id=f"other {number}") for number in range(1, 8)]
    reservations = (*others, a_reservation(1, 100.0, "d0"))
    free = frozenset(f"d{number}" for number in range(8))
    (position,) = planned(line, Machine({only: Fit(("d0",), frozenset({"d0"}))}, reservations=reservations, free=free))

    assert (position.held_back_by, position.start) == ("0.b1", 100.0 + HOUR)


def test_so_does_he_who_would_have_to_wait_like_many_shorter_jobs_too() -> None:
    line = [a_ticket(1, 2, time_limit=20.0), *(a_ticket(2, time_limit=6.0 + n) for n in range(100))]
    fits = a_machine(line, 2, free=1).fits
    machine = Machine(fits, {"d1": 5.0}, reservations=(a_reservation(1, 100.0, "d0"),), free=frozenset({"d0"}))
    positions = planned(line, machine)

    assert [position.held_back_by for position in positions] == [None, *[line[0].id] * 95, *["0.b1"] * 5]


def test_a_reservation_does_not_count_on_a_claim_that_should_have_ended() -> None:
    def passing(limit: float) -> bool:
        line = [a_ticket()]
        limits, reservation = {"d1": limit}, a_reservation(1, 100.0)
        return bool(
            started(
                planned(
                    line,
                    Machine(
                        a_machine(line, ["d0"]).fits, reservations=(reservation,), free=frozenset({"d0"}), limits=limits
                    ),
                )
            )
        )

    assert passing(1.0)
    assert not passing(0.0)


def test_of_the_way_that_he_takes_the_device_that_he_likes_least_is_kept_from_him() -> None:
    wide, narrow = Request(num_gpus=2), Request()
    fits = {wide: Fit(("d1", "d0"), frozenset()), narrow: Fit(("d0", "d1"), frozenset({"d0", "d1"}))}
    machine = Machine(fits, reservations=(reservation := a_reservation(1, 100.0),), free=frozenset({"d0", "d1"}))
    (position,) = planned([a_ticket(requests=[wide, narrow])], machine)

    assert (position.devices, position.kept) == (("d0",), {"d1": reservation})


def test_a_reservation_counts_on_the_device_of_a_job_that_starts_now_if_its_limit_ends_before() -> None:
    def passing(**fields: float) -> bool | list[str]:
        line = [a_ticket(1, requests=[only := Request(devices=("d1",))], **fields), a_ticket(2, promise=2 * HOUR)]
        fits = {**a_machine(line[1:], 2).fits, only: Fit(("d1",), frozenset({"d1"}))}
        machine = Machine(fits, reservations=(a_reservation(1, 100.0),), free=frozenset({"d0", "d1"}))
        first, second = planned(line, machine)
        assert first.now
        return second.now or list(second.kept)

    assert passing(time_limit=100.0) is True
    assert passing(time_limit=101.0) == passing() == ["d0"]


def test_nobody_takes_a_device_for_which_a_reservation_would_move_to_that_of_another() -> None:
    def passing(limit: float) -> list[str]:
        both, other = Request(num_gpus=2, devices=("d1", "d2")), Request(devices=("d0",))
        line = [a_ticket(1, requests=[both], time_limit=limit), a_ticket(2, requests=[other])]
        fits = {both: Fit(("d1", "d2"), frozenset({"d1"})), other: Fit(("d0",), frozenset({"d0"}))}
        free = frozenset({"d0", "d1"})
        return started(planned(line, Machine(fits, {"d2": 95.0}, reservations=(a_reservation(1, 100.0),), free=free)))

    assert passing(limit=5.0)
    assert not passing(limit=6.0)


def test_whoever_uses_no_more_than_his_own_reservation_passes_everybody() -> None:
    line = [a_ticket(1, 2), a_ticket(9, 1)]
    machine = a_machine(line, 2, free=frozenset({"d0", "d1"}))
    his = Machine(machine.fits, reservations=(a_reservation(1, 0.0, "d0"),), free=frozenset({"d0", "d1"}))

    assert started(planned(line, machine)) == [line[0].id]
    assert started(planned(line, his)) == [line[1].id]


def test_of_two_who_are_held_back_for_each_other_the_first_in_line_starts() -> None:
    """When the first has started his reservation keeps other devices: then the second starts later than was planned."""
    line = [a_ticket(1, 2, time_limit=2.0), a_ticket(2, time_limit=9.0)]
    fits = a_machine(line, ["d1", "d0", "d2"], free=["d0", "d2"]).fits
    reservation = a_reservation(2, 0.0, "d0", "d1", "d2", user=1, held=("d1",))

    assert started(planned(line, Machine(fits, reservations=(reservation,), free=frozenset({"d0", "d2"})))) == [
        line[0].id
    ]


def test_whose_reservation_has_begun_chooses_before_a_shorter_job_that_came_first() -> None:
    line = [a_ticket(1, time_limit=1.0), a_ticket(9)]
    machine = Machine(a_machine(line, 2).fits, reservations=(a_reservation(1, 0.0),), free=frozenset({"d0", "d1"}))

    assert [position.devices for position in planned(line, machine)] == [("d1",), ("d0",)]


def test_a_request_for_more_than_there_is_never_starts_beside_a_reservation_either() -> None:
    line = [a_ticket(gpus=9)]
    machine = Machine(a_machine(line, 2).fits, reservations=(a_reservation(1, 100.0),), free=frozenset({"d0", "d1"}))

    assert [(position.request, position.devices, position.now) for position in planned(line, machine)] == [
        (None, (), False)
    ]


def test_of_two_devices_neither_may_be_kept_for_somebody_by_the_time_that_the_other_is_free() -> None:
    line = [a_ticket(1, 2, time_limit=30.0)]
    fits = a_machine(line, 2, free=["d0"]).fits
    reservation = a_reservation(1, 40.0, "d0")
    machine = Machine(fits, {"d1": 50.0}, reservations=(reservation,), free=frozenset({"d0"}))
    (position,) = planned(line, machine)

    assert (position.start, position.devices) == (reservation.ends, ("d1", "d0"))


def a_guest_beside(**fields: Any) -> list[QueuePosition]:
    """The plan for one who could have d0, and another one who may share d1 and for whom one of both is reserved."""
    line = [a_ticket(1), a_ticket(9, requests=[share := Request(share=True, memory=2**30)])]
    fits = {
        line[0].requests[0]: Fit(("d0", "d1"), frozenset({"d0"})),
        share: Fit(("d1", "d0"), frozenset({"d0", "d1"})),
    }
    return planned(line, Machine(fits, reservations=(a_reservation(1, 0.0, **fields),), free=frozenset({"d0"})))


def test_nobody_takes_what_is_reserved_because_its_user_is_about_to_claim_another_device() -> None:
    other, guest = a_guest_beside()

    assert (guest.now, guest.devices) == (True, ("d1",))  # he may be gone before he claims it
    assert (other.now, other.held_back_by, set(other.kept)) == (False, "0.b1", {"d0", "d1"})


def test_nobody_takes_what_is_reserved_because_the_users_of_two_reservations_are_about_to_claim_others() -> None:
    shares = [Request(share=True, memory=2**30, devices=(uuid,)) for uuid in ("d2", "d3")]
    line = [a_ticket(1), a_ticket(8, requests=[shares[0]]), a_ticket(9, requests=[shares[1]])]
    fits = {line[0].requests[0]: Fit(("d0", "d1"), frozenset({"d0", "d1"}))}
    fits |= {request: Fit(request.devices, frozenset(request.devices)) for request in shares}
    reservations = tuple(
        replace(a_reservation(1, 0.0, "d0", "d1", "d2", "d3", user=uid), id=f"b{uid}") for uid in (8, 9)
    )
    other, *begun_for = planned(line, Machine(fits, reservations=reservations, free=frozenset({"d0", "d1"})))

    assert [guest.now for guest in begun_for] == [True, True]  # both may be gone before they claim
    assert (other.now, set(other.kept) >= {"d0", "d1"}) == (False, True)


def test_what_its_user_has_claimed_sets_the_other_device_free() -> None:
    assert [position.now for position in a_guest_beside(held=("d1",))] == [True, True]


def test_a_job_with_a_limit_that_joins_one_without_does_not_make_its_end_known() -> None:
    joins = Request(share=True, memory=2**30, devices=("d1",))
    line = [a_ticket(1, requests=[joins], time_limit=50.0), a_ticket(2)]
    fits = {joins: Fit(("d1",), frozenset({"d1"})), line[1].requests[0]: Fit(("d0", "d1"), frozenset({"d0"}))}
    first, second = planned(line, Machine(fits, reservations=(a_reservation(1, 100.0),), free=frozenset({"d0"})))

    assert (first.now, second.now, second.held_back_by) == (True, False, "0.b1")
