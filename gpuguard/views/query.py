"""A snapshot as the table that `nvidia-smi --query-gpu=... --format=csv` prints, or as JSON.

Which fields there are is in query_fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuguard import model
from gpuguard.errors import InvalidRequest
from gpuguard.model import Snapshot
from gpuguard.views.history import harmless_cell
from gpuguard.views.query_fields import APP_ALIASES, APP_FIELDS, GPU_ALIASES, GPU_FIELDS, Field, Subject


@dataclass(frozen=True)
class Query:
    """What is asked for: the fields, by the names that the header shows; of processes or of devices."""

    fields: Mapping[str, Field]
    apps: bool

    @property
    def groups(self) -> frozenset[str]:
        """What has to be read, and nothing besides."""
        wanted = {field.group for field in self.fields.values() if field.group}
        # Processes of a divided device are on its instances, which come with its health.
        return frozenset(wanted | {model.PROCESSES, model.HEALTH} if self.apps else wanted)

    @property
    def headers(self) -> list[str]:
        """With units, as nvidia-smi writes them."""
        return [f"{name} [{field.unit}]" if field.unit else name for name, field in self.fields.items()]


def query_of(names: str, *, apps: bool) -> Query:
    """The query for ``"index,memory.used"``.

    Raises:
        InvalidRequest: there is no such field.
    """
    known, aliases = (APP_FIELDS, APP_ALIASES) if apps else (GPU_FIELDS, GPU_ALIASES)
    words = [word.strip() for word in names.split(",")]
    if not any(words):
        raise InvalidRequest("no field is named: write them like index,name,memory.used.")
    fields = {}
    for word in words:
        name = aliases.get(word, word)
        if name not in known:
            raise InvalidRequest(_unknown(word, [*known, *aliases]))
        fields[name] = known[name]
    return Query(fields, apps)


def _unknown(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=2, cutoff=0.55)
    hint = f"did you mean {' or '.join(near)}?" if near else "there is nothing like it here."
    return f"gpuguard reads no field {word!r}: {hint}\n`gpuguard query --help-query` lists all fields."


def rows(snapshot: Snapshot, query: Query, uuids: frozenset[str]) -> Iterator[Subject]:
    """The subjects: whole devices, or the computing processes on them; *uuids* chooses devices, all when empty."""
    for device in snapshot.devices:
        if device.parent_uuid or (uuids and device.uuid not in uuids):
            continue
        if not query.apps:
            yield Subject(snapshot, device)
            continue
        family = [each for each in snapshot.devices if device.uuid in (each.uuid, each.parent_uuid)]
        listed = {process.pid: process for each in family for process in each.processes or ()}
        yield from (Subject(snapshot, device, one) for one in listed.values() if one.kind != "graphics")


def csv_lines(
    snapshot: Snapshot, query: Query, uuids: frozenset[str] = frozenset(), *, header: bool = True, units: bool = True
) -> Iterator[str]:
    """The lines, with `, ` in between and without quotes, as nvidia-smi has them; no spreadsheet runs a name."""
    if header:
        yield ", ".join(query.headers)
    for subject in rows(snapshot, query, uuids):
        written = (field.written(field.value(subject), units=units) for field in query.fields.values())
        # A comma in the name of a program begins a cell, as there are no quotes.
        yield ", ".join(",".join(map(_harmless_part, text.split(","))) for text in written)


def _harmless_part(text: str) -> str:
    name = text.lstrip(" ")
    return " " * (len(text) - len(name)) + harmless_cell(name)


def to_json(snapshot: Snapshot, query: Query, uuids: frozenset[str] = frozenset()) -> dict[str, Any]:
    """One object; numbers are numbers, what is not known is null, and the names are those of the CSV header."""
    fields = list(zip(query.headers, query.fields.values(), strict=True))
    return {
        "schema": 1,
        "rows": [{header: field.value(one) for header, field in fields} for one in rows(snapshot, query, uuids)],
    }


def help_lines() -> Iterator[str]:
    """Every field with its unit and what it is."""
    for title, known, aliases in (
        ("Fields of GPUs (--query-gpu)", GPU_FIELDS, GPU_ALIASES),
        ("Fields of processes (--query-compute-apps)", APP_FIELDS, APP_ALIASES),
    ):
        yield from ("", f"{title}:") if title.endswith("apps)") else (f"{title}:",)
        for name, field in known.items():
            others = [alias for alias, of in aliases.items() if of == name]
            unit = f"{field.unit}, " if field.unit else ""
            yield f"  {name:<42} {unit}{field.text}"
            yield from (f"  {'':<42} also {alias}" for alias in others)
