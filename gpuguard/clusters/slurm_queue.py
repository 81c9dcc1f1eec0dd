"""The jobs that want or have GPUs by Slurm, as `squeue` lists them: to show them beside the line and the claims.

Does not order or judge them: that is Slurm's.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass

from gpuguard.clusters import slurm_jobs, slurm_node

SECONDS = 5.0  # people wait for it
_COLUMNS = {
    "JobArrayID": 40, "UserName": 40, "State": 20, "tres-per-node": 60, "tres-per-job": 60, "Reason": 60,
    "SubmitTime": 24, "StartTime": 24, "NodeList": 60, "Name": 200,
}  # fmt: skip
# What follows a line break in a name is shorter than all that stands before the name, and no line of a job's.
_LEAST = sum(_COLUMNS.values()) - _COLUMNS["Name"]


@dataclass(frozen=True)
class Queued:
    """A job of Slurm's."""

    job: str  # "12", of an array "12_3"
    user: str
    name: str
    state: str  # "PENDING", "RUNNING" ...
    gpus: int | None  # per node; None: it does not say
    reason: str | None  # why it does not run yet, in Slurm's word
    submitted: float | None  # unix time
    start: float | None  # unix time of its start, of a pending job the expected one
    nodes: str | None


def is_here() -> bool:
    """Whether somebody can ask Slurm here."""
    return shutil.which("squeue") is not None and ("SLURM_CONF" in os.environ or slurm_node.is_here())


def jobs() -> tuple[Queued, ...] | str:
    """Those that want or have GPUs, as Slurm orders them; or why it does not tell."""
    columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
    answer = slurm_jobs.ask("squeue", "-h", "-a", "-O", columns, seconds=SECONDS)
    if answer is None or answer.status:
        return (answer.fault.splitlines() or ["it fails"])[-1] if answer else f"no answer in {SECONDS:.0f}s"
    return tuple(job for line in answer.output.split("\n") if (job := _job(line.encode())))


def _job(line: bytes) -> Queued | None:
    if len(line) < _LEAST:
        return None
    fields, place = {}, 0
    for name, width in _COLUMNS.items():  # in bytes: a name may end within a character
        text = line[place : place + width].decode(errors="ignore").strip()
        fields[name], place = (None if text in ("", "N/A", "(null)", "None") else text), place + width
    wanted = fields["tres-per-node"] or fields["tres-per-job"] or ""
    found = re.findall(r"gpu(?::[^:,()]+)*?(?::(\d+))?(?=,|\(|$)", wanted)
    if not found or not fields["JobArrayID"]:
        return None
    return Queued(
        fields["JobArrayID"],
        fields["UserName"] or "",
        fields["Name"] or "",
        fields["State"] or "",
        sum(int(number or 1) for number in found),
        fields["Reason"],
        _moment(fields["SubmitTime"]),
        _moment(fields["StartTime"]),
        fields["NodeList"],
    )


def _moment(text: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
