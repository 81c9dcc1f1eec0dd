"""Show the machine in a browser: GPUs, processes, claims, the queue, events, charts.  It changes nothing.

gpuguard web                                          http://127.0.0.1:8466
gpuguard web --listen unix:/run/user/1000/gpus.sock   for a proxy
gpuguard web --listen 0.0.0.0:8466 --host gpu1.example.org --token-file /etc/gpuguard/web-token

The page shows more than `gpuguard who` shows to everybody, so a browser needs a token: the one that is printed with the
address, or that of --token-file.  See docs/web.md.

Needs the extra web: pip install 'gpuguard[web]'.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import stat
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import lru_cache
from typing import Any

from gpuguard.cli.options import FRESH, add_source_options, add_table, backend_of, directory_of, snapshot_source
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.files import open_file
from gpuguard.history.audit_log import MACHINE_EVENTS, Line, decoded, events_path, read_log
from gpuguard.metrics.http_server import LOCAL_NAMES
from gpuguard.model import NVLINK_FLOW, PCIE
from gpuguard.notify.targets import LOOPBACK
from gpuguard.source import SnapshotSource
from gpuguard.views import events

_EVENTS = 30  # newest lines of the audit log
_TAIL_BYTES = 64 * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        (
            "--listen",
            "ADDRESS",
            "HOST:PORT, [HOST]:PORT or unix:PATH (default: %(default)s)",
            {"default": "127.0.0.1:8466"},
        ),
        (
            "--port",
            "N",
            "the same as --listen 127.0.0.1:N",
            {"dest": "listen", "default": argparse.SUPPRESS, "type": "127.0.0.1:{}".format},
        ),
        (
            "--host",
            "NAME",
            "a further name by which browsers ask for the page, as behind a proxy (repeatable)",
            {"action": "append", "default": []},
        ),
    )
    add_table(
        parser.add_mutually_exclusive_group(),
        ("--token-file", "PATH", "holds what browsers must know; readable by you alone"),
        ("--no-token", None, "show every user of this machine what you see (loopback or unix: only)"),
    )
    add_table(parser, FRESH)
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    host, _, path = address_of(args.listen)
    token = read_token(args.token_file) if args.token_file else None
    if path is None and host not in LOOPBACK and token is None:
        raise InvalidRequest(
            f"--listen {args.listen} lets everybody on the network see who runs what: add --token-file PATH, made by\n"
            "`(umask 077; head -c 24 /dev/urandom | base64 > web-token)`, and put a proxy with TLS before it."
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # PCIe and NVLink traffic comes from a backend of its own, because the other source may be the daemon.
    traffic = SnapshotSource(
        args.backend, lambda: backend_of(args), lambda: None, read=lambda backend: backend.sample({PCIE, NVLINK_FLOW})
    )
    with closing(snapshot_source(args)) as source, closing(traffic), suppress(KeyboardInterrupt):
        source.joined()  # a driver that cannot be reached is reported here, not in a browser
        _serve(args, source, traffic, None if args.no_token else token or secrets.token_urlsafe())
    return 0


def _serve(args: argparse.Namespace, source: SnapshotSource, traffic: SnapshotSource, token: str | None) -> None:
    try:  # the extra may be missing
        import uvicorn

        from gpuguard.web.feed import FrameFeed
        from gpuguard.web.server import Connection, application, listening
    except ImportError as error:
        raise GpuguardError(f"{error.name} is missing: pip install 'gpuguard[web]'.") from None
    host, port, path = address_of(args.listen)
    own = (host, f"[{host}]") if path is None else ()
    hosts = LOCAL_NAMES | {name.lower() for name in (*own, *args.host)}
    settings = uvicorn.Config(
        application(FrameFeed(source, traffic, directory_of(args), newest_events), hosts, token),
        http=Connection,
        ws="none",
        loop="asyncio",
        log_level="error",  # otherwise every bad request of a stranger writes a line
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=1,
    )
    with listening(host, port, path) as ours:
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}/" if path is None else f"unix:{path}"
        print(f"gpuguard: {where}{_shown(args, token)}  (Ctrl-C ends it)", file=sys.stderr)
        uvicorn.Server(settings).run(sockets=[ours])


def _shown(args: argparse.Namespace, token: str | None) -> str:
    """Return what follows the address.  A token that was just made is shown only here, never in a file or journal."""
    if token is None:
        return ""
    kind = os.fstat(2).st_mode
    if not args.token_file and (stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return "?token=...  (it is not written into a log: --token-file PATH names one that you know)"
    return f"?token={'...' if args.token_file else token}"


def address_of(text: str) -> tuple[str, int, str | None]:
    """Return (host, port, None), or ("", 0, path of a socket)."""
    if text.startswith("unix:"):
        return "", 0, os.path.abspath(text.removeprefix("unix:"))
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"--listen {text}: write HOST:PORT, as in 127.0.0.1:8466, or unix:PATH.")
    return host.strip("[]"), int(port), None


def read_token(path: str) -> str:
    """Read the token from a file that no other user may be able to read."""
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            token = file.read(1024).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--token-file {path}: it cannot be read: {error}.") from None
    if status.st_mode & 0o077:
        raise InvalidRequest(f"--token-file {path}: others can read it.  Run `chmod 600 {path}`.")
    if len(token) < 16 or not token.isprintable() or set(token) & set(' ;,"\\'):
        raise InvalidRequest(f"--token-file {path}: a token has at least 16 letters, digits and signs like - _ + / =.")
    return token


def newest_events(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the newest lines of the logs that this user may read, oldest first; *labels* of devices are by uuid."""
    lines: list[Line] = []
    for path in dict.fromkeys((events_path(), MACHINE_EVENTS)):
        with suppress(OSError):
            status = os.stat(path)
            lines += _newest_lines(path, (status.st_ino, status.st_size, status.st_mtime_ns))
    newest = sorted(lines, key=lambda line: line["time_unix_seconds"])[-_EVENTS:]
    return [events.to_row(line, labels) for line in newest]


@lru_cache(maxsize=2)
def _newest_lines(path: str, _version: tuple[int, int, int]) -> list[Line]:
    return decoded(read_log(path, _TAIL_BYTES))[0]
