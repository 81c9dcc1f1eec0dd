"""Tickets, reservations and records of several users: none can hurt, flood, or pretend to be another.

A user to whom root has given 65536 more uids (rootless containers) has the share of one user, not of a crowd.
"""

import fcntl
import os
import pwd
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, NOW, UUIDS, a_claim_record, a_device, a_process, a_reservation, a_reserved, a_snapshot
from nodes import eventually
from queues import a_ticket
from test_guard_limits import an_event
from users import ALICE, BOB, HOG

from gpuguard import procfs, users
from gpuguard.claims import holders, records
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import of_their_users
from gpuguard.claims.restrictions import DENIED, Restriction, change, restrictions_against
from gpuguard.enforcement.guard_limits import BURST_LINES, AuditQuota
from gpuguard.model import Snapshot
from gpuguard.queue import reservations, tickets
from gpuguard.queue.backfill import plan, planned_for
from gpuguard.queue.priority import QueueRules, ReservationKeys, Ticket, order
from gpuguard.queue.reservations import ReservationStatus, judge, what_if
from gpuguard.queue.state import QueueFacts, is_responsive, queue_state, usage_of_owners
from gpuguard.queue.tickets import (
    OwnTicket,
    read_tickets,
    record_start,
    ticket_content,
    unread_since,
    wake,
)
from gpuguard.users import accountable_uids


@pytest.fixture
def directory(open_place: Path) -> LockDirectory:
    return lock_directory(f"{open_place}/claims")


def as_user(user: pwd.struct_passwd, what: Callable[[], object], *, stays: bool = False) -> int:
    """Do it in a process of *user*; with *stays* the process waits to be killed, and its pid comes back."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            what()
            os.write(writing, b"done")
            if stays:
                signal.pause()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(writing)
    try:
        assert os.read(reading, 4) == b"done"
    finally:
        os.close(reading)
        if not stays:
            os.waitpid(child, 0)
    return child


@pytest.fixture
def alice(directory: LockDirectory) -> Iterator[int]:
    """pid of a process of alice that waits in the queue."""
    kept: list[OwnTicket] = []
    child = as_user(ALICE, lambda: kept.append(OwnTicket(directory, ticket_content(a_ticket()))), stays=True)
    yield child
    os.kill(child, 9)
    os.waitpid(child, 0)


@pytest.mark.root
def test_a_stranger_can_wake_but_neither_listen_nor_remove(directory: LockDirectory, alice: int) -> None:
    def tries() -> None:
        (ticket,) = read_tickets(directory)[0]
        wake(directory, [ticket], b".")
        assert unread_since(directory, ticket) > 0
        for name in os.listdir(directory.records):
            with pytest.raises(PermissionError):
                os.unlink(f"{directory.records}/{name}")
            with pytest.raises(PermissionError):
                os.open(f"{directory.records}/{name}", os.O_RDWR | os.O_NONBLOCK)

    as_user(BOB, tries)


@pytest.mark.root
def test_a_stranger_with_the_number_of_another_users_ticket_does_not_have_its_position(directory, alice):
    (hers,) = read_tickets(directory)[0]

    def copy() -> None:
        own = OwnTicket(directory, ticket_content(a_ticket()))
        os.rename(own._ticket, f"{directory.records}/ticket.{BOB.pw_uid}.{hers.id.rpartition('.')[2]}.json")
        found, _ = read_tickets(directory)
        assert len(found) == len({ticket.id for ticket in found}) == 2

    as_user(BOB, copy)


@pytest.mark.root
def test_any_number_of_reservations_of_one_user_costs_the_others_a_bounded_time(directory, monkeypatch):
    monkeypatch.setattr(reservations, "MOST_OF_ONE", 3)
    now = time.time()
    as_user(BOB, lambda: [reservations.write_reservation(directory, a_reservation(BOB.pw_uid)) for _ in range(7)])
    for _ in range(5):
        reservations.write_reservation(directory, a_reservation(ALICE.pw_uid))
    found, ignored, _ = reservations.read_reservations(directory, now)

    assert Counter(reservation.maker for reservation in found) == {0: 5, BOB.pw_uid: 3}, "root may have any number"
    assert [(file.uid, file.id) for file in ignored] == [(BOB.pw_uid, "4 more")]


@pytest.mark.root
def test_a_dead_ticket_that_a_stranger_keeps_locked_is_not_waited_for(directory, alice):
    (ticket,) = read_tickets(directory)[0]
    assert is_responsive(directory, ticket)
    (name,) = (name for name in os.listdir(directory.records) if name.endswith(".json"))
    os.kill(alice, 9)
    # A process that opened the file before can lock it now: the kernel does not mind whose it is.
    ghost = os.open(f"{directory.records}/{name}", os.O_RDONLY)
    while True:
        try:
            fcntl.flock(ghost, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            continue
    found, _ = read_tickets(directory)
    os.close(ghost)

    assert [other.id for other in found] == [ticket.id]
    assert eventually(lambda: not is_responsive(directory, ticket)), "its lock is free before its last file is closed"


@pytest.mark.root
def test_a_mark_of_having_been_served_that_another_user_made_does_not_count(directory, alice):
    as_user(BOB, lambda: Path(f"{directory.records}/{directory.prefix}served.{ALICE.pw_uid}").touch())
    assert read_tickets(directory)[0][0].served is None
    os.unlink(f"{directory.records}/{directory.prefix}served.{ALICE.pw_uid}")
    as_user(ALICE, lambda: record_start(directory, ALICE.pw_uid))

    assert read_tickets(directory)[0][0].served is not None


@pytest.mark.root
def test_any_number_of_descriptors_of_one_user_hides_nobody_elses_lock_and_costs_a_bounded_time(admin, monkeypatch):
    asked, really, now = [], holders.target_of, [0.0]
    sleeping = "import time; print('ready', flush=True); time.sleep(100)"

    def slowly(pid: str, descriptor: str) -> str:
        if os.stat(f"/proc/{pid}").st_uid == BOB.pw_uid:
            asked.append(pid)
            now[0] += 2 * holders.MOST_SECONDS
        return really(pid, descriptor)

    monkeypatch.setattr(procfs, "_spent", {})  # what tests before this one have left to be paid off
    monkeypatch.setattr(holders, "monotonic", lambda: now[0])
    monkeypatch.setattr(holders, "stopwatch", lambda: (lambda begun: lambda: now[0] - begun)(now[0]))
    monkeypatch.setattr(holders, "target_of", slowly)
    assert admin(ALICE, "run", "--no-wait", "--", "true").returncode == 0
    with (
        admin.program(BOB, sleeping),
        admin.program(BOB, sleeping),
        admin.program(ALICE, HOG, str(admin.lock_path(7))),
    ):
        found = holders.holders_of(admin.directory, {admin.uuids[7]}, {ALICE.pw_uid, BOB.pw_uid}.__contains__)

    assert ([*found[admin.uuids[7]].values()], len(asked)) == ([ALICE.pw_uid], 1)


FIRST, MORE = 100_000, 300_000
GIVEN = f"""
# who has which
{BOB.pw_name}:{FIRST}:65536
{ALICE.pw_name}:200000:65536
{BOB.pw_name}:{MORE}:10
broken:line
other:1:2:3
other:x:{"9" * 5000}
"""


@pytest.fixture(autouse=True)
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "subuid").write_text(GIVEN)
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    return tmp_path / "subuid"


def test_all_uids_that_one_user_was_given_are_that_user():
    uids = (0, 1001, FIRST, FIRST + 65535, FIRST + 65536, MORE, MORE + 9, MORE + 10, 200_000, 4_000_000_000)
    bobs = dict.fromkeys((FIRST, FIRST + 65535, MORE, MORE + 9), BOB.pw_uid)

    assert accountable_uids(uids) == {uid: bobs.get(uid, uid) for uid in uids} | {200_000: ALICE.pw_uid}


def test_claims_of_all_uids_of_a_user_are_that_users_and_none_hides_another():
    uids = (FIRST, BOB.pw_uid, MORE, ALICE.pw_uid)
    claims = [a_claim_record(id="f0f0", uid=uid) for uid in uids] + [a_claim_record(id="f0f0-300000", uid=BOB.pw_uid)]

    assert [(claim.uid, claim.id, claim.user) for claim in of_their_users(claims)] == [
        (BOB.pw_uid, "f0f0-100000", BOB.pw_name),
        (BOB.pw_uid, "f0f0", claims[1].user),
        (BOB.pw_uid, "f0f0-300000-300000", BOB.pw_name),
        (ALICE.pw_uid, "f0f0", claims[3].user),
        (BOB.pw_uid, "f0f0-300000", claims[4].user),
    ]


def test_what_root_gives_later_is_known_at_once(given):
    assert accountable_uids([500_007]) == {500_007: 500_007}
    given.write_text("1003:500000:100\n")

    assert accountable_uids([500_007, FIRST + 1]) == {500_007: 1003, FIRST + 1: FIRST + 1}


def test_while_a_user_has_no_number_the_lowest_uid_that_was_given_stands_for_all(given):
    given.write_text("nobody-here:500000:100\nnobody-here:400000:100\n")

    assert accountable_uids([500_007, 400_001]) == {500_007: 400_000, 400_001: 400_000}


@pytest.mark.parametrize("content", [None, "", "\n\n", b"\xff:1:1\n"])
def test_without_such_a_file_each_uid_is_a_user(given, content):
    given.unlink()
    if content is not None:
        given.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert accountable_uids([7, FIRST]) == {7: 7, FIRST: FIRST}


@contextmanager
def as_uid(uid: int) -> Iterator[None]:
    """As that user, for files."""
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


CROWD = [FIRST + number for number in range(20)]


@pytest.mark.root
def test_records_of_all_uids_of_one_user_hide_no_other_users(directory, monkeypatch):
    monkeypatch.setattr(records, "MOST_OF_ONE", 3)
    held = []
    for uid in (*CROWD, ALICE.pw_uid):
        with as_uid(uid):
            held.append(os.open(records.record_path(directory, uid, f"c{uid}"), os.O_RDWR | os.O_CREAT, 0o644))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
    uids = [record.uid for record in records.read_records(directory)]
    for descriptor in held:
        os.close(descriptor)

    assert len(uids) == 4
    assert ALICE.pw_uid in uids


@pytest.fixture
def tickets_of(directory) -> Iterator[Callable[..., None]]:
    """Makes a ticket of each uid."""
    with ExitStack() as stack:

        def make(*uids: int) -> None:
            for uid in uids:
                with as_uid(uid):
                    stack.callback(OwnTicket(directory, ticket_content(a_ticket())).withdraw)

        yield make


def queued(directory: LockDirectory, usage: dict[int, float] | None = None, mine: Ticket | None = None) -> list[int]:
    """The uids of the tickets in the order of the queue."""
    state = queue_state(directory, Snapshot("h", "b", 0.0, 0.0, ()), QueueFacts(usage=usage), QueueRules(), mine)
    return [position.ticket.uid for position in state.positions]


@pytest.mark.root
def test_a_user_with_many_uids_waits_in_the_queue_as_one(directory, tickets_of, monkeypatch):
    monkeypatch.setattr(tickets, "MOST_OF_ONE", 5)
    tickets_of(*CROWD, ALICE.pw_uid)
    found, ignored = read_tickets(directory)

    # One of the first two positions, though 20 came before her; the clock of a file system has steps of 4 ms.
    assert ALICE.pw_uid in [ticket.uid for ticket in order(found, {}, QueueRules(), found[0].since + 60.0)][:2]
    assert ALICE.pw_uid in queued(directory)[:2]
    assert len(found) == 6
    assert [(file.uid, file.id) for file in ignored] == [(BOB.pw_uid, "15 more")]


@pytest.mark.root
def test_a_user_who_only_asks_for_a_position_counts_as_one_too(directory, tickets_of):
    tickets_of(ALICE.pw_uid)
    mine = a_ticket(FIRST + 1, since=time.time() - 1.0)

    assert queued(directory, {FIRST + 2: 1e6}, mine) == [ALICE.pw_uid, FIRST + 1]


@pytest.mark.root
def test_where_users_may_be_hostile_any_number_of_requests_of_one_is_planned_in_a_moment(
    directory, tickets_of, monkeypatch
):
    plans: list[object] = []
    monkeypatch.setattr("gpuguard.queue.state.plan", lambda *facts: plans.append(facts) or plan(*facts))
    tickets_of(*[BOB.pw_uid] * 60)
    busy = a_device(3, processes=(a_process(),), memory_used=40 * GIB)
    snapshot = a_snapshot(*map(a_device, range(3)), busy)
    hers = a_ticket(ALICE.pw_uid, 4, since=time.time())
    positions = queue_state(replace(directory, keeper=0), snapshot, QueueFacts(), QueueRules(), hers).positions

    assert [position.ticket.uid for position in positions if position.now] == [BOB.pw_uid]
    assert len(plans) <= 3


@pytest.mark.root
def test_what_one_uid_of_a_user_has_had_puts_the_others_behind(directory, tickets_of):
    tickets_of(FIRST + 1, ALICE.pw_uid)

    assert queued(directory, {FIRST + 2: 1e6}) == [ALICE.pw_uid, FIRST + 1]


@pytest.mark.parametrize(
    ("denied", "user", "uids"),
    [
        (BOB.pw_uid, BOB.pw_name, [BOB.pw_uid, FIRST, FIRST + 7, MORE]),
        (FIRST + 7, None, [FIRST, FIRST + 7, MORE]),
        (ALICE.pw_uid, ALICE.pw_name, [ALICE.pw_uid, 200_000]),
        (7777, None, [7777]),
    ],
)
def test_a_denial_holds_for_all_uids_that_the_user_was_given(directory, denied, user, uids):
    denial = Restriction(str(denied), NOW, user=user)
    change(directory, DENIED, lambda restrictions: restrictions.update({denial.name: denial}))
    everybody = sorted((0, BOB.pw_uid, ALICE.pw_uid, FIRST, FIRST + 7, MORE, 7777, 200_000))

    assert [uid for uid in everybody if restrictions_against(directory, UUIDS, uid, NOW)] == sorted(uids)


@pytest.mark.root
def test_no_request_waits_for_that_of_a_denied_user_with_another_uid(directory, tickets_of):
    tickets_of(FIRST + 1)
    denied = {str(BOB.pw_uid): Restriction(str(BOB.pw_uid), NOW, user=BOB.pw_name)}
    mine, facts = a_ticket(ALICE.pw_uid, since=time.time() + 1.0), QueueFacts(denied=denied)
    positions = queue_state(directory, a_snapshot(a_device()), facts, QueueRules(), mine).positions

    assert [position.ticket.uid for position in positions if position.now] == [ALICE.pw_uid]


def test_what_was_had_by_one_of_the_uids_counts_for_the_others():
    assert usage_of_owners({FIRST: 10.0, FIRST + 7: 20.0, MORE: 1.0, 1001: 5.0}) == {BOB.pw_uid: 31.0, 1001: 5.0}


def test_all_uids_of_one_user_reserve_as_much_as_one():
    keys = ReservationKeys(devices=2)
    crowd = [a_reservation(FIRST + number, gpus=2, made=NOW - 9 + number) for number in range(4)]
    statuses = judge([*crowd, a_reservation(1001, gpus=2)], UUIDS, (), {}, keys, NOW)
    refused = what_if(a_reservation(FIRST + 9, gpus=1), a_reserved(ReservationStatus(crowd[0])), UUIDS)

    assert [status.counts for status in statuses] == [True, False, False, False, True]
    assert refused.startswith("users may reserve 2 GPUs at a time here")


def test_one_user_is_planned_and_lifted_as_one():
    crowd = [a_ticket(FIRST + number, owner_uid=FIRST, since=float(number)) for number in range(300)]
    others = [a_ticket(1001, since=1000.0)]

    assert planned_for([*crowd, *others])[-1] == others[0]
    assert len(planned_for([*crowd, *others])) < 300
    assert order([*crowd, *others], {}, QueueRules(bound=10.0), 1e6)[:2] == [crowd[0], others[0]]


def test_a_user_with_many_uids_writes_as_many_lines_as_others():
    lines = AuditQuota()
    number = sum(lines.admits(an_event(str(FIRST + each % 50)), 5000.0) for each in range(BURST_LINES + 500))

    assert number == BURST_LINES
    assert lines.admits(an_event("alice"), 5000.0)
