"""What a daemon with metrics may load, and what a scrape may read.  Counted, not timed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot

from gpuguard import ancestry, daemon, watchdog
from gpuguard.backends import processes
from gpuguard.claims.lockfiles import lock_directory
from gpuguard.model import STATS, Snapshot
from gpuguard.nouns import replace
from gpuguard.policies.idle import Idle
from gpuguard.policies.policy import Policy, Step
from gpuguard.policies.processes import Processes
from gpuguard.watchdog import Watchdog

A_POLICY = Policy("p", (Processes(above=9),), steps=(Step("log"),))
ABOUT_THE_HOST = Policy("h", (Idle(below=5.0, cpu_below=2.0),), steps=(Step("log"),))


class Looked:
    """A backend that has seen that."""

    name, simulated = "looked", True

    def __init__(self, snapshot: Snapshot, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.snapshot, self.meanwhile = snapshot, meanwhile

    def sample(self, fields: Collection[str], devices: object = None) -> Snapshot:
        self.meanwhile()
        return self.snapshot if STATS in fields else replace(self.snapshot, stats=None)

    def close(self) -> None:
        pass


# Each is 0.1 to 1 MiB of a daemon for as long as it lives, for what it does once or never.
HEAVY = {
    *(
        "_hashlib",
        "argparse",
        "asyncio",
        "bz2",
        "ctypes",
        "decimal",
        "difflib",
        "email",
        "fractions",
        "http.server",
        "ipaddress",
        "logging",
        "lzma",
    ),
    *(
        "multiprocessing",
        "psutil",
        "pynvml",
        "random",
        "shutil",
        "statistics",
        "subprocess",
        "tempfile",
        "typing",
        "unicodedata",
        "urllib",
        "xml",
        "yaml",
        "gpuguard.documents.yaml_nodes",
        "gpuguard.policykeys",
    ),
}
# Of a door, a broker, messages, a quota, a cluster, other exporters' names: 0.8 MiB where there is nothing of the kind.
ASKED_FOR = {
    "gpuguard.clusters.slurm_node",
    "gpuguard.line.turn",
    "gpuguard.notify",
    "gpuguard.policies.expression_language",
    "gpuguard.policies.forecast",
    "gpuguard.services.broker",
    "gpuguard.services.door",
    "gpuguard.services.verbs",
    "gpuguard.usage.questions",
    "gpuguard.views.metrics_compat",
}
LOADED = """
import gc, json, sys
from gpuguard.cli import dispatch
module = dispatch._module("daemon")
args = dispatch._parsed_once(module, "daemon", ["--metrics", "--interval", "1s"])
assert (args.metrics, args.interval) == ("127.0.0.1:9835", "1s")
READERS = ("argparse", "gpuguard.cli.parser")
print([one for one in gc.get_objects() if isinstance(one, type) and one.__module__ in READERS])
from gpuguard import capabilities, daemon
from gpuguard.cli import daemon_metrics
from gpuguard.policychild import load_apart
capabilities.keep_to_ourselves()
assert load_apart(sys.argv[1]).policies
print(json.dumps(sorted(sys.modules)))
"""
POLICY = "version: 1\npolicies:\n  - {name: a, for: 1m, when: {memory: {above: 70GiB}}, steps: [log]}\n"


def test_a_daemon_with_metrics_and_policies_loads_nothing_heavy(tmp_path: Any) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    words = [sys.executable, "-c", LOADED, str(tmp_path / "policy.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    readers, modules = done.stdout.splitlines()
    loaded = set(json.loads(modules))

    assert readers == "[]", "what reads words is still in memory"
    assert "gpuguard.policychild" in loaded
    # From Python 3.14 on, dataclasses asks annotationlib for the annotations of each class.
    assert loaded & (HEAVY | ASKED_FOR | ({"ast", "dis"} if sys.version_info < (3, 14) else set())) == set()


def test_what_proc_told_of_the_processes_of_a_sample_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(a_process(pid) for pid in range(1000, 1005))
    first, second = a_snapshot(a_device(0, processes=rows)), a_snapshot(a_device(0))
    asked: list[object] = []
    monkeypatch.setattr(watchdog, "look_up", lambda snapshot, stats=None, **how: asked.append(snapshot) or {1000: None})
    guard = Watchdog(Looked(first), [A_POLICY])
    looked = guard.step() and guard._view.snapshot

    assert guard.seen(looked) == guard.seen(second) == {1000: None}
    assert asked == [looked, second]


def test_the_state_of_a_process_that_came_with_the_sample_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    us = os.getpid()
    line = processes.read_proc(f"/proc/{us}/stat") or b""
    row = a_process(us, start_time=processes.start_time(us))
    read: list[str] = []
    real = processes.read_proc
    monkeypatch.setattr(ancestry, "read_proc", lambda path, *limit: read.append(path) or real(path, *limit))
    claimed = a_snapshot(a_device(0, processes=(row,)), stats=((us, line),), claims=(a_claim_record(pid=us),))
    guard = Watchdog(Looked(claimed), [ABOUT_THE_HOST])
    guard.step()

    assert guard._view and guard._view.host[us, row.start_time].memory
    assert guard._view.seen[us].parent == os.getppid()
    assert f"/proc/{os.getppid()}/stat" in read  # of whom the driver says nothing
    assert f"/proc/{us}/stat" not in read


def test_the_host_is_looked_at_only_while_a_policy_judges_by_it() -> None:
    us = os.getpid()
    row = a_process(us, start_time=processes.start_time(us))
    looked = Looked(a_snapshot(a_device(0, processes=(row,))))
    guard = Watchdog(looked)
    rates = []
    for policy in ABOUT_THE_HOST, ABOUT_THE_HOST, A_POLICY, ABOUT_THE_HOST, ABOUT_THE_HOST:
        guard.policies = (policy,)
        looked.snapshot = replace(looked.snapshot, clock=looked.snapshot.clock + 1.0)
        guard.step()
        assert guard._view
        rates.append([use.cpu is not None for use in guard._view.host.values()])

    # A rate is never one over the time in which nobody looked.
    assert rates == [[False], [True], [], [False], [True]]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 0), (0, 1)])
def test_what_came_with_the_sample_is_not_published_though_policies_come_and_go(before: int, after: int) -> None:
    published: list[Snapshot] = []
    guard = Watchdog(
        Looked(a_snapshot(stats=((1, b"line"),)), lambda: setattr(guard, "policies", (A_POLICY,) * after)),
        [A_POLICY] * before,
        on_sample=lambda snapshot, pause: published.append(snapshot),
    )
    guard.step()

    assert [snapshot.stats for snapshot in published] == [None]
    assert guard._view and guard._view.snapshot.stats is None


@pytest.mark.parametrize(("pause", "seconds"), [(1.0, 3), (2.0, 2), (5.0, 5)])
def test_a_daemon_publishes_every_third_second_at_most(
    pause: float, seconds: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    monkeypatch.setattr(daemon, "write_state", lambda directory, snapshot, interval: written.append(snapshot.clock))
    guard = daemon.Daemon(
        Looked(a_snapshot()), lock_directory(str(tmp_path)), daemon.Settings(), print, print, lambda event: True
    )

    for number in range(12):
        guard._publish(a_snapshot(clock=100.0 + number * pause + number % 2 / 50), pause)  # no look comes on the dot

    assert {round(after - before) for before, after in itertools.pairwise(written)} == {seconds}
