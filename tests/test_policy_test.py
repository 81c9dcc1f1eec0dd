"""Unit tests of policies: what they find, and what they say when something else came."""

import json

import pytest
from sources import ROOT

from gpuguard.backtest.recordings import people
from gpuguard.backtest.unit_tests import accounts, read_tests, run_tests, series_of
from gpuguard.errors import InvalidRequest
from gpuguard.policy_files.loader import load_policies
from gpuguard.units import parse_percent

POLICY = """
version: 1
policies:
  - name: idle
    when: {idle: {below: 5%}}
    for: 1h
    steps: [warn, {after: 30m, do: terminate}]
  - name: full
    when: {memory: {above: 30GiB}}
    for: 5m
    steps: [log]
"""


def write(tmp_path, tests, policy=POLICY):
    (tmp_path / "lab.yaml").write_text(policy)
    path = tmp_path / "lab_test.yaml"
    path.write_text(f"policies: lab.yaml\ntests:\n{tests}")
    return str(path)


def a_test(**keys):
    facts = {"name": "t", "for": "3h", "processes": "[{user: alice}]", **keys}
    return "  - {" + ", ".join(f"{key}: {value}" for key, value in facts.items()) + "}\n"


BOTH = "[{at: 1h, policy: idle, action: warn, user: alice, device: 0}, {at: 90m, action: terminate}]"


def test_a_step_that_does_not_come_is_missing(tmp_path):
    outcome = run_tests(write(tmp_path, a_test(expect=BOTH, devices='[{utilization: "0% x70, 50%"}]'))).outcomes[0]

    assert [each.action for each in outcome.missing] == ["terminate"]
    assert outcome.surplus == ()


@pytest.mark.parametrize(
    "keys",
    [
        {"expect": "[{at: 1h, action: warn}]"},
        {"expect_none": "true"},
        {"expect": "[{at: 59m, action: warn}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 61m, action: warn}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 1h, action: warn, device: 1}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 1h, action: warn, user: bob}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 1h, action: warn, policy: full}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 1h, action: notify}, {at: 90m, action: terminate}]"},
        {"expect": "[{at: 1h, action: warn}, {at: 1h, action: warn}, {at: 90m, action: terminate}]"},
    ],
)
def test_a_step_that_nobody_expected_fails_the_test(tmp_path, keys):
    outcome = run_tests(write(tmp_path, a_test(**keys))).outcomes[0]

    assert not outcome.passed


@pytest.mark.parametrize(
    ("allowed", "found"), [("", True), ("desktop_memory: 1GiB\n", True), ("desktop_memory: 4GiB\n", False)]
)
def test_the_file_says_what_the_desktop_of_a_user_may_hold(tmp_path, allowed, found):
    policy = "version: 1\npolicies: [{name: bare, when: {unclaimed: {}}, for: 5m, steps: [warn]}]\n" + allowed
    drawing = "[{user: alice, kind: graphics, memory: 3GiB}]"
    a_while = {"for": "10m", "processes": drawing, "expect": "[{at: 5m, action: warn}]"}
    path = write(tmp_path, a_test(**a_while), policy)

    assert run_tests(path).outcomes[0].passed is found


FULL = {"processes": "[{user: alice, memory: 40GiB}]", "of": "[full]", "expect": "[{at: 5m, action: log}]"}


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({"expect": BOTH}, ""),
        ({"expect": BOTH, "for": "12h"}, ""),
        ({**FULL, "for": "7m"}, ""),
        ({"processes": "[{user: alice, ends: 70m}]", "expect": "[{at: 1h, action: warn}]"}, ""),
        ({"processes": "[{user: alice, is: container}]", "expect_none": "true"}, "    except: {kinds: [container]}"),
    ],
    ids=["as expected", "after terminate it is gone", "other policies", "it ends", "a container is spared"],
)
def test_steps_that_come_as_expected_pass(tmp_path, keys, policy):
    path = write(tmp_path, a_test(**keys), POLICY.replace("for: 1h", f"for: 1h\n{policy}"))

    assert [outcome.passed for outcome in run_tests(path).outcomes] == [True]


def test_time_that_was_used_before_counts_against_a_quota(tmp_path):
    policy = """
version: 1
policies: [{name: hours, when: {quota: {gpu_hours: 100h, within: 7d}}, for: 5m, steps: [warn]}]
"""
    over = a_test(gpu_hours="{alice: 101h}", expect="[{at: 5m, action: warn, user: alice}]").replace("3h", "7m")
    under = a_test(gpu_hours="{alice: 99h}", expect_none="true")

    assert [test.passed for test in run_tests(write(tmp_path, over + under, policy)).outcomes] == [True, True]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0% x3", (0.0, 0.0, 0.0)),
        ("0%, 90% x2", (0.0, 90.0, 90.0)),
        ("_ x2, 5%", (None, None, 5.0)),
        ("10%..40% x4", (10.0, 20.0, 30.0, 40.0)),
    ],
)
def test_series_are_written_shortly(text, values):
    assert series_of(parse_percent)(text).values == values


@pytest.mark.parametrize("text", ["0", "0% x0", "x3", "0% x99999", "0%..  x3", ""])
def test_a_series_that_is_none_is_refused(text):
    with pytest.raises(InvalidRequest):
        series_of(parse_percent)(text)


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        (a_test(), "exactly one of expect"),
        (a_test(expect_none="true", expect=BOTH), "exactly one of expect"),
        (a_test(expect="[{at: 1h, action: wran}]"), "no action"),
        (a_test(expect_none="true", processes="[{user: a, devices: [1]}]"), "no GPU 1"),
        (a_test(expect_none="true", proceses="[]"), "Did you mean 'processes'"),
        (a_test(expect_none="true", every="0s"), "out of range"),
        (a_test(expect_none="true", **{"for": "9000h"}), "samples"),
        (a_test(expect_none="true", starts="yesterday"), "no time"),
        (a_test(expect_none="true", processes="[{user: a, command: 'a \"b'}]"), "no command line"),
        (a_test(expect_none="true", devices='[{utilization: "0% x15000, 1% x15000"}]'), "samples"),
    ],
)
def test_a_file_with_a_fault_says_where_and_what_to_write(tests, complaint):
    file, faults = read_tests(f"policies: lab.yaml\ntests:\n{tests}")

    assert file is None
    assert all(fault.line for fault in faults)
    assert complaint in " ".join(f"{fault.text} {fault.hint}" for fault in faults)


def test_the_command_answers_yes(tmp_path, gpuguard):
    done = gpuguard("policy", "test", write(tmp_path, a_test(expect=BOTH)))

    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "ok      t")


def test_a_policy_that_the_daemon_may_judge_otherwise_is_warned_of(tmp_path, gpuguard):
    """A window of 20 s fired in the test, and never in the daemon, which looks every 10 s."""
    policy = "version: 1\npolicies:\n  - {name: c, when: {age: {claim_without_process_above: 20s}}, steps: [log]}\n"
    done = gpuguard("policy", "test", write(tmp_path, a_test(expect_none="true", **{"for": "10s"}), policy))

    assert done.returncode == 0, done.stdout
    assert "warning: " in done.stdout and "20s is shorter than 10 times the 10s between two samples" in done.stdout


def test_the_sample_of_the_documentation_passes_with_the_example_that_it_names(tmp_path):
    sample = (ROOT / "docs" / "rehearsal.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "lab.yaml").write_text((ROOT / "examples" / "policies" / "lab.yaml").read_text())
    (tmp_path / "lab_test.yaml").write_text(sample)

    assert [outcome.passed for outcome in run_tests(str(tmp_path / "lab_test.yaml")).outcomes] == [True]


def test_a_failure_shows_what_was_expected_and_what_came_with_times(tmp_path, gpuguard):
    done = gpuguard("policy", "test", write(tmp_path, a_test(expect="[{at: 2h, action: warn, user: bob}]")))

    assert done.returncode == 1
    assert "FAILED  t\n" in done.stdout
    assert "expected  at 2h: warn for bob\n" in done.stdout
    assert "got       at 1h: warn by idle for alice on GPU 0, because GPU 0 is idle" in done.stdout


@pytest.mark.parametrize(
    ("tests", "policy"),
    [
        (a_test(), POLICY),
        (a_test(expect_none="true"), "version: 2\n"),
        (a_test(expect_none="true", of="[gone]"), POLICY),
        ("  - {name: [}", POLICY),
    ],
)
def test_faults_of_either_file_are_not_failures_of_tests(tmp_path, gpuguard, tests, policy):
    assert gpuguard("policy", "test", write(tmp_path, tests, policy)).returncode == 2


def test_the_command_speaks_to_programs(tmp_path, gpuguard):
    path = write(tmp_path, a_test(expect="[{at: 2h, action: warn}]"))
    found = json.loads(gpuguard("policy", "test", path, "--json").stdout)

    outcome = found["files"][0]["tests"][0]
    assert (found["schema"], outcome["passed"], outcome["missing"][0]["at_seconds"]) == (1, False, 7200.0)
    assert [each["at_seconds"] for each in outcome["got"]] == [3600.0, 5400.0]


FOLDER = ROOT / "examples" / "policies"
POLICIES = sorted(path for path in FOLDER.glob("*.yaml") if not path.stem.endswith("_test"))
NAMES = [path.stem for path in POLICIES]
assert {"lab", "class", "team", "slurm"} <= set(NAMES)


def loaded(path):
    return load_policies(str(path), trusted_owner=False, accounts=accounts(people()))


every_example = pytest.mark.parametrize("path", POLICIES, ids=NAMES)


@every_example
def test_an_example_has_no_faults_gives_no_warning_and_harms_nobody_until_it_is_switched_on(path):
    file = loaded(path)

    assert [fault.lines(path.name) for fault in (*file.faults, *file.warnings)] == []
    assert not any(policy.enforce for policy in file.policies)


@every_example
def test_an_example_passes_its_own_tests_in_which_each_of_its_policies_acts(path):
    trial = run_tests(str(path.with_name(f"{path.stem}_test.yaml")))

    assert trial.faults == ()
    assert [(outcome.name, outcome.missing, outcome.surplus) for outcome in trial.outcomes if not outcome.passed] == []
    acted = {got.policy for outcome in trial.outcomes for got in outcome.got}
    assert {policy.name for policy in loaded(path).policies} - acted == set()


@every_example
def test_the_readme_tells_of_each_example(path):
    assert f"({path.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")
