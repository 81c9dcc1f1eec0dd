"""Print the JSON Schema of what a command prints with --json, for programs that check or generate code.

gpuguard schema          which outputs have one, a line each
gpuguard schema who      that of `gpuguard who --json`

The schemas say the fields, their types and whether they can be null, as docs/json.md does; further fields may come with
any version.  For policy files: `gpuguard policy schema`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuguard.errors import InvalidRequest
from gpuguard.jsonio import loads
from gpuguard.views.text import put, put_json


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="of which command; without it their names")


def main(args: argparse.Namespace) -> int:
    schemas = loads(Path(__file__).with_name("schemas.json").read_bytes())
    if args.output is None:
        put([f"{name:<10} {schema['title']}" for name, schema in schemas.items()])
    elif args.output in schemas:
        put_json(schemas[args.output])
    else:
        raise InvalidRequest(f"there is no schema of {args.output!r}: choose one of {', '.join(schemas)}.")
    return 0
