"""`gpuguard submit --via ray` and `@guarded` without Ray: what is submitted, and what comes of what `ray` says."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import Gpuguard, eventually

from gpuguard.cli import build_parser
from gpuguard.cli.run import command_of
from gpuguard.cli.submit import check
from gpuguard.cli.submit import via_ray as submit
from gpuguard.errors import InvalidRequest
from gpuguard.ray import guarded


def options(*words: str) -> argparse.Namespace:
    args = build_parser("submit").parse_args(["--via", "ray", *words])
    args.command = command_of(args)
    check(args)
    return args


def job(*words: str) -> Any:
    args = options(*words)
    return submit.job_of(args, submit.engine_words(args.engine_words))


def test_a_job_asks_ray_for_its_devices_and_runs_under_gpuguard_run_with_the_same_options():
    made = job("-n", "2", "--min-free", "20GiB", "--time-limit", "4h", "--", "python", "train.py", "a b")

    assert made["entrypoint_num_gpus"] == 2
    words = shlex.split(made["entrypoint"])
    assert words[words.index("--num-gpus") :] == [
        "--num-gpus", "2", "--min-free", "20GiB", "--time-limit", "4h", "--", "python", "train.py", "a b",
    ]  # fmt: skip


def test_a_command_that_should_start_in_a_directory_that_is_gone_is_refused(tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(InvalidRequest, match="is gone: go to another one"):
        job("--", "ls")


def test_words_for_ray_reach_it():
    made = job("--with", "--entrypoint-num-cpus 4", "--with", """--runtime-env-json '{"pip": ["x"]}'""", "--", "ls")

    assert made["entrypoint_num_cpus"] == 4
    assert made["runtime_env"]["pip"] == ["x"]
    assert made["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "30"


@pytest.mark.parametrize(
    "words",
    [
        "--frobnicate 3",
        "--entrypoint-num-cpus many",
        "--runtime-env-json [1]",
        "--entrypoint-memory inf",
        """--runtime-env-json '{"env_vars": 5}'""",
        "--address",
        "'",
    ],
)
def test_words_that_ray_does_not_have_are_refused_with_those_that_it_has(words):
    with pytest.raises(InvalidRequest, match="--entrypoint-memory"):
        job(f"--with={words}", "--", "ls")


def test_print_shows_the_words_of_ray_job_submit(capsys):
    assert submit.submit_to_ray(options("--print", "-n", "2", "--name", "sweep", "--", "ls")) == 0

    words = shlex.split(capsys.readouterr().out)
    assert words[:5] == ["ray", "job", "submit", "--entrypoint-num-gpus", "2"]
    assert json.loads(words[words.index("--metadata-json") + 1]) == {"job_name": "sweep"}


def ray(place: Path, script: str) -> Gpuguard:
    """gpuguard where `ray` is *script*, which finds in $words what it was told, a word a line."""
    program = place / "bin" / "ray"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{place}/words\n{script}\n')
    program.chmod(0o755)
    return Gpuguard(place, None, PATH=f"{program.parent}:{os.environ['PATH']}")


def words(place: Path) -> list[str]:
    return (place / "words").read_text().splitlines()


def test_a_job_is_submitted_under_a_name_that_is_told(tmp_path):
    done = ray(tmp_path, "exit 0")("submit", "--via", "ray", "--json", "--", "ls")

    told = words(tmp_path)
    assert done.returncode == 0
    assert "--no-wait" in told
    assert json.loads(done.stdout)["job"] == told[told.index("--submission-id") + 1]


def test_what_ray_refuses_is_said_in_its_words(tmp_path):
    done = ray(tmp_path, "echo no such resource >&2; exit 1")("submit", "--via", "ray", "--", "ls")

    assert done.returncode == 125
    assert "Ray refuses: no such resource" in done.stderr


def test_where_there_is_no_ray_it_is_said_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    with pytest.raises(InvalidRequest, match=r"pip install 'gpuguard\[ray\]'"):
        submit.submit_to_ray(options("--", "ls"))


@pytest.mark.parametrize("code", [0, 1])
def test_who_stays_has_the_output_and_the_exit_code_of_ray_job_submit(tmp_path, code):
    done = ray(tmp_path, f"echo words of the job; exit {code}")("submit", "--via", "ray", "--attach", "--", "ls")

    assert (done.returncode, done.stdout) == (code, "words of the job\n")
    assert "--no-wait" not in words(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_who_stays_ends_the_job(tmp_path, number):
    until_it_is_stopped = (
        f"[ $2 = stop ] && touch {tmp_path}/over; until [ -e {tmp_path}/over -o ! -e {tmp_path} ]; do sleep 0.1; done"
    )
    gpuguard = ray(tmp_path, until_it_is_stopped)
    command = [sys.executable, "-m", "gpuguard", "submit", "--via", "ray", "--attach", "--", "ls"]
    with subprocess.Popen(command, env=gpuguard.environment, stderr=subprocess.DEVNULL) as running:
        assert eventually(lambda: (tmp_path / "words").exists() and "sh" in words(tmp_path))
        running.send_signal(number)
        status = running.wait(60)

    told = words(tmp_path)
    assert status == 130
    assert told[-3:] == ["job", "stop", told[told.index("--submission-id") + 1]]


def test_guarded_stands_below_ray_remote():
    with pytest.raises(InvalidRequest, match=r"below @ray\.remote"):
        guarded(object())  # type: ignore[call-overload]


def test_a_guarded_thing_keeps_its_name_and_its_words():
    @guarded(min_free=2**30)
    def train(rate: float) -> float:
        """Train."""
        return rate

    @guarded
    class Trainer:
        """Trains."""

    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert (Trainer.__name__, Trainer.__doc__) == ("Trainer", "Trains.")
    assert not hasattr(Trainer.__init__, "__wrapped__")  # Ray wants a signature of what is wrapped
