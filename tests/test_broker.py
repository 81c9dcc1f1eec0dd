"""The daemon gives the locks: the same commands work, also while it dies at random instants, and no claim is lost."""

import json
import os
import time
from contextlib import ExitStack
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any

import pytest
from broker_machine import FOR_BOTH_BROKERS, KEEPER, a_machine
from builders import a_device
from chances import luck, often
from guard_scene import Listing
from nodes import USE, eventually
from test_broker_hostile import UNREAD
from users import ALICE, BOB

from gpuguard.claims.directory import lock_directory, open_lock
from gpuguard.claims.records import probe
from gpuguard.cli import setup
from gpuguard.enforcement import actions, identity
from gpuguard.enforcement.preflight import ActionContext
from gpuguard.model import Finding, Subject, Verdict

pytestmark = pytest.mark.root
LOOK = ("--", "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')


@FOR_BOTH_BROKERS
def test_the_unfinished_file_of_a_killed_daemon_is_gone_when_the_next_one_answers(broker):
    broker.kill_daemon()
    unfinished = Path(broker.directory.lock_path(f"{broker.uuids[0]}.0123456789abcdef.new"))
    unfinished.touch()
    broker.start_daemon()

    assert not unfinished.exists()
    assert broker(ALICE, "run", "--no-wait", "-n", "4", "--", "true").returncode == 0


def test_what_a_killed_command_of_another_user_left_of_the_node_is_in_no_way(site):
    with a_machine(site, "everybody") as machine:
        left = machine.place / "node" / "node.json.new"
        left.write_text("half")
        os.utime(left, (0, 0))
        done = machine(ALICE, "sim", "set", "--device", "0", "--utilization", "5%")

        assert (done.returncode, left.exists()) == (0, False), done.stderr


@FOR_BOTH_BROKERS
def test_two_users_get_different_devices_and_see_each_other(broker):
    with broker.job(ALICE, "-n", "2", "--note", "hers") as (_, alices), broker.job(BOB, "-n", "2") as (_, bobs):
        refused = broker(BOB, "run", "--no-wait", "true")
        claims = broker.claims(BOB, "--fresh")

        assert sorted(f"{alices},{bobs}".split(",")) == ["0", "1", "2", "3"] and broker.locked() == [0, 1, 2, 3]
    gpus = alices.replace(",", ", GPU ")
    assert (refused.returncode, f"  GPU {gpus}: claimed by {ALICE.pw_name}, " in refused.stderr) == (75, True)
    assert {(claim["user"], claim["note"]) for claim in claims} == {(ALICE.pw_name, "hers"), (BOB.pw_name, None)}


def test_the_claim_outlives_the_wrapper_and_ends_with_the_job(broker):
    with broker.job(ALICE, command=("sh", "-c", "echo $$; exec sleep 100")) as (wrapper, job):
        wrapper.kill()
        wrapper.wait()
        assert broker.locked() == [3]
        os.kill(int(job), 9)
        assert eventually(lambda: broker.locked() == [])


GRAB = "import gpuguard\nclaim = gpuguard.grab_gpus(2)\nprint(len(claim), sorted(device.index for device in claim))\n"


def test_grab_gpus_gives_the_devices_of_a_process(broker):
    with broker.job(BOB, "--devices", "0"):
        assert broker.python(ALICE, GRAB) == "2 [2, 3]\n"
    assert eventually(lambda: broker.locked() == [])


NESTED = "gpuguard run --no-wait -- sh -c 'echo $CUDA_VISIBLE_DEVICES; gpuguard run --no-wait -n 2 -- true; echo $?'"


def test_commands_inside_a_claim_divide_it(broker):
    inner = NESTED.replace("gpuguard", f"{broker.python_path} -m gpuguard")
    done = broker(ALICE, "run", "--no-wait", "-n", "2", "--", "sh", "-c", inner)

    assert done.stdout in ("3\n125\n", "2\n125\n"), done.stderr


def test_a_request_that_waits_starts_when_the_device_is_free(broker):
    with broker.job(ALICE, "-n", "4") as (wrapper, _):
        waiting = broker.start(BOB, "run", "--wait", "60s", *LOOK)
        assert eventually(broker.has_ticket)
        os.killpg(wrapper.pid, 15)
        said, errors = waiting.communicate(timeout=60)

    assert (waiting.returncode, said) == (0, "3\n"), errors


@FOR_BOTH_BROKERS
def test_without_a_daemon_claims_fail_and_those_that_live_stay(broker):
    with broker.job(ALICE, "-n", "2"):
        broker.kill_daemon()
        failed = broker(BOB, "run", "true")
        seen = broker.claims(BOB)
        asked = [broker(BOB, command) for command in ("select", "explain")]  # they said that it would start at once

        assert [(done.returncode, done.stdout) for done in asked] == [(1, "")] * 2
        assert all("nothing can be claimed until it runs" in done.stderr for done in asked)
        assert failed.returncode == 125 and "nothing can be claimed until it runs" in failed.stderr
        assert broker.locked() == [2, 3] and {claim["user"] for claim in seen} == {ALICE.pw_name}
        broker.start_daemon()
        assert broker(BOB, "run", "--no-wait", "-n", "3", "true").returncode == 75
        assert broker(BOB, "run", "--no-wait", "-n", "2", "true").returncode == 0


def test_a_request_goes_on_waiting_while_the_daemon_is_started_again(broker):
    with broker.job(ALICE, "-n", "4") as (wrapper, _):
        waiting = broker.start(BOB, "run", "--wait", "60s", *LOOK)
        assert eventually(broker.has_ticket)
        broker.kill_daemon()
        os.killpg(wrapper.pid, 15)
        wrapper.wait()
        broker.start_daemon()
        said, errors = waiting.communicate(timeout=60)

    assert (waiting.returncode, said) == (0, "3\n"), errors


@FOR_BOTH_BROKERS
def test_a_denied_user_gets_nothing(broker):
    assert broker(None, "deny", BOB.pw_name, "--for", "1h").returncode == 0
    said = broker.asks(BOB, broker.uuids[0])

    assert "denied" in said["refused"][broker.uuids[0]]
    assert broker.locked() == []


def test_back_to_locks_of_all_users_and_to_the_daemon_again_keeps_the_claims(broker):
    with broker.job(ALICE, "-n", "1"):
        broker.setup("--no-broker")
        broker.kill_daemon()
        with broker.job(BOB, "-n", "3") as (_, devices):
            broker.setup("--broker")
            broker.start_daemon()
            assert (sorted(devices), broker.locked()) == (sorted("0,1,2"), [0, 1, 2, 3])
            assert broker(BOB, "run", "--no-wait", "true").returncode == 75
        assert eventually(lambda: broker.locked() == [3])
        done = broker(BOB, "run", "--no-wait", "-n", "3", "true")
        assert done.returncode == 0, done.stderr


def test_setting_up_again_keeps_the_mode_and_whose_it_is(broker):
    assert broker(None, "setup", "--dir", broker.directory.path).returncode == 0

    assert broker.directory.keeper == KEEPER.pw_uid
    assert broker(BOB, "run", "--no-wait", "true").returncode == 0


def test_doctor_says_who_gives_the_locks_and_when_no_daemon_does(broker):
    well = broker(BOB, "doctor")
    broker.kill_daemon()
    ill = broker(BOB, "doctor")

    assert "the daemon alone gives the locks, to all users" in well.stdout
    assert ill.returncode == 1 and "gives none: no daemon answers" in ill.stdout


def test_a_daemon_that_was_started_before_says_so(site):
    with a_machine(site, "everybody") as machine:
        machine.start_daemon(ready=False)
        machine.setup("--broker")
        said = machine(BOB, "run", "true")

        assert said.returncode == 125 and "it was started before" in said.stderr


def test_a_daemon_that_cannot_make_files_anew_gives_nothing_and_says_so(broker):
    broker.kill_daemon()
    os.chown(broker.directory.locks, 0, 0)
    broker.start_daemon()
    said = broker(BOB, "run", "--no-wait", "true")

    assert said.returncode == 125 and "cannot be made anew: Permission denied" in said.stderr
    assert "cannot be written, so no locks can be given" in broker.said()
    assert broker.locked() == []


@FOR_BOTH_BROKERS
def test_a_running_job_is_adopted_and_its_claim_ends_with_it(broker):
    node = broker.environment["GPUGUARD_BACKEND"].partition(":")[2]
    with broker.running(ALICE, USE, node, "0", "1000000000", "0") as job:  # it uses device 0 without a claim
        done = broker(ALICE, "adopt", str(job.pid))
        assert done.returncode == 0, done.stderr
        assert broker.locked() == [0]
        again = broker(ALICE, "adopt", str(job.pid))
        assert again.returncode == 1 and "is claimed already, by you" in again.stderr
    assert eventually(lambda: broker.locked() == [])


# Locks again whatever is unlocked, and has no record.
HOARD = """
import fcntl
answer, descriptors = exchange(directory, {"do": "claim", "devices": sys.argv[1:], "conditions": {}})
print("asked", flush=True)
while True:
    fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
# And with a record that lends nothing.
RECORDED = HOARD.replace(
    "while True",
    """
from gpuguard.claims.records import write_record
record = write_record(directory, {"id": answer["claim"], "devices": sys.argv[1:], "descriptors": [7]})
while True""",
)


@pytest.mark.parametrize("code", [HOARD, RECORDED, UNREAD], ids=["locks again", "with a record", "unread"])
def test_a_claim_that_is_released_by_a_policy_is_over_whatever_its_owner_does(broker, monkeypatch, code):
    monkeypatch.setattr(identity, "uid_min", lambda: 1)  # the users of these tests are the system's
    machine = Listing(a_device(0, uuid=broker.uuids[0]))
    with (
        broker.running(BOB, code, broker.uuids[0]) as hostile,
        broker.job(ALICE, "--devices", "1"),
    ):
        assert eventually(lambda: broker.locked() == [0, 1])
        [claim] = probe(broker.directory, broker.uuids[:1])
        context = ActionContext(
            machine, lambda event: True, lambda verdict, now: True, enforce=True, directory=broker.directory
        )
        finding = Finding("age", Subject("claim", uid=claim.uid, claim=claim.id), "held for 3h without a process", ())
        snapshot = machine.sample((), None)
        [outcome] = actions.act(
            Verdict(policy="idle-claims", finding=finding, action="release", step=0, since=0.0, enforce=True),
            snapshot.__class__(**{**vars(snapshot), "claims": (claim,)}),
            context,
        )

        assert (claim.uid, outcome.word, outcome.why) == (BOB.pw_uid, "done", "")
        assert broker.locked() == [1] and hostile.poll() is None
        assert broker(ALICE, "run", "--no-wait", "--devices", "0", "true").returncode == 0


def test_a_lock_file_that_is_replaced_by_a_link_has_root_write_into_nothing_else(tmp_path, monkeypatch):
    """By the user of the daemon, say, who may write there from the first setup on."""
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    directory, victim, real = lock_directory(str(tmp_path / "claims")), tmp_path / "victim", os.fchmod
    os.close(open_lock(directory, "GPU-a"))
    os.close(open_lock(directory, "gate"))
    victim.write_text("root's")
    path = Path(directory.lock_path("GPU-a"))

    def chmod_and_replace(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
            path.unlink()
            path.symlink_to(victim)

    monkeypatch.setattr(os, "fchmod", chmod_and_replace)
    setup.change_broker(directory.path, KEEPER.pw_name, brokered=True)

    assert victim.read_text() == "root's"


KILLS = {"whole": often(32), "shares": often(20), "instances": often(16)}
MIG = "1xH100-80GB:mig=3g.40gb,3g.40gb"
GIB = 2**30

CLAIMANT = """
import fcntl, random
from gpuguard.errors import GpuguardError
from gpuguard.claims.directory import is_same_file
chance = random.Random(sys.argv[1][-1])
asks = json.loads(sys.argv[2])
with open(sys.argv[1], "a") as log:
    print("begun", flush=True)
    while True:
        wanted, conditions = chance.choice(asks)
        try:
            answer, descriptors = exchange(directory, {"do": "claim", "devices": wanted, "conditions": conditions})
        except (GpuguardError, OSError):
            time.sleep(0.01)
            continue
        if not descriptors:
            continue
        began = time.monotonic()
        time.sleep(chance.random() * 0.1)
        facts = [open(f"/proc/self/fdinfo/{each}").read() for each in descriptors]
        paths = [directory.lock_path(name) for name in answer["locks"]]
        kept = all("lock:" in each for each in facts) and all(map(is_same_file, descriptors, paths))
        print(json.dumps([wanted, conditions.get("memory"), began, time.monotonic(), kept]), file=log, flush=True)
        for each in descriptors:
            chance.random() < 0.5 and fcntl.flock(each, fcntl.LOCK_UN)
            os.close(each)
"""


def asks(kind: str, uuids: list[str]) -> list[tuple[list[str], dict[str, Any]]]:
    """What the claimants choose among: devices and conditions."""
    shares: list[dict[str, Any]] = [{"share": True, "memory": size * GIB, "max_util": 100.0} for size in (10, 17, 30)]
    if kind == "whole":
        choices = [[one] for one in uuids[1:]] + [[one, other] for one, other in permutations(uuids[1:], 2)]
        return [(choice, {}) for choice in choices]
    if kind == "shares":
        return [([one], way) for one in uuids[1:2] for way in ({}, {}, *shares)] + [(uuids[1:3], shares[2])]
    return [([one], way) for one in uuids for way in ({}, shares[1])]


@pytest.mark.parametrize("kind", KILLS)
def test_a_daemon_that_is_killed_loses_no_claim_and_leaves_nothing_locked(site, kind):
    chance, kills = luck(7), KILLS[kind]
    keeps = ("--share", "--memory", "1GiB") if kind == "shares" else ()
    with a_machine(site, "keeper", *([MIG] if kind == "instances" else [])) as machine:
        logs = [machine.place / f"log{number}" for number in range(4)]
        devices = [one for one in machine.uuids if kind != "instances" or one.startswith("MIG-")]
        with ExitStack() as stack:
            if kind != "instances":
                stack.enter_context(machine.job(ALICE, "--devices", "0", *keeps))
            for log, user in zip(logs, (ALICE, ALICE, BOB, BOB), strict=True):
                log.touch()
                log.chmod(0o666)
                words = str(log), json.dumps(asks(kind, devices))
                claimant = stack.enter_context(machine.program(user, CLAIMANT, *words))
                assert claimant.stdout and claimant.stdout.readline()
            for _ in range(kills):
                time.sleep(chance.random() * 0.15)
                machine.kill_daemon()
                assert kind == "instances" or 0 in machine.locked()
                machine.start_daemon()
            assert eventually(lambda: all(len(told(log)) > kills for log in logs))
            # A whole device needs a moment in which none of the others has a share of it.
            ways = {True} if kind == "whole" else {True, False}
            assert eventually(lambda: {memory is None for log in logs for _, memory, *_ in told(log)} == ways, 90)
        claims = [claim for log in logs for claim in told(log)]
        assert all(kept for *_, kept in claims)
        assert all(most_at_once(claims, uuid) <= (40 if kind == "instances" else 80) * GIB for uuid in devices)
        assert eventually(lambda: machine.locked() == [])
        profile = ("--mig", "3g.40gb") if kind == "instances" else ()
        assert machine(BOB, "run", "--no-wait", "-n", str(len(devices)), *profile, "true").returncode == 0
        assert [name for name in os.listdir(machine.directory.locks) if name.endswith(".new")] == []


def told(log: Path) -> list[Any]:
    """What a claimant has written down of its claims."""
    return [json.loads(line) for line in log.read_text().rpartition("\n")[0].splitlines()]


ROOT = """
import gpuguard, random
chance = random.Random(3)
with open(sys.argv[1], "a") as log:
    print("begun", flush=True)
    while True:
        memory = chance.choice((None, None, 10 * 2**30, 30 * 2**30))
        way = {"share": True, "memory": memory, "max_util": 100.0} if memory else {}
        try:
            claim = gpuguard.grab_gpus(1, devices=sys.argv[2:], wait=0, **way)
        except gpuguard.GpuguardError:  # another one was quicker
            continue
        began = time.monotonic()
        time.sleep(chance.random() * 0.02)
        print(json.dumps([sys.argv[2:], memory, began, time.monotonic(), True]), file=log, flush=True)
        claim.release()
"""


def test_root_who_takes_locks_directly_and_the_daemon_never_overlook_each_other(site):
    with a_machine(site, "keeper") as machine, ExitStack() as stack:
        wanted = json.dumps([one for one in asks("shares", machine.uuids) if len(one[0]) == 1])
        logs = [machine.place / f"log{number}" for number in range(3)]
        words = (wanted, wanted, machine.uuids[1])
        for log, user, code, word in zip(logs, (ALICE, BOB, None), (CLAIMANT, CLAIMANT, ROOT), words, strict=True):
            log.touch()
            log.chmod(0o666)
            claimant = stack.enter_context(machine.program(user, code, str(log), word))
            assert claimant.stdout and claimant.stdout.readline()
        assert eventually(lambda: all(len(told(log)) > 15 for log in logs), 90)
        claims = [claim for log in logs for claim in told(log)]

    assert most_at_once(claims, machine.uuids[1]) <= 80 * GIB
    assert all(kept for *_, kept in claims)


def most_at_once(claims: list[list[Any]], uuid: str) -> float:
    """Bytes of the device that were promised to shares at one moment; whole ones must have been alone."""
    changes = [
        change
        for wanted, memory, began, ended, _ in claims
        if uuid in wanted
        for size in [memory or 0]
        for change in ((began, size), (ended, -size))
    ]
    alone = [(began, ended) for wanted, memory, began, ended, _ in claims if uuid in wanted and memory is None]
    for began, ended in alone:
        others = [one for one in claims if uuid in one[0] and one[2] < ended and one[3] > began]
        assert len(others) == 1, "a whole GPU was given while another user had it, or a part of it"
    return max(accumulate(size for _, size in sorted(changes)), default=0)
