"""Say for each GPU why `gpuguard run` with the same options would or would not take it, and what it would do now.

gpuguard explain -n 4 --min-free 20GiB
gpuguard explain --json --model H100

Exits with 0 when the request fits now, with 1 when it does not.  Claims nothing.
"""

from __future__ import annotations

import argparse
import os
import sys

from gpuguard.cli.choice_options import add_choice_options, request_of
from gpuguard.cli.options import add_source_options, backend_of, directory_of


def add_options(parser: argparse.ArgumentParser) -> None:
    add_choice_options(parser)
    parser.add_argument("--json", action="store_true", help="one object for programs: see docs/json.md")
    add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    from gpuguard.clusters import outer_devices
    from gpuguard.lock import look_closely
    from gpuguard.views import choice as view
    from gpuguard.views.text import json_text, put, style

    request = request_of(args)
    backend = backend_of(args)
    try:
        snapshot, choice = look_closely(backend, request, directory_of(args))
    finally:
        backend.close()
    outer = outer_devices(os.environ, snapshot.devices)
    limits = ". Note: ".join(filter(None, (outer.reason, outer.warning)))
    if args.json:
        put([json_text(view.to_json(snapshot, request, choice, limits))], sys.stdout)
    else:
        put(view.to_text(snapshot, request, choice, limits, paint=style(sys.stdout, os.environ)), sys.stdout)
    return 0 if choice.devices else 1
