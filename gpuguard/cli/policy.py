"""Check, explain and rehearse policy files, and show the language that they are written in.

gpuguard policy check policy.yaml        all faults at once, with line, column and advice
gpuguard policy explain policy.yaml      what would happen to whom, and when, in sentences
gpuguard policy show                     the same of the policies that are in force here, for everybody
gpuguard policy show --me                those that can reach you, and what they have against you now
gpuguard policy test policy_test.yaml    run the unit tests beside a policy file
gpuguard policy backtest policy.yaml --on week.csv    who would have been hit, on recorded samples
gpuguard policy rules                    every rule and action with its keys
gpuguard policy schema > schema.json     for the editor
"""

from __future__ import annotations

import argparse
import grp
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict

from gpuguard.backtest.backtest import backtest, blind_spots
from gpuguard.backtest.recordings import people, read_recording
from gpuguard.backtest.unit_tests import accounts, run_tests
from gpuguard.claims.daemon_client import StatusReply, query_daemon
from gpuguard.claims.directory import LockDirectory, daemon_files
from gpuguard.cli.options import SubcommandRow, add_source_options, add_table, directory_of, quantity
from gpuguard.cli.progress import progress
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.notify.sender import problems
from gpuguard.policy_files import last_good
from gpuguard.policy_files.loader import load_policies
from gpuguard.sanitize import neutralise
from gpuguard.units import format_count, parse_duration
from gpuguard.views.backtest import backtest_json, backtest_lines, trial_json, trial_lines
from gpuguard.views.policy import reaching, sentences, show, status_lines
from gpuguard.views.policy_language import KEYED, SECTIONS, describe, json_schema, key_texts, language_json
from gpuguard.views.text import put, put_json
from gpuguard.yaml_files.decoder import unknown

_JSON = ("--json", None, "one object for programs")
_FILE = ("file", "FILE", "the policy file")
MOST = 50  # faults that are shown at a time, because no reader reads more


def _backtest(args: argparse.Namespace) -> int:
    longest_gap = quantity("--longest-gap", args.longest_gap, parse_duration)
    with progress(_("reading {on}").format(on=args.on)) as advance:
        recording = read_recording(args.on, advance)
    uid_of = people(recording.people)
    file = load_policies(args.file, trusted_owner=False, accounts=accounts(uid_of))
    if file.faults:
        put((line for fault in file.faults for line in fault.lines(neutralise(args.file))), sys.stderr)
        return 1
    zone = float(time.localtime(recording.start).tm_gmtoff) if recording.dated else 0.0
    with progress(_("judging {on}").format(on=args.on)) as advance:
        result = backtest(
            recording,
            file.policies,
            uid_of,
            longest_gap=longest_gap,
            zone=zone,
            advance=advance,
            desktop_memory=file.desktop_memory,
        )
    names, blind = [policy.name for policy in file.policies], blind_spots(recording, file.policies)
    if args.json:
        put_json(backtest_json(result, recording, args.on, names, blind))
    else:
        put(backtest_lines(result, recording, names, blind, each=args.each), sys.stdout)
    return 0


def _test(args: argparse.Namespace) -> int:
    trials = [run_tests(path) for path in args.file]
    if args.json:
        put_json({"schema": 1, "files": [trial_json(trial) for trial in trials]})
    else:
        put((line for trial in trials for line in trial_lines(trial)), sys.stdout)
    if any(trial.faults for trial in trials):
        return 2
    return int(not all(outcome.passed for trial in trials for outcome in trial.outcomes))


def _check(args: argparse.Namespace) -> int:
    file = load_policies(args.file, trusted_owner=args.installed)
    here = list(problems(file.notify))
    bad = bool(file.faults) or (args.strict and bool(file.warnings or here))
    if args.json:
        content = {
            "schema": 1,
            "path": args.file,
            "ok": not file.faults,
            "policies": [policy.name for policy in file.policies],
            "faults": [vars(fault) for fault in file.faults],
            "warnings": [vars(fault) for fault in file.warnings],
            "notify_problems": here,
        }
        put_json(content)
        return int(bad)
    path = neutralise(args.file)
    lines = [line for fault in file.faults[:MOST] for line in fault.lines(path)]
    for warning in file.warnings:
        first, *rest = warning.lines(path)
        lines += [_("warning: {first}").format(first=first), *rest]
    lines += [
        neutralise(_("warning: {path}: notify: {problem}").format(path=path, problem=translated(problem)))
        for problem in here
    ]
    if file.faults:
        shown = _(", the first {most} are shown").format(most=MOST) if len(file.faults) > MOST else ""
        lines.append(
            _("{path}: {count}{shown}.").format(path=path, count=format_count(len(file.faults), "fault"), shown=shown)
        )
    else:
        enforced = sum(policy.enforce for policy in file.policies)
        lines.append(
            _("{path}: ok, {count}, {enforced} enforced.").format(
                path=path, count=format_count(len(file.policies), "policy", "policies"), enforced=enforced
            )
        )
    put(lines, sys.stdout)
    return int(bad)


def _explain(args: argparse.Namespace) -> int:
    file = load_policies(args.file, trusted_owner=False)
    path = neutralise(args.file)
    if file.faults:
        put((line for fault in file.faults[:MOST] for line in fault.lines(path)), sys.stderr)
        return 1
    put(map(neutralise, sentences(file)), sys.stdout)
    return 0


def _own_groups() -> Iterator[str]:
    for gid in {os.getegid(), *os.getgroups()}:
        with suppress(KeyError):  # the group has no name
            yield grp.getgrgid(gid).gr_name


def policies_in_force(directory: LockDirectory) -> last_good.PoliciesInForce:
    """Return what the daemon of *directory* judges by.  Raises GpuguardError."""
    try:
        files = daemon_files(directory)
        return last_good.in_force(files.file(last_good.POLICIES), files.owners())
    except (OSError, ValueError) as error:
        raise GpuguardError(
            _("the daemon has no policies in force, or is of another version: {error}.").format(error=error)
        ) from error


def not_sparing(directory: LockDirectory) -> list[str]:
    """Return the names of the policies that go on against this user, who has asked for `gpuguard keep`."""
    if os.geteuid() == 0:
        return []  # what root keeps is spared by all
    file = policies_in_force(directory).file
    reached = reaching(file, os.getuid(), frozenset(_own_groups()))
    return [policy.name for policy in file.policies if policy.name in reached and not policy.may_be_kept]


def _show(args: argparse.Namespace) -> int:
    directory = directory_of(args)
    status = query_daemon(directory, {"do": "status"}, StatusReply)
    known = policies_in_force(directory)
    uid, groups = os.getuid(), frozenset(_own_groups())
    names = reaching(known.file, uid, groups) if args.me else None
    if args.json:
        policies = [policy.name for policy in known.file.policies if names is None or policy.name in names]
        content = {"schema": 1, "path": known.file.path, "enforcing": known.enforcing, "policies": policies}
        standing = asdict(status)["standing"] if args.me else ()
        put_json(content | {"only_warn": sorted(known.only_warn), "standing": standing})
        return 0
    lines = [*show(known, names)]
    if args.me:
        if uid in known.file.protected.uids_of({uid}, {uid: groups}):
            lines += ["", _("The file protects you: you are warned, and nothing is taken from you.")]
        lines += ["", *status_lines(status, time.time())]
    put(map(neutralise, lines), sys.stdout)
    return 0


def _rules(args: argparse.Namespace) -> int:
    if args.json:
        put_json(language_json())
        return 0
    known = [name for nouns in SECTIONS.values() for name in nouns]
    known += [key for noun in KEYED.values() for key in key_texts(noun)]
    for name in args.name:
        if name not in known:
            raise InvalidRequest("  ".join(unknown(name, known, _("rule, action or part of a policy"))))
    put(describe(args.name), sys.stdout)
    return 0


def _schema(_: argparse.Namespace) -> int:
    put_json(json_schema())
    return 0


def _file_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, _FILE)


def _check_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        _FILE,
        ("--strict", None, "the answer is no for warnings, too"),
        ("--installed", None, "check too that only root can change it, as a daemon of root demands"),
        _JSON,
    )


def _test_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, ("file", "FILE", "tests in YAML, like lab_test.yaml beside lab.yaml", {"nargs": "+"}), _JSON)


def _backtest_options(parser: argparse.ArgumentParser) -> None:
    add_table(
        parser,
        _FILE,
        (
            "--on",
            "RECORDING",
            "a file of `gpuguard record`, or CSV with a row per time, job and GPU",
            {"required": True},
        ),
        (
            "--longest-gap",
            "DURATION",
            "durations go on over pauses up to this long (default: 3 times the usual distance of samples)",
        ),
        ("--each", None, "show each step, not only their numbers"),
        _JSON,
    )


def _rules_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, ("name", "NAME", "only of these rules, actions or parts of a policy", {"nargs": "*"}), _JSON)


def _show_options(parser: argparse.ArgumentParser) -> None:
    add_table(parser, ("--me", None, "only those that can reach you, and what they have against you now"), _JSON)
    add_source_options(parser)


ACTIONS = {
    "check": SubcommandRow(
        "say whether a policy file is right, and everything that is wrong with it", _check_options, _check
    ),
    "explain": SubcommandRow("say in sentences what a policy file does to whom, and when", _file_options, _explain),
    "show": SubcommandRow("say in sentences which policies are in force on this machine", _show_options, _show),
    "test": SubcommandRow("run unit tests of a policy file", _test_options, _test),
    "backtest": SubcommandRow(
        "say what a policy file would have done on recorded samples", _backtest_options, _backtest
    ),
    "rules": SubcommandRow("show every rule, action and key of the language", _rules_options, _rules),
    "schema": SubcommandRow("print a JSON Schema (draft 2020-12) for editors", lambda parser: None, _schema),
}
