"""Two unprivileged users on one machine with the fake driver, for tests that run as root.

with a_shared_machine(site, kind) as machine: ...   kind: "admin", a directory made by `gpuguard setup`, or "sticky",
                                                    flat files; site: a fixture, or a_site()
done = machine(ALICE, "select", "-n", "2")  gpuguard as that user;  with machine.job(ALICE, "-n", "2") as devices: ...
machine.python(BOB, code, *words)           a program of theirs
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from nodes import SECONDS, remove

from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import locked_devices
from gpuguard.cli import setup

# Users with a name that every Linux has and nobody uses.
ALICE, BOB = (pwd.getpwnam(name) for name in ("daemon", "bin"))
DEVICES = 8

# The command line with other places for the claims: all that differs from a machine where nobody ran `gpuguard setup`.
STICKY = """
import sys
from gpuguard.claims import directory as lockfiles
lockfiles.ADMIN_DIRECTORY, lockfiles.FALLBACK_DIRECTORIES = sys.argv[1], (sys.argv[2],)
from gpuguard.cli import main
sys.exit(main(sys.argv[3:]))
"""
# A program that keeps the lock of a file.
HOG = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(100)
"""
IN_BOTH_DIRECTORIES = pytest.mark.parametrize("machine", ["admin", "sticky"], indirect=True)
HOLD = ("sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 100')


def install(site: Path) -> None:
    """gpuguard and what it imports, readable for everybody: the checkout may lie in a home directory."""
    for name in ("gpuguard", "pynvml", "psutil", "filelock"):
        spec = importlib.util.find_spec(name)
        assert spec and spec.origin
        if spec.submodule_search_locations:
            shutil.copytree(
                Path(spec.origin).parent, site / name, ignore=shutil.ignore_patterns("__pycache__", "tests")
            )
        else:
            shutil.copy(spec.origin, site)
    subprocess.run([interpreter(), "-m", "compileall", "-q", str(site)], check=True)
    subprocess.run(["chmod", "-R", "a+rX", str(site)], check=True)


@functools.cache
def interpreter() -> str:
    """A Python that unprivileged users can run: this one may lie in root's home directory."""
    who: dict[str, Any] = {"user": BOB.pw_uid, "group": BOB.pw_gid, "cwd": "/", "stderr": subprocess.DEVNULL}
    recent = "import sys; sys.exit(sys.version_info < (3, 10))"
    if os.geteuid():  # which starts no process of another user
        return sys.executable
    for path in (sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", recent], **who, check=False).returncode == 0:
                return path
    pytest.fail(f"{BOB.pw_name} can run no Python >= 3.10 here: install one outside of root's home directory.")


@contextlib.contextmanager
def a_site() -> Iterator[Path]:
    """gpuguard where every user can read it."""
    with an_open_place("gpuguard-site-") as place:
        install(place)
        yield place


@contextlib.contextmanager
def a_shared_machine(site: Path, kind: str, devices: int = DEVICES) -> Iterator[Machine]:
    """A machine with so many devices; nothing of it is left."""
    with an_open_place("gpuguard-users-") as place, FakeNvml(place, devices) as fake:
        yield Machine(place, site, fake, kind)


@contextlib.contextmanager
def an_open_place(prefix: str = "gpuguard-test-") -> Iterator[Path]:
    """A directory that every user can reach: pytest's own tmp_path lets nobody else in."""
    place = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        place.chmod(0o755)
        yield place
    finally:
        remove(place)


def identity(user: pwd.struct_passwd | None) -> dict[str, Any]:
    """How a process of *user* is started by root."""
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}


class SharedMachine:
    """What users, and root (None), do on a machine that is simulated or has a fake driver."""

    place: Path
    kind: str
    python_path: str
    environment: dict[str, str]
    uuids: list[str]
    preamble = ""  # of every Python program

    @property
    def directory(self) -> LockDirectory:
        return lock_directory(self.environment["GPUGUARD_DIR"])

    def words(self, *words: str) -> list[str]:
        """The command line."""
        return [self.python_path, "-m", "gpuguard", *words]

    def __call__(
        self, user: pwd.struct_passwd | None, *words: str, timeout: float = SECONDS, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run gpuguard as *user* (None: root) to its end."""
        done = subprocess.run(
            self.words(*words), capture_output=True, text=True, timeout=timeout, **self._as(user, **options)
        )
        assert "Traceback" not in done.stderr and "inside gpuguard" not in done.stderr, done.stderr
        return done

    @contextlib.contextmanager
    def job(
        self, user: pwd.struct_passwd | None, *options: str, command: tuple[str, ...] = HOLD, **more: Any
    ) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A job of *user*, as (the process of `gpuguard run`, its first line: the devices); killed at the end."""
        words = self.words("run", "--no-wait", *options, "--", *command)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        wrapper = subprocess.Popen(words, text=True, **pipes, **self._as(user, **more))
        assert wrapper.stdout and wrapper.stderr
        try:
            line = wrapper.stdout.readline().strip()
            assert line, wrapper.stderr.read()
            yield wrapper, line
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(wrapper.pid, 9)
            wrapper.communicate()

    def python(self, user: pwd.struct_passwd, code: str, *words: str) -> str:
        """What a Python program of *user* prints."""
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [self.python_path, "-c", self.preamble + code, *words],
            capture_output=True, text=True, timeout=SECONDS, **self._as(user),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def program(self, user: pwd.struct_passwd | None, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A Python program of *user*, spoken to through its standard input and output; killed at the end."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        words = (self.python_path, "-c", self.preamble + code, *words)
        with subprocess.Popen(words, text=True, **self._as(user) | pipes) as process:
            try:
                yield process
            finally:
                process.kill()

    def locked(self) -> list[int]:
        """The indices of the devices that are locked, as root sees it."""
        locked = locked_devices(self.directory, self.uuids)
        return [index for index, uuid in enumerate(self.uuids) if uuid in locked]

    def _as(self, user: pwd.struct_passwd | None, **options: Any) -> dict[str, Any]:
        own = {} if user else {"GPUGUARD_EVENTS": str(self.place / "events.jsonl")}  # root's would be the machine's
        environment = {**self.environment, **own, **options.pop("environment", {})}
        return {"env": environment, "cwd": "/", "stdin": subprocess.DEVNULL, **identity(user), **options}


class Machine(SharedMachine):
    """Claims in *place* of the devices of *fake*."""

    def __init__(self, place: Path, site: Path, fake: FakeNvml, kind: str) -> None:
        self.place, self.fake, self.kind, self.python_path = place, fake, kind, interpreter()
        (place / "lib").mkdir()
        shutil.copy(fake.library, place / "lib")
        os.chmod(fake.path, 0o666)  # the library counts its calls in there
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{place}/home",  # there is none, and what root might leave in it would go with the place
            "PYTHONPATH": str(site),
            "LD_LIBRARY_PATH": str(place / "lib"),
            "FAKE_NVML_STATE": fake.path,
        }
        self.uuids = [device.uuid for device in fake.devices[:DEVICES]]
        self.claims = place / "claims"
        if kind == "admin":
            self.environment["GPUGUARD_DIR"] = str(self.claims)
            setup.make_directory(str(self.claims), self.uuids)  # as `gpuguard setup` does
        else:
            self.claims.mkdir()
            self.claims.chmod(0o1777)

    @property
    def directory(self) -> LockDirectory:
        if self.kind == "admin":
            return super().directory
        return LockDirectory(str(self.claims), str(self.claims), str(self.claims), prefix="gpuguard.")

    def words(self, *words: str) -> list[str]:
        """The command line."""
        if self.kind == "admin":
            return super().words(*words)
        return [self.python_path, "-c", STICKY, str(self.place / "absent"), str(self.claims), *words]

    def start(self, user: pwd.struct_passwd, *words: str) -> subprocess.Popen[Any]:
        """Start gpuguard as *user*; nobody reads what it says."""
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process: subprocess.Popen[Any] = subprocess.Popen(self.words(*words), **quiet, **self._as(user))
        return process

    @contextlib.contextmanager
    def program(self, user: pwd.struct_passwd | None, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A Python program of *user* that runs on after its first line; killed at the end."""
        with super().program(user, code, *words) as process:
            assert process.stdout and process.stdout.readline()
            yield process

    def lock_path(self, index: int) -> Path:
        """The lock file of a device."""
        return Path(self.directory.lock_path(self.uuids[index]))

    def records(self) -> list[Path]:
        """The files of the claim records."""
        return sorted(Path(self.directory.records).glob("*claim.*.json"))
