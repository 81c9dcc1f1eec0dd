"""YAML as text with places: what was written where, before anybody decides what it means.

A scalar stays the text it was written as: ``no``, ``22:00``, ``010`` and ``1e3`` are four texts, and the key that
they belong to says how to read them.  What makes a file mean something else than it looks like is refused: anchors,
aliases, tags, directives, several documents, deep nesting, characters that nobody sees.  Knows no keys: see decoding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from gpuguard.documents.faults import LARGEST as LARGEST
from gpuguard.documents.faults import Fault as Fault

_LONGEST = 300  # characters of a fault, which may repeat a value of any length
DEEPEST = 16  # collections within each other; a policy needs 6
_PLAIN_ASCII = re.compile(r"[\x20-\x7e\n\t]*")


@dataclass
class Node:
    """A piece of the file: ``scalar`` with its text, ``sequence`` with items, ``mapping`` with pairs, or ``alias``."""

    kind: str
    line: int
    column: int
    text: str = ""
    plain: bool = False  # a scalar without quotes
    last_line: int = 0
    items: list[Node] = field(default_factory=list)
    pairs: list[tuple[Node, Node]] = field(default_factory=list)


class Source:
    """The text of one file, its tree, and the faults that were found in it so far."""

    def __init__(self, text: str) -> None:
        self.text = text.removeprefix("\ufeff")
        self.rows = self.text.split("\n")
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []

    def fault(self, place: Node | tuple[int, int], text: str, hint: str = "") -> None:
        """Note that something is wrong at *place*."""
        self.faults.append(self._at(place, text, hint))

    def warn(self, place: Node | tuple[int, int], text: str, hint: str = "") -> None:
        """Note that something at *place* is allowed, but hardly meant."""
        self.warnings.append(self._at(place, text, hint))

    def _at(self, place: Node | tuple[int, int], text: str, hint: str) -> Fault:
        line, column = (place.line, place.column) if isinstance(place, Node) else place
        excerpt = self.rows[line - 1].rstrip("\r") if 0 < line <= len(self.rows) else ""
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return Fault(line, column, text, hint, excerpt)

    def tree(self) -> Node | None:
        """The root of the file; None when there is none, and then a fault says why."""
        if not self._visible():
            return None
        try:
            events = yaml.parse(self.text, Loader=yaml.BaseLoader)
            return self._document(events)
        except yaml.MarkedYAMLError as error:
            # What was never closed: where it began says more than the end of the file.
            unclosed = "stream" in (error.problem or "")
            mark = (unclosed and error.context_mark) or error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            self.fault(place, f"this is not YAML: {error.problem or error.context}.", _advice(error))
        except yaml.YAMLError as error:
            self.fault((0, 0), f"this is not YAML: {' '.join(str(error).split())}.")
        return None

    def _visible(self) -> bool:
        good = True
        for number, row in enumerate(self.rows, 1):
            row = row.removesuffix("\r")
            if _PLAIN_ASCII.fullmatch(row):
                continue
            import unicodedata  # 0.7 MiB of a daemon, for as long as it runs

            for column, character in enumerate(row, 1):
                if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character != "\t":
                    self.fault(
                        (number, column),
                        f"an invisible character, U+{ord(character):04X}: what is read is not what is seen.",
                        "Delete it.",
                    )
                    good = False
        return good

    def _document(self, events: Iterator[yaml.Event]) -> Node | None:
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.fault(_mark(event), "a second document begins here.", "Keep one document per file.")
                    return None
                if event.version or event.tags:
                    self.fault((1, 1), "a directive (%) is not allowed.", "Delete the line that begins with %.")
                    return None
                root = self._node(next(events), events, 1)
                if root is None:
                    return None
        if root is None:
            self.fault((1, 1), "the file is empty.", 'Begin with "version: 1".')
        return root

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node | None:
        line, column = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            self.fault((line, column), f"an alias (*{event.anchor}) is not allowed.", "Write it out.")
            return Node("alias", line, column)
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise AssertionError(f"no node begins with {event!r}")
        self._no_properties(event)
        if isinstance(event, yaml.ScalarEvent):
            last = _mark(event, end=True)[0]
            return Node("scalar", line, column, text=event.value, plain=not event.style, last_line=last)
        if depth > DEEPEST:
            self.fault((line, column), f"more than {DEEPEST} levels within each other.")
            return None
        mapping = isinstance(event, yaml.MappingStartEvent)
        node = Node("mapping" if mapping else "sequence", line, column)
        children: list[Node] = []
        while not isinstance(event := next(events), yaml.CollectionEndEvent):
            child = self._node(event, events, depth + 1)
            if child is None:
                return None
            children.append(child)
        if mapping:
            node.pairs = list(zip(children[::2], children[1::2], strict=True))
        else:
            node.items = children
        return node

    def _no_properties(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.anchor is not None:
            self.fault(_mark(event), f"an anchor (&{event.anchor}) is not allowed.", "Delete it.")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.fault(_mark(event), f"a tag ({tag}) is not allowed.", "Delete it: each key knows its kind of value.")


def _mark(event: yaml.Event, *, end: bool = False) -> tuple[int, int]:
    mark = event.end_mark if end else event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (0, 0)


def _advice(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "Indent with blanks, not with tabs."
    if "'%'" in problem or "'@'" in problem or "'`'" in problem or "'*'" in problem:
        return "Put the value into quotes."
    if "mapping values" in problem:
        return "A text with a colon needs quotes; else check the indentation."
    return "Check the indentation, the quotes and the brackets before this place."
