"""The audit log: whole lines for the owner alone, never a reason for a job to fail; and `gpuguard events`."""

import json
import os
import pwd
import resource
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from nodes import Gpuguard, eventually, start
from test_who import DOCUMENT, documented, printed

from gpuguard.cli import events, web
from gpuguard.history import audit_log
from gpuguard.history.audit_log import LogFollower
from gpuguard.model import HEALTH, Event

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
        Event(time=1.5, kind="release", outcome="settled", facts=(("wall_time_seconds", 3.0), ("energy_joules", None)))
    )

    assert audit_log.append(AN_EVENT)
    line, another = lines(log)
    assert set(another) == {"schema", "time_unix_seconds", "kind", "outcome", "devices", "pid", "claim"}
    assert line.pop("facts") == {"wall_time_seconds": 3.0}
    assert line == {"schema": 1, "time_unix_seconds": 1.5, "kind": "release", "outcome": "settled"}
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_user_without_a_home_has_no_log_and_no_directory_called_tilde(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUGUARD_EVENTS", "~/.local/state/gpuguard/events.jsonl")

    assert not audit_log.append(AN_EVENT)
    assert audit_log.complaint().endswith("; set HOME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "über", "\udcff", "\u2028"])
def test_hostile_text_stays_on_its_line(log, text):
    audit_log.append(Event(time=1.0, kind="claim", outcome="started", message=text))

    assert len(log.read_bytes().splitlines()) == 1
    assert lines(log)[0]["message"] == text


def test_the_places_are_tried_in_their_order(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("GPUGUARD_EVENTS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = [audit_log.events_path()]
    for name, value in (("XDG_STATE_HOME", "/state"), ("GPUGUARD_EVENTS", "/elsewhere")):
        monkeypatch.setenv(name, value)
        places.append(audit_log.events_path())

    assert places == ["/home/ada/.local/state/gpuguard/events.jsonl", "/state/gpuguard/events.jsonl", "/elsewhere"]


def test_missing_folders_are_made_for_the_owner_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("GPUGUARD_EVENTS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "new"))

    assert audit_log.append(AN_EVENT)
    assert (tmp_path / "new/gpuguard").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["/proc/nowhere/events", "/proc/self/mem/x", "/", "/dev/full", "fifo"])
def test_a_place_that_cannot_be_written_is_a_false_and_no_error_and_hangs_no_job(monkeypatch, tmp_path, place):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / place))

    assert audit_log.append(AN_EVENT) is False
    assert place != "/dev/full" or audit_log.complaint() == "/dev/full: No space left on device"


def test_a_log_that_has_grown_too_large_is_set_aside_once(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1000)
    for _ in range(30):
        assert audit_log.append(AN_EVENT)

    assert len(lines(log)) + len(lines(Path(f"{log}.1"))) >= 10
    assert log.stat().st_size < 1200
    assert sorted(path.name for path in log.parent.iterdir()) == ["events.jsonl", "events.jsonl.1"]


def test_lines_of_many_writers_never_mix_and_none_is_lost_when_the_log_is_set_aside(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1_200_000)  # once, for 400 lines of some 3,100 bytes
    long = replace(AN_EVENT, message="x" * 3000)
    threads = [threading.Thread(target=lambda: [audit_log.append(long) for _ in range(100)]) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [line["message"] for line in lines(log) + lines(Path(f"{log}.1"))] == ["x" * 3000] * 500


def test_a_log_that_cannot_be_set_aside_says_so_once_and_goes_on_until_it_is_four_times_as_long(log, monkeypatch):
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 1000)
    monkeypatch.setattr(audit_log, "MAX_BYTES", 4000)
    older = Path(f"{log}.1")
    older.mkdir()  # so that nothing can be renamed to it

    written = [audit_log.append(AN_EVENT) for _ in range(40)]

    assert written == sorted(written, reverse=True) and 20 < sum(written) < 40  # one of the lines names the file
    assert 4000 <= log.stat().st_size < 4200
    assert [line["outcome"] for line in lines(log) if line["kind"] == "log"] == ["not set aside"]
    assert audit_log.complaint() == f"{log}: Is a directory"

    older.rmdir()

    assert audit_log.append(AN_EVENT)
    assert len(lines(older)) == sum(written) + 2


@pytest.fixture
def users_log(tmp_path, monkeypatch):
    """The log of root in a directory of another user."""
    own = tmp_path / "home"
    own.mkdir()
    os.chown(own, 20003, 20003)
    monkeypatch.setenv("GPUGUARD_EVENTS", str(own / "events.jsonl"))
    return own / "events.jsonl"


@pytest.mark.root
def test_a_log_that_root_begins_is_the_daemons(users_log, monkeypatch):
    monkeypatch.setattr(audit_log, "MACHINE_EVENTS", str(users_log))

    assert audit_log.append(AN_EVENT) and audit_log.append(AN_EVENT)
    seen = users_log.stat()
    assert (seen.st_uid, seen.st_mode & 0o777, len(lines(users_log))) == (20003, 0o600, 2)


@pytest.mark.root
@pytest.mark.parametrize("plant", [os.symlink, os.link])
@pytest.mark.parametrize("daemons", [False, True])
def test_no_user_makes_root_write_elsewhere_from_a_directory_of_their_own(
    users_log, tmp_path, monkeypatch, plant, daemons
):
    """Where $GPUGUARD_EVENTS of root names it, or it is of the daemon: no setting of the kernel helps there."""
    victim = tmp_path / "victim"
    victim.write_text("root's")
    plant(victim, users_log)
    if daemons:
        monkeypatch.setattr(audit_log, "MACHINE_EVENTS", str(users_log))

    assert not audit_log.append(AN_EVENT)
    assert (victim.read_text(), victim.stat().st_uid) == ("root's", 0)
    told = "it is a link in a directory where others may write" in audit_log.complaint()
    assert told or daemons or plant is not os.symlink


def test_a_link_of_ones_own_is_followed(log, tmp_path):
    (tmp_path / "elsewhere").touch()
    log.symlink_to(tmp_path / "elsewhere")

    assert audit_log.append(AN_EVENT)
    assert len(lines(tmp_path / "elsewhere")) == 1


NOW = time.time()


def event(outcome="sent", ago=10.0, **fields):
    return Event(time=NOW - ago, kind=fields.pop("kind", "terminate"), outcome=outcome, **fields)


@pytest.fixture
def machine_log(log: Path, monkeypatch) -> Path:
    path = log.with_name("machine.jsonl")
    monkeypatch.setattr(events, "MACHINE_EVENTS", str(path))
    return path


@pytest.fixture
def shown(machine_log, command):
    """The outcomes that `gpuguard events --json OPTIONS` prints."""

    def outcomes(*options):
        status, text, _ = command("events", "--json", *options)
        assert status == 0
        return [event["outcome"] for event in json.loads(text)["events"]]

    return outcomes


def test_events_of_both_logs_and_of_a_rotated_one_come_in_order_of_time(shown, log, machine_log, monkeypatch):
    audit_log.append(event("first", ago=3))
    log.rename(f"{log}.1")
    audit_log.append(event("third", ago=1))
    with monkeypatch.context() as as_root:
        as_root.setenv("GPUGUARD_EVENTS", str(machine_log))
        audit_log.append(event("second", ago=2))

    assert shown() == ["first", "second", "third"]


def test_whose_job_it_was_the_uid_says_and_not_the_environment_of_the_job(shown):
    facts, unknown_here = (("uid", 1),), (("uid", 4_242_424),)
    audit_log.append(event("another user's name", user="root", facts=facts))
    audit_log.append(event("no name", facts=facts))
    audit_log.append(event("of another machine", user="ada", facts=unknown_here))

    assert shown("--user", pwd.getpwuid(1).pw_name) == ["another user's name", "no name"]
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


def test_torn_lines_are_left_out_and_counted(log, machine_log, command):
    audit_log.append(event("whole"))
    with log.open("ab") as file:
        file.write(b'{"schema": 1, "time_unix\n\xff\xfe\n[1]\n' + b"[" * 4000 + b'\n{"schema": 1}\n')
    _, out, err = command("events")

    assert (out.count("\n"), "5 lines" in err) == (2, True)  # the headers, and the one that can be read


def test_facts_are_in_words_for_people_and_exact_for_programs(machine_log, command):
    facts = {"wall_time_seconds": 7380.25, "peak_memory_bytes": 10738466816, "energy_joules": 979.0249999999999}
    audit_log.append(
        event(facts=tuple({**facts, "until_unix_seconds": NOW, "mean_utilization_percent": 89.9596}.items()))
    )
    now = time.strftime("%m-%d %H:%M:%S", time.localtime(NOW))
    words = f"wall time 2h3m, peak memory 10.0GiB, energy 0.27Wh, until {now}, mean utilization 90%"

    assert command("events")[1].endswith(f"{words}\n")
    assert json.loads(command("events", "--json")[1])["events"][0]["facts"].items() >= facts.items()


def test_events_are_a_table_that_names_gpus_by_number_without_a_daemon_too(log, tmp_path, monkeypatch, command):
    node = start(str(tmp_path / "node"))
    monkeypatch.setenv("GPUGUARD_BACKEND", f"simulated:{tmp_path}/node")
    uuid = node.sample({HEALTH}).devices[3].uuid
    audit_log.append(event("settled", kind="release", devices=(uuid,), user="ada", message="train"))
    heads, row = command("events")[1].splitlines()

    assert heads.split() == ["TIME", "EVENT", "GPU", "USER", "NOTE"]
    assert row.split()[2:6] == ["release", "ended", "3", "ada"] and row[heads.index("NOTE") :].startswith("train")


def test_the_page_gets_the_cells_of_that_table_with_numbers_that_it_writes_itself(log, monkeypatch):
    monkeypatch.setattr(web, "MACHINE_EVENTS", "/nonexistent")
    facts = (("wall_time_seconds", 7380.25), ("uid", os.getuid()), ("signature", "x"))
    audit_log.append(event("settled", kind="release", devices=("GPU-3", "GPU-gone-for-long"), claim="c1", facts=facts))

    (row,) = web.newest_events({"GPU-3": "3"})
    assert (row["kind"], row["outcome"], row["devices"]) == ("release", "ended", ["3", "GPU-gone-for"])
    assert ["claim", "c1"] in row["facts"] and ["wall_time_seconds", 7380.25] in row["facts"]
    assert not {"uid", "signature"} & {name for name, _ in row["facts"]}


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        ([], 0, "gpuguard: no such events in {log} or {machine_log}.\n"),
        (["--user", "no-body"], 2, "there is no user 'no-body'"),
        (["--device", "3"], 0, "it names GPUs by uuid, not by index"),
        (["--file", "/nonexistent"], 1, "cannot be read"),
    ],
)
def test_where_no_event_is_and_what_none_can_be_about_is_said(log, machine_log, command, options, status, said):
    code, out, err = command("events", *options)

    assert (code, out) == (status, "")
    assert said.format(log=log, machine_log=machine_log) in err


def test_a_log_that_may_not_be_read_is_named_once_and_as_it_is_called(log, machine_log, monkeypatch, command):
    """It was named with .1 behind it, a file that need not exist."""
    real = os.open

    def refusing(path, *rest, **more):
        if os.path.basename(path).startswith(machine_log.name):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    said = f"gpuguard: {machine_log} is not readable for you: its events are left out.\n"

    assert command("events") == (0, "", f"{said}gpuguard: no such events in {log}.\n")


def test_no_line_before_a_rotation_is_lost_and_a_log_that_is_not_there_after_it_is_no_fault(log):
    follower = LogFollower(str(log))
    audit_log.append(event("before"))
    seen = [follower.newer()]
    audit_log.append(event("unread"))
    log.rename(f"{log}.1")
    seen += [follower.newer(), follower.newer()]
    audit_log.append(event("after"))
    seen += [follower.newer(), follower.newer()]

    assert [[json.loads(line)["outcome"] for line in found] for found in seen] == [
        ["before"], ["unread"], [], ["after"], []
    ]  # fmt: skip


def test_following_shows_what_comes_through_a_rotation_too(log, machine_log, tmp_path):
    audit_log.append(event("before"))
    shown: list[str] = []
    with Gpuguard(tmp_path, None).start("events", "--follow", "--json", "--file", str(log)) as follower:
        reader = threading.Thread(target=lambda: shown.extend(iter(follower.stdout.readline, "")), daemon=True)
        reader.start()
        try:
            assert eventually(lambda: len(shown) == 1)
            audit_log.append(event("during"))
            assert eventually(lambda: len(shown) == 2)
            log.rename(f"{log}.1")
            audit_log.append(event("after"))
            assert eventually(lambda: len(shown) == 3)
        finally:
            follower.terminate()
            reader.join()

    assert [json.loads(line)["outcome"] for line in shown] == ["before", "during", "after"]


def test_the_document_describes_exactly_what_is_printed(machine_log, command):
    audit_log.append(event(user="u", devices=("GPU-1",), pid=1, claim="c", message="m", facts=(("policy", "p"),)))
    found = printed("events", json.loads(command("events", "--json")[1]))
    del found["events.events[].facts"]

    assert documented("events", DOCUMENT.read_text(encoding="utf-8")) == found


@pytest.fixture
def rotated(log: Path) -> Path:
    """A log that was rotated just now: old events in .1, one new one."""
    for number in range(3):
        audit_log.append(Event(time=float(number), kind="warn", outcome="done", message=f"event {number}"))
    log.rename(f"{log}.1")
    audit_log.append(Event(time=3.0, kind="warn", outcome="done", message="event 3"))
    return log


def messages(encoded: Iterable[bytes]) -> list[object]:
    return [line["message"] for line in audit_log.decoded(encoded)[0]]


def test_no_more_is_read_than_asked_for_and_no_torn_line(rotated):
    size = rotated.stat().st_size

    assert messages(audit_log.read_log(str(rotated), size)) == ["event 3"]
    assert messages(audit_log.read_log(str(rotated), 2 * size + 1)) == ["event 2", "event 3"]
    assert messages(audit_log.read_log(str(rotated), size - 1)) == []


@pytest.fixture
def full(log):
    """A disk with room for so many bytes of the log: a limit on the size of files."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda room: resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + room, former[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_on_a_full_disk_a_line_is_written_whole_or_not_at_all(log, full):
    assert audit_log.append(event("before"))
    before = log.read_bytes()
    full(20)

    assert not audit_log.append(event("torn"))
    assert log.read_bytes() == before
    assert "No space left on device" in audit_log.complaint()
    full(10_000)
    assert audit_log.append(event("after"))
    assert [json.loads(line)["outcome"] for line in log.read_text().splitlines()] == ["before", "after"]


def test_who_follows_the_log_meanwhile_sees_no_line_twice_and_no_half_one(log, full, monkeypatch):
    audit_log.append(event("before"))
    follower, seen = LogFollower(str(log)), []
    truncate = os.ftruncate

    def watched(descriptor, length):
        seen.append(follower.newer())  # while the half stands there
        truncate(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", watched)
    full(20)
    audit_log.append(event("torn"))
    full(10_000)
    audit_log.append(event("after"))
    seen.append(follower.newer())

    assert [[json.loads(line)["outcome"] for line in found] for found in seen] == [["before"], ["after"]]


def test_a_fifo_in_the_place_of_the_log_is_refused_and_hangs_nobody(log):
    os.mkfifo(log)

    with pytest.raises(OSError, match="ordinary file"):
        list(audit_log.read_log(str(log)))


def small_log(monkeypatch: pytest.MonkeyPatch, keep: float | None) -> None:
    monkeypatch.setattr(audit_log, "ROTATE_BYTES", 300)
    monkeypatch.setattr(audit_log, "_keep_seconds", None)
    audit_log.keep_older(keep)


def test_older_files_are_kept_for_as_long_as_the_site_says(log, monkeypatch):
    """After a busy month there was no evidence left."""
    small_log(monkeypatch, 3600.0)
    for number in range(40):
        assert audit_log.append(Event(time=time.time(), kind="note", outcome="x", message=f"event {number}" + "." * 40))
    files = audit_log.older_files(str(log))
    said = [json.loads(line)["message"].strip(".") for line in audit_log.LogFollower(str(log)).older()]

    assert len(files) > 5 and list(files) == list(range(1, len(files) + 1))
    assert said == [f"event {number}" for number in range(len(said))] and len(said) > 30

    for number in (3, 4, 5):
        os.utime(files[number], (1.0, 1.0))
    for number in range(8):
        audit_log.append(Event(time=time.time(), kind="note", outcome="x", message=f"later {number}" + "." * 40))
    kept = {os.stat(name).st_mtime > 2.0 for name in audit_log.older_files(str(log)).values()}
    assert kept == {True}


def test_a_file_whose_move_was_cut_off_is_still_read(log, monkeypatch):
    small_log(monkeypatch, 3600.0)
    for number in range(20):
        audit_log.append(Event(time=time.time(), kind="note", outcome="x", message=f"event {number}" + "." * 40))
    os.rename(f"{log}.1", f"{log}.77")
    before = sum(len(Path(name).read_bytes().splitlines()) for name in audit_log.older_files(str(log)).values())

    assert len(audit_log.LogFollower(str(log)).older()) == before
    Path(f"{log}.old").write_text("not ours")
    assert f"{log}.old" not in audit_log.older_files(str(log)).values()


def test_without_a_word_of_the_site_one_older_file_is_kept(log, monkeypatch):
    small_log(monkeypatch, None)
    for number in range(40):
        audit_log.append(Event(time=time.time(), kind="note", outcome="x", message=f"event {number}" + "." * 40))

    assert list(audit_log.older_files(str(log))) == [1]
