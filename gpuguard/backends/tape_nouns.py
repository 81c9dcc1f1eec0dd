"""Snapshots as plain JSON values and back; what comes from a file is checked field by field.

A recording may come from anybody: a text where a number should be must not reach a view or a rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.errors import BackendError
from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, Snapshot
from gpuguard.typed import noun

if TYPE_CHECKING:
    from typing import Any

_NOUNS = (GpuProcess, Device, Gap, ClaimRecord)


def pack(noun: object) -> dict[str, Any]:
    """A noun of the model as plain values, without those that are what they are when nobody says anything."""
    kind = type(noun)
    return {name: _plain(value) for name, value in vars(noun).items() if value != getattr(kind, name, _NOTHING)}


_NOTHING = object()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return pack(value) if type(value) in _NOUNS else value


def unpack(packed: object) -> Snapshot:
    """The snapshot that pack() made plain, as one of another time.  Raises BackendError."""
    try:
        snapshot: Snapshot = noun(Snapshot, packed)
    except ValueError as error:
        raise BackendError(f"this recording is damaged: {error}.") from None
    return replace(snapshot, recorded=True)
