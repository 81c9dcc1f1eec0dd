"""scripts/test: what it tries again and what never, its workers, where files lie, and what was not tested."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from parallel import LONGEST, NEVER_AGAIN, pytest_xdist_auto_num_workers
from sources import ROOT
from surroundings import keep_files_in_memory

# Stands for the one of .venv, which has nothing that tests may want besides; notes what would be installed.
PYTHON = f"""#!/bin/sh
case "$*" in
  *"pip install"*) echo "$*" >>"$INSTALLED"; exit 0 ;;
  "-c import "*) exit 1 ;;
esac
exec {sys.executable} "$@"
"""
CONFTEST = "".join(f"from {module} import *\n" for module in ("parallel", "surroundings"))
ONCE_IN_TWO = """
import pathlib

def test_it():
    place = pathlib.Path(__file__).with_suffix(".ran")
    ran = place.exists()
    place.touch()
    assert ran
"""
SKIPPED = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_it(number):
    pytest.skip("the page in a browser (no chromium: apt-get install chromium)")

def test_more():
    pytest.skip("what mandoc reads of ours (no mandoc: apt-get install mandoc)")
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout that is set up, with scripts/test and no test: what it says with these files and words."""
    for folder in ("scripts", "tests/__pycache__", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts")
    for path, text in (("scripts/setup-venv", "#!/bin/sh\n"), (".venv/bin/python", PYTHON)):
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    installed = tmp_path / "installed"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests/support'}:{ROOT}", "INSTALLED": str(installed)}

    def run(*words: str, **files: str) -> tuple[int, str, str]:
        for name, text in files.items():
            (tmp_path / "tests" / f"{name}.py").write_text(text)
        installed.touch()
        program = [str(tmp_path / "scripts" / "test"), *words]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr + done.stdout, installed.read_text()

    return run


def test_what_failed_once_in_a_long_file_is_tried_again_and_named_but_never_what_claims_or_signals(checkout):
    code, said, _ = checkout(**dict.fromkeys(("test_lock", "test_help", "test_preflight", "test_web"), ONCE_IN_TWO))

    assert code == 1
    assert sorted(re.findall(r"^(FAILED|RERUN) tests/(\w+)", said, re.MULTILINE)) == [
        ("FAILED", "test_help"), ("FAILED", "test_lock"), ("FAILED", "test_preflight"), ("RERUN", "test_web")
    ]  # fmt: skip


def test_one_that_fails_again_is_a_failure(checkout):
    code, said, _ = checkout(test_web="def test_it():\n    assert False\n")

    assert code == 1 and "FAILED tests/test_web.py::test_it" in said


def test_the_last_line_says_what_was_not_tested_and_why(checkout):
    code, said, _ = checkout(test_web=SKIPPED, test_help="def test_it():\n    pass\n")

    assert code == 0
    assert said.splitlines()[-1] == (
        "Not tested: the page in a browser (no chromium: apt-get install chromium): 3;"
        " what mandoc reads of ours (no mandoc: apt-get install mandoc): 1"
    )
    assert said.count("chromium") == 2


def test_quick_leaves_out_the_longest_files_and_says_so(checkout):
    code, said, installed = checkout("--quick", test_run="assert False\n", test_help="def test_it():\n    pass\n")

    assert code == 0 and "1 passed" in said
    assert said.splitlines()[-1].startswith("Not tested: the longest files")
    assert "ray" not in installed and "ipykernel" not in installed


@pytest.mark.parametrize(
    ("words", "packages"),
    [((), ["ipykernel"]), (("tests/test_help.py", "-q"), []), (("tests/test_ray_head.py::test_it",), ["ray"])],
)
def test_only_what_the_files_need_that_are_asked_for_is_installed(checkout, words, packages):
    *_, installed = checkout(*words, "--version")

    assert [word for word in ("ipykernel", "ray") if word in installed] == packages


@pytest.mark.parametrize(
    ("cores", "names", "words", "workers"),
    [
        (2, "abcdefgh", ["tests"], 4),
        (1, "abcdefgh", ["tests"], 2),
        (64, "abcdefgh" * 9, ["tests"], 16),
        (2, "ab", ["tests"], 2),
        (2, "abcdefgh", ["tests/test_0.py::test_it", "tests/test_0.py::test_more"], 0),
        (2, "abcdefgh", ["tests/test_0.py", "tests/test_1.py"], 2),
        (2, "abcdefgh", ["tests/test_0.py", "tests/test_1.py", "tests/test_none.py"], 0),
    ],
)
def test_there_are_two_workers_for_each_core_and_no_more_than_files(mocker, tmp_path, cores, names, words, workers):
    (tmp_path / "tests").mkdir()
    for number, _ in enumerate(names):
        (tmp_path / "tests" / f"test_{number}.py").touch()
    mocker.patch("os.sched_getaffinity", lambda _: set(range(cores)))

    assert pytest_xdist_auto_num_workers(mocker.Mock(args=[f"{tmp_path}/{word}" for word in words])) == workers


def test_the_tables_name_files_that_exist():
    assert [name for name in {*LONGEST, *NEVER_AGAIN} if not (ROOT / "tests" / f"{name}.py").exists()] == []


@pytest.mark.parametrize(
    ("flags", "gibibytes", "place"),
    [(0, 8, "/dev/shm"), (0, 7, None), (os.ST_NOEXEC, 16, None), (os.ST_NODEV, 16, None), (os.ST_NOSUID, 16, None)],
)
def test_files_of_tests_lie_in_memory_where_that_has_room_and_restricts_nothing(monkeypatch, flags, gibibytes, place):
    monkeypatch.setenv("TMPDIR", "")  # so that it is put back after the test
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    memory = SimpleNamespace(f_flag=flags, f_bavail=gibibytes * 2**18, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: memory)
    keep_files_in_memory()

    assert os.environ.get("TMPDIR") == place


def test_who_says_where_files_lie_is_obeyed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    keep_files_in_memory()

    assert os.environ["TMPDIR"] == str(tmp_path)
