"""The audit log: whole lines for the owner alone, never a reason for a job to fail; and `gpuguard events`."""

from __future__ import annotations

import json
import os
import pwd
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from nodes import Gpuguard, eventually
from sources import module_name, modules
from test_who import DOCUMENT, documented, printed

from gpuguard.cli import events as command
from gpuguard.cli import run_command_line, web
from gpuguard.history import audit_log
from gpuguard.model import Event

AN_EVENT = Event(time=1_700_000_000.5, kind="claim", outcome="started", devices=("GPU-1",), pid=7, claim="ab")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("GPUGUARD_EVENTS", str(path))
    return path


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_becomes_one_line_whose_names_carry_units_for_its_owner_alone(log):
    assert audit_log.append(
        Event(1.5, "release", "settled", facts=(("wall_time_seconds", 3.0), ("energy_joules", None)))
    )

    assert audit_log.append(AN_EVENT)
    line, another = lines(log)
    assert set(another) == {"schema", "time_unix_seconds", "kind", "outcome", "devices", "pid", "claim"}
    assert line.pop("facts") == {"wall_time_seconds": 3.0}
    assert line == {"schema": 1, "time_unix_seconds": 1.5, "kind": "release", "outcome": "settled"}
    assert log.stat().st_mode & 0o777 == 0o600


def test_who_has_no_home_has_no_log_and_no_directory_called_tilde_where_he_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUGUARD_EVENTS", "~/.local/state/gpuguard/events.jsonl")

    assert not audit_log.append(AN_EVENT)
    assert audit_log.complaint().endswith("; set HOME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "über", "\udcff", "\u2028"])
def test_hostile_text_stays_on_its_line(log, text):
    audit_log.append(Event(1.0, "claim", "started", message=text))

    assert len(log.read_bytes().splitlines()) == 1
    assert lines(log)[0]["message"] == text


def test_the_places_are_tried_in_their_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("GPUGUARD_EVENTS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = audit_log.events_path()
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    state = audit_log.events_path()
    monkeypatch.setenv("GPUGUARD_EVENTS", "/elsewhere")

    assert [home, state, audit_log.events_path()] == [
        "/home/ada/.local/state/gpuguard/events.jsonl",
        "/state/gpuguard/events.jsonl",
        "/elsewhere",
    ]


def test_missing_folders_are_made_for_the_owner_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("GPUGUARD_EVENTS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new"))

    assert audit_log.append(AN_EVENT)
    assert (tmp_path / "new/gpuguard").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["/proc/nowhere/events", "/proc/self/mem/x", "/"])
def test_a_place_that_cannot_be_written_is_a_false_and_no_error(monkeypatch, place):
    monkeypatch.setenv("GPUGUARD_EVENTS", place)

    assert audit_log.append(AN_EVENT) is False


def test_a_full_disk_is_a_false_and_no_error(monkeypatch):
    monkeypatch.setenv("GPUGUARD_EVENTS", "/dev/full")

    assert audit_log.append(AN_EVENT) is False
    assert audit_log.complaint() == "/dev/full: No space left on device"


def test_a_fifo_in_that_place_hangs_nobody(log):
    os.mkfifo(log)

    assert audit_log.append(AN_EVENT) is False


def appended_at_once(event: Event, times: int, writers: int) -> None:
    threads = [threading.Thread(target=lambda: [audit_log.append(event) for _ in range(times)]) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_lines_of_many_writers_never_mix(log):
    appended_at_once(Event(1.0, "claim", "started", message="x" * 3000), 50, 4)

    assert [line["message"] for line in lines(log)] == ["x" * 3000] * 200


def test_a_log_that_has_grown_too_large_is_set_aside_once(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1000)
    for _ in range(30):
        assert audit_log.append(AN_EVENT)

    assert len(lines(log)) + len(lines(Path(f"{log}.1"))) >= 10
    assert log.stat().st_size < 1200
    assert sorted(path.name for path in log.parent.iterdir()) == ["events.jsonl", "events.jsonl.1"]


def test_many_writers_lose_no_line_when_the_log_is_set_aside(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 60_000)  # once, for 400 lines of some 140 bytes
    appended_at_once(AN_EVENT, 100, 5)

    assert len(lines(log)) + len(lines(Path(f"{log}.1"))) == 500


def test_a_log_that_cannot_be_set_aside_says_so_once_and_goes_on_until_it_is_four_times_as_long(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1000)
    monkeypatch.setattr(audit_log, "MAX_BYTES", 4000)
    older = Path(f"{log}.1")
    older.mkdir()  # so that nothing can be renamed to it

    written = [audit_log.append(AN_EVENT) for _ in range(40)]

    assert written == sorted(written, reverse=True) and 25 < sum(written) < 40
    assert 4000 <= log.stat().st_size < 4200
    assert [line["outcome"] for line in lines(log) if line["kind"] == "log"] == ["not set aside"]
    assert audit_log.complaint() == f"{log}: Is a directory"

    older.rmdir()

    assert audit_log.append(AN_EVENT)
    assert len(lines(older)) == sum(written) + 2


@pytest.mark.root
def test_a_log_that_root_begins_is_the_daemons(tmp_path, monkeypatch):
    own = tmp_path / "gpuguard"
    own.mkdir()
    os.chown(own, 20003, 20003)
    monkeypatch.setenv("GPUGUARD_EVENTS", str(own / "events.jsonl"))
    monkeypatch.setattr(audit_log, "MACHINE_EVENTS", str(own / "events.jsonl"))

    assert audit_log.append(AN_EVENT) and audit_log.append(AN_EVENT)
    seen = (own / "events.jsonl").stat()
    assert (seen.st_uid, seen.st_mode & 0o777, len(lines(own / "events.jsonl"))) == (20003, 0o600, 2)


@pytest.mark.root
@pytest.mark.parametrize("plant", [os.symlink, os.link])
@pytest.mark.parametrize("daemons", [False, True])
def test_no_user_makes_root_write_elsewhere_from_a_directory_of_his(tmp_path, monkeypatch, plant, daemons):
    """Where $GPUGUARD_EVENTS of root names it, or it is of the daemon: no setting of the kernel helps there."""
    own, victim = tmp_path / "home", tmp_path / "victim"
    own.mkdir()
    os.chown(own, 20003, 20003)
    victim.write_text("root's")
    plant(victim, own / "events.jsonl")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(own / "events.jsonl"))
    if daemons:
        monkeypatch.setattr(audit_log, "MACHINE_EVENTS", str(own / "events.jsonl"))

    assert not audit_log.append(AN_EVENT)
    assert (victim.read_text(), victim.stat().st_uid) == ("root's", 0)
    told = "it is a link in a directory where others may write" in audit_log.complaint()
    assert told or daemons or plant is not os.symlink


def test_a_link_of_ones_own_is_followed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").touch()
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))

    assert audit_log.append(AN_EVENT)
    assert len(lines(tmp_path / "elsewhere")) == 1


NOW = time.time()


def event(outcome="sent", ago=10.0, **fields):
    return Event(time=NOW - ago, kind=fields.pop("kind", "terminate"), outcome=outcome, **fields)


@pytest.fixture
def events_log(log: Path, monkeypatch) -> Path:
    monkeypatch.setattr(command, "MACHINE_EVENTS", str(log.with_name("machine.jsonl")))
    return log


@pytest.fixture
def shown(events_log, capsys):
    """The outcomes that `gpuguard events --json OPTIONS` prints."""

    def look(*options):
        assert run_command_line(["events", "--json", *options]) == 0
        return [one["outcome"] for one in json.loads(capsys.readouterr().out)["events"]]

    return look


def test_events_of_both_logs_and_of_a_rotated_one_come_in_order_of_time(shown, events_log, monkeypatch):
    audit_log.append(event("first", ago=3))
    events_log.rename(f"{events_log}.1")
    audit_log.append(event("third", ago=1))
    monkeypatch.setenv("GPUGUARD_EVENTS", command.MACHINE_EVENTS)
    audit_log.append(event("second", ago=2))
    monkeypatch.setenv("GPUGUARD_EVENTS", str(events_log))

    assert shown() == ["first", "second", "third"]


def test_whose_job_it_was_the_uid_says_and_not_the_environment_of_the_job(shown, events_log):
    facts, nobody_here = (("uid", 1),), (("uid", 4_242_424),)
    audit_log.append(event("somebody else's name", user="root", facts=facts))
    audit_log.append(event("no name", facts=facts))
    audit_log.append(event("of another machine", user="ada", facts=nobody_here))

    assert shown("--user", pwd.getpwuid(1).pw_name) == ["somebody else's name", "no name"]
    assert shown("--user", "ada") == ["of another machine"]


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


def test_torn_lines_are_left_out_and_counted(events_log, capsys):
    audit_log.append(event("whole"))
    with events_log.open("ab") as file:
        file.write(b'{"schema": 1, "time_unix\n\xff\xfe\n[1]\n' + b"[" * 4000 + b'\n{"schema": 1}\n')
    run_command_line(["events"])
    out, err = capsys.readouterr()

    assert len(out.splitlines()) == 1
    assert "5 lines" in err


def test_what_users_wrote_cannot_reach_the_terminal(events_log, capsys):
    audit_log.append(event("sent", user="eve\x1b[2J", message="line\nforged \u202e", facts=(("policy", "x\x07"),)))
    run_command_line(["events"])
    out = capsys.readouterr().out

    assert len(out.splitlines()) == 1
    assert out.strip("\n").isprintable()
    assert "eve\\x1b[2J" in out


def test_facts_are_in_words_for_people_and_exact_for_programs(events_log, capsys):
    facts = {"wall_time_seconds": 7380.25, "peak_memory_bytes": 10738466816, "energy_joules": 979.0249999999999}
    audit_log.append(event(facts=tuple({**facts, "until_unix_seconds": NOW, "mean_utilization_percent": 90.0}.items())))
    run_command_line(["events"])
    now = time.strftime("%m-%d %H:%M:%S", time.localtime(NOW))
    words = f"wall_time=2h3m, peak_memory=10.0GiB, energy_joules=979.025, until={now}, mean_utilization=90%"

    assert f"({words})" in capsys.readouterr().out
    run_command_line(["events", "--json"])
    assert json.loads(capsys.readouterr().out)["events"][0]["facts"].items() >= facts.items()


def test_without_any_event_it_is_said_where_none_is(events_log, capsys):
    assert run_command_line(["events"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"gpuguard: no such events in {events_log} or {command.MACHINE_EVENTS}.\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--user", "no-body"], 2, "there is no user 'no-body'"),
        (["--device", "3"], 0, "devices by uuid, not by index"),
        (["--file", "/nonexistent"], 1, "cannot be read"),
    ],
)
def test_what_no_event_can_be_about_is_said(events_log, capsys, words, status, said):
    assert run_command_line(["events", *words]) == status
    assert said in capsys.readouterr().err


def test_a_log_that_may_not_be_read_is_named_once_and_as_it_is_called(events_log, monkeypatch, capsys):
    """It was named with .1 behind it, a file that need not exist."""
    real = os.open

    def refusing(path, *rest, **more):
        if str(path).startswith(command.MACHINE_EVENTS):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert run_command_line(["events"]) == 0
    said = f"gpuguard: {command.MACHINE_EVENTS} is not readable for you: its events are left out.\n"
    said += f"gpuguard: no such events in {events_log}.\n"

    assert capsys.readouterr() == ("", said)


def test_following_shows_what_comes_through_a_rotation_too(events_log, tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    audit_log.append(event("before"))
    follower = gpuguard.start("events", "--follow", "--json", "--file", str(events_log))
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(follower.stdout.readline, "")), daemon=True)
    reader.start()
    try:
        assert eventually(lambda: len(lines) == 1, 20)
        audit_log.append(event("during"))
        assert eventually(lambda: len(lines) == 2)
        os.rename(events_log, f"{events_log}.1")
        audit_log.append(event("after"))
        assert eventually(lambda: len(lines) == 3)
    finally:
        follower.terminate()
        follower.communicate()

    assert [json.loads(line)["outcome"] for line in lines] == ["before", "during", "after"]


def test_the_document_describes_exactly_what_is_printed(events_log, capsys):
    audit_log.append(
        event("sent", user="u", devices=("GPU-1",), pid=1, claim="c", message="m", facts=(("policy", "p"),))
    )
    run_command_line(["events", "--json"])
    content = json.loads(capsys.readouterr().out)
    found = printed("events", content)
    del found["events.events[].facts"]

    assert documented("events", DOCUMENT.read_text(encoding="utf-8")) == found


@pytest.fixture
def rotated(log: Path) -> Path:
    """A log that was rotated just now: old events in .1, one new one."""
    for number in range(3):
        audit_log.append(Event(float(number), "warn", "done", message=f"event {number}"))
    log.rename(f"{log}.1")
    audit_log.append(Event(3.0, "warn", "done", message="event 3"))
    return log


def messages(encoded: Iterable[bytes]) -> list[object]:
    return [line["message"] for line in audit_log.decoded(encoded)[0]]


def test_no_more_is_read_than_asked_for_and_no_torn_line(rotated):
    size = rotated.stat().st_size

    assert messages(audit_log.read_log(str(rotated), size)) == ["event 3"]
    assert messages(audit_log.read_log(str(rotated), 2 * size + 1)) == ["event 2", "event 3"]
    assert messages(audit_log.read_log(str(rotated), size - 1)) == []


def test_a_fifo_in_the_place_of_the_log_is_refused_and_hangs_nobody(log):
    os.mkfifo(log)

    with pytest.raises(OSError, match="ordinary file"):
        list(audit_log.read_log(str(log)))


def test_the_page_shows_events_from_before_a_rotation(rotated, monkeypatch):
    monkeypatch.setattr(web, "MACHINE_EVENTS", "/nonexistent")

    assert [event["text"].rpartition("  ")[2] for event in web.newest_events()] == [
        "event 0", "event 1", "event 2", "event 3",
    ]  # fmt: skip


def readers_of_events(sources: Mapping[str, str]) -> set[str]:
    """Modules that find the rotated file by themselves."""
    return {name for name, source in sources.items() if re.search(r"""["'}]\.1["']""", source)}


def test_nobody_else_reads_the_log():
    sources = {module_name(path): path.read_text() for path in modules()}

    assert readers_of_events(sources) == {"gpuguard.history.audit_log", "gpuguard.backends.replay"}  # of its own
    assert readers_of_events({"planted": 'open(f"{path}.1")'}) == {"planted"}
