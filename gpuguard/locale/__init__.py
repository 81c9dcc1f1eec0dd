"""Messages in the language of the user: ``_("{device} is not free.").format(device=label)``.

The code holds the messages in English; zh_CN/LC_MESSAGES/gpuguard.mo holds them in Chinese.  Only the command line
calls use_language_of_user(), and only for output that people read: JSON, records, the audit log, metrics, messages
between daemon and clients, and programs that import gpuguard stay English.  Sentences there are made by messages.py and
shown by translated().  gpuguard/locale/README.md says how to translate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gpuguard.locale.messages import ALL_OF, BETWEEN, Sentence, filled, plain

if TYPE_CHECKING:
    from gettext import NullTranslations

DOMAIN = "gpuguard"
LOCALE = os.path.dirname(os.path.abspath(__file__))
LANGUAGES = ("zh_CN",)

_catalogue: NullTranslations | None = None  # None: English


def _(message: str) -> str:
    """Return *message* in the language of the user."""
    return _catalogue.gettext(message) if _catalogue else message


def N_(message: str) -> str:  # noqa: N802  # gettext's own name for it
    """Return *message* unchanged; this marks a message in a table, which ``_(table[key])`` translates later."""
    return message


SEPARATORS = N_("; "), N_(", "), N_(": "), N_(" and "), "\n"  # of messages.all_of()


def translated(text: str, say: Callable[[str], str] | None = None) -> str:
    """Return a Sentence in the language of the user, or as *say* has it; other texts stay as they are."""
    say = say or (_catalogue.gettext if _catalogue else None)
    if say is None or not isinstance(text, Sentence) or not text.key:
        return text
    values = {name: translated(value, say) for name, value in text.values.items()}
    if text.key == ALL_OF:
        between = values.pop(BETWEEN, "")
        return (say(between) if between in SEPARATORS else between).join(values.values())
    form = say(text.key)
    return str(plain(text)) if form == text.key else filled(form, values)


def ngettext(one: str, several: str, number: int) -> str:
    """Return *one* or *several*, whichever fits *number*, in the language of the user."""
    if _catalogue:
        return _catalogue.ngettext(one, several, number)
    return one if number == 1 else several


def catalogue(language: str) -> NullTranslations:
    """Return the messages in one of LANGUAGES."""
    import gettext  # only for users who do not read English

    return gettext.translation(DOMAIN, LOCALE, [language], fallback=True)


def language_of_user(environ: Mapping[str, str]) -> str | None:
    """Return which of LANGUAGES *environ* asks for, in gettext's order of variables, or None for English."""
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
    """Make `_` and argparse speak the language that *environ* asks for from now on."""
    global _catalogue
    language = language_of_user(environ)
    if language is None or not _writes(language):
        return
    import gettext  # only for users who do not read English

    _catalogue = catalogue(language)
    gettext.bindtextdomain(DOMAIN, LOCALE)  # argparse looks its messages up in the program's domain
    gettext.textdomain(DOMAIN)


def use_english() -> None:
    """Make `_` speak English again from now on, for output that programs read."""
    global _catalogue
    if _catalogue:
        import gettext

        _catalogue = None
        gettext.textdomain("messages")  # Python's default


def _writes(language: str) -> bool:
    """Return whether stdout and stderr can encode the characters of *language*."""
    for stream in (sys.stdout, sys.stderr):
        try:
            {"zh_CN": "显存：空闲"}[language].encode(getattr(stream, "encoding", None) or "utf-8")
        except UnicodeEncodeError:
            return False
    return True
