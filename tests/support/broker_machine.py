"""A simulated machine of several users, where the daemon gives the locks or each user takes them, for tests as root.

machine = Brokered(place, site, "broker")    "everybody", "broker" with a daemon of root's, "keeper" with its own user
done = machine(ALICE, "run", "--", "true"); with machine.job(BOB, "-n", "2") as (wrapper, devices): ...
machine.kill_daemon(); machine.start_daemon()
with a_machine(site, "broker") as machine: ...      site: a fixture, or users.a_site()
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import ask
from nodes import eventually, remove, start
from proc import born_with
from users import SharedMachine, identity, interpreter

from gpuguard.cli import setup
from gpuguard.errors import GpuguardError
from gpuguard.model import HEALTH

KEEPER = pwd.getpwnam("games")  # as whom the daemon runs where it has a user of its own
KINDS = ("everybody", "broker", "keeper")
FOR_BOTH_BROKERS = pytest.mark.parametrize("broker", ["broker", "keeper"], indirect=True)
# Connects as the client does, and shows what comes back.
CALL = """
import json, os, sys, time
from gpuguard.claims.daemon_client import exchange
from gpuguard.claims.directory import lock_directory
directory = lock_directory(os.environ["GPUGUARD_DIR"])
"""

CLAIM = """
answer, descriptors = exchange(directory, {"do": "claim", "conditions": {}, **json.loads(sys.argv[1])})
print(json.dumps(answer | {"descriptors": len(descriptors)}))
"""


@contextlib.contextmanager
def a_machine(site: Path, kind: str, *node: str) -> Iterator[Brokered]:
    """A machine with its daemon, if it has one; nothing of it is left.  *node* is as for nodes.start."""
    place = Path(tempfile.mkdtemp(prefix="gpuguard-broker-"))
    place.chmod(0o755)
    made = Brokered(place, site, kind, *node)
    try:
        made.begin()
        yield made
    finally:
        made.close()
        # A worker that has just been started makes the directory of its node anew.
        assert eventually(lambda: not born_with(f"GPUGUARD_DIR={place}/claims")), f"something runs on in {place}"
        remove(place)


class Brokered(SharedMachine):
    """Claims in *place*/claims of a node of 4 devices."""

    preamble = CALL

    def __init__(self, place: Path, site: Path, kind: str, *simulated: str) -> None:
        self.place, self.kind, self.python_path = place, kind, interpreter()
        node = place / "node"
        devices = start(str(node), *simulated).sample({HEALTH}).devices
        self.uuids = [device.uuid for device in devices]
        node.chmod(0o777)
        for file in node.iterdir():
            file.chmod(0o666)
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{place}/home",
            "PYTHONPATH": str(site),
        }
        self.environment |= {"GPUGUARD_BACKEND": f"simulated:{node}", "GPUGUARD_DIR": f"{place}/claims"}
        self.daemon: subprocess.Popen[Any] | None = None

    def begin(self) -> None:
        """Set it up, and start its daemon if it needs one."""
        # What `gpuguard setup` does, without a process of its own: test_setup_command shows the command.
        path, user = self.environment["GPUGUARD_DIR"], KEEPER.pw_name if self.kind == "keeper" else "root"
        setup.make_directory(path, self.uuids)
        if self.kind == "everybody":
            return
        if self.kind == "keeper":
            setup.make_daemon_directory(path, user)
        setup.change_broker(path, user, brokered=True)
        self.start_daemon()

    def setup(self, *options: str) -> subprocess.CompletedProcess[str]:
        user = ["--daemon-user", KEEPER.pw_name] if self.kind == "keeper" else []
        done = self(None, "setup", "--dir", self.environment["GPUGUARD_DIR"], *user, *options)
        assert done.returncode == 0, done.stderr
        return done

    def start_daemon(self, *options: str, ready: bool = True) -> None:
        user = KEEPER if self.kind == "keeper" else None
        words = [self.python_path, "-m", "gpuguard", "daemon", "--interval", "300ms", *options]
        log = {"GPUGUARD_EVENTS": str(self.place / "daemon" / "events.jsonl")}
        os.makedirs(self.place / "daemon", exist_ok=True)
        (self.place / "daemon").chmod(0o777)
        environment = {name: value for name, value in self.environment.items() if name != "PYTHONPATH"} | log
        # A daemon of root's takes no PYTHONPATH; the working directory has the package as well.
        with (self.place / "said").open("a") as said:
            self.daemon = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stderr=said,
                start_new_session=True, **identity(user), cwd=self.environment["PYTHONPATH"],
            )  # fmt: skip
        socket = Path(self.directory.path, "daemon" if self.kind == "keeper" else "", "daemon.sock")
        assert eventually(lambda: socket.exists() and (not ready or self._answers())), self.said()

    def said(self) -> str:
        """What the daemon has said on its standard error."""
        return (self.place / "said").read_text()

    def _answers(self) -> bool:
        try:
            return "held" in ask(self.directory, {"do": "claims"})
        except GpuguardError:
            return False

    def claims(self, user: pwd.struct_passwd | None, *options: str) -> list[dict[str, Any]]:
        """The claims that `who --json` shows a user."""
        shown = json.loads(self(user, "who", "--json", *options).stdout)
        return [claim for device in shown["devices"] for claim in device["claims"]]

    def asks(self, user: pwd.struct_passwd, *devices: str, **message: Any) -> dict[str, Any]:
        """The reply to a program of *user* that asks for these devices, and how many descriptors came with it."""
        reply: dict[str, Any] = json.loads(self.python(user, CLAIM, json.dumps({"devices": devices, **message})))
        return reply

    def has_ticket(self) -> bool:
        """Whether a request waits in the queue."""
        return any(name.startswith("ticket.") for name in os.listdir(self.directory.records))

    @contextlib.contextmanager
    def waits(self, user: pwd.struct_passwd | None, *options: str) -> Iterator[None]:
        """A request of *user* waits in the queue meanwhile."""
        with self.start(user, "run", "--wait", "60s", *options, "--", "true") as waiting:
            try:
                assert eventually(self.has_ticket)
                yield
            finally:
                waiting.kill()

    @contextlib.contextmanager
    def running(self, user: pwd.struct_passwd | None, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A program that has printed its first line."""
        with self.program(user, code, *words) as program:
            assert program.stdout and program.stdout.readline()
            yield program

    def kill_daemon(self, signum: int = signal.SIGKILL) -> None:
        assert self.daemon
        self.daemon.send_signal(signum)
        self.daemon.wait()
        self.daemon = None

    def close(self) -> None:
        if self.daemon:
            self.kill_daemon()

    def start(self, user: pwd.struct_passwd | None, *words: str) -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen(self.words(*words), text=True, **pipes, **self._as(user))
