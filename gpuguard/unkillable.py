"""Processes that outlive SIGKILL: nothing more is sent to them, their devices go out of service, and people are told.

They sit in a driver or on a dead file system, where no signal reaches them; until that is mended every further signal
would be one for nothing.  Sends no signal: what is done about the device are actions as those of any policy.
"""

from __future__ import annotations

from dataclasses import replace

from gpuguard import actions
from gpuguard.guards.case import Context, boot_clock, is_alive, plain_event
from gpuguard.guards.ledger import UNKILLABLE_SECONDS, Deed
from gpuguard.model import Finding, Snapshot, Subject, Verdict


def give_up(context: Context, snapshot: Snapshot) -> tuple[actions.Outcome, ...]:
    """Look after the processes that were killed: those that are still there a minute later are left alone for good.

    Their devices are quarantined until an administrator ends that, but never more than half of the machine, and the
    targets of the policies' messages are told.  When such a process is gone after all, the guard acts on its devices
    again.  To be called after each sample.

    Returns:
        An Outcome, "unkillable", for each that is found for the first time.
    """
    now, found = boot_clock(), []
    stuck = context.ledger.unkillable
    for process in [each for each in stuck if not is_alive(each)]:
        del stuck[process]  # somebody has reset the device
    for deed in context.ledger.deeds:
        over = deed.live and deed.action == "kill" and now - deed.clock >= UNKILLABLE_SECONDS
        if over and deed.process not in stuck and is_alive(deed.process):
            stuck[deed.process] = deed.devices
            why = f"it outlived SIGKILL by {now - deed.clock:.0f}s: its devices need a reset, and are left alone"
            found.append(actions.Outcome(actions.UNKILLABLE, why, deed.process[0]))
            facts = {"policy": deed.policy or None}
            context.append(plain_event("kill", actions.UNKILLABLE, why, deed.devices, deed.process[0], facts=facts))
            _take_out_of_service(deed, now, context, snapshot)
    return tuple(found)


def _take_out_of_service(deed: Deed, now: float, context: Context, snapshot: Snapshot) -> None:
    why = f"pid {deed.process[0]} outlived SIGKILL by {now - deed.clock:.0f}s: the device needs a reset"
    for place, uuid in enumerate(deed.devices):
        device = snapshot.device(uuid)
        rows = [row for row in (device.processes or () if device else ()) if (row.pid, row.start_time) == deed.process]
        finding = Finding("unkillable", Subject("device", device=uuid), why, tuple(rows))
        verdict = Verdict(deed.policy or "unkillable", finding, "quarantine", 0, deed.clock, enforce=True)
        actions.act(verdict, snapshot, context)
        for target in context.alarm if place == 0 else ():
            actions.act(replace(verdict, action="notify", options=(("to", target),)), snapshot, context)
