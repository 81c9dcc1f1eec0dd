"""gpuguard setup: one directory for all users of a machine, made again after each boot."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from commands import Gpuguard
from fake_nvml import DRIVER_NOT_LOADED, FakeNvml

from gpuguard.cli import setup
from gpuguard.lockfiles import lock_directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.root
def test_root_makes_a_directory_in_which_everybody_can_lock_and_nobody_can_replace(
    fake: FakeNvml, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(place))

    assert done.returncode == 0
    assert "8 GPUs" in done.stdout
    assert (mode(place), mode(place / "lock"), mode(place / "claims")) == (0o755, 0o755, 0o1777)
    assert {mode(file) for file in (place / "lock").iterdir()} == {0o444}
    assert len(list((place / "lock").glob("GPU-*0"))) == 1
    assert lock_directory(str(place)).owner == 0


def test_setting_up_twice_is_harmless(fake: FakeNvml, tmp_path: Path) -> None:
    gpuguard = Gpuguard(tmp_path, fake)
    gpuguard("setup", "--dir", str(tmp_path / "shared"))
    before = {file.name: file.stat().st_ino for file in (tmp_path / "shared" / "lock").iterdir()}
    gpuguard("setup", "--dir", str(tmp_path / "shared"))

    assert {file.name: file.stat().st_ino for file in (tmp_path / "shared" / "lock").iterdir()} == before


def test_the_umask_does_not_lock_others_out(fake: FakeNvml, tmp_path: Path) -> None:
    Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"), umask=0o077)

    assert mode(tmp_path / "shared" / "lock") == 0o755


def test_print_shows_lines_and_changes_nothing(fake: FakeNvml, tmp_path: Path) -> None:
    done = Gpuguard(tmp_path, fake)("setup", "--print", "--dir", str(tmp_path / "shared"))

    assert "d /run" not in done.stdout
    assert f"d {tmp_path}/shared/claims 1777 root root -" in done.stdout
    assert done.stdout.count("/lock/GPU-") == 16  # a lock and a lock for claims inside a claim, for each of 8
    assert not (tmp_path / "shared").exists()


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="no systemd-tmpfiles here")
def test_systemd_tmpfiles_makes_the_same_directory_from_the_lines(fake: FakeNvml, tmp_path: Path) -> None:
    lines = Gpuguard(tmp_path, fake, GPUGUARD_DIR="")("setup", "--print").stdout
    conf = tmp_path / "root" / "etc" / "tmpfiles.d" / "gpuguard.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(lines)
    (tmp_path / "root" / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "root" / "etc" / "group").write_text("root:x:0:\n")
    subprocess.run(["systemd-tmpfiles", f"--root={tmp_path / 'root'}", "--create"], check=True)

    made = lock_directory(str(tmp_path / "root" / "run" / "gpuguard"))
    assert made.owner == 0
    assert mode(Path(made.records)) == 0o1777
    assert mode(Path(made.lock_path("gate"))) == 0o444


def test_without_a_driver_the_directory_is_made_and_the_next_step_said(fake: FakeNvml, tmp_path: Path) -> None:
    fake.fail("nvmlInitWithFlags", DRIVER_NOT_LOADED)

    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"))

    assert done.returncode == 0
    assert "no lock files for GPUs yet" in done.stderr
    assert (tmp_path / "shared" / "lock" / "gate").exists()


def test_only_root_may_make_the_machines_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpuguard.cli.dispatch import run_command_line

    monkeypatch.setenv("GPUGUARD_BACKEND", "simulated")
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    monkeypatch.setattr(setup, "ADMIN_DIRECTORY", str(tmp_path / "never"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert run_command_line(["setup"]) == 1
    assert not (tmp_path / "never").exists()


def test_remove_takes_the_boot_file_away_and_leaves_the_lock_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuguard.cli.dispatch import run_command_line

    conf = tmp_path / "gpuguard.conf"
    conf.write_text("d x\n")
    monkeypatch.setattr(setup, "TMPFILES", str(conf))
    first, second = run_command_line(["setup", "--remove"]), run_command_line(["setup", "--remove"])

    assert (first, second, conf.exists()) == (0, 1, False)
    assert "until the next boot" in capsys.readouterr().out


def test_a_directory_that_cannot_be_trusted_is_not_adopted(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "shared" / "lock").mkdir(parents=True)
    (tmp_path / "shared" / "lock").chmod(0o777)

    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"))

    assert done.returncode == 1
    assert "writable for others" in done.stderr
