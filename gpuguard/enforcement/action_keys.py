"""What a policy may have done, and the keys of each action in a step.  The docstrings are the help.

Plain descriptions, so that a policy file can be read where nothing may be done.  Does nothing itself: see actions.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.errors import InvalidRequest
from gpuguard.units import parse_duration

# Signals that programs use to ask for a checkpoint.  Others end or stop a process, and have actions of their own.
CHECKPOINT_SIGNALS = ("USR1", "USR2", "HUP", "ALRM", "WINCH", "URG", "CONT")


def parse_checkpoint_signal(text: str) -> int:
    """The number of ``"USR1"`` or ``"SIGUSR1"``."""
    name = text.upper().removeprefix("SIG")
    if name not in CHECKPOINT_SIGNALS:
        raise InvalidRequest(f"{text!r} is no signal for a checkpoint: write one of {', '.join(CHECKPOINT_SIGNALS)}.")
    return int(signal.Signals[f"SIG{name}"])


def parse_niceness(text: str) -> int:
    """1 to 19."""
    if not re.fullmatch(r"[1-9]|1[0-9]", text):
        raise InvalidRequest(f"{text!r} is no niceness: write a number from 1 to 19; 19 is the nicest.")
    return int(text)


@dataclass(frozen=True)
class Log:
    """Write a line into the audit log, nothing else."""


@dataclass(frozen=True)
class Warn:
    """Tell the user on the terminal of the process what was seen and what comes next.

    Args:
        language: of the text; without it the one in which `messages` of the file has texts, else English.
    """

    language: Literal["en", "zh"] | None = None


@dataclass(frozen=True)
class Notify:
    """Send a message to one of the targets that the file names under `notify`.

    Args:
        to: name of the target.
    """

    to: str


@dataclass(frozen=True)
class Checkpoint:
    """Send a signal on which the program saves its work, if it has been made to.

    A program that was not made for it is ended by most of these signals.

    Args:
        signal: USR1, USR2, HUP, ALRM, WINCH, URG or CONT.
    """

    signal: Annotated[int, parse_checkpoint_signal] = int(signal.SIGUSR1)


@dataclass(frozen=True)
class Terminate:
    """Ask the process to end, by SIGTERM (and SIGCONT, if it is stopped)."""


@dataclass(frozen=True)
class Kill:
    """End the process by SIGKILL; not before 30 s after a terminate.  It can lose work and wedge the device."""


@dataclass(frozen=True)
class Pause:
    """Stop the process by SIGSTOP; it keeps its memory."""


@dataclass(frozen=True)
class Resume:
    """Let a paused process go on."""


@dataclass(frozen=True)
class Renice:
    """Lower the priority of the process on the CPU.

    Args:
        niceness: 1 to 19, the nicest.
    """

    niceness: Annotated[int, parse_niceness] = 10


@dataclass(frozen=True)
class Deny:
    """Give the user no new claims for a time; those that he has stay.  See `gpuguard deny`.

    Args:
        for: how long.
    """

    for_: Annotated[float, parse_duration] = 7200.0


@dataclass(frozen=True)
class Quarantine:
    """Take the device out of service: nobody gets a new claim of it.  Never more than half of the devices.

    Who has claimed it keeps it.  See `gpuguard quarantine`.

    Args:
        for: how long; without it, until an administrator ends it.
    """

    for_: Annotated[float, parse_duration] | None = None


@dataclass(frozen=True)
class ReleaseKeys:
    """Take a claim back under which no process computes; its shell or notebook lives on and is told.

    Whoever computes is asked to end by `terminate` instead: each of the two leaves out whom the other one means.
    """


@dataclass(frozen=True)
class Cancel:
    """End the Slurm job to which the process or the claim belongs, by scancel: all of it, on all its nodes.

    The daemon's user must be allowed that: root, SlurmUser or an operator of Slurm.
    """


@dataclass(frozen=True)
class RunHook:
    """Run a program of the admin: no shell, facts as JSON on its standard input and in its environment.

    Args:
        hook: name of a target under `notify` that is a hook.
    """

    hook: str


ACTION_KEYS: Mapping[str, type] = {
    "log": Log,
    "warn": Warn,
    "notify": Notify,
    "checkpoint": Checkpoint,
    "terminate": Terminate,
    "kill": Kill,
    "pause": Pause,
    "resume": Resume,
    "renice": Renice,
    "deny": Deny,
    "quarantine": Quarantine,
    "release": ReleaseKeys,
    "cancel": Cancel,
    "run_hook": RunHook,
}
