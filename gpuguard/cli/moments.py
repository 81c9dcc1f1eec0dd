"""Points in time on a command line: "12h" ago, "2026-11-13", "2026-11-13T08:30+08:00", "now"."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import datetime

from gpuguard.cli.choice_options import quantity
from gpuguard.errors import InvalidRequest
from gpuguard.units import parse_duration

_AGO = re.compile(r"-?[0-9.]+(?:ms|[smhdw])[0-9.smhdw]*")
_LAST = 253402214400.0  # the last day of the year 9999, after which there are no dates


def add_moment_options(parser: argparse.ArgumentParser, first: Sequence[str], last: Sequence[str], usual: str) -> None:
    """Two options for the begin and the end of a time."""
    # A duration may be written with a minus sign, as what lies before now; to argparse that is an option, unless it is
    # told that words like this one are numbers.
    parser._negative_number_matcher = re.compile(r"^-\d")
    parser.add_argument(
        *first,
        metavar="WHEN",
        default=usual,
        help=f"so long ago (7d, -12h), or a date: 2026-11-13, 2026-11-13T08:30, with +08:00 or Z (default: {usual})",
    )
    parser.add_argument(*last, metavar="WHEN", default="now", help="likewise (default: now)")


def period(first: tuple[str, str], last: tuple[str, str], now: float) -> tuple[float, float]:
    """Begin and end, in unix time, of two options with their texts; what lies in the future has not happened.

    Raises:
        InvalidRequest: one of them cannot be understood, or there is nothing between them.
    """
    begin, end = (_moment(*each, now) for each in (first, last))
    if begin >= now:
        raise InvalidRequest(f"{first[0]} {first[1]} lies in the future: nothing has happened there.")
    if begin >= end:
        raise InvalidRequest(f"there is no time between {first[0]} {first[1]} and {last[0]} {last[1]}: swap them.")
    return begin, min(end, now)


def _moment(option: str, text: str, now: float) -> float:
    word = text.strip()
    if word == "now":
        return now
    if _AGO.fullmatch(word):
        ago = quantity(option, word.removeprefix("-"), parse_duration)
        assert ago is not None
        return now - ago
    try:
        # Before 3.11 it knows no Z.  Without a zone a date is one of this machine's, or of $TZ.
        found = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"{option}: {text!r} is no point in time: write 7d or 12h for so long ago,"
            " or a date like 2026-11-13, 2026-11-13T08:30 or 2026-11-13T08:30+08:00."
        ) from None
    if not 0 <= found < _LAST:
        raise InvalidRequest(f"{option}: {text!r} lies before 1970 or after 9999.")
    return found
