"""One POST: where no redirect is followed, and no answer is waited for, or read, without end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuguard.notify.limited import Limits, connected, encrypting

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.request import HTTPRedirectHandler, OpenerDirector

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def posted(url: str, body: bytes, headers: dict[str, str], timeout: float, ca_file: str = "") -> HTTPResponse:
    """The answer of *url*, to be closed; no proxy is asked for this machine itself.

    Raises:
        urllib.error.HTTPError: it answers with no success, which a redirect is not either.
        OSError, http.client.HTTPException, ValueError: it does not answer, or with nonsense.
    """
    from urllib.parse import urlsplit
    from urllib.request import ProxyHandler, Request

    opener = _opener(ProxyHandler({} if urlsplit(url).hostname in LOOPBACK else None), Limits(timeout), ca_file)
    answer: HTTPResponse = opener.open(Request(url, data=body, headers=headers, method="POST"), timeout=timeout)
    return answer


def _opener(proxy: object, limits: Limits, ca_file: str) -> OpenerDirector:
    import ssl
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.request import HTTPHandler, HTTPSHandler, build_opener

    def connection(address: tuple[str, int], *_: object) -> Any:
        return connected(*address, limits)

    class Plain(HTTPConnection):
        def __init__(self, *where: Any, **how: Any) -> None:
            super().__init__(*where, **how)
            self._create_connection = connection

    class Encrypted(HTTPSConnection):
        def __init__(self, *where: Any, **how: Any) -> None:
            super().__init__(*where, **how)
            self._create_connection = connection

    class Http(HTTPHandler):
        def http_open(self, request: Any) -> Any:
            return self.do_open(Plain, request)

    class Https(HTTPSHandler):
        def https_open(self, request: Any) -> Any:
            trusted = encrypting(ssl.create_default_context(cafile=ca_file or None), limits)
            return self.do_open(Encrypted, request, context=trusted)

    return build_opener(proxy, Http(), Https(), _no_redirects())  # type: ignore[arg-type]


def _no_redirects() -> HTTPRedirectHandler:
    """A redirect would carry the token to wherever the answer says: it counts as an error."""
    from urllib.request import HTTPRedirectHandler

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    return NoRedirects()
