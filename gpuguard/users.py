"""Users: their names and groups, the user who answers for a uid, and what this process may do beyond its own user.

getpwuid may ask LDAP or SSSD, and hang with it.  A name is only for people: after LOOKUP_SECONDS the number has to do,
and this process does not ask the service again for a while.  It does ask again for a uid without a name, because a
service that is away for a moment says that its users do not exist, and no policy ends a job of an unknown user.  A
user is always identified by the uid, and a uid that root has given to a user is that user: see certain_owner().

A guard that runs as a user of its own can signal other users' processes with CAP_KILL and see their programs with
CAP_SYS_PTRACE, while root in a container may be able to do neither: so capabilities(7) are read from the kernel, not
guessed from a uid.  The guard does not pass its capabilities on: the programs that it runs start without them.  Decides
nothing: see preflight, daemon.
"""

from __future__ import annotations

import grp
import os
import pwd
import threading
from bisect import bisect_right
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOKUP_SECONDS = 1.0
AGAIN_SECONDS = 60.0
PACE_SECONDS = 1.0  # between two questions that are asked again: a user of user namespaces has 65536 uids without names

SUBUIDS = "/etc/subuid"  # "alice:100000:65536", see subuid(5)
LEAST_SUBUID = 65536  # the smallest that is given to a user; useradd begins at 100000
MOST_BYTES = 2**20  # of that file, which is root's: 40,000 users

CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE = 2, 5, 19  # linux/capability.h
_FOR_LOOKING = (CAP_DAC_READ_SEARCH, CAP_SYS_PTRACE)
_PR_CAP_AMBIENT = 47  # linux/prctl.h
_RAISE, _CLEAR_ALL = 2, 4

NAMELESS = -1  # stands for all uids without a name, of which a user of user namespaces has 65536

_Range = tuple[int, str | None]  # (its first uid, the one user to whom it was given, or None); it ends at the next one
_given_by: dict[object, list[_Range]] = {}  # version of the file that was read -> its ranges
_names: dict[int, str] = {}
_numbers: dict[str, int] = {}  # uids of the users in that file
_asked: dict[object, float] = {}  # uid or user that was not found, or question about groups -> when it was last asked
_silent: list[float] = []  # when the directory service fell silent
_again: list[float] = []  # when one of them was last asked again
_Question = tuple[str, int]  # ("name of group", gid) or ("groups of user", uid)
_answers: dict[_Question, Any] = {}  # None: there was none


def user_name(uid: int) -> str:
    """The name of a user, or the number if there is none or no service answers in time."""
    if uid not in _names:
        _look_up(uid)
    return _names.get(uid, str(uid))


def read_groups(uid: int) -> dict[int, str]:
    """Read the groups of a user: number -> name, where a group without a name has its number in digits.

    This may wait for a directory service.  Raises KeyError if there is no such user, OverflowError, or OSError.
    """
    user, names = pwd.getpwuid(uid), {}
    for gid in os.getgrouplist(user.pw_name, user.pw_gid):
        try:
            names[gid] = grp.getgrgid(gid).gr_name
        except KeyError:
            names[gid] = str(gid)
    return names


def group_name(gid: int) -> str | None:
    """The name of a group, or None if no group has that number now or no service answers in time."""
    name: str | None = _answer("name of group", gid)
    return name


def is_in_group(uid: int, gid: int) -> bool | None:
    """Whether the system's user database has a user in a group, or None if groups_of() is."""
    groups = groups_of(uid)
    return None if groups is None else gid in groups


def groups_of(uid: int) -> dict[int, str] | None:
    """The groups of a user as read_groups() has them, or None if no service knows the user or answers in time.

    An answer may be AGAIN_SECONDS old, or older while there is no new one.
    """
    if user_name(uid) == str(uid):  # a user may bring any number of such uids
        return None
    groups: dict[int, str] | None = _answer("groups of user", uid)
    return groups


def _answer(what: str, number: int) -> Any:
    _look_up((what, number))
    return _answers.get((what, number))


def _look_up(asked: int | str | _Question) -> None:
    """Ask for the name of a uid, for the uid of a name, or for the answer to a question, if that is worth it now."""
    if not _is_worth_a_lookup(asked):
        return
    thread = threading.Thread(target=_read, args=(asked,), name=f"name of {asked}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # this user has too many threads: the answer has to wait until there is room
        return
    thread.join(LOOKUP_SECONDS)
    if thread.is_alive():
        _silent[:] = [monotonic()]


def _is_worth_a_lookup(asked: int | str | _Question) -> bool:
    if not _silent and asked not in _asked:
        return True
    now = monotonic()
    if _silent and now - _silent[0] < AGAIN_SECONDS:
        return False
    _silent.clear()
    if asked in _asked:
        # Names of users need no pace, because there are no more of them here than root has written down.
        soon = not isinstance(asked, str) and _again and now - _again[0] < PACE_SECONDS
        if soon or now - _asked[asked] < AGAIN_SECONDS:
            return False
        _again[:] = [now]
    return True


def _read(asked: int | str | _Question) -> None:
    if isinstance(asked, tuple):
        _answers[asked] = _read_groups(*asked)
        _asked[asked] = monotonic()
        return
    try:
        if isinstance(asked, int):
            _names[asked] = pwd.getpwuid(asked).pw_name
        else:
            _numbers[asked] = pwd.getpwnam(asked).pw_uid
        _asked.pop(asked, None)
    except (KeyError, OverflowError, ValueError):
        _asked[asked] = monotonic()


def _read_groups(what: str, number: int) -> str | dict[int, str] | None:
    try:
        return grp.getgrgid(number).gr_name if what == "name of group" else read_groups(number)
    except (KeyError, OverflowError, OSError):
        # A service that is away says that its users do not exist, so they stay in the groups in which they were.
        return None if what == "name of group" else _answers.get((what, number))


def certain_owner(uid: int) -> int:
    """The uid of the user who answers for *uid*, because root has given it to them for containers without root.

    The result is *uid* itself wherever that is in doubt: *uid* has a name of its own, no service says whether it has
    one, it was given to two users, or the number of the user is unknown now.  It is *uid* itself as well if that was
    given to root, whose containers are anybody's.  A uid without a name is no known user.
    """
    owner = None if uid in _names else owner_of_given(uid)
    if owner is None or user_name(uid) != str(uid) or uid not in _asked:
        return uid
    return _number_of(owner) or uid


def accountable_uid(uid: int) -> int:
    """The uid that stands for one *uid*: see accountable_uids()."""
    return accountable_uids([uid])[uid]


def accountable_uids(uids: Iterable[int]) -> dict[int, int]:
    """uid -> the uid that stands for it where each user counts as one: that of the user to whom root has given it.

    While that user's number is unknown, and for root, it is the lowest of all uids that were given to that user.  Any
    other uid stands for itself.  Unlike certain_owner() this asks for no names of *uids*, because a user may bring any
    number of them.  So it is for counting and sharing, not for acting against anybody.
    """
    owners = {uid: None if uid in _names else owner_of_given(uid) for uid in uids}
    return {uid: uid if not owner else _number_of(owner) or _lowest_of(owner, uid) for uid, owner in owners.items()}


def owner_of_given(uid: int) -> str | None:
    """The one user to whom root has given *uid*, by name or number as in SUBUIDS, or None if there is no such user."""
    ranges = _given() if uid >= LEAST_SUBUID else []
    behind = bisect_right(ranges, uid, key=lambda given: given[0])
    return ranges[behind - 1][1] if behind else None


def _lowest_of(owner: str, uid: int) -> int:
    return min((begin for begin, user in _given() if user == owner), default=uid)


def _number_of(user: str) -> int | None:
    if user.isdecimal():
        return int(user)
    if user not in _numbers:
        _look_up(user)
    return _numbers.get(user)


def _given() -> list[_Range]:
    """The ranges in SUBUIDS as they are now."""
    try:
        with open(SUBUIDS, "rb") as file:
            status = os.fstat(file.fileno())
            version = SUBUIDS, status.st_ino, status.st_size, status.st_mtime_ns
            if version not in _given_by:
                _given_by.clear()
                _numbers.clear()  # a user who is removed and made anew gets another number, and other uids
                _given_by[version] = _decoded(file.read(MOST_BYTES))
            return _given_by[version]
    except OSError:
        return []


def _decoded(content: bytes) -> list[_Range]:
    edges = list[tuple[int, int, str]]()
    for line in content.split(b"\n"):
        name, *numbers = line.split(b":")
        if len(numbers) == 2 and all(number.isdigit() and len(number) < 11 for number in numbers):
            begin, count = map(int, numbers)
            user = name.decode("utf-8", "surrogateescape")
            edges += [(begin, 1, user), (begin + count, -1, user)] if count else []
    ranges, owners = list[_Range](), Counter[str]()
    for edge, change, user in sorted(edges):
        owners[user] += change
        owners += Counter()  # this drops those that are at 0
        ranges.append((edge, next(iter(owners)) if len(owners) == 1 else None))
    return ranges


# Capabilities


def has_capability(capability: int) -> bool:
    """Whether the calling thread may use *capability*; False if the kernel does not say."""
    return bool((_capability_set("CapEff:") or 0) >> capability & 1)


def _capability_set(name: str) -> int | None:
    """Return a capability set of the calling thread as bits, or None if the kernel does not say."""
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as lines:
            words = next((line.split() for line in lines if line.startswith(name)), [])
        return int(words[1], 16)
    except (OSError, IndexError, ValueError):
        return None


def is_powerful() -> bool:
    """Whether this process could harm other users if another user's code or file steered it."""
    return os.geteuid() == 0 or has_capability(CAP_KILL)


def may_signal(uids: Iterable[int]) -> bool:
    """Whether this process may signal one that has these uids (real, effective, saved, ...): kill(2)."""
    real, _, saved, *_ = (*uids, -1, -1, -1)
    return bool({real, saved} & {os.getuid(), os.geteuid()}) or has_capability(CAP_KILL)


def missing_capabilities() -> tuple[str, ...]:
    """Say in words what a guard lacks to act on other users' processes; () if it lacks nothing."""
    uid = os.geteuid()
    name = user_name(uid)
    if not has_capability(CAP_KILL):
        text = f"this is {name} without CAP_KILL: it can signal {name}'s own processes, and nothing is done to others."
    elif uid != 0 and not has_capability(CAP_SYS_PTRACE):
        text = f"this is {name} without CAP_SYS_PTRACE: it cannot see what others run, and nothing is done to them."
    else:
        return ()
    return (f"{text}  Start it as root, or by systemd: see `gpuguard setup --print-unit`.",)


def keep_capabilities() -> None:
    """Keep the service's capabilities from every program that this thread, or a thread it starts later, runs."""
    if _capability_set("CapAmb:") != 0:
        _prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)


def lend_capabilities() -> bool:
    """Let the next programs see what this process sees, but signal no process.

    Returns whether keep_capabilities() must be called afterwards.  Root does not need it: its programs see everything.
    """
    if not has_capability(CAP_SYS_PTRACE):
        return False
    for capability in _FOR_LOOKING:
        _prctl(_PR_CAP_AMBIENT, _RAISE, capability)
    return True


def _prctl(option: int, *words: int) -> None:
    import ctypes  # only the few processes that have capabilities to lend need it

    # A refusal does no harm: a capability that cannot be dropped is not there, one that cannot be raised is not lent.
    arguments = [ctypes.c_ulong(word) for word in (*words, 0, 0, 0, 0)[:4]]
    ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *arguments)
