"""Starting a program as if nothing stood before it: its signals, its exit code, its error messages.

As a child, or in place of this process.  Does not watch it afterwards: see run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from typing import TYPE_CHECKING

from gpuguard.jobs.drain import patiently

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

EXIT_FAILED = 125  # of gpuguard itself
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def callers_variables() -> dict[str, str]:
    """os.environ without LC_CTYPE where only this interpreter has set it (PEP 538), as in cron, which has no locale."""
    variables = dict(os.environ)
    if variables.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8"):
        try:
            with open("/proc/self/environ", "rb") as came:  # what exec brought along: setenv() does not reach it
                if b"\0LC_CTYPE=" not in b"\0" + came.read():
                    del variables["LC_CTYPE"]
        except OSError:  # hidden: it does no harm
            pass
    return variables


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    blocked: Collection[int],
    enter: Callable[[], None] | None = None,
) -> tuple[int, int]:
    """Fork and exec.

    Args:
        command: program and arguments.
        environment: all of it.
        pass_fds: descriptors that the program inherits.
        blocked: signals that are blocked here from before the fork on; the program does not see that.
        enter: called in the new process; puts it into its namespaces or cgroup.

    Returns:
        Its pid, and a descriptor from which the errno of a failed exec can be read, as a number in ASCII.
    """
    report, child_report = patiently(os.pipe)  # a user who has waited for hours shall not lose the devices for that
    # An ignored SIGCHLD would make the kernel reap the job and keep its exit status to itself.
    children_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid: int = patiently(os.fork)
    if pid == 0:
        try:
            if children_ignored:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.write(child_report, b"%d" % execute(command, environment, pass_fds, mask, enter))
        finally:
            os._exit(EXIT_NOT_FOUND)
    os.close(child_report)
    return pid, report


def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    mask: Collection[int] | None = None,
    enter: Callable[[], None] | None = None,
) -> int:
    """Exec with the signal dispositions that this process was started with; returns the errno when that fails."""
    # Python ignores SIGPIPE and SIGXFSZ from its start on; whatever else is ignored was inherited (nohup) and stays so.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would swallow a Ctrl-C between here and exec
    try:
        for descriptor in pass_fds:
            os.set_inheritable(descriptor, True)
        if enter is not None:
            _enter(enter)
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not command[0]:
            return errno.ENOENT
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        return error.errno or errno.EINVAL


def _enter(enter: Callable[[], None]) -> None:
    """Enter, or end: a job that was to be isolated is never started without it."""
    try:
        enter()
    except OSError as error:
        os.write(2, f"gpuguard: the job could not be isolated ({error.strerror}), so it was not started.\n".encode())
        os._exit(EXIT_FAILED)


def failure(program: str, code: int) -> tuple[int, str]:
    """Exit code and message for a *program* that could not be started, as a shell has them."""
    if code == errno.ENOENT and os.path.isfile(program) and "/" not in program:
        how = f"python {program}" if program.endswith(".py") else f"./{program}"
        return EXIT_NOT_FOUND, f"{program}: command not found in PATH, but here.  Write `gpuguard run ... -- {how}`."
    if code == errno.ENOENT and "/" in program and os.path.exists(program):
        return EXIT_NOT_FOUND, f"{program}: the interpreter that its first line names does not exist."
    if code in (errno.ENOENT, errno.ENOTDIR) and " " in program.strip():
        advice = "Leave out the quotes around the command; where it needs a shell: sh -c '...'."
        return EXIT_NOT_FOUND, f"{program}: command not found.  {advice}"
    if code == errno.ENOENT and program.partition("=")[0].isidentifier() and "=" in program:
        return EXIT_NOT_FOUND, f"{program}: command not found.  To set a variable: env {program} CMD."
    if code in (errno.ENOENT, errno.ENOTDIR):
        return EXIT_NOT_FOUND, f"{program or repr(program)}: command not found.  Is it installed, and in PATH?"
    reason = os.strerror(code)
    if code == errno.ENOEXEC:
        return EXIT_NOT_EXECUTABLE, f"{program}: {reason}.  A script needs a first line such as #!/bin/sh."
    if code == errno.EACCES and program.endswith(".py"):
        return EXIT_NOT_EXECUTABLE, f"{program}: {reason}.  Write `gpuguard run ... -- python {program}`."
    if code == errno.EACCES and os.path.isdir(program):
        return EXIT_NOT_EXECUTABLE, f"{program}: it is a directory, not a program."
    if code == errno.EACCES:
        return EXIT_NOT_EXECUTABLE, f"{program}: {reason}.  `chmod +x` makes a file a program."
    return EXIT_NOT_EXECUTABLE, f"{program}: {reason}."


def become_subreaper() -> None:
    """Adopt what the job leaves behind, so that a process that outlives it can be seen and waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
