"""SHA-256 without OpenSSL, which hashlib loads: 1 MiB in every daemon, for a few sums of short texts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module

from gpuguard.hints import Any


def sha256(content: bytes) -> str:
    """The sum of *content* in hexadecimal digits."""
    return str(_constructor()(content).hexdigest())


@cache  # a guard makes a sum per process and look, and seeking a module that is not there takes 0.14 ms each time
def _constructor() -> Callable[[bytes], Any]:
    for source in ("_sha2", "_sha256"):  # since Python 3.12, and before: the random module has its sums from there, too
        with suppress(ImportError):
            return import_module(source).sha256  # type: ignore[no-any-return]
    import hashlib

    return hashlib.sha256
