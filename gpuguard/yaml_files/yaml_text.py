"""YAML as text with places: what was written where, before anything decides what it means.

A scalar stays the text it was written as: ``no``, ``22:00``, ``010`` and ``1e3`` are four texts, and the key that
they belong to says how to read them.  Whatever makes a file mean something other than it seems to is refused: anchors,
aliases, tags, directives, several documents, deep nesting, invisible characters.  This module knows no keys: see
decoder.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest
from gpuguard.files import READING, open_along, open_named
from gpuguard.locale import _
from gpuguard.sanitize import display_width, neutralise

if TYPE_CHECKING:
    import yaml

LARGEST = 64 * 1024  # bytes: the longest policy file that we have seen has 6 KiB
_WIDTH = 110  # characters of a line that are shown


@dataclass(frozen=True)
class Fault:
    """A fault at one place of a file.  Line and column count from 1, and are 0 if it is about the file as a whole."""

    line: int
    column: int
    text: str
    hint: str = ""
    excerpt: str = ""  # the line itself

    def lines(self, path: str, *, excerpt: bool = True) -> list[str]:
        """Return ``path:line:column: text``, with *excerpt* the line with a caret under it, and the hint."""
        place = f"{path}:{self.line}:{self.column}" if self.line else path
        found = [neutralise(f"{place}: {self.text}")]
        if self.excerpt and excerpt:
            cut = max(0, self.column - 1 - _WIDTH // 2) if len(self.excerpt) > _WIDTH else 0
            before = ("…" if cut else "") + neutralise(self.excerpt[cut : self.column - 1])
            behind = neutralise(self.excerpt[self.column - 1 : cut + _WIDTH])
            found += [
                f"  {before}{behind}{'…' if len(self.excerpt) > cut + _WIDTH else ''}",
                f"  {' ' * display_width(before)}^",
            ]
        return [*found, f"  {neutralise(self.hint)}"] if self.hint else found


def in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Return each fault once, in the order of the lines."""
    return tuple(sorted(set(faults), key=lambda fault: (fault.line, fault.column, fault.text)))


def read_file(path: str, *, only_root: bool, only_public: bool = False) -> bytes:
    """Return the content of a regular file of at most LARGEST bytes.

    If it must be root's, each directory on the way is opened separately, without following links, and checked through
    its descriptor, so that nothing can be exchanged between the check and the read.

    Args:
        path: of the file.
        only_root: it and every directory above it must be root's, with no write permission for others.
        only_public: everybody must be allowed to read it, so that messages about it reveal nothing new.

    Raises:
        InvalidRequest: it is too large, no regular file, or another user could have written it.
        OSError: it cannot be read.
    """
    if not path:
        raise InvalidRequest(_("the name of the file is empty."), _("Write where it is."))
    descriptor = open_along(path, READING, _open_beside_roots) if only_root else open_named(path, READING)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(_("this is not a regular file."), _("Name a file, not a directory or a device."))
        if only_root:
            _must_be_roots(found, path)
        if only_public and not found.st_mode & stat.S_IROTH:
            raise InvalidRequest(
                _("not everybody may read this file."), _("Run: chmod o+r, if nothing secret is in it.")
            )
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise InvalidRequest(
            _("the file is larger than {size} KiB.").format(size=LARGEST // 1024),
            _("Split it, or delete what is not used."),
        )
    return content


def _open_beside_roots(directory: int, name: str, way: str, flags: int) -> int:
    _must_be_roots(os.fstat(directory), os.path.dirname(way))
    # With O_DIRECTORY and O_NOFOLLOW the error of a link is "not a directory", so links must be looked for first.
    if stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise InvalidRequest(
            _("{path} is a symbolic link, and its owner could turn it.").format(path=way), _("Name the file itself.")
        )
    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)


def _must_be_roots(found: os.stat_result, path: str) -> None:
    if found.st_uid != 0:
        why = _("belongs to uid {st_uid}, who could change what root does.").format(st_uid=found.st_uid)
        raise InvalidRequest(f"{path} {why}", _("Run: chown root: {path}").format(path=path))
    # In a sticky directory (/tmp) others can add names, but neither remove nor replace root's.
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & 0o022 and not sticky:
        why = _("can be written by others, who could change what root does.")
        raise InvalidRequest(f"{path} {why}", _("Run: chmod go-w {path}").format(path=path))


_LONGEST = 300  # characters of a fault, which may repeat a value of any length
DEEPEST = 16  # nested collections; a policy needs 6
_PLAIN_ASCII = re.compile(r"[\x20-\x7e\n\t]*")


@dataclass
class YamlNode:
    """A piece of the file: ``scalar`` with its text, ``sequence`` with items, ``mapping`` with pairs, or ``alias``."""

    kind: str
    line: int
    column: int
    text: str = ""
    plain: bool = False  # a scalar without quotes
    last_line: int = 0
    items: list[YamlNode] = field(default_factory=list)
    pairs: list[tuple[YamlNode, YamlNode]] = field(default_factory=list)


class YamlSource:
    """The text of one file, its tree, and the faults found in it so far."""

    def __init__(self, content: bytes | str, begin: str | None = "version: 1") -> None:
        self.faults: list[Fault] = []
        self.warnings: list[Fault] = []
        self.begin = begin
        self.text = (content if isinstance(content, str) else self._decoded(content)).removeprefix("\ufeff")
        self.rows = self.text.split("\n")

    def _decoded(self, content: bytes) -> str:
        if len(content) > LARGEST:
            text, hint = f"the text is larger than {LARGEST // 1024} KiB.", "Split it, or delete what is not used."
            self.faults.append(Fault(0, 0, text, hint))
            return ""
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            before = content[: error.start]
            line, column = before.count(b"\n") + 1, len(before[before.rfind(b"\n") + 1 :].decode()) + 1
            text = _("byte 0x{byte:02x} is not UTF-8.").format(byte=content[error.start])
            self.faults.append(Fault(line, column, text, _("Save the file as UTF-8.")))
            return ""

    def fault(self, place: YamlNode | tuple[int, int], text: str, hint: str = "") -> None:
        """Note that something is wrong at *place*."""
        self.faults.append(self._at(place, text, hint))

    def warn(self, place: YamlNode | tuple[int, int], text: str, hint: str = "") -> None:
        """Note that something at *place* is allowed but hardly meant."""
        self.warnings.append(self._at(place, text, hint))

    def _at(self, place: YamlNode | tuple[int, int], text: str, hint: str) -> Fault:
        line, column = (place.line, place.column) if isinstance(place, YamlNode) else place
        excerpt = self.rows[line - 1].rstrip("\r") if 0 < line <= len(self.rows) else ""
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
        return Fault(line, column, text, hint, excerpt)

    def tree(self) -> YamlNode | None:
        """Return the root of the file, or None if there is none; then a fault says why."""
        if not self.faults:
            self._look_for_invisible()
        if self.faults:
            return None
        import yaml  # not above, because man pages are made from the commands where no package is installed

        root = None
        try:
            events = yaml.parse(self.text, Loader=yaml.BaseLoader)
            for event in (event for event in events if isinstance(event, yaml.DocumentStartEvent)):
                if root is not None:
                    self.fault(_mark(event), _("a second document begins here."), _("Keep one document per file."))
                    return None
                if event.version or event.tags:
                    self.fault((1, 1), _("a directive (%) is not allowed."), _("Delete the line that begins with %."))
                    return None
                root = self._node(next(events), events, 1)
                if root is None:
                    return None
        except yaml.MarkedYAMLError as error:
            # If something was never closed, the place where it began says more than the end of the file.
            unclosed = "stream" in (error.problem or "")
            mark = (unclosed and error.context_mark) or error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            self.fault(
                place,
                _("this is not YAML: {problem}.").format(problem=error.problem or error.context),
                _advice(error.problem or ""),
            )
            return None
        except yaml.YAMLError as error:
            self.fault((0, 0), _("this is not YAML: {text}.").format(text=" ".join(str(error).split())))
            return None
        if root is None and self.begin is not None:
            self.fault((1, 1), _("the file is empty."), _('Begin with "{begin}".').format(begin=self.begin))
        return root

    def _look_for_invisible(self) -> None:
        for number, row in enumerate(self.rows, 1):
            row = row.removesuffix("\r")
            if _PLAIN_ASCII.fullmatch(row):
                continue
            for column, character in enumerate(row, 1):
                if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character != "\t":
                    text = _("an invisible character, U+{number:04X}: what is read is not what is seen.").format(
                        number=ord(character)
                    )
                    self.fault((number, column), text, _("Delete it."))

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> YamlNode | None:
        import yaml

        line, column = _mark(event)
        if isinstance(event, yaml.AliasEvent):
            self.fault(
                (line, column),
                _("an alias (*{anchor}) is not allowed.").format(anchor=event.anchor),
                _("Write it out."),
            )
            return YamlNode("alias", line, column)
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            raise AssertionError(f"no node begins with {event!r}")
        if event.anchor is not None:
            self.fault(
                (line, column), _("an anchor (&{anchor}) is not allowed.").format(anchor=event.anchor), _("Delete it.")
            )
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.fault(
                (line, column),
                _("a tag ({tag}) is not allowed.").format(tag=tag),
                _("Delete it: each key knows its kind of value."),
            )
        if isinstance(event, yaml.ScalarEvent):
            last = _mark(event, end=True)[0]
            return YamlNode("scalar", line, column, text=event.value, plain=not event.style, last_line=last)
        if depth > DEEPEST:
            self.fault((line, column), _("more than {deepest} levels within each other.").format(deepest=DEEPEST))
            return None
        mapping = isinstance(event, yaml.MappingStartEvent)
        children: list[YamlNode] = []
        while not isinstance(event := next(events), yaml.CollectionEndEvent):
            child = self._node(event, events, depth + 1)
            if child is None:
                return None
            children.append(child)
        if mapping:
            pairs = list(zip(children[::2], children[1::2], strict=True))
            return YamlNode("mapping", line, column, pairs=pairs)
        return YamlNode("sequence", line, column, items=children)


def _mark(event: yaml.Event, *, end: bool = False) -> tuple[int, int]:
    mark = event.end_mark if end else event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (0, 0)


def _advice(problem: str) -> str:
    if "'\\t'" in problem:
        return _("Indent with blanks, not with tabs.")
    if any(sign in problem for sign in ("'%'", "'@'", "'`'", "'*'")):
        return _("Put the value into quotes.")
    if "mapping values" in problem:
        return _("A text with a colon needs quotes; else check the indentation.")
    return _("Check the indentation, the quotes and the brackets before this place.")
