"""The processes in nvidia-smi's XML: which, on which device or instance, and whether the list can be believed.

Who a process is stands in /proc, and only of this machine, now: the processes of a saved file stay pids with a name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.backends import processes
from gpuguard.backends.smi_fields import Sheet, mebibytes
from gpuguard.model import PROCESS_DETAILS, GpuProcess

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuguard.backends.smi_xml import Element

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
    reason = processes.implausibility(
        [(row.pid, row.memory_used) for row in rows],
        alive=processes.alive if live else _anybody,
        pid_max=processes.pid_max() if live else LARGEST_PID,
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
        rows = [(processes.described if details else processes.identified)(row) for row in rows]
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
