"""What the daemon does on request: own claims and processes for every user, the machine for root alone."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot
from claimholders import Holder, a_holder
from daemons import a_daemon
from guard_scene import SOMEBODY, Listing
from nodes import eventually

from gpuguard.claims.daemon_client import EventsReply, decoded
from gpuguard.claims.directory import lock_directory, open_lock, try_flock
from gpuguard.claims.records import locked_devices, probe
from gpuguard.claims.restrictions import DENIED, QUARANTINED, Restriction, read_restrictions
from gpuguard.daemon.exemptions import Exemptions
from gpuguard.daemon.requests import ADMINISTRATION, PERSONAL, RequestContext, handle
from gpuguard.enforcement.identity import overflow_uid
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.history.audit_log import line_of
from gpuguard.model import Event, Subject
from gpuguard.policies.engine import PolicyStatus
from gpuguard.queue import broker_client
from gpuguard.request import Request

root = pytest.mark.root
ANOTHER = SOMEBODY + 1


class Requests:
    """Requests without a daemon behind them."""

    def __init__(self, place: str) -> None:
        self.directory = lock_directory(f"{place}/claims")
        self.machine = Listing(a_device(0), a_device(1), a_device(2))
        self.uuids = [device.uuid for device in self.machine.devices]
        for uuid in self.uuids:
            os.close(open_lock(self.directory, uuid))
        self.events: list[Event] = []
        self.writable, self.reloaded, self.stale = True, 0, 0.0
        self.statuses: tuple[PolicyStatus, ...] = ()
        exemptions = Exemptions(self.directory, lambda kept: None, lambda: self.machine.devices, self.append)
        look = self.snapshot, lambda: 10.0, lambda: self.statuses
        act = self.append, self.reload, f"{place}/policy.yaml"
        self.context = RequestContext(self.directory, exemptions, *look, *act, enforcing=True)

    def snapshot(self) -> Any:
        found = self.machine.sample((), None)
        return replace(found, claims=probe(self.directory, self.uuids), clock=found.clock - self.stale)

    def append(self, event: Event) -> bool:
        self.events.append(event)
        return self.writable

    def reload(self) -> None:
        self.reloaded += 1

    def asks(self, asker: int, **request: Any) -> Any:
        return handle(self.context, asker, request)

    def locked(self) -> int:
        return len(locked_devices(self.directory, self.uuids))

    def restrictions(self) -> dict[str, dict[str, Restriction]]:
        return {kind: read_restrictions(self.directory, kind, 0.0) for kind in (DENIED, QUARANTINED)}

    def refuses(self, asker: int, why: str, **request: Any) -> bool:
        with pytest.raises(GpuguardError, match=why or None):
            self.asks(asker, **request)
        return True


@pytest.fixture
def requests_(open_place: Path) -> Requests:
    return Requests(str(open_place))


@pytest.fixture
def holder(requests_: Requests) -> Iterator[Holder]:
    with a_holder(requests_.directory, *requests_.uuids[:2], uid=SOMEBODY) as holder:
        yield holder


@root
@pytest.mark.parametrize("asker", [SOMEBODY, 0])
def test_the_owner_and_root_have_an_unused_claim_released(requests_, holder, asker):
    said = requests_.asks(asker, do="release", claim=holder.id, reason="tidy up")

    assert said == {"released": holder.id, "devices": 2} and requests_.locked() == 0
    assert "tidy up" in holder.does("claim.reassert()")
    [event] = requests_.events
    assert (event.kind, event.outcome, dict(event.facts)["asked_by_uid"]) == ("release", "about to", asker)


@root
@pytest.mark.parametrize(
    "request_",
    [
        {}, {"claim": None}, {"claim": ""}, {"claim": "1dea"}, {"claim": "../claims/claim.0.1dea1234"}, {"claim": 7},
        {"claim": ["1dea1234"]}, {"claim": "1dea1234", "uid": 0}, {"claim": "nothing"}, {"claim": "\x00"},
    ],
)  # fmt: skip
def test_a_request_that_does_not_name_an_own_claim_whole_releases_nothing(requests_, holder, request_):
    assert all(requests_.refuses(asker, "", do="release", **request_) for asker in (ANOTHER, SOMEBODY))
    assert requests_.locked() == 2 and holder.does("claim.reassert()") == "None"


@root
def test_a_claim_of_another_user_is_not_released(requests_, holder):
    for asker in (ANOTHER, 65534):
        assert requests_.refuses(asker, "and root can do that", do="release", claim=holder.id)

    assert requests_.locked() == 2 and requests_.events == []


@root
@pytest.mark.parametrize(
    "change", [{"processes": (a_process(7, uid=SOMEBODY),)}, {"processes": None}, {"processes_plausible": False}]
)
def test_a_claim_that_may_be_in_use_is_not_released_for_root_either(requests_, holder, change):
    requests_.machine.change(1, **change)
    assert all(requests_.refuses(asker, "", do="release", claim=holder.id) for asker in (SOMEBODY, 0))
    assert requests_.locked() == 2


@root
def test_nothing_is_released_by_an_old_sample_or_without_an_event(requests_, holder):
    requests_.stale = 60.0
    assert requests_.refuses(SOMEBODY, "does not see", do="release", claim=holder.id)
    requests_.stale, requests_.writable = 0.0, False
    assert requests_.refuses(SOMEBODY, "log", do="release", claim=holder.id)

    assert requests_.locked() == 2


@root
def test_a_flood_of_requests_is_stopped_after_ten_a_minute(requests_, holder):
    requests_.machine.change(1, processes=None)
    for _ in range(10):
        assert requests_.refuses(SOMEBODY, "list of the processes", do="release", claim=holder.id)
    assert requests_.refuses(SOMEBODY, "within a minute", do="release", claim=holder.id)


def a_status(uid: int, **fields: Any) -> PolicyStatus:
    facts = {"policy": "idle", "since": 100.0, "last": "warn", "next": "terminate", "due": 200.0, "enforce": True}
    return PolicyStatus(subject=Subject("process", "GPU-A", 7, 1.0, uid, user="x"), **{**facts, **fields})


def test_each_user_sees_the_findings_about_them_and_root_all(requests_):
    hog = a_status(SOMEBODY, policy="hog", due=None, next=None)
    requests_.statuses = (a_status(SOMEBODY), a_status(ANOTHER), hog)
    own, others = (requests_.asks(asker, do="status")["standing"] for asker in (SOMEBODY, ANOTHER))

    assert [[row["policy"] for row in rows] for rows in (own, others)] == [["idle", "hog"], ["idle"]]
    assert own[0]["next_unix_seconds"] - own[0]["since_unix_seconds"] == pytest.approx(100)
    assert requests_.refuses(SOMEBODY, "other users", do="status", uid=ANOTHER)
    assert [len(requests_.asks(0, do="status", **whose)["standing"]) for whose in ({}, {"uid": ANOTHER})] == [3, 1]


def test_a_reply_fits_into_its_line_however_many_findings_there_are(requests_):
    name, uuid = "p" * 64, "MIG-" + "f" * 36
    subject = Subject("claim", uuid, None, None, SOMEBODY, "f" * 40, user="u" * 32)
    requests_.statuses = tuple(replace(a_status(SOMEBODY, policy=name), subject=subject) for _ in range(100))
    said = requests_.asks(SOMEBODY, do="status")

    assert len(said["standing"]) >= 5 and len(said["standing"]) + said["left_out"] == 100
    assert len(json.dumps({"ok": True, **said})) < 4096


@pytest.mark.parametrize("name", sorted(PERSONAL))
def test_users_who_are_all_one_uid_here_have_nothing_of_their_own(requests_, name):
    assert requests_.refuses(overflow_uid(), "who you are is not known here", do=name)


@root
@pytest.mark.parametrize("name", sorted(ADMINISTRATION))
def test_the_machine_is_roots_alone(requests_, name):
    assert requests_.refuses(SOMEBODY, "only root", do=name, uid=SOMEBODY, device="0", for_seconds=60)
    assert requests_.reloaded == 0 and requests_.restrictions() == {DENIED: {}, QUARANTINED: {}}


def test_root_denies_quarantines_and_ends_that(requests_):
    me = os.geteuid()
    requests_.asks(me, do="deny", uid=SOMEBODY, for_seconds=60, reason="ask first")
    requests_.asks(me, do="quarantine", device="1")
    restrictions = requests_.restrictions()
    requests_.asks(me, do="deny", uid=SOMEBODY, end=True)
    ended = requests_.asks(me, do="quarantine", device="1", end=True)

    assert restrictions[DENIED][str(SOMEBODY)].reason == "ask first"
    assert (list(restrictions[QUARANTINED]), ended["ended"]) == ([requests_.uuids[1]], 1)
    assert requests_.restrictions() == {DENIED: {}, QUARANTINED: {}}
    assert [event.outcome for event in requests_.events] == ["denied", "quarantined", "ended", "ended"]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"do": "end", "id": None}, "end has no field 'id': it takes uid, device."),
        ({"do": "end", "uid": None}, "uid must be a whole number; to mean none, leave it out."),
        ({"do": "end", "uid": 20001.0}, "uid must be a whole number"),
        ({"do": "end", "device": None}, "device must be a text"),
        ({"do": "end", "device": 0}, "device must be a text"),
        ({"do": "keep", "uid": True, "for_seconds": 60}, "uid must be a whole number"),
        ({"do": "keep", "for_seconds": "60"}, "for_seconds must be a number"),
        ({"do": "keep", "for_seconds": 60, "reason": ["x"]}, "reason must be a text"),
        ({"do": "release", "claim": None}, "claim must be a text"),
        ({"do": "status", "uid": "all"}, "uid must be a whole number"),
        ({"do": "quarantine", "device": "1", "end": 1}, "end must be true or false"),
        ({"do": "reload", "now": True}, "reload has no field 'now': it takes nothing."),
        ({"do": "deny"}, ""),
        ({"do": "deny", "uid": 0, "for_seconds": 9}, ""),
        ({"do": "deny", "uid": 5}, ""),
        *(({"do": "deny", "uid": 5, "for_seconds": seconds}, "") for seconds in (-1, 1e9, float("nan"))),
        *(({"do": "deny", "uid": uid, "for_seconds": 9}, "") for uid in ("bob", True)),
        ({"do": "quarantine"}, ""),
        *(({"do": "quarantine", "device": device}, "") for device in ("99", "/dev/null")),
        ({"do": "quarantine", "device": "0", "for_seconds": "9"}, ""),
        *(({"do": name}, "") for name in ("bogus", None, ["keep"])),
        ({}, ""),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_told_what_is_wrong_and_changes_nothing(requests_, request_, why):
    """`null` meant all that is kept, so that a program's own mistake was answered: ok, ended 0."""
    with pytest.raises(GpuguardError) as refused:
        handle(requests_.context, os.geteuid(), request_)

    assert str(refused.value).startswith(why) and isinstance(refused.value, InvalidRequest) >= bool(why)
    assert requests_.events == []
    assert requests_.restrictions() == {DENIED: {}, QUARANTINED: {}}


POLICY = """
version: 1
policies:
  - name: unused
    when: {idle: {below: 5%}}
    for: 1s
    steps: [log, {after: 4h, do: release}]
"""


def test_a_user_sees_what_comes_next_and_the_file_is_read_again(tmp_path):
    with a_daemon(tmp_path, POLICY) as daemon:
        with a_holder(lock_directory(str(tmp_path / "claims")), daemon.uuid(0)) as holder:
            gpuguard = daemon.gpuguard

            def seen() -> bool:
                return "release in" in gpuguard("keep", "--status").stdout

            assert eventually(seen), daemon.said()
            text = gpuguard("keep", "--status").stdout
            rows = json.loads(gpuguard("keep", "--status", "--json").stdout)["standing"]

            assert "unused" in text and "release in" in text and "dry run" in text
            assert rows[0]["claim"] == holder.id and rows[0]["next"] == "release"
        daemon.policy.write_text(POLICY + "bogus: 1\n")
        faulty = gpuguard("daemon", "--reload")
        daemon.until("policy", 2)
        daemon.policy.write_text(POLICY.replace("4h", "5h"))
        good = gpuguard("daemon", "--reload")

        assert (faulty.returncode, good.returncode) == (1, 0) and "bogus" in faulty.stderr
        outcomes = [event["outcome"] for event in daemon.until("policy", 5)]
        assert outcomes == ["in force", "refused", "in force", "faults mended", "in force"]


# Where the kernel does not lend users their own files (Yama), the daemon does it for them.
FORBIDDEN = """
import sys
from gpuguard.claims import unlock as releasing
def refuse(pidfd, number):
    raise releasing.NotPermitted("the kernel does not let you look into the processes of this claim.")
releasing._getfd = refuse
from gpuguard.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_where_the_kernel_forbids_it_the_daemon_is_asked_and_without_one_the_user_is_told(tmp_path):
    with a_daemon(tmp_path) as daemon:
        daemon.state()
        with a_holder(lock_directory(str(tmp_path / "claims")), daemon.uuid(0)) as holder:
            words = [sys.executable, "-c", FORBIDDEN, "release", holder.id]
            options: dict[str, Any] = {"env": daemon.gpuguard.environment, "capture_output": True, "text": True}
            done = subprocess.run(words, **options, check=False)

            assert (done.returncode, holder.record()) == (0, None), done.stderr
            assert "by the daemon" in done.stdout
        daemon.end()
        with a_holder(lock_directory(str(tmp_path / "claims")), daemon.uuid(0)) as holder:
            alone = subprocess.run([*words[:-1], holder.id], **options, check=False)

            assert alone.returncode == 1 and "sudo gpuguard release" in alone.stderr and holder.record()


DEVICE = a_device(0)
GIVEN = {"claim": "3f0c9e21", "locks": [DEVICE.uuid]}


@pytest.mark.parametrize("left", [0, 1])
def test_locks_that_cannot_be_checked_for_want_of_a_descriptor_are_given_back(tmp_path, left, monkeypatch):
    directory = lock_directory(str(tmp_path))
    given, other = open_lock(directory, DEVICE.uuid), open_lock(directory, DEVICE.uuid)
    assert try_flock(given)
    monkeypatch.setattr(broker_client, "exchange", lambda *_: (GIVEN, (given,)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            broker_client.request_grant(a_snapshot(DEVICE), Request(), directory, None, {}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert try_flock(other)
    os.close(other)


@pytest.mark.parametrize(
    ("kind", "outcome", "message", "older", "told"),
    [
        ("warn", "logged", "idle: for 1h", "failed", "idle: for 1h: logged"),
        ("warn", "undelivered", "idle for 1h: no terminal", "failed", "idle for 1h: no terminal"),
        ("resume", "done", "cooled down", "about to", "cooled down"),
        ("terminate", "about to", "idle for 1h", "about to", "idle for 1h"),
    ],
)
def test_a_job_from_before_an_upgrade_is_told_in_words_that_its_supervisor_knows(
    requests_, kind, outcome, message, older, told, tmp_path, monkeypatch
):
    facts = (("policy", "idle-gpus"), ("uid", SOMEBODY))
    line = line_of(Event(time=1.0, kind=kind, outcome=outcome, user="somebody", pid=7, message=message, facts=facts))
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setenv("GPUGUARD_EVENTS", str(tmp_path / "events.jsonl"))

    reply = requests_.asks(SOMEBODY, do="events")
    [row] = reply["events"]
    [now] = [row.line() for row in decoded(reply, EventsReply).events]

    assert (row["outcome"], row["message"]) == (older, told)
    assert (now["outcome"], now["message"], now.keys()) == (outcome, message, line.keys())
