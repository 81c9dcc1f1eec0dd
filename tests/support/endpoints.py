"""A mail server and a web server on loopback, which keep what they got.

with a_mail_server() as server:        server.port, server.letters, server.logins
with a_web_server(status=503) as web:  web.url, web.requests
"""

import base64
import http.server
import shutil
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot

from gpuguard.model import Finding, Subject, Verdict
from gpuguard.notify.targets import Email, Secret
from gpuguard.notify.templates import message_for
from gpuguard.policies.rules import RULES


@dataclass
class Letter:
    """What arrived: the envelope, and the letter in it."""

    sender: str
    recipients: list[str]
    raw: bytes
    encrypted: bool

    @property
    def content(self) -> EmailMessage:
        read = message_from_bytes(self.raw, policy=policy.default)
        assert isinstance(read, EmailMessage)
        return read

    @property
    def body(self) -> str:
        return str(self.content.get_content()).replace("\r\n", "\n")


@dataclass
class MailServer:
    """How it behaves, and what it got."""

    port: int = 0
    context: ssl.SSLContext | None = None  # then it offers STARTTLS
    password: str | None = None  # then it wants a login
    answers: dict[str, str] = field(default_factory=dict)  # by command: an answer instead of the ordinary one
    letters: list[Letter] = field(default_factory=list)
    logins: list[bytes] = field(default_factory=list)


@contextmanager
def a_mail_server(**behaviour: Any) -> Iterator[MailServer]:
    """An SMTP server on a free port of 127.0.0.1."""
    mail = MailServer(**behaviour)

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with ExitStack() as stack:
                _smtp(self, mail, stack)

    with _serving(_Server(("127.0.0.1", 0), Session)) as port:
        mail.port = port
        yield mail


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *_: object) -> None:
        """A client that goes away is no news."""


def _smtp(session: socketserver.StreamRequestHandler, mail: MailServer, stack: ExitStack) -> None:
    read: Any = session.rfile
    write: Any = session.wfile
    letter = Letter("", [], b"", False)
    write.write(b"220 test\r\n")
    while line := read.readline():
        words = line.decode("ascii").split() or [""]
        command = words[0].upper()
        if command == "STARTTLS" and mail.context:
            write.write(b"220 go\r\n")
            connection = stack.enter_context(mail.context.wrap_socket(session.connection, server_side=True))
            read = stack.enter_context(connection.makefile("rb"))
            write = stack.enter_context(connection.makefile("wb", 0))
            letter.encrypted = True
            continue
        if command == "DATA" and command not in mail.answers:
            write.write(b"354 go\r\n")
            letter.raw = _until_the_dot(read)
            mail.letters.append(letter)
        write.write((mail.answers.get(command) or _answer(mail, letter, command, words)).encode() + b"\r\n")
        if command == "QUIT":
            return


def _answer(mail: MailServer, letter: Letter, command: str, words: list[str]) -> str:
    if command == "EHLO":
        offers = ["STARTTLS"] if mail.context and not letter.encrypted else []
        offers += ["AUTH PLAIN"] if mail.password else []
        return "\r\n".join([*(f"250-{offer}" for offer in ["test", *offers]), "250 8BITMIME"])
    if command == "AUTH":
        mail.logins.append(base64.b64decode(words[2]))
        right = mail.logins[-1].endswith(b"\0" + (mail.password or "").encode())
        return "235 fine" if right else f"535 wrong: {mail.logins[-1]!r}"
    if command == "MAIL":
        letter.sender = words[1][6:-1]
    if command == "RCPT":
        if "nobody" in words[1]:
            return "550 no such user"
        letter.recipients.append(words[1][4:-1])
    return "221 bye" if command == "QUIT" else "250 ok"


def _until_the_dot(read: Any) -> bytes:
    lines = []
    while (line := read.readline()) not in (b".\r\n", b""):
        lines.append(line.removeprefix(b"."))
    return b"".join(lines)


@dataclass
class WebServer:
    """How it behaves, and what it got."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    hold: threading.Event | None = None  # it does not answer before this is set
    context: ssl.SSLContext | None = None  # then it speaks TLS


@contextmanager
def a_web_server(**behaviour: Any) -> Iterator[WebServer]:
    """An HTTP server on a free port of 127.0.0.1."""
    web = WebServer(**behaviour)

    class Request(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            web.requests.append((dict(self.headers), body))
            if web.hold:
                web.hold.wait(60)
            self.send_response(web.status)
            for name, value in web.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    server = _Server(("127.0.0.1", 0), Request)
    if web.context:
        server.socket = web.context.wrap_socket(server.socket, server_side=True)
    with _serving(server) as port:
        web.url = f"http://127.0.0.1:{port}/hook"
        yield web
        if web.hold:
            web.hold.set()


@contextmanager
def _serving(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def a_certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that nobody has signed, and a server's context with it."""
    if not shutil.which("openssl"):
        pytest.skip("servers with a certificate (no openssl: apt-get install openssl)")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return certificate, context


HOSTILE = [
    "; touch /tmp/x #",
    "a\nBcc: eve@example.org",
    "a\r\n\r\n.",
    "=?utf-8?q?x=0ABcc=3A_eve=40example.org?=",
    "=?utf-8?q?x=0D=0A=0D=0Aanother=20body?=",
    "=?utf-8?b?G1sySg==?=",
    "\x1b[2J",
    "\u202eexe",
    "%s%n",
    "${host}",
    "$why",
]
PASSWORD = "correct-horse-battery"


def a_verdict(process=None, **fields):
    process = process or a_process(pid=4711)
    subject = Subject("process", a_device(3).uuid, process.pid, process.start_time, process.uid, user=process.user)
    rule = RULES.get(name := fields.pop("rule", "idle"))
    finding = Finding(name, subject, fields.pop("why", "utilization is 0%"), (process,))
    facts = {
        "kind": rule and rule.kind,
        "policy": "idle-gpus",
        "action": "notify",
        "step": 1,
        "since": 10_000.0 - 7200,
        "enforce": True,
    }
    return Verdict(finding=finding, **{**facts, **fields})


def a_message(language="en", **fields):
    return message_for(a_verdict(**fields), a_snapshot(a_device(3)), language)


def a_secret(tmp_path, text=PASSWORD, mode=0o400):
    path = tmp_path / "secret"
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return Secret(file=str(path))


def a_script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def by_smtp(server, to="ops@example.org", **fields):
    return Email(to, server="127.0.0.1", port=server.port, **{"security": "none"} | fields)


def a_fake_apprise(tmp_path, monkeypatch, answer="True"):
    place = tmp_path / "packages" / "apprise"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"""
import json
class NotifyFormat:
    TEXT = "text"
class Apprise:
    def add(self, url):
        self.url = url
        return url.startswith("chat://")
    def notify(self, **said):
        json.dump([self.url, said], open({str(tmp_path / "said")!r}, "w"))
        open({str(tmp_path / "command")!r}, "w").write(open("/proc/self/cmdline").read())
        print("leak", self.url)
        return {answer}
""")
    monkeypatch.syspath_prepend(str(place.parent))
