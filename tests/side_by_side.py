"""How the files of tests run in several workers at once: the longest first, and what a machine has once in turns.

`scripts/test --covered "$(scripts/coverage --tests)"` leaves out what scripts/coverage runs.

`scripts/test -n 4 --dist loadfile --no-loadscope-reorder` gives each worker that is free the next file, in this order.
tests/conftest.py imports these names, which is how pytest learns of them.  A serial run keeps its order.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# A worker that gets one of these last keeps all the others waiting for it.
LONGEST = (
    "test_damaged_documents", "test_run", "test_slurm_cluster", "test_two_users", "test_broker",
    "test_agreement", "test_web_browser", "test_faulty_drivers", "test_benchmarks_run", "test_packaging",
    "test_reserve_command", "test_broker_hostile", "test_ray_head", "test_adopt", "test_guard_faults",
    "test_web", "test_docs", "test_contention", "test_daemon", "test_broker_shares", "test_damaged_files",
    "test_fleet_ssh", "test_overtaking", "test_release_command", "test_completion", "test_drain",
    "test_forged_claims", "test_attacks", "test_queue_model", "test_disk_room", "test_mig_profiles",
    "test_hazards", "test_driver_calls", "test_wrapper_death", "test_dry_equals_live", "test_worker",
    "test_campaigns", "test_guard_schedules", "test_policy_mutations",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--covered", default="", help="files (NAME of test_NAME.py) that scripts/coverage runs")


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covered = {f"test_{name}" for name in config.getoption("covered").split()}
    done = {item for item in items if item.path.stem in covered and not item.get_closest_marker("hypothesis")}
    if done:
        config.hook.pytest_deselected(items=list(done))
        items[:] = [item for item in items if item not in done]
    if hasattr(config, "workerinput"):
        longest_first(items)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests by the places of their files in LONGEST; the others stay behind them as they are."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """No other test of this machine that asks for this runs at the same time, in whatever worker or checkout."""
    with a_turn():
        yield


@contextmanager
def a_turn() -> Iterator[None]:
    # The kernel drops it however this process ends, and no file is left.
    place = os.open("/", os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)
