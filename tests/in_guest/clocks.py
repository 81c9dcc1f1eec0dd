"""The clock of the machine is set, for real; run by scripts/guest, and nowhere else.

What has to last for a time lasts for it by a clock that nobody can set.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Gpuguard, eventually

DAY = 86400.0
LONGEST = 300.0  # an emulated machine needs a minute and more to start a job


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def set_clock(by: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + by)


@pytest.fixture(autouse=True)
def _in_a_guest() -> Iterator[None]:
    assert "init=/init-guest" in Path("/proc/cmdline").read_text(), "this sets the clock: only for scripts/guest"
    ahead = time.time() - now()
    yield
    time.clock_settime(time.CLOCK_REALTIME, ahead + now())


@pytest.mark.parametrize("step", [DAY, -DAY])
def test_a_time_limit_lasts_as_long_as_it_says_however_the_clock_is_set(tmp_path, step):
    gpuguard = Gpuguard(tmp_path, None)
    begun = now()
    with gpuguard.start("run", "--no-wait", "--time-limit", "20s", "--", "sleep", "1000") as wrapper:
        while wrapper.poll() is None:
            set_clock(step)
            time.sleep(1.0)

    assert wrapper.returncode == 124 and 20.0 <= now() - begun < LONGEST


@pytest.mark.parametrize("step", [DAY, -DAY])
def test_who_waits_waits_as_long_as_he_said_however_the_clock_is_set(tmp_path, step):
    gpuguard = Gpuguard(tmp_path, None)
    with gpuguard.start("run", "--no-wait", "-n", "8", "--", "sleep", "1000") as holder:
        assert eventually(lambda: gpuguard("select").returncode == 1, LONGEST)
        begun = now()
        with gpuguard.start("run", "--wait", "20s", "--", "true") as waiter:
            while waiter.poll() is None:
                set_clock(step)
                time.sleep(1.0)
        assert waiter.returncode == 124 and 20.0 <= now() - begun < LONGEST
        assert gpuguard("select").returncode == 1  # and nobody lost his claim
        holder.terminate()
