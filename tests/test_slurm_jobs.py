"""Slurm's jobs on a node, where no Slurm is needed: what a prolog is told, who belongs to a job, cancelling one."""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import a_device
from guard_scene import Scene, a_scene, set_user_id_program
from nodes import Gpuguard, until

from gpuguard.claims.records import is_id
from gpuguard.cli import build_parser
from gpuguard.cli import slurm as slurm_setup
from gpuguard.cli.run import command_of
from gpuguard.cli.submit.via_ray import entrypoint
from gpuguard.cli.submit.via_slurm import command_line
from gpuguard.clusters import slurm_jobs
from gpuguard.clusters.slurm_jobs import Allocation, SlurmReply, allocation, devices_of, with_files
from gpuguard.errors import ClaimError, InvalidRequest
from gpuguard.model import Device
from gpuguard.views import queue as views

FOUR = tuple(a_device(index, minor_number=index) for index in range(4))
JOB = "JobId=12 JobName={name} UserId=somebody({uid}) GroupId=x(1) JobState={state} Restarts={restarts} NodeList=n1"


class Programs:
    """Slurm's commands: each writes down how it was called, and says what it was told to."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("scontrol", "scancel"):
            self.say(name)

    def say(self, name: str, text: str = "", status: int = 0, fault: str = "", requeue: int = 0) -> None:
        path = self.place / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {self.place}/called\n'
            f"printf %s {shlex.quote(text)}\nprintf %s {shlex.quote(fault)} >&2\n"
            f'case "$*" in requeue*) exit {requeue};; esac\nexit {status}\n'
        )
        path.chmod(0o755)

    def called(self) -> list[str]:
        path = self.place / "called"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Programs(tmp_path)


def test_a_prolog_is_told_whose_the_job_is_and_which_devices_it_has():
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": "1001", "SLURM_JOB_GPUS": "1,3", "SLURM_JOB_RESTART_COUNT": "2"}
    assert allocation(environ) == Allocation("12", 1001, ("1", "3"), 2)
    assert allocation(environ).claim == "slurm12"
    with pytest.raises(InvalidRequest, match="slurmd calls this"):
        allocation({})


def test_slurms_numbers_are_those_of_the_device_files_and_a_divided_gpu_is_not_given_away_as_a_whole():
    swapped = (a_device(0, minor_number=1), a_device(1, minor_number=0))
    instance = a_device(0, uuid="MIG-1", parent_uuid=FOUR[0].uuid)
    assert [device.index for device in devices_of(("0",), swapped)] == [1]
    assert [device.index for device in devices_of(("2", "0"), FOUR)] == [2, 0]
    with pytest.raises(ClaimError, match=r"Slurm's GPU 7 is none of the driver's"):
        devices_of(("7",), FOUR)
    with pytest.raises(ClaimError, match="divided"):
        devices_of(("0",), (*FOUR, instance))
    assert devices_of(("MIG-1",), (*FOUR, instance)) == (instance,)


@pytest.mark.parametrize(
    ("claim", "job"),
    [
        *((claim, "12") for claim in ("slurm12", "slurm12.5f0e", "slurm12-5f0e")),
        *((claim, None) for claim in ("5f0e", "slurm", "slurm12x")),
    ],
)
def test_the_job_stands_in_the_id_of_its_claim(claim, job):
    assert slurm_jobs.job_of_claim(claim) == job


def test_a_claim_in_a_job_bears_its_number_also_where_no_prolog_claims(tmp_path, fake):
    gpuguard = Gpuguard(tmp_path, fake, SLURM_JOB_ID="12", CUDA_VISIBLE_DEVICES="1")
    done = gpuguard("run", "--no-wait", "--", "sh", "-c", "echo $GPUGUARD_CLAIM")
    assert slurm_jobs.job_of_claim(done.stdout.strip()) == "12", done.stderr
    assert done.stdout.startswith("slurm12-")
    assert gpuguard.events()[0]["claim"] == done.stdout.strip()

    seen = gpuguard("run", "--no-wait", "--note", "ablation", "--", *gpuguard.words("who", "--json"))
    [claim] = json.loads(seen.stdout)["devices"][1]["claims"]
    assert (claim["note"], slurm_jobs.job_of_claim(claim["id"])) == ("ablation", "12"), (
        "its record is read like any other"
    )


@pytest.mark.parametrize(
    "text", ["", "-", "-n", "n-", "a-b", "slurm12-", "slurm-5f", "a b", "a;b", "a.b", "a/b", "é", "a" * 33]
)
def test_what_would_be_an_option_or_more_than_one_word_is_no_id(text):
    assert not is_id(text)


def test_a_process_belongs_to_the_job_of_its_slurmstepd():
    script = 'exec -a "slurmstepd: [12.batch]" sleep 600'
    with subprocess.Popen(["bash", "-c", script]) as step:
        until(lambda: slurm_jobs.step_of(step.pid))
        assert slurm_jobs.step_of(step.pid) == ("12", "batch")
        assert slurm_jobs.steps("12") == {step.pid: ("12", "batch")}
        assert slurm_jobs.job_of((os.getpid(), step.pid)) == "12"
        assert slurm_jobs.job_of((os.getpid(),)) is None
        step.kill()


@pytest.mark.root
@pytest.mark.parametrize("program", ["of their own", "that is root's for as long as it runs"])
def test_a_process_that_only_calls_itself_slurmstepd_is_none(tmp_path, program):
    sleep = str(tmp_path / "sleep") if "root" in program else "/usr/bin/sleep"
    if "root" in program:
        set_user_id_program(tmp_path)
    words = ["slurmstepd: [12.batch]", "600"]
    with subprocess.Popen(words, executable=sleep, user=20001, group=20001, cwd="/") as somebody:
        try:
            until(lambda: b"slurmstepd" in Path(f"/proc/{somebody.pid}/cmdline").read_bytes())
            assert os.stat(f"/proc/{somebody.pid}").st_uid == (0 if "root" in program else 20001)
            assert slurm_jobs.step_of(somebody.pid) is None
        finally:
            somebody.kill()


GIVEN = Allocation("12", 1001, ("0",), 1)
SHOW = "scontrol show job -o 12"


@pytest.mark.parametrize(
    ("state", "written", "over"),
    [
        *(("RUNNING", "x", False), ("COMPLETING", "x", False), ("PENDING", "x", True), ("FAILED", "x", True)),
        ("RUNNING", "x JobState=COMPLETED", None),
        ("RUNNING", "x Restarts=2", None),
        ("COMPLETED", "x JobState=RUNNING Restarts=1", None),
        ("COMPLETED", "x JobState=FAILED", True),
        ("RUNNING", "x JobState=COMPLETING", False),
    ],
)
@pytest.mark.parametrize("where", ["in front", "behind"])
def test_a_job_is_over_when_slurm_says_so_and_not_when_a_word_of_its_owners_does(programs, state, written, over, where):
    """In front stands its name, behind it command, directory and comment.  The last one was believed."""
    name, comment = (written, "") if where == "in front" else ("x", f" Comment={written}")
    programs.say("scontrol", JOB.format(name=name, uid=1001, state=state, restarts=1) + comment)
    assert slurm_jobs.is_over(GIVEN) is over


def test_the_run_before_a_restart_is_over(programs):
    programs.say("scontrol", JOB.format(name="x", uid=1001, state="RUNNING", restarts=2))
    assert slurm_jobs.is_over(GIVEN) is True


def test_where_slurm_does_not_answer_nothing_is_known_and_nothing_cancelled(programs):
    programs.say("scontrol", status=1)
    assert slurm_jobs.is_over(GIVEN) is None
    assert "by hand" in (slurm_jobs.cancel("12") or "")
    assert set(programs.called()) == {SHOW}


def test_a_job_is_put_back_with_the_reason_and_cancelled_where_that_cannot_be(programs):
    assert slurm_jobs.put_back(GIVEN, "GPU 3: claimed by bob") == "requeued"
    assert programs.called() == [
        SHOW,
        "scontrol update JobId=12 AdminComment=gpuguard: GPU 3: claimed by bob",
        "scontrol requeue 12",
    ]
    programs.say("scontrol", requeue=1)
    assert slurm_jobs.put_back(GIVEN, "GPU 3: claimed by bob") == "cancelled"
    assert programs.called()[-2:] == ["scontrol notify 12 gpuguard: GPU 3: claimed by bob", "scancel 12"]


def a_job(programs: Programs, uid: int, *, state: str = "RUNNING", name: str = "x") -> None:
    programs.say("scontrol", JOB.format(name=name, uid=uid, state=state, restarts=0))


@pytest.fixture
def in_job(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """An offender of job 12."""
    monkeypatch.setattr(slurm_jobs, "job_of", lambda pids: "12")
    return scene


@pytest.mark.parametrize(
    ("enforce", "word", "outcome", "called"),
    [(True, "sent", "about to", [SHOW, SHOW, "scancel 12"]), (False, "dry run", "dry run", [SHOW])],
)
def test_cancel_ends_the_job_of_the_process_and_writes_that_down_before(
    programs, in_job, enforce, word, outcome, called
):
    a_job(programs, in_job.process.uid or 0)

    assert in_job.act("cancel", enforce=enforce).word == word
    assert programs.called() == called
    assert [(event.kind, event.outcome) for event in in_job.events] == [("cancel", outcome)]


DENIED = "scancel: error: Kill job error on job id 12: Access/permission denied"


@pytest.mark.parametrize(
    ("fault", "why"),
    [("", "it ends with 1"), (f"{DENIED}\nmore of it\n", DENIED), ("\x1b[2Jnothing\n", r"\x1b[2Jnothing")],
)
def test_a_job_that_slurm_does_not_cancel_is_no_success_and_says_why(programs, in_job, fault, why):
    programs.say("scancel", status=1, fault=fault)
    a_job(programs, in_job.process.uid or 0)
    outcome = in_job.act("cancel")

    assert (outcome.word, outcome.why) == ("failed", f"scancel fails ({why}): try `scancel 12` by hand")
    assert [event.outcome for event in in_job.events] == ["about to", "failed"]
    assert (in_job.events[-1].message or "").endswith(outcome.why)


@pytest.mark.parametrize(
    ("uid", "state", "name", "why"),
    [
        (1, "RUNNING", "x", "is not the one of uid"),
        (None, "COMPLETED", "x", "does not run"),
        (None, "RUNNING", "x UserId=other(4711)", "is not the one of uid"),
        (None, "RUNNING", "x JobState=FAILED", "does not run"),
    ],
)
def test_cancel_means_a_running_job_of_the_same_user_only(programs, in_job, uid, state, name, why):
    a_job(programs, uid or in_job.process.uid or 0, state=state, name=name)
    outcome = in_job.act("cancel")

    assert (outcome.word, why in outcome.why) == ("refused", True), outcome
    assert "scancel 12" not in programs.called()


def test_a_process_of_no_job_is_left_alone(programs, scene):
    outcome = scene.act("cancel")

    assert (outcome.word, outcome.why) == ("refused", "it belongs to no Slurm job")
    assert scene.lives() and programs.called() == []


def test_setup_prints_the_devices_as_slurm_counts_them():
    kinds = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A4000")
    devices = [a_device(index, minor_number=index, name=name) for index, name in enumerate(kinds)]
    text = slurm_setup.lines("n1", devices, "/etc/slurm", ["/usr/bin/gpuguard", "--dir", "/x y"], "30s")
    assert "NodeName=n1 Name=gpu Type=a100_sxm4_80gb File=/dev/nvidia[0-1]" in text
    assert "NodeName=n1 Name=gpu Type=rtx_a4000 File=/dev/nvidia2" in text
    assert any(line.startswith("NodeName=n1 Gres=gpu:a100_sxm4_80gb:2,gpu:rtx_a4000:1") for line in text)
    assert "exec /usr/bin/gpuguard slurm prolog --dir '/x y' --wait 30s" in text
    assert "ConstrainDevices=yes" in text


def amds(index: int, **fields: Any) -> Device:
    fields = {"name": "AMD Instinct MI300X", "minor_number": 128 + 8 * index, "uuid": f"GPU-{index:016x}", **fields}
    return a_device(index, vendor="amd", **fields)


def test_gpus_of_amd_have_their_render_nodes_and_their_partitions_each_their_own():
    second = amds(1)
    parts = [amds(1, uuid=f"XCP-1-{number}", parent_uuid=second.uuid, minor_number=136 + number) for number in range(3)]
    given = with_files([amds(0), second, *parts])
    text = slurm_setup.lines("n1", given, "/etc/slurm", ["/usr/bin/gpuguard"], None)

    assert "NodeName=n1 Name=gpu Type=instinct_mi300x File=/dev/dri/renderD[128,136-138]" in text
    assert any(line.startswith("NodeName=n1 Gres=gpu:instinct_mi300x:4") for line in text)
    assert devices_of(("128", "137"), (amds(0), second, *parts)) == (amds(0), parts[1])


def submitted(*words: str, via: str = "slurm") -> tuple[list[str], list[str]]:
    """The words for the engine, and those behind `gpuguard run` in them."""
    args = build_parser("submit").parse_args(["--via", via, *words])
    args.command = command_of(args)
    engine = command_line(args) if via == "slurm" else [entrypoint(args, "python3", brings=True)]
    inner = shlex.split(engine[-1].removeprefix("--wrap=exec "))
    return engine, inner[inner.index("run") + 1 :] if "run" in inner else []


def test_submit_hands_the_options_on_to_gpuguard_run_and_gives_slurm_a_later_limit():
    told = ["--num-gpus", "2", "--min-free", "20GiB", "--time-limit", "4h", "--", "python", "a b"]
    words, inner = submitted("--with", "-p a100", *told)

    assert words[0] == "sbatch"
    assert {"--gres=gpu:2", "--time=244", "-p", "a100", "--job-name=python"} <= set(words)
    assert inner == told

    attached, _ = submitted("--attach", "--no-wait", "--", "true")
    assert attached[0] == "srun" and "--immediate=1" in attached and attached[-2:] == ["--", "true"]


def squeue(*rows: dict[str, str]) -> str:
    lines = []
    for row in rows:
        cells = ((row.get(name, "N/A").encode(), width) for name, width in slurm_jobs._COLUMNS.items())
        lines.append(b"".join(text[:width].ljust(width) for text, width in cells))
    return b"\n".join(lines).decode(errors="replace")


WAITS = {
    "JobArrayID": "13_[1-4]", "UserName": "bob", "State": "PENDING", "tres-per-node": "gres:gpu:a100:2",
    "Reason": "Priority", "SubmitTime": "2026-11-20T23:00:00", "Name": "\x1b[2Jtrain",
}  # fmt: skip
RUNS = {
    "JobArrayID": "12", "UserName": "alice", "State": "RUNNING", "tres-per-job": "gres:gpu", "Reason": "None",
    "StartTime": "2026-11-20T22:00:00", "NodeList": "n1", "Name": "x",
}  # fmt: skip


def test_the_queue_shows_slurms_jobs_with_gpus_and_why_they_wait(programs):
    programs.say(
        "squeue", squeue(WAITS, RUNS, {"JobArrayID": "14", "UserName": "eve", "State": "RUNNING", "Name": "cpu"})
    )
    shown: Any = slurm_jobs.jobs()
    waits, runs = shown
    assert (waits.job, waits.gpus, waits.reason, waits.start) == ("13_[1-4]", 2, "Priority", None)
    assert (runs.user, runs.gpus, runs.nodes, runs.reason) == ("alice", 1, "n1", None)
    text = "\n".join(views.slurm_text(shown, (runs.start or 0) + 60))
    assert all(words in text for words in ("Slurm: 1 jobs with GPUs, 1 waiting", "waits: Priority", "running on n1"))
    assert "\x1b" not in text


def test_a_slurm_that_does_not_answer_is_said_and_is_unknown_to_programs(programs):
    programs.say("squeue", status=1)
    found = slurm_jobs.jobs()
    assert views.slurm_text(found, 0.0) == ["Slurm does not say who waits there: it fails"]
    assert views.slurm_json(found) is None


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
    """A task of an array that bears its number, two more of it, and an array of another user."""
    jobs = [Job(12, 12, 2), Job(13, 12, 0), Job(14, 12, 1), Job(77, 77, 2, OTHER), Job(78, 77, 1, OTHER), Job(20)]
    made = Controller(jobs)
    monkeypatch.setattr(slurm_jobs, "run_slurm", made.ask)
    return made


@pytest.mark.parametrize("job", [12, 13, 14, 20])
def test_of_an_array_the_one_task_is_ended_or_put_back(controller, job):
    assert slurm_jobs.against_cancelling(str(job), ME) is None
    assert slurm_jobs.cancel(str(job)) is None
    assert controller.ended == {job}

    controller.ended.clear()
    assert slurm_jobs.put_back(Allocation(str(job), ME, ("0",)), "why") == "requeued"
    assert controller.ended == {job}


def test_of_an_array_the_one_task_runs_or_is_over(controller):
    controller.jobs[1].state = controller.jobs[2].state = "COMPLETED"
    over = [slurm_jobs.is_over(Allocation(job, ME, ())) for job in ("12", "13", "20", "99")]
    assert over == [False, True, False, True]


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
            if slurm_jobs.against_cancelling(str(job), ME) is None:
                slurm_jobs.cancel(str(job))
                assert controller.ended <= {job}, repr(name)
            slurm_jobs.put_back(Allocation(str(job), ME, ("0",)), "why")
            assert controller.ended <= mine, repr(name)
    assert not any(word.startswith("-") for words in controller.called for word in words if word != "-o")


def test_a_job_whose_number_another_user_got_meanwhile_is_not_cancelled(controller, monkeypatch):
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

        monkeypatch.setattr(slurm_jobs, "job_of", job_of)
        outcome = scene.act("cancel")

    assert (outcome.word, outcome.why, controller.ended) == ("failed", "its job has ended", set())


def test_no_name_of_a_job_makes_another_one(monkeypatch):
    cells = (("9\x1b[2J", 40), ("root", 40), ("RUNNING", 20), ("gpu:8", 20))
    forged = "".join(text.ljust(width) for text, width in cells)
    rows = [RUNS | {"Name": f"x{end}{forged}"} for end in ("\n", "\r", "\x0b", "\x85", "\u2028")]
    rows += [RUNS | {"UserName": "zoë", "Name": "字" * 100}, RUNS | {"StartTime": "0001-01-01T00:00:00"}]
    monkeypatch.setattr(slurm_jobs, "run_slurm", lambda *words, seconds: SlurmReply(0, squeue(*rows), ""))
    shown: Any = slurm_jobs.jobs()
    assert {(job.job, job.gpus, job.nodes) for job in shown} == {("12", 1, "n1")}
    assert [job.user for job in shown] == [row["UserName"] for row in rows]
    assert all(line.isprintable() for line in views.slurm_text(shown, 0.0))


def handed_over(place: Path, script: str) -> Any:
    """What `gpuguard submit` makes of an sbatch that runs *script*."""
    (place / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (place / "sbatch").chmod(0o755)
    return Gpuguard(place, None, PATH=f"{place}:{os.environ['PATH']}")("submit", "--via", "slurm", "--", "true")


def test_a_user_who_is_interrupted_while_a_job_is_handed_over_knows_where_to_look(tmp_path):
    done = handed_over(tmp_path, "kill -INT $PPID; exec sleep 60")

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
    done = handed_over(tmp_path, f"cat {tmp_path}/said")

    told = f"Slurm job {job} is queued: `gpuguard queue` shows it, `scancel {job}` ends it.\n" if job else ""
    assert (done.returncode, done.stdout) == (0 if job else 125, told), done.stderr
    assert job or "`squeue --me` shows it" in done.stderr


@pytest.mark.parametrize(
    "text", ["-urgent", "--note=x", "", " ", "-u root", "a\nb", "x\x1b[2J", ";$(id)`id`", "'", '"\\']
)
@pytest.mark.parametrize("via", ["slurm", "ray"])
def test_what_submit_is_told_run_is_told(via, text):
    words = [f"--note={text}", f"--model={text}", "--min-free", "1GiB", f"--name={text}", "--", "c", text]
    _, told = submitted(*words, via=via)
    run = build_parser("run").parse_args(told)

    assert (run.note, run.model, run.min_free, command_of(run)) == (text, [text], "1GiB", ["c", text])
