"""One who has to wait: what he asks when, what he hears, what he joins and leaves behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import Machine
from test_turn import DEVICES, FIRST, HOUR, NOW, ONE, SECOND, a_line, a_place

from gpuguard.claims.lockfiles import LockDirectory, lock_directory
from gpuguard.errors import DriverUnresponsive, GpuguardError, LockDirectoryError, NotEnoughGpus
from gpuguard.line import served, turn
from gpuguard.line.booking import Booking
from gpuguard.line.order import Rules
from gpuguard.line.tickets import read_tickets
from gpuguard.line.turn import InLine, Turn, new_ticket, reserved_from, stand
from gpuguard.marks import DENIED, QUARANTINED, Mark, change
from gpuguard.model import HEALTH, MEMORY, PROCESSES
from gpuguard.request import Request


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path))


def in_line(directory, machine=None, time_limit=None, expected=None) -> InLine:
    return InLine(machine or Machine(*DEVICES), directory, 0, time_limit, expected, None, ())


def test_how_long_it_will_take_is_asked_only_where_no_limit_says_so(directory):
    asked = []

    def expected() -> float:
        asked.append(1)
        return 100.0

    assert in_line(directory, expected=expected)._ticket([ONE]).expected == 100.0
    assert in_line(directory, None, 60.0, expected)._ticket([ONE]).time_limit == 60.0
    assert asked == [1]


def test_whoever_is_to_start_and_could_not_looks_at_the_health_of_all_devices(directory):
    machine = Machine(*DEVICES)
    waiting = in_line(directory, machine)

    assert waiting.turn(machine.sample(()), [ONE]).ways
    assert HEALTH not in machine.asked[-1][0]
    assert waiting.turn(machine.sample(()), [ONE]).ways
    assert HEALTH in machine.asked[-1][0] and PROCESSES in machine.asked[-1][0]


def test_a_driver_that_does_not_answer_changes_nothing_of_what_was_seen(directory):
    machine = Machine(*DEVICES)
    waiting, snapshot = in_line(directory, machine), machine.sample(())

    def fail() -> None:
        raise DriverUnresponsive("it hangs")

    machine.before_sample = fail
    assert waiting._closer(snapshot) is snapshot
    before = a_line(a_place())
    assert waiting._survey(before, closely=False).places == ()
    assert waiting._survey(before, closely=False).snapshot is before.snapshot


@pytest.mark.parametrize("way", [{"max_util": 10.0}, {"max_processes": 2}])
def test_a_survey_reads_what_the_requests_of_the_line_need_and_health_only_when_closely(directory, monkeypatch, way):
    machine = Machine(*DEVICES)
    waiting = in_line(directory, machine)
    busy = a_line(a_place(ways=(Request(**way),)))
    monkeypatch.setattr(turn, "stand", lambda *of: busy)

    assert waiting._survey(a_line(), closely=False) is busy
    plain, needed = [fields for fields, _ in machine.asked]
    assert plain == {MEMORY, PROCESSES} and "utilization" in needed and HEALTH not in needed
    waiting._survey(a_line(), closely=True)
    assert len(machine.asked) == 4 and HEALTH in machine.asked[-1][0]


def test_the_use_of_all_users_is_asked_once_a_minute_and_unknown_where_it_cannot_be_read(directory, monkeypatch):
    now, answers = [100.0], [{1: 5.0}, GpuguardError("torn"), {1: 7.0}]

    def consult(path, question):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(turn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(turn, "consult", consult)
    seen = []
    for moment in (100.0, 159.0, 160.0, 219.0, 220.0):
        now[0] = moment
        seen.append(turn._usage(directory, Rules()))

    assert seen == [{1: 5.0}, {1: 5.0}, None, None, {1: 7.0}]


def test_without_fair_share_nobody_asks_what_users_had(directory, monkeypatch):
    monkeypatch.setattr(turn, "consult", lambda *of: pytest.fail("asked"))
    snapshot = Machine(*DEVICES).sample(())

    line = stand(directory, snapshot, Rules(fair_share=False), new_ticket([ONE]))
    assert [place.now for place in line.places] == [True]


def test_whoever_waits_hears_his_place_anew_once_a_minute(directory, monkeypatch):
    now, said = [100.0], list[str]()
    waiting = in_line(directory)
    snapshot = Machine(*DEVICES).sample(())
    slept = []

    def sleep(seconds, tell, every):
        slept.append((seconds, every))
        for moment in (100.0, 159.0, 160.0, 161.0, 220.0):
            now[0] = moment
            tell()

    monkeypatch.setattr(turn.time, "monotonic", lambda: now[0])
    waiter = SimpleNamespace(ticket=new_ticket([ONE]), sleep=sleep, leave=lambda: None)
    monkeypatch.setattr(waiting, "_join", lambda *of: waiter)
    turns = []
    answer = SimpleNamespace(explained=lambda error: turns.append(now[0]) or NotEnoughGpus(f"as of {now[0]:.0f}"))
    monkeypatch.setattr(waiting, "turn", lambda *of: answer)

    def on_wait(error: NotEnoughGpus) -> None:
        said.append(str(error))

    on_wait.tell_every = 7.0  # type: ignore[attr-defined]
    waiting.sleep(snapshot, [ONE], 130.0, NotEnoughGpus("busy"), on_wait)

    assert said == ["as of 100", "as of 100", "as of 160", "as of 160", "as of 220"]
    assert slept == [(30.0, 7.0)] and waiting.waits and waiting._was_called
    waiting.sleep(snapshot, [ONE], None, NotEnoughGpus("busy"), None)
    assert slept[1] == (None, None) and turns == [100.0, 160.0, 220.0]


def test_what_is_reserved_for_others_is_asked_without_counting_what_users_had(directory, monkeypatch):
    monkeypatch.setattr(turn, "consult", lambda *of: pytest.fail("asked"))
    monkeypatch.setattr(turn, "kept_for_others", lambda snapshot, facts, ticket: {FIRST: f"for {ticket.requests}"})
    machine = Machine(*DEVICES)

    assert reserved_from(machine, directory, machine.sample(()), ONE) == {FIRST: f"for {(ONE,)}"}


@pytest.mark.parametrize(
    ("called", "turns", "closer"),
    [
        (False, [False, False], []),
        (True, [False, False], [0]),  # called for nothing: perhaps by a plan with a broken device
        (True, [True, False], [1]),  # it was his turn, and he comes again
        (False, [True, True], [1]),
    ],
)
def test_he_looks_closer_after_a_turn_of_which_nothing_came(directory, monkeypatch, called, turns, closer):
    machine, looked = Machine(*DEVICES), []
    waiting, snapshot = in_line(directory, machine), machine.sample(())
    waiting._was_called = called
    for number, his in enumerate(turns):
        place = a_place(now=his)
        answer = Turn(a_line(place), place, (ONE,))
        monkeypatch.setattr(waiting, "_turn", lambda *of, answer=answer: answer)
        monkeypatch.setattr(waiting, "_closer", lambda seen, number=number: looked.append(number) or seen)
        waiting.turn(snapshot, [ONE])

    assert looked == closer


def test_whoever_asks_has_come_to_his_reservations_and_whoever_is_served_to_those_of_his_devices(
    directory, monkeypatch
):
    came: list[list[str]] = []
    monkeypatch.setattr(turn, "arrive", lambda directory, bookings: came.append([one.id for one in bookings]) or came)
    bookings = tuple(
        Booking(name, 7, "eve", 1, NOW, NOW + HOUR, (uuid,)) for name, uuid in (("a", FIRST), ("b", SECOND))
    )
    waiting, machine = in_line(directory), Machine(*DEVICES)
    line = a_line(a_place(), bookings=bookings)
    monkeypatch.setattr(waiting, "_turn", lambda *of: Turn(line, line.places[0], (ONE,)))
    waiting.turn(machine.sample(()), [ONE])
    assert (came, served.last(directory, os.geteuid())) == ([["a", "b"]], None)

    class Claimed(list):
        arrivals = None

    waiting.served(Claimed([DEVICES[1]]))
    assert came[1:] == [["b"]] and served.last(directory, os.geteuid()) is not None


def test_whoever_joins_the_line_has_a_ticket_until_he_leaves(directory):
    machine = Machine(*DEVICES)
    waiting = in_line(directory, machine)
    waiting.leave()
    waiting._waiter = waiting._join(machine.sample(()), [ONE])
    assert [ticket.id for ticket in read_tickets(directory)[0]] == [waiting._waiter.ticket.id]
    waiting.leave()

    assert read_tickets(directory) == ([], [])


def test_without_room_for_a_ticket_he_hears_what_to_do(directory, monkeypatch):
    def full(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(turn, "Waiter", full)
    machine = Machine(*DEVICES)

    with pytest.raises(
        LockDirectoryError, match=r"no place in line can be had in .*: No space left on device.  Try --no"
    ):
        in_line(directory, machine)._join(machine.sample(()), [ONE])


@pytest.mark.parametrize("kind", [QUARANTINED, DENIED])
@pytest.mark.parametrize("seconds", [None, 60.0])
def test_a_mark_that_ends_by_itself_changes_the_line_then_and_its_file_is_watched(directory, kind, seconds):
    now = time.time()
    name = SECOND if kind == QUARANTINED else "4711"
    until = None if seconds is None else now + seconds
    change(directory, kind, lambda found: found.update({name: Mark(name, now, until, "a reason")}))
    line = stand(directory, Machine(*DEVICES).sample(()), Rules(fair_share=False))

    assert line.facts.changes_at == (until or float("inf"))
    assert any(path.endswith(f"{kind}.json") for path in line.facts.mark_files)


def test_without_marks_no_file_is_watched(directory):
    assert stand(directory, Machine(*DEVICES).sample(()), Rules(fair_share=False)).facts.mark_files == ()
