"""Steer the simulated node: GPUs that exist only in a file, used by real processes.

Several terminals see one node, in $GPUGUARD_SIM_DIR (default: a directory of this user).  It is yours alone; as root
you can make one that all users of the machine see, use and claim on.

  gpuguard sim start 4xRTX4090
  gpuguard run --backend simulated -n 2 -- gpuguard sim use --memory 10GiB --utilization 80%
  gpuguard sim set --device 3 --temperature 40C..95C --over 2m
  gpuguard sim fault --device 3 hang
  gpuguard who --backend simulated
  sudo gpuguard sim start --shared 8xH100-80GB
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuguard.backends import parts_of, simulated, simulated_node
from gpuguard.backends.simulated_node import NodeDevice, SimulatedNode, WorkPattern, new_node
from gpuguard.claims.directory import lock_directory
from gpuguard.cli.options import SubcommandRow
from gpuguard.cli.setup import make_lock_files
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _
from gpuguard.model import DEVICE_FIELDS, HEALTH, Device
from gpuguard.units import (
    format_bytes,
    format_count,
    parse_bytes,
    parse_celsius,
    parse_duration,
    parse_field,
    parse_percent,
)
from gpuguard.vendors import VENDORS
from gpuguard.views.text import json_text, picked

FAULTS = {
    "lost": "the GPU has fallen off the bus",
    "reset": "the GPU needs a reset",
    "hang": "driver calls for it do not come back",
    "unlisted": "the driver gives no process list",
    "implausible": "the driver gives a process list that cannot be true",
}
# Fields that follow from what processes use, or that have an option of their own.
_WITH_OPTIONS = ("temperature", "utilization", "memory_total", "memory_used", "memory_free", "memory_reserved")
SHARED = "/run/gpuguard-sim"  # the directory of a node for all users, if none is named
Options = dict[str, Any]  # keyword arguments of add_argument


def _options(table: dict[str, Options], parser: argparse.ArgumentParser) -> None:
    for flags, details in (*table.items(), *_WHERE.items()):
        parser.add_argument(*flags.split(), **details)


def _start(args: argparse.Namespace) -> int:
    if args.shared and os.geteuid() != 0:
        raise GpuguardError(
            _(
                "only root can share a simulated node: others would trust neither GPUs nor locks in a "
                "directory of yours.  Run it with sudo; without --shared the node is yours alone."
            )
        )
    unnamed = args.shared and not _spec(args) and not os.environ.get("GPUGUARD_SIM_DIR")
    directory = simulated.directory(SHARED) if unnamed else _directory(args)
    made = new_node(args.spec, directory, time.clock_gettime(time.CLOCK_BOOTTIME), shared=args.shared)
    if args.shared:
        _check_reachable(directory)
    node, new = simulated_node.create(directory, lambda: made, replace=args.force)
    if args.shared > node.shared or list(map(node.of, node.devices)) != list(map(made.of, made.devices)):
        raise GpuguardError(
            _(
                "a simulated node ({spec}) runs in {directory} already: `gpuguard sim stop` ends it, --force "
                "replaces it."
            ).format(spec=node.spec, directory=directory)
        )
    found = not args.shared and directory == simulated.directory("")  # its user finds it without naming the directory
    backend = "simulated" if found else shlex.quote(f"simulated:{directory}")
    title = (
        _("SIMULATED node of {count} ({spec}) in {directory}")
        if new
        else _("SIMULATED node of {count} ({spec}) runs in {directory} already")
    )
    print(title.format(count=format_count(len(node.devices), "GPU"), spec=node.spec, directory=directory))
    if args.shared:
        _share(directory)
        print(
            _("It is for all users.  Each of them sees it after: export GPUGUARD_BACKEND={backend}").format(
                backend=backend
            )
        )
    print(
        _("Try: gpuguard run --backend {backend} -n 1 -- gpuguard sim use --memory 10GiB --for 30s").format(
            backend=backend
        )
    )
    return 0


def _check_reachable(directory: str) -> None:
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0:
        raise GpuguardError(
            _("{directory} is not a directory of root's: name another one, as simulated:DIRECTORY.").format(
                directory=directory
            )
        )
    for path in Path(directory).parents:
        if not os.stat(path).st_mode & 0o001:
            raise GpuguardError(
                _("other users cannot enter {path}: name another directory, as simulated:DIRECTORY.").format(path=path)
            )


def _share(directory: str) -> None:
    """Open the node to all users, who write what they use into a sticky directory and lock files of root's."""
    uses = os.path.join(directory, simulated_node.USES)
    os.makedirs(uses, exist_ok=True)
    for path, mode in ((uses, 0o1777), (os.path.join(directory, simulated_node.LOCK), 0o644), (directory, 0o755)):
        os.chmod(path, mode)  # whatever the umask is
    devices = simulated.Simulated(directory).sample({HEALTH}).devices
    make_lock_files(lock_directory(backend=f"simulated:{directory}"), [device.uuid for device in devices])


def _use(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.device is None and not any(vendor.visible in os.environ for vendor in VENDORS.values()):
        raise InvalidRequest(
            _("say which GPUs: --device 0,1, or start this with `gpuguard run --backend simulated -- ...`.")
        )
    uuids = simulated.use(
        args.device,
        args.memory,
        args.utilization,
        ramp=None if args.ramp_to is None else (args.ramp_to, args.over),
        lasting=args.lasting,
        kind=args.kind,
        spec=_spec(args),
    )
    if command:
        try:
            os.execvp(command[0], command)
        except FileNotFoundError:
            raise InvalidRequest(
                _("there is no command {command!r}: is it installed, and in PATH?").format(command=command[0])
            ) from None
        except OSError as error:
            raise InvalidRequest(
                _("{command!r} cannot be run: {strerror}.").format(command=command[0], strerror=error.strerror)
            ) from None
    until = _("for {lasting:g} s").format(lasting=args.lasting) if args.lasting is not None else _("until Ctrl-C")
    used = _("{memory} on {count}").format(memory=format_bytes(args.memory), count=format_count(len(uuids), "GPU"))
    print(_("SIMULATED: pid {pid} uses {used} {until}.").format(pid=os.getpid(), used=used, until=until), flush=True)
    time.sleep(args.lasting if args.lasting is not None else 10**8)
    return 0


def _set(args: argparse.Namespace) -> int:
    courses = {"temperature": parse_celsius, "utilization": parse_percent, "memory": parse_bytes}
    given = {name: value for name, value in vars(args).items() if value is not None}
    change = {name: _course(given[name], parse, args.over) for name, parse in courses.items() if name in given}
    change |= {name: given[name] for name in ("latency", "compute_mode", "asleep") if name in given}
    if not (change or args.fields) and args.release_delay is None:
        raise InvalidRequest(_("nothing to set.  See `gpuguard sim set --help`."))
    fields = dict(map(_field, args.fields))
    if (change or fields) and not args.device:
        raise InvalidRequest(
            _("say on which GPU: --device 0, or --device all ({change}).").format(change=", ".join([*change, *fields]))
        )

    def set_it(state: SimulatedNode) -> SimulatedNode:
        state = simulated.advanced_now(state)
        if args.release_delay is not None:
            state = replace(state, release_delay=args.release_delay)
        named = simulated_node.find(state, args.device) if change or fields else ()
        state = simulated_node.changed(state, named, change)
        for device in state.devices:
            if device.uuid in named:
                given = {**dict(device.given), **fields}
                kept = tuple((name, value) for name, value in given.items() if value is not None)
                state = simulated_node.changed(state, (device.uuid,), {"given": kept})
        return state

    simulated_node.update(_directory(args), set_it)
    return 0


def _field(text: str) -> tuple[str, float | None]:
    """Return the field of ``"power_limit=300W"`` and its value; for ``"auto"`` that is None: as the model has it."""
    name, _equals, value = text.partition("=")
    known = [field.name for field in DEVICE_FIELDS.values() if field.is_number and field.name not in _WITH_OPTIONS]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = _("did you mean {near}?").format(near=near[0]) if near else ", ".join(known)
        raise InvalidRequest(_("there is no field {name!r} to set: {hint}").format(name=name, hint=hint))
    return name, None if value == "auto" else parse_field(value, DEVICE_FIELDS[name].unit)


def _course(text: str, parse: Callable[[str], float], over: float) -> WorkPattern | None:
    if text == "auto":
        return None
    start, _dots, end = text.partition("..")
    if over and not end:
        raise InvalidRequest(
            _("--over needs a start and an end: write '{text}' as A..B, for instance '40C..95C'.").format(text=text)
        )
    return WorkPattern(parse(start), parse(end or start), time.clock_gettime(time.CLOCK_BOOTTIME), over)


def _fault(args: argparse.Namespace) -> int:
    not_unknown = ("index", "uuid", "processes_plausible")
    unknown = [f"na:{field.name}" for field in fields(Device) if field.name not in not_unknown]
    for fault in args.faults:
        known = unknown if fault.startswith("na:") else [*FAULTS, "none"]
        if fault not in known:
            near = difflib.get_close_matches(fault, known, n=1)
            hint = (
                _("did you mean {near}?").format(near=near[0])
                if near
                else _("choose one of {commands}.").format(commands=", ".join([*FAULTS, "na:FIELD", "none"]))
            )
            raise InvalidRequest(_("there is no fault {fault!r}: {hint}").format(fault=fault, hint=hint))

    def fail(state: SimulatedNode) -> SimulatedNode:
        named = simulated_node.find(state, args.device)
        simulated_node.changed(state, named, {})  # refuses instances
        for device in state.devices:
            if device.uuid in named:
                state = simulated_node.changed(state, (device.uuid,), _with_faults(device, args.faults))
        return state

    simulated_node.update(_directory(args), fail)
    return 0


def _with_faults(device: NodeDevice, faults: list[str]) -> dict[str, object]:
    now, unknown = list(device.faults), list(device.unknown)
    for fault in faults:
        if fault == "none":
            now, unknown = [], []
        elif fault.startswith("na:"):
            unknown.append(fault.removeprefix("na:"))
        else:
            now.append(fault)
    return {"faults": tuple(dict.fromkeys(now)), "unknown": tuple(dict.fromkeys(unknown))}


def _show(args: argparse.Namespace) -> int:
    directory = _directory(args)
    state = simulated.current(directory)
    rows = [_facts(state, device) for device in state.devices]
    if args.json:
        content = {"schema": 1, "simulated": True, "directory": directory, "spec": state.spec, "devices": rows}
        content["shared"] = state.shared
        print(json_text(content, indent=None))
        return 0
    print(
        _("SIMULATED node {spec} in {directory}{remark}").format(
            spec=state.spec, directory=directory, remark=_(", for all users") if state.shared else ""
        )
    )
    for row in rows:
        used, total = (format_bytes(row[f"memory_{name}_bytes"]) for name in ("used", "total"))
        profiles = Counter(instance["mig_profile"] for instance in row["instances"])
        odd = [
            *row["faults"],
            *(f"{count} x {profile}" for profile, count in profiles.items()),
            _("asleep") if row["asleep"] else "",
            f"latency {row['latency_seconds']:g} s" if row["latency_seconds"] else "",
            row["compute_mode"] if row["compute_mode"] != "default" else "",
        ]
        memory = _("{used:>8} of {total:>8}").format(used=used, total=total)
        line = (
            f"{row['index']:>3}  {row['name']:<26}  {memory}  {row['utilization_percent']:>3.0f}%  "
            f"{row['temperature_celsius']:>3.0f}C  {row['power_draw_watts']:>4.0f}W  {', '.join(filter(None, odd))}"
        )
        print(line.rstrip())
        for process in row["processes"]:
            memory, percent = format_bytes(process["memory_used_bytes"]), process["utilization_percent"]
            text = _("       pid {pid}  {memory}  {percent:.0f}%")
            print(text.format(pid=process["pid"], memory=memory, percent=percent))
    return 0


def _facts(state: SimulatedNode, device: NodeDevice) -> dict[str, Any]:
    clock = time.clock_gettime(time.CLOCK_BOOTTIME)
    return {
        **picked(device, "index", "uuid", "compute_mode"),
        "name": device.model.name,
        "memory_total_bytes": device.model.memory_total,
        "memory_used_bytes": simulated_node.memory_used(state, state.of(device), clock),
        "utilization_percent": simulated_node.utilization(state, device, clock),
        "temperature_celsius": simulated_node.temperature(state, device, clock),
        "power_draw_watts": simulated_node.power_draw(state, device, clock),
        "faults": [*device.faults, *(f"na:{name}" for name in device.unknown)],
        "asleep": simulated_node.sleeps(state, device, clock),
        "latency_seconds": device.latency,
        "instances": [{"uuid": part.uuid, "mig_profile": part.profile} for part in device.instances],
        "processes": [
            picked(use, "pid", "device", "kind")
            | {"memory_used_bytes": int(use.memory.at(clock)), "utilization_percent": use.utilization}
            for use in state.uses
            if use.device in state.of(device) and simulated_node.running(use, clock)
        ],
    }


def _stop(args: argparse.Namespace) -> int:
    directory = _directory(args)
    was_there = simulated_node.remove(directory)
    print(
        _("The simulated node in {directory} is gone.").format(directory=directory)
        if was_there
        else _("No simulated node was in {directory}.").format(directory=directory)
    )
    return 0


def _spec(args: argparse.Namespace) -> str:
    # GPUGUARD_BACKEND=nvml is no reason to refuse: `sim` can only mean the simulated node.
    kind, _colon, spec = str(args.backend or os.environ.get("GPUGUARD_BACKEND", "")).partition(":")
    if args.backend and kind != "simulated":
        raise InvalidRequest(
            _("--backend {backend}: `sim` steers simulated or simulated:DIRECTORY.").format(backend=args.backend)
        )
    if len(parts_of(spec)) > 1:
        raise InvalidRequest(
            _("these are several nodes: name the one that you mean, by --backend simulated:DIRECTORY.")
        )
    return spec if kind == "simulated" else ""


def _directory(args: argparse.Namespace) -> str:
    return simulated.directory(_spec(args))


def _quantity(parse: Callable[[str], object], metavar: str, help: str, **more: Any) -> Options:
    """Return the details of an option with a unit, whose faults get *parse*'s message, not "invalid value"."""

    def typed(text: str) -> object:
        try:
            return parse(text)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return {"type": typed, "metavar": metavar, "help": help, **more}


def _course_option(what: str, example: str) -> Options:
    return {"metavar": "V|A..B", "help": f"{what}: {example}, or auto (follows the processes)"}


_WHERE: dict[str, Options] = {
    "--backend": {
        "metavar": "B",
        "help": "simulated or simulated:DIRECTORY (default: $GPUGUARD_SIM_DIR, else a directory of this user)",
    }
}
_START: dict[str, Options] = {
    "spec": {
        "metavar": "SPEC",
        "help": "'8xH100-80GB', '1xA100-40GB:mig=3g.20gb,3g.20gb', '8xMI300X:partition=cpx', '2xArc-B60', joined by +",
    },
    "--force": {"action": "store_true", "help": "replace the node that is there"},
    "--shared": {"action": "store_true", "help": f"for all users, as root (default place: {SHARED})"},
}
_USE: dict[str, Options] = {
    "--device": {
        "metavar": "D,..",
        "help": "indices, uuids or 'all' (default: what CUDA_VISIBLE_DEVICES or the like names)",
    },
    "--memory": _quantity(parse_bytes, "SIZE", "on each GPU, as in 10GiB", required=True),
    "--utilization": _quantity(parse_percent, "PERCENT", "as in 90%% (default: 0%%)", default=0.0),
    "--ramp-to": _quantity(parse_bytes, "SIZE", "what the memory grows to, evenly"),
    "--over": _quantity(parse_duration, "DURATION", "within this time, as in 1m", default=0.0),
    "--for": _quantity(parse_duration, "DURATION", "let go after this time", dest="lasting"),
    "--kind": {
        "choices": simulated_node.KINDS,
        "default": "compute",
        "help": "what the driver calls the process (default: compute)",
    },
    "command": {"nargs": argparse.REMAINDER, "metavar": "-- CMD...", "help": "becomes the process that uses them"},
}
_SET: dict[str, Options] = {
    "--device": {"metavar": "D,..", "help": "indices, uuids or 'all'"},
    "--temperature": _course_option("the temperature", "95C or 40C..95C"),
    "--utilization": _course_option("the utilization", "50%% or 0%%..100%%"),
    "--memory": _course_option("memory that no process accounts for", "10GiB or 0GiB..60GiB"),
    "--over": _quantity(parse_duration, "DURATION", "how long it takes from A to B", default=0.0),
    "--field": {
        "dest": "fields",
        "metavar": "NAME=V",
        "action": "append",
        "default": [],
        "help": "any other number, as in power_limit=300W or remapped_rows=3, or auto; again for more",
    },
    "--latency": _quantity(parse_duration, "DURATION", "how long the driver takes per GPU"),
    "--compute-mode": {
        "choices": ("default", "exclusive_process", "prohibited"),
        "help": "how many processes the GPU lets in: any, one, none",
    },
    "--asleep": {
        "action": argparse.BooleanOptionalAction,
        "help": "the driver switches the GPU off while no process uses it, as it does AMD's and Intel's",
    },
    "--release-delay": _quantity(parse_duration, "DURATION", "how long memory outlives its process, on all GPUs"),
}
_FAULT: dict[str, Options] = {
    "--device": {"metavar": "D,..", "required": True, "help": "indices, uuids or 'all'"},
    "faults": {
        "nargs": "+",
        "metavar": "FAULT",
        "help": "; ".join(f"{name}: {meaning}" for name, meaning in FAULTS.items())
        + "; na:FIELD: the driver does not tell it; none: the GPU is well again",
    },
}
_SHOW: dict[str, Options] = {"--json": {"action": "store_true", "help": "one JSON object"}}

ACTIONS = {
    "start": SubcommandRow("make a node", partial(_options, _START), _start),
    "use": SubcommandRow("be a process that uses GPUs", partial(_options, _USE), _use),
    "set": SubcommandRow("set or move what the GPUs report", partial(_options, _SET), _set),
    "fault": SubcommandRow("break a GPU, or mend it", partial(_options, _FAULT), _fault),
    "show": SubcommandRow("show the node as it really is, also behind faults", partial(_options, _SHOW), _show),
    "stop": SubcommandRow("remove the node", partial(_options, {}), _stop),
}
