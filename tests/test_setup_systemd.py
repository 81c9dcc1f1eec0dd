"""gpuguard setup --systemd and --remove: all that was installed goes away again, and nothing else.

With a real systemd: scripts/boot-test.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from nodes import Gpuguard
from sources import ROOT

from gpuguard.cli import setup_service
from gpuguard.errors import LockDirectoryError
from gpuguard.policies.files.loader import load_policies


class Machine:
    """A machine whose files lie in a folder, and whose systemd only writes down what it is asked."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.asked = place, []
        self.run = place / "run/gpuguard"
        self.tmpfiles = place / "etc/tmpfiles.d/gpuguard.conf"
        self.unit = place / "etc/systemd/system/gpuguard.service"
        self.policy = place / "etc/gpuguard/policy.yaml"
        (place / "etc/tmpfiles.d").mkdir(parents=True)
        (place / "etc/systemd/system").mkdir(parents=True)
        self.mount = self.unit.with_name("run-gpuguard-claims.mount")
        self.fstab = place / "etc/fstab"
        self.list = place / "etc/gpuguard/installed.json"
        for name, path in {
            "UNIT": self.unit,
            "MOUNT_UNIT": self.mount,
            "POLICY": self.policy,
            "SYSUSERS": place / "etc/sysusers.d/gpuguard.conf",
            "TMPFILES": self.tmpfiles,
            "LIST": self.list,
            "FSTAB": self.fstab,
            "BOOTED": place,
        }.items():
            monkeypatch.setattr(setup_service, name, str(path))
        monkeypatch.setattr(setup_service, "PACKAGED", (str(place / "lib/systemd/system"),))
        monkeypatch.setattr(setup_service, "systemctl", lambda *words, advice="": self.asked.append(" ".join(words)))
        monkeypatch.setattr(setup_service, "open_to_others", lambda *paths: None)
        monkeypatch.setattr(setup_service, "doubts_about", lambda executable: None)
        monkeypatch.setattr(setup_service, "MACHINE_EVENTS", str(place / "var/log/gpuguard/events.jsonl"))
        monkeypatch.setattr(setup_service, "MACHINE_STATE", str(place / "var/lib/gpuguard"))
        monkeypatch.setattr(setup_service.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    def install(self) -> None:
        setup_service.refuse_where_it_cannot_work("gpuguard")
        setup_service.write(str(self.tmpfiles), "d /run/gpuguard\n")
        setup_service.mount_claims(f"{self.run}/claims")
        setup_service.install_service("gpuguard")

    def remove(self) -> int:
        return setup_service.remove(str(self.run))

    def files(self) -> set[str]:
        return {str(path.relative_to(self.place)) for path in self.place.rglob("*")}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_was_installed_is_removed_to_the_last_file(machine):
    before = machine.files()
    machine.install()
    installed = machine.files()
    status = machine.remove()

    assert {"etc/gpuguard/policy.yaml", "etc/systemd/system/gpuguard.service"} < installed
    assert (status, machine.files()) == (0, before)


def test_the_service_is_started_and_stopped(machine):
    machine.install()
    started, machine.asked = machine.asked, []
    machine.remove()

    mount = "run-gpuguard-claims.mount"
    assert started[:2] == ["daemon-reload", f"enable --now {mount}"]
    assert started[2:] == ["enable gpuguard.service", "daemon-reload", "restart gpuguard.service"]
    assert machine.asked == ["disable --now gpuguard.service", f"disable {mount}", "daemon-reload"]


def rest(path: Path) -> str:
    """What stands in a file below the line that says that setup has written it."""
    return path.read_text().partition("\n")[2]


def test_what_is_installed_is_what_the_package_has(machine):
    machine.install()

    assert rest(machine.mount) == (ROOT / "packaging" / machine.mount.name).read_text()
    assert rest(machine.policy) == (ROOT / "packaging" / "policy.yaml").read_text()
    assert (
        rest(machine.unit).replace(f"{sys.executable} -I", "/usr/bin/python3 -I")
        == (ROOT / "packaging" / "gpuguard.service").read_text()
    )


def test_a_mount_of_the_admins_own_is_left_as_it_is(machine):
    machine.fstab.write_text(f"# {machine.run}/claims\ntmpfs\t{machine.run}/claims tmpfs size=1m 0 0\n")
    machine.install()
    by_fstab = machine.mount.exists()
    machine.fstab.write_text("# none\n\n")
    machine.mount.write_text("[Mount]\n")
    machine.install()
    machine.remove()

    assert not by_fstab and machine.mount.read_text() == "[Mount]\n"
    assert not [words for words in machine.asked if words.endswith("claims.mount")]


def test_a_second_removal_says_that_nothing_is_there(machine, capsys):
    machine.install()
    machine.remove()

    assert machine.remove() == 1
    assert "Nothing is installed" in capsys.readouterr().out


def test_what_is_not_of_setup_stays(machine, capsys):
    mine = machine.place / "etc/systemd/system/gpuguard.service.d/mine.conf"
    machine.install()
    mine.parent.mkdir()
    mine.write_text("[Service]\n")
    (machine.policy.parent / "other.yaml").write_text("version: 1\n")
    machine.remove()

    assert mine.exists() and (machine.policy.parent / "other.yaml").exists()
    assert str(mine.parent) in capsys.readouterr().out


def test_a_policy_that_was_there_is_neither_overwritten_nor_removed(machine):
    machine.policy.parent.mkdir()
    machine.policy.write_text("version: 1\n")
    machine.install()
    machine.remove()

    assert machine.policy.read_text() == "version: 1\n"


def test_a_file_that_was_changed_since_stays_and_is_named(machine, capsys):
    machine.install()
    machine.policy.write_text(machine.policy.read_text() + "# mine\n")
    machine.remove()

    assert "# mine" in machine.policy.read_text()
    assert f"{machine.policy} stays: it has been changed" in capsys.readouterr().out


def test_a_service_whose_unit_is_somebodys_own_goes_on(machine, capsys):
    machine.install()
    machine.unit.write_text("[Service]\nExecStart=/bin/true\n")
    machine.asked.clear()
    machine.remove()

    assert not [words for words in machine.asked if "gpuguard.service" in words] and machine.unit.exists()
    assert "The service goes on" in capsys.readouterr().out


def listed_by_0_1(machine: Machine, *paths: Path, **more: object) -> None:
    """gpuguard 0.1 kept a list of what it had installed."""
    files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    machine.list.parent.mkdir(exist_ok=True)
    machine.list.write_text(json.dumps({"schema": 1, "files": files, "folders": [], "user": None, **more}))


def test_what_0_1_installed_and_listed_is_removed_unless_it_was_changed(machine, capsys):
    before = machine.files()
    machine.unit.write_text("[Service]\n")
    machine.tmpfiles.write_text("d /run/gpuguard\n")
    listed_by_0_1(machine, machine.unit, machine.tmpfiles)
    machine.tmpfiles.write_text("d /run/gpuguard\n# mine\n")

    assert machine.remove() == 0
    assert machine.files() - before == {"etc/tmpfiles.d/gpuguard.conf"}
    assert f"{machine.tmpfiles} stays: it has been changed" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "[]", "{", '{"files": 3, "folders": 4, "user": 5}'])
def test_a_list_that_is_none_removes_nothing(machine, content):
    machine.unit.write_text("[Service]\n")
    machine.list.parent.mkdir()
    machine.list.write_text(content)
    machine.remove()

    assert machine.unit.exists()


def test_nothing_but_files_of_setup_is_removed_whatever_the_list_says(machine):
    machine.install()
    victim = machine.place / "shadow"
    victim.write_text("root\n")
    (machine.place / "empty").mkdir()
    listed_by_0_1(machine, victim, folders=[str(machine.place / "empty")])
    machine.remove()

    assert victim.exists() and (machine.place / "empty").exists()


def test_a_file_of_an_admin_at_that_place_is_not_taken_for_one_of_setup(machine):
    machine.tmpfiles.write_text("d /run/gpuguard\n")
    machine.remove()

    assert machine.tmpfiles.exists()


@pytest.mark.root
def test_lock_files_go_when_nobody_holds_one(fake: FakeNvml, machine, monkeypatch):
    monkeypatch.undo()
    place = machine.place / "claims"
    Gpuguard(machine.place, fake)("setup", "--dir", str(place))
    setup_service.clear(str(place))

    assert not place.exists()


@pytest.mark.root
@pytest.mark.parametrize("name", ["gate", "queue", "device", "record"])
def test_lock_files_stay_while_anybody_holds_one(fake: FakeNvml, tmp_path, capsys, name):
    place = tmp_path / "claims"
    Gpuguard(tmp_path, fake)("setup", "--dir", str(place))
    (place / "claims" / "0.record.json").write_text("{}")
    paths = {"device": next((place / "lock").glob("GPU-*")), "record": place / "claims" / "0.record.json"}
    before = sorted(path.name for path in place.rglob("*"))
    with paths.get(name, place / "lock" / name).open() as holder:
        fcntl.flock(holder, fcntl.LOCK_SH)
        setup_service.clear(str(place))

    assert sorted(path.name for path in place.rglob("*")) == before
    assert "stays until the next boot" in capsys.readouterr().out


@pytest.mark.root
def test_new_devices_get_their_lock_files_and_the_others_keep_theirs(fake: FakeNvml, tmp_path):
    gpuguard, locks = Gpuguard(tmp_path, fake), tmp_path / "claims" / "lock"
    fake.device_count = 1
    gpuguard("setup", "--dir", str(tmp_path / "claims"))
    before = {file.name: file.stat().st_ino for file in locks.iterdir()}
    fake.device_count = 3
    done = gpuguard("setup", "--lock-files", "--dir", str(tmp_path / "claims"))
    after = {file.name: file.stat().st_ino for file in locks.iterdir()}

    assert (done.returncode, done.stdout) == (0, "")
    assert before.items() < after.items()
    assert len([name for name in after if name.startswith("GPU-") and name.count(".") == 0]) == 3


def test_a_package_that_has_installed_the_service_is_left_alone(machine):
    packed = Path(setup_service.PACKAGED[0], "gpuguard.service")
    packed.parent.mkdir(parents=True)
    packed.write_text("[Service]\n")

    with pytest.raises(LockDirectoryError, match="enable --now gpuguard"):
        machine.install()


def test_a_unit_of_somebody_else_is_not_overwritten(machine):
    machine.unit.write_text("[Service]\n")

    with pytest.raises(LockDirectoryError, match="not the one that would be installed"):
        machine.install()
    assert machine.unit.read_text() == "[Service]\n"


def test_installing_again_is_harmless(machine):
    machine.install()
    first = machine.files()
    machine.install()

    assert machine.files() == first


def test_the_service_runs_nothing_that_others_can_change(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(0o757)
    monkeypatch.undo()

    assert "can be changed by others" in (setup_service.open_to_others(str(tmp_path / "python")) or "")


@pytest.mark.root
def test_what_only_root_can_change_is_run():
    assert setup_service.open_to_others("/bin/sh") is None


def test_users_are_told_to_be_root(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup --systemd"):
        setup_service.refuse_where_it_cannot_work("gpuguard")
    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup --remove"):
        setup_service.remove(str(tmp_path))


def test_a_directory_of_ones_own_has_no_service(tmp_path):
    done = Gpuguard(tmp_path, None)("setup", "--systemd", "--dir", str(tmp_path))

    assert (done.returncode, "leave --dir away" in done.stderr) == (2, True)


def test_what_systemctl_says_is_passed_on(tmp_path, monkeypatch):
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho no such unit >&2\nexit 5\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(LockDirectoryError, match=r"`systemctl start x` failed: no such unit  Look\."):
        setup_service.systemctl("start", "x", advice="Look.")


def test_the_first_policy_has_no_fault_and_does_nothing_to_anybody():
    path = ROOT / "packaging" / "policy.yaml"
    file = load_policies(str(path))
    strict = [sys.executable, "-m", "gpuguard", "policy", "check", "--strict", str(path)]

    assert subprocess.run(strict, capture_output=True, check=False).returncode == 0
    assert not [policy.name for policy in file.policies if policy.enforce]
    assert {step.action for policy in file.policies for step in policy.steps} <= {"warn", "log"}
