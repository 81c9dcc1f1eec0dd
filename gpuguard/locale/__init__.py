"""What people read, in their language: ``_("{device} is not free.").format(device=label)``.

The code says it in English; zh_CN/LC_MESSAGES/gpuguard.mo has it in Chinese.  Only the command line calls
use_language_of_user(), and only where people read: JSON, records, the audit log, metrics, what daemon and clients say
to each other and a program that imports gpuguard stay English.  gpuguard/locale/README.md says how to translate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gettext import NullTranslations

DOMAIN = "gpuguard"
LOCALE = os.path.dirname(os.path.abspath(__file__))
LANGUAGES = ("zh_CN",)

_catalogue: NullTranslations | None = None  # None: English


def _(message: str) -> str:
    """*message* in the language of the user."""
    return _catalogue.gettext(message) if _catalogue else message


def N_(message: str) -> str:  # noqa: N802  # gettext's own name for it
    """*message*, as it is: marks what a table of the code has, and ``_(table[key])`` says later."""
    return message


def translated(sentence: str) -> str:
    """A *sentence* that was written in English for a record or by another process, in the language of the user."""
    if _catalogue is None or not sentence:
        return sentence
    from gpuguard.locale.sentences import in_words  # for those who do not read English

    return in_words(sentence, _catalogue.gettext)


def ngettext(one: str, several: str, number: int) -> str:
    """*one* or *several*, whichever fits *number*, in the language of the user."""
    if _catalogue:
        return _catalogue.ngettext(one, several, number)
    return one if number == 1 else several


def catalogue(language: str) -> NullTranslations:
    """The messages in one of LANGUAGES."""
    import gettext  # for those who do not read English

    return gettext.translation(DOMAIN, LOCALE, [language], fallback=True)


def language_of_user(environ: Mapping[str, str]) -> str | None:
    """Which of LANGUAGES *environ* asks for, in the order of gettext; None for English."""
    locale = next(filter(None, map(environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):  # then scripts read what we print, whatever LANGUAGE says
        return None
    for name in (environ.get("LANGUAGE") or locale).split(":"):
        plain = name.partition(".")[0].partition("@")[0]
        if plain in LANGUAGES:
            return plain
        if plain.partition("_")[0] == "en":
            return None
    return None


def use_language_of_user(environ: Mapping[str, str] = os.environ) -> None:
    """From now on `_` speaks the language that *environ* asks for, and so does argparse."""
    global _catalogue
    language = language_of_user(environ)
    if language is None or not _writes(language):
        return
    import gettext  # for those who do not read English

    _catalogue = catalogue(language)
    gettext.bindtextdomain(DOMAIN, LOCALE)  # argparse asks for its words in the domain of the program
    gettext.textdomain(DOMAIN)


def use_english() -> None:
    """From now on `_` speaks English again: for what programs read."""
    global _catalogue
    if _catalogue:
        import gettext

        _catalogue = None
        gettext.textdomain("messages")  # Python's own


def _writes(language: str) -> bool:
    """Whether stdout and stderr have the characters of *language*."""
    for stream in (sys.stdout, sys.stderr):
        try:
            {"zh_CN": "显存：空闲"}[language].encode(getattr(stream, "encoding", None) or "utf-8")
        except UnicodeEncodeError:
            return False
    return True
