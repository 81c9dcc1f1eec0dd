"""How scripts/test runs the tests: in several workers, the longest file first, and what a machine has once in turns.

Also which files `--quick` leaves out, and which get a second try.  `scripts/test --covered
"$(scripts/coverage --tests)"` leaves out what scripts/coverage runs.

A worker that is free gets the next file (`--dist loadfile`), in this order (`--no-loadscope-reorder`).
tests/conftest.py imports these names, which is how pytest learns of them.  A serial run keeps its order.
"""

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# A worker that gets one of these last keeps all the others waiting for it.  --quick leaves them out.
LONGEST = (
    "test_damaged_documents", "test_run", "test_slurm_cluster", "test_two_users", "test_broker", "test_agreement",
    "test_web_browser", "test_faulty_drivers", "test_benchmarks_run", "test_packaging", "test_reserve_command",
    "test_broker_hostile", "test_ray_head", "test_adopt", "test_guard_faults", "test_trespassers", "test_web",
    "test_docs", "test_waiter", "test_nvml", "test_contention", "test_daemon", "test_broker_shares",
    "test_damaged_files", "test_fleet_ssh", "test_overtaking", "test_release_command", "test_completion",
    "test_drain", "test_forged_claims", "test_attacks", "test_queue_model", "test_disk_room", "test_mig_profiles",
    "test_cancel_command", "test_jobs_command", "test_jobs_users", "test_jobs_campaign",
    "test_driver_calls", "test_wrapper_death", "test_dry_equals_live", "test_floods", "test_files",
    "test_parallel", "test_worker", "test_notebook", "test_last_good", "test_campaigns", "test_guard_schedules",
    "test_innocents", "test_ladder", "test_policy_mutations", "test_owner_learns", "test_grab_lifetime",
    "test_interrupted_claim", "test_engine_properties", "test_grab", "test_pid_reuse", "test_page_server",
    "test_backfill", "test_bad_input", "test_passing_faults", "test_backend_contract", "test_metrics_command",
    "test_device_state", "test_amd", "test_amd_node", "test_job_control", "test_query", "test_policy_command",
    "test_processes", "test_json_schema", "test_preflight", "test_fleet_answers", "test_action_release",
    "test_published_state",
    "test_planted", "test_policy_test", "test_deep_json", "test_daemon_requests", "test_identity",
    "test_shared_jobs", "test_queue_options", "test_socket_server", "test_restrictions", "test_recordings",
    "test_run_limits", "test_report", "test_setup_command", "test_usage_queries", "test_translations", "test_top",
    "test_unkillable", "test_usage_store", "test_wait_command", "test_unit_file", "test_fleet", "test_notify",
    "test_progress", "test_who_command", "test_slurm_jobs", "test_keep_command", "test_manpages",
    "test_locked_files", "test_top_screens", "test_top_command", "test_sim_command", "test_exhaustion",
    "test_daemon_command", "test_adopt_users", "test_endless_answers", "test_lock", "test_web_charts", "test_site",
    "test_train_example", "test_history_command", "test_backtest", "test_topology",
)  # fmt: skip

# In the others a test that fails is tried again, which costs each of theirs 40 ms: the plugin asks over a socket, and
# Nagle waits.  Not in these: claims, races, pids that are used again, signals.  A device given twice or an innocent
# signalled once in twenty runs is a fault.
NEVER_AGAIN = frozenset((
    "test_action_release", "test_adopt", "test_adopt_users", "test_amd", "test_amd_node", "test_attacks",
    "test_batch_records", "test_batch_states", "test_breaker", "test_broker",
    "test_broker_hostile", "test_broker_shares", "test_by_hand", "test_cancel_command", "test_claim_directory",
    "test_contention",
    "test_daemon", "test_daemon_files", "test_daemon_requests", "test_drain", "test_dry_equals_live",
    "test_exhaustion", "test_family", "test_forged_claims", "test_grab", "test_grab_lifetime", "test_guard_actions",
    "test_guard_faults", "test_guard_schedules", "test_identity", "test_innocents", "test_inplace",
    "test_interrupted_claim", "test_isolation", "test_job_control", "test_jobs_campaign", "test_jobs_command",
    "test_keep_command", "test_ladder",
    "test_limits", "test_lock", "test_locked_files", "test_mig_profiles", "test_pid_reuse", "test_planted",
    "test_preflight", "test_processes", "test_queue_model", "test_ray_head", "test_recall", "test_release_command",
    "test_reserve_command", "test_restrictions", "test_run", "test_run_limits", "test_scope", "test_shared_jobs",
    "test_sharing", "test_slurm_cluster", "test_slurm_jobs", "test_tickets_users", "test_two_users",
    "test_unkillable", "test_waiter", "test_warnings", "test_watchdog", "test_wrapper_death",
))  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the longest files")
    parser.addoption("--again", action="store_true", help="try what fails in the longest files once more")
    parser.addoption("--covered", default="", help="files (NAME of test_NAME.py) that scripts/coverage runs")


@pytest.hookimpl(optionalhook=True)  # of xdist, for `-n auto`
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for each core, as much of the time a test waits; no more than there are files, and none for one file."""
    named = {Path(word.split("::")[0]) for word in config.args}
    if not all(path.exists() for path in named):
        return 0  # which says so; workers would find no tests
    files = sum(len(list(path.rglob("test_*.py"))) if path.is_dir() else 1 for path in named)
    return min(files, 2 * len(os.sched_getaffinity(0)), 16) if files > 1 else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("quick") and collection_path.stem in LONGEST else None


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    covered = {f"test_{name}" for name in config.getoption("covered").split()}
    done = {item for item in items if item.path.stem in covered and not item.get_closest_marker("hypothesis")}
    if done:
        config.hook.pytest_deselected(items=list(done))
        items[:] = [item for item in items if item not in done]
    if config.getoption("again"):
        for item in items:
            if item.path.stem in LONGEST and item.path.stem not in NEVER_AGAIN:
                item.add_marker(pytest.mark.flaky(reruns=1))
    if hasattr(config, "workerinput"):
        longest_first(items)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests by the places of their files in LONGEST; behind them come the others, the file with most first."""
    places = {name: place for place, name in enumerate(LONGEST)}
    many = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path.stem, len(places)), -many[item.path]))


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
