"""Who gets a sampler before anything else is loaded: commands that will ask the driver, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import a_snapshot

from gpuguard import state
from gpuguard.claims.lockfiles import lock_directory
from gpuguard.cli import head_start


@pytest.fixture(autouse=True)
def real_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GPUGUARD_BACKEND", raising=False)
    monkeypatch.setenv("GPUGUARD_DIR", str(tmp_path))


@pytest.mark.parametrize("words", ["run -- true", "select -n 2", "who", "who --json", "top --plain", "metrics"])
def test_who_asks_the_driver_gets_a_sampler_at_once(words: str) -> None:
    assert head_start.is_due(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "queue",
        "who --hosts a,b",
        "top --hosts=a",
        "who --help",
        "top -h",
        "who --backend simulated",
        "report",
        "--help",
    ],
)
def test_who_does_not_ask_this_driver_gets_none(words: str) -> None:
    assert not head_start.is_due(words.split())


def test_while_a_daemon_lives_nobody_gets_one_who_does_not_insist(tmp_path: Path) -> None:
    state.write_state(lock_directory(str(tmp_path)), a_snapshot(), 10.0)

    assert not head_start.is_due(["who"])
    assert head_start.is_due(["who", "--fresh"])
    assert head_start.is_due(["who", "--dir", str(tmp_path / "another")])
    assert head_start.is_due(["who", f"--dir={tmp_path}/another"])


def test_a_directory_that_cannot_be_used_is_left_to_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert not head_start.is_due(["who", "--dir", str(tmp_path / "file")])
