"""What every test stands in: an environment without traces of this machine, and a loud word where root was missing.

tests/conftest.py imports these names, which is how pytest learns of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# What a shell on a GPU server, a batch job or a container may have set.  GPUGUARD_TEST_* steers the tests themselves.
_FOREIGN = ("GPUGUARD_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "GPU_DEVICE_", "ZE_", "SLURM_", "PBS_", "LSB_", "RAY_")
_EXACT = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "XDG_RUNTIME_DIR", "INVOCATION_ID")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable of this machine reaches a test or its children, and HOME is an empty directory."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _EXACT or (name.startswith(_FOREIGN) and not name.startswith("GPUGUARD_TEST_")):
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "root" in report.keywords]
    if skipped:
        terminalreporter.write_sep("=", "NOT TESTED", yellow=True, bold=True)
        needed = "need root (a second user id, device nodes) and were skipped.  As root: scripts/test -m root"
        terminalreporter.write_line(f"{len(skipped)} tests {needed}")
