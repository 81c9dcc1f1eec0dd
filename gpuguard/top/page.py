"""The page of `gpuguard top` as lines of parts, for any terminal: title, devices, users, queue, jobs, processes, gaps.

Pure: the same scene, history and view give the same lines.  Draws on nothing: see app and cli.top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuguard.device_state import DeviceUse, model_name, user_totals
from gpuguard.locale import _, translated
from gpuguard.sanitize import display_width, neutralise
from gpuguard.tables import padded, shorten
from gpuguard.top.devices import FULL_LINES, device_lines, folded
from gpuguard.top.plots import FEWEST_ROWS, plot_lines
from gpuguard.top.process_table import chosen_row, process_lines
from gpuguard.top.scene import History, Scene, ScreenLine, ScreenView
from gpuguard.units import format_bytes, format_count, format_duration, format_rounded, local_time
from gpuguard.views.charts import Part, alarm, bar, fitted
from gpuguard.views.jobs import public_since, public_state
from gpuguard.views.text import Paint
from gpuguard.views.who import gap_lines

_SHARE = 0.6  # of the screen, for devices, because people want to see processes below them
_WAITING = 3  # requests shown
_JOBS = 3  # shown
_GAPS = 3


def page(scene: Scene, history: History, view: ScreenView, width: int, height: int) -> list[ScreenLine]:
    """Return the lines below the title.

    Args:
        scene: what was seen.
        history: of the samples before.
        view: how to show it.
        width: columns; each line takes exactly as many.
        height: rows of the screen, from which the mode "auto" chooses; the page may be longer.
    """
    uses = shown_uses(scene, view)
    mode, rest = mode_for(uses, view, height)
    kept, free = folded(uses) if rest else (uses, "")
    lines = [*_machine(scene, view, width), *device_lines(scene, history, view, kept, mode, width)]
    if free:
        lines.append(_line([("     ", ""), (free, "green")], width))
    if not uses:
        lines.append(_line([(_("no GPUs that match") if scene.uses else _("no GPUs"), "dim")], width))
    lines += _users(scene, view, width)
    lines += _waiting(scene, width) + _jobs(scene, view, width)
    below = [_line([], width), *process_lines(scene, view, width), *_gaps(scene, width)]
    room = height - len(lines) - len(below) - 1
    if view.past and room >= FEWEST_ROWS:
        chosen, size = chosen_row(scene, view), (width, room)
        plots = plot_lines(scene.snapshot, history, uses, chosen, size, ascii_only=view.ascii_only)
        lines += [_line([], width), *plots] if plots else []
    return lines + below


def shown_uses(scene: Scene, view: ScreenView) -> list[DeviceUse]:
    """Return the devices that *view* lets through; its users do not count if none of them has anything there."""
    uses = [use for use in scene.uses if _shown(use, view)]
    return uses or [use for use in scene.uses if _shown(use, replace(view, users=frozenset()))]


def mode_for(uses: Sequence[DeviceUse], view: ScreenView, height: int) -> tuple[str, bool]:
    """Return "full" or "compact", and whether free devices are to be folded into one line."""
    if view.mode != "auto":
        return view.mode, False
    room = height * _SHARE
    parts = sum(bool(use.device.parent_uuid) for use in uses)
    if FULL_LINES * (len(uses) - parts) + parts <= room:
        return "full", False
    return "compact", len(uses) > room


def title(scene: Scene, view: ScreenView, width: int, silent: float = 0.0) -> ScreenLine:
    """Return the first line: which machine it is, when it was sampled, and by what."""
    snapshot = scene.snapshot
    whole = [device for device in snapshot.devices if not device.parent_uuid]
    kind = (_("RECORDED ") if snapshot.recorded else "") + (_("SIMULATED ") if snapshot.simulated else "")
    models = {model_name(device) for device in whole}
    of = f" {neutralise(*models)}" if len(models) == 1 and any(device.name for device in whole) else ""
    words = [f"{format_count(len(whole), 'GPU')}{of}"]
    if snapshot.driver_version and width >= 100:
        words.append(_("driver {driver_version}").format(driver_version=neutralise(snapshot.driver_version)))
    if snapshot.cuda_version and width >= 100:
        words.append(f"CUDA {neutralise(snapshot.cuda_version)}")
    words.append(local_time(snapshot.taken_at, "%Y-%m-%d %H:%M:%S" if width >= 120 else "%H:%M:%S"))
    if scene.age is not None:
        words.append(_("seen by the daemon {age} ago").format(age=format_duration(round(scene.age + silent))))
    shown = [_("sort {column}").format(column=view.sort) + (_(" reversed") if view.reverse else ""), view.mode]
    shown += [_("users {names}").format(names=",".join(sorted(map(neutralise, view.users))))] if view.users else []
    shown += [_("filter {text}").format(text=neutralise(view.text))] if view.text else []
    right = f" {', '.join(shown)}"
    viewer = f"{neutralise(scene.viewer)}@" if scene.viewer and width >= 120 else ""
    left = [
        (kind, "bold"),
        (viewer, "yellow" if scene.viewer == "root" else ""),
        (neutralise(snapshot.host), "bold"),
        (f"  {', '.join(words)}", ""),
    ]
    room = width - display_width(right)
    return _line([*fitted(left, room), (right, "dim")] if room > 40 else left, width)


def _machine(scene: Scene, view: ScreenView, width: int) -> list[ScreenLine]:
    """Return a line with CPU, memory and swap of the machine, each a meter, and its load."""
    if (machine := scene.machine) is None:
        return []
    memory = _("{memory_used} of {memory_total}").format(
        memory_used=format_bytes(machine.memory_used), memory_total=format_bytes(machine.memory_total)
    )
    swap = _("{swap_used} of {swap_total}").format(
        swap_used=format_bytes(machine.swap_used), swap_total=format_bytes(machine.swap_total)
    )
    meters = [
        ("CPU", None if machine.cpu is None else machine.cpu / 100, format_rounded(machine.cpu, "%")),
        ("MEM", machine.memory_used / machine.memory_total, memory),
    ]
    if machine.swap_total:
        meters.append(("SWAP", machine.swap_used / machine.swap_total, swap))
    cores = _(" of {count}").format(count=format_count(machine.cores, "core")) if machine.cores else ""
    averages = [f"{average:.1f}" for average in machine.load]
    taken = sum(len(name) + display_width(words) + 4 for name, _share, words in meters) + 1
    load = f"LOAD {' '.join(averages)}{cores}"
    if taken + display_width(load) > width:
        load = f"LOAD {averages[0]}{cores}"
    room = (width - taken - display_width(load)) // len(meters)
    parts: list[Part] = [(" ", "")]
    for name, share, words in meters:
        parts += [(f"{name} ", "dim")]
        if room >= 4:
            colour = alarm(share, 0.9, 1.0, "cyan" if name != "CPU" else "green")
            parts += [*bar(share, min(room, 40), colour, ascii_only=view.ascii_only), (" ", "")]
        parts.append((f"{words}  ", ""))
    return [_line([*parts, ("LOAD", "dim"), (load[4:], "")], width)]


def _shown(use: DeviceUse, view: ScreenView) -> bool:
    if view.devices and use.device.uuid not in view.devices:
        return False
    if not view.users:
        return True
    people = {held.user for held in use.claims} | {running.process.user for running in use.processes or ()}
    return bool(people & view.users)


def _users(scene: Scene, view: ScreenView, width: int) -> list[ScreenLine]:
    totals = [row for row in user_totals(scene.uses) if not view.users or row.user in view.users]
    if not totals:
        return []
    parts: list[Part] = [(_("USERS "), "dim")]
    for number, row in enumerate(totals):
        gpus = max(row.devices, row.claimed)
        memory = "" if row.memory_used is None else f" {format_bytes(row.memory_used)}"
        idle = _(", {idle} idle").format(idle=row.idle) if row.idle else ""
        parts += [("  " if number else "", ""), (neutralise(row.user or _("unknown")), "bold")]
        parts += [(f" {format_count(gpus, 'GPU')}{memory}", ""), (idle, "yellow")]
    return [_line(parts, width)]


def _waiting(scene: Scene, width: int) -> list[ScreenLine]:
    rows: list[list[Part]] = []
    for number, (ticket, start) in enumerate(scene.waiting[:_WAITING], 1):
        since = format_duration(round(max(0.0, scene.snapshot.taken_at - ticket.since)))
        # A long note is shortened, because when the request starts, and why not earlier, comes after it.
        note = f' "{shorten(neutralise(ticket.note), width // 4)}"' if ticket.note else ""
        gpus = format_count(ticket.num_gpus, "GPU")
        text = _(" {gpus} for {since}{note}: {start}").format(
            gpus=gpus, since=since, note=note, start=neutralise(translated(start))
        )
        rows.append([(f"{number}. ", "dim"), (neutralise(ticket.user), "bold"), (text, "")])
    more = len(scene.waiting) - len(rows)
    text = _("and {more} more in the queue: gpuguard queue").format(more=more) if more else ""
    return _titled(_("WAITS"), rows, text, width)


def _jobs(scene: Scene, view: ScreenView, width: int) -> list[ScreenLine]:
    jobs = [job for job in scene.jobs if not view.users or job.user in view.users]
    labels = {device.uuid: device.label for device in scene.snapshot.devices}
    rows: list[list[Part]] = []
    for job in jobs[:_JOBS]:
        known = [labels[uuid] for uuid in job.devices if uuid in labels]
        gpus = f"GPU {','.join(known)}" if known else format_count(job.num_gpus, "GPU")
        since = public_since(job, scene.snapshot.taken_at)
        state = (f" {public_state(job)}", "yellow" if job.unattended else "")
        what = _(" {since}, {gpus}: {what}").format(since=since, gpus=gpus, what=neutralise(job.what))
        rows.append([(neutralise(job.full_id), "bold"), state, (what, "")])
    more = len(jobs) - len(rows)
    text = _("and {more} more: gpuguard jobs --all, or the key J").format(more=more) if more else ""
    return _titled(padded(_("JOB"), display_width(_("WAITS"))), rows, text, width)


def _titled(title: str, rows: Sequence[Sequence[Part]], more: str, width: int) -> list[ScreenLine]:
    """Return *rows* as lines, with *title* before the first, and then *more*, a text on what is left out, or ""."""
    indent = " " * display_width(title)
    lines = [_line([(f"{indent if number else title} ", "dim"), *row], width) for number, row in enumerate(rows)]
    return [*lines, *([_line([(f"{indent} {more}", "dim")], width)] if more else [])]


def _gaps(scene: Scene, width: int) -> list[ScreenLine]:
    gaps = gap_lines(scene.snapshot)
    shown = [_("not known: {gap}").format(gap=neutralise(translated(gap))) for gap in gaps[:_GAPS]]
    if len(gaps) > _GAPS:
        shown.append(_("and {gaps} more: gpuguard who").format(gaps=len(gaps) - _GAPS))
    return [_line([], width), *(_line([(text, "dim")], width) for text in shown)] if shown else []


def _line(parts: Sequence[Part], width: int) -> ScreenLine:
    return ScreenLine(tuple(fitted(parts, width)))


def painted(lines: Sequence[ScreenLine], paint: Paint) -> list[str]:
    """Return *lines* for a plain terminal, without blanks at their ends."""
    return [
        "".join(paint(part, style) if style and part.strip() else part for part, style in line.parts).rstrip()
        for line in lines
    ]
