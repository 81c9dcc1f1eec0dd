"""Files of /proc that stay open: they say what a file that is opened now says, and nothing of who came later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuguard import procfs
from gpuguard.procfs import Life, StatFiles, life_in, life_of


@pytest.fixture
def files() -> Iterator[StatFiles]:
    files = StatFiles()
    yield files
    files.close()


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield children
    for child in children:
        child.kill()
        child.wait()


def opened() -> list[str]:
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    # Not /proc/PID/status: a test that interrupts a claim between two instructions may have left one open.
    return sorted(target for target in targets if target.endswith("/stat"))


def looked(files: StatFiles, pids: list[int], times: int = 3) -> list[Life | None]:
    for _ in range(times):
        files.turn()
        found = [files.life(pid) for pid in pids]
    return found


def test_who_looks_once_keeps_nothing_open(files: StatFiles, jobs: list[subprocess.Popen[bytes]]) -> None:
    pids = [job.pid for job in jobs]
    looked(files, pids, times=1)
    assert opened() == []

    looked(files, pids, times=1)
    assert opened() == sorted(f"/proc/{pid}/stat" for pid in pids)
    files.close()
    assert opened() == []


def test_an_open_file_says_what_one_that_is_opened_now_says(
    files: StatFiles, jobs: list[subprocess.Popen[bytes]]
) -> None:
    pids = [job.pid for job in jobs]
    assert looked(files, pids) == [life_of(pid) for pid in pids]
    assert {pid: life_in(line) for pid, line in files.lines.items()} == {pid: life_of(pid) for pid in pids}

    jobs[0].kill()
    os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
    looked(files, pids, times=1)
    assert files.lines[pids[0]].rpartition(b") ")[2][:1] == b"Z"


def test_who_has_ended_is_gone_and_the_next_one_with_his_pid_is_read_himself(
    files: StatFiles, jobs: list[subprocess.Popen[bytes]]
) -> None:
    first, second, third = (job.pid for job in jobs)
    looked(files, [first, second])
    jobs[0].kill()
    jobs[0].wait()
    assert looked(files, [first, second], times=1)[0] is None
    assert files.lines.keys() == {second}

    looked(files, [second])
    jobs[1].kill()
    jobs[1].wait()
    # The kernel gives a pid anew after 32,000 others: the file that is open for it is still that of who has ended.
    files._open[third] = files._open.pop(second)
    files._before[third] = b""
    assert files.life(third) == life_of(third)
    assert files.lines[third].startswith(b"%d " % third)


def test_whoever_is_not_looked_at_is_forgotten(files: StatFiles, jobs: list[subprocess.Popen[bytes]]) -> None:
    pids = [job.pid for job in jobs]
    looked(files, pids)
    looked(files, pids[:1], times=2)

    assert opened() == [f"/proc/{pids[0]}/stat"]
    assert files.lines.keys() == set(pids[:1])


def test_no_more_stay_open_than_there_is_room_for(
    jobs: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "MOST", 2)
    files, pids = StatFiles(), [job.pid for job in jobs]

    assert None not in looked(files, pids)
    assert len(opened()) == 2
    del files
    assert opened() == []


ANOTHER_NAME = "import ctypes; ctypes.CDLL(None).prctl(15, b'a)b S 1')"
ANOTHER_PROGRAM = "os.execvp('cat', ['cat'])"


@pytest.mark.parametrize("change", [ANOTHER_NAME, ANOTHER_PROGRAM])
def test_an_open_file_tells_another_program_and_another_name_at_once(files: StatFiles, change: str) -> None:
    script = f"import os; print(flush=True); os.read(0, 3); {change}; print(flush=True); os.read(0, 9)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as job:
        assert job.stdin and job.stdout
        job.stdout.readline()
        before, again = looked(files, [job.pid]) + looked(files, [job.pid])
        job.stdin.write(b"go\nthere\n")
        job.stdout.readline()
        (after,) = looked(files, [job.pid], times=1)
        now = life_of(job.pid)
        job.kill()

    assert before is again  # nothing has changed, so nothing was made anew
    assert before != after == now
    assert (before or ())[:1] == (after or ())[:1]
