"""A job for which only its own devices exist, not just in an environment variable.

For an ordinary user bubblewrap builds a mount namespace whose /dev lacks the nodes of all other GPUs, and the job
enters it: no process stays in between, so signals, exit codes and the terminal work as without.  For root, who could
make the nodes again, the job starts in a cgroup of its own with a filter on its devices.  Either keeps accidents away
from other people's devices; neither is a wall against somebody who means harm, see docs/isolation.md.

Where neither can be had the job is refused, never started without.  Knows NVIDIA's nodes alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.claims.lockfiles import TRUSTED, LockDirectory, is_roots
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import HEALTH, MODEL, Device

if TYPE_CHECKING:
    from gpuguard.backends import Backend
    from gpuguard.claims.hold import Claim

MAJOR = 195  # of NVIDIA's nodes: Documentation/admin-guide/devices.txt of Linux
LAST_GPU_MINOR = 247  # NV_MINOR_DEVICE_NUMBER_REGULAR_MAX; 254 is nvidia-modeset, 255 nvidiactl, which all jobs share
CAPABILITY_MINORS = "/proc/driver/nvidia-caps/mig-minors"  # "gpu0/gi1/ci0/access 13"


@dataclass(frozen=True)
class Nodes:
    """Which nodes a job may have: minors of GPUs, and of the capabilities of MIG instances with their major."""

    gpus: frozenset[int]
    capabilities: frozenset[int] = frozenset()
    capability_major: int | None = None  # None: the driver has none

    def hides(self, major: int, minor: int) -> bool:
        """Whether the character device with these numbers is somebody else's."""
        if major == MAJOR:
            return minor <= LAST_GPU_MINOR and minor not in self.gpus
        return major == self.capability_major and minor not in self.capabilities

    def rules(self) -> dict[int, tuple[int, Collection[int]]]:
        """The same for devicefilter.program()."""
        found: dict[int, tuple[int, Collection[int]]] = {MAJOR: (LAST_GPU_MINOR, self.gpus)}
        if self.capability_major is not None:
            found[self.capability_major] = (2**20, self.capabilities)  # a minor number has 20 bits
        return found


@dataclass(frozen=True)
class Isolation:
    """A place that is ready for the job.

    enter() is called in the job's process before it becomes its program, and raises OSError; close() when the job has
    ended, or could not be started.
    """

    environment: Mapping[str, str]
    enter: Callable[[], None]
    close: Callable[[], None]


def check(backend: Backend) -> None:
    """Whether jobs can be isolated here, asked before anybody waits for devices.

    Raises:
        GpuguardError: they cannot; the message says what to do.
    """
    if backend.simulated:
        raise InvalidRequest("--isolate hides device nodes, and a simulated GPU has none: drop --isolate.")
    if os.geteuid() == 0:
        from gpuguard.isolation import jobgroup

        jobgroup.check()
    else:
        from gpuguard.isolation import namespaces

        namespaces.check()


def isolate(
    claim: Claim, backend: Backend, directory: LockDirectory, *, visible: str = "index", dev: str = "/dev"
) -> Isolation:
    """Prepare the place of a job on the devices of *claim*, which was made in *directory*.

    Raises:
        GpuguardError: it cannot be done; nothing is left behind.
        BackendError: the driver does not say which nodes the devices have.
    """
    nodes = nodes_of(backend.sample({MODEL, HEALTH}, [device.uuid for device in claim]).devices, claim.devices)
    environment = environment_of(claim.devices, visible)
    if os.geteuid() == 0:
        from gpuguard.isolation import jobgroup

        return Isolation(environment, *jobgroup.prepare(nodes.rules(), claim.id))
    from gpuguard.isolation import namespaces

    missing = [path for path in needed(nodes, dev) if not os.path.exists(path)]
    if missing:
        # The driver's libraries make nodes through the setuid nvidia-modprobe, which can do nothing in a namespace.
        raise GpuguardError(
            f"{', '.join(missing)} does not exist yet, and could not be made once the job is isolated.  "
            "Run `nvidia-modprobe -u -c 0`, or any program with CUDA, once, and start this again."
        )
    environment[TRUSTED] = _trusted(directory)
    return Isolation(environment, *namespaces.prepare(hidden(nodes, dev), dev))


def environment_of(devices: Sequence[Device], visible: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of an isolated job; {} where it is as without isolation.

    CUDA counts the devices whose nodes it can open, from 0 on.  So does it under Slurm's ConstrainDevices=yes, which
    hands out CUDA_VISIBLE_DEVICES=0 for the second GPU, and in containers with a part of the nodes.
    """
    if visible == "uuid" or any(device.parent_uuid for device in devices):
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(devices))))}


def _trusted(directory: LockDirectory) -> str:
    """What lets a gpuguard in the job know the directories of root's, which look like nobody's to it."""
    seen = [os.stat(path) for path in dict.fromkeys((directory.path, directory.locks, directory.records))]
    return " ".join(f"{each.st_dev}:{each.st_ino}" for each in seen if is_roots(each))


def nodes_of(
    facts: Sequence[Device], claimed: Sequence[Device], minors: str = CAPABILITY_MINORS, majors: str = "/proc/devices"
) -> Nodes:
    """The nodes of the *claimed* devices, of which the driver has told *facts*."""
    known = {device.uuid: device for device in facts}
    gpus, wanted = set(), []
    for device in (known.get(each.uuid, each) for each in claimed):
        minor = device.minor_number
        if minor is None:
            raise GpuguardError(f"the driver does not say which node GPU {device.index} has: it cannot be isolated.")
        gpus.add(minor)
        if device.parent_uuid is None:
            wanted.append(rf"gpu{minor}/.*")
        elif device.gpu_instance_id is None or device.compute_instance_id is None:
            raise GpuguardError(f"the driver does not say the numbers of {device.uuid}: it cannot be isolated.")
        else:
            instance = rf"gpu{minor}/gi{device.gpu_instance_id}"
            wanted += [rf"{instance}/access", rf"{instance}/ci{device.compute_instance_id}/access"]
    major = re.search(r"^\s*(\d+) nvidia-caps$", _text(majors), re.MULTILINE)
    allowed = re.findall(rf"^(?:{'|'.join(wanted)}) (\d+)$", _text(minors), re.MULTILINE)
    return Nodes(frozenset(gpus), frozenset(map(int, allowed)), int(major[1]) if major else None)


def needed(nodes: Nodes, dev: str) -> list[str]:
    """Nodes without which no job with CUDA starts."""
    gpus = [f"{dev}/nvidia{minor}" for minor in sorted(nodes.gpus)]
    capabilities = [f"{dev}/nvidia-caps/nvidia-cap{minor}" for minor in sorted(nodes.capabilities)]
    return [f"{dev}/nvidiactl", f"{dev}/nvidia-uvm", *gpus, *capabilities]


def hidden(nodes: Nodes, dev: str) -> frozenset[str]:
    """The paths below *dev* that are nodes of somebody else's devices, whatever their names."""
    found, here = set(), os.stat(dev).st_dev
    for folder, folders, names in os.walk(dev):
        # /dev/shm and /dev/pts are file systems of their own, in which only root could make a node.
        folders[:] = [name for name in folders if (inner := _status(f"{folder}/{name}")) and inner.st_dev == here]
        for path in (f"{folder}/{name}" for name in names):
            seen = _status(path)
            if seen and stat.S_ISCHR(seen.st_mode) and nodes.hides(os.major(seen.st_rdev), os.minor(seen.st_rdev)):
                found.add(path)
    return frozenset(found)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None  # it went away


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
