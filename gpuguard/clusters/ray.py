"""Ray: the devices that it gave to a task, and others of the same node when somebody else has taken those.

Ray counts devices and does not know who uses them beside it.  A task cannot give one back and get another one: it would
get the same one again.  So it keeps what it has and asks Ray for one more, which is another one because Ray gives no
device twice: a place, an actor that does nothing but be counted.  What is not needed in the end goes back to Ray.
Does not claim and does not start anything: see gpuguard.ray for tasks and actors, cli.ray_worker for commands.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from gpuguard.errors import BackendError, GpuguardError, ImpossibleRequest, InvalidRequest, NotEnoughGpus, WaitTimeout

T = TypeVar("T")

VARIABLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.25  # between two looks for a further device while the devices here can never do
HOW_TO_INSTALL = "pip install 'gpuguard[ray]' where Ray runs, and here"


class NodeDevices(Protocol):
    """Further devices of this node that Ray keeps for us."""

    def want(self, number: int) -> bool:
        """Ask for so many more, those that were asked for already included; False when the node has no more."""

    def arrived(self) -> tuple[str, ...]:
        """Those that Ray has given since the last call."""

    def keep(self, devices: Sequence[str]) -> None:
        """Give all others back, and ask for no more."""


class _More(Exception):
    """Ray has given a further device, so it is worth to try again at once."""


def search(
    given: Sequence[str],
    number: int,
    attempt: Callable[[tuple[str, ...], Callable[[NotEnoughGpus], None] | None], T],
    open_places: Callable[[], NodeDevices],
    deadline: float | None = None,
    tell: Callable[[NotEnoughGpus], None] = lambda missing: None,
    *,
    waits: bool = True,
) -> tuple[T, NodeDevices | None]:
    """Try with the devices that Ray gave, and with more of them as long as somebody else has too many of those.

    Args:
        given: by Ray, as CUDA_VISIBLE_DEVICES names them.
        number: how many of them are needed.
        attempt: claims among these devices; with None at once or not at all, else it waits and calls the function
            once in a while.
        open_places: how to get more.
        deadline: monotonic, of the waiting that *attempt* does; None: never.
        tell: is called while it waits, for people.
        waits: whether somebody wants to wait, so that what is raised after the deadline is a WaitTimeout.

    Returns:
        What *attempt* returned, and what must be kept as long as that; None when Ray's own choice did.

    Raises:
        NotEnoughGpus: as *attempt* raised it, after the deadline or when all devices of the node can never do.
    """
    have, places, rounds = tuple(given), None, 0
    try:
        while True:
            try:
                return attempt(have, None), places
            except NotEnoughGpus as error:
                failed = error
            if deadline is not None and time.monotonic() >= deadline:
                raise failed if isinstance(failed, ImpossibleRequest) else WaitTimeout.after(failed)
            places = places or open_places()
            # One more each time: others may have taken many, and what Ray gives takes it a second.
            more, rounds = places.want(max(1, number - failed.available) + rounds), rounds + 1
            try:
                if not isinstance(failed, ImpossibleRequest):
                    return attempt(have, _NodeView(places, tell)), places
                new = _wait_for_more(places, more, failed, deadline)
            except _More as found:
                new = found.args
            # A place that died may have given one before, and of a list that names one twice CUDA sees none.
            have = tuple(dict.fromkeys((*have, *new)))
    except BaseException as error:
        if places:
            places.keep(())
        if isinstance(error, WaitTimeout) and not waits:
            raise error.missing from None
        raise


class _NodeView:
    """Looks for a further device while somebody waits in line."""

    tell_every = 1.0  # seconds between two calls

    def __init__(self, places: NodeDevices, tell: Callable[[NotEnoughGpus], None]) -> None:
        self._places, self._tell = places, tell

    def __call__(self, missing: NotEnoughGpus) -> None:
        """Break the waiting off, or let it be told."""
        if devices := self._places.arrived():
            raise _More(*devices)
        self._tell(missing)


def _wait_for_more(places: NodeDevices, more: bool, failed: NotEnoughGpus, deadline: float | None) -> tuple[str, ...]:
    """What we have can never do, so there is nothing else to wait for."""
    if not more:
        raise failed
    while not (devices := places.arrived()):
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout.after(failed)
        time.sleep(POLL_SECONDS)
    return devices


def given() -> tuple[str, ...]:
    """The devices that Ray gave to the task or actor that this process works for, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        InvalidRequest: none, or only a part of one.
    """
    ray = load()
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.worker.mode != ray.WORKER_MODE:
        raise InvalidRequest("this is no task or actor of Ray: call it with .remote().")
    devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
    if not devices:
        raise InvalidRequest("Ray gave this no GPU: write @ray.remote(num_gpus=1) above @gpuguard.ray.guarded.")
    return devices


def is_part() -> bool:
    """Whether Ray gave only a part of a device."""
    return 0 < float(load().get_runtime_context().get_assigned_resources().get("GPU", 0)) < 1


def visible() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names."""
    return tuple(part for part in os.environ.get(VARIABLE, "").split(",") if part)


def load() -> Any:
    """The package ray.

    Raises:
        InvalidRequest: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InvalidRequest(f"Ray is not installed here ({error}): {HOW_TO_INSTALL}.") from None
    return ray


class _NodeDevice:
    """One more device for a task."""

    def devices(self) -> tuple[str, ...]:
        """As CUDA_VISIBLE_DEVICES names them."""
        return tuple(map(str, load().get_runtime_context().get_accelerator_ids().get("GPU", ())))


class LocalNodeDevices:
    """Places on the node of this process, which is connected with Ray.  They end with this process."""

    def __init__(self, have: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = load()
        node = ray.get_runtime_context().get_node_id()
        here: dict[str, Any] = next((each for each in ray.nodes() if each["NodeID"] == node), {})
        self.left = int(here.get("Resources", {}).get("GPU", 0)) - have
        self.pending: dict[Any, Any] = {}  # what Ray will answer with its device -> the place
        self._ray, self._held = ray, dict[str, Any]()
        self._kind = ray.remote(_NodeDevice).options(
            num_gpus=1, num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )

    def want(self, number: int) -> bool:
        """See Places."""
        while len(self.pending) < number and self.left > 0:
            place = self._kind.remote()
            self.pending[place.devices.remote()] = place
            self.left -= 1
        return bool(self.pending)

    def arrived(self) -> tuple[str, ...]:
        """See Places."""
        if not self.pending:
            return ()
        ready, _ = self._ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)
        found: dict[str, Any] = {}
        for each in ready:
            place = self.pending.pop(each)
            try:
                found |= dict.fromkeys(self._ray.get(each), place)
            except self._ray.exceptions.RayError:  # it died, as processes do; another one may be asked for
                self.left += 1
        self._held.update(found)
        return tuple(found)

    def keep(self, devices: Sequence[str]) -> None:
        """See Places."""
        # Ray ends an actor that nobody knows any more.
        self.pending.clear()
        self._held = {device: place for device, place in self._held.items() if device in devices}


# Ray's job API: submit a command, follow it, stop it.  Ray's own client speaks with it; its errors end here.


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
