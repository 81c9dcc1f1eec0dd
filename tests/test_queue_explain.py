"""Why a request waits and when it starts, in words, and where `explain` and `who` say it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from builders import Machine, a_claim_record, a_device, a_process, a_snapshot
from claiming import acquire
from queues import a_ticket

from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.explain import kept_for_others, position_text, start_text
from gpuguard.queue.reservations import clock_text
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.queue.tickets import OwnTicket, new_ticket, read_tickets, ticket_content
from gpuguard.request import Request
from gpuguard.users import user_name

NOW = 1_700_000_000.0
HOUR = 3600.0
DEVICES = (a_device(0), a_device(1))
FIRST, SECOND = (device.uuid for device in DEVICES)
ONE = Request()


def a_position(name="mine", number=1, start=None, request=ONE, devices=(FIRST,), **fields) -> QueuePosition:
    more = {key: fields.pop(key) for key in ("after", "time_limit", "user", "requests") if key in fields}
    ticket = replace(a_ticket(id=name), **more)
    return QueuePosition(ticket, number, start, start, request=request, devices=devices, **fields)


def a_queue(*positions: QueuePosition, **fields) -> QueueState:
    return QueueState(positions, (), a_snapshot(*DEVICES), QueueFacts(**fields), NOW)


def explained(position: QueuePosition, *before: QueuePosition, **fields) -> str:
    return start_text(position, a_queue(*before, position, **fields))


def test_what_needs_no_plan():
    assert explained(a_position(after="job 7 to end")) == "not in line yet: job 7 to end"
    assert explained(a_position(now=True)) == "starts now"
    assert explained(a_position(request=None)) == "no devices for it as things are"
    assert explained(a_position(devices=())) == "too far behind for a plan"
    assert explained(a_position(start=NOW + 7200)) == "starts in about 2h"
    assert explained(a_position(start=NOW - 5)) == "starts in about 0s"


def test_a_request_that_is_not_queued_yet_has_no_number():
    denied, queued = a_position("denied", after="its user may make no claim now"), a_position(number=2, now=True)
    queue = a_queue(denied, queued)

    assert position_text(denied, queue) == "not in line yet: its user may make no claim now"
    assert position_text(queued, queue) == "number 2 of 2 in line, starts now"


def test_what_others_may_claim_now_is_kept_for_them_but_a_share_not_from_shares():
    share = Request(share=True, memory=2**30)
    mine, other = a_position(), a_position("other", now=True, user="bob", devices=(SECOND,), request=share)

    assert kept_for_others(a_queue(other, mine), "mine") == {SECOND: "about to be claimed by bob, who waited for it"}
    assert kept_for_others(a_queue(other, a_position(request=share)), "mine") == {}


def test_what_would_delay_a_request_before_it():
    other = a_position("other", user="bob", requests=(Request(num_gpus=4),))

    held_back = "held back: it would delay bob's request for 4, which came before"
    assert explained(a_position(held_back_by="other"), other) == held_back
    assert explained(a_position(held_back_by="gone")) == "held back: it would delay reservation gone"


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
    reservation = Reservation("r", 0, 7, "eve", 1, NOW + begins, NOW + 2 * HOUR, (FIRST,))
    another = Reservation("q", 0, 8, "zoe", 1, NOW, NOW + HOUR, (SECOND,))
    position = a_position(held_back_by="0.r", time_limit=limit, start=None if start is None else NOW + start)
    when = text.format(begins=clock_text(reservation.begins, NOW), ends=clock_text(reservation.ends, NOW))

    held_back = f"held back: it would delay the reservation of eve {when}"
    assert explained(position, reservations=(another, reservation)) == held_back


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
    position = a_position(start=NOW + HOUR, devices=(FIRST, SECOND))
    claims = (a_claim_record(SECOND, user="bob", since=None, **claim),)

    assert explained(position, claims=claims) == f"starts in about 1h{', ' * bool(text)}{text}"


def test_a_start_at_the_end_of_a_reservation_is_said_so():
    reservation = Reservation("r", 0, 7, "eve", 1, NOW - HOUR, NOW + HOUR, (FIRST,))
    after = f"after the reservation of eve until {clock_text(reservation.ends, NOW)}"

    assert explained(a_position(start=NOW + HOUR), reservations=(reservation,)) == f"starts in about 1h, {after}"
    assert explained(a_position(start=NOW + HOUR + 1), reservations=(reservation,)) == "starts in about 1h"


def test_behind_a_request_it_starts_after_the_nearest_one_on_the_same_devices():
    bob, zoe = a_position("bob", 1, user="bob"), a_position("zoe", 2, user="zoe")
    elsewhere, later = a_position("eve", 3, user="eve", devices=(SECOND,)), a_position("max", 5, user="max")
    mine = a_position(number=4, start=NOW + HOUR)

    assert start_text(mine, a_queue(bob, zoe, elsewhere, mine, later)) == "starts in about 1h, after zoe's request"
    assert explained(a_position(number=2, start=NOW + HOUR), bob) == "starts in about 1h, after bob's request"


def test_where_the_start_is_unknown_the_reason_is_given():
    unknown = "nobody knows when it starts: "
    bob = a_position("bob", 1, user="bob")
    both = a_position(number=1, devices=(FIRST, SECOND))
    free = a_claim_record(FIRST, id="a", user="bob", since=None)
    zoes = a_claim_record(SECOND, id="b", user="zoe", since=None)

    assert explained(a_position(number=2), bob) == f"{unknown}bob's request before it has no time limit"
    used = replace(a_queue(a_position()), snapshot=a_snapshot(a_device(0, processes=(a_process(),))))
    assert start_text(a_position(), used) == f"{unknown}a device is in use without a claim"
    # In quarantine, or too hot.
    assert explained(a_position()) == f"{unknown}a device is not free, though nobody has claimed it"
    assert explained(both, claims=(free,)) == f"{unknown}the job of bob has no time limit"
    assert explained(both, claims=(zoes, free)) == f"{unknown}the jobs of bob and zoe have no time limit"
    late = a_claim_record(FIRST, id="a", ends=NOW - 10)
    expected = a_claim_record(SECOND, id="b", expected=NOW - 10)
    assert explained(both, claims=(late, expected)) == f"{unknown}a job is over its time"
    assert explained(both, claims=(late, zoes)) == f"{unknown}the job of zoe has no time limit"


# `gpuguard explain` shows the position that a request would have, `gpuguard who` which requests wait.


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

    def put(requests=(), **fields):
        ticket = new_ticket(requests or [Request(num_gpus=2)], **fields)
        held.append(OwnTicket(lock_directory(str(tmp_path)), ticket_content(ticket)))
        return held[-1]

    yield put
    for ticket in held:
        ticket.withdraw()


@pytest.fixture
def job(machine, tmp_path):
    """A claim on one of the two devices, for two hours."""
    with acquire(machine, Request(), lock_directory(str(tmp_path)), time_limit=7200) as claim:
        yield claim


def test_where_no_request_waits_there_is_no_position_in_the_queue(gpuguard, job):
    assert "in line" not in gpuguard("explain", "-n", "2")[1]
    assert json.loads(gpuguard("explain", "--json")[1])["line"] is None


def test_explain_says_that_a_request_would_delay_another_and_leaves_no_ticket(gpuguard, job, waits, tmp_path):
    waiting, me = waits(), user_name(os.geteuid())
    text, answer = gpuguard("explain"), gpuguard("explain", "--json")

    why = f"number 2 of 2 in line, held back: it would delay {me}'s request for 2, which came before"
    assert (text[0], text[1].splitlines()[-1]) == (1, f"It would be {why}.")
    assert (answer[0], json.loads(answer[1])["outcome"], json.loads(answer[1])["line"]) == (1, "wait", why)
    assert "It would start at once" not in text[1]
    assert [ticket.id for ticket in read_tickets(lock_directory(str(tmp_path)))[0]] == [waiting.id]


def test_a_request_that_waits_for_a_process_is_no_obstacle(gpuguard, job, waits):
    waits(after="waits until process 7 has ended")

    assert gpuguard("explain")[0] == 0


def test_who_shows_the_requests_that_wait_in_order_of_arrival(gpuguard, waits):
    for number in (1, 2):
        waits(requests=(Request(num_gpus=number),), note=f"\x1b[{number}m", command=("python", f"{number}.py"))
    _, output = gpuguard("who")
    waiting = json.loads(gpuguard("who", "--json")[1])["waiting"]

    rows = output.splitlines()
    at = next(number for number, row in enumerate(rows) if row.startswith("WAITING"))
    assert [row.split("  ")[-2:] for row in rows[at + 1 : at + 3]] == [
        [f'"\\x1b[{number}m"', f"python {number}.py"] for number in (1, 2)
    ]
    assert [(ticket["num_gpus"], ticket["pid"], ticket["note"]) for ticket in waiting] == [
        (number, os.getpid(), f"\x1b[{number}m") for number in (1, 2)
    ]


def test_who_shows_those_of_one_user_on_demand(gpuguard, waits):
    waits()
    me = user_name(os.geteuid())

    assert "\nWAITING" in gpuguard("who", "--user", me)[1]
    assert "\nWAITING" not in gpuguard("who", "--user", "bin")[1]
