"""Claim records: alive by the kernel, owned by the file's uid, harmless whatever is in them."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuguard.claims import records
from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import MAX_BYTES, ClaimWatcher, _decoded, probe, read_records, write_record

UUID = "GPU-00000000-0000-4000-8000-000000000000"
OTHER = "GPU-00000001-0000-4000-8000-000000000001"


def content(**fields: object) -> dict[str, object]:
    return {"id": "abc", "devices": [UUID], "pid": os.getpid(), "since": 5.0, "note": "n", "command": ["a"], **fields}


@contextmanager
def a_lock(directory: LockDirectory, uuid: str = UUID) -> Iterator[int]:
    """The lock of a device, held by this process."""
    lock = open_lock(directory, uuid)
    try:
        assert try_flock(lock)
        yield lock
    finally:
        os.close(lock)


@contextmanager
def a_claim(directory: LockDirectory, uuid: str = UUID, **fields: object) -> Iterator[str]:
    """A lock with a record of it; the path of the record."""
    path, record = write_record(directory, content(**fields))
    try:
        with a_lock(directory, uuid):
            yield path
    finally:
        os.close(record)


def test_a_record_says_who_holds_what_as_long_as_its_descriptor_lives(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    (alive,) = read_records(directory)
    os.close(descriptor)

    assert (alive.id, alive.uid, alive.devices, alive.note) == ("abc", os.geteuid(), (UUID,), "n")
    assert read_records(directory) == []
    assert not Path(path).exists(), "the file of a dead claim is removed by the next reader"


def test_a_record_lives_on_in_the_job_that_inherited_it(directory: LockDirectory) -> None:
    _, descriptor = write_record(directory, content())
    job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    os.close(descriptor)
    while_it_runs = [record.id for record in read_records(directory)]
    job.communicate(b"\n")

    assert while_it_runs == ["abc"]
    assert read_records(directory) == []


def test_when_a_job_should_end_is_written_between_what_stands_in_its_record(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    before = Path(path).stat()
    records.write_request(descriptor, records.ReleaseRequest("yield", "root"))
    for when in (1.5, 2**34 + 0.1234, 2.0**60):  # the last one has no room
        records.write_expected(descriptor, when)
    (record,), requests, after = read_records(directory), records.read_requests(descriptor), Path(path).stat()
    os.close(descriptor)

    assert (record.note, record.expected, after.st_ino) == ("n", 2**34 + 0.123, before.st_ino)
    assert [request.by for request in requests] == ["root"]


def test_a_record_that_its_owner_has_overwritten_is_left_alone(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content())
    Path(path).write_bytes(b"{}")
    records.write_expected(descriptor, 1.5)
    os.close(descriptor)

    assert Path(path).read_bytes() == b"{}"


def test_a_record_never_exceeds_its_bound_however_long_the_command_is(directory: LockDirectory) -> None:
    path, descriptor = write_record(directory, content(command=["x" * 900] * 50, note="y" * 9000))
    size = Path(path).stat().st_size
    (record,) = read_records(directory)
    os.close(descriptor)

    assert size <= MAX_BYTES
    assert record.devices == (UUID,)


def test_a_record_with_a_planted_symbolic_link_or_fifo_in_its_place_is_passed_over(directory: LockDirectory) -> None:
    secret = Path(directory.path) / "secret"
    secret.write_text(json.dumps(content()))
    Path(directory.records, "claim.0.link.json").symlink_to(secret)
    os.mkfifo(Path(directory.records, "claim.0.fifo.json"))

    assert read_records(directory) == []


@given(st.binary(max_size=MAX_BYTES + 10))
@example(b"[" * MAX_BYTES)  # nested too deeply
def test_whatever_bytes_a_record_holds_it_is_read_as_a_claim_of_the_files_owner(encoded: bytes) -> None:
    record = _decoded(encoded, 4242, "4242.abc")

    assert (record.uid, record.id, record.alive) == (4242, "abc", True)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["devices", "pid", "since", "note", "command"]), inner)
        ),
        max_leaves=20,
    )
)
def test_a_record_of_wrong_types_yields_no_wrong_types(document: object) -> None:
    record = _decoded(json.dumps(document).encode(), 4242, "4242.abc")

    assert all(isinstance(uuid, str) for uuid in record.devices)
    assert record.pid is None or type(record.pid) is int
    assert record.note is None or isinstance(record.note, str)
    assert record.since is None or isinstance(record.since, (int, float))


def test_a_record_that_cannot_be_opened_for_lack_of_descriptors_is_not_gone(directory, monkeypatch):
    """A guard in that state judged the jobs of all by claims of which it knew no details."""
    _, descriptor = write_record(directory, {"id": "1dea1234"})

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(records, "open_regular", full)
    with pytest.raises(OSError, match="Too many open files"):
        read_records(directory)
    os.close(descriptor)


def test_probe_joins_locks_with_their_records(directory: LockDirectory) -> None:
    with a_claim(directory):
        (claim,) = probe(directory, [UUID, OTHER])

    assert (claim.id, claim.devices, claim.holders) == ("abc", (UUID,), (os.getpid(),))


def test_a_record_without_the_lock_is_no_claim_on_the_device(directory: LockDirectory) -> None:
    with a_claim(directory, OTHER, devices=[UUID, OTHER]):
        (claim,) = probe(directory, [UUID, OTHER])

    assert claim.devices == (OTHER,)


def test_a_lock_without_a_record_is_still_a_claim(directory: LockDirectory) -> None:
    with a_lock(directory):
        (claim,) = probe(directory, [UUID])

    assert (claim.devices, claim.uid, claim.holders) == ((UUID,), os.geteuid(), (os.getpid(),))


def test_the_true_holder_is_found_after_the_process_that_took_the_lock_has_died(directory: LockDirectory) -> None:
    with a_lock(directory) as lock:
        job = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    (claim,) = probe(directory, [UUID])
    job.communicate(b"\n")

    assert claim.holders == (job.pid,)
    assert probe(directory, [UUID]) == ()


def test_a_known_holder_of_a_lock_is_believed_without_asking_every_process_until_it_ends(directory, monkeypatch):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with a_claim(directory):
        (found,) = probe(directory, [UUID])
        known = [replace(found, holders=(*found.holders, gone.pid))]
        monkeypatch.setattr(records, "holders_of", lambda *_: pytest.fail("every process was asked"))
        (claim,) = probe(directory, [UUID], known=known)

    assert claim == found
    assert probe(directory, [UUID], known=known) == ()


@pytest.mark.parametrize("change", [{"id": "another"}, {"uid": 54321}, {"devices": (OTHER,)}, {"holders": ()}])
def test_what_is_known_of_another_claim_counts_for_nothing(directory: LockDirectory, change: dict[str, object]) -> None:
    with a_claim(directory):
        (found,) = probe(directory, [UUID])
        known = replace(found, **{"holders": (1,), **change})  # type: ignore[arg-type]

        assert probe(directory, [UUID], known=[known]) == (found,)


def test_a_watcher_asks_every_process_now_and_then(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    clock = [1000.0]
    monkeypatch.setattr("gpuguard.claims.records.time.monotonic", lambda: clock[0])
    really = records.holders_of
    monkeypatch.setattr(records, "holders_of", lambda *some: asked.append(clock[0]) or really(*some))
    watcher = ClaimWatcher()
    with a_claim(directory):
        for clock[0] in (1000.0, 1001.0, 1009.9, 1010.0, 1011.0):
            assert [claim.holders for claim in watcher.probe(directory, [UUID])] == [(os.getpid(),)]

    assert asked == [1000.0, 1010.0]


def test_a_watcher_prepares_what_has_a_lock_file(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gate", "queue", UUID, f"{UUID}.slot0", "MIG-1"):
        os.close(open_lock(directory, name))

    watcher, names = ClaimWatcher(), list[str]()
    monkeypatch.setattr(watcher, "probe", lambda directory, uuids: names.extend(uuids))
    watcher.prepare(directory)

    assert sorted(names) == [UUID, "MIG-1"]


def test_asking_does_not_make_lock_files(directory: LockDirectory) -> None:
    probe(directory, [UUID])

    assert not Path(directory.lock_path(UUID)).exists()


@pytest.mark.root
def test_a_record_that_names_a_device_of_another_user_does_not_take_it(directory: LockDirectory) -> None:
    with a_claim(directory, note="mine!") as forged:
        os.chown(forged, 4242, 4242)  # its owner is the file's uid, whatever it says; the holder is root
        claims = probe(directory, [UUID])

    assert [(claim.uid, claim.note) for claim in claims if UUID in claim.devices] == [(0, None)]
