"""`gpuguard daemon --metrics`: its last look, without another driver call, and what its policies did."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import a_device, a_snapshot
from commands import Gpuguard
from daemons import DaemonUnderTest, a_daemon
from exporters import fetch
from lines import a_ticket
from nodes import GIB, a_user, eventually
from test_metrics import the_one
from test_metrics_command import read

from gpuguard.metrics import facts
from gpuguard.metrics.facts import DaemonFacts, EventCounter, MetricFacts, RareFields
from gpuguard.model import CLOCKS, ECC, Event, Gap

POLICY = """
version: 1
policies:
  - name: big
    for: 0s
    when: {memory: {above: 1GiB}}
    steps: [log]
"""


def target_of(daemon: DaemonUnderTest) -> str:
    def found() -> re.Match[str] | None:
        return re.search(r"serving http://([\d.:]+)/metrics", daemon.said())

    assert eventually(lambda: found() is not None), daemon.said()
    match = found()
    assert match
    return match[1]


def page_of(daemon: DaemonUnderTest, query: str = ""):
    return read(fetch(f"http://{target_of(daemon)}/metrics{query}"))


def test_what_the_daemon_saw_and_did_is_told(tmp_path):
    with a_daemon(tmp_path, POLICY, "--metrics", "127.0.0.1:0") as daemon, a_user(daemon.node, "0", 10 * GIB):
        daemon.until("log")
        page = page_of(daemon)

        assert the_one(page, "gpuguard_daemon_up") == the_one(page, "gpuguard_driver_up") == 1
        assert the_one(page, "gpuguard_policy_actions_total", policy="big", action="log", outcome="done") == 1
        assert the_one(page, "gpuguard_audit_failures_total") == 0
        assert the_one(page, "gpuguard_waiting_requests") == 0
        assert sum(page["gpuguard_user_unclaimed_devices"].values()) == 1
        assert eventually(lambda: len(page_of(daemon, "?compat=dcgm").get("DCGM_FI_DEV_SM_CLOCK", ())) == 4)
        assert eventually(lambda: "gpuguard_device_ecc_errors_total" in page_of(daemon))
        assert daemon.end() == 0


def test_a_log_that_cannot_be_written_is_counted(tmp_path):
    with a_daemon(tmp_path, POLICY, "--metrics", "127.0.0.1:0") as daemon:
        daemon.log.unlink()
        daemon.log.mkdir()
        with a_user(daemon.node, "0", 10 * GIB):
            assert eventually(lambda: the_one(page_of(daemon), "gpuguard_audit_failures_total") > 0)
        daemon.log.rmdir()


def test_a_driver_that_is_gone_takes_its_numbers_along(tmp_path):
    with a_daemon(tmp_path, None, "--metrics", "127.0.0.1:0") as daemon:
        assert eventually(lambda: "gpuguard_device_temperature_celsius" in page_of(daemon))
        (Path(daemon.node) / "node.json").unlink()

        assert eventually(lambda: the_one(page_of(daemon), "gpuguard_driver_up") == 0)
        page = page_of(daemon)
        assert "gpuguard_device_temperature_celsius" not in page and len(page["gpuguard_device_info"]) == 4
        assert the_one(page, "gpuguard_sample_failures_total") >= 1


def test_silent_connections_do_not_hold_up_the_guard(tmp_path):
    with a_daemon(tmp_path, POLICY, "--metrics", "127.0.0.1:0") as daemon:
        host, _, port = target_of(daemon).rpartition(":")
        silent = [socket.create_connection((host, int(port)), 10) for _ in range(50)]
        with a_user(daemon.node, "0", 10 * GIB):
            daemon.until("log")
        assert daemon.end() == 0
        for each in silent:
            each.close()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--metrics", "0.0.0.0:0"], "no password"),
        (["--metrics", "--once"], "does not go with --once"),
        (["--metrics-expose"], "is about --metrics"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_watched(tmp_path, words, advice):
    done = Gpuguard(tmp_path, None)("daemon", *words)

    assert done.returncode == 2 and advice in done.stderr


def test_without_the_option_nothing_listens_and_no_clocks_are_read(tmp_path):
    with a_daemon(tmp_path) as daemon:
        assert daemon.state()["snapshot"]["devices"][0].get("clock_sm") is None
        assert "http://" not in daemon.said()


class ADaemon:
    """A daemon that looked *age* seconds ago."""

    def __init__(self, age: float, trouble: str | None = None) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.last, self.waiting = a_snapshot(clock=now - age), (a_ticket(),)
        watchdog = {"interval": (1.0, 2.0), "pause": 2.0, "trouble": trouble, "seen": lambda snapshot: {}}
        self.watchdog = SimpleNamespace(**watchdog)


@pytest.mark.parametrize(("age", "trouble", "current"), [(1, None, True), (7, None, False), (1, "lost", False)])
def test_a_sample_counts_for_three_intervals(age, trouble, current):
    told = DaemonFacts(ADaemon(age, trouble), None, EventCounter()).read()

    assert (told.current, told.driver_up, bool(told.uses)) == (current, current, current)
    assert (told.waiting is not None) == current  # else the queue is read again


def test_only_what_a_policy_did_is_counted_as_such(monkeypatch):
    counter = EventCounter()
    monkeypatch.setattr(facts.audit_log, "append", lambda event: event.kind != "warn")
    for kind, outcome, policy in (
        ("warn", "done", "p"), ("warn", "done", "p"), ("note", "gap", "p"), ("release", "done", None),
        ("watchdog", "driver unresponsive", None), ("watchdog", "watching again", None),
    ):  # fmt: skip
        counter.append(Event(1.0, kind, outcome, facts=(("policy", policy),)))
    counted = counter.add_to(MetricFacts(0.0, "1"))

    assert counted.actions == {("p", "warn", "done"): 2}
    assert (counted.unrecorded, counted.troubles) == (2, 1)


def test_errors_of_memory_are_read_each_minute_and_only_while_somebody_asks(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(facts.time, "monotonic", lambda: now)
    rare, without = RareFields(), a_snapshot(a_device())
    assert rare.groups() == frozenset()

    rare.scraped()
    assert rare.groups() == {CLOCKS, ECC}
    assert rare.errors(without)[0].remapped_rows is None
    rare.errors(a_snapshot(a_device(remapped_rows=3)))
    assert rare.groups() == {CLOCKS}
    assert rare.errors(without)[0].remapped_rows == 3

    now += 61
    assert rare.groups() == {CLOCKS, ECC}
    rare.errors(a_snapshot(a_device(), gaps=(Gap(a_device().uuid, "remapped_rows", "not supported"),)))
    assert rare.groups() == {CLOCKS} and rare.errors(without)[0].remapped_rows is None

    now += 301
    assert rare.groups() == frozenset()
