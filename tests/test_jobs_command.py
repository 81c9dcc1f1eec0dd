"""`gpuguard submit` and `gpuguard jobs`: jobs that outlive the terminal, through real commands on a simulated node."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from nodes import remove, start, until
from sources import ROOT

import gpuguard
from gpuguard.batch import dispatchers, logout
from gpuguard.batch.dispatchers import dispatcher_of, lock_path
from gpuguard.batch.job_facts import directory_of, read_jobs
from gpuguard.batch.job_records import START, JobEvent, JobStore
from gpuguard.batch.logout import ENDS, NEEDS_SCOPE
from gpuguard.batch.public import PublicJobs, WaitingJob
from gpuguard.batch.states import TaskState
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import read_record, read_records
from gpuguard.cli import run_command_line
from gpuguard.errors import ClaimError
from gpuguard.procfs import processes, read_memory, stat_of
from gpuguard.users import user_name


class Node:
    """A simulated node with the jobs of one user."""

    def __init__(self, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.place, self.capfd, self.store = place, capfd, JobStore()

    def __call__(self, *words: str, status: int = 0) -> str:
        """Run a command here, and return what it prints; the dispatcher that it starts is a process of its own."""
        self.capfd.readouterr()
        assert run_command_line(list(words)) == status, self.capfd.readouterr()
        return self.capfd.readouterr().out

    def fails(self, *words: str, status: int = 125) -> str:
        self.capfd.readouterr()
        assert run_command_line(list(words)) == status
        return self.capfd.readouterr().err

    def submit(self, *words: str) -> int:
        return int(self("submit", "--parsable", *words))

    def task(self, job: int, task: int = 0) -> TaskState:
        return read_jobs(self.store, ids=[job]).states[job][task]

    def until(self, job: int, state: str, task: int = 0) -> Any:
        def holds() -> TaskState | None:
            now = self.task(job, task)
            return now if now.state == state else None

        return until(holds, f"job {job}.{task} {state}, it is {self.task(job, task)}")

    def log(self, job: int, task: int = 0, attempt: int = 1) -> list[str]:
        lines = Path(self.store.log_path(job, task, attempt)).read_text().splitlines()
        return [line for line in lines if not line.startswith("gpuguard: ")]

    def until_says(self, job: int, line: str) -> None:
        path = Path(self.store.log_path(job, 0, 1))
        until(lambda: path.exists() and line in self.log(job), f"job {job} says {line}")

    def claims(self) -> list[Any]:
        return read_records(directory_of(self.source))

    @property
    def source(self) -> Any:
        return self.store.read(self.store.ids()[-1]).record.source

    def supervisor(self, job: int) -> Any:
        """The pid of the process that looks after a job, once it has got the claim from the dispatcher."""
        claim, own = self.until(job, "running").claim, self.dispatcher()

        def pid() -> int | None:
            record = read_record(directory_of(self.source), os.geteuid(), claim)
            return record.pid if record.pid != own else None

        return until(pid)

    def dispatcher(self) -> int | None:
        return dispatcher_of(directory_of(self.source), self.store, self.source)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--at-most", "0"), "--at-most 0: write 1 or more."),
        (("--array", "0-9%0"), "--array % 0: write 1 or more."),
        (("--retries=-1",), "--retries -1: write 0 or more."),
        (("--requeue=-1",), "--requeue -1: write 0 or more."),
        (("--begin", "25:00"), "--begin: there is no '25:00': write 09:00, "),
        (("--each-line", "gone"), "--each-line gone: No such file or directory.\n"),
    ],
)
def test_what_no_job_can_have_is_refused(node, words, said):
    """A job with --at-most 0 was taken, and waited without end for its own limit."""
    assert node.fails("submit", *words, "--", "true").startswith(f"gpuguard: {said}")
    assert node.store.ids() == []


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ClaimError("No space left on device.")])
def test_a_job_that_nothing_starts_yet_is_said_to_wait(node, monkeypatch, fault):
    """On a full disk a bare "[Errno 28]" stood above the id of the job, and nothing said that it waits on."""

    def changed(*_: Any) -> None:
        raise fault

    monkeypatch.setattr("gpuguard.cli.submit.detached.changed", changed)

    assert node.fails("submit", "--", "true", status=0) == (
        "gpuguard: job 1 waits, but nothing starts it yet: No space left on device.  `gpuguard jobs` tries again.\n"
    )


def kill(pid: int) -> None:
    assert pid > 1
    os.kill(pid, signal.SIGKILL)
    until(lambda: (stat := stat_of(pid)) is None or not stat.lives, f"{pid} has ended")


def ours(place: Path) -> list[int]:
    """The processes that run with this node in their environment."""
    marker = f"GPUGUARD_SIM_DIR={place / 'node'}".encode()
    pids = [pid for pid, stat in processes().items() if stat.state != "Z" and pid != os.getpid()]
    return [pid for pid in pids if marker in (read_memory(pid, "environ", 2**20) or b"").split(b"\0")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Node]:
    variables = {
        "XDG_STATE_HOME": tmp_path / "state",
        "GPUGUARD_SIM_DIR": tmp_path / "node",
        "GPUGUARD_BACKEND": "simulated",
        "GPUGUARD_DIR": tmp_path / "claims",
        "GPUGUARD_EVENTS": tmp_path / "events.jsonl",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    start(str(tmp_path / "node"), "2xH100-80GB")
    yield Node(tmp_path, capfd)
    for _round in range(20):  # a supervisor that ends may be starting a dispatcher
        for pid in ours(tmp_path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not ours(tmp_path):
            break
    remove(tmp_path)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_job_runs_to_its_end_with_the_environment_and_directory_of_its_submission(node, monkeypatch):
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/9")
    job = node.submit("--", "sh", "-c", "echo $COLOUR:$SSH_TTY:$GPUGUARD_JOB:$GPUGUARD_ATTEMPT; pwd; cat; exit 3")
    monkeypatch.setenv("COLOUR", "red")

    assert run_command_line(["jobs", "wait", "@"]) == 3
    assert node.log(job) == [f"blue::{job}:1", str(node.place)]
    assert node.task(job).state == "failed"
    assert node("jobs", "log", "-f").count("gpuguard: ") == 3  # submitted, started, ended


def test_a_sweep_is_one_job_of_which_only_so_many_tasks_run_at_a_time(node):
    job = node.submit("--sweep", "lr=0.1,0.01", "--sweep", "bs=1,2", "--at-most", "1", "--", "echo", "{lr}", "{bs}")

    assert run_command_line(["jobs", "wait", str(job)]) == 0
    assert [node.log(job, task) for task in range(4)] == [["0.1 1"], ["0.1 2"], ["0.01 1"], ["0.01 2"]]
    spans = sorted((node.task(job, task).started, node.task(job, task).ended) for task in range(4))
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(spans))
    assert "4 completed" in node("jobs")
    assert "lr=0.01  bs=2" in node("jobs", "--tasks")


def test_the_reason_that_holds_is_shown(node):
    blocker = node.submit("-n", "2", "--", "sleep", "600")
    node.until(blocker, "running")
    job = node.submit("--array", "0-1%1", "--", "true")
    name = user_name(os.geteuid())
    first, second = (line for line in node("jobs", "--tasks").splitlines() if f"{job}." in line)

    assert f"(waits for GPUs: {name} has 2)" in first
    assert "(waits for the job's own limit: --at-most 1)" in second
    assert f"(waits for GPUs: {name} has 2)" in node("jobs").splitlines()[-1]


def test_a_failure_skips_what_needs_its_success_and_a_retry_of_the_failed_is_enough(node):
    flag = node.place / "flag"
    first = node.submit("--array", "0-1", "--", "sh", "-c", f"test {{task}} = 0 || test -e {flag}")
    second = node.submit("--after-ok", "@", "--", "true")
    third = node.submit("--after-ok", "@", "--", "true")
    after = node.submit("--after", str(first), "--", "true")

    node.until(third, "skipped")
    assert node.task(second).why == f"job {first} did not succeed (--after-ok)"
    node.until(after, "completed")
    flag.touch()
    assert node("jobs", "retry", "--failed", str(first)) == f"job {first}: 1 task again.\n"
    node.until(first, "completed", task=1)
    assert [node.task(first, task).attempt for task in (0, 1)] == [1, 2]


def test_a_job_is_tried_again_as_often_as_it_may_and_asks_for_it_itself(node):
    job = node.submit("--retries", "2", "--retry-on", "4", "--", "sh", "-c", "test $GPUGUARD_ATTEMPT = 3 || exit 4")
    asks = node.submit("--requeue", "--", "sh", "-c", "test $GPUGUARD_ATTEMPT = 2 || exit 75")

    assert run_command_line(["jobs", "wait", str(job), str(asks)]) == 0
    assert (node.task(job).attempt, node.task(asks).attempt) == (3, 2)


def test_a_job_whose_directory_is_gone_has_failed_and_says_why(node, monkeypatch):
    (node.place / "gone").mkdir()
    monkeypatch.chdir(node.place / "gone")
    job = node.submit("--begin", "now+1s", "--", "true")
    monkeypatch.chdir(node.place)
    (node.place / "gone").rmdir()

    ended = node.until(job, "failed")
    assert ended.status == 125 and "No such file or directory" in ended.why
    until(lambda: not node.claims(), "the claim is released")


def test_cancel_ends_the_whole_tree_and_the_claim_is_held_until_the_last_is_dead(node):
    stubborn = "trap '' TERM; setsid sh -c \"trap '' TERM; echo up; exec sleep 600\" & exec sleep 600"
    job = node.submit("--grace", "1s", "--retries", "3", "--", "sh", "-c", stubborn)
    node.until_says(job, "up")
    marker = f"GPUGUARD_CLAIM={node.task(job).claim}".encode()

    def family() -> list[int]:
        return [pid for pid in processes() if marker in (read_memory(pid, "environ", 2**20) or b"")]

    assert len(family()) == 2
    assert "is being ended" in node("jobs", "cancel", str(job))
    while node.claims():
        assert node.task(job).state in ("running", "cancelled")
    assert family() == []
    assert node.until(job, "cancelled").attempt == 1
    assert "has ended already" in node("jobs", "cancel", str(job))


def test_a_job_that_waits_is_cancelled_held_changed_and_put_first(node):
    blocker = node.submit("-n", "2", "--", "sleep", "600")
    node.until(blocker, "running")
    jobs = [node.submit("--", "echo", str(number)) for number in range(3)]
    node("jobs", "cancel", str(jobs[0]))
    node("jobs", "hold", str(jobs[1]))
    node("jobs", "first", str(jobs[2]))
    node("jobs", "update", str(jobs[2]), "-n", "2", "--command", "echo 'two words'")

    assert node.task(jobs[0]).state == "cancelled"
    assert "held" in node("jobs", "show", str(jobs[1]))
    assert node("jobs", "update", "@", "-n", "x", status=2) == ""
    assert node("jobs", "hold", str(blocker), status=1) == ""
    node("jobs", "cancel", str(blocker))
    node.until(jobs[2], "completed")
    assert node.log(jobs[2]) == ["two words"]
    assert node.task(jobs[1]).state == "waiting"
    assert f"job {jobs[1]} has not started" in node.fails("jobs", "log", "@~1", status=2)
    node("jobs", "unhold", str(jobs[1]))
    node.until(jobs[1], "completed")
    node("jobs", "hold", str(jobs[1]), status=1)
    node("jobs", "retry", str(jobs[1]))
    node.until(jobs[1], "completed")
    assert node.task(jobs[1]).attempt == 2


def test_a_dispatcher_that_is_killed_loses_nothing_and_the_next_command_starts_another(node):
    blocker = node.submit("-n", "2", "--", "sleep", "600")
    node.until(blocker, "running")
    jobs = [node.submit("--", "true") for _ in range(2)]
    kill(until(node.dispatcher))
    assert node.task(jobs[0]).state == "waiting"
    node("jobs")

    node("jobs", "cancel", str(blocker))
    assert run_command_line(["jobs", "wait", *map(str, jobs)]) == 0
    assert until(lambda: node.dispatcher() is None)


def test_a_dispatcher_that_has_only_begun_is_not_taken_for_dead(node):
    node.submit("--hold", "--", "true")

    assert node.dispatcher() is not None


def test_the_last_job_is_shown_and_waited_for_if_none_is_named(node):
    job = node.submit("--", "sh", "-c", "exit 3")

    assert run_command_line(["jobs", "wait"]) == 3
    assert f"job:        {job}\n" in node("jobs", "show")


def test_a_dispatcher_whose_lock_was_removed_leaves_the_jobs_to_the_next_one(node):
    blocker = node.submit("-n", "2", "--", "sleep", "600")
    node.until(blocker, "running")
    first = until(node.dispatcher, "a dispatcher") if node.submit("--", "true") else None
    Path(lock_path(directory_of(node.source), node.store, node.source)).unlink()
    jobs = [node.submit("--", "true") for _ in range(2)]

    node("jobs", "cancel", str(blocker))
    assert run_command_line(["jobs", "wait", *map(str, jobs)]) == 0
    until(lambda: (stat := stat_of(first)) is None or not stat.lives, "the first dispatcher has ended")
    assert [node.task(job).attempt for job in jobs] == [1, 1]


def test_a_supervisor_that_is_killed_leaves_a_job_that_can_still_be_ended(node):
    job = node.submit("--", *python("import time; print('up', flush=True); time.sleep(600)"))
    node.until_says(job, "up")
    kill(node.supervisor(job))

    assert "unwatched" in node("jobs")
    node("jobs", "cancel", str(job))
    assert node.claims() == []
    assert node.task(job).state == "cancelled"


def test_a_supervisor_that_is_told_to_end_starts_nothing_because_the_machine_may_go_down(node):
    job = node.submit("-n", "2", "--", *python("import time; print('up', flush=True); time.sleep(600)"))
    node.until_says(job, "up")  # before that it could end as any program does, and the task would be lost
    supervisor = node.supervisor(job)
    waits = node.submit("--", "true")
    kill(until(node.dispatcher))
    os.kill(supervisor, signal.SIGTERM)
    until(lambda: (stat := stat_of(supervisor)) is None or not stat.lives)

    task = node.task(job)
    assert (task.state, task.status) == ("failed", 143) and "told to end" in task.why
    assert (node.dispatcher(), node.task(waits).state) == (None, "waiting")
    node("jobs")
    node.until(waits, "completed")


def test_a_job_of_which_all_is_gone_is_lost_and_can_be_tried_again(node):
    mark = node.place / "mark"
    job = node.submit("--", "sh", "-c", f"echo up; test -e {mark} || exec sleep 600")
    node.until_says(job, "up")
    supervisor = node.supervisor(job)
    held = [pid for pid in ours(node.place) if pid not in (supervisor, node.dispatcher())]
    for pid in (supervisor, *held):
        with suppress(ProcessLookupError):
            kill(pid)

    until(lambda: node.task(job).state == "lost")
    assert "(its gpuguard was killed" in node("jobs")
    assert run_command_line(["jobs", "wait", str(job)]) == 125
    mark.touch()
    node("jobs", "resume")
    node.until(job, "completed")


def test_what_an_earlier_boot_has_left_starts_only_when_it_is_resumed(node, monkeypatch):
    monkeypatch.setattr("gpuguard.batch.job_records.boot_id", lambda: "earlier")
    waited, ran = node.submit("--hold", "--", "true"), node.submit("--hold", "--", "true")
    monkeypatch.undo()
    node.store.append(ran, JobEvent(kind=START, time=1.0, task=0, attempt=1, boot="earlier", claim="c"))

    assert [node.task(job).state for job in (waited, ran)] == ["lost", "lost"]


def test_a_program_that_does_not_exist_and_more_gpus_than_there_are_are_refused(node):
    assert "command not found" in node.fails("submit", "--", "no-such-program")
    assert "only 2 exist" in node.fails("submit", "-n", "3", "--", "true")
    assert "nothing in the command says {lr}" in node.fails("submit", "--sweep", "lr=1,2", "--", "true")
    assert node.store.ids() == []


def test_the_gpus_of_the_shell_are_the_only_ones_of_its_jobs(node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "CUDA_VISIBLE_DEVICES=1" in node.fails("submit", "-n", "2", "--", "true")
    jobs = [node.submit("--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES") for _ in range(2)]

    assert run_command_line(["jobs", "wait", *map(str, jobs)]) == 0
    assert [node.log(job) for job in jobs] == [["1"], ["1"]]


def test_programs_submit_as_people_do(node):
    job = gpuguard.submit(["sh", "-c", "echo {lr}; exit 3"], gpus=2, sweep=["lr=1"], retries=1)

    assert job.wait() == 3
    assert (job.result, job.tasks[0].attempt) == ("failed", 2)
    assert "\n1\n" in Path(job.log).read_text()
    waits = gpuguard.submit(["sleep", "600"], after=job.id, hold=True)
    assert (waits.result, waits.log) == ("waiting", None)
    with pytest.raises(TimeoutError, match="has not ended within"):
        waits.wait(0.0)
    waits.cancel()
    assert waits.result == "cancelled"
    with pytest.raises(gpuguard.InvalidRequest):
        gpuguard.submit(["true"], no_such_option=1)
    with pytest.raises(gpuguard.InvalidRequest, match=r"a list of words, as in \['echo', 'hi'\]"):
        gpuguard.submit("echo hi")


def test_all_users_see_what_waits_and_runs_without_reading_a_home(node):
    assert "no job" in node("jobs", "--all")
    runs = node.submit("-n", "2", "--", "sleep", "600")
    node.until(runs, "running")
    waits = node.submit("--array", "0-2", "--", "echo", "{task}\x1b[31m")

    path = Path(lock_path(directory_of(node.source), node.store, node.source))
    until(lambda: "echo" in path.read_text())
    assert json.loads(node("queue", "--json"))["stalled_jobs"] == []
    kill(until(node.dispatcher))
    assert json.loads(node("queue", "--json"))["stalled_jobs"] == [{"uid": os.geteuid(), "jobs": 1}]
    rows = [line.split(None, 5) for line in node("jobs", "--all").splitlines()]
    me = user_name(os.geteuid())
    assert [row[:3] for row in rows] == [
        ["JOB", "STATE", "GPUS"],
        [f"{me}/{runs}", "running", "2"],
        [f"{me}/{waits}", "3", "waiting"],
    ]
    assert "\x1b" not in rows[2][5] and "no process of its user waits" in rows[2][5]
    told = json.loads(node("jobs", "--all", "--json"))["jobs"]
    assert [(job["id"], job["num_tasks"], len(job["devices"])) for job in told] == [
        (f"{me}/{runs}", 1, 2),
        (f"{me}/{waits}", 3, 0),
    ]
    stalled = f"{me}: 1 job in the queue, and the process that would start them was killed."
    assert stalled in node("queue") and stalled in node("doctor")
    assert node("who").count(f"job {runs}") == 2
    path.write_text("garbage")
    assert len(node("jobs", "--all").splitlines()) == 2


def test_what_waits_of_others_without_a_dispatcher_is_known_by_what_that_has_published(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    public = PublicJobs(tuple(WaitingJob(number, 1, 1, 0.0, "true") for number in (1, 2)))
    told = [(54321, False, public), (54321, False, public), (54322, True, public), (os.geteuid(), False, public)]
    monkeypatch.setattr(dispatchers, "published", lambda directory: told)

    assert dispatchers.stalled_jobs(lock_directory(str(tmp_path), make=False)) == [dispatchers.StalledJobs(54321, 4)]


def test_cancel_knows_jobs_as_well(node):
    job = node.submit("--hold", "--array", "0-1", "--", "true")

    assert node("cancel", f"{job}.1") == f"job {job}.1 is cancelled.\n"
    assert [node.task(job, task).state for task in (0, 1)] == ["waiting", "cancelled"]
    (ended,) = json.loads(node("cancel", "@", "--json"))["cancelled"]
    assert (ended["id"], ended["kind"], ended["outcome"]) == (str(job), "job", "ended")
    assert "no request and no claim" in node.fails("cancel", "99", status=1)


def test_a_submission_is_refused_where_all_ends_at_logout(node, monkeypatch):
    job = node.submit("--hold", "--", "true")
    kill(until(node.dispatcher))
    monkeypatch.setattr(logout, "fate_at_logout", lambda: ENDS)

    assert "loginctl enable-linger" in node.fails("submit", "--", "true")
    assert "loginctl enable-linger" in node.fails("jobs", "unhold", str(job), status=2)
    assert node.dispatcher() is None


def test_a_job_for_which_no_process_can_wait_yet_is_there_and_the_user_is_told(node, monkeypatch):
    monkeypatch.setattr(logout, "IN_SCOPE", ("false",))
    monkeypatch.setattr(logout, "fate_at_logout", lambda: NEEDS_SCOPE)
    job = node.submit("--", "true")

    assert node.task(job).state == "waiting"
    assert node.dispatcher() is None
    assert run_command_line(["submit", "--", "true"]) == 0
    assert "no process could be started" in node.capfd.readouterr().err
    assert gpuguard.submit(["true"]).result == "waiting"
    monkeypatch.setattr(logout, "IN_SCOPE", ("env",))
    assert run_command_line(["jobs", "wait", str(job)]) == 0


def test_a_job_of_a_slurm_job_would_end_with_it_and_is_refused(node, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")

    assert "Slurm job 77" in node.fails("submit", "--", "true")


def test_jobs_of_several_kinds_get_the_gpus_that_each_has_asked_for(node):
    blocker = node.submit("-n", "2", "--", "sleep", "600")
    node.until(blocker, "running")
    only = node.submit("--devices", "1", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    share = node.submit("--share", "--memory", "10GiB", "--devices", "0", "--", "sh", "-c", "echo $GPUGUARD_MEMORY")
    node("jobs", "cancel", str(blocker))

    assert run_command_line(["jobs", "wait", str(only), str(share)]) == 0
    assert node.log(only) == ["1"]
    assert node.log(share) == [str(10 * 2**30)]


def test_a_wide_job_that_has_waited_for_the_bound_is_not_passed_by_later_ones_of_its_user(node, monkeypatch):
    site = node.place / "line.yaml"
    site.write_text("bound: 1ms\n")
    monkeypatch.setenv("GPUGUARD_LINE", str(site))
    blocker = node.submit("--", "sleep", "600")
    node.until(blocker, "running")
    wide, narrow = (node.submit("-n", count, "--", "true") for count in "21")
    node("jobs", "cancel", str(blocker))

    assert run_command_line(["jobs", "wait", str(wide), str(narrow)]) == 0
    assert node.task(wide).started < node.task(narrow).started


def test_the_site_bounds_how_many_tasks_of_a_user_wait(node, monkeypatch):
    site = node.place / "line.yaml"
    site.write_text("jobs: {waiting: 3}\n")
    monkeypatch.setenv("GPUGUARD_LINE", str(site))
    node.submit("--hold", "--array", "0-1", "--", "true")

    assert f"over the 3 of {site}" in node.fails("submit", "--array", "0-1", "--", "true")


def test_a_job_waits_for_its_time_and_the_reason_is_shown(node):
    job = node.submit("--begin", "now+1s", "--", "true")

    assert "--begin" in node("jobs")
    ended = node.until(job, "completed")
    assert ended.started >= node.store.read(job).record.begin


def test_what_would_be_submitted_is_listed(node):
    (node.place / "lines").write_text("lr bs\n0.1 32\n0.2 64\n")

    listed = node("submit", "--dry-run", "--each-line", "lines", "--", "train", "{lr}", "a b", "{bs}", "{x}")
    assert listed.splitlines() == ["train 0.1 'a b' 32 '{x}'", "train 0.2 'a b' 64 '{x}'"]
    assert node.store.ids() == []


def test_jobs_that_have_ended_are_removed_once_they_are_old_and_no_job_needs_them(node):
    first = node.submit("--", "true")
    node.until(first, "completed")
    waits = node.submit("--hold", "--after-ok", str(first), "--", "true")

    assert node("jobs", "clean", "--older-than", "0s") == "0 jobs removed.\n"
    node("jobs", "cancel", str(waits))
    assert node("jobs", "clean") == "0 jobs removed.\n"
    node("jobs", "clean", "--older-than", "0s")
    node("jobs", "clean", "--older-than", "0s")
    assert node.store.ids() == []


def test_the_list_for_programs_says_all(node):
    job = node.submit("--note", "mine", "--", "sh", "-c", "exit 4")
    assert run_command_line(["jobs", "wait", str(job), "--for", "60s"]) == 4
    node.submit("--hold", "--after", str(job), "--array", "0-1%1", "--", "echo", "{task}")

    found, waits = json.loads(node("jobs", "--json"))["jobs"]
    assert (found["id"], found["note"], found["num_gpus"]) == (str(job), "mine", 1)
    (task,) = found["tasks"]
    assert (task["state"], task["exit_code"], task["attempt"]) == ("failed", 4, 1)
    assert task["log"] == node.store.log_path(job, 0, 1)
    assert (waits["held"], waits["after"], waits["after_ok"], waits["at_most"]) == (True, [job], [], 1)
    assert [task["log"] for task in waits["tasks"]] == [None, None]


def test_the_lock_of_a_dispatcher_that_another_user_has_made_is_refused(node, monkeypatch):
    node.submit("--hold", "--", "true")
    directory, uid = directory_of(node.source), os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    Path(lock_path(directory, node.store, node.source)).touch()

    with pytest.raises(ClaimError, match="another user's"):
        dispatcher_of(directory, node.store, node.source)


@pytest.mark.terminal
def test_a_night_outlives_the_terminal_and_the_morning_tries_again_what_has_failed(node, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = str(ROOT / "examples" / "overnight.sh")
    session, terminal = pty.fork()
    if not session:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
        os.execvp("sh", ["sh", "-c", 'sh "$0" evening; exec sleep 600', script])
    said = b""
    while b"close the laptop" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)  # the laptop is closed
    closed, (_pid, status) = time.time(), os.waitpid(session, 0)
    morning = subprocess.run(["sh", script, "morning"], capture_output=True, text=True, check=True).stdout

    assert os.WTERMSIG(status) == signal.SIGHUP
    tasks = [node.task(1, task) for task in range(12)]
    assert [task.state for task in tasks] == ["completed"] * 11 + ["cancelled"]
    assert [task.task for task in tasks if task.attempt == 2] == [2, 6, 10]
    assert max(task.started or 0 for task in tasks if task.attempt == 1) > closed
    assert "there is no data/3" in morning and "job 1: 3 tasks again" in morning
    until(lambda: not node.claims(), "all GPUs are free again")
