"""Laws of the engine, over random histories of a small machine."""

from __future__ import annotations

from typing import Any

from builders import GIB, a_device, a_process
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ladders import Devices, Processes, Watch, a_policy, busy

from gpuguard.model import Snapshot
from gpuguard.policies.policy import DESTRUCTIVE, KILL_AFTER, Step

DEVICES, USERS, INTERVAL, LENGTH = 3, 3, 10, 24
FULL, GARBLED, LISTLESS, ABSENT = "full", "garbled", "listless", "absent"

LADDER = (Step("warn"), Step("terminate", 20), Step("kill", KILL_AFTER))
POLICIES = (
    a_policy(*LADDER, name="a", hold=20, cooldown=30, at_most_users=2),
    a_policy("terminate", name="b", hold=30, rules=(Processes(15 * GIB),), at_most_processes=1),
    a_policy("warn", "pause", name="c", hold=10, rules=(Devices(80, means=True),)),
)

process = st.builds(
    lambda pid, start, gib: a_process(pid, start_time=float(start), uid=2000 + pid % USERS, memory_used=gib * GIB),
    st.integers(1000, 1004),
    st.integers(1, 2),
    st.sampled_from([0, 10, 20]),
)
state = st.sampled_from([FULL] * 9 + [GARBLED, LISTLESS, ABSENT])
content = st.tuples(
    state, st.lists(process, max_size=3, unique_by=lambda each: each.pid), st.sampled_from([50.0, 90.0])
)
moment = st.tuples(*[content] * DEVICES)


class History(list[Snapshot]):
    """Samples, shown in few words when a law is broken."""

    def __repr__(self) -> str:
        return "; ".join(f"{each.clock:.0f}: {' | '.join(map(_briefly, each.devices))}" for each in self)


def _briefly(device: Any) -> str:
    mark = "" if device.processes_plausible else " garbled"
    pids = " ".join(f"{one.pid}@{one.start_time:.0f}:{one.memory_used / GIB:.0f}" for one in device.processes or ())
    return f"{device.index}{mark} {device.temperature:.0f}C {pids if device.processes is not None else 'listless'}"


# Without shrinking: it takes minutes here, and a history of 24 samples can be read as it is.
laws = settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))


@st.composite
def histories(draw: Any) -> list[Snapshot]:
    """Samples 10 s apart, in which most things stay as they are."""
    now, samples = draw(moment), History()
    for place in range(LENGTH):
        if draw(st.integers(0, 4)) == 0:
            now = draw(moment)
        samples.append(sample(place * INTERVAL, now))
    return samples


def sample(clock: float, now: Any) -> Snapshot:
    devices = []
    for index, (what, processes, temperature) in enumerate(now):
        if what == ABSENT:
            continue
        used = sum(each.memory_used for each in processes)
        device = {"temperature": temperature, "memory_used": used, "processes_plausible": what != GARBLED}
        devices.append(a_device(index, processes=None if what == LISTLESS else tuple(processes), **device))
    return replace(busy(clock), devices=tuple(devices))


def replace(snapshot: Snapshot, **fields: Any) -> Snapshot:
    return Snapshot(**{**vars(snapshot), **fields})


def story(samples: list[Snapshot], *policies: Any) -> list[Any]:
    """The judgements of a whole history."""
    watch = Watch(*policies, interval=INTERVAL)
    return [watch.sees(sample) for sample in samples]


def firsts(samples: list[Snapshot], *policies: Any) -> dict[tuple[str, int], float]:
    """When each step of each policy was first asked for."""
    first: dict[tuple[str, int], float] = {}
    for each, judgement in zip(samples, story(samples, *policies), strict=True):
        for verdict in judgement.verdicts:
            first.setdefault((verdict.policy, verdict.step), each.clock)
    return first


@laws
@given(histories())
def test_nothing_is_said_of_processes_on_a_device_that_cannot_be_seen(samples):
    for each, judgement in zip(samples, story(samples, *POLICIES), strict=True):
        for verdict in judgement.verdicts:
            device = each.device(verdict.finding.subject.device)
            assert device is not None
            assert set(verdict.finding.processes) <= set(device.processes or ())
            if not device.processes_plausible or device.processes is None:
                assert verdict.finding.processes == () and verdict.action not in DESTRUCTIVE


@laws
@given(histories())
def test_every_verdict_stands_on_a_condition_that_held_all_the_time(samples):
    policy = POLICIES[0]
    for place, judgement in enumerate(story(samples, policy)):
        for verdict in judgement.verdicts:
            whom, device = verdict.finding.processes[0], verdict.finding.subject.device
            stretch = [each for each in samples[: place + 1] if each.clock >= verdict.since]
            assert stretch[-1].clock - stretch[0].clock >= policy.hold
            assert len(stretch) >= 2
            for each in stretch:
                seen = each.device(device)
                assert seen is not None and seen.processes_plausible
                assert any(
                    (one.pid, one.start_time) == (whom.pid, whom.start_time) and one.memory_used
                    for one in seen.processes or ()
                )


@laws
@given(histories(), st.permutations(POLICIES))
def test_the_order_of_the_policies_does_not_matter(samples, policies):
    assert story(samples, *policies) == story(samples, *POLICIES)


@laws
@given(st.lists(st.booleans(), min_size=5, max_size=30), st.data())
def test_to_lose_a_sample_never_makes_a_verdict_earlier(holds, data):
    policy = a_policy(*LADDER, hold=20)
    there = [busy(place * INTERVAL) if one else busy(place * INTERVAL, a_device()) for place, one in enumerate(holds)]
    lost = data.draw(st.sets(st.integers(0, len(holds) - 1)))
    garbled = [
        busy(place * INTERVAL, a_device(processes=(a_process(),), processes_plausible=False)) if place in lost else each
        for place, each in enumerate(there)
    ]
    thinned = [each for place, each in enumerate(there) if not (place in lost and holds[place])]

    complete = firsts(there, policy)

    for fewer in (firsts(garbled, policy), firsts(thinned, policy)):
        assert all(clock >= complete.get(step, float("inf")) for step, clock in fewer.items())


@laws
@given(histories())
def test_a_kill_comes_long_after_the_terminate_of_the_same_process(samples):
    terminated: dict[Any, float] = {}
    for each, judgement in zip(samples, story(samples, POLICIES[0]), strict=True):
        for verdict in judgement.verdicts:
            whom = (verdict.finding.subject.pid, verdict.finding.subject.start_time)
            if verdict.action == "kill":
                assert each.clock - terminated[whom] >= KILL_AFTER
            if verdict.action == "terminate":
                terminated[whom] = each.clock


@laws
@given(histories())
def test_at_most_one_destructive_step_per_device_and_never_more_than_the_breaker_allows(samples):
    for judgement in story(samples, *POLICIES):
        hits = [verdict for verdict in judgement.verdicts if verdict.action in DESTRUCTIVE]
        places = [verdict.finding.subject.device for verdict in hits]
        assert len(places) == len(set(places))
        for policy in POLICIES:
            mine = [one for verdict in hits if verdict.policy == policy.name for one in verdict.finding.processes]
            assert len({one.uid for one in mine}) <= policy.at_most_users
            assert len({(one.pid, one.start_time) for one in mine}) <= policy.at_most_processes
