"""The screens of `gpuguard who` in docs/guide.md and of `gpuguard top` in docs/top.md.

``python tests/support/picture.py --write`` takes them, tests keep them true.  They show a simulated node on which one
job trains, one has claimed a device and does nothing, and one has no claim.
"""

import getpass
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nodes import on_terminal
from pages import a_place, environment
from sources import ROOT

PAGES = {"who": ROOT / "docs" / "guide.md", "top": ROOT / "docs" / "top.md"}
_JOBS = (
    ["gpuguard", "run", "-n", "2", "--note", "ablation 3", "--", "python", "examples/train.py", "--memory", "62GiB"],
    ["gpuguard", "run", "--note", "notebook", "--", "sleep", "60"],
    ["env", "CUDA_VISIBLE_DEVICES=1", "python", "examples/train.py", "--memory", "30GiB"],
)
_EXPECTED = {"in_use": 2, "claimed": 1, "unclaimed_use": 1, "free": 4}


def _on_page(kind: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- picture: {kind} -->\n```text\n)(.*?)(^```\n)", re.M | re.S)


def written(kind: str) -> str:
    """The picture as it stands on its page."""
    found = _on_page(kind).search(PAGES[kind].read_text(encoding="utf-8"))
    assert found, f"{PAGES[kind]} has no picture"
    return found[2]


def taken(kind: str, where: Path, age: float = 0.0) -> str:
    """The picture as it is now, with jobs running in the directory *where*, the last one for *age* seconds."""
    started: list[subprocess.Popen[bytes]] = []
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with a_place(where):
        try:
            for count, job in enumerate(_JOBS, start=1):
                # One after the other: who comes first gets the better devices.
                started.append(subprocess.Popen(job, cwd=where, env=environment(where), **quiet))
                _await(where, count)
            time.sleep(age)
            screen = _who(where) if kind == "who" else _top(where)
        finally:
            for child in started:
                child.terminate()
            for child in started:
                child.wait()
    return anonymous(screen)


def _await(where: Path, jobs: int) -> None:
    """Until so many of the jobs show up as the picture wants them."""
    wanted = [{"in_use": 2}, {"in_use": 2, "claimed": 1}, _EXPECTED][jobs - 1]
    deadline = time.monotonic() + 20
    while True:
        states = [device["state"] for device in json.loads(_who(where, "--json"))["devices"]]
        if all(states.count(state) == number for state, number in wanted.items()):
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.1)


def _who(where: Path, *options: str) -> str:
    command = ["gpuguard", "who", *options]
    return subprocess.run(command, cwd=where, env=environment(where), check=True, capture_output=True, text=True).stdout


def _top(where: Path) -> str:
    """What a terminal gets, without colours."""
    variables = {**environment(where), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    with on_terminal(["gpuguard", "top", "--once"], variables, columns=100, cwd=where) as (_, shown_until):
        return shown_until().replace("\r\n", "\n")


def anonymous(screen: str) -> str:
    """*screen* with a name and a host that say nothing about who took the picture."""
    user = getpass.getuser()

    def named(found: re.Match[str]) -> str:
        return "alice" + " " * max(1, len(found[1]) + len(user) - len("alice"))

    screen = re.sub(rf"\b{re.escape(user)}\b( +)", named, screen)
    return re.sub(rf"\b{re.escape(os.uname().nodename)}\b", "node1", screen)


def comparable(kind: str, screen: str) -> str:
    """*screen* without what differs from one time to the next: numbers, claim ids, the width of columns."""
    if kind == "top":  # the machine's meters; its bars, notes and commands, which are cut
        screen = re.sub(r" CPU .*LOAD.*\n", "", screen)
        screen = re.sub(r"[█▉▊▋▌▍▎▏░]+", "BAR", screen)
        screen = re.sub(r'"[^"\n]*…', "NOTE", screen)
        screen = re.sub(r"(python|bash|sleep)\S* .*", "COMMAND", screen)
        screen = re.sub(r"(: \S+) \w+…", r"\1…", screen)  # how long it is claimed
    screen = re.sub(r"\b[0-9a-f]{8}\b", "ID", screen)
    screen = re.sub(r"\b(\d+(ms|[dhms]))+\b", "TIME", screen)
    return re.sub(r"[ \t]+", " ", re.sub(r"\d+(\.\d+)?", "0", screen)).strip()


def main() -> None:
    for kind, path in PAGES.items():
        with tempfile.TemporaryDirectory() as where:
            screen = taken(kind, Path(where), age=4.0)
        print(screen)
        if "--write" in sys.argv:
            page = path.read_text(encoding="utf-8")
            path.write_text(_on_page(kind).sub(rf"\g<1>{screen}\g<3>", page, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
