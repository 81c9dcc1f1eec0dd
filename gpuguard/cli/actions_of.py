"""Commands that have commands of their own, as `gpuguard policy check`: a table of them, and its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One sub-command."""

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, Row]) -> None:
    """A parser for each; which one was typed is ``args.action``."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, row in actions.items():
        description = f"{row.purpose[:1].upper()}{row.purpose[1:]}."
        command = commands.add_parser(
            name, help=row.purpose, description=description, allow_abbrev=False, formatter_class=parser.formatter_class
        )
        row.add_options(command)
