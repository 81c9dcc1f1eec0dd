"""What the usage store can be asked: its units are exact enough, and small enough for 400 days; nothing is made up."""

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
from builders import GIB, MIB, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot, a_uuid
from daemons import SOMEBODY, DaemonUnderTest, a_daemon
from nodes import eventually
from queues import a_ticket
from stores import ALICE, FIRST, a_busy_snapshot, at, fill, written

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.service import NEVER_FIRES
from gpuguard.history import queries, store
from gpuguard.history.queries import Point, query_store
from gpuguard.history.store_schema import DEVICE_COLUMNS, NOBODY_KNOWS, Slot, UsageSums, holdings, rates_of, rows
from gpuguard.model import Device, Gap, Snapshot
from gpuguard.queue.tickets import OwnTicket, ticket_content

BOB = 1002


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "usage.db")


def test_a_value_that_is_kept_in_coarse_units_is_exact_enough(path):
    sample = a_busy_snapshot(random.Random(3), 0.0)
    fill_with(path, sample, replace(sample, clock=10.0, taken_at=10.0), slots=90)
    device = sample.devices[0]
    assert device.memory_used is not None

    def series(metric: str) -> list[Point]:
        return query_store(path, lambda usage: usage.series(device.uuid, metric, at(0), at(90)), at(90 * 200))

    for metric, value in (("memory_used_mib", device.memory_used / 2**20), ("power_draw_watts", device.power_draw)):
        (point,) = series(metric)
        assert point.mean is not None and point.highest is not None
        assert point.mean == pytest.approx(value, abs=1)
        assert point.mean <= point.highest == pytest.approx(value, abs=16)


def fill_with(path: str, before: Snapshot, now: Snapshot, slots: int = 1, **fields: Any) -> None:
    """So many slots of what is between these two samples."""
    rates = rates_of(before, now)
    vars(rates).update(fields)
    filled = {FIRST + number: Slot() for number in range(slots)}
    for slot in filled.values():
        slot.add(rates, 10.0)
    written(path, filled, now.devices)


def test_what_nobody_watched_is_not_watched(path):
    store.opened(path, check=True).close()
    empty = query_store(path, lambda usage: usage.watched(at(0), at(90)), at(90))
    fill(path, [*range(FIRST, FIRST + 30), *range(FIRST + 60, FIRST + 90)])
    watch = query_store(path, lambda usage: usage.watched(at(-90), at(90)), at(90))

    assert (empty.seen, empty.store_begins) == (0, None)
    assert (watch.seen, watch.store_begins) == (600, at(0))


@pytest.mark.parametrize(("hours", "slot"), [(0, 50), (3, 48), (72, 0)], ids=["10 s", "60 s", "900 s"])
def test_a_record_begins_when_it_did_as_exactly_as_is_kept(path, hours, slot):
    fill(path, range(FIRST + 50, FIRST + 90))
    watch = query_store(path, lambda usage: usage.watched(at(-90000), at(90)), at(90) + 3600 * hours)

    assert watch.store_begins == at(slot)


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
def test_energy_is_divided_among_the_users_of_the_device(path, uids, joules, expected):
    fill_with(path, *with_energy(*uids, joules=joules))

    assert query_store(path, lambda usage: usage.energy(at(0), at(1)), at(1)) == expected


def test_a_user_of_a_device_for_half_a_slot_gets_half_of_its_energy(path):
    fill_with(path, *with_energy(ALICE), slots=45)
    fill_with(path, *with_energy(), slots=90)
    now = at(90 * 200)  # by now only quarters of an hour are left

    found = query_store(path, lambda usage: usage.energy(at(0), at(90)), now)
    (device,) = query_store(path, lambda usage: usage.devices(at(0), at(90)), now)
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
    first, second = a_device(0), a_device(1)
    seen = []
    for number, devices in enumerate(((first, second), (replace(first, index=1), replace(second, index=0)), (second,))):
        slot = Slot()
        slot.add(rates_of(*(a_snapshot(first, second, clock=clock, taken_at=clock) for clock in (0.0, 10.0))), 10.0)
        written(path, {FIRST + number: slot}, devices)
        known = query_store(path, lambda usage: usage.known(), at(9))
        seen.append({device.uuid: device.index for device in known})

    assert seen == [
        {first.uuid: 0, second.uuid: 1},
        {first.uuid: 1, second.uuid: 0},
        {first.uuid: None, second.uuid: 1},
    ]


def test_numbers_of_what_no_row_tells_any_more_are_given_again(path, monkeypatch):
    monkeypatch.setattr(store, "MOST_NUMBERS", 4)
    monkeypatch.setattr(store, "user_name", lambda uid: f"user {uid}")
    small = {10: 2, 60: 2, 900: 2}
    monkeypatch.setattr(queries, "SLOTS", small)
    monkeypatch.setattr(store, "SLOTS", small)
    for number in range(12):
        fill(path, [FIRST + 90 * number], uid=2000 + number)
    newest = query_store(path, lambda usage: usage.totals("uid", at(90 * 10), at(90 * 12)), at(90 * 12))

    assert {uid: times["claimed"] for uid, times in newest.items()} == {2010: 10, 2011: 10}


QUOTA = """
version: 1
mode: enforce
interval: {shortest: 200ms, longest: 200ms}
policies:
  - {name: hours, for: 0s, when: {quota: {gpu_hours: LIMIT, within: 1h}}, steps: [log]}
"""
# Claims a device as root, and becomes another user, to whom the claim then belongs.
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
    """A claim of the user SOMEBODY on a device."""
    words = [sys.executable, "-c", CLAIM, str(daemon.place), str(SOMEBODY)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=daemon.gpuguard.environment) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield
        finally:
            child.kill()


def claimed(daemon: DaemonUnderTest) -> float:
    """GPU-seconds that the store has of SOMEBODY."""
    found = query_store(f"{daemon.place}/claims/usage.db", lambda usage: usage.gpu_seconds({3600.0}))
    return found.get(SOMEBODY, {}).get(3600.0, 0.0)


@pytest.mark.root
def test_a_quota_of_gpu_time_fires_when_the_time_is_used_up_and_not_before(tmp_path):
    with a_daemon(tmp_path, QUOTA.replace("LIMIT", "2s"), "--enforce", named=True) as daemon, a_claim(daemon):
        (event, *_) = daemon.until("log")

        assert event["message"].endswith(" GPU-hours in 1h, the limit is 0.000556")
        assert event["user"] == "somebody"
        assert daemon.end() == 0
    assert claimed(daemon) >= 2.0


def test_time_in_the_queue_is_known_to_all_users(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert eventually(lambda: daemon.state()["snapshot"]["clock"] > 0)
        ticket = OwnTicket(lock_directory(f"{tmp_path}/claims"), ticket_content(a_ticket(gpus=3)))
        try:
            time.sleep(2.5)  # some intervals, of which the time is what is counted
        finally:
            ticket.withdraw()
        daemon.end()
    found = query_store(f"{tmp_path}/claims/usage.db", lambda usage: usage.waiting(0.0, usage.now + 900))

    waiting, wanted = found.pop(os.geteuid())
    assert wanted >= waiting > 0
    assert found.keys() <= {NOBODY_KNOWS}, "until the daemon has read the queue"


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


LONGEST = 30.0


def summed(*devices, begin=1000.0, seconds=10.0, energy=None, longest=LONGEST, **fields):
    """The slots after two samples of the same devices."""
    sums = UsageSums()
    former = a_snapshot(*devices, clock=500.0, taken_at=begin, **fields)
    if energy:
        former = replace(former, devices=tuple(replace(device, total_energy=energy) for device in former.devices))
    sums.add(former, longest)
    sums.add(a_snapshot(*devices, clock=500.0 + seconds, taken_at=begin + seconds, **fields), longest)
    return sums.slots


def of_device(slot: Slot, uuid=None) -> dict[str, float | None]:
    return dict(zip(DEVICE_COLUMNS, slot.devices[uuid or a_uuid(0)], strict=True))


def test_ten_seconds_of_a_device():
    device = a_device(utilization=50.0, memory_used=8 * GIB, temperature=60.0, power_draw=300.0, total_energy=3000.0)
    (slot,) = summed(device, energy=500.0).values()

    means = {
        "utilization_percent": 50,
        "memory_used_mib": 8 * GIB / MIB,
        "temperature_celsius": 60,
        "power_draw_watts": 300,
    }
    gauges = {
        f"{name}_{part}": value
        for name, mean in means.items()
        for part, value in (("sum", 10 * mean), ("max", mean), ("unknown_ms", 0))
    }
    rest = {"seen_ms": 10_000, "energy_joules": 2500, "energy_unknown_ms": 0, "claimed_ms": 0, "claimed_unknown_ms": 0}
    assert of_device(slot) == gauges | rest


def test_what_is_unknown_is_counted_as_unknown_time_and_never_as_zero():
    nothing = dict.fromkeys(("utilization", "memory_used", "memory_free", "temperature", "power_draw"))
    for value in (None, float("nan")):
        (slot,) = summed(a_device(**{**nothing, "temperature": value}), energy=5.0).values()
        row = of_device(slot)

        for gauge in ("utilization_percent", "memory_used_mib", "temperature_celsius", "power_draw_watts"):
            assert (row[f"{gauge}_sum"], row[f"{gauge}_max"], row[f"{gauge}_unknown_ms"]) == (0, None, 10_000)
        assert row["energy_unknown_ms"] == 10_000


def test_claims_that_cannot_be_read_are_unknown_and_nobodys():
    gap = Gap(None, "claims", "no directory")
    (slot,) = summed(a_device(processes=(a_process(),)), gaps=(gap,)).values()

    assert (of_device(slot)["claimed_ms"], of_device(slot)["claimed_unknown_ms"], slot.users) == (0, 10_000, {})


def a_busy(index: int, uid: int = ALICE, **fields: Any) -> Device:
    """A device on which a process of *uid* computes."""
    return a_device(index, **{"processes": (a_process(index + 2, uid=uid),), "utilization": 90.0, **fields})


PARENT = a_device(0, mig_mode=True, utilization=None)
INSTANCE = a_mig_instance(PARENT, 0, processes=(a_process(),))
WORKS, IDLES, EMPTY = (
    a_busy(0, processes=(a_process(2), a_process(3, uid=BOB))),
    a_busy(1, utilization=0.0),
    a_device(2),
)
UNTOLD = (
    a_busy(0, processes=None),
    a_busy(1, utilization=None),
    a_busy(2, processes=(), memory_used=40 * GIB),
    a_busy(3, BOB, processes_plausible=False),
)
IN_A_CONTAINER = a_device(processes=(a_process(uid=0, user="root"),), utilization=90.0)
USES = {  # what it shows: devices, claims, and by uid and device the seconds claimed, used, idle, used without a claim
    "a claim that works, two that idle, use without a claim": (
        (WORKS, IDLES, EMPTY),
        (a_claim_record(WORKS, IDLES, EMPTY),),
        {
            (ALICE, WORKS.uuid): (10, 10, 0, 0),
            (ALICE, IDLES.uuid): (10, 0, 10, 0),
            (ALICE, EMPTY.uuid): (10, 0, 10, 0),
            (BOB, WORKS.uuid): (0, 0, 0, 10),
        },
    ),
    "two claims of a user on a GPU count once": (
        (EMPTY,), (a_claim_record(EMPTY, id="a"), a_claim_record(EMPTY, id="b")), {(ALICE, EMPTY.uuid): (10, 0, 10, 0)},
    ),
    "whether it is used may be unknown": (
        UNTOLD, (a_claim_record(*UNTOLD),), {(ALICE, device.uuid): (10, 0, 0, 0) for device in UNTOLD},
    ),
    "a desktop uses nothing": ((a_device(processes=(a_process(kind="graphics", memory_used=GIB),)),), (), {}),
    "a claim on the whole covers its instances": (
        (PARENT, INSTANCE), (a_claim_record(PARENT),), {(ALICE, PARENT.uuid): (10, 0, 0, 0)},
    ),
    "a process on an instance is found there only": (
        (replace(PARENT, processes=(a_process(),)), INSTANCE), (), {(ALICE, INSTANCE.uuid): (0, 0, 0, 10)},
    ),
    "a container's process belongs to the only claim": (
        (IN_A_CONTAINER,), (a_claim_record(IN_A_CONTAINER),), {(ALICE, IN_A_CONTAINER.uuid): (10, 10, 0, 0)},
    ),
    "and without one to its user": ((IN_A_CONTAINER,), (), {(0, IN_A_CONTAINER.uuid): (0, 0, 0, 10)}),
}  # fmt: skip


@pytest.mark.parametrize(("devices", "claims", "expected"), USES.values(), ids=USES)
def test_time_is_claimed_used_idle_or_used_without_a_claim(devices, claims, expected):
    (slot,) = summed(*devices, claims=claims).values()

    assert {key: tuple(value / 1000 for value in times) for key, times in slot.users.items()} == expected


def test_a_lock_without_a_record_claims_the_device_for_nobody():
    device = a_device()
    (slot,) = summed(device, claims=(a_claim_record(device, uid=-1),)).values()

    assert (of_device(slot)["claimed_ms"], slot.users) == (10_000, {})


def test_an_interval_is_divided_among_the_slots_that_it_touches():
    slots = summed(a_device(), begin=1003.0, seconds=20.0)

    assert {number: of_device(slot)["seen_ms"] for number, slot in slots.items()} == {100: 7000, 101: 10_000, 102: 3000}


def test_a_gap_of_too_many_seconds_and_a_clock_that_stands_still_are_unknown():
    assert (summed(a_device(), seconds=30.5), summed(a_device(), seconds=0.0)) == ({}, {})


def test_a_clock_that_is_set_back_counts_nothing_twice():
    sums = UsageSums()
    walls = [1000.0 + 5 * number for number in range(10)] + [1000.0 + 5 * number for number in range(10)]
    for number, taken_at in enumerate(walls):
        sums.add(a_snapshot(clock=500.0 + 5 * number, taken_at=taken_at), LONGEST)

    assert sum(of_device(slot)["seen_ms"] or 0 for slot in sums.slots.values()) == 19 * 5000


def test_a_device_counts_when_it_is_there_at_both_ends():
    sums = UsageSums()
    sums.add(a_snapshot(a_device(0), clock=500.0, taken_at=1000.0), LONGEST)
    sums.add(a_snapshot(a_device(0), a_device(1), clock=505.0, taken_at=1005.0), LONGEST)
    sums.add(a_snapshot(a_device(1), clock=510.0, taken_at=1010.0), LONGEST)
    (slot,) = sums.slots.values()

    assert {uuid: of_device(slot, uuid)["seen_ms"] for uuid in slot.devices} == {a_uuid(0): 5000, a_uuid(1): 5000}


def test_a_slot_is_complete_when_the_next_sample_cannot_add_to_it():
    sums = UsageSums()
    for number in range(5):
        sums.add(a_snapshot(clock=500.0 + 6 * number, taken_at=1000.0 + 6 * number), LONGEST)

    assert (set(sums.complete()), set(sums.complete(all_of_them=True))) == ({100, 101}, {100, 101, 102})
