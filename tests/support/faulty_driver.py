"""Drivers that lie, fall silent or forget, under every rule: run by test_guard_faults, in a process of its own.

Three devices.  On the first sits an offender whom every rule finds, on the third somebody innocent, and the second one
has the fault.  Each rule has a watchdog of its own whose policy terminates at once; they share the samples, and nothing
is sent: a signal is written down where it would leave.
    python faulty_driver.py CAMPAIGN [FAULT]      prints {"cases": .., "wrong": [..]} as JSON
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from builders import a_claim_record, a_snapshot, written
from chances import THE_SAME
from fake_nvml import ABORT, GIB, HANG, LOST, NO_PERMISSION, NOT_SUPPORTED, RESET_REQUIRED, TIMEOUT, UNKNOWN, FakeNvml
from guard_scene import SOMEBODY as GUILTY
from guard_scene import a_child, started
from nodes import beginning_with
from pid_reuse import Everybody
from worlds import shown

from gpuguard import users
from gpuguard.backends import client, nvml, nvml_calls, nvml_fields, spawn
from gpuguard.enforcement import guard_limits, preflight, signals
from gpuguard.model import ALL_FIELDS, CLOCKS, ECC, WHO_FIELDS, Gap, Snapshot
from gpuguard.policies.expression import ExpressionRule, parse_expression
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.policy import Policy, Scope, Step
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.rule import Rule
from gpuguard.policies.rules import RULES
from gpuguard.policies.thresholds import (
    HealthRule,
    HostCpuRule,
    HostMemoryRule,
    MemoryRule,
    PowerRule,
    ProcessesRule,
    TemperatureRule,
    UtilizationRule,
)
from gpuguard.policies.trends import ForecastRule, MemoryGrowthRule
from gpuguard.policies.usage import CommandRule, UnclaimedRule, UsersRule
from gpuguard.policies.view import MachineUse, RuleView, UserUse, ValueSeries, process_subject
from gpuguard.units import parse_host_memory_amount, parse_memory_amount, parse_power_amount, parse_rate
from gpuguard.watchdog import Watchdog

OTHER = GUILTY + 1
PAST = 600.0
NAMES = {GUILTY: "alice", OTHER: "bob"}
CODES = (NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, LOST, RESET_REQUIRED, UNKNOWN)
IDENTITY = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
LIST = "nvmlDeviceGetComputeRunningProcesses_v3"
# Without this answer the rule knows nothing of a device; all rules need the list of processes.
VITAL = {
    "temperature": ("nvmlDeviceGetTemperature",),
    "power": ("nvmlDeviceGetPowerUsage",),
    "utilization": ("nvmlDeviceGetProcessUtilization",),
    "health": ("nvmlDeviceGetRemappedRows",),
}
VITAL_FUNCTIONS = (LIST, *(function for functions in VITAL.values() for function in functions))
AGGRESSIVE: dict[str, Rule] = {name: shown(name, rule)[0] for name, rule in RULES.items()} | {
    "memory": MemoryRule(parse_memory_amount("20GiB")),
    "memory_growth": MemoryGrowthRule(parse_rate("1MiB/10m"), PAST),
    "temperature": TemperatureRule(80.0, per="process"),
    "power": PowerRule(parse_power_amount("600W"), per="process"),
    "utilization": UtilizationRule(above=50.0, per="process"),
    "idle": IdleRule(5.0),
    "processes": ProcessesRule(0, per="user"),
    "forecast": ForecastRule(1e7, PAST, per="process"),
    "unclaimed": UnclaimedRule(),
    "users": UsersRule(deny=(GUILTY,)),
    "quota": QuotaRule(devices=0),
    "age": AgeRule(run_time_above=0.0),
    "health": HealthRule(problems=("row remap*",), with_processes=True),
    "command": CommandRule(executables=("/*",)),
    "host_memory": HostMemoryRule(parse_host_memory_amount("0%")),
    "host_cpu": HostCpuRule(0.0),
    "expression": ExpressionRule(parse_expression("memory_used > 20GiB and utilization < 5% and user == 'alice'")),
}
A_GREEDY_USER = MachineUse(100 * GIB, 10, {GUILTY: UserUse("alice", 900.0, 90 * GIB)})
LOOKS_BACK = {name for name, rule in AGGRESSIVE.items() if rule.needs.past}
# These would find everybody, whatever they do.
BY_PERSON = {"processes", "quota", "age", "command"}


def policy_of(name: str) -> Policy:
    only = Scope(users=frozenset({GUILTY})) if name in BY_PERSON else None
    limits = {"at_most_users": 100, "at_most_jobs": 100}
    return Policy(name, (AGGRESSIVE[name],), hold=0.0, only=only, enforce=True, steps=(Step("terminate"),), **limits)


POLICIES = {name: policy_of(name) for name in RULES}


class Driver:
    """One sample for all watchdogs; when one of them looks again before a signal, the driver is asked."""

    name, simulated = "nvml", True

    def __init__(self, world: World, backend: Any = None) -> None:
        self.world, self.backend, self.newest = world, backend or nvml.Nvml(), a_snapshot()
        self.before_last_look: Callable[[], None] = lambda: None

    def look(self) -> Snapshot:
        self.newest = self.backend.sample(WHO_FIELDS | {CLOCKS, ECC})
        return self.newest

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        if devices is None:
            return self.newest
        self.world.list_processes((0, 2))  # the driver has new samples of their utilization, too
        self.before_last_look()
        return self.backend.sample(fields, devices)

    def close(self) -> None:
        pass


class World:
    """The fake machine, and who sits where."""

    def __init__(self, fake: FakeNvml, offender: int, bystander: int, *second: int) -> None:
        self.fake, self.offender, self.bystander, self.second = fake, offender, bystander, second
        self.sent: list[tuple[str, int]] = []
        self.rule, self.tick = "", 0

    def lay_out(self, second: str) -> None:
        """Everything whole; on the second device sits an offender ("guilty", "desktop") or somebody ("innocent")."""
        self.fake.heal()
        for index, guilty in enumerate((True, second != "innocent", False)):
            device = self.fake.devices[index]
            device.temperature, device.power_mw = (95, 690_000) if guilty else (40, 100_000)
            device.utilization, device.remap_pending = (0, 1) if guilty else (90, 0)
            device.samples, device.process_stride, device.memory_reserved = [device.utilization] * 5, 24, 0
        self.second_is = second
        self.list_processes()

    def list_processes(self, devices: Collection[int] = (0, 1, 2)) -> None:
        self.tick += 1
        kind = "compute+graphics" if self.second_is == "desktop" else "compute"
        second = (self.second[1], GIB) if self.second_is == "innocent" else (self.second[0], 60 * GIB)
        rows = (self.offender, 60 * GIB, "compute"), (*second, kind), (self.bystander, GIB, "compute")
        for device in devices:
            self.listed(device, rows[device])

    def listed(self, device: int, *rows: tuple[int, int, str], **more: int) -> None:
        self.fake.clear_processes(device)
        for pid, memory, kind in rows:
            sm = 90 if memory > GIB else 10
            self.fake.add_process(device, pid, memory, kind, sm_utilization=sm, time_stamp=self.tick, **more)

    def forward(self, pidfd: int, signum: int) -> Literal["sent"]:
        """In place of the last call."""
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            self.sent.append((self.rule, int(file.read().partition("Pid:")[2].split()[0])))
        return "sent"


def guards(world: World, driver: Driver) -> dict[str, Watchdog]:
    """A watchdog per rule."""
    found = {}
    for name, policy in POLICIES.items():
        guard = Watchdog(driver, (policy,), enforce=True, append=written, share_host_pids=True)
        guard.site_rules = replace(guard.site_rules, per_minute=10**6, per_hour=10**6)
        guard._context = replace(guard._context, jobs=Everybody(), interactive_grace=0.0)
        setattr(guard, "_view_of", surrounded(guard._view_of, world, name))  # noqa: B010
        if name in LOOKS_BACK:
            seed(guard, driver.newest)
        found[name] = guard
    return found


def surrounded(look_around: Callable[..., RuleView], world: World, rule: str) -> Callable[..., RuleView]:
    """What does not come from the driver: claims, a scheduler, and who takes most of the machine."""

    def look(snapshot: Snapshot, *more: Any) -> RuleView:
        uuids = [world.fake.devices[index].uuid for index in range(3)]
        taken = {"trespass": uuids, "unclaimed": uuids[1 if world.second_is == "innocent" else 2 :]}.get(rule, ())
        claims = (a_claim_record(*taken, uid=OTHER, user="bob", pid=None),) if taken else ()
        gaps = tuple(gap for gap in snapshot.gaps if gap.field != "claims")
        view = look_around(replace(snapshot, claims=claims, gaps=gaps), *more)
        scheduled = {uuid: frozenset({OTHER}) for uuid in uuids}
        return replace(view, scheduled=scheduled, machine=A_GREEDY_USER)

    return look


def seed(guard: Watchdog, snapshot: Snapshot) -> None:
    """Ten minutes in which the memory of offenders has grown."""
    for device in snapshot.devices:
        for process in device.processes or ():
            series = ValueSeries(PAST)
            used = process.memory_used or 0
            growth = GIB / 60 if used > GIB else 0
            for ago in range(int(PAST), 0, -10):
                series.add(snapshot.clock - ago, used - ago * growth)
            guard._memory.past[process_subject(device, process), "memory_used"] = series


def rounds(world: World, driver: Driver, hurt: Callable[[], None], *, when: str) -> dict[str, set[int]]:
    """Whom each rule would have hit: one whole sample, then *hurt*, then two more samples ("the last look": one)."""
    world.sent, watchdogs = [], None
    driver.before_last_look = lambda: None
    for step in range(3 if when == "sample" else 2):
        if step:
            world.list_processes()
        if step and when == "sample":
            hurt()
        driver.look()
        watchdogs = watchdogs or guards(world, driver)
        driver.before_last_look = hurt if when == "last look" else (lambda: None)
        for world.rule, guard in watchdogs.items():
            if when == "last look":
                world.fake.heal()
            guard.step()
    return {rule: {pid for name, pid in world.sent if name == rule} for rule in POLICIES}


def faults_of(world: World, hit: dict[str, set[int]], innocent: Collection[str]) -> list[str]:
    """What is wrong: a bystander was hit, or the offender was missed; *innocent*: rules blind on the second."""
    wrong = []
    for rule, pids in hit.items():
        if world.offender not in pids:
            wrong.append(f"{rule} missed the offender on the whole GPU")
        if world.bystander in pids:
            wrong.append(f"{rule} hit a bystander")
        if rule in innocent and pids - {world.offender, world.bystander}:
            wrong.append(f"{rule} hit somebody on the broken GPU")
    return wrong


def blind(function: str, code: int) -> set[str]:
    """The rules that know nothing of the second device when *function* fails."""
    if code == LOST or function == LIST:
        return set(POLICIES)
    return {rule for rule, vital in VITAL.items() if function in vital}


Case = tuple[str, list[str]]


def every_code(world: World) -> Iterator[Case]:
    """Each function that a sample calls fails, with an innocent user or an offender on the device."""
    world.lay_out("innocent")
    world.fake.reset_calls()
    nvml.Nvml().sample(ALL_FIELDS - {"topology", "nvlink", "nvlink_flow", "pcie", "media"})  # of which no rule knows
    names = [name for name in world.fake.calls() if "Device" in name and name != "nvmlDeviceGetCount_v2"]
    assert len(names) > 20, names
    for place, name in enumerate(names):
        for code, second in failures(name, place):
            world.lay_out(second)
            driver = Driver(world)

            def hurt(name: str = name, code: int = code, driver: Driver = driver) -> None:
                world.fake.fail(name, code, device=1)
                driver.backend = nvml.Nvml()  # the one before asks for nothing that it knows already

            hit = rounds(world, driver, hurt, when="sample")
            everybody = second == "innocent" or name in IDENTITY
            yield f"{name} {code} {second}", faults_of(world, hit, POLICIES if everybody else blind(name, code))


def failures(name: str, place: int) -> list[tuple[int, str]]:
    """The codes with which a function fails, and who sits on the device: in campaigns all, otherwise some in turn."""
    users_there = ("innocent", "guilty")
    if not THE_SAME:
        return list(itertools.product(CODES, users_there))
    round_, turn = divmod(place, len(CODES))
    needed = name in (*VITAL_FUNCTIONS, *IDENTITY)  # without it some rules know nothing of the device
    return [(CODES[turn], user) for user in (users_there if needed else users_there[round_ % 2 :][:1])]


def the_last_look(world: World) -> Iterator[Case]:
    """The driver fails only when it is asked again, just before the signal; in campaigns with all codes, otherwise
    with every other one in turn."""
    for place, name in enumerate(VITAL_FUNCTIONS):
        for code in CODES[place % 2 :: 2] if THE_SAME else CODES:
            world.lay_out("guilty")
            driver = Driver(world)
            hit = rounds(world, driver, partial(world.fake.fail, name, code, device=1), when="last look")
            yield f"{name} {code} at the last look", faults_of(world, hit, blind(name, code))


def values(world: World) -> Iterator[Case]:
    """Numbers that cannot be, and "not available"."""
    for field, value in (
        ("temperature", 255), ("temperature", -5), ("power_mw", 2**32 - 1), ("utilization", 101),
        ("utilization", 2**32 - 1), ("memory_utilization", 2**32 - 1), ("memory_total", 0), ("memory_used", 2**60),
        ("memory_reserved", 2**60), ("power_limit_mw", 2**32 - 1),
    ):  # fmt: skip
        world.lay_out("innocent")

        def hurt(field: str = field, value: int = value) -> None:
            setattr(world.fake.devices[1], field, value)
            if field == "utilization":
                world.fake.devices[1].samples = [value] * 5

        hit = rounds(world, Driver(world), hurt, when="sample")
        yield f"{field} {value}", faults_of(world, hit, POLICIES)
        setattr(world.fake.devices[1], field, getattr(world.fake.devices[2], field))
    for field, value in (
        ("memory_total", 0), ("memory_total", 1), ("memory_total", 50 * GIB), ("memory_total", 2**60),
        ("memory_used", 2**60), ("memory_used", 2**63), ("memory_reserved", 2**60),
    ):  # fmt: skip
        for when in ("sample", "last look"):
            world.lay_out("guilty")
            hit = rounds(world, Driver(world), partial(setattr, world.fake.devices[1], field, value), when=when)
            yield f"{field} {value} under an offender, {when}", faults_of(world, hit, POLICIES)
            setattr(world.fake.devices[1], field, getattr(world.fake.devices[2], field))
    world.lay_out("guilty")
    hit = rounds(world, Driver(world), lambda: world.listed(1, (world.second[0], -1, "compute")), when="sample")
    yield "memory of a process n/a", faults_of(world, hit, {"memory", "memory_growth", "forecast", "expression"})


def lists(world: World) -> Iterator[Case]:
    """Process lists that name people who are not there."""
    one, two = world.second[:2]
    big = 60 * GIB
    garbage: dict[str, Callable[[], None]] = {
        f"pid {pid}": partial(world.listed, 1, (one, big, "compute"), (pid, GIB, "compute"), stays=1)
        for pid in (0, 1, -1, 4294967295, 2**31 - 1)
    }
    garbage["a dead pid beside a pid in the place of memory"] = partial(
        world.listed, 1, (one, big, "compute"), (a_dead_pid(), two | 1, "compute"), stays=1
    )
    garbage["twice"] = lambda: world.listed(1, (one, big, "compute"), (one, big, "compute"))
    garbage["more than the card has"] = lambda: world.listed(1, (one, 100 * GIB, "compute"), counted=0)
    garbage["more than is used"] = lambda: world.listed(
        1, (one, 40 * GIB, "compute"), (two, 35 * GIB, "compute"), counted=0
    )
    for stride in (16, 32):

        def scrambled(stride: int = stride) -> None:
            rows = [(pid, memory, "compute") for pid, memory in ((one, one), (two, big), (one, two), (two, one))]
            world.listed(1, *rows, counted=0)
            world.fake.devices[1].process_stride = stride

        garbage[f"rows of {stride} bytes"] = scrambled
    for name, hurt in garbage.items():
        for when in ("sample", "last look"):
            world.lay_out("guilty")
            hit = rounds(world, Driver(world), hurt, when=when)
            yield f"{name}, {when}", faults_of(world, hit, POLICIES)


def a_dead_pid() -> int:
    with a_child("true", uid=OTHER) as child:
        child.wait()
    return child.pid


def ended(world: World) -> Iterator[Case]:
    """A process that has ended, which a child of it keeps in the list, shelters nobody on its device."""
    for memory in (100 * 2**20, -1):
        for when in ("sample", "last look"):
            world.lay_out("guilty")
            beside = partial(world.listed, 1, (world.second[0], 60 * GIB, "compute"), (a_dead_pid(), memory, "compute"))
            hit = rounds(world, Driver(world), partial(beside, stays=1), when=when)
            missed = [rule for rule, pids in hit.items() if world.second[0] not in pids]
            yield f"{memory} bytes of an ended process, {when}", [*faults_of(world, hit, ()), *missed]


def desktops(world: World) -> Iterator[Case]:
    """A desktop that computes, too, looks like a job when the list of graphics processes fails."""
    for code in CODES[1:]:  # "not supported" means that there is no such list
        hurt = partial(world.fake.fail, "nvmlDeviceGetGraphicsRunningProcesses_v3", code, device=1)
        for when in ("sample", "last look"):
            world.lay_out("desktop")
            hit = rounds(world, Driver(world), hurt, when=when)
            yield f"graphics list {code}, {when}", faults_of(world, hit, POLICIES)


def silence(world: World) -> Iterator[Case]:
    """Calls that do not come back, or that crash the library: behind the process border."""
    client.DEVICE_SECONDS = 0.7
    for name in (LIST, "nvmlDeviceGetTemperature"):
        for what, code in {"hangs": HANG, "crashes": ABORT}.items():
            for when in ("sample", "last look"):
                world.lay_out("guilty")
                backend = client.open_worker("nvml")
                hurt = partial(world.fake.fail, name, code, device=1)
                hit = rounds(world, Driver(world, backend), hurt, when=when)
                backend.close()
                world.fake.heal()
                yield f"{name} {what}, {when}", faults_of(world, hit, POLICIES)


CAMPAIGNS = {one.__name__: one for one in (every_code, the_last_look, values, lists, ended, desktops, silence)}


def believe_every_list() -> None:
    nvml_fields.implausibility = lambda *_, **__: None


def take_unknown_for_zero() -> None:
    def gap(reading: nvml_calls.Reading, name: str, reason: str) -> None:
        reading.gaps.append(Gap(reading.device.uuid, name, reason))
        if name == "utilization":
            reading.values[name] = 0

    setattr(nvml_calls.Reading, "gap", gap)  # noqa: B010


FAULTS: dict[str, Callable[[], None]] = {one.__name__: one for one in (believe_every_list, take_unknown_for_zero)}


def main(campaign: str, fault: str | None = None) -> None:
    users._names.update(NAMES)
    in_workers = f"from gpuguard import users; users._names.update({NAMES})"
    setattr(spawn, "interpreter", beginning_with(in_workers))  # noqa: B010
    setattr(preflight, "driver_nodes", lambda devices: ())  # noqa: B010  the processes here have none open, even where there is one
    guard_limits.ENDED_PER_HOUR = 10**6
    if fault:
        FAULTS[fault]()
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(a_child(uid=uid)).pid for uid in (GUILTY, OTHER, GUILTY, OTHER)]
        for pid in pids:
            started(pid)
        world = World(FakeNvml.attach(), *pids)
        signals.forward = world.forward
        begun, cases = time.monotonic(), []
        for case in CAMPAIGNS[campaign](world):
            cases.append(case)
            if fault and case[1]:
                break  # the planted fault is found
    wrong = [f"{name}: {what}" for name, found in cases for what in found]
    print(json.dumps({"cases": len(cases), "seconds": time.monotonic() - begun, "wrong": wrong}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
