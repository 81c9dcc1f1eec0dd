"""End requests that wait in the queue, and jobs.

gpuguard cancel 3f0c              the request or the job of yours whose id begins like that
gpuguard cancel 3f0c 81d2         several
gpuguard cancel 17                your job 17 of `gpuguard submit`, or 17.3, or @ for the last: as `jobs cancel`
sudo gpuguard cancel alice/3f0c   anybody's, and alice/17

`gpuguard queue` shows the ids of requests, and `gpuguard who` those of claims.
A request ends as by SIGTERM (`gpuguard run` then exits with 143), in a notebook as by an interrupt of its cell.  A job
is ended by its `gpuguard run`, with the signals and the --grace of a time limit; any other program that has a claim
gets SIGTERM.  `gpuguard release` gives a claim back and lets its program live on.
Exit codes: 0 all of them have ended, or their jobs are being ended; 1 one of them is not, and why; 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpuguard.claims.ids import full_id, is_job_word
from gpuguard.cli.event_log import choose_log
from gpuguard.cli.jobs.changes import CANCELLED, cancel_of
from gpuguard.cli.jobs.owners import job_words
from gpuguard.cli.options import JSON, add_source_options, add_table, directory_of
from gpuguard.daemon.cancel import ENDED, ENDING, cancel
from gpuguard.errors import GpuguardError
from gpuguard.locale import N_, _, translated
from gpuguard.queue.priority import Ticket
from gpuguard.sanitize import neutralise
from gpuguard.users import user_name
from gpuguard.views.text import picked, put, put_json

_SENTENCES = {ENDED: N_("{id} has ended."), ENDING: N_("{id} is being ended by its gpuguard run.")}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("ids", "ID", "of a request, a claim or a job, or how it begins; USER/ID as root", {"nargs": "+"}),
        JSON,
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    choose_log(args)
    cancelled: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    lines: list[str] = []
    for text in args.ids:
        try:
            if is_job_word(text) and (job := job_words([text])[0]).exists(directory):
                name, outcome, faults = cancel_of(job, directory)
                lines.append(_(CANCELLED[outcome]).format(job=name))
                owner = {"user": user_name(job.owner), "uid": job.owner, "kind": "job"}
                cancelled.append({"id": name, **owner, "outcome": outcome})
                refused += [{"id": name, "why": fault} for fault in faults]
                continue
            meant, outcome = cancel(directory, text)
        except GpuguardError as error:
            refused.append({"id": text, "why": str(error)})
            continue
        kind = "request" if isinstance(meant, Ticket) else "job"
        cancelled.append({"id": meant.short_id, **picked(meant, "user", "uid"), "kind": kind, "outcome": outcome})
        lines.append(neutralise(_(_SENTENCES[outcome]).format(id=full_id(meant))))
    if args.json:
        put_json({"schema": 1, "cancelled": cancelled, "refused": refused})
    else:
        put(lines)
        put([neutralise(f"gpuguard: {translated(why['why'])}") for why in refused], sys.stderr)
    return 1 if refused else 0
