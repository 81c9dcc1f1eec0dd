"""`gpuguard queue`, `explain` and `who`: why a request waits and when it starts, in words and in JSON."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
from builders import Machine, a_claim_record, a_device, a_process, a_reservation, a_reserved, a_snapshot, a_uuid
from own_claims import acquire
from queues import a_ticket
from test_who import DOCUMENT, documented, printed

from gpuguard.batch.dispatchers import StalledJobs
from gpuguard.clusters.slurm_jobs import Queued
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.reasons import (
    brief_text,
    certain_start,
    kept_for_others,
    passing_text,
    position_text,
    reserved_now,
    start_text,
)
from gpuguard.queue.reservations import ReservationCalendar, ReservationStatus, clock_text
from gpuguard.queue.settings import QueueSettings, parse
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.queue.tickets import IgnoredFile, OwnTicket, new_ticket, read_tickets, ticket_content
from gpuguard.request import Request
from gpuguard.sanitize import display_width
from gpuguard.users import user_name
from gpuguard.views.queue import to_json, to_text
from gpuguard.yaml_files.decoder import Accounts

NOW = 1_700_000_000.0
EVIL = "\x1b[2J\n\u202e\udcff李"


def a_place(number=1, *, start=None, now=False, latest=None, **ticket):
    facts = {"id": "t1", "uid": 1001, "user": "alice", "since": NOW - 65, "requests": (Request(num_gpus=2),)}
    its = Ticket(**facts | ticket)
    return QueuePosition(its, number, start, start, now, its.requests[0], (a_uuid(0),), latest=latest)


NOTHING = ReservationCalendar()


def a_line(*places, ignored=(), claims=(), reserved=NOTHING, **snapshot):
    seen = a_snapshot(a_device(), a_device(), claims=claims, **snapshot)
    return QueueState(places, ignored, seen, QueueFacts(claims=claims, reserved=reserved), NOW)


def text(*places, site=None, width=None, **line):
    return to_text(a_line(*places, **line), site or QueueSettings(), width=width)


def test_an_empty_line_says_so():
    assert text() == ["node1: no requests in the queue (fair share)"]
    assert text(simulated=True) == ["SIMULATED node node1: no requests in the queue (fair share)"]
    assert text(site=QueueSettings(QueueRules(fair_share=False)))[0].endswith("(order of arrival)")


def test_each_request_has_a_row_and_its_prospects_below_it():
    claim = a_claim_record(a_uuid(0), ends=NOW + 7200)
    promise, bound = clock_text(NOW + 9040, NOW), clock_text(NOW - 65 + QueueRules.bound, NOW)

    assert text(
        a_place(
            id="1001.3f0c9e21p4711",
            start=NOW + 7200,
            latest=NOW + 7200,
            promise=NOW + 9000,
            note="sweep",
            command=("python", "a b.py"),
        ),
        a_place(2, id="7.81d2", user="李小明", uid=7, requests=(Request(num_gpus=1), Request(num_gpus=4)), priority=1),
        claims=(claim,),
    ) == [
        "node1: 2 requests in the queue (fair share)",
        "#  ID        USER      GPUS  WAITED  COMMAND",
        "1  3f0c9e21  alice        2    1m5s  \"sweep\"  python 'a b.py'",
        "    starts in about 2h, when GPU 0 is free: time limit of alice's job; "
        f"at the latest {promise}, if time limits are kept",
        "2  81d2      李小明  1 or 4    1m5s  [high] n/a",
        "    start unknown: alice's request before it has no time limit; "
        f"shorter jobs may start before this one until {bound}",
    ]
    assert text(a_place(after="waits until process 4711 has ended"))[-1] == (
        "    not queued yet: waits until process 4711 has ended"
    )


@pytest.mark.parametrize("fields", [{"now": True, "latest": NOW + 60}, {"latest": NOW - 60}])
def test_a_certain_start_is_the_next_whole_minute_with_its_day_and_one_that_is_over_or_of_now_is_not_shown(fields):
    later = text(a_place(start=NOW + 86400, latest=NOW + 90_000))[-1]

    assert time.strftime("at the latest %a %d %b %H:%M", time.localtime(NOW + 90_040)) in later
    assert "at the latest" not in text(a_place(**fields))[-1]


def test_a_start_is_certain_only_by_time_limits_of_now_and_no_sooner_than_promised():
    promised = a_place(start=NOW + 60, latest=NOW + 3600, promise=NOW + 4000)
    passed = a_place(start=NOW + 60, latest=NOW + 3600, promise=NOW + 600)
    unknown = a_place(start=NOW + 60, promise=NOW + 4000)

    assert [certain_start(position) for position in (promised, passed, unknown)] == [NOW + 4000, NOW + 3600, None]
    assert f"at the latest {clock_text(NOW + 4000, NOW)}" in text(promised)[-1]


def test_a_start_behind_its_promise_is_not_said_to_come_by_then():
    line = text(a_place(start=NOW + 7200, promise=NOW + 3600))[-1]

    assert line.endswith(f"; later than promised ({clock_text(NOW + 3600, NOW)})")


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
    site = QueueSettings(*parse(b"what: 1\n", Accounts()))
    return json.loads(json.dumps(to_json(a_hostile_line(), site, jobs, [StalledJobs(1001, 2)])))


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
    for command in ("explain", "options"):
        monkeypatch.setattr(f"gpuguard.cli.{command}.backend_of", lambda args: machine)
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "line.yaml"))
    return machine


@pytest.fixture
def gpuguard(machine, directory, command):
    """Run a command; returns (exit code, standard output)."""

    def run(name, *words):
        status, output, error = command(name, "--dir", directory.path, *words)
        assert error == ""
        return status, output

    return run


@pytest.fixture
def queue(gpuguard):
    return lambda *words: gpuguard("queue", *words)[1]


@pytest.fixture
def waits(directory):
    """Puts a ticket of this process into the queue, for both devices unless the *requests* are others."""
    held = []

    def put(requests=(), **fields):
        ticket = new_ticket(requests or [Request(num_gpus=2)], **fields)
        held.append(OwnTicket(directory, ticket_content(ticket)))
        return held[-1]

    yield put
    for ticket in held:
        ticket.withdraw()


@pytest.fixture
def job(machine, directory):
    """A claim on one of the two devices, for two hours."""
    with acquire(machine, Request(), directory, time_limit=7200) as claim:
        yield claim


def test_who_waits_is_shown_with_the_reason(queue, waits, job):
    ticket = waits(command=("python", "x.py"), time_limit=60.0)
    (place,) = json.loads(queue("--json"))["places"]
    shown = queue()

    assert (place["id"], place["number"], place["pid"]) == (ticket.id, 1, os.getpid())
    assert re.search("starts in about (2h|1h59m), when GPU 1 is free: time limit of ", shown)
    assert place["expected_start"] == pytest.approx(time.time() + 7200, abs=30)


def test_looking_at_the_line_does_not_change_it(queue, waits):
    assert queue().endswith(": no requests in the queue (fair share)\n")
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
    waits()
    machine.change(0, processes=(a_process(user="bob"),), memory_used=2**34)

    assert "start unknown: a GPU is in use without a claim" in queue()


def test_what_the_daemon_saw_is_used_instead_of_the_driver(queue, machine, monkeypatch):
    asked = []
    monkeypatch.setattr("gpuguard.source.read_state", lambda *a, **k: asked.append(a) or a_snapshot(host="seen"))

    assert queue().startswith("seen: ")
    assert asked and machine.asked == []
    assert not queue("--fresh").startswith("seen: ")
    assert machine.asked


HOUR = 3600.0
DEVICES = (a_device(0), a_device(1))
FIRST, SECOND = (device.uuid for device in DEVICES)
ONE = Request()


def a_position(name="mine", number=1, start=None, request=ONE, devices=(FIRST,), **fields) -> QueuePosition:
    more = {key: fields.pop(key) for key in ("after", "time_limit", "user", "requests", "since") if key in fields}
    ticket = replace(a_ticket(id=name), **more)
    return QueuePosition(ticket, number, start, start, request=request, devices=devices, **fields)


def a_queue(*positions: QueuePosition, **fields) -> QueueState:
    return QueueState(positions, (), a_snapshot(*DEVICES), QueueFacts(**fields), NOW)


def explained(position: QueuePosition, *before: QueuePosition, **fields) -> str:
    return start_text(position, a_queue(*before, position, **fields))


def test_what_needs_no_plan():
    assert explained(a_position(after="job 7 to end")) == "not queued yet: job 7 to end"
    assert explained(a_position(now=True)) == "starts now"
    assert explained(a_position(request=None)) == "no GPUs for it as things are"
    assert explained(a_position(devices=())) == "too far behind for a plan"
    assert explained(a_position(start=NOW + 7200)) == "starts in about 2h"
    assert explained(a_position(start=NOW - 5)) == "starts in a moment"
    assert explained(a_position(start=NOW + 0.4)) == "starts in a moment"
    assert explained(a_position(start=NOW + 1)) == "starts in about 1s"


def test_a_request_that_is_not_queued_yet_has_no_number():
    denied, queued = a_position("denied", after="new claims of bob are denied"), a_position(number=2, now=True)
    queue = a_queue(denied, queued)

    assert position_text(denied, queue) == "not queued yet: new claims of bob are denied"
    assert position_text(queued, queue) == "number 2 of 2 in the queue, starts now"


def test_what_others_may_claim_now_is_kept_for_them_but_a_share_not_from_shares():
    share = Request(share=True, memory=2**30)
    mine, other = a_position(), a_position("other", now=True, user="bob", devices=(SECOND,), request=share)

    assert kept_for_others(a_queue(other, mine), "mine") == {SECOND: "about to be claimed by bob, who waited for it"}
    assert kept_for_others(a_queue(other, a_position(request=share)), "mine") == {}


def test_what_would_delay_a_request_before_it():
    other = a_position("other", user="bob", requests=(Request(num_gpus=4),), since=NOW - HOUR)
    late = a_position("other", user="bob", requests=(Request(num_gpus=4),), since=NOW - 30 * HOUR)

    held_back = "held back: it would delay bob's request for 4, which came before"
    assert explained(a_position(held_back_by="other"), other) == held_back
    assert explained(a_position(held_back_by="other"), late) == held_back.replace("came before", "has waited for 1d6h")
    assert explained(a_position(held_back_by="gone")) == "held back: it would delay reservation gone"
    certain = replace(other, latest=NOW + 2 * HOUR + 30)
    advised = f"{held_back}; with a --time-limit of at most 2h it could start now"
    assert explained(a_position(held_back_by="other"), certain) == advised
    assert explained(a_position(held_back_by="other"), replace(other, latest=NOW + 59)) == held_back


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


LIKE_EARLIER = "when GPU 1 is free, if bob's job takes as long as their earlier ones"


@pytest.mark.parametrize(
    ("claim", "text"),
    [
        ({"ends": NOW + HOUR}, "when GPU 1 is free: time limit of bob's job"),
        ({"expected": NOW + HOUR}, LIKE_EARLIER),
        ({"ends": NOW + HOUR, "expected": NOW + 9 * HOUR}, "when GPU 1 is free: time limit of bob's job"),
        ({"ends": NOW + 9 * HOUR, "expected": NOW + HOUR}, LIKE_EARLIER),
        ({"ends": NOW + HOUR + 0.9}, "when GPU 1 is free: time limit of bob's job"),
        ({"ends": NOW + HOUR + 1}, ""),
        ({"ends": NOW + 2 * HOUR}, ""),
        ({}, ""),
    ],
)
def test_the_last_device_to_be_free_and_what_says_so(claim, text):
    position = a_position(start=NOW + HOUR, devices=(FIRST, SECOND))
    claims = (a_claim_record(SECOND, user="bob", since=None, **claim),)

    assert explained(position, claims=claims) == f"starts in about 1h{', ' * bool(text)}{text}"


def test_of_a_job_that_has_outrun_the_earlier_ones_it_is_not_said_that_it_takes_as_long():
    position = a_position(start=NOW + 2 * HOUR, devices=(SECOND,))
    claim = a_claim_record(SECOND, user="bob", since=NOW - 2 * HOUR, expected=NOW - HOUR)

    assert explained(position, claims=(claim,)) == (
        "starts in about 2h, when GPU 1 is free, a guess: bob's job runs longer than their earlier ones"
    )


def test_a_start_at_the_end_of_a_reservation_is_said_so():
    reservation = Reservation("r", 0, 7, "eve", 1, NOW - HOUR, NOW + HOUR, (FIRST,))
    after = f"after the reservation of eve until {clock_text(reservation.ends, NOW)}"

    assert explained(a_position(start=NOW + HOUR), reservations=(reservation,)) == f"starts in about 1h, {after}"
    assert explained(a_position(start=NOW + HOUR + 1), reservations=(reservation,)) == "starts in about 1h"
    over = replace(reservation, ends=NOW)
    assert explained(a_position(start=NOW), reservations=(over,)) == (
        f"starts in a moment, after the reservation of eve until {clock_text(NOW, NOW)}"
    )


def test_a_device_that_the_driver_does_not_show_any_more_is_called_by_its_uuid():
    claim = a_claim_record("GPU-gone", user="bob", ends=NOW + HOUR)

    assert explained(a_position(start=NOW + HOUR, devices=("GPU-gone",)), claims=(claim,)) == (
        "starts in about 1h, when GPU-gone is free: time limit of bob's job"
    )


def test_on_a_terminal_only_the_reason_is_given_and_the_position():
    endless = a_claim_record(FIRST, user="bob", since=None)
    queue = a_queue(mine := a_position(), a_position("other", 2), claims=(endless,))
    certain = a_position(start=NOW + HOUR, latest=NOW + 2 * HOUR)

    assert start_text(mine, queue, brief=True) == "the job of bob has no time limit"
    assert brief_text(mine, queue) == "the job of bob has no time limit (1 of 2 in the queue)"
    assert brief_text(certain, a_queue(certain)) == "starts in about 1h (1 of 1 in the queue)"
    assert brief_text(a_position(after="it is denied"), queue) == "not queued yet: it is denied"


IN_USE = "GPU 0: 79.0GiB in use, by no process that is visible; an idle GPU may hold 512MiB (--tolerance)"


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ({"memory_used": 79 * 2**30}, IN_USE),  # nobody can tell when that ends
        ({"processes": (a_process(9, uid=7, user="eve"),)}, None),
        ({"compute_mode": "exclusive_process"}, None),
        ({"memory_total": 2**30, "memory_used": 0}, None),
    ],
)
def test_what_keeps_a_share_off_its_device_is_told_unless_the_plan_knows_it(device, text):
    share = Request(share=True, memory=2 * 2**30)
    position = a_position(request=share, start=NOW + HOUR)
    queue = replace(a_queue(position), snapshot=a_snapshot(a_device(0, **device), a_device(1)))

    assert start_text(position, queue) == (f"start unknown: {text}" if text else "starts in about 1h")
    elsewhere = replace(position, devices=(SECOND,))
    assert start_text(elsewhere, queue) == "starts in about 1h"
    gone = replace(position, request=replace(share, devices=("7",)))
    assert start_text(gone, queue) == "starts in about 1h"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, f"shorter jobs may start before this one until {clock_text(NOW + HOUR, NOW)}"),
        ({"since": NOW - 1}, f"shorter jobs may start before this one until {clock_text(NOW + HOUR - 1, NOW)}"),
        ({"since": NOW - HOUR}, "only jobs that probably end before its GPUs are free start first"),
        ({"now": True}, None),
        ({"after": "it is denied"}, None),
        ({"request": None}, None),
    ],
)
def test_until_when_shorter_jobs_may_start_first_is_told_where_no_start_was_promised(fields, said):
    position = a_position(**{"since": NOW, **fields})
    promised = replace(position, ticket=replace(position.ticket, promise=NOW + 60))

    assert passing_text(position, replace(a_queue(position), bound=HOUR)) == said
    assert passing_text(promised, replace(a_queue(promised), bound=HOUR)) is None


def test_a_device_is_kept_for_a_reservation_that_has_begun_and_could_have_no_other():
    now = time.time()
    begun = Reservation("r", 0, 7, "eve", 1, now, now + HOUR, (FIRST, SECOND))
    later = Reservation("q", 0, 8, "zoe", 2, now + 60, now + HOUR, (FIRST, SECOND))
    reserved = ReservationCalendar((ReservationStatus(begun), ReservationStatus(later)), now=now)
    text = f"kept for eve's reservation until {clock_text(now + HOUR, now)}"
    machine = a_snapshot(*DEVICES)

    assert list(reserved_now(machine, reserved).values()) == [text]
    assert reserved_now(replace(machine, claims=(a_claim_record(FIRST),)), reserved) == {SECOND: text}
    assert reserved_now(replace(machine, quarantined={SECOND: "XID 79"}), reserved) == {FIRST: text}
    assert reserved_now(machine, ReservationCalendar((ReservationStatus(later),), now=now)) == {}


def test_behind_a_request_it_starts_after_the_nearest_one_on_the_same_devices():
    bob, zoe = a_position("bob", 1, user="bob", start=NOW), a_position("zoe", 2, user="zoe", start=NOW + HOUR)
    wider = [a_position("ann", 3, user="ann", start=NOW + 2 * HOUR), a_position("joe", 4, user="joe")]
    elsewhere, later = a_position("eve", 5, user="eve", devices=(SECOND,)), a_position("max", 7, user="max")
    mine = a_position(number=6, start=NOW + HOUR)

    queue = a_queue(bob, zoe, *wider, elsewhere, mine, later)
    assert start_text(mine, queue) == "starts in about 1h, after zoe's request"
    assert explained(a_position(number=2, start=NOW + HOUR), bob) == "starts in about 1h, after bob's request"


def test_where_the_start_is_unknown_the_reason_is_given():
    unknown = "start unknown: "
    bob = a_position("bob", 1, user="bob")
    both = a_position(number=1, devices=(FIRST, SECOND))
    free = a_claim_record(FIRST, id="a", user="bob", since=None)
    zoes = a_claim_record(SECOND, id="b", user="zoe", since=None)

    assert explained(a_position(number=2), bob) == f"{unknown}bob's request before it has no time limit"
    used = replace(a_queue(a_position()), snapshot=a_snapshot(a_device(0, processes=(a_process(),))))
    assert start_text(a_position(), used) == f"{unknown}a GPU is in use without a claim"
    # In quarantine, or too hot.
    assert explained(a_position()) == f"{unknown}a GPU is not free, though it has no claim"
    assert explained(both, claims=(free,)) == f"{unknown}the job of bob has no time limit"
    assert explained(both, claims=(zoes, free)) == f"{unknown}the jobs of bob and zoe have no time limit"
    late = a_claim_record(FIRST, id="a", ends=NOW - 10)
    expected = a_claim_record(SECOND, id="b", expected=NOW - 10)
    assert explained(both, claims=(late, expected)) == f"{unknown}a job is over its time"
    beside = replace(
        a_queue(both, claims=(late,)), snapshot=a_snapshot(a_device(0), a_device(1, processes=(a_process(),)))
    )
    assert start_text(both, beside) == f"{unknown}a job is over its time"
    assert explained(both, claims=(late, zoes)) == f"{unknown}the job of zoe has no time limit"
    assert explained(both, claims=(replace(free, uid=-1, user="unknown"),)) == (
        f"{unknown}the job of an unknown user has no time limit"
    )


def test_a_job_within_its_time_is_not_blamed_for_a_gpu_that_is_used_without_a_claim():
    both = a_position(devices=(FIRST, SECOND))
    within = a_claim_record(FIRST, ends=NOW + HOUR)
    used = a_snapshot(a_device(0), a_device(1, processes=(a_process(),)))

    told = start_text(both, replace(a_queue(both, claims=(within,)), snapshot=used))

    assert told == "start unknown: a GPU is in use without a claim"


def test_where_no_request_waits_there_is_no_position_in_the_queue(gpuguard, job):
    assert "in the queue" not in gpuguard("explain", "-n", "2")[1]
    assert json.loads(gpuguard("explain", "--json")[1])["line"] is None


def test_explain_says_that_a_request_would_delay_another_and_leaves_no_ticket(gpuguard, job, waits, directory):
    waiting, me = waits(), user_name(os.geteuid())
    text, answer = gpuguard("explain"), gpuguard("explain", "--json")

    why = f"number 2 of 2 in the queue, held back: it would delay {me}'s request for 2, which came before"
    advice = r"; with a --time-limit of at most (1h5\dm|2h) it could start now"
    advice += "; shorter jobs may start before this one until .*"
    advised = re.fullmatch(re.escape(f"If you ran it now: {why}") + advice, text[1].splitlines()[-1])
    assert text[0] == 1 and advised, text[1]
    line = json.loads(answer[1])["line"]
    assert (answer[0], json.loads(answer[1])["outcome"]) == (1, "wait") and re.fullmatch(re.escape(why) + advice, line)
    shorter = gpuguard("explain", "--time-limit", advised[1])
    assert shorter[0] == 0 and "It would start at once" in shorter[1], "what was advised is so"
    assert "It would start at once" not in text[1]
    assert [ticket.id for ticket in read_tickets(directory)[0]] == [waiting.id]


def test_who_shows_the_requests_that_wait_in_order_of_arrival(gpuguard, waits):
    for number in (1, 2):
        waits(requests=(Request(num_gpus=number),), note=f"\x1b[{number}m", command=("python", f"{number}.py"))
        time.sleep(0.02)  # files have their times in steps of some milliseconds
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
