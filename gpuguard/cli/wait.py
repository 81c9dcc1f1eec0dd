"""Wait until a request fits, print the GPUs that it would get, and claim nothing.

gpuguard wait -n 1                            waits in the queue like `gpuguard run`, and returns when it is its turn
gpuguard wait -n 2 --wait 1h || echo no       exit 124 when it takes longer; with --no-wait 1 when not now
gpuguard wait -n 1 --notify me@example.org    and sends a mail; or to a webhook, a program, a chat (env:NAME)

The GPUs are not held for you afterwards: `gpuguard run` claims them.  Exit codes: 0 it fits, 1 not now or never,
2 wrong usage, 4 the driver cannot be reached, 124 the time to wait ran out.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from gpuguard.claims.claim import JobDetails
from gpuguard.cli.options import (
    JSON,
    TERMINAL,
    add_choice_options,
    add_source_options,
    add_table,
    backend_of,
    directory_of,
    message_target,
    request_of,
)
from gpuguard.cli.run import add_queue_options, alternatives_of, priority_of, wait_for_claim, wait_of
from gpuguard.cli.terminal import print_notice
from gpuguard.locale import _, ngettext, translated
from gpuguard.views.text import picked, put, put_json

if TYPE_CHECKING:
    from gpuguard.notify.targets import Target


def add_options(parser: argparse.ArgumentParser) -> None:
    add_choice_options(parser)
    add_queue_options(parser, not_now=1)
    group = parser.add_argument_group("the answer")
    add_table(
        group,
        (
            "--notify",
            "WHERE",
            "ring the bell of the terminal, or tell what `gpuguard run --notify` can tell",
            {"nargs": "?", "const": TERMINAL},
        ),
        ("--quiet", None, "say nothing while waiting"),
        JSON,
    )
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    requests, wait = [request_of(args), *alternatives_of(args)], wait_of(args)
    target = message_target(args.notify)
    directory = directory_of(args, make=True)
    with closing(backend_of(args)) as backend:
        job = JobDetails(command=("gpuguard", "wait"), priority=priority_of(args))  # what other users see of it
        # The devices are claimed for a moment, so that the answer is what `run` would have got, and not a guess.
        claim = wait_for_claim(args, backend, directory, requests, job, wait)
        devices = claim.devices
        claim.release()
    names = ",".join(device.uuid if device.parent_uuid else str(device.index) for device in devices)
    if args.json:
        put_json({"schema": 1, "devices": [picked(device, "index", "uuid") for device in devices]})
    else:
        put([names])
    if target is not None:
        _notify(target, names)
    return 0


def _notify(target: str | Target, names: str) -> None:
    if isinstance(target, str):
        if os.isatty(2):
            sys.stderr.write("\a")
        return
    from gpuguard.notify.sender import attempt
    from gpuguard.notify.templates import Message

    host = os.uname().nodename
    text = _(
        "gpuguard wait: GPU {names} of {host} would fit now.\nIt is not kept for you: `gpuguard run` claims it.\n"
    ).format(names=names, host=host)
    sent, why = attempt(
        target,
        Message(
            ngettext("GPU {names} of {host} is free", "GPU {names} of {host} are free", names.count(",") + 1).format(
                names=names, host=host
            ),
            text,
        ),
    )
    if not sent:
        print_notice(_("the message could not be sent: {why}.").format(why=translated(why)))
