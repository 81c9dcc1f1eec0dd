"""Tickets of the queue: what the file system says counts, and what strangers write harms no user."""

import errno
import fcntl
import json
import math
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_snapshot
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from nodes import eventually
from queues import a_ticket

from gpuguard.claims.directory import LockDirectory, daemon_files
from gpuguard.errors import InvalidRequest
from gpuguard.locale.messages import Sentence, dumps, sentence
from gpuguard.queue import tickets
from gpuguard.queue.priority import PRIORITIES, QueueRules, Ticket
from gpuguard.queue.reasons import start_text
from gpuguard.queue.state import QueueFacts, queue_state
from gpuguard.queue.tickets import (
    MAX_BYTES,
    MOST_UNREAD,
    IgnoredFile,
    OwnTicket,
    last_heartbeat,
    read_tickets,
    ticket_content,
    unread_since,
    waiting_tickets,
    wake,
    wanted,
)
from gpuguard.request import ANY_MEMORY, Request
from gpuguard.users import user_name

ME = os.geteuid()
ALTERNATIVES = (
    Request(num_gpus=2, max_gpus=4, min_free=2**30, models=("A100*",), exclude=("0",), max_util=10.5, strategy="pack"),
    Request(share=True, memory=2**33, slots=3, mine_as_free=frozenset({0, 1000}), mig="3g.40gb", within=("GPU-a",)),
)


@pytest.fixture
def held(directory: LockDirectory) -> Iterator[OwnTicket]:
    ticket = OwnTicket(directory, ticket_content(a_ticket(note="hello")))
    yield ticket
    ticket.withdraw()


def file_of(directory: LockDirectory, name: str = f"{ME}.aaaa", kind: str = "ticket") -> str:
    return f"{directory.records}/{directory.prefix}{kind}.{name}" + (".json" if kind == "ticket" else "")


@pytest.fixture
def ticket(directory: LockDirectory, held: OwnTicket) -> Ticket:
    """The one that is held, as others read it."""
    return read_tickets(directory)[0][0]


@contextmanager
def planted(path: str, content: bytes) -> Iterator[int]:
    """A file with any content that is locked as a ticket is."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(descriptor, content)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def content(**changes: Any) -> bytes:
    return json.dumps({**ticket_content(a_ticket()), **changes}).encode()


def read(directory: LockDirectory, encoded: bytes, path: str = "") -> Ticket | IgnoredFile:
    path = path or file_of(directory)
    with planted(path, encoded):
        found, ignored = read_tickets(directory)
        os.unlink(path)
    assert len(found) + len(ignored) == 1
    return (found or ignored)[0]  # type: ignore[return-value]


def test_a_ticket_comes_back_as_it_was_written(directory: LockDirectory) -> None:
    times = {"time_limit": 60.0, "expected": 50.0, "promise": 1e9}
    texts = {"note": "é", "command": ("a", "b")}
    before = a_ticket(ME, owner_uid=ME, requests=ALTERNATIVES, priority=1, pid=os.getpid(), **times, **texts)
    held = OwnTicket(directory, ticket_content(before))
    ((after,), ignored) = read_tickets(directory)
    held.withdraw()

    assert ignored == []
    assert abs(after.since - time.time()) < 60.0
    assert replace(after, since=before.since) == replace(before, id=held.id, user=after.user)


def test_a_request_that_is_too_long_is_refused_and_leaves_nothing(directory: LockDirectory) -> None:
    with pytest.raises(InvalidRequest):
        OwnTicket(directory, {"requests": "x" * MAX_BYTES})

    assert os.listdir(directory.records) == []


def test_without_a_descriptor_left_nothing_stays(directory: LockDirectory) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    for extra in (0, 1):  # for the waker, then for the ticket
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + extra, hard))
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                OwnTicket(directory, ticket_content(a_ticket()))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir(directory.records) == []


def test_no_ticket_can_have_arrived_in_the_past(directory: LockDirectory, held: OwnTicket, ticket: Ticket) -> None:
    os.utime(file_of(directory, held.id), (1.0, 1.0))

    assert read_tickets(directory)[0][0].since >= ticket.since
    held.withdraw()
    forged = read(directory, content(since=1.0, since_unix_seconds=1.0))
    assert isinstance(forged, Ticket) and forged.since >= ticket.since


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*ticket_content(a_ticket()), "user", "uid", "id", "since", "served"]
CALM = settings(max_examples=300, suppress_health_check=list(HealthCheck))


def check(found: Ticket | IgnoredFile) -> None:
    assert found.uid == ME
    if isinstance(found, IgnoredFile):
        return
    assert found.id == f"{ME}.aaaa"
    assert 1 <= len(found.requests) <= tickets.MOST_ALTERNATIVES
    assert found.priority in PRIORITIES.values()
    assert abs(found.since - time.time()) < 60.0
    for seconds in (found.time_limit, found.expected, found.promise):
        assert seconds is None or (isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0.0)
    for text in (found.note, found.after):
        assert text is None or isinstance(text, str)
    assert found.command is None or all(isinstance(word, str) for word in found.command)
    blank = vars(Request())
    for request in found.requests:
        for name, value in vars(request).items():
            kind = type(blank[name])
            known = {"devices": tuple, "within": tuple, "mig": str}.get(name, int)
            fractional = name in ("min_free_fraction", "max_util", "max_memory_util", "max_temperature")
            assert value is None or type(value) in (kind, known, *[float] * fractional), (name, value)
            if isinstance(value, tuple):
                assert all(isinstance(each, str) for each in value)
        hash(request)


CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3)
CONDITIONS = st.dictionaries(st.sampled_from(sorted(vars(Request()))), JSON, min_size=1, max_size=3)


@CALM
@given(CHANGES | CONDITIONS.map(lambda condition: {"requests": [condition]}))
@example({"requests": [{"max_util": 10**400}]})
@example({"requests": [{"num_gpus": True}]})
@example({"requests": [{"share": 1}]})
def test_no_field_and_no_condition_of_a_ticket_ever_has_a_wrong_type(directory, changes: dict[str, Any]) -> None:
    check(read(directory, content(**changes)))


@pytest.mark.parametrize("name", [f"{ME + 1}.aaaa", *(f"{ME}.{name}" for name in ("a-b", "", "a.b", "a b", ".._x"))])
def test_a_ticket_whose_name_is_not_that_of_its_owner_does_not_count(directory: LockDirectory, name: str) -> None:
    ignored = read(directory, content(), file_of(directory, name))

    assert isinstance(ignored, IgnoredFile)
    assert (ignored.uid, ignored.reason) == (ME, "its name is not that of its owner")


WRONG = "it cannot be understood: "
NO_NUMBER, NO_REQUEST = f"{WRONG}a number or a time in it is none", f"{WRONG}it asks for nothing, or for too much"
LIMITS: list[tuple[bytes, str | None]] = [
    (b"[]", f"{WRONG}it is no object"),
    (b" " * (MAX_BYTES + 1), f"{WRONG}it is too long"),
    *((content(requests=[{}] * number), None) for number in (1, tickets.MOST_ALTERNATIVES)),
    *((content(requests=[{}] * number), NO_REQUEST) for number in (0, tickets.MOST_ALTERNATIVES + 1)),
    (content(requests={}), NO_REQUEST),
    (content(requests=[{"models": ["A"] * 16}]), None),
    (content(requests=[{"models": ["A"] * 17}]), f"{WRONG}it names too many models"),
    *((content(priority=number), None) for number in (-1, 1)),
    *((content(priority=number), NO_NUMBER) for number in (-2, 2)),
    *((content(pid=number), None) for number in (1, 2**22)),
    *((content(pid=number), NO_NUMBER) for number in (0, 2**22 + 1)),
    *(
        (content(**{f"{name}_seconds": number}), None if good else NO_NUMBER)
        for name, most in (
            ("time_limit", tickets.LONGEST_SECONDS),
            ("expected", tickets.LONGEST_SECONDS),
            ("promise_unix", tickets.LAST_TIME),
        )
        for number, good in ((0, True), (most, True), (-0.5, False), (most + 1, False))
    ),
    *((content(requests=[{"mine_as_free": [number]}]), None) for number in (0, 2**32)),
    *((content(requests=[{"mine_as_free": [number]}]), NO_NUMBER) for number in (-1, 2**32 + 1)),
]


@pytest.mark.parametrize(("encoded", "fault"), LIMITS, ids=map(str, range(len(LIMITS))))
def test_a_ticket_counts_up_to_what_can_be_true_and_beyond_it_is_said_what_is_wrong(directory, encoded, fault):
    found = read(directory, encoded)

    assert found == IgnoredFile(ME, f"{ME}.aaaa", fault) if fault else isinstance(found, Ticket)


def test_any_memory_as_the_version_before_wrote_it_is_any_memory():
    assert tickets.as_request({"tolerance": 2**63}) == Request(tolerance=ANY_MEMORY)


def test_a_start_is_recorded_for_its_user_and_found_by_those_who_ask_since_when(directory):
    assert not tickets.has_started(directory, ME, 0.0)
    assert tickets.last_started(directory, ME) is None
    tickets.record_start(directory, ME)
    file = file_of(directory, str(ME), "served")
    os.utime(file, (1000.0, 1000.0))

    assert [tickets.has_started(directory, ME, 1000.0 + late) for late in (-1, 0.01, 0.03)] == [True, True, False]
    assert not tickets.has_started(directory, ME + 1, 0.0)
    assert tickets.last_started(directory, ME) == 1000.0
    Path(file_of(directory, str(ME + 1), "served")).touch()
    assert tickets.has_started(directory, ME + 1, 1e12), "another user has made its file: it may have started"
    assert tickets.last_started(directory, ME + 1) is None


def test_a_start_that_the_daemon_has_recorded_counts_where_it_gives_the_locks(directory):
    kept, mine = replace(directory, keeper=ME), file_of(directory, str(ME), "served")
    tickets.record_start(kept, ME, by_daemon=True)
    os.utime(daemon_files(kept).file(f"served.{ME}"), (2000.0, 2000.0))
    assert (tickets.last_started(kept, ME), tickets.last_started(directory, ME)) == (2000.0, None)

    tickets.record_start(kept, ME)
    for seconds, last in ((1000.0, 2000.0), (3000.0, 3000.0)):
        os.utime(mine, (seconds, seconds))
        assert tickets.last_started(kept, ME) == last


def test_a_file_is_touched_only_where_it_is_the_owners(tmp_path):
    path = tmp_path / "file"
    assert tickets.touch(str(path)) and tickets.touch(str(path), os.geteuid())
    os.utime(path, (1000.0, 1000.0))

    assert not tickets.touch(str(path), os.geteuid() + 1)
    assert path.stat().st_mtime == 1000.0
    assert not tickets.touch(str(tmp_path / "no folder" / "file"))
    assert tickets.touch(str(path)) and abs(path.stat().st_mtime - time.time()) < 60.0


def test_the_ticket_of_a_process_is_found_by_its_name_and_by_its_id(directory, held, ticket):
    mine = Ticket(held.id, ME, ticket.user, 0.0, (), pid=os.getpid())

    assert tickets.tickets_of_process(directory, os.getpid()) == [mine]
    assert tickets.tickets_of_process(directory, 1) == tickets.tickets_of_process(directory, 2**22 + 1) == []
    assert tickets.read_ticket(directory, ME, held.id) == replace(ticket, served=None, owner_uid=None)
    assert tickets.read_ticket(directory, ME + 1, held.id) is None
    assert tickets.read_ticket(directory, ME, f"{ME}.gone") is tickets.read_ticket(directory, ME, f"{ME}.../x") is None
    assert tickets.ticket_path(directory, held.id) == file_of(directory, held.id)


def test_of_a_user_with_too_many_tickets_the_oldest_are_read_and_the_others_wait(directory, monkeypatch):
    monkeypatch.setattr(tickets, "MOST_OF_ONE", 3)
    requests = [2 * [Request()], [Request()], [Request()]]
    held = [OwnTicket(directory, ticket_content(a_ticket(requests=each, after=None))) for each in requests]
    held.insert(0, OwnTicket(directory, ticket_content(a_ticket(after="waits until process 1 has ended"))))
    names = [(float(number), os.path.basename(file_of(directory, each.id))) for number, each in enumerate(held)]
    monkeypatch.setattr(tickets, "files_by_user", lambda directory, is_wanted: {7: names})
    found, ignored = read_tickets(directory)
    for each in held:
        each.withdraw()

    assert [(ticket.id, ticket.owner_uid) for ticket in found] == [(each.id, 7) for each in held[:3]]
    assert ignored == [IgnoredFile(7, "1 more", f"{user_name(7)} has 3 before them", (names[3],))]


def test_what_is_no_ordinary_file_does_not_count(directory: LockDirectory, held: OwnTicket) -> None:
    os.symlink(file_of(directory, held.id), file_of(directory, f"{ME}.link"))
    os.mkfifo(file_of(directory, f"{ME}.fifo"))
    os.mkdir(file_of(directory, f"{ME}.folder"))
    os.symlink("/dev/zero", file_of(directory, f"{ME}.zero"))
    tickets, ignored = read_tickets(directory)
    assert ([ticket.id for ticket in tickets], len(ignored)) == ([held.id], 4)

    os.link(file_of(directory, held.id), file_of(directory, f"{ME}.again"))
    tickets, ignored = read_tickets(directory)
    assert (tickets, len(ignored)) == ([], 6)


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        ("waits until process 4711 has ended", "waits until process 4711 has ended"),
        ("waits until al's claim 1f2e.0bad has ended", "waits until al's claim 1f2e.0bad has ended"),
        ("the node is down: run `sudo sh`", '"the node is down: run `sudo sh`"'),
        ("waits until a's claim `sudo sh` has ended", '"waits until a\'s claim `sudo sh` has ended"'),
        (" uses , " * 900, f'"{" uses , " * 25}"'),
    ],
)
def test_what_a_user_wrote_into_a_ticket_is_short_and_shown_as_a_quotation(directory, after, shown):
    found = read(directory, content(after=after, note="n" * 500, command=None))

    assert isinstance(found, Ticket)
    assert (found.after, len(found.note or "")) == (shown, 200)


def test_a_user_who_writes_messages_into_a_ticket_makes_no_other_sentence_of_it(directory):
    ours = sentence("queue.after_claim", "waits until {user}'s claim {id} has ended", user="al", id="1f2e")
    written = ((ours.key, {**ours.values, "x": "y"}), ("free", {}), ("", {}))
    texts = [Sentence(ours, key, values) for key, values in written]
    found = [read(directory, dumps({**ticket_content(a_ticket()), "after": text, "note": text})) for text in texts]

    assert all(isinstance(ticket, Ticket) and ticket.note == ticket.after == ours for ticket in found)
    messages = [[isinstance(text, Sentence) and vars(text) for text in (it.after, it.note)] for it in found]
    assert messages == [[vars(ours), False], [False, False], [False, False]]


def test_the_command_in_a_ticket_is_as_short_as_one_that_we_write(directory):
    found = read(directory, content(command=["x" * 300, *"y" * 1000]))

    assert isinstance(found, Ticket)
    assert found.command == ("x" * 200, *"y" * 19)


def test_a_huge_ticket_is_not_read(directory: LockDirectory) -> None:
    with planted(file_of(directory), content()) as descriptor:
        os.ftruncate(descriptor, 2**40)
        tickets, ignored = read_tickets(directory)

    assert (tickets, [file.reason for file in ignored]) == ([], ["it cannot be understood: it is too long"])


def test_a_byte_reaches_the_waker(directory: LockDirectory, held: OwnTicket, ticket: Ticket) -> None:
    assert unread_since(directory, ticket) == math.inf
    wake(directory, [ticket], b".")

    assert time.time() - 60.0 < unread_since(directory, ticket) < math.inf
    assert held.drain() == b"."
    assert held.drain() == b""
    assert unread_since(directory, ticket) == math.inf


def test_a_waker_that_is_not_read_is_not_filled(directory: LockDirectory, held: OwnTicket, ticket: Ticket) -> None:
    for _ in range(100):
        wake(directory, [ticket], b".")
    since = unread_since(directory, ticket)
    wake(directory, [ticket], b".")

    assert unread_since(directory, ticket) == since
    assert held.drain() == b"." * MOST_UNREAD


def test_a_waker_that_is_full_holds_up_no_process(directory: LockDirectory, held: OwnTicket, ticket: Ticket) -> None:
    waker = os.open(file_of(directory, held.id, "bell"), os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while os.write(waker, b"x" * 4096):
            pass
    wake(directory, [ticket], b".")
    os.close(waker)

    assert set(held.drain()) == {ord("x")}


def test_a_ticket_without_a_waker_of_its_owner_cannot_be_woken(directory: LockDirectory, tmp_path: Path) -> None:
    ticket = a_ticket(ME, id=f"{ME}.aaaa")
    waker = file_of(directory, kind="bell")
    victim = tmp_path / "victim"
    victim.write_text("kept")
    assert unread_since(directory, ticket) == last_heartbeat(directory, ticket) == -math.inf

    for make in (lambda: os.symlink(victim, waker), lambda: os.mkfifo(waker), lambda: os.link(victim, waker)):
        make()
        wake(directory, [ticket], b".")
        assert unread_since(directory, ticket) == -math.inf
        os.unlink(waker)
    assert victim.read_text() == "kept"


def test_a_sign_of_life_can_be_seen(directory: LockDirectory, held: OwnTicket, ticket: Ticket) -> None:
    os.utime(file_of(directory, held.id, "bell"), (1.0, 1.0))
    assert last_heartbeat(directory, ticket) == 1.0
    held.send_heartbeat()

    assert eventually(lambda: last_heartbeat(directory, ticket) > time.time() - 60.0)


@pytest.mark.parametrize(("gpus", "most"), [((2, 3), 5), ((2**50,), tickets.MOST_WANTED)])
def test_what_a_user_wants_is_the_sum_of_all_requests_within_what_there_can_be(directory, gpus, most):
    assert wanted(waiting_tickets(directory)) == {}
    held = [OwnTicket(directory, ticket_content(a_ticket(gpus=number))) for number in gpus]
    of_users = wanted(waiting_tickets(directory))
    for ticket in held:
        ticket.withdraw()

    assert (of_users, wanted(waiting_tickets(directory))) == ({ME: most}, {})


def test_of_a_queue_that_cannot_be_read_it_is_unknown_what_is_wanted(directory):
    assert wanted(waiting_tickets(replace(directory, records=f"{directory.records}/gone"))) is None


def test_who_shares_the_devices_is_found_out_once_for_all_requests(directory, monkeypatch):
    """It reads /proc of each process there."""
    calls: list[object] = []
    monkeypatch.setattr("gpuguard.queue.state.sharing_of", lambda *facts: calls.append(facts) or {})
    requests = [Request(share=True, memory=number * 2**30) for number in range(1, 5)]
    held = [OwnTicket(directory, ticket_content(a_ticket(requests=[request]))) for request in requests]
    queue = queue_state(directory, a_snapshot(a_device()), QueueFacts(), QueueRules())
    texts = [start_text(position, queue) for position in queue.positions]
    for ticket in held:
        ticket.withdraw()

    assert (len(texts), len(calls)) == (4, 1)
