"""A mount namespace in which some device nodes do not exist, built by bubblewrap for an ordinary user.

bubblewrap starts a shell in there that says its pid and waits; this process opens the two namespaces of that shell and
lets it end.  The job enters them by setns() just before exec, so that no bubblewrap stands between us and the job: it
would die of a Ctrl-C that the job survives, and would not pass signals on.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator

from gpuguard.errors import GpuguardError

_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)


def check() -> None:
    """Whether this user can have namespaces here.

    Raises:
        GpuguardError: no; the message says what to do.
    """
    for descriptor in _build(["--dev-bind", "/", "/"]):
        os.close(descriptor)


def prepare(hidden: Collection[str], dev: str) -> tuple[Callable[[], None], Callable[[], None]]:
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
