"""A process that waits in the queue, alone: when it leads, sleeps, stands in and gives way; its time is ours."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import a_claim_record, a_device, a_snapshot, a_uuid
from queues import a_ticket

from gpuguard.claims.claim import JobDetails
from gpuguard.claims.directory import open_lock, try_flock
from gpuguard.errors import BackendError, ImpossibleRequest, InvalidRequest, LockDirectoryError, NotEnoughGpus
from gpuguard.model import HEALTH, MEMORY, PROCESSES, THERMAL, VERIFY_FIELDS, Snapshot
from gpuguard.queue import leader as leading
from gpuguard.queue import waiter as waiting
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.leader import CHECK_SECONDS, MAY_START, POLL_SECONDS
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.queue.tickets import new_ticket, read_tickets, wake
from gpuguard.queue.waiter import (
    ALONE_SECONDS,
    DEPUTY_SECONDS,
    HEIRS,
    LOG_SECONDS,
    NEW_LEADER,
    OWN_CHECK_SECONDS,
    PROGRESS_SECONDS,
    REFRESH_SECONDS,
    SIGNS_MISSED,
    SILENT_SECONDS,
    WAKE_SECONDS,
    WAKES,
    WATCH_SECONDS,
    QueueAnswer,
    Waiter,
    WaitingRequest,
    wait_until_over,
)
from gpuguard.request import Request, fields_needed

UUID = a_uuid(0)
LEADER = 4242  # the pid of another process that leads
EPOCH = 1_000_000.0  # what the unix time is ahead of the other clock
OF_LEADER, OF_WATCH = 2**20, 2**20 + 1  # descriptors that stand for what the leader looks at, and for its end


class FakeLeader:
    """A leader as its waiter sees it."""

    def __init__(self, room: "Room", *made_of: Any) -> None:
        self.room, self.made_of, self.closed = room, made_of, False
        self.descriptors, self.until = [OF_LEADER], room.clock + room.next_sample
        self.sampled, self.asked = list[str](), list[set[int]]()

    def sample(self, ticket: str) -> bool:
        self.sampled.append(ticket)
        return bool(self.room.starts and self.room.starts.pop(0))

    def must_sample(self, ready: set[int]) -> bool:
        self.asked.append(ready)
        return OF_LEADER in ready or self.room.clock >= self.until

    def close(self) -> None:
        self.closed = True


class FakeWatch:
    """The processes of which the kernel would tell the end."""

    def __init__(self, room: "Room") -> None:
        self.room, self.watched, self.closed = room, list[list[int]](), 0

    @property
    def descriptors(self) -> list[int]:
        return [OF_WATCH] if self.watched and self.watched[-1] else []

    def watch(self, pids: Any) -> set[int]:
        self.watched.append(list(pids))
        if self.room.at_watch:
            self.room.at_watch.pop(0)()
        return set(pids) & self.room.ended

    def close(self) -> None:
        self.closed += 1


class Room:
    """A waiter whose clock, driver and neighbours are the test's."""

    def __init__(self, directory: Any, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.clock = directory, 5000.0
        self.slept, self.naps, self.reports, self.beats = list[float](), list[tuple[list[int], float]](), 0, 0
        self.events: list[Callable[[], object] | None] = []  # what happens in each nap, at its begin
        self.readable, self.starts, self.at_watch, self.ended = set[int](), list[bool](), list[Any](), set[int]()
        self.holder: int | None = LEADER
        self.age = dict[str, float]()  # of the last sign of life of each of the other tickets
        self.others, self.stopped, self.silent = list[Ticket](), set[int](), set[str]()
        self.woken, self.samples, self.workers_ended = list[tuple[list[str], bytes]](), list[Any](), 0
        self.leaders, self.watches = list[FakeLeader](), list[FakeWatch]()
        self.fails, self.next_sample = False, 600.0
        clock = SimpleNamespace(monotonic=lambda: self.clock, time=lambda: self.clock + EPOCH, sleep=self.sleep)
        patch.setattr(waiting, "time", clock)
        for name in ("wait_for", "flock_holder", "read_tickets", "tickets_of_process", "is_responsive"):
            patch.setattr(waiting, name, getattr(self, name))
        patch.setattr(waiting, "last_heartbeat", self.last_heartbeat)
        patch.setattr(waiting, "is_stopped", lambda pid: pid in self.stopped)
        patch.setattr(waiting, "wake", self.wake)
        patch.setattr(waiting.OwnTicket, "send_heartbeat", self.beat)
        patch.setattr(waiting, "Leader", lambda *words: self.remember(self.leaders, FakeLeader(self, *words)))
        patch.setattr(waiting, "ProcessWatch", lambda: self.remember(self.watches, FakeWatch(self)))
        self.queue, self.deputy = open_lock(directory, "queue"), os.open(directory.locks, os.O_RDONLY)
        self.waiter = self.a_waiter()

    def a_waiter(self) -> Waiter:
        ticket = new_ticket([Request()])
        return Waiter(self.directory, [UUID], ticket, self.read, self)  # type: ignore[arg-type]

    def remember(self, kept: list[Any], made: Any) -> Any:
        kept.append(made)
        return made

    def read(self, with_health: bool) -> QueueState:
        raise AssertionError("the leader is a fake")

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock += seconds

    def wait_for(self, descriptors: Any, seconds: float) -> set[int]:
        self.naps.append((list(descriptors), round(seconds, 6)))
        if event := self.events.pop(0) if self.events else None:
            event()
        real = [descriptor for descriptor in descriptors if descriptor < OF_LEADER]
        if not (ready := (self.readable & set(descriptors)) | leading.wait_for(real, 0.0)):
            self.clock += seconds
        self.readable.clear()
        return ready

    def flock_holder(self, lock: int) -> int | None:
        assert os.path.samestat(os.fstat(lock), os.fstat(self.queue))
        return self.holder

    def read_tickets(self, directory: Any) -> tuple[list[Ticket], list[Any]]:
        assert directory is self.directory
        return [self.waiter.ticket, *self.others], []

    def tickets_of_process(self, directory: Any, pid: int) -> list[Ticket]:
        assert directory is self.directory
        return [ticket for ticket in self.others if ticket.pid == pid and "unnamed" not in ticket.id]

    def is_responsive(self, directory: Any, ticket: Ticket) -> bool:
        assert directory is self.directory
        return ticket.id not in self.silent

    def last_heartbeat(self, directory: Any, ticket: Ticket) -> float:
        assert directory is self.directory
        return self.clock + EPOCH - self.age.get(ticket.id, 0.0)

    def wake(self, directory: Any, tickets: Any, message: bytes) -> None:
        assert directory is self.directory
        self.woken.append(([ticket.id for ticket in tickets], message))

    def beat(self) -> None:
        self.beats += 1

    def report(self) -> None:
        self.reports += 1

    def close(self) -> None:  # of the backend
        self.workers_ended += 1

    def sample(self, fields: Any) -> None:  # of the backend
        self.samples.append(fields)
        if self.fails:
            raise BackendError("no worker")

    def joins(self, name: str, pid: int = 17, **fields: Any) -> None:
        self.others.append(a_ticket(id=name, pid=pid, **fields))

    def led(self, age: float = 0.0) -> None:
        """Another process leads, whose last sign of life is so old."""
        self.joins("l", LEADER)
        self.age["l"] = age
        assert try_flock(self.queue)

    def tells(self, message: bytes) -> Callable[[], None]:
        return lambda: wake(self.directory, [self.waiter.ticket], message)

    def waits(self, seconds: float | None = None, every: float | None = None) -> float:
        """For how long it sleeps."""
        began = self.clock
        self.waiter.sleep(seconds, self.report, every)
        return round(self.clock - began, 6)

    @property
    def pauses(self) -> list[float]:
        return [seconds for _, seconds in self.naps]

    def is_free(self, lock: int) -> bool:
        """Whether the waiter leaves a lock (of the queue, or of the deputy) to others."""
        if not try_flock(lock):
            return False
        fcntl.flock(lock, fcntl.LOCK_UN)
        return True


@pytest.fixture
def room(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    made = Room(directory, monkeypatch)
    yield made
    made.waiter.withdraw()
    os.close(made.queue)
    os.close(made.deputy)


def test_the_first_leads_and_tells_the_others_which_watch_it_from_then_on(room):
    room.joins("a")
    room.joins("b")
    room.starts = [True]

    [written] = read_tickets(room.directory)[0]
    assert (written.id, written.requests) == (room.waiter.ticket.id, room.waiter.ticket.requests)
    assert room.waits() == 0.0
    [leader] = room.leaders
    assert leader.made_of == (room.directory, [UUID], room.read)
    assert leader.sampled == [room.waiter.ticket.id]
    assert room.woken == [(["a", "b"], NEW_LEADER)]
    assert (room.naps, room.reports, room.beats, room.workers_ended) == ([], 0, 1, 0)
    assert not room.is_free(room.queue) and room.is_free(room.deputy)
    assert room.watches[0].closed == 1
    assert room.waits(0.0) == 0.0 and len(room.leaders) == 1 and room.leaders[0].sampled[1:] == []


def test_a_leader_sleeps_until_it_has_to_sample_and_shows_that_it_lives(room):
    room.starts, room.next_sample = [False, True], 1.25
    assert room.waits(20.0) == 1.25
    waker = room.waiter._held.waker
    assert room.naps[0] == ([waker, OF_LEADER], WATCH_SECONDS)
    assert room.pauses == [0.5, 0.5, 0.25]
    assert room.leaders[0].asked == [set()]
    assert room.reports == 1
    assert room.beats == 5, "before each sample, and before and between the parts of a pause"


def test_a_leader_samples_as_soon_as_something_changes(room):
    room.starts = [False, True]
    room.events = [None, lambda: room.readable.add(OF_LEADER)]

    assert room.waits() == WATCH_SECONDS
    assert room.leaders[0].asked == [{OF_LEADER}]


def test_a_leader_that_has_nothing_to_sample_ends_its_pause_at_the_deadline(room):
    assert room.waits(1.25) == 1.25
    assert room.pauses == [0.5, 0.5, 0.25]
    assert len(room.leaders[0].sampled) == 1
    assert room.waits(0.25) == 0.25
    assert len(room.leaders[0].sampled) == 2, "each wait begins with a sample"


def test_one_that_does_not_lead_looks_after_the_leader_as_its_deputy_and_ends_its_worker(room):
    room.led()
    assert room.waits(5.0) == 5.0

    waker = room.waiter._held.waker
    assert room.naps == [([waker, OF_WATCH], WATCH_SECONDS)] * 10
    assert not room.leaders
    assert room.watches[0].watched == [[LEADER], [LEADER]], "at first, and when it has looked whether any leads"
    assert not room.is_free(room.deputy)
    assert (room.reports, room.workers_ended) == (2, 1), "its worker ends once it is known that another leads"
    assert room.beats == 0


def test_a_second_deputy_looks_more_rarely(room):
    room.led()
    assert try_flock(room.deputy)
    room.waits(2.5)

    assert room.pauses == [DEPUTY_SECONDS, 0.5]
    room.waits(6.0, 1.0)
    assert room.watches[0].watched == [[LEADER]] * 3, "it tries to lead at first, and at its own checks"


def test_what_is_told_on_a_terminal_is_told_more_often(room, monkeypatch):
    room.led()
    assert try_flock(room.deputy)
    monkeypatch.setattr(waiting.os, "isatty", lambda descriptor: descriptor == 2)
    room.waits(2.0)
    assert room.pauses == [PROGRESS_SECONDS] * 2
    room.naps.clear()
    room.waits(2.0, 0.5)
    assert room.pauses == [0.5] * 4


@pytest.mark.parametrize(("age", "passed"), [(SILENT_SECONDS, True), (SILENT_SECONDS - 0.125, False)])
def test_a_leader_without_a_sign_of_life_is_passed(room, age, passed):
    room.led(age)
    room.waits(0.25)

    assert len(room.leaders) == passed
    assert not room.is_free(room.deputy)


def test_a_stopped_leader_is_passed_whatever_sign_it_gave(room):
    room.led()
    room.stopped.add(LEADER)
    room.waits(0.25)

    assert len(room.leaders) == 1


def test_a_leader_that_does_not_respond_is_passed(room):
    room.led()
    room.silent.add("l")
    room.waits(0.25)

    assert len(room.leaders) == 1


def test_a_leader_whose_tickets_do_not_name_it_is_found_by_their_pid(room):
    room.joins("unnamed", LEADER)
    room.age["unnamed"] = 0.5
    assert try_flock(room.queue)
    room.waits(0.25)

    assert not room.leaders


def test_a_leader_is_found_by_its_process_however_many_tickets_there_are(room, monkeypatch):
    mine, asked = a_ticket(id="m", pid=LEADER), []
    monkeypatch.setattr(waiting, "tickets_of_process", lambda directory, pid: asked.append(pid) or [mine])
    assert try_flock(room.queue)
    room.waits(0.25)

    assert not room.leaders and set(asked) == {LEADER}


def test_one_that_gave_way_samples_at_once_when_it_leads_again(room):
    room.led(9.0)
    room.events = [
        lambda: room.age.update(l=0.0),
        lambda: (fcntl.flock(room.queue, fcntl.LOCK_UN), room.readable.add(OF_WATCH)),
    ]
    room.starts = [False, True]

    assert room.waits() == WATCH_SECONDS
    assert [len(leader.sampled) for leader in room.leaders] == [1, 1]


def test_a_leader_that_falls_silent_is_passed_at_the_next_check_of_the_deputy(room):
    room.led()
    room.events = [None, None, lambda: room.age.update(l=9.0)]
    room.starts = [True]

    assert room.waits() == 1.5
    assert room.pauses == [0.5] * 3
    assert len(room.leaders) == 1


def test_a_substitute_gives_way_as_soon_as_the_leader_works_again(room):
    room.led(9.0)
    room.events = [None, lambda: room.age.update(l=0.0), None, None]
    room.waits(3.0)

    [leader] = room.leaders
    assert leader.closed and room.reports == 2, "its pause is over when it gives way"
    assert room.pauses[:2] == [0.5, 0.5]
    assert leader.sampled == [room.waiter.ticket.id]
    assert not room.is_free(room.deputy), "it stays the deputy"
    assert room.beats == 4, "of a leader alone"


def test_a_substitute_becomes_the_leader_when_the_leader_is_gone(room):
    room.led(9.0)
    room.events = [None, lambda: fcntl.flock(room.queue, fcntl.LOCK_UN)]
    room.waits(2.0)

    [leader] = room.leaders
    assert not leader.closed and room.reports == 1
    assert not room.is_free(room.queue) and room.is_free(room.deputy)
    assert room.pauses == [0.5] * 4


def test_a_leader_that_ends_before_it_is_known_is_followed_at_once(room):
    room.led()
    room.ended.add(LEADER)
    room.at_watch = [lambda: fcntl.flock(room.queue, fcntl.LOCK_UN)]
    room.starts = [True]

    assert room.waits() == 0.0
    assert room.watches[0].watched == [[LEADER]]


@pytest.mark.parametrize("holder", [None, LEADER])
def test_a_leader_that_cannot_be_watched_is_tried_twice_and_then_waited_for(room, holder):
    room.led()
    room.holder, room.ended = holder, {LEADER}
    room.waits(1.0)

    assert room.watches[0].watched == [[holder] if holder else []] * 2
    assert not room.leaders


def test_a_deputy_that_comes_to_lead_leaves_that_to_another(room):
    room.led()
    room.holder = None
    room.events = [lambda: fcntl.flock(room.queue, fcntl.LOCK_UN)]
    room.starts = [True]

    assert room.waits() == DEPUTY_SECONDS
    assert len(room.leaders) == 1
    assert room.is_free(room.deputy)


def test_the_end_of_the_leader_is_noticed_at_once(room):
    room.led()
    room.events = [lambda: (fcntl.flock(room.queue, fcntl.LOCK_UN), room.readable.add(OF_WATCH))]
    room.starts = [True]

    assert room.waits() == 0.0
    assert len(room.leaders) == 1


def test_one_that_is_told_of_a_new_leader_watches_that(room):
    room.led()
    room.events = [room.tells(NEW_LEADER)]
    room.waits(0.5)

    assert room.watches[0].watched == [[LEADER], [LEADER]]


def test_one_that_may_start_returns_and_a_leader_samples_for_that(room):
    room.led()
    room.events = [room.tells(MAY_START)]
    assert room.waits() == 0.0

    fcntl.flock(room.queue, fcntl.LOCK_UN)
    room.events, room.starts = [room.tells(MAY_START)], [False, True]
    assert room.waits() == 0.0
    assert len(room.leaders[0].sampled) == 2


def test_a_leader_returns_at_the_word_of_a_daemon_that_gives_out_the_locks(room):
    room.waiter._directory = room.directory = replace(room.directory, closed=True)
    room.events = [room.tells(MAY_START)]

    assert room.waits() == 0.0
    assert len(room.leaders[0].sampled) == 1


def test_one_that_is_woken_on_and_on_sleeps_between_but_not_past_its_deadline(room):
    room.led()
    wakes = int(WAKES)
    room.events = [room.tells(b"?")] * (wakes + 3)
    assert room.waits(2 * WAKE_SECONDS + 0.5) == 2 * WAKE_SECONDS + 0.5

    # One wake more is saved up in each pause, and taken by the next one.
    assert room.slept == [WAKE_SECONDS, WAKE_SECONDS, 0.5]


def test_a_leader_that_may_start_on_and_on_sleeps_between_but_not_past_its_deadline(room):
    room.starts = [True] * 30
    for _ in range(int(WAKES)):
        room.waits()
    assert room.slept == []
    room.waits(0.5)
    room.waits()

    assert room.slept == [0.5, WAKE_SECONDS]


ERRORS = [OSError(errno.EMFILE, "Too many open files"), LockDirectoryError("the lock file is a link")]


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "ClaimError"])
@pytest.mark.parametrize("leave", [Waiter.resign, Waiter.withdraw])
def test_an_error_while_it_leaves_the_lead_is_no_matter(room, monkeypatch, leave, error):
    def fails(*_: Any) -> None:
        raise error

    room.waits(0.25)
    monkeypatch.setattr(waiting, "wake", fails)
    leave(room.waiter)

    assert room.is_free(room.queue)


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "ClaimError"])
def test_an_error_while_it_tells_the_others_keeps_none_from_leading(room, monkeypatch, error):
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(waiting, "wake", fails)
    room.starts = [True]

    assert room.waits() == 0.0


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "ClaimError"])
def test_an_error_while_it_looks_after_the_leader_passes_nobody(room, monkeypatch, error):
    def fails(*_: Any) -> Any:
        raise error

    room.led(9.0)
    monkeypatch.setattr(waiting, "tickets_of_process", fails)

    assert room.waits(2.5) == 2.5
    assert not room.leaders


@pytest.mark.parametrize("error", ERRORS, ids=["OSError", "ClaimError"])
def test_a_substitute_that_cannot_see_the_leader_goes_on(room, monkeypatch, error):
    def fails(*_: Any) -> Any:
        raise error

    room.led(9.0)
    room.events = [lambda: monkeypatch.setattr(waiting, "tickets_of_process", fails)]

    assert room.waits(2.5) == 2.5
    assert len(room.leaders) == 1 and not room.leaders[0].closed


def test_one_that_looks_after_no_leader_any_more_wakes_less_often(room):
    room.led(9.0)
    room.waits(0.25)
    room.waiter.resign()
    assert try_flock(room.deputy)
    room.holder = None
    room.naps.clear()
    room.waits(2.0)

    assert room.pauses == [DEPUTY_SECONDS]


def test_one_that_is_woken_now_and_then_never_sleeps_for_that(room):
    room.led()
    for _ in range(int(WAKES) * 2):
        room.clock += WAKE_SECONDS
        room.events = [room.tells(MAY_START)]
        room.waits()
    for _ in range(int(WAKES) - 1):
        room.events = [room.tells(MAY_START)]
        room.waits()
    assert room.slept == [], "so many wakes in a row are no reason to slow down"

    room.events = [room.tells(MAY_START)]
    room.waits()
    assert room.slept == [WAKE_SECONDS]


def test_where_none_leads_each_samples_by_itself_now_and_then(room):
    room.led(SIGNS_MISSED * OWN_CHECK_SECONDS)
    assert try_flock(room.deputy), "by a program that does nothing"
    assert room.waits() == ALONE_SECONDS
    assert room.waits() == ALONE_SECONDS
    assert room.workers_ended == 0, "it is needed again in a moment"

    room.age["l"] -= 0.5
    assert room.waits(40.0) == 40.0
    assert room.workers_ended > 0
    room.age["l"] = 1000.0
    assert room.waits() == OWN_CHECK_SECONDS, "as long as one is known to lead, it looks more rarely"
    assert room.waits() == ALONE_SECONDS


def test_a_ticket_that_was_removed_is_made_again(room):
    room.led()
    before = room.waiter.ticket
    for path in Path(room.directory.records).glob(f"*{before.id}*"):
        path.unlink()

    assert room.waits() == ALONE_SECONDS, "a leader that lives, but knows nothing of it"
    assert replace(room.waiter.ticket, id=before.id) == before
    assert [ticket.id for ticket in read_tickets(room.directory)[0]] == [room.waiter.ticket.id] != [before.id]


def test_a_ticket_that_cannot_be_made_again_is_no_reason_to_wait_longer(room, monkeypatch):
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    room.led()
    for path in Path(room.directory.records).glob(f"*{room.waiter.ticket.id}*"):
        path.unlink()
    monkeypatch.setattr(waiting, "OwnTicket", full)

    assert room.waits() == ALONE_SECONDS


def test_a_leader_is_never_alone_and_looks_at_that_rarely(room):
    assert room.waits(2 * OWN_CHECK_SECONDS) == 2 * OWN_CHECK_SECONDS
    assert room.reports == 3
    assert room.leaders[0].asked == [set(), set(), set()]


def test_one_that_leaves_lets_the_newest_that_respond_lead(room):
    for number in range(HEIRS + 2):
        room.joins(f"t{number}", since=float(number))
    room.silent.add("t4")
    room.waits(0.25)
    room.woken.clear()
    room.waiter.withdraw()

    assert room.woken == [(["t3", "t2", "t1"], NEW_LEADER)]
    assert room.leaders[0].closed and room.watches[0].closed == 2
    assert room.is_free(room.queue) and room.is_free(room.deputy)
    assert read_tickets(room.directory) == ([], [])
    room.waiter.withdraw()
    assert len(room.woken) == 1


def test_one_that_does_not_lead_leaves_without_a_word(room):
    room.led()
    room.waits(3.0)
    assert not room.is_free(room.deputy)
    room.waiter.resign()
    room.waiter.withdraw()

    assert room.woken == []


def test_one_that_cannot_sample_lets_another_lead(room):
    room.joins("a")
    room.waits(0.25)
    room.woken.clear()
    room.waiter.resign()

    assert room.woken == [(["a"], NEW_LEADER)]
    assert room.leaders[0].closed and room.is_free(room.queue)


def test_a_waiter_that_cannot_write_its_ticket_leaves_nothing_open(room, monkeypatch):
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(waiting, "OwnTicket", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space"):
        room.a_waiter()

    assert os.listdir("/proc/self/fd") == before


# A request that may have to wait.

RULES = QueueRules(bound=77.0)
COOL = Request(max_temperature=50.0)


class Requester:
    """A request whose driver, queue and sleep are the test's."""

    def __init__(self, directory: Any, patch: pytest.MonkeyPatch, **job: Any) -> None:
        self.directory, self.patch = directory, patch
        self.sampled, self.arrivals, self.reads = list[frozenset[str]](), list[Any](), list[Any]()
        self.failures: list[Exception | None] = []
        self.facts: dict[str, Any] = {}
        self.now, self.request, self.others = [True], None, list[QueuePosition]()
        patch.setattr(waiting, "with_reserved_instances", self.with_reserved_instances)
        patch.setattr(waiting, "read_queue_settings", self.read_queue_settings)
        patch.setattr(waiting, "promise", self.promise)
        patch.setattr(waiting, "record_arrival", self.arrive)
        patch.setattr(waiting, "read_queue", self.read)
        self.waiting = WaitingRequest(self, directory, JobDetails(**job))  # type: ignore[arg-type]

    def read_queue_settings(self, directory: Any) -> Any:
        assert directory is self.directory
        return SimpleNamespace(rules=RULES)

    def with_reserved_instances(self, backend: Any, directory: Any, snapshot: Snapshot) -> Snapshot:
        assert (backend, directory) == (self, self.directory)
        return replace(snapshot, host="with the reserved instances")

    def promise(self, position: QueuePosition, rules: QueueRules, now: float) -> float:
        assert (position.ticket.id, rules, now) == ("", RULES, 1000.0)
        return 1234.0

    def arrive(self, directory: Any, reservations: Any) -> str:
        assert directory is self.directory
        self.arrivals.append(reservations)
        return "files"

    def sample(self, fields: Any) -> Any:  # of the backend
        self.sampled.append(frozenset(fields))
        if self.failures and (error := self.failures.pop(0)):
            raise error
        return a_snapshot(a_device(temperature=70.0), taken_at=1.0)

    def close(self) -> None:
        pass

    def read(self, directory: Any, snapshot: Snapshot, ticket: Ticket | None = None, *, rules: Any) -> QueueState:
        assert (directory, rules) == (self.directory, RULES) and snapshot.devices
        self.reads.append(snapshot)
        mine = []
        if ticket is not None:
            now = self.now.pop(0) if len(self.now) > 1 else self.now[0]
            mine = [QueuePosition(ticket, 1, None, None, now, self.request or ticket.requests[0])]
        return QueueState((*mine, *self.others), (), snapshot, QueueFacts(**self.facts), 1000.0)

    def behind(self, *requests: Request) -> None:
        """Other requests wait."""
        self.others = [
            QueuePosition(a_ticket(id=str(request), requests=(request,)), 2, None, None) for request in requests
        ]

    def check(self, *requests: Request) -> QueueAnswer:
        return self.waiting.check(a_snapshot(), requests or (Request(),))

    def queued(self) -> None:
        """It has a ticket already."""
        self.waiting.waiter = SimpleNamespace(ticket=new_ticket([Request()]))  # type: ignore[assignment]


@pytest.fixture
def requester(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Requester:
    return Requester(directory, monkeypatch)


HEALTH_TOO = frozenset({PROCESSES, *VERIFY_FIELDS})


@pytest.mark.parametrize(
    ("queued", "now", "behind", "facts", "sampled"),
    [
        (True, True, [], {}, []),
        (True, False, [], {}, []),
        (False, True, [], {}, []),
        (False, False, [], {}, [HEALTH_TOO]),
        (True, True, [COOL], {}, [HEALTH_TOO | {THERMAL}]),
        (True, False, [COOL], {}, []),
        (True, True, [], {"reservations": ("kept",)}, [HEALTH_TOO]),
        (True, False, [], {"reservations": ("kept",)}, []),
    ],
)
def test_the_health_of_devices_is_read_where_without_it_the_answer_could_be_wrong(
    requester, queued, now, behind, facts, sampled
):
    if queued:
        requester.queued()
    requester.now, requester.facts = [now], facts
    requester.behind(*behind)
    answer = requester.check()

    assert requester.sampled == sampled
    assert bool(answer.startable) is now
    assert [snapshot.devices[0].temperature for snapshot in requester.reads] == [35.0, 70.0][: 1 + len(sampled)]
    assert requester.arrivals == [facts.get("reservations", ())]


def test_after_it_could_start_and_did_not_it_looks_closer_once(requester):
    requester.queued()
    requester.check()
    requester.check()
    requester.now = [False]
    requester.check()
    requester.check()

    assert requester.sampled == [HEALTH_TOO] * 2


def test_a_driver_that_fails_leaves_it_with_the_sample_that_it_has(requester):
    requester.now, requester.failures = [False, True], [BackendError("broken")]
    answer = requester.check()

    assert [snapshot.devices[0].temperature for snapshot in requester.reads] == [35.0, 35.0]
    assert answer.startable and answer.requested == (Request(),)


def an_answer(now: bool = True, request: Request | None = COOL, others: int = 0, **fields: Any) -> QueueAnswer:
    asked = (Request(max_gpus=4), COOL)
    ticket = a_ticket(id="a", requests=(Request(), COOL), after=fields.pop("after", None))
    mine = QueuePosition(ticket, 1, None, None, now, request, **fields)
    others_there = [QueuePosition(a_ticket(id=f"o{number}"), 2, None, None) for number in range(others)]
    queue = QueueState((mine, *others_there), (), a_snapshot(), QueueFacts(), 1000.0)
    return QueueAnswer(queue, mine, (asked[0], replace(COOL, max_gpus=3)))


@pytest.mark.parametrize(
    ("answer", "startable", "is_later"),
    [
        (an_answer(), (replace(COOL, max_gpus=3),), False),
        (an_answer(request=Request()), (Request(max_gpus=4),), False),
        (an_answer(others=1), (COOL,), False),
        (an_answer(now=False), (), True),
        (an_answer(request=None), (), False),
        (an_answer(now=False, request=None), (), False),
    ],
)
def test_the_alternative_that_may_start_is_the_planned_one_with_no_more_gpus_than_others_leave(
    answer, startable, is_later
):
    assert (answer.startable, answer.is_later) == (startable, is_later)


def test_the_error_of_one_that_waits_has_its_position_and_an_impossible_one_stays_as_it_is():
    answer = an_answer(now=False)
    missing = NotEnoughGpus("wanted 1 GPU.", 1, reasons=("GPU 0: in use",))
    explained = answer.explained(missing)
    assert (str(explained), explained.brief) == (
        "wanted 1 GPU: number 1 of 1 in the queue, too far behind for a plan.\nGPU 0: in use",
        "too far behind for a plan (1 of 1 in the queue)",
    )
    unqueued = replace(answer, position=replace(answer.position, ticket=replace(answer.position.ticket, id="")))
    assert str(unqueued.explained(missing)).startswith(
        "wanted 1 GPU: not now; it would be number 1 of 1 in the queue, too far behind for a plan."
    )
    never = ImpossibleRequest("wanted 9 GPUs", 9)
    assert answer.explained(never) is never


class Sleeper:
    """A ticket that was written; it sleeps as the test says."""

    def __init__(self, test: Any, made_of: tuple[Any, ...]) -> None:
        self.test, self.made_of, self.ticket = test, made_of, replace(made_of[2], id="mine")

    def sleep(self, seconds: float | None, report: Callable[[], object], every: float | None) -> None:
        self.test.slept.append((seconds, every))
        for pause in (0.0, REFRESH_SECONDS - 1.0, 1.0, 1.0):
            self.test.clock += pause
            report()


def test_one_that_waits_joins_the_queue_once_and_is_told_where_it_stands(directory, monkeypatch):
    job = {"priority": 1, "time_limit": 60.0, "expected": lambda: 30.0, "note": "mine", "command": ("python", "a.py")}
    requester = Requester(directory, monkeypatch, **job)
    test = SimpleNamespace(clock=5000.0, slept=[], told=[], made=[])
    clock = SimpleNamespace(monotonic=lambda: test.clock, time=lambda: test.clock + EPOCH)
    monkeypatch.setattr(waiting, "time", clock)
    monkeypatch.setattr(waiting, "Waiter", lambda *words: test.made.append(Sleeper(test, words)) or test.made[-1])
    requester.now = [False]
    requester.others = [QueuePosition(a_ticket(id="o"), 2, None, None)]
    asked = requester.waiting
    assert asked.waited is None and asked.ticket_of([COOL]).requests == (COOL,)

    def tell(error: NotEnoughGpus) -> None:
        test.told.append(str(error))

    tell.tell_every = 7.0  # type: ignore[attr-defined]
    before = NotEnoughGpus("wanted 1 GPU.", 1, reasons=("GPU 0: in use",))
    error = asked.sleep(a_snapshot(), [COOL], 5010.0, before, tell)
    [sleeper] = test.made
    ticket = sleeper.made_of[2]
    assert (ticket.priority, ticket.time_limit, ticket.expected, ticket.note) == (1, 60.0, 30.0, "mine")
    assert (ticket.command, ticket.requests) == (("python", "a.py"), (COOL,))
    assert (sleeper.made_of[:2], sleeper.made_of[4]) == ((directory, [UUID]), requester)
    assert sleeper.made_of[3].args[0].of("").ticket == replace(ticket, promise=None)
    assert ticket.promise == 1234.0
    assert test.slept == [(10.0, 7.0)]
    waits = "wanted 1 GPU: number 1 of 2 in the queue, too far behind for a plan.\nGPU 0: in use"
    assert test.told == [waits] * 4 and str(error) == waits
    assert asked.ticket_of([]) is sleeper.ticket
    assert asked.waited == test.clock + EPOCH - ticket.since

    requester.sampled.clear()
    asked.sleep(a_snapshot(), [COOL], None, before, None)
    assert test.slept == [(10.0, 7.0), (None, None)] and len(test.made) == 1
    assert requester.sampled == [], "nothing is told, so nothing is read"
    requester.check()
    assert requester.sampled == [HEALTH_TOO | {THERMAL}], "it was woken, and cannot start"


def test_where_one_stands_is_read_anew_before_it_is_older_than_a_minute(directory, monkeypatch):
    requester = Requester(directory, monkeypatch)
    test = SimpleNamespace(clock=5000.0, slept=[])
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: test.clock, time=lambda: test.clock))
    requester.waiting.waiter = Sleeper(test, (None, None, new_ticket([Request()])))  # type: ignore[assignment]
    requester.now, reads = [False], []
    error = requester.waiting.sleep(
        a_snapshot(),
        [Request()],
        None,
        NotEnoughGpus("x", 1, reasons=("GPU 0: in use",)),
        lambda error: reads.append((len(requester.reads), str(error))),
    )

    waits = "wanted 1 GPU: number 1 of 1 in the queue, too far behind for a plan.\nGPU 0: in use"
    first = "x\nGPU 0: in use"
    assert reads == [(0, first), (0, first), (1, waits), (1, waits)]
    assert str(error) == waits


def test_a_directory_that_takes_no_ticket_is_told(directory, monkeypatch):
    requester = Requester(directory, monkeypatch)

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(waiting, "Waiter", full)
    with pytest.raises(LockDirectoryError) as raised:
        requester.waiting.sleep(a_snapshot(), [Request()], None, NotEnoughGpus("x", 1), None)

    assert str(raised.value) == (
        f"no ticket can be written into {directory.records}: No space left on device.  Try --no-wait."
    )


def test_a_leader_reads_what_the_requests_of_all_need_and_keeps_to_that(requester):
    before = requester.read(requester.directory, a_snapshot(), rules=RULES)
    needed = fields_needed(Request()) | {MEMORY, PROCESSES}
    requester.behind(Request())
    queue = requester.waiting._sample_for_all(before, False)
    assert (queue.positions, queue.snapshot.host) == (tuple(requester.others), "with the reserved instances")
    requester.behind(COOL)
    requester.sampled.clear()
    requester.waiting._sample_for_all(before, False)
    requester.waiting._sample_for_all(before, False)

    assert requester.sampled == [needed, needed | {THERMAL}, needed | {THERMAL}]


def test_a_leader_reads_the_health_of_devices_where_it_is_asked_to_and_can(requester):
    before = requester.read(requester.directory, a_snapshot(), rules=RULES)
    requester.failures = [None, BackendError("broken")]
    requester.waiting._sample_for_all(before, True)
    assert HEALTH in requester.sampled[1] and requester.sampled[0] == {MEMORY, PROCESSES}

    requester.others, requester.failures = [QueuePosition(a_ticket(), 1, None, None)], [BackendError("broken")]
    before = replace(before, positions=tuple(requester.others))
    assert requester.waiting._sample_for_all(before, False) == replace(before, positions=())
    starts_no_worker = BackendError("no worker")
    starts_no_worker.__cause__ = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    requester.failures = [starts_no_worker]
    with pytest.raises(BackendError, match="no worker"):
        requester.waiting._sample_for_all(before, False)


def test_one_that_has_its_claim_has_come_to_the_reservations_of_its_devices_alone(requester, monkeypatch):
    started = []
    monkeypatch.setattr(waiting, "record_start", lambda *words: started.append(words))
    here, elsewhere = (SimpleNamespace(devices=frozenset({a_uuid(index)})) for index in (0, 1))
    requester.queued()
    requester.facts = {"reservations": (here, elsewhere)}
    requester.check()

    class Claimed(list[Any]):
        arrival_files = None

    claim = Claimed([a_device(0)])
    requester.waiting.started(claim)  # type: ignore[arg-type]
    assert started == [(requester.directory, os.geteuid())]
    assert requester.arrivals == [(here, elsewhere), [here]]
    assert claim.arrival_files == "files"


# What --after waits for.


class After:
    """What is told, and how each wait ends."""

    def __init__(self, directory: Any, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.told, self.waits = directory, list[str](), list[tuple[int, float]]()
        self.seen, self.events, self.watched = list[str | None](), list[Any](), True
        self.records: list[Any] = []
        self.names: list[set[str]] = []
        patch.setattr(waiting, "wait_for", self.wait_for)
        patch.setattr(waiting, "read_records", lambda directory: [self.records[0]])
        patch.setattr(waiting, "read_record", self.read_record)
        patch.setattr(leading, "DirectoryWatch", self.watch)

    def read_record(self, directory: Any, uid: int, name: str) -> Any:
        assert directory is self.directory and (uid, name) == (1001, "abcd1234")
        record = self.records.pop(0)
        if isinstance(record, Exception):
            raise record
        return record

    def watch(self, path: str) -> Any:
        assert path == self.directory.records
        if not self.watched:
            raise OSError(errno.ENOSPC, "no watch is left")
        return SimpleNamespace(
            descriptor=OF_WATCH, names=lambda: self.names.pop(0), close=lambda: self.told.append("closed")
        )

    def wait_for(self, descriptors: list[int], seconds: float) -> set[int]:
        self.waits.append((len(descriptors), seconds))
        [ticket] = read_tickets(self.directory)[0]
        self.seen.append(ticket.after)
        return set(descriptors) if self.events and self.events.pop(0) else set()

    def wait(self, what: str, **more: Any) -> None:
        wait_until_over(what, self.directory, new_ticket([Request()]), self.told.append, {}, **more)


@pytest.fixture
def after(directory: Any, monkeypatch: pytest.MonkeyPatch) -> After:
    return After(directory, monkeypatch)


CLAIM = a_claim_record(UUID, id="abcd1234")
TEXT = "waits until alice's claim abcd1234 has ended"


def test_the_end_of_a_claim_is_looked_for_when_its_record_changes_and_now_and_then(after):
    file = f"{after.directory.prefix}claim.1001.abcd1234.json"
    after.records = [CLAIM] * 8 + [None]
    after.names = [{"other"}, {file}, set(), set(), {""}, set(), set(), set()]
    after.wait("abcd")

    assert after.told == [TEXT] * 8 + ["closed"]
    assert after.waits == [(1, pause) for pause in (LOG_SECONDS, LOG_SECONDS, *CHECK_SECONDS, *CHECK_SECONDS)]
    assert after.seen == [TEXT] * 8
    assert read_tickets(after.directory) == ([], []), "nobody waits any more"


def test_without_a_watch_a_claim_is_looked_at_more_often_also_while_it_cannot_be_read(after):
    after.watched = False
    after.records = [CLAIM, OSError(errno.EMFILE, "Too many open files"), None]
    after.wait("abcd1234")

    assert after.told == [TEXT] * 2
    assert after.waits == [(0, min(POLL_SECONDS, LOG_SECONDS))] * 2


def test_a_record_that_can_never_be_read_is_an_error(after):
    after.records = [OSError(errno.EACCES, "Permission denied")]
    with pytest.raises(OSError, match="Permission denied"):
        waiting._lives(after.directory, CLAIM)


def test_the_end_of_a_process_is_waited_for_with_a_line_now_and_then(after, monkeypatch):
    text = f"waits until process {os.getpid()} has ended"
    monkeypatch.setattr(waiting, "read_records", lambda directory: [])
    monkeypatch.setattr(waiting.os, "isatty", lambda descriptor: descriptor == 2)
    after.events = [False, True]
    before = os.listdir("/proc/self/fd")
    after.wait(str(os.getpid()), has_ended=lambda what: True)

    assert (after.told, after.seen) == ([text] * 2, [text] * 2)
    assert after.waits == [(1, PROGRESS_SECONDS)] * 2
    assert (os.listdir("/proc/self/fd"), read_tickets(after.directory)) == (before, ([], []))


def test_a_process_that_cannot_be_waited_for_is_told(after, monkeypatch):
    def refused(pid: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(waiting, "read_records", lambda directory: [])
    monkeypatch.setattr(waiting.os, "pidfd_open", refused)
    with pytest.raises(InvalidRequest) as raised:
        after.wait("4711")

    assert str(raised.value) == (
        "--after 4711: its end cannot be waited for (Invalid argument).  Name the process itself, or a claim."
    )


def test_a_claim_that_is_known_to_have_ended_is_over(after, monkeypatch):
    monkeypatch.setattr(waiting, "read_records", lambda directory: [])
    asked = []
    after.wait("abcd", has_ended=lambda what: bool(asked.append(what) or True))

    assert (asked, after.told) == (["abcd"], [])
    with pytest.raises(InvalidRequest) as raised:
        after.wait("abcd")
    assert str(raised.value) == (
        "--after abcd: there is no such claim or process now, and no event of such a claim.\n`gpuguard who` shows the "
        "claims, `gpuguard queue` who waits, `gpuguard events` which claims have ended."
    )
