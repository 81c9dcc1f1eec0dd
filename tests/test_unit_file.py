"""packaging/gpuguard.service: systemd finds little to fear in it, and the daemon guards with what it gives."""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemons import PASSWD, SOMEBODY, DaemonUnderTest, somebodys, with_names
from nodes import GIB, eventually
from sources import ROOT
from users import a_site, interpreter

from gpuguard import users
from gpuguard.cli import build_parser
from gpuguard.cli.setup import tmpfiles_lines
from gpuguard.history.queries import MACHINE_STATE

UNIT = ROOT / "packaging" / "gpuguard.service"
EXPOSURE_AT_MOST = 2.2  # 10 is worst, 9.6 is a service without any of these settings
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="the unit as systemd reads it (no systemd-analyze)"
)


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


def test_it_may_open_what_the_backends_open_and_terminals_and_no_other_device():
    """Nothing of AMD's: a process that opens /dev/kfd stands on the driver's list of those that compute."""
    of_nvidia = {f"char-nvidia{name} rw" for name in ("", "ctl", "-caps", "-frontend", "-uvm")}
    allowed = {value for name, value in settings() if name == "DeviceAllow"}

    assert allowed == {*of_nvidia, "char-drm r", "char-mtgpu* rw", "char-pts rw"}
    assert dict(settings())["DevicePolicy"] == "closed"


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
    needs_setpriv = pytest.mark.skipif(not shutil.which("setpriv"), reason="the capabilities of the unit (no setpriv)")
    return pytest.mark.root(needs_setpriv(test))


# Prints what the code says in a process that was started with the capabilities of the service.
CODE = "import os, subprocess, sys; sys.path[:0] = [{0!r}]; from gpuguard.users import *\n{1}"
EFFECTIVE = ["grep", "CapEff", "/proc/self/status"]


def with_rights(uid: int, names: tuple[str, ...], *groups: str) -> list[str]:
    """A Python of an ordinary user with these capabilities alone."""
    caps = ",".join(["-all", *(f"+{name}" for name in names)])
    rights = ["--no-new-privs", "--inh-caps", caps, "--ambient-caps", caps, "--bounding-set", caps]
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), *groups, *rights, interpreter()]


def started_with(names: tuple[str, ...], code: str) -> str:
    """What *code* prints as an ordinary user with these capabilities alone."""
    words = [*with_rights(SOMEBODY, names, "--clear-groups"), "-c", CODE.format(str(ROOT), code)]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@with_capabilities
def test_what_was_given_is_there_and_nothing_else():
    code = "print(*map(has_capability, (CAP_KILL, CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH)), is_powerful())"

    assert started_with((), code) == "False False False False\n"
    assert started_with(("kill",), code) == "True False False True\n"
    assert started_with(("kill", "sys_ptrace"), code) == "True True False True\n"


@with_capabilities
def test_an_ordinary_user_may_signal_their_own_processes_and_with_cap_kill_all():
    code = f"print([may_signal((uid, uid, uid, uid)) for uid in ({SOMEBODY}, 0, 1000)], may_signal(()))"

    assert started_with((), code) == "[True, False, False] False\n"
    assert started_with(("kill",), code) == "[True, True, True] True\n"


@with_capabilities
def test_a_process_that_only_acts_as_us_is_not_ours_to_signal():
    code = f"print(may_signal((1, {SOMEBODY}, 1, {SOMEBODY})), may_signal((1, 1, {SOMEBODY}, 1)))"

    assert started_with((), code) == "False True\n"


@with_capabilities
@pytest.mark.parametrize(
    ("before", "left"),
    [("", 0x80020), ("keep_capabilities()", 0), ("keep_capabilities(); lend_capabilities()", 0x80000)],
)
def test_a_program_that_it_runs_gets_what_is_lent_and_nothing_else(before, left):
    program = f"subprocess.run({EFFECTIVE}, capture_output=True, text=True).stdout"
    code = f"{before}\nprint({program}, has_capability(CAP_KILL))"

    effective, still = started_with(("kill", "sys_ptrace"), code).split()[1:]
    assert (int(effective, 16), still) == (left, "True")


@with_capabilities
def test_a_process_without_capabilities_lends_none():
    assert started_with((), "print(lend_capabilities())") == "False\n"


@with_capabilities
def test_nothing_is_assumed_where_the_kernel_does_not_say(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError(2, "no /proc")))

    assert users.has_capability(users.CAP_KILL) is False


GUARD = SOMEBODY + 2
GIVEN = ("kill", "sys_ptrace")
POLICY = """
version: 1
mode: enforce
interval: {{shortest: 200ms, longest: 200ms}}
policies:
  - name: hogs
    for: 0s
    when: {{memory: {{above: 20GiB}}}}
    at_most: {{processes: 20, users: 20}}
    steps: [{steps}]
{more}
"""
# In front of a terminal of somebody's.
AT_A_TERMINAL = """
import fcntl, os, sys, termios, time
from gpuguard.backends import simulated
os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)
simulated.use("0", 40 * 2**30, 50.0, spec=sys.argv[1])
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """What an ordinary user can import, wherever the checkout lies."""
    with a_site() as place:
        found = importlib.util.find_spec("yaml")
        assert found and found.origin
        shutil.copytree(Path(found.origin).parent, place / "yaml", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
        yield place


@pytest.fixture
def place(open_place: Path) -> Path:
    """Root's, open for everybody to look."""
    return open_place


@contextmanager
def a_guard(
    place: Path, site: Path, steps: str, *, given: tuple[str, ...] = GIVEN, more: str = ""
) -> Iterator[DaemonUnderTest]:
    """A daemon of user GUARD with these capabilities, on a node and claims of root's, with `--enforce`."""
    guard = DaemonUnderTest(place)
    guard.gpuguard("setup", "--dir", str(place / "claims"))
    for own in (place / "claims" / "daemon", place / "log"):
        own.mkdir(mode=0o755)
        os.chown(own, GUARD, GUARD)
    guard.policy.write_text(POLICY.format(steps=steps, more=more))
    os.chown(guard.policy, 0, GUARD)
    guard.policy.chmod(0o640)
    guard.log = place / "log" / "events.jsonl"
    names = f"{PASSWD}guard:x:{GUARD}:{GUARD}::/nonexistent:/bin/false\n"
    words = with_names(place / "passwd", names)
    words += [*with_rights(GUARD, given, "--groups", "5"), "-m", "gpuguard"]  # of terminals: tty
    words += ["daemon", "--policy", str(guard.policy), "--enforce", "--interval", "200ms"]
    environment = {**guard.gpuguard.environment, "PYTHONPATH": str(site), "GPUGUARD_EVENTS": str(guard.log)}
    with (place / "said").open("w") as said:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": said, "start_new_session": True, "cwd": "/"}
        guard.process = subprocess.Popen(words, env=environment, text=True, **quiet)
    try:
        guard.until("daemon")
        yield guard
        assert guard.end() == 0
    finally:
        guard.process.kill()
        guard.process.wait()


@with_capabilities
def test_it_ends_the_process_of_another_user_and_a_bystander_lives(place, site):
    with a_guard(place, site, "terminate") as guard, somebodys(guard.node, "0", 10 * GIB) as bystander:
        with somebodys(guard.node, "0", 40 * GIB) as offender:
            assert offender.wait(60) == -signal.SIGTERM, guard.said()
        assert bystander.poll() is None
        event = guard.until("terminate")[-1]  # on a busy machine a sample may have been too old before

    assert (event["outcome"], event["pid"], event["user"]) == ("about to", offender.pid, "somebody")
    assert (guard.log.stat().st_uid, guard.log.stat().st_mode & 0o777) == (GUARD, 0o600)
    assert "enforcing" in guard.said()
    assert "without CAP" not in guard.said()


@with_capabilities
@pytest.mark.parametrize(("given", "missing"), [((), "CAP_KILL"), (("kill",), "CAP_SYS_PTRACE")])
def test_without_its_capabilities_nothing_is_signalled_and_it_says_why(place, site, given, missing):
    with a_guard(place, site, "terminate", given=given) as guard, somebodys(guard.node, "0", 40 * GIB) as offender:
        event = guard.until("terminate")[0]

        assert offender.poll() is None
    assert event["outcome"] == "refused"
    assert f"this is guard without {missing}" in guard.said()
    assert "enforcing, but not against other users" in guard.said()
    assert ("runs without CAP_KILL" in event["message"]) == (missing == "CAP_KILL")


@with_capabilities
def test_who_asks_and_who_only_looks_finds_it(place, site):
    with a_guard(place, site, "log") as guard, somebodys(guard.node, "0", 40 * GIB):
        guard.until("log")
        assert eventually((place / "claims" / "daemon" / "state.json").exists)
        who = guard.gpuguard("who", "--json")
        kept = guard.gpuguard("keep", "--for", "1h", "--user", str(SOMEBODY))
        kinds = [event["kind"] for event in guard.events()]

        assert json.loads(who.stdout)["age_seconds"] is not None, "the daemon's answer"
        assert kept.returncode == 0, kept.stderr
        assert "keep" in kinds
    assert {path.name for path in (place / "claims").iterdir()} == {"daemon", "lock", "claims"}


@with_capabilities
def test_it_sees_what_others_run_and_which_of_them_hold_a_claim(place, site):
    more = """
  - name: programs
    for: 0s
    when: {command: {executables: ["/*python*"]}}
    steps: [log]
"""
    with a_guard(place, site, "log", more=more) as guard:
        lock = place / "claims" / "lock" / guard.uuid(1)
        with somebodys(guard.node, "1", 1 * GIB, lock=str(lock)) as holder:
            [event] = guard.until("log")[:1]
            assert event["facts"]["policy"] == "programs"
            state = place / "claims" / "daemon" / "state.json"
            assert eventually(lambda: f'"holders":[{holder.pid}]' in state.read_text()), state.read_text()


@with_capabilities
def test_a_hook_has_none_of_its_capabilities(place, site):
    hook, seen = place / "hook", place / "log" / "seen"
    hook.write_text(
        f"#!/bin/sh\ngrep -h Cap /proc/self/status > {seen}.new\nid -u >> {seen}.new\nmv {seen}.new {seen}\n"
    )
    hook.chmod(0o755)
    more = f"notify: {{tell: {{hook: {{command: [{hook}]}}}}}}"
    with a_guard(place, site, "{do: run_hook, hook: tell}", more=more) as guard, somebodys(guard.node, "0", 40 * GIB):
        assert eventually(seen.exists), guard.said()

    *capabilities, uid = seen.read_text().splitlines()
    by_name = {line.split()[0]: int(line.split()[1], 16) for line in capabilities}
    assert (uid, by_name["CapEff:"], by_name["CapPrm:"], by_name["CapAmb:"]) == (str(GUARD), 0, 0, 0)


@with_capabilities
def test_a_policy_file_that_its_own_user_could_write_is_refused(place, site):
    with a_guard(place, site, "terminate") as guard:
        os.chown(guard.policy, GUARD, GUARD)
        guard.process.send_signal(signal.SIGHUP)

        assert eventually(lambda: "refused" in [event["outcome"] for event in guard.events("policy")]), guard.said()
    assert f"belongs to uid {GUARD}" in guard.said()


@with_capabilities
@pytest.mark.terminal
def test_it_warns_on_the_terminal_of_another_user_in_their_language(place, site):
    ours, theirs = os.openpty()
    os.fchown(theirs, SOMEBODY, 5)
    os.fchmod(theirs, 0o620)
    more = "messages: {zh: {body: '请注意 $user：$why'}}"
    try:
        with a_guard(place, site, "warn", more=more) as guard:
            words = [sys.executable, "-c", AT_A_TERMINAL, guard.node, str(SOMEBODY)]
            with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout and child.stdout.readline() == "ready\n"
                event = guard.until("warn")[0]
                child.kill()
        assert event["outcome"] == "done", event
        fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
        assert "请注意 somebody：" in os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
