"""What the daemon answers at its door, a noun for each request.

An answer that lacks a field, as that of a daemon of another version may, is refused.  Does not ask: see calling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuguard.errors import GpuguardError
from gpuguard.typed import noun


@dataclass(frozen=True)
class Kept:
    """To `keep`."""

    until_unix_seconds: float
    user: str | None
    device: str | None


@dataclass(frozen=True)
class Ended:
    """To `end`."""

    ended: int


@dataclass(frozen=True)
class Against:
    """One thing that a policy has against somebody."""

    policy: str
    kind: str
    user: str | None
    pid: int | None
    claim: str | None
    device: str | None
    since_unix_seconds: float
    last: str | None
    next: str | None
    next_unix_seconds: float | None
    enforce: bool


@dataclass(frozen=True)
class Status:
    """To `status`."""

    enforcing: bool
    standing: tuple[Against, ...]
    left_out: int


@dataclass(frozen=True)
class Reloaded:
    """To `reload`."""

    path: str
    policies: int
    faults: int
    first: str | None


@dataclass(frozen=True)
class Given:
    """To `claim`: the id of the claim and the names of its locks."""

    claim: str
    locks: tuple[str, ...]


def checked(answer: Mapping[str, Any], kind: type) -> Mapping[str, Any]:
    """*answer*, if it has all that a *kind* has, as it should be.

    Raises:
        GpuguardError: it has not.
    """
    try:
        noun(kind, dict(answer))
    except ValueError as error:
        raise GpuguardError(
            f"the daemon gave an answer that cannot be understood: {error}.  Restart it: it may be of another version."
        ) from None
    return answer
