"""The names of users: a directory service that hangs costs a second once, and never a name its meaning."""

import contextlib
import grp
import os
import pwd
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import MIB, a_device, a_process, a_snapshot
from nodes import eventually, until
from users import interpreter

from gpuguard import host as hostuse
from gpuguard import users
from gpuguard.host import HostUses, groups_of_users
from gpuguard.model import Snapshot
from gpuguard.queue.reservations import GroupMembers
from gpuguard.units import parse_host_memory_amount

PATIENT = 60.0  # no answer is late because the machine is busy


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(users, "_names", {})
    monkeypatch.setattr(users, "_numbers", {})
    monkeypatch.setattr(users, "_given_by", {})
    monkeypatch.setattr(users, "_asked", {})
    monkeypatch.setattr(users, "_silent", [])
    monkeypatch.setattr(users, "_again", [])
    monkeypatch.setattr(users, "_answers", {})
    monkeypatch.setattr(users, "LOOKUP_SECONDS", PATIENT)
    yield
    # A thread that still asks would tell the next test what it has heard.
    assert eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("name of ")])


class Service:
    """A directory service, and the clock of whoever asks it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.names: dict[int, str] = {}
        self.gids: list[int] = []
        self.now = 1000.0
        monkeypatch.setattr(pwd, "getpwuid", self.answer)
        monkeypatch.setattr(users, "monotonic", lambda: self.now)

    def answer(self, uid: int) -> SimpleNamespace:
        self.asked.append(uid)
        return SimpleNamespace(pw_name=self.names[uid], pw_gid=7)


GIVEN = "alice:100000:65536\n1002:200000:10\nbob:165000:10000\nghost:400000:10\ndockremap:500000:10\nroot:600000:10\n"
NUMBERS = {"alice": 1001, "bob": 1003, "dockremap": 997, "root": 0}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    """The service where root has given uids: to alice, to 1002, to bob (partly the same), to one who is not there."""
    (tmp_path / "subuid").write_text(GIVEN)
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=NUMBERS[name]))
    return Service(monkeypatch)


@pytest.mark.parametrize(
    ("uid", "owner"),
    [
        (100_000, 1001),
        (164_999, 1001),
        (165_000, 165_000),  # alice's and bob's
        (165_535, 165_535),
        (165_536, 1003),
        (174_999, 1003),
        (175_000, 175_000),
        (200_009, 1002),
        (400_000, 400_000),  # of a user who has no number
        (500_000, 997),
        (600_007, 600_007),
        (1001, 1001),
        (4_000_000_000, 4_000_000_000),
    ],
)
def test_a_uid_that_root_has_given_to_one_user_is_that_user(given: Service, uid: int, owner: int) -> None:
    assert users.certain_owner(uid) == owner


def test_a_person_whose_uid_root_has_given_away_by_mistake_stays_that_person(given: Service) -> None:
    given.names[100_007] = "carol"

    assert users.certain_owner(100_007) == 100_007
    assert users.accountable_uids([100_007, 100_008]) == {100_007: 100_007, 100_008: 1001}


def test_nobody_is_taken_for_another_while_no_service_says_who_they_are(given: Service) -> None:
    given.names[100_007] = "carol"
    assert users.certain_owner(100_000) == 1001
    users._silent.append(given.now)

    assert users.certain_owner(100_007) == 100_007
    given.now += users.AGAIN_SECONDS
    assert (users.certain_owner(100_007), users.certain_owner(100_008)) == (100_007, 1001)


def test_a_service_that_hangs_over_the_owner_of_a_uid_makes_that_uid_a_strangers(given, monkeypatch):
    hanging = threading.Event()

    def hang(name: str) -> None:
        hanging.wait(60)
        raise KeyError(name)

    monkeypatch.setattr(users, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(pwd, "getpwnam", hang)
    said = users.certain_owner(100_000)
    hanging.set()

    assert said == 100_000


def test_what_root_has_given_to_root_is_counted_together_and_not_as_roots(given: Service) -> None:
    """Root has no limits; in its containers anybody may be."""
    assert users.accountable_uids([600_007, 600_009]) == {600_007: 600_000, 600_009: 600_000}


def test_any_number_of_uids_is_counted_without_a_question_for_their_names(given: Service) -> None:
    """One user has 65536 of them: a service that is asked over the network for each would hold up everybody."""
    assert set(users.accountable_uids(range(100_000, 160_000)).values()) == {1001}
    assert given.asked == []


def test_a_user_has_a_name_and_a_stranger_a_number() -> None:
    assert users.user_name(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name
    assert users.user_name(4_000_000_123) == "4000000123"


def test_a_directory_service_that_hangs_is_asked_once_and_then_numbers_have_to_do(monkeypatch):
    asked: list[int] = []
    hanging = threading.Event()

    def hang(uid: int) -> None:
        asked.append(uid)
        hanging.wait()
        raise KeyError

    monkeypatch.setattr(users, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(pwd, "getpwuid", hang)
    names = [users.user_name(uid) for uid in (1001, 1002, 1003)]
    hanging.set()

    assert names == ["1001", "1002", "1003"]
    assert asked == [1001]


def test_who_had_no_name_while_the_service_was_away_gets_one_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """He was spared by the guard for ever: of whom nobody knows who he is no job is ended."""
    service = Service(monkeypatch)
    away = [users.user_name(1001) for _ in range(3)]
    service.names[1001] = "alice"
    service.now += users.AGAIN_SECONDS

    assert (away, users.user_name(1001), users.user_name(1001)) == (["1001"] * 3, "alice", "alice")
    assert service.asked == [1001, 1001]


def test_a_service_that_was_silent_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    service.names = {1001: "alice"}
    users._silent.append(service.now)

    assert users.user_name(1001) == "1001"
    service.now += users.AGAIN_SECONDS
    assert users.user_name(1001) == "alice"


def test_many_without_a_name_are_asked_for_again_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(monkeypatch)
    for _ in range(2):
        for uid in range(2000, 2100):
            users.user_name(uid)
        service.now += users.AGAIN_SECONDS

    assert len(service.asked) == 101


def test_where_no_thread_can_be_started_the_number_has_to_do_until_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert users.user_name(0) == "0"

    assert users.user_name(0) == pwd.getpwuid(0).pw_name


ME = pwd.getpwuid(0)


@pytest.fixture
def membership(monkeypatch: pytest.MonkeyPatch) -> Service:
    """A service that knows alice, whose groups are *gids*, and the group vision."""
    service = Service(monkeypatch)
    service.names[1001], service.gids = "alice", [1001, 50]
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, *service.gids])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name={50: "vision"}[gid]))
    return service


def test_who_is_in_a_group_says_the_user_database_also_of_ones_first_group(membership):
    assert [users.is_in_group(1001, gid) for gid in (50, 7, 51)] == [True, True, False]
    assert [uid in GroupMembers(50) for uid in (1001, 1002, "alice")] == [True, False, False]
    assert (users.group_name(50), users.group_name(51)) == ("vision", None)


def test_of_a_uid_without_a_name_it_is_unknown_and_its_groups_are_not_asked_for(membership):
    assert [users.is_in_group(uid, 50) for uid in (2001, 2001)] == [None, None]
    assert membership.asked == [2001]


def test_who_leaves_a_group_is_out_of_it_after_a_while(membership):
    assert users.is_in_group(1001, 50)
    membership.gids = [1001]

    assert users.is_in_group(1001, 50)
    membership.now += users.AGAIN_SECONDS
    assert users.is_in_group(1001, 50) is False


def test_while_the_service_is_away_members_stay_members_and_of_others_it_is_unknown(membership):
    """A service that is away says that its users do not exist."""
    membership.names[1002] = "bob"
    assert users.is_in_group(1001, 50)
    assert users.user_name(1002) == "bob"
    membership.names.clear()
    membership.now += users.AGAIN_SECONDS

    assert [users.is_in_group(uid, 50) for uid in (1001, 1002)] == [True, None]


def of_user(uid: int) -> Snapshot:
    return a_snapshot(a_device(0, processes=(a_process(100, uid=uid),)))


def test_who_had_no_groups_while_the_service_was_away_has_them_later(membership):
    """Until the daemon ended each group protected them, and no policy for one of their groups ever meant them."""
    name = membership.names.pop(1001)
    assert groups_of_users(of_user(1001)) == {}
    membership.names[1001] = name

    assert groups_of_users(of_user(1001)) == {}
    membership.now += users.AGAIN_SECONDS
    assert "vision" in groups_of_users(of_user(1001))[1001]


def test_of_several_whose_groups_are_asked_for_again_there_is_one_at_a_time(membership):
    """A service may need a second for each, and a guard that waits for all of them samples too late."""
    membership.names |= {1002: "bob", 1003: "carol"}
    uids = (1001, 1002, 1003)
    assert all(users.is_in_group(uid, 50) for uid in uids)
    membership.asked.clear()
    for _ in range(3):
        membership.now += users.AGAIN_SECONDS
        assert all(users.is_in_group(uid, 50) for uid in uids)

    assert len(membership.asked) == 3


def test_while_no_thread_can_be_started_the_look_goes_on_and_groups_are_asked_for_later(monkeypatch):
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", full)
        assert groups_of_users(of_user(0)) == {}

    assert "root" in groups_of_users(of_user(0))[0]


SHARING = """
import os, sys
held = bytearray(os.urandom(2**20)) * 256
workers = [os.fork() for _ in range(3)]
if not all(workers):
    while held: pass
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
def test_all_processes_of_a_user_count_and_what_they_share_counts_once(monkeypatch):
    """A forked data loader shows all memory of its parent: a sum of what each shows is many times too much."""
    monkeypatch.setattr(hostuse, "MACHINE_SECONDS", 0.0)
    person, service, host, limit = 54321, pwd.getpwnam("daemon").pw_uid, HostUses(), parse_host_memory_amount("200MiB")
    with contextlib.ExitStack() as ended:
        for uid in (person, service):
            job = subprocess.Popen(
                [interpreter(), "-c", SHARING], user=uid, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            ended.enter_context(job)
            ended.callback(os.killpg, job.pid, signal.SIGKILL)
            assert job.stdout and job.stdout.readline() == b"ready\n"

        host.machine([limit])
        until(lambda: (host.machine([limit]).users[person].cpu or 0.0) > 10)
        use = host.machine([limit])
        assert use.memory and use.cores
        assert 256 * MIB < (use.users[person].memory or 0) < 400 * MIB
        assert use.users.keys().isdisjoint({0, service})
        assert HostUses().machine([parse_host_memory_amount("100%")]).users[person].memory is None
