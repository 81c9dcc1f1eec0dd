"""Tell monitoring systems what the GPUs do, who claims them, who waits, and what policies did.

gpuguard metrics                               the page for Prometheus, once
gpuguard metrics --serve                       serve it at http://127.0.0.1:9835/metrics
gpuguard metrics --textfile DIR --every 15s    write it for the textfile collector of node_exporter
gpuguard metrics --influx http://127.0.0.1:8086/write?db=gpuguard --every 15s
gpuguard metrics --influx -                    the lines for InfluxDB, once

A daemon that runs can serve the same without asking the driver again: `gpuguard daemon --metrics`.  Names and units,
alarms and a dashboard: docs/metrics.md.
Exit codes: 0, 1 it could not be written or sent, 2 usage, 4 the driver cannot be reached.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gpuguard.cli.options import FRESH, add_source_options, add_table, backend_of, directory_of, quantity
from gpuguard.errors import GpuguardError, InvalidRequest, shortage
from gpuguard.locale import translated
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.exposition import FILE, prometheus_text, remove_textfile, write_textfile
from gpuguard.metrics.facts import MachineFacts, MetricFacts
from gpuguard.metrics.families import metric_families
from gpuguard.metrics.http_server import ADDRESS, PageServer, host_names, listening_address, pages
from gpuguard.metrics.influx import InfluxClient, to_influx
from gpuguard.notify.targets import Secret, Undelivered
from gpuguard.sanitize import neutralise
from gpuguard.units import parse_duration

TOKEN = "GPUGUARD_INFLUX_TOKEN"
_SHORTEST_SECONDS = 1.0

Output = Callable[[MetricFacts], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--serve", "ADDRESS", f"over HTTP, until Ctrl-C (default: {ADDRESS})", {"nargs": "?", "const": ADDRESS}),
        ("--textfile", "DIR", f"as {FILE} in this directory; with --every it goes when we end"),
        ("--influx", "URL", "as InfluxDB's line protocol, by POST; - is standard output"),
    )
    add_table(parser, ("--every", "DURATION", "again and again, until Ctrl-C (default: once)"))
    parser.add_argument(
        "--compat",
        metavar="EXPORTER",
        action="append",
        default=[],
        choices=sorted(COMPAT),
        help="tell it under the names of that exporter, too: dcgm, nvitop or AMD's (repeatable)",
    )
    add_table(parser, ("--token-file", "FILE", f"InfluxDB's token (default: ${TOKEN})"), FRESH)
    add_expose_option(parser, "--expose")
    add_source_options(parser)


def add_expose_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the option without which no other machine can reach the page."""
    parser.add_argument(
        name,
        metavar="NAMES",
        nargs="?",
        const="",
        help="allow an address that other machines reach; NAMES: host names, with commas, by which they ask for us",
    )


def page_server(address: str, expose: str | None) -> PageServer:
    """Return a server at *address*; for *expose* see add_expose_option."""
    names = [name.strip() for name in (expose or "").split(",")]
    return PageServer(listening_address(address, exposed=expose is not None), host_names(names))


def main(args: argparse.Namespace) -> int:
    every = quantity("--every", args.every, parse_duration)
    faults = {
        "--every needs at least 1s.": every is not None and every < _SHORTEST_SECONDS,
        "--every does not go with --serve: the client decides when.": args.serve and every is not None,
        "--expose is about --serve.": args.expose is not None and not args.serve,
        "--compat does not go with --influx: those are names for Prometheus.": args.compat and args.influx,
        "--token-file is about --influx.": args.token_file and not args.influx,
    }
    for fault, is_there in faults.items():
        if is_there:
            raise InvalidRequest(fault)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    machine = MachineFacts(args.backend, lambda: backend_of(args), lambda: directory_of(args), fresh=args.fresh)
    try:
        if args.serve:
            server = page_server(args.serve, args.expose)
            print(f"gpuguard: serving http://{server.address}/metrics", file=sys.stderr, flush=True)
            server.serve(pages(machine.read, args.compat))
        else:
            _put_all(machine, args.compat, _output(args), every)
        return 0
    except KeyboardInterrupt:
        return 0
    finally:
        if args.textfile and every is not None:
            remove_textfile(os.path.abspath(args.textfile))
        machine.close()


def _output(args: argparse.Namespace) -> Output:
    if args.influx == "-":
        return lambda facts: print("\n".join(_influx_lines(facts)), flush=True)
    if args.influx:
        token = os.environ.get(TOKEN) or None
        try:
            if args.token_file:
                token = Secret(file=os.path.abspath(args.token_file)).read()
        except Undelivered as error:
            raise InvalidRequest(f"--token-file: {translated(str(error))}.") from None
        client = InfluxClient(args.influx, token)
        return lambda facts: client.send(_influx_lines(facts))
    if args.textfile:
        directory = os.path.abspath(args.textfile)
        if not os.path.isdir(directory):
            raise InvalidRequest(
                f"--textfile: {directory} is no directory: make it, and give it to node_exporter, too."
            )
        return lambda facts: write_textfile(directory, prometheus_text(facts, args.compat))
    return lambda facts: print(prometheus_text(facts, args.compat), end="", flush=True)


def _influx_lines(facts: MetricFacts) -> list[str]:
    host = facts.snapshot.host if facts.snapshot else os.uname().nodename
    return to_influx(metric_families(facts), host, facts.now)


def _put_all(machine: MachineFacts, exporters: Sequence[str], output: Output, every: float | None) -> None:
    """Put the facts out once, or again and again; then a fault may pass, so it is only reported, and only once."""
    reported = ""
    while True:
        began = time.monotonic()
        try:
            output(machine.read(exporters))
            if machine.trouble:
                raise machine.trouble
            reported = ""
        except (GpuguardError, OSError) as error:
            text = translated(str(error)) if isinstance(error, GpuguardError) else shortage(error)
            if every is None or isinstance(error, InvalidRequest) or not text:
                raise
            if text != reported:
                reported = text
                with suppress(OSError):
                    print(f"gpuguard: {neutralise(' '.join(text.split()))}", file=sys.stderr, flush=True)
        if every is None:
            return
        time.sleep(max(0.1, every - (time.monotonic() - began)))
