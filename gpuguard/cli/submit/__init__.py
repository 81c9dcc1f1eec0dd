"""Start a job that outlives the terminal, on this machine or, by Slurm or Ray, on another one.

gpuguard submit -n 1 --time-limit 4h -- python train.py            here, as soon as there is a GPU; prints the job's id
gpuguard submit --sweep lr=0.1,0.01 -- python train.py --lr {lr}   a task for each value
gpuguard submit --after-ok 17 --begin 22:00 -- ...                 when job 17 has succeeded, not before ten

`gpuguard jobs` shows them.  A job of this machine takes the options of `gpuguard run`; processes that it leaves are
ended with it (--leftover).  With --via, an engine gets it:

gpuguard submit --via slurm -n 2 --min-free 20GiB --time-limit 4h -- python train.py     queued, as with sbatch
gpuguard submit --via slurm --attach -n 2 -- python train.py    stays, as srun: output here, exit code of the command
gpuguard submit --via slurm --with '--partition=a100' -- ...    more words for sbatch or srun
gpuguard submit --via slurm --print -n 2 -- python train.py     shows the command line, and submits nothing
gpuguard submit --via ray -n 2 -- python tune.py                through Ray's job API

The engine chooses the machine and its GPUs; there the command runs under `gpuguard run`.  Exit codes: 0 submitted, 125
not, also for wrong usage; with --until-done that of the job; with --attach those of `gpuguard run` (Ray: 1 for any
failure).
"""

from __future__ import annotations

import argparse
import os

from gpuguard.cli.options import (
    JSON,
    TARGETS_IN_WORDS,
    add_choice_options,
    add_repeatable,
    add_source_options,
    add_table,
    request_of,
)
from gpuguard.cli.run import add_limit_options, command_of, durations_of, limits_of
from gpuguard.cli.submit import detached
from gpuguard.cli.submit.via_ray import submit_to_ray
from gpuguard.cli.submit.via_slurm import submit_to_slurm
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _

ENGINES = ("slurm", "ray")
DEVICE_OPTIONS = ("devices", "exclude", "prefer")  # they name one machine's devices, but the engine chooses the machine


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuguard submit [--via slurm|ray] [options] [--] CMD [ARG ...]"
    group = parser.add_argument_group("the engine")
    group.add_argument("--via", choices=ENGINES, help="who runs it (default: this machine)")
    add_table(
        group,
        ("--attach", None, "stay until it has ended: its output, its exit code"),
        ("--print", None, "show what would be submitted, and submit nothing"),
    )
    add_repeatable(
        group,
        ("--with", "WORDS", "more words for the engine, as in '--partition=a100 --qos=night' (repeatable)"),
        dest="engine_words",
    )
    add_table(
        group.add_mutually_exclusive_group(),
        ("--wait", "DURATION", "with --attach: wait for a start at most so long, as in 30m"),
        ("--no-wait", None, "with --attach: exit 75 when it cannot start now"),
    )
    add_table(group, JSON)
    add_choice_options(parser)
    job = parser.add_argument_group("the job")
    add_table(
        job,
        ("--name", "NAME", "of the job, as the engine lists it (default: that of the command)"),
        ("--note", "TEXT", "what it is for; everybody can read it in `gpuguard who`"),
    )
    job.add_argument("--visible", choices=("index", "uuid"), default="index", help="as in `gpuguard run`")
    add_table(
        job,
        ("--isolate", None, "as in `gpuguard run`"),
        ("--leftover", "HOW", "as in `gpuguard run` (default: end)"),
    )
    add_repeatable(job, ("--notify", "WHERE", f"when it starts, ends or fails: {TARGETS_IN_WORDS} (repeatable)"))
    add_limit_options(parser)
    detached.add_options(parser)
    add_source_options(parser)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    # durations_of() and limits_of() of `gpuguard run` read it; there is no --exec here.
    parser.set_defaults(exec=False, alternatives=[], quiet=False, log_file=None, priority="normal")


def main(args: argparse.Namespace) -> int:
    if args.via is None:
        return detached.submit(args)
    args.command = command_of(args)
    check(args)
    return submit_to_slurm(args) if args.via == "slurm" else submit_to_ray(args)


def check(args: argparse.Namespace) -> None:
    """Refuse now what would fail on the other machine, hours later.

    Raises:
        InvalidRequest: an option cannot be understood, or makes no sense for an engine.
    """
    for name in DEVICE_OPTIONS:
        if getattr(args, name) is not None:
            raise InvalidRequest(
                _("--{name}: {via} chooses the machine and its GPUs.  Drop it, or say --model.").format(
                    name=name, via=args.via
                )
            )
    if args.mine_as_free or args.strategy != "spread":
        raise InvalidRequest(
            _("--mine-as-free and --strategy choose among GPUs, as {via} does: drop it.").format(via=args.via)
        )
    if (args.wait or args.no_wait) and not args.attach:
        raise InvalidRequest(_("--wait and --no-wait are about staying until it starts: add --attach."))
    try:
        os.getcwd()
    except OSError:
        raise InvalidRequest(_("the directory in which the command should start is gone: go to another one.")) from None
    request_of(args)
    _wait, time_limit, _grace = durations_of(args)
    limits_of(args, time_limit)
