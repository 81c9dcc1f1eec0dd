"""Ids of requests and claims as people write them.  Only this module takes them apart and puts them together.

    3f0c9e21          the caller's, or any user's if it is not ambiguous; its beginning is enough, such as 3f0
    alice/3f0c9e21    alice's; the number of the user works as well: 1000/3f0c9e21
    17, 17.3          a job of `gpuguard submit`, and its task 3; @ is the last job, @~1 the one before it
    alice/17          alice's job 17

A request in the queue has an id, and the claim that it becomes keeps it, unless the daemon gives the locks: the daemon
names its claims itself, because two claims with one id would count as one.  An id is random and never given twice.
Numbers counted for each user would be shorter to type, but such a number would belong to another job by the time that
an old command is repeated.  The id stands in the name of a file, which its owner chooses, so it means something only
together with the user who owns that file.

This module does not read files: see records and queue.tickets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from gpuguard.errors import ClaimError
from gpuguard.locale.messages import sentence

_JOB = re.compile(r"(?:([0-9]{1,7})|@(?:~([0-9]{1,7}))?)(?:\.([0-9]{1,7}))?", re.ASCII)


def job_and_task(text: str, jobs: Sequence[int]) -> tuple[int, int | None] | None:
    """Return the job that *text* means, one of *jobs* (the oldest first), and its task or None for all of them.

    Returns None if *text* means no job.
    """
    found = _JOB.fullmatch(text)
    if found is None:
        return None
    number, back, task = found.groups()
    if number is None:
        place = len(jobs) - 1 - int(back or 0)
        job = jobs[place] if place >= 0 else None
    else:
        job = int(number) if int(number) in jobs else None
    return None if job is None else (job, None if task is None else int(task))


def is_job_word(text: str) -> bool:
    """Return whether *text* is written like a job, with or without its user; a claim may still have such an id."""
    return _JOB.fullmatch(text.rpartition("/")[2]) is not None


class Named(Protocol):
    """A claim or a request in the queue, which both have an id."""

    @property
    def id(self) -> str:
        """The id that stands in the name of its file."""

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
    """Return ``"alice/3f0c9e21"``, which means the same to every user."""
    return f"{named.user}/{named.short_id}"


def one_of(text: str, candidates: Iterable[T], uid: int) -> T | None:
    """Return the candidate with the id *text*, else the one whose id begins with it, or None if there is none.

    Candidates of other users count only for root, because anybody can make one with an id that another user has.

    Raises:
        ClaimError: it could mean several, or it is another user's.
    """
    owner, slash, beginning = text.rpartition("/")
    named = [
        candidate
        for candidate in candidates
        # The ids of requests as --json prints them, and USER.ID as 0.1 wrote it.
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
        raise ClaimError(
            sentence("claim.several", "{text} could be {ids}: write one of these.", text=repr(text), ids=ids)
        )
    if named and not allowed:
        name, owner = named[0].short_id, named[0].user
        raise ClaimError(
            sentence("claim.of_root", "{id} is root's: only root can do that.", id=name)
            if owner == "root"
            else sentence(
                "claim.of_another", "{id} is {owner}'s: only {owner} and root can do that.", id=name, owner=owner
            )
        )
    return allowed[0] if allowed else None
