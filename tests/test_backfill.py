"""Which requests of the queue start now, which when, and why not earlier."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from chances import often
from hypothesis import given, settings
from hypothesis import strategies as st
from queues import HOUR, SHARE, a_fit, a_machine, a_ticket, planned, started

from gpuguard.queue import backfill as plans
from gpuguard.queue.backfill import Fit, Machine, QueuePosition, backlog, plan, promise
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import QueueRules, Ticket, order
from gpuguard.request import Request


def test_the_start_of_a_request_is_the_end_of_the_last_claim_that_it_waits_for() -> None:
    queue, ends = [a_ticket(gpus=2)], {"d0": 9.0, "d1": 5.0, "d2": 7.0}
    (position,) = planned(queue, a_machine(queue, 3, free=0, ends=ends))

    assert (position.start, position.devices, position.now) == (7.0, ("d1", "d2"), False)


def test_a_start_is_the_sooner_of_what_is_likely_and_what_is_certain() -> None:
    """Two were told 5h29m, the time limit of a colleague, and started after 8 s, as long as their user's jobs take."""
    queue = [a_ticket(expected=10.0), a_ticket(expected=10.0)]
    limits, estimates = {"d0": 5 * HOUR}, {"d0": 5 * HOUR, "d1": 8.0}
    first, second = planned(queue, a_machine(queue, 2, free=0, ends=limits, estimates=estimates))

    assert (first.start, first.latest, first.devices) == (8.0, 5 * HOUR, ("d1",))
    assert (second.start, second.latest) == (18.0, None)


def starts_of(*queue: Ticket, **estimates: float) -> list[float | None]:
    """The likely starts on two devices, of which none is free."""
    return [position.start for position in planned(queue, a_machine(queue, 2, free=0, estimates=estimates))]


def test_a_start_is_likely_by_what_jobs_took_before_and_not_by_time_limits_that_none_of_them_used() -> None:
    with_limits = [
        a_ticket(gpus=2, time_limit=5 * HOUR, expected=10.0),
        a_ticket(gpus=2, time_limit=5.0, expected=99.0),
    ]

    assert starts_of(*with_limits, a_ticket(gpus=2), d0=8.0, d1=8.0) == [8.0, 18.0, 23.0]


def test_a_job_that_finds_room_is_likely_to_start_before_a_wide_one_that_does_not_yet_and_alike_ones_in_order() -> None:
    wide, first, second = a_ticket(gpus=2, expected=9.0), a_ticket(expected=30.0), a_ticket(expected=5.0)

    assert starts_of(wide, first, second, d0=8.0, d1=50.0) == [50.0, 8.0, 38.0]
    assert starts_of(wide, second, first, d0=8.0, d1=50.0) == [50.0, 8.0, 13.0]


def test_beyond_so_many_kinds_of_requests_those_of_further_kinds_are_likely_to_start_in_order(monkeypatch) -> None:
    kinds = [a_ticket(gpus=gpus, expected=10.0) for gpus in (2, 2, 1)]
    assert starts_of(*kinds, d0=8.0, d1=50.0) == [50.0, 60.0, 8.0]
    monkeypatch.setattr(plans, "MOST_TRIED", 0)

    assert starts_of(*kinds, d0=8.0, d1=50.0) == [50.0, 60.0, 70.0]


def test_what_is_held_back_is_not_taken_to_start_before_what_it_waits_for() -> None:
    late, small = a_ticket(1, gpus=2, since=-30 * HOUR, expected=10.0), a_ticket(2, expected=HOUR)
    queue = [late, small]
    first, held = planned(queue, a_machine(queue, 2, free=1, estimates={"d1": 60.0}))

    assert (first.start, held.held_back_by, held.start) == (60.0, late.id, None)


@pytest.mark.parametrize("end", [-1.0, 0.0])
def test_a_claim_that_should_have_ended_tells_nothing(end: float) -> None:
    (position,) = planned(queue := [a_ticket()], a_machine(queue, 1, free=0, ends={"d0": end}))

    assert (position.start, position.in_order) == (None, None)
    assert position.request == Request()  # it can start some day


@pytest.mark.parametrize("reservations", [(), (Reservation("b1", 0, 9, "u9", 1, 100.0, 200.0, ("d0", "d1")),)])
def test_a_request_for_more_than_there_is_can_never_start(reservations: tuple[Reservation, ...]) -> None:
    (position,) = planned(queue := [a_ticket(gpus=9)], a_machine(queue, reservations=reservations))

    assert (position.request, position.devices, position.now) == (None, (), False)


def second_passes(
    *fields: dict[str, Any], ends: dict[str, float] | None = None, usage: dict[int, float] | None = None, **rules: Any
) -> bool:
    """Whether a request for one device starts before one for two; only one of the two devices is free.

    *fields* are those of the first ticket and of the second one; *ends*: when the device that is in use is free.
    """
    first, second = ({"gpus": gpus, **more} for gpus, more in zip((2, 1), fields, strict=True))
    queue = [a_ticket(1, **first), a_ticket(2, **second)]
    positions = planned(queue, a_machine(queue, 2, free=1, ends=ends), usage, **rules)
    assert positions[1].held_back_by == (None if positions[1].now else queue[0].id)
    assert not positions[0].now
    return positions[1].now


@pytest.mark.parametrize("rules", [{}, {"patience": 0.25}])
def test_with_a_time_limit_that_ends_before_the_latest_start_of_the_other_it_starts_now(rules: dict[str, Any]) -> None:
    first, second = a_ticket(1, gpus=2, time_limit=2 * HOUR), a_ticket(2)
    machine = a_machine([first, second], 2, free=1, ends={"d1": HOUR})
    ahead, held = planned([first, second], machine, **rules)
    assert (held.held_back_by, ahead.latest) == (first.id, HOUR)

    _, shorter = planned([first, replace(second, time_limit=HOUR)], machine, **rules)
    assert shorter.now


IN_5_SECONDS = {"d1": 5.0}


@pytest.mark.parametrize(
    ("first", "second", "passes"),
    [
        ({"time_limit": 10.0}, {"time_limit": 4.0}, True),
        ({"time_limit": 10.0}, {"time_limit": 6.0}, False),
        ({}, {}, False),
        ({"promise": 6.25, "time_limit": 1.0}, {"time_limit": 6.0}, True),
        ({"promise": 6.25, "time_limit": 1.0}, {"time_limit": 6.5}, False),
        ({"promise": 10.0, "time_limit": 1.0}, {"time_limit": 6.0, "priority": -1}, False),
        ({"after": "4711"}, {}, True),
    ],
    ids=["short", "too long", "of unknown length", "until the promise", "beyond it", "a lower class", "not queued yet"],
)
def test_a_job_goes_first_only_where_it_puts_off_none_further_than_promised(first, second, passes) -> None:
    assert second_passes(first, second, ends=IN_5_SECONDS) is passes


@pytest.mark.parametrize(
    ("second", "usage", "rules", "passes"),
    [
        ({}, {2: 0.5}, {}, False),
        ({"owner_uid": 7}, {7: 0.5}, {}, False),
        ({}, {1: 0.5}, {}, True),
        ({}, {2: 0.5}, {"fair_share": False}, True),
    ],
)
def test_a_user_who_had_more_puts_off_no_start_even_within_the_promise(second, usage, rules, passes) -> None:
    first, second = {"promise": 10.0, "time_limit": 1.0}, {"time_limit": 6.0, **second}

    assert second_passes(first, second, ends=IN_5_SECONDS, usage=usage, **rules) is passes


@pytest.mark.parametrize(
    ("waited", "fields", "passes"), [(HOUR, {}, True), (HOUR, {"promise": -1.0}, True), (HOUR + 1, {}, False)]
)
def test_where_no_start_can_be_planned_small_requests_pass_until_the_bound(waited, fields, passes) -> None:
    """No promise makes the bound shorter."""
    assert second_passes({"since": -waited, **fields}, {}, bound=HOUR) is passes


@pytest.mark.parametrize(
    ("second", "passes"), [({"time_limit": 40.0}, True), ({"time_limit": 60.0}, False), ({"expected": 40.0}, False)]
)
def test_during_draining_a_job_with_a_limit_may_use_the_device_if_the_end_is_planned(second, passes) -> None:
    assert second_passes({"since": -30 * HOUR, "promise": -1.0}, second, ends={"d1": 50.0}) is passes


@pytest.mark.parametrize(("waited", "first"), [(HOUR, "short"), (5 * HOUR, "short"), (6 * HOUR, "long")])
def test_without_time_limits_the_shorter_one_goes_first_until_the_longer_one_has_waited_long(waited, first) -> None:
    """By response ratio: the long one, which counts as 2.5 h, has 1.4, 2.99 and 3.4, the short one 3."""
    queue = [
        a_ticket(1, id="long", since=-waited, expected=10 * HOUR),
        a_ticket(1, id="short", since=-2 * HOUR, expected=HOUR),
    ]

    assert started(planned(queue, a_machine(queue, 1))) == [first]


def test_a_short_job_of_a_user_further_back_needs_a_higher_ratio() -> None:
    first, second = a_ticket(1, id="first", since=-HOUR, expected=HOUR), a_ticket(2, id="second", since=-2 * HOUR)

    def begins(expected: float, **rules: bool) -> list[str]:
        queue = [first, replace(second, expected=expected)]
        return started(planned(queue, a_machine(queue, 1), **rules))

    assert begins(HOUR) == ["first"]  # 2 against 3 / 2
    assert begins(HOUR / 4) == ["second"]  # against 5 / 2
    assert begins(HOUR, fair_share=False) == ["second"]


@pytest.mark.parametrize(
    ("waited", "lasts", "passes"),
    [
        (23 * HOUR, 1000 * HOUR, True),
        (25 * HOUR, 14.3 * HOUR, True),
        (25 * HOUR, 14.5 * HOUR, False),
        (48 * HOUR, 7.4 * HOUR, True),
        (48 * HOUR, 7.6 * HOUR, False),
        (72 * HOUR, 4.9 * HOUR, True),
        (72 * HOUR, 5.1 * HOUR, False),
        (25 * HOUR, None, False),
    ],
)
def test_beyond_the_bound_passes_what_may_end_in_time_and_the_longer_it_waits_the_surer_that_must_be(
    waited, lasts, passes
) -> None:
    """A third of its length must fit at 24 h, two thirds at 48 h and all of it at 72 h."""
    queue = [a_ticket(1, 2, since=-waited), a_ticket(1, since=-HOUR, expected=lasts)]
    positions = planned(queue, a_machine(queue, 2, free=1, estimates={"d1": 5 * HOUR}))

    assert (positions[1].now, positions[1].held_back_by) == (passes, None if passes else queue[0].id)


def test_what_is_left_over_beside_a_request_beyond_the_bound_is_for_jobs_of_any_length() -> None:
    queue = [a_ticket(1, 2, since=-25 * HOUR), a_ticket(1, expected=1000 * HOUR)]
    ends = {"d1": 5 * HOUR, "d2": 5 * HOUR}

    assert started(planned(queue, a_machine(queue, 3, free=1, estimates=ends))) == [queue[1].id]
    assert started(planned(queue, a_machine(queue, 2, free=1, estimates=ends))) == []


@pytest.mark.parametrize(
    ("late", "later", "passes"),
    [
        ({}, {}, False),
        ({"priority": -1}, {}, True),
        ({"set_back": True}, {}, True),
        ({}, {"priority": -1}, False),
        ({}, {"since": -26 * HOUR}, True),  # it came first
    ],
)
def test_a_request_beyond_the_bound_is_not_passed_by_a_later_one_of_a_user_who_had_less(late, later, passes) -> None:
    """Unless that one has a higher priority, or it was moved to the end of the queue."""
    had_much = a_ticket(1, 2, since=-25 * HOUR, served=-HOUR, **late)
    had_nothing = a_ticket(2, **{"since": -HOUR, "expected": 100 * HOUR, **later})
    queue = order([had_much, had_nothing], {1: 1e9}, QueueRules(), 0.0)

    assert bool(started(planned(queue, a_machine(queue, 2, free=1, estimates={"d1": HOUR}), {1: 1e9}))) is passes


def test_devices_are_kept_for_one_request_beyond_the_bound_at_a_time() -> None:
    """A job on what the oldest leaves over may delay the second one, which can have nothing before the oldest."""
    oldest, second = a_ticket(1, 2, since=-30 * HOUR), a_ticket(2, 3, since=-25 * HOUR)
    job = a_ticket(3, since=-HOUR, expected=100 * HOUR)
    machine = a_machine([oldest, second, job], 3, free=1, estimates={"d1": HOUR, "d2": HOUR})

    assert started(planned([oldest, second, job], machine)) == [job.id]
    assert started(planned([second, job], machine)) == []


def test_of_two_requests_beyond_the_bound_that_want_other_devices_each_has_its_own_kept() -> None:
    big, small = Request(num_gpus=2, models=("big",)), Request(num_gpus=2, models=("small",))
    queue = [
        a_ticket(1, requests=[big], since=-30 * HOUR),
        a_ticket(2, requests=[small], since=-25 * HOUR),
        a_ticket(3, requests=[Request(models=("small",))], since=-HOUR, expected=100 * HOUR),
    ]
    fits = {
        big: a_fit("b0 b1", free="b0"),
        small: a_fit("s0 s1", free="s0"),
        queue[2].requests[0]: a_fit("s0 s1", free="s0"),
    }
    machine = Machine(fits, estimates={"b1": HOUR, "s1": HOUR})

    assert [position.held_back_by for position in planned(queue, machine)][2] == queue[1].id


@pytest.mark.parametrize(("lasts", "passes"), [(40 * HOUR, True), (41 * HOUR, False)])
def test_what_has_just_passed_counts_when_the_next_one_would(lasts: float, passes: bool) -> None:
    queue = [
        a_ticket(1, 3, since=-25 * HOUR),
        a_ticket(1, since=-2 * HOUR, expected=14 * HOUR),
        a_ticket(1, since=-HOUR, expected=lasts),
    ]
    machine = a_machine(queue, 3, free=2, estimates={"d2": 5 * HOUR})

    assert started(planned(queue, machine)) == [ticket.id for ticket in queue[1 : 2 + passes]]


def test_the_backlog_is_what_runs_and_what_waits_shared_out_among_the_devices() -> None:
    waiting = [
        a_ticket(1, 2, expected=3 * HOUR),
        a_ticket(1),  # of which nothing is known: an hour
        a_ticket(1, expected=99 * HOUR, after="another"),  # it is not queued yet
    ]
    guesses = {"d0": HOUR, "d1": HOUR}

    machine = a_machine(waiting, 4, free=2, guesses=guesses, estimates={"d1": 4 * HOUR})
    assert backlog(waiting, machine, 0.0) == (HOUR + 4 * HOUR + 6 * HOUR + HOUR) / 4
    assert backlog(waiting[1:2], machine, 0.0) == math.inf


def test_an_estimate_says_when_a_request_starts_and_promises_nothing() -> None:
    queue = [a_ticket(1, expected=HOUR), a_ticket(1, expected=HOUR)]
    positions = planned(queue, a_machine(queue, 1, free=0, estimates={"d0": 2 * HOUR}))

    assert [position.start for position in positions] == [2 * HOUR, 3 * HOUR]
    assert [promise(position, QueueRules(), 0.0) for position in positions] == [None, None]


def test_a_job_of_unknown_length_takes_a_device_that_the_first_does_not_need() -> None:
    queue = [a_ticket(1, 2), a_ticket(2, 1)]

    assert started(planned(queue, a_machine(queue, 3, free=["d2"], ends={"d0": 5.0, "d1": 5.0}))) == [queue[1].id]
    assert started(planned(queue, a_machine(queue, 3, free=["d2"], ends={"d0": 5.0}))) == []


def test_of_two_that_fit_the_shorter_one_goes_first_if_the_other_one_can_wait_by_its_promise() -> None:
    queue = [a_ticket(1, time_limit=50.0, promise=5.0), a_ticket(2, time_limit=5.0)]

    assert started(planned(queue, a_machine(queue, 1))) == [queue[1].id]


def test_a_request_that_is_put_off_has_its_new_start() -> None:
    queue = [a_ticket(1, 2, promise=6.25, time_limit=1.0), a_ticket(2, 1, time_limit=6.0)]
    first, second = planned(queue, a_machine(queue, 2, free=1, ends=IN_5_SECONDS))

    assert second.now
    assert (first.in_order, first.start) == (5.0, 6.0)


def test_a_device_is_drained_only_for_a_request_that_could_use_it() -> None:
    wide = Request(num_gpus=2, devices=("d0", "d1"))
    queue = [a_ticket(1, requests=[wide], since=-2 * HOUR), a_ticket(2)]
    fits = {wide: a_fit("d0 d1", free="d0"), Request(): a_fit("d2 d0")}
    first, second = planned(queue, Machine(fits), bound=HOUR)

    assert (first.now, second.now, second.devices) == (False, True, ("d2",))


def test_the_promise_is_a_quarter_more_than_the_planned_wait() -> None:
    (position,) = planned(queue := [a_ticket()], a_machine(queue, 1, free=0, ends={"d0": 8.0}))

    assert (promise(position, QueueRules(), 0.0), promise(position, QueueRules(), 4.0)) == (10.0, 9.0)
    assert promise(QueuePosition(queue[0], 1, None, None), QueueRules(), 0.0) is None


def test_the_second_alternative_is_taken_where_it_starts_earlier() -> None:
    wide, narrow = Request(num_gpus=2), Request(num_gpus=1)
    queue = [a_ticket(requests=[wide, narrow])]

    chosen = [planned(queue, a_machine(queue, 2, free=free))[0].request for free in (2, 1, 0)]
    assert chosen == [wide, narrow, wide]


PART = Request(mig="3g.40gb")
RELATIVES = {"g": ("m1", "m2"), "m1": ("g",), "m2": ("g",)}


def test_a_gpu_and_its_instances_are_never_planned_beside_each_other() -> None:
    gpu = Request(devices=("g",))
    queue = [a_ticket(1, requests=[gpu]), a_ticket(2, requests=[PART]), a_ticket(3, requests=[PART])]
    machine = Machine({gpu: a_fit("g"), PART: a_fit("m1 m2")}, relatives=RELATIVES)

    assert started(planned(queue, machine)) == [queue[0].id]
    assert started(planned(queue[1:], machine)) == [queue[1].id, queue[2].id]


def test_shares_start_beside_each_other_and_not_beside_a_request_for_the_device_alone() -> None:
    queue = [a_ticket(1, requests=[SHARE]), a_ticket(2, requests=[SHARE]), a_ticket(3)]

    assert started(planned(queue, a_machine(queue, 1))) == [queue[0].id, queue[1].id]
    assert started(planned(queue[::-1], a_machine(queue, 1))) == [queue[2].id]


def beside_an_endless_share(*queue: Ticket) -> list[QueuePosition]:
    """The plan where d1 is claimed, and shares fit beside the one on d0, both without end; d1 is liked best."""
    fits = dict.fromkeys((request for ticket in queue for request in ticket.requests), a_fit("d1 d0", free=""))
    return planned(queue, Machine(fits | {SHARE: a_fit("d0")}))


def test_the_end_of_a_share_that_joins_another_one_tells_nothing_of_the_device() -> None:
    share, alone = beside_an_endless_share(a_ticket(1, requests=[SHARE], time_limit=2.0), a_ticket(2))

    assert (share.now, alone.start, alone.in_order) == (True, None, None)


def test_two_shares_are_not_held_back_for_each_other_by_a_request_for_the_device_alone() -> None:
    queue = [a_ticket(1), *(a_ticket(user, requests=[SHARE], time_limit=limit) for user, limit in ((2, 9.0), (3, 2.0)))]

    assert started(beside_an_endless_share(*queue)) == [queue[1].id, queue[2].id]


def test_a_gpu_is_shared_when_the_last_of_its_instances_is_free() -> None:
    queue = [a_ticket(1, requests=[PART], time_limit=limit) for limit in (9.0, 5.0)] + [a_ticket(2, requests=[SHARE])]
    machine = Machine({PART: a_fit("m1 m2"), SHARE: a_fit("g")}, relatives=RELATIVES)

    assert planned(queue, machine)[2].start == 9.0


def test_a_user_cannot_fill_the_plan_before_another_one() -> None:
    flood = [a_ticket(1, 8) for _ in range(plans.MOST_PLANNED + 50)]
    *_, last_of_flood, last = planned(queue := [*flood, a_ticket(2)], a_machine(queue, free=1))

    assert last.now
    # Too far behind for a plan, but not refused.
    assert (last_of_flood.request, last_of_flood.devices, last_of_flood.start) == (flood[-1].requests[0], (), None)


def test_256_positions_are_planned_and_of_each_user_the_first_four() -> None:
    flood, others = [a_ticket(1) for _ in range(300)], [a_ticket(2) for _ in range(6)]

    assert plans.planned_for([*flood, *others]) == [*flood[:256], *others[:4]]


def test_a_reason_to_wait_is_the_last_one() -> None:
    """What stood in the way of a request when others had not started yet does not, once they have."""
    queue = [a_ticket(1, 1, time_limit=9.0), a_ticket(2, 1, time_limit=5.0)]
    positions = planned(queue, a_machine(queue, 1))

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
    queue = order(draw(st.lists(tickets, max_size=8)), usage, QueueRules(bound=50.0), 0.0)
    return queue, Machine(fits, {uuid: end for uuid, end in ends.items() if uuid not in opened}), usage


@settings(max_examples=often(400))
@given(worlds())
def test_a_free_device_is_left_idle_only_where_its_use_would_put_off_another_request(world) -> None:
    """Of each that would fit onto what is left free, the plan names whom it would pass; no device is given twice."""
    queue, machine, usage = world
    positions = plan(queue, machine, usage, QueueRules(bound=50.0), 0.0)
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


@settings(max_examples=often(400))
@given(worlds())
def test_the_first_in_the_queue_starts_if_it_fits_unless_it_can_wait_or_nothing_is_known(world) -> None:
    """It can wait within its promise; and where it has none, one that is no surer of its length may be shorter."""
    queue, machine, usage = world
    positions = plan(queue, machine, usage, QueueRules(bound=50.0), 0.0)

    if positions and positions[0].in_order == 0.0 and not positions[0].now:
        first, begun = positions[0], [position.ticket for position in positions if position.now]
        assert begun
        if first.ticket.promise is None:
            assert first.ticket.time_limit is None and any(ticket.time_limit is None for ticket in begun)
            return
        assert (first.start if first.start is not None else math.inf) <= first.ticket.promise + 1e-3


def test_the_first_starts_however_many_shorter_ones_were_refused_for_it() -> None:
    queue = [a_ticket(1, time_limit=1000.0), *(a_ticket(1, time_limit=1.0 + n) for n in range(70))]

    assert started(planned(queue, a_machine(queue, 1))) == [queue[0].id]


def test_however_many_behind_one_that_waits_too_long_are_refused_those_before_it_are_not() -> None:
    first = a_ticket(1, time_limit=2000.0, promise=5000.0)
    before, behind = (
        a_ticket(2, time_limit=1000.0, since=-3 * HOUR),
        [a_ticket(2, time_limit=1.0 + n) for n in range(70)],
    )
    queue = [first, before, a_ticket(3, 2, since=-2 * HOUR), *behind]

    assert started(planned(queue, a_machine(queue, 2, free=1), bound=HOUR)) == [before.id]


def calls_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each call of a method of the planner from now on."""
    calls, real = list[tuple[Any, ...]](), getattr(plans._Planner, name)

    def counted(self: plans._Planner, *args: Any) -> Any:
        calls.append(args)
        return real(self, *args)

    monkeypatch.setattr(plans._Planner, name, counted)
    return calls


def test_the_plan_of_500_requests_for_8_devices_takes_a_bounded_number_of_steps(monkeypatch) -> None:
    """No time: the number of planned starts that are computed, in the worst queue we know: all lengths differ."""
    queue = [a_ticket(user % 60 + 1, 1 + user % 2, time_limit=1000.0 + user) for user in range(500)]
    queue.insert(0, a_ticket(99, 8, since=-1.0, time_limit=HOUR))
    machine = a_machine(queue, 8, free=4, ends={f"d{number}": 900.0 for number in range(4, 8)})
    steps = calls_of("earliest", monkeypatch)

    assert started(planned(queue, machine)) == []
    assert len(steps) < 10 * len(queue)


# What a plan leaves to reservations: which devices are kept from whom, who is held back by which, and who is not.


def a_reservation(gpus: int, begins: float, *devices: str, user: int = 9, **fields: Any) -> Reservation:
    return Reservation("b1", 0, user, f"u{user}", gpus, begins, begins + HOUR, devices or ("d0", "d1"), **fields)


def beside(*reservations: Reservation, fits: dict[Request, Fit], free: str = "d0 d1", **fields: Any) -> Machine:
    return Machine(fits, reservations=reservations, free=frozenset(free.split()), **fields)


@pytest.mark.parametrize(
    ("ticket", "gpus", "begins", "starts"),
    [
        ({}, 2, 100.0, False),
        ({"time_limit": 100.0}, 2, 100.0, True),
        ({"time_limit": 101.0}, 2, 100.0, False),
        ({"user": 9}, 2, 100.0, True),
        ({}, 1, 100.0, True),
        ({}, 2, plans.HORIZON_SECONDS + 1.0, True),
        ({}, 2, plans.HORIZON_SECONDS - 1.0, False),
        ({"expected": 2 * plans.HORIZON_SECONDS}, 2, plans.HORIZON_SECONDS + HOUR, False),
    ],
)
def test_a_reservation_keeps_its_devices_from_jobs_that_may_last_until_then(ticket, gpus, begins, starts) -> None:
    queue = [a_ticket(**ticket)]
    machine = a_machine(queue, 2, reservations=(a_reservation(gpus, begins),))

    assert bool(started(planned(queue, machine))) is starts


def test_a_reservation_counts_what_its_user_has_already() -> None:
    queue = [a_ticket()]

    assert not started(planned(queue, a_machine(queue, ["d1"], reservations=(a_reservation(2, 0.0),))))
    assert started(planned(queue, a_machine(queue, ["d1"], reservations=(a_reservation(1, 0.0, held=("d0",)),))))


def test_devices_that_no_request_wants_are_free_for_a_reservation() -> None:
    queue = [a_ticket(requests=[only := Request(devices=("d0",))])]

    assert started(planned(queue, beside(a_reservation(1, 0.0, "d0", "d1"), fits={only: a_fit("d0")})))


def test_what_is_reserved_for_the_user_of_a_request_moves_no_other_reservation_to_its_device() -> None:
    queue = [a_ticket(1, requests=[only := Request(devices=("d0",))])]
    own, of_another = replace(a_reservation(1, 0.0, user=1), id="own"), a_reservation(1, 0.0, user=9)

    assert started(planned(queue, beside(own, of_another, fits={only: a_fit("d0")})))


def test_a_request_is_held_back_by_the_reservation_that_has_its_device() -> None:
    queue = [a_ticket(requests=[only := Request(devices=("d0",))])]
    others = [replace(a_reservation(1, 10.0, f"d{number}"), id=f"other {number}") for number in range(1, 8)]
    free = " ".join(f"d{number}" for number in range(8))
    machine = beside(*others, a_reservation(1, 100.0, "d0"), fits={only: a_fit("d0")}, free=free)
    (position,) = planned(queue, machine)

    assert (position.held_back_by, position.start) == ("0.b1", 100.0 + HOUR)


def test_so_is_one_that_would_have_to_wait_like_many_shorter_jobs_too() -> None:
    queue = [a_ticket(1, 2, time_limit=20.0), *(a_ticket(2, time_limit=6.0 + n) for n in range(100))]
    machine = a_machine(queue, 2, free=1, ends=IN_5_SECONDS, reservations=(a_reservation(1, 100.0, "d0"),))

    held_back_by = [position.held_back_by for position in planned(queue, machine)]
    assert held_back_by == [None, *[queue[0].id] * 95, *["0.b1"] * 5]


@pytest.mark.parametrize(("limit", "starts"), [(1.0, True), (0.0, False)])
def test_a_reservation_does_not_count_on_a_claim_that_should_have_ended(limit: float, starts: bool) -> None:
    queue = [a_ticket()]
    machine = a_machine(queue, ["d0"], reservations=(a_reservation(1, 100.0),), ends={"d1": limit})

    assert bool(started(planned(queue, machine))) is starts


def test_of_the_alternative_that_is_taken_the_device_that_is_liked_least_is_kept() -> None:
    wide, narrow = Request(num_gpus=2), Request()
    fits = {wide: a_fit("d1 d0", free=""), narrow: a_fit("d0 d1")}
    machine = beside(reservation := a_reservation(1, 100.0), fits=fits)
    (position,) = planned([a_ticket(requests=[wide, narrow])], machine)

    assert (position.devices, position.kept) == (("d0",), {"d1": reservation})


@pytest.mark.parametrize(
    ("fields", "kept"), [({"time_limit": 100.0}, []), ({"time_limit": 101.0}, ["d0"]), ({}, ["d0"])]
)
def test_a_reservation_counts_on_the_device_of_a_job_that_starts_now_if_its_limit_ends_before(fields, kept) -> None:
    queue = [a_ticket(1, requests=[only := Request(devices=("d1",))], **fields), a_ticket(2, promise=2 * HOUR)]
    fits = {only: a_fit("d1"), queue[1].requests[0]: a_fit("d0 d1")}
    first, second = planned(queue, beside(a_reservation(1, 100.0), fits=fits))

    assert (first.now, second.now) == (True, not kept)
    assert not kept or list(second.kept) == kept


@pytest.mark.parametrize(("limit", "starts"), [(5.0, True), (6.0, False)])
def test_no_job_takes_a_device_for_which_a_reservation_would_move_to_that_of_another(limit, starts) -> None:
    both, other = Request(num_gpus=2, devices=("d1", "d2")), Request(devices=("d0",))
    queue = [a_ticket(1, requests=[both], time_limit=limit), a_ticket(2, requests=[other])]
    fits = {both: a_fit("d1 d2", free="d1"), other: a_fit("d0")}

    assert bool(started(planned(queue, beside(a_reservation(1, 100.0), fits=fits, ends={"d2": 95.0})))) is starts


def test_of_two_that_are_held_back_for_each_other_the_first_in_the_queue_starts() -> None:
    """When the first has started, its reservation keeps other devices: then the second starts later than planned."""
    queue = [a_ticket(1, 2, time_limit=2.0), a_ticket(2, time_limit=9.0)]
    reservation = a_reservation(2, 0.0, "d0", "d1", "d2", user=1, held=("d1",))
    machine = a_machine(queue, ["d1", "d0", "d2"], free=["d0", "d2"], reservations=(reservation,))

    assert started(planned(queue, machine)) == [queue[0].id]


def test_a_user_whose_reservation_has_begun_chooses_before_a_shorter_job_that_came_first() -> None:
    queue = [a_ticket(1, time_limit=1.0), a_ticket(9)]
    machine = a_machine(queue, 2, reservations=(a_reservation(1, 0.0),))

    assert [position.devices for position in planned(queue, machine)] == [("d1",), ("d0",)]


def test_of_two_devices_neither_may_be_kept_for_others_by_the_time_that_the_other_is_free() -> None:
    queue = [a_ticket(1, 2, time_limit=30.0)]
    reservation = a_reservation(1, 40.0, "d0")
    (position,) = planned(queue, a_machine(queue, 2, free=["d0"], ends={"d1": 50.0}, reservations=(reservation,)))

    assert (position.start, position.devices) == (reservation.ends, ("d1", "d0"))


def beside_the_user_of_a_reservation(**fields: Any) -> Sequence[QueuePosition]:
    """A request that could have d0, and one that may share d1 and for whose user one of both is reserved."""
    queue = [a_ticket(1), a_ticket(9, requests=[SHARE])]
    fits = {queue[0].requests[0]: a_fit("d0 d1", free="d0"), SHARE: a_fit("d1 d0")}
    return planned(queue, beside(a_reservation(1, 0.0, **fields), fits=fits, free="d0"))


def test_no_job_takes_what_is_reserved_because_its_user_is_about_to_claim_another_device() -> None:
    other, reserving = beside_the_user_of_a_reservation()

    assert (reserving.now, reserving.devices) == (True, ("d1",))  # that process may be gone before it claims
    assert (other.now, other.held_back_by, set(other.kept)) == (False, "0.b1", {"d0", "d1"})


def test_no_job_takes_what_is_reserved_because_the_users_of_two_reservations_are_about_to_claim_others() -> None:
    shares = [Request(share=True, memory=2**30, devices=(uuid,)) for uuid in ("d2", "d3")]
    queue = [a_ticket(1), a_ticket(8, requests=[shares[0]]), a_ticket(9, requests=[shares[1]])]
    fits = {queue[0].requests[0]: a_fit("d0 d1"), shares[0]: a_fit("d2"), shares[1]: a_fit("d3")}
    reservations = [replace(a_reservation(1, 0.0, "d0", "d1", "d2", "d3", user=uid), id=f"b{uid}") for uid in (8, 9)]
    other, *reserving = planned(queue, beside(*reservations, fits=fits))

    assert [position.now for position in reserving] == [True, True]  # both may be gone before they claim
    assert (other.now, set(other.kept) >= {"d0", "d1"}) == (False, True)


def test_what_its_user_has_claimed_sets_the_other_device_free() -> None:
    assert [position.now for position in beside_the_user_of_a_reservation(held=("d1",))] == [True, True]


def test_a_job_with_a_limit_that_joins_one_without_does_not_make_its_end_known() -> None:
    joins = Request(share=True, memory=2**30, devices=("d1",))
    queue = [a_ticket(1, requests=[joins], time_limit=50.0), a_ticket(2)]
    fits = {joins: a_fit("d1"), queue[1].requests[0]: a_fit("d0 d1", free="d0")}
    first, second = planned(queue, beside(a_reservation(1, 100.0), fits=fits, free="d0"))

    assert (first.now, second.now, second.held_back_by) == (True, False, "0.b1")
