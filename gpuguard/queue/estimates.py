"""How long a job will take, estimated from the user's earlier jobs; for those that wait behind it.

Only a hint: a start that is planned by it is no promise that gpuguard can keep, unlike one by time limits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpuguard.history.audit_log import events_path, read_log
from gpuguard.jsonio import loads

TAIL_BYTES = 256 * 1024  # about 800 lines
FEWEST = 3  # jobs of the same program; fewer tell nothing
NEWEST = 20
FIRST_WORDS = 16  # of a command line, among which the script is looked for: launchers have options of their own
SCRIPTS = (".py", ".sh")


def expected_seconds(command: Sequence[str], path: str | None = None) -> float | None:
    """The median of the last jobs that ran the same program (and script), by the audit log, the user's own by default.

    None where these are too few.
    """
    # The audit log has the words with a blank between them, and of very long lines the beginning.
    wanted = program(" ".join(command)[:1000].split(" "))
    commands: dict[str, str] = {}
    lasted: list[float] = []
    try:
        lines = list(read_log(path or events_path(), TAIL_BYTES))
    except OSError:
        return None
    for line in lines:
        try:
            event = loads(line)
            claim, kind = event.get("claim"), event["kind"]
            if kind == "claim" and event["outcome"] == "started":
                commands[claim] = program(event["message"].split(" "))
            elif kind == "release" and commands.pop(claim, None) == wanted:
                seconds = float(event["facts"]["wall_time_seconds"])
                lasted += [seconds] if 0 <= seconds < float("inf") else []
        except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
            continue  # torn, or of another program
    lasted = sorted(lasted[-NEWEST:])
    return lasted[len(lasted) // 2] if len(lasted) >= FEWEST else None


def program(command: Sequence[str]) -> str:
    """What is compared: the program, and what it is told to run: ``"python train.py"``, ``"torchrun train.py"``."""
    words = [word for word in command if word]
    name = os.path.basename(words[0]) if words else ""
    rest = [word for word in words[1:FIRST_WORDS] if not word.startswith("-")]
    scripts = [word for word in rest if word.endswith(SCRIPTS)]
    return f"{name} {os.path.basename([*scripts, *rest][0])}" if rest else name
