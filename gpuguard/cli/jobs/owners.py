"""The user whose jobs a command is about: the caller or, for root, any user, as in ``alice/17``.

The records of a job lie in a home, where every name may be a link, and where a file server may let only their user in.
So root opens nothing there: a process that has become that user for good does it, with that user's rights alone.  It
starts no dispatcher, because that would have the limits and the control group of root's session.
"""

from __future__ import annotations

import os
import pwd
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuguard.batch.job_records import JobStore
from gpuguard.batch.public import published
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.ids import job_and_task
from gpuguard.enforcement import signals
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.files import closed_after, write_all
from gpuguard.jsonio import loads
from gpuguard.locale import _
from gpuguard.locale.messages import dumps, sentence
from gpuguard.units import format_duration
from gpuguard.users import user_name

ANSWER_SECONDS = 90.0  # longer than the processes of a job have to end: see ending

T = TypeVar("T")
# What is done with a job: the records, the word for the job there, and the user on whose behalf it is done, or None for
# the owner.  The result must be one that JSON has.
Act = Callable[[JobStore, str, str | None], T]


@dataclass(frozen=True)
class JobWord:
    """A job as it was written on the command line: the word for it among the jobs of its owner."""

    owner: int  # uid
    word: str

    @property
    def prefix(self) -> str:
        """What stands before the number of the job where the caller reads it: ``alice/`` for root."""
        return "" if self.owner == os.geteuid() else f"{user_name(self.owner)}/"

    def do(self, act: Act[T], directory: LockDirectory) -> T:
        """Do something with the job, on behalf of its owner, whose dispatcher is looked for in *directory*.

        Raises what *act* raises, for another user's job as GpuguardError.
        """
        if self.owner == os.geteuid():
            return act(JobStore(), self.word, None)
        by, job = user_name(os.geteuid()), self.word.partition(".")[0]
        # A user who has set XDG_STATE_HOME has no records in the usual place; the one that lists the job comes first.
        places = [
            (job in (str(waiting.id) for waiting in public.jobs), public.place)
            for uid, _lives, public in published(directory)
            if uid == self.owner
        ]
        _listed, place = max(places, default=(False, ""))
        answer: T = _as_user(self.owner, lambda: act(JobStore(place or None), self.word, by))
        return answer

    def exists(self, directory: LockDirectory) -> bool:
        """Return whether there is such a job.  Raises GpuguardError, OSError."""
        return self.do(lambda store, word, _by: job_and_task(word, store.ids()) is not None, directory)


def job_words(words: Sequence[str]) -> list[JobWord]:
    """Return the jobs that *words* mean.  Raises InvalidRequest, and ClaimError if one is not the caller's."""
    found = list(map(_job_word, words))
    for word, job in zip(words, found, strict=True):
        if os.geteuid() not in (0, job.owner):
            name = user_name(job.owner)
            raise ClaimError(
                sentence(
                    "claim.of_another", "{id} is {owner}'s: only {owner} and root can do that.", id=word, owner=name
                )
            )
    return found


def _job_word(text: str) -> JobWord:
    name, slash, word = text.rpartition("/")
    if not slash:
        return JobWord(os.geteuid(), text)
    try:
        return JobWord(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid, word)
    except (KeyError, ValueError):
        raise InvalidRequest(_("there is no user {user}.").format(user=name)) from None


def _as_user(uid: int, act: Callable[[], Any]) -> Any:
    """Return what *act* returns in a child process that has become that user for good.  Raises GpuguardError."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            # The kernel lets no process of the user look into this one, which holds what root had in its memory: it has
            # changed its user, and starts no program.
            write_all(writing, dumps(_answer(uid, act)))
        finally:
            os._exit(0)
    os.close(writing)
    with closed_after(reading), closed_after(os.pidfd_open(child)) as pidfd:
        said = _read_to_end(reading)
        if said is None:
            signals.forward(pidfd, signal.SIGKILL)
            raise GpuguardError(
                _(
                    "the process that acted as {user} did not come back within {time}: a file of theirs may hang."
                ).format(user=user_name(uid), time=format_duration(ANSWER_SECONDS))
            )
    os.waitpid(child, 0)
    try:
        answer = loads(said)
    except ValueError:
        raise GpuguardError(
            _("the process that acted as {user} was killed: try again.").format(user=user_name(uid))
        ) from None
    if "fault" in answer:
        raise GpuguardError(answer["fault"])
    return answer["value"]


def _read_to_end(pipe: int) -> bytes | None:
    """Return what comes through *pipe* until it is closed, or None if that takes too long.

    The user can stop the process at the other end, or let it open a FIFO.
    """
    said, until, poll = b"", time.monotonic() + ANSWER_SECONDS, select.poll()
    poll.register(pipe)
    while poll.poll(max(0.0, until - time.monotonic()) * 1000):
        part = os.read(pipe, 2**16)
        if not part:
            return said
        said += part
    return None


def _answer(uid: int, act: Callable[[], Any]) -> dict[str, Any]:
    try:
        _become(uid)
        return {"value": act()}
    except (GpuguardError, OSError, ValueError) as fault:
        return {"fault": str(fault)}


def _become(uid: int) -> None:
    """Be that user, with all groups, for good.  Raises InvalidRequest, OSError."""
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        raise InvalidRequest(_("there is no user {user}.").format(user=uid)) from None
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(uid)
    os.environ["HOME"] = user.pw_dir
    os.environ.pop("XDG_STATE_HOME", None)
