"""Queue, claims, shares, MIG and reservations together against a model of a hundred lines, step by step at random.

The claims are real locks in a directory of this process; the machine is in memory, users and clock are pretended.
The queue is in order of arrival, so that one rule is left: what fits starts, the oldest first, unless others are put
off for which a start is planned.
"""

import itertools
import tempfile
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
from builders import GIB, Machine, a_device, a_mig_instance
from chances import IN_CAMPAIGNS, dice, often
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from own_claims import acquire
from queue_reference import Job, Kept, Model
from queues import HOUR, a_ticket
from users_and_clock import Pretended

from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory
from gpuguard.claims.records import locks_held, probe
from gpuguard.errors import LockDirectoryError, NotEnoughGpus
from gpuguard.lock import Allocator
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import QueueRules
from gpuguard.queue.reasons import kept_for_others
from gpuguard.queue.reservations import (
    record_arrival,
    remove_reservation,
    reservation_calendar,
    what_if,
    write_reservation,
)
from gpuguard.queue.settings import QueueSettings
from gpuguard.queue.state import read_queue
from gpuguard.queue.tickets import OwnTicket, ticket_content
from gpuguard.request import Request
from gpuguard.select import choose

NOW = 1_800_000_000.0
DIVIDED = a_device(3, mig_mode=True)
WHOLE, PARTS = [a_device(number) for number in range(3)], [a_mig_instance(DIVIDED, n, utilization=0.0) for n in (0, 1)]
DEVICES = (*WHOLE, DIVIDED, *PARTS)
UUIDS = [device.uuid for device in DEVICES]
MIG = "3g.40gb"
REQUESTS = [
    Request(),
    Request(num_gpus=2, min_total=60 * GIB),
    Request(num_gpus=3, min_total=60 * GIB),
    Request(mig=MIG),
    Request(num_gpus=2, mig=MIG),
    Request(share=True, memory=30 * GIB),
    Request(share=True, memory=50 * GIB),
    Request(share=True, memory=5 * GIB, slots=2),
    Request(share=True, memory=15 * GIB, mig=MIG),
]
CHOICES = {request: choose(Machine(*DEVICES).sample(()), request, {}) for request in REQUESTS}
COULD = {request: frozenset(device.uuid for device in choice.eligible) for request, choice in CHOICES.items()}
RULES = QueueRules(fair_share=False, bound=float("inf"))
USERS = (1001, 1002)
EITHER = st.sampled_from(USERS)
JOBS = st.builds(Job, EITHER, st.sampled_from(REQUESTS), st.sampled_from([None, None, 0.5 * HOUR, 2 * HOUR, 9 * HOUR]))


class QueueMachine(RuleBasedStateMachine):
    """Rules are what users do."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.world = Pretended(NOW)
        self.world.__enter__()
        # Names in order: several tickets may have one time of arrival, and then their names decide.
        numbers = itertools.count(1)
        self.world.enter_context(mock.patch("os.urandom", lambda size: next(numbers).to_bytes(size, "big")))
        self.world.enter_context(
            mock.patch("gpuguard.queue.waiter.read_queue_settings", lambda _: QueueSettings(RULES))
        )
        name = self.place.name
        self.directory = LockDirectory(name, name, name, prefix="gpuguard.")  # as without `gpuguard setup`
        self.machine = Machine(*DEVICES)
        self.claims: dict[str, Claim] = {}
        self.waiting: list[tuple[OwnTicket, Job]] = []
        self.reservations: dict[str, Reservation] = {}

    @initialize(divided=st.booleans())
    def reservations_are_of_one_kind(self, divided: bool) -> None:
        self.model = Model(DEVICES, COULD, tuple(device.uuid for device in (PARTS if divided else WHOLE)), NOW)

    def teardown(self) -> None:
        with self.place, closing(self.world):
            self.world.user = 0
            for claim in self.claims.values():
                claim.release()
            for held, _ in self.waiting:
                held.withdraw()

    @rule(job=JOBS)
    def a_request_joins(self, job: Job) -> None:
        self.world.user = job.user
        if len(self.waiting) < 12:
            ticket = a_ticket(requests=[job.request], time_limit=job.limit)
            self.waiting.append((OwnTicket(self.directory, ticket_content(ticket)), job))
        self.serve()

    @rule(job=JOBS)
    def a_request_does_not_wait(self, job: Job) -> None:
        self.world.user = job.user
        self.model.came(job.user)
        fits, must = self.model.fits(job), self.none_is_put_off()
        try:
            claim = acquire(self.machine, job.request, self.directory, time_limit=job.limit)
        except NotEnoughGpus as error:
            assert not (fits and must), (str(error), self.model)
        else:
            assert fits
            self.taken(claim, job)
        self.serve()  # it had a ticket if another waits, and when that goes the queue is planned anew

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def a_job_ends(self, data: st.DataObject) -> None:
        self.ends(data.draw(st.sampled_from(sorted(self.claims))))
        self.serve()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_request_gives_up(self, data: st.DataObject) -> None:
        self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))[0].withdraw()
        self.serve()

    @rule(
        user=EITHER,
        root=st.booleans(),
        count=st.integers(1, 3),
        begins=st.sampled_from([0.0, 0.0, 0.5 * HOUR, 3 * HOUR, 25 * HOUR]),
        lasts=st.sampled_from([HOUR, 4 * HOUR]),
    )
    def a_user_reserves(self, user: int, root: bool, count: int, begins: float, lasts: float) -> None:
        self.world.user = maker = 0 if root else user
        begins += self.model.now
        kept = Kept(maker, user, count, begins, begins + lasts, self.model.now)
        wanted = Reservation("", maker, user, "", count, begins, begins + lasts, self.model.reservable, self.model.now)
        refused = what_if(wanted, self.seen(), UUIDS)
        assert self.model.permitted(kept) == (not refused), (refused, self.model)
        if not refused:
            made = write_reservation(self.directory, wanted)
            self.reservations[made.key], self.model.kept[made.key] = made, kept
            self.serve()

    @precondition(lambda self: self.model.kept)
    @rule(data=st.data(), user=st.sampled_from([0, *USERS]))
    def a_user_cancels(self, data: st.DataObject, user: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.kept)))
        self.world.user = user
        try:
            remove_reservation(self.directory, self.reservations[key])
        except LockDirectoryError:
            assert user not in (0, self.model.kept[key].maker, self.model.kept[key].user)
        else:
            assert user in (0, self.model.kept[key].maker, self.model.kept[key].user)
            del self.model.kept[key]
            self.serve()

    @rule(hours=st.sampled_from([0.25, 0.5, 0.5, 5.0]))
    def time_passes(self, hours: float) -> None:
        until = self.model.now + hours * HOUR
        while self.model.now < until:
            coming = [when for when in self.model.moments() if when > self.model.now]
            self.model.now = self.world.clock = min([until, *coming])
            self.model.settle()
            for name in [name for name, job in self.model.jobs.items() if job.ends <= self.model.now]:
                self.ends(name)
            self.serve()

    def serve(self) -> None:
        """All that may start claim, as the leader would wake them."""
        while True:
            snapshot = self.machine.sample(())
            queue = read_queue(self.directory, snapshot, rules=RULES)
            meant = [position for position in queue.positions if position.now]
            fitting = [held.id for held, job in self.waiting if self.model.fits(job)]
            assert fitting or not meant, (meant, self.model)
            assert meant or not fitting or not self.none_is_put_off(), (fitting, self.model)
            if not meant:
                return
            for position in meant:
                held, job = next((held, job) for held, job in self.waiting if held.id == position.ticket.id)
                fits = self.model.fits(job)
                kept = kept_for_others(queue, held.id)
                self.world.user = job.user
                allocator = Allocator(self.machine, self.directory, [job.request])
                claim = allocator.lock_best(job.request, snapshot, dict(kept), with_record=False)
                assert claim or not fits or job.request.share or kept
                if claim:
                    record_arrival(self.directory, queue.facts.reservations)
                    devices = {device.uuid for device in claim}
                    here = [kept for kept in queue.facts.reservations if not devices.isdisjoint(kept.devices)]
                    claim.arrival_files = record_arrival(self.directory, here)
                    claim.write_record(self.directory, JobDetails(time_limit=job.limit))
                    self.waiting.remove((held, job))
                    held.withdraw()
                    self.taken(claim, job)

    def none_is_put_off(self) -> bool:
        """Whether all that wait and do not fit have no planned start that could be put off."""
        return not any(self.model.known(job) for _, job in self.waiting if not self.model.fits(job))

    def taken(self, claim: Claim, job: Job) -> None:
        self.model.take(claim.id, job, claim.devices)
        self.claims[claim.id] = claim

    def ends(self, name: str) -> None:
        self.world.user = self.model.jobs[name].user
        self.claims.pop(name).release()
        self.model.end(name)

    def seen(self) -> Any:
        return reservation_calendar(self.directory, UUIDS, probe(self.directory, UUIDS), self.world.clock)

    @invariant()
    def all_see_who_holds_what(self) -> None:
        type(self).steps += 1
        seen = {record.id: (record.uid, set(record.devices)) for record in probe(self.directory, UUIDS)}
        assert seen == {name: (job.user, set(job.devices)) for name, job in self.model.jobs.items()}
        alone = {uuid for job in self.model.jobs.values() if not job.request.share for uuid in job.devices}
        assert locks_held(self.directory, UUIDS).intersection(UUIDS) == alone

    @invariant()
    def all_see_what_is_kept_for_whom(self) -> None:
        seen = self.seen()
        has = {
            name: {uuid for uuid in self.model.reservable if self.model.has(kept.user, uuid)}
            for name, kept in self.model.kept.items()
        }
        assert {
            status.reservation.key: set(status.reservation.held) for status in seen.statuses if status.counts
        } == has
        assert not seen.ignored

    @invariant()
    def no_request_waits_that_would_fit(self) -> None:
        fitting = [job for _, job in self.waiting if self.model.fits(job)]
        assert not fitting or not self.none_is_put_off()


CALM: dict[str, Any] = {
    "deadline": None,
    "phases": [Phase.generate],
    "database": None,
    "report_multiple_bugs": False,  # the first one is enough
    "suppress_health_check": list(HealthCheck),
}


def test_queue_claims_shares_mig_and_reservations_do_what_the_model_does() -> None:
    QueueMachine.steps, examples = 0, often(120)
    test = QueueMachine.TestCase
    test.settings = settings(max_examples=examples, stateful_step_count=60, **CALM)
    test().runTest()

    assert QueueMachine.steps >= 20 * examples  # about 45 by chance, and any number between 1 and 60 in one example


PLANTED = {
    "gpuguard.claims.claim.try_flock": lambda *_: True,
    "gpuguard.queue.backfill._Planner._held_back_by": lambda *_: "another",
    "gpuguard.eligibility.memory_left": lambda *_: 2**60,
    "gpuguard.queue.calendar.calendar": lambda *_: {},
    "gpuguard.queue.reservations._beyond": lambda *_: "",
    "gpuguard.queue.reservations.can_be_met": lambda *_: True,
    "gpuguard.queue.reservations._arrivals": lambda *_: {},
}


# Faults that many examples do not show.
SLOW = (
    "gpuguard.queue.reservations._arrivals", "gpuguard.queue.reservations._beyond", "gpuguard.queue.calendar.calendar",
    "gpuguard.eligibility.memory_left",
)  # fmt: skip


@pytest.mark.parametrize(
    "where", [pytest.param(name, marks=IN_CAMPAIGNS) if name in SLOW else name for name in PLANTED]
)
def test_the_model_sees_a_fault_that_is_planted(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(where, PLANTED[where])
    test = dice(1, same=True)(type("Faulty", (QueueMachine,), {})).TestCase
    test.settings = settings(max_examples=1000, stateful_step_count=50, **CALM)

    with pytest.raises((AssertionError, OSError)):
        test().runTest()
