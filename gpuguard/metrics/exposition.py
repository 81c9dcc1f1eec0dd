"""The text format of Prometheus 0.0.4: as a page, and as a file for node_exporter's textfile collector.

By hand: prometheus-client cannot write the counters that dcgm-exporter has, whose names do not end in _total.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress

from gpuguard.errors import GpuguardError
from gpuguard.files import write_file
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.facts import MetricFacts
from gpuguard.metrics.families import MetricFamily, metric_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FILE = "gpuguard.prom"


def prometheus_text(facts: MetricFacts, compat: Collection[str] = ()) -> str:
    """The page for Prometheus: our own names, and those of the exporters *compat*."""
    families = metric_families(facts)
    for name in dict.fromkeys(compat):
        families += COMPAT[name](facts)
    return to_prometheus(families)


def to_prometheus(families: Iterable[MetricFamily]) -> str:
    """*families* as Prometheus reads them, without those that have no value."""
    lines = []
    for family in families:
        if not family.values:
            continue
        lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.values.items():
            quoted = ",".join('{}="{}"'.format(name, _escaped(text).replace('"', '\\"')) for name, text in labels)
            lines.append(f"{family.name}{f'{{{quoted}}}' if quoted else ''} {format_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def format_number(value: float) -> str:
    """``"3"``, ``"0.25"``: a whole number without a point."""
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def write_textfile(directory: str, text: str) -> None:
    """Replace FILE in *directory*: readers see the old page or the new one, whole.

    Raises GpuguardError: it cannot be written.
    """
    try:  # its unfinished name ends in .new: node_exporter reads *.prom alone
        write_file(os.path.join(directory, FILE), text.encode())
    except OSError as error:
        raise GpuguardError(f"{directory}/{FILE} cannot be written: {error.strerror}.") from error


def remove_textfile(directory: str) -> None:
    """Remove FILE: old numbers look like new ones where nothing writes them any more."""
    with suppress(OSError):  # it is gone, or not ours
        os.unlink(os.path.join(directory, FILE))
