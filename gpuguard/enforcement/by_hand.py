"""Signals that users send by hand, from `gpuguard top`, as carefully as the guard sends its own.

Every check of preflight must hold, on a sample taken after the question.  The line in the audit log comes first, and
the limits of the guard apply: three signals a minute, and SIGKILL only KILL_AFTER after SIGTERM.  There is no grace for
a person in front of a terminal, because that person is the one who asks.  Users reach only their own processes; root
reaches those of people, never those of root or of the system.  This module asks for no confirmation: see top.app.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpuguard.backends import Backend
from gpuguard.enforcement.actions import ActionOutcome, act
from gpuguard.enforcement.guard_limits import ActionLimits
from gpuguard.enforcement.identity import Protected
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.locale import N_
from gpuguard.locale.messages import sentence
from gpuguard.model import WHO_FIELDS, ActionName, Event, Finding, Subject, Verdict
from gpuguard.procfs import boot_clock
from gpuguard.users import user_name

# No action here needs a handler or options: checkpoint and renice are left to policies, which name them.
BY_HAND: Mapping[ActionName, str] = {
    "terminate": N_("SIGTERM: end it, it may save first"),
    "kill": N_("SIGKILL: end it at once (30 s after SIGTERM)"),  # KILL_AFTER
    "pause": N_("SIGSTOP: stop it for a while"),
    "resume": N_("SIGCONT: let it go on"),
}
NAME = "by hand"


@dataclass(frozen=True)
class Operator:
    """The person who signals, and the means to do it."""

    backend: Backend  # to ask which processes there are
    append: Callable[[Event], bool]  # writes an Event down; False if it could not
    limits: ActionLimits  # with the past actions of this operator
    protected: Protected = field(default_factory=Protected)  # users and programs that the policy file never touches


def signal_process(
    operator: Operator, action: ActionName, process: tuple[int, float], devices: tuple[str, ...]
) -> ActionOutcome:
    """Do *action*, one of BY_HAND, to a process (pid, start time) on *devices*, unless anything speaks against it.

    Raises:
        BackendError: the driver cannot be asked, so nothing was done.
    """
    if action not in BY_HAND:
        why = sentence("action.unknown", "there is no action {action}", action=repr(action))
        return ActionOutcome("refused", why, process[0])
    snapshot = operator.backend.sample(WHO_FIELDS, list(devices))
    rows = [(device, row) for device in snapshot.devices for row in device.processes or ()]
    listed = [(device, row) for device, row in rows if (row.pid, row.start_time) == process]
    if not listed:
        return ActionOutcome("gone", sentence("by_hand.not_there", "it is not on the GPU any more"), process[0])
    device, row = listed[0]
    if os.geteuid() and row.uid != os.geteuid():
        owner = row.user or sentence("by_hand.unknown_user", "a user who is not known")
        why = sentence("by_hand.of_others", "it belongs to {user}: only root signals processes of others", user=owner)
        return ActionOutcome("refused", why, row.pid)
    uids = {row.uid for _, row in rows if row.uid is not None}
    context = ActionContext(
        operator.backend,
        operator.append,
        lambda verdict, fresh: True,  # the condition is that the operator wants it
        enforce=True,
        protected=operator.protected.uids_of(uids, {}),
        protected_executables=operator.protected.executables,
        share_host_pids=operator.backend.simulated,  # the pids of a simulated node are those of this machine
        interactive_grace=0.0,
        limits=operator.limits,
    )
    subject = Subject("process", device.uuid, row.pid, row.start_time, row.uid, user=row.user)
    asked = sentence("by_hand.asked", "asked for by {user}", user=user_name(os.getuid()))
    finding = Finding(NAME, subject, asked, (row,))
    return act(
        Verdict(policy=NAME, finding=finding, action=action, step=0, since=boot_clock(), enforce=True),
        snapshot,
        context,
    )[0]
