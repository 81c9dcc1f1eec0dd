"""The program around a claim of grab_gpus(): what of it runs already and would not see the devices, or has them.

Does not claim: see grab.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gpuguard.errors import CudaInitialized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from gpuguard.backends import Backend
    from gpuguard.claims.hold import Claim
    from gpuguard.claims.lockfiles import LockDirectory

_CUDA_DEVICE = "/dev/nvidia-uvm"  # cuInit opens it, reading the driver by NVML does not
_BLIND = (
    "the fork server of multiprocessing, or workers of joblib, run since before this claim: what is computed in a "
    "Pool, Process or Parallel() of theirs sees other GPUs.  Claim before the first of these, or use "
    'multiprocessing.get_context("spawn").'
)
_LOKY = ("loky.reusable_executor", "joblib.externals.loky.reusable_executor")


def cuda_runs() -> bool:
    """Whether CUDA is initialised in this process, so that it will see no other devices than it does now."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # None too while torch is being imported
    return bool(cuda is not None and cuda.is_initialized()) or _has_open(_CUDA_DEVICE)


def refuse_when_too_late() -> None:
    """Raise CudaInitialized where CUDA runs."""
    if cuda_runs():
        raise CudaInitialized(
            "CUDA runs in this process already and will not see another CUDA_VISIBLE_DEVICES.  "
            "Call grab_gpus() before the first use of CUDA, or start the program with `gpuguard run -- ...`."
        )


def _has_open(path: str) -> bool:
    """Whether this process has *path* open."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == path:
                return True
        except OSError:
            continue
    return False


def claim_of_the_script(source: Backend, place: LockDirectory, environ: Mapping[str, str]) -> Claim | None:
    """What the script has claimed, for a worker of it that runs the same lines again; it excludes none of the others.

    None: this is no such worker, or the script has no claim.  Lightning starts its ranks as commands, with LOCAL_RANK.
    """
    again = _runs_again()
    if not again and "LOCAL_RANK" not in environ:
        return None
    from gpuguard.attempt import outer_claim
    from gpuguard.claims.hold import Claim
    from gpuguard.model import HEALTH, MEMORY, MODEL

    outer = outer_claim(place, environ)
    if outer is None or not (again or outer.pid == os.getppid()):
        return None
    seen = source.sample({HEALTH, MEMORY, MODEL}).devices
    claim = Claim(outer.id, tuple(device for device in seen if device.uuid in outer.devices), (), memory=outer.memory)
    os.environ.update(claim.environment())
    return claim


def _runs_again() -> bool:
    """Whether we are called by a script that multiprocessing runs once more, to find in it what a worker shall do.

    So it does with "spawn" and "forkserver", the default of Python 3.14, under the name __mp_main__.
    """
    frame: FrameType | None = sys._getframe()
    while frame:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def warn_of_workers(visible: str, stacklevel: int) -> None:
    """Warn where a worker of later on will have the environment of a process that was started before the claim."""
    variable = b"CUDA_VISIBLE_DEVICES=" + visible.encode()
    for pid in _forerunners():
        from gpuguard.backends.processes import LONGEST, read_proc  # of most programs none runs

        began = read_proc(f"/proc/{pid}/environ", LONGEST)  # nothing of one that has ended
        if began and variable not in began.split(b"\0"):
            import warnings

            warnings.warn(_BLIND, RuntimeWarning, stacklevel=stacklevel + 1)
            return


def _forerunners() -> Iterator[int]:
    """The pids of those that others are forked from, and of those that are used again without a word."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    if pid := getattr(server, "_forkserver_pid", None):
        yield pid
    for name in _LOKY:
        executor = getattr(sys.modules.get(name), "_executor", None)
        yield from tuple(getattr(executor, "_processes", None) or ())
