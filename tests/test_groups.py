"""The groups of users, of which a directory service tells: asked without waiting for it, and again while it is away."""

from __future__ import annotations

import pwd
import threading

import pytest
from builders import a_device, a_process, a_snapshot

from gpuguard import host as hostuse
from gpuguard.host import GROUPS_SECONDS, HostUses
from gpuguard.model import Snapshot

ME = pwd.getpwuid(0)


def at(clock: float, *uids: int) -> Snapshot:
    processes = tuple(a_process(100 + uid, uid=uid) for uid in uids)
    return a_snapshot(a_device(0, processes=processes), clock=clock)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A directory service that is away: who was asked for."""
    asked: list[int] = []

    def unknown(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    return asked


def test_who_had_no_groups_while_the_service_was_away_has_them_later(away, monkeypatch):
    """Until the daemon ended he was protected by each group, and no policy for one of his ever meant him."""
    host = HostUses()
    assert host.groups(at(0, 0)) == {}
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: ME)

    assert host.groups(at(10, 0)) == {}
    assert "root" in host.groups(at(GROUPS_SECONDS + 1, 0))[0]


def test_of_many_who_are_unknown_one_a_look_is_asked_for_again(away):
    host, uids = HostUses(), (1001, 1002, 1003)
    host.groups(at(0, *uids))
    for _ in range(2):
        host.groups(at(GROUPS_SECONDS + 1, *uids))

    assert (sorted(away[:3]), len(away)) == ([*uids], 5)


def test_while_no_thread_can_be_started_the_look_goes_on_and_groups_are_asked_for_later(monkeypatch):
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    host = HostUses()
    with monkeypatch.context() as crowded:
        crowded.setattr(hostuse.threading.Thread, "start", full)
        assert host.groups(at(0, 0)) == {}

    assert "root" in host.groups(at(10, 0))[0]
