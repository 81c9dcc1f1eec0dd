"""What scripts/planted-faults loads into pytest: it tells what each test reaches, or keeps to some of the tests."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from coverage import Coverage

_seconds: dict[str, float] = defaultdict(float)  # that a test took, with its fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that scripts/planted-faults passes; each is a file."""
    parser.addoption("--seconds", help="write here how long each test took")
    parser.addoption("--these", help="run only the tests that are listed here")
    parser.addoption("--others", help="run only the tests that are not listed here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep to the tests that are asked for."""
    for option, wanted in (("these", True), ("others", False)):
        if path := config.getoption(option):
            listed = set(json.loads(Path(path).read_text()))
            items[:] = [item for item in items if (item.nodeid in listed) is wanted]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Until the next test begins, this one reaches whatever runs here, and in the processes that are started."""
    if measuring := Coverage.current():
        measuring.switch_context(nodeid)
        measuring.config.context = nodeid
        os.environ["COVERAGE_PROCESS_CONFIG"] = measuring.config.serialize()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test's fixtures and its body took."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down how long each test took."""
    if path := session.config.getoption("seconds"):
        Path(path).write_text(json.dumps(_seconds))
