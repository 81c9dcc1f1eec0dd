"""What a process may do by its capabilities, and that programs it runs get none of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from daemons import SOMEBODY
from sources import ROOT
from users import interpreter

from gpuguard import capabilities

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not shutil.which("setpriv"), reason="NOT TESTED: needs setpriv"),
]
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


def test_what_was_given_is_there_and_nothing_else():
    code = "print(c.has(c.KILL), c.has(c.PTRACE), c.has(c.DAC_READ_SEARCH), c.is_powerful())"

    assert started_with((), code) == "False False False False\n"
    assert started_with(("kill",), code) == "True False False True\n"
    assert started_with(("kill", "sys_ptrace"), code) == "True True False True\n"


def test_an_ordinary_user_may_signal_his_own_processes_and_with_cap_kill_all():
    code = f"print([c.may_signal((uid, uid, uid, uid)) for uid in ({SOMEBODY}, 0, 1000)], c.may_signal(()))"

    assert started_with((), code) == "[True, False, False] False\n"
    assert started_with(("kill",), code) == "[True, True, True] True\n"


def test_a_process_that_only_acts_as_us_is_not_ours_to_signal():
    code = f"print(c.may_signal((1, {SOMEBODY}, 1, {SOMEBODY})), c.may_signal((1, 1, {SOMEBODY}, 1)))"

    assert started_with((), code) == "False True\n"


@pytest.mark.parametrize(
    ("before", "left"),
    [("", 0x80020), ("c.keep_to_ourselves()", 0), ("c.keep_to_ourselves(); c.lend_for_looking()", 0x80000)],
)
def test_a_program_that_it_runs_gets_what_is_lent_and_nothing_else(before, left):
    code = f"{before}\nprint(subprocess.run({EFFECTIVE}, capture_output=True, text=True).stdout, c.has(c.KILL))"

    effective, still = started_with(("kill", "sys_ptrace"), code).split()[1:]
    assert (int(effective, 16), still) == (left, "True")


def test_who_has_nothing_lends_nothing():
    assert started_with((), "print(c.lend_for_looking())") == "False\n"
    assert capabilities.lend_for_reading() is False, "root needs no lending"


def test_nothing_is_assumed_where_the_kernel_does_not_say(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError(2, "no /proc")))

    assert capabilities.has(capabilities.KILL) is False
