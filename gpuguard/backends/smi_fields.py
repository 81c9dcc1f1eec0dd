"""Where nvidia-smi's XML has which field of a device, and how its words become numbers: the table ROWS.

Every driver writes other words for "not known" ("N/A", "[Not Supported]", "ERR!", "Requested functionality has been
deprecated", ...), so none of them is listed: what is no number with the right unit is a gap, and its text the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard import model
from gpuguard.backends.nvml_fields import kibibytes
from gpuguard.backends.nvml_reading import PLAUSIBLE
from gpuguard.backends.smi_xml import Element
from gpuguard.model import Gap

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NUMBER = re.compile(r"(-?\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z%/]*)", re.ASCII)
_COMPUTE_MODES = {
    "Default": "default",
    "Exclusive_Process": "exclusive_process",
    "Exclusive_Thread": "exclusive_process",
    "Prohibited": "prohibited",
}
_LONGEST_NAME = 200
_SWITCH = {"Enabled": True, "Disabled": False}
_THROTTLE = {"hw_thermal_slowdown": "hw_thermal_slowdown", "display_clocks_setting": "display_clock_setting"}
_NOT_TOLD = "nvidia-smi does not tell it"


def number(unit: str, scale: float = 1) -> Callable[[str], float | None]:
    """A converter of ``"12.5 W"``."""

    def convert(text: str) -> float | None:
        match = _NUMBER.fullmatch(text)
        return float(match[1]) * scale if match and match[2] == unit else None

    return convert


def whole(unit: str, scale: int = 1) -> Callable[[str], int | None]:
    """A converter of ``"8116 MiB"``."""

    def convert(text: str) -> int | None:
        match = _NUMBER.fullmatch(text)
        return int(float(match[1]) * scale) if match and match[2] == unit else None

    return convert


def name_of(text: str) -> str | None:
    """A name, unless it is one of the words that stand for none."""
    return None if is_blank(text) or len(text) > _LONGEST_NAME else text


def is_blank(text: str) -> bool:
    """Whether *text* says in any driver's words that there is nothing to say."""
    low = text.strip("[]").lower()
    return low in ("", "n/a", "none", "unknown", "unknown error", "err!") or low.startswith(_EXCUSES)


_EXCUSES = ("not ", "requested functionality", "insufficient", "function not", "gpu is lost", "gpu requires", "no perm")


def _bus_id(text: str) -> str | None:
    # Strictly, as a path in /sys is made of it.
    return text if re.fullmatch(r"[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", text, re.ASCII) else None


def _pstate(text: str) -> int | None:
    return int(text[1:]) if re.fullmatch(r"P\d{1,2}", text, re.ASCII) else None


def _width(text: str) -> int | None:
    return whole("")(text.removesuffix("x"))


mebibytes, watts, celsius, percent, megahertz = whole("MiB", 2**20), number("W"), number("C"), number("%"), whole("MHz")
_rate = number("KB/s")


def bytes_per_second(text: str) -> float | None:
    """``"550 KB/s"``, which are KiB, as in NVML."""
    rate = _rate(text)
    return None if rate is None else kibibytes(int(rate))


@dataclass(frozen=True)
class Row:
    """One field of a device: where it is (the first place that has a value), and what makes a value of it."""

    field: str
    places: tuple[str, ...]
    convert: Callable[[str], Any]


_POWER = "gpu_power_readings"
_LINK = "pci/pci_gpu_link_info"

ROWS: dict[str, tuple[Row, ...]] = {
    model.MODEL: (
        Row("name", ("product_name",), name_of),
        Row("pci_bus_id", ("pci/pci_bus_id",), _bus_id),
        Row("minor_number", ("minor_number",), whole("")),
    ),
    model.UTILIZATION: (
        Row("utilization", ("utilization/gpu_util",), percent),
        Row("memory_utilization", ("utilization/memory_util",), percent),
    ),
    model.THERMAL: (
        Row("temperature", ("temperature/gpu_temp",), celsius),
        Row("temperature_slowdown", ("temperature/gpu_temp_slow_threshold",), celsius),
        Row("temperature_shutdown", ("temperature/gpu_temp_max_threshold",), celsius),
        Row("fan_speed", ("fan_speed",), percent),
    ),
    model.POWER: (
        Row(
            "power_draw",
            ("power_readings/power_draw", f"{_POWER}/power_draw", f"{_POWER}/average_power_draw",
             f"{_POWER}/instant_power_draw"),
            watts,
        ),
        Row(
            "power_limit",
            ("power_readings/enforced_power_limit", f"{_POWER}/current_power_limit", "power_readings/power_limit"),
            watts,
        ),
    ),
    model.CLOCKS: (
        Row("clock_sm", ("clocks/sm_clock",), megahertz),
        Row("clock_sm_max", ("max_clocks/sm_clock",), megahertz),
        Row("clock_memory", ("clocks/mem_clock",), megahertz),
        Row("clock_memory_max", ("max_clocks/mem_clock",), megahertz),
        Row("pstate", ("performance_state",), _pstate),
        Row("persistence_mode", ("persistence_mode",), _SWITCH.get),
    ),
    model.ECC: (Row("ecc_mode", ("ecc_mode/current_ecc",), _SWITCH.get),),
    model.PCIE: (
        Row("pcie_generation", (f"{_LINK}/pcie_gen/device_current_link_gen", f"{_LINK}/pcie_gen/current_link_gen"),
            whole("")),
        Row("pcie_width", (f"{_LINK}/link_widths/current_link_width",), _width),
        Row("pcie_tx", ("pci/tx_util",), bytes_per_second),
        Row("pcie_rx", ("pci/rx_util",), bytes_per_second),
    ),
}  # fmt: skip

# Fields of a group that nvidia-smi -q -x has nowhere.
ABSENT = {
    model.POWER: ("total_energy",),
    model.NVLINK: ("nvlink_links",),
    model.NVLINK_FLOW: ("nvlink_tx", "nvlink_rx"),
}


class Sheet:
    """One device or MIG instance while its element is read: values and gaps."""

    def __init__(self, element: Element, uuid: str) -> None:
        self.element, self.uuid = element, uuid
        self.values: dict[str, Any] = {}
        self.gaps: list[Gap] = []
        self.problems: list[str] = []

    def gap(self, field: str, reason: str) -> None:
        """Say why a field is unknown."""
        self.gaps.append(Gap(self.uuid, field, reason[:200]))

    def take(self, row: Row) -> None:
        """Set a field, or leave a gap."""
        words = [word for place in row.places if (word := self.element.word(place)) is not None]
        low, high = PLAUSIBLE.get(row.field, (float("-inf"), float("inf")))
        for word in words:
            value = row.convert(word)
            if value is not None and (isinstance(value, str) or low <= value <= high):
                self.values[row.field] = value
                return
        self.gap(row.field, words[0] or "empty" if words else "it is missing in the document")

    def problem(self, text: str) -> None:
        """Say what is wrong with the device."""
        if text not in self.problems:
            self.problems.append(text)


def read_rows(sheet: Sheet, group: str) -> None:
    """The fields of *group* that are one element each, and those that there are none for."""
    for row in ROWS.get(group, ()):
        sheet.take(row)
    for field in ABSENT.get(group, ()):
        sheet.gap(field, _NOT_TOLD)


def read_memory(sheet: Sheet) -> None:
    """memory_*: all of them, or none."""
    memory = {name: sheet.element.word(f"fb_memory_usage/{name}") for name in ("total", "used", "free", "reserved")}
    found = {name: None if word is None else mebibytes(word) for name, word in memory.items()}
    total, used, free = found["total"], found["used"], found["free"]
    # Each is rounded to MiB for itself, so their sum may miss the total by three of them.
    if total is None or used is None or free is None:
        reason = next((f"{memory[name]}" for name in ("total", "used", "free") if found[name] is None), "")
        reason = "it is missing in the document" if reason == "None" else reason
    elif total <= 0 or min(used, free) < 0 or used + free > total + 3 * 2**20:
        reason = f"implausible values {memory['total']}, {memory['used']} used, {memory['free']} free"
    else:
        sheet.values.update(memory_total=total, memory_used=used, memory_free=free)
        if found["reserved"] is not None and 0 <= found["reserved"] <= total:
            sheet.values["memory_reserved"] = found["reserved"]
        else:
            sheet.gap("memory_reserved", "this driver counts it as used memory")
        return
    for name in memory:
        sheet.gap(f"memory_{name}", reason or "empty")


def read_throttle_reasons(sheet: Sheet) -> None:
    """throttle_reasons: the names of those that are active; unknown unless each says whether it is."""
    listed = sheet.element.find("clocks_event_reasons") or sheet.element.find("clocks_throttle_reasons")
    if listed is None or not listed.children:
        sheet.gap("throttle_reasons", (listed.text.strip() if listed else "") or "it is missing in the document")
        return
    active = []
    for child in listed.children:
        name = re.sub(r"^clocks_(event|throttle)_reasons?_", "", child.tag)
        if child.text.strip() == "Active":
            active.append(_THROTTLE.get(name, name))
        elif child.text.strip() != "Not Active" and not child.children:
            sheet.gap("throttle_reasons", f"{name}: {child.text.strip()}")
            return
    sheet.values["throttle_reasons"] = tuple(active)


def read_ecc(sheet: Sheet) -> None:
    """ecc_*, retired_pages, remapped_rows."""
    for since in ("volatile", "aggregate"):
        for kind, ways in _ECC.items():
            field = f"ecc_{kind}_{since}"
            if sheet.values.get("ecc_mode") is False:
                sheet.gap(field, "ECC is off")
            else:
                _add_up(sheet, field, [[f"ecc_errors/{since}/{name}" for name in way] for way in ways])
    pages = ("multiple_single_bit_retirement", "double_bit_retirement")
    _add_up(sheet, "retired_pages", [[f"retired_pages/{kind}/retired_count" for kind in pages]])
    _add_up(sheet, "remapped_rows", [[f"remapped_rows/remapped_row_{kind}" for kind in ("corr", "unc")]])


_ECC = {  # what is added up, by the way in which a driver writes it: Turing and later; 550 and later; before Turing
    "corrected": (("sram_correctable", "dram_correctable"), ("single_bit/total",)),
    "uncorrected": (
        ("sram_uncorrectable", "dram_uncorrectable"),
        ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
        ("double_bit/total",),
    ),
}


def _add_up(sheet: Sheet, field: str, ways: list[list[str]]) -> None:
    """The sum of the elements of the first way of writing it that is complete."""
    reason = ""
    for places in ways:
        words = [sheet.element.word(place) for place in places]
        counts = [None if word is None else whole("")(word) for word in words]
        known = [count for count in counts if count is not None and count >= 0]
        if len(known) == len(places):
            sheet.values[field] = sum(known)
            return
        reason = reason or next((word for word, count in zip(words, counts, strict=True) if word and count is None), "")
    sheet.gap(field, reason or "it is missing in the document")


def read_health(sheet: Sheet) -> None:
    """problems, compute_mode, mig_mode."""
    element = sheet.element
    sheet.take(Row("compute_mode", ("compute_mode",), _COMPUTE_MODES.get))
    mode = element.word("mig_mode/current_mig")
    if mode in (None, "N/A", "[N/A]", "[Not Supported]", "Disabled", "Enabled"):
        sheet.values["mig_mode"] = mode == "Enabled"  # a device or driver without MIG is not in MIG mode
    else:
        sheet.gap("mig_mode", mode or "empty")
    for place, problem in _PROBLEMS.items():
        if element.word(place) == "Yes":
            sheet.problem(problem)
    action = element.word("gpu_recovery_action") or ""
    if not is_blank(action):
        sheet.problem(f"the driver recommends: {action[:80]}")
    for place in ("compute_mode", "fb_memory_usage/total", "product_name", "utilization/gpu_util"):
        if (text := element.word(place) or "").strip("[]").lower() in ("err!", "unknown error"):
            sheet.problem(f"{place.rpartition('/')[2]}: {text}")


_PROBLEMS = {
    "gpu_reset_status/reset_required": "reset required",
    "remapped_rows/remapped_row_pending": "row remap pending",
    "remapped_rows/remapped_row_failure": "row remap failed",
    "retired_pages/pending_retirement": "page retirement pending",
    "retired_pages/pending_blacklist": "page retirement pending",
}
