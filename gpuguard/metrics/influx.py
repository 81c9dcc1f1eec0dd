"""InfluxDB: its line protocol, and sending lines by POST.

Lines that could not be sent wait, within bounds, and go out with the next ones.  Lines that the server refused are not
sent again, because it would refuse them again.
"""

from __future__ import annotations

import re
import urllib.error
from collections import deque
from collections.abc import Iterable
from http.client import HTTPException
from urllib.parse import urlsplit

from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.metrics.exposition import format_number
from gpuguard.metrics.families import Labels, MetricFamily
from gpuguard.notify.targets import LOOPBACK
from gpuguard.notify.webhook import post
from gpuguard.sanitize import neutralise

# InfluxDB keeps the numbers of one subject in one line.
SUBJECTS = ("gpuguard_device_", "gpuguard_user_", "gpuguard_")
MAX_BATCHES = 120  # an hour at one per 30 s; the oldest are dropped first
TIMEOUT_SECONDS = 10.0
_MAX_ANSWER = 300  # characters that are shown
_MAX_READ = 8192  # bytes that are read, so many that no part of a token stands at the end of what is shown


def to_influx(families: Iterable[MetricFamily], host: str, time: float) -> list[str]:
    """Write values at the unix time *time* as lines of InfluxDB's protocol, one per subject, with *host* as a tag."""
    points: dict[tuple[str, Labels], list[str]] = {}
    for family in families:
        start = next(subject for subject in SUBJECTS if family.name.startswith(subject))
        for labels, value in family.values.items():
            tags = tuple(sorted({**dict(labels), "host": host}.items()))
            field = f"{family.name.removeprefix(start)}={format_number(value)}"
            points.setdefault((start.rstrip("_"), tags), []).append(field)
    nanoseconds = round(time * 1000) * 10**6  # a float of today's time has no more than microseconds anyway
    return [
        f"{measurement}{''.join(f',{_tag(name)}={_tag(value)}' for name, value in tags if value)} "
        f"{','.join(fields)} {nanoseconds}"
        for (measurement, tags), fields in points.items()
    ]


def _tag(text: str) -> str:
    r"""Write a tag with ``,``, ``=`` and blanks escaped.  A backslash at its end would escape what follows it."""
    one_line = neutralise(text)
    ending = len(one_line) - len(one_line.rstrip("\\"))
    return re.sub(r"([,= ])", r"\\\1", one_line[: len(one_line) - ending] + "/" * ending)


class InfluxClient:
    """Sends batches of lines to *url*.

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
        self._server = urlsplit(url).netloc
        self._batches: deque[bytes] = deque(maxlen=MAX_BATCHES)

    @property
    def waiting(self) -> int:
        """How many batches could not be sent yet."""
        return len(self._batches)

    def send(self, lines: list[str]) -> None:
        """Send the batches that wait, then *lines*, each batch with its own POST.

        Raises GpuguardError: a batch was refused and is lost, or could not be sent now and waits.
        """
        if lines:
            self._batches.append("\n".join(lines).encode("utf-8", "backslashreplace") + b"\n")
        while self._batches:
            refused = self._post(self._batches[0])
            self._batches.popleft()
            if refused:
                raise GpuguardError(f"{self._server} refuses what was sent: {refused}")

    def _post(self, body: bytes) -> str | None:
        """Send one batch; return why it was refused for good, or None.  Raises GpuguardError: it may be taken later."""
        headers = {"Content-Type": "text/plain; charset=utf-8", "User-Agent": "gpuguard"}
        if self._token:
            headers["Authorization"] = f"Token {self._token}"
        try:
            try:
                post(self._url, body, headers, self._timeout).close()
                return None
            except urllib.error.HTTPError as error:
                with error:
                    code, text = error.code, error.read(_MAX_READ).decode("utf-8", "replace")
        except HTTPException as error:
            raise GpuguardError(f"{self._server} answers nonsense: {type(error).__name__}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)  # of a URLError an OSError, mostly
            why = getattr(reason, "strerror", None) or reason
            raise GpuguardError(f"{self._server} cannot be reached: {why}") from None
        if self._token:
            text = text.replace(self._token, "(the token)")  # some servers repeat what they were sent
        answer = f"{code} {' '.join(text[:_MAX_ANSWER].split())}"
        if 400 <= code < 500 and code not in (408, 429):
            return answer
        raise GpuguardError(f"{self._server} answers {answer}")


def _check(url: str, token: str | None) -> None:
    advice = "write it like http://127.0.0.1:8086/write?db=gpuguard"
    no_address = f"{url!r} is no address: {advice}."
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InvalidRequest(f"--influx: {no_address}") from None
    is_address = parts.scheme in ("http", "https") and host and url.isascii() and url.isprintable() and " " not in url
    for is_fault, fault in (
        (not is_address, no_address),
        (parts.path in ("", "/"), f"the address must say which database: {advice}."),
        (parts.username is not None, "a password does not belong into an address: see --token-file."),
        (token and not (token.isascii() and token.isprintable()), "the token is more than one line of ASCII."),
        (token and parts.scheme == "http" and host not in LOOPBACK,
         "http:// would send the token in clear text: use https://."),
    ):  # fmt: skip
        if is_fault:
            raise InvalidRequest(f"--influx: {fault}")
