"""Loads nvidia-ml-py for a sampler: without the modules and the structures that a sampler does not use.

The binding makes 206 structures of ctypes (21 of the 117 million instructions of a sampler, before every job), of which
a dozen are used, and a class for each of 28 errors, and loads thirty modules of the standard library (20 ms, 4 MiB), of
which four have one function each that is used.  So while it loads, it gets stand-ins that make the real thing when it
is first used.  What cannot be put off is loaded in full.
Only for a process of ours, without threads that import: see sampler.  Calls nothing: see nvml_calls.
"""

from __future__ import annotations

import _thread
import sys
from _frozen_importlib import module_from_spec  # importlib would be read from its file

from gpuguard.standins import real, stand_in

TYPE_CHECKING = False  # see nvml_calls
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


def load_bindings() -> None:
    """Import pynvml, if it is not yet; nothing happens where it is missing, which nvml_calls.start() tells."""
    if "pynvml" in sys.modules:
        return
    try:
        with _Standing(_stand_ins({**_OF_CTYPES, "ctypes._endian": _other_endian()})):
            import ctypes
        with _Standing({**_stand_ins(_OF_PYNVML), "ctypes": _putting_off(ctypes)}):
            _load("pynvml")
    except ImportError:
        sys.modules.pop("pynvml", None)
    except Exception:  # noqa: BLE001  whatever a binding of another version does while it loads
        sys.modules.pop("pynvml", None)
        import pynvml  # noqa: F401


def _load(name: str) -> None:
    """Import the binding without the classes of its errors, which it makes of the names that dir() tells."""
    spec = next(filter(None, (finder.find_spec(name, None) for finder in sys.meta_path)), None)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module: Any = module_from_spec(spec)
    module.dir = lambda module: ()
    sys.modules[name] = module
    spec.loader.exec_module(module)
    del module.dir
    module.NVMLError._valClassMapping = _Errors()


class _Errors(dict[int, type]):
    """The classes of the errors, which the binding makes when it raises one: 3 million instructions."""

    def get(self, code: int, default: Any = None) -> Any:
        """The class of that error; what the binding asks for whenever it raises one."""
        if not self:
            sys.modules["pynvml"]._extractNVMLErrorsAsClasses()
        return super().get(code, default)


class _Standing:
    """While it lasts, these modules stand for the real ones."""

    def __init__(self, stand_ins: dict[str, ModuleType]) -> None:
        self._stand_ins = stand_ins

    def __enter__(self) -> None:
        self._before = {name: sys.modules.get(name) for name in self._stand_ins}
        sys.modules.update(self._stand_ins)

    def __exit__(self, *_: object) -> None:
        for name, module in self._stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            if (earlier := self._before[name]) is not None:
                sys.modules[name] = earlier


def _stand_ins(hardly_needed: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    return {name: stand_in(name, own) for name, own in hardly_needed.items() if name not in sys.modules}


def _calcsize(code: Any) -> Any:
    try:
        return memoryview(bytes(16)).cast(code).itemsize
    except ValueError:  # complex numbers, since Python 3.14
        return real("struct").calcsize(code)


_OF_CTYPES: dict[str, dict[str, Any]] = {
    "struct": {"calcsize": _calcsize},
    "types": {"GenericAlias": type(list[int])},
}
_OTHER_ENDIAN = ("BigEndianStructure", "BigEndianUnion", "LittleEndianStructure", "LittleEndianUnion")
_OF_PYNVML: dict[str, dict[str, Any]] = {
    "ctypes.util": {"find_library": lambda name: real("ctypes.util").find_library(name)},  # called on Windows alone
    "functools": {"wraps": lambda _: lambda function: function},
    "string": {"capwords": lambda text, apart: apart.join(map(str.capitalize, text.split(apart)))},
    "threading": {"Lock": _thread.allocate_lock},
}


class Later:
    """A type of ctypes that is made when it is first called, multiplied, or asked for anything."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    def __call__(self, *arguments: Any, **fields: Any) -> Any:
        """A value of that type."""
        return made(self)(*arguments, **fields)

    def __mul__(self, length: int) -> Later:
        """The type of an array of so many."""
        return Later(lambda: made(self) * length)

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        """A field, or what else the type has."""
        return getattr(made(self), name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """What Python takes for this as a base: the class statement keeps the true ones in ``__orig_bases__``."""
        return (_Base,)


def made(kind: Any) -> Any:
    """The type itself; what is no Later is it already."""
    if not isinstance(kind, Later):
        return kind
    if kind._made is None:
        kind._made = kind._make()
    return kind._made


class _PutOff(type):
    """Makes a Later of each class statement whose base is one of its classes."""

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Any:
        """See type; without a base it is a class, which stands for a base of ctypes."""
        if not bases:
            return super().__new__(cls, name, bases, space)
        later = Later(lambda: _structure(later, name, bases, space))
        return later


class _Base(metaclass=_PutOff):
    """What a class statement takes a Later for, which is no class."""


def _structure(later: Later, name: str, bases: tuple[Any, ...], space: dict[str, Any]) -> type:
    """The structure that a class statement describes, of types that are made."""
    bases = tuple(made(getattr(base, "stands_for", base)) for base in space.pop("__orig_bases__", bases))
    if "_fields_" in space:
        space["_fields_"] = [(field, made(kind), *width) for field, kind, *width in space["_fields_"]]
    real: type = type(bases[0])(name, bases, space)
    where = vars(sys.modules[real.__module__])
    if where.get(name) is later:
        where[name] = real  # methods name their own class, as in super()
    return real


def _other_endian() -> dict[str, Any]:
    """What ctypes has for numbers of other machines."""

    def later(name: str) -> Later:
        return Later(lambda: getattr(real("ctypes._endian"), name))

    return {name: later(name) for name in _OTHER_ENDIAN}


def _putting_off(ctypes: ModuleType) -> ModuleType:
    """ctypes, whose structures, and arrays of and pointers to them, are made later."""
    module = type(sys)("ctypes")
    vars(module).update(vars(ctypes))
    for name in ("Structure", "Union"):
        setattr(module, name, _PutOff(name, (), {"stands_for": getattr(ctypes, name)}))
    for name in ("sizeof", "alignment", "cast"):
        setattr(module, name, _of_made(getattr(ctypes, name)))
    module.POINTER = lambda kind: Later(lambda: ctypes.POINTER(made(kind)))  # type: ignore[attr-defined]
    return module


def _of_made(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*map(made, arguments))
