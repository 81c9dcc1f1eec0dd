"""Slurm: a job gets what Slurm gave it; a job that got no GPU must not take what is there.

CUDA_VISIBLE_DEVICES says which, where it is set (see cuda).  SLURM_STEP_GPUS and SLURM_JOB_GPUS carry the numbers of
the whole machine, so they are read only where the job sees more devices than it was given: where Slurm hides the
others (ConstrainDevices), the visible ones are numbered from 0 again and all of them are the job's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 1024  # GPUs of a node
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL")


def allowed(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[tuple[str, ...], str] | None:
    """What a Slurm job was given; None (no opinion) elsewhere and where CUDA_VISIBLE_DEVICES says it."""
    job = environ.get("SLURM_JOB_ID")
    if not job or "CUDA_VISIBLE_DEVICES" in environ:
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
    visible, claim = environ.get("CUDA_VISIBLE_DEVICES", ""), environ.get("GPUGUARD_CLAIM", "")
    variable = next((name for name in GPU_VARIABLES[1:3] if name in environ), None)
    if variable is None or "SLURM_JOB_ID" not in environ or not all(map(_is_number, visible.split(","))):
        return environ
    given, shown = _numbers(environ[variable]), sum(device.parent_uuid is None for device in devices)
    # What Slurm itself wrote stands in GPU_DEVICE_ORDINAL, too; `gpuguard run` writes the numbers that it sees.
    by_slurm = _numbers(environ.get("GPU_DEVICE_ORDINAL", visible))
    by_us = claim and not claim.removeprefix("slurm").isdecimal()
    if by_us or shown <= len(given) or by_slurm == given or by_slurm != list(range(len(given))):
        return environ
    wanted = [int(number) for number in visible.split(",")]
    if any(number >= len(given) for number in wanted):
        return environ
    return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(str(given[number]) for number in wanted)}


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
