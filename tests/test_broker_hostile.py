"""A hostile user and a daemon that gives the locks: nothing is got past it, by hand, by forgery or by what was kept."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from broker_machine import FOR_BOTH_BROKERS, Brokered
from nodes import SECONDS, a_user, eventually
from users import ALICE, BOB

from gpuguard.claims.directory import daemon_files
from gpuguard.daemon.broker import OFFER_SECONDS
from gpuguard.daemon.service import TICK_SECONDS
from gpuguard.queue import tickets
from gpuguard.queue.tickets import read_tickets

pytestmark = pytest.mark.root


BY_HAND = """
import fcntl
for name in os.listdir(directory.locks):
    path = f"{directory.locks}/{name}"
    for attempt in (
        lambda: os.open(path, os.O_RDONLY), lambda: os.open(path, os.O_RDWR), lambda: os.unlink(path),
        lambda: os.rename(path, path + ".old"), lambda: os.chmod(path, 0o666), lambda: os.link(path, path + ".two"),
        lambda: os.open(path + ".new", os.O_CREAT | os.O_EXCL), lambda: os.truncate(path, 0),
    ):
        try:
            attempt()
            print(name)
        except OSError:
            pass
"""


@FOR_BOTH_BROKERS
def test_no_lock_can_be_taken_or_tampered_with_by_hand(broker):
    assert set(broker.python(BOB, BY_HAND).split()) <= {"queue"}


@FOR_BOTH_BROKERS
def test_what_was_given_cannot_be_opened_again_or_written(broker):
    code = """
_, (descriptor,) = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "conditions": {}})
for attempt in (
    lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY), lambda: os.write(descriptor, b"mine"),
    lambda: os.fchmod(descriptor, 0o666), lambda: os.ftruncate(descriptor, 0),
):
    try:
        attempt()
        print("done")
    except OSError:
        pass
"""
    assert broker.python(BOB, code, broker.uuids[0]) == ""


FORGED = """
alice, uid = sys.argv[1], int(sys.argv[2])
mine = sys.argv[3]
devices = [
    None, [], [1], [mine, mine], ["../gate"], ["gate"], ["queue"], [mine + ".nested"], [alice],
    [mine, alice], [f"{mine}{i}" for i in range(65)],
]
conditions = [
    [1], "x", {"no_such": 1}, {"share": True}, {"share": True, "memory": 0},
    {"share": True, "memory": 2**60}, {"memory": 2**30}, {"share": True, "memory": 2**30, "slots": 9},
    {"num_gpus": "1"}, {"mine_as_free": [[]]}, {"models": [0]}, {"max_util": 10**400},
]
others = [
    {"ticket": "../x"}, {"ticket": ["x"]}, {"inside": "none"}, {"inside": []}, {"priority": "high"},
    {"priority": 10**9}, {"time_limit_seconds": float("nan")}, {"expected_seconds": -1},
]
forged = {"mine_as_free": [uid], "max_processes": 9}
claims = [{}, *({"devices": each} for each in devices), {"devices": [alice], "conditions": forged}]
claims += [{"devices": [mine], "conditions": each} for each in conditions]
claims += [{"devices": [mine], **each} for each in others] + [{"devices": [alice], "inside": "none"}]
from gpuguard.errors import GpuguardError
for claim in claims:
    try:
        answer, descriptors = exchange(directory, {"conditions": {}, **claim, "do": "claim", "uid": 0})
        if descriptors or "refused" not in answer:
            print("GIVEN", claim, answer)
    except GpuguardError as error:
        if "busy" in str(error) or "fault" in str(error):
            print("FAILED", claim, error)
"""


@FOR_BOTH_BROKERS
def test_forged_requests_get_nothing(broker):
    with broker.job(ALICE, "--devices", "0"):
        said = broker.python(BOB, FORGED, broker.uuids[0], str(ALICE.pw_uid), broker.uuids[1])

        assert (said, broker.locked()) == ("", [0])
    assert broker.daemon and broker.daemon.poll() is None


INSIDE = """
for outer in sys.argv[2:]:
    try:
        print(exchange(directory, {"do": "claim", "devices": sys.argv[1:2], "inside": outer}))
    except Exception as error:
        print("refused")
"""


def test_no_user_gets_into_the_claim_of_another(broker):
    with broker.job(ALICE, "--devices", "0"):
        [record] = [name for name in os.listdir(broker.directory.records) if name.startswith("claim.")]
        name = record.split(".")[2]
        plant = "open(f'{directory.records}/claim.' + sys.argv[1], 'w').write('{}')"
        broker.python(BOB, plant, f"{BOB.pw_uid}.{name}.json")

        assert broker.python(BOB, INSIDE, broker.uuids[0], name, "", "x").split() == ["refused"] * 3


def test_a_forged_record_takes_nothing_from_whom_it_was_given(broker):
    forge = """
import fcntl, time
path = f"{directory.records}/claim.{os.geteuid()}.f0f0.json"
file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
os.write(file, json.dumps({"id": "f0f0", "devices": sys.argv[1:], "pid": 1, "since": 1.0, "ends": 2.0}).encode())
fcntl.flock(file, fcntl.LOCK_EX)
print("forged", flush=True)
time.sleep(60)
"""
    with broker.job(ALICE, "--devices", "0"), broker.running(BOB, forge, *broker.uuids):
        for user in (None, ALICE, BOB):
            claims = broker.claims(user, "--fresh")
            assert [claim["user"] for claim in claims] == [ALICE.pw_name]


KEPT = """
import fcntl
answer, (descriptor,) = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "conditions": {}})
print(answer["claim"], flush=True)
for line in sys.stdin:
    fcntl.flock(descriptor, getattr(fcntl, line.strip()) | fcntl.LOCK_NB)
    print(line, end="", flush=True)
"""


@FOR_BOTH_BROKERS
def test_a_descriptor_that_was_kept_is_worth_nothing(broker):
    path = broker.directory.lock_path(broker.uuids[0])
    with broker.running(BOB, KEPT, broker.uuids[0]) as hostile:
        before = os.stat(path).st_ino
        assert broker.locked() == [0]
        say(hostile, "LOCK_UN")
        assert eventually(lambda: os.stat(path).st_ino != before), "it was not noticed that it is free"
        say(hostile, "LOCK_EX")

        assert broker.locked() == []
        with broker.job(ALICE, "--devices", "0") as (_, hers):
            say(hostile, "LOCK_UN")
            say(hostile, "LOCK_EX")
            assert (hers, broker.locked()) == ("0", [0])


def test_no_device_is_shown_as_free_while_it_can_be_taken_back(broker):
    with broker.running(BOB, KEPT, broker.uuids[0]) as hostile:
        for _ in range(10):  # before the daemon looks by itself, and after
            say(hostile, "LOCK_UN")
            seen = broker.python(ALICE, "print(exchange(directory, {'do': 'claims'})[0]['held'])")
            say(hostile, "LOCK_EX")
            assert seen == "{}\n" and broker.locked() == []


def say(program: Any, word: str) -> None:
    print(word, file=program.stdin, flush=True)
    assert program.stdout.readline() == f"{word}\n"


UNREAD = """
import socket, time
from gpuguard.claims.daemon_client import connect, encoded
connection = socket.socket(socket.AF_UNIX)
connect(connection, directory, 10)
connection.sendall(encoded({"do": "claim", "devices": sys.argv[1:], "conditions": {}}))
print("asked", flush=True)
sys.stdin.readline()
"""


def test_what_lies_unread_in_a_socket_is_the_claim_of_the_process_that_asked_and_ends_with_it(broker):
    with broker.running(BOB, UNREAD, broker.uuids[0]):
        assert eventually(lambda: broker.locked() == [0])
        [claim] = broker.claims(ALICE, "--fresh")
        assert claim["user"] == BOB.pw_name
    assert eventually(lambda: broker.locked() == [])


LEAVES = UNREAD.replace("sys.stdin.readline()", "connection.close()")


def test_a_process_that_goes_before_the_reply_leaves_nothing_locked(broker):
    for _ in range(8):
        assert broker.python(BOB, LEAVES, *broker.uuids) == "asked\n"
    assert eventually(lambda: broker.locked() == [])
    assert broker(ALICE, "run", "--no-wait", "-n", "4", "true").returncode == 0


FLOOD = """
import socket, time
from gpuguard.claims.daemon_client import connect, encoded
until = time.monotonic() + 4.0
print("begun", flush=True)
while time.monotonic() < until:
    try:
        connection = socket.socket(socket.AF_UNIX)
        connect(connection, directory, 1)
        asked = encoded({"do": "claim", "devices": sys.argv[1:], "conditions": {}})
        socket.send_fds(connection, [asked[: 40 + int(time.monotonic() * 1000) % 200]], [0, 1, 2])
        connection.close()
    except OSError:
        pass
"""


@FOR_BOTH_BROKERS
def test_a_flood_with_descriptors_in_it_keeps_no_other_out_and_leaves_nothing_open(broker):
    assert broker.daemon
    here = f"/proc/{broker.daemon.pid}/fd"
    assert broker(ALICE, "run", "--no-wait", "true").returncode == 0
    before = len(os.listdir(here))
    with broker.running(BOB, FLOOD, *broker.uuids[:2]) as hostile:
        for _ in range(3):
            assert broker(ALICE, "run", "--no-wait", "--devices", "3", "true").returncode == 0
        hostile.wait()
    assert eventually(lambda: len(os.listdir(here)) <= before and broker.locked() == [])


@pytest.fixture
def alice_waits(broker):
    """She has one device, and a request for all in the queue; bob had more."""
    assert broker.asks(BOB, *broker.uuids)["descriptors"] == 4
    with (
        broker.job(ALICE, "--devices", "3", "--time-limit", "1h"),
        broker.waits(ALICE, "-n", "4", "--time-limit", "1h"),
    ):
        yield


def test_no_user_passes_the_queue_by_asking_the_daemon_directly(broker, alice_waits):
    [ticket] = [name.split(".")[2] for name in os.listdir(broker.directory.records) if name.startswith("ticket.")]
    long = broker.asks(BOB, broker.uuids[0])
    stolen = broker.python(BOB, INSIDE.replace('"inside": outer', '"ticket": outer'), broker.uuids[0], ticket)
    short = broker.asks(BOB, broker.uuids[0], time_limit_seconds=600)

    assert "it is not your turn: held back" in long["refused"][broker.uuids[0]]
    assert (stolen, short.get("descriptors")) == ("refused\n", 1)


FORGETS = """
from gpuguard.claims.directory import daemon_files
from gpuguard.daemon.broker import OFFER_SECONDS
for attempt in (os.unlink, lambda path: os.utime(path, (1.0, 1.0)), lambda path: os.rename(path, path + ".old")):
    try:
        attempt(daemon_files(directory).file(f"served.{os.geteuid()}"))
        print("done")
    except PermissionError:
        pass
"""


def test_no_user_can_forget_being_served_while_others_wait(broker, request):
    assert broker.asks(BOB, broker.uuids[0], time_limit_seconds=600)["descriptors"] == 1
    before = tickets.last_started(broker.directory, BOB.pw_uid)  # no other request waited
    request.getfixturevalue("alice_waits")
    assert broker.asks(BOB, broker.uuids[0], time_limit_seconds=600)["descriptors"] == 1
    said = broker.python(BOB, FORGETS)

    lately = tickets.last_started(broker.directory, BOB.pw_uid)
    assert (before, said) == (None, "") and lately and time.time() - lately < 60.0


ELSEWHERE = """
from gpuguard.queue.tickets import OwnTicket as Held
free, wanted = sys.argv[1:]
place = Held(directory, {"requests": [{"devices": [free]}]})
for device in (wanted, free):
    answer, descriptors = exchange(directory, {"do": "claim", "devices": [device], "ticket": place.id})
    print(len(descriptors))
"""


def test_a_user_who_may_start_on_one_device_does_not_get_another_one_that_is_waited_for(broker):
    assert broker.asks(BOB, *broker.uuids)["descriptors"] == 4  # he had more than alice
    with broker.job(ALICE, "--devices", "3", "--time-limit", "1h"), broker.waits(ALICE, "--devices", "2,3", "-n", "2"):
        said = broker.python(BOB, ELSEWHERE, broker.uuids[0], broker.uuids[2])

    assert said.split() == ["0", "1"]


def test_processes_of_others_cannot_be_overlooked_on_request(broker):
    node = broker.environment["GPUGUARD_BACKEND"].partition(":")[2]
    with a_user(node, "0", 2**30):
        said = broker.asks(BOB, broker.uuids[0], conditions={"mine_as_free": [0], "tolerance": 2**50})

    assert said["descriptors"] == 0 and "refused" in said


NESTED = """
import fcntl, time
answer, (device,) = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "conditions": {}})
_, (nested,) = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "inside": answer["claim"]})
os.close(device)
print("kept", flush=True)
time.sleep(60)
"""


def test_a_lock_inside_a_claim_that_was_kept_does_not_hinder_the_next_owner(broker):
    inner = f"{broker.python_path} -m gpuguard run --no-wait -- true"
    with broker.running(BOB, NESTED, broker.uuids[3]):
        done = broker(ALICE, "run", "--no-wait", "--devices", "3", "--", "sh", "-c", inner)

    assert done.returncode == 0, done.stderr


DEEPER = """
share = {"share": True, "memory": 2**30}
answer, (slot,) = exchange(directory, {"do": "claim", "devices": sys.argv[1:2], "conditions": share})
inside_a_share = {"devices": answer["locks"], "inside": answer["claim"]}
whole, (device,) = exchange(directory, {"do": "claim", "devices": sys.argv[2:], "conditions": {}})
inner, (nested,) = exchange(directory, {"do": "claim", "devices": sys.argv[2:], "inside": whole["claim"]})
inside_that = {"devices": inner["locks"], "inside": inner["claim"]}
for each in (inside_a_share, inside_that):
    try:
        print(exchange(directory, {"do": "claim", **each}))
    except Exception as error:
        print(error)
"""


def test_no_lock_is_given_beside_a_share_or_inside_of_what_is_inside(broker):
    said = broker.python(BOB, DEEPER, *broker.uuids[1:3])

    assert said.splitlines() == ["these GPUs are not yours by that claim."] * 2
    names = os.listdir(broker.directory.locks)
    assert not [name for name in names if name.endswith((".nested.nested", "slot0.nested"))]


def test_what_is_reserved_for_another_user_is_not_given(broker):
    reserved = broker(None, "reserve", "-n", "4", "--for", "1h", "--user", ALICE.pw_name)
    refused = broker.asks(BOB, broker.uuids[0])
    hers = broker(ALICE, "run", "--no-wait", "-n", "4", "true")

    assert reserved.returncode == 0, reserved.stderr
    assert refused["descriptors"] == 0 and "refused" in refused
    assert hers.returncode == 0, hers.stderr


ARRIVES = """
from gpuguard.queue.tickets import touch
print("arrives", flush=True)
while True:
    for name in os.listdir(directory.records):
        if name.startswith(f"reserve.{os.geteuid()}."):
            touch(f"{directory.records}/arrived.{os.geteuid()}.{name[8:-5]}")
    time.sleep(0.2)
"""


def test_a_reservation_whose_user_touches_a_file_and_claims_nothing_is_over_in_time(broker):
    site = broker.place / "line.yaml"
    site.write_text("reservations: {no_show: 5s}\n")
    broker.environment["GPUGUARD_LINE"] = str(site)
    broker.kill_daemon()
    broker.start_daemon()
    assert broker(BOB, "reserve", "-n", "2", "--for", "1h").returncode == 0
    with broker.running(BOB, ARRIVES):
        done = lambda: broker(ALICE, "run", "--no-wait", "-n", "4", "--", "true").returncode == 0  # noqa: E731
        assert eventually(done, 60.0)


TICKETS = """
import threading
from gpuguard.queue.tickets import OwnTicket as Held, new_ticket, ticket_content
from gpuguard.request import Request
wanted = [new_ticket([Request(num_gpus=int(number))], time_limit=3600.0) for number in sys.argv[1:]]
helds = [Held(directory, ticket_content(ticket)) for ticket in wanted]
print("waits", flush=True)
while True:  # it hears that it may start, and does not
    for held in helds:
        held.drain()
    time.sleep(0.05)
"""


def events_of_the_queue(broker: Brokered) -> list[tuple[str, str | None]]:
    log = broker.place / "daemon" / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]
    return [(event["outcome"], event.get("user")) for event in events if event["kind"] == "queue"]


def test_any_number_of_requests_that_never_claim_keep_one_device_from_others_and_only_for_some_seconds(broker):
    with broker.running(BOB, TICKETS, *"1111111"):
        assert broker(ALICE, "run", "--no-wait", "-n", "3", "--", "true").returncode == 0
        assert broker(ALICE, "run", "--wait", "60s", "-n", "4", "--", "true").returncode == 0
        assert broker.daemon and broker.daemon.poll() is None


def test_a_request_for_all_that_claims_nothing_goes_to_the_end_and_the_second_one_costs_an_hour(broker):
    with broker.running(BOB, TICKETS, "4"):
        assert broker(ALICE, "run", "--wait", "60s", "--", "true").returncode == 0
        assert events_of_the_queue(broker) == [("request set back", BOB.pw_name)]
        assert broker(ALICE, "run", "--no-wait", "-n", "4", "--", "true").returncode == 0

    with broker.running(BOB, TICKETS, "4"):
        assert eventually(lambda: len(events_of_the_queue(broker)) == 2, 60.0)
        assert events_of_the_queue(broker)[1] == ("user set back", BOB.pw_name)
    with broker.running(BOB, TICKETS, "4"):
        assert broker(ALICE, "run", "--no-wait", "-n", "4", "--", "true").returncode == 0


GIVES_BACK = """
import threading
from gpuguard.queue.tickets import OwnTicket as Held
held = Held(directory, {"requests": [{"num_gpus": len(sys.argv) - 1}]})
print("waits", flush=True)
while True:  # it takes what is offered, and gives it back at once
    held.drain()
    try:
        answer, descriptors = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "ticket": held.id})
        for descriptor in descriptors:
            os.close(descriptor)
        if descriptors and {MANY}:
            held.withdraw()
            held = Held(directory, {"requests": [{"num_gpus": len(sys.argv) - 1}]})
    except Exception:
        pass
    time.sleep(0.2)
"""


def test_a_ticket_that_takes_all_devices_and_gives_them_back_at_once_starts_once_and_then_comes_last(broker):
    with broker.job(ALICE, "-n", "2"):
        pass  # she has had GPU time, and bob has not
    with broker.running(BOB, GIVES_BACK.replace("{MANY}", "False"), *broker.uuids):
        assert eventually(lambda: events_of_the_queue(broker) == [("request set back", BOB.pw_name)], 60.0)
        for _ in range(3):
            done = broker(ALICE, "run", "--wait", "100s", "-n", "2", "--", "true")
            assert done.returncode == 0, done.stderr


def test_who_gives_back_again_and_again_what_no_process_holds_is_set_back(broker):
    with broker.running(BOB, GIVES_BACK.replace("{MANY}", "True"), *broker.uuids):
        assert eventually(lambda: len(events_of_the_queue(broker)) == 2, 60.0)
        assert events_of_the_queue(broker) == [(f"{what} set back", BOB.pw_name) for what in ("request", "user")]
        done = broker(ALICE, "run", "--wait", "100s", "-n", "4", "--", "true")
        assert done.returncode == 0, done.stderr


def test_each_grant_costs_a_minute_of_fair_share_and_who_believes_to_be_second_starts_when_it_is_offered(broker):
    """Only the daemon knows of the grants that bob gave back: alice would let him go first."""
    for _ in range(3):
        assert broker.asks(BOB, *broker.uuids)["descriptors"] == 4
    with broker.job(None, "-n", "4") as (holder, _), broker.running(BOB, TICKETS, "4"):
        hers = broker.start(ALICE, "run", "--wait", "100s", "-n", "4", "--", "sh", "-c", "echo started; exec sleep 100")
        assert eventually(lambda: len(read_tickets(broker.directory)[0]) == 2, 60.0)
        os.killpg(holder.pid, signal.SIGKILL)
        try:
            assert hers.stdout.readline() == "started\n"
            assert events_of_the_queue(broker) == []
        finally:
            os.killpg(hers.pid, signal.SIGKILL)
            hers.communicate()


def test_short_jobs_of_requests_that_have_waited_are_no_grants_that_were_given_back(broker):
    with broker.job(ALICE, "-n", "4") as (holder, _):
        waiting = [broker.start(BOB, "run", "--", "true") for _ in range(4)]
        waiting += [broker.start(ALICE, "run", "--", "true") for _ in range(2)]
        assert eventually(lambda: len(read_tickets(broker.directory)[0]) == 6, 60.0)
        os.killpg(holder.pid, signal.SIGKILL)
        for process in waiting:
            process.communicate(timeout=SECONDS)
    time.sleep(3 * TICK_SECONDS)  # the daemon has looked what became of them

    assert [process.returncode for process in waiting] == [0] * 6
    assert events_of_the_queue(broker) == []


def test_why_no_request_can_be_set_back_is_an_event_of_its_own(broker):
    (Path(daemon_files(broker.directory).path) / "set-back.json").mkdir()
    with broker.running(BOB, TICKETS, "4"):
        assert eventually(lambda: events_of_the_queue(broker) == [("not tended", None)], 60.0)


def test_requests_of_one_user_that_claim_start_one_after_the_other_and_none_is_set_back(broker):
    with broker.job(ALICE, "-n", "4") as (holder, _):
        waiting = [broker.start(BOB, "run", "--", "true") for _ in range(3)]
        waiting.append(broker.start(ALICE, "run", "-n", "2", "--", "true"))
        assert eventually(lambda: len(read_tickets(broker.directory)[0]) == 4, 60.0)
        os.killpg(holder.pid, signal.SIGKILL)

        for process in waiting:
            process.communicate(timeout=SECONDS)
        assert [process.returncode for process in waiting] == [0] * 4
    assert events_of_the_queue(broker) == []


def test_no_request_is_set_back_while_the_driver_answers_nobody(broker):
    node, away = broker.place / "node", broker.place / "away"
    with broker.job(ALICE, "-n", "4") as (holder, _):
        waiting = broker.start(BOB, "run", "--wait", "100s", "--", "true")
        assert eventually(lambda: len(read_tickets(broker.directory)[0]) == 1, 60.0)
        time.sleep(2.0)  # the daemon knows of it, too
        node.rename(away)  # as while the driver is loaded anew
        assert eventually(lambda: "driver unresponsive" in broker.said(), 60.0)
        os.killpg(holder.pid, signal.SIGKILL)
        time.sleep(3 * OFFER_SECONDS)
        away.rename(node)
        waiting.communicate(timeout=SECONDS)

    assert (waiting.returncode, events_of_the_queue(broker)) == (0, [])


def test_no_user_can_set_another_back(broker):
    forge = "open(f'{directory.path}/set-back.json', 'w')"
    with pytest.raises(AssertionError, match="Permission denied"):
        broker.python(BOB, forge)
