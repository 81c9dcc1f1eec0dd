"""What `gpuguard run` does about a wish behind the record of its claim: end the job, or give the devices up without.

Who may write there is decided by the kernel (see wishes).  Devices are given up only while no process of the job
computes on them, by a look of our own; what cannot be seen counts as a process.  Does not unlock: see Claim.reassert.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from gpuguard.claims.wishes import ENDING, REFUSED, RELEASED, STOP, Letter
from gpuguard.errors import BackendError, ClaimError
from gpuguard.jobs.settle import descendants
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES
from gpuguard.request import computes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuguard.backends import Backend
    from gpuguard.claims.hold import Claim
    from gpuguard.jobs.ending import Ending

_MYSELF = "gpuguard run"


def heed(wish: Letter, claim: Claim, backend: Backend, ending: Ending, say: Callable[[str], None]) -> None:
    """Answer *wish*; what is promised is done by the next reassert() of the claim, or by the ladder of *ending*."""
    if wish.what == STOP:
        answer = Letter(ENDING, _MYSELF)
    elif against := in_use(claim, backend):
        answer = Letter(REFUSED, _MYSELF, against)
    else:
        answer = Letter(RELEASED, wish.by, wish.why)
    try:
        claim.answer(answer)
    except (OSError, ClaimError) as error:
        say(f"a wish to release the claim {wish.in_words()} could not be answered: {error}")
        return
    if answer.what == ENDING:
        ending.begin(time.monotonic(), "release", f"to be released {wish.in_words()}")
    elif answer.what == REFUSED:
        say(f"the claim was to be released {wish.in_words()}.  Refused: {answer.why}.")


def in_use(claim: Claim, backend: Backend) -> str | None:
    """Why the devices cannot be given up now: a process of the job computes there, or that cannot be seen."""
    fields = {MEMORY, PROCESSES, PROCESS_DETAILS} | ({HEALTH} if any(each.parent_uuid for each in claim) else set())
    uuids = {device.uuid for device in claim}
    try:
        snapshot = backend.sample(fields, list(uuids))
    except BackendError as error:
        return f"whether the job computes cannot be seen: {error}"
    here = [each for each in snapshot.devices if each.uuid in uuids or each.parent_uuid in uuids]
    if uuids - {each.uuid for each in here}:
        return "the driver does not show one of the devices"
    family = descendants()
    for device in here:
        if device.processes is None or not device.processes_plausible:
            return f"the driver gives no list of the processes on device {device.index} that could be believed"
        for process in filter(computes, device.processes):
            if process.pid in family or not process.uid or process.uid == os.geteuid():
                return f"pid {process.pid} computes on device {device.index}"
    return None
