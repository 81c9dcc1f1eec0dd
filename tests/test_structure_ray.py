"""What Ray's job API answers, other than it should or not at all, and signals in each place of staying with a job.

Whoever stays has the exit code of the command, or a reason; a job that may go on is ended, or he is told how to end it.
Ray's client is a stand-in that does with an answer what the real one does: it believes it.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structures import mutants
from test_ray_search import options

from gpuguard.cli import ray_follow, submit
from gpuguard.clusters import ray
from gpuguard.clusters.ray import Jobs
from gpuguard.errors import GpuguardError

NAME = "raysubmit_0123456789abcdef"
JOB: dict[str, object] = {"submission_id": NAME, "entrypoint": "true"}
FAILED = {"status": "FAILED", "driver_exit_code": 3, "message": "it ended with 3"}
DONE = {"status": "SUCCEEDED", "driver_exit_code": 0, "message": "fine"}
LOG = f"Running entrypoint for job {NAME}: true\nwords\n"


class HTTPError(OSError):
    """As of requests, where a proxy answers for a head that is away."""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked of modules that are not installed here, and no time to lose."""
    names = {"requests": "RequestException", "aiohttp": "ClientError", "ray.exceptions": "AuthenticationError"}
    for name, error in {"ray": "x", **names}.items():
        module = ModuleType(name)
        setattr(module, error, HTTPError if name == "requests" else type(error, (Exception,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_follow, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(ray_follow, "SILENT_SECONDS", 60.0)
    yield
    for thread in threading.enumerate():
        if thread.name == "gpuguard-ray-log":
            thread.join()


class Client:
    """Ray's client: a job that runs until it is stopped, or until an answer says that it has ended.

    Args:
        answers: of the state, the last of them for ever.
    """

    def __init__(self, *answers: object, before: Callable[[str], object] = lambda place: None) -> None:
        self.answers, self.before = list(answers), before
        self.submitted = self.stopped = 0

    def submit_job(self, **job: object) -> str:
        self.before("submit")
        self.submitted += 1
        self.before("submitted")
        return "-u root"

    def get_job_info(self, name: str) -> Any:
        assert name == NAME
        self.before("state")
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        told: Any = json.loads(found) if isinstance(found, bytes) else found
        if self.stopped:
            told = {**told, "status": "STOPPED", "driver_exit_code": None}
        return SimpleNamespace(**{**told, "status": SimpleNamespace(value=told["status"])})

    def stop_job(self, name: str) -> bool:
        self.before("stop")
        self.stopped += 1
        return True

    def get_job_logs(self, name: str) -> str:
        self.before("log")
        return LOG

    async def tail_job_logs(self, name: str) -> Any:
        raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        yield


def follow(client: Client, wait: float | None = None) -> int:
    return ray_follow.follow(Jobs(client), JOB, wait, no_wait=False)


@pytest.mark.parametrize(("truth", "codes"), [(FAILED, {3, 125, 129}), (DONE, {0, 125})], ids=["failed", "done"])
def test_whatever_ray_answers_the_exit_code_is_that_of_the_command_or_says_that_it_is_not_known(truth, codes):
    """A 256 was a success."""
    for where, encoded in mutants(truth):
        try:
            found = follow(Client(encoded, json.dumps(truth).encode()))
        except Exception as error:
            raise AssertionError(where) from error
        assert found in codes, where


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("Request failed with status code 502: <html>"), RuntimeError(), ValueError(""), HTTPError("502"),
        TypeError("an unexpected keyword"), KeyError("status"), json.JSONDecodeError("x", "", 0), b"[]", b"null", {},
        ConnectionError("refused"), TimeoutError(),
    ],
    ids=repr,
)  # fmt: skip
def test_a_head_that_starts_again_costs_nobody_the_job_that_he_stays_with(answer, monkeypatch, capfd):
    running = {"status": "RUNNING", "driver_exit_code": None, "message": None}
    assert follow(Client(running, answer, answer, running, FAILED)) == 3
    assert "Traceback" not in capfd.readouterr().err  # of the thread that listens

    monkeypatch.setattr(ray_follow, "SILENT_SECONDS", 0.05)
    with pytest.raises(GpuguardError):
        follow(Client(running, answer))
    assert f"`ray job stop {NAME}` ends it" in capfd.readouterr().err


def test_words_of_with_that_ray_refuses_are_not_taken_for_a_ray_that_is_away():
    def refuses(place: str) -> None:
        raise TypeError("runtime_env['env_vars'] must be of type Dict[str, str]")

    with pytest.raises(GpuguardError, match=r"(?s)^Ray refuses: runtime_env\['env_vars'\] must .*--print"):
        Jobs(Client(before=refuses)).submit({})


def test_an_end_of_the_output_that_cannot_be_had_takes_no_exit_code_away(capsys):
    def away(place: str) -> None:
        if place == "log":
            raise ConnectionError

    assert follow(Client(FAILED, before=away)) == 3
    assert "the end of its output cannot be had" in capsys.readouterr().err


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("signum", ray_follow.ENDS_IT)
@pytest.mark.parametrize("place", ["submit", "submitted", "state", "stop"])
def test_who_is_interrupted_has_ended_the_job_or_knows_how(place, signum, times, capsys):
    left = [times]

    def interrupts(here: str) -> None:
        if here == "state" and place == "stop" and left[0] == times:
            left[0] = times - 1 or 1
            signal.raise_signal(signum)
        elif here == place:
            while left[0]:
                left[0] -= 1
                signal.raise_signal(signum)

    client = Client({"status": "RUNNING", "driver_exit_code": None, "message": ""}, before=interrupts)
    before = [signal.getsignal(each) for each in ray_follow.ENDS_IT]

    assert follow(client) == 128 + signum
    said = capsys.readouterr().err
    assert client.stopped or f"`ray job stop {NAME}` ends it" in said
    assert [signal.getsignal(each) for each in ray_follow.ENDS_IT] == before


def test_who_is_interrupted_while_he_hands_a_job_over_knows_its_name(monkeypatch, capsys):
    def interrupts(place: str) -> None:
        if place == "submitted":
            raise KeyboardInterrupt

    monkeypatch.setattr(ray, "connect", lambda address: Jobs(Client(before=interrupts)))
    with pytest.raises(KeyboardInterrupt):
        submit.submit_to_ray(options("--", "true"))

    assert re.search(r"`ray job stop raysubmit_[0-9a-f]{16}` ends it", capsys.readouterr().err)


def test_output_that_the_terminal_cannot_show_ends_nothing(monkeypatch, capsys):
    class Strict:
        encoding = "latin-1"
        written = ""

        def write(self, text: str) -> None:
            self.written += text.encode(self.encoding).decode(self.encoding)

        def flush(self) -> None:
            pass

    out = Strict()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(Client, "get_job_logs", lambda client, name: LOG + "ä \u2192 \ud800\n")

    assert follow(Client(DONE)) == 0
    assert out.written == "words\nä \\u2192 \\ud800\n"
