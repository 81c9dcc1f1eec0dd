"""`gpuguard` and `python -m gpuguard`: start the worker that reads the devices, then load the command line.

That way both interpreters load at the same time, which takes a third off the start of a job.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

READ_DEVICES = ("run", "select", "wait")
ASK_THE_DAEMON_FIRST = ("who", "explain")


def main() -> NoReturn:
    """Run the command line of this process, and end it with its exit code."""
    raises_at_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises_at_interrupt:  # otherwise Ctrl-C while all of this loads shows a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command, *options = sys.argv[1:] or [""]
    streams_open = None not in (sys.stdin, sys.stdout, sys.stderr)  # else the worker's pipes would be taken for them
    reads_here = command in READ_DEVICES or (command in ASK_THE_DAEMON_FIRST and not _daemon_publishes(options))
    if streams_open and reads_here and not _option(options, "--hosts") and not _option(options, "--hosts-file"):
        from gpuguard.backends import (  # loads subprocess and more, which --version and --help do not need
            BACKENDS,
            default_backend,
            parts_of,
            resolved,
            spawn,
            worker,
        )

        named = _option(options, "--backend")  # it may belong to the job, as in `--backend nccl`
        name = named if named.partition(":")[0].partition(",")[0] in BACKENDS else default_backend()
        for part in parts_of(resolved(name, _option(options, "--vendor") or None)):
            spawn.start_early(part, worker.serve)
    from gpuguard.cli import main as run_and_exit  # while the worker loads what it needs

    if raises_at_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_and_exit()


def _daemon_publishes(options: list[str]) -> bool:
    directory = _option(options, "--dir") or os.environ.get("GPUGUARD_DIR") or "/run/gpuguard"
    # A directory of root's for all users has a folder for the daemon, any other one has its files beside the claims.
    return any(os.path.exists(os.path.join(directory, folder, "state.json")) for folder in ("daemon", ""))


def _option(options: list[str], name: str) -> str:
    """Return the value of the option *name*, as far as it can be told without a parser, or "" if it is not given."""
    own = options[: options.index("--")] if "--" in options else options
    for position, word in enumerate(own):
        if word == name:
            return "".join(own[position + 1 : position + 2])
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}=")
    return ""


if __name__ == "__main__":
    main()
