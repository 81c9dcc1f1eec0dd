"""Draw what GPUs did: utilization, memory, temperature, power, and when they were claimed.

gpuguard history                                   the utilization of all GPUs in the last 12 hours
gpuguard history -d 3 --metric memory --from -2d   the memory of GPU 3 in the last two days
gpuguard history --from 2026-11-13 --to 2026-11-14 --csv

Reads what `gpuguard daemon` has written down, up to 400 days: see docs/report.md.  Where it did not run there is a gap.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from datetime import datetime

from gpuguard.cli import terminal
from gpuguard.cli.options import (
    ASCII,
    JSON,
    add_repeatable,
    add_source_options,
    add_table,
    directory_of,
    quantity,
    selectors,
)
from gpuguard.cli.progress import progress
from gpuguard.errors import InvalidRequest
from gpuguard.history.queries import SeenDevice, Usage, Watch, query_store, store_path
from gpuguard.locale import _
from gpuguard.units import parse_duration
from gpuguard.views import history
from gpuguard.views.text import put, put_json, style

_ROWS = 9  # of each of several charts; a single one has the height of the terminal.  Odd, so that one is in the middle
_LEAST_ROWS, _MOST_ROWS = 3, 21
_AGO = re.compile(r"-?[0-9.]+(?:ms|[smhdw])[0-9.smhdw]*")
_LAST = 253402214400.0  # the last day of the year 9999, after which there are no dates


def add_options(parser: argparse.ArgumentParser) -> None:
    add_repeatable(
        parser, ("-d --device", "D", "only these: an index, a uuid or its beginning, 0,GPU-ab (default: all)")
    )
    parser.add_argument(
        "--metric",
        choices=list(history.METRICS),
        default="utilization",
        metavar="M",
        help=f"{', '.join(history.METRICS)} (default: utilization)",
    )
    add_moment_options(parser, "--from", "--to", "12h")
    add_table(parser, ASCII)
    add_table(parser.add_mutually_exclusive_group(), JSON, ("--csv", None, "a line for each slot of each GPU"))
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    now = time.time()
    begin, end = period(("--from", vars(args)["from"]), ("--to", args.to), now)
    metric = history.METRICS[args.metric]

    def read(usage: Usage) -> tuple[list[history.DeviceHistory], Watch]:
        known = usage.known()
        words = [part for text in args.device for part in selectors("--device", text) or ()]
        devices = [_named(known, word) for word in words] or known
        courses = [(device, usage.series(device.uuid, metric.stored, begin, end)) for device in devices]
        return [course for course in courses if args.device or course[1]], usage.watched(begin, end)

    with progress("reading the record"):
        courses, watch = query_store(store_path(directory_of(args)), read, now)
    if args.json:
        put_json(history.to_json(metric, courses, watch), indent=None)
        return 0
    if args.csv:
        put(history.to_csv(metric, courses))
        return 0
    width, height = terminal.size()
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, height - 8)) | 1 if len(courses) == 1 and height else _ROWS
    plain = args.ascii or not terminal.writes_braille()
    put(history.to_text(metric, courses, watch, width=width, rows=rows, paint=style(), ascii_only=plain))
    return 0


def _named(known: Sequence[SeenDevice], word: str) -> SeenDevice:
    meant = [device for device in known if word == str(device.index) or device.uuid == word]
    meant = meant or [device for device in known if len(word) > 4 and device.uuid.startswith(word)]
    if len(meant) == 1:
        return meant[0]
    there = ", ".join(str(device.uuid if device.index is None else device.index) for device in known) or "none"
    what = _("names several GPUs: write more of the uuid") if meant else _("is no GPU that the daemon has seen")
    raise InvalidRequest(_("--device {word} {what}.  There are {there}.").format(word=word, what=what, there=there))


def add_moment_options(parser: argparse.ArgumentParser, first: str, last: str, usual: str) -> None:
    """Add two options for the begin and the end of a period."""
    # A duration may have a minus sign, because it lies before now.  argparse would take that for an option, unless it
    # is made to take words like this one for numbers.
    parser._negative_number_matcher = re.compile(r"^-\d")
    parser.add_argument(
        first,
        metavar="WHEN",
        default=usual,
        help=f"so long ago (7d, -12h), or a date: 2026-11-13, 2026-11-13T08:30, with +08:00 or Z (default: {usual})",
    )
    parser.add_argument(last, metavar="WHEN", default="now", help="likewise (default: now)")


def period(first: tuple[str, str], last: tuple[str, str], now: float) -> tuple[float, float]:
    """Return begin and end in unix time, from two pairs of option and text; an end in the future becomes *now*.

    Raises:
        InvalidRequest: one of them cannot be understood, or there is nothing between them.
    """
    begin, end = (_moment(*option, now) for option in (first, last))
    if begin >= now:
        raise InvalidRequest(
            _("{option} {time} lies in the future: nothing has happened there.").format(option=first[0], time=first[1])
        )
    if begin >= end:
        raise InvalidRequest(
            _("there is no time between {first} and {last}: swap them.").format(
                first=" ".join(first), last=" ".join(last)
            )
        )
    return begin, min(end, now)


def _moment(option: str, text: str, now: float) -> float:
    word = text.strip()
    if word == "now":
        return now
    if _AGO.fullmatch(word):
        return now - (quantity(option, word.removeprefix("-"), parse_duration) or 0.0)
    try:
        # Before Python 3.11 fromisoformat() knows no Z.  A date without a zone is in this machine's zone, or in $TZ.
        moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            _(
                "{option}: {text!r} is no point in time: write 7d or 12h for so long ago, or a date like "
                "2026-11-13, 2026-11-13T08:30 or 2026-11-13T08:30+08:00."
            ).format(option=option, text=text)
        ) from None
    if not 0 <= moment < _LAST:
        raise InvalidRequest(_("{option}: {text!r} lies before 1970 or after 9999.").format(option=option, text=text))
    return moment
