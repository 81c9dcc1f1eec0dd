"""What a fleet costs: hosts over ssh, and nodes in a Prometheus.

    python benchmarks/fleet.py hosts                      45 simulated hosts behind a real sshd, and 5 dead ones
    python benchmarks/fleet.py nodes 10 1000              a real Prometheus scrapes so many real pages of gpuguard
    python benchmarks/fleet.py nodes 10000 --every 60     12 GiB of memory, 5 minutes

All of it runs on this machine: the 45 hosts share its cores with their client.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

import fleet_store
from job_start import show
from sshd import DEAD, Fleet, a_fleet

PYTHON = [sys.executable, "-m", "gpuguard"]


def ask(fleet: Fleet, hosts: list[str], timeout: float, more: str = "") -> tuple[float, float, list[dict[str, object]]]:
    """Seconds, CPU seconds of this side, and the answers."""
    words = [*PYTHON, "who", "--json", "--timeout", f"{timeout:g}s", "--hosts", ",".join(hosts)]
    before, begun = os.times(), time.monotonic()
    done = subprocess.run(words, env={**os.environ, "GPUGUARD_SSH": fleet.ssh + more}, capture_output=True, check=False)
    passed, after = time.monotonic() - begun, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return passed, cpu, json.loads(done.stdout)["hosts"]


def hosts(timeout: float) -> None:
    """Print how long a fleet takes."""
    with tempfile.TemporaryDirectory() as text, a_fleet(Path(text), 45) as fleet:
        alone = [ask(fleet, ["sim00"], 60)[0] for _ in range(5)]
        show("one host", f"{statistics.median(alone) * 1000:.0f} ms")
        passed, cpu, found = ask(fleet, list(fleet.hosts), 120)
        right = sum(one["error"] is None for one in found)
        show("45 hosts", f"{passed:.1f} s, {right} answered; {cpu / 45 * 1000:.0f} ms CPU of this side per host")
        passed, _, found = ask(fleet, [*DEAD[:3], *fleet.hosts, *DEAD[3:]], timeout)
        silent = sorted(str(one["host"]) for one in found if one["error"])
        show(
            f"50 hosts, 5 of them dead, --timeout {timeout:g}s",
            f"{passed:.1f} s, {50 - len(silent)} answered, silent: {', '.join(silent)}",
        )
        more = f" -o ControlMaster=auto -o ControlPersist=60 -o ControlPath={text}/%n"
        try:
            ask(fleet, ["sim00"], 60, more)
            again = [ask(fleet, ["sim00"], 60, more)[0] for _ in range(5)]
            show("one host, master connection", f"{statistics.median(again) * 1000:.0f} ms")
        finally:
            subprocess.run([*fleet.ssh.split(), "-o", f"ControlPath={text}/%n", "-O", "exit", "sim00"],
                           capture_output=True, check=False)  # fmt: skip


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hosts", "nodes"))
    parser.add_argument("numbers", type=int, nargs="*", default=[10, 1000])
    parser.add_argument("--every", type=int, default=15, help="seconds between two scrapes of a node (default: 15)")
    parser.add_argument("--timeout", type=float, default=20, help="seconds per host (default: 20)")
    args = parser.parse_args()
    # As an exception it ends on its way out what was started: by itself it would leave sshd or Prometheus behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if args.what == "hosts":
        hosts(args.timeout)
        return 0
    fleet_store.per_page()
    fleet_store.on_disk()
    for number in args.numbers:
        fleet_store.measure(number, args.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
