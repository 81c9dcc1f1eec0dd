"""Kills dispatchers, supervisors and jobs at random, and checks that every task ended once, in a state that is true.

    python benchmarks/jobs_campaign.py --seconds 600 --jobs 500

Three stores (XDG_STATE_HOME), as of three users, share a simulated node of 8 GPUs.  Each attempt of a task writes
into a witness file when it starts and when it ends, and holds a lock for each of its GPUs meanwhile.  No command of a
user runs after the last submission, until all that still lives is at rest; then one `gpuguard jobs` of each user brings
the rest to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpuguard.batch.dispatchers import dispatcher_of
from gpuguard.batch.facts import directory_of, read_jobs
from gpuguard.batch.records import JobStore
from gpuguard.batch.states import ENDED, Jobs
from gpuguard.procfs import processes, read_memory

USERS = ("ann", "bob", "cleo")
# An attempt: it says that it starts, takes the lock of each of its GPUs, works, and says that it ends.
JOB = """
import fcntl, os, random, sys, time
witness, most, fails = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
name = os.environ["USER_OF_JOB"] + " " + " ".join(os.environ["GPUGUARD_" + each] for each in ("JOB", "TASK", "ATTEMPT"))
def say(text):
    with open(witness + "/lines", "a") as file:
        file.write(f"{name} {text}\\n")
say("start")
for gpu in os.environ["GPUGUARD_GPUS"].split(","):
    lock = os.open(witness + "/" + gpu, os.O_RDWR | os.O_CREAT)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("double")
time.sleep(random.uniform(0, most))
status = 1 if random.random() < fails else 0
say(f"end {status}")
sys.exit(status)
"""


@dataclass
class Campaign:
    """One run: where it lies, and how far it goes."""

    place: Path
    jobs: int
    seconds: float
    longest: float  # seconds of one attempt
    random: random.Random
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def witness(self) -> Path:
        """Return the directory of the witness file and of a lock for each GPU."""
        return self.place / "witness"

    def environment(self, user: str) -> dict[str, str]:
        """Return the environment of a user's commands."""
        return {
            **os.environ,
            "XDG_STATE_HOME": str(self.place / user),
            "GPUGUARD_SIM_DIR": str(self.place / "node"),
            "GPUGUARD_BACKEND": "simulated",
            "GPUGUARD_DIR": str(self.place / "claims"),
            "GPUGUARD_EVENTS": str(self.place / "events.jsonl"),
            "USER_OF_JOB": user,
        }

    def store(self, user: str) -> JobStore:
        """Return the records of a user."""
        return JobStore(str(self.place / user / "gpuguard" / "jobs" / os.uname().nodename))

    def gpuguard(self, user: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a user."""
        return subprocess.run(
            [sys.executable, "-m", "gpuguard", *words],
            env=self.environment(user),
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, user: str, *options: str) -> int:
        """Submit a job of a user, and return its id."""
        program = [sys.executable, "-c", JOB, str(self.witness), str(self.longest), "0.2"]
        done = self.gpuguard(user, "submit", "--parsable", *options, "--", *program)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return int(done.stdout)

    def submit_all(self) -> dict[str, list[int]]:
        """Submit arrays with dependencies and retries, in turns of the users, and return the ids by user."""
        ids: dict[str, list[int]] = {user: [] for user in USERS}
        left = self.jobs
        while left > 0:
            user, count = self.random.choice(USERS), min(left, self.random.choice((1, 1, 2, 5, 10)))
            options = ["--array", f"0-{count - 1}%{self.random.randint(1, 4)}"]
            options += ["-n", str(self.random.choice((1, 1, 1, 2)))]
            options += ["--retries", str(self.random.randint(0, 2)), "--grace", "1s"]
            if ids[user] and self.random.random() < 0.4:
                options += [self.random.choice(("--after", "--after-ok")), str(self.random.choice(ids[user]))]
            ids[user].append(self.submit(user, *options))
            left -= count
            self.kill_one()
        return ids

    def living(self) -> tuple[list[int], list[int]]:
        """Return the pids of the dispatchers and supervisors, and those of the jobs."""
        ours, jobs = [], []
        for pid, stat in processes().items():
            words = (read_memory(pid, "cmdline", 2**16) or b"").split(b"\0") if stat.lives else []
            if b"dispatch" in words and os.fsencode(self.place) in (read_memory(pid, "environ", 2**20) or b""):
                ours.append(pid)
            elif os.fsencode(self.witness) in words:
                jobs.append(pid)
        return ours, jobs

    def read(self) -> dict[str, Jobs]:
        """Return the jobs of all users as they are now."""
        return {user: read_jobs(self.store(user)) for user in USERS}

    def is_at_rest(self) -> bool:
        """Return whether nothing lives that could change a state."""
        ours, jobs = self.living()
        return not ours and not jobs

    def kill_for_a_while(self) -> None:
        """Kill at random until the time is over."""
        ends = time.monotonic() + self.seconds
        while time.monotonic() < ends and not self.is_at_rest():
            self.kill_one()
            time.sleep(self.random.uniform(0, 0.4))

    def kill_one(self) -> None:
        """Kill a dispatcher, a supervisor or a job, if one lives."""
        ours, jobs = self.living()
        kind, pids = self.random.choice((("gpuguard", ours), ("job", jobs)))
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
                self.killed[kind] += 1

    def bring_to_the_end(self, seconds: float) -> int:
        """Wait until all has ended, with one command of each user whose last process was killed; return how many."""
        ends, asked = time.monotonic() + seconds, set[str]()
        while time.monotonic() < ends:
            jobs = self.read()
            waiting = [user for user, each in jobs.items() if not all_over(each)]
            if not waiting:
                break
            for user in waiting:
                source = jobs[user].stored[0].record.source
                alone = dispatcher_of(directory_of(source), self.store(user), source) is None
                if alone and user not in asked and self.is_at_rest():
                    asked.add(user)
                    print(self.gpuguard(user, "jobs").stderr.strip() or "(nothing was said)")
            time.sleep(0.2)
        return len(asked)


def all_over(jobs: Jobs) -> bool:
    """Return whether all tasks have ended."""
    return all(state.state in ENDED for states in jobs.states.values() for state in states)


def faults(jobs: dict[str, Jobs], ids: dict[str, list[int]], witness: list[str]) -> list[str]:
    """Return what is wrong with the end of a campaign, by what the attempts have written themselves."""
    told: dict[tuple[str, int, int], dict[int, list[str]]] = {}
    for line in witness:
        user, job, task, attempt, text = line.split(" ", 4)
        told.setdefault((user, int(job), int(task)), {}).setdefault(int(attempt), []).append(text)
    found = [line for line in witness if line.endswith("double")]
    found += [f"{user}: an id came twice: {own}" for user, own in ids.items() if len(own) != len(set(own))]
    for user, of_user in jobs.items():
        found += [f"{user}: job {job} was printed and is not there" for job in set(ids[user]) - set(of_user.states)]
        for state in (state for states in of_user.states.values() for state in states):
            attempts = told.get((user, state.job, state.task), {})
            name = f"{user}/{state.job}.{state.task} {state.state} {state.status} attempt {state.attempt}: {attempts}"
            last = attempts.get(state.attempt, [])
            wrong = {
                "it has not ended": state.state not in ENDED,
                "an attempt ran twice": any(lines.count("start") > 1 for lines in attempts.values()),
                "an attempt that was never started": any(attempt > state.attempt for attempt in attempts),
                "not completed": state.state == "completed" and last != ["start", "end 0"],
                "not failed": state.state == "failed" and state.status == 1 and last != ["start", "end 1"],
                "skipped, and it ran": state.state == "skipped" and bool(attempts),
            }
            found += [f"{why}: {name}" for why, is_so in wrong.items() if is_so]
    return found


def main() -> int:
    """Run one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of killing")
    parser.add_argument("--jobs", type=int, default=500, help="tasks")
    parser.add_argument("--longest", type=float, default=3.0, help="seconds of one attempt")
    parser.add_argument("--seed", type=int, default=None, help="of what is random here (default: another each time)")
    args = parser.parse_args()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="gpuguard-jobs-", ignore_cleanup_errors=True) as place:
        campaign = Campaign(Path(place), args.jobs, args.seconds, args.longest, random.Random(seed))
        campaign.witness.mkdir()
        started = campaign.gpuguard("ann", "sim", "start", "8xH100-80GB")
        assert started.returncode == 0, started.stderr
        try:
            ids = campaign.submit_all()
            campaign.kill_for_a_while()
            asked = campaign.bring_to_the_end(60.0 + args.jobs * args.longest)
            jobs = campaign.read()
            witness = (campaign.witness / "lines").read_text().splitlines()
            found = faults(jobs, ids, witness)
            _ours, living = campaign.living()
            found += [f"{len(living)} jobs live on"] if living else []
        finally:
            for pid in (pid for pids in campaign.living() for pid in pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            campaign.gpuguard("ann", "sim", "stop")
    states = Counter(state.state for of_user in jobs.values() for each in of_user.states.values() for state in each)
    print("\n".join(found[:20]))
    print(json.dumps({"seed": seed, "states": states, "killed": campaign.killed, "asked": asked, "faults": len(found)}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
