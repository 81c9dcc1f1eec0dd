"""A job for which only its own devices exist, not just in an environment variable.

For an ordinary user bubblewrap builds a mount namespace whose /dev lacks the nodes of all other GPUs, and the job
enters it: no process stays in between, so signals, exit codes and the terminal work as without.  For root, who could
make the nodes again, the job starts in a cgroup of its own with a filter on its devices.  Either keeps accidents away
from other people's devices; neither is a wall against somebody who means harm, see docs/isolation.md.

Where neither can be had the job is refused, never started without.  Knows NVIDIA's nodes alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.backends.driver_files import CAPABILITY_MINORS
from gpuguard.claims.directory import TRUSTED, LockDirectory, is_roots
from gpuguard.clusters import visible_devices
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import HEALTH, MODEL, Device

if TYPE_CHECKING:
    from gpuguard.backends import Backend
    from gpuguard.claims.claim import Claim

MAJOR = 195  # of NVIDIA's nodes: Documentation/admin-guide/devices.txt of Linux
LAST_GPU_MINOR = 247  # NV_MINOR_DEVICE_NUMBER_REGULAR_MAX; 254 is nvidia-modeset, 255 nvidiactl, which all jobs share


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
        from gpuguard.jobs import device_filter

        device_filter.check()
    else:
        check_bubblewrap()


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
        from gpuguard.jobs import device_filter

        return Isolation(environment, *device_filter.prepare_cgroup(nodes.rules(), claim.id))

    missing = [path for path in needed(nodes, dev) if not os.path.exists(path)]
    if missing:
        # The driver's libraries make nodes through the setuid nvidia-modprobe, which can do nothing in a namespace.
        raise GpuguardError(
            f"{', '.join(missing)} does not exist yet, and could not be made once the job is isolated.  "
            "Run `nvidia-modprobe -u -c 0`, or any program with CUDA, once, and start this again."
        )
    environment[TRUSTED] = _trusted(directory)
    return Isolation(environment, *prepare_namespace(hidden(nodes, dev), dev))


def environment_of(devices: Sequence[Device], visible: str) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of an isolated job; {} where it is as without isolation.

    CUDA counts the devices whose nodes it can open, from 0 on.  So does it under Slurm's ConstrainDevices=yes, which
    hands out CUDA_VISIBLE_DEVICES=0 for the second GPU, and in containers with a part of the nodes.
    """
    if visible == "uuid" or any(device.parent_uuid for device in devices):
        return {}
    return visible_devices.variables(range(len(devices)))


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


# A mount namespace in which some device nodes do not exist, built by bubblewrap for an ordinary user.
#
# bubblewrap starts a shell in there that says its pid and waits; this process opens the two namespaces of that shell
# and lets it end.  The job enters them by setns() just before exec, so that no bubblewrap stands between us and the
# job: it would die of a Ctrl-C that the job survives, and would not pass signals on.


_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)


def check_bubblewrap() -> None:
    """Whether this user can have namespaces here.

    Raises:
        GpuguardError: no; the message says what to do.
    """
    for descriptor in _build(["--dev-bind", "/", "/"]):
        os.close(descriptor)


def prepare_namespace(hidden: Collection[str], dev: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Build a namespace without the nodes *hidden* below *dev*; how to enter it, and how to let it go."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise GpuguardError("the directory that you are in was removed: `cd` to another one.") from None
    options = ["--dev-bind", "/", "/", *_folder(dev, hidden), "--chdir", directory]
    descriptors = _build(options)
    library = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        for descriptor in descriptors:  # the user namespace first: it gives the right to enter the other one
            _checked(library.setns(descriptor, 0))
        os.chdir(directory)  # setns() has put us into the root directory
        # The capabilities in there end with exec.  Neither sudo nor a file's capabilities shall bring others.
        _checked(library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))

    def close() -> None:
        for descriptor in descriptors:
            os.close(descriptor)

    return enter, close


def _folder(path: str, hidden: Collection[str]) -> Iterator[str]:
    """bubblewrap's options for a directory of nodes like *path*, without *hidden*."""
    yield from ("--tmpfs", path)
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink():
            yield from ("--symlink", os.readlink(entry.path), entry.path)
        elif entry.is_dir() and any(each.startswith(f"{entry.path}/") for each in hidden):
            yield from _folder(entry.path, hidden)
        elif entry.path not in hidden:
            yield from ("--dev-bind-try", entry.path, entry.path)
    yield from ("--remount-ro", path)


def _build(options: list[str]) -> tuple[int, int]:
    """Descriptors of a user and a mount namespace as bubblewrap makes them."""
    program = shutil.which("bwrap")
    if program is None:
        raise GpuguardError(
            "--isolate needs bubblewrap, which is not installed: `apt install bubblewrap` or `dnf install bubblewrap`."
        )
    arguments = os.memfd_create("bubblewrap", os.MFD_CLOEXEC)
    with os.fdopen(arguments, "wb", closefd=False) as file:
        file.write(b"".join(os.fsencode(word) + b"\0" for word in options))
    os.lseek(arguments, 0, os.SEEK_SET)
    command = [program, "--args", str(arguments), "--", "/bin/sh", "-c", "echo $$; read end"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, pass_fds=[arguments], env={}, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    ) as shell:
        os.close(arguments)
        assert shell.stdin and shell.stdout and shell.stderr
        try:
            if first := shell.stdout.readline().strip():
                return _namespaces_of(int(first))
            raise _refused(shell.stderr.read().strip())
        finally:
            shell.stdin.close()  # the shell reads to its end


def _namespaces_of(pid: int) -> tuple[int, int]:
    flags = os.O_RDONLY | os.O_CLOEXEC
    user = os.open(f"/proc/{pid}/ns/user", flags)
    try:
        return user, os.open(f"/proc/{pid}/ns/mnt", flags)
    except OSError:
        os.close(user)
        raise


def _refused(message: str) -> GpuguardError:
    return GpuguardError(
        f"--isolate cannot be had: {message or 'bubblewrap ended at once'}.\n"
        "Ordinary users need user namespaces here.  As root: `sysctl user.max_user_namespaces=10000`; on Debian also "
        "`sysctl kernel.unprivileged_userns_clone=1`; on Ubuntu from 23.10 on an AppArmor profile for bwrap "
        "(bwrap-userns-restrict) or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`."
    )


def _checked(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
