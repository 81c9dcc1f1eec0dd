"""Check, explain and rehearse policy files, and show the language that they are written in.

gpuguard policy check policy.yaml        all faults at once, with line, column and advice
gpuguard policy explain policy.yaml      what would happen to whom, and when, in sentences
gpuguard policy test policy_test.yaml    run the unit tests beside a policy file
gpuguard policy backtest policy.yaml --on week.csv    who would have been hit, on recorded samples
gpuguard policy rules                    every rule and action with its keys
gpuguard policy schema > schema.json     for the editor
"""

from __future__ import annotations

import argparse
import sys

from gpuguard.cli import policy_backtest, policy_test
from gpuguard.cli.actions_of import Row, add_actions
from gpuguard.errors import InvalidRequest
from gpuguard.units import format_count
from gpuguard.views.text import json_text, neutralise, put

SCHEMA = 1
MOST = 50  # faults that are shown at a time: nobody reads more


def add_options(parser: argparse.ArgumentParser) -> None:
    add_actions(parser, ACTIONS)


def main(args: argparse.Namespace) -> int:
    return ACTIONS[args.action].main(args)


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the policy file")
    parser.add_argument("--strict", action="store_true", help="the answer is no for warnings, too")
    parser.add_argument(
        "--installed", action="store_true", help="check too that only root can change it, as a daemon of root demands"
    )
    parser.add_argument("--json", action="store_true", help="one object for programs")


def _check(args: argparse.Namespace) -> int:
    from gpuguard.notify import problems
    from gpuguard.policyfile import load_policies

    file = load_policies(args.file, trusted_owner=args.installed)
    here = list(problems(file.notify))
    bad = bool(file.faults) or (args.strict and bool(file.warnings or here))
    if args.json:
        content = {
            "schema": SCHEMA,
            "path": args.file,
            "ok": not file.faults,
            "policies": [policy.name for policy in file.policies],
            "faults": [vars(fault) for fault in file.faults],
            "warnings": [vars(fault) for fault in file.warnings],
            "notify_problems": here,
        }
        put([json_text(content)], sys.stdout)
        return int(bad)
    path = neutralise(args.file)
    put((line for fault in file.faults[:MOST] for line in fault.lines(path)), sys.stdout)
    put(
        (f"warning: {line}" if not n else line for w in file.warnings for n, line in enumerate(w.lines(path))),
        sys.stdout,
    )
    put((neutralise(f"warning: {path}: notify: {problem}") for problem in here), sys.stdout)
    if file.faults:
        first = f", the first {MOST} are shown" if len(file.faults) > MOST else ""
        put([f"{path}: {format_count(len(file.faults), 'fault')}{first}."], sys.stdout)
    else:
        enforced = sum(policy.enforce for policy in file.policies)
        put([f"{path}: ok, {format_count(len(file.policies), 'policy', 'policies')}, {enforced} enforced."], sys.stdout)
    return int(bad)


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the policy file")


def _explain(args: argparse.Namespace) -> int:
    from gpuguard.policyfile import load_policies
    from gpuguard.views.policy import sentences

    file = load_policies(args.file, trusted_owner=False)
    path = neutralise(args.file)
    if file.faults:
        put((line for fault in file.faults[:MOST] for line in fault.lines(path)), sys.stderr)
        return 1
    put(map(neutralise, sentences(file)), sys.stdout)
    return 0


def _rules_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="*", help="only of these rules, actions or parts of a policy")
    parser.add_argument("--json", action="store_true", help="one object for programs")


def _rules(args: argparse.Namespace) -> int:
    from gpuguard.documents.decoding import unknown
    from gpuguard.views.policy_language import SECTIONS, describe, language_json

    if args.json:
        put([json_text(language_json())], sys.stdout)
        return 0
    known = [name for nouns in SECTIONS.values() for name in nouns]
    for name in args.name:
        if name not in known:
            raise InvalidRequest("  ".join(unknown(name, known, "rule, action or part of a policy")))
    put(describe(args.name), sys.stdout)
    return 0


def _schema_options(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def _schema(args: argparse.Namespace) -> int:
    from gpuguard.views.policy_language import json_schema

    put([json_text(json_schema())], sys.stdout)
    return 0


ACTIONS = {
    "check": Row("say whether a policy file is right, and everything that is wrong with it", _check_options, _check),
    "explain": Row("say in sentences what a policy file does to whom, and when", _explain_options, _explain),
    "test": Row("run unit tests of a policy file", policy_test.add_options, policy_test.main),
    "backtest": Row(
        "say what a policy file would have done on recorded samples", policy_backtest.add_options, policy_backtest.main
    ),
    "rules": Row("show every rule, action and key of the language", _rules_options, _rules),
    "schema": Row("print a JSON Schema (draft 2020-12) for editors", _schema_options, _schema),
}
