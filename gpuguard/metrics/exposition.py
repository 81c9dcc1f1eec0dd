"""How families of numbers are spelled: the text format of Prometheus 0.0.4, and the line protocol of InfluxDB.

Both by hand: prometheus-client cannot write the counters that dcgm-exporter has, whose names do not end in _total,
takes 71 to 86 ms to import, and would be one more stranger's code in a daemon of root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from gpuguard.metrics.families import Labels, MetricFamily
from gpuguard.sanitize import neutralise

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# InfluxDB keeps the numbers of one subject in one line.
SUBJECTS = ("gpuguard_device_", "gpuguard_user_", "gpuguard_")
_SPECIAL = re.compile(r"([,= ])")


def to_prometheus(found: Iterable[MetricFamily]) -> str:
    """The page that Prometheus reads."""
    return "".join(map(_block, found))


@lru_cache(maxsize=128)
def _block(family: MetricFamily) -> str:
    lines = [f"# HELP {family.name} {_help(family.help)}", f"# TYPE {family.name} {family.kind}"]
    lines += [f"{family.name}{_labels(each)} {spelled(value)}" for each, value in family.values.items()]
    return "".join(f"{line}\n" for line in lines)


def to_influx(found: Iterable[MetricFamily], host: str, time: float) -> list[str]:
    """Lines of InfluxDB's protocol, one per subject.

    Args:
        found: under our own names.
        host: a tag of each line.
        time: unix time of the values.
    """
    points: dict[tuple[str, Labels], list[str]] = {}
    for family in found:
        start = next((each for each in SUBJECTS if family.name.startswith(each)), "")
        measurement = start.rstrip("_") or "gpuguard"
        for each, value in family.values.items():
            tags = tuple(sorted({**dict(each), "host": host}.items()))
            points.setdefault((measurement, tags), []).append(f"{family.name.removeprefix(start)}={spelled(value)}")
    stamp = round(time * 1000) * 10**6  # in nanoseconds; a float has no more than microseconds of today anyway
    return [
        f"{measurement}{''.join(f',{_tag(name)}={_tag(value)}' for name, value in tags if value)} "
        f"{','.join(values)} {stamp}"
        for (measurement, tags), values in points.items()
    ]


@lru_cache(maxsize=512)  # most are what they were at the last scrape
def spelled(value: float) -> str:
    """``"3"``, ``"0.25"``: a whole number without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else repr(value)


@lru_cache(maxsize=4096)  # the same ones at every scrape
def _labels(each: Labels) -> str:
    if not each:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in each) + "}"


def _escaped(value: str) -> str:
    return _help(value).replace('"', '\\"')


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _tag(text: str) -> str:
    r"""A tag: ``,``, ``=`` and blanks escaped.  A backslash at its end would escape what stands behind it."""
    one_line = neutralise(text)
    ending = len(one_line) - len(one_line.rstrip("\\"))
    return _SPECIAL.sub(r"\\\1", one_line[: len(one_line) - ending] + "/" * ending)
