"""Answer read-only questions that come over ssh, and refuse everything else: for the account of a fleet view.

In its ~/.ssh/authorized_keys:

    restrict,command="gpuguard serve-ssh" ssh-ed25519 AAAA... fleet@desk

Whatever is asked with that key comes here: `gpuguard who`, `queue`, `select`, `explain` and `report` are answered, in
JSON.  Anything else, a shell as well, gets a refusal in JSON and status 1, and nothing is run.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import redirect_stdout

from gpuguard.cli import build_parser, run_command_line
from gpuguard.errors import EXIT_NO, InvalidRequest
from gpuguard.fleet.hosts import VIEWS, requested_words
from gpuguard.views.text import json_text, put

LONGEST = 4096  # characters of a question


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ask",
        metavar="COMMAND",
        help="judge and answer this command line, to try it out (default: $SSH_ORIGINAL_COMMAND, which sshd sets)",
    )


def main(args: argparse.Namespace) -> int:
    command = args.ask if args.ask is not None else os.environ.get("SSH_ORIGINAL_COMMAND", "")
    words, reason = judged(command)
    if reason:
        content = {"schema": 1, "refused": command[:200], "reason": reason, "answered": list(VIEWS)}
        put([json_text(content, indent=None)], sys.stdout)
        return EXIT_NO
    return run_command_line([*words, *([] if "--json" in words else ["--json"])])


def judged(command: str) -> tuple[list[str], str]:
    """Return the words of gpuguard that *command* asks for, or none and the reason why it is refused.

    Options are judged by what argparse makes of them, not by their spelling.
    """
    only = f"this key is for {', '.join(VIEWS)} of gpuguard alone"
    if not command.strip():
        return [], f"no command, and there is no shell here: {only}"
    words = requested_words(command) if len(command) <= LONGEST else []
    if not words:
        return [], only
    parser = build_parser(words[0])
    try:
        with redirect_stdout(io.StringIO()):
            given = vars(parser.parse_args(words[1:]))
    except InvalidRequest as fault:
        return [], " ".join(str(fault).split())
    except SystemExit:  # -h may be hidden behind another option, as in -hn 2
        given = {"help": True}
    for name, value in given.items():
        if name not in (*VIEWS[words[0]], "json") and value != parser.get_default(name):
            return [], f"--{name.replace('_', '-')} is not answered over ssh: {only}"
    return words, ""
