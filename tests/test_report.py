"""What a report says of GPU time: nothing twice, nothing made up, and what is unknown is said to be."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from json_schemas import PAGE, faults, schemas
from stores import FIRST, at, written
from test_who import DOCUMENT, documented, printed

from gpuguard.fleet.answers import HostReply, HostReport, reply_with
from gpuguard.history import audit_log, store
from gpuguard.history.queries import Usage, query_store
from gpuguard.history.store_schema import NOBODY_KNOWS, Slot, rates_of
from gpuguard.history.usage_report import (
    BY,
    PolicyRow,
    Report,
    claim_rows,
    joined_report,
    policy_rows,
    running_claims,
    usage_report,
)
from gpuguard.locale import use_english, use_language_of_user
from gpuguard.model import Event, Snapshot
from gpuguard.sanitize import display_width
from gpuguard.views import report as view
from gpuguard.views.history import csv_lines, remarks
from gpuguard.views.report import to_html
from gpuguard.views.text import json_text

ALICE, BOB, CAROL, DAVE = 1001, 1002, 1003, 1004
NAMES = {ALICE: "alice", BOB: "王小明", CAROL: "<script>alert(1)</script>\x1b[31m", DAVE: "=cmd()"}
GROUPS = {ALICE: ("lab", "staff"), BOB: ("lab",), CAROL: ()}
HOUR = 360  # slots


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "usage.db")


def a_machine(clock: float, *, energy: float | None = 300.0) -> Snapshot:
    """Alice works on 0, Bob leaves 1 idle, Carol uses 2 without a claim, and of Dave's 3 nobody can tell."""
    measured = None if energy is None else energy * clock
    devices = (
        a_device(0, processes=(a_process(10, uid=ALICE),), utilization=90.0, total_energy=measured),
        a_device(1, processes=(a_process(11, uid=BOB),), utilization=0.0, total_energy=measured),
        a_device(2, processes=(a_process(12, uid=CAROL),), utilization=50.0, total_energy=None),
        a_device(3, processes=None, utilization=50.0, total_energy=None),
    )
    claims = tuple(
        a_claim_record(devices[index], id=str(uid), uid=uid) for index, uid in ((0, ALICE), (1, BOB), (3, DAVE))
    )
    return a_snapshot(*devices, claims=claims, clock=clock, taken_at=clock)


def recorded(path: str, numbers: range, waiting: Mapping[int, tuple[float, float]] | None = None) -> None:
    """These slots of that machine."""
    rates = rates_of(a_machine(0.0), a_machine(10.0))
    rates.waiting = dict(waiting or {})
    slots = {FIRST + number: Slot() for number in numbers}
    for slot in slots.values():
        slot.add(rates, 10.0)
    written(path, slots, a_machine(0.0).devices)


@pytest.fixture
def hour(path: str) -> str:
    """The store of an hour of that machine, in which one user waited."""
    recorded(path, range(HOUR), waiting={ALICE: (1000.0, 3.0)})
    return path


def reported(path: str, by: str = "user", begin: int = 0, end: int = HOUR, metrics: Sequence[str] = ()) -> Report:
    def read(usage: Usage) -> Report:
        return usage_report(usage, by, at(begin), at(end), name, lambda uid: GROUPS.get(uid, ()), metrics)

    return query_store(path, read, at(end))


def by_claim(report: Report, begin: float = 0.0, end: float = 1e10) -> Report:
    """*report* with the claims of LOG."""
    claims, without_end = claim_rows(LOG, begin, end)
    return replace(report, claims=claims, claims_without_end=without_end)


def from_log(report: Report) -> Report:
    """*report*, with what LOG and DEEDS say where it is by that."""
    if report.by == "policy":
        return replace(report, policies=policy_rows(DEEDS, 0.0, 1e10, name))
    return by_claim(report) if report.by == "claim" else report


def name(uid: int) -> str:
    return NAMES.get(uid, str(uid))


def shown(report: Report, width: int | None = None, **more: Any) -> str:
    return "\n".join(view.to_text(report, width=width, paint=lambda text, _: text, **more))


def page(report: Report, *replies: HostReply) -> str:
    return to_html(report, "node<1>", at(HOUR), replies)


DRAWN = ("utilization_percent", "claimed_percent")


def test_time_is_used_or_idle_or_unknown_or_without_a_claim(hour):
    rows = {row.uid: row for row in reported(hour).rows}

    assert {uid: (row.claimed, row.used, row.idle, row.unknown, row.unclaimed) for uid, row in rows.items()} == {
        ALICE: (3600, 3600, 0, 0, 0),
        BOB: (3600, 0, 3600, 0, 0),
        CAROL: (0, 0, 0, 0, 3600),
        DAVE: (3600, 0, 0, 3600, 0),
    }


def test_energy_that_nobody_measured_is_unknown_and_not_zero(hour):
    rows = {row.uid: row.energy for row in reported(hour).rows}

    assert rows == {ALICE: 300 * 3600, BOB: 300 * 3600, CAROL: None, DAVE: None}
    assert "n/a" in shown(reported(hour))


def test_a_user_in_several_groups_counts_in_each_and_one_in_none_is_not_lost(hour):
    rows = {row.name: (row.claimed, row.unclaimed) for row in reported(hour, "group").rows}

    assert rows == {"lab": (7200, 0), "staff": (3600, 0), "(in no group)": (3600, 3600)}


def test_by_device_each_device_has_a_row_also_one_that_nobody_used(hour):
    assert [(row.name, row.claimed) for row in reported(hour, "device").rows] == [
        ("GPU 0", 3600), ("GPU 1", 3600), ("GPU 2", 0), ("GPU 3", 3600),
    ]  # fmt: skip


def test_the_largest_waste_comes_first_and_users_without_any_are_not_named(hour):
    assert [row.uid for row in reported(hour).wasters] == [BOB, CAROL]


def test_waiting_is_told_with_its_share(path):
    recorded(path, range(HOUR), waiting={ALICE: (1000.0, 3.0), 2000: (500.0, 1.0)})
    report = reported(path)
    rows = {row.uid: (row.waiting, row.wanted) for row in report.rows}

    assert (rows[ALICE], rows[2000], rows[BOB]) == ((3600, 10800), (1800, 3600), (0, 0))
    assert "3.00 (75 %)" in shown(report)


def test_when_nobody_could_look_at_the_line_nobody_is_said_not_to_have_waited(path):
    recorded(path, range(HOUR), waiting={NOBODY_KNOWS: (1000.0, 0.0)})
    report = reported(path)

    assert {(row.waiting, row.wanted) for row in report.rows} == {(None, None)}
    assert "it is not known who waited in the queue" in shown(report)


def test_a_time_that_was_half_watched_says_so_and_one_that_was_watched_does_not(path):
    recorded(path, range(HOUR // 2))

    assert "The daemon saw 50 % of this time (30m); of the rest nothing is known." in shown(reported(path))
    assert "nothing is known" not in shown(reported(path, end=HOUR // 2))
    assert "The daemon saw 50 % of this time" in page(reported(path))


def test_a_time_that_begins_before_the_record_says_so(hour):
    text = shown(reported(hour, begin=-HOUR))
    assert "The record begins" in text
    assert "saw 50 %" in text


def test_a_time_that_is_shorter_than_a_slot_says_so(hour):
    found = query_store(hour, lambda usage: usage.watched(at(10) + 1, at(10) + 4), at(10) + 4)

    assert remarks(found, None) == ["No slot of the record begins in so short a time: they are 10 s wide."]


def test_an_empty_record_is_no_report_of_zeros(path):
    store.opened(path, check=True).close()
    text = shown(reported(path))

    assert "The daemon has written nothing down yet." in text
    assert not re.search(r"\b0\b", text.splitlines()[-1])


@pytest.mark.parametrize("by", ["user", "group", "device"])
@pytest.mark.parametrize("width", [None, 40, 80, 200])
def test_nothing_is_wider_than_the_terminal_and_no_control_character_of_a_name_reaches_it(hour, by, width):
    text = shown(reported(hour, by), width)

    assert "\x1b" not in text
    assert width is None or max(map(display_width, text.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_number_is_cut_off_on_a_narrow_terminal(hour, width):
    wide, narrow = shown(reported(hour)), shown(reported(hour), width)

    assert "3.00 (100 %)" in wide and "3.00 (100 %)" in narrow
    numbers = re.sub(r"NVIDIA .*", "", narrow.split("Least used")[0].partition("USER")[2])
    assert not re.search(r"\d…", numbers)


def test_the_document_describes_exactly_the_fields_that_are_printed(hour):
    found: dict[str, set[str]] = {}
    for by in BY:
        answer = replied("a", from_log(reported(hour, by)))
        content = json.loads(json_text(view.to_json(joined(answer), "1 host", [answer])))
        printed("report", content, found)
        assert faults(content, schemas(PAGE.read_text(encoding="utf-8"))["report"]) == []

    assert documented("report", DOCUMENT.read_text(encoding="utf-8")) == found


def test_unknown_is_null_in_json_and_empty_in_csv(hour):
    report = reported(hour)
    content = view.to_json(report, "node")
    lines = view.to_csv(report, "node")

    assert {row["uid"]: row["energy_joules"] for row in content["rows"]}[DAVE] is None
    assert next(line for line in lines if f",{DAVE}," in line).split(",")[8] == ""
    assert len(lines) == 5


def test_no_spreadsheet_takes_a_name_for_a_formula(hour):
    assert any(line.startswith("'=cmd()") for line in view.to_csv(reported(hour), "node"))
    signs = ["=1", "+1", "-1", "@x", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20x"]
    assert csv_lines(["a", "b"], [['x;=1 "2"', None]]) == ["a,b", '"x;\'=1 ""2""",']
    assert csv_lines(["a"], [[sign] for sign in signs]) == ["a", *(f"'{sign}" for sign in signs)]


class Tags(HTMLParser):
    """The tags of a page and their attributes; complains of one that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("by", BY)
def test_the_page_has_no_script_loads_nothing_and_shows_hostile_names_as_text(hour, by):
    text = page(from_log(reported(hour, by, metrics=DRAWN)))
    found = Tags(text).tags

    assert {tag for tag, _ in found} <= {
        "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "h3", "p", "i", "span", "div", "table",
        "tr", "th", "td", "svg", "rect", "line", "polyline", "b",
    }  # fmt: skip
    assert not [name for _, attributes in found for name in attributes if name in ("src", "href") or name[:2] == "on"]
    assert "url(" not in text and "@import" not in text and "\x1b" not in text
    assert by != "user" or "&lt;script&gt;" in text


def test_a_gap_of_the_record_is_a_gap_of_the_line_in_the_page(path):
    recorded(path, range(100))
    recorded(path, range(200, HOUR))
    text = page(reported(path, metrics=DRAWN))

    assert text.count("<polyline") == 2 * 4


def marks(text: str) -> list[str]:
    """The times below the first chart."""
    return re.findall(r">([^<]+)</span>", re.findall(r'<div class="marks">(.*?)</div>', text)[0])


def test_the_axis_of_a_young_record_is_as_long_as_the_record(path):
    recorded(path, range(HOUR))
    week = reported(path, begin=HOUR - 7 * 24 * HOUR, metrics=DRAWN)
    line = re.findall(r'points="([^"]+)"', page(week))[0].split()

    assert len(line) > 350, "it is no dot at the end of an empty week"
    assert marks(page(week)) == marks(page(reported(path, metrics=DRAWN)))


def test_labels_are_text_that_does_not_shrink_with_the_drawing(hour):
    text = page(reported(hour, metrics=DRAWN))

    assert "<text" not in text
    assert len(marks(text)) >= 3
    assert all(attributes.get("aria-label") for tag, attributes in Tags(text).tags if tag == "svg")


def test_the_heads_of_the_page_are_chinese(hour):
    use_language_of_user({"LANG": "zh_CN.UTF-8"})
    try:
        heads = re.findall(r"<th[^>]*>(.*?)</th>", page(reported(hour)))
    finally:
        use_english()

    assert {head for head in heads if head.isascii()} == {"GPU", "kWh"}


def test_the_page_begins_with_what_the_head_of_a_department_asks(hour):
    text = page(reported(hour))
    facts = re.findall(r"<p><b>(.*?)</b> (.*?)</p>", text)

    assert facts == [
        ("4 GPUs", "4.00 GPU-hours watched"),
        ("75 %", "of them claimed"),
        ("50 %", "of the claimed time used, where it is known"),
        ("1.00", "GPU-hours claimed but idle"),
        ("1.00", "GPU-hours used without a claim"),
        ("4 users", "had a GPU"),
        ("1.00", "hours waited, by 1 user"),
        ("0.60 kWh", "taken by the GPUs"),
    ]


UUID = a_device(0).uuid
LOG = [
    {"time_unix_seconds": 100.0, "kind": "claim", "outcome": "started", "claim": "a", "message": "python <b>train.py"},
    {
        "time_unix_seconds": 3700.0, "kind": "release", "outcome": "settled", "claim": "a", "user": "alice",
        "devices": [UUID, "GPU-2"],
        "facts": {
            "wall_time_seconds": 3600.0, "mean_utilization_percent": 40.0, "energy_joules": 3.6e6, "exit_status": 0,
        },
    },
    {"time_unix_seconds": 200.0, "kind": "claim", "outcome": "started", "claim": "b"},
    {"time_unix_seconds": 50.0, "kind": "release", "claim": "old", "facts": {"wall_time_seconds": "long"}},
    {
        "time_unix_seconds": 300.0, "kind": "release", "claim": "odd",
        "facts": {"wall_time_seconds": float("nan"), "uid": 1002},
    },
    {"time_unix_seconds": 300.0, "kind": "release", "claim": 7, "facts": {"wall_time_seconds": 1.0}},
]  # fmt: skip


def test_a_claim_has_what_the_log_says_of_its_end_and_of_its_begin():
    rows, unfinished = claim_rows(LOG, 60.0, 4000.0)

    assert [row.id for row in claim_rows(LOG, 0.0, 3000.0)[0]] == ["old", "odd"]  # those that ended then
    assert [row.id for row in rows] == ["a", "odd"]
    assert (rows[0].gpu_seconds, rows[0].energy_joules, rows[0].peak_memory_bytes, rows[0].exit_status) == (
        7200,
        3.6e6,
        None,
        0,
    )
    assert rows[0].command == "python <b>train.py"
    assert (rows[1].user, rows[1].wall_time_seconds, rows[1].gpu_seconds) == ("1002", None, None)
    assert unfinished == 1


SEEN = [
    {
        "time_unix_seconds": 400.0, "kind": "claim", "outcome": "seen to end", "claim": "b", "user": "bob",
        "devices": ["GPU-b"], "message": "python b.py", "facts": {"owner_uid": 1002, "wall_time_seconds": 100.0},
    },
    {
        "time_unix_seconds": 4500.0, "kind": "claim", "outcome": "seen to end", "claim": "a", "user": "alice",
        "facts": {"owner_uid": 1001, "wall_time_seconds": 1.0},
    },
]  # fmt: skip


def test_what_the_daemon_saw_of_a_claim_counts_where_its_job_left_no_line():
    """Root saw no job of another user: their logs are theirs."""
    rows, _ = claim_rows([*LOG, *SEEN], 60.0, 5000.0)

    assert [(row.id, row.user, row.command) for row in rows if row.id in "ab"] == [
        ("a", "alice", "python <b>train.py"), ("b", "bob", "python b.py"),
    ]  # fmt: skip
    assert {row.id: row.gpu_seconds for row in rows}["a"] == 7200
    assert {row.id: row.wall_time_seconds for row in rows}["b"] == 100.0


def test_the_page_and_the_text_show_how_long_each_claim_took_in_whole_numbers(path):
    store.opened(path, check=True).close()
    report = by_claim(reported(path, "claim"), 60.0, 4000.0)

    head, first, second = [re.findall(r"<t[hd][^>]*>([^<]*)</t", row) for row in page(report).split("<tr>")[1:]]
    text = shown(report, 40).partition("From the audit logs")[0]
    assert [row[head.index("Took")] for row in (first, second)] == ["1h", "n/a"]
    assert max(map(display_width, text.splitlines())) <= 40
    assert all(header in text for header in ("TOOK", "GPU-HOURS", "kWh", "EXIT", "COMMAND"))
    assert not re.search(r"\d…", text)


def test_claims_that_share_a_gpu_can_take_more_than_its_time_and_the_report_says_so(hour):
    report = reported(hour, "device")
    doubled = replace(report, rows=[replace(row, claimed=7200.0) for row in report.rows])

    assert "2.00*" in shown(doubled) and "* Claims shared this GPU, and each counts whole" in shown(doubled)
    assert "*" not in shown(report)


def test_claims_that_run_are_rows_too_and_not_among_those_without_an_end():
    record = a_claim_record(a_device(0), a_device(1), id="b", since=1000.0, command=("sh", "-c", "python train.py"))
    rows, without_end = claim_rows(LOG, 60.0, 4000.0, running=running_claims([record], 4600.0))
    (runs,) = [row for row in rows if row.ended is None]

    assert (runs.id, runs.gpu_seconds, runs.command) == ("b", 7200.0, "sh -c 'python train.py'")
    assert without_end == 0


def test_the_job_that_asks_is_in_the_report_by_claim(gpuguard):
    report = gpuguard("run", "--quiet", "-n", "2", "--", *gpuguard.words("report", "--by", "claim", "--json")).stdout
    (runs,) = json.loads(report)["claims"]
    text = gpuguard("run", "--quiet", "-n", "1", "--", *gpuguard.words("report", "--by", "claim")).stdout

    assert runs["ended"] is None and len(runs["devices"]) == 2 and runs["wall_time_seconds"] >= 0
    assert "  runs  " in text


def test_without_a_store_the_claims_of_one_user_are_told_and_what_is_missing_is_said(tmp_path, monkeypatch, command):
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("GPUGUARD_STATE_DIR", str(tmp_path))
    for number, uid in enumerate((0, 1)):
        audit_log.append(Event(time=time.time(), kind="release", outcome="settled", claim=f"c{number}", facts=(
            ("uid", uid), ("wall_time_seconds", 60.0))))  # fmt: skip
    of_root = command("report", "--by", "claim", "--user", "root", "--json")[1]
    missing = command("report")
    by_device = command("report", "--by", "device", "--user", "root")

    assert [claim["id"] for claim in json.loads(of_root)["claims"]] == ["c0"]
    assert missing[0] == 1 and "gpuguard report --by claim` without it" in missing[2]
    assert by_device[0] == 2 and "of all users together" in by_device[2]


def a_step(when: float, kind: str, outcome: str, uid: int | None = ALICE, policy: str = "hogs", **more: Any):
    facts = {"policy": policy, "step": 0, "uid": uid} if uid is not None else {"policy": policy, "step": 0}
    return {"time_unix_seconds": when, "kind": kind, "outcome": outcome, "pid": 7, "facts": facts, **more}


DEEDS = [
    a_step(100.0, "warn", "logged"),
    a_step(110.0, "warn", "done"),
    a_step(120.0, "warn", "undelivered", CAROL),
    a_step(130.0, "terminate", "about to"),
    a_step(131.0, "terminate", "ended", facts={"policy": "hogs", "uid": ALICE}),
    a_step(140.0, "terminate", "about to"),
    a_step(141.0, "terminate", "not permitted"),
    a_step(150.0, "terminate", "refused", pid=8),
    a_step(160.0, "pause", "dry run", BOB, "heat"),
    a_step(170.0, "resume", "dry run", facts={"policy": "heat", "uid": BOB}),
    a_step(171.0, "resume", "left", facts={"policy": "heat", "uid": BOB}),
    a_step(180.0, "quarantine", "done", None, "health", devices=["GPU-1"]),
    a_step(190.0, "note", "waiting", facts={"policy": "hogs", "uid": ALICE}),
    a_step(200.0, "terminate", "about to", facts={"uid": ALICE}),
]


def test_by_policy_each_user_has_what_was_done_to_them_and_what_would_have_been_a17():
    rows = policy_rows(DEEDS, 0.0, 1000.0, name)

    assert rows == [
        PolicyRow(None, None, "health", "quarantine", done=1, last=180.0),
        PolicyRow(NAMES[CAROL], CAROL, "hogs", "warn", undelivered=1, last=120.0),
        PolicyRow("alice", ALICE, "hogs", "warn", done=2, last=110.0),
        PolicyRow("alice", ALICE, "hogs", "terminate", done=1, not_done=2, last=150.0),
        PolicyRow("王小明", BOB, "heat", "pause", dry_run=1, last=160.0),
        PolicyRow("王小明", BOB, "heat", "resume", dry_run=1, last=170.0),
    ]


def test_by_policy_a_step_outside_of_the_time_does_not_count_and_one_about_several_users_counts_for_each_a17():
    several = a_step(300.0, "warn", "done", facts={"policy": "hogs", "step": 0, "uids": f"{ALICE} {BOB}"})

    assert {(row.user, row.done) for row in policy_rows([*DEEDS, several], 200.0, 301.0, name)} == {
        ("alice", 1), ("王小明", 1),
    }  # fmt: skip
    assert policy_rows([several], 100.0, 300.0, name) == []


@pytest.mark.parametrize("width", [None, 40])
def test_what_policies_did_is_a_table_in_which_no_number_is_cut_off_a17(hour, width):
    text = shown(from_log(reported(hour, "policy")), width)

    assert text.startswith("What policies did, ")
    assert width is None or max(map(display_width, text.partition("From the")[0].splitlines())) <= width
    assert not re.search(r"\d…", text.partition("USER")[2])
    assert "\x1b" not in text and all(head in text for head in ("USER", "POLICY", "DONE", "DRY RUN", "NOT DONE"))
    assert "No policy did anything" in shown(replace(reported(hour, "policy"), policies=[]))


def test_the_command_says_what_policies_did_to_a_user_without_a_store_a17(tmp_path, monkeypatch, command):
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("GPUGUARD_STATE_DIR", str(tmp_path))
    for uid, outcome in ((0, "done"), (1, "done"), (1, "dry run")):
        facts = ("policy", "hogs"), ("step", 0), ("uid", uid)
        audit_log.append(Event(time=time.time(), kind="warn", outcome=outcome, facts=facts))
    content = json.loads(command("report", "--by", "policy", "--user", "daemon", "--json")[1])
    lines = command("report", "--by", "policy", "--csv")[1].splitlines()

    assert [(row["user"], row["done"], row["dry_run"]) for row in content["policies"]] == [("daemon", 1, 1)]
    assert content["host"] == content["policies"][0]["host"] and content["rows"] is None
    assert [line.split(",")[:6] for line in lines[1:]] == [
        ["daemon", "1", "hogs", "warn", "1", "0"], ["root", "0", "hogs", "warn", "1", "0"],
    ]  # fmt: skip


def replied(host: str, report: Report) -> HostReply:
    """The reply of a host that has *report*."""
    return reply_with(host, 0.1, json.loads(json_text(view.to_json(report, "another name"))), HostReport)


def joined(*replies: HostReply) -> Report:
    reports = {reply.host: reply.report.report for reply in replies if reply.report}
    return joined_report(next(iter(reports.values())).by, at(0), at(HOUR), reports)


@pytest.mark.parametrize("by", BY)
def test_what_a_host_reports_comes_back_as_it_was_a17(hour, by):
    report = from_log(reported(hour, by))
    back = replied("a", report).report

    assert back is not None
    for part in ("by", "watch", "devices", "queue_unknown", "claims_without_end"):
        assert getattr(back.report, part) == getattr(report, part)
    unescaped = [row for row in report.rows if "\x1b" not in row.name]
    assert [row for row in back.report.rows if "\\x1b" not in row.name] == unescaped
    assert {row.host for row in back.claims or ()} | {row.host for row in back.policies or ()} <= {"another name"}


def test_a_report_over_hosts_adds_users_up_and_has_a_host_in_each_row_a17(hour, path):
    answers = [replied("a", reported(hour)), replied("b", reported(hour))]
    silent = HostReply("c", 0.1, error="no answer within 10s")
    report = joined(*answers)
    text = shown(report, replies=[*answers, silent])
    content = view.to_json(report, "2 hosts", [*answers, silent])

    assert {row.name: row.claimed for row in report.users}["alice"] == 7200
    assert re.search(r"^alice +2\.00 ", text, re.M) and re.search(r"^b +alice +1\.00 ", text, re.M)
    assert re.search(r"^b +GPU 3 +1\.00 ", text, re.M)
    assert text.splitlines()[-2:] == ["2 of 3 hosts answered; not these:", "  c  no answer within 10s"]
    assert {row["host"] for row in [*content["rows"], *content["devices"]]} == {"a", "b"}
    assert [(host["host"], host["error"], host["watched_seconds"]) for host in content["hosts"]] == [
        ("a", None, 3600.0), ("b", None, 3600.0), ("c", "no answer within 10s", None),
    ]  # fmt: skip
    assert {line.rpartition(",")[2] for line in view.to_csv(report, "2 hosts")} == {"host", "a", "b"}
    assert "no answer within 10s" in page(report, *answers, silent)


def test_what_is_not_known_of_one_host_is_said_with_its_name_and_is_the_least_that_is_known_a17(hour, tmp_path):
    young = str(tmp_path / "young.db")
    recorded(young, range(HOUR // 2, HOUR))
    report = joined(replied("old", reported(hour)), replied("young", reported(young)))

    assert "\nyoung: The daemon saw 50 % of this time" in shown(report) and "\nold: " not in shown(report)
    assert (report.watch.seen, report.watch.store_begins) == (1800, at(HOUR // 2))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("width", [40, 80])
def test_a_report_over_hosts_fits_the_terminal_a17(hour, by, width):
    text = shown(joined(replied("gpu1", from_log(reported(hour, by)))), width).partition("From the audit logs")[0]

    assert max(map(display_width, text.splitlines())) <= width and "\x1b" not in text
    assert re.search(r"^HOST +", text, re.M)


def test_a_report_of_which_a_part_would_be_left_out_is_no_answer_a17(hour):
    facts = view.to_json(reported(hour), "a")
    cut = reply_with("a", 0.1, {**facts, "rows": facts["rows"] * 2000}, HostReport)

    assert cut.report is None and cut.error is not None and "more than 4096 rows" in cut.error
