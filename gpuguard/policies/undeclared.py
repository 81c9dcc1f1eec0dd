"""Find rules that judge by values that are not read for them, and so are unknown.  Such a rule would never fire.

A rule is tried on GPUs whose values are each as low or as high as possible, so that any three values occur together in
all combinations.  A value that a rule looks at only behind more than three conditions is not noticed.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any

from gpuguard.model import GROUPED_FIELDS, WHO_FIELDS, ClaimRecord, Device, GpuProcess, Snapshot
from gpuguard.policies.rule import Rule
from gpuguard.policies.view import HostUse, MachineUse, RuleView, UserUse

_EXTREMES: dict[str, tuple[Any, Any]] = {  # by the first word of a field's type
    "int": (0, 2**40), "float": (0.0, 1e12), "bool": (False, True), "str": ("", "/x"), "tuple[str,": ((), ("x",)),
    "tuple[tuple[int,": ((), ()),
}  # fmt: skip
# (kind of noun, name of the field, its place, its extremes); the places are odd.
_ROWS = [
    (noun, field.name, 2 * number + 1, _EXTREMES[str(field.type).split()[0]])
    for number, (noun, field) in enumerate(
        (noun, field) for noun in (Device, GpuProcess, HostUse) for field in fields(noun)
    )
    if field.name not in ("processes", "kind", "vendor")
]


class _Noted:
    """A device or a view that notes in *read* each of its fields that is looked at."""

    def __init__(self, noun: Device | RuleView, read: set[str]) -> None:
        self._noun, self._read = noun, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._noun, name)


@lru_cache(maxsize=256)
def undeclared(rule: Rule) -> tuple[str, ...]:
    """Return what the `needs` of *rule* lack: groups of fields of devices, and fields of a RuleView."""
    needs, read = rule.needs, {name for name, _ in rule.needs.past}
    for view in _views():
        devices: Any = tuple(_Noted(device, read) for device in view.snapshot.devices)
        noted: Any = _Noted(replace(view, snapshot=replace(view.snapshot, devices=devices)), read)
        list(rule.check(noted))
    groups = {group for group, names in GROUPED_FIELDS.items() if not read.isdisjoint(names)}
    given = {
        "past": needs.past, "host": needs.host, "machine": needs.machine is not None,
        "scheduled": needs.scheduler, "gpu_seconds": needs.gpu_seconds,
    }  # fmt: skip
    unread = (f"RuleView.{name}" for name, is_given in given.items() if name in read and not is_given)
    return (*sorted(groups - WHO_FIELDS - needs.fields), *unread)


@cache
def _views() -> list[RuleView]:
    """Return samples of 8 devices each, with one process on each device and a claim on every second one."""
    devices, claims, host = list[Device](), list[ClaimRecord](), dict[tuple[int, float], HostUse]()
    for number in range(256):
        uuid, pid = f"GPU-{number}", 1000 + number
        process = GpuProcess(**extremes(GpuProcess, number) | {"pid": pid, "start_time": 1.0, "ended": False})
        fixed = {"uuid": uuid, "parent_uuid": None, "processes": (process,), "processes_plausible": True}
        devices.append(Device(**extremes(Device, number) | fixed))
        claims.append(ClaimRecord(uuid, 2000, "x", (uuid,), since=1.0, memory=1))
        host[pid, 1.0] = HostUse(**extremes(HostUse, number))
    machine = MachineUse(2**30, 1, {2000: UserUse("x", 1e12, 2**40)})
    scheduled = {device.uuid: frozenset({2000}) for device in devices}
    samples = (
        Snapshot("", "", 1e9, 1e9, tuple(devices[first : first + 8]), claims=tuple(claims[first : first + 8 : 2]))
        for first in range(0, 256, 8)
    )
    return [RuleView(sample, host=host, machine=machine, scheduled=scheduled) for sample in samples]


def extremes(noun: type, number: int) -> dict[str, Any]:
    """Return a value for each field of *noun* on the device with this *number*: all lowest on 0, all highest on 1.

    The parity of the bits that the number and the place of the field have in common decides, as in a Hadamard code.
    All places are odd, so that no three of them depend on each other.
    """
    return {
        name: lowest_and_highest[(number & place).bit_count() % 2]
        for of, name, place, lowest_and_highest in _ROWS
        if of is noun
    }
