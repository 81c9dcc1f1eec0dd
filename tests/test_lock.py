"""Claims: all or nothing, kept as long as any process of the job lives, never taken from anybody."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, Machine, a_device, a_mig_instance, a_process
from claiming import acquire, lock_best, preview

from gpuguard import model
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import MOST_OF_ONE, locked_devices, read_records, write_record
from gpuguard.errors import ClaimLost, ImpossibleRequest, NotEnoughGpus
from gpuguard.model import Snapshot
from gpuguard.request import Request


def indices(claim: Claim) -> list[int]:
    return [device.index for device in claim]


def test_a_waiting_request_starts_when_the_device_is_released_and_does_not_ask_the_driver_meanwhile(directory):
    machine = Machine(a_device(0))
    holder = acquire(machine, Request(), directory)
    asked: list[int] = []

    def let_go() -> None:
        asked.append(len(machine.asked))
        holder.release()

    def tell(_: NotEnoughGpus) -> None:
        if not asked:
            asked.append(len(machine.asked))
            threading.Timer(0.3, let_go).start()

    with acquire(machine, Request(), directory, wait=30, on_wait=tell) as claim:
        assert indices(claim) == [0]
        assert asked[0] == asked[1]


def test_release_is_idempotent_and_works_from_another_thread(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    claim = acquire(machine, Request(), directory)
    threads = [threading.Thread(target=claim.release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    acquire(machine, Request(), directory).release()


def test_release_leaves_a_descriptor_alone_whose_number_means_another_file_now(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    claim = acquire(machine, Request(), directory)
    null = os.open("/dev/null", os.O_RDONLY)
    bystander = os.dup2(null, claim.pass_fds[0])
    os.close(null)
    claim.release()

    os.close(bystander)


def test_a_forked_child_that_releases_does_not_free_its_parents_claim(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory) as claim:
        child = os.fork()
        if child == 0:
            claim.release()
            os._exit(0)
        os.waitpid(child, 0)

        with pytest.raises(NotEnoughGpus):
            acquire(machine, Request(), directory)


def test_release_frees_the_devices_although_a_leftover_of_the_job_has_the_descriptors(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    claim = acquire(machine, Request(), directory)
    leftover = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=claim.pass_fds)
    claim.release()
    try:
        acquire(machine, Request(), directory).release()
    finally:
        leftover.communicate(b"\n")


def test_reassert_takes_the_lock_again_when_the_job_unlocked_it(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory) as claim:
        code = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_UN)"
        number = claim.pass_fds[0]
        subprocess.run([sys.executable, "-c", code, str(number)], pass_fds=claim.pass_fds, check=True)
        unlocked = locked_devices(directory, [machine.devices[0].uuid])
        claim.reassert()

        assert unlocked == set()
        assert locked_devices(directory, [machine.devices[0].uuid])


def test_reassert_reports_a_device_that_somebody_else_has_locked_meanwhile(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory) as claim:
        fcntl.flock(claim.pass_fds[0], fcntl.LOCK_UN)
        thief = open_lock(directory, machine.devices[0].uuid)
        assert try_flock(thief)
        with pytest.raises(ClaimLost, match="another process"):
            claim.reassert()
        os.close(thief)


def test_reassert_reports_a_lock_file_that_was_removed(directory: LockDirectory) -> None:
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory) as claim:
        os.unlink(directory.lock_path(machine.devices[0].uuid))

        with pytest.raises(ClaimLost, match="removed or replaced"):
            claim.reassert()


def test_a_planted_lock_file_takes_its_device_out_of_the_choice_and_is_named(directory: LockDirectory) -> None:
    machine = Machine(a_device(0), a_device(1))
    Path(directory.lock_path(machine.devices[1].uuid)).symlink_to("/etc/passwd")
    with acquire(machine, Request(), directory) as claim:
        assert indices(claim) == [0]
        with pytest.raises(NotEnoughGpus):
            acquire(machine, Request(), directory)


def divided() -> Machine:
    parent = a_device(0, mig_mode=True)
    return Machine(parent, a_mig_instance(parent, 0), a_mig_instance(parent, 1))


def test_a_claim_for_others_has_the_record_that_they_write(directory: LockDirectory) -> None:
    claim = lock_best(Machine(), Request(), directory, {})

    assert claim and read_records(directory) == []
    assert locked_devices(directory, [claim[0].uuid]) == {claim[0].uuid}
    claim.release()


def test_mig_instances_are_claimed_one_by_one_and_go_by_uuid(directory: LockDirectory) -> None:
    machine = divided()
    with acquire(machine, Request(), directory) as first, acquire(machine, Request(), directory) as second:
        assert {first[0].uuid, second[0].uuid} == {device.uuid for device in machine.devices[1:]}
        assert first.environment()["CUDA_VISIBLE_DEVICES"] == first[0].uuid
        with pytest.raises(NotEnoughGpus):
            acquire(machine, Request(), directory)


@pytest.fixture
def tells_late(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A GPU with two instances, which the driver shows with the health alone."""
    sample = Machine.sample

    def briefly(machine: Machine, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        snapshot = sample(machine, fields, devices)
        if model.HEALTH in fields:
            return snapshot
        gpus = [device for device in snapshot.devices if device.parent_uuid is None]
        return replace(snapshot, devices=tuple(replace(gpu, mig_mode=None, problems=None) for gpu in gpus))

    monkeypatch.setattr(Machine, "sample", briefly)
    return divided()


def test_the_instance_that_is_left_is_found_although_the_lock_of_its_gpu_is_held(directory, tells_late):
    with acquire(tells_late, Request(), directory) as first, acquire(tells_late, Request(), directory) as second:
        assert {first[0].uuid, second[0].uuid} == {device.uuid for device in tells_late.devices[1:]}


def test_more_gpus_than_the_driver_shows_at_first_are_looked_for_among_instances(directory, tells_late):
    with acquire(tells_late, Request(num_gpus=2), directory) as claim:
        assert {device.uuid for device in claim} == {device.uuid for device in tells_late.devices[1:]}


@pytest.mark.parametrize("first_divided", [True, False], ids=["instance first", "whole first"])
def test_a_gpu_and_its_instances_exclude_each_other(directory: LockDirectory, first_divided: bool) -> None:
    machines = [divided(), Machine(a_device(0))]
    first, second = machines if first_divided else machines[::-1]
    with acquire(first, Request(), directory), pytest.raises(NotEnoughGpus):
        acquire(second, Request(), directory)


def test_inside_a_claim_the_devices_are_free_although_the_job_uses_them_already(directory, monkeypatch):
    machine = Machine(a_device(0))
    with acquire(machine, Request(), directory) as outer:
        monkeypatch.setenv("GPUGUARD_CLAIM", outer.id)
        machine.change(0, processes=(a_process(uid=os.geteuid()),), memory_used=10 * GIB, memory_free=70 * GIB)
        with acquire(machine, Request(), directory) as inner:
            assert indices(inner) == [0]


def test_the_name_of_a_claim_that_is_over_does_not_count(directory, monkeypatch):
    machine = Machine(a_device(0))
    over = acquire(machine, Request(), directory)
    over.release()
    monkeypatch.setenv("GPUGUARD_CLAIM", over.id)

    acquire(machine, Request(), directory).release()


def test_set_but_empty_means_no_device(directory: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    with pytest.raises(ImpossibleRequest):
        acquire(Machine(), Request(), directory)


def test_only_the_winners_are_read_a_second_time(directory: LockDirectory) -> None:
    machine = Machine(*(a_device(index, problems=None) for index in range(8)))
    preview(machine, Request(num_gpus=1), directory)
    first, second = machine.asked[0][1], machine.asked[1][1]

    assert first is None
    assert second is not None
    assert len(second) == 1


def test_a_record_that_cannot_be_written_does_not_cost_the_claim(directory, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpuguard.claims.claim.write_record", full)
    with acquire(Machine(a_device(0)), Request(), directory) as claim:
        assert "No space left" in (claim.warning or "")
        assert locked_devices(directory, [claim[0].uuid])


def test_many_dead_records_of_a_user_are_removed_by_his_next_claim(directory: LockDirectory) -> None:
    for number in range(MOST_OF_ONE + 10):
        os.close(write_record(directory, {"id": f"dead{number}", "devices": []})[1])

    with acquire(Machine(a_device(0)), Request(), directory) as claim:
        assert len(os.listdir(directory.records)) < 60
        assert [record.id for record in read_records(directory)] == [claim.id]
