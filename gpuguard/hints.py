"""What hints are made of, without typing: that is 0.7 MiB of a daemon, and 6 ms of the start of a command.

To a type checker these *are* typing's.  A hint that somebody evaluates (documents.decoding) becomes typing's as well.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Annotated as Annotated
    from typing import Any as Any
    from typing import Literal as Literal
    from typing import NamedTuple as NamedTuple
    from typing import Protocol as Protocol
else:
    Any = Protocol = object

    class _Word:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, meant: Any) -> Any:
            import typing

            return getattr(typing, self._name)[meant]

    Annotated, Literal = _Word("Annotated"), _Word("Literal")

    class _Tuples(type):
        def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
            if not bases:
                return super().__new__(cls, name, bases, own)
            from collections import namedtuple

            names = tuple(own.pop("__annotations__"))
            defaults = [own.pop(each) for each in names if each in own]
            made = namedtuple(name, names, defaults=defaults, module=own["__module__"])
            for each, value in own.items():
                setattr(made, each, value)
            return made

    class NamedTuple(metaclass=_Tuples):
        """As typing's."""
