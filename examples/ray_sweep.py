"""A sweep of 6 tasks of Ray that stay off the GPUs which others have claimed.

Needs a Ray that runs, see examples/README.md.
"""

from __future__ import annotations

import os

import ray

import gpuguard


@ray.remote(num_gpus=1)  # type: ignore[misc,untyped-decorator,unused-ignore]
@gpuguard.ray.guarded
def train(rate: float) -> str:
    """Train with this learning rate; here it only says where."""
    return f"rate {rate:g} on GPU {os.environ['CUDA_VISIBLE_DEVICES']}, claim {os.environ['GPUGUARD_CLAIM']}"


if __name__ == "__main__":
    ray.init("auto", log_to_driver=False)
    for line in ray.get([train.remote(10.0**-power) for power in range(6)]):
        print(line)
