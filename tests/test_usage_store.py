"""The file of the usage store: what is written is read, by everybody, whatever happens to the one who writes."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_uuid
from stores import ALICE, FIRST, FORK, a_fork, a_slot, at, fill, held, set_version, written

from gpuguard.claims.directory import ADMIN_DIRECTORY, LockDirectory
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import queries, store
from gpuguard.history.queries import SeenDevice, query_store, store_path
from gpuguard.history.schema import DEVICE_COLUMNS, SLOTS, Slot

OPEN = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0.1).execute('SELECT * FROM devices').fetchall()"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


def test_what_was_written_is_read_again(path):
    fill(path, range(FIRST, FIRST + 180))

    totals = query_store(path, lambda usage: usage.totals("uid", at(0), at(180)), at(180))
    points = query_store(path, lambda usage: usage.series(a_uuid(0), "temperature_celsius", at(0), at(180)), at(180))
    (device,) = query_store(path, lambda usage: usage.devices(at(0), at(180)), at(180))
    assert totals == {ALICE: {"claimed": 1800, "used": 1800, "idle": 0, "unknown": 0, "unclaimed": 0}}
    assert [(point.time, point.seconds, point.known, point.mean, point.highest) for point in points] == [
        (at(number), 10, 10, 60, 60) for number in range(180)
    ]
    assert device.device == SeenDevice(a_uuid(0), a_device().name, None, 0)
    assert (device.seen, device.utilization) == (1800, 50)
    assert (device.energy, device.energy_unknown) == (None, 1800)


@pytest.mark.parametrize("metric", queries.METRICS)
def test_a_value_that_was_never_known_is_none(path, metric):
    slot = Slot()
    slot.devices[a_uuid(0)] = tuple(
        None if name.endswith("_max") else 10_000.0 * name.endswith("_ms") for name in DEVICE_COLUMNS
    )
    written(path, {FIRST: slot})
    (point,) = query_store(path, lambda usage: usage.series(a_uuid(0), metric, at(0), at(1)), at(1))

    assert (point.known, point.mean, point.highest) == (0, None, None)


def test_a_metric_that_does_not_exist_is_refused(path):
    fill(path, [FIRST])
    with pytest.raises(InvalidRequest, match="There are utilization_percent, memory_used_mib"):
        query_store(path, lambda usage: usage.series(a_uuid(0), "memory", 0.0, 1.0))


def test_a_window_counts_what_was_claimed_in_it(path):
    fill(path, [FIRST, FIRST + 90, FIRST + 179])
    found = query_store(path, lambda usage: usage.gpu_seconds({10.0, 900.0, 1800.0, 86400.0}), at(180))

    assert found == {ALICE: {10.0: 10, 900.0: 20, 1800.0: 30, 86400.0: 30}}


def test_use_of_a_half_life_ago_counts_half(path):
    day = 8640
    fill(path, [FIRST, FIRST + day, FIRST + 2 * day])
    found = query_store(path, lambda usage: usage.decayed(86400.0), at(2 * day + 1))

    assert found[ALICE] == pytest.approx(10 + 5 + 2.5, rel=0.02)


def test_what_lies_in_the_future_is_not_counted(path):
    fill(path, [FIRST, FIRST + 500])
    found = query_store(path, lambda usage: (usage.gpu_seconds({3600.0}), usage.decayed(3600.0)), at(1))

    assert (found[0], round(found[1][ALICE])) == ({ALICE: {3600.0: 10}}, 10)


def test_a_slot_that_was_written_in_two_parts_is_their_sum(path):
    for seconds in (4.0, 6.0):
        written(path, {FIRST: a_slot(seconds)}, check=True)

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


def test_all_users_may_read_and_no_other_may_write(path, monkeypatch):
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


@pytest.fixture
def public(open_place):
    """The path of a store that every user can reach."""
    return f"{open_place}/state/usage.db"


def asked_by_another_user(path: str) -> tuple[str, str]:
    """What uid 20001 reads of the store with this checkout, and what is said."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(queries.__file__))))
    program = (
        f"import os, sys; sys.path.insert(0, {source!r})\n"
        "import gpuguard.history.queries, shutil, sqlite3, tempfile, urllib.parse\n"
        "os.setgroups([]); os.setresgid(20001, 20001, 20001); os.setresuid(20001, 20001, 20001)\n"
        "answer = gpuguard.history.queries.query_store(\n"
        "    sys.argv[1], lambda usage: usage.gpu_seconds({3600.0}), float(sys.argv[2]))\n"
        "print(answer)\n"
    )
    words = [sys.executable, "-c", program, path, str(at(1))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout, done.stderr


TEN_SECONDS = ("{1001: {3600.0: 10.0}}\n", "")


@pytest.mark.root
def test_another_user_reads_while_the_daemon_writes_and_when_it_has_ended(public):
    with closing(store.opened(public, check=True)) as connection:
        store.write(connection, {FIRST: a_slot()}, ())
        store.move_journal(connection)

        assert asked_by_another_user(public) == TEN_SECONDS
    assert asked_by_another_user(public) == TEN_SECONDS


@pytest.mark.root
def test_another_user_reads_what_a_killed_daemon_left(public):
    written = FORK.Event()
    with a_fork(stop_in_the_middle, public, written) as child:
        assert written.wait(20)
        child.kill()
        child.join()

    assert asked_by_another_user(public) == TEN_SECONDS


@pytest.mark.root
def test_the_lock_of_another_user_does_not_keep_the_daemon_from_writing(public):
    fill(public, [FIRST])
    with locked(public, 20001):
        fill(public, [FIRST + 1])

        assert held(public, at(2)) == dict.fromkeys(SLOTS, (2, 20, 20)) | {60: (1, 20, 20), 900: (1, 20, 20)}


def stop_in_the_middle(path: str, written: Any) -> None:
    """Write, and be killed before the journal was moved into the file."""
    connection = store.opened(path, check=True)
    store.write(connection, {FIRST: a_slot()}, ())
    written.set()
    time.sleep(600)


@contextmanager
def locked(path: str, uid: int) -> Iterator[None]:
    """A process of another user has a shared lock on the file, as every reader can have."""
    program = (
        "import fcntl, os, sys, time; os.setresuid(*[int(sys.argv[2])] * 3);"
        "fd = os.open(sys.argv[1], os.O_RDONLY); fcntl.lockf(fd, fcntl.LOCK_SH);"
        "print('ready', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", program, path, str(uid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def test_another_process_cannot_open_it_as_a_database_while_the_daemon_has_it(path):
    with closing(store.opened(path, check=True)) as connection:
        done = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=False)
        store.write(connection, {FIRST: a_slot()}, ())

    assert "database is locked" in done.stderr
    assert held(path, at(1))[10] == (1, 10, 10)


@pytest.mark.root
def test_a_store_that_one_may_not_read_is_an_error_with_advice(public):
    fill(public, [FIRST])
    os.chmod(public, 0o600)
    _, said = asked_by_another_user(public)

    assert "GpuguardError: " in said and "Permission denied" in said


@pytest.mark.root
def test_a_store_that_another_user_made_is_not_believed(path):
    fill(path, [FIRST])
    os.chown(path, 20001, 20001)

    with pytest.raises(GpuguardError, match="not a file of the daemon's alone"):
        query_store(path, lambda usage: None)
    with pytest.raises(GpuguardError, match="not a file of ours alone"):
        store.opened(path, check=True)
    os.chown(os.path.dirname(path), 20001, 20001)
    assert query_store(path, lambda usage: usage.gpu_seconds({3600.0}), at(1)), (
        "root gave the directory to the daemon's user"
    )


@pytest.mark.parametrize("version", [3, 99])
def test_a_store_of_a_later_version_is_left_alone_and_is_no_answer(path, version):
    fill(path, [FIRST])
    set_version(path, version)
    before = Path(path).read_bytes()

    with pytest.raises(GpuguardError, match=f"another version of gpuguard .{version}"):
        store.opened(path, check=True)
    with pytest.raises(GpuguardError, match=f"another version of gpuguard .{version}"):
        query_store(path, lambda usage: None)
    assert Path(path).read_bytes() == before


def run_sql(path: str, statement: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)


def test_another_program_s_database_is_left_alone(path):
    run_sql(path, "CREATE TABLE photos (x)")
    with pytest.raises(GpuguardError, match="no usage store"):
        store.opened(path, check=True)


@pytest.mark.parametrize("statement", ["PRAGMA user_version", "PRAGMA journal_mode = WAL"], ids=["no byte", "no table"])
def test_a_store_that_is_just_being_made_is_waited_for_and_is_of_no_other_version(path, statement, monkeypatch):
    run_sql(path, statement)
    monkeypatch.setattr("gpuguard.history.queries.READ_PAUSE", 0.001)
    with pytest.raises(GpuguardError, match=r"nothing is in it\.  Try again in a minute; .* start the daemon anew"):
        query_store(path, lambda usage: None)
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", lambda seconds: pauses.append(seconds) or fill(path, [FIRST]))

    assert query_store(path, lambda usage: usage.gpu_seconds({3600.0}), at(1)) == {1001: {3600.0: 10.0}}
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
