"""Waiting in the queue, with real processes on a simulated node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Gpuguard, a_user, change, eventually, start
from proc import children_of

from gpuguard.backends.simulated_node import WorkPattern
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.holders import flock_holder
from gpuguard.claims.records import read_records
from gpuguard.queue.leader import MAY_START
from gpuguard.queue.state import is_stopped
from gpuguard.queue.tickets import read_tickets, wake
from gpuguard.queue.waiter import WATCH_SECONDS

# The command line with shorter times, and with a note of each look at the devices.
IMPATIENT = """
import os, sys
from gpuguard.queue import leader as leading, waiter as waiting, state
from gpuguard.backends import client
for name, seconds in (word.split("=") for word in os.environ["WAITERS"].split()):
    module = next(module for module in (waiting, leading, state) if hasattr(module, name))
    setattr(module, name, float(seconds))
    if hasattr(leading, name) and hasattr(waiting, name):
        setattr(leading, name, float(seconds))
if os.environ.get("NO_INOTIFY"):
    def refused(self, path):
        raise OSError(28, "No space left on device")
    leading.DirectoryWatch.__init__ = refused
from gpuguard.backends import spawn
start = spawn.start_worker
def started(name):
    if os.path.exists(os.environ.get("NO_WORKER", "")):
        raise BlockingIOError(11, os.strerror(11))
    return start(name)
spawn.start_worker = started
sample = client.WorkerBackend.sample
def noted(self, *words):
    with open(os.environ["SAMPLES"], "a") as notes:
        notes.write(f"{os.getpid()}\\n")
    return sample(self, *words)
client.WorkerBackend.sample = noted
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""
STEADY = "OWN_CHECK_SECONDS=300 ALONE_SECONDS=0.1 HEALTH_SECONDS=300"  # no other look after the first moment


class Waiter:
    """`gpuguard run` in the queue, or with its job."""

    def __init__(self, room: Room, process: subprocess.Popen[str]) -> None:
        self.room, self.process, self.pid = room, process, process.pid

    @property
    def waits(self) -> bool:
        """Whether it has a ticket."""
        return any(ticket.pid == self.pid for ticket in read_tickets(self.room.directory)[0])

    @property
    def runs(self) -> bool:
        """Whether it has a claim."""
        return any(record.pid == self.pid for record in read_records(self.room.directory))

    @property
    def leads(self) -> bool:
        """Whether it leads the queue."""
        return self.room.leader == self.pid

    def signal(self, number: int) -> None:
        """Only to it, not to its job."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """It and its job."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


class Room:
    """A node with so many devices, and all requests that wait for one."""

    def __init__(self, place: Path, devices: int = 1, times: str = STEADY, **variables: str) -> None:
        self.place, self.samples = place, place / "samples"
        self.holders: set[int] = set()  # pids of job()
        start(str(place / "node"), f"{devices}xH100-80GB")
        self.gpuguard = Gpuguard(place, None, SAMPLES=str(self.samples), WAITERS=times, **variables)
        self.directory = lock_directory(str(place / "claims"))

    @contextlib.contextmanager
    def run(self, *words: str, quiet: bool = True) -> Iterator[Waiter]:
        """`gpuguard run` with these options; killed at the end."""
        process = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, "run", *["--quiet"] * quiet, *words, "--", "sleep", "600"],
            env=self.gpuguard.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp,  # of this session still: or SIGTSTP would not stop it, as no shell could continue it
        )
        waiter = Waiter(self, process)
        try:
            yield waiter
        finally:
            waiter.kill()

    @contextlib.contextmanager
    def job(self, *words: str, **more: object) -> Iterator[Waiter]:
        """A job that runs."""
        with self.run(*words, **more) as waiter:  # type: ignore[arg-type]
            self.holders.add(waiter.pid)
            assert eventually(lambda: waiter.runs, LONG), waiter.process.poll()
            yield waiter

    @contextlib.contextmanager
    def wait(self, *words: str, **more: object) -> Iterator[Waiter]:
        """A request in the queue, which has a leader."""
        with self.run(*words, **more) as waiter:  # type: ignore[arg-type]
            assert eventually(lambda: waiter.waits and self.leader is not None, LONG), waiter.process.poll()
            yield waiter

    @property
    def leader(self) -> int | None:
        """pid of the process that holds the lock of the queue."""
        path = self.directory.lock_path("queue")
        if not os.path.exists(path):
            return None
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return flock_holder(descriptor)
        finally:
            os.close(descriptor)

    def looks(self) -> int:
        """How often the driver was asked, but for the watchdogs of jobs."""
        pids = self.samples.read_text().split() if self.samples.exists() else []
        return sum(int(pid) not in self.holders for pid in pids)

    def stranger(self, device: int = 0) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """A process on a device without a claim."""
        return a_user(str(self.place / "node"), str(device), 10 * 2**30)

    def suffer(self, device: int, *faults: str) -> None:
        """The device has these faults from now on, or none."""
        change(str(self.place / "node"), device, faults=faults)


LONG = 60.0  # far beyond any answer


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def calmly(room: Room) -> int:
    """The number of looks once it no longer changes."""
    while True:
        before = room.looks()
        time.sleep(2.0)
        if room.looks() == before:
            return before


def test_a_request_starts_when_the_job_of_a_killed_wrapper_ends(room: Room) -> None:
    with room.job() as holder, room.wait() as waiter:
        holder.signal(signal.SIGKILL)
        holder.process.wait()
        calmly(room)
        assert not waiter.runs  # the job holds the claim
        os.killpg(holder.pid, signal.SIGKILL)

        assert eventually(lambda: waiter.runs, LONG)


def test_a_request_outlives_a_list_of_processes_with_a_pid_that_none_can_have(room: Room) -> None:
    with room.stranger() as stranger, room.wait() as waiter:
        looked = calmly(room)
        room.suffer(0, "implausible")
        stranger.kill()
        stranger.wait()
        assert eventually(lambda: room.looks() >= looked + 2, LONG)
        assert waiter.process.poll() is None and not waiter.runs
        room.suffer(0)

        assert eventually(lambda: waiter.runs, LONG)


@pytest.mark.parametrize("how", ["its time is over", "root ends it"])
def test_a_request_starts_when_the_quarantine_of_the_device_is_over(room: Room, how: str) -> None:
    assert room.gpuguard("quarantine", "0").returncode == 0
    with room.wait() as waiter:
        assert not waiter.runs
        room.gpuguard("quarantine", "0", *(["--for", "5s"] if how == "its time is over" else ["--end"]))

        assert eventually(lambda: waiter.runs, LONG)


def test_a_request_for_an_idle_device_starts_when_its_work_is_done(tmp_path: Path) -> None:
    room = Room(tmp_path, times="OWN_CHECK_SECONDS=300 HEALTH_SECONDS=300 SAMPLE_SECONDS=0.5")
    change(f"{tmp_path}/node", 0, utilization=WorkPattern(90.0, 90.0))
    with room.wait("--max-util", "10%") as waiter:
        assert eventually(lambda: room.looks() > 4, LONG)
        assert not waiter.runs
        change(f"{tmp_path}/node", 0, utilization=WorkPattern(0.0, 0.0))

        assert eventually(lambda: waiter.runs, LONG)


def test_a_request_starts_on_free_devices_when_time_alone_lets_it_pass(tmp_path: Path) -> None:
    """The job exceeds its time limit, so that no start of the request before it is known which it could put off."""
    room = Room(tmp_path, devices=2, times="OWN_CHECK_SECONDS=300 HEALTH_SECONDS=300 SAMPLE_SECONDS=0.5")
    with room.job("--time-limit", "10s") as holder:
        holder.signal(signal.SIGSTOP)  # it does not end its job
        with room.wait("-n", "2"), room.wait("-n", "1") as waiter:
            assert eventually(lambda: waiter.runs, LONG)


def test_nothing_is_read_and_nothing_but_a_sign_of_life_is_given_while_nothing_changes(tmp_path: Path) -> None:
    room = Room(tmp_path)
    with room.job(), room.wait() as one, room.wait() as two:
        looked, before, began = calmly(room), [_switches(waiter.pid) for waiter in (one, two)], time.monotonic()
        time.sleep(3.0)
        woken = [_switches(waiter.pid) - earlier for waiter, earlier in zip((one, two), before, strict=True)]

        assert room.looks() == looked
        assert max(woken) <= 3 * (time.monotonic() - began) / WATCH_SECONDS


def _switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def workers(*waiters: Waiter) -> list[int]:
    """How many processes that read devices each of them has, not counting one that reads who holds locks."""
    return [sum(map(_reads_devices, children_of(waiter.pid))) for waiter in waiters]


def _reads_devices(pid: int) -> bool:
    try:
        return b"worker.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()  # nothing if it has ended
    except OSError:
        return False


def test_of_requests_that_sleep_only_the_leader_has_a_worker(room: Room) -> None:
    with contextlib.ExitStack() as stack:
        holder, *waiters = [stack.enter_context(room.job()), *(stack.enter_context(room.wait()) for _ in range(4))]
        assert eventually(lambda: workers(*waiters) == [1, 0, 0, 0], LONG)
        waiters.pop(0).kill()
        assert eventually(lambda: any(waiter.leads for waiter in waiters), LONG)
        assert eventually(lambda: workers(*waiters) == [int(waiter.leads) for waiter in waiters], LONG)
        holder.kill()

        assert eventually(lambda: waiters[0].runs, LONG)


def test_a_request_waits_for_the_end_of_another_job_without_a_worker(room: Room) -> None:
    with room.job() as holder, room.run("--after", str(holder.pid)) as waiter:
        assert eventually(lambda: waiter.waits and workers(waiter) == [0], LONG)


def test_a_request_that_cannot_start_its_worker_again_keeps_its_position_and_lets_another_lead(tmp_path: Path) -> None:
    full, room = tmp_path / "full", Room(tmp_path)
    with room.job() as holder, room.wait() as leader, room.wait() as other:
        room.gpuguard.environment["NO_WORKER"] = str(full)
        with room.wait() as waiter:
            [before] = [ticket.id for ticket in read_tickets(room.directory)[0] if ticket.pid == waiter.pid]
            full.touch()
            for worker in children_of(waiter.pid):
                os.kill(worker, signal.SIGKILL)
            other.signal(signal.SIGSTOP)  # so that this one has to lead
            leader.kill()
            looked = room.looks()
            assert eventually(lambda: room.looks() > looked + 1 and not waiter.leads, LONG)
            other.signal(signal.SIGCONT)
            holder.kill()
            assert eventually(lambda: other.runs, LONG)
            assert before in [ticket.id for ticket in read_tickets(room.directory)[0]]
            full.unlink()
            other.kill()

            assert eventually(lambda: waiter.runs, LONG)


def test_a_leader_that_the_daemon_wakes_samples_at_once(room: Room) -> None:
    """It slept on, and was set back for not claiming what was offered to it."""
    with room.job(), room.wait():
        looked = calmly(room)
        wake(room.directory, read_tickets(room.directory)[0], MAY_START)

        assert eventually(lambda: room.looks() > looked, LONG)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_leader_ends_another_one_leads(room: Room, number: int) -> None:
    with room.job() as holder, room.wait() as leader, room.wait() as follower:
        assert leader.leads
        leader.signal(number)
        assert eventually(lambda: follower.leads, LONG)
        holder.kill()

        assert eventually(lambda: follower.runs, LONG)


def test_a_leader_that_is_stopped_is_passed_and_leads_again_when_it_goes_on(room: Room) -> None:
    """The others would have had a look of their own after five minutes only."""
    with room.job() as holder, room.wait() as leader, room.wait() as follower:
        leader.signal(signal.SIGSTOP)
        holder.kill()
        assert eventually(lambda: follower.runs, LONG)

        leader.signal(signal.SIGCONT)
        assert leader.waits and leader.leads
        follower.kill()
        assert eventually(lambda: leader.runs, LONG)


def test_while_one_stands_in_for_a_stopped_leader_the_others_are_served_too(room: Room) -> None:
    with room.job() as holder, room.wait() as leader, contextlib.ExitStack() as stack:
        others = [stack.enter_context(room.wait()) for _ in range(3)]
        leader.signal(signal.SIGSTOP)
        for _ in range(3):
            holder.kill()
            assert eventually(lambda: any(other.runs for other in others), LONG)
            holder = next(other for other in others if other.runs)
            others.remove(holder)


def test_a_stopped_leader_that_is_killed_leaves_the_lead_to_one_of_the_others(room: Room) -> None:
    with room.job(), room.wait() as leader, room.wait() as one, room.wait() as two:
        leader.signal(signal.SIGSTOP)
        time.sleep(2.0)  # one of the others stands in
        leader.kill()

        assert eventually(lambda: one.leads or two.leads, LONG)


def test_a_program_that_only_holds_the_lock_of_the_queue_is_passed(room: Room) -> None:
    with room.job() as holder:
        queue = os.open(room.directory.lock_path("queue"), os.O_RDONLY | os.O_CREAT, 0o444)
        fcntl.flock(queue, fcntl.LOCK_EX)
        with room.run() as waiter, contextlib.ExitStack() as stack:
            stack.callback(os.close, queue)
            assert eventually(lambda: waiter.waits, LONG)
            holder.kill()

            assert eventually(lambda: waiter.runs, LONG)
            assert room.leader == os.getpid()


def test_where_a_program_holds_the_lock_of_the_deputy_too_the_others_sample_by_themselves(tmp_path: Path) -> None:
    room = Room(tmp_path)
    Path(room.directory.lock_path("queue")).touch(0o444)
    with room.job() as holder, contextlib.ExitStack() as stack:
        for path in (room.directory.lock_path("queue"), room.directory.locks):
            stack.callback(os.close, lock := os.open(path, os.O_RDONLY))
            fcntl.flock(lock, fcntl.LOCK_EX)
        with room.run() as waiter:
            assert eventually(lambda: waiter.waits, LONG)
            holder.kill()

            assert eventually(lambda: waiter.runs, LONG)


def test_a_leader_that_is_told_to_stop_says_so_stops_and_is_passed(room: Room) -> None:
    with room.job() as holder, room.wait(quiet=False) as leader, room.wait() as follower:
        leader.signal(signal.SIGTSTP)
        assert eventually(lambda: is_stopped(leader.pid), LONG)
        assert b"stands aside" in os.read(leader.process.stderr.fileno(), 65536)
        holder.kill()
        assert eventually(lambda: follower.runs, LONG)

        leader.signal(signal.SIGCONT)
        follower.kill()
        assert eventually(lambda: leader.runs, LONG)


def test_a_process_that_is_stopped_is_passed_over_and_keeps_its_position(room: Room) -> None:
    with room.job() as holder, room.wait() as leader, room.wait() as first, room.wait() as second:
        leader.kill()
        assert eventually(lambda: room.leader in (first.pid, second.pid), LONG)
        stopped, other = (first, second) if second.leads else (second, first)
        assert other.leads
        stopped.signal(signal.SIGSTOP)
        holder.kill()
        assert eventually(lambda: other.runs, LONG)

        stopped.signal(signal.SIGCONT)
        assert stopped.waits
        other.kill()
        assert eventually(lambda: stopped.runs, LONG)


def test_a_process_that_goes_on_after_a_stop_is_served_although_nothing_else_happens(tmp_path: Path) -> None:
    """Two devices are free, and the leader, which wants three, cannot use them."""
    room = Room(tmp_path, devices=3)
    with room.job(), room.job("-n", "2") as holder, room.wait("-n", "3") as leader, room.wait("-n", "2") as stopped:
        assert leader.leads
        stopped.signal(signal.SIGSTOP)
        holder.kill()
        assert eventually(lambda: not holder.runs, LONG)
        calmly(room)
        assert not stopped.runs
        stopped.signal(signal.SIGCONT)

        assert eventually(lambda: stopped.runs, LONG)


def test_a_request_that_became_impossible_while_waiting_is_refused(tmp_path: Path) -> None:
    room = Room(tmp_path, devices=2, times="OWN_CHECK_SECONDS=300 HEALTH_SECONDS=0.5")
    with room.job(), room.wait("-n", "2") as first, room.wait("-n", "2") as second:
        room.suffer(0, "lost")

        for waiter in (first, second):
            _, said = waiter.process.communicate(timeout=LONG)
            assert waiter.process.returncode == 125, said
            assert "2 GPUs" in said


def test_without_inotify_the_locks_are_checked_now_and_then(tmp_path: Path) -> None:
    room = Room(tmp_path, times="POLL_SECONDS=0.2 OWN_CHECK_SECONDS=300", NO_INOTIFY="1")
    with room.job() as holder, room.wait() as waiter:
        looked = calmly(room)
        time.sleep(1.0)
        assert room.looks() == looked
        holder.kill()

        assert eventually(lambda: waiter.runs, LONG)


@pytest.mark.parametrize("count", [1, 2])
def test_a_ticket_that_was_removed_is_made_again_and_served(tmp_path: Path, count: int) -> None:
    room = Room(tmp_path, times="OWN_CHECK_SECONDS=0.5")
    with room.job() as holder, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(room.wait()) for _ in range(count)]
        for name in os.listdir(room.directory.records):
            if name.startswith(("ticket.", "bell.")):
                os.unlink(f"{room.directory.records}/{name}")
        kinds = ["bell"] * count + ["claim"] + ["ticket"] * count
        files = lambda: sorted(os.listdir(room.directory.records))  # noqa: E731
        assert eventually(lambda: [name.partition(".")[0] for name in files()] == kinds, LONG)
        holder.kill()

        assert eventually(lambda: any(waiter.runs for waiter in waiting), LONG)


def test_a_process_that_wakes_on_and_on_costs_little(room: Room) -> None:
    with room.job(), room.wait() as one, room.wait():
        (ticket,) = (ticket for ticket in read_tickets(room.directory)[0] if ticket.pid == one.pid)
        (waker,) = Path(room.directory.records).glob(f"bell.{ticket.id}")
        looked, until = calmly(room), time.monotonic() + 4.0
        descriptor = os.open(waker, os.O_WRONLY | os.O_NONBLOCK)
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                os.write(descriptor, b".x")
            time.sleep(0.001)
        os.close(descriptor)

        assert room.looks() - looked < 80  # 20 at once, then one in two seconds; each is up to three samples
