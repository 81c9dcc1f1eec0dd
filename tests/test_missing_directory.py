"""A directory of claims that is not there, as when it is misspelt: looking makes none, and says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import Gpuguard

import gpuguard as api

LOOKS = (
    "who", "top --once", "queue", "select", "explain", "doctor", "metrics", "release", "keep --list", "deny",
    "quarantine", "reserve",
)  # fmt: skip


@pytest.mark.parametrize("command", LOOKS)
def test_a_command_that_looks_makes_no_directory_and_says_once_that_it_is_missing(tmp_path: Path, command: str) -> None:
    typo = tmp_path / "typo"

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(typo))(*command.split())

    assert done.stderr == f"gpuguard: nothing is claimed in {typo} (GPUGUARD_DIR): it does not exist yet.\n"
    assert done.stdout
    assert not typo.exists()


@pytest.mark.parametrize("command", ["quarantine 0 --end", "deny nobody --end"])
def test_what_ends_nothing_makes_no_directory_and_says_that_it_is_missing(tmp_path: Path, command: str) -> None:
    typo = tmp_path / "typo"

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(typo))(*command.split())

    assert (done.returncode, typo.exists()) == (1, False)
    assert done.stderr == f"gpuguard: nothing is claimed in {typo} (GPUGUARD_DIR): it does not exist yet.\n"


@pytest.mark.parametrize("command", ["select", "explain", "release 7"])
def test_a_claim_that_the_environment_names_is_none_where_there_is_no_directory(tmp_path: Path, command: str) -> None:
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(tmp_path / "typo"), GPUGUARD_CLAIM="7", GPUGUARD_GPUS="GPU-1")

    assert "inside gpuguard" not in gpuguard(*command.split()).stderr


@pytest.mark.root
def test_after_a_boot_slurm_ends_a_job_whose_claims_nobody_has_made_a_directory_for(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_JOB_GPUS": ""}

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(tmp_path / "typo"), **job)("slurm", "epilog")

    assert (done.returncode, (tmp_path / "typo").exists()) == (0, False)


def test_what_programs_read_says_nothing_of_it(tmp_path: Path) -> None:
    done = Gpuguard(tmp_path, None)("who", "--json", "--dir", str(tmp_path / "typo"))

    assert [device["claims"] for device in json.loads(done.stdout)["devices"]] == [[]] * 8
    assert "(--dir): it does not exist yet" in done.stderr


def test_a_look_leaves_a_directory_of_ones_own_that_is_for_something_else_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(home))("who")

    assert "(GPUGUARD_DIR): no claim was ever made there" in done.stderr
    assert os.listdir(home) == []


def test_a_program_that_looks_makes_none_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    where = {"backend": "simulated", "directory": str(tmp_path / "typo")}

    assert api.who(**where).claims == ()
    assert len(api.select_devices(2, **where)) == 2
    assert not (tmp_path / "typo").exists()


def test_a_claim_makes_it_and_from_then_on_it_is_looked_at_in_silence(tmp_path: Path) -> None:
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(tmp_path / "new"))

    gpuguard("run", "--", "true")

    assert gpuguard("who").stderr == ""
