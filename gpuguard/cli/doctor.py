"""Check driver, GPUs, lock directory and permissions on this machine, and say what to do.

Exit code: 0 all is well or there are only warnings, 1 something is at fault, 4 the driver cannot be reached.
"""

from __future__ import annotations

import argparse
import ctypes
import grp
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from importlib import metadata
from itertools import chain
from typing import Any

from gpuguard.backends import DEFAULT_BACKEND, dmem, parts_of, resolved
from gpuguard.backends.drm import Card, cards
from gpuguard.backends.nvml_calls import has_glibc
from gpuguard.batch.dispatchers import stalled_jobs
from gpuguard.batch.logout import fate_at_logout
from gpuguard.claims.claim import lock_faults
from gpuguard.claims.daemon_client import SOCKET_NAME, NoDaemonSocket, StatusReply, exchange, query_daemon
from gpuguard.claims.directory import daemon_files, fault_of, open_lock
from gpuguard.claims.disk_room import room_for_records
from gpuguard.cli import terminal
from gpuguard.cli.options import JSON, add_source_options, add_table, directory_of, sampled
from gpuguard.clusters.device_variables import outer_devices
from gpuguard.enforcement.identity import is_alive
from gpuguard.enforcement.pauses import Pauses
from gpuguard.errors import EXIT_NO, EXIT_NO_DRIVER, BackendError, ClaimError, GpuguardError
from gpuguard.files import file_system
from gpuguard.history.audit_log import MACHINE_EVENTS, append, events_path
from gpuguard.model import CLOCKS, WHO_FIELDS, Device, Snapshot
from gpuguard.procfs import in_first_pid_namespace, read_text
from gpuguard.queue.settings import read_queue_settings
from gpuguard.request import Request
from gpuguard.source import daemon_lives, hidepid
from gpuguard.vendors import DRM_MAJOR, NVIDIA, VENDORS, Vendor
from gpuguard.views import doctor
from gpuguard.views.doctor import FAULT, DoctorFacts, DriverFacts
from gpuguard.views.text import json_text, put, style

PACKAGES = ("gpuguard", "nvidia-ml-py", "psutil")
_A_SHARE = Request(share=True, memory=1)  # a share needs all lock files of a device


LINE_BYTES = 16384  # of the audit log, with room to spare


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, JSON)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    facts = _collect_facts(args)
    found = doctor.checks(facts)
    if args.json:
        put([json_text(doctor.to_json(facts, found))], sys.stdout)
    else:
        put(doctor.to_text(facts, found, width=terminal.width(), paint=style(sys.stdout, os.environ)), sys.stdout)
    if facts.error:
        return EXIT_NO_DRIVER
    return EXIT_NO if doctor.worst(found) == FAULT else 0


def _collect_facts(args: argparse.Namespace) -> DoctorFacts:
    driver = _driver(args)
    snapshot = driver["snapshot"]
    devices = snapshot.devices if snapshot else ()
    outer, drivers = outer_devices(os.environ, devices), drivers_of(args.backend, snapshot)
    vendors = [found.vendor for found in drivers] or [NVIDIA]
    of_vendors = (
        (vendor.visible, *vendor.numbering, *vendor.filters, vendor.selector, vendor.container) for vendor in vendors
    )
    variables = dict.fromkeys([*chain.from_iterable(of_vendors), "SLURM_JOB_ID", "GPUGUARD_CLAIM"])
    return DoctorFacts(
        host=os.uname().nodename,
        backend=resolved(args.backend, None),
        uid=os.geteuid(),
        **driver,
        **_lock(args, devices),
        **_site_rules(args),
        outer=None if outer.uuids is None else (len(outer.uuids), outer.reason),
        full_log=_full_log(),
        library_error=_library_error(),
        glibc=has_glibc(),
        drivers=drivers,
        first_pid_namespace=in_first_pid_namespace(),
        hidepid=hidepid(),
        container=_container(os.environ),
        logout=fate_at_logout(),
        protected_regular=_number("/proc/sys/fs/protected_regular"),
        protected_hardlinks=_number("/proc/sys/fs/protected_hardlinks"),
        environ={name: os.environ[name] for name in variables if name in os.environ},
        python=sys.version.split()[0],
        packages={name: _version(name) for name in PACKAGES},
    )


def _driver(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    try:
        snapshot = sampled(args, WHO_FIELDS | {CLOCKS})
    except BackendError as error:
        return {"error": error, "snapshot": None}
    return {"snapshot": snapshot, "answer_seconds": time.monotonic() - began}


def drivers_of(backend: str, snapshot: Snapshot | None) -> tuple[DriverFacts, ...]:
    """Return what is here of the drivers that *backend* reads: of the vendors of the devices, if it read any."""
    read = [NVIDIA.backend if part == "smi" else part for part in parts_of(backend)]
    found = [driver_of(vendor) for vendor in VENDORS.values() if vendor.backend in read or DEFAULT_BACKEND in read]
    if shown := {device.vendor for device in snapshot.devices} if snapshot else set():
        return tuple(driver for driver in found if driver.vendor.name in shown)
    return tuple(driver for driver in found if driver.modules or driver.nodes)


def driver_of(vendor: Vendor, root: str = "") -> DriverFacts:
    """Return what is here of a driver; *root* is the directory that has dev and sys, without a slash at its end."""
    gpus: list[Card] = []
    if vendor.major == DRM_MAJOR:
        gpus = cards(root, vendor)
        modules = [card.driver for card in gpus]
        paths = [f"{vendor.device_node}{card.render_minor}" for card in gpus if card.render_minor is not None]
    else:
        modules = [name for name in vendor.drivers if os.path.exists(f"{root}/sys/module/{name}")]
        paths = [path.removeprefix(root) for path in glob(f"{root}{vendor.device_node}[0-9]*")]
    paths += [vendor.control_node] if paths and vendor.control_node else []
    nodes = {path: os.access(root + path, os.R_OK | os.W_OK) for path in sorted(paths)}
    groups = {_group_of(root + path) for path, is_open in nodes.items() if not is_open}
    return DriverFacts(
        vendor,
        modules=tuple(dict.fromkeys(modules)),
        version=vendor.kernel_version(root),
        toolkit=vendor.toolkit_version(root),
        nodes=nodes,
        groups=tuple(sorted(filter(None, groups))),
        counted=any(dmem.is_counted(root, card.address) for card in gpus),
    )


def _group_of(path: str) -> str:
    """Return the name of the group whose members may open a node, or "" if there is none but root's."""
    with suppress(OSError, KeyError):
        seen = os.stat(path)
        if seen.st_gid and seen.st_mode & 0o060 == 0o060:
            return grp.getgrgid(seen.st_gid).gr_name
    return ""


def _lock(args: argparse.Namespace, devices: Sequence[Device]) -> dict[str, Any]:
    try:
        directory = directory_of(args)
        if not directory.closed and not directory.is_missing():
            os.close(open_lock(directory, "gate"))
    except (ClaimError, BackendError) as error:
        return {"lock_error": str(error)}
    room = broker_error = None
    with suppress(OSError):
        room = room_for_records(directory)
    is_silent, trouble, unguarded = False, None, None
    paused = Pauses(directory, append).processes(rehearsed=False)
    if directory.keeper is not None:  # only the daemon gives the locks
        try:
            exchange(directory, {"do": "claims"})
        except GpuguardError as error:
            broker_error = str(error)
    if os.path.lexists(daemon_files(directory).file(SOCKET_NAME)):  # a daemon that ends removes it
        try:
            status = query_daemon(directory, {"do": "status"}, StatusReply)
            trouble, unguarded = status.trouble, status.unguarded
        except NoDaemonSocket:
            is_silent = directory.keeper is None  # otherwise broker_error says it
        except GpuguardError:  # it does answer, if only that it is busy
            pass
    return {
        "lock_path": directory.path,
        "stalled": stalled_jobs(directory),
        "lock_owner": directory.owner,
        "lock_missing": directory.is_missing(),
        "lock_faults": tuple(lock_faults(directory, devices, _A_SHARE, None).values()),
        "file_system": file_system(directory.locks),
        "keeper": directory.keeper,
        "broker_error": broker_error,
        "room": room,
        "daemon_fault": fault_of(directory),
        "daemon_silent": is_silent,
        "daemon_trouble": trouble,
        "daemon_unguarded": unguarded,
        "left_paused": 0 if daemon_lives(directory) else sum(map(is_alive, paused)),
    }


def _site_rules(args: argparse.Namespace) -> dict[str, Any]:
    directory = None
    with suppress(ClaimError, BackendError):
        directory = directory_of(args)
    site = read_queue_settings(directory)
    return {
        "line_path": site.path if os.path.lexists(site.path) else None,
        "line_faults": tuple(" ".join(" ".join(fault.lines(site.path)).split()) for fault in site.faults),
        "line_last_good": site.is_last_good,
    }


def _full_log() -> str | None:
    """Return the log, the machine's or the user's own, whose file system has no room for another line, or None."""
    for path in dict.fromkeys((MACHINE_EVENTS, events_path())):
        with suppress(OSError):
            room = os.statvfs(os.path.dirname(path) or ".")
            if room.f_bavail * room.f_frsize < LINE_BYTES:
                return path
    return None


def _library_error() -> str | None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        return str(error)
    return None


def _container(environ: Mapping[str, str]) -> str | None:
    """Return the kind of container that we are in, or None if we seem to be in none."""
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}
    kind = next((kind for path, kind in marks.items() if os.path.exists(path)), None)
    return kind or environ.get("container") or ("kubernetes" if "KUBERNETES_SERVICE_HOST" in environ else None)


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _number(path: str) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdecimal() else None
