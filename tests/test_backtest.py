"""Policies on recorded samples: the same engine as in the daemon, judged by hand on small recordings."""

import pytest

from gpuguard.backtest.backtest import Backtest, backtest
from gpuguard.backtest.recordings import people, read_recording
from gpuguard.backtest.unit_tests import accounts
from gpuguard.errors import InvalidRequest
from gpuguard.policy_files.loader import parse

IDLE = """
version: 1
policies:
  - name: idle
    when: {{idle: {{below: 0%}}}}
    for: {minutes}m
    {more}
    steps: {steps}
"""


def an_idle_policy(minutes=30, steps="[terminate]", more="cooldown: 0s"):
    return IDLE.format(minutes=minutes, steps=steps, more=more)


def a_recording(tmp_path, *jobs, header="pod,t_s,util,mem_mib", every=60, name="trace.csv"):
    """One row per minute and job; a job is (name, "utilization x times, ...", MiB)."""
    rows = [header]
    for job, course, memory in jobs:
        values = [v for part in course.split(",") for v in [part.split("x")[0].strip()] * int(part.split("x")[1])]
        rows += [f"{job},{place * every},{value},{memory}" for place, value in enumerate(values) if value != "-"]
    path = tmp_path / name
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def replayed(path, text, **options) -> Backtest:
    uid_of = people()
    file = parse(text, accounts=accounts(uid_of))
    assert file.faults == ()
    return backtest(read_recording(path), file.policies, uid_of, **options)


def ended(result):
    return [(one.job, one.time) for one in result.endings]


@pytest.mark.parametrize(
    ("course", "mib", "times"),
    [
        ("0 x 40", 1025, [1800.0]),
        ("50 x 5, 0 x 40", 2000, [2100.0]),  # half an hour after the first idle sample
        ("0 x 30, 1 x 1, 0 x 30", 2000, []),  # a sample that is not idle starts the time again
        ("0 x 40", 1024, []),  # it holds no more than a gibibyte
        (" x 100", 2000, []),  # nobody knows
        ("0 x 200", 2000, [1800.0]),  # once
    ],
)
def test_a_pod_is_ended_at_the_first_sample_half_an_hour_after_the_first_idle_one(tmp_path, course, mib, times):
    result = replayed(a_recording(tmp_path, ("a", course, mib)), an_idle_policy())

    assert ([act.time for act in result.acts], ended(result)) == (times, [("a", time) for time in times])


@pytest.mark.parametrize(("longest_gap", "time", "holes"), [(None, (24 + 11) * 60.0, 1), (300, 1800.0, 0)])
def test_no_time_counts_in_a_hole_that_is_not_to_be_looked_over(tmp_path, longest_gap, time, holes):
    path = a_recording(tmp_path, ("a", "0 x 20, - x 4, 0 x 40", 2000))

    result = replayed(path, an_idle_policy(), longest_gap=longest_gap)

    assert (ended(result), result.holes) == ([("a", time)], holes)


def test_regret_is_the_time_in_which_an_ended_job_worked_later(tmp_path):
    path = a_recording(tmp_path, ("a", "0 x 31, 0 x 9, 70 x 6", 2000), ("b", "0 x 31, 0 x 4", 2000))

    result = replayed(path, an_idle_policy())

    assert [(one.job, one.freed, one.lost) for one in result.endings] == [("a", 540.0, 360.0), ("b", 240.0, 0.0)]
    assert result.held == (46 + 35) * 60


def test_a_device_with_next_to_nothing_on_it_is_not_held(tmp_path):
    path = a_recording(tmp_path, ("a", "0 x 40", 100), ("b", "0 x 10", 2000))

    assert replayed(path, an_idle_policy()).held == 600.0


def test_a_job_that_two_policies_end_is_ended_by_the_first(tmp_path):
    path = a_recording(tmp_path, ("a", "0 x 40, 50 x 5", 2000))
    second = "  - {name: also, when: {idle: {below: 1%}}, for: 30m, mode: enforce, steps: [terminate]}\n"

    result = replayed(path, an_idle_policy() + second)

    assert (len(result.acts), len(result.endings)) == (2, 1)


def test_the_breaker_counts_the_jobs_of_one_machine_together(tmp_path):
    jobs = [(f"job{n},server,{n},user{n}", "0 x 40", 2**31) for n in range(4)]
    path = a_recording(tmp_path, *jobs, header="job,host,device,user,time_seconds,utilization_percent,memory_bytes")

    result = replayed(path, an_idle_policy())

    assert (result.endings, result.notes["breaker"] > 0) == ((), True)


@pytest.mark.parametrize(
    ("column", "cells", "more"),
    [
        ("kind", ("interactive", "batch"), "except: {kinds: [interactive]}"),
        ("kind", ("container", ""), "except: {kinds: [container]}"),
        ("user", ("alice", "bob"), "only: {users: [bob]}"),
        ("groups", ("staff admins", "students"), "only: {groups: [students]}"),
    ],
)
def test_a_recording_may_tell_what_a_job_and_its_user_are(tmp_path, column, cells, more):
    jobs = [(f"job{n},{n},{cell}", "0 x 40", 2**31) for n, cell in enumerate(cells)]
    path = a_recording(tmp_path, *jobs, header=f"job,device,{column},time_seconds,utilization_percent,memory_bytes")

    assert [one.job for one in replayed(path, an_idle_policy(more=more)).endings] == ["job1"]


def test_without_groups_anybody_may_be_in_an_exempted_one(tmp_path):
    path = a_recording(tmp_path, ("a", "0 x 40", 2000))

    result = replayed(path, an_idle_policy(more="except: {groups: [staff]}"))

    assert (result.endings, result.notes["exempt"]) == ((), 40)


def test_a_job_on_two_devices_is_ended_on_both(tmp_path):
    jobs = [(f"one,{n},alice", "0 x 40", 2**31) for n in (0, 1)]
    path = a_recording(tmp_path, *jobs, header="job,device,user,time_seconds,utilization_percent,memory_bytes")

    result = replayed(path, an_idle_policy())

    assert ended(result) == [("one", 1800.0)]
    assert result.endings[0].freed == 2 * 9 * 60


def test_samples_of_one_look_may_come_a_moment_apart(tmp_path):
    header = "job,device,time_seconds,utilization_percent,memory_bytes"
    rows = [f"j{n},{n},{t * 60 + n},0,{2**31}" for t in range(40) for n in (0, 1)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join([header, *rows]))

    assert [one.time for one in replayed(str(path), an_idle_policy()).endings] == [1800.0, 1800.0]


def test_rules_about_claims_find_nothing_where_the_claims_are_not_known(tmp_path):
    path = a_recording(tmp_path, ("a", "0 x 40", 2000))
    text = "version: 1\npolicies: [{name: p, when: {unclaimed: {}}, steps: [warn]}]"

    assert replayed(path, text).acts == ()


def test_the_command_names_the_rules_that_a_table_cannot_judge(tmp_path, gpuguard):
    path, policy = a_recording(tmp_path, ("a", "0 x 40", 2000)), tmp_path / "p.yaml"
    policy.write_text(
        "version: 1\npolicies:\n"
        "  - {name: thieves, when: {unclaimed: {}}, steps: [warn]}\n"
        "  - {name: hot, when: {temperature: {above: 90C}}, steps: [log]}\n"
        "  - {name: lazy, when: {idle: {below: 5%}}, for: 30m, steps: [warn]}\n"
    )
    text = gpuguard("policy", "backtest", str(policy), "--on", path).stdout
    found = gpuguard.json("policy", "backtest", str(policy), "--on", path)

    assert "thieves  unclaimed    it does not tell who had claimed what" in text
    assert [row["policy"] for row in found["not_judged"]] == ["thieves", "hot"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pod,util\na,0\n", "time_seconds"),
        ("t_s,util\n0,0\n", "'job'"),
        ("pod,t_s,util\na,0,zero\n", ":2: utilization"),
        ("pod,t_s,util\na,0,nan\n", ":2: utilization"),
        ("pod,t_s,util\na,,0\n", ":2: the time"),
        ("pod,t_s,mem_mib\na,0,-1\n", ":2: memory"),
        ("pod,t_s,util\na,0,0\n", "two samples"),
        ("pod,t_s,util\na,1700000000000,0\n", ":2: the time .* not in seconds"),
        ("pod,t_s,util,utilization_percent\na,0,0,0\n", ":1: two columns"),
        ("pod,t_s,util,kind\na,0,0,huge\n", ":2: kind: 'huge'"),
        ("", "time_seconds"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "bad.csv"
    path.write_text(text)

    with pytest.raises(InvalidRequest, match=complaint):
        read_recording(str(path))


def test_the_command_says_what_it_would_cost_to_people_and_to_programs(tmp_path, gpuguard):
    path = a_recording(tmp_path, ("a", "0 x 40, 70 x 60", 2000), ("b", "50 x 50", 2000))
    policy = tmp_path / "p.yaml"
    policy.write_text(an_idle_policy())

    done = gpuguard("policy", "backtest", str(policy), "--on", path, "--each")
    found = gpuguard.json("policy", "backtest", str(policy), "--on", path)

    assert done.returncode == 0, done.stderr
    assert "idle ends 1 of 2 jobs" in done.stdout
    assert "1 of the 1 worked again later (100.0%), and 1.0 GPU-hours of their work would be lost." in done.stdout
    assert "30m" in done.stdout
    assert (found["schema"], found["jobs"], found["interval_seconds"]) == (1, 2, 60.0)
    assert found["policies"][0]["worked_again_jobs"] == 1
    assert found["policies"][0]["lost_active_gpu_seconds"] == 3600.0
    assert found["acts"][0]["time_seconds"] == 1800.0


@pytest.mark.parametrize(("policy", "csv", "status"), [("version: 1\n", "good", 1), (an_idle_policy(), "missing", 2)])
def test_a_file_with_a_fault_ends_the_command(tmp_path, gpuguard, policy, csv, status):
    path = a_recording(tmp_path, ("a", "0 x 40", 2000)) if csv == "good" else str(tmp_path / "none.csv")
    (tmp_path / "p.yaml").write_text(policy)

    assert gpuguard("policy", "backtest", str(tmp_path / "p.yaml"), "--on", path).returncode == status
