"""Scenes for the tests of `gpuguard top`.

a_scene(a_device(processes=(a_process(),))); texts(page_of(a_scene(), width=80))
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from builders import a_snapshot

from gpuguard.device_state import uses
from gpuguard.model import Device, Snapshot
from gpuguard.top.page import page
from gpuguard.top.scene import History, Scene, ScreenLine, ScreenView


def a_scene(*devices: Device, snapshot: Snapshot | None = None, **fields: Any) -> Scene:
    """What was seen of these devices; their processes' ancestors and hosts are not known unless they are given."""
    claims = fields.pop("claims", ())
    seen = fields.pop("seen", None)
    snapshot = snapshot or a_snapshot(*devices, claims=tuple(claims))
    return Scene(snapshot, uses(snapshot, seen), **fields)


def page_of(scene: Scene, width: int = 80, height: int = 24, *, looks: int = 1, **view: Any) -> list[ScreenLine]:
    history = History()
    for _ in range(looks):
        history.add(scene)
    return page(scene, history, ScreenView(**view), width, height)


def texts(lines: Sequence[ScreenLine]) -> list[str]:
    return [line.text for line in lines]


def colours(lines: Sequence[ScreenLine], text: str) -> set[str]:
    """The styles of the parts that contain *text*."""
    return {style for line in lines for part, style in line.parts if text in part}


ORPHAN = ["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"]


class Orphan:
    """A process that is nobody's child here: of our own children gpuguard says that they are a part of it."""

    def __init__(self, uid: int | None) -> None:
        identity: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        with subprocess.Popen(ORPHAN, stdout=subprocess.PIPE, cwd="/", **identity) as parent:
            assert parent.stdout
            self.pid = int(parent.stdout.readline())
        while os.getsid(self.pid) != self.pid:  # until then it is in our process group
            time.sleep(0.01)
        self.pidfd = os.pidfd_open(self.pid)

    def ends(self, seconds: float = 10.0) -> bool:
        return bool(select.select([self.pidfd], [], [], seconds)[0])

    def lives(self) -> bool:
        return not self.ends(0)


@contextmanager
def an_orphan(uid: int | None = None) -> Iterator[Orphan]:
    orphan = Orphan(uid)
    try:
        yield orphan
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(orphan.pidfd, signal.SIGKILL)
        os.close(orphan.pidfd)
