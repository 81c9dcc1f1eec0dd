"""Wait until a request fits, print the devices that it would get, and claim nothing.

gpuguard wait -n 1                            waits in the queue like `gpuguard run`, and returns when it is its turn
gpuguard wait -n 2 --wait 1h || echo no       exit 124 when it takes longer; with --no-wait 1 when not now
gpuguard wait -n 1 --notify me@example.org    and sends a mail; or to a webhook, a program, a chat (env:NAME)

The devices are not held for you afterwards: `gpuguard run` claims them.  Exit codes: 0 it fits, 1 not now or never,
2 wrong usage, 4 the driver cannot be reached, 124 the time to wait ran out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from gpuguard.claims.claim import JobDetails
from gpuguard.cli.options import add_choice_options, add_source_options, backend_of, directory_of, request_of
from gpuguard.cli.run import add_queue_options, alternatives_of, priority_of, wait_for_claim, wait_of
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import InvalidRequest
from gpuguard.views.text import picked, put, put_json

if TYPE_CHECKING:
    from typing import Literal

    from gpuguard.notify.targets import Target

_TERMINAL = "terminal"
_SMTP = re.compile(r"smtp://([A-Za-z0-9.-]+)(?::([0-9]{1,5}))?/([^/]+@[^/]+)")
_LOOPBACK = ("localhost", "127.0.0.1")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_choice_options(parser)
    add_queue_options(parser)
    group = parser.add_argument_group("the answer")
    group.add_argument(
        "--notify",
        metavar="WHERE",
        nargs="?",
        const=_TERMINAL,
        help="ring the bell of the terminal, or tell a mail address (by sendmail, or smtp://SERVER/ADDRESS), an "
        "https:// address, a program (its path), or a chat whose address stands in a variable (env:NAME, by the extra "
        "notify)",
    )
    group.add_argument("--quiet", action="store_true", help="say nothing while waiting")
    group.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    requests, wait = [request_of(args), *alternatives_of(args)], wait_of(args)
    target = _target(args.notify)
    directory = directory_of(args, make=True)
    with closing(backend_of(args)) as backend:
        job = JobDetails(command=("gpuguard", "wait"), priority=priority_of(args))  # what others see of it
        # For a moment it is claimed: so the answer is what `run` would have got, and not a guess.
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


def _target(where: str | None) -> str | Target | None:
    """The target of notify that *where* means; a wrong one is reported before the wait of hours."""
    if where is None or where == _TERMINAL:
        return where
    from gpuguard.notify.sender import problems  # 30 ms, for --notify alone
    from gpuguard.notify.targets import Apprise, Email, Hook, Secret, Webhook

    target: Target
    try:
        if where.startswith("env:"):
            target = Apprise(Secret(env=where[4:]))
        elif match := _SMTP.fullmatch(where):
            server, port, address = match.groups()
            encryption: Literal["none", "starttls"] = "none" if server in _LOOPBACK else "starttls"
            target = Email((address,), server=server, port=int(port or 0), security=encryption)
        elif "://" in where:
            target = Webhook(where)
        else:
            target = Hook((where,)) if where.startswith("/") else Email((where,))
        for problem in problems({"--notify": target}):
            raise InvalidRequest(problem.removeprefix("--notify: "))
    except InvalidRequest as fault:
        raise InvalidRequest(f"--notify {where}: {fault}") from None
    return target


def _notify(target: str | Target, names: str) -> None:
    if isinstance(target, str):
        if os.isatty(2):
            sys.stderr.write("\a")
        return
    from gpuguard.notify.sender import attempt
    from gpuguard.notify.templates import Message

    host = os.uname().nodename
    text = f"gpuguard wait: GPU {names} of {host} would fit now.\nNobody keeps it for you: `gpuguard run` claims it.\n"
    sent, why = attempt(target, Message(f"GPU {names} of {host} {'are' if ',' in names else 'is'} free", text))
    if not sent:
        print_notice(f"the message could not be sent: {why}.")
