"""Targets: where messages can go, each kind a frozen dataclass whose fields are the keys of policy files.

A secret (a password, a token, an address that holds one) is named by its place, read when a message goes out, and kept
and shown nowhere.  A target that is wrong in itself raises InvalidRequest when it is made; sender.problems() finds the
faults that only this machine can tell.  Sends nothing: see mail, webhook, programs.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from gpuguard.errors import InvalidRequest
from gpuguard.files import closed_after
from gpuguard.locale import N_, _, translated
from gpuguard.locale.messages import sentence
from gpuguard.units import parse_duration

LOOPBACK = ("localhost", "127.0.0.1", "::1")
USERS = re.compile(r"\$user|\{user\}")  # in an address: the name of the user whom the message is about
NAME = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}"  # of a user who can be written to
_ADDRESS = re.compile(rf"{NAME}(@[A-Za-z0-9][A-Za-z0-9.-]{{0,252}})?")
_MAX_SECRET = 4096  # bytes


class Undelivered(Exception):
    """A message could not be delivered; the text says why, without a word that came from outside."""


class Undeliverable(Undelivered):
    """The fault lies in this message and its recipient, not in the way there, so no second try would help."""


@dataclass(frozen=True)
class Secret:
    """The place of a secret, exactly one of the two.

    Args:
        file: root's or our own, mode 0400 or 0600, one line; 0440 if it is root's and of our group, as
            root:gpuguard for the service.
        env: a variable of the daemon's environment, such as GPUGUARD_SMTP_PASSWORD.
    """

    file: str = ""
    env: str = ""

    def __post_init__(self) -> None:
        if bool(self.file) == bool(self.env):
            raise InvalidRequest(_("a secret is {file: PATH} or {env: NAME}: write one of the two."))
        if self.file and not os.path.isabs(self.file):
            raise InvalidRequest(
                _("the file of a secret needs a path that starts with /, not {file!r}.").format(file=self.file)
            )

    def read(self) -> str:
        """Return the secret itself, without the end of its line.

        Raises Undelivered: it is not there, or others could have read or written it.
        """
        name = self.file or f"${self.env}"
        try:
            text = _read_private_file(self.file) if self.file else os.environ.get(self.env, "")
        except OSError as error:
            reason = str(error.strerror)
            why = sentence("secret.unread", "the secret {name} cannot be read: {reason}", name=name, reason=reason)
            raise Undelivered(why) from None
        text = text.rstrip("\r\n")
        if not text:
            raise Undelivered(sentence("secret.empty", "the secret {name} is empty or missing", name=name))
        if not text.isprintable():
            raise Undelivered(sentence("secret.lines", "the secret {name} is more than one line of text", name=name))
        return text


def _read_private_file(path: str) -> str:
    # O_NONBLOCK: a FIFO in that place must not hang us.  The checks are on what was opened, not on what the path names.
    with closed_after(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise Undelivered(
                sentence("secret.no_file", "the secret {name} is not an ordinary file with one name", name=path)
            )
        # Root gave a file to our group on purpose; our own file may be open to a group of everybody ("users").
        shared = 0o040 if os.geteuid() and status.st_uid == 0 and status.st_gid == os.getegid() else 0
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o077 & ~shared:
            raise Undelivered(
                sentence(
                    "secret.open",
                    "the secret {name} is open to others: chown root {name}; chmod 0400 {name}",
                    name=path,
                )
            )
        return os.read(descriptor, _MAX_SECRET).decode("utf-8", "replace")


@dataclass(frozen=True)
class Email:
    """Send an e-mail.

    Args:
        to: addresses; {user} or $user stands for the name of the user whom the message is about.
        from_: the sender's address; gpuguard@HOST when it is not given.
        server: SMTP server; without one the sendmail program is used.
        port: 587 for starttls, 465 for tls and 25 for none, unless it is given.
        security: starttls, tls, or none (then without a password, except to this machine itself).
        ca_file: certificates to trust instead of the system's.
        user: to log in as.
        password: {file: PATH} or {env: NAME}.
        sendmail: the program, when there is no server.
        timeout: how long an answer may take.
        language: of the message.
    """

    to: str | tuple[str, ...]
    from_: str = ""
    server: str = ""
    port: int = 0
    security: Literal["starttls", "tls", "none"] = "starttls"
    ca_file: str = ""
    user: str = ""
    password: Secret | None = None
    sendmail: str = "/usr/sbin/sendmail"
    timeout: Annotated[float, parse_duration] = 10.0
    language: Literal["en", "zh"] = "en"

    def __post_init__(self) -> None:
        for address in self.addresses:
            if not _ADDRESS.fullmatch(USERS.sub("user", address)):
                raise InvalidRequest(
                    _("{address!r} is not an address: write it like ops@example.org.").format(address=address)
                )
        for is_fault, fault in (
            (self.from_ and not _ADDRESS.fullmatch(self.from_),
             N_("{address!r} is not an address: write it like gpuguard@example.org.")),
            (bool(self.user) != (self.password is not None),
             N_("user and password go together: add the other one.")),
            (self.password and not self.server,
             N_("a password needs a server: add server: smtp.example.org.")),
            (self.password and self.security == "none" and self.server not in LOOPBACK,
             N_("a password would go out in clear text: use security: starttls.")),
            (not self.server and not self.sendmail.startswith("/"),
             N_("the sendmail program needs a path that starts with /, not {sendmail!r}.")),
            (not 0 <= self.port <= 65535,
             N_("{port} is not a port: write 1 to 65535.")),
        ):  # fmt: skip
            if is_fault:
                raise InvalidRequest(_(fault).format(address=self.from_, **vars(self)))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses in *to*, as they are written."""
        return (self.to,) if isinstance(self.to, str) else self.to

    @property
    def personal(self) -> bool:
        """Whether the addresses depend on the user; then no user may get a message about another one."""
        return any(USERS.search(address) for address in self.addresses)


@dataclass(frozen=True)
class Webhook:
    """Send a JSON object by POST.

    Args:
        url: https://...; or {file: PATH} or {env: NAME} where the address itself is a secret.
        token: sent as "Authorization: Bearer ...".
        ca_file: certificates to trust instead of the system's.
        insecure: allow http:// to another machine, too.
        timeout: how long an answer may take.
        language: of the message.
    """

    url: str | Secret
    token: Secret | None = None
    ca_file: str = ""
    insecure: bool = False
    timeout: Annotated[float, parse_duration] = 10.0
    language: Literal["en", "zh"] = "en"

    def __post_init__(self) -> None:
        if isinstance(self.url, str) and (fault := url_fault(self.url, insecure=self.insecure)):
            raise InvalidRequest(_("url: {fault}").format(fault=translated(fault)))


def url_fault(url: str, *, insecure: bool) -> str | None:
    """Say why no message can go to *url*, or return None; the address may be a secret, so the text does not show it."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        return sentence(
            "url.characters", "an address has no blanks and nothing but ASCII: write other characters as %XX."
        )
    try:
        parts = urlsplit(url)
        host, _port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("https", "http"):
        return sentence("url.no_address", "this is not an address: write it like https://chat.example.org/hook.")
    if parts.username is not None:
        return sentence("url.password", "a password does not belong into an address: use token: {file: PATH}.")
    if parts.scheme == "http" and host not in LOOPBACK and not insecure:
        return sentence(
            "url.clear_text", "http:// sends the message in clear text: use https://, or add insecure: true."
        )
    return None


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
            raise InvalidRequest(
                _("command: write a list that begins with a path, like [/usr/local/bin/tell, --urgent].")
            )
        if any("\0" in word for word in self.command):
            raise InvalidRequest(_("command: a word cannot hold a null character."))


@dataclass(frozen=True)
class Apprise:
    """Send through a chat or push service.

    Args:
        url: where the address of the service lies: {file: PATH} or {env: NAME}, because it holds the token.
        timeout: how long it may take.
        language: of the message.
    """

    url: Secret
    timeout: Annotated[float, parse_duration] = 30.0
    language: Literal["en", "zh"] = "en"


Target = Email | Webhook | Hook | Apprise

TARGETS: Mapping[str, type[Target]] = {"email": Email, "webhook": Webhook, "hook": Hook, "apprise": Apprise}
