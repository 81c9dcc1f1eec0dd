"""Kills dispatchers, supervisors and jobs at random, and checks that every task ended once, in a state that is true.

    sudo python benchmarks/jobs_campaign.py --seconds 600 --jobs 500

Three users, as root, or else three stores (XDG_STATE_HOME) of one, share a simulated node of 8 GPUs.  Each attempt of a
task writes into a witness file when it starts and when it ends, and holds a lock for each of its GPUs meanwhile; some
leave a child in a session of its own, which holds the locks as well.  Submissions are spread over the first half of the
time.  No command of a user runs after the last one, until nothing lives any more.  Then `gpuguard queue`, `doctor` and
`jobs` must say whose jobs wait for nothing, and that one `gpuguard jobs` brings the rest to its end.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import pwd
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from broker_machine import Brokered
from users import install

from gpuguard.batch.dispatchers import dispatcher_of
from gpuguard.batch.job_facts import directory_of, read_jobs
from gpuguard.batch.job_records import JobStore
from gpuguard.batch.states import ENDED, Jobs
from gpuguard.claims.directory import is_unlocked
from gpuguard.procfs import processes, read_memory

USERS = ("daemon", "bin", "games")  # that every Linux has, and that have no processes
SAID = {
    "queue": "and the process that would start them was killed",
    "doctor": "and the process that would start them was killed",
    "jobs": "no process waited in the queue for your jobs",
}
# An attempt: it says that it starts, takes the lock of each of its GPUs, works, and says that it ends.
JOB = """
import fcntl, os, random, signal, sys, time
witness, most, fails = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
name = os.environ["USER_OF_JOB"] + " " + " ".join(os.environ["GPUGUARD_" + each] for each in ("JOB", "TASK", "ATTEMPT"))
def say(text):
    with open(witness + "/lines", "a") as file:
        file.write(f"{name} {text}\\n")
say("start")
for gpu in os.environ["GPUGUARD_GPUS"].split(","):
    try:
        fcntl.flock(os.open(witness + "/" + gpu, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("double")
if random.random() < 0.3 and not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(random.uniform(0, most))
    os._exit(0)
time.sleep(random.uniform(0, most))
status = 1 if random.random() < fails else 0
say(f"end {status}")
os._exit(status)
"""


@contextmanager
def acting_as(user: pwd.struct_passwd | None) -> Iterator[None]:
    """Be that user meanwhile, as root, or remain who we are."""
    if user is None:
        yield
        return
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@dataclass
class Campaign:
    """One run: where it lies, and how far it goes."""

    machine: Brokered
    jobs: int
    seconds: float
    longest: float  # seconds of one attempt
    random: random.Random
    accounts: dict[str, pwd.struct_passwd | None]
    killed: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)  # what was wrong on the way
    looks: int = 0  # at GPUs that a job uses

    @property
    def place(self) -> Path:
        """Return the directory of everything."""
        return self.machine.place

    @property
    def witness(self) -> Path:
        """Return the directory of the witness file and of a lock for each GPU."""
        return self.place / "witness"

    def prepare(self) -> None:
        """Set up the node, and make the files that all users write."""
        self.machine.setup()
        for user, account in self.accounts.items():
            (self.place / user).mkdir()
            if account:
                os.chown(self.place / user, account.pw_uid, account.pw_gid)
        self.witness.mkdir()
        for name in ("lines", *self.machine.uuids):
            (self.witness / name).touch()
            (self.witness / name).chmod(0o666)

    def store(self, user: str) -> JobStore:
        """Return the records of a user."""
        return JobStore(str(self.place / user / "gpuguard" / "jobs" / os.uname().nodename))

    def gpuguard(self, user: str, *words: str) -> tuple[int, str]:
        """Run a command of a user, and return its exit code and what it says."""
        own = {
            "XDG_STATE_HOME": str(self.place / user),
            "GPUGUARD_EVENTS": str(self.place / user / "events.jsonl"),
            "USER_OF_JOB": user,
        }
        done = self.machine(self.accounts[user], *words, environment=own)
        return done.returncode, done.stdout + done.stderr

    def submit_all(self) -> dict[str, list[int]]:
        """Submit arrays with dependencies and retries, in turns of the users, and return the ids by user."""
        ids: dict[str, list[int]] = {user: [] for user in self.accounts}
        program = [self.machine.python_path, "-c", JOB, str(self.witness), str(self.longest), "0.2"]
        begun, left = time.monotonic(), self.jobs
        while left > 0:
            user, count = self.random.choice(USERS), min(left, self.random.choice((1, 1, 2, 5, 10)))
            options = ["--array", f"0-{count - 1}%{self.random.randint(1, 4)}"]
            options += ["-n", str(self.random.choice((1, 1, 1, 2)))]
            options += ["--retries", str(self.random.randint(0, 2)), "--grace", "1s"]
            if ids[user] and self.random.random() < 0.4:
                options += [self.random.choice(("--after", "--after-ok")), str(self.random.choice(ids[user]))]
            status, said = self.gpuguard(user, "submit", "--parsable", *options, "--", *program)
            if status:
                raise RuntimeError(said)
            ids[user].append(int(said))
            left -= count
            self.kill_until(begun + self.seconds / 2 * (1 - left / self.jobs))
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
        jobs = {}
        for user, account in self.accounts.items():
            with acting_as(account):
                jobs[user] = read_jobs(self.store(user))
        return jobs

    def is_at_rest(self) -> bool:
        """Return whether nothing lives that could change a state."""
        ours, jobs = self.living()
        return not ours and not jobs

    def kill_until(self, ends: float) -> None:
        """Kill at random, and look at the GPUs, until then (monotonic time), at least once."""
        while True:
            self.kill_one()
            self.look_for_orphans()
            if time.monotonic() >= ends or self.is_at_rest():
                return
            time.sleep(self.random.uniform(0, self.longest / 5))

    def kill_one(self) -> None:
        """Kill a dispatcher, a supervisor or a job, if one lives."""
        ours, jobs = self.living()
        kind, pids = self.random.choice((("gpuguard", ours), ("job", jobs)))
        if pids:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
                self.killed[kind] += 1

    def look_for_orphans(self) -> None:
        """Find the processes of jobs that live on a GPU that has no claim."""
        seen = self.uses()
        self.looks += len(seen)
        free = {uuid for uuid in {uuid for _pid, uuid in seen} if self.is_free(uuid)}
        # A job that is seen again lived at the moment at which its GPU was free.
        self.found += [f"process {pid} on {uuid}, which is free" for pid, uuid in seen & self.uses() if uuid in free]

    def uses(self) -> set[tuple[int, str]]:
        """Return which process of a job uses which GPU, by the locks that it has open."""
        found = set()
        for pid in self.living()[1]:
            with suppress(OSError):
                for descriptor in os.listdir(f"/proc/{pid}/fd"):
                    path = Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
                    if path.parent == self.witness and path.name in self.machine.uuids:
                        found.add((pid, path.name))
        return found

    def is_free(self, uuid: str) -> bool:
        """Return whether no claim has the GPU."""
        descriptor = os.open(self.machine.directory.lock_path(uuid), os.O_RDONLY)
        try:
            return is_unlocked(descriptor)
        finally:
            os.close(descriptor)

    def bring_to_the_end(self, seconds: float) -> int:
        """Wait until all has ended, with one command of each user whose last process was killed; return how many."""
        ends, asked = time.monotonic() + seconds, set[str]()
        while time.monotonic() < ends:
            jobs = self.read()
            waiting = [user for user, each in jobs.items() if not all_over(each)]
            if not waiting:
                break
            for user in (user for user in waiting if user not in asked):
                source = jobs[user].stored[0].record.source
                with acting_as(self.accounts[user]):
                    alone = dispatcher_of(directory_of(source), self.store(user), source) is None
                # What was read above may have come to its end since.
                if alone and self.is_at_rest() and not all_over(self.read()[user]):
                    asked.add(user)
                    said = {command: self.gpuguard(user, command)[1] for command in SAID}
                    self.found += [
                        f"{user}: {name} says: {said[name]}" for name in SAID if SAID[name] not in said[name]
                    ]
            self.look_for_orphans()
            time.sleep(0.2)
        return len(asked)

    def end_all(self) -> None:
        """Kill what lives on."""
        while pids := [pid for pids in self.living() for pid in pids]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


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
            ended_well = [attempt for attempt, lines in attempts.items() if "end 0" in lines]
            name = f"{user}/{state.job}.{state.task} {state.state} {state.status} attempt {state.attempt}: {attempts}"
            last = attempts.get(state.attempt, [])
            wrong = {
                "it has not ended": state.state not in ENDED,
                "an attempt ran twice": any(lines.count("start") > 1 for lines in attempts.values()),
                "an attempt that was never started": any(attempt > state.attempt for attempt in attempts),
                "it went on after its success": any(attempt < state.attempt for attempt in ended_well),
                "not completed": state.state == "completed" and last != ["start", "end 0"],
                "not failed": state.state == "failed" and state.status == 1 and last != ["start", "end 1"],
                "skipped, and it ran": state.state == "skipped" and bool(attempts),
                "cancelled without a user": state.state == "cancelled",
            }
            found += [f"{why}: {name}" for why, is_so in wrong.items() if is_so]
    return found


def end(number: int, frame: FrameType | None) -> None:
    """Clean up when we are asked to end."""
    sys.exit(128 + number)


def main() -> int:
    """Run one campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of killing, at most")
    parser.add_argument("--jobs", type=int, default=500, help="tasks")
    parser.add_argument("--longest", type=float, default=9.0, help="seconds of one attempt")
    parser.add_argument("--seed", type=int, default=None, help="of what is random here (default: another each time)")
    parser.add_argument("--one-user", action="store_true", help="also as root: three stores of one user")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    codecs.lookup("ascii")  # loaded late, it would be loaded as a user who may not read this Python: see acting_as()
    seed = random.randrange(2**32) if args.seed is None else args.seed
    by_name = os.geteuid() == 0 and not args.one_user
    accounts = {user: pwd.getpwnam(user) if by_name else None for user in USERS}
    with tempfile.TemporaryDirectory(prefix="gpuguard-jobs-", ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755)
        site = Path(place, "site") if by_name else Path(__file__).resolve().parent.parent
        if by_name:
            site.mkdir()
            install(site)
        machine = Brokered(Path(place), site, "everybody", "8xH100-80GB")
        if not by_name:
            machine.python_path = sys.executable
        campaign = Campaign(machine, args.jobs, args.seconds, args.longest, random.Random(seed), accounts)
        campaign.prepare()
        begun = time.monotonic()
        try:
            ids = campaign.submit_all()
            campaign.kill_until(begun + args.seconds)
            killing = time.monotonic() - begun
            asked = campaign.bring_to_the_end(60.0 + args.jobs * args.longest)
            jobs = campaign.read()
            found = [*campaign.found, *faults(jobs, ids, (campaign.witness / "lines").read_text().splitlines())]
            found += ["jobs live on"] if campaign.living()[1] else []
        finally:
            campaign.end_all()
    states = Counter(state.state for of_user in jobs.values() for each in of_user.states.values() for state in each)
    print("\n".join(found[:20]))
    facts = {"seed": seed, "seconds": round(killing), "states": states, "killed": campaign.killed, "asked": asked}
    print(json.dumps({**facts, "looks": campaign.looks, "faults": len(found)}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
