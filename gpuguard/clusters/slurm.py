"""Slurm: a job gets what Slurm gave it; a job that got no GPU must not take what is there.

CUDA_VISIBLE_DEVICES says which, where it is set (see cuda).  SLURM_STEP_GPUS and SLURM_JOB_GPUS carry the numbers of
the whole machine, so they are read only where the job sees more devices than it was given: where Slurm hides the
others (ConstrainDevices), the visible ones are numbered from 0 again and all of them are the job's.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.clusters import slurm_jobs, slurm_node, visible_devices
from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 1024  # GPUs of a node
GPU_VARIABLES = (visible_devices.CUDA_VARIABLE, "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")


def allowed(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[tuple[str, ...], str] | None:
    """What a Slurm job was given; None (no opinion) elsewhere and where CUDA_VISIBLE_DEVICES says it."""
    job = environ.get("SLURM_JOB_ID")
    if not job or visible_devices.is_restricted(environ):
        return None
    variable = next((name for name in GPU_VARIABLES if name in environ), None)
    if variable is None:
        return (), f"Slurm job {job} was given no GPU (ask Slurm for one: --gres=gpu:1)"
    gpus = {device.index: device.uuid for device in devices if device.parent_uuid is None}
    given = _numbers(environ[variable])
    if variable == "GPU_DEVICE_ORDINAL" or len(given) >= len(gpus) > 0:
        return None
    uuids = tuple(gpus[number] for number in given if number in gpus)
    return (
        uuids,
        f"{variable}={environ[variable]} of Slurm job {job} allows {len(uuids) or 'no'} of {len(gpus)} devices",
    )


def whole_machine(environ: Mapping[str, str], devices: Sequence[Device]) -> Mapping[str, str]:
    """*environ* with CUDA_VISIBLE_DEVICES in the numbers of *devices*.

    Under ConstrainDevices Slurm counts a job's devices from 0, as its processes see them.  Where the list of devices
    shows the others all the same, number 0 is not the first of them, but the first of SLURM_STEP_GPUS.
    """
    visible, claim = visible_devices.entries(environ), environ.get("GPUGUARD_CLAIM", "")
    variable = next((name for name in GPU_VARIABLES[1:3] if name in environ), None)
    if variable is None or "SLURM_JOB_ID" not in environ or not visible or not all(map(_is_number, visible)):
        return environ
    given, shown = _numbers(environ[variable]), sum(device.parent_uuid is None for device in devices)
    # What Slurm itself wrote stands in GPU_DEVICE_ORDINAL, too; `gpuguard run` writes the numbers that it sees.
    by_slurm = _numbers(environ.get("GPU_DEVICE_ORDINAL", ",".join(visible)))
    by_us = claim and not claim.removeprefix("slurm").isdecimal()
    if by_us or shown <= len(given) or by_slurm == given or by_slurm != list(range(len(given))):
        return environ
    wanted = [int(number) for number in visible]
    if any(number >= len(given) for number in wanted):
        return environ
    return {**environ, **visible_devices.variables(given[number] for number in wanted)}


def _numbers(text: str) -> list[int]:
    """[0, 1, 2, 5] of "0-2,5"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if _is_number(first) and _is_number(last or first):
            numbers += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    return numbers


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10  # Python makes none of 5,000 digits


# The jobs that want or have GPUs by Slurm, as `squeue` lists them: to show them beside the line and the claims.
#
# Does not order or judge them: that is Slurm's.


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
    answer = slurm_jobs.run_scontrol("squeue", "-h", "-a", "-O", columns, seconds=SECONDS)
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
