"""`gpuguard slurm setup --print`: what Slurm's files need on this machine.  Writes nothing."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
from collections.abc import Sequence
from itertools import groupby

from gpuguard.cli.options import add_source_options, backend_of
from gpuguard.errors import InvalidRequest
from gpuguard.model import HEALTH, MEMORY, MODEL, Device
from gpuguard.views.text import neutralise, put

PLACE = "/etc/slurm"
SCRIPTS = {"prolog": "Prolog", "epilog": "Epilog", "task-prolog": "TaskProlog"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print", action="store_true", help="show them (needed: nothing is written by this command)")
    parser.add_argument("--place", metavar="PATH", default=PLACE, help="of the scripts (default: %(default)s)")
    parser.add_argument("--wait", metavar="DURATION", help="as in `gpuguard slurm prolog`")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if not args.print:
        raise InvalidRequest("Slurm's files are yours: `gpuguard slurm setup --print` shows what they need.")
    backend = backend_of(args)
    try:
        devices = [each for each in backend.sample({MEMORY, MODEL, HEALTH}).devices if each.parent_uuid is None]
    finally:
        backend.close()
    host = socket.gethostname().partition(".")[0]
    put(map(neutralise, lines(host, devices, args.place, _command(args), args.wait)), sys.stdout)
    return 0


def lines(host: str, devices: Sequence[Device], place: str, command: Sequence[str], wait: str | None) -> list[str]:
    """The text, in the order in which an admin needs it."""
    rows = sorted(devices, key=lambda device: _minor(device))
    kinds = [(kind, list(of_kind)) for kind, of_kind in groupby(rows, key=_kind)]
    names = [kind for kind, _ in kinds]
    gres = ",".join(f"gpu:{kind}:{sum(_kind(each) == kind for each in rows)}" for kind in dict.fromkeys(names))
    mixed = len(set(names)) > 1
    return [
        f"# {place}/gres.conf",
        *(f"NodeName={host} Name=gpu Type={kind} File={_files(each)}" for kind, each in kinds),
        *(["# GPUs of several types: the rule outside_scheduler of gpuguard's daemon says nothing here"] * mixed),
        "",
        f"# {place}/cgroup.conf",
        "ConstrainDevices=yes",
        "",
        f"# {place}/slurm.conf, the same on all machines",
        "GresTypes=gpu",
        f"NodeName={host} Gres={gres or '(null)'}  # add it to the line of this node",
        "SelectType=select/cons_tres",
        "ProctrackType=proctrack/cgroup",
        "TaskPlugin=task/cgroup,task/affinity",
        "PrologFlags=Alloc,Contain  # the prolog before the job, and a slurmstepd that lives as long as the job",
        "SchedulerParameters=nohold_on_prolog_fail  # add it to yours",
        *(f"{key}={place}/gpuguard-{name}" for name, key in SCRIPTS.items()),
        *(line for name in SCRIPTS for line in _script(name, place, command, wait)),
    ]


def _script(name: str, place: str, command: Sequence[str], wait: str | None) -> list[str]:
    more = ["--wait", wait] if wait and name == "prolog" else []
    return [
        "",
        f"# {place}/gpuguard-{name}: of root, mode 755",
        "#!/bin/sh",
        "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        f"exec {shlex.join([command[0], 'slurm', name, *command[1:], *more])}",
    ]


def _command(args: argparse.Namespace) -> list[str]:
    """The program, and where it looks if not at the usual places."""
    program = os.path.abspath(sys.argv[0])
    words = [program if os.path.basename(program) == "gpuguard" else "/usr/bin/gpuguard"]
    words += ["--backend", args.backend] if args.backend != "nvml" else []
    return [*words, *(["--dir", args.dir] if args.dir else [])]


def _minor(device: Device) -> int:
    return device.index if device.minor_number is None else device.minor_number


def _kind(device: Device) -> str:
    """``"h100_80gb_hbm3"``: a type as Slurm takes it."""
    name = re.sub(r"^NVIDIA\s+", "", device.name or "gpu")
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "gpu"


def _files(devices: Sequence[Device]) -> str:
    """``"/dev/nvidia[0-2,5]"``."""
    numbers = [_minor(device) for device in devices]
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if len(numbers) == 1:
        return f"/dev/nvidia{numbers[0]}"
    return f"/dev/nvidia[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)}]"
