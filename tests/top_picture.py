"""The screen of `gpuguard top` in docs/top.md: ``python tests/top_picture.py --write`` takes it, a test keeps it true.

The node and its jobs are those of the picture in the README.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

import picture
from pages import environment
from sources import ROOT

PAGE = ROOT / "docs" / "top.md"
COLUMNS, ROWS = 100, 24
_PLACE = re.compile(r"(<!-- picture: top -->\n```text\n)(.*?)(^```\n)", re.M | re.S)


def written() -> str:
    """The picture as it stands on the page."""
    found = _PLACE.search(PAGE.read_text(encoding="utf-8"))
    assert found, "docs/top.md has no picture"
    return found[2]


def taken(where: Path, age: float = 0.0) -> str:
    """The picture as it is now."""
    return picture.taken(where, age, _top)


def _top(where: Path) -> str:
    """What a terminal gets, without colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**environment(where), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(["gpuguard", "top", "--once"], cwd=where, env=env, stdout=follower) as top:
        os.close(follower)
        said = b""
        with suppress(OSError):  # the end of a terminal
            while piece := os.read(leader, 65536):
                said += piece
        assert top.wait() == 0
    os.close(leader)
    return anonymous(said.decode().replace("\r\n", "\n"))


def anonymous(screen: str) -> str:
    """*screen* with a name and a host that say nothing about who took the picture."""
    user = getpass.getuser()

    def named(found: re.Match[str]) -> str:
        return "alice" + " " * max(1, len(found[1]) + len(user) - len("alice"))

    screen = re.sub(rf"\b{re.escape(user)}\b( +)", named, screen)
    return re.sub(rf"(SIMULATED ){re.escape(os.uname().nodename)}", r"\1node1", screen)


def comparable(screen: str) -> str:
    """As picture.comparable(), without bars, notes and commands."""
    screen = re.sub(r"[█▉▊▋▌▍▎▏░]+", "BAR", screen)
    screen = re.sub(r"SIMULATED \S+", "SIMULATED HOST", screen)
    screen = re.sub(r'"[^"\n]*…', "NOTE", screen)  # cut where the time before it leaves room
    return picture.comparable(re.sub(r"(python|bash|sleep)\S* .*", "COMMAND", screen))


def main() -> None:
    with tempfile.TemporaryDirectory() as where:
        screen = taken(Path(where), age=4.0)
    print(screen)
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_PLACE.sub(lambda found: found[1] + screen + found[3], page, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
