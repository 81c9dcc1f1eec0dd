"""A daemon on a machine that has no process, no descriptor or no room on a disk left for a moment."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest
from nodes import start

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon import server, service
from gpuguard.daemon.service import Daemon, Settings, notify_systemd
from gpuguard.errors import GpuguardError

POLICY = "{version: 1, policies: [{name: small, when: {memory: {above: 1GiB}}, for: 1m, steps: [log]}]}"


def test_a_file_that_cannot_be_read_now_is_complained_of_once_and_read_later(tmp_path, monkeypatch):
    """A guard that was started while LDAP was down, or no process to be had, observed until somebody noticed."""

    def full(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    said, events, path = [], [], tmp_path / "policy.yaml"
    path.write_text(POLICY)
    where = start(str(tmp_path / "node")), lock_directory(str(tmp_path))
    guard = Daemon(*where, Settings(str(path)), said.append, events.append, lambda event: True)
    with monkeypatch.context() as crowded:
        crowded.setattr(os, "posix_spawn", full)
        guard._reload_if_changed(asked=False)
        monkeypatch.setattr(service, "AGAIN_SECONDS", 0.0)
        guard._reload_if_changed(asked=False)
    assert len(said) == 1
    guard._reload_if_changed(asked=False)

    assert [event.outcome for event in events] == ["refused", "in force"]


def test_a_sign_of_life_for_which_no_descriptor_is_left_ends_nobody(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", full)
    notify_systemd("WATCHDOG=1", {"NOTIFY_SOCKET": str(tmp_path / "manager")})


@pytest.mark.parametrize("keeper", [None, 0])
def test_a_daemon_that_can_make_no_door_ends_where_it_gives_the_locks(tmp_path, monkeypatch, keeper):
    """With /run full for a moment it went on without one, and nobody could claim anything until somebody noticed."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server, "SocketServer", full)
    directory, told = replace(lock_directory(str(tmp_path)), keeper=keeper), list[str]()
    guard = Daemon(start(str(tmp_path / "node")), directory, Settings(), told.append, print, lambda event: True)
    if keeper is None:
        assert guard._open_door() is None and "`gpuguard keep` does not work" in told[0]
        return

    with pytest.raises(GpuguardError, match="nobody can claim"):
        guard._open_door()
