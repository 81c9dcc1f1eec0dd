"""`gpuguard daemon` on the command line: what it refuses, what --once says, and its exit codes."""

import os
import pwd
import re
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from builders import Scripted, a_device, a_process, a_snapshot
from daemons import a_daemon
from nodes import GIB, SECONDS, a_user, start

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon import service
from gpuguard.daemon.service import Daemon, DaemonSettings, notify_systemd
from gpuguard.enforcement import actions
from gpuguard.enforcement.actions import ActionOutcome
from gpuguard.errors import GpuguardError

HEAD = """
version: 1
interval: {shortest: 200ms, longest: 200ms}
policies:
"""
HOGS = f"""{HEAD}
  - {{name: hogs, for: 0s, when: {{memory: {{above: 20GiB}}}}, steps: [log]}}
  - {{name: young, for: 0s, start_grace: 1h, when: {{memory: {{above: 20GiB}}}}, steps: [log]}}
"""
PATIENT = f"{HEAD}  - {{name: patient, for: 2h, when: {{memory: {{above: 20GiB}}}}, steps: [warn]}}"


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(HOGS)
    return path


@pytest.fixture
def once(gpuguard, policy):
    """`gpuguard daemon --once` with that file."""
    return lambda *words, file=policy: gpuguard("daemon", "--policy", str(file), "--once", *words)


def test_once_says_what_is_due_and_what_is_not_and_why(once, tmp_path):
    with a_user(str(tmp_path / "node"), "0", 40 * GIB) as child:
        done = once()

        assert child.poll() is None
    assert done.returncode == 0
    assert f"pid {child.pid}" in done.stderr
    assert "policy=hogs" in done.stderr
    assert "young: nothing is done, grace" in done.stderr


def test_once_says_what_would_follow_if_the_daemon_went_on(once, policy, tmp_path):
    policy.write_text(PATIENT)
    with a_user(str(tmp_path / "node"), "0", 40 * GIB) as child:
        done = once()
    user = pwd.getpwuid(os.getuid()).pw_name

    whom, _, what = done.stderr.splitlines()[-1].rpartition(": patient for ")
    assert whom == f"gpuguard: {user}, process {child.pid} on GPU 0", done.stderr
    soon, _, later = what.partition("; warn in ")
    assert re.fullmatch(r"\ds \(uses 40\.0GiB of GPU 0, 20GiB is allowed\)", soon)
    assert re.fullmatch(r"(2h|1h59m\d*s?), if nothing changes \(a dry run: only written down\)", later)


def test_once_says_that_there_is_nothing_against_anybody_and_writes_its_log_where_it_was_told_to(once, tmp_path):
    done = once("--events", str(tmp_path / "elsewhere.jsonl"))

    assert done.stderr.splitlines()[-1] == "gpuguard: no policy has anything against any user now."
    assert "in force" in (tmp_path / "elsewhere.jsonl").read_text()


def test_another_file_is_tried_beside_the_daemon_that_runs_and_nothing_of_it_stays(tmp_path):
    with a_daemon(tmp_path, POLICY) as daemon, a_user(daemon.node, "0", 40 * GIB) as child:
        tried = tmp_path / "tried.yaml"
        tried.write_text(f"desktop_memory: 3GiB\n{HOGS}")
        files = {path: path.read_bytes() for path in (tmp_path / "claims").rglob("*.json") if path.name != "state.json"}
        daemon.gpuguard.environment.pop("GPUGUARD_EVENTS")
        done = daemon.gpuguard("daemon", "--policy", str(tried), "--once", "--events", str(tmp_path / "own.jsonl"))

        assert (done.returncode, f"pid {child.pid}" in done.stderr, "policy=hogs" in done.stderr) == (0, True, True)
        assert all(event.get("facts", {}).get("policy") != "hogs" for event in daemon.events())
        assert all(path.read_bytes() == content for path, content in files.items())
        assert child.poll() is None
        assert daemon.process.poll() is None


def test_what_only_looks_does_not_enforce(once):
    done = once("--enforce")

    assert (done.returncode, done.stderr) == (
        2, "gpuguard: --once only looks: it signals no process, so leave out --enforce.\n",
    )  # fmt: skip


@pytest.mark.parametrize("gone", ["disk", "reader"])
def test_a_daemon_whose_output_cannot_be_written_guards_all_the_same(gpuguard, policy, tmp_path, gone):
    reader, writer = os.pipe()
    os.close(reader)
    words = "daemon", "--policy", str(policy), "--once"
    with (
        a_user(str(tmp_path / "node"), "0", 40 * GIB) as child,
        open("/dev/full", "w") as full,
        gpuguard.start(*words, stderr=full if gone == "disk" else writer) as daemon,
    ):
        os.close(writer)

        assert daemon.wait(SECONDS) == 0
    assert f'"pid": {child.pid}' in (tmp_path / "events.jsonl").read_text()


def test_what_users_wrote_cannot_reach_the_journal_as_it_is(once, tmp_path):
    hostile = tmp_path / "x\x1b[2J\nforged.yaml"
    hostile.write_text("version: 1\n")
    done = once(file=hostile)

    assert "\x1b" not in done.stderr
    assert all(line.startswith("gpuguard: ") for line in done.stderr.splitlines())


def failing(error):
    """A function that raises it."""

    def fails(*_, **__):
        raise error

    return fails


POLICY = "{version: 1, policies: [{name: small, when: {memory: {above: 1GiB}}, for: 1m, steps: [log]}]}"


def test_a_file_that_cannot_be_read_now_is_complained_of_once_and_read_later(tmp_path, monkeypatch):
    """A guard that was started while LDAP was down, or no process to be had, only observed from then on."""
    said, events, path = [], [], tmp_path / "policy.yaml"
    path.write_text(POLICY)
    where = start(str(tmp_path / "node")), lock_directory(str(tmp_path))
    guard = Daemon(*where, DaemonSettings(str(path)), said.append, events.append, lambda event: True)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
        guard.reload_if_changed()
        monkeypatch.setattr(service, "REREAD_SECONDS", 0.0)
        guard.reload_if_changed()
    assert len(said) == 1
    guard.reload_if_changed()

    assert [event.outcome for event in events] == ["refused", "faults mended", "in force"]


def test_a_fault_and_a_name_that_means_no_user_count_until_they_are_mended(tmp_path):
    """An alert goes by the number: the guard was off, and `doctor`, the metrics and the log were content."""
    path, events, numbers = tmp_path / "policy.yaml", [], []
    where = start(str(tmp_path / "node")), lock_directory(str(tmp_path))
    guard = Daemon(*where, DaemonSettings(str(path)), print, events.append, lambda event: True)
    gone, faulty = POLICY.replace("[log]", "[log], except: {users: [no-such-user]}"), POLICY.replace("1m", "1")
    for text in (POLICY, gone, faulty, POLICY):
        path.write_text(text)
        guard.reload_if_changed()
        numbers.append((guard.faults, guard.unguarded()))

    assert [number for number, _ in numbers] == [0, 1, 2, 0]
    (_, before), (_, name), (_, fault), (_, mended) = numbers
    assert before is mended is None and name and "no user 'no-such-user'" in name
    assert fault and "the policy file has faults" in fault
    assert [event.outcome for event in events if event.outcome != "in force"] == [
        "names unknown", "refused", "names known", "faults mended",
    ]  # fmt: skip


ONE_OF_TWO = """
version: 1
interval: {{shortest: {n}s, longest: {n}s}}
keep: {{longest: {n}s}}
limits: {{per_minute: {n}, per_hour: {n}}}
protect: {{executables: [/opt/{n}]}}
messages: {{en: {{subject: "{n}"}}}}
notify: {{ops: {{hook: {{command: [/opt/{n}]}}}}}}
policies: [{{name: "{n}", when: {{memory: {{above: 1GiB}}}}, for: 0s, steps: [log]}}]
"""


def test_a_step_goes_by_one_policy_file_alone_although_another_one_comes_into_force_meanwhile(tmp_path, monkeypatch):
    """The texts of the new file went to the targets of the old one, and the limits were those of either."""
    path, seen = tmp_path / "policy.yaml", []

    class Reread(Scripted):
        def sample(self, fields, devices=None):
            if len(self.shown) == 3:
                path.write_text(ONE_OF_TWO.format(n=7))
                guard.reload_if_changed(requested=True)
            return super().sample(fields, devices)

    def act(verdict, snapshot, context):
        hook, limits = context.notifier.targets["ops"], context.limits
        texts = verdict.policy, hook.command[0], context.templates["en"].subject, *context.protected_executables
        seen.append((*texts, context.interval, context.longest_keep, limits.per_minute, limits.per_hour))
        return (ActionOutcome("done"),)

    monkeypatch.setattr(actions, "act", act)
    monkeypatch.setattr(service, "Sender", lambda targets, *more: SimpleNamespace(targets=targets, stop=print))
    device = a_device(memory_used=40 * GIB, processes=(a_process(memory_used=40 * GIB),))
    samples = [a_snapshot(device, clock=10_000.0 + 5 * n, taken_at=1_700_000_000.0 + 5 * n) for n in range(4)]
    path.write_text(ONE_OF_TWO.format(n=5))
    where = Reread(*samples), lock_directory(str(tmp_path))
    guard = Daemon(*where, DaemonSettings(str(path)), print, print, lambda event: True)
    guard.reload_if_changed()
    for _sample in range(4):
        guard.watchdog.step()

    assert seen == [(f"{n}", f"/opt/{n}", f"{n}", f"/opt/{n}", n, n, n, n) for n in (5, 7)]


def test_that_lines_are_missing_is_said_before_the_next_one_and_again_until_it_is_written(tmp_path):
    """There was room for the next line, and none for the one that said what was missing."""
    log, room = list[str](), [False, False, True, False, True, True, True]

    def append(event):
        log.extend([event.outcome] * (written := room.pop(0)))
        return written

    guard = Daemon(start(str(tmp_path / "node")), lock_directory(str(tmp_path)), DaemonSettings(), print, print, append)
    for outcome in "abcd":
        guard._log("daemon", outcome)

    assert log == ["b", "c", "writable again", "d"]


def test_a_sign_of_life_for_which_no_descriptor_is_left_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "socket", failing(OSError(24, "Too many open files")))
    notify_systemd("WATCHDOG=1", {"NOTIFY_SOCKET": str(tmp_path / "manager")})


@pytest.mark.parametrize("keeper", [None, 0])
def test_a_daemon_that_can_make_no_socket_ends_where_it_gives_the_locks(tmp_path, monkeypatch, keeper):
    """With /run full for a moment it went on without one, and nothing could be claimed from then on."""
    monkeypatch.setattr(service, "SocketServer", failing(OSError(28, "No space left on device")))
    directory, told = replace(lock_directory(str(tmp_path)), keeper=keeper), list[str]()
    guard = Daemon(start(str(tmp_path / "node")), directory, DaemonSettings(), told.append, print, lambda event: True)
    if keeper is None:
        assert guard.open_socket() is None and "`gpuguard keep` does not work" in told[0]
        return

    with pytest.raises(GpuguardError, match="no user can claim"):
        guard.open_socket()
