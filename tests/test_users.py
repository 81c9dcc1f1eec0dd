"""The names of users: a directory service that hangs costs a second once, and never a name its meaning."""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Iterator

import pytest

from gpuguard import users


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(users, "_names", {})
    monkeypatch.setattr(users, "_silent", [])
    yield


def test_a_user_has_a_name_and_a_stranger_a_number() -> None:
    assert users.user_name(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name
    assert users.user_name(4_000_000_123) == "4000000123"


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    entry = pwd.getpwuid(0)

    def answer(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return entry

    monkeypatch.setattr(pwd, "getpwuid", answer)
    names = [users.user_name(7) for _ in range(3)]

    assert (names, asked) == (["root"] * 3, [7])


def test_a_directory_service_that_hangs_is_asked_once_and_then_numbers_have_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    hanging = threading.Event()

    def hang(uid: int) -> None:
        asked.append(uid)
        hanging.wait()
        raise KeyError

    monkeypatch.setattr(users, "SECONDS", 0.05)
    monkeypatch.setattr(pwd, "getpwuid", hang)
    names = [users.user_name(uid) for uid in (1001, 1002, 1003)]
    hanging.set()

    assert names == ["1001", "1002", "1003"]
    assert asked == [1001]
