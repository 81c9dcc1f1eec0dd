"""A whole guard on the fake driver library: policies that can only work if the driver's manners are understood."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from driven import driven
from fake_nvml import GIB, FakeNvml
from guarded import a_child

pytestmark = pytest.mark.root  # the processes are those of another user

SAMPLE_PERIOD = -700_000  # microseconds: a driver tells each of its samples once


@pytest.mark.parametrize(
    "rule",
    ["{utilization: {above: 80%, per: process}}", '{expression: {expr: "process_utilization > 80%"}}'],
)
def test_whoever_keeps_the_multiprocessors_too_busy_is_ended_once(tmp_path: Path, rule: str) -> None:
    policy = f"policies: [{{name: busy, for: 1s, when: {rule}, steps: [terminate]}}]"
    with FakeNvml(tmp_path, devices=2) as fake, a_child() as offender, a_child() as bystander:
        fake.add_process(0, offender.pid, GIB, sm_utilization=95, time_stamp=SAMPLE_PERIOD)
        fake.add_process(1, bystander.pid, GIB, sm_utilization=30, time_stamp=SAMPLE_PERIOD)
        with driven(tmp_path, fake, policy) as daemon:
            assert offender.wait(20) == -signal.SIGTERM, daemon.said()

            assert [(event["pid"], event["outcome"]) for event in daemon.events("terminate")] == [
                (offender.pid, "about to")
            ]
            assert bystander.poll() is None
