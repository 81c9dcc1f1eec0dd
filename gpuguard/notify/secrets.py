"""Secrets: where a password or a token lies.  It is read when a message goes out, and is kept and shown nowhere.

password: {file: /etc/gpuguard/smtp-password}     root's or our own, mode 0400 or 0600, one line; 0440 if it is root's
                                                  and of our group, as root:gpuguard for the service
password: {env: GPUGUARD_SMTP_PASSWORD}           of the daemon's environment
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from gpuguard.errors import InvalidRequest

_LONGEST = 4096


class Undelivered(Exception):
    """A message could not be delivered; the text says why, without a word that came from outside.

    It never leaves this drawer: the sender makes an Event of it.
    """


class Undeliverable(Undelivered):
    """It is about this message and whom it would go to, and not about the way there: no second try would help."""


@dataclass(frozen=True)
class Secret:
    """The place of a secret: exactly one of the two."""

    file: str = ""
    env: str = ""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.env):
            raise InvalidRequest("a secret is {file: PATH} or {env: NAME}: write one of the two.")
        if self.file and not os.path.isabs(self.file):
            raise InvalidRequest(f"the file of a secret needs a path that starts with /, not {self.file!r}.")

    def read(self) -> str:
        """The secret itself, without the end of its line.

        Raises:
            Undelivered: it is not there, or others could have read or written it.
        """
        found = _of_file(self.file) if self.file else os.environ.get(self.env, "")
        found = found.rstrip("\r\n")
        if not found:
            raise Undelivered(f"the secret {self._name()} is empty or missing")
        if not found.isprintable():
            raise Undelivered(f"the secret {self._name()} is more than one line of text")
        return found

    def _name(self) -> str:
        return self.file or f"${self.env}"


def _of_file(path: str) -> str:
    # O_NONBLOCK: a FIFO in that place must not hang us.  The checks are on what was opened, not on what the path names.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Undelivered(f"the secret {path} cannot be read: {error.strerror}") from None
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
            raise Undelivered(f"the secret {path} is not an ordinary file with one name")
        # Root gave it to our group on purpose; one's own file may be open to a group of everybody ("users").
        shared = 0o040 if os.geteuid() and seen.st_uid == 0 and seen.st_gid == os.getegid() else 0
        if seen.st_uid not in (0, os.geteuid()) or seen.st_mode & 0o077 & ~shared:
            raise Undelivered(f"the secret {path} is open to others: chown root {path}; chmod 0400 {path}")
        return os.read(descriptor, _LONGEST).decode("utf-8", "replace")
    except OSError as error:
        raise Undelivered(f"the secret {path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
