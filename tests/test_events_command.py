"""`gpuguard events`: the audit log, filtered, harmless on a terminal, and honest about what it could not read."""

from __future__ import annotations

import json
import os
import pwd
import threading
import time
from pathlib import Path

import pytest
from commands import Gpuguard
from nodes import eventually
from test_who import DOCUMENT, documented, printed

from gpuguard.cli import events as command
from gpuguard.cli import run_command_line
from gpuguard.history import audit_log
from gpuguard.model import Event

NOW = time.time()


def event(outcome="sent", ago=10.0, **fields):
    return Event(time=NOW - ago, kind=fields.pop("kind", "terminate"), outcome=outcome, **fields)


@pytest.fixture
def log(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(command, "MACHINE_EVENTS", str(tmp_path / "machine.jsonl"))
    return tmp_path / "events.jsonl"


@pytest.fixture
def shown(log, capsys):
    """The outcomes that `gpuguard events --json OPTIONS` prints."""

    def look(*options):
        assert run_command_line(["events", "--json", *options]) == 0
        return [one["outcome"] for one in json.loads(capsys.readouterr().out)["events"]]

    return look


def test_events_of_both_logs_come_in_order_of_time(shown, log, monkeypatch):
    audit_log.append(event("third", ago=1))
    audit_log.append(event("first", ago=3))
    monkeypatch.setenv("GPUGUARD_EVENTS", command.MACHINE_EVENTS)
    audit_log.append(event("second", ago=2))
    monkeypatch.setenv("GPUGUARD_EVENTS", str(log))

    assert shown() == ["first", "second", "third"]


def test_whose_job_it_was_the_uid_says_and_not_the_environment_of_the_job(shown, log):
    facts, nobody_here = (("uid", 1),), (("uid", 4_242_424),)
    audit_log.append(event("somebody else's name", user="root", facts=facts))
    audit_log.append(event("no name", facts=facts))
    audit_log.append(event("of another machine", user="ada", facts=nobody_here))

    assert shown("--user", pwd.getpwuid(1).pw_name) == ["somebody else's name", "no name"]
    assert shown("--user", "ada") == ["of another machine"]


def test_a_rotated_log_is_read_too(shown, log):
    audit_log.append(event("old", ago=9))
    log.rename(f"{log}.1")
    audit_log.append(event("new", ago=1))

    assert shown() == ["old", "new"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--user", "alice"], ["a"]),
        (["--user", "alice", "--user", "bob"], ["a", "b"]),
        (["--device", "GPU-1"], ["a"]),
        (["--device", "GPU-"], ["a", "b"]),
        (["--policy", "hogs"], ["b"]),
        (["--since", "1h"], ["b"]),
        (["--since", "1h", "--user", "alice"], []),
        ([], ["a", "b", "c"]),
    ],
)
def test_filters(shown, options, left):
    audit_log.append(event("a", ago=7200, user="alice", devices=("GPU-1",)))
    audit_log.append(event("b", ago=60, user="bob", devices=("GPU-2",), facts=(("policy", "hogs"),)))
    audit_log.append(event("c", ago=4000, user=None))

    assert sorted(shown(*options)) == left


def test_torn_lines_are_left_out_and_counted(log, capsys):
    audit_log.append(event("whole"))
    with log.open("ab") as file:
        file.write(b'{"schema": 1, "time_unix\n\xff\xfe\n[1]\n' + b"[" * 4000 + b'\n{"schema": 1}\n')
    run_command_line(["events"])
    out, err = capsys.readouterr()

    assert len(out.splitlines()) == 1
    assert "5 lines" in err


def test_what_users_wrote_cannot_reach_the_terminal(log, capsys):
    audit_log.append(event("sent", user="eve\x1b[2J", message="line\nforged \u202e", facts=(("policy", "x\x07"),)))
    run_command_line(["events"])
    out = capsys.readouterr().out

    assert len(out.splitlines()) == 1
    assert out.strip("\n").isprintable()
    assert "eve\\x1b[2J" in out


def test_facts_are_in_words_for_people_and_exact_for_programs(log, capsys):
    facts = {"wall_time_seconds": 7380.25, "peak_memory_bytes": 10738466816, "energy_joules": 979.0249999999999}
    audit_log.append(event(facts=tuple({**facts, "until_unix_seconds": NOW, "mean_utilization_percent": 90.0}.items())))
    run_command_line(["events"])
    now = time.strftime("%m-%d %H:%M:%S", time.localtime(NOW))
    words = f"wall_time=2h3m, peak_memory=10.0GiB, energy_joules=979.025, until={now}, mean_utilization=90%"

    assert f"({words})" in capsys.readouterr().out
    run_command_line(["events", "--json"])
    assert json.loads(capsys.readouterr().out)["events"][0]["facts"].items() >= facts.items()


def test_without_any_event_it_is_said_where_none_is(log, capsys):
    assert run_command_line(["events"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"gpuguard: no such events in {log} or {command.MACHINE_EVENTS}.\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [(["--user", "no-body"], 2, "there is no user 'no-body'"), (["--device", "3"], 0, "devices by uuid, not by index")],
)
def test_what_no_event_can_be_about_is_said(log, capsys, words, status, said):
    assert run_command_line(["events", *words]) == status
    assert said in capsys.readouterr().err


def test_a_log_that_may_not_be_read_is_named_once_and_as_it_is_called(log, monkeypatch, capsys):
    """It was named with .1 behind it, a file that need not exist."""
    real = os.open

    def refusing(path, *rest, **more):
        if str(path).startswith(command.MACHINE_EVENTS):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(command.os, "open", refusing)
    assert run_command_line(["events"]) == 0
    said = f"gpuguard: {command.MACHINE_EVENTS} is not readable for you: its events are left out.\n"
    said += f"gpuguard: no such events in {log}.\n"

    assert capsys.readouterr() == ("", said)


def test_a_log_that_was_named_must_be_there(log, capsys):
    assert run_command_line(["events", "--file", str(log)]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--since", "2"], ["--since", "soon"], ["--device", ""]])
def test_a_wrong_option_is_a_usage_error(log, words):
    assert run_command_line(["events", *words]) == 2


def test_following_shows_what_comes_through_a_rotation_too(log, tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    audit_log.append(event("before"))
    follower = gpuguard.start("events", "--follow", "--json", "--file", str(log))
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(follower.stdout.readline, "")), daemon=True)
    reader.start()
    try:
        assert eventually(lambda: len(lines) == 1, 20)
        audit_log.append(event("during"))
        assert eventually(lambda: len(lines) == 2)
        os.rename(log, f"{log}.1")
        audit_log.append(event("after"))
        assert eventually(lambda: len(lines) == 3)
    finally:
        follower.terminate()
        follower.communicate()

    assert [json.loads(line)["outcome"] for line in lines] == ["before", "during", "after"]


def test_the_document_describes_exactly_what_is_printed(log, capsys):
    audit_log.append(
        event("sent", user="u", devices=("GPU-1",), pid=1, claim="c", message="m", facts=(("policy", "p"),))
    )
    run_command_line(["events", "--json"])
    content = json.loads(capsys.readouterr().out)
    found = printed("events", content)
    del found["events.events[].facts"]

    assert documented("events", DOCUMENT.read_text(encoding="utf-8")) == found
