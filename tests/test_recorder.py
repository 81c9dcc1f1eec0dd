"""The thread that writes the usage store: whatever happens to the disk, nobody waits, and nothing counts twice."""

import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chances import luck
from nodes import eventually
from stores import ALICE, FIRST, a_sample, at, fill, held, set_version

from gpuguard.history import recorder as recorder_module
from gpuguard.history import store
from gpuguard.history.queries import query_store
from gpuguard.history.recorder import Recorder
from gpuguard.history.store_schema import NOBODY_KNOWS

LONGEST = 30.0
HOUR = 3600.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(recorder_module, "REOPEN_SECONDS", 0.0)
    monkeypatch.setattr(recorder_module, "SUMS_SHARE", 0)
    monkeypatch.setattr(recorder_module, "WRITE_SECONDS", 0.01)


class Told(list[str]):
    """What an admin was told."""

    def __call__(self, text: str) -> None:
        self.append(text)


@contextmanager
def a_recorder(path: str, say: Told | None = None, *windows: float) -> Iterator[Recorder]:
    recorder = Recorder(path, say if say is not None else Told())
    recorder.windows = frozenset(windows)
    recorder.start()
    recorder.why_unknown(20.0)  # waits until the store was tried
    try:
        yield recorder
    finally:
        recorder.stop(20.0)


def feed(recorder: Recorder, first: int, last: int, **fields: float) -> None:
    """A sample at the begin of each of these slots."""
    for number in range(first, last):
        recorder.record(a_sample(at(number), **fields), LONGEST)


def claimed(path: str, now: int) -> float:
    return query_store(path, lambda usage: usage.gpu_seconds({HOUR}), at(now)).get(ALICE, {}).get(HOUR, 0.0)


def test_what_was_sampled_is_written_slot_by_slot_and_the_rest_at_the_end(path):
    with a_recorder(path) as recorder:
        feed(recorder, 0, 10)
        recorder.record(a_sample(at(9) + 4.0), LONGEST)
        assert eventually(lambda: held(path, at(10))[10] == (9, 90, 90))

    assert held(path, at(10)) == {10: (10, 94, 94), 60: (2, 94, 94), 900: (1, 94, 94)}


def test_spent_tells_what_is_written_and_what_waits_to_be(path):
    fill(path, range(FIRST, FIRST + 5))
    with a_recorder(path, None, HOUR, 60.0) as recorder:
        assert recorder.spent() == {}
        feed(recorder, 5, 6)
        recorder.record(a_sample(at(5) + 3.0), LONGEST)

        assert eventually(lambda: recorder.spent() == {ALICE: {HOUR: 53.0, 60.0: 53.0}}), recorder.spent()
        feed(recorder, 6, 20)
        assert eventually(lambda: recorder.spent() == {ALICE: {HOUR: 190.0, 60.0: 60.0}}), recorder.spent()
        recorder.windows = frozenset({60.0})
        feed(recorder, 20, 21)
        assert eventually(lambda: recorder.spent() == {ALICE: {60.0: 60.0}}), recorder.spent()
    assert recorder.spent() == {}


def test_the_sampling_thread_does_not_wait_for_a_disk_that_hangs_and_nothing_is_lost(path, monkeypatch):
    real, disk, reached, written = store.write, threading.Event(), threading.Event(), []

    def hangs(*about):
        reached.set()
        assert disk.wait(60.0)
        written.append(about)
        return real(*about)

    monkeypatch.setattr(store, "write", hangs)
    with a_recorder(path) as recorder:
        feed(recorder, 0, 10)
        assert reached.wait(60.0)
        feed(recorder, 10, 60)
        assert not written
        disk.set()

    assert claimed(path, 60) == 590


@pytest.mark.parametrize("fault", [sqlite3.OperationalError("disk I/O error"), MemoryError()], ids=repr)
def test_what_is_added_to_a_slot_whose_writing_fails_counts_once(path, monkeypatch, fault):
    """As after a clock that was set back.  Where memory was short the writer ended, and nothing was recorded again."""
    real, failing = store.write, [True]

    def fails(connection, slots, devices):
        if failing and failing.pop():
            recorder.record(a_sample(at(1) + 2.0, clock=at(6) + 2.0), LONGEST)
            raise fault
        return real(connection, slots, devices)

    monkeypatch.setattr(store, "write", fails)
    with a_recorder(path) as recorder:
        for number in range(7):
            recorder.record(a_sample(at(number), clock=at(number)), LONGEST)
        assert eventually(lambda: not failing and recorder.trouble is None)

    assert claimed(path, 60) == 62


def test_a_store_that_another_daemon_writes_is_told_once_and_nothing_is_lost(path):
    said = Told()
    os.makedirs(os.path.dirname(path))
    other = store.lock(path)
    with a_recorder(path, said, HOUR) as recorder:
        feed(recorder, 0, 30)
        assert "another daemon writes it" in (recorder.why_unknown(5.0) or "")
        assert (len(said), recorder.spent()) == (1, {})
        os.close(other)
        feed(recorder, 30, 40)
        assert eventually(lambda: recorder.trouble is None and claimed(path, 60) >= 380)

    assert [text for text in said if "written again" in text] == said[1:]
    assert claimed(path, 60) == 390


def test_a_disk_that_stays_full_takes_two_hours_of_memory_and_no_more(path, monkeypatch):
    monkeypatch.setattr(recorder_module, "PENDING", 20)
    said = Told()
    os.makedirs(os.path.dirname(path))
    other = store.lock(path)
    with a_recorder(path, said) as recorder:
        feed(recorder, 0, 100)
        assert eventually(lambda: len(recorder._sums.slots) <= 21)
        os.close(other)
        feed(recorder, 100, 101)

    assert claimed(path, 101) in (200, 210)
    assert len(said) == 2


DAMAGES = {
    "short": lambda whole: whole[:30_000],
    "torn": lambda whole: whole[:20_000] + bytes(12_288) + whole[32_288:],
    "noise": lambda whole: whole[:8_192] + luck(3).randbytes(20_000) + whole[28_192:],
    "text": lambda whole: b"not a database" * 500,
    "head alone": lambda whole: b"SQLite format 3\0" + bytes(5000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_store_is_renamed_and_a_new_one_begun(path, damage):
    said = Told()
    fill(path, range(FIRST, FIRST + 400), together=100)
    content = damage(Path(path).read_bytes())
    Path(path).write_bytes(content)
    with a_recorder(path, said) as recorder:
        feed(recorder, 400, 410)

    assert set_aside(path, "damaged") == content
    (told,) = said
    assert "is damaged (" in told and "a new one is begun" in told
    assert claimed(path, 410) == 90


def set_aside(path: str, why: str) -> bytes:
    """What is in the one file that was renamed."""
    (aside,) = Path(path).parent.glob(f"*.{why}-*")
    return aside.read_bytes()


def test_a_store_of_an_earlier_version_is_set_aside_whole_and_a_new_one_begun(path):
    fill(path, range(FIRST, FIRST + 10))
    set_version(path, 1)
    before, said = Path(path).read_bytes(), Told()
    with a_recorder(path, said) as recorder:
        feed(recorder, 100, 110)

    assert set_aside(path, "old") == before
    (told,) = said
    assert "is of an earlier gpuguard (version 1 of its tables" in told and "damaged" not in told
    assert claimed(path, 110) == 90


def test_time_in_the_queue_is_written_down_and_that_of_which_nothing_is_known_too(path):
    with a_recorder(path) as recorder:
        for number, wanted in enumerate(({}, {ALICE: 4}, {ALICE: 2, 7: 1}, None)):
            recorder.record(a_sample(at(number)), LONGEST, wanted)

    found = query_store(path, lambda usage: usage.waiting(at(0), at(4)), at(4))
    assert list(found.items()) == [(ALICE, (20, 60)), (7, (10, 10)), (NOBODY_KNOWS, (10, 0))]


def test_a_store_that_is_damaged_again_and_again_is_not_renamed_for_ever(path, monkeypatch):
    said = Told()

    def spoiled(path: str, *, check: bool) -> None:
        Path(path).write_bytes(b"")
        raise store.sqlite3.DatabaseError("malformed")

    monkeypatch.setattr(store, "opened", spoiled)
    with a_recorder(path, said) as recorder:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        feed(recorder, 0, 30)
        assert recorder.spent() == {}

    assert len([name for name in os.listdir(os.path.dirname(path)) if "damaged" in name]) == 2
    assert "nothing is recorded any more" in said[-1]
    assert len(said) <= 3


def test_where_the_file_system_cannot_lock_no_try_leaves_a_descriptor_open(path, monkeypatch):
    """As on NFS without its lock daemon: each ten seconds one more, until the guard could open nothing."""

    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks available") as raised:
        store.lock(path)

    assert raised.value.filename == path
    assert os.listdir("/proc/self/fd") == before
