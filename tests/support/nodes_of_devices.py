"""A /dev with the nodes of GPUs that do not exist, in a mount namespace of its own, for tests that run as root.

No driver is behind them, so open() tells what a filter thinks: ENXIO is "permitted", EPERM "filtered", ENOENT "not
there".

with private_dev(place, devices=4) as inside: subprocess.run([*inside(BOB), "ls", "/dev"])
"""

import contextlib
import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

# Prints what becomes of each node that is named.
OPEN = """
import errno, os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
        print(os.path.basename(path), "opened")
    except OSError as error:
        print(os.path.basename(path), errno.errorcode[error.errno])
"""
SHARED = {"nvidiactl": (195, 255), "nvidia-modeset": (195, 254), "nvidia-uvm": (510, 0), "nvidia-uvm-tools": (510, 1)}

# $1 a new directory; $2 how many GPUs.  Ends with its standard input.
BUILD = """
set -e
mount --make-rprivate /
mount -t tmpfs dev "$1"
for name in null zero full random urandom tty ptmx; do
    cp -a /dev/$name "$1/$name"
done
for name in pts shm; do
    mkdir "$1/$name"; mount --bind /dev/$name "$1/$name"
done
ln -s /proc/self/fd "$1/fd"
i=0; while [ $i -lt "$2" ]; do mknod -m 666 "$1/nvidia$i" c 195 $i; i=$((i + 1)); done
shift 2
while [ $# -gt 0 ]; do mkdir -p "$(dirname "$1")"; mknod -m 666 "$1" c "$2" "$3"; shift 3; done
echo ready
read end
"""


@contextlib.contextmanager
def private_dev(
    place: Path, devices: int, more: dict[str, tuple[int, int]] | None = None
) -> Iterator[Callable[[pwd.struct_passwd | None], list[str]]]:
    """Words that start a program as a user (None: root) where /dev has these nodes; started as root."""
    dev = place / "dev"
    dev.mkdir()
    nodes = [word for name, (major, minor) in {**SHARED, **(more or {})}.items() for word in (name, major, minor)]
    paths = [str(dev / word) if isinstance(word, str) else str(word) for word in nodes]
    words = ["unshare", "-m", "sh", "-c", BUILD, "sh", str(dev), str(devices), *paths]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout.readline() == "ready\n"
        namespace = f"--mount=/proc/{keeper.pid}/ns/mnt"
        # One mount more, in the same namespace: the directory takes the place of /dev.
        subprocess.run(["nsenter", namespace, "mount", "--rbind", str(dev), "/dev"], check=True)

        def inside(user: pwd.struct_passwd | None) -> list[str]:
            who = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"] if user else []
            return ["nsenter", namespace, *who]

        yield inside
        keeper.stdin.close()


def can_have_private_dev() -> bool:
    """Whether this process may make mount namespaces and nodes."""
    return os.geteuid() == 0 and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode
