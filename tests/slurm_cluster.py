"""A Slurm cluster of one node on loopback with gpuguard on it: real munged, slurmctld and slurmd, fake devices.

with a_cluster() as cluster:
    job = cluster.submit(ALICE, "--gres=gpu:2", script="...");  cluster.wait_for(lambda: cluster.states()[job] == "...")
    cluster.machine(BOB, "run", ...)         gpuguard by hand, see users;  cluster.claims()  what is claimed now
    cluster.power_off()                      the node ends as in a power cut

Everything lies in a directory of its own and ends with the block.  Only processes that this has started are ended, and
those of the node are found by what they have inherited from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from users import Machine, install

from gpuguard.claims.records import read_records

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
HINT = "apt-get install -y --no-install-recommends slurm-wlm munge"
SECONDS = 120.0  # far beyond all that is waited for here
MARK = "GPUGUARD_TEST_CLUSTER"
# Seconds that a credential is good for, by default 120.  So long Slurm leaves a job alone that was put back: before
# that slurmd takes its new start for the one that was revoked, and may run no prolog.
PATIENCE = 6

CONF = """
ClusterName=gpuguard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.socket,cred_expire={patience}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
SlurmdDebug=verbose
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=nohold_on_prolog_fail,sched_interval=1,sched_min_interval=50000,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=300
InactiveLimit=0
KillWait=1
Waittime=0
CompleteWait=0
PrologFlags=Alloc,Contain
Prolog={place}/gpuguard-prolog
Epilog={place}/gpuguard-epilog
TaskProlog={place}/gpuguard-task-prolog
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainDevices=yes\n"
PROLOG = "slurm prolog --wait 0s"


def needed() -> None:
    """Skip the test where there is no Slurm, and say how to have it."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        pytest.skip(f"needs Slurm ({', '.join(absent)} missing): {HINT}")


@contextlib.contextmanager
def a_cluster(*, gpus: int = 4, prolog: str = PROLOG, constrained: bool = False) -> Iterator[Cluster]:
    """A cluster whose node has *gpus* devices.

    *prolog* are the words of gpuguard that its prolog runs, "" for none; *constrained*: by cgroups (version 1), so that
    a job can open its own devices only.
    """
    needed()
    place = Path(tempfile.mkdtemp(prefix="gg-slurm-", dir="/tmp"))  # short: a socket lies in it
    try:
        place.chmod(0o755)
        (place / "site").mkdir()
        install(place / "site")
        with FakeNvml(place, devices=gpus) as fake:
            machine = Machine(place, place / "site", fake, "admin")
            with Cluster(place, machine, gpus, prolog, constrained) as cluster:
                yield cluster
    finally:
        shutil.rmtree(place)


class Cluster:
    """One controller and one node."""

    def __init__(self, place: Path, machine: Machine, gpus: int, prolog: str, constrained: bool) -> None:
        self.place, self.machine, self.gpus, self.constrained = place, machine, gpus, constrained
        self.host = socket.gethostname().partition(".")[0]
        for name in ("state", "spool", "dev", "out"):
            (place / name).mkdir()
        (place / "out").chmod(0o1777)
        for number in range(gpus):
            # Of no driver: /dev/null, or where what is not given is forbidden, numbers that may have a driver.
            device = os.makedev(195, number) if constrained else os.makedev(1, 3)
            os.mknod(place / "dev" / f"nvidia{number}", 0o666 | stat.S_IFCHR, device)
        (place / "gres.conf").write_text(f"Name=gpu File={place}/dev/nvidia[0-{gpus - 1}]\n")
        ports = dict(zip(("controller", "node"), free_ports(2), strict=True))
        text = CONF.format(host=self.host, place=place, gpus=gpus, patience=PATIENCE, **ports)
        if constrained:
            text = text.replace("proctrack/linuxproc", "proctrack/cgroup").replace("task/none", "task/cgroup")
            (place / "cgroup.conf").write_text(CGROUPS)
        (place / "slurm.conf").write_text(text)
        key = place / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self.events, self.tasks_events = place / "roots-events.jsonl", place / "out" / "events.jsonl"
        self.tasks_events.touch()
        self.tasks_events.chmod(0o666)
        self._script("prolog", prolog)
        self._script("epilog", "slurm epilog" if prolog else "")
        self._script("task-prolog", "slurm task-prolog" if prolog else "")
        self.environment = {"PATH": PATH, "SLURM_CONF": str(place / "slurm.conf"), "LC_ALL": "C.UTF-8"}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def _script(self, name: str, words: str) -> None:
        lines = ["#!/bin/sh", f"export PATH={PATH}"]
        if words:
            own = {**self.machine.environment, "PATH": PATH}
            own["GPUGUARD_EVENTS"] = str(self.events if name != "task-prolog" else self.tasks_events)
            lines += [f"export {key}={shlex.quote(value)}" for key, value in own.items()]
            lines.append(f"exec {shlex.join(self.machine.words(*shlex.split(words)))} 2>> {self.place}/out/{name}.log")
        path = self.place / f"gpuguard-{name}"
        path.write_text("\n".join([*lines, "exit 0", ""]))
        path.chmod(0o755)
        log = self.place / "out" / f"{name}.log"
        log.touch()
        log.chmod(0o666)

    def __enter__(self) -> Cluster:
        try:
            files = [f"--{each}-file={self.place}/munge.{each}" for each in ("key", "pid", "log", "seed")]
            self.start("munged", "-F", *files, f"--socket={self.place}/munge.socket", "--num-threads=4", "--force")
            self.wait_for((self.place / "munge.socket").exists)
            self.start("slurmctld", "-D", "-i")
            self.start_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.power_off()
        self.stop("slurmctld", signal.SIGKILL)  # it would wait for the node
        self.stop("munged")
        for kind in ("devices", "freezer") if self.constrained else ():
            for found in os.walk(f"/sys/fs/cgroup/{kind}/slurm_{self.host}", topdown=False):
                self.wait_for(functools.partial(removed, found[0]))

    def start(self, name: str, *words: str) -> None:
        """Start one of Slurm's daemons."""
        with open(self.place / f"{name}.out", "ab") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            own = {**self.environment, **({MARK: str(self.place)} if name == "slurmd" else {})}
            path = shutil.which(name, path=PATH)
            assert path
            self.daemons[name] = subprocess.Popen(
                [path, *words], env=own, cwd=self.place, start_new_session=True, **pipes
            )

    def start_node(self) -> None:
        """Switch the node on, and wait until Slurm has it."""
        self.start("slurmd", "-D", "-N", self.host)
        self.wait_for(lambda: self.slurm("sinfo", "-h", "-o", "%T").strip() in ("idle", "mixed", "allocated"))

    def stop(self, name: str, signum: int = signal.SIGTERM) -> None:
        """End one of the daemons."""
        process = self.daemons.pop(name, None)
        if process:
            process.send_signal(signum)
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def power_off(self) -> None:
        """End all processes of the node at once, and slurmd first: nobody is asked, nothing is cleaned up."""
        self.stop("slurmd", signal.SIGKILL)
        self.wait_for(lambda: not self.kill_node())

    def kill_node(self, *names: str) -> list[int]:
        """SIGKILL to what slurmd has started (to programs of these names alone), by pidfd; their pids."""
        found = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                if self.is_of_node(pid) and (not names or self.title(pid).startswith(names)):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    found.append(pid)
                os.close(pidfd)
        return found

    def is_of_node(self, pid: int) -> bool:
        """Whether slurmd has started it, or its steps, jobs or prologs have."""
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
            program = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix("-wlm")  # Debian's
            if state in b"ZX" or program in ("slurmctld", "munged"):
                return False
            if program == "slurmstepd":  # its title lies over its environment
                opened = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
                return any(each.startswith(f"{self.place}/") for each in opened)
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return f"SLURM_CONF={self.place}/slurm.conf".encode() in variables and any(
                each.startswith((b"SLURMD_NODENAME=", b"SLURM_SCRIPT_CONTEXT=", MARK.encode())) for each in variables
            )
        except OSError:
            return False

    def title(self, pid: int) -> str:
        """The command line of a process."""
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")

    def slurm(self, *words: str, user: pwd.struct_passwd | None = None) -> str:
        """What one of Slurm's commands prints."""
        done = self.try_slurm(*words, user=user)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def try_slurm(self, *words: str, user: pwd.struct_passwd | None = None) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, or one that calls it, as a user runs it on this machine."""
        identity: dict[str, Any] = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        own = {**self.environment, **self.machine.environment, "PATH": PATH}
        place: dict[str, Any] = {"cwd": self.place / "out", "stdin": subprocess.DEVNULL}
        return subprocess.run(words, env=own, capture_output=True, text=True, timeout=SECONDS, **place, **identity)

    def submit(self, user: pwd.struct_passwd, *options: str, script: str) -> str:
        """The number of a batch job."""
        words = ("sbatch", "--parsable", "-o", f"{self.place}/out/%j.txt", *options, "--wrap", script)
        return self.slurm(*words, user=user).strip()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Number -> (state, reason) of all that Slurm remembers."""
        rows = [
            line.split("|") for line in self.slurm("squeue", "-h", "-a", "-t", "all", "-o", "%i|%T|%r").splitlines()
        ]
        return {number: (state, reason) for number, state, reason in rows}

    def output(self, job: str) -> str:
        """What a job has printed."""
        path = self.place / "out" / f"{job}.txt"
        return path.read_text() if path.exists() else ""

    def claims(self) -> dict[str, str]:
        """Id -> user of the living claims."""
        return {record.id: record.user for record in read_records(self.machine.directory)}

    def wait_for(self, holds: Callable[[], object], seconds: float = SECONDS) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.tell()
            time.sleep(0.05)

    def tell(self) -> str:
        """The last lines of the logs, for a test that fails."""
        logs = [*self.place.glob("*.log"), *(self.place / "out").glob("*.log")]
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]) for log in logs
        )


def removed(path: str) -> bool:
    """Whether a cgroup is gone, now or before; False while a process is about to leave it."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.exists(path)


def free_ports(number: int) -> list[int]:
    """TCP ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
