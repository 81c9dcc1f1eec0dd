"""Sentences that are written in English where no user reads them yet, and shown in the language of the user later.

They stand in the audit log, in records, and in what the worker, the daemon and other hosts answer.  Beside the text
goes the message: its key, and what stands in its places.  In JSON an object with sentences has a field "message_ids"
for it, ``{TEXT: {"id": KEY, "values": {NAME: VALUE}}}``; a VALUE is a text or, for a sentence, ``{"text": TEXT, "id":
KEY, "values": ...}``.  locale.translated() shows a sentence by its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

MESSAGE_IDS = "message_ids"
ALL_OF, BETWEEN = "all_of", "between"  # the key of several sentences, and the name of what stands between them
MOST_LEVELS = 8  # of sentences in the places of sentences

_PLACE = re.compile(r"\{(\w+)\}")


class Sentence(str):
    """An English text that knows its message.  What is made of it by an f-string or a slice is a plain text.

    Args:
        text: with its places filled.
        key: of the message; it stays when the English words change.
        values: what stands in the places, by name; each may be a sentence, too.
    """

    key: str
    values: Mapping[str, str]

    def __new__(cls, text: str, key: str, values: Mapping[str, str]) -> Sentence:
        """Make the text, which knows its message."""
        self = super().__new__(cls, text)
        self.key, self.values = key, values
        return self

    def __getnewargs__(self) -> tuple[str, str, Mapping[str, str]]:  # type: ignore[override]  # of a copy
        return str.__str__(self), self.key, self.values

    def __str__(self) -> str:  # the text of an error is this of its argument
        return self


def sentence(key: str, english: str, /, **values: str | int) -> Sentence:
    """Return the sentence *english* with its places filled: ``sentence("pid.gone", "pid {pid} is gone", pid=7)``."""
    texts = {name: value if isinstance(value, str) else str(value) for name, value in values.items()}
    return Sentence(filled(english, texts), key, texts)


def nsentence(key: str, one: str, several: str, number: int, /, **values: str | int) -> Sentence:
    """Return the sentence *one* or *several*, whichever fits *number*, which stands in its place {number}."""
    return sentence(key, one if number == 1 else several, number=f"{number:,}", **values)


def all_of(sentences: Iterable[str], between: str = "; ") -> str:
    """Return several sentences as one text that keeps each of them; *between* is one of locale.SEPARATORS."""
    parts = list(sentences)
    if len(parts) < 2:
        return "".join(parts) if not parts else parts[0]
    return Sentence(between.join(parts), ALL_OF, {BETWEEN: between, **{str(n): part for n, part in enumerate(parts)}})


def cut(text: str, most: int) -> str:
    """Return *text* as it is, or if it is longer than *most* characters, its beginning as a plain text."""
    return text if len(text) <= most else text[:most]


def filled(form: str, values: Mapping[str, str]) -> str:
    """Return *form* with its places filled; a place without a value stays as it is."""
    return _PLACE.sub(lambda place: values.get(place[1], place[0]), form)


def plain(content: Any) -> Any:
    """Return *content* with texts in place of its sentences."""
    if isinstance(content, Mapping):
        return {name: plain(part) for name, part in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(map(plain, content))
    return str.__str__(content) if isinstance(content, str) else content


def dumps(content: Mapping[str, Any], **options: Any) -> bytes:
    """Return *content* as json.dumps() would, in ASCII, with the messages of its sentences, for jsonio.loads()."""
    import json  # only for what writes JSON: `gpuguard --version` does not

    return json.dumps(with_ids(content), **options).encode("ascii")


def with_ids(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *content* with the messages of its sentences in a field of their own, if there are any."""
    found = message_ids(content)
    return {**content, MESSAGE_IDS: found} if found else content


def message_ids(content: Any) -> dict[str, Any]:
    """Return the messages of the sentences in *content*, by their texts."""
    found: dict[str, Any] = {}
    _find(content, found)
    return found


def _find(content: Any, found: dict[str, Any]) -> None:
    if isinstance(content, Sentence):
        found[str.__str__(content)] = _message(content)
    elif isinstance(content, Mapping):
        for part in content.values():
            _find(part, found)
    elif isinstance(content, (list, tuple)):
        for part in content:
            _find(part, found)


def _message(sentence: Sentence) -> dict[str, Any]:
    values = {
        name: {"text": plain(value), **_message(value)} if isinstance(value, Sentence) else value
        for name, value in sentence.values.items()
    }
    return {"id": sentence.key, "values": values}


def with_sentences(content: Any, ids: object) -> Any:
    """Return *content* with its sentences, whose messages are *ids*: what message_ids() found, or what others wrote.

    What is none of a message in them counts for nothing.
    """
    known = {text: _sentence(text, message) for text, message in ids.items()} if isinstance(ids, Mapping) else {}
    return _put(content, known) if known else content


def _put(content: Any, known: Mapping[str, str]) -> Any:
    if isinstance(content, str):
        return known.get(content, content)
    if isinstance(content, Mapping):
        return {name: _put(part, known) for name, part in content.items()}
    return type(content)(_put(part, known) for part in content) if isinstance(content, (list, tuple)) else content


def _sentence(text: object, message: object, levels: int = MOST_LEVELS) -> str:
    english = text if isinstance(text, str) else ""
    key, values = (message.get("id"), message.get("values")) if isinstance(message, Mapping) else (None, None)
    if not (levels and isinstance(key, str) and isinstance(values, Mapping)):
        return english
    places = {
        name: value if isinstance(value, str) else _sentence(value.get("text"), value, levels - 1)
        for name, value in values.items()
        if isinstance(value, (str, Mapping))
    }
    return Sentence(english, key, places)
