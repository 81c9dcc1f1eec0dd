"""A backend in a process of its own, the worker, so that a driver call that hangs or crashes ends nothing else.

The worker marks which device it is about to read.  If that takes too long, the worker is abandoned (its pipe is
closed, which ends it), that device is called unresponsive, and a new worker reads the others.  This module does not
read devices itself: see worker, and nvml, simulated.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuguard import __version__, errors
from gpuguard.backends import RECORDED, SILENT, UNRESPONSIVE, is_simulated, parts_of, resolved, spawn
from gpuguard.locale import _, translated
from gpuguard.locale.messages import MESSAGE_IDS, sentence, with_sentences
from gpuguard.model import DESKTOP_MEMORY, ClaimRecord, Device, Gap, GpuProcess, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any

    from gpuguard.backends.merged import MergedBackend
    from gpuguard.backends.worker import SentProcesses

INIT_SECONDS = 30.0  # without persistence mode the driver wakes every device up first, which takes seconds each
SLOW_SECONDS = 2.0  # after which on_slow is called
DEVICE_SECONDS = 1.5  # a device is a few dozen calls of 0.003 to 4.5 ms (RTX 4090, driver 610), PCIe counters 20 ms
NEXT_DEVICE_SECONDS = 0.4  # once one device hangs, so that a sample of eight dead ones still comes within 5 s
DEVICE_RETRY_SECONDS = 60.0  # after which an unresponsive device is tried again


def open_worker(
    name: str,
    *,
    on_slow: Callable[[str], None] | None = None,
    desktop_memory: Callable[[], int] = lambda: DESKTOP_MEMORY,
    same_version: bool = False,
) -> WorkerBackend | MergedBackend:
    """Return the backend *name* behind a process border; the worker starts at once and initialises meanwhile.

    Args:
        name: as for open_backend, or several, as in "nvml,amd", each of which gets a worker of its own; "auto" stands
            for those of this machine.
        on_slow: called with a text if the driver takes longer than SLOW_SECONDS to initialise.
        desktop_memory: returns Device.desktop_memory for each sample: see source.desktop_memory.
        same_version: refuse a worker of another gpuguard, as the guard does.  Otherwise fields that this version does
            not know are left out, because a request that waits starts its worker again after an upgrade.

    Raises:
        InvalidRequest: the backends do not all show one machine at one time.
        BackendError: no process can be started now.
    """
    name = resolved(name, None)
    parts = parts_of(name)
    if len(parts) == 1:
        return WorkerBackend(name, on_slow, desktop_memory, same_version=same_version)
    if len({is_simulated(part) for part in parts}) > 1 or any(part.startswith(RECORDED) for part in parts):
        raise errors.InvalidRequest(
            _("{name}: real GPUs, simulated ones and files of another time cannot be read together.").format(name=name)
        )
    from gpuguard.backends.merged import MergedBackend  # needed only on machines with several vendors

    workers = [WorkerBackend(part, on_slow, desktop_memory, same_version=same_version) for part in parts]
    return MergedBackend(name, workers)


class WorkerBackend:
    """A Backend that lives in another process."""

    def __init__(
        self,
        name: str,
        on_slow: Callable[[str], None] | None = None,
        desktop_memory: Callable[[], int] = lambda: DESKTOP_MEMORY,
        *,
        same_version: bool = False,
    ) -> None:
        self.name = name
        self._same_version = same_version
        self.simulated = is_simulated(name)
        self._channel: spawn.Channel | None = self._started()
        self._ready = False
        self._version = __version__  # of the worker
        self._sent: SentProcesses = {}  # the processes that the worker takes for known here
        self._on_slow, self._desktop_memory = on_slow, desktop_memory
        self._skip: dict[int, float] = {}  # device index -> when to try it again (monotonic)
        self._uuids: dict[int, str] = {}  # of all devices seen so far, by index

    def sample(self, fields: Collection[str], devices: Collection[str] | None = None) -> Snapshot:
        """Sample as Backend.sample does; raise BackendError also if the driver hangs or crashes outside any device."""
        self._skip = {index: until for index, until in self._skip.items() if until > time.monotonic()}
        hung_before = bool(self._skip)
        suspect: int | None = None
        while True:
            ahead = not (self._ready or self._skip)
            request = (tuple(fields), None if devices is None else tuple(devices), tuple(self._skip), ahead)
            try:
                self._send_request(request)
                return self._named(self._reply(NEXT_DEVICE_SECONDS if hung_before else DEVICE_SECONDS), request[1])
            except spawn.Stuck as stuck:
                self._abandon()
                if suspect is not None and stuck.index is not None:
                    del self._skip[suspect]
                suspect = stuck.index if ahead else None  # if several are read at once, another may be at fault
                if stuck.index is None or stuck.index in self._skip:
                    raise _unresponsive(stuck.reason) from None
                self._skip[stuck.index] = time.monotonic() + DEVICE_RETRY_SECONDS
                hung_before = True
            except BrokenPipeError:
                self._abandon()
                text = sentence("worker.ended", "the process that reads the GPUs ended by itself.  Try again.")
                raise errors.DriverUnresponsive(translated(text)) from None

    def close(self) -> None:
        """End the worker and reap it; the next sample starts another one.

        In another program the next os.wait() is meant for one of its own children, so ours must be gone by then.
        """
        process = self._channel and self._channel.process
        self._abandon()
        if process:
            spawn.await_end(process, time.monotonic() + spawn.LEAVING_SECONDS)
            spawn.reap()

    def _abandon(self) -> None:
        """End the worker without waiting for its end, because it may hang in the driver."""
        if self._channel:
            channel, self._channel, self._ready, self._sent = self._channel, None, False, {}
            channel.close()
        spawn.reap()

    def __enter__(self) -> WorkerBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_request(self, request: tuple[object, ...]) -> None:
        if self._channel and not self._channel.is_open:  # we were forked, so it is our parent's
            self._channel, self._ready, self._sent = None, False, {}
        channel = self._channel = self._channel or self._started()
        try:
            channel.send(request)
        except BrokenPipeError:
            if self._ready:  # it ended between two requests, which is no fault of this one: a new worker answers
                self._abandon()
                self._send_request(request)
                return
        if not self._ready:  # the request waits for the worker; one that has ended has said why
            self._await_ready(channel)

    def _started(self) -> spawn.Channel:
        try:
            return spawn.start_worker(self.name)
        except OSError as error:  # a caller that tries again and again can go on: a job, or a waiting request
            why = errors.shortage(error) or sentence(
                "worker.not_started",
                "no process could be started that reads the GPUs: {error}.",
                error=error.strerror or str(error),
            )
            raise errors.BackendError(translated(why)) from error

    def _await_ready(self, channel: spawn.Channel) -> None:
        try:
            if channel.overdue(SLOW_SECONDS):
                if self._on_slow:
                    self._on_slow(
                        _("the driver takes long to start (persistence mode off? `nvidia-smi -pm 1` as root helps) ...")
                    )
                if channel.overdue(INIT_SECONDS - SLOW_SECONDS):
                    reason = sentence(
                        "worker.not_initialised",
                        "the driver did not initialise within {seconds} s",
                        seconds=f"{INIT_SECONDS:.0f}",
                    )
                    raise _unresponsive(reason)
            reply = channel.receive(INIT_SECONDS)
            if reply is None:
                text = sentence(
                    "worker.crashed_early", "the driver library crashed while it initialised.  Try `nvidia-smi`."
                )
                raise errors.DriverUnresponsive(translated(text))
            _raise_error(reply)
            self._version = str(reply[1]) if reply[1:] else ""
            if self._version != __version__ and (self._same_version or not self._version):
                raise self._installed_anew()
        except spawn.Stuck as stuck:
            self._abandon()
            raise _unresponsive(stuck.reason) from None
        except errors.GpuguardError:
            self._abandon()
            raise
        self._ready = True

    def _reply(self, seconds: float) -> Snapshot:
        channel = self._channel
        assert channel is not None
        reply = channel.receive(seconds)
        if reply is None:
            index, _ = spawn.read_mark(channel.mark)
            where = spawn.where(index)
            raise spawn.Stuck(index, sentence("worker.crashed", "the driver library crashed ({where})", where=where))
        _raise_error(reply)
        _snapshot, packed, *ids = reply  # a worker of before an upgrade sends none
        if self._version == __version__:
            return unpack(packed, self._sent, self._desktop_memory, *ids)
        try:
            return unpack(packed, self._sent, self._desktop_memory, *ids, known=_known)
        except (LookupError, TypeError):
            raise self._installed_anew() from None

    def _installed_anew(self) -> errors.BackendError:
        another = f"gpuguard {self._version}" if self._version else "another gpuguard"
        text = sentence(
            "worker.installed_anew",
            "{another} was installed while this program, of gpuguard {version}, was running.  "
            "Start it again; the guard by `systemctl restart gpuguard`.",
            another=another,
            version=__version__,
        )
        return errors.BackendError(translated(text))

    def _named(self, snapshot: Snapshot, devices: tuple[str, ...] | None) -> Snapshot:
        """Return the snapshot with uuids that a former worker knew: a new one must not read devices that it skips."""
        if not self._skip:
            self._uuids.update({device.index: device.uuid for device in snapshot.devices if not device.parent_uuid})
            return snapshot
        unresponsive = {index: self._uuids.get(index, f"unknown-{index}") for index in self._skip}
        wanted = {index: uuid for index, uuid in unresponsive.items() if devices is None or uuid in devices}
        others = tuple(device for device in snapshot.devices if device.index not in self._skip)
        vendor = next((device.vendor for device in snapshot.devices), Device.vendor)  # a worker has one vendor
        gone = tuple(Device(i, uuid, vendor=vendor, problems=(UNRESPONSIVE,)) for i, uuid in wanted.items())
        gaps = tuple(gap for gap in snapshot.gaps if gap.reason != SILENT)
        gaps += tuple(Gap(uuid, "device", SILENT) for uuid in wanted.values())
        return replace(snapshot, devices=tuple(sorted(others + gone, key=lambda device: device.index)), gaps=gaps)


def _unresponsive(reason: str) -> errors.DriverUnresponsive:
    text = sentence("worker.unresponsive", "{reason}.  Try `nvidia-smi`; if it hangs too, reboot.", reason=reason)
    return errors.DriverUnresponsive(translated(text))


def _raise_error(reply: tuple[object, ...]) -> None:
    if reply[0] == "error":
        _kind, name, message, attributes = reply
        facts = {**attributes, "text": message}  # type: ignore[dict-item]
        facts = with_sentences(facts, facts.pop(MESSAGE_IDS, None))
        error: errors.GpuguardError = getattr(errors, str(name), errors.BackendError)(translated(facts.pop("text")))
        vars(error).update(facts)
        raise error


def _known(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Return those of the *fields* that this version knows; those that another worker leaves out are unknown."""
    return {name: value for name, value in fields.items() if name in kind.__match_args__}  # type: ignore[attr-defined]


def unpack(
    packed: dict[str, Any],
    sent: SentProcesses,
    desktop_memory: Callable[[], int] = lambda: DESKTOP_MEMORY,
    message_ids: Mapping[str, Any] | None = None,
    *,
    known: Callable[[type, dict[str, Any]], dict[str, Any]] = lambda _, fields: fields,
) -> Snapshot:
    """Return the snapshot that the worker packed; unchanged processes are the same objects as the last time.

    *desktop_memory* is asked for bytes if a device has processes.  *message_ids* are those of its gaps and problems;
    *known* chooses the fields of each kind of object.
    """
    is_used = not packed["recorded"] and any(device["processes"] for device in packed["devices"])
    beside_desktop = {"desktop_memory": desktop_memory()} if is_used else {}
    sent_texts = packed["gaps"], [device.get("problems") for device in packed["devices"]]
    gaps, problems = with_sentences(sent_texts, message_ids)
    for device, found in zip(packed["devices"], problems, strict=True):
        if found:
            device["problems"] = found
        device |= beside_desktop
        if processes := device["processes"]:
            if processes is not True:
                sent[device["uuid"]] = tuple(GpuProcess(**known(GpuProcess, fields)) for fields in processes)
            device["processes"] = sent[device["uuid"]]
    packed["devices"] = tuple(Device(**known(Device, fields)) for fields in packed["devices"])
    packed["gaps"] = tuple(Gap(**known(Gap, fields)) for fields in gaps)
    # Only recordings have claims here.
    packed["claims"] = tuple(ClaimRecord(**known(ClaimRecord, fields)) for fields in packed["claims"])
    return Snapshot(**known(Snapshot, packed))
