"""Whoever is asked says the same of a device: views, metrics, the choice of devices, a start, and the rules.

Random machines: see random_machines.
"""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, MIB, Reticent, a_claim_record, a_device, a_process, a_snapshot, a_uuid
from chances import often
from fake_nvml import FakeNvml
from nodes import Gpuguard
from own_claims import acquire, preview
from random_machines import a_random_machine

from gpuguard import users
from gpuguard.claims.directory import daemon_files, lock_directory
from gpuguard.device_state import (
    FREE,
    DeviceUse,
    beyond_desktop,
    chosen,
    claims_on,
    mean_watts,
    usable_devices,
    user_label,
    uses,
)
from gpuguard.errors import NotEnoughGpus
from gpuguard.metrics.facts import MetricFacts
from gpuguard.metrics.families import metric_families
from gpuguard.model import ClaimRecord, Gap, GpuProcess, ProcessStat, Snapshot
from gpuguard.policies.usage import UnclaimedRule
from gpuguard.policies.view import RuleView
from gpuguard.request import Request
from gpuguard.select import choose, claimed_by
from gpuguard.source import desktop_memory, publish_desktop_memory, with_claims
from gpuguard.top.page import page
from gpuguard.top.process_table import rows_of
from gpuguard.top.scene import History, Scene, ScreenView
from gpuguard.views import explain, who
from gpuguard.web.feed import bounded

MACHINES = often(2000)
STARTS = 200  # through the protocol of a start, which reads less of the driver at first
DAEMONS_DATE = 1_700_000_000.0 - 7200


def metric(families: Collection[Any], name: str) -> dict[frozenset[tuple[str, str]], float]:
    values = (family.values for family in families if family.name == name)
    return {frozenset(labels): value for labels, value in next(iter(values), {}).items()}


def check_views(snapshot: Snapshot, found: tuple[DeviceUse, ...]) -> None:
    """The JSON of who, which is what the page shows and other hosts are told, and both screens."""
    content = who.to_json(snapshot, found)
    frame = bounded({**content, "line": [], "jobs": [], "events": [], "unknown": []})
    screen = who.to_text(snapshot, found)
    scene, history = Scene(snapshot, found), History()
    history.add(scene)
    top = [line.text for line in page(scene, history, ScreenView(mode="compact"), 400, 60)]
    for use, row, card in zip(found, content["devices"], frame["devices"], strict=True):
        words, label = who.LABELS[use.state][0], use.device.label
        line = next(line for line in screen if line.startswith(f"{label:<4} ") or line.split()[:1] == [label])
        assert (row["exact_state"], row["state"], row["label"]) == (use.state, use.plain_state, label)
        assert {name: card[name] for name in ("state", "exact_state", "reason", "problems")} == {
            name: row[name] for name in ("state", "exact_state", "reason", "problems")
        }
        assert words in line
        assert any(text.strip().startswith(f"{label} ") and words in text for text in top)
        assert [claim["idle"] for claim in row["claims"]] == [claim.idle for claim in use.claims]
        for running, process in zip(use.processes or (), row["processes"] or (), strict=True):
            counts = process["computes"] is not False and process["claim"] is None
            remark = next(text for text in screen if text.split()[:2] == ["pid", str(process["pid"])])
            assert ("no claim" in remark) == counts
            assert user_label(process["user"], process["uid"]) in remark and process["claim"] == running.claim
    told = {process["pid"] for row in content["devices"] for process in row["processes"] or () if process["computes"]}
    unknown = {p["pid"] for row in content["devices"] for p in row["processes"] or () if p["computes"] is None}
    assert {row.pid for row in rows_of(scene, ScreenView(mode="compact")) if row.computes} == told | unknown


def check_metrics(snapshot: Snapshot, found: tuple[DeviceUse, ...]) -> None:
    families = list(metric_families(MetricFacts(snapshot.taken_at, "1", snapshot, current=True, uses=found)))
    states = metric(families, "gpuguard_device_state")
    unclaimed: dict[str, set[str]] = {}
    for use in found:
        uuid = use.device.uuid
        assert [dict(labels)["state"] for labels, value in states.items() if ("uuid", uuid) in labels and value] == [
            use.plain_state
        ]
        listed = (use.processes or ()) if use.device.processes_plausible else ()
        for row in listed:
            if row.claim is None and who.computes(row.process, use.device):
                unclaimed.setdefault(row.process.user or "(unknown)", set()).add(uuid)
    counted = metric(families, "gpuguard_user_unclaimed_devices")
    if not any(gap.field == "claims" for gap in snapshot.gaps):
        assert {dict(labels)["user"]: value for labels, value in counted.items()} == {
            user: len(uuids) for user, uuids in unclaimed.items()
        }


def check_choice(snapshot: Snapshot, found: tuple[DeviceUse, ...]) -> None:
    """explain, and what a start takes."""
    taken = claimed_by(snapshot.claims, snapshot.taken_at) | dict(snapshot.quarantined) | dict(snapshot.reserved)
    choice = choose(snapshot, Request(), taken)
    rows = {row["uuid"]: row for row in explain.to_json(snapshot, Request(), choice)["devices"]}
    if any(gap.field == "claims" for gap in snapshot.gaps):
        return  # then nothing is started
    for use in found:
        assert rows[use.device.uuid]["eligible"] == (use.state in FREE), (use.state, rows[use.device.uuid]["reasons"])
        assert use.state != "divided" or rows[use.device.uuid]["permanent"]
    assert bool(choice.devices) == any(use.state in FREE for use in found)


def check_rules(snapshot: Snapshot, found: tuple[DeviceUse, ...], stats: dict[int, ProcessStat | None]) -> None:
    findings = {(one.subject.device, one.subject.pid) for one in UnclaimedRule().check(RuleView(snapshot, seen=stats))}
    if any(gap.field == "claims" for gap in snapshot.gaps):
        assert not findings
        return
    usable = usable_devices(snapshot)
    for use in found:
        if use.device not in usable or claims_on(snapshot, use.device) or not use.device.processes_plausible:
            continue
        computing = {
            (use.device.uuid, row.process.pid)
            for row in use.processes or ()
            if row.claim is None and who.computes(row.process, use.device) and row.process.uid is not None
        }
        assert {finding for finding in findings if finding[0] == use.device.uuid} >= computing


def check(seeds: Collection[int]) -> None:
    for seed in seeds:
        snapshot, stats = a_random_machine(seed)
        found = uses(snapshot, stats)
        try:
            check_views(snapshot, found)
            check_metrics(snapshot, found)
            check_choice(snapshot, found)
            check_rules(snapshot, found, stats)
        except AssertionError as error:
            raise AssertionError(f"machine {seed}: {error}") from error


def test_everybody_says_the_same_of_every_machine():
    check(range(MACHINES))


def test_the_machines_have_every_state():
    states = {use.state for seed in range(MACHINES) for use in uses(*a_random_machine(seed))}

    assert states == set(who.LABELS)


NOW = a_snapshot().taken_at
BORN = {"since": NOW - 3600.0}  # a claim of an hour ago; the machine was started 10,000 s ago


@pytest.mark.parametrize(
    ("claim", "stats", "orphaned"),
    [
        ({"pid": None}, {}, None),
        ({}, {}, None),
        ({}, {4711: None}, True),
        ({}, {4711: ProcessStat(1, "Z")}, True),
        ({"since": None}, {4711: ProcessStat(1, "S", 9000.0)}, False),
        (BORN, {4711: ProcessStat(1, "S", 6000.0)}, False),
        (BORN, {4711: ProcessStat(1, "S", 9000.0)}, True),
        ({"holders": (99,)}, {99: ProcessStat(1, "S", inner_pid=4711)}, False),
        ({"holders": (99,)}, {99: ProcessStat(1, "S")}, True),
        ({**BORN, "holders": (99,)}, {4711: ProcessStat(1, "S", 6000.0)}, True),
        ({**BORN, "holders": (4711, 99)}, {4711: ProcessStat(1, "S", 6000.0)}, False),
    ],
)
def test_a_claim_is_orphaned_when_its_wrapper_has_ended(claim, stats, orphaned):
    snapshot = a_snapshot(a_device(0), claims=(a_claim_record(**{"pid": 4711, **claim}),))
    (use,) = uses(snapshot, stats)

    assert use.claims[0].orphaned is orphaned


def test_of_a_machine_only_what_belongs_to_some_users_on_some_devices_is_shown():
    bobs = a_process(uid=1002, user="bob")
    found = uses(a_snapshot(a_device(0, processes=(a_process(), bobs)), a_device(1, processes=(bobs,)), a_device(2)))
    none = frozenset[str]()

    assert chosen(found, none, none) == found
    assert [use.device.index for use in chosen(found, none, frozenset({a_uuid(2)}))] == [2]
    assert [use.device.index for use in chosen(found, frozenset({"bob"}), none)] == [0, 1]
    assert [row.process.user for row in chosen(found, frozenset({"bob"}), none)[0].processes or ()] == ["bob"]


@pytest.mark.parametrize(
    ("before", "now", "watts"),
    [(100.0, 400.0, 150.0), (None, 400.0, None), (100.0, None, None), (400.0, 100.0, None), (0.0, 2798.0, 1399.0),
     (0.0, 5498.0, None)],
    ids=["drawn", "unknown before", "unknown now", "began anew", "almost twice its limit", "more than it can draw"],
)  # fmt: skip
def test_what_a_device_has_drawn_is_told_by_its_counter_where_that_can_be(before, now, watts):
    """A job of 13 s was told 10 Wh, 2,749 W of a GPU that may draw 700."""
    assert mean_watts(a_device(total_energy=before), a_device(total_energy=now), 2.0) == watts


@pytest.mark.parametrize(("joules", "watts"), [(19_998.0, 9_999.0), (20_002.0, None)])
def test_of_a_device_whose_limit_is_unknown_more_than_any_device_draws_is_no_reading(joules, watts):
    before, now = (a_device(total_energy=energy, power_limit=None) for energy in (0.0, joules))

    assert mean_watts(before, now, 2.0) == watts


ENDED = GpuProcess(4000, 600 * MIB, ended=True)


@pytest.mark.parametrize(
    ("memory", "processes", "state", "eligible"),
    [
        (500 * MIB, (replace(ENDED, memory_used=500 * MIB),), "free", True),  # as much as an idle one may hold
        (500 * MIB, (replace(ENDED, memory_used=None),), "free", True),
        (600 * MIB, (ENDED,), "unclaimed_use", False),
        (70 * GIB, (replace(ENDED, memory_used=None),), "unclaimed_use", False),
        (70 * GIB, (replace(ENDED, kind="graphics"),), "unclaimed_use", False),
        (10 * GIB, (ENDED, a_process()), "unclaimed_use", False),
    ],
)
def test_what_a_process_that_has_ended_leaves_on_a_device_counts_as_memory_of_nobody(
    memory, processes, state, eligible
):
    snapshot = a_snapshot(a_device(processes=processes, memory_used=memory))

    assert uses(snapshot)[0].state == state
    assert bool(choose(snapshot, Request(), {}).devices) == eligible


def test_a_process_that_has_ended_keeps_a_device_that_only_one_may_have():
    device = a_device(processes=(replace(ENDED, memory_used=MIB),), compute_mode="exclusive_process")

    assert [use.state for use in uses(a_snapshot(device))] == ["unclaimed_use"]


def drawing(pid: int, memory: int, uid: int | None = 1001, **fields: Any) -> GpuProcess:
    names = {None: None, 0: "root", 1001: "alice", 1002: "bob"}
    return a_process(pid, **{"kind": "graphics", "memory_used": memory, "uid": uid, "user": names.get(uid), **fields})


both = {"kind": "compute+graphics"}
# What draws on a device -> the pids that are more than a desktop, of 2 GiB for each user.
DRAWING: dict[str, tuple[list[GpuProcess], set[int]]] = {
    "root's display server": ([drawing(1, GIB, 0)], set()),
    "a desktop with a browser and a video call": (
        [drawing(1, 300 * MIB), drawing(2, 700 * MIB), drawing(3, 945 * MIB, **both)],
        set(),
    ),
    "two desktops": ([drawing(1, 3 * GIB // 2), drawing(2, 3 * GIB // 2, 1002)], set()),
    "as much as a desktop may hold": ([drawing(1, 2 * GIB)], set()),
    "one byte more": ([drawing(1, 2 * GIB), drawing(2, 1)], {1}),
    "a program that computes by Vulkan": ([drawing(1, 70 * GIB)], {1}),
    "a job with a context of EGL": ([drawing(1, 70 * GIB, **both)], {1}),
    "a job beside a desktop of its user": ([drawing(1, 900 * MIB), drawing(2, 9 * GIB, **both), drawing(3, GIB)], {2}),
    "a job beside a desktop of another user": ([drawing(1, 900 * MIB), drawing(2, 9 * GIB, 1002, **both)], {2}),
    "many small ones of a user": ([drawing(pid, GIB) for pid in range(1, 21)], set(range(1, 19))),
    "one of nobody known": ([drawing(1, 70 * GIB, None)], {1}),
}


@pytest.mark.parametrize("what", DRAWING)
def test_graphics_are_use_beyond_what_a_desktop_holds_of_that_user_alone_and_the_largest_first(what):
    processes, beyond = DRAWING[what]
    snapshot = a_snapshot(
        a_device(processes=tuple(processes), memory_used=sum(process.memory_used or 0 for process in processes))
    )
    found = uses(snapshot)
    rows = who.to_json(snapshot, found)["devices"][0]["processes"]
    judged = {finding.subject.pid for finding in UnclaimedRule().check(RuleView(snapshot))}

    assert {row["pid"] for row in rows if row["computes"]} == beyond
    assert found[0].state == ("unclaimed_use" if beyond else "free")
    assert bool(choose(snapshot, Request(), {}).devices) == (not beyond)
    assert judged == {process.pid for process in processes if process.pid in beyond and process.uid is not None}


def test_all_uids_that_root_has_given_to_a_user_have_one_desktop_between_them(tmp_path, monkeypatch):
    subuids = tmp_path / "subuid"
    subuids.write_text("1001:100000:65536\n")
    monkeypatch.setattr(users, "SUBUIDS", str(subuids))
    processes = [drawing(pid, GIB, 100_000 + pid, user=None) for pid in range(1, 5)] + [drawing(9, GIB)]
    device = a_device(processes=tuple(processes), memory_used=5 * GIB)

    assert beyond_desktop(device) == {1, 2, 3}
    assert beyond_desktop(device, 4 * GIB) == {1}
    assert beyond_desktop(replace(device, desktop_memory=5 * GIB)) == set()


def test_who_and_top_say_of_a_process_that_it_has_ended():
    snapshot = a_snapshot(a_device(processes=(ENDED, a_process()), memory_used=20 * GIB))
    found = uses(snapshot)
    scene = Scene(snapshot, found)
    lines = [line.text for line in page(scene, History(), ScreenView(mode="compact"), 120, 60)]

    for screen in (who.to_text(snapshot, found), lines):
        (told,) = [line for line in screen if "4000" in line.split()]
        assert "has ended" in told and "no claim" not in told
    rows = who.to_json(snapshot, found)["devices"][0]["processes"]
    assert [(row["ended"], row["computes"]) for row in rows] == [(True, False), (False, True)]


SECOND_COPIES = [
    ("gpuguard.eligibility.occupants", lambda device, *_: tuple(p for p in device.processes or () if p.kind != "mps")),
    (
        "gpuguard.eligibility.hiding_use",
        lambda devices, *_: {d.uuid for d in devices if (d.memory_used or 0) > 512 * MIB},
    ),
    ("gpuguard.metrics.families.computes", lambda process, _: process.kind != "graphics"),
    ("gpuguard.views.who.may_compute", lambda process, _: process.kind != "graphics"),
    ("gpuguard.policies.view.computes", lambda process, _: process.kind in ("compute", "mps")),
    ("gpuguard.top.process_table.may_compute", lambda process, _: process.kind != "graphics"),
    ("gpuguard.top.devices.LABELS", dict.fromkeys(who.LABELS, ("free", ""))),
]


@pytest.mark.parametrize(("name", "copy"), SECOND_COPIES, ids=[name for name, _ in SECOND_COPIES])
def test_a_second_copy_of_a_decision_is_found(monkeypatch, name, copy):
    monkeypatch.setattr(name, copy)

    with pytest.raises(AssertionError, match="machine"):
        check(range(MACHINES))


def unclaimed_machines() -> Iterator[tuple[int, Snapshot]]:
    for seed in range(STARTS):
        snapshot, _ = a_random_machine(seed)
        # Without a list of processes the driver would be asked for it again and again: its Gap is not played here.
        whole = [device for device in snapshot.devices if not device.mig_mode and device.processes is not None]
        if whole:
            yield seed, a_snapshot(*whole)


def test_a_start_takes_what_is_free_though_it_reads_less_of_the_driver(tmp_path: Path):
    directory = lock_directory(str(tmp_path))
    for seed, snapshot in unclaimed_machines():
        free = {use.device.uuid for use in uses(snapshot) if use.state in FREE}
        driver = Reticent(*snapshot.devices)
        for number in (1, len(free)):
            _, choice = preview(driver, Request(num_gpus=max(1, number)), directory, {})
            assert {device.uuid for device in choice.devices} <= free, seed
            assert len(choice.devices) == min(number, len(free)), seed
        if free:
            with acquire(driver, Request(num_gpus=len(free)), directory, environ={}) as claim:
                assert {device.uuid for device in claim} == free, seed
        with pytest.raises(NotEnoughGpus):
            acquire(driver, Request(num_gpus=len(free) + 1), directory, environ={})


def test_a_claim_is_as_old_as_the_daemon_knows_it():
    seen = a_snapshot(claims=(a_claim_record(since=DAEMONS_DATE),))
    renewed = (a_claim_record(since=seen.taken_at), a_claim_record(id="new", since=seen.taken_at - 5))

    def read(*_: object) -> tuple[ClaimRecord, ...]:
        return renewed

    joined = with_claims(seen, lambda: lock_directory(make=False), read)
    assert [claim.since for claim in joined.claims] == [DAEMONS_DATE, seen.taken_at - 5]


def test_claims_that_cannot_be_read_are_one_gap_and_accuse_nobody():
    def read(*_: object) -> tuple[ClaimRecord, ...]:
        raise OSError(24, "Too many open files")

    before = a_snapshot(a_device(processes=(a_process(),)), gaps=(Gap(None, "claims", "of before"),))
    joined = with_claims(before, lambda: lock_directory(make=False), read)

    assert [gap.field for gap in joined.gaps] == ["claims"]
    assert re.search("ulimit -n", joined.gaps[0].reason)
    assert [use.state for use in uses(joined)] == ["unknown"]


def test_what_a_site_allows_the_desktop_of_a_user_is_what_every_command_goes_by(tmp_path: Path):
    with FakeNvml(tmp_path, devices=1) as fake, subprocess.Popen(["sleep", "600"]) as child:
        gpuguard = Gpuguard(tmp_path, fake)
        fake.add_process(0, child.pid, 3 * GIB, "graphics")
        directory, said = lock_directory(gpuguard.environment["GPUGUARD_DIR"]), []
        for most in (2 * GIB, 4 * GIB, 0):
            publish_desktop_memory(directory, most)
            words = [sys.executable, "-c", IN_PYTHON]
            program = subprocess.run(words, env=gpuguard.environment, stderr=subprocess.DEVNULL, timeout=60)
            said.append(
                {
                    gpuguard.json("who")["devices"][0]["state"] == "free",
                    gpuguard.json("explain")["devices"][0]["eligible"],
                    bool(
                        re.search(r'^gpuguard_device_state\{.*"free".*\} 1$', gpuguard("metrics").stdout, re.MULTILINE)
                    ),
                    gpuguard("run", "--no-wait", "--", "true").returncode == 0,
                    program.returncode == 0,
                }
            )
        child.kill()

    assert said == [{False}, {True}, {False}]


@pytest.mark.parametrize("told", ["", "{}", "[]", *(f'{{"desktop_memory_bytes": {n}}}' for n in ("-1", "1e99", 2**40))])
def test_a_damaged_file_allows_what_is_usual(tmp_path: Path, told: str):
    directory = lock_directory(str(tmp_path))
    publish_desktop_memory(directory, GIB)
    assert desktop_memory(lambda: directory) == GIB

    Path(daemon_files(directory).file("desktop.json")).write_text(told)
    assert desktop_memory(lambda: directory) == 2 * GIB


IN_PYTHON = "import gpuguard; gpuguard.select_devices(1)"
PYTHON = """
import gpuguard
from gpuguard.device_state import uses
print([use.state for use in uses(gpuguard.who())], [device.index for device in gpuguard.select_devices(2)])
"""


def test_every_command_says_the_same_of_a_desktop_a_quarantine_and_a_job(tmp_path: Path):
    with FakeNvml(tmp_path, devices=4) as fake, subprocess.Popen(["sleep", "600"]) as child:
        gpuguard = Gpuguard(tmp_path, fake)
        fake.add_process(1, child.pid, GIB, "graphics")
        fake.add_process(3, child.pid, 20 * GIB, "compute")
        fake.add_process(3, child.pid, 20 * GIB, "graphics")
        assert gpuguard("quarantine", "2", "--reason", "XID 79").returncode == 0

        rows = json.loads(gpuguard("who", "--json").stdout)["devices"]
        explained = json.loads(gpuguard("explain", "--json").stdout)["devices"]
        page = gpuguard("metrics").stdout
        program = [sys.executable, "-c", PYTHON]
        in_python = subprocess.run(program, env=gpuguard.environment, capture_output=True, text=True, timeout=60)
        top = gpuguard("top", "--once").stdout
        started = gpuguard("run", "-n", "2", "--no-wait", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        too_many = gpuguard("run", "-n", "3", "--no-wait", "--", "true")
        child.kill()

    states = ["free", "free", "quarantined", "unclaimed_use"]
    assert [row["exact_state"] for row in rows] == states
    assert [row["eligible"] for row in explained] == [True, True, False, False]
    told = re.findall(r"^gpuguard_device_state\{(.*)\} 1$", page, re.MULTILINE)
    assert all(any(row["uuid"] in labels and f'"{row["state"]}"' in labels for labels in told) for row in rows)
    assert in_python.stdout.strip() == f"{states} [0, 1]", in_python.stderr
    assert all(word in top for word in ("free", "quarantined", "used without a claim"))
    assert (started.stdout.strip(), too_many.returncode) == ("0,1", 75)
