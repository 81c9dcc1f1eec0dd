"""NVIDIA devices through the program nvidia-smi, where its library cannot be loaded; or from its output in a file.

    smi             runs `nvidia-smi -q -x`
    smi:FILE.xml    reads its output from any machine and any time: a snapshot to look at, never to act on

One run of the program costs 0.1 s per device and more, so the backend nvml is the better one wherever it works.

Every driver writes other words for "not known" ("N/A", "[Not Supported]", "ERR!", "Requested functionality has been
deprecated", ...), so numbers do not go by a list of them: a text that is no number with the right unit is a gap, and is
its reason.  The identity of a process comes from /proc, which knows only this machine as it is now, so the processes of
a saved file stay pids with a name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from email.utils import parsedate
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from gpuguard import model, procfs
from gpuguard.backends import COUNTED_AS_USED, ECC_IS_OFF, GPU_LOST, IS_LOST, PAGES_PENDING
from gpuguard.backends.drm import ABSENT, CardReading, groups_read, merged_rows
from gpuguard.backends.plausibility import implausibility, is_uuid
from gpuguard.errors import BackendError, DriverNotFound, DriverPermission, DriverUnresponsive
from gpuguard.files import open_file
from gpuguard.locale.messages import cut, sentence
from gpuguard.model import PROCESS_DETAILS, Device, DeviceAndGaps, Gap, GpuProcess, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any, NoReturn

# Sixteen devices with all their supported clocks, the longest part, are 2 MB, 40,000 elements and 7 levels.
MAX_BYTES = 32 * 2**20
MAX_ELEMENTS = 500_000
MAX_DEPTH = 32
MAX_TEXT = 4096  # characters of one element: a process name is the longest
_UNREAD = frozenset({"supported_clocks", "accounted_processes"})  # nine tenths of all elements, and no field needs them


def parse(document: bytes) -> Element:
    """Return the root of *document*, the XML that `nvidia-smi -q -x` prints, as a small tree.

    A document may come from anywhere (a saved file), so nothing in it is looked up elsewhere, and it may have no
    entities, no DTD of its own, and no more than MAX_BYTES, MAX_ELEMENTS and MAX_DEPTH.
    Raises BackendError if it is not XML, not nvidia-smi's, or built to hurt its reader.
    """
    if len(document) > MAX_BYTES:
        _refuse(sentence("smi.too_large", "it is larger than {size} MiB", size=MAX_BYTES // 2**20))
    document = _without_warnings(document)
    tree = _BoundedTree()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    parser.StartElementHandler = tree.start
    parser.EndElementHandler = tree.end
    parser.CharacterDataHandler = tree.data
    parser.StartDoctypeDeclHandler = tree.doctype
    parser.EntityDeclHandler = lambda *_: _refuse(sentence("smi.entities", "it declares entities"))
    parser.ExternalEntityRefHandler = lambda *_: _refuse(sentence("smi.another_file", "it refers to another file"))
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the last two: unknown encodings
        _refuse(sentence("smi.no_xml", "it is not XML: {error}", error=str(error)))
    root = tree.builder.close()
    if root.tag != "nvidia_smi_log":
        _refuse(sentence("smi.no_log", "it does not begin with <nvidia_smi_log>"))
    return root


def _without_warnings(document: bytes) -> bytes:
    """Return the document without lines like "WARNING: infoROM is corrupted ..." that nvidia-smi prints around it."""
    lines = document.strip().split(b"\n")
    while lines and lines[0].startswith(b"WARNING:"):
        del lines[0]
    while lines and lines[-1].startswith(b"WARNING:"):
        del lines[-1]
    return b"\n".join(lines).strip()


class _BoundedTree:
    """A builder of the elements, which counts them."""

    def __init__(self) -> None:
        self.builder = TreeBuilder()
        self._count, self._depth, self._skipping = 0, 0, 0

    def doctype(self, _name: str, _system: str | None, _public: str | None, has_internal_subset: int) -> None:
        # nvidia-smi names a DTD in a file, which is not read; one inside the document could only define entities.
        if has_internal_subset:
            _refuse(sentence("smi.document_type", "it defines a document type of its own"))

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        self._depth += 1
        if self._count > MAX_ELEMENTS or self._depth > MAX_DEPTH:
            _refuse(
                sentence(
                    "smi.too_many_elements",
                    "it has more elements, or more of them inside each other, than nvidia-smi writes",
                )
            )
        if self._skipping or tag in _UNREAD:
            self._skipping += 1
        else:
            self.builder.start(tag, attributes)

    def end(self, tag: str) -> None:
        self._depth -= 1
        if self._skipping:
            self._skipping -= 1
        else:
            self.builder.end(tag)

    def data(self, text: str) -> None:
        if not self._skipping:
            self.builder.data(text)


def _refuse(why: str) -> NoReturn:
    raise BackendError(
        sentence("smi.not_its_own", "this is nothing that `nvidia-smi -q -x` has written: {why}.", why=why)
    )


def word_at(element: Element, path: str) -> str | None:
    """Return the text at *path*, or None if there is no such element or it has elements inside."""
    found = element.find(path)
    return None if found is None or len(found) else _text(found)


def _text(element: Element) -> str:
    return (element.text or "")[:MAX_TEXT].strip()


def _reason(word: str | None) -> str:
    """Return the reason why *word* is no value."""
    if word is None:
        return sentence("smi.missing", "it is missing in the document")
    return word or sentence("smi.empty", "empty")


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
_NOT_TOLD = sentence("smi.not_told", "nvidia-smi does not tell it")


def number(unit: str, scale: float = 1, kind: type[float] = float) -> Callable[[str], Any]:
    """Return a converter of ``"12.5 W"`` or, with *kind* int, ``"8116 MiB"``, which makes None of other words."""

    def convert(text: str) -> Any:
        match = _NUMBER.fullmatch(text)
        return kind(float(match[1]) * scale) if match and match[2] == unit else None

    return convert


whole, mebibytes, megahertz = number("", kind=int), number("MiB", 2**20, int), number("MHz", kind=int)
watts, celsius, percent = number("W"), number("C"), number("%")
bytes_per_second = number("KB/s", 1024)  # KiB, as in NVML


def name_of(text: str) -> str | None:
    """Return *text* as a name, or None if it is one of the words that stand for no name."""
    return None if is_blank(text) or len(text) > _LONGEST_NAME else text


def is_blank(text: str) -> bool:
    """Return whether *text* says in any driver's words that there is nothing to say."""
    low = text.strip("[]").lower()
    return low in ("", "n/a", "none", "unknown", "unknown error", "err!") or low.startswith(_EXCUSES)


_EXCUSES = ("not ", "requested functionality", "insufficient", "function not", "gpu is lost", "gpu requires", "no perm")


def _bus_id(text: str) -> str | None:
    # The check is strict, because a path in /sys is made of the id.  Old drivers write the domain with four digits.
    match = re.fullmatch(r"([0-9A-Fa-f]{4}){1,2}(:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", text, re.ASCII)
    return text.rjust(16, "0") if match else None


def _pstate(text: str) -> int | None:
    return int(text[1:]) if re.fullmatch(r"P\d{1,2}", text, re.ASCII) else None


_POWER = "gpu_power_readings"
_LINK = "pci/pci_gpu_link_info"

# The places of the fields that are one element each; the first place that has a value counts.  nvidia-smi does not tell
# the fields that are neither here nor in a reader below.
PLACES: dict[str, tuple[str, ...]] = {
    "name": ("product_name",),
    "pci_bus_id": ("pci/pci_bus_id",),
    "minor_number": ("minor_number",),
    "utilization": ("utilization/gpu_util",),
    "memory_utilization": ("utilization/memory_util",),
    "temperature": ("temperature/gpu_temp",),
    "temperature_slowdown": ("temperature/gpu_temp_slow_threshold",),
    "temperature_shutdown": ("temperature/gpu_temp_max_threshold",),
    "fan_speed": ("fan_speed",),
    "power_draw": (
        "power_readings/power_draw", f"{_POWER}/power_draw", f"{_POWER}/average_power_draw",
        f"{_POWER}/instant_power_draw",
    ),
    "power_limit": (
        "power_readings/enforced_power_limit", f"{_POWER}/current_power_limit", "power_readings/power_limit",
        f"{_POWER}/gpu_ceiling_power_limit/current_power_limit",  # the last: driver 610
    ),
    "clock_sm": ("clocks/sm_clock",),
    "clock_sm_max": ("max_clocks/sm_clock",),
    "clock_memory": ("clocks/mem_clock",),
    "clock_memory_max": ("max_clocks/mem_clock",),
    "pstate": ("performance_state",),
    "persistence_mode": ("persistence_mode",),
    "display_active": ("display_active",),
    "ecc_mode": ("ecc_mode/current_ecc",),
    "clock_graphics": ("clocks/graphics_clock",),
    "clock_video": ("clocks/video_clock",),
    "encoder_utilization": ("utilization/encoder_util",),
    "decoder_utilization": ("utilization/decoder_util",),
    "pcie_generation": (f"{_LINK}/pcie_gen/device_current_link_gen", f"{_LINK}/pcie_gen/current_link_gen"),
    "pcie_width": (f"{_LINK}/link_widths/current_link_width",),
    "pcie_tx": ("pci/tx_util",),
    "pcie_rx": ("pci/rx_util",),
    "compute_mode": ("compute_mode",),
}  # fmt: skip
_BY_UNIT = {"": whole, "%": percent, "C": celsius, "W": watts, "MHz": megahertz, "B/s": bytes_per_second}
_WRITTEN_OTHERWISE: dict[str, Callable[[str], Any]] = {
    "name": name_of, "pci_bus_id": _bus_id, "pstate": _pstate, "compute_mode": _COMPUTE_MODES.get,
    "pcie_width": lambda word: whole(word.removesuffix("x")),
}  # fmt: skip


def converter(field: model.DeviceField) -> Callable[[str], Any]:
    """Return the function that makes a value of the text of *field*, or None of a text that is no value."""
    by_type = _SWITCH.get if field.type.startswith("bool") else _BY_UNIT[field.unit]
    return _WRITTEN_OTHERWISE.get(field.name, by_type)


@dataclass(kw_only=True)
class SmiReading(CardReading):
    """A reading of the element of one device or MIG instance."""

    element: Element
    live: bool  # whether its processes are those that run on this machine now

    def word(self, path: str) -> str | None:
        """Return the text at *path* in the element."""
        return word_at(self.element, path)

    def gap(self, name: str, reason: str = ABSENT) -> None:
        """Say why a field is unknown, in words that may be those of the document."""
        super().gap(name, cut(reason, 200))

    def problem(self, text: str) -> None:
        """Say what is wrong with the device."""
        if text not in self.problems:
            self.problems.append(text)


def read_rows(reading: SmiReading, group: str) -> None:
    """Read the fields of *group* that are one element each."""
    for name in model.GROUPED_FIELDS.get(group, ()):
        if name not in PLACES:
            continue
        field = model.DEVICE_FIELDS[name]
        words = [word for place in PLACES[name] if (word := reading.word(place)) is not None]
        values = (value for word in words if (value := converter(field)(word)) is not None)
        value = next(filter(field.holds, values), None)
        if value is not None:
            reading.values[name] = value
        else:
            reading.gap(name, _reason(words[0] if words else None))


def read_memory(reading: SmiReading) -> None:
    """Read memory_*: all of them or none, but for memory_reserved, which old drivers do not report."""
    words = {name: reading.word(f"fb_memory_usage/{name}") for name in ("total", "used", "free", "reserved")}
    total, used, free, reserved = (None if word is None else mebibytes(word) for word in words.values())
    if total is None or used is None or free is None:
        amounts = {"total": total, "used": used, "free": free}
        reason = _reason(next(words[name] for name, amount in amounts.items() if amount is None))
    # Each is rounded to MiB by itself, so their sum may miss the total by 3 MiB.
    elif total <= 0 or min(used, free) < 0 or used + free > total + 3 * 2**20:
        values = f"{words['total']}, {words['used']} used, {words['free']} free"
        reason = sentence("driver.implausible_values", "implausible values {values}", values=values)
    else:
        reading.values.update(memory_total=total, memory_used=used, memory_free=free)
        reading.values["memory_shared_with_host"] = False
        if reserved is not None and 0 <= reserved <= total:
            reading.values["memory_reserved"] = reserved
        else:
            reading.gap("memory_reserved", COUNTED_AS_USED)
        return
    for name in words:
        reading.gap(f"memory_{name}", reason)


def read_throttle_reasons(reading: SmiReading) -> None:
    """Read throttle_reasons, the names of the active ones; unknown unless each says whether it is active."""
    listed = reading.element.find("clocks_event_reasons")
    if listed is None:
        listed = reading.element.find("clocks_throttle_reasons")
    if listed is None or not len(listed):
        reading.gap("throttle_reasons", _reason((_text(listed) or None) if listed is not None else None))
        return
    active = []
    for child in listed:
        name, word = re.sub(r"^clocks_(event|throttle)_reasons?_", "", child.tag), _text(child)
        if word == "Active":
            active.append(_THROTTLE.get(name, name))
        elif word != "Not Active" and not len(child):
            reading.gap("throttle_reasons", f"{name}: {word}")
            return
    reading.values["throttle_reasons"] = tuple(active)


def read_ecc(reading: SmiReading) -> None:
    """Read ecc_*, retired_pages and remapped_rows*."""
    for since in ("volatile", "aggregate"):
        for kind, ways in _ECC.items():
            field = f"ecc_{kind}_{since}"
            if reading.values.get("ecc_mode") is False:
                reading.gap(field, ECC_IS_OFF)
            else:
                _add_up(reading, field, [[f"ecc_errors/{since}/{name}" for name in way] for way in ways])
    pages = ("multiple_single_bit_retirement", "double_bit_retirement")
    _add_up(reading, "retired_pages", [[f"retired_pages/{kind}/retired_count" for kind in pages]])
    _add_up(reading, "remapped_rows", [[f"remapped_rows/remapped_row_{kind}" for kind in ("corr", "unc")]])
    _add_up(reading, "remapped_rows_uncorrected", [["remapped_rows/remapped_row_unc"]])


_ECC = {  # the elements to add up, by the way of writing them: Turing and later; 550 and later; before Turing
    "corrected": (("sram_correctable", "dram_correctable"), ("single_bit/total",)),
    "uncorrected": (
        ("sram_uncorrectable", "dram_uncorrectable"),
        ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
        ("double_bit/total",),
    ),
}


def _add_up(reading: SmiReading, field: str, ways: list[list[str]]) -> None:
    """Set *field* to the sum of the elements of the first way of writing it that is complete."""
    reason = ""
    for places in ways:
        words = [reading.word(place) for place in places]
        counts = [None if word is None else whole(word) for word in words]
        known = [count for count in counts if count is not None and count >= 0]
        if len(known) == len(places):
            reading.values[field] = sum(known)
            return
        reason = reason or next((word for word, count in zip(words, counts, strict=True) if word and count is None), "")
    reading.gap(field, reason or _reason(None))


def read_health(reading: SmiReading) -> None:
    """Read problems, mig_mode and asleep."""
    reading.values["asleep"] = False  # nvidia-smi wakes the devices that it lists
    mode = reading.word("mig_mode/current_mig")
    without = mode in (None, "N/A", "[N/A]", "[Not Supported]")  # a device or driver without MIG is not in MIG mode
    if without or mode in _SWITCH:
        reading.values["mig_mode"] = mode == "Enabled"
    if mode not in _SWITCH:
        reading.gap("mig_mode", _reason(mode))
    for place, problem in _PROBLEMS.items():
        if reading.word(place) in ("Yes", "True"):
            reading.problem(problem)
    action = reading.word("gpu_recovery_action") or ""
    if not is_blank(action):
        reading.problem(sentence("problem.recommended", "the driver recommends: {action}", action=action[:80]))
    for place in ("compute_mode", "fb_memory_usage/total", "product_name", "utilization/gpu_util"):
        if (text := reading.word(place) or "").strip("[]").lower() in ("err!", "unknown error"):
            reading.problem(f"{place.rpartition('/')[2]}: {text}")


_PROBLEMS = {
    "gpu_reset_status/reset_required": sentence("problem.reset_required", "reset required"),
    "remapped_rows/remapped_row_pending": sentence("problem.row_remap_pending", "row remap pending"),
    "remapped_rows/remapped_row_failure": sentence("problem.row_remap_failed", "row remap failed"),
    "retired_pages/pending_retirement": PAGES_PENDING,
    "retired_pages/pending_blacklist": PAGES_PENDING,
    "fabric/health/route_unhealthy": sentence("problem.unhealthy_route", "the NVLink fabric has an unhealthy route"),
}


LARGEST_PID = 2**32 - 1  # in a saved file, because Windows counts further than Linux
# Any other word is taken for both: such a process counts as use of the device, and is not signalled.
_KINDS = {"C": "compute", "G": "graphics", "C+G": "compute+graphics", "M": "mps", "M+C": "mps"}
_OTHER_KIND = "compute+graphics"


def read_processes(reading: SmiReading, listed: Element | None, instance: tuple[str, str] | None = None) -> None:
    """Read processes and processes_plausible from those *listed*; PROCESS_DETAILS adds whose they are.

    *instance* holds the ids of the GPU instance and the compute instance whose processes are meant, or is None for the
    processes of the device.
    """
    if {model.PROCESSES, model.IDLE_PROCESSES}.isdisjoint(reading.fields):
        return
    if listed is None or (not len(listed) and _text(listed)):
        reading.gap("processes", _reason(None if listed is None else _text(listed)))
        return
    rows = []
    for entry in listed.findall("process_info"):
        ids = word_at(entry, "gpu_instance_id") or "", word_at(entry, "compute_instance_id") or ""
        if instance is not None and ids != instance:
            continue
        process = _process(reading, entry)
        if process is None:
            written = f"{word_at(entry, 'pid') or ''!r:.40}"
            reading.gap("processes", sentence("smi.odd_pid", "a pid is written {written}", written=written))
            return
        rows.append(process)
    rows = merged_rows(rows, max)  # the driver library lists a process that computes and draws twice
    live, details = reading.live, PROCESS_DETAILS in reading.fields
    gone = {row.pid for row in rows if live and not procfs.alive(row.pid)}
    reason = implausibility(
        [(row.pid, row.memory_used) for row in rows],
        alive=lambda pid: pid not in gone,
        pid_max=procfs.pid_max() if live else LARGEST_PID,
        own_pids=procfs.in_first_pid_namespace() is True,
        memory_total=reading.values.get("memory_total"),
        memory_used=reading.values.get("memory_used"),
    )
    reading.values["processes_plausible"] = reason is None
    if reason is not None:
        reading.gap("processes", sentence("driver.implausible_list", "implausible list: {reason}", reason=reason))
    if live and (reason or not details):
        # An implausible list loses its commands as well: the driver does not mean the process that has such a pid here.
        rows = [replace(row, command=None) for row in rows]
    if live and not reason:
        read = procfs.described if details else procfs.identified
        rows = [replace(row, ended=True) if row.pid in gone else read(row) for row in rows]
    if details and rows:
        reading.gap("processes (utilization)", _NOT_TOLD)
        if not live:
            unknown = sentence("smi.identity", "a saved file does not tell who a process was")
            reading.gap("processes (identity)", unknown)
    reading.values["processes"] = tuple(rows)


def _process(reading: SmiReading, entry: Element) -> GpuProcess | None:
    pid, memory, kind, name = (word_at(entry, tag) for tag in ("pid", "used_memory", "type", "process_name"))
    if not re.fullmatch(r"\d{1,10}", pid or "", re.ASCII):
        return None
    used = None if memory is None else mebibytes(memory)
    if used is None:
        reading.gap(f"process {pid} memory_used", memory or _reason(None))
    if kind not in _KINDS:
        reading.gap(f"process {pid} kind", kind or _reason(None))
    command = (name,) if name and not name.startswith("[") else None
    return GpuProcess(int(pid or 0), used, _KINDS.get(kind or "", _OTHER_KIND), command=command)


PROGRAM_SECONDS = 20.0  # without persistence mode each device is woken up first, which takes 1 to 2 s
_ALIVE_SECONDS = 0.4  # how often we say that the program still runs: see client.DEVICE_SECONDS
_NO_PROGRAM = sentence(
    "smi.no_program",
    "there is no program nvidia-smi in the PATH: install the driver, or choose another --backend.",
)
_NO_CLAIMS = sentence("smi.no_claims", "a file of nvidia-smi does not tell who has claimed what")
_NOT_TOLD_BY_Q = sentence("smi.not_told_by_q", "nvidia-smi -q does not tell it")


def open(spec: str = "") -> Smi:
    """Open the devices of this machine, or those in the file *spec*.  Raises BackendError if there is no nvidia-smi."""
    backend = Smi(spec)
    if spec:
        backend.document()  # read now, so that the user who named the file learns what is wrong with it
    elif not shutil.which("nvidia-smi"):
        raise DriverNotFound(_NO_PROGRAM)
    return backend


class Smi:
    """A Backend.  Devices in `skip` are only left out, because the program reads all of them at once."""

    name = "smi"
    simulated = False

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self.ahead = False
        self._uuids: dict[str, str] = {}  # by bus id, because a lost device does not tell its uuid

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does.  The program reads everything at once, whatever is asked for."""
        taken_at, clock = time.time(), procfs.boot_clock()
        fields = groups_read(fields, devices)  # the document has everything
        root = self.document()
        if self.path:
            then = _time_of(word_at(root, "timestamp") or "") or os.path.getmtime(self.path)
            taken_at, clock = then, clock - (taken_at - then)
        found: list[Device] = []
        gaps: list[Gap] = []
        known: set[str] = set()
        for index, element in enumerate(root.findall("gpu")):
            family = _distinct(self._family(index, element, fields), known)
            if index not in self.skip and (devices is None or any(device.uuid in devices for device, _ in family)):
                found += [device for device, _ in family]
                gaps += [gap for _, missing in family for gap in missing]
        if self.path:
            gaps.append(Gap(None, "claims", _NO_CLAIMS))
        if model.TOPOLOGY in fields:
            gaps.append(Gap(None, "topology", _NOT_TOLD_BY_Q))
        driver, cuda = (
            name_of(word_at(root, name) or "") if model.MODEL in fields else None
            for name in ("driver_version", "cuda_version")
        )
        return Snapshot(
            host=os.path.basename(self.path) if self.path else os.uname().nodename,
            backend=self.name,
            taken_at=taken_at,
            clock=clock,
            devices=tuple(found),
            gaps=tuple(gaps),
            recorded=bool(self.path),
            driver_version=driver,
            cuda_version=cuda,
        )

    def close(self) -> None:
        """Do nothing, because nothing is held."""

    def document(self) -> Element:
        """Return what nvidia-smi says now, or said when the file was written.  Raises BackendError."""
        if self.path:
            try:
                with open_file(self.path) as file:
                    text = file.read(MAX_BYTES + 1)
            except OSError as error:
                raise BackendError(
                    sentence(
                        "file.not_read", "{path} cannot be read: {error}.", path=self.path, error=str(error.strerror)
                    )
                ) from None
            try:
                return parse(text)
            except BackendError as error:
                raise BackendError(sentence("because", "{what}: {why}", what=self.path, why=str(error))) from None
        return parse(_output(["-q", "-x"], self.progress))

    def _family(self, index: int, element: Element, fields: Collection[str]) -> list[DeviceAndGaps]:
        """Return a device and its MIG instances."""
        bus = element.get("id") or word_at(element, "pci/pci_bus_id") or ""
        told = word_at(element, "uuid") or ""
        uuid = told if told.startswith("GPU-") and is_uuid(told) else self._uuids.get(bus, f"unknown-{index}")
        self._uuids[bus] = uuid
        if _is_lost(element):
            name, bus_id = name_of(word_at(element, "product_name") or ""), _bus_id(bus)
            lost = Device(index, uuid, name=name, pci_bus_id=bus_id, problems=(IS_LOST,))
            return [(lost, [Gap(uuid, group, GPU_LOST) for group in sorted(fields)])]
        reading = SmiReading(uuid, fields, element=element, live=not self.path)
        for group in sorted(fields):
            read_rows(reading, group)
        for group, reader in _READERS.items():
            if group in fields:
                reader(reading)
        read_processes(reading, element.find("processes"))
        reading.close(_NOT_TOLD)
        if uuid.startswith("unknown-"):
            reading.problem(sentence("problem.no_uuid", "nvidia-smi does not tell its uuid"))  # by which it is claimed
        problems = tuple(reading.problems) if model.HEALTH in fields or reading.problems else None
        device = Device(index, uuid, problems=problems, **reading.values)
        instances = element.findall("mig_devices/mig_device") if reading.values.get("mig_mode") else []
        named = _named_instances(uuid, self.progress) if instances and reading.live else {}
        return [(device, reading.gaps), *(_instance(instance, device, reading, named) for instance in instances)]


def _instance(element: Element, parent: Device, board: SmiReading, named: dict[str, tuple[str, str]]) -> DeviceAndGaps:
    gi, ci = word_at(element, "gpu_instance_id") or "", word_at(element, "compute_instance_id") or ""
    # An instance that does not tell its uuid gets the name that CUDA has always understood for it.
    profile, uuid = named.get(word_at(element, "index") or "", (None, f"MIG-{parent.uuid}/{gi}/{ci}"))
    if (told := word_at(element, "uuid") or "").startswith("MIG-") and is_uuid(told):
        uuid = told
    reading = SmiReading(uuid, board.fields, element=element, live=board.live)
    if model.MEMORY in reading.fields:
        read_memory(reading)
    read_processes(reading, board.element.find("processes"), (gi, ci))
    if model.UTILIZATION in reading.fields:
        reading.gap("utilization", sentence("driver.not_for_mig", "not told for MIG instances"))
    if profile is None:
        reading.gap("mig_profile", _NOT_TOLD_BY_Q)
    for gap in board.gaps:
        if gap.field in model.OF_THE_BOARD:
            reading.gap(gap.field, gap.reason)
    if model.MODEL in reading.fields and "name" in board.values:
        reading.values["name"] = board.values["name"] + (f" MIG {profile}" if profile else "")
    values = {key: board.values[key] for key in model.OF_THE_BOARD if key in board.values} | reading.values
    return Device(
        parent.index,
        uuid,
        parent_uuid=parent.uuid,
        problems=parent.problems or (),
        mig_profile=profile,
        gpu_instance_id=int(gi) if gi.isdecimal() and len(gi) < 6 else None,
        compute_instance_id=int(ci) if ci.isdecimal() and len(ci) < 6 else None,
        **values,
    ), reading.gaps


def _is_lost(element: Element) -> bool:
    """Return whether nvidia-smi says so in place of any value.  Process names do not count: users choose them."""
    leaves = (leaf for child in element if child.tag != "processes" for leaf in child.iter() if not len(leaf))
    return any(_text(leaf).strip("[] ").lower().startswith(("gpu is lost", "gpu access blocked")) for leaf in leaves)


def read_affinity(reading: SmiReading) -> None:
    """Read numa_node and cpu_affinity, which only the kernel of this machine tells."""
    bus = str(reading.values.get("pci_bus_id", "")).lower()
    for field, name in (("numa_node", "numa_node"), ("cpu_affinity", "local_cpulist")):
        text = procfs.read_text(f"/sys/bus/pci/devices/{bus[-12:]}/{name}") if reading.live and bus else None
        if not text or text.strip() == "-1":
            unknown = sentence("smi.unknown_to_kernel", "the kernel does not know it")
            reading.gap(field, unknown if text else _NOT_TOLD)
        else:
            reading.values[field] = text.strip() if field == "cpu_affinity" else int(text)


_READERS: dict[str, Callable[[SmiReading], None]] = {
    model.MEMORY: read_memory,
    model.HEALTH: read_health,
    model.CLOCKS: read_throttle_reasons,
    model.ECC: read_ecc,
    model.MODEL: read_affinity,
}


def _distinct(family: list[DeviceAndGaps], known: set[str]) -> list[DeviceAndGaps]:
    """Return *family* without those that have the uuid of an earlier device, because a claim goes by the uuid."""
    index = family[0][0].index
    if family[0][0].uuid in known:
        problem = sentence("problem.same_uuid", "another GPU has the same uuid")
        return [(Device(index, f"unknown-{index}", problems=(problem,)), [])]
    distinct = []
    for device, gaps in family:
        if device.uuid not in known:
            distinct.append((device, gaps))
        known.add(device.uuid)
    return distinct


def _named_instances(parent: str, progress: Callable[[int | None], object]) -> dict[str, tuple[str, str]]:
    """Return number -> (profile, uuid) of a device's MIG instances, as `nvidia-smi -L` has them; {} if it fails."""
    try:
        lines = _output(["-L"], progress).decode("utf-8", "replace").splitlines()
    except BackendError:
        return {}
    found: dict[str, tuple[str, str]] = {}
    within = ""
    for line in lines:
        if match := re.match(r"GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)", line):
            within = match[1]
        elif within == parent and (match := re.match(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)", line)):
            found[match[2]] = match[1], match[3]
    return found


def _output(options: list[str], progress: Callable[[int | None], object]) -> bytes:
    """Return what `nvidia-smi OPTIONS` prints, and call *progress* while it runs.  Raises BackendError."""
    ended: list[subprocess.CompletedProcess[bytes] | Exception] = []

    def work() -> None:
        pipes: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "capture_output": True,
            "env": {**os.environ, "LC_ALL": "C"},
        }
        try:
            ended.append(subprocess.run(["nvidia-smi", *options], timeout=PROGRAM_SECONDS, check=False, **pipes))
        except (OSError, subprocess.SubprocessError) as error:
            ended.append(error)

    # A thread runs the program, because in an uninterruptible driver call it does not end even when it is killed.
    thread = threading.Thread(target=work, name="nvidia-smi", daemon=True)
    thread.start()
    deadline = time.monotonic() + PROGRAM_SECONDS + 1
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_ALIVE_SECONDS)
        progress(None)
    result = ended[0] if ended else subprocess.TimeoutExpired("nvidia-smi", PROGRAM_SECONDS)
    if isinstance(result, FileNotFoundError):
        raise DriverNotFound(_NO_PROGRAM)
    if isinstance(result, subprocess.TimeoutExpired):
        raise DriverUnresponsive(
            sentence(
                "smi.hangs",
                "nvidia-smi did not end within {seconds} s: the driver hangs.  See `dmesg`, or reboot.",
                seconds=f"{PROGRAM_SECONDS:.0f}",
            )
        )
    if isinstance(result, Exception):
        raise BackendError(
            sentence(
                "smi.not_started",
                "nvidia-smi cannot be started: {error}.  Choose another --backend.",
                error=str(result),
            )
        )
    # The program calls a lost device an error (15), but its neighbours are fine, so the output counts.
    if result.returncode and not result.stdout.lstrip().startswith(b"<?xml"):
        said = (result.stdout.strip() or result.stderr.strip()).decode("utf-8", "replace")
        text = " ".join(said.split())[:300]
        if "permission" in text.lower():
            raise DriverPermission(sentence("smi.no_permission", "nvidia-smi may not read the GPUs: {text}", text=text))
        kind = DriverNotFound if "communicate with the NVIDIA driver" in text else BackendError
        text = text or sentence("smi.said_nothing", "it said nothing")
        raise kind(sentence("smi.ended", "nvidia-smi ended with {status}: {text}", status=result.returncode, text=text))
    return result.stdout


def _time_of(text: str) -> float | None:
    """Return the unix time of ``"Fri Aug  4 11:44:30 2023"``, in the zone of this machine, whatever its language is."""
    try:
        parsed = parsedate(text)
        return time.mktime((*parsed[:8], -1)) if parsed else None
    except (OverflowError, ValueError, TypeError, IndexError):
        return None
