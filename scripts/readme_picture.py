"""The picture at the top of the README: .venv/bin/python scripts/readme_picture.py --write

A recorded session: two jobs start at the same moment, first each on the GPU that nvidia-smi lists as the emptiest, then
with gpuguard.  The programs, processes and claims are real; the node is simulated, so `nvidia-smi` is `gpuguard query`
there.  Only the name of the user is replaced.  rich, which textual brings along, draws each step as an SVG; they are
shown one after the other.  Without motion all lie on top of each other, and the last one, which shows it all, is seen.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "two-at-once.svg"
COLUMNS = 108
NAIVE = (
    "CUDA_VISIBLE_DEVICES=$(nvidia-smi --query-gpu=memory.used,index --format=csv,noheader |\n"
    "    sort -n | head -1 | cut -d' ' -f3) python {}.py --memory 30GiB"
)
GUARDED = "gpuguard run -- python {}.py --memory 30GiB"
JOBS = ("alice", "bob")


Step = tuple[Text, float]  # what is printed, and for how many seconds it is the last


def main() -> None:
    """Record both acts, and draw them."""
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as where:
        place = Path(where)
        tool = place / "nvidia-smi"
        tool.write_text('#!/bin/sh\nexec gpuguard query "$@"\n')
        tool.chmod(0o755)
        for name in JOBS:
            (place / f"{name}.py").write_text((ROOT / "examples" / "train.py").read_text())
        intention = "# Two people start at the same moment, each on the GPU with the least memory in use"
        steps = [(Text(intention, "cyan"), 1.5), *act(place, NAIVE, [0, 2])]
        steps += [(Text("\n# The same with gpuguard", "cyan"), 1.5), *act(place, GUARDED, [1, 1])]
    PICTURE.write_text(animated(steps), encoding="utf-8")


def animated(steps: Sequence[Step]) -> str:
    """One SVG in which each of *steps* comes below those before, again and again."""
    frames = [drawn([text for text, _ in steps[: number + 1]], steps, number) for number in range(len(steps))]
    whole, at = sum(seconds for _, seconds in steps), 0.0
    style = [".frame { animation-timing-function: step-end; animation-iteration-count: infinite; }"]
    for number, (_, seconds) in enumerate(steps):
        begin, end = 100 * at / whole, 100 * (at + seconds) / whole
        at += seconds
        style.append(f"#frame{number} {{ animation-name: step{number}; animation-duration: {whole}s; }}")
        shown = f"{begin:.2f}% {{ visibility: visible; }} {min(end, 99.99):.2f}%, 100% {{ visibility: hidden; }}"
        style.append(f"@keyframes step{number} {{ 0% {{ visibility: hidden; }} {shown} }}")
    # What an id says goes before what a class says, unless that is important.
    style.append("@media (prefers-reduced-motion: reduce) { .frame { animation: none !important; } }")
    box = re.search(r'viewBox="[^"]*"', frames[0])
    assert box
    words = "\n".join(style)
    nested = [f'<g class="frame" id="frame{number}">{frame}</g>' for number, frame in enumerate(frames)]
    body = "\n".join(nested)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]}>\n<style>\n{words}\n</style>\n{body}\n</svg>\n'


def drawn(texts: Sequence[Text], steps: Sequence[Step], number: int) -> str:
    """A terminal with *texts*, as high as one with all *steps*."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for text in texts:
            console.print(text)
        missing = sum(text.plain.count("\n") + 1 for text, _ in steps[len(texts) :])
        console.print("\n" * (missing + 1 if missing else 0), end="")
        return console.export_svg(title="two jobs, one moment", unique_id=f"step{number}")


def act(place: Path, command: str, expected: list[int]) -> Iterator[Step]:
    """Start *command* for both at once and show it in `gpuguard who`; *expected*: processes on the GPUs, sorted."""
    shell(place, "gpuguard sim start 2xH100-80GB")
    for name in JOBS:
        yield Text.assemble((f"{name}$ ", "green"), (command.format(name), "bold")), 1.5
    jobs = [
        subprocess.Popen(
            command.format(name),
            shell=True,
            cwd=place,
            env=environment(place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name in JOBS
    ]
    try:
        deadline = time.monotonic() + 30
        while True:
            devices = json.loads(shell(place, "gpuguard who --json"))["devices"]
            seen = sorted(len(device["processes"]) for device in devices)
            if seen == expected:
                break
            if time.monotonic() > deadline:
                sys.exit(f"processes on each GPU: {seen}")
            time.sleep(0.2)
        time.sleep(3)  # a utilization is seen
        yield Text.assemble(("\n$ ", "green"), ("gpuguard who", "bold")), 0.5
        screen = shell(place, f"script -qec 'stty cols {COLUMNS}; gpuguard who' /dev/null").replace("\r\n", "\n")
        yield Text.from_ansi(anonymous(screen).rstrip("\n")), 5.0
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGTERM)
        for job in jobs:
            job.wait()
        shell(place, "gpuguard sim stop")


def anonymous(screen: str) -> str:
    """*screen* with a user and a host that say nothing about the machine on which it was taken."""
    user, width = getpass.getuser(), len("lab")
    screen = re.sub(rf"\b{re.escape(user)}\b", lambda found: "lab".ljust(max(width, len(found[0]))), screen)
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "node1", screen)


def environment(place: Path) -> dict[str, str]:
    """The variables of a shell that sees only the simulated node in *place*."""
    return {
        **os.environ,
        "PATH": f"{place}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GPUGUARD_BACKEND": "simulated",
        "GPUGUARD_SIM_DIR": f"{place}/node",
        "GPUGUARD_EVENTS": f"{place}/events.jsonl",
        "TERM": "xterm-256color",
    }


def shell(place: Path, command: str) -> str:
    """What *command* prints."""
    done = subprocess.run(
        command, shell=True, cwd=place, env=environment(place), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
