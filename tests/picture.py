"""The screen of `gpuguard who` in the README: ``python tests/picture.py --write`` takes it, a test keeps it true.

A simulated node on which one job trains, one has claimed a device and does nothing, and one has no claim.
"""

from __future__ import annotations

import getpass
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pages import a_place, environment
from sources import ROOT

README = ROOT / "README.md"
_PLACE = re.compile(r"(<!-- picture: who -->\n```text\n)(.*?)(^```\n)", re.M | re.S)
_JOBS = (
    ["gpuguard", "run", "-n", "2", "--note", "ablation 3", "--", "python", "examples/train.py", "--memory", "62GiB"],
    ["gpuguard", "run", "--note", "notebook", "--", "sleep", "60"],
    ["env", "CUDA_VISIBLE_DEVICES=1", "python", "examples/train.py", "--memory", "30GiB"],
)
_EXPECTED = {"in_use": 2, "claimed": 1, "unclaimed_use": 1, "free": 4}


def written() -> str:
    """The picture as it stands in the README."""
    found = _PLACE.search(README.read_text(encoding="utf-8"))
    assert found, "the README has no picture"
    return found[2]


def taken(where: Path, age: float = 0.0, show: Callable[[Path], str] | None = None) -> str:
    """The picture as it is now, with jobs running in the directory *where*, the last one for *age* seconds.

    *show* takes it, and makes it anonymous; `gpuguard who` without it.
    """
    started: list[subprocess.Popen[bytes]] = []
    with a_place(where):
        try:
            for count, job in enumerate(_JOBS, start=1):
                # One after the other: who comes first gets the better devices.
                started.append(
                    subprocess.Popen(
                        job, cwd=where, env=environment(where), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                )
                _await(where, count)
            time.sleep(age)
            screen = show(where) if show else _who(where)
        finally:
            for child in started:
                child.terminate()
            for child in started:
                child.wait()
    return screen if show else anonymous(screen)


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


def anonymous(screen: str) -> str:
    """*screen* with a name that says nothing about who took the picture, as wide as the own one if possible."""
    user, host = getpass.getuser(), screen.split(":", 1)[0].split()[-1]
    screen = re.sub(rf"\b{re.escape(user)}\b *", lambda found: "alice".ljust(len(found[0])), screen)
    return re.sub(rf"\b{re.escape(host)}\b", "node1", screen)


def comparable(screen: str) -> str:
    """*screen* without what differs from one time to the next: numbers, claim ids, the width of columns."""
    screen = re.sub(r"\b[0-9a-f]{8}\b", "ID", screen)
    screen = re.sub(r"\b(\d+(ms|[dhms]))+\b", "TIME", screen)
    return re.sub(r"[ \t]+", " ", re.sub(r"\d+(\.\d+)?", "0", screen)).strip()


def main() -> None:
    with tempfile.TemporaryDirectory() as where:
        picture = taken(Path(where), age=3.0)
    print(picture)
    if "--write" in sys.argv:
        page = README.read_text(encoding="utf-8")
        README.write_text(_PLACE.sub(lambda found: found[1] + picture + found[3], page, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
