"""The checks of `gpuguard doctor`: facts about a machine -> what is wrong and what to do.

Each check is a function and a row of CHECKS; None means that it does not apply here.  The facts come in as an argument,
so this file reads nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuguard.backends import RECORDED
from gpuguard.backends.nvml_calls import NEEDS_GLIBC
from gpuguard.claims.directory import ADMIN_DIRECTORY
from gpuguard.claims.disk_room import SCARCE, Room
from gpuguard.clusters.visible_devices import ORDER_VARIABLE, PCI_ORDER
from gpuguard.errors import BackendError, DriverMismatch, DriverNotFound, DriverUnresponsive
from gpuguard.model import Device, Snapshot
from gpuguard.sanitize import neutralise
from gpuguard.units import format_count
from gpuguard.views.text import Paint, table

OK, WARNING, FAULT = "ok", "warning", "fault"
_COLOURS = {OK: "green", WARNING: "yellow", FAULT: "bold red"}
_SIMULATE = "To try gpuguard without a GPU: `gpuguard sim start`, then give every command `--backend simulated`."


@dataclass(frozen=True)
class DoctorFacts:
    """What was found on the machine.  None: could not be told."""

    host: str
    backend: str
    uid: int
    error: BackendError | None = None  # why there is no snapshot
    snapshot: Snapshot | None = None
    answer_seconds: float | None = None  # until the driver had answered
    library_error: str | None = None  # of loading libnvidia-ml.so.1; None: it loads
    glibc: bool = True  # without it that library loads nowhere
    kernel_version: str | None = None  # of the loaded kernel module
    device_nodes: tuple[str, ...] = ()  # /dev/nvidia0 ...
    lock_path: str | None = None
    lock_owner: int | None = None  # None: anybody's files in a sticky directory
    lock_missing: bool = False
    lock_error: str | None = None
    lock_faults: tuple[str, ...] = ()  # of each device whose lock files this user cannot use, what is wrong
    keeper: int | None = None  # whose the lock files are, where the daemon alone gives the locks
    broker_error: str | None = None  # why it gives none
    daemon_fault: str | None = None  # what is wrong with the daemon's directory in lock_path
    line_path: str | None = None  # of the site's file for the queue, where there is one
    line_faults: tuple[str, ...] = ()  # in it
    file_system: str | None = None  # of lock_path
    full_log: str | None = None  # an audit log for whose next line there is no room
    room: Room | None = None  # for what users write in lock_path
    first_pid_namespace: bool | None = None
    hidepid: str | None = None  # "" or "0": nothing is hidden
    container: str | None = None  # its kind
    protected_regular: int | None = None  # sysctl fs.protected_regular
    protected_hardlinks: int | None = None  # sysctl fs.protected_hardlinks
    environ: Mapping[str, str] = field(default_factory=dict)
    outer: tuple[int, str] | None = None  # how many devices the environment leaves, and why
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)  # name: version

    @property
    def simulated(self) -> bool:
        """Whether the node exists only in a file, so that nothing of the driver applies."""
        return self.backend.startswith("simulated")

    @property
    def recorded(self) -> bool:
        """Whether it is of another time, so that nothing can be claimed."""
        return self.backend.startswith(RECORDED)


@dataclass(frozen=True)
class Check:
    """What one check found."""

    name: str
    status: str
    found: str
    advice: str | None = None


Finding = tuple[str, str, str | None]  # status, found, advice


def checks(facts: DoctorFacts) -> tuple[Check, ...]:
    """Every check that applies, in the order of CHECKS."""
    findings = ((name, check(facts)) for name, check in CHECKS.items())
    return tuple(Check(name, *finding) for name, finding in findings if finding)


def worst(found: Sequence[Check]) -> str:
    """The gravest status among *found*."""
    return max((check.status for check in found), key=(OK, WARNING, FAULT).index, default=OK)


def _library(facts: DoctorFacts) -> Finding | None:
    if facts.simulated or facts.backend.startswith(("smi", "replay")):
        return None  # it is not needed
    if facts.library_error is None:
        return OK, "libnvidia-ml.so.1 loads", None
    if not facts.glibc:
        found, _, advice = NEEDS_GLIBC.partition("\n")
        return FAULT, found, advice
    if facts.device_nodes or facts.kernel_version:
        inside = " with --gpus all (NVIDIA Container Toolkit)" if facts.container else ""
        return (
            FAULT,
            facts.library_error,
            f"Install the driver's user space of the same version, or start{inside} again.  "
            "Until then `--backend smi` may work: it asks the program nvidia-smi.",
        )
    return FAULT, "libnvidia-ml.so.1 is not installed", None


def _driver(facts: DoctorFacts) -> Finding:
    if facts.error is None and facts.snapshot:
        seconds = "" if facts.answer_seconds is None else f", answers in {facts.answer_seconds:.2f} s"
        if facts.simulated:
            return OK, "simulated node: no driver is needed", None
        if facts.recorded:
            return OK, "a file of another time: no driver is needed", None
        return OK, f"driver {facts.snapshot.driver_version or 'of unknown version'}{seconds}", None
    if isinstance(facts.error, DriverNotFound) and not facts.device_nodes and not facts.kernel_version:
        if facts.container and facts.glibc:
            advice = f"Start the container with --gpus all (NVIDIA Container Toolkit).  {_SIMULATE}"
            return FAULT, "this container sees no GPU", advice
        return FAULT, "this machine has no NVIDIA driver, and perhaps no NVIDIA GPU", _SIMULATE
    hangs = isinstance(facts.error, DriverUnresponsive)
    return FAULT, str(facts.error), "`sudo dmesg | grep -i -e nvrm -e xid` may say why." if hangs else None


def _versions(facts: DoctorFacts) -> Finding | None:
    if facts.simulated or facts.recorded:
        return None
    if isinstance(facts.error, DriverMismatch):
        found = f"library {facts.error.library_version or '?'}, kernel module {facts.error.kernel_version or '?'}"
        advice = (
            "The driver was upgraded while it ran.  Reboot; or stop all GPU work and `systemctl stop gpuguard`; run "
            "`sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia`."
        )
        return FAULT, found, advice
    library = facts.snapshot.driver_version if facts.snapshot else None
    if library is None or facts.kernel_version is None:
        return None
    if library != facts.kernel_version:
        return WARNING, f"library {library}, kernel module {facts.kernel_version}", "Reboot when the machine is free."
    return OK, f"library and kernel module are both {library}", None


def _devices(facts: DoctorFacts) -> Finding | None:
    if facts.snapshot is None:
        return None
    whole = [device for device in facts.snapshot.devices if not device.parent_uuid]
    if not whole:
        return FAULT, "the driver lists no device", "See `lspci | grep -i nvidia` and `dmesg | grep -i nvrm`."
    ill = [f"GPU {device.index}: {', '.join(device.problems)}" for device in whole if device.problems]
    if ill:
        advice = (
            "Jobs get the other devices.  See `dmesg | grep -i xid`.  Reboot; or `sudo nvidia-smi -r -i INDEX` once "
            "no process has it open (`sudo fuser -v /dev/nvidia*`), so after `sudo systemctl stop gpuguard`."
        )
        return FAULT, f"{len(ill)} of {len(whole)} unhealthy: {'; '.join(ill)}", advice
    instances = len(facts.snapshot.devices) - len(whole)
    return OK, f"{len(whole)} healthy{f', and {instances} MIG instances' if instances else ''}", None


def _processes(facts: DoctorFacts) -> Finding | None:
    devices = facts.snapshot.devices if facts.snapshot else ()
    if not devices:
        return None
    silent = [device for device in devices if device.processes is None and not device.problems]
    if blind := [device for device in silent if device.memory_used is None]:
        found = f"neither a process list nor the memory in use of GPU {_indices(blind)}: nothing says that it is free"
        return FAULT, found, "No job gets such a GPU.  A newer driver may tell one of them."
    if silent:
        found = f"no process list of GPU {_indices(silent)}"
        return WARNING, found, "gpuguard goes by memory in use instead: give it exact names with a newer driver."
    if odd := [device for device in devices if not device.processes_plausible]:
        advice = "nvidia-ml-py and the driver may not fit together: `pip install -U nvidia-ml-py`."
        if not facts.first_pid_namespace:
            advice = "These are pids of the host.  Start the container with --pid=host to see whose they are."
        return WARNING, f"the process list of GPU {_indices(odd)} makes no sense", advice
    return OK, "the driver lists the processes of every device", None


def _persistence(facts: DoctorFacts) -> Finding | None:
    devices = facts.snapshot.devices if facts.snapshot else ()
    modes = [device.persistence_mode for device in devices if not device.parent_uuid]
    if facts.simulated or not modes or all(mode is None for mode in modes):
        return None
    if False in modes:
        advice = (
            "The first use of an idle device then takes seconds.  `sudo systemctl enable --now nvidia-persistenced` "
            "changes that, and `sudo nvidia-smi -pm 1` until the next boot."
        )
        return WARNING, f"off on {modes.count(False)} of {len(modes)} devices", advice
    return OK, "on", None


def _lock_directory(facts: DoctorFacts) -> Finding | None:
    if facts.recorded:
        return None
    if facts.lock_error:
        return FAULT, facts.lock_error, None
    if facts.lock_missing:
        advice = "The first claim makes it.  If that is not the name you meant: it is that of --dir or GPUGUARD_DIR."
        return WARNING, f"{facts.lock_path} is not there yet: nothing is claimed in it", advice
    if facts.broker_error:
        found = f"the daemon alone gives the locks in {facts.lock_path}, and gives none: {facts.broker_error}"
        return FAULT, found, "`sudo systemctl restart gpuguard`; or `sudo gpuguard setup --no-broker`."
    if facts.keeper is not None:
        return OK, f"{facts.lock_path}, root's; the daemon alone gives the locks, to all users", None
    if facts.lock_faults:
        found = f"{format_count(len(facts.lock_faults), 'GPU')} cannot be claimed by you: {facts.lock_faults[0]}"
        return FAULT, found, None
    if facts.simulated:
        return OK, f"{facts.lock_path}, beside the simulated node", None
    if facts.lock_owner == 0:
        return OK, f"{facts.lock_path}, root's, for all users", None
    if facts.lock_owner is not None:
        advice = "Who uses another directory does not see these claims: `sudo gpuguard setup` makes one for all users."
        return WARNING, f"{facts.lock_path}, of uid {facts.lock_owner} alone", advice
    advice = "Claims work.  `sudo gpuguard setup` makes /run/gpuguard, whose lock files only root could tamper with."
    return WARNING, f"{facts.lock_path}, files of all users in a sticky directory", advice


def _room(facts: DoctorFacts) -> Finding | None:
    room = facts.room
    if room is None or facts.lock_owner != 0 or facts.lock_path != ADMIN_DIRECTORY or facts.simulated:
        return None
    if not room.own:
        found = f"{room.path} lies on /run, which any user can fill by writing there"
        on = ", on the host" if facts.container else ""
        return WARNING, found, f"`sudo gpuguard setup`{on} gives it a file system of its own at the next boot."
    found = f"{room.path}, a file system of its own: {room.in_words()}"
    if room.used < SCARCE:
        return OK, found, None
    if room.who:
        uid = room.who.uid
        advice = (
            f"`sudo find {room.path} -xdev -mindepth 1 -user {uid} -delete` takes away what uid {uid} wrote: claims "
            "hold without it, who waits gets a new place in the queue.  `sudo gpuguard deny` keeps that user from new "
            "claims."
        )
    else:
        advice = f"`sudo ls -l {room.path}` shows whose files these are; `sudo lsof +L1`, those without a name."
    return (FAULT if room.used >= 1 else WARNING), found, advice


def _daemon(facts: DoctorFacts) -> Finding | None:
    if facts.daemon_fault is None:
        return None
    found = f"{facts.daemon_fault}: what the daemon writes there counts for nothing"
    return FAULT, found, "Remove it, and run `sudo gpuguard setup` again."


def _audit_log(facts: DoctorFacts) -> Finding | None:
    if facts.full_log is None:
        return None
    found = f"no room for the next line of {facts.full_log}: the file system is full"
    advice = "The daemon signals no process until there is room: see `df -h`.  Then see `gpuguard events`."
    return FAULT, found, advice


def _queue(facts: DoctorFacts) -> Finding | None:
    if facts.line_path is None:
        return None
    if not facts.line_faults:
        return OK, f"as {facts.line_path} says", None
    found = f"{format_count(len(facts.line_faults), 'fault')}, the first: {facts.line_faults[0]}"
    return FAULT, found, f"None of {facts.line_path} counts until they are mended: the defaults hold."


def _file_system(facts: DoctorFacts) -> Finding | None:
    if facts.lock_error or facts.file_system is None:
        return None
    return OK, f"{facts.file_system}: locks are kept by this kernel", None


def _pid_namespace(facts: DoctorFacts) -> Finding | None:
    if facts.first_pid_namespace is None:
        return None
    if facts.first_pid_namespace:
        return OK, "the machine's own", None
    advice = "The driver names the host's pids: `who` cannot say whose they are.  Start the container with --pid=host."
    return WARNING, "of a container", advice


def _hidepid(facts: DoctorFacts) -> Finding | None:
    if facts.hidepid in (None, "", "0", "off"):
        return OK, "/proc shows the processes of all users", None
    if facts.uid == 0:
        return OK, f"/proc is mounted with hidepid={facts.hidepid}, which does not concern root", None
    advice = "Users and commands of others stay unknown to you.  Root sees them: `sudo gpuguard who`."
    return WARNING, f"/proc is mounted with hidepid={facts.hidepid}", advice


def _environment(facts: DoctorFacts) -> Finding:
    if facts.outer and facts.outer[0] == 0:
        advice = "No GPU can be had in this shell.  Unset the variable, or ask the outer scheduler for GPUs."
        return WARNING, facts.outer[1], advice
    if facts.environ.get(ORDER_VARIABLE) not in (None, PCI_ORDER):
        advice = "`gpuguard run` sets PCI_BUS_ID for its jobs.  Elsewhere device 0 may be another than nvidia-smi's."
        return WARNING, f"{ORDER_VARIABLE}={facts.environ[ORDER_VARIABLE]}", advice
    if facts.outer:
        return WARNING, facts.outer[1], "gpuguard stays inside that.  Unset it to choose among all devices."
    names = ", ".join(f"{name}={value}" for name, value in facts.environ.items())
    return OK, names or "no variable limits the devices", None


def _container(facts: DoctorFacts) -> Finding | None:
    if facts.container is None or facts.simulated or facts.recorded:
        return None
    if (facts.lock_path or "").startswith("/run/gpuguard"):
        return OK, f"{facts.container}, with the claims of the host", None
    advice = (
        "Claims made in here are not seen outside.  `sudo gpuguard setup` on the host, then start the container with "
        "-v /run/gpuguard:/run/gpuguard."
    )
    return WARNING, f"{facts.container}, without the host's /run/gpuguard", advice


def _kernel(facts: DoctorFacts) -> Finding | None:
    if facts.protected_hardlinks == 0:
        advice = "`sudo sysctl -w fs.protected_hardlinks=1`, and the same in /etc/sysctl.d."
        return WARNING, "fs.protected_hardlinks=0: a link to a lock file keeps its device from everybody", advice
    if facts.protected_regular is None:
        return None
    meaning = "lock files of others are opened, never created anew" if facts.protected_regular else "off"
    return OK, f"fs.protected_regular={facts.protected_regular}: {meaning}", None


def _versions_of_python(facts: DoctorFacts) -> Finding:
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in facts.packages.items())
    found = f"Python {facts.python}, {packages}"
    missing = [name for name, version in facts.packages.items() if version is None]
    if missing and not facts.simulated:
        return FAULT, found, f"`pip install {' '.join(missing)}` into the environment of gpuguard."
    return OK, found, None


CHECKS: Mapping[str, Callable[[DoctorFacts], Finding | None]] = {
    "library": _library,
    "driver": _driver,
    "versions": _versions,
    "devices": _devices,
    "processes": _processes,
    "persistence mode": _persistence,
    "lock directory": _lock_directory,
    "room": _room,
    "daemon": _daemon,
    "audit log": _audit_log,
    "queue": _queue,
    "file system": _file_system,
    "pid namespace": _pid_namespace,
    "hidepid": _hidepid,
    "environment": _environment,
    "container": _container,
    "kernel": _kernel,
    "python": _versions_of_python,
}


def to_text(
    facts: DoctorFacts, found: Sequence[Check], *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """A line per check, what to do behind an arrow below it, and the sum of it all."""
    kind = "SIMULATED node on " if facts.simulated else ""
    lines = [paint(neutralise(f"{kind}{facts.host}, backend {facts.backend}"), "bold")]
    heads = table([[check.status, check.name, ""] for check in found])
    margin = max(len(check.name) for check in found) + max(len(check.status) for check in found) + 4
    for check, head in zip(found, heads, strict=True):
        text = [*_wrapped(check.found, width, margin), *_wrapped(check.advice, width, margin, "-> ")]
        first = head.ljust(margin) + text[0]
        lines.append(paint(check.status, _COLOURS[check.status]) + first[len(check.status) :])
        lines += [" " * margin + line for line in text[1:]]
    counts = [(sum(check.status == status for check in found), status) for status in (FAULT, WARNING)]
    told = [format_count(count, status) for count, status in counts if count]
    return [*lines, "", f"{' and '.join(told)}." if told else "Everything is fine."]


def to_json(facts: DoctorFacts, found: Sequence[Check]) -> dict[str, Any]:
    """The object that docs/json.md describes."""
    return {
        "schema": 1,
        "host": facts.host,
        "backend": facts.backend,
        "status": worst(found),
        "checks": [vars(check) for check in found],
    }


def _wrapped(text: str | None, width: int | None, margin: int, arrow: str = "") -> list[str]:
    paragraph = arrow + neutralise(" ".join(text.split())) if text else ""
    if width is None or not text:
        return [paragraph] if text else []
    return textwrap.wrap(paragraph, max(20, width - margin), subsequent_indent=" " * len(arrow), break_on_hyphens=False)


def _indices(devices: Sequence[Device]) -> str:
    return ", ".join(sorted({str(device.index) for device in devices}, key=int))
