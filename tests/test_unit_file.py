"""packaging/gpuguard.service: systemd accepts it, and finds little to fear in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sources import ROOT

from gpuguard.cli.dispatch import build_parser

UNIT = ROOT / "packaging" / "gpuguard.service"
EXPOSURE_AT_MOST = 3.0
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="NOT TESTED: needs systemd-analyze")


def exposure(unit: Path) -> float:
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert match, done.stderr
    return float(match[1])


def settings() -> list[tuple[str, str]]:
    lines = (line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith(("#", ";")))
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@needs_systemd
def test_the_service_is_hardened():
    assert exposure(UNIT) <= EXPOSURE_AT_MOST


@needs_systemd
def test_a_service_that_is_not_hardened_would_be_noticed(tmp_path):
    bare = tmp_path / "bare.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")

    assert exposure(bare) > EXPOSURE_AT_MOST


@needs_systemd
def test_systemd_understands_every_line():
    done = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_nobody_elses_code_is_run():
    commands = [value for name, value in settings() if name == "ExecStart"]

    assert commands
    assert all(command.startswith("/usr/bin/python3 -I -m gpuguard daemon ") for command in commands)


def test_the_locks_of_running_jobs_survive_the_end_of_the_service():
    assert not [name for name, _ in settings() if name.startswith("RuntimeDirectory")]


def test_it_does_nothing_to_anybody_until_an_admin_says_so():
    assert "--enforce" not in dict(settings())["ExecStart"]


def test_its_command_line_is_one_that_the_command_understands():
    words = dict(settings())["ExecStart"].split(" daemon ")[1].split()

    assert build_parser("daemon").parse_args(words).policy == "/etc/gpuguard/policy.yaml"
