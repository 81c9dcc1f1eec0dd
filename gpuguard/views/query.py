"""A snapshot as the table that `nvidia-smi --query-gpu=... --format=csv` prints, or as JSON.

Each field here has nvidia-smi's spelling and form; `nvidia-smi --help-query-gpu` has the whole list.  Fields that
gpuguard does not read are missing, so that a script fails instead of working on blanks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpuguard import model
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.model import Device, GpuProcess, Snapshot
from gpuguard.units import local_time
from gpuguard.views.history import csv_cell

NOT_KNOWN = "[N/A]"
Value = str | int | float | None


@dataclass(frozen=True)
class QuerySubject:
    """The subject of one row of the answer."""

    snapshot: Snapshot
    device: Device
    process: GpuProcess | None = None


@dataclass(frozen=True)
class Field:
    """One field of a query."""

    text: str  # what it is, for --help-query
    value: Callable[[QuerySubject], Value]  # in *unit*; None: not known
    group: str | None = None  # of the model, which must be read for it; None: it always comes along
    unit: str = ""  # as in the header, "MiB"
    digits: int = 0  # after the point

    def written(self, value: Value, *, units: bool) -> str:
        """Return *value* as nvidia-smi writes it."""
        if value is None:
            return NOT_KNOWN
        text = f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)
        return f"{text} {self.unit}" if units and self.unit else text


def _attribute(
    of: str, name: str, convert: Callable[[Any], Value] = lambda value: value
) -> Callable[[QuerySubject], Value]:
    """Return a reader of a field of the subject's device or process, through *convert*; unknown stays unknown."""

    def value(subject: QuerySubject) -> Value:
        found = getattr(getattr(subject, of), name, None)
        return None if found is None else convert(found)

    return value


_device, _process = partial(_attribute, "device"), partial(_attribute, "process")


def _in_mebibytes(amount: int) -> Value:
    return amount >> 20


def _switch(name: str) -> Callable[[QuerySubject], Value]:
    return _device(name, {True: "Enabled", False: "Disabled"}.get)


def _mig_mode(of: QuerySubject) -> Value:
    """Return the MIG mode; a board without MIG has none, although it counts as off elsewhere."""
    without = any(gap.device == of.device.uuid and gap.field == "mig_mode" for gap in of.snapshot.gaps)
    return None if without else _switch("mig_mode")(of)


def _bus(part: slice) -> Callable[[QuerySubject], Value]:
    """Return a reader of a part of "00000000:83:00.0", as nvidia-smi writes it."""
    return _device("pci_bus_id", lambda bus_id: f"0x{bus_id[part]}")


def _reason(name: str) -> Callable[[QuerySubject], Value]:
    return _device("throttle_reasons", lambda reasons: "Active" if name in reasons else "Not Active")


def _timestamp(of: QuerySubject) -> Value:
    moment = of.snapshot.taken_at
    return local_time(moment, "%Y/%m/%d %H:%M:%S") + f".{int(moment % 1 * 1000):03d}"


_COMPUTE_MODES = {"default": "Default", "exclusive_process": "Exclusive_Process", "prohibited": "Prohibited"}
_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
    "hw_power_brake_slowdown", "sw_thermal_slowdown", "sync_boost",
)  # fmt: skip

# How nvidia-smi writes the values of a unit.
_WRITTEN: Mapping[str, tuple[Callable[[Any], Value], str, int]] = {  # converter, unit in the header, digits
    "B": (_in_mebibytes, "MiB", 0), "%": (float, "%", 0), "W": (float, "W", 2), "C": (float, "", 0),
    "MHz": (int, "MHz", 0),
}  # fmt: skip
_YES_OR_NO = ("integrated", "memory_shared_with_host", "asleep")  # nvidia-smi does not have them
_WRITTEN_OTHERWISE: Mapping[str, Callable[[QuerySubject], Value]] = {
    **{name: _device(name, {True: "Yes", False: "No"}.get) for name in _YES_OR_NO},
    "pstate": _device("pstate", "P{}".format),
    "compute_mode": _device("compute_mode", _COMPUTE_MODES.get),
    "mig_mode": _mig_mode,
}


def _field(facts: model.DeviceField, text: str) -> Field:
    """Return the field of a query about *facts*."""
    convert, unit, digits = _WRITTEN.get(facts.unit, (lambda value: value, "", 0))
    plain = _switch(facts.name) if facts.type.startswith("bool") else _device(facts.name, convert)
    return Field(text, _WRITTEN_OTHERWISE.get(facts.name, plain), facts.group, unit, digits)


GPU_FIELDS: Mapping[str, Field] = {
    "timestamp": Field("when it was asked, YYYY/MM/DD HH:MM:SS.msec", _timestamp),
    "hostname": Field("of the machine", lambda of: of.snapshot.host),
    "driver_version": Field("of the display driver", lambda of: of.snapshot.driver_version, model.MODEL),
    "count": Field("number of GPUs in the machine", lambda of: sum(not gpu.parent_uuid for gpu in of.snapshot.devices)),
    "index": Field("from 0; can change at each boot", _device("index")),
    "uuid": Field("never changes", _device("uuid")),
    "pci.domain": Field("in hex", _bus(slice(4, 8)), model.MODEL),
    "pci.bus": Field("in hex", _bus(slice(9, 11)), model.MODEL),
    "pci.device": Field("in hex", _bus(slice(12, 14)), model.MODEL),
    **{facts.query[0]: _field(facts, facts.query[1]) for facts in model.DEVICE_FIELDS.values() if facts.query},
    "enforced.power.limit": _field(model.DEVICE_FIELDS["power_limit"], "which the driver keeps to"),
    **{
        f"clocks_event_reasons.{name}": Field("why the clocks are not higher", _reason(name), model.CLOCKS)
        for name in _REASONS
    },
}


def _process_name(of: QuerySubject) -> Value:
    process = of.process
    return (process.command[0] if process.command else process.executable) if process else None


APP_FIELDS: Mapping[str, Field] = {
    "timestamp": GPU_FIELDS["timestamp"],
    "gpu_name": GPU_FIELDS["name"],
    "gpu_bus_id": GPU_FIELDS["pci.bus_id"],
    "gpu_uuid": Field("of the GPU; of the whole GPU where it is divided", _device("uuid")),
    "pid": Field("of the process", _process("pid")),
    "process_name": Field("of its program", _process_name, model.PROCESS_DETAILS),
    "used_gpu_memory": Field("that it uses on the GPU", _process("memory_used", _in_mebibytes), None, "MiB"),
    "user": Field("whose it is (nvidia-smi does not have it)", _process("user"), model.PROCESS_DETAILS),
}

# Other spellings that nvidia-smi takes; the header shows the name on the right.
GPU_ALIASES: Mapping[str, str] = {
    "gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics", "clocks.video": "clocks.current.video",
    "clocks.mem": "clocks.current.memory", "clocks.max.mem": "clocks.max.memory",
    **{f"clocks_throttle_reasons.{name}": f"clocks_event_reasons.{name}" for name in _REASONS},
}  # fmt: skip
APP_ALIASES: Mapping[str, str] = {"name": "process_name", "used_memory": "used_gpu_memory"}


@dataclass(frozen=True)
class Query:
    """A request for fields of processes or of devices, by the names that the header shows."""

    fields: Mapping[str, Field]
    apps: bool

    @property
    def groups(self) -> frozenset[str]:
        """The groups of the model that must be read, and no others."""
        wanted = {field.group for field in self.fields.values() if field.group}
        # Processes of a divided device are on its instances, which come with its health.
        return frozenset(wanted | {model.PROCESSES, model.HEALTH} if self.apps else wanted)

    @property
    def headers(self) -> list[str]:
        """The headers with units, as nvidia-smi writes them."""
        return [f"{name} [{field.unit}]" if field.unit else name for name, field in self.fields.items()]


def query_of(names: str, *, apps: bool) -> Query:
    """Return the query for ``"index,memory.used"``.

    Raises:
        InvalidRequest: there is no such field.
    """
    known, aliases = (APP_FIELDS, APP_ALIASES) if apps else (GPU_FIELDS, GPU_ALIASES)
    words = [word.strip() for word in names.split(",")]
    if not any(words):
        raise InvalidRequest("no field is named: write them like index,name,memory.used.")
    fields = {}
    for word in words:
        name = aliases.get(word, word)
        if name not in known:
            near = difflib.get_close_matches(word.lower(), [*known, *aliases], n=2, cutoff=0.55)
            hint = f"did you mean {' or '.join(near)}?" if near else "there is nothing like it here."
            lists = "`gpuguard query --help-query` lists all fields."
            raise InvalidRequest(f"gpuguard reads no field {word!r}: {hint}\n{lists}")
        fields[name] = known[name]
    return Query(fields, apps)


def _rows(snapshot: Snapshot, query: Query, uuids: frozenset[str]) -> Iterator[QuerySubject]:
    """Yield the subjects: whole devices, or the computing processes on them; *uuids* chooses devices, all if empty."""
    for device in snapshot.devices:
        if device.parent_uuid or (uuids and device.uuid not in uuids):
            continue
        if not query.apps:
            yield QuerySubject(snapshot, device)
            continue
        family = [part for part in snapshot.devices if device.uuid in (part.uuid, part.parent_uuid)]
        processes = {process.pid: process for part in family for process in part.processes or ()}
        for process in processes.values():
            if process.kind != "graphics":
                yield QuerySubject(snapshot, device, process)


def csv_lines(
    snapshot: Snapshot, query: Query, uuids: frozenset[str] = frozenset(), *, header: bool = True, units: bool = True
) -> Iterator[str]:
    """Yield lines with `, ` between cells, as nvidia-smi does; no name forges a column, and no spreadsheet runs one."""
    if header:
        yield ", ".join(query.headers)
    for subject in _rows(snapshot, query, uuids):
        first, *others = (csv_cell(field.written(field.value(subject), units=units)) for field in query.fields.values())
        # A quote counts only if the cell begins with it, so no blank comes before it.
        yield first + "".join(f",{cell}" if cell.startswith('"') else f", {cell}" for cell in others)


def to_json(snapshot: Snapshot, query: Query, uuids: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return one object: numbers are numbers, unknown values are null, and the names are those of the CSV header."""
    fields = list(zip(query.headers, query.fields.values(), strict=True))
    return {
        "schema": 1,
        "rows": [{name: field.value(subject) for name, field in fields} for subject in _rows(snapshot, query, uuids)],
    }


def help_lines() -> Iterator[str]:
    """Yield every field with its unit and what it is."""
    for title, known, aliases in (
        (_("Fields of GPUs (--query-gpu):"), GPU_FIELDS, GPU_ALIASES),
        (_("Fields of processes (--query-compute-apps):"), APP_FIELDS, APP_ALIASES),
    ):
        yield from ("", title) if known is APP_FIELDS else (title,)
        for name, field in known.items():
            others = [alias for alias, of in aliases.items() if of == name]
            unit = f"{field.unit}, " if field.unit else ""
            yield f"  {name:<42} {unit}{_(field.text)}"
            yield from (f"  {'':<42} {_('also {alias}').format(alias=alias)}" for alias in others)
