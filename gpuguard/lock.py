"""From a request to a claim: sample, lock the best devices, sample again, all or nothing.

The two-key rule: a device is taken when its lock is free *and* it looks free, both before and after it is locked.  The
locks are taken here with flock, or by the daemon where it alone may open the lock files.  Nothing is held while
waiting.  A MIG instance is locked together with a shared lock on its GPU, so that the kernel makes instance and GPU
exclude each other.  Does not rank devices (see select), decides nothing about the queue (see queue) and never breaks a
lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard.backends import Backend
from gpuguard.claims.claim import (
    Claim,
    JobDetails,
    Lock,
    join,
    lock_device,
    lock_faults,
    lock_parts,
    sharing_now,
    sharing_of,
    unlock,
)
from gpuguard.claims.directory import Gate, LockDirectory
from gpuguard.claims.records import locked_devices, probe, read_record
from gpuguard.claims.restrictions import DENIED, denial_of, denial_text, read_restrictions, restrictions_against
from gpuguard.clusters.device_variables import groups_needed, outer_devices
from gpuguard.eligibility import Sharing
from gpuguard.errors import (
    BackendError,
    GpuguardError,
    ImpossibleRequest,
    LockDirectoryError,
    NotEnoughGpus,
    WaitTimeout,
    passing,
)
from gpuguard.locale import _, translated
from gpuguard.locale.messages import all_of, sentence
from gpuguard.model import (
    HEALTH,
    IDLE_PROCESSES,
    MODEL,
    PROCESS_DETAILS,
    PROCESSES,
    VERIFY_FIELDS,
    ClaimRecord,
    Device,
    Snapshot,
)
from gpuguard.request import ANY_MEMORY, Request, fields_needed, fields_needed_by_all, fields_to_verify
from gpuguard.select import Choice, choose, claimed_by, not_enough, unread_devices, unread_vendor, waiting_error
from gpuguard.vendors import VENDORS

if TYPE_CHECKING:
    from gpuguard.queue.priority import Ticket
    from gpuguard.queue.waiter import QueueAnswer, WaitingRequest

HeldLocks = dict[str, tuple[Lock, ...]]  # by the uuid of their device

POLL_SECONDS = 0.25  # between two checks of the locks while waiting inside a claim; these make no driver call
# For which reads of the driver may fail while a request waits: it is being reloaded, or the worker was killed.
DRIVER_SECONDS = 600.0
SAMPLE_SECONDS = 2.0  # between two samples while locks are free but devices look busy, or cannot be read

_waiting: list[WaitingRequest] = []  # requests of this process that may wait, for waits_in_queue()


def outer_claim(directory: LockDirectory, environ: Mapping[str, str] = os.environ) -> ClaimRecord | None:
    """Return the living claim of this user inside which this process runs, or None."""
    return read_record(directory, os.geteuid(), environ.get("GPUGUARD_CLAIM", ""))


def waits_in_queue() -> bool:
    """Return whether a request of this process waits in the queue; a signal handler may call this at any moment."""
    return any(request.waiter for request in _waiting)


class Allocator:
    """Finds and locks devices for one request, or for the first of its alternatives that can be met.

    Args:
        backend: of the machine; it is read as little as possible, and not at all while too many locks are held.
        requests: the alternatives, the preferred one first.
        environ: limits the requests by CUDA_VISIBLE_DEVICES, Slurm, and the claim inside which this process runs.
        job: details for people, and for the plan of the queue.
        on_wait: called once in a while with what is missing, or as often as its attribute tell_every says (seconds);
            an exception that it raises ends the waiting.
    """

    def __init__(
        self,
        backend: Backend,
        directory: LockDirectory,
        requests: Sequence[Request],
        *,
        environ: Mapping[str, str] = os.environ,
        job: JobDetails | None = None,
        on_wait: Callable[[NotEnoughGpus], object] | None = None,
    ) -> None:
        self.backend, self.directory, self.requests = backend, directory, tuple(requests)
        self.environ, self.job, self.on_wait = environ, job or JobDetails(), on_wait
        self.outer = outer_claim(directory, environ)
        self.met: Request | None = None  # the one of *requests* that acquire() has tried last: the claim is for it
        self._queued: WaitingRequest | None = None  # as soon as a request waits
        self._deadline: float | None = None  # monotonic

    def acquire(self, wait: float | None = 0.0) -> Claim:
        """Claim devices, all or none, and write the record of the claim; nothing is held while waiting.

        Args:
            wait: seconds to wait in the queue; 0 is not at all, None is for ever.

        Raises:
            NotEnoughGpus: the request cannot be met now, and *wait* is 0.
            WaitTimeout: it could not be met within *wait* seconds.
            ImpossibleRequest: it can never be met on this machine.
            LockDirectoryError: the directory cannot be used.
            BackendError: the devices cannot be read; a request in the queue tries again for DRIVER_SECONDS.
            OSError: no file, lock or memory is left for a sample; a request in the queue tries again later instead.
        """
        self._deadline = None if wait is None else time.monotonic() + wait
        claim: Claim | None = None
        try:
            try:
                claim = self._wait_for_claim(may_wait=wait != 0)
            finally:
                self._withdraw()
            return claim
        except BaseException:  # Ctrl-C, even a second one in _withdraw(): no user would know of the claim or the ticket
            self._withdraw()
            if claim is not None:
                claim.release()
            raise

    def preview(self, *, with_reasons: bool = False) -> tuple[Snapshot, Choice]:
        """Return what acquire() would take now for the first request, without taking it.

        Only the chosen devices are read a second time, with their health; all others as well if there are too few.

        Args:
            with_reasons: read all that reasons are made of for each device in the end: users, commands, health, model.

        Raises:
            ClaimError: only the daemon gives the locks, and no daemon runs.
        """
        if self.directory.closed and self.outer is None:
            from gpuguard.queue.broker_client import refuse_without_daemon  # only where the daemon gives the locks

            refuse_without_daemon(self.directory)
        is_reserved = self.outer is None and self.directory.has("reserve.")
        (request, *_), snapshot = self._sample_all(list_processes=is_reserved)
        reserved: dict[str, str] = {}
        if is_reserved:
            from gpuguard.queue.reasons import reserved_for_others  # over 10 ms

            reserved = reserved_for_others(self.backend, self.directory, snapshot, request)
        claims, claimed = self._claims_against(request, snapshot)
        taken = reserved | claimed | self._restricted(snapshot)
        verified: set[str] = set()
        while True:
            choice = choose(snapshot, request, taken, self._sharing(request, snapshot, claims))
            unread = {device.uuid for device in choice.devices} or unread_devices(snapshot, taken)
            if unread <= verified:
                break
            known = len(snapshot.devices)
            snapshot = self._verify(request, snapshot, sorted(unread - verified), taken)
            if len(snapshot.devices) > known:  # a device turned out to be divided, and its instances may be claimed
                claims, claimed = self._claims_against(request, snapshot)
                taken = {**claimed, **taken}
            verified |= unread
        if not with_reasons:
            return snapshot, choice
        snapshot, explained = self._explained(request, snapshot, taken)
        # The further fields can change which devices rank first; acquire() would take those found without them.
        found = {device.uuid: device for device in explained.eligible}
        chosen = tuple(found[device.uuid] for device in choice.devices if device.uuid in found)
        return snapshot, replace(explained, devices=chosen if len(chosen) >= request.num_gpus else explained.devices)

    def chosen(self) -> tuple[Device, ...]:
        """Return the devices that acquire() would take now for the first request, without taking them.

        The reasons need more driver calls, so they are read only if there are too few devices.

        Raises:
            NotEnoughGpus: there are too few.
        """
        _, choice = self.preview()
        if not choice.devices:
            snapshot, choice = self.preview(with_reasons=True)
            if not choice.devices:  # otherwise one has just been released
                raise self.refusal(self.requests[0], snapshot, choice)
        return choice.devices

    def lock_best(
        self,
        request: Request,
        snapshot: Snapshot,
        taken: dict[str, str],
        ticket: Ticket | None = None,
        *,
        with_record: bool = True,
        once: bool = False,
    ) -> Claim | None:
        """Lock the best devices of *snapshot* and read them again.

        Returns the claim, or None if the request cannot be met; then nothing is locked.

        Args:
            request: within the limits of this process.
            taken: uuid -> why not; the devices that others turn out to hold are added to it.
            ticket: in the queue, whose id the claim gets; it is sent to the daemon where that gives the locks.
            with_record: write the record of the claim.
            once: where the daemon gives the locks and another request starts first, do not ask for other devices.
        """
        held: HeldLocks = {}
        claim: Claim | None = None
        try:
            if self.directory.closed:
                from gpuguard.queue.broker_client import request_grant

                claim = request_grant(snapshot, request, self.directory, self.outer, taken, ticket, once=once)
            else:
                with Gate(self.directory):
                    claim = self._lock_and_verify(request, snapshot, taken, held, ticket)
            if claim is not None and with_record:
                waited = self._queued.waited if self._queued else None
                claim.write_record(self.directory, replace(self.job, waited=waited))
                if self._queued:
                    self._queued.started(claim)
            return claim
        except BaseException:  # a lock that no user knows of would be held as long as this process runs
            if claim is not None:
                claim.release()
            raise
        finally:
            if claim is None:
                unlock([lock for locks in held.values() for lock in locks])

    def why_not(self, request: Request, snapshot: Snapshot, taken: Mapping[str, str]) -> NotEnoughGpus:
        """Return the error with all reasons why *request* cannot be met, or with the denial of this user alone."""
        return self.refusal(request, *self._explained(request, snapshot, taken))

    def refusal(self, request: Request, snapshot: Snapshot, choice: Choice) -> NotEnoughGpus:
        """Return the error of a request that *choice*, made from *snapshot* with all reasons, does not meet."""
        error = not_enough(snapshot, request, choice)
        denied = None if self.outer else denial_of(read_restrictions(self.directory, DENIED, time.time()), os.geteuid())
        if denied and not isinstance(error, ImpossibleRequest):
            refused, error = error.refused, waiting_error(request.num_gpus, denial_text(denied))
            error.refused = refused
        return error

    def _explained(self, request: Request, snapshot: Snapshot, taken: Mapping[str, str]) -> tuple[Snapshot, Choice]:
        """Return *snapshot* with all fields that reasons are made of, and the choice made from it."""
        # Whether the request can ever be met depends on the health of all devices, claimed or not; the reason depends
        # on who uses them.
        details = VERIFY_FIELDS | fields_needed(request) | {PROCESSES, PROCESS_DETAILS, HEALTH, MODEL}
        snapshot = snapshot.updated(self.backend.sample(details))
        request = self._lockable(request, snapshot)
        claims, claimed = self._claims_against(request, snapshot)
        # For an instance that was claimed with its whole GPU, the claim of that GPU is the better reason.
        lost = {device.uuid for device in snapshot.devices if device.parent_uuid in claimed}
        taken = {uuid: why for uuid, why in taken.items() if uuid not in lost}
        taken |= claimed | self._restricted(snapshot)
        return snapshot, choose(snapshot, request, taken, self._sharing(request, snapshot, claims))

    def _wait_for_claim(self, *, may_wait: bool) -> Claim:
        """Return the claim as soon as a request can be met; join the queue once it is known that a request waits."""
        error: NotEnoughGpus | None = None
        failures: list[float] = []
        while True:
            try:
                if self._queued is None and self.outer is None and (error or self.directory.has("ticket.", "reserve.")):
                    from gpuguard.queue.waiter import WaitingRequest  # over 10 ms, and most jobs find free devices

                    self._queued = WaitingRequest(self.backend, self.directory, self.job)
                    _waiting.append(self._queued)
                requests, snapshot = self._sample_all(list_processes=bool(self._queued))
                if self._queued and self.directory.closed and (claim := self._asked_first(requests, snapshot)):
                    return claim  # pragma: no cover: in processes of users whom a daemon gives the locks
                answer = self._queued.check(snapshot, requests) if self._queued else None
                taken = self._restricted(snapshot) | (answer.kept if answer else {})
                ticket = answer.position.ticket if answer else None
                for request in answer.startable if answer else requests:
                    self.met = self._original(request, requests)
                    if (claim := self.lock_best(request, snapshot, taken, ticket)) is not None:
                        return claim
                error = self._why_not_now(requests, snapshot, taken, answer)
                failures.clear()
                if isinstance(error, ImpossibleRequest) or not may_wait:
                    raise error
                if self.outer:
                    self._await_sibling(snapshot, error)
                elif self._queued:  # otherwise sample once more, with all fields that the plan of the queue depends on
                    error = self._queued.sleep(snapshot, requests, self._deadline, error, self.on_wait)
            except (OSError, MemoryError, GpuguardError) as fault:
                waits = bool(self._queued.waiter if self._queued else self.outer and error)
                error = self._pause_after(fault, waits, failures)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                raise WaitTimeout.after(error)

    def _asked_first(  # pragma: no cover: in processes of users whom a daemon gives the locks
        self, requests: Sequence[Request], snapshot: Snapshot
    ) -> Claim | None:
        """Return the claim if the daemon gives it, or None.

        The daemon decides which request is next, so the queue as seen from this process does not matter here.  If
        another request starts first, our own plan shows better on which devices this request may start.
        """
        assert self._queued
        ticket, taken = self._queued.ticket_of(requests), self._restricted(snapshot)
        is_alone = self.directory.count("ticket.") <= bool(self._queued.waiter)
        for request in requests if is_alone else [replace(way, max_gpus=None) for way in requests]:
            self.met = self._original(request, requests)
            if claim := self.lock_best(request, snapshot, dict(taken), ticket, once=True):
                return claim
        return None

    def _original(self, request: Request, requests: Sequence[Request]) -> Request:
        """Return the request of the caller that became *request*, as one of *requests*."""
        alike = [request in (way, replace(way, max_gpus=None)) for way in requests]
        return self.requests[alike.index(True)]

    def _why_not_now(
        self, requests: Sequence[Request], snapshot: Snapshot, taken: dict[str, str], answer: QueueAnswer | None
    ) -> NotEnoughGpus:
        if answer and answer.is_later and self._queued and self._queued.waiter:
            return answer.explained(waiting_error(requests[0].num_gpus))
        if answer and answer.startable and self._queued:  # it was planned on devices that turned out to be unusable
            answer = self._queued.check(snapshot, requests)
        errors = [self.why_not(request, snapshot, taken) for request in requests]
        error = next((error for error in errors if not isinstance(error, ImpossibleRequest)), errors[0])
        return answer.explained(error) if answer else error

    def _lock_and_verify(
        self, request: Request, snapshot: Snapshot, taken: dict[str, str], held: HeldLocks, ticket: Ticket | None
    ) -> Claim | None:
        """Return the claim of the best devices, or None.

        *held* is filled with the locks that were taken, even if this is interrupted.
        """
        shares = request.share and not self.outer
        verified: set[str] = set()
        divisible: set[str] = set()  # uuids that were read again because their instances may be locked
        while True:
            sharing = sharing_now(self.directory, held, snapshot) if shares else {}
            choice = choose(snapshot, request, taken, sharing)
            devices = choice.devices
            if not devices:
                if not (unread := unread_devices(snapshot, taken) - verified):
                    return None
                snapshot = self._verify(request, snapshot, sorted(unread), taken)
                verified |= unread
                continue
            wanted = {device.uuid for device in devices}
            for uuid in held.keys() - wanted:
                unlock(held.pop(uuid))
            lost = next((device for device in devices if not self._lock_device(request, device, taken, held)), None)
            if lost:
                if lost.uuid in taken:  # its lock file is at fault
                    continue
                if lost.uuid not in divisible and self._may_be_divided(lost):
                    divisible.add(lost.uuid)
                    snapshot = self._verify(request, snapshot, [lost.uuid], taken)
                else:
                    taken[lost.uuid] = sentence("claimed.now", "claimed just now")
                continue
            if unread := wanted - verified:
                # Changes between the first sample and the lock show now, such as a foreign process or a lost device.
                snapshot = self._verify(request, snapshot, sorted(unread), taken)
                verified |= unread
                continue
            locks = tuple(lock for device in devices for lock in held[device.uuid])
            claim = Claim(
                _new_id(self.outer, ticket),
                devices,
                locks,
                memory=request.memory,
                most=request.most_sharers,
                max_processes=request.max_processes,
            )
            if not shares or join(self.directory, snapshot, request, claim, taken):
                return claim
            held.clear()  # join() has released them

    def _lock_device(self, request: Request, device: Device, taken: dict[str, str], held: HeldLocks) -> bool:
        if device.uuid not in held:
            try:
                locks = lock_parts(self.directory, device, request, self.outer)
            except LockDirectoryError as error:
                taken[device.uuid] = str(error)
                locks = None
            if locks is not None:
                held[device.uuid] = locks
        return device.uuid in held

    def _may_be_divided(self, device: Device) -> bool:
        """Return whether *device* may be locked only because one of its instances, not read yet, is claimed."""
        if device.mig_mode is not None or device.parent_uuid or self.outer:
            return False
        lock = lock_device(self.directory, device.uuid, fcntl.LOCK_SH)  # the GPU of a claimed instance has such a lock
        if lock is not None:
            unlock((lock,))
        return lock is not None

    def _sample_all(self, *, list_processes: bool) -> tuple[list[Request], Snapshot]:
        """Return the requests within the limits that others have set for this process, and a first sample.

        A list of processes is the most expensive thing to ask a driver for, so it is read only of the chosen devices,
        once they are locked.  With *list_processes* (for the plan of a queue, which must know which devices are busy),
        or if the memory in use of any device is unknown, it is read of each device whose memory does not already show
        that it is busy.
        """
        requests = list(self.requests)
        fields = fields_needed_by_all(*requests) | (frozenset({IDLE_PROCESSES}) if list_processes else frozenset())
        snapshot = self.backend.sample(fields)
        unknown = any(device.memory_used is None and not device.problems for device in snapshot.devices)
        if unknown and not list_processes:
            fields |= {IDLE_PROCESSES}
            snapshot = self.backend.sample(fields)
        if HEALTH not in fields and any(request.num_gpus > len(snapshot.devices) for request in requests):
            fields |= {HEALTH}  # which shows whether the devices are divided into enough instances
            snapshot = self.backend.sample(fields)
        if not (needed := groups_needed(self.environ, snapshot.devices)) <= fields:
            fields |= needed
            snapshot = self.backend.sample(fields)
        limits = outer_devices(self.environ, snapshot.devices)
        within, reason = limits.uuids, limits.reason
        if self.outer:
            within = tuple(uuid for uuid in self.outer.devices if within is None or uuid in within)
            reason = _("outside the claim {id} that this runs in").format(id=self.outer.id)
            # The outer claim's own processes do not make its devices busy, nor does the memory that they use.
            own = frozenset({os.geteuid()})
            requests = [
                replace(request, mine_as_free=request.mine_as_free | own, tolerance=ANY_MEMORY) for request in requests
            ]
        if within is not None:
            requests = [replace(request, within=within, within_reason=reason) for request in requests]
        requests = [self._lockable(request, snapshot) for request in requests]
        if not (needed := fields_needed_by_all(*requests)) <= fields:
            snapshot = self.backend.sample(needed | fields)
        self._refuse_unread(requests, snapshot)
        return requests, snapshot

    def _refuse_unread(self, requests: Sequence[Request], snapshot: Snapshot) -> None:
        """Refuse requests that could take devices of a vendor whose backend fails.

        A claim that this runs in has none of them.  A vendor whose control node is missing has hardware that this
        machine, or this container, lets no process use.
        """
        for request in () if self.outer else requests:
            gap = unread_vendor(snapshot, request)
            vendor = VENDORS.get(gap.field.partition(" ")[0]) if gap else None
            node = vendor.control_node if vendor and not snapshot.simulated else ""
            if gap and (not node or os.path.exists(node)):
                raise BackendError(
                    sentence(
                        "backend.vendor_unread",
                        "the GPUs of {vendor} cannot be read, and they could be what you ask for: {reason}\n"
                        "To do without them, ask for another vendor's: --vendor {others}.",
                        vendor=vendor.title if vendor else gap.field,
                        reason=gap.reason,
                        others=" or ".join(dict.fromkeys(device.vendor for device in snapshot.devices)),
                    )
                )

    def _lockable(self, request: Request, snapshot: Snapshot) -> Request:
        """Return *request* without the devices whose lock files this process can never use, however long it waits."""
        faults = lock_faults(self.directory, snapshot.devices, request, self.outer)
        if not faults:
            return request
        divided = {device.parent_uuid for device in snapshot.devices}
        allowed = None if request.within is None else frozenset(request.within)
        left = tuple(
            device.uuid
            for device in snapshot.devices
            if device.uuid not in faults
            and device.uuid not in divided  # naming it would allow all of its instances
            and (allowed is None or allowed & {device.uuid, device.parent_uuid})
        )
        reason, fault = request.within_reason, next(iter(faults.values()))
        several = _("{count} GPUs cannot be locked, the first one because {fault}")
        text = fault if len(faults) == 1 else several.format(count=len(faults), fault=fault)
        reason = reason if text in reason else all_of(filter(None, (reason, text)))  # each once
        return replace(request, within=left, within_reason=reason)

    def _verify(self, request: Request, snapshot: Snapshot, uuids: Sequence[str], taken: dict[str, str]) -> Snapshot:
        """Return *snapshot* with the devices *uuids* read again; one that the driver shows no more counts as taken."""
        fresh = self.backend.sample(fields_to_verify(request), uuids)
        for uuid in set(uuids) - {device.uuid for device in fresh.devices}:
            taken[uuid] = sentence("driver.not_shown_any_more", "the driver does not show it any more")
        updated = snapshot.updated(fresh)
        if len(updated.devices) > len(snapshot.devices):  # there are instances that were not seen before
            taken.update(self._restricted(updated))
        return updated

    def _claims_against(self, request: Request, snapshot: Snapshot) -> tuple[tuple[ClaimRecord, ...], dict[str, str]]:
        """Return the living claims, and uuid -> which claim is in the way; shares do not block each other."""
        uuids = [device.uuid for device in snapshot.devices]
        claims = probe(self.directory, uuids)
        if self.outer is None:
            exclusive = [record for record in claims if not (request.share and record.slots)]
            return claims, claimed_by(exclusive, time.time())
        inner = locked_devices(self.directory, [f"{uuid}.nested" for uuid in uuids])
        text = sentence("claimed.inside", "used by another command inside the claim {id}", id=self.outer.id)
        return claims, {uuid: text for uuid in uuids if f"{uuid}.nested" in inner}

    def _restricted(self, snapshot: Snapshot) -> dict[str, str]:
        """Return uuid -> the restriction of the device, or of any new claim of this user."""
        uid = None if self.outer else os.geteuid()  # the owner of a claim may divide it
        return restrictions_against(self.directory, [device.uuid for device in snapshot.devices], uid, time.time())

    def _sharing(self, request: Request, snapshot: Snapshot, claims: Sequence[ClaimRecord]) -> Mapping[str, Sharing]:
        """Return uuid -> the claims that share the device, if *request* may join them."""
        return sharing_of(snapshot, claims) if request.share and not self.outer and claims else {}

    def _withdraw(self) -> None:
        if self._queued is not None:
            with suppress(ValueError):  # it was interrupted before it was there
                _waiting.remove(self._queued)
            if self._queued.waiter:
                self._queued.waiter.withdraw()
            self._queued = None

    def _pause_after(self, fault: Exception, waits: bool, failures: list[float]) -> NotEnoughGpus:
        """Wait, so that a queued request can try again when something could not be read: return why it waits.

        A passing failure must not cost the request its position.  *fault* is raised instead if the request does not
        wait, if *fault* is not passing, or if the driver has failed for DRIVER_SECONDS.  *failures* holds the times of
        the failures since the last successful sample.
        """
        failures.append(time.monotonic())
        is_lasting = failures[-1] - failures[0] >= DRIVER_SECONDS
        why = passing(fault) or (str(fault) if isinstance(fault, BackendError) and not is_lasting else None)
        if not waits or not why:
            raise fault
        if self._queued and self._queued.waiter:
            self._queued.waiter.resign()
        error = waiting_error(
            self.requests[0].num_gpus,
            _("what is free cannot be seen now, and is tried again: {why}").format(why=translated(why).rstrip(".")),
        )
        if self.on_wait:
            self.on_wait(error)
        self._sleep(SAMPLE_SECONDS)
        return error

    def _await_sibling(self, snapshot: Snapshot, error: NotEnoughGpus) -> None:
        """Sleep until another command inside the same claim may have ended, because a claim has no queue inside."""
        names = [f"{device.uuid}.nested" for device in snapshot.devices]
        locked_before = locked_devices(self.directory, names)
        sample_at = time.monotonic() + SAMPLE_SECONDS
        while self._deadline is None or time.monotonic() < self._deadline:
            if self.on_wait:
                self.on_wait(error)
            self._sleep(POLL_SECONDS)
            locked = locked_devices(self.directory, names)
            enough = len(names) - len(locked) >= self.requests[0].num_gpus
            if enough and (locked_before - locked or time.monotonic() >= sample_at):
                return

    def _sleep(self, seconds: float) -> None:
        left = seconds if self._deadline is None else self._deadline - time.monotonic()
        time.sleep(max(0.0, min(seconds, left)))


def _new_id(outer: ClaimRecord | None, ticket: Ticket | None) -> str:
    own = (ticket and ticket.short_id) or os.urandom(4).hex()
    if outer:
        return f"{outer.id}.{own}"
    job = os.environ.get("SLURM_JOB_ID", "")  # set on a cluster whose prolog claims nothing: see clusters.slurm_jobs
    return f"slurm{job}-{own}" if job.isdecimal() and len(job) < 12 else own
