"""gpuguard setup: one directory for all users of a machine, made again after each boot; the service, and the way back.

All that was installed goes away again, and nothing else.  With a real systemd: scripts/boot-test.
"""

import fcntl
import hashlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import DRIVER_NOT_LOADED
from nodes import Gpuguard, start
from sources import ROOT

from gpuguard.claims.directory import DaemonFiles, daemon_files, lock_directory
from gpuguard.cli import run_command_line, setup
from gpuguard.cli.setup import installation as setup_service
from gpuguard.errors import LockDirectoryError
from gpuguard.policy_files.loader import load_policies


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def inodes(place: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in place.iterdir()}


@pytest.fixture
def place(tmp_path):
    """Where the directory is made."""
    return tmp_path / "shared"


@pytest.fixture
def set_up(fake, tmp_path, place):
    """Runs `gpuguard setup` for that directory, on a machine with 8 devices."""
    return lambda *words, **options: Gpuguard(tmp_path, fake)("setup", "--dir", str(place), *words, **options)


@pytest.mark.root
def test_root_makes_a_directory_in_which_everybody_can_lock_and_nobody_can_replace(set_up, place):
    done = set_up()

    assert done.returncode == 0
    assert "8 GPUs" in done.stdout
    assert (mode(place), mode(place / "lock"), mode(place / "claims")) == (0o755, 0o755, 0o1777)
    assert {mode(file) for file in (place / "lock").iterdir()} == {0o444}
    assert len(list((place / "lock").glob("GPU-*-000000000000"))) == 1
    assert lock_directory(str(place)).owner == 0


def test_setting_up_twice_is_harmless_and_the_umask_does_not_lock_others_out(set_up, place):
    set_up(umask=0o077)
    before = inodes(place / "lock")
    set_up()

    assert inodes(place / "lock") == before
    assert mode(place / "lock") == 0o755


def test_print_shows_lines_and_changes_nothing(set_up, place):
    done = set_up("--print")

    assert "d /run" not in done.stdout
    assert f"d {place}/claims 1777 root root -" in done.stdout
    assert done.stdout.count("/lock/GPU-") == 80  # a lock, one for claims in a claim, 8 slots for shares: of each of 8
    assert not place.exists()


@pytest.mark.root
@pytest.mark.skipif(
    not shutil.which("systemd-tmpfiles"), reason="what systemd makes of setup's files (no systemd-tmpfiles)"
)
def test_systemd_tmpfiles_makes_the_same_directory_from_the_lines(fake, tmp_path):
    lines = Gpuguard(tmp_path, fake, GPUGUARD_DIR="")("setup", "--print").stdout
    conf = tmp_path / "root" / "etc" / "tmpfiles.d" / "gpuguard.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(lines)
    (tmp_path / "root" / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\ngpuguard:x:900:900::/:/bin/false\n")
    (tmp_path / "root" / "etc" / "group").write_text("root:x:0:\ngpuguard:x:900:\n")
    kept = tmp_path / "root" / "var" / "lib" / "gpuguard-admin" / "quarantined.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    subprocess.run(["systemd-tmpfiles", f"--root={tmp_path / 'root'}", "--create"], check=True)

    made = lock_directory(str(tmp_path / "root" / "run" / "gpuguard"))
    assert made.owner == 0
    assert mode(Path(made.records)) == 0o1777
    assert mode(Path(made.lock_path("gate"))) == 0o444
    assert daemon_files(made) == DaemonFiles(f"{made.path}/daemon", 900)
    back = Path(made.path, "quarantined.json")
    assert back.read_text() == "{}" and (mode(back), back.stat().st_uid) == (0o644, 0)
    assert not Path(made.path, "denied.json").exists()


@pytest.mark.root
def test_the_daemon_gets_a_directory_of_its_own(set_up, place):
    first, again = set_up("--daemon-user", "daemon"), set_up("--daemon-user", "bin")  # another one from now on

    assert (first.returncode, again.returncode) == (0, 0)
    assert daemon_files(lock_directory(str(place))).owner == pwd.getpwnam("bin").pw_uid
    assert mode(place / "daemon") == 0o755
    assert (place.stat().st_uid, (place / "lock").stat().st_uid) == (0, 0)


@pytest.mark.root
def test_a_link_in_the_place_of_the_daemons_directory_is_not_given_away(set_up, place):
    place.mkdir()
    (place / "daemon").symlink_to("/etc")
    done = set_up("--daemon-user", "daemon")

    assert done.returncode == 1
    assert Path("/etc").stat().st_uid == 0


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("--daemon-user", "nobody-of-that-name"), 1, "there is no user nobody-of-that-name"),
        (("--systemd",), 2, "leave --dir away"),  # a directory of one's own has no service
    ],
)
def test_what_cannot_be_set_up_is_said(set_up, words, status, why):
    done = set_up(*words)

    assert (done.returncode, why in done.stderr) == (status, True)


def test_a_person_named_like_the_daemon_is_not_made_its_user(monkeypatch):
    person = pwd.struct_passwd(("gpuguard", "x", 1005, 1005, "", "/home/gpuguard", "/bin/sh"))
    monkeypatch.setattr(setup_service, "account_of", lambda name: person)

    with pytest.raises(LockDirectoryError, match="account of a person"):
        setup_service.make_user("gpuguard")


@pytest.mark.parametrize("tool", ["systemd-sysusers", "useradd", None])
def test_the_user_is_made_once_by_what_there_is(monkeypatch, tmp_path, tool):
    made, called = pwd.struct_passwd(("gpuguard", "x", 900, 900, "", "/", "/bin/false")), []
    monkeypatch.setattr(setup_service, "SYSUSERS", str(tmp_path / "sysusers.d" / "gpuguard.conf"))
    monkeypatch.setattr(setup_service, "LIST", str(tmp_path / "etc" / "installed.json"))
    monkeypatch.setattr(setup_service, "account_of", lambda name: made if called else None)
    monkeypatch.setattr(setup_service.shutil, "which", lambda name: f"/x/{name}" if name == tool else None)

    def run(words: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        called.append(words)
        remembered.append(setup_service.made_user())
        return subprocess.CompletedProcess(words, 0, "", "")

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
@pytest.mark.skipif(
    not shutil.which("systemd-sysusers"), reason="what systemd makes of setup's files (no systemd-sysusers)"
)
def test_systemd_sysusers_makes_the_user_of_the_line(tmp_path):
    conf = tmp_path / "etc" / "sysusers.d" / "gpuguard.conf"
    conf.parent.mkdir(parents=True)
    lines = setup_service.SYSUSERS_LINES.format(name="gpuguard")
    conf.write_text(lines)
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True)

    line = (tmp_path / "etc" / "passwd").read_text().split(":")
    assert (line[0], int(line[2]) < 1000, line[6].strip()) == ("gpuguard", True, "/usr/sbin/nologin")
    assert lines.splitlines()[-1] in (ROOT / "packaging" / "gpuguard.sysusers").read_text().splitlines()


def test_the_unit_is_shown_for_the_python_that_has_gpuguard(tmp_path):
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
def test_a_python_that_the_service_cannot_see_is_said(python, doubtful):
    assert (setup_service.doubts_about(python) is not None) == doubtful


def test_without_a_driver_the_directory_is_made_and_the_next_step_said(fake, set_up, place):
    fake.fail("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    done = set_up()

    assert done.returncode == 0
    assert "no lock files for GPUs yet" in done.stderr
    assert (place / "lock" / "gate").exists()


@pytest.mark.parametrize(
    ("uid", "backend", "words", "status", "why"),
    [
        (1000, "nvml", [], 1, "only root can make"),
        # A shell in which the simulated node was tried has GPUGUARD_BACKEND.
        (0, "simulated", [], 2, "unset GPUGUARD_BACKEND"),
        (0, "simulated", ["--lock-files"], 2, "unset GPUGUARD_BACKEND"),
    ],
)
def test_the_machines_directory_is_made_by_root_alone_and_for_its_own_devices(
    monkeypatch, tmp_path, capsys, uid, backend, words, status, why
):
    monkeypatch.setenv("GPUGUARD_BACKEND", backend)
    monkeypatch.delenv("GPUGUARD_DIR", raising=False)
    monkeypatch.setattr(setup, "ADMIN_DIRECTORY", str(tmp_path / "never"))
    monkeypatch.setattr(setup_service, "TMPFILES", str(tmp_path / "gpuguard.conf"))
    monkeypatch.setattr(os, "geteuid", lambda: uid)

    assert run_command_line(["setup", "--daemon-user", "root", *words]) == status
    assert why in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_directory_that_cannot_be_trusted_is_not_adopted(set_up, place):
    (place / "lock").mkdir(parents=True)
    (place / "lock").chmod(0o777)
    done = set_up()

    assert done.returncode == 1
    assert "writable for others" in done.stderr


def test_the_lines_for_a_broker_give_the_lock_files_to_the_daemon_alone(set_up, place):
    words = ("--print", "--daemon-user", "games")
    lines = set_up(*words, "--broker").stdout.splitlines()
    files = [line.split()[1:4] for line in lines if line.startswith("f ")]

    assert f"d {place}/lock 0755 games games -" in lines
    assert [path for path, *given in files if given != ["0600", "games"]] == [f"{place}/lock/queue"]
    assert "0600" not in set_up(*words).stdout


class Machine:
    """A machine whose files lie in a folder, and whose systemd only writes down what it is asked."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.asked = place, []
        self.run = place / "run/gpuguard"
        self.tmpfiles = place / "etc/tmpfiles.d/gpuguard.conf"
        self.unit = place / "etc/systemd/system/gpuguard.service"
        self.mount = self.unit.with_name("run-gpuguard-claims.mount")
        self.policy = place / "etc/gpuguard/policy.yaml"
        self.list = self.policy.with_name("installed.json")
        self.fstab = place / "etc/fstab"
        self.tmpfiles.parent.mkdir(parents=True)
        self.unit.parent.mkdir(parents=True)
        for name, there in {
            "UNIT": str(self.unit),
            "MOUNT_UNIT": str(self.mount),
            "POLICY": str(self.policy),
            "SYSUSERS": f"{place}/etc/sysusers.d/gpuguard.conf",
            "TMPFILES": str(self.tmpfiles),
            "LIST": str(self.list),
            "FSTAB": str(self.fstab),
            "BOOTED": str(place),
            "PACKAGED": (f"{place}/lib/systemd/system",),
            "MACHINE_EVENTS": f"{place}/var/log/gpuguard/events.jsonl",
            "MACHINE_STATE": f"{place}/var/lib/gpuguard",
            "systemctl": lambda *words, advice="": self.asked.append(" ".join(words)),
            "open_to_others": lambda *paths: None,
            "doubts_about": lambda executable: None,
        }.items():
            monkeypatch.setattr(setup_service, name, there)
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
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_what_was_installed_is_removed_to_the_last_file(machine, capsys):
    before = machine.files()
    machine.install()
    installed = machine.files()
    machine.install()  # again is harmless
    again, statuses = machine.files(), [machine.remove(), machine.remove()]

    assert {"etc/gpuguard/policy.yaml", "etc/systemd/system/gpuguard.service"} < installed == again
    assert (statuses, machine.files()) == ([0, 1], before)
    assert "Nothing is installed" in capsys.readouterr().out


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
    assert rest(machine.unit) == setup_service.unit_for("gpuguard")


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


def test_what_is_not_of_setup_stays(machine, capsys):
    mine = machine.place / "etc/systemd/system/gpuguard.service.d/mine.conf"
    machine.policy.parent.mkdir()
    machine.policy.write_text("version: 1\n")  # it was there before
    machine.install()
    mine.parent.mkdir()
    mine.write_text("[Service]\n")
    machine.remove()

    assert mine.exists() and machine.policy.read_text() == "version: 1\n"
    assert str(mine.parent) in capsys.readouterr().out


def test_a_file_that_was_changed_since_stays_and_is_named(machine, capsys):
    machine.install()
    machine.policy.write_text(machine.policy.read_text() + "# mine\n")
    machine.remove()

    assert "# mine" in machine.policy.read_text()
    assert f"{machine.policy} stays: it has been changed" in capsys.readouterr().out


def test_a_service_whose_unit_is_of_the_admins_own_goes_on(machine, capsys):
    machine.install()
    machine.unit.write_text("[Service]\nExecStart=/bin/true\n")
    machine.asked.clear()
    machine.remove()

    assert not [words for words in machine.asked if "gpuguard.service" in words] and machine.unit.exists()
    assert "The service goes on" in capsys.readouterr().out


def test_a_directory_of_ones_own_is_removed_by_its_name_and_nothing_else_is(tmp_path):
    """It said "Nothing is installed", and left the directory."""
    gpuguard, path = Gpuguard(tmp_path, None), tmp_path / "own"
    start(str(tmp_path / "node"), "1xH100-80GB")
    gpuguard("setup", "--dir", str(path))
    done, again = (gpuguard("setup", "--remove", "--dir", str(path)) for _ in range(2))

    assert (done.returncode, done.stdout) == (0, f"{path} is removed: there was no claim.\n")
    assert (again.returncode, again.stdout) == (1, f"{path} does not exist: nothing was removed.\n")


def listed_by_0_1(machine: Machine, *paths: Path, **more: object) -> None:
    """gpuguard 0.1 kept a list of what it had installed."""
    files = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    machine.list.parent.mkdir(exist_ok=True)
    machine.list.write_text(json.dumps({"schema": 1, "files": files, "folders": [], "user": None, **more}))


def test_before_a_simulated_node_is_started_none_is_made_behind_ones_back(tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    early = gpuguard("setup", "--dir", str(tmp_path / "claims"))
    started = gpuguard("sim", "start", "2xA100-40GB")
    late = gpuguard("setup", "--dir", str(tmp_path / "claims"))

    assert early.returncode == 2 and "no simulated node yet" in early.stderr
    assert started.returncode == 0 and "is ready: 2 GPUs" in late.stdout


def test_what_0_1_installed_and_listed_is_removed_unless_it_was_changed(machine, capsys):
    before = machine.files()
    machine.unit.write_text("[Service]\n")
    machine.tmpfiles.write_text("d /run/gpuguard\n")
    listed_by_0_1(machine, machine.unit, machine.tmpfiles)
    machine.tmpfiles.write_text("d /run/gpuguard\n# mine\n")

    assert machine.remove() == 0
    assert machine.files() - before == {"etc/tmpfiles.d/gpuguard.conf"}
    assert f"{machine.tmpfiles} stays: it has been changed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"files": 3, "folders": 4, "user": 5}'])
def test_without_a_list_or_with_one_that_is_none_no_file_of_an_admin_is_removed(machine, content):
    machine.unit.write_text("[Service]\n")
    machine.tmpfiles.write_text("d /run/gpuguard\n")
    if content is not None:
        machine.list.parent.mkdir()
        machine.list.write_text(content)
    machine.remove()

    assert machine.unit.exists() and machine.tmpfiles.exists()


def test_nothing_but_files_of_setup_is_removed_whatever_the_list_says(machine):
    machine.install()
    victim = machine.place / "shadow"
    victim.write_text("root\n")
    (machine.place / "empty").mkdir()
    listed_by_0_1(machine, victim, folders=[str(machine.place / "empty")])
    machine.remove()

    assert victim.exists() and (machine.place / "empty").exists()


@pytest.mark.root
@pytest.mark.parametrize("name", ["gate", "queue", "device", "record"])
def test_lock_files_stay_while_anybody_holds_one_and_go_then(set_up, place, capsys, name):
    set_up()
    (place / "claims" / "0.record.json").write_text("{}")
    paths = {"device": next((place / "lock").glob("GPU-*")), "record": place / "claims" / "0.record.json"}
    before = sorted(path.name for path in place.rglob("*"))
    with paths.get(name, place / "lock" / name).open() as holder:
        fcntl.flock(holder, fcntl.LOCK_SH)
        setup_service.clear(str(place))

    assert sorted(path.name for path in place.rglob("*")) == before
    assert "stays until the next boot" in capsys.readouterr().out
    setup_service.clear(str(place))
    assert not place.exists()


@pytest.mark.root
def test_new_devices_get_their_lock_files_and_the_others_keep_theirs(fake, set_up, place):
    fake.device_count = 1
    set_up()
    before = inodes(place / "lock")
    fake.device_count = 3
    done = set_up("--lock-files")
    after = inodes(place / "lock")

    assert (done.returncode, done.stdout) == (0, "")
    assert before.items() < after.items()
    assert len([name for name in after if name.startswith("GPU-") and name.count(".") == 0]) == 3


@pytest.mark.parametrize(
    ("packed", "why"), [(True, "enable --now gpuguard"), (False, "not the one that would be installed")]
)
def test_a_unit_of_a_package_or_of_the_admins_own_is_left_alone(machine, packed, why):
    unit = Path(setup_service.PACKAGED[0], "gpuguard.service") if packed else machine.unit
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text("[Service]\n")

    with pytest.raises(LockDirectoryError, match=why):
        machine.install()
    assert unit.read_text() == "[Service]\n"


@pytest.mark.root
def test_the_service_runs_nothing_that_others_can_change(tmp_path):
    (tmp_path / "python").write_text("")
    (tmp_path / "python").chmod(0o757)

    assert "can be changed by others" in (setup_service.open_to_others(str(tmp_path / "python")) or "")
    assert setup_service.open_to_others("/bin/sh") is None


def test_users_are_told_to_be_root(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup --systemd"):
        setup_service.refuse_where_it_cannot_work("gpuguard")
    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup --remove"):
        setup_service.remove(str(tmp_path))


def test_what_systemctl_says_is_passed_on(tmp_path, monkeypatch):
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho no such unit >&2\nexit 5\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(LockDirectoryError, match=r"`systemctl start x` failed: no such unit  Look\."):
        setup_service.systemctl("start", "x", advice="Look.")


def test_the_first_policy_has_no_fault_and_does_nothing_to_anybody():
    path = str(ROOT / "packaging" / "policy.yaml")
    file = load_policies(path)

    assert run_command_line(["policy", "check", "--strict", path]) == 0
    assert not [policy.name for policy in file.policies if policy.enforce]
    assert {step.action for policy in file.policies for step in policy.steps} <= {"warn", "log"}


@pytest.mark.root
def test_setup_says_what_it_made_and_the_second_time_that_there_was_nothing_to_do(set_up, place):
    first, again = set_up(), set_up()
    (place / "lock" / "queue").unlink()
    third = set_up()

    assert f"Made: {place}, " in first.stdout and "lock files" in first.stdout
    assert "Nothing had to be changed." in again.stdout and "Made" not in again.stdout
    assert "Made: 1 lock file." in third.stdout


@pytest.mark.root
def test_check_changes_nothing_and_says_what_setup_would(set_up, place):
    before = set_up("--check")
    assert before.returncode == 1 and f"{place} is missing." in before.stdout and not place.exists()
    set_up()
    whole = set_up("--check")
    (place / "lock" / "gate").unlink()
    broken = set_up("--check")

    assert (whole.returncode, whole.stdout) == (0, "Everything is as `gpuguard setup` would make it.\n")
    assert (broken.returncode, broken.stdout) == (1, f"{place}/lock/gate is missing.\n")
    assert not (place / "lock" / "gate").exists()


@pytest.mark.root
def test_check_names_a_daemons_directory_of_another_user(set_up, place):
    set_up("--daemon-user", "daemon")

    assert set_up("--check", "--daemon-user", "daemon").returncode == 0
    assert f"{place}/daemon does not belong to bin." in set_up("--check", "--daemon-user", "bin").stdout
