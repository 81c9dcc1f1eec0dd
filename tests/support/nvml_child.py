"""Runs the NVML backend on a fake machine, in a child process: the driver library is loaded once per process.

The script's `answer` comes back; `fake` there is the same machine as here.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_nvml import FakeNvml

from gpuguard.model import Device, Snapshot

PRELUDE = """
import os, pickle, sys
sys.path.insert(0, sys.argv[1])
from fake_nvml import *
from gpuguard.backends import nvml
from gpuguard.model import *
fake = FakeNvml.attach()
"""


def answer_of(fake: FakeNvml, script: str, **environment: str) -> Any:
    """What the script leaves in `answer`."""
    code = f"{PRELUDE}\n{script}\nos.write(1, pickle.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, **fake.environment(), **environment},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def sampled(fake: FakeNvml, fields: str = "ALL_FIELDS", devices: list[str] | None = None) -> Snapshot:
    snapshot = answer_of(fake, f"answer = nvml.open().sample({fields}, {devices!r})")
    assert isinstance(snapshot, Snapshot)
    return snapshot


def gaps_of(snapshot: Snapshot, device: Device) -> dict[str, str]:
    return {gap.field: gap.reason for gap in snapshot.gaps if gap.device == device.uuid}
