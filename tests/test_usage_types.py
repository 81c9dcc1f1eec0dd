"""A usage store whose columns hold other things than gpuguard writes: it is said to be damaged, and nothing else.

Every column of every table, with each other value that SQLite knows; read by everything that asks the store.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest
from chances import THE_SAME
from stores import fill

from gpuguard.errors import GpuguardError
from gpuguard.history.queries import METRICS, Usage, query_store
from gpuguard.history.report import gathered
from gpuguard.history.schema import WIDTH
from gpuguard.views import report as texts
from gpuguard.views.report_page import to_html

VALUES = (
    None, "", "abc", "17", b"\xed\xa0\x80", b"", b"\xff\x00", -1, 0, 1.5, 1e300, float("inf"),
    -float("inf"), 2**31, 2**53 + 1, -(2**53) - 1, 2**62, 2**63 - 1, -(2**63),
)  # fmt: skip
SOME = (None, "abc", b"\xff\x00", -1, float("inf"), 2**63 - 1)  # which differ most
NOW = float(int(time.time() / 900) * 900)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A store of which every table takes everything, with one hour in it."""
    place = str(tmp_path_factory.mktemp("store") / "usage.db")
    first = int(NOW / WIDTH) - 6
    fill(place, range(first, first + 6))
    connection = sqlite3.connect(place)
    for name, made in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall():
        columns = [column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})")]
        loose = ", ".join(f"{column} INTEGER PRIMARY KEY" if column in ("id", "key") else column for column in columns)
        connection.execute(f"ALTER TABLE {name} RENAME TO old")
        connection.execute(f"CREATE TABLE {name} ({loose})")
        connection.execute(f"INSERT INTO {name} SELECT * FROM old")
        connection.execute("DROP TABLE old")
        assert made
    connection.commit()
    connection.close()
    return place


def everything(usage: Usage):
    """Whatever is asked of a store."""
    begin = NOW - 3600
    usage.gpu_seconds((3600.0,))
    usage.decayed(3600.0)
    usage.known()
    for by in ("user", "device", "user and device", "group"):
        usage.totals(by, begin, NOW, {1001: ("g",)})
    return [gathered(usage, by, begin, NOW, str, lambda uid: ("g",), METRICS) for by in ("user", "group", "device")]


def read(path: str) -> str | None:
    """What is said of it; None: it was answered."""
    try:
        reports = query_store(path, everything, NOW)
    except GpuguardError as error:
        return str(error)
    for report in reports:
        texts.to_json(report, None, "node7")
        list(texts.to_csv(report, None))
        list(texts.to_text(report, None, width=80, paint=lambda text, _: text))
        to_html(report, None, "node7", NOW)
    return None


def columns(path: str) -> list[tuple[str, str]]:
    connection = sqlite3.connect(path)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = [(table, row[1]) for table in tables for row in connection.execute(f"PRAGMA table_info({table})")]
    connection.close()
    return found


def changed(path: str, copy: Path, table: str, column: str, value: object) -> bool:
    """A copy of the store with another value in one place; False: SQLite does not take it."""
    copy.write_bytes(Path(path).read_bytes())
    connection = sqlite3.connect(copy)
    try:
        first = f"(SELECT MIN(rowid) FROM {table})"
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = {first}", (value,))
        connection.commit()
    except sqlite3.Error:
        return False  # a key is a number
    finally:
        connection.close()
    return True


def test_a_sound_store_is_answered(path):
    assert read(path) is None


def test_whatever_a_column_holds_is_told_or_answered(path, tmp_path):
    copy, told = tmp_path / "usage.db", 0
    for table, column in columns(path):
        for value in SOME if THE_SAME else VALUES:
            if changed(path, copy, table, column, value) and (said := read(str(copy))):
                assert "it is damaged" in said or "integer overflow" in said, said
                assert "move away while no daemon runs" in said
                told += 1

    assert told > 30


def test_what_is_in_a_sum_is_in_no_quota_without_an_end(path, tmp_path):
    copy = tmp_path / "usage.db"
    assert changed(path, copy, "users_10s", "used_ticks", float("inf"))

    with pytest.raises(GpuguardError, match="damaged"):
        query_store(str(copy), lambda usage: usage.gpu_seconds((3600.0,)), NOW)
