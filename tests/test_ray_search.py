"""Without Ray: where the search for a device goes when others hold what Ray gave, and what is submitted."""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpuguard.cli import build_parser, ray_follow, submit
from gpuguard.cli.run import command_of
from gpuguard.cli.submit import check
from gpuguard.clusters import ray as engine
from gpuguard.clusters.ray import State
from gpuguard.errors import ImpossibleRequest, InvalidRequest, NotEnoughGpus, WaitTimeout
from gpuguard.ray import guarded


class Node:
    """Ray on a node of 4 devices, of which it gave *have*; it gives the others in this order, one a look."""

    def __init__(self, have: str = "0", free: str = "", total: str = "0123") -> None:
        self.free, self.rest = set(free), [device for device in total if device not in have]
        self.pending, self.tried = 0, list[tuple[str, ...]]()
        self.kept: tuple[str, ...] | None = None
        self.never: set[str] = set()

    def want(self, number: int) -> bool:
        self.pending = min(max(number, self.pending), len(self.rest))
        return self.pending > 0

    def arrived(self) -> tuple[str, ...]:
        if not self.pending:
            return ()
        self.pending -= 1
        return (self.rest.pop(0),)

    def keep(self, devices: Sequence[str]) -> None:
        self.kept, self.pending = tuple(devices), 0

    def attempt(self, among: tuple[str, ...], on_wait: Callable[[NotEnoughGpus], None] | None) -> str:
        self.tried.append(among)
        free = sorted(self.free & set(among))
        if free:
            return free[0]
        error = ImpossibleRequest if self.never >= set(among) else NotEnoughGpus
        failed = error("none", 1, 0)
        if on_wait is None:
            raise failed
        for _ in range(3):
            on_wait(failed)
        raise WaitTimeout("too late", 1, 0)


def test_what_ray_gave_is_taken_when_it_is_free():
    node = Node(free="0")

    assert engine.search(("0",), 1, node.attempt, lambda: pytest.fail("asks for more")) == ("0", None)


def test_a_taken_device_is_kept_and_others_are_asked_for_until_one_is_free():
    node = Node(free="3")

    found, places = engine.search(("0",), 1, node.attempt, lambda: node)

    assert (found, places) == ("3", node)
    assert node.tried[-1] == ("0", "1", "2", "3")


def test_a_device_that_comes_again_because_its_place_died_is_named_once():
    node = Node(free="3")
    node.rest = ["1", "1", "0", "3"]

    assert engine.search(("0",), 1, node.attempt, lambda: node)[0] == "3"
    assert node.tried[-1] == ("0", "1", "3")


def test_when_all_devices_are_asked_for_it_waits_for_any_of_them_and_gives_all_back_when_it_is_too_late():
    node = Node()

    with pytest.raises(WaitTimeout, match="too late"):
        engine.search(("0",), 1, node.attempt, lambda: node)

    assert node.tried[-1] == ("0", "1", "2", "3")
    assert node.kept == ()


def test_a_time_that_is_over_before_anybody_could_wait_is_over_all_the_same():
    with pytest.raises(WaitTimeout, match="the time to wait is over"):
        engine.search(("0",), 1, Node().attempt, Node, deadline=0.0)


@pytest.mark.parametrize(
    ("wait", "kind", "said"), [(0, NotEnoughGpus, "none"), (0.001, WaitTimeout, "the time to wait is over: none")]
)
def test_a_task_that_is_not_asked_to_wait_does_not_fail_for_the_time_to_wait(monkeypatch, wait, kind, said):
    monkeypatch.setattr(engine, "given", lambda: ("0",))
    monkeypatch.setattr(engine, "is_part", lambda: False)
    monkeypatch.setenv(engine.VARIABLE, "0")
    monkeypatch.setattr("gpuguard.api.claim", lambda number, *, devices, on_wait, **_: Node().attempt(devices, on_wait))
    monkeypatch.setattr("time.monotonic", itertools.count().__next__)
    with pytest.raises(NotEnoughGpus) as failed:
        guarded(wait=wait)(lambda: None)()

    assert (failed.type, str(failed.value)) == (kind, said)


def test_who_only_looks_for_another_device_hears_nothing_of_a_time_to_wait():
    with pytest.raises(NotEnoughGpus, match=r"^too late$") as failed:
        engine.search(("0",), 1, Node().attempt, Node, waits=False)

    assert failed.type is NotEnoughGpus


def test_a_device_that_can_never_do_is_no_end_as_long_as_there_are_others(monkeypatch):
    node = Node(free="2")
    node.never = {"0", "1"}

    assert engine.search(("0",), 1, node.attempt, lambda: node)[0] == "2"


def test_devices_that_can_all_never_do_are_an_error():
    node = Node()
    node.never = set("0123")

    with pytest.raises(ImpossibleRequest):
        engine.search(("0",), 1, node.attempt, lambda: node)
    assert node.kept == ()


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


@pytest.mark.parametrize(
    ("state", "code"),
    [
        (State("SUCCEEDED", 0, ""), 0),
        (State("FAILED", 3, ""), 3),
        (State("FAILED", -9, ""), 137),
        (State("FAILED", None, "the environment cannot be made"), 125),
        (State("STOPPED", None, ""), 143),
    ],
)
def test_the_exit_code_is_that_of_the_command_as_a_shell_has_it(state, code):
    assert ray_follow.exit_code(state) == code


class Log:
    """A job whose connection breaks after each chunk."""

    def __init__(self, *chunks: str) -> None:
        self.chunks = chunks
        self.times = 0

    def tail(self, name: str) -> Any:
        self.times += 1
        yield from self.chunks[: self.times]

    def log(self, name: str) -> str:
        return "".join(self.chunks)


def test_each_word_of_the_output_is_shown_once_though_the_connection_breaks(capsys):
    log = Log("Ray says\nMARK\none\n", "two\n", "three\n", "four")
    output = ray_follow.Output(log, "job", "MARK\n")  # type: ignore[arg-type]

    while log.times < 3:
        output.show(0.01)
    output.finish()

    assert capsys.readouterr().out == "one\ntwo\nthree\nfour"


def test_what_ray_says_of_a_job_that_did_not_begin_is_shown_as_a_complaint(capsys):
    output = ray_follow.Output(Log("no such package\n"), "job", "MARK\n")  # type: ignore[arg-type]
    output.finish()

    assert capsys.readouterr() == ("", "no such package\n")


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
