"""Pick free GPUs, claim them so that no other job gets them, and see who holds what.

    with gpuguard.claim(2) as devices:  # or gpuguard.grab_gpus(2), kept until the end of the process
        ...

A name is loaded when it is first used: `import gpuguard` costs next to nothing in a training script.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuguard import ray
    from gpuguard.api import claim, grab_gpus, select_devices, snapshot, who
    from gpuguard.backends import open_backend
    from gpuguard.claims.claim import Claim
    from gpuguard.cli.submit.python import Job, submit
    from gpuguard.errors import (
        AlreadyClaimed,
        BackendError,
        ClaimError,
        ClaimLost,
        CudaInitialized,
        DriverMismatch,
        DriverNotFound,
        DriverPermission,
        DriverUnresponsive,
        GpuguardError,
        ImpossibleRequest,
        InvalidRequest,
        LockDirectoryError,
        NotEnoughGpus,
        WaitTimeout,
    )
    from gpuguard.model import ClaimRecord, Device, Event, Finding, Gap, GpuProcess, Snapshot, Subject, Verdict
    from gpuguard.policy_files.loader import load_policies
    from gpuguard.training_log import collector
    from gpuguard.watchdog import Watchdog

__version__ = "0.1.0"

__all__ = [
    "AlreadyClaimed",
    "BackendError",
    "Claim",
    "ClaimError",
    "ClaimLost",
    "ClaimRecord",
    "CudaInitialized",
    "Device",
    "DriverMismatch",
    "DriverNotFound",
    "DriverPermission",
    "DriverUnresponsive",
    "Event",
    "Finding",
    "Gap",
    "GpuProcess",
    "GpuguardError",
    "ImpossibleRequest",
    "InvalidRequest",
    "Job",
    "LockDirectoryError",
    "NotEnoughGpus",
    "Snapshot",
    "Subject",
    "Verdict",
    "WaitTimeout",
    "Watchdog",
    "claim",
    "collector",
    "grab_gpus",
    "load_policies",
    "open_backend",
    "ray",
    "select_devices",
    "snapshot",
    "submit",
    "who",
]


_HOMES = {
    "backends": ("open_backend",),
    "training_log": ("collector",),
    "api": ("claim", "grab_gpus", "select_devices", "snapshot", "who"),
    "claims.claim": ("Claim",),
    "cli.submit.python": ("Job", "submit"),
    "cli.notebook": ("load_ipython_extension",),
    "model": ("ClaimRecord", "Device", "Event", "Finding", "Gap", "GpuProcess", "Snapshot", "Subject", "Verdict"),
    "policy_files.loader": ("load_policies",),
    "watchdog": ("Watchdog",),
}  # all other names are in errors


_FOR_IPYTHON = "load_ipython_extension"  # the function that `%load_ext gpuguard` calls


def __getattr__(name: str) -> object:
    if name not in __all__ and name != _FOR_IPYTHON:
        raise AttributeError(f"module 'gpuguard' has no attribute {name!r}")
    if name == "ray":
        return import_module("gpuguard.ray")
    home = next((home for home, names in _HOMES.items() if name in names), "errors")
    found: object = getattr(import_module(f"gpuguard.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
