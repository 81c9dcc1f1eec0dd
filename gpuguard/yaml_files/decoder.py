"""Frozen dataclasses from a tree of nodes, decoded by their type hints, with all faults in one go.

A field is a key (``for_`` is the key ``for``), and a field without a default is required.  What a hint means:

    Annotated[float, parse_duration]    one scalar, read by that function; its ValueError is the fault
    Annotated[int, "user"]              one scalar, read by the function of that name in *readers*
    Annotated[tuple, TaggedChoice(...)] {name: value} with a hint for each name of the table
    Annotated[TaggedValue, Tagged(...)] NAME, or {do: NAME, common keys, keys of the name's dataclass}
    str int bool Literal                one scalar; whole numbers without unit, as plain digits
    tuple[X, ...] frozenset[X]          a list, not empty
    Mapping[str, X]                     names of the writer's choice
    a dataclass                         a mapping with its fields; an InvalidRequest in __post_init__ is a fault;
                                        in a TaggedChoice, a text alone is its first field if that is a str
    X | Y | None                        by the shape: the first that takes a scalar, a list or a mapping

Does not check what the values mean together: see checks.
"""

from __future__ import annotations

import collections.abc
import grp
import pwd
import re
import threading
import time
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from gpuguard.errors import InvalidRequest
from gpuguard.locale import N_, _
from gpuguard.yaml_files.yaml_text import YamlNode, YamlSource

Reader = Callable[[str], Any]
Path = tuple[str | int, ...]
T = TypeVar("T")

Name = tuple[str, str]  # ("user" or "group", name)
UNKNOWN = -1  # the number of a name that no user has and that was never seen
USER, GROUP, DATE = N_("user"), N_("group"), "date"  # names of readers

_WHOLE = re.compile(r"(0|[1-9][0-9]{0,14})")
_BOOLEANS = {"true": True, "false": False}
_KINDS = {
    "scalar": N_("single value"), "sequence": N_("list"), "mapping": N_("group of keys"), "alias": N_("alias")
}  # fmt: skip


class Broken(Exception):
    """A value could not be read.  This is no error of the program: the fault is noted, and only this value is lost."""


@dataclass(frozen=True)
class TaggedChoice:
    """Annotates (name, value), written {name: value}: exactly one name of a table of hints."""

    table: Mapping[str, Any]
    what: str  # "rule"


@dataclass(frozen=True)
class Tagged:
    """Annotates a TaggedValue: a name of a table alone, or with keys of *common* and keys of the name's dataclass."""

    key: str
    common: type
    table: Mapping[str, type]
    what: str  # "action"


@dataclass(frozen=True)
class TaggedValue:
    """A name in the table of a Tagged, and what was written with it."""

    name: str
    common: Any
    own: Any


class Decoder:
    """Reads values out of one source, and remembers where each of them stood for faults that are found later."""

    def __init__(self, source: YamlSource, readers: Mapping[str, Reader]) -> None:
        """Read values of *source*, with *readers* for the hints that name one."""
        self.source = source
        self.readers = readers
        self.nodes: dict[Path, YamlNode] = {}
        self.values: dict[Path, Any] = {}  # all values that could be read, even inside one that could not
        self.keys: dict[Path, YamlNode] = {}

    def root(self, noun: type[T]) -> T | None:
        """Decode the whole source as a *noun*, or return None if it cannot be read; then the source has the faults."""
        tree = self.source.tree()
        if tree is not None:
            with suppress(Broken):
                self.value(tree, noun)
        return self.values.get(())

    def value(self, node: YamlNode, hint: Any, path: Path = ()) -> Any:
        """Return what *node* says, as a value of the type *hint*.

        Raises:
            Broken: it cannot be read; the source has the fault.
        """
        self.nodes[path] = node
        if node.kind == "alias":
            raise Broken
        hint, notes = _plain(hint, node)
        if node.kind == "scalar" and not node.text and node.plain:
            advice = _("Write {} when it needs no keys.") if is_dataclass(hint) else _("Write one, or delete the key.")
            self._broken(node, _("{name}the value is missing.").format(name=_name(path)), advice)
        note = notes[0] if notes else None
        if isinstance(note, TaggedChoice):
            value: Any = self._choice(node, note, path)
        elif isinstance(note, Tagged):
            value = self._tagged(node, note, path)
        elif note is not None:
            value = self._read(node, self.readers[note] if isinstance(note, str) else note, path)
        else:
            value = self._by_type(node, hint, path)
        self.values[path] = value
        return value

    def _by_type(self, node: YamlNode, hint: Any, path: Path) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Literal:
            return self._read(node, lambda text: _one_of(text, arguments), path)
        if origin in (tuple, frozenset):
            if node.kind != "sequence":
                if typing.get_origin(arguments[0]) is typing.Literal:
                    self._by_type(node, arguments[0], path)  # otherwise following the advice could be a fault again
                example = f"[{node.text}]" if node.kind == "scalar" else "[...]"
                self._broken(
                    node,
                    _("{name}must be a list, not a {kind}.").format(name=_name(path), kind=_(_KINDS[node.kind])),
                    _("Write {example}.").format(example=example),
                )
            if not node.items:
                self._broken(
                    node,
                    _("{name}the list is empty.").format(name=_name(path)),
                    _("Name at least one, or delete the key."),
                )
            items = {number: (item, arguments[0]) for number, item in enumerate(node.items)}
            return origin(self._all(items, path).values())
        if origin is collections.abc.Mapping:
            return self._mapping(node, arguments, path)
        if is_dataclass(hint):
            noun = typing.cast(type, hint)
            return self._fields(node, noun, dict(self._pairs(node, path, keys_of(noun)[0])), path)
        return self._read(node, _SCALARS[hint], path)

    def _read(self, node: YamlNode, reader: Reader, path: Path) -> Any:
        if node.kind != "scalar":
            self._broken(
                node, _("{name}must be one value, not a {kind}.").format(name=_name(path), kind=_(_KINDS[node.kind]))
            )
        if node.plain and node.last_line > node.line:
            self._broken(
                node,
                _("{name}the value goes on in the next line.").format(name=_name(path)),
                _("Write it in one line."),
            )
        if not node.text.strip():
            self._broken(
                node, _("{name}the value is empty.").format(name=_name(path)), _("Write one, or delete the key.")
            )
        try:
            return reader(node.text)
        except InvalidRequest as error:
            return self._broken(node, f"{_name(path)}{error.fault}", error.hint)

    def _fields(self, node: YamlNode, noun: type, pairs: Mapping[str, YamlNode], path: Path, title: str = "") -> Any:
        title = title or _title(path)
        hints, optional = keys_of(noun)
        strange = pairs.keys() - hints.keys()
        for key in sorted(strange):
            self.source.fault(self._key(path, key), *unknown(key, hints, _("key of {title}").format(title=title)))
        missing = hints.keys() - pairs.keys() - optional
        for key in sorted(missing):
            values_of = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is typing.Literal else ()
            self.source.fault(
                node,
                _("{title} lacks the key {key!r}.").format(title=title, key=key),
                _("Add {key}: {meant}").format(key=key, meant=values_of[0] if len(values_of) == 1 else "..."),
            )
        values = self._all({key: (value, hints[key]) for key, value in pairs.items() if key in hints}, path)
        if missing or strange:
            raise Broken
        try:
            names = {key_of(field): field.name for field in fields(noun)}
            return noun(**{names[key]: value for key, value in values.items()})
        except InvalidRequest as error:
            return self._broken(node, f"{_name(path)}{error.fault}", error.hint)

    def _tagged(self, node: YamlNode, tagged: Tagged, path: Path) -> TaggedValue:
        pairs = {tagged.key: node} if node.kind == "scalar" else dict(self._pairs(node, path, [tagged.key]))
        word = pairs.pop(tagged.key, None)
        if word is None:
            meant = next((key for key in pairs if key in tagged.table), "...")
            self._broken(
                node,
                _("{title}: the key {key!r} is missing.").format(title=_title(path), key=tagged.key),
                _("Add {key}: {meant}").format(key=tagged.key, meant=meant),
            )
        place = (*path, tagged.key)
        self.nodes[place] = word
        name = self._read(word, str, place)
        if name not in tagged.table:
            self._broken(word, *unknown(name, tagged.table, tagged.what))
        own, shared = tagged.table[name], keys_of(tagged.common)[0]
        mine = {key: value for key, value in pairs.items() if key in shared}
        rest = {key: value for key, value in pairs.items() if key not in shared}
        for key in sorted(rest.keys() - keys_of(own)[0].keys()):
            known = [tagged.key, *shared, *keys_of(own)[0]]
            self.source.fault(self._key(path, key), *unknown(key, known, _("key of {name!r}").format(name=name)))
            del rest[key]
        parts = _each_in_turn(
            {
                "common": partial(self._fields, node, tagged.common, mine, path, repr(name)),
                "own": partial(self._fields, node, own, rest, path, repr(name)),
            }
        )
        return TaggedValue(name, **parts)

    def _mapping(self, node: YamlNode, arguments: tuple[Any, ...], path: Path) -> dict[Any, Any]:
        pairs = self._pairs(node, path)
        names = {key: (self._key(path, key), arguments[0]) for key, _value in pairs}
        values = {key: (value, arguments[1]) for key, value in pairs}
        read = _each_in_turn({"names": partial(self._all, names, path), "values": partial(self._all, values, path)})
        return {read["names"][key]: read["values"][key] for key in names}

    def _choice(self, node: YamlNode, choice: TaggedChoice, path: Path) -> Any:
        pairs = self._pairs(node, path, choice.table)
        for key, _value in pairs:
            if key not in choice.table:
                self.source.fault(self._key(path, key), *unknown(key, choice.table, _(choice.what)))
        if len(pairs) != 1:
            self.source.fault(
                node,
                _("{name}exactly one {what} is needed, and here are {pairs}.").format(
                    name=_name(path), what=_(choice.what), pairs=len(pairs)
                ),
            )
        known = {key: (value, choice.table[key]) for key, value in pairs if key in choice.table}
        for key, (value, hint) in known.items():
            if value.kind == "scalar" and value.text and (first := text_key(hint)):
                # A text alone stands for the first key of a dataclass: make the mapping that it means.
                name = YamlNode("scalar", value.line, value.column, text=first)
                known[key] = YamlNode("mapping", value.line, value.column, pairs=[(name, value)]), hint
        values = self._all(known, path)
        if len(values) != 1:
            raise Broken
        return next(iter(values.items()))

    def _pairs(self, node: YamlNode, path: Path, known: Iterable[str] = ()) -> list[tuple[str, YamlNode]]:
        if node.kind != "mapping":
            hint = _("Known: {names}.").format(names=names) if (names := ", ".join(known)) else ""
            self._broken(
                node,
                _("{title} must have keys (key: value), not be a {kind}.").format(
                    title=_title(path), kind=_(_KINDS[node.kind])
                ),
                hint,
            )
        found: dict[str, YamlNode] = {}
        for key, value in node.pairs:
            if key.kind != "scalar" or not key.text:
                self.source.fault(key, _("a key of {title} must be a name.").format(title=_title(path)))
            elif key.text == "<<" and key.plain:
                self.source.fault(key, _("a merge key (<<) is not allowed."), _("Write the keys out."))
            elif key.text in found:
                first = self._key(path, key.text).line
                self.source.fault(
                    key,
                    _("the key {text!r} stands here a second time.").format(text=key.text),
                    _("First in line {first}.").format(first=first),
                )
            else:
                found[key.text] = value
                place = (*path, key.text)
                self.keys[place] = key
        return list(found.items())

    def _all(self, wanted: Mapping[Any, tuple[YamlNode, Any]], path: Path) -> dict[Any, Any]:
        return _each_in_turn(
            {key: partial(self.value, node, hint, (*path, key)) for key, (node, hint) in wanted.items()}
        )

    def _key(self, path: Path, name: str) -> YamlNode:
        place = (*path, name)
        return self.keys[place]

    def _broken(self, node: YamlNode, text: str, hint: str = "") -> typing.NoReturn:
        self.source.fault(node, text, hint)
        raise Broken


def _each_in_turn(reads: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Return what *reads* return.  Raises Broken only after each had its turn, so that all faults are found at once."""
    values = {}
    for key, read in reads.items():
        with suppress(Broken):
            values[key] = read()
    if len(values) < len(reads):
        raise Broken
    return values


@cache
def keys_of(noun: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the hint of each key of a dataclass, and the keys that have a default."""
    hints = typing.get_type_hints(noun, include_extras=True)
    own = {key_of(field): field for field in fields(noun) if field.init}
    required = {key for key, field in own.items() if field.default is field.default_factory is MISSING}
    return {key: hints[field.name] for key, field in own.items()}, frozenset(own.keys() - required)


def key_of(field: Field[Any]) -> str:
    """Return the key of a field: ``for`` for ``for_``, because ``for`` is a word of Python."""
    return field.name.rstrip("_")


def unknown(word: str, known: Iterable[str], what: str) -> tuple[str, str]:
    """Return the fault and a hint for a word that is not one of *known*."""
    names = list(known)
    wanted = (_OTHER_WORDS.get(word.lower(), ""), word, word.lower())
    near = [name for text in wanted for name in get_close_matches(text, names, n=1)]
    hint = (
        _("Did you mean {near!r}?").format(near=near[0])
        if near
        else _("Known: {names}.").format(names=", ".join(names) or _("none"))
    )
    return _("{word!r} is no {what}.").format(word=word, what=what), hint


# What nvidia-smi, Slurm, kill and plain speech call our words, for "did you mean".
_OTHER_WORDS = {
    "gpu": "devices", "gpus": "devices", "user": "users", "group": "groups", "account": "groups",
    "mem": "memory", "util": "utilization", "temp": "temperature", "runtime": "age", "walltime": "age",
    "sigterm": "terminate", "term": "terminate", "sigkill": "kill", "sigstop": "pause", "stop": "pause",
    "suspend": "pause", "sigcont": "resume", "nice": "renice", "email": "notify", "mail": "notify",
    "block": "deny", "ban": "deny", "drain": "quarantine", "scancel": "cancel", "hook": "run_hook",
    "then": "steps", "actions": "steps", "if": "when", "condition": "when", "rules": "policies",
}  # fmt: skip


def _plain(hint: Any, node: YamlNode) -> tuple[Any, tuple[Any, ...]]:
    """Return *hint* without None and Annotated; of several alternatives, the one that has the shape of *node*."""
    notes: tuple[Any, ...] = ()
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            notes += hint.__metadata__
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            alternatives = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            if notes:
                return alternatives[0], notes
            hint = next((kind for kind in alternatives if _shape(kind) == node.kind), alternatives[0])
        else:
            return hint, notes


def _shape(hint: Any) -> str:
    """Return how a value of this type is written: "scalar", "sequence" or "mapping"."""
    if typing.get_origin(hint) is typing.Annotated:
        return "mapping" if any(isinstance(note, TaggedChoice) for note in hint.__metadata__) else "scalar"
    if typing.get_origin(hint) in (tuple, frozenset):
        return "sequence"
    return "mapping" if is_dataclass(hint) or typing.get_origin(hint) is collections.abc.Mapping else "scalar"


def text_key(hint: Any) -> str | None:
    """Return the first key of a dataclass if a text without rules of its own can be written there, else None."""
    if not is_dataclass(hint) or not isinstance(hint, type):
        return None
    first, kind = next(iter(keys_of(hint)[0].items()), ("", None))
    alternatives = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return first if str in alternatives else None


def _one_of(text: str, choices: tuple[Any, ...]) -> str:
    if text not in choices:
        raise InvalidRequest(
            *unknown(text, choices, _("choice: write one of {choices}").format(choices=", ".join(choices)))
        )
    return text


def parse_whole(text: str) -> int:
    """Parse a whole number in plain digits."""
    if not _WHOLE.fullmatch(text):
        raise InvalidRequest(f"{text!r} is not a whole number: write plain digits, like 3.")
    return int(text)


def _boolean(text: str) -> bool:
    if text not in _BOOLEANS:
        raise InvalidRequest(f"{text!r} is neither true nor false: write one of these two.")
    return _BOOLEANS[text]


_SCALARS: dict[Any, Reader] = {str: str, int: parse_whole, bool: _boolean}


def _name(path: Path) -> str:
    """Return ``for: `` for the innermost key, to begin a sentence with."""
    name = next((str(step) for step in reversed(path) if isinstance(step, str)), "")
    return f"{name}: " if name else ""


def _title(path: Path) -> str:
    name = next((str(step) for step in reversed(path) if isinstance(step, str)), "")
    return repr(name) if name else _("the file")


ACCOUNTS_SECONDS = 5.0
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_LARGEST = 2**32 - 2  # the number above it means "no user" to the kernel


class GoneUser(int):
    """The number that a user's name had, or UNKNOWN if it was never seen; the name means no user any more."""


@dataclass
class Accounts:
    """The users and groups of this machine: their names -> the numbers that the kernel knows.

    A name that cannot be resolved is a fault, never a rule that matches no user or all of them.  The directory service
    (NSS: LDAP, SSSD) may hang, so each name is looked up in a thread of its own, and no further one is after *seconds*
    in all.  The two functions raise KeyError for a name that no user has.

    *remembered* are the numbers that names had.  With them, a name that no user has any more is a GoneUser, not a
    fault, so that deleting an account switches no guard off: see loader.
    """

    user_number: Callable[[str], int] = lambda name: pwd.getpwnam(name).pw_uid
    group_number: Callable[[str], int] = lambda name: grp.getgrnam(name).gr_gid
    seconds: float = ACCOUNTS_SECONDS
    remembered: Mapping[Name, int] | None = None
    known: dict[Name, int] = field(default_factory=dict, init=False)
    gone: dict[Name, InvalidRequest] = field(default_factory=dict, init=False)  # what was not found, and why
    _waited: float = field(default=0.0, init=False)

    def user(self, text: str) -> int:
        """Return the uid for a user's name, or for the uid itself in digits.

        Raises:
            InvalidRequest: the name is unknown, or there was no answer in time.
        """
        if _NUMBER.fullmatch(text):
            if int(text) > _LARGEST:
                raise InvalidRequest(
                    _("{text} is no uid: the largest is {largest}.").format(text=text, largest=_LARGEST)
                )
            return int(text)
        return self._number(N_("user"), text, self.user_number, "/etc/passwd")

    def group(self, text: str) -> str:
        """Return the name of a group, which is known to exist.

        Raises:
            InvalidRequest: there is none, or there was no answer in time.
        """
        self._number(N_("group"), text, self.group_number, "/etc/group")
        return text

    def _number(self, what: str, name: str, look_up: Callable[[str], int], names: str) -> int:
        if self.remembered is None:
            return self._found(what, name, look_up, names)
        try:
            return self._found(what, name, look_up, names)
        except InvalidRequest as error:
            self.gone[what, name] = error
            return GoneUser(self.remembered.get((what, name), UNKNOWN))

    def _found(self, what: str, name: str, look_up: Callable[[str], int], names: str) -> int:
        if (what, name) in self.known:
            return self.known[what, name]
        answers: SimpleQueue[int | None] = SimpleQueue()

        def resolve() -> None:
            try:
                answers.put(look_up(name))
            except (KeyError, ValueError, OSError):  # ValueError: a name with a NUL byte
                answers.put(None)

        begin = time.monotonic()
        try:
            if self._waited >= self.seconds:
                raise Empty
            threading.Thread(target=resolve, daemon=True).start()
            number = answers.get(timeout=self.seconds - self._waited)
            self._waited += time.monotonic() - begin
        except Empty:
            self._waited = self.seconds
            raise InvalidRequest(
                _("{what} {name!r} is unknown: the directory service did not answer within {seconds:g} s.").format(
                    what=_(what), name=name, seconds=self.seconds
                ),
                _("Is LDAP or SSSD up?  A uid in digits needs no answer."),
            ) from None
        if number is None:
            raise InvalidRequest(
                _("there is no {what} {name!r} on this machine.").format(what=_(what), name=name),
                _similar(name, names),
            )
        self.known[what, name] = number
        return number


def _similar(name: str, path: str) -> str:
    """Suggest a similar local name; the names of a directory service cannot be listed."""
    near = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as lines:
        near = get_close_matches(name, [line.partition(":")[0] for line in lines], n=1)
    return (
        _("Did you mean {near!r}?").format(near=near[0])
        if near
        else _("Write another name, or make the account first.")
    )
