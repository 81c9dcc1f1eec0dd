"""What waits: `gpuguard wait`, which prints devices and claims none, and the line that a terminal or a log shows."""

import json
import os
import re
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
from builders import Machine, a_device
from endpoints import a_mail_server, a_web_server
from nodes import on_terminal, until
from own_claims import acquire
from test_who import DOCUMENT, documented, printed

from gpuguard.claims.records import read_records
from gpuguard.cli import terminal as progress
from gpuguard.cli.job_log import WaitProgress
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import NotEnoughGpus, WaitTimeout
from gpuguard.queue.tickets import read_tickets
from gpuguard.request import Request
from gpuguard.sanitize import display_width


@pytest.fixture
def machine(monkeypatch):
    """Two devices."""
    machine = Machine(a_device(0), a_device(1))
    monkeypatch.setattr("gpuguard.cli.wait.backend_of", lambda args: machine)
    return machine


@pytest.fixture
def wait(machine, directory, command):
    return partial(command, "wait", "--dir", directory.path)


def test_what_fits_is_printed_and_nothing_stays_claimed(wait, directory):
    assert wait() == (0, "1\n", "")
    assert wait("-n", "2") == (0, "0,1\n", "")
    assert (read_records(directory), read_tickets(directory)) == ([], ([], []))


def test_the_document_describes_exactly_the_fields_that_are_printed(wait):
    status, output, _ = wait("-n", "2", "--json")

    assert documented("wait", DOCUMENT.read_text(encoding="utf-8")) == printed("wait", json.loads(output))
    assert [device["index"] for device in json.loads(output)["devices"]] == [0, 1] and status == 0


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--no-wait",), 1, "wanted 1 GPU, but none is free now."),
        (("--wait", "50ms"), 124, "the time to wait is over.  At its end: wanted 1 GPU"),
        (("-n", "3"), 1, "wanted 3 GPUs, but only 2 exist."),
        (("-n", "3", "--or", "-n 4"), 1, "wanted 3 GPUs, but only 2 exist."),
        (("--or", "-n"), 2, "--or '-n': -n/--num-gpus: expected one argument.\n"),
        (("--after", ""), 2, "--after is empty: name a claim or a process."),
    ],
)
def test_when_it_does_not_fit_the_exit_code_says_why(wait, machine, directory, words, status, message):
    with acquire(machine, Request(num_gpus=2), directory):
        code, output, error = wait("--quiet", *words)

    assert (code, output) == (status, "")
    assert message in error and "Traceback" not in error
    assert read_tickets(directory) == ([], [])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("me example.org", "'me example.org' is not an address: write it like ops@example.org."),
        ("http://chat.example.org/", "sends the message in clear text"),
        ("ftp://chat.example.org/", "this is not an address"),
        ("smtp://mail.example.org", "this is not an address"),
        ("/no/such/program", "/no/such/program cannot be run"),
        ("env:NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE is empty or missing"),
        ("env:no such", "no such"),
        ("", "is not an address"),
    ],
)
def test_a_wrong_address_is_said_before_the_wait(wait, machine, directory, where, message):
    with acquire(machine, Request(num_gpus=2), directory):
        code, output, error = wait("--wait", "300ms", "--notify", where)

    assert (code, output) == (2, "")
    assert error.startswith(f"gpuguard: --notify {where}: ") and message in error
    assert "waiting" not in error and "policy" not in error


def test_a_mail_says_which_devices_and_that_nobody_keeps_them(wait):
    with a_mail_server() as server:
        assert wait("--notify", f"smtp://127.0.0.1:{server.port}/me@example.org") == (0, "1\n", "")

    (letter,) = server.letters
    host = os.uname().nodename
    assert letter.recipients == ["me@example.org"]
    assert letter.content["Subject"] == f"GPU 1 of {host} is free"
    assert f"GPU 1 of {host} would fit now." in letter.body and "`gpuguard run` claims it." in letter.body


def test_a_message_that_cannot_be_sent_is_said_and_the_answer_stands(wait):
    with a_web_server(status=503) as web:
        status, output, error = wait("--notify", web.url)

    assert (status, output) == (0, "1\n")
    assert error.startswith("gpuguard: the message could not be sent: ") and error.endswith(".\n")


def test_the_bell_is_for_terminals(wait):
    assert wait("--notify") == (0, "1\n", "")


@pytest.fixture
def waiting(gpuguard, both_taken):
    """A wait that stands in line, behind the job that has both devices."""
    with gpuguard.start("wait", "-n", "2") as wait:
        said = wait.stderr.readline()
        assert re.match(r"gpuguard: waiting for \d+s: wanted 2 GPUs: number 1 of 1 in the queue, ", said)
        yield wait
        wait.kill()


def test_it_returns_when_the_devices_are_given_back(waiting, both_taken):
    assert waiting.stderr.readline().startswith("  GPU 0, GPU 1: ")
    assert waiting.stderr.readline() == "`gpuguard explain -n 2` shows each GPU.\n"
    both_taken.terminate()
    output, error = waiting.communicate(timeout=60)

    assert (waiting.returncode, output, error) == (0, "0,1\n", "")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_gives_up_leaves_no_ticket(gpuguard, waiting, signum, tmp_path):
    waiting.send_signal(signum)

    assert waiting.wait(timeout=60) == -signum
    assert "Traceback" not in waiting.stderr.read()
    assert gpuguard.json("queue")["places"] == []
    until(lambda: not list((tmp_path / "claims").rglob("*ticket.*")), "its file is removed")


MISSING = NotEnoughGpus("wanted 2 GPUs: number 1 of 1 in the queue, starts now.\n  GPU 0: busy\nadvice", 2, 0)
MISSING.brief = "number 1 of 1 in the queue, starts now"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test moves forward."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda _: os.terminal_size((40, 24)))


def test_a_log_gets_all_reasons_once_and_then_a_line_a_minute(clock, capsys):
    log = WaitProgress(False)
    for _ in range(150):
        log.missing(MISSING)
        clock[0] += 1

    assert capsys.readouterr().err.splitlines() == [
        "gpuguard: waiting for 0s: wanted 2 GPUs: number 1 of 1 in the queue, starts now.",
        "  GPU 0: busy",
        "advice",
        "gpuguard: waiting for 1m: wanted 2 GPUs: number 1 of 1 in the queue, starts now.",
        "gpuguard: waiting for 2m: wanted 2 GPUs: number 1 of 1 in the queue, starts now.",
    ]


def test_what_the_log_has_is_not_repeated_when_the_time_is_over(clock):
    """`run -n 8 --wait 2s` printed nine lines twice."""
    said = NotEnoughGpus("wanted 2 GPUs.", 2, 1, reasons=["  GPU 0: busy"], advice="Ask for 1.")
    log, other, quiet = WaitProgress(False), WaitProgress(False), WaitProgress(True)
    log.missing(said)
    quiet.missing(said)
    other.missing(NotEnoughGpus("wanted 2 GPUs.", 2, 1, reasons=["  GPU 0: hot"]))
    over = WaitTimeout.after(said)
    short = log.without_what_was_told(over)

    assert (str(short), type(short), short.wanted, short.available) == (
        "the time to wait is over.  At its end: wanted 2 GPUs.", WaitTimeout, 2, 1,
    )  # fmt: skip
    assert other.without_what_was_told(over) is quiet.without_what_was_told(over) is over


def test_a_terminal_has_one_line_a_second_at_most_that_fits_and_goes_away(clock, terminal, capsys):
    line = WaitProgress(False)
    for _ in range(5):
        line.missing(MISSING)
        clock[0] += 0.5
    line.done()
    line.done()
    assert line.without_what_was_told(over := WaitTimeout.after(MISSING)) is over, "it had no room for reasons"

    *shown, last = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert shown == [f"gpuguard: waiting for {n}s: number 1 o…" for n in (0, 1, 2)]
    assert last == ""


def test_hostile_words_are_neutral_and_wide_ones_fit(terminal, capsys):
    print_notice("\x1b[2J李小明" * 9, again=True)

    shown = capsys.readouterr().err.removeprefix("\r\x1b[K")
    assert shown.isprintable() and 36 <= display_width(shown) <= 37


@pytest.mark.parametrize("background", [False, True])
def test_a_terminal_that_cannot_write_a_line_anew_is_told_as_a_log(clock, terminal, monkeypatch, capsys, background):
    if background:
        monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    else:
        monkeypatch.setenv("TERM", "dumb")
    line = WaitProgress(False)
    for _ in range(5):
        line.missing(MISSING)
        clock[0] += 1
    line.done()

    assert capsys.readouterr().err == f"gpuguard: waiting for 0s: {MISSING}\n"


def test_in_the_background_nothing_is_written_over_what_the_user_types(clock, terminal, monkeypatch, capsys):
    line = WaitProgress(False)
    line.missing(MISSING)
    monkeypatch.setattr(progress.os, "tcgetpgrp", lambda _: os.getpgrp() + 1)  # Ctrl-Z, bg
    for _ in range(5):
        clock[0] += 1
        line.missing(MISSING)
    line.done()

    assert capsys.readouterr().err.count("\r") == 1


def test_a_terminal_that_went_away_ends_nothing(monkeypatch, capsys):
    def gone(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(progress.os, "get_terminal_size", gone)
    monkeypatch.setattr(progress.sys, "stderr", SimpleNamespace(write=gone, flush=lambda: None))
    print_notice("x", again=True)


def undated(text):
    """What was said, as if it had been said at once."""
    return re.sub(r"about 1h59m\b", "about 2h", re.sub(r"waiting for \d+s\b", "waiting for 0s", text))


@pytest.mark.terminal
@pytest.mark.parametrize("columns", [30, 80, 200])
def test_a_waiting_run_keeps_to_one_line_and_leaves_none(gpuguard, both_taken, columns):
    words = gpuguard.words("run", "-n", "2", "--", "echo", "it runs")
    with on_terminal(words, gpuguard.environment, columns=columns) as (_, shown_until):
        before = shown_until(lambda text: text.count("\r\x1b[K") >= 3)
        both_taken.terminate()
        shown = shown_until()

    lines = before.split("\r\x1b[K")[1:]
    assert "\n" not in before and all(display_width(line + "^C") < columns for line in lines)
    reason = "gpuguard: waiting for 0s: starts in about 2h, when GPU "
    whole = columns - 4 - len("1h59m10s") + len("2h0s")  # of a line that was cut before its times were made equal
    assert any(undated(line).startswith(reason[:whole].rstrip()) for line in lines)
    assert re.search(r"\r\x1b\[Kgpuguard: GPU 0,1 \(SIMULATED\) · claim \w+\r\nit runs\r\n", shown)


@pytest.mark.terminal
def test_ctrl_c_leaves_an_empty_line(gpuguard, both_taken):
    with on_terminal(gpuguard.words("run", "--", "true"), gpuguard.environment) as (process, shown_until):
        shown_until(lambda text: "waiting for" in text)
        process.send_signal(2)

        assert process.wait(60) == -2
        assert shown_until().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--no-wait",), 75, "gpuguard: wanted 1 GPU: not now; it would be number 2 of 2 in the queue, "),
        (("--wait", "0s"), 75, "gpuguard: wanted 1 GPU: not now; it would be number 2 of 2 in the queue, "),
        (("--wait", "300ms"), 124, "the time to wait is over.  At its end: wanted 1 GPU: number 2 of 2 in the queue, "),
        (("--no-wait", "--or", "-n 2"), 75, "number 2 of 2 in the queue"),
        (("-n", "3"), 125, "wanted 3 GPUs, but only 2 exist."),
        (("-n", "3", "--wait", "300ms"), 125, "wanted 3 GPUs, but only 2 exist."),
    ],
)
def test_the_exit_code_of_run_behind_others_says_why(gpuguard, both_taken, words, code, message):
    with gpuguard.start("run", "-n", "2", "--", "true") as first:
        first.stderr.readline()
        done = gpuguard("run", *words, "--", "true")
        first.kill()

    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    withdrawn = [(event["outcome"], event["message"]) for event in gpuguard.events("queue")]
    assert withdrawn == [("withdrawn", "the time to wait is over: true")] * (code == 124)


def test_a_free_device_that_is_kept_for_who_came_before_is_not_taken(gpuguard):
    with gpuguard.start("run", "--time-limit", "1h", "--", "sh", "-c", "echo ready; exec sleep 60") as job:
        job.stdout.readline()
        with gpuguard.start("run", "-n", "2", "--", "true") as first:
            first.stderr.readline()
            longer = gpuguard("run", "--no-wait", "--time-limit", "2h", "--", "true")
            shorter = gpuguard("run", "--no-wait", "--time-limit", "10m", "--", "echo", "ran")
            first.kill()
        job.terminate()

    assert longer.returncode == 75 and "held back: it would delay " in longer.stderr
    assert (shorter.returncode, shorter.stdout) == (0, "ran\n")
