"""How long a job will take, by the audit log of its user: hints, never more."""

import os
import shlex
import subprocess

import pytest

from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import read_records
from gpuguard.cli.run import write_expected_end
from gpuguard.history import audit_log
from gpuguard.model import Event
from gpuguard.queue import estimates
from gpuguard.queue.estimates import expected_seconds, probable_end, program

TRAIN = ("python", "train.py", "--lr", "3")


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def begins(claim, *command):
    """What run.py writes."""
    message = shlex.join(command)[:1000]
    audit_log.append(Event(time=0.0, kind="claim", outcome="started", claim=claim, message=message))


def ends(claim, seconds):
    facts = (("wall_time_seconds", seconds),)
    audit_log.append(Event(time=0.0, kind="release", outcome="released", claim=claim, facts=facts))


def ran(*lasted, command=TRAIN, name="c"):
    for number, seconds in enumerate(lasted):
        begins(f"{name}{number}", *command)
        ends(f"{name}{number}", seconds)


def test_the_mean_of_the_last_two_jobs_of_the_same_program_else_of_any(log):
    ran(1000.0, 20.0, 40.0)
    ran(99.0, 99.0, 99.0, command=("python", "eval.py"), name="d")

    assert expected_seconds(("python", "train.py", "--lr", "5")) == 30.0
    assert expected_seconds(("/usr/bin/python", "/home/a/train.py")) == 30.0
    assert expected_seconds(("python", "other.py")) == 99.0
    assert expected_seconds(("bash",)) == 99.0


def test_a_script_within_quotes_is_the_same_program_again(log):
    ran(10.0, command=("sh", "-c", "cd /data; python train.py"))
    ran(99.0, 99.0, command=("sh", "-c", "cd /data; python eval.py"), name="d")
    ran(30.0, command=("python", "train.py", "x" * 980 + " y"), name="e")  # longer than what the log has of it

    assert expected_seconds(("sh", "-c", "cd /data; exec python train.py")) == 10.0
    assert expected_seconds(("python", "train.py")) == 30.0


def test_one_job_that_has_ended_is_enough_and_one_that_runs_tells_nothing(log):
    assert expected_seconds(TRAIN) is None, "there is no log yet"
    begins("open", *TRAIN)
    assert expected_seconds(TRAIN) is None

    ran(10.0)
    assert expected_seconds(TRAIN) == 10.0


def test_a_job_that_runs_longer_than_estimated_takes_twice_as_long_or_twice_that():
    assert [probable_end(100.0, 10.0, now) for now in (100.0, 109.0, 110.0, 125.0)] == [110.0, 110.0, 120.0, 140.0]
    assert probable_end(100.0, 0.0, 100.5) == 101.0


def test_jobs_that_run_at_the_same_time_are_kept_apart(log):
    for name, command in (("a", TRAIN), ("b", ("sleep", "5")), ("c", TRAIN), ("d", TRAIN)):
        begins(name, *command)
    for name, seconds in (("b", 5.0), ("d", 30.0), ("a", 10.0), ("c", 20.0)):
        ends(name, seconds)

    assert expected_seconds(TRAIN) == 15.0
    assert expected_seconds(("sleep", "5")) == 5.0


LASTED = '{"kind": "release", "claim": "c2", "facts": {"wall_time_seconds": %s}}'
TORN = [
    *(b'{"schema": 1, "kind": "rel', b"\xff\xfe\x00", b"[]", b"null", b"7", b'"text"', b"[" * 100_000),
    b'{"kind": "release", "claim": ["c0"], "outcome": "released"}',
    b'{"kind": "claim", "outcome": "started", "claim": {}, "message": "x"}',
    *((LASTED % seconds).encode() for seconds in ('"long"', "null", "NaN", "-5", "1e999")),
    b'{"kind": "release", "claim": "c2", "facts": []}',
]


@pytest.mark.parametrize("line", TORN)
def test_a_torn_line_is_left_out(log, line):
    ran(10.0, 20.0, 30.0)
    begins("c2", *TRAIN)
    with log.open("ab") as file:
        file.write(line + b"\n")
    ran(40.0, name="later")

    assert expected_seconds(TRAIN) == 35.0  # of 30, 40


def test_the_log_that_was_turned_counts_too_also_for_a_job_that_began_before(log):
    ran(10.0, 20.0)
    begins("long", *TRAIN)
    os.rename(log, f"{log}.1")
    ends("long", 30.0)
    assert expected_seconds(TRAIN) == 25.0

    ran(40.0, 50.0, name="later")
    assert expected_seconds(TRAIN) == 45.0


def test_of_a_long_log_the_end_is_read(log, monkeypatch):
    monkeypatch.setattr(estimates, "TAIL_BYTES", 2000)
    ran(*[10.0] * 50)
    ran(*[77.0] * 5, name="later")
    ran(*[77.0] * 5, name="last")
    reads = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: reads.append(args[1]) or real(*args))

    assert expected_seconds(TRAIN) == 77.0
    assert sum(reads) <= 2000


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink(path, path)])
def test_what_is_no_log_tells_nothing_and_nothing_stays_open(log, make):
    make(log)
    before = len(os.listdir("/proc/self/fd"))

    assert expected_seconds(TRAIN) is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py", "python train.py"),
        ("/usr/bin/python3 -u /home/a/train.py x", "python3 train.py"),
        ("python -m pkg.train --lr 1", "python pkg.train"),
        ("python -X dev train.py", "python train.py"),
        ("torchrun --nproc_per_node 8 train.py --lr 1", "torchrun train.py"),
        ("accelerate launch --num_processes 4 train.py", "accelerate train.py"),
        ("bash job.sh 1", "bash job.sh"),
        ("./job", "job"),
        ("./job --fast", "job"),
        ("nvidia-smi  -l", "nvidia-smi"),
        ("", ""),
    ],
)
def test_what_is_compared_is_the_program_and_what_it_runs(command, name):
    assert program(command.split(" ")) == name
    assert program(()) == ""


@pytest.mark.parametrize(
    "command", [("bash", "-c", "python 'my train.py' | tee log.txt"), ("python", "-c", "x" * 3000)]
)
def test_a_command_with_blanks_in_its_words_or_too_long_for_the_log_is_found_again(log, command):
    ran(1.0, 2.0, 3.0, command=command)

    assert expected_seconds(command) == 2.5


def test_a_job_tells_when_it_should_end_once_that_is_known_also_when_its_supervisor_is_killed(log, tmp_path):
    directory, claim = lock_directory(str(tmp_path)), Claim("c", (), ())
    claim.since = 1000.0
    claim.write_record(directory, JobDetails("note", TRAIN))
    write_expected_end(claim, TRAIN)
    assert [record.expected for record in read_records(directory)] == [None]
    ran(10.0, 20.0, 30.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=claim.pass_fds):
        write_expected_end(claim, TRAIN)
        for descriptor in claim.pass_fds:
            os.close(descriptor)
        records = read_records(directory)

    assert [(record.note, record.expected) for record in records] == [("note", 1025.0)]
