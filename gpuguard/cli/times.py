"""Times as people write them on a command line: of a reservation, and the begin and end of what a report covers."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from datetime import datetime

from gpuguard.cli.options import quantity
from gpuguard.errors import InvalidRequest
from gpuguard.units import parse_duration

_FORMS = 'write 09:00, "tomorrow 09:00", 2026-11-23T14:00, "in 2h" or now'
_MOMENT = re.compile(r"(?:(\d{4})-(\d{1,2})-(\d{1,2})[T ]|(tomorrow) )?(\d{1,2}):(\d{2})")


def parse_when(text: str, now: float) -> float:
    """The unix time that the *text* of --from means, in local time.

    "09:00" is the next one; one that is skipped when summer time begins is later.

    Raises:
        InvalidRequest: it is none, or a date in the past.
    """
    words = " ".join(text.strip().lower().split())
    if words == "now":
        return now
    if words.startswith("in "):
        try:
            return now + parse_duration(words[3:])
        except InvalidRequest as fault:
            raise InvalidRequest(f"--from: {fault}") from None
    found = _MOMENT.fullmatch(words.replace("t", " ") if words[:1].isdecimal() else words)
    if not found:
        raise InvalidRequest(f"--from: {text[:40]!r} is no time: {_FORMS}.")
    year, month, day, tomorrow, *clock = found.groups()
    hour, minute = map(int, clock)
    today = time.localtime(now)
    dated = (int(year), int(month), int(day)) if year else (today.tm_year, today.tm_mon, today.tm_mday + bool(tomorrow))
    if hour > 23 or minute > 59 or (year and not (1 <= dated[1] <= 12 and 1 <= dated[2] <= 31)):
        raise InvalidRequest(f"--from: there is no {text[:40]!r}: {_FORMS}.")
    when = time.mktime((*dated, hour, minute, 0, 0, 0, -1))
    if year and time.localtime(when)[:3] != dated:
        raise InvalidRequest(f"--from: there is no {text[:40]!r}: that month has fewer days.")
    if year and when < now - 60:
        raise InvalidRequest(f"--from {text[:40]} is in the past: {_FORMS}.")
    if when < now - 60 and not tomorrow:
        when = time.mktime((today.tm_year, today.tm_mon, today.tm_mday + 1, hour, minute, 0, 0, 0, -1))
    return when


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
