"""Several rules in one condition."""

from typing import Any

import pytest
from builders import a_claim_record, a_device, a_process, a_uuid
from ladders import Finds, Watch, a_policy, busy

from gpuguard.model import Finding, Subject

ALICE, BOB = 1001, 1002
FIRST, SECOND = a_process(1, uid=ALICE), a_process(2, uid=BOB, user="bob")
ELSEWHERE = a_process(3, uid=ALICE)
MACHINE = (a_device(0, processes=(FIRST, SECOND)), a_device(1, processes=(ELSEWHERE,)), a_device(2))
CLAIMS = (a_claim_record(a_uuid(1), id="c", uid=ALICE),)


def process(each: Any, place: int, claim: str | None = None) -> Finding:
    subject = Subject("process", a_uuid(place), each.pid, each.start_time, each.uid, claim)
    return Finding("x", subject, "process", (each,))


def anywhere(each: Any) -> Finding:
    """A process of which it is not said on which GPU."""
    return Finding("x", Subject("process", None, each.pid, each.start_time, each.uid), "process", (each,))


def device(place: int, *processes: Any, uid: int | None = None) -> Finding:
    return Finding("x", Subject("device", a_uuid(place), uid=uid), "device", processes)


def user(uid: int, *processes: Any) -> Finding:
    return Finding("x", Subject("user", uid=uid), "user", processes)


def claim(identity: str = "c", uid: int = ALICE) -> Finding:
    return Finding("x", Subject("claim", uid=uid, claim=identity), "claim")


NODE = Finding("x", Subject("node"), "node")


def finds(side: list[Finding]) -> Finds:
    return Finds(lambda view: side)


def finds_at(sides: dict[int, list[Finding]]) -> Finds:
    return Finds(lambda view: sides[int(view.clock - 10_000)])


def joined(*sides: list[Finding], join: str = "all") -> list[tuple[Any, ...]]:
    """(kind, device, pid, uid, claim, pids that are meant) of what comes out."""
    rules = tuple(finds(side) for side in sides)
    watch = Watch(a_policy("warn", rules=rules, join=join, hold=10))
    watch.sees(busy(0, *MACHINE, claims=CLAIMS))
    out = []
    for verdict in watch.sees(busy(10, *MACHINE, claims=CLAIMS)).verdicts:
        subject, meant = verdict.finding.subject, sorted(each.pid for each in verdict.finding.processes)
        place = int(subject.device[4:12], 16) if subject.device else None
        out.append((subject.kind, place, subject.pid, subject.uid, subject.claim, meant))
    return out


FIRST_ON_0 = ("process", 0, 1, ALICE, None, [1])


@pytest.mark.parametrize(
    ("left", "right", "outcome"),
    [
        ([process(FIRST, 0), process(SECOND, 0)], [process(FIRST, 0)], [FIRST_ON_0]),
        ([process(FIRST, 0)], [process(SECOND, 0)], []),
        ([process(FIRST, 0), process(ELSEWHERE, 1)], [device(0)], [FIRST_ON_0]),
        ([process(FIRST, 0)], [device(0, SECOND)], []),
        ([process(a_process(9, uid=ALICE), 0)], [device(0)], []),  # which has ended
        ([process(FIRST, 0), process(SECOND, 0)], [user(ALICE)], [FIRST_ON_0]),
        ([process(ELSEWHERE, 1), process(FIRST, 0)], [claim()], [("process", 1, 3, ALICE, "c", [3])]),
        ([device(0)], [device(0, FIRST)], [("device", 0, None, None, None, [1])]),
        ([device(0)], [device(1)], []),
        ([device(0, FIRST)], [device(0, SECOND)], []),
        ([device(0), device(1)], [claim()], [("claim", 1, None, ALICE, "c", [])]),
        ([device(0), device(2)], [user(ALICE, FIRST, ELSEWHERE)], [("device", 0, None, ALICE, None, [1])]),
        ([device(0)], [user(BOB)], [("device", 0, None, BOB, None, [])]),
        ([device(2)], [user(BOB)], []),
        ([device(1)], [user(ALICE)], [("device", 1, None, ALICE, None, [])]),
        ([device(0)], [user(4711)], []),  # who is not on this machine
        ([anywhere(ELSEWHERE)], [device(1)], [("process", 1, 3, ALICE, None, [3])]),
        ([anywhere(ELSEWHERE)], [device(0)], []),
        ([anywhere(ELSEWHERE)], [NODE], [("process", None, 3, ALICE, None, [3])]),
        ([device(0)], [device(1), device(0), NODE], [("device", 0, None, None, None, [])]),
        ([user(ALICE)], [user(BOB)], []),
        ([user(ALICE)], [claim()], [("claim", None, None, ALICE, "c", [])]),
        ([user(ALICE)], [claim("gone")], []),
        ([device(0)], [claim("gone")], []),
        ([process(FIRST, 0)], [NODE], [FIRST_ON_0]),
        ([NODE], [NODE], [("node", None, None, None, None, [])]),
        ([process(FIRST, 0)], [], []),
    ],
)
def test_all_rules_meet_on_what_their_subjects_share(left, right, outcome):
    assert joined(left, right) == outcome
    assert joined(right, left) == outcome


@pytest.mark.parametrize("other", [user(ALICE), device(0)])
def test_a_claim_that_has_ended_meets_nothing_and_no_line_is_written_about_it(other):
    rules = finds([claim("gone")]), finds([other])

    judged = Watch(a_policy("warn", rules=rules)).sees(busy(0, *MACHINE, claims=CLAIMS))

    assert not judged.notes


def test_three_rules_meet_too():
    sides = [process(FIRST, 0), process(ELSEWHERE, 1)], [device(0)], [user(ALICE)]

    assert joined(*sides) == joined(*reversed(sides)) == [FIRST_ON_0]


def test_any_rule_is_enough():
    outcome = joined([process(FIRST, 0)], [process(FIRST, 0), user(BOB)], join="any")

    assert outcome == [FIRST_ON_0, ("user", None, None, BOB, None, [])]


def test_the_whole_condition_must_hold_for_the_time_not_each_part():
    flips = {clock: [process(FIRST, 0)] if clock % 20 else [] for clock in range(0, 200, 10)}
    flops = {clock: [] if clock % 20 else [process(FIRST, 0)] for clock in flips}
    rules = finds_at(flips), finds_at(flops)

    def fires(join: str) -> bool:
        watch = Watch(a_policy("warn", rules=rules, join=join, hold=30))
        return any(watch.sees(busy(clock, *MACHINE)).verdicts for clock in flips)

    assert (fires("any"), fires("all")) == (True, False)


def test_every_rule_is_asked_at_every_sample():
    asked = []

    def ask(view):
        asked.append(view.clock)
        return []

    Watch(a_policy("warn", rules=(finds([]), Finds(ask)), hours=(0.0, 1.0))).until(50, *MACHINE)

    assert len(asked) == 6
