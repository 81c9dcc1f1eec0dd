"""Lets tasks and actors of Ray claim the devices that Ray gave them, so that they and users outside exclude each other.

    @ray.remote(num_gpus=1)
    @gpuguard.ray.guarded
    def train(config): ...

If another user has taken a device, the task waits for it in the queue before it begins.  Does not submit commands: see
`gpuguard submit --via ray`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from gpuguard import api
from gpuguard.clusters import device_variables
from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_
from gpuguard.model import HEALTH
from gpuguard.vendors import NVIDIA

T = TypeVar("T", bound=Callable[..., Any])

__all__ = ["guarded"]

HOW_TO_INSTALL = N_("pip install 'gpuguard[ray]' where Ray runs, and here")


@overload
def guarded(thing: T, /) -> T: ...
@overload
def guarded(*, wait: float | str | None = None, note: str | None = None, **conditions: Any) -> Callable[[T], T]: ...
def guarded(
    thing: Any = None, /, *, wait: float | str | None = None, note: str | None = None, **conditions: Any
) -> Any:
    """Let a task claim its devices while it runs, or an actor while it lives.  Write it below ``@ray.remote``.

    Args:
        thing: a function, a generator or a class.
        wait: seconds, or a text like "1h", after which WaitTimeout is raised if devices are taken.  With 0,
            NotEnoughGpus is raised at once; with None, the task waits for as long as it takes.
        note: for the colleagues who look at `gpuguard who`; the name of the task by default.
        **conditions: as for grab_gpus: min_free ("20GiB"), max_util (percent), share=True with memory for a
            part of each device ...

    Returns:
        The same thing, guarded.  CUDA_VISIBLE_DEVICES names the claimed devices inside.

    Raises:
        InvalidRequest: in the task, when Ray gave it no device.
        NotEnoughGpus: in the task, after *wait*; its subclass WaitTimeout if *wait* is more than 0.  Ray runs the task
            again if its retry_exceptions names the error.
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
        # It is entered and never left, because the claim ends with the process of the actor.
        self._gpuguard_held = _held(options)
        self._gpuguard_held.__enter__()
        initialise(self, *args, **keywords)

    if inspect.isfunction(initialise):  # Ray looks at the wrapped function, and object.__init__ has no signature
        begin = functools.wraps(initialise)(begin)

    same = {name: getattr(thing, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(thing.__name__, (thing,), {**same, "__init__": begin})


@contextmanager
def _held(options: dict[str, Any]) -> Iterator[None]:
    """Hold a claim on the devices that Ray gave to the task or actor that this process works for."""
    try:
        import ray
    except ImportError as error:
        raise InvalidRequest(f"Ray is not installed here ({error}): {HOW_TO_INSTALL}.") from None
    context = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.worker.mode != ray.WORKER_MODE:
        raise InvalidRequest("this is no task or actor of Ray: call it with .remote().")
    devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))  # as the variable of their vendor does
    if not devices:
        raise InvalidRequest("Ray gave this no GPU: write @ray.remote(num_gpus=1) above @gpuguard.ray.guarded.")
    # Ray has types only where it is installed, and even there this function has none.
    resources = context.get_assigned_resources()  # type: ignore[no-untyped-call,unused-ignore]
    if 0 < float(resources.get("GPU", 0)) < 1 and not options.get("share"):
        raise InvalidRequest(
            "Ray gave only a part of a GPU: write @gpuguard.ray.guarded(share=True, memory=10 * 2**30) to share it."
        )
    if os.environ.get(NVIDIA.visible) != ",".join(devices):  # of NVIDIA's, our indices are the same
        machine = api.snapshot({HEALTH}, backend=options.get("backend"))
        devices = device_variables.devices_called(devices, os.environ, machine.devices)
    with api.claim(len(devices), devices=devices, **options):
        yield
