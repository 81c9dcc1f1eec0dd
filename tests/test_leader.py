"""The leader of the queue at its edges: when it samples again, whom it wakes, and what it notices; its time is ours."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot, a_uuid
from queues import a_ticket

from gpuguard.claims.directory import open_lock, try_flock
from gpuguard.claims.holders import flock_holder
from gpuguard.files import wait_for
from gpuguard.queue import leader as leading
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.leader import (
    CHECK_SECONDS,
    HEALTH_SECONDS,
    MAY_START,
    MOST_WATCHED,
    POLL_SECONDS,
    REPLACED,
    SAMPLE_SECONDS,
    SETTLE_SECONDS,
    START_SECONDS,
    DirectoryWatch,
    Leader,
    ProcessWatch,
)
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.request import Request

ONE = Request()
UUID = a_uuid(0)


def a_position(name: str = "a", request: Request | None = ONE, **fields: Any) -> QueuePosition:
    requests = (request or ONE,)
    ticket = a_ticket(id=name, requests=requests, after=fields.pop("after", None))
    return QueuePosition(ticket, 1, None, None, request=request, **fields)


def a_queue(*positions: QueuePosition, **facts: Any) -> QueueState:
    devices = facts.pop("devices", (a_device(),))
    unresponsive = facts.pop("unresponsive", frozenset())
    return QueueState(positions, (), a_snapshot(*devices), QueueFacts(**facts), 1000.0, unresponsive)


class Room:
    """A leader whose clock, driver and locks are the test's, and which of the others it has woken."""

    def __init__(self, directory: Any, patch: pytest.MonkeyPatch) -> None:
        self.clock, self.queue, self.cost = 5000.0, a_queue(a_position()), 0.0
        self.asked, self.woken, self.slept = list[bool](), list[tuple[list[str], bytes]](), list[float]()
        self.locks, self.responsive = frozenset({UUID}), False
        patch.setattr(leading.time, "monotonic", lambda: self.clock)
        patch.setattr(leading.time, "sleep", self.slept.append)
        patch.setattr(leading, "locks_held", self.held)
        patch.setattr(leading, "is_responsive", self.responds)
        patch.setattr(leading, "wake", self.wake)
        self.directory = directory
        self.leader = Leader(directory, [UUID], self.read)

    def read(self, with_health: bool) -> QueueState:
        self.asked.append(with_health)
        self.clock += self.cost
        return self.queue

    def held(self, directory: Any, uuids: Any) -> frozenset[str]:
        assert (directory, tuple(uuids)) == (self.directory, (UUID,))
        return self.locks

    def responds(self, directory: Any, ticket: Any) -> bool:
        assert directory is self.directory and ticket.id
        return self.responsive

    def wake(self, directory: Any, tickets: Any, message: bytes) -> None:
        assert directory is self.directory
        if tickets:
            self.woken.append(([ticket.id for ticket in tickets], message))

    def samples(self, *positions: QueuePosition, own: str = "a", **facts: Any) -> float:
        """A sample that shows this queue; when the next one comes at the latest."""
        self.queue = a_queue(*(positions or (a_position(),)), **facts)
        self.leader.sample(own)
        return self.leader.until - self.clock

    def touch(self, name: str) -> None:
        Path(self.directory.records, f"{self.directory.prefix}{name}").touch()


@pytest.fixture
def room(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    made = Room(directory, monkeypatch)
    yield made
    made.leader.close()


@pytest.fixture
def unwatched(directory: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """One to which the kernel gives no watch of the directory."""

    def refused(path: str) -> None:
        raise OSError(24, "no watch is left")

    monkeypatch.setattr(leading, "DirectoryWatch", refused)
    made = Room(directory, monkeypatch)
    yield made
    made.leader.close()


ALIVE, GONE = a_process(os.getpid()), a_process(2**22 + 1)
CLAIMED = {"claims": (a_claim_record(UUID),)}
FULL = {"devices": (a_device(memory_used=9 * GIB),)}

PAUSES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "all can be seen": ({}, {}, HEALTH_SECONDS),
    "a process whose end is seen": ({}, {"devices": (a_device(processes=(ALIVE,)),)}, HEALTH_SECONDS),
    "a process whose end is not seen": ({}, {"devices": (a_device(processes=(GONE,)),)}, SETTLE_SECONDS),
    "of a claim": ({}, {"devices": (a_device(processes=(GONE,)),), **CLAIMED}, HEALTH_SECONDS),
    "many processes": (
        {}, {"devices": (a_device(processes=(ALIVE,) * (MOST_WATCHED + 1)),)}, SAMPLE_SECONDS
    ),
    "as many processes as can be seen": (
        {}, {"devices": (a_device(processes=(ALIVE,) * MOST_WATCHED),)}, HEALTH_SECONDS
    ),
    "waits for a utilization": ({"request": Request(max_util=5.0)}, {}, SAMPLE_SECONDS),
    "waits for a temperature": ({"request": Request(max_temperature=50.0)}, {}, SAMPLE_SECONDS),
    "waits for a share": ({"request": Request(share=True, memory=GIB)}, {}, SAMPLE_SECONDS),
    "a claim without a record": ({}, {"claims": (a_claim_record(UUID, since=None),)}, SAMPLE_SECONDS),
    "held back": ({"held_back_by": "b"}, {}, SAMPLE_SECONDS),
    "memory that no process has": ({}, FULL, SETTLE_SECONDS),
    "memory that no process has under a claim": ({}, {**FULL, **CLAIMED}, HEALTH_SECONDS),
    "memory of a process": ({}, {"devices": (a_device(memory_used=9 * GIB, processes=(ALIVE,)),)}, HEALTH_SECONDS),
    "as much memory as an idle GPU may hold": ({}, {"devices": (a_device(memory_used=2**29),)}, HEALTH_SECONDS),
    "unknown memory": ({}, {"devices": (a_device(memory_used=None),)}, SETTLE_SECONDS),
    "unknown processes": ({}, {"devices": (a_device(processes=None),)}, SETTLE_SECONDS),
    "a restriction that ends": ({}, {"changes_at": 1007.0}, 7.0 + CHECK_SECONDS[0]),
    "a restriction that is over": ({}, {"changes_at": 993.0}, CHECK_SECONDS[0]),
    "one that may start": ({"now": True}, {}, START_SECONDS),
}  # fmt: skip


@pytest.mark.parametrize(("position", "facts", "seconds"), PAUSES.values(), ids=PAUSES)
def test_the_driver_is_read_again_when_something_may_have_changed_of_which_the_kernel_tells_nothing(
    room, position, facts, seconds
):
    assert room.samples(a_position(**position), **facts) == pytest.approx(seconds)


def test_a_driver_that_did_not_answer_is_asked_again(room):
    room.queue = a_queue()
    room.leader.sample("a")

    assert room.leader.until - room.clock == SAMPLE_SECONDS


def test_a_device_that_does_not_empty_is_looked_at_less_and_less_often_until_a_lock_is_released(room):
    pauses = [room.samples(**FULL) for _ in range(8)]
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]

    room.touch("claim.1.a.json")
    room.locks = frozenset()
    assert room.leader.must_sample(room.leader.descriptors)
    assert room.slept == [leading.CLAIM_SECONDS]
    assert room.samples(**FULL) == pytest.approx(CHECK_SECONDS[0]), "another lock may be free in a moment"
    room.clock += SETTLE_SECONDS
    assert room.leader.must_sample(())


def test_who_may_start_is_woken_and_woken_again_if_it_does_not_start(room):
    may_start = [a_position(name, now=True) for name in "ab"]
    never = a_position("n", request=None)
    later = a_position("w", request=None, after="waits until a process has ended")
    positions = (*may_start, never, later, *(a_position(name) for name in "cdef"))
    pauses = []
    for _ in range(3):
        pauses.append(room.samples(*positions))
        room.clock += START_SECONDS
    room.clock += 0.1
    pauses.append(room.samples(*positions))
    room.clock += 0.2
    room.samples(*positions)

    assert room.woken == [(["b", "n"], MAY_START)] * 3
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert room.leader.sample("a") and room.leader.sample("n") and not room.leader.sample("c")
    assert room.samples(*positions[:1]) == START_SECONDS, "others may start than before"


def test_the_health_of_devices_is_read_now_and_then_and_where_who_was_woken_does_not_start(room):
    room.samples()
    room.clock += HEALTH_SECONDS - 0.1
    room.samples()
    room.clock += 0.1
    room.samples()
    room.samples()
    assert room.asked == [False, False, True, False]

    room.asked.clear()
    room.samples(a_position("b", now=True))
    room.clock += START_SECONDS
    room.samples(a_position("b", now=True))
    room.responsive = True
    room.clock += START_SECONDS
    room.samples(a_position("b", now=True))
    assert room.asked == [False, False, True]


@pytest.mark.parametrize(
    ("name", "until"),
    [
        ("claim.1.a.json", 0.0),
        ("ticket.1.a.json", CHECK_SECONDS[0]),
        ("reserve.1.a.json", CHECK_SECONDS[0]),
        ("arrived.1.a", HEALTH_SECONDS),
        ("unfinished.1.a", HEALTH_SECONDS),
    ],
)
def test_what_is_written_beside_the_records_is_noticed(room, name, until):
    room.samples()
    room.touch(name)
    ready = wait_for(room.leader.descriptors, 0.0)

    assert ready == set(room.leader.descriptors) and len(ready) == 1
    assert not room.leader.must_sample(ready)
    checks = CHECK_SECONDS[0] if name.startswith("claim") else until
    assert room.leader.until - room.clock == pytest.approx(checks)
    assert not wait_for(room.leader.descriptors, 0.0), "it was read"
    room.clock += checks
    assert room.leader.must_sample(()) is (until != 0.0)


def test_tickets_that_come_and_go_make_a_slow_driver_read_a_part_of_the_time(room):
    room.cost = 1.0
    room.samples()
    room.touch("ticket.1.a.json")
    room.leader.must_sample(room.leader.descriptors)

    assert room.leader.until - room.clock == pytest.approx((leading.PART - 1) * 1.0)


def test_the_end_of_a_process_without_a_claim_is_noticed(room):
    with subprocess.Popen(["sleep", "600"]) as child:
        room.samples(devices=(a_device(processes=(a_process(child.pid),)),))
        assert len(room.leader.descriptors) == 2
        child.kill()
    ready = wait_for(room.leader.descriptors, None)

    assert room.leader.must_sample(ready)
    room.leader.close()
    room.leader._watch = None
    assert room.leader.descriptors == []


def test_without_a_watch_the_locks_and_the_tickets_are_looked_at_now_and_then(unwatched):
    unwatched.touch("ticket.1.there.json")
    assert unwatched.samples() == POLL_SECONDS
    assert unwatched.leader.descriptors == []
    assert not unwatched.leader.must_sample(())
    unwatched.clock += POLL_SECONDS
    assert not unwatched.leader.must_sample(()), "nothing has happened"
    assert unwatched.leader.until - unwatched.clock == POLL_SECONDS

    unwatched.touch("ticket.1.a.json")
    unwatched.clock += POLL_SECONDS
    assert not unwatched.leader.must_sample(())
    assert unwatched.leader.until - unwatched.clock == pytest.approx(CHECK_SECONDS[0])
    unwatched.samples()
    unwatched.clock += POLL_SECONDS
    unwatched.locks = frozenset()
    assert unwatched.leader.must_sample(())


def test_a_request_that_was_passed_is_served_soon_after_its_process_answers(room):
    silent = a_position("s")
    assert room.samples(silent, unresponsive=frozenset({"s"})) == POLL_SECONDS
    room.clock += POLL_SECONDS
    assert not room.leader.must_sample(())
    assert room.leader.until - room.clock == POLL_SECONDS
    room.responsive = True
    room.clock += POLL_SECONDS
    assert not room.leader.must_sample(())
    assert room.leader.until - room.clock == pytest.approx(CHECK_SECONDS[0])


def test_the_process_that_took_a_lock_is_known_by_its_pid(directory):
    lock, other = open_lock(directory, "queue"), open_lock(directory, UUID)
    assert flock_holder(lock) is None
    assert try_flock(lock)

    assert (flock_holder(lock), flock_holder(other)) == (os.getpid(), None)
    os.close(lock)
    os.close(other)


def test_a_watch_names_what_changed_also_elsewhere(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.touch()
    watch = DirectoryWatch(str(here))
    watch.follow([str(elsewhere), str(tmp_path / "gone")])
    assert watch.names() == set()
    (here / "new").write_text("x")
    os.rename(here / "new", here / "moved")
    (here / "moved").read_text()
    assert watch.names() == {"new", "moved"}
    elsewhere.unlink()
    (here / "moved").unlink()
    assert watch.names() == {REPLACED, "moved"}
    watch.close()
    with pytest.raises(OSError, match="No such file"):
        DirectoryWatch(str(tmp_path / "gone"))


def test_processes_are_watched_as_long_as_they_are_asked_for(tmp_path):
    watch = ProcessWatch()
    with subprocess.Popen(["sleep", "600"]) as child:
        assert watch.watch([os.getpid(), child.pid, 2**22 + 1, 2**70]) == {2**22 + 1, 2**70}
        assert len(watch.descriptors) == 2
        assert watch.watch([child.pid]) == set() and len(watch.descriptors) == 1
        child.kill()
        child.wait()
    assert wait_for(watch.descriptors, None) == set(watch.descriptors)
    assert watch.watch([child.pid]) == {child.pid} and watch.descriptors == []
    watch.watch([os.getpid()])
    watch.close()
    assert watch.descriptors == []
