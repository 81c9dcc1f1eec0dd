"""The keys of line.yaml, and what they mean.  Does not find the file: see file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Literal

from gpuguard.documents.accounts import Accounts
from gpuguard.documents.decoding import GROUP, USER, Broken, Decoder
from gpuguard.documents.yaml_nodes import Fault, Source
from gpuguard.errors import InvalidRequest
from gpuguard.line.order import PRIORITIES, ReservationKeys, Rules
from gpuguard.units import parse_duration, parse_percent


@dataclass(frozen=True)
class PriorityKeys:
    """The highest priority that users may ask for.

    Args:
        everybody: low, normal or high.
        high: users that may ask for high.
        low: users that never get more than low.
    """

    everybody: Literal["low", "normal", "high"] = "normal"
    high: tuple[Annotated[int, USER], ...] = ()
    low: tuple[Annotated[int, USER], ...] = ()


@dataclass(frozen=True)
class LineKeys:
    """All keys of the file."""

    fair_share: bool = True
    half_life: Annotated[float, parse_duration] = Rules.half_life
    patience: Annotated[float, parse_percent] = 100 * Rules.patience
    bound: Annotated[float, parse_duration] = Rules.bound
    priority: PriorityKeys = field(default_factory=PriorityKeys)
    reservations: ReservationKeys = field(default_factory=ReservationKeys)

    def __post_init__(self) -> None:
        if self.half_life <= 0:
            raise InvalidRequest("half_life must be more than 0: write fair_share: false to count nothing.")


def parse(content: bytes, accounts: Accounts) -> tuple[Rules, ReservationKeys, tuple[Fault, ...]]:
    """What *content* says; with faults, what holds without it."""
    try:
        source = Source(content.decode("utf-8"))
    except UnicodeDecodeError:
        return Rules(), ReservationKeys(), (Fault(0, 0, "this is not UTF-8.", "Save the file as UTF-8."),)
    root = source.tree()
    if root is None:
        return Rules(), ReservationKeys(), tuple(source.faults)
    decoder = Decoder(source, {USER: accounts.user, GROUP: accounts.group})
    with suppress(Broken):
        decoder.value(root, LineKeys)
    keys: LineKeys | None = decoder.values.get(())
    if keys is None or source.faults:
        return Rules(), ReservationKeys(), tuple(source.faults)
    highest_of = dict.fromkeys(keys.priority.high, PRIORITIES["high"]) | dict.fromkeys(
        keys.priority.low, PRIORITIES["low"]
    )
    rules = Rules(
        fair_share=keys.fair_share,
        half_life=keys.half_life,
        patience=keys.patience / 100,
        bound=keys.bound,
        highest=PRIORITIES[keys.priority.everybody],
        highest_of=highest_of,
    )
    return rules, keys.reservations, ()
