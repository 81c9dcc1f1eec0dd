"""Builders for tests of the queue.

from queues import a_ticket, a_machine
order([a_ticket(user=1), a_ticket(user=2, gpus=4)], {}, QueueRules(), 0.0)
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from gpuguard.queue.backfill import Fit, Machine, QueuePosition, plan
from gpuguard.queue.priority import QueueRules, Ticket
from gpuguard.request import Request

HOUR = 3600.0
SHARE = Request(share=True, memory=2**30)
_numbers = itertools.count(1)


def a_ticket(
    user: int = 1, gpus: int = 1, *, since: float = 0.0, requests: Sequence[Request] = (), **fields: Any
) -> Ticket:
    """A request that has waited since 0; later ones have later names."""
    facts: dict[str, Any] = {"id": f"t{next(_numbers):06}", "user": f"u{user}", **fields}
    return Ticket(uid=user, since=since, requests=tuple(requests) or (Request(num_gpus=gpus),), **facts)


def a_fit(devices: str, free: str | None = None) -> Fit:
    """The devices of these names, the best first; all of them are free unless *free* names those."""
    return Fit(tuple(devices.split()), frozenset((devices if free is None else free).split()))


def a_machine(
    queue: Sequence[Ticket],
    devices: Sequence[str] | int = 8,
    *,
    free: Sequence[str] | int | None = None,
    ends: Mapping[str, float] | None = None,
    **fields: Any,
) -> Machine:
    """Devices that will do for every request of *queue*; all of them are free unless *free* names or counts those."""
    names = [f"d{number}" for number in range(devices)] if isinstance(devices, int) else list(devices)
    opened = names if free is None else names[:free] if isinstance(free, int) else list(free)
    fit = Fit(tuple(names), frozenset(opened))
    fits = {request: fit for ticket in queue for request in ticket.requests}
    return Machine(fits, ends or {}, **{"free": fit.open, **fields})


def planned(
    queue: Sequence[Ticket], machine: Machine, usage: Mapping[int, float] | None = None, **rules: Any
) -> list[QueuePosition]:
    """The plan at time 0."""
    return plan(queue, machine, usage or {}, QueueRules(**rules), 0.0)


def started(positions: Sequence[QueuePosition]) -> list[str]:
    """Ids of those that may start now, in order."""
    return [position.ticket.id for position in positions if position.now]
