"""What /proc says of a process to a guard that may look into processes, but not open every file of the machine."""

import contextlib
import io
import os
import signal
import subprocess
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driven import driven
from fake_nvml import GIB, FakeNvml
from guarded import SOMEBODY, Scene, a_child, somebody

from gpuguard.enforcement import identity
from gpuguard.enforcement.identity import Protected
from gpuguard.policies.files.decoder import Accounts
from gpuguard.policies.files.loader import parse

MAPPED = b"7f0-7f1 rw-s 00000000 00:06 451                              /dev/nvidiactl\n"
OTHERS = b"7f0-7f1 r-xp 00000000 fe:00 1 /home/alice/dev/nvidiactl.py\n7f0-7f1 rw-p 00000000 00:00 0 [heap]\n"
MADE_UP = (
    b"7f0-7f1 r-xp 00000000 fe:00 1      /home/eve/x\r7f0-7f1 r-xp 0 00:06 1 /dev/nvidia0\n"
    b"7f0-7f1 rw-p 00000000 00:00 0      [anon: /dev/nvidia0]\n"
)


def refused(*_: object) -> list[str]:
    raise PermissionError(13, "Permission denied")


def shows(monkeypatch: pytest.MonkeyPatch, maps: Callable[[str], bytes | None]) -> None:
    """Have *maps* tell what stands in /proc/PID/maps; None: it cannot be read."""

    def opened(path: str, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return refused() if (told := maps(path)) is None else io.BytesIO(told)  # type: ignore[return-value]

    monkeypatch.setattr("builtins.open", opened)


@pytest.mark.parametrize(
    ("maps", "uses"),
    [
        (OTHERS + MAPPED, True),
        (MAPPED.replace(b"ctl", b"-uvm"), True),
        (MAPPED.replace(b"ctl", b"-caps/nvidia-cap1"), True),
        (OTHERS, None),
        (MADE_UP, None),  # by whoever maps it
        (b"", None),
        (None, None),
    ],
)
def test_where_its_files_cannot_be_seen_its_mappings_say_that_it_uses_the_driver(monkeypatch, maps, uses):
    monkeypatch.setattr(identity, "DRIVER_FILE", "/dev/null")
    monkeypatch.setattr(identity.os, "listdir", refused)
    shows(monkeypatch, lambda path: maps)

    assert identity._has_open(os.getpid(), "/dev/null") is uses, "what cannot be seen is not known, never False"


def test_what_a_process_has_mapped_is_never_in_memory_at_once(monkeypatch):

    class Endless(io.RawIOBase):
        left = 2**26

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            given = (OTHERS * (len(buffer) // len(OTHERS) + 1))[: min(len(buffer), self.left)]
            buffer[: len(given)] = given
            self.left -= len(given)
            return len(given)

    monkeypatch.setattr("builtins.open", lambda *how: io.BufferedReader(Endless()))
    tracemalloc.start()
    try:
        assert not identity._maps_the_driver("/proc/1/maps")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("files", [(), ("0",)])
def test_who_lets_another_thread_than_the_first_open_the_driver_uses_it_no_less(monkeypatch, files):
    """A thread can have files of its own, and the first one may have ended: then /proc/PID shows neither."""
    monkeypatch.setattr(identity.os, "listdir", lambda path: files if path.endswith("/fd") else ["17", "18"])
    shows(monkeypatch, lambda path: OTHERS + MAPPED if path == "/proc/17/task/18/maps" else b"")
    monkeypatch.setattr(identity, "in_time", lambda pid, kind, look: look())

    assert identity._has_open(17, "/dev/full") is True


def test_a_program_on_a_file_system_that_tells_root_nothing_is_known_by_its_path(monkeypatch):
    stat = os.stat

    def closed(path, **more):
        return refused() if str(path).endswith("/exe") else stat(path, **more)

    path = identity.facts_of(os.getpid()).executable
    monkeypatch.setattr(identity.os, "stat", closed)

    facts = identity.facts_of(os.getpid())
    assert (facts.executable, facts.executable_owner) == (path, None)
    assert not identity.runs_one_of(facts, (path,)), "a path is nothing that protects: anybody can mount there"


MOUNTED = 'mount --bind "$0" /usr/bin/login && exec /usr/bin/login -c "import time; print(flush=True); time.sleep(600)"'
# From outside of that namespace: whoever runs it there sees what everybody sees.
THROUGH = r"""
unshare -Urm sh -c 'mount --bind "$0" /usr/bin/login && exec sleep 600' "$0" &
until cmp -s "$0" /proc/$!/root/usr/bin/login; do kill -0 $! || exit; sleep 0.01; done
exec /proc/$!/root/usr/bin/login -c "import time; print(flush=True); time.sleep(600)"
"""


@pytest.mark.root
@pytest.mark.parametrize("way", ["mounted", "through", "in a container"])
def test_a_program_of_roots_that_somebody_mounted_at_the_path_of_another_is_not_that_one(way):
    """In a namespace of one's own /usr/bin/login can be Python: whoever ran that was out of every policy's reach."""
    python = os.path.realpath("/usr/bin/python3")
    if not os.path.exists("/usr/bin/login") or not os.path.exists(python):
        pytest.skip("programs that change their user (no login, or no Python of the system's)")
    own = ["setpriv", "--reuid=20001", "--regid=20001", "--clear-groups"]
    words = {
        "mounted": [*own, "unshare", "-Urm", "sh", "-c", MOUNTED, python],
        "through": [*own, "sh", "-c", THROUGH, python],
        # Root made what it sees, so its paths are what root says.
        "in a container": ["unshare", "-m", "sh", "-c", MOUNTED.replace("exec", f"exec {' '.join(own)}"), python],
    }[way]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as child:
        try:
            if not child.stdout.readline():
                pytest.skip(f"other namespaces (none here: {child.stderr.read().decode().strip()})")
            facts = identity.facts_of(child.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    assert (facts.executable, facts.executable_owner, facts.uids[0]) == ("/usr/bin/login", 0, 20001)
    of_root = way == "in a container"
    assert identity.belongs_to_the_system(facts) is of_root
    assert identity.runs_one_of(facts, ("/usr/bin/login",)) is of_root


POLICY = """
protect: {protect}
policies: [{{name: small, for: 1s, when: {{memory: {{above: 1GiB}}}}, steps: [terminate]}}]
"""
SLEEP = os.path.realpath("/usr/bin/sleep")


@pytest.mark.root
@pytest.mark.parametrize(
    ("protect", "why"),
    [
        ("{users: [somebody]}", f"uid {SOMEBODY} is protected"),
        ("{groups: [our-lab]}", f"uid {SOMEBODY} is protected"),
        (f"{{executables: [{SLEEP}]}}", f"{SLEEP} is protected"),
    ],
)
def test_whoever_is_protected_lives_and_the_log_says_why(tmp_path: Path, protect: str, why: str) -> None:
    groups = tmp_path / "group"
    groups.write_text(Path("/etc/group").read_text() + "our-lab:x:30001:somebody\n")
    under = "sh", "-c", 'mount --bind "$1" /etc/group && shift && exec "$@"', "sh", str(groups)
    with FakeNvml(tmp_path, devices=1) as fake, a_child() as child:
        fake.add_process(0, child.pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(protect=protect), under=under) as daemon:
            refused = daemon.until("terminate")

            assert [event["outcome"] for event in refused] == ["refused"]
            assert refused[0]["message"].endswith(why)
            assert child.poll() is None


@pytest.mark.root
def test_who_is_not_meant_by_what_protects_others_is_ended(tmp_path: Path) -> None:
    protect = "{users: [root], groups: [root], executables: [/usr/bin/python3*]}"
    with FakeNvml(tmp_path, devices=1) as fake, a_child() as child:
        fake.add_process(0, child.pid, 2 * GIB)
        with driven(tmp_path, fake, POLICY.format(protect=protect)) as daemon:
            assert child.wait(60) == -15, daemon.said()


def test_members_are_protected_and_so_is_whoever_may_be_one() -> None:
    protected = Protected(uids=frozenset({1001}), groups=frozenset({"lab", "staff"}))
    groups = {1002: frozenset({"lab"}), 1003: frozenset({"students"})}

    assert protected.uids_of({1002, 1003, 1004}, groups) == {1001, 1002, 1004}
    assert Protected(uids=frozenset({1001})).uids_of({1004}, {}) == {1001}


@pytest.mark.parametrize(
    ("facts", "spared"),
    [
        ({"executable": SLEEP, "executable_owner": 0}, True),
        ({"executable": f"{SLEEP} (deleted)", "executable_owner": 0}, True),
        ({"executable": "/no/such/sleep", "executable_owner": 0}, True),
        ({"executable": "/no/such/sleep", "executable_owner": SOMEBODY}, False),  # a path in a place of their own
        ({"executable": SLEEP, "executable_owner": SOMEBODY}, False),  # a file of their own, mounted there
        ({"executable": "/usr/bin/env", "executable_owner": 0}, False),
    ],
)
def test_a_program_is_known_by_its_path_and_its_owner(facts: dict[str, Any], spared: bool) -> None:
    seen = identity.facts_of(os.getpid())
    assert seen is not None

    assert identity.runs_one_of(replace(seen, **facts), (SLEEP, "/no/such/*")) is spared


def test_a_program_of_somebody_who_put_it_there_themselves_is_known_too(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.touch()
    os.chown(program, somebody() or os.getuid(), -1)
    seen = identity.facts_of(os.getpid())
    assert seen is not None

    facts = replace(seen, executable=str(program), executable_owner=somebody() or os.getuid())
    assert identity.runs_one_of(facts, (str(program),))


@pytest.mark.parametrize("protected", ["user", "program"])
@pytest.mark.parametrize("action", ["checkpoint", "terminate", "kill", "pause", "resume", "renice"])
def test_no_action_reaches_what_is_protected(scene: Scene, action: str, protected: str) -> None:
    uids = frozenset({scene.process.uid} if protected == "user" else ())
    scene.context(protected=uids, protected_executables=("/*",) if protected == "program" else ())
    outcome = scene.act(action)

    assert outcome.word == "refused"
    assert "protected" in {check.text.rpartition(" ")[2] for check in outcome.failed}


def test_names_are_resolved_when_the_file_is_read() -> None:
    accounts = Accounts({"alice": 1001}.__getitem__, {"lab": 30001}.__getitem__)
    text = "version: 1\nprotect: {users: [alice, 1002], groups: [lab], executables: [/opt/*]}\n"
    file = parse(text + "policies: [{name: a, when: {unclaimed: {}}, steps: [log]}]", accounts=accounts)

    assert file.faults == ()
    assert file.protected == Protected(frozenset({1001, 1002}), frozenset({"lab"}), ("/opt/*",))
