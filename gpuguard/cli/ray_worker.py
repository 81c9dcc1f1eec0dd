"""What stands before a command that `gpuguard submit --via ray` has handed over: `gpuguard run` on what Ray gave.

Where somebody else has taken one of them, it asks Ray for another one of the same node, which it starts a process for:
what is connected with Ray has threads, and those would catch the signals that are for the job.

gpuguard.cli.ray_worker DIRECTORY [options of gpuguard run] -- CMD...
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from select import select

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory
from gpuguard.cli import build_parser, exit_code, run
from gpuguard.cli.submit import python_words
from gpuguard.cli.terminal import WaitProgress, print_notice
from gpuguard.clusters import ray as engine
from gpuguard.errors import GpuguardError, InvalidRequest, NotEnoughGpus
from gpuguard.request import Request

AT_ONCE_SECONDS = 15.0  # what --no-wait leaves to look for another device: Ray needs some 2 s to give one

_kept: list[engine.NodeDevices] = []  # as long as this process lives, and the job with it


class NodeDevicesProcess:
    """Places of a process of its own (ray_places), which ends with this one."""

    def __init__(self, have: int) -> None:
        # Not where the command starts: a file ray.py of its author is not Ray.
        self._child = subprocess.Popen(
            [*python_words("gpuguard.cli.ray_places"), str(have)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd="/",
        )  # fmt: skip
        self._rest = b""
        self._pending = 0
        self._left = int((self._lines(wait=True) or ["0"])[0])

    def want(self, number: int) -> bool:
        """See Places."""
        more = min(number - self._pending, self._left)
        if more > 0:
            self._tell(f"want {more}")
            self._pending, self._left = self._pending + more, self._left - more
        return self._pending > 0

    def arrived(self) -> tuple[str, ...]:
        """See Places."""
        found = tuple(self._lines(wait=False))
        self._pending -= len(found)
        return found

    def keep(self, devices: Sequence[str]) -> None:
        """See Places."""
        self._tell(f"keep {','.join(devices)}")

    def _tell(self, text: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(text.encode() + b"\n")
        except BrokenPipeError:
            self._pending = self._left = 0

    def _lines(self, wait: bool) -> list[str]:
        """What it has said; nothing more comes from one that has ended."""
        assert self._child.stdout is not None
        while wait or select([self._child.stdout], [], [], 0)[0]:
            said = self._child.stdout.read(4096)
            self._rest += said
            if not said:
                self._pending = self._left = 0
                break
            wait = wait and b"\n" not in self._rest
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]


def main(words: Sequence[str]) -> int:
    """The exit code, as of `gpuguard run`."""
    directory, *rest = words
    try:
        os.chdir(directory)
    except OSError as error:
        print_notice(f"{directory} is not on this node ({error.strerror}): the command starts in {os.getcwd()}.")
    try:
        given = engine.visible()
        if not given:
            raise InvalidRequest("Ray gave this job no GPU: submit it with `gpuguard submit --via ray -n 1 -- CMD`.")
        args = build_parser("run").parse_args(rest)
        return run.main(args, claiming=partial(claim_for, given))
    except GpuguardError as error:
        print_notice(str(error))
        return exit_code("run", error)


def claim_for(
    given: tuple[str, ...],
    args: argparse.Namespace,
    command: Sequence[str],
    ways: Sequence[Request],
    directory: LockDirectory,
    backend: Backend,
    wait: float | None,
    time_limit: float | None,
) -> Claim:
    """As run.claim_for, among the devices that Ray gave and, where those are taken, gives."""
    now = time.monotonic()
    deadline = now + AT_ONCE_SECONDS if args.no_wait else None if wait is None else now + wait

    def attempt(among: tuple[str, ...], on_wait: Callable[[NotEnoughGpus], None] | None) -> Claim:
        os.environ[engine.VARIABLE] = ",".join(among)
        here = [replace(way, devices=among) for way in ways]
        # Not 0, which would ask for no waiting: what is raised then is no WaitTimeout.
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        if on_wait is None:
            return run.claim_for(args, command, here, directory, backend, 0.0, time_limit)
        return run.claim_for(args, command, here, directory, backend, left, time_limit, on_wait)

    tell, opened = WaitProgress(quiet=False).missing, partial(NodeDevicesProcess, len(given))
    claim, places = engine.search(given, len(given), attempt, opened, deadline, tell, waits=not args.no_wait)
    if places:
        places.keep([name for device in claim for name in (str(device.index), device.uuid)])
        _kept.append(places)
        print_notice(f"runs on {run.gpus(claim)}, because others hold what Ray gave first ({','.join(given)}).")
    return claim


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
