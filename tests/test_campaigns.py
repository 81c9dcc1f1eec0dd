"""scripts/torture and coverage: they find what is there, and say so when something breaks or is missed."""

import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from side_by_side import pytest_collection_modifyitems
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


torture, coverage = script("torture"), script("coverage")


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
    for _, files, tests in coverage.PARTS.values():
        assert coverage.measured(files) and all((ROOT / "tests" / f"test_{test}.py").exists() for test in tests.split())


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


REACHED = "    assert (f(True), f(False)) == (1, 2)"
BY_CHANCE = f"@hypothesis.given(hypothesis.strategies.just(1))\ndef test_by_chance(one):\n{REACHED}"


@pytest.mark.parametrize(
    ("tests", "word"),
    [
        (f"def test_it():\n    assert f(True) == 1\n\n\n{BY_CHANCE}", "66.7%   4\n"),
        (f"def test_it():\n{REACHED}\n\n\ndef test_more():\n    assert f(1) == 2", "it: TESTS FAILED"),
    ],
)
def test_what_no_test_reaches_but_by_chance_is_named_and_counts(tests, word, tmp_path, monkeypatch, capfd):
    for name in ("gpuguard", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "gpuguard" / "__init__.py").touch()
    (tmp_path / "gpuguard" / "choice.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    (tmp_path / "tests" / "test_choice.py").write_text(
        f"import hypothesis\n\nfrom gpuguard.choice import f\n\n\n{tests}\n"
    )
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    monkeypatch.setattr(coverage, "PARTS", {"it": (100, "choice", "choice")})

    assert not coverage.covered("it")
    assert word in capfd.readouterr().out


def test_whatever_no_test_need_reach_says_why():
    lines = [line for path in modules() for line in path.read_text(encoding="utf-8").splitlines()]
    spared = [line for line in lines if "pragma: no" in line]

    assert [line for line in spared if not re.search(r"# pragma: no (cover|branch): \w", line)] == []


@pytest.mark.parametrize(("name", "by_chance", "stays"), [("model", False, 0), ("model", True, 1), ("run", False, 1)])
def test_the_suite_leaves_out_what_has_run_for_coverage_but_not_what_is_thrown_by_chance(
    mocker, name, by_chance, stays
):
    item = mocker.Mock(path=Path(f"tests/test_{name}.py"), get_closest_marker=lambda _: by_chance)
    items = [item]
    config = mocker.Mock(spec=["getoption", "hook"], getoption={"covered": "model lock"}.get)

    pytest_collection_modifyitems(config, items)

    assert len(items) == stays
    assert config.hook.pytest_deselected.call_count == 1 - stays
