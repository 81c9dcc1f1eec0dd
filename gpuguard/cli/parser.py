"""From the words behind a command to its arguments: argparse, whose faults are ours."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, NoReturn

# argparse's words, and what people understand
_CLEARER = {
    "expected one argument": "a value is missing (it cannot begin with a dash)",
    "ignored explicit argument": "it takes no value, but got",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser whose faults are InvalidRequest, so that each command can choose its exit code."""

    def __init__(self, **settings: Any) -> None:
        if sys.version_info >= (3, 14):
            settings["color"] = False  # it would get into manual pages and whatever else help is written to
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but each parser complains itself: for `gpuguard sim show x` that is `sim show`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{self._similar(unknown[0])}{self._taken(namespace)}"
            )
        return namespace, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"] and action.option_strings and action.nargs is None:
            raise argparse.ArgumentError(action, "expected one argument")  # of --note=-- argparse makes []
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """What argparse calls for every fault."""
        for before, after in _CLEARER.items():
            message = message.replace(before, after)
        raise InvalidRequest(f"{message.removeprefix('argument ').rstrip('.')}.\nSee `{self.prog} --help`.")

    def _similar(self, word: str) -> str:
        # Without the dashes, which all have: --json was like --slots by them.
        flags = {flag.lstrip("-"): flag for action in self._actions for flag in action.option_strings}
        near = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), flags, n=1)
        return f" (did you mean {flags[near[0]]}?)" if near else ""

    def _taken(self, namespace: Any) -> str:
        """Which option may have taken the command for its value, as in ``run --wait python -V``."""
        for action in self._actions if hasattr(namespace, "command") else ():
            value = getattr(namespace, action.dest, None) if action.nargs == "?" and action.option_strings else None
            if isinstance(value, str) and value != action.const and value[:1].isalpha():
                flag = action.option_strings[-1]
                return f".\n{value!r} was taken for the value of {flag}: write `{flag} -- {value}` if it is the command"
        return ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """As argparse's own, without shutil (lzma, bz2), which it imports to learn the width before any help is shown."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and len(columns) < 10 and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def parse(module: ModuleType, command: str, words: list[str]) -> argparse.Namespace:
    """What the *words* behind a command say.  Raises SystemExit after --help, InvalidRequest for a fault."""
    parser = parser_of(module, command)
    return parser.parse_args(_joined(parser, words))


def parser_of(module: ModuleType, command: str) -> Parser:
    """The parser of one sub-command."""
    parser = Parser(
        prog=f"gpuguard {command}",
        description=module.__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.add_options(parser)
    return parser


def _joined(parser: Parser, words: list[str]) -> list[str]:
    """*words* with the value of --or behind "=": it is made of options, and argparse would take it for one.

    The words of the job are its own, with or without ``--`` before them.
    """
    if "--or" not in words:
        return words
    joined, place = [], 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        word, behind = words[place], words[place + 1 : place + 2]
        if word == "--or" and behind not in ([], ["--"]):
            joined.append(f"--or={behind[0]}")
            place += 2
            continue
        action = parser._option_string_actions.get(word)
        nargs = 0 if action is None else action.nargs
        takes = nargs is None or (nargs == "?" and not "".join(behind).startswith("-"))
        joined += words[place : place + 1 + takes]
        place += 1 + takes
    return joined + words[place:]


@dataclass(frozen=True)
class SubcommandRow:
    """A command of a command, as `gpuguard policy check`."""

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, SubcommandRow]) -> None:
    """A parser for each; which one was typed is ``args.action``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, row in actions.items():
        description = f"{row.purpose[:1].upper()}{row.purpose[1:]}."
        command = commands.add_parser(
            name, help=row.purpose, description=description, allow_abbrev=False, formatter_class=parser.formatter_class
        )
        row.add_options(command)
