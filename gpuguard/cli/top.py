"""Watch the GPUs: what each does, who has claimed it, who waits, and every process on it.

gpuguard top                     the screen; ? shows its keys, q leaves it
gpuguard top --user alice -o     only alice's processes, only the GPUs of $CUDA_VISIBLE_DEVICES
gpuguard top --hosts a,b,c       a line for each of these hosts, over ssh: see docs/fleet.md
gpuguard top --once              print it and exit
gpuguard top --backend simulated:DIR

The screen needs textual: pip install 'gpuguard[tui]'.  Without it a plain view is drawn again and again, as by --plain.
While `gpuguard daemon` runs and samples as often, its samples are shown; --fresh, or the key f, asks the driver all the
same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from gpuguard import device_state
from gpuguard.cli import options, terminal
from gpuguard.cli.event_log import choose_log
from gpuguard.cli.progress import progress
from gpuguard.cli.who import add_filter_options, chosen_devices
from gpuguard.clusters.device_variables import visible_uuids
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.model import PCIE, Snapshot
from gpuguard.top.devices import fields_shown
from gpuguard.top.page import page, painted, title
from gpuguard.top.scene import MODES, SORTS, History, Scene, ScreenLine, ScreenView
from gpuguard.top.scene_source import SAMPLING_THREAD, SceneFeed
from gpuguard.units import parse_duration
from gpuguard.views.text import put, style

HINT = "pip install 'gpuguard[tui]'"
_APART = 0.25  # seconds between the two samples of --once, because CPU is a rate
_UNBOUNDED = 10_000  # columns of a pipe: nothing is shortened there


def add_options(parser: argparse.ArgumentParser) -> None:
    add_filter_options(parser)
    options.add_table(
        parser,
        ("-o --only-visible", None, "only the GPUs of $CUDA_VISIBLE_DEVICES"),
        ("--compute-only", None, "no desktop processes"),
        ("--filter", "TEXT", "only processes with these words; user:NAME, gpu:0"),
    )
    parser.add_argument("--sort", choices=SORTS, default="gpu", help="order of the processes (default: gpu)")
    options.add_table(parser, ("--tree", None, "processes below their parents"))
    parser.add_argument("--mode", choices=MODES, default="auto", help="lines per GPU: 3, 1, or as they fit")
    options.add_table(
        parser,
        ("--every", "D", "between two samples (default: 1s, with --hosts 10s)"),
        ("--once", None, "print it and exit"),
        ("--plain", None, "without textual: drawn again and again, no keys"),
        ("--ascii", None, "no characters beyond ASCII in bars and trees"),
        ("--light", None, "for a light terminal"),
        options.FRESH,
    )
    options.add_fleet_options(parser)
    options.add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if options.has_hosts(args):
        from gpuguard.cli import fleet  # for ssh, which only other hosts need

        return fleet.top(args)
    every = options.quantity("--every", args.every or "1s", parse_duration)
    if every is None or every < 0.1:
        raise InvalidRequest(_("--every needs at least 100ms between two samples."))
    feed = SceneFeed(
        args.backend,
        lambda: options.backend_of(args),
        lambda: options.directory_of(args),
        lambda: choose_log(args),
    )
    feed.source.fresh, feed.tree = args.fresh, args.tree
    is_once = args.once or not sys.stdout.isatty()
    feed.more = fields_shown(terminal.size()[0] or _UNBOUNDED)
    if not is_once:
        feed.more -= {PCIE}  # not before the first picture, because a driver needs 40 ms for each GPU
    try:
        with progress("reading the GPUs"):
            scene = feed.sample()  # a fault in the first sample ends the command; later ones are shown and may pass
        view = _view(args, scene.snapshot)
        if not (device_state.chosen(scene.uses, view.users, view.devices) or scene.snapshot.recorded):
            options.check_users(args.user)
        if is_once:
            time.sleep(_APART)
            second, history = feed.sample(), History()
            history.add(second)
            put(_lines(second, history, replace(view, past=False), *terminal.size()))
            return 0
        feed.every = every
        if args.plain or not _can_draw():
            _plain(feed, view, scene, every)
        else:
            from gpuguard.top.app import Top  # textual is an extra

            Top(feed, view, scene, every, light=args.light).run()
    finally:
        # Do not wait for a thread that hangs in the driver: its worker ends with us.
        if all(thread.name != SAMPLING_THREAD for thread in threading.enumerate()):
            feed.source.close()
    return 0


def _view(args: argparse.Namespace, snapshot: Snapshot) -> ScreenView:
    devices = chosen_devices(snapshot, args.device) if args.device else frozenset()
    if args.only_visible:
        visible = visible_devices(snapshot, os.environ)
        devices = devices & visible if devices else visible
        if not devices:
            raise InvalidRequest(_("no GPU is visible: see $CUDA_VISIBLE_DEVICES and --device."))
    return ScreenView(
        mode=args.mode,
        sort=args.sort,
        users=frozenset(args.user),
        devices=devices,
        text=args.filter or "",
        compute_only=args.compute_only,
        tree=args.tree,
        ascii_only=args.ascii or not terminal.writes_braille(),
    )


def visible_devices(snapshot: Snapshot, environ: Mapping[str, str]) -> frozenset[str]:
    """Return the uuids that CUDA_VISIBLE_DEVICES leaves, with the instances of whole devices; all if it is not set."""
    visible = visible_uuids(environ, snapshot.devices)
    return frozenset(
        device.uuid
        for device in snapshot.devices
        if visible is None or {device.uuid, device.parent_uuid} & set(visible)
    )


def _can_draw() -> bool:
    """Whether textual is installed and the terminal can be drawn on."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown") or not sys.stdin.isatty():
        return False
    return importlib.util.find_spec("textual") is not None


def _plain(feed: SceneFeed, view: ScreenView, scene: Scene, every: float) -> None:
    """Draw the page again every *every* seconds until Ctrl-C, always at the same place."""
    history, trouble = History(), ""
    with terminal.screen():
        while True:
            if not trouble:
                history.add(scene)
            columns, rows = terminal.size()
            feed.more = fields_shown(columns or _UNBOUNDED)
            room = max(3, (rows or 24) - 2)
            body = _lines(scene, history, view, columns, room)
            hint = trouble or _("Ctrl-C leaves.  For keys, mouse and signals: {hint}").format(hint=HINT)
            terminal.draw([*body[:room], *[""] * (room - len(body)), hint[:columns]])
            time.sleep(every)
            try:
                scene, trouble = feed.sample(), ""
            except GpuguardError as error:
                trouble = " ".join(translated(str(error)).split())


def _lines(scene: Scene, history: History, view: ScreenView, columns: int | None, rows: int | None) -> list[str]:
    width = columns or _UNBOUNDED
    if columns is None and view.mode == "auto":
        view = replace(view, mode="compact")
    lines: list[ScreenLine] = [title(scene, view, min(width, 200)), *page(scene, history, view, width, rows or 60)]
    return painted(lines, style())
