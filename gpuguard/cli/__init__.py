"""The command line: one file per sub-command, each with ``add_options(parser)`` and ``main(args) -> exit code``.

`gpuguard.cli.dispatch` finds the command; this file opens and closes the process around it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from gpuguard.cli.dispatch import run_command_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command line, and end the process with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _fill_standard_streams()
    status = run_command_line(words)
    _flush_standard_streams()
    os._exit(status)  # at once: a thread that hangs in a driver or a mail server must not keep the command


def _fill_standard_streams() -> None:
    """Put /dev/null where a stream was closed before our start: the next file opened would be taken for that stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # close-on-exec, so that the job finds the stream closed as without us
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream closed
            continue
