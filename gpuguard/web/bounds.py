"""How much of what users wrote goes into a frame, which all viewers get every two seconds.

One user with a GPU may write hundreds of records about it, each with a command line of 4 KiB.  What is left out is
counted among what is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_CLAIMS, MOST_PROCESSES, MOST_PLACES = 8, 64, 64  # of one user: on a device, on a device, in line
MOST_ROWS = 512  # of all users
MOST_NAMELESS = 64  # of all users without a name: who may use user namespaces has 65536 such uids
LONGEST_COMMAND = 400  # characters, in all words, and of a note: more does not fit into a card


def bounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """*content* of a frame, with so much of each list and each command line."""
    left_out: list[str] = []
    devices = []
    for device in content["devices"]:
        name = f"GPU {device['index']}"
        claims = _some(device["claims"], MOST_CLAIMS, f"{name}: claims", left_out)
        processes = device["processes"]
        if processes is not None:
            processes = _some(processes, MOST_PROCESSES, f"{name}: processes", left_out)
        devices.append({**device, "claims": claims, "processes": processes})
    line = _some(content["line"], MOST_PLACES, "the waiting line", left_out)
    users = _some(content["users"], 1, "users", left_out)
    return {**content, "devices": devices, "users": users, "line": line, "unknown": [*left_out, *content["unknown"]]}


def _some(rows: Sequence[Mapping[str, Any]], most: int, what: str, left_out: list[str]) -> list[Mapping[str, Any]]:
    """The first *most* rows of each user, and a word on the others: nobody's crowd hides somebody else."""
    of_user: Counter[str] = Counter()
    nameless = 0
    shown: list[Mapping[str, Any]] = []
    for row in rows:
        user = str(row["user"])
        of_user[user] += 1
        if of_user[user] > most or len(shown) >= MOST_ROWS or (user.isdecimal() and nameless >= MOST_NAMELESS):
            continue
        nameless += user.isdecimal()
        shown.append({name: _cut(value) for name, value in row.items()})
    if len(rows) > len(shown):
        left_out.append(f"{what}: {len(rows) - len(shown)} more are not shown")
    return shown


def _cut(value: Any) -> Any:
    """*value*, a text or a list of texts no longer than can be read."""
    if isinstance(value, str):
        return "".join(_short([value]))
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return list(_short(value))
    return value


def _short(words: Sequence[str]) -> Iterator[str]:
    left = LONGEST_COMMAND
    for word in words:
        if len(word) >= left:
            yield word[:left] + "..."
            return
        yield word
        left -= len(word) + 1
