"""E-mail: by SMTP when a server is named, else through the sendmail program of this machine."""

from __future__ import annotations

import email.policy
import os
import re
import smtplib
import socket
import subprocess
from email.message import EmailMessage
from email.utils import formatdate, make_msgid

from gpuguard.locale.messages import all_of, sentence
from gpuguard.notify.connections import connect, tls_context
from gpuguard.notify.targets import NAME, USERS, Email, Undeliverable, Undelivered
from gpuguard.notify.templates import Message

_PORTS = {"starttls": 587, "tls": 465, "none": 25}


def deliver(target: Email, message: Message) -> str | None:
    """Send *message* now; return which addresses the server refused, or None if it took all.

    Raises Undelivered, which says why.
    """
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname()).strip("-.") or "localhost"
    sender = target.from_ or f"gpuguard@{host}"
    # A directory service may let anything into a user name, so a name that is not plain gets no mail.
    name = message.user if message.user and re.fullmatch(NAME, message.user) else None
    recipients = [USERS.sub(name or "", address) for address in target.addresses if name or not USERS.search(address)]
    if not recipients:
        raise Undeliverable(sentence("notify.no_user", "there is no user to write to"))
    mail = _mail_message(message, sender, recipients)
    if target.server:
        return _send_by_smtp(target, mail, sender, recipients)
    command = [target.sendmail, "-i", "-f", sender, "--", *recipients]
    try:
        ended = subprocess.run(
            command, input=mail.as_bytes(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=target.timeout, check=False, cwd="/", env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )  # fmt: skip
    except OSError as error:
        what = sentence("notify.cannot_run", "{program} cannot be run", program=target.sendmail)
        raise Undelivered(all_of((what, str(error.strerror)), ": ")) from None
    if ended.returncode:
        lasts = target.personal and ended.returncode == os.EX_NOUSER
        raise (Undeliverable if lasts else Undelivered)(
            sentence(
                "notify.ends_with",
                "{program} ends with status {status}",
                program=target.sendmail,
                status=ended.returncode,
            )
        )
    return None


def _mail_message(message: Message, sender: str, recipients: list[str]) -> EmailMessage:
    mail = EmailMessage(policy=email.policy.SMTP)
    mail["From"] = sender
    mail["To"] = ", ".join(recipients)
    # Neutral text has no line ends, and EmailMessage refuses them.  But it decodes the encoded words that it is given
    # (=?utf-8?q?=0ABcc:?=), and up to Python 3.12.4 it writes their line ends as they are, which would add headers and
    # another body.
    mail["Subject"] = message.subject.replace("=?", "= ?")
    mail["Date"] = formatdate(localtime=True)
    mail["Message-ID"] = make_msgid(domain="gpuguard.invalid")
    mail["Auto-Submitted"] = "auto-generated"  # no answers from holiday programs
    # The body is encoded here, because not every server takes eight bits, or long lines.
    plain = message.body.isascii() and all(len(line) < 990 for line in message.body.split("\n"))
    mail.set_content(message.body, cte="7bit" if plain else "base64")
    return mail


def _send_by_smtp(target: Email, mail: EmailMessage, sender: str, recipients: list[str]) -> str | None:
    try:
        with _connected(target) as server:
            if target.password:
                server.login(target.user, target.password.read())
            refused = server.send_message(mail, sender, recipients)
    except smtplib.SMTPRecipientsRefused as error:
        # A user without a mailbox will have none in a minute either; the admin's own address may be put right.
        lasts = target.personal and all(500 <= code < 600 for code, _ in error.recipients.values())
        why = sentence("notify.all_refused", "the mail server refuses every address")
        raise (Undeliverable if lasts else Undelivered)(why) from None
    except smtplib.SMTPAuthenticationError:
        raise Undelivered(sentence("notify.no_login", "the mail server refuses user and password")) from None
    except smtplib.SMTPResponseException as error:
        # The text of the answer stays out: it can repeat what we said, and that may be the password.
        code = int(error.smtp_code)
        raise Undelivered(sentence("notify.mail_code", "the mail server answers {code}", code=code)) from None
    except smtplib.SMTPException as error:
        cause = error.__context__
        if isinstance(cause, OSError) and not isinstance(cause, smtplib.SMTPException):
            raise cause from None  # it says what happened to the connection, without a word of the server's
        kind = type(error).__name__
        why = sentence("notify.mail_nonsense", "the mail server does not play along ({kind})", kind=kind)
        raise Undelivered(why) from None
    addresses = ", ".join(sorted(refused))
    return sentence("notify.refused", "the mail server refuses {addresses}", addresses=addresses) if refused else None


class _Smtp(smtplib.SMTP):
    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        return connect((host, port), timeout)


class _EncryptedSmtp(smtplib.SMTP_SSL, _Smtp):
    pass


def _connected(target: Email) -> smtplib.SMTP:
    port = target.port or _PORTS[target.security]
    if target.security == "tls":
        context = tls_context(target.ca_file, target.timeout)
        return _EncryptedSmtp(target.server, port, timeout=target.timeout, context=context)
    server = _Smtp(target.server, port, timeout=target.timeout)
    if target.security == "none":
        return server
    try:
        # Raises if the server has no TLS, so that nothing goes out in clear text.
        server.starttls(context=tls_context(target.ca_file, target.timeout))
    except (OSError, ValueError):
        server.close()
        raise
    return server
