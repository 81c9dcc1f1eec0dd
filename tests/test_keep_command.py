"""gpuguard keep: users who ask the daemon to leave them alone, and what it grants."""

import os
import pwd
import signal
import socket
import time
from dataclasses import dataclass, replace

import pytest
from builders import a_device, a_process, a_snapshot
from daemons import a_daemon, somebodys
from guard_scene import SOMEBODY
from ladders import Processes, a_policy
from nodes import GIB, eventually
from users import ALICE, BOB

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import KEPT, Restriction, change
from gpuguard.daemon import exemptions
from gpuguard.daemon.exemptions import MAX_CHANGES, MAX_PER_USER, MAX_SPANS, Exemptions
from gpuguard.errors import GpuguardError
from gpuguard.model import Event
from gpuguard.policies.engine import EngineMemory, evaluate
from gpuguard.policies.policy import Policy
from gpuguard.policies.rule import RuleKind
from gpuguard.policies.rules import RULES
from gpuguard.procfs import boot_clock
from gpuguard.users import user_name

root = pytest.mark.root
DEVICE = a_device(0).uuid
INF = float("inf")
POLICY = """
version: 1
mode: enforce
keep: {{longest: {longest}}}
policies:
  - name: hogs
    when: {{memory: {{above: 20GiB}}}}
    for: 300ms
    cooldown: 0s
    steps: [terminate]
"""


class Granting:
    """The part of a daemon that grants."""

    def __init__(self, directory: LockDirectory) -> None:
        self.kept: dict = {}
        self.events: list[Event] = []
        self.exemptions = Exemptions(directory, self.use, lambda: (a_device(0), a_device(1)), self.events.append)

    def use(self, kept: dict) -> None:
        self.kept = kept

    def __call__(self, asker: int, /, do: str = "keep", **request: object) -> dict:
        if do == "end":
            return dict(self.exemptions.end(asker, request))
        return dict(self.exemptions.keep(asker, {"for_seconds": 60, **request}))


@pytest.fixture
def granting(directory: LockDirectory) -> Granting:
    return Granting(directory)


@pytest.mark.parametrize(
    ("uid", "request_", "key"),
    [
        (1001, {}, ("uid", 1001)),
        (1001, {"device": "0"}, ("uid on device", f"1001 {DEVICE}")),
        (1001, {"uid": 1001}, ("uid", 1001)),
        (0, {"uid": 1001}, ("uid", 1001)),
        (0, {"device": "0"}, ("device", DEVICE)),
        (0, {"device": "0", "uid": 1001}, ("uid on device", f"1001 {DEVICE}")),
    ],
)
def test_what_is_kept_is_what_was_asked_for_and_an_event_says_it(granting, uid, request_, key):
    granting(uid, reason="a deadline", **request_)

    [(kept, mark)] = granting.kept.items()
    [event] = granting.events
    assert kept == key and 50 < mark.until - boot_clock() <= 60
    assert (mark.spans is None) == (uid == 0)  # root's is not counted
    assert (event.kind, event.outcome, event.message) == ("keep", "kept", "a deadline")
    assert dict(event.facts)["uid"] == (request_.get("uid", uid) or None)  # root's for a device is no user's


@pytest.mark.parametrize(
    ("uid", "request_"),
    [
        *((1001, {"uid": uid}) for uid in (1002, 0, True, "1001", -1, 10**4000)),
        *((1001, {"device": device}) for device in ("9", ["0"], "\ud800")),
        *((1001, {"for_seconds": time}) for time in (86401, 0, -1, None, True, "60", INF, -INF, INF - INF, 10**4000)),
        (0, {}),
        (0, {"uid": 1001, "for_seconds": 1e9}),
    ],
)
def test_what_nobody_may_ask_for_is_refused_and_changes_nothing(granting, uid, request_):
    with pytest.raises(GpuguardError):
        granting(uid, **request_)

    assert (granting.kept, granting.events) == ({}, [])


def test_the_policy_file_can_forbid_it(granting):
    granting.exemptions.max_seconds = 0.0

    with pytest.raises(GpuguardError, match="administrator"):
        granting(1001)


def test_users_end_only_what_they_keep_themselves(granting):
    granting(1001)
    granting(1001, device="0")
    granting(1002)

    assert granting(1001, "end") == {"ended": 2}
    assert list(granting.kept) == [("uid", 1002)]
    assert [event.outcome for event in granting.events] == ["kept"] * 3 + ["ended"] * 2


@pytest.mark.parametrize("uids", [range(100_000, 100_000 + MAX_CHANGES + 1), [ALICE.pw_uid] * (MAX_CHANGES + 1)])
def test_no_user_and_no_uids_without_a_name_fill_the_log(granting, uids):
    *some, last = uids
    for uid in some:
        granting(uid)

    with pytest.raises(GpuguardError, match="within a minute"):
        granting(last)
    granting(BOB.pw_uid)


def test_no_user_fills_the_file(directory):
    until = time.time() + 60
    names = [f"1001 GPU-{number}" for number in range(MAX_PER_USER)]
    user = user_name(1001)  # there may be one
    kept = {name: Restriction(name, 0.0, until, "", user, user) for name in names}
    change(directory, KEPT, lambda restrictions: restrictions.update(kept))

    with pytest.raises(GpuguardError, match="too much"):
        Granting(directory)(1001)


def test_uids_that_nobody_knows_leave_room_for_those_who_have_a_name(directory, monkeypatch):
    monkeypatch.setattr(exemptions, "MAX_RESTRICTIONS", 8)
    for uid in range(200_000, 200_004):
        Granting(directory)(uid)

    with pytest.raises(GpuguardError, match="uid 200004 has no name"):
        Granting(directory)(200_004)
    Granting(directory)(pwd.getpwnam("daemon").pw_uid)


HOUR, WEEK = 3600.0, 7 * 86400.0


def kept_already(directory: LockDirectory, *hours: tuple[float, float], uid: int = 1001, **fields: object) -> None:
    """A user has kept what is theirs from so many hours ago until so many hours ago."""
    spans = tuple((time.time() - HOUR * begin, time.time() - HOUR * end) for begin, end in hours)
    mark = Restriction(str(uid), *spans[-1], "", "alice", "alice", asked=spans)
    change(directory, KEPT, lambda marks: marks.update({mark.name: replace(mark, **fields)}))


def running_for(hours: float):
    """What the daemon sees: a process of uid 1001 that began so long ago."""
    row = a_process(start_time=boot_clock() - hours * HOUR, uid=1001)
    return lambda: (a_device(0, processes=(row,)), a_device(1))


ASKED_AGAIN = {
    "again at once": {},
    "by the number of the GPU": {"device": "0"},
    "by another GPU": {"device": "1"},
    "by name": {"uid": 1001},
}


@pytest.mark.parametrize("way", ASKED_AGAIN)
def test_no_process_is_kept_for_more_than_72_hours_in_7_days_however_often_its_user_asks(directory, way):
    kept_already(directory, (100, 60), (50, 19))  # 40 h and 31 h
    granting = Granting(directory)
    granting.exemptions.devices = running_for(200)

    with pytest.raises(GpuguardError, match=r"72 h in 7 days.  Now 1h is left, and more from \d\d-\d\d \d\d:\d\d on"):
        granting(1001, for_seconds=2 * HOUR, **ASKED_AGAIN[way])
    granting(1001, for_seconds=HOUR, **ASKED_AGAIN[way])
    with pytest.raises(GpuguardError, match="72 h in 7 days"):
        Granting(directory)(1001, for_seconds=HOUR + 300, **ASKED_AGAIN[way])


def test_the_uids_that_root_gave_to_a_user_have_no_72_hours_of_their_own(directory, monkeypatch):
    """A process of a user namespace takes on another of them at will."""
    monkeypatch.setattr(exemptions, "accountable_uids", lambda uids: {uid: min(uid, 1001) for uid in uids})
    kept_already(directory, (100, 30))
    granting = Granting(directory)
    granting.exemptions.devices = lambda: (a_device(0, processes=(a_process(start_time=-1e9, uid=100_001),)),)

    with pytest.raises(GpuguardError, match="72 h in 7 days"):
        granting(100_001, for_seconds=6 * HOUR)


def test_a_time_that_is_renewed_before_it_is_over_counts_once(granting):
    for _ in range(5):
        granting(1001, for_seconds=86400)
    granting(1001, for_seconds=86400, device="0")

    spans = granting.kept["uid", 1001].spans
    assert granting.kept["uid on device", f"1001 {DEVICE}"].spans == spans
    assert len(spans) == 1 and spans[0][1] - spans[0][0] == pytest.approx(86400, abs=60)


def test_a_process_that_came_later_has_72_hours_of_its_own(directory):
    kept_already(directory, (100, 28))
    granting = Granting(directory)
    granting.exemptions.max_seconds = WEEK
    granting.exemptions.devices = running_for(10)

    granting(1001, for_seconds=72 * HOUR)
    with pytest.raises(GpuguardError, match="Now 3d is left"):
        granting(1001, for_seconds=73 * HOUR)


def test_what_is_ended_early_counts_only_until_then_and_is_not_forgotten(directory):
    kept_already(directory, (60, 0), until=time.time() + 3 * HOUR)
    granting = Granting(directory)
    assert granting(1001, "end") == {"ended": 1}
    assert granting.kept == {}

    with pytest.raises(GpuguardError, match="Now 12h is left"):
        granting(1001, for_seconds=13 * HOUR)
    granting(1001, for_seconds=11 * HOUR)


def test_what_root_keeps_is_not_counted_and_no_user_makes_less_of_it(directory):
    granting = Granting(directory)
    granting(0, uid=1001, for_seconds=30 * 86400)

    with pytest.raises(GpuguardError, match="kept already, in all policies"):
        granting(1001, for_seconds=60)
    assert granting.kept["uid", 1001].until > boot_clock() + 29 * 86400


def test_no_user_fills_the_file_by_many_short_times(directory):
    kept_already(directory, *((at + 0.01, at) for at in range(100, 100 - 2 * MAX_SPANS, -2)))
    granting = Granting(directory)
    granting(1001)

    assert len(granting.kept["uid", 1001].spans) == MAX_SPANS


@dataclass(frozen=True)
class ProtectsOthers(Processes):
    kind = RuleKind("processes", innocent=False, protects_others=True)


def policies_that_find(kept: dict, *policies: Policy, **fields: object) -> set[str]:
    """The names of those that act on a process of uid 1001, while that is kept."""
    clock = boot_clock()
    row = a_process(**{"start_time": clock - 1000.0, "uid": 1001, **fields})
    memory = EngineMemory(kept=dict(kept))
    for seconds in (0, 10):
        sample = a_snapshot(a_device(0, processes=(row,)), clock=clock + seconds)
        verdicts = evaluate(sample, policies, memory, interval=10).verdicts
    return {verdict.policy for verdict in verdicts}


OWN = a_policy(name="own", hold=10)
OTHERS = a_policy(name="others", hold=10, rules=(ProtectsOthers(),))
POLICIES = (
    OWN,
    OTHERS,
    replace(OTHERS, name="the file says so", keep=True),
    replace(OWN, name="the file says no", keep=False),
    replace(OWN, name="one of several", rules=(Processes(), ProtectsOthers())),
)


def test_a_user_keeps_nothing_from_policies_that_protect_others_unless_the_file_says_so(granting):
    granting(1001, for_seconds=86400)

    assert policies_that_find(granting.kept, *POLICIES) == {"others", "the file says no", "one of several"}


@pytest.mark.parametrize("by", ["root", "a version before"])
def test_what_root_keeps_and_what_was_granted_before_is_kept_from_all_policies(directory, by):
    if by == "root":
        Granting(directory)(0, uid=1001)
    else:
        before = Restriction("1001", time.time(), time.time() + 3600, "", "alice", "alice")
        change(directory, KEPT, lambda marks: marks.update({"1001": before}))

    assert policies_that_find(Granting(directory).kept, *POLICIES) == set()


@pytest.mark.parametrize(("age", "found"), [(100 * HOUR, {"own"}), (HOUR, set())])
def test_a_process_that_hid_when_its_user_asked_is_kept_for_no_longer(directory, age, found):
    kept_already(directory, (80, 7))
    granting = Granting(directory)
    granting.exemptions.devices = running_for(1)  # another one
    granting(1001, for_seconds=3600)

    assert policies_that_find(granting.kept, OWN, start_time=boot_clock() - age) == found


def test_these_rules_protect_others():
    others = {name for name, rule in RULES.items() if rule.kind.protects_others}

    assert others == {"unclaimed", "trespass", "users", "quota", "outside_scheduler"}


@root
@pytest.mark.parametrize("device", [[], ["--device", "0"]])
def test_who_is_kept_is_not_ended_until_the_time_is_over_but_on_another_device(tmp_path, device):
    with (
        a_daemon(tmp_path, POLICY.format(longest="1h"), "--enforce", named=True) as daemon,
        somebodys(daemon.node, "0", 10 * GIB) as bystander,
    ):
        words = ("keep", "--user", str(SOMEBODY), *device)
        assert eventually(lambda: daemon.gpuguard(*words, "--for", "1h").returncode == 0)
        with somebodys(daemon.node, "0", 40 * GIB) as offender:
            daemon.until("note")
            if device:
                with somebodys(daemon.node, "1", 40 * GIB) as elsewhere:
                    assert elsewhere.wait(60) == -signal.SIGTERM
            assert offender.poll() is None
            assert daemon.gpuguard(*words, "--end").returncode == 0
            assert offender.wait(60) == -signal.SIGTERM
        assert bystander.poll() is None
        assert [event["outcome"] for event in daemon.events("keep")] == ["kept", "ended"]


def test_the_daemon_that_was_killed_comes_back_with_what_is_kept(tmp_path):
    words = ("keep", "--for", "30m", *(["--user", "bin"] if os.geteuid() == 0 else []))
    with a_daemon(tmp_path, POLICY.format(longest="1h")) as daemon:
        assert eventually(lambda: daemon.gpuguard(*words).returncode == 0)
        daemon.end(signal.SIGKILL)
        without = daemon.gpuguard(*words)
        daemon.start("--interval", "200ms")
        assert eventually(lambda: daemon.gpuguard(*words, "--json").returncode == 0)
        [kept] = daemon.gpuguard.json("keep", "--list")["kept"]
        daemon.end()

    assert without.returncode == 1 and "no daemon answers" in without.stderr
    assert kept["until_unix_seconds"] > time.time() + 1000


def test_the_daemon_ends_at_once_while_a_client_is_connected(tmp_path):
    with a_daemon(
        tmp_path, before="from gpuguard.daemon import socket_server; socket_server.REQUEST_SECONDS = 600.0"
    ) as daemon:
        path = daemon.place / "claims" / "daemon.sock"
        with socket.socket(socket.AF_UNIX) as silent:
            assert eventually(lambda: silent.connect_ex(str(path)) == 0)
            assert daemon.end() == 0
        assert not path.exists()
