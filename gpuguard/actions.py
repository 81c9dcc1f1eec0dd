"""Signals: the only file that sends any, and to others only through a pidfd.

A pid can be given to somebody else between a look and a kill; a pidfd keeps meaning the same process.
What is here is for our own job and for ourselves.  Does not decide whom or when: see run.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing costs 6 ms of import
if TYPE_CHECKING:
    from typing import NoReturn

SENT = "sent"
GONE = "gone"
NOT_PERMITTED = "not permitted"


def forward(pidfd: int, signum: int) -> str:
    """Send *signum* to a process of our own job; never raises for what that process did meanwhile.

    Args:
        pidfd: from os.pidfd_open, of a process that this one has started or adopted.
        signum: the signal.

    Returns:
        "sent", "gone" (it has ended), or "not permitted" (it changed its user, as sudo does).
    """
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        return NOT_PERMITTED
    return SENT


def stop_self() -> None:
    """Stop this process as Ctrl-Z does; comes back when somebody continues it."""
    signal.raise_signal(signal.SIGSTOP)


def die_of(signum: int) -> NoReturn:
    """End this process by *signum*, so that whoever waits for it sees that signal; runs no clean-up.

    A shell script stops at Ctrl-C only when its command died *of* SIGINT: an exit code of 130 lets it go on.
    """
    signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.raise_signal(signum)
    os._exit(128 + signum)
