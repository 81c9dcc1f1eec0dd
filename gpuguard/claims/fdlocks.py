"""Which files another process has locked, by /proc/PID/fdinfo, where what its descriptors are cannot be seen before.

Of a file that is no regular one its driver writes that text, too, and may wait for what its owner holds: an epoll(7)
that is just handing over events to a page of FUSE keeps whoever reads its fdinfo waiting, and no signal ends that
(state D), not even SIGKILL.  So a process apart reads it, with nothing of ours open: of whom it does not come back is
unknown what he has locked, until it does; and of whoever takes too much of all time with looks that do, see apart.
Only who may see that text, and not where descriptors lead, needs it: a guard with CAP_SYS_PTRACE.  See holders.
"""

from __future__ import annotations

import errno
import os
import select
from _thread import allocate_lock
from time import monotonic

from gpuguard.backends import sampler
from gpuguard.backends.apart import charge, owed_by
from gpuguard.users import user_name

SLACK_SECONDS = 0.5  # beyond what a look may take
SLACK_AGAIN = 0.05  # while others hang: many users who do so must not take the time of all
START_SECONDS = 10.0  # of a reader, in 0.05 s where nobody else computes: that it begins late is nobody's fault
MOST_OWED = 1.0  # seconds of slow looks at one user that are not paid off: as long as a look at all of his may take
MOST_HANGING = 16  # or nearly so: from then on nobody without a name is looked at: one user can have 65536 such uids

_KIND = "locks"
_asking = allocate_lock()
_reader: list[tuple[int, int, int, int]] = []  # whose it is, its pid, where to ask, where it answers
_hanging: dict[int, int] = {}  # uid -> pid of the reader that waits for something of his
_ended: list[int] = []  # readers to reap


def locked_files(pid: int | str, uid: int, seconds: float, *, whole: bool = False) -> dict[int, str]:
    """Descriptor -> "major:minor:inode" of what a process has locked; {} also where nobody can tell.

    Args:
        pid: of the process, or "PID/task/TID".
        uid: of whoever it acts for: nobody else is unknown when this look does not come back.
        seconds: it may take; then it is what was found until then.
        whole: raise where that is not all of it.

    Raises:
        TimeoutError: with *whole* only.
    """
    found = _asked(pid, uid, seconds)
    if whole and (found is None or not found[2]):
        raise TimeoutError
    return dict(found[0]) if found else {}


def _asked(pid: int | str, uid: int, seconds: float) -> tuple[list[tuple[int, str]], float, bool] | None:
    """What the reader says: descriptors with inodes, the seconds that it took, whether that is all; None: unknown."""
    with _asking:
        _reap()
        slow = owed_by(monotonic()).keys() | {(each, _KIND) for each in _hanging}
        if _is_unknown(uid) or (len(slow) >= MOST_HANGING and user_name(uid) == str(uid)):
            return None
        try:
            _, reader, ask, answers = _started()
            begun = monotonic()
            sampler.send(ask, (pid, seconds))
            if not _says_something(answers, seconds + (SLACK_AGAIN if _hanging else SLACK_SECONDS)):
                _hanging[uid] = reader
                charge((uid, _KIND), (now := monotonic()) - begun, now)
                _close()
                return None
            found = sampler.receive(answers)
        except OSError:  # no further process or file; or it has ended
            found = None
        if found is None:
            _close()
            return None
        charge((uid, _KIND), found[1], monotonic())
        return found[0], found[1], found[2]


def hangs(uid: int) -> bool:
    """Whether what somebody has locked is unknown: a look at it has not come back, or such looks took too long."""
    with _asking:
        _reap()
        return _is_unknown(uid)


def _is_unknown(uid: int) -> bool:
    return uid in _hanging or owed_by(monotonic()).get((uid, _KIND), 0.0) >= MOST_OWED


def _started() -> tuple[int, int, int, int]:
    if _reader and _reader[0][0] != os.getpid():  # of whom we are a copy
        _close()
    if not _reader:
        _reader.append(_start())
    return _reader[0]


def _start() -> tuple[int, int, int, int]:
    asked, ask, answers, answered = opened = sampler.pipes(2)
    try:
        pid = sampler.spawned("import gpuguard.claims.holders as h; h.answer()", "", (asked, answered))
    except OSError:
        sampler.close_all(opened)
        raise
    sampler.close_all((asked, answered))
    if not _says_something(answers, START_SECONDS) or sampler.receive(answers) is None:
        sampler.close_all((ask, answers))
        _ended.append(pid)
        raise OSError(errno.ETIME, os.strerror(errno.ETIME))
    return os.getpid(), pid, ask, answers


def _says_something(answers: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _close() -> None:
    """Leave the reader alone: it ends when it finds nobody at the other end."""
    for owner, pid, *descriptors in _reader:
        sampler.close_all(descriptors)
        if owner == os.getpid() and pid not in _hanging.values():
            _ended.append(pid)
    _reader.clear()


def _reap() -> None:
    _ended[:] = [pid for pid in _ended if not _has_ended(pid)]
    for uid, pid in list(_hanging.items()):
        if _has_ended(pid):
            del _hanging[uid]


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
