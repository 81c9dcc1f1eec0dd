"""Devices for this very process: grab_gpus() and the context manager claim(), and what they look at first.

The manner of py3nvml's grab_gpus, whose keywords are understood, with a claim behind it that nobody else gets past.
Does not start a command: see run.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpuguard.errors import CudaInitialized, InvalidRequest, NotEnoughGpus
from gpuguard.hold import Claim
from gpuguard.lock import acquire, look
from gpuguard.lockfiles import lock_directory
from gpuguard.model import MODEL, WHO_FIELDS, Device, Snapshot
from gpuguard.records import probe
from gpuguard.select import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuguard.backends import Backend

_ALL = -1
_PLENTY = 1024  # more devices than a machine has


def grab_gpus(
    num_gpus: int = 1,
    gpu_select: Iterable[int] | int | None = None,
    gpu_fraction: float | None = None,
    max_procs: int = -1,
    env_set_ok: bool | None = None,
    gpu_min_memory: float | None = None,
    *,
    strict: bool = True,
    wait: float | None = 0.0,
    note: str | None = None,
    backend: str | None = None,
    directory: str | None = None,
    **conditions: Any,
) -> Claim:
    """Claim devices for this process, the best free ones first, and set CUDA_VISIBLE_DEVICES in os.environ.

    Call it before CUDA is initialised.  The claim lasts until release() or the end of the process and of its forked
    workers; give a child that you start the claim's pass_fds if it shall keep the devices beyond your own end.

    Args:
        num_gpus: how many devices; -1 all that are free (at least one), 0 none at all (CUDA sees no device).
        gpu_select: an index or indices: no others.
        gpu_fraction: 0..1, this part of its memory must be free.
        max_procs: so many processes of others may be on a device; -1: none, and next to no memory in use.
        env_set_ok: None stays inside a CUDA_VISIBLE_DEVICES that is already set; False raises ValueError then.
        gpu_min_memory: MiB of memory in all.
        strict: False warns and takes what there is, instead of raising.
        wait: seconds to wait for the devices; None for ever.
        note: for the colleagues who look at `gpuguard who`.
        backend: see open_backend; default $GPUGUARD_BACKEND, else nvml.
        directory: of the claims; default $GPUGUARD_DIR, else the machine's.
        **conditions: further fields of Request: min_free (bytes), models, exclude, prefer, max_util (percent) ...

    Returns:
        A Claim: a sequence of its devices, so len(claim) is their number.

    Raises:
        NotEnoughGpus: fewer could be claimed.  Nothing stays claimed, and os.environ is unchanged.
        CudaInitialized: CUDA runs in this process already, so it would not see the change.
        InvalidRequest: the request makes no sense.
        BackendError: the driver cannot be reached.
    """
    _refuse_when_too_late()
    if env_set_ok is False and "CUDA_VISIBLE_DEVICES" in os.environ:
        raise InvalidRequest(
            "CUDA_VISIBLE_DEVICES is set already: unset it, or leave env_set_ok out to stay inside it."
        )
    if num_gpus == 0:
        claim = Claim("none", (), ())
    else:
        if gpu_select is not None:
            chosen = (gpu_select,) if isinstance(gpu_select, int) else tuple(gpu_select)
            conditions["devices"] = tuple(str(index) for index in chosen)
        if max_procs >= 0:
            conditions["max_processes"] = max_procs
        if gpu_min_memory is not None:
            conditions["min_total"] = int(gpu_min_memory * 2**20)
        if gpu_fraction is not None:
            conditions["min_free_fraction"] = gpu_fraction
        least, most = (1, _PLENTY) if num_gpus == _ALL else (num_gpus, None)
        request = Request(num_gpus=least, max_gpus=most, **conditions)
        claim = _claimed(request, strict, wait, note, backend, directory)
    os.environ.update(claim.environment())
    return claim


@contextmanager
def claim(num_gpus: int = 1, **options: Any) -> Iterator[Claim]:
    """grab_gpus() for a ``with`` block; releases the devices and restores os.environ at its end."""
    before = {name: os.environ.get(name) for name in Claim("none", (), ()).environment()}
    with grab_gpus(num_gpus, **options) as claimed:
        try:
            yield claimed
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def select_devices(
    num_gpus: int = 1, *, backend: str | None = None, directory: str | None = None, **conditions: Any
) -> list[Device]:
    """The devices that grab_gpus() would claim now, without claiming them; so they may be gone a moment later.

    Raises:
        NotEnoughGpus: fewer are eligible.
    """
    from gpuguard.select import not_enough

    name = _backend_name(backend)
    request = Request(num_gpus=num_gpus, **conditions)
    with _opened(name) as source:
        machine, choice = look(
            source, request, lock_directory(directory or os.environ.get("GPUGUARD_DIR"), backend=name)
        )
    if not choice.devices:
        raise not_enough(machine, request, choice)
    return list(choice.devices)


def snapshot(fields: Iterable[str] = WHO_FIELDS, *, backend: str | None = None) -> Snapshot:
    """What the machine looks like now.

    Args:
        fields: groups of gpuguard.model: MEMORY, PROCESSES, ...; what is not asked for stays None.
        backend: see open_backend.

    Raises:
        BackendError: nothing at all can be read.
    """
    with _opened(_backend_name(backend)) as source:
        return source.sample(frozenset(fields) | {MODEL})


def who(*, backend: str | None = None, directory: str | None = None) -> Snapshot:
    """What the machine looks like now, with everybody's claims in ``.claims``."""
    from gpuguard.nouns import replace

    name = _backend_name(backend)
    machine = snapshot(backend=name)
    place = lock_directory(directory or os.environ.get("GPUGUARD_DIR"), backend=name)
    return replace(machine, claims=probe(place, [device.uuid for device in machine.devices]))


def _claimed(
    request: Request, strict: bool, wait: float | None, note: str | None, backend: str | None, directory: str | None
) -> Claim:
    import sys

    name = _backend_name(backend)
    place = lock_directory(directory or os.environ.get("GPUGUARD_DIR"), backend=name)
    with _opened(name) as source:
        try:
            return acquire(source, request, place, wait=wait, note=note, command=sys.argv)
        except NotEnoughGpus as error:
            if strict:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)
            if error.available == 0:
                return Claim("none", (), ())
            from gpuguard.nouns import replace

            return acquire(
                source, replace(request, num_gpus=1, max_gpus=error.available), place, note=note, command=sys.argv
            )


def _backend_name(backend: str | None) -> str:
    return backend or os.environ.get("GPUGUARD_BACKEND", "nvml")


@contextmanager
def _opened(name: str) -> Iterator[Backend]:
    """The backend in a process of its own, started afresh: this one may have threads, and NVML must not hang in it."""
    from gpuguard.backends.isolated import open_isolated

    source = open_isolated(name)
    try:
        yield source
    finally:
        source.close()


def _refuse_when_too_late() -> None:
    import sys

    torch = sys.modules.get("torch")
    initialised = torch is not None and torch.cuda.is_initialized()
    if initialised or _has_open("/dev/nvidia-uvm"):
        raise CudaInitialized(
            "CUDA runs in this process already and will not see another CUDA_VISIBLE_DEVICES.  "
            "Call grab_gpus() before the first use of CUDA, or start the program with `gpuguard run -- ...`."
        )


def _has_open(path: str) -> bool:
    """Whether this process has *path* open: cuInit opens /dev/nvidia-uvm, reading the driver by NVML does not."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == path:
                return True
        except OSError:
            continue
    return False
