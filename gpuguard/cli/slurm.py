"""On a node of a Slurm cluster: what Slurm gives to a job is claimed for its owner, as if by `gpuguard run`.

gpuguard slurm setup --print     the lines of gres.conf, cgroup.conf and slurm.conf for this machine, and the scripts
gpuguard slurm prolog            Prolog= of slurm.conf: claim the job's GPUs, or have the job put back into the queue
gpuguard slurm epilog            Epilog=: give them back
gpuguard slurm task-prolog       TaskProlog=: tell the job of its claim, for `gpuguard run` and grab_gpus() in it

So people who use a node by hand and Slurm's jobs exclude each other: a GPU that a user has claimed by hand is never
given to a job silently.  Exit codes: 0 done, or the job was put back; 1 neither: Slurm drains the node then.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import groupby

from gpuguard.backends import DEFAULT_BACKEND
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.cli.event_log import choose_log
from gpuguard.cli.options import (
    SubcommandRow,
    add_source_options,
    add_table,
    backend_of,
    directory_of,
    quantity,
    sampled,
)
from gpuguard.clusters import slurm_jobs
from gpuguard.clusters.slurm_jobs import Allocation
from gpuguard.device_state import vendor_of
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import audit_log
from gpuguard.jobs import adoption, slurm_claim
from gpuguard.jsonio import loads
from gpuguard.locale.messages import dumps, sentence
from gpuguard.model import HEALTH, MEMORY, MODEL, Device, Event, EventKind, EventOutcome, SignalName
from gpuguard.sanitize import neutralise
from gpuguard.units import format_ranges, parse_duration
from gpuguard.users import user_name
from gpuguard.views.text import put

PLACE = "/etc/slurm"
SCRIPTS = {"prolog": "Prolog", "epilog": "Epilog", "task-prolog": "TaskProlog"}

MOST_CHARACTERS = 1000  # of a line in the log
KILLED_SECONDS = 0.5  # until slurmd knows that a job that was put back must not start
# Slurm starts such a job again as soon as slurmd may forget the order to end it, counted from just before the epilog;
# but slurmd looks for what to forget only every 2 s.  If the job started in between, its prolog would count as already
# run.
FORGOTTEN_SECONDS = 2.5
WAIT = "5s"  # until the memory of a job that has just ended is free, and the shortest jobs of others have ended


# `gpuguard slurm setup --print`: what Slurm's files need on this machine.  It writes nothing.


def _setup_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("--print", None, "show them (needed: nothing is written by this command)"),
        ("--place", "PATH", "of the scripts (default: %(default)s)", {"default": PLACE}),
        ("--wait", "DURATION", "as in `gpuguard slurm prolog`"),
    )
    add_source_options(parser)


def _setup(args: argparse.Namespace) -> int:
    if not args.print:
        raise InvalidRequest("Slurm's files are yours: `gpuguard slurm setup --print` shows what they need.")
    devices = slurm_jobs.with_files(sampled(args, {MEMORY, MODEL, HEALTH}).devices)
    # The program, and the options that say where it looks if not at the usual places.
    program = os.path.abspath(sys.argv[0])
    command = [
        program if os.path.basename(program) == "gpuguard" else "/usr/bin/gpuguard",
        *(["--backend", args.backend] if args.backend != DEFAULT_BACKEND else []),
        *(["--dir", args.dir] if args.dir else []),
    ]
    host = socket.gethostname().partition(".")[0]
    put(map(neutralise, lines(host, devices, args.place, command, args.wait)), sys.stdout)
    return 0


def lines(host: str, devices: Sequence[Device], place: str, command: Sequence[str], wait: str | None) -> list[str]:
    """Return the text, in the order in which an admin needs it."""
    rows = sorted(devices, key=_minor)
    names = [_kind(device) for device in rows]
    gres = ",".join(f"gpu:{kind}:{names.count(kind)}" for kind in dict.fromkeys(names))
    text = [
        f"# {place}/gres.conf",
        *(f"NodeName={host} Name=gpu Type={kind} File={_files(list(same))}" for kind, same in groupby(rows, key=_kind)),
        *(["# GPUs of several types: the rule outside_scheduler of gpuguard's daemon says nothing here"]
          if len(set(names)) > 1 else []),
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
    ]  # fmt: skip
    for name in SCRIPTS:
        more = ["--wait", wait] if wait and name == "prolog" else []
        text += [
            "",
            f"# {place}/gpuguard-{name}: of root, mode 755",
            "#!/bin/sh",
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"exec {shlex.join([command[0], 'slurm', name, *command[1:], *more])}",
        ]
    return text


def _minor(device: Device) -> int:
    return device.index if device.minor_number is None else device.minor_number


def _kind(device: Device) -> str:
    """Return the type of a device in a form that Slurm takes, such as ``"h100_80gb_hbm3"``."""
    name = re.sub(rf"^{vendor_of(device).title}\s+", "", device.name or "gpu")
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "gpu"


def _files(devices: Sequence[Device]) -> str:
    """Return the device files of *devices* as Slurm writes them, such as ``"/dev/nvidia[0-2,5]"``."""
    node, numbers = vendor_of(devices[0]).device_node, format_ranges(map(_minor, devices))
    return f"{node}{numbers}" if len(devices) == 1 else f"{node}[{numbers}]"


# What Slurm calls before and after a job.


def _prolog_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        metavar="DURATION",
        default=WAIT,
        help="for the user who has one of the GPUs to be gone; meanwhile Slurm gives others to other jobs "
        "(default: %(default)s)",
    )
    add_source_options(parser)


def _prolog(args: argparse.Namespace) -> int:
    given = slurm_jobs.allocation(os.environ)
    wait = quantity("--wait", args.wait, parse_duration) or 0.0
    if not given.gpus:
        return 0
    _refuse_other_than_root(args)
    report, tells = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(report)
        _hold(args, given, wait, tells)
    os.close(tells)
    with os.fdopen(report, "rb") as file:
        answer = file.read()
    if answer == b"!":
        return 0
    os.waitpid(holder, 0)
    reason: str = sentence("slurm.no_holder", "the process that should hold its claim ended")
    if answer:
        reason = loads(answer)["why"]
        reason = " ".join(reason.split()) if "\n" in reason else reason
    outcome, was_put_back = _put_back(given, reason)
    print(f"gpuguard: job {given.job} does not start here: {reason} ({outcome}).", file=sys.stderr)
    time.sleep(KILLED_SECONDS)
    return 0 if was_put_back else 1


def _hold(args: argparse.Namespace, given: Allocation, wait: float, tells: int) -> None:
    """Claim the devices in a process of its own, tell the prolog, and stay until the claim is over."""
    try:
        claim = _claimed(args, given, wait)
        woken, wake = adoption.wake_pipe((*adoption.ENDING, slurm_claim.WAKING))
        text = sentence("slurm.has", "job {job} has GPUs {gpus} of this node", job=given.job, gpus=",".join(given.gpus))
        _log("claim", "slurm job", given, text, claim)
        os.write(tells, b"!")
    except GpuguardError as error:
        os.write(tells, dumps({"why": str(error)}))
        os._exit(1)
    adoption.detach({*claim.pass_fds, woken, wake})
    outcome = slurm_claim.hold(claim, given, woken)
    claim.release()
    os.seteuid(0)
    _log("release", "slurm job", given, outcome, claim)
    os._exit(0)


def _claimed(args: argparse.Namespace, given: Allocation, wait: float) -> Claim:
    directory = directory_of(args, make=True)
    if slurm_claim.claim_of_job(directory, given):  # the job was put back, and its epilog did not run
        slurm_claim.end_claim(directory, given)
    with closing(backend_of(args)) as backend:
        claim = slurm_claim.claim_for_job(backend, directory, given, wait=wait)
    name = os.environ.get("SLURM_JOB_NAME", "")
    # Written as root, because the number of a job is no secret, and anybody can put a file where its record is read.
    note = f"Slurm job {given.job}" + (f": {name}" if name else "")
    claim.write_record(directory, JobDetails(note=note), owner=given.uid)
    slurm_claim.become(given.uid)
    return claim


def _epilog(args: argparse.Namespace) -> int:
    given = slurm_jobs.allocation(os.environ)
    _refuse_other_than_root(args)
    if slurm_claim.end_claim(directory_of(args), given) is None and given.gpus:
        time.sleep(FORGOTTEN_SECONDS)
    return 0


def _task_prolog(args: argparse.Namespace) -> int:
    """Print what slurmstepd reads: `export NAME=VALUE` for the environment, `print TEXT` for the user."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal() or not any(name in os.environ for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")):
        return 0
    given = Allocation(job, os.geteuid(), ())
    claim = slurm_claim.claim_of_job(directory_of(args), given)
    if claim is None:
        # Another job may have the GPUs, because no prolog ran or the claim was taken away.
        reason = sentence(
            "slurm.not_claimed", "the GPUs of job {job} are not claimed for it, so nothing starts on them", job=job
        )
        outcome, _ = _put_back(given, reason)
        print(f"print gpuguard: {reason} ({outcome}).")
        return 1
    print(f"export GPUGUARD_CLAIM={claim.id}\nexport GPUGUARD_GPUS={','.join(claim.devices)}")
    return 0


def _refuse_other_than_root(args: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        raise GpuguardError(f"slurmd calls `gpuguard slurm {args.action}` as root.")
    choose_log(args)


def _put_back(given: Allocation, reason: str) -> tuple[EventOutcome, bool]:
    """Have the job put back, with the reason where its owner and the admin look for it.

    Returns (the outcome, whether Slurm has put the job back or cancelled it).
    """
    done = slurm_jobs.put_back(given, reason)
    outcome: EventOutcome = done or "not put back"
    _log("slurm", outcome, given, reason)
    return outcome, bool(done)


def _log(
    kind: EventKind, outcome: EventOutcome | SignalName, given: Allocation, message: str, claim: Claim | None = None
) -> None:
    event = Event(
        time=time.time(),
        kind=kind,
        outcome=outcome,
        user=user_name(given.uid),
        devices=tuple(device.uuid for device in claim or ()),
        claim=given.claim,
        message=message if len(message) <= MOST_CHARACTERS else message[:MOST_CHARACTERS],
        facts=(("uid", given.uid), ("slurm_job", given.job)),
    )
    euid = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)  # the log is root's
    written = audit_log.append(event)
    os.seteuid(euid)
    if not written:
        print(f"gpuguard: {audit_log.events_path()} cannot be written.", file=sys.stderr)


ACTIONS = {
    "prolog": SubcommandRow("claim the GPUs of the job for its owner, or have it put back", _prolog_options, _prolog),
    "epilog": SubcommandRow("give the GPUs of the job back", add_source_options, _epilog),
    "task-prolog": SubcommandRow("tell the job of its claim", add_source_options, _task_prolog),
    "setup": SubcommandRow("show the lines for Slurm's files on this machine", _setup_options, _setup),
}
