"""What the daemon gave, looked at: a claim, or nothing of it stays open."""

from __future__ import annotations

import errno
import os
import resource

import pytest
from builders import a_device

from gpuguard.claims.directory import lock_directory, open_lock, try_flock
from gpuguard.daemon.broker_client import _locks

DEVICE = a_device(0)
GIVEN = {"claim": "3f0c9e21", "locks": [DEVICE.uuid]}


@pytest.mark.parametrize("left", [0, 1])
def test_locks_that_cannot_be_looked_at_for_want_of_a_descriptor_are_given_back_and_the_daemon_is_not_blamed(
    tmp_path, left
):
    directory = lock_directory(str(tmp_path))
    given, other = open_lock(directory, DEVICE.uuid), open_lock(directory, DEVICE.uuid)
    assert try_flock(given)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            _locks(directory, [DEVICE], GIVEN, (given,), shared=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert try_flock(other)
    os.close(other)
