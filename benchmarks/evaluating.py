"""What judging costs: one step of the engine with 10 policies, on 8 devices with 40 processes.

    python benchmarks/evaluating.py --steps 2000

The policies use the real rules; more than half of the processes break one or several of them.  No driver, no signals:
what is timed is evaluate() alone, in CPU time of the thread: on a machine that does other things too, the worst of the
times on the clock is how long somebody else had the CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot

from gpuguard.model import Snapshot
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.idle import AgeRule, IdleRule
from gpuguard.policies.policy import Exemption, Policy, Step
from gpuguard.policies.quota import QuotaRule
from gpuguard.policies.thresholds import HealthRule, ProcessesRule, TemperatureRule, UtilizationRule
from gpuguard.policies.thresholds import MemoryRule as MemoryRule
from gpuguard.policies.trends import MemoryGrowthRule
from gpuguard.policies.usage import TrespassRule, UnclaimedRule
from gpuguard.policies.view import RuleView
from gpuguard.units import parse_memory_amount, parse_rate

DEVICES, PROCESSES = 8, 5  # processes per device

LADDER = (Step("warn"), Step("checkpoint", 600), Step("terminate", 1800))
POLICIES = (
    Policy("memory", (MemoryRule(parse_memory_amount("30GiB")),), steps=LADDER),
    Policy("growth", (MemoryGrowthRule(parse_rate("1GiB/10m"), over=60),), steps=LADDER),
    Policy("hot", (TemperatureRule(85),), steps=LADDER[:1]),
    Policy("idle", (IdleRule(5), UtilizationRule(below=5)), hold=7200, start_grace=1800, steps=LADDER),
    Policy("unclaimed", (UnclaimedRule(),), steps=LADDER, exempt=(Exemption(users=frozenset({1001})),)),
    Policy("trespass", (TrespassRule(),), steps=LADDER, devices_at_least=2),
    Policy("quota", (QuotaRule(devices=3),), steps=LADDER),
    Policy("age", (AgeRule(run_time_above=72 * 3600.0),), steps=LADDER, hours=(0.0, 6 * 3600.0)),
    Policy("ill", (HealthRule(problems=("*",)),), steps=LADDER[:1]),
    Policy("many", (ProcessesRule(8),), join="any", steps=LADDER, claimed_above=80),
)


def a_busy_node(clock: float) -> Snapshot:
    """8 devices, two for each of 4 users; every fifth process is somebody else's; half of the devices are claimed."""
    devices = []
    for index in range(DEVICES):
        processes = tuple(
            a_process(
                1000 + 10 * index + number,
                uid=1001 + (index // 2 + number // 4) % 4,
                memory_used=(40 if number == 0 and index % 2 else 10) * GIB,
                start_time=100.0,
            )
            for number in range(PROCESSES)
        )
        device = {"utilization": 2.0 if index == 7 else 90.0, "memory_used": 60 * GIB, "temperature": 70.0}
        devices.append(a_device(index, processes=processes, **device))
    claims = tuple(a_claim_record(devices[place], id=f"c{place}", uid=1001 + place // 2) for place in range(4))
    return a_snapshot(*devices, clock=clock, taken_at=1_700_000_000.0 + clock, claims=claims)


def seconds(steps: int) -> list[float]:
    """Of each step, at one sample per second, after a minute of warming up; the shortest first."""
    memory, times = EngineMemory(), []
    for second in range(-60, steps):
        view = RuleView(a_busy_node(10_000.0 + second))
        begun = time.thread_time()
        evaluate(view, POLICIES, memory, interval=1.0)
        if second >= 0:
            times.append(time.thread_time() - begun)
    return sorted(times)


def findings() -> int:
    """How many findings the policies have in one sample."""
    view = RuleView(a_busy_node(10_000.0))
    return sum(len(list(rule.check(view))) for policy in POLICIES for rule in policy.rules)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="samples that are judged (default: %(default)s)")
    steps = parser.parse_args().steps
    gc.disable()
    size = f"{DEVICES} devices, {DEVICES * PROCESSES} processes, {len(POLICIES)} policies, {findings()} findings"
    times = [1000 * each for each in seconds(steps)]
    rest = f"99% within {times[int(0.99 * (steps - 1))]:.2f} ms, worst {times[-1]:.2f} ms"
    print(f"{size}: {statistics.median(times):.2f} ms per step (median of {steps}), {rest}")


if __name__ == "__main__":
    main()
