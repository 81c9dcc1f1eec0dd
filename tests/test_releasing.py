"""A claim is released from outside: all of it, for good, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot
from chances import luck
from claimholders import BY_ROOT, GPUS, a_holder, free, is_free, release
from nodes import eventually

from gpuguard import deadline, procfs
from gpuguard.claims import release as releasing
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import (
    FULL_BYTES,
    YIELD,
    ReleaseRequest,
    pending_request,
    read_requests,
    record_path,
    released_by,
    write_request,
)
from gpuguard.claims.release import computing_under, is_supervisor, lock_handle, release_locks
from gpuguard.errors import ClaimError
from gpuguard.model import ClaimRecord


def test_all_devices_of_a_claim_are_free_at_once_and_for_good_while_its_process_lives(directory):
    with a_holder(directory, *GPUS[:3]) as holder:
        with lock_handle(directory, holder.record()) as handle:
            held = free(directory)
            release_locks(handle, BY_ROOT)

        assert (held, free(directory)) == ([GPUS[3]], list(GPUS))
        assert holder.lives() and holder.record() is None
        assert not os.path.exists(record_path(directory, holder.uid, holder.id))
        said = holder.does("claim.reassert()")
        assert said.startswith("ClaimLost: the claim 1dea1234 was released by root") and "another user waits" in said
        assert free(directory) == list(GPUS)
        assert holder.does("claim.reassert()") == "None"  # it holds nothing any more: there is nothing to lose
        assert holder.does("claim.release()") == "None"


def test_others_keep_what_they_took_meanwhile(directory):
    with a_holder(directory, *GPUS[:2]) as holder:
        release(directory, holder.record())
        with a_holder(directory, *GPUS[:2], name="0ther") as other:
            assert "released by root" in holder.does("claim.reassert()")
            assert holder.does("claim.release()") == "None"
            assert free(directory) == list(GPUS[2:]) and other.record()


def test_a_bystanders_claim_of_the_same_user_and_even_of_the_same_process_stays(directory):
    second = (
        f"[globals().update(l2=(take_lock(directory, {GPUS[2]!r}, fcntl.LOCK_EX),)),"
        f" globals().update(c2=Claim('5ec0nd', (SimpleNamespace(uuid={GPUS[2]!r}, index=0),), l2)),"
        " c2.write_record(directory)] and None"
    )
    with a_holder(directory, GPUS[0]) as holder, a_holder(directory, GPUS[1], name="other") as bystander:
        assert holder.does(second) == "None"
        release(directory, holder.record())

        assert free(directory) == [GPUS[0], GPUS[3]]
        assert (holder.does("c2.reassert()"), bystander.does("claim.reassert()")) == ("None", "None")


def test_an_inner_claim_gives_up_its_own_locks_and_not_those_of_the_claim_around_it(directory):
    nested = f"{GPUS[0]}.nested"
    with a_holder(directory, GPUS[0]) as outer, a_holder(directory, nested, name="1dea1234.inner") as inner:
        release(directory, inner.record())

        assert is_free(directory, nested) and not is_free(directory, GPUS[0])
        assert outer.does("claim.reassert()") == "None"


def test_the_shared_lock_of_a_whole_device_stays_with_the_other_claim_of_the_process(directory):
    two = (
        "[globals().update({n: Claim(n, (SimpleNamespace(uuid=u, index=0),),"
        f" (take_lock(directory, u, fcntl.LOCK_EX), take_lock(directory, {GPUS[0]!r}, fcntl.LOCK_SH)))}})"
        " or globals()[n].write_record(directory) for n, u in (('one', 'MIG-1'), ('two', 'MIG-2'))] and None"
    )
    with a_holder(directory) as holder:
        holder.does(two)
        release(directory, ClaimRecord("one", holder.uid, "", ("MIG-1",)))

        assert (is_free(directory, "MIG-1"), is_free(directory, "MIG-2"), is_free(directory, GPUS[0])) == (
            True, False, False,
        )  # fmt: skip
        assert holder.does("two.release()") == "None"
        assert is_free(directory, GPUS[0])


@pytest.mark.parametrize("unlocked", range(4))
def test_what_a_killed_releaser_began_is_finished_by_the_claim_itself_or_by_the_next_one(directory, unlocked):
    for finish in ("claim", "releaser"):
        name = f"1dea{finish}"
        with a_holder(directory, *GPUS, name=name) as holder:
            record = holder.record()
            if (child := os.fork()) == 0:
                killed_after(unlocked, directory, record)
            os.waitpid(child, 0)
            assert len(free(directory)) == unlocked  # half: all of it is decided, and is seen to be
            if finish == "claim":
                assert "released by root" in holder.does("claim.reassert()")
            else:
                release(directory, record)

            assert free(directory) == list(GPUS) and holder.record() is None


def killed_after(unlocked: int, directory: LockDirectory, record: ClaimRecord) -> None:
    """Release, and die of SIGKILL before the next unlock."""
    left, real = [unlocked], fcntl.flock

    def flock(descriptor: Any, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        real(descriptor, operation)

    with lock_handle(directory, record) as handle:
        releasing.fcntl.flock = flock
        release_locks(handle, BY_ROOT)
    os._exit(1)


RELEASE = """
import sys
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import RELEASED, ReleaseRequest, read_record
from gpuguard.claims.release import lock_handle, release_locks
directory = lock_directory(sys.argv[1])
claim = read_record(directory, int(sys.argv[2]), sys.argv[3])
print("now", flush=True)
with lock_handle(directory, claim) as handle:
    release_locks(handle, ReleaseRequest(RELEASED, "root"))
"""


def test_whichever_is_killed_at_whatever_instant_a_claim_is_held_or_free_and_never_half(directory):
    chance, seen, longest = luck(4), {"held": 0, "free": 0}, 0.03
    with a_holder(directory, GPUS[3], name="bystander") as bystander:
        for turn in range(32):
            with a_holder(directory, *GPUS[:3]) as holder:
                words = [sys.executable, "-c", RELEASE, directory.path, str(holder.uid), holder.id]
                with subprocess.Popen(words, stdout=subprocess.PIPE) as releaser:
                    assert releaser.stdout and releaser.stdout.readline() == b"now\n"
                    time.sleep(chance.uniform(0, longest))
                    (releaser if turn % 2 else holder.child).kill()
                    (releaser if turn % 2 else holder.child).wait()
                if turn % 2 and holder.record():
                    holder.does("claim.reassert()")  # as the next tick of `gpuguard run` does
                now = free(directory, GPUS[:3])
                assert now in ([], list(GPUS[:3]))
                assert turn % 2 or now  # whose process is dead holds nothing
                seen["free" if now else "held"] += 1
                if turn % 2:
                    longest *= 0.7 if now else 1.4  # some instants lie before the release and some behind it
                assert bystander.does("claim.reassert()") == "None" and not is_free(directory, GPUS[3])
            assert free(directory, GPUS[:3]) == list(GPUS[:3])

    assert min(seen.values()) >= 1, seen


def test_nothing_is_unlocked_when_the_decision_cannot_be_written_down(directory, monkeypatch):
    def full(descriptor: int, request: ReleaseRequest) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(releasing, "write_request", full)
    with a_holder(directory, *GPUS) as holder:
        with lock_handle(directory, holder.record()) as handle, pytest.raises(OSError, match="space"):
            release_locks(handle, BY_ROOT)

        assert free(directory) == [] and holder.does("claim.reassert()") == "None"


def test_a_file_that_does_not_answer_holds_up_one_thread_and_no_request(directory, monkeypatch):
    """One of FUSE, say, whose owner never lets go whoever closes a copy of it."""
    answers, really, before = threading.Event(), releasing._is_lock, len(os.listdir("/proc/self/fd"))
    with a_holder(directory, GPUS[0]) as holder, monkeypatch.context() as patch:
        patch.setattr(deadline, "SECONDS", 0.03)
        patch.setattr(releasing, "_is_lock", lambda *some: answers.wait(60) and really(*some))
        for _ in range(3):
            with pytest.raises(ClaimError, match="does not answer"), lock_handle(directory, holder.record()):
                pass
        assert [kind for _, kind in deadline._hanging] == ["lent"]
        answers.set()
        assert eventually(lambda: bool(releasing.in_time(os.getpid(), "lent", lambda: True)))
        release(directory, holder.record())

        assert is_free(directory, GPUS[0]), "and what came too late was given back"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_that_is_closed_while_it_is_borrowed_is_no_fault(directory, monkeypatch):
    def closed(*_: object) -> int:
        raise OSError(errno.EBADF, "closed")

    with a_holder(directory, GPUS[0]) as holder:
        monkeypatch.setattr(releasing, "_getfd", closed)
        with pytest.raises(ClaimError, match="just ending"), lock_handle(directory, holder.record()):
            pass


def test_nobody_is_searched_for_longer_than_it_is_worth(directory, monkeypatch):
    with a_holder(directory, GPUS[0]) as holder:
        monkeypatch.setattr(releasing, "SEARCH_SECONDS", -1.0)
        with pytest.raises(ClaimError, match="Look again"), lock_handle(directory, holder.record()):
            pass


def test_a_claim_that_has_ended_lends_no_locks(directory):
    with a_holder(directory, GPUS[0]) as holder:
        record = holder.record()
    with pytest.raises(ClaimError, match="has ended"), lock_handle(directory, record):
        pass


def a_record(tmp_path: Path, behind: bytes = b"") -> int:
    path = tmp_path / "record"
    path.write_bytes(b'{"id": "x"}' + behind)
    return os.open(path, os.O_RDWR)


def test_requests_are_read_in_their_order_and_the_last_one_waits_for_its_answer(tmp_path):
    record = a_record(tmp_path)
    before = pending_request(record)
    write_request(record, ReleaseRequest(YIELD, "alice", "näher", 5.0))
    asked = pending_request(record)
    write_request(record, ReleaseRequest("refused", "gpuguard run", "pid 3 computes"))

    assert (before, asked, pending_request(record)) == (None, ReleaseRequest(YIELD, "alice", "näher", 5.0), None)
    assert [request.what for request in read_requests(record)] == ["yield", "refused"]
    assert released_by(record) is None


@pytest.mark.parametrize(
    "junk",
    [
        b"\n", b"\nx\n", b"\n[]\n", b'\n{"what": "released"', b'\n{"what": "bogus"}\n', b'\n{"what": ["released"]}\n',
        b"\n" + b"[" * 9000 + b"\n", b"\n\xff\xfe\n", b"\n" + b"x" * 100_000, b'\n{"what": 7}\n', b"\nnull\n",
    ],
)  # fmt: skip
def test_what_is_no_request_is_none_and_holds_up_nobody(tmp_path, junk):
    assert read_requests(a_record(tmp_path, junk)) == ()
    assert released_by(a_record(tmp_path, junk)) is None


def test_a_request_behind_junk_is_read_and_a_record_that_is_full_says_so(tmp_path):
    record = a_record(tmp_path, b"\n" + b"x" * 20_000)
    write_request(record, BY_ROOT)
    assert released_by(record) is not None

    with pytest.raises(ClaimError, match="full"):
        write_request(a_record(tmp_path, b"x" * (FULL_BYTES + 1)), ReleaseRequest(YIELD, "bob"))


def test_a_claim_whose_descriptors_the_program_has_closed_reads_no_requests():
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)

    assert (released_by(writer), pending_request(writer)) == (None, None)


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        (b"\nSigCgt:\t0000000000400000\n", True),
        (b"\nSigCgt:\t0000000000200000\n", False),
        (b"\nSigCgt:\tnothing\n", False),
        (b"\nSigCgt:\n", False),
        (None, False),
    ],
    ids=["SIGURG", "another signal", "no number", "empty", "gone"],
)
def test_only_a_process_that_catches_sigurg_is_a_supervisor(monkeypatch, status, waits):
    monkeypatch.setattr(procfs, "read_proc", lambda *_: status)

    assert is_supervisor(4711) is waits


MINE = ClaimRecord("c", 1001, "alice", ("GPU-A",), pid=50, holders=(50,))


@pytest.mark.parametrize(
    ("process", "counts"),
    [
        (a_process(7, uid=1001), True),
        (a_process(7, uid=0), True),  # a container
        (a_process(7, uid=None, start_time=None), True),
        (a_process(50, uid=1002), True),  # sudo: the wrapper itself
        (a_process(7, uid=1002), False),
        (a_process(7, uid=1001, kind="graphics"), False),
    ],
)
def test_a_process_that_may_belong_to_the_claim_computes_under_it(process, counts):
    users, unknown = computing_under(MINE, a_snapshot(a_device(uuid="GPU-A", processes=(process,))), {})

    assert (bool(users), unknown) == (counts, None)


@pytest.mark.parametrize(
    "devices",
    [
        (),
        (a_device(uuid="GPU-B"),),
        (a_device(uuid="GPU-A", processes=None),),
        (a_device(uuid="GPU-A", processes_plausible=False),),
        (a_device(uuid="GPU-A"), a_device(1, uuid="MIG-1", parent_uuid="GPU-A", processes=None)),
    ],
)
def test_what_cannot_be_seen_is_unknown_and_not_nobody(devices):
    assert computing_under(MINE, a_snapshot(*devices), {})[1]
