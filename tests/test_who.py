"""Who uses what, judged from a snapshot, and the screen and the JSON of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import (
    GIB,
    a_claim_record,
    a_device,
    a_mig_instance,
    a_process,
    a_reservation,
    a_reserved,
    a_snapshot,
    a_uuid,
)

from gpuguard import device_state
from gpuguard.device_state import user_totals, uses
from gpuguard.locale.messages import MESSAGE_IDS
from gpuguard.model import Gap, ProcessStat
from gpuguard.queue.priority import Ticket
from gpuguard.queue.reservations import ReservationStatus
from gpuguard.queue.tickets import IgnoredFile
from gpuguard.request import Request
from gpuguard.sanitize import display_width
from gpuguard.views.text import json_text
from gpuguard.views.who import LABELS, WaitingRequests, gap_lines, to_json, to_text

BUSY: dict[str, Any] = {"memory_used": 10 * GIB, "utilization": 90.0}
ALICE = a_process(pid=4711)
BOB = a_process(pid=4800, uid=1002, user="bob")


def a_ticket(user, pid, *, since=0.0, **fields):
    return Ticket("t", 1002, user, since, (Request(num_gpus=2),), pid=pid, **fields)


def state_of(device, *claims, **fields):
    return uses(a_snapshot(device, claims=claims, **fields))[0].state


STATES = [
    ("free", a_device(), ()),
    ("free", a_device(processes=(a_process(kind="graphics", memory_used=2 * GIB),), memory_used=2 * GIB), ()),
    ("unclaimed_use", a_device(processes=(a_process(kind="graphics"),), memory_used=10 * GIB), ()),
    ("free", a_device(processes=(a_process(kind="compute+graphics", memory_used=25 * 2**20),)), ()),
    ("free", a_device(), (a_claim_record(alive=False),)),
    ("claimed", a_device(), (a_claim_record(),)),
    ("in_use", a_device(processes=(ALICE,), **BUSY), (a_claim_record(),)),
    ("in_use", a_device(processes=(), **BUSY), (a_claim_record(),)),
    ("in_use", a_device(processes=(ALICE,), utilization=None), (a_claim_record(),)),
    ("in_use", a_device(processes=(ALICE,), memory_used=10 * GIB, utilization=1.0), (a_claim_record(),)),
    ("idle", a_device(processes=(ALICE,), memory_used=10 * GIB, utilization=0.9), (a_claim_record(),)),
    ("unclaimed_use", a_device(processes=(ALICE,), **BUSY), ()),
    ("unclaimed_use", a_device(processes=(), **BUSY), ()),
    ("unclaimed_use", a_device(processes=None, **BUSY), ()),
    ("unclaimed_use", a_device(processes=(BOB,), **BUSY), (a_claim_record(),)),
    ("unhealthy", a_device(problems=("lost",), processes=(ALICE,), **BUSY), (a_claim_record(),)),
    ("unhealthy", a_device(compute_mode="prohibited"), ()),
    ("unhealthy", a_device(mig_mode=True), ()),  # divided, and no instance
    ("claimed", a_device(asleep=True, processes=None, memory_used=0), (a_claim_record(),)),
    ("unknown", a_device(asleep=True, processes=None, memory_used=None), ()),
    ("unclaimed_use", a_device(asleep=True, processes=None, **BUSY), ()),
    ("unclaimed_use", a_device(asleep=True, processes=(BOB,)), ()),
    ("free", a_device(processes=None), ()),  # judged by its memory, as a start judges it
    ("unknown", a_device(processes=None), (a_claim_record(),)),
    ("unknown", a_device(processes=None, memory_used=None), (a_claim_record(),)),
    ("unknown", a_device(processes=(a_process(pid=0),), processes_plausible=False), ()),
    ("in_use", a_device(processes=(BOB,), processes_plausible=False, **BUSY), (a_claim_record(),)),
    ("free", a_device(processes=(a_process(kind="graphics", memory_used=GIB),), processes_plausible=False), ()),
    ("claimed", a_device(), (a_claim_record(uid=-1, hidden=True),)),
    ("unclaimed_use", a_device(processes=(ALICE,), **BUSY), (a_claim_record(uid=-1, hidden=True),)),
    ("unclaimed_use", a_device(processes=(a_process(kind="compute+graphics"),), compute_mode="exclusive_process"), ()),
]


@pytest.mark.parametrize(("state", "device", "claims"), STATES)
def test_the_state_says_what_the_snapshot_proves(state, device, claims):
    assert state_of(device, *claims) == state


def test_every_state_occurs_here_and_has_its_words():
    assert {state for state, _, _ in STATES} == set(device_state.STATES)
    assert set(LABELS) == set(device_state.EXACT_STATES)


EXACT = [
    ("quarantined", "unhealthy", a_device(), {"quarantined": ((a_uuid(0), "quarantined by the administrator"),)}),
    ("unhealthy", "unhealthy", a_device(problems=("lost",)), {"quarantined": ((a_uuid(0), "quarantined"),)}),
    ("reserved", "free", a_device(), {"reserved": ((a_uuid(0), "kept for alice's reservation until 12:00"),)}),
    ("asleep", "free", a_device(asleep=True), {}),
    ("asleep", "free", a_device(asleep=True, processes=None, memory_used=0), {}),
    ("reserved", "free", a_device(asleep=True), {"reserved": ((a_uuid(0), "kept for alice"),)}),
    ("quarantined", "unhealthy", a_device(asleep=True), {"quarantined": ((a_uuid(0), "quarantined"),)}),
    ("in_use", "in_use", a_device(processes=(ALICE,), **BUSY), {"reserved": ((a_uuid(0), "kept for alice"),),
                                                                "claims": (a_claim_record(),)}),
]  # fmt: skip


@pytest.mark.parametrize(("exact", "plain", "device", "fields"), EXACT)
def test_the_exact_state_says_more_and_the_plain_one_what_scripts_know(exact, plain, device, fields):
    snapshot = a_snapshot(device, **fields)
    row = to_json(snapshot, uses(snapshot))["devices"][0]

    assert (row["exact_state"], row["state"]) == (exact, plain)
    assert bool(row["problems"]) == (plain == "unhealthy")


ROOT = a_process(uid=0, user="root")
OWNERS = {  # what it shows: (the process, the claims, what is known of processes, the claim that it belongs to)
    "a holder of the lock, whatever its user": (BOB, (a_claim_record(holders=(BOB.pid,)),), None, "a1b2c3"),
    "a descendant of the job": (
        BOB,
        (a_claim_record(pid=4700),),
        {BOB.pid: ProcessStat(4799, "S"), 4799: ProcessStat(4700, "S")},
        "a1b2c3",
    ),
    "ancestors in a circle": (
        BOB,
        (a_claim_record(),),
        {BOB.pid: ProcessStat(5, "S"), 5: ProcessStat(BOB.pid, "S")},
        None,
    ),
    "the same user": (ALICE, (a_claim_record(id="b", uid=1002), a_claim_record(id="a")), None, "a"),
    "root in a container, for the only claim": (ROOT, (a_claim_record(),), None, "a1b2c3"),
    "root in a container, of two claims": (ROOT, (a_claim_record(id="a"), a_claim_record(id="b")), None, None),
    "a claim on another GPU": (ALICE, (a_claim_record(a_uuid(7), holders=(ALICE.pid,)),), None, None),
}


@pytest.mark.parametrize(("process", "claims", "stats", "claim"), OWNERS.values(), ids=OWNERS)
def test_a_process_belongs_to_the_claim_that_covers_it(process, claims, stats, claim):
    (use,) = uses(a_snapshot(a_device(processes=(process,), **BUSY), claims=claims), stats)

    assert [running.claim for running in use.processes or ()] == [claim]


def test_a_claim_that_is_only_of_the_same_user_is_shown_as_a_guess():
    machine = a_snapshot(a_device(processes=(ALICE,), **BUSY), claims=(a_claim_record(holders=(4701,)),))
    (use,) = uses(machine, {ALICE.pid: ProcessStat(1, "S")})

    assert [running.guessed for running in use.processes or ()] == [True]
    assert "perhaps a1b2c3" in "\n".join(to_text(machine, [use]))


def test_a_job_in_ctrl_z_is_stopped_though_its_wrapper_sleeps():
    seen = {4700: ProcessStat(1, "S"), 4701: ProcessStat(4700, "T")}
    stopped = {}
    for holders, stats in (((4700, 4701), seen), ((4700,), seen), ((4700,), {})):
        (use,) = uses(a_snapshot(claims=(a_claim_record(holders=holders),)), stats)
        stopped[holders, bool(stats)] = use.claims[0].stopped

    assert stopped == {((4700, 4701), True): True, ((4700,), True): False, ((4700,), False): None}


def test_a_divided_device_is_what_its_instances_are_and_lists_no_process_twice():
    whole = a_device(mig_mode=True, processes=(ALICE,), memory_used=20 * GIB)
    busy = a_mig_instance(whole, 0, processes=(ALICE,), memory_used=10 * GIB)
    found = uses(a_snapshot(whole, busy, a_mig_instance(whole, 1), claims=(a_claim_record(busy),)))

    assert [use.state for use in found] == ["divided", "in_use", "free"]
    assert [use.plain_state for use in found] == ["in_use", "in_use", "free"]
    assert [len(use.processes or ()) for use in found] == [0, 1, 0]
    assert [(row.devices, row.memory_used) for row in user_totals(found)] == [(1, 10 * GIB)]


def test_totals_count_devices_processes_and_memory_per_user():
    found = uses(
        a_snapshot(
            a_device(processes=(ALICE, BOB), **BUSY),
            a_device(processes=(ALICE,), **BUSY),
            a_device(),
            claims=(a_claim_record(a_uuid(0), a_uuid(2)),),
        )
    )

    alice, bob = user_totals(found)
    assert (alice.user, alice.devices, alice.processes, alice.memory_used) == ("alice", 2, 1, 20 * GIB)
    assert (alice.claimed, alice.idle) == (2, 1)
    assert (bob.user, bob.devices, bob.claimed) == ("bob", 1, 0)


def test_a_sum_with_an_unknown_part_is_unknown():
    found = uses(a_snapshot(a_device(processes=(a_process(), a_process(pid=4712, memory_used=None)), **BUSY)))

    assert user_totals(found)[0].memory_used is None


def a_hostile_snapshot():
    """Everything at once, in the words of somebody who wants to fool the reader."""
    evil = "\x1b[2J\n\u202e\udcff李"
    record = {"note": evil, "command": ("python", evil), "user": f"李{evil}", "id": evil}
    process = a_process(pid=4711, command=(evil, "x" * 300), user=evil, container=evil * 5, working_directory=evil)
    return a_snapshot(
        a_device(0, name=evil, processes=(process,), **BUSY),
        a_device(1, problems=(evil,), utilization=None, temperature=None, power_draw=None, memory_used=None),
        claims=(a_claim_record(a_uuid(0), **record),),
        gaps=(Gap(a_uuid(1), evil, evil), Gap(None, "waiting", evil)),
        host=evil,
        driver_version=evil,
    )


@pytest.mark.parametrize("width", [None, 12, 80, 200])
def test_hostile_text_is_shown_and_does_no_harm(width):
    waiting = WaitingRequests((a_ticket("\x1bbob", 1, note="\n", command=("\u202e",)),))
    snapshot = a_hostile_snapshot()
    reserved = a_reserved(
        ReservationStatus(a_reservation(user=1, note="\x1b[31m"), "\n" * 3),
        ReservationStatus(a_reservation(id="\x1b", maker=0)),
        ignored=(IgnoredFile(1, "\x1b", "\u202e"), IgnoredFile(-1, "", "")),
    )
    lines = to_text(snapshot, uses(snapshot), waiting, reserved=reserved, width=width)

    assert all(line.isprintable() for line in lines)
    assert width is None or all(display_width(line) <= width for line in lines)


def test_the_screen_as_a_whole():
    snapshot = a_snapshot(
        a_device(processes=(ALICE,), **BUSY),
        a_device(processes=(a_process(pid=5, uid=7, user="李小明", container="0123456789abcdef"),), **BUSY),
        a_device(problems=("fell off the bus",), utilization=None, temperature=None, power_draw=None, memory_used=None),
        claims=(a_claim_record(note="sweep"),),
        gaps=(Gap(a_uuid(2), "utilization", "the driver call did not come back"),),
        simulated=True,
    )
    title, *rest = to_text(
        snapshot,
        uses(snapshot, {4700: None, 4711: ProcessStat(4700, "S")}),
        WaitingRequests((a_ticket("bob", 812, since=1_700_000_000.0 - 65),)),
    )

    assert re.fullmatch(r"SIMULATED node node1: 3 GPUs, driver 550\.54\.15, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", title)
    assert "\n".join(rest) == SCREEN.strip("\n")


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_folds_the_title_and_keeps_how_old_it_is(width):
    snapshot = a_snapshot(a_device(), host="a-server-with-a-name", simulated=True)
    lines = to_text(snapshot, uses(snapshot), width=width, age=7.0)

    title = " ".join(lines[: next(number for number, line in enumerate(lines) if line.startswith("GPU "))])
    assert title.endswith(" seen by the daemon 7s ago") and "a-server-with-a-name: 1 GPU, driver 550.54.15, " in title
    assert all(display_width(line) <= width for line in lines)


SCREEN = """
GPU  NAME                     MEMORY  UTIL  TEMP  POWER  STATE
0    H100 80GB HBM3  10.0GiB/80.0GiB   90%   35C    70W  in use
     claim  a1b2c3  alice      1h           orphaned  "sweep"  python train.py
     pid    4711    alice   2h30m  10.0GiB  a1b2c3    python train.py
1    H100 80GB HBM3  10.0GiB/80.0GiB   90%   35C    70W  used without a claim
     pid    5       李小明  2h30m  10.0GiB  no claim  in 0123456789ab: python train.py
2    H100 80GB HBM3      n/a/80.0GiB   n/a   n/a    n/a  unhealthy
     why: fell off the bus

USER    GPUS  PROCESSES   MEMORY  CLAIMED  IDLE
alice      1          1  10.0GiB        1     0
李小明     1          1  10.0GiB        0     0

WAITING  ID  GPUS  SINCE  PID  COMMAND
bob      t      2   1m5s  812  n/a

Not known:
  GPU 2: utilization: the driver call did not come back
"""


def test_gaps_of_gpus_that_were_not_asked_for_are_not_shown():
    gaps = (Gap(a_uuid(0), "utilization", "not supported"), Gap(None, "claims", "gone"))
    snapshot = a_snapshot(a_device(), a_device(1), gaps=gaps)

    lines = to_text(snapshot, [use for use in uses(snapshot) if use.device.index == 1])

    assert lines[-2:] == ["Not known:", "  claims: gone"]


def test_gaps_that_are_alike_take_one_line():
    whole = tuple(Gap(a_uuid(i), field, "not supported") for i in range(2) for field in ("temperature", "power_draw"))
    snapshot = a_snapshot(
        a_device(), a_device(), gaps=(*whole, Gap(a_uuid(1), "name", "no"), Gap(None, "claims", "gone"))
    )

    assert gap_lines(snapshot) == [
        "all GPUs: power_draw, temperature: not supported",
        "GPU 1: name: no",
        "claims: gone",
    ]


def test_a_gap_in_what_the_screen_does_not_show_is_left_to_the_json():
    snapshot = a_snapshot(gaps=(Gap(a_uuid(0), "fan_speed", "not supported"),))

    assert gap_lines(snapshot) == []
    assert len(to_json(snapshot, uses(snapshot))["gaps"]) == 1


def test_unknown_is_null_and_never_zero():
    read = ("used", "total", "free")
    rates = ("utilization", "memory_utilization", "temperature", "power_draw", "power_limit", "processes")
    nothing: dict[str, Any] = dict.fromkeys([*(f"memory_{name}" for name in read), *rates])
    snapshot = a_snapshot(a_device(**nothing))
    device = to_json(snapshot, uses(snapshot))["devices"][0]

    assert [name for name, value in device.items() if value == 0 and value is not False] == ["index"]
    assert device["processes"] is None


def test_a_lock_without_a_record_has_no_known_owner():
    snapshot = a_snapshot(claims=(a_claim_record(uid=-1, user="unknown", pid=None, since=None, command=None),))
    content = to_json(snapshot, uses(snapshot))

    assert (content["devices"][0]["claims"][0]["user"], content["users"][0]["user"]) == (None, None)


DOCUMENT = Path(__file__).parent.parent / "docs" / "json.md"


def documented(kind: str, text: str) -> dict[str, set[str]]:
    """The fields of each object of a command as the document has them: ``{"who.devices[]": {"index", ...}}``.

    A heading ``a, b`` is of two objects with the same fields.
    """
    sections = re.findall(r"^### (\S+(?:, \S+)*)\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    tables = {
        path: set(re.findall(r"^- `(\w+)`", body, re.MULTILINE))
        for paths, body in sections
        for path in paths.split(", ")
    }
    return {path: fields for path, fields in tables.items() if path.split(".")[0] == kind}


def printed(path: str, value: object, found: dict[str, set[str]] | None = None) -> dict[str, set[str]]:
    """The fields of every object in a real output, in the same form, without the messages of its sentences."""
    found = {} if found is None else found
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if name != MESSAGE_IDS}
        found.setdefault(path, set()).update(value)
        for name, inner in value.items():
            printed(f"{path}.{name}", inner, found)
    elif isinstance(value, list):
        for inner in value:
            printed(f"{path}[]", inner, found)
    return found


def a_full_output():
    snapshot = a_hostile_snapshot()
    waiting, reserved = WaitingRequests((a_ticket("bob", 1),)), a_reserved()
    return json.loads(json_text(to_json(snapshot, uses(snapshot), waiting, reserved=reserved)))


def test_the_document_describes_exactly_the_fields_that_are_printed():
    assert documented("who", DOCUMENT.read_text(encoding="utf-8")) == printed("who", a_full_output())


def test_a_field_missing_on_either_side_is_noticed():
    text = DOCUMENT.read_text(encoding="utf-8")

    assert documented("who", text.replace("- `kind`:", "- kind:")) != printed("who", a_full_output())
    assert documented("who", text) != printed("who", {**a_full_output(), "extra": 1})


def test_the_document_describes_every_state():
    states = DOCUMENT.read_text(encoding="utf-8").partition("\n#### state\n")[2].partition("\n#")[0]

    assert set(re.findall(r"^- `(\w+)`:", states, re.MULTILINE)) == set(device_state.STATES)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA RTX PRO 6000 Blackwell Server Edition"])
def test_on_a_terminal_a_long_name_gives_way_to_the_state(name):
    snapshot = a_snapshot(a_device(name=name, processes=(ALICE,), **BUSY))
    header, row = to_text(snapshot, uses(snapshot), width=80)[1:3]

    assert row.endswith("used without a claim") and row.index("used") == header.index("STATE")
