"""`gpuguard wait`: returns when a request fits, says on which devices, sends a message, and holds nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from builders import Machine, a_device
from claiming import acquire
from endpoints import a_mail_server, a_web_server
from nodes import until
from test_who import DOCUMENT, documented, printed

from gpuguard.claims.records import read_records
from gpuguard.queue.tickets import read_tickets
from gpuguard.request import Request


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
        (("--wait", "50ms"), 124, "the time to wait is over: wanted 1 GPU"),
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


def test_an_alternative_that_fits_is_as_good(wait, machine, directory):
    with acquire(machine, Request(), directory):
        assert wait("-n", "2", "--or", "-n 1") == (0, "0\n", "")


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


def test_a_program_gets_the_message(wait, tmp_path):
    program = tmp_path / "tell"
    program.write_text('#!/bin/sh\necho "$GPUGUARD_SUBJECT" > "$(dirname "$0")/told"\n')
    program.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):  # root's hooks run as nobody
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    (tmp_path / "told").touch()
    (tmp_path / "told").chmod(0o666)

    assert wait("--notify", str(program)) == (0, "1\n", "")
    assert (tmp_path / "told").read_text() == f"GPU 1 of {os.uname().nodename} is free\n"


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
        assert re.match(r"gpuguard: waiting for \d+s: wanted 2 GPUs: number 1 of 1 in line, ", said)
        yield wait
        wait.kill()


def test_it_returns_when_the_devices_are_given_back(waiting, both_taken):
    assert [waiting.stderr.readline()[:12] for _ in range(2)] == ["  device 0: ", "  device 1: "]
    assert waiting.stderr.readline() == "`gpuguard explain -n 2` shows each device.\n"
    both_taken.terminate()
    output, error = waiting.communicate(timeout=30)

    assert (waiting.returncode, output, error) == (0, "0,1\n", "")


def test_others_see_what_waits(gpuguard, waiting):
    (place,) = gpuguard.json("queue")["places"]

    assert (place["pid"], place["command"], place["requests"]) == (waiting.pid, ["gpuguard", "wait"], ["-n 2"])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_gives_up_leaves_no_ticket(gpuguard, waiting, signum, tmp_path):
    waiting.send_signal(signum)

    assert waiting.wait(timeout=30) == -signum
    assert "Traceback" not in waiting.stderr.read()
    assert gpuguard.json("queue")["places"] == []
    until(lambda: not list((tmp_path / "claims").rglob("*ticket.*")), "its file is removed")


def test_a_shell_loop_around_it_ends_with_ctrl_c(gpuguard, waiting):
    loop = ["sh", "-c", 'while "$@"; do :; done; echo over', "sh", *gpuguard.words("wait", "--quiet")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(loop, env=gpuguard.environment, start_new_session=True, **pipes) as shell:
        until(lambda: len(gpuguard.json("queue")["places"]) == 2, "it waits too")
        # What the terminal does at Ctrl-C: the whole group.
        subprocess.run([sys.executable, "-c", f"import os; os.killpg({shell.pid}, 2)"], check=True)
        output, _ = shell.communicate(timeout=30)

    assert "over" not in output
