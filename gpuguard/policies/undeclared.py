"""Finds rules that judge by what is not read for them.  They would never fire, because what is not read is unknown.

A rule is tried on GPUs each value of which is as low or as high as can be, so that any three values occur together in
all combinations.  What a rule looks at only behind more than three conditions is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from gpuguard.model import GROUPED_FIELDS, WHO_FIELDS, ClaimRecord, Device, GpuProcess, Snapshot
from gpuguard.policies.view import HostUse, MachineUse, Rule, RuleView, UserUse

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
    if field.name not in ("processes", "kind")
]


def undeclared(rules: Iterable[Rule]) -> Iterator[tuple[str, ...]]:
    """For each of *rules*, what is missing in its `needs`: groups of fields of devices, and fields of a RuleView."""
    read = set[str]()
    views = tuple(_noted_views(read))
    for rule in rules:
        read.clear()
        for view in views:
            list(rule.check(view))
        needs = rule.needs
        read.update(name for name, _ in needs.past)
        groups = {group for group, names in GROUPED_FIELDS.items() if not read.isdisjoint(names)}
        given = {
            "past": needs.past, "host": needs.host, "machine": needs.machine is not None,
            "scheduled": needs.scheduler, "gpu_seconds": needs.gpu_seconds,
        }  # fmt: skip
        unread = (f"RuleView.{name}" for name, is_given in given.items() if name in read and not is_given)
        yield (*sorted(groups - WHO_FIELDS - needs.fields), *unread)


def _noted_views(read: set[str]) -> Iterator[RuleView]:
    """Samples of one device each.  Whatever a rule looks at in such a view or device, its name gets into *read*."""

    class Noted:
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    class NotedDevice(Noted, Device):
        pass

    class NotedView(Noted, RuleView):
        pass

    for number in range(256):
        uuid, pid = f"GPU-{number}", 1000 + number
        process = GpuProcess(**extremes(GpuProcess, number, pid=pid, start_time=1.0, kind="compute", ended=False))
        here = {"uuid": uuid, "parent_uuid": None, "processes": (process,), "processes_plausible": True}
        device = NotedDevice(**extremes(Device, number, **here))
        claims = (ClaimRecord(uuid, 2000, "x", (uuid,), since=1.0, memory=1),) * (number.bit_count() % 2)
        yield NotedView(
            Snapshot("", "", 1e9, 1e9, (device,), claims=claims),
            host={(pid, 1.0): HostUse(**extremes(HostUse, number))},
            machine=MachineUse(2**30, 1, {2000: UserUse("x", 1e12, 2**40)}),
            scheduled={uuid: frozenset({2000})},
        )


def extremes(noun: type, number: int, **fixed: Any) -> dict[str, Any]:
    """A value for each field of *noun* on the device with this *number*: the lowest of each on 0, the highest on 1.

    The parity of the bits that the number and the place of the field have in common says which, as in a Hadamard code.
    All places are odd, so that no three of them depend on each other.
    """
    return {
        name: fixed.get(name, lowest_and_highest[(number & place).bit_count() % 2])
        for of, name, place, lowest_and_highest in _ROWS
        if of is noun
    } | fixed
