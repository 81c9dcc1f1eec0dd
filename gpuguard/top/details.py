"""The page behind the key d: all that is known of GPUs, and of the process that is chosen.

It shows what no row has room for.  Pure, like page.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuguard.device_state import DeviceUse, model_name, vendor_of
from gpuguard.locale import _
from gpuguard.model import CLOCKS, ECC, MEDIA, PCIE, Device, GpuProcess
from gpuguard.sanitize import neutralise
from gpuguard.top.process_table import ProcessRow, heading
from gpuguard.top.scene import Scene
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_rounded

FIELDS = frozenset({CLOCKS, ECC, MEDIA, PCIE})  # beside model.WHO_FIELDS
Pair = tuple[str, "str | None"]  # label and value; None: not known


def details(scene: Scene, uses: Sequence[DeviceUse], row: ProcessRow | None) -> str:
    """Return a block of lines for each of the GPUs *uses*; with *row*, one for that process and for its GPUs alone."""
    if row:
        uses = [use for use in scene.uses if use.device.uuid in row.uuids]
    blocks = []
    if scene.age is not None and all(use.device.pstate is None for use in uses):
        blocks.append([_("The daemon does not read all of it: Esc, then f, asks the driver.")])
    if row:
        blocks.append([heading(row), *_lines(_of_process(row, _parts(row, uses)))])
    for use in uses:
        names = f"GPU {use.device.label}  {model_name(use.device)}  {use.device.uuid}"
        blocks.append([neutralise(names), *_lines(_of_device(use.device))])
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _lines(rows: Sequence[Sequence[Pair]]) -> list[str]:
    return [
        "  " + "  ".join(f"{label} {NOT_AVAILABLE if value is None else value}" for label, value in row) for row in rows
    ]


def _parts(row: ProcessRow, uses: Sequence[DeviceUse]) -> list[tuple[Device, GpuProcess]]:
    """Return the process of *row* as it is on each of its GPUs."""
    pairs = ((use.device, running.process) for use in uses for running in use.processes or ())
    return [(device, part) for device, part in pairs if (part.pid, part.start_time) == row.identity]


def _of_process(row: ProcessRow, parts: Sequence[tuple[Device, GpuProcess]]) -> list[list[Pair]]:
    now = row.now
    rows: list[list[Pair]] = [
        [
            ("GPU", ",".join(row.devices)), (_("kind"), row.kind), (_("claim"), neutralise(row.claim or "-")),
            (_("running for"), format_duration(row.seconds)),
        ],
        [
            (_("memory"), format_bytes(now.memory)), ("MEM", _share(row.memory_share)), ("SM", _percent(now.sm)),
            ("MBW", _percent(now.bandwidth)), ("ENC", _percent(now.encoder)), ("DEC", _percent(now.decoder)),
        ],
        [
            ("CPU", _percent(now.cpu)), (_("memory of the host"), format_bytes(now.host)),
            ("MEM", _share(row.host_share)),
        ],
    ]  # fmt: skip
    if len(parts) > 1:
        rows += [_of_part(device, part) for device, part in parts]
    for _device, process in parts[:1]:
        told = (
            (_("program"), process.executable),
            (_("directory"), process.working_directory),
            (_("Python environment"), process.conda_environment),
            (_("container"), process.container),
        )
        rows += [[(label, neutralise(value))] for label, value in told if value]
    return rows


def _of_part(device: Device, part: GpuProcess) -> list[Pair]:
    return [
        (f"GPU {device.label}", format_bytes(part.memory_used)),
        ("SM", _percent(part.utilization)),
        ("MBW", _percent(part.memory_utilization)),
        ("ENC", _percent(part.encoder_utilization)),
        ("DEC", _percent(part.decoder_utilization)),
    ]


def _of_device(device: Device) -> list[list[Pair]]:
    reasons, limit = device.throttle_reasons, device.power_limit
    weighted = None  # a GPU that is busy and draws little power mostly waits
    if device.utilization is not None and device.power_draw is not None and limit:
        weighted = device.utilization * device.power_draw / limit
    return [
        [
            (_("memory"), f"{format_bytes(device.memory_used)}/{format_bytes(device.memory_total)}"),
            (_("shared with the host"), _switch(device.memory_shared_with_host)),
            (_("reserved"), format_bytes(device.memory_reserved)), ("MBW", _percent(device.memory_utilization)),
        ],
        [
            (_("utilization"), _percent(device.utilization)), (_("by power"), _percent(weighted)),
            ("ENC", _percent(device.encoder_utilization)), ("DEC", _percent(device.decoder_utilization)),
        ],
        [
            ("PERF", None if device.pstate is None else f"P{device.pstate}"),
            ("SM", _megahertz(device.clock_sm, device.clock_sm_max)),
            (_("memory"), _megahertz(device.clock_memory, device.clock_memory_max)),
            (_("video"), _megahertz(device.clock_video, None)),
            (_("slowed down"), None if reasons is None else neutralise(", ".join(reasons)) or "-"),
        ],
        [
            (_("power"), f"{format_rounded(device.power_draw, 'W')}/{format_rounded(limit, 'W')}"),
            (_("temperature"), format_rounded(device.temperature, "C")),
            (_("slows down at"), format_rounded(device.temperature_slowdown, "C")),
            (_("switches off at"), format_rounded(device.temperature_shutdown, "C")),
            (_("fan"), _percent(device.fan_speed)),
        ],
        [
            (_("bus id"), device.pci_bus_id and neutralise(device.pci_bus_id)),
            ("PCIe", _number(device.pcie_generation)), (_("lanes"), _number(device.pcie_width)),
            ("RX/s", format_bytes(device.pcie_rx)), ("TX/s", format_bytes(device.pcie_tx)),
        ],
        [
            ("ECC", _switch(device.ecc_mode)),
            (_("uncorrected"), _number(device.ecc_uncorrected_volatile)),
            (_("in all"), _number(device.ecc_uncorrected_aggregate)),
            (_("corrected"), _number(device.ecc_corrected_volatile)),
            (_("in all"), _number(device.ecc_corrected_aggregate)),
        ],
        [
            (_("compute mode"), device.compute_mode and neutralise(device.compute_mode)),
            (_("partitions") if vendor_of(device).partitions else "MIG", _switch(device.mig_mode)),
            (_("persistence"), _switch(device.persistence_mode)),
            (_("display"), _switch(device.display_active)),
        ],
    ]  # fmt: skip


def _percent(value: float | None) -> str:
    return format_rounded(value, "%")


def _share(percent: float | None) -> str | None:
    return None if percent is None else f"{percent:.1f}%"


def _megahertz(value: int | None, highest: int | None) -> str | None:
    if value is None:
        return None
    return f"{value}MHz" if highest is None else f"{value}/{highest}MHz"


def _number(value: int | None) -> str | None:
    return None if value is None else str(value)


def _switch(value: bool | None) -> str | None:
    return None if value is None else _("on") if value else _("off")
