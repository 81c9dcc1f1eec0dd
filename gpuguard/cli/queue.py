"""Show who waits for GPUs, in order, when each request is expected to start, and why not earlier.

gpuguard queue
gpuguard queue --hosts a,b     those of other hosts, over ssh: see docs/fleet.md

Starts are estimated from the jobs' time limits, else from what their users' jobs took before: see docs/waiting.md.
Where there is Slurm, its jobs with GPUs are shown too, in its own order.
"""

from __future__ import annotations

import argparse
from contextlib import closing

from gpuguard.batch.dispatchers import stalled_jobs
from gpuguard.cli import terminal
from gpuguard.cli.options import (
    FRESH,
    JSON,
    add_fleet_options,
    add_source_options,
    add_table,
    directory_of,
    has_hosts,
    snapshot_source,
)
from gpuguard.clusters import slurm_jobs
from gpuguard.queue.settings import read_queue_settings
from gpuguard.queue.state import read_queue
from gpuguard.views import queue as view
from gpuguard.views.text import put, put_json, style


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, JSON, FRESH)
    add_fleet_options(parser)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if has_hosts(args):
        from gpuguard.cli import fleet  # for ssh, which only other hosts need

        return fleet.queue(args)
    directory = directory_of(args)
    site = read_queue_settings(directory)
    with closing(snapshot_source(args)) as source:
        snapshot, _ = source.sample()
    queue = read_queue(directory, snapshot, rules=site.rules)
    stalled, jobs = stalled_jobs(directory), slurm_jobs.jobs() if slurm_jobs.is_here() else ()
    if args.json:
        put_json(view.to_json(queue, site, jobs, stalled))
        return 0
    width, paint = terminal.width(), style()
    put(view.to_text(queue, site, stalled, width=width, paint=paint))
    if jobs:
        put(["", *view.slurm_text(jobs, queue.now, width=width, paint=paint)])
    return 0
