"""NVIDIA devices through the program nvidia-smi, where its library cannot be loaded; or from what it wrote to a file.

    smi             runs `nvidia-smi -q -x`
    smi:FILE.xml    reads what that has written, wherever and whenever: a snapshot to look at, never to act on

One run of the program costs 0.1 s per device and more, so the backend nvml is the better one wherever it works.

Every driver writes other words for "not known" ("N/A", "[Not Supported]", "ERR!", "Requested functionality has been
deprecated", ...), so none of them is listed: what is no number with the right unit is a gap, and its text the reason.
Who a process is stands in /proc, and only of this machine, now: the processes of a saved file stay pids with a name.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from xml.parsers import expat

from gpuguard import model, procfs
from gpuguard.backends.plausibility import OF_THE_BOARD, PLAUSIBLE, implausibility, is_uuid
from gpuguard.errors import BackendError, DriverNotFound, DriverPermission, DriverUnresponsive
from gpuguard.model import PROCESS_DETAILS, Device, Gap, GpuProcess, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from typing import Any, NoReturn

# Sixteen devices with all their supported clocks, the longest part, are 2 MB, 40,000 elements and 7 levels.
MAX_BYTES = 32 * 2**20
MAX_ELEMENTS = 500_000
MAX_DEPTH = 32
MAX_TEXT = 4096  # characters of one element: a process name is the longest
_UNREAD = frozenset({"supported_clocks", "accounted_processes"})  # nine tenths of all elements, and no field needs them


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
    """The root of *document*, the XML that `nvidia-smi -q -x` prints, as a small tree.

    A document may come from anywhere (a saved file), so nothing in it is looked up elsewhere: no entities, no DTD of
    its own, no more than MAX_BYTES, MAX_ELEMENTS and MAX_DEPTH.

    Raises:
        BackendError: it is not XML, not nvidia-smi's, or built to hurt its reader.
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
    parser.StartDoctypeDeclHandler = tree.doctype
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

    def doctype(self, _name: str, _system: str | None, _public: str | None, has_internal_subset: int) -> None:
        # nvidia-smi names a DTD in a file, which is not read; one inside the document could only define entities.
        if has_internal_subset:
            _refuse("it defines a document type of its own")

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


def number(unit: str, scale: float = 1, kind: type[float] = float) -> Callable[[str], Any]:
    """A converter of ``"12.5 W"`` or, with *kind* int, ``"8116 MiB"``; of other words it makes None."""

    def convert(text: str) -> Any:
        match = _NUMBER.fullmatch(text)
        return kind(float(match[1]) * scale) if match and match[2] == unit else None

    return convert


whole, mebibytes, megahertz = number("", kind=int), number("MiB", 2**20, int), number("MHz", kind=int)
watts, celsius, percent = number("W"), number("C"), number("%")
bytes_per_second = number("KB/s", 1024)  # KiB, as in NVML


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
        XmlFieldRow("minor_number", ("minor_number",), whole),
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
            whole),
        XmlFieldRow(
            "pcie_width",
            (f"{_LINK}/link_widths/current_link_width",),
            lambda word: whole(word.removesuffix("x"))),
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


class SmiReading:
    """One device or MIG instance while its element is read: values and gaps."""

    def __init__(self, element: Element, uuid: str) -> None:
        self.element, self.uuid = element, uuid
        self.values: dict[str, Any] = {}
        self.gaps: list[Gap] = []
        self.problems: list[str] = []

    def gap(self, field: str, reason: str) -> None:
        """Say why a field is unknown."""
        self.gaps.append(Gap(self.uuid, field, reason[:200]))

    def set_field(self, row: XmlFieldRow) -> None:
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


def read_rows(reading: SmiReading, group: str) -> None:
    """The fields of *group* that are one element each, and those that there are none for."""
    for row in ROWS.get(group, ()):
        reading.set_field(row)
    for field in ABSENT.get(group, ()):
        reading.gap(field, _NOT_TOLD)


def read_memory(reading: SmiReading) -> None:
    """memory_*: all of them, or none."""
    memory = {name: reading.element.word(f"fb_memory_usage/{name}") for name in ("total", "used", "free", "reserved")}
    found = {name: None if word is None else mebibytes(word) for name, word in memory.items()}
    total, used, free = found["total"], found["used"], found["free"]
    # Each is rounded to MiB for itself, so their sum may miss the total by three of them.
    if total is None or used is None or free is None:
        reason = next((f"{memory[name]}" for name in ("total", "used", "free") if found[name] is None), "")
        reason = "it is missing in the document" if reason == "None" else reason
    elif total <= 0 or min(used, free) < 0 or used + free > total + 3 * 2**20:
        reason = f"implausible values {memory['total']}, {memory['used']} used, {memory['free']} free"
    else:
        reading.values.update(memory_total=total, memory_used=used, memory_free=free)
        if found["reserved"] is not None and 0 <= found["reserved"] <= total:
            reading.values["memory_reserved"] = found["reserved"]
        else:
            reading.gap("memory_reserved", "this driver counts it as used memory")
        return
    for name in memory:
        reading.gap(f"memory_{name}", reason or "empty")


def read_throttle_reasons(reading: SmiReading) -> None:
    """throttle_reasons: the names of those that are active; unknown unless each says whether it is."""
    listed = reading.element.find("clocks_event_reasons") or reading.element.find("clocks_throttle_reasons")
    if listed is None or not listed.children:
        reading.gap("throttle_reasons", (listed.text.strip() if listed else "") or "it is missing in the document")
        return
    active = []
    for child in listed.children:
        name = re.sub(r"^clocks_(event|throttle)_reasons?_", "", child.tag)
        if child.text.strip() == "Active":
            active.append(_THROTTLE.get(name, name))
        elif child.text.strip() != "Not Active" and not child.children:
            reading.gap("throttle_reasons", f"{name}: {child.text.strip()}")
            return
    reading.values["throttle_reasons"] = tuple(active)


def read_ecc(reading: SmiReading) -> None:
    """ecc_*, retired_pages, remapped_rows."""
    for since in ("volatile", "aggregate"):
        for kind, ways in _ECC.items():
            field = f"ecc_{kind}_{since}"
            if reading.values.get("ecc_mode") is False:
                reading.gap(field, "ECC is off")
            else:
                _add_up(reading, field, [[f"ecc_errors/{since}/{name}" for name in way] for way in ways])
    pages = ("multiple_single_bit_retirement", "double_bit_retirement")
    _add_up(reading, "retired_pages", [[f"retired_pages/{kind}/retired_count" for kind in pages]])
    _add_up(reading, "remapped_rows", [[f"remapped_rows/remapped_row_{kind}" for kind in ("corr", "unc")]])


_ECC = {  # what is added up, by the way in which a driver writes it: Turing and later; 550 and later; before Turing
    "corrected": (("sram_correctable", "dram_correctable"), ("single_bit/total",)),
    "uncorrected": (
        ("sram_uncorrectable", "dram_uncorrectable"),
        ("sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
        ("double_bit/total",),
    ),
}


def _add_up(reading: SmiReading, field: str, ways: list[list[str]]) -> None:
    """The sum of the elements of the first way of writing it that is complete."""
    reason = ""
    for places in ways:
        words = [reading.element.word(place) for place in places]
        counts = [None if word is None else whole(word) for word in words]
        known = [count for count in counts if count is not None and count >= 0]
        if len(known) == len(places):
            reading.values[field] = sum(known)
            return
        reason = reason or next((word for word, count in zip(words, counts, strict=True) if word and count is None), "")
    reading.gap(field, reason or "it is missing in the document")


def read_health(reading: SmiReading) -> None:
    """problems, compute_mode, mig_mode."""
    element = reading.element
    reading.set_field(XmlFieldRow("compute_mode", ("compute_mode",), _COMPUTE_MODES.get))
    mode = element.word("mig_mode/current_mig")
    if mode in (None, "N/A", "[N/A]", "[Not Supported]", "Disabled", "Enabled"):
        reading.values["mig_mode"] = mode == "Enabled"  # a device or driver without MIG is not in MIG mode
    else:
        reading.gap("mig_mode", mode or "empty")
    for place, problem in _PROBLEMS.items():
        if element.word(place) == "Yes":
            reading.problem(problem)
    action = element.word("gpu_recovery_action") or ""
    if not is_blank(action):
        reading.problem(f"the driver recommends: {action[:80]}")
    for place in ("compute_mode", "fb_memory_usage/total", "product_name", "utilization/gpu_util"):
        if (text := element.word(place) or "").strip("[]").lower() in ("err!", "unknown error"):
            reading.problem(f"{place.rpartition('/')[2]}: {text}")


_PROBLEMS = {
    "gpu_reset_status/reset_required": "reset required",
    "remapped_rows/remapped_row_pending": "row remap pending",
    "remapped_rows/remapped_row_failure": "row remap failed",
    "retired_pages/pending_retirement": "page retirement pending",
    "retired_pages/pending_blacklist": "page retirement pending",
}


Instance = tuple[str, str]  # ids of the GPU instance and the compute instance, as they are written

LARGEST_PID = 2**32 - 1  # in a file: Windows counts further than Linux
# Any other word is taken for both: it counts as use of the device, and is not signalled.
_KINDS = {"C": "compute", "G": "graphics", "C+G": "compute+graphics", "M": "mps", "M+C": "mps"}
_OTHER_KIND = "compute+graphics"


def read_processes(reading: SmiReading, listed: Element | None, instance: Instance | None, fields: Collection[str],
                   *, live: bool) -> None:  # fmt: skip
    """processes and processes_plausible.

    Args:
        reading: of a device or an instance.
        listed: <processes> of the device.
        instance: whose processes are meant; None: those of the device itself.
        fields: what is read; PROCESS_DETAILS adds whose they are.
        live: whether they are processes of this machine, now.
    """
    if listed is None or (not listed.children and listed.text.strip()):
        reading.gap("processes", "it is missing in the document" if listed is None else listed.text.strip())
        return
    rows = []
    for entry in listed.all("process_info"):
        ids = entry.word("gpu_instance_id") or "", entry.word("compute_instance_id") or ""
        if instance is not None and ids != instance:
            continue
        process = _process(reading, entry)
        if process is None:
            reading.gap("processes", f"a pid is written {entry.word('pid')!r:.40}")
            return
        rows.append(process)
    reason = implausibility(
        [(row.pid, row.memory_used) for row in rows],
        alive=procfs.alive if live else lambda _pid: True,
        pid_max=procfs.pid_max() if live else LARGEST_PID,
        memory_total=reading.values.get("memory_total"),
        memory_used=reading.values.get("memory_used"),
    )
    reading.values["processes_plausible"] = reason is None
    if reason is not None:
        reading.gap("processes", f"implausible list: {reason}")
    details = PROCESS_DETAILS in fields
    if live and (reason or not details):
        # Of a list that cannot be believed, too: the process with such a pid here is not the one that the driver means.
        rows = [replace(row, command=None) for row in rows]
    if live and not reason:
        rows = [(procfs.described if details else procfs.identified)(row) for row in rows]
    if details and rows:
        reading.gap("processes (utilization)", "nvidia-smi does not tell it")
        if not live:
            reading.gap("processes (identity)", "a saved file does not tell who a process was")
    reading.values["processes"] = tuple(rows)


def _process(reading: SmiReading, entry: Element) -> GpuProcess | None:
    pid = entry.word("pid") or ""
    if not re.fullmatch(r"\d{1,10}", pid, re.ASCII):
        return None
    memory, kind, name = entry.word("used_memory"), entry.word("type"), entry.word("process_name")
    used = None if memory is None else mebibytes(memory)
    if used is None:
        reading.gap(f"process {pid} memory_used", memory or "it is missing in the document")
    if kind not in _KINDS:
        reading.gap(f"process {pid} kind", kind or "it is missing in the document")
    named = bool(name) and not (name or "").startswith("[")
    return GpuProcess(
        int(pid), used, _KINDS.get(kind or "", _OTHER_KIND), command=(name,) if named and name is not None else None
    )


_Read = tuple[Device, list[Gap]]

PROGRAM_SECONDS = 20.0  # without persistence mode each device is woken up first: 1 to 2 s each
_ALIVE_SECONDS = 0.4  # how often we say that the program still runs: see client.DEVICE_SECONDS
_NO_PROGRAM = "there is no program nvidia-smi in the PATH: install the driver, or choose another --backend."
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_READERS: dict[str, Callable[[SmiReading], None]] = {
    model.MEMORY: read_memory,
    model.HEALTH: read_health,
    model.CLOCKS: read_throttle_reasons,
    model.ECC: read_ecc,
}


def open(spec: str = "") -> Smi:
    """The devices of this machine, or those in the file *spec*.  Raises BackendError when there is no such program."""
    backend = Smi(spec)
    if spec:
        backend.document()  # now, so that the user who named it reads what is wrong with it
    elif not shutil.which("nvidia-smi"):
        raise DriverNotFound(_NO_PROGRAM)
    return backend


class Smi:
    """A Backend.  `progress` is told None while the program runs; devices in `skip` are left out."""

    name = "smi"
    simulated = False

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self._uuids: dict[str, str] = {}  # by bus id: a lost device does not tell its own

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """See Backend.sample.  The program reads everything at once, whatever is asked for."""
        taken_at, clock = time.time(), procfs.boot_clock()
        if any(uuid.startswith("MIG-") for uuid in devices or ()):
            fields = {*fields, model.HEALTH}
        fields = set(fields) - {model.BRIEF}  # the document has everything
        root = self.document()
        if self.path:
            then = _time_of(root.word("timestamp") or "") or os.path.getmtime(self.path)
            taken_at, clock = then, clock - (taken_at - then)
        found: list[Device] = []
        gaps: list[Gap] = []
        known: set[str] = set()
        for index, element in enumerate(root.all("gpu")):
            family = _distinct(self._family(index, element, fields), known)
            if index not in self.skip and (devices is None or any(device.uuid in devices for device, _ in family)):
                found += [device for device, _ in family]
                gaps += [gap for _, missing in family for gap in missing]
        if self.path:
            gaps.append(Gap(None, "claims", "a file of nvidia-smi does not tell who has claimed what"))
        if model.TOPOLOGY in fields:
            gaps.append(Gap(None, "topology", "nvidia-smi -q does not tell it"))
        driver, cuda = (
            name_of(root.word(name) or "") if model.MODEL in fields else None
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
        """Nothing is held."""

    def document(self) -> Element:
        """What nvidia-smi says now, or said then.  Raises BackendError."""
        if self.path:
            try:
                with builtins.open(self.path, "rb") as file:
                    text = file.read(MAX_BYTES + 1)
            except OSError as error:
                raise BackendError(f"{self.path} cannot be read: {error.strerror}.") from None
            try:
                return parse(text)
            except BackendError as error:
                raise BackendError(f"{self.path}: {error}") from None
        return parse(_output(["-q", "-x"], self.progress))

    def _family(self, index: int, element: Element, fields: Collection[str]) -> list[tuple[Device, list[Gap]]]:
        """A device and its MIG instances."""
        bus = element.attributes.get("id") or element.word("pci/pci_bus_id") or ""
        told = element.word("uuid") or ""
        uuid = told if told.startswith("GPU-") and is_uuid(told) else self._uuids.get(bus, f"unknown-{index}")
        self._uuids[bus] = uuid
        if _is_lost(element):
            lost = Device(index, uuid, problems=("lost",))
            return [(lost, [Gap(uuid, group, "the device is lost") for group in sorted(fields)])]
        reading = SmiReading(element, uuid)
        live = not self.path
        for group in sorted(fields):
            read_rows(reading, group)
        for group, reader in _READERS.items():
            if group in fields:
                reader(reading)
        parts = element.find("mig_devices")
        divided = parts is not None and model.HEALTH in fields and reading.values.get("mig_mode")
        instances = list(parts.all("mig_device")) if parts is not None and divided else []
        if model.MODEL in fields:
            _read_place(reading, live)
        if not {model.PROCESSES, model.IDLE_PROCESSES}.isdisjoint(fields):
            read_processes(reading, element.find("processes"), None, fields, live=live)
        if uuid.startswith("unknown-"):
            reading.problem("nvidia-smi does not tell its uuid")  # by which it is claimed
        problems = tuple(reading.problems) if model.HEALTH in fields or reading.problems else None
        whole = Device(index, uuid, problems=problems, **reading.values)
        named = _named_instances(uuid, self.progress) if instances and live else {}
        return [(whole, reading.gaps), *(_instance(part, whole, reading, fields, live, named) for part in instances)]


def _instance(
    element: Element,
    parent: Device,
    board: SmiReading,
    fields: Collection[str],
    live: bool,
    named: dict[str, tuple[str, str]],
) -> tuple[Device, list[Gap]]:
    gi, ci = element.word("gpu_instance_id") or "", element.word("compute_instance_id") or ""
    # The name that CUDA has always understood for an instance, where its own uuid is not told.
    profile, uuid = named.get(element.word("index") or "", (None, f"MIG-{parent.uuid}/{gi}/{ci}"))
    uuid = element.word("uuid") or uuid
    reading = SmiReading(element, uuid)
    if model.MEMORY in fields:
        read_memory(reading)
    if not {model.PROCESSES, model.IDLE_PROCESSES}.isdisjoint(fields):
        read_processes(reading, board.element.find("processes"), (gi, ci), fields, live=live)
    if model.UTILIZATION in fields:
        reading.gap("utilization", "not told for MIG instances")
    if profile is None:
        reading.gap("mig_profile", "nvidia-smi -q does not tell it")
    for gap in board.gaps:
        if gap.field in OF_THE_BOARD:
            reading.gap(gap.field, gap.reason)
    if model.MODEL in fields and "name" in board.values:
        reading.values["name"] = board.values["name"] + (f" MIG {profile}" if profile else "")
    values = {key: board.values[key] for key in OF_THE_BOARD if key in board.values} | reading.values
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
    """Whether nvidia-smi says so in the place of any value; the names of processes are words of their users."""
    leaves = (leaf for child in element.children if child.tag != "processes" for leaf in child.leaves())
    return any(leaf.text.strip("[] \n").lower().startswith(("gpu is lost", "gpu access blocked")) for leaf in leaves)


def _read_place(reading: SmiReading, live: bool) -> None:
    """numa_node and cpu_affinity, which only the kernel of this machine tells."""
    bus = str(reading.values.get("pci_bus_id", "")).lower()
    for field, name in (("numa_node", "numa_node"), ("cpu_affinity", "local_cpulist")):
        text = _line(f"/sys/bus/pci/devices/{bus[-12:]}/{name}") if live and bus else ""
        if not text or text == "-1":
            reading.gap(field, "nvidia-smi does not tell it" if not text else "the kernel does not know it")
        else:
            reading.values[field] = text if field == "cpu_affinity" else int(text)


def _line(path: str) -> str:
    try:
        with builtins.open(path, encoding="ascii", errors="replace") as file:
            return file.readline(1000).strip()
    except OSError:
        return ""


def _distinct(family: list[_Read], known: set[str]) -> list[_Read]:
    """*family* without those that have the uuid of an earlier one: by its uuid a device is claimed."""
    index = family[0][0].index
    if family[0][0].uuid in known:
        return [(Device(index, f"unknown-{index}", problems=("another device has the same uuid",)), [])]
    distinct = []
    for device, gaps in family:
        if device.uuid not in known:
            distinct.append((device, gaps))
        known.add(device.uuid)
    return distinct


def _named_instances(parent: str, progress: Callable[[int | None], object]) -> dict[str, tuple[str, str]]:
    """Number of each MIG instance of a device -> (profile, uuid), as `nvidia-smi -L` has them; {} when it fails."""
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
    """What `nvidia-smi OPTIONS` prints; *progress* is called while it runs.

    Raises:
        BackendError: there is no such program, it fails, or it does not end in time.
    """
    ended: list[subprocess.CompletedProcess[bytes] | Exception] = []

    def work() -> None:
        try:
            ended.append(
                subprocess.run(
                    ["nvidia-smi", *options],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=PROGRAM_SECONDS,
                    check=False,
                    env={**os.environ, "LC_ALL": "C"},
                )
            )
        except (OSError, subprocess.SubprocessError) as error:
            ended.append(error)

    # A thread of its own, as a program in an uninterruptible driver call does not end even when it is killed.
    thread = threading.Thread(target=work, name="nvidia-smi", daemon=True)
    thread.start()
    deadline = time.monotonic() + PROGRAM_SECONDS + 1
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_ALIVE_SECONDS)
        progress(None)
    result = ended[0] if ended else subprocess.TimeoutExpired("nvidia-smi", PROGRAM_SECONDS)
    if isinstance(result, Exception):
        raise _translated(result)
    # A lost device is an error to the program (15) and to its neighbours none: what it wrote counts.
    if result.returncode and not result.stdout.lstrip().startswith(b"<?xml"):
        raise _failure(result)
    return result.stdout


def _translated(error: Exception) -> BackendError:
    if isinstance(error, FileNotFoundError):
        return DriverNotFound(_NO_PROGRAM)
    if isinstance(error, subprocess.TimeoutExpired):
        return DriverUnresponsive(
            f"nvidia-smi did not end within {PROGRAM_SECONDS:.0f} s: the driver hangs.  See `dmesg`, or reboot."
        )
    return BackendError(f"nvidia-smi cannot be started: {error}.  Choose another --backend.")


def _failure(result: subprocess.CompletedProcess[bytes]) -> BackendError:
    said = (result.stdout.strip() or result.stderr.strip()).decode("utf-8", "replace")
    text = " ".join(said.split())[:300]
    if "permission" in text.lower():
        return DriverPermission(f"nvidia-smi may not read the devices: {text}")
    kind = DriverNotFound if "communicate with the NVIDIA driver" in text else BackendError
    return kind(f"nvidia-smi ended with {result.returncode}: {text or 'it said nothing'}")


def _time_of(text: str) -> float | None:
    """``"Fri Aug  4 11:44:30 2023"``, in the time zone of this machine, as unix time; whatever language is set here."""
    match = re.fullmatch(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})", text, re.ASCII)
    if not match or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = map(int, match.groups()[1:])
    try:
        return time.mktime((year, _MONTHS.index(match[1]) + 1, day, hour, minute, second, 0, 0, -1))
    except (OverflowError, ValueError):
        return None
