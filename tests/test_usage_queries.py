"""What the usage store can be asked: its units are exact enough, and small enough for 400 days; nothing is made up."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from daemons import SOMEBODY, DaemonUnderTest, a_daemon
from nodes import eventually
from queues import a_ticket
from stores import ALICE, FIRST, a_busy_snapshot, a_sample, at, fill, held

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.service import NEVER_FIRES
from gpuguard.history import queries, store
from gpuguard.history.queries import Point, Waited, query_store
from gpuguard.history.schema import NOBODY_KNOWS, SLOTS, WIDTH, Slot, holdings, rates_of, rows
from gpuguard.model import Snapshot
from gpuguard.queue.tickets import OwnTicket, ticket_content

BOB = 1002


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


@pytest.mark.parametrize("per_device", [(1, 1, 2, 3), (3,)], ids=str)
def test_a_store_of_400_days_fits_into_40_megabytes(path, per_device):
    """By one of 5 days: benchmarks/usage.py fills a whole one.

    8 devices that 36 users use all the time, three of whom wait; written in pieces, as the daemon does, since rows that
    grow leave room in their pages.
    """
    chance, connection = random.Random(1), store.opened(path, check=False)
    connection.execute("PRAGMA synchronous = OFF")
    store.move_journal(connection)
    empty = os.path.getsize(path)
    waiting: dict[int, tuple[float, ...]] = {20000 + number: (1000.0, 2.0) for number in range(3)}
    for quarter in range(480):
        rates = rates_of(*(a_busy_snapshot(chance, each, per_device, idle=0.2) for each in (0.0, 10.0)))
        rates.waiting = waiting
        for piece in range(0, 90, 30):
            slot = Slot()
            slot.add(rates, 300.0)
            store.write(connection, {FIRST + 90 * quarter + piece: slot}, ())
    store.move_journal(connection)
    connection.close()
    kept = sum(slots for slots, _, _ in held(path, at(90 * 480)).values())

    assert kept > 1000
    assert empty + (os.path.getsize(path) - empty) / kept * sum(SLOTS.values()) < 40e6


def test_a_value_that_is_kept_in_coarse_units_is_exact_enough(path):
    sample = a_busy_snapshot(random.Random(3), 0.0)
    fill_with(path, sample, replace(sample, clock=10.0, taken_at=10.0), slots=90)
    device = sample.devices[0]
    assert device.memory_used is not None

    def series(metric: str) -> list[Point]:
        return query_store(path, lambda each: each.series(device.uuid, metric, at(0), at(90)), at(90 * 200))

    for metric, value in (("memory_used_mib", device.memory_used / 2**20), ("power_draw_watts", device.power_draw)):
        (point,) = series(metric)
        assert point.mean is not None and point.highest is not None
        assert point.mean == pytest.approx(value, abs=1)
        assert point.mean <= point.highest == pytest.approx(value, abs=16)


def fill_with(path: str, before: Snapshot, now: Snapshot, slots: int = 1, **fields: Any) -> None:
    """So many slots of what is between these two samples."""
    connection = store.opened(path, check=False)
    rates = rates_of(before, now)
    vars(rates).update(fields)
    for number in range(slots):
        slot = Slot()
        slot.add(rates, 10.0)
        store.write(connection, {FIRST + number: slot}, now.devices)
    store.move_journal(connection)
    connection.close()


def test_who_waits_is_kept_and_who_wanted_most_comes_first(path):
    before, now = a_sample(0.0), a_sample(10.0)
    fill_with(path, before, now, 6, waiting={ALICE: (1000.0, 2.0), BOB: (1000.0, 8.0), NOBODY_KNOWS: (500.0, 0.0)})
    found = query_store(path, lambda each: each.waiting(at(0), at(6)), at(6))

    assert found == [Waited(BOB, 60, 480), Waited(ALICE, 60, 120), Waited(None, 30, 0)]


def test_what_nobody_watched_is_not_watched(path):
    fill(path, [*range(FIRST, FIRST + 30), *range(FIRST + 60, FIRST + 90)])
    watch = query_store(path, lambda each: each.watched(at(-90), at(90)), at(90))

    assert (watch.seen, watch.store_begins) == (600, at(0))


def test_an_empty_store_begins_nowhere(path):
    store.opened(path, check=True).close()
    watch = query_store(path, lambda each: each.watched(at(0), at(90)), at(90))

    assert (watch.seen, watch.store_begins) == (0, None)


def with_energy(*uids: int, joules: float | None = 3000.0) -> tuple[Snapshot, Snapshot]:
    """Two samples, 10 s apart, of a device that these users share."""
    workers = tuple(a_process(pid, uid=uid) for pid, uid in enumerate(uids, 100))
    snapshots = []
    for clock, energy in ((0.0, 0.0), (10.0, joules)):
        device = a_device(processes=workers, utilization=50.0, total_energy=energy)
        claims = tuple(a_claim_record(device, id=str(uid), uid=uid) for uid in uids)
        snapshots.append(a_snapshot(device, claims=claims, clock=clock, taken_at=clock))
    return snapshots[0], snapshots[1]


@pytest.mark.parametrize(
    ("uids", "joules", "expected"),
    [
        ((ALICE,), 3000.0, {ALICE: 3000}),
        ((ALICE, BOB), 3000.0, {ALICE: 1500, BOB: 1500}),
        ((ALICE,), None, {ALICE: None}),
        ((), 3000.0, {}),
    ],
)
def test_energy_is_divided_among_those_who_had_the_device(path, uids, joules, expected):
    fill_with(path, *with_energy(*uids, joules=joules))

    assert query_store(path, lambda each: each.energy(at(0), at(1)), at(1)) == expected


def test_who_has_a_device_for_half_a_slot_gets_half_of_its_energy(path):
    fill_with(path, *with_energy(ALICE), slots=45)
    fill_with(path, *with_energy(), slots=90)
    now = at(90 * 200)  # by now only quarters of an hour are left

    found = query_store(path, lambda each: each.energy(at(0), at(90)), now)
    (device,) = query_store(path, lambda each: each.devices(at(0), at(90)), now)
    assert (device.energy, device.seen) == (135 * 3000, 1350)
    assert found[ALICE] == pytest.approx(135 * 3000 * 450 / 1350)


@pytest.mark.parametrize("query", [holdings(900), rows("users", 900), rows("devices", 900), rows("waiting", 900)])
def test_a_question_about_some_days_does_not_look_through_400(path, query):
    """Without the right index the energy of a week took 8 s of a full store, with it 0.04 s."""
    connection = store.opened(path, check=True)
    plan = [detail for *_, detail in connection.execute(f"EXPLAIN QUERY PLAN {query}", (0, 1))]
    connection.close()

    assert plan
    assert all(detail.startswith("SEARCH") and "INTEGER PRIMARY KEY" in detail for detail in plan), plan


def test_a_device_is_known_by_the_index_that_it_had_last(path):
    def indexes() -> dict[str, int | None]:
        return {one.device: one.index for one in query_store(path, lambda each: each.devices(at(0), at(9)), at(9))}

    first, second = a_device(0), a_device(1)
    for number, devices in enumerate(((first, second), (replace(first, index=1), replace(second, index=0)), (second,))):
        connection = store.opened(path, check=False)
        slot = Slot()
        slot.add(rates_of(*(a_snapshot(first, second, clock=clock, taken_at=clock) for clock in (0.0, 10.0))), 10.0)
        store.write(connection, {FIRST + number: slot}, devices)
        connection.close()
        assert (
            indexes()
            == [
                {first.uuid: 0, second.uuid: 1},
                {first.uuid: 1, second.uuid: 0},
                {first.uuid: None, second.uuid: 1},
            ][number]
        )


def test_numbers_of_what_no_row_tells_any_more_are_given_again(path, monkeypatch):
    monkeypatch.setattr(store, "MOST_NUMBERS", 4)
    monkeypatch.setattr(store, "user_name", lambda uid: f"user {uid}")
    small = {10: 2, 60: 2, 900: 2}
    monkeypatch.setattr(queries, "SLOTS", small)
    monkeypatch.setattr(store, "SLOTS", small)
    for number in range(12):
        fill(path, [FIRST + 90 * number], uid=2000 + number)
    newest = query_store(path, lambda each: each.totals("user", at(90 * 10), at(90 * 12)), at(90 * 12))

    assert {(one.uid, one.claimed) for one in newest} == {(2010, 10), (2011, 10)}


# The usage store and a real daemon: what it saw is there, and quotas of GPU time fire.


QUOTA = """
version: 1
mode: enforce
interval: {shortest: 200ms, longest: 200ms}
policies:
  - {name: hours, for: 0s, when: {quota: {gpu_hours: LIMIT, within: 1h}}, steps: [log]}
"""
# Claims a device as root, and becomes somebody: what is claimed is his then.
CLAIM = """
import ctypes, glob, os, sys, time
import gpuguard
claim = gpuguard.grab_gpus(1)
for path in glob.glob(sys.argv[1] + "/claims/claims/claim.*.json"):
    os.chown(path, int(sys.argv[2]), int(sys.argv[2]))
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc/PID would stay root's
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def a_claim(daemon: DaemonUnderTest) -> Iterator[None]:
    """Somebody's claim on a device."""
    words = [sys.executable, "-c", CLAIM, str(daemon.place), str(SOMEBODY)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=daemon.gpuguard.environment) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def claimed(daemon: DaemonUnderTest) -> float:
    """What the store has of him."""
    found = query_store(f"{daemon.place}/claims/usage.db", lambda usage: usage.gpu_seconds({3600.0}))
    return found.get(SOMEBODY, {}).get(3600.0, 0.0)


@pytest.mark.root
def test_a_quota_of_gpu_time_fires_when_the_time_is_used_up_and_not_before(tmp_path):
    with a_daemon(tmp_path, QUOTA.replace("LIMIT", "2s"), "--enforce", named=True) as daemon, a_claim(daemon):
        (event, *_) = daemon.until("log")

        assert "are allowed" in event["message"]
        assert event["user"] == "somebody"
        assert daemon.end() == 0
    assert claimed(daemon) >= 2.0


@pytest.mark.root
def test_what_was_used_before_a_restart_counts(tmp_path):
    now = int(time.time() / WIDTH)
    fill(f"{tmp_path}/claims/usage.db", range(now - 20, now - 2), uid=SOMEBODY)
    with a_daemon(tmp_path, QUOTA.replace("LIMIT", "170s"), named=True) as daemon, a_claim(daemon):
        (event, *_) = daemon.until("log")
        daemon.end()
        once = daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once")

    assert "GPU-hours in 0.0417 days" in event["message"]
    assert "GPU-hours in 0.0417 days" in once.stderr
    assert NEVER_FIRES not in once.stderr + daemon.said()


def test_what_was_used_is_known_to_everybody_after_a_clean_end(tmp_path):
    with a_daemon(tmp_path) as daemon:
        daemon.state()
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > 0)
        uuid = daemon.uuid(0)
        devices = []

        def seen() -> bool:
            devices[:] = query_store(f"{tmp_path}/claims/usage.db", lambda usage: usage.devices(0.0, usage.now + 1))
            return bool(devices)

        assert eventually(seen, 30.0), "10 s slots are written when they are complete"
        assert devices[0].device == uuid
        before, looked = devices[0].seen, daemon.state()["snapshot"]["clock"]
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > looked + 1)
        daemon.end()

    assert seen()
    assert devices[0].seen > before


def test_who_waits_in_line_is_known_to_everybody(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > 0)
        ticket = OwnTicket(lock_directory(f"{tmp_path}/claims"), ticket_content(a_ticket(gpus=3)))
        try:
            assert eventually(lambda: daemon.state()["snapshot"]["clock"] > time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
            time.sleep(2.5)  # some intervals, of which the time is what is counted
        finally:
            ticket.leave()
        daemon.end()
    found = query_store(f"{tmp_path}/claims/usage.db", lambda usage: usage.waiting(0.0, usage.now + 900))

    assert [one.uid for one in found] == [os.geteuid()]
    assert found[0].wanted >= found[0].waiting > 0


@pytest.mark.parametrize("once", [False, True])
def test_without_a_store_it_says_so_at_load_and_a_quota_of_gpu_time_never_fires(tmp_path, once):
    (tmp_path / "file").write_text("")
    environment = {"GPUGUARD_STATE_DIR": str(tmp_path / "file")}
    if once:
        daemon = DaemonUnderTest(tmp_path)
        daemon.policy.write_text(QUOTA.replace("LIMIT", "1s"))
        daemon.gpuguard.environment |= environment
        said = daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once").stderr
    else:
        with a_daemon(tmp_path, QUOTA.replace("LIMIT", "1s"), environment=environment) as daemon:
            daemon.until("policy")
            assert eventually(lambda: NEVER_FIRES in daemon.said())
            assert daemon.end() == 0
        said = daemon.said()

    assert NEVER_FIRES in said
    assert str(tmp_path / "file") in said


def test_policies_that_do_not_ask_for_gpu_time_are_not_told_about_it(tmp_path):
    policy = QUOTA.replace("quota: {gpu_hours: LIMIT, within: 1h}", "memory: {above: 1GiB}")
    daemon = DaemonUnderTest(tmp_path)
    daemon.policy.write_text(policy)

    assert NEVER_FIRES not in daemon.gpuguard("daemon", "--policy", str(daemon.policy), "--once").stderr
