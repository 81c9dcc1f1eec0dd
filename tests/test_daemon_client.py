"""What the daemon says over its socket, and how long it is waited for: the daemon is the test's."""

import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuguard.claims import daemon_client as client
from gpuguard.claims.daemon_client import (
    DaemonBusy,
    EventRow,
    EventsReply,
    NoDaemonSocket,
    decoded,
    own_events,
    query_daemon,
)
from gpuguard.errors import GpuguardError
from gpuguard.locale import translated
from gpuguard.locale.messages import sentence
from gpuguard.notify.templates import deed_text

ROW = EventRow(5.0, "warn", "logged", {"policy": "p", "uid": 7}, "al", ("gpu0",), 17, "c1", "idle for 20s")
LINE = {
    "schema": 1,
    "time_unix_seconds": 5.0,
    "kind": "warn",
    "outcome": "logged",
    "facts": {"policy": "p", "uid": 7},
    "user": "al",
    "devices": ("gpu0",),
    "pid": 17,
    "claim": "c1",
    "message": "idle for 20s",
}


@pytest.mark.parametrize(
    ("kind", "outcome", "older", "text"),
    [
        ("warn", "logged", "failed", "idle for 20s: logged"),
        ("warn", "undelivered", "failed", "idle for 20s"),
        ("resume", "done", "about to", "idle for 20s"),
        ("warn", "done", "done", "idle for 20s"),
        ("kill", "logged", "logged", "idle for 20s"),
    ],
)
def test_an_event_is_told_in_words_that_older_jobs_know_and_comes_back_as_it_was(kind, outcome, older, text):
    row = replace(ROW, kind=kind, outcome=outcome)
    told = row.for_older_jobs()

    assert (told.outcome, translated(told.message)) == (older, text)
    assert replace(told, outcome=outcome, message=ROW.message, exact_outcome=None) == row
    assert told.line() == {**LINE, "kind": kind, "outcome": outcome}


def test_a_message_that_came_as_text_loses_what_older_jobs_needed():
    told = replace(ROW, outcome="failed", message="idle for 20s: logged", exact_outcome="logged")
    assert told.line() == LINE
    assert replace(told, message=None).line() == {**LINE, "message": None}
    because = sentence("because", "{what}: {why}", what="x", why="y")
    undelivered = replace(ROW, outcome="failed", message=because, exact_outcome="undelivered")
    assert undelivered.line() == {**LINE, "outcome": "undelivered", "message": "x: y"}
    assert deed_text(undelivered.line()) == "warning of policy p: x", "why no terminal shows it is not said"


def test_events_are_asked_for_only_if_there_is_something_new(directory, monkeypatch):
    asked = []
    last: list[float | None] = [None]
    reply = EventsReply((replace(ROW, time_unix_seconds=4.9), ROW))

    def query(*words: Any) -> EventsReply:
        asked.append(words)
        return reply

    monkeypatch.setattr(client, "query_daemon", query)
    monkeypatch.setattr(client, "last_about", lambda *words: last[0] if words == (directory, os.geteuid()) else None)
    assert own_events(directory, 5.0) == [] == asked
    last[0] = 5.0 - client.CLOCK_TICK * 1.01
    assert own_events(directory, 5.0) == [] == asked
    last[0] = 5.0 - client.CLOCK_TICK
    assert own_events(directory, 5.0, 3.0) == [LINE]
    assert asked == [(directory, {"do": "events"}, EventsReply, 3.0)]


def test_a_daemon_that_is_busy_is_asked_again_until_the_time_is_over(directory, monkeypatch):
    clock, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += 1.0

    def busy(*_: Any) -> Any:
        raise DaemonBusy("busy")

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(client, "last_about", lambda *_: 9.0)
    monkeypatch.setattr(client, "query_daemon", busy)
    with pytest.raises(DaemonBusy):
        own_events(directory, 5.0)
    assert len(slept) == 2

    connection = SimpleNamespace(connect=lambda path: (_ for _ in ()).throw(BlockingIOError()))
    monkeypatch.setattr(client, "short_path", lambda directory: _Path())
    with pytest.raises(TimeoutError):
        client.connect(connection, directory, 3.0)
    assert slept[2:] == [0.01] * 3


class _Path:
    def __enter__(self) -> str:
        return "socket"

    def __exit__(self, *error: object) -> None:
        pass


def test_an_answer_of_another_version_is_an_error_with_advice():
    assert decoded({"events": []}, EventsReply) == EventsReply(())
    with pytest.raises(GpuguardError) as raised:
        decoded({"other": []}, EventsReply)

    assert str(raised.value).startswith("the daemon gave an answer that cannot be understood: ")
    assert str(raised.value).endswith(".  Restart it: it may be of another version.")


def test_a_reply_is_one_line_with_its_descriptors_however_it_comes(tmp_path):
    (tmp_path / "file").write_text("x")
    ours, theirs = socket.socketpair()
    with ours, theirs, open(tmp_path / "file") as file, open(tmp_path / "file") as other:
        socket.send_fds(theirs, [b'{"a":'], [file.fileno()])
        socket.send_fds(theirs, [b" 1}\n"], [other.fileno()])
        line, descriptors = client._receive(ours)
        assert line == b'{"a": 1}\n' and len(descriptors) == 2
        assert not any(map(os.get_inheritable, descriptors))
        client.close_all(descriptors)
        assert client.peer_uid(ours) == os.geteuid()

        theirs.sendall(b"a")
        theirs.close()
        assert client._receive(ours) == (b"a", ())


def test_a_reply_that_is_too_long_is_read_no_further(monkeypatch):
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"123456")
        assert client._receive(ours) == (b"123456", ())
        theirs.sendall(b"12345")
        theirs.close()
        assert client._receive(ours) == (b"12345", ())


def test_without_a_daemon_it_is_said_where_one_was_looked_for(directory):
    with pytest.raises(NoDaemonSocket) as raised:
        query_daemon(directory, {"do": "events"}, EventsReply)

    assert str(raised.value).startswith(f"no daemon answers in {directory.path} (No such file or directory).  ")
    assert Path(directory.path).is_dir()
