"""``@dataclass(frozen=True)`` and replace() as in the standard library's dataclasses, made without its cost.

That module takes 73 million instructions to import (with inspect, ast, dis, tokenize) and half a million per field of a
class, because it compiles source text: together more than half of the start of `gpuguard run`, before every job.
Here a class keeps its fields in ``__dict__`` and all classes share the same few methods.  To a type checker this *is*
dataclasses, and so it is to dataclasses.fields() and asdict(), which get what they look for when they ask.
Only what the nouns need: frozen, ordinary defaults, __post_init__; no field(), no inheritance, no slots, no order.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
    from typing import Any
else:

    def dataclass(*, frozen: bool) -> Any:
        """Make a frozen dataclass of a class whose fields are its annotations."""
        assert frozen, "nouns are frozen"
        return _made

    def replace(noun: Any, /, **changes: Any) -> Any:
        """The same noun with some fields changed."""
        cls, fields = type(noun), vars(noun)
        if hasattr(cls, "__post_init__") or not changes.keys() <= fields.keys():
            return cls(**{**fields, **changes})
        # A third of the time: what is there already is complete.
        same = cls.__new__(cls)
        vars(same).update(fields)
        vars(same).update(changes)
        return same


_MISSING = object()


def _made(cls: type) -> type:
    names = tuple(cls.__dict__.get("__annotations__", {}))  # noqa: RUF063  (inspect is what this file does without)
    blank = {name: cls.__dict__.get(name, _MISSING) for name in names}  # in order: repr and hash rely on it
    count = len(names)
    required = tuple(name for name in names if blank[name] is _MISSING)
    has_post_init = hasattr(cls, "__post_init__")

    def __init__(self: Any, *values: Any, **named: Any) -> None:  # noqa: N807
        fields = self.__dict__
        if len(values) == count and not named and not has_post_init:  # half of the time for what is made most
            for name, value in zip(names, values):  # noqa: B905  (the check takes as long as the rest)
                fields[name] = value
            return
        fields.update(blank)
        fields.update(zip(names, values, strict=False))
        fields.update(named)
        # Not a list of what is missing: a daemon makes hundreds of nouns per second, and that is a third of their cost.
        for name in required:
            if fields[name] is _MISSING:
                raise TypeError(_complaint(cls.__name__, names, values, named, _missing(required, fields)))
        if len(values) > count or len(fields) > count:
            raise TypeError(_complaint(cls.__name__, names, values, named, _missing(required, fields)))
        if values and named and not named.keys().isdisjoint(names[: len(values)]):
            raise TypeError(f"{cls.__name__}() got several values for one field")
        if has_post_init:
            self.__post_init__()

    own = {
        "__init__": __init__,
        "__repr__": _repr,
        "__eq__": _eq,
        "__hash__": _hash,
        "__setattr__": _refuse_change,
        "__delattr__": _refuse_change,
        "__match_args__": names,
        "__dataclass_fields__": _Fields(names),
    }
    for name, value in own.items():
        setattr(cls, name, value)
    return cls


class _Fields:
    """``__dataclass_fields__``, made by the real thing when somebody first asks for it: that takes 8 ms."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._made: Any = None

    def __get__(self, noun: object, cls: type) -> Any:
        if self._made is None:
            self._made = self._asked_for(cls)
        return self._made

    def _asked_for(self, cls: type) -> Any:
        import dataclasses

        own = {name: cls.__dict__[name] for name in self._names if name in cls.__dict__}
        own |= {"__annotations__": {name: cls.__annotations__[name] for name in self._names}}
        # With a description of its own: to write one, dataclasses loads inspect and ast, 0.9 MiB.
        described = {**own, "__module__": cls.__module__, "__doc__": cls.__doc__ or cls.__name__}
        twin: Any = dataclasses.dataclass(frozen=True)(type(cls.__name__, (), described))
        return twin.__dataclass_fields__


def _missing(required: tuple[str, ...], fields: dict[str, Any]) -> list[str]:
    return [name for name in required if fields[name] is _MISSING]


def _repr(self: object) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def _eq(self: object, other: object) -> bool:
    return vars(self) == vars(other) if type(self) is type(other) else NotImplemented


def _hash(self: object) -> int:
    return hash(tuple(vars(self).values()))


def _refuse_change(self: object, name: str, value: object = None) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot change field {name!r} of a {type(self).__name__}: use replace()")


def _complaint(
    name: str, names: tuple[str, ...], values: tuple[Any, ...], named: dict[str, Any], missing: list[str]
) -> str:
    if len(values) > len(names):
        return f"{name}() takes {len(names)} fields, not {len(values)}"
    if unknown := named.keys() - set(names):
        return f"{name}() has no field {', '.join(sorted(unknown))}"
    return f"{name}() lacks {', '.join(missing)}"
