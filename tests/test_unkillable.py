"""A process that no signal reaches, for once a real one: it writes to a file system that is frozen."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from enforcing_daemon import IMPATIENT, DrivenDaemon, driven
from fake_nvml import GIB, FakeNvml
from guard_scene import a_child, python
from nodes import eventually
from proc import state

pytestmark = pytest.mark.root  # mounts

# A process of its own mounts, and thaws when it is told to or when whoever could tell it is dead, or after two minutes
# at the latest: a frozen file system that is left behind hangs whatever touches it, until the next boot.
GUARDIAN = """
import os, select, signal, subprocess, sys, time
image, place = sys.argv[1:]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
def run(*words):
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
with open(image, "wb") as file:
    file.truncate(16 * 2**20)
for words in (("mkfs.ext4", "-q", "-O", "^has_journal", image), ("mount", "-o", "loop", image, place)):
    done = run(*words)
    if done.returncode:
        sys.exit(print(done.stderr.strip() or words[0], flush=True))
try:
    os.chmod(place, 0o777)
    print("mounted", flush=True)
    if select.select([0], [], [], 120)[0] and sys.stdin.readline() == "freeze\\n":
        print(run("fsfreeze", "-f", place).stderr.strip() or "frozen", flush=True)
        select.select([0], [], [], 120)
finally:
    run("fsfreeze", "-u", place)
    for words in [("umount", place)] * 100 + [("umount", "-l", place)]:
        if os.path.ismount(place) and run(*words).returncode:
            time.sleep(0.05)
"""
POLICY = """
notify: {{ops: {{hook: {{command: [/bin/sh, {hook}], user: root}}}}}}
policies:
  - name: small
    for: 0s
    cooldown: 0s
    when: {{memory: {{above: 1GiB}}}}
    steps: [{{do: run_hook, hook: ops}}, terminate, {{after: 1s, do: kill}}]
"""


class Frozen:
    """A directory in which every write hangs until thaw()."""

    def __init__(self, place: Path) -> None:
        self.place = place / "frozen"
        self.place.mkdir()
        words = [sys.executable, "-c", GUARDIAN, str(place / "image"), str(self.place)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.guardian = subprocess.Popen(words, text=True, start_new_session=True, cwd="/", **pipes)
        if (said := self._said()) != "mounted":
            self.guardian.communicate()
            pytest.skip(f"what hangs in the kernel (no loop device with ext4: {said})")

    def freeze(self) -> None:
        print("freeze", file=self.guardian.stdin, flush=True)
        if (said := self._said()) != "frozen":
            pytest.skip(f"what hangs in the kernel (no file system that can be frozen: {said})")

    def thaw(self) -> None:
        """Nothing is left mounted afterwards."""
        if self.guardian.poll() is None:
            self.guardian.communicate(timeout=60)

    def _said(self) -> str:
        said: str = self.guardian.stdout.readline()
        return said.strip()


@contextmanager
def an_unkillable_process(place: Path) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """It, and what lets it end."""
    frozen = Frozen(place)
    with ExitStack() as stack:
        stack.callback(frozen.thaw)
        with (frozen.place / "file").open("wb") as file:
            frozen.freeze()
            child = stack.enter_context(
                a_child("dd", "if=/dev/zero", "count=1", stdout=file, stderr=subprocess.DEVNULL)
            )
        stack.callback(frozen.thaw)  # first: nobody can wait for the child before
        assert eventually(lambda: state(child.pid) == "D")
        yield child, frozen.thaw


# The memory of who does not end never comes back.
SOON = "engine.EFFECT_SECONDS = guard_limits.EFFECT_SECONDS = 2.0\n"


def test_who_outlives_sigkill_is_given_up_their_device_is_taken_out_of_service_and_people_are_told(tmp_path):
    told = tmp_path / "told"
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\ncat >> {told}\n")
    hook.chmod(0o755)
    with FakeNvml(tmp_path, devices=4) as fake, an_unkillable_process(tmp_path) as (stuck, thaw):
        fake.add_process(0, stuck.pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(hook=hook), before=IMPATIENT + SOON) as daemon:
            given_up = until(daemon, "unkillable")
            before = signals(daemon, stuck.pid)
            marks = tmp_path / "claims" / "quarantined.json"
            assert eventually(marks.exists), daemon.said()
            (quarantined,) = json.loads(marks.read_text())["marks"]
            assert state(stuck.pid) == "D"
            assert before == ["terminate", "kill"]
            assert quarantined["name"] == fake.devices[0].uuid == given_up["devices"][0]

            with a_child() as beside:
                fake.add_process(0, beside.pid, 2 * GIB)
                assert beside.wait(60) == -signal.SIGTERM, "who shares the GPU is not spared"
            assert signals(daemon, stuck.pid) == before
            assert len([event for event in daemon.events() if event["outcome"] == "unkillable"]) == 1
            assert marks.exists()

            thaw()
            assert eventually(lambda: not marks.exists()), daemon.said()
            assert eventually(lambda: daemon.events("quarantine")[-1]["outcome"] == "ended")
            daemon.end()  # what waits because there were messages just before goes out at the end
            assert eventually(lambda: "outlived SIGKILL" in told.read_text()), daemon.said()


# Its first child is pid 1 of a namespace, where SIGTERM does nothing.  After SIGKILL it waits for the second one, which
# is left a zombie.  Any user may do that.
UNDEAD = """
import ctypes, os, time
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000000):  # CLONE_NEWUSER, CLONE_NEWPID
    raise SystemExit(print(os.strerror(ctypes.get_errno()), flush=True))
undead = os.fork() or time.sleep(600)
os.fork() or time.sleep(600)
print(undead, flush=True)
time.sleep(600)
"""


def test_a_process_that_its_maker_lets_linger_takes_no_gpu_out_of_service_and_shields_no_other(tmp_path):
    before = f"{IMPATIENT}{SOON}actions.UNKILLABLE_SECONDS = 10.0\n"  # for the driver to give up its row
    with FakeNvml(tmp_path, devices=4) as fake, a_child(python(), "-c", UNDEAD, stdout=subprocess.PIPE) as maker:
        said = maker.stdout.readline().decode().strip()
        if not said.isdigit():
            pytest.skip(f"NOT TESTED: needs namespaces of an ordinary user: {said}")
        undead = int(said)
        fake.add_process(0, undead, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(hook="/bin/true"), before=before) as daemon:
            assert eventually(lambda: "kill" in signals(daemon, undead)), daemon.said()
            fake.clear_processes(0)  # as the driver does, when a process has closed its files
            until(daemon, "unkillable")
            assert state(undead) == "S"
            with a_child() as beside:
                fake.add_process(0, beside.pid, 2 * GIB)
                assert beside.wait(60) == -signal.SIGTERM, daemon.said()
            assert daemon.events("quarantine") == []
            assert not (tmp_path / "claims" / "quarantined.json").exists()


def until(daemon: DrivenDaemon, outcome: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [event for event in daemon.events("kill") if event["outcome"] == outcome]

    assert eventually(lambda: bool(found())), daemon.said()
    return found()[0]


def signals(daemon: DrivenDaemon, pid: int) -> list[str]:
    return [event["kind"] for event in daemon.events() if event.get("pid") == pid and event["outcome"] == "about to"]


def test_nothing_stays_frozen_when_the_test_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; sys.path[:0] = sys.argv[1].split(':')\n"
        "from test_unkillable import Frozen; frozen = Frozen(Path(sys.argv[2])); frozen.freeze()\n"
        "print('frozen', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", code, f"{Path(__file__).parent}:{Path(__file__).parent}/support", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as dying:
        if dying.stdout.readline() != "frozen\n":
            pytest.skip(f"what hangs in the kernel ({dying.communicate()[1].strip().splitlines()[-1]})")
        assert os.path.ismount(tmp_path / "frozen")
        dying.kill()

    assert eventually(lambda: not os.path.ismount(tmp_path / "frozen"))
