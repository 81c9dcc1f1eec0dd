"""Slurm's jobs on a node, where no Slurm is needed: what a prolog is told, who belongs to a job, cancelling one."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from builders import a_device
from guarded import Scene, set_user_id_program, until
from nodes import Gpuguard

from gpuguard.cli import build_parser
from gpuguard.cli import slurm as slurm_setup
from gpuguard.cli.submit import command_line
from gpuguard.clusters import slurm
from gpuguard.clusters.slurm import Allocation, allocation, devices_of
from gpuguard.clusters.visible_devices import outer_devices
from gpuguard.errors import ClaimError, InvalidRequest
from gpuguard.views import queue as views

FOUR = tuple(a_device(index, minor_number=index) for index in range(4))
JOB = "JobId=12 JobName={name} UserId=somebody({uid}) GroupId=x(1) JobState={state} Restarts={restarts} NodeList=n1"


class Programs:
    """Slurm's commands: each writes down how it was called, and says what it was told to."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("scontrol", "scancel"):
            self.say(name)

    def say(self, name: str, text: str = "", status: int = 0, fault: str = "") -> None:
        path = self.place / name
        (self.place / f"{name}.says").write_text(text)
        (self.place / f"{name}.complains").write_text(fault)
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {self.place}/called\ncat {path}.says\ncat {path}.complains >&2\n'
            f'case "$*" in requeue*) exit $(cat {self.place}/requeue 2>/dev/null || echo 0);; esac\nexit {status}\n'
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


def test_a_prolog_that_somebody_types_says_who_calls_it():
    with pytest.raises(InvalidRequest, match="slurmd calls this"):
        allocation({})


def test_slurms_numbers_are_those_of_the_device_files():
    swapped = (a_device(0, minor_number=1), a_device(1, minor_number=0))
    assert [device.index for device in devices_of(("0",), swapped)] == [1]
    assert [device.index for device in devices_of(("2", "0"), FOUR)] == [2, 0]


def test_a_number_that_the_driver_does_not_have_is_no_other_device():
    with pytest.raises(ClaimError, match=r"Slurm's GPU 7 is none of the driver's"):
        devices_of(("7",), FOUR)


def test_a_divided_gpu_is_not_given_away_as_a_whole():
    instance = a_device(0, uuid="MIG-1", parent_uuid=FOUR[0].uuid)
    with pytest.raises(ClaimError, match="divided"):
        devices_of(("0",), (*FOUR, instance))
    assert devices_of(("MIG-1",), (*FOUR, instance)) == (instance,)


@pytest.mark.parametrize(
    ("claim", "job"),
    [
        ("slurm12", "12"),
        ("slurm12.5f0e", "12"),
        ("slurm12-5f0e", "12"),
        ("5f0e", None),
        ("slurm", None),
        ("slurm12x", None),
    ],
)
def test_the_job_stands_in_the_id_of_its_claim(claim, job):
    assert slurm.job_of_claim(claim) == job


# Inside a job.

CONSTRAINED = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_GPUS": "2,3",
    "GPU_DEVICE_ORDINAL": "0,1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}


def chosen(environ: dict[str, str], count: int = 4) -> list[int]:
    found = outer_devices(environ, FOUR[:count]).uuids
    assert found is not None
    return [device.index for uuid in found for device in FOUR if device.uuid == uuid]


def test_number_0_of_a_constrained_job_is_its_first_device_also_where_all_are_shown():
    assert chosen(CONSTRAINED) == [2, 3]
    assert chosen({**CONSTRAINED, "CUDA_VISIBLE_DEVICES": "1"}) == [3]
    assert chosen(CONSTRAINED, count=2) == [0, 1]  # it sees only its own


def test_numbers_that_slurm_or_gpuguard_wrote_for_the_whole_machine_stay():
    plain = {**CONSTRAINED, "GPU_DEVICE_ORDINAL": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert chosen(plain) == [2, 3]
    assert chosen({**CONSTRAINED, "CUDA_VISIBLE_DEVICES": "3", "GPUGUARD_CLAIM": "slurm12.ab12"}) == [3]


def test_a_list_that_breaks_off_is_read_as_cuda_reads_it_among_what_the_job_sees():
    assert chosen({**CONSTRAINED, "CUDA_VISIBLE_DEVICES": "0,,1"}) == [2]


def test_a_claim_in_a_job_bears_its_number_also_where_no_prolog_claims(tmp_path, fake):
    gpuguard = Gpuguard(tmp_path, fake, SLURM_JOB_ID="12", CUDA_VISIBLE_DEVICES="1")
    done = gpuguard("run", "--no-wait", "--", "sh", "-c", "echo $GPUGUARD_CLAIM")
    assert slurm.job_of_claim(done.stdout.strip()) == "12", done.stderr
    assert done.stdout.startswith("slurm12-")
    [started, *_] = (tmp_path / "events.jsonl").read_text().splitlines()
    assert '"claim": "slurm12-' in started


# Who belongs to a job.


def test_a_process_belongs_to_the_job_of_its_slurmstepd():
    script = 'exec -a "slurmstepd: [12.batch]" sleep 600'
    with subprocess.Popen(["bash", "-c", script]) as step:
        until(lambda: slurm.step_of(step.pid))
        assert slurm.step_of(step.pid) == ("12", "batch")
        assert slurm.steps("12") == {step.pid: ("12", "batch")}
        assert slurm.job_of((os.getpid(), step.pid)) == "12"
        assert slurm.job_of((os.getpid(),)) is None
        step.kill()


@pytest.mark.root
@pytest.mark.parametrize("program", ["of their own", "that is root's for as long as it runs"])
def test_who_only_calls_themselves_slurmstepd_is_none(tmp_path, program):
    sleep = str(tmp_path / "sleep") if "root" in program else "/usr/bin/sleep"
    if "root" in program:
        set_user_id_program(tmp_path)
    words = ["slurmstepd: [12.batch]", "600"]
    with subprocess.Popen(words, executable=sleep, user=20001, group=20001, cwd="/") as somebody:
        try:
            until(lambda: b"slurmstepd" in Path(f"/proc/{somebody.pid}/cmdline").read_bytes())
            assert os.stat(f"/proc/{somebody.pid}").st_uid == (0 if "root" in program else 20001)
            assert slurm.step_of(somebody.pid) is None
        finally:
            somebody.kill()


# What becomes of a job.

GIVEN = Allocation("12", 1001, ("0",), 1)


@pytest.mark.parametrize(
    ("state", "restarts", "over"),
    [("RUNNING", 1, False), ("COMPLETING", 1, False), ("PENDING", 1, True), ("RUNNING", 2, True), ("FAILED", 1, True)],
)
def test_a_job_is_over_when_slurm_says_that_this_run_of_it_is(programs, state, restarts, over):
    programs.say("scontrol", JOB.format(name="x", uid=1001, state=state, restarts=restarts))
    assert slurm.is_over(GIVEN) is over


@pytest.mark.parametrize(
    ("state", "written", "over"),
    [
        ("RUNNING", "x JobState=COMPLETED", None),
        ("RUNNING", "x Restarts=2", None),
        ("COMPLETED", "x JobState=RUNNING Restarts=1", None),
        ("COMPLETED", "x JobState=FAILED", True),
        ("RUNNING", "x JobState=COMPLETING", False),
    ],
)
@pytest.mark.parametrize("where", ["in front", "behind"])
def test_no_word_of_its_owners_says_whether_a_job_is_over(programs, state, written, over, where):
    """In front stands its name, behind it command, directory and comment.  The last one was believed."""
    name, comment = (written, "") if where == "in front" else ("x", f" Comment={written}")
    programs.say("scontrol", JOB.format(name=name, uid=1001, state=state, restarts=1) + comment)
    assert slurm.is_over(GIVEN) is over


def test_nobody_knows_whether_a_job_is_over_when_slurm_does_not_answer(programs):
    programs.say("scontrol", status=1)
    assert slurm.is_over(GIVEN) is None


def test_a_job_is_put_back_with_the_reason_and_cancelled_where_that_cannot_be(programs):
    assert slurm.put_back(GIVEN, "GPU 3: claimed by bob") == "requeued"
    assert programs.called() == [
        "scontrol show job -o 12",
        "scontrol update JobId=12 AdminComment=gpuguard: GPU 3: claimed by bob",
        "scontrol requeue 12",
    ]
    (programs.place / "requeue").write_text("1")
    assert slurm.put_back(GIVEN, "GPU 3: claimed by bob") == "cancelled"
    assert programs.called()[-2:] == ["scontrol notify 12 gpuguard: GPU 3: claimed by bob", "scancel 12"]


# Cancelling, as an action of a policy.


@pytest.fixture
def in_job(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A scene whose process belongs to job 12."""
    monkeypatch.setattr(slurm, "job_of", lambda pids: "12")
    return scene


def a_job(programs: Programs, scene: Scene, **fields: object) -> None:
    """What Slurm says of job 12: it runs, and is of the user of the scene's process."""
    facts = {"name": "x", "uid": scene.process.uid or 0, "state": "RUNNING", "restarts": 0, **fields}
    programs.say("scontrol", JOB.format(**facts))


def test_cancel_ends_the_job_of_the_process_and_writes_that_down_before(programs, in_job):
    a_job(programs, in_job)

    assert in_job.act("cancel").word == "sent"
    assert programs.called() == [*["scontrol show job -o 12"] * 2, "scancel 12"]
    assert [(event.kind, event.outcome) for event in in_job.events] == [("cancel", "about to")]


DENIED = "scancel: error: Kill job error on job id 12: Access/permission denied"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("", "it ends with 1"),
        (f"{DENIED}\nmore of it\n", DENIED),
        ("\x1b[2Jnothing\n", r"\x1b[2Jnothing"),
    ],
)
def test_a_job_that_slurm_does_not_cancel_is_no_success_and_says_why(programs, in_job, fault, why):
    programs.say("scancel", status=1, fault=fault)
    a_job(programs, in_job)
    outcome = in_job.act("cancel")

    assert (outcome.word, outcome.why) == ("failed", f"scancel fails ({why}): try `scancel 12` by hand")
    assert [event.outcome for event in in_job.events] == ["about to", "failed"]
    assert (in_job.events[-1].message or "").endswith(outcome.why)


def test_where_slurm_does_not_say_which_task_is_meant_nothing_is_cancelled(programs):
    programs.say("scontrol", status=1)

    assert "by hand" in (slurm.cancel("12") or "")
    assert programs.called() == ["scontrol show job -o 12"]


def test_a_job_that_ends_before_it_is_cancelled_is_told(programs, scene, monkeypatch):
    jobs = iter(("12", None))
    monkeypatch.setattr(slurm, "job_of", lambda pids: next(jobs))
    a_job(programs, scene)
    outcome = scene.act("cancel")

    assert (outcome.word, outcome.why) == ("failed", "its job has ended")
    assert programs.called() == ["scontrol show job -o 12"]


def test_a_dry_run_of_cancel_leaves_out_the_last_call(programs, in_job):
    a_job(programs, in_job)

    assert in_job.act("cancel", enforce=False).word == "dry run"
    assert programs.called() == ["scontrol show job -o 12"]
    assert [(event.kind, event.outcome) for event in in_job.events] == [("cancel", "dry run")]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"uid": 1}, "is not the one of uid"),
        ({"state": "COMPLETED"}, "does not run"),
        ({"name": "x UserId=other(4711)"}, "is not the one of uid"),
        ({"name": "x JobState=FAILED"}, "does not run"),
    ],
)
def test_cancel_means_a_running_job_of_the_same_user_only(programs, in_job, fields, why):
    a_job(programs, in_job, **fields)
    outcome = in_job.act("cancel")

    assert (outcome.word, why in outcome.why) == ("refused", True), outcome
    assert "scancel 12" not in programs.called()


def test_who_belongs_to_no_job_is_not_cancelled_but_left_alone(programs, scene):
    outcome = scene.act("cancel")

    assert (outcome.word, outcome.why) == ("refused", "it belongs to no Slurm job")
    assert scene.lives()
    assert programs.called() == []


# What is written for Slurm.


def test_setup_prints_the_devices_as_slurm_counts_them():
    kinds = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX A4000")
    devices = [a_device(index, minor_number=index, name=name) for index, name in enumerate(kinds)]
    text = slurm_setup.lines("n1", devices, "/etc/slurm", ["/usr/bin/gpuguard", "--dir", "/x y"], "30s")
    assert "NodeName=n1 Name=gpu Type=a100_sxm4_80gb File=/dev/nvidia[0-1]" in text
    assert "NodeName=n1 Name=gpu Type=rtx_a4000 File=/dev/nvidia2" in text
    assert any(line.startswith("NodeName=n1 Gres=gpu:a100_sxm4_80gb:2,gpu:rtx_a4000:1") for line in text)
    assert "exec /usr/bin/gpuguard slurm prolog --dir '/x y' --wait 30s" in text
    assert "ConstrainDevices=yes" in text


def submitted(*words: str) -> list[str]:
    args = build_parser("submit").parse_args(["--via", "slurm", *words])
    args.command = args.command[1:]
    return command_line(args)


def test_submit_hands_the_options_on_to_gpuguard_run_and_gives_slurm_a_later_limit():
    words = submitted(
        "-n", "2", "--min-free", "20GiB", "--time-limit", "4h", "--with", "-p a100", "--", "python", "a b"
    )
    assert words[0] == "sbatch"
    assert {"--gres=gpu:2", "--time=244", "-p", "a100", "--job-name=python"} <= set(words)
    inner = shlex.split(words[-1].removeprefix("--wrap=exec "))
    assert inner[inner.index("run") :] == [
        "run", "--num-gpus", "2", "--min-free", "20GiB", "--time-limit", "4h", "--", "python", "a b"
    ]  # fmt: skip


def test_words_for_the_engine_that_cannot_be_split_are_refused():
    with pytest.raises(InvalidRequest, match="--with"):
        submitted("--with", "'x", "--", "true")


def test_submit_with_attach_is_srun():
    words = submitted("--attach", "--no-wait", "--", "true")
    assert words[0] == "srun"
    assert "--immediate=1" in words
    assert words[-2:] == ["--", "true"]


# Slurm's jobs beside the line.


def squeue(*rows: dict[str, str]) -> str:
    lines = []
    for row in rows:
        cells = ((row.get(name, "N/A").encode(), width) for name, width in slurm._COLUMNS.items())
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
    found = slurm.jobs()
    assert not isinstance(found, str)
    waits, runs = found
    assert (waits.job, waits.gpus, waits.reason, waits.start) == ("13_[1-4]", 2, "Priority", None)
    assert (runs.user, runs.gpus, runs.nodes, runs.reason) == ("alice", 1, "n1", None)
    text = "\n".join(views.slurm_text(found, (runs.start or 0) + 60))
    assert "Slurm: 1 jobs with GPUs, 1 waiting" in text
    assert "waits: Priority" in text
    assert "running on n1" in text
    assert "\x1b" not in text


def test_a_slurm_that_does_not_answer_is_said_and_is_unknown_to_programs(programs):
    programs.say("squeue", status=1)
    found = slurm.jobs()
    assert views.slurm_text(found, 0.0) == ["Slurm does not say who waits there: it fails"]
    assert views.slurm_json(found) is None
