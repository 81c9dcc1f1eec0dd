"""The rows of benchmarks/run that stand beside other programs: starts, looks, monitors, races, releases and deaths."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import peers
from guard import DAEMON, POLICIES
from measuring import LATENCIES, Cost, Node, in_turns, node
from monitors import measured
from peers import Program, last_words, placed
from section import table
from starters import JOB, start_together

Beside = Callable[[Node], AbstractContextManager[None]]


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Args:
        others: the environment of the other programs; None: they are not there.
        pairs: rounds of commands that end by themselves.
        seconds: how long each steady monitor is watched, ...
        turns: ... in so many turns: a machine is not as fast in one minute as in the next.
        warm_up: seconds before that.
        machines: devices and latency, for commands that end by themselves.
        watched: the same, for steady monitors.
        monitors: how many of them.
        starters: so many at once.
        releases: how often a release is measured.
        largest: of what grows.
    """

    others: Path | None
    pairs: int = 11
    seconds: float = 60.0
    turns: int = 3
    warm_up: float = 5.0
    machines: Sequence[tuple[int, str]] = tuple((count, latency) for count in (8, 16) for latency in LATENCIES)
    watched: Sequence[tuple[int, str]] = ((8, "0 us"), (16, "realistic"))
    monitors: int = 99
    starters: Sequence[int] = (16, 64)
    releases: int = 5
    largest: int = 5000


QUICK = {
    "pairs": 2,
    "seconds": 2.0,
    "turns": 1,
    "warm_up": 3.0,
    "watched": ((8, "0 us"),),
    "monitors": 3,
    "machines": ((8, "0 us"), (8, "realistic")),
    "starters": (16,),
    "releases": 1,
    "largest": 500,
}
# So the daemon can be measured: as root it refuses a library of its caller's choice, which the fake driver is.
WATCHES = (sys.executable, "-c", DAEMON, "daemon", "--interval", "1s", "--policy", "{policy}")
GUARD = Program("gpuguard daemon --metrics, 10 policies", (*WATCHES, "--metrics", "127.0.0.1:{port}"), rival=False)
ENFORCER = Program("gpuguard daemon --enforce, 1 policy", (*WATCHES, "--enforce"), rival=False)
TRESPASS = """
version: 1
mode: enforce
policies:
  - {name: not-yours, when: {trespass: {}}, steps: [warn, {after: 30s, do: terminate}]}
"""


def commands(
    programs: Sequence[Program], extent: Extent, share_busy: float = 1.0, beside: Beside = lambda on: nullcontext()
) -> str:
    """A table of commands that end by themselves, on each machine, *beside* what runs there meanwhile."""
    found: dict[str, dict[str, Cost]] = {}
    for count, latency in extent.machines:
        with node(count, latency, busy=int(count * share_busy)) as on, beside(on):
            found[on.title] = in_turns(programs, on, extent.others, extent.pairs)
    first = next(iter(found.values()))
    titles = list(found)
    rows = []
    for name, cost in first.items():
        if cost.error:
            rows.append([f"`{name}`", cost.error, *[""] * (len(titles) + 2)])
            continue
        cells = [_compared(found[title], name) for title in titles]
        calls = sum(cost.calls.values())
        rows.append([f"`{name}`", *cells, _cpu(first, name), f"{cost.resident:.1f}", str(calls)])
    header = ["", *(f"{title}, ms" for title in titles), "CPU ms", "MiB", "driver calls"]
    of_first = f"CPU, largest process and driver calls: {titles[0]}."
    return "\n\n".join([table(header, rows), of_first, by_function(first)])


def _compared(costs: Mapping[str, Cost], name: str) -> str:
    """The median, and how many times as long the first of ours takes."""
    cost, base = costs[name], next(iter(costs.values()))
    if cost.error:
        return cost.error
    ratio = f" ({base.median / cost.median:.2f})" if cost is not base and not base.error else ""
    return f"{cost.median:.0f}{ratio}"


def _cpu(costs: Mapping[str, Cost], name: str) -> str:
    """The same for CPU."""
    cost, base = costs[name], next(iter(costs.values()))
    own = statistics.median(cost.cpu)
    return f"{own:.0f}" if cost is base or base.error else f"{own:.0f} ({statistics.median(base.cpu) / own:.2f})"


def by_function(costs: Mapping[str, Cost]) -> str:
    """Who asks the driver for what."""
    lines = []
    for name, cost in costs.items():
        often = sorted(cost.calls.items(), key=lambda each: (-each[1], each[0]))
        told = ", ".join(f"{function.removeprefix('nvml').removeprefix('Device')} {count}" for function, count in often)
        lines += [f"- `{name}`: {told}"] if told else []
    return "<details><summary>driver calls by function</summary>\n\n" + "\n".join(lines) + "\n\n</details>"


def start(extent: Extent) -> str:
    """Start of a job, half of the devices in use."""
    return commands(peers.START, extent, share_busy=0.5)


def select(extent: Extent) -> str:
    """Selection, in an interpreter that is started for it, half of the devices in use."""
    return commands(peers.SELECT, extent, share_busy=0.5)


def who(extent: Extent) -> str:
    """Who uses what."""
    told = commands(peers.TOLD, extent, beside=_daemon)
    return f"{commands(peers.WHO, extent)}\n\nWhile `gpuguard daemon` runs, its last look is told:\n\n{told}"


@contextmanager
def _daemon(on: Node) -> Iterator[None]:
    """A daemon that has looked, and looks so seldom that its calls are hardly ever among those of a command."""
    words = [sys.executable, "-c", DAEMON, "daemon", "--interval", "10s"]
    said = (on.place / "daemon-said").open("w")
    with said, subprocess.Popen(words, env=on.environment, stderr=said) as daemon:
        try:
            _until(lambda: any(Path(on.environment["GPUGUARD_DIR"]).rglob("state.json")))
            yield
        finally:
            daemon.terminate()


def once(extent: Extent) -> str:
    """A monitor that prints once."""
    return commands(peers.ONCE, extent)


def steady(extent: Extent) -> str:
    """Monitors on a terminal, one look per second."""
    left_out = ", ".join(f"`{program.name}`" for program in peers.STEADY[extent.monitors :])
    told = f"\n\nLeft out with `--quick`: {left_out}." if left_out else ""
    return _watched(peers.STEADY[: extent.monitors], extent, draw=True) + told


def guard(extent: Extent) -> str:
    """What stays: the daemon with policies and metrics, and the exporters."""
    return _watched((GUARD, *peers.EXPORTERS), extent, draw=False)


def enforce(extent: Extent) -> str:
    """Who uses a device without a claim is ended, and nothing else: no metrics, no other policy."""
    return _watched((ENFORCER, *peers.ENFORCERS), extent, draw=False, policies=TRESPASS)


def _watched(programs: Sequence[Program], extent: Extent, *, draw: bool, policies: str = POLICIES) -> str:
    tables = []
    for count, latency in extent.watched:
        with node(count, latency) as on:
            policy = _policy(on.place / "policy.yaml", policies)
            found: dict[str, list[list[float]]] = {}
            errors: dict[str, str] = {}
            for program in [*programs] * extent.turns:  # A B A B
                if (words := placed(program, extent.others)) and program.name not in errors:
                    command = [word.replace("{policy}", policy) for word in words]
                    one = _one_watched(command, on, extent, draws=draw)
                    if isinstance(one, str):
                        errors[program.name] = one
                    else:
                        found.setdefault(program.name, []).append(one)
        means = {name: [statistics.mean(figure) for figure in zip(*each, strict=True)] for name, each in found.items()}
        base = next(iter(means.values()), [])
        rows = []
        for program in programs:
            if program.name in errors:
                rows.append([f"`{program.name}`", errors[program.name], "", ""])
            elif mean := means.get(program.name):
                rows.append([f"`{program.name}`", *(_share(*each) for each in zip(mean, base, UNITS, strict=True))])
        turns = f" in {extent.turns} turns" if extent.turns > 1 else ""
        header = [
            f"{on.title}, {extent.seconds:.0f} s each{turns}",
            "CPU of one core",
            "MiB (Pss)",
            "driver calls a second",
        ]
        tables.append(table(header, rows))
    return "\n\n".join(tables)


def _policy(place: Path, text: str) -> str:
    """The path of a file with these policies; with a fault in them the daemon would only look, which costs less."""
    place.write_text(text)
    subprocess.run([sys.executable, "-m", "gpuguard", "policy", "check", "--strict", str(place)], check=True)
    return str(place)


UNITS = (".2f", ".1f", ".0f")


def _share(amount: float, base: float, form: str) -> str:
    ratio = f" ({base / amount:.2f})" if amount and amount != base else ""
    return f"{amount:{form}}{' %' if form == '.2f' else ''}{ratio}"


def _one_watched(words: Sequence[str], on: Node, extent: Extent, *, draws: bool) -> list[float] | str:
    """CPU in percent, MiB, driver calls per second; or why it does not run."""
    on.fake.reset_calls()
    begun = time.monotonic()
    try:
        cpu, memory = measured(list(words), on.environment, extent.seconds / extent.turns, extent.warm_up, draws=draws)
    except (SystemExit, OSError, AssertionError, subprocess.SubprocessError) as end:
        return last_words(str(end).replace("\r", ""))
    return [cpu, memory, sum(on.fake.calls().values()) / (time.monotonic() - begun)]


UNCLAIMED = """

py3nvml and nvisel choose without a claim: they see who came before only once that job has memory on the GPU, which
these jobs never have, and real ones only after seconds."""


def race(extent: Extent) -> str:
    """Many starters at one instant on 8 idle devices."""
    rows = []
    for starters in extent.starters:
        for program in peers.STARTERS:
            words = placed(program, extent.others)
            if words is None:
                continue
            with node(8, "500 us", busy=0) as on:
                outcome = start_together(on.place / "round", on.environment, starters, wait=False, starter=words)
            figures = [outcome.ran, outcome.doubles, outcome.tracebacks, 8 - outcome.devices]
            cells = [*map(str, figures), f"{outcome.seconds:.1f}"]
            if not outcome.ran:  # a program that cannot run here has not lost the race
                cells = [f"does not run: {last_words(outcome.complaint)}", *[""] * 4]
            rows.append([str(starters), f"`{program.name}`", *cells])
    return table(["starters", "", "ran", "doubles", "tracebacks", "unused GPUs", "s"], rows) + UNCLAIMED


def release(extent: Extent) -> str:
    """From the end of a job to the start of the one that waits for its device."""
    waiters = (
        peers.ours("run --wait", "run", "--quiet", "--wait", "--"),
        peers.theirs("gpu-gate run", "gpu-gate", "run", "--quiet", "--"),
        peers.theirs("gpu-gate run --poll 0.5", "gpu-gate", "run", "--quiet", "--poll", "0.5", "--"),
    )
    rows = []
    for program in waiters:
        if words := placed(program, extent.others):
            gaps = [_gap(words, number) for number in range(extent.releases)]
            rows.append([f"`{program.name}`", f"{statistics.median(gaps):.0f}", f"{max(gaps):.0f}"])
    return table(["one GPU", "median ms", "worst ms"], rows)


def _gap(words: Sequence[str], number: int) -> float:
    """Milliseconds from a job's end to the start of the next."""
    with node(1, busy=0) as on:
        gate = on.place / "gate"
        job = [*words, sys.executable, "-S", "-c", JOB, str(on.place)]
        with subprocess.Popen([*job, str(gate), "0"], env=on.environment) as holder:
            _until(lambda: any(on.place.glob("begun-*")))
            with subprocess.Popen([*job, "", "0"], env=on.environment) as waiter:
                time.sleep(2.0 + 0.7 * number)  # it has looked and waits; who polls does so at another phase each time
                gate.touch()
                holder.wait(60)
                waiter.wait(60)
        notes = [path.read_text().split() for path in on.place.iterdir() if path.name.isdigit()]
        spans = sorted((float(begun), float(end)) for _, begun, end in notes)
        return (spans[1][0] - spans[0][1]) * 1000


def death(extent: Extent) -> str:
    """The wrapper is killed, its job lives on: may another job have the device?"""
    rows = []
    for program in peers.STARTERS:
        if words := placed(program, extent.others):
            with node(1, busy=0) as on:
                rows.append([f"`{program.name}`", _killed(words, on)])
    return table(["", "its wrapper has got SIGKILL, and the job runs"], rows) + UNCLAIMED


def _killed(words: Sequence[str], on: Node) -> str:
    begun = on.place / "begun-first"
    told = [sys.executable, "-S", "-c", LASTING, str(begun)]
    with (on.place / "said").open("w") as said:  # no pipe: the job would keep it open
        wrapper = subprocess.Popen([*words, *told], env=on.environment, stderr=said)
    try:
        _until(lambda: begun.exists() or wrapper.poll() is not None)
        return _after_death(words, wrapper, begun, on)
    finally:
        wrapper.kill()
        wrapper.wait()
        if begun.exists():
            with suppress(ProcessLookupError):
                os.kill(int(begun.read_text()), signal.SIGKILL)


LASTING = """
import os, sys, time
open(sys.argv[1] + "~", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(60)
"""


def _after_death(words: Sequence[str], wrapper: subprocess.Popen[bytes], begun: Path, on: Node) -> str:
    if wrapper.poll() is not None:
        return f"does not run: {last_words((on.place / 'said').read_text())}"
    job = int(begun.read_text())
    wrapper.kill()
    wrapper.wait()
    time.sleep(1.0)
    if job == wrapper.pid or not Path(f"/proc/{job}").exists():
        return "there is no wrapper beside the job" if job == wrapper.pid else "the job has ended with it"
    second = subprocess.run([*words, "true"], env=on.environment, capture_output=True, check=False, timeout=60)
    return "the next one gets the same GPU" if second.returncode == 0 else "the GPU stays claimed"


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("a program under measurement did not start")
        time.sleep(0.02)
