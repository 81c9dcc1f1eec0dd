"""What the commands deny, quarantine and keep have in common: marks as text and JSON, and their lines in the log."""

from __future__ import annotations

import argparse
import os
import sys
import time

from gpuguard import history
from gpuguard.claims.lockfiles import LockDirectory
from gpuguard.cli.choice_options import quantity
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.marks import MAX_REASON, Mark, read_marks, to_json
from gpuguard.model import Event
from gpuguard.text import neutralise
from gpuguard.units import format_duration, parse_duration

LONGEST_SECONDS = 365 * 86400.0


def seconds_of(args: argparse.Namespace) -> float | None:
    """The value of --for, between a second and a year."""
    seconds = quantity("--for", args.for_, parse_duration)
    if seconds is not None and not 1 <= seconds <= LONGEST_SECONDS:
        raise InvalidRequest("--for: write 1s to 365d.")
    return seconds


def reason_of(args: argparse.Namespace) -> str:
    """The value of --reason."""
    reason: str = args.reason or ""
    if len(reason) > MAX_REASON:
        raise InvalidRequest(f"--reason has at most {MAX_REASON} characters.")
    return reason


def administrator() -> str:
    """Who changes marks by hand, in words."""
    return "the administrator" if os.geteuid() == 0 else "the owner of the directory"


def write_down(args: argparse.Namespace, kind: str, outcome: str, mark: Mark) -> None:
    """Leave an Event where the daemon of this machine would."""
    choose_log(args)
    facts = (("until_unix_seconds", mark.until), ("by_uid", os.getuid()))
    devices = () if kind == "deny" else (mark.name,)
    if not history.append(
        Event(time.time(), kind, outcome, mark.user, devices, message=mark.reason or None, facts=facts)
    ):
        print(f"gpuguard: done, but the log cannot be written: {history.complaint()}.", file=sys.stderr)


def choose_log(args: argparse.Namespace) -> None:
    """Write events of root where the daemon of this machine writes its own."""
    simulated = args.backend.startswith("simulated")
    if "GPUGUARD_EVENTS" not in os.environ and os.geteuid() == 0 and not simulated:
        os.environ["GPUGUARD_EVENTS"] = history.MACHINE_EVENTS


def show(directory: LockDirectory, kind: str, *, as_json: bool) -> int:
    """Print the marks of a kind."""
    from gpuguard.views.text import json_text, put

    if directory.owner is None:
        raise GpuguardError(
            "nothing is denied, quarantined or kept without a directory of root's: run `sudo gpuguard setup` once."
        )
    now = time.time()
    marks = sorted(read_marks(directory, kind, now).values(), key=lambda mark: mark.since)
    if as_json:
        put([json_text({"schema": 1, kind: [to_json(mark) for mark in marks]})], sys.stdout)
    else:
        put([line_of(mark, now) for mark in marks] or [f"nothing is {kind}."], sys.stdout)
    return 0


def line_of(mark: Mark, now: float) -> str:
    """``"bob  for another 1h59m  by the administrator: too many jobs"``."""
    what = f"{mark.user} ({mark.name})" if mark.user else mark.name
    left = "until it is ended" if mark.until is None else f"for another {format_duration(round(mark.until - now))}"
    return neutralise(f"{what}  {left}  by {mark.by}" + (f": {mark.reason}" if mark.reason else ""))
