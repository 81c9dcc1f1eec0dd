"""Adopting on a machine that two users share: each user their own jobs, and root the jobs of each for that user."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import GIB, Gpuguard, until
from test_pid_reuse import NAMESPACE, has_a_namespace
from users import ALICE, BOB

from gpuguard.claims.records import read_records

pytestmark = pytest.mark.root


@pytest.fixture
def sleepers(admin):
    """Starts processes of users on devices."""
    started = []

    def start(user, *devices):
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        started.append(subprocess.Popen(["sleep", "100"], cwd="/", **who))
        for device in devices:
            admin.fake.add_process(device, started[-1].pid, GIB)
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.wait()
    until(lambda: admin.locked() == [])


def test_nobody_adopts_the_job_of_another_user_or_a_device_on_which_a_stranger_computes(admin, sleepers):
    of_alice, of_bob = sleepers(ALICE, 2, 3), sleepers(BOB, 3)
    stranger, neighbour = (admin(ALICE, "adopt", str(pid)) for pid in (of_bob, of_alice))
    of_two = admin(None, "adopt", str(of_alice), str(of_bob))

    assert [done.returncode for done in (stranger, neighbour, of_two)] == [1, 1, 2]
    assert f"process {of_bob} belongs to {BOB.pw_name}: only its owner or root" in stranger.stderr
    assert f"{BOB.pw_name} computes on GPU 3 too (pid {of_bob})" in neighbour.stderr
    assert admin.locked() == []


def test_what_root_adopts_belongs_to_the_owner_of_the_job(admin, sleepers):
    job = sleepers(ALICE, 5)
    said = json.loads(admin(None, "adopt", str(job), "--json").stdout)
    [record] = read_records(admin.directory)

    assert (record.uid, record.user, record.id) == (ALICE.pw_uid, ALICE.pw_name, said["claim"])
    owners = Path(f"/proc/{said['holder_pid']}/status").read_text().partition("Uid:")[2].split()[:4]
    assert owners == [str(ALICE.pw_uid)] * 4


def test_a_user_who_is_denied_adopts_nothing(admin, sleepers):
    job = sleepers(ALICE, 1)
    assert admin(None, "deny", ALICE.pw_name, "--for", "1h").returncode == 0
    done = admin(ALICE, "adopt", str(job))

    assert (done.returncode, admin.locked()) == (1, [])
    assert "GPU 1 cannot be claimed" in done.stderr


# Reads a place on argv; adopts a job twice, the second time one whose pid becomes that of another process meanwhile.
REUSE = """
import os, signal, sys
from gpuguard.jobs import adoption
from gpuguard.backends.simulated import Simulated, use
from gpuguard.errors import ClaimError
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices
place = sys.argv[1]
read, write = os.pipe()

def a_job(pid=None):
    if pid:
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(pid - 1))
    child = os.fork()
    if child == 0:
        use("1", memory=2**30, spec=place)
        os.write(write, b".")
        while True:
            signal.pause()
    os.read(read, 1)
    assert pid in (None, child)
    return child

class Meddled(Simulated):
    looks = 0
    def sample(self, fields, devices=None):
        self.looks += 1
        if self.looks == 2:
            os.kill(job, signal.SIGKILL)
            os.waitpid(job, 0)
            a_job(job)
        return super().sample(fields, devices)

directory = lock_directory(None, backend=f"simulated:{place}")
job = a_job()
claim, family = adoption.adopt(Simulated(place), directory, [job])
claim.release()
family.close()
print("adopted", [device.index for device in claim])
for _ in range(5):
    try:
        print("adopted", adoption.adopt(Meddled(place), directory, [job]))
    except ClaimError as error:
        print("refused", error)
print(locked_devices(directory, [device.uuid for device in Simulated(place).sample(()).devices]))
"""


@pytest.mark.skipif(not has_a_namespace(), reason="other pid namespaces (none here, or a chroot)")
def test_a_pid_that_is_used_again_while_it_is_adopted_gets_nothing(tmp_path):
    assert Gpuguard(tmp_path, None)("sim", "start", "4xH100-80GB").returncode == 0
    words = [*NAMESPACE, sys.executable, "-c", REUSE, str(tmp_path / "node")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    assert said[0] == "adopted [1]"
    assert [line.partition(" ")[0] for line in said[1:6]] == ["refused"] * 5
    assert said[6] == "set()"
