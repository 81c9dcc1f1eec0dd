"""Each reader of a document, and whatever shows it: one place of it is other than gpuguard writes it.

It is read as what it says, as nothing, or refused in the words of an error of ours; nothing else gets out, and it takes
no time.  test_structure_commands has the files that strangers write, test_structure_door the socket.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_process, a_snapshot
from chances import THE_SAME
from nodes import start
from structures import mutants

from gpuguard import marks, state, typed
from gpuguard.ancestry import look_up
from gpuguard.backends import node_file, simulated
from gpuguard.claims import grants
from gpuguard.claims.daemonfiles import daemon_files
from gpuguard.claims.lockfiles import LockDirectory, lock_directory
from gpuguard.cli import mark_options
from gpuguard.cli.metrics_facts import text_of
from gpuguard.errors import GpuguardError
from gpuguard.guards import recall
from gpuguard.history import append
from gpuguard.line import expecting
from gpuguard.marks import boot_id
from gpuguard.model import ALL_FIELDS, Event, Snapshot
from gpuguard.rehearsals import tape
from gpuguard.services.keeping import Keeping
from gpuguard.views import events, who
from gpuguard.views.metrics import Facts
from gpuguard.views.text import json_text
from gpuguard.views.usage import uses

HANG_SECONDS = 60.0
NOW = time.time()
Reader = Callable[[Path, bytes], object]


def shown(snapshot: Snapshot) -> None:
    """All that most commands make of a snapshot."""
    if len(snapshot.devices) > 1000:
        return  # it takes 4 s
    found = uses(snapshot, look_up(snapshot))
    "\n".join(who.to_text(snapshot, found, width=80)).encode()
    json_text(who.to_json(snapshot, found))
    text_of(Facts(NOW, "1", snapshot), ["dcgm"]).encode()


def a_whole_snapshot(place: Path) -> Snapshot:
    """One in which as much as possible is known, as a backend reads it."""
    node = str(place / "node")
    start(node, "1xA100-80GB")
    simulated.use("0", GIB, 50.0, spec=node)
    device = simulated.open(node).sample(ALL_FIELDS).devices[0]
    device = replace(device, processes=(a_process(utilization=5.0, container="c", executable="/x"),))
    claim = a_claim_record(device, note="n", ends=NOW, expected=NOW, memory=GIB, slots=("x.slot0",), most=3)
    return a_snapshot(device, claims=(claim,), simulated=True, topology=(("a", "b", "NVLINK"),))


def directory_in(place: Path) -> LockDirectory:
    return lock_directory(str(place / "claims"))


def a_state(place: Path) -> Any:
    state.write_state(directory_in(place), a_whole_snapshot(place), 10.0)
    return json.loads(Path(daemon_files(directory_in(place)).file("state.json")).read_bytes())


def of_state(place: Path, encoded: bytes) -> None:
    directory = directory_in(place)
    Path(daemon_files(directory).file("state.json")).write_bytes(encoded)
    if snapshot := state.read_state(directory, 10_000.0, simulated=True):
        shown(snapshot)


def some_marks(kind: str) -> Callable[[Path], Any]:
    def written(place: Path) -> Any:
        directory, name = directory_in(place), {marks.KEPT: "7 GPU-1", marks.DENIED: "7"}.get(kind, "GPU-1")
        whole = marks.Mark(name, NOW, NOW + 100, "why", "by", "user")
        marks.change(directory, kind, lambda them: them.update({"x": whole, "y": marks.Mark("GPU-2", NOW)}))
        return json.loads(Path(daemon_files(directory).file(f"{kind}.json")).read_bytes())

    return written


def of_marks(kind: str) -> Reader:
    def read(place: Path, encoded: bytes) -> None:
        directory = directory_in(place)
        Path(daemon_files(directory).file(f"{kind}.json")).write_bytes(encoded)
        for mark in marks.read_marks(directory, kind, NOW).values():
            assert all(text.isprintable() for text in (mark_options.line_of(mark, NOW), marks.denial(mark)))
            json_text(marks.to_json(mark))
        Keeping(directory, lambda kept: None, lambda: (), lambda event: None)
        marks.against(directory, ["GPU-1"], 7, NOW)

    return read


def a_deed(place: Path) -> Any:
    facts = {"clock_seconds": 5.0, "boot": boot_id(), "signature": "s", "start_time_seconds": 1.0, "policy": "p"}
    named = "alice", ("GPU-1",), 4711, "c1", "uses 41.0GiB"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPUGUARD_EVENTS", str(place / "events.jsonl"))
        assert append(Event(NOW, "terminate", "about to", *named, tuple(facts.items())))
    return json.loads((place / "events.jsonl").read_bytes())


def of_events(place: Path, encoded: bytes) -> None:
    found, torn = events.decoded([encoded])
    some = events.Wanted(frozenset({"alice"}), ("GPU",), frozenset({"p"}), 1.0)
    for wanted in (events.Wanted(), some):
        chosen = events.in_order(found, wanted)
        assert all(events.to_text(line).isprintable() for line in chosen)
        json_text(events.to_json(chosen, torn))


def of_deeds(place: Path, encoded: bytes) -> None:
    path = place / "log"
    path.write_bytes(encoded + b"\n")
    recall.recalled(str(path), 10.0, NOW + 5)


JOBS = (
    {"schema": 1, "kind": "claim", "outcome": "started", "claim": "c", "message": "python x.py"},
    {"schema": 1, "kind": "release", "outcome": "ended", "claim": "c", "facts": {"wall_time_seconds": 5.0}},
)


def of_jobs(which: int) -> Reader:
    def read(place: Path, encoded: bytes) -> None:
        lines = [json.dumps(one).encode() for one in JOBS]
        lines[which] = encoded
        (place / "log").write_bytes(b"\n".join(lines * 4) + b"\n")
        lasts = expecting.expected_seconds(["python", "x.py"], str(place / "log"))
        assert lasts is None or 0 <= lasts < float("inf")

    return read


def a_sample(place: Path) -> Any:
    view = tape.View(a_whole_snapshot(place))
    host = {"4711@1000.0": {"cpu": 5.0, "memory": 1, "network": 2.0, "terminal": "pts/1"}}
    return tape.pack(view) | {"host": host, "groups": {"7": ["g"]}, "seen": {"4711": [1, "S", 5.0, None], "1": None}}


def of_samples(place: Path, encoded: bytes) -> None:
    with suppress(ValueError):
        sample = json.loads(encoded)
        if isinstance(sample, dict):
            shown(tape.unpack(sample).snapshot)


LINES: tuple[dict[str, Any], ...] = (
    {"gpuguard_recording": 1, "interval_seconds": 2.0},
    {"whole": {"a": [1, {"x": [1, 2]}], "b": 2}},
    {"changed": {"a": {"#": {"0": 2, "1": {"x": {"=": [1]}}}}, "-": ["b"]}},
)


def of_lines(which: int) -> Reader:
    def read(place: Path, encoded: bytes) -> None:
        lines = [json.dumps(one).encode() for one in LINES]
        lines[which] = encoded
        path = place / "a.rec"
        path.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", 1))
        list(tape.views(str(path)))

    return read


def a_node(place: Path) -> Any:
    spec = str(place / "node")
    start(spec, "1xA100-80GB:mig=3g.40gb")
    simulated.use("0", GIB, 50.0, spec=spec)
    return json.loads((place / "node" / node_file.STATE).read_bytes())


def of_nodes(place: Path, encoded: bytes) -> None:
    (place / "node" / node_file.STATE).write_bytes(encoded)
    node = node_file.load(str(place / "node"))
    if node and all(device.latency < 1 for device in node.devices):
        shown(simulated.open(str(place / "node")).sample(ALL_FIELDS))


def of_grants(place: Path, encoded: bytes) -> None:
    descriptor = os.memfd_create("lock")
    try:
        os.write(descriptor, encoded)
        grant = grants._grant_in(descriptor)
    finally:
        os.close(descriptor)
    if grant:
        json_text(vars(grant.confirmed(a_claim_record())))


# name -> what is written, by whom else than a test, and who reads it
READERS: dict[str, tuple[Callable[[Path], Any], Reader]] = {
    "state": (a_state, of_state),
    "denied": (some_marks(marks.DENIED), of_marks(marks.DENIED)),
    "quarantined": (some_marks(marks.QUARANTINED), of_marks(marks.QUARANTINED)),
    "kept": (some_marks(marks.KEPT), of_marks(marks.KEPT)),
    "event": (a_deed, of_events),
    "deed": (a_deed, of_deeds),
    "a job's start": (lambda place: JOBS[0], of_jobs(0)),
    "a job's end": (lambda place: JOBS[1], of_jobs(1)),
    "sample": (a_sample, of_samples),
    "recording": (lambda place: LINES[0], of_lines(0)),
    "whole sample": (lambda place: LINES[1], of_lines(1)),
    "changed sample": (lambda place: LINES[2], of_lines(2)),
    "node": (a_node, of_nodes),
    "grant": (lambda place: vars(grants.Grant(7, "c1", GIB, 3, "GPU-1")), of_grants),
}


LONG = frozenset({"state", "node", "sample"})  # of some 100 places: with all values in long runs alone


@pytest.mark.parametrize("name", READERS)
def test_what_is_read_is_what_it_says_or_nothing_or_refused(tmp_path, name):
    write, read = READERS[name]
    for where, encoded in mutants(write(tmp_path), brief=THE_SAME and name in LONG):
        begun = time.monotonic()
        try:
            read(tmp_path, encoded)
        except GpuguardError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {where}") from error
        assert time.monotonic() - begun < HANG_SECONDS, f"{name}: {where}"


@pytest.mark.parametrize(("name", "where"), [("state", "snapshot"), ("sample", "snapshot"), ("node", "devices")])
def test_a_reader_that_believes_any_type_is_found(tmp_path, monkeypatch, name, where):
    monkeypatch.setattr(typed, "_exactly", lambda *kinds: lambda value: value)
    monkeypatch.setattr(typed, "_PLAIN", dict.fromkeys(typed._PLAIN, lambda value: value))
    monkeypatch.setattr(typed, "_checks", {})

    with pytest.raises(AssertionError, match=rf"^{name}: {where}"):
        test_what_is_read_is_what_it_says_or_nothing_or_refused(tmp_path, name)
