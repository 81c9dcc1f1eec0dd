"""SHA-256 without OpenSSL, which hashlib loads: 1 MiB in every daemon, for a few sums of short texts."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module


def sha256(content: bytes) -> str:
    """The sum of *content* in hexadecimal digits."""
    for source in ("_sha2", "_sha256"):  # since Python 3.12, and before: the random module has its sums from there, too
        with suppress(ImportError):
            return str(import_module(source).sha256(content).hexdigest())
    import hashlib

    return hashlib.sha256(content).hexdigest()
