"""E-mail: by SMTP when a server is named, else through the sendmail program of this machine.

ops: {email: {to: [ops@example.org, $user@example.org], server: smtp.example.org, user: gpuguard,
              password: {file: /etc/gpuguard/smtp-password}, language: zh}}
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from gpuguard.errors import InvalidRequest
from gpuguard.notify.connections import ConnectionLimits, connected, encrypting
from gpuguard.notify.secrets import Secret, Undeliverable, Undelivered
from gpuguard.notify.templates import Message
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    import smtplib
    from email.message import EmailMessage

_USER = "$user"
_LOCAL = r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}"
_ADDRESS = re.compile(rf"{_LOCAL}(@[A-Za-z0-9][A-Za-z0-9.-]{{0,252}})?")
_NAME = re.compile(_LOCAL)
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Email:
    """Send an e-mail.

    Args:
        to: addresses; $user stands for the name of the user whom the message is about.
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
            if not _ADDRESS.fullmatch(address.replace(_USER, "user")):
                raise InvalidRequest(f"{address!r} is not an address: write it like ops@example.org.")
        if self.from_ and not _ADDRESS.fullmatch(self.from_):
            raise InvalidRequest(f"{self.from_!r} is not an address: write it like gpuguard@example.org.")
        if bool(self.user) != (self.password is not None):
            raise InvalidRequest("user and password go together: add the other one.")
        if self.password and not self.server:
            raise InvalidRequest("a password needs a server: add server: smtp.example.org.")
        if self.password and self.security == "none" and self.server not in _LOOPBACK:
            raise InvalidRequest("a password would go out in clear text: use security: starttls.")
        if not self.server and not self.sendmail.startswith("/"):
            raise InvalidRequest(f"the sendmail program needs a path that starts with /, not {self.sendmail!r}.")
        if not 0 <= self.port <= 65535:
            raise InvalidRequest(f"{self.port} is not a port: write 1 to 65535.")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of *to*, as they are written."""
        return (self.to,) if isinstance(self.to, str) else self.to

    @property
    def personal(self) -> bool:
        """Whether the addresses depend on the user: then no user may get what is about another one."""
        return any(_USER in address for address in self.addresses)


def deliver(target: Email, message: Message) -> str | None:
    """Send *message* now; returns which addresses the server refused, None when it took all.

    Raises:
        Undelivered: and why.
    """
    recipients = _recipients(target, message.user)
    letter = _mail_message(target, message, recipients)
    return (_by_smtp if target.server else _by_sendmail)(target, letter, recipients)


def _recipients(target: Email, user: str | None) -> list[str]:
    # A user name can hold anything that a directory service lets in; what is no plain name gets no mail.
    plain = user if user and _NAME.fullmatch(user) else None
    found = [each.replace(_USER, plain or "") for each in target.addresses if plain or _USER not in each]
    if not found:
        raise Undeliverable("there is no user to write to")
    return found


def _mail_message(target: Email, message: Message, recipients: list[str]) -> EmailMessage:
    import email.policy
    from email.message import EmailMessage
    from email.utils import formatdate, make_msgid

    letter = EmailMessage(policy=email.policy.SMTP)
    letter["From"] = _sender(target)
    letter["To"] = ", ".join(recipients)
    # Neutral text has no line ends, and EmailMessage refuses them.  But it decodes the encoded words that it is given
    # (=?utf-8?q?=0ABcc:?=), and up to Python 3.12.4 writes their line ends as they are: headers, and another body.
    letter["Subject"] = message.subject.replace("=?", "= ?")
    letter["Date"] = formatdate(localtime=True)
    letter["Message-ID"] = make_msgid(domain="gpuguard.invalid")
    letter["Auto-Submitted"] = "auto-generated"  # no answers from holiday programs
    # Encoded here, because not every server takes eight bits.
    letter.set_content(message.body, cte="7bit" if _is_plain(message.body) else "base64")
    return letter


def _is_plain(body: str) -> bool:
    return body.isascii() and all(len(line) < 990 for line in body.split("\n"))


def _sender(target: Email) -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip("-.") or "localhost"
    return target.from_ or f"gpuguard@{host}"


def _by_smtp(target: Email, letter: EmailMessage, recipients: list[str]) -> str | None:
    import smtplib

    try:
        with _connected(target) as server:
            if target.password:
                server.login(target.user, target.password.read())
            refused = server.send_message(letter, _sender(target), recipients)
    except smtplib.SMTPRecipientsRefused as error:
        # A user without a mailbox will have none in a minute either; the admin's own address may be put right.
        lasts = target.personal and all(500 <= code < 600 for code, _ in error.recipients.values())
        raise (Undeliverable if lasts else Undelivered)("the mail server refuses every address") from None
    except smtplib.SMTPAuthenticationError:
        raise Undelivered("the mail server refuses user and password") from None
    except smtplib.SMTPResponseException as error:
        # The text of the answer stays out: it can repeat what we said, and that may be the password.
        raise Undelivered(f"the mail server answers {int(error.smtp_code)}") from None
    except smtplib.SMTPException as error:
        cause = error.__context__
        if isinstance(cause, OSError) and not isinstance(cause, smtplib.SMTPException):
            raise cause from None  # what happened to the connection: no word of the server's
        raise Undelivered(f"the mail server does not play along ({type(error).__name__})") from None
    return f"the mail server refuses {', '.join(sorted(refused))}" if refused else None


def _connected(target: Email) -> smtplib.SMTP:
    import smtplib
    import ssl

    port, limits = target.port or _PORTS[target.security], ConnectionLimits(target.timeout)

    class PlainSmtp(smtplib.SMTP):
        def _get_socket(self, host: str, port: int, _: float) -> socket.socket:
            return connected(host, port, limits)

    class EncryptedSmtp(smtplib.SMTP_SSL, PlainSmtp):
        pass

    if target.security == "none":
        return PlainSmtp(target.server, port, timeout=target.timeout)
    trusted = encrypting(ssl.create_default_context(cafile=target.ca_file or None), limits)
    if target.security == "tls":
        return EncryptedSmtp(target.server, port, timeout=target.timeout, context=trusted)
    server = PlainSmtp(target.server, port, timeout=target.timeout)
    try:
        server.starttls(context=trusted)  # raises when the server has none: nothing goes out in clear text
    except (OSError, ValueError):
        server.close()
        raise
    return server


def _by_sendmail(target: Email, letter: EmailMessage, recipients: list[str]) -> None:
    import subprocess

    command = [target.sendmail, "-i", "-f", _sender(target), "--", *recipients]
    ended = subprocess.run(
        command, input=letter.as_bytes(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        timeout=target.timeout, check=False, cwd="/", env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    if ended.returncode:
        lasts = target.personal and ended.returncode == os.EX_NOUSER
        raise (Undeliverable if lasts else Undelivered)(f"{target.sendmail} ends with status {ended.returncode}")
