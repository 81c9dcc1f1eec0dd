"""What the kernel lets this process do beyond its user: capabilities(7), asked of it instead of guessed from a uid.

A guard with a user of its own can signal others by CAP_KILL and see their programs by CAP_SYS_PTRACE, and root in a
container may be able to do neither.  What it may do it does not hand on: programs that it runs start without.
Decides nothing: see preflight, daemon.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuguard.users import user_name

if TYPE_CHECKING:
    from collections.abc import Iterable

DAC_READ_SEARCH, KILL, PTRACE = 2, 5, 19  # linux/capability.h
FOR_LOOKING = (DAC_READ_SEARCH, PTRACE)

_PR_CAP_AMBIENT = 47  # linux/prctl.h
_RAISE, _CLEAR_ALL = 2, 4


def has(capability: int) -> bool:
    """Whether the calling thread may use *capability*; False where the kernel does not say."""
    return bool((_capability_set("CapEff:") or 0) >> capability & 1)


def _capability_set(name: str) -> int | None:
    """A set of capabilities of the calling thread, as bits; None where the kernel does not say."""
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as lines:
            words = next((line.split() for line in lines if line.startswith(name)), [])
        return int(words[1], 16)
    except (OSError, IndexError, ValueError):
        return None


def is_powerful() -> bool:
    """Whether others suffer if another user's code or file steers this process."""
    return os.geteuid() == 0 or has(KILL)


def may_signal(uids: Iterable[int]) -> bool:
    """Whether a process with these (real, effective, saved, ...) uids may be signalled: kill(2)."""
    real, _, saved, *_ = (*uids, -1, -1, -1)
    return bool({real, saved} & {os.getuid(), os.geteuid()}) or has(KILL)


def lacking() -> tuple[str, ...]:
    """What a guard lacks to act on others, in words; () when nothing."""
    uid = os.geteuid()
    name = user_name(uid)
    if not has(KILL):
        text = f"this is {name} without CAP_KILL: it can signal {name}'s own processes, and nothing is done to others."
    elif uid != 0 and not has(PTRACE):
        text = f"this is {name} without CAP_SYS_PTRACE: it cannot see what others run, and nothing is done to them."
    else:
        return ()
    return (f"{text}  Start it as root, or by systemd: see `gpuguard setup --print-unit`.",)


def keep_to_ourselves() -> None:
    """Let no program that this thread and those it starts later run have the capabilities that the service gave us."""
    if _capability_set("CapAmb:") != 0:
        _prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)


def lend_for_reading() -> bool:
    """Let the next programs see what we see, but signal no process; whether keep_to_ourselves() is needed after that.

    Not for root, whose programs see all of it anyway.
    """
    if not has(PTRACE):
        return False
    for capability in FOR_LOOKING:
        _prctl(_PR_CAP_AMBIENT, _RAISE, capability)
    return True


def _prctl(option: int, *words: int) -> None:
    import ctypes  # for the few that have capabilities to lend

    # A refusal changes nothing: what cannot be lowered is not there, what cannot be raised is not lent.
    arguments = [ctypes.c_ulong(word) for word in (*words, 0, 0, 0, 0)[:4]]
    ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *arguments)
