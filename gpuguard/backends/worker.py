"""The child side of the isolated backend: a process that reads the devices and answers over two pipes.

It is a fresh interpreter: safe beside threads, CUDA and whatever else the program that looks has loaded.

A frame is a 4-byte length and a marshal of a tuple: a request is (fields, devices, skip, ahead), a reply ("ready",
version), ("snapshot", packed) or ("error", class, message, attributes).  Which device is being read is no frame, of
which each would wake the reader up: it stands in a file in memory, where the reader looks when it has waited too long.
"""

from __future__ import annotations

import marshal
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuguard import __version__, capabilities
from gpuguard.backends import open_backend
from gpuguard.errors import CROWDED, BackendError, GpuguardError
from gpuguard.model import ClaimRecord, Device, Gap, GpuProcess, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

Told = dict[str, tuple[GpuProcess, ...]]  # by uuid: the processes of a device that crossed last

# The pid of the child, and descriptors: to write requests to, to read replies from, of where it says what it reads, and
# one that nobody writes to: when it is closed, the child ends.
Channel = tuple[int, int, int, int, int]
LONGEST = 2**26  # bytes of a frame: as a length any four letters are more

Mark = tuple["int | None", float]  # the index of the device that is read, None: none; and since when (monotonic)


def start(name: str) -> Channel:
    """Start a sampler of backend *name* as a fresh interpreter: safe beside threads, CUDA and anything else.

    Raises:
        OSError: there can be no further process.
        BackendError: there is no interpreter here but a program that has one in it.
    """
    if getattr(sys, "frozen", False):
        # What PyInstaller makes is its own sys.executable: it would start itself, and that one itself again.
        raise BackendError(
            "this program brings its own Python, so no process can be started that reads the devices.  Ask for GPUs "
            "before threads are started and much is imported; or start it with `gpuguard run`."
        )
    request_read, request_write, reply_read, reply_write, life, life_held, place = opened = _descriptors()
    code = "import gpuguard.backends.worker as s; s.serve(sys.argv[1], 0, 1, 3, 4)"
    try:
        pid = spawned(code, name, (request_read, reply_write, place, life))
    except OSError:
        close_all(opened)
        raise
    close_all((request_read, reply_write, life))
    return pid, request_write, reply_read, place, life_held


def spawned(code: str, word: str, descriptors: Sequence[int]) -> int:
    """The pid of a fresh interpreter for *code*, that may look as we may; *descriptors* are its 0, 1, 3 and 4.

    Raises:
        OSError: there can be no further process.
    """
    words = interpreter(code, word)
    # No number is overwritten before it is used: the later ones were given out later, so they are higher.
    places: list[Any] = [(os.POSIX_SPAWN_DUP2, *pair) for pair in zip(descriptors, (0, 1, 3, 4), strict=False)]
    places.insert(2, (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0))
    start = os.posix_spawn
    # pydevd, of VS Code and PyCharm, has each python that a program starts wait until a debugger attaches to it.
    if aside := getattr(sys.modules.get("pydevd"), "skip_subprocess_arg_patch", None):
        start = aside()(start)
    lent = capabilities.lend_for_reading()
    try:
        return start(words[0], words, os.environ, file_actions=places, setpgroup=0, setsigmask=())
    finally:
        if lent:
            capabilities.keep_to_ourselves()


def interpreter(code: str, word: str) -> list[str]:
    """The words that start an interpreter like this one, for *code*, in which sys.argv[1] is *word*."""
    # -S: what an environment runs at the start of each interpreter is not for this one (11 of 39 million instructions),
    # and so an editable install must be named.
    ours = __file__.rpartition("/gpuguard/")[0]
    path = sys.path if ours in sys.path else [*sys.path, ours]
    ignoring = ["-E"] if sys.flags.ignore_environment else []  # the service does, by -I
    return [sys.executable, *ignoring, "-S", "-c", f"import sys; sys.path[:] = sys.argv[2:]; {code}", word, *path]


def _descriptors() -> list[int]:
    """Both ends of pipes for requests, for replies and for life, and a file in memory; all of them or an OSError."""
    opened = pipes(3)
    try:
        return [*opened, os.memfd_create("gpuguard-place")]
    except OSError:
        close_all(opened)
        raise


def pipes(number: int) -> list[int]:
    """Both ends of so many pipes; all of them or an OSError."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened += os.pipe()
    except OSError:
        close_all(opened)
        raise
    return opened


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for each in descriptors:
        os.close(each)


def serve(name: str, requests: int, replies: int, place: int, life: int) -> NoReturn:
    """Answer requests until the other end is gone.  Never returns."""
    _close_what_was_inherited(max(requests, replies, place, life))
    try:
        try:
            threading.Thread(target=_end_with_the_parent, args=(life,), daemon=True).start()
        except RuntimeError:
            raise BackendError(CROWDED) from None
        _serve_requests(name, requests, replies, place)
    except GpuguardError as error:
        send(replies, ("error", type(error).__name__, str(error), vars(error)))
    except BrokenPipeError:
        pass
    except BaseException as error:  # noqa: BLE001  the border of this process: a fault must reach the parent as a message
        send(replies, ("error", "BackendError", f"reading the devices failed inside gpuguard: {error!r}", {}))
    os._exit(0)


def _serve_requests(name: str, requests: int, replies: int, place: int) -> None:
    backend: Any = open_backend(name)
    backend.progress = lambda index: write_mark(place, index)
    write_mark(place, None)  # the first request is there already
    send(replies, ("ready", __version__))
    told: Told = {}
    while request := receive(requests):
        fields, devices, skip, backend.ahead = request
        backend.skip = set(skip)
        try:
            reply = ("snapshot", pack(backend.sample(fields, devices), told))
        except BackendError as error:
            reply = ("error", type(error).__name__, str(error), vars(error))  # type: ignore[assignment]
        send(replies, reply)


def _close_what_was_inherited(last: int) -> None:
    """Hold nothing of the parent: no lock of a claim, no pipe that somebody waits for the end of."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > last:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(int(entry))


def _end_with_the_parent(life: int) -> None:
    """End this process when the parent closes its end or dies, even while a driver call hangs in the main thread."""
    os.read(life, 1)
    os._exit(0)


def write_mark(place: int, index: int | None) -> None:
    """Say that device *index* is about to be read; None: none of them."""
    number = -1 if index is None else index
    os.pwrite(place, number.to_bytes(8, "little", signed=True) + time.monotonic_ns().to_bytes(8, "little"), 0)


def read_mark(place: int) -> Mark:
    """What was marked last; one that is just being written may be read half."""
    told = os.pread(place, 16, 0)
    index = int.from_bytes(told[:8], "little", signed=True)
    return None if index < 0 else index, int.from_bytes(told[8:], "little") / 1e9


def send(descriptor: int, message: Any) -> None:
    """Write one frame."""
    body = marshal.dumps(message)
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int, ready: Callable[[], object] | None = None) -> Any:
    """Read one frame; None when the other end is gone, or of no use: a library has printed into the pipe.

    What follows that could not be told apart, and text taken for a length would be waited for.

    Args:
        descriptor: to read from.
        ready: called before each piece of it is read; returns when one is there, or raises what this raises then.
    """
    head = _read(descriptor, 4, ready)
    size = int.from_bytes(head, "little")
    try:
        body = _read(descriptor, size, ready) if size <= LONGEST else b""
        found = marshal.loads(body) if body else None
        return found if type(found) is tuple else None
    except (ValueError, EOFError, TypeError):
        return None


def _read(descriptor: int, count: int, ready: Callable[[], object] | None) -> bytes:
    parts = b""
    while len(parts) < count:
        if ready:
            ready()
        part = os.read(descriptor, count - len(parts))
        if not part:
            return b""
        parts += part
    return parts


def pack(snapshot: Snapshot, told: Told) -> dict[str, Any]:
    """A snapshot as plain values, with all fields of all nouns: who leaves out what is None takes twice the time.

    Processes that are as they were the last time are only named, by True: most are, and that is most of a snapshot.

    Args:
        snapshot: to send.
        told: what each device's were the last time; changed in place, and so at the other end by unpack().
    """
    devices = [{**vars(device), "processes": _packed(device, told)} for device in snapshot.devices]
    further = {"gaps": [vars(gap) for gap in snapshot.gaps], "claims": [vars(claim) for claim in snapshot.claims]}
    return {**vars(snapshot), "devices": devices, **further}


def _packed(device: Device, told: Told) -> Any:
    processes = device.processes
    if not processes:
        return processes
    if told.get(device.uuid) == processes:
        return True
    told[device.uuid] = processes
    return [vars(process) for process in processes]


def unpack(packed: dict[str, Any], told: Told) -> Snapshot:
    """The snapshot that pack() made plain; its processes are the same objects as the last time, if they may be."""
    for device in packed["devices"]:
        if processes := device["processes"]:
            if processes is not True:
                told[device["uuid"]] = tuple(GpuProcess(**fields) for fields in processes)
            device["processes"] = told[device["uuid"]]
    packed["devices"] = tuple(Device(**fields) for fields in packed["devices"])
    packed["gaps"] = tuple(Gap(**fields) for fields in packed["gaps"])
    packed["claims"] = tuple(
        ClaimRecord(**fields) for fields in packed["claims"]
    )  # of a recording: drivers know of none
    return Snapshot(**packed)
