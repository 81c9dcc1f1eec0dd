"""A claim for a job that runs already lasts as long as the job or its holder, and is made for nobody else's devices."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chances import often
from nodes import Gpuguard, until
from proc import kinds_of_files, runs

from gpuguard.backends.simulated import Simulated
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices, read_records
from gpuguard.errors import ClaimError
from gpuguard.jobs import adoption
from gpuguard.model import HEALTH

ROUNDS = often(48)
# Uses the devices that it is named, says so, and starts a child that does so too whenever it is told.
JOB = """
import subprocess, sys, time
from gpuguard.backends.simulated import use
place, devices, code = sys.argv[1:]
if devices:
    use(devices, memory=2**30, spec=place)
print("using", flush=True)
if not code:
    time.sleep(100)
for line in sys.stdin:
    words = [sys.executable, "-c", code, place, line.strip(), ""]
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    print(child.pid, flush=True)
"""


class Node:
    """A simulated node, its claims, and jobs on it."""

    def __init__(self, place: Path, machine: str) -> None:
        self.gpuguard = Gpuguard(place, None)
        self.place = str(place / "node")
        assert self.gpuguard("sim", "start", machine).returncode == 0
        self.uuids = [device.uuid for device in Simulated(self.place).sample(()).devices]
        self.directory = lock_directory(None, backend=f"simulated:{self.place}")
        self.jobs: list[subprocess.Popen[str]] = []
        self.gpuguard.environment.pop("GPUGUARD_DIR")

    def instances(self) -> list[str]:
        """The uuids of MIG instances."""
        return [device.uuid for device in Simulated(self.place).sample({HEALTH}).devices if device.parent_uuid]

    def job(self, devices: str) -> subprocess.Popen[str]:
        words, pipe = [sys.executable, "-c", JOB, self.place, devices, JOB], subprocess.PIPE
        job = subprocess.Popen(words, start_new_session=True, stdin=pipe, stdout=pipe, text=True)
        assert job.stdout.readline() == "using\n"
        self.jobs.append(job)
        return job

    def child(self, job: subprocess.Popen[str], devices: str) -> int:
        """The pid of a new child of *job* that uses *devices*."""
        job.stdin.write(f"{devices}\n")
        job.stdin.flush()
        return int(job.stdout.readline())

    def locked(self) -> list[int]:
        locked = locked_devices(self.directory, self.uuids)
        return [index for index, uuid in enumerate(self.uuids) if uuid in locked]

    def adopt(self, *words: object) -> Any:
        """What `gpuguard adopt --json` says."""
        return self.gpuguard.json("adopt", *map(str, words))

    def refusal(self, *words: object) -> str:
        done = self.gpuguard("adopt", *map(str, words))
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    def close(self) -> None:
        for job in self.jobs:
            with job, contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        until(lambda: self.locked() == [], "every holder has ended")


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, getattr(request, "param", "4xH100-80GB"))
    yield node
    node.close()


def pidfds(holder: int) -> list[int]:
    """Whom a holder watches."""
    infos = []
    for path in Path(f"/proc/{holder}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            infos.append(path.read_text())
    return [int(info.partition("\nPid:")[2].split()[0]) for info in infos if "\nPid:" in info]


def gone(pid: int) -> bool:
    return not runs(pid)


def test_the_devices_of_a_running_job_are_claimed_until_it_ends(node):
    job = node.job("1,2")
    said = node.adopt(job.pid, "--note", "night run")

    assert (said["indices"], said["processes"], node.locked()) == ([1, 2], [job.pid], [1, 2])
    [record] = read_records(node.directory)
    assert (record.id, record.note, record.pid) == (said["claim"], "night run", said["holder_pid"])
    assert record.command and record.command[:2] == (sys.executable, "-c")
    shown = node.gpuguard("who").stdout
    assert "night run" in shown and "no claim" not in shown
    assert f"claimed already, by you: claim {record.id}" in node.refusal(job.pid)

    job.kill()
    until(lambda: node.locked() == [] and gone(said["holder_pid"]))
    assert read_records(node.directory) == []


def test_a_holder_that_is_ended_takes_its_record_with_it_and_leaves_the_job_alone(node):
    job = node.job("1")
    for signum in (signal.SIGTERM, signal.SIGKILL):
        holder = node.adopt(job.pid)["holder_pid"]
        os.kill(holder, signum)
        until(partial(gone, holder))
        until(lambda: node.locked() == [])
        assert signum == signal.SIGKILL or os.listdir(node.directory.records) == []

    assert (job.poll(), node.adopt(job.pid)["indices"]) == (None, [1])


def test_a_claim_that_was_released_is_not_given_back_again(node):
    job = node.job("")
    use = node.child(job, "1")
    said = node.adopt(job.pid, "--tree")
    assert "is in use" in node.gpuguard("release", said["claim"]).stderr
    os.kill(use, signal.SIGKILL)
    until(lambda: pidfds(said["holder_pid"]) == [job.pid])
    assert node.gpuguard("release", said["claim"]).returncode == 0
    assert node.locked() == []

    job.kill()
    until(lambda: gone(said["holder_pid"]))
    assert [event["outcome"] for event in node.gpuguard.events()] == ["adopted", "released", "was not held any more"]


@pytest.mark.parametrize("node", ["1xA100-40GB:mig=3g.20gb,3g.20gb"], indirect=True)
def test_a_claim_on_an_instance_leaves_its_sibling_free(node):
    job = node.job(node.instances()[0])
    said = node.adopt(job.pid)

    assert said["devices"] == node.instances()[:1]
    assert [
        node.gpuguard("run", "--no-wait", "--devices", uuid, "--", "true").returncode
        for uuid in (*node.instances(), node.uuids[0])  # naming the GPU names its instances
    ] == [75, 0, 0]


def test_a_tree_that_grows_keeps_its_claim_until_the_last_of_it_has_ended(node):
    job = node.job("1")
    said = node.adopt(job.pid, "--tree")
    later = node.child(job, "1")
    job.kill()
    job.wait()
    until(lambda: pidfds(said["holder_pid"]) == [later])

    assert node.locked() == [1] and not gone(later)
    os.kill(later, signal.SIGKILL)
    until(lambda: node.locked() == [])


def test_the_holder_sleeps_while_nothing_changes_and_keeps_nothing_open_but_what_it_needs(node):
    said = node.adopt(node.job("1").pid)
    record = f"claim.{os.getuid()}.{said['claim']}.json"
    wanted = sorted(["null", "null", "null", "pipe", "pipe", "anon_inode", record, node.uuids[1]])
    until(lambda: kinds_of_files(said["holder_pid"]) == wanted)  # it says what it holds before it has closed the rest
    status = Path(f"/proc/{said['holder_pid']}/status")
    until(lambda: "S (sleeping)" in status.read_text())
    before = [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
    time.sleep(0.5)  # the one thing that cannot be waited for: that nothing happens

    assert [line for line in status.read_text().splitlines() if "ctxt_switches" in line] == before
    assert "Threads:\t1\n" in status.read_text()
    assert os.readlink(f"/proc/{said['holder_pid']}/cwd") == "/"
    assert os.getsid(said["holder_pid"]) == said["holder_pid"]


def test_in_the_foreground_a_ctrl_c_gives_the_devices_back(node):
    job = node.job("1")
    with node.gpuguard.start("adopt", str(job.pid), "--foreground") as holder:
        assert "held here" in holder.stdout.readline()
        assert node.locked() == [1]
        holder.send_signal(signal.SIGINT)

        assert holder.wait(60) == 130
    assert (node.locked(), job.poll()) == ([], None)


def test_a_process_without_a_device_is_refused_and_a_launcher_is_told_of_its_tree(node):
    job = node.job("")
    assert "uses no GPU now" in node.refusal(job.pid)
    worker = node.child(job, "2")

    assert f"(pid {worker}): add --tree" in node.refusal(job.pid)
    assert node.adopt(job.pid, "--tree")["indices"] == [2]


def test_a_device_that_is_claimed_or_on_which_another_process_of_mine_computes_is_refused(node):
    with node.gpuguard.start("run", "--no-wait", "--devices", "2", "--", "sleep", "100") as other:
        until(lambda: node.locked() == [2])
        first = node.job("1,2")
        assert "GPU 2 is claimed already, by you: claim " in node.refusal(first.pid)
        assert f"process {first.pid} of yours computes on GPU 1 too" in node.refusal(node.job("1").pid)
        assert node.locked() == [2]
        other.terminate()


@pytest.mark.parametrize("word", ["x", "0", "-3", "99999999999"])
def test_what_is_no_pid_is_a_usage_error_and_one_that_nobody_has_a_refusal(node, word):
    assert node.gpuguard("adopt", "--", word).returncode == 2
    assert "there is no process 4194304" in node.refusal(4194304)


class Meddled(Simulated):
    """A simulated node on which something happens between the first and the second look."""

    def __init__(self, place: str, meddle: Any, late: Any = None) -> None:
        super().__init__(place)
        self.meddle, self.looks = meddle, 0
        self.late = late  # what the second look shows, if it is not the truth

    def sample(self, fields: Any, devices: Any = None) -> Any:
        self.looks += 1
        if self.looks == 2:
            self.meddle()
        return self.late if self.late and self.looks == 2 else super().sample(fields, devices)


@pytest.mark.parametrize("is_still_listed", [False, True])
def test_a_job_that_ends_while_it_is_adopted_gets_nothing(node, is_still_listed):
    job = node.job("1")

    def meddle() -> None:
        job.kill()
        job.wait()

    late = Simulated(node.place).sample(adoption._FIELDS) if is_still_listed else None
    with pytest.raises(ClaimError, match="while it was adopted"):
        adoption.adopt(Meddled(node.place, meddle, late), node.directory, [job.pid])
    assert node.locked() == []


def test_a_process_that_comes_while_another_is_adopted_is_seen(node):
    job = node.job("1")

    with pytest.raises(ClaimError, match="of yours computes on GPU 1 too"):
        adoption.adopt(Meddled(node.place, lambda: node.job("1")), node.directory, [job.pid])
    assert node.locked() == []


def test_whatever_is_killed_and_whenever_the_claim_ends_with_it(node):
    chance, claimed, longest = random.Random(4), 0, 0.4
    for trial in range(ROUNDS):
        job, kills_job = node.job("1"), trial % 2 == 0
        with node.gpuguard.start("adopt", str(job.pid), "--json", start_new_session=True) as command:
            time.sleep(chance.random() * longest)
            if kills_job:
                job.kill()
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)  # and the holder, unless that has gone its way
            said = command.communicate()[0]
        longest *= 0.5 if said else 2.0  # some instants lie before the claim and some behind it
        if said:
            claimed += 1
            holder = json.loads(said)["holder_pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(holder, signal.SIGKILL if not kills_job else 0)
            until(partial(gone, holder))
        until(lambda: node.locked() == [], f"trial {trial}")
        assert kills_job or job.poll() is None
        job.kill()
        job.wait()
    assert read_records(node.directory) == []
    assert 0 < claimed < ROUNDS, "the instants lie before and behind the claim"
