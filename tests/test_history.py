"""The audit log: whole lines, for the owner's eyes, and never a reason for a job to fail."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

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


def test_an_event_becomes_one_line_whose_names_carry_units(log):
    assert audit_log.append(
        Event(1.5, "release", "settled", facts=(("wall_time_seconds", 3.0), ("energy_joules", None)))
    )

    assert lines(log) == [
        {
            "schema": 1,
            "time_unix_seconds": 1.5,
            "kind": "release",
            "outcome": "settled",
            "facts": {"wall_time_seconds": 3.0},
        }
    ]


def test_what_is_unknown_is_left_out_and_never_null(log):
    audit_log.append(AN_EVENT)

    assert set(lines(log)[0]) == {"schema", "time_unix_seconds", "kind", "outcome", "devices", "pid", "claim"}


def test_only_the_owner_may_read_it(log):
    audit_log.append(AN_EVENT)

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


def test_lines_of_many_writers_never_mix(log):
    event = Event(1.0, "claim", "started", message="x" * 3000)
    threads = [threading.Thread(target=lambda: [audit_log.append(event) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

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
    threads = [threading.Thread(target=lambda: [audit_log.append(AN_EVENT) for _ in range(100)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(lines(log)) + len(lines(Path(f"{log}.1"))) == 500


def test_a_log_that_cannot_be_set_aside_says_so_once_and_goes_on_until_it_is_four_times_as_long(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1000)
    monkeypatch.setattr(audit_log, "MOST_BYTES", 4000)
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
def test_the_daemons_user_cannot_make_root_write_elsewhere(tmp_path, monkeypatch, plant):
    own, victim = tmp_path / "gpuguard", tmp_path / "victim"
    own.mkdir()
    os.chown(own, 20003, 20003)
    victim.write_text("root's")
    plant(victim, own / "events.jsonl")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(own / "events.jsonl"))
    monkeypatch.setattr(audit_log, "MACHINE_EVENTS", str(own / "events.jsonl"))

    assert not audit_log.append(AN_EVENT)
    assert (victim.read_text(), victim.stat().st_uid) == ("root's", 0)


@pytest.mark.root
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_no_user_makes_root_write_elsewhere_from_a_directory_of_his(tmp_path, monkeypatch, plant):
    """$GPUGUARD_EVENTS of root may name a file in a user's own directory, where no setting of the kernel helps."""
    own, victim = tmp_path / "home", tmp_path / "victim"
    own.mkdir()
    os.chown(own, 20003, 20003)
    victim.write_text("root's")
    plant(victim, own / "events.jsonl")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(own / "events.jsonl"))

    assert not audit_log.append(AN_EVENT)
    assert victim.read_text() == "root's"
    assert plant is not os.symlink or "it is a link in a directory where others may write" in audit_log.complaint()


def test_a_link_of_ones_own_is_followed(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").touch()
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))

    assert audit_log.append(AN_EVENT)
    assert len(lines(tmp_path / "elsewhere")) == 1
