"""The checks of `gpuguard doctor`: facts about a machine -> what is wrong and what to do.

Each check is a function, a table of cases and a row of CHECKS; None means that it does not apply here.  The facts come
in as an argument, so this file reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuguard.backends import RECORDED, is_simulated, parts_of
from gpuguard.backends.nvml_calls import NEEDS_GLIBC
from gpuguard.batch.dispatchers import StalledJobs
from gpuguard.batch.logout import ENDS, STAYS
from gpuguard.claims.directory import ADMIN_DIRECTORY
from gpuguard.claims.disk_room import SCARCE, Room
from gpuguard.device_state import grouped, instances_title, vendor_of
from gpuguard.errors import BackendError, DriverMismatch, DriverNotFound, DriverUnresponsive
from gpuguard.locale import N_, _, ngettext, translated
from gpuguard.model import Device, Snapshot
from gpuguard.sanitize import display_width, neutralise
from gpuguard.tables import padded, table
from gpuguard.units import format_count
from gpuguard.vendors import NVIDIA, Vendor
from gpuguard.views.jobs import stalled_advice, stalled_text
from gpuguard.views.text import Paint, wrapped

OK, WARNING, FAULT = N_("ok"), N_("warning"), N_("fault")
_COLOURS = {OK: "green", WARNING: "yellow", FAULT: "bold red"}
_SIMULATE = N_("To try gpuguard without a GPU: `gpuguard sim start`, then give every command `--backend simulated`.")


@dataclass(frozen=True)
class DriverFacts:
    """What was found of the driver of one vendor."""

    vendor: Vendor
    modules: tuple[str, ...] = ()  # of the kernel, to which its GPUs are bound
    version: str | None = None  # of the loaded kernel module
    toolkit: str | None = None  # "ROCm 6.3.1"
    nodes: Mapping[str, bool] = field(default_factory=dict)  # /dev/nvidia0 ...: whether this user may open it
    groups: tuple[str, ...] = ()  # whose members may open those that this user may not
    counted: bool = False  # whether the kernel counts the memory of its GPUs by cgroup


@dataclass(frozen=True)
class DoctorFacts:
    """What was found on the machine; None means that it could not be found out."""

    host: str
    backend: str
    uid: int
    error: BackendError | None = None  # why there is no snapshot
    snapshot: Snapshot | None = None
    answer_seconds: float | None = None  # until the driver answered
    library_error: str | None = None  # of loading libnvidia-ml.so.1, or None if it loads
    glibc: bool = True  # without it that library loads nowhere
    drivers: tuple[DriverFacts, ...] = ()  # those that are here
    lock_path: str | None = None
    lock_owner: int | None = None  # None for a sticky directory with files of all users
    lock_missing: bool = False
    lock_error: str | None = None
    lock_faults: tuple[str, ...] = ()  # what is wrong with each device whose lock files this user cannot use
    keeper: int | None = None  # the owner of the lock files, where the daemon alone gives the locks
    broker_error: str | None = None  # why the daemon gives none
    daemon_fault: str | None = None  # what is wrong with the daemon's directory in lock_path
    daemon_silent: bool = False  # whether a daemon was started there but does not answer
    daemon_trouble: str | None = None  # why the daemon does not serve its metrics
    daemon_unguarded: str | None = None  # what the policy file says but the daemon does not do
    left_paused: int = 0  # processes that a policy has paused, while no daemon runs that would end the pause
    line_path: str | None = None  # of the site's file for the queue, if there is one
    line_faults: tuple[str, ...] = ()  # in that file
    line_last_good: bool = False  # whether the last good file holds meanwhile
    file_system: str | None = None  # of lock_path
    full_log: str | None = None  # an audit log that has no room for its next line
    room: Room | None = None  # for what users write in lock_path
    first_pid_namespace: bool | None = None
    hidepid: str | None = None  # "" or "0": nothing is hidden
    container: str | None = None  # its kind
    stalled: Sequence[StalledJobs] = ()  # jobs that wait, and no dispatcher waits for them
    logout: str = STAYS  # what becomes of this user's processes then, see batch.logout
    protected_regular: int | None = None  # sysctl fs.protected_regular
    protected_hardlinks: int | None = None  # sysctl fs.protected_hardlinks
    environ: Mapping[str, str] = field(default_factory=dict)
    outer: tuple[int, str] | None = None  # how many devices the environment leaves, and why
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)  # name: version

    @property
    def simulated(self) -> bool:
        """Whether the node exists only in a file, so that no check of the driver applies."""
        return is_simulated(self.backend) or bool(self.snapshot and self.snapshot.simulated)

    @property
    def nvidia(self) -> DriverFacts | None:
        """What was found of NVIDIA's driver, or None if it is not here."""
        return next((driver for driver in self.drivers if driver.vendor.name == NVIDIA.name), None)

    @property
    def recorded(self) -> bool:
        """Whether the snapshot is of another time, so that nothing can be claimed."""
        return self.backend.startswith(RECORDED)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: str
    found: str
    advice: str | None = None


Finding = tuple[str, str, str | None]  # status, found, advice
Case = tuple[object, str, str, str | None]  # whether it is so; then as a Finding, with {names} of facts


def checks(facts: DoctorFacts) -> tuple[Check, ...]:
    """Return the results of all checks that apply, in the order of DRIVER_CHECKS, for each driver, and of CHECKS."""
    findings = [(name, check(facts, driver)) for driver in facts.drivers for name, check in DRIVER_CHECKS.items()]
    findings += [(name, check(facts)) for name, check in CHECKS.items()]
    return tuple(Check(name, *finding) for name, finding in findings if finding)


def worst(found: Sequence[Check]) -> str:
    """Return the gravest status among *found*."""
    return max((check.status for check in found), key=(OK, WARNING, FAULT).index, default=OK)


def _first(facts: DoctorFacts, *cases: Case, **more: object) -> Finding | None:
    """Return the finding of the first case that is so, with the names of *facts* and of *more* filled in."""
    known = vars(facts) | more
    values = {name: translated(value) if isinstance(value, str) else value for name, value in known.items()}
    for is_so, status, found, advice in cases:
        if is_so:
            return status, found.format(**values), advice and advice.format(**values)
    return None


def _kernel_driver(facts: DoctorFacts, driver: DriverFacts) -> Finding | None:
    module = " ".join(filter(None, (", ".join(driver.modules), driver.version)))
    found = ", ".join(filter(None, (module, driver.toolkit)))
    return (OK, f"{driver.vendor.title}: {found}", None) if found else None


def _device_nodes(facts: DoctorFacts, driver: DriverFacts) -> Finding | None:
    if not driver.nodes and driver.vendor.may_lack_nodes:
        return None
    if facts.container:
        advice = _("Start the container with {options}.")
    elif driver.groups:
        advice = _("`sudo usermod -aG {groups} $USER`, then log in again.")
    else:
        advice = _("`ls -l /dev` shows who may; `{dmesg}` may say why they are not there.")
    closed = [path for path, is_open in driver.nodes.items() if not is_open]
    # A site may give a user some of the GPUs.
    usable = driver.nodes.get(driver.vendor.control_node, True) and len(closed) < len(driver.nodes)
    return _first(
        facts,
        (driver.nodes and not closed, OK, _("{vendor}: you may open {nodes}"), None),
        (not driver.nodes, FAULT, _("{vendor}: there is no device node"), advice),
        (closed, WARNING if usable else FAULT, _("{vendor}: you may not open {nodes}"), advice),
        vendor=driver.vendor.title,
        nodes=", ".join(closed or driver.nodes),
        options=driver.vendor.container_options,
        groups=",".join(driver.groups),
        dmesg=_kernel_log([driver.vendor]),
    )


def _untried(facts: DoctorFacts, driver: DriverFacts) -> Finding | None:
    return _first(
        facts,
        (not driver.vendor.tried, WARNING,
         _("{vendor}: gpuguard was not tried on such GPUs yet, only on files that describe them"),
         _("Compare `gpuguard who` with `{tool}` before you rely on it, and report what differs.")),
        vendor=driver.vendor.title,
        tool=driver.vendor.tool,
    )  # fmt: skip


def _memory_by_cgroup(facts: DoctorFacts, driver: DriverFacts) -> Finding | None:
    found = _("{vendor}: the kernel counts it (dmem), and can keep shares; gpuguard was not tried on such a kernel yet")
    return _first(facts, (driver.counted, OK, found, None), vendor=driver.vendor.title)


def _kernel_log(vendors: Iterable[Vendor]) -> str:
    return "sudo dmesg | grep -i " + " ".join(f"-e {word}" for vendor in vendors for word in vendor.log_words)


def _reads_nvml(facts: DoctorFacts) -> bool:
    """Return whether NVIDIA's library is read, and not only because no driver of another vendor shows a GPU."""
    return NVIDIA.backend in parts_of(facts.backend) and bool(facts.nvidia or not facts.drivers)


def _library(facts: DoctorFacts) -> Finding | None:
    if not _reads_nvml(facts):
        return None  # the library is not needed
    no_glibc, _end, no_glibc_advice = translated(NEEDS_GLIBC).partition("\n")
    return _first(
        facts,
        (facts.library_error is None, OK, _("libnvidia-ml.so.1 loads"), None),
        (not facts.glibc, FAULT, "{no_glibc}", "{no_glibc_advice}"),
        (facts.nvidia, FAULT, "{library_error}",
         _("Install the driver's user space of the same version, or start{inside} again.  Until then "
           "`--backend smi` may work: it asks the program nvidia-smi.")),
        (True, FAULT, _("libnvidia-ml.so.1 is not installed"), None),
        no_glibc=no_glibc,
        no_glibc_advice=no_glibc_advice,
        inside=_(" with --gpus all (NVIDIA Container Toolkit)") if facts.container else "",
    )  # fmt: skip


def _driver(facts: DoctorFacts) -> Finding | None:
    if facts.error is None and facts.snapshot:
        unread = [gap for gap in facts.snapshot.gaps if gap.device is None and gap.field.endswith("devices")]
        seconds = "" if facts.answer_seconds is None else _(", answers in {answer_seconds:.2f} s")
        return _first(
            facts,
            (unread, FAULT, "{unread}", None),  # another vendor's were read
            (facts.simulated, OK, _("simulated node: no driver is needed"), None),
            (facts.recorded, OK, _("a file of another time: no driver is needed"), None),
            (True, OK, _("driver {driver_version}{seconds}"), None),
            unread="; ".join(f"{gap.field}: {translated(gap.reason)}" for gap in unread),
            driver_version=facts.snapshot.driver_version or _("of unknown version"),
            seconds=seconds.format(answer_seconds=facts.answer_seconds),
        )
    is_missing = isinstance(facts.error, DriverNotFound) and not facts.drivers
    start = _("Start the container with {options}.") + "  " + _(_SIMULATE)
    return _first(
        facts,
        (is_missing and facts.container and facts.glibc, FAULT, _("this container sees no GPU"), start),
        (is_missing, FAULT, _("this machine has no driver of a GPU that gpuguard knows, and perhaps no GPU"),
         _(_SIMULATE)),
        (isinstance(facts.error, DriverUnresponsive), FAULT, "{error}", _("`{dmesg}` may say why.")),
        (True, FAULT, "{error}", None),
        error=str(facts.error),
        options=NVIDIA.container_options,
        dmesg=_kernel_log([driver.vendor for driver in facts.drivers] or [NVIDIA]),
    )  # fmt: skip


def _versions(facts: DoctorFacts) -> Finding | None:
    if facts.simulated or facts.recorded:
        return None
    if isinstance(facts.error, DriverMismatch):
        found = _("library {library_version}, kernel module {kernel_version}").format(
            library_version=facts.error.library_version or "?", kernel_version=facts.error.kernel_version or "?"
        )
        advice = _(
            "The driver was upgraded while it ran.  Reboot; or stop all GPU work and `systemctl stop "
            "gpuguard`; run `sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe "
            "nvidia`."
        )
        return FAULT, found, advice
    library = facts.snapshot.driver_version if facts.snapshot else None
    module = facts.nvidia.version if facts.nvidia else None
    if library is None or module is None:
        return None
    return _first(
        facts,
        (library == module, OK, _("library and kernel module are both {library}"), None),
        (True, WARNING, _("library {library}, kernel module {kernel_version}"), _("Reboot when the machine is free.")),
        library=library,
        kernel_version=module,
    )  # fmt: skip


def _devices(facts: DoctorFacts) -> Finding | None:
    if facts.snapshot is None:
        return None
    whole = [device for device in facts.snapshot.devices if not device.parent_uuid]
    ill = [device for device in whole if device.problems]
    problems = [
        _("GPU {index}: {problems}").format(
            index=device.index, problems=", ".join(map(translated, device.problems or ()))
        )
        for device in ill
    ]
    of_ill = {device.vendor: vendor_of(device) for device in ill}
    parts = grouped((device.vendor, device) for device in facts.snapshot.devices if device.parent_uuid)
    instances = ", ".join(translated(instances_title(len(own), own[0])) for own in parts.values())
    unhealthy = _("{count} of {whole} unhealthy: {problems}")
    return _first(
        facts,
        (not whole, FAULT, _("the driver lists no GPU"), _("See `lspci` and `{dmesg}`.")),
        (list(of_ill) == [NVIDIA.name], FAULT, unhealthy,
         _("Jobs get the other GPUs.  See `dmesg | grep -i xid`.  Reboot; or `sudo nvidia-smi -r -i "
           "INDEX` once no process has it open (`sudo fuser -v /dev/nvidia*`), so after `sudo systemctl "
           "stop gpuguard`.")),
        (ill, FAULT, unhealthy, _("Jobs get the other GPUs.  See `{dmesg}`.  Reboot when these may end.")),
        (instances, OK, _("{whole} healthy, and {instances}"), None),
        (True, OK, _("{whole} healthy"), None),
        count=len(ill),
        whole=len(whole),
        problems="; ".join(problems),
        instances=instances,
        dmesg=_kernel_log([*of_ill.values()] or [driver.vendor for driver in facts.drivers] or [NVIDIA]),
    )  # fmt: skip


def _processes(facts: DoctorFacts) -> Finding | None:
    devices = facts.snapshot.devices if facts.snapshot else ()
    silent = [device for device in devices if device.processes is None and not device.problems]
    blind = [device for device in silent if device.memory_used is None]
    odd = [device for device in devices if not device.processes_plausible]
    senseless = _("the process list of GPU {indices} makes no sense")
    return _first(
        facts,
        (blind, FAULT,
         _("neither a process list nor the memory in use of GPU {indices}: nothing says that it is free"),
         _("No job gets such a GPU.  A newer driver may tell one of them.")),
        (silent, WARNING, _("no process list of GPU {indices}"),
         _("gpuguard goes by memory in use instead: give it exact names with a newer driver.")),
        (odd and not facts.first_pid_namespace, WARNING, senseless,
         _("These are pids of the host.  Start the container with --pid=host to see whose they are.")),
        (any(device.vendor == NVIDIA.name for device in odd), WARNING, senseless,
         _("nvidia-ml-py and the driver may not fit together: `pip install -U nvidia-ml-py`.")),
        (odd, WARNING, senseless, None),
        (devices, OK, _("the driver lists the processes of every GPU"), None),
        indices=_indices(blind or silent or odd),
    )  # fmt: skip


def _persistence(facts: DoctorFacts) -> Finding | None:
    devices = facts.snapshot.devices if facts.snapshot else ()
    whole = [device for device in devices if not device.parent_uuid and device.vendor == NVIDIA.name]
    modes = [device.persistence_mode for device in whole]
    if facts.simulated or all(mode is None for mode in modes):
        return None
    return _first(
        facts,
        (False in modes, WARNING, _("off on {count} of {modes} GPUs"),
         _("The first use of an idle GPU then takes seconds.  `sudo systemctl enable --now "
           "nvidia-persistenced` changes that, and `sudo nvidia-smi -pm 1` until the next boot.")),
        (True, OK, "on", None),
        count=modes.count(False),
        modes=len(modes),
    )  # fmt: skip


def _lock_directory(facts: DoctorFacts) -> Finding | None:
    if facts.recorded:
        return None
    return _first(
        facts,
        (facts.lock_error, FAULT, "{lock_error}", None),
        (facts.lock_missing, WARNING, _("{lock_path} is not there yet: nothing is claimed in it"),
         _("The first claim makes it.  If that is not the name you meant: it is that of --dir or GPUGUARD_DIR.")),
        (facts.broker_error, FAULT,
         _("the daemon alone gives the locks in {lock_path}, and gives none: {broker_error}"),
         _("`sudo systemctl restart gpuguard`; or `sudo gpuguard setup --no-broker`.")),
        (facts.keeper is not None, OK, _("{lock_path}, root's; the daemon alone gives the locks, to all users"), None),
        (facts.lock_faults, FAULT, _("{count} cannot be claimed by you: {lock_faults}"), None),
        (facts.simulated, OK, _("{lock_path}, beside the simulated node"), None),
        (facts.lock_owner == 0, OK, _("{lock_path}, root's, for all users"), None),
        (facts.lock_owner is not None, WARNING, _("{lock_path}, of uid {lock_owner} alone"),
         _("Who uses another directory does not see these claims: `sudo gpuguard setup` makes one for all users.")),
        (True, WARNING, _("{lock_path}, files of all users in a sticky directory"),
         _("Claims work.  `sudo gpuguard setup` makes /run/gpuguard, whose lock files only root could tamper with.")),
        count=format_count(len(facts.lock_faults), "GPU"),
        lock_faults=next(iter(facts.lock_faults), None),
    )  # fmt: skip


def _room(facts: DoctorFacts) -> Finding | None:
    room = facts.room
    if room is None:
        return None
    is_for_all = facts.lock_owner == 0 and facts.lock_path == ADMIN_DIRECTORY and not facts.simulated
    taken = _("{path}, a file system of its own: {in_words}")
    is_scarce, status = is_for_all and room.used >= SCARCE, FAULT if room.used >= 1 else WARNING
    return _first(
        facts,
        (not room.own and room.used >= 1 and not facts.recorded, FAULT,
         _("no room for another record in {path}: the file system is full"),
         _("Claims hold without a record, no request can wait in the queue: see `df -h {path}`.")),
        (is_for_all and not room.own, WARNING, _("{path} lies on /run, which any user can fill by writing there"),
         _("`sudo gpuguard setup`{on} gives it a file system of its own at the next boot.")),
        (is_scarce and room.who, status, taken,
         _("`sudo find {path} -xdev -mindepth 1 -user {uid} -delete` removes what uid {uid} wrote: claims hold "
           "without it, requests that wait get a new position in the queue.  `sudo gpuguard deny` keeps that user "
           "from new claims.  `sudo lsof +L1` shows files without a name, which go when their processes end.")),
        (is_scarce, status, taken,
         _("`sudo ls -l {path}` shows whose files these are; `sudo lsof +L1`, those without a name.")),
        (is_for_all, OK, taken, None),
        path=room.path,
        in_words=room.in_words(),
        on=_(", on the host") if facts.container else "",
        uid=room.who.uid if room.who else None,
    )  # fmt: skip


def _daemon(facts: DoctorFacts) -> Finding | None:
    return _first(
        facts,
        (facts.daemon_silent, WARNING, _("the daemon of {lock_path} does not answer: it hangs, or was killed"),
         _("`sudo systemctl restart gpuguard`, or start it as before.  Claims do not need it.")),
        (facts.daemon_unguarded is not None, FAULT, _("the daemon does not guard as its policy file says: {reason}"),
         _("`gpuguard policy check FILE` shows each fault, `journalctl -u gpuguard` when it began.")),
        (facts.daemon_trouble is not None, WARNING, _("the daemon does not serve its metrics: {reason}"),
         _("It tries again.  `sudo ss -ltnp` shows which program listens there.")),
        (facts.daemon_fault is not None, FAULT, _("{daemon_fault}: what the daemon writes there counts for nothing"),
         _("Remove it, and run `sudo gpuguard setup` again.")),
        reason=facts.daemon_trouble if facts.daemon_unguarded is None else facts.daemon_unguarded,
    )  # fmt: skip


def _pauses(facts: DoctorFacts) -> Finding | None:
    found = ngettext(
        "{count} process is paused by a policy, and no daemon runs that would let it go on",
        "{count} processes are paused by policies, and no daemon runs that would let them go on",
        facts.left_paused,
    )
    advice = _("Start the daemon, or run `sudo gpuguard resume`; `gpuguard resume --list` shows them.")
    return _first(facts, (facts.left_paused, FAULT, found, advice), count=facts.left_paused)


def _audit_log(facts: DoctorFacts) -> Finding | None:
    found = _("no room for the next line of {full_log}: the file system is full")
    advice = _("The daemon signals no process until there is room: see `df -h`.  Then see `gpuguard events`.")
    return _first(facts, (facts.full_log is not None, FAULT, found, advice))


def _queue(facts: DoctorFacts) -> Finding | None:
    if facts.line_path is None:
        return None
    found = _("{count}, the first: {line_faults}")
    return _first(
        facts,
        (not facts.line_faults, OK, _("as {line_path} says"), None),
        (facts.line_last_good, FAULT, found,
         _("Until they are mended the last good {line_path} holds, which the daemon has kept.")),
        (True, FAULT, found, _("None of {line_path} counts until they are mended: the defaults hold.")),
        count=format_count(len(facts.line_faults), "fault"),
        line_faults=next(iter(facts.line_faults), None),
    )  # fmt: skip


def _file_system(facts: DoctorFacts) -> Finding | None:
    is_known = facts.file_system is not None and not facts.lock_error
    return _first(facts, (is_known, OK, _("{file_system}: locks are kept by this kernel"), None))


def _pid_namespace(facts: DoctorFacts) -> Finding | None:
    advice = _(
        "The driver names the host's pids: `who` cannot say whose they are.  Start the container with --pid=host."
    )
    return _first(
        facts,
        (facts.first_pid_namespace, OK, _("the machine's own"), None),
        (facts.first_pid_namespace is False, WARNING, _("of a container"), advice),
    )


def _hidepid(facts: DoctorFacts) -> Finding | None:
    return _first(
        facts,
        (facts.hidepid in (None, "", "0", "off"), OK, _("/proc shows the processes of all users"), None),
        (facts.uid == 0, OK, _("/proc is mounted with hidepid={hidepid}, which does not concern root"), None),
        (True, WARNING, _("/proc is mounted with hidepid={hidepid}"),
         _("Users and commands of others stay unknown to you.  Root sees them: `sudo gpuguard who`.")),
    )  # fmt: skip


def _environment(facts: DoctorFacts) -> Finding | None:
    ((order, as_in_smi),) = NVIDIA.numbering.items()
    number, reason = facts.outer or (None, "")
    names = ", ".join(f"{name}={value}" for name, value in facts.environ.items())
    return _first(
        facts,
        (number == 0, WARNING, "{reason}",
         _("No GPU can be had in this shell.  Unset the variable, or ask the outer scheduler for GPUs.")),
        (facts.environ.get(order, as_in_smi) != as_in_smi, WARNING, "{order}={value}",
         _("`gpuguard run` sets PCI_BUS_ID for its jobs.  Elsewhere GPU 0 may be another than nvidia-smi's.")),
        (facts.outer, WARNING, "{reason}", _("gpuguard stays inside that.  Unset it to choose among all GPUs.")),
        (True, OK, "{names}", None),
        reason=reason,
        order=order,
        value=facts.environ.get(order),
        names=names or _("no variable limits the GPUs"),
    )  # fmt: skip


def _jobs(facts: DoctorFacts) -> Finding | None:
    jobs = " ".join(map(stalled_text, facts.stalled))
    return _first(facts, (jobs, WARNING, "{jobs}", stalled_advice()), jobs=jobs)


def _logout(facts: DoctorFacts) -> Finding | None:
    found = _("this machine ends all processes of a user at logout (KillUserProcesses=yes)")
    return _first(
        facts,
        (facts.logout == ENDS, WARNING, found,
         _("`gpuguard submit` is refused until you let yours stay: `loginctl enable-linger`.")),
        (facts.logout != STAYS, OK, _("{found}; jobs of `gpuguard submit` stay, because yours linger"), None),
        found=found,
    )  # fmt: skip


def _container(facts: DoctorFacts) -> Finding | None:
    if facts.container is None or facts.simulated or facts.recorded:
        return None
    is_hosts = (facts.lock_path or "").startswith("/run/gpuguard")
    return _first(
        facts,
        (is_hosts, OK, _("{container}, with the claims of the host"), None),
        (True, WARNING, _("{container}, without the host's /run/gpuguard"),
         _("Claims made in here are not seen outside.  `sudo gpuguard setup` on the host, then start the "
           "container with -v /run/gpuguard:/run/gpuguard.")),
    )  # fmt: skip


def _kernel(facts: DoctorFacts) -> Finding | None:
    return _first(
        facts,
        (facts.protected_hardlinks == 0, WARNING,
         _("fs.protected_hardlinks=0: a link to a lock file keeps its GPU from everybody"),
         _("`sudo sysctl -w fs.protected_hardlinks=1`, and the same in /etc/sysctl.d.")),
        (facts.protected_regular is not None, OK, "fs.protected_regular={protected_regular}: {meaning}", None),
        meaning=_("lock files of others are opened, never created anew") if facts.protected_regular else _("off"),
    )  # fmt: skip


def _versions_of_python(facts: DoctorFacts) -> Finding | None:
    packages = ", ".join(f"{name} {version or _('missing')}" for name, version in facts.packages.items())
    missing = " ".join(name for name, version in facts.packages.items() if version is None)
    found, advice = "Python {python}, {packages}", _("`pip install {missing}` into the environment of gpuguard.")
    return _first(
        facts,
        (missing and not facts.simulated, FAULT, found, advice),
        (True, OK, found, None),
        packages=packages,
        missing=missing,
    )


DRIVER_CHECKS: Mapping[str, Callable[[DoctorFacts, DriverFacts], Finding | None]] = {
    N_("kernel driver"): _kernel_driver,
    N_("device nodes"): _device_nodes,
    N_("untried"): _untried,
    N_("memory by cgroup"): _memory_by_cgroup,
}
CHECKS: Mapping[str, Callable[[DoctorFacts], Finding | None]] = {
    N_("library"): _library,
    N_("driver"): _driver,
    N_("versions"): _versions,
    N_("devices"): _devices,
    N_("processes"): _processes,
    N_("persistence mode"): _persistence,
    N_("lock directory"): _lock_directory,
    N_("room"): _room,
    N_("daemon"): _daemon,
    N_("pauses"): _pauses,
    N_("audit log"): _audit_log,
    N_("queue"): _queue,
    N_("file system"): _file_system,
    N_("pid namespace"): _pid_namespace,
    N_("hidepid"): _hidepid,
    N_("environment"): _environment,
    N_("container"): _container,
    N_("jobs"): _jobs,
    N_("logout"): _logout,
    N_("kernel"): _kernel,
    N_("python"): _versions_of_python,
}


def to_text(
    facts: DoctorFacts, found: Sequence[Check], *, width: int | None = None, paint: Paint = lambda text, _: text
) -> list[str]:
    """Return a line per check, its advice behind an arrow below it, and then the number of faults and warnings."""
    kind = _("SIMULATED node on ") if facts.simulated else ""
    lines = [
        paint(
            neutralise(_("{kind}{host}, backend {backend}").format(kind=kind, host=facts.host, backend=facts.backend)),
            "bold",
        )
    ]
    heads = table([[_(check.status), _(check.name), ""] for check in found])
    margin = max(map(display_width, heads)) + 2
    for check, head in zip(found, heads, strict=True):
        text = [*_wrapped(check.found, width, margin), *_wrapped(check.advice, width, margin, "-> ")]
        first = padded(head, margin) + text[0]
        lines.append(paint(_(check.status), _COLOURS[check.status]) + first[len(_(check.status)) :])
        lines += [" " * margin + line for line in text[1:]]
    faults, warnings = (sum(check.status == status for check in found) for status in (FAULT, WARNING))
    told = [format_count(faults, "fault")] if faults else []
    told += [format_count(warnings, "warning")] if warnings else []
    return [*lines, "", _("{faults}.").format(faults=_(" and ").join(told)) if told else _("Everything is fine.")]


def to_json(facts: DoctorFacts, found: Sequence[Check]) -> dict[str, Any]:
    """Return the object that docs/json.md describes."""
    return {
        "schema": 1,
        "host": facts.host,
        "backend": facts.backend,
        "status": worst(found),
        "checks": [vars(check) for check in found],
    }


def _wrapped(text: str | None, width: int | None, margin: int, arrow: str = "") -> list[str]:
    if not text:
        return []
    paragraph = neutralise(" ".join(text.split()))
    first, *more = [paragraph] if width is None else wrapped(paragraph, max(20, width - margin) - len(arrow))
    return [arrow + first, *(" " * len(arrow) + line for line in more)]


def _indices(devices: Sequence[Device]) -> str:
    return ", ".join(sorted({str(device.index) for device in devices}, key=int))
