"""Let processes go on that a policy has paused: all of them, or those that you name.

gpuguard resume --list               which ones are paused, and by which policy
sudo gpuguard resume                 all of them go on
sudo gpuguard resume 4711 4712       these

A pause ends by itself with the condition, the policy or the daemon.  This ends it sooner, and without a daemon: where
one was killed and is not started again.  The policy may pause the process again when its steps begin anew: when the
condition does, or after its cooldown.
Exit codes: 0, 1 one of them is not paused or does not go on, 2 usage.
"""

from __future__ import annotations

import argparse
import os
import sys

from gpuguard.claims.directory import daemon_files
from gpuguard.cli.event_log import choose_log
from gpuguard.cli.options import add_source_options, add_table, directory_of
from gpuguard.enforcement.pauses import Pause, Pauses
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history import audit_log
from gpuguard.locale import _, translated
from gpuguard.locale.messages import sentence
from gpuguard.sanitize import neutralise
from gpuguard.users import user_name
from gpuguard.views.text import put


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        ("pids", "PID", "of a process that is paused (default: all)", {"nargs": "*"}),
        ("--list", None, "show them, and change nothing"),
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    choose_log(args)
    directory = directory_of(args)
    pauses = Pauses(directory, audit_log.append)
    named = {pause.process[0]: pause for pause in pauses.read()}
    if args.list:
        put([_line(pause) for pause in named.values()] or [_("nothing is paused.")], sys.stdout)
        return 0
    if unknown := [pid for pid in args.pids if not pid.isdecimal() or int(pid) not in named]:
        raise InvalidRequest(
            _("gpuguard has not paused {pids}: see `gpuguard resume --list`.").format(pids=", ".join(unknown))
        )
    if not os.access(daemon_files(directory).path, os.W_OK):
        raise GpuguardError(_("only root may do that: run it with sudo."))
    chosen = [named[int(pid)] for pid in args.pids] or list(named.values())
    why = sentence("pause.let_go_on", "let go on by {user}", user=user_name(os.getuid()))
    words = [pauses.end(pause, why) for pause in chosen]
    told = [translated(_WORDS.get(word, word)) for word in words]
    put(
        [f"{_line(pause)}: {text}" for pause, text in zip(chosen, told, strict=True)] or [_("nothing is paused.")],
        sys.stdout,
    )
    return 0 if all(word in ("done", "gone") for word in words) else 1


_WORDS = {
    "done": sentence("resume.done", "it goes on"),
    "gone": sentence("resume.gone", "it had ended"),
    "left": sentence("resume.left", "another hand has stopped it or let it go on"),
    "": sentence("resume.again", "try again"),
}


def _line(pause: Pause) -> str:
    text = _("{pid}  {user}  paused by the policy {policy}")
    return neutralise(text.format(pid=pause.process[0], user=pause.user or pause.uid, policy=pause.policy))
