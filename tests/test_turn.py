"""One's turn in line: what may be taken now, and when the rest starts, in words."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
from builders import Machine, a_claim_record, a_device, a_process, a_snapshot
from claiming import acquire
from lines import a_ticket

from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.eligibility import Refusal
from gpuguard.errors import ImpossibleRequest, NotEnoughGpus
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import PlannedReservation, clock_text
from gpuguard.queue.explain import QueueAnswer, new_ticket, promised, start_text
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.queue.tickets import OwnTicket, read_tickets, ticket_content
from gpuguard.request import Request
from gpuguard.users import user_name

NOW = 1_700_000_000.0
HOUR = 3600.0
DEVICES = (a_device(0), a_device(1))
FIRST, SECOND = (device.uuid for device in DEVICES)
ONE = Request()


def a_place(name="mine", number=1, start=None, way=ONE, devices=(FIRST,), ways=(ONE,), **fields) -> QueuePosition:
    more = {key: fields.pop(key) for key in ("after", "time_limit", "user") if key in fields}
    ticket = replace(a_ticket(id=name, ways=ways), **more)
    in_order = fields.pop("in_order", start)
    return QueuePosition(ticket, number, start, in_order, request=way, devices=devices, **fields)


def a_line(*places: QueuePosition, **fields) -> QueueState:
    return QueueState(places, (), a_snapshot(*DEVICES), QueueFacts(**fields), NOW)


def said(place: QueuePosition, *before: QueuePosition, **fields) -> str:
    return start_text(place, a_line(*before, place, **fields))


# In words.


def test_what_needs_no_plan():
    assert said(a_place(after="job 7 to end")) == "not in line yet: job 7 to end"
    assert said(a_place(now=True)) == "starts now"
    assert said(a_place(way=None)) == "no devices for it as things are"
    assert said(a_place(devices=())) == "too far behind for a plan"
    assert said(a_place(start=NOW + 7200)) == "starts in about 2h"
    assert said(a_place(start=NOW - 5)) == "starts in about 0s"


def test_what_would_delay_a_request_before_it():
    other = a_place("other", user="bob", ways=(Request(num_gpus=4),))

    assert said(a_place(held_back_by="other"), other) == (
        "held back: it would delay bob's request for 4, which came before"
    )  # fmt: skip
    assert said(a_place(held_back_by="gone")) == "held back: it would delay reservation gone"


@pytest.mark.parametrize(
    ("begins", "limit", "start", "text"),
    [
        (HOUR, None, None, "from {begins}; with a --time-limit that ends before, it could start now"),
        (HOUR, 7200.0, None, "from {begins}"),
        (0.0, None, None, "until {ends}"),
        (-HOUR, None, 2 * HOUR, "until {ends}; starts in about 2h"),
    ],
)
def test_what_would_delay_a_reservation(begins, limit, start, text):
    booking = PlannedReservation("r", 7, "eve", 1, NOW + begins, NOW + 2 * HOUR, (FIRST,))
    another = PlannedReservation("q", 8, "zoe", 1, NOW, NOW + HOUR, (SECOND,))
    place = a_place(held_back_by="r", time_limit=limit, start=None if start is None else NOW + start)
    when = text.format(begins=clock_text(booking.begins, NOW), ends=clock_text(booking.ends, NOW))

    assert said(place, reservations=(another, booking)) == (
        f"held back: it would delay the reservation of eve {when}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ({"ends": NOW + HOUR}, "when device 1 is free: time limit of bob's job"),
        ({"expected": NOW + HOUR}, "when device 1 is free: earlier jobs of bob's job"),
        ({"ends": NOW + HOUR, "expected": NOW + 9 * HOUR}, "when device 1 is free: time limit of bob's job"),
        ({"ends": NOW + HOUR + 0.9}, "when device 1 is free: time limit of bob's job"),
        ({"ends": NOW + HOUR + 1}, ""),
        ({"ends": NOW + 2 * HOUR}, ""),
        ({}, ""),
    ],
)
def test_the_last_device_to_be_free_and_what_says_so(claim, text):
    place = a_place(start=NOW + HOUR, devices=(FIRST, SECOND))
    claims = (a_claim_record(SECOND, user="bob", since=None, **claim),)

    assert said(place, claims=claims) == f"starts in about 1h{', ' * bool(text)}{text}"


def test_a_start_at_the_end_of_a_reservation_is_said_so():
    booking = PlannedReservation("r", 7, "eve", 1, NOW - HOUR, NOW + HOUR, (FIRST,))
    until = clock_text(booking.ends, NOW)

    assert said(a_place(start=NOW + HOUR), reservations=(booking,)) == (
        f"starts in about 1h, after the reservation of eve until {until}"
    )  # fmt: skip
    assert said(a_place(start=NOW + HOUR + 1), reservations=(booking,)) == "starts in about 1h"


def test_behind_a_request_it_starts_after_the_nearest_one_on_the_same_devices():
    bob, zoe = a_place("bob", 1, user="bob"), a_place("zoe", 2, user="zoe")
    elsewhere, later = a_place("eve", 3, user="eve", devices=(SECOND,)), a_place("max", 5, user="max")
    mine = a_place(number=4, start=NOW + HOUR)

    assert start_text(mine, a_line(bob, zoe, elsewhere, mine, later)) == "starts in about 1h, after zoe's request"
    assert said(a_place(number=2, start=NOW + HOUR), bob) == "starts in about 1h, after bob's request"


def test_where_nobody_knows_when_it_starts_it_is_said_of_whom_one_cannot_tell():
    unknown = "nobody knows when it starts: "
    bob = a_place("bob", 1, user="bob")
    both = a_place(number=1, devices=(FIRST, SECOND))
    free = a_claim_record(FIRST, id="a", user="bob", since=None)
    zoes = a_claim_record(SECOND, id="b", user="zoe", since=None)

    assert said(a_place(number=2), bob) == f"{unknown}bob's request before it has no time limit"
    used = replace(a_line(a_place()), snapshot=a_snapshot(a_device(0, processes=(a_process(),))))
    assert start_text(a_place(), used) == f"{unknown}a device is in use without a claim"
    assert said(a_place()) == f"{unknown}a device is not free, though nobody has claimed it"  # in quarantine, too hot
    assert said(both, claims=(free,)) == f"{unknown}the job of bob has no time limit"
    assert said(both, claims=(zoes, free)) == f"{unknown}the jobs of bob and zoe have no time limit"
    late = a_claim_record(FIRST, id="a", ends=NOW - 10)
    expected = a_claim_record(SECOND, id="b", expected=NOW - 10)
    assert said(both, claims=(late, expected)) == f"{unknown}a job is over its time"
    assert said(both, claims=(late, zoes)) == f"{unknown}the job of zoe has no time limit"


# What may be taken.


def test_whose_turn_it_is_takes_the_way_that_is_planned_and_more_only_where_nobody_waits():
    few, many = Request(num_gpus=1, max_gpus=4), Request(num_gpus=2, max_gpus=8)
    mine = a_place(now=True, ways=(few, many), way=many)

    assert QueueAnswer(a_line(mine), mine, (few, many)).ways == (many,)
    (way,) = QueueAnswer(a_line(mine, a_place("other")), mine, (few, many)).ways
    assert (way.num_gpus, way.max_gpus) == (2, None)


@pytest.mark.parametrize(
    ("place", "later", "impossible"),
    [
        (None, False, False),
        (a_place(now=True), False, False),
        (a_place(), True, False),
        (a_place(way=None), False, True),
        (a_place(way=None, after="another"), False, False),
    ],
)
def test_whose_turn_it_is_not_waits_or_never_starts(place, later, impossible):
    turn = QueueAnswer(a_line(*[place] * bool(place)), place, (ONE,))

    assert (turn.is_later, turn.is_impossible) == (later, impossible)
    assert turn.ways == ((ONE,) if place and place.now else ())


def test_what_others_may_take_now_is_kept_from_him():
    mine, other = a_place(), a_place("other", now=True, user="bob", devices=(SECOND,))

    assert QueueAnswer(a_line(other, mine), mine, (ONE,)).kept == {
        SECOND: "about to be claimed by bob, who waited for it"
    }
    assert QueueAnswer(a_line(other, mine), None, (ONE,)).kept == {}


def test_an_error_says_the_place_and_the_prospects_and_what_it_said_before():
    mine = a_place(number=2, start=NOW + HOUR, ways=(Request(num_gpus=2),))
    turn = QueueAnswer(a_line(a_place("other", devices=()), mine), mine, (ONE,))

    refused = (Refusal(DEVICES[0], ()),)
    error = turn.explained(NotEnoughGpus("wanted 2.\n  device 0: busy", 2, 1, refused))
    assert str(error) == "wanted 2 GPUs: number 2 of 2 in line, starts in about 1h.\n  device 0: busy"
    assert (error.wanted, error.available, error.refused) == (2, 1, refused)
    assert str(QueueAnswer(turn.line, turn.line.places[0], (ONE,)).explained(error)).startswith(
        "wanted 1 GPU: number 1"
    )


def test_who_has_no_place_is_given_no_number():
    denied = a_place(after="its user may make no claim now")
    error = QueueAnswer(a_line(denied), denied, (ONE,)).explained(NotEnoughGpus("wanted 1.", 1, 0, ()))

    assert str(error) == "wanted 1 GPU: not in line yet: its user may make no claim now."


@pytest.mark.parametrize(
    ("after", "text"),
    [
        (None, "not now; it would be number 1 of 1 in line, starts in about 1h"),
        ("job 7 to end", "not in line yet: job 7 to end"),
    ],
)
def test_who_has_not_joined_is_told_what_his_place_would_be_if_he_could(after, text):
    mine = a_place("", start=NOW + HOUR, after=after)

    assert (
        str(QueueAnswer(a_line(mine), mine, (ONE,)).explained(NotEnoughGpus("wanted 1."))) == f"wanted 1 GPU: {text}."
    )


def test_an_error_that_waiting_cannot_help_stays_what_it_is():
    never, error = ImpossibleRequest("never"), NotEnoughGpus("not now")

    assert QueueAnswer(a_line(a_place()), a_place(), (ONE,)).explained(never) is never
    assert QueueAnswer(a_line(), None, (ONE,)).explained(error) is error


def test_whoever_joins_is_promised_a_quarter_of_the_wait_more_than_planned():
    mine = a_place(in_order=NOW + 100)

    assert promised(a_line(mine), QueueRules(), mine.ticket) == NOW + 125
    assert promised(a_line(a_place("other")), QueueRules(), mine.ticket) is None


def test_a_new_ticket_is_of_this_process_and_of_now():
    before = time.time()
    ticket = new_ticket([ONE])

    assert (ticket.id, ticket.uid, ticket.pid, ticket.priority, ticket.command) == (
        "",
        os.geteuid(),
        os.getpid(),
        0,
        (),
    )
    assert before <= ticket.since <= time.time()


# `gpuguard explain` says where a request would stand in line, `gpuguard who` who waits.


@pytest.fixture
def machine(monkeypatch):
    """Two devices."""
    machine = Machine(a_device(0), a_device(1))
    for command in ("explain", "options"):
        monkeypatch.setattr(f"gpuguard.cli.{command}.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def gpuguard(machine, tmp_path, capsys):
    """Run a command; returns (exit code, standard output)."""

    lock_directory(str(tmp_path))

    def run(command, *words):
        status = run_command_line([command, "--dir", str(tmp_path), *words])
        output, error = capsys.readouterr()
        assert error == ""
        return status, output

    return run


@pytest.fixture
def waits(tmp_path):
    """Puts a ticket of this process into the line."""
    held = []

    def put(**fields):
        facts = {"id": "", "uid": os.geteuid(), "user": "", "since": 0.0, "requests": (Request(num_gpus=2),)}
        held.append(
            OwnTicket(lock_directory(str(tmp_path)), ticket_content(Ticket(**{**facts, "pid": os.getpid()} | fields)))
        )
        return held[-1]

    yield put
    for ticket in held:
        ticket.leave()


@pytest.fixture
def job(machine, tmp_path):
    """A claim on one of the two devices, for two hours."""
    with acquire(machine, Request(), lock_directory(str(tmp_path)), time_limit=7200) as claim:
        yield claim


def test_where_nobody_waits_there_is_no_place_in_line(gpuguard, job):
    assert "in line" not in gpuguard("explain", "-n", "2")[1]
    assert json.loads(gpuguard("explain", "--json")[1])["line"] is None


def test_a_device_that_is_free_is_not_for_whoever_would_delay_another(gpuguard, job, waits):
    waits(requests=(Request(num_gpus=2),))
    status, output = gpuguard("explain")

    me = user_name(os.geteuid())
    assert status == 1
    assert output.splitlines()[-1] == (
        f"It would be number 2 of 2 in line, held back: it would delay {me}'s request for 2, which came before."
    )
    assert "It would start at once" not in output


def test_json_says_that_it_would_wait_and_why(gpuguard, job, waits):
    waits()
    status, output = gpuguard("explain", "--json")

    answer = json.loads(output)
    assert (status, answer["outcome"]) == (1, "wait")
    assert answer["line"].startswith("number 2 of 2 in line, held back: ")


def test_a_place_in_line_is_no_obstacle_where_nobody_minds(gpuguard, job, waits):
    waits(after="waits until process 7 has ended")

    assert gpuguard("explain")[0] == 0


def test_whoever_explains_leaves_no_ticket(gpuguard, job, waits, tmp_path):
    mine = waits()
    gpuguard("explain")

    assert [ticket.id for ticket in read_tickets(lock_directory(str(tmp_path)))[0]] == [mine.id]


def test_who_shows_who_waits_in_order_of_arrival(gpuguard, waits):
    for number in (1, 2):
        waits(requests=(Request(num_gpus=number),), note=f"\x1b[{number}m", command=("python", f"{number}.py"))
    _, output = gpuguard("who")
    waiting = json.loads(gpuguard("who", "--json")[1])["waiting"]

    rows = output.splitlines()
    at = next(place for place, row in enumerate(rows) if row.startswith("WAITING"))
    assert [row.split("  ")[-2:] for row in rows[at + 1 : at + 3]] == [
        [f'"\\x1b[{number}m"', f"python {number}.py"] for number in (1, 2)
    ]
    assert [(one["num_gpus"], one["pid"], one["note"]) for one in waiting] == [
        (number, os.getpid(), f"\x1b[{number}m") for number in (1, 2)
    ]


def test_who_shows_those_of_one_user_on_demand(gpuguard, waits):
    waits()
    me = user_name(os.geteuid())

    assert "\nWAITING" in gpuguard("who", "--user", me)[1]
    assert "\nWAITING" not in gpuguard("who", "--user", "bin")[1]


def test_a_torn_ticket_is_nobody_who_waits(gpuguard, waits, tmp_path):
    held, place = waits(), lock_directory(str(tmp_path))
    with open(f"{place.records}/{place.prefix}ticket.{held.id}.json", "w") as file:
        file.write("{")

    assert json.loads(gpuguard("who", "--json")[1])["waiting"] == []
