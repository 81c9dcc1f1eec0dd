"""The limits on the guard itself at their edges: how many jobs it signals, what it repeats, what it may write down."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_process

from gpuguard.enforcement import guard_limits as limiting
from gpuguard.enforcement.guard_limits import (
    BETWEEN_ACTIONS,
    BURST_LINES,
    HOUR,
    JOBS_PER_HOUR,
    JOBS_PER_MINUTE,
    MOST_JOBS,
    REMEMBERED,
    REPORT_SECONDS,
    SECONDS_PER_LINE,
    ActionLimits,
    AuditQuota,
    FailedCheck,
    PastAction,
    RecoveredActions,
    facts_of,
    recover_actions,
)
from gpuguard.locale import translated
from gpuguard.model import Event, Finding, Subject, Verdict
from gpuguard.policies.engine import EFFECT_SECONDS
from gpuguard.policies.policy import KILL_AFTER

NOW = 10_000.0


def an_action(pid: int = 1, action: str = "terminate", *, ago: float = 0.0, gpu: int = 0, **fields: Any) -> PastAction:
    """An action on a process that is its own job, on a GPU of its own unless told otherwise."""
    facts: dict[str, Any] = {"process": (pid, 100.0), "devices": (f"gpu{gpu or pid}",), "live": True, "uid": pid}
    return PastAction(clock=NOW - ago, action=action, **{**facts, **fields})


def failed(action: PastAction, *past: PastAction, seen: bool = False, **fields: Any) -> list[tuple[str, str, Any]]:
    """What the limits have against *action* after *past*."""
    limits = ActionLimits(list(past), **fields)
    found = list(limits.failed(action, lambda done: seen))
    return [(check.check, translated(check.text), check.wait) for check in found]


def many(count: int, first: int = 10, **fields: Any) -> list[PastAction]:
    return [an_action(pid, **fields) for pid in range(first, first + count)]


RATE = "rate", f"{JOBS_PER_MINUTE} jobs signalled in one minute are the most"
VICTIMS = f"{JOBS_PER_HOUR} jobs ended in one hour are the most"
OWN = f"{VICTIMS}, and the 5 that are left are for other users: of this one 5 were ended"
LAST = OWN.replace("the 5 that", "the 1 that").replace("one 5 were", "one 1 were")
FIRST = "one per device", "pid 2 on this GPU comes first"
UNSEEN = "one per device", "the effect on pid 2 on this GPU is not seen yet"
BUSY = an_action(1, gpu=7)

CASES: dict[str, tuple[PastAction, list[PastAction], list[tuple[str, str, float | None]]]] = {
    "nothing before": (an_action(), [], []),
    "fewer in this minute": (an_action(), many(JOBS_PER_MINUTE - 1, ago=59.0), []),
    "many in this minute": (an_action(), many(JOBS_PER_MINUTE, ago=59.0), [(*RATE, 1.0)]),
    "many at this moment": (an_action(), many(JOBS_PER_MINUTE), [(*RATE, 60.0)]),
    "many a minute ago": (an_action(), many(JOBS_PER_MINUTE, ago=60.0), []),
    "the rate of the newest": (
        an_action(), [an_action(9, ago=50.0), *many(JOBS_PER_MINUTE, ago=20.0)], [(*RATE, 40.0)]
    ),
    "of a job that has begun": (
        an_action(10, "warn", ago=0.0), many(JOBS_PER_MINUTE, ago=20.0), []
    ),
    "of a dry run": (an_action(live=False), many(JOBS_PER_MINUTE, ago=59.0), []),
    "of the future": (an_action(), many(JOBS_PER_MINUTE, ago=-1.0), []),
    "ended in this hour": (
        an_action(), many(JOBS_PER_HOUR, ago=HOUR - 1.0), [("victims", VICTIMS, 1.0)]
    ),
    "ended an hour ago": (an_action(), many(JOBS_PER_HOUR, ago=HOUR), []),
    "the oldest counts": (
        an_action(), [*many(JOBS_PER_HOUR - 1, ago=100.0), an_action(9, ago=HOUR - 7.0)], [("victims", VICTIMS, 7.0)]
    ),
    "not ended": (an_action(), many(JOBS_PER_HOUR, ago=600.0, action="renice"), []),
    "it is not to end": (an_action(action="pause"), many(JOBS_PER_HOUR, ago=600.0), []),
    "half of the hour": (
        an_action(), many(JOBS_PER_HOUR // 2, ago=600.0, uid=1), [("victims", OWN, HOUR - 600.0)]
    ),
    "less than half of the hour": (an_action(), many(JOBS_PER_HOUR // 2 - 1, ago=600.0, uid=1), []),
    "the last of the hour": (
        an_action(),
        [*many(JOBS_PER_HOUR - 2, ago=600.0, uid=2), an_action(9, ago=600.0, uid=1)],
        [("victims", LAST, HOUR - 600.0)],
    ),
    "a job by its first signal": (
        an_action(),
        [an_action(10, "renice", ago=50.0), an_action(10, ago=30.0), *many(2, first=11, ago=20.0)],
        [(*RATE, 10.0)],
    ),
    "a neighbour in the hour": (an_action(), many(JOBS_PER_HOUR // 2, ago=600.0, uid=2), []),
    "a neighbour just now": (BUSY, [an_action(2, gpu=7, ago=14.0)], [(*FIRST, 1.0)]),
    "a neighbour's effect": (
        BUSY, [an_action(2, devices=("gpu7", "gpu8"), ago=BETWEEN_ACTIONS)], [(*UNSEEN, 35.0)]
    ),
    "a neighbour's last effect": (BUSY, [an_action(2, gpu=7, ago=EFFECT_SECONDS - 1.0)], [(*UNSEEN, 1.0)]),
    "a neighbour long ago": (BUSY, [an_action(2, gpu=7, ago=EFFECT_SECONDS)], []),
    "elsewhere, then here": (
        BUSY, [an_action(3, ago=1.0), an_action(2, gpu=7, ago=1.0)], [(*FIRST, 14.0)]
    ),
    "one of its own job": (
        an_action(1, gpu=7, job="j"), [an_action(2, gpu=7, job="j", ago=1.0)], []
    ),
    "only warned": (BUSY, [an_action(2, "warn", gpu=7, ago=1.0)], []),
    "warned again": (
        an_action(1, "warn"), [an_action(1, "warn", ago=14.0)], [("repetition", "warn was done 14s ago", 1.0)]
    ),
    "warned before": (an_action(1, "warn"), [an_action(1, "warn", ago=BETWEEN_ACTIONS)], []),
    "warned twice": (
        an_action(1, "warn"),
        [an_action(1, "warn", ago=3.0), an_action(1, "warn", ago=100.0)],
        [("repetition", "warn was done 3s ago", 12.0)],
    ),
    "another was warned": (an_action(1, "warn"), [an_action(2, "warn", ago=3.0)], []),
    "another step before": (an_action(), [an_action(1, "checkpoint", ago=3.0)], []),
    "never asked": (
        an_action(1, "kill"), [], [("escalation", "it was not asked to end first: put terminate before kill", None)]
    ),
    "killed before": (
        an_action(1, "kill", process=(1, 100.0)),
        [an_action(1, "kill", ago=100.0)],
        [
            ("escalation", "it was not asked to end first: put terminate before kill", None),
            ("unkillable", "it was killed before: no further signal can help", None),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("action", "past", "expected"), CASES.values(), ids=CASES)
def test_what_was_done_lately_limits_what_may_be_done_now(action, past, expected):
    assert failed(action, *past) == expected


def test_an_effect_that_is_seen_frees_the_device_but_not_at_once():
    assert failed(BUSY, an_action(2, gpu=7, ago=BETWEEN_ACTIONS), seen=True) == []
    assert failed(BUSY, an_action(2, gpu=7, ago=14.0), seen=True) == [(*FIRST, 1.0)]
    asked = []
    past = [an_action(2, gpu=7, ago=20.0), an_action(3, ago=20.0)]
    assert list(ActionLimits(past).failed(BUSY, lambda done: bool(asked.append(done) or True))) == []
    assert asked == past[:1]


def test_a_process_is_killed_half_a_minute_after_it_was_first_asked_to_end():
    limits = ActionLimits()
    limits.record(an_action(1, ago=KILL_AFTER + 5.0))
    limits.record(an_action(1, ago=KILL_AFTER - 1.0))
    limits.record(an_action(1, ago=3.0, live=False))

    def against(**fields: Any) -> list[FailedCheck]:
        return list(limits.failed(an_action(1, "kill", **fields), lambda done: True))

    assert against() == []
    [check] = against(live=False)
    assert (check.check, translated(check.text), check.wait) == (
        "escalation", "it was asked to end 3s ago, and has 30s to do it", KILL_AFTER - 3.0
    )  # fmt: skip
    assert against(ago=5.0) == []
    assert [check.wait for check in against(ago=5.5)] == [0.5]


def test_a_process_that_outlived_sigkill_gets_no_signal():
    stuck = {(1, 100.0): an_action(1, "kill", ago=100.0)}

    assert failed(an_action(), unkillable=stuck) == [
        ("unkillable", "it outlived SIGKILL: no further signal can help", None)
    ]
    assert failed(an_action(2), unkillable=stuck) == []


LOOP = "restart loop", "the same program was ended 2 times within the hour, and was started again each time", None


def run(pid: int, start: float, end: float | None = None, **fields: Any) -> PastAction:
    """One of the same program that ran from *start* to *end*."""
    ago = 0.0 if end is None else NOW - end
    return an_action(pid, process=(pid, start), ago=ago, **{"signature": "same", **fields})


@pytest.mark.parametrize(
    ("runs", "loops"),
    [
        ([run(2, 1000.0, 8000.0), run(3, 8000.0, 9000.0), run(4, 9000.0)], True),
        ([run(2, 1000.0, 8000.0), run(3, 8000.0, 9000.0), run(4, 8999.0)], False),  # it ran beside the last one
        ([run(2, 1000.0, 8000.0), run(3, 7999.0, 9000.0), run(4, 9000.0)], False),  # two at the same time
        ([run(2, 8000.0, 9000.0), run(3, 1000.0, 8000.0), run(4, 9000.0)], True),  # in whatever order
        ([run(0, -7.0, 8000.0), run(0, -3.0, 8000.0), run(4, 9000.0)], True),  # of another boot
        ([run(2, 1000.0, 8000.0), run(3, 0.0, 9000.0), run(4, 9000.0)], False),
        ([run(2, 1000.0, 8000.0), run(3, 8000.0, 9000.0, signature="other"), run(4, 9000.0)], False),
        (
            [run(2, 1000.0, 8000.0, signature=""), run(3, 8000.0, 9000.0, signature=""), run(4, 9000.0, signature="")],
            False,
        ),
        ([run(4, 500.0, 8000.0), run(4, 500.0, 8500.0), run(4, 500.0)], False),  # the same process
        # Of one that was signalled twice, the last time is its end.
        ([run(2, 1000.0, 8000.0), run(2, 1000.0, 8500.0), run(3, 8200.0, 9000.0), run(4, 9000.0)], False),
        ([run(2, 1000.0, 8500.0), run(2, 1000.0, 8000.0), run(3, 8200.0, 9000.0), run(4, 9000.0)], False),
        ([run(2, 1000.0, 8000.0), run(3, 8000.0, 9000.0), run(4, 9000.0, action="warn")], False),
    ],
)
def test_a_program_that_is_started_again_each_time_is_not_ended_for_ever(runs, loops):
    *past, action = runs
    assert failed(action, *past) == ([LOOP] if loops else [])


def a_verdict(finding: Finding) -> Verdict:
    return Verdict(policy="p", finding=finding, action="warn", step=0, since=NOW)


def test_the_user_who_was_spared_longest_comes_first_and_then_the_most_memory():
    def priority(*processes: Any, uid: int | None = None, past: Any = ()) -> tuple[int, int]:
        finding = Finding("memory", Subject("device", uid=uid), "", processes)
        return ActionLimits(list(past)).priority(a_verdict(finding))

    mine, unknown = a_process(1, uid=7, memory_used=5), a_process(2, uid=8, memory_used=None)
    past = [an_action(1, uid=7), an_action(2, uid=8), an_action(3, uid=9), an_action(4, uid=None)]
    assert priority(mine, unknown, past=past) == (2, -5)
    assert priority(mine, uid=9, past=past) == (2, -5)
    assert priority(uid=9, past=past) == (1, 0), "a claim without a process"
    assert priority(mine, mine) == (0, -10)


def test_an_action_is_remembered_for_an_hour():
    limits = ActionLimits()
    old, older = an_action(1, ago=HOUR - 1.0), an_action(2, ago=HOUR)
    limits.past = [old, older]
    limits.record(new := an_action(3))

    assert limits.past == [old, new]


def test_a_verdict_is_done_for_a_process_and_a_refusal_is_worth_one_line():
    limits = ActionLimits()
    verdict, like_it = (a_verdict(Finding("memory", Subject("device"), "")) for _ in range(2))
    limits.record(done := an_action(1), verdict)
    assert limits.is_done(verdict, done.process)
    assert not limits.is_done(verdict, (1, 101.0)) and not limits.is_done(like_it, done.process)

    why = [limits.refused_anew("key", why) for why in ("a", "a", "b", "a")]
    assert why == [True, False, True, True] and limits.refused_anew("other", "a")
    assert [limits.first_wanted("key", clock) for clock in (5.0, 6.0)] == [5.0, 5.0]
    assert limits.first_wanted("other", 7.0) == 7.0


def test_a_memory_that_has_grown_too_long_forgets_its_older_half():
    limits = ActionLimits()
    for key in range(REMEMBERED):
        limits.first_wanted(key, 0.0)
    assert limits.first_wanted(0, 1.0) == 0.0
    limits.first_wanted(REMEMBERED, 0.0)
    assert limits.first_wanted(0, 1.0) == 1.0 and limits.first_wanted(REMEMBERED // 2, 1.0) == 0.0
    assert limits.first_wanted(REMEMBERED // 2 - 1, 1.0) == 1.0
    assert all(limits.refused_anew(key, "why") for key in range(REMEMBERED + 1))
    assert limits.refused_anew(0, "why") and not limits.refused_anew(REMEMBERED, "why")


# What comes back from the log.

BOOT = "0123abcd"
UNIX = 1_700_000_000.0


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limiting, "boot_id", lambda: BOOT)
    return tmp_path / "events.jsonl"


def a_line(ago: float = 0.0, *, time_ago: float | None = None, outcome: str = "about to", **more: Any) -> bytes:
    """Of an action on the clock of this boot so long ago, and by the time of day *time_ago*."""
    facts = {"clock_seconds": NOW - ago, "boot": BOOT, "start_time_seconds": 100.5, **more.pop("facts", {})}
    event = {"schema": 1, "time_unix_seconds": UNIX - (ago if time_ago is None else time_ago), "kind": "terminate"}
    line = {**event, "outcome": outcome, "devices": ["gpu0"], "pid": 17, **more, "facts": facts}
    return json.dumps(line).encode() + b"\n"


def recovered(log: Path, *lines: bytes) -> RecoveredActions:
    log.write_bytes(b"".join(lines))
    return recover_actions(str(log), NOW, UNIX)


def feared(*numbers: int) -> tuple[PastAction, ...]:
    return tuple(PastAction(NOW, "terminate", (0, -float(n)), (), live) for n in numbers for live in (True, False))


def damaged(count: int) -> str:
    return f"damaged lines in the audit log: {count}; each counts as a process that was ended just now"


FACTS = {"signature": "s", "policy": "p", "uid": 1001, "job": "j", "launch": "l"}
WHOLE = PastAction(NOW - 5.0, "terminate", (17, 100.5), ("gpu0",), True, "s", policy="p", uid=1001, job="j", launch="l")
BARE = PastAction(NOW - 5.0, "terminate", (17, 100.5), ("gpu0",), True)


def bare(clock: float, process: tuple[int, float] = (17, 100.5), **fields: Any) -> PastAction:
    return PastAction(clock, "terminate", process, ("gpu0",), **{"live": True, **fields})


RECOVERED: dict[str, tuple[list[bytes], tuple[PastAction, ...], int]] = {
    "nothing": ([], (), 0),
    "an action": ([a_line(5.0, facts=FACTS)], (WHOLE,), 0),
    "one without further facts": ([a_line(5.0)], (BARE,), 0),
    "a dry run": ([a_line(5.0, outcome="dry run")], (bare(NOW - 5.0, live=False),), 0),
    "one of the future": ([a_line(-5.0)], (bare(NOW),), 0),
    "the oldest first": ([a_line(5.0), a_line(9.0)], (bare(NOW - 9.0), bare(NOW - 5.0)), 0),
    "another boot": ([a_line(9.0, time_ago=6.0, facts={"boot": "other"})], (bare(NOW - 6.0, (0, 9.0 - NOW)),), 0),
    "another boot, in the future": (
        [a_line(9.0, time_ago=-6.0, facts={"boot": "other"})], (bare(NOW, (0, 9.0 - NOW)),), 0
    ),
    "no process": ([a_line(5.0, pid=None, facts={"start_time_seconds": None})], (bare(NOW - 5.0, (0, 0.0)),), 0),
    "just an hour ago": ([a_line(HOUR)], (bare(NOW - HOUR),), 0),
    "more than an hour ago": ([a_line(HOUR + 1.0)], (), 0),
    "an hour ago by another clock": ([a_line(HOUR - 1.0, time_ago=HOUR + 9.0)], (bare(NOW - HOUR + 1.0),), 0),
    "of which both clocks say an hour": ([a_line(HOUR, time_ago=HOUR + 9.0)], (), 0),
    "another boot an hour ago": ([a_line(5.0, time_ago=HOUR + 9.0, facts={"boot": "other"})], (), 0),
    "what came before an old line": (
        [a_line(5.0), a_line(1.0, time_ago=1.0, facts={"boot": "other"}), b"torn\n", a_line(HOUR + 1.0)],
        (BARE,),
        0,
    ),
    "one of no process, before an old line": (
        [a_line(5.0, pid=None, facts={"start_time_seconds": None}), a_line(HOUR + 1.0)], (bare(NOW - 5.0, (0, 0.0)),), 0
    ),
    "one on no device": ([a_line(5.0).replace(b'"devices": ["gpu0"], ', b"")], (replace(BARE, devices=()),), 0),
    "a line that was cut": ([a_line(5.0)[:60]], feared(1), 1),
    "a line that is torn": ([a_line(5.0), a_line(5.0)[:-2]], (BARE, *feared(1)), 1),
    "lines that say nothing": ([b"torn\n", b"torn\n", a_line(5.0)], (BARE, *feared(1, 2)), 2),
    "an action that cannot be": (
        [a_line(5.0, outcome="unknown"), a_line(5.0, outcome="other")], feared(1, 2), 2
    ),
    "another event": ([a_line(5.0).replace(b'"clock_seconds"', b'"other_seconds"')], (), 0),
    "more than may be": ([b"torn\n"] * (MOST_JOBS + 1), feared(*range(1, MOST_JOBS + 1)), MOST_JOBS + 1),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "actions", "torn"), RECOVERED.values(), ids=RECOVERED)
def test_the_actions_of_the_last_hour_come_back_from_the_log(log, lines, actions, torn):
    found = recovered(log, *lines)

    assert (found.actions, found.problem and translated(found.problem)) == (actions, damaged(torn) if torn else None)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), OSError("Input/output error")])
def test_a_log_that_cannot_be_read_counts_as_many_actions(log, monkeypatch, error):
    def refused(path: str) -> Any:
        raise error

    monkeypatch.setattr(limiting, "read_log", refused)
    found = recover_actions(str(log), NOW, UNIX)

    assert found.actions == feared(*range(1, MOST_JOBS + 1))
    assert translated(found.problem) == (
        "the audit log cannot be read (Input/output error), so what was done in the last hour is unknown"
    )


def test_where_the_boot_is_unknown_no_process_is_one_of_this_boot(log, monkeypatch):
    monkeypatch.setattr(limiting, "boot_id", lambda: "")

    assert recovered(log, a_line(5.0, facts={"boot": ""})).actions == (bare(NOW - 5.0, (0, 5.0 - NOW)),)


def test_the_line_of_an_action_has_what_brings_it_back(log):
    assert facts_of(WHOLE) == {
        "signature": "s", "job": "j", "launch": "l", "clock_seconds": NOW - 5.0, "boot": BOOT
    }  # fmt: skip
    assert facts_of(BARE) == {
        "signature": None, "job": None, "launch": None, "clock_seconds": NOW - 5.0, "boot": BOOT
    }  # fmt: skip


# What is written down.


def an_event(user: str | None = "alice", **fields: Any) -> Event:
    return Event(**{"time": 0.0, "kind": "warn", "outcome": "refused", "user": user, "pid": 17, **fields})


def spent(user: str | None = "alice") -> AuditQuota:
    """Of a user who may have no further line now."""
    quota = AuditQuota()
    assert all(quota.admits(an_event(user), NOW) for _ in range(BURST_LINES))
    return quota


def test_a_user_may_fill_the_log_so_far_and_then_with_a_line_now_and_then():
    quota = spent()
    assert not quota.admits(an_event(facts=(("policy", "p"),)), NOW)
    assert quota.admits(an_event("bob"), NOW)
    assert not quota.admits(an_event(), NOW + SECONDS_PER_LINE - 1.0)
    assert quota.admits(an_event(), NOW + SECONDS_PER_LINE)
    assert not quota.admits(an_event(), NOW + SECONDS_PER_LINE)


def test_time_without_lines_is_not_saved_up_beyond_the_first_burst():
    quota = spent()
    later = NOW + BURST_LINES * SECONDS_PER_LINE * 3
    assert [quota.admits(an_event(), later) for _ in range(BURST_LINES + 1)] == [True] * BURST_LINES + [False]


@pytest.mark.parametrize(
    "event",
    [
        an_event(facts=(("policy", "p"), ("clock_seconds", 5.0))),
        an_event(kind="resume"),
        an_event(outcome="about to"),
        an_event(outcome="unkillable"),
        an_event(None, pid=None),
    ],
    ids=["an action", "the end of a pause", "an announcement", "an unkillable process", "the machine"],
)
def test_what_was_done_is_written_down_whatever_came_before(event):
    assert spent().admits(event, NOW) and spent(None).admits(event, NOW)


def test_the_outcome_of_what_was_announced_is_written_down_and_of_nothing_else():
    quota = spent()
    announced = {"kind": "kill", "claim": "c", "devices": ("gpu0",)}
    quota.admits(an_event(outcome="about to", **announced), NOW)

    assert quota.admits(an_event(outcome="failed", **announced), NOW)
    for other in ({"kind": "warn"}, {"pid": 18}, {"claim": "d"}, {"devices": ("gpu1",)}):
        assert not quota.admits(an_event(outcome="failed", **{**announced, **other}), NOW)


def test_users_without_a_name_count_as_one_and_a_claim_is_about_a_user():
    quota = spent("20001")

    assert not quota.admits(an_event("20002"), NOW) and not quota.admits(an_event(None), NOW)
    assert not quota.admits(an_event(None, pid=None, claim="c"), NOW)


def test_once_a_minute_it_is_written_down_how_many_lines_were_left_out(monkeypatch):
    monkeypatch.setattr(limiting.time, "time", lambda: UNIX)
    quota = spent()
    for event in (an_event(), an_event(kind="note", outcome="cleared"), an_event(), an_event(outcome="failed")):
        quota.admits(event, NOW + 1.0)
    for _ in range(BURST_LINES + 1):
        quota.admits(an_event("20001"), NOW + 2.0)

    assert list(quota.left_out(NOW + 1.0 + REPORT_SECONDS - 0.5)) == []
    [alice] = quota.left_out(NOW + 1.0 + REPORT_SECONDS)
    assert (alice.time, alice.kind, alice.outcome, alice.user) == (UNIX, "note", "left out", "alice")
    assert translated(alice.message) == (
        "4 lines about the same user within 60s, more than one in 10s: warn 3, cleared 1"
    )
    assert alice.facts == (("lines", 4),)
    [nameless] = quota.left_out(NOW + 2.0 + REPORT_SECONDS)
    assert nameless.user is None
    assert translated(nameless.message) == (
        "1 lines about users without a name within 60s, more than one in 10s: warn 1"
    )
    assert list(quota.left_out(NOW + 1000.0)) == []


def test_what_a_user_has_had_is_forgotten_when_it_counts_no_more():
    quota = AuditQuota()
    quota.admits(an_event(), NOW)
    assert list(quota.left_out(NOW + SECONDS_PER_LINE)) == []

    assert quota._spent == {}
