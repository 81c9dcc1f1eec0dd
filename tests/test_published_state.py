"""state.json: what the daemon saw, for all users, as long as the daemon lives and what it saw is fresh."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot

from gpuguard import source, watchdog
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import ClaimWatcher, FirstSeen
from gpuguard.model import Gap, Snapshot


@pytest.fixture
def alive(directory, monkeypatch):
    """A daemon that lives, where users see each other's processes: this machine may hide them."""
    monkeypatch.setattr(source, "_processes_are_hidden", lambda: False)
    descriptor = source.lock_daemon(directory)
    yield descriptor
    os.close(descriptor)


A_SNAPSHOT = a_snapshot(
    a_device(processes=(a_process(command=("python", "\udcff")),), problems=("lost",)),
    a_device(processes=None),
    claims=(a_claim_record(holders=(1, 2)),),
    gaps=(Gap(None, "x", "y"),),
    simulated=True,
)


def seen(directory: LockDirectory, after: float = 0.0, *, simulated: bool = True) -> Snapshot | None:
    """What a command sees so many seconds after the sample."""
    return source.read_state(directory, A_SNAPSHOT.clock + after, simulated=simulated)


@pytest.fixture
def written(directory, alive):
    source.write_state(directory, A_SNAPSHOT, 10.0)


def test_what_was_written_is_read_again_while_it_is_fresh_and_of_this_boot(directory, written):
    assert seen(directory, 20.0) == A_SNAPSHOT
    assert [seen(directory, after) for after in (20.1, -0.1)] == [None, None]
    assert seen(directory, simulated=False) is None, "a simulated node is never shown as the real one"


def written_by(directory: LockDirectory, who: object) -> None:
    """Let the state say that another process has written it."""
    path = Path(directory.path) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"daemon": who}))


@pytest.mark.parametrize("who", [[2**22, 1.0], None])
def test_a_process_that_cannot_see_the_daemon_asks_the_kernel_for_its_lock(directory, written, who):
    written_by(directory, who)

    assert seen(directory) == A_SNAPSHOT


@pytest.mark.parametrize("who", [[2**22, 1.0], [os.getpid(), 1.0], [os.getpid(), None], [None, 1.0], [], "x", None])
def test_the_state_of_a_dead_daemon_is_not_believed(directory, who):
    descriptor = source.lock_daemon(directory)
    source.write_state(directory, A_SNAPSHOT, 10.0)
    written_by(directory, who)
    os.close(descriptor)

    assert seen(directory) is None


def test_what_only_root_may_see_of_a_process_does_not_go_in(directory, alive):
    secret = a_process(executable="/home/alice/x", working_directory="/home/alice", conda_environment="vault")
    source.write_state(directory, replace(A_SNAPSHOT, devices=(a_device(processes=(secret,)),)), 10.0)

    text = Path(directory.path, "state.json").read_text()
    assert "/home/alice" not in text
    assert "vault" not in text


def test_command_lines_of_any_length_do_not_hide_the_state(directory, alive):
    longest = tuple(a_process(2 + number, command=("\udcff" * 4096,)) for number in range(400))
    source.write_state(directory, replace(A_SNAPSHOT, devices=(a_device(processes=longest),)), 10.0)

    shown = seen(directory)
    assert shown is not None
    assert {(process.user, process.command) for process in shown.devices[0].processes or ()} == {("alice", None)}


def test_hidden_processes_stay_hidden(directory, alive, monkeypatch):
    monkeypatch.setattr(source, "_processes_are_hidden", lambda: True)
    source.write_state(directory, A_SNAPSHOT, 10.0)

    assert seen(directory).devices[0].processes[0].command is None


# A FUSE of a user's, below their home directory.
FORGED = "30 22 0:30 / /home/eve/m\ra\vb\vc\vd\v/proc rw,nosuid,nodev - fuse x rw,user_id=1002,group_id=1002"
A_PROC, ANOTHER = "22 27 0:21 / /proc rw - proc proc", "30 22 0:30 / /proc rw - proc proc"


@pytest.mark.parametrize(
    ("mounts", "hidden"),
    [
        (f"{A_PROC} rw", False),
        (f"{A_PROC} rw,hidepid=0", False),
        (f"{A_PROC} rw,hidepid=off", False),
        (f"{A_PROC} rw,hidepid=2", True),
        (f"{A_PROC} rw,gid=4,hidepid=invisible", True),
        (f"{A_PROC} rw,hidepid=2\n{ANOTHER} rw", False),
        (f"{A_PROC} rw\n{ANOTHER} rw,hidepid=1", True),
        ("22 27 0:21 / /srv/proc rw - proc proc rw,hidepid=2", False),
        ("22 27 0:21 / /proc/fs rw - proc proc rw,hidepid=2", False),
        (f"{A_PROC} rw,hidepid=2\n{FORGED}", True),
        ("", False),
    ],
)
def test_the_last_mount_on_proc_says_whether_it_hides_processes(mountinfo, mounts, hidden):
    mountinfo.write_bytes(mounts.encode())

    assert source._processes_are_hidden() is hidden


@pytest.fixture
def mountinfo(monkeypatch, tmp_path):
    """What is read as /proc/self/mountinfo."""
    mounts, real = tmp_path / "mountinfo", open
    monkeypatch.setattr("builtins.open", lambda path, *rest, **more: real(
        mounts if path == "/proc/self/mountinfo" else path, *rest, **more))  # fmt: skip
    return mounts


def test_a_proc_that_hides_processes_from_now_on_is_noticed_at_once(mountinfo):
    told = []
    for options in "rw", "rw", "rw,hidepid=2", "rw":
        mountinfo.write_text(f"{A_PROC} {options}")
        told.append(source._processes_are_hidden())
    mountinfo.unlink()

    assert [*told, source._processes_are_hidden()] == [False, False, True, False, True]


@pytest.mark.parametrize("plant", ["symlink", "fifo", pytest.param("other", marks=pytest.mark.root)])
def test_a_planted_state_is_not_believed(directory, written, plant, tmp_path):
    path = Path(directory.path, "state.json")
    if plant == "symlink":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif plant == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        os.chown(path, 20001, 20001)

    # All users believe root alone; root believes no other user.
    assert seen(directory) is None


def test_records_of_any_number_and_length_do_not_hide_the_state(directory, alive):
    """500 of each user are read, and each letter that is not ASCII takes six in the file."""
    here = a_claim_record(A_SNAPSHOT.devices[0], note="é" * 2000)
    of_nothing = [replace(here, id=f"{number}", uid=number % 20, devices=()) for number in range(30_000)]
    for more in ([here], of_nothing[:700], of_nothing):
        source.write_state(directory, replace(A_SNAPSHOT, claims=(*more, here)), 10.0)
        shown = seen(directory)

        assert shown is not None and shown.claims[-1].id == here.id, "what holds a GPU is told in any case"
    assert len(shown.claims) == 1


GPU, OTHER = a_device(0), a_device(1)
NOW = 1_000_000.0  # unix time at a clock of 0


def ages(*looks: tuple[float, object]) -> list[float | None]:
    """How old the claim of each look, (clock, record), counts as in the end."""
    first_seen, ages = FirstSeen(), []
    for clock, record in looks:
        dated = first_seen.dated((record,) if record else (), clock, NOW + clock)
        ages += [NOW + clock - claim.since if claim.since is not None else None for claim in dated]
    return ages


CLAIM = a_claim_record(GPU, since=NOW)
RENEWED = [lambda clock: NOW + clock, lambda clock: None, lambda clock: 2.0**49, lambda clock: 1.0]
OF_ANOTHER = [{"id": "another"}, {"uid": 1002}, {"devices": (OTHER.uuid,)}, {"devices": (GPU.uuid, OTHER.uuid)}]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # At the first look the kernel tells since when the record lies there, and nothing tells more of a bare lock.
        ([(0.0, replace(CLAIM, written=NOW - 50.0)), (100.0, CLAIM)], [50.0, 150.0]),
        ([(0.0, replace(CLAIM, written=NOW + 50.0)), (100.0, CLAIM)], [0.0, 100.0]),
        ([(0.0, CLAIM), (100.0, CLAIM)], [0.0, 100.0]),
        # From then on a claim is as old as the look that first showed it, whatever its record says.
        ([(0.0, None), (30.0, replace(CLAIM, written=NOW - 50.0)), (60.0, CLAIM)], [0.0, 30.0]),
        *(([(clock, replace(CLAIM, since=since(clock))) for clock in (0.0, 60.0)], [0.0, 60.0]) for since in RENEWED),
        *(
            ([(0.0, CLAIM), (60.0, another), (70.0, another)], [0.0, 0.0, 10.0])
            for another in (replace(CLAIM, since=1.0, written=NOW, **changes) for changes in OF_ANOTHER)
        ),
        ([(0.0, CLAIM), (30.0, None), (60.0, CLAIM)], [0.0, 0.0]),
        ([(0.0, replace(CLAIM, devices=(), since=1.0)), (9.0, replace(CLAIM, devices=(), since=1.0))], [0.0, 9.0]),
    ],
)
def test_a_claim_is_as_old_as_it_is_known_whatever_it_says(looks, expected):
    assert ages(*looks) == expected


@pytest.mark.parametrize("set_by", [3 * 3600.0, -3 * 3600.0])
def test_a_clock_that_is_set_makes_no_claim_older_and_none_younger(set_by):
    """A claim of a minute on a device that had rested long was given up as one of hours."""
    first_seen, claim = FirstSeen(), replace(CLAIM, written=NOW - 50.0)
    first_seen.dated((claim,), 0.0, NOW)
    [later] = first_seen.dated((claim,), 60.0, NOW + 60.0 + set_by)

    assert NOW + 60.0 + set_by - later.since == 110.0


def test_a_daemon_that_is_started_again_knows_claims_as_the_one_before_did(directory):
    """A record that was written long before its lock was taken made a claim old at the next start."""
    first_seen, planted = FirstSeen(), replace(CLAIM, written=NOW - 86400.0)
    first_seen.dated((), 0.0, NOW)
    last = replace(a_snapshot(GPU), clock=60.0, taken_at=NOW + 60.0)
    source.write_state(directory, replace(last, claims=first_seen.dated((planted,), 60.0, NOW + 60.0)), 10.0)
    again = FirstSeen()
    again.remember(source.read_last_state(directory, 90.0, NOW + 90.0))
    [old, new] = again.dated((planted, replace(planted, id="new")), 100.0, NOW + 100.0)

    assert (old.since, new.since) == (NOW + 60.0, NOW + 100.0)
    assert source.read_last_state(directory, 50.0, NOW + 900.0) is None, "of another boot"
    assert source.read_last_state(directory, 90.0, NOW + 900.0) is None, "of another boot"


def test_the_guard_judges_by_it(monkeypatch):
    """A policy with `claim_without_process_above` never fired for a user who renewed the record."""
    claims = iter([a_claim_record(GPU, since=NOW + clock, written=NOW + clock) for clock in (0.0, 3600.0)])
    monkeypatch.setattr(ClaimWatcher, "probe", lambda *_: (next(claims),))
    guard = watchdog.Watchdog(None, (), object())
    views = [guard._with_claims(replace(a_snapshot(GPU), clock=clock, taken_at=NOW + clock)) for clock in (0.0, 3600.0)]

    assert [view.claims[0].since for view in views] == [NOW, NOW]
