"""The first look at many devices: several threads ask the driver ahead, while the devices are read one after the other.

NVML may be called from several threads at once, and whoever looks only once mostly waits for it.  The answers lie with
the device until it is read in its turn, as if it were asked only then: what they mean, and which device a driver hangs
on, is found out there.  A later look asks alone: threads cost CPU time, and nobody waits for it.
"""

from __future__ import annotations

import _thread
from typing import TYPE_CHECKING

from gpuguard.backends.nvml_calls import LOST, Answer, call
from gpuguard.backends.nvml_fields import READERS, ROWS, read_rows
from gpuguard.backends.nvml_reading import DeviceLost, Reading
from gpuguard.backends.nvml_usage import ask_processes
from gpuguard.model import IDLE_PROCESSES, PROCESSES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

THREADS = 8


class Ahead:
    """Threads that call *ask* with each of *indices*, about in their order."""

    def __init__(self, indices: Sequence[int], ask: Callable[[int], Any]) -> None:
        self._asking: dict[int, _thread.LockType] = {}
        self._told: dict[int, Any] = {}
        self._ask = ask
        for first in range(min(THREADS, len(indices))):
            own = [(index, _thread.allocate_lock()) for index in indices[first::THREADS]]
            for _, lock in own:
                lock.acquire()
            try:
                _thread.start_new_thread(self._run, (own,))
            except RuntimeError:  # this user may start no more: the others are asked in their turn
                return
            self._asking.update(own)

    def of(self, index: int) -> Any:
        """What *ask* returned for it, once it has; None where it failed, or was not called."""
        if lock := self._asking.pop(index, None):
            lock.acquire()
        return self._told.pop(index, None)

    def _run(self, own: Sequence[tuple[int, _thread.LockType]]) -> None:
        for index, lock in own:
            try:
                self._told[index] = self._ask(index)
            except Exception:  # noqa: BLE001, S110  whoever asks in its turn gets it, too
                pass
            finally:
                lock.release()


def ask_all(reading: Asking) -> None:
    """Ask what a reading of its fields asks at first."""
    try:
        for group, reader in READERS.items():
            if group in reading.fields and group != IDLE_PROCESSES:  # nobody knows yet whether they are asked for
                (ask_processes if group == PROCESSES else reader)(reading)
        for group in ROWS:
            if group in reading.fields:
                read_rows(reading, group)
    except DeviceLost:
        return


class Asking(Reading):
    """A reading of which only the answers are kept, for another one."""

    def ask(self, function: str, *arguments: Any) -> Answer:
        """As Reading.ask()."""
        answer = call(self.nvml, function, self.place.handle, *arguments)
        asked = (function, *arguments)
        self.place.ahead[asked] = answer
        if answer.code == LOST:
            raise DeviceLost
        return answer
