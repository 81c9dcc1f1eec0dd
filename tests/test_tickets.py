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

from gpuguard.claims.directory import LockDirectory
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
from gpuguard.request import Request

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
