"""Where nvidia-smi's XML has which field of a device, and how its words become numbers: the table ROWS.

Every driver writes other words for "not known" ("N/A", "[Not Supported]", "ERR!", "Requested functionality has been
deprecated", ...), so none of them is listed: what is no number with the right unit is a gap, and its text the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.parsers import expat

from gpuguard import model
from gpuguard.backends.nvml_fields import kibibytes
from gpuguard.backends.plausibility import PLAUSIBLE
from gpuguard.errors import BackendError
from gpuguard.model import Gap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

# The XML that `nvidia-smi -q -x` prints, as a small tree; a hostile document is refused, never expanded.
#
# A document may come from anybody (a saved file), so nothing in it is looked up elsewhere: no entities, no DTD of its
# own, no more than MAX_BYTES, MAX_ELEMENTS and MAX_DEPTH.  Does not know what the elements mean: see smi_fields.


# Sixteen devices with all their supported clocks, the longest part, are 2 MB, 40,000 elements and 7 levels.
MAX_BYTES = 32 * 2**20
MAX_ELEMENTS = 500_000
MAX_DEPTH = 32
MAX_TEXT = 4096  # characters of one element: a process name is the longest
_UNREAD = frozenset({"supported_clocks", "accounted_processes"})  # nine tenths of all elements, and nobody asks


class Element:
    """One element: its tag, its text, what is inside."""

    __slots__ = ("attributes", "children", "tag", "text")

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""
        self.children: list[Element] = []

    def find(self, path: str) -> Element | None:
        """The first element at ``"temperature/gpu_temp"``, or None."""
        found: Element | None = self
        for tag in path.split("/"):
            found = next((child for child in found.children if child.tag == tag), None) if found else None
        return found

    def all(self, tag: str) -> Iterator[Element]:
        """The children with that tag."""
        return (child for child in self.children if child.tag == tag)

    def word(self, path: str) -> str | None:
        """The text at *path*; None where there is no such element, or it has elements inside."""
        found = self.find(path)
        return None if found is None or found.children else found.text.strip()

    def leaves(self) -> Iterator[Element]:
        """Every element below that has text only."""
        todo = [self]
        while todo:
            element = todo.pop()
            todo += element.children
            if not element.children:
                yield element


def parse(document: bytes) -> Element:
    """The root of *document*.

    Raises:
        BackendError: it is not XML, not nvidia-smi's, or built to hurt whoever reads it.
    """
    if len(document) > MAX_BYTES:
        _refuse(f"it is larger than {MAX_BYTES // 2**20} MiB")
    tree = _Tree()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    parser.StartElementHandler = tree.start
    parser.EndElementHandler = tree.end
    parser.CharacterDataHandler = tree.text
    parser.StartDoctypeDeclHandler = _doctype
    parser.EntityDeclHandler = lambda *_: _refuse("it declares entities")
    parser.ExternalEntityRefHandler = lambda *_: _refuse("it refers to another file")
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the last two: unknown encodings
        _refuse(f"it is not XML: {error}")
    if tree.root is None or tree.root.tag != "nvidia_smi_log":
        _refuse("it does not begin with <nvidia_smi_log>")
    return tree.root


class _Tree:
    """Builds the elements, and counts them."""

    def __init__(self) -> None:
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count, self._skipping = 0, 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) + self._skipping >= MAX_DEPTH:
            _refuse("it has more elements, or more of them inside each other, than nvidia-smi writes")
        if self._skipping or tag in _UNREAD:
            self._skipping += 1
            return
        element = Element(tag, attributes)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def end(self, _tag: str) -> None:
        if self._skipping:
            self._skipping -= 1
        else:
            self._open.pop()

    def text(self, text: str) -> None:
        if self._open and not self._skipping:
            element = self._open[-1]
            element.text = (element.text + text)[:MAX_TEXT]


def _doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: int) -> None:
    # nvidia-smi names a DTD in a file, which nobody reads; one inside the document could only define entities.
    if has_internal_subset:
        _refuse("it defines a document type of its own")


def _refuse(why: str) -> NoReturn:
    raise BackendError(f"this is nothing that `nvidia-smi -q -x` has written: {why}.")


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
class XmlFieldRow:
    """One field of a device: where it is (the first place that has a value), and what makes a value of it."""

    field: str
    places: tuple[str, ...]
    convert: Callable[[str], Any]


_POWER = "gpu_power_readings"
_LINK = "pci/pci_gpu_link_info"

ROWS: dict[str, tuple[XmlFieldRow, ...]] = {
    model.MODEL: (
        XmlFieldRow("name", ("product_name",), name_of),
        XmlFieldRow("pci_bus_id", ("pci/pci_bus_id",), _bus_id),
        XmlFieldRow("minor_number", ("minor_number",), whole("")),
    ),
    model.UTILIZATION: (
        XmlFieldRow("utilization", ("utilization/gpu_util",), percent),
        XmlFieldRow("memory_utilization", ("utilization/memory_util",), percent),
    ),
    model.THERMAL: (
        XmlFieldRow("temperature", ("temperature/gpu_temp",), celsius),
        XmlFieldRow("temperature_slowdown", ("temperature/gpu_temp_slow_threshold",), celsius),
        XmlFieldRow("temperature_shutdown", ("temperature/gpu_temp_max_threshold",), celsius),
        XmlFieldRow("fan_speed", ("fan_speed",), percent),
    ),
    model.POWER: (
        XmlFieldRow(
            "power_draw",
            ("power_readings/power_draw", f"{_POWER}/power_draw", f"{_POWER}/average_power_draw",
             f"{_POWER}/instant_power_draw"),
            watts,
        ),
        XmlFieldRow(
            "power_limit",
            ("power_readings/enforced_power_limit", f"{_POWER}/current_power_limit", "power_readings/power_limit"),
            watts,
        ),
    ),
    model.CLOCKS: (
        XmlFieldRow("clock_sm", ("clocks/sm_clock",), megahertz),
        XmlFieldRow("clock_sm_max", ("max_clocks/sm_clock",), megahertz),
        XmlFieldRow("clock_memory", ("clocks/mem_clock",), megahertz),
        XmlFieldRow("clock_memory_max", ("max_clocks/mem_clock",), megahertz),
        XmlFieldRow("pstate", ("performance_state",), _pstate),
        XmlFieldRow("persistence_mode", ("persistence_mode",), _SWITCH.get),
    ),
    model.ECC: (XmlFieldRow("ecc_mode", ("ecc_mode/current_ecc",), _SWITCH.get),),
    model.PCIE: (
        XmlFieldRow(
            "pcie_generation",
            (f"{_LINK}/pcie_gen/device_current_link_gen", f"{_LINK}/pcie_gen/current_link_gen"),
            whole("")),
        XmlFieldRow("pcie_width", (f"{_LINK}/link_widths/current_link_width",), _width),
        XmlFieldRow("pcie_tx", ("pci/tx_util",), bytes_per_second),
        XmlFieldRow("pcie_rx", ("pci/rx_util",), bytes_per_second),
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

    def take(self, row: XmlFieldRow) -> None:
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
    sheet.take(XmlFieldRow("compute_mode", ("compute_mode",), _COMPUTE_MODES.get))
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
