"""The records of jobs on the disk: whole or not at all, and no id twice, whatever ends the process that writes them."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpuguard.batch import job_facts
from gpuguard.batch.job_facts import open_jobs, read_jobs
from gpuguard.batch.job_records import CANCEL, END, RETRY, START, JobEvent, JobRecord, JobStore, Source, new_record
from gpuguard.batch.states import ENDED, Jobs
from gpuguard.errors import InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.procfs import boot_id

ENVIRONMENT = {"PATH": "/bin", "HOME": "/home/alice"}
CALLS = ("mkdir", "makedirs", "open", "write", "fsync", "rename", "close", "rmdir", "unlink", "fchmod", "listdir")


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    return JobStore(str(tmp_path / "jobs"))


def a_job(*command: str) -> JobRecord:
    return new_record(command or ("true",), "{}", Source(backend="simulated"))


def is_whole(store: JobStore, job: int) -> bool:
    stored = store.read(job)
    return stored is not None and stored.record.command == ("true",) and store.environment(job) == ENVIRONMENT


def failing(number: int, fail: Callable[[], None]) -> Iterator[None]:
    """Call *fail* instead of the system call *number* (from 0), of those that CALLS names; as a generator to begin."""
    count = -1

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def instead(*words: object, **more: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                fail()
            return call(*words, **more)

        return instead

    before = {name: getattr(os, name) for name in CALLS}
    for name, call in before.items():
        setattr(os, name, counted(call))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(os, name, call)


def killed_at(number: int, act: Callable[[], int]) -> int | None:
    """Do *act* in a process that is killed at its system call *number*; return what it said in time, or None."""
    said, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kill = failing(number, lambda: os.kill(os.getpid(), 9))
            next(kill)
            job = act()
            next(kill, None)
            os.write(say, b"%d" % job)
        finally:
            os._exit(0)
    os.close(say)
    os.waitpid(pid, 0)
    try:
        return int(os.read(said, 20) or 0) or None
    finally:
        os.close(said)


def test_what_was_stored_is_read(store):
    record = store.add(a_job("python", "train.py", "\udce9"), ENVIRONMENT)

    assert record.id == 1
    assert store.read(1).record == record
    assert store.environment(1) == ENVIRONMENT
    assert store.ids() == [1]


def test_events_are_read_in_their_order_with_their_zeros(store):
    job = store.add(a_job(), ENVIRONMENT).id
    why = sentence("job.gone", "its gpuguard was killed, and how it ended is unknown: gpuguard jobs retry")
    start = JobEvent(kind=START, time=1.0, task=0, attempt=1, boot="b", claim="c", gpus=("0",))
    end = JobEvent(kind=END, time=2.0, task=0, attempt=1, status=0, why=why)
    store.append(job, start, end)
    store.append(job, JobEvent(kind=CANCEL, time=3.0))

    events = store.read(job).events
    assert events == (start, end, JobEvent(kind=CANCEL, time=3.0))
    assert events[1].why.key == why.key


def test_a_line_that_a_full_disk_cut_off_costs_only_itself(store):
    job = store.add(a_job(), ENVIRONMENT).id
    with open(store.path(job, "events"), "a") as events:
        events.write('\n{"kind": "start", "ti')
    store.append(job, JobEvent(kind=CANCEL, time=3.0))

    assert [event.kind for event in store.read(job).events] == [CANCEL]


def test_only_their_user_can_read_records_and_logs(store):
    job = store.add(a_job(), ENVIRONMENT).id

    modes = {path.name: path.stat().st_mode & 0o777 for path in Path(store.path(job)).iterdir()}
    assert modes == {"job.json": 0o600, "environment.json": 0o600, "events": 0o600}
    assert Path(store.path(job)).stat().st_mode & 0o777 == 0o700


def test_a_job_whose_process_was_killed_at_any_moment_is_there_or_not_and_no_id_comes_twice(store):
    said = []
    for number in range(200):
        job = killed_at(number, lambda: store.add(a_job(), ENVIRONMENT).id)
        said += [job] if job else []
        assert all(is_whole(store, each) for each in {*said, *store.ids()})
        if job:
            break

    assert number > 15, "it was not killed between all of its system calls"
    assert said == [store.ids()[-1]]
    assert store.add(a_job(), ENVIRONMENT).id > said[0]


def test_a_job_that_cannot_be_stored_leaves_nothing(store):
    record = a_job()
    last, failures = store.add(record, ENVIRONMENT).id, list[int]()

    def full() -> None:
        failures.append(number)
        raise OSError(errno.ENOSPC, "no space left on device")

    for number in range(200):
        fail = failing(number, full)
        next(fail)
        try:
            last = store.add(record, ENVIRONMENT).id
        except OSError:
            pass
        finally:
            next(fail, None)
            assert all(is_whole(store, job) for job in store.ids())
            assert [name for name in os.listdir(store.place) if name.startswith(".new")] == []
        if number not in failures:
            break
    assert failures == list(range(number)) and number > 15, "not each of its system calls failed once"
    assert last == store.ids()[-1]


def test_two_processes_that_store_at_the_same_moment_get_different_ids(store):
    children = []
    for _child in range(8):
        if (pid := os.fork()) == 0:
            for _job in range(5):
                store.add(a_job(), ENVIRONMENT)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8

    assert store.ids() == list(range(1, 41))
    assert {store.read(job).id for job in store.ids()} == set(store.ids())


def test_the_id_of_a_job_that_was_removed_is_not_given_again(store):
    jobs = [store.add(a_job(), ENVIRONMENT).id for _ in range(3)]
    for job in jobs:
        store.remove(job)

    assert store.ids() == []
    assert store.add(a_job(), ENVIRONMENT).id == 4


@pytest.mark.parametrize("content", ["", "{}", "garbage", '{"id": 1, "tasks": []}', "[" * 1000])
def test_a_record_that_cannot_be_read_costs_only_itself_and_is_named(store, content):
    for _ in range(2):
        store.add(a_job(), ENVIRONMENT)
    Path(store.path(1, "job.json")).write_text(content)

    jobs = read_jobs(store)
    assert [stored.id for stored in jobs.stored] == [2]
    assert jobs.unread == (1,)


def test_a_record_of_a_later_version_is_read_without_what_it_has_more(store):
    store.add(a_job(), ENVIRONMENT)
    path = Path(store.path(1, "job.json"))
    path.write_text(path.read_text().replace("{", '{"later": [1], ', 1))

    assert is_whole(store, 1)


START_OF_1 = JobEvent(kind=START, time=1.0, task=0, attempt=1, boot=boot_id(), claim="c")
END_OF_1 = JobEvent(kind=END, time=2.0, task=0, attempt=1, status=0)


def reading_claims(monkeypatch: pytest.MonkeyPatch, *reads: Callable[[], dict[str, bool]]) -> None:
    """Let the reads of the claims that are held be these, one after the other, and then the last one for ever."""
    left = list(reads)
    monkeypatch.setattr(job_facts, "held_claims", lambda directory: (left.pop(0) if left[1:] else left[0])())


def unreadable() -> dict[str, bool]:
    raise OSError(errno.EMFILE, "too many open files")


@pytest.mark.parametrize(
    ("reads", "state"),
    [
        ([dict, lambda: {"c": True}], "running"),  # it was not seen at the moment of its hand-over
        ([dict], "lost"),
        ([unreadable], "unwatched"),
    ],
)
def test_a_job_is_lost_only_if_its_claim_is_certainly_gone(store, monkeypatch, reads, state):
    store.append(store.add(a_job(), ENVIRONMENT).id, START_OF_1)
    reading_claims(monkeypatch, *reads)

    assert read_jobs(store).states[1][0].state == state


def test_a_job_that_ends_between_two_reads_is_not_lost(store, monkeypatch):
    def ends() -> dict[str, bool]:
        if len(store.read(1).events) == 1:
            store.append(1, END_OF_1)
        return {}

    store.append(store.add(a_job(), ENVIRONMENT).id, START_OF_1)
    reading_claims(monkeypatch, ends)

    assert read_jobs(store).states[1][0].state == "completed"


def test_what_changes_is_seen(store):
    store.add(a_job(), ENVIRONMENT)
    before = store.change()
    store.tell()

    assert store.change() != before


def test_what_a_killed_process_left_is_cleaned(store):
    store.add(a_job(), ENVIRONMENT)
    shutil.copytree(store.path(1), os.path.join(store.place, ".new.1.2"))
    store.remove_unfinished(2**40)

    assert sorted(os.listdir(store.place)) == ["1"]


def test_a_job_is_not_stored_in_a_directory_that_was_removed(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(InvalidRequest, match="was removed"):
        a_job()


def ended_job(store: JobStore, **fields: object) -> int:
    job = store.add(replace(a_job(), **fields), ENVIRONMENT).id
    store.append(job, START_OF_1, END_OF_1)
    return job


def still_open(jobs: Jobs) -> dict[int, list[str]]:
    return {
        job: [state.state for state in states]
        for job, states in jobs.states.items()
        if any(state.state not in ENDED for state in states)
    }


def read_by(store: JobStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> set[int]:
    """The ids of the jobs that *act* reads."""
    read, ids = store.read, set()
    monkeypatch.setattr(store, "read", lambda job: (ids.add(job), read(job))[1])
    act()
    monkeypatch.setattr(store, "read", read)
    return ids


def test_jobs_that_have_ended_are_read_once_but_for_the_last_ones(store, monkeypatch):
    jobs = [ended_job(store) for _ in range(5)]
    waits = store.add(a_job(), ENVIRONMENT).id

    assert read_by(store, monkeypatch, lambda: open_jobs(store, last=2)) == {*jobs, waits}
    assert read_by(store, monkeypatch, lambda: open_jobs(store, last=2)) == {*jobs[-2:], waits}
    assert read_by(store, monkeypatch, lambda: open_jobs(store, last=9)) == {*jobs, waits}


def test_a_job_that_is_tried_again_after_it_had_ended_waits(store):
    job = ended_job(store)
    assert still_open(open_jobs(store)) == {}
    store.append(job, JobEvent(kind=RETRY, time=3.0, task=0, attempt=1, boot=boot_id()))

    assert still_open(open_jobs(store)) == {job: ["waiting"]}


def test_a_job_that_is_lost_is_read_again_because_that_depends_on_claims(store, monkeypatch):
    store.append(store.add(a_job(), ENVIRONMENT).id, START_OF_1)
    reading_claims(monkeypatch, dict)
    assert still_open(open_jobs(store)) == {}
    reading_claims(monkeypatch, lambda: {"c": True})

    assert still_open(open_jobs(store)) == {1: ["running"]}


def test_a_job_that_had_to_succeed_is_read_although_it_has_ended(store):
    failed = ended_job(store)
    store.append(failed, JobEvent(kind=RETRY, time=3.0, task=0, attempt=1, boot=boot_id()))
    store.append(failed, replace(START_OF_1, attempt=2), replace(END_OF_1, attempt=2, status=1))
    open_jobs(store)
    store.add(replace(a_job(), after_ok=(failed,)), ENVIRONMENT)

    assert [why for _state, why in open_jobs(store).doomed()] == [f"job {failed} did not succeed (--after-ok)"]


@pytest.mark.parametrize(
    "content", ["", "{}", "garbage", '{"sizes": {"x": 1}}', '{"sizes": {"1": "2"}}', '{"sizes": 3}']
)
def test_what_is_remembered_of_ended_jobs_may_be_anything(store, content):
    ended_job(store)
    waits = store.add(a_job(), ENVIRONMENT).id
    Path(store.place, ".ended").write_text(content)

    assert still_open(open_jobs(store)) == {waits: ["waiting"]}
    assert store.ended() == {1: store.read(1).size}


def test_a_full_disk_costs_only_time(store, monkeypatch):
    def full(sizes: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ended_job(store)
    monkeypatch.setattr(store, "keep_ended", full)

    assert still_open(open_jobs(store)) == {}
    assert store.ended() == {}


def test_a_job_that_was_removed_is_not_remembered(store):
    store.remove(ended_job(store))
    ended_job(store)
    open_jobs(store)

    assert [*store.ended()] == [2]
