"""How a worker is started, asked and ended: a fork of gpuguard's own commands, a fresh interpreter in other programs.

A fork has loaded already what its client has, so it starts in a fraction of the time; but beside threads, CUDA and all
that another program may have loaded, only a fresh interpreter is safe.  Either keeps nothing but its pipes and does not
join the client's process group.  `gpuguard run` starts its worker before most of its own modules are loaded, so this
module imports little.  worker says what the worker does; client says what is asked of it, and what follows when it is
stuck.

Messages travel in frames: a 4-byte length and a marshal of a tuple.  The device that is being read is not sent in a
frame, because each frame would wake the client.  It is written into a file in memory instead, which the client reads
when it has waited too long.
"""

from __future__ import annotations

import atexit
import gc
import marshal
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize

from gpuguard.errors import BackendError
from gpuguard.files import close_all
from gpuguard.locale import _
from gpuguard.locale.messages import sentence
from gpuguard.users import keep_capabilities, lend_capabilities

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

LONGEST = 2**26  # bytes of a frame: any four letters, read as a length, are more
STARVED_SECONDS = 6.0  # a worker that is runnable but not running is not the driver's fault
LEAVING_SECONDS = 0.5  # a worker that hangs in the driver never leaves

Descriptors = tuple["finalize[..., Any]", "finalize[..., Any]"]  # one closes what ends the worker, one closes the rest
Mark = tuple["int | None", float]  # the index of the device that is read, or None, and since when (monotonic)

_early: dict[str, Channel] = {}  # by backend: workers that were started before they were needed
# Worker that is not reaped yet -> its channel's descriptors, and the pid that started it: a forked process leaves the
# workers of its parent alone.
_workers: dict[subprocess.Popen[bytes] | Fork, tuple[Descriptors, int]] = {}
_tells_children = False  # whether forked children run _begin_child()
_fork_serves: Callable[..., NoReturn] | None = None  # what a worker runs that is a fork of this process, if it may be
_code_at_start: tuple[int, int] | None = None  # _code() when that was given


class Channel:
    """A worker, and the client's descriptors.  It is closed when it is garbage-collected or the program ends.

    Args:
        process: the worker.
        requests: the descriptor to write to.
        replies: the descriptor to read from.
        mark: the file in which the worker marks what it reads.
        life: a pipe that is never written to: the worker ends when it is closed.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | Fork, requests: int, replies: int, mark: int, life: int
    ) -> None:
        self.process, self.requests, self.replies, self.mark = process, requests, replies, mark
        self._end = finalize(self, os.close, life)
        self._close = finalize(self, close_all, (requests, replies, mark))
        # A thread may still read from them while the program ends, so only _end_all() ends a worker then.
        self._close.atexit = self._end.atexit = False
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        global _tells_children
        if not _tells_children:
            os.register_at_fork(after_in_child=_begin_child)
            _tells_children = True
        _workers[process] = (self._end, self._close), os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether this process can use the channel: a forked child cannot."""
        return bool(self._close.alive)

    def send(self, request: tuple[object, ...]) -> None:
        """Send a request.  Raises BrokenPipeError if the worker has ended."""
        write_mark(self.mark, None)
        send(self.requests, request)

    def receive(self, seconds: float) -> Any:
        """Return the next answer, or None as receive() does.  Raises Stuck if a driver call takes over *seconds*."""
        return receive(self.replies, partial(self._await_piece, seconds))

    def _await_piece(self, seconds: float) -> None:
        # Called before each piece of an answer: text that a library has printed is there at once, and may be all that
        # comes.
        if late := self.overdue(seconds):
            place = where(late[0])
            raise Stuck(late[0], sentence("driver.silent_at", "a driver call did not come back ({where})", where=place))

    def overdue(self, seconds: float) -> Mark | None:
        """Return the mark of what takes longer than *seconds*, or None as soon as the worker answers or has ended.

        The time in which the worker waits for a CPU does not count: see STARVED_SECONDS.
        """
        poll = select.poll()
        poll.register(self.replies, select.POLLIN)
        late: Mark | None = None
        starved_until, pause = 0.0, seconds
        while not poll.poll(pause * 1000):
            mark, now = read_mark(self.mark), time.monotonic()
            if (left := mark[1] + seconds - now) > 0:
                pause = min(left, seconds)  # no longer, in case the mark was read half
            elif mark != late:
                late, starved_until, pause = mark, now + STARVED_SECONDS, 0.0
            elif now < starved_until and _is_runnable(self.process.pid):
                pause = 0.2
            elif read_mark(self.mark) == mark:  # otherwise it goes on with another device
                return None if poll.poll(0) else mark
        return None

    def close(self) -> None:
        """End the worker, unless it hangs in the driver; reap() collects it."""
        self._close()
        self._end()


class Fork:
    """A worker that is a fork of this process; what is used of subprocess.Popen for one that is not."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Reap it if it has ended; return its exit status, or None as long as it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it was reaped elsewhere, so nothing is known of its end
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Stuck(Exception):
    """The worker fell silent or died while it read device *index*, or the driver itself if that is None."""

    def __init__(self, index: int | None, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


def where(index: int | None) -> str:
    """Return what the worker read when it marked *index*, in words."""
    if index is None:
        return sentence("driver.itself", "the driver")
    return sentence("driver.device", "device {index}", index=index)


def _is_runnable(pid: int) -> bool:
    from gpuguard.procfs import stat_of  # over 10 ms, by which the first worker would start later

    stat = stat_of(pid)
    return stat is not None and stat.state == "R"


def reap() -> None:
    """Reap the workers that have ended.

    It never waits, because a worker in an uninterruptible driver call ends only when the driver lets it.
    """
    for process in tuple(_workers):
        if process.poll() is not None:
            _workers.pop(process, None)


def await_end(process: subprocess.Popen[bytes] | Fork, until: float) -> None:
    """Return once the worker has ended and is reaped, or at *until* (monotonic)."""
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.001)


def worker_pids() -> frozenset[int]:
    """Return the pids of the workers that are not reaped yet."""
    return frozenset(process.pid for process in tuple(_workers))


def _end_all() -> None:
    """End the remaining workers when the program ends, and reap those that end in time."""
    until = time.monotonic() + LEAVING_SECONDS
    own = {process: ends[0] for process, (ends, pid) in tuple(_workers.items()) if pid == os.getpid()}
    for end in own.values():
        end()
    for process in own:
        await_end(process, until)


def _begin_child() -> None:  # pragma: no cover: runs in a forked child, where nothing is counted
    """Close the parent's descriptors in a forked child, or a worker would live on after its client has closed them."""
    _early.clear()
    for descriptors, _pid in tuple(_workers.values()):
        for close in descriptors:
            with suppress(OSError):
                close()


def start_early(name: str, serve: Callable[..., NoReturn]) -> None:
    """Start a worker for the next start_worker() of this backend to return; what fails here fails there again.

    Only gpuguard's own commands call this, as soon as they begin: from now on their workers may be forks of them, which
    run *serve*, that is worker.serve().
    """
    global _fork_serves, _code_at_start
    _fork_serves, _code_at_start = serve, _code()
    with suppress(OSError, BackendError):
        _early[name] = start_worker(name)


def start_worker(name: str) -> Channel:
    """Start a worker that reads the backend *name*.

    Raises:
        OSError: no further process can be started.
        BackendError: this program has Python built in, and there is no interpreter to start.
    """
    if early := _early.pop(name, None):
        return early
    serve = _fork_serves if _may_fork() else None
    if getattr(sys, "frozen", False) and not serve:
        # A program made by PyInstaller is its own sys.executable: it would start itself again and again.
        raise BackendError(
            _(
                "this program brings its own Python, so no process can be started that reads the GPUs.  Ask "
                "for GPUs before threads are started and much is imported; or start it with `gpuguard run`."
            )
        )
    request_read, request_write, reply_read, reply_write, life_read, life_write = opened = pipes(3)
    try:
        mark = os.memfd_create("gpuguard-mark")
        opened.append(mark)
        if serve:
            serve = partial(serve, name, 0, 1, mark, life_read)
            process: subprocess.Popen[bytes] | Fork = _forked(serve, (request_read, reply_write), (mark, life_read))
        else:
            code = f"import gpuguard.backends.worker as worker; worker.serve(sys.argv[1], 0, 1, {mark}, {life_read})"
            process = start_interpreter(code, name, (request_read, reply_write), pass_fds=(mark, life_read))
    except BaseException:  # whatever interrupts this: a worker without its pipes ends
        close_all(opened)
        raise
    channel = Channel(process, request_write, reply_read, mark, life_write)
    close_all((request_read, reply_write, life_read))
    return channel


def _may_fork() -> bool:
    """Return whether a worker may be a fork: of one of our own commands, without threads, and of what is installed.

    A request may wait while another gpuguard is installed.  A fork would import the modules of that one beside its own.
    """
    return _code_at_start is not None and threading.active_count() == 1 and _code_at_start == _code()


def _code() -> tuple[int, int] | None:
    try:
        status = os.stat(__file__)
    except OSError:  # it was removed, or lies in an archive
        return None
    return status.st_ino, status.st_mtime_ns


def _forked(serve: Callable[[], NoReturn], standard: Sequence[int], kept: Sequence[int]) -> Fork:
    """Start *serve* in a fork of this process.

    Args:
        serve: called there.
        standard: as for start_interpreter().
        kept: further descriptors, which stay open there.

    Raises:
        OSError: no further process can be started.
    """
    # A handler of this process must not run in the fork, where it would do to the job what was meant for the worker.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if not (pid := os.fork()):  # pragma: no cover: runs in the fork, where nothing is counted
            try:
                _leave_the_parent(standard, kept)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                serve()
            finally:
                os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Fork(pid)


def _leave_the_parent(standard: Sequence[int], kept: Sequence[int]) -> None:  # pragma: no cover: runs in the fork
    """Make the fork what a fresh interpreter would be: in its own session, without handlers, with these descriptors."""
    gc.freeze()  # or a file that the parent has forgotten would close a descriptor that is by then another one's
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write("gpuguard-worker")  # or `ps` and `top` would show the command twice
    for place, descriptor in enumerate((*standard, os.open(os.devnull, os.O_RDWR))):
        os.dup2(descriptor, place)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with suppress(OSError):  # that of the list itself is closed already
            os.close(descriptor)


def start_interpreter(
    code: str, word: str, standard: Sequence[int], pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter for *code*, which may read whatever we may read.

    Args:
        code: Python.
        word: its sys.argv[1].
        standard: the descriptors that become its 0 and 1.
        pass_fds: further descriptors, which keep their numbers there.

    Raises:
        OSError: no further process can be started.
    """
    import subprocess  # 2 ms, by which a command would start later whose worker is a fork

    stdin, stdout = standard
    lent = os.geteuid() != 0 and lend_capabilities()  # root's programs may read everything anyway
    try:
        return subprocess.Popen(
            interpreter(code, word),
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        if lent:
            keep_capabilities()


def interpreter(code: str, word: str) -> list[str]:
    """Return the command line of an interpreter like this one, for *code*, in which sys.argv[1] is *word*."""
    # -S keeps out what an environment runs at the start of each interpreter, so the path of an editable install must be
    # named.
    ours = __file__.rpartition("/gpuguard/")[0]
    path = sys.path if ours in sys.path else [*sys.path, ours]
    ignoring = ["-E"] if sys.flags.ignore_environment else []  # as the service does, with -I
    return [sys.executable, *ignoring, "-S", "-c", f"import sys; sys.path[:] = sys.argv[2:]; {code}", word, *path]


def pipes(number: int) -> list[int]:
    """Open so many pipes and return both ends of each; an OSError leaves none of them open."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened += os.pipe()
    except OSError:
        close_all(opened)
        raise
    return opened


def write_mark(mark: int, index: int | None) -> None:
    """Mark that the device *index* is about to be read, or with None that none is."""
    number = -1 if index is None else index
    os.pwrite(mark, number.to_bytes(8, "little", signed=True) + time.monotonic_ns().to_bytes(8, "little"), 0)


def read_mark(mark: int) -> Mark:
    """Return the last mark; one that is just being written may be read half."""
    marked = os.pread(mark, 16, 0)
    index = int.from_bytes(marked[:8], "little", signed=True)
    return None if index < 0 else index, int.from_bytes(marked[8:], "little") / 1e9


def send(descriptor: int, message: Any) -> None:
    """Write one frame."""
    body = marshal.dumps(message)
    frame = memoryview(len(body).to_bytes(4, "little") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def receive(descriptor: int, ready: Callable[[], object] | None = None) -> Any:
    """Read one frame, or return None if the other end is gone or useless because a library has printed into the pipe.

    Frames after such text could not be told from it, and we would wait for a length that is really text.

    Args:
        descriptor: the one to read from.
        ready: called before each piece is read; it returns when there is one, and its exceptions are passed on.
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
