"""The usage store when something goes wrong: a writer dies, a file is damaged, a reader comes at the wrong moment."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chances import THE_SAME, luck
from nodes import eventually
from stores import ALICE, FIRST, a_fork, a_sample, a_slot, at, fill, held, written

from gpuguard.errors import GpuguardError
from gpuguard.history import queries, store
from gpuguard.history.queries import METRICS, Usage, query_store
from gpuguard.history.report import usage_report
from gpuguard.history.schema import SLOTS, WIDTH
from gpuguard.views import report as texts
from gpuguard.views.report import to_html

KILLS = 50


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


def write_on(path: str, first: int, written: Any, pause: float) -> None:
    """Write slots until killed; *written* counts them."""
    connection = store.opened(path, check=False)
    for number in itertools.count(first):
        store.write(connection, {number: a_slot()}, a_sample(0.0).devices)
        written.value = number + 1 - first
        store.move_journal(connection)
        time.sleep(pause)


def shared_number() -> ctypes.c_long:
    """Of this process and its forks.  That of multiprocessing has a directory, which only an orderly end takes away."""
    return ctypes.c_long.from_buffer(mmap.mmap(-1, ctypes.sizeof(ctypes.c_long)))


def killed(path: str, first: int, after: float) -> int:
    """How many slots a writer had written when it was killed, *after* seconds behind its first one."""
    written = shared_number()
    with a_fork(write_on, path, first, written, 0.0) as child:
        assert eventually(lambda: written.value > 0)
        time.sleep(after)
        child.kill()
        child.join()
        return int(written.value)


def test_a_writer_that_is_killed_at_any_moment_loses_at_most_its_last_slot(path):
    chance, done, unfinished = luck(7), 0, 0
    for _ in range(KILLS):
        told = killed(path, FIRST + done, chance.uniform(0, 0.02))
        unfinished += os.path.exists(f"{path}-wal") and os.stat(f"{path}-wal").st_size > 0
        found = held(path, at(done + told + 1))
        slots = round(found[900][1] / 10)

        assert slots - done in (told, told + 1)
        assert {width: (seen, claimed) for width, (_, seen, claimed) in found.items()} == {
            width: (10.0 * min(slots, kept),) * 2 for width, kept in SLOTS.items()
        }
        done = slots
    store.opened(path, check=True).close()
    assert unfinished, "no kill came between a write and the end of it"


def test_readers_see_whole_writes_while_the_daemon_writes(path):
    written = shared_number()
    with a_fork(write_on, path, FIRST, written, 0.02):
        assert eventually(lambda: written.value > 0)
        for _ in range(50):
            before = written.value
            found = held(path, at(100_000))

            assert len({found[width][1] for width in (60, 900)}) == 1
            assert found[900][1] >= 10.0 * (before - 1)


def test_a_file_that_is_being_written_all_the_time_is_an_error_and_no_guess(path, monkeypatch):
    fill(path, [FIRST])
    count = itertools.count()
    monkeypatch.setattr(queries, "_versions", lambda path: ((next(count),), None))
    monkeypatch.setattr(queries, "READ_PAUSE", 0.0)
    with pytest.raises(GpuguardError, match="being written all the time"):
        query_store(path, lambda usage: usage.gpu_seconds({10.0}))


def test_uids_without_a_name_take_no_room_of_users_with_one(path, monkeypatch):
    # Of 65536 uids in a user namespace each may have a ticket, and a claim.
    monkeypatch.setattr(store, "MOST_NUMBERS", 600)
    monkeypatch.setattr(store, "user_name", lambda uid: "alice" if uid == ALICE else str(uid), raising=False)
    uuid = a_sample(0.0).devices[0].uuid
    for number in range(5):
        slot = a_slot(uid=ALICE)
        crowd = range(100_000 + 1000 * number, 101_000 + 1000 * number)
        slot.waiting |= dict.fromkeys([ALICE, *crowd], (10_000.0, 10.0))
        slot.users |= dict.fromkeys([(uid, uuid) for uid in crowd], slot.users[ALICE, uuid])
        written(path, {FIRST + number: slot}, a_sample(0.0).devices)

    totals = query_store(path, lambda usage: usage.totals("uid", at(0), at(5)), at(5))
    waiting = query_store(path, lambda usage: usage.waiting(at(0), at(5)), at(5))
    assert (totals[ALICE]["claimed"], waiting[ALICE][0]) == (50.0, 50.0)
    assert len(totals) + len(waiting) <= 300 + 2


def test_the_uids_of_one_slot_are_bounded_and_users_with_a_name_are_among_them(path, monkeypatch):
    monkeypatch.setattr(store, "user_name", lambda uid: "alice" if uid == ALICE else str(uid), raising=False)
    slot = a_slot(uid=99)
    slot.waiting |= dict.fromkeys([*range(100_000, 110_000), ALICE], (10_000.0, 10.0))
    written(path, {FIRST: slot}, a_sample(0.0).devices)
    waiting = query_store(path, lambda usage: usage.waiting(at(0), at(1)), at(1))
    assert len(waiting) <= store.MOST_NAMELESS + 1
    assert ALICE in waiting
    assert list(query_store(path, lambda usage: usage.totals("uid", at(0), at(1)), at(1))) == [99]


VALUES = (
    None, "", "abc", "17", b"\xed\xa0\x80", b"", b"\xff\x00", -1, 0, 1.5, 1e300, float("inf"),
    -float("inf"), 2**31, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
SOME = (None, "abc", b"\xff\x00", -1, float("inf"), 2**63 - 1)  # which differ most
NOW = float(int(time.time() / 900) * 900)


@pytest.fixture(scope="module")
def loose_store(tmp_path_factory) -> str:
    """A store of which every table takes everything, with one hour in it."""
    place = str(tmp_path_factory.mktemp("store") / "usage.db")
    first = int(NOW / WIDTH) - 6
    fill(place, range(first, first + 6))
    connection = sqlite3.connect(place)
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (name,) in tables:
        columns = [column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})")]
        loose = ", ".join(f"{column} INTEGER PRIMARY KEY" if column in ("id", "key") else column for column in columns)
        connection.execute(f"ALTER TABLE {name} RENAME TO old")
        connection.execute(f"CREATE TABLE {name} ({loose})")
        connection.execute(f"INSERT INTO {name} SELECT * FROM old")
        connection.execute("DROP TABLE old")
    assert tables
    connection.commit()
    connection.close()
    return place


def everything(usage: Usage):
    """Whatever is asked of a store."""
    begin = NOW - 3600
    usage.gpu_seconds((3600.0,))
    usage.decayed(3600.0)
    usage.known()
    return [usage_report(usage, by, begin, NOW, str, lambda uid: ("g",), METRICS) for by in ("user", "group", "device")]


def read(loose_store: str) -> str | None:
    """What is said of it; None: it was answered."""
    try:
        reports = query_store(loose_store, everything, NOW)
    except GpuguardError as error:
        return str(error)
    for report in reports:
        texts.to_json(report, None, "node7")
        list(texts.to_csv(report, None))
        list(texts.to_text(report, None, width=80, paint=lambda text, _: text))
        to_html(report, None, "node7", NOW)
    return None


def columns(loose_store: str) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(loose_store)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [(table, row[1]) for table in tables for row in connection.execute(f"PRAGMA table_info({table})")]


def changed(loose_store: str, copy: Path, table: str, column: str, value: object) -> bool:
    """A copy of the store with another value in one place; False: SQLite does not take it."""
    copy.write_bytes(Path(loose_store).read_bytes())
    with closing(sqlite3.connect(copy)) as connection:
        first = f"(SELECT MIN(rowid) FROM {table})"
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = {first}", (value,))
        except sqlite3.Error:
            return False  # a key is a number
        connection.commit()
    return True


def test_a_sound_store_is_answered(loose_store):
    assert read(loose_store) is None


def test_whatever_a_column_holds_is_told_or_answered(loose_store, tmp_path):
    copy, told = tmp_path / "usage.db", 0
    for table, column in columns(loose_store):
        for value in SOME if THE_SAME else VALUES:
            if changed(loose_store, copy, table, column, value) and (said := read(str(copy))):
                assert "it is damaged" in said or "integer overflow" in said, said
                assert "move away while no daemon runs" in said
                told += 1

    assert told > 30


def test_what_is_in_a_sum_is_in_no_quota_without_an_end(loose_store, tmp_path):
    copy = tmp_path / "usage.db"
    assert changed(loose_store, copy, "users_10s", "used_ticks", float("inf"))

    with pytest.raises(GpuguardError, match="damaged"):
        query_store(str(copy), lambda usage: usage.gpu_seconds((3600.0,)), NOW)
