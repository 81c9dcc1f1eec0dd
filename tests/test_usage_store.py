"""The file of the usage store: what is written is read, by everybody, whatever happens to the one who writes."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_uuid
from stores import ALICE, FIRST, FORK, a_fork, a_slot, at, fill, held

from gpuguard.claims.directory import ADMIN_DIRECTORY, LockDirectory
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import queries, store
from gpuguard.history import queries as usage
from gpuguard.history.queries import query_store, store_path
from gpuguard.history.schema import DEVICE_COLUMNS, SLOTS, Slot

OPEN = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0.1).execute('SELECT * FROM devices').fetchall()"
ASK = """
import sys
from gpuguard.history.queries import query_store as consult
print(consult(sys.argv[1], lambda usage: usage.gpu_seconds({3600.0}), float(sys.argv[2])))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


def test_what_was_written_is_read_again(path):
    fill(path, range(FIRST, FIRST + 180))

    (total,) = query_store(path, lambda each: each.totals("user", at(0), at(180)), at(180))
    points = query_store(path, lambda each: each.series(a_uuid(0), "temperature_celsius", at(0), at(180)), at(180))
    (device,) = query_store(path, lambda each: each.devices(at(0), at(180)), at(180))
    assert (total.uid, total.claimed, total.used, total.idle, total.unclaimed) == (ALICE, 1800, 1800, 0, 0)
    assert [(point.time, point.seconds, point.known, point.mean, point.highest) for point in points] == [
        (at(number), 10, 10, 60, 60) for number in range(180)
    ]
    assert (device.device, device.name, device.seen, device.utilization) == (a_uuid(0), a_device().name, 1800, 50)
    assert (device.energy, device.energy_unknown) == (None, 1800)


@pytest.mark.parametrize(("by", "count"), [("user", 1), ("device", 1), ("user and device", 1), ("group", 2)])
def test_totals_by(path, by, count):
    fill(path, [FIRST])
    found = query_store(path, lambda each: each.totals(by, at(0), at(1), {ALICE: {"lab", "staff"}}), at(1))

    assert [(one.claimed, one.unknown) for one in found] == [(10, 0)] * count


@pytest.mark.parametrize("metric", queries.METRICS)
def test_a_value_that_was_never_known_is_none(path, metric):
    connection = store.opened(path, check=True)
    row = tuple(None if name.endswith("_max") else 10_000.0 * name.endswith("_ms") for name in DEVICE_COLUMNS)
    slot = Slot()
    slot.devices[a_uuid(0)] = row
    store.write(connection, {FIRST: slot}, ())
    connection.close()
    (point,) = query_store(path, lambda each: each.series(a_uuid(0), metric, at(0), at(1)), at(1))

    assert (point.known, point.mean, point.highest) == (0, None, None)


def test_a_metric_that_does_not_exist_is_refused(path):
    fill(path, [FIRST])
    with pytest.raises(InvalidRequest, match="There are utilization_percent, memory_used_mib"):
        query_store(path, lambda each: each.series(a_uuid(0), "memory", 0.0, 1.0))


def test_a_window_counts_what_was_claimed_in_it(path):
    fill(path, [FIRST, FIRST + 90, FIRST + 179])
    found = query_store(path, lambda each: each.gpu_seconds({10.0, 900.0, 1800.0, 86400.0}), at(180))

    assert found == {ALICE: {10.0: 10, 900.0: 20, 1800.0: 30, 86400.0: 30}}


def test_use_of_a_half_life_ago_counts_half(path):
    day = 8640
    fill(path, [FIRST, FIRST + day, FIRST + 2 * day])
    found = query_store(path, lambda each: each.decayed(86400.0), at(2 * day + 1))

    assert found[ALICE] == pytest.approx(10 + 5 + 2.5, rel=0.02)


def test_what_lies_in_the_future_is_not_counted(path):
    fill(path, [FIRST, FIRST + 500])
    found = query_store(path, lambda each: (each.gpu_seconds({3600.0}), each.decayed(3600.0)), at(1))

    assert (found[0], round(found[1][ALICE])) == ({ALICE: {3600.0: 10}}, 10)


def test_a_slot_that_was_written_in_two_parts_is_their_sum(path):
    for seconds in (4.0, 6.0):
        connection = store.opened(path, check=True)
        store.write(connection, {FIRST: a_slot(seconds)}, ())
        connection.close()

    assert held(path, at(1)) == dict.fromkeys(SLOTS, (1, 10, 10))


def test_old_slots_make_room_for_new_ones(path, monkeypatch):
    small = {10: 20, 60: 10, 900: 4}
    monkeypatch.setattr(queries, "SLOTS", small)
    monkeypatch.setattr(store, "SLOTS", small)
    fill(path, range(FIRST, FIRST + 1000), together=7)
    size = os.path.getsize(path)
    fill(path, range(FIRST + 1000, FIRST + 2000), together=7)

    found = held(path, at(2000))
    assert all(kept <= found[width][0] <= kept + 1 for width, kept in small.items()), found
    assert os.path.getsize(path) == size


def test_a_clock_that_is_wrong_for_a_while_does_not_empty_the_store(path):
    fill(path, range(FIRST, FIRST + 100))
    fill(path, [FIRST + 10**8, FIRST + 10**8 + 1])
    fill(path, range(FIRST + 100, FIRST + 110))

    assert held(path, at(110))[10][0] >= 100


def test_the_store_never_grows_beyond_its_limit(path, monkeypatch):
    monkeypatch.setattr(store, "MOST_BYTES", 200_000)
    fill(path, range(FIRST, FIRST + 90 * 4000, 90), together=40)

    assert os.path.getsize(path) < 250_000
    assert held(path, at(90 * 4000))[900][0] > 1000


def test_everybody_may_read_and_nobody_else_may_write(path, monkeypatch):
    old = os.umask(0o077)
    try:
        fill(path, [FIRST])
        connection = store.opened(path, check=True)
        store.write(connection, {FIRST + 1: a_slot()}, ())
    finally:
        os.umask(old)
    modes = {
        name: stat.S_IMODE(os.stat(os.path.join(os.path.dirname(path), name)).st_mode)
        for name in ("usage.db", "usage.db-wal", ".")
    }
    connection.close()

    assert modes == {"usage.db": 0o644, "usage.db-wal": 0o644, ".": 0o755}


@pytest.mark.root
def test_another_user_reads_while_the_daemon_writes_and_when_it_has_ended(everybodys, path):
    connection = store.opened(everybodys, check=True)
    store.write(connection, {FIRST: a_slot()}, ())
    store.move_journal(connection)
    while_it_runs = as_nobody(ASK, everybodys, str(at(1)))
    connection.close()
    afterwards = as_nobody(ASK, everybodys, str(at(1)))

    expected = (0, "{1001: {3600.0: 10.0}}\n")
    assert [(done.returncode, done.stdout) for done in (while_it_runs, afterwards)] == [expected] * 2, while_it_runs


@pytest.mark.root
def test_another_user_reads_what_a_killed_daemon_left(everybodys):
    written = FORK.Event()
    with a_fork(stop_in_the_middle, everybodys, written) as child:
        assert written.wait(20)
        child.kill()
        child.join()
    done = as_nobody(ASK, everybodys, str(at(1)))

    assert (done.returncode, done.stdout) == (0, "{1001: {3600.0: 10.0}}\n"), done.stderr


@pytest.mark.root
def test_the_lock_of_another_user_does_not_keep_the_daemon_from_writing(everybodys):
    fill(everybodys, [FIRST])
    with locking(everybodys, user=20001):
        fill(everybodys, [FIRST + 1])

        assert held(everybodys, at(2)) == dict.fromkeys(SLOTS, (2, 20, 20)) | {60: (1, 20, 20), 900: (1, 20, 20)}


@pytest.fixture
def everybodys(open_place):
    """A store in a place that every user can reach."""
    return f"{open_place}/state/usage.db"


def as_nobody(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it as uid 20001, with this checkout."""
    source = os.path.dirname(os.path.dirname(os.path.abspath(usage.__file__)))
    begin = (
        f"import os, sys; sys.path.insert(0, {source!r})\n"
        "import gpuguard.history.queries, shutil, sqlite3, tempfile, urllib.parse\n"
        "os.setgroups([]); os.setresgid(20001, 20001, 20001); os.setresuid(20001, 20001, 20001)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", begin + program, *words], capture_output=True, text=True, check=False, timeout=60
    )


def stop_in_the_middle(path: str, written: Any) -> None:
    """Write, and be killed before the journal was moved into the file."""
    connection = store.opened(path, check=True)
    store.write(connection, {FIRST: a_slot()}, ())
    written.set()
    time.sleep(600)


@contextmanager
def locking(path: str, user: int | None = None) -> Iterator[None]:
    """Another process has a shared lock on the file, as somebody who may only read it can have."""
    program = (
        "import fcntl, os, sys, time; sys.argv[2] and os.setresuid(*[int(sys.argv[2])] * 3);"
        "fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.lockf(fd, fcntl.LOCK_SH);"
        "print('ready', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", program, path, str(user or "")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def test_another_process_cannot_open_it_as_a_database_while_the_daemon_has_it(path):
    connection = store.opened(path, check=True)
    done = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=False)
    store.write(connection, {FIRST: a_slot()}, ())
    connection.close()

    assert "database is locked" in done.stderr
    assert held(path, at(1))[10] == (1, 10, 10)


@pytest.mark.root
def test_a_store_that_one_may_not_read_is_an_error_with_advice(everybodys):
    fill(everybodys, [FIRST])
    os.chmod(everybodys, 0o600)
    done = as_nobody(ASK, everybodys, str(at(1)))

    assert "GpuguardError: " in done.stderr
    assert "Permission denied" in done.stderr


def test_without_a_store_it_says_who_makes_one(path):
    with pytest.raises(GpuguardError, match=r"no usage store at .*`gpuguard daemon` makes it"):
        query_store(path, lambda each: None)


@pytest.mark.root
def test_a_store_that_somebody_else_made_is_not_believed(path):
    fill(path, [FIRST])
    os.chown(path, 20001, 20001)

    with pytest.raises(GpuguardError, match="not a file of the daemon's alone"):
        query_store(path, lambda each: None)
    with pytest.raises(GpuguardError, match="not a file of ours alone"):
        store.opened(path, check=True)
    os.chown(os.path.dirname(path), 20001, 20001)
    assert query_store(path, lambda each: each.gpu_seconds({3600.0}), at(1)), (
        "root gave the directory to the daemon's user"
    )


@pytest.mark.parametrize(
    ("version", "fault", "ours", "theirs"),
    [
        (1, store.Outdated, "version 1 of its tables", r"another version of gpuguard .1, .* sets it aside at its next"),
        *((later, GpuguardError, *[f"another version of gpuguard .{later}"] * 2) for later in (3, 99)),
    ],
)
def test_a_store_of_another_version_is_left_alone_and_is_no_answer(path, version, fault, ours, theirs):
    fill(path, [FIRST])
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = Path(path).read_bytes()

    with pytest.raises(fault, match=ours):
        store.opened(path, check=True)
    with pytest.raises(GpuguardError, match=theirs):
        query_store(path, lambda each: None)
    assert Path(path).read_bytes() == before


def test_another_program_s_database_is_left_alone(path):
    os.makedirs(os.path.dirname(path))
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE photos (x)")
    connection.close()
    with pytest.raises(GpuguardError, match="no usage store"):
        store.opened(path, check=True)


def with_no_tables_yet(path: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    connection.close()


@pytest.mark.parametrize("begun", [lambda path: Path(path).touch(), with_no_tables_yet])
def test_a_store_that_is_just_being_made_is_waited_for_and_is_of_no_other_version(path, begun, monkeypatch):
    os.makedirs(os.path.dirname(path))
    begun(path)
    monkeypatch.setattr("gpuguard.history.queries.READ_PAUSE", 0.001)
    with pytest.raises(GpuguardError, match=r"nothing is in it\.  Try again in a minute; .* start the daemon anew"):
        query_store(path, lambda each: None)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", lambda seconds: pauses.append(seconds) or fill(path, [FIRST]))

    assert query_store(path, lambda each: each.gpu_seconds({3600.0}), at(1)) == {1001: {3600.0: 10.0}}
    assert pauses == [0.001]


def test_the_store_of_the_machine_survives_a_boot_and_others_lie_beside_their_claims(monkeypatch, tmp_path):
    monkeypatch.delenv("GPUGUARD_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/alice/state")
    shared = LockDirectory("/run/lock", "/run/lock", "/run/lock", prefix="gpuguard.")

    assert store_path(LockDirectory(ADMIN_DIRECTORY, "", "")) == "/var/lib/gpuguard/usage.db"
    assert store_path(LockDirectory("/tmp/mine", "", "")) == "/tmp/mine/usage.db"
    os.makedirs(tmp_path / "daemon")
    assert store_path(LockDirectory(str(tmp_path), "", "", owner=0)) == f"{tmp_path}/daemon/usage.db"
    assert store_path(shared) == "/home/alice/state/gpuguard/usage.db"
    monkeypatch.setenv("GPUGUARD_STATE_DIR", "/srv/state")
    assert store_path(LockDirectory(ADMIN_DIRECTORY, "", "")) == "/srv/state/usage.db"
