"""Slurm's jobs for people and for programs, beside the line and the claims of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuguard.clusters.slurm_queue import Queued
from gpuguard.text import neutralise
from gpuguard.units import format_duration
from gpuguard.views.text import Paint, shorten, table


def to_text(
    found: Sequence[Queued] | str, now: float, *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """A table of *found*, or why it cannot be shown."""
    if isinstance(found, str):
        return [f"Slurm does not say who waits there: {neutralise(found)}"]
    waiting = sum(job.state == "PENDING" for job in found)
    title = f"Slurm: {len(found) - waiting or 'no'} jobs with GPUs, {waiting or 'none'} waiting"
    lines = [paint(title if width is None else shorten(title, width), "bold")]
    rows = [_row(job, now) for job in found]
    return lines + (
        table(rows, ["JOB", "USER", "GPUS", "SINCE", "STATE", "NAME"], align="<<>><<", width=width) if rows else []
    )


def _row(job: Queued, now: float) -> list[str]:
    pending = job.state == "PENDING"
    since = job.submitted if pending else job.start
    ago = "" if since is None else format_duration(round(max(0.0, now - since)))
    state = f"waits: {job.reason}" if pending and job.reason else job.state.lower()
    place = f"{state} on {job.nodes}" if job.nodes and not pending else state
    return [neutralise(job.job), neutralise(job.user), str(job.gpus), ago, neutralise(place), neutralise(job.name)]


def to_json(found: Sequence[Queued] | str) -> list[dict[str, Any]] | None:
    """The objects that docs/json.md describes; None when Slurm does not answer."""
    if isinstance(found, str):
        return None
    return [
        {
            "job": job.job,
            "user": job.user,
            "name": job.name,
            "state": job.state,
            "num_gpus_per_node": job.gpus,
            "reason": job.reason,
            "submitted_at": job.submitted,
            "start": job.start,
            "nodes": job.nodes,
        }
        for job in found
    ]
