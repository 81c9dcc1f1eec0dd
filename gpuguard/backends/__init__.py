"""Where snapshots come from: each file here reads one kind of source and is one row of BACKENDS.

A backend module has ``open(spec) -> OpenedBackend``.  Nothing above this package knows which one it talks to.
Facts about a vendor that hold on every machine are in vendors.  This module opens no device.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.locale.messages import sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuguard.model import Snapshot


class Backend(Protocol):
    """A source of snapshots, in this process or in another one."""

    name: str
    simulated: bool

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Read the machine now: *fields* are groups of model (MEMORY, PROCESSES, ...), and no call is made for others.

        *devices* are the uuids of the devices to read, all by default; a MIG instance is read with its parent.
        Raises BackendError if nothing at all can be read.  A device that fails alone is a Gap and a problem instead.
        """

    def close(self) -> None:
        """Let go of the devices until they are sampled again, which may be hours later.  Idempotent."""


@runtime_checkable
class OpenedBackend(Backend, Protocol):
    """A backend as open() of its module returns it.

    Its worker sets the attributes, so that a call that hangs costs one device.

    Attributes:
        progress: the backend calls it with the index of each device before it reads that device, and with None before
            it reads what belongs to no single device, or every 0.4 s while it reads all of them with one program.  The
            worker is abandoned if no call comes for client.DEVICE_SECONDS.
        skip: indices of devices that hang.  The backend does not touch them, and leaves them out or shows them with the
            problem "unresponsive".
        ahead: whether nothing was read yet and no device hangs, so that several devices may be read at the same time.
            A backend that reads one device after the other ignores it.
    """

    progress: Callable[[int | None], object]
    skip: Collection[int]
    ahead: bool


BACKENDS = {
    "auto": "all vendors whose GPUs are found: NVIDIA's, AMD's, Intel's, those of Moore Threads",
    "nvml": "NVIDIA's driver library, through nvidia-ml-py",
    "smi": "the program nvidia-smi, or with smi:FILE.xml what `nvidia-smi -q -x` wrote to a file",
    "amd": "AMD's GPUs as the kernel shows them in /sys and /proc, or with amd:DIR the copy of both in a directory",
    "intel": "what Linux and its drivers xe and i915 tell of Intel GPUs",
    "mthreads": "Moore Threads' driver library, through mthreads-ml-py",
    "replay": "a file of `gpuguard record`, as in replay:FILE or replay:FILE?speed=60",
    "simulated": "a node that exists only in a file: see `gpuguard sim`",
}
DEFAULT_BACKEND = "auto"
# Backends that read the kernel's files, and with a directory after the colon a tree of such files that a test wrote.
_OF_KERNEL_FILES = ("amd", "intel")
# The beginnings of backends that show a file of another time, on which nothing may be claimed or signalled.
RECORDED = ("smi:", "replay")


def default_backend() -> str:
    """Return the backend of a command or a program that names none: $GPUGUARD_BACKEND, else DEFAULT_BACKEND."""
    return os.environ.get("GPUGUARD_BACKEND") or DEFAULT_BACKEND


def parts_of(name: str) -> list[str]:
    """Return the backends in *name*: ``["nvml", "amd"]``.  A comma without a backend after it is part of a path."""
    return re.split(rf",(?=(?:{'|'.join(BACKENDS)})(?:[:,]|$))", name)


def is_simulated(name: str) -> bool:
    """Return whether a backend, or the first of several, shows a node that exists only in files, and its claims too."""
    kind, _colon, spec = parts_of(name)[0].partition(":")
    return kind == "simulated" or (kind in _OF_KERNEL_FILES and bool(spec))


def open_backend(name: str) -> OpenedBackend:
    """Open ``"nvml"``, ``"simulated:DIRECTORY"``, ``"smi:FILE.xml"`` ..., as in BACKENDS, in this process.

    Raises InvalidRequest if there is no such backend, and BackendError if the source cannot be reached or the backend
    lacks something of OpenedBackend.
    """
    kind, _colon, spec = name.partition(":")
    if len(parts_of(name)) > 1:
        raise InvalidRequest(
            sentence(
                "backend.several",
                "{name} is several backends, each of which needs a worker: open_worker opens them.",
                name=name,
            )
        )
    if kind not in BACKENDS:
        raise InvalidRequest(
            sentence(
                "backend.none",
                "there is no backend {kind}: choose one of {backends}.",
                kind=repr(kind),
                backends=", ".join(BACKENDS),
            )
        )
    backend = import_module(f"gpuguard.backends.{kind}").open(spec)
    if not isinstance(backend, OpenedBackend):
        raise BackendError(
            sentence(
                "backend.not_whole",
                "the backend {kind} is not whole: `Add a backend` in CONTRIBUTING.md says what it needs.",
                kind=kind,
            )
        )
    return backend
