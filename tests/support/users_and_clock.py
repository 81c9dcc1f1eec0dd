"""Several users and a clock for tests in one process, on real files and real locks.

The file system itself says whose a file is and when it was made: nobody can pretend that.  Here a test can, so that it
needs neither root nor hours.  A file belongs to whoever *user* was when it was made; only he and root can remove it.

with Pretended(clock=1e9) as world:
    world.user = 1001
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

_fstat, _lstat, _open, _utime, _mkfifo, _unlink = os.fstat, os.lstat, os.open, os.utime, os.mkfifo, os.unlink


class Pretended(ExitStack):
    """Who acts, and when, until the block ends."""

    def __init__(self, clock: float, user: int = 0) -> None:
        super().__init__()
        self.clock, self.user = clock, user
        self._made: dict[tuple[int, int], tuple[int, float]] = {}  # (device, inode) -> its owner, its last change

    def __enter__(self) -> Pretended:
        # All that hold locks are one process here, and /proc says whose that is.
        self.enter_context(mock.patch("gpuguard.claims.records.holders_of", lambda *_, **_how: {}))
        self.enter_context(mock.patch("time.time", lambda: self.clock))
        self.enter_context(
            mock.patch.multiple(
                os,
                geteuid=lambda: self.user,
                fstat=lambda descriptor: self._seen(_fstat(descriptor)),
                lstat=lambda path, **more: self._seen(_lstat(path, **more)),
                open=self._open,
                utime=self._utime,
                mkfifo=self._mkfifo,
                unlink=self._unlink,
            )
        )
        return self

    def _seen(self, real: os.stat_result) -> os.stat_result:
        found = self._made.get((real.st_dev, real.st_ino))
        if found is None:
            return real
        uid, changed = found
        times = {"st_atime": changed, "st_mtime": changed, "st_ctime": changed}
        return os.stat_result((*real[:4], uid, *real[5:7], *[int(changed)] * 3), times)

    def _changed(self, real: os.stat_result, uid: int) -> None:
        self._made[real.st_dev, real.st_ino] = uid, self.clock

    def _open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        new = flags & os.O_CREAT and not os.path.lexists(path)
        descriptor = _open(path, flags, mode, **more)
        if new:
            self._changed(_fstat(descriptor), self.user)
        return descriptor

    def _mkfifo(self, path: Any, mode: int = 0o666) -> None:
        _mkfifo(path, mode)
        self._changed(_lstat(path), self.user)

    def _utime(self, path: Any, **more: Any) -> None:
        _utime(path, **more)
        real = os.fstat(path) if isinstance(path, int) else os.lstat(path)
        self._changed(real, real.st_uid)

    def _unlink(self, path: Any, **more: Any) -> None:
        if self.user not in (0, os.lstat(path).st_uid):
            raise PermissionError(1, "Operation not permitted", path)
        _unlink(path, **more)
