"""gpuguard setup --root: an image or a chroot is prepared, and neither this machine nor what links name is touched."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from builders import a_device, a_snapshot
from sources import ROOT

from gpuguard.cli import setup
from gpuguard.cli.setup import image as setup_image
from gpuguard.cli.setup import installation as setup_service

UNITS = "etc/systemd/system"
PLAIN = {
    "etc/tmpfiles.d/gpuguard.conf", "etc/sysusers.d/gpuguard.conf", f"{UNITS}/run-gpuguard-claims.mount",
    f"{UNITS}/local-fs.target.wants/run-gpuguard-claims.mount",
}  # fmt: skip
SERVICE = {f"{UNITS}/gpuguard.service", f"{UNITS}/multi-user.target.wants/gpuguard.service", "etc/gpuguard/policy.yaml"}


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An empty one, on a machine of which nothing may be asked."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this machine was asked")

    monkeypatch.delenv("GPUGUARD_DIR", raising=False)
    monkeypatch.setattr(setup_image.sys, "executable", "/usr/bin/python3")
    for module, name in ((setup, "sampled"), (setup_service, "account_of"), (setup_service.subprocess, "run")):
        monkeypatch.setattr(module, name, refuse)
    (tmp_path / "image").mkdir()
    return tmp_path / "image"


def files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_symlink() or not path.is_dir()}


def rest(path: Path) -> str:
    """What stands in a file below the line that says that setup has written it."""
    return path.read_text().partition("\n")[2]


def test_an_image_gets_the_files_by_which_its_machines_set_themselves_up_a19(image, command):
    status, said, _ = command("setup", "--root", str(image))
    lines, mount = setup.tmpfiles_lines("/run/gpuguard", [], "gpuguard"), "run-gpuguard-claims.mount"

    assert status == 0 and files(image) == PLAIN
    assert rest(image / "etc/tmpfiles.d/gpuguard.conf") == "\n".join(lines) + "\n"
    assert os.readlink(image / UNITS / "local-fs.target.wants" / mount) == f"/{UNITS}/{mount}"
    assert f"Made: {image}/etc/tmpfiles.d/gpuguard.conf, " in said
    assert "Run `sudo gpuguard setup` on that machine" in said


def test_with_systemd_it_gets_the_service_and_again_changes_nothing_a19(image, command):
    first, again = (command("setup", "--root", str(image), "--systemd") for _ in range(2))

    assert files(image) == PLAIN | SERVICE
    assert rest(image / UNITS / "gpuguard.service") == setup_service.unit_for("gpuguard", "/usr/bin/python3")
    assert rest(image / "etc/gpuguard/policy.yaml") == (ROOT / "packaging" / "policy.yaml").read_text()
    assert (first[0], again[0]) == (0, 0) and "Nothing had to be changed." in again[1]
    assert f"{image} has no /usr/bin/python3" in first[2]


@pytest.mark.skipif(not shutil.which("systemctl"), reason="what systemd makes of setup's files (no systemctl)")
def test_systemd_finds_both_units_enabled_a19(image, command, monkeypatch):
    command("setup", "--root", str(image), "--systemd")
    monkeypatch.undo()
    words = ["systemctl", f"--root={image}", "is-enabled", "gpuguard.service", "run-gpuguard-claims.mount"]

    assert subprocess.run(words, capture_output=True, text=True, check=False).stdout.split() == ["enabled"] * 2


def test_check_names_what_is_missing_or_changed_and_changes_nothing_a19(image, command):
    empty = command("setup", "--root", str(image), "--check")
    before = files(image)
    command("setup", "--root", str(image), "--systemd")
    whole = command("setup", "--root", str(image), "--check")
    (image / "etc/tmpfiles.d/gpuguard.conf").write_text("d /run/gpuguard\n")
    (image / UNITS / "multi-user.target.wants/gpuguard.service").unlink()
    broken = command("setup", "--root", str(image), "--check")

    assert (empty[0], before) == (1, set())
    assert empty[1].splitlines()[0] == f"{image}/etc/tmpfiles.d/gpuguard.conf is missing."
    assert whole[:2] == (0, "Everything is as `gpuguard setup` would make it.\n")
    assert broken[0] == 1 and sorted(broken[1].splitlines()) == [
        f"{image}/{UNITS}/multi-user.target.wants/gpuguard.service is missing.",
        f"{image}/etc/tmpfiles.d/gpuguard.conf is not as this version of gpuguard writes it.",
    ]


@pytest.mark.parametrize("link", ["etc", "etc/tmpfiles.d", "etc/systemd", f"{UNITS}/local-fs.target.wants"])
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_link_on_the_way_is_not_followed_out_of_the_image_and_nothing_is_written_a19(
    image, tmp_path, command, link, options
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (image / link).parent.mkdir(parents=True, exist_ok=True)
    (image / link).symlink_to(outside)
    status, _, why = command("setup", "--root", str(image), *options)

    assert status == 1 and f"{image}/{link} cannot be used: it is a link" in why
    assert (files(image), files(outside)) == ({link}, set())


def test_a_link_in_the_place_of_a_file_is_replaced_and_what_it_names_stays_a19(image, tmp_path, command):
    victim, conf = tmp_path / "victim", image / "etc/tmpfiles.d/gpuguard.conf"
    victim.write_text("mine\n")
    conf.parent.mkdir(parents=True)
    conf.symlink_to(victim)
    status, said, _ = command("setup", "--root", str(image))

    assert (status, victim.read_text(), conf.is_symlink()) == (0, "mine\n", False)
    assert f"Changed: {conf}." in said


def test_what_the_admin_of_the_image_has_decided_stays_a19(image, command):
    for path, text in {
        "etc/passwd": "root:x:0:0::/:/bin/sh\ngpuguard:x:900:900::/:/bin/false\n",
        "etc/fstab": "tmpfs /run/gpuguard/claims tmpfs size=1m 0 0\n",
        "etc/gpuguard/policy.yaml": "version: 1\n",
    }.items():
        (image / path).parent.mkdir(parents=True, exist_ok=True)
        (image / path).write_text(text)
    before = files(image)
    command("setup", "--root", str(image), "--systemd")

    assert files(image) - before == {"etc/tmpfiles.d/gpuguard.conf"} | SERVICE - {"etc/gpuguard/policy.yaml"}
    assert (image / "etc/gpuguard/policy.yaml").read_text() == "version: 1\n"


@pytest.mark.parametrize("place", [UNITS, "usr/lib/systemd/system"])
def test_a_unit_of_a_package_or_of_the_admin_is_left_and_nothing_is_written_a19(image, command, place):
    unit = image / place / "gpuguard.service"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    status, _, why = command("setup", "--root", str(image), "--systemd")

    assert status == 1 and "a unit of the service that is not of setup" in why
    assert files(image) == {f"{place}/gpuguard.service"}


def test_a_python_of_the_image_is_named_as_the_image_calls_it_a19(image, command, monkeypatch):
    python = image / "opt/gpuguard/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/python3")
    monkeypatch.setattr(setup_image.sys, "executable", str(python))
    _, _, said = command("setup", "--root", str(image), "--systemd")

    assert "\nExecStart=/opt/gpuguard/bin/python -I -m" in (image / UNITS / "gpuguard.service").read_text()
    assert said == ""


def test_a_python_of_a_home_directory_is_refused_before_anything_is_written_a19(image, command, monkeypatch):
    monkeypatch.setattr(setup_image.sys, "executable", "/home/alice/venv/bin/python")
    status, _, why = command("setup", "--root", str(image), "--systemd")

    assert status == 1 and "lies in a home directory" in why and files(image) == set()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--remove"], "--remove does not go with --root"),
        (["--broker"], "--broker does not go with --root"),
        (["--lock-files"], "--lock-files does not go with --root"),
        (["--dir", "/x"], "--dir (or GPUGUARD_DIR) does not go with --root"),
        (["--root", "/"], "name the directory of an image"),
        (["--root", "/dev/null"], "name the directory of an image"),
    ],
)
def test_what_is_about_a_machine_that_runs_is_refused_a19(image, command, words, why):
    status, _, said = command("setup", "--root", str(image), *words)

    assert status == 2 and why in said and files(image) == set()


def test_a_file_that_cannot_be_written_is_said_a19(image, command):
    (image / "etc/tmpfiles.d/gpuguard.conf/x").mkdir(parents=True)
    status, _, why = command("setup", "--root", str(image))

    assert status == 1 and f"{image}/etc/tmpfiles.d/gpuguard.conf cannot be written: Is a directory" in why


@pytest.mark.root
def test_on_a_machine_of_the_image_check_is_content_where_the_service_makes_the_lock_files_a19(
    image, command, monkeypatch
):
    monkeypatch.setattr(setup, "ADMIN_DIRECTORY", str(image / "run"))
    monkeypatch.setattr(setup, "sampled", lambda *_: a_snapshot(a_device(0)))
    monkeypatch.setattr(setup_service, "account_of", lambda _: None)
    for name in ("TMPFILES", "UNIT"):
        monkeypatch.setattr(setup_service, name, f"{image}{getattr(setup_service, name)}")
    setup.make_directory(str(image / "run"), [a_device(0).uuid])
    bare = command("setup", "--check", "--daemon-user", "root")
    setup_service.write(setup_service.TMPFILES, "\n".join(setup.tmpfiles_lines(str(image / "run"), [])) + "\n")
    alone = command("setup", "--check", "--daemon-user", "root")
    setup_service.write(setup_service.UNIT, setup_service.unit_for("root"))
    served = command("setup", "--check", "--daemon-user", "root")

    assert bare[:2] == (1, f"{setup_service.TMPFILES} is missing.\n")
    assert alone[:2] == (1, f"{setup_service.TMPFILES} is not as this version of gpuguard writes it.\n")
    assert served[:2] == (0, "Everything is as `gpuguard setup` would make it.\n")
