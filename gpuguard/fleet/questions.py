"""What one gpuguard may ask another one over ssh: which views, and which of their options.

The same table makes the question here and judges it there (`gpuguard serve-ssh`), so that what is asked is answered.
Not in it is whatever writes, runs for ever, reads a file that the caller names (--backend, --dir), or asks further
hosts (--hosts).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

PROGRAM = "gpuguard"

_CHOICE = (
    "num_gpus", "gpus", "exclude", "prefer", "min_free", "min_total", "max_util", "max_memory_util", "max_processes",
    "max_temperature", "model", "strategy", "mig", "mine_as_free", "tolerance", "share", "memory", "slots",
)  # fmt: skip
VIEWS: dict[str, tuple[str, ...]] = {  # view: the options (as argparse calls them) that it takes besides --json
    "who": ("user", "device", "fresh"),
    "queue": ("fresh",),
    "select": (*_CHOICE, "min_count", "max_count", "inherit", "no_sort"),
    "explain": _CHOICE,
}


def words_of(view: str, given: Mapping[str, object]) -> list[str]:
    """The words that ask for *view* with the options *given*, as argparse has them."""
    words = [view, "--json"]
    for name in VIEWS[view]:
        value, flag = given.get(name), f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True or value == "":
            words.append(flag)
        else:
            words += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    return words


def command_line(program: Sequence[str], words: Sequence[str]) -> str:
    """*words* for the shell of the other side."""
    return shlex.join([*program, *words])


def asked(command: str) -> list[str]:
    """The words of a command line that came over ssh, from the view on; [] where it is not for gpuguard."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        return []
    if words and words[0].rpartition("/")[2] == PROGRAM:
        del words[0]
    return words if words and words[0] in VIEWS else []
