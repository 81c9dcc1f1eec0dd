"""A recording of `gpuguard record` as samples that policies can be judged on, beside the tables of series_file.

Nothing is made up: the rules see the snapshot, the claims and the people that were recorded.  Does not judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

from gpuguard.errors import InvalidRequest
from gpuguard.model import Device, GpuProcess
from gpuguard.policies.sight import Identity
from gpuguard.policies.view import View
from gpuguard.rehearsals.series_file import Look, Recording, Row, read_recording
from gpuguard.rehearsals.tape import is_tape, views

_COLUMNS = frozenset(  # as series_file calls them
    {"time", "job", "host", "device", "user", "groups", "kind", "utilization", "memory", "temperature", "power"}
)


def read_any(path: str) -> Recording:
    """A recording, or a table in CSV.

    Raises:
        InvalidRequest: it is a table that cannot be understood, or has fewer than two samples.
        BackendError: it is a recording that cannot be read.
    """
    return _read(path) if is_tape(path) else read_recording(path)


def _read(path: str) -> Recording:
    rows: list[Row] = []
    times: list[float] = []
    people: dict[str, int] = {}
    for view in views(path):
        times.append(view.snapshot.taken_at)
        for device in view.snapshot.devices:
            for process in device.processes or ():
                rows.append(_row(view, device, process))
                if process.user is not None and process.uid is not None:
                    people.setdefault(process.user, process.uid)
        for claim in view.snapshot.claims:
            if claim.uid >= 0:
                people.setdefault(claim.user, claim.uid)
    distances = [later - earlier for earlier, later in pairwise(times) if later > earlier]
    if not distances:
        raise InvalidRequest(f"{path} has fewer than two samples: there is nothing to judge.")
    if not rows:  # an idle machine: a row of nobody, so that it has a beginning and an end
        rows = [Row(time, "", "", "", "") for time in (times[0], times[-1])]
    return Recording(tuple(rows), median(distances), _COLUMNS, people, lambda: _looks(path))


def _looks(path: str) -> Iterator[tuple[str, Iterator[Look]]]:
    hosts = list(dict.fromkeys(view.snapshot.host for view in views(path)))
    for host in hosts:
        yield host, (_look(view) for view in views(path) if view.snapshot.host == host)


def _look(view: View) -> Look:
    jobs: dict[Identity, str] = {}
    for device in view.snapshot.devices:
        for process in device.processes or ():
            if process.start_time is not None:
                jobs[process.pid, process.start_time] = _name(process)
    return Look(view.snapshot.host, view.snapshot.taken_at, view, jobs)


def _row(view: View, device: Device, process: GpuProcess) -> Row:
    return Row(
        view.snapshot.taken_at,
        _name(process),
        view.snapshot.host,
        device.uuid,
        process.user or "unknown",
        utilization=device.utilization if process.utilization is None else process.utilization,
        memory=process.memory_used,
        temperature=device.temperature,
        power=device.power_draw,
    )


def _name(process: GpuProcess) -> str:
    """A name for people that no other process of the recording has."""
    program = (process.command or ("process",))[0].rpartition("/")[2] or "process"
    started = "" if process.start_time is None else f"@{process.start_time:.2f}"
    return f"{program} {process.pid}{started}"
