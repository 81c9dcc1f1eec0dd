"""scripts/torture, mutate and coverage: they find what is there, and say so when something breaks or is missed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.machinery import SourceFileLoader

import mutants
import pytest
from nodes import eventually
from sources import ROOT, modules


def script(name):
    loader = SourceFileLoader(f"script_{name}", str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    was, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = was
    return module


torture, mutate, coverage = script("torture"), script("mutate"), script("coverage")


def test_the_matrix_and_the_guest_name_what_exists():
    files = [files.rpartition("' ")[2] for part in script("guest").PARTS.values() for _, files in part]
    names = [*script("matrix").QUICK, *" ".join(files).split()]

    assert [name for name in names if not (ROOT / "tests" / f"{name}.py").exists()] == []


def test_every_campaign_names_what_exists():
    for _, what, about in torture.CAMPAIGNS.values():
        places = (
            [what.split()[0]]
            if what.startswith("benchmarks/")
            else [f"tests/{one}.py" for one in what.split() if one != "hidepid"]
        )
        assert about and [place for place in places if not (ROOT / place).exists()] == []
    for name, tests in mutate.TESTS.items():
        assert (ROOT / name).exists() and all((ROOT / "tests" / f"{test}.py").exists() for test in tests.split())
    for _, files, tests in coverage.PARTS.values():
        assert coverage.measured(files) and all((ROOT / "tests" / f"test_{test}.py").exists() for test in tests.split())


@pytest.mark.parametrize("name", ["scripts/torture", "scripts/mutate", "scripts/coverage", "benchmarks/run"])
def test_a_python_without_gpuguard_hands_on_to_that_of_the_checkout_or_says_what_makes_it(name, tmp_path):
    for folder in ("scripts", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def said(python=sys.executable):  # -S: without any packages
        return subprocess.run([python, "-S", tmp_path / name], capture_output=True, text=True, timeout=60)

    alone = said()
    venv.create(tmp_path / ".venv", symlinks=True)  # one that scripts/test has not come to the end of
    without = said(), said(tmp_path / ".venv/bin/python")
    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").symlink_to("/bin/echo")

    for one in (alone, *without):
        assert one.returncode == 1 and "Run scripts/test first" in one.stderr and "Traceback" not in one.stderr
    assert said().stdout == f"{tmp_path / name}\n"


@pytest.mark.parametrize(("program", "word", "code"), [("exit(0)", "nothing broke", 0), ("exit(3)", "FAILED", 1)])
def test_what_breaks_is_told_and_counts(program, word, code, tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "it.py").write_text(f"print('12 holds, 3 kills')\n{program}\n")
    monkeypatch.setattr(torture, "ROOT", tmp_path)
    monkeypatch.setattr(torture, "CAMPAIGNS", {"it": (1, "benchmarks/it.py --seconds {seconds}", "something")})
    monkeypatch.setattr(torture.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["torture", "--minutes", "0"])

    assert torture.main() == code
    said = capsys.readouterr().out
    assert word in said and "12 holds, 3 kills" in said
    assert "12 holds" in next(tmp_path.glob("gpuguard-torture-*.log")).read_text()


CLEANS_UP = """
import pathlib, sys, time
try:
    pathlib.Path(sys.argv[1]).write_text("begun")
    time.sleep(600)
finally:
    pathlib.Path(sys.argv[1]).write_text("cleaned up")
"""


def test_a_campaign_that_is_ended_ends_its_run_which_cleans_up(tmp_path, monkeypatch):
    file, real = tmp_path / "file", subprocess.Popen.communicate

    def communicate(run, timeout=None):
        if timeout is None:  # the first time: while it runs
            assert eventually(lambda: file.exists() and file.read_text() == "begun")
            sys.exit(7)
        return real(run, timeout=timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(SystemExit):
        torture.outcome([sys.executable, "-c", CLEANS_UP, str(file)], os.environ)

    assert file.read_text() == "cleaned up"


SOURCE = """
def f(a: int = 3) -> bool:
    if TYPE_CHECKING:
        x = 1
    g(a)
    if a:
        return f"{a + 1} words"
    return not 0 < a < 2 and a in (1, True)
"""


def test_each_place_is_damaged_once_and_what_never_runs_is_left_alone():
    found = mutants.mutants(SOURCE)

    assert [(one.line, one.what.partition(":")[0]) for one in found if not one.words] == [
        (2, "number"), (5, "statement"), (6, "condition"), (7, "return"), (8, "return"), (8, "operator"), (8, "not"),
        (8, "comparison"), (8, "comparison"), (8, "number"), (8, "number"), (8, "comparison"), (8, "number"),
        (8, "truth"),
    ]  # fmt: skip
    assert [one.what for one in found if one.words] == ["operator: a + 1", "number: 1"]
    whole = ast.unparse(ast.parse(SOURCE))
    assert len({one.source for one in found} | {whole}) == len(found) + 1
    assert all("x = 1" in one.source and "a: int" in one.source for one in found)
    assert any("return not 0 < a <= 2 and a in" in one.source for one in found)


def test_damage_after_which_python_compiles_to_the_same_is_none():
    source = "def f(a):\n    if 1:\n        a()\n"

    assert [one.what for one in mutants.mutants(source)] == ["statement: a()"]
    assert mutants.named(source) == {("if 1:", "number: 1"), ("a()", "statement: a()")}


def test_a_mutant_knows_which_statements_must_run_if_a_test_is_to_notice():
    source = "LIMIT = 3\n\n\ndef f(x, y=2):\n    z = 1\n    return z < LIMIT\n"

    assert [(one.what, one.at_import, set(one.sites)) for one in mutants.mutants(source)] == [
        ("number: 3", True, {6}),
        ("number: 2", True, {5, 6}),
        ("number: 1", False, {5}),
        ("return: return z < LIMIT", False, {6}),
        ("comparison: z < LIMIT", False, {6}),
    ]


def test_what_is_wrong_with_a_class_any_test_might_notice():
    source = "@frozen(True)\nclass A:\n    b: int = 2\n\n    def c(self):\n        return self.b\n"

    assert [(one.what, one.at_import, set(one.sites)) for one in mutants.mutants(source)] == [
        ("number: 2", True, set()),
        ("return: return self.b", False, {6}),
        ("truth: True", True, set()),
    ]


# A project of one file: what is loaded with it, what runs in a test, what a child of a test runs.
PROJECT = {
    "one.py": "LIMIT = 3\n\n\ndef f(x):\n    if x > 9:\n        return LIMIT\n    return x + 1\n\n\n"
    "def main():\n    print(f(2))\n",
    "tests/test_one.py": "import subprocess, sys\nfrom one import f\n\n\ndef test_it():\n    assert f(10)\n"
    "    assert f(0) == 1\n\n\ndef test_main():\n    words = [sys.executable, '-c', 'import one; one.main()']\n"
    "    assert subprocess.run(words, capture_output=True, text=True).stdout == '3\\n'\n",
    "tests/SURVIVORS.md": "# x\n\n## `one.py`\n\n| line | damage | why |\n|---|---|---|\n"
    "| `if x > 9:` | `comparison: x > 9` | nobody asks for 9 |\n",
}


def a_project(place, **files):
    """It, in *place*; returns the words that damage it."""
    project = place / "project"
    shutil.copytree(ROOT / "scripts", project / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "tests").mkdir()
    for name, text in (PROJECT | files).items():
        (project / name).write_text(text)
    return [sys.executable, "-B", project / "scripts" / "mutate", "one.py", "--tests", "test_one"]


SLEEPS = """
import os, pathlib, subprocess
from one import f

def test_it():
    if f(0) != {sound}:
        with subprocess.Popen(["sleep", "600"]) as asleep:
            pathlib.Path("{pids}.new").write_text(f"{{os.getpid()}} {{asleep.pid}}")
            os.rename("{pids}.new", "{pids}")
"""


@pytest.mark.parametrize("sound", [0, 1], ids=["while it measures", "while it damages"])
def test_damage_that_is_told_to_end_leaves_no_copy_and_no_process_behind(tmp_path, sound):
    pids = tmp_path / "pids"
    words = a_project(tmp_path, **{"tests/test_one.py": SLEEPS.format(sound=sound, pids=pids)})
    with subprocess.Popen(words, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL) as running:
        try:
            assert eventually(pids.exists, 60)
            running.terminate()
            status = running.wait(30)
        finally:
            running.kill()

    assert status == 143
    assert [pid for pid in pids.read_text().split() if os.path.exists(f"/proc/{pid}")] == []
    assert {each.name for each in tmp_path.iterdir()} == {"pids", "project"}


def test_what_a_test_sees_is_killed_and_what_none_sees_survives_and_must_be_listed(tmp_path):
    words = a_project(tmp_path)

    done = subprocess.run(words, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)

    said = done.stdout.splitlines()
    assert {line.strip() for line in said if "survives" in line} == {
        "survives and is not listed: --only 0, line 1, number: 3",
        "survives: --only 1, line 5, comparison: x > 9",
        "survives and is not listed: --only 2, line 5, number: 9",
    }, done
    assert "6 of 9 killed" in said[-1] and done.returncode == 1


def test_every_survivor_that_is_explained_is_still_there():
    for name in mutate.TESTS:
        found = mutants.named((ROOT / name).read_text(encoding="utf-8"))

        assert mutate.listed(name) - found == set(), name


def test_every_row_of_the_survivors_is_about_a_file_of_the_table():
    page = (ROOT / mutate.LISTED).read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]

    assert len(rows) == sum(len(mutate.listed(name)) for name in mutate.TESTS)


REACHED = "    assert (f(True), f(False)) == (1, 2)"
BY_CHANCE = f"@hypothesis.given(hypothesis.strategies.just(1))\ndef test_by_chance(one):\n{REACHED}"


@pytest.mark.parametrize(
    ("tests", "whole", "word"),
    [
        (f"def test_it():\n{REACHED}", True, "it: reached: 100 %"),
        (f"def test_it():\n    assert f(True) == 1\n\n\n{BY_CHANCE}", False, "66.7%   4\n"),
        (f"def test_it():\n{REACHED}\n\n\ndef test_more():\n    assert f(1) == 2", False, "it: TESTS FAILED"),
    ],
)
def test_what_no_test_reaches_but_by_chance_is_named_and_counts(tests, whole, word, tmp_path, monkeypatch, capfd):
    for name in ("gpuguard", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "gpuguard" / "__init__.py").touch()
    (tmp_path / "gpuguard" / "choice.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tmp_path / "tests" / "test_choice.py").write_text(
        f"import hypothesis\n\nfrom gpuguard.choice import f\n\n\n{tests}\n"
    )
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    monkeypatch.setattr(coverage, "PARTS", {"it": (100, "choice", "choice")})

    assert coverage.covered("it") is whole
    assert word in capfd.readouterr().out


def test_whatever_no_test_need_reach_says_why():
    lines = [line for path in modules() for line in path.read_text(encoding="utf-8").splitlines()]
    spared = [line for line in lines if "pragma: no" in line]

    assert [line for line in spared if not re.search(r"# pragma: no (cover|branch): \w", line)] == []
