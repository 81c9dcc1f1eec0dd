"""The only file that sends signals: to this process, to a process of our own job, and, by pidfd alone, to others.

A pid can be given to another process between a look and a kill; a pidfd keeps meaning the same process.
This module does not decide whom to signal or when: see run for our own jobs, and actions with its preflight for others.
"""

from __future__ import annotations

import os
import signal
from typing import Literal, NoReturn

CHECK_CLAIM = signal.SIGURG  # "read your claim again": ignored by every process that does not wait for it


def forward(pidfd: int, signum: int) -> Literal["sent", "gone", "not permitted"]:
    """Send *signum* to the process behind *pidfd*; never raises for what that process did meanwhile.

    Returns:
        "sent", "gone" (it has ended), or "not permitted" (it changed its user, as sudo does).
    """
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        return "not permitted"
    return "sent"


def stop_self(signum: int = signal.SIGSTOP) -> None:  # pragma: no cover: see die_of
    """Stop this process as Ctrl-Z does, and return when it is continued.

    SIGTSTP does not stop it where nothing could continue it: in a process group without a shell.
    """
    former = None if signum == signal.SIGSTOP else signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)
    if former is not None:
        signal.signal(signum, former)


def die_of(signum: int) -> NoReturn:  # pragma: no cover: what dies counts nothing; test_preflight sees it from outside
    """End this process by *signum*, so that its parent sees that signal, and without any clean-up.

    A shell script stops at Ctrl-C only when its command died *of* SIGINT: an exit code of 130 lets it go on.
    """
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.raise_signal(signum)
    os._exit(128 + signum)
