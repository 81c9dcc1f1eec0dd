"""Modules that stand for others until somebody asks them for something that they do not have themselves.

A module that is imported and hardly used costs a start milliseconds, and a service MiB for as long as it runs.
importlib.util.LazyLoader does the same, but loads the real one at the second import of its name (Python 3.11).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # the sampler imports this while a job starts
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def stand_in(name: str, own: dict[str, Any]) -> ModuleType:
    """A module of that name with what is in *own*; everything else is the real one's, which is loaded for it."""

    def further(attribute: str) -> Any:
        if attribute.startswith("__"):  # the import itself asks for __path__
            raise AttributeError(attribute)
        return getattr(real(name), attribute)

    module = type(sys)(name)
    vars(module).update(own, __getattr__=further)
    return module


def put_off(name: str, **own: Any) -> None:
    """Let the next `import name` load nothing, unless it is loaded already; *own* as for stand_in()."""
    sys.modules.setdefault(name, stand_in(name, own))


def real(name: str) -> Any:
    """The module itself."""
    if name in sys.modules and not sys.modules[name].__spec__:
        del sys.modules[name]
    return __import__(name, fromlist=[""])
