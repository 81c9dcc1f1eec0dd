"""What the daemon writes down of each claim when it ends, so that root's report has the jobs of all users."""

import json
from dataclasses import replace
from typing import Any

from builders import GIB, a_claim_record, a_device, a_snapshot
from claimholders import a_holder
from daemons import a_daemon
from nodes import eventually

from gpuguard.claims.directory import lock_directory
from gpuguard.daemon.jobs_seen import JobsSeen
from gpuguard.model import Gap

CLAIM = a_claim_record(since=1_700_000_000.0 - 60)


def seen(*samples: Any) -> list[dict[str, Any]]:
    """The facts of the lines, with the id of the claim, of samples 10 s apart."""
    jobs = JobsSeen()
    taken = [replace(one, clock=10_000.0 + 10 * n, taken_at=1_700_000_000.0 + 10 * n) for n, one in enumerate(samples)]
    lines = [line for sample in taken for line in jobs.look(sample)]
    return [dict(line.facts) | {"claim": line.claim, "user": line.user, "command": line.message} for line in lines]


def using(memory: int, energy: float, claim: Any = CLAIM) -> Any:
    return a_snapshot(a_device(0, memory_used=memory, utilization=50.0, total_energy=energy), claims=(claim,))


GONE = a_snapshot(a_device(0, memory_used=0))


def test_a_claim_that_ends_has_its_line_with_its_numbers():
    [line] = seen(using(GIB, 0.0), using(9 * GIB, 1000.0), using(2 * GIB, 3000.0), GONE, GONE)

    assert (line["claim"], line["user"], line["owner_uid"], line["command"]) == (
        "a1b2c3",
        "alice",
        1001,
        "python train.py",
    )
    assert (line["wall_time_seconds"], line["peak_memory_bytes"]) == (90.0, 9 * GIB)
    assert (line["mean_utilization_percent"], line["energy_joules"]) == (50.0, 3000.0)


def test_while_the_claims_cannot_be_read_none_ends():
    unread = replace(GONE, gaps=(Gap(None, "claims", "no permission"),))

    assert seen(using(GIB, 0.0), unread, unread) == []
    assert len(seen(using(GIB, 0.0), unread, GONE)) == 1


def test_of_a_claim_that_shares_its_gpu_only_the_time_is_known():
    [line] = seen(*[using(GIB, 0.0, replace(CLAIM, memory=GIB))] * 2, GONE)

    assert (line["wall_time_seconds"], line["peak_memory_bytes"], line["energy_joules"]) == (80.0, None, None)


def test_claims_that_come_and_go_without_end_do_not_fill_the_log():
    jobs, lines = JobsSeen(), list[Any]()
    for number in range(2000):
        claims = (a_claim_record(id=f"c{number}"), a_claim_record(id="bobs", uid=1002, user="bob"))
        lines += jobs.look(a_snapshot(a_device(), claims=claims, clock=10_000.0 + number))
    lines += jobs.look(a_snapshot(a_device(), clock=12_000.0))

    assert sum(line.user == "alice" and line.kind == "claim" for line in lines) < 1300
    assert any(line.outcome == "left out" for line in lines)
    assert [line.claim for line in lines if line.user == "bob"] == ["bobs"]


def test_root_finds_the_claim_of_another_in_the_report(tmp_path):
    with a_daemon(tmp_path) as daemon:
        with a_holder(lock_directory(str(tmp_path / "claims")), daemon.uuid(0)) as holder:
            claims = tmp_path / "claims"
            assert eventually(lambda: any(holder.id in path.read_text() for path in claims.rglob("*state.json")))
        assert eventually(lambda: any(event["outcome"] == "seen to end" for event in daemon.events("claim")))
        report = json.loads(daemon.gpuguard("report", "--by", "claim", "--json").stdout)

    assert [row["id"] for row in report["claims"]] == [holder.id]
