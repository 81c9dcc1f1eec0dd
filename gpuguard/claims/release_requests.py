"""What is written behind the record of a claim while it lives: wishes that it be given up, and what became of them.

The record is a letter box without a name that somebody could plant or flood: its owner and root can write to it, and
so can whoever may look into the owner's processes; the kernel sees to that.  The claim has it open, so it reads what is
meant for this very claim, even when the path is gone.  Each letter is a line of JSON behind the record's own.

    released    it is decided: the locks are being given up, and whoever reads this finishes what was begun
    yield       please give the devices up, the job may live on       stop    please end the job
    refused     no, and why                                           ending  the job is being ended

Does not give anything up: see hold and releasing.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.records import MAX_BYTES
from gpuguard.errors import ClaimError
from gpuguard.jsonio import loads

if TYPE_CHECKING:
    from typing import Any

RELEASED, YIELD, STOP, REFUSED, ENDING = "released", "yield", "stop", "refused", "ending"
WISHES = frozenset({YIELD, STOP})
WORDS = frozenset({RELEASED, YIELD, STOP, REFUSED, ENDING})

LONGEST = 400  # characters of a reason: there is one, and it is for people
READ_BYTES = 16_384  # from the end: a record has 4 KiB, a letter less than 3
FULL_BYTES = 65_536


@dataclass(frozen=True)
class ReleaseRequest:
    """One line.

    Args:
        what: one of WORDS.
        by: who wrote it: "root", "alice", "the policy idle-claims".
        why: for people.
        at: unix time.
    """

    what: str
    by: str
    why: str = ""
    at: float = 0.0

    def in_words(self) -> str:
        """``"by root at 15:04: somebody waits"``."""
        when = time.strftime(" at %H:%M", time.localtime(self.at)) if self.at else ""
        return f"by {self.by}{when}" + (f": {self.why}" if self.why else "")


def write(descriptor: int, letter: ReleaseRequest) -> None:
    """Put a letter behind a record.

    Raises:
        ClaimError: it is full of them; a decision finds room, whatever its owner has written there.
        OSError: it cannot be written.
    """
    import json

    end = os.fstat(descriptor).st_size
    if end > FULL_BYTES and letter.what == RELEASED:
        end = MAX_BYTES  # of the record itself
        os.ftruncate(descriptor, end)
    if end > FULL_BYTES:
        raise ClaimError("the record of this claim is full of letters: end its processes instead.")
    content = {
        "what": letter.what,
        "by": letter.by[:LONGEST],
        "why": letter.why[:LONGEST],
        "at_unix_seconds": round(letter.at or time.time(), 3),
    }
    line = b"\n" + json.dumps(content).encode("ascii") + b"\n"
    if os.pwrite(descriptor, line, end) < len(line):
        raise OSError(errno.ENOSPC, "no space left for a letter")


def read(descriptor: int) -> tuple[ReleaseRequest, ...]:
    """The letters behind a record, oldest first; what cannot be read is none."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, READ_BYTES, max(0, size - READ_BYTES))
    lines = tail.split(b"\n")[1:]  # the first one is the record, or a piece of a letter
    return tuple(letter for line in lines if line and (letter := _decode_request(line)))


def released(descriptor: int) -> ReleaseRequest | None:
    """The letter that says that this claim is given up."""
    try:
        return next((letter for letter in read(descriptor) if letter.what == RELEASED), None)
    except OSError:
        return None  # the program has closed our descriptor


def pending_request(descriptor: int) -> ReleaseRequest | None:
    """The last wish, if nothing was said about it yet."""
    try:
        letters = read(descriptor)
    except OSError:
        return None
    return letters[-1] if letters and letters[-1].what in WISHES else None


def _decode_request(line: bytes) -> ReleaseRequest | None:
    try:
        content = loads(line)
    except ValueError:
        return None
    what = content.get("what") if isinstance(content, dict) else None
    if not isinstance(what, str) or what not in WORDS:
        return None
    at = content.get("at_unix_seconds")
    number = float(at) if isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < 2**40 else 0.0
    return ReleaseRequest(what, _text(content.get("by")), _text(content.get("why")), number)


def _text(value: Any) -> str:
    return value[:LONGEST] if isinstance(value, str) else ""
