"""Write the man pages: gpuguard(1) and one per command, from the parsers of the commands.  See scripts/build-man.

The usual generators were tried: argparse-manpage runs the columns of the examples together, and names pages so that
whatis does not find them.  Needs nothing but Python; never imported by gpuguard.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuguard import __version__
from gpuguard.cli import COMMANDS, build_parser, overview

_ESCAPES = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti", '"': "\\(dq"}

_EXIT_STATUS = (
    (
        "run, submit",
        "the command's own; 128+N when signal N ended it; 124 the wait or the time limit ran out; 125 gpuguard failed "
        "or the request can never be met; 126 not executable; 127 not found; 75 not now, with --no-wait",
    ),
    ("others", "0; 1 the answer is no; 2 wrong usage; 4 the driver cannot be reached; 124 the time of `wait` ran out"),
)
_ENVIRONMENT = (
    ("GPUGUARD_BACKEND", "what --backend is by default"),
    ("GPUGUARD_DIR", "what --dir is by default"),
    ("GPUGUARD_EVENTS", "the file of the events, in the place of the one that `gpuguard events` reads by default"),
    ("GPUGUARD_SIM_DIR", "where the simulated node lies"),
    ("GPUGUARD_DEBUG", "show where an error inside gpuguard happened"),
    ("NO_COLOR", "no colours"),
    ("CUDA_VISIBLE_DEVICES", "where it is set, gpuguard stays inside it; in a job it names the GPUs of the claim"),
)
_FILES = (
    ("/run/gpuguard", "the claims of all users, made by `gpuguard setup`"),
    ("/etc/gpuguard/policy.yaml", "the policies of the daemon"),
)


def main() -> int:
    """Write them into the directory that the command line names."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: scripts/manpages.py DIRECTORY\n")
        return 2
    os.environ["COLUMNS"] = "100"
    for name in [name for name in os.environ if name.startswith("GPUGUARD_")]:
        del os.environ[name]  # they are defaults in the help
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpuguard.1").write_text(_joined(overview_page()), encoding="ascii")
    for name in COMMANDS:
        (directory / f"gpuguard-{name}.1").write_text(_joined(command_page(name)), encoding="ascii")
    return 0


def overview_page() -> Iterator[str]:
    """gpuguard(1)."""
    purpose, examples = overview().split("\n\n")[1], overview().split("\n\n")[3]
    yield from _head("gpuguard", "claim GPUs on a shared server, run jobs on them, see who uses what")
    yield from (
        ".SH SYNOPSIS",
        ".B gpuguard",
        "COMMAND [options]",
        ".SH DESCRIPTION",
        *_filled(purpose),
        ".SH COMMANDS",
    )
    for name, what in COMMANDS.items():
        yield from (".TP", f".BR {_escaped(f'gpuguard-{name}')} (1)", *_filled(what))
    yield ".SH EXAMPLES"
    yield from _paragraphs(examples)
    for title, rows in (("EXIT STATUS", _EXIT_STATUS), ("ENVIRONMENT", _ENVIRONMENT), ("FILES", _FILES)):
        yield f".SH {title}"
        for name, what in rows:
            yield from (".TP", f".B {_escaped(name)}", *_filled(what))
    yield from (".SH SEE ALSO", *_see(COMMANDS))


def command_page(name: str) -> Iterator[str]:
    """The page of one command, with those of its sub-commands."""
    parser = build_parser(name)
    yield from _head(f"gpuguard-{name}", COMMANDS[name])
    yield ".SH SYNOPSIS"
    yield from _usage(parser)
    yield ".SH DESCRIPTION"
    yield from _paragraphs(parser.description or "")
    yield ".SH OPTIONS"
    yield from _options(parser)
    followers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in followers:
        for follower, below in action.choices.items():
            yield f".SH {_escaped(f'{name} {follower}'.upper())}"
            yield from _usage(below)
            yield ".PP"
            yield from _paragraphs(below.description or "")
            yield from _options(below)
    yield from (".SH SEE ALSO", ".BR gpuguard (1)")


def _head(name: str, purpose: str) -> Iterator[str]:
    since_epoch = os.environ.get("SOURCE_DATE_EPOCH", str(time.time()))
    day = time.strftime("%Y-%m-%d", time.gmtime(float(since_epoch))) if since_epoch else '""'  # "": no date at all
    yield f'.TH {_escaped(name.upper())} 1 {day} "gpuguard {_escaped(__version__)}" "User Commands"'
    yield from (".nh", ".ad l", ".SH NAME", f"{_escaped(name)} \\- {_escaped(purpose)}")


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    words = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    yield f".B {_escaped(parser.prog)}"
    yield from _filled(words.removeprefix(parser.prog).strip() or " ")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if _is_shown(action)]
        if not actions:
            continue
        if group.title not in ("options", "optional arguments", "positional arguments"):
            yield f".SS {_escaped(group.title or '')}"
            yield from _paragraphs(group.description or "")
        for action in actions:
            yield ".TP"
            yield _flags(action)
            yield from _filled(" ".join(formatter._expand_help(action).split()))


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._SubParsersAction)


def _flags(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else f"{{{','.join(map(str, action.choices or ()))}}}"
    if not isinstance(action.metavar, str) and not action.choices:
        name = action.dest.upper()
    value = "" if action.nargs == 0 else f" \\fI{_escaped(name)}\\fR"
    if action.nargs == "?":
        value = f" [{value.strip()}]"
    if not action.option_strings:
        return value.strip()
    return ", ".join(f"\\fB{_escaped(flag)}\\fR" for flag in action.option_strings) + value


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs; a line of two columns, command and what it does, becomes an entry of a list."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if not paragraph.strip():
            continue
        lines = paragraph.splitlines()
        if not any(re.search(r"\S {2,}\S", line) and not re.search(r"[.:;] {2}\S", line) for line in lines):
            yield from ([".PP"] if number else [])
            yield from _filled(" ".join(paragraph.split()))
            continue
        for line in lines:
            command, what = [*re.split(r" {2,}", line.strip(), maxsplit=1), ""][:2]
            yield from (".TP", f".B {_escaped(command)}", *(_filled(what) if what else [".br"]))
        yield ".PP"


def _see(names: Iterable[str]) -> Iterator[str]:
    pages = [f"gpuguard-{name}" for name in names]
    for page in pages:
        yield f".BR {_escaped(page)} (1){',' if page != pages[-1] else ''}"


def _filled(text: str) -> list[str]:
    lines = textwrap.wrap(text, 66, break_long_words=False, break_on_hyphens=False)
    return [f"\\&{line}" if line[:1] == "." else line for line in map(_escaped, lines)]


def _escaped(text: str) -> str:
    return "".join(_ESCAPES.get(one) or (one if one.isascii() else f"\\[u{ord(one):04X}]") for one in text)


def _joined(lines: Iterable[str]) -> str:
    """Without a paragraph before a heading, or two in a row, which mean nothing."""
    kept: list[str] = []
    for line in lines:
        if kept and kept[-1] == ".PP" and line.startswith((".SH", ".SS", ".PP", ".TP")):
            kept.pop()
        kept.append(line)
    while kept[-1] == ".PP":
        kept.pop()
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    sys.exit(main())
