"""packaging/gpuguard.service: systemd accepts it, and finds little to fear in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from daemons import SOMEBODY
from sources import ROOT
from users import interpreter

from gpuguard import capabilities
from gpuguard.cli import build_parser
from gpuguard.cli.setup import tmpfiles_lines
from gpuguard.history.queries import MACHINE_STATE

UNIT = ROOT / "packaging" / "gpuguard.service"
EXPOSURE_AT_MOST = 2.2  # 10 is worst, 9.6 is a service without any of these settings
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
def test_the_service_is_hardened_and_one_that_is_not_would_be_noticed(tmp_path):
    (tmp_path / "bare.service").write_text("[Service]\nExecStart=/bin/true\n")

    assert exposure(UNIT) <= EXPOSURE_AT_MOST < exposure(tmp_path / "bare.service")


@needs_systemd
def test_systemd_understands_every_line():
    done = subprocess.run(["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_its_user_may_signal_and_see_others_and_write_what_is_the_daemons_and_nothing_else():
    found = dict(settings())

    assert (found["User"], found["Group"]) == ("gpuguard", "gpuguard")
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"] == "CAP_KILL CAP_SYS_PTRACE"
    assert found["NoNewPrivileges"] == "yes"
    assert [value for name, value in settings() if name == "ReadWritePaths"] == ["/run/gpuguard/daemon"]
    assert found["ProtectSystem"] == "strict"


def test_the_calls_that_reach_into_other_processes_are_filtered():
    allowed, *denied = [value for name, value in settings() if name == "SystemCallFilter"]

    assert allowed == "@system-service"
    assert {"@debug", "process_vm_readv", "process_vm_writev", "pidfd_getfd"} <= set(denied[0].lstrip("~").split())
    assert all(value.startswith("~") for value in denied)


def test_packages_make_what_setup_makes():
    packed = set((ROOT / "packaging" / "gpuguard.tmpfiles").read_text().splitlines())
    made = set(tmpfiles_lines("/run/gpuguard", [], "gpuguard"))

    assert {line for line in made ^ packed if not line.startswith("#")} == set()


def test_its_command_lines_are_ours_and_do_nothing_to_anybody_until_an_admin_says_so():
    commands = [value for name, value in settings() if name in ("ExecStart", "ExecStartPre")]
    guard = "/usr/bin/python3 -I -m gpuguard daemon --policy /etc/gpuguard/policy.yaml"

    assert commands == ["-+/usr/bin/python3 -I -m gpuguard setup --lock-files", guard]
    assert build_parser("setup").parse_args(["--lock-files"]).lock_files
    options = build_parser("daemon").parse_args(guard.split(" daemon ")[1].split())
    assert options.policy == "/etc/gpuguard/policy.yaml" and not options.enforce


def test_the_locks_of_running_jobs_survive_the_end_of_the_service():
    assert not [name for name, _ in settings() if name.startswith("RuntimeDirectory")]


def test_what_gpus_were_used_for_is_kept_where_it_is_looked_for():
    assert f"/var/lib/{dict(settings())['StateDirectory']}" == MACHINE_STATE
    assert "StateDirectoryMode" not in dict(settings())  # 0755: everybody may read it


def with_capabilities(test):
    """Marks a test that needs root, and setpriv."""
    needs_setpriv = pytest.mark.skipif(not shutil.which("setpriv"), reason="NOT TESTED: needs setpriv")
    return pytest.mark.root(needs_setpriv(test))


# Prints what the code says in a process that was started with the capabilities of the service.
CODE = "import os, subprocess, sys; sys.path[:0] = [{0!r}]; from gpuguard import capabilities as c\n{1}"
EFFECTIVE = ["grep", "CapEff", "/proc/self/status"]


def started_with(names: tuple[str, ...], code: str) -> str:
    """What *code* prints as an ordinary user with these capabilities alone."""
    given = ",".join(["-all", *(f"+{name}" for name in names)])
    who = ["--reuid", str(SOMEBODY), "--regid", str(SOMEBODY), "--clear-groups", "--no-new-privs"]
    caps = ["--inh-caps", given, "--ambient-caps", given, "--bounding-set", given]
    words = ["setpriv", *who, *caps, interpreter(), "-c", CODE.format(str(ROOT), code)]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@with_capabilities
def test_what_was_given_is_there_and_nothing_else():
    code = "print(c.has(c.KILL), c.has(c.PTRACE), c.has(c.DAC_READ_SEARCH), c.is_powerful())"

    assert started_with((), code) == "False False False False\n"
    assert started_with(("kill",), code) == "True False False True\n"
    assert started_with(("kill", "sys_ptrace"), code) == "True True False True\n"


@with_capabilities
def test_an_ordinary_user_may_signal_their_own_processes_and_with_cap_kill_all():
    code = f"print([c.may_signal((uid, uid, uid, uid)) for uid in ({SOMEBODY}, 0, 1000)], c.may_signal(()))"

    assert started_with((), code) == "[True, False, False] False\n"
    assert started_with(("kill",), code) == "[True, True, True] True\n"


@with_capabilities
def test_a_process_that_only_acts_as_us_is_not_ours_to_signal():
    code = f"print(c.may_signal((1, {SOMEBODY}, 1, {SOMEBODY})), c.may_signal((1, 1, {SOMEBODY}, 1)))"

    assert started_with((), code) == "False True\n"


@with_capabilities
@pytest.mark.parametrize(
    ("before", "left"),
    [("", 0x80020), ("c.keep_to_ourselves()", 0), ("c.keep_to_ourselves(); c.lend_for_reading()", 0x80000)],
)
def test_a_program_that_it_runs_gets_what_is_lent_and_nothing_else(before, left):
    code = f"{before}\nprint(subprocess.run({EFFECTIVE}, capture_output=True, text=True).stdout, c.has(c.KILL))"

    effective, still = started_with(("kill", "sys_ptrace"), code).split()[1:]
    assert (int(effective, 16), still) == (left, "True")


@with_capabilities
def test_a_process_without_capabilities_lends_none():
    assert started_with((), "print(c.lend_for_reading())") == "False\n"


@with_capabilities
def test_nothing_is_assumed_where_the_kernel_does_not_say(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError(2, "no /proc")))

    assert capabilities.has(capabilities.KILL) is False
