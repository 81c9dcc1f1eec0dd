"""Runs the tests of a policy file: expected steps against the steps that the engine asks for.

Every step must be expected, and every expectation met, each by a step of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuguard.documents.rootfile import read_file
from gpuguard.documents.yaml_nodes import LARGEST, Fault
from gpuguard.errors import InvalidRequest
from gpuguard.model import Verdict
from gpuguard.policies.policy import Policy
from gpuguard.policies.view import View
from gpuguard.policyfile import PolicyFile, load_policies
from gpuguard.rehearsals.rehearsal import rehearse
from gpuguard.rehearsals.scenario import Expected, File, Test, accounts, read_tests, views
from gpuguard.rehearsals.series_file import people


@dataclass(frozen=True)
class Got:
    """A step that the engine asked for; *at* is seconds since the first sample."""

    at: float
    policy: str
    action: str
    users: tuple[str, ...]
    device: int | None
    why: str


@dataclass(frozen=True)
class Outcome:
    """One test: what is missing and what came unexpectedly; it passed when there is neither."""

    name: str
    got: tuple[Got, ...]
    missing: tuple[Expected, ...]
    surplus: tuple[Got, ...]

    @property
    def passed(self) -> bool:
        """Whether everything came as expected, and nothing else."""
        return not (self.missing or self.surplus)


@dataclass(frozen=True)
class Trial:
    """A file of tests.

    Args:
        path: of the tests.
        policies: path of the policy file, "" when that is not known.
        outcomes: of all tests; none when there is a fault.
        faults: of either file, with the path of that file.
    """

    path: str
    policies: str = ""
    outcomes: tuple[Outcome, ...] = ()
    faults: tuple[tuple[str, Fault], ...] = ()


def run_tests(path: str) -> Trial:
    """Run all tests of a file; never raises for what stands in it: see its faults."""
    try:
        text = read_file(path, LARGEST, only_root=False).decode()
    except OSError as error:
        return Trial(path, faults=((path, Fault(0, 0, f"the file cannot be read: {error.strerror or error}.")),))
    except UnicodeDecodeError as error:
        return Trial(path, faults=((path, Fault(0, 0, f"the file is not UTF-8: {error.reason}.")),))
    except InvalidRequest as error:
        return Trial(path, faults=((path, Fault(0, 0, *str(error).split("\n", 1))),))
    file, faults = read_tests(text)
    if file is None:
        return Trial(path, faults=tuple((path, fault) for fault in faults))
    uid_of = people()
    where = os.path.join(os.path.dirname(path), file.policies)
    policies = load_policies(where, trusted_owner=False, accounts=accounts(uid_of))
    if policies.faults:
        return Trial(path, where, faults=tuple((where, fault) for fault in policies.faults))
    unknown = tuple(_unknown_policies(file, policies))
    if unknown:
        return Trial(path, where, faults=tuple((path, fault) for fault in unknown))
    outcomes = []
    for test in file.tests:
        judged = [policy for policy in policies.policies if not test.of or policy.name in test.of]
        got = tuple(_steps(views(test, judged, uid_of), judged, test))
        outcomes.append(compare(test, got))
    return Trial(path, where, tuple(outcomes))


def _unknown_policies(file: File, policies: PolicyFile) -> Iterator[Fault]:
    known = {policy.name for policy in policies.policies}
    for test in file.tests:
        named = {*test.of, *(each.policy for each in test.expect if each.policy is not None)}
        for name in sorted(named - known):
            hint = f"Its policies: {', '.join(sorted(known))}."
            yield Fault(0, 0, f"test {test.name!r}: {file.policies} has no policy {name!r}.", hint)


def _steps(samples: Iterator[View], policies: Sequence[Policy], test: Test) -> Iterator[Got]:
    zone = float(time.localtime(test.starts).tm_gmtoff)
    for view, judgement in rehearse(samples, policies, interval=test.every, zone=zone):
        for verdict in judgement.verdicts:
            yield _got(verdict, view, view.snapshot.taken_at - test.starts)


def _got(verdict: Verdict, view: View, at: float) -> Got:
    finding = verdict.finding
    users = {each.user for each in finding.processes if each.user} | ({finding.subject.user} - {None})
    device = view.snapshot.device(finding.subject.device) if finding.subject.device else None
    names = tuple(sorted(user for user in users if user))
    return Got(at, verdict.policy, verdict.action, names, device.index if device else None, finding.why)


def compare(test: Test, got: Sequence[Got]) -> Outcome:
    """Give each expectation a step of its own; the one with most demands chooses first."""
    left = list(got)
    missing = []
    for expected in sorted(test.expect, key=lambda each: -sum(value is not None for value in vars(each).values())):
        found = next((each for each in left if _meets(each, expected, test.every)), None)
        if found is None:
            missing.append(expected)
        else:
            left.remove(found)
    return Outcome(test.name, tuple(got), tuple(sorted(missing, key=lambda each: each.at)), tuple(left))


def _meets(got: Got, expected: Expected, every: float) -> bool:
    return (
        expected.at <= got.at < expected.at + every
        and got.action == expected.action
        and expected.policy in (None, got.policy)
        and (expected.user is None or expected.user in got.users)
        and expected.device in (None, got.device)
    )
