"""A pid that changes hands at the worst moment: the successor is never hit, and the one who is meant always is."""

import json
import os
import subprocess
import sys

import pytest
from sources import ROOT

SCRIPT = ROOT / "tests/support/pid_reuse.py"
COUNT = int(os.environ.get("GPUGUARD_TEST_REUSES", "40"))
# What keeps the successor safe in each campaign; without it the successor is hit.
FAULTS = {
    "decision": "os.kill",
    "pidfd": "start time,sample time,listed",
    "sample": "sample time",
    "arrival": "any arrival",  # of one whose files cannot be read
    "kfd": "driver",  # which keeps the entries of processes that have ended
}

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def has_a_namespace() -> bool:
    """Whether a private pid namespace with a /proc of its own can be had: as root, but not in a chroot."""
    return os.geteuid() == 0 and subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not has_a_namespace(), reason="pids that are used again (no pid namespace, or a chroot)"),
]


def told(*words: object) -> dict[str, int]:
    path = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    done = subprocess.run(
        [*NAMESPACE, sys.executable, SCRIPT, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counted: dict[str, int] = json.loads(done.stdout)
    return counted


@pytest.mark.parametrize("moment", FAULTS)
def test_no_successor_of_a_pid_is_hit(moment):
    count = COUNT // 4 if moment == "kfd" else COUNT  # KFD is a tree of files, which takes longer

    assert told(moment, count) == {"spared": count}


@pytest.mark.parametrize("moment", FAULTS)
def test_without_that_protection_successors_are_hit(moment):
    assert told(moment, 20, FAULTS[moment]) == {"hit": 20}


@pytest.mark.parametrize(("who", "count"), [("right", COUNT), ("hidden", COUNT), ("on kfd", COUNT // 4)])
def test_whoever_is_meant_is_hit(who, count):
    assert told(who, count) == {"hit": count}


def test_in_another_pid_namespace_nobody_is_hit():
    assert told("namespace", 5) == {"spared": 5}
