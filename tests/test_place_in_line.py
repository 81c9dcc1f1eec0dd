"""`gpuguard explain` says where a request would stand in line, `gpuguard who` who waits."""

from __future__ import annotations

import json
import os

import pytest
from builders import a_device
from machines import Machine

from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line
from gpuguard.lock import acquire
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import OwnTicket, read_tickets, ticket_content
from gpuguard.request import Request
from gpuguard.users import user_name


@pytest.fixture
def machine(monkeypatch):
    """Two devices."""
    machine = Machine(a_device(0), a_device(1))
    for command in ("explain", "looking"):
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
