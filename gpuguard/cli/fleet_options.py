"""The options of commands that ask other hosts as well: --hosts and what belongs to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from gpuguard.fleet.asking import Asking


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """--hosts, --hosts-file, --timeout, --parallel, --remote, --ssh."""
    group = parser.add_argument_group("other hosts, over ssh: see docs/fleet.md")
    group.add_argument("--hosts", metavar="LIST", help="ask these instead, as in gpu1,alice@gpu2,gpu[03-16]")
    group.add_argument("--hosts-file", metavar="FILE", help="the same from a file, one per line; - is standard input")
    group.add_argument("--timeout", metavar="D", help="per host, from its first packet to its answer (default: 10s)")
    group.add_argument("--parallel", metavar="N", help="so many at once; fewer behind one jump host (default: 64)")
    group.add_argument("--remote", metavar="WORDS", help="gpuguard there (default: $GPUGUARD_REMOTE, else gpuguard)")
    group.add_argument("--ssh", metavar="WORDS", help="as in 'ssh -F FILE' (default: $GPUGUARD_SSH, else ssh)")


def has_hosts(args: argparse.Namespace) -> bool:
    """Whether other hosts are asked.

    Raises:
        InvalidRequest: an option that is of use only with --hosts stands there without it.
    """
    if args.hosts is not None or args.hosts_file is not None:
        return True
    for name in ("timeout", "parallel", "remote", "ssh"):
        if getattr(args, name) is not None:
            raise InvalidRequest(f"--{name} is about other hosts: name them with --hosts or --hosts-file.")
    return False


def refuse(args: argparse.Namespace, usual: dict[str, object], why: str) -> None:
    """Refuse options that have no meaning beside --hosts: name -> the value that says nothing."""
    for name, value in usual.items():
        if getattr(args, name) != value:
            raise InvalidRequest(f"--{name.replace('_', '-')} does not go with --hosts: {why}.")


def asked_of(args: argparse.Namespace, words: Sequence[str]) -> tuple[tuple[str, ...], Asking]:
    """The hosts, and how each is asked *words*.

    Raises:
        InvalidRequest: a name or a value cannot be used.
    """
    import shlex

    from gpuguard.cli.choice_options import quantity, whole_number
    from gpuguard.fleet.asking import PARALLEL, TIMEOUT, Asking
    from gpuguard.fleet.hosts import host_names
    from gpuguard.fleet.questions import PROGRAM, command_line
    from gpuguard.units import parse_duration

    there = "it is of this machine; GPUGUARD_BACKEND and GPUGUARD_DIR of the account over there decide"
    refuse(args, {"backend": os.environ.get("GPUGUARD_BACKEND") or "nvml"}, there)
    refuse(args, {"dir": os.environ.get("GPUGUARD_DIR") or None}, there)
    timeout = quantity("--timeout", args.timeout, parse_duration)
    parallel = whole_number("--parallel", args.parallel)
    if timeout is not None and not 0.1 <= timeout <= 600:
        raise InvalidRequest("--timeout is between 100ms and 10m.")
    if parallel is not None and not 1 <= parallel <= 256:
        raise InvalidRequest("--parallel is between 1 and 256.")
    try:
        remote = shlex.split(args.remote or os.environ.get("GPUGUARD_REMOTE") or PROGRAM)
        ssh = shlex.split(args.ssh or os.environ.get("GPUGUARD_SSH") or "ssh")
    except ValueError:
        raise InvalidRequest("--remote or --ssh: a quote is open.") from None
    return host_names(args.hosts, args.hosts_file), Asking(
        command_line(remote, words),
        tuple(ssh),
        TIMEOUT if timeout is None else timeout,
        PARALLEL if parallel is None else parallel,
    )
