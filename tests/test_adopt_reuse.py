"""A pid that becomes another process while its job is adopted, forced in a pid namespace of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import Gpuguard
from test_pid_reuse import NAMESPACE, has_a_namespace

# Reads a place on argv; adopts a job twice, the second time one whose pid becomes that of another process meanwhile.
REUSE = """
import os, signal, sys
from gpuguard.jobs import adopt
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
claim, family = adopt.adopt(Simulated(place), directory, [job])
claim.release()
family.close()
print("adopted", [device.index for device in claim])
for _ in range(5):
    try:
        print("adopted", adopt.adopt(Meddled(place), directory, [job]))
    except ClaimError as error:
        print("refused", error)
print(locked_devices(directory, [device.uuid for device in Simulated(place).sample(()).devices]))
"""


@pytest.mark.root
@pytest.mark.skipif(not has_a_namespace(), reason="NOT TESTED: needs a private pid namespace (not in a chroot)")
def test_a_pid_that_is_used_again_while_it_is_adopted_gets_nothing(tmp_path):
    assert Gpuguard(tmp_path, None)("sim", "start", "4xH100-80GB").returncode == 0
    words = [*NAMESPACE, sys.executable, "-c", REUSE, str(tmp_path / "node")]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()

    assert said[0] == "adopted [1]"
    assert [line.partition(" ")[0] for line in said[1:6]] == ["refused"] * 5
    assert said[6] == "set()"
