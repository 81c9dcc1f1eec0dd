"""Times of the clock as people write them."""

from __future__ import annotations

import re
import time

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
