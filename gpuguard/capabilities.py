"""What the kernel lets this process do beyond its user: capabilities(7), read from the kernel, not guessed from a uid.

A guard that runs as a user of its own can signal other users' processes with CAP_KILL and see their programs with
CAP_SYS_PTRACE, while root in a container may be able to do neither.  The guard does not pass its capabilities on: the
programs that it runs start without them.  Decides nothing: see preflight, daemon.
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
    return os.geteuid() == 0 or has(KILL)


def may_signal(uids: Iterable[int]) -> bool:
    """Whether this process may signal one that has these uids (real, effective, saved, ...): kill(2)."""
    real, _, saved, *_ = (*uids, -1, -1, -1)
    return bool({real, saved} & {os.getuid(), os.geteuid()}) or has(KILL)


def lacking() -> tuple[str, ...]:
    """Say in words what a guard lacks to act on other users' processes; () if it lacks nothing."""
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
    """Keep the service's capabilities from every program that this thread, or a thread it starts later, runs."""
    if _capability_set("CapAmb:") != 0:
        _prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)


def lend_for_reading() -> bool:
    """Let the next programs see what this process sees, but signal no process.

    Returns whether keep_to_ourselves() must be called afterwards.  Root does not need it: its programs see everything.
    """
    if not has(PTRACE):
        return False
    for capability in FOR_LOOKING:
        _prctl(_PR_CAP_AMBIENT, _RAISE, capability)
    return True


def _prctl(option: int, *words: int) -> None:
    import ctypes  # only the few processes that have capabilities to lend need it

    # A refusal does no harm: a capability that cannot be dropped is not there, one that cannot be raised is not lent.
    arguments = [ctypes.c_ulong(word) for word in (*words, 0, 0, 0, 0)[:4]]
    ctypes.CDLL(None, use_errno=True).prctl(ctypes.c_int(option), *arguments)
