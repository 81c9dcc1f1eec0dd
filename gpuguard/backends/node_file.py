"""The state of the simulated node in one file, which several terminals share.

Readers need no lock, because the file is only ever replaced as a whole; writers take turns by an flock on a file
beside it (not on the state itself: a lock on a file that gets replaced guards nothing).  The format is private to this
module.  Does not look at processes: see simulated.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from gpuguard.backends.node import Node
from gpuguard.backends.node_spec import DEVICES_AT_MOST, LANES_BYTES
from gpuguard.errors import BackendError
from gpuguard.plainjson import loads
from gpuguard.typed import noun

STATE = "node.json"
LOCK = "node.lock"
LOCK_SECONDS = 10.0  # a change takes a millisecond; only a stopped process can hold the lock for longer
_SCHEMA = 1
_LONGEST = 86400.0  # seconds of a device's answer


def load(directory: str) -> Node | None:
    """The node in *directory*; None if there is none.

    Raises:
        BackendError: the file cannot be read, or is not whole.
    """
    path = os.path.join(directory, STATE)
    try:
        with open(path, "rb") as file:
            return _decoded(loads(file.read()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(f"the simulated node cannot be read: {error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendError(
            f"{path} is damaged ({type(error).__name__}: {error}).  "
            "`gpuguard sim start --force SPEC` makes a new node there."
        ) from None


def create(directory: str, make: Callable[[], Node], *, replace: bool = False) -> tuple[Node, bool]:
    """The node in *directory* and whether it is new: *make* is called when there is none, or with *replace*."""
    with _locked(directory):
        node = None if replace else load(directory)
        if node:
            return node, False
        node = make()
        _save(directory, node)
        return node, True


def update(directory: str, change: Callable[[Node], Node]) -> Node:
    """Change the node while nobody else does; returns what it is now.

    Raises:
        BackendError: there is no node, or it cannot be written.
    """
    with _locked(directory):
        node = load(directory)
        if node is None:
            raise BackendError(
                f"there is no simulated node in {directory}: start one with `gpuguard sim start 8xH100-80GB`."
            )
        node = change(node)
        _save(directory, node)
        return node


def remove(directory: str) -> bool:
    """Remove the node; whether there was one.  The lock file stays: somebody may be waiting for it."""
    with _locked(directory):
        try:
            os.unlink(os.path.join(directory, STATE))
        except FileNotFoundError:
            return False
        return True


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    path = os.path.join(directory, LOCK)
    try:
        lock = _open_lock(path)
    except OSError as error:
        raise BackendError(f"the simulated node cannot be changed: {error}.") from None
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise BackendError(f"a stopped process holds {path}: `fuser -v {path}` shows it.")
            time.sleep(0.002)
        yield
    finally:
        os.close(lock)


def _open_lock(path: str) -> int:
    try:
        # flock needs no write access, so users who may only read the directory can take their turn, too.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _save(directory: str, node: Node) -> None:
    path = os.path.join(directory, STATE)
    try:
        # One name for all: whoever writes holds the lock.  What a killed writer left may be another user's.
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.new")
        with open(f"{path}.new", "x", encoding="utf-8") as file:
            json.dump({"schema": _SCHEMA, **asdict(node)}, file)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise BackendError(f"the simulated node cannot be changed: {error}.") from None


def _decoded(raw: dict[str, Any]) -> Node:
    if raw["schema"] != _SCHEMA:
        raise ValueError(f"written by another version, schema {raw['schema']}")
    node: Node = noun(Node, raw)
    if len(node.devices) > DEVICES_AT_MOST or any(len(device.instances) > DEVICES_AT_MOST for device in node.devices):
        raise ValueError(f"no node has more than {DEVICES_AT_MOST} devices")
    for device in node.devices:
        if not 0 <= device.latency <= _LONGEST:
            raise ValueError(f"device {device.index} cannot take {device.latency} s")
        if device.model.pcie_generation not in LANES_BYTES:
            raise ValueError(f"there is no PCIe {device.model.pcie_generation}")
    return node
