"""scripts/torture, coverage, check, generate, planted-faults, upgrade: do they find what is there, broken or missed?"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
from chances import IN_CAMPAIGNS
from parallel import pytest_collection_modifyitems
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


torture, coverage, check = script("torture"), script("coverage"), script("check")


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


AGAIN = "def pytest_addoption(parser):\n    parser.addoption('--again', action='store_true')\n"  # see parallel.py
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
    (tmp_path / "tests" / "conftest.py").write_text(AGAIN)
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    monkeypatch.setattr(coverage, "PARTS", {"it": (100, "choice", "choice")})

    assert not coverage.covered("it")
    assert word in capfd.readouterr().out


# The second of these notices what the first has reached.
REMEMBERED = """
from gpuguard.other import kept

KNOWN = []

def test_first():
    KNOWN.append(kept())

def test_second():
    assert (KNOWN or [kept()]) == [7]
"""
TOY = {
    "gpuguard/__init__.py": "",
    "gpuguard/toy.py": "def free(count):\n    return count > 4\n\n\ndef lost():\n    return 1\n",
    "gpuguard/other.py": "def kept():\n    return 7\n",
    "tests/test_remembered.py": REMEMBERED,
    "tests/test_toy.py": "from gpuguard.toy import free\n\n\ndef test_free():\n    assert free({})\n",
    "tests/test_broken.py": "import gpuguard.toy\n\n\ndef test_broken():\n    assert gpuguard.toy.lost() == 2\n",
    "tests/conftest.py": AGAIN,
    "pyproject.toml": "[tool.mutmut]\nsource_paths = ['gpuguard']\n",
}


@pytest.fixture
def planted(tmp_path):
    """Plants faults in a toy whose test asks free(*count*), and gives (exit status, what is printed)."""
    pytest.importorskip("mutmut", reason="scripts/planted-faults (no mutmut: .venv/bin/pip install mutmut)")
    (tmp_path / "scripts").mkdir()
    for name in ("planted-faults", "planted_plugin.py", "installed.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")

    def plant(count):
        for name, text in TOY.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text.format(count))
        words = [sys.executable, tmp_path / "scripts/planted-faults", "gpuguard/*.py"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert not ended.stderr and (tmp_path / "gpuguard/toy.py").read_text() == TOY["gpuguard/toy.py"]
        return ended.returncode, ended.stdout

    return plant


@IN_CAMPAIGNS
def test_a_planted_fault_that_a_test_sees_is_noticed_and_any_other_survives_unless_it_is_listed(planted, tmp_path):
    status, said = planted(5)

    assert status == 1
    assert "noticed: gpuguard/toy.py:2\n-    return count > 4\n+    return count > 5\n" in said
    assert "SURVIVES: gpuguard/toy.py:2\n-    return count > 4\n+    return count >= 4\n" in said
    assert "noticed: gpuguard/other.py:2\n-    return 7\n" in said
    assert "SURVIVES: gpuguard/toy.py:6\n-    return 1\n" in said  # the only test that reaches it fails anyway
    assert "test_broken fails without any fault, and is left out.\n" in said
    assert said.endswith("seed 1: 4 planted, 2 noticed, 2 survive (50.0%)\n")

    listed = "# no test can tell\ngpuguard/toy.py\n-    return 1\n+    return 2\n"
    (tmp_path / "scripts/planted_equal.txt").write_text(listed)
    status, said = planted(4.5)

    assert "measuring test_toy" in said and "measuring test_broken" not in said  # which has not changed
    assert said.endswith("seed 1: 3 planted, 2 noticed, 1 survive (33.3%)\n")


def test_an_upgrade_that_gives_a_device_twice_or_passes_a_request_is_found():
    upgrade = script("upgrade")
    jobs = [upgrade.Job(name, user, priority, None) for name, user, priority in (
        ("first", "alice", 1), ("other", "bob", 1), ("second", "alice", 1), ("urgent", "bob", 2),
    )]  # fmt: skip
    log = [{"what": "begun", "role": "first"}, {"what": "overlap", "device": "3"}]

    assert upgrade.out_of_order(jobs, ["urgent", "first", "second", "other"]) == []
    assert upgrade.out_of_order(jobs, ["urgent", "second", "other", "first"]) == ["second passed first"]
    assert upgrade.out_of_order(jobs, ["other", "urgent"]) == ["other passed urgent"]
    assert (upgrade.doubles([log[:1]]), upgrade.doubles([log])) == ([], ["first on 3"])


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


@pytest.mark.parametrize(
    ("changed", "is_near"),
    [
        ("gpuguard/policies/rules.py", True),  # imported
        ("gpuguard/queue/rules.py", False),
        ("gpuguard/views/who.py", True),  # has its name
        ("tests/machines.py", True),  # a helper, which its helper imports
        ("tests/test_who_command.py", True),
        ("tests/test_run.py", False),
    ],
)
def test_the_tests_near_a_change_are_found(changed, is_near, tmp_path):
    (tmp_path / "test_who_command.py").write_text("def test():\n    from crowds import crowd\n")
    (tmp_path / "crowds.py").write_text("import machines\nfrom gpuguard.policies import rules\n")
    (tmp_path / "machines.py").write_text("import crowds\n")

    assert check.near([changed], [tmp_path / "test_who_command.py"]) == ["test_who_command"] * is_near


def test_a_file_belongs_to_the_parts_of_coverage_that_measure_or_run_it():
    assert coverage.parts_of(["gpuguard/lock.py", "tests/test_pauses.py", "README.md"]) == ["claims", "signals"]
    assert coverage.parts_of(["gpuguard/views/who.py"]) == []


def test_generate_runs_all_that_writes_something_anew_but_pictures():
    writers = [path for path in ROOT.glob("tests/**/*.py") if re.search(r'"--write" in sys.argv', path.read_text())]
    names = {path.relative_to(ROOT / "tests").with_suffix("").as_posix() for path in writers}
    wanted = names - {Path(__file__).stem, "support/picture"}

    assert len(wanted) >= 4
    assert wanted == {*re.search(r"for page in (.*); do", (ROOT / "scripts/generate").read_text())[1].split()}
