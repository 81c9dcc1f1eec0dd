"""Webhook: a JSON POST.

    chat: {webhook: {url: https://chat.example.org/hook}}
    chat: {webhook: {url: {file: /etc/gpuguard/hook-url}, token: {env: HOOK_TOKEN}}}

The object has "schema", "subject", "text" (the body; many chat programs look for this name), "count", "facts" and
"further", the facts of findings that were joined to the first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gpuguard.errors import InvalidRequest
from gpuguard.notify.connections import ConnectionLimits, connected, encrypting
from gpuguard.notify.secrets import Secret, Undelivered
from gpuguard.notify.templates import Message
from gpuguard.units import parse_duration

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.request import HTTPRedirectHandler, OpenerDirector

# One POST: where no redirect is followed, and no answer is waited for, or read, without end.


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def posted(url: str, body: bytes, headers: dict[str, str], timeout: float, ca_file: str = "") -> HTTPResponse:
    """The answer of *url*, to be closed; no proxy is asked for this machine itself.

    Raises:
        urllib.error.HTTPError: it answers with no success, which a redirect is not either.
        OSError, http.client.HTTPException, ValueError: it does not answer, or with nonsense.
    """
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, Request

    opener = _opener(
        ProxyHandler({} if urlsplit(url).hostname in LOOPBACK else None), ConnectionLimits(timeout), ca_file
    )
    answer: HTTPResponse = opener.open(Request(url, data=body, headers=headers, method="POST"), timeout=timeout)
    return answer


def _opener(proxy: object, limits: ConnectionLimits, ca_file: str) -> OpenerDirector:
    import ssl
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.request import HTTPHandler, HTTPSHandler, build_opener

    def connection(address: tuple[str, int], *_: object) -> Any:
        return connected(*address, limits)

    class PlainHttp(HTTPConnection):
        def __init__(self, *where: Any, **how: Any) -> None:
            super().__init__(*where, **how)
            self._create_connection = connection

    class EncryptedHttp(HTTPSConnection):
        def __init__(self, *where: Any, **how: Any) -> None:
            super().__init__(*where, **how)
            self._create_connection = connection

    class Http(HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(PlainHttp, request)

    class Https(HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            trusted = encrypting(ssl.create_default_context(cafile=ca_file or None), limits)
            return self.do_open(EncryptedHttp, request, context=trusted)

    return build_opener(proxy, Http(), Https(), _no_redirects())  # type: ignore[arg-type]


def _no_redirects() -> HTTPRedirectHandler:
    """A redirect would carry the token to wherever the answer says: it counts as an error."""
    from urllib.request import HTTPRedirectHandler

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    return NoRedirects()


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
