"""The catalogues of gpuguard/locale, from the sources and the help of all commands.  See gpuguard/locale/README.md.

.venv/bin/python scripts/translations.py update    after a message was added or changed: then translate, update again
.venv/bin/python scripts/translations.py check     prints what is missing or wrong, as scripts/lint does
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from babel.messages.catalog import Catalog, Message
from babel.messages.mofile import read_mo, write_mo
from babel.messages.pofile import read_po, write_po

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpuguard.cli import COMMANDS, build_parser, notebook
from gpuguard.enforcement.actions import ACTION_KEYS
from gpuguard.locale import LANGUAGES
from gpuguard.model import EventKind, EventOutcome
from gpuguard.policies.rules import RULES
from gpuguard.units import count_forms
from gpuguard.views.policy import first_sentence
from gpuguard.views.policy_language import SECTIONS, paragraphs
from gpuguard.views.query import APP_FIELDS, GPU_FIELDS

ROOT = Path(__file__).resolve().parent.parent
LOCALE = ROOT / "gpuguard" / "locale"
GLOSSARY = LOCALE / "README.md"

# What argparse says to users of gpuguard, in the words of any Python that we support.
ARGPARSE = (
    "usage: ", "options", "positional arguments", "show this help message and exit",
    "argument %(argument_name)s: %(message)s", "the following arguments are required: %s", "expected one argument",
    "expected at least one argument", "ignored explicit argument %r", "not allowed with argument %s",
    "one of the arguments %s is required", "invalid choice: %(value)r (choose from %(choices)s)",
    "invalid %(type)s value: %(value)r",
)  # fmt: skip
_NOT_PROSE = re.compile(r"`[^`]*`|--?[\w-]+|\{\w+\}|%\(\w+\)s|gpuguard [\w-]+")
_PERCENT = re.compile(r"%\(\w+\)[sr]|%[sr%]")
_PLACES = re.compile(rf"{_PERCENT.pattern}|\{{\w*[^{{}}]*\}}")


def main() -> int:
    """Update or check all languages."""
    if sys.argv[1:] not in (["update"], ["check"]):
        sys.exit(__doc__)
    for name in [name for name in os.environ if name.startswith("GPUGUARD_")]:
        del os.environ[name]  # they are defaults in the help
    faults = []
    for language in LANGUAGES:
        folder = LOCALE / language / "LC_MESSAGES"
        catalog = read(folder / "gpuguard.po", language)
        template = extracted()
        if sys.argv[1] == "update":
            update(catalog, template)
            (folder / "gpuguard.po").write_bytes(written(catalog))
            (folder / "gpuguard.mo").write_bytes(compiled(catalog))
        found = [*problems(catalog, template), *words_beside_the_glossary(catalog, glossary())]
        if said(folder / "gpuguard.mo") != texts(catalog):
            found.append("gpuguard.mo is not what gpuguard.po says: run scripts/translations.py update")
        found += complaints(folder / "gpuguard.po")
        sys.stdout.write(f"{language}: {len(template)} messages, {len(found)} faults\n")
        faults += [f"{language}: {fault}\n" for fault in found]
    sys.stdout.writelines(faults)
    return 1 if faults else 0


def extracted() -> Catalog:
    """All messages: those that the sources mark, those of argparse, and what the help of all commands says."""
    template = Catalog(project="gpuguard", charset="utf-8")
    for path in sorted((ROOT / "gpuguard").rglob("*.py")):
        for message, key in messages_of(path.read_text(encoding="utf-8")):
            template.add(message, locations=[(str(path.relative_to(ROOT)), 0)], context=key)
    for message in ARGPARSE:
        template.add(message, locations=[("argparse", 0)])
    for message in (*get_args(EventKind), *get_args(EventOutcome)):  # `events`, and the page
        template.add(message, locations=[("gpuguard/model.py", 0)])
    for field in (*GPU_FIELDS.values(), *APP_FIELDS.values()):  # `query --help-query`
        template.add(field.text, locations=[("gpuguard/views/query.py", 0)])
    for noun in (*RULES.values(), *ACTION_KEYS.values()):  # `policy explain`
        template.add(first_sentence(noun), locations=[("gpuguard/policies", 0)])
    for noun in [noun for nouns in SECTIONS.values() for noun in nouns.values()]:  # `policy rules`
        for message in paragraphs(noun):
            if not message.startswith(" "):  # an example
                template.add(message, locations=[("gpuguard/policies", 0)])
    for command, purpose in COMMANDS.items():
        for message in (purpose, *help_of(build_parser(command))):
            if message not in template:
                template.add(message, locations=[(f"help/{command}", 0)])
    for message in help_of(notebook.parser()):
        if message not in template:
            template.add(message, locations=[("help/%gpus", 0)])
    return template


def messages_of(source: str) -> Iterator[tuple[str | tuple[str, str], str | None]]:
    """What *source* says, in its order, and the key of a sentence.

    That is what it marks with `_`, `N_` and ngettext, counts with format_count(), and says with sentence() and
    nsentence(), whose languages need no form for one.
    """
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        words = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in ("_", "N_") and words:
            yield words[0], None
        elif name == "ngettext" and words:
            yield (words[0], words[1]), None
        elif name == "format_count" and words:
            yield count_forms(*words), None
        elif name in ("sentence", "nsentence") and words:
            yield words[-1], words[0]


def help_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What `--help` of *parser* says, and of the commands below it, in the pieces in which it is translated."""
    texts = [*(parser.description or "").rstrip().split("\n\n"), parser.usage]
    for group in parser._action_groups:
        texts += [group.title, group.description]
    for action in parser._actions:
        texts.append(action.help)
        if isinstance(action, argparse._SubParsersAction):
            texts += [choice.help for choice in action._choices_actions]
            for below in action.choices.values():
                yield from help_of(below)
    yield from (text for text in texts if text and text != argparse.SUPPRESS)


def read(path: Path, language: str) -> Catalog:
    """The catalogue of a language; an empty one for a new language."""
    if not path.exists():
        return Catalog(locale=language, project="gpuguard", charset="utf-8", fuzzy=False)
    with path.open("rb") as file:
        return read_po(file, locale=language)


def update(catalog: Catalog, template: Catalog) -> None:
    """Bring the messages of *template* into *catalog*.  A message that was changed keeps its translation as fuzzy.

    Babel's own fuzzy matching also offers the translations of messages that are still there.
    """
    catalog.update(template, no_fuzzy_matching=True, update_header_comment=False, update_creation_date=False)
    gone = {(old.pluralizable, _english(old)): old.string for old in catalog.obsolete.values()}
    for message in catalog:
        if message.id and not _translated(message):
            alike = [english for plural, english in gone if plural == message.pluralizable]
            for english in difflib.get_close_matches(_english(message), alike, n=1):
                message.string = gone.pop((message.pluralizable, english))
                message.flags.add("fuzzy")
    catalog.obsolete.clear()


def written(catalog: Catalog) -> bytes:
    """The .po file: file names without line numbers, which would change with every line of code."""
    for message in catalog:  # Babel takes any % for the format of Python that argparse alone has here
        if not _PERCENT.search(_english(message)):
            message.flags.discard("python-format")
    file = io.BytesIO()
    write_po(file, catalog, width=110, omit_header=False, include_lineno=False, sort_by_file=True)
    return file.getvalue()


def compiled(catalog: Catalog) -> bytes:
    """The .mo file, which knows a sentence by its key."""
    keyed = Catalog(locale=catalog.locale, header_comment=catalog.header_comment)
    keyed.mime_headers = catalog.mime_headers
    for message in catalog:
        if message.id and not message.fuzzy:
            keyed.add(message.context or message.id, message.string)
    file = io.BytesIO()
    write_mo(file, keyed)
    return file.getvalue()


def said(path: Path) -> dict[str, str]:
    """What a .mo file says, without its header."""
    with path.open("rb") as file:
        return texts(read_mo(file))


def texts(catalog: Catalog) -> dict[str, str]:
    """English or the key of a sentence -> translation, without the header and what is fuzzy."""
    known = [message for message in catalog if message.id and not message.fuzzy]
    return {message.context or _english(message): _translated(message) for message in known}


def problems(catalog: Catalog, template: Catalog) -> Iterator[str]:
    """What is missing, fuzzy, left over, has other placeholders or another end than the English, or has a key twice."""
    keys = Counter(message.context for message in template if message.context)
    yield from (f"two sentences have this key: {key}" for key, count in keys.items() if count > 1)
    for message in template:
        if message.id and not catalog.get(message.id, message.context):
            yield f"not in gpuguard.po: {_shown(message)}"
    for message in catalog:
        translated, english = _translated(message), _english(message)
        if not english:
            continue  # the header
        if not template.get(message.id, message.context):
            yield f"no code says it: {_shown(message)}"
        if message.fuzzy or not translated:
            yield f"{'fuzzy' if message.fuzzy else 'missing'}: {_shown(message)}"
        elif set(_PLACES.findall(translated)) != set(_PLACES.findall(english)):
            yield f"other placeholders: {_shown(message)}"
        elif translated.endswith("\n") != english.endswith("\n"):
            yield f"another end of the line: {_shown(message)}"


def complaints(path: Path) -> list[str]:
    """What msgfmt of gettext, where it is installed, has against a .po file."""
    if not (msgfmt := shutil.which("msgfmt")):
        return []
    command = [msgfmt, "--check", "--statistics", f"--output-file={os.devnull}", str(path)]
    done = subprocess.run(command, env={"LC_ALL": "C"}, capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if not re.fullmatch(r"\d+ translated messages\.", line)]


def glossary() -> dict[str, tuple[str, ...]]:
    """English word -> what it may be called, of the table in gpuguard/locale/README.md."""
    rows = re.findall(r"^\| ([a-z ]+) \| ([^|]+) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return {term: tuple(words.split(", ")) for term, words in rows}


def words_beside_the_glossary(catalog: Catalog, terms: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Messages in which a term of the glossary is called something else."""
    for message in catalog:
        text, plain = _translated(message), _NOT_PROSE.sub("", _english(message))
        for term, words in terms.items():
            if text and re.search(rf"\b{term}s?\b", plain) and not any(word in text for word in (term, *words)):
                yield f"{term} is called {' or '.join(words)}: {_shown(message)}"


def _english(message: Message) -> str:
    return message.id if isinstance(message.id, str) else message.id[1]


def _translated(message: Message) -> str:
    strings = message.string if isinstance(message.string, (list, tuple)) else (message.string,)
    return strings[0] or "" if strings else ""


def _shown(message: Message) -> str:
    return " ".join(_english(message).split())[:90]


if __name__ == "__main__":
    sys.exit(main())
