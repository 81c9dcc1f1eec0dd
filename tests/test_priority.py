"""The order of the queue at its edges, and the numbers by which it goes: the site's, or those of no file."""

import os
import time
from dataclasses import fields, replace

import pytest
from builders import a_claim_record, a_snapshot
from hypothesis import given
from hypothesis import strategies as st
from nodes import Gpuguard
from queues import HOUR, a_ticket

from gpuguard.claims.ids import full_id, one_of
from gpuguard.errors import ClaimError
from gpuguard.queue import settings as linefile
from gpuguard.queue import state
from gpuguard.queue.priority import (
    PRIORITIES,
    JobKeys,
    PriorityKeys,
    QueueRules,
    ReservationKeys,
    bound_now,
    due_at,
    order,
    overdue,
    permitted,
)
from gpuguard.queue.settings import QueueSettings, parse, read_queue_settings
from gpuguard.queue.state import expected_end, last_ends, read_queue_facts, used_by
from gpuguard.yaml_files.decoder import Accounts

NOW = 1_000_000.0
DAY = 86400.0
HIGH = {"priority": PriorityKeys("high")}


def ids(tickets, usage=None, now=NOW, **rules):
    return [ticket.id for ticket in order(tickets, usage or {}, QueueRules(**rules), now)]


def test_recent_use_counts_from_the_first_moment_after_the_boot_on(directory, monkeypatch):
    monkeypatch.setattr(state, "query_store", lambda path, ask: {1001: 3600.0})
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)

    assert read_queue_facts(directory, a_snapshot(), QueueRules()).usage == {1001: 3600.0}


def test_where_the_site_says_nothing_it_goes_by_these_numbers():
    assert QueueRules() == QueueRules(True, 7 * DAY, 0.25, 24 * HOUR, PriorityKeys("normal"), ReservationKeys())
    assert ReservationKeys() == ReservationKeys(2, DAY, 14 * DAY, 30 * 60.0)
    assert PRIORITIES == {"low": -1, "normal": 0, "high": 1}  # these stand in tickets, of other versions too


@pytest.mark.parametrize(
    ("asked", "rules", "real"),
    [
        ("high", {}, "normal"),
        ("low", {}, "low"),
        ("high", HIGH, "high"),
        ("high", {"priority": PriorityKeys(high=(1001,))}, "high"),
        ("normal", {"priority": PriorityKeys("high", low=(1001,))}, "low"),
        ("high", {"priority": PriorityKeys(high=(1001,), low=(1001,))}, "low"),
    ],
)
def test_a_priority_above_the_permitted_one_counts_as_the_permitted_one(asked, rules, real):
    ticket = a_ticket(user=1001, priority=PRIORITIES[asked])

    assert permitted(ticket, QueueRules(**rules)) == PRIORITIES[real]
    assert order([ticket], {}, QueueRules(**rules), NOW)[0].priority == PRIORITIES[real]


def test_a_promise_that_ends_now_is_kept_yet_and_a_moment_later_it_is_not():
    ticket = a_ticket(id="a", since=NOW - HOUR, promise=NOW)

    assert overdue([ticket], QueueRules(), NOW) == frozenset()
    assert overdue([ticket], QueueRules(), NOW + 1) == {"a"}


def test_without_a_promise_patience_ends_with_the_bound_and_no_promise_is_in_the_past():
    assert due_at(a_ticket(since=NOW, promise=None), QueueRules(bound=60.0)) == NOW + 60
    assert due_at(a_ticket(since=NOW, promise=NOW - HOUR), QueueRules(bound=60.0)) == NOW


def test_the_bound_follows_the_waits_of_the_jobs_that_run_and_is_never_below_that_of_the_site():
    rules = QueueRules(bound=HOUR)

    assert bound_now(rules, [], 9e9).bound == bound_now(rules, [0.0, HOUR / 2], 9e9).bound == HOUR
    assert bound_now(rules, [HOUR, 3 * HOUR], 9e9).bound == 6 * HOUR
    assert bound_now(QueueRules(bound=0.0), [], 9e9).bound == 0.0
    # What a claim says of its wait could be forged.
    assert bound_now(rules, [0.0, 1e12], 9e9).bound == bound_now(rules, [0.0, 20 * DAY], 9e9).bound == 30 * DAY


def test_the_bound_is_at_most_one_and_a_half_times_the_time_for_which_there_is_work():
    rules = QueueRules(bound=HOUR)

    assert bound_now(rules, [DAY], 10 * HOUR).bound == 15 * HOUR
    assert bound_now(rules, [DAY], 0.0).bound == HOUR


def test_what_a_user_is_charged_for_their_requests_is_added_to_what_they_have_used():
    tickets = [
        a_ticket(id="a1", user=1, since=NOW + 1, time_limit=10.0),
        a_ticket(id="a2", user=1, since=NOW + 2, gpus=2, time_limit=10.0),
        a_ticket(id="a3", user=1, since=NOW + 3, time_limit=10.0),
        a_ticket(id="b", user=2, since=NOW + 9, time_limit=10.0),
        a_ticket(id="c", user=3, since=NOW + 9, time_limit=10.0),
    ]

    assert ids(tickets, {1: 100.0, 2: 105.0, 3: 125.0}) == ["a1", "b", "a2", "c", "a3"]


CLAIM = a_claim_record(since=NOW)


@pytest.mark.parametrize(
    ("fields", "now", "end"),
    [
        ({}, NOW, None),
        ({"ends": NOW + 9}, NOW, NOW + 9),
        ({"expected": NOW + 100}, NOW + 99, NOW + 100),
        ({"expected": NOW + 100}, NOW + 100, NOW + 200),
        ({"expected": NOW + 100, "ends": NOW + 150}, NOW + 100, NOW + 150),
        ({"expected": NOW + 100, "ends": NOW + 250}, NOW + 100, NOW + 200),
        ({"expected": NOW + 100, "since": None}, NOW + 50, NOW + 100),
        ({"expected": NOW + 100, "since": None}, NOW + 100, NOW + 101),
    ],
)
def test_a_claim_ends_as_its_users_earlier_jobs_did_but_no_later_than_at_its_limit(fields, now, end):
    assert expected_end(replace(CLAIM, **fields), now) == end


def test_a_device_is_free_when_the_last_claim_on_it_has_ended_if_all_of_them_end():
    claims = [
        replace(CLAIM, devices=("d0", "d1"), ends=NOW + 20),
        replace(CLAIM, devices=("d1", "d2"), ends=NOW + 30),
        replace(CLAIM, devices=("d2", "d3")),
        replace(CLAIM, devices=("d2",), ends=NOW + 40),
    ]

    assert last_ends(claims, lambda claim: claim.ends) == {"d0": NOW + 20, "d1": NOW + 30}


def test_the_use_of_the_claims_that_live_counts_by_their_devices_and_their_time_so_far():
    claims = [
        replace(CLAIM, uid=1, devices=("d0", "d1"), since=NOW - 100),
        replace(CLAIM, uid=1, devices=("d2",), since=NOW - 1),
        replace(CLAIM, uid=0, devices=("d3",), since=NOW - 5),
        replace(CLAIM, uid=2, devices=("d4",), since=NOW + 5),  # by a clock that was set since
        replace(CLAIM, uid=3, devices=("d5",), since=None),
        replace(CLAIM, uid=-1, devices=("d6",), since=NOW - 100),
    ]

    assert used_by(claims, NOW) == {1: 201.0, 0: 5.0, 2: 0.0}


def test_of_one_users_tickets_only_the_oldest_that_could_start_is_overdue():
    tickets = [
        a_ticket(id="waits", user=1, since=1.0, after="another"),
        a_ticket(id="younger", user=1, since=3.0),
        a_ticket(id="older", user=1, since=2.0),
    ]

    assert overdue(tickets, QueueRules(), NOW) == overdue(tickets[::-1], QueueRules(), NOW) == {"older"}


@pytest.mark.parametrize(("ago", "first"), [(DAY, "late"), (DAY - 1, "young")])
def test_a_user_who_was_served_within_the_bound_is_not_lifted(ago, first):
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY, served=NOW - ago)
    young = a_ticket(id="young", user=2, since=NOW - 10)

    assert ids([young, late], {1: 9e9})[0] == first


def test_an_overdue_request_does_not_pass_an_older_one_like_it_that_was_promised_a_later_start():
    older = a_ticket(1, id="older", since=NOW - 3 * DAY, promise=NOW + DAY)
    late, other = a_ticket(1, id="late", since=NOW - 2 * DAY), a_ticket(1, 2, id="wide", since=NOW - 2 * DAY)

    assert overdue([late, older], QueueRules(), NOW) == {"older"}
    assert overdue([other, older], QueueRules(), NOW) == {"wide"}


def test_without_fair_share_it_goes_by_arrival_whatever_is_overdue():
    late = a_ticket(id="late", user=1, since=NOW - 3 * DAY)
    later = a_ticket(id="later", user=2, since=NOW - 2 * DAY)
    early = a_ticket(id="early", user=3, since=NOW - 4 * DAY, promise=NOW + DAY)

    assert ids([later, late, early], fair_share=False) == ["early", "late", "later"]
    assert ids([later, late, early])[:2] == ["late", "later"]


def test_a_user_who_used_nothing_comes_before_one_who_used_half_a_second():
    tickets = [a_ticket(id="a", user=1, since=NOW - 20), a_ticket(id="b", user=2, since=NOW - 10)]

    assert ids(tickets, {1: 0.5}) == ["b", "a"]


def test_of_users_to_whom_as_much_is_charged_the_one_who_was_served_longest_ago_is_next():
    tickets = [
        a_ticket(id="lately", user=1, since=NOW - 30, served=NOW - 60),
        a_ticket(id="long ago", user=2, since=NOW - 20, served=NOW - HOUR),
        a_ticket(id="never", user=3, since=NOW - 10, served=None),
    ]

    assert ids(tickets) == ["never", "long ago", "lately"]


@pytest.mark.parametrize(
    ("gpus", "fields", "charged"),
    [
        (1, {}, HOUR),  # it is not known how long
        (1, {"expected": 100.0}, 100.0),
        (1, {"expected": 100.0, "time_limit": 500.0}, 500.0),
        (4, {"time_limit": 100.0}, 400.0),
        (1, {"after": "another"}, 0.0),  # it is not queued yet
    ],
)
def test_each_ticket_counts_as_if_its_job_had_run_already(gpus, fields, charged):
    mine = [a_ticket(1, gpus, id=f"mine {n}", since=NOW - 20 + n, **fields) for n in range(2)]

    def second(used):
        return ids([*mine, a_ticket(id="another user's", user=2, since=NOW - 10)], {2: used})[1]

    assert second(charged + 0.5) == "mine 1"
    assert charged == 0.0 or second(charged - 0.5) == "another user's"


def test_a_higher_class_goes_first_and_in_it_the_same_order():
    tickets = [
        a_ticket(id=f"{name} {n}", user=1, since=NOW + n, priority=PRIORITIES[name])
        for name in ("low", "high", "normal")
        for n in (2, 1)
    ]

    assert ids(tickets, now=NOW + 10, **HIGH) == ["high 1", "high 2", "normal 1", "normal 2", "low 1", "low 2"]


def test_a_ticket_that_was_promised_an_earlier_start_is_first_in_its_class():
    late = a_ticket(1, id="late", since=NOW - 5, promise=NOW - 1)

    assert ids([a_ticket(2, id="a", since=NOW - 9), late], {1: 1e9}) == ["late", "a"]
    assert ids([a_ticket(2, id="a", since=NOW - 9, priority=1), late], {1: 1e9}, **HIGH) == ["a", "late"]


TODAY = 30 * HOUR
tickets = st.builds(
    a_ticket,
    user=st.integers(1, 4),
    gpus=st.integers(1, 8),
    since=st.floats(0, TODAY),
    priority=st.integers(-1, 1),
    time_limit=st.none() | st.floats(1, 100 * HOUR),
    promise=st.none() | st.floats(0, 2 * TODAY),
    after=st.none() | st.just("x"),
)
usages = st.dictionaries(st.integers(1, 4), st.floats(0, 1e9))


@given(st.lists(tickets, max_size=20), usages, st.booleans())
def test_each_ticket_has_one_position_and_classes_do_not_mix(waiting, usage, fair):
    queue = order(waiting, usage, QueueRules(fair_share=fair, **HIGH), TODAY)

    assert sorted(ticket.id for ticket in queue) == sorted(ticket.id for ticket in waiting)
    priorities = [ticket.priority for ticket in queue]
    assert priorities == sorted(priorities, reverse=True)


@given(st.lists(tickets, max_size=20), usages)
def test_the_order_does_not_depend_on_the_order_in_which_files_are_found(waiting, usage):
    assert order(waiting, usage, QueueRules(), TODAY) == order(waiting[::-1], usage, QueueRules(), TODAY)


@given(st.lists(tickets, max_size=20), usages)
def test_no_user_gets_before_the_first_request_of_one_who_had_less_except_with_what_is_overdue(waiting, usage):
    waiting = [ticket for ticket in waiting if ticket.priority == 0 and ticket.after is None]
    queue = order(waiting, usage, QueueRules(bound=1e9), TODAY)
    in_time = [ticket for ticket in queue if ticket.promise is None or ticket.promise >= TODAY]
    first = {ticket.uid: ticket.id for ticket in reversed(queue)}
    for number, ticket in enumerate(in_time):
        if ticket.id == first[ticket.uid]:
            used = [usage.get(other.uid, 0.0) for other in in_time[:number]]
            assert all(other <= usage.get(ticket.uid, 0.0) for other in used)


USERS = {"alice": 1001, "bob": 1002, "no": 1003}
EVERYTHING = b"""
fair_share: false
half_life: 2d
patience: 10%
bound: 90m
priority: {everybody: low, high: [alice, 4711], low: [bob]}
reservations: {devices: 1, longest: 2h, ahead: 3d, no_show: 5m}
jobs: {waiting: 200, running: 8}
leftover: 10m
"""


def accounts():
    return Accounts(user_number=USERS.__getitem__)


def read(text):
    return QueueSettings(*parse(text if isinstance(text, bytes) else text.encode(), accounts()))


def test_every_key_is_read_in_its_unit():
    file = read(EVERYTHING)

    assert file.faults == ()
    assert file.rules == QueueRules(
        fair_share=False,
        half_life=2 * 86400.0,
        patience=0.1,
        bound=5400.0,
        priority=PriorityKeys("low", high=(1001, 4711), low=(1002,)),
        reservations=ReservationKeys(devices=1, longest=7200.0, ahead=3 * 86400.0, no_show=300.0),
        jobs=JobKeys(waiting=200, running=8),
        leftover=600.0,
    )


@pytest.mark.parametrize("how", ["none", "good", "faulty", "a directory", "too large"])
def test_what_is_read_of_a_file_says_where_it_lies_and_what_is_wrong_with_it(tmp_path, how):
    path = tmp_path / "line.yaml"
    if how == "a directory":
        path.mkdir()
    elif how != "none":
        texts = {"good": "bound: 8h\n# \u4f60\n", "faulty": "bound: 8\n", "too large": "x" * (2**20 + 1)}
        path.write_text(texts[how])
    said = {
        "good": {"rules": QueueRules(bound=8 * 3600.0), "text": "bound: 8h\n# \u4f60\n"},
        "faulty": {"text": "bound: 8\n"},
    }

    site = read_queue_settings(path=str(path))
    assert replace(site, faults=()) == QueueSettings(path=str(path), **said.get(how, {}))
    assert [(fault.line, fault.column) for fault in site.faults] == {
        "none": [], "good": [], "faulty": [(1, 8)], "a directory": [(0, 0)], "too large": [(0, 0)]
    }[how]  # fmt: skip
    assert all(fault.text for fault in site.faults)


def test_the_example_has_every_key():
    words = EVERYTHING.decode()

    assert all(
        f"{key.name}:" in words for noun in (QueueRules, PriorityKeys, ReservationKeys, JobKeys) for key in fields(noun)
    )


def test_what_is_not_written_is_as_without_the_file():
    assert read("") == read("# bound: 24h\n") == read("fair_share: true") == QueueSettings()
    assert read("patience: 25%\nbound: 24h\nhalf_life: 7d\npriority: {everybody: normal}") == QueueSettings()
    assert [read(text).rules for text in ("", "\n# nothing\n", "---\n")] == [QueueRules()] * 3


FAULTS = [
    ("fair_share: no", "1:13", "'no'"),
    ("bound: 24", "1:8", "'24' has no unit"),
    ("leftover: for ever", "1:11", "'for ever' is none of keep, release, or a duration"),
    ("bound: -1h", "1:8", "'-1h'"),
    ("patience: 25", "1:11", "'25' has no unit"),
    ("half_life: 0s", "1:1", "half_life must be more than 0"),
    ("fair_shair: true", "1:1", "fair_shair"),
    ("priority: {everybody: highest}", "1:23", "'highest'"),
    ("priority: {high: [mallory]}", "1:19", "there is no user 'mallory'"),
    ("reservations: {devices: two}", "1:25", "two"),
    ("reservations: {longest: 24}", "1:25", "'24' has no unit"),
    ("[fair_share]", "1:1", "must have keys"),
    ("a: \x1b[2J", "1:4", ""),
]


@pytest.mark.parametrize(("text", "place", "what"), FAULTS)
def test_a_fault_has_its_place_and_leaves_what_holds_without_the_file(text, place, what):
    file = read(f"{text}\n")

    assert file.rules == QueueRules()
    shown = ["\n".join(fault.lines("line.yaml")) for fault in file.faults]
    assert any(fault.startswith(f"line.yaml:{place}: ") and what in fault for fault in shown), shown
    assert all(line.isprintable() for fault in shown for line in fault.split("\n"))


def test_no_file_is_no_fault(tmp_path):
    assert read_queue_settings(path=str(tmp_path / "none")) == QueueSettings(path=str(tmp_path / "none"))


def test_the_variable_names_another_file(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("fair_share: false\n")
    monkeypatch.setenv("GPUGUARD_LINE", str(tmp_path / "mine.yaml"))

    assert read_queue_settings().rules.fair_share is False
    assert read_queue_settings().path == str(tmp_path / "mine.yaml")


@pytest.mark.root
def test_root_shows_nothing_of_a_secret_file_that_the_variable_names(tmp_path):
    """`GPUGUARD_LINE=/etc/shadow gpuguard queue` printed a line of it, as a fault."""
    secret = tmp_path / "shadow"
    secret.write_text("root:$6$secret:20000:0:99999:7:::\n")
    secret.chmod(0o640)
    done = Gpuguard(tmp_path, None, GPUGUARD_LINE=str(secret))("queue")

    assert "secret:" not in done.stdout + done.stderr
    assert "not everybody may read this file" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.mkdir(), "the file cannot be read: Is a directory"),
        (lambda path: os.mkfifo(path), "this is not a regular file"),
        (lambda path: path.write_bytes(b"#" * 100_000), "the file is larger than 64 KiB"),
        (lambda path: path.symlink_to(path), "the file cannot be read: Too many levels of symbolic links"),
    ],
)
def test_what_cannot_be_read_is_a_fault_and_never_an_error(tmp_path, make, what):
    make(tmp_path / "line.yaml")
    file = read_queue_settings(path=str(tmp_path / "line.yaml"))

    assert file.rules == QueueRules()
    assert what in file.faults[0].text and file.faults[0].line == 0


@pytest.mark.root
def test_the_file_of_the_machine_counts_only_when_root_alone_can_have_written_it(tmp_path, monkeypatch):
    place = tmp_path / "gpuguard"
    place.mkdir(mode=0o755)
    path = place / "line.yaml"
    path.write_text("fair_share: false\n")
    path.chmod(0o644)
    monkeypatch.setattr(linefile, "PATH", str(path))
    monkeypatch.delenv("GPUGUARD_LINE", raising=False)
    assert read_queue_settings().rules.fair_share is False

    os.chown(path, 1001, 1001)
    assert read_queue_settings().rules == QueueRules()
    assert "belongs to uid 1001" in read_queue_settings().faults[0].text

    os.chown(path, 0, 0)
    path.chmod(0o666)
    assert "can be written by others" in read_queue_settings().faults[0].text

    path.chmod(0o644)
    os.chown(place, 1001, 1001)
    assert f"{place} belongs to uid 1001" in read_queue_settings().faults[0].text


@pytest.mark.parametrize(
    ("text", "uid", "meant"),
    [
        ("3f0c", 1001, "alice/3f0c9e21"),  # its beginning
        ("3f0c9e21", 1001, "alice/3f0c9e21"),
        ("alice/3f0c", 0, "alice/3f0c9e21"),
        ("1001/3f0c", 0, "alice/3f0c9e21"),
        ("alice.3f0c9e21", 1001, "alice/3f0c9e21"),  # as 0.1 wrote it
        ("1002.77aap41", 1002, "bob/77aa"),  # of a request, as --json has it
        ("", 1001, None),
        ("alice/", 1001, None),
        ("ffff", 1001, None),
    ],
)
def test_an_id_means_a_request_or_a_claim_by_its_beginning_too(text, uid, meant):
    claim = a_claim_record(id="3f0c9e21", uid=1001, user="alice")
    request = replace(a_ticket(1002, id="1002.77aap41"), user="bob")

    found = one_of(text, [claim, request], uid)

    assert (found and full_id(found)) == meant


@pytest.mark.parametrize(
    ("text", "uid", "why"), [("3f", 0, "alice/3f0c, alice/3f11"), ("3f", 1003, "only alice and root")]
)
def test_an_id_of_several_or_of_another_user_is_refused(text, uid, why):
    claims = [a_claim_record(id=number, uid=1001, user="alice") for number in ("3f0c", "3f11")]

    with pytest.raises(ClaimError) as refused:
        one_of(text, claims, uid)

    assert why in str(refused.value)
