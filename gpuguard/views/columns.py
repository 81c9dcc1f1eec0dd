"""The columns of all tables in which a row is a device: `who`, `who --hosts` and `top`.

`query` has nvidia-smi's columns, which stand with the fields of a device: see model.DeviceField.  The state comes last
everywhere and is no column here, because it is not a fact of the device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuguard.device_state import model_name
from gpuguard.locale import N_, _
from gpuguard.model import DEVICE_FIELDS, Device
from gpuguard.sanitize import neutralise
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_rounded

WIDE, WIDEST = 120, 170  # columns with which a screen of `top` has room for more


@dataclass(frozen=True)
class DeviceColumn:
    """One column: its heading, and the text that it has for a device."""

    head: str
    field: str  # of Device
    text: Callable[[Device], str | None] | None = None  # if not the value with its unit
    align: str = ">"
    in_who: bool = False
    in_fleet: bool = False  # in a line of `who --hosts`, which has room for less
    in_top_from: int | None = None  # columns of its screen; None if it is not shown there, or as a bar
    width: int = 0  # in `top`

    @property
    def group(self) -> str | None:
        """The group of fields with which it is read, or None if it is always read."""
        return DEVICE_FIELDS[self.field].group if self.field in DEVICE_FIELDS else None

    def known(self, device: Device) -> str | None:
        """Return the text of the column for *device*, or None if that is unknown."""
        if self.text:
            return self.text(device)
        value, unit = getattr(device, self.field), DEVICE_FIELDS[self.field].unit
        return None if value is None else format_bytes(value) if unit in ("B", "B/s") else format_rounded(value, unit)

    def cell(self, device: Device) -> str:
        """Return the text that is printed for *device*."""
        return self.known(device) or NOT_AVAILABLE


def _memory(device: Device) -> str | None:
    known = device.memory_used is not None or device.memory_total is not None
    host = _(" (host)") if device.memory_shared_with_host else ""
    return f"{format_bytes(device.memory_used)}/{format_bytes(device.memory_total)}{host}" if known else None


def _pstate(device: Device) -> str | None:
    return None if device.pstate is None else f"P{device.pstate}"


def _link(device: Device) -> str | None:
    """Return the generation and the lanes, ``"5x16"``, or None if one is unknown."""
    known = device.pcie_generation is not None and device.pcie_width is not None
    return f"{device.pcie_generation}x{device.pcie_width}" if known else None


def _name(device: Device) -> str:
    return neutralise(model_name(device))


NAME = DeviceColumn(N_("NAME"), "name", _name, "<", in_who=True, in_fleet=True)
DEVICE_COLUMNS = (
    DeviceColumn("GPU", "index", lambda device: device.label, "<", in_who=True, in_fleet=True),
    NAME,
    DeviceColumn(N_("MEMORY"), "memory_used", _memory, in_who=True, in_fleet=True),
    DeviceColumn(N_("UTIL"), "utilization", in_who=True, in_fleet=True),
    DeviceColumn(N_("TEMP"), "temperature", in_who=True),
    DeviceColumn(N_("POWER"), "power_draw", in_who=True),
    DeviceColumn("PERF", "pstate", _pstate, in_top_from=WIDE, width=4),
    DeviceColumn(N_("CLOCK"), "clock_sm", in_top_from=WIDEST, width=7),
    DeviceColumn("ENC", "encoder_utilization", in_top_from=WIDEST, width=4),
    DeviceColumn("DEC", "decoder_utilization", in_top_from=WIDEST, width=4),
    DeviceColumn("PCIE", "pcie_width", _link, in_top_from=WIDEST, width=4),
    DeviceColumn("RX/s", "pcie_rx", in_top_from=WIDEST, width=7),
    DeviceColumn("TX/s", "pcie_tx", in_top_from=WIDEST, width=7),
)
WHO_COLUMNS = tuple(column for column in DEVICE_COLUMNS if column.in_who)
FLEET_COLUMNS = tuple(column for column in DEVICE_COLUMNS if column.in_fleet)


def top_columns(width: int) -> tuple[DeviceColumn, ...]:
    """Return the columns that `top` has beside its bars on a screen of *width* columns."""
    return tuple(column for column in DEVICE_COLUMNS if column.in_top_from is not None and column.in_top_from <= width)
