"""Programs for a real Ray, and a witness of who uses which device that knows nothing of locks.

python ray_tasks.py hold WITNESS                       one outsider, until it is ended
python ray_tasks.py tasks WITNESS 16 [--unguarded]     tasks of Ray; prints a line of JSON
python ray_tasks.py late|others WITNESS                one task that waits too short; an actor and a generator

The witness is a directory: whoever computes on a device makes a file of its number, and whoever finds one there leaves
the file "overlap".
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def using(witness: str) -> Iterator[str]:
    """Compute on what CUDA_VISIBLE_DEVICES names."""
    visible, own = os.environ["CUDA_VISIBLE_DEVICES"], []
    for device in visible.split(","):
        try:
            os.close(os.open(f"{witness}/{device}", os.O_CREAT | os.O_EXCL))
            own.append(device)
        except FileExistsError:
            Path(witness, "overlap").touch()
    try:
        yield visible
    finally:
        for device in own:
            os.unlink(f"{witness}/{device}")


def train(witness: str) -> str:
    with using(witness) as visible:
        time.sleep(0.3)
    return visible


def stream(witness: str) -> Iterator[str]:
    with using(witness) as visible:
        yield visible
        time.sleep(0.3)
        yield os.environ["GPUGUARD_CLAIM"]


class Trainer:
    """An actor."""

    def __init__(self, witness: str) -> None:
        self.context = using(witness)
        self.visible = self.context.__enter__()

    def where(self) -> str:
        return self.visible


def main(what: str, witness: str, *more: str) -> Any:
    if what == "hold":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with using(witness):
            time.sleep(600)
        return None
    import ray

    import gpuguard

    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    guarded = (lambda thing: thing) if "--unguarded" in more else gpuguard.ray.guarded
    if what == "tasks":
        task = ray.remote(num_gpus=1)(guarded(train))
        answer: Any = ray.get([task.remote(witness) for _ in range(int(more[0]))])
    elif what == "late":
        task = ray.remote(num_gpus=1, max_retries=0)(gpuguard.ray.guarded(wait=1.0)(train))
        try:
            answer = ray.get(task.remote(witness))
        except gpuguard.NotEnoughGpus as error:
            answer = [isinstance(error, gpuguard.WaitTimeout) and "WaitTimeout", error.wanted, error.available]
    else:
        actor = ray.remote(num_gpus=1)(guarded(Trainer)).remote(witness)
        chunks = ray.remote(num_gpus=1)(guarded(stream)).remote(witness)
        answer = [ray.get(actor.where.remote()), [claim.note for claim in gpuguard.who().claims]]
        answer += map(ray.get, chunks)
        ray.kill(actor)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU") != 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"answer": answer, "back": ray.available_resources().get("GPU")}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
