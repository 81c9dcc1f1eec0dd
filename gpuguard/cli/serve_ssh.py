"""Answer read-only questions that come over ssh, and refuse everything else: for the account of a fleet view.

In its ~/.ssh/authorized_keys:

    restrict,command="gpuguard serve-ssh" ssh-ed25519 AAAA... fleet@desk

Whatever is asked with that key comes here: `gpuguard who`, `queue`, `select` and `explain` are answered, in JSON.
Anything else, a shell as well, gets a refusal in JSON and status 1, and nothing is run.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import redirect_stdout

from gpuguard.errors import InvalidRequest

LONGEST = 4096  # characters of a question


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ask",
        metavar="COMMAND",
        help="judge and answer this command line, to try it out (default: $SSH_ORIGINAL_COMMAND, which sshd sets)",
    )


def main(args: argparse.Namespace) -> int:
    from gpuguard import cli

    command = args.ask if args.ask is not None else os.environ.get("SSH_ORIGINAL_COMMAND", "")
    words, reason = judged(command)
    if reason:
        return _refused(command, reason)
    return cli.run_command_line([*words, *([] if "--json" in words else ["--json"])])


def judged(command: str) -> tuple[list[str], str]:
    """The words of gpuguard that *command* asks for; else why it is refused."""
    from gpuguard.fleet.hosts import VIEWS, asked

    only = f"this key is for {', '.join(VIEWS)} of gpuguard alone"
    if not command.strip():
        return [], f"no command, and there is no shell here: {only}"
    words = asked(command) if len(command) <= LONGEST else []
    if not words:
        return [], only
    try:
        strange = _strange(words)
    except InvalidRequest as fault:
        return [], " ".join(str(fault).split())
    return (words, "") if strange is None else ([], f"{strange} is not answered over ssh: {only}")


def _strange(words: list[str]) -> str | None:
    """An option among *words* that is not for strangers.  Judged by what argparse makes of it, not by its spelling."""
    from gpuguard.cli import build_parser
    from gpuguard.fleet.hosts import VIEWS

    view, allowed = words[0], {*VIEWS[words[0]], "json"}
    parser = build_parser(view)
    try:
        with redirect_stdout(io.StringIO()):
            given = parser.parse_args(words[1:])
    except SystemExit:  # -h may hide behind another option, as in -hn 2
        return "--help"
    for name, value in vars(given).items():
        if name not in allowed and value != parser.get_default(name):
            return f"--{name.replace('_', '-')}"
    return None


def _refused(command: str, reason: str) -> int:
    from gpuguard.cli import EXIT_NO
    from gpuguard.fleet.hosts import VIEWS
    from gpuguard.views.text import json_text, put

    content = {"schema": 1, "refused": command[:200], "reason": reason, "answered": list(VIEWS)}
    put([json_text(content, indent=None)], sys.stdout)
    return EXIT_NO
