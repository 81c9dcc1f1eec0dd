"""/etc/gpuguard/line.yaml: what each key means, and that faults are told with their place and change nothing."""

from __future__ import annotations

import os
import threading
from dataclasses import fields

import pytest
from nodes import Gpuguard

from gpuguard.policies.files.decoder import Accounts
from gpuguard.queue import settings as linefile
from gpuguard.queue.priority import QueueRules, ReservationKeys
from gpuguard.queue.settings import PriorityKeys, QueueKeys, QueueSettings, parse, read_queue_settings

USERS = {"alice": 1001, "bob": 1002, "no": 1003}
EVERYTHING = b"""
fair_share: false
half_life: 2d
patience: 10%
bound: 90m
priority: {everybody: low, high: [alice, 4711], low: [bob]}
reservations: {devices: 1, longest: 2h, ahead: 3d, no_show: 5m}
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
        highest=-1,
        highest_of={1001: 1, 4711: 1, 1002: -1},
    )
    assert file.reservations == ReservationKeys(devices=1, longest=7200.0, ahead=3 * 86400.0, no_show=300.0)


def test_the_example_has_every_key():
    words = EVERYTHING.decode()

    assert all(f"{key.name}:" in words for noun in (QueueKeys, PriorityKeys, ReservationKeys) for key in fields(noun))


def test_what_is_not_written_is_as_without_the_file():
    assert read("fair_share: true") == QueueSettings()
    assert read("patience: 25%\nbound: 24h\nhalf_life: 7d\npriority: {everybody: normal}") == QueueSettings()
    assert [read(text).rules for text in ("", "\n# nothing\n", "---\n")] == [QueueRules()] * 3


def test_a_user_who_is_named_twice_gets_the_lower_priority():
    assert read("priority: {high: [alice], low: [alice]}").rules.highest_of == {1001: -1}


FAULTS = [
    ("fair_share: no", "1:13", "'no'"),
    ("fair_share: yes", "1:13", "'yes'"),
    ("bound: 24", "1:8", "'24' has no unit"),
    ("bound: 1:30", "1:8", "'1:30'"),
    ("bound: -1h", "1:8", "'-1h'"),
    ("patience: 25", "1:11", "'25' has no unit"),
    ("patience: 0.25", "1:11", "'0.25' has no unit"),
    ("half_life: 0s", "1:1", "half_life must be more than 0"),
    ("half_life:", "1:11", "the value is missing"),
    ("fair_shair: true", "1:1", "fair_shair"),
    ("bound: 1h\nbound: 2h", "2:1", "bound"),
    ("priority: high", "1:11", "must have keys"),
    ("priority: {everybody: highest}", "1:23", "'highest'"),
    ("priority: {high: alice}", "1:18", "must be a list"),
    ("priority: {high: [mallory]}", "1:19", "there is no user 'mallory'"),
    ("priority: {high: []}", "1:18", "the list is empty"),
    ("priority: {high: [*a]}", "1:19", "alias"),
    ("reservations: {devices: two}", "1:25", "two"),
    ("reservations: {devices: 010}", "1:25", "010"),
    ("reservations: {longest: 24}", "1:25", "'24' has no unit"),
    ("[fair_share]", "1:1", "must have keys"),
    ("{", "2:1", ""),
    ("a: \x1b[2J", "1:4", ""),
]


@pytest.mark.parametrize(("text", "place", "what"), FAULTS)
def test_a_fault_has_its_place_and_leaves_what_holds_without_the_file(text, place, what):
    file = read(f"{text}\n")

    assert file.rules == QueueRules() and file.reservations == ReservationKeys()
    shown = ["\n".join(fault.lines("line.yaml")) for fault in file.faults]
    assert any(fault.startswith(f"line.yaml:{place}: ") and what in fault for fault in shown), shown
    assert all(line.isprintable() for fault in shown for line in fault.split("\n"))


def test_a_name_in_quotes_is_a_name_and_no_is_a_name_too():
    assert read('priority: {high: ["alice", no]}').rules.highest_of == {1001: 1, 1003: 1}


def test_every_fault_is_told_at_once():
    assert len(read("bound: 24\npatience: 25\npriority: {high: [mallory]}\n").faults) == 3


def test_what_is_no_text_is_a_fault():
    (fault,) = read(b"\xff\xfe").faults

    assert "is not UTF-8" in fault.text


def test_no_file_is_no_fault(tmp_path):
    assert read_queue_settings(str(tmp_path / "none")) == QueueSettings(path=str(tmp_path / "none"))


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
    file = read_queue_settings(str(tmp_path / "line.yaml"))

    assert file.rules == QueueRules()
    assert what in file.faults[0].text and file.faults[0].line == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of root's and of others")
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


def test_a_directory_service_that_hangs_is_a_fault_and_not_a_wait_without_end():
    never = threading.Event()
    silent = Accounts(user_number=lambda name: never.wait(60) and 0, seconds=0.05)
    file = QueueSettings(*parse(b"priority: {high: [alice, bob]}\n", silent))
    never.set()

    assert file.rules == QueueRules() and len(file.faults) == 2
    assert "the directory service did not answer" in file.faults[0].text
