"""The names of users, without waiting for a directory service that does not answer.

getpwuid may ask LDAP or SSSD, and hang with it.  A name is only for people: after SECONDS the number has to do, and
nobody is asked again in this process.  Does not say who may do what: a user is always the uid.
"""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread

SECONDS = 1.0

_names: dict[int, str] = {}
_silent: list[int] = []  # the uid at which the directory service fell silent


def user_name(uid: int) -> str:
    """The name of a user, or the number where there is none or nobody answers in time."""
    if uid not in _names and not _silent:
        answered = allocate_lock()
        answered.acquire()
        start_new_thread(_look_up, (uid, answered.release))
        if not answered.acquire(timeout=SECONDS):
            _silent.append(uid)
    return _names.get(uid, str(uid))


def _look_up(uid: int, done: object) -> None:
    import pwd

    try:
        _names[uid] = pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        _names[uid] = str(uid)
    finally:
        assert callable(done)
        done()
