"""Real daemons on a simulated node, for tests; and a process of a user who is not the system's.

with a_daemon(tmp_path, POLICY, "--interval", "200ms") as daemon: daemon.until("terminate"); daemon.events()
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nodes import Gpuguard, eventually, start

from gpuguard.claims.daemon_client import exchange
from gpuguard.claims.directory import LockDirectory
from gpuguard.files import close_all

SOMEBODY, ANOTHER = 20001, 20002
PASSWD = "".join(
    f"{name}:x:{uid}:{uid}::/nonexistent:/bin/false\n" for name, uid in (("somebody", SOMEBODY), ("another", ANOTHER))
)
# A process that registers as root and then becomes somebody: its node lies where only root may write.
USE_AS_SOMEBODY = """
import fcntl, os, sys, time
from gpuguard.backends import simulated
simulated.use(sys.argv[2], int(sys.argv[3]), 50.0, spec=sys.argv[1])
held = sys.argv[5] and os.open(sys.argv[5], os.O_RDONLY | os.O_CREAT, 0o444)
held and fcntl.flock(held, fcntl.LOCK_EX)
os.setgroups([]); os.setresgid(*[int(sys.argv[4])] * 3); os.setresuid(*[int(sys.argv[4])] * 3)
print("ready", flush=True)
time.sleep(600)
"""


def with_names(passwd: Path, names: str = PASSWD) -> list[str]:
    """How a command starts where these users have names: who has none is nobody, and is never signalled."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("users with names of their own (no mount namespace, or a chroot)")
    passwd.write_text(Path("/etc/passwd").read_text() + names)
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$1" /etc/passwd && shift && exec "$@"', "sh", str(passwd)]


def kill(daemon: subprocess.Popen[Any]) -> None:
    """Where scripts/planted-faults measures what a daemon reaches, it gets a moment to write that down."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        daemon.terminate()
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
    daemon.kill()
    daemon.wait()


class DaemonUnderTest:
    """A daemon, its files, and what it wrote."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.gpuguard = Gpuguard(place, None)
        self.node = str(place / "node")
        self.policy = place / "policy.yaml"
        self.log = place / "events.jsonl"
        self.process: subprocess.Popen[str] | None = None
        start(self.node)

    def start(self, *options: str, named: bool = False, under: Sequence[str] = (), **more: Any) -> None:
        """Start it; *named*: where uid 20001 has a name; *under*: by this command."""
        policy = ["--policy", str(self.policy)] if self.policy.exists() else []
        words = [*under, *self.gpuguard.words("daemon", *policy, *options)]
        if named:
            words = [*with_names(self.place / "passwd"), *words]
        environment = {**self.gpuguard.environment, **more.pop("environment", {})}
        with (self.place / "said").open("a") as said:
            self.process = subprocess.Popen(
                words, env=environment, stderr=said, stdin=subprocess.DEVNULL, text=True, start_new_session=True, **more
            )

    def said(self) -> str:
        """Everything on its standard error so far."""
        return (self.place / "said").read_text()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events so far."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last one may just be being written
        return [event for event in map(json.loads, lines) if kind in (None, event["kind"])]

    def until(self, kind: str, number: int = 1, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait for so many events of a kind."""
        assert eventually(lambda: len(self.events(kind)) >= number, seconds), self.said()
        return self.events(kind)

    def outcome(self, kind: str, outcome: str) -> dict[str, Any]:
        """The first event of a kind with this outcome, as soon as there is one.

        An event before it may say "refused": on a busy machine a sample may be too old when its line is written.
        """

        def ended() -> list[dict[str, Any]]:
            return [event for event in self.events(kind) if event["outcome"] == outcome]

        assert eventually(lambda: bool(ended())), self.said()
        return ended()[0]

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait for its end: its exit status."""
        assert self.process
        self.process.send_signal(signum)
        return self.process.wait(60)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """From when it has begun; killed at the end."""
        try:
            self.until("daemon")
            assert eventually(self._opened_its_socket), self.said()  # just behind that line
            yield
        finally:
            if self.process:
                kill(self.process)

    def _opened_its_socket(self) -> bool:
        return any((self.place / "claims").rglob("*daemon.sock")) or "the socket cannot be made" in self.said()

    def devices(self) -> list[dict[str, Any]]:
        """Those of the latest state.json."""
        return list(self.state()["snapshot"]["devices"])

    def uuid(self, index: int) -> str:
        """Of a device of the node."""
        return str(self.devices()[index]["uuid"])

    def state(self) -> dict[str, Any]:
        """state.json, as soon as it is there."""
        own, shared = self.place / "claims" / "daemon" / "state.json", self.place / "claims" / "state.json"
        assert eventually(lambda: own.exists() or shared.exists()), self.said()
        path = own if own.exists() else shared
        content: dict[str, Any] = json.loads(path.read_text())
        return content


@contextmanager
def a_daemon(
    place: Path, policy: str | None = None, *options: str, before: str = "", **more: Any
) -> Iterator[DaemonUnderTest]:
    """A daemon that has begun; *before*: Python that runs first."""
    daemon = DaemonUnderTest(place)
    if before:
        daemon.gpuguard.program = [
            "-c",
            f"{before}\nimport sys; from gpuguard.cli import main; sys.exit(main(sys.argv[1:]))",
        ]
    if policy is not None:
        daemon.policy.write_text(policy)
    daemon.start("--interval", "200ms", *options, **more)
    with daemon.begun():
        yield daemon


@contextmanager
def somebodys(
    node: str, devices: str, memory: int, lock: str = "", *, uid: int = SOMEBODY
) -> Iterator[subprocess.Popen[str]]:
    """A process of *uid* on the node, which holds *lock*."""
    words = [sys.executable, "-c", USE_AS_SOMEBODY, node, devices, str(memory), str(uid), lock]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(words, text=True, env=dict(os.environ), **pipes) as child:
        assert child.stdout
        try:
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def ask(directory: LockDirectory, request: dict[str, Any], seconds: float = 60.0) -> dict[str, Any]:
    """What the daemon of *directory* replies, without what it would hand over."""
    content, descriptors = exchange(directory, request, seconds)
    close_all(descriptors)
    return content
