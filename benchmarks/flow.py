"""How far a reader has to go: files of gpuguard that a job's start executes, and moves from one file to another.

    python benchmarks/flow.py            gpuguard run --quiet -n 2 -- true, on 8 fake devices; then, on simulated ones,
                                         a tick of the guard that sends one SIGTERM to a real process
    python benchmarks/flow.py --list     and which files, with the calls into each

Counted by sys.setprofile in the process of the command: a file counts when a function of it runs (what an import runs
does not, bodies of classes among it), a move is a call from a function of one file into a function of another.
"""

from __future__ import annotations

import argparse
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import gpuguard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import FakeNvml
from starters import surroundings

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


def flow_of(do: Callable[[], object]) -> Flow:
    """What *do* executes."""
    flow = Flow()
    sys.setprofile(flow)
    try:
        do()
    finally:
        sys.setprofile(None)
    return flow


def command(*words: str) -> None:
    """Run `gpuguard WORDS` in this process."""
    from gpuguard.cli import run_command_line

    if status := run_command_line(list(words)):
        raise SystemExit(f"gpuguard {' '.join(words)} ended with {status}")


def a_stranger() -> int:
    """The pid of a process that is no descendant of this one, of a user with a name whom nothing protects."""
    from gpuguard.enforcement.identity import is_of_the_system

    identity: dict[str, Any] = {}
    if os.getuid() == 0:
        users = [user for user in pwd.getpwall() if not is_of_the_system(user.pw_uid)]
        if not users:
            raise SystemExit("needs a user with a name: `useradd somebody`")
        identity = {"user": users[0].pw_uid, "group": users[0].pw_gid, "extra_groups": []}
    words = ["sh", "-c", "sleep 60 >/dev/null & echo $!"]
    started = subprocess.run(words, stdout=subprocess.PIPE, start_new_session=True, cwd="/", check=True, **identity)
    time.sleep(0.1)  # so that it is older than the sample
    return int(started.stdout)


def a_tick(node: str, claims: str) -> Flow:
    """What a step of the guard executes that finds one process over a limit and ends it."""
    from gpuguard import procfs
    from gpuguard.backends import simulated_node
    from gpuguard.backends.client import open_worker
    from gpuguard.claims.directory import lock_directory
    from gpuguard.model import Event
    from gpuguard.policies.policy import Policy, Step
    from gpuguard.policies.thresholds import MemoryRule
    from gpuguard.units import parse_memory_amount
    from gpuguard.watchdog import Watchdog

    rule = MemoryRule(parse_memory_amount("10GiB"))
    policy = Policy("memory", (rule,), hold=0.0, steps=(Step("terminate"),), enforce=True)
    events: list[Event] = []
    guard = Watchdog(
        open_worker(f"simulated:{node}"),  # as the daemon has it
        (policy,),
        lock_directory(claims),
        enforce=True,
        on_event=events.append,
        share_host_pids=True,
    )
    guard.step()
    pid = a_stranger()
    try:
        pattern = simulated_node.WorkPattern(20 * 2**30, 20 * 2**30)

        def use(state: simulated_node.SimulatedNode) -> simulated_node.SimulatedNode:
            row = simulated_node.Use(state.devices[0].uuid, pid, procfs.start_time(pid) or 0.0, pattern, 50.0)
            return replace(state, uses=(row,))

        simulated_node.update(node, use)
        guard.step()  # one sample alone never decides
        flow = flow_of(guard.step)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not any(event.kind == "terminate" and event.outcome == "about to" for event in events):
        raise SystemExit(f"the guard has ended nothing: {[event.message for event in events]}")
    return flow


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="the files, with the calls into each")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as place, FakeNvml(Path(place)) as fake:
        node = str(Path(place, "node"))
        os.environ["GPUGUARD_SIM_DIR"] = node
        os.environ["GPUGUARD_EVENTS"] = str(Path(place, "events"))
        command("sim", "start", "8xH100-80GB")
        # In this order: `gpuguard run` makes this process adopt every orphan, and the guard spares its own children.
        tick = a_tick(node, str(Path(place, "claims")))
        os.environ.update(surroundings(fake, Path(place, "claims")))
        start = flow_of(lambda: command("run", "--quiet", "-n", "2", "--", "true"))
        flows = {"run -n 2 -- true": start, "a tick with one SIGTERM": tick}
    for name, flow in flows.items():
        print(f"{name}: {len(flow.calls)} files, {flow.moves} moves between them")
        if options.list:
            for file, count in flow.calls.most_common():
                print(f"{count:6} {file}")


if __name__ == "__main__":
    main()
