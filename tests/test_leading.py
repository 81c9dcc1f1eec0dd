"""Whoever leads the line: when he looks, how closely, at whom he rings, and how long he sleeps in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from lines import a_ticket

from gpuguard.claims.lockfiles import LockDirectory, lock_directory, open_lock, try_flock
from gpuguard.line import leading
from gpuguard.line.leading import Leader
from gpuguard.line.plan import Place
from gpuguard.line.standing import Facts, Standing
from gpuguard.request import Request, idle_limit

UNIX = 1_700_000_000.0
IDLE = a_device(0, memory_used=0)


class Led:
    """A line that is led, on a machine where time passes only when the test says so."""

    def __init__(self, directory: LockDirectory, patch: pytest.MonkeyPatch) -> None:
        self.now, self.slept, self.cost = 1000.0, list[float](), 0.0
        self.rung, self.looks, self.listening = list[list[str]](), list[bool](), set[str]()
        self.directory = directory
        patch.setattr(leading.time, "monotonic", lambda: self.now)
        patch.setattr(leading.time, "sleep", self.slept.append)
        patch.setattr(leading, "ring", self.ring)
        patch.setattr(leading, "listens", lambda directory, ticket: ticket.id in self.listening)
        self.line = self.standing()
        self.leader = Leader(directory, [IDLE.uuid], self.look_at_all)

    def ring(self, directory: LockDirectory, tickets: list, sound: bytes) -> None:
        assert sound == b"."
        self.rung.append([ticket.id for ticket in tickets])

    def look_at_all(self, closely: bool) -> Standing:
        self.looks.append(closely)
        self.now += self.cost
        return self.line

    def standing(self, *places: Place, devices=(IDLE,), deaf=frozenset(), **fields) -> Standing:
        given = places or (a_place("somebody"),)
        self.line = Standing(given, (), a_snapshot(*devices), Facts(**fields), UNIX, deaf)
        return self.line

    def look(self, own: str = "own") -> float:
        """Seconds that the leader sleeps after a look."""
        self.leader.look(own)
        return round(self.leader.until - self.now, 6)


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    led = Led(lock_directory(str(tmp_path)), monkeypatch)
    yield led
    led.leader.close()


@pytest.fixture
def unwatched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(path: str) -> None:
        raise OSError("no inotify left")

    monkeypatch.setattr(leading, "DirectoryWatch", refused)
    led = Led(lock_directory(str(tmp_path)), monkeypatch)
    yield led
    led.leader.close()


def a_place(name: str, now: bool = False, way: Request | None = None, after: str | None = None) -> Place:
    request = way or Request()
    return Place(a_ticket(id=name, ways=(request,), after=after), 1, None, None, now, request)


def hopeless(name: str, after: str | None = None) -> Place:
    return Place(a_ticket(id=name, after=after), 1, None, None)


# At whom he rings.


def test_he_rings_at_whoever_may_start_or_never_can_but_not_at_himself(led):
    led.standing(
        a_place("now", now=True), a_place("later"), a_place("own", now=True),
        hopeless("never"), hopeless("behind another", after="x"),
    )  # fmt: skip

    assert led.leader.look("own") is True
    assert led.rung == [["now", "never"]]
    assert led.leader.look("later") is False


def test_nobody_is_rung_again_within_half_a_second_and_whoever_does_not_come_is(led):
    led.standing(a_place("now", now=True))
    for _ in range(5):
        led.leader.look("own")
        led.now += 0.25

    assert led.rung == [["now"], [], [], ["now"], []]


def test_the_longer_the_same_ones_do_not_come_the_later_he_tells_them_again(led):
    led.standing(a_place("now", now=True))
    pauses = []
    for _ in range(7):
        pauses.append(led.look())
        led.now += pauses[-1] + 0.1

    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    led.standing(a_place("another", now=True))
    assert led.look() == 0.5


# How closely he looks.


def test_every_five_minutes_he_looks_at_the_health_of_the_devices(led):
    for seconds in (0, 299, 1, 1, 299):
        led.now += seconds
        led.leader.look("own")

    assert led.looks == [False, False, True, False, True]


@pytest.mark.parametrize(("listens", "closely"), [(True, True), (False, False)])
def test_where_somebody_who_was_told_listens_and_does_not_come_he_looks_more_closely(led, listens, closely):
    led.standing(a_place("now", now=True))
    led.listening = {"now"} if listens else set()
    for _ in range(3):
        led.leader.look("own")
        led.now += 0.25

    assert led.looks == [False, False, closely]


# How long he sleeps.


def test_as_long_as_the_kernel_tells_of_everything_that_matters_he_sleeps_five_minutes(led):
    led.standing(devices=(a_device(0, processes=(a_process(os.getpid()),), memory_used=10 * GIB),))

    assert led.look() == 300.0


@pytest.mark.parametrize("way", [{"max_util": 10.0}, {"max_temperature": 50.0}, {"share": True, "memory": GIB}])
def test_what_no_kernel_tells_of_is_looked_for_every_ten_seconds(led, way):
    led.standing(a_place("a", way=Request(**way)))

    assert led.look() == 10.0


def test_the_end_of_a_claim_without_a_record_nobody_tells(led):
    led.standing(claims=(a_claim_record(IDLE, since=None),))

    assert led.look() == 10.0


def test_of_more_than_64_strangers_the_others_are_looked_for(led, monkeypatch):
    watched: list[int] = []
    monkeypatch.setattr(leading.Processes, "watch", lambda self, pids: watched.extend(pids) or set())
    for count, seconds in ((64, 300.0), (65, 10.0)):
        led.standing(devices=(a_device(0, processes=tuple(a_process(1000 + n) for n in range(count))),))
        assert led.look() == seconds
    assert len(watched) == 128


def test_a_stranger_whose_end_nobody_tells_is_looked_for_soon_and_then_less_often(led):
    led.standing(devices=(a_device(0, processes=(a_process(2**22 + 1),)),))

    assert [led.look() for _ in range(7)] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]


def test_the_processes_of_a_claim_are_not_waited_for_and_its_device_does_not_settle(led):
    device = a_device(0, processes=(a_process(2**22 + 1),), memory_used=None)
    led.standing(devices=(device,), claims=(a_claim_record(device),))

    assert led.look() == 300.0


LIMIT = idle_limit(IDLE)


@pytest.mark.parametrize(
    ("fields", "settles"),
    [
        ({"processes": None}, True),
        ({"memory_used": None}, True),
        ({"memory_used": LIMIT + 1}, True),
        ({"memory_used": LIMIT}, False),
        ({"memory_used": LIMIT + 1, "processes": (a_process(os.getpid()),)}, False),
    ],
)
def test_a_device_that_is_in_use_by_nobody_is_looked_at_again_soon(led, fields, settles):
    led.standing(devices=(a_device(0, **fields),))

    assert led.look() == (0.25 if settles else 300.0)


@pytest.mark.parametrize(("after", "seconds"), [(5.0, 5.02), (-5.0, 0.02), (900.0, 300.0)])
def test_he_is_awake_when_something_is_over_by_itself(led, after, seconds):
    led.standing(changes_at=UNIX + after)

    assert led.look() == seconds


def test_when_the_driver_did_not_answer_he_asks_again_after_ten_seconds(led):
    led.line = Standing((), (), a_snapshot(IDLE), Facts(), UNIX)

    assert led.look() == 10.0


# What wakes him.


def locked(led: Led) -> int:
    lock = open_lock(led.directory, IDLE.uuid)
    assert try_flock(lock)
    return lock


def test_when_a_claim_ends_he_looks_once_its_lock_is_free(led):
    lock = locked(led)
    led.leader.look("own")
    led.leader._hear({"claim.a.json"})
    assert led.leader.until == led.now
    assert not led.leader.must_look(())
    assert round(led.leader.until - led.now, 6) == 0.02

    os.close(lock)
    led.now += 0.019
    assert not led.leader.must_look(())
    led.now += 0.001
    assert led.leader.must_look(())
    assert led.slept == [0.002]


def test_a_lock_that_stays_is_looked_at_for_two_seconds_and_no_longer(led):
    lock = locked(led)
    led.leader.look("own")
    led.leader._hear({"claim.a.json"})
    moments = []
    while led.leader.until < led.now + 100:
        led.now = led.leader.until
        moments.append(round(led.now - 1000, 6))
        assert not led.leader.must_look(())

    assert moments == [0.0, 0.02, 0.2, 2.0]
    os.close(lock)


@pytest.mark.parametrize("name", ["ticket.a.json", "reserve.a.json", "replaced", ""])
def test_a_ticket_that_comes_or_goes_is_looked_at_soon(led, name):
    led.leader.look("own")
    led.leader._hear({name})

    assert round(led.leader._look_at - led.now, 6) == 0.02


def test_files_that_mean_nothing_wake_nobody(led):
    led.leader.look("own")
    led.leader._hear({"served.1001", "somebody's"})

    assert led.leader.until - led.now == 300.0


def test_tickets_that_come_and_go_take_a_quarter_of_his_time_at_most(led):
    led.cost = 0.1
    led.leader.look("own")
    led.leader._hear({"ticket.a.json"})

    assert round(led.leader.until - led.now, 6) == 0.3


def test_what_settles_is_looked_for_soon_again_after_something_ended(led):
    lock = locked(led)
    led.standing(devices=(a_device(0, memory_used=10 * GIB),))
    assert [led.look(), led.look()] == [0.25, 0.5]
    os.close(lock)
    led.leader._hear({"claim.a.json"})
    assert led.leader.must_look(())

    led.leader.look("own")
    assert led.leader._look_at - led.now == 0.25


def test_the_time_to_look_is_the_time_to_look(led):
    led.leader.look("own")
    led.now += 299
    assert not led.leader.must_look(())
    led.now += 1
    assert led.leader.must_look(())


def test_where_nobody_tells_of_files_he_looks_at_them_every_two_seconds(unwatched):
    led = unwatched
    (Path(led.directory.records) / f"{led.directory.prefix}ticket.1001.b.json").touch()
    assert led.look() == 2.0
    assert led.leader.descriptors == []
    led.now += 2.0
    assert not led.leader.must_look(())
    assert led.leader.until - led.now == 2.0

    (Path(led.directory.records) / f"{led.directory.prefix}ticket.1001.a.json").touch()
    led.now += 2.0
    assert not led.leader.must_look(())
    assert round(led.leader.until - led.now, 6) == 0.02


def test_whoever_does_not_listen_is_asked_every_two_seconds_whether_he_does(led):
    led.standing(a_place("deaf"), deaf=frozenset({"deaf"}))
    assert led.look() == 2.0
    led.now += 2.0
    assert not led.leader.must_look(())
    assert led.leader.until - led.now == 2.0

    led.listening = {"deaf"}
    led.now += 2.0
    assert not led.leader.must_look(())
    assert round(led.leader.until - led.now, 6) == 0.02


def test_the_kernel_tells_of_tickets_and_of_the_files_of_marks(led, tmp_path):
    marks = tmp_path / "denied.json"
    marks.touch()
    led.standing(mark_files=(str(marks),))
    assert led.look() == 300.0
    [watch] = led.leader.descriptors

    ticket = Path(led.directory.records) / f"{led.directory.prefix}ticket.1001.a.json"
    for change in (ticket.touch, marks.unlink):
        change()
        led.leader.must_look(())
        assert round(led.leader.until - led.now, 6) == 300.0
        led.leader.must_look({watch})
        assert round(led.leader.until - led.now, 6) == 0.02
        assert led.look() == 300.0


def test_whoever_leads_no_longer_holds_nothing_open(led, sleeper):
    led.standing(devices=(a_device(0, processes=(a_process(sleeper),)),))
    before = len(os.listdir("/proc/self/fd"))
    again = Leader(led.directory, [IDLE.uuid], led.look_at_all)
    again.look("own")
    assert len(again.descriptors) == 2
    again.close()

    assert len(os.listdir("/proc/self/fd")) == before
