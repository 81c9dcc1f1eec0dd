"""Signals go to the one process that is meant, and what became of it is said and not raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from guarded import SOMEBODY, a_child

from gpuguard.enforcement import signals


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_the_process_behind_the_pidfd(child):
    pidfd = os.pidfd_open(child.pid)

    assert signals.forward(pidfd, signal.SIGUSR1) == "sent"
    assert child.wait() == -signal.SIGUSR1
    os.close(pidfd)


def test_a_process_that_has_ended_is_gone_and_no_error(child):
    pidfd = os.pidfd_open(child.pid)
    child.kill()
    child.wait()

    assert signals.forward(pidfd, signal.SIGTERM) == "gone"
    os.close(pidfd)


@pytest.mark.root
def test_a_process_of_another_user_is_not_permitted_and_no_error():
    with a_child(uid=SOMEBODY) as his:
        pidfd = os.pidfd_open(his.pid)
        os.seteuid(SOMEBODY + 1)  # takes the capabilities of root away until it is root's again
        try:
            assert signals.forward(pidfd, signal.SIGTERM) == "not permitted"
        finally:
            os.seteuid(0)
            os.close(pidfd)
        assert his.poll() is None


@pytest.mark.parametrize("blocked", ["()", "(2,)"])
def test_dying_of_a_signal_is_seen_by_the_parent_even_when_it_was_blocked(blocked):
    dying = f"signal.pthread_sigmask(0, {blocked}); signals.die_of(2)"
    script = f"import signal; from gpuguard.enforcement import signals; {dying}"

    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGINT


@pytest.mark.parametrize("before", ["SIG_IGN", "default_int_handler"])
def test_dying_of_a_signal_heeds_no_handler(before):
    script = (
        f"import signal; from gpuguard.enforcement import signals; signal.signal(2, signal.{before}); signals.die_of(2)"
    )

    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGINT


def test_of_a_signal_that_ends_nobody_one_dies_by_the_code_of_shells():
    script = f"from gpuguard.enforcement import signals; signals.die_of({int(signal.SIGWINCH)})"

    assert subprocess.run([sys.executable, "-c", script]).returncode == 128 + signal.SIGWINCH


def test_whoever_stops_himself_stops_until_somebody_continues_him():
    with subprocess.Popen(
        [sys.executable, "-c", "from gpuguard.enforcement import signals; signals.stop_self()"]
    ) as child:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

        child.send_signal(signal.SIGCONT)
        assert child.wait() == 0
