"""Fixtures that many tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import FakeNvml, library
from surroundings import clean_environment, pytest_runtest_setup, pytest_terminal_summary  # noqa: F401  (hooks)


@pytest.fixture(scope="session")
def fake_nvml_library() -> str:
    """Path of the fake libnvidia-ml.so.1, built once per session."""
    return library()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with 8 idle devices behind the fake driver library."""
    with FakeNvml(tmp_path) as machine:
        yield machine
