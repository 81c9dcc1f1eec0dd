"""The daemon as its unit starts it, less systemd: an ordinary uid with CAP_KILL and CAP_SYS_PTRACE, and one without."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from daemons import SOMEBODY, DaemonUnderTest, somebodys
from nodes import GIB, eventually
from users import a_site, interpreter

pytestmark = [pytest.mark.root, pytest.mark.skipif(not shutil.which("setpriv"), reason="NOT TESTED: needs setpriv")]
GUARD = SOMEBODY + 2
GIVEN = ("kill", "sys_ptrace")
PASSWD = f"somebody:x:{SOMEBODY}:{SOMEBODY}::/:/bin/false\nguard:x:{GUARD}:{GUARD}::/:/bin/false\n"
WITH_NAMES = 'mount --bind "$1" /etc/passwd && shift && exec "$@"'
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
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: needs a private mount namespace (not in a chroot)")
    guard = DaemonUnderTest(place)
    guard.gpuguard("setup", "--dir", str(place / "claims"))
    for own in (place / "claims" / "daemon", place / "log"):
        own.mkdir(mode=0o755)
        os.chown(own, GUARD, GUARD)
    guard.policy.write_text(POLICY.format(steps=steps, more=more))
    os.chown(guard.policy, 0, GUARD)
    guard.policy.chmod(0o640)
    guard.log = place / "log" / "events.jsonl"
    (place / "passwd").write_text(Path("/etc/passwd").read_text() + PASSWD)
    caps = ",".join(["-all", *(f"+{name}" for name in given)])
    words = ["unshare", "-m", "sh", "-c", WITH_NAMES, "sh", str(place / "passwd"), "setpriv", "--no-new-privs"]
    words += ["--reuid", str(GUARD), "--regid", str(GUARD), "--groups", "5"]  # of terminals: tty
    words += ["--inh-caps", caps, "--ambient-caps", caps, "--bounding-set", caps, interpreter(), "-m", "gpuguard"]
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


def test_it_ends_the_process_of_another_user_and_a_bystander_lives(place, site):
    with a_guard(place, site, "terminate") as guard, somebodys(guard.node, "0", 10 * GIB) as bystander:
        with somebodys(guard.node, "0", 40 * GIB) as offender:
            assert offender.wait(20) == -signal.SIGTERM, guard.said()
        assert bystander.poll() is None
        event = guard.until("terminate")[0]

    assert (event["outcome"], event["pid"], event["user"]) == ("about to", offender.pid, "somebody")
    assert (guard.log.stat().st_uid, guard.log.stat().st_mode & 0o777) == (GUARD, 0o600)
    assert "enforcing" in guard.said()
    assert "without CAP" not in guard.said()


@pytest.mark.parametrize(("given", "missing"), [((), "CAP_KILL"), (("kill",), "CAP_SYS_PTRACE")])
def test_without_its_capabilities_nothing_is_signalled_and_it_says_why(place, site, given, missing):
    with a_guard(place, site, "terminate", given=given) as guard, somebodys(guard.node, "0", 40 * GIB) as offender:
        event = guard.until("terminate")[0]

        assert offender.poll() is None
    assert event["outcome"] == "refused"
    assert f"this is guard without {missing}" in guard.said()
    assert "enforcing, but not against other users" in guard.said()
    assert ("runs without CAP_KILL" in event["message"]) == (missing == "CAP_KILL")


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


def test_a_hook_has_none_of_its_capabilities(place, site):
    hook, seen = place / "hook", place / "log" / "seen"
    hook.write_text(
        f"#!/bin/sh\ngrep -h Cap /proc/self/status > {seen}.new\nid -u >> {seen}.new\nmv {seen}.new {seen}\n"
    )
    hook.chmod(0o755)
    more = f"notify: {{tell: {{hook: {{command: [{hook}]}}}}}}"
    with a_guard(place, site, "{do: run_hook, hook: tell}", more=more) as guard, somebodys(guard.node, "0", 40 * GIB):
        assert eventually(seen.exists, 20), guard.said()

    *capabilities, uid = seen.read_text().splitlines()
    by_name = {line.split()[0]: int(line.split()[1], 16) for line in capabilities}
    assert (uid, by_name["CapEff:"], by_name["CapPrm:"], by_name["CapAmb:"]) == (str(GUARD), 0, 0, 0)


def test_a_policy_file_that_its_own_user_could_write_is_refused(place, site):
    with a_guard(place, site, "terminate") as guard:
        os.chown(guard.policy, GUARD, GUARD)
        guard.process.send_signal(signal.SIGHUP)

        assert eventually(lambda: "refused" in [event["outcome"] for event in guard.events("policy")]), guard.said()
    assert f"belongs to uid {GUARD}" in guard.said()


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
