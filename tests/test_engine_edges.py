"""The engine at its edges: the hour without a zone, a rhythm of fractions, what is recorded, noted and comes next."""

from __future__ import annotations

from collections.abc import Iterator

from builders import a_device
from ladders import START, Watch, a_policy, actions, busy, kinds

from gpuguard.model import Finding, Subject
from gpuguard.policies.engine import _note_order, evaluate, still_holds
from gpuguard.policies.escalation import EngineMemory
from gpuguard.policies.policy import Note
from gpuguard.policies.view import RuleView

HOUR = 3600.0
MIDNIGHT = 1_699_920_000.0  # of 2023-11-14, UTC


def test_without_a_zone_hours_are_those_of_utc_to_the_second():
    policy = a_policy("warn", hours=(12 * HOUR, 13 * HOUR), hold=0)
    noted = []
    for second in (12 * HOUR - 1, 12 * HOUR, 13 * HOUR - 1, 13 * HOUR):
        sample = busy(0, taken_at=MIDNIGHT + second)
        noted.append((kinds(evaluate(sample, (policy,), EngineMemory())), holds(policy, sample)))

    assert noted == [({"hours"}, False), (set(), True), (set(), True), ({"hours"}, False)]


def holds(policy, sample) -> bool:
    [process] = sample.devices[0].processes
    subject = Subject("process", sample.devices[0].uuid, process.pid, process.start_time, process.uid)
    return still_holds(policy, subject, RuleView(sample), EngineMemory())


def test_samples_may_be_a_fraction_of_a_second_apart():
    watch = Watch(a_policy("warn", hold=0.5), interval=0.25)

    assert [actions(watch.sees(busy(clock))) for clock in (0, 0.25, 0.5)] == [[], [], ["warn"]]


class Looking:
    """A rule that needs the temperature of the last minute, and finds nothing."""

    def needs(self) -> list[tuple[str, float]]:
        return [("temperature", 60.0)]

    def check(self, view: RuleView) -> Iterator[Finding]:
        self.seen = [series[:] for series in view.past.values()]
        return iter(())


def test_a_rule_finds_what_it_needs_of_the_past():
    rule = Looking()
    watch = Watch(a_policy("warn", rules=(rule,)))
    for clock in (0, 10):
        watch.sees(busy(clock, a_device(temperature=40.0 + clock)))

    assert rule.seen == [[(START, 40.0), (START + 10, 50.0)]]


def test_while_the_last_step_is_not_long_ago_that_is_noted():
    watch = Watch(a_policy("warn", hold=0, cooldown=100))
    watch.until(10)

    assert kinds(watch.sees(busy(20))) == {"cooldown"}


def test_each_step_names_the_one_behind_it_and_the_last_none():
    watch = Watch(a_policy("log", "warn", "notify", cooldown=1000))
    verdicts = [verdict for clock in range(0, 200, 10) for verdict in watch.sees(busy(clock)).verdicts]

    assert [(one.action, one.next_action) for one in verdicts] == [
        ("log", "warn"), ("warn", "notify"), ("notify", None),
    ]  # fmt: skip


def test_a_cancelled_ladder_says_whether_its_policy_was_changed_or_is_gone():
    texts = []
    for later in ((a_policy("warn", "terminate", hold=31.0),), ()):
        watch = Watch(a_policy("warn", "terminate"))
        watch.until(80)
        watch.policies = later
        texts += [note.text for note in watch.sees(busy(90)).notes]

    assert texts == ["the policy was changed, its steps are cancelled", "the policy is gone, its steps are cancelled"]


def test_the_order_of_notes_is_policy_kind_subject_text():
    first, second, third = Note("gap", "b", None), Note("z", "a", "p"), Note("a", "a", "q")

    assert sorted((third, second, first), key=_note_order) == [first, second, third]
