"""Text with a unit <-> numbers in base units.  A bare number is an error, because it could be MB or GiB.

    bytes     "20GiB" "500MB" "1.5TiB" "20G"  -> int, bytes; G is GiB, as in Slurm and docker
    percent   "10%"                         -> float, 0..100
    duration  "90s" "10m" "1h30m" "2d"      -> float, seconds
    celsius   "85C"                         -> float
    power     "300W" "1.2kW"                -> float, watts

format_bytes, format_duration and local_time convert numbers back to text for people.  Amount and Rate are limits as
policies write them: "90%" of a total, "1GiB/10m" of growth.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _, ngettext

_BYTES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_AS_SLURM = {"K": 2**10, "M": 2**20, "G": 2**30, "g": 2**30, "T": 2**40}
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_WATTS = {"mW": 0.001, "W": 1, "kW": 1000}
_JOULES = {"J": 1, "kJ": 1000, "MJ": 10**6, "Wh": 3600, "kWh": 3.6e6}
_MEGAHERTZ = {"MHz": 1, "GHz": 1000}
_CELSIUS = {"C": 1, "°C": 1}
_PERCENT = {"%": 1}

NOT_AVAILABLE = "n/a"  # what people read in the place of a value that is not known

_QUANTITY = r"(\d{1,15}(?:\.\d{1,9})?)\s?([a-zA-Z%°]{1,3})"
_DURATION = r"(?:\d{1,9}(?:\.\d{1,9})?(?:ms|[smhdw]))+"
_DURATION_PART = r"(\d+(?:\.\d+)?)(ms|[smhdw])"


def parse_bytes(text: str) -> int:
    """Bytes of ``"20GiB"``; powers of 1000 for kB MB GB TB, of 1024 for KiB MiB GiB TiB and for K M G g T."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s?([KMGgT])", text.strip())
    if match:
        return int(float(match[1]) * _AS_SLURM[match[2]])
    return round(_quantity(text, _BYTES, N_("a memory size"), "20GiB"))


def parse_percent(text: str) -> float:
    """Percent of ``"10%"``, 0 to 100."""
    percent = parse_cores(text)
    if percent > 100:
        raise InvalidRequest(_("{text!r} is more than 100%: write at most 100%.").format(text=text))
    return percent


def parse_cores(text: str) -> float:
    """Percent of one core, as in ``"150%"``; more than 100 means several cores."""
    return _quantity(text, _PERCENT, N_("a percentage"), "10%")


def parse_celsius(text: str) -> float:
    """Degrees Celsius of ``"85C"``."""
    return _quantity(text, _CELSIUS, N_("a temperature"), "85C")


def parse_watts(text: str) -> float:
    """Watts of ``"300W"``."""
    return _quantity(text, _WATTS, N_("a power"), "300W")


def parse_duration(text: str) -> float:
    """Seconds of ``"90s"``, ``"10m"`` or ``"1h30m"``."""
    stripped = text.strip()
    if not re.fullmatch(_DURATION, stripped):
        clock = re.fullmatch(r"(\d{1,3}):(\d{2}):(\d{2})", stripped, re.ASCII)  # as Slurm writes it
        parts = zip(clock.groups(), "hms", strict=True) if clock else ()
        example = "".join(f"{int(number)}{unit}" for number, unit in parts if int(number))
        raise InvalidRequest(_complaint(text, N_("a duration"), example or "1h30m", _SECONDS))
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_DURATION_PART, stripped))


def parse_field(text: str, unit: str) -> float:
    """The value of a field of model.Device, in its *unit*: ``"1980MHz"`` and ``"1.98GHz"`` are both 1980.0.

    Raises:
        InvalidRequest: it has no unit or another one, or the field has none and *text* is no number.
    """
    if unit == "":
        if not re.fullmatch(r"\d{1,15}", text.strip(), re.ASCII):
            raise InvalidRequest(_("{text!r} is no number: write plain digits, like 3.").format(text=text))
        return int(text)
    return _READERS[unit](text)


def parse_leftover(text: str) -> float:
    """Seconds for which processes that a job leaves running keep its claim, of "keep", "release" or ``"10m"``."""
    try:
        return {"keep": float("inf"), "release": 0.0}[text] if text in ("keep", "release") else parse_duration(text)
    except InvalidRequest:
        raise InvalidRequest(
            _("{text!r} is none of keep, release, or a duration such as 10m.").format(text=text)
        ) from None


def format_bytes(count: float | None) -> str:
    """``"20.0GiB"``, or ``"n/a"`` if unknown."""
    if count is None:
        return NOT_AVAILABLE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit in ("B", "KiB", "MiB") else f"{count:.1f}{unit}"
        count /= 1024
    return f"{count:.1f}TiB"


def format_bytes_exactly(count: int) -> str:
    """Format as format_bytes() does if parse_bytes() reads the same number back, else in the largest unit that works.

    A number below 0, which no size is, comes from a damaged file.
    """
    text, unit = format_bytes(count), max((size, name) for name, size in _BYTES.items() if count % size == 0)
    return text if count < 0 or parse_bytes(text) == count else f"{count // unit[0]}{unit[1]}"


def format_bytes_within(count: int) -> str:
    """Format as format_bytes() does, but rounded down.

    The result is what can be asked for of a GPU with *count* bytes, 1MiB to 999GiB.
    """
    unit, parts = (2**20, 1) if count < 1000 * 2**20 else (2**30, 10)
    return format_bytes(count * parts // unit * unit / parts)


def format_duration(seconds: float | None) -> str:
    """The two largest units, ``"3h12m"``, or ``"n/a"`` if unknown."""
    if seconds is None:
        return NOT_AVAILABLE
    seconds = round(seconds, 3)  # never 1000ms
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    whole = int(max(seconds, 0))
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((place for place, (number, _) in enumerate(parts) if number), 3)
    return "".join(f"{number}{unit}" for number, unit in parts[first : first + 2] if number) or "0s"


def local_time(unix: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """A unix time in this machine's zone, or that of $TZ."""
    return time.strftime(form, time.localtime(unix))


def format_rounded(value: float | None, unit: str) -> str:
    """``"87%"``, or ``"n/a"`` if unknown."""
    return NOT_AVAILABLE if value is None else f"{value:.0f}{unit}"


def format_energy(joules: float) -> str:
    """``"12.3Wh"``, ``"0.14kWh"``."""
    watt_hours = joules / 3600
    if watt_hours >= 100:
        return f"{watt_hours / 1000:.2f}kWh"
    return f"{watt_hours:.1f}Wh" if watt_hours >= 1 else f"{watt_hours:.2g}Wh"


def format_ranges(numbers: Iterable[int]) -> str:
    """``"0-2,8"`` for [0, 1, 2, 8]."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def format_count(number: int, noun: str, plural: str = "") -> str:
    """``"1 policy"``, ``"2,000 faults"``; *plural* is for a noun whose plural does not just add an s."""
    return ngettext(*count_forms(noun, plural), number).format(number=number)


def count_forms(noun: str, plural: str = "") -> tuple[str, str]:
    """The messages by which format_count() counts."""
    return f"{{number:,}} {noun}", f"{{number:,}} {plural or noun + 's'}"


@dataclass(frozen=True)
class Amount:
    """A limit in base units, in percent of a total that is known only when it is judged, or as a claim asked."""

    value: float
    text: str = field(compare=False)
    relative: bool = False
    promised: bool = False  # each claim has a limit of its own: its share of the device

    def of(self, total: float | None, promised: float | None = None) -> float | None:
        """The limit in base units, or None if it is a part of an unknown *total* or nothing was *promised*."""
        if self.promised:
            return promised
        if not self.relative:
            return self.value
        return None if total is None else self.value * total / 100


@dataclass(frozen=True)
class Rate:
    """Bytes per time."""

    count: int  # bytes
    seconds: float
    text: str = field(compare=False)

    @property
    def per_second(self) -> float:
        """Bytes per second."""
        return self.count / self.seconds


def parse_memory_amount(text: str) -> Amount:
    """An amount of ``"40GiB"``, of ``"90%"`` of the device's memory, or ``"share"``: what a claim on it asked for."""
    if text.strip() == "share":
        return Amount(0, "share", promised=True)
    return _amount(text, parse_bytes)


def parse_host_memory_amount(text: str) -> Amount:
    """An amount of ``"200GiB"`` or of ``"50%"`` of the machine's memory."""
    return _amount(text, parse_bytes)


def parse_device_amount(text: str) -> int | Amount:
    """A number of devices, as in ``"4"``, or ``"66%"`` of those of the machine."""
    if text.strip().endswith("%"):
        return Amount(parse_percent(text), text.strip(), relative=True)
    if not re.fullmatch(r"0|[1-9][0-9]{0,5}", text):
        raise InvalidRequest(
            _("{text!r} is not a whole number or a share: write plain digits, like 4, or 66%.").format(text=text)
        )
    return int(text)


def parse_power_amount(text: str) -> Amount:
    """An amount of ``"300W"`` or of ``"95%"`` of the device's power limit."""
    return _amount(text, parse_watts)


def _amount(text: str, parse: Callable[[str], float]) -> Amount:
    """An amount that *parse* reads, or a percentage of the total."""
    if text.strip().endswith("%"):
        return Amount(parse_percent(text), text.strip(), relative=True)
    try:
        return Amount(parse(text), text.strip())
    except InvalidRequest as fault:
        raise InvalidRequest(_("{fault}  A part of the whole is written like '90%'.").format(fault=fault)) from None


def parse_rate(text: str) -> Rate:
    """A rate of ``"1GiB/10m"`` or ``"1MB/s"``."""
    count, slash, per = text.partition("/")
    per = per.strip()
    if not slash or not per:
        raise InvalidRequest(_("{text!r} is not a rate: write it like '1GiB/10m' or '1MB/s'.").format(text=text))
    seconds = parse_duration(per if per[0].isdigit() else f"1{per}")
    if seconds <= 0:
        raise InvalidRequest(_("{text!r} is per no time at all: write it like '1GiB/10m'.").format(text=text))
    return Rate(parse_bytes(count), seconds, text.strip())


def _quantity(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = re.fullmatch(_QUANTITY, text.strip())
    if not match or match[2] not in units:
        raise InvalidRequest(_complaint(text, what, example, units))
    return float(match[1]) * units[match[2]]


def _complaint(text: str, what: str, example: str, units: dict[str, float] | dict[str, int]) -> str:
    known = _(" (units: {units})").format(units=", ".join(units)) if len(units) > 1 else ""
    if re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        return _("{text!r} has no unit: write {what} like {example!r}{known}.").format(
            text=text, what=_(what), example=example, known=known
        )
    return _("{text!r} is not {what}: write it like {example!r}{known}.").format(
        text=text, what=_(what), example=example, known=known
    )


# By the unit of a model.DeviceField.
_READERS: dict[str, Callable[[str], float]] = {
    "B": parse_bytes, "B/s": lambda text: parse_rate(text).per_second, "%": parse_percent, "C": parse_celsius,
    "W": parse_watts, "J": lambda text: _quantity(text, _JOULES, N_("an energy"), "3kWh"),
    "MHz": lambda text: _quantity(text, _MEGAHERTZ, N_("a clock"), "1980MHz"),
}  # fmt: skip
