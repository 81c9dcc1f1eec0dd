"""Ray: the devices that it gave to a task, and others of the same node when somebody else has taken those.

Ray counts devices and does not know who uses them beside it.  A task cannot give one back and get another one: it would
get the same one again.  So it keeps what it has and asks Ray for one more, which is another one because Ray gives no
device twice: a place, an actor that does nothing but be counted.  What is not needed in the end goes back to Ray.
Does not claim and does not start anything: see gpuguard.ray for tasks and actors, cli.ray_worker for commands.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from gpuguard.errors import ImpossibleRequest, InvalidRequest, NotEnoughGpus, WaitTimeout

T = TypeVar("T")

VARIABLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.25  # between two looks for a further device while the devices here can never do
HOW_TO_INSTALL = "pip install 'gpuguard[ray]' where Ray runs, and here"


class Places(Protocol):
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
    open_places: Callable[[], Places],
    deadline: float | None = None,
    tell: Callable[[NotEnoughGpus], None] = lambda missing: None,
    *,
    waits: bool = True,
) -> tuple[T, Places | None]:
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
                    return attempt(have, _Look(places, tell)), places
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


class _Look:
    """Looks for a further device while somebody waits in line."""

    tell_every = 1.0  # seconds between two calls

    def __init__(self, places: Places, tell: Callable[[NotEnoughGpus], None]) -> None:
        self._places, self._tell = places, tell

    def __call__(self, missing: NotEnoughGpus) -> None:
        """Break the waiting off, or let it be told."""
        if devices := self._places.arrived():
            raise _More(*devices)
        self._tell(missing)


def _wait_for_more(places: Places, more: bool, failed: NotEnoughGpus, deadline: float | None) -> tuple[str, ...]:
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


class _Place:
    """One more device for a task."""

    def devices(self) -> tuple[str, ...]:
        """As CUDA_VISIBLE_DEVICES names them."""
        return tuple(map(str, load().get_runtime_context().get_accelerator_ids().get("GPU", ())))


class NodePlaces:
    """Places on the node of this process, which is connected with Ray.  They end with this process."""

    def __init__(self, have: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = load()
        node = ray.get_runtime_context().get_node_id()
        here: dict[str, Any] = next((each for each in ray.nodes() if each["NodeID"] == node), {})
        self.left = int(here.get("Resources", {}).get("GPU", 0)) - have
        self.pending: dict[Any, Any] = {}  # what Ray will answer with its device -> the place
        self._ray, self._held = ray, dict[str, Any]()
        self._kind = ray.remote(_Place).options(
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
