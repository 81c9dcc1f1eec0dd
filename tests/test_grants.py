"""Where the daemon alone gives the locks: each file is given once, and what it gave is checked by who asked."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, a_claim_record, a_device, a_snapshot, a_uuid
from queues import a_ticket

from gpuguard.claims import daemon_client, grants
from gpuguard.claims.daemon_client import DaemonBusy, NoDaemonSocket
from gpuguard.claims.directory import BROKERED, LockDirectory, open_lock, try_flock
from gpuguard.claims.grants import Grant, grant_of, granted, lock_for, names_of, renew, replace_file
from gpuguard.eligibility import Sharing
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest, LockDirectoryError
from gpuguard.queue import broker_client
from gpuguard.queue.broker_client import refuse_without_daemon, request_grant
from gpuguard.queue.tickets import as_json
from gpuguard.request import Request

NAME = a_uuid(0)
TO = Grant(7, "c1")
ALL = Grant(7, "c1", 10 * GIB, 3, a_uuid(1), 2)


@pytest.fixture
def kept(directory: LockDirectory) -> LockDirectory:
    """A directory whose lock files the daemon alone opens: we are the daemon."""
    return replace(directory, keeper=os.geteuid())


def file_of(kept: LockDirectory, name: str = NAME) -> os.stat_result:
    return os.stat(kept.lock_path(name))


def given(kept: LockDirectory, name: str = NAME, to: Grant = TO) -> int:
    descriptor = lock_for(kept, name, to)
    assert descriptor is not None
    return descriptor


def open_files() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("to", [TO, ALL])
def test_a_lock_is_a_new_locked_file_that_says_to_whom_it_was_given(kept, to):
    os.close(open_lock(kept, NAME))
    before, opened = file_of(kept), open_files()
    descriptor = given(kept, to=to)
    status = file_of(kept)

    assert status.st_ino != before.st_ino and os.fstat(descriptor).st_ino == status.st_ino
    assert (status.st_mode & 0o777, status.st_uid) == (BROKERED, os.geteuid())
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(descriptor, fcntl.F_GETFD) == fcntl.FD_CLOEXEC
    content = Path(kept.lock_path(NAME)).read_text()
    assert content.endswith("}\n")
    assert json.loads(content) == {name: value for name, value in vars(to).items() if value is not None}
    assert lock_for(kept, NAME, Grant(8, "c2")) is None
    assert grant_of(kept, [NAME]) == {NAME: to}
    assert open_files() == opened + 1
    os.close(descriptor)


@pytest.mark.root
def test_a_lock_that_root_makes_anew_is_the_daemons(kept):
    os.close(given(replace(kept, keeper=4711)))

    assert file_of(kept).st_uid == 4711


def test_a_lock_that_is_free_again_is_a_new_file_before_anybody_learns_of_it(kept):
    descriptor = given(kept)
    old = os.dup(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)

    assert grant_of(kept, [NAME]) == {}
    assert file_of(kept).st_ino != os.fstat(old).st_ino and file_of(kept).st_size == 0
    assert try_flock(old), "it locks a file without a name"
    assert grant_of(kept, [NAME]) == {}
    unused = file_of(kept).st_ino
    assert grant_of(kept, [NAME]) == {} and file_of(kept).st_ino == unused, "nobody had that one"
    os.close(old)


def test_what_is_held_and_was_given_to_nobody_is_of_nobody_and_what_is_not_there_is_free(kept):
    by_root, planted, gone = open_lock(kept, NAME), a_uuid(1), a_uuid(2)
    assert try_flock(by_root)
    os.symlink("/dev/null", kept.lock_path(planted))

    assert grant_of(kept, [gone, planted, NAME]) == {NAME: None, planted: None}
    assert not os.path.lexists(kept.lock_path(gone))
    os.close(by_root)
    Path(kept.lock_path(NAME)).write_text('{"uid": "x"}\n')
    torn = open_lock(kept, NAME)
    assert try_flock(torn)
    assert grant_of(kept, [NAME]) == {NAME: None}
    os.close(torn)


def test_a_lock_is_called_free_only_where_the_file_that_was_given_away_is_replaced(kept, monkeypatch):
    descriptor, other = open_lock(kept, NAME), open_lock(kept, NAME)
    assert renew(kept, NAME, descriptor)
    assert not renew(kept, NAME, other), "another one has it"
    os.close(descriptor)
    os.write(full := os.open(kept.lock_path(NAME), os.O_WRONLY), b"x")
    monkeypatch.setattr(grants, "write_file", fails)
    assert not renew(kept, NAME, other)
    monkeypatch.undo()
    assert renew(kept, NAME, other)
    assert not renew(kept, NAME, other), "it is another file by now"
    os.close(full)
    os.close(other)


def fails(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_where_no_new_file_can_be_made_nothing_is_given_and_no_file_stays_open(kept, monkeypatch):
    os.close(open_lock(kept, NAME))
    opened = open_files()

    def written_and_failed(path: str, content: bytes, *, prepare: Any, **_: object) -> None:
        prepare(half := os.open(f"{path}.new", os.O_RDWR | os.O_CREAT))
        os.close(half)
        fails()

    monkeypatch.setattr(grants, "write_file", written_and_failed)
    with pytest.raises(LockDirectoryError) as full:
        lock_for(kept, NAME, TO)

    assert open_files() == opened
    assert str(full.value) == (
        f"{kept.lock_path(NAME)} cannot be made anew: No space left on device; the log of the daemon says why."
    )


def test_a_file_without_a_claim_is_replaced_whether_it_is_locked_or_not(kept):
    replace_file(kept, NAME)
    assert not os.path.lexists(kept.lock_path(NAME))
    held, opened = given(kept), open_files()
    replace_file(kept, NAME)

    assert open_files() == opened
    assert file_of(kept).st_ino != os.fstat(held).st_ino and file_of(kept).st_size == 0
    os.close(held)
    os.close(given(kept))


def test_the_names_of_locks_are_those_of_devices(kept):
    for name in ("gate", "queue", NAME, f"{NAME}.slot0", f"{NAME}.1f.new"):
        Path(kept.lock_path(name)).touch()

    assert sorted(names_of(kept)) == [NAME, f"{NAME}.slot0"]


@pytest.mark.parametrize(
    ("grant", "said", "confirmed"),
    [
        (TO, {"memory": GIB, "most": 9}, {"memory": GIB, "most": 9}),
        (TO, {"max_processes": 4}, {"max_processes": 4}),
        (replace(TO, memory=2 * GIB), {"memory": GIB, "most": 9}, {"memory": 2 * GIB, "most": None}),
        (ALL, {"memory": GIB, "max_processes": 4}, {"memory": 10 * GIB, "most": 3, "max_processes": 2}),
    ],
)
def test_what_was_promised_to_a_claim_counts_whatever_its_record_says(grant, said, confirmed):
    assert grant.confirmed(a_claim_record(**said)) == a_claim_record(**confirmed)


class Daemon:
    """What the daemon answers, one reply after the other, and what it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch, *replies: Any) -> None:
        self.replies, self.asked, self.where = list(replies), list[Any](), list[Any]()
        for module in (daemon_client, broker_client):
            patch.setattr(module, "exchange", self.exchange)

    def exchange(self, directory: LockDirectory, message: Any, seconds: float = 0.0) -> Any:
        self.asked.append(message)
        self.where.append((directory, seconds))
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, tuple) else (reply, ())


def test_the_grants_of_all_locks_are_those_that_the_daemon_tells(kept, monkeypatch):
    daemon = Daemon(monkeypatch, {"held": {NAME: list(vars(ALL).values()), "GPU-x": [7, "c1"], "GPU-y": None}})

    assert granted(kept) == {NAME: ALL, "GPU-x": TO, "GPU-y": None}
    assert (daemon.asked, daemon.where) == ([{"do": "claims"}], [(kept, 0.0)])


@pytest.mark.parametrize(
    "answer",
    [
        NoDaemonSocket("none"),
        {},
        {"held": []},
        {"held": {NAME: [7]}},
        {"held": {NAME: ["x", "c1"]}},
        {"held": {NAME: 7}},
    ],
)
def test_of_an_answer_that_says_nothing_the_grants_are_unknown(kept, monkeypatch, answer):
    Daemon(monkeypatch, answer)

    assert granted(kept) is None


MACHINE = a_snapshot(a_device(0), a_device(1))
FIRST, SECOND = MACHINE.devices
ONE = Request(prefer=("0",))


def asks(kept: LockDirectory, request: Request = ONE, **more: Any) -> Any:
    taken = more.pop("taken", {})
    return request_grant(MACHINE, request, kept, more.get("outer"), taken, more.get("ticket"))


def test_a_claim_is_what_the_daemon_gives_and_asks_for_the_devices_that_were_chosen(kept, monkeypatch):
    held, other = given(kept), given(kept, SECOND.uuid)
    daemon = Daemon(monkeypatch, ({"claim": "c1", "locks": [FIRST.uuid, SECOND.uuid]}, (held, other)))
    request = Request(
        num_gpus=1, max_gpus=3, devices=("0", "1"), exclude=(), prefer=("1",), within=(FIRST.uuid, SECOND.uuid),
        within_reason="Slurm", min_free=GIB, max_processes=3,
    )  # fmt: skip
    claim = asks(kept, request)

    assert daemon.asked == [
        {
            "do": "claim",
            "devices": [FIRST.uuid, SECOND.uuid],
            "conditions": as_json(Request(num_gpus=2, min_free=GIB, max_processes=3)),
            "inside": None,
            "ticket": None,
        }
    ]
    assert daemon.where == [(kept, broker_client.REPLY_SECONDS)]
    assert (claim.id, claim.devices, claim.max_processes, claim.memory) == ("c1", (FIRST, SECOND), 3, None)
    assert [(lock.path, lock.operation) for lock in claim.locks] == [
        (kept.lock_path(device.uuid), fcntl.LOCK_EX) for device in (FIRST, SECOND)
    ]
    assert [os.fstat(lock.descriptor).st_ino for lock in claim.locks] == [
        file_of(kept, device.uuid).st_ino for device in (FIRST, SECOND)
    ]
    claim.release()
    assert grant_of(kept, [FIRST.uuid, SECOND.uuid]) == {}


@pytest.mark.parametrize(
    ("ticket", "more"),
    [
        (
            a_ticket(id="", priority=1, time_limit=60.0, expected=50.0),
            {"ticket": "", "priority": 1, "time_limit_seconds": 60.0, "expected_seconds": 50.0},
        ),
        (a_ticket(id="7.x", priority=1), {"ticket": "7.x"}),
    ],
)
def test_a_request_that_has_no_file_says_what_a_file_would_say(kept, monkeypatch, ticket, more):
    daemon = Daemon(monkeypatch, ({"claim": "c1", "locks": [FIRST.uuid]}, (given(kept),)))
    asks(kept, ticket=ticket).release()

    asked = {"do": "claim", "devices": [FIRST.uuid], "conditions": as_json(Request()), "inside": None}
    assert daemon.asked == [asked | more]


def test_a_share_is_asked_for_with_its_memory_and_given_as_a_slot(kept, monkeypatch):
    slot = f"{FIRST.uuid}.slot0"
    daemon = Daemon(monkeypatch, ({"claim": "c1", "locks": [slot]}, (given(kept, slot),)))
    share = Request(share=True, memory=GIB, slots=2, prefer=("0",))
    claim = asks(kept, share)

    assert (claim.memory, claim.most, [lock.path for lock in claim.locks]) == (GIB, 2, [kept.lock_path(slot)])
    assert daemon.asked[0]["conditions"] == as_json(replace(share, prefer=()))
    claim.release()

    full = Sharing((a_claim_record(FIRST, memory=80 * GIB, slots=(slot,)),))
    monkeypatch.setattr(broker_client, "sharing_now", lambda *of: {FIRST.uuid: full})
    daemon = Daemon(monkeypatch, {"refused": {SECOND.uuid: "eve has it"}})
    assert asks(kept, share) is None
    assert [message["devices"] for message in daemon.asked] == [[SECOND.uuid]]


def test_inside_a_claim_the_daemon_gives_its_devices_and_inside_a_share_none_is_asked(kept, monkeypatch):
    nested = f"{FIRST.uuid}.nested"
    daemon = Daemon(monkeypatch, ({"claim": "c1.2", "locks": [nested]}, (given(kept, nested),)))
    asks(kept, outer=a_claim_record(id="c1")).release()
    assert daemon.asked[0]["inside"] == "c1"

    for outer in (a_claim_record(id="c1.2"), a_claim_record(id="c1", memory=GIB)):
        claim = asks(kept, outer=outer)
        assert claim.id.startswith(f"{outer.id}.") and (claim.devices, claim.locks) == ((FIRST,), ())
    with pytest.raises(InvalidRequest) as refused:
        asks(kept, Request(share=True, memory=GIB), outer=a_claim_record(id="c1"))
    assert str(refused.value) == "inside a claim the daemon gives whole GPUs alone (c1): leave out --share."
    assert len(daemon.asked) == 1


@pytest.mark.parametrize(
    ("refused", "once", "later", "asked", "taken"),
    [
        ({FIRST.uuid: "bob has it"}, {}, True, 2, {FIRST.uuid: "bob has it"}),
        ({FIRST.uuid: "bob has it"}, {"once": True}, False, 2, {FIRST.uuid: "bob has it"}),
        ({"GPU-other": "bob has it"}, {}, False, 2, {FIRST.uuid: "refused by the daemon"}),
        ("no", {}, False, 2, {FIRST.uuid: "refused by the daemon"}),
        ({FIRST.uuid: "eve starts first"}, {"once": True}, True, 1, {FIRST.uuid: "eve starts first"}),
    ],
)
def test_what_the_daemon_refuses_is_not_asked_for_again(kept, monkeypatch, refused, once, later, asked, taken):
    second = {SECOND.uuid: "eve has it"}
    daemon = Daemon(monkeypatch, {"refused": refused, "later": later}, {"refused": second, "later": False})
    known: dict[str, str] = {}

    assert request_grant(MACHINE, ONE, kept, None, known, None, **once) is None
    assert len(daemon.asked) == asked
    assert known == (taken if asked == 1 else taken | second)


def test_descriptors_beside_a_refusal_are_closed(kept, monkeypatch):
    opened = open_files()
    Daemon(
        monkeypatch, ({"refused": {FIRST.uuid: "x", SECOND.uuid: "y"}}, (os.dup(0),)), {"refused": {SECOND.uuid: "y"}}
    )

    assert asks(kept) is None
    assert open_files() == opened


NONE_THERE = NoDaemonSocket("no daemon answers in /x (refused).  Start one.")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (GpuguardError("you may not"), "you may not"),
        (
            NONE_THERE,
            "no daemon answers in /x (refused).  Start one.  It alone gives the GPUs of this machine, so nothing can "
            "be claimed until it runs; what is claimed already stays claimed.",
        ),
    ],
)
def test_without_an_answer_nothing_is_claimed_unless_the_request_waits_already(kept, monkeypatch, error, said):
    for ticket in (None, a_ticket(id="")):
        Daemon(monkeypatch, error)
        with pytest.raises(ClaimError) as refused:
            asks(kept, ticket=ticket)
        assert str(refused.value) == said
    daemon = Daemon(monkeypatch, error, {"held": {}})
    with pytest.raises(ClaimError) as refused:
        refuse_without_daemon(kept)
    assert (str(refused.value), daemon.asked) == (said, [{"do": "claims"}])
    assert refuse_without_daemon(kept) is None  # type: ignore[func-returns-value]

    Daemon(monkeypatch, error)
    known = {SECOND.uuid: "taken"}
    assert asks(kept, ticket=a_ticket(id="7.x"), taken=known) is None
    assert known == {SECOND.uuid: "taken", FIRST.uuid: str(error)}


@pytest.mark.parametrize("seconds", [10.0, 0.0])
def test_a_daemon_that_is_busy_is_asked_again_for_a_time(kept, monkeypatch, seconds):
    monkeypatch.setattr(broker_client, "BUSY_SECONDS", seconds)
    monkeypatch.setattr(daemon_client.time, "sleep", lambda pause: pauses.append(pause))
    pauses: list[float] = []
    busy = [DaemonBusy("the daemon is busy")] * 8
    daemon = Daemon(monkeypatch, *busy, {"held": {}})
    if seconds:
        refuse_without_daemon(kept)
        steps = (0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5)
        assert all(step <= pause <= 2 * step for step, pause in zip(steps, pauses, strict=True))
    else:
        with pytest.raises(ClaimError, match="the daemon is busy"):
            refuse_without_daemon(kept)
        assert (len(daemon.asked), pauses) == (1, [])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no locks": ({"locks": []}, "there are fewer locks than GPUs"),
    "another device's": ({"locks": [SECOND.uuid]}, f"{SECOND.uuid} is no lock of GPU 0"),
    "a slot": ({"locks": [f"{FIRST.uuid}.slot0"]}, f"{FIRST.uuid}.slot0 is no lock of GPU 0"),
    "an id with a slash": ({"claim": "../x"}, "its id is none"),
    "another file": ({}, "it is not {path}"),
    "a pipe": ({}, "it is not {path}"),
    "not locked": ({}, "{path} is not locked"),
    "locked by others as well": ({}, "{path} is not locked"),
    "of another user": ({}, "{path} belongs to uid {uid}"),
}


@pytest.mark.parametrize(("how", "content", "fault"), [(how, *facts) for how, facts in WRONG.items()], ids=WRONG)
def test_what_the_daemon_gives_is_no_claim_unless_it_is_the_locked_file_of_the_device(
    kept, monkeypatch, how, content, fault
):
    descriptor, path, fstat = given(kept), kept.lock_path(NAME), os.fstat
    if how == "another file":
        replace_file(kept, NAME)
    elif how == "not locked":
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    elif how == "locked by others as well":
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    elif how == "a pipe":
        os.close(descriptor)
        descriptor, end = os.pipe()
        os.close(end)
    elif how == "of another user":
        kept = replace(kept, owner=4711, keeper=4711)
        monkeypatch.setattr(broker_client.os, "fstat", lambda number: with_uid(fstat(number), 4712))
    opened = open_files()
    Daemon(monkeypatch, ({"claim": "c1", "locks": [NAME], **content}, (descriptor,)))
    with pytest.raises(ClaimError) as refused:
        asks(kept)

    fault = fault.format(path=path, uid=4712)
    assert str(refused.value) == (
        f"what the daemon gave is no claim: {fault}.  Nothing is claimed; ask an administrator."
    )
    assert open_files() == opened - 1


def with_uid(status: os.stat_result, uid: int) -> os.stat_result:
    return os.stat_result([*status[:4], uid, *status[5:]])
