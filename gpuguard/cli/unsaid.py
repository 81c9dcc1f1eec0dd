"""The arguments of a command that was typed without a word behind it, without argparse: 7 ms, with re."""

from __future__ import annotations

TYPE_CHECKING = False  # typing costs 6 ms of import
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


class Unsaid:
    """What argparse would make of no words at all, of a command without positional or required arguments.

    To add_options() of *module* it is a parser, which notes what each option is when nobody says it.
    """

    def __init__(self, module: ModuleType) -> None:
        module.add_options(self)

    def add_argument(self, flag: str, *, default: Any = None, action: str = "store", **_: object) -> None:
        """As argparse's own, for one long flag."""
        value = False if action == "store_true" else default
        setattr(self, flag.removeprefix("--").replace("-", "_"), value)

    def add_argument_group(self, title: str) -> Unsaid:
        """As argparse's own."""
        return self
