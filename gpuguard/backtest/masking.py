"""A sample in which no user and no thing can be recognised: host, people, programs, uuids, bus ids, containers, notes.

The same name gets the same mask throughout one recording, and no mask tells anything of the name, because masks are
numbered as they come.  A field that is not named here does not pass.  Times, sizes, models and pids stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpuguard.locale.messages import sentence
from gpuguard.model import DEVICE_FIELDS
from gpuguard.vendors import UUID_PREFIXES

_FIRST_UID = 100_000
_HARMLESS = re.compile(r"[a-z ]{1,40}")  # "lost", "reset required": what backends call a problem
_MASKED, _MASKED_PROBLEM = sentence("mask.reason", "masked"), sentence("mask.problem", "masked problem")
_FIELDS_OF = {
    "snapshot": (
        "backend taken_at clock simulated driver_version nvml_version cuda_version recorded",
        "host devices gaps topology claims quarantined reserved",
    ),
    "device": (
        # and those of model.DEVICE_FIELDS, which say for themselves whether they are masked
        "index vendor ordinal processes_plausible desktop_memory mig_profile gpu_instance_id compute_instance_id",
        "uuid parent_uuid",
    ),
    "process": (
        "pid memory_used kind start_time ended utilization memory_utilization encoder_utilization decoder_utilization",
        "uid user command executable container working_directory conda_environment",
    ),
    "claim": (
        "alive pid since holders ends expected waited memory most max_processes written hidden requeue",
        "id uid user devices note command slots job",
    ),
    "host": ("cpu memory network traced", "terminal"),
    "use": ("cpu memory", "user"),
}
# Of each noun the fields that stay, and those that are masked; together they are all fields.
KEPT: dict[str, frozenset[str]] = {noun: frozenset(kept.split()) for noun, (kept, _) in _FIELDS_OF.items()}
MASKED: dict[str, frozenset[str]] = {noun: frozenset(masked.split()) for noun, (_, masked) in _FIELDS_OF.items()}
KEPT["device"] |= {field.name for field in DEVICE_FIELDS.values() if not field.masked}
MASKED["device"] |= {field.name for field in DEVICE_FIELDS.values() if field.masked}


class Mask:
    """The masks of one recording."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[Any, int]] = {}
        self._masks: dict[str, Callable[[Any], Any]] = {
            "host": lambda value: self._name("host", value),
            "devices": lambda value: [self._noun("device", device) for device in value],
            "gaps": lambda value: list(map(self._gap, value)),
            "topology": lambda value: [[self._uuid(left), self._uuid(right), how] for left, right, how in value],
            "claims": lambda value: [self._noun("claim", claim) for claim in value],
            # source.py adds these for views, with names of users; they are no part of a recording.
            "quarantined": lambda value: [],
            "reserved": lambda value: [],
            "uuid": self._uuid,
            "parent_uuid": self._uuid,
            "pci_bus_id": self._bus_id,
            "processes": lambda value: value and [self._noun("process", process) for process in value],
            "problems": lambda value: [text if _HARMLESS.fullmatch(text) else _MASKED_PROBLEM for text in value],
            "nvlink_links": lambda value: [[link, self._bus_id(end)] for link, end in value],
            "uid": self._uid,
            "user": lambda value: value if value == "root" else self._name("user", value),
            "command": lambda value: [self._name("command", tuple(value))],
            "executable": lambda value: f"/masked/{self._name('program', value)}",
            "container": lambda value: self._name("container", value),
            "working_directory": lambda value: f"/masked/{self._name('directory', value)}",
            "conda_environment": lambda value: self._name("environment", value),
            "id": lambda value: f"{self._number('claim', value):08x}",
            "note": lambda value: self._name("note", value),
            "job": lambda value: self._name("job", value),
            "slots": lambda value: [self._name("slot", slot) for slot in value],
            "terminal": lambda value: value and self._name("/dev/pts/masked", value),
        }

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a packed sample (see recordings.pack) with masks."""
        return {
            "snapshot": self._noun("snapshot", sample["snapshot"]),
            "host": {identity: self._noun("host", use) for identity, use in sample["host"].items()},
            "machine": sample["machine"]
            | {
                "users": {
                    str(self._uid(int(uid))): self._noun("use", use) for uid, use in sample["machine"]["users"].items()
                }
            },
            "groups": {
                str(self._uid(int(uid))): sorted(self._name("group", name) for name in names)
                for uid, names in sample["groups"].items()
            },
            "seen": sample["seen"],  # numbers and letters
            "process_groups": sample["process_groups"],  # numbers
        }

    def _noun(self, kind: str, packed: dict[str, Any]) -> dict[str, Any]:
        masked = {}
        for name, value in packed.items():
            if name in KEPT[kind] or value is None:
                masked[name] = value
            elif kind == "claim" and name == "devices":
                masked[name] = list(map(self._uuid, value))
            elif name in MASKED[kind]:
                masked[name] = self._masks[name](value)
        return masked

    def _gap(self, packed: dict[str, Any]) -> dict[str, Any]:
        # The reason may quote a path or a name, and a field a uuid.
        field = packed["field"] if re.fullmatch(r"[a-z_ ()]{1,60}", packed["field"]) else "masked"
        device = packed.get("device")
        return {"device": None if device is None else self._uuid(device), "field": field, "reason": _MASKED}

    def _uuid(self, uuid: str) -> str:
        number = self._number("uuid", uuid)
        prefix = next((known for known in UUID_PREFIXES if uuid.startswith(known)), UUID_PREFIXES[0])
        return f"{prefix}ffffffff-0000-4000-8000-{number:012x}"

    def _bus_id(self, bus_id: str) -> str:
        return f"00000000:{self._number('bus', bus_id) % 256:02X}:00.0"

    def _uid(self, uid: int) -> int:
        return uid if uid <= 0 else _FIRST_UID + self._number("uid", uid)

    def _name(self, kind: str, name: Any) -> str:
        return f"{kind}{self._number(kind, name)}"

    def _number(self, kind: str, name: Any) -> int:
        numbers = self._numbers.setdefault(kind, {})
        return numbers.setdefault(name, len(numbers) + 1)
