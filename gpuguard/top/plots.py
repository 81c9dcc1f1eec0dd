"""The middle of `gpuguard top`, where the screen has room: plots of the last minutes with a time axis.

They show the mean of the GPUs that are listed and, on a very wide screen, the machine; once a process is chosen, that
process.  Two or four plots stand side by side on a wide screen, utilization alone on a narrow one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from gpuguard.device_state import DeviceUse
from gpuguard.locale import _
from gpuguard.model import Snapshot
from gpuguard.top.process_table import ProcessRow, heading
from gpuguard.top.scene import History, ScreenLine
from gpuguard.units import format_bytes, format_count, format_rounded
from gpuguard.views.charts import Part, Scale, fitted, plot, scale_of

FEWEST_ROWS = 8  # a plot needs so many to show something: a heading, five of the drawing, the axis and its times
MOST_ROWS = 16
_FRAME = 3  # rows of a plot that are not the drawing
_MARGIN = 10  # columns of the numbers and the axis at the left of a drawing
_ABREAST = ((200, 5), (160, 4), (100, 2), (0, 1))  # from so many columns of the screen on, this many plots
_GIB = 2**30


@dataclass(frozen=True)
class PlottedSeries:
    """What one plot shows."""

    title: str
    values: Sequence[float | None]
    now: str
    scale: Scale
    colour: str
    highest: str = ""  # in words, since the start

    @property
    def is_known(self) -> bool:
        """Whether there is something to draw."""
        return any(value is not None for value in self.values)


def plot_lines(
    snapshot: Snapshot,
    history: History,
    uses: Sequence[DeviceUse],
    chosen: ProcessRow | None,
    size: tuple[int, int],
    *,
    ascii_only: bool,
) -> list[ScreenLine]:
    """Return the lines of the plots, *size* (columns, rows) at most; none if there is no room, or nothing to plot."""
    width, rows = size[0], min(size[1], MOST_ROWS)
    series = of_process(history, chosen) if chosen else [*of_devices(history, uses), *of_machine(history)]
    abreast = next(number for columns, number in _ABREAST if width >= columns)
    series = [one for one in series[:abreast] if one.is_known]
    if rows < FEWEST_ROWS or not series or width < 2 * _MARGIN:
        return []
    lines: list[list[Part]] = []
    if chosen:
        lines.append([(heading(chosen), "bold")])
        rows -= 1
    columns = (width - 2 * (len(series) - 1)) // len(series)
    drawn = [_drawn(one, history, snapshot.taken_at, (columns, rows), ascii_only=ascii_only) for one in series]
    for row in zip_longest(*drawn, fillvalue=[("", "")]):
        lines.append([part for parts in row for part in (*fitted(parts, columns), ("  ", ""))])
    return [ScreenLine(tuple(fitted(parts, width))) for parts in lines]


def of_devices(history: History, uses: Sequence[DeviceUse]) -> list[PlottedSeries]:
    """Return the means of the whole devices in *uses*, or of the instances if there are no whole devices."""
    known = [use.device for use in uses if use.device.uuid in history.devices]
    counted = [device for device in known if device.parent_uuid is None] or known
    rings = [history.devices[device.uuid] for device in counted]
    of = _("mean of {count}").format(count=format_count(len(rings), "GPU"))
    series = []
    for metric, name, colour in (("utilization", _("utilization"), "green"), ("memory", _("memory in use"), "cyan")):
        values = [_mean(moment) for moment in zip(*(reversed(ring[metric]) for ring in rings), strict=False)][::-1]
        now = format_rounded(values[-1] if values else None, "%")
        series.append(PlottedSeries(f"{name}, {of}", values, now, Scale(0.0, 100.0, "%"), colour))
    return series


def of_machine(history: History) -> list[PlottedSeries]:
    """Return CPU, memory and swap of the machine; no swap if it has none."""
    shares = [100 * machine.memory_used / machine.memory_total for machine in history.machine]
    swaps = [100 * machine.swap_used / machine.swap_total for machine in history.machine if machine.swap_total]
    return [
        _rate("CPU", [machine.cpu for machine in history.machine], highest=100.0),
        replace(_rate(_("memory of the host"), shares, highest=100.0), colour="cyan"),
        *([replace(_rate(_("swap"), swaps, highest=100.0), colour="cyan")] if swaps else []),
    ]


def of_process(history: History, row: ProcessRow) -> list[PlottedSeries]:
    """Return a process's utilization, its memory on all of its devices, its CPU time and its memory of the host."""
    moments = list(history.processes.get(row.identity, ())) if row.identity else []
    return [
        _rate(_("its utilization"), [moment.sm for moment in moments], highest=100.0),
        _size(_("its memory"), [moment.memory for moment in moments]),
        _rate("CPU", [moment.cpu for moment in moments]),
        _size(_("memory of the host"), [moment.host for moment in moments]),
    ]


def _rate(title: str, values: Sequence[float | None], *, highest: float | None = None) -> PlottedSeries:
    known = [value for value in values if value is not None]
    now, most = (format_rounded(value, "%") for value in (values[-1] if values else None, max(known, default=None)))
    return PlottedSeries(title, values, now, scale_of(known, "%", highest=highest), "green", most)


def _size(title: str, values: Sequence[int | None]) -> PlottedSeries:
    known = [value for value in values if value is not None]
    now, most = (format_bytes(value) for value in (values[-1] if values else None, max(known, default=None)))
    sizes = [None if value is None else value / _GIB for value in values]
    return PlottedSeries(title, sizes, now, scale_of([value / _GIB for value in known], "GiB"), "cyan", most)


def over_time(history: History, row: ProcessRow, now: float, width: int, *, ascii_only: bool) -> str:
    """Draw all that is known of a process over time, one plot below the other."""
    drawn = [_drawn(one, history, now, (width, FEWEST_ROWS), ascii_only=ascii_only) for one in of_process(history, row)]
    plots = ["\n".join("".join(text for text, _style in line) for line in lines) for lines in drawn]
    return "\n\n".join(plots)


def _drawn(
    series: PlottedSeries, history: History, now: float, size: tuple[int, int], *, ascii_only: bool
) -> list[list[Part]]:
    heading: list[Part] = [(f"{series.title}: ", ""), (series.now, f"bold {series.colour}")]
    if not series.is_known:
        return [heading]
    if series.highest:
        heading.append((_(", at most {highest}").format(highest=series.highest), "dim"))
    count = (size[0] - _MARGIN) * (1 if ascii_only else 2)
    values = list(series.values)[-count:]
    seconds = history.seconds_between * len(values)
    # A young history has fewer values, and fills its plot as well.
    stretched = [values[number * len(values) // count] for number in range(count)]
    rows = (size[1] - _FRAME - 1) | 1  # an odd number has a middle, with a round number beside it
    drawn = plot(stretched, series.scale, now - seconds, now, rows, ascii_only=ascii_only)
    return [
        heading,
        *([(line, series.colour)] for line in drawn[:-2]),
        *([(line, "dim")] for line in drawn[-2:]),
    ]


def _mean(moment: Sequence[float | None]) -> float | None:
    known = [value for value in moment if value is not None]
    return 100 * sum(known) / len(known) if known else None
