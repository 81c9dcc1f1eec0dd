"""benchmarks/replay.py on a small trace: every rule serves everybody, and the table is printed."""

from __future__ import annotations

import csv
import gzip
import json
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import replay as benchmark
from sources import ROOT
from test_recordings import SECRETS, a_view

from gpuguard import model
from gpuguard.backends.replay import RecordingWriter
from gpuguard.backtest.masking import KEPT, MASKED, Mask
from gpuguard.backtest.recordings import pack, views
from gpuguard.policies.view import HostUse, UserUse
from gpuguard.queue.priority import QueueRules

DEVICES = 4
HOUR = 3600.0


def a_trace(seed, count=80):
    """Jobs of five users on a server that is too small for them."""
    chance = random.Random(seed)
    times = sorted(chance.uniform(0, 60 * HOUR) for _ in range(count))
    return [
        benchmark.Job(
            number, chance.randrange(5), at, chance.choice((1, 1, 1, 2, 4)), HOUR * chance.choice((0.1, 0.5, 2, 3, 8))
        )
        for number, at in enumerate(times)
    ]


def waits_of(jobs, knows, **rules):
    line = benchmark.Line(knows, QueueRules(**rules))
    return benchmark.replay(jobs, DEVICES, line.starts, line.ended)


RULES = {
    "order of arrival": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.fifo),
    "whatever fits": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.any_fit),
    "shortest first": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.shortest),
    "EASY": lambda jobs: benchmark.replay(jobs, DEVICES, benchmark.easy),
    "limits": lambda jobs: waits_of(jobs, "limits"),
    "history": lambda jobs: waits_of(jobs, "history"),
    "nothing": lambda jobs: waits_of(jobs, ""),
    "nothing, in order of arrival": lambda jobs: waits_of(jobs, "", fair_share=False),
}


def most_in_use(jobs, waits):
    """Devices, at the fullest moment; a job that ends makes room for one that starts then."""
    changes = []
    for job, wait in zip(jobs, waits, strict=True):
        begin = job.submitted + wait
        changes += [(round(begin, 3), 1, job.num_gpus), (round(begin + job.duration, 3), 0, -job.num_gpus)]
    used = most = 0
    for _, _, change in sorted(changes):
        used += change
        most = max(most, used)
    return most


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_everybody_is_served_and_no_device_twice(name, seed):
    jobs = a_trace(seed)
    waits = RULES[name](jobs)

    assert len(waits) == len(jobs) and min(waits) >= 0
    assert DEVICES - 1 <= most_in_use(jobs, waits) <= DEVICES
    assert max(waits) > HOUR  # or else the trace tests nothing


def test_the_table_is_printed_for_a_trace_of_ones_own(tmp_path):
    path = tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["user", "t_submit_s", "gpus", "duration_s"])
        for job in reversed(a_trace(1)):  # in any order, with the columns in any order
            table.writerow([f"user{job.user}", job.submitted, job.num_gpus, job.duration])
    command = [sys.executable, str(ROOT / "benchmarks" / "replay.py"), str(path), "--devices", str(DEVICES)]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]

    rows = [line for line in done[0].splitlines() if line.startswith("| ")]
    assert done[0] == done[1]
    assert done[0].startswith(f"80 jobs on {DEVICES} devices; hours waited\n")
    assert [row.split(" | ")[0][2:] for row in rows[1:]] == [
        "order of arrival",
        "whatever fits",
        "EASY backfill, lengths known",
        "shortest first, lengths known",
        "gpuguard, lengths known",
        "gpuguard, lengths of earlier jobs known, bound 24 h",
        "gpuguard, nothing known, bound 24 h",
    ]


def masked_text(path: Path) -> str:
    mask, tape = Mask(), RecordingWriter(str(path), {})
    for second in range(3):
        tape.write(mask(pack(a_view(second))))
    tape.close()
    return gzip.decompress(path.read_bytes()).decode("ascii")


def test_a_mask_lets_no_name_through(tmp_path):
    text = masked_text(tmp_path / "m.rec")
    view = a_view()

    names = {
        *SECRETS.values(),
        "wolf",
        "boson",
        "hilbert",
        "pts/77",
        "python",
        *(d.uuid for d in view.snapshot.devices),
    }
    assert [name for name in names if name in text] == []
    assert [json.dumps(name) for name in names if json.dumps(name)[1:-1] in text] == []


def test_a_masked_recording_still_tells_who_is_the_same(tmp_path):
    masked_text(tmp_path / "m.rec")
    plain, masked = a_view(2).snapshot, list(views(str(tmp_path / "m.rec")))[2].snapshot

    def people_of(snapshot: model.Snapshot) -> list[list[int]]:
        users = [process.user for device in snapshot.devices for process in device.processes or ()]
        return [[place for place, user in enumerate(users) if user == one] for one in dict.fromkeys(users)]

    assert people_of(masked) == people_of(plain)
    assert masked.devices[8].parent_uuid == masked.devices[7].uuid
    assert masked.claims[0].devices == (masked.devices[0].uuid,)
    assert [device.memory_used for device in masked.devices] == [device.memory_used for device in plain.devices]
    assert masked.devices[7].problems == ("masked problem",)


@pytest.mark.parametrize(
    ("noun", "kind"),
    [("snapshot", model.Snapshot), ("device", model.Device), ("process", model.GpuProcess),
     ("claim", model.ClaimRecord), ("host", HostUse), ("use", UserUse)],
)  # fmt: skip
def test_every_field_is_either_masked_or_known_to_be_harmless(noun, kind):
    names = {field.name for field in fields(kind)}

    assert KEPT[noun] | MASKED[noun] == names
    assert not KEPT[noun] & MASKED[noun]


def test_a_field_that_the_mask_does_not_know_does_not_pass():
    sample = pack(a_view())
    sample["snapshot"]["devices"][0]["serial"] = "1650522003820"

    assert "1650522003820" not in json.dumps(Mask()(sample))
