"""Signals go to the one process that is meant, and what became of it is said and not raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpuguard import actions


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_the_process_behind_the_pidfd(child):
    pidfd = os.pidfd_open(child.pid)

    assert actions.forward(pidfd, signal.SIGUSR1) == "sent"
    assert child.wait() == -signal.SIGUSR1
    os.close(pidfd)


def test_a_process_that_has_ended_is_gone_and_no_error(child):
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    child.wait()

    assert actions.forward(pidfd, signal.SIGTERM) == "gone"
    os.close(pidfd)


@pytest.mark.root
def test_a_process_of_another_user_is_not_permitted_and_no_error(child):
    script = (
        "import os, sys; from gpuguard import actions; fd = os.pidfd_open(int(sys.argv[1]));"
        "os.setuid(65534); print(actions.forward(fd, 15))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(child.pid)], stdout=subprocess.PIPE, text=True, check=True)

    assert done.stdout == "not permitted\n"
    assert child.poll() is None


@pytest.mark.parametrize("blocked", ["()", "(2,)"])
def test_dying_of_a_signal_is_seen_by_the_parent_even_when_it_was_blocked(blocked):
    script = f"import signal; from gpuguard import actions; signal.pthread_sigmask(0, {blocked}); actions.die_of(2)"

    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGINT
