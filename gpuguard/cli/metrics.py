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
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from gpuguard.cli.choice_options import quantity
from gpuguard.cli.metrics_facts import Looking, pages, text_of
from gpuguard.cli.options import add_source_options
from gpuguard.cli.serving_options import ADDRESS, add_expose_option, server_at
from gpuguard.errors import GpuguardError, InvalidRequest, shortage
from gpuguard.units import parse_duration
from gpuguard.views.exposition import to_influx
from gpuguard.views.metrics import families
from gpuguard.views.metrics_compat import COMPAT

FILE = "gpuguard.prom"
TOKEN = "GPUGUARD_INFLUX_TOKEN"
_SHORTEST_SECONDS = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--serve", metavar="ADDRESS", nargs="?", const=ADDRESS, help=f"over HTTP, until Ctrl-C (default: {ADDRESS})"
    )
    where.add_argument(
        "--textfile", metavar="DIR", help=f"as {FILE} in this directory; with --every it goes when we end"
    )
    where.add_argument("--influx", metavar="URL", help="as InfluxDB's line protocol, by POST; - is standard output")
    parser.add_argument("--every", metavar="DURATION", help="again and again, until Ctrl-C (default: once)")
    parser.add_argument(
        "--compat",
        metavar="EXPORTER",
        action="append",
        default=[],
        choices=sorted(COMPAT),
        help="tell it under the names of that exporter, too: dcgm or nvitop (repeatable)",
    )
    parser.add_argument("--token-file", metavar="FILE", help=f"InfluxDB's token (default: ${TOKEN})")
    parser.add_argument("--fresh", action="store_true", help="ask the driver, even if the daemon did so just now")
    add_expose_option(parser, "--expose")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    every = quantity("--every", args.every, parse_duration)
    if every is not None and every < _SHORTEST_SECONDS:
        raise InvalidRequest("--every needs at least 1s.")
    if args.serve and every is not None:
        raise InvalidRequest("--every does not go with --serve: whoever asks decides when.")
    if args.expose is not None and not args.serve:
        raise InvalidRequest("--expose is about --serve.")
    if args.compat and args.influx:
        raise InvalidRequest("--compat does not go with --influx: those are names for Prometheus.")
    if args.token_file and not args.influx:
        raise InvalidRequest("--token-file is about --influx.")
    signal.signal(signal.SIGTERM, _end)
    looking = Looking(args)
    try:
        if args.serve:
            return _serve(args, looking)
        return _again_and_again(_output(args, looking), every, args.textfile)
    except KeyboardInterrupt:
        return 0
    finally:
        looking.close()


def _serve(args: argparse.Namespace, looking: Looking) -> int:
    server = server_at(args.serve, args.expose, pages(looking.facts, args.compat))
    print(f"gpuguard: serving http://{server.address}/metrics", file=sys.stderr, flush=True)
    server.run()
    return 0


def _output(args: argparse.Namespace, looking: Looking) -> Callable[[], None]:
    """A function that looks once and puts it where it is wanted; raises when the driver cannot be reached."""
    put = _put_lines(args) if args.influx else _put_page(args)

    def once() -> None:
        put(looking)
        if looking.trouble:
            raise looking.trouble  # behind the page, which says so, too

    return once


def _put_page(args: argparse.Namespace) -> Callable[[Looking], None]:
    directory = os.path.abspath(args.textfile) if args.textfile else None
    if directory and not os.path.isdir(directory):
        raise InvalidRequest(f"--textfile: {directory} is no directory: make it, and give it to node_exporter, too.")

    def put(looking: Looking) -> None:
        text = text_of(looking.facts(), args.compat)
        if directory:
            _replace(directory, text)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    return put


def _put_lines(args: argparse.Namespace) -> Callable[[Looking], None]:
    from gpuguard.pushing import Outbox

    outbox = None if args.influx == "-" else Outbox(args.influx, _token(args))

    def put(looking: Looking) -> None:
        facts = looking.facts()
        host = facts.snapshot.host if facts.snapshot else os.uname().nodename
        lines = to_influx(families(facts), host, facts.now)
        if outbox:
            outbox.send(lines)
        else:
            print("\n".join(lines), flush=True)

    return put


def _token(args: argparse.Namespace) -> str | None:
    from gpuguard.notify.secret import Secret, Undelivered

    try:
        if args.token_file:
            return Secret(file=os.path.abspath(args.token_file)).read()
    except Undelivered as error:
        raise InvalidRequest(f"--token-file: {error}.") from None
    return os.environ.get(TOKEN) or None


def _again_and_again(once: Callable[[], None], every: float | None, directory: str | None) -> int:
    if every is None:
        once()
        return 0
    told = ""
    try:
        while True:
            begun = time.monotonic()
            try:
                once()
                told = ""
            except (GpuguardError, OSError) as error:
                text = str(error) if isinstance(error, GpuguardError) else shortage(error)
                if isinstance(error, InvalidRequest) or not text:
                    raise
                if text != told:  # it may pass
                    told = text
                    _say(told)
            time.sleep(max(0.1, every - (time.monotonic() - begun)))
    finally:
        if directory:
            _remove(directory)


def _replace(directory: str, text: str) -> None:
    """Put *text* where the old page is: readers see one or the other, whole."""
    unfinished = os.path.join(directory, f".{FILE}.{os.getpid()}")  # node_exporter reads *.prom alone
    try:
        _tidy(directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(unfinished, flags, 0o644), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(text)
        os.rename(unfinished, os.path.join(directory, FILE))
    except OSError as error:
        if os.path.lexists(unfinished):
            os.unlink(unfinished)
        raise GpuguardError(f"{directory}/{FILE} cannot be written: {error.strerror}.") from error


def _tidy(directory: str) -> None:
    """Remove what writers left that were killed."""
    for name in os.listdir(directory):
        pid = name.removeprefix(f".{FILE}.")
        if pid != name and (pid == str(os.getpid()) or not os.path.exists(f"/proc/{pid}")):
            with suppress(OSError):  # somebody else's, or a directory of that name: no reason not to write ours
                os.unlink(os.path.join(directory, name))


def _remove(directory: str) -> None:
    """Old numbers would look like new ones: nobody writes them any more."""
    try:
        os.unlink(os.path.join(directory, FILE))
    except OSError:
        return  # it is gone, or not ours to take


def _say(text: str) -> None:
    from gpuguard.text import neutralise

    print(f"gpuguard: {neutralise(' '.join(text.split()))}", file=sys.stderr, flush=True)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
