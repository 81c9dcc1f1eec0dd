"""The other programs that benchmarks/run compares with: what is installed, how each is started, what it stands beside.

They get an environment of their own.  None is slowed down or helped: each runs with what it does when nothing else is
said, besides the interval, and on the same fake driver as gpuguard.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from job_start import FLOOR, GPUGUARD

INSTALLED = ("nvitop", "nvitop-exporter", "gpustat", "py3nvml", "gpu-gate", "genv", "glances")  # nvisel is nvitop's
LAST_WORDS = 160


@dataclass(frozen=True)
class Program:
    """One line of a table.

    Args:
        name: as people type it.
        words: how it is started; "{bin}" is the environment of the others.
        rival: what gpuguard is compared with; False: our own, or a floor.
    """

    name: str
    words: tuple[str, ...]
    rival: bool = True


def ours(name: str, *words: str) -> Program:
    """A command of gpuguard."""
    return Program(f"gpuguard {name}".strip(), (*GPUGUARD, *words), rival=False)


def ours_in_python(name: str, script: str) -> Program:
    """The same, from Python."""
    return Program(name, (sys.executable, "-c", script), rival=False)


def theirs(name: str, *words: str) -> Program:
    """A command of somebody else."""
    return Program(name, (f"{{bin}}/{words[0]}", *words[1:]))


def in_python(name: str, script: str) -> Program:
    """What is used from Python."""
    return theirs(name, "python", "-c", script)


GENV = """
import subprocess, sys, genv.sdk as genv
from genv.entities import Env
with genv.activate(config=Env.Config(name="job", gpus=1)):
    sys.exit(subprocess.call(sys.argv[1:]))
"""
GRAB = "import py3nvml, subprocess, sys; py3nvml.grab_gpus(1); sys.exit(subprocess.call(sys.argv[1:]))"
NVISEL = 'CUDA_VISIBLE_DEVICES=$("$0" -n 1 2>/dev/null) exec "$@"'

FLOORS = Program("import pynvml; nvmlInit() (floor)", tuple(FLOOR), rival=False)
# Those that start a job; the job's words follow.  py3nvml and nvisel choose without a claim: who starts jobs with them
# does it like this.
STARTERS = (
    ours("run", "run", "--no-wait", "--"),
    theirs("gpu-gate run", "gpu-gate", "run", "--quiet", "--timeout", "1", "--poll", "0.5", "--"),
    in_python("genv SDK, activate", GENV),
    in_python("py3nvml.grab_gpus", GRAB),
    Program("nvisel", ("sh", "-c", NVISEL, "{bin}/nvisel")),
)
START = (
    ours("run -- true", "run", "--", "true"),
    ours("run --exec -- true", "run", "--exec", "--", "true"),
    FLOORS,
    theirs("gpu-gate run -- true", "gpu-gate", "run", "--", "true"),
    theirs("genv SDK, activate; true", "python", "-c", GENV, "true"),
)
SELECT = (
    ours_in_python("gpuguard.select_devices", "import gpuguard; gpuguard.select_devices(1)"),
    ours("select", "select"),
    FLOORS,
    in_python("nvitop.select_devices", "import nvitop; nvitop.select_devices(min_count=1, max_count=1)"),
    theirs("nvisel -n 1", "nvisel", "-n", "1"),
    in_python("py3nvml.grab_gpus", "import py3nvml; py3nvml.grab_gpus(1)"),
)
WHO = (
    ours("who", "who"),
    ours("who --json", "who", "--json"),
    FLOORS,
    theirs("gpustat -cup", "gpustat", "-cup"),
    theirs("genv devices", "genv", "devices"),
)
TOLD = (WHO[0], WHO[1], FLOORS, WHO[4])  # while the daemon runs, beside what keeps the devices in a file, too
ONCE = (
    ours("who", "who"),
    FLOORS,
    theirs("nvitop -1", "nvitop", "-1"),
    theirs("glances --stdout gpu", "glances", "--stdout", "gpu", "--stop-after", "1"),
)
STEADY = (  # --quick takes the first three
    ours("who --watch 1s", "who", "--watch", "1s", "--fresh"),
    theirs("nvitop", "nvitop", "--monitor", "full", "--interval", "1"),
    theirs("gpustat -i 1", "gpustat", "-i", "1", "-cup"),
    theirs("glances", "glances", "--time", "1"),
    ours("top --plain", "top", "--every", "1s", "--fresh", "--plain"),
    ours("top", "top", "--every", "1s", "--fresh"),
)
EXPORTERS = (
    ours("metrics --serve", "metrics", "--fresh", "--serve", "127.0.0.1:{port}"),
    theirs("nvitop-exporter", "nvitop-exporter", "--bind-address", "127.0.0.1", "--port", "{port}"),
)
ENFORCERS = (theirs("genv enforce", "genv", "enforce", "--interval", "1"),)
# One look in Python, again and again: what look() does is measured after it was done once.
LOOKS = (
    ours_in_python(
        "gpuguard",
        "from gpuguard.backends.nvml import Nvml; from gpuguard.model import WHO_FIELDS\n"
        "node = Nvml()\nlook = lambda: node.sample(WHO_FIELDS)\n",
    ),
    in_python(
        "nvitop.take_snapshots",
        "import nvitop\nlook = nvitop.take_snapshots\n",
    ),
    in_python("gpustat.new_query", "import gpustat\nlook = gpustat.new_query\n"),
)

RIVALS = {each.name for row in (START, SELECT, WHO, ONCE, STEADY, EXPORTERS, ENFORCERS) for each in row if each.rival}


def install(directory: Path) -> dict[str, str]:
    """Put the others into *directory*, unless they are there; returns what could not be installed, with the reason."""
    if not (directory / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    missing = [name for name in INSTALLED if name not in versions(directory)]
    if not missing or not (why := _pip(directory, *missing)):
        return {}
    # One that cannot be had must not keep the others away.
    return {name: why for name in missing if (why := _pip(directory, name))}


def _pip(directory: Path, *names: str) -> str:
    words = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ended = subprocess.run([*words, *names], capture_output=True, text=True, check=False)
    return last_words(ended.stderr) if ended.returncode else ""


def versions(directory: Path) -> dict[str, str]:
    """Those of the others that are installed."""
    places = directory.glob("lib/python*/site-packages/*.dist-info")
    found = dict(place.name.lower().removesuffix(".dist-info").rsplit("-", 1) for place in places)
    return {name: found[name.replace("-", "_")] for name in INSTALLED if name.replace("-", "_") in found}


def last_words(text: str) -> str:
    """What a program said last, short enough for a table."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1].strip().replace("|", "/")[:LAST_WORDS]


def placed(program: Program, directory: Path | None) -> tuple[str, ...] | None:
    """The words of *program*, None where the environment of the others is missing."""
    if directory is None and any("{bin}" in word for word in program.words):
        return None
    return tuple(word.replace("{bin}", f"{directory}/bin") for word in program.words)
