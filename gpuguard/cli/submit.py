"""Hand a command to the engine of a cluster, which runs it where and when there is room: Slurm or Ray.

gpuguard submit --via slurm -n 2 --min-free 20GiB --time-limit 4h -- python train.py     queued, as with sbatch
gpuguard submit --via slurm --attach -n 2 -- python train.py    stays, as srun: output here, exit code of the command
gpuguard submit --via slurm --with '--partition=a100' -- ...    more words for sbatch or srun
gpuguard submit --via slurm --print -n 2 -- python train.py     shows the command line, and submits nothing
gpuguard submit --via ray -n 2 -- python tune.py                through Ray's job API

The engine chooses the machine and its GPUs; there the command runs under `gpuguard run`, with the same options, limits
and exit codes.  Exit codes: 0 submitted; with --attach those of `gpuguard run`, 125 also when the engine refuses.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import TYPE_CHECKING

from gpuguard.cli.choice_options import add_choice_options, request_of
from gpuguard.cli.run import add_limit_options, command_of, durations_of, limits_of
from gpuguard.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

# Each has submit(options) -> exit code; options is what main() below was given, checked.
ENGINES = {"slurm": "gpuguard.cli.submit_slurm", "ray": "gpuguard.cli.submit_ray"}
PLACES = ("gpus", "exclude", "prefer")  # name devices of one machine, and which machine it will be nobody knows

# Options of `gpuguard run` that the command gets on the machine where it runs.
PASSED = (
    "num_gpus", "min_free", "min_total", "max_util", "max_memory_util", "max_processes", "max_temperature", "model",
    "mig", "tolerance", "share", "memory", "slots", "note", "visible", "isolate", "time_limit", "memory_limit",
    "temperature_limit", "idle_limit", "checkpoint_signal", "grace",
)  # fmt: skip
DEFAULTS = {"grace": "60s", "visible": "index"}

# `python -m MODULE`, but never with modules of the working directory: another user may have put a gpuguard.py or
# yaml.py there.  Python 3.10 has no -P, and the Python of another node may be of that version; -I would also leave out
# PYTHONPATH and the user's own site-packages, where gpuguard may be installed.  So what -P leaves out is taken out
# here: the empty entry that -c puts first.  Nothing is imported before that, because sys is built in.
WITHOUT_WORKING_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path); import"
RUN_MODULE = (
    f"{WITHOUT_WORKING_DIRECTORY} runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuguard submit --via slurm|ray [options] [--] CMD [ARG ...]"
    group = parser.add_argument_group("the engine")
    group.add_argument("--via", choices=ENGINES, required=True, help="who runs it")
    group.add_argument("--attach", action="store_true", help="stay until it has ended: its output, its exit code")
    group.add_argument("--print", action="store_true", help="show what would be submitted, and submit nothing")
    group.add_argument(
        "--with",
        metavar="WORDS",
        dest="engine_words",
        action="append",
        default=[],
        help="more words for the engine, as in '--partition=a100 --qos=night' (repeatable)",
    )
    waiting = group.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait", metavar="DURATION", help="with --attach: wait for a start at most so long, as in 30m"
    )
    waiting.add_argument("--no-wait", action="store_true", help="with --attach: exit 75 when it cannot start now")
    group.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_choice_options(parser)
    job = parser.add_argument_group("the job")
    job.add_argument("--name", metavar="NAME", help="of the job, as the engine lists it (default: that of the command)")
    job.add_argument("--note", metavar="TEXT", help="what it is for; everybody can read it in `gpuguard who`")
    job.add_argument("--visible", choices=("index", "uuid"), default="index", help="as in `gpuguard run`")
    job.add_argument("--isolate", action="store_true", help="as in `gpuguard run`")
    add_limit_options(parser)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    # As in `gpuguard run`, from the environment alone: the machine is another one.
    parser.set_defaults(exec=False)


def main(args: argparse.Namespace) -> int:
    args.command = command_of(args)
    check(args)
    try:
        submit: Callable[[argparse.Namespace], int] = importlib.import_module(ENGINES[args.via]).submit
    except ModuleNotFoundError as missing:
        if missing.name != ENGINES[args.via]:
            raise
        raise InvalidRequest(f"this gpuguard cannot submit to {args.via}: choose another --via.") from None
    return submit(args)


def check(args: argparse.Namespace) -> None:
    """Refuse here what would fail there, hours later.

    Raises:
        InvalidRequest: an option cannot be understood, or makes no sense for an engine.
    """
    for name in PLACES:
        if getattr(args, name) is not None:
            raise InvalidRequest(f"--{name}: {args.via} chooses the machine and its GPUs.  Drop it, or say --model.")
    if args.mine_as_free or args.strategy != "spread":
        raise InvalidRequest(f"--mine-as-free and --strategy choose among GPUs, as {args.via} does: drop it.")
    if (args.wait or args.no_wait) and not args.attach:
        raise InvalidRequest("--wait and --no-wait are about staying until it starts: add --attach.")
    try:
        os.getcwd()
    except OSError:
        raise InvalidRequest("the directory in which the command should start is gone: go to another one.") from None
    request_of(args)
    _, time_limit, _ = durations_of(args)
    limits_of(args, time_limit)


def python_words(module: str, python: str = sys.executable) -> list[str]:
    """The words that run *module* of gpuguard by *python*, whatever lies in the directory where they are used."""
    return [python, "-c", RUN_MODULE, module]


def inner_words(args: argparse.Namespace) -> list[str]:
    """The options of `gpuguard run` on the machine where it runs: ["--num-gpus", "2", "--min-free", "20GiB"]."""
    words: list[str] = []
    for name in PASSED:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [word for each in value for word in _said(flag, each)]
        elif value not in (None, False, DEFAULTS.get(name)):
            words += _said(flag, str(value))
    return words


def _said(flag: str, value: str) -> list[str]:
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]  # as a word it would be an option
