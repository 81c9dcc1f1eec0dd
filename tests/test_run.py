"""A job under supervision: what it gets, what reaches it, and how long its claim lasts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import GIB, a_device, a_process, a_snapshot
from wrapped import UUIDS, Wrapped, content, until

from gpuguard.meter import Meter

FAST = {"TICK_SECONDS": 0.05, "SAMPLE_SECONDS": 0.05, "FIRST_SAMPLE_SECONDS": 0.02}
# Leaves a process in a session of its own behind, prints its pid, and ends when PLACE/go is there.
LEAVING = """
import os, signal, sys, time
place, manner = sys.argv[1:]
leftover = os.fork()
if leftover == 0:
    os.setsid()
    os.closerange(0, 64 if manner == "without the claim" else 3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
print(leftover, flush=True)
while not os.path.exists(f"{place}/go"):
    time.sleep(0.01)
"""


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[Wrapped]:
    with Wrapped(tmp_path) as machine:
        yield machine


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def start_leaving(wrapped: Wrapped, manner: str = "", **options: object) -> tuple[subprocess.Popen[str], int]:
    """A wrapper whose job is about to end and to leave a process that uses the device, and that process."""
    constants = {"FIRST_SAMPLE_SECONDS": 60, "USER_POLL_SECONDS": 0.02}
    wrapper = wrapped.start(*python(LEAVING), str(wrapped.place), manner, constants=constants, **options)
    leftover = int(first_line(wrapper))
    wrapped.machine(processes=[leftover], memory_used=GIB)
    return wrapper, leftover


def first_line(wrapper: subprocess.Popen[str]) -> str:
    assert wrapper.stdout
    return wrapper.stdout.readline().strip()


def end(*wrappers: subprocess.Popen[str]) -> str:
    """Wait for the end, and return what the last one wrote to stderr."""
    return [wrapper.communicate(timeout=20)[1] for wrapper in wrappers][-1]


# What the job gets


def test_the_job_sees_its_devices_and_its_claim(wrapped):
    _, out, _ = wrapped.run("env")

    assert {"CUDA_VISIBLE_DEVICES=0", f"GPUGUARD_GPUS={UUIDS[0]}"} <= set(out.splitlines())


def test_the_job_has_the_claims_descriptors_and_no_other(wrapped):
    bare = subprocess.run(["ls", "-l", "/proc/self/fd"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    _, out, _ = wrapped.run("ls", "-l", "/proc/self/fd")

    more = [line.split()[-1] for line in out.splitlines()[4:] if "/proc/" not in line]
    assert len(out.splitlines()) == len(bare.stdout.splitlines()) + 2
    assert [f"lock/{UUIDS[0]}" in place or ".json" in place for place in more] == [True, True]


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)])
@pytest.mark.parametrize("blocked", [(), (signal.SIGTERM, signal.SIGUSR2)])
def test_the_job_ignores_and_blocks_the_same_signals_as_without_us(wrapped, ignored, blocked):
    def dispose() -> None:
        for signum in ignored:
            signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    look = ("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status")
    bare = subprocess.run(look, stdout=subprocess.PIPE, text=True, preexec_fn=dispose)

    assert wrapped.run(*look, preexec_fn=dispose)[1] == bare.stdout


def test_the_job_stays_in_our_process_group_and_session(wrapped):
    script = "import os; print(os.getpgid(0), os.getsid(0), os.getppid())"
    wrapper = wrapped.start(*python(script), start_new_session=True)

    assert first_line(wrapper).split() == [str(wrapper.pid)] * 3
    end(wrapper)


# What reaches the job


@pytest.mark.parametrize("name", ["TERM", "HUP", "USR1", "USR2", "CONT", "INT", "QUIT"])
def test_a_signal_sent_to_us_alone_reaches_the_job_once(wrapped, name):
    script = (
        "import signal, time; seen = []; "
        f"signal.signal(signal.SIG{name}, lambda *_: seen.append(1)); print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.2); print(len(seen))"
    )
    wrapper = wrapped.start(*python(script))
    first_line(wrapper)
    os.kill(wrapper.pid, getattr(signal, f"SIG{name}"))

    assert first_line(wrapper) == "1"
    end(wrapper)
    assert wrapper.returncode == 0


def test_no_signal_is_lost_while_the_job_is_being_started(wrapped):
    # As soon as the audit log shows the job, and before it can have done anything.
    wrappers = []
    for _ in range(5):
        (wrapped.place / "events").unlink(missing_ok=True)
        wrapper = wrapped.start("sleep", "60")
        until((wrapped.place / "events").exists)
        os.kill(wrapper.pid, signal.SIGTERM)
        end(wrapper)
        wrappers.append(wrapper)

    assert [wrapper.returncode for wrapper in wrappers] == [128 + signal.SIGTERM] * 5


def test_a_job_that_ignores_the_hang_up_survives_it(wrapped):
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.3; exit 4", preexec_fn=ignore)
    first_line(wrapper)
    os.kill(wrapper.pid, signal.SIGHUP)
    end(wrapper)

    assert wrapper.returncode == 4


def test_orphans_of_the_job_are_collected(wrapped):
    script = "for i in 1 2 3; do (sh -c 'sleep 0.05' &) ; done; echo $PPID; sleep 0.5"
    wrapper = wrapped.start("sh", "-c", script)
    parent = first_line(wrapper)
    time.sleep(0.3)

    assert zombies_of(parent) == []
    end(wrapper)


def zombies_of(parent: str) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):  # not ps: a bare machine has none
        with contextlib.suppress(OSError):
            state, of = place.read_text().rpartition(") ")[2].split()[:2]
            found += [place.parent.name] if (state, of) == ("Z", parent) else []
    return found


# While it runs


def test_a_lock_that_the_job_gave_away_is_taken_again(wrapped):
    script = """
import fcntl, os, time
for name in os.listdir('/proc/self/fd'):
    try:
        if '/lock/' in os.readlink(f'/proc/self/fd/{name}'): fcntl.flock(int(name), fcntl.LOCK_UN)
    except OSError: pass
print('given away', flush=True); time.sleep(60)
"""
    wrapper = wrapped.start(*python(script), constants=FAST)
    first_line(wrapper)

    until(wrapped.is_claimed)
    wrapper.terminate()
    assert "LOST" not in end(wrapper)


def test_a_claim_that_is_lost_is_said_loudly_once_and_the_job_goes_on(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.6; exit 6", constants=FAST)
    first_line(wrapper)
    lock = wrapped.claims / "lock" / UUIDS[0]
    lock.rename(lock.with_suffix(".stolen"))
    err = end(wrapper)

    assert wrapper.returncode == 6
    assert err.count("CLAIM LOST") == 1
    assert [event["outcome"] for event in wrapped.events() if event["kind"] == "claim lost"] == ["job goes on"]


def test_a_driver_that_fails_costs_the_numbers_and_not_the_job(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.3; exit 6", constants=FAST)
    first_line(wrapper)
    wrapped.machine(fail=True)
    end(wrapper)

    assert wrapper.returncode == 6
    assert wrapped.events()[-1]["outcome"] == "driver unreachable"
    assert not wrapped.is_claimed()


def test_a_driver_that_fails_is_asked_ever_more_rarely(wrapped):
    wrapped.machine(fail=False)
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.8", constants=FAST)
    first_line(wrapper)
    wrapped.machine(fail=True)
    end(wrapper)

    assert wrapped.samples <= 8  # 16 without a longer and longer pause


def test_the_numbers_of_the_job_are_in_its_event(wrapped):
    wrapped.machine(energy=1000.0)
    wrapper = wrapped.start("sh", "-c", "echo ready; exec sleep 60", constants=FAST)
    first_line(wrapper)
    until(lambda: wrapped.samples >= 2)
    wrapped.machine(memory_used=61 * GIB, utilization=80.0, energy=4600.0)
    before = wrapped.samples
    until(lambda: wrapped.samples >= before + 3)
    wrapped.machine(energy=4600.0)
    wrapper.terminate()
    end(wrapper)

    facts = wrapped.events()[-1]["facts"]
    assert (facts["peak_memory_bytes"], facts["energy_joules"], facts["exit_status"]) == (61 * GIB, 3600.0, 143)
    assert 0 < facts["mean_utilization_percent"] <= 80


def test_a_job_shorter_than_a_blink_costs_one_sample(wrapped):
    wrapped.run("true")

    assert wrapped.samples == 1


def test_unknown_numbers_stay_unknown():
    meter = Meter([a_device(0)])
    for _ in range(3):
        meter.add(a_snapshot(a_device(0, memory_used=None, utilization=None, total_energy=None)))

    assert (meter.peak_memory, meter.utilization(), meter.energy()) == (None, None, None)


def test_an_energy_counter_that_was_set_back_is_unknown():
    meter = Meter([a_device(0), a_device(1)])
    for first in (5000.0, 10.0):
        meter.add(a_snapshot(a_device(0, total_energy=first), a_device(1, total_energy=9000.0)))

    assert meter.energy() is None


# When it has ended


def test_a_leftover_that_uses_no_device_does_not_keep_the_claim(wrapped):
    wrapper, leftover = start_leaving(wrapped)
    wrapped.machine()
    (wrapped.place / "go").touch()
    end(wrapper)

    assert (wrapper.returncode, wrapped.is_claimed()) == (0, False)
    os.kill(leftover, signal.SIGKILL)


@pytest.mark.parametrize("manner", ["", "without the claim"])
def test_a_leftover_that_uses_the_device_keeps_the_claim_until_it_ends(wrapped, manner):
    wrapper, leftover = start_leaving(wrapped, manner)
    name = content(Path(f"/proc/{leftover}/comm")).strip()
    (wrapped.place / "go").touch()
    assert wrapper.stderr

    assert wrapper.stderr.readline() == (
        f"gpuguard: the job ended, but pid {leftover} ({name}) still uses GPU 0: the claim stays until that ends.\n"
    )
    assert wrapped.is_claimed()
    os.kill(leftover, signal.SIGKILL)
    wrapped.machine()
    end(wrapper)
    assert (wrapper.returncode, wrapped.is_claimed()) == (0, False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_leftover_uses_the_device_leaves_the_claim_to_it(wrapped, signum):
    wrapper, leftover = start_leaving(wrapped)
    (wrapped.place / "go").touch()
    assert wrapper.stderr and "the job ended, but" in wrapper.stderr.readline()
    os.kill(wrapper.pid, signum)
    end(wrapper)

    assert wrapper.returncode == -signum
    assert wrapped.is_claimed()
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


def test_a_stranger_on_the_device_does_not_keep_the_claim(wrapped):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.1")
        first_line(wrapper)
        wrapped.machine(processes=[stranger.pid], memory_used=2 * GIB)
        wrapped.machine(processes=[stranger.pid], memory_used=GIB)
        end(wrapper)

        assert wrapped.events()[-1]["outcome"] == "settled"
        stranger.kill()


def test_the_claim_stays_until_the_memory_has_settled(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.1", constants={"QUIET_SECONDS": 0.1})
    first_line(wrapper)
    wrapped.machine(memory_used=30 * GIB)
    assert wrapper.stderr

    assert "waiting for the driver to free the memory of GPU 0" in wrapper.stderr.readline()
    assert wrapped.is_claimed()
    wrapped.machine()
    end(wrapper)
    assert wrapped.events()[-1]["outcome"] == "settled"


def test_memory_that_never_settles_does_not_keep_the_claim_for_ever(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.1", constants={"SETTLE_SECONDS": 0.2})
    first_line(wrapper)
    wrapped.machine(memory_used=30 * GIB)
    end(wrapper)

    assert wrapped.events()[-1]["outcome"] == "memory did not settle"
    assert not wrapped.is_claimed()


def test_memory_of_a_process_that_is_dead_but_still_listed_is_waited_for(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo $$; sleep 0.1", constants={"QUIET_SECONDS": 0.1})
    wrapped.machine(memory_used=GIB, processes=[int(first_line(wrapper))])
    assert wrapper.stderr

    assert "waiting for the driver to free the memory" in wrapper.stderr.readline()
    wrapped.machine()
    end(wrapper)


def test_a_signal_while_the_memory_settles_releases_at_once(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.1; exit 9", constants={"QUIET_SECONDS": 0})
    first_line(wrapper)
    wrapped.machine(memory_used=30 * GIB)
    assert wrapper.stderr
    wrapper.stderr.readline()
    os.kill(wrapper.pid, signal.SIGTERM)
    end(wrapper)

    assert (wrapper.returncode, wrapped.is_claimed()) == (9, False)
    assert wrapped.events()[-1]["outcome"] == "interrupted"


# The time limit


def test_after_the_time_limit_the_job_gets_sigterm_and_the_exit_code_is_124(wrapped):
    trap = "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    status, out, err = wrapped.run("sh", "-c", trap, time_limit=0.3)

    assert (status, out) == (124, "ready\nbye\n")
    assert "the time limit is over: SIGTERM to the job." in err


def test_a_job_that_ends_before_its_time_limit_keeps_its_own_status(wrapped):
    assert wrapped.run("sh", "-c", "exit 3", time_limit=30)[0] == 3


def test_after_the_grace_all_processes_of_the_job_are_killed_and_nobody_else(wrapped, tmp_path):
    pids = tmp_path / "pids"
    deaf = f"trap '' TERM; echo $$ >> {pids}; setsid sh -c 'echo $$ >> {pids}; trap \"\" TERM; sleep 60' & sleep 60"
    with subprocess.Popen(["sleep", "60"]) as bystander:
        began = time.monotonic()
        status, _, err = wrapped.run("sh", "-c", deaf, time_limit=0.5, grace=0.3)

        assert (status, time.monotonic() - began < 10) == (124, True)
        assert "SIGKILL to the job and all its processes" in err
        assert [Path(f"/proc/{pid}").exists() for pid in content(pids).split()] == [False, False]
        assert bystander.poll() is None
        bystander.kill()


def test_the_grace_is_for_a_leftover_that_uses_the_device_too(wrapped):
    wrapper, leftover = start_leaving(wrapped, time_limit=1.0, grace=0.2)
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


def test_every_signal_of_the_time_limit_is_in_the_audit_log_before_it_is_sent(wrapped, tmp_path):
    copy = tmp_path / "seen"
    trap = f"trap 'cp {wrapped.place}/events {copy}; exit 0' TERM; echo ready; while :; do sleep 0.02; done"
    wrapped.run("sh", "-c", trap, time_limit=0.3)

    seen = [json.loads(line) for line in copy.read_text().splitlines()]
    assert (seen[-1]["kind"], seen[-1]["outcome"]) == ("time limit", "SIGTERM")


def test_a_process_builder_is_what_the_backend_shows():
    # Guards the stand-in: a process on the device must be seen as one.
    assert a_snapshot(a_device(processes=(a_process(7),))).devices[0].processes == (a_process(7),)
