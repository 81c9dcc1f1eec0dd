"""Tasks and actors of Ray that claim what Ray gave them, so that they and people outside exclude each other.

    @ray.remote(num_gpus=1)
    @gpuguard.ray.guarded
    def train(config): ...

Where somebody else has taken a device, the task gets another one of its node before it begins.  Does not submit
commands: see `gpuguard submit --via ray`.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, overload

from gpuguard import api
from gpuguard.claims.claim import Claim
from gpuguard.clusters import ray as engine
from gpuguard.errors import InvalidRequest, NotEnoughGpus

T = TypeVar("T", bound=Callable[..., Any])

__all__ = ["guarded"]


@overload
def guarded(thing: T, /) -> T: ...
@overload
def guarded(*, wait: float | None = None, note: str | None = None, **conditions: Any) -> Callable[[T], T]: ...
def guarded(thing: Any = None, /, *, wait: float | None = None, note: str | None = None, **conditions: Any) -> Any:
    """Let a task claim its devices while it runs, an actor as long as it lives.  Stands below ``@ray.remote``.

    Args:
        thing: a function, a generator or a class.
        wait: seconds until WaitTimeout is raised when devices are taken, 0: NotEnoughGpus at once; None: never.
        note: for the colleagues who look at `gpuguard who`; the name of the task by default.
        **conditions: as for grab_gpus: min_free (bytes), max_util (percent), share=True with memory (bytes) for a
            part of each device ...

    Returns:
        The same thing, guarded.  CUDA_VISIBLE_DEVICES names the claimed devices inside.

    Raises:
        InvalidRequest: in the task, when Ray gave it no device.
        NotEnoughGpus: in the task, after *wait*, and its kind WaitTimeout if that is more than 0; Ray runs it again
            where its retry_exceptions names it.
    """
    if thing is None:
        return functools.partial(guarded, wait=wait, note=note, **conditions)
    if not (inspect.isclass(thing) or inspect.isfunction(thing)):
        raise InvalidRequest("write @gpuguard.ray.guarded below @ray.remote, not above it.")
    options = {"wait": wait, "note": note or f"Ray: {thing.__qualname__}", **conditions}
    if inspect.isclass(thing):
        return _guarded_class(thing, options)
    if inspect.isgeneratorfunction(thing):

        @functools.wraps(thing)
        def generate(*args: Any, **keywords: Any) -> Iterator[Any]:
            with _held(options):
                yield from thing(*args, **keywords)

        return generate

    @functools.wraps(thing)
    def call(*args: Any, **keywords: Any) -> Any:
        with _held(options):
            return thing(*args, **keywords)

    return call


def _guarded_class(thing: type, options: dict[str, Any]) -> type:
    initialise = thing.__init__  # type: ignore[misc]

    def begin(self: Any, *args: Any, **keywords: Any) -> None:
        # Entered and never left: the claim ends with the process of the actor.
        self._gpuguard_held = _held(options)
        self._gpuguard_held.__enter__()
        initialise(self, *args, **keywords)

    if inspect.isfunction(initialise):  # Ray looks at what is wrapped, and that of object has no signature
        begin = functools.wraps(initialise)(begin)

    same = {name: getattr(thing, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(thing.__name__, (thing,), {**same, "__init__": begin})


@contextmanager
def _held(options: dict[str, Any]) -> Iterator[None]:
    """A claim on the devices that Ray gave, or on others of the node that it gave instead."""
    devices, wait = engine.given(), options["wait"]
    if engine.is_part() and not options.get("share"):
        raise InvalidRequest(
            "Ray gave only a part of a GPU: write @gpuguard.ray.guarded(share=True, memory=10 * 2**30) to share it."
        )
    conditions = {name: value for name, value in options.items() if name != "wait"}
    deadline = None if wait is None else time.monotonic() + wait

    def attempt(among: tuple[str, ...], on_wait: Callable[[NotEnoughGpus], None] | None) -> Claim:
        os.environ[engine.VARIABLE] = ",".join(among)
        # Not 0, which would ask for no waiting: what is raised then is no WaitTimeout.
        left = None if deadline is None else max(0.001, deadline - time.monotonic())
        seconds = left if on_wait else 0.0
        return stack.enter_context(api.claim(len(devices), devices=among, wait=seconds, on_wait=on_wait, **conditions))

    before = os.environ.get(engine.VARIABLE)
    with ExitStack() as stack:
        stack.callback(_restore, before)
        opened = functools.partial(engine.LocalNodeDevices, len(devices))
        claim, places = engine.search(devices, len(devices), attempt, opened, deadline, waits=wait != 0)
        if places:
            places.keep([name for device in claim for name in (str(device.index), device.uuid)])
            stack.callback(places.keep, ())
        yield


def _restore(value: str | None) -> None:
    if value is not None:
        os.environ[engine.VARIABLE] = value
