"""What the guard did before it was started again: its deeds of the last hour, out of the audit log.

Every deed has had its line there before it was done, so no crash can lose one, and whoever is started again each
minute signals no more often than who stays.  Where the log cannot be read, or a line of it means nothing, there may
have been a deed.  Does not write the log: see history; what follows from deeds is in ledger.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from gpuguard.guards.ledger import HOUR, VICTIMS_PER_HOUR, Deed
from gpuguard.marks import boot_id
from gpuguard.model import Event
from gpuguard.plainjson import loads

OUTCOMES = {"about to": True, "dry run": False}  # of the lines that stand before a deed: whether it was one in earnest
BEGIN = re.compile(rb'\{"schema": 1, "time_unix_seconds": (\d{1,12}(?:\.\d+)?)[,}]')

_MARK = b'"clock_seconds": '  # in the facts of every deed, and of nothing else
_CLOCK = re.compile(_MARK + rb"(\d{1,12}(?:\.\d+)?)[,}]")


@dataclass(frozen=True)
class Recalled:
    """The deeds of the last hour, the oldest first, and why some of them are only feared."""

    deeds: tuple[Deed, ...] = ()
    trouble: str | None = None


def recalled(path: str, clock: float, now: float) -> Recalled:
    """The deeds in the log at *path* and in the older file beside it.

    Args:
        path: of the log; one that does not exist has no deeds.
        clock: CLOCK_BOOTTIME now.
        now: unix time now.
    """
    deeds: list[Deed] = []
    damaged, boot = 0, boot_id()
    try:
        for line in _lines(path):
            begun = BEGIN.match(line)
            if begun and now - float(begun[1]) > HOUR and not _is_late(line, boot, clock):
                # By a clock that may have been set since; of this boot another one tells what was when.
                deeds, damaged = [deed for deed in deeds if deed.process >= (0, 0.0)], 0
            elif not begun or not line.endswith(b"}\n"):
                damaged += 1
            elif _MARK in line:
                deed = _deed(line, boot, clock, now)
                deeds, damaged = ([*deeds, deed], damaged) if deed else (deeds, damaged + 1)
    except OSError as error:
        text = (
            f"the audit log cannot be read ({error.strerror or error}), so nobody knows what was done in the last hour"
        )
        return Recalled(_feared(VICTIMS_PER_HOUR, clock), text)
    text = f"damaged lines in the audit log: {damaged}; each counts as a process that was ended just now"
    known = sorted(deeds, key=lambda deed: deed.clock)
    return Recalled((*known, *_feared(damaged, clock)), text if damaged else None)


def facts_of(deed: Deed) -> dict[str, float | str | None]:
    """What the line of a deed says of it, beside what every line says."""
    return {"signature": deed.signature or None, "clock_seconds": deed.clock, "boot": boot_id()}


def is_deed(event: Event) -> bool:
    """Whether it is the line of a deed: those are read again after a restart."""
    return any(name == "clock_seconds" for name, _ in event.facts)


def _lines(path: str) -> Iterator[bytes]:
    for each in (f"{path}.1", path):
        try:
            # O_NONBLOCK: a FIFO in that place must not hang the daemon.
            descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{each} is no file that remembers anything")
            yield from file


def _is_late(line: bytes, boot: str, clock: float) -> bool:
    """Whether it is the line of a deed of the last hour in this boot, whatever time of day it names."""
    found = _CLOCK.search(line)
    return bool(found and boot and boot.encode() in line and clock - float(found[1]) < HOUR)


def _deed(line: bytes, boot: str, clock: float, now: float) -> Deed | None:
    """The deed that a line announces; None when the line cannot be right."""
    try:
        event = loads(line)
        facts = event["facts"]
        done_at = float(facts["clock_seconds"])
        same_boot = facts.get("boot") == boot != ""
        process = (int(event.get("pid") or 0), float(facts.get("start_time_seconds") or 0.0))
        age = max(0.0, clock - done_at) if same_boot else max(0.0, now - float(event["time_unix_seconds"]))
        return Deed(
            clock=clock - age,
            action=str(event["kind"]),
            # A process of another boot is nobody here, whoever has its pid.
            process=process if same_boot else (0, -done_at),
            devices=tuple(map(str, event.get("devices", ()))),
            live=OUTCOMES[event["outcome"]],
            signature=str(facts.get("signature") or ""),
            policy=str(facts.get("policy") or ""),
            uid=None if facts.get("uid") is None else int(facts["uid"]),
        )
    except (ValueError, ArithmeticError, KeyError, TypeError, AttributeError):
        return None


def _feared(number: int, clock: float) -> tuple[Deed, ...]:
    numbers = range(1, min(number, VICTIMS_PER_HOUR) + 1)
    return tuple(Deed(clock, "terminate", (0, -float(each)), (), live) for each in numbers for live in (True, False))
