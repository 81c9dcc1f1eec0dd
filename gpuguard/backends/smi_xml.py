"""The XML that `nvidia-smi -q -x` prints, as a small tree; a hostile document is refused, never expanded.

A document may come from anybody (a saved file), so nothing in it is looked up elsewhere: no entities, no DTD of its
own, no more than MAX_BYTES, MAX_ELEMENTS and MAX_DEPTH.  Does not know what the elements mean: see smi_fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.parsers import expat

from gpuguard.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

# Sixteen devices with all their supported clocks, the longest part, are 2 MB, 40,000 elements and 7 levels.
MAX_BYTES = 32 * 2**20
MAX_ELEMENTS = 500_000
MAX_DEPTH = 32
MAX_TEXT = 4096  # characters of one element: a process name is the longest
_UNREAD = frozenset({"supported_clocks", "accounted_processes"})  # nine tenths of all elements, and nobody asks


class Element:
    """One element: its tag, its text, what is inside."""

    __slots__ = ("attributes", "children", "tag", "text")

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.text = tag, attributes, ""
        self.children: list[Element] = []

    def find(self, path: str) -> Element | None:
        """The first element at ``"temperature/gpu_temp"``, or None."""
        found: Element | None = self
        for tag in path.split("/"):
            found = next((child for child in found.children if child.tag == tag), None) if found else None
        return found

    def all(self, tag: str) -> Iterator[Element]:
        """The children with that tag."""
        return (child for child in self.children if child.tag == tag)

    def word(self, path: str) -> str | None:
        """The text at *path*; None where there is no such element, or it has elements inside."""
        found = self.find(path)
        return None if found is None or found.children else found.text.strip()

    def leaves(self) -> Iterator[Element]:
        """Every element below that has text only."""
        todo = [self]
        while todo:
            element = todo.pop()
            todo += element.children
            if not element.children:
                yield element


def parse(document: bytes) -> Element:
    """The root of *document*.

    Raises:
        BackendError: it is not XML, not nvidia-smi's, or built to hurt whoever reads it.
    """
    if len(document) > MAX_BYTES:
        _refuse(f"it is larger than {MAX_BYTES // 2**20} MiB")
    tree = _Tree()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    parser.StartElementHandler = tree.start
    parser.EndElementHandler = tree.end
    parser.CharacterDataHandler = tree.text
    parser.StartDoctypeDeclHandler = _doctype
    parser.EntityDeclHandler = lambda *_: _refuse("it declares entities")
    parser.ExternalEntityRefHandler = lambda *_: _refuse("it refers to another file")
    try:
        parser.Parse(document, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the last two: unknown encodings
        _refuse(f"it is not XML: {error}")
    if tree.root is None or tree.root.tag != "nvidia_smi_log":
        _refuse("it does not begin with <nvidia_smi_log>")
    return tree.root


class _Tree:
    """Builds the elements, and counts them."""

    def __init__(self) -> None:
        self.root: Element | None = None
        self._open: list[Element] = []
        self._count, self._skipping = 0, 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) + self._skipping >= MAX_DEPTH:
            _refuse("it has more elements, or more of them inside each other, than nvidia-smi writes")
        if self._skipping or tag in _UNREAD:
            self._skipping += 1
            return
        element = Element(tag, attributes)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def end(self, _tag: str) -> None:
        if self._skipping:
            self._skipping -= 1
        else:
            self._open.pop()

    def text(self, text: str) -> None:
        if self._open and not self._skipping:
            element = self._open[-1]
            element.text = (element.text + text)[:MAX_TEXT]


def _doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: int) -> None:
    # nvidia-smi names a DTD in a file, which nobody reads; one inside the document could only define entities.
    if has_internal_subset:
        _refuse("it defines a document type of its own")


def _refuse(why: str) -> NoReturn:
    raise BackendError(f"this is nothing that `nvidia-smi -q -x` has written: {why}.")
