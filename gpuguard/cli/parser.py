"""From the words behind a command to its arguments: argparse, whose faults are ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest

if TYPE_CHECKING:
    from typing import Any, NoReturn

# argparse's words, and what people understand
_CLEARER = {
    "expected one argument": "a value is missing (it cannot begin with a dash)",
    "ignored explicit argument": "it takes no value, but got",
}


@dataclass(frozen=True)
class SubcommandRow:
    """A command, or a command of a command as `gpuguard policy check`."""

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """An argparse parser whose faults are InvalidRequest, so that each command can choose its exit code."""

    def __init__(self, **settings: Any) -> None:
        if sys.version_info >= (3, 14):
            settings["color"] = False  # it would get into manual pages and whatever else help is written to
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but each parser complains itself: for `gpuguard sim show x` that is `sim show`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            import difflib  # for a mistake

            # Without the dashes, which all have: --json was like --slots by them.
            flags = {flag.lstrip("-"): flag for action in self._actions for flag in action.option_strings}
            near = difflib.get_close_matches(unknown[0].partition("=")[0].lstrip("-"), flags, n=1)
            similar = f" (did you mean {flags[near[0]]}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{similar}{self._taken(namespace)}")
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

    def _taken(self, namespace: Any) -> str:
        """Which option may have taken the command for its value, as in ``run --wait python -V``."""
        for action in self._actions if hasattr(namespace, "command") else ():
            value = getattr(namespace, action.dest, None) if action.nargs == "?" and action.option_strings else None
            if isinstance(value, str) and value != action.const and value[:1].isalpha():
                flag = action.option_strings[-1]
                return f".\n{value!r} was taken for the value of {flag}: write `{flag} -- {value}` if it is the command"
        return ""


def with_joined_alternatives(parser: Parser, words: list[str]) -> list[str]:
    """*words* with the value of --or behind "=": it is made of options, and argparse would take it for one.

    The words of the job are its own, with or without ``--`` before them.
    """
    if "--or" not in words:
        return words
    joined, position = [], 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        word, behind = words[position], words[position + 1 : position + 2]
        if word == "--or" and behind not in ([], ["--"]):
            joined.append(f"--or={behind[0]}")
            position += 2
            continue
        action = parser._option_string_actions.get(word)
        nargs = 0 if action is None else action.nargs
        takes = nargs is None or (nargs == "?" and not "".join(behind).startswith("-"))
        joined += words[position : position + 1 + takes]
        position += 1 + takes
    return joined + words[position:]


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, SubcommandRow]) -> None:
    """A parser for each; which one was typed is ``args.action``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, row in actions.items():
        description = f"{row.purpose[:1].upper()}{row.purpose[1:]}."
        row.add_options(commands.add_parser(name, help=row.purpose, description=description))
