"""What queue, claims, shares, MIG and reservations together must do, in few words: the model of test_queue_model.

Reads nothing and locks nothing.  It knows which request *may* start, exactly; which *must* it knows where none waits
whose start is known, because a plan might put others off for that (see test_backfill and test_overtaking).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import permutations

from gpuguard.model import Device
from gpuguard.queue.calendar import HORIZON_SECONDS
from gpuguard.queue.priority import ReservationKeys
from gpuguard.request import Request

KEYS = ReservationKeys()
NEVER = float("inf")


@dataclass
class Job:
    """A request of a user, which runs (on devices) or waits."""

    user: int
    request: Request
    limit: float | None  # seconds
    devices: tuple[str, ...] = ()
    began: float = 0.0
    comes_to: list[Kept] = field(default_factory=list)

    @property
    def ends(self) -> float:
        return NEVER if self.limit is None else self.began + self.limit


@dataclass
class Kept:
    """A reservation that counts, until it is over."""

    maker: int
    user: int
    count: int
    begins: float
    ends: float
    came: float  # when it was made, or its user last came or went


@dataclass
class Model:
    """Which job holds what, and what is kept for whom."""

    devices: tuple[Device, ...]
    could: dict[Request, frozenset[str]]  # uuids that an empty machine has for it
    reservable: tuple[str, ...]
    now: float
    jobs: dict[str, Job] = field(default_factory=dict)
    kept: dict[str, Kept] = field(default_factory=dict)

    def on(self, uuid: str) -> list[Job]:
        return [job for job in self.jobs.values() if uuid in job.devices]

    def has(self, user: int, uuid: str) -> bool:
        return any(job.user == user for job in self.on(uuid))

    def may_have(self, device: Device, request: Request) -> bool:
        """By claims and shares alone."""
        here = [job.request for job in self.on(device.uuid)]
        if not request.share or not all(other.share for other in here):
            return not here
        shares = [*here, request]
        room = (device.memory_total or 0) - (device.memory_used or 0)
        return sum(share.memory or 0 for share in shares) <= room and len(shares) <= min(
            share.slots for share in shares
        )

    def kept_at(self, when: float, user: int, liked: Collection[str], before: Collection[str]) -> set[str]:
        """The devices that are kept for others: as many as possible, and as few of *liked* as can be.

        First those that were kept *before*, then those that a user with a reservation holds, then those whose jobs have
        ended by then.
        """
        active = [kept for kept in self.kept.values() if kept.user != user and kept.begins <= when < kept.ends]
        slots = [kept for kept in active for _ in range(kept.count)]
        reserving = {kept.user for kept in self.kept.values()}

        def will_do(uuid: str, kept: Kept) -> bool:
            return self.has(kept.user, uuid) or all(job.ends <= when for job in self.on(uuid))

        def together(uuids: Collection[str]) -> bool:
            return any(all(map(will_do, uuids, some)) for some in permutations(slots, len(uuids)))

        def rank(uuid: str) -> tuple[bool, ...]:
            is_held = any(self.has(user, uuid) for user in reserving)
            return uuid not in before, not is_held, not self.on(uuid), uuid in liked

        kept: set[str] = set()
        for uuid in sorted(self.reservable, key=rank):
            if together([*kept, uuid]):
                kept.add(uuid)
        return kept

    def kept_for_others(self, job: Job, liked: Collection[str]) -> set[str]:
        """The same at any moment of a job that starts now."""
        until = self.now + (HORIZON_SECONDS if job.limit is None else job.limit)
        others = [kept for kept in self.kept.values() if kept.user != job.user]
        borders = {when for other in others for when in (other.begins, other.ends)}
        moments = {self.now, *borders, *(other.ends for other in self.jobs.values())}
        kept, at_once = set[str](), set[str]()
        for when in sorted(when for when in moments if self.now <= when < until):
            at_once = self.kept_at(when, job.user, liked, () if when in borders else at_once)
            kept |= at_once
        return kept

    def fits(self, job: Job) -> bool:
        """Whether devices can be had for it now."""
        opened = {device.uuid for device in self.devices if self.may_have(device, job.request)} & self.could[
            job.request
        ]
        return self.enough(job, opened - self.kept_for_others(job, opened))

    def enough(self, job: Job, uuids: Collection[str]) -> bool:
        """Of one kind, whole GPUs or MIG instances."""
        parts = sum(bool(device.parent_uuid) for device in self.devices if device.uuid in uuids)
        return max(parts, len(uuids) - parts) >= job.request.num_gpus

    def known(self, job: Job) -> bool:
        """Whether there is a moment at which it surely fits, if no other starts."""
        later = Model(self.devices, self.could, self.reservable, NEVER)
        later.jobs = {name: other for name, other in self.jobs.items() if other.limit is None}
        return later.fits(job)

    def take(self, name: str, job: Job, devices: tuple[Device, ...]) -> None:
        """It got these."""
        job.devices, job.began = tuple(device.uuid for device in devices), self.now
        assert len(devices) == job.request.num_gpus and self.could[job.request].issuperset(job.devices)
        assert all(self.may_have(device, job.request) for device in devices), "it was given what it may not have"
        assert not self.kept_for_others(job, job.devices).intersection(job.devices), (
            "it was given what is kept for others"
        )
        come_to = [self.kept[name] for name in self.came(job.user)]
        job.comes_to = [] if set(self.reservable).isdisjoint(job.devices) else come_to
        self.jobs[name] = job

    def permitted(self, new: Kept) -> bool:
        """Whether a reservation counts: the quota of users, and room on an empty machine."""
        own = sum(kept.count for kept in self.kept.values() if kept.maker == new.maker)
        near = [kept for kept in self.kept.values() if kept.begins < new.ends and new.begins < kept.ends]
        moments = [new.begins, *(max(kept.begins, new.begins) for kept in near)]
        crowd = max(sum(kept.count for kept in [*near, new] if kept.begins <= when < kept.ends) for when in moments)
        return crowd <= len(self.reservable) and (new.maker == 0 or own + new.count <= KEYS.devices)

    def came(self, user: int) -> list[str]:
        """A user asks for devices; returns what is reserved for that user."""
        own = [name for name, kept in self.kept.items() if kept.user == user]
        for name in own:
            self.kept[name].came = self.now
        return own

    def end(self, name: str) -> None:
        """A job is over; users who had reserved where it ran, for whom it was kept when it began, may come again."""
        job = self.jobs.pop(name)
        for kept in self.kept.values():
            if kept in job.comes_to:
                kept.came = self.now
        self.settle()

    def present(self, kept: Kept) -> bool:
        return any(self.has(kept.user, uuid) for uuid in self.reservable)

    def deadline(self, kept: Kept) -> float:
        return max(kept.begins, kept.came) + KEYS.no_show

    def settle(self) -> None:
        """What is over by now is over for ever."""
        self.kept = {
            name: kept
            for name, kept in self.kept.items()
            if self.now < kept.ends and (self.now < self.deadline(kept) or self.present(kept))
        }

    def moments(self) -> Iterator[float]:
        """When something happens by itself."""
        yield from (job.ends for job in self.jobs.values())
        for kept in self.kept.values():
            yield from (kept.begins, kept.ends, *([] if self.present(kept) else [self.deadline(kept)]))
