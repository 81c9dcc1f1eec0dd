"""Devices for this very process: grab_gpus(), the context manager claim(), and the checks that they make first.

They work like py3nvml's grab_gpus, whose keywords are understood, with a claim behind it that no other job gets past.
This module does not start a command: see run.
"""

from __future__ import annotations

import difflib
import inspect
import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuguard.backends import Backend, default_backend, resolved
from gpuguard.backends.client import WorkerBackend, open_worker
from gpuguard.claims.claim import SHARE_VARIABLES, Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.clusters.device_variables import is_restricted
from gpuguard.device_state import vendor_of
from gpuguard.errors import (
    AlreadyClaimed,
    BackendError,
    ClaimLost,
    CudaInitialized,
    GpuguardError,
    ImpossibleRequest,
    InvalidRequest,
    NotEnoughGpus,
)
from gpuguard.lock import Allocator, outer_claim
from gpuguard.model import ALL_FIELDS, BRIEF, HEALTH, IDLE_PROCESSES, MEMORY, MODEL, WHO_FIELDS, Device, Snapshot
from gpuguard.procfs import own_children, read_link, read_memory
from gpuguard.queue.priority import PRIORITIES
from gpuguard.queue.tickets import MOST_ALTERNATIVES
from gpuguard.request import Request
from gpuguard.source import desktop_memory, joined
from gpuguard.units import format_bytes, local_time, parse_bytes, parse_duration
from gpuguard.vendors import NVIDIA, VENDORS

if TYPE_CHECKING:
    from gpuguard.backends.merged import MergedBackend

_ALL = -1
_PLENTY = 1024  # more devices than a machine has
_LISTS = ("devices", "exclude", "prefer", "models")
_NUMBERS = {
    "num_gpus": "",
    "max_gpus": "",
    "min_free": " of bytes, or a text like '20GiB'",
    "min_total": " of bytes, or a text like '80GiB'",
    "memory": " of bytes, or a text like '10GiB'",
    "tolerance": " of bytes, or a text like '512MiB'",
    "gpu_min_memory": " of MiB",
    "min_free_fraction": " from 0 to 1",
    "max_util": " of percent, as in 10",
    "max_memory_util": " of percent, as in 10",
    "max_temperature": " of degrees Celsius, as in 70",
    "max_processes": "",
    "max_procs": "",
    "slots": "",
}
_FRACTIONAL = ("min_free_fraction", "max_util", "max_memory_util", "max_temperature")  # the others are whole
_SIZES = ("min_free", "min_total", "memory", "tolerance")
_LEAST_SIZE = 2**20  # bytes; a user who asks for fewer has forgotten the unit


@dataclass(frozen=True)
class OwnClaim:
    """A claim that process *pid* made at *line* of the program; a call with the same *asked* returns it again."""

    pid: int
    claim: Claim
    line: str
    asked: object = None

    def in_words(self) -> str:
        """Return ``"GPU 2, 3 since 2026-11-26 11:05, by train.py:12: claim = grab_gpus(2)"``."""
        names = ", ".join(device.label for device in self.claim)
        since = "" if self.claim.since is None else f" since {local_time(self.claim.since)}"
        return f"GPU {names}{since}, by {self.line}"


_mutex = threading.Lock()  # guards _made and all changes of os.environ
_calls: dict[int, threading.RLock] = {}  # pid -> lock, held by a call that may return another call's claim
_made: list[OwnClaim] = []  # by this process and, before a fork, by its parent; the oldest first
_tells_children = False  # whether forked children run _begin_child()
_outside: dict[str, str | None] = {}  # the values of a claim's variables before the first claim


def grab_gpus(
    num_gpus: int = 1,
    gpu_select: Iterable[int] | int | None = None,
    gpu_fraction: float | None = None,
    max_procs: int = -1,
    env_set_ok: bool | None = None,
    gpu_min_memory: float | None = None,
    *,
    strict: bool = True,
    wait: float | str | None = 0.0,
    alternatives: Iterable[Mapping[str, Any]] = (),
    priority: str = "normal",
    on_wait: Callable[[NotEnoughGpus], object] | None = None,
    note: str | None = None,
    backend: str | None = None,
    directory: str | None = None,
    further: bool = False,
    **conditions: Any,
) -> Claim:
    """Claim devices for this process, the best free ones first, and set CUDA_VISIBLE_DEVICES in os.environ.

    Call it before CUDA is initialised.  The claim lasts until release(), which restores os.environ, or until this
    process and its forked workers have ended.  It also lasts if the process goes on as another program (os.execvp).  To
    let a child that you start keep the devices beyond your own end, give it the claim's pass_fds.  Processes that
    os.system() or a C library leaves running keep the devices without pass_fds.
    The same call again (in a cell that runs once more, in the next task of a worker, in another thread) returns the
    claim that the first call made, as long as that claim lasts.

    Args:
        num_gpus: how many devices; -1 claims all that are free (at least one), 0 none at all (CUDA sees no device).
        gpu_select: an index or indices; no other devices are claimed.
        gpu_fraction: 0..1; this part of the memory that an empty device has must be free.
        max_procs: how many processes of others may be on a device; -1 allows none, and next to no memory in use.
        env_set_ok: None stays inside a CUDA_VISIBLE_DEVICES that is already set; False raises ValueError if it is set.
        gpu_min_memory: MiB of memory that a device must have in total.
        strict: False warns instead of raising and takes what there is, if need be nothing (CUDA sees no device).
        wait: seconds to wait in the queue for the devices, or a text like "1h"; None waits for ever.
        alternatives: the conditions of at most 3 requests that would do as well, the preferred one first, as in
            ({"num_gpus": 1, "min_free": "40GiB"},); the conditions of the first request do not hold for them.
        priority: in the queue, "low", "normal" or "high"; a site limits it.
        on_wait: called now and then during the wait, with what is missing; print() will do.
        note: a text for others, shown in `gpuguard who`; in a Jupyter kernel the default is the notebook's name.
        backend: see backends.open_backend; default $GPUGUARD_BACKEND, else the vendors whose GPUs are found.
        directory: of the claims; default $GPUGUARD_DIR, else the machine's.
        further: claim devices in addition to those that this process has; os.environ names those of the last call.
        **conditions: further fields of Request: min_free ("20GiB", or bytes), models, exclude, prefer, max_util
            (percent), vendor ("amd"), share=True with memory (as min_free) for a part of each device, mig ("3g.40gb"),
            allow_mig_set=True (several MIG instances, of which one process can use only one) ...

    Returns:
        A Claim: a sequence of its devices, so len(claim) is their number.

    Raises:
        NotEnoughGpus: fewer could be claimed.  Nothing stays claimed, and os.environ is unchanged.
        AlreadyClaimed: this process has devices from another such call, and *further* is not set.
        ClaimLost: the claim of the earlier call was released from outside, and CUDA still uses its devices.
        CudaInitialized: CUDA runs in this process already, so it would not see the change.
        InvalidRequest: the request makes no sense.
        BackendError: the driver cannot be reached.
    """
    try:
        _refuse_texts({"num_gpus": num_gpus, "max_procs": max_procs, "gpu_min_memory": gpu_min_memory})
        seconds = _read("wait", wait, parse_duration)
        of_py3nvml = {
            "devices": gpu_select,
            "max_processes": max_procs if max_procs >= 0 else None,
            "min_total": None if gpu_min_memory is None else int(gpu_min_memory * 2**20),
        }
        conditions |= {name: value for name, value in of_py3nvml.items() if value is not None}
        conditions.setdefault("min_free_fraction", gpu_fraction)
        call = GrabCall(
            ways=_ways(num_gpus, conditions, alternatives),
            backend=_backend_name(backend, conditions.get("vendor")),
            directory=directory,
            wait=seconds,
            priority=priority,
            note=note,
            strict=strict,
            env_set_ok=env_set_ok,
            further=further,
        )
        return _grabbed(call, on_wait)
    except GpuguardError as error:
        is_for_now = isinstance(error, NotEnoughGpus) and not isinstance(error, ImpossibleRequest)
        if is_for_now and (own := _own_claims()):
            has = "; ".join(made.in_words() for made in own)
            error.args = (f"{error}\nThis process itself has {has}.", *error.args[1:])
        # The traceback ends at the caller's line, because that is the line to correct.
        raise error.with_traceback(None) from None


@dataclass(frozen=True, kw_only=True)
class GrabCall:
    """A call of grab_gpus(), as far as its arguments say what is claimed."""

    ways: tuple[Request, ...]  # the preferred one first; () for no device at all
    backend: str
    directory: str | None
    wait: float | None  # seconds
    priority: str
    note: str | None
    strict: bool
    env_set_ok: bool | None
    further: bool

    def job(self) -> JobDetails:
        """Return what others read about the claim."""
        if self.priority not in PRIORITIES:
            raise InvalidRequest(f"there is no priority {self.priority!r}: choose one of {', '.join(PRIORITIES)}.")
        note = self.note or (notebook_note() if "ipykernel" in sys.modules else None)
        return JobDetails(note, sys.orig_argv or sys.argv, priority=PRIORITIES[self.priority])


def _grabbed(call: GrabCall, on_wait: Callable[[NotEnoughGpus], object] | None) -> Claim:
    """Return the claim of an equal call before, or a new one, which os.environ names."""
    claim = None
    try:
        # Two threads that make the same call at the same time get one claim.  A forked child has a lock of its own.
        with nullcontext() if call.further else _calls.setdefault(os.getpid(), threading.RLock()):
            environ = _outer_environment()
            outer = tuple(environ.get(vendor.visible) for vendor in VENDORS.values())
            asked = None if call.further else (call.ways, call.backend, call.directory, outer)
            if call.ways and asked and (again := _claimed_before(asked, call.strict)):
                return again
            _refuse_late(environ, call.env_set_ok)
            if not call.ways:
                nothing = Claim("none", (), ())
                _apply(OwnClaim(os.getpid(), nothing, ""))
                return nothing
            job = call.job()
            with _worker(call.backend, call.directory) as driver:  # its own process: NVML must not hang in this one
                locks = _lock_directory(call.directory, call.backend)
                if (of_script := claim_of_the_script(driver, locks, environ)) is not None:
                    return of_script
                allocator = Allocator(driver, locks, call.ways, environ=environ, job=job, on_wait=on_wait)
                claim = _acquired(allocator, call.wait, call.strict)
            _apply(OwnClaim(os.getpid(), claim, _line_of_the_caller(), asked if claim else None))
            warn_of_workers(vendor_of(claim.devices[0]).visible if claim else NVIDIA.visible)
    except BaseException:
        if claim is not None:  # it was interrupted, so the program would not know of the claim
            claim.release()
        raise
    return claim


@contextmanager
def claim(num_gpus: int = 1, **options: Any) -> Iterator[Claim]:
    """Call grab_gpus() for a ``with`` block, in addition to other claims, and restore os.environ at its end."""
    with grab_gpus(num_gpus, further=True, **options) as claimed:
        yield claimed


def select_devices(
    num_gpus: int = 1, *, backend: str | None = None, directory: str | None = None, **conditions: Any
) -> list[Device]:
    """Return the devices that grab_gpus() would claim now.  They are not claimed, so they may be gone a moment later.

    Raises:
        NotEnoughGpus: fewer are eligible.
    """
    request = _request(num_gpus=num_gpus, **conditions)
    name = _backend_name(backend, request.vendor)
    with _worker(name, directory) as driver:
        place = _lock_directory(directory, name, make=False)
        return list(Allocator(driver, place, [request], environ=_outer_environment()).chosen())


def snapshot(fields: Iterable[str] | None = None, *, backend: str | None = None) -> Snapshot:
    """Return what the machine looks like now.

    Args:
        fields: groups of gpuguard.model (MEMORY, PROCESSES, ...), by default WHO_FIELDS; all other fields stay None.
        backend: see backends.open_backend.

    Raises:
        InvalidRequest: there is no such group.
        BackendError: nothing at all can be read.
    """
    # A word is one group, not its letters.
    asked = WHO_FIELDS if fields is None else frozenset((fields,) if isinstance(fields, str) else fields)
    if unknown := asked - ALL_FIELDS - {IDLE_PROCESSES, BRIEF}:
        names = ", ".join(sorted(ALL_FIELDS))
        raise InvalidRequest(f"there is no group of fields {min(unknown)!r}: choose among {names}.")
    with _worker(_backend_name(backend), None) as driver:
        return driver.sample(asked | {MODEL})


def _worker(name: str, directory: str | None) -> WorkerBackend | MergedBackend:
    return open_worker(
        name, desktop_memory=lambda: desktop_memory(lambda: _lock_directory(directory, name, make=False))
    )


def who(*, backend: str | None = None, directory: str | None = None) -> Snapshot:
    """Return what the machine looks like now, with all claims, quarantined devices and reserved devices.

    Claims are in ``.claims``, devices in quarantine in ``.quarantined``, and those that are kept for a reservation in
    ``.reserved``.

    Raises:
        LockDirectoryError: the directory of the claims cannot be used.
        BackendError: nothing at all can be read.
    """
    name = _backend_name(backend)
    machine, place = snapshot(backend=name), _lock_directory(directory, name, make=False)
    return joined(machine, lambda: place)


def _ways(num_gpus: int, conditions: dict[str, Any], alternatives: Iterable[Mapping[str, Any]]) -> tuple[Request, ...]:
    """Return the request and its alternatives, or () for no device at all.

    Raises:
        InvalidRequest: they make no sense, or there are too many.
    """
    if num_gpus == 0:
        return ()
    least, most = (1, _PLENTY) if num_gpus == _ALL else (num_gpus, None)
    ways = (_request(num_gpus=least, max_gpus=most, **conditions), *(_request(**way) for way in alternatives))
    if len(ways) > MOST_ALTERNATIVES:
        raise InvalidRequest(f"{len(ways) - 1} alternatives are too many: name at most {MOST_ALTERNATIVES - 1}.")
    return ways


def _refuse_late(environ: Mapping[str, str], env_set_ok: bool | None) -> None:
    """Refuse a claim that comes too late for CUDA, or in a restricted environment if *env_set_ok* forbids that."""
    if cuda_runs():
        raise CudaInitialized(
            "CUDA runs in this process already and will not see another CUDA_VISIBLE_DEVICES.  "
            "Call grab_gpus() before the first use of CUDA, or start the program with `gpuguard run -- ...`."
        )
    if env_set_ok is False and is_restricted(environ):
        raise InvalidRequest(
            "CUDA_VISIBLE_DEVICES is set already: unset it, or leave env_set_ok out to stay inside it."
        )


def _request(**conditions: Any) -> Request:
    """Make a request of what users write: a list, a single word, an index as a number.

    Raises:
        InvalidRequest: it makes no sense, or has a text where a number belongs.
        TypeError: there is no such condition.
    """
    _refuse_texts(conditions)
    for name, value in conditions.items():
        if name in _LISTS and value is not None:
            # A single word is one item, not a list of letters: exclude="12" once left out the devices 1 and 2.
            alone = isinstance(value, str) or hasattr(value, "__index__")
            conditions[name] = tuple(str(word) for word in ((value,) if alone else value))
    if unknown := conditions.keys() - set(Request.__match_args__):
        name = min(unknown)
        names = [*Request.__match_args__, "note", "wait", "backend", "directory", "priority"]
        near = ["num_gpus"] if name == "n" else difflib.get_close_matches(name, names, n=1)  # `gpuguard run -n`
        raise TypeError(f"there is no condition {name!r}{f': did you mean {near[0]!r}?' if near else ''}")
    if not hasattr(number := conditions.get("num_gpus", 1), "__index__"):
        raise InvalidRequest(f"{number!r} GPUs cannot be asked for: ask for a whole number.")
    return Request(**{name: _plain_number(name, value) for name, value in conditions.items()})


def _plain_number(name: str, value: Any) -> Any:
    """Return a number as records and tickets hold it, because others could not read 10e9 bytes or a NumPy number."""
    if name not in _NUMBERS or value is None:
        return value
    read = _read(name, value, parse_bytes) if name in _SIZES else value
    try:
        number = float(read) if name in _FRACTIONAL else int(read)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} is a number{_NUMBERS[name]}: {value!r} is none.") from None
    if name in _SIZES and 0 < number < _LEAST_SIZE:
        raise InvalidRequest(f"{name}={value!r} is {format_bytes(number)} of memory: write a unit, as in '20GiB'.")
    return number


def _read(name: str, value: Any, parse: Callable[[str], float]) -> Any:
    """Return a quantity as a number, also if it is a text with a unit."""
    try:
        return parse(value) if isinstance(value, str) else value
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None


def _refuse_texts(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, str) and name in _NUMBERS and name not in _SIZES:
            raise InvalidRequest(f"{name} is a number{_NUMBERS[name]}: {value!r} is a text.")


def _acquired(allocator: Allocator, wait: float | None, strict: bool) -> Claim:
    try:
        return allocator.acquire(wait)
    except (NotEnoughGpus, BackendError) as error:
        if strict:
            raise
        warnings.warn(f"{error}\nGoing on with what there is.", RuntimeWarning, stacklevel=4)
        available = error.available if isinstance(error, NotEnoughGpus) else 0
    if available:
        with suppress(NotEnoughGpus):  # another job was quicker
            allocator.requests = (replace(allocator.requests[0], num_gpus=1, max_gpus=available),)
            return allocator.acquire()
    return Claim("none", (), ())


# What os.environ says of the claims of this process.


def _apply(own: OwnClaim) -> None:
    """Let os.environ name the devices of a claim."""
    environment = own.claim.environment()
    with _mutex:
        before = _written()
        if before is None:
            _outside.update({name: os.environ.get(name) for name in (*environment, *SHARE_VARIABLES)})
        else:  # values that the program itself has set since then also hold for its later claims
            now = {name: os.environ.get(name) for name in before}
            _outside.update({name: value for name, value in now.items() if value != before[name]})
        # Released claims are forgotten, because a server claims and releases for months.
        _made[:] = [made for made in _made if (made.claim.pass_fds or not made.claim.devices) and made is not own]
        _made.append(own)
        own.claim.on_release = _restore
        _keep_across_exec(own.claim)
        _write(environment, before or {})


def _keep_across_exec(claim: Claim) -> None:
    """Let this process keep *claim* as another program.  Children do not: subprocess closes what it is not given."""
    global _tells_children
    if not _tells_children:
        os.register_at_fork(after_in_child=_begin_child)
        _tells_children = True
    for descriptor in claim.pass_fds:
        os.set_inheritable(descriptor, True)


def _begin_child() -> None:  # pragma: no cover: runs in a forked child, where nothing is counted
    """Let a forked child have the claims of its parent until it ends or becomes another program."""
    global _mutex
    _mutex = threading.Lock()  # a thread of the parent, which does not exist here, may have held it
    for made in tuple(_made):
        made.claim.renew_mutex()
        for descriptor in made.claim.pass_fds:
            with suppress(OSError):  # the program closed it
                os.set_inheritable(descriptor, False)


def _restore(claim: Claim) -> None:
    """Set os.environ to what it would be without *claim*, except for variables that the program has set since.

    Threads may release their claims in any order.
    """
    with _mutex:
        if all(made.claim is not claim for made in _made):
            return
        _made[:] = [made for made in _made if made.claim is not claim]
        own = [made.claim for made in _made if made.pid == os.getpid()]
        left = [made for made in own if made.pass_fds or not made.devices]
        above, under = claim.environment(), left[-1].environment() if left else {}
        ours = {name for name in {*above, *under} if os.environ.get(name) == above.get(name, _outside.get(name))}
        _write(*({name: value for name, value in of.items() if name in ours} for of in (under, above)))


def _write(environment: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Put *environment* into os.environ in place of *before*.

    Variables that only *before* has get the values that they had before all claims.
    """
    for name, value in {**{name: _outside.get(name) for name in before}, **environment}.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _written() -> dict[str, str] | None:
    """Return what this process has written to os.environ itself, or None if the claim in there is not its own."""
    name = os.environ.get("GPUGUARD_CLAIM")
    own = (made.claim for made in _made if made.pid == os.getpid())
    return next((claim.environment() for claim in own if claim.id == name), None)


def _outer_environment() -> dict[str, str]:
    """Return os.environ without what own claims have put there, because a second claim is no part of the first.

    For a forked worker that is all of os.environ, because the worker takes its part of its parent's claim.
    """
    with _mutex:
        environ: dict[str, str | None] = dict(os.environ)
        own = _written() or {}
        environ |= {name: _outside[name] for name, value in own.items() if environ.get(name) == value}
    return {name: value for name, value in environ.items() if value is not None}


def _own_claims() -> list[OwnClaim]:
    """Return the claims that this very process has made and not released, the oldest first."""
    with _mutex:
        return [made for made in _made if made.pid == os.getpid() and made.claim.pass_fds]


def _claimed_before(asked: object, strict: bool) -> Claim | None:
    """Return the claim that an earlier call made for what is *asked* now, or None if there is none.

    Raises:
        AlreadyClaimed: an earlier call asked for something else.  Without *strict* this is a warning, and its claim
            will do.
        ClaimLost: the claim was released from outside, and CUDA does not know.
    """
    before = next((made for made in _own_claims() if made.asked is not None), None)
    if before is None:
        return None
    try:
        before.claim.reassert()
    except ClaimLost:
        before.claim.release()
        if cuda_runs():
            raise
        return None
    if before.asked != asked:
        text = (
            f"this process has {before.in_words()}.\n"
            "That was another request.  release() that claim first, or add further=True to have more beside it."
        )
        if strict:
            raise AlreadyClaimed(text, before.claim)
        warnings.warn(f"{text}\nGoing on with what there is.", RuntimeWarning, stacklevel=4)
    _apply(before)
    return before.claim


def _line_of_the_caller() -> str:
    """Return where the program called us: ``"train.py:12: claim = gpuguard.grab_gpus(1)"``."""
    frame = inspect.currentframe()
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("gpuguard", "contextlib"):
        frame = frame.f_back
    if frame is None:  # pragma: no cover: C called us, from no Python of the program's
        return "a program without a source"
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number, frame.f_globals).strip()
    return f"{os.path.basename(path)}:{number}" + (f": {text}" if text else "")


def notebook_note() -> str:
    """Return ``"notebook train.ipynb"``, or ``"notebook"`` if Jupyter does not tell its name.

    The command line of a Jupyter kernel names only the kernel.
    """
    path = os.environ.get("JPY_SESSION_NAME", "")  # set by jupyter-server >= 2
    return f"notebook {os.path.basename(path)}".strip()


def _lock_directory(directory: str | None, backend: str, *, make: bool = True) -> LockDirectory:
    return lock_directory(directory or os.environ.get("GPUGUARD_DIR") or None, backend=backend, make=make)


def _backend_name(backend: str | None, vendor: str | None = None) -> str:
    """Return the backend, by the names of its vendors where only *vendor* brings an integrated GPU in."""
    name = backend or default_backend()
    named = resolved(name, vendor)
    return name if named == resolved(name, None) else named


# The program around a claim: parts that run already and would not see the devices, or that have them already.

# A process that begins to compute opens one of them; one that only reads the driver does not.  dxg is that of WSL.
CUDA_DEVICES = (*filter(None, (vendor.compute_node for vendor in VENDORS.values())), "/dev/dxg")
# Words in the command lines of the processes that _BLIND names.
_FORERUNNERS = (b"multiprocessing.forkserver", b"loky.backend.popen_loky")
_LONGEST_ENVIRONMENT = 1 << 20  # bytes
_BLIND = (
    "the fork server of multiprocessing, or workers of joblib, run since before this claim: what is computed in a "
    "Pool, Process or Parallel() of theirs sees other GPUs.  Claim before the first of these, or use "
    'multiprocessing.get_context("spawn").'
)


def cuda_runs() -> bool:
    """Return whether CUDA is initialised in this process, so that it will see no other devices than it does now."""
    return any(read_link(f"/proc/self/fd/{number}") in CUDA_DEVICES for number in os.listdir("/proc/self/fd"))


def claim_of_the_script(driver: Backend, place: LockDirectory, environ: Mapping[str, str]) -> Claim | None:
    """Return the script's claim for a worker of the script that runs the same lines again, or None.

    It is None if this is no such worker, or if the script has no claim.  The returned claim excludes none of the other
    workers.  Lightning starts its ranks as commands, with LOCAL_RANK.
    """
    again = _runs_again()
    if not again and "LOCAL_RANK" not in environ:
        return None
    outer = outer_claim(place, environ)
    if outer is None or not (again or outer.pid == os.getppid()):
        return None
    devices = driver.sample({HEALTH, MEMORY, MODEL}).devices
    own = tuple(device for device in devices if device.uuid in outer.devices)
    claim = Claim(outer.id, own, (), memory=outer.memory)
    os.environ.update(claim.environment())
    return claim


def _runs_again() -> bool:
    """Return whether we are called by a script that multiprocessing runs once more to find a worker's task in it.

    It does so with "spawn" and "forkserver", the default of Python 3.14, under the name __mp_main__.
    """
    frame = inspect.currentframe()
    while frame:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False


def warn_of_workers(variable: str) -> None:
    """Warn if later workers will have another value of *variable*, that of a process started before the claim."""
    setting = f"{variable}={os.environ[variable]}".encode()
    for pid in own_children() or ():
        command = read_memory(pid, "cmdline") or b""
        if not any(word in command for word in _FORERUNNERS):
            continue
        environ = read_memory(pid, "environ", _LONGEST_ENVIRONMENT)  # nothing if the process has ended
        if environ and setting not in environ.split(b"\0"):
            warnings.warn(_BLIND, RuntimeWarning, stacklevel=4)
            return
