"""NVIDIA devices through the program nvidia-smi, where its library cannot be loaded; or from what it wrote to a file.

    smi             runs `nvidia-smi -q -x`
    smi:FILE.xml    reads what that has written, wherever and whenever: a snapshot to look at, never to act on

One run of the program costs 0.1 s per device and more, so the backend nvml is the better one wherever it works.
"""

from __future__ import annotations

import builtins
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import model, procfs
from gpuguard.backends import smi_fields
from gpuguard.backends.plausibility import OF_THE_BOARD, implausibility, is_uuid
from gpuguard.backends.smi_fields import MAX_BYTES, Element, Sheet, mebibytes, parse
from gpuguard.errors import BackendError, DriverNotFound, DriverPermission, DriverUnresponsive
from gpuguard.model import PROCESS_DETAILS, Device, Gap, GpuProcess, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpuguard.backends.smi_fields import Element

# The processes in nvidia-smi's XML: which, on which device or instance, and whether the list can be believed.
#
# Who a process is stands in /proc, and only of this machine, now: the processes of a saved file stay pids with a name.


Instance = tuple[str, str]  # ids of the GPU instance and the compute instance, as they are written

LARGEST_PID = 2**32 - 1  # in a file: Windows counts further than Linux
# Whatever else is written is taken for both: it counts as use of the device, and nobody signals it.
_KINDS = {"C": "compute", "G": "graphics", "C+G": "compute+graphics", "M": "mps", "M+C": "mps"}
_OTHER_KIND = "compute+graphics"


def read_processes(sheet: Sheet, listed: Element | None, instance: Instance | None, fields: Collection[str],
                   *, live: bool) -> None:  # fmt: skip
    """processes and processes_plausible.

    Args:
        sheet: of a device or an instance.
        listed: <processes> of the device.
        instance: whose processes are meant; None: those of the device itself.
        fields: what is read; PROCESS_DETAILS says who they are.
        live: whether they are processes of this machine, now.
    """
    if listed is None or (not listed.children and listed.text.strip()):
        sheet.gap("processes", "it is missing in the document" if listed is None else listed.text.strip())
        return
    rows = []
    for entry in listed.all("process_info"):
        if instance is not None and _instance_of(entry) != instance:
            continue
        process = _process(sheet, entry)
        if process is None:
            sheet.gap("processes", f"a pid is written {entry.word('pid')!r:.40}")
            return
        rows.append(process)
    reason = implausibility(
        [(row.pid, row.memory_used) for row in rows],
        alive=procfs.alive if live else _anybody,
        pid_max=procfs.pid_max() if live else LARGEST_PID,
        memory_total=sheet.values.get("memory_total"),
        memory_used=sheet.values.get("memory_used"),
    )
    sheet.values["processes_plausible"] = reason is None
    if reason is not None:
        sheet.gap("processes", f"implausible list: {reason}")
    details = PROCESS_DETAILS in fields
    if live and (reason or not details):
        # Of a list that cannot be believed, too: whoever has such a pid here is not who the driver means.
        rows = [replace(row, command=None) for row in rows]
    if live and not reason:
        rows = [(procfs.described if details else procfs.identified)(row) for row in rows]
    if details and rows:
        sheet.gap("processes (utilization)", "nvidia-smi does not tell it")
        if not live:
            sheet.gap("processes (identity)", "a saved file does not tell who a process was")
    sheet.values["processes"] = tuple(rows)


def _process(sheet: Sheet, entry: Element) -> GpuProcess | None:
    pid = entry.word("pid") or ""
    if not re.fullmatch(r"\d{1,10}", pid, re.ASCII):
        return None
    memory, kind, name = entry.word("used_memory"), entry.word("type"), entry.word("process_name")
    used = None if memory is None else mebibytes(memory)
    if used is None:
        sheet.gap(f"process {pid} memory_used", memory or "it is missing in the document")
    if kind not in _KINDS:
        sheet.gap(f"process {pid} kind", kind or "it is missing in the document")
    named = bool(name) and not (name or "").startswith("[")
    return GpuProcess(
        int(pid), used, _KINDS.get(kind or "", _OTHER_KIND), command=(name,) if named and name is not None else None
    )


def _instance_of(entry: Element) -> Instance:
    return entry.word("gpu_instance_id") or "", entry.word("compute_instance_id") or ""


def _anybody(_pid: int) -> bool:
    return True


_Told = tuple[Device, list[Gap]]

PROGRAM_SECONDS = 20.0  # without persistence mode each device is woken up first: 1 to 2 s each
_ALIVE_SECONDS = 0.4  # how often we say that the program still runs: see client.DEVICE_SECONDS
_NO_PROGRAM = "there is no program nvidia-smi in the PATH: install the driver, or choose another --backend."
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_READERS: dict[str, Callable[[Sheet], None]] = {
    model.MEMORY: smi_fields.read_memory,
    model.HEALTH: smi_fields.read_health,
    model.CLOCKS: smi_fields.read_throttle_reasons,
    model.ECC: smi_fields.read_ecc,
}


def open(spec: str = "") -> Smi:
    """The devices of this machine, or those in the file *spec*.  Raises BackendError when there is no such program."""
    backend = Smi(spec)
    if spec:
        backend.document()  # now, so that whoever named it reads what is wrong with it
    elif not shutil.which("nvidia-smi"):
        raise DriverNotFound(_NO_PROGRAM)
    return backend


class Smi:
    """A Backend.  `progress` is told None while the program runs; devices in `skip` are left out."""

    name = "smi"
    simulated = False

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.progress: Callable[[int | None], object] = lambda index: None
        self.skip: Collection[int] = ()
        self._uuids: dict[str, str] = {}  # by bus id: a lost device does not tell its own

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """See Backend.sample.  The program reads everything at once, whatever is asked for."""
        taken_at, clock = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
        if any(uuid.startswith("MIG-") for uuid in devices or ()):
            fields = {*fields, model.HEALTH}
        fields = set(fields) - {model.BRIEF}  # the document has everything
        root = self.document()
        if self.path:
            then = _time_of(root.word("timestamp") or "") or os.path.getmtime(self.path)
            taken_at, clock = then, clock - (taken_at - then)
        found: list[Device] = []
        gaps: list[Gap] = []
        known: set[str] = set()
        for index, element in enumerate(root.all("gpu")):
            family = _distinct(self._family(index, element, fields), known)
            if index not in self.skip and (devices is None or any(device.uuid in devices for device, _ in family)):
                found += [device for device, _ in family]
                gaps += [gap for _, missing in family for gap in missing]
        if self.path:
            gaps.append(Gap(None, "claims", "a file of nvidia-smi does not tell who has claimed what"))
        if model.TOPOLOGY in fields:
            gaps.append(Gap(None, "topology", "nvidia-smi -q does not tell it"))
        driver, cuda = (
            smi_fields.name_of(root.word(name) or "") if model.MODEL in fields else None
            for name in ("driver_version", "cuda_version")
        )
        return Snapshot(
            host=os.path.basename(self.path) if self.path else os.uname().nodename,
            backend=self.name,
            taken_at=taken_at,
            clock=clock,
            devices=tuple(found),
            gaps=tuple(gaps),
            recorded=bool(self.path),
            driver_version=driver,
            cuda_version=cuda,
        )

    def close(self) -> None:
        """Nothing is held."""

    def document(self) -> Element:
        """What nvidia-smi says now, or said then.  Raises BackendError."""
        if self.path:
            try:
                with builtins.open(self.path, "rb") as file:
                    text = file.read(MAX_BYTES + 1)
            except OSError as error:
                raise BackendError(f"{self.path} cannot be read: {error.strerror}.") from None
            try:
                return parse(text)
            except BackendError as error:
                raise BackendError(f"{self.path}: {error}") from None
        return parse(_output(["-q", "-x"], self.progress))

    def _family(self, index: int, element: Element, fields: Collection[str]) -> list[tuple[Device, list[Gap]]]:
        """A device and its MIG instances."""
        bus = element.attributes.get("id") or element.word("pci/pci_bus_id") or ""
        told = element.word("uuid") or ""
        uuid = told if told.startswith("GPU-") and is_uuid(told) else self._uuids.get(bus, f"unknown-{index}")
        self._uuids[bus] = uuid
        if _is_lost(element):
            lost = Device(index, uuid, problems=("lost",))
            return [(lost, [Gap(uuid, group, "the device is lost") for group in sorted(fields)])]
        sheet = Sheet(element, uuid)
        live = not self.path
        for group in sorted(fields):
            smi_fields.read_rows(sheet, group)
        for group, reader in _READERS.items():
            if group in fields:
                reader(sheet)
        parts = element.find("mig_devices")
        divided = parts is not None and model.HEALTH in fields and sheet.values.get("mig_mode")
        instances = list(parts.all("mig_device")) if parts is not None and divided else []
        if model.MODEL in fields:
            _read_place(sheet, live)
        if not {model.PROCESSES, model.IDLE_PROCESSES}.isdisjoint(fields):
            read_processes(sheet, element.find("processes"), None, fields, live=live)
        if uuid.startswith("unknown-"):
            sheet.problem("nvidia-smi does not tell its uuid")  # by which it is claimed
        problems = tuple(sheet.problems) if model.HEALTH in fields or sheet.problems else None
        whole = Device(index, uuid, problems=problems, **sheet.values)
        named = _named_instances(uuid, self.progress) if instances and live else {}
        return [(whole, sheet.gaps), *(_instance(part, whole, sheet, fields, live, named) for part in instances)]


def _instance(
    element: Element,
    parent: Device,
    board: Sheet,
    fields: Collection[str],
    live: bool,
    named: dict[str, tuple[str, str]],
) -> tuple[Device, list[Gap]]:
    gi, ci = element.word("gpu_instance_id") or "", element.word("compute_instance_id") or ""
    # The name that CUDA has always understood for an instance, where nobody tells its own uuid.
    profile, uuid = named.get(element.word("index") or "", (None, f"MIG-{parent.uuid}/{gi}/{ci}"))
    uuid = element.word("uuid") or uuid
    sheet = Sheet(element, uuid)
    if model.MEMORY in fields:
        smi_fields.read_memory(sheet)
    if not {model.PROCESSES, model.IDLE_PROCESSES}.isdisjoint(fields):
        read_processes(sheet, board.element.find("processes"), (gi, ci), fields, live=live)
    if model.UTILIZATION in fields:
        sheet.gap("utilization", "not told for MIG instances")
    if profile is None:
        sheet.gap("mig_profile", "nvidia-smi -q does not tell it")
    for gap in board.gaps:
        if gap.field in OF_THE_BOARD:
            sheet.gap(gap.field, gap.reason)
    if model.MODEL in fields and "name" in board.values:
        sheet.values["name"] = board.values["name"] + (f" MIG {profile}" if profile else "")
    values = {key: board.values[key] for key in OF_THE_BOARD if key in board.values} | sheet.values
    return Device(
        parent.index,
        uuid,
        parent_uuid=parent.uuid,
        problems=parent.problems or (),
        mig_profile=profile,
        gpu_instance_id=int(gi) if gi.isdecimal() and len(gi) < 6 else None,
        compute_instance_id=int(ci) if ci.isdecimal() and len(ci) < 6 else None,
        **values,
    ), sheet.gaps


def _is_lost(element: Element) -> bool:
    """Whether nvidia-smi says so in the place of any value; the names of processes are somebody else's words."""
    leaves = (leaf for child in element.children if child.tag != "processes" for leaf in child.leaves())
    return any(leaf.text.strip("[] \n").lower().startswith(("gpu is lost", "gpu access blocked")) for leaf in leaves)


def _read_place(sheet: Sheet, live: bool) -> None:
    """numa_node and cpu_affinity, which only the kernel of this machine tells."""
    bus = str(sheet.values.get("pci_bus_id", "")).lower()
    for field, name in (("numa_node", "numa_node"), ("cpu_affinity", "local_cpulist")):
        text = _line(f"/sys/bus/pci/devices/{bus[-12:]}/{name}") if live and bus else ""
        if not text or text == "-1":
            sheet.gap(field, "nvidia-smi does not tell it" if not text else "the kernel does not know it")
        else:
            sheet.values[field] = text if field == "cpu_affinity" else int(text)


def _line(path: str) -> str:
    try:
        with builtins.open(path, encoding="ascii", errors="replace") as file:
            return file.readline(1000).strip()
    except OSError:
        return ""


def _distinct(family: list[_Told], known: set[str]) -> list[_Told]:
    """*family* without those who are called as somebody before them: by its uuid a device is claimed."""
    index = family[0][0].index
    if family[0][0].uuid in known:
        return [(Device(index, f"unknown-{index}", problems=("another device has the same uuid",)), [])]
    distinct = []
    for device, gaps in family:
        if device.uuid not in known:
            distinct.append((device, gaps))
        known.add(device.uuid)
    return distinct


def _named_instances(parent: str, progress: Callable[[int | None], object]) -> dict[str, tuple[str, str]]:
    """Number of each MIG instance of a device -> (profile, uuid), as `nvidia-smi -L` has them; {} when it fails."""
    try:
        lines = _output(["-L"], progress).decode("utf-8", "replace").splitlines()
    except BackendError:
        return {}
    found: dict[str, tuple[str, str]] = {}
    within = ""
    for line in lines:
        if match := re.match(r"GPU \d+: .*\(UUID: (GPU-[0-9a-fA-F-]+)\)", line):
            within = match[1]
        elif within == parent and (match := re.match(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)\s]+)\)", line)):
            found[match[2]] = match[1], match[3]
    return found


def _output(options: list[str], progress: Callable[[int | None], object]) -> bytes:
    """What `nvidia-smi OPTIONS` prints; *progress* is called while it runs.

    Raises:
        BackendError: there is no such program, it fails, or it does not end in time.
    """
    ended: list[subprocess.CompletedProcess[bytes] | Exception] = []

    def work() -> None:
        try:
            ended.append(
                subprocess.run(
                    ["nvidia-smi", *options],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=PROGRAM_SECONDS,
                    check=False,
                    env={**os.environ, "LC_ALL": "C"},
                )
            )
        except (OSError, subprocess.SubprocessError) as error:
            ended.append(error)

    # A thread of its own, as a program in an uninterruptible driver call does not end even when it is killed.
    thread = threading.Thread(target=work, name="nvidia-smi", daemon=True)
    thread.start()
    deadline = time.monotonic() + PROGRAM_SECONDS + 1
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(_ALIVE_SECONDS)
        progress(None)
    result = ended[0] if ended else subprocess.TimeoutExpired("nvidia-smi", PROGRAM_SECONDS)
    if isinstance(result, Exception):
        raise _translated(result)
    # A lost device is an error to the program (15) and to its neighbours none: what it wrote counts.
    if result.returncode and not result.stdout.lstrip().startswith(b"<?xml"):
        raise _failure(result)
    return result.stdout


def _translated(error: Exception) -> BackendError:
    if isinstance(error, FileNotFoundError):
        return DriverNotFound(_NO_PROGRAM)
    if isinstance(error, subprocess.TimeoutExpired):
        return DriverUnresponsive(
            f"nvidia-smi did not end within {PROGRAM_SECONDS:.0f} s: the driver hangs.  See `dmesg`, or reboot."
        )
    return BackendError(f"nvidia-smi cannot be started: {error}.  Choose another --backend.")


def _failure(result: subprocess.CompletedProcess[bytes]) -> BackendError:
    said = (result.stdout.strip() or result.stderr.strip()).decode("utf-8", "replace")
    text = " ".join(said.split())[:300]
    if "permission" in text.lower():
        return DriverPermission(f"nvidia-smi may not read the devices: {text}")
    kind = DriverNotFound if "communicate with the NVIDIA driver" in text else BackendError
    return kind(f"nvidia-smi ended with {result.returncode}: {text or 'it said nothing'}")


def _time_of(text: str) -> float | None:
    """``"Fri Aug  4 11:44:30 2023"``, in the time zone of this machine, as unix time; whatever language is set here."""
    match = re.fullmatch(r"\w{3} (\w{3}) +(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})", text, re.ASCII)
    if not match or match[1] not in _MONTHS:
        return None
    day, hour, minute, second, year = map(int, match.groups()[1:])
    try:
        return time.mktime((year, _MONTHS.index(match[1]) + 1, day, hour, minute, second, 0, 0, -1))
    except (OverflowError, ValueError):
        return None
