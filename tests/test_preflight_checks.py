"""Each check of preflight on its own, at its edges and where something cannot be read; and what is held meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import pytest
from builders import GIB, a_device, a_snapshot, a_uuid
from guarded import Scene

from gpuguard import procfs
from gpuguard.enforcement import identity, preflight
from gpuguard.enforcement.identity import is_alive
from gpuguard.enforcement.limits import PastAction
from gpuguard.enforcement.preflight import Preflight, targets
from gpuguard.errors import DriverUnresponsive

Change = Callable[[Preflight], Preflight]
CHECKS = {name: check.check for name, check in {**preflight.EARLY, **preflight.LATE}.items()}
CLOCK = 1000.0


@pytest.fixture
def target(scene: Scene) -> Preflight:
    """An offender whom nothing protects, a second after the sample; the driver has just answered again."""
    snapshot = replace(scene.snapshot, clock=CLOCK)
    verdict = scene.verdict()
    facts = identity.facts_of(scene.pid)
    assert facts
    facts = replace(facts, start_time=CLOCK - 60)
    process = replace(targets(verdict, snapshot)[0], start_time=CLOCK - 60)
    fresh = replace(snapshot, clock=CLOCK + 1)
    context = scene.context(jobs=frozenset(), interval=10.0, share_host_pids=True)
    return Preflight(verdict, snapshot, context, CLOCK + 1, process, None, scene.pidfd, None, fresh, facts)


def at(clock: float) -> Change:
    return lambda target: replace(target, clock=clock)


def pid(number: Callable[[], int]) -> Change:
    return lambda target: replace(target, process=replace(target.process, pid=number()))


def facts(**fields: object) -> Change:
    return lambda target: replace(target, facts=replace(target.facts, **fields))


def unknown(target: Preflight) -> Preflight:
    return replace(target, facts=None)


def driver_says(**fields: object) -> Change:
    """The driver's second answer about the process."""

    def change(target: Preflight) -> Preflight:
        assert target.fresh
        device = target.fresh.devices[0]
        rows = tuple(replace(row, **fields) for row in device.processes or ())
        return replace(target, fresh=replace(target.fresh, devices=(replace(device, processes=rows),)))

    return change


def again(target: Preflight) -> Preflight:
    return replace(target, fresh=target.snapshot)


def of_a_driver(target: Preflight) -> Preflight:
    """Of a driver that is no simulation."""
    target.context.backend.simulated = False  # type: ignore[misc]
    return target


def in_another_group(target: Preflight) -> Preflight:
    return facts(group=os.getpgrp() + 1)(target)


EDGES: list[tuple[str, Change, str | None]] = [
    ("fresh", at(CLOCK - 0.5), "the sample is from the future"),
    ("fresh", at(CLOCK), None),
    ("fresh", at(CLOCK + 20), None),
    ("fresh", at(CLOCK + 21), "the sample is 21s old"),
    ("pid", pid(lambda: 1), "1 is no pid"),
    ("pid", pid(lambda: 2), None),
    ("pid", pid(procfs.pid_max), None),
    ("pid", pid(lambda: procfs.pid_max() + 1), f"{procfs.pid_max() + 1} is no pid"),
    ("start time", unknown, "/proc does not show it"),
    ("sample time", facts(start_time=CLOCK - 2 / os.sysconf("SC_CLK_TCK")), None),
    ("sample time", facts(start_time=CLOCK - 0.015), "it may have started after the sample"),
    ("sample time", unknown, "it may have started after the sample"),
    ("listed", lambda target: replace(target, fresh=None), "the driver gave no newer list"),
    ("driver", facts(uses_driver=False), None),  # of a simulation
    ("driver", lambda target: of_a_driver(facts(uses_driver=True)(target)), None),
    ("driver", lambda target: of_a_driver(facts(uses_driver=False)(target)), "it does not have the driver open"),
    (
        "driver",
        lambda target: of_a_driver(facts(uses_driver=None)(target)),
        "whether it has the driver open cannot be seen",
    ),
    ("driver", lambda target: of_a_driver(unknown(target)), "whether it has the driver open cannot be seen"),
    ("owner", unknown, "its owner is not the one that was judged"),
    ("owner", driver_says(uid=None), None),
    ("owner", driver_says(uid=4711), "its owner is not the one that was judged"),
    ("owner", driver_says(user=None), "the name of uid"),
    ("protected", unknown, "whose it is cannot be read"),
    ("protected", facts(uids=(identity.uid_min(),) * 4), None),
    ("protected", facts(uids=(identity.uid_min() - 1,) * 4), "is the system's"),
    ("program", unknown, "its program cannot be read"),
    ("program", facts(executable=None), "its program cannot be read"),
    ("power", unknown, None),  # others say that it cannot be seen
    ("family", pid(os.getpid), "gpuguard itself stands on it"),
    ("family", pid(os.getppid), "gpuguard itself stands on it"),
    ("family", in_another_group, "it is a part of gpuguard"),
]


@pytest.mark.parametrize(("check", "change", "said"), EDGES)
def test_a_check_speaks_from_its_edge_on(target, monkeypatch, check, change, said):
    monkeypatch.setattr(identity, "DRIVER_FILE", os.devnull)
    found = CHECKS[check](change(target))

    assert found is None if said is None else said in str(found)


def test_the_drivers_answer_may_be_the_sample_itself(target):
    start_time = target.snapshot.devices[0].processes[0].start_time
    listed = replace(again(target), process=replace(target.process, start_time=start_time))

    assert CHECKS["listed"](listed) is None


def test_where_there_is_no_driver_file_there_is_nothing_to_hold_on_to(target, monkeypatch):
    monkeypatch.setattr(identity, "DRIVER_FILE", "/dev/there-is-none")

    assert CHECKS["driver"](of_a_driver(facts(uses_driver=None)(target))) is None


def test_a_process_that_is_no_relative_is_hit_unless_it_is_in_our_group_or_cannot_be_seen(target, monkeypatch):
    monkeypatch.setattr(procfs, "ancestors", lambda pid: frozenset())

    assert CHECKS["family"](in_another_group(target)) is None
    assert CHECKS["family"](facts(group=os.getpgrp())(target)) == "it is in gpuguard's process group"
    assert CHECKS["family"](unknown(target)) == "it is in gpuguard's process group"


def test_whoever_sits_in_front_of_it_has_their_grace_and_not_a_moment_more(target):
    on_a_terminal = facts(terminal=os.makedev(136, 3))(target)

    first = CHECKS["interactive"](on_a_terminal)
    assert first and (first[0].check, first[0].wait) == ("interactive", 600.0)
    assert CHECKS["interactive"](at(CLOCK + 600)(on_a_terminal))[0].wait == 1.0
    assert not CHECKS["interactive"](at(CLOCK + 601)(on_a_terminal))
    assert CHECKS["interactive"](unknown(replace(target, verdict=replace(target.verdict, policy="another"))))


@pytest.mark.parametrize(
    ("number", "caught", "said"),
    [
        (12, 1 << 11, None),
        (12, 1 << 10, "it has no way to answer SIGUSR2"),
        (12, 1 << 12, "it has no way to answer SIGUSR2"),
        (9, ~0, "signal 9 is none for a checkpoint"),
    ],
)
def test_a_checkpoint_goes_to_whoever_catches_that_very_signal(target, number, caught, said):
    verdict = replace(target.verdict, action="checkpoint", options=(("signal", number),))
    found = CHECKS["catches"](replace(facts(caught=caught)(target), verdict=verdict))

    assert found is None if said is None else said in str(found)
    assert CHECKS["catches"](facts(caught=0)(target)) is None  # of another action


# Whether the last past on a device has had its effect.

GONE = (2**22 + 1, 1.0)


def an_action(**fields: object) -> PastAction:
    facts = {"process": GONE, "memory_used": ((a_uuid(0), 40 * GIB),), "memory": 10 * GIB, **fields}
    return PastAction(CLOCK, "terminate", devices=(a_uuid(0),), live=True, **facts)


@pytest.mark.parametrize(
    ("past", "used", "seen"),
    [
        (an_action(), 30 * GIB, True),
        (an_action(), 35 * GIB, True),  # half of it is back
        (an_action(), 35 * GIB + 1, False),
        (an_action(), None, False),
        (an_action(memory=None), 40 * GIB, True),
        (an_action(memory=None), 40 * GIB + 1, False),
        (an_action(memory_used=((a_uuid(7), 40 * GIB),)), 40 * GIB, True),  # that device is not in the sample
    ],
)
def test_the_effect_is_seen_when_the_process_is_gone_and_half_of_its_memory_is_back(past, used, seen):
    assert preflight._effect_seen(past, a_snapshot(a_device(0, memory_used=used))) is seen


def test_while_the_process_lives_there_is_no_effect(scene):
    assert is_alive((scene.pid, scene.start_time))

    past = an_action(process=(scene.pid, scene.start_time))
    assert preflight._effect_seen(past, a_snapshot(a_device(0, memory_used=0))) is False


@pytest.mark.parametrize(("before", "now", "against"), [(40, 0, set()), (0, 40, {"one per device"})])
def test_the_effect_is_looked_for_in_the_drivers_latest_answer(target, before, now, against):
    def using(gib: int) -> object:
        return replace(target.snapshot, devices=(replace(target.snapshot.devices[0], memory_used=gib * GIB),))

    target.context.limits.record(an_action())
    target = replace(target, snapshot=using(before), fresh=using(now), clock=CLOCK + 20)

    assert {each.check for each in CHECKS["limits"](target)} == against


# What is held while one looks.


def test_a_pid_that_cannot_be_held_is_left_alone(scene, monkeypatch):
    def fail(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)

    assert scene.against() == {"pidfd"}
    assert "Too many open files" in scene.act().why


def test_a_process_that_has_ended_before_it_could_be_held_is_gone(scene):
    os.kill(scene.pid, signal.SIGKILL)
    os.waitpid(scene.pid, 0)

    assert scene.act().word == "gone"
    assert scene.against() == {"alive"}
    assert [event.outcome for event in scene.events] == ["gone"]


def test_a_driver_that_cannot_be_asked_again_is_said_and_nothing_else_is_looked_at(scene):
    def fail() -> None:
        raise DriverUnresponsive("a driver call did not come back")

    scene.machine.before_sample = fail

    assert scene.act().why == "the driver cannot be asked again: a driver call did not come back"


def test_no_descriptor_is_left_open(scene):
    scene.against()
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        scene.against()

    assert len(os.listdir("/proc/self/fd")) == len(before)
