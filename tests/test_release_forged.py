"""Records that say nonsense of what their claims hold: what is released is what the kernel says, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from claimholders import Holder, a_holder
from test_releasing import BY_ROOT, GPUS, free

from gpuguard.claims import release as releasing
from gpuguard.claims.records import record_path
from gpuguard.claims.release import let_go, lock_handle
from gpuguard.errors import ClaimError
from gpuguard.model import ClaimRecord


def rewritten(holder: Holder, descriptors: object) -> ClaimRecord | None:
    """Its record, which lists these descriptors from now on."""
    path = Path(record_path(holder.directory, holder.uid, holder.id))
    content = path.read_text()
    path.write_text(content[: content.index('"descriptors"')] + f'"descriptors": {json.dumps(descriptors)}}}')
    return holder.record()


@pytest.mark.parametrize("descriptors", [[], [0], [2**19], [-1], ["3"], None, "3", [True], {}, 7, list(range(500))])
def test_whatever_a_record_says_of_descriptors_its_claim_is_released_and_no_other_one(directory, descriptors):
    """Who wrote nonsense there, or nothing, kept his devices for ever, whatever a policy says."""
    with a_holder(directory, GPUS[0]) as holder, a_holder(directory, GPUS[1], name="other"):
        with lock_handle(directory, rewritten(holder, descriptors)) as grip:
            let_go(grip, BY_ROOT)

        assert free(directory) == [GPUS[0], *GPUS[2:]]
        assert holder.does("claim.reassert()").startswith("ClaimLost")


def test_two_who_release_the_claims_of_one_user_at_once_do_not_take_each_other_for_silent(directory, monkeypatch):
    real, both = releasing._is_lock, threading.Barrier(2)
    monkeypatch.setattr(releasing, "_is_lock", lambda *some: both.wait(10) >= 0 and real(*some))
    with a_holder(directory, GPUS[0]) as one, a_holder(directory, GPUS[1], name="other") as two:
        found: list[object] = []

        def release(holder: Holder) -> None:
            with lock_handle(directory, holder.record()) as grip:
                found.append(let_go(grip, BY_ROOT))

        threads = [threading.Thread(target=release, args=(each,)) for each in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert (found, free(directory)) == ([None, None], list(GPUS))


def test_a_record_that_lists_any_number_of_files_fills_nobodys_table_of_open_files(directory, monkeypatch):
    seen, real = [], releasing._is_lock

    def is_lock(*each: Any) -> bool:
        seen.append(len(os.listdir("/proc/self/fd")))
        return real(*each)

    monkeypatch.setattr(releasing, "_is_lock", is_lock)
    with a_holder(directory, GPUS[0]) as holder, ExitStack() as stack:
        holder.does("globals().update(files=[os.open('/dev/null', os.O_RDONLY) for _ in range(100)])")
        for _ in range(3):
            fork = int(holder.does("os.fork() or __import__('time').sleep(60)"))
            stack.callback(os.kill, fork, signal.SIGKILL)
        before = len(os.listdir("/proc/self/fd"))
        with suppress(ClaimError), lock_handle(directory, rewritten(holder, list(range(100)))):
            pass

    assert len(seen) > 100 and max(seen) < before + 10
