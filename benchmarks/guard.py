"""What the guard costs: CPU and memory of `gpuguard daemon` with its worker, at one look per second.

    python benchmarks/guard.py --seconds 60

8 fake devices (the real nvidia-ml-py on a fake driver library with no latency), 40 processes, 4 claims, 10 policies of
which several hold all the time.  CPU is what /proc/PID/stat says of both, memory is Pss.  And how long one judgement
takes, in this process, on a snapshot of the same machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from fake_nvml import GIB, FakeNvml
from job_start import amount, children, show
from starters import surroundings

DEVICES, PROCESSES, CLAIMS = 8, 40, 4
WARM_UP_SECONDS = 5.0
# As root the command refuses a library of its caller's choice, which the fake driver is.
DAEMON = """
import sys
from gpuguard.daemon import service as daemon
daemon.clean_environment = lambda environ, root: None
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""
POLICIES = """
version: 1
interval: {shortest: 1s, longest: 1s}
policies:
  - {name: a, for: 1m, when: {memory: {above: 70GiB}}, steps: [log]}
  - {name: b, for: 1m, when: {memory: {above: 1GiB}}, steps: [{after: 1h, do: log}]}
  - {name: c, for: 1m, when: {temperature: {above: 80C}}, steps: [log]}
  - {name: d, for: 1m, when: {power: {above: 600W}}, steps: [log]}
  - {name: e, for: 2h, when: {idle: {below: 5%}}, steps: [log]}
  - {name: f, for: 1m, when: {unclaimed: {}}, steps: [{after: 1h, do: log}]}
  - {name: g, for: 1m, when: {trespass: {}}, steps: [{after: 1h, do: log}]}
  - {name: h, for: 1m, when: {processes: {above: 20}}, steps: [log]}
  - {name: i, for: 1m, when: {age: {run_time_above: 7d}}, steps: [log]}
  - {name: j, for: 1m, when: {health: {problems: [lost]}}, steps: [log]}
"""


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that these processes have used so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def measure(environment: dict[str, str], policy: Path, seconds: float) -> None:
    """Print what the daemon takes while it watches."""
    command = [sys.executable, "-c", DAEMON, "daemon", "--policy", str(policy), "--interval", "1s"]
    # In a file, not a pipe: nobody reads it, and a full pipe would stop the daemon.
    with open(policy.with_name("said"), "w") as said, subprocess.Popen(command, env=environment, stderr=said) as guard:
        time.sleep(WARM_UP_SECONDS)
        if guard.poll() is not None:
            sys.exit(Path(said.name).read_text())
        workers = children(guard.pid)
        begun, before = time.monotonic(), [cpu_seconds([guard.pid]), cpu_seconds(workers)]
        time.sleep(seconds)
        passed, after = time.monotonic() - begun, [cpu_seconds([guard.pid]), cpu_seconds(workers)]
        daemon, worker = ((late - early) / passed * 100 for late, early in zip(after, before, strict=True))
        show("CPU of one core", f"{daemon + worker:6.2f} %  daemon {daemon:.2f} %, worker {worker:.2f} %")
        sizes = [amount(f"/proc/{pid}/smaps_rollup", "Pss") for pid in (guard.pid, *workers)]
        show("memory (Pss)", f"{sum(sizes):6.1f} MiB  daemon {sizes[0]:.1f}, worker {sum(sizes[1:]):.1f}")
        guard.terminate()


def measure_judging(policy: Path, rounds: int = 200) -> None:
    """Print how long one judgement takes."""
    from dataclasses import replace

    from builders import a_device, a_process, a_snapshot

    from gpuguard.policies.engine import EngineMemory, evaluate
    from gpuguard.policy_files.loader import load_policies

    policies, memory = load_policies(str(policy), trusted_owner=False).policies, EngineMemory()
    assert len(policies) == 10, "the policy file of this benchmark has faults"
    each = PROCESSES // DEVICES
    snapshot = a_snapshot(
        *(a_device(i, processes=tuple(a_process(1000 * i + j + 2) for j in range(each))) for i in range(DEVICES))
    )
    gc.freeze()  # as the daemon does when it has started
    times = []
    for number in range(rounds):
        sample = replace(snapshot, clock=snapshot.clock + number)
        begun = time.thread_time()
        evaluate(sample, policies, memory, interval=1.0)
        times.append((time.thread_time() - begun) * 1000)
    show("one judgement", f"{statistics.median(times):6.2f} ms of CPU  median of {rounds}; worst {max(times):.2f} ms")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as text, FakeNvml(Path(text)) as fake:
        place = Path(text)
        (place / "policy.yaml").write_text(POLICIES)
        environment = surroundings(fake, place / "claims") | {"GPUGUARD_EVENTS": str(place / "events.jsonl")}
        jobs = [subprocess.Popen(["sleep", "1000"]) for _ in range(PROCESSES)]
        wrappers = [
            subprocess.Popen(
                [sys.executable, "-m", "gpuguard", "run", "--quiet", "-n", "1", "--", "sleep", "1000"], env=environment
            )
            for _ in range(CLAIMS)
        ]
        try:
            time.sleep(2)
            for number, job in enumerate(jobs):
                # stays: else the fake library itself looks into /proc at each call, which is no cost of ours.
                fake.add_process(number % DEVICES, job.pid, 2 * GIB, stays=1)
            measure(environment, place / "policy.yaml", args.seconds)
            measure_judging(place / "policy.yaml")
        finally:
            for process in (*wrappers, *jobs):
                process.terminate()
            for process in (*wrappers, *jobs):
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
