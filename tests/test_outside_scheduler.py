"""Rule outside_scheduler live: a guard and a daemon on a simulated node, real processes, and Slurm's answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import GIB, a_user, start
from test_slurm_node import BOB, Controller, a_job

from gpuguard.claims.directory import lock_directory
from gpuguard.clusters import slurm_node
from gpuguard.clusters.slurm_node import SlurmNode
from gpuguard.daemon import service
from gpuguard.daemon.service import Daemon, DaemonSettings
from gpuguard.model import Event
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.usage import OutsideSchedulerRule
from gpuguard.watchdog import Watchdog


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_node, "is_here", lambda: True)


OUTSIDE = Policy("outside", (OutsideSchedulerRule(),), hold=0.0, steps=(Step("terminate"),), enforce=False)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Event]]:
    """The steps of a guard on a node on whose device 0 we compute."""
    monkeypatch.setattr(slurm_node, "TICKS_SECONDS", 0.0)

    def run(*jobs: str, scheduler: bool = True) -> list[Event]:
        place, events = str(tmp_path / "node"), list[Event]()
        guard = Watchdog(
            start(place), (OUTSIDE,), lock_directory(str(tmp_path)), append=lambda event: not events.append(event)
        )
        node = SlurmNode(Controller(*jobs), "n1", is_root=True, every=1000.0)
        if scheduler:
            guard.scheduled = node.given
        with a_user(place, "0", 10 * GIB):
            node.refresh()
            for _ in range(3):
                guard.step()
        return [event for event in events if event.kind == "terminate"]

    return run


def test_a_process_outside_the_scheduler_is_found_live(live):
    events = live(a_job("gpu:1(IDX:1)", uid=os.getuid()))

    assert len(events) == 1
    assert "of a device that the scheduler has given to nobody" in (events[0].message or "")
    assert "has given to other users" in (live(a_job("gpu:1(IDX:0)", uid=BOB))[0].message or "")


def test_a_user_who_has_the_device_from_slurm_is_left_alone(live):
    assert live(a_job("gpu:1(IDX:0)", uid=os.getuid())) == []
    assert live(a_job(None, uid=os.getuid())) == []


def test_without_a_scheduler_no_process_is_outside_it(live):
    assert live(scheduler=False) == []


def test_a_scheduler_is_asked_only_where_a_policy_wants_to_know(tmp_path):
    place = str(tmp_path / "node")
    asked: list[object] = []
    guard = Watchdog(start(place), (Policy("p", (IdleRule(5.0),), hold=0.0, steps=(Step("log"),)),))
    guard.scheduled = asked.append  # type: ignore[assignment]
    guard.step()

    assert asked == []


POLICY = """
version: 1
mode: observe
policies:
  - name: outside
    when: {outside_scheduler: {}}
    for: 1ms
    steps: [warn]
"""


@pytest.mark.parametrize("here", [True, False])
def test_the_daemon_asks_slurm_on_its_nodes(tmp_path, monkeypatch, here):
    controller = Controller()
    monkeypatch.setattr(slurm_node, "is_here", lambda: here)
    monkeypatch.setattr(slurm_node, "TICKS_SECONDS", 0.0)
    monkeypatch.setattr(service, "SlurmNode", lambda say: SlurmNode(controller, "n1", is_root=True, say=say))
    place, file = str(tmp_path / "node"), tmp_path / "policy.yaml"
    file.write_text(POLICY)
    backend, events = start(place), list[Event]()
    with a_user(place, "0", 10 * GIB):
        settings = DaemonSettings(policy=str(file), interval=0.2)
        code, judgement = Daemon(
            backend, lock_directory(str(tmp_path)), settings, print, events.append, lambda event: True
        ).once()

    assert (code, controller.asked >= 2) == (0, here)
    assert judgement and [verdict.policy for verdict in judgement.verdicts] == ["outside"] * here
