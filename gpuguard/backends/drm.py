"""GPUs as the kernel shows them without a driver library: cards, their files and sensors, and who has them open.

The backends amd and intel read their devices with it.  DRM is the kernel's Direct Rendering Manager, whose drivers make
/dev/dri/cardN and /dev/dri/renderDN of each GPU.  The facts come from sysfs (Documentation/ABI/testing), from hwmon and
from /proc/PID/fdinfo (Documentation/gpu/drm-usage-stats.rst).  Another root than / holds a tree that a test wrote, or
that was copied from another machine.  This module does not know what a vendor's files mean.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import combinations
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuguard import model, procfs
from gpuguard.backends.plausibility import implausibility
from gpuguard.device_state import grouped
from gpuguard.files import closed_after
from gpuguard.locale.messages import sentence
from gpuguard.model import DEVICE_FIELDS, DeviceAndGaps, Gap, GpuProcess, Snapshot
from gpuguard.users import accountable_uids
from gpuguard.vendors import DRM_MAJOR, DRM_NODES, names_instance

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from gpuguard.backends import Backend
    from gpuguard.vendors import Vendor

_NODES = DRM_NODES.rstrip("*")
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a FIFO must not keep its reader waiting
_MOST_FILES = 1024  # of a process, the first ones, that are looked into where no name says whether they are nodes
# A user may have millions of files open.  Of a look into all processes so many seconds go to those of all slow users,
# and so many to those of each further one.  Where a look stops, the next one into all processes goes on.
MOST_SECONDS, SECONDS_AGAIN = 0.3, 0.05
_PAUSE = 256  # files between two moments at which a look may stop
_MOST_COPIES = 8  # of one file in one process that are looked at between two looks into all processes
_LONGEST = 2**16  # bytes: a file of sysfs has at most a page, and fdinfo of a client with all its engines two
_NUMBER = re.compile(r"-?\d{1,20}", re.ASCII).fullmatch
_CARD = re.compile(r"card\d+")  # and not card0-DP-1, which is a connector
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "var/lib/pciutils/pci.ids")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "kB": 2**10, "MiB": 2**20, "GiB": 2**30, "ns": 1, "Hz": 1}
_GENERATIONS = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s of a lane

ASLEEP = sentence("drm.asleep", "the GPU sleeps, and to read it could wake it")
IDLE_ASLEEP = ("utilization", "memory_utilization")  # 0 while a GPU sleeps, because it is switched off then
ABSENT = sentence("drm.absent", "this kernel or GPU does not tell it")
_NO_PATH = sentence("drm.no_path", "the kernel does not tell how they are connected")
_EMPTY = sentence("drm.empty", "the file is empty")
# Drivers that wake a sleeping GPU when the fdinfo of one of its clients is read: xe_drm_client.c.
_WOKEN_BY_FDINFO = frozenset({"xe"})
_REASONS = {
    errno.ENOENT: ABSENT,
    errno.ENOTDIR: ABSENT,
    errno.ENODEV: ABSENT,
    errno.EPERM: sentence("drm.not_now", "not told while the GPU sleeps or is reset"),  # and no matter of rights
    errno.EACCES: sentence("drm.no_permission", "no permission"),
    errno.EBUSY: sentence("drm.busy", "the GPU is being reset"),
    errno.EINVAL: sentence("drm.not_supported", "the driver does not support it on this GPU"),
    errno.EOPNOTSUPP: sentence("drm.not_supported", "the driver does not support it on this GPU"),
}


class NotTold(Exception):
    """The kernel does not tell a value.  *reason* says why, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @property
    def key(self) -> str:
        """The key of the reason: "drm.absent", "drm.empty" ..."""
        return getattr(self.reason, "key", "")


# Files


def read(path: str) -> str:
    """Return what a file of sysfs says, without the blanks around it.  Raises NotTold, also if it is empty."""
    if not (text := read_bytes(path).decode(errors="replace").strip("\0 \t\n")):
        raise NotTold(_EMPTY)
    return text


def read_bytes(path: str) -> bytes:
    """Return the content of a file of sysfs.  Raises NotTold."""
    try:
        descriptor = os.open(path, _READING)
        try:
            return os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise refused(error) from None


def refused(error: OSError) -> NotTold:
    """Return the NotTold for an error of the kernel."""
    failed = sentence("drm.failed", "the kernel says: {error}", error=error.strerror or str(error))
    return NotTold(_REASONS.get(error.errno or 0, failed))


def read_or(path: str) -> str:
    """Return what read() does, or "" where the kernel does not tell."""
    try:
        return read(path)
    except NotTold:
        return ""


def number(text: str) -> int:
    """Return a decimal number.  Raises NotTold."""
    if not _NUMBER(text):
        raise NotTold(sentence("drm.no_number", "the file says {text}, which is no number", text=f"{text!r:.40}"))
    return int(text)


def percent(part: int, whole: int = 100) -> float:
    """Return a percentage.  Drivers may say a little more than all; what is far beyond means that it is unknown."""
    share = 100 * part / whole if whole else -1.0
    return 100.0 if 100 < share < 200 else share


def listed(folder: str) -> list[str]:
    """Return the names in *folder* in order, numbers by their size; none if it cannot be read."""
    return sorted(entries(folder), key=lambda name: [int(part or 0) for part in re.split(r"\D+", name)])


def entries(folder: str) -> list[str]:
    """Return the names in *folder* in any order; none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def pairs(text: str) -> dict[str, str]:
    """Return the lines `key value`, `key: value` or `key=value` of *text*."""
    found = (re.split(r"[:=\s]\s*", line.strip(), maxsplit=1) for line in text.splitlines())
    return {line[0]: line[1].strip() for line in found if len(line) == 2}


def host_memory(root: str, what: str) -> int:
    """Return the bytes of the host's memory: "MemTotal" or "MemAvailable".  Raises NotTold."""
    return number(pairs(read(f"{root}/proc/meminfo")).get(what, "").removesuffix(" kB")) * 1024


# Cards


@dataclass(frozen=True)
class Card:
    """A GPU on the PCI bus that has a DRM driver."""

    address: str  # "0000:03:00.0"
    folder: str  # /sys/class/drm/card0
    driver: str  # "amdgpu"
    ids: str  # vendor and device as pci.ids writes them, "1002:74a1", or "" if unknown
    render_minor: int | None  # 128 for /dev/dri/renderD128

    @cached_property
    def device(self) -> str:
        """The folder of the PCI device, without the links that lead to it: each would cost each file that is read."""
        return os.path.realpath(f"{self.folder}/device")

    @property
    def uuid(self) -> str:
        """The name of a GPU that has no number of its own."""
        return "PCI-" + re.sub(r"[:.]", "-", self.address)

    @property
    def asleep(self) -> bool:
        """Whether the driver has switched it off.  To read this wakes no GPU."""
        return _is_asleep(self.device)


def cards(root: str, vendor: Vendor) -> list[Card]:
    """Return the GPUs of a vendor's drivers in the order of their PCI addresses."""
    folder = f"{root.rstrip('/')}/sys/class/drm"
    names = listed(folder)
    renders = {name: _address(f"{folder}/{name}/device") for name in names if name.startswith("renderD")}
    found = []
    for name in filter(_CARD.fullmatch, names):
        device = f"{folder}/{name}/device"
        facts = pairs(read_or(f"{device}/uevent"))  # a copied tree has no links
        address = _address(device) or facts.get("PCI_SLOT_NAME", "").lower()
        driver = driver_of(f"{folder}/{name}") or facts.get("DRIVER", "")
        if driver in vendor.drivers and _ADDRESS.fullmatch(address):
            below = [entry for entry in listed(f"{device}/drm") if entry.startswith("renderD")]
            render = next(iter([*below, *(entry for entry, of in renders.items() if of == address)]), "")
            minor = int(render[7:]) if render[7:].isdecimal() else None
            found.append(Card(address, f"{folder}/{name}", driver, facts.get("PCI_ID", "").lower(), minor))
    return sorted(found, key=lambda card: card.address)


def _address(device: str) -> str:
    """Return the PCI address to which the link *device* leads, or "" if it leads elsewhere."""
    name = os.path.basename(procfs.read_link(device) or "")
    return name if _ADDRESS.fullmatch(name) else ""


def driver_of(card: str) -> str:
    """Return the driver of a card or a render node by its folder, or "" in a tree that was copied without links."""
    return os.path.basename(procfs.read_link(f"{card}/device/driver") or "")


def _is_asleep(device: str) -> bool:
    return read_or(f"{device}/power/runtime_status") in ("suspended", "suspending")


def product_name(root: str, card: Card, vendor: Vendor) -> str:
    """Return the name of the product, with the vendor's title: from the board, else from the system's pci.ids."""
    name = read_or(f"{card.device}/product_name")
    if not name:
        name = _names_of(root, card.ids[:4]).get(card.ids[5:], "")
        # "Navi 31 [Radeon RX 7900 XTX]": people know what stands in the brackets.
        name = name.partition("[")[2].rpartition("]")[0] or name
    name = name or f"GPU {card.ids or card.address}"
    return name if name.startswith(vendor.title) else f"{vendor.title} {name}"


@cache
def _names_of(root: str, vendor_id: str) -> dict[str, str]:
    """Return the names of a PCI vendor's devices by their ids: https://pci-ids.ucw.cz says the format."""
    for path in _PCI_IDS if vendor_id else ():
        text = procfs.read_text(f"{root.rstrip('/')}/{path}") or ""
        _, found, rest = text.partition(f"\n{vendor_id}  ")
        if found:
            section = re.split(r"\n(?=[^\t#\n])", rest, maxsplit=1)[0]
            return dict(re.findall(r"^\t([0-9a-f]{4})  (.+)$", section, re.MULTILINE))
    return {}


class Sensors:
    """The sensors of one GPU (hwmon), found by their labels, because their numbers differ from chip to chip."""

    def __init__(self, card: Card) -> None:
        self._above = f"{card.device}/hwmon"
        self._driver = card.driver
        self._folder = ""
        self._files: frozenset[str] = frozenset()
        self._labels: dict[tuple[str, str], str] = {}  # ("temp", "junction") -> "temp2"; the label may be ""

    def check(self) -> None:
        """Forget the folder of the sensors if it is gone, as after a reset of the GPU.  Call it once a sample."""
        if self._folder and not os.path.isdir(self._folder):
            self._folder = ""

    def path(self, kind: str, *labels: str, suffix: str = "input") -> str:
        """Return the file of the first of *labels* that there is; without labels, of the sensor 1 of this *kind*.

        With an empty *suffix* the file is that of the sensor itself, such as pwm1.  Raises NotTold if there is none.
        """
        if not self._folder:
            self._find()
        labelled = (self._labels[kind, label] for label in labels if (kind, label) in self._labels)
        sensor = next(labelled, "" if labels else f"{kind}1")
        file = f"{sensor}_{suffix}" if suffix else sensor
        if file not in self._files:
            raise NotTold(ABSENT)
        return f"{self._folder}/{file}"

    def value(self, kind: str, *labels: str, suffix: str = "input") -> int:
        """Return what a sensor says: see path().  Raises NotTold."""
        return number(read(self.path(kind, *labels, suffix=suffix)))

    def fan_speed(self) -> float:
        """Return the percent of what the first fan can do: of its control, else of its turns.  Raises NotTold."""
        try:
            return percent(self.value("pwm", suffix=""), 255)
        except NotTold:
            return percent(self.value("fan"), self.value("fan", suffix="max"))

    def _find(self) -> None:
        folders = (f"{self._above}/{name}" for name in listed(self._above))
        self._folder = next((folder for folder in folders if read_or(f"{folder}/name") == self._driver), "")
        files = listed(self._folder) if self._folder else []
        self._files = frozenset(files)
        self._labels.clear()
        for sensor in dict.fromkeys(file.partition("_")[0] for file in files):
            label = read_or(f"{self._folder}/{sensor}_label") if f"{sensor}_label" in self._files else ""
            self._labels.setdefault((sensor.rstrip("0123456789"), label), sensor)


# One device


def groups_read(fields: Collection[str], devices: Collection[str] | None) -> set[str]:
    """Return the groups of *fields* that are read: all, and HEALTH, which finds instances, if *devices* name one.

    To leave out what is only not BRIEF would save nothing.
    """
    finding = {model.HEALTH} if any(map(names_instance, devices or ())) else set[str]()
    return {*fields, *finding} - {model.BRIEF}


@dataclass
class CardReading:
    """The values, gaps and problems known so far of one device in one sample."""

    uuid: str
    fields: Collection[str]
    asleep: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def set(self, name: str, value: Callable[[], object], *, wakes: bool = False) -> None:
        """Set a field to what *value* returns, or leave a gap if that raises NotTold or cannot be true.

        With *wakes* it is not called while the GPU sleeps: what such a GPU does is known, the rest is a gap.
        """
        try:
            if wakes and self.asleep:
                if name in IDLE_ASLEEP:
                    self.values[name] = 0.0
                    return
                raise NotTold(ASLEEP)
            read, facts = value(), DEVICE_FIELDS[name]
            if read is None:
                raise NotTold(ABSENT)
            if facts.is_number:
                if not facts.holds(read):  # type: ignore[arg-type]
                    value_ = f"{read!r:.40}"
                    raise NotTold(sentence("nvml.implausible_value", "implausible value {value}", value=value_))
                read = facts.number(read)  # type: ignore[arg-type]
            self.values[name] = read
        except NotTold as gap:
            self.gap(name, gap.reason)

    def gap(self, name: str, reason: str = ABSENT) -> None:
        """Say why a field is unknown."""
        self.gaps.append(Gap(self.uuid, name, reason))

    def close(self, reason: str = ABSENT) -> None:
        """Leave a gap for each field of the wanted groups that was not read."""
        told = {gap.field for gap in self.gaps} | self.values.keys()
        for facts in DEVICE_FIELDS.values():
            if facts.group in self.fields and facts.name not in told and facts.name != "problems":
                self.gap(facts.name, reason)


def read_rows(reading: CardReading, rows: Mapping[str, Mapping[str, Callable[[Any], object]]], source: Any) -> None:
    """Read the fields in *rows*, by group and name, for which the GPU must be awake, by calling each with *source*."""
    for group, fields in rows.items():
        if group in reading.fields:
            for name, value in fields.items():
                reading.set(name, partial(value, source), wakes=True)


def read_place(reading: CardReading, card: Card) -> None:
    """Read where a card lies: the fields pci_bus_id, minor_number, numa_node and cpu_affinity of the group MODEL."""
    reading.values["pci_bus_id"] = card.address
    reading.set("minor_number", lambda: card.render_minor)
    reading.set("numa_node", lambda: _numa_node(card))
    reading.set("cpu_affinity", lambda: _cpus(card))


def _numa_node(card: Card) -> int | None:
    node = number(read(f"{card.device}/numa_node"))
    return node if 0 <= node < 2**16 else None  # -1: the machine has only one


def _cpus(card: Card) -> str | None:
    cpus = read(f"{card.device}/local_cpulist")
    return cpus if re.fullmatch(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", cpus, re.ASCII) else None


def read_link(reading: CardReading, device: str, *, wakes: bool = False) -> None:
    """Read pcie_generation and pcie_width from the folder of a PCI device."""

    def generation() -> int | None:
        return _GENERATIONS.get(read(f"{device}/current_link_speed").partition(" ")[0])

    reading.set("pcie_generation", generation, wakes=wakes)
    reading.set("pcie_width", lambda: number(read(f"{device}/current_link_width")), wakes=wakes)


def connections(
    gpus: Mapping[str, Card], by_fabric: Collection[frozenset[str]] = ()
) -> tuple[tuple[tuple[str, str, str], ...], list[Gap]]:
    """Return Snapshot.topology of cards by their uuids, and a gap for each two that are connected in an unknown way.

    *by_fabric* are those, two by two, that a fabric of their vendor connects: it is called NVLINK, as NVIDIA's is.
    """
    pairs, gaps = [], []
    for one, other in combinations(gpus, 2):
        if level := "NVLINK" if {one, other} in by_fabric else _connection(gpus[one], gpus[other]):
            pairs.append((one, other, level))
        else:
            gaps.append(Gap(one, f"topology to {other}", _NO_PATH))
    return tuple(pairs), gaps


def _connection(one: Card, other: Card) -> str | None:
    """Return how the PCI bus connects two GPUs, in the words of NVIDIA's tools, or None if it is unknown.

    PIX and PXB are not told apart, because a card may have a switch of its own.
    """
    # "/sys/devices/pci0000:00/0000:00:01.0/0000:03:00.0": a host bridge, a port of it, the GPU
    paths = [card.device.rpartition("/pci")[2] for card in (one, other)]
    if not all(re.match(r"[0-9a-f]{4}:[0-9a-f]{2}/", path) for path in paths):
        return None
    if shared := os.path.commonpath(paths):
        return "PXB" if "/" in shared else "PHB"
    nodes = {read_or(f"{card.device}/numa_node") for card in (one, other)}
    return None if "" in nodes else "NODE" if len(nodes) == 1 else "SYS"


def snapshot_of(
    backend: Backend,
    at: tuple[float, float],
    found: Collection[DeviceAndGaps],
    gaps: Iterable[Gap] = (),
    **facts: Any,
) -> Snapshot:
    """Return the snapshot of a backend that reads one vendor's devices of this host.

    Args:
        at: the unix time and CLOCK_BOOTTIME.
        found: each device with its own gaps.
        gaps: the further ones.
        facts: further fields of the snapshot.
    """
    return Snapshot(
        host=os.uname().nodename,
        backend=backend.name,
        taken_at=at[0],
        clock=at[1],
        devices=tuple(device for device, _ in found),
        gaps=(*(gap for _, missing in found for gap in missing), *gaps),
        simulated=backend.simulated,
        **facts,
    )


# Processes


class DrmClient(NamedTuple):
    """One open file of a DRM driver, as /proc/PID/fdinfo describes it."""

    pid: int
    driver: str
    address: str  # of the GPU on the PCI bus
    number: int  # drm-client-id: copies of a file, and of a process that was forked, have the same
    values: Mapping[str, int]  # the other lines: bytes, nanoseconds, cycles, by key


_Opened = tuple[int, str, "DrmClient | str"]  # pid, descriptor, what fdinfo says of it or else the address of the GPU


class Clients(NamedTuple):
    """All files of DRM drivers that are open."""

    found: tuple[DrmClient, ...]
    hidden: bool  # whether there are processes into which this user cannot look
    # The pid of a process that has a GPU open, and its address, where fdinfo says nothing or would wake the GPU.
    undescribed: tuple[tuple[int, str], ...] = ()


class ClientScanner:
    """Finds who has files of DRM drivers open, by looking into the processes of /proc again and again."""

    def __init__(self, root: str) -> None:
        self._proc = f"{root.rstrip('/')}/proc"
        self._drm = f"{root.rstrip('/')}/sys/class/drm"
        self._of_this_machine = not root.strip("/")
        # The mount namespaces in which only root can mount something, and give a node another name.
        self._roots_own = {procfs.read_link(f"{self._proc}/{pid}/ns/mnt") for pid in ("1", "self")}
        # The pids that had such files open when they were last looked at, and the descriptors of these.
        self._known: dict[int, list[str]] = {}
        self._unfinished: dict[int, Iterator[_Opened | None]] = {}  # by accountable uid: looks that have to go on
        self._gpus: dict[str, tuple[str, bool]] = {}  # of the nodes seen in this look: see _gpu_of
        self._hidden = False

    def read(self, *, everywhere: bool) -> Clients:
        """Look into all processes, or only at the files that were such the last time."""
        if everywhere:
            pids = sorted(int(name) for name in entries(self._proc) if name.isdecimal())
            # /proc leaves out the processes outside of our pid namespace, and with hidepid those of other users.
            hides = self._of_this_machine and (1 not in pids or not procfs.in_first_pid_namespace())
            self._hidden = hides or not os.path.isdir(self._proc)
        else:
            pids = sorted(self._known)
        self._gpus.clear()
        clients: dict[tuple[str, int], DrmClient] = {}
        undescribed: dict[tuple[int, str], None] = {}
        known: dict[int, list[str]] = {}
        copies: Counter[tuple[object, ...]] = Counter()
        for pid, descriptor, client in self._open_in_all(pids) if everywhere else self._open_again(pids):
            if isinstance(client, DrmClient):
                # A child that was forked shows the client of its parent, which has the lower pid nearly always.
                clients.setdefault((client.address, client.number), client)
            else:
                undescribed[pid, client] = None
            file = client[:4] if isinstance(client, DrmClient) else (pid, client)
            copies[file] += 1
            if copies[file] <= _MOST_COPIES:
                known.setdefault(pid, []).append(descriptor)
        self._known = known
        return Clients(tuple(clients.values()), self._hidden, tuple(undescribed))

    def forget(self, pids: Collection[int]) -> None:
        """Leave these processes out until all are looked at again."""
        for pid in pids:
            self._known.pop(pid, None)

    def _open_again(self, pids: Iterable[int]) -> Iterator[_Opened]:
        """Yield what the processes still have open of what they had the last time."""
        for pid in pids:
            yield from filter(None, self._open_in(pid, self._known[pid], everywhere=False))

    def _open_in_all(self, pids: Iterable[int]) -> Iterator[_Opened]:
        """Yield what the processes have open.  Of a slow user that is a part, and what is known from before."""
        uids = {pid: _owner(f"{self._proc}/{pid}") for pid in pids}
        users = accountable_uids(set(uids.values()))
        slow = 0.0
        for user, own in grouped((users[uid], pid) for pid, uid in uids.items()).items():
            begun, left = monotonic(), max(SECONDS_AGAIN, MOST_SECONDS - slow)
            started_before = user in self._unfinished
            look = self._unfinished.pop(user, None) or self._look_into(own)
            seen = set()
            for opened in look:
                if opened:
                    seen.add(opened[0])
                    yield opened
                elif monotonic() - begun > left:
                    self._unfinished[user] = look
                    break
            if user in self._unfinished:
                slow += monotonic() - begun
            if started_before or user in self._unfinished:
                yield from self._open_again([pid for pid in own if pid in self._known and pid not in seen])

    def _look_into(self, pids: Iterable[int]) -> Iterator[_Opened | None]:
        for pid in pids:
            yield from self._open_in(pid, None, everywhere=True)

    def _open_in(self, pid: int, descriptors: Sequence[str] | None, *, everywhere: bool) -> Iterator[_Opened | None]:
        """Yield the pid, a descriptor, and its client or the address of its GPU; and None where the look may stop.

        With *descriptors* only these are looked at.
        """
        folder = f"{self._proc}/{pid}"
        nodes: Iterable[tuple[str, str] | None]
        try:
            opened = os.open(f"{folder}/fd", _READING | os.O_DIRECTORY)
        except FileNotFoundError:
            nodes = [(name, "") for name in listed(f"{folder}/fdinfo")]  # it has ended, or a copied tree has no more
        except OSError:
            self._hidden = self._hidden or everywhere
            return
        else:
            named_by_root = procfs.read_link(f"{folder}/ns/mnt") in self._roots_own
            nodes = _drm_nodes(opened, descriptors, named_by_root=named_by_root)
        yield None
        try:
            for found in nodes:
                if found is None:
                    yield None
                    continue
                name, node = found
                fdinfo = f"{folder}/fdinfo/{name}"
                address, spared = self._gpu_of(node)
                client = None if spared else parse_client(pid, read_or(fdinfo))
                if client:
                    yield pid, name, client
                elif address and os.path.exists(fdinfo):  # otherwise the file was closed meanwhile
                    yield pid, name, address
        except PermissionError:
            self._hidden = self._hidden or everywhere

    def _gpu_of(self, node: str) -> tuple[str, bool]:
        """Return the address of the GPU of a DRM device, or "", and whether it sleeps and fdinfo would wake it."""
        if node not in self._gpus:
            device = f"{self._drm}/{node}/device"
            spared = driver_of(f"{self._drm}/{node}") in _WOKEN_BY_FDINFO and _is_asleep(device)
            self._gpus[node] = (_address(device), spared) if node else ("", False)
        return self._gpus[node]


def _owner(process: str) -> int:
    """Return the uid of a process by its folder in /proc; root's if it has ended."""
    try:
        return os.stat(process).st_uid
    except OSError:
        return 0


def _drm_nodes(
    opened: int, descriptors: Iterable[str] | None, *, named_by_root: bool
) -> Iterator[tuple[str, str] | None]:
    """Yield the DRM devices that a process has open: a descriptor, and the device's name, or "" if fdinfo must tell it.

    In a mount namespace of their own, users can give a node any name, and any name to a file of a file system of their
    own (FUSE), which answers stat() when they like.  So there only fdinfo tells, which comes from the kernel, but for
    the names that users give to a dma-buf.  Elsewhere the name follows from the device's number, as root may have
    renamed nodes.

    *opened* is the /proc/PID/fd of the process, and is closed; with *descriptors* only these are looked at.  Yields
    None where the caller may stop.  Raises PermissionError if this user may not see what the files are.
    """
    listed_files = nullcontext(descriptors) if descriptors is not None else os.scandir(opened)
    with closed_after(opened), listed_files as names:  # of each file the path of the folder need not be walked
        for place, name in enumerate(map(os.fspath, names)):
            if place % _PAUSE == _PAUSE - 1:
                yield None
            try:
                target = os.readlink(name, dir_fd=opened)
            except PermissionError:  # root may list the files of all, but without CAP_SYS_PTRACE not see what they are
                raise
            except OSError:
                yield name, ""
                continue
            if target.startswith(_NODES):
                yield name, os.path.basename(target)
            elif not named_by_root:
                if place < _MOST_FILES and target.startswith("/") and not target.startswith("/dmabuf:"):
                    yield name, ""
            elif target.startswith("/dev/") and not target.startswith("/dev/shm/") and (node := _node(name, opened)):
                yield name, node


def _node(descriptor: str, folder: int) -> str | None:
    try:
        number = os.stat(descriptor, dir_fd=folder).st_rdev
    except OSError:
        return None
    minor = os.minor(number)
    return None if os.major(number) != DRM_MAJOR else f"renderD{minor}" if minor >= 128 else f"card{minor}"


def parse_client(pid: int, text: str) -> DrmClient | None:
    """Return what an fdinfo file says of a DRM client, or None if it is none.  A number without a unit is bytes."""
    found = (line.partition(":") for line in text.replace(" mem:", "-mem:").splitlines())
    words = {key.strip(): value.strip() for key, _colon, value in found}
    driver, address, client = (words.get(f"drm-{key}", "") for key in ("driver", "pdev", "client-id"))
    if "pasid" in words and "pdev" in words:  # amdgpu before Linux 5.19; a pasid belongs to one open file
        driver, address, client = "amdgpu", words["pdev"], words["pasid"]
    if not (driver and client.isdecimal()):
        return None
    values = {}
    for key, value in words.items():
        amount, _, unit = value.partition(" ")
        if amount.isdecimal() and len(amount) < 20:
            values[key] = int(amount) * _UNITS.get(unit.strip(), 1)
    return DrmClient(pid, driver, address, int(client), values)


class ProcessLists:
    """Turns pids with their memory into the field `processes` of devices, as far as they can be believed."""

    def __init__(self) -> None:
        self._ended: dict[str, set[int]] = {}  # by uuid

    def read(self, reading: CardReading, rows: Sequence[GpuProcess]) -> None:
        """Set processes and processes_plausible of a device on which the kernel lists *rows*.

        A pid that was once listed without a process counts as ended until the kernel drops it.  KFD may keep entries of
        dead processes for ever, and another process may have got the pid.
        """
        stats = {row.pid: procfs.stat_of(row.pid) for row in rows}
        gone = {pid for pid, stat in stats.items() if stat is None and not procfs.alive(pid)}
        total, used = (reading.values.get(f"memory_{name}") for name in ("total", "used"))
        reason = implausibility(
            [(row.pid, row.memory_used) for row in rows],
            alive=lambda pid: pid not in gone,
            pid_max=procfs.pid_max(),
            own_pids=procfs.in_first_pid_namespace() is True,
            memory_total=total if isinstance(total, int) else None,
            memory_used=used if isinstance(used, int) else None,
        )
        reading.values["processes_plausible"] = reason is None
        if reason is not None:  # the processes that have these pids here are not the ones that the kernel means
            reading.gap("processes", sentence("driver.implausible_list", "implausible list: {reason}", reason=reason))
            reading.values["processes"] = tuple(rows)
            return
        ended = self._ended[reading.uuid] = stats.keys() & (self._ended.get(reading.uuid, set()) | gone)
        read = procfs.described if model.PROCESS_DETAILS in reading.fields else procfs.identified
        found = (replace(row, ended=True) if row.pid in ended else read(row, stats[row.pid]) for row in rows)
        reading.values["processes"] = tuple(found)


def merged_rows(rows: Iterable[GpuProcess], of_all: Callable[[list[int]], int] = sum) -> list[GpuProcess]:
    """Return one row for each pid, in the order of *rows*; one that computes and draws is compute+graphics.

    Its memory is what *of_all* makes of that of its rows, as far as it is known.
    """
    merged: dict[int, GpuProcess] = {}
    for row in rows:
        if (other := merged.get(row.pid)) is None:
            merged[row.pid] = row
            continue
        memory = [known for known in (row.memory_used, other.memory_used) if known is not None]
        kind = row.kind if row.kind == other.kind else "compute+graphics"
        merged[row.pid] = replace(other, memory_used=of_all(memory) if memory else None, kind=kind)
    return list(merged.values())
