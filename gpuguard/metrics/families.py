"""Families of numbers made from facts, in base units and under our own names.

What is unknown is absent, never 0.  No label holds a pid, and at most MAX_USERS names of users appear, so that a
machine never has more than a few series.  exposition and influx write them out; compat has the names of other programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuguard import device_state
from gpuguard.clusters.slurm_jobs import job_of_claim
from gpuguard.device_state import claims_readable, computes
from gpuguard.metrics.facts import ECC_FIELDS, RARE_FIELDS, MetricFacts
from gpuguard.model import DEVICE_FIELDS, Device, Snapshot
from gpuguard.sanitize import neutralise

MAX_USERS = 100  # the others are summed up
MAX_NAMELESS = 10  # of them without a name: a user with user namespaces has 65536 such uids
MAX_JOBS = 4  # of one device: a user may make hundreds of claims, with any ids
MAX_ACTIONS = 500  # series of gpuguard_policy_actions_total
OTHERS, UNKNOWN_USER = "(others)", "(unknown)"  # no name of a user has parentheses
MAX_LABEL = 128  # characters

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class MetricFamily:
    """The numbers of one name, with its meaning and a value for each set of labels."""

    name: str
    kind: str  # gauge, counter
    help: str
    values: Mapping[Labels, float]


_FACTORS = {"%": 0.01, "MHz": 1e6}  # by unit: to a ratio, to hertz
# name after gpuguard_device_, kind, help, field of Device, factor
DEVICE_VALUES: tuple[tuple[str, str, str, str, float], ...] = tuple(
    (name, "counter" if name.endswith("_total") else "gauge", text, field.name, _FACTORS.get(field.unit, 1))
    for field in DEVICE_FIELDS.values()
    if field.metric
    for name, text in [field.metric]
)
_IDENTITY = ("uuid", "index", "name", "pci_bus_id", "parent_uuid", "mig_profile")
_THROTTLES = frozenset(
    ("applications_clocks_setting", "display_clock_setting", "gpu_idle", "hw_power_brake_slowdown", "hw_slowdown",
     "hw_thermal_slowdown", "sw_power_cap", "sw_thermal_slowdown", "sync_boost")
)  # fmt: skip
# Other problems contain numbers or the words of an administrator.
_PROBLEMS = frozenset(
    ("lost", "unresponsive", "reset required", "page retirement pending", "row remap pending", "row remap failed")
)
_GAPS = frozenset({"claims", "device", *Device.__match_args__})


def metric_families(facts: MetricFacts) -> list[MetricFamily]:
    """Return every family that has a value, in a fixed order."""
    families = [*_health(facts), *_waiting(facts), *_jobs(facts)]
    if facts.snapshot:
        families += _identity(facts.snapshot)
    if facts.snapshot and facts.current:
        families += [*_device_values(facts.snapshot), *_device_words(facts), *_claims(facts, facts.snapshot)]
    return [family for family in families if family.values]


def label(text: object) -> str:
    """Make *text* the value of a label: one line of visible characters, at most MAX_LABEL of them."""
    return neutralise(str(text))[:MAX_LABEL]


def labels(**named: object) -> Labels:
    """Return the labels sorted, as a key, without those that are None."""
    return tuple(sorted((name, label(value)) for name, value in named.items() if value is not None))


def number(value: object, factor: float = 1) -> float | None:
    """Return *value* times *factor*, or None if it is unknown or not a finite number."""
    if not isinstance(value, (int, float)):
        return None
    result = float(value * factor) if factor == 1 else round(value * factor, 9)
    return result if math.isfinite(result) else None


def family(name: str, help_text: str, rows: Iterable[tuple[Labels, object]], kind: str = "gauge") -> MetricFamily:
    """Make a family.  Values with the same labels are added up; unknown ones, and sums with one, are left out."""
    sums: dict[Labels, float | None] = {}
    for key, value in rows:
        amount, before = number(value), sums.get(key, 0.0)
        sums[key] = None if amount is None or before is None else before + amount
    return MetricFamily(name, kind, help_text, {key: value for key, value in sums.items() if value is not None})


def _single(name: str, help_text: str, value: object, kind: str = "gauge", **named: object) -> MetricFamily:
    return family(f"gpuguard_{name}", help_text, [(labels(**named), value)], kind)


def _per_device(name: str, help_text: str, rows: Iterable[tuple[Device, object]], kind: str = "gauge") -> MetricFamily:
    values = [(labels(uuid=device.uuid), value) for device, value in rows]
    return family(f"gpuguard_device_{name}", help_text, values, kind)


def _per_user(name: str, help_text: str, rows: Iterable[tuple[str, object]]) -> MetricFamily:
    return family(f"gpuguard_user_{name}", help_text, [(labels(user=user), value) for user, value in rows])


def distinct(devices: Iterable[Device]) -> list[Device]:
    """Return *devices* with each uuid once, because a page that has a name and labels twice is refused as a whole."""
    return list({device.uuid: device for device in devices}.values())


def _by_policy(counts: Iterable[tuple[tuple[str, ...], int]], *others: str) -> list[tuple[Labels, int]]:
    """Return a row per count, whose keys are the policy and *others*; beyond MAX_ACTIONS rows no policy is named."""
    return [
        (labels(policy=policy if rank < MAX_ACTIONS else OTHERS, **dict(zip(others, values, strict=True))), count)
        for rank, ((policy, *values), count) in enumerate(sorted(counts))
    ]


def _health(facts: MetricFacts) -> Iterator[MetricFamily]:
    yield _single("build_info", "The version of gpuguard.", 1, version=facts.version)
    for name, text, value in (
        ("daemon_up", "1 when a daemon guards this machine.", facts.daemon_up),
        ("driver_up", "1 when the driver answered when it was asked last.", facts.driver_up),
        ("sample_interval_seconds", "Time between two samples of the daemon.", facts.interval),
        ("sample_failures_total", "Times that sampling began to fail since the daemon started.", facts.troubles),
        ("audit_failures_total", "Lines of the audit log that could not be written since the daemon started.",
         facts.unrecorded),
    ):  # fmt: skip
        yield _single(name, text, value, "counter" if name.endswith("_total") else "gauge")
    modes = [(labels(mode=mode), count) for mode, count in (facts.policies or {}).items()]
    yield family("gpuguard_policies", "Policies in force, by their mode.", modes)
    text = "Faults of the policy file: what it says is not in force as a whole while there are some."
    yield _single("policy_file_faults", text, facts.policy_faults)
    text = "Faults of line.yaml, the rules of the queue: the last good ones hold while there are some."
    yield _single("line_file_faults", text, facts.line_faults)
    text = "Conditions of policies that hold now, by how far they have come."
    yield family("gpuguard_policy_breaches", text, _by_policy((facts.breaches or {}).items(), "stage"))
    actions = _by_policy((facts.actions or {}).items(), "action", "outcome")
    yield family("gpuguard_policy_actions_total", "What policies did, since the daemon started.", actions, "counter")
    snapshot = facts.snapshot
    if not snapshot:
        return
    age = max(0.0, round(facts.now - snapshot.taken_at, 3))
    yield _single("sample_age_seconds", "How old the last sample is.", age)
    yield _single("sample_timestamp_seconds", "Unix time of the last sample.", snapshot.taken_at)
    yield _single(
        "driver_info", "Versions of the driver.", 1,
        driver=snapshot.driver_version, cuda=snapshot.cuda_version, nvml=snapshot.nvml_version,
        backend=snapshot.backend.partition(":")[0], simulated=str(snapshot.simulated).lower(),
    )  # fmt: skip
    gaps = [
        (labels(field=gap.field if gap.field in _GAPS else "other"), 1)
        for gap in snapshot.gaps
        if gap.field not in RARE_FIELDS  # these are read so rarely that the gap would come and go
    ]
    text = "GPUs of which a field could not be read, 1 for the machine."
    yield family("gpuguard_sample_gaps", text, gaps)


def _waiting(facts: MetricFacts) -> Iterator[MetricFamily]:
    if facts.waiting is None:
        return
    yield _single("waiting_requests", "Requests that wait for GPUs.", len(facts.waiting))
    oldest = max((facts.now - since for _, since in facts.waiting), default=None)
    waited = None if oldest is None else max(0.0, round(oldest, 3))
    yield _single("waiting_oldest_seconds", "How long the oldest request has waited.", waited)
    name_of = user_labels(user for user, _ in facts.waiting)
    requests = [(name_of(user), 1) for user, _ in facts.waiting]
    yield _per_user("waiting_requests", "Requests of a user that wait.", requests)


def _jobs(facts: MetricFacts) -> Iterator[MetricFamily]:
    if facts.jobs is None:
        return
    name_of = user_labels(job.user for job in facts.jobs)
    tasks = [(labels(user=name_of(job.user), state=job.state), job.tasks) for job in facts.jobs]
    yield family("gpuguard_user_submitted_tasks", "Tasks of jobs of `gpuguard submit` that wait or run.", tasks)


def _identity(snapshot: Snapshot) -> Iterator[MetricFamily]:
    infos = [
        (labels(**{name: getattr(device, name) for name in _IDENTITY}), 1) for device in distinct(snapshot.devices)
    ]
    yield family("gpuguard_device_info", "What a GPU is; join it by uuid.", infos)
    count = sum(device.parent_uuid is None for device in snapshot.devices)
    yield _single("devices", "GPUs of this machine; parts of divided ones do not count.", count)


def _device_values(snapshot: Snapshot) -> Iterator[MetricFamily]:
    devices = distinct(snapshot.devices)
    for name, kind, text, field, factor in DEVICE_VALUES:
        yield _per_device(name, text, [(device, number(getattr(device, field), factor)) for device in devices], kind)
    for name, text, column in (
        ("ecc_errors_total", "Errors of the memory since the driver was loaded.", 1),
        ("ecc_lifetime_errors_total", "Errors of the memory since the GPU was built.", 2),
    ):
        values = [
            (labels(uuid=device.uuid, error=row[0]), number(getattr(device, row[column])))
            for device in devices
            for row in ECC_FIELDS
        ]
        yield family(f"gpuguard_device_{name}", text, values, "counter")


def _device_words(facts: MetricFacts) -> Iterator[MetricFamily]:
    """Yield what is not a number from the driver: state, health, reasons for throttling, how many processes."""
    on_devices = list({use.device.uuid: use for use in facts.uses}.values())

    states = [
        (labels(uuid=use.device.uuid, state=state), use.plain_state == state)
        for use in on_devices
        for state in device_state.STATES
    ]
    yield family("gpuguard_device_state", "1 for the state that the GPU is in, 0 for the others.", states)
    for name, text, field, label_name, known in (
        ("problem", "1 for each thing that is wrong with the GPU.", "problems", "problem", _PROBLEMS),
        (
            "throttled",
            "1 for each reason for which the clocks are held down.",
            "throttle_reasons",
            "reason",
            _THROTTLES,
        ),
    ):
        words = [
            (labels(uuid=use.device.uuid, **{label_name: word}), 1)
            for use in on_devices
            for word in {word if word in known else "other" for word in getattr(use.device, field) or ()}
        ]
        yield family(f"gpuguard_device_{name}", text, words)
    healthy = [(use.device, None if use.device.problems is None else not use.device.problems) for use in on_devices]
    yield _per_device("healthy", "1 when nothing is wrong with the GPU.", healthy)
    running = [
        (use.device, len(use.processes) if use.processes is not None and use.device.processes_plausible else None)
        for use in on_devices
    ]
    yield _per_device("processes", "Processes on the GPU.", running)
    if (out := facts.quarantined) is not None:
        quarantined = [(use.device, use.device.uuid in out or use.device.parent_uuid in out) for use in on_devices]
        yield _per_device("quarantined", "1 when the GPU is out of service.", quarantined)


def _claims(facts: MetricFacts, snapshot: Snapshot) -> Iterator[MetricFamily]:
    if not claims_readable(snapshot):
        return
    totals = device_state.user_totals(facts.uses)
    name_of = user_labels(total.user for total in totals)
    held, idle, jobs = [], [], []
    for use in facts.uses:
        named: set[str] = set()
        for claim in use.claims:
            whose = {"uuid": use.device.uuid, "user": name_of(claim.user)}
            held.append((labels(**whose), 1))
            idle.append((labels(**whose), claim.idle))
            job = job_of_claim(claim.record.id)
            if job and (job in named or len(named) < MAX_JOBS):
                named.add(job)
                jobs.append((labels(**whose, job=job), 1))
    yield family("gpuguard_device_claims", "Claims of a user on a GPU.", held)
    yield family("gpuguard_device_idle_claims", "Those of them under which nothing works.", idle)
    yield family("gpuguard_device_slurm_job", "1 for the Slurm job that has the GPU.", jobs)
    for name, text, field in _USER_VALUES:
        yield _per_user(name, text, [(name_of(total.user), getattr(total, field)) for total in totals])
    unclaimed = {
        (name_of(running.process.user), use.device.uuid)
        for use in facts.uses
        if use.device.processes_plausible
        for running in use.processes or ()
        if running.claim is None and computes(running.process, use.device)
    }
    text = "GPUs that a user computes on without a claim."
    yield _per_user("unclaimed_devices", text, [(user, 1) for user, _ in sorted(unclaimed)])


_USER_VALUES = (  # name after gpuguard_user_, help, field of UserTotal
    ("claimed_devices", "GPUs that a user has claimed.", "claimed"),
    ("idle_devices", "GPUs that a user has claimed, and nothing works there.", "idle"),
    ("used_devices", "GPUs on which a user has processes.", "devices"),
    ("memory_used_bytes", "Memory that a user's processes have on GPUs.", "memory_used"),
)


def user_labels(users: Iterable[str | None]) -> Callable[[str | None], str]:
    """Return a function that names users in labels: the first MAX_USERS by their names, the others as OTHERS."""
    known = dict.fromkeys(user for user in users if user is not None)
    nameless = [user for user in known if user.isdecimal()][:MAX_NAMELESS]
    named = frozenset([*(user for user in known if not user.isdecimal()), *nameless][:MAX_USERS])
    return lambda user: UNKNOWN_USER if user is None else label(user) if user in named else OTHERS
