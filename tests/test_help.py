"""docs/cli.md is what `--help` says.  After a change of an option: scripts/generate."""

import argparse
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from gpuguard.cli import COMMANDS, build_parser, overview, run_command_line
from gpuguard.cli.options import Parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

_HEAD = """# The command line

What `gpuguard --help` and `gpuguard COMMAND --help` print, without their examples. What two commands explain word for
word stands with the first of them, and the others name it.

"""

EVERY = "Options of every command"
EXAMPLE = re.compile(r" *(sudo )?gpuguard [a-z-]+ |eval ")


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
    usage, purpose, *_ = texts["gpuguard"].split("\n\n")  # not the list: each command has a section
    _, _, everywhere = texts["gpuguard doctor"].partition("\n\noptions:\n")  # it has these and no others
    head = {"gpuguard": f"{usage}\n\n{purpose}", EVERY: f"\n\n{everywhere}"}
    shorter = without_repetition(head | {name: text for name, text in texts.items() if name not in head})
    return _HEAD + "\n".join(f"## {name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in shorter.items())


def without_repetition(texts: dict[str, str]) -> dict[str, str]:
    """*texts* without examples and what an earlier one has word for word; options of which that is so are named."""
    first: dict[str, str] = {}  # option -> the text that has it first
    sentences = ""

    def shortened(name: str, text: str) -> str:
        nonlocal sentences
        usage, *paragraphs = text.rstrip().split("\n\n")
        usage = re.sub(r"\s+\[-(?!-\])(?:[^\[\]]|\[[^\[\]]*\])*\]", "", usage)
        kept = [] if usage == f"usage: {name}" else [usage]
        elsewhere: dict[str, str] = {}  # option -> where it is explained
        for paragraph in paragraphs:
            title, *options = re.split(r"(?:^|\n)(?=  --?\w)", paragraph)
            new = [option for option in options if first.setdefault(as_explained(option), name) == name]
            for option in options:
                if option not in new:
                    elsewhere |= dict.fromkeys(spellings(option), first[as_explained(option)])
            if new or not (options or EXAMPLE.match(title) or as_said(title) in sentences):
                kept.append("\n".join(filter(None, [title, *new])))
        sentences += as_said(text)
        return "\n\n".join(filter(None, [*kept, named(elsewhere)]))

    return {name: shortened(name, text) for name, text in texts.items()}


def as_explained(option: str) -> str:
    """The first long name of an option and what it does: a further spelling needs no explanation of its own."""
    _, _, text = re.sub(r"\n {4,}", "  ", option.strip()).partition("  ")
    return " ".join([*spellings(option)[:1], *text.split()])


def as_said(sentence: str) -> str:
    """As a list of sub-commands has it: without a capital, a full stop and line ends."""
    return " ".join(sentence.lower().rstrip(".").split())


def spellings(option: str) -> list[str]:
    """``["--num-gpus"]`` of "-n N, --num-gpus N    how many": the long ones; --help is of every command."""
    names = re.split(r"  |\n", option.strip())[0]
    return [name for name in re.findall(r"(?<![\w-])--[a-z][\w-]+", names) if name != "--help"]


def named(elsewhere: dict[str, str]) -> str:
    """Options by name, with where they are explained."""
    lines = []
    for place in dict.fromkeys(elsewhere.values()):
        where = "every command has" if place == EVERY else f"{place} --help"
        line = f"  {', '.join(option for option in elsewhere if elsewhere[option] == place)}: as {where}"
        lines.append(textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def comparable(text: str) -> str:
    """*text* without what differs between Python versions: "-n N, --num N" is "-n, --num N" since 3.13; wrapping."""
    repeated = r"(--?[\w-]+) (\S+), (?=(?:--?[\w-]+(?: \2)?, )*--?[\w-]+ \2(?!\S))"
    return re.sub(repeated, r"\1, ", " ".join(text.split()))


def test_the_page_on_the_command_line_is_what_help_prints():
    written = PAGE.read_text(encoding="utf-8")

    assert comparable(written) == comparable(page(help_texts())), "run scripts/generate"


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


@pytest.mark.parametrize("question", ["--version", "--help"])
def test_a_question_about_no_command_loads_the_options_of_none(question):
    words = [sys.executable, "-X", "importtime", "-m", "gpuguard", question]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    loaded = {line.rpartition("|")[2].strip() for line in told.splitlines()}

    assert "gpuguard.cli" in loaded
    assert loaded.isdisjoint({"argparse", "subprocess", "json", "gpuguard.cli.options", "gpuguard.model"})
    assert len({name for name in loaded if name.startswith("gpuguard")}) <= 8


def test_a_question_for_help_runs_nothing(capsys, tmp_path):
    assert run_command_line(["help", "run", "--backend", "simulated", "touch", str(tmp_path / "ran")]) == 0

    assert capsys.readouterr().out.startswith("usage: gpuguard run ")
    assert not (tmp_path / "ran").exists()


def test_a_changed_option_is_noticed():
    texts = help_texts()

    assert comparable(page(texts)) != comparable(page({**texts, "gpuguard run": "usage: gpuguard run"}))


def test_what_two_commands_explain_word_for_word_stands_with_the_first_and_stays_named():
    options = "where:\n  -h, --help  this\n  --a-b X  one\n           line more\n  --cd     two --ef"
    texts = {
        "one": f"o [options]\n\n{options}",
        "two": f"usage: two [-h] [--cd | -e [X]] X\n\ngpuguard two 1\n\n{options}\n  --ef  4",
    }

    assert without_repetition({**texts, "three": f"usage: three [-h]\n\nIt does.\n\n{options}"}) == {
        "one": f"o [options]\n\n{options}",
        "two": "usage: two X\n\nwhere:\n  --ef  4\n\n  --a-b, --cd: as one --help",
        "three": "It does.\n\n  --a-b, --cd: as one --help",
    }


if __name__ == "__main__" and "--write" in sys.argv:
    for _name in [name for name in os.environ if name.startswith("GPUGUARD_")]:
        del os.environ[_name]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(help_texts()), encoding="utf-8")
