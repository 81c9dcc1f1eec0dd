"""`gpuguard policy backtest`: what a policy file would have done on recorded samples.

No devices, no claims and no daemon are needed, and nobody is touched.
"""

from __future__ import annotations

import argparse
import sys
import time

from gpuguard.cli.choice_options import quantity
from gpuguard.units import parse_duration
from gpuguard.views.text import json_text, neutralise, put


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the policy file")
    parser.add_argument(
        "--on",
        metavar="RECORDING",
        required=True,
        help="a file of `gpuguard record`, or CSV with a row per time, job and device",
    )
    parser.add_argument(
        "--longest-gap",
        metavar="DURATION",
        help="durations go on over pauses up to this long (default: 3 times the usual distance of samples)",
    )
    parser.add_argument("--each", action="store_true", help="show each step, not only their numbers")
    parser.add_argument("--json", action="store_true", help="one object for programs")


def main(args: argparse.Namespace) -> int:
    from gpuguard.policyfile import load_policies
    from gpuguard.rehearsals.rehearsal import backtest
    from gpuguard.rehearsals.scenario import accounts
    from gpuguard.rehearsals.series_file import people
    from gpuguard.rehearsals.tape_series import read_any
    from gpuguard.views.rehearsal import backtest_json, backtest_lines

    longest_gap = quantity("--longest-gap", args.longest_gap, parse_duration)
    recording = read_any(args.on)
    uid_of = people(recording.people)
    file = load_policies(args.file, trusted_owner=False, accounts=accounts(uid_of))
    if file.faults:
        put((line for fault in file.faults for line in fault.lines(neutralise(args.file))), sys.stderr)
        return 1
    zone = float(time.localtime(recording.start).tm_gmtoff) if recording.dated else 0.0
    result = backtest(recording, file.policies, uid_of, longest_gap=longest_gap, zone=zone)
    names = [policy.name for policy in file.policies]
    if args.json:
        put([json_text(backtest_json(result, recording, args.on, names))], sys.stdout)
    else:
        put(backtest_lines(result, recording, names, each=args.each), sys.stdout)
    return 0
