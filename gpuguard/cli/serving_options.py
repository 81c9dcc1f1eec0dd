"""Where numbers are served, for `gpuguard metrics --serve` and `gpuguard daemon --metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from gpuguard.serving import Pages, Server

ADDRESS = "127.0.0.1:9835"


def add_expose_option(parser: argparse.ArgumentParser, name: str) -> None:
    """The option without which no other machine can reach us."""
    parser.add_argument(
        name,
        metavar="NAMES",
        nargs="?",
        const="",
        help="allow an address that other machines reach; NAMES: host names, with commas, by which they ask for us",
    )


def server_at(address: str, expose: str | None, pages: Pages) -> Server:
    """A server of *pages* at *address*; see add_expose_option.

    Raises:
        InvalidRequest: it cannot be served there.
    """
    from gpuguard.serving import Server, host_names, listen

    names = [name.strip() for name in (expose or "").split(",")]
    return Server(listen(address, exposed=expose is not None), pages, host_names(names))
