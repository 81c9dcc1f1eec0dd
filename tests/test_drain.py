"""The end of a job: who keeps its claim, until when, and what its time limit does about it."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil
import pytest
from builders import GIB, MIB, Reticent, a_device, a_process
from nodes import until
from proc import runs
from supervised_job import FileBackend, Wrapped, a_directory, content, end, first_line, python

from gpuguard import procfs
from gpuguard.claims.records import YIELD, ReleaseRequest, read_records
from gpuguard.daemon.release import BY_JOB, release
from gpuguard.jobs import processes
from gpuguard.jobs.processes import NEVER, Escalation, EscalationStep
from gpuguard.model import MEMORY, PROCESSES, GpuProcess

# Leaves a process in a session of its own behind, prints its pid, and ends when PLACE/go is there.
LEAVING = """
import os, signal, sys, time
place, manner = sys.argv[1:]
leftover = os.fork()
if leftover == 0:
    os.setsid()
    os.closerange(0, 64 if manner == "without the claim" else 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"{place}/left", "w").close()
    time.sleep(60)
while not os.path.exists(f"{place}/left"):
    time.sleep(0.01)
print(leftover, flush=True)
while not os.path.exists(f"{place}/go"):
    time.sleep(0.01)
"""


def start_leaving(wrapped: Wrapped, manner: str = "", **options: object) -> tuple[subprocess.Popen[str], int]:
    """A wrapper whose job is about to end and to leave a process that uses the device, and that process."""
    constants = {"FIRST_SAMPLE_SECONDS": 60, "USER_POLL_SECONDS": 0.02}
    wrapper = wrapped.start(*python(LEAVING), str(wrapped.place), manner, constants=constants, **options)
    leftover = int(first_line(wrapper))
    wrapped.machine(processes=[leftover], memory_used=GIB)
    return wrapper, leftover


WORK = "import os, pathlib, sys, time; (at := pathlib.Path(sys.argv[1])).joinpath('pid').write_text(str(os.getpid()))"
WORK += "\nwhile not at.joinpath('end').exists(): time.sleep(0.02)"
FORK_TWICE = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(3, 256)
        os.execv(sys.executable, [sys.executable, "-c", {WORK!r}, sys.argv[1]])
os._exit(0)
"""
ORPHAN = f"""
import multiprocessing, os, sys
def work():
    exec({WORK!r})
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    os._exit(0)
"""
LEAVING_WORK = {
    "nohup in a shell": ("sh", "-c", 'nohup "$@" > /dev/null 2>&1 & exit 0', "sh", *python(WORK)),
    "setsid": ("sh", "-c", 'setsid "$@" & exit 0', "sh", *python(WORK)),
    "double fork without descriptors": python(FORK_TWICE),
    "multiprocessing child of a parent that ends": python(ORPHAN),
    "tmux": ("sh", "-c", 'at=$1; shift; exec tmux -S "$at/tmux" -f /dev/null new -d "$@"', "sh"),
}


@pytest.mark.parametrize("how", LEAVING_WORK)
def test_a_claim_lasts_as_long_as_any_process_of_the_job(wrapped, tmp_path, how):
    command = (*LEAVING_WORK[how], str(tmp_path))
    if how == "tmux":
        if shutil.which("tmux") is None:
            pytest.skip("what leaves a job in tmux (no tmux: apt-get install tmux)")
        command = (*command, *python(WORK), str(tmp_path))
    wrapper = wrapped.start(*command, constants={"QUIET_SECONDS": 0.0, "USER_POLL_SECONDS": 0.1})
    assert wrapper.stderr
    told = wrapper.stderr.readline()

    (claim,) = {event["claim"] for event in wrapped.events()}
    assert re.fullmatch(
        r"gpuguard: the job ended, but \d process(es)? of it still runs? \(pid .*\): the claim stays until "
        rf"(it ends|they end)\.  `gpuguard release {claim}` releases it before\.\n",
        told,
    )
    until(lambda: content(tmp_path / "pid"))
    assert wrapped.is_claimed()
    (tmp_path / "end").touch()
    assert end(wrapper).startswith("ended: JobEnd(status=0,")
    assert (wrapper.returncode, wrapped.is_claimed()) == (0, False)


def test_a_claim_without_a_driver_lasts_as_long_as_any_process_of_the_job(wrapped):
    wrapper, leftover = start_leaving(wrapped)
    wrapped.machine(fail=True)
    (wrapped.place / "go").touch()
    until(lambda: wrapped.samples > 3)

    assert wrapped.is_claimed()
    os.kill(leftover, signal.SIGKILL)
    end(wrapper)
    assert wrapped.events()[-1]["outcome"] == "driver unreachable"


@pytest.mark.parametrize("seconds", [None, 0.0, 0.5], ids=["as the site says", "at once", "after a time"])
def test_with_leftover_release_a_process_that_uses_no_device_does_not_keep_the_claim(wrapped, tmp_path, seconds):
    (tmp_path / "line.yaml").write_text("leftover: release\n")
    site = {"env": {**os.environ, "GPUGUARD_LINE": str(tmp_path / "line.yaml")}}
    wrapper, leftover = start_leaving(wrapped, **(site if seconds is None else {"leftover": seconds}))
    wrapped.machine()
    (wrapped.place / "go").touch()

    told = end(wrapper)
    assert not seconds or ("still runs (pid" in told and "for 500ms without a GPU: the claim is released." in told)
    assert (wrapper.returncode, wrapped.is_claimed()) == (0, False)
    os.kill(leftover, signal.SIGKILL)


def test_a_child_from_before_the_job_does_not_keep_the_claim(wrapped):
    before = 'sleep 60 & echo $!; exec "$@"'
    words = ["sh", "-c", before, "sh", *wrapped.words("true")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as wrapper:
        sleeping = int(first_line(wrapper))
        until(lambda: wrapped.place.joinpath("events").exists() and len(wrapped.events()) == 2)
        os.kill(sleeping, signal.SIGKILL)

    assert not wrapped.is_claimed()


def test_what_a_script_started_before_it_became_gpuguard_outlives_the_time_limit_of_the_job(wrapped):
    before = 'sh -c "sleep 60 & echo \\$!; wait" & exec "$@"'
    deaf = wrapped.words("sh", "-c", "trap '' TERM; echo ready; sleep 60; sleep 60", time_limit=0.3, grace=0.2)
    with subprocess.Popen(["sh", "-c", before, "sh", *deaf], stdout=subprocess.PIPE, text=True) as wrapper:
        (sleeping,) = map(int, {first_line(wrapper), first_line(wrapper)} - {"", "ready"})
        wrapper.wait(60)

        assert (wrapper.returncode, runs(sleeping)) == (124, True)
        os.kill(sleeping, signal.SIGKILL)


# What a script starts before it becomes gpuguard starts and leaves a process itself, while the job runs.
HELPER = """
place=$1; shift
(until [ -e "$place/started" ]; do sleep 0.02; done
 (sleep 60 & echo $! > "$place/of-the-helper.new"); mv "$place/of-the-helper.new" "$place/of-the-helper") &
exec "$@"
"""
LEAVING_ONE = """
trap '' TERM
(sleep 60 & echo $! > "$0/of-the-job")
touch "$0/started"
until [ -e "$0/of-the-helper" ]; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("more", "status"), [("sleep 60; sleep 60", 124), ("", 0)], ids=["job at a limit", "ended job"]
)
def test_what_a_process_from_before_the_job_leaves_is_not_the_jobs(wrapped, tmp_path, more, status):
    job = wrapped.words("sh", "-c", LEAVING_ONE + more, str(tmp_path), time_limit=2.0, grace=0.2)
    wrapper = subprocess.run(["sh", "-c", HELPER, "sh", str(tmp_path), *job], stderr=subprocess.DEVNULL, timeout=30)
    of_the_helper, of_the_job = (int((tmp_path / name).read_text()) for name in ("of-the-helper", "of-the-job"))

    assert (wrapper.returncode, runs(of_the_job), runs(of_the_helper)) == (status, False, True)
    assert not wrapped.is_claimed()
    os.kill(of_the_helper, signal.SIGKILL)


def test_a_claim_that_leftovers_keep_can_be_released(wrapped):
    wrapper, leftover = start_leaving(wrapped)
    wrapped.machine()
    (wrapped.place / "go").touch()
    until(lambda: wrapped.samples > 1)
    (claim,) = read_records(a_directory(wrapped.claims))
    request = ReleaseRequest(YIELD, "root", "idle", time.time())

    assert release(a_directory(wrapped.claims), claim, request, FileBackend(wrapped.place)) == BY_JOB
    assert f"the claim {claim.id} was released" in end(wrapper)
    assert not wrapped.is_claimed()
    assert wrapped.events()[-1]["outcome"] == "released"
    os.kill(leftover, signal.SIGKILL)


@pytest.mark.parametrize("manner", ["", "without the claim"])
def test_a_leftover_that_uses_the_device_keeps_the_claim_until_it_ends(wrapped, manner):
    wrapper, leftover = start_leaving(wrapped, manner)
    name = content(Path(f"/proc/{leftover}/comm")).strip()
    (wrapped.place / "go").touch()

    assert wrapper.stderr.readline() == (
        f"gpuguard: the job ended, but pid {leftover} ({name}) still uses GPU 0: the claim stays until that ends.\n"
    )
    assert wrapped.is_claimed()
    os.kill(leftover, signal.SIGKILL)
    wrapped.machine()
    end(wrapper)
    assert (wrapper.returncode, wrapped.is_claimed()) == (0, False)


@pytest.mark.parametrize(
    ("signum", "manner", "said"),
    [
        (signal.SIGTERM, "", "and the claim is theirs now."),
        (signal.SIGINT, "", "and the claim is theirs now."),
        (signal.SIGTERM, "without the claim", "but without the locks of the claim, which ends."),
    ],
)
def test_a_signal_while_a_leftover_uses_the_device_leaves_the_claim_to_it_if_it_has_the_locks(
    wrapped, signum, manner, said
):
    wrapper, leftover = start_leaving(wrapped, manner)
    (wrapped.place / "go").touch()
    assert wrapper.stderr and "the job ended, but" in wrapper.stderr.readline()
    os.kill(wrapper.pid, signum)

    assert said in end(wrapper)
    assert (wrapper.returncode, wrapped.is_claimed()) == (-signum, not manner)
    os.kill(leftover, signal.SIGKILL)
    until(lambda: not wrapped.is_claimed())


def test_a_driver_that_fails_does_not_take_the_claim_from_a_leftover_that_was_seen(wrapped):
    wrapper, leftover = start_leaving(wrapped, "without the claim")
    (wrapped.place / "go").touch()
    assert wrapper.stderr and "the job ended, but" in wrapper.stderr.readline()
    wrapped.machine(fail=True)
    before = wrapped.samples
    until(lambda: wrapped.samples > before + 3)

    assert wrapped.is_claimed()
    os.kill(leftover, signal.SIGKILL)
    end(wrapper)


def after_a_job(
    wrapped: Wrapped, listed: int | None = None, memory_used: int = 30 * GIB, status: int = 0, **constants: float
) -> subprocess.Popen[str]:
    """A wrapper whose job ends on a device with so much in use, by the process *listed*; 0: the job itself."""
    waits = f"echo $$; until [ -e {wrapped.place}/go ]; do sleep 0.02; done; exit {status}"
    wrapper = wrapped.start("sh", "-c", waits, constants=constants)
    job = int(first_line(wrapper))
    wrapped.machine(memory_used=memory_used, processes=[] if listed is None else [listed or job])
    (wrapped.place / "go").touch()
    return wrapper


def test_a_stranger_on_the_device_does_not_keep_the_claim(wrapped, sleeper):
    end(after_a_job(wrapped, sleeper, GIB))

    assert wrapped.events()[-1]["outcome"] == "settled"


def test_the_claim_stays_until_the_memory_has_settled(wrapped):
    wrapper = after_a_job(wrapped, QUIET_SECONDS=0.1)

    assert "waiting for the driver to free the memory of GPU 0" in wrapper.stderr.readline()
    assert wrapped.is_claimed()
    wrapped.machine()
    end(wrapper)
    assert wrapped.events()[-1]["outcome"] == "settled"


def test_memory_that_never_settles_does_not_keep_the_claim_for_ever(wrapped):
    end(after_a_job(wrapped, DRAIN_SECONDS=0.2))

    assert wrapped.events()[-1]["outcome"] == "memory did not settle"
    assert not wrapped.is_claimed()


def test_memory_of_a_process_that_is_dead_but_still_listed_is_waited_for(wrapped):
    wrapper = after_a_job(wrapped, 0, GIB, QUIET_SECONDS=0.1)

    assert "waiting for the driver to free the memory" in wrapper.stderr.readline()
    wrapped.machine()
    end(wrapper)


def test_a_signal_while_the_memory_settles_releases_at_once(wrapped):
    wrapper = after_a_job(wrapped, status=9, QUIET_SECONDS=0)
    wrapper.stderr.readline()
    os.kill(wrapper.pid, signal.SIGTERM)
    end(wrapper)

    assert (wrapper.returncode, wrapped.is_claimed()) == (9, False)
    assert wrapped.events()[-1]["outcome"] == "interrupted"


def asked_after_a_job(
    memory_used: int | None,
    others: Collection[tuple[int, float]] | None = None,
    before: Collection[GpuProcess] = (),
    held: int = 4 * MIB,
) -> list[set[str]]:
    """What a driver is asked whose device *held* so much before a job that left all children but *others*: none."""
    driver = Reticent(a_device(0, memory_used=memory_used))
    there = processes.children() or frozenset()
    drain = processes.Drain(
        (a_device(0, memory_used=held, processes=tuple(before)),),
        driver,
        pause=lambda seconds: None,
        notify=lambda text: None,
        count=None,
        tolerance=512 * MIB,
        others=there if others is None else frozenset(others),
        longest=0.0,
        leftover=lambda: 0.0,
    )
    outcome = drain.wait_until_free()
    assert outcome == ("settled" if not memory_used or memory_used <= held + 512 * MIB else "memory did not settle")
    return [set(fields) for fields, _ in driver.asked]


@pytest.mark.parametrize(
    ("memory_used", "held", "asked"),
    [
        (300 * MIB, 4 * MIB, [{MEMORY}]),
        (5 * GIB + 512 * MIB, 5 * GIB, [{MEMORY}]),  # what a device held before is no residue
        (GIB, 4 * MIB, [{MEMORY}, {MEMORY, PROCESSES}]),
        (None, 4 * MIB, [{MEMORY}, {MEMORY, PROCESSES}]),
    ],
)
def test_only_memory_that_is_more_than_before_or_unknown_is_judged_with_the_processes(memory_used, held, asked):
    assert asked_after_a_job(memory_used, held=held)[:2] == asked


def test_the_start_time_of_a_process_is_in_seconds_since_boot(sleeper):
    stat = procfs.read_stat(sleeper)

    assert stat and stat.parent == os.getpid()
    since_boot = psutil.Process(sleeper).create_time() - psutil.boot_time()
    assert stat.start_time == pytest.approx(since_boot, abs=2.0)


def test_beside_a_process_of_unknown_memory_nobody_knows_what_there_was_before():
    before = [a_process(os.getpid(), memory_used=None)]

    assert asked_after_a_job(4 * MIB, before=before) == [{MEMORY}, {MEMORY, PROCESSES}]


def test_while_something_of_the_job_lives_if_with_the_pid_of_a_child_from_before_the_processes_are_asked_for(sleeper):
    there = processes.children() or ()
    others = {child for child in there if child[0] != sleeper}

    for before in (others, others | {(sleeper, start - 0.01) for pid, start in there if pid == sleeper}):
        assert asked_after_a_job(4 * MIB, before) == [{MEMORY, PROCESSES}]


@pytest.mark.parametrize("untold", ["own_children", "stat_of"])
def test_where_the_kernel_tells_no_children_or_nothing_of_them_they_may_be_of_the_job(sleeper, monkeypatch, untold):
    monkeypatch.setattr(procfs, untold, lambda *_: None)

    assert asked_after_a_job(4 * MIB) == [{MEMORY, PROCESSES}]


def test_children_are_those_of_every_thread_until_they_are_reaped():
    before = processes.children()
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    started: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        done.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: started)
    there = processes.children()
    assert before is not None and there is not None
    assert {pid for pid, _ in there - before} == {ended.pid, started[0].pid}
    started[0].kill()
    started[0].wait()
    ended.wait()
    done.set()
    thread.join()
    assert (processes.children() or set()) <= before


def test_after_the_time_limit_the_job_gets_sigterm_which_the_audit_log_says_before_and_the_exit_code_is_124(
    wrapped, tmp_path
):
    copy = tmp_path / "seen"
    trap = f"trap 'cp {wrapped.place}/events {copy}; echo bye; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    status, out, err = wrapped.run("sh", "-c", trap, time_limit=0.8)
    seen = json.loads(copy.read_text().splitlines()[-1])

    assert (status, out) == (124, "ready\nbye\n")
    assert "the time limit is over: SIGTERM to the job." in err
    assert (seen["kind"], seen["outcome"]) == ("time limit", "SIGTERM")


def test_after_the_grace_all_processes_of_the_job_are_killed_and_nobody_else(wrapped, tmp_path, sleeper):
    pids = tmp_path / "pids"
    deaf = f"trap '' TERM; echo $$ >> {pids}; setsid sh -c 'echo $$ >> {pids}; trap \"\" TERM; sleep 600' & sleep 600"
    status, _, err = wrapped.run("sh", "-c", deaf, time_limit=1.0, grace=0.3)

    assert status == 124
    assert "SIGKILL to the job and all its processes" in err
    killed = content(pids).split()
    assert len(killed) == 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed))  # init may take a while to reap them
    assert runs(sleeper)


def test_the_grace_is_for_a_leftover_that_uses_the_device_too(wrapped):
    wrapper, leftover = start_leaving(wrapped, time_limit=2.0, grace=0.2)
    (wrapped.place / "go").touch()
    until(lambda: not Path(f"/proc/{leftover}").exists())
    wrapped.machine()
    end(wrapper)

    assert wrapper.returncode == 0, "the job itself had ended in time"


def test_a_stopped_job_is_continued_so_that_the_time_limit_can_end_it(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; kill -STOP $$; exit 5", time_limit=0.4)
    first_line(wrapper)
    end(wrapper)

    assert wrapper.returncode == 124


USR1 = int(signal.SIGUSR1)
AT_ITS_TIME = {"time_limit": 600.0, "checkpoint": USR1}


def an_escalation(time_limit: float | None = None, grace: float = 60.0, checkpoint: int | None = None) -> Escalation:
    """Of a job that began at 1000."""
    return Escalation(1000.0, time_limit, grace, checkpoint)


def signals_of(escalation: Escalation) -> list[tuple[float, str]]:
    """Every signal that is still to come, each taken when it is due."""
    taken = list[tuple[float, str]]()
    while escalation.due != NEVER:
        due = escalation.due
        assert escalation.next_step(due - 0.001) is None
        taken.append((due, step_at(escalation, due).name))
    return taken


def step_at(escalation: Escalation, now: float) -> EscalationStep:
    step = escalation.next_step(now)
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("facts", "begins", "signals"),
    [
        ({}, None, []),
        ({"checkpoint": USR1}, None, []),
        ({"time_limit": 600.0}, None, [(1600.0, "SIGTERM"), (1660.0, "SIGKILL")]),
        (AT_ITS_TIME, None, [(1540.0, "SIGUSR1"), (1600.0, "SIGTERM"), (1660.0, "SIGKILL")]),
        # Half of it is left to start, and half to save.
        ({**AT_ITS_TIME, "time_limit": 30.0}, None, [(1015.0, "SIGUSR1"), (1030.0, "SIGTERM"), (1090.0, "SIGKILL")]),
        ({"checkpoint": USR1}, 1234.0, [(1234.0, "SIGUSR1"), (1294.0, "SIGTERM"), (1354.0, "SIGKILL")]),
        ({"time_limit": 600.0}, 1234.0, [(1234.0, "SIGTERM"), (1294.0, "SIGKILL")]),
    ],
)
def test_the_time_limit_has_its_checkpoint_a_grace_before_it_and_any_other_limit_begins_at_once(facts, begins, signals):
    escalation = an_escalation(**facts)
    if begins is not None:
        escalation.begin(begins, "limit", "too much", "memory-limit")

    assert signals_of(escalation) == signals


def test_once_the_checkpoint_signal_of_the_time_limit_is_sent_no_other_limit_takes_its_grace_away() -> None:
    escalation = an_escalation(**AT_ITS_TIME)
    escalation.next_step(1540.0)
    escalation.begin(1550.0, "limit", "too much", "memory-limit")

    assert signals_of(escalation) == [(1600.0, "SIGTERM"), (1660.0, "SIGKILL")]


def test_a_signal_that_comes_late_leaves_the_whole_grace_before_the_next() -> None:
    escalation = an_escalation(**AT_ITS_TIME)
    escalation.next_step(1700.0)

    assert signals_of(escalation) == [(1760.0, "SIGTERM"), (1820.0, "SIGKILL")]


def test_each_signal_says_why_it_comes() -> None:
    escalation = an_escalation(**AT_ITS_TIME)
    said = [step_at(escalation, 9999.0 + 60 * number) for number in range(3)]

    assert [step.words for step in said] == [
        "the time limit is over in 1m: SIGUSR1 to the job.",
        "the time limit is over: SIGTERM to the job.",
        "the grace is over too: SIGKILL to the job and all its processes.",
    ]
    assert {step.kind for step in said} == {"time limit"}
