"""A claim for a job that is already running: on the devices that it uses, for as long as it lives.

Locks cannot be put into a running process, so another process, the holder, keeps them and watches the job.  The two-key
rule applies to every process but the job's own: no other process may make its devices look busy.

The holder has a pidfd of each process, and nothing wakes it until one of them ends.  Then it reads /proc once more:
processes that living members have started since belong to the job, and so does every process in a process group or
session that a member leads.  A grandchild is missed if it left both and its parents ended in between.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from gpuguard.backends import Backend
from gpuguard.claims.claim import Claim, JobDetails, Lock, lock_parts, unlock
from gpuguard.claims.directory import Gate, LockDirectory
from gpuguard.claims.records import probe
from gpuguard.claims.restrictions import restrictions_against
from gpuguard.device_state import device_title, may_compute, usable_devices
from gpuguard.errors import ClaimError, GpuguardError
from gpuguard.files import wait_for
from gpuguard.locale import _, translated
from gpuguard.model import HEALTH, MEMORY, PROCESS_DETAILS, PROCESSES, Device, GpuProcess, Snapshot
from gpuguard.procfs import LONGEST, Stat, in_first_pid_namespace, processes, read_proc, stat_of, uid_of
from gpuguard.request import ANY_MEMORY, Request
from gpuguard.users import user_name

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # these end the holder of a claim for others
_FIELDS = frozenset({MEMORY, PROCESSES, PROCESS_DETAILS, HEALTH})  # HEALTH shows MIG instances


class ProcessFamily:
    """Living processes in ``members``, each with its start time; with *tree* also the processes that they start.

    Raises GpuguardError: one of *pids* does not exist (any more).
    """

    def __init__(self, pids: Iterable[int], *, tree: bool) -> None:
        self.tree = tree
        self.members: dict[int, float] = {}
        self._pids: dict[int, int] = {}  # pidfd -> pid
        self._led: dict[int, float] = {}  # process groups and sessions that a member leads -> when that leader started
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # because each process needs a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for pid in pids:
            if not self._add(pid):
                self.close()
                raise GpuguardError(_("there is no process {pid}, or it has ended.").format(pid=pid))
        self.grow()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The pidfds."""
        return tuple(self._pids)

    def includes(self, process: GpuProcess) -> bool:
        """Return whether a process that the driver lists is a member, and not another one with that pid."""
        started = self.members.get(process.pid)
        return started is not None and process.start_time == started

    def grow(self) -> None:
        """Find the processes that belong to the family by now."""
        while self.tree:
            try:
                everything = {pid: stat for pid, stat in processes().items() if stat.lives}
            except OSError:  # no descriptor is free now; the next look finds them
                return
            living = {number for stat in everything.values() for number in (stat.group, stat.session)}
            self._led = {leader: started for leader, started in self._led.items() if leader in living}
            new = [pid for pid, stat in everything.items() if pid not in self.members and self._belongs(stat)]
            # Look again after any is added, because a child may have started its own child before its pidfd was open.
            if not [pid for pid in new if self._add(pid, everything[pid].start_time)]:
                return

    def wait(self, also: int) -> bool:
        """Sleep until members have ended or *also* can be read, then find the processes that belong to those left.

        Returns whether any member is left, which is True when only *also* ended the sleep.
        """
        self._forget(wait_for([also, *self._pids], None) - {also} if self._pids else ())
        self.grow()
        return bool(self.members)

    def refresh(self) -> None:
        """Forget the members that have ended and find new ones, without waiting."""
        self._forget(wait_for(self._pids, 0.0))
        self.grow()

    def close(self) -> None:
        """Forget all members and close their pidfds."""
        for descriptor in self._pids:
            os.close(descriptor)
        self._pids, self.members = {}, {}

    def _forget(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            del self.members[self._pids.pop(descriptor)]
            os.close(descriptor)

    def _belongs(self, stat: Stat) -> bool:
        if stat.parent in self.members:
            return True
        return any(stat.start_time >= self._led.get(number, math.inf) for number in (stat.group, stat.session))

    def _add(self, pid: int, started: float | None = None) -> bool:
        if pid == os.getpid():  # in the tree of the shell that called us, we would wait for ourselves
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return False
        stat = stat_of(pid)  # read after the pidfd is open, so it is of the process that the pidfd means
        if stat is None or not stat.lives or started not in (None, stat.start_time):
            os.close(pidfd)
            return False
        self.members[pid], self._pids[pidfd] = stat.start_time, pid
        if pid in (stat.group, stat.session):
            self._led[pid] = stat.start_time
        return True


def detach(keep: Collection[int]) -> None:
    """Leave the terminal, the directory and every descriptor but those of *keep*, to stay behind and hold a claim."""
    os.setsid()
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    for name in os.listdir("/proc/self/fd"):
        if (number := int(name)) > 2 and number not in keep:
            with suppress(OSError):  # listdir's own descriptor
                os.close(number)


def wake_pipe(signums: Iterable[int]) -> tuple[int, int]:
    """Make each of *signums* write its number into a pipe as one byte and do nothing else; return both ends of it."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    for signum in signums:
        signal.signal(signum, lambda number, frame: None)
    return woken, wake


def adopt(
    backend: Backend, directory: LockDirectory, pids: Sequence[int], *, tree: bool = False, note: str | None = None
) -> tuple[Claim, ProcessFamily]:
    """Claim all devices that the processes *pids* of this user use, or none; *tree* includes processes that they start.

    Returns:
        The claim, held by this process, and the processes that it is for; release it when they have ended.

    Raises:
        ClaimError: the devices cannot be claimed, and why; nothing stays claimed.
        GpuguardError: one of the processes does not exist any more.
        BackendError: the devices cannot be read.
    """
    if not backend.simulated and in_first_pid_namespace() is False:
        raise ClaimError(_("pids in a container are not those that the driver names: adopt the job from the host."))
    family = ProcessFamily(pids, tree=tree)
    held: list[Lock] = []
    try:
        command = _check_owners(pids)
        snapshot = backend.sample(_FIELDS)
        devices = _used_by(family, snapshot, pids)
        uuids = [device.uuid for device in devices]
        restrictions = restrictions_against(directory, uuids, os.geteuid(), time.time())
        for device in devices:
            if device.uuid in restrictions:
                raise ClaimError(
                    _("{gpu} cannot be claimed: {why}.").format(
                        gpu=_title(device), why=translated(restrictions[device.uuid])
                    )
                )
        granted = _from_daemon(directory, snapshot, devices, held) if directory.closed else None
        with Gate(directory):
            for device in devices if not granted else ():
                locks = lock_parts(directory, device, Request(), None)
                if locks is None:
                    at_once = _("{gpu} was being claimed by another command at this moment: try again.")
                    raise ClaimError(_claimed_text(directory, device) or at_once.format(gpu=_title(device)))
                held.extend(locks)
            # Whatever happened between the first sample and the locks shows now.
            again = backend.sample(_FIELDS, uuids)
            family.refresh()  # after the sample, so that a pid in it that was reused matches no member
            devices = _confirmed(again, devices, family)
        claim = Claim(granted or os.urandom(4).hex(), devices, tuple(held))
        claim.write_record(directory, JobDetails(note, command))
    except BaseException:
        unlock(held)
        family.close()
        raise
    return claim, family


def _check_owners(pids: Iterable[int]) -> tuple[str, ...]:
    """Refuse processes of other users; return the command line of the first process."""
    commands = []
    for pid in pids:
        uid = uid_of(pid)
        if uid is not None and uid != os.geteuid():
            raise ClaimError(
                _("process {pid} belongs to {user}: only its owner or root can adopt it.").format(
                    pid=pid, user=user_name(uid)
                )
            )
        words = read_proc(f"/proc/{pid}/cmdline", LONGEST)
        if words is None:
            raise ClaimError(_("there is no process {pid} any more.").format(pid=pid))
        commands.append(words.rstrip(b"\0").decode(errors="replace").split("\0"))
    return tuple(commands[0])


def _used_by(family: ProcessFamily, snapshot: Snapshot, pids: Sequence[int]) -> tuple[Device, ...]:
    """Return the devices that the family uses; raise ClaimError if there are none or other processes use them."""
    devices = tuple(device for device in usable_devices(snapshot) if any(map(family.includes, _computing(device))))
    if devices:
        _refuse_others(devices, family)
        return devices
    what = (
        _("process {pid} uses no GPU now").format(pid=pids[0])
        if len(pids) == 1
        else _("none of these processes uses a GPU now")
    )
    if not family.tree:
        whole = ProcessFamily(pids, tree=True)
        on_devices = [process for device in usable_devices(snapshot) for process in _computing(device)]
        children = sorted({process.pid for process in on_devices if whole.includes(process)})
        whole.close()
        if children:
            raise ClaimError(
                _("{what}, but what it started does (pid {pids}): add --tree.").format(
                    what=what, pids=", ".join(map(str, children))
                )
            )
    unknown = [device.label for device in usable_devices(snapshot) if device.processes is None]
    if unknown:
        gpus = f"GPU {', '.join(unknown)}"
        raise ClaimError(
            _("{what}, as far as can be seen: the driver does not list the processes on {gpus}.").format(
                what=what, gpus=gpus
            )
        )
    raise ClaimError(_("{what}: adopt it when it does, or start such a job with `gpuguard run`.").format(what=what))


def _title(device: Device) -> str:
    return translated(device_title(device))


def _computing(device: Device) -> list[GpuProcess]:
    return [process for process in device.processes or () if may_compute(process, device)]


def _refuse_others(devices: Iterable[Device], family: ProcessFamily) -> None:
    for device in devices:
        if not device.processes_plausible:
            raise ClaimError(
                _("the driver's list of the processes on {gpu} contradicts itself: try again.").format(
                    gpu=_title(device)
                )
            )
        for process in _computing(device):
            if family.includes(process):
                continue
            if process.uid == os.geteuid():
                hint = _(" adopt both (several pids can be named), or --tree if one started the other.")
                raise ClaimError(
                    _("process {pid} of yours computes on {gpu} too:{hint}").format(
                        pid=process.pid, gpu=_title(device), hint=hint
                    )
                )
            user = process.user or _("an unknown user")
            raise ClaimError(
                _("{user} computes on {gpu} too (pid {pid}): it is not yours alone.").format(
                    user=user, gpu=_title(device), pid=process.pid
                )
            )


def _from_daemon(directory: LockDirectory, snapshot: Snapshot, devices: Sequence[Device], held: list[Lock]) -> str:
    """Get a claim of *devices* from the daemon; return its id and add its locks to *held*.

    The daemon checks for itself that no process of another user is on them, and which request is next in the queue.
    """
    from gpuguard.queue.broker_client import request_grant  # needed only where the daemon gives the locks

    uuids = tuple(device.uuid for device in devices)
    # The memory that the job itself uses is no reason to refuse it.
    own = frozenset({os.geteuid()})
    request = Request(num_gpus=len(uuids), devices=uuids, mine_as_free=own, tolerance=ANY_MEMORY)
    taken: dict[str, str] = {}
    claim = request_grant(snapshot, request, directory, None, taken, None)
    if claim is None:
        for device in devices:
            if device.uuid in taken:
                text = _("{gpu} cannot be claimed: {why}.").format(
                    gpu=_title(device), why=translated(taken[device.uuid])
                )
                raise ClaimError(_claimed_text(directory, device) or text)
        raise ClaimError(_("the GPUs of this job cannot be claimed now: `gpuguard explain` says why."))
    held.extend(claim.locks)
    return claim.id


def _claimed_text(directory: LockDirectory, device: Device) -> str | None:
    """Say who has the device, or return None if no record tells."""
    uuids = [device.uuid, *([device.parent_uuid] if device.parent_uuid else [])]
    for record in probe(directory, uuids):
        note = f" ({record.note})" if record.note else ""
        user = "you" if record.uid == os.geteuid() else record.user
        return _("{gpu} is claimed already, by {user}: claim {id}{note}.  `gpuguard who` shows it.").format(
            gpu=_title(device), user=user, id=record.id, note=note
        )
    return None


def _confirmed(again: Snapshot, devices: Sequence[Device], family: ProcessFamily) -> tuple[Device, ...]:
    """Return the devices as they are now; raise ClaimError if anything has changed that matters."""
    fresh = [again.device(device.uuid) for device in devices]
    used = tuple(device for device in fresh if device and any(map(family.includes, _computing(device))))
    if len(used) < len(devices):
        raise ClaimError(_("the job ended, or left one of its GPUs, while it was adopted: nothing is claimed."))
    _refuse_others(used, family)
    return used
