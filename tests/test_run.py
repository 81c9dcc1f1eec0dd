"""A job under supervision: what it gets, what reaches it, and how long its claim lasts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import GIB, a_device, a_snapshot
from nodes import until
from proc import children_of
from wrapped import UUIDS, end, first_line, python

from gpuguard.history.schema import DEVICE_COLUMNS, UsageSums
from gpuguard.run import JobMeter

FAST = {"TICK_SECONDS": 0.05, "SAMPLE_SECONDS": 0.05, "FIRST_SAMPLE_SECONDS": 0.02}


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

    assert "Z" not in children_of(parent).values()
    end(wrapper)


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


def test_a_driver_that_fails_costs_the_numbers_and_not_the_job_and_is_asked_ever_more_rarely(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo ready; sleep 0.8; exit 6", constants=FAST)
    first_line(wrapper)
    wrapped.machine(fail=True)
    end(wrapper)

    assert wrapper.returncode == 6
    assert wrapped.samples <= 8  # 16 without a longer and longer pause
    assert wrapped.events()[-1]["outcome"] == "driver unreachable"
    assert not wrapped.is_claimed()


def test_a_machine_without_files_for_a_moment_costs_the_job_neither_its_supervisor_nor_its_limits(wrapped):
    """The first tick that found no file, no memory or no lock ended `gpuguard run` with 125, and the job ran on."""
    wait = f"echo ready; while [ ! -e {wrapped.place}/go ]; do sleep 0.02; done; exit 6"
    wrapper = wrapped.start("sh", "-c", wait, constants=FAST)
    first_line(wrapper)
    samples = wrapped.place / "samples"
    samples.unlink(missing_ok=True)
    samples.mkdir()
    said = wrapper.stderr.readline()
    samples.rmdir()
    (wrapped.place / "go").touch()

    assert "cannot be looked after now" in said
    assert "looked after" not in end(wrapper)
    assert wrapper.returncode == 6 and not wrapped.is_claimed()


def test_the_numbers_of_the_job_are_in_its_event(wrapped):
    wrapped.machine(energy=1000.0)
    wrapper = wrapped.start("sh", "-c", "echo ready; exec sleep 60", constants=FAST)
    first_line(wrapper)
    until(lambda: wrapped.samples >= 2)
    wrapped.machine(memory_used=61 * GIB, utilization=80.0, energy=1010.0)
    before = wrapped.samples
    until(lambda: wrapped.samples >= before + 3)
    wrapped.machine(energy=1010.0)
    wrapper.terminate()
    end(wrapper)

    facts = wrapped.events()[-1]["facts"]
    assert (facts["peak_memory_bytes"], facts["energy_joules"], facts["exit_status"]) == (61 * GIB, 10.0, 143)
    assert 0 < facts["mean_utilization_percent"] <= 80


def test_unknown_numbers_stay_unknown():
    meter = JobMeter([a_device(0)])
    for clock in range(3):
        unknown = a_device(0, memory_used=None, utilization=None, total_energy=None)
        meter.add(a_snapshot(unknown, clock=float(clock)))

    assert (meter.peak_memory, meter.utilization(), meter.energy()) == (None, None, None)


def test_an_energy_counter_that_was_set_back_is_unknown():
    meter = JobMeter([a_device(0), a_device(1)])
    for clock, first in enumerate((5000.0, 10.0)):
        meter.add(a_snapshot(a_device(0, total_energy=first), a_device(1, total_energy=9000.0), clock=float(clock)))

    assert meter.energy() is None


def test_the_summary_of_a_job_and_the_usage_store_sum_alike():
    """Samples of a job come closer together at first: each counts for the time since the one before."""
    meter, tally = JobMeter([a_device(0)]), UsageSums()
    for clock, utilization, joules in ((0.0, 0.0, 0.0), (1.0, 90.0, 300.0), (10.0, 10.0, 1200.0)):
        device = a_device(0, utilization=utilization, total_energy=joules)
        snapshot = a_snapshot(device, clock=clock, taken_at=1_700_000_000.0 + clock)
        meter.add(snapshot)
        tally.add(snapshot, longest=60.0)
    rows = [dict(zip(DEVICE_COLUMNS, *slot.devices.values(), strict=True)) for slot in tally.slots.values()]

    def stored(column: str) -> float:
        return sum(row[column] or 0.0 for row in rows)

    assert meter.energy() == pytest.approx(stored("energy_joules")) == pytest.approx(1200.0)
    mean = stored("utilization_percent_sum") / stored("seen_ms") * 1000
    assert meter.utilization() == pytest.approx(mean) == pytest.approx(18.0)


# Each job in a process of its own, forked from one that has imported everything: 320 of them take seconds.
MANY = """
import os, sys
from pathlib import Path
sys.path.insert(0, "{tests}")
from wrapped import FileBackend, Request, a_directory, acquire, become_subreaper, run
become_subreaper()
place = Path(sys.argv[1])
os.environ["GPUGUARD_EVENTS"] = "/dev/null"
(place / "samples").write_text("")
for script in sys.stdin.read().splitlines():
    pid = os.fork()
    if pid == 0:
        backend = FileBackend(place)
        claim = acquire(backend, Request(devices=("0",)), a_directory(place / "claims"))
        ended = run.run(["sh", "-c", script], claim, backend)
        os._exit(ended.status if ended.die_of is None else 255)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
SIGNALS = sorted(signal.valid_signals() - STOPPING)


def statuses(place: Path, scripts: list[str]) -> list[int]:
    program = MANY.format(tests=Path(__file__).parent)
    words = [sys.executable, "-c", program, str(place)]
    # Against a hang: 256 jobs take 15 s, and were seen to take more than 60 where others compute.
    done = subprocess.run(words, input="\n".join(scripts), stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [int(line) for line in done.stdout.split()]


def test_every_exit_code_comes_through(wrapped):
    assert statuses(wrapped.place, [f"exit {code}" for code in range(256)]) == list(range(256))


def test_every_signal_becomes_what_a_shell_says_of_it(wrapped):
    scripts = [f"ulimit -c 0; kill -{int(signum)} $$; exit 7" for signum in SIGNALS]
    bare = [subprocess.run(["sh", "-c", script]).returncode for script in scripts]

    assert statuses(wrapped.place, scripts) == [128 - code if code < 0 else code for code in bare]
    assert sum(code < 0 for code in bare) > 50


@pytest.mark.parametrize(
    ("program", "file", "status", "text"),
    [
        ("nonesuch-program", None, 127, "nonesuch-program: command not found.  Is it installed, and in PATH?\n"),
        ("train.py", ("#!/bin/sh\n", 0o755), 127, "not found in PATH, but here.  Write `gpuguard run ... -- python t"),
        ("job", ("#!/bin/sh\n", 0o755), 127, "not found in PATH, but here.  Write `gpuguard run ... -- ./job`."),
        ("NCCL_DEBUG=INFO", None, 127, "To set a variable: env NCCL_DEBUG=INFO CMD."),
        ("", None, 127, "command not found"),
        ("./train.py", ("print()", 0o644), 126, "Permission denied.  Write `gpuguard run ... -- python ./train.py`."),
        ("./job", ("echo hello\n", 0o755), 126, "A script needs a first line such as #!/bin/sh."),
        ("./job", ("#!/no/such/interpreter\n", 0o755), 127, "the interpreter that its first line names does not exist"),
        (".", None, 126, "it is a directory"),
    ],
)
def test_what_cannot_be_started_has_the_status_of_a_shell_and_advice(
    wrapped, tmp_path, monkeypatch, program, file, status, text
):
    monkeypatch.chdir(tmp_path)
    if file:
        place = tmp_path / program.removeprefix("./")
        place.write_text(file[0])
        place.chmod(file[1])

    ended, _, err = wrapped.run(program, "-x")

    assert (ended, text in err, wrapped.is_claimed()) == (status, True, False)


def test_the_status_is_right_where_our_parent_ignores_the_end_of_children(wrapped):
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    status, out, _ = wrapped.run("grep", "SigIgn", "/proc/self/status", "/no/such/file", preexec_fn=ignore)

    assert status == 2
    assert int(out.split()[1], 16) & 1 << signal.SIGCHLD - 1, "the job inherits it as without us"
