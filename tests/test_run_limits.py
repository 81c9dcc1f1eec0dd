"""`gpuguard run` with limits of the job, on a simulated node with real processes."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nodes import GIB, Gpuguard, start, until

from gpuguard import procfs, run
from gpuguard.backends import simulated, simulated_node
from gpuguard.backends.simulated_node import Use, WorkPattern

# From its first tick on nothing of gpuguard can be loaded any more: it is being installed anew.
UPGRADED = """
import sys
from gpuguard.cli import main, run
class Gone:
    def find_spec(name, path=None, target=None):
        if name.startswith("gpuguard."):
            raise ModuleNotFoundError(name)
preload = run._preload_for_job
def settled(*given):
    if "--no-wait" not in sys.argv:
        preload(*given)
    sys.meta_path.insert(0, Gone)
    preload(*given)
run._preload_for_job = settled
main(sys.argv[1:])
"""

# Uses the node with memory that grows within 0.6 s; then says its pid.  What a limit may send it is caught first.
USER = """
import os, signal, sys, time
{setup}
from gpuguard.backends import simulated
simulated.use(None, {start}, {utilization}, ramp=({end}, 0.6), spec={place!r})
print(os.getpid(), flush=True)
time.sleep(600)
"""
TELL = """
def tell(signum, frame):
    print(signal.Signals(signum).name, flush=True)
    if signum == signal.SIGTERM: sys.exit(7)
signal.signal(signal.SIGUSR1, tell); signal.signal(signal.SIGTERM, tell)
"""
AWAITED = "any(os.path.exists({!r}) or time.sleep(0.05) for _ in range(1000))"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class Job:
    """Command lines on one node, whose device 0 they use."""

    def __init__(self, place: Path) -> None:
        self.node = str(place / "node")
        start(self.node, "2xH100-80GB")
        self.gpuguard = Gpuguard(place, None, fast=True)

    def uses(self, setup: str = "", at_first: int = GIB, at_last: int = 40 * GIB, utilization: float = 90.0) -> str:
        return USER.format(setup=setup, start=at_first, end=at_last, utilization=utilization, place=self.node)

    def start(self, *options: str, job: str) -> subprocess.Popen[str]:
        """`gpuguard run` with *options* on a Python script."""
        words = ("run", "--devices", "0", "--no-wait", "--quiet", *options, "--", sys.executable, "-c", job)
        return self.gpuguard.start(*words)

    def __call__(self, *options: str, job: str) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        with self.start(*options, job=job) as wrapper:
            out, err = wrapper.communicate(timeout=60)
        assert "Traceback" not in err, err
        return wrapper.returncode, out, err


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else; of another user where we may make one."""
    user = {"user": 65534} if os.getuid() == 0 else {}
    with subprocess.Popen(["sleep", "60"], **user) as process:  # type: ignore[call-overload]
        yield process
        process.kill()


def enters(node: str, pid: int, memory: int) -> None:
    """Let any process use device 0, as its user's driver calls would."""
    uuid = simulated.open(node).sample(()).devices[0].uuid
    use = Use(uuid, pid, procfs.start_time(pid) or 0.0, WorkPattern(memory, memory), 50)
    simulated_node.update(node, lambda state: replace(state, uses=(*state.uses, use)))


def test_a_job_that_grows_over_its_memory_limit_is_asked_to_end_and_keeps_its_own_status(job):
    status, _, err = job("--memory-limit", "30GiB", job=job.uses())

    why = "the job uses 40.0GiB of GPU 0, 30GiB is allowed (--memory-limit)"
    assert status == 128 + 15
    assert f" {why}: SIGTERM to the job.\n" in err
    limit, release = job.gpuguard.events()[-2:]
    assert (limit["kind"], limit["outcome"], limit["message"]) == ("limit", "SIGTERM", why)
    assert limit["facts"]["limit"] == "memory-limit"
    assert (release["kind"], release["message"], release["facts"]["exit_status"]) == ("release", why, 143)


def test_a_job_that_a_limit_has_ended_does_not_look_like_success(job):
    saves = TELL.replace("sys.exit(7)", "sys.exit(0)")
    status, out, _ = job("--memory-limit", "30GiB", job=job.uses(saves))

    assert (status, out.split()[1:]) == (124, ["SIGTERM"])
    assert job.gpuguard.events()[-1]["facts"]["exit_status"] == 124


def test_a_job_below_its_limits_never_hears_of_them(job):
    below = job.uses(at_last=29 * GIB).replace("sleep(600)", "sleep(1.6)")
    status, _, err = job("--memory-limit", "30GiB", "--temperature-limit", "85C", "--idle-limit", "1s", job=below)

    assert (status, err) == (0, "")


@pytest.mark.parametrize(
    ("option", "limit", "utilization", "why"),
    [
        ("--temperature-limit", "85C", 90.0, "GPU 0 has 95C, 85C is allowed"),
        ("--idle-limit", "1s", 0.0, r"is idle: utilization 0%.* for [1-9][\d.]*s"),
    ],
    ids=["hot", "idle"],
)
def test_a_device_that_stays_hot_or_idle_for_too_long_ends_the_job(job, option, limit, utilization, why):
    job.gpuguard("sim", "set", "--device", "0", "--temperature", "60C..95C", "--over", "1s")
    status, _, err = job(option, limit, job=job.uses(at_last=GIB, utilization=utilization))

    assert status == 128 + 15
    assert re.search(rf"{why} \({option}\): SIGTERM to the job\.", err), err


def test_the_checkpoint_signal_comes_first_and_sigterm_a_grace_later(job):
    began = time.monotonic()
    options = ("--memory-limit", "30GiB", "--checkpoint-signal", "USR1", "--grace", "700ms")
    status, out, err = job(*options, job=job.uses(TELL))

    assert out.split()[1:] == ["SIGUSR1", "SIGTERM"]
    assert (status, time.monotonic() - began > 0.7) == (7, True)
    assert [event["outcome"] for event in job.gpuguard.events("limit")] == ["SIGUSR1", "SIGTERM"]
    assert "the grace is over: SIGTERM to the job." in err


def test_a_job_that_ends_by_itself_on_the_checkpoint_signal_keeps_its_own_status(job):
    saves = TELL.replace("SIGTERM: sys.exit(7)", "SIGUSR1: sys.exit(5)")
    status, out, _ = job("--time-limit", "3s", "--checkpoint-signal", "USR1", "--grace", "400ms", job=job.uses(saves))

    assert (status, out.split()[1:]) == (5, ["SIGUSR1"])
    assert job.gpuguard.events()[-1]["message"] == "the time limit is over in 400ms"


def test_a_job_is_ended_at_its_limit_although_what_it_writes_is_not_read(job):
    """As with a pager that rests: `gpuguard run ... 2>&1 | less`."""
    reader, writer = os.pipe()
    words = ("run", "--no-wait", "--time-limit", "1s", "--", sys.executable, "-c", "while True: print('x' * 999)")
    with job.gpuguard.start(*words, stdout=writer, stderr=writer) as wrapper, open(reader, "rb") as pipe:
        os.close(writer)
        until(lambda: job.gpuguard.events("release"))
        said = pipe.read()

        assert wrapper.wait(40) == 124
    assert b"the time limit is over: SIGTERM" in said


NOTICES = """
import os, sys
from gpuguard.cli import terminal
os.set_blocking(2, False)
try:
    while True: os.write(2, bytes(4096))
except BlockingIOError: os.set_blocking(2, True)
for number in range(20): terminal.write("x" * 999 + "\\n", 0.0)
print("full", flush=True)
sys.stdin.readline()
terminal.write("the last\\n", 0.0)
print("goes on", flush=True)
terminal.write_rest()
"""


def test_of_what_was_not_read_no_more_is_written_than_is_read():
    reader, writer = os.pipe()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": writer, "text": True}
    with subprocess.Popen([sys.executable, "-c", NOTICES], **pipes) as process, open(reader, "rb", 0) as pipe:
        os.close(writer)
        assert process.stdin and process.stdout and process.stdout.readline() == "full\n"
        pipe.read(4096)
        print(file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], 40)[0]:
            process.kill()
        said = process.stdout.readline(), b"".join(iter(lambda: pipe.read(65536), b""))

    assert said[0] == "goes on\n"
    assert said[1].lstrip(b"\0") == 20 * (b"x" * 999 + b"\n") + b"the last\n"


def test_a_log_that_is_not_read_keeps_no_job_beyond_its_limit(job, tmp_path):
    """As with `--log-file >(less)`."""
    os.mkfifo(tmp_path / "log")
    full = os.open(tmp_path / "log", os.O_RDWR | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(full, bytes(4096))

    status, _, _ = job("--log-file", str(tmp_path / "log"), "--time-limit", "1s", job="import time; time.sleep(60)")
    os.close(full)
    assert status == 124


def test_what_the_job_leaves_behind_has_the_limits_of_the_job(job, tmp_path):
    # One leftover holds the claim with little memory until the other one, told by *go*, has too much.
    go = tmp_path / "go"
    holds = job.uses(at_last=GIB)
    grows = job.uses(f"while not os.path.exists({str(go)!r}): time.sleep(0.01)")
    leaves = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {grows!r}], stdout=subprocess.DEVNULL)
subprocess.Popen([sys.executable, "-c", {holds!r}], stdout=subprocess.PIPE).stdout.readline()
"""
    with job.start("--memory-limit", "30GiB", job=leaves) as wrapper:
        assert "the job ended, but pid" in wrapper.stderr.readline()
        go.touch()
        said = wrapper.communicate(timeout=60)[1]  # they sleep for longer

    assert wrapper.returncode == 0
    assert "uses 41.0GiB of GPU 0, 30GiB is allowed (--memory-limit): SIGTERM to the job." in said


@pytest.mark.parametrize(("options", "is_released", "status"), [(["--time-limit", "1s"], False, 124), ([], True, 143)])
def test_a_job_is_ended_when_it_should_be_although_gpuguard_was_upgraded_under_it(job, options, is_released, status):
    words = ["run", *options, "--", "sh", "-c", "echo $GPUGUARD_CLAIM; exec sleep 60"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", UPGRADED, *words], env=job.gpuguard.environment, **pipes) as wrapper:
        claim = wrapper.stdout.readline().strip()
        if is_released:
            assert job.gpuguard("release", claim, "--stop").returncode == 0
        _, err = wrapper.communicate(timeout=60)

    assert (wrapper.returncode, "SIGTERM to the job" in err) == (status, True)


def test_a_job_lives_and_ends_as_it_likes_although_gpuguard_was_upgraded_while_it_waited(job):
    words = [sys.executable, "-c", UPGRADED, "run", "--no-wait", "--", "sh", "-c", "sleep 1; exit 3"]

    assert subprocess.run(words, env=job.gpuguard.environment, timeout=60, check=False).returncode == 3


def test_the_memory_of_a_stranger_on_the_device_is_not_held_against_the_job(job, stranger):
    uses = job.uses(at_last=10 * GIB).replace("time.sleep(600)", AWAITED.format(job.node + ".go"))
    with job.start("--memory-limit", "30GiB", job=uses) as wrapper:
        wrapper.stdout.readline()
        enters(job.node, stranger.pid, 60 * GIB)
        until(lambda: os.getuid() or job.gpuguard.events("stranger"))  # else it is our own user's, who needs no warning
        time.sleep(1.0)  # five more looks: nothing else to wait for shows that nothing follows
        Path(f"{job.node}.go").touch()
        err = wrapper.communicate(timeout=60)[1]

    assert (wrapper.returncode, stranger.poll(), "SIG" in err) == (0, None, False)
    if os.getuid() == 0:
        assert err.count(f"(pid {stranger.pid}) computes on GPU 0 too, which you have claimed.") == 1
        assert [event["outcome"] for event in job.gpuguard.events("stranger")] == ["owner warned"]


SILENT = "the limits of the job cannot be kept as long as the driver does not answer"
IMPORT = "from gpuguard.backends import simulated"


def watched(job: Job, setup: str) -> tuple[int, list[str]]:
    """Exit status and the lines of a job; it may go on once it has been said that the driver is silent."""
    with job.start("--memory-limit", "30GiB", job=job.uses(f"{IMPORT}; {setup}")) as wrapper:
        said = [wrapper.stderr.readline()]
        Path(f"{job.node}.go").touch()
        said += wrapper.stderr.readlines()
    return wrapper.returncode, said


def test_a_driver_that_does_not_answer_is_said_and_ends_nobody(job):
    uses = f"simulated.use(None, {GIB}, spec={job.node!r})"
    gone = f"import shutil; {uses}; shutil.rmtree({job.node!r}); {AWAITED.format(job.node + '.go')}; sys.exit(3)"
    status, said = watched(job, gone)

    assert status == 3
    assert "".join(said).count(SILENT) == 1


def test_a_driver_that_answers_again_is_said_and_the_limits_are_kept(job):
    away = f"{job.node}.away"
    gone = f"simulated.use(None, {GIB}, spec={job.node!r}); os.rename({job.node!r}, {away!r})"
    back = f"{AWAITED.format(job.node + '.go')}; os.rename({away!r}, {job.node!r})"
    status, said = watched(job, f"{gone}; {back}")

    assert status == 143
    assert SILENT in said[0] and "the driver answers again:" in said[1]
    assert "SIGTERM to the job." in "".join(said)


def test_a_driver_that_fails_is_asked_at_the_pace_of_the_limits_where_there_are_some():
    def pauses(first: float, limited: bool) -> list[float]:
        found = [first]
        while len(found) < 9:
            found.append(run.next_sample_seconds(found[-1], limited=limited))
        return found[1:]

    assert pauses(0.0, limited=True) == [2.5, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    assert pauses(5.0, limited=False) == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
