"""One device in one sample: its values, its gaps, its problems.

A value that the driver cannot give, or that cannot be true (fan 255 %, 4294967295 C), stays unknown and leaves a gap.
Does not know which calls to make: see nvml_fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuguard.backends.nvml_calls import ABSENT, LOST, NEVER, PROBLEMS, RESET_REQUIRED, CallResult, call
from gpuguard.backends.plausibility import PLAUSIBLE
from gpuguard.model import BRIEF, Gap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from gpuguard.model import GpuProcess
    from gpuguard.procfs import Stat


class DeviceCache:
    """A device as the driver library knows it, and what never changes about it."""

    def __init__(self, index: int, handle: Any, uuid: str) -> None:
        self.index = index
        self.handle = handle
        self.uuid = uuid
        self.static: dict[str, CallResult] = {}
        self.constants: dict[str, Any] = {}  # fields of the device that never change
        self.settings: dict[str, CallResult] = {}  # answers that are kept for a while: see ask_seldom
        self.lately: dict[str, CallResult] = {}  # answers that are kept for a moment: see ask_lately
        self.ahead: dict[tuple[Any, ...], CallResult] = {}  # by function and arguments: see nvml_ahead
        self.used: int | None = None  # bytes in use when its processes were last listed
        self.instances: frozenset[str] = frozenset()  # uuids of its MIG instances, as last seen
        self.told: Any = None  # its lists of processes as they were the last time, ...
        self.listed: list[GpuProcess] = []  # ... and the processes in them
        self.utilization_seen = 0  # time stamp of the newest process utilization sample
        self.flow: tuple[float, dict[str, int]] | None = None  # (when, KiB since ever) of what goes over NVLink
        self.utilizations: dict[tuple[int, float | None], tuple[float, float]] = {}  # (read at, percent), of processes


class DeviceLost(Exception):
    """Any further call on this device would fail, too."""


class Reading:
    """What is known so far of one device in one sample."""

    def __init__(self, nvml: Any, place: DeviceCache, fields: Collection[str]) -> None:
        self.nvml = nvml
        self.place = place
        self.fields = fields
        self.values: dict[str, Any] = {}
        self.gaps: list[Gap] = []
        self.problems: list[str] = []
        self.stats: dict[int, Stat] = {}  # of the processes that it lists
        self.memory_doubt: str | None = None  # why the memory of its processes cannot be checked

    def ask(self, function: str, *arguments: Any) -> CallResult:
        """Call *function* for this device.  Raises DeviceLost."""
        ahead = self.place.ahead
        told = ahead.pop((function, *arguments), None) if ahead else None
        answer = told or call(self.nvml, function, self.place.handle, *arguments)
        if answer.code:
            if answer.code == LOST:
                raise DeviceLost
            if answer.code == RESET_REQUIRED:
                self.problem(PROBLEMS[RESET_REQUIRED])
        return answer

    def ask_once(self, key: str, function: str, *arguments: Any) -> CallResult:
        """As ask(), but an answer that cannot change is kept for the life of this process."""
        answer = self.place.static.get(key) or self.ask(function, *arguments)
        if answer.code == 0 or answer.code in NEVER:
            self.place.static[key] = answer
        return answer

    def ask_unless_never(self, function: str, *arguments: Any) -> CallResult:
        """As ask(), but a driver that does not have it is asked only once."""
        answer = self.place.static.get(function) or self.ask(function, *arguments)
        if answer.code in NEVER:
            self.place.static[function] = answer
        return answer

    def ask_seldom(self, function: str) -> CallResult:
        """As ask_unless_never(), but an answer is kept for a while: see nvml.SETTINGS_SECONDS."""
        answer = self.place.settings.get(function) or self.ask_unless_never(function)
        if answer.code == 0:
            self.place.settings[function] = answer
        return answer

    def ask_where_told(self, function: str, *arguments: Any, key: str = "") -> CallResult:
        """As ask(), but a device that does not tell it is asked again only after a while: see nvml.SETTINGS_SECONDS."""
        key = key or function
        answer = self.place.settings.get(key) or self.ask(function, *arguments)
        if answer.code in NEVER:
            self.place.settings[key] = answer
        return answer

    def ask_lately(self, function: str, *arguments: Any, key: str) -> CallResult:
        """As ask_where_told(), but for who wants only BRIEF an answer is kept for a moment: see nvml.LATELY_SECONDS."""
        if BRIEF not in self.fields:
            return self.ask_where_told(function, *arguments, key=key)
        answer = self.place.lately.get(key) or self.ask_where_told(function, *arguments, key=key)
        if answer.code == 0:
            self.place.lately[key] = answer
        return answer

    def take(self, name: str, answer: CallResult, convert: Callable[[Any], Any] | None = None) -> bool:
        """Set a field of the device, or leave a gap."""
        if answer.code:
            self.gap(name, answer.reason)
            return False
        value = convert(answer.value) if convert else answer.value
        bounds = PLAUSIBLE.get(name)
        if value is None or (bounds and not bounds[0] <= value <= bounds[1]):
            self.gap(name, f"implausible value {answer.value!r:.40}")
            return False
        self.values[name] = value
        return True

    def gap(self, name: str, reason: str) -> None:
        """Say why a field is unknown."""
        self.gaps.append(Gap(self.place.uuid, name, reason))

    def problem(self, text: str) -> None:
        """Say what is wrong with the device."""
        if text not in self.problems:
            self.problems.append(text)

    def fault(self, function: str, answer: CallResult) -> None:
        """A code that a healthy device does not give, from a call that always works on one, is a problem."""
        if answer.code and answer.code not in ABSENT and answer.code != RESET_REQUIRED:
            self.problem(f"{function}: {answer.reason}")
