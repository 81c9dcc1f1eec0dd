"""The audit log of commands that do something by hand."""

from __future__ import annotations

import argparse
import os
import sys

from gpuguard.backends import is_simulated
from gpuguard.history import audit_log
from gpuguard.locale import _
from gpuguard.model import Event


def choose_log(args: argparse.Namespace, *, is_admin: bool | None = None) -> None:
    """Write an administrator's events where this machine's daemon writes its own.  *is_admin* None stands for root."""
    is_admin = os.geteuid() == 0 if is_admin is None else is_admin
    if "GPUGUARD_EVENTS" not in os.environ and is_admin and not is_simulated(args.backend):
        os.environ["GPUGUARD_EVENTS"] = audit_log.MACHINE_EVENTS


def log_event(args: argparse.Namespace, event: Event) -> None:
    """Log what a command did by hand, or report that it cannot be logged."""
    choose_log(args)
    if not audit_log.append(event):
        print(
            _("gpuguard: done, but the log cannot be written: {complaint}.").format(complaint=audit_log.complaint()),
            file=sys.stderr,
        )
