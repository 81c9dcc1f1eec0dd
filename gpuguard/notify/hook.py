"""Hook: a program of the administrator, with the message as JSON on its standard input.

    log: {hook: {command: [/usr/local/bin/tell, --urgent]}}

The command is run as it is written: no shell, and nothing of the message among its words.  In its environment are
GPUGUARD_SUBJECT, GPUGUARD_BODY and GPUGUARD_POLICY, _USER, _DEVICE_UUID ... for each fact that is known.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.errors import InvalidRequest
from gpuguard.notify.secrets import Undelivered
from gpuguard.notify.templates import Message
from gpuguard.notify.webhook import content
from gpuguard.units import parse_duration

_GRACE_SECONDS = 5.0  # for timeout to do its work


@dataclass(frozen=True)
class Hook:
    """Run a program.

    Args:
        command: its path, starting with /, and its words.
        user: to run it as, when gpuguard itself is root; else it runs as gpuguard does, but with no right of its own.
        timeout: when it is ended if it still runs, with all that it has started.
        language: of the message.
    """

    command: tuple[str, ...]
    user: str = "nobody"
    timeout: Annotated[float, parse_duration] = 30.0
    language: Literal["en", "zh"] = "en"

    def __post_init__(self) -> None:
        if not self.command or not os.path.isabs(self.command[0]):
            raise InvalidRequest("command: write a list that begins with a path, like [/usr/local/bin/tell, --urgent].")
        if any("\0" in word for word in self.command):
            raise InvalidRequest("command: a word cannot hold a null character.")


def deliver(target: Hook, message: Message) -> None:
    """Run the program now.

    Raises:
        Undelivered: and why.
    """
    import subprocess

    name, deadline = target.command[0], time.monotonic() + target.timeout
    # coreutils' timeout ends what the program has started, too: a script whose curl hangs would leave one each time.
    command = ["timeout", "-s", "KILL", f"{target.timeout:.3f}", *target.command]
    # Only root can become another user, and a service that could (CAP_SETUID) could become root as well.  So without
    # root the program runs as the service's user, from whom the daemon has taken all capabilities for its children:
    # it can signal nobody but that user's processes, and cannot look into the daemon, which has more rights than it.
    uid, gid = _identity(target.user)
    try:
        os.stat(name)
        ended = subprocess.run(
            command, input=content(message), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=target.timeout + _GRACE_SECONDS, check=False, cwd="/", env=_environment(message),
            start_new_session=True, user=uid, group=gid, extra_groups=None if uid is None else [],
        )  # fmt: skip
    except OSError as error:
        raise Undelivered(f"{name} cannot be run: {error.strerror}") from None
    if ended.returncode and time.monotonic() >= deadline:
        raise Undelivered(f"{name} was not done in time")
    if ended.returncode:
        raise Undelivered(f"{name} ends with status {ended.returncode}")


def problem(target: Hook) -> str | None:
    """What is wrong with the user as whom it would run."""
    if os.geteuid() != 0 and target.user != "nobody":
        return f"only root can run a program as {target.user!r}: it will run as gpuguard's own user"
    try:
        _identity(target.user)
    except Undelivered as error:
        return str(error)
    return None


def _identity(user: str) -> tuple[int | None, int | None]:
    if os.geteuid() != 0:
        return None, None
    import pwd

    try:
        found = pwd.getpwnam(user)
    except KeyError:
        raise Undelivered(f"there is no user {user!r} to run a hook as") from None
    return found.pw_uid, found.pw_gid


def _environment(message: Message) -> dict[str, str]:
    # Our own environment stays here: it may hold the secrets of other targets.
    known = {f"GPUGUARD_{name.upper()}": str(value) for name, value in message.facts if value is not None}
    own = {"GPUGUARD_SUBJECT": message.subject, "GPUGUARD_BODY": message.body, "GPUGUARD_COUNT": str(message.count)}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | known | own
