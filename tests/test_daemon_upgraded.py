"""A daemon under which another gpuguard is installed: all that acts is of one version."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import a_daemon, somebodys
from nodes import GIB, eventually
from sources import ROOT
from test_daemon import HOGS

from gpuguard import __version__, policychild

# From the moment when it watches on, nothing of gpuguard can be loaded any more: the new one has other modules.
UPGRADED = """
import sys
class Gone:
    def find_spec(name, path=None, target=None):
        if name.startswith("gpuguard."):
            raise ModuleNotFoundError(name)
from gpuguard import daemon
open_door = daemon.Daemon._open_door
def opened(self):
    try:
        return open_door(self)
    finally:
        sys.meta_path.insert(0, Gone)
daemon.Daemon._open_door = opened
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


def test_all_that_actions_load_late_is_loaded_when_the_daemon_enforces() -> None:
    code = "from gpuguard import daemon; daemon._load_what_acts(); import sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    acting = ["case", "identity", "ledger", "preflight", "terminals", "vacancy"]

    late = {name for module in acting for name in imported_in_functions(f"gpuguard.guards.{module}")}
    late |= imported_in_functions("gpuguard.actions")

    assert "gpuguard.guards.preflight" in late
    assert sorted(late - set(loaded)) == []


def imported_in_functions(module: str) -> set[str]:
    """The modules of gpuguard that functions of *module* import."""
    tree = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    imports = [node for each in functions for node in ast.walk(each) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}": str(node.module) for node in imports for alias in node.names}
    return {name if is_module(name) else module for name, module in names.items() if name.startswith("gpuguard")}


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").exists()


def test_a_policy_file_that_another_version_has_read_is_not_used(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(HOGS.format(mode="enforce", steps="log"))
    monkeypatch.setattr(policychild, "__version__", "0.0.9")

    [fault] = policychild.load_apart(str(path)).faults

    assert fault.text.startswith(
        f"gpuguard {__version__} was installed while this program, of gpuguard 0.0.9, was running."
    )
    assert "systemctl restart gpuguard" in fault.text
