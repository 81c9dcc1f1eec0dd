"""What stands for typing is typing's own to whoever looks, and loads nothing until then."""

from __future__ import annotations

import pickle
import subprocess
import sys
import typing

import pytest

from gpuguard import hints
from gpuguard.units import parse_bytes

LOADS = """
import sys
from gpuguard.hints import Annotated, Any, Literal, NamedTuple, Protocol
class Point(NamedTuple):
    x: int
class Kind(Protocol):
    def check(self, of: Annotated[int, 1]) -> Literal["a"]: ...
print("typing" in sys.modules)
"""


class Point(hints.NamedTuple):
    """A place."""

    x: int
    y: int = 2

    @property
    def sum(self) -> int:
        """Of both."""
        return self.x + self.y


class Rule:
    limit: hints.Annotated[int | None, parse_bytes]
    kind: hints.Literal["one", "two"]


def test_nothing_is_loaded_until_somebody_evaluates_a_hint():
    code = "from __future__ import annotations\n" + LOADS

    assert subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_a_hint_that_is_evaluated_is_of_typing():
    found = typing.get_type_hints(Rule, include_extras=True)

    assert found == {"limit": typing.Annotated[int | None, parse_bytes], "kind": typing.Literal["one", "two"]}


def test_a_named_tuple_is_as_that_of_typing():
    point = Point(1)

    assert point == (1, 2) and point.sum == 3 and point._replace(x=5) == Point(5, 2)
    assert (Point.__name__, Point.__doc__, Point.__module__) == ("Point", "A place.", __name__)
    assert pickle.loads(pickle.dumps(point)) == point
    with pytest.raises(TypeError):
        Point(y=1)  # type: ignore[call-arg]
