"""The names of users, without waiting for a directory service that does not answer.

getpwuid may ask LDAP or SSSD, and hang with it.  A name is only for people: after SECONDS the number has to do, and
nobody is asked again in this process for a while.  Nor is who had no name nameless for ever: a service that is just
away says of its users that they do not exist, and of whom nobody knows who he is no policy ever ends a job.
Does not say who may do what: a user is always the uid.
"""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from time import monotonic

SECONDS = 1.0
AGAIN_SECONDS = 60.0
PACE_SECONDS = 1.0  # between two who are asked for again: whoever may use user namespaces has 65536 uids without a name

_names: dict[int, str] = {}
_nameless: dict[int, float] = {}  # uid -> when nobody knew him
_silent: list[float] = []  # when the directory service fell silent
_again: list[float] = []  # when somebody without a name was last asked for again


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none or nobody answers in time."""
    if uid not in _names and _is_worth_asking(uid):
        answered = allocate_lock()
        answered.acquire()
        start_new_thread(_look_up, (uid, answered.release))
        if not answered.acquire(timeout=SECONDS):
            _silent[:] = [monotonic()]
    return _names.get(uid, str(uid))


def _is_worth_asking(uid: int) -> bool:
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


def _look_up(uid: int, done: object) -> None:
    import pwd

    try:
        _names[uid] = pwd.getpwuid(uid).pw_name
        _nameless.pop(uid, None)
    except (KeyError, OverflowError):
        _nameless[uid] = monotonic()
    finally:
        assert callable(done)
        done()
