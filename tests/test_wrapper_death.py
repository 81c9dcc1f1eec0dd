"""Whatever ends the wrapper, and whenever: the claim lasts exactly as long as the job.

Hundreds of wrappers are killed, terminated or made to raise at random instants, many at once.  A checker of its own
watches each lock: *lost* is a living job without its lock, *stale* is a lock without a living process.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chances import luck
from supervised_job import IDLE, UUIDS

TRIALS, AT_ONCE = 210, 35
SECONDS = 0.3  # of a job
STALE_SECONDS = 60.0  # far beyond any way from fork to the first line of a job
PF_EXITING = 0x4  # in the flags of /proc/PID/stat, include/linux/sched.h

# Forks wrappers that have imported everything already, so that 200 of them take seconds.  Reads "PLACE MANNER DELAY",
# answers each line with a pid, and leaves the dead unburied until its stdin ends, so that no pid is used twice.
NURSERY = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "{tests}")
from supervised_job import FileBackend, Request, a_directory, acquire, become_subreaper, run

class UnlocksAtExit:
    "A claim as one would write it first: a lock object, which unlocks when Python ends."
    def __init__(self, path):
        from filelock import FileLock
        self.lock = FileLock(path)
        self.lock.acquire()
        # A copy, because the library closes its own descriptor in a forked child.
        self.id, self.pass_fds, self.devices = "broken", (os.dup(self.lock._context.lock_file_fd),), ()
        self.memory = None
    def __iter__(self):
        return iter(())
    def environment(self, visible):
        return {{}}
    def reassert(self):
        pass
    def release_request(self):
        return None
    def release(self):
        self.lock.release()

def wrapper(place, manner, delay):
    os.setpgid(0, 0)
    until = time.monotonic() + delay
    if manner == "raise":
        wait = signal.sigtimedwait
        def raising(signals, timeout):
            if time.monotonic() > until:
                raise RuntimeError("a fault in the wrapper")
            return wait(signals, min(timeout, 0.01))
        signal.sigtimedwait = raising
    become_subreaper()
    backend = FileBackend(Path(place))
    if {broken}:
        claim = UnlocksAtExit(place + "/broken")
    else:
        claim = acquire(backend, Request(devices=("0",)), a_directory(Path(place) / "claims"))
    job = "echo $$ > " + place + "/job; " + ("trap '' TERM; " if place[-1] in "02468" else "") + "exec sleep {seconds}"
    sys.exit(run.run(["sh", "-c", job], claim, backend).status)

for line in sys.stdin:
    place, manner, delay = line.split()
    pid = os.fork()
    if pid == 0:
        wrapper(place, manner, float(delay))
    print(pid, flush=True)
"""


class Trial:
    """One wrapper, and what became of it."""

    def __init__(self, place: Path, manner: str, broken: bool) -> None:
        self.place, self.manner = place, manner
        self.lock = place / "broken" if broken else place / "claims" / "lock" / UUIDS[0]
        chance = luck(f"{place.name} {manner}")
        self.delay: float | None = chance.uniform(0.0, 0.25)
        self.from_job = chance.random() < 0.5  # on a busy machine hardly a job starts within a moment of its wrapper
        self.pid = 0
        self.began = self.dead_since = 0.0
        self.job: int | None = None
        self.lost = self.stale = self.done = False

    def look(self) -> None:
        """Do what is due, and check the lock."""
        now = time.monotonic()
        if self.from_job and self.job is None:
            self.began = now
        if self.manner != "raise" and self.delay is not None and now >= self.began + self.delay:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL if self.manner == "kill" else signal.SIGTERM)
            self.delay = None
        if self.job is None:
            with contextlib.suppress(OSError, ValueError):
                self.job = int((self.place / "job").read_text())
        if self.job and is_alive(self.job):
            # In this order: what lived afterwards lived meanwhile too.
            self.lost |= not is_locked(self.lock) and is_alive(self.job)
        elif not is_alive(self.pid):
            self.dead_since = self.dead_since or now
            # A job may still be on its way from fork to its first line: then the lock tells that it lives.
            self.done = not is_locked(self.lock)
            self.stale = now > self.dead_since + STALE_SECONDS
        self.done |= self.stale


def is_alive(pid: int) -> bool:
    """Not even on its way out: an ending process closes its files, and with them the lock, before it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and not int(fields[6]) & PF_EXITING


def is_locked(path: Path) -> bool:
    """Asked only where somebody holds it or nobody will: a free lock is held for a moment by the question itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def campaign(place: Path, manners: list[str], *, broken: bool = False) -> list[Trial]:
    """Run all trials, AT_ONCE at a time."""
    program = NURSERY.format(tests=Path(__file__).parent / "support", seconds=SECONDS, broken=broken)
    environment = {**os.environ, "GPUGUARD_EVENTS": "/dev/null"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    trials = []
    for begin in range(0, len(manners), AT_ONCE):
        batch = []
        with subprocess.Popen([sys.executable, "-c", program], text=True, env=environment, **pipes) as nursery:
            for number, manner in enumerate(manners[begin : begin + AT_ONCE], begin):
                trial = Trial(place / str(number), manner, broken)
                (trial.place / "claims").mkdir(parents=True)
                (trial.place / "machine").write_text(json.dumps(IDLE))
                batch.append(trial)
            for trial in batch:
                nursery.stdin.write(f"{trial.place} {trial.manner} {trial.delay}\n")
                nursery.stdin.flush()
                trial.pid, trial.began = int(nursery.stdout.readline()), time.monotonic()
            while not all(trial.done for trial in batch):
                for trial in batch:
                    if not trial.done:
                        trial.look()
                time.sleep(0.002)
        trials += batch
    return trials


def test_no_claim_is_lost_while_its_job_lives_and_none_stays_after_it(tmp_path):
    trials = campaign(tmp_path, ["kill", "terminate", "raise"] * (TRIALS // 3))

    assert [(trial.place.name, trial.manner) for trial in trials if trial.lost] == []
    assert [(trial.place.name, trial.manner) for trial in trials if trial.stale] == []
    for manner in ("kill", "terminate", "raise"):
        reached = [trial for trial in trials if trial.manner == manner and trial.job]
        assert len(reached) > TRIALS // 12, f"{manner}: too few were hit while their job ran"


def test_the_checker_catches_a_lock_that_is_released_when_the_wrapper_ends(tmp_path):
    pytest.importorskip("filelock")
    trials = campaign(tmp_path, ["raise"] * 10, broken=True)

    assert any(trial.lost for trial in trials)
