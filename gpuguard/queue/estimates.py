"""Estimates from the user's earlier jobs how long a job will take, for the requests that wait behind it.

An estimate is only a hint: gpuguard cannot promise a start that is planned by it, unlike one planned by time limits.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

from gpuguard.history.audit_log import events_path, read_log
from gpuguard.jsonio import loads

TAIL_BYTES = 256 * 1024  # about 800 lines
NEWEST = 2  # jobs; more of them predict the next one less well (Tsafrir, Etsion and Feitelson 2007)
FIRST_WORDS = 16  # of a command line are searched for the script, because launchers have options of their own
SCRIPTS = (".py", ".sh")


def expected_seconds(command: Sequence[str], path: str | None = None) -> float | None:
    """Estimate a job's seconds from the last jobs that ran the same program (and script), or else from any last jobs.

    The jobs are those of the audit log at *path*, by default the user's own.  Returns None if it has none.
    """
    wanted = program(" ".join(command)[:1000].split(" "))  # the audit log keeps only the beginning of very long lines
    commands: dict[str, str] = {}
    lasted: list[float] = []
    alike: list[float] = []
    try:
        lines = list(read_log(path or events_path(), TAIL_BYTES))
    except OSError:
        return None
    for line in lines:
        # A torn line, or one that another program wrote, counts for nothing.
        with suppress(ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
            event = loads(line)
            claim, kind = event.get("claim"), event["kind"]
            if kind == "claim" and event["outcome"] == "started":
                commands[claim] = program(_words(event["message"]))
            elif kind == "release" and (name := commands.pop(claim, None)) is not None:
                seconds = float(event["facts"]["wall_time_seconds"])
                if 0 <= seconds < float("inf"):
                    lasted.append(seconds)
                    alike += [seconds] if name == wanted else []
    return estimate(alike or lasted)


def _words(line: str) -> list[str]:
    """Split a command line at its blanks, and remove a shell's quotes."""
    if "'" in line:
        with suppress(ValueError):  # cut off within quotes
            line = " ".join(shlex.split(line))
    return line.split(" ")


def estimate(lasted: Sequence[float]) -> float | None:
    """Estimate the seconds of the next job from those of the earlier ones (newest last), or None if there are none."""
    newest = lasted[-NEWEST:]
    return sum(newest) / len(newest) if newest else None


def probable_end(since: float, seconds: float, now: float) -> float:
    """When a job that began at *since* ends (unix time); its expected *seconds* double each time it exceeds them."""
    lasts = max(1.0, seconds)
    while since + lasts <= now:
        lasts *= 2
    return since + lasts


def program(command: Sequence[str]) -> str:
    """The words by which jobs are compared: program and script, ``"python train.py"``, ``"torchrun train.py"``."""
    words = [word for word in command if word]
    name = os.path.basename(words[0]) if words else ""
    rest = [word for word in words[1:FIRST_WORDS] if not word.startswith("-")]
    scripts = [word for word in rest if word.endswith(SCRIPTS)]
    return f"{name} {os.path.basename([*scripts, *rest][0])}" if rest else name
