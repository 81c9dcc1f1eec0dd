"""The lower half of `gpuguard top`: processes as a table or as a tree below their parents, sorted and filtered.

One row per process, whatever the number of its devices.  Text from strangers is made neutral before it gets into a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gpuguard.device_state import DeviceUse, ProcessUse, grouped, may_compute
from gpuguard.locale import N_, _
from gpuguard.model import ProcessIdentity
from gpuguard.procfs import read_memory, start_time
from gpuguard.sanitize import display_width, neutral_command, neutralise
from gpuguard.tables import padded, shorten
from gpuguard.top.scene import Moment, Scene, ScreenLine, ScreenView, moment_of
from gpuguard.units import NOT_AVAILABLE, format_bytes, format_duration, format_ranges, format_rounded
from gpuguard.views.charts import Part, fitted
from gpuguard.views.who import ENDED

_ROOMY = range(100, 100_000)  # columns of a screen with room for more than what matters most
_WITH_BANDWIDTH, _WITH_ALL = range(120, _ROOMY.stop), range(150, _ROOMY.stop)
_KINDS = {"compute": "C", "graphics": "G", "compute+graphics": "C+G", "mps": "M+C"}  # as nvidia-smi writes them
_FORKS = ("├─ ", "└─ ", "│  ", "   ")
_ASCII_FORKS = ("|- ", "`- ", "|  ", "   ")


@dataclass(frozen=True)
class ProcessRow:
    """A process on one or several devices; None = unknown."""

    identity: ProcessIdentity | None  # None: its start time is unknown, so it cannot be told from a later process
    pid: int
    user: str | None
    devices: tuple[str, ...]  # labels
    uuids: tuple[str, ...]
    now: Moment
    memory_share: float | None  # percent of its devices' memory
    host_share: float | None  # percent of the machine's memory
    seconds: int | None  # since its start
    claim: str | None
    stopped: bool
    kind: str
    computes: bool  # or may compute
    command: str


def rows_of(scene: Scene, view: ScreenView) -> list[ProcessRow]:
    """Return every process that *view* lets through, in the order of *view*."""
    together = grouped(
        ((running.process.pid, running.process.start_time), (use, running))
        for use in scene.uses
        if not view.devices or use.device.uuid in view.devices
        for running in use.processes or ()
        if not view.compute_only or may_compute(running.process, use.device)
    )
    rows = [row for row in (_row(scene, places) for places in together.values()) if _wanted(row, view)]
    return sorted(rows, key=lambda row: _sort_key(row, view), reverse=view.reverse)


def chosen_row(scene: Scene, view: ScreenView) -> ProcessRow | None:
    """Return the process under the cursor, or None if it is not shown."""
    return next((row for row in rows_of(scene, view) if row.identity and row.identity == view.selected), None)


def _row(scene: Scene, places: Sequence[tuple[DeviceUse, ProcessUse]]) -> ProcessRow:
    first, process = places[0][1], places[0][1].process
    start = process.start_time
    identity = None if start is None else (process.pid, start)
    host = scene.host.get(identity) if identity else None
    container = _("in {container}: ").format(container=neutralise(process.container[:12])) if process.container else ""
    now = moment_of([running.process for _use, running in places], host)
    totals = [use.device.memory_total for use, _running in places]
    return ProcessRow(
        identity=identity,
        pid=process.pid,
        user=process.user,
        devices=tuple(use.device.label for use, _running in places),
        uuids=tuple(use.device.uuid for use, _running in places),
        now=now,
        memory_share=_percent(now.memory, None if None in totals else sum(total or 0 for total in totals)),
        host_share=_percent(now.host, scene.machine.memory_total if scene.machine else None),
        seconds=None if start is None else int(max(0.0, scene.snapshot.clock - start)),
        claim=first.claim,
        stopped=bool(first.stopped),
        kind=neutralise(process.kind),
        computes=any(may_compute(running.process, use.device) for use, running in places),
        command=_(ENDED) if process.ended else container + neutral_command(process.command, brief=True),
    )


def _percent(part: int | None, whole: int | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _wanted(row: ProcessRow, view: ScreenView) -> bool:
    if view.users and row.user not in view.users:
        return False
    for word in view.text.lower().split():
        kind, _, value = word.partition(":")
        if kind == "user" and value:
            fits = (row.user or "").lower() == value
        elif kind == "gpu" and value:
            fits = bool(set(value.split(",")) & {*row.devices, *(label.partition(".")[0] for label in row.devices)})
        else:
            fits = word in f"{row.user or ''} {row.pid} {row.command}".lower()
        if not fits:
            return False
    return True


def _sort_key(row: ProcessRow, view: ScreenView) -> tuple[object, ...]:
    """Return what *row* is sorted by: numbers from the largest down, as people look for them, unknown ones last."""
    if view.sort in ("memory", "sm", "cpu", "host", "time"):
        value = row.seconds if view.sort == "time" else getattr(row.now, view.sort)
        return (value is None) != view.reverse, 0.0 if value is None else -value, row.pid
    by_words: dict[str, tuple[object, ...]] = {
        "pid": (row.pid,),
        "user": (row.user is None, row.user or "", _position(row), row.pid),
        "command": (row.command, row.pid),
    }
    return by_words.get(view.sort, (_position(row), row.pid))


def _position(row: ProcessRow) -> tuple[float, ...]:
    return tuple(float(part) if part.replace(".", "", 1).isdigit() else -1.0 for part in row.devices)


@dataclass(frozen=True)
class _Column:
    key: str  # of SORTS, or "" where no sort goes by it
    header: str
    width: int
    align: str
    cell: Callable[[ProcessRow], Part]
    widths: range = range(_ROOMY.stop)  # of the screens that show it


def _claim(row: ProcessRow) -> Part:
    if row.claim:
        return neutralise(row.claim)[:8], ""
    return (_("no claim"), "red") if row.computes else ("", "")


def _known(value: object, text: str) -> Part:
    return text, "dim" if value is None else ""


def _rate(percent: float | None) -> Part:
    return _known(percent, format_rounded(percent, ""))


def _share(percent: float | None) -> Part:
    return _known(percent, NOT_AVAILABLE if percent is None else f"{percent:.1f}")


def _room(column: _Column) -> int:
    """Return the width of *column*; that of claims has room for all of "no claim" in every language."""
    return max(column.width, display_width(_("no claim"))) if column.cell is _claim else column.width


_COLUMNS = (
    _Column("gpu", "GPU", 5, ">", lambda row: (_devices(row), "bold")),
    _Column("pid", "PID", 7, ">", lambda row: (str(row.pid), "")),
    _Column("user", N_("USER"), 9, "<", lambda row: (neutralise(row.user or _("unknown")), "")),
    _Column("memory", N_("MEM"), 8, ">", lambda row: _known(row.now.memory, format_bytes(row.now.memory))),
    _Column("", N_("MEM%"), 5, ">", lambda row: _share(row.memory_share), _WITH_ALL),
    _Column("sm", "SM%", 4, ">", lambda row: _rate(row.now.sm)),
    _Column("", "MBW%", 4, ">", lambda row: _rate(row.now.bandwidth), _WITH_BANDWIDTH),
    _Column("", "ENC%", 4, ">", lambda row: _rate(row.now.encoder), _WITH_ALL),
    _Column("", "DEC%", 4, ">", lambda row: _rate(row.now.decoder), _WITH_ALL),
    _Column("cpu", "CPU%", 5, ">", lambda row: _rate(row.now.cpu)),
    _Column("host", N_("HOST"), 8, ">", lambda row: _known(row.now.host, format_bytes(row.now.host)), _ROOMY),
    _Column("", N_("HOST%"), 5, ">", lambda row: _share(row.host_share), _WITH_ALL),
    _Column("time", N_("TIME"), 6, ">", lambda row: _known(row.seconds, format_duration(row.seconds))),
    _Column("", N_("CLAIM"), 8, "<", _claim, _ROOMY),
    _Column("", "C", 1, "<", lambda row: ("!" if _claim(row)[1] else "", "bold red"), range(_ROOMY.start)),
    _Column("", N_("KIND"), 4, "<", lambda row: (_KINDS.get(row.kind, row.kind), "dim"), _ROOMY),
)


def _devices(row: ProcessRow) -> str:
    if len(row.devices) > 1 and all(label.isdigit() for label in row.devices):
        return format_ranges(map(int, row.devices))
    return ",".join(row.devices)


def process_lines(scene: Scene, view: ScreenView, width: int) -> list[ScreenLine]:
    """Return a header and a line per process, or only a sentence if there is none."""
    columns = [column for column in _COLUMNS if width in column.widths]
    rows = rows_of(scene, view)
    if not rows:
        filtered = view.users or view.devices or view.text or view.compute_only
        return [ScreenLine(((_("no processes that match the filter") if filtered else _("no processes"), "dim"),))]
    lines = [_header(columns, view, width)]
    for row, prefix, command in _forest(rows, scene, view) if view.tree else ((row, "", None) for row in rows):
        if row is None:
            blank = " " * (sum(_room(column) + 1 for column in columns))
            lines.append(ScreenLine(tuple(fitted([(blank, ""), (prefix, "dim"), (command or "", "dim")], width))))
        else:
            lines.append(_line(row, columns, prefix, view, width))
    return lines


def _header(columns: Sequence[_Column], view: ScreenView, width: int) -> ScreenLine:
    parts: list[Part] = []
    keys: list[tuple[int, int, str]] = []
    at = 0
    for column in columns:
        style = "bold reverse" if column.key == view.sort else "bold"
        room = _room(column)
        parts += [(padded(_(column.header), room, column.align), style), (" ", "")]
        if column.key:
            keys.append((at, at + room, column.key))
        at += room + 1
    keys.append((at, width, "command"))
    parts.append((_("COMMAND"), "bold reverse" if view.sort == "command" else "bold"))
    return ScreenLine(tuple(fitted(parts, width)), keys=tuple(keys))


def _line(row: ProcessRow, columns: Sequence[_Column], prefix: str, view: ScreenView, width: int) -> ScreenLine:
    parts: list[Part] = []
    for column in columns:
        (text, style), room = column.cell(row), _room(column)
        parts += [(padded(shorten(text, room), room, column.align), style), (" ", "")]
    parts += [(prefix, "dim"), (_("[stopped] ") if row.stopped else "", "yellow"), (row.command, "")]
    parts = fitted([part for part in parts if part[0]], width)
    if row.identity is not None and row.identity == view.selected:
        parts = [(text, "reverse") for text, _style in parts]
    return ScreenLine(tuple(parts), process=row.identity)


# The tree.  Each row stands below its parent, and every ancestor that is known is there, but for the first process of
# the machine.


def _forest(
    rows: Sequence[ProcessRow], scene: Scene, view: ScreenView
) -> Iterable[tuple[ProcessRow | None, str, str | None]]:
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
        row_of_pid = by_pid.get(pid)
        yield row_of_pid, prefix, None if row_of_pid else _ancestor(pid, scene)
        kin = children.get(pid, [])
        for number, child in reversed(list(enumerate(kin))):
            last = number == len(kin) - 1
            todo.append((child, below + forks[last], below + forks[2 + last]))


def _ancestor(pid: int, scene: Scene) -> str:
    above = scene.ancestors[pid]
    return f"{pid} {neutralise(above.user or 'unknown')} {neutral_command(above.command, brief=True)}"


def moved(rows: Sequence[ProcessIdentity], view: ScreenView, by: int) -> ScreenView:
    """Return *view* with the cursor *by* rows further down, within the processes that are shown."""
    if not rows:
        return replace(view, selected=None)
    # Without a cursor, a step down goes to the first row, and a step up to the last.
    start = rows.index(view.selected) if view.selected in rows else -1 if by > 0 else len(rows)
    return replace(view, selected=rows[min(len(rows) - 1, max(0, start + by))])


# Values of variables with such names are hidden until the user asks for them, because screens are shared.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
_LARGEST = 1 << 20  # bytes of an environment: the kernel allows 6 MiB, which is too long to read


def heading(row: ProcessRow) -> str:
    """Return ``"pid 4711 of alice: python train.py"``."""
    return _("pid {pid} of {user}: {command}").format(
        pid=row.pid, user=neutralise(row.user or _("unknown")), command=row.command
    )


def description(row: ProcessRow) -> list[str]:
    """Describe the process to the user who is about to signal it."""
    memory = format_bytes(row.now.memory)
    since = _("an unknown time") if row.seconds is None else format_duration(row.seconds)
    claim = _("claim {claim}").format(claim=neutralise(row.claim)) if row.claim else _("no claim")
    return [
        _("  pid {pid} of {user}").format(pid=row.pid, user=neutralise(row.user or _("unknown"))),
        _("  GPU {devices}, {memory}, for {since}, {claim}").format(
            devices=",".join(row.devices), memory=memory, since=since, claim=claim
        ),
        f"  {row.command}",
    ]


def environment(row: ProcessRow, *, hide: bool = True) -> str:
    """Return the variables of a process, one per line, or the reason why they cannot be read."""
    if row.identity is None or start_time(row.pid) != row.identity[1]:
        return _("it has ended")
    text = read_memory(row.pid, "environ", _LARGEST)
    if text is None:
        return _("its environment cannot be read: it belongs to another user, or has ended")
    variables = []
    for word in sorted(filter(None, text.split(b"\0"))):
        name, _equals, value = word.decode("utf-8", "surrogateescape").partition("=")
        hidden = hide and value and _SECRET.search(name)
        variables.append(neutralise(f"{name}={_('(hidden)') if hidden else value}"))
    return "\n".join(variables) or _("it has no variables")
