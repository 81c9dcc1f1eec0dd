"""`gpuguard queue`: the screen and the JSON of the waiting line, and what does not count in it."""

from __future__ import annotations

import json
import os
import re
import time

import pytest
from builders import Machine, a_claim_record, a_device, a_process, a_reservation, a_reserved, a_snapshot, a_uuid
from claiming import acquire
from test_who import DOCUMENT, documented, printed

from gpuguard.clusters.slurm import Queued
from gpuguard.policies.files.decoder import Accounts
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus
from gpuguard.queue.settings import QueueSettings, parse
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.queue.tickets import IgnoredFile, OwnTicket, ticket_content
from gpuguard.request import Request
from gpuguard.sanitize import display_width
from gpuguard.views.queue import to_json, to_text

NOW = 1_700_000_000.0
EVIL = "\x1b[2J\n\u202e\udcff李"


def a_ticket(**fields):
    facts = {"id": "t1", "uid": 1001, "user": "alice", "since": NOW - 65, "requests": (Request(num_gpus=2),)}
    return Ticket(**facts | fields)


def a_place(number=1, *, start=None, now=False, **ticket):
    its = a_ticket(**ticket)
    return QueuePosition(its, number, start, start, now, its.requests[0], (a_uuid(0),))


NOTHING = ReservationCalendar()


def a_line(*places, ignored=(), claims=(), reserved=NOTHING, **snapshot):
    seen = a_snapshot(a_device(), a_device(), claims=claims, **snapshot)
    return QueueState(places, ignored, seen, QueueFacts(claims=claims, reserved=reserved), NOW)


def text(*places, site=None, width=None, **line):
    return to_text(a_line(*places, **line), site or QueueSettings(), width=width)


def test_an_empty_line_says_so():
    assert text() == ["node1: no requests in line (fair share)"]
    assert text(simulated=True) == ["SIMULATED node node1: no requests in line (fair share)"]
    assert text(site=QueueSettings(QueueRules(fair_share=False)))[0].endswith("(order of arrival)")


def test_each_request_has_a_row_and_its_prospects_below_it():
    claim = a_claim_record(a_uuid(0), ends=NOW + 7200)
    promise = time.strftime("%H:%M", time.localtime(NOW + 9000))

    assert text(
        a_place(start=NOW + 7200, promise=NOW + 9000, note="sweep", command=("python", "a b.py")),
        a_place(2, user="李小明", uid=7, requests=(Request(num_gpus=1), Request(num_gpus=4)), priority=1),
        claims=(claim,),
    ) == [
        "node1: 2 requests in line (fair share)",
        "#  USER      GPUS  WAITED  COMMAND",
        "1  alice        2    1m5s  \"sweep\"  python 'a b.py'",
        "    starts in about 2h, when device 0 is free: time limit of alice's job; "
        f"at the latest {promise}, if time limits are kept",
        "2  李小明  1 or 4    1m5s  [high] n/a",
        "    nobody knows when it starts: alice's request before it has no time limit",
    ]
    assert text(a_place(after="waits until process 4711 has ended"))[-1] == (
        "    not in line yet: waits until process 4711 has ended"
    )


@pytest.mark.parametrize("fields", [{"now": True, "promise": NOW + 60}, {"promise": NOW - 60}])
def test_a_promise_of_another_day_has_its_date_and_one_that_is_over_or_of_now_is_not_shown(fields):
    later = text(a_place(start=NOW + 86400, promise=NOW + 90_000))[-1]

    assert time.strftime("at the latest %a %d %b %H:%M", time.localtime(NOW + 90_000)) in later
    assert "at the latest" not in text(a_place(**fields))[-1]


def a_hostile_line():
    record = a_claim_record(a_uuid(0), user=EVIL, ends=NOW + 60)
    return a_line(
        a_place(user=EVIL, note=EVIL, command=(EVIL, "x" * 300), start=NOW + 60, promise=NOW + 90),
        a_place(2, after=EVIL, command=()),
        ignored=(IgnoredFile(1, EVIL, EVIL),),
        claims=(record,),
        host=EVIL,
        reserved=a_reserved(
            ReservationStatus(a_reservation(user=EVIL, id=EVIL, note=EVIL), EVIL), ignored=(IgnoredFile(1, EVIL, EVIL),)
        ),
    )


@pytest.mark.parametrize("width", [None, 12, 40, 80, 200])
def test_hostile_text_is_shown_and_does_no_harm(width):
    lines = to_text(a_hostile_line(), QueueSettings(), width=width)

    assert all(line.isprintable() for line in lines)
    assert width or "x" * 300 in "\n".join(lines)  # a pipe gets the whole command line
    assert width is None or all(display_width(line) <= width for line in lines)


def test_a_narrow_terminal_folds_the_reason_and_loses_nothing_of_it():
    place = a_place(start=NOW + 7200, promise=NOW + 9000)
    line = a_line(place, claims=(a_claim_record(a_uuid(0), user="李小明", ends=NOW + 7200),))
    wide, narrow = to_text(line, QueueSettings()), to_text(line, QueueSettings(), width=40)

    assert len(narrow) > len(wide)
    assert " ".join(line.strip() for line in narrow[3:]) == wide[3].strip()


def a_full_output():
    jobs = (Queued("12", "bob", "x", "PENDING", 2, "Priority", NOW, None, None),)
    return json.loads(json.dumps(to_json(a_hostile_line(), QueueSettings(*parse(b"what: 1\n", Accounts())), jobs)))


def test_the_document_describes_exactly_the_fields_that_are_printed():
    assert documented("queue", DOCUMENT.read_text(encoding="utf-8")) == printed("queue", a_full_output())


def test_unknown_is_null_and_never_zero():
    (place,) = to_json(a_line(a_place()), QueueSettings())["places"]

    unknown = {name for name, value in place.items() if value is None}
    assert unknown == {
        "pid", "time_limit_seconds", "expected_seconds", "expected_start", "latest_start", "after", "note", "command",
    }  # fmt: skip
    assert [name for name, value in place.items() if value == 0 and value is not False] == []


def test_the_numbers_are_those_of_the_ticket_and_of_the_plan():
    planned = a_place(start=NOW + 60, promise=NOW + 75, priority=-1, time_limit=9.0)
    (place,) = to_json(a_line(planned), QueueSettings())["places"]

    assert (place["waited_seconds"], place["expected_start"], place["latest_start"]) == (65.0, NOW + 60, NOW + 75)
    assert (place["priority"], place["time_limit_seconds"], place["requests"]) == ("low", 9.0, ["-n 2"])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two devices."""
    machine = Machine(a_device(0), a_device(1))
    monkeypatch.setattr("gpuguard.cli.options.backend_of", lambda args: machine)
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))
    return machine


@pytest.fixture
def queue(machine, directory, command):
    def run(*words):
        status, output, error = command("queue", "--dir", directory.path, *words)
        assert (status, error) == (0, "")
        return output

    return run


@pytest.fixture
def waits(directory):
    """Puts a ticket of this process into the line."""
    held = []

    def put(**fields):
        ticket = a_ticket(**{"pid": os.getpid()} | fields)
        held.append(OwnTicket(directory, ticket_content(ticket)))
        return held[-1]

    yield put
    for ticket in held:
        ticket.withdraw()


def test_who_waits_is_shown_with_the_reason(queue, waits, machine, directory):
    with acquire(machine, Request(), directory, time_limit=7200):
        ticket = waits(requests=(Request(num_gpus=2),), command=("python", "x.py"), time_limit=60.0)
        (place,) = json.loads(queue("--json"))["places"]
        shown = queue()

    assert (place["id"], place["number"], place["pid"]) == (ticket.id, 1, os.getpid())
    assert re.search("starts in about (2h|1h59m), when device 1 is free: time limit of ", shown)
    assert place["expected_start"] == pytest.approx(time.time() + 7200, abs=30)


def test_looking_at_the_line_does_not_change_it(queue, waits):
    assert queue().endswith(": no requests in line (fair share)\n")
    ticket = waits()

    assert queue("--json") != "" and ticket.counts
    assert [place["id"] for place in json.loads(queue("--json"))["places"]] == [ticket.id]


def test_a_torn_ticket_is_named_and_the_others_count(queue, waits, directory):
    whole, ignored = waits(), waits()
    with open(f"{directory.records}/{directory.prefix}ticket.{ignored.id}.json", "w") as file:
        file.write('{"schema": 1, "requests": [')

    content = json.loads(queue("--json"))
    assert [place["id"] for place in content["places"]] == [whole.id]
    assert [(file["id"], file["uid"]) for file in content["not_counted"]] == [(ignored.id, os.geteuid())]
    assert f"  ticket {ignored.id} of uid {os.geteuid()}: it cannot be understood" in queue()


def test_the_rules_of_the_site_are_read_and_their_faults_told(queue, tmp_path):
    (tmp_path / "line.yaml").write_text("fair_share: false\n")
    assert "(order of arrival)" in queue()

    (tmp_path / "line.yaml").write_text("fair_share: no\n")
    assert "The rules of this site do not count" in queue() and "line.yaml:1:13" in queue()
    _, _, _, fault, line, mark, *_ = queue().splitlines()
    assert json.loads(queue("--json"))["faults"] == [fault]
    assert (line, mark) == ("  fair_share: no", "              ^")


def test_a_strangers_process_keeps_a_request_waiting_and_is_named(queue, waits, machine):
    waits(requests=(Request(num_gpus=2),))
    machine.change(0, processes=(a_process(user="bob"),), memory_used=2**34)

    assert "nobody knows when it starts: a device is in use without a claim" in queue()


def test_what_the_daemon_saw_is_used_instead_of_the_driver(queue, machine, monkeypatch):
    asked = []
    monkeypatch.setattr("gpuguard.source.read_state", lambda *a, **k: asked.append(a) or a_snapshot(host="seen"))

    assert queue().startswith("seen: ")
    assert asked and machine.asked == []
    assert not queue("--fresh").startswith("seen: ")
    assert machine.asked
