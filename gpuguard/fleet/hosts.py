"""Names of hosts, as ssh takes them: ``gpu1``, ``alice@gpu1``, ``ssh://alice@gpu1:2222``, an alias of ~/.ssh/config.

A name becomes a word of ssh's command line, and ssh puts it into ProxyCommand and Match exec of its user's
configuration, which a shell runs.  So a name consists of letters, digits and ``. _ - :``, and never begins like an
option.  This module looks no name up.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping

from gpuguard.errors import InvalidRequest
from gpuguard.locale import _

MOST = 10_000
_FILE_BYTES = 2**20
_WORD = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*)"
_V6 = r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:@[A-Za-z0-9_.-]+)?"  # user@corp.example@host: ssh splits at the last @
_HOST = re.compile(rf"(?:{_USER}@)?(?:{_WORD}|{_V6})|ssh://(?:{_USER}@)?(?:{_WORD}|\[{_V6}\])(?::\d{{1,5}})?")
_RANGE = re.compile(r"([^\[\]]*)\[(\d{1,5})-(\d{1,5})\]([^\[\]]*)")


def host_names(text: str | None, path: str | None) -> tuple[str, ...]:
    """Return the hosts of ``--hosts`` and of ``--hosts-file``, each once, in the order in which they stand there.

    Raises:
        InvalidRequest: ssh must not see a name, there are too many or none, or the file cannot be read.
    """
    words = [("--hosts", word.strip()) for word in text.split(",")] if text is not None else []
    for number, line in enumerate(_lines(path) if path is not None else (), 1):
        words += [(f"{path}:{number}", word) for word in line.partition("#")[0].replace(",", " ").split()]
    found: dict[str, None] = {}
    for where, word in words:
        for name in _spread(word):
            if len(name) > 255 or not _HOST.fullmatch(name):
                raise InvalidRequest(
                    _(
                        "{where}: {name!r} is no name of a host.  Write gpu1, alice@gpu1, ssh://alice@gpu1:2222 or "
                        "gpu[01-16]; whatever else it needs belongs into ~/.ssh/config, under an alias."
                    ).format(where=where, name=name[:60])
                )
            found[name] = None
    if not found:
        raise InvalidRequest(
            _("{path} names no host: write them like --hosts gpu1,gpu2, or one per line.").format(
                path=path or "--hosts"
            )
        )
    if len(found) > MOST:
        raise InvalidRequest(
            _(
                "{count} hosts are more than the {most} that can be asked at once.  Prometheus is made for that "
                "many: see docs/scale.md."
            ).format(count=len(found), most=MOST)
        )
    return tuple(found)


def _spread(word: str) -> list[str]:
    """Expand ``gpu[08-10]`` to ``["gpu08", "gpu09", "gpu10"]``."""
    found = _RANGE.fullmatch(word)
    if not found:
        return [word]
    before, first, last, behind = found.groups()
    if int(last) < int(first) or int(last) - int(first) >= MOST:
        raise InvalidRequest(
            _("{word!r}: the range goes from {first} to {last}; at most {most} hosts, upwards.").format(
                word=word[:60], first=first, last=last, most=MOST
            )
        )
    return [f"{before}{number:0{len(first)}}{behind}" for number in range(int(first), int(last) + 1)]


def _lines(path: str) -> list[str]:
    try:
        if path == "-":
            content = sys.stdin.buffer.read(_FILE_BYTES + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(
            _("--hosts-file: {path} cannot be read: {strerror}.").format(path=path, strerror=error.strerror)
        ) from None
    if len(content) > _FILE_BYTES:
        raise InvalidRequest(
            _("--hosts-file: {path} is larger than 1MiB: it should hold one host per line.").format(path=path)
        )
    return content.decode("utf-8", "replace").splitlines()


# The views and their options for which one gpuguard may ask another over ssh.  The same table makes the query here and
# judges it there (`gpuguard serve-ssh`), so that every query is answered.  It leaves out everything that writes, runs
# for ever, reads a file that the caller names (--backend, --dir), or asks further hosts (--hosts).

PROGRAM = "gpuguard"

_CHOICE = (
    "num_gpus", "devices", "exclude", "prefer", "min_free", "min_total", "max_util", "max_memory_util", "max_processes",
    "max_temperature", "model", "vendor", "strategy", "mig", "allow_mig_set", "mine_as_free", "tolerance", "share",
    "memory", "slots",
)  # fmt: skip
VIEWS: dict[str, tuple[str, ...]] = {  # view: the options (as argparse calls them) that it takes besides --json
    "who": ("user", "device", "fresh"),
    "queue": ("fresh",),
    "select": (*_CHOICE, "min_count", "max_count", "inherit", "no_sort"),
    "explain": _CHOICE,
    "report": ("since", "until", "by", "user"),
}


def words_of(view: str, given: Mapping[str, object]) -> list[str]:
    """Return the command line that asks for *view* with the options *given*, as argparse has them."""
    words = [view, "--json"]
    for name in VIEWS[view]:
        value, flag = given.get(name), f"--{name.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True or value == "":
            words.append(flag)
        else:
            words += [f"{flag}={text}" for text in (value if isinstance(value, list) else [value])]
    return words


def requested_words(command: str) -> list[str]:
    """Return the words of a command line that came over ssh, from the view on, or [] if it is not for gpuguard."""
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        return []
    if words and words[0].rpartition("/")[2] == PROGRAM:
        del words[0]
    return words if words and words[0] in VIEWS else []
