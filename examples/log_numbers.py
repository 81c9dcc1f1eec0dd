"""Numbers of the GPUs in a training log: gpuguard.collector to a CSV file, and to TensorBoard where that is installed.

    python examples/log_numbers.py --csv numbers.csv [--tensorboard runs/today] [--epochs 3]

The dictionary that collect() returns is flat, so it goes as it is to wandb.log(...) and mlflow.log_metrics(...), too
(mlflow: replace the brackets and the percent sign, which it does not take in names).
"""

from __future__ import annotations

import argparse
import csv
import importlib
import time
from typing import Any

import gpuguard


def train(seconds: float) -> None:
    """Where a training loop would be."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(number * number for number in range(10_000))


def summary_writer(directory: str) -> Any:
    """TensorBoard's writer, torch's own or that of tensorboardX."""
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        try:
            return importlib.import_module(package).SummaryWriter(directory)
        except ImportError:
            continue
    raise SystemExit("no TensorBoard here: `pip install tensorboardX`.")


def main() -> None:
    """Train for some epochs, and log what the GPUs did in each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", default="numbers.csv", help="one row per epoch and number")
    parser.add_argument("--tensorboard", metavar="DIRECTORY", help="also there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each epoch")
    args = parser.parse_args()
    board = summary_writer(args.tensorboard) if args.tensorboard else None
    with open(args.csv, "w", newline="", encoding="utf-8") as file, gpuguard.collector(interval=0.25) as numbers:
        table = csv.writer(file)
        table.writerow(["epoch", "number", "value"])
        for epoch in range(args.epochs):
            with numbers.tag("train"):
                train(args.seconds)
                found = numbers.collect()
            table.writerows([epoch, name, f"{value:g}"] for name, value in found.items())
            if board:
                for name, value in found.items():
                    board.add_scalar(name, value, epoch)
    if board:
        board.close()
    print(f"{args.epochs} epochs with {len(found)} numbers each are in {args.csv}")


if __name__ == "__main__":
    main()
