"""Where snapshots come from: each file here reads one kind of source and is one row of BACKENDS.

A backend module has ``open(spec) -> Backend``.  Nothing above this drawer knows which one it talks to.
"""

from __future__ import annotations

from gpuguard.errors import InvalidRequest

TYPE_CHECKING = False  # this package is imported before every job: typing would cost it 6 ms, model 10
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Protocol

    from gpuguard.model import Snapshot
else:
    Protocol = object


class Backend(Protocol):
    """A source of snapshots."""

    name: str
    simulated: bool

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Read the machine now.

        Args:
            fields: groups of model (MEMORY, PROCESSES, ...); no call is made for others.
            devices: uuids to read; all when None.  A MIG instance is read with its parent.

        Raises:
            BackendError: nothing at all can be read.  A device that fails alone becomes a Gap and a problem instead.
        """

    def close(self) -> None:
        """Let go of the source.  Idempotent."""


BACKENDS = {
    "nvml": "NVIDIA's driver library, through nvidia-ml-py",
    "simulated": "a node that exists only in a file: see `gpuguard sim`",
}


def open_backend(name: str) -> Backend:
    """Open ``"nvml"``, ``"simulated"`` or ``"simulated:DIRECTORY"``, in this process.

    Raises:
        InvalidRequest: no such backend.
        BackendError: the source cannot be reached.
    """
    kind, _, spec = name.partition(":")
    if kind not in BACKENDS:
        raise InvalidRequest(f"there is no backend {kind!r}: choose one of {', '.join(BACKENDS)}.")
    import importlib

    backend: Backend = importlib.import_module(f"gpuguard.backends.{kind}").open(spec)
    return backend
