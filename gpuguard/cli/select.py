"""Print the GPUs that `gpuguard run` would choose now, as 3,5.  Claims nothing.

gpuguard select -n 2 --min-free 20GiB
export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="$(gpuguard select -n 2 --vendor nvidia)" || exit
export ROCR_VISIBLE_DEVICES="$(gpuguard select -n 2 --vendor amd)" || exit
gpuguard select -n 2 --hosts a,b,c        which of these hosts has room, as in `b 3,5`: see docs/fleet.md

When there are not enough it prints nothing on standard output, says why on standard error, and exits with 1.
Between looking and starting another job may take them: `gpuguard run` claims them.  nvisel's options work too.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from dataclasses import replace

from gpuguard.cli import options
from gpuguard.clusters.device_variables import names_of
from gpuguard.errors import InvalidRequest
from gpuguard.locale import _
from gpuguard.lock import Allocator
from gpuguard.model import MODEL
from gpuguard.request import Request
from gpuguard.views.text import picked, put_json

_NVISEL = {
    "--min-free": ("-f", "--min-free-memory"),
    "--min-total": ("-t", "--min-total-memory"),
    "--max-util": ("-G", "--max-gpu-utilization"),
    "--max-memory-util": ("-M", "--max-memory-utilization"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    options.add_choice_options(parser, also=_NVISEL)
    group = parser.add_argument_group("how many, as nvisel has it")
    options.add_table(
        group,
        ("-c --min-count", "N", "at least so many"),
        ("-C --max-count", "N", "as many as there are, but at most so many"),
        (
            "-i --inherit",
            "LIST",
            "choose among these (without LIST: among those of CUDA_VISIBLE_DEVICES, which always happens)",
            {"nargs": "?", "const": ""},
        ),
        ("-S --no-sort", None, "the lowest index first, as --strategy first"),
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "-O", "--format", choices=("index", "uuid"), default="index", help="default: index; MIG instances go by uuid"
    )
    ends = output.add_mutually_exclusive_group()
    ends.add_argument("-s", "--sep", "--separator", metavar="TEXT", default=",", help="between two GPUs (default: ,)")
    ends.add_argument("--newline", dest="sep", action="store_const", const="\n", help="one GPU per line")
    ends.add_argument(
        "-0", "--null", dest="sep", action="store_const", const="\0", help="a NUL behind each, for xargs -0"
    )
    options.add_table(output, options.JSON)
    options.add_fleet_options(parser)
    options.add_source_options(parser)


def main(args: argparse.Namespace) -> int:
    request = _request(args)
    if options.has_hosts(args):
        from gpuguard.cli import fleet  # for ssh, which only other hosts need

        return fleet.select(args)
    with closing(options.backend_of(args)) as backend:
        devices = Allocator(backend, options.directory_of(args), [request]).chosen()
        if args.json:
            # The choice does not need the names, so they were not read.
            devices = backend.sample({MODEL}, [device.uuid for device in devices]).devices
    if args.json:
        put_json({"schema": 1, "devices": [picked(device, "index", "uuid", "name") for device in devices]})
    else:
        names = names_of(devices, by_uuid=args.format == "uuid")
        sys.stdout.write(args.sep.join(names) + ("\0" if args.sep == "\0" else "\n"))
    return 0


def _request(args: argparse.Namespace) -> Request:
    request = options.request_of(args)
    least, most = options.whole_number("-c", args.min_count), options.whole_number("-C", args.max_count)
    if args.num_gpus is not None and (least is not None or most is not None):
        raise InvalidRequest(_("-n says exactly how many: leave it out with -c (at least) or -C (at most)."))
    if args.inherit and args.devices:
        raise InvalidRequest(_("-i and --devices both name GPUs to choose among: use one of them."))
    if least is not None or most is not None:
        request = replace(request, num_gpus=1 if least is None else least, max_gpus=most)
    if args.inherit:
        request = replace(request, devices=options.selectors("-i", args.inherit))
    return replace(request, strategy="first") if args.no_sort else request
