"""The language of policy files as text and as JSON Schema (draft 2020-12), from the very classes that decode it.

A rule's or an action's docstring is its help: a line ``key: text`` belongs to that key.  Does not read policy files.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from gpuguard.enforcement.actions import ACTION_KEYS, parse_checkpoint_signal, parse_niceness
from gpuguard.locale import N_, _
from gpuguard.notify.targets import TARGETS
from gpuguard.policies.policy import Audience, Exemption, Until
from gpuguard.policies.rules import RULES
from gpuguard.policy_files.keys import (
    BreakerKeys,
    EventKeys,
    FileKeys,
    IntervalKeys,
    LimitKeys,
    PolicyKeys,
    StepKeys,
    parse_count,
    parse_hours,
    parse_interval,
    parse_limit,
    parse_name,
)
from gpuguard.sanitize import display_width
from gpuguard.units import (
    parse_bytes,
    parse_celsius,
    parse_device_amount,
    parse_duration,
    parse_host_memory_amount,
    parse_memory_amount,
    parse_percent,
    parse_power_amount,
    parse_rate,
)
from gpuguard.yaml_files.decoder import DATE, GROUP, USER, Tagged, TaggedChoice, keys_of, text_key

Schema = dict[str, Any]

_BYTES = r"[0-9.]+ ?([kKMGT]?B|[KMGT]iB)"
_TIME = r"([0-9.]+(ms|[smhdw]))+"
# What a parser takes: an example for people, and a regular expression for editors.
KINDS: Mapping[Any, tuple[str, str]] = {
    parse_bytes: ("20GiB", _BYTES),
    parse_percent: ("10%", r"[0-9.]+ ?%"),
    parse_duration: ("10m", _TIME),
    parse_interval: ("10s", _TIME),
    parse_celsius: ("85C", "[0-9.]+ ?°?C"),
    parse_memory_amount: (N_("40GiB, 90% or share"), rf"([0-9.]+ ?%|share|{_BYTES})"),
    parse_host_memory_amount: (N_("200GiB or 50%"), rf"([0-9.]+ ?%|{_BYTES})"),
    parse_power_amount: (N_("300W or 95%"), "[0-9.]+ ?(%|m?W|kW)"),
    parse_rate: ("1GiB/10m", rf"{_BYTES} ?/ ?[0-9.]*(ms|[smhdw]).*"),
    parse_hours: ("22:00-07:30", r"\d\d:\d\d ?- ?\d\d:\d\d"),
    DATE: ("2026-12-24", r"\d{4}-\d\d-\d\d(T\d\d:\d\d)?"),
    parse_name: ("a-name", "[a-z0-9-]+"),
    parse_checkpoint_signal: ("USR1", "(SIG)?[A-Z0-9]+"),
}
_SCALARS: Mapping[Any, tuple[str, Schema]] = {
    str: (N_("text"), {"type": "string"}),
    int: (N_("number"), {"type": "integer", "minimum": 0}),
    float: (N_("number"), {"type": "number", "minimum": 0}),
    bool: (N_("true or false"), {"type": "boolean"}),
}
_WHOLE = {parse_count, parse_limit, parse_niceness}  # written as plain digits

SECTIONS: Mapping[str, Mapping[str, type]] = {
    N_("The file"): {"file": FileKeys},
    N_("A policy"): {"policy": PolicyKeys},
    N_("Parts of a policy"): {
        "only": Audience,
        "except": Exemption,
        "at_most": BreakerKeys,
        "until": Until,
        "interval": IntervalKeys,
        "limits": LimitKeys,
        "events": EventKeys,
    },
    N_("Rules"): RULES,
    N_("A step"): {"step": StepKeys},
    N_("Actions"): ACTION_KEYS,
    N_("Ways to send messages"): TARGETS,
}


KEYED: Mapping[str, type] = {"file": FileKeys, "policy": PolicyKeys, "step": StepKeys}  # their keys have help as well


def describe(names: collections.abc.Collection[str] = ()) -> Iterator[str]:
    """Yield the help of every section, or only that of the entries *names*."""
    for section, nouns in SECTIONS.items():
        wanted = {name: noun for name, noun in nouns.items() if not names or name in names}
        if wanted:
            yield from (_(section), "=" * display_width(_(section)), "")
        for name, noun in wanted.items():
            yield name
            text = "\n\n".join(map(_, paragraphs(noun)))
            yield from (f"  {line}".rstrip() for line in text.splitlines())
            needed = _(", needed")
            keys = [f"{key['key']} ({key['written']}{needed * key['required']})" for key in _keys_json(noun)]
            yield from (_("  Keys: {keys}.").format(keys=", ".join(keys)) if keys else _("  No keys."), "")
    for owner, noun in KEYED.items():
        for key in [key for key in _keys_json(noun) if key["key"] in names]:
            yield from (
                f"{key['key']} ({key['written']})",
                _("  A key of {owner}: {text}").format(owner=owner, text=_(key_texts(noun)[key["key"]])),
                "",
            )


def paragraphs(noun: type) -> list[str]:
    """Return what help_lines() says, in the pieces in which it is translated."""
    return "\n".join(help_lines(noun)).split("\n\n")


def help_lines(noun: type) -> list[str]:
    """Return the docstring as users read it: ``from_`` is the key ``from``."""
    text = re.sub(r"\b([a-z]+)_: ", r"\1: ", inspect.cleandoc(noun.__doc__ or ""))
    before, _, arguments = text.partition("\nArgs:\n")
    return [
        *before.rstrip().splitlines(),
        *([""] if arguments else []),
        *inspect.cleandoc(f"\n{arguments}").splitlines(),
    ]


def language_json() -> Schema:
    """Return the help of every section as an object for programs."""
    sections: Schema = {"schema": 1}
    for section, nouns in SECTIONS.items():
        sections[section.lower().replace(" ", "_")] = [
            {"name": name, "help": "\n".join(help_lines(noun)), "keys": _keys_json(noun)}
            for name, noun in nouns.items()
        ]
    return sections


def _keys_json(noun: type) -> list[Schema]:
    hints, optional = keys_of(noun)
    texts = key_texts(noun)
    written = {key: value_of(hint)[0] for key, hint in hints.items()}
    return [
        {"key": key, "written": text, "required": key not in optional, "help": texts.get(key, "")}
        for key, text in written.items()
    ]


def key_texts(noun: type) -> dict[str, str]:
    """Return what the docstring says of each key."""
    texts: dict[str, str] = {}
    keys, current = keys_of(noun)[0], []
    for line in inspect.cleandoc(noun.__doc__ or "").splitlines():
        match = re.fullmatch(r"(?: {4})?([a-z_]+(?:, [a-z_]+)*): (.*)", line)
        names = [name.rstrip("_") for name in match[1].split(", ")] if match else []
        if match and all(name in keys for name in names):
            current = names
            texts.update(dict.fromkeys(names, match[2]))
        elif current and line.startswith("    ") and not line.lstrip().startswith("when:"):
            texts.update({name: f"{texts[name]} {line.strip()}" for name in current})
        else:
            current = []
    return texts


def json_schema() -> Schema:
    """Return the schema with which editors complete, show help at the cursor, and find the plainest faults.

    `gpuguard policy check` finds all of them.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpuguard policy file",
        **_object(FileKeys),
    }


def _object(noun: type, more: Mapping[str, Schema] | None = None) -> Schema:
    hints, optional = keys_of(noun)
    texts = key_texts(noun)
    properties = {key: _described(value_of(hint)[1], texts.get(key, "")) for key, hint in hints.items()} | dict(
        more or {}
    )
    required = [key for key in hints if key not in optional]
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _described(schema: Schema, text: str) -> Schema:
    return schema | ({"description": text} if text else {})


def value_of(hint: Any) -> tuple[str, Schema]:
    """Return what is written there, in words for people and as a schema."""
    origin, arguments, notes = _annotation_parts(hint)
    for note in notes:
        if isinstance(note, TaggedChoice):
            return _("one {what} with its keys").format(what=_(note.what)), _choice(note)
        if isinstance(note, Tagged):
            short = [name for name, noun in note.table.items() if not keys_of(noun)[0].keys() - keys_of(noun)[1]]
            return _("name of an {what}, or its keys").format(what=_(note.what)), {
                "anyOf": [{"enum": short}, *_steps(note)]
            }
        if note in KINDS:
            example, pattern = KINDS[note]
            return _("like {example}").format(example=_(example)), {"type": "string", "pattern": f"^{pattern}$"}
        if note is parse_device_amount:
            share = {"type": "string", "pattern": r"^[0-9.]+ ?%$"}
            return _("like {example}").format(example=_("4 or 66%")), {
                "anyOf": [{"type": "integer", "minimum": 0}, share]
            }
        if note in _WHOLE:
            return _("number"), {"type": "integer", "minimum": 1}
        if note in (USER, GROUP) or callable(note):
            named = _("text") if callable(note) else _("name of a {what}").format(what=_(note))
            return named, {"type": ["string", "integer"]}
    if origin is typing.Literal:
        return _(" or ").join(arguments), {"enum": [*arguments, *(int(word) for word in arguments if word.isdigit())]}
    if origin in (tuple, frozenset):
        item, schema = value_of(arguments[0])
        return _("list: {item}").format(item=item), {"type": "array", "minItems": 1, "items": schema}
    if origin in (typing.Union, types.UnionType):
        members = [value_of(member) for member in arguments if member is not type(None)]
        schemas = [schema for _name, schema in members]
        named = _(", or ").join(dict.fromkeys(name for name, _schema in members))
        return named, schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if origin is collections.abc.Mapping:
        return _("names of your own"), {"type": "object", "additionalProperties": value_of(arguments[1])[1]}
    if origin in _SCALARS:
        return _(_SCALARS[origin][0]), _SCALARS[origin][1]
    return _("keys"), _object(origin)


def _choice(choice: TaggedChoice) -> Schema:
    properties = {}
    for name, hint in choice.table.items():
        text = inspect.cleandoc(hint.__doc__ or "").partition("\n\n")[0] if is_dataclass(hint) else ""
        schema = value_of(hint)[1]
        if text_key(hint):  # one text stands for the first key
            schema = {"anyOf": [{"type": "string"}, schema]}
        properties[name] = _described(schema, text)
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _steps(tagged: Tagged) -> Iterator[Schema]:
    shared = _object(tagged.common)["properties"]
    for name, noun in tagged.table.items():
        text = inspect.cleandoc(noun.__doc__ or "").partition("\n\n")[0]
        own = _object(noun, {tagged.key: {"const": name, "description": text}, **shared})
        yield own | {"required": [tagged.key, *own.get("required", ())]}


def _annotation_parts(hint: Any) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
    """Return (origin or the type itself, its arguments, its notes)."""
    notes: tuple[Any, ...] = ()
    while typing.get_origin(hint) is typing.Annotated:
        notes += hint.__metadata__
        hint = hint.__origin__
    return typing.get_origin(hint) or hint, typing.get_args(hint), notes
