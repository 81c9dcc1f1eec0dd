"""What every test stands in: an environment without traces of this machine; and what was not tested, in one line.

tests/conftest.py imports these names, which is how pytest learns of them.
"""

import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from parallel import LONGEST
from sentences_said import faults_heard

# What a shell on a GPU server, a batch job or a container may have set.  GPUGUARD_TEST_* steers the tests themselves.
_FOREIGN = ("GPUGUARD_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "GPU_DEVICE_", "ZE_", "SLURM_", "PBS_", "LSB_", "RAY_")
_EXACT = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "XDG_RUNTIME_DIR", "INVOCATION_ID")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable of this machine reaches a test or its children; HOME is empty, and the terminal a usual one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in _EXACT or (name.startswith(_FOREIGN) and not name.startswith("GPUGUARD_TEST_")):
                patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("LANGUAGE", "en")  # the developer may read another one
        yield


MEMORY, ROOM = "/dev/shm", 8 * 2**30  # bytes, of which the tests need a tenth


def keep_files_in_memory() -> None:
    """Have the many small files of the tests made in memory, for half the CPU time, unless TMPDIR says where.

    Not where there is little room, as in most containers, or where programs or device nodes do not work.
    """
    if "TMPDIR" in os.environ or not os.path.ismount(MEMORY):
        return
    memory = os.statvfs(MEMORY)
    restricted = memory.f_flag & (os.ST_NOEXEC | os.ST_NODEV | os.ST_NOSUID | os.ST_RDONLY)
    if memory.f_bavail * memory.f_frsize >= ROOM and not restricted:
        os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h

# A marker, and what is not tested where something is missing.  Every skip says it so: WHAT (WHY: WHAT TO DO).
_NEEDS = {
    "root": "what needs a second user id or device nodes (as root: scripts/test -m root)",
    "terminal": "what needs a pseudo-terminal (mount -t devpts devpts /dev/pts)",
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, what in _NEEDS.items():
        if item.get_closest_marker(marker) and not _has(marker):
            pytest.skip(what)


def pytest_runtest_teardown() -> None:
    """A test with a wrong sentence, or one in which this process began to adopt orphans, as `gpuguard run` does.

    The guard would spare those later.
    """
    if faults := faults_heard():
        pytest.fail("\n".join(faults))
    adopts, libc = ctypes.c_int(), ctypes.CDLL(None)
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    if adopts.value:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        pytest.fail("`gpuguard run` ran in the process of the tests: start it as one of its own")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the last line of all, below pytest's own
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal:
        # (path, line, reason); of a file that is skipped as a whole the report is one, too.
        skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in terminal.stats.get("skipped", ())]
        reasons = [f"{reason}: {count}" for reason, count in Counter(skipped).most_common()]
        if session.config.getoption("quick", False):
            reasons.insert(0, f"the longest files (scripts/test without --quick): {len(LONGEST)}")
        if reasons:
            terminal.write_line(f"Not tested: {'; '.join(reasons)}".replace("\n", " "), yellow=True)


@cache
def _has(marker: str) -> bool:
    if marker == "root":
        return os.geteuid() == 0
    try:
        for descriptor in os.openpty():
            os.close(descriptor)
    except OSError:
        return False
    return True
