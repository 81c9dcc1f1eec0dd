"""Claims: all or nothing, kept as long as any process of the job lives, never taken away; what they wait for."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import GIB, Machine, a_device, a_mig_instance, a_process
from own_claims import acquire, preview

from gpuguard import model
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, open_lock, try_flock
from gpuguard.claims.records import MOST_OF_ONE, locked_devices, read_records, write_record
from gpuguard.claims.restrictions import DENIED, QUARANTINED, Restriction, change
from gpuguard.errors import BackendError, ClaimError, ClaimLost, ImpossibleRequest, NotEnoughGpus, WaitTimeout
from gpuguard.lock import Allocator, waits_in_queue
from gpuguard.model import HEALTH, IDLE_PROCESSES, ClaimRecord, Gap, Snapshot
from gpuguard.queue import reservations, tickets
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.leader import MAY_START
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import OwnTicket, read_tickets, ticket_content, wake
from gpuguard.request import Request
from gpuguard.vendors import AMD


def indices(claim: Claim) -> list[int]:
    return [device.index for device in claim]


@pytest.fixture
def machine() -> Machine:
    """One device."""
    return Machine(a_device(0))


@pytest.fixture
def claim(machine: Machine, directory: LockDirectory) -> Iterator[Claim]:
    with acquire(machine, Request(), directory) as claim:
        yield claim


def test_release_is_idempotent_and_works_from_another_thread(machine, directory, claim):
    threads = [threading.Thread(target=claim.release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    acquire(machine, Request(), directory).release()


def test_release_leaves_a_descriptor_alone_whose_number_means_another_file_now(claim):
    null = os.open("/dev/null", os.O_RDONLY)
    bystander = os.dup2(null, claim.pass_fds[0])
    os.close(null)
    claim.release()

    os.close(bystander)


def test_a_forked_child_that_releases_does_not_free_its_parents_claim(machine, directory, claim):
    child = os.fork()
    if child == 0:
        claim.release()
        os._exit(0)
    os.waitpid(child, 0)

    with pytest.raises(NotEnoughGpus):
        acquire(machine, Request(), directory)


def test_release_frees_the_devices_although_a_leftover_of_the_job_has_the_descriptors(machine, directory, claim):
    leftover = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=claim.pass_fds)
    claim.release()
    try:
        acquire(machine, Request(), directory).release()
    finally:
        leftover.communicate(b"\n")


def test_the_record_of_a_claim_says_what_its_job_is_and_when_it_ends(directory, claim):
    claim.memory, claim.most, claim.max_processes = 10 * GIB, 2, 3
    before = time.time()
    job = JobDetails("a note", ("python", "x y.py"), time_limit=60.0, waited=1.23456, job="17.3")
    claim.write_record(directory, job)
    [record] = read_records(directory)

    assert record.ends and before + 59.99 <= record.ends <= time.time() + 60.01
    assert replace(record, ends=None, written=None, uid=0, user="") == ClaimRecord(
        id=claim.id,
        devices=(claim[0].uuid,),
        uid=0,
        user="",
        pid=os.getpid(),
        since=claim.since,
        note="a note",
        command=("python", "x y.py"),
        memory=10 * GIB,
        most=2,
        max_processes=3,
        waited=1.235,
        job="17.3",
    )


def test_the_record_of_a_job_of_which_nothing_is_known_says_only_whose_devices_they_are(directory, claim):
    since = claim.since
    claim.write_record(directory)
    content = json.loads(Path(claim._record.path).read_bytes())

    assert content == {
        "schema": 1,
        "id": claim.id,
        "devices": [claim[0].uuid],
        "pid": os.getpid(),
        "since": since,
        "ends": None,
        "expected": None,  # room for it
        "note": None,
        "command": [],
        "descriptors": [claim.pass_fds[0]],
    }


@pytest.mark.parametrize(
    ("job", "start"),
    [("77", "slurm77-"), ("1" * 11, f"slurm{'1' * 11}-"), ("1" * 12, ""), ("7_3", ""), ("", ""), (None, "")],
)
def test_a_claim_in_a_job_of_slurm_has_its_number_in_its_id(machine, directory, monkeypatch, job, start):
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    with acquire(machine, Request(), directory, environ={}) as claim:
        assert re.fullmatch(rf"{start}[0-9a-f]{{8}}", claim.id)
        environ = {"GPUGUARD_CLAIM": claim.id}
        with acquire(machine, Request(), directory, environ=environ) as inner:
            assert re.fullmatch(rf"{claim.id}\.[0-9a-f]{{8}}", inner.id)
            _, choice = preview(machine, Request(), directory, environ=environ)

    [refused] = choice.refused
    assert [reason.text for reason in refused.reasons] == [
        f"used by another command inside the claim {claim.id}"
    ]  # fmt: skip


def test_whose_claims_are_denied_and_what_is_out_of_service_is_said(directory):
    machine = Machine(a_device(0), a_device(1))
    uid, quarantined = str(os.geteuid()), a_device(1).uuid
    change(directory, DENIED, lambda marks: marks.update({uid: Restriction(uid, time.time(), user="al")}))
    mark = Restriction(quarantined, time.time(), reason="XID 79")
    change(directory, QUARANTINED, lambda marks: marks.update({quarantined: mark}))
    _, choice = preview(machine, Request(), directory, environ={})

    assert [[reason.text for reason in refusal.reasons] for refusal in choice.refused] == [
        ["new claims of al are denied by the administrator"],
        ["quarantined by the administrator: XID 79"],
    ]


def test_a_denied_user_reads_that_first_and_not_that_no_gpu_is_free(directory):
    machine, uid = Machine(*(a_device(n) for n in range(8))), str(os.geteuid())
    change(directory, DENIED, lambda marks: marks.update({uid: Restriction(uid, time.time(), user="al")}))

    with pytest.raises(NotEnoughGpus) as refused:
        acquire(machine, Request(), directory, environ={})
    assert str(refused.value) == "wanted 1 GPU: new claims of al are denied by the administrator."
    with pytest.raises(ImpossibleRequest, match="only 8 exist"):
        acquire(machine, Request(9), directory, environ={})


class OfTwoVendors(Machine):
    """Its GPUs of AMD cannot be read."""

    def __init__(self, simulated: bool) -> None:
        super().__init__(a_device(0))
        self.simulated = simulated

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        gap = Gap(None, "amd devices", "the driver hangs")
        return replace(super().sample(fields, devices), gaps=(gap,), simulated=self.simulated)


@pytest.mark.parametrize(
    ("simulated", "node", "asked", "refused"),
    [
        (False, True, {}, True),
        (False, False, {}, False),  # no process of this machine may use them
        (True, False, {}, True),
        (False, True, {"vendor": "nvidia"}, False),
    ],
)
def test_a_request_that_could_be_met_by_a_vendor_that_cannot_be_read_is_refused(
    directory, monkeypatch, simulated, node, asked, refused
):
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: node if path == AMD.control_node else exists(path))
    machine, request = OfTwoVendors(simulated), Request(**asked)
    if not refused:
        acquire(machine, request, directory, environ={}).release()
        return
    with pytest.raises(BackendError) as unread:
        acquire(machine, request, directory, environ={})
    assert str(unread.value) == (
        "the GPUs of AMD cannot be read, and they could be what you ask for: the driver hangs\n"
        "To do without them, ask for another vendor's: --vendor nvidia."
    )


def test_reassert_takes_the_lock_again_when_the_job_unlocked_it(directory, claim):
    code = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_UN)"
    words = [sys.executable, "-c", code, str(claim.pass_fds[0])]
    subprocess.run(words, pass_fds=claim.pass_fds, check=True)
    unlocked = locked_devices(directory, [claim[0].uuid])
    claim.reassert()

    assert (unlocked, locked_devices(directory, [claim[0].uuid])) == (set(), {claim[0].uuid})


def test_reassert_reports_a_device_that_another_process_has_locked_meanwhile(directory, claim):
    fcntl.flock(claim.pass_fds[0], fcntl.LOCK_UN)
    thief = open_lock(directory, claim[0].uuid)
    assert try_flock(thief)
    with pytest.raises(ClaimLost) as lost:
        claim.reassert()
    os.close(thief)

    path = directory.lock_path(claim[0].uuid)
    assert str(lost.value) == (f"{path} is locked by another process: the job, or a process in it, had unlocked it.")


def test_reassert_reports_a_lock_file_that_was_removed(directory, claim):
    os.unlink(directory.lock_path(claim[0].uuid))

    with pytest.raises(ClaimLost) as lost:
        claim.reassert()
    assert str(lost.value) == f"the lock file {directory.lock_path(claim[0].uuid)} was removed or replaced."


def test_a_planted_lock_file_takes_its_device_out_of_the_choice(directory: LockDirectory) -> None:
    machine = two()
    os.symlink("/etc/passwd", directory.lock_path(machine.devices[1].uuid))
    with acquire(machine, Request(), directory) as claim, pytest.raises(NotEnoughGpus):
        assert indices(claim) == [0]
        acquire(machine, Request(), directory)


def test_of_several_planted_lock_files_it_is_said_how_many_and_what_is_wrong_with_the_first(
    directory: LockDirectory,
) -> None:
    machine = two()
    for device in machine.devices:
        os.symlink("/etc/passwd", directory.lock_path(device.uuid))

    with pytest.raises(NotEnoughGpus, match=r"2 GPUs cannot be locked, the first one because .* is a symbolic link"):
        acquire(machine, Request(), directory)


def divided() -> Machine:
    parent = a_device(0, mig_mode=True)
    return Machine(parent, a_mig_instance(parent, 0), a_mig_instance(parent, 1))


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


def test_an_instance_that_shows_late_is_refused_where_another_user_has_it(directory, tells_late):
    instance = tells_late.devices[1]
    with acquire(divided(), Request(devices=(instance.uuid,)), directory):
        _, choice = Allocator(tells_late, directory, [Request()]).preview()

        assert [device.uuid for device in choice.devices] == [tells_late.devices[2].uuid]


def test_more_gpus_than_the_driver_shows_at_first_are_looked_for_among_instances(directory, tells_late):
    with acquire(tells_late, Request(num_gpus=2, allow_mig_set=True), directory) as claim:
        assert {device.uuid for device in claim} == {device.uuid for device in tells_late.devices[1:]}


def test_inside_a_claim_the_devices_are_free_although_the_job_uses_them_already(machine, directory, monkeypatch):
    with acquire(machine, Request(), directory) as outer:
        monkeypatch.setenv("GPUGUARD_CLAIM", outer.id)
        machine.change(0, processes=(a_process(uid=os.geteuid()),), memory_used=10 * GIB, memory_free=70 * GIB)
        with acquire(machine, Request(), directory) as inner:
            assert indices(inner) == [0]


def test_the_name_of_a_claim_that_is_over_does_not_count(machine, directory, monkeypatch):
    over = acquire(machine, Request(), directory)
    over.release()
    monkeypatch.setenv("GPUGUARD_CLAIM", over.id)

    acquire(machine, Request(), directory).release()


def test_a_record_that_cannot_be_written_does_not_cost_the_claim(directory, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpuguard.claims.claim.write_record", full)
    with acquire(Machine(a_device(0)), Request(), directory) as claim:
        assert "No space left" in (claim.warning or "")
        assert locked_devices(directory, [claim[0].uuid])


def test_many_dead_records_of_a_user_are_removed_by_their_next_claim(directory: LockDirectory) -> None:
    for number in range(MOST_OF_ONE + 10):
        os.close(write_record(directory, {"id": f"dead{number}", "devices": []})[1])

    with acquire(Machine(a_device(0)), Request(), directory) as claim:
        assert len(os.listdir(directory.records)) < 60
        assert [record.id for record in read_records(directory)] == [claim.id]


HOUR = 3600.0


def two() -> Machine:
    return Machine(a_device(0), a_device(1))


def test_it_is_known_whether_a_request_of_this_process_waits_in_the_queue(directory: LockDirectory) -> None:
    machine, said = Machine(a_device(0)), []

    def see(_: NotEnoughGpus) -> None:
        said.append(waits_in_queue())
        holder.release()

    with acquire(machine, Request(), directory) as holder:
        acquire(machine, Request(), directory, wait=60, on_wait=see).release()

    assert said and all(said) and not waits_in_queue()


@pytest.fixture
def queue(directory: LockDirectory) -> Iterator[Machine]:
    """Two devices, one of them claimed for an hour, and a request that waits for both."""
    machine = two()
    with acquire(machine, Request(), directory, time_limit=HOUR):
        first = OwnTicket(directory, ticket_content(Ticket("", 0, "", 0.0, (Request(num_gpus=2),), pid=os.getpid())))
        yield machine
        first.withdraw()


def test_a_request_that_is_called_too_early_takes_nothing_and_goes_on_waiting(directory, queue):
    leader, told = open_lock(directory, "queue"), []
    assert try_flock(leader)

    def call(error: NotEnoughGpus) -> None:
        if len(told) < 3:
            wake(directory, read_tickets(directory)[0], MAY_START)
        told.append(str(error))

    call.tell_every = 0.1  # type: ignore[attr-defined]
    with pytest.raises(WaitTimeout, match="it would delay"):
        acquire(queue, Request(), directory, wait=5, on_wait=call)

    os.close(leader)
    assert len(told) > 3
    assert len(locked_devices(directory, [device.uuid for device in queue.devices])) == 1


def test_no_more_than_the_least_is_taken_while_others_wait(directory: LockDirectory) -> None:
    machine = Machine(a_device(0), a_device(1), a_device(2))
    with acquire(machine, Request(), directory, time_limit=HOUR):
        first = OwnTicket(directory, ticket_content(Ticket("", 0, "", 0.0, (Request(num_gpus=3),), pid=os.getpid())))
        with acquire(machine, Request(max_gpus=2), directory, time_limit=60) as claim:
            assert len(claim) == 1
        first.withdraw()
        with acquire(machine, Request(max_gpus=2), directory, time_limit=60) as claim:
            assert len(claim) == 2


@pytest.mark.root  # nobody else can reserve for others
def test_a_look_leaves_out_what_is_reserved_for_another_user(directory: LockDirectory) -> None:
    machine, now, me = two(), time.time(), os.geteuid()
    wanted = Reservation("", me, me + 1, "bob", 1, now - 1, now + HOUR, (machine.devices[1].uuid,), now)
    reservations.write_reservation(directory, wanted)
    _, choice = preview(machine, Request(), directory)

    assert [device.index for device in choice.devices] == [0]
    assert "'s reservation until " in choice.refused[0].reasons[0].text


def test_where_the_daemon_gives_the_locks_nothing_is_claimed_without_it(directory: LockDirectory) -> None:
    closed = replace(directory, closed=True, keeper=os.geteuid())

    for ask in (acquire, preview):
        with pytest.raises(ClaimError, match="It alone gives the GPUs"):
            ask(two(), Request(), closed)


def test_inside_a_claim_the_wait_is_over_when_its_time_is(machine, directory):
    with acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        with (
            acquire(machine, Request(), directory, environ=environ),
            pytest.raises(WaitTimeout, match="inside the claim"),
        ):
            acquire(machine, Request(), directory, environ=environ, wait=0.5)


def test_inside_a_claim_one_hears_what_is_missing_and_starts_when_a_sibling_ends(directory):
    machine, told = Machine(a_device(0)), list[str]()
    with acquire(machine, Request(), directory, environ={}) as outer:
        environ = {"GPUGUARD_CLAIM": outer.id}
        sibling = acquire(machine, Request(), directory, environ=environ)

        def tell(error: NotEnoughGpus) -> None:
            told.append(str(error))
            sibling.release()

        acquire(machine, Request(), directory, environ=environ, wait=60, on_wait=tell).release()
    assert len(told) == 1 and "used by another command inside the claim" in told[0]


def test_of_two_ways_the_one_that_can_be_met_some_day_says_what_is_missing(machine, directory):
    with acquire(machine, Request(), directory, environ={}):
        for ways in ([Request(num_gpus=9), Request()], [Request(), Request(num_gpus=9)]):
            with pytest.raises(NotEnoughGpus, match="wanted 1 GPU") as caught:
                acquire(machine, ways[0], directory, alternatives=ways[1:], environ={})

            assert not isinstance(caught.value, ImpossibleRequest)


def test_a_user_whose_request_waited_has_been_served(machine, directory):
    holder = acquire(machine, Request(), directory, environ={})
    assert tickets.last_started(directory, os.geteuid()) is None, "it did not wait"

    acquire(machine, Request(), directory, wait=60, on_wait=lambda error: holder.release(), environ={}).release()

    assert tickets.last_started(directory, os.geteuid()) is not None


@pytest.mark.parametrize("arrives", [True, False], ids=["a process arrives", "it vanishes"])
def test_what_becomes_of_a_device_between_the_look_and_the_lock_is_seen(directory, arrives):
    machine, uuids = two(), [device.uuid for device in two().devices]

    def happen() -> None:
        if len(machine.asked) == 2:  # the second question is about the device that was just locked
            [place] = [uuids.index(uuid) for uuid in machine.asked[1][1] or ()]
            if arrives:
                machine.change(place, processes=(a_process(),), memory_used=10 * GIB, memory_free=70 * GIB)
            else:
                machine.devices = [machine.devices[1 - place]]

    machine.before_sample = happen
    with acquire(machine, Request(), directory) as claim:
        assert claim.devices == tuple(device for device in machine.devices if not device.processes)
        assert locked_devices(directory, uuids) == {claim[0].uuid}


def test_a_device_of_unknown_memory_is_asked_for_its_processes_at_the_first_look(directory: LockDirectory) -> None:
    machine = Machine(a_device(0, memory_used=None, processes=(a_process(),)), a_device(1))
    with acquire(machine, Request(), directory) as claim:
        assert [device.index for device in claim] == [1]

    first, second, *_ = [fields for fields, devices in machine.asked if devices is None]
    assert second - first == {IDLE_PROCESSES}


def test_a_device_that_breaks_between_the_look_and_the_lock_is_passed_over(directory: LockDirectory) -> None:
    machine = Machine(a_device(0, problems=None), a_device(1, problems=None))

    def break_down() -> None:
        fields, locked = machine.asked[-1]
        if HEALTH in fields and locked is not None and len(machine.asked) == 2:
            place = next(i for i, device in enumerate(machine.devices) if locked == (device.uuid,))
            machine.change(place, problems=("lost",))
        elif HEALTH in fields:
            for place, device in enumerate(machine.devices):
                if device.problems is None:
                    machine.change(place, problems=())

    machine.before_sample = break_down
    with acquire(machine, Request(), directory) as claim:
        assert claim[0].problems == ()
