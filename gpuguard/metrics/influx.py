"""Numbers for InfluxDB, sent by POST: what could not be sent waits, within bounds, and goes out with the next.

Does not make the lines: see views.exposition.  Does not repeat what the server refused, since it would refuse it again.
"""

from __future__ import annotations

from collections import deque
from urllib.parse import urlsplit

from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.notify.webhook import LOOPBACK, posted

MOST_BATCHES = 120  # an hour at one per 30 s; the oldest go first
TIMEOUT_SECONDS = 10.0
_LONGEST_ANSWER = 300
_MOST_READ = 8192  # of which so much is told: no part of a token may stand at the end


class Outbox:
    """Batches of lines on their way to *url*.

    Args:
        url: where InfluxDB takes lines: http://127.0.0.1:8086/write?db=gpuguard, or /api/v2/write?org=..&bucket=..
        token: sent as "Authorization: Token ...".
        timeout: seconds that one POST may take.

    Raises:
        InvalidRequest: nothing can be sent there.
    """

    def __init__(self, url: str, token: str | None = None, timeout: float = TIMEOUT_SECONDS) -> None:
        _check(url, token)
        self._url, self._token, self._timeout = url, token, timeout
        self._batches: deque[bytes] = deque(maxlen=MOST_BATCHES)

    @property
    def waiting(self) -> int:
        """Batches that could not be sent yet."""
        return len(self._batches)

    def send(self, lines: list[str]) -> None:
        """Send *lines* and what waits before them, each batch with its own POST.

        Raises:
            GpuguardError: they were refused and are lost, or could not be sent now and wait.
        """
        if lines:
            self._batches.append("\n".join(lines).encode("utf-8", "backslashreplace") + b"\n")
        while self._batches:
            refused = self._post(self._batches[0])
            self._batches.popleft()
            if refused:
                raise GpuguardError(f"{self._place()} refuses what was sent: {refused}")

    def _post(self, body: bytes) -> str | None:
        """Send one batch; why it was refused for good.

        Raises:
            GpuguardError: it may be taken later.
        """
        from http.client import HTTPException

        headers = {"Content-Type": "text/plain; charset=utf-8", "User-Agent": "gpuguard"}
        if self._token:
            headers["Authorization"] = f"Token {self._token}"
        try:
            code, said = self._answer(body, headers)
        except HTTPException as error:
            raise GpuguardError(f"{self._place()} answers nonsense: {type(error).__name__}") from None
        except (OSError, ValueError) as error:
            raise GpuguardError(f"{self._place()} cannot be reached: {getattr(error, 'reason', error)}") from None
        if code is None:
            return None
        answer = f"{code} {' '.join(said.split())}"
        if 400 <= code < 500 and code not in (408, 429):
            return answer
        raise GpuguardError(f"{self._place()} answers {answer}")

    def _answer(self, body: bytes, headers: dict[str, str]) -> tuple[int | None, str]:
        """The code of a refusal, and what is said about it; None: it was taken."""
        import urllib.error

        try:
            posted(self._url, body, headers, self._timeout).close()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(_MOST_READ).decode("utf-8", "replace")
            if self._token:
                said = said.replace(self._token, "(the token)")  # some servers repeat what they were sent
            return error.code, said[:_LONGEST_ANSWER]
        return None, ""

    def _place(self) -> str:
        return urlsplit(self._url).netloc


def _check(url: str, token: str | None) -> None:
    advice = "write it like http://127.0.0.1:8086/write?db=gpuguard"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InvalidRequest(f"--influx: {url!r} is no address: {advice}.") from None
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidRequest(f"--influx: {url!r} is no address: {advice}.")
    if parts.path in ("", "/"):
        raise InvalidRequest(f"--influx: the address must say which database: {advice}.")
    if parts.username is not None:
        raise InvalidRequest("--influx: a password does not belong into an address: see --token-file.")
    if token is not None and (not token.isascii() or not token.isprintable()):
        raise InvalidRequest("--influx: the token is more than one line of ASCII.")
    if token and parts.scheme == "http" and host not in LOOPBACK:
        raise InvalidRequest("--influx: http:// would send the token in clear text: use https://.")
