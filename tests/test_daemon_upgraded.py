"""A daemon under which another gpuguard is installed: all that acts is of one version."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from daemons import a_daemon, somebodys
from nodes import GIB, eventually
from test_daemon import HOGS

# From the moment when it watches on, nothing of gpuguard can be loaded any more: the new one has other modules.
UPGRADED = """
import sys
class Gone:
    def find_spec(name, path=None, target=None):
        if name.startswith("gpuguard."):
            raise ModuleNotFoundError(name)
from gpuguard.daemon import service as daemon
open_socket = daemon.Daemon.open_socket
def opened(self):
    try:
        return open_socket(self)
    finally:
        sys.meta_path.insert(0, Gone)
daemon.Daemon.open_socket = opened
from gpuguard.cli import main
main(sys.argv[sys.argv.index("daemon"):])
"""
UNDER = [sys.executable, "-c", UPGRADED]


@pytest.mark.root
def test_it_warns_and_ends_the_offender_as_before(tmp_path: Path) -> None:
    policy = HOGS.format(mode="enforce", steps="warn, {after: 300ms, do: terminate}")
    with (
        a_daemon(tmp_path, policy, "--enforce", named=True, under=UNDER) as daemon,
        somebodys(daemon.node, "0", 40 * GIB) as offender,
    ):
        assert offender.wait(20) == -signal.SIGTERM
        said = [event["message"] for event in daemon.events() if event["kind"] == "watchdog"]

    assert said == []


@pytest.mark.root
@pytest.mark.parametrize("step", ["renice", "pause", "deny", "quarantine"])
def test_no_action_meets_a_module_that_is_gone(tmp_path: Path, step: str) -> None:
    with (
        a_daemon(tmp_path, HOGS.format(mode="enforce", steps=step), "--enforce", named=True, under=UNDER) as daemon,
        somebodys(daemon.node, "0", 40 * GIB),
    ):
        assert eventually(lambda: any(event["kind"] in (step, "watchdog") for event in daemon.events()), 20)
        said = [event["message"] for event in daemon.events() if event["kind"] == "watchdog"]

    assert said == []
