"""Every error that gpuguard raises, drawn as a tree.

    GpuguardError
    +-- InvalidRequest          an option, a unit or a name that cannot be understood   (also a ValueError)
    +-- BackendError            the devices cannot be read
    |   +-- DriverNotFound      no libnvidia-ml, or no driver behind it
    |   +-- DriverMismatch      library and kernel module are of different versions
    |   +-- DriverUnresponsive  a driver call did not come back in time
    |   +-- DriverPermission    the driver refuses this user
    +-- NotEnoughGpus           fewer devices than wanted can be had now
    |   +-- ImpossibleRequest   and waiting cannot change that
    |   +-- WaitTimeout         and the time to wait is over
    +-- ClaimError              claims cannot be made or kept
        +-- LockDirectoryError  the directory of the lock files cannot be trusted or used
        +-- ClaimLost           a device that this process held has another owner now
        +-- AlreadyClaimed      this process has devices from another call, and would take further ones
        +-- CudaInitialized     CUDA runs in this process already: too late to choose its devices

The message says what happened and what to do next; the facts behind it are attributes.  The exit codes stand here, too.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gpuguard.locale import translated
from gpuguard.locale.messages import all_of, sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.claims.claim import Claim
    from gpuguard.eligibility import Refusal

# The exit codes of commands.  Those of `run` beside the job's own begin at 75.
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_RUNNING = 3  # a daemon guards this machine already
EXIT_NO_DRIVER = 4
EXIT_NOT_NOW = 75  # EX_TEMPFAIL of sysexits.h
EXIT_TIMEOUT = 124  # as timeout(1)
EXIT_FAILED = 125  # gpuguard itself, as of env(1), timeout(1), docker run
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

CROWDED = sentence(
    "shortage.processes",
    "no further process or thread can be started here: see `ulimit -u`, TasksMax= of a service, and what runs "
    "(`ps -eLf`).",
)


def shortage(error: Exception) -> str | None:
    """What this machine or this user has run out of and what to look at, or None if *error* has another reason."""
    lacking = _shortage(error)
    return lacking and translated(lacking)


def _shortage(error: Exception) -> str | None:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        return sentence(
            "shortage.files",
            "no more than {most} files may be open here, which is too few: see `ulimit -n`, and raise it.",
            most=os.sysconf("SC_OPEN_MAX"),
        )
    if code == errno.ENFILE:
        return sentence(
            "shortage.files_of_machine",
            "this machine has no file left that could be opened: see /proc/sys/fs/file-nr, and what opens so many.",
        )
    if (code == errno.EAGAIN and error.args[1:] == (os.strerror(errno.EAGAIN),)) or "start new thread" in str(error):
        return CROWDED
    if code == errno.ENOLCK:
        return sentence(
            "shortage.locks",
            "the kernel gives no further lock now: see `free -h` and /proc/locks; of NFS, its service for locks.",
        )
    if code == errno.ENOMEM or isinstance(error, MemoryError):
        return sentence(
            "shortage.memory",
            "no memory is left for this: see `free -h`, `ulimit -v`, and the limit of your cgroup.",
        )
    return None


def passing(error: Exception) -> str | None:
    """The shortage that caused *error* and may be over at the next try, or None if it had another cause."""
    cause = error.__cause__ if isinstance(error, GpuguardError) else error
    return shortage(cause) if isinstance(cause, Exception) else None


class GpuguardError(Exception):
    """Base of every error that gpuguard raises on purpose."""


class InvalidRequest(GpuguardError, ValueError):
    """An option, a unit or a name that cannot be understood.

    Args:
        fault: what is wrong.
        hint: what to do instead, or "" if the fault says it.
    """

    def __init__(self, fault: str = "", hint: str = "") -> None:
        super().__init__(all_of((fault, hint), "\n") if hint else fault)
        self.fault, self.hint = fault, hint


class BackendError(GpuguardError):
    """The devices cannot be read."""


class DriverNotFound(BackendError):
    """There is no libnvidia-ml.so.1, or no driver behind it."""


class DriverMismatch(BackendError):
    """libnvidia-ml and the kernel module are of different versions.

    Args:
        library_version: of libnvidia-ml.so.1, or None if unknown.
        kernel_version: of the loaded kernel module, or None if unknown.
    """

    def __init__(self, message: str, library_version: str | None = None, kernel_version: str | None = None) -> None:
        super().__init__(message)
        self.library_version = library_version
        self.kernel_version = kernel_version


class DriverUnresponsive(BackendError):
    """A driver call did not come back in time."""


class DriverPermission(BackendError):
    """The driver refuses this user."""


class NotEnoughGpus(GpuguardError):
    """Fewer devices than wanted can be had now.  Nothing stays claimed.

    Args:
        headline: how many were wanted, and how many there are; a sentence.
        wanted: how many devices were asked for.
        available: how many could have been had.
        refused: the other devices, each with its reasons.
        reasons: lines that say what stands in the way.
        advice: what request could be met, or "".
        see: which command says more, or "".
    """

    def __init__(
        self,
        headline: str,
        wanted: int = 0,
        available: int = 0,
        refused: Sequence[Refusal] = (),
        *,
        reasons: Sequence[str] = (),
        advice: str = "",
        see: str = "",
    ) -> None:
        super().__init__(all_of((headline, *reasons, *filter(None, (advice, see))), "\n"))
        self.headline, self.reasons, self.advice, self.see = headline, tuple(reasons), advice, see
        self.wanted = wanted
        self.available = available
        self.refused = tuple(refused)
        self.brief = ""  # why a request waits, for one line of a terminal

    @classmethod
    def under(cls, headline: str, missing: NotEnoughGpus) -> NotEnoughGpus:
        """Make an error of this class with the facts of *missing* below another headline."""
        return cls(
            headline,
            missing.wanted,
            missing.available,
            missing.refused,
            reasons=missing.reasons,
            advice=missing.advice,
            see=missing.see,
        )


class ImpossibleRequest(NotEnoughGpus):
    """The request can never be met on this machine, however long it waits."""


class WaitTimeout(NotEnoughGpus):
    """The time to wait is over and there are still not enough devices."""

    @classmethod
    def after(cls, missing: NotEnoughGpus) -> NotEnoughGpus:
        """Make the error from the one that says what was still missing when the time was over."""
        return cls.under(
            sentence(
                "errors.time_is_over", "the time to wait is over.  At its end: {missing}", missing=missing.headline
            ),
            missing,
        )


class ClaimError(GpuguardError):
    """A claim cannot be made or kept."""


class LockDirectoryError(ClaimError):
    """The directory of the lock files cannot be trusted or used."""


class ClaimLost(ClaimError):
    """A device that this process held has another owner now."""


class AlreadyClaimed(ClaimError):
    """This process has devices from another call of grab_gpus().

    Args:
        claim: of that call.
    """

    def __init__(self, message: str, claim: Claim | None = None) -> None:
        super().__init__(message)
        self.claim = claim


class CudaInitialized(ClaimError):
    """CUDA runs in this process already, so CUDA_VISIBLE_DEVICES comes too late."""
