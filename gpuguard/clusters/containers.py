"""Containers: NVIDIA_VISIBLE_DEVICES says what the container runtime lets in.

Only "nothing" is taken from it.  Its other values number the devices of the host, while inside the container the
driver shows only those that were let in, numbered from 0: what is visible is the answer already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.model import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE = "NVIDIA_VISIBLE_DEVICES"


def allowed(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[tuple[str, ...], str] | None:
    """No device where the container was started without; None (no opinion) elsewhere."""
    text = environ.get(VARIABLE)
    if text is None or text.strip().lower() not in ("", "void", "none"):
        return None
    return (), f"{VARIABLE}={text} gives no GPU to this container"
