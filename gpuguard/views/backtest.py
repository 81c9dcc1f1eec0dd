"""The results of a backtest, for people and as JSON: which jobs would have been hit and when; and of unit tests.

This module does not judge: see gpuguard.backtest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from gpuguard.backtest.backtest import Backtest, PredictedEnd
from gpuguard.backtest.recordings import Recording
from gpuguard.backtest.unit_tests import Got, TestOutcome, Trial
from gpuguard.locale import _, translated
from gpuguard.policies.policy import NOTES
from gpuguard.sanitize import neutralise
from gpuguard.tables import table
from gpuguard.units import NOT_AVAILABLE, format_count, format_duration, local_time
from gpuguard.views.text import picked

HOUR = 3600


BlindSpots = Sequence[tuple[str, str, str]]  # see backtest.blind_spots


def backtest_lines(
    result: Backtest, recording: Recording, policies: Sequence[str], blind: BlindSpots = (), *, each: bool
) -> Iterator[str]:
    """Yield the text: what was looked at, what each policy did, and what that was worth; with *each*, every act."""
    jobs = recording.jobs()
    yield from _headline(result, recording, len(jobs))
    if each and result.acts:
        rows = []
        for act in result.acts:
            texts = (
                ", ".join(act.jobs) or _("GPU {device}").format(device=act.device),
                act.user or "",
                translated(act.why),
            )
            rows.append((clock_text(act.time, recording), act.policy, act.action, *map(neutralise, texts)))
        yield ""
        yield from table(rows, [_("AT"), _("POLICY"), _("ACTION"), _("JOB"), _("USER"), _("WHY")])
    yield ""
    yield from table(
        _summary(result, policies, {policy for policy, *_more in blind}),
        [_("POLICY"), _("ACTION"), _("TIMES"), _("JOBS"), _("USERS")],
        align="<<>>>",
    )
    for policy in policies:
        ended = [end for end in result.endings if end.policy == policy]
        if ended:
            yield ""
            yield from _worth(policy, ended, result, len(jobs))
    notes = [(kind, count, NOTES[kind]) for kind, count in sorted(result.notes.items())]
    reasons = [(kind, f"{count:,}", _(note.text)) for kind, count, note in notes if note.spares]
    if reasons:
        yield ""
        yield _("Left alone although the rule was met, in samples:")
        yield from table([(f"  {kind}", *rest) for kind, *rest in reasons], align="<><")
    if blind:
        yield ""
        yield _("The recording cannot judge these rules, so that they found nothing:")
        yield from table(
            [(f"  {policy}", rule, _("it does not tell {what}").format(what=_(what))) for policy, rule, what in blind]
        )
    if "memory" not in recording.columns or "utilization" not in recording.columns:
        yield ""
        yield _("The recording lacks memory or utilization: rules that need them found nothing.")


def _headline(result: Backtest, recording: Recording, jobs: int) -> Iterator[str]:
    """Yield the size of the recording, and its pauses."""
    span = recording.rows[-1].time - recording.start
    machines = format_count(len({row.host for row in recording.rows}), "machine")
    yield (
        _(
            "{rows:,} samples of {count} on {machines}, one per {interval}, over {span}; {held:,.1f} GPU-hours held."
        ).format(
            rows=len(recording.rows),
            count=format_count(jobs, "job"),
            machines=machines,
            interval=format_duration(recording.interval),
            span=format_duration(span),
            held=result.held / HOUR,
        )
    )
    if result.holes:
        yield (
            _(
                "{count} between samples longer than {longest_gap}: no time counts in them, and after more than ten "
                "minutes all durations start anew, as in the daemon (--longest-gap changes that)."
            ).format(count=format_count(result.holes, "pause"), longest_gap=format_duration(result.longest_gap))
        )


def _summary(result: Backtest, policies: Sequence[str], blind: Collection[str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for policy in policies:
        acts = [act for act in result.acts if act.policy == policy]
        for action in dict.fromkeys(act.action for act in acts):
            done = [act for act in acts if act.action == action]
            jobs = {(act.host, job) for act in done for job in act.jobs}
            users = {act.user for act in done if act.user}
            rows.append((policy, action, str(len(done)), str(len(jobs)), str(len(users))))
        if not acts:
            rows.append((policy, _("cannot be judged") if policy in blind else _("nothing"), "0", "0", "0"))
    return rows


def _worth(policy: str, ended: Sequence[PredictedEnd], result: Backtest, jobs: int) -> Iterator[str]:
    freed, lost = sum(end.freed for end in ended), sum(end.lost for end in ended)
    again = sum(end.lost > 0 for end in ended)
    yield _("{policy} ends {ended} of {count}:").format(
        policy=policy, ended=len(ended), count=format_count(jobs, "job")
    )
    yield _("  {freed:,.1f} idle GPU-hours become free ({share} of what was held);").format(
        freed=freed / HOUR, share=_share(freed, result.held)
    )
    yield (
        _(
            "  {again} of the {ended} worked again later ({share}), and {lost:,.1f} GPU-hours of their work "
            "would be lost."
        ).format(again=again, ended=len(ended), share=_share(again, len(ended)), lost=lost / HOUR)
    )


def backtest_json(
    result: Backtest, recording: Recording, path: str, policies: Sequence[str], blind: BlindSpots = ()
) -> dict[str, Any]:
    """Return the results as one object for programs."""
    return {
        "schema": 1,
        "path": path,
        "samples": len(recording.rows),
        "jobs": len(recording.jobs()),
        "hosts": len({row.host for row in recording.rows}),
        "interval_seconds": recording.interval,
        "longest_gap_seconds": result.longest_gap,
        "holes": result.holes,
        "held_gpu_seconds": result.held,
        "not_acted_samples": dict(sorted(result.notes.items())),
        "policies": [_policy_json(name, result) for name in policies],
        "not_judged": [{"policy": policy, "rule": rule, "does_not_tell": what} for policy, rule, what in blind],
        "acts": [
            {
                "time_seconds": act.time,
                "since_seconds": act.since,
                **picked(act, "host", "policy", "action", "jobs", "user", "device", "why"),
            }
            for act in result.acts
        ],
    }


def _policy_json(name: str, result: Backtest) -> dict[str, Any]:
    acts = [act for act in result.acts if act.policy == name]
    ended = [end for end in result.endings if end.policy == name]
    actions = dict.fromkeys(act.action for act in acts)
    return {
        "policy": name,
        "jobs_by_action": {
            action: len({(act.host, job) for act in acts if act.action == action for job in act.jobs})
            for action in actions
        },
        "ended_jobs": len(ended),
        "worked_again_jobs": sum(end.lost > 0 for end in ended),
        "freed_idle_gpu_seconds": sum(end.freed for end in ended),
        "lost_active_gpu_seconds": sum(end.lost for end in ended),
    }


def clock_text(moment: float, recording: Recording) -> str:
    """Return a time of the recording: a date if the recording has dates, else the time since its start."""
    if recording.dated:
        return local_time(moment, "%Y-%m-%d %H:%M:%S")
    return format_duration(moment)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else NOT_AVAILABLE


def trial_lines(trial: Trial) -> Iterator[str]:
    """Yield one line per test, and more for a failure."""
    for path, fault in trial.faults:
        yield from fault.lines(neutralise(path))
    path = neutralise(trial.path)
    if trial.faults:
        yield _("{path}: no test was run.").format(path=path)
        return
    for warning in trial.warnings:
        first, *rest = warning.lines(neutralise(trial.policies))
        yield _("warning: {first}").format(first=first)
        yield from rest
    for outcome in trial.outcomes:
        yield f"{_('ok    ') if outcome.passed else _('FAILED')}  {neutralise(outcome.name)}"
        if not outcome.passed:
            yield from (f"          {neutralise(line)}" for line in _differences(outcome))
    failed = sum(not outcome.passed for outcome in trial.outcomes)
    yield _("{path}: {tests}, {result}.").format(
        path=path,
        tests=format_count(len(trial.outcomes), "test"),
        result=_("{number} failed").format(number=failed) if failed else _("all passed"),
    )


def _differences(outcome: TestOutcome) -> Iterator[str]:
    for expected in outcome.missing:
        words = [_("at {at}: {action}").format(at=format_duration(expected.at), action=expected.action)]
        words += [_("by {policy}").format(policy=expected.policy)] if expected.policy else []
        words += [_("for {user}").format(user=expected.user)] if expected.user else []
        words += [_("on GPU {device}").format(device=expected.device)] if expected.device is not None else []
        yield _("expected  {words}").format(words=" ".join(words))
    for got in outcome.surplus:
        users = _(" for {users}").format(users=", ".join(got.users)) if got.users else ""
        where = _(" on GPU {device}").format(device=got.device) if got.device is not None else ""
        yield _("got       at {at}: {action} by {policy}{users}{where}, because {why}").format(
            at=format_duration(got.at),
            action=got.action,
            policy=got.policy,
            users=users,
            where=where,
            why=translated(got.why),
        )
    if outcome.missing and not outcome.surplus:
        met = ", ".join(
            _("{action} at {at}").format(action=got.action, at=format_duration(got.at)) for got in outcome.got
        )
        yield (
            _("got       nothing but what was expected: {met}").format(met=met)
            if met
            else _("got       nothing at all")
        )


def trial_json(trial: Trial) -> dict[str, Any]:
    """Return one object per file."""
    return {
        **picked(trial, "path", "policies"),
        "ok": not trial.faults and all(outcome.passed for outcome in trial.outcomes),
        "faults": [{"path": path, **vars(fault)} for path, fault in trial.faults],
        "warnings": [{"path": trial.policies, **vars(fault)} for fault in trial.warnings],
        "tests": [
            {
                **picked(outcome, "name", "passed"),
                "got": [_got_json(got) for got in outcome.got],
                "missing": [
                    {"at_seconds": expected.at, **picked(expected, "action", "policy", "user", "device")}
                    for expected in outcome.missing
                ],
                "surplus": [_got_json(got) for got in outcome.surplus],
            }
            for outcome in trial.outcomes
        ],
    }


def _got_json(got: Got) -> dict[str, Any]:
    return {"at_seconds": got.at, **picked(got, "action", "policy", "users", "device", "why")}
