"""The file of the usage store: what is written is read, by everybody, also when a writer dies or it is damaged."""

import ctypes
import itertools
import mmap
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
from chances import THE_SAME, luck
from nodes import eventually
from stores import ALICE, FIRST, FORK, a_fork, a_sample, a_slot, at, fill, held, set_version, written

from gpuguard.claims.directory import ADMIN_DIRECTORY, LockDirectory
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import queries, store
from gpuguard.history.queries import METRICS, SeenDevice, Usage, query_store, store_path
from gpuguard.history.store_schema import DEVICE_COLUMNS, SLOTS, WIDTH, Slot
from gpuguard.history.usage_report import usage_report
from gpuguard.views import report as texts
from gpuguard.views.report import to_html

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


KILLS = 50


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


def test_time_of_which_all_is_known_leaves_none_that_is_unknown(path):
    slot, uuid = a_slot(uid=ALICE), a_sample(0.0).devices[0].uuid
    slot.users[ALICE, uuid] = (277_120.0, 155_160.0, 121_960.0, 0.0)
    written(path, {FIRST: slot}, a_sample(0.0).devices)

    totals = query_store(path, lambda usage: usage.totals("uid", at(0), at(1)), at(1))

    assert totals[ALICE]["unknown"] == 0


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
        texts.to_json(report, "node7")
        list(texts.to_csv(report, "node7"))
        list(texts.to_text(report, width=80, paint=lambda text, _: text))
        to_html(report, "node7", NOW)
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
