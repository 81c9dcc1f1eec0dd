"""The files of restrictions: whole whenever a writer dies, and nothing where somebody else could have written them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chances import luck
from guarded import SOMEBODY

from gpuguard.claims import restrictions
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.restrictions import DENIED, KEPT, QUARANTINED, Restriction, change, read_restrictions
from gpuguard.errors import LockDirectoryError

root = pytest.mark.root
NOW = 1_800_000_000.0


def restrict(directory, kind, name, **fields):
    """Write a restriction of *name*."""
    restriction = Restriction(name, **{"since": time.time(), "reason": "a good reason", **fields})
    change(directory, kind, lambda restrictions: restrictions.update({name: restriction}))


def test_restrictions_come_back_as_they_were_written(directory):
    written = Restriction("1001", NOW, NOW + 60, 'x"\u4f60\n', "the policy p", "bob")
    restrict(directory, DENIED, "7", until=None)
    change(directory, DENIED, lambda found: found.update({"1001": replace(written, until=time.time() + 60)}))

    found = read_restrictions(directory, DENIED, time.time())

    assert replace(found["1001"], until=written.until) == written
    assert found["7"].until is None


def test_without_a_descriptor_left_no_restriction_is_overlooked_and_none_is_lost(directory, monkeypatch):
    restrict(directory, QUARANTINED, "GPU-1")
    really, file = os.open, str(Path(directory.path, "quarantined.json"))

    def full(path: str, *words: Any) -> int:
        if path == file:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return really(path, *words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        with pytest.raises(OSError, match="Too many open files in system"):
            read_restrictions(directory, QUARANTINED, NOW)
        with pytest.raises(LockDirectoryError, match="Too many open files in system"):
            restrict(directory, QUARANTINED, "GPU-2")

    assert read_restrictions(directory, QUARANTINED, NOW).keys() == {"GPU-1"}


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_setting_the_clock_makes_no_restriction_shorter_or_longer(directory, monkeypatch, step):
    now, real = time.time(), time.time
    restrict(directory, KEPT, "1001", since=now, until=now + 3600)
    restrict(directory, DENIED, "1002", since=now)

    monkeypatch.setattr(time, "time", lambda: real() + step)
    restrict(directory, KEPT, "1003", until=time.time() + 60)  # the file is written anew
    until = read_restrictions(directory, KEPT, time.time())["1001"].until

    assert until and 3590 < until - time.time() <= 3600
    assert read_restrictions(directory, DENIED, time.time())["1002"].since == pytest.approx(now + step, abs=5)


def test_of_another_boot_only_the_time_of_day_is_known(directory, monkeypatch):
    restrict(directory, KEPT, "1001", until=NOW)

    monkeypatch.setattr(restrictions, "boot_id", lambda: "another")
    monkeypatch.setattr(restrictions, "_booted", lambda: 0.0)

    assert read_restrictions(directory, KEPT, NOW - 1)["1001"].until == NOW


def test_a_restriction_ends_by_itself(directory):
    restrict(directory, QUARANTINED, "GPU-1", until=NOW)

    assert read_restrictions(directory, QUARANTINED, NOW - 1).keys() == {"GPU-1"}
    assert read_restrictions(directory, QUARANTINED, NOW) == {}


def test_everybody_can_read_the_file_whatever_the_umask_and_without_restrictions_there_is_none(directory):
    file, before = Path(directory.path, "quarantined.json"), os.umask(0o077)
    try:
        restrict(directory, QUARANTINED, "GPU-1")
    finally:
        os.umask(before)

    assert file.stat().st_mode & 0o777 == 0o644
    change(directory, QUARANTINED, dict.clear)
    assert not file.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[" * 100_000, b"null", b"\xff\xfe", b'{"marks": 1}', b'{"marks": [1]}',
        b'{"marks": [{"name": "GPU-1"}]}', b'{"marks": [{"name": "GPU-1", "since_unix_seconds": "x"}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_stops_nobody(directory, content):
    Path(directory.path, "quarantined.json").write_bytes(content)

    assert read_restrictions(directory, QUARANTINED, NOW) == {}


def forged(path: Path, how: str) -> None:
    if how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "writable":
        path.chmod(0o646)
    elif how == "foreign":
        os.chown(path, SOMEBODY, SOMEBODY)
    else:
        path.unlink()
        {"fifo": os.mkfifo, "directory": os.mkdir}[how](path, 0o644)


@pytest.mark.parametrize("how", ["link", "fifo", "directory", "writable", pytest.param("foreign", marks=root)])
def test_a_forged_file_counts_for_nothing(directory, how):
    restrict(directory, QUARANTINED, "GPU-1")
    forged(Path(directory.path, "quarantined.json"), how)

    assert read_restrictions(directory, QUARANTINED, time.time()) == {}


def test_where_anybody_may_make_files_there_are_no_restrictions(tmp_path):
    flat = LockDirectory(str(tmp_path), str(tmp_path), str(tmp_path), prefix="gpuguard.")
    restrict(lock_directory(str(tmp_path / "own")), QUARANTINED, "GPU-1")
    shutil.copy(tmp_path / "own" / "quarantined.json", tmp_path)

    assert read_restrictions(flat, QUARANTINED, time.time()) == {}
    with pytest.raises(LockDirectoryError, match="sudo gpuguard setup"):
        restrict(flat, QUARANTINED, "GPU-1")


WRITER = """
import sys, time
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.restrictions import Restriction, change
directory = lock_directory(sys.argv[1])
print("ready", flush=True)
while True:
    for number in range(1, 100):
        restriction = Restriction(f"GPU-{number}", time.time(), None, "x" * 200)
        change(directory, "quarantined", lambda others: others.update({restriction.name: restriction}))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_restrictions(directory):
    dice = luck(1)
    restrict(directory, QUARANTINED, "GPU-0")
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, directory.path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout and writer.stdout.readline()
            deadline = time.monotonic() + dice.uniform(0.0, 0.08)
            seen = []
            while time.monotonic() < deadline:
                seen.append("GPU-0" in read_restrictions(directory, QUARANTINED, time.time()))
            writer.send_signal(signal.SIGKILL)

        before = read_restrictions(directory, QUARANTINED, time.time())
        restrict(directory, QUARANTINED, "GPU-last")  # and the next writer is not held up

        assert all(seen) and "GPU-0" in before
        assert read_restrictions(directory, QUARANTINED, time.time()).keys() == before.keys() | {"GPU-last"}


def test_two_writers_lose_nothing(directory):
    code = WRITER.replace("while True:", "for _ in [1]:").replace('f"GPU-{number}"', 'f"{sys.argv[2]}-{number}"')
    words = [sys.executable, "-c", code, directory.path]
    writers = [subprocess.Popen([*words, name], stdout=subprocess.DEVNULL) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]

    assert len(read_restrictions(directory, QUARANTINED, time.time())) == 198


def test_a_writer_that_gets_one_of_two_locks_alone_keeps_neither(directory):
    """With a full disk under the daemon's files a daemon of root's kept the first, and no restriction changed again."""
    os.mkdir(f"{directory.path}/daemon", 0o755)
    os.mkdir(f"{directory.path}/daemon/marks.lock")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LockDirectoryError, match="Is a directory"):
        restrict(directory, DENIED, "1001")

    assert os.listdir("/proc/self/fd") == before
    os.rmdir(f"{directory.path}/daemon/marks.lock")
    restrict(directory, DENIED, "1001")
    assert read_restrictions(directory, DENIED, time.time()).keys() == {"1001"}


def test_a_longer_restriction_is_not_shortened_by_a_policy():
    longer = Restriction("1", NOW, NOW + 100)
    found = {"1": longer}
    restrictions.extend(found, Restriction("1", NOW, NOW + 50))
    restrictions.extend(found, Restriction("2", NOW, NOW + 50, "x" * 999))

    assert (found["1"], len(found["2"].reason)) == (longer, restrictions.MAX_REASON)
