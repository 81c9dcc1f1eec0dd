"""What is left of a shared device, by what was promised and what the driver shows."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from builders import GIB, Machine, a_claim_record, a_device, a_mig_instance, a_process, a_snapshot
from own_claims import acquire, preview

from gpuguard.claims import claim as hold
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import probe, write_record
from gpuguard.eligibility import (
    UNSHARED,
    Reason,
    Refusal,
    Sharing,
    memory_left,
    share_left,
    shared_by,
    sharing_on,
    slots_left,
)
from gpuguard.errors import NotEnoughGpus
from gpuguard.model import ClaimRecord, Device, Gap
from gpuguard.request import Request
from gpuguard.select import Choice, choose
from gpuguard.users import user_name

ALICE, BOB = 1001, 1002
DEVICE = a_device(0, memory_used=0)


def a_share(gib: float | None, slot: int = 0, device: Device = DEVICE, **fields: Any) -> ClaimRecord:
    """A share of so many GiB, of alice, in that slot of the device."""
    memory = None if gib is None else int(gib * GIB)
    return a_claim_record(device, id=f"c{slot}", memory=memory, slots=(f"{device.uuid}.slot{slot}",), **fields)


def chosen(device: Device, sharing: Sharing, **request: Any) -> Choice:
    wanted = Request(share=True, memory=request.pop("memory", 10 * GIB), **request)
    return choose(a_snapshot(device), wanted, {}, {device.uuid: sharing})


def uses(gib: float | None, used: int = 30) -> Device:
    """A device with so many GiB in use, some of it by process 7."""
    memory = None if gib is None else int(gib * GIB)
    return a_device(0, memory_used=used * GIB, processes=(a_process(7, memory_used=memory),))


@pytest.mark.parametrize(
    ("device", "sharing", "left"),
    [
        (DEVICE, Sharing((a_share(10), a_share(20, 1, uid=BOB))), 50),
        (uses(30), Sharing((a_share(10),), owners={7: ALICE}), 50),
        (uses(30), Sharing((a_share(40),), owners={7: ALICE}), 40),
        (uses(25), Sharing((a_share(10),), owners={}), 40),
        (uses(None), Sharing((a_share(10),), owners={7: ALICE}), 40),
    ],
    ids=["promised, not used", "more than the share used", "less than the share used", "strangers", "unknown use"],
)
def test_what_is_left_is_what_nobody_was_promised_and_nobody_else_uses(device, sharing, left):
    assert memory_left(device, sharing) == left * GIB


@pytest.mark.parametrize("unknown", ["memory_total", "memory_used"])
def test_nobody_can_tell_what_is_left_where_the_driver_does_not(unknown):
    device = a_device(0, **{unknown: None})

    assert memory_left(device, UNSHARED) is None
    assert chosen(device, UNSHARED).devices == ()


INSTANCE = a_mig_instance(a_device(0, mig_mode=True))
STRANGER = a_process(9, user="mallory", uid=6666, memory_used=10 * GIB)


@pytest.mark.parametrize(
    ("device", "sharing", "memory", "said"),
    [
        pytest.param(a_device(0, memory_used=None), UNSHARED, 10, Reason("its memory in use is unknown"), id="unknown"),
        pytest.param(a_device(0, memory_total=None), UNSHARED, 10, Reason("its memory is unknown"), id="unknown size"),
        pytest.param(
            DEVICE,
            UNSHARED,
            81,
            Reason("has 80.0GiB of memory even when it is empty", True, "--memory"),
            id="too large for any",
        ),
        pytest.param(
            DEVICE,
            Sharing((a_share(50), a_share(25, 1, uid=BOB, user="bob"))),
            10,
            Reason("only 5.0GiB left beside alice (50.0GiB) and bob (25.0GiB)", False, "--memory"),
            id="too large beside others",
        ),
        pytest.param(
            a_device(0, memory_used=0, memory_shared_with_host=True, memory_free=30 * GIB),
            UNSHARED,
            40,
            Reason("only 30.0GiB left", False, "--memory"),
            id="too large for what the host has left",
        ),
        pytest.param(
            DEVICE,
            Sharing((a_share(10, most=1),)),
            10,
            Reason("shared by 1 already, and no more may join: alice (10.0GiB)", False, "--slots"),
            id="full",
        ),
        pytest.param(
            DEVICE,
            Sharing((a_share(10),), unknown=1),
            10,
            Reason("shared by a claim whose record cannot be read: how much is left is unknown"),
            id="unreadable record",
        ),
        pytest.param(
            a_device(0, memory_used=0, compute_mode="exclusive_process"),
            UNSHARED,
            10,
            Reason("in exclusive-process mode: only one process can use it (nvidia-smi -c DEFAULT)", True),
            id="for one process",
        ),
        pytest.param(
            a_device(0, memory_used=10 * GIB, processes=(STRANGER,)),
            Sharing((a_share(10),)),
            10,
            Reason("10.0GiB used by mallory (pid 9, python train.py, 2h30m), whose share is unknown"),
            id="stranger",
        ),
        pytest.param(
            a_device(0, memory_used=0, processes=None),
            Sharing((a_share(10),)),
            10,
            Reason("its list of processes is unknown", False, "--share"),
            id="unknown processes",
        ),
    ],
)
def test_a_share_that_does_not_fit_is_refused_with_the_reason(device, sharing, memory, said):
    choice = chosen(device, sharing, memory=memory * GIB)
    assert (choice.refused, choice.sharing) == ((Refusal(device, (said,)),), {device.uuid: sharing})


def test_that_a_driver_never_tells_its_processes_may_still_pass_where_others_share():
    device = a_device(0, memory_used=0, processes=None)
    snapshot = a_snapshot(device, gaps=(Gap(device.uuid, "processes", "Not Supported"),))
    choice = choose(snapshot, Request(share=True, memory=GIB), {}, {device.uuid: Sharing((a_share(10),))})

    said = Reason("its list of processes is unknown (Not Supported)", False, "--share")
    assert choice.refused == (Refusal(device, (said,)),)


def test_an_instance_is_taken_while_its_whole_gpu_is_shared():
    gpu = a_device(0, mig_mode=True)
    choice = choose(a_snapshot(gpu, INSTANCE), Request(), {}, {gpu.uuid: Sharing((a_share(10, device=gpu),))})

    assert choice.refused[1] == Refusal(INSTANCE, (Reason("its whole GPU is shared by alice (10.0GiB)"),))


@pytest.mark.parametrize(
    ("sharing", "text"),
    [
        (UNSHARED, ""),
        (Sharing((a_share(10), a_share(20, 1, user="bob"))), "alice (10.0GiB) and bob (20.0GiB)"),
        (Sharing((a_share(10),), unknown=2), "alice (10.0GiB) and 2 without a record"),
        (
            Sharing((a_share(1), a_share(2, 1, user="bob"), a_share(3, 2, user="eve"))),
            "alice (1.0GiB), bob (2.0GiB) and eve (3.0GiB)",
        ),
    ],
)
def test_who_shares_a_device_is_said_with_how_many_more_there_are(sharing, text):
    assert shared_by(sharing) == text


def test_what_is_left_to_share_is_never_less_than_nothing_and_unknown_beside_a_claim_that_says_nothing():
    told, silent = Sharing((a_share(70), a_share(20, 1, uid=BOB))), Sharing((a_share(10),), unknown=1)

    assert [share_left(DEVICE, sharing) for sharing in (UNSHARED, told, silent)] == [80 * GIB, 0, None]


def test_a_share_of_another_device_is_none_of_this_one():
    other = a_share(10, device=a_device(1))

    assert sharing_on(DEVICE, [other]) == Sharing()


@pytest.mark.parametrize(
    ("most", "left"), [((None,), 7), ((2,), 1), ((2, None), 0), ((0,), 7)], ids=["none", "one", "full", "no bound"]
)
def test_each_claim_that_shares_may_bound_how_many_do(most, left):
    shares = tuple(a_share(10, slot, most=bound) for slot, bound in enumerate(most))

    assert slots_left(Sharing(shares), 8) == left


ALONE = Request()


def wanting(gib: float, **fields: Any) -> Request:
    return Request(share=True, memory=int(gib * GIB), **fields)


def refusal(machine: Machine, request: Request, directory: LockDirectory) -> str:
    """Why it is not given."""
    with pytest.raises(NotEnoughGpus) as caught:
        acquire(machine, request, directory)
    return str(caught.value)


@pytest.fixture
def machine() -> Machine:
    """One idle device."""
    return Machine(a_device(0))


def a_record(directory: LockDirectory, slot: str, **content: Any) -> int:
    """A record as another user may have written it, with the lock of the slot that it names; both stay open."""
    lock = open_lock(directory, slot)
    assert try_flock(lock)
    device = open_lock(directory, slot.partition(".")[0])
    assert try_flock(device, fcntl.LOCK_SH)
    facts = {"id": "forged", "devices": [slot.partition(".")[0]], "slots": [slot], "memory": 10 * GIB, **content}
    return write_record(directory, facts)[1]


def test_the_kernel_bounds_how_many_share_a_device(machine, directory):
    held = [acquire(machine, wanting(1), directory) for _ in range(8)]
    assert "shared by 8 already" in refusal(machine, wanting(1), directory)
    for claim in held:
        claim.release()


def test_a_strangers_process_makes_a_device_busy_for_a_share_too(directory):
    machine = Machine(a_device(0, processes=(a_process(uid=4242, user="mallory"),), memory_used=10 * GIB))

    assert "used by mallory" in refusal(machine, wanting(10), directory)


def test_the_processes_of_the_shares_do_not_make_it_busy(machine, directory):
    with acquire(machine, wanting(30), directory):
        machine.change(0, processes=(a_process(os.getpid(), uid=os.getuid()),), memory_used=10 * GIB)
        acquire(machine, wanting(40), directory).release()
        # What is promised counts, not what is used of it.
        assert "only 50.0GiB left" in refusal(machine, wanting(60), directory)


def test_roots_process_without_an_ancestor_in_a_share_is_a_strangers(machine, directory):
    with acquire(machine, wanting(10), directory):
        machine.change(0, processes=(a_process(1, uid=0, user="root"),), memory_used=10 * GIB)
        with pytest.raises(NotEnoughGpus, match=r"used by root .*whose share is unknown"):
            acquire(machine, wanting(10), directory)


def test_a_device_that_works_hard_is_shared_unless_the_job_sets_a_bound_which_is_named(machine, directory):
    with acquire(machine, wanting(10), directory):
        machine.change(0, utilization=95.0)
        acquire(machine, wanting(10), directory).release()
        text = refusal(machine, wanting(10, max_util=50.0), directory)
        assert "utilization is 95%, more than 50% (--max-util)" in text
        machine.change(0, utilization=None)
        acquire(machine, wanting(10), directory).release()
        assert "utilization is unknown" in refusal(machine, wanting(10, max_util=50.0), directory)


def test_the_least_busy_device_is_shared_first_and_then_one_that_is_shared_already(directory):
    machine = Machine(a_device(0, utilization=30.0), a_device(1), a_device(2))
    chosen = [acquire(machine, wanting(10), directory)[0].index for _ in range(3)]

    assert chosen == [2, 2, 2]
    machine.change(2, utilization=45.0)
    assert acquire(machine, wanting(10), directory)[0].index == 1


def test_a_slot_without_a_record_is_a_share_of_unknown_size_until_it_ends(machine, directory):
    slot = open_lock(directory, f"{machine.devices[0].uuid}.slot0")
    assert try_flock(slot)
    assert "record cannot be read" in refusal(machine, wanting(1), directory)
    os.close(slot)

    acquire(machine, wanting(1), directory).release()


@pytest.mark.parametrize("memory", [0, -1, 10**18, True, "10GiB", None, 1.5, 81 * GIB])
def test_a_record_that_cannot_be_true_makes_its_device_unshareable(machine, directory, memory):
    a_record(directory, f"{machine.devices[0].uuid}.slot0", memory=memory)

    assert "record cannot be read" in refusal(machine, wanting(1), directory)


def test_a_small_lie_about_the_slot_of_another_user_changes_nothing(machine, directory):
    with acquire(machine, wanting(70), directory) as claim:
        slot = f"{claim[0].uuid}.slot0"
        write_record(directory, {"id": "lie", "devices": [claim[0].uuid], "slots": [slot], "memory": 1})
        assert "only 10.0GiB left" in refusal(machine, wanting(20), directory)


def test_a_record_without_a_locked_slot_promises_nothing(machine, directory):
    uuid = machine.devices[0].uuid
    write_record(directory, {"id": "lie", "devices": [uuid], "slots": [f"{uuid}.slot3"], "memory": 80 * GIB})

    acquire(machine, wanting(70), directory).release()


def test_one_share_can_span_devices(directory):
    machine = Machine(a_device(0), a_device(1))
    with acquire(machine, wanting(50, num_gpus=2), directory) as both:
        assert len(both) == 2
        with pytest.raises(NotEnoughGpus):
            acquire(machine, wanting(40), directory)
        with pytest.raises(NotEnoughGpus):
            acquire(machine, ALONE, directory)


def test_a_share_that_loses_the_race_goes_back_and_leaves_nothing(machine, directory, monkeypatch):
    proper, rivals = Claim.write_record, []

    def overtaken(self: Claim, *words: Any, **more: Any) -> None:
        monkeypatch.setattr(Claim, "write_record", proper)
        rivals.append(a_record(directory, f"{self[0].uuid}.slot5", memory=70 * GIB))
        proper(self, *words, **more)

    monkeypatch.setattr(Claim, "write_record", overtaken)
    assert "only 10.0GiB left" in refusal(machine, wanting(20), directory)

    assert [record.id for record in probe(directory, [machine.devices[0].uuid])] == ["forged"]


OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("totals", "environ", "fraction"),
    [
        ((80,), {}, "0.1250"),
        ((80, 40), {}, "0.1250"),  # it is the same for all devices of the job
        ((30,), {}, "0.3333"),
        ((10,), {}, "1.0000"),
        ((8,), {}, "1.0000"),
        ((80,), {OLD: ".05"}, ".05"),
        ((80,), {OLD: "0.125"}, "0.125"),
        ((80,), {OLD: "0.2"}, "0.1250"),
        ((80,), {OLD: "0"}, "0.1250"),
        ((80,), {OLD: "1.2.3"}, "0.1250"),
        ((80,), {NEW: ".05"}, None),
        ((80, None), {}, None),
        ((), {}, None),
    ],
)
def test_frameworks_are_told_a_share_of_10_gib_and_keep_a_smaller_one_of_the_users(totals, environ, fraction):
    devices = [a_device(i, memory_total=total and total * GIB) for i, total in enumerate(totals)]
    told = {"GPUGUARD_MEMORY": str(10 * GIB), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}

    assert hold.share_environment(10 * GIB, devices, environ) == told | ({OLD: fraction} if fraction else {})


def test_the_environment_of_a_job_names_its_devices_its_claim_and_its_share(directory):
    two = Machine(a_device(0), a_device(1), a_device(2))
    devices = Request(devices=("1", "2"), num_gpus=2)
    with acquire(two, devices, directory) as claim:
        uuids = ",".join(device.uuid for device in claim)
        own = {"GPUGUARD_CLAIM": claim.id, "GPUGUARD_GPUS": uuids}
        assert claim.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2", **own}
        assert claim.environment("uuid")["CUDA_VISIBLE_DEVICES"] == uuids
        assert repr(claim) == f"<Claim {claim.id} of 1, 2>"
    assert repr(claim) == f"<Claim {claim.id} of 1, 2, released>"
    assert repr(Claim("abc", (), ())) == "<Claim abc of no GPU>"
    with acquire(two, wanting(10), directory) as claim:
        assert {name: claim.environment()[name] for name in hold.SHARE_VARIABLES} == hold.share_environment(
            10 * GIB, claim.devices, os.environ
        )


def test_inside_a_share_commands_do_not_exclude_each_other_nor_the_neighbours(machine, directory, monkeypatch):
    with acquire(machine, wanting(10), directory) as outer:
        monkeypatch.setenv("GPUGUARD_CLAIM", outer.id)
        with acquire(machine, ALONE, directory) as one, acquire(machine, ALONE, directory) as other:
            assert one[0].index == other[0].index == 0
            monkeypatch.delenv("GPUGUARD_CLAIM")
            acquire(machine, wanting(10), directory).release()


def test_a_device_is_refused_to_whom_wants_it_alone_by_the_shares_on_it(machine, directory):
    with acquire(machine, wanting(10), directory), acquire(machine, wanting(20), directory):
        _, alone = preview(machine, ALONE, directory)
        _, too_large = preview(machine, wanting(60), directory)

    user = user_name(os.geteuid())
    both = [f"{user} (10.0GiB), {user} (20.0GiB)", f"{user} (10.0GiB) and {user} (20.0GiB)"]
    assert [reason.text for reason in alone.refused[0].reasons] == [f"shared by {both[0]}"]
    assert [reason.text for reason in too_large.refused[0].reasons] == [f"only 50.0GiB left beside {both[1]}"]


def test_a_shared_instance_excludes_its_whole_gpu_and_is_excluded_by_it(directory):
    parent = a_device(0, mig_mode=True)
    divided = Machine(parent, a_mig_instance(parent, 0))
    whole = Machine(a_device(0))
    with (
        acquire(divided, wanting(10), directory),
        acquire(divided, wanting(10, max_util=100.0), directory),
        pytest.raises(NotEnoughGpus),
    ):
        acquire(whole, ALONE, directory)
    with acquire(whole, wanting(1), directory), pytest.raises(NotEnoughGpus, match="its whole GPU is shared"):
        acquire(divided, wanting(10), directory)
    with acquire(whole, wanting(1), directory), pytest.raises(NotEnoughGpus):
        acquire(divided, ALONE, directory)


def test_the_record_of_an_exclusive_claim_says_nothing_of_shares(directory):
    with acquire(Machine(a_device(0)), ALONE, directory):
        (path,) = Path(directory.records).iterdir()
        assert not {"memory", "slots", "most"} & set(json.loads(path.read_text().splitlines()[0]))
