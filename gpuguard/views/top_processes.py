"""The lower half of `gpuguard top`: processes as a table or as a tree below their parents, sorted and filtered.

One row per process, whatever the number of its devices.  What strangers wrote is neutral before it gets into a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuguard.request import computes
from gpuguard.units import format_bytes, format_duration
from gpuguard.views.bars import Part, fitted
from gpuguard.views.text import display_width, neutral_command, neutralise, shorten
from gpuguard.views.top_devices import ranges
from gpuguard.views.top_scene import Identity, Line, Scene, View
from gpuguard.views.usage import DeviceUse, ProcessUse
from gpuguard.views.who import device_label

_ROOMY = range(100, 100_000)  # columns of a screen with room for more than what matters most
_FORKS = ("├─ ", "└─ ", "│  ", "   ")
_ASCII_FORKS = ("|- ", "`- ", "|  ", "   ")


@dataclass(frozen=True)
class Row:
    """A process on one or several devices; None = unknown."""

    identity: Identity | None  # None: its start time is not known, so nobody can be sure who it is
    pid: int
    user: str | None
    devices: tuple[str, ...]  # labels
    uuids: tuple[str, ...]
    memory: int | None
    sm: float | None
    cpu: float | None
    host: int | None
    seconds: float | None  # since its start
    claim: str | None
    stopped: bool
    kind: str
    command: str


def rows_of(scene: Scene, view: View) -> list[Row]:
    """Every process that *view* lets through, in its order."""
    together: dict[tuple[int, float | None], list[tuple[DeviceUse, ProcessUse]]] = {}
    for use in scene.found:
        if view.devices and use.device.uuid not in view.devices:
            continue
        for running in use.processes or ():
            if view.compute_only and not computes(running.process):
                continue
            together.setdefault((running.process.pid, running.process.start_time), []).append((use, running))
    rows = [row for row in (_row(scene, places) for places in together.values()) if _wanted(row, view)]
    return sorted(rows, key=_key(view), reverse=view.reverse)


def _row(scene: Scene, places: Sequence[tuple[DeviceUse, ProcessUse]]) -> Row:
    first, process = places[0][1], places[0][1].process
    memory = [running.process.memory_used for _, running in places]
    rates = [running.process.utilization for _, running in places if running.process.utilization is not None]
    start = process.start_time
    identity = None if start is None else (process.pid, start)
    host = scene.host.get(identity) if identity else None
    container = f"in {neutralise(process.container[:12])}: " if process.container else ""
    return Row(
        identity=identity,
        pid=process.pid,
        user=process.user,
        devices=tuple(device_label(use.device) for use, _ in places),
        uuids=tuple(use.device.uuid for use, _ in places),
        memory=None if None in memory else sum(one or 0 for one in memory),
        sm=sum(rates) / len(rates) if rates else None,
        cpu=host.cpu if host else None,
        host=host.memory if host else None,
        seconds=None if start is None else max(0.0, scene.snapshot.clock - start),
        claim=first.claim,
        stopped=bool(first.stopped),
        kind=neutralise(process.kind),
        command=container + neutral_command(process.command, brief=True),
    )


def _wanted(row: Row, view: View) -> bool:
    if view.users and row.user not in view.users:
        return False
    for word in view.text.lower().split():
        kind, _, value = word.partition(":")
        if kind == "user" and value:
            found = (row.user or "").lower() == value
        elif kind == "gpu" and value:
            found = bool(set(value.split(",")) & {*row.devices, *(one.partition(".")[0] for one in row.devices)})
        else:
            found = word in f"{row.user or ''} {row.pid} {row.command}".lower()
        if not found:
            return False
    return True


def _key(view: View) -> Callable[[Row], tuple[object, ...]]:
    """Numbers from the largest down, as one looks for them; what is unknown comes last."""
    numbers: dict[str, Callable[[Row], float | None]] = {
        "memory": lambda row: row.memory,
        "sm": lambda row: row.sm,
        "cpu": lambda row: row.cpu,
        "host": lambda row: row.host,
        "time": lambda row: row.seconds,
    }
    if view.sort in numbers:
        number = numbers[view.sort]

        def by_number(row: Row) -> tuple[object, ...]:
            value = number(row)
            unknown = value is None
            return (unknown != view.reverse, 0.0 if value is None else -value, row.pid)

        return by_number
    words: dict[str, Callable[[Row], tuple[object, ...]]] = {
        "pid": lambda row: (row.pid,),
        "user": lambda row: (row.user is None, row.user or "", _place(row), row.pid),
        "command": lambda row: (row.command, row.pid),
    }
    return words.get(view.sort, lambda row: (_place(row), row.pid))


def _place(row: Row) -> tuple[float, ...]:
    return tuple(float(part) if part.replace(".", "", 1).isdigit() else -1.0 for part in row.devices)


@dataclass(frozen=True)
class _Column:
    key: str  # of SORTS, or "" where nobody sorts by it
    header: str
    width: int
    align: str
    cell: Callable[[Row], Part]
    widths: range = range(_ROOMY.stop)  # of the screens that have it


def _number(value: float | None, form: str = "{:.0f}") -> str:
    return "n/a" if value is None else form.format(value)


def _claim(row: Row) -> Part:
    if row.claim:
        return neutralise(row.claim)[:8], ""
    return ("", "") if row.kind == "graphics" else ("no claim", "red")


def _mark(row: Row) -> Part:
    return ("" if row.claim or row.kind == "graphics" else "!", "bold red")


def _kind(row: Row) -> Part:
    return row.kind.replace("compute+graphics", "C+G"), "dim"


def _known(value: object, text: str) -> Part:
    return text, "dim" if value is None else ""


_COLUMNS = (
    _Column("gpu", "GPU", 5, ">", lambda row: (_devices(row), "bold")),
    _Column("pid", "PID", 7, ">", lambda row: (str(row.pid), "")),
    _Column("user", "USER", 9, "<", lambda row: (neutralise(row.user or "unknown"), "")),
    _Column("memory", "MEM", 8, ">", lambda row: _known(row.memory, format_bytes(row.memory))),
    _Column("sm", "SM%", 4, ">", lambda row: _known(row.sm, _number(row.sm))),
    _Column("cpu", "CPU%", 5, ">", lambda row: _known(row.cpu, _number(row.cpu))),
    _Column("host", "HOST", 8, ">", lambda row: _known(row.host, format_bytes(row.host)), _ROOMY),
    _Column("time", "TIME", 6, ">", lambda row: _known(row.seconds, _time(row.seconds))),
    _Column("", "CLAIM", 8, "<", _claim, _ROOMY),
    _Column("", "C", 1, "<", _mark, range(_ROOMY.start)),
    _Column(
        "", "KIND", 9, "<", lambda row: (row.kind.replace("compute+graphics", "C+G"), "dim"), range(140, _ROOMY.stop)
    ),
)


def _devices(row: Row) -> str:
    if len(row.devices) > 1 and all(label.isdigit() for label in row.devices):
        return ranges(map(int, row.devices))
    return ",".join(row.devices)


def _time(seconds: float | None) -> str:
    return "n/a" if seconds is None else format_duration(round(seconds)) if seconds >= 1 else "0s"


def process_lines(scene: Scene, view: View, width: int) -> list[Line]:
    """A header and a line per process; nothing but a sentence when there is none."""
    columns = [column for column in _COLUMNS if width in column.widths]
    rows = rows_of(scene, view)
    if not rows:
        return [Line((("no processes" + (" that match the filter" if _filters(view) else ""), "dim"),))]
    lines = [_header(columns, view, width)]
    for row, prefix, command in _forest(rows, scene, view) if view.tree else ((row, "", None) for row in rows):
        if row is None:
            blank = " " * (sum(column.width + 1 for column in columns))
            lines.append(Line(tuple(fitted([(blank, ""), (prefix, "dim"), (command or "", "dim")], width))))
        else:
            lines.append(_line(row, columns, prefix, view, width))
    return lines


def _filters(view: View) -> bool:
    return bool(view.users or view.devices or view.text or view.compute_only)


def _header(columns: Sequence[_Column], view: View, width: int) -> Line:
    parts: list[Part] = []
    keys: list[tuple[int, int, str]] = []
    place = 0
    for column in columns:
        style = "bold reverse" if column.key == view.sort else "bold"
        parts += [(f"{column.header:{column.align}{column.width}}", style), (" ", "")]
        if column.key:
            keys.append((place, place + column.width, column.key))
        place += column.width + 1
    keys.append((place, width, "command"))
    parts.append(("COMMAND", "bold reverse" if view.sort == "command" else "bold"))
    return Line(tuple(fitted(parts, width)), keys=tuple(keys))


def _line(row: Row, columns: Sequence[_Column], prefix: str, view: View, width: int) -> Line:
    parts: list[Part] = []
    for column in columns:
        text, style = column.cell(row)
        text = shorten(text, column.width)
        blanks = " " * (column.width - display_width(text))
        parts += [(blanks + text if column.align == ">" else text + blanks, style), (" ", "")]
    parts += [(prefix, "dim"), ("[stopped] " if row.stopped else "", "yellow"), (row.command, "")]
    parts = fitted([part for part in parts if part[0]], width)
    if row.identity is not None and row.identity == view.selected:
        parts = [(text, "reverse") for text, _ in parts]
    return Line(tuple(parts), process=row.identity)


# The tree.  Rows stand below the nearest process above them that is shown; a process above a single one is folded away
# only if it is nobody's shell or launcher: so every ancestor but the first process of the machine is there.


def _forest(rows: Sequence[Row], scene: Scene, view: View) -> Iterable[tuple[Row | None, str, str | None]]:
    by_pid = {row.pid: row for row in rows}
    children: dict[int, list[int]] = {}
    roots: list[int] = []
    placed: set[int] = set()
    for row in rows:
        pid, above = row.pid, set()
        while pid not in placed:
            placed.add(pid)
            above.add(pid)
            known = scene.ancestors.get(pid)
            parent = known.parent if known else 0
            if parent <= 1 or parent in above or (parent not in scene.ancestors and parent not in by_pid):
                roots.append(pid)
                break
            children.setdefault(parent, []).append(pid)
            pid = parent
    forks = _ASCII_FORKS if view.ascii_only else _FORKS
    todo = [(pid, "", "") for pid in reversed(roots)]
    while todo:
        pid, prefix, below = todo.pop()
        found = by_pid.get(pid)
        yield found, prefix, None if found else _ancestor(pid, scene)
        kin = children.get(pid, [])
        for number, child in reversed(list(enumerate(kin))):
            last = number == len(kin) - 1
            todo.append((child, below + forks[last], below + forks[2 + last]))


def _ancestor(pid: int, scene: Scene) -> str:
    above = scene.ancestors[pid]
    return f"{pid} {neutralise(above.user or 'unknown')} {neutral_command(above.command, brief=True)}"


def moved(rows: Sequence[Identity], view: View, by: int) -> View:
    """*view* with the cursor *by* rows further down, within the processes that are shown."""
    if not rows:
        return replace(view, selected=None)
    # Without a cursor the first step down goes to the first row, the first one up to the last.
    start = rows.index(view.selected) if view.selected in rows else -1 if by > 0 else len(rows)
    return replace(view, selected=rows[min(len(rows) - 1, max(0, start + by))])
