"""Ray: the devices that it gave to a task or actor.

Ray counts devices and does not know who uses them beside it.  Does not claim and does not start anything: see
gpuguard.ray for tasks and actors, `gpuguard submit --via ray` for commands.
"""

from __future__ import annotations

from typing import Any

from gpuguard.errors import InvalidRequest

HOW_TO_INSTALL = "pip install 'gpuguard[ray]' where Ray runs, and here"


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
