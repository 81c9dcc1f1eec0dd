"""Isolation of a job: only its own devices exist for it, which no environment variable alone can ensure.

For an ordinary user bubblewrap builds a mount namespace whose /dev lacks the nodes of all other GPUs, and the job
enters it.  For root, who could make the nodes again, the job starts in a cgroup of its own with a filter on its
devices: a program of type BPF_PROG_TYPE_CGROUP_DEVICE, which the kernel asks at every open() and mknod() of a device.
Both protect other people's devices from accidents; neither stops a user who means harm, see docs/isolation.md.  Where
neither is available the job is refused; it is never started without isolation.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gpuguard import procfs
from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import TRUSTED, LockDirectory, is_roots
from gpuguard.clusters import device_variables
from gpuguard.device_state import device_title, vendor_of
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.files import close_all
from gpuguard.locale import _, translated
from gpuguard.model import HEALTH, MODEL, Device
from gpuguard.vendors import DRM_MAJOR, NVIDIA, VENDORS, Vendor

# The rules of a filter for character devices: major number -> (highest minor that is refused, minors that are allowed
# nevertheless).  Everything else is allowed.
FilterRules = Mapping[int, tuple[int, Collection[int]]]


@dataclass(frozen=True)
class Nodes:
    """The device nodes a job may have: minors of GPUs, and the minors and the major of MIG instances' capabilities."""

    gpus: frozenset[int]
    capabilities: frozenset[int] = frozenset()
    capability_major: int | None = None  # None if the driver has none
    vendor: Vendor = NVIDIA

    def hides(self, major: int, minor: int) -> bool:
        """Return whether the character device with these numbers belongs to another job."""
        highest, allowed = self.rules().get(major, (-1, ()))
        return minor <= highest and minor not in allowed

    def rules(self) -> FilterRules:
        """Return the rules of a filter that allows only these nodes.

        DRM nodes stay for jobs on GPUs of other drivers, which may have such nodes beside their own, for graphics.
        """
        others = [vendor for vendor in VENDORS.values() if vendor.major not in (0, DRM_MAJOR)]
        found: dict[int, tuple[int, Collection[int]]] = {vendor.major: (vendor.last_minor, ()) for vendor in others}
        found[self.vendor.major] = (self.vendor.last_minor, self.gpus)
        if self.capability_major is not None:
            found[self.capability_major] = (2**20, self.capabilities)  # a minor number has 20 bits
        return found


@dataclass(frozen=True)
class Isolation:
    """A namespace or cgroup that is ready for the job.

    Call enter() in the job's process before it executes its program; it raises OSError.  Call close() when the job has
    ended or could not be started.
    """

    environment: Mapping[str, str]
    enter: Callable[[], None]
    close: Callable[[], None]


def check(backend: Backend) -> None:
    """Check that jobs can be isolated here, before anybody waits for devices.

    Raises GpuguardError if they cannot; it says what to do.
    """
    if backend.simulated:
        raise InvalidRequest(_("--isolate hides device nodes, and a simulated GPU has none: drop --isolate."))
    if os.geteuid() == 0:
        check_device_filter()
    else:
        check_bubblewrap()


def isolate(
    claim: Claim, backend: Backend, directory: LockDirectory, *, visible: str = "index", dev: str = "/dev"
) -> Isolation:
    """Prepare the namespace or cgroup of a job on the devices of *claim*, which was made in *directory*.

    Raises:
        GpuguardError: it cannot be done, and nothing is left behind.
        BackendError: the devices cannot be read.
    """
    nodes = nodes_of(backend.sample({MODEL, HEALTH}, [device.uuid for device in claim]).devices, claim.devices)
    # CUDA counts the devices whose nodes it can open, from 0 on.  It does so under Slurm's ConstrainDevices=yes, which
    # sets CUDA_VISIBLE_DEVICES=0 for the second GPU, and in containers that have only some of the nodes.  ROCm and
    # Level Zero do the same.
    environment = device_variables.renumbered(claim.devices, by_uuid=visible == "uuid")
    if os.geteuid() == 0:
        return Isolation(environment, *prepare_cgroup(nodes.rules(), claim.id))

    missing = [path for path in needed(nodes, dev) if not os.path.exists(path)]
    if missing:
        raise _no_nodes(missing, nodes.vendor)
    # From this variable a gpuguard inside the job knows root's directories, which look to it like another user's.
    seen = [os.stat(path) for path in dict.fromkeys((directory.path, directory.locks, directory.records))]
    environment[TRUSTED] = " ".join(f"{status.st_dev}:{status.st_ino}" for status in seen if is_roots(status))
    return Isolation(environment, *prepare_namespace(hidden(nodes, dev), dev))


def nodes_of(
    facts: Sequence[Device], claimed: Sequence[Device], minors: str | None = None, majors: str = "/proc/devices"
) -> Nodes:
    """Return the nodes of the *claimed* devices, from the *facts* that the driver reported about them."""
    known = {device.uuid: device for device in facts}
    vendor, gpus, wanted = vendor_of(claimed[0]), set(), []
    if not vendor.major:
        raise GpuguardError(
            _("the device nodes of {vendor} cannot be hidden yet: drop --isolate.").format(vendor=vendor.title)
        )
    for device in (known.get(device.uuid, device) for device in claimed):
        minor = device.minor_number
        if minor is None:
            raise GpuguardError(
                _("the driver does not say which node {gpu} has: it cannot be isolated.").format(
                    gpu=translated(device_title(device))
                )
            )
        gpus.add(minor)
        if vendor.capabilities:
            wanted += _capabilities_of(device, minor)
    if not vendor.capabilities:
        return Nodes(frozenset(gpus), vendor=vendor)
    major = re.search(rf"^\s*(\d+) {vendor.capabilities}$", procfs.read_text(majors) or "", re.MULTILINE)
    table = procfs.read_text(minors or vendor.capability_minors) or ""
    allowed = re.findall(rf"^(?:{'|'.join(wanted)}) (\d+)$", table, re.MULTILINE)
    return Nodes(frozenset(gpus), frozenset(map(int, allowed)), int(major[1]) if major else None, vendor)


def _capabilities_of(device: Device, minor: int) -> list[str]:
    """Return the names, as patterns, of the capabilities that a job needs on a GPU with this *minor*, or a part of it.

    Raises GpuguardError if they are not known.
    """
    if device.parent_uuid is None:
        return [rf"gpu{minor}/.*"]
    if device.gpu_instance_id is None or device.compute_instance_id is None:
        raise GpuguardError(
            _("the driver does not say the numbers of {uuid}: it cannot be isolated.").format(uuid=device.uuid)
        )
    instance = rf"gpu{minor}/gi{device.gpu_instance_id}"
    return [rf"{instance}/access", rf"{instance}/ci{device.compute_instance_id}/access"]


def needed(nodes: Nodes, dev: str) -> list[str]:
    """Return the paths of the nodes without which no job starts that computes on such GPUs."""
    vendor, gpus = nodes.vendor, [f"{nodes.vendor.device_node}{minor}" for minor in sorted(nodes.gpus)]
    capabilities = [f"{vendor.capability_node}{minor}" for minor in sorted(nodes.capabilities)]
    paths = dict.fromkeys((vendor.control_node, vendor.compute_node, *gpus, *capabilities))
    return [path.replace("/dev", dev, 1) for path in paths if path]


def _no_nodes(missing: Sequence[str], vendor: Vendor) -> GpuguardError:
    if not vendor.node_maker:
        return GpuguardError(
            _("{missing} does not exist: load the driver ({drivers}), or start the container with these nodes.").format(
                missing=", ".join(missing), drivers=", ".join(vendor.drivers)
            )
        )
    # The driver's libraries make nodes through the setuid nvidia-modprobe, which can do nothing in a namespace.
    return GpuguardError(
        _(
            "{missing} does not exist yet, and could not be made once the job is isolated.  Run "
            "`{command}`, or any program with CUDA, once, and start this again."
        ).format(missing=", ".join(missing), command=vendor.node_maker)
    )


def hidden(nodes: Nodes, dev: str) -> frozenset[str]:
    """Return the paths below *dev* that are nodes of other jobs' devices, whatever their names are."""
    found, here = set(), os.stat(dev).st_dev
    for folder, folders, names in os.walk(dev):
        # /dev/shm and /dev/pts are separate file systems, in which only root could make a node.
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


# For an ordinary user: a mount namespace in which some device nodes do not exist.
#
# In that namespace bubblewrap starts a shell, which prints its pid and waits.  This process opens the two namespaces of
# the shell and lets it end.  The job enters them with setns() just before exec, so that no bubblewrap stands between us
# and the job: it would die of a Ctrl-C that the job survives, and it would not forward signals.

_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)


def check_bubblewrap() -> None:
    """Check that this user can have namespaces here.  Raises GpuguardError if not; it says what to do."""
    close_all(_build(["--dev-bind", "/", "/"]))


def prepare_namespace(hidden: Collection[str], dev: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Build a namespace without the nodes *hidden* below *dev*; return how to enter it and how to close it."""
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise GpuguardError(_("the directory that you are in was removed: `cd` to another one.")) from None
    options = ["--dev-bind", "/", "/", *_folder(dev, hidden), "--chdir", directory]
    descriptors = _build(options)
    library = ctypes.CDLL(None, use_errno=True)

    def enter() -> None:
        for descriptor in descriptors:  # the user namespace comes first: it gives the right to enter the other one
            _checked(library.setns(descriptor, 0))
        os.chdir(directory)  # setns() has put us into the root directory
        # The capabilities inside the namespace end with exec.  Neither sudo nor a file's capabilities must add others.
        _checked(library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))

    return enter, partial(close_all, descriptors)


def _folder(path: str, hidden: Collection[str]) -> Iterator[str]:
    """Yield bubblewrap's options for a directory of nodes that is like *path*, without *hidden*."""
    yield from ("--tmpfs", path)
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink():
            yield from ("--symlink", os.readlink(entry.path), entry.path)
        elif entry.is_dir() and any(node.startswith(f"{entry.path}/") for node in hidden):
            yield from _folder(entry.path, hidden)
        elif entry.path not in hidden:
            yield from ("--dev-bind-try", entry.path, entry.path)
    yield from ("--remount-ro", path)


def _build(options: list[str]) -> tuple[int, int]:
    """Return descriptors of a user namespace and a mount namespace that bubblewrap has made with *options*."""
    program = shutil.which("bwrap")
    if program is None:
        raise GpuguardError(
            _(
                "--isolate needs bubblewrap, which is not installed: `apt install bubblewrap` or `dnf install "
                "bubblewrap`."
            )
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
                flags = os.O_RDONLY | os.O_CLOEXEC
                user = os.open(f"/proc/{int(first)}/ns/user", flags)
                try:
                    return user, os.open(f"/proc/{int(first)}/ns/mnt", flags)
                except OSError:
                    os.close(user)
                    raise
            raise _no_namespace(shell.stderr.read().strip())
        finally:
            shell.stdin.close()  # the shell ends because it has nothing left to read


def _no_namespace(message: str) -> GpuguardError:
    return GpuguardError(
        _(
            "--isolate cannot be had: {message}.\nOrdinary users need user namespaces here.  As root: "
            "`sysctl user.max_user_namespaces=10000`; on Debian also `sysctl "
            "kernel.unprivileged_userns_clone=1`; on Ubuntu from 23.10 on an AppArmor profile for bwrap "
            "(bwrap-userns-restrict) or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`."
        ).format(message=message or _("bubblewrap ended at once"))
    )


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# For root: a cgroup for one job, with a filter on its device nodes.
#
# The cgroup lies below our own, so every limit that holds for us holds for the job.  The filter goes by the numbers of
# a node, not by its name.  It lives as long as the cgroup, so it stays in force when this process is killed.  In that
# case the empty directory is left when the job ends, and the next isolated job removes it: a lock on the directory
# tells whether its maker still needs it.

PREFIX = "gpuguard-"
_TRIES = 20  # another job may take a directory that is not locked yet for a leftover, and remove it

_CHARACTER = 2  # BPF_DEVCG_DEV_CHAR of linux/bpf.h: the low half of access_type

# Fields of struct bpf_cgroup_dev_ctx, to which register 1 points.
_ACCESS_TYPE, _MAJOR, _MINOR = 0, 4, 8

_LOAD_WORD, _AND, _MOVE, _EXIT, _JUMP_EQUAL, _JUMP_NOT_EQUAL, _JUMP_ABOVE = 0x61, 0x57, 0xB7, 0x95, 0x15, 0x55, 0x25

_SYSCALL_BPF = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "loongarch64": 280, "ppc64le": 361}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_PROG_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6
# The filter is attached beside the programs of systemd (DeviceAllow=) and of outer jobs: an open must pass all of them.
_ALLOW_MULTI = 2
_ATTRIBUTES_SIZE = 128  # an older kernel accepts zeros after the fields that it knows


def check_device_filter() -> None:
    """Check that root can filter devices here.  Raises GpuguardError if not; it says why."""
    own_cgroup()
    os.close(_load_filter({}))


def filter_program(rules: FilterRules) -> bytes:
    """Return the instructions of a filter for *rules*: each with its opcode, registers, offset of a jump, constant."""
    refuse, allow = [(_MOVE, 0, 0, 0), (_EXIT, 0, 0, 0)], [(_MOVE, 0, 0, 1), (_EXIT, 0, 0, 0)]
    fields = ((2, _ACCESS_TYPE), (3, _MAJOR), (4, _MINOR))
    code = [(_LOAD_WORD, 1 << 4 | register, field, 0) for register, field in fields]
    code += [(_AND, 2, 0, 0xFFFF), (_JUMP_EQUAL, 2, len(allow), _CHARACTER), *allow]
    for major, (highest, allowed) in sorted(rules.items()):
        # Each of these jumps over those behind it and over *refuse*, to *allow*.
        cases = [(_JUMP_ABOVE, highest), *((_JUMP_EQUAL, minor) for minor in sorted(allowed))]
        jumps = [(test, 4, len(cases) - place + len(refuse), number) for place, (test, number) in enumerate(cases, 1)]
        block = [*jumps, *refuse, *allow]
        code += [(_JUMP_NOT_EQUAL, 3, len(block), major), *block]
    return b"".join(struct.pack("=BBhi", *instruction) for instruction in (*code, *allow))


def _load_filter(rules: FilterRules) -> int:
    """Hand the filter to the kernel, which checks it, and return its descriptor."""
    instructions = filter_program(rules)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"Proprietary")  # the kernel's word for "calls none of the GPL functions"
    addresses = ctypes.addressof(code), ctypes.addressof(licence)
    attributes = struct.pack("=IIQQ", _PROG_TYPE_CGROUP_DEVICE, len(instructions) // 8, *addresses)
    try:
        descriptor = bpf(_PROG_LOAD, attributes)
    except OSError as error:  # EPERM without the right to do it, ENOSYS or EINVAL if the kernel has no such programs
        raise _no_filter(
            _("the kernel takes no device filter from us ({strerror})").format(strerror=error.strerror)
        ) from error
    os.set_inheritable(descriptor, False)
    return descriptor


def bpf(command: int, attributes: bytes) -> int:
    """Call bpf(2), for which the C library has no function.  Raises OSError."""
    machine = os.uname().machine
    if machine not in _SYSCALL_BPF:
        raise OSError(errno.ENOSYS, f"the number of bpf(2) on {machine} is not known")
    # A 32-bit Python on a 64-bit kernel would use other numbers.
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, "a 32-bit Python cannot call bpf(2) here")
    buffer = ctypes.create_string_buffer(attributes, _ATTRIBUTES_SIZE)
    library = ctypes.CDLL(None, use_errno=True)
    return _checked(library.syscall(_SYSCALL_BPF[machine], command, buffer, _ATTRIBUTES_SIZE))


def prepare_cgroup(rules: FilterRules, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make the cgroup of the job *name*, with a filter for *rules*; return how to enter it and how to remove it."""
    parent = own_cgroup()
    sweep(parent)
    filter_ = _load_filter(rules)
    path = f"{parent}/{PREFIX}{name}"
    try:
        directory = _make_cgroup(path)
        try:
            bpf(_PROG_ATTACH, struct.pack("=IIII", directory, filter_, _ATTACH_CGROUP_DEVICE, _ALLOW_MULTI))
            processes = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            os.rmdir(path)
            os.close(directory)
            raise
    except OSError as error:
        raise _no_filter(f"{path}: {error.strerror}") from error
    finally:
        os.close(filter_)  # the cgroup keeps it

    def enter() -> None:
        os.write(processes, b"0")

    def close() -> None:
        os.close(processes)
        with suppress(OSError):  # a process that is left keeps the cgroup, with its filter
            os.rmdir(path)
        os.close(directory)

    return enter, close


def sweep(parent: str) -> None:
    """Remove the empty cgroups whose makers were killed."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        try:
            directory = os.open(f"{parent}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # another job was quicker
        with suppress(OSError):  # its maker still lives, or a process is left in it
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rmdir(f"{parent}/{name}")
        os.close(directory)


def own_cgroup() -> str:
    """Return the directory of our own cgroup (version 2).

    Raises GpuguardError if there is none that we can see and write.
    """
    path = procfs.own_cgroup()
    if path is None:
        raise _no_filter(_("no cgroup file system of version 2 is mounted"))
    if not os.access(path, os.W_OK):
        raise _no_filter(_("{path} cannot be written to, as in a container").format(path=path))
    return path


def _make_cgroup(path: str) -> int:
    """Make the directory and lock it; return its descriptor."""
    for _attempt in range(_TRIES):
        try:
            os.mkdir(path)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another job has already removed it
            continue
        fcntl.flock(directory, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(directory), os.stat(path)):
                return directory
        os.close(directory)
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", path)


def _no_filter(why: str) -> GpuguardError:
    return GpuguardError(
        _(
            "--isolate cannot be had: {why}.\nRoot needs a writable cgroup file system of version 2 and the "
            "right to use bpf(2) (not in an ordinary container).  Or run the job as an ordinary user with "
            "bubblewrap installed."
        ).format(why=why)
    )
