"""What a plan leaves to reservations: which devices are kept from whom, who is held back by which, and who is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lines import HOUR, a_machine, a_ticket, planned, started

from gpuguard.queue import backfill as plans
from gpuguard.queue.backfill import Fit, Machine, QueuePosition
from gpuguard.queue.calendar import DeviceReservations
from gpuguard.request import Request


def a_booking(gpus: int, begins: float, *devices: str, user: int = 9, **fields: Any) -> DeviceReservations:
    return DeviceReservations("b1", user, f"u{user}", gpus, begins, begins + HOUR, devices or ("d0", "d1"), **fields)


def test_a_reservation_keeps_its_devices_from_jobs_that_may_last_until_then() -> None:
    def passing(user: int = 1, gpus: int = 2, begins: float = 100.0, **fields: float) -> bool:
        line = [a_ticket(user, **fields)]
        machine = Machine(a_machine(line, 2).fits, bookings=(a_booking(gpus, begins),), free=frozenset({"d0", "d1"}))
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

    assert not started(planned(line, Machine(fits, bookings=(a_booking(2, 0.0),), free=frozenset({"d1"}))))
    assert started(planned(line, Machine(fits, bookings=(a_booking(1, 0.0, held=("d0",)),), free=frozenset({"d1"}))))


def test_devices_that_nobody_in_line_wants_are_free_for_a_reservation() -> None:
    line = [a_ticket(ways=[only := Request(devices=("d0",))])]
    fits = {only: Fit(("d0",), frozenset({"d0"}))}
    machine = Machine(fits, bookings=(a_booking(1, 0.0, "d0", "d1"),), free=frozenset({"d0", "d1"}))

    assert started(planned(line, machine)) == [line[0].id]


def test_whoever_a_reservation_holds_back_hears_of_the_one_that_has_his_device() -> None:
    line = [a_ticket(ways=[only := Request(devices=("d0",))])]
    others = [replace(a_booking(1, 10.0, f"d{number}"), id=f"other {number}") for number in range(1, 8)]
    bookings = (*others, a_booking(1, 100.0, "d0"))
    free = frozenset(f"d{number}" for number in range(8))
    (place,) = planned(line, Machine({only: Fit(("d0",), frozenset({"d0"}))}, bookings=bookings, free=free))

    assert (place.passes, place.start) == ("b1", 100.0 + HOUR)


def test_so_does_he_who_would_have_to_wait_like_many_shorter_jobs_too() -> None:
    line = [a_ticket(1, 2, time_limit=20.0), *(a_ticket(2, time_limit=6.0 + n) for n in range(100))]
    fits = a_machine(line, 2, free=1).fits
    machine = Machine(fits, {"d1": 5.0}, bookings=(a_booking(1, 100.0, "d0"),), free=frozenset({"d0"}))
    places = planned(line, machine)

    assert [place.passes for place in places] == [None, *[line[0].id] * 95, *["b1"] * 5]


def test_a_reservation_does_not_count_on_a_claim_that_should_have_ended() -> None:
    def passing(limit: float) -> bool:
        line = [a_ticket()]
        limits, booking = {"d1": limit}, a_booking(1, 100.0)
        return bool(
            started(
                planned(
                    line,
                    Machine(a_machine(line, ["d0"]).fits, bookings=(booking,), free=frozenset({"d0"}), limits=limits),
                )
            )
        )

    assert passing(1.0)
    assert not passing(0.0)


def test_of_the_way_that_he_takes_the_device_that_he_likes_least_is_kept_from_him() -> None:
    wide, narrow = Request(num_gpus=2), Request()
    fits = {wide: Fit(("d1", "d0"), frozenset()), narrow: Fit(("d0", "d1"), frozenset({"d0", "d1"}))}
    machine = Machine(fits, bookings=(booking := a_booking(1, 100.0),), free=frozenset({"d0", "d1"}))
    (place,) = planned([a_ticket(ways=[wide, narrow])], machine)

    assert (place.devices, place.kept) == (("d0",), {"d1": booking})


def test_a_reservation_counts_on_the_device_of_a_job_that_starts_now_if_its_limit_ends_before() -> None:
    def passing(**fields: float) -> bool | list[str]:
        line = [a_ticket(1, ways=[only := Request(devices=("d1",))], **fields), a_ticket(2, promise=2 * HOUR)]
        fits = {**a_machine(line[1:], 2).fits, only: Fit(("d1",), frozenset({"d1"}))}
        machine = Machine(fits, bookings=(a_booking(1, 100.0),), free=frozenset({"d0", "d1"}))
        first, second = planned(line, machine)
        assert first.now
        return second.now or list(second.kept)

    assert passing(time_limit=100.0) is True
    assert passing(time_limit=101.0) == passing() == ["d0"]


def test_nobody_takes_a_device_for_which_a_reservation_would_move_to_that_of_another() -> None:
    def passing(limit: float) -> list[str]:
        both, other = Request(num_gpus=2, devices=("d1", "d2")), Request(devices=("d0",))
        line = [a_ticket(1, ways=[both], time_limit=limit), a_ticket(2, ways=[other])]
        fits = {both: Fit(("d1", "d2"), frozenset({"d1"})), other: Fit(("d0",), frozenset({"d0"}))}
        free = frozenset({"d0", "d1"})
        return started(planned(line, Machine(fits, {"d2": 95.0}, bookings=(a_booking(1, 100.0),), free=free)))

    assert passing(limit=5.0)
    assert not passing(limit=6.0)


def test_whoever_uses_no_more_than_his_own_reservation_passes_everybody() -> None:
    line = [a_ticket(1, 2), a_ticket(9, 1)]
    machine = a_machine(line, 2, free=frozenset({"d0", "d1"}))
    his = Machine(machine.fits, bookings=(a_booking(1, 0.0, "d0"),), free=frozenset({"d0", "d1"}))

    assert started(planned(line, machine)) == [line[0].id]
    assert started(planned(line, his)) == [line[1].id]


def test_of_two_who_are_held_back_for_each_other_the_first_in_line_starts() -> None:
    """When the first has started his reservation keeps other devices: then the second starts later than was planned."""
    line = [a_ticket(1, 2, time_limit=2.0), a_ticket(2, time_limit=9.0)]
    fits = a_machine(line, ["d1", "d0", "d2"], free=["d0", "d2"]).fits
    booking = a_booking(2, 0.0, "d0", "d1", "d2", user=1, held=("d1",))

    assert started(planned(line, Machine(fits, bookings=(booking,), free=frozenset({"d0", "d2"})))) == [line[0].id]


def test_whose_reservation_has_begun_chooses_before_a_shorter_job_that_came_first() -> None:
    line = [a_ticket(1, time_limit=1.0), a_ticket(9)]
    machine = Machine(a_machine(line, 2).fits, bookings=(a_booking(1, 0.0),), free=frozenset({"d0", "d1"}))

    assert [place.devices for place in planned(line, machine)] == [("d1",), ("d0",)]


def test_a_request_for_more_than_there_is_never_starts_beside_a_reservation_either() -> None:
    line = [a_ticket(gpus=9)]
    machine = Machine(a_machine(line, 2).fits, bookings=(a_booking(1, 100.0),), free=frozenset({"d0", "d1"}))

    assert [(place.request, place.devices, place.now) for place in planned(line, machine)] == [(None, (), False)]


def test_of_two_devices_neither_may_be_kept_for_somebody_by_the_time_that_the_other_is_free() -> None:
    line = [a_ticket(1, 2, time_limit=30.0)]
    fits = a_machine(line, 2, free=["d0"]).fits
    booking = a_booking(1, 40.0, "d0")
    machine = Machine(fits, {"d1": 50.0}, bookings=(booking,), free=frozenset({"d0"}))
    (place,) = planned(line, machine)

    assert (place.start, place.devices) == (booking.ends, ("d1", "d0"))


def a_guest_beside(**fields: Any) -> list[QueuePosition]:
    """The plan for one who could have d0, and another one who may share d1 and for whom one of both is reserved."""
    line = [a_ticket(1), a_ticket(9, ways=[share := Request(share=True, memory=2**30)])]
    fits = {
        line[0].requests[0]: Fit(("d0", "d1"), frozenset({"d0"})),
        share: Fit(("d1", "d0"), frozenset({"d0", "d1"})),
    }
    return planned(line, Machine(fits, bookings=(a_booking(1, 0.0, **fields),), free=frozenset({"d0"})))


def test_nobody_takes_what_is_reserved_because_its_user_is_about_to_claim_another_device() -> None:
    other, guest = a_guest_beside()

    assert (guest.now, guest.devices) == (True, ("d1",))  # he may be gone before he claims it
    assert (other.now, other.passes, set(other.kept)) == (False, "b1", {"d0", "d1"})


def test_nobody_takes_what_is_reserved_because_the_users_of_two_reservations_are_about_to_claim_others() -> None:
    shares = [Request(share=True, memory=2**30, devices=(uuid,)) for uuid in ("d2", "d3")]
    line = [a_ticket(1), a_ticket(8, ways=[shares[0]]), a_ticket(9, ways=[shares[1]])]
    fits = {line[0].requests[0]: Fit(("d0", "d1"), frozenset({"d0", "d1"}))}
    fits |= {way: Fit(way.devices, frozenset(way.devices)) for way in shares}
    bookings = tuple(replace(a_booking(1, 0.0, "d0", "d1", "d2", "d3", user=uid), id=f"b{uid}") for uid in (8, 9))
    other, *guests = planned(line, Machine(fits, bookings=bookings, free=frozenset({"d0", "d1"})))

    assert [guest.now for guest in guests] == [True, True]  # both may be gone before they claim
    assert (other.now, set(other.kept) >= {"d0", "d1"}) == (False, True)


def test_what_its_user_has_claimed_sets_the_other_device_free() -> None:
    assert [place.now for place in a_guest_beside(held=("d1",))] == [True, True]


def test_a_job_with_a_limit_that_joins_one_without_does_not_make_its_end_known() -> None:
    joins = Request(share=True, memory=2**30, devices=("d1",))
    line = [a_ticket(1, ways=[joins], time_limit=50.0), a_ticket(2)]
    fits = {joins: Fit(("d1",), frozenset({"d1"})), line[1].requests[0]: Fit(("d0", "d1"), frozenset({"d0"}))}
    first, second = planned(line, Machine(fits, bookings=(a_booking(1, 100.0),), free=frozenset({"d0"})))

    assert (first.now, second.now, second.passes) == (True, False, "b1")
