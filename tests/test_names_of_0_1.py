"""What users of 0.1 have in their scripts is still there: options, JSON fields, metrics, keys of policies, variables.

names_of_0_1.json was written once, by `python tests/test_names_of_0_1.py CHECKOUT` from a checkout of 0.1.  Other tests
hold that the pages say what the program does.
"""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from sources import ROOT

NAMES = Path(__file__).with_name("names_of_0_1.json")


def sections(text: str) -> dict[str, str]:
    """Heading -> what stands below it, up to the next heading; below ``a, b`` stands what both have."""
    parts = re.split(r"^#{2,4} (.+)$", text, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        for name in {heading, *heading.split(", ")}:
            found[name] = found.get(name, "") + body
    return found


def expanded(name: str) -> list[str]:
    """``"a_{b,c}_d"`` -> ``["a_b_d", "a_c_d"]``; labels behind the name are left out."""
    parts = re.split(r"\{([^}]*)\}", re.sub(r"\{[^}]*\}$", "", name))
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def names_in(root: Path) -> dict[str, list[str]]:
    """Kind -> the names that the pages below *root* (a checkout) promise, each with where it stands."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (root / "docs").glob("*.md")}
    source = "\n".join(path.read_text(encoding="utf-8") for path in (root / "gpuguard").rglob("*.py"))
    commands = sections(pages["cli"])
    everywhere = "--help" * bool(commands.pop("Options of every command", ""))
    options = {
        f"{owner} {option}"
        for command, text in commands.items()
        for owner in {command, " ".join(command.split()[:2])}  # what an action has, its command has
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", f"{text} {everywhere}".replace("[-h]", "--help"))
    }
    fields = {
        f"{place} {field}"
        for place, text in sections(pages["json"]).items()
        for field in re.findall(r"^[|-] `([a-z_0-9]+)`", text, re.MULTILINE)
    }
    metrics = {
        name for spelled in re.findall(r"`(gpuguard_[a-z_{},]+)", pages["metrics"]) for name in expanded(spelled)
    }
    keys = set(re.findall(r"^[|-] *`([a-z_]+)`", pages["policies"], re.MULTILINE))
    variables = set(re.findall(r"\bGPUGUARD_[A-Z]+(?:_[A-Z]+)*\b", source))
    codes = set(re.findall(r"^EXIT_[A-Z_]+ = (\d+)", source, re.MULTILINE))
    kinds = {
        "options": options, "fields": fields, "metrics": metrics, "keys": keys, "variables": variables, "codes": codes,
    }  # fmt: skip
    return {kind: sorted(names) for kind, names in kinds.items()}


@pytest.mark.parametrize("kind", ["options", "fields", "metrics", "keys", "variables", "codes"])
def test_nothing_that_0_1_promised_is_gone(kind: str) -> None:
    before, now = json.loads(NAMES.read_text(encoding="utf-8"))[kind], names_in(ROOT)[kind]

    assert len(before) > 3
    assert sorted(set(before) - set(now)) == []


def test_names_that_are_gone_are_seen(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "cli.md").write_text("")

    assert names_in(tmp_path)["options"] == [] != names_in(ROOT)["options"]


if __name__ == "__main__":
    NAMES.write_text(json.dumps(names_in(Path(sys.argv[1])), indent=1) + "\n", encoding="utf-8")
