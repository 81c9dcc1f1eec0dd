"""Options that several commands share, and what they open."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from gpuguard.backends import Backend
    from gpuguard.claims.lockfiles import LockDirectory

_told: set[str] = set()  # directories of which it was said that they do not exist


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """--backend and --dir: which machine is read, and where its claims are."""
    group = parser.add_argument_group("where to look")
    group.add_argument(
        "--backend",
        metavar="B",
        default=os.environ.get("GPUGUARD_BACKEND") or "nvml",
        help="nvml, smi, simulated; to look at files: smi:FILE.xml, replay:FILE; see docs/sources.md "
        "(default: $GPUGUARD_BACKEND, else nvml)",
    )
    group.add_argument(
        "--dir",
        metavar="PATH",
        type=_path,
        default=os.environ.get("GPUGUARD_DIR") or None,
        help="directory of the claims (default: $GPUGUARD_DIR, else /run/gpuguard, else /run/lock or /tmp)",
    )


def _path(text: str) -> str:
    if not text:  # --dir "$UNSET"
        import argparse

        raise argparse.ArgumentTypeError("the name of the directory is empty.")
    return text


def backend_of(args: argparse.Namespace) -> Backend:
    """The backend that --backend names, in a process of its own, so that a driver that hangs cannot hang us."""
    from gpuguard.backends.isolated import open_isolated

    return open_isolated(args.backend, on_slow=lambda text: print(f"gpuguard: {text}", file=sys.stderr))


def directory_of(args: argparse.Namespace, *, make: bool = False) -> LockDirectory:
    """The claim directory of --backend and --dir; who only looks makes none, and is told of a missing one."""
    from gpuguard.claims.lockfiles import lock_directory

    directory = lock_directory(args.dir, backend=args.backend, make=make)
    if args.dir and args.dir not in _told and directory.is_missing():
        _told.add(args.dir)
        named_by = "GPUGUARD_DIR" if args.dir == os.environ.get("GPUGUARD_DIR") else "--dir"
        why = "no claim was ever made there" if os.path.lexists(args.dir) else "it does not exist yet"
        print(f"gpuguard: nothing is claimed in {args.dir} ({named_by}): {why}.", file=sys.stderr)
    return directory


def check_users(names: list[str]) -> None:
    """Refuse users that there are not: whose name is misspelt would look like somebody who has nothing.

    Raises:
        InvalidRequest: no account is called so, or it is a uid, whose user has a name.
    """
    if names:
        from gpuguard.documents.accounts import Accounts
        from gpuguard.errors import InvalidRequest
        from gpuguard.users import user_name

        accounts = Accounts()
        for name in names:
            uid = accounts.user(name)
            if name.isdecimal() and user_name(uid) != name:
                raise InvalidRequest(f"--user {name}: write the name, {user_name(uid)}.")
