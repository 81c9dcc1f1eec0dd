"""What /proc says of a process to a guard that may look into processes, but not open every file of the machine."""

from __future__ import annotations

import os

import pytest

from gpuguard.guards import identity
from gpuguard.guards.terminals import write

MAPPED = "7f0-7f1 rw-s 00000000 00:06 451                              /dev/nvidiactl\n"
OTHERS = "7f0-7f1 r-xp 00000000 fe:00 1 /home/alice/dev/nvidiactl.py\n7f0-7f1 rw-p 00000000 00:00 0 [heap]\n"


def refused(*_: object) -> list[str]:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("maps", "uses"),
    [(OTHERS + MAPPED, True), (MAPPED.replace("ctl", "-uvm"), True), (OTHERS, None), ("", None), (None, None)],
)
def test_where_its_files_cannot_be_seen_its_mappings_say_that_it_uses_the_driver(monkeypatch, maps, uses):
    monkeypatch.setattr(identity, "DRIVER_FILE", "/dev/null")
    monkeypatch.setattr(identity.os, "listdir", refused)
    monkeypatch.setattr(identity, "_read", lambda path: maps)

    assert identity._has_open(os.getpid(), "/dev/null") is uses, "what cannot be seen is not known, never False"


def test_where_its_files_can_be_seen_they_decide():
    with open("/dev/null", "rb"):
        assert identity._has_open(os.getpid(), "/dev/null") is True
    assert identity._has_open(os.getpid(), "/dev/full") is False


@pytest.mark.parametrize("files", [(), ("0",)])
def test_who_lets_another_thread_than_the_first_open_the_driver_uses_it_no_less(monkeypatch, files):
    """A thread can have files of its own, and the first one may have ended: then /proc/PID shows neither."""
    monkeypatch.setattr(identity.os, "listdir", lambda path: files if path.endswith("/fd") else ["17", "18"])
    monkeypatch.setattr(identity, "_read", lambda path: OTHERS + MAPPED if path == "/proc/17/task/18/maps" else "")

    assert identity._has_open(17, "/dev/full") is True


def test_a_program_on_a_file_system_that_tells_root_nothing_is_known_by_its_path(monkeypatch):
    """One of FUSE, say: whose process spared him was out of every policy's reach."""
    stat = os.stat

    def closed(path, **more):
        return refused() if str(path).endswith("/exe") else stat(path, **more)

    path = identity.facts_of(os.getpid()).executable
    monkeypatch.setattr(identity.os, "stat", closed)

    facts = identity.facts_of(os.getpid())
    assert (facts.executable, facts.executable_owner) == (path, None)
    assert not identity.runs_one_of(facts, (path,)), "a path is nothing that protects: anybody can mount there"


@pytest.mark.terminal
def test_a_terminal_that_may_not_be_opened_takes_no_messages(monkeypatch):
    ours, theirs = os.openpty()
    number, uid = os.fstat(theirs).st_rdev, os.fstat(theirs).st_uid
    monkeypatch.setattr(os, "open", refused)

    assert write(number, uid, "hello", last=True) == "the terminal takes no messages"
    os.close(ours)
    os.close(theirs)
