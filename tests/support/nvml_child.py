"""Runs the NVML backend on a fake machine, in a child process: the driver library is loaded once per process.

The script's `answer` comes back; `fake` there is the same machine as here.  One interpreter has imported what they all
need, and forks for each.
"""

import atexit
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_nvml import FakeNvml

from gpuguard.model import Device, Snapshot

INTERPRETER = """
import os, pickle, sys, traceback
sys.path.insert(0, sys.argv[1])
from fake_nvml import *
from gpuguard.backends import nvml
from gpuguard.model import *

def answer_of(environment, script):
    os.environ.clear()
    os.environ.update(environment)
    names = {**globals(), "fake": FakeNvml.attach()}
    exec(script, names)
    return names["answer"]

def tell(*answer_and_fault):
    sys.stdout.buffer.write(pickle.dumps(answer_and_fault))
    sys.stdout.buffer.flush()

while sys.stdin.buffer.peek(1):
    asked = pickle.load(sys.stdin.buffer)
    if not (child := os.fork()):
        try:
            tell(answer_of(*asked), None)
        except BaseException:
            tell(None, traceback.format_exc())
        os._exit(0)
    if status := os.waitpid(child, 0)[1]:
        tell(None, f"it ended with status {status}")
"""


def answer_of(fake: FakeNvml, script: str, **environment: str) -> Any:
    """What the script leaves in `answer`."""
    whole = {**os.environ, **fake.environment(), **environment}
    interpreter = _interpreter(whole["LD_LIBRARY_PATH"])
    assert interpreter.stdin and interpreter.stdout
    pickle.dump((whole, script), interpreter.stdin)
    interpreter.stdin.flush()
    answer, fault = pickle.load(interpreter.stdout)
    assert fault is None, fault
    return answer


@functools.cache
def _interpreter(libraries: str) -> subprocess.Popen[bytes]:
    """One that finds the driver library in *libraries*: where it looks is settled when it starts."""
    words = [sys.executable, "-c", INTERPRETER, str(Path(__file__).parent)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    interpreter = subprocess.Popen(words, env={**os.environ, "LD_LIBRARY_PATH": libraries}, **pipes)
    atexit.register(interpreter.communicate)  # at the end of its input it ends
    return interpreter


def sampled(fake: FakeNvml, fields: str = "ALL_FIELDS", devices: list[str] | None = None) -> Snapshot:
    snapshot = answer_of(fake, f"answer = nvml.open().sample({fields}, {devices!r})")
    assert isinstance(snapshot, Snapshot)
    return snapshot


def gaps_of(snapshot: Snapshot, device: Device) -> dict[str, str]:
    return {gap.field: gap.reason for gap in snapshot.gaps if gap.device == device.uuid}
