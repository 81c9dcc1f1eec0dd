"""The daemon as a process: what it does to whom, what it survives, and how it ends."""

import json
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial

import pytest
from daemons import DaemonUnderTest, a_daemon, somebodys
from endpoints import a_web_server
from nodes import GIB, a_user, change, eventually, until
from proc import children_of
from sources import ROOT

from gpuguard.daemon.service import clean_environment
from gpuguard.errors import InvalidRequest

UNIT = ROOT / "packaging" / "gpuguard.service"
HOGS = """
version: 1
mode: {mode}
policies:
  - name: hogs
    when: {{memory: {{above: 20GiB}}}}
    for: 300ms
    steps: [{steps}]
"""
TERMINATE = HOGS.format(mode="enforce", steps="terminate")
ESCALATION = HOGS.format(
    mode="enforce", steps="warn, {after: 600ms, do: checkpoint, signal: USR1}, {after: 600ms, do: terminate}"
)


@pytest.mark.root
def test_both_switches_end_the_offender_and_no_bystander(tmp_path):
    with (
        a_daemon(tmp_path, TERMINATE, "--enforce", named=True) as daemon,
        somebodys(daemon.node, "0", 10 * GIB) as bystander,
        somebodys(daemon.node, "0", 40 * GIB) as offender,
    ):
        assert offender.wait(60) == -signal.SIGTERM
        assert bystander.poll() is None
        events = daemon.until("terminate")

    assert {(event["pid"], event["user"]) for event in events} == {(offender.pid, "somebody")}
    assert events[-1]["outcome"] == "about to", "a try before may have been refused: its line was too long in writing"


@pytest.mark.root
@pytest.mark.parametrize(
    ("mode", "options", "said"),
    [
        ("observe", ["--enforce"], "dry run: no policy has mode: enforce"),
        ("enforce", [], "dry run: --enforce is missing"),
        ("enforce", ["--dry-run"], "dry run: --enforce is missing"),
        ("observe", [], "1 policy, dry run\n"),
    ],
)
def test_one_switch_is_not_enough_and_the_other_is_named(tmp_path, mode, options, said):
    policy = HOGS.format(mode=mode, steps="terminate")
    with a_daemon(tmp_path, policy, *options, named=True) as daemon, somebodys(daemon.node, "0", 40 * GIB) as offender:
        event = daemon.outcome("terminate", "dry run")

        assert offender.poll() is None
    assert (event["pid"], event["facts"]["policy"]) == (offender.pid, "hogs")
    assert said in daemon.said()


@pytest.mark.root
def test_a_process_of_root_is_never_hit(tmp_path):
    with a_daemon(tmp_path, TERMINATE, "--enforce", named=True) as daemon, a_user(daemon.node, "0", 40 * GIB) as child:
        event = daemon.until("terminate")[0]

        assert child.poll() is None
    assert event["outcome"] == "refused"


@pytest.mark.root
def test_without_a_line_in_the_log_there_is_no_signal(tmp_path):
    full = {"environment": {"GPUGUARD_EVENTS": "/dev/full"}}
    with a_daemon(tmp_path, TERMINATE) as before:
        assert before.end() == 0
    before.start("--interval", "200ms", "--enforce", named=True, **full)
    try:
        with somebodys(before.node, "0", 40 * GIB) as offender:
            assert eventually(lambda: "not recorded" in before.said().partition("terminate")[2])
            assert offender.poll() is None
    finally:
        before.end()

    assert "about to" not in before.said(), "what is not written down is not done"
    said = "the audit log cannot be written, so no process will be signalled: /dev/full: No space left on device.  Mend"
    assert said in before.said()


def test_a_log_that_can_be_written_again_says_what_is_missing(tmp_path):
    log = tmp_path / "full.jsonl"
    log.symlink_to("/dev/full")
    daemon = DaemonUnderTest(tmp_path)
    daemon.policy.write_text(TERMINATE)
    daemon.start("--interval", "200ms", environment={"GPUGUARD_EVENTS": str(log)})
    try:
        assert eventually(lambda: "started (not recorded)" in daemon.said() or "the audit log cannot" in daemon.said())
        log.unlink()
        daemon.policy.write_text(TERMINATE + "# again\n")
        assert eventually(lambda: log.exists() and "writable again" in log.read_text()), daemon.said()
    finally:
        daemon.end()

    assert re.search(r"\d events? of .* and later are missing", log.read_text())


@pytest.mark.root
@pytest.mark.parametrize("killed_after", ["warn", "checkpoint"])
def test_a_daemon_that_was_killed_starts_again_at_the_first_step(tmp_path, killed_after):
    with (
        a_daemon(tmp_path, ESCALATION, "--enforce", named=True) as daemon,
        somebodys(daemon.node, "0", 40 * GIB) as offender,
    ):
        daemon.until(killed_after)
        assert daemon.end(signal.SIGKILL) == -signal.SIGKILL
        before = len(daemon.events())
        daemon.start("--interval", "200ms", "--enforce", named=True)
        offender.wait(60)
        assert ["was killed" in event["message"] for event in daemon.events("daemon")[:2]] == [False, True]
        steps = [event["kind"] for event in daemon.events()[before:] if "policy" in event.get("facts", {})]
        daemon.end()

    expected = ["warn", "checkpoint", "terminate"]
    assert [kind for kind in steps if kind in expected] == expected


def test_a_daemon_guards_although_what_it_says_is_not_read(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    daemon = DaemonUnderTest(tmp_path)
    with daemon.gpuguard.start("daemon", "--interval", "300ms", stderr=writer) as process:
        try:
            assert eventually((tmp_path / "claims" / "state.json").exists, 40)
            process.terminate()
            assert process.wait(40) == 0
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_a_second_daemon_is_refused(tmp_path):
    with a_daemon(tmp_path) as daemon:
        done = daemon.gpuguard("daemon")

        assert done.returncode == 3
        assert "runs already" in done.stderr


# What hangs is waited for much longer than daemon.end() waits for the daemon.
PATIENT = "from gpuguard.backends import client; client.DEVICE_SECONDS = client.NEXT_DEVICE_SECONDS = 600.0"


@pytest.mark.parametrize(("when", "before"), [("all hang already", ""), ("a call is under way", PATIENT)])
def test_it_ends_at_once_whatever_the_driver_does(tmp_path, when, before):
    with a_daemon(tmp_path, TERMINATE, before=before) as daemon:
        daemon.state()
        for index in range(4):
            change(daemon.node, index, faults=("hang",))
        if when == "a call is under way":
            until(partial(stands_still, daemon))
        else:
            hangs = [["unresponsive"]] * 4
            assert eventually(lambda: [device["problems"] for device in daemon.devices()] == hangs)

        assert daemon.end() == 0
    assert daemon.events("daemon")[-1]["outcome"] == "stopped"


def stands_still(daemon):
    before = daemon.state()["snapshot"]["taken_at"]
    return not eventually(partial(sampled_since, daemon, before), 1.0)


def sampled_since(daemon, moment):
    return daemon.state()["snapshot"]["taken_at"] > moment


def test_its_worker_may_die_again_and_again(tmp_path):
    with a_daemon(tmp_path) as daemon:
        pid = daemon.process.pid
        descriptors = []
        for _ in range(5):
            assert eventually(lambda: any(state != "Z" for state in children_of(pid).values()))
            killed_at = time.time()
            for child in children_of(pid):
                os.kill(child, signal.SIGKILL)
            assert eventually(partial(sampled_since, daemon, killed_at))
            descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))

        assert max(descriptors) <= min(descriptors) + 2
        assert len(children_of(pid)) <= 3
        assert daemon.end() == 0


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path):
    with a_daemon(tmp_path, HOGS.format(mode="observe", steps="log")) as daemon:
        daemon.policy.write_text("version: 1\npolicies: [{name: x}]\n")
        refused = daemon.until("policy", 2)[1]
        with a_user(daemon.node, "0", 40 * GIB):
            daemon.until("log")  # the last good one is in force
        daemon.policy.write_text(TERMINATE)
        daemon.until("policy", 5)
        with a_user(daemon.node, "0", 40 * GIB):
            daemon.until("terminate")

    outcomes = [event["outcome"] for event in daemon.events("policy")]
    assert outcomes == ["in force", "refused", "in force", "faults mended", "in force"]
    assert f"{daemon.policy}:2:" in refused["message"]


def test_what_a_faulty_file_says_gets_into_no_journal(tmp_path):
    """A token, a password or the address of a webhook may stand in the line that is wrong."""
    text = "version: 1\nnotify: {chat: {webhook: {url: https://x.example/s3cret1, token: s3cret2}}}\npolicies: []\n"
    with a_daemon(tmp_path, text) as daemon:
        assert f"{daemon.policy}:2:" in daemon.until("policy")[0]["message"]
        assert "'token' must have keys" in daemon.said()
        assert "s3cret" not in daemon.said() + daemon.log.read_text()


@pytest.mark.parametrize("policy", [None, "version: 1\npolicies: []\n", "{"])
def test_without_a_valid_policy_it_only_observes(tmp_path, policy):
    with a_daemon(tmp_path, policy, *(["--enforce"] if policy else [])) as daemon, a_user(daemon.node, "0", 40 * GIB):
        assert eventually(lambda: any(device["processes"] for device in daemon.devices()))
        assert "observing only" in daemon.events("daemon")[0]["message"]
        assert daemon.end() == 0
    assert {event["kind"] for event in daemon.events()} <= {"daemon", "policy", "note"}


def test_who_answers_from_what_the_daemon_saw(tmp_path):
    with a_daemon(tmp_path, None, "--interval", "10s") as daemon, a_user(daemon.node, "2", 40 * GIB) as child:
        assert eventually(lambda: any(device["processes"] for device in daemon.devices()))
        daemon.process.send_signal(signal.SIGSTOP)
        for index in range(4):
            change(daemon.node, index, faults=("lost",))  # a command that asks the driver sees this
        seen = json.loads(daemon.gpuguard("who", "--json").stdout)
        text = daemon.gpuguard("who").stdout
        fresh = json.loads(daemon.gpuguard("who", "--json", "--fresh").stdout)

    assert [process["pid"] for device in seen["devices"] for process in device["processes"]] == [child.pid]
    assert 0 <= seen["age_seconds"] < 10
    assert "seen by the daemon" in text.splitlines()[0]
    assert fresh["age_seconds"] is None
    assert [device["problems"] for device in fresh["devices"]] == [["lost"]] * 4


def test_systemd_is_told_how_it_is(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        told = ""
        with a_daemon(tmp_path, TERMINATE, environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            while "WATCHDOG=1" not in told:
                told += manager.recv(4096).decode() + "\n"
            daemon.end()
            while "STOPPING=1" not in told:
                told += manager.recv(4096).decode() + "\n"

    assert told.startswith("READY=1\nSTATUS=1 policy, dry run: --enforce is missing\nWATCHDOG=1\n")


def test_a_daemon_of_root_takes_no_library_no_path_and_no_module_from_its_caller():
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT"):
        with pytest.raises(InvalidRequest, match=name):
            clean_environment({name: "/tmp/x"}, root=True)
        clean_environment({name: "/tmp/x"}, root=False)
    clean_environment({"LD_LIBRARY_PATH": "/usr/lib:/usr/share"}, root=True)  # which root alone can change
    with pytest.raises(
        InvalidRequest, match=r"LD_LIBRARY_PATH \(/tmp can be changed by others than root, or is no directory\) must"
    ):
        clean_environment({"LD_LIBRARY_PATH": "/usr/lib:/tmp"}, root=True)
    environment = {"PATH": "/home/eve/bin", "PYTHONPATH": "/home/eve", "PYTHONSTARTUP": "x", "HOME": "/root"}
    clean_environment(environment, root=True)

    assert environment == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


@pytest.mark.root
def test_the_command_refuses_such_an_environment(tmp_path):
    with a_daemon(tmp_path) as daemon:
        daemon.end()
        daemon.gpuguard.environment["LD_PRELOAD"] = ""
        daemon.gpuguard.environment["LD_LIBRARY_PATH"] = str(tmp_path)
        done = daemon.gpuguard("daemon", "--once")

    assert (done.returncode, "LD_LIBRARY_PATH" in done.stderr) == (2, True)


def test_a_message_goes_out_and_the_loop_does_not_wait_for_it(tmp_path):
    """A notification touches no process, but it too needs both switches."""
    with a_web_server() as web:
        policy = HOGS.format(mode="enforce", steps="{do: notify, to: chat}")
        policy += f"notify: {{chat: {{webhook: '{web.url}'}}}}"
        with a_daemon(tmp_path, policy) as daemon, a_user(daemon.node, "0", 40 * GIB):
            assert daemon.until("notify")[0]["outcome"] == "dry run"
            assert daemon.end() == 0
        assert web.requests == []
        daemon.start("--interval", "200ms", "--enforce")
        with a_user(daemon.node, "0", 40 * GIB) as child:
            assert eventually(lambda: bool(web.requests)), daemon.said()
            daemon.end()

    assert str(child.pid) in str(web.requests[0])
    assert {"done", "sent"} <= {event["outcome"] for event in daemon.events("notify")}


def test_targets_that_will_fail_are_said_at_the_start_and_at_each_reading(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("x")
    secret.chmod(0o644)
    targets = (
        f"notify: {{chat: {{webhook: {{url: 'https://example.org/', token: {{file: {secret}}}}}}}, "
        "tell: {hook: {command: [/nonexistent/tell]}}}\n"
    )
    with a_daemon(tmp_path, TERMINATE + targets) as daemon:
        assert eventually(lambda: len(daemon.events("notify")) == 2), daemon.said()
        told = [(event["outcome"], event["message"]) for event in daemon.events("notify")]
        secret.chmod(0o600)
        daemon.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: len(daemon.events("notify")) == 3), daemon.said()

    assert [outcome for outcome, _ in told] == ["will fail"] * 2
    assert f"chat: token: the secret {secret} is open to others" in told[0][1]
    assert "tell: /nonexistent/tell cannot be run" in told[1][1]
    assert "tell: /nonexistent/tell" in daemon.events("notify")[2]["message"], "the other one was mended"
    assert "will fail" in daemon.said()


# A daemon under which another gpuguard is installed: all that acts is of one version.
# From the moment when it watches on, nothing of gpuguard can be loaded any more: the new one has other modules.
UPGRADED = """
import sys
class Gone:
    def find_spec(name, path=None, target=None):
        if name.startswith("gpuguard."):
            raise ModuleNotFoundError(name)
from gpuguard.daemon import service as daemon
open_socket = daemon.Daemon.open_socket
def opened(self):
    try:
        return open_socket(self)
    finally:
        sys.meta_path.insert(0, Gone)
daemon.Daemon.open_socket = opened
from gpuguard.cli import main
main(sys.argv[sys.argv.index("daemon"):])
"""
UNDER = [sys.executable, "-c", UPGRADED]


@pytest.mark.root
@pytest.mark.parametrize("step", ["warn, {after: 300ms, do: terminate}", "renice", "pause", "deny", "quarantine"])
def test_under_an_upgrade_no_action_meets_a_module_that_is_gone(tmp_path, step):
    with (
        a_daemon(tmp_path, HOGS.format(mode="enforce", steps=step), "--enforce", named=True, under=UNDER) as daemon,
        somebodys(daemon.node, "0", 40 * GIB) as offender,
    ):
        ends = {step, "watchdog", "terminate"}
        assert eventually(lambda: not ends.isdisjoint(event["kind"] for event in daemon.events()))
        said = [event["message"] for event in daemon.events() if event["kind"] == "watchdog"]
        assert "terminate" not in step or offender.wait(60) == -signal.SIGTERM

    assert said == []
