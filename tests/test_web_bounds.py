"""What the page gets is bounded, however much users write about a GPU that they have; nobody hides behind a crowd."""

from __future__ import annotations

import json

from builders import a_claim_record, a_device, a_process, a_snapshot

from gpuguard import device_state
from gpuguard.views import who
from gpuguard.web.feed import (
    LONGEST_COMMAND,
    MOST_CLAIMS,
    MOST_NAMELESS,
    MOST_PLACES,
    MOST_PROCESSES,
    MOST_ROWS,
    bounded,
)

WORDS = ("python", *("x" * 100 for _ in range(40)))


def a_frame(snapshot, line=()):
    content = who.to_json(snapshot, device_state.uses(snapshot, {}), age=None)
    return {**content, "line": list(line), "unknown": ["host: why"]}


def test_what_is_usual_is_shown_as_it_is():
    device = a_device(processes=(a_process(),))
    frame = a_frame(a_snapshot(device, claims=(a_claim_record(device),)), [{"user": "bob", "command": ["train.py"]}])

    assert json.dumps(bounded(frame)) == json.dumps(frame)


def test_a_crowd_of_records_is_cut_and_counted_and_hides_nobody():
    running = [a_process(100 + place, user="mallory", uid=20002, command=WORDS) for place in range(300)]
    device = a_device(processes=(*running, a_process(99, user="alice")))
    crowd = [a_claim_record(device, id=f"m{place}", user="mallory", uid=20002, command=WORDS) for place in range(500)]
    snapshot = a_snapshot(device, claims=(*crowd, a_claim_record(device, id="a", user="alice")))
    line = [{"user": f"user{place % 3}", "command": list(WORDS)} for place in range(1000)]

    seen = bounded(a_frame(snapshot, line))

    (one,) = seen["devices"]
    assert (len(one["claims"]), len(one["processes"]), len(seen["line"])) == (
        MOST_CLAIMS + 1, MOST_PROCESSES + 1, 3 * MOST_PLACES,
    )  # fmt: skip
    assert "alice" in [each["user"] for each in one["claims"]]
    assert seen["unknown"] == [
        "GPU 0: claims: 492 more are not shown",
        "GPU 0: processes: 236 more are not shown",
        "the waiting line: 808 more are not shown",
        "host: why",
    ]
    assert len(json.dumps(seen)) < 400_000
    longest = max(len(" ".join(row["command"])) for row in [*one["claims"], *one["processes"], *seen["line"]])
    assert LONGEST_COMMAND <= longest <= LONGEST_COMMAND + 10


def test_so_many_users_make_no_more_rows():
    line = [{"user": f"user{place}", "command": None} for place in range(MOST_ROWS + 10)]

    assert len(bounded(a_frame(a_snapshot(), line))["line"]) == MOST_ROWS


def test_a_user_with_many_uids_without_a_name_hides_nobody_and_no_note_is_longer_than_it_can_be_read():
    device = a_device()
    crowd = [
        a_claim_record(device, id=f"{uid}.{place}", user=str(uid), uid=uid, note="x" * 4000)
        for uid in range(100_000, 100_200)
        for place in range(5)
    ]
    snapshot = a_snapshot(device, claims=(*crowd, a_claim_record(device, id="a", user="alice", note="mine" * 1000)))

    seen = bounded(a_frame(snapshot))

    claims = seen["devices"][0]["claims"]
    assert (len(claims), claims[-1]["user"]) == (MOST_NAMELESS + 1, "alice")
    assert [row["user"] for row in seen["users"] if not row["user"].isdecimal()] == ["alice"]
    assert len(seen["users"]) == MOST_NAMELESS + 1
    assert len(json.dumps(seen)) < 100_000
