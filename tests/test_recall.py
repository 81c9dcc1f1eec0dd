"""A guard that is started again knows what it did: no crash loop signals more often than the limits allow."""

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemons import a_daemon
from enforcing_daemon import driven
from fake_nvml import GIB, FakeNvml
from guard_scene import a_child, a_scene
from nodes import eventually

from gpuguard.claims.restrictions import boot_id
from gpuguard.clusters import slurm_jobs
from gpuguard.enforcement import actions, guard_limits
from gpuguard.enforcement.guard_limits import ActionLimits, RecoveredActions, recover_actions
from gpuguard.history import audit_log
from gpuguard.procfs import boot_clock

POLICY = "policies: [{name: small, for: 0s, when: {memory: {above: 1GiB}}, steps: [terminate]}]"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def past(log: Path) -> RecoveredActions:
    return recover_actions(str(log), clock=boot_clock(), now=time.time())


@pytest.mark.parametrize(("enforce", "word"), [(True, "sent"), (False, "dry run")])
def test_an_action_comes_back_from_its_line_as_it_was(log: Path, enforce: bool, word: str) -> None:
    with a_scene() as scene:
        scene.context(append=audit_log.append, enforce=enforce)
        assert scene.act().word == word
        (done,) = scene.context().limits.past

    (found,) = past(log).actions
    assert found.clock == pytest.approx(done.clock, abs=0.01)
    assert found == replace(done, clock=found.clock, memory=None, memory_used=())
    assert found.signature


def test_the_limit_on_signals_holds_for_a_guard_that_crashes_after_each(log: Path) -> None:
    words = []
    for _ in range(guard_limits.JOBS_PER_MINUTE + 2):
        with a_scene() as scene:
            scene.context(limits=ActionLimits(list(past(log).actions)), append=audit_log.append)
            words.append(scene.act("renice").word)

    assert words == ["sent"] * guard_limits.JOBS_PER_MINUTE + ["refused"] * 2


@pytest.mark.root
def test_a_daemon_that_is_killed_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    with FakeNvml(tmp_path, devices=4) as fake, ExitStack() as stack:
        # Different programs, or they were one job of the launcher that this test is.
        programs = ("sleep", "600"), ("tail", "-f", "/dev/null"), ("cat",), ("tee",)
        children = [stack.enter_context(a_child(*program, stdin=subprocess.PIPE)) for program in programs]
        for device in (0, 1):
            fake.add_process(device, children[device].pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY) as daemon:
            daemon.until("terminate", 2)
            assert [child.wait(60) for child in children[:2]] == [-signal.SIGTERM] * 2  # after their lines
            daemon.end(signal.SIGKILL)
            before = daemon.events("terminate")
            for device in (2, 3):
                fake.add_process(device, children[device].pid, 2 * GIB)
            daemon.start()
            after = daemon.until("terminate", len(before) + 2)[len(before) :]

            # Three jobs a minute are the most, however many daemons sent them.
            assert [event["outcome"] for event in after] == ["about to", "refused"]
            assert eventually(lambda: sum(child.poll() is None for child in children) == 1)  # after its line
            daemon.end()
        assert sum(child.poll() is None for child in children) == 1


def a_line(**change: Any) -> dict[str, Any]:
    facts = {"start_time_seconds": 12.5, "clock_seconds": boot_clock() - 10, "boot": boot_id()}
    line = {"schema": 1, "time_unix_seconds": time.time() - 10, "kind": "terminate", "outcome": "about to", "pid": 4711}
    return line | {"facts": facts | change.pop("facts", {})} | change


def write(log: Path, *lines: dict[str, Any] | str) -> None:
    with log.open("a") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def test_no_log_means_no_actions(log: Path) -> None:
    assert past(log) == RecoveredActions()


def test_only_the_last_hour_counts_and_the_rotated_file_belongs_to_it(log: Path) -> None:
    long_ago: dict[str, Any] = {"time_unix_seconds": time.time() - guard_limits.HOUR - 60}
    long_ago["facts"] = {"clock_seconds": boot_clock() - guard_limits.HOUR - 60}
    rotated = log.with_name("events.jsonl.1")
    write(rotated, a_line(**long_ago, pid=1), "garbage of long ago", a_line(**long_ago), a_line())
    other = {"schema": 1, "time_unix_seconds": time.time(), "kind": "daemon", "outcome": "started"}
    write(log, other, a_line(pid=4712))

    found = past(log)
    assert [done.process for done in found.actions] == [(4711, 12.5), (4712, 12.5)]
    assert found.problem is None


@pytest.mark.parametrize("ahead", [3600.0, 1e9])
def test_a_clock_that_was_set_back_makes_no_action_older(log: Path, ahead: float) -> None:
    write(log, a_line(time_unix_seconds=time.time() + ahead, facts={"boot": "another"}))
    begun = boot_clock()
    (done,) = past(log).actions

    assert done.clock >= begun


def test_a_clock_that_was_set_forward_lets_nothing_of_this_boot_be_forgotten(log: Path) -> None:
    """As on a machine that boots with a wrong time and hears the right one after hours."""
    before = {"time_unix_seconds": time.time() - 2 * guard_limits.HOUR}
    note = {"schema": 1, **before, "kind": "note", "outcome": "cleared"}
    write(log, a_line(pid=1, facts={"boot": "another"}), a_line(**before), note, a_line(pid=4712))

    assert [done.process[0] for done in past(log).actions] == [4711, 4712]


@pytest.mark.parametrize(
    "damaged",
    [
        "garbage",
        '{"schema": 1, "time_unix_seconds": 17',
        "\0" * 4096,
        json.dumps(a_line(facts={"clock_seconds": "soon"})),
        json.dumps(a_line(outcome="perhaps")),
        json.dumps(a_line(pid="many")),
        json.dumps(a_line() | {"facts": [{"clock_seconds": 1}]}),
    ],
)
def test_a_damaged_line_counts_as_an_action_of_just_now(log: Path, damaged: str) -> None:
    write(log, a_line(), damaged)
    begun = boot_clock()
    found = past(log)

    assert "damaged" in (found.problem or "")
    assert [done.action for done in found.actions if done.live] == ["terminate"] * 2
    assert found.actions[-1].clock >= begun


@pytest.mark.parametrize("kind", ["directory", "fifo", "device"])
def test_no_process_is_hit_while_it_cannot_be_known_which_was(log: Path, kind: str) -> None:
    make = {"directory": os.mkdir, "fifo": os.mkfifo, "device": lambda path: os.symlink("/dev/null", path)}
    make[kind](log)
    begun = boot_clock()
    found = past(log)

    assert "cannot be read" in (found.problem or "")
    with a_scene() as scene:
        scene.context(limits=ActionLimits(list(found.actions)))
        said = scene.act()
        assert said.word == "refused"
        assert {failure.check for failure in said.failed} == {"rate", "victims"}
        assert said.wait and begun + guard_limits.HOUR - boot_clock() <= said.wait <= guard_limits.HOUR
        assert scene.lives()


def test_every_action_that_is_counted_has_its_action_in_its_line(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("job_of", "7"), ("against_cancelling", None), ("cancel", None)):
        monkeypatch.setattr(slurm_jobs, name, lambda *_, answer=answer: answer)
    of_jobs = {"checkpoint", "kill", "requeue"}  # not of any process: it answers, was asked to end, may wait again
    on_processes = {name for name, action in actions.ACTIONS.items() if action.on_process} - of_jobs
    for action in sorted(on_processes):
        with a_scene() as scene:
            scene.context(append=audit_log.append)
            assert scene.act(action).word == "sent"

    assert {done.action for done in past(log).actions} == on_processes


def test_a_daemon_says_what_it_cannot_know(tmp_path: Path, log: Path) -> None:
    write(log, '{"kind": "something else"}')
    with a_daemon(tmp_path) as daemon:
        (event,) = [event for event in daemon.events("daemon") if event["outcome"] == "past unknown"]

    assert "damaged lines in the audit log: 1" in event["message"]
