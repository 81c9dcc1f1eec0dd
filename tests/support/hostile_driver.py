"""A driver whose answers are other than a driver's, one at a time, and what the commands make of each.

for where, change in changes(fake): change()   where: "memory_used = -1", "uuid = b'queue'"
findings(fake, place)   what is wrong with what the commands say, as lines; in the process of nvml_child
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from fake_nvml import _DEVICE_NUMBERS, GIB, KINDS, FakeNvml, Mig, Process

from gpuguard.backends import client, nvml
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import run_command_line

NUMBERS = (-1, 0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -(2**63))
TEXTS = (
    b"", b"\xff\xfe", b"\x1b[2J\xe2\x80\xae", b"a\nb", b"../../etc/passwd", b"x" * 95, b"GPU-", b"0", b"queue", b"gate",
    b"GPU-\xe2\x80\xae", b"GPU-a/../gate", b"GPU-a\r",
)  # fmt: skip
COUNTS = ("process_count", "sample_count", "mig_count", "process_stride")  # of the fake library's own
SELECT = ("select", "-n", "2")
COMMANDS: tuple[tuple[str, ...], ...] = (
    SELECT, ("who",), ("who", "--json"), ("select", "-n", "2", "--json"), ("explain", "-n", "2"),
    ("explain", "-n", "2", "--json"), ("metrics",), ("metrics", "--influx", "-"),
)  # fmt: skip
BAD = 1  # the device

Change = Callable[[], object]


def changes(fake: FakeNvml, numbers: tuple[int, ...] = NUMBERS) -> Iterator[tuple[str, Change]]:
    """What is other, and the function that makes it so."""
    state = fake._state.devices[BAD]
    for name in _DEVICE_NUMBERS:
        for value in numbers if name not in COUNTS else ():
            yield f"{name} = {value}", lambda name=name, value=value: setattr(state, name, value)  # type: ignore[misc]
    first = fake.devices[0].uuid.encode()
    for name, most in (("uuid", 95), ("name", 95), ("bus_id", 31)):
        for text in (*TEXTS, first, state.bus_id):
            yield f"{name} = {text!r}", lambda name=name, text=text[:most]: setattr(state, name, text)  # type: ignore[misc]
    for text in TEXTS:
        yield f"driver_version = {text!r}", lambda text=text: setattr(fake._state, "driver_version", text[:79])  # type: ignore[misc]
    for value in (*numbers, os.getpid(), os.getppid()):
        for name, *_ in Process._fields_:
            yield f"process {name} = {value}", lambda name=name, value=value: _process(fake, name, value)  # type: ignore[misc]
        yield f"samples = {value}", lambda value=value: setattr(fake.devices[BAD], "samples", [value, value])  # type: ignore[misc]
        yield f"topology = {value}", lambda value=value: fake.set_topology(0, BAD, value)  # type: ignore[misc]
    yield "a process twice", lambda: _processes(fake, "compute", "compute")
    yield "a process of all kinds", lambda: _processes(fake, *KINDS)
    for name, *_ in Mig._fields_:
        for one in numbers if isinstance(getattr(Mig(), name), int) else (*TEXTS, first):
            yield f"instance {name} = {one!r}", lambda name=name, one=one: _instance(fake, name, one)  # type: ignore[misc]


def _process(fake: FakeNvml, name: str, value: int) -> None:
    fake.add_process(BAD, os.getpid(), 3 * GIB, stays=1)
    setattr(fake._state.devices[BAD].processes[fake.devices[BAD].process_count - 1], name, value)


def _processes(fake: FakeNvml, *kinds: str) -> None:
    for kind in kinds:
        fake.add_process(BAD, os.getpid(), GIB, kind, stays=1)


def _instance(fake: FakeNvml, name: str, value: Any) -> None:
    for number in (1, 2):
        fake.add_mig(BAD, "3g.40gb", number)
    setattr(fake._state.devices[BAD].mig[0], name, value)


class Anew:
    """The driver, asked by somebody who knows nothing of it yet; in this process, which is quicker."""

    name, simulated = "nvml", False

    def __init__(self) -> None:
        self.sample = nvml.open().sample

    def close(self) -> None:
        """Leave it as it is."""


def findings(fake: FakeNvml, place: str, numbers: tuple[int, ...] = NUMBERS, only: str = "") -> list[str]:
    """What is wrong with what the commands say to each change that begins with *only*."""
    client.WorkerBackend = lambda *_, **__: Anew()  # type: ignore[assignment,misc]
    sound = bytes(fake._map)
    lock_directory(place)  # in one that nobody has made nothing is claimed, and nothing more is looked at
    found = []
    for where, change in changes(fake, numbers):
        if not where.startswith(only):
            continue
        fake._map[:] = sound
        change()
        for words in COMMANDS:
            told, said = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(told), contextlib.redirect_stderr(said):
                status = run_command_line([*words, "--dir", place])
            found += [f"{where}: {' '.join(words)}: {fault}" for fault in _faults(words, status, told, said, where)]
    return found


def _faults(words: tuple[str, ...], status: int, told: io.StringIO, said: io.StringIO, where: str) -> Iterator[str]:
    out, errors = told.getvalue(), said.getvalue()
    if status not in (0, 1) or "inside gpuguard" in errors:
        yield f"{status}: {errors}"
    if "--json" in words and out:
        try:
            json.loads(out, parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError) as error:
            yield f"no JSON: {error}"
    if not all(map(str.isprintable, (out + errors).split("\n"))):
        yield f"harmful: {out + errors!a}"
    if words == SELECT:
        chosen = out.strip().split(",")
        if len(set(chosen)) != 2 or (where.startswith("uuid = ") and str(BAD) in chosen and "0000001-" not in where):
            yield f"chose {chosen}: {errors}"
