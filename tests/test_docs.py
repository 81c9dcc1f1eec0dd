"""What the documents show is what happens: blocks run, links lead somewhere, commands and options exist.

The convention for blocks is in pages.py.
"""

import functools
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import picture
import pytest
import yaml
from pages import RUNNABLE, SILENT, Block, a_place, anchors, blocks, documents, faults, links
from sources import ROOT
from test_help import parsers

from gpuguard.cli import COMMANDS

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in documents()}
ALL_BLOCKS = [block for name, text in PAGES.items() for block in blocks(text, name)]
EXAMPLES: dict[tuple[str, str], Block] = {}  # each once, on the first page that has it
for _block in ALL_BLOCKS:
    if _block.runs:
        EXAMPLES.setdefault((_block.language, _block.text), _block)
RUNNING_PAGES = sorted({block.page for block in EXAMPLES.values()})


@pytest.mark.parametrize("name", RUNNING_PAGES)
def test_the_examples_of_a_page_do_what_they_show(name, tmp_path):
    examples = [block for block in EXAMPLES.values() if block.page == name]

    with a_place(tmp_path, node=not any("gpuguard sim start" in block.text for block in examples)):
        assert [fault for block in examples for fault in faults(block, tmp_path)] == []


def test_the_picture_in_the_guide_is_what_who_shows(tmp_path):
    now = picture.comparable("who", picture.taken("who", tmp_path))

    assert now == picture.comparable("who", picture.written("who")), "run: python tests/support/picture.py --write"


def test_each_block_says_in_which_language_it_is_and_why_it_is_not_run():
    assert [str(block) for block in ALL_BLOCKS if block.language not in RUNNABLE | SILENT] == []
    assert [str(block) for block in ALL_BLOCKS if block.comment.strip() == "not run:"] == []


@pytest.mark.parametrize("name", PAGES)
def test_links_inside_the_project_lead_somewhere(name):
    assert dead_links(PAGES[name], (ROOT / name).parent) == []


def dead_links(text: str, folder: Path) -> list[str]:
    def leads_somewhere(target: str) -> bool:
        path, _, anchor = target.partition("#")
        if path and not (folder / path).exists():
            return False
        return not anchor or anchor in anchors((folder / path).read_text(encoding="utf-8") if path else text)

    return [target for target in links(text) if not re.match(r"[a-z]+:", target) and not leads_somewhere(target)]


INDEX = re.compile(r"https?://[\w.-]*\b(?:pypi|pythonhosted|anaconda|conda|npmjs|crates|rubygems|dockerhub)\b[\w./-]*")


def test_no_document_leads_to_a_package_index():
    texts = PAGES | {"pyproject.toml": (ROOT / "pyproject.toml").read_text(encoding="utf-8")}
    fields = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))["about"]

    assert {name: found for name, text in texts.items() if (found := INDEX.findall(text))} == {}
    assert INDEX.findall(str(fields)) == []
    assert INDEX.findall("[a](https://pypi.org/project/a/) https://files.pythonhosted.org https://github.com/a/pypi")[
        1:
    ] == ["https://files.pythonhosted.org"]


@pytest.mark.parametrize("name", PAGES)
def test_every_command_and_option_that_a_page_shows_exists(name):
    code = code_of(PAGES[name])
    named = set(re.findall(r"(?m)(?:^|[$(;&|] ?)gpuguard ([a-z][a-z-]*)", code))

    assert named - set(COMMANDS) == set()
    for command, rest in re.findall(r"gpuguard ([a-z][a-z-]*)((?: [^\n`|;&]*)?)", code):
        if command in COMMANDS:
            shown = set(re.findall(r"(?<!\S)--[a-z][\w-]*", re.split(r" -- | -- ?$", rest)[0]))
            assert shown <= options_of(command), f"gpuguard {command}"


def code_of(text: str) -> str:
    """What stands in blocks and in `code`, one piece per line."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return "\n".join([*(block.text for block in blocks(text, "") if block.language != "text"), *inline])


@functools.cache
def options_of(command: str) -> set[str]:
    """All long options of a command and of its sub-commands."""
    return {flag for parser in parsers(command).values() for action in parser.actions for flag in action.option_strings}


def test_every_variable_and_exit_code_of_the_source_stands_on_its_page():
    page = PAGES["docs/environment.md"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gpuguard").rglob("*.py"))
    variables = set(re.findall(r"\bGPUGUARD_[A-Z]+(?:_[A-Z]+)*\b", source))
    codes = set(re.findall(r"^EXIT_[A-Z_]+ = (\d+)", source, re.M))

    assert sorted(variables - set(re.findall(r"`(GPUGUARD_\w+)`", page))) == []
    assert sorted(codes - set(re.findall(r"\d+", page.partition("## Variables")[0]))) == []


def test_the_map_of_the_documents_leads_to_each_of_them():
    pages = {Path(name).name for name in PAGES if name.startswith("docs/")} - {"README.md"}

    assert pages - set(links(PAGES["docs/README.md"])) == set()


def test_every_command_is_named_in_the_readme_which_has_examples():
    assert "README.md" in RUNNING_PAGES
    assert [name for name in COMMANDS if f"gpuguard {name}" not in PAGES["README.md"]] == []


# Commands of the README that no block of any page runs, and which test_*.py runs them.
ELSEWHERE = {
    "pip install": "packaging",
    "scripts/demo": "packaging",
    "gpuguard adopt": "adopt",
    "gpuguard completion": "completion",
    "gpuguard daemon": "daemon_command",
    "gpuguard deny": "restrictions",
    "gpuguard doctor": "doctor",
    "gpuguard history": "history_command",
    "gpuguard quarantine": "restrictions",
    "gpuguard resume": "pauses",
    "gpuguard report": "report",
    "gpuguard schema": "json_schema",
    "gpuguard setup": "setup_command",
    "gpuguard slurm": "slurm_jobs",
    "gpuguard wait": "wait_command",
    "gpuguard web": "web",
}


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_every_command_of_the_readme_is_run_by_a_block_of_some_page_or_by_a_named_test(name):
    ran = "\n".join(block.text for block in EXAMPLES.values())
    shown = [block.text for block in blocks(PAGES[name], name) if not block.runs]
    shown += re.findall(
        r"`((?:gpuguard|scripts/)[^`\n]*)`", re.sub(r"^```.*?^```$", "", PAGES[name], flags=re.M | re.S)
    )
    typed = (line.partition("#")[0].removeprefix("sudo ") for text in shown for line in text.splitlines())
    lines = (line.replace('"$(command -v gpuguard)"', "gpuguard").split() for line in typed)
    commands = {" ".join(words[: 1 if words[0].startswith("scripts/") else 2]) for words in lines}

    assert {command for command in commands if not re.search(rf"{command}\b", ran)} - {"gpuguard"} == {*ELSEWHERE}
    for command, file in ELSEWHERE.items():
        assert f'"{command.split()[-1].rpartition("/")[2]}"' in (ROOT / "tests" / f"test_{file}.py").read_text(), (
            command
        )


def test_the_readme_is_short_and_its_figures_are_those_of_the_benchmarks():
    readme, measured = PAGES["README.md"], PAGES["benchmarks/README.md"].splitlines()
    racers = re.findall(r"(?m)^\| 16 \|.*$", readme)
    waits = dict(re.findall(r"(?m)^\| ([^|]+) \| \**([\d.]+)\** \| \**[\d.]+\** \|$", readme))
    rules = {
        "gpuguard, lengths known": "**gpuguard**, all jobs with a time limit",
        "order of arrival": "order of arrival",
        "whatever fits": "whatever fits, as with a loop around `nvidia-smi`",
    }

    assert len(readme.splitlines()) <= 150
    assert len(racers) == 5
    assert [row for row in racers if not any(line.startswith(row) for line in measured)] == []
    for rule, name in rules.items():
        assert any(line.startswith(f"| {rule} | {waits[name]} |") for line in measured), rule


def test_the_picture_of_the_readme_is_there_where_nothing_moves():
    rich = pytest.importorskip("rich.text", reason="the README's picture (no rich: pip install -e '.[dev]')")
    readme_picture = importlib.import_module("readme_picture")
    drawn = readme_picture.animated([(rich.Text("$ one"), 1.0), (rich.Text("$ two"), 1.0)])

    for svg, last in ((readme_picture.PICTURE.read_text(encoding="utf-8"), "claim"), (drawn, "two")):
        style, *frames = ElementTree.fromstring(svg)
        still, _, unmoved = re.sub(r"@keyframes.*", "", style.text or "").partition("@media (prefers-reduced-motion")

        assert frames[0].get("id") == "frame0"
        assert last in "".join(frames[-1].itertext())  # which lies upon all others, and has what they have
        assert "animation: none !important" in unmoved  # what an id says goes before what a class says
        assert not re.search("visibility|display|opacity", still + unmoved)
        assert [frame.attrib.keys() - {"id", "class"} for frame in frames] == [set()] * len(frames)


@pytest.mark.parametrize("name", ["README", "docs/jobs"])
def test_the_chinese_page_is_in_step(name):
    english, chinese = PAGES[f"{name}.md"], PAGES[f"{name}.zh-CN.md"]
    itself = f"{name.rpartition('/')[2]}.md"

    def outline(text: str) -> list[object]:
        body = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        return [
            re.findall(r"(?m)^#+", body),
            [(block.language, block.text, block.comment) for block in blocks(text, "")],
            sorted(re.findall(r"\d+(?:\.\d+)+", body)),
            [line.count("|") for line in body.splitlines() if line.startswith("|")],
            sorted(set(re.findall(r"`([^`\n]+)`", body))),
            sorted({link.replace(".zh-CN", "") for link in links(text)} - {itself}),
        ]

    assert outline(chinese) == outline(english)


def test_a_dead_link_is_found(tmp_path):
    text = "# A title\n[here](#a-title) [there](README.md) [away](https://example.org/x) [gone](nowhere.md) [none](#b)"
    (tmp_path / "README.md").touch()

    assert dead_links(text, tmp_path) == ["nowhere.md", "#b"]


def test_an_example_that_fails_or_prints_something_else_is_found(tmp_path):
    def block(language: str, text: str) -> Block:
        return Block("page", 1, language, text)

    assert faults(block("sh", "true\n"), tmp_path) == []
    assert faults(block("sh", "false\ntrue\n"), tmp_path)
    assert faults(block("python", "raise SystemExit(3)\n"), tmp_path)
    assert faults(block("console", "$ echo one two three\none ... three\n$ true\n"), tmp_path) == []
    assert faults(block("console", "$ echo one two\none\n"), tmp_path)
    assert faults(block("console", "$ false\n"), tmp_path)
