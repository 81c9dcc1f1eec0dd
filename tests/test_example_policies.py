"""Each example of a policy file is right, says what it does in its own tests, and passes them."""

from __future__ import annotations

import pytest
from sources import ROOT

from gpuguard.backtest.csv_series import people
from gpuguard.backtest.unit_tests import accounts, run_tests
from gpuguard.policies.files.loader import load_policies

FOLDER = ROOT / "examples" / "policies"
POLICIES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.endswith("_test"))
NAMES = [path.stem for path in POLICIES]


def loaded(path):
    return load_policies(str(path), trusted_owner=False, accounts=accounts(people()))


def trial_of(path):
    return run_tests(str(path.with_name(f"{path.stem}_test.yaml")))


def test_there_are_examples():
    assert {"lab", "class", "team", "slurm"} <= set(NAMES)


@pytest.mark.parametrize("path", POLICIES, ids=NAMES)
def test_an_example_has_no_faults_and_gives_no_warning(path):
    file = loaded(path)

    assert [fault.lines(path.name) for fault in (*file.faults, *file.warnings)] == []


@pytest.mark.parametrize("path", POLICIES, ids=NAMES)
def test_an_example_passes_its_own_tests(path):
    trial = trial_of(path)

    assert trial.faults == ()
    assert [(outcome.name, outcome.missing, outcome.surplus) for outcome in trial.outcomes if not outcome.passed] == []


@pytest.mark.parametrize("path", POLICIES, ids=NAMES)
def test_every_policy_of_an_example_is_seen_to_act(path):
    acted = {got.policy for outcome in trial_of(path).outcomes for got in outcome.got}

    assert {policy.name for policy in loaded(path).policies} - acted == set()


@pytest.mark.parametrize("path", POLICIES, ids=NAMES)
def test_the_readme_tells_of_each_example(path):
    assert f"({path.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", POLICIES, ids=NAMES)
def test_an_example_harms_nobody_until_somebody_switches_it_on(path):
    assert not any(policy.enforce for policy in loaded(path).policies)
