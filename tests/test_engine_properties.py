"""Laws of the engine, over random histories of a small machine."""

from dataclasses import replace
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


# Without shrinking, which takes minutes here.
laws = settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.generate))


@st.composite
def histories(draw: Any) -> list[Snapshot]:
    """Samples 10 s apart, in which most things stay as they are."""
    now, samples = draw(moment), list[Snapshot]()
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


def story(samples: list[Snapshot], *policies: Any) -> list[Any]:
    """The judgements of a whole history."""
    watch = Watch(*policies, interval=INTERVAL)
    return [watch.sees(sample) for sample in samples]


@laws
@given(histories(), st.permutations(POLICIES))
def test_the_order_of_the_policies_does_not_matter(samples, policies):
    assert story(samples, *policies) == story(samples, *POLICIES)


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
