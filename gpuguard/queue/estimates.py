"""How long a job will take, estimated from the user's earlier jobs; for those that wait behind it.

Only a hint: a start that is planned by it is no promise that gpuguard can keep, unlike one by time limits.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

from gpuguard.history.audit_log import events_path, read_log
from gpuguard.jsonio import loads

TAIL_BYTES = 256 * 1024  # about 800 lines
NEWEST = 2  # jobs: more of them tell less of the next one (Tsafrir, Etsion and Feitelson 2007)
FIRST_WORDS = 16  # of a command line, among which the script is looked for: launchers have options of their own
SCRIPTS = (".py", ".sh")


def expected_seconds(command: Sequence[str], path: str | None = None) -> float | None:
    """How long the last jobs took that ran the same program (and script), else the last ones of any, by the audit log.

    That is the user's own by default.  None where there are none.
    """
    wanted = program(" ".join(command)[:1000].split(" "))  # the audit log has the beginning of very long lines
    commands: dict[str, str] = {}
    lasted: list[float] = []
    alike: list[float] = []
    try:
        lines = list(read_log(path or events_path(), TAIL_BYTES))
    except OSError:
        return None
    for line in lines:
        try:
            event = loads(line)
            claim, kind = event.get("claim"), event["kind"]
            if kind == "claim" and event["outcome"] == "started":
                commands[claim] = program(_words(event["message"]))
            elif kind == "release" and (name := commands.pop(claim, None)) is not None:
                seconds = float(event["facts"]["wall_time_seconds"])
                if 0 <= seconds < float("inf"):
                    lasted.append(seconds)
                    alike += [seconds] if name == wanted else []
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
            continue  # torn, or of another program
    return estimate(alike or lasted)


def _words(line: str) -> list[str]:
    """What stands between the blanks of a command line, without the quotes of a shell."""
    if "'" in line:
        with suppress(ValueError):  # cut off within quotes
            line = " ".join(shlex.split(line))
    return line.split(" ")


def estimate(lasted: Sequence[float]) -> float | None:
    """How many seconds the next job will take, from those of the earlier ones, the newest last."""
    newest = lasted[-NEWEST:]
    return sum(newest) / len(newest) if newest else None


def probable_end(since: float, seconds: float, now: float) -> float:
    """When a job that runs *since* (unix time) ends, if it was to take so many *seconds*: doubled when exceeded."""
    lasts = max(1.0, seconds)
    while since + lasts <= now:
        lasts *= 2
    return since + lasts


def program(command: Sequence[str]) -> str:
    """What is compared: the program, and what it is told to run: ``"python train.py"``, ``"torchrun train.py"``."""
    words = [word for word in command if word]
    name = os.path.basename(words[0]) if words else ""
    rest = [word for word in words[1:FIRST_WORDS] if not word.startswith("-")]
    scripts = [word for word in rest if word.endswith(SCRIPTS)]
    return f"{name} {os.path.basename([*scripts, *rest][0])}" if rest else name
