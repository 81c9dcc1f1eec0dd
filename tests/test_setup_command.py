"""gpuguard setup: one directory for all users of a machine, made again after each boot."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import DRIVER_NOT_LOADED, FakeNvml
from nodes import Gpuguard
from sources import ROOT

from gpuguard.claims.directory import DaemonFiles, daemon_files, lock_directory
from gpuguard.cli import setup, setup_service
from gpuguard.errors import LockDirectoryError


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
    assert len(list((place / "lock").glob("GPU-*-000000000000"))) == 1
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
    assert done.stdout.count("/lock/GPU-") == 80  # a lock, one for claims in a claim, 8 slots for shares: of each of 8
    assert not (tmp_path / "shared").exists()


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("systemd-tmpfiles"), reason="no systemd-tmpfiles here")
def test_systemd_tmpfiles_makes_the_same_directory_from_the_lines(fake: FakeNvml, tmp_path: Path) -> None:
    lines = Gpuguard(tmp_path, fake, GPUGUARD_DIR="")("setup", "--print").stdout
    conf = tmp_path / "root" / "etc" / "tmpfiles.d" / "gpuguard.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(lines)
    (tmp_path / "root" / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\ngpuguard:x:900:900::/:/bin/false\n")
    (tmp_path / "root" / "etc" / "group").write_text("root:x:0:\ngpuguard:x:900:\n")
    subprocess.run(["systemd-tmpfiles", f"--root={tmp_path / 'root'}", "--create"], check=True)

    made = lock_directory(str(tmp_path / "root" / "run" / "gpuguard"))
    assert made.owner == 0
    assert mode(Path(made.records)) == 0o1777
    assert mode(Path(made.lock_path("gate"))) == 0o444
    assert daemon_files(made) == DaemonFiles(f"{made.path}/daemon", 900)


@pytest.mark.root
def test_the_daemon_gets_a_directory_of_its_own(fake: FakeNvml, tmp_path: Path) -> None:
    gpuguard, place = Gpuguard(tmp_path, fake), tmp_path / "shared"
    first = gpuguard("setup", "--dir", str(place), "--daemon-user", "daemon")
    again = gpuguard("setup", "--dir", str(place), "--daemon-user", "bin")  # another one from now on

    assert (first.returncode, again.returncode) == (0, 0)
    assert daemon_files(lock_directory(str(place))).owner == pwd.getpwnam("bin").pw_uid
    assert mode(place / "daemon") == 0o755
    assert (place.stat().st_uid, (place / "lock").stat().st_uid) == (0, 0)


@pytest.mark.root
def test_what_somebody_put_in_its_place_is_not_given_away(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "daemon").symlink_to("/etc")
    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"), "--daemon-user", "daemon")

    assert done.returncode == 1
    assert Path("/etc").stat().st_uid == 0


def test_a_user_who_does_not_exist_is_said(fake: FakeNvml, tmp_path: Path) -> None:
    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"), "--daemon-user", "nobody-of-that-name")

    assert (done.returncode, "there is no user nobody-of-that-name" in done.stderr) == (1, True)


def test_a_person_named_like_the_daemon_is_not_made_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    person = pwd.struct_passwd(("gpuguard", "x", 1005, 1005, "", "/home/gpuguard", "/bin/sh"))
    monkeypatch.setattr(setup_service, "account_of", lambda name: person)

    with pytest.raises(LockDirectoryError, match="account of a person"):
        setup_service.make_user("gpuguard")


@pytest.mark.parametrize("tool", ["systemd-sysusers", "useradd", None])
def test_the_user_is_made_once_by_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool) -> None:
    made, called = pwd.struct_passwd(("gpuguard", "x", 900, 900, "", "/", "/bin/false")), []
    monkeypatch.setattr(setup_service, "SYSUSERS", str(tmp_path / "sysusers.d" / "gpuguard.conf"))
    monkeypatch.setattr(setup_service, "LIST", str(tmp_path / "etc" / "installed.json"))
    monkeypatch.setattr(setup_service, "account_of", lambda name: made if called else None)
    monkeypatch.setattr(setup_service.shutil, "which", lambda name: f"/x/{name}" if name == tool else None)

    def run(words: list[str], **_: object) -> None:
        called.append(words)
        remembered.append(setup_service.made_user())

    remembered: list[str | None] = []
    monkeypatch.setattr(setup_service.subprocess, "run", run)
    if tool is None:
        with pytest.raises(LockDirectoryError, match="Make it by hand"):
            setup_service.make_user("gpuguard")
        assert setup_service.made_user() is None
        return
    setup_service.make_user("gpuguard")
    setup_service.make_user("gpuguard")

    assert [words[0] for words in called] == [f"/x/{tool}"]
    assert [*remembered, setup_service.made_user()] == ["gpuguard", "gpuguard"]  # even if killed meanwhile


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("systemd-sysusers"), reason="no systemd-sysusers here")
def test_systemd_sysusers_makes_the_user_of_the_line(tmp_path: Path) -> None:
    conf = tmp_path / "etc" / "sysusers.d" / "gpuguard.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(setup_service.sysusers_line("gpuguard") + "\n")
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True)

    line = (tmp_path / "etc" / "passwd").read_text().split(":")
    assert (line[0], int(line[2]) < 1000, line[6].strip()) == ("gpuguard", True, "/usr/sbin/nologin")
    assert f"\n{setup_service.sysusers_line('gpuguard')}\n" in (ROOT / "packaging" / "gpuguard.sysusers").read_text()


def test_the_unit_is_shown_for_the_python_that_has_gpuguard(tmp_path: Path) -> None:
    done = Gpuguard(tmp_path, None)("setup", "--print-unit", "--daemon-user", "guard")

    assert done.returncode == 0
    assert f"\nExecStart={sys.executable} -I -m gpuguard daemon" in done.stdout
    assert "\nUser=guard\nGroup=guard\n" in done.stdout
    changed = done.stdout.replace(f"{sys.executable} -I", "/usr/bin/python3 -I").replace("=guard\n", "=gpuguard\n")
    assert changed == (ROOT / "packaging" / "gpuguard.service").read_text()


@pytest.mark.parametrize(
    ("python", "doubtful"),
    [("/usr/bin/python3", False), ("/home/alice/venv/bin/python", True), ("/root/.pyenv/bin/python", True)],
)
def test_a_python_that_the_service_cannot_see_is_said(python: str, doubtful: bool) -> None:
    assert (setup_service.doubts_about(python) is not None) == doubtful


def test_without_a_driver_the_directory_is_made_and_the_next_step_said(fake: FakeNvml, tmp_path: Path) -> None:
    fake.fail("nvmlInitWithFlags", DRIVER_NOT_LOADED)

    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"))

    assert done.returncode == 0
    assert "no lock files for GPUs yet" in done.stderr
    assert (tmp_path / "shared" / "lock" / "gate").exists()


def test_only_root_may_make_the_machines_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpuguard.cli import run_command_line

    monkeypatch.delenv("GPUGUARD_BACKEND", raising=False)
    monkeypatch.setattr(setup, "ADMIN_DIRECTORY", str(tmp_path / "never"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert run_command_line(["setup"]) == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("words", [[], ["--lock-files"]])
def test_the_machines_directory_is_not_made_for_devices_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Whoever has tried the simulated node in this shell has GPUGUARD_BACKEND in it."""
    from gpuguard.cli import run_command_line

    monkeypatch.setenv("GPUGUARD_BACKEND", "simulated")
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    monkeypatch.delenv("GPUGUARD_DIR", raising=False)
    monkeypatch.setattr(setup, "ADMIN_DIRECTORY", str(tmp_path / "never"))
    monkeypatch.setattr(setup_service, "TMPFILES", str(tmp_path / "gpuguard.conf"))
    monkeypatch.setattr(setup_service, "LIST", str(tmp_path / "installed.json"))

    assert run_command_line(["setup", "--daemon-user", "root", *words]) == 2
    assert "unset GPUGUARD_BACKEND" in capsys.readouterr().err
    assert not (tmp_path / "never").exists() and not (tmp_path / "gpuguard.conf").exists()


def test_a_directory_that_cannot_be_trusted_is_not_adopted(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "shared" / "lock").mkdir(parents=True)
    (tmp_path / "shared" / "lock").chmod(0o777)

    done = Gpuguard(tmp_path, fake)("setup", "--dir", str(tmp_path / "shared"))

    assert done.returncode == 1
    assert "writable for others" in done.stderr


def test_the_lines_for_a_broker_give_the_lock_files_to_the_daemon_alone(fake: FakeNvml, tmp_path: Path) -> None:
    place = tmp_path / "shared"
    words = ("setup", "--print", "--dir", str(place), "--daemon-user", "games")
    lines = Gpuguard(tmp_path, fake)(*words, "--broker").stdout.splitlines()
    files = [line.split()[1:4] for line in lines if line.startswith("f ")]

    assert f"d {place}/lock 0755 games games -" in lines
    assert [path for path, *given in files if given != ["0600", "games"]] == [f"{place}/lock/queue"]
    assert "0600" not in Gpuguard(tmp_path, fake)(*words).stdout
