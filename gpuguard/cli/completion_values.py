"""What a shell offers behind a TAB and only this moment knows: devices, users, claims.

The user is typing: what goes wrong is silent, SECONDS is all it may take, and while the daemon runs its last sample is
shown, so that the driver is left alone.  Nothing is changed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuguard.backends import Backend
from gpuguard.backends.client import open_worker
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.errors import GpuguardError
from gpuguard.model import HEALTH, MEMORY, MODEL, PROCESS_DETAILS, PROCESSES
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.source import SnapshotSource
from gpuguard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import NoReturn

    from gpuguard.model import Device, Snapshot

    Values = Iterable[tuple[str, str]]

SECONDS = 2.0
_BEFORE_PEOPLE = 1000  # uids of services are smaller (login.defs: UID_MIN)
_NOBODY = 65534


def print_values(kind: str, word: str) -> int:
    """Print the values of *kind* that complete *word*, one per line, with what each is behind a tab."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    lines: list[str] = []
    if kind in VALUES:
        with suppress(GpuguardError, OSError):
            lines = list(_completions(kind, word))
    print("".join(f"{line}\n" for line in lines), end="")
    return 0


def _give_up(*_: object) -> NoReturn:
    os._exit(0)


def _completions(kind: str, word: str) -> Iterator[str]:
    """``"0,1\\tH100 80GB HBM3"`` for the word ``0,``: what was named before is not offered again."""
    values, is_list = VALUES[kind]
    before, _, last = word.rpartition(",") if is_list else ("", "", word)
    named = before.split(",")
    for value, what in values(last):
        # A word that a shell would take apart or execute was written to do harm.
        plain = value.isprintable() and not set(value) & set(" \\\"'`$;|&<>()*?[]{}~#!")
        if value.startswith(last) and value not in named and plain:
            yield f"{before}{',' * bool(before)}{value}\t{neutralise(what)[:60]}"


def _devices(word: str) -> Values:
    """By index; by uuid once the user has begun to write one."""
    snapshot = _snapshot()
    return [
        (device.uuid if word[:1].isalpha() or "?" in device.label else device.label, _state(device, snapshot))
        for device in snapshot.devices
    ]


def _uuids(_: str) -> Values:
    snapshot = _snapshot()
    return [(device.uuid, f"{device.label} {_state(device, snapshot)}") for device in snapshot.devices]


def _state(device: Device, snapshot: Snapshot) -> str:
    users = dict.fromkeys(claim.user for claim in snapshot.claims if device.uuid in claim.devices)
    memory = f"{format_bytes(device.memory_used)}/{format_bytes(device.memory_total)}"
    held = f"claimed by {', '.join(users)}" if users else None
    barred = dict(snapshot.quarantined).get(device.uuid)
    return " ".join(filter(None, [device.mig_profile or device.name, memory, held, barred]))


def _models(_: str) -> Values:
    """The word of a name that tells it from others: H100 of "H100 80GB HBM3"."""
    names = dict.fromkeys(device.name for device in _snapshot().devices if device.name)
    found = {next((part for part in name.split() if any(map(str.isdigit, part))), name): name for name in names}
    return found.items()


def _profiles(_: str) -> Values:
    found = dict.fromkeys(device.mig_profile for device in _snapshot().devices if device.mig_profile)
    return [(profile, "") for profile in found]


def _processes(_: str) -> Values:
    """Own ones on devices, for root everybody's."""
    uid = os.geteuid()
    found: dict[str, str] = {}
    for device in _snapshot().devices:
        for process in device.processes or ():
            if uid in (0, process.uid):
                what = f"GPU {device.label} {process.user or ''} {neutral_command(process.command, brief=True)}"
                found.setdefault(str(process.pid), what)
    return found.items()


def _users(_: str) -> Values:
    """Users of devices and owners of claims, and the people of this machine; a directory service is not asked."""
    found: dict[str, str] = {}
    with suppress(GpuguardError, OSError):
        snapshot = _snapshot()
        processes = [process for device in snapshot.devices for process in device.processes or ()]
        found = dict.fromkeys([each.user for each in processes if each.user], "uses a GPU")
        found |= dict.fromkeys([claim.user for claim in snapshot.claims], "has a claim")
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        for name, _password, uid, *_rest in (line.split(":") for line in lines if line.count(":") >= 6):
            if uid.isdecimal() and (uid == "0" or _BEFORE_PEOPLE <= int(uid) != _NOBODY):
                found.setdefault(name, "")
    return found.items()


def _claims(_: str) -> Values:
    """Own claims, for root everybody's."""
    from gpuguard.claims.records import read_records

    uid = os.geteuid()
    return [
        (claim.id, f"{claim.user} {claim.note or neutral_command(claim.command, brief=True)}")
        for claim in read_records(_directory())
        if uid in (0, claim.uid)
    ]


def _reservations(_: str) -> Values:
    """Own reservations, for root everybody's."""
    from gpuguard.queue.reservation_store import read

    uid = os.geteuid()
    found, _torn, _arrived = read(_directory(), time.time())
    return [
        (one.id, f"{one.user} {time.strftime('%a %H:%M', time.localtime(one.begins))} {one.note or ''}")
        for one in found
        if uid in (0, one.uid, one.maker)
    ]


def _hosts(_: str) -> Values:
    """Those that the user's ssh knows by name."""
    found: dict[str, str] = {}
    for name, begins in (("config", "host "), ("known_hosts", "")):
        with suppress(OSError), open(os.path.expanduser(f"~/.ssh/{name}"), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                plain = line.replace("=", " ")  # "Host=gpu1" is allowed
                words = plain.split() if plain.lower().startswith(begins) else []
                if words and not words[0].startswith(("#", "|", "@", "[")):
                    names = words[1:] if begins else words[0].split(",")
                    found.update({one: "" for one in names if not set(one) & set("*?!")})
    return found.items()


def _fields(_: str) -> Values:
    from gpuguard.views.query import GPU_FIELDS

    return [(name, field.text) for name, field in GPU_FIELDS.items()]


def _apps(_: str) -> Values:
    from gpuguard.views.query import APP_FIELDS

    return [(name, field.text) for name, field in APP_FIELDS.items()]


# Each kind, and whether its values may stand behind each other with commas.
VALUES: dict[str, tuple[Callable[[str], Values], bool]] = {
    "devices": (_devices, True),
    "uuids": (_uuids, False),
    "models": (_models, False),
    "profiles": (_profiles, False),
    "processes": (_processes, False),
    "users": (_users, False),
    "claims": (_claims, False),
    "reservations": (_reservations, False),
    "hosts": (_hosts, True),
    "fields": (_fields, True),
    "apps": (_apps, True),
}


def _snapshot() -> Snapshot:
    """What the daemon saw; else what the driver says; with the claims."""
    source = SnapshotSource(_backend(), lambda: open_worker(_backend()), _directory, read=_read)
    try:
        return source.joined(reservations=False)[0]
    finally:
        source.close()


def _read(backend: Backend) -> Snapshot:
    return backend.sample({HEALTH, MEMORY, MODEL, PROCESSES, PROCESS_DETAILS})


def _directory() -> LockDirectory:
    return lock_directory(os.environ.get("GPUGUARD_DIR") or None, backend=_backend(), make=False)


def _backend() -> str:
    return os.environ.get("GPUGUARD_BACKEND") or "nvml"
