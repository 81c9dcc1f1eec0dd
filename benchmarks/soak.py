"""A guard that lives long: does it grow?  As many looks as fit into the time, at a machine where nobody stays.

    sudo python benchmarks/soak.py --seconds 3600

8 devices of a fake driver library, on 7 of them 16 processes each, of 40 users (as root; else of one); two processes a
second end and others begin, claims of the last device come and go, some break policies and are ended, and /metrics is
read all the while.  The daemon is the real one, told to look again at once instead of after its interval.  What it must
not do from the second fifth of the time to the last: take 2 MiB more of its own (Pss_Anon, with its worker: of the
rest, more or less is shared with other Pythons), keep descriptors or threads, or start its worker anew.  --variant
plants such a fault, to show that it is seen.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from guard import DAEMON
from job_start import amount, children
from metrics import free_port, scrape, started, until_ready
from starters import surroundings

DEVICES, EACH = 8, 16
FIRST_UID, USERS = 20_000, 40
MOST_MIB = 2.0  # more is growth
MOST_MORE = 2  # descriptors, likewise: a claim and a scrape, which may be open in all of the few last readings
CHANGE_SECONDS = 0.5  # between two ends of a process, of which something is known for two minutes more: 2 KiB each
FIFTHS = 5
LEAST_SECONDS = 6.0  # in less nothing can be told from the start
LEAST_LOOKS = 100  # nor in fewer: beside a load they take longer
# The engine knows who has had his steps until the cooldown is over, even when he has ended: with the usual 15 minutes a
# run of ten would only see that fill up.
POLICIES = """
version: 1
mode: enforce
interval: {shortest: 100ms, longest: 100ms}
policies:
  - {name: hogs, for: 1s, cooldown: 1s, when: {memory: {above: 20GiB}}, steps: [warn, {after: 1s, do: terminate}]}
  - {name: many, cooldown: 2m, for: 1s, when: {processes: {above: 3}}, steps: [log]}
  - {name: idle, cooldown: 2m, for: 2s, when: {idle: {below: 5%}}, steps: [log, {after: 1h, do: terminate}]}
  - {name: strangers, cooldown: 2m, for: 2s, when: {unclaimed: {}}, steps: [log]}
  - {name: trespassers, cooldown: 2m, for: 1s, when: {trespass: {}}, steps: [log]}
  - {name: old, cooldown: 2m, for: 1s, when: {age: {run_time_above: 10s}}, steps: [log]}
  - {name: hot, cooldown: 2m, for: 1s, when: {temperature: {above: 60C}}, steps: [log]}
"""
# The interval stays what the policies say, so durations mean what they mean; only the pause after a look is left out.
AT_ONCE = DAEMON.replace(
    "from gpuguard.cli import main", "from gpuguard import watchdog\nPLANTED\nfrom gpuguard.cli import main"
)
FASTER = "watchdog.pace = lambda *seen: 0.0"
VARIANTS = {
    "memory": 'kept = []\nwatchdog.pace = lambda *seen: kept.append(b"x" * 2**18) or 0.0',
    "descriptors": "import os\nwatchdog.pace = lambda *seen: os.dup(2) * 0.0",
    "worker": "import random\nfrom gpuguard.backends.client import WorkerBackend as Isolated\n"
    "look = Isolated.sample\n"
    "Isolated.sample = lambda self, *asked: (random.random() < 0.1 and self.close(), look(self, *asked))[1]\n" + FASTER,
}


@dataclass(frozen=True)
class Reading:
    """What the daemon has at one moment, with its worker."""

    memory: float  # MiB of its own, Pss_Anon
    descriptors: int
    threads: int
    worker: int  # its pid

    def __str__(self) -> str:
        return f"{self.memory:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads"


class Crowd:
    """The processes of the machine; the last device is left to those who claim."""

    def __init__(self, fake: FakeNvml, environment: dict[str, str], seed: int) -> None:
        self._fake, self._environment, self._dice = fake, environment, random.Random(seed)
        self._claim = self._claimed()
        self._jobs: list[list[tuple[subprocess.Popen[bytes], int]]] = [[] for _ in range(DEVICES - 1)]
        for device, jobs in enumerate(self._jobs):
            jobs += [self._begun() for _ in range(EACH)]
            self._list(device)

    def change(self) -> None:
        """One goes, another one comes."""
        device = self._dice.randrange(len(self._jobs))
        jobs = self._jobs[device]
        job, _ = jobs.pop(self._dice.randrange(len(jobs)))
        job.kill()
        job.wait()
        jobs.append(self._begun())
        self._list(device)
        if self._claim.poll() is not None:
            self._claim = self._claimed()

    def end(self) -> None:
        """All go."""
        self._claim.terminate()
        self._claim.wait()
        for job, _ in itertools.chain(*self._jobs):
            job.kill()
            job.wait()

    def _begun(self) -> tuple[subprocess.Popen[bytes], int]:
        user = FIRST_UID + self._dice.randrange(USERS) if os.geteuid() == 0 else None
        return subprocess.Popen(["sleep", "72000"], user=user), 30 if self._dice.random() < 0.02 else 1

    def _claimed(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "gpuguard", "run", "--quiet", "--", "sleep", "0.5"]
        return subprocess.Popen(words, env=self._environment)

    def _list(self, device: int) -> None:
        self._fake.clear_processes(device)
        for job, size in self._jobs[device]:
            if job.poll() is None:
                self._fake.add_process(device, job.pid, size * GIB)
        self._fake.devices[device].temperature = self._dice.randrange(40, 80)


def read(pid: int) -> Reading | None:
    """What it has now; None while its worker is started."""
    try:
        family = [pid, *children(pid)]
        worker = next(one for one in family[1:] if b"backends.worker" in Path(f"/proc/{one}/cmdline").read_bytes())
        memory = sum(amount(f"/proc/{one}/smaps_rollup", "Pss_Anon") for one in (pid, worker))
        descriptors = sum(len(os.listdir(f"/proc/{one}/fd")) for one in (pid, worker))
        return Reading(memory, descriptors, len(os.listdir(f"/proc/{pid}/task")), worker)
    except (OSError, StopIteration):
        return None


def faults(readings: Sequence[Reading]) -> list[str]:
    """What has grown from the second fifth of *readings* to the last."""
    if (size := len(readings) // FIFTHS) == 0:
        return [f"it could be looked at {len(readings)} times only"]
    early, late = readings[size : 2 * size], readings[-size:]
    growth = statistics.mean(one.memory for one in late) - statistics.mean(one.memory for one in early)
    found = [f"it has grown by {growth:.1f} MiB"] if growth > MOST_MIB else []
    # Some are open for a moment: even the fewest are more than the most were.
    for name, more in (("descriptors", MOST_MORE), ("threads", 0)):
        before, now = (max(getattr(one, name) for one in early), min(getattr(one, name) for one in late))
        found += [f"it had at most {before} {name}, and has at least {now}"] if now > before + more else []
    number = len({one.worker for one in readings})
    return found + ([f"it has had {number} workers"] if number > 1 else [])


def watch(daemon: subprocess.Popen[bytes], crowd: Crowd, fake: FakeNvml, url: str, seconds: float) -> list[Reading]:
    """Readings of *daemon*, one for each change, while the crowd changes; a line for each tenth of the time."""
    begun, passed, looks, told, readings = time.monotonic(), 0.0, 0, 0, list[Reading]()
    fake.reset_calls()
    while (passed < seconds or looks < LEAST_LOOKS) and daemon.poll() is None:
        crowd.change()
        if reading := read(daemon.pid):
            readings.append(reading)
            scrape(url)
        passed, looks = time.monotonic() - begun, fake.calls().get("nvmlDeviceGetTemperature", 0) // DEVICES
        if passed >= seconds * (told + 1) / 10 and readings:
            told += 1
            print(f"{passed:6.0f} s, {looks:8,} looks: {readings[-1]}", flush=True)
        time.sleep(CHANGE_SECONDS)
    return readings


def main() -> int:
    """Watch, and say what has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--variant", choices=VARIANTS, help="plant a fault")
    args = parser.parse_args()
    seconds = max(args.seconds, LEAST_SECONDS)
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        place = Path(text)
        fake = stack.enter_context(FakeNvml(place))
        environment = surroundings(fake, place / "claims") | {"GPUGUARD_EVENTS": str(place / "events.jsonl")}
        crowd = Crowd(fake, environment, args.seed)
        stack.callback(crowd.end)
        (policy := place / "policy.yaml").write_text(POLICIES)
        url = f"127.0.0.1:{free_port()}"
        code = AT_ONCE.replace("PLANTED", VARIANTS.get(args.variant, FASTER))
        words = [sys.executable, "-c", code, "daemon", "--policy", str(policy), "--enforce", "--metrics", url]
        daemon = stack.enter_context(started(words, environment, place / "said"))
        try:
            until_ready(f"http://{url}/metrics")
            readings = watch(daemon, crowd, fake, f"http://{url}/metrics", seconds)
        except (OSError, URLError) as error:
            sys.exit(f"{error}; the daemon said:\n{(place / 'said').read_text()[-3000:]}")
        if daemon.poll() is not None:
            sys.exit(f"the daemon ended with {daemon.returncode}:\n{(place / 'said').read_text()[-3000:]}")
        events = (place / "events.jsonl").read_text().splitlines()
        found = faults(readings)
        print(f"{len(events):,} events; {'; '.join(found) or 'nothing has grown'}")
    return int(bool(found))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nothing of it stays
    sys.exit(main())
