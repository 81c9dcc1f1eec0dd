"""A real interactive shell on a pseudo-terminal, with our completion in it.

with Shell("bash", place, environment) as shell:
    shell.words("gpuguard run --dev\t")              the words of the line after that: ["gpuguard", "run", "--devices"]
    shell.shows("gpuguard run --g\t\t", "--grace")  waits until that stands on the screen
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import shutil
import struct
import subprocess
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60  # far beyond any answer, even on a busy machine
PACKAGES = {"bash": "bash", "zsh": "zsh", "fish": "fish"}
_HOME, _CANCEL = "\x01", "\x03"  # Ctrl-A, Ctrl-C
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b[()][0-9A-B]|\x1b[=>]|[\x00\x07\x0e\x0f]"
)
_WORDS = """#!/bin/sh
printf '%s\\0' "$@" >words.new && mv words.new words.txt
"""

_START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
_SETUP = {
    "bash": "PS1='> '; bind 'set enable-bracketed-paste off'; {more}; eval \"$(gpuguard completion bash)\"",
    "zsh": (
        "PS1='> '; PROMPT_EOL_MARK=; unsetopt ZLE_BRACKETED_PASTE 2>/dev/null; unset zle_bracketed_paste; {more}; "
        "mkdir -p zfunc; gpuguard completion zsh > zfunc/_gpuguard; fpath=($PWD/zfunc $fpath); "
        "autoload -Uz compinit; compinit -u -d $PWD/zcompdump"
    ),
    "fish": (
        "function fish_prompt; echo -n '> '; end; function fish_greeting; end; {more}; "
        "gpuguard completion fish | source"
    ),
}


def needed(name: str) -> str:
    """Its path; the test is skipped, loudly, where it is missing."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"what {name} reads of ours (no {name}: apt-get install {PACKAGES.get(name, name)})")
    return path


class Shell:
    """An interactive shell in the directory *place*; *more* is run in it first.

    *installed*: our completion is a file that the shell finds; else it is loaded as docs/shell.md says.
    """

    def __init__(
        self, name: str, place: Path, environment: Mapping[str, str], more: str = ":", *, installed: bool = False
    ) -> None:
        needed(name)
        self.name = name
        self._screen = ""
        self._written = place / "words.txt"
        (place / "words").write_text(_WORDS)
        (place / "words").chmod(0o755)
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        variables = {**environment, "TERM": "xterm", "HOME": str(place), "LANG": "C.UTF-8", "HISTFILE": "/dev/null"}
        options: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
        self._process = subprocess.Popen(
            _START[name],
            cwd=place,
            env=variables,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # for job control
            **options,
        )
        os.close(theirs)
        setup = _SETUP[name] if not installed else "PS1='> '; bind 'set enable-bracketed-paste off'; {more}"
        self._type(setup.format(more=more) + "; printf '<%s>' is ready\n")
        self._until(lambda: "<is><ready>" in self.screen())  # the echo of the line has no such thing

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._ours)  # hangs up: the shell ends, and what it runs
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def screen(self) -> str:
        """All that was written to the terminal since the last line was typed."""
        return _ESCAPES.sub("", self._screen)

    def words(self, keys: str) -> list[str]:
        """The words of the command line after *keys*, as the shell would give them to the program."""
        self._written.unlink(missing_ok=True)
        self._type(f"{keys}{_HOME}./words \n")
        self._until(self._written.exists)
        return self._written.read_bytes().decode().split("\0")[:-1]

    def shows(self, keys: str, *texts: str) -> str:
        """The screen once all *texts* stand on it; then the line is given up.

        Asks again after 5 s: on a machine that stalls, completion gives a look up and offers nothing.
        """
        self._screen = ""
        self._type(keys)
        asked = time.monotonic()

        def shown() -> bool:
            nonlocal asked
            if time.monotonic() > asked + 5:
                self._type("\t")
                asked = time.monotonic()
            return all(text in self.screen() for text in texts)

        self._until(shown)
        screen = self.screen()
        self._type(_CANCEL)
        return screen

    def _type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def _until(self, is_true: Any) -> None:
        ends = time.monotonic() + SECONDS
        while not is_true():
            assert time.monotonic() < ends, f"{self.name} shows only: {self.screen()!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self._screen += os.read(self._ours, 65536).decode("utf-8", "replace")
                except OSError:  # EIO: it has ended
                    raise AssertionError(f"{self.name} ended: {self.screen()!r}") from None
