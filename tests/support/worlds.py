"""A machine on which everything is wrong at once, and the rules as their own docstrings show them.

from worlds import a_bad_day, shown
"""

import inspect
import re
from dataclasses import replace
from functools import cache
from textwrap import dedent
from typing import Any

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot, claims_first

from gpuguard.model import GROUPED_FIELDS, WHO_FIELDS, Device
from gpuguard.policies.rule import Rule
from gpuguard.policies.undeclared import extremes
from gpuguard.policies.view import (
    HostUse,
    MachineUse,
    RuleView,
    UserUse,
    device_subject,
    judged_processes,
    process_subject,
)
from gpuguard.yaml_files.decoder import Decoder
from gpuguard.yaml_files.yaml_text import YamlSource

CLOCK = 1_000_000.0  # seconds since boot: old enough for every rule about age
PAST, INTERVAL = 6 * 3600, 30
BOBS: dict[str, Any] = {"uid": 1002, "user": "bob"}
READERS = {"user": {"root": 0, "nobody": 65534, "alice": 1001, "bob": 1002}.__getitem__, "group": str}


def examples(rule: type[Rule]) -> list[str]:
    """The YAML in the docstring of a rule, one text for each ``when:``."""
    lines = (inspect.getdoc(rule) or "").split("\n")
    indented = [line for line in lines if line.startswith("    ")]
    return [dedent(text) for text in re.split(r"\n(?=    when:)", "\n".join(indented)) if "when:" in text]


def shown(name: str, rule: type[Rule]) -> list[Rule]:
    """The rule in each of its examples."""
    return [_decoded(name, rule, example) for example in examples(rule)]


def _decoded(name: str, rule: type[Rule], example: str) -> Rule:
    source = YamlSource(example)
    tree = source.tree()
    assert tree is not None, source.faults
    ((_, when),) = [(key, value) for key, value in tree.pairs if key.text == "when"]
    ((key, keys),) = when.pairs
    assert key.text == name
    decoded: Rule = Decoder(source, READERS).value(keys, rule)
    assert source.faults == []
    return decoded


@cache
def a_bad_day(clock: float = CLOCK, devices: tuple[Device, ...] | None = None) -> RuleView:
    """At *clock*: a broken, overloaded device, one that bob has claimed and alice holds at rest, one that bob claimed
    for nothing, and four that alice or bob hold at rest without a claim.  With *devices*, in this order, on those.

    What is read for some rules alone is as low as can be on the next device, and as high on the one after it.
    """
    devices = devices or _of_nvidia()
    invaded, unused = devices[1:3]
    now = a_snapshot(*devices, clock=clock, taken_at=1_700_000_000.0 + clock - CLOCK)
    claims = tuple(
        a_claim_record(device, id=f"c{device.index}", uid=1002, user="bob", pid=None, since=now.taken_at - 9e5)
        for device in (invaded, unused)
    )
    return RuleView(
        replace(now, claims=claims),
        past=_past(devices, clock),
        host={
            (process.pid, 1000.0): HostUse(cpu=0.0, memory=GIB, network=0.0)
            for device in devices
            for process in device.processes or ()
        },
        machine=MachineUse(100 * GIB, 10, {1001: UserUse("alice", 900.0, 90 * GIB)}),
        groups={1001: frozenset({"students"}), 1002: frozenset({"staff"})},
        scheduled={device.uuid: frozenset({1002}) for device in devices},
        arrivals=claims_first(claims, *devices),
        gpu_seconds={uid: {days * 86400.0: 1e7 for days in (1, 7, 14, 28, 30)} for uid in (1001, 1002)},
    )


def _of_nvidia() -> tuple[Device, ...]:
    broken = a_device(
        0, memory_used=79 * GIB, temperature=96.0, power_draw=695.0, utilization=99.0, memory_utilization=90.0,
        problems=("lost", "remapping pending"), throttle_reasons=("hw_thermal_slowdown",), clock_sm=500,
        ecc_corrected_volatile=10**6, ecc_uncorrected_volatile=7, retired_pages=70, remapped_rows=9,
        processes=tuple(a_job(pid, memory_used=26 * GIB, utilization=99.0) for pid in (100, 101, 102)),
    )  # fmt: skip
    invaded = a_device(1, memory_used=50 * GIB, processes=(a_job(110, memory_used=50 * GIB, utilization=0.0),))
    unused = a_device(2)
    resting = [
        a_device(index, memory_used=40 * GIB, processes=(a_job(100 + 10 * index, memory_used=40 * GIB),), **rare)
        for index, rare in ((3, _rarely_read(0)), (4, _rarely_read(1)), (5, {}))
    ]
    of_bob = a_device(6, memory_used=40 * GIB, processes=(a_job(160, memory_used=40 * GIB, **BOBS),))
    return (broken, invaded, unused, *resting, of_bob)


def _rarely_read(level: int) -> dict[str, Any]:
    """The fields that are read for the rules that ask for them: the lowest values (0) or the highest ones (1)."""
    rare = {name for group, names in GROUPED_FIELDS.items() if group not in WHO_FIELDS for name in names}
    return {name: value for name, value in extremes(Device, level).items() if name in rare}


def a_job(pid: int, **fields: object):
    """A notebook of alice."""
    command = ("python", "-m", "ipykernel_launcher")
    return a_process(pid, executable="/home/alice/bin/python3.11", command=command, **fields)


def _past(devices: tuple[Device, ...], clock: float) -> dict:
    clocks = [clock - PAST + step for step in range(0, PAST + 1, INTERVAL)]
    level = {"utilization": "utilization", "temperature": "temperature", "power_draw": "power_draw"}
    past = {}
    for device in devices:
        key = device_subject(device)
        for field in level:
            if (value := getattr(device, field)) is not None:
                past[key, field] = [(at, value) for at in clocks]
        for process in judged_processes(device):
            past[process_subject(device, process), "memory_used"] = _leak(clocks, process.memory_used)
        leak = device.index == 0
        used = device.memory_used or 0
        past[key, "memory_used"] = _leak(clocks, used) if leak else [(at, used) for at in clocks]
    return past


def _leak(clocks: list[float], now: int | None) -> list[tuple[float, float]]:
    return [(at, (now or 0) - (clocks[-1] - at) * GIB / 60) for at in clocks]
