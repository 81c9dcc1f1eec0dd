"""gpuguard keep: users who ask the daemon to leave them alone, and what it grants."""

import os
import pwd
import signal
import socket
import time

import pytest
from builders import a_device
from daemons import a_daemon, somebodys
from guarded import SOMEBODY
from nodes import GIB, eventually
from users import ALICE, BOB

from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.restrictions import KEPT, Restriction, change
from gpuguard.daemon import exemptions
from gpuguard.daemon.exemptions import MAX_CHANGES, MAX_PER_USER, Exemptions
from gpuguard.errors import GpuguardError
from gpuguard.model import Event
from gpuguard.procfs import boot_clock

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

    [(kept, until)] = granting.kept.items()
    [event] = granting.events
    assert kept == key and 50 < until - boot_clock() <= 60
    assert (event.kind, event.outcome, event.message) == ("keep", "kept", "a deadline")
    assert dict(event.facts)["uid"] == (request_.get("uid", uid) or None)  # root's for a device is no user's


@pytest.mark.parametrize(
    ("uid", "request_"),
    [
        *((1001, {"uid": uid}) for uid in (1002, 0, True, "1001", -1, 10**4000)),
        *((1001, {"device": device}) for device in ("9", ["0"], "\ud800")),
        *((1001, {"for_seconds": time}) for time in (86401, 0, -1, None, True, "60", INF, -INF, INF - INF, 10**4000)),
        (65534, {}),
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
    kept = {name: Restriction(name, 0.0, until, "", "1001", "1001") for name in names}
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
    with a_daemon(tmp_path, before="from gpuguard.daemon import server; server.REQUEST_SECONDS = 600.0") as daemon:
        path = daemon.place / "claims" / "daemon.sock"
        with socket.socket(socket.AF_UNIX) as silent:
            assert eventually(lambda: silent.connect_ex(str(path)) == 0)
            assert daemon.end() == 0
        assert not path.exists()
