"""Claims of this process, as `gpuguard run` and grab_gpus() make them, and what they would take."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory
from gpuguard.lock import Allocator
from gpuguard.model import Snapshot
from gpuguard.request import Request
from gpuguard.select import Choice


def acquire(
    backend: Backend,
    request: Request,
    directory: LockDirectory,
    *,
    alternatives: Sequence[Request] = (),
    wait: float | None = 0.0,
    environ: Mapping[str, str] = os.environ,
    on_wait: Any = None,
    **job: Any,
) -> Claim:
    """A claim for *request*, or for the first of the *alternatives* that can be had; *job* as JobDetails has it."""
    requests = (request, *alternatives)
    return Allocator(backend, directory, requests, environ=environ, job=JobDetails(**job), on_wait=on_wait).acquire(
        wait
    )


def preview(
    backend: Backend, request: Request, directory: LockDirectory, environ: Mapping[str, str] = os.environ
) -> tuple[Snapshot, Choice]:
    """What acquire() would take."""
    return Allocator(backend, directory, [request], environ=environ).preview()


def lock_best(backend: Backend, request: Request, directory: LockDirectory, taken: dict[str, str]) -> Claim | None:
    """The best devices, without a record of the claim."""
    return Allocator(backend, directory, [request]).lock_best(request, backend.sample(()), taken, with_record=False)
