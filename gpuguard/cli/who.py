"""Show who uses which GPU, who has claimed it, and what it does.

gpuguard who                   all GPUs, their claims and processes, totals per user
gpuguard who --user alice      only what is alice's
gpuguard who --watch 5s        again every 5 s, until Ctrl-C
gpuguard who --json            one object for programs: see docs/json.md

While `gpuguard daemon` runs, its last look is shown, a few seconds old; --fresh asks the driver all the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from typing import NoReturn

from gpuguard.ancestry import in_first_pid_namespace, look_up
from gpuguard.backends import Backend
from gpuguard.cli.choice_options import quantity, selectors
from gpuguard.cli.options import add_source_options, backend_of, directory_of
from gpuguard.errors import ClaimError, GpuguardError, InvalidRequest
from gpuguard.lockfiles import LockDirectory
from gpuguard.model import WHO_FIELDS, Gap, Snapshot
from gpuguard.state import read_state
from gpuguard.units import parse_duration
from gpuguard.views import usage, who
from gpuguard.views.text import json_text, neutralise, put, shorten, style

_ENTER, _LEAVE = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen, so that the shell's lines come back afterwards
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER_NAMESPACE = (
    "the pids are those of another pid namespace (a container's host): users and commands cannot be told from in here"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--user", metavar="NAME", action="append", default=[], help="only this user's (repeatable)")
    parser.add_argument(
        "--device",
        metavar="D",
        action="append",
        default=[],
        help="only these: an index, a uuid or its beginning, 0,GPU-ab",
    )
    parser.add_argument(
        "--watch", metavar="EVERY", nargs="?", const="2s", help="show again and again (default: every 2s)"
    )
    parser.add_argument("--json", action="store_true", help="one object for programs; with --watch one line per look")
    parser.add_argument("--fresh", action="store_true", help="ask the driver, even if the daemon did so just now")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    every = quantity("--watch", args.watch, parse_duration)
    if every is not None and every < 0.1:
        raise InvalidRequest("--watch needs at least 100ms between two looks.")
    source = _Source(args)
    try:
        if every is None:
            put(_look(args, source), sys.stdout)
        else:
            _watch(args, source, every)
    finally:
        source.close()
    return 0


class _Source:
    """What the daemon saw, while that is fresh, else the driver, which is opened when it is first needed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._backend: Backend | None = None

    def sample(self) -> tuple[Snapshot, float | None]:
        """The machine, and how many seconds ago the daemon looked; None: read now."""
        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        seen = None if self._args.fresh else self._daemons(clock)
        if seen:
            return seen, clock - seen.clock
        self._backend = self._backend or backend_of(self._args)
        return self._backend.sample(WHO_FIELDS), None

    def close(self) -> None:
        """Let go of the driver."""
        if self._backend:
            self._backend.close()

    def _daemons(self, clock: float) -> Snapshot | None:
        try:
            directory = directory_of(self._args)
        except ClaimError:
            return None  # the claims will be missing, and that will be said
        return read_state(directory, clock, simulated=self._args.backend.startswith("simulated"))


def _look(args: argparse.Namespace, source: _Source) -> list[str]:
    snapshot, age = source.sample()
    snapshot = _with_claims(args, snapshot)
    found = usage.uses(snapshot, look_up(snapshot))
    shown = usage.chosen(found, frozenset(args.user), chosen_devices(snapshot, args.device))
    if args.json:
        return [json_text(who.to_json(snapshot, shown, age=age), indent=2 if args.watch is None else None)]
    return who.to_text(snapshot, shown, width=_size()[0], paint=style(sys.stdout, os.environ), age=age)


def _with_claims(args: argparse.Namespace, snapshot: Snapshot) -> Snapshot:
    """*snapshot* with the claims; when they cannot be read it says so, and the devices are shown all the same."""
    from gpuguard.records import probe

    gaps = tuple(gap for gap in snapshot.gaps if gap.field != "claims")  # what the daemon could not read, we may
    if any(not device.processes_plausible for device in snapshot.devices) and not in_first_pid_namespace():
        gaps += (Gap(None, "processes", _OTHER_NAMESPACE),)
    try:
        directory = directory_of(args)
        claims = tuple(probe(directory, [device.uuid for device in snapshot.devices]))
    except ClaimError as error:
        return replace(snapshot, gaps=(*gaps, Gap(None, "claims", " ".join(str(error).split()))))
    return _with_quarantine(directory, replace(snapshot, claims=claims, gaps=gaps))


def _with_quarantine(directory: LockDirectory, snapshot: Snapshot) -> Snapshot:
    """*snapshot* in which being quarantined is a problem of the device, as it is for whoever wants it."""
    from gpuguard.marks import against

    why = against(directory, [device.uuid for device in snapshot.devices], None, time.time())
    if not why:
        return snapshot
    texts = [why.get(device.uuid) or why.get(device.parent_uuid or "") for device in snapshot.devices]
    return replace(
        snapshot,
        devices=tuple(
            replace(device, problems=(*(device.problems or ()), text)) if text else device
            for device, text in zip(snapshot.devices, texts, strict=True)
        ),
    )


def chosen_devices(snapshot: Snapshot, words: list[str]) -> frozenset[str]:
    """The uuids that ``["0,3", "GPU-ab"]`` means; a divided device stands for its instances too.

    Raises:
        InvalidRequest: a word names no device, or several.
    """
    from gpuguard.request import resolve

    labels = {who.device_label(device): device.uuid for device in snapshot.devices if device.parent_uuid}
    named = [part for text in words for part in selectors("--device", text) or ()]
    found = set(resolve([labels.get(one, one) for one in named], snapshot.devices, "--device"))
    return frozenset(device.uuid for device in snapshot.devices if found & {device.uuid, device.parent_uuid})


def _watch(args: argparse.Namespace, source: _Source, every: float) -> None:
    """Look every *every* seconds until Ctrl-C, on a terminal always at the same place."""
    screen = sys.stdout.isatty() and not args.json
    former = signal.signal(signal.SIGTERM, _leave)
    lines = _look(args, source)  # a fault of the first look ends the command; later ones are shown and may pass
    try:
        if screen:
            sys.stdout.write(_ENTER)
        while True:
            put(_frame(lines) if screen else lines, sys.stdout)
            sys.stdout.flush()
            time.sleep(every)
            try:
                lines = _look(args, source)
            except InvalidRequest:
                raise
            except GpuguardError as error:
                lines = [time.strftime("%H:%M:%S"), *map(neutralise, str(error).splitlines())]
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, former)
        if screen:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


def _frame(lines: list[str]) -> list[str]:
    """*lines* as one screen: each overwrites what stood there, and what does not fit is counted."""
    columns, rows = _size()
    room = max(2, (rows or 24) - 1)
    if len(lines) > room:
        more = f"... {len(lines) - room + 1} more lines: enlarge the window, or use --device or --user"
        lines = [*lines[: room - 1], shorten(more, columns or 80)]
    return [_HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_REST]


def _size() -> tuple[int | None, int | None]:
    """Columns and rows of the terminal; None and None for a pipe or a file."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None, None
    return size.columns or 80, size.lines or 24


def _leave(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)
