"""`gpuguard policy test`: run the unit tests that stand beside a policy file."""

from __future__ import annotations

import argparse
import sys

from gpuguard.views.text import json_text, put


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="+", help="tests in YAML, like lab_test.yaml beside lab.yaml")
    parser.add_argument("--json", action="store_true", help="one object for programs")


def main(args: argparse.Namespace) -> int:
    from gpuguard.rehearsals.trial import run_tests
    from gpuguard.views.trial import trial_json, trial_lines

    trials = [run_tests(path) for path in args.file]
    if args.json:
        put([json_text({"schema": 1, "files": [trial_json(trial) for trial in trials]})], sys.stdout)
    else:
        put((line for trial in trials for line in trial_lines(trial)), sys.stdout)
    if any(trial.faults for trial in trials):
        return 2
    return int(not all(outcome.passed for trial in trials for outcome in trial.outcomes))
