"""Jobs that outlive the terminal, for people and for programs: `gpuguard jobs`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpuguard.batch.dispatchers import StalledJobs
from gpuguard.batch.job_records import JobRecord, JobStore, Source
from gpuguard.batch.public import PublicJob
from gpuguard.batch.states import ENDED, RUNNING, Jobs, TaskState
from gpuguard.locale import N_, _, translated
from gpuguard.model import ClaimRecord
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.tables import table
from gpuguard.units import NOT_AVAILABLE, format_count, format_duration, local_time
from gpuguard.users import user_name

DAY_SECONDS = 86400.0
MOST_ENDED = 20  # jobs that have ended and are listed
STATE_WORDS = {
    "waiting": N_("waiting"), "running": N_("running"), "unwatched": N_("unwatched"), "completed": N_("completed"),
    "failed": N_("failed"), "cancelled": N_("cancelled"), "skipped": N_("skipped"), "lost": N_("lost"),
}  # fmt: skip


def listed(jobs: Jobs, *, ended: bool = False) -> list[int]:
    """Return the ids of the jobs to list: those that wait or run, and the last that have ended."""
    open_ = [job for job, states in jobs.states.items() if any(state.state not in ENDED for state in states)]
    over = [job for job in jobs.states if job not in set(open_)]
    return sorted([*open_, *(over if ended else over[-MOST_ENDED:])])


def lines_of(
    jobs: Jobs,
    ids: Sequence[int],
    now: float,
    claims: Mapping[Source, Iterable[ClaimRecord]],
    *,
    tasks: bool = False,
    width: int | None = None,
) -> list[str]:
    """Return a table with a line for each job, or with *tasks* for each task; *claims* say who has the GPUs."""
    records = {stored.id: stored.record for stored in jobs.stored}
    taken = {source: _taken(held) for source, held in claims.items()}
    whys = {task: why or taken.get(records[task[0]].source) for task, why in _whys(jobs, now).items()}
    rows = []
    for job in ids:
        record, states = records[job], jobs.states[job]
        groups = [[state] for state in states] if tasks else [states]
        rows += [_row(record, group, whys, now, alone=len(states) == 1, by_task=tasks) for group in groups]
    if not rows:
        return [_("no jobs: `gpuguard submit -- CMD` starts one.")]
    heads = [_("JOB"), _("STATE"), _("GPUS"), _("SINCE"), _("TRY"), _("WHAT")]
    return table(rows, heads, align="><<><<", width=width)


def lines_of_all(jobs: Iterable[PublicJob], now: float, *, width: int | None = None) -> list[str]:
    """Return a table of the jobs of all users."""
    rows = []
    for job in jobs:
        what = f"{job.what}   ({_('no process of its user waits in the queue for it')})" if job.unattended else job.what
        cells = (job.full_id, public_state(job), str(job.num_gpus), public_since(job, now), what)
        rows.append([neutralise(cell) for cell in cells])
    if not rows:
        return [_("no job of `gpuguard submit` waits or runs.")]
    return table(rows, [_("JOB"), _("STATE"), _("GPUS"), _("SINCE"), _("WHAT")], align="<<><<", width=width)


def public_state(job: PublicJob) -> str:
    """Return the state of a job in words, such as "3 waiting"."""
    words = _(STATE_WORDS[job.state])
    return words if job.tasks == 1 else f"{job.tasks} {words}"


def public_since(job: PublicJob, now: float) -> str:
    """Return how long a job runs or waits, or since when, if that is long ago."""
    return NOT_AVAILABLE if job.since is None else _since(job.since, now)


def all_json(jobs: Iterable[PublicJob]) -> dict[str, Any]:
    """Return the object of `gpuguard jobs --all --json` that docs/json.md describes."""
    return {"schema": 1, "host": os.uname().nodename, "jobs": [public_json(job) for job in jobs]}


def public_json(job: PublicJob) -> dict[str, Any]:
    """Return a job of any user, as docs/json.md describes it."""
    return {
        "id": job.full_id,
        "user": job.user,
        "state": job.state,
        "num_tasks": job.tasks,
        "num_gpus": job.num_gpus,
        "devices": list(job.devices),
        "since_unix_seconds": job.since,
        "what": job.what,
        "unattended": job.unattended,
    }


def stalled_text(stalled: StalledJobs) -> str:
    """Return that the jobs of a user wait and that nothing starts them."""
    jobs, user = format_count(stalled.jobs, "job"), neutralise(user_name(stalled.uid))
    return _("{user}: {jobs} in the queue, and the process that would start them was killed.").format(
        user=user, jobs=jobs
    )


def stalled_advice() -> str:
    """Return what starts them."""
    return _("`gpuguard jobs` of that user starts it, and so does the next of the user's jobs that ends.")


def _whys(jobs: Jobs, now: float) -> dict[tuple[int, int], str | None]:
    """Return why each task that waits does so, or None if it is for GPUs."""
    return {(state.job, state.task): state.why for state in jobs.waiting(now)}


def _taken(claims: Iterable[ClaimRecord]) -> str | None:
    """Return that a job waits for GPUs and how many each user has, or None if none has any."""
    held: dict[str, set[str]] = {}
    for claim in claims:
        held.setdefault(claim.user, set()).update(claim.devices)
    most_first = sorted(held.items(), key=lambda user: -len(user[1]))
    who = ", ".join(_("{user} has {count}").format(user=user, count=len(devices)) for user, devices in most_first)
    return _("waits for GPUs: {who}").format(who=who) if who else None


def _row(
    record: JobRecord,
    states: Sequence[TaskState],
    whys: dict[tuple[int, int], str | None],
    now: float,
    *,
    alone: bool,
    by_task: bool,
) -> list[str]:
    name = f"{record.id}.{states[0].task}" if by_task and not alone else str(record.id)
    since = [state.started or record.submitted for state in states]
    gpus = ",".join(gpu for state in states if state.state in RUNNING for gpu in state.gpus) or "-"
    tries = max(state.attempt for state in states)
    what = neutral_command(record.command)
    if by_task and not alone:
        what = "  ".join(f"{name}={value}" for name, value in record.tasks[states[0].task].items()) or what
    waiting = [whys.get((state.job, state.task)) for state in states if state.state == "waiting"]
    why = waiting[0] if waiting else next((state.why for state in states if state.why), None)
    text = f"{neutralise(what)}   ({neutralise(translated(why))})" if why else neutralise(what)
    moment = min(since) if states[0].ended is None else max(state.ended or 0 for state in states)
    return [name, _state_text(states), gpus, _since(moment, now), str(tries) if tries else "-", text]


def _state_text(states: Sequence[TaskState]) -> str:
    counts = Counter(state.state for state in states)
    if len(counts) == 1:
        (state, count), *_more = counts.items()
        words = _(STATE_WORDS[state])
        return words if count == 1 else f"{count} {words}"
    done = counts["completed"]
    parts = [f"{count} {_(STATE_WORDS[state])}" for state, count in counts.items() if state != "completed"]
    return ", ".join([_("{done} of {total}").format(done=done, total=len(states)), *parts])


def _since(when: float, now: float) -> str:
    if now - when < DAY_SECONDS:
        return format_duration(round(max(0.0, now - when)))
    return local_time(when, "%m-%d %H:%M")


def details_of(jobs: Jobs, record: JobRecord, now: float) -> list[str]:
    """Return everything about one job."""
    whys = _whys(jobs, now)
    facts = [
        (_("job"), str(record.id)),
        (_("command"), neutral_command(record.command)),
        (_("directory"), record.working_directory),
        (_("submitted"), local_time(record.submitted, "%Y-%m-%d %H:%M:%S")),
        (_("GPUs"), str(record.gpus)),
        (_("note"), record.note or ""),
        (_("git"), record.git or ""),
        (_("only on"), translated(record.within_reason)),
        (_("after"), ", ".join(map(str, record.after))),
        (_("after success of"), ", ".join(map(str, record.after_ok))),
    ]
    rows = [[f"{name}:", neutralise(text)] for name, text in facts if text]
    rows += [
        [_("task {number}:").format(number=state.task), _details(state, whys, now)] for state in jobs.states[record.id]
    ]
    return table(rows)


def _details(state: TaskState, whys: Mapping[tuple[int, int], str | None], now: float) -> str:
    parts = [_(STATE_WORDS[state.state])]
    if state.attempt:
        parts.append(_("attempt {number}").format(number=state.attempt))
    if state.status is not None:
        parts.append(_("exit code {status}").format(status=state.status))
    if state.started:
        took = (state.ended or now) - state.started
        parts.append(_("for {time} on {gpus}").format(time=format_duration(took), gpus=",".join(state.gpus) or "-"))
    if why := state.why or whys.get((state.job, state.task)):
        parts.append(neutralise(translated(why)))
    return ", ".join(parts)


def json_of(store: JobStore, jobs: Jobs, ids: Collection[int], now: float) -> dict[str, Any]:
    """Return the object that docs/json.md describes; *store* knows where the logs lie."""
    whys = _whys(jobs, now)
    return {
        "schema": 1,
        "host": os.uname().nodename,
        "unread": list(jobs.unread),
        "jobs": [
            _job_json(store, stored.record, jobs.states[stored.id], whys) for stored in jobs.stored if stored.id in ids
        ],
    }


def _job_json(
    store: JobStore, record: JobRecord, states: Iterable[TaskState], whys: dict[tuple[int, int], str | None]
) -> dict[str, Any]:
    return {
        "id": str(record.id),
        "command": list(record.command),
        "working_directory": record.working_directory,
        "note": record.note,
        "git": record.git,
        "num_gpus": record.gpus,
        "submitted_unix_seconds": record.submitted,
        "held": record.held,
        "begin_unix_seconds": record.begin,
        "after": list(record.after),
        "after_ok": list(record.after_ok),
        "at_most": record.at_most,
        "tasks": [
            {
                "number": state.task,
                "values": record.tasks[state.task],
                "state": state.state,
                "attempt": state.attempt,
                "gpus": list(state.gpus),
                "claim": state.claim,
                "started_unix_seconds": state.started,
                "ended_unix_seconds": state.ended,
                "exit_code": state.status,
                "why": state.why or whys.get((state.job, state.task)),
                "log": store.log_path(record.id, state.task, state.attempt) if state.attempt else None,
            }
            for state in states
        ],
    }
