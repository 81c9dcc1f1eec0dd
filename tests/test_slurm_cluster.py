"""Slurm itself, with gpuguard on its node: no device is given to two jobs, and each refusal has a reason."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_nvml import FakeNvml
from guard_scene import Scene
from proc import free_port
from users import ALICE, BOB, Machine, install

from gpuguard.claims.records import read_records
from gpuguard.clusters import slurm_jobs, slurm_node
from gpuguard.enforcement import identity

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


@contextlib.contextmanager
def a_cluster(*, gpus: int = 4, prolog: str = PROLOG, constrained: bool = False) -> Iterator[Cluster]:
    """A cluster whose node has *gpus* devices.

    *prolog* are the words of gpuguard that its prolog runs, "" for none; *constrained*: by cgroups (version 1), so that
    a job can open its own devices only.
    """
    if absent := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        pytest.skip(f"jobs of a real Slurm (no {', '.join(absent)}: {HINT})")
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
        ports = {"controller": free_port(), "node": free_port()}
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
        for name in ("prolog", "epilog", "task-prolog"):
            self._script(name, prolog and (prolog if name == "prolog" else f"slurm {name}"))
        self.environment = {"PATH": PATH, "SLURM_CONF": str(place / "slurm.conf"), "LC_ALL": "C.UTF-8"}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.run = " ".join(machine.words("run", "--quiet", "--no-wait"))  # the beginning of a command in a script

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
            files = [f"--{kind}-file={self.place}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
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
            for cgroup, _folders, _files in os.walk(f"/sys/fs/cgroup/{kind}/slurm_{self.host}", topdown=False):
                self.wait_for(functools.partial(removed, cgroup))

    def start(self, name: str, *words: str) -> None:
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
        process = self.daemons.pop(name, None)
        if process:
            process.send_signal(signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
            process.kill()
            process.wait()

    def power_off(self) -> None:
        """End all processes of the node at once, and slurmd first: nothing is cleaned up."""
        self.stop("slurmd", signal.SIGKILL)
        self.wait_for(lambda: not self.kill_node())

    def kill_node(self, *names: str) -> list[int]:
        """SIGKILL to what slurmd has started (to programs of these names alone), by pidfd; their pids."""
        killed = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if self.is_of_node(pid) and (not names or title.startswith(names)):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    killed.append(pid)
                os.close(pidfd)
        return killed

    def is_of_node(self, pid: int) -> bool:
        """Whether slurmd has started it, or its steps, jobs or prologs have."""
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1]
            program = os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix("-wlm")  # Debian's
            if state in b"ZX" or program in ("slurmctld", "munged"):
                return False
            if program == "slurmstepd":  # its title lies over its environment
                opened = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
                return any(path.startswith(f"{self.place}/") for path in opened)
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            starts = b"SLURMD_NODENAME=", b"SLURM_SCRIPT_CONTEXT=", MARK.encode()
            is_ours = f"SLURM_CONF={self.place}/slurm.conf".encode() in variables
            return is_ours and any(variable.startswith(starts) for variable in variables)
        except OSError:
            return False

    def slurm(self, *words: str, user: pwd.struct_passwd | None = None) -> str:
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
        words = ("sbatch", "--parsable", "-o", f"{self.place}/out/%j.txt", *options, "--wrap", script)
        return self.slurm(*words, user=user).strip()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """Number -> (state, reason) of all that Slurm remembers."""
        lines = self.slurm("squeue", "-h", "-a", "-t", "all", "-o", "%i|%T|%r").splitlines()
        return {number: (state, reason) for number, state, reason in (line.split("|") for line in lines)}

    def output(self, job: str) -> str:
        path = self.place / "out" / f"{job}.txt"
        return path.read_text() if path.exists() else ""

    def finished(self, user: pwd.struct_passwd, *options: str, script: str) -> str:
        """The number of a batch job that has ended."""
        job = self.submit(user, *options, script=script)
        self.wait_for(lambda: is_over(self, job))
        return job

    def claims(self) -> dict[str, str]:
        return {record.id: record.user for record in read_records(self.machine.directory)}

    def wait_for(self, holds: Callable[[], object], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.tell()
            time.sleep(0.05)

    def tell(self) -> str:
        """The last lines of the logs, for a test that fails."""
        logs = [*self.place.glob("*.log"), *(self.place / "out").glob("*.log")]
        ends = {log.name: log.read_text(errors="replace").splitlines()[-25:] for log in logs}
        return "\n".join("\n".join([f"== {name}", *lines]) for name, lines in ends.items())


def removed(path: str) -> bool:
    """Whether a cgroup is gone, now or before; False while a process is about to leave it."""
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.exists(path)


pytestmark = [pytest.mark.root, pytest.mark.usefixtures("alone")]

DEVICES, JOBS, OUTSIDERS = 4, 20, 4
TESTIFY = """#!/bin/sh
# witness [SECONDS]: on all devices that this process sees, for so long or until it is told to leave
for device in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do
    mkdir "$WITNESS/$device" 2>/dev/null || echo "$device" >> "$WITNESS/met"
done
[ -n "$1" ] && sleep "$1"
while [ -z "$1" ] && [ ! -e "$WITNESS/leave" ]; do sleep 0.1; done
for device in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do rmdir "$WITNESS/$device"; done
echo "on $CUDA_VISIBLE_DEVICES" | tee -a "$WITNESS/done"
"""


class Witness:
    """Sees which jobs meet on a device, and knows nothing of claims: a job that is on a device makes a directory."""

    def __init__(self, cluster: Cluster) -> None:
        self.place = cluster.place / "out" / "witness"
        self.place.mkdir()
        self.place.chmod(0o1777)
        self.program = cluster.place / "witness"
        self.program.write_text(TESTIFY.replace("$WITNESS", str(self.place)))
        self.program.chmod(0o755)
        for name in ("met", "done"):
            (self.place / name).touch()
            (self.place / name).chmod(0o666)

    def met(self) -> list[str]:
        return (self.place / "met").read_text().split()

    def done(self) -> int:
        return len((self.place / "done").read_text().splitlines())


@pytest.fixture(scope="module")
def one_for_all() -> Iterator[Cluster]:
    with a_cluster(gpus=DEVICES) as cluster:
        yield cluster


@pytest.fixture
def cluster(one_for_all: Cluster) -> Iterator[Cluster]:
    """One for all tests here; the jobs that a test leaves are cancelled, and a node that it left off is switched on."""
    yield one_for_all
    if "slurmd" not in one_for_all.daemons:
        one_for_all.power_off()
        one_for_all.start_node()
    if left := [job for job in one_for_all.jobs() if not is_over(one_for_all, job)]:
        one_for_all.slurm("scancel", *left)
    one_for_all.wait_for(lambda: one_for_all.claims() == {})


def events(cluster: Cluster, kind: str, claim: str | None = None) -> list[dict[str, object]]:
    texts = [path.read_text() for path in (cluster.events, cluster.tasks_events) if path.exists()]
    events = [json.loads(line) for text in texts for line in text.rpartition("\n")[0].splitlines()]
    return [event for event in events if event["kind"] == kind and claim in (None, event["claim"])]


def is_over(cluster: Cluster, job: str) -> bool:
    return cluster.jobs()[job][0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def by_hand(cluster: Cluster, user: Any, witness: Witness, failed: list[str]) -> None:
    for seconds in ((), ("0.2",)):
        done = cluster.machine(user, "run", "--quiet", "--wait", "50s", "--", str(witness.program), *seconds)
        if done.returncode:
            failed.append(done.stderr)


def test_20_jobs_of_two_users_and_4_people_who_use_devices_by_hand_never_meet(cluster):
    witness, failed = Witness(cluster), []
    people = [
        threading.Thread(target=by_hand, args=(cluster, (ALICE, BOB)[number % 2], witness, failed))
        for number in range(OUTSIDERS)
    ]
    for person in people:
        person.start()
    cluster.wait_for(lambda: len(cluster.claims()) == OUTSIDERS)  # so that there is a job to meet
    jobs = []
    for number in range(JOBS):
        command = f"{witness.program} 0.2"
        many = 1 + (number % 5 == 4)
        script = f"exec {cluster.run} -n {many} -- {command}" if number % 2 else f"exec {command}"
        jobs.append(cluster.submit((ALICE, BOB)[number % 2], f"--gres=gpu:{many}", script=script))

    cluster.wait_for(lambda: len(events(cluster, "slurm")) >= OUTSIDERS)
    (witness.place / "leave").touch()

    cluster.wait_for(lambda: all(is_over(cluster, job) for job in jobs))
    for person in people:
        person.join()

    states = cluster.jobs()
    assert [states[job][0] for job in jobs] == ["COMPLETED"] * JOBS, cluster.tell()
    assert failed == []
    assert witness.met() == []
    assert witness.done() == JOBS + 2 * OUTSIDERS
    assert explained(cluster, jobs) >= OUTSIDERS
    cluster.wait_for(lambda: cluster.claims() == {})
    assert cluster.machine.locked() == []


def explained(cluster: Cluster, jobs: list[str]) -> int:
    """How often jobs were put back; each time an event says why, and the job says it."""
    total = 0
    for job in jobs:
        shown = cluster.slurm("scontrol", "show", "job", "-o", job)
        restarts = int(shown.partition("Restarts=")[2].split()[0])
        why = events(cluster, "slurm", f"slurm{job}")
        assert [event["outcome"] for event in why] == ["requeued"] * restarts
        told = [str(event["message"]) for event in why]
        # The second: slurmd ran no prolog for a job that was put back, and the task prolog has seen that.
        assert all("claimed by" in text or "not claimed for it" in text for text in told)
        assert not told or any(f"AdminComment=gpuguard: {text}" in shown for text in told)
        total += restarts
    return total


def test_a_job_runs_inside_its_claim_and_sees_no_other_device(cluster):
    script = f"""
        echo outer $GPUGUARD_CLAIM $CUDA_VISIBLE_DEVICES
        {cluster.run} -n 1 -- sh -c 'echo inner $GPUGUARD_CLAIM $CUDA_VISIBLE_DEVICES'
        {cluster.run} -n 3 -- true; echo too many $?
    """
    job = cluster.finished(ALICE, "--gres=gpu:2", script=script)

    outer, inner, *_, many = cluster.output(job).splitlines()
    assert outer.split()[:2] == ["outer", f"slurm{job}"]
    assert inner.split()[1].startswith(f"slurm{job}.")
    assert inner.split()[2] in outer.split()[2].split(",")
    assert many == "too many 125", cluster.output(job)
    cluster.wait_for(lambda: events(cluster, "release", f"slurm{job}"))
    assert len(events(cluster, "claim", f"slurm{job}")[0]["devices"]) == 2  # type: ignore[arg-type]


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/devices/tasks", os.W_OK),
    reason="jobs that Slurm constrains (no cgroups of version 1)",
)
def test_a_constrained_job_counts_from_0_and_claims_what_it_really_has():
    with a_cluster(constrained=True) as cluster:
        first = running(cluster, ALICE)
        script = f"echo $CUDA_VISIBLE_DEVICES; {cluster.run} -n 2 -- sh -c 'echo $GPUGUARD_GPUS'"
        job = cluster.finished(BOB, "--gres=gpu:2", script=script)
        cluster.slurm("scancel", first)

        assert cluster.output(job).splitlines() == ["0,1", ",".join(cluster.machine.uuids[1:3])]
        cluster.wait_for(lambda: cluster.claims() == {})


def test_a_job_without_gpus_gets_none_by_gpuguard_either(cluster):
    job = cluster.finished(BOB, script=f"{cluster.run} -- true; echo status $?")

    assert "status 125" in cluster.output(job)
    assert f"Slurm job {job} was given no GPU" in cluster.output(job)


def running(cluster: Cluster, user: Any, *options: str) -> str:
    """A job that computes for ever, with its claim."""
    job = cluster.submit(user, "--gres=gpu:1", *options, script="exec sleep 300")
    cluster.wait_for(lambda: cluster.jobs()[job][0] == "RUNNING" and f"slurm{job}" in cluster.claims())
    return job


def holder_of(cluster: Cluster, job: str) -> int:
    """The process that holds the claim of a job, once it has seen a slurmstepd."""
    [record] = [path for path in cluster.machine.records() if f"slurm{job}" in path.name]
    pid = int(json.loads(record.read_text().splitlines()[0])["pid"])
    files = Path(f"/proc/{pid}/fd")

    def follows() -> bool:
        with suppress(FileNotFoundError):  # one was closed meanwhile
            return any("pidfd" in os.readlink(file) for file in files.iterdir())
        return False

    cluster.wait_for(follows)
    return pid


def test_the_claim_of_a_job_belongs_to_its_owner_and_ends_with_scancel(cluster):
    job = running(cluster, BOB)
    assert cluster.claims() == {f"slurm{job}": BOB.pw_name}
    cluster.slurm("scancel", job, user=BOB)

    cluster.wait_for(lambda: cluster.claims() == {})
    cluster.wait_for(lambda: cluster.machine.locked() == [])  # it may have forked something a moment before
    cluster.wait_for(lambda: events(cluster, "release", f"slurm{job}"))  # it is written when the lock is gone


def test_a_policy_cancels_the_job_of_a_process_and_no_other(cluster, monkeypatch):
    job, other = running(cluster, ALICE), running(cluster, BOB)
    [batch] = [pid for pid, (_, step) in slurm_jobs.steps(job).items() if step == "batch"]
    cluster.wait_for(lambda: psutil.Process(batch).children())
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setattr(identity, "uid_min", lambda: 1)  # the users here are the system's, which nothing is done to
    scene = Scene(psutil.Process(batch).children()[0].pid, ALICE.pw_uid)

    assert scene.act("cancel", enforce=False).word == "dry run"
    assert scene.act("cancel").word == "sent", scene.events
    cluster.wait_for(lambda: list(cluster.claims()) == [f"slurm{other}"])
    cluster.wait_for(lambda: is_over(cluster, job))  # COMPLETING while the epilog, which gives the device back, runs
    assert [cluster.jobs()[number][0] for number in (job, other)] == ["CANCELLED", "RUNNING"]


def test_of_an_array_one_task_is_cancelled_and_the_others_run_on(cluster, monkeypatch):
    array = cluster.submit(ALICE, "--gres=gpu:1", "--array=0-2", script="exec sleep 300")
    tasks = [f"{array}_{number}" for number in range(3)]
    cluster.wait_for(lambda: all(cluster.jobs().get(task, ("",))[0] == "RUNNING" for task in tasks))
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    word, _ = slurm_jobs.job_status(array)

    assert word in tasks  # one task bears the number of them all
    assert slurm_jobs.against_cancelling(array, ALICE.pw_uid) is None
    assert slurm_jobs.cancel(array) is None
    cluster.wait_for(lambda: is_over(cluster, word))
    assert [cluster.jobs()[task][0] for task in tasks if task != word] == ["RUNNING"] * 2


def test_who_and_queue_show_slurms_jobs_beside_the_others(cluster):
    job = running(cluster, ALICE)
    with cluster.machine.job(BOB, "-n", "1", "--note", "by hand"):
        waits = cluster.submit(BOB, f"--gres=gpu:{DEVICES}", "--job-name=big", script="true")
        who = cluster.machine(None, "who").stdout
        queue = cluster.try_slurm(*cluster.machine.words("queue"), user=BOB).stdout

    assert f"Slurm job {job}" in who and "by hand" in who
    assert "Slurm: 1 jobs with GPUs, 1 waiting" in queue
    assert [line.split()[:3] for line in queue.splitlines() if " big" in line] == [[waits, BOB.pw_name, str(DEVICES)]]


def test_neither_what_its_owner_kills_by_name_nor_a_restart_of_slurmd_takes_the_claim_away(cluster):
    job = running(cluster, ALICE)
    holder = holder_of(cluster, job)
    code = "import os, sys\ntry: os.kill(int(sys.argv[1]), 9)\nexcept PermissionError: print('not permitted')"

    assert cluster.machine.python(ALICE, code, str(holder)) == "not permitted\n"
    cluster.stop("slurmd")
    cluster.start_node()
    assert cluster.claims() == {f"slurm{job}": ALICE.pw_name}


def test_slurm_tells_the_guard_to_whom_it_has_given_which_device(cluster):
    running(cluster, ALICE)
    node = slurm_node.node_of(cluster.slurm("scontrol", "show", "node", "-o", cluster.host), cluster.host)
    jobs = slurm_node.jobs_on(cluster.slurm("scontrol", "show", "job", "-a", "-d", "-o"), cluster.host)

    assert node and node.gpus == DEVICES and node.in_service
    assert [(job.uids, job.gpus) for job in jobs if job.gpus] == [(frozenset((ALICE.pw_uid,)), frozenset((0,)))]


def test_srun_is_told_why_its_job_cannot_start_here(cluster):
    with cluster.machine.job(ALICE, "-n", "1"):
        done = cluster.try_slurm("srun", "--gres=gpu:4", "true", user=BOB)
    assert done.returncode != 0
    assert f"claimed by {ALICE.pw_name}" in done.stderr


def test_submit_and_srun_have_the_exit_codes_of_run(cluster):
    submit = functools.partial(cluster.try_slurm, *cluster.machine.words("submit", "--via", "slurm"), user=ALICE)
    attached = submit("--attach", "-n", "2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 7")
    assert attached.returncode == 7, attached.stderr
    assert len(attached.stdout.strip().split(",")) == 2
    limited = submit("--attach", "--time-limit", "1s", "--grace", "1s", "--", "sleep", "300")
    assert limited.returncode == 124, limited.stderr
    queued = submit("-n", "1", "--json", "--", "true")
    job = json.loads(queued.stdout)["job"]
    cluster.wait_for(lambda: is_over(cluster, job))
    assert cluster.jobs()[job][0] == "COMPLETED"


def test_the_claims_of_a_node_end_with_it(cluster):
    job = running(cluster, ALICE)
    cluster.power_off()

    assert cluster.claims() == {}
    assert cluster.machine.locked() == []
    cluster.slurm("scancel", job)
    cluster.start_node()


def test_a_claim_ends_when_the_steps_of_its_job_are_killed_and_no_epilog_runs(cluster):
    job = running(cluster, ALICE)
    holder_of(cluster, job)
    cluster.stop("slurmd", signal.SIGKILL)
    assert cluster.kill_node("slurmstepd")

    cluster.wait_for(lambda: events(cluster, "release", f"slurm{job}"))  # it is written when the lock is gone
    assert cluster.claims() == {}
    [end] = events(cluster, "release", f"slurm{job}")
    assert "no epilog came" in str(end["message"])
    cluster.power_off()
    cluster.slurm("scancel", job)
    cluster.start_node()


def test_the_witness_sees_who_meets_whom_where_the_prolog_claims_nothing():
    with a_cluster(gpus=1, prolog="") as bare:
        witness = Witness(bare)
        person = bare.machine.start(ALICE, "run", "--no-wait", "--", str(witness.program))
        bare.wait_for((witness.place / "0").exists)
        bare.finished(BOB, "--gres=gpu:1", script=f"exec {witness.program} 0")
        (witness.place / "leave").touch()
        person.wait(60)

        assert witness.met() == ["0"]
