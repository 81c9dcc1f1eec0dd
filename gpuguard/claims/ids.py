"""Ids of requests and claims, as people write them: the one place that takes them apart and puts them together.

    3f0c9e21          of the caller's, or of any user where it is not ambiguous; its beginning will do, as 3f0
    alice/3f0c9e21    that of alice, also by the number of the user: 1000/3f0c9e21

A request that waits has an id, and the claim that it becomes keeps it, unless the daemon gives the locks: it names its
claims itself, because two of one id would count as one.  An id is random and never given twice: a number of a user's
own, shorter to type, would belong to another job by the time that an old command is repeated.  It stands in the name of
a file, which its owner chooses, so it means something only together with the user who owns that file.

Does not read files: see records and queue.tickets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from gpuguard.errors import ClaimError
from gpuguard.locale import _


class Named(Protocol):
    """What has an id: a claim, or a request that waits."""

    @property
    def id(self) -> str:
        """What stands in the name of its file."""

    @property
    def short_id(self) -> str:
        """The id, unique among those of one user."""

    @property
    def uid(self) -> int:
        """The owner of its file."""

    @property
    def user(self) -> str:
        """The name of that owner."""


T = TypeVar("T", bound=Named)


def full_id(named: Named) -> str:
    """``"alice/3f0c9e21"``, which means the same to every user."""
    return f"{named.user}/{named.short_id}"


def one_of(text: str, candidates: Iterable[T], uid: int) -> T | None:
    """The one candidate whose id *text* is, else the one whose id begins like it, or None if there is none.

    Those of other users count only for root.  Anybody can make one with the id of another user's.

    Raises:
        ClaimError: it could mean several, or it is another user's.
    """
    owner, slash, beginning = text.rpartition("/")
    named = [
        candidate
        for candidate in candidates
        # Ids of requests as --json has them, and USER.ID, as 0.1 wrote it.
        if text in (candidate.id, f"{candidate.user}.{candidate.short_id}")
        or (
            candidate.short_id.startswith(beginning or "/")
            and (not slash or owner in (candidate.user, str(candidate.uid)))
        )
    ]
    named = [candidate for candidate in named if candidate.short_id == beginning] or named
    allowed = [candidate for candidate in named if uid in (0, candidate.uid)]
    if len(allowed) > 1:
        ids = ", ".join(map(full_id, allowed))
        raise ClaimError(_("{text!r} could be {ids}: write one of these.").format(text=text, ids=ids))
    if named and not allowed:
        owner = named[0].user
        others = "" if owner == "root" else _("{owner} and ").format(owner=owner)
        raise ClaimError(
            _("{id} is {owner}'s: only {others}root can do that.").format(
                id=named[0].short_id, owner=owner, others=others
            )
        )
    return allowed[0] if allowed else None
