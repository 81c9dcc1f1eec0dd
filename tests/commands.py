"""The command line, run as a user runs it, against a fake driver or a simulated node.

from commands import Gpuguard
gpuguard = Gpuguard(tmp_path, fake); done = gpuguard("select", "-n", "2"); done.returncode, done.stdout, done.stderr
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fake_nvml import FakeNvml

from gpuguard.claims.directory import lock_directory

# Far beyond any answer, even on a busy machine: whatever takes so long hangs.
SECONDS = 60


class Gpuguard:
    """`gpuguard` with claims and events of its own; a traceback or a hang fails the test."""

    def __init__(self, place: Path, fake: FakeNvml | None, **variables: str) -> None:
        own = {"GPUGUARD_DIR": str(place / "claims"), "GPUGUARD_EVENTS": str(place / "events.jsonl")}
        if fake is None and "LD_LIBRARY_PATH" not in variables:
            own |= {"GPUGUARD_BACKEND": "simulated", "GPUGUARD_SIM_DIR": str(place / "node")}
        lock_directory(own["GPUGUARD_DIR"])
        self.environment = {**os.environ, **own, **(fake.environment() if fake else {}), **variables}

    def words(self, *words: str) -> list[str]:
        """The command line."""
        return [sys.executable, "-m", "gpuguard", *words]

    def __call__(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        done = subprocess.run(
            self.words(*words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
            **options,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start it."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        return subprocess.Popen(self.words(*words), env=self.environment, text=True, **options)
