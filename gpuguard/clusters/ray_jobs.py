"""Ray's job API: submit a command, follow it, stop it.  Ray's own client speaks with it; its errors end here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gpuguard.errors import BackendError, GpuguardError, InvalidRequest

T = TypeVar("T")

PENDING, RUNNING, SUCCEEDED, FAILED, STOPPED = "PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"
OVER = frozenset({SUCCEEDED, FAILED, STOPPED})
TOKENS = "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, else ~/.ray/auth_token (`ray get-auth-token` shows it)"


class State(NamedTuple):
    """What has become of a job."""

    status: str
    exit_code: int | None  # of the command; -N when signal N ended it
    message: str

    @property
    def is_over(self) -> bool:
        """Whether it has ended, however that came."""
        return self.status in OVER


class Jobs:
    """A connection with the job API."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, job: dict[str, object]) -> None:
        """Submit it, under the name that stands in it."""
        _asked(lambda: self._client.submit_job(**job))

    def state(self, name: str) -> State:
        """What has become of it."""

        def asked() -> State:
            found = self._client.get_job_info(name)
            code = found.driver_exit_code
            return State(str(found.status.value), code if type(code) is int else None, str(found.message or ""))

        return _asked(asked)

    def stop(self, name: str) -> None:
        """Have it ended; that takes its time."""
        _asked(lambda: self._client.stop_job(name))

    def log(self, name: str) -> str:
        """All that it has said until now."""
        return str(_asked(lambda: self._client.get_job_logs(name)))

    def tail(self, name: str) -> Iterator[str]:
        """What it says, from its beginning to its end or until the connection breaks; for a thread of its own."""
        loop, chunks = asyncio.new_event_loop(), self._client.tail_job_logs(name)
        try:
            while True:
                yield _asked(lambda: loop.run_until_complete(anext(chunks)))
        except (StopAsyncIteration, GpuguardError):
            return
        finally:
            loop.close()


def connect(address: str | None) -> Jobs:
    """A connection with the job API at *address*, else where RAY_API_SERVER_ADDRESS or RAY_ADDRESS say, else here.

    Raises:
        InvalidRequest: Ray is not installed.
        BackendError: nobody answers there.
        GpuguardError: Ray does not let us in.
    """
    tell_of_token()
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise InvalidRequest(f"Ray is not installed here ({error}): pip install 'gpuguard[ray]'.") from None
    import logging

    logging.getLogger("ray").setLevel(logging.ERROR)
    for name in ("sdk", "dashboard_sdk"):
        logging.getLogger(f"ray.dashboard.modules.job.{name}").setLevel(logging.ERROR)
    return Jobs(_asked(lambda: JobSubmissionClient(address), address))


def tell_of_token() -> None:
    """Ray's client sends a token only in this mode, whatever token there is.  Before ray is imported."""
    token = Path.home() / ".ray" / "auth_token"
    if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() or token.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _asked(question: Callable[[], T], address: str | None = None) -> T:
    """Its answer, or our own error."""
    import aiohttp
    import requests
    from ray.exceptions import AuthenticationError

    try:
        return question()
    except AuthenticationError as error:
        first = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise GpuguardError(f"Ray does not let us in ({first}).  It wants its token in {TOKENS}.") from None
    except (ConnectionError, requests.RequestException, aiohttp.ClientError, asyncio.TimeoutError) as error:
        place = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or "this machine"
        raise BackendError(
            f"no job API of Ray answers at {place} ({type(error).__name__}).  Start Ray with `ray start --head`, or "
            "name its dashboard: RAY_API_SERVER_ADDRESS=http://head:8265 or --with '--address http://head:8265'."
        ) from None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        # The last three where its runtime environment is of another kind, or what answers is no head of Ray.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise GpuguardError(
            f"Ray refuses: {first}\n`gpuguard submit --print ...` shows what it is asked for."
        ) from None
