"""Say for each GPU why `gpuguard run` with the same options would or would not take it, and what it would do now.

gpuguard explain -n 4 --min-free 20GiB
gpuguard explain -n 1 --time-limit 4h            as a job that ends within four hours, which may start before others

Exits with 0 when the request could start now, with 1 when it could not.  Claims nothing.
"""

from __future__ import annotations

import argparse
import os
from contextlib import closing

from gpuguard.claims.directory import LockDirectory
from gpuguard.cli.options import (
    JSON,
    add_choice_options,
    add_source_options,
    add_table,
    backend_of,
    directory_of,
    own_deeds,
    quantity,
    request_of,
)
from gpuguard.clusters.device_variables import outer_devices
from gpuguard.locale.messages import all_of
from gpuguard.lock import Allocator, outer_claim
from gpuguard.model import Snapshot
from gpuguard.queue.reasons import passing_text, position_text, unplanned_texts
from gpuguard.queue.state import read_queue
from gpuguard.queue.tickets import new_ticket
from gpuguard.request import Request
from gpuguard.units import parse_duration
from gpuguard.views import explain as view
from gpuguard.views.text import put, put_json, style


def add_options(parser: argparse.ArgumentParser) -> None:
    add_choice_options(parser)
    add_table(parser, ("--time-limit", "DURATION", "that you would give to `gpuguard run`"), JSON)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    request, directory = request_of(args), directory_of(args)
    with closing(backend_of(args)) as backend:
        snapshot, choice = Allocator(backend, directory, [request]).preview(with_reasons=True)
    time_limit = quantity("--time-limit", args.time_limit, parse_duration)
    start = _start_in_queue(directory, snapshot, request, time_limit)
    outer = outer_devices(os.environ, snapshot.devices)
    limits = ". Note: ".join(filter(None, (outer.reason, outer.warning)))
    if args.json:
        put_json(view.to_json(snapshot, request, choice, limits, start))
    else:
        put([*view.to_text(snapshot, request, choice, limits, start, paint=style()), *own_deeds(args)])
    return 0 if choice.devices and (start is None or start[0]) else 1


def _start_in_queue(
    directory: LockDirectory, snapshot: Snapshot, request: Request, time_limit: float | None
) -> tuple[bool, str] | None:
    """Return (whether it could start now, its queue position and why), or None if it would not have to queue."""
    if not directory.has("ticket.", "reserve.") or outer_claim(directory):
        return None
    ticket = new_ticket([request], time_limit=time_limit)
    queue = read_queue(directory, snapshot, ticket)
    position = queue.of(ticket.id)
    passing = passing_text(position, queue)
    words = [position_text(position, queue), *([passing] if passing else []), *unplanned_texts(queue)]
    return position.now, all_of(words)
