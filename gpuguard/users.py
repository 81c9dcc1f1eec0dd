"""The names of users, without waiting for a directory service that does not answer.

getpwuid may ask LDAP or SSSD, and hang with it.  A name is only for people: after SECONDS the number has to do, and
the service is not asked again in this process for a while.  A uid without a name is asked for again, too: a service
that is away for a moment says that its users do not exist, and no policy ends a job of an unknown user.
Does not say who may do what: a user is always the uid; see accountable_uids() for the uids of rootless containers.
"""

from __future__ import annotations

import os
import pwd
import threading
from bisect import bisect_right
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SECONDS = 1.0
AGAIN_SECONDS = 60.0
PACE_SECONDS = 1.0  # between two that are asked for again: a user of user namespaces has 65536 uids without a name

SUBUIDS = "/etc/subuid"  # "alice:100000:65536", see subuid(5)
LEAST_SUBUID = 65536  # the smallest that is given to a user; useradd begins at 100000
MOST_BYTES = 2**20  # of that file, which is root's: 40,000 users

_Range = tuple[int, float, int, str]  # its first uid, the one behind its last, the first of all of that user, the user
_ranges: dict[object, list[_Range]] = {}  # of the file as it was read
_names: dict[int, str] = {}
_nameless: dict[int, float] = {}  # uid -> when it had no name
_silent: list[float] = []  # when the directory service fell silent
_again: list[float] = []  # when a uid without a name was last asked for again


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none or nothing answers in time."""
    if uid not in _names and _is_worth_a_lookup(uid):
        thread = threading.Thread(target=_read_name, args=(uid,), name=f"name of {uid}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this user has too many threads: the number has to do, until there is room
            return str(uid)
        thread.join(SECONDS)
        if thread.is_alive():
            _silent[:] = [monotonic()]
    return _names.get(uid, str(uid))


def _is_worth_a_lookup(uid: int) -> bool:
    if not _silent and uid not in _nameless:
        return True
    now = monotonic()
    if _silent and now - _silent[0] < AGAIN_SECONDS:
        return False
    _silent.clear()
    if uid in _nameless:
        if now - _nameless[uid] < AGAIN_SECONDS or (_again and now - _again[0] < PACE_SECONDS):
            return False
        _again[:] = [now]
    return True


def _read_name(uid: int) -> None:
    try:
        _names[uid] = pwd.getpwuid(uid).pw_name
        _nameless.pop(uid, None)
    except (KeyError, OverflowError):
        _nameless[uid] = monotonic()


def accountable_uids(uids: Iterable[int]) -> dict[int, int]:
    """uid -> the uid that stands for it where each user is one: the first of all that root has given to the same user.

    Any other uid stands for itself; so a user with such uids is two, their own and those.  Asks no directory service.
    """
    ranges = {uid: _range_of(uid) for uid in uids}
    return {uid: found[2] if found else uid for uid, found in ranges.items()}


def owner_of_given(uid: int) -> str | None:
    """The user to whom root has given *uid*, by name or number as it stands in SUBUIDS; None: it was given to none."""
    found = _range_of(uid)
    return found[3] if found else None


def _range_of(uid: int) -> _Range | None:
    given = _given() if uid >= LEAST_SUBUID else []
    found = given[bisect_right(given, (uid, float("inf"), 0, "")) - 1] if given else None
    return found if found and found[0] <= uid < found[1] else None


def _given() -> list[_Range]:
    """Each line of SUBUIDS that is one, in order."""
    try:
        with open(SUBUIDS, "rb") as file:
            status = os.fstat(file.fileno())
            version = SUBUIDS, status.st_ino, status.st_size, status.st_mtime_ns
            if version not in _ranges:
                _ranges.clear()
                _ranges[version] = _decoded(file.read(MOST_BYTES))
            return _ranges[version]
    except OSError:
        return []


def _decoded(content: bytes) -> list[_Range]:
    given, firsts = [], dict[bytes, int]()
    for line in content.split(b"\n"):
        user, *numbers = line.split(b":")
        if len(numbers) == 2 and all(number.isdigit() and len(number) < 11 for number in numbers):
            begin, count = map(int, numbers)
            name = user.decode("utf-8", "surrogateescape")
            given.append((begin, float(begin + count), firsts.setdefault(user, begin), name))
    return sorted(given)
