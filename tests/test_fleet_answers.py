"""What hosts answer, shown: their answers are bytes of strangers, and their room goes into scripts.

What docs/scale.md shows is taken by a real Prometheus, and the pages that its figures come from are ours.
"""

import json
import re
import shutil
from typing import Any

import pytest
from builders import a_device, a_process
from fleets import HOSTILE, Hosts, an_answer
from hypothesis import given
from hypothesis import strategies as st
from pages import Block, blocks
from sources import ROOT
from test_prometheus import PACKAGING, names_told, promtool
from test_who import a_hostile_snapshot, documented

from gpuguard.device_state import uses
from gpuguard.fleet.answers import ROWS, HostAnswer, HostDevice, HostReply, HostReport, reply_of, reply_with
from gpuguard.fleet.ssh import Reply
from gpuguard.history.usage_report import BY, joined_report
from gpuguard.locale.messages import dumps, sentence
from gpuguard.views import fleet as view
from gpuguard.views import report, who
from gpuguard.views.text import json_text

QUEUES = ("waiting", "places")


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


def paint(text: str, _: str) -> str:
    return text


def everything(replies: list[HostReply], *, width: int | None) -> list[str]:
    """All lines that any view makes of these replies."""
    hosts, known = [reply.host for reply in replies], {}
    lines = [*view.total_lines(replies, width), *view.end_lines(replies, width, paint)]
    for reply in replies:
        known[reply.host] = view.after(view.KnownHost(), reply, 1.0)
        lines += [*view.host_lines(reply, width, paint), *view.queue_lines(reply, width, paint)]
        room = view.room(view.chosen(reply), "index", ",")
        lines.append(view.room_line(reply, room, hosts, width, paint))
    return lines + view.page(hosts, known, 2.0, width=width, paint=paint)


@pytest.mark.parametrize(
    ("out", "why"),
    [
        (b"", "it is empty"),
        (b"Welcome!\n", "it is no JSON"),
        (b"[1]", "it is no JSON"),
        (b'{"schema": 1', "only a part of it"),
        (b'{"schema": 1} trailing', "only a part of it"),
        (b'{"schema": 1, "x": NaN}', "NaN is no number"),
        (b'{"schema": 1, "x": 1e999}', "is too large"),
        (b'{"schema": 1, "x": ' + b"9" * 5000 + b"}", "limit"),
        (b'{"x":' * 100_000, "nested too deeply"),
        (b'{"schema": 1, "x": ' + b"[" * 40 + b"]" * 40 + b"}", "nested too deeply"),
        (b'{"schema": 1, "x": "\xff"}', "it is no text"),
        (b'{"schema": 2}', "another version"),
        (b"{}", "another version"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_with_a_reason(out, why):
    answer = reply_of(Reply("a", 0.1, 0, out))

    assert answer.facts is None and answer.error is not None and why in answer.error


def test_a_sentence_of_another_host_remains_one_and_is_harmless():
    why = sentence("queue.kept", "kept for {user}'s reservation {time}", user="\x1b[31mal", time="t" * 9999)
    place = {"user": "al", "num_gpus": 1, "why": sentence("queue.unknown", "start unknown: {why}", why=why)}
    reply = reply_of(Reply("a", 0.1, 0, dumps({"schema": 1, "places": [place]})))

    assert reply.answer
    told: Any = reply.answer.places[0].why
    assert told.startswith("start unknown: kept for \\x1b[31mal's reservation tt") and told.isprintable()
    assert (told.key, told.values["why"].key) == ("queue.unknown", "queue.kept")
    assert told.values["why"].values == {"user": "\\x1b[31mal", "time": "t" * 400}


def test_the_reason_of_a_refusal_is_one_line():
    out = json.dumps({"schema": 1, "refused": "who", "reason": "no\ngpuguard: other: 8 GPUs free\r\u2028 x"})

    assert reply_of(Reply("a", 0.1, 1, out.encode())).error == "refused there: no gpuguard: other: 8 GPUs free x"


@pytest.mark.parametrize(
    ("name", "row"),
    [("devices", b'{"index": 0, "uuid": "x"}'), *((name, b'{"user": "a", "num_gpus": 1}') for name in QUEUES)],
)
def test_a_list_without_end_costs_no_more_than_a_long_one(name, row):
    # What a view does with each row took 13 s for the 2.8 million of 8 MiB, and all other hosts were late.
    whole = b'{"schema": 1, "%s": [' % name.encode() + (row + b",") * 50_000 + row + b"]}"
    reply = reply_of(Reply("a", 0.1, 0, whole))

    assert reply.answer and len(getattr(reply.answer, name)) == ROWS


def test_what_a_shell_says_at_its_start_does_not_spoil_the_answer():
    answer = reply_of(Reply("a", 0.1, 0, b'Welcome to {gpu}!\n{"schema": 1}\n'))

    assert answer.facts == {"schema": 1} and answer.error is None


@pytest.mark.parametrize(
    ("status", "err", "why"),
    [
        (127, b"bash: gpuguard: command not found\n", "not on the PATH there: install it, or name it with --remote"),
        (255, b"Host key verification failed.\r\n", "connect once by hand, and compare its key: ssh a"),
        (255, b"a@a: Permission denied (publickey).\r\n", "ssh-copy-id a"),
        (255, b"", "ssh failed and said nothing"),
        (4, b"motd\ngpuguard: there is no driver.  Install it.\nmore\n", "there is no driver.  Install it."),
        (2, b"gpuguard: unrecognized arguments: --json.\n", "unrecognized arguments"),
        (7, b"", "ended there with status 7 and said nothing"),
    ],
)
def test_a_failure_is_told_with_what_to_do(status, err, why):
    answer = reply_of(Reply("a", 0.1, status, b"", err))

    assert answer.error is not None and why in answer.error and len(answer.error) < 500


def test_of_a_hostile_host_nothing_reaches_the_terminal_but_plain_text():
    snapshot = a_hostile_snapshot()
    facts = json.loads(json_text(who.to_json(snapshot, uses(snapshot))))
    claim = {"user": HOSTILE, "note": HOSTILE, "command": [HOSTILE]}
    texts = dict.fromkeys(("uuid", "label", "name", "mig_profile", "state", "exact_state"), HOSTILE)
    evil = {"index": 0, **texts, "claims": [claim], "processes": [{"user": HOSTILE}]}
    facts["devices"] += [evil] * 3
    facts["users"] += [{**facts["users"][0], "user": HOSTILE, "devices": 1}]
    facts |= {"places": [{"user": HOSTILE, "num_gpus": 1, "why": HOSTILE}], "host": HOSTILE}
    answer = reply_with("a", 0.1, facts)
    broken = reply_of(Reply("b", 0.1, 4, b"", HOSTILE.encode()))
    lines = everything([answer, broken], width=None) + everything([answer, broken], width=80)

    assert [line for line in lines if not line.isprintable()] == []
    assert any("\\x1b]0;owned" in line for line in lines)


WRONG = [None, True, -1, 1e300, "x" * 100_000, [], {}, [[]], [None, 1, "x"], {"a": 1}, [{"a": []}]]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: repr(value)[:20])
def test_an_answer_with_a_field_of_another_type_is_refused_or_shown(wrong):
    whole = an_answer(a_device(0, processes=(a_process(),)))
    queue = {"places": [{"number": 1, "user": "a", "num_gpus": 1, "waited_seconds": 1.0, "why": "x"}]}
    facts = {**whole, **queue}
    for change in _changed(facts, wrong):
        try:
            answer = reply_with("a", 0.1, change)
        except ValueError as error:
            assert len(str(error)) < 200
            continue
        assert max(map(len, everything([answer], width=None) + everything([answer], width=80))) < 5000
        json_text(view.to_json([answer], 1.0))


A_TOTAL = {
    "uuid": "GPU-a", "index": 0, "name": "H100", "parent_uuid": None, "watched_seconds": 3600.0, "claimed_seconds": 1.0,
    "claimed_unknown_seconds": 0.0, "utilization_percent": 50.0, "energy_joules": 3.6e6, "energy_unknown_seconds": 0.0,
}  # fmt: skip
TIMES = {f"{part}_gpu_seconds": 60.0 for part in ("claimed", "used", "idle", "unknown", "unclaimed", "wanted")}
A_REPORT = {
    "schema": 1, "by": "user", "begin": 1e9, "end": 1e9 + 3600, "slot_seconds": 60, "watched_seconds": 3600.0,
    "record_begins": 1e8, "devices": [A_TOTAL], "line_unknown_seconds": 0.0, "claims_without_end": 1,
    "rows": [{"name": "a", "uid": 1, "uuid": None, "energy_joules": 1.0, "waiting_seconds": 1.0, **TIMES}],
    "claims": [{"id": "c", "user": "a", "devices": ["GPU-a"], "ended": 1e9, "wall_time_seconds": 1.0, "command": "x"}],
    "policies": [{"user": "a", "uid": 1, "policy": "hogs", "action": "warn", "done": 1, "last": 1e9}],
}  # fmt: skip


def all_reports(reply: HostReply) -> str:
    """Everything that a report over this host shows, by whatever it was asked for."""
    assert reply.report
    told = []
    for by in BY:
        whole = joined_report(by, 1e9, 1e9 + 3600, {reply.host: reply.report.report})
        told += [*report.to_csv(whole, "1 host"), json_text(report.to_json(whole, "1 host", [reply]))]
        told += [report.to_html(whole, "1 host", 1e9, [reply])]
        told += [line for width in (None, 80) for line in report.to_text(whole, width=width, paint=paint)]
    return "\n".join(told)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: repr(value)[:20])
def test_a_report_with_a_field_of_another_type_is_refused_or_shown_a17(wrong):
    for change in _changed(A_REPORT, wrong):
        try:
            reply = reply_with("a", 0.1, change, HostReport)
        except ValueError as error:
            assert len(str(error)) < 400
            continue
        if reply.error is None:
            all_reports(reply)


def test_a_report_of_a_hostile_host_is_plain_text_a17():
    evil = json.loads(json.dumps(A_REPORT).replace('"a"', json.dumps(HOSTILE)).replace('"hogs"', json.dumps(HOSTILE)))
    told = all_reports(reply_with("a", 0.1, evil, HostReport))

    assert [line for line in told.splitlines() if not line.isprintable()] == []
    assert "\\x1b]0;owned" in told and "&lt;b&gt;$(reboot)" in told


def _changed(content: object, wrong: object) -> list[dict[str, object]]:
    """*content* many times, each time with another one of its fields replaced."""
    found: list[dict[str, object]] = []
    if isinstance(content, dict):
        for name, value in content.items():
            found.append({**content, name: wrong})
            found += [{**content, name: inner} for inner in _changed(value, wrong)]
    elif isinstance(content, list) and content:
        found += [[inner, *content[1:]] for inner in _changed(content[0], wrong)]  # type: ignore[misc]
    return found


def test_select_names_the_hosts_with_room_in_the_order_in_which_they_were_named(hosts):
    no = "gpuguard: wanted 2 GPUs, but only 1 can be had now.\nGPU 0: claimed\n"
    hosts.say("a", err=no, status=1)
    hosts.say("b", {"schema": 1, "devices": [{"index": 3, "uuid": "GPU-a"}, {"index": 5, "uuid": "GPU-b"}]})
    hosts.say("c", err="ssh: no\n", status=255)
    hosts.say("d", {"schema": 1, "devices": [{"index": 0, "uuid": "MIG-a"}, {"index": 0, "uuid": "MIG-b"}]})
    done = hosts("select", "-n", "2", "--hosts", "d,a,b,c")
    uuids = hosts("select", "-n", "2", "--hosts", "b", "-O", "uuid", "-s", ":")

    assert (done.returncode, done.stdout) == (0, "d MIG-a,MIG-b\nb 3,5\n")
    assert done.stderr == "gpuguard: c: ssh: no\n"
    assert uuids.stdout == "b GPU-a:GPU-b\n"


def test_where_no_host_has_room_nothing_is_printed_and_each_says_why(hosts):
    hosts.say("a", err="gpuguard: wanted 2 GPUs, but only 1 can be had now.\n", status=1)
    hosts.say("b", err="ssh: no\n", status=255)
    done = hosts("select", "-n", "2", "--hosts", "a,b")
    dead = hosts("select", "-n", "2", "--hosts", "b")
    found = json.loads(hosts("select", "-n", "2", "--hosts", "a", "--json").stdout)["hosts"][0]

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpuguard: a: wanted 2 GPUs, but only 1 can be had now.\ngpuguard: b: ssh: no\n"
    assert (dead.returncode, dead.stdout) == (4, "")
    assert (found["error"], found["answer"]) == (None, None) and found["refusal"].startswith("wanted 2 GPUs")


@pytest.mark.parametrize(
    "device",
    [
        {"index": "0;reboot", "uuid": "GPU-a"}, {"index": 0, "uuid": "GPU-a $(reboot)"}, {"index": -1, "uuid": "GPU-a"},
        {"index": True, "uuid": "GPU-a"}, {"index": 0}, {"uuid": "GPU-a"}, "0", None, {"index": 10**9, "uuid": "GPU-a"},
    ],
)  # fmt: skip
def test_a_host_cannot_put_words_into_the_command_line_of_a_script(hosts, device):
    hosts.say("a", {"schema": 1, "devices": [{"index": 1, "uuid": "GPU-b"}, device]})
    done = hosts("select", "--hosts", "a")

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("gpuguard: a: its answer ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("uuids", [("GPU-a", "GPU-a"), ("GPU-a", "GPU-b"), ("MIG-a", "MIG-a")])
def test_a_list_that_names_a_device_twice_is_not_passed_on(hosts, uuids):
    hosts.say("a", {"schema": 1, "devices": [{"index": 1, "uuid": uuid} for uuid in uuids]})
    done = hosts("select", "-n", "2", "--hosts", "a")

    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "gpuguard: a: its answer names a GPU twice\n"


def test_one_report_is_made_of_what_hosts_answer_and_names_those_that_do_not_a17(hosts, tmp_path):
    hosts.say("a", A_REPORT)
    hosts.say("b", {**A_REPORT, "by": "user"})
    hosts.say("c", err="gpuguard: there is no record.\n", status=1)
    hosts.say("d", an_answer())
    done = hosts("report", "--hosts", "a,b,c,d", "--since", "2h")
    content = json.loads(hosts("report", "--hosts", "a,c", "--json").stdout)
    written = hosts("report", "--hosts", "a,c", "--html", str(tmp_path / "page.html"))
    none = hosts("report", "--hosts", "c")

    assert (done.returncode, written.returncode) == (1, 1)
    assert re.search(r"^a +0\.03 ", done.stdout, re.M) and re.search(r"^b +a +0\.02 ", done.stdout, re.M)
    assert "2 of 4 hosts answered; not these:\n  c  there is no record." in done.stdout
    assert "  d  its answer cannot be read: " in done.stdout
    assert [row["host"] for row in content["rows"]] == ["a"] and content["host"] is None
    assert written.stderr == "gpuguard: c: there is no record.\n"
    assert "there is no record" in (tmp_path / "page.html").read_text()
    assert (none.returncode, none.stdout) == (4, "0 of 1 hosts answered; not these:\n  c  there is no record.\n")


def test_hosts_are_asked_for_the_same_time_in_whatever_zone_they_are_a17(hosts):
    hosts.say("a", A_REPORT)
    hosts("report", "--hosts", "a", "--since", "2026-01-01T08:00+08:00", "--until", "2026-01-02", "--by", "policy")

    assert hosts.asked("a") == [
        "gpuguard report --json --since=2026-01-01T00:00:00+00:00 --until=2026-01-02T00:00:00+00:00 --by=policy"
    ]


def test_the_queues_of_hosts_are_shown_where_somebody_waits(hosts):
    place = {"number": 1, "user": "bob", "num_gpus": 2, "waited_seconds": 61.0, "why": "starts at 12:00"}
    hosts.say("a", {"schema": 1, "places": [place]})
    hosts.say("b", {"schema": 1, "places": []})
    done = hosts("queue", "--hosts", "b,a")

    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "a: 1 in the queue",
        "  #  USER  GPUS  WAITED  STARTS",
        "  1  bob      2    1m1s  starts at 12:00",
        "",
        "No request waits on 1 host.",
        "",
        "2 of 2 hosts answered.",
    ]


def test_users_are_added_up_over_hosts(hosts):
    row = {"user": "alice", "devices": 2, "processes": 3, "memory_used_bytes": 2**30, "claimed": 1, "idle": 1}
    hosts.say("a", an_answer(users=[row]))
    hosts.say("b", an_answer(users=[row, {**row, "user": "bob", "devices": 9}]))
    hosts.say("c", an_answer(users=[{**row, "memory_used_bytes": None}]))
    known, partly = (hosts("who", "--hosts", names).stdout.splitlines() for names in ("a,b", "a,c"))

    assert [line.split() for line in known if line.startswith(("alice", "bob"))] == [
        ["bob", "1", "9", "3", "1.0GiB", "1", "1"],
        ["alice", "2", "4", "6", "2.0GiB", "2", "2"],
    ]
    assert [line.split()[4] for line in partly if line.startswith("alice")] == ["n/a"]


def test_a_device_whose_state_is_missing_counts_and_is_unknown():
    devices = (HostDevice(0, "a"), HostDevice(1, "b", state="free"), HostDevice(2, "c", state="of the art"))
    counted = view.sums(HostAnswer(devices=devices))

    assert view.in_words([counted]) == "3 GPUs: 1 free, 2 unknown"
    assert (counted.memory_used, counted.utilization) == (None, (None, None, None))


@given(st.binary(max_size=200), st.sampled_from([0, 1, 2, 127, 255, None]), st.binary(max_size=100))
def test_no_bytes_of_a_host_make_an_answer_fail(out, status, err):
    for content in (out, b'{"schema": 1, ' + out, json.dumps({"schema": 1, "x": out.decode("latin-1")}).encode()):
        answer = reply_of(Reply("a", 0.1, status, content, err))
        assert (answer.facts is None) != (answer.error is None and answer.refusal is None)


def test_top_keeps_what_it_knew_of_a_host_that_falls_silent():
    facts = an_answer(a_device(0, utilization=100.0), a_device(1, utilization=None))
    known = view.after(view.KnownHost(), reply_with("a", 0.1, facts), 100.0)
    known = view.after(known, HostReply("a", 0.1, error="no answer within 10s"), 130.0)
    lines = view.page(["a", "b"], {"a": known}, 131.0, width=None, paint=paint, ascii_only=True)

    assert "2 hosts, 2 GPUs" in lines[0] and "1 does not answer" in lines[0]
    assert "#? n/a" in lines[2] and "31s" in lines[2] and "no answer within 10s" in lines[2]
    assert lines[3].split() == ["b", "asked"]


def test_top_says_once_that_the_memory_of_a_host_is_unknown():
    facts = an_answer(a_device(0), a_device(1, memory_total=None, memory_used=None))
    known = view.after(view.KnownHost(), reply_with("a", 0.1, facts), 100.0)

    lines = view.page(["a"], {"a": known}, 101.0, width=None, paint=paint, ascii_only=True)

    assert "n/a/n/a" not in lines[2] and " n/a " in lines[2]


def test_the_document_describes_the_fields_that_are_printed():
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    content = view.to_json([reply_with("a", 0.1, {"schema": 1}), HostReply("b", 0.1, error="x")], 10.0)

    assert documented("hosts", page) == {"hosts": set(content), "hosts.hosts[]": set(content["hosts"][0])}


PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SUMS = PACKAGING / "prometheus" / "gpuguard-fleet.rules.yml"
CONFIGURATIONS = [block for block in blocks(PAGE, "scale.md") if block.language == "yaml"]


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
def test_prometheus_takes_each_configuration(block: Block, tmp_path):
    shutil.copy(SUMS, tmp_path)
    (tmp_path / "prometheus.yml").write_text(block.text)
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))

    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_sums_and_they_are_of_numbers_that_are_told():
    done = promtool("check", "rules", str(SUMS))
    asked = set(re.findall(r"expr: .*\((gpuguard_[a-z_]+)\)", SUMS.read_text()))

    assert done.returncode == 0 and "11 rules found" in done.stdout
    assert asked and asked - names_told() == set()
