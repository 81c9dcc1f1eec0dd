"""Lines on the terminal of a stranger: they reach it or not, and never do harm there or here."""

from __future__ import annotations

import os

import pytest
from guarded import until

from gpuguard.enforcement.actions import write


@pytest.mark.terminal
def test_nothing_in_a_warning_can_steer_the_terminal():
    ours, theirs = os.openpty()
    os.fchmod(theirs, 0o620)
    number = os.fstat(theirs).st_rdev

    assert write(number, os.fstat(theirs).st_uid, "a\x1b[2J\r\u202eb\nc") == "written"
    seen = os.read(ours, 4096)
    assert b"a\\x1b[2J" in seen and b"\x1b" not in seen and "\u202e".encode() not in seen
    os.close(ours)
    os.close(theirs)


@pytest.mark.terminal
def test_a_terminal_that_nobody_reads_does_not_hold_up_the_guard():
    ours, theirs = os.openpty()
    os.fchmod(theirs, 0o620)
    number, uid = os.fstat(theirs).st_rdev, os.fstat(theirs).st_uid

    until(lambda: write(number, uid, "x" * 4000) == "the terminal does not read")
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("terminal", [0, os.makedev(4, 1), os.makedev(1, 3), os.makedev(136, 250_000)])
def test_only_a_pseudo_terminal_that_exists_is_written_to(terminal):
    assert write(terminal, os.getuid(), "hello") == "no terminal"


def test_a_file_in_the_place_of_a_terminal_is_not_written_to(tmp_path):
    (tmp_path / "3").touch()

    assert write(os.makedev(136, 3), os.getuid(), "hello", place=str(tmp_path)) == "no terminal"
    assert (tmp_path / "3").read_text() == ""
