"""docs/cli.md is what `--help` says.  After a change of an option: ``python tests/test_help.py --write``."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from gpuguard.cli import COMMANDS, build_parser, overview, run_command_line
from gpuguard.cli.options import Parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

_HEAD = """# The command line

What `gpuguard --help` and `gpuguard COMMAND --help` print, except what an earlier command says word for word: an option
that a usage shows and no text explains stands with the first command that has it, mostly `gpuguard run`.
This page is written by `python tests/test_help.py --write`; a test compares it with the program.

"""


def parsers(command: str) -> dict[str, Parser]:
    """The parser of *command* and those of its sub-commands, by what one types."""
    whole = build_parser(command)
    parts = [action.choices for action in whole.actions if isinstance(action, argparse._SubParsersAction)]
    below = {f"gpuguard {command} {name}": parser for choices in parts for name, parser in choices.items()}
    return {f"gpuguard {command}": whole, **below}


ALL_PARSERS = {name: parser for command in COMMANDS for name, parser in parsers(command).items()}


def help_texts() -> dict[str, str]:
    """What --help prints for gpuguard and for each command, at 100 columns."""
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        return {"gpuguard": overview(), **{name: parser.format_help() for name, parser in ALL_PARSERS.items()}}


def page(texts: dict[str, str]) -> str:
    shorter = without_repetition(texts)
    return _HEAD + "\n".join(f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in shorter.items())


def without_repetition(texts: dict[str, str]) -> dict[str, str]:
    """*texts* without options that an earlier command explains word for word.

    Every option stays named: those that the usage does not show stand where they were explained.
    """
    first: dict[str, str] = {}

    def shortened(paragraph: str, name: str, usage: str) -> str:
        title, *options = re.split(r"(?:^|\n)(?=  --?\w)", paragraph)
        old = [option for option in options if first.setdefault(" ".join(option.split()), name) != name]
        lines = [option for option in options if option not in old]
        names = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]+", "\n".join(old)))
        unnamed = [option for option in names if option not in usage.replace("[-h]", "--help")]
        if unnamed:
            line = f"  {', '.join(unnamed)}: as in {first[' '.join(old[0].split())]} --help"
            lines.append(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False))
        return "\n".join(filter(None, [title, *lines])) if lines or not options else ""

    paragraphs = {name: text.rstrip().split("\n\n") for name, text in texts.items()}
    shorter = {name: [shortened(part, name, parts[0]) for part in parts] for name, parts in paragraphs.items()}
    return {name: "\n\n".join(filter(None, parts)) for name, parts in shorter.items()}


def comparable(text: str) -> str:
    """*text* without what differs between Python versions: "-n N, --num N" is "-n, --num N" since 3.13; wrapping."""
    repeated = r"(--?[\w-]+) (\S+), (?=(?:--?[\w-]+(?: \2)?, )*--?[\w-]+ \2(?!\S))"
    return re.sub(repeated, r"\1, ", " ".join(text.split()))


def test_the_page_on_the_command_line_is_what_help_prints():
    written = PAGE.read_text(encoding="utf-8")

    assert comparable(written) == comparable(page(help_texts())), "run: python tests/test_help.py --write"


@pytest.mark.parametrize("name", ALL_PARSERS)
def test_help_says_what_each_option_does_in_120_columns_without_colours_wherever_it_is_written(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal: since Python 3.14 argparse has some
    parser = ALL_PARSERS[name]
    options = [action for action in parser.actions if not isinstance(action, argparse._SubParsersAction)]

    assert parser.description
    assert [action.dest for action in options if not action.help] == []
    assert max(map(len, parser.format_help().splitlines())) <= 120
    assert "\x1b" not in parser.format_help()


def test_help_of_a_command_is_the_help_of_that_command(capsys):
    assert [run_command_line(words) for words in (["help", "sim", "set"], ["sim", "set", "--help"])] == [0, 0]

    shown = capsys.readouterr().out
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :] and shown.startswith("usage: gpuguard sim set ")


def test_a_question_for_help_runs_nothing(capsys, tmp_path):
    assert run_command_line(["help", "run", "--backend", "simulated", "touch", str(tmp_path / "ran")]) == 0

    assert capsys.readouterr().out.startswith("usage: gpuguard run ")
    assert not (tmp_path / "ran").exists()


def test_a_changed_option_is_noticed():
    texts = help_texts()

    assert comparable(page(texts)) != comparable(page({**texts, "gpuguard run": "usage: gpuguard run"}))


def test_what_two_commands_explain_word_for_word_stands_with_the_first_and_stays_named():
    options = "where:\n  -h, --help  this\n  --a-b X  one\n           line more\n  --cd     two"
    texts = {"one": f"o [options]\n\n{options}", "two": f"t [-h] [--cd]\n\n{options}\n  --ef  4"}

    assert without_repetition({**texts, "three": f"[-h] --a-b --cd\n\n{options}"}) == {
        "one": f"o [options]\n\n{options}",
        "two": "t [-h] [--cd]\n\nwhere:\n  --ef  4\n  --a-b: as in one --help",
        "three": "[-h] --a-b --cd",
    }


if __name__ == "__main__" and "--write" in sys.argv:
    for _name in [name for name in os.environ if name.startswith("GPUGUARD_")]:
        del os.environ[_name]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(help_texts()), encoding="utf-8")
