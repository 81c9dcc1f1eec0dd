"""The options that say which devices are wanted."""

from __future__ import annotations

import os
import shlex

import pytest
from builders import GIB

from gpuguard.cli.options import add_choice_options, request_of
from gpuguard.cli.parser import Parser
from gpuguard.errors import InvalidRequest
from gpuguard.request import Request, spelled


def request(line=""):
    parser = Parser(prog="gpuguard run", allow_abbrev=False)
    add_choice_options(parser)
    return request_of(parser.parse_args(shlex.split(line)))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", Request()),
        ("-n 2", Request(2)),
        ("--num-gpus=2 --min-free 20GiB --min-total 40GB", Request(2, min_free=20 * GIB, min_total=40 * 10**9)),
        ("--max-util 10% --max-memory-util 5.5%", Request(max_util=10.0, max_memory_util=5.5)),
        ("--max-processes 2 --max-temperature 80C", Request(max_processes=2, max_temperature=80.0)),
        ("--model 'A100*' --model H100", Request(models=("A100*", "H100"))),
        ("--gpus 0,GPU-ab", Request(2, devices=("0", "GPU-ab"))),
        ("--gpus 0,1,2 -n 1", Request(1, devices=("0", "1", "2"))),
        ("--exclude 0 --prefer 3,2", Request(exclude=("0",), prefer=("3", "2"))),
        ("--strategy pack --tolerance 1GiB", Request(strategy="pack", tolerance=GIB)),
        ("--mine-as-free", Request(mine_as_free=frozenset({os.getuid()}))),
    ],
)
def test_options_make_a_request(line, wanted):
    assert request(line) == wanted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 0", "0 GPUs cannot be asked for: ask for at least 1"),
        ("-n -1", "-1 GPUs cannot be asked for"),
        ("-n two", "-n: 'two' is not a whole number"),
        ("-n 1.5", "-n: '1.5' is not a whole number"),
        ("-n 3 --gpus 0,1", "-n 3 wants more than the 2 that --gpus 0,1 names"),
        ("--gpus 0,0", "--gpus names device 0 twice"),
        ("--gpus 0,,1", "names no device in one place"),
        ("--gpus ''", "names no device in one place"),
        ("--gpus 0,1 --exclude 1", "1 stands in --gpus and in --exclude"),
        ("--min-free 20", "--min-free: '20' has no unit: write a memory size like '20GiB'"),
        ("--min-free 20XB", "--min-free: '20XB' is not a memory size"),
        ("--max-util 10", "--max-util: '10' has no unit: write a percentage like '10%'"),
        ("--max-util 110%", "more than 100%"),
        ("--max-temperature 80", "like '85C'"),
        ("--max-processes -1", "permit 0 or more"),
        ("--strategy best", "invalid choice: 'best'"),
        ("--min-fre 20GiB", "unrecognized arguments"),
    ],
)
def test_a_value_that_cannot_be_understood_says_what_to_write(line, message):
    with pytest.raises(InvalidRequest) as fault:
        request(line)

    assert message in str(fault.value)


@pytest.mark.parametrize(
    "line",
    [
        "-n 5 --model 'A100*'",
        "-n 2 --gpus 0,1,3 --min-free 20.0GiB --max-util 10% --max-processes 1 --exclude 4 --prefer 3 --mine-as-free",
        "-n 1 --min-total 40.0GiB --max-memory-util 5% --max-temperature 80C --strategy pack --tolerance 1.0GiB",
    ],
)
def test_the_spelling_of_a_request_makes_the_same_request(line):
    assert request(spelled(request(line))) == request(line)
