"""Slurm's answers, of which users write names, comments and paths: nobody's job is ended or put back but the one meant.

A controller of our own does what Slurm does with a number: that of an array, which one of its tasks bears, means all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from guarded import a_scene
from nodes import Gpuguard
from test_slurm_jobs import RUNS, squeue

from gpuguard.cli import build_parser, submit
from gpuguard.cli.run import command_of
from gpuguard.cli.submit import command_line
from gpuguard.clusters import slurm
from gpuguard.clusters.slurm import Allocation, SlurmReply
from gpuguard.views import queue as views

ME, OTHER = 1001, 1002
ROW = "JobId={id} {array}JobName={name} UserId=u({uid}) JobState={state} Restarts=0 NodeList=n1 Comment={name}"
NOWHERE = SlurmReply(1, "", "slurm_load_jobs error: Invalid job id specified")


@dataclass
class Job:
    id: int
    array: int | None = None
    task: int = 0
    uid: int = ME
    name: str = "x"
    state: str = "RUNNING"

    @property
    def row(self) -> str:
        array = f"ArrayJobId={self.array} ArrayTaskId={self.task} " if self.array else ""
        return ROW.format(**{**vars(self), "array": array})

    def is_meant(self, word: str) -> bool:
        return word in (str(self.id), str(self.array), f"{self.array}_{self.task}")


@dataclass
class Controller:
    """Slurm with these jobs."""

    jobs: list[Job]
    ended: set[int] = field(default_factory=set)
    called: list[tuple[str, ...]] = field(default_factory=list)

    def ask(self, *words: str, seconds: float = 0.0) -> SlurmReply:
        self.called.append(words)
        meant = [job for job in self.jobs if job.is_meant(words[-1])]
        if words[:2] in (("scontrol", "update"), ("scontrol", "notify")):
            return SlurmReply(0, "", "")
        if not meant:
            return NOWHERE
        if words[1] == "show":
            return SlurmReply(0, "".join(f"{job.row} \n" for job in meant), "")
        self.ended |= {job.id for job in meant}
        return SlurmReply(0, "", "")


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A task of an array that bears its number, two more of it, and somebody else's array."""
    jobs = [Job(12, 12, 2), Job(13, 12, 0), Job(14, 12, 1), Job(77, 77, 2, OTHER), Job(78, 77, 1, OTHER), Job(20)]
    made = Controller(jobs)
    monkeypatch.setattr(slurm, "run_slurm", made.ask)
    return made


@pytest.mark.parametrize("job", [12, 13, 14, 20])
def test_of_an_array_the_one_task_is_ended_or_put_back(controller, job):
    assert slurm.against_cancelling(str(job), ME) is None
    assert slurm.cancel(str(job)) is None
    assert controller.ended == {job}

    controller.ended.clear()
    assert slurm.put_back(Allocation(str(job), ME, ("0",)), "why") == "requeued"
    assert controller.ended == {job}


def test_of_an_array_the_one_task_runs_or_is_over(controller):
    controller.jobs[1].state = controller.jobs[2].state = "COMPLETED"
    over = [slurm.is_over(Allocation(job, ME, ())) for job in ("12", "13", "20", "99")]
    assert over == [False, True, False, True]
    assert slurm.against_cancelling("12", ME) is None


def words_of_users() -> Iterator[str]:
    """What somebody may call their job, so that it looks like more."""
    rows = [Job(12, 77, 2).row, Job(20, 77, 2).row, Job(20, 20, 2).row, Job(77, 77, 2, ME).row, Job(20, uid=OTHER).row]
    rows += [row.replace(" ", separator) for row in rows[:2] for separator in ("  ", "\t", "\u2003", "\x85")]
    for text in ("", "-u root", "--user=root", "$(reboot)", "\x1b[2J", "\x00", "9" * 5000, "\ud800", *rows):
        for end in ("", "\n", "\r", "\x0b", "\x85", "\u2028", " "):
            yield f"x{end}{text}"


def test_whatever_a_user_calls_their_jobs_no_other_is_ended_or_put_back(controller):
    mine = {job.id for job in controller.jobs if job.uid == ME}
    for name in words_of_users():
        for job in controller.jobs:
            job.name = name if job.uid == ME else "x"
        for job in (12, 20):
            controller.ended.clear()
            if slurm.against_cancelling(str(job), ME) is None:
                slurm.cancel(str(job))
                assert controller.ended <= {job}, repr(name)
            slurm.put_back(Allocation(str(job), ME, ("0",)), "why")
            assert controller.ended <= mine, repr(name)
    assert not any(word.startswith("-") for words in controller.called for word in words if word != "-o")


def test_a_job_whose_number_somebody_else_got_meanwhile_is_not_cancelled(controller, monkeypatch):
    """Between the checks and the action the process ends, and a process of another job has its pid."""
    with a_scene() as scene:
        jobs = iter(("20", "77"))
        controller.jobs[-1].uid = scene.process.uid or 0

        def job_of(pids: object) -> str:
            job = next(jobs)
            if job == "77":
                os.kill(scene.process.pid, 9)
                os.waitid(os.P_PID, scene.process.pid, os.WEXITED | os.WNOWAIT)
            return job

        monkeypatch.setattr(slurm, "job_of", job_of)
        outcome = scene.act("cancel")

    assert (outcome.word, outcome.why, controller.ended) == ("failed", "its job has ended", set())


def test_no_name_of_a_job_makes_another_one(monkeypatch):
    cells = (("9\x1b[2J", 40), ("root", 40), ("RUNNING", 20), ("gpu:8", 20))
    forged = "".join(text.ljust(width) for text, width in cells)
    rows = [RUNS | {"Name": f"x{end}{forged}"} for end in ("\n", "\r", "\x0b", "\x85", "\u2028")]
    rows += [RUNS | {"UserName": "zoë", "Name": "字" * 100}, RUNS | {"StartTime": "0001-01-01T00:00:00"}]
    monkeypatch.setattr(slurm, "run_slurm", lambda *words, seconds: SlurmReply(0, squeue(*rows), ""))
    found = slurm.jobs()
    assert not isinstance(found, str)
    assert [(one.job, one.user, one.gpus, one.nodes) for one in found] == [
        ("12", row["UserName"], 1, "n1") for row in rows
    ]
    assert all(line.isprintable() for line in views.slurm_text(found, 0.0))


def submitted(place: Path, script: str) -> Any:
    """What `gpuguard submit` makes of an sbatch that runs *script*."""
    sbatch = place / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n{script}\n")
    sbatch.chmod(0o755)
    return Gpuguard(place, None, PATH=f"{place}:{os.environ['PATH']}")("submit", "--via", "slurm", "--", "true")


def test_a_user_who_is_interrupted_while_a_job_is_handed_over_knows_where_to_look(tmp_path):
    done = submitted(tmp_path, "kill -INT $PPID; exec sleep 60")

    assert (done.returncode, done.stdout) == (130, "")
    assert "`squeue --me` shows it" in done.stderr


@pytest.mark.parametrize(
    ("said", "job"),
    [
        (b"12", "12"), (b"12;cluster\n", "12"), (b"Welcome \xff!\n12\n", "12"), (b"", None), (b"-u root\n", None),
        (b"12 -u root\n", None), (b"12\n\x1b[2J\n", None), (b"\xd9\xa3\n", None), (b"12;$(reboot) x\n", None),
        (b"\xff", None),
    ],
)  # fmt: skip
def test_what_people_type_behind_scancel_is_a_number(tmp_path, said, job):
    (tmp_path / "said").write_bytes(said)
    done = submitted(tmp_path, f"cat {tmp_path}/said")

    told = f"Slurm job {job} is queued: `gpuguard queue` shows it, `scancel {job}` ends it.\n" if job else ""
    assert (done.returncode, done.stdout) == (0 if job else 125, told), done.stderr
    assert job or "`squeue --me` shows it" in done.stderr


@pytest.mark.parametrize(
    "text", ["-urgent", "--note=x", "", " ", "-u root", "a\nb", "x\x1b[2J", ";$(id)`id`", "'", '"\\']
)
@pytest.mark.parametrize("via", ["slurm", "ray"])
def test_what_submit_is_told_run_is_told(via, text):
    """A note that begins with a dash was an option there, hours later."""
    words = ["--via", via, f"--note={text}", f"--model={text}", "--min-free", "1GiB", f"--name={text}", "--", "c", text]
    args = build_parser("submit").parse_args(words)
    args.command = command_of(args)
    if via == "slurm":
        *_, wrapped = command_line(args)
        inner = shlex.split(wrapped.removeprefix("--wrap=exec "))
        told = inner[inner.index("run") + 1 :]
    else:
        inner = shlex.split(submit.entrypoint(args, "python3", brings=True))
        told = inner[inner.index("run") + 1 :]
    run = build_parser("run").parse_args(told)

    assert (run.note, run.model, run.min_free, command_of(run)) == (text, [text], "1GiB", ["c", text])
