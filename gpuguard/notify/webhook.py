"""Webhooks: the message as a JSON object, by POST.

The object has "schema", "subject", "text" (the body; many chat programs look for this name), "count", "facts" and
"further", the facts of findings that were joined to the first.
"""

from __future__ import annotations

import json
import urllib.error
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from gpuguard.locale.messages import sentence
from gpuguard.notify.connections import connect, tls_context
from gpuguard.notify.targets import LOOPBACK, Undelivered, Webhook, url_fault
from gpuguard.notify.templates import Message


class _NoRedirects(HTTPRedirectHandler):
    """Treats a redirect as an error, because it would carry the token to wherever the answer says."""

    def redirect_request(self, *_: object) -> None:
        return None


class _BoundedHandler(HTTPHandler, HTTPSHandler):
    """Opens both kinds of connections, with bounds."""

    def __init__(self, timeout: float, ca_file: str) -> None:
        super().__init__()
        self._timeout, self._ca_file = timeout, ca_file

    def http_open(self, request: Request) -> HTTPResponse:
        return self.do_open(_bounded(HTTPConnection), request)

    def https_open(self, request: Request) -> HTTPResponse:
        context = tls_context(self._ca_file, self._timeout)
        return self.do_open(_bounded(HTTPSConnection), request, context=context)


def _bounded(kind: Any) -> Any:
    def make(*where: Any, **how: Any) -> HTTPConnection:
        connection: Any = kind(*where, **how)
        connection._create_connection = connect
        return connection  # type: ignore[no-any-return]

    return make


def post(url: str, body: bytes, headers: dict[str, str], timeout: float, ca_file: str = "") -> HTTPResponse:
    """Return the answer of *url*, which the caller must close; no proxy is used for this machine itself.

    Raises:
        urllib.error.HTTPError: the answer is no success, and neither is a redirect.
        OSError, http.client.HTTPException, ValueError: there is no answer, or it is nonsense.
    """
    proxy = ProxyHandler({} if urlsplit(url).hostname in LOOPBACK else None)
    opener = build_opener(proxy, _BoundedHandler(timeout, ca_file), _NoRedirects())
    answer: HTTPResponse = opener.open(Request(url, data=body, headers=headers, method="POST"), timeout=timeout)
    return answer


def deliver(target: Webhook, message: Message) -> None:
    """Send *message* now.  Raises Undelivered, which says why."""
    url = target.url if isinstance(target.url, str) else target.url.read()
    if fault := url_fault(url, insecure=target.insecure):
        raise Undelivered(fault)
    headers = {"Content-Type": "application/json", "User-Agent": "gpuguard"}
    if target.token:
        token = target.token.read()
        if not token.isascii():
            raise Undelivered(sentence("notify.bad_token", "the token has characters that a header cannot carry"))
        headers["Authorization"] = f"Bearer {token}"
    try:
        post(url, to_json(message), headers, target.timeout, target.ca_file).close()
    except urllib.error.HTTPError as error:
        error.close()
        code = int(error.code)
        raise Undelivered(sentence("notify.web_code", "the web server answers {code}", code=code)) from None


def to_json(message: Message) -> bytes:
    """Return *message* as a JSON object in ASCII."""
    fields = {
        "schema": 1,
        "subject": message.subject,
        "text": message.body,
        "count": message.count,
        "facts": dict(message.facts),
        "further": [dict(facts) for facts in message.further],
    }
    return json.dumps(fields, allow_nan=False).encode("ascii")
