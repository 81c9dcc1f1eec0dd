"""Snapshot -> findings -> verdicts: what the policies want done now.  Pure but for the Memory that it is given.

Does not act: see actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuguard.model import Snapshot
from gpuguard.policies.ladder import Memory as Memory
from gpuguard.policies.policy import DESTRUCTIVE as DESTRUCTIVE
from gpuguard.policies.policy import KILL_AFTER as KILL_AFTER
from gpuguard.policies.policy import Judgement, Policy
from gpuguard.policies.policy import Note as Note
from gpuguard.policies.policy import Scope as Scope
from gpuguard.policies.policy import Step as Step
from gpuguard.policies.view import View


def evaluate(
    view: View | Snapshot,
    policies: Sequence[Policy],
    memory: Memory,
    *,
    interval: float | None = None,
    zone: float = 0.0,
) -> Judgement:
    """Judge one sample.

    Args:
        view: the sample and what is known about its people; its `past` is replaced by what *memory* has recorded.
        policies: with unique names.
        memory: of the samples before; changed in place.
        interval: seconds between samples; the median of the last distances when not given.
        zone: seconds east of UTC, for hours and days.

    Returns:
        The verdicts that are due now, each once, and notes on what was not acted on.
    """
    raise NotImplementedError
