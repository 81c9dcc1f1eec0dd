"""Webhook: a JSON POST.

    chat: {webhook: {url: https://chat.example.org/hook}}
    chat: {webhook: {url: {file: /etc/gpuguard/hook-url}, token: {env: HOOK_TOKEN}}}

The object has "schema", "subject", "text" (the body; many chat programs look for this name), "count", "facts" and
"further", the facts of findings that were joined to the first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from gpuguard.errors import InvalidRequest
from gpuguard.messages import Message
from gpuguard.notify.posting import LOOPBACK, posted
from gpuguard.notify.secret import Secret, Undelivered
from gpuguard.units import parse_duration


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
        if isinstance(self.url, str) and (fault := _fault(self.url, self.insecure)):
            raise InvalidRequest(f"url: {fault}")


def deliver(target: Webhook, message: Message) -> None:
    """Send *message* now.

    Raises:
        Undelivered: and why.
    """
    import urllib.error

    url = target.url if isinstance(target.url, str) else target.url.read()
    if fault := _fault(url, target.insecure):
        raise Undelivered(fault)  # says nothing of the address: it may be the secret
    headers = {"Content-Type": "application/json", "User-Agent": "gpuguard"}
    if target.token:
        headers["Authorization"] = f"Bearer {_header(target.token.read())}"
    try:
        posted(url, content(message), headers, target.timeout, target.ca_file).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise Undelivered(f"the web server answers {int(error.code)}") from None


def content(message: Message) -> bytes:
    """*message* as a JSON object in ASCII."""
    fields = {
        "schema": 1,
        "subject": message.subject,
        "text": message.body,
        "count": message.count,
        "facts": dict(message.facts),
        "further": [dict(facts) for facts in message.further],
    }
    return json.dumps(fields, allow_nan=False).encode("ascii")


def _fault(url: str, insecure: bool) -> str | None:
    if not (url.isascii() and url.isprintable()) or " " in url:
        return "an address has no blanks and nothing but ASCII: write other characters as %XX."
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "this is not an address: write it like https://chat.example.org/hook."
    if parts.scheme not in ("https", "http") or not host:
        return "this is not an address: write it like https://chat.example.org/hook."
    if parts.username is not None:
        return "a password does not belong into an address: use token: {file: PATH}."
    if parts.scheme == "http" and host not in LOOPBACK and not insecure:
        return "http:// sends the message in clear text: use https://, or add insecure: true."
    return None


def _header(token: str) -> str:
    if not token.isascii():
        raise Undelivered("the token has characters that a header cannot carry")
    return token
