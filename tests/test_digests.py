"""Sums without OpenSSL."""

from __future__ import annotations

import hashlib
import sys

import pytest

from gpuguard import digests


@pytest.mark.parametrize("missing", [(), ("_sha2", "_sha256")])
@pytest.mark.parametrize("content", [b"", b"version: 1\n", bytes(range(256)) * 999])
def test_a_sum_is_that_of_hashlib(monkeypatch: pytest.MonkeyPatch, content: bytes, missing: tuple[str, ...]) -> None:
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # as where it was not built
    digests._constructor.cache_clear()

    assert digests.sha256(content) == hashlib.sha256(content).hexdigest()
    digests._constructor.cache_clear()


def test_what_makes_sums_is_sought_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digests.sha256(b"first")
    monkeypatch.delattr(digests, "import_module")

    assert digests.sha256(b"second") == hashlib.sha256(b"second").hexdigest()
