"""The man pages that scripts/build-man writes, and where scripts/build-completions puts its files."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from shells import needed
from sources import ROOT
from test_help import parsers

from gpuguard.cli import COMMANDS
from gpuguard.cli.completion import SHELLS

PLAIN = {"PATH": "/usr/bin:/bin", "PYTHON": os.path.realpath(sys.executable), "LC_ALL": "C.UTF-8", "MANWIDTH": "1000"}


def built(script: str, place: Path, **variables: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / script, str(place)], env={**PLAIN, **variables}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("man") / "man1"
    built("build-man", place, SOURCE_DATE_EPOCH="86400")
    return place


def rendered(page: Path) -> tuple[str, str]:
    """What `man` shows of it as one line, and what it warns of."""
    done = subprocess.run(
        [needed("man"), "--warnings", "-l", str(page)], env=PLAIN, capture_output=True, text=True, check=True
    )
    return " ".join(re.sub(".\b", "", done.stdout).split()), done.stderr


def test_every_command_and_option_has_its_place_on_a_page_that_man_shows_without_a_warning(pages):
    shown = {path.stem: rendered(path) for path in pages.iterdir()}

    assert set(shown) == {"gpuguard", *(f"gpuguard-{name}" for name in COMMANDS)}
    assert [warnings for _, warnings in shown.values() if warnings] == []
    assert [name for name in COMMANDS if f"gpuguard-{name}(1) {COMMANDS[name]}" not in shown["gpuguard"][0]] == []
    for name in COMMANDS:
        text, _ = shown[f"gpuguard-{name}"]
        assert missing(text, parsers(name).values()) == []


def missing(text: str, of: Iterable[argparse.ArgumentParser]) -> list[str]:
    """The options and their help that *text* does not have."""
    found = []
    for parser in of:
        formatter = parser._get_formatter()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
                continue
            words = [*action.option_strings, " ".join(formatter._expand_help(action).split())]
            found += [word for word in words if word not in text]
    return found


def test_a_page_that_lacks_an_option_is_found(pages):
    text, _ = rendered(pages / "gpuguard-who.1")

    assert missing(text.replace("--fresh", ""), parsers("who").values()) == ["--fresh"]


def test_the_pages_are_clean_for_mandoc_and_whatis_can_read_their_names(pages):
    paths = sorted(map(str, pages.iterdir()))
    lint = subprocess.run([needed("mandoc"), "-T", "lint", "-W", "warning", *paths], capture_output=True, text=True)
    names = subprocess.run([needed("lexgrog"), *paths], capture_output=True, text=True)

    assert (lint.returncode, lint.stdout) == (0, "")
    assert len([line for line in names.stdout.splitlines() if " - " in line]) == len(paths)


def test_the_completions_lie_where_each_shell_looks_for_them(tmp_path):
    built("build-completions", tmp_path, PYTHON=sys.executable)

    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {paths[0] for paths in SHELLS.values()}
