"""Each document that gpuguard reads, with one place that is other than gpuguard writes it, or with damaged bytes.

It is read as what it says, as nothing, or refused in the words of an error of ours; nothing else gets out, and it takes
no time.  Views show it in harmless characters.  Whole commands beside such files: test_damaged_files; the socket:
test_socket_server; YAML: test_policy_mutations; XML: test_smi; HTTP: test_metrics; recordings: test_recordings.
"""

import fcntl
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from chances import THE_SAME, luck, often
from nodes import start
from structures import mutants
from top_scenes import page_of, texts

from gpuguard import jsonio
from gpuguard import source as state
from gpuguard.backends import simulated, simulated_node
from gpuguard.backtest import recordings
from gpuguard.claims import grants, records, restrictions
from gpuguard.claims.directory import LockDirectory, daemon_files, lock_directory
from gpuguard.claims.restrictions import boot_id
from gpuguard.cli.restrictions import line_of
from gpuguard.daemon.exemptions import Exemptions
from gpuguard.device_state import uses
from gpuguard.enforcement import guard_limits
from gpuguard.errors import BackendError, DriverUnresponsive, GpuguardError
from gpuguard.history.audit_log import append, decoded
from gpuguard.metrics.exposition import prometheus_text
from gpuguard.metrics.facts import MetricFacts
from gpuguard.model import ALL_FIELDS, ClaimRecord, Event, Snapshot
from gpuguard.procfs import process_facts
from gpuguard.queue import estimates, reservations, tickets
from gpuguard.queue.priority import Ticket
from gpuguard.request import Request
from gpuguard.top.page import page
from gpuguard.top.scene import History, Scene, ScreenView
from gpuguard.top.scene_source import SceneFeed
from gpuguard.views import events, who
from gpuguard.views.query import APP_FIELDS, GPU_FIELDS, csv_lines, query_of, to_json
from gpuguard.views.text import json_text
from gpuguard.web.feed import METRICS, ChartRequest, FrameFeed

HANG_SECONDS = 60.0
NOW = time.time()
Reader = Callable[[Path, bytes], object]


def shown(snapshot: Snapshot) -> None:
    """All that most commands make of a snapshot."""
    if len(snapshot.devices) > 1000:
        return  # it takes 4 s
    found = uses(snapshot, process_facts(snapshot))
    "\n".join(who.to_text(snapshot, found, width=80)).encode()
    json_text(who.to_json(snapshot, found))
    prometheus_text(MetricFacts(NOW, "1", snapshot), ["dcgm"]).encode()


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
        directory, name = (
            directory_in(place),
            {restrictions.KEPT: "7 GPU-1", restrictions.DENIED: "7"}.get(kind, "GPU-1"),
        )
        whole = restrictions.Restriction(name, NOW, NOW + 100, "why", "by", "user")
        restrictions.change(
            directory, kind, lambda them: them.update({"x": whole, "y": restrictions.Restriction("GPU-2", NOW)})
        )
        return json.loads(Path(daemon_files(directory).file(f"{kind}.json")).read_bytes())

    return written


def of_marks(kind: str) -> Reader:
    def read(place: Path, encoded: bytes) -> None:
        directory = directory_in(place)
        Path(daemon_files(directory).file(f"{kind}.json")).write_bytes(encoded)
        for mark in restrictions.read_restrictions(directory, kind, NOW).values():
            assert all(text.isprintable() for text in (line_of(mark, NOW), restrictions.denial_text(mark)))
            json_text(restrictions.to_json(mark))
        Exemptions(directory, lambda kept: None, lambda: (), lambda event: None)
        restrictions.restrictions_against(directory, ["GPU-1"], 7, NOW)

    return read


def a_deed(place: Path) -> Any:
    facts = {"clock_seconds": 5.0, "boot": boot_id(), "signature": "s", "start_time_seconds": 1.0, "policy": "p"}
    named = {"user": "alice", "devices": ("GPU-1",), "pid": 4711, "claim": "c1", "message": "uses 41.0GiB"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("GPUGUARD_EVENTS", str(place / "events.jsonl"))
        assert append(Event(time=NOW, kind="terminate", outcome="about to", **named, facts=tuple(facts.items())))
    return json.loads((place / "events.jsonl").read_bytes())


def of_events(place: Path, encoded: bytes) -> None:
    found, ignored = decoded([encoded])
    some = events.EventFilter(frozenset({"alice"}), ("GPU",), frozenset({"p"}), 1.0)
    for wanted in (events.EventFilter(), some):
        chosen = events.in_order(found, wanted)
        assert all(events.to_text(line).isprintable() for line in chosen)
        json_text(events.to_json(chosen, ignored))


def of_deeds(place: Path, encoded: bytes) -> None:
    path = place / "log"
    path.write_bytes(encoded + b"\n")
    guard_limits.recover_actions(str(path), 10.0, NOW + 5)


JOBS = (
    {"schema": 1, "kind": "claim", "outcome": "started", "claim": "c", "message": "python x.py"},
    {"schema": 1, "kind": "release", "outcome": "ended", "claim": "c", "facts": {"wall_time_seconds": 5.0}},
)


def of_jobs(which: int) -> Reader:
    def read(place: Path, encoded: bytes) -> None:
        lines = [json.dumps(one).encode() for one in JOBS]
        lines[which] = encoded
        (place / "log").write_bytes(b"\n".join(lines * 4) + b"\n")
        lasts = estimates.expected_seconds(["python", "x.py"], str(place / "log"))
        assert lasts is None or 0 <= lasts < float("inf")

    return read


def a_sample(place: Path) -> Any:
    view = recordings.RuleView(a_whole_snapshot(place))
    host = {"4711@1000.0": {"cpu": 5.0, "memory": 1, "network": 2.0, "terminal": "pts/1"}}
    return recordings.pack(view) | {
        "host": host,
        "groups": {"7": ["g"]},
        "seen": {"4711": [1, "S", 5.0, None], "1": None},
    }


def of_samples(place: Path, encoded: bytes) -> None:
    with suppress(ValueError):
        sample = json.loads(encoded)
        if isinstance(sample, dict):
            shown(recordings.unpack(sample).snapshot)


def a_node(place: Path) -> Any:
    spec = str(place / "node")
    start(spec, "1xA100-80GB:mig=3g.40gb")
    simulated.use("0", GIB, 50.0, spec=spec)
    return json.loads((place / "node" / simulated_node.STATE).read_bytes())


def of_nodes(place: Path, encoded: bytes) -> None:
    (place / "node" / simulated_node.STATE).write_bytes(encoded)
    node = simulated_node.load(str(place / "node"))
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


PIECES_OF_JSON = (
    b"null", b"true", b"-1", b"0.5", b"1e999", b"-1e999", b"NaN", b"9" * 400, b"18446744073709551616", b"[]", b"{}",
    b'""', b'"\\ud800"', b'"\\u0000\\u001b[2J"', b"[" * 500, b'["x", 1]', b'{"x": 1}', b"1e9", b'"1"',
)  # fmt: skip
PIECES = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\xff", b"\x00", b"\n", b"\\", b"")


def damaged(document: bytes, number: int) -> bytes:
    """*document*, in JSON, with values, bytes or parts that are others, doubled or missing."""
    chance = luck(number)
    for _ in range(chance.choice((1, 1, 2, 5))):
        words = list(re.finditer(rb'-?[0-9.]+(e[0-9]+)?|"[^"]*"|null|true|false', document))
        start = chance.randrange(len(document) + 1)
        end = min(len(document), start + chance.choice((0, 1, 1, 3, 20)))
        piece = chance.choice((*PIECES, bytes([chance.randrange(256)]), document[start:end] * 2, document[:end][-40:]))
        if words and chance.random() < 0.6:
            (start, end), piece = chance.choice(words).span(), chance.choice(PIECES_OF_JSON)
        document = document[:start] + piece + document[end:]
    return document[: chance.randrange(len(document) + 1)] if number % 10 == 0 else document


@contextmanager
def planted(path: str, content: bytes) -> Iterator[None]:
    """A file with that content, locked as a living claim's and a ticket's are."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, content)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        os.unlink(path)


RESERVATION = {
    "schema": 1, "uid": os.geteuid(), "num_gpus": 1, "begins_unix_seconds": NOW - 10,
    "ends_unix_seconds": NOW + 1000, "devices": ["GPU-00000000"], "note": "n",
}  # fmt: skip
RECORD = {
    "devices": ["GPU-00000000"], "pid": 17, "since": 1.5e9, "note": "n", "command": ["python", "x"],
    "ends": 2e9, "expected": 1.0, "memory": 2**30, "slots": ["a"], "most": 3,
}  # fmt: skip


def is_a_record(record: ClaimRecord) -> bool:
    texts = (*record.devices, *record.slots, *(record.command or ()), record.note or "")
    numbers = [each for each in (record.since, record.ends, record.expected) if each is not None]
    whole = [each for each in (record.pid, record.memory, record.most) if each is not None]
    sound = all(type(each) is str for each in texts) and all(type(each) is int for each in whole)
    usable = all(type(each) in (int, float) for each in numbers) and all(0 <= each < 2**53 for each in numbers + whole)
    return sound and usable and record.uid == os.geteuid()


def a_ticket(place: Path) -> Any:
    request = Request(num_gpus=2, min_free=2**30, models=("A100*",), mine_as_free=frozenset({0}))
    times = {"time_limit": 60.0, "expected": 30.0}
    return tickets.ticket_content(
        Ticket("x", 0, "", 0.0, (request,), pid=os.getpid(), note="n", command=("a",), **times)
    )


def of_records(place: Path, encoded: bytes) -> None:
    directory = directory_in(place)
    with planted(records.record_path(directory, os.geteuid(), "abcd"), encoded):
        (record,) = records.read_records(directory)
    assert is_a_record(record), record


def of_tickets(place: Path, encoded: bytes) -> None:
    directory = directory_in(place)
    with planted(f"{directory.records}/{directory.prefix}ticket.{os.geteuid()}.abcd.json", encoded):
        found, ignored = tickets.read_tickets(directory)
    assert len(found) + len(ignored) == 1
    for one in found:
        assert type(one.priority) is int and abs(one.requests[0].num_gpus) <= 2**63, one


def of_reservations(place: Path, encoded: bytes) -> None:
    directory = directory_in(place)
    path = Path(f"{directory.records}/{directory.prefix}reserve.{os.geteuid()}.abcd.json")
    path.write_bytes(encoded)
    found, ignored, _ = reservations.read_reservations(directory, NOW)
    path.unlink(missing_ok=True)
    assert len(found) + len(ignored) <= 1
    assert all(type(one.num_gpus) is int and one.begins < one.ends for one in found), found


def of_letters(place: Path, encoded: bytes) -> None:
    descriptor = os.memfd_create("record")
    try:
        os.write(descriptor, json.dumps(RECORD).encode() + b"\n" + encoded + b"\n")
        assert all(isinstance(letter, records.ReleaseRequest) for letter in records.read_requests(descriptor))
    finally:
        os.close(descriptor)


# name -> what is written, by whom else than a test, and who reads it
READERS: dict[str, tuple[Callable[[Path], Any], Reader]] = {
    "record": (lambda place: RECORD, of_records),
    "letter": (lambda place: vars(records.ReleaseRequest(records.YIELD, "root", "why", NOW)), of_letters),
    "ticket": (a_ticket, of_tickets),
    "reservation": (lambda place: RESERVATION, of_reservations),
    "state": (a_state, of_state),
    "denied": (some_marks(restrictions.DENIED), of_marks(restrictions.DENIED)),
    "quarantined": (some_marks(restrictions.QUARANTINED), of_marks(restrictions.QUARANTINED)),
    "kept": (some_marks(restrictions.KEPT), of_marks(restrictions.KEPT)),
    "event": (a_deed, of_events),
    "deed": (a_deed, of_deeds),
    "a job's start": (lambda place: JOBS[0], of_jobs(0)),
    "a job's end": (lambda place: JOBS[1], of_jobs(1)),
    "sample": (a_sample, of_samples),
    "node": (a_node, of_nodes),
    "grant": (lambda place: vars(grants.Grant(7, "c1", GIB, 3, "GPU-1")), of_grants),
}


def read_all(place: Path, name: str, every: Iterable[tuple[str, bytes]]) -> None:
    for where, encoded in every:
        begun = time.monotonic()
        try:
            READERS[name][1](place, encoded)
        except GpuguardError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {where}") from error
        assert time.monotonic() - begun < HANG_SECONDS, f"{name}: {where}"


@pytest.mark.parametrize("name", READERS)
def test_a_document_with_one_other_place_is_read_as_what_it_says_or_not_at_all(tmp_path, name):
    read_all(tmp_path, name, mutants(READERS[name][0](tmp_path), brief=THE_SAME))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_document_is_read_as_what_it_says_or_not_at_all(tmp_path, name):
    whole = json.dumps(READERS[name][0](tmp_path)).encode()
    read_all(tmp_path, name, ((str(number), damaged(whole, number)) for number in range(often(250))))


def no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: whatever type stands there is believed."""
    monkeypatch.setattr(jsonio, "_checked", lambda value, *kinds: value)
    monkeypatch.setattr(jsonio, "_number", lambda value, *kinds: value)
    monkeypatch.setattr(tickets, "checked_number", lambda value, *_: value)


@pytest.mark.parametrize(
    ("name", "where"), [("state", "snapshot"), ("sample", "all"), ("node", "devices"), ("record", ""), ("ticket", "")]
)
def test_a_reader_that_believes_any_type_is_found(tmp_path, monkeypatch, name, where):
    no_check(monkeypatch)

    with pytest.raises(AssertionError, match=rf"^{name}: {where}"):
        test_a_document_with_one_other_place_is_read_as_what_it_says_or_not_at_all(tmp_path, name)


QUERIES = (query_of(",".join(GPU_FIELDS), apps=False), query_of(",".join(APP_FIELDS), apps=True))


NONE: frozenset[str] = frozenset()


def a_feed(place: Path, sample: Any) -> FrameFeed:
    """Of the page in the browser; somebody wants to see everything."""
    source: Any = SimpleNamespace(joined=lambda: (sample(), None), sample=lambda: (sample(), None))
    feed = FrameFeed(source, source, lock_directory(str(place / "claims")), lambda _: ())
    feed.throughput_viewers = 1
    return feed


def lines_of(snapshot: Snapshot) -> Iterator[str]:
    """What `query` and `top` print."""
    for query in QUERIES:
        yield from csv_lines(snapshot, query, NONE, header=True, units=True)
        json_text(to_json(snapshot, query))
    scene = Scene(snapshot, uses(snapshot))
    for width in (40, 200):
        for mode in ("full", "compact"):
            yield from texts(page_of(scene, width, 30, mode=mode, tree=True))


def seen_by_all_views(place: Path, only: str = "") -> int:
    """Show each snapshot that is other in one place, which begins with *only*; how many there were."""
    seen: list[Snapshot] = []
    feed = a_feed(place, lambda: seen[-1])
    for where, encoded in mutants(a_state(place)["snapshot"], brief=THE_SAME):
        if not where.startswith(only):
            continue
        try:
            seen.append(state.decode_snapshot(json.loads(encoded)))
        except (ValueError, ArithmeticError, TypeError, KeyError, AttributeError):
            continue  # as read_state()
        if len(seen[-1].devices) > 100:
            continue  # it takes seconds
        try:
            assert [line for line in lines_of(seen[-1]) if not line.isprintable()] == []
            assert b"inside gpuguard" not in feed._frame_text()
            for metric in METRICS:
                feed.drawn(ChartRequest(metric, 60.0))
        except Exception as error:
            raise AssertionError(where) from error
    return len(seen)


def test_no_value_of_a_snapshot_does_anything_to_a_terminal_or_ends_a_view(tmp_path):
    """What a recording calls the kind of a process went to the terminal of `top` as it stood."""
    assert seen_by_all_views(tmp_path) > 300


class Restless:
    """A driver whose devices come, go and change their places, and that does not answer once in a while."""

    def __init__(self) -> None:
        self.dice = random.Random(1)
        self.devices = [a_device(index, processes=(a_process(pid=os.getpid()),)) for index in range(4)]

    def sample(self, groups: object, devices: object = None) -> Snapshot:
        if self.dice.random() < 0.1:
            raise DriverUnresponsive("it hangs")
        some = self.dice.sample(self.devices, self.dice.randrange(5))
        moved = [replace(device, index=place) for place, device in enumerate(some)]
        return replace(a_snapshot(*moved), clock=time.clock_gettime(time.CLOCK_BOOTTIME))


def test_devices_that_come_and_go_between_two_looks_end_no_view(tmp_path):
    driver: Any = Restless()
    web = a_feed(tmp_path, lambda: driver.sample(None))
    claims = lock_directory(str(tmp_path / "claims"))
    top, history = SceneFeed("nvml", lambda: driver, lambda: claims, lambda: None), History()
    top.source.fresh = top.tree = True
    for _ in range(100):
        try:
            scene = top.sample()
        except BackendError:
            continue
        history.add(scene)
        for mode in ("full", "compact"):
            assert page(scene, history, ScreenView(mode=mode, tree=True), 100, 30)
        assert b"inside gpuguard" not in web._frame_text()
        for metric in METRICS:
            web.drawn(ChartRequest(metric, 60.0))


def test_a_view_that_shows_what_it_was_told_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("gpuguard.top.process_table.neutralise", str)

    with pytest.raises(AssertionError, match=r"^devices\.0\.processes\.0\.kind = half a pair$"):
        seen_by_all_views(tmp_path, only="devices.0.processes")
