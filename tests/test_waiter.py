"""One who waits in line: when he wakes, leads, looks for himself and tells; with real tickets, bells and locks."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from builders import a_device
from lines import a_ticket

from gpuguard.claims.lockfiles import LockDirectory, lock_directory, open_lock, try_flock
from gpuguard.line import waiting
from gpuguard.line.tickets import Held, read_tickets, ring, ticket_content
from gpuguard.line.waiting import Waiter

UNIX = 1_700_000_000.0


def no_look(closely):
    raise AssertionError("the leader of these tests looks by itself")


class Leads:
    """Whoever leads; says what the test wants."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.until, self.descriptors, self.closed = scene, 1e9, [98, 99], False

    def look(self, own: str) -> bool:
        self.scene.looks.append(own)
        self.until = 1e9
        return self.scene.turns.pop(0) if self.scene.turns else False

    def must_look(self, ready: set[int]) -> bool:
        return bool(ready & {98}) or self.scene.now >= self.until

    def close(self) -> None:
        self.closed = True


class Scene:
    """A machine where time passes only while somebody naps, and what happens in each nap."""

    def __init__(self, directory: LockDirectory, patch: pytest.MonkeyPatch) -> None:
        self.directory, self.patch, self.now = directory, patch, 1000.0
        self.naps, self.heard_by, self.slept, self.told = list[float](), list[set[int]](), list[float](), list[float]()
        self.looks, self.turns, self.happens = list[str](), list[bool](), []
        patch.setattr(waiting.time, "monotonic", lambda: self.now)
        patch.setattr(waiting.time, "time", lambda: UNIX + self.now)
        patch.setattr(waiting.time, "sleep", self.slept.append)
        patch.setattr(waiting, "wait_for", self.nap)
        patch.setattr(waiting, "Leader", self.lead)
        patch.setattr(waiting.os, "isatty", lambda descriptor: False)
        self.waiter = Waiter(directory, [a_device(0).uuid], a_ticket(os.geteuid()), no_look)

    def lead(self, directory: LockDirectory, uuids, look) -> Leads:
        self.leads = Leads(self)
        return self.leads

    def nap(self, descriptors, seconds: float) -> set[int]:
        assert len(self.naps) < 100, "it does not come back"
        self.naps.append(round(seconds, 6))
        self.heard_by.append(set(descriptors))
        self.now += seconds
        happens = self.happens.pop(0) if self.happens else None
        return set(happens() or ()) if happens else set()

    def rings(self, sound: bytes):
        """It rings at him."""

        def happen() -> set[int]:
            ring(self.directory, [self.waiter.ticket], sound)
            return {self.waiter._held.bell}

        return happen

    def sleep(self, seconds: float | None = None, every: float | None = None) -> None:
        self.waiter.sleep(seconds, lambda: self.told.append(self.now - 1000), every)


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    return lock_directory(str(tmp_path))


@pytest.fixture
def scene(directory, monkeypatch):
    scene = Scene(directory, monkeypatch)
    yield scene
    scene.waiter.leave()


@pytest.fixture
def other(directory):
    """Somebody else who waits in another place."""
    held = Held(directory, ticket_content(a_ticket()))
    yield held
    held.leave()


@pytest.fixture
def led(directory):
    """Somebody else leads; his end frees the lock."""
    lock = open_lock(directory, "queue")
    assert try_flock(lock)
    yield lock
    os.close(lock)


def ended(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)


# Leading.


def test_whoever_comes_first_leads_looks_and_starts_if_it_is_his_turn(scene, other):
    scene.turns = [True]
    scene.sleep()

    assert (scene.looks, scene.naps) == ([scene.waiter.ticket.id], [])
    assert other.hush() == b"l"  # the others must hear of his end from now on
    assert scene.waiter._held.hush() == b""


def test_whoever_leads_looks_again_only_when_something_has_happened(scene):
    scene.happens = [lambda: {99}, lambda: {98}, None]
    scene.turns = [False, True]
    scene.sleep()

    assert (len(scene.looks), len(scene.naps)) == (2, 2)
    assert scene.heard_by == [{scene.waiter._held.bell, 98, 99}] * 2


def test_whoever_leads_sleeps_until_he_must_look_tell_or_end(scene):
    scene.waiter._takes_the_lead()
    scene.sleep(20.0, every=5.0)

    assert scene.naps == [5.0, 5.0, 5.0, 5.0]
    scene.naps.clear()
    scene.happens = [lambda: setattr(scene.leads, "until", scene.now + 3)]
    scene.sleep(12.0, every=5.0)
    assert scene.naps == [5.0, 3.0, 4.0]


def test_whoever_takes_the_lead_gives_a_sign_of_life_before_he_looks(scene):
    bell, signs = scene.waiter._held._bell, []
    scene.waiter._takes_the_lead()
    scene.patch.setattr(scene.leads, "look", lambda own: signs.append(os.stat(bell).st_mtime) or True)
    os.utime(bell, (1.0, 1.0))
    scene.sleep()

    assert signs[0] > 2.0


@pytest.mark.parametrize(("terminal", "naps"), [(True, [1.0, 1.0, 0.5]), (False, [2.5])])
def test_whoever_sits_at_a_terminal_hears_of_it_every_second(scene, led, terminal, naps):
    scene.patch.setattr(waiting.os, "isatty", lambda descriptor: terminal and descriptor == 2)
    scene.sleep(2.5)

    assert (scene.naps, len(scene.told)) == (naps, len(naps))


# Following.


def test_whoever_is_rung_because_it_is_his_turn_comes_back_and_does_not_look(scene, led):
    scene.happens = [None, scene.rings(b".")]
    scene.sleep(every=5.0)

    assert (len(scene.naps), scene.looks) == (2, [])


def test_whoever_hears_that_the_leader_has_ended_leads(scene, led):
    scene.happens = [lambda: ended(led), scene.rings(b"l")]
    scene.turns = [True]
    scene.sleep(every=5.0)

    assert (len(scene.naps), len(scene.looks)) == (2, 1)


def test_a_follower_hears_the_end_of_the_leaders_process(scene, led, sleeper):
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: sleeper)
    scene.happens = [lambda: ended(led) or scene.waiter._leader.descriptors]
    scene.turns = [True]
    scene.sleep(every=5.0)

    assert (len(scene.naps), len(scene.looks)) == (1, 1)
    assert len(scene.heard_by[0]) == 2
    assert scene.waiter._leader.descriptors == []


def test_only_one_of_two_leads(scene, led):
    assert scene.waiter._takes_the_lead() is False
    ended(led)
    assert scene.waiter._takes_the_lead() is True
    assert scene.waiter._takes_the_lead() is False


def test_a_leader_who_ends_before_it_is_known_who_he_is_is_followed_at_once(scene, led):
    """Killed between the two looks at his lock, he was waited for half a minute with the devices free."""
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: ended(led))

    assert scene.waiter._takes_the_lead() is True


def test_a_leader_whose_process_has_ended_by_then_is_followed_at_once(scene, led):
    with subprocess.Popen(["true"]) as gone:
        pass
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: ended(led) or gone.pid)

    assert scene.waiter._takes_the_lead() is True


def test_while_a_leader_of_whom_nothing_is_known_holds_the_lock_nobody_else_leads(scene, led):
    """He is in another pid namespace, say."""
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: None)

    assert scene.waiter._takes_the_lead() is False


# Looking for oneself.


def test_every_half_minute_a_follower_of_whom_nobody_knows_comes_back_to_look(scene, led):
    scene.sleep()

    assert scene.naps == [30.0]


def test_he_looks_for_himself_every_half_minute_however_often_he_is_told(scene, led):
    asked: list[float] = []
    scene.patch.setattr(scene.waiter, "_is_alone", lambda: asked.append(scene.now - 1000) or len(asked) == 3)
    scene.sleep(every=10.0)

    assert asked == [30.0, 60.0, 90.0]


def test_a_follower_who_heard_nothing_of_the_leaders_end_leads_after_half_a_minute(scene, led):
    scene.patch.setattr(scene.waiter, "_is_alone", lambda: False)
    scene.happens = [lambda: ended(led)]
    scene.turns = [True]
    scene.sleep()

    assert (scene.naps, len(scene.looks)) == ([30.0], 1)


def test_a_leader_who_gives_signs_of_life_is_trusted_for_a_minute_and_a_half(scene, led, other):
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: os.getpid())
    scene.patch.setattr(waiting, "read_tickets", lambda directory: ([a_ticket(id=other.id, pid=os.getpid())], []))
    scene.patch.setattr(waiting, "listens", lambda directory, ticket: ticket.id == other.id)
    scene.patch.setattr(waiting, "last_sign", lambda directory, ticket: UNIX + 1000.0)
    scene.sleep()

    assert scene.naps == [30.0, 30.0, 30.0]


def test_a_leader_who_does_not_listen_is_not_trusted(scene, led):
    scene.patch.setattr(waiting, "flock_holder", lambda descriptor: os.getpid())
    scene.patch.setattr(waiting, "read_tickets", lambda directory: ([a_ticket(id="gone", pid=os.getpid())], []))
    scene.patch.setattr(waiting, "last_sign", lambda directory, ticket: UNIX + 2000.0)
    scene.sleep()

    assert scene.naps == [30.0]


def test_whoever_leads_looks_for_nobody_and_gives_a_sign_of_life(scene):
    scene.waiter._takes_the_lead()
    bell, signs = scene.waiter._held._bell, []
    scene.happens = [lambda: os.utime(bell, (1.0, 1.0)), lambda: signs.append(os.stat(bell).st_mtime) or {98}]
    scene.turns = [False, True]
    scene.sleep()

    assert scene.naps == [30.0] * 2
    assert signs[0] > 2.0


def test_whose_ticket_was_cleaned_away_takes_a_new_place_and_looks(scene, led):
    before, old = scene.waiter.ticket.id, scene.waiter._held
    scene.happens = [lambda: os.unlink(scene.waiter._held._ticket)]
    scene.sleep()

    assert scene.naps == [30.0]
    assert scene.waiter.ticket.id == scene.waiter._held.id != before
    assert scene.waiter._held.counts and old.bell == -1


# Called for nothing.


def test_whoever_is_called_for_nothing_again_and_again_takes_his_time(scene, led):
    def calls(until: float | None = None) -> None:
        scene.waiter._is_woken(until)

    for _ in range(20):
        calls()
    assert scene.slept == []
    calls()
    calls(scene.now + 0.5)
    calls(scene.now - 1)
    assert scene.slept == [2.0, 0.5, 0.0]


def test_every_two_seconds_without_a_call_are_good_for_one_and_twenty_at_most(scene, led):
    for _ in range(20):
        scene.waiter._is_woken(None)
    scene.now += 4
    for _ in range(2):
        scene.waiter._is_woken(None)
    assert scene.slept == []
    scene.waiter._is_woken(None)
    assert scene.slept == [2.0]

    scene.now += 1000
    for _ in range(20):
        scene.waiter._is_woken(None)
    assert scene.slept == [2.0]


def test_a_call_counts_whether_it_comes_by_the_bell_or_by_ones_own_look(scene, led):
    scene.happens = [scene.rings(b".")]
    scene.sleep()
    assert scene.waiter._wakes == 19
    ended(led)
    scene.turns = [True]
    scene.sleep()
    assert scene.waiter._wakes == 18


# Leaving.


def test_whoever_leaves_while_he_leads_tells_the_three_who_came_last_and_listen(directory, monkeypatch, scene):
    places = [Held(directory, ticket_content(a_ticket())) for _ in range(5)]
    tickets = [a_ticket(os.geteuid(), id=place.id, since=float(number)) for number, place in enumerate(places)]
    scene.waiter._takes_the_lead()
    [place.hush() for place in places]
    monkeypatch.setattr(waiting, "read_tickets", lambda directory: (tickets, []))
    monkeypatch.setattr(waiting, "listens", lambda directory, ticket: ticket is not tickets[3])

    scene.waiter.leave()
    scene.waiter.leave()

    assert [place.hush() for place in places] == [b"", b"l", b"l", b"", b"l"]
    queue = open_lock(directory, "queue")
    assert scene.leads.closed and try_flock(queue)
    os.close(queue)
    for place in places:
        place.leave()


def test_whoever_leaves_leaves_no_ticket_and_nothing_open(directory, monkeypatch, led, sleeper):
    monkeypatch.setattr(waiting, "flock_holder", lambda descriptor: sleeper)
    before = len(os.listdir("/proc/self/fd"))
    waiter = Waiter(directory, [], a_ticket(os.geteuid()), no_look)
    waiter._takes_the_lead()
    assert waiter._leader.descriptors
    waiter.leave()

    assert (read_tickets(directory), len(os.listdir("/proc/self/fd"))) == (([], []), before)


def test_a_follower_who_leaves_tells_nobody(scene, led, other):
    scene.waiter.leave()

    assert other.hush() == b""


def test_without_a_ticket_the_lock_of_the_line_is_not_kept_open(directory, monkeypatch):
    def fail(*of: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(waiting, "Held", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        Waiter(directory, [], a_ticket(), no_look)

    assert len(os.listdir("/proc/self/fd")) == before
