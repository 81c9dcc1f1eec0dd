"""Pages in the text format of Prometheus 0.0.4 and in OpenMetrics 1.0; the former also as a file for node_exporter.

They are written by hand, because prometheus-client cannot write the counters of dcgm-exporter, whose names do not end
in _total.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

from gpuguard.errors import GpuguardError
from gpuguard.files import write_file
from gpuguard.metrics.compat import COMPAT
from gpuguard.metrics.facts import MetricFacts
from gpuguard.metrics.families import MetricFamily, metric_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
FILE = "gpuguard.prom"


def prometheus_text(facts: MetricFacts, compat: Collection[str] = (), content_type: str = CONTENT_TYPE) -> str:
    """Make the page for Prometheus, with our own names and those of the exporters *compat*."""
    families = metric_families(facts)
    if facts.snapshot and facts.current:
        for name in dict.fromkeys(compat):
            families += COMPAT[name](facts.snapshot)
    return to_openmetrics(families) if content_type == OPENMETRICS else to_prometheus(families)


def negotiated(accept: str) -> str:
    """Return the content type for an Accept header: OPENMETRICS if the client wants it no less than plain text."""
    weights = {"text/plain": 0.0}
    for choice in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        with suppress(ValueError):  # a weight that is no number counts as none
            weights[kind] = max(float(weight), weights.get(kind, 0.0))
    wanted = weights.get("application/openmetrics-text", 0.0)
    return OPENMETRICS if wanted > 0 and wanted >= weights["text/plain"] else CONTENT_TYPE


def to_prometheus(families: Iterable[MetricFamily]) -> str:
    """Write *families* as Prometheus reads them, without those that have no value."""
    lines = []
    for family in families:
        if family.values:
            lines += [f"# HELP {family.name} {_escaped(family.help)}", f"# TYPE {family.name} {family.kind}"]
            lines += _samples(family)
    return "".join(f"{line}\n" for line in lines)


def to_openmetrics(families: Iterable[MetricFamily]) -> str:
    """Write *families* in OpenMetrics, where a counter's family is named like its numbers but without ``_total``."""
    lines = []
    for family in families:
        if family.values:
            name, kind = family.name.removesuffix("_total"), family.kind
            if kind == "counter" and name == family.name:  # as in dcgm-exporter; to OpenMetrics it is no counter
                kind = "unknown"
            lines += [f"# HELP {name} {_quotable(family.help)}", f"# TYPE {name} {kind}", *_samples(family)]
    return "".join(f"{line}\n" for line in (*lines, "# EOF"))


def _samples(family: MetricFamily) -> Iterator[str]:
    for labels, value in family.values.items():
        quoted = ",".join(f'{name}="{_quotable(text)}"' for name, text in labels)
        yield f"{family.name}{f'{{{quoted}}}' if quoted else ''} {format_number(value)}"


def format_number(value: float) -> str:
    """Write a number, whole ones without a point: ``"3"``, ``"0.25"``."""
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quotable(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def write_textfile(directory: str, text: str) -> None:
    """Replace FILE in *directory* so that readers see the whole old page or the whole new one.

    Raises GpuguardError: it cannot be written.
    """
    try:  # the unfinished file ends in .new, and node_exporter reads only *.prom
        write_file(os.path.join(directory, FILE), text.encode())
    except OSError as error:
        raise GpuguardError(f"{directory}/{FILE} cannot be written: {error.strerror}.") from error


def remove_textfile(directory: str) -> None:
    """Remove FILE, because old numbers look like new ones when nothing writes them any more."""
    with suppress(OSError):  # it is gone, or not ours
        os.unlink(os.path.join(directory, FILE))
