"""Record what happens on the GPUs of this machine, to look at it later and to try policies on it.

gpuguard record node7.rec                        every second, until Ctrl-C
gpuguard record node7.rec --every 10s --for 8h   a night
gpuguard record node7.rec --mask                 without names of people, programs and GPUs: to hand to others
gpuguard who --backend replay:node7.rec          and then
gpuguard policy backtest policy.yaml --on node7.rec

The file holds command lines and user names, so only you can read it.  It grows by about 2 MB per hour with eight busy
GPUs at one sample per second (docs/sources.md has figures); --max-size bounds it.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from contextlib import closing

from gpuguard.backends import RECORDED, Backend
from gpuguard.backends.replay import RecordingWriter
from gpuguard.backtest.masking import Mask
from gpuguard.backtest.recordings import pack
from gpuguard.cli.options import add_source_options, add_table, backend_of, directory_of, quantity
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import BackendError, ClaimError, GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.policies.view import RuleView
from gpuguard.units import format_bytes, format_count, format_duration, parse_bytes, parse_duration
from gpuguard.watchdog import ViewReader

SHORTEST_SECONDS = 0.1
SMALLEST_BYTES = 64 * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("file", "FILE", "where to; a new file"),
        ("--every", "DURATION", "between two samples (default: 1s)", {"default": "1s"}),
        ("--for", "DURATION", "how long (default: until Ctrl-C)", {"dest": "lasting"}),
        ("--mask", None, "replace every name: host, users, programs, uuids, notes"),
        ("--max-size", "SIZE", "keep at most so much, as in 100MiB: the older half is then in FILE.1"),
        ("--append", None, "go on behind what is in FILE already"),
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    every, lasting = quantity("--every", args.every, parse_duration), quantity("--for", args.lasting, parse_duration)
    most = args.max_size = quantity("--max-size", args.max_size, parse_bytes)
    if every is None or every < SHORTEST_SECONDS:
        raise InvalidRequest(_("--every needs at least 100ms between two samples."))
    if most is not None and most < SMALLEST_BYTES:
        raise InvalidRequest(_("--max-size needs at least 64KiB."))
    if args.backend.startswith(RECORDED):
        raise InvalidRequest(_("{backend} is a recording already.").format(backend=args.backend))
    if args.append and args.mask:
        raise InvalidRequest(_("--append and --mask exclude each other: the former masks are not known any more."))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    with closing(backend_of(args)) as backend:
        _record(args, backend, every, lasting, stop)
    return 0


def _record(
    args: argparse.Namespace, backend: Backend, every: float, lasting: float | None, stop: threading.Event
) -> None:
    try:
        directory = directory_of(args)
    except ClaimError as error:
        print_notice(_("claims will be missing: {error}").format(error=error))
        directory = None
    reader = ViewReader(backend, directory)
    mask = Mask() if args.mask else None
    view: RuleView | None = reader.read()  # a fault in the first sample ends the command before there is a file
    head = {"interval_seconds": every, "masked": args.mask}
    tape = RecordingWriter(
        args.file, head, most=None if args.max_size is None else args.max_size // 2, append=args.append
    )
    began, count, trouble = time.monotonic(), 0, ""
    try:
        while True:
            if view is not None:
                sample = pack(view)
                tape.write(mask(sample) if mask else sample)
                count += 1
            # The next sample is due a whole number of intervals after the beginning, so that samples do not drift.
            after = ((time.monotonic() - began) // every + 1) * every
            if (lasting is not None and after > lasting) or stop.wait(began + after - time.monotonic()):
                break
            try:
                view, trouble = reader.read(), ""
            except BackendError as error:
                view, before, trouble = None, trouble, translated(str(error))
                if trouble != before:
                    print_notice(_("no sample for now: {trouble}").format(trouble=trouble))
    except OSError as error:
        raise GpuguardError(
            _("{file} cannot be written any more: {strerror}.  It is whole up to here.").format(
                file=args.file, strerror=error.strerror
            )
        ) from None
    finally:
        tape.close()
    size = format_bytes(os.stat(args.file).st_size)
    over = format_duration(round(time.monotonic() - began, 1))
    print_notice(
        _("{count} over {over} in {file}, {size}.").format(
            count=format_count(count, "sample"), over=over, file=args.file, size=size
        )
    )
