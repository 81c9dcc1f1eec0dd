"""Slurm: what programs on a node can learn about its jobs, and Slurm's queue.

The processes of a job are known by its slurmstepd: a process of root's, which Slurm starts for each step on each node,
and which ends after the last process of the step.  The environment of a process proves nothing, because it is in the
hands of the process's owner.  This module claims nothing: see jobs/slurm_claim.  For the whole node see slurm_node.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpuguard.clusters import slurm_node
from gpuguard.clusters.slurm_node import OVER, SLURM_SECONDS, SlurmReply, run_slurm
from gpuguard.device_state import vendor_of
from gpuguard.errors import ClaimError, InvalidRequest
from gpuguard.locale.messages import sentence
from gpuguard.model import Device
from gpuguard.procfs import read_proc, read_text, uid_behind

_TITLE = re.compile(rb"slurmstepd: \[(\d+)(?:\+\d+)?\.([\w+]+)\]")
QUEUE_SECONDS = 5.0  # people wait for it
_COLUMNS = {
    "JobArrayID": 40, "UserName": 40, "State": 20, "tres-per-node": 60, "tres-per-job": 60, "Reason": 60,
    "SubmitTime": 24, "StartTime": 24, "NodeList": 60, "Name": 200,
}  # fmt: skip
# A line that is shorter than the columns before the name is not the line of a job, but follows a line break in a name.
_LEAST = sum(_COLUMNS.values()) - _COLUMNS["Name"]


@dataclass(frozen=True)
class Allocation:
    """What Slurm has given to a job on this node, as it tells a prolog."""

    job: str  # its number
    uid: int  # of its owner
    gpus: tuple[str, ...]  # numbers of device files, or uuids of MIG instances
    restarts: int = 0  # how often it was put back into the queue

    @property
    def claim(self) -> str:
        """The id of its claim."""
        return f"slurm{self.job}"


def job_of_claim(claim: str) -> str | None:
    """Return the number of the job that a claim with that id is for or was made in, or None if there is no such job.

    The prolog makes ``slurm12``, and ``slurm12.5f0e`` lies inside of it.  Without a prolog's claim, a program makes
    ``slurm12-5f0e``.
    """
    found = re.fullmatch(r"slurm([0-9]{1,10})(?:[.-][\w.]+)?", claim)
    return found[1] if found else None


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Return the allocation that the environment of a prolog or an epilog describes.

    Raises:
        InvalidRequest: it is not the environment of one.
    """
    job, uid = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_UID", environ.get("SLURM_UID", ""))
    if not job.isdecimal() or not uid.isdecimal():
        raise InvalidRequest(
            "SLURM_JOB_ID and SLURM_JOB_UID are not set: slurmd calls this, as Prolog= and Epilog= in slurm.conf.  "
            "`gpuguard slurm setup --print` shows the lines."
        )
    gpus = tuple(part for part in environ.get("SLURM_JOB_GPUS", "").split(",") if part)
    restarts = environ.get("SLURM_JOB_RESTART_COUNT", "0")
    return Allocation(job, int(uid), gpus, int(restarts) if restarts.isdecimal() else 0)


def with_files(devices: Sequence[Device]) -> list[Device]:
    """Return the devices that Slurm can give to a job by a device file.

    A MIG instance has none of its own.  A partition of an AMD GPU has, and the first one has that of the GPU.
    """
    parts = [device for device in devices if device.parent_uuid is not None and not vendor_of(device).capabilities]
    divided = {device.parent_uuid for device in parts}
    return [device for device in devices if device.parent_uuid is None and device.uuid not in divided] + parts


def devices_of(gpus: Sequence[str], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices that Slurm means by the numbers of files /dev/nvidiaN or /dev/dri/renderDN.

    Raises:
        ClaimError: one cannot be found.
    """
    given = with_files(devices)
    by_file = all(device.minor_number is not None for device in given)
    named = {str(device.minor_number if by_file else device.index): device for device in given}
    named |= {device.uuid: device for device in devices}
    found = []
    for gpu in gpus:
        if gpu not in named:
            shown = ", ".join(sorted(name for name in named if name.isdecimal())) or "none"
            raise ClaimError(
                sentence(
                    "slurm.no_gpu",
                    "Slurm's GPU {gpu} is none of the driver's ({gpus}): do gres.conf and machine agree?",
                    gpu=gpu,
                    gpus=shown,
                )
            )
        found.append(named[gpu])
    divided = {device.parent_uuid for device in devices}
    if whole_one := next((device for device in found if device.uuid in divided), None):
        raise ClaimError(
            sentence(
                "slurm.divided",
                "GPU {index} is divided into MIG instances, and Slurm does not say which it means.",
                index=whole_one.index,
            )
        )
    return tuple(found)


def steps(job: str | None = None) -> dict[int, tuple[str, str]]:
    """Return pid -> (job, step) of the living slurmstepd of one job or of all.  Steps are "0", "batch", "extern" ..."""
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return {pid: step for pid in pids if (step := step_of(pid)) and job in (None, step[0])}


def step_of(pid: int) -> tuple[str, str] | None:
    """Return the job and the step for which a process is the slurmstepd, or None if it is none."""
    # A slurmstepd writes its title over its command line.  Only a process of root's counts, because any program can
    # call itself so, and users can start programs of root's with the set-user-ID bit under such a name.
    if uid_behind(pid) not in (0, os.getuid()):
        return None
    title = _TITLE.match(read_proc(f"/proc/{pid}/cmdline", 200) or b"")
    return (title[1].decode(), title[2].decode()) if title else None


def job_status(job: str) -> tuple[str, SlurmReply | None]:
    """Return the word by which Slurm means this job alone, and Slurm's reply about it, or None if that is not certain.

    One task of an array bears the number of the array: `scancel 12` ends all tasks, `scancel 12_3` only that one.
    """
    answer = run_slurm("scontrol", "show", "job", "-o", job)
    if answer is None or answer.status:
        return job, answer
    # Slurm lists all tasks of an array.  What users write into their jobs can only add lines, and then none is certain.
    rows = set(re.findall(rf"^JobId={job} (?:ArrayJobId=(\S+) ArrayTaskId=(\S+) )?", answer.output, re.MULTILINE))
    if len(rows) != 1:
        return job, None
    array, task = rows.pop()
    if not array:
        return job, answer
    answer = run_slurm("scontrol", "show", "job", "-o", f"{array}_{task}")
    return f"{array}_{task}", answer if answer and answer.output.startswith(f"JobId={job} ") else None


def is_over(given: Allocation) -> bool | None:
    """Return whether the controller knows that the job no longer has its devices, or None if it does not say."""
    _, answer = job_status(given.job)
    if answer is None:
        return None
    if answer.status:
        return True if "Invalid job id" in answer.fault else None
    # What users write into their jobs can only add to these values, and then nothing is certain.
    states, restarts = (set(re.findall(rf"(?:^|\s){name}=(\w+)", answer.output)) for name in ("JobState", "Restarts"))
    if len({state in OVER for state in states}) != 1 or len(restarts) > 1:
        return None
    return states <= OVER or (restarts or {"0"}) != {str(given.restarts)}


def job_of(pids: Sequence[int]) -> str | None:
    """Return the job of a process, or None if it has none, by the first slurmstepd among *pids*, or else by its cgroup.

    *pids* are those of the process and its ancestors.
    """
    for pid in pids:
        if step := step_of(pid):
            return step[0]
    cgroup = read_text(f"/proc/{pids[0]}/cgroup") if pids else None
    found = re.search(r"/slurm[^\n]*/job_(\d+)(?:/|$)", cgroup or "", re.MULTILINE)
    return found[1] if found else None


def against_cancelling(job: str | None, uid: int | None) -> str | None:
    """Return why the job must not be cancelled for what a user does, or None if it is theirs and runs."""
    if job is None:
        return sentence("slurm.no_job", "it belongs to no Slurm job")
    _, answer = job_status(job)
    if answer is None or answer.status:
        reason = answer.reason if answer else sentence("slurm.silent", "it does not answer")
        return sentence(
            "slurm.uncertain", "Slurm says nothing certain about job {job}: {reason}", job=job, reason=reason
        )
    # What users write into their jobs can only add to these values, and then no job is meant.
    if set(re.findall(r"(?:^|\s)UserId=\S*\((\d+)\)", answer.output)) != {str(uid)}:
        return sentence("slurm.of_another", "job {job} is not the one of uid {uid}", job=job, uid=str(uid))
    states = set(re.findall(r"(?:^|\s)JobState=(\w+)", answer.output))
    return None if states == {"RUNNING"} else sentence("slurm.not_running", "job {job} does not run", job=job)


def cancel(job: str) -> str | None:
    """End a job, and return None if Slurm does it, or else why it does not."""
    word, known = job_status(job)
    answer = run_slurm("scancel", word) if known and not known.status else None
    if answer is None:
        return sentence(
            "slurm.not_callable",
            "Slurm cannot be called, or does not answer in {seconds} s: try `scancel {job}` by hand",
            seconds=f"{SLURM_SECONDS:.0f}",
            job=word,
        )
    if not answer.status:
        return None
    return sentence(
        "slurm.scancel_fails",
        "scancel fails ({reason}): try `scancel {job}` by hand",
        reason=answer.reason,
        job=word,
    )


def contains() -> bool:
    """Return whether each job has a slurmstepd from its first to its last moment on a node: PrologFlags=Contain."""
    answer = run_slurm("scontrol", "show", "config")
    return bool(answer and re.search(r"^PrologFlags\s*=.*\bContain\b", answer.output, re.MULTILINE))


def put_back(given: Allocation, reason: str) -> Literal["requeued", "cancelled"] | None:
    """Requeue a job that must not start here, or cancel it if Slurm cannot requeue it (srun, salloc).

    The reason is written into the AdminComment of the job.  Returns which of them Slurm did, or None if neither.
    """
    job, _ = job_status(given.job)
    run_slurm("scontrol", "update", f"JobId={job}", f"AdminComment=gpuguard: {reason}"[:1000])
    answer = run_slurm("scontrol", "requeue", job)
    if answer and answer.status == 0:
        return "requeued"
    run_slurm("scontrol", "notify", job, f"gpuguard: {reason}"[:1000])
    answer = run_slurm("scancel", job)
    return "cancelled" if answer and answer.status == 0 else None


@dataclass(frozen=True)
class Queued:
    """A job in Slurm's queue."""

    job: str  # "12", of an array "12_3"
    user: str
    name: str
    state: str  # "PENDING", "RUNNING" ...
    gpus: int | None  # per node, or None if Slurm does not say
    reason: str | None  # why it does not run yet, in Slurm's word
    submitted: float | None  # unix time
    start: float | None  # unix time of its start; the expected one if it is pending
    nodes: str | None


def is_here() -> bool:
    """Return whether Slurm can be asked here."""
    return shutil.which("squeue") is not None and ("SLURM_CONF" in os.environ or slurm_node.is_here())


def jobs() -> tuple[Queued, ...] | str:
    """Return the jobs that want or have GPUs, in Slurm's order, or the reason why Slurm does not list them."""
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
    answer = run_slurm("squeue", "-h", "-a", "-O", columns, seconds=QUEUE_SECONDS)
    if answer is None or answer.status:
        if answer is None:
            return sentence("slurm.no_answer", "no answer in {time}", time=f"{QUEUE_SECONDS:.0f}s")
        return (answer.fault.splitlines() or [sentence("slurm.fails", "it fails")])[-1]
    return tuple(job for line in answer.output.split("\n") if (job := _job(line.encode())))


def _job(line: bytes) -> Queued | None:
    if len(line) < _LEAST:
        return None
    fields, place = {}, 0
    for name, width in _COLUMNS.items():  # in bytes, because a name may be cut within a character
        text = line[place : place + width].decode(errors="ignore").strip()
        fields[name], place = (None if text in ("", "N/A", "(null)", "None") else text), place + width
    wanted = fields["tres-per-node"] or fields["tres-per-job"] or ""
    found = re.findall(r"gpu(?::[^:,()]+)*?(?::(\d+))?(?=,|\(|$)", wanted)
    if not found or not fields["JobArrayID"]:
        return None
    user, name, state = (fields[column] or "" for column in ("UserName", "Name", "State"))
    submitted, start = (_moment(fields[column]) for column in ("SubmitTime", "StartTime"))
    gpus = sum(int(number or 1) for number in found)
    return Queued(fields["JobArrayID"], user, name, state, gpus, fields["Reason"], submitted, start, fields["NodeList"])


def _moment(text: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
