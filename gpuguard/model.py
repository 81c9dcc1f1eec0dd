"""Values: a machine at one moment, and what rules find there.  They are frozen, in base units, and None if unknown.

The units are bytes, percent (0..100), degrees Celsius, watts, joules, MHz and seconds.  Does not read anything: see
backends.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuguard.policies.rule import RuleKind

# The groups of fields that a sample can read.  A caller names the groups that it needs, and no driver call is made for
# the others.  Each field of Device names its group.  The numbers are driver calls per device; index and uuid are always
# read.
MEMORY = "memory"  # 1
PROCESSES = "processes"  # 1..3
IDLE_PROCESSES = "idle_processes"  # PROCESSES, but not where memory_used says already that the device is busy
PROCESS_DETAILS = "process_details"  # 1    user, command etc. of a process (from /proc) and its utilization
UTILIZATION = "utilization"  # 1..2
HEALTH = "health"  # ~4   expands MIG instances
MODEL = "model"  # 5, once
THERMAL = "thermal"  # 1    fan speed and thresholds are kept
POWER = "power"  # 2
CLOCKS = "clocks"  # 4
ECC = "ecc"  # 9
MEDIA = "media"  # 4
PCIE = "pcie"  # 4    of which the throughput takes 20 ms in each direction
NVLINK = "nvlink"  # up to 18
NVLINK_FLOW = "nvlink_flow"  # 1    unknown in the first sample, which has none before it to compare with
TOPOLOGY = "topology"  # Snapshot.topology: one call per pair of devices
SLOW_GROUPS = frozenset({PCIE})  # a driver needs 40 ms for each device
# This is no group.  With it a backend may leave out of WHO_FIELDS what the text of `gpuguard who` does not show, and
# return a temperature and a power draw that were read a moment ago.
BRIEF = "brief"

# From so many bytes in use on IDLE_PROCESSES does not read the list of processes, because no idle device holds as much.
BUSY_MEMORY = 2 * 2**30
# Memory that an idle device may still hold.  NVIDIA's resiliency extension also takes memory as freed below 512 MB.
IDLE_TOLERANCE = 512 * 2**20
# Memory of a device that each user's programs that draw may hold before they count as use.  A desktop with a browser
# and a video call has 1 to 2 GB.  Programs that compute by Vulkan or OpenGL are listed in the same way, and may hold
# any amount.
DESKTOP_MEMORY = 2 * 2**30
MOST_DESKTOP_MEMORY = 8 * 2**30  # the most that a site may set
SLOTS = 8  # claims that can share one device: each holds one lock of as many, so the kernel bounds their number
DRAWING = frozenset({"graphics", "compute+graphics"})  # the kinds of processes that draw

SELECT_FIELDS = frozenset({MEMORY})  # the processes are read of the chosen devices alone: see lock.Allocator
VERIFY_FIELDS = frozenset({MEMORY, PROCESSES, HEALTH, UTILIZATION})
WHO_FIELDS = frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, UTILIZATION, HEALTH, MODEL, THERMAL, POWER})
TEXT_FIELDS = WHO_FIELDS | {BRIEF}
ALL_FIELDS = WHO_FIELDS | {CLOCKS, ECC, MEDIA, PCIE, NVLINK, NVLINK_FLOW, TOPOLOGY}

ProcessIdentity = tuple[int, float]  # pid, start_time of a GpuProcess: no other process of this boot has both


@dataclass(frozen=True)
class GpuProcess:
    """A process on a device.  Its identity is (pid, start_time), never the pid alone."""

    pid: int
    memory_used: int | None = None  # bytes
    kind: str = "compute"  # compute, graphics, compute+graphics, mps
    start_time: float | None = None  # seconds since boot, /proc/PID/stat field 22
    uid: int | None = None
    user: str | None = None
    ended: bool = False  # the process has ended, but the driver still lists it
    utilization: float | None = None  # percent of the SMs
    memory_utilization: float | None = None  # percent of the time in which it read or wrote memory
    encoder_utilization: float | None = None  # percent
    decoder_utilization: float | None = None
    command: tuple[str, ...] | None = None
    executable: str | None = None
    container: str | None = None  # id, from /proc/PID/cgroup
    working_directory: str | None = None
    conda_environment: str | None = None


@dataclass(frozen=True)
class DeviceField:
    """The facts about a field of Device, wherever it is read, checked, recorded, shown or judged.

    How a backend reads the field is defined in that backend: NVML's call in backends/nvml_fields.py, the place in
    nvidia-smi's output in backends/smi.py.
    """

    name: str
    type: str  # as it is written in Device: "float | None"
    group: str  # with which it is read
    unit: str = ""  # B, B/s, %, C, W, J or MHz; "" for a plain number, a text or a truth value
    plausible: tuple[float, float] | None = None  # a number outside this range is no reading
    of_board: bool = False  # a MIG instance has the value of its GPU
    harmless: bool = False  # a text that reveals nothing about users or this particular machine; numbers never do
    metric: tuple[str, str] | None = None  # its name after gpuguard_device_, and its help
    query: tuple[str, str] | None = None  # nvidia-smi's name for it, and its help in `gpuguard query`
    expression: tuple[str, str] | None = None  # its name in the rule `expression`, and its help there

    @property
    def is_number(self) -> bool:
        """Whether the field is a number, and no truth value."""
        return self.type.startswith(("int", "float"))

    def number(self, value: float) -> float:
        """Convert *value* to the type of the field."""
        return int(value) if self.type.startswith("int") else float(value)

    def holds(self, value: float | str) -> bool:
        """Return whether a driver that works can report *value*."""
        return self.plausible is None or self.plausible[0] <= value <= self.plausible[1]  # type: ignore[operator]

    @property
    def masked(self) -> bool:
        """Whether a recording that is given to others must not contain the field unchanged."""
        return not (self.harmless or self.is_number or self.type.startswith("bool"))


def read_with(
    group: str, unit: str = "", plausible: tuple[float, float] | None = None, default: Any = None, **facts: Any
) -> Any:
    """Make a field of Device that is *default* until *group* is read; the other arguments are those of DeviceField.

    A field that is new has the *default* that all devices of before have.  It does not travel then, so that a program
    from before an upgrade, which does not know it, understands the worker of today.
    """
    return field(default=default, metadata={"group": group, "unit": unit, "plausible": plausible, **facts})


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG instance of one (then parent_uuid is set)."""

    index: int
    uuid: str
    name: str | None = read_with(
        MODEL, harmless=True, query=("name", "official name of the product"), expression=("model", "name of the GPU")
    )
    pci_bus_id: str | None = read_with(
        MODEL, of_board=True, query=("pci.bus_id", "as domain:bus:device.function, in hex")
    )
    minor_number: int | None = read_with(MODEL, "", (0, 2**20), of_board=True)
    numa_node: int | None = read_with(MODEL, of_board=True)
    # As in /proc/PID/status Cpus_allowed_list: "0-15,32-47".
    cpu_affinity: str | None = read_with(MODEL, of_board=True, harmless=True)
    integrated: bool | None = read_with(
        MODEL,
        default=False,
        of_board=True,
        query=("integrated", "Yes or No: it is part of the CPU and has no memory of its own"),
    )
    vendor: str = "nvidia"  # a row of vendors.VENDORS
    ordinal: int | None = None  # its index among its vendor's devices; None if no other vendor's come before it

    memory_total: int | None = read_with(
        MEMORY, "B", metric=("memory_total_bytes", "Memory of the GPU."), query=("memory.total", "installed"),
        expression=("device_memory_total", "of the GPU"),
    )  # fmt: skip
    # Without memory_reserved if the driver tells them apart.
    memory_used: int | None = read_with(
        MEMORY, "B", metric=("memory_used_bytes", "Memory in use."), query=("memory.used", "by contexts"),
        expression=("device_memory_used", "by all processes"),
    )  # fmt: skip
    memory_free: int | None = read_with(
        MEMORY, "B", metric=("memory_free_bytes", "Memory that is free."), query=("memory.free", "free"),
        expression=("device_memory_free", "of the GPU"),
    )  # fmt: skip
    # Kept by driver and firmware; None if it is contained in memory_used.
    memory_reserved: int | None = read_with(
        MEMORY, "B", metric=("memory_reserved_bytes", "Memory that driver and firmware keep."),
        query=("memory.reserved", "by driver and firmware"),
    )  # fmt: skip
    # Its memory is the host's: memory_free is what the host can still give.
    memory_shared_with_host: bool | None = read_with(
        MEMORY, default=False, of_board=True, metric=("memory_shared_with_host", "1 when its memory is the host's."),
        query=("memory.shared_with_host", "Yes or No: it is the host's"),
    )  # fmt: skip
    processes: tuple[GpuProcess, ...] | None = read_with(PROCESSES)  # None if the driver gives no list
    processes_plausible: bool = True  # if False, no action may rely on this list
    desktop_memory: int = DESKTOP_MEMORY  # bytes: see device_state.beyond_desktop
    # Percent of the time in which a kernel ran, as the mean of the driver's sample buffer.
    utilization: float | None = read_with(
        UTILIZATION, "%", (0, 100), metric=("utilization_ratio", "Share of time in which a kernel ran, 0 to 1."),
        query=("utilization.gpu", "time in which a kernel ran"), expression=("utilization", "of the GPU"),
    )  # fmt: skip
    memory_utilization: float | None = read_with(
        UTILIZATION, "%", (0, 100), metric=("memory_utilization_ratio", "Share of time in which memory was used."),
        query=("utilization.memory", "time in which memory was read or written"),
        expression=("memory_utilization", "of its memory's bandwidth"),
    )  # fmt: skip

    # None if not read, () if healthy, otherwise "lost", "reset required", ...
    problems: tuple[str, ...] | None = read_with(HEALTH)
    # default, exclusive_process, prohibited
    compute_mode: str | None = read_with(
        HEALTH, of_board=True, harmless=True, query=("compute_mode", "Default, Exclusive_Process or Prohibited")
    )
    mig_mode: bool | None = read_with(HEALTH, of_board=True, query=("mig.mode.current", "Enabled or Disabled"))
    # The driver has switched it off until it is used.  Its sensors are not read, because that could wake it.
    asleep: bool | None = read_with(
        HEALTH, default=False, of_board=True,
        metric=("asleep", "1 while its driver has switched it off until it is used."),
        query=("asleep", "Yes or No: its driver has switched it off until it is used"),
    )  # fmt: skip
    parent_uuid: str | None = None  # of a MIG instance
    mig_profile: str | None = None  # "3g.40gb"
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    temperature: float | None = read_with(
        THERMAL, "C", (0, 130), of_board=True, metric=("temperature_celsius", "Temperature of the GPU."),
        query=("temperature.gpu", "of the core, degrees C"), expression=("temperature", "of the GPU"),
    )  # fmt: skip
    temperature_slowdown: float | None = read_with(
        THERMAL, "C", (1, 150), of_board=True,
        metric=("slowdown_temperature_celsius", "Temperature from which on it slows down."),
        expression=("temperature_slowdown", "at which it slows down"),
    )  # fmt: skip
    temperature_shutdown: float | None = read_with(
        THERMAL, "C", (1, 150), of_board=True,
        metric=("shutdown_temperature_celsius", "Temperature at which it switches off."),
    )  # fmt: skip
    fan_speed: float | None = read_with(
        THERMAL, "%", (0, 100), metric=("fan_speed_ratio", "Speed of the fans, 0 to 1."),
        query=("fan.speed", "of what is possible"),
    )  # fmt: skip
    power_draw: float | None = read_with(
        POWER, "W", (0, 10_000), metric=("power_draw_watts", "Power that the GPU draws."), query=("power.draw", "now"),
        expression=("power_draw", "of the GPU"),
    )  # fmt: skip
    power_limit: float | None = read_with(
        POWER, "W", (0, 10_000), metric=("power_limit_watts", "Power that it may draw."),
        query=("power.limit", "which the driver keeps to"), expression=("power_limit", "of the GPU"),
    )  # fmt: skip
    total_energy: float | None = read_with(
        POWER, "J", (0, 2**53), metric=("energy_joules_total", "Energy since the driver was loaded.")
    )

    clock_sm: int | None = read_with(
        CLOCKS, "MHz", (0, 10_000), metric=("clock_sm_hertz", "Clock of the SMs."),
        query=("clocks.current.sm", "of the multiprocessors"),
    )  # fmt: skip
    clock_sm_max: int | None = read_with(
        CLOCKS, "MHz", (1, 10_000), metric=("clock_sm_max_hertz", "Highest clock of the SMs."),
        query=("clocks.max.sm", "of the multiprocessors, at most"),
    )  # fmt: skip
    clock_memory: int | None = read_with(
        CLOCKS, "MHz", (0, 50_000), metric=("clock_memory_hertz", "Clock of the memory."),
        query=("clocks.current.memory", "of the memory"),
    )  # fmt: skip
    clock_memory_max: int | None = read_with(
        CLOCKS, "MHz", (1, 50_000), metric=("clock_memory_max_hertz", "Highest clock of the memory."),
        query=("clocks.max.memory", "of the memory, at most"),
    )  # fmt: skip
    pstate: int | None = read_with(
        CLOCKS, "", (0, 15), metric=("performance_state", "P-state: 0 is the fastest."),
        query=("pstate", "P0 is the fastest, P15 the slowest"),
    )  # fmt: skip
    throttle_reasons: tuple[str, ...] | None = read_with(CLOCKS, harmless=True)
    persistence_mode: bool | None = read_with(
        CLOCKS, metric=("persistence_mode", "1 when the driver stays loaded."),
        query=("persistence_mode", "Enabled or Disabled"),
    )  # fmt: skip
    # A desktop is set up on it, with or without a monitor.
    display_active: bool | None = read_with(
        CLOCKS, query=("display_active", "Enabled or Disabled: a desktop is set up on it")
    )

    ecc_mode: bool | None = read_with(ECC, query=("ecc.mode.current", "Enabled or Disabled"))
    ecc_corrected_volatile: int | None = read_with(
        ECC, "", (0, 2**53), query=("ecc.errors.corrected.volatile.total", "since the driver was loaded")
    )
    ecc_uncorrected_volatile: int | None = read_with(
        ECC, "", (0, 2**53), query=("ecc.errors.uncorrected.volatile.total", "since the driver was loaded")
    )
    ecc_corrected_aggregate: int | None = read_with(
        ECC, "", (0, 2**53), query=("ecc.errors.corrected.aggregate.total", "since the GPU was made")
    )
    ecc_uncorrected_aggregate: int | None = read_with(
        ECC, "", (0, 2**53), query=("ecc.errors.uncorrected.aggregate.total", "since the GPU was made")
    )
    retired_pages: int | None = read_with(
        ECC, "", (0, 10**6), metric=("retired_pages", "Pages of memory that were retired.")
    )
    # For correctable and uncorrectable errors.
    remapped_rows: int | None = read_with(
        ECC, "", (0, 10**6), metric=("remapped_rows", "Rows of memory that were remapped.")
    )
    remapped_rows_uncorrected: int | None = read_with(ECC, "", (0, 10**6))

    clock_graphics: int | None = read_with(MEDIA, "MHz", (0, 10_000), query=("clocks.current.graphics", "of graphics"))
    clock_video: int | None = read_with(
        MEDIA, "MHz", (0, 10_000), query=("clocks.current.video", "of the video encoder and decoder")
    )
    encoder_utilization: float | None = read_with(
        MEDIA, "%", (0, 100), query=("utilization.encoder", "of the video encoder")
    )
    decoder_utilization: float | None = read_with(
        MEDIA, "%", (0, 100), query=("utilization.decoder", "of the video decoder")
    )

    pcie_generation: int | None = read_with(
        PCIE, "", (1, 10), query=("pcie.link.gen.current", "generation of the link now")
    )
    pcie_width: int | None = read_with(PCIE, "", (1, 32), query=("pcie.link.width.current", "lanes of the link now"))
    pcie_tx: float | None = read_with(PCIE, "B/s", (0, 10**12))
    pcie_rx: float | None = read_with(PCIE, "B/s", (0, 10**12))
    # (link number, pci bus id of the other end), active only
    nvlink_links: tuple[tuple[int, str], ...] | None = read_with(NVLINK)
    nvlink_tx: float | None = read_with(NVLINK_FLOW, "B/s", (0, 10**13))  # over all links, mean since the last sample
    nvlink_rx: float | None = read_with(NVLINK_FLOW, "B/s", (0, 10**13))
    # (link number, tx, rx) of each link that reports them
    nvlink_flow: tuple[tuple[int, float, float], ...] | None = read_with(NVLINK_FLOW, harmless=True)

    @property
    def number(self) -> int:
        """The number that its vendor's variables use for it: its index among the devices of that vendor."""
        return self.index if self.ordinal is None else self.ordinal

    @property
    def label(self) -> str:
        """The name that people use: ``"3"``, or for a MIG instance of GPU 3 ``"3.1"``, with its GPU instance id."""
        if self.parent_uuid is None:
            return str(self.index)
        return f"{self.index}.{'?' if self.gpu_instance_id is None else self.gpu_instance_id}"


# Every field of Device that is read with a group, in the order of the class.
DEVICE_FIELDS: Mapping[str, DeviceField] = {
    field.name: DeviceField(field.name, str(field.type), **field.metadata) for field in fields(Device) if field.metadata
}
GROUPED_FIELDS: Mapping[str, tuple[str, ...]] = {
    group: tuple(field.name for field in DEVICE_FIELDS.values() if field.group == group)
    for group in dict.fromkeys(field.group for field in DEVICE_FIELDS.values())
}
OF_THE_BOARD = tuple(field.name for field in DEVICE_FIELDS.values() if field.of_board)

# The reasons of gaps that stay however long you wait: their keys, and words of nvidia-smi.
_NEVER_TOLD = frozenset({
    "nvml.not_supported", "nvml.not_in_driver", "nvml.deprecated", "smi.not_told",
    "sim.not_in_model", "sim.not_told", "sim.no_process_list", "mthreads.no_list", "drm.not_supported",
    "amd.of_the_whole",
    "[not supported]", "n/a", "[n/a]", "not supported",
})  # fmt: skip

_HIDDEN_FROM_USER = frozenset({"drm.hidden", "drm.held_by"})


@dataclass(frozen=True)
class Gap:
    """A field that could not be read, and why.  device is a uuid, or None for the whole machine."""

    device: str | None
    field: str
    reason: str

    @property
    def is_lasting(self) -> bool:
        """Whether, as far as the reason says, the driver will not report the field later either."""
        return getattr(self.reason, "key", self.reason.lower()) in _NEVER_TOLD

    @property
    def is_of_this_user(self) -> bool:
        """Whether only this user is not told the field, for lack of a right to see it."""
        return getattr(self.reason, "key", "") in _HIDDEN_FROM_USER


DeviceAndGaps = tuple[Device, list[Gap]]  # as a backend reads a device: what is unknown of it, too


def devices_of(vendor: str) -> str:
    """Return the field of the gap that stands for all devices of *vendor*, none of which can be named."""
    return f"{vendor} devices"


@dataclass(frozen=True)
class ClaimRecord:
    """What a claim's record says; only *alive*, *uid* and *devices* are facts that the kernel vouches for."""

    id: str
    uid: int
    user: str
    devices: tuple[str, ...]  # uuids
    alive: bool = True
    pid: int | None = None  # of the wrapper
    since: float | None = None  # unix time
    note: str | None = None
    command: tuple[str, ...] | None = None
    holders: tuple[int, ...] = ()  # pids that really hold the lock, as far as this user may see them
    ends: float | None = None  # unix time of its time limit
    expected: float | None = None  # unix time at which it should end, judged by its user's jobs so far
    waited: float | None = None  # seconds in the queue, as its record says
    memory: int | None = None  # bytes of each device, if the claim shares them; None if it has them alone
    slots: tuple[str, ...] = ()  # the slot locks that it says it holds, if it shares its devices
    most: int | None = None  # how many claims at most share a device, this one included
    max_processes: int | None = None  # how many processes of other users it accepts, as its record says
    job: str | None = None  # of `gpuguard submit`, as its record says: "17.3"
    requeue: bool = False  # it stands in the queue again if a policy asks for that, as its record says
    written: float | None = None  # unix time of the last change of its record, which the kernel vouches for
    # Rules do not treat it as a claim: no process has its lock open, or processes of several users have it open and
    # there is no record.
    hidden: bool = False

    @property
    def short_id(self) -> str:
        """The id as people write it: see claims.ids."""
        return self.id

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from gpuguard.tables import html_of_claim  # for notebooks alone: the worker would load it for nothing

        return html_of_claim(self)


def claim_named(claims: Iterable[ClaimRecord], uid: int | None, claim: str | None) -> ClaimRecord | None:
    """Return the claim *claim* of the user *uid*, or None; another user may have a claim with the same id."""
    return next((record for record in claims if (record.uid, record.id) == (uid, claim)), None)


@dataclass(frozen=True)
class Snapshot:
    """A machine at one moment."""

    host: str
    backend: str
    taken_at: float  # unix time
    clock: float  # CLOCK_BOOTTIME, seconds
    devices: tuple[Device, ...]
    gaps: tuple[Gap, ...] = ()
    simulated: bool = False
    driver_version: str | None = None
    nvml_version: str | None = None
    cuda_version: str | None = None
    topology: tuple[tuple[str, str, str], ...] | None = None  # (uuid, uuid, NVLINK|PIX|PXB|PHB|NODE|SYS)
    claims: tuple[ClaimRecord, ...] = ()
    quarantined: tuple[tuple[str, str], ...] = ()  # uuid and why, joined by gpuguard.source; no part of a recording
    reserved: tuple[tuple[str, str], ...] = ()  # uuid and for which user until when, joined in the same way
    recorded: bool = False  # it was taken at another time and comes from a file: to look at, never to act on

    def device(self, uuid: str) -> Device | None:
        """Return the device with that uuid, or None."""
        return next((device for device in self.devices if device.uuid == uuid), None)

    def __str__(self) -> str:
        """Return what `print(gpuguard.who())` shows: a line for each device."""
        from gpuguard.tables import text_of_snapshot

        return text_of_snapshot(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        from gpuguard.tables import html_of_snapshot

        return html_of_snapshot(self)

    def updated(self, newer: Snapshot) -> Snapshot:
        """Return this snapshot with the devices that *newer* has read again, and with the gaps of *newer*.

        If a device turned out to be divided (MIG), its instances are inserted right behind it.
        """
        fresh = {device.uuid: device for device in newer.devices}
        devices = [fresh.pop(device.uuid, device) for device in self.devices]
        for device in fresh.values():
            family = [i for i, other in enumerate(devices) if device.parent_uuid in (other.uuid, other.parent_uuid)]
            devices.insert(family[-1] + 1 if family else len(devices), device)
        again = {device.uuid for device in newer.devices}
        gaps = tuple(gap for gap in self.gaps if gap.device not in again) + newer.gaps
        return replace(self, devices=tuple(devices), gaps=gaps, taken_at=newer.taken_at, clock=newer.clock)


# The words of findings, verdicts and events.  The audit log, policy files and messages between processes contain them,
# so none is ever renamed.  A record of another version may hold other words, which are shown as they are.
SubjectKind = Literal["process", "claim", "device", "user", "node"]
EndCause = Literal["signal", "requeue"]  # why the end of a job may not be its last word: see batch.states
ActionName = Literal[
    "log", "warn", "notify", "checkpoint", "terminate", "kill", "pause", "resume", "renice", "deny", "quarantine",
    "release", "cancel", "requeue", "run_hook",
]  # fmt: skip
EventKind = Literal[
    ActionName, "claim", "claim lost", "time limit", "limit", "stranger", "outside", "share", "keep", "reserve",
    "queue", "claims", "policy", "daemon", "watchdog", "note", "slurm",
]  # fmt: skip
NoteKind = Literal[
    "gap", "resampling", "late", "unknown", "exempt", "kept", "grace", "devices", "hours", "load", "cleared",
    "cancelled", "cooldown", "breaker", "untold", "nobody", "waiting",
]  # fmt: skip
# The outcome of an action.  The line "about to" is written before a signal, and another line follows only if the signal
# was not sent or did not arrive.  "not recorded": no line could be written, so nothing was done.  A message that is
# "logged" is in the log of the job; no user can have seen one that is "undelivered", and it delays no step after it.
ActionWord = Literal[
    "about to", "sent", "done", "dry run", "refused", "failed", "gone", "not permitted", "not recorded", "logged",
    "undelivered", "unkillable",
]  # fmt: skip
# "left": it stays stopped, or goes on, because that was not our decision.
PauseEnd = Literal["done", "gone", "left", "not permitted", "dry run"]
# "left to its processes": the claim lives on; "released": it was released while its last processes lived.
EndOfClaim = Literal[
    "settled", "memory did not settle", "driver unreachable", "interrupted", "could not be started",
    "left to its processes", "released", "given back", "job ended", "was not held any more",
]  # fmt: skip
EventOutcome = Literal[
    ActionWord, NoteKind, PauseEnd, EndOfClaim, "not done", "ended", "still there", "given up", "started", "stopped",
    "adopted", "handed over", "job goes on", "owner warned", "hidden", "held by several users",
    "others were there first", "seen to end", "process ended", "left out", "denied", "quarantined", "made",
    "requeued", "not put back", "slurm job", "busy", "request set back", "user set back", "not tended", "lock kept",
    "withdrawn",
    "no room", "in force", "faults mended", "names unknown", "names known", "devices unknown", "devices known",
    "will fail", "past unknown", "metrics served", "metrics not served", "driver unresponsive", "watching again",
    "writable again", "not set aside",
]  # fmt: skip
SignalName = NewType("SignalName", str)  # "SIGTERM", the outcome of a line about a signal to the user's own job


@dataclass(frozen=True)
class Subject:
    """The subject of a finding.  The name of its user is for people: two that differ in that alone are one subject."""

    kind: SubjectKind
    device: str | None = None  # uuid
    pid: int | None = None
    start_time: float | None = None  # seconds since boot; always given with a pid
    uid: int | None = None
    claim: str | None = None  # id
    user: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Finding:
    """A rule found that its condition holds for a subject, and why."""

    rule: str  # name in the table of rules
    subject: Subject
    why: str  # "uses 41.0GiB, 40.0GiB are allowed"
    processes: tuple[GpuProcess, ...] = ()  # that an action would target; () if the finding is about a device alone


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a policy wants done about a finding now.  This is only the decision: actions carries it out."""

    policy: str
    finding: Finding
    action: ActionName
    step: int  # number of the policy's step, 0 is the first
    since: float  # CLOCK_BOOTTIME when the condition began to hold
    enforce: bool = False  # the policy's own switch; the daemon has a second one
    rest: tuple[GpuProcess, ...] = ()  # of the claimed jobs of the finding's processes: a job ends whole
    options: tuple[tuple[str, float | int | str | bool | None], ...] = ()  # of the step: signal, message, ...
    next_action: ActionName | None = None  # for warnings: the action of the next step ...
    next_after: float | None = None  # ... and in how many seconds it comes, if nothing changes
    harm_action: ActionName | None = None  # the later step that takes most from the user ...
    harm_after: float | None = None  # ... and in how many seconds it comes, if nothing changes
    graced: float = 0.0  # seconds for which it was already put off, for a person in front of the process
    may_be_kept: bool = True  # whether the user can ask with `gpuguard keep` to be spared
    kind: RuleKind | None = field(default=None, compare=False)  # of the rule; None if the verdict comes from no rule


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line of the audit log: what was done, to which process, claim or device, and with which outcome."""

    time: float  # unix time
    kind: EventKind
    outcome: EventOutcome | SignalName
    user: str | None = None
    devices: tuple[str, ...] = ()  # uuids
    pid: int | None = None
    claim: str | None = None
    message: str | None = None
    facts: tuple[tuple[str, float | int | str | None], ...] = ()  # further numbers, their names carry the unit
    recorded: bool = True  # False if it could not be written to the log


@dataclass(frozen=True)
class ProcessStat:
    """The facts about a process that every user can read in /proc."""

    parent: int
    state: str  # R S D T t Z, as in /proc/PID/stat
    start_time: float | None = None  # seconds since boot
    inner_pid: int | None = None  # its pid in its own pid namespace
    uid: int | None = None  # read only of processes that hold or made a claim
    group: int = 0  # its process group; 0 if unknown or outside
    session: int = 0
    is_shell: bool = False  # judged by the name that its owner gave it
