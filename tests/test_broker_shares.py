"""Shares and MIG instances where the daemon gives the locks: what excludes what, and which lies are in vain."""

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from broker_machine import KEEPER, Brokered, a_machine
from nodes import eventually
from test_broker_hostile import KEPT, say
from users import ALICE, BOB

from gpuguard.backends import open_backend
from gpuguard.claims.claim import lock_device
from gpuguard.claims.directory import BROKERED
from gpuguard.claims.grants import Grant
from gpuguard.claims.records import probe
from gpuguard.daemon.broker import CLAIMED, PART_CLAIMED, Broker, lock_all
from gpuguard.model import HEALTH

pytestmark = pytest.mark.root
MIG = "2xH100-80GB:mig=3g.40gb,3g.40gb"


@pytest.fixture
def divided(site: Path) -> Iterator[Brokered]:
    with a_machine(site, "keeper", MIG) as made:
        yield made


def share(size: str, *more: str) -> tuple[str, ...]:
    return "--devices", "0", "--share", "--memory", size, *more


def tried(machine: Brokered, user, *options: str) -> str:
    """ "" when it got what it asked for, else why not."""
    done = machine(user, "run", "--no-wait", *options, "true")
    assert done.returncode in (0, 75), done.stderr
    return done.stderr if done.returncode else ""


def test_two_users_share_a_device_and_all_see_it(broker):
    with broker.job(ALICE, *share("20GiB", "--note", "hers")), broker.job(BOB, *share("30GiB")):
        for user in (None, ALICE, BOB):
            claims = broker.claims(user, "--fresh")
            found = {(claim["user"], claim["note"], claim["memory_bytes"]) for claim in claims}
            assert found == {(ALICE.pw_name, "hers", 20 * 2**30), (BOB.pw_name, None, 30 * 2**30)}
        explained = broker(BOB, "explain", *share("60GiB"))
        assert f"left beside {ALICE.pw_name} (20.0GiB) and {BOB.pw_name} (30.0GiB)" in explained.stdout
    assert eventually(lambda: broker.locked() == [])


def test_a_share_and_a_whole_device_exclude_each_other(broker):
    with broker.job(ALICE, *share("10GiB")):
        assert "shared by" in tried(broker, BOB, "--devices", "0")
        assert "shared by" in tried(broker, None, "--devices", "0"), "root takes the locks directly"
    with broker.job(ALICE, "--devices", "0"):
        assert "claimed by" in tried(broker, BOB, *share("10GiB"))
    with broker.job(None, "--devices", "0"):
        assert "claimed by" in tried(broker, BOB, *share("10GiB"))


def test_a_claim_that_puts_up_with_others_is_known_by_what_was_asked_of_the_daemon(broker):
    """Its user cannot have the GPU alone by writing so, once it was given although others may compute there."""
    with broker.job(ALICE, "--devices", "0", "--max-processes", "9"), broker.job(BOB, "--devices", "1"):
        for record in Path(broker.directory.records).glob(f"claim.{ALICE.pw_uid}.*"):
            record.write_text(record.read_text().replace('"max_processes": 9', '"max_processes": 0'))
        claims = probe(broker.directory, broker.uuids)

        assert {claim.uid: claim.max_processes for claim in claims} == {ALICE.pw_uid: 9, BOB.pw_uid: None}


def test_roots_own_share_beside_those_of_users(broker):
    with broker.job(ALICE, *share("40GiB")), broker.job(None, *share("10GiB")):
        assert tried(broker, None, *share("50GiB")) != ""
        assert tried(broker, BOB, "--devices", "0") != ""
    names = [name for name in os.listdir(broker.directory.locks) if name != "queue"]
    assert {os.stat(f"{broker.directory.locks}/{name}").st_mode & 0o777 for name in names} == {BROKERED}


def test_commands_inside_a_share_run(broker):
    inner = f"{broker.python_path} -m gpuguard run --no-wait -- true"
    done = broker(ALICE, "run", "--no-wait", *share("1GiB"), "--", "sh", "-c", inner)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("outlived", [False, True], ids=["asked", "from outside"])
def test_a_share_is_released_while_its_job_lives_on_and_another_user_has_the_device(broker, outlived):
    with broker.job(ALICE, *share("50GiB"), command=("sh", "-c", "echo $$; exec sleep 100")) as (wrapper, job):
        [claim] = broker.claims(ALICE, "--fresh")
        if outlived:
            wrapper.kill()
            wrapper.wait()
        refused = broker(BOB, "release", claim["id"])
        assert refused.returncode == 1 and tried(broker, BOB, "--devices", "0"), refused
        released = broker(ALICE, "release", claim["id"])
        try:
            assert released.returncode == 0, released.stderr
            assert tried(broker, BOB, "--devices", "0") == "" and os.path.exists(f"/proc/{job}")
        finally:
            os.kill(int(job), signal.SIGKILL)


FORGE = """
import fcntl, time
[record] = [name for name in os.listdir(directory.records) if name.startswith(f"claim.{os.geteuid()}.")]
def write(name, **changes):
    content = json.loads(open(f"{directory.records}/{record}").read().partition("\\n")[0]) | changes
    path = f"{directory.records}/{name}"
    file = os.open(path + "~", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(file, json.dumps(content).encode())
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(path + "~", path)
lies = {"memory": int(sys.argv[1]), "most": 99}
write(record, **lies)
write(f"claim.{os.geteuid()}.f0f0.json", id="f0f0", **lies)
print("forged", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("lie", [1, 79 * 2**30])
def test_what_a_record_says_of_a_share_changes_nothing(broker, lie):
    with broker.job(ALICE, *share("40GiB", "--slots", "3")), broker.running(ALICE, FORGE, str(lie)):
        assert "(40.0GiB)" in tried(broker, BOB, *share("50GiB")), "more is promised than there is"
        assert "(40.0GiB)" in tried(broker, None, *share("50GiB"))
        assert tried(broker, BOB, *share("30GiB")) == ""


SHARE_KEPT = KEPT.replace('"conditions": {}', '"conditions": {"share": True, "memory": 70 * 2**30}')


def test_a_slot_that_was_kept_is_worth_nothing_and_one_held_shared_counts(broker):
    with broker.running(BOB, SHARE_KEPT, broker.uuids[0]) as hostile:
        say(hostile, "LOCK_SH")
        for user in (ALICE, None):
            assert tried(broker, user, "--devices", "0") and tried(broker, user, *share("70GiB"))
        say(hostile, "LOCK_UN")
        assert broker.locked() == []
        say(hostile, "LOCK_EX")
        assert broker.locked() == [] and tried(broker, ALICE, *share("70GiB")) == "" == tried(
            broker, None, "--devices", "0"
        )


def test_the_locks_are_not_those_of_all_users_again_while_shares_hold_nothing_else(broker):
    with broker.job(ALICE, *share("1GiB")):
        refused = broker(None, "setup", "--dir", broker.directory.path, "--no-broker")
        assert refused.returncode != 0 and "shared by claims that the daemon gave" in refused.stderr
        assert tried(broker, BOB, "--devices", "0") and not tried(broker, BOB, *share("1GiB"))
    assert eventually(lambda: broker(None, "setup", "--dir", broker.directory.path, "--no-broker").returncode == 0)


def test_a_share_from_before_the_daemon_keeps_all_others_away(site):
    with a_machine(site, "everybody") as machine, machine.job(ALICE, *share("1GiB")):
        machine.setup("--broker")
        machine.start_daemon()
        assert tried(machine, BOB, "--devices", "0") and tried(machine, BOB, *share("1GiB"))


def test_shares_live_on_without_the_daemon_and_it_knows_them_again(broker):
    with broker.job(ALICE, *share("50GiB")):
        broker.kill_daemon()
        [claim] = broker.claims(BOB)
        assert (claim["user"], claim["memory_bytes"]) == (ALICE.pw_name, 50 * 2**30)
        broker.start_daemon()
        assert tried(broker, BOB, *share("50GiB")) and not tried(broker, BOB, *share("20GiB"))


def uuids_of(machine: Brokered) -> tuple[str, list[str]]:
    whole = [uuid for uuid in machine.uuids if uuid.startswith("GPU-")]
    return whole[0], [uuid for uuid in machine.uuids if uuid.startswith("MIG-")]


ASK = """
answer, descriptors = exchange(directory, {"do": "claim", "devices": [sys.argv[1]], "conditions": {}})
print(json.dumps(answer), flush=True)
sys.stdin.readline()
"""


def test_instances_go_to_different_users_and_are_shared(divided):
    _, instances = uuids_of(divided)
    half = "--devices", instances[0], "--share", "--memory", "10GiB", "--max-util", "100%"
    with divided.job(ALICE, *half), divided.job(BOB, *half), divided.job(BOB, "--devices", instances[1]):
        assert tried(divided, ALICE, "--devices", instances[0]) and tried(divided, ALICE, "--devices", instances[1])
        assert tried(divided, None, "--devices", instances[0]) and tried(divided, None, "--devices", instances[1])
        assert tried(divided, ALICE, *half) == ""


def test_a_divided_gpu_is_not_given_while_a_part_of_it_is(divided):
    whole, instances = uuids_of(divided)
    with divided.program(ALICE, ASK, instances[0]) as holder:
        assert holder.stdout and json.loads(holder.stdout.readline())["claim"]
        assert whole in divided.asks(BOB, whole)["refused"]


def given(machine: Brokered, name: str, *, shown: bool = True, memory: int | None = None) -> tuple[list[int], object]:
    """What lock_all says, and the locked descriptors if it gave any; as the daemon would, which must not run."""
    snapshot = open_backend(machine.environment["GPUGUARD_BACKEND"]).sample({HEALTH})
    if not shown:
        snapshot = replace(snapshot, devices=tuple(one for one in snapshot.devices if not one.parent_uuid))
    descriptors: list[int] = []
    _, refused = lock_all(machine.directory, snapshot, [name], Grant(ALICE.pw_uid, "c", memory), descriptors)
    while refused and descriptors:
        os.close(descriptors.pop())
    return descriptors, refused


@pytest.mark.parametrize("memory", [None, 2**30])
def test_a_gpu_and_its_instances_exclude_each_other_also_when_the_driver_shows_them_no_more(divided, memory):
    whole, (first, second, *_) = uuids_of(divided)
    divided.kill_daemon()
    for one, other, shown in ((whole, first, True), (first, whole, True), (first, whole, False)):
        kept, refused = given(divided, one, memory=memory)
        assert refused == {}
        tries = [given(divided, other, shown=shown), given(divided, other, shown=shown, memory=2**30)]
        assert [why for _, why in tries] == [{other: PART_CLAIMED}] * 2
        os.close(kept[0])
        with contextlib.ExitStack() as stack:
            for both in (first, second):
                descriptors, refused = given(divided, both)
                for descriptor in descriptors:
                    stack.callback(os.close, descriptor)
                assert refused == {}


def test_a_share_that_came_behind_the_look_at_the_queue_is_counted(broker):
    broker.kill_daemon()
    backend, quicker = open_backend(broker.environment["GPUGUARD_BACKEND"]), list[int]()

    class Overtaken:
        def sample(self, fields, devices=None):
            if devices and not quicker:  # the look behind the locks
                quicker.extend(given(broker, broker.uuids[0], memory=50 * 2**30)[0])
            return backend.sample(fields, devices)

    asked = {"devices": broker.uuids[:1], "conditions": {"share": True, "memory": 50 * 2**30}}
    said = Broker(broker.directory, Overtaken).claim(BOB.pw_uid, asked)

    assert len(quicker) == 1
    assert isinstance(said, dict) and "left beside" in said["refused"][broker.uuids[0]], said
    os.close(quicker[0])


def test_a_lock_file_that_root_makes_is_the_daemons_alone(broker):
    lock = lock_device(broker.directory, "MIG-made-just-now", fcntl.LOCK_EX)
    assert lock
    found = os.fstat(lock.descriptor)
    os.close(lock.descriptor)

    assert (found.st_mode & 0o7777, found.st_uid) == (BROKERED, KEEPER.pw_uid)


def test_a_share_is_looked_at_behind_its_lock(broker):
    """So root, who takes the device directly at that moment, and it never overlook each other."""
    broker.kill_daemon()
    lock = lock_device(broker.directory, broker.uuids[0], fcntl.LOCK_EX)
    assert lock
    assert given(broker, broker.uuids[0], memory=2**30) == ([], {broker.uuids[0]: CLAIMED})
    os.close(lock.descriptor)
