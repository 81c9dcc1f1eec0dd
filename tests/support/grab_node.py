"""A simulated node of four devices for grab_gpus() in this very process, whose environment is put back afterwards.

from grab_node import a_node, claimed, indices, script, visible        a_node: the fixture "node" of every test there
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import start

from gpuguard import api
from gpuguard.backends import simulated
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.model import MEMORY

SPEC = "4xH100-80GB"
NAMES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPUGUARD_CLAIM", "GPUGUARD_GPUS")


@pytest.fixture(name="node", autouse=True)
def a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The directory of the node; its claims are in there too."""
    place = str(tmp_path / "node")
    start(place, SPEC)
    for name in NAMES:  # so that they are put back after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUGUARD_BACKEND", "simulated")
    monkeypatch.setenv("GPUGUARD_SIM_DIR", place)
    monkeypatch.setattr(api, "_made", [])
    yield place
    for made in api._made:
        made.claim.release()


def indices(claim) -> list[int]:
    return [device.index for device in claim]


def claimed() -> list[int]:
    """The indices of the devices that anybody holds."""
    devices = simulated.open(os.environ["GPUGUARD_SIM_DIR"]).sample({MEMORY}).devices
    locked = locked_devices(lock_directory(backend="simulated"), [device.uuid for device in devices])
    return [device.index for device in devices if device.uuid in locked]


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def script(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, run to its end."""
    words = [sys.executable, "-c", code]
    environ = {**os.environ, **variables}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
