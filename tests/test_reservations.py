"""Reservations: which count, what their files may contain, and what is left of those that were forged or killed."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import HOUR, NOW, UUIDS, Machine, a_claim_record, a_device, a_reservation, a_reserved, a_snapshot
from own_claims import acquire
from queues import a_ticket
from users_and_clock import Pretended

from gpuguard import users
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import DENIED, Restriction, change
from gpuguard.cli.reserve import parse_when
from gpuguard.errors import InvalidRequest, LockDirectoryError
from gpuguard.model import ClaimRecord
from gpuguard.queue import reservations
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import ReservationKeys
from gpuguard.queue.reservations import (
    LOOKED_SECONDS,
    MOST_COUNTED,
    ReservationStatus,
    clock_text,
    judge,
    read_reservations,
    record_arrival,
    record_arrivals_seen,
    remove_reservation,
    reservation_calendar,
    what_if,
    write_reservation,
)
from gpuguard.request import Request

KEYS = ReservationKeys()
FREE = tuple(a_device(uuid=uuid, index=index) for index, uuid in enumerate(UUIDS))


def statuses(
    *found: Reservation, now: float = NOW, claims: tuple[ClaimRecord, ...] = (), **more: Any
) -> list[ReservationStatus]:
    return judge(found, UUIDS, claims, more.get("arrivals", {}), more.get("keys", KEYS), now)


def reasons(*found: Reservation, **more: Any) -> list[str]:
    return [status.why_not for status in statuses(*found, **more)]


def is_over(reservation: Reservation, **more: Any) -> bool:
    (status,) = statuses(reservation, **more)
    return status.over


def a_claim(user: int = 1, *devices: str, since: float | None = NOW) -> ClaimRecord:
    return a_claim_record(*(devices or UUIDS[:1]), uid=user, user=f"u{user}", since=since)


def test_what_is_beyond_the_quota_does_not_count_the_last_made_first():
    first, second = a_reservation(gpus=2, made=NOW - 1), a_reservation(gpus=1)

    assert reasons(second, first) == [
        "",
        "users may reserve 2 GPUs at a time here (2 of them in earlier ones), all their reservations together "
        "(by line.yaml of the site, or by default; root may reserve more)",
    ]
    assert reasons(first, a_reservation(2, gpus=1)) == ["", ""]


def test_a_reservation_that_is_over_does_not_count_against_the_quota():
    ended = a_reservation(gpus=2, begins=-2 * HOUR, made=NOW - 3 * HOUR)
    missed = a_reservation(gpus=2, begins=-HOUR, hours=2, made=NOW - 2 * HOUR)

    judged = statuses(ended, missed, a_reservation(gpus=2))
    assert [(status.why_not, status.over) for status in judged] == [("", True), ("", False)]


BEYOND = " (by line.yaml of the site, or by default; root may reserve more)"
TOGETHER = ", all their reservations together"
AHEAD = {"begins": 14 * 24 * HOUR}  # as far as users may


@pytest.mark.parametrize(
    ("reservation", "keys", "said"),
    [
        (a_reservation(gpus=2), KEYS, ""),
        (a_reservation(gpus=3), KEYS, f"users may reserve 2 GPUs at a time here{TOGETHER}"),
        (a_reservation(gpus=2), replace(KEYS, devices=1), f"users may reserve 1 GPU at a time here{TOGETHER}"),
        (a_reservation(), replace(KEYS, devices=0), f"users may reserve no GPUs at a time here{TOGETHER}"),
        (a_reservation(hours=24 + 1 / HOUR), KEYS, ""),  # a moment more, of the command that says it
        (a_reservation(hours=24 + 2 / HOUR), KEYS, "users may reserve for 1d at most here"),
        (a_reservation(**AHEAD, made=NOW - 1), KEYS, ""),
        (a_reservation(**AHEAD, made=NOW - 2), KEYS, "users may reserve 14d ahead at most here"),
    ],
)
def test_users_may_not_have_more_longer_or_earlier_and_root_may(reservation, keys, said):
    assert reasons(reservation, keys=keys) == [f"{said}{BEYOND}" if said else ""]
    assert reasons(replace(reservation, maker=0), keys=keys) == [""]


def test_no_more_reservations_count_than_can_be_planned_with():
    many = [a_reservation(maker=0, begins=number * HOUR) for number in range(MOST_COUNTED + 1)]

    assert reasons(*many) == [*[""] * MOST_COUNTED, f"there are more than {MOST_COUNTED} already"]


def test_a_reservation_for_which_earlier_ones_leave_no_room_does_not_count_even_if_it_is_roots():
    first, second = a_reservation(gpus=6, maker=0, made=NOW - 1), a_reservation(gpus=3, maker=0)

    assert reasons(first, second) == ["", "earlier reservations leave too few GPUs at that time"]
    assert reasons(first, replace(second, begins=first.ends, ends=first.ends + 1)) == ["", ""]


def test_a_reservation_of_devices_that_are_gone_does_not_count():
    assert reasons(a_reservation(gpus=2, devices=("d0", "gone"))) == ["only 1 of its GPUs is there"]


def test_a_refusal_says_from_when_on_there_are_enough():
    first = a_reservation(gpus=7, maker=0)
    known, wanted = a_reserved(ReservationStatus(first)), a_reservation(2, gpus=2, begins=1.5 * HOUR, id="")

    assert what_if(wanted, known, UUIDS) == (
        f"earlier reservations leave too few GPUs at that time, and enough from {clock_text(first.ends, NOW)} on"
    )
    assert what_if(replace(wanted, num_gpus=9, maker=0), known, UUIDS) == "only 8 of its GPUs are there"
    assert what_if(replace(wanted, begins=first.ends, ends=first.ends + HOUR), known, UUIDS) == ""


NO_SHOW = KEYS.no_show


def test_it_is_over_when_its_user_has_no_claim_in_time_and_a_later_claim_does_not_bring_it_back():
    reservation = a_reservation(begins=0.0, made=NOW - HOUR)

    assert statuses(reservation, now=NOW + NO_SHOW - 1) == [ReservationStatus(reservation, "", NOW + NO_SHOW)]
    missed = ReservationStatus(reservation, "", NOW + NO_SHOW, over=True)
    assert statuses(reservation, now=NOW + NO_SHOW) == [missed]
    for late in (0, 1):
        assert is_over(reservation, now=NOW + NO_SHOW + 2, claims=(a_claim(since=NOW + NO_SHOW + late),))


def test_a_user_who_has_a_claim_keeps_it_until_its_end():
    reservation = a_reservation(begins=0.0, hours=9, made=NOW - HOUR)
    (here,) = statuses(reservation, now=NOW + 8 * HOUR, claims=(a_claim(since=NOW - HOUR),))

    assert (here.over, here.reservation.held, here.no_show_at) == (False, ("d0",), None)
    for claim, over in ((a_claim(2), True), (a_claim(1, "elsewhere"), True), (a_claim(since=None), False)):
        assert is_over(reservation, now=NOW + 8 * HOUR, claims=(claim,)) is over
    assert not statuses(reservation, now=NOW + 9 * HOUR, claims=(a_claim(),))


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (0, "%H:%M"),
        (23 * HOUR, "%a %d %b %H:%M"),
        (31 * 24 * HOUR, "%a %d %b %H:%M"),
        (365 * 24 * HOUR, "%a %d %b %H:%M"),
    ],
)
def test_a_time_of_another_day_has_its_date(later, said):
    noon = time.mktime((2027, 1, 15, 12, 0, 0, 0, 0, -1))

    assert clock_text(noon + later, noon) == time.strftime(said, time.localtime(noon + later))


def test_between_two_jobs_it_stays_for_as_long_as_its_user_is_awaited():
    reservation = a_reservation(begins=0.0, hours=9, made=NOW - HOUR)
    arrivals = {reservation.key: NOW + HOUR}

    assert not is_over(reservation, now=NOW + HOUR + NO_SHOW - 1, arrivals=arrivals)
    assert is_over(reservation, now=NOW + HOUR + NO_SHOW, arrivals=arrivals)


def test_the_end_of_a_job_elsewhere_does_not_bring_it_back(tmp_path):
    machine, directory = Machine(), LockDirectory(*[str(tmp_path)] * 3)
    uuids = [each.uuid for each in machine.devices]
    with Pretended(NOW, user=1) as world:
        write_reservation(directory, a_reservation(begins=0.0, hours=9, devices=tuple(uuids[:1])))
        claim = acquire(machine, Request(devices=("3",)), directory)
        world.clock += NO_SHOW
        before = reservation_calendar(directory, uuids, (), world.clock).statuses
        claim.release()
        after = reservation_calendar(directory, uuids, (), world.clock).statuses

    assert [one.over for one in (*before, *after)] == [True, True]


def test_those_who_wait_are_woken_when_one_begins_or_is_over():
    running, coming = a_reservation(begins=-60.0, made=NOW - HOUR), a_reservation(2)

    assert a_reserved(*statuses(running, coming)).changes_at == NOW - 60 + NO_SHOW
    assert a_reserved(*statuses(running, coming, claims=(a_claim(),))).changes_at == running.ends
    assert a_reserved(*statuses(coming)).changes_at == coming.begins
    assert a_reserved(*statuses(a_reservation(gpus=9))).changes_at == float("inf")


def made_in(directory: LockDirectory, **fields: Any) -> Reservation:
    own = {"maker": os.geteuid(), "uid": os.geteuid(), "user": "", "id": "", "begins": 60.0}
    wanted = a_reservation(**{**own, **fields})
    now = time.time()
    return write_reservation(directory, replace(wanted, begins=wanted.begins - NOW + now, ends=wanted.ends - NOW + now))


def test_what_is_written_is_read(directory):
    made = made_in(directory, gpus=2, note="course")

    assert read_reservations(directory, time.time()) == ([made], [], {})
    assert (made.num_gpus, made.devices, made.note, made.maker) == (2, UUIDS, "course", os.geteuid())
    assert made.user == users.user_name(os.geteuid())
    assert abs(made.made - time.time()) < 60
    assert directory.has("ticket.", "reserve.")


def test_one_that_has_ended_is_removed_with_all_that_belongs_to_it(directory):
    made = made_in(directory)
    (path,) = record_arrival(directory, [made])

    assert read_reservations(directory, made.ends)[0] == []
    assert not directory.has("ticket.", "reserve.")
    read_reservations(directory, time.time())
    assert os.path.exists(path)  # a moment ago: the next look may still need it


def test_an_arrival_is_noted_for_its_user_alone(directory):
    made = made_in(directory)
    other = replace(made, uid=os.geteuid() + 1)

    assert record_arrival(directory, [other]) == ()
    record_arrival(directory, [other, made])
    _, _, arrivals = read_reservations(directory, time.time())
    assert list(arrivals) == [made.key]


OF_GROUP: dict[str, Any] = {"gid": 50, "group": "vision"}


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[int, bool | None]:
    """uid -> whether the user database has that user in the group; None: it does not say."""
    members: dict[int, bool | None] = {}
    monkeypatch.setattr(users, "group_name", lambda gid: "vision" if gid == 50 else None)
    monkeypatch.setattr(reservations, "group_name", users.group_name)
    for module in (users, reservations):
        monkeypatch.setattr(module, "is_in_group", lambda uid, gid: gid == 50 and members.get(uid))
    return members


def test_one_for_a_group_is_read_as_it_was_written_and_without_groups_as_its_makers(directory, group):
    group[os.geteuid()] = True
    made = made_in(directory, **OF_GROUP)
    [read] = read_reservations(directory, time.time())[0]

    assert read == made and (read.whose, read.admits(os.geteuid()), read.admits(7)) == ("group vision", True, False)
    [path] = Path(directory.records).glob("*reserve.*.json")
    assert json.loads(path.read_text())["uid"] == os.geteuid()


def test_a_user_reserves_for_no_group_that_they_are_certainly_not_in_and_root_for_any(directory, group):
    made, user = made_in(directory, **OF_GROUP), os.geteuid() or 1234
    [path] = Path(directory.records).glob("*reserve.*.json")
    if user != made.maker:
        users_own = path.with_name(path.name.replace("reserve.0.", f"reserve.{user}."))
        users_own.write_text(json.dumps({**json.loads(path.read_text()), "uid": user}))
        os.chown(users_own, user, -1)
    assert user in [one.maker for one in read_reservations(directory, time.time())[0]]  # while nobody knows
    group.update({0: False, user: False})

    found, [ignored], _ = read_reservations(directory, time.time())
    assert [one.maker for one in found] == [0] * (os.geteuid() == 0)
    assert ignored.uid == user and "only root and its members" in ignored.reason


def test_members_come_to_it_and_nobody_else_and_a_group_without_any_is_missed(directory, group):
    made = made_in(directory, **OF_GROUP, begins=-60.0)
    assert record_arrival(directory, [made]) == ()
    assert read_reservations(directory, time.time())[2] == {}
    group[os.geteuid()] = True
    record_arrival(directory, [made])
    assert list(read_reservations(directory, time.time())[2]) == [made.key]

    here, stranger = a_claim(8, UUIDS[0]), a_claim(7, UUIDS[1])
    of_two = a_reservation(**{**OF_GROUP, "members": (8, 9)})
    assert statuses(of_two, claims=(here, stranger))[0].reservation.held == (UUIDS[0],)
    assert is_over(of_two, now=of_two.begins + KEYS.no_show, claims=(stranger,))
    assert not is_over(of_two, now=of_two.begins + KEYS.no_show, claims=(here,))


def test_of_a_group_the_daemon_sees_whether_any_member_has_come(directory, group):
    made, now = made_in(directory, **OF_GROUP, begins=-60.0), time.time()
    group[8] = True
    for claimant, seen in ((7, 0.0), (8, pytest.approx(now, abs=60.0))):
        mine = a_claim(claimant, made.devices[0])
        record_arrivals_seen(directory, a_snapshot(*FREE, claims=(mine,)), (), now)
        assert read_reservations(directory, now)[2] == {made.key: seen}


def test_what_a_user_reserves_for_a_group_counts_in_their_own_quota(directory):
    own = a_reservation(gpus=1)
    of_group = a_reservation(gpus=2, **OF_GROUP)

    assert reasons(own, of_group)[0] == "" and "users may reserve 2 GPUs" in reasons(own, of_group)[1]
    assert reasons(own, replace(of_group, maker=0)) == ["", ""]


def test_a_second_name_for_a_file_of_its_user_ends_no_reservation(directory):
    made = made_in(directory, uid=os.geteuid())
    mark = Path(f"{directory.records}/{directory.prefix}waived.{made.uid}.{made.key}")
    own = mark.with_name("own")
    own.touch()
    os.link(own, mark)

    assert [one.key for one in read_reservations(directory, time.time())[0]] == [made.key]
    own.unlink()
    assert read_reservations(directory, time.time())[0] == []  # now it is the file of its user


@pytest.mark.root
def test_any_number_of_files_of_another_user_hides_none_of_the_user_and_few_are_looked_at(directory, monkeypatch):
    made = made_in(directory, uid=os.geteuid())
    for about in (made.key, "20002.gone"):
        for number in range(MOST_COUNTED + 50):
            mark = Path(f"{directory.records}/{directory.prefix}waived.{made.uid}.{about}.{number}")
            mark.touch()
            os.chown(mark, 20002, 20002)
    looked, real = list[str](), reservations.status_in_place
    monkeypatch.setattr(reservations, "status_in_place", lambda path: looked.append(path) or real(path))

    assert [one.key for one in read_reservations(directory, time.time())[0]] == [made.key]
    assert len(looked) == MOST_COUNTED
    Path(f"{directory.records}/{directory.prefix}waived.{made.uid}.{made.key}").touch()
    assert read_reservations(directory, time.time())[0] == []


def test_no_member_waives_what_is_for_a_group(directory, group):
    group[os.geteuid()] = True
    made = made_in(directory, **OF_GROUP)
    Path(f"{directory.records}/{directory.prefix}waived.{os.geteuid()}.{made.key}").touch()

    assert [one.key for one in read_reservations(directory, time.time())[0]] == [made.key]


def running(directory: LockDirectory) -> Reservation:
    """A reservation that has begun."""
    return made_in(directory, uid=os.geteuid() or 7, begins=-60.0, gpus=2)


def test_where_a_daemon_looks_no_file_of_the_user_keeps_a_reservation_and_their_claims_do(directory):
    made, now = running(directory), time.time()
    mine = a_claim(made.uid, made.devices[0])
    if made.uid == os.geteuid():
        record_arrival(directory, [made])

    record_arrivals_seen(directory, a_snapshot(*FREE), (), now)
    assert read_reservations(directory, now)[2] == {made.key: 0.0}
    record_arrivals_seen(directory, a_snapshot(*FREE, claims=(mine,)), (), now)
    assert read_reservations(directory, now)[2] == {made.key: pytest.approx(now, abs=60.0)}


def test_who_has_to_wait_for_a_reservation_has_come_and_who_waits_beside_free_devices_has_not(directory):
    made, now = running(directory), time.time()
    waits = a_ticket(made.uid)
    others = a_claim(waits.uid + 1, *made.devices[1:])

    record_arrivals_seen(directory, a_snapshot(*FREE), (waits,), now)
    assert read_reservations(directory, now)[2] == {made.key: 0.0}
    record_arrivals_seen(directory, a_snapshot(*FREE, claims=(others,)), (waits,), now)
    assert read_reservations(directory, now)[2] == {made.key: pytest.approx(now, abs=60.0)}


def test_without_a_daemon_that_looks_the_files_of_the_users_count_again(directory):
    made, now = running(directory), time.time()
    record_arrivals_seen(directory, a_snapshot(*FREE), (), now)

    assert made.key in read_reservations(directory, now)[2]
    assert read_reservations(directory, now + 2 * LOOKED_SECONDS)[2] == {}


def test_what_a_daemon_has_seen_of_reservations_that_are_over_is_removed(directory):
    made, now = running(directory), time.time()
    seen = a_snapshot(*FREE, claims=(a_claim(made.uid, *made.devices),))
    record_arrivals_seen(directory, seen, (), now)
    [path] = Path(directory.path).rglob("arrived.*")
    remove_reservation(directory, made)
    made_in(directory)
    record_arrivals_seen(directory, seen, (), now)

    assert not path.exists()


def test_as_long_as_a_user_is_denied_nothing_is_kept_for_their_reservations(directory):
    now, uid = time.time(), os.geteuid() or 7  # root reserves for others, too
    made_in(directory, uid=uid)
    denial = Restriction(str(uid), now, now + 60.0)
    change(directory, DENIED, lambda restrictions: restrictions.update({str(uid): denial}))
    found = [reservation_calendar(directory, UUIDS, (), when) for when in (now, now + 61.0)]

    assert [len(calendar.reservations) for calendar in found] == [0, 1]
    assert "may make no claim" in found[0].statuses[0].why_not


def test_cancelling_twice_is_no_fault(directory):
    made = made_in(directory)
    remove_reservation(directory, made)
    remove_reservation(directory, made)

    assert reservation_calendar(directory, UUIDS, (), time.time()).statuses == ()


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(tmp_path):
    nowhere = LockDirectory(str(tmp_path), str(tmp_path), str(tmp_path / "missing"))

    with pytest.raises(LockDirectoryError, match="no reservation can be made"):
        made_in(nowhere)


VALID = {
    "schema": 1, "uid": os.geteuid(), "num_gpus": 1, "begins_unix_seconds": 2e9, "ends_unix_seconds": 2e9 + 60,
    "devices": ["d0"], "note": None,
}  # fmt: skip
WRONG: list[bytes] = [
    b"", b"{", b"[]", b"null", b"\xff", b"1" * 5000, b"[" * 4000, json.dumps({**VALID, "note": "x" * 5000}).encode(),
    *(json.dumps({key: value for key, value in VALID.items() if key != name}).encode()
      for name in ("uid", "num_gpus", "begins_unix_seconds", "ends_unix_seconds", "devices")),
    *(json.dumps({**VALID, name: value}).encode() for name, value in (
        ("uid", -1), ("uid", 2**32), ("uid", "0"), ("uid", True), ("num_gpus", 0), ("num_gpus", 1.5),
        ("num_gpus", 10**9),
        ("begins_unix_seconds", float("nan")), ("ends_unix_seconds", float("inf")), ("ends_unix_seconds", 2e9),
        ("begins_unix_seconds", 10**400), ("devices", "d0"), ("devices", [1]), ("devices", None))),
]  # fmt: skip


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_a_file_that_cannot_be_understood_is_reported_and_does_not_count(directory, content):
    path = Path(directory.records) / f"reserve.{os.geteuid()}.abc.json"
    path.write_bytes(content)
    found, ignored, _ = read_reservations(directory, time.time())

    assert (found, [one.id for one in ignored]) == ([], ["abc"])


def test_the_same_file_counts_when_nothing_is_wrong_with_it(directory):
    (Path(directory.records) / f"reserve.{os.geteuid()}.abc.json").write_text(json.dumps({**VALID, "more": [1]}))

    assert [one.id for one in read_reservations(directory, time.time())[0]] == ["abc"]


def test_links_pipes_and_names_of_others_do_not_count(directory, tmp_path):
    records, own = Path(directory.records), os.geteuid()
    real = tmp_path / "real.json"
    real.write_text(json.dumps(VALID))
    (records / f"reserve.{own}.symbolic.json").symlink_to(real)
    os.link(real, records / f"reserve.{own}.hard.json")
    os.mkfifo(records / f"reserve.{own}.fifo.json")
    (records / f"reserve.{own}.folder.json").mkdir()
    (records / f"reserve.{own + 1}.other.json").write_text(json.dumps(VALID))
    (records / f"reserve.{own}.a-b.json").write_text(json.dumps(VALID))
    found, ignored, _ = read_reservations(directory, time.time())

    assert (found, len(ignored)) == ([], 6)


def test_what_a_killed_command_left_is_removed_later(directory):
    left = Path(directory.records) / f"reserve.{os.geteuid()}.abc.json.new"
    left.write_text("{")
    read_reservations(directory, time.time())
    assert left.exists()
    os.utime(left, (0, 0))
    read_reservations(directory, time.time())

    assert not left.exists()


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("now", (2026, 11, 20, 20, 30)),
        ("in 2h", (2026, 11, 20, 22, 30)),
        ("20:31", (2026, 11, 20, 20, 31)),
        ("09:00", (2026, 11, 21, 9, 0)),
        ("9:00", (2026, 11, 21, 9, 0)),
        ("Tomorrow  21:00", (2026, 11, 21, 21, 0)),
        ("Mon 09:00", (2026, 11, 23, 9, 0)),
        ("friday 20:31", (2026, 11, 20, 20, 31)),
        ("Friday 09:00", (2026, 11, 27, 9, 0)),
        ("2026-11-21T09:00", (2026, 11, 21, 9, 0)),
        ("2027-01-31 00:00", (2027, 1, 31, 0, 0)),
    ],
)
def test_times_as_people_write_them(text, then):
    now = time.mktime((2026, 11, 20, 20, 30, 0, 0, 0, -1))

    assert parse_when(text, now) == time.mktime((*then, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("words", "hours"),
    [
        ("--from 2099-11-20T20:30 --until 22:00", 1.5),
        ("--from 2099-11-20T20:30 --until 09:00", 12.5),
        ("--from 2099-11-20T20:30 --until 2099-11-22T20:30", 48.0),
        ("--from 2099-11-20T20:30 --for 2h", 2.0),
    ],
)
def test_a_reservation_ends_after_a_time_or_at_one(words, hours, node, command, directory, monkeypatch, tmp_path):
    (tmp_path / "line.yaml").write_text("reservations: {longest: 90d, ahead: 40000d}\n")
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))
    status, said, complaint = command("reserve", "--dir", directory.path, "--json", *words.split())

    assert status == 0, complaint
    [made] = json.loads(said)["reservations"]
    assert made["ends"] - made["begins"] == hours * HOUR


NO_CLOCKS = ["", "9", "25:00", "-1:00", "09:60", "t09:00", "09:00 tomorrow", "tomorrow", "in 2", "in the past"]
NO_DATES = [f"2026-{text}" for text in ("02-30T09:00", "13-01T09:00", "11-21 T09:00", "11-19T09:00", "11-21T09:00:00Z")]


@pytest.mark.parametrize("text", [*NO_CLOCKS, *NO_DATES])
def test_what_is_no_time_is_refused_with_advice(text):
    with pytest.raises(InvalidRequest, match=r"write|units|fewer days"):
        parse_when(text, time.mktime((2026, 11, 20, 20, 30, 0, 0, 0, -1)))
