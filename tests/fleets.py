"""Hosts of a fleet without a network: a program that stands in for ssh and answers what the test says.

hosts = Hosts(tmp_path); hosts.say("a", an_answer()); hosts.say("slow", waits=True); hosts("who", "--hosts", "a,slow")
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

from builders import a_device, a_snapshot
from nodes import Gpuguard

from gpuguard.device_state import uses
from gpuguard.views import who
from gpuguard.views.text import json_text

# Answers with what stands in files named after the host; waits for HOST.go where there is a HOST.waits.
SSH = r"""
place=$1
while [ "$1" != -- ]; do shift; done
host=$2
echo $$ > "$place/$host.pid"
printf '%s\n' "$3" >> "$place/$host.asked"
while [ -e "$place/$host.waits" ] && [ ! -e "$place/$host.go" ]; do sleep 0.05; done
[ -e "$place/$host.err" ] && cat "$place/$host.err" >&2
[ -e "$place/$host.out" ] && cat "$place/$host.out"
[ -e "$place/$host.status" ] && exit "$(cat "$place/$host.status")"
exit 0
"""
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egpj\n\r<b>$(reboot)`id`"


class Hosts:
    """What each host says."""

    def __init__(self, place: Path) -> None:
        self.place = place / "hosts"
        self.place.mkdir()
        (self.place / "ssh").write_text(SSH)
        self.gpuguard = Gpuguard(place, None)

    @property
    def ssh(self) -> str:
        return f"sh {self.place}/ssh {self.place}"

    def say(self, host: str, out: object = "", *, err: str = "", status: int = 0, waits: bool = False) -> None:
        text = out if isinstance(out, str) else json.dumps(out)
        (self.place / f"{host}.out").write_text(text, "utf-8", "surrogatepass")
        (self.place / f"{host}.err").write_text(err)
        (self.place / f"{host}.status").write_text(str(status))
        if waits:
            (self.place / f"{host}.waits").touch()

    def go(self, host: str) -> None:
        (self.place / f"{host}.go").touch()

    def asked(self, host: str) -> list[str]:
        return (self.place / f"{host}.asked").read_text().splitlines()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.gpuguard(*words, "--ssh", self.ssh)


def an_answer(*devices: object, **more: object) -> dict[str, object]:
    snapshot = a_snapshot(*(devices or (a_device(0, processes=()),)))
    content: dict[str, object] = json.loads(json_text(who.to_json(snapshot, uses(snapshot))))
    return {**content, **more}


class OnATerminal:
    """The command on a terminal of 120 columns, and a function that reads on until something holds of its text."""

    def __init__(self, hosts: Hosts, *words: str) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self._process = hosts.gpuguard.start(
            *words, "--ssh", hosts.ssh, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._text = ""

    def __enter__(self) -> tuple[subprocess.Popen[str], Callable[[Callable[[str], bool]], str]]:
        return self._process, self._until

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def _until(self, is_true: Callable[[str], bool]) -> str:
        ends = time.monotonic() + 60
        while not is_true(self._text):
            assert time.monotonic() < ends, self._text
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self._text += os.read(self._ours, 65536).decode("utf-8", "replace")
                except OSError:
                    assert is_true(self._text), self._text
        return self._text
