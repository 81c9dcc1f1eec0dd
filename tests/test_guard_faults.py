"""A driver that fails, lies or hangs, under every rule: nobody is hit by it, and the other devices are guarded."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chances import IN_CAMPAIGNS, NUMBER
from enforcing_daemon import driven
from fake_nvml import GIB, MIB, FakeNvml
from guard_scene import SOMEBODY, a_child
from sources import ROOT

pytestmark = pytest.mark.root  # the processes are those of other users


def campaign(fake: FakeNvml, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, f"{ROOT}/tests/support/faulty_driver.py", *words],
        env={**os.environ, **fake.environment(), "GPUGUARD_CHANCE": str(NUMBER)},
        capture_output=True,
        text=True,
        timeout=900,  # against a hang: the longest takes a minute alone, and five where others compute
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("every_code", 35),
        ("the_last_look", 15),
        ("values", 25),
        ("lists", 20),
        ("ended", 4),
        ("desktops", 6),
        ("silence", 8),
    ],
)
def test_nobody_is_hit_by_what_a_broken_driver_says(tmp_path: Path, name: str, cases: int) -> None:
    with FakeNvml(tmp_path, devices=3) as fake:
        answer = campaign(fake, name)

    assert answer["wrong"] == []
    assert answer["cases"] >= cases


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("values", "take_unknown_for_zero", "idle hit somebody"),
        pytest.param("lists", "believe_every_list", "broken GPU", marks=IN_CAMPAIGNS),
    ],
)
def test_a_guard_that_believes_the_driver_is_caught(tmp_path: Path, name: str, fault: str, found: str) -> None:
    with FakeNvml(tmp_path, devices=3) as fake:
        wrong = campaign(fake, name, fault)["wrong"]

    assert [one for one in wrong if found in one]


ENFORCED = "policies:\n  - {name: bare, for: 400ms, cooldown: 0s, when: {memory: {above: 20GiB}}, steps: [terminate]}\n"


def test_a_process_that_has_ended_with_a_child_on_the_gpu_shelters_nobody_there_and_is_named(tmp_path: Path) -> None:
    with FakeNvml(tmp_path, devices=2) as fake, a_child("true") as parent, a_child() as offender:
        parent.wait()
        fake.add_process(0, parent.pid, GIB // 8, stays=1)
        fake.add_process(0, offender.pid, 60 * GIB)
        with driven(tmp_path, fake, ENFORCED) as daemon:
            ended = offender.wait(60)
            told = daemon.until("note")

    assert ended == -signal.SIGTERM
    assert [(event["outcome"], event["pid"]) for event in told if event["outcome"] != "cleared"] == [
        ("process ended", parent.pid)
    ]


BARE = """
desktop_memory: 2500MiB
policies: [{name: bare, for: 400ms, cooldown: 0s, when: {unclaimed: {min_memory: 1GiB}}, steps: [terminate]}]
"""


def test_what_a_user_makes_of_a_job_is_no_way_out_and_desktops_are_left_alone(tmp_path: Path) -> None:
    with FakeNvml(tmp_path, devices=4) as fake, ExitStack() as stack:
        vulkan, with_egl, of_mps, server, browser, call, anothers = [
            stack.enter_context(a_child(uid=uid)) for uid in (SOMEBODY,) * 6 + (SOMEBODY + 1,)
        ]
        fake.add_process(0, vulkan.pid, 70 * GIB, "graphics")
        fake.add_process(1, with_egl.pid, 70 * GIB, "compute+graphics")
        fake.add_process(2, of_mps.pid, 60 * GIB, "compute+mps")
        fake.add_process(2, server.pid, 66 * MIB)
        for neighbour, memory in ((browser, 3 * GIB // 2), (call, 900 * MIB), (anothers, 2 * GIB)):
            fake.add_process(3, neighbour.pid, memory, "graphics")
        with driven(tmp_path, fake, BARE) as daemon:
            ended = [child.wait(60) for child in (vulkan, with_egl, of_mps)]
            states = [device["state"] for device in daemon.gpuguard.json("who", "--fresh")["devices"]]
            told = {event["pid"] for event in daemon.events("terminate")}

        assert ended == [-signal.SIGTERM] * 3
        assert told == {vulkan.pid, with_egl.pid, of_mps.pid}
        assert [child.poll() for child in (server, browser, call, anothers)] == [None] * 4
        assert states == ["free", "free", "unclaimed_use", "free"]  # of an MPS server


SAMPLE_PERIOD = -700_000  # microseconds: a driver tells each of its samples once


@pytest.mark.parametrize(
    "rule", ["{utilization: {above: 80%, per: process}}", '{expression: {expr: "process_utilization > 80%"}}']
)
def test_whoever_keeps_the_multiprocessors_too_busy_is_ended_once(tmp_path: Path, rule: str) -> None:
    policy = f"policies: [{{name: busy, for: 1s, when: {rule}, steps: [terminate]}}]"
    with FakeNvml(tmp_path, devices=2) as fake, a_child() as offender, a_child() as bystander:
        fake.add_process(0, offender.pid, GIB, sm_utilization=95, time_stamp=SAMPLE_PERIOD)
        fake.add_process(1, bystander.pid, GIB, sm_utilization=30, time_stamp=SAMPLE_PERIOD)
        with driven(tmp_path, fake, policy) as daemon:
            assert offender.wait(60) == -signal.SIGTERM, daemon.said()

            assert [(event["pid"], event["outcome"]) for event in daemon.events("terminate")] == [
                (offender.pid, "about to")
            ]
            assert bystander.poll() is None
