"""The state of each task of a job, from its events and the claims that are held."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.batch.job_records import (
    CANCEL,
    END,
    RESUME,
    RETRY,
    SKIP,
    START,
    WITHDRAW,
    JobEvent,
    JobRecord,
    Source,
    StoredJob,
)
from gpuguard.batch.states import ENDED, Jobs, TaskState, ended_for_good, jobs_of, task_states

NOW = 1_000_000.0
HERE = Source(backend="simulated")


def a_record(job: int = 1, tasks: int = 1, **fields: Any) -> JobRecord:
    words = {"command": ("true",), "options": "{}", "source": HERE, "working_directory": "/", "submitted": NOW}
    return JobRecord(id=job, boot="boot", tasks=({},) * tasks, **{**words, **fields})


def started(attempt: int = 1, task: int = 0, boot: str = "boot", at: float = NOW) -> JobEvent:
    return JobEvent(kind=START, time=at, task=task, attempt=attempt, boot=boot, claim=f"c{task}x{attempt}", gpus=("3",))


def ended(status: int, attempt: int = 1, task: int = 0, at: float = NOW) -> JobEvent:
    return JobEvent(kind=END, time=at, task=task, attempt=attempt, status=status)


def happened(kind: str, task: int | None = None, **fields: Any) -> JobEvent:
    return JobEvent(kind=kind, time=NOW, task=task, **fields)


def state_of(*events: JobEvent, claims: Any = (), boot: str = "boot", **fields: Any) -> TaskState:
    held = claims if isinstance(claims, dict) or claims is None else dict.fromkeys(claims, True)
    return task_states(StoredJob(a_record(**fields), events), held, boot)[0]


def jobs(*stored: StoredJob | JobRecord, claims: Any = (), unread: Any = (), most_running: int | None = None) -> Jobs:
    kept = [each if isinstance(each, StoredJob) else StoredJob(each) for each in stored]
    return jobs_of(kept, {HERE: dict.fromkeys(claims, True)}, "boot", unread, most_running)


def startable(these: Jobs, now: float = NOW) -> list[tuple[int, int]]:
    return [(state.job, state.task) for state in these.waiting(now) if not state.blocked]


def reasons(these: Jobs, now: float = NOW) -> list[str]:
    return [state.why or "" for state in these.waiting(now)]


RETRIED = happened(RETRY, 0, attempt=1, boot="boot")
RESUMED = happened(RESUME, boot="later")
TWICE = (started(), ended(1), started(2), ended(1, 2))
NAMED = {"retries": 1, "retry_on": (1, 137)}
STATES: dict[str, tuple[tuple[JobEvent, ...], dict[str, Any], str]] = {
    "it has not started": ((), {}, "waiting"),
    "its claim has lost its supervisor": ((started(),), {"claims": {"c0x1": False}}, "unwatched"),
    "what waits is resumed": ((RESUMED,), {"boot": "later"}, "waiting"),
    "what ran is resumed": ((started(), RESUMED), {"boot": "later"}, "waiting"),
    "a restart after it was resumed": ((started(), RESUMED), {"boot": "latest"}, "lost"),
    "what runs is resumed": ((started(), happened(RESUME, boot="boot")), {"claims": ["c0x1"]}, "running"),
    "what has ended is resumed": ((started(), ended(1), RESUMED), {"boot": "later"}, "failed"),
    "what was cancelled is resumed": ((started(), happened(CANCEL), RESUMED), {"boot": "later"}, "cancelled"),
    "it was cancelled, and its supervisor killed": ((started(), happened(CANCEL)), {}, "cancelled"),
    "it was cancelled after its end": ((started(), ended(0), happened(CANCEL)), {}, "completed"),
    "an earlier attempt ends": ((started(), RETRIED, started(2), ended(0, 1)), {"claims": ["c0x2"]}, "running"),
    "it may be tried once more": (TWICE, {"retries": 2}, "waiting"),
    "it was tried as often as it may": ((*TWICE, started(3), ended(1, 3)), {"retries": 2}, "failed"),
    "an exit code that is tried again": ((started(), ended(137)), NAMED, "waiting"),
    "an exit code that is not tried again": ((started(), ended(2)), NAMED, "failed"),
    "cancelled while it ran": ((started(), happened(CANCEL), ended(143)), {"retries": 3, "requeue": 3}, "cancelled"),
    "cancelled before it is tried again": ((started(), ended(1), happened(CANCEL)), {"retries": 3}, "cancelled"),
    "it asks to be queued again": ((started(), ended(75)), {"requeue": 1}, "waiting"),
    "it asks too often": ((started(), ended(75), started(2), ended(75, 2)), {"requeue": 1}, "failed"),
    "it does not ask to be queued again": ((started(), ended(1)), {"requeue": 1}, "failed"),
    "a retry has all of its retries": (
        (*TWICE, happened(RETRY, 0, attempt=2, boot="boot"), started(3), ended(1, 3)), {"retries": 1}, "waiting"
    ),
    "a retry was said twice": ((started(), ended(1), RETRIED, started(2), RETRIED), {"claims": ["c0x2"]}, "running"),
    "an event is unknown": ((happened("later"), happened(SKIP, 0), happened(SKIP, 0)), {}, "skipped"),
}  # fmt: skip


@pytest.mark.parametrize(("events", "facts", "state"), STATES.values(), ids=STATES)
def test_the_state_of_a_task_is_what_its_events_say(events, facts, state):
    assert state_of(*events, **facts).state == state


def test_a_job_runs_as_long_as_its_claim_is_held():
    state = state_of(started(), claims=["c0x1"])

    assert (state.state, state.attempt, state.gpus) == ("running", 1, ("3",))


def test_claims_that_cannot_be_read_never_make_a_job_lost():
    state = state_of(started(), claims=None)

    assert state.state == "unwatched"
    assert "cannot be read" in (state.why or "")


@pytest.mark.parametrize(("status", "name"), [(0, "completed"), (1, "failed"), (75, "failed"), (143, "failed")])
def test_the_end_says_how_it_was(status, name):
    state = state_of(started(), ended(status), claims=["c0x1"])

    assert (state.state, state.status) == (name, status)


def test_a_start_without_an_end_and_without_a_claim_is_lost():
    state = state_of(started())

    assert state.state == "lost"
    assert state.is_gone


def test_what_ran_or_waited_before_the_machine_restarted_is_lost():
    state = state_of(started(), boot="later", claims=["c0x1"])  # of another job: an id is random

    assert (state.state, state.is_gone) == ("lost", False)
    assert state_of(boot="later").state == "lost"
    assert "resume" in (state_of(boot="later").why or "")


TOLD = JobEvent(kind=END, time=NOW, task=0, attempt=1, status=143, outcome="signal")


@pytest.mark.parametrize("status", [0, 143])
def test_what_was_told_to_end_before_the_machine_restarted_is_lost_and_resumed(status):
    events = started(), replace(TOLD, status=status)

    assert state_of(*events).state == {0: "completed", 143: "failed"}[status]
    assert (state_of(*events, boot="next").state, state_of(*events, boot="next").status) == ("lost", None)
    assert state_of(*events, happened(RESUME, boot="next"), boot="next").state == "waiting"
    assert state_of(started(), ended(status), boot="next").state != "lost"
    assert state_of(started(), happened(CANCEL), TOLD, boot="next").state == "cancelled"


def test_a_job_that_waits_is_cancelled_at_once():
    state = state_of(happened(CANCEL))

    assert (state.state, state.ended) == ("cancelled", NOW)


def test_a_job_that_runs_goes_on_running_until_its_cancel_is_done():
    running = state_of(started(), happened(CANCEL), claims=["c0x1"])
    over = state_of(started(), happened(CANCEL), ended(143))

    assert (running.state, running.cancelled) == ("running", True)
    assert (over.state, over.status) == ("cancelled", 143)


@pytest.mark.parametrize(
    "events",
    [
        [started(), happened(CANCEL, why="by root"), ended(143)],
        [happened(CANCEL, why="by root")],
        [started(), happened(CANCEL, why="by root")],
        [happened(CANCEL, why="by root"), started(), happened(WITHDRAW, claim="c0x1")],
    ],
)
def test_who_has_cancelled_a_job_is_told_if_that_was_not_its_user(events):
    assert state_of(*events).why == "by root"
    assert state_of(*(replace(event, why=None) for event in events)).why is None


def test_a_job_that_another_user_wants_to_end_says_so_while_it_runs():
    assert state_of(started(), happened(CANCEL, why="by root"), claims=["c0x1"]).why == "by root"
    assert "being ended" in str(state_of(started(), happened(CANCEL), claims=["c0x1"]).why)


def test_a_job_that_was_cancelled_at_the_moment_of_its_start_is_withdrawn():
    for events in ((happened(CANCEL), started()), (started(), happened(CANCEL))):
        assert state_of(*events, claims=["c0x1"]).cancelled
        assert state_of(*events, happened(WITHDRAW, 0, attempt=1, claim="c0x1")).state == "cancelled"


def test_a_start_that_was_withdrawn_did_not_happen():
    state = state_of(started(), happened(WITHDRAW, 0, attempt=1, claim="c0x1"), started(attempt=2), ended(0, attempt=2))

    assert state_of(started(), happened(WITHDRAW, 0, attempt=1, claim="c0x1")) == state_of()
    assert state.state == "completed"


def test_of_two_dispatchers_the_first_has_started_a_task_and_the_second_withdraws():
    second = JobEvent(kind=START, time=NOW, task=0, attempt=1, boot="boot", claim="other")
    withdrawn = happened(WITHDRAW, 0, attempt=1, claim="other")

    assert state_of(started(), second, claims=["c0x1", "other"]).claim == "c0x1"
    assert state_of(started(), second, withdrawn, claims=["c0x1"]).state == "running"


def test_the_pause_before_a_retry_doubles():
    first = state_of(started(), ended(1), retries=3, retry_delay=30.0)
    second = state_of(started(), ended(1), started(2), ended(1, 2), retries=3, retry_delay=30.0)

    assert (first.not_before, second.not_before) == (NOW + 30, NOW + 60)


@pytest.mark.parametrize(
    "events",
    [(started(), ended(1)), (started(), ended(0)), (started(),), (started(), happened(CANCEL), ended(143))],
    ids=["failed", "completed", "lost", "cancelled"],
)
def test_a_retry_starts_anew_whatever_has_ended(events):
    state = state_of(*events, happened(RETRY, 0, attempt=1, boot="boot"))

    assert (state.state, state.attempt, state.cancelled) == ("waiting", 1, False)


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_job_that_a_policy_asks_to_wait_again_does_so_however_it_ended_but_not_for_ever(status):
    asked = [replace(ended(status, attempt), outcome="requeue") for attempt in (1, 2)]

    assert (state_of(started(), asked[0], requeue=1).state, state_of(started(), asked[0], requeue=1).requeues) == (
        "waiting",
        1,
    )
    assert state_of(started(), asked[0], started(2), requeue=1, claims=["c0x2"]).requeues == 1
    assert state_of(started(), asked[0], started(2), asked[1], requeue=1).state in ("completed", "failed")
    assert state_of(started(), asked[0]).state in ("completed", "failed")
    assert state_of(started(), happened(CANCEL), asked[0], requeue=1).state == "cancelled"


def test_an_event_without_a_task_is_of_all_tasks():
    stored = StoredJob(a_record(tasks=3), (started(task=1), ended(0, task=1), happened(CANCEL)))

    assert [state.state for state in task_states(stored, {}, "boot")] == ["cancelled", "completed", "cancelled"]


def test_tasks_start_in_the_order_of_their_jobs_and_a_job_may_be_put_first():
    assert startable(jobs(a_record(1, 2), a_record(2))) == [(1, 0), (1, 1), (2, 0)]
    assert startable(jobs(a_record(1), a_record(2, rank=-5.0))) == [(2, 0), (1, 0)]


def test_a_job_keeps_its_own_limit():
    running = StoredJob(a_record(tasks=3, at_most=2), (started(),))
    these = jobs(running, claims=["c0x1"])

    assert startable(these) == [(1, 1)]
    assert "--at-most 2" in reasons(these)[1]


def test_what_is_cancelled_and_still_runs_counts_against_the_limit():
    ending = StoredJob(a_record(tasks=2, at_most=1), (started(), happened(CANCEL, 0)))

    assert startable(jobs(ending, claims=["c0x1"])) == []
    assert startable(jobs(ending)) == [(1, 1)]


def test_the_site_limits_how_many_tasks_of_one_user_run():
    running = StoredJob(a_record(1, 2), (started(),))
    these = jobs(running, a_record(2), claims=["c0x1"], most_running=2)

    assert startable(these) == [(1, 1)]
    assert "the site" in reasons(these)[1]


def test_a_job_waits_for_the_jobs_before_it():
    first = StoredJob(a_record(1), (started(),))
    these = jobs(first, a_record(2, after=(1,)), claims=["c0x1"])

    assert startable(these) == []
    assert reasons(these) == ["waits for job 1"]
    assert startable(jobs(StoredJob(a_record(1), (started(), ended(1))), a_record(2, after=(1,)))) == [(2, 0)]


def test_a_job_starts_once_all_jobs_before_it_have_succeeded():
    before = [StoredJob(a_record(job), (started(), ended(0))) for job in (1, 2)]

    assert startable(jobs(*before, a_record(3, after_ok=(1, 2)))) == [(3, 0)]


def test_a_job_whose_predecessor_failed_is_doomed():
    failed = StoredJob(a_record(1), (started(), ended(1)))
    these = jobs(failed, replace(failed, record=a_record(4)), a_record(2, after_ok=(1, 4)), a_record(3, after_ok=(2,)))

    assert startable(these) == []
    assert [state.job for state, _why in these.doomed()] == [2]


def test_a_job_that_was_skipped_dooms_the_next():
    failed = StoredJob(a_record(1), (started(), ended(1)))
    skipped = StoredJob(a_record(2, after_ok=(1,)), (happened(SKIP, 0),))
    these = jobs(failed, skipped, a_record(3, after_ok=(2,)))

    assert these.states[2][0].state == "skipped"
    assert [state.job for state, _why in these.doomed()] == [3]


def test_a_failure_that_is_tried_again_dooms_no_job():
    again = StoredJob(a_record(1, retries=1), (started(), ended(1)))

    assert list(jobs(again, a_record(2, after_ok=(1,))).doomed()) == []


def test_a_predecessor_that_cannot_be_read_has_neither_succeeded_nor_failed():
    these = jobs(a_record(2, after_ok=(1,)), unread=[1])

    assert startable(these) == []
    assert list(these.doomed()) == []
    assert "cannot be read" in reasons(these)[0]


def test_a_job_does_not_start_while_it_pauses_before_its_next_attempt():
    these = jobs(StoredJob(a_record(retries=1, retry_delay=30.0), (started(), ended(1))))

    assert startable(these) == []
    assert reasons(these) == ["waits before its next attempt"]
    assert these.next_time(NOW) == NOW + 30
    assert startable(these, NOW + 30) == [(1, 0)]


def test_a_job_does_not_start_before_its_time_or_while_it_is_held():
    these = jobs(a_record(1, begin=NOW + 60), a_record(2, held=True))

    assert startable(these) == []
    assert these.next_time(NOW) == NOW + 60
    assert startable(these, NOW + 60) == [(1, 0)]


def test_a_job_that_another_user_holds_says_who_does():
    assert "held by root" in reasons(jobs(a_record(held=True, held_by="root")))[0]


@pytest.mark.parametrize(
    ("events", "is_final"),
    [
        ((), False),
        ((started(),), False),
        ((started(), ended(0)), True),
        ((started(), ended(1)), True),
        ((happened(CANCEL),), True),
        ((happened(SKIP),), True),
        ((started(), ended(0), happened(RETRY, 0, attempt=1)), False),
        ((started(), happened(CANCEL)), False),
    ],
)
def test_only_the_end_that_the_events_tell_is_one_for_good(events, is_final):
    assert ended_for_good([state_of(*events)]) == is_final


@dataclass
class World:
    """One task as it really is, told by the actors that write its events; the reference of the test below."""

    events: list[JobEvent] = field(default_factory=list)
    boot: int = 1
    attempt: int = 0
    is_running: bool = False  # its processes live
    is_watched: bool = False  # its supervisor lives
    is_cancelled: bool = False  # since it was last let go
    starts: int = 0  # since its user has last said "again"
    last: int | None = None  # exit status of the last attempt, if it was written

    @property
    def claims(self) -> dict[str, bool]:
        return {f"c{self.attempt}": self.is_watched} if self.is_running else {}

    def state(self, record: JobRecord) -> TaskState:
        return task_states(StoredJob(record, tuple(self.events)), self.claims, f"boot{self.boot}")[0]

    def write(self, kind: str, **fields: Any) -> None:
        self.events.append(JobEvent(kind=kind, time=NOW, **fields))

    def start(self, state: TaskState) -> None:
        if state.state == "waiting":
            assert not self.is_running, "it would run twice"
            assert not self.is_cancelled
            self.attempt, self.is_running, self.is_watched, self.last = self.attempt + 1, True, True, None
            self.starts += 1
            facts = {"task": 0, "attempt": self.attempt, "boot": f"boot{self.boot}", "claim": f"c{self.attempt}"}
            self.write(START, **facts)

    def told(self, state: TaskState) -> None:
        self.end(143, outcome="signal")

    def end(self, status: int, **fields: Any) -> None:
        if self.is_running and self.is_watched:
            self.write(END, task=0, attempt=self.attempt, status=status, **fields)
            self.is_running, self.last = False, status
        self.is_running = False

    def cancel(self, state: TaskState) -> None:
        if state.state not in ENDED - {"lost"}:
            self.write(CANCEL)
            self.is_cancelled = True

    def retry(self, state: TaskState) -> None:
        if state.state in ENDED:
            self.write(RETRY, task=0, attempt=state.attempt, boot=f"boot{self.boot}")
            self.is_cancelled, self.starts = False, 0

    def resume(self, state: TaskState) -> None:
        if state.state == "lost" and not state.is_gone:
            self.write(RESUME, boot=f"boot{self.boot}")
            self.starts = 0

    def restart(self) -> None:
        self.boot, self.is_running = self.boot + 1, False


ACTS = ["start", "start", "start", "end0", "end1", "end75", "told", "kill", "cancel", "retry", "resume", "restart"]


@given(
    st.lists(st.sampled_from(ACTS), max_size=25), st.integers(0, 2), st.integers(0, 2), st.sampled_from([None, (1,)])
)
def test_whatever_happens_no_task_runs_twice_and_its_state_is_true(acts, retries, requeue, retry_on):
    record = replace(a_record(retries=retries, requeue=requeue, retry_on=retry_on), boot="boot1")
    world = World()
    for act in acts:
        state = world.state(record)
        if act.startswith("end"):
            world.end(int(act[3:]))
        elif act == "kill":
            world.is_watched = False
        elif act == "restart":
            world.restart()
        else:
            getattr(world, act)(state)
        state = world.state(record)
        check(state, world, retries, requeue)
        if ended_for_good([state]):
            assert state == task_states(StoredJob(record, tuple(world.events)), None, "a later boot")[0]


def check(state: TaskState, world: World, retries: int, requeue: int) -> None:
    """Compare what the events say with what is so."""
    assert (state.state in ("running", "unwatched")) == world.is_running
    assert (state.state == "running") == (world.is_running and world.is_watched)
    assert state.attempt == world.attempt
    assert world.starts <= 1 + retries + requeue, "it is tried again without end"
    if state.state == "completed":
        assert world.last == 0
    if state.state == "failed":
        assert world.last not in (0, None)
    if world.is_cancelled and not world.is_running:
        assert state.state == "cancelled"
