"""How far a reader has to go: files of gpuguard that a job's start executes, and moves from one file to another.

    python benchmarks/flow.py            gpuguard run -n 2 -- true, on a simulated node of 8 devices
    python benchmarks/flow.py --list     and which files, with the calls into each

Counted by sys.setprofile in the process of the command: a file counts when a function of it runs (what an import runs
does not, bodies of classes among it), a move is a call from a function of one file into a function of another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import gpuguard

ROOT = os.path.dirname(gpuguard.__file__) + os.sep


class Flow:
    """What was called while it counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()  # by file
        self.moves = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """As sys.setprofile() wants it."""
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(ROOT):
            return
        callers = [frame, *_callers(frame)]
        if any(caller.f_code.co_name == "<module>" for caller in callers):
            return
        self.calls[name.removeprefix(ROOT)] += 1
        self.moves += len(callers) > 1 and callers[1].f_code.co_filename != name


def _callers(frame: FrameType) -> Iterator[FrameType]:
    """The frames of gpuguard below *frame*, the nearest first."""
    caller = frame.f_back
    while caller:
        if caller.f_code.co_filename.startswith(ROOT):
            yield caller
        caller = caller.f_back


def flow_of(words: list[str]) -> Flow:
    """What the command *words* executes."""
    from gpuguard.cli import run_command_line

    flow = Flow()
    sys.setprofile(flow)
    try:
        status = run_command_line(words)
    finally:
        sys.setprofile(None)
    if status:
        raise SystemExit(f"gpuguard {' '.join(words)} ended with {status}")
    return flow


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="the files, with the calls into each")
    options = parser.parse_args()
    from gpuguard.cli import run_command_line

    with tempfile.TemporaryDirectory() as place:
        os.environ["GPUGUARD_SIM_DIR"] = str(Path(place, "node"))
        os.environ["GPUGUARD_EVENTS"] = str(Path(place, "events"))
        run_command_line(["sim", "start", "8xH100-80GB"])
        run = flow_of(["run", "--quiet", "--backend", f"simulated:{place}/node", "-n", "2", "--", "true"])
    print(f"run -n 2 -- true: {len(run.calls)} files, {run.moves} moves between them")
    if options.list:
        for name, count in run.calls.most_common():
            print(f"{count:6} {name}")


if __name__ == "__main__":
    main()
