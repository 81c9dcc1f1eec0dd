"""What gpuguard tells monitoring systems: facts -> families of numbers, in base units, under our own names.

What is unknown is absent, never 0.  No label holds a pid, and no more than MOST_USERS names of users appear, so that
a machine keeps few series for ever.  Does not spell them: see exposition.  Names of other programs are in
metrics_compat.

Most numbers are at a scrape what they were at the one before.  So what makes a family of them is a function of values
that remembers its results: the family is then the same object, and its text is known, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import dataclass as noun
from functools import lru_cache
from operator import attrgetter

from gpuguard import device_state
from gpuguard.clusters.slurm_jobs import job_of_claim
from gpuguard.device_state import DeviceUse, claims_readable
from gpuguard.model import Device, Snapshot
from gpuguard.request import computes
from gpuguard.sanitize import neutralise

MOST_USERS = 100  # the others are summed up
MOST_NAMELESS = 10  # of them: whoever may use user namespaces has 65536 uids without a name
MOST_JOBS = 4  # of one device: a user may give his claims any ids, and hundreds
MOST_ACTIONS = 500  # series of gpuguard_policy_actions_total
OTHERS, NOBODY_KNOWN = "(others)", "(unknown)"  # no name of a user has parentheses
LONGEST_LABEL = 128  # characters

Labels = tuple[tuple[str, str], ...]
Action = tuple[str, str, str]  # policy, action, outcome


@dataclass(frozen=True, eq=False)
class MetricFamily:
    """Numbers of one name: what it means, and a value per set of labels.  One is equal to itself alone."""

    name: str
    kind: str  # gauge, counter
    help: str
    values: Mapping[Labels, float]


@noun(frozen=True)
class MetricFacts:
    """All that is told.  None: unknown, or known only to the daemon.

    Args:
        now: unix time.
        version: of gpuguard.
        snapshot: the last one.
        current: whether its values still count; otherwise only what a device is is told of it.
        errors: its devices as they were when the errors of their memory were read last; (): as they are there.
        uses: what goes on on its devices.
        waiting: who waits, and since when (unix time).
        quarantined: uuids that are out of service.
        driver_up: whether the driver answered when it was asked last.
        daemon_up: whether a daemon guards this machine.
        interval: seconds between two samples.
        troubles: how often sampling began to fail since the daemon started.
        actions: what policies did since then.
        unrecorded: lines of the audit log that could not be written since then.
    """

    now: float
    version: str
    snapshot: Snapshot | None = None
    current: bool = False
    errors: tuple[Device, ...] = ()
    uses: tuple[DeviceUse, ...] = ()
    waiting: Sequence[tuple[str, float]] | None = None
    quarantined: frozenset[str] | None = None
    driver_up: bool | None = None
    daemon_up: bool | None = None
    interval: float | None = None
    troubles: int | None = None
    actions: Mapping[Action, int] | None = None
    unrecorded: int | None = None


_RATIO, _HERTZ = 0.01, 1e6
# name behind gpuguard_device_, kind, help, field of Device, factor
DEVICE_VALUES: tuple[tuple[str, str, str, str, float], ...] = (
    ("memory_total_bytes", "gauge", "Memory of the device.", "memory_total", 1),
    ("memory_used_bytes", "gauge", "Memory in use.", "memory_used", 1),
    ("memory_free_bytes", "gauge", "Memory that is free.", "memory_free", 1),
    ("memory_reserved_bytes", "gauge", "Memory that driver and firmware keep.", "memory_reserved", 1),
    ("utilization_ratio", "gauge", "Share of time in which a kernel ran, 0 to 1.", "utilization", _RATIO),
    ("memory_utilization_ratio", "gauge", "Share of time in which memory was used.", "memory_utilization", _RATIO),
    ("temperature_celsius", "gauge", "Temperature of the device.", "temperature", 1),
    ("slowdown_temperature_celsius", "gauge", "Temperature from which on it slows down.", "temperature_slowdown", 1),
    ("shutdown_temperature_celsius", "gauge", "Temperature at which it switches off.", "temperature_shutdown", 1),
    ("fan_speed_ratio", "gauge", "Speed of the fans, 0 to 1.", "fan_speed", _RATIO),
    ("power_draw_watts", "gauge", "Power that the device draws.", "power_draw", 1),
    ("power_limit_watts", "gauge", "Power that it may draw.", "power_limit", 1),
    ("energy_joules_total", "counter", "Energy since the driver was loaded.", "total_energy", 1),
    ("clock_sm_hertz", "gauge", "Clock of the SMs.", "clock_sm", _HERTZ),
    ("clock_sm_max_hertz", "gauge", "Highest clock of the SMs.", "clock_sm_max", _HERTZ),
    ("clock_memory_hertz", "gauge", "Clock of the memory.", "clock_memory", _HERTZ),
    ("clock_memory_max_hertz", "gauge", "Highest clock of the memory.", "clock_memory_max", _HERTZ),
    ("performance_state", "gauge", "P-state: 0 is the fastest.", "pstate", 1),
    ("persistence_mode", "gauge", "1 when the driver stays loaded.", "persistence_mode", 1),
    ("retired_pages", "gauge", "Pages of memory that were retired.", "retired_pages", 1),
    ("remapped_rows", "gauge", "Rows of memory that were remapped.", "remapped_rows", 1),
)  # fmt: skip
_ECC = (  # error, field since the driver was loaded, field since the device was built
    ("corrected", "ecc_corrected_volatile", "ecc_corrected_aggregate"),
    ("uncorrected", "ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"),
)
# Fields of Device that change once in months, and are not read at each look.
ERRORS = ("ecc_mode", *(each for row in _ECC for each in row[1:]), "retired_pages", "remapped_rows")
_errors_of = attrgetter(*ERRORS)
_MEASURED = tuple(row[3] for row in DEVICE_VALUES)
_measured = attrgetter(*_MEASURED)
_IDENTITY = ("uuid", "index", "name", "pci_bus_id", "parent_uuid", "mig_profile")
_identity = attrgetter(*_IDENTITY)
_THROTTLES = frozenset(
    ("applications_clocks_setting", "display_clock_setting", "gpu_idle", "hw_power_brake_slowdown", "hw_slowdown",
     "hw_thermal_slowdown", "sw_power_cap", "sw_thermal_slowdown", "sync_boost")
)  # fmt: skip
# Others come with numbers or with words of an administrator in them.
_PROBLEMS = frozenset(
    ("lost", "unresponsive", "reset required", "page retirement pending", "row remap pending", "row remap failed")
)
_GAPS = frozenset({"claims", "device", *Device.__match_args__})


def metric_families(facts: MetricFacts) -> list[MetricFamily]:
    """Every family that has a value, in a fixed order."""
    found = [*_health(facts), *_waiting(facts)]
    if facts.snapshot:
        found += _what_devices_are(tuple(map(_identity, facts.snapshot.devices)))
    if facts.snapshot and facts.current:
        found += [*_device_values(facts, facts.snapshot), *_device_words(facts), *_claims(facts, facts.snapshot)]
    return [family for family in found if family.values]


def label(text: object) -> str:
    """*text* as the value of a label: one line, visible, not endless."""
    return neutralise(str(text))[:LONGEST_LABEL]


@lru_cache(maxsize=4096, typed=True)  # the same ones at every scrape; True is not spelled as 1 is
def labels(**named: object) -> Labels:
    """Sorted, as a key; what is None is left out."""
    return tuple(sorted([(name, label(value)) for name, value in named.items() if value is not None]))


def number(value: object, factor: float = 1) -> float | None:
    """*value* times *factor*, or None where it is unknown or no finite number."""
    if not isinstance(value, (int, float)):
        return None
    result = float(value * factor) if factor == 1 else round(value * factor, 9)
    return result if math.isfinite(result) else None


@dataclass
class MetricSums:
    """A family in the making: values of the same labels are added up, and one that is unknown makes the sum unknown."""

    name: str
    help: str
    kind: str = "gauge"
    _values: dict[Labels, float | None] = field(default_factory=dict)

    def add(self, value: object, **named: object) -> None:
        """Count *value* in, under these labels."""
        key, amount = labels(**named), number(value)
        before = self._values.get(key, 0.0)
        self._values[key] = None if amount is None or before is None else before + amount

    def done(self) -> MetricFamily:
        """The family, without what is unknown."""
        return MetricFamily(
            self.name, self.kind, self.help, {key: value for key, value in self._values.items() if value is not None}
        )


@lru_cache(maxsize=64)
def _one(name: str, help_text: str, value: object, kind: str = "gauge", **named: object) -> MetricFamily:
    known = number(value)
    return MetricFamily(name, kind, help_text, {} if known is None else {labels(**named): known})


def _health(facts: MetricFacts) -> Iterator[MetricFamily]:
    yield _one("gpuguard_build_info", "The version of gpuguard.", 1, version=facts.version)
    yield _one("gpuguard_daemon_up", "1 when a daemon guards this machine.", facts.daemon_up)
    yield _one("gpuguard_driver_up", "1 when the driver answered when it was asked last.", facts.driver_up)
    yield _one("gpuguard_sample_interval_seconds", "Time between two samples of the daemon.", facts.interval)
    yield _one(
        "gpuguard_sample_failures_total",
        "Times that sampling began to fail since the daemon started.",
        facts.troubles,
        "counter",
    )
    yield _one(
        "gpuguard_audit_failures_total",
        "Lines of the audit log that could not be written since the daemon started.",
        facts.unrecorded,
        "counter",
    )
    if facts.actions is not None:
        yield _actions(facts.actions)
    if not facts.snapshot:
        return
    snapshot = facts.snapshot
    age = max(0.0, round(facts.now - snapshot.taken_at, 3))
    yield _one("gpuguard_sample_age_seconds", "How old the last sample is.", age)
    yield _one("gpuguard_sample_timestamp_seconds", "Unix time of the last sample.", snapshot.taken_at)
    yield _one(
        "gpuguard_driver_info", "Versions of the driver.", 1,
        driver=snapshot.driver_version, cuda=snapshot.cuda_version, nvml=snapshot.nvml_version,
        backend=snapshot.backend.partition(":")[0], simulated=str(snapshot.simulated).lower(),
    )  # fmt: skip
    gaps = MetricSums("gpuguard_sample_gaps", "Devices of which a field could not be read, 1 for the machine.")
    for gap in snapshot.gaps:
        if gap.field in ERRORS:
            continue  # it would come and go
        gaps.add(1, field=gap.field if gap.field in _GAPS else "other")
    yield gaps.done()


def _actions(counted: Mapping[Action, int]) -> MetricFamily:
    found = MetricSums("gpuguard_policy_actions_total", "What policies did, since the daemon started.", "counter")
    for place, ((policy, action, outcome), count) in enumerate(sorted(counted.items())):
        named = policy if place < MOST_ACTIONS else OTHERS
        found.add(count, policy=named, action=action, outcome=outcome)
    return found.done()


def _waiting(facts: MetricFacts) -> Iterator[MetricFamily]:
    if facts.waiting is None:
        return
    yield _one("gpuguard_waiting_requests", "Requests that wait for devices.", len(facts.waiting))
    oldest = max((facts.now - since for _, since in facts.waiting), default=None)
    waited = None if oldest is None else max(0.0, round(oldest, 3))
    yield _one("gpuguard_waiting_oldest_seconds", "How long the oldest request has waited.", waited)
    spoken = namer(user for user, _ in facts.waiting)
    each = MetricSums("gpuguard_user_waiting_requests", "Requests of a user that wait.")
    for user, _ in facts.waiting:
        each.add(1, user=spoken(user))
    yield each.done()


@lru_cache(maxsize=2)
def _what_devices_are(identities: tuple[tuple[object, ...], ...]) -> tuple[MetricFamily, ...]:
    found = MetricSums("gpuguard_device_info", "What a device is; join it by uuid.")
    for identity in {each[0]: each for each in identities}.values():
        found.add(1, **dict(zip(_IDENTITY, identity, strict=True)))
    parent = _IDENTITY.index("parent_uuid")
    count = sum(each[parent] is None for each in identities)
    return found.done(), _one("gpuguard_devices", "Devices of this machine; parts of divided ones do not count.", count)


def _device_values(facts: MetricFacts, snapshot: Snapshot) -> Iterator[MetricFamily]:
    if not snapshot.devices:
        return
    uuids = tuple([one.uuid for one in snapshot.devices])
    columns = dict(zip(_MEASURED, zip(*map(_measured, snapshot.devices), strict=True), strict=True))
    errors = zip(*map(_errors_of, facts.errors or snapshot.devices), strict=True)
    columns.update(zip(ERRORS, errors, strict=True))
    for name, kind, text, source, factor in DEVICE_VALUES:
        yield _numbers(f"gpuguard_device_{name}", kind, text, factor, uuids, columns[source])
    for suffix, text, place in (
        ("ecc_errors_total", "Errors of the memory since the driver was loaded.", 1),
        ("ecc_lifetime_errors_total", "Errors of the memory since the device was built.", 2),
    ):
        yield _errors(f"gpuguard_device_{suffix}", text, uuids, *(columns[row[place]] for row in _ECC))


@lru_cache(maxsize=64)
def _numbers(
    name: str, kind: str, text: str, factor: float, uuids: tuple[str, ...], column: tuple[object, ...]
) -> MetricFamily:
    found = ((uuid, number(value, factor)) for uuid, value in zip(uuids, column, strict=True))
    return MetricFamily(name, kind, text, {labels(uuid=uuid): value for uuid, value in found if value is not None})


@lru_cache(maxsize=4)
def _errors(name: str, text: str, uuids: tuple[str, ...], *columns: tuple[object, ...]) -> MetricFamily:
    counted = {
        labels(uuid=uuid, error=row[0]): number(value)
        for uuid, *values in zip(uuids, *columns, strict=True)
        for row, value in zip(_ECC, values, strict=True)
    }
    return MetricFamily(name, "counter", text, {key: value for key, value in counted.items() if value is not None})


def _device_words(facts: MetricFacts) -> Iterator[MetricFamily]:
    """What is no number of the driver's: state, health, why it is slow, how many processes."""
    found = tuple({each.device.uuid: each for each in facts.uses}.values())
    uuids = tuple([use.device.uuid for use in found])
    yield _states(uuids, tuple([use.state for use in found]))
    problems = tuple([use.device.problems for use in found])
    healthy = tuple([None if each is None else not each for each in problems])
    text = "1 when nothing is wrong with the device."
    yield _numbers("gpuguard_device_healthy", "gauge", text, 1, uuids, healthy)
    yield _words("gpuguard_device_problem", "1 for each thing that is wrong with the device.", uuids, problems,
                 "problem", _PROBLEMS)  # fmt: skip
    yield _words("gpuguard_device_throttled", "1 for each reason for which the clocks are held down.", uuids,
                 tuple([use.device.throttle_reasons for use in found]), "reason", _THROTTLES)  # fmt: skip
    running = tuple([len(use.processes) if use.processes is not None and use.device.processes_plausible else None
                     for use in found])  # fmt: skip
    yield _numbers("gpuguard_device_processes", "gauge", "Processes on the device.", 1, uuids, running)
    if (out := facts.quarantined) is not None:
        quarantined = tuple([use.device.uuid in out or use.device.parent_uuid in out for use in found])
        text = "1 when the device is out of service."
        yield _numbers("gpuguard_device_quarantined", "gauge", text, 1, uuids, quarantined)


@lru_cache(maxsize=2)
def _states(uuids: tuple[str, ...], states: tuple[str, ...]) -> MetricFamily:
    found = {
        labels(uuid=uuid, state=each): float(each == state)
        for uuid, state in zip(uuids, states, strict=True)
        for each in device_state.STATES
    }
    return MetricFamily(
        "gpuguard_device_state", "gauge", "1 for the state that the device is in, 0 for the others.", found
    )


@lru_cache(maxsize=4)
def _words(
    name: str, text: str, uuids: tuple[str, ...], column: tuple[tuple[str, ...] | None, ...], called: str,
    known: frozenset[str],
) -> MetricFamily:  # fmt: skip
    """1 for each word of a device, where those that are not *known* are one."""
    found = MetricSums(name, text)
    for uuid, words in zip(uuids, column, strict=True):
        for word in {each if each in known else "other" for each in words or ()}:
            found.add(1, **{"uuid": uuid, called: word})
    return found.done()


def _claims(facts: MetricFacts, snapshot: Snapshot) -> Iterator[MetricFamily]:
    if not claims_readable(snapshot):
        return
    held = MetricSums("gpuguard_device_claims", "Claims of a user on a device.")
    idle = MetricSums("gpuguard_device_idle_claims", "Those of them under which nothing works.")
    jobs = MetricSums("gpuguard_device_slurm_job", "1 for the Slurm job that has the device.")
    totals = device_state.user_totals(facts.uses)
    spoken = namer(row.user for row in totals)
    for use in facts.uses:
        named: set[str] = set()
        for claim in use.claims:
            held.add(1, uuid=use.device.uuid, user=spoken(claim.user))
            idle.add(claim.idle, uuid=use.device.uuid, user=spoken(claim.user))
            job = job_of_claim(claim.record.id)
            if job and (job in named or len(named) < MOST_JOBS):
                named.add(job)
                jobs.add(1, uuid=use.device.uuid, user=spoken(claim.user), job=job)
    yield from (each.done() for each in (held, idle, jobs))
    users = tuple([spoken(row.user) for row in totals])
    for name, text, source in _USER_VALUES:
        yield _per_user(f"gpuguard_user_{name}", text, users, tuple([getattr(row, source) for row in totals]))
    yield _unclaimed(facts.uses, spoken)


_USER_VALUES = (  # name behind gpuguard_user_, help, field of UserTotal
    ("claimed_devices", "Devices that a user has claimed.", "claimed"),
    ("idle_devices", "Devices that a user has claimed, and nothing works there.", "idle"),
    ("used_devices", "Devices on which a user has processes.", "devices"),
    ("memory_used_bytes", "Memory that a user's processes have on devices.", "memory_used"),
)


@lru_cache(maxsize=8)
def _per_user(name: str, text: str, users: tuple[str, ...], column: tuple[int | None, ...]) -> MetricFamily:
    each = MetricSums(name, text)
    for user, value in zip(users, column, strict=True):
        each.add(value, user=user)
    return each.done()


def _unclaimed(found: Iterable[DeviceUse], spoken: Callable[[str | None], str]) -> MetricFamily:
    strangers: set[tuple[str | None, str]] = set()
    for use in found:
        for running in (use.processes or ()) if use.device.processes_plausible else ():
            stranger = running.process.user, use.device.uuid
            if running.claim is None and stranger not in strangers and computes(running.process):
                strangers.add(stranger)
    each = MetricSums("gpuguard_user_unclaimed_devices", "Devices that a user computes on without a claim.")
    for user, _ in sorted({(spoken(user), uuid) for user, uuid in strangers}):
        each.add(1, user=user)
    return each.done()


def namer(users: Iterable[str | None]) -> Callable[[str | None], str]:
    """How each of *users* is called in labels: the first MOST_USERS by name, those behind them OTHERS."""
    known = dict.fromkeys(user for user in users if user is not None)
    nameless = [user for user in known if user.isdecimal()][:MOST_NAMELESS]
    told = frozenset([*(user for user in known if not user.isdecimal()), *nameless][:MOST_USERS])
    return lambda user: NOBODY_KNOWN if user is None else label(user) if user in told else OTHERS
