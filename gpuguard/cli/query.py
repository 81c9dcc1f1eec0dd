"""Answer what `nvidia-smi --query-gpu=...` and `--query-compute-apps=...` answer, in the same form.

gpuguard query --query-gpu=index,memory.used,utilization.gpu --format=csv,noheader,nounits
gpuguard query --query-compute-apps=gpu_uuid,pid,used_memory --format=csv -l 1
gpuguard query --fields index,name,memory.free --format json
gpuguard query --help-query                    all fields

Only what the named fields need is read.  A script moves over by writing `gpuguard query` for `nvidia-smi`; a driver
that hangs ends the command with status 4 instead of hanging it.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing

from gpuguard.cli.options import add_source_options, add_table, backend_of, selectors
from gpuguard.errors import InvalidRequest
from gpuguard.locale import use_language_of_user
from gpuguard.request import resolve
from gpuguard.units import parse_duration
from gpuguard.views.query import csv_lines, help_lines, query_of, to_json
from gpuguard.views.text import put, put_json

_FORMATS = ("csv", "json", "noheader", "nounits")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--fields --query-gpu", "FIELDS", "of GPUs, as in index,name,memory.used"),
        ("--apps --query-compute-apps", "FIELDS", "of processes, as in pid,used_memory"),
        ("--help-query --help-query-gpu", None, "list all fields"),
    )
    parser.add_argument("--format", default="csv", help="csv, csv,noheader,nounits or json (default: csv)")
    add_table(
        parser,
        ("-i --id --ids", "LIST", "only these GPUs, as in 0,GPU-ab", {"dest": "devices"}),
        ("-l --loop", "EVERY", "again and again, as in 5s; a bare number is seconds"),
        ("-lms --loop-ms", "N", "again and again, every so many milliseconds"),
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    if args.help_query:
        use_language_of_user()  # everything else is for programs
        put(help_lines())
        return 0
    if not args.fields and not args.apps:
        raise InvalidRequest(
            "say which fields: --query-gpu=index,memory.used; `gpuguard query --help-query` lists all."
        )
    forms = frozenset(word.strip() for word in args.format.split(","))
    if not forms <= set(_FORMATS) or not forms & {"csv", "json"} or forms > {"json"}:
        raise InvalidRequest(f"--format={args.format}: write csv, csv,noheader, csv,noheader,nounits or json.")
    every = None
    if text := f"{args.loop_ms}ms" if args.loop_ms else args.loop:
        # Scripts for nvidia-smi have `-l 1`, so a number without a unit is understood here, and only here.
        every = parse_duration(f"{text}s" if text.isdecimal() else text)
        if every < 0.01:
            raise InvalidRequest("--loop needs at least 10ms between two answers.")
    query = query_of(args.apps or args.fields, apps=bool(args.apps))
    header = "noheader" not in forms
    with closing(backend_of(args)) as backend:
        while True:
            began = time.monotonic()
            snapshot = backend.sample(query.groups)
            named = selectors("--id", args.devices) if args.devices else None
            uuids = frozenset(resolve(list(named), snapshot.devices, "--id")) if named else frozenset()
            if "json" in forms:
                put_json(to_json(snapshot, query, uuids), indent=2 if every is None else None)
            else:
                put(csv_lines(snapshot, query, uuids, header=header, units="nounits" not in forms))
            if every is None:
                return 0
            header = False  # once, as nvidia-smi does
            time.sleep(max(0.0, every - (time.monotonic() - began)))
