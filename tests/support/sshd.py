"""A fleet of simulated hosts behind one real sshd on loopback, with keys and configuration of its own.

with a_fleet(tmp_path, 45) as fleet: gpuguard("who", "--ssh", fleet.ssh, "--hosts", ",".join(fleet.hosts))

Each host is an alias in a configuration of the client, with a simulated node of its own.  They are entered with a key
whose only command is `gpuguard serve-ssh`; the alias ``shell`` has a key without one.  Where sshd is missing the test
is skipped.
"""

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from nodes import eventually, start
from proc import free_port

from gpuguard.claims.directory import lock_directory

# Says nothing and ends when nobody listens any more: what a hanging file system does to a login.
HANGS = """
import select
poll = select.poll()
poll.register(1, 0)
poll.poll()
"""
DEAD = ("refused", "mute", "hanging", "nowhere", "stranger")
_FORCED = ("serve", "hang")  # keys with a forced command


@dataclass(frozen=True)
class Fleet:
    """Where it is and what it is called."""

    place: Path
    hosts: tuple[str, ...]
    config: Path

    @property
    def ssh(self) -> str:
        """The value of --ssh."""
        return f"{program('ssh')} -F {self.config}"

    def node(self, host: str) -> str:
        """The directory of its simulated node."""
        return str(self.place / "nodes" / host)


def program(name: str) -> str:
    """Where *name* is; without it the test is skipped."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not found:
        pytest.skip(f"other hosts over ssh (no {name}: apt-get install openssh-server openssh-client)")
    return found


@contextmanager
def a_fleet(place: Path, count: int) -> Iterator[Fleet]:
    """*count* hosts named sim00, sim01 ... that answer, and those of DEAD and ``shell``."""
    hosts = tuple(f"sim{number:02d}" for number in range(count))
    fleet = Fleet(place, hosts, place / "ssh_config")
    for number, host in enumerate((*hosts, "shell")):
        start(fleet.node(host), f"{number % 8 + 1}xH100-80GB")
    for key in ("host", "shell", "stranger", *_FORCED):
        subprocess.run(
            [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-C", key, "-f", place / key], check=True
        )
    (place / "hangs.py").write_text(HANGS)
    _authorize(place)
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(_privilege_separation())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=128))  # takes, and never speaks
        _configure(fleet, port, listener.getsockname()[1])
        stack.enter_context(_sshd(place, port))
        _try(fleet)
        yield fleet


def _try(fleet: Fleet) -> None:
    """One login: where the account of this user is locked (as root's is on Ubuntu), no key opens it."""
    words = [*fleet.ssh.split(), "shell", "true"]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    log = (fleet.place / "sshd.log").read_text()
    if "account is locked" in log:
        pytest.skip(f"other hosts over ssh (a locked account: usermod -p '*' {getpass.getuser()})")
    assert done.returncode == 0, done.stderr + log


def _authorize(place: Path) -> None:
    python = sys.executable
    commands = {"serve": f"{python} -m gpuguard serve-ssh", "hang": f"{python} {place}/hangs.py"}
    lines = [f'restrict,command="{commands[key]}" {(place / f"{key}.pub").read_text()}' for key in _FORCED]
    (place / "authorized_keys").write_text("".join(lines) + (place / "shell.pub").read_text())


def _configure(fleet: Fleet, port: int, mute: int) -> None:
    place = fleet.place
    usual = {"Port": port, "HostName": "127.0.0.1", "IdentityFile": place / "serve"}
    blocks = {host: {**usual, "SetEnv": _environment(fleet, host)} for host in fleet.hosts}
    blocks |= {
        "shell": {**usual, "IdentityFile": place / "shell", "SetEnv": _environment(fleet, "shell")},
        "refused": {**usual, "Port": free_port()},
        "mute": {**usual, "Port": mute},
        "hanging": {**usual, "IdentityFile": place / "hang"},
        "nowhere": {**usual, "HostName": "nowhere.invalid"},
        "stranger": {**usual, "IdentityFile": place / "stranger"},
    }
    everywhere = {
        "User": getpass.getuser(), "IdentitiesOnly": "yes", "IdentityAgent": "none", "HostKeyAlias": "fleet",
        "UserKnownHostsFile": place / "known_hosts", "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
    }  # fmt: skip
    blocks["*"] = everywhere
    lines = [f"Host {host}\n" + "".join(f"  {name} {value}\n" for name, value in block.items())
             for host, block in blocks.items()]  # fmt: skip
    fleet.config.write_text("".join(lines))
    (place / "known_hosts").write_text(f"fleet {(place / 'host.pub').read_text()}")


def _environment(fleet: Fleet, host: str) -> str:
    claims = lock_directory(f"{fleet.place}/claims-{host}").path
    return f"GPUGUARD_BACKEND=simulated:{fleet.node(host)} GPUGUARD_DIR={claims}"


@contextmanager
def _privilege_separation() -> Iterator[None]:
    """Where sshd is started by root it wants this directory, which the package makes at boot."""
    directory = Path("/run/sshd")
    if os.geteuid() != 0 or directory.exists():
        yield
        return
    directory.mkdir(mode=0o755)
    try:
        yield
    finally:
        directory.rmdir()


@contextmanager
def _sshd(place: Path, port: int) -> Iterator[None]:
    config = place / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host\nAuthorizedKeysFile {place}/authorized_keys\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
        "AcceptEnv GPUGUARD_*\nMaxStartups 500\nLogLevel INFO\nPermitRootLogin prohibit-password\nUseDNS no\n"
        "PrintMotd no\nPrintLastLog no\n"
    )
    log = place / "sshd.log"
    with log.open("w") as said, subprocess.Popen([program("sshd"), "-D", "-e", "-f", config], stderr=said) as process:
        try:
            assert eventually(lambda: process.poll() is not None or _answers(port), 60), log.read_text()
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
