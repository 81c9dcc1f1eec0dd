"""What commands do with --hosts: ask, show each answer when it is there, say who was silent.

On a terminal hosts stand in the order of their answers, in a pipe in the order in which they were named.  Exit codes:
`select`: 0 where a host has room, 1 where none has; the others: 0 when all answered, 1 when some did not; all of them:
4 when none did.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from gpuguard.backends import default_backend
from gpuguard.cli import terminal
from gpuguard.cli.options import quantity, whole_number
from gpuguard.cli.progress import bar
from gpuguard.errors import EXIT_NO, EXIT_NO_DRIVER, InvalidRequest
from gpuguard.fleet.answers import HostReply, reply_of
from gpuguard.fleet.hosts import PROGRAM, host_names, words_of
from gpuguard.fleet.ssh import PARALLEL, TIMEOUT, FleetQuery, Pool, Reply
from gpuguard.locale import _
from gpuguard.units import parse_duration
from gpuguard.views import fleet as view
from gpuguard.views.text import put, put_json, style

Show = Callable[[HostReply], list[str]]

_STEP = 0.5  # seconds between two updates of the list of silent hosts
_EVERY = 10.0  # seconds between two queries of top to a host, because each is a login there


def refuse(args: argparse.Namespace, usual: dict[str, object], why: str) -> None:
    """Refuse options that have no meaning beside --hosts; *usual* is name -> the value that means "not given"."""
    for name, value in usual.items():
        if getattr(args, name) != value:
            raise InvalidRequest(
                _("--{name} does not go with --hosts: {why}.").format(name=name.replace("_", "-"), why=why)
            )


def query_of(args: argparse.Namespace, words: Sequence[str]) -> tuple[tuple[str, ...], FleetQuery]:
    """Return the hosts, and how each of them is asked *words*."""
    there = _("it is of this machine; GPUGUARD_BACKEND and GPUGUARD_DIR of the account over there decide")
    refuse(args, {"backend": default_backend(), "dir": os.environ.get("GPUGUARD_DIR") or None}, there)
    timeout = quantity("--timeout", args.timeout, parse_duration)
    parallel = whole_number("--parallel", args.parallel)
    if timeout is not None and not 0.1 <= timeout <= 600:
        raise InvalidRequest(_("--timeout is between 100ms and 10m."))
    if parallel is not None and not 1 <= parallel <= 256:
        raise InvalidRequest(_("--parallel is between 1 and 256."))
    try:
        remote = shlex.split(args.remote or os.environ.get("GPUGUARD_REMOTE") or PROGRAM)
        ssh = shlex.split(args.ssh or os.environ.get("GPUGUARD_SSH") or "ssh")
    except ValueError:
        raise InvalidRequest(_("--remote or --ssh: a quote is open.")) from None
    return host_names(args.hosts, args.hosts_file), FleetQuery(
        shlex.join([*remote, *words]),
        tuple(ssh),
        TIMEOUT if timeout is None else timeout,
        PARALLEL if parallel is None else parallel,
    )


def who(args: argparse.Namespace) -> int:
    refuse(args, {"watch": None}, _("`gpuguard top --hosts` shows them again and again"))
    return _shown(args, "who", view.host_lines)


def queue(args: argparse.Namespace) -> int:
    return _shown(args, "queue", view.queue_lines)


def _shown(args: argparse.Namespace, name: str, lines_of: Callable[..., list[str]]) -> int:
    hosts, how = query_of(args, words_of(name, vars(args)))
    width, paint = terminal.width(), style()
    replies = gathered(hosts, how, None if args.json else lambda reply: lines_of(reply, width, paint))
    if args.json:
        put_json(view.to_json(replies, how.timeout))
    else:
        totals = view.total_lines(replies, width) if name == "who" else view.idle_queue_lines(replies)
        apart = [""] if any(lines_of(reply, width, paint) for reply in replies) else []
        put([*apart, *totals, *([""] if totals else []), *view.end_lines(replies, width, paint)])
    return status(replies)


def select(args: argparse.Namespace) -> int:
    """Run `gpuguard select --hosts`: print ``HOST DEVICES`` for each host with room, on a terminal also the others."""
    if args.sep in ("\n", "\0"):
        raise InvalidRequest(_("--newline and --null do not go with --hosts: there a line is one host."))
    hosts, how = query_of(args, words_of("select", vars(args)))
    width, paint, people = terminal.width(), style(), sys.stdout.isatty()

    def show(reply: HostReply) -> list[str]:
        devices = view.room(reply, args.format, args.sep)
        if people:
            return [view.room_line(reply, devices, hosts, width, paint)]
        return [] if devices is None else [f"{reply.host} {devices}"]

    replies = gathered(hosts, how, None if args.json else show, lambda reply: view.chosen(reply_of(reply)))
    with_room = [reply for reply in replies if view.room(reply, args.format, ",") is not None]
    if args.json:
        put_json(view.to_json(replies, how.timeout))
    elif not people:
        for reply in replies:
            if reply.error is not None or not with_room:
                terminal.print_notice(f"{reply.host}: {reply.error or reply.refusal}")
    if with_room:
        return 0
    return EXIT_NO if any(reply.error is None for reply in replies) else EXIT_NO_DRIVER


def top(args: argparse.Namespace) -> int:
    refuse(
        args,
        {"only_visible": False, "compute_only": False, "filter": None, "sort": "gpu", "tree": False, "mode": "auto"},
        _("a host is one line there; `ssh -t HOST gpuguard top` has its processes"),
    )
    every = quantity("--every", args.every, parse_duration) if args.every is not None else _EVERY
    if every is None or every < 1.0:
        raise InvalidRequest(_("--every needs at least 1s between two questions to a host."))
    hosts, how = query_of(args, words_of("who", vars(args)))
    ascii_only = args.ascii or not terminal.writes_braille()
    if args.once or not sys.stdout.isatty():
        replies = gathered(hosts, how, None)
        now = time.monotonic()
        known = {reply.host: view.after(view.KnownHost(), reply, now) for reply in replies}
        put(view.page(hosts, known, now, width=terminal.width(), paint=style(), ascii_only=ascii_only))
        return status(replies)
    _watch(hosts, how, every, ascii_only)
    return 0


def _watch(hosts: Sequence[str], how: FleetQuery, every: float, ascii_only: bool) -> None:
    """Ask each host every *every* seconds until Ctrl-C, and draw everything known at least once a second."""
    known: dict[str, view.KnownHost] = {}
    due = dict.fromkeys(hosts, 0.0)  # monotonic; a host that is being asked is not in it
    paint, drawn = style(), 0.0
    with terminal.screen(), closing(Pool(how)) as pool:
        while True:
            now = time.monotonic()
            ready = [host for host in hosts if due.get(host, now + 1) <= now]
            pool.query(ready)
            due = {host: at for host, at in due.items() if host not in ready}
            replies = pool.step(0.2)
            now = time.monotonic()
            for reply in replies:
                known[reply.host] = view.after(known.get(reply.host, view.KnownHost()), reply_of(reply), now)
                due[reply.host] = max(now, now - reply.seconds + every)
            if now - drawn >= (0.2 if replies else 1.0):
                drawn = now
                lines = view.page(hosts, known, now, width=terminal.width(), paint=paint, ascii_only=ascii_only)
                terminal.draw(terminal.fitting(lines, _("name fewer hosts")))


def gathered(
    hosts: Sequence[str],
    how: FleetQuery,
    show: Show | None,
    read: Callable[[Reply], HostReply] = reply_of,
) -> list[HostReply]:
    """Return the replies of *hosts*, in that order.  *show* makes the lines of each, printed as soon as possible."""
    replies: dict[str, HostReply] = {}
    shown = 0
    signal.signal(signal.SIGTERM, terminal.end_on_signal)  # so that no ssh is left behind
    with closing(Pool(how)) as pool:
        pool.query(hosts)
        while pool.waiting_for:
            fresh = [read(reply) for reply in pool.step(_STEP)]
            replies.update((reply.host, reply) for reply in fresh)
            if show and not sys.stdout.isatty():  # only those before the first that is missing
                fresh = []
                while shown < len(hosts) and hosts[shown] in replies:
                    fresh.append(replies[hosts[shown]])
                    shown += 1
            if show and fresh:
                _rewrite_line("")
                put(line for reply in fresh for line in show(reply))
            silent = pool.waiting_for
            text = _("waiting for {count} of {hosts} hosts: {silent}").format(
                count=len(silent), hosts=len(hosts), silent=", ".join(silent[:20])
            )
            _rewrite_line(f"{bar(len(replies) / len(hosts))} {text}" if silent else "")
    return [replies[host] for host in hosts]


def _rewrite_line(line: str) -> None:
    if terminal.rewrites():
        terminal.rewrite(line)


def status(replies: Sequence[HostReply]) -> int:
    """Return the exit code: 0 if all answered, 1 if some did not, 4 if none did."""
    silent = sum(reply.error is not None for reply in replies)
    if silent == len(replies):
        return EXIT_NO_DRIVER
    return EXIT_NO if silent else 0
