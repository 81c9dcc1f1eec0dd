"""A training job in small: it takes memory on its GPUs, prints a loss for each step, and saves when it is told to stop.

    gpuguard run -n 2 -- python examples/train.py --steps 100

It uses torch where there is torch and a GPU, else libcuda itself where there is a GPU, else the simulated node where
there is one: then its process is real, and what it uses is not.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from gpuguard.errors import InvalidRequest
from gpuguard.units import parse_bytes, parse_duration

Work = Callable[[float], None]  # keeps the GPUs busy for so many seconds
GIB = 2**30


def main() -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--step-time", default="500ms", metavar="DURATION", help="of each step (default: 500ms)")
    parser.add_argument("--memory", default="10GiB", metavar="SIZE", help="on each GPU (default: 10GiB)")
    args = parser.parse_args()
    try:
        memory, seconds = parse_bytes(args.memory), parse_duration(args.step_time)
    except InvalidRequest as error:
        parser.error(str(error))

    stopping: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        stopping.append(signum)

    # A killed job keeps its work: SIGTERM asks for an end, and the step in hand is finished first.
    signal.signal(signal.SIGTERM, stop)
    work = torch_work(memory) or cuda_work(memory) or simulated_work(memory)
    if work is None:
        return 1
    for step in range(1, args.steps + 1):
        work(seconds)
        print(f"step {step}/{args.steps}  loss {2.5 * math.exp(-step / 15) + 0.1:.4f}", flush=True)
        if stopping:
            print(f"checkpoint saved at step {step}: told to stop by {signal.Signals(stopping[0]).name}", flush=True)
            return 0
    print(f"checkpoint saved at step {args.steps}: done", flush=True)
    return 0


def torch_work(memory: int) -> Work | None:
    """Multiply matrices on all visible GPUs; None without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    print(f"training on {len(devices)} x {torch.cuda.get_device_name(0)}, with torch", flush=True)
    kept = [torch.empty(memory, dtype=torch.uint8, device=device) for device in devices]
    factors = [torch.randn(4096, 4096, device=device) for device in devices]

    def work(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for place, factor in enumerate(factors):
                factors[place] = torch.tanh(factor @ factor)
            for device in devices:
                torch.cuda.synchronize(device)
        assert kept

    return work


def cuda_work(memory: int) -> Work | None:
    """Fill memory on all visible GPUs, through the driver's own library; None where there is none, or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    blocks = []
    for index in range(count.value):
        device, context, block = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        failed = cuda.cuDeviceGet(ctypes.byref(device), index)
        failed = failed or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        failed = failed or cuda.cuCtxSetCurrent(context)
        failed = failed or cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(memory))
        if failed:
            sys.exit(f"CUDA error {failed} on GPU {index}: is {memory / GIB:g}GiB free there?  Try a smaller --memory.")
        blocks.append((context, block))
    print(f"training on {len(blocks)} GPUs, without torch", flush=True)

    def work(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for context, block in blocks:
                cuda.cuCtxSetCurrent(context)
                cuda.cuMemsetD8_v2(block, ctypes.c_ubyte(1), ctypes.c_size_t(memory))
                cuda.cuCtxSynchronize()

    return work


def simulated_work(memory: int) -> Work | None:
    """Register as a user of the simulated node, and sleep; None, and advice, where there is no node."""
    try:
        from gpuguard import errors
        from gpuguard.backends import simulated
    except ImportError:
        print(
            "No GPU here.  With gpuguard in this Python (`pip install gpuguard`) one can be simulated.", file=sys.stderr
        )
        return None
    kind, _, place = os.environ.get("GPUGUARD_BACKEND", "simulated").partition(":")
    try:
        devices = simulated.use(None, memory, 90.0, spec=place if kind == "simulated" else "")
    except errors.BackendError:
        print(
            "No GPU (or no driver for it) and no simulated node here.\n"
            "Simulate one:  gpuguard sim start 8xH100-80GB\n"
            "and train:     gpuguard run --backend simulated -n 2 -- python examples/train.py",
            file=sys.stderr,
        )
        return None
    except errors.GpuguardError as error:
        print(f"{error}", file=sys.stderr)
        return None
    print(f"SIMULATED: training on {len(devices)} GPU{'s' * (len(devices) > 1)} of the simulated node", flush=True)
    return time.sleep


if __name__ == "__main__":
    sys.exit(main())
