"""Every sentence that gpuguard says in a test has the words of the catalogue for its key, and a text in each place.

A test seldom reads a whole sentence, and none reads its key, by which people see it in their language.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache

import pytest
from sources import ROOT

from gpuguard.locale import messages
from gpuguard.locale.messages import Sentence, filled

_ENTRY = re.compile(r'^msgctxt (".*")\nmsgid ((?:".*"\n)+)', re.MULTILINE)
_PLACE = re.compile(r"\{(\w+)\}")
_faults = list[str]()


@pytest.fixture(scope="session", autouse=True)
def sentences_are_heard() -> Iterator[None]:
    """Note what is wrong with a sentence when it is made, also where the code goes on."""
    make = Sentence.__new__

    def heard(cls: type[Sentence], text: str, key: str, values: Mapping[str, str]) -> Sentence:
        frame = sys._getframe(1)
        if frame.f_code is messages.sentence.__code__:
            while frame.f_back and frame.f_globals["__name__"] == messages.__name__:
                frame = frame.f_back
            module = frame.f_globals["__name__"]
            if module.startswith("gpuguard.") and (fault := fault_of(text, key, values)):
                _faults.append(f"{module}:{frame.f_lineno}: {fault}")
        return make(cls, text, key, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sentence, "__new__", staticmethod(heard))
        yield


def faults_heard() -> list[str]:
    """What was wrong with sentences since the last call."""
    faults = sorted(set(_faults))
    _faults.clear()
    return faults


def fault_of(text: str, key: str, values: Mapping[str, str]) -> str | None:
    """Say what is wrong with a sentence, by the catalogue."""
    english = english_texts().get(key)
    if english is None:
        return f"no sentence of the catalogue has the key {key}: {text}"
    one = values.get("number") == "1"  # the catalogue has the form for several only
    if set(_PLACE.findall(english)) - values.keys() or "None" in values.values():
        return f"a place of {key} has no value: {text}"
    return None if one or text == filled(english, values) else f"{key} has other words in the catalogue: {text}"


@cache
def english_texts() -> Mapping[str, str]:
    """The English words of each key, from a catalogue: scripts/translations.py has read them in the sources."""
    entries = (ROOT / "gpuguard/locale/zh_CN/LC_MESSAGES/gpuguard.po").read_text(encoding="utf-8")
    return {
        ast.literal_eval(key): "".join(map(ast.literal_eval, words.splitlines()))
        for key, words in _ENTRY.findall(entries)
    }
