"""Where a user mounts something (FUSE), and what he calls a cgroup of his own, is read as one name, whatever is in it.

Of all that parts words and lines the kernel writes out the blank, the tab, the newline and the backslash alone.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuguard import source
from gpuguard.cli import doctor
from gpuguard.files import file_system
from gpuguard.jobs import device_filter

ROOT = Path(__file__).resolve().parent.parent
PLACES = ["a\rb", "a\vb\fc", "m\ra\vb\vc\vd\v/proc", "\x1c\x85\u2028", "a b\tc\nd\\040e", "#", "0::", " - cgroup2 "]
LOOK = """
import os, subprocess, sys
sys.path[:0] = sys.argv[1:3]
import test_forged_mounts
told = [test_forged_mounts.all_that_is_read()]
for place in map(os.fsencode, sys.argv[4:]):
    os.makedirs(os.fsencode(sys.argv[3]) + b"/" + place)
    subprocess.run(["mount", "-t", "ramfs", "none", os.fsencode(sys.argv[3]) + b"/" + place], check=True)
    told.append(test_forged_mounts.all_that_is_read())
assert told == told[:1] * len(told), told
"""


def all_that_is_read() -> list[object]:
    """What is asked of the mounts of this machine."""
    hidden = source._processes_are_hidden(), doctor._hidepid()
    return [*hidden, *map(file_system, ("/", "/proc", "/sys", "/dev/shm"))]


@pytest.mark.root
@pytest.mark.parametrize("options", ["hidepid=0", "hidepid=2"])
def test_a_mount_of_a_users_changes_nothing_that_is_known_of_others(tmp_path: Path, options: str) -> None:
    """It hid that users do not see each other, so that the daemon showed everybody's command lines to all."""
    mount = f'mount -t proc -o {options} proc /proc && exec "$@"'
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", LOOK, str(ROOT), str(ROOT / "tests")]
    done = subprocess.run([*words, str(tmp_path), *PLACES], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", "\r\v\f\x1c\x1d\x1e\x85\u2028")
def test_the_name_of_a_cgroup_is_one_name(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the hierarchy of version 1 stands in front, and both are their user's who may make some below."""
    files = {
        "/proc/self/cgroup": f"1:name=systemd:/u{end}0::/other\n0::/mine{end}0::/another\n",
        "/proc/self/mountinfo": f"24 22 0:22 / /home/u/{end}x rw - fuse x rw\n"
        "25 22 0:23 / /sys/fs/cgroup rw - cgroup2 c rw\n",
    }
    monkeypatch.setattr(
        "builtins.open",
        lambda path, **how: io.TextIOWrapper(io.BytesIO(files[path].encode()), **how),
    )
    monkeypatch.setattr(os, "access", lambda path, how: True)

    assert device_filter.own_cgroup() == f"/sys/fs/cgroup/mine{end}0::/another"
