"""What is wrong with a device itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpuguard.errors import InvalidRequest
from gpuguard.model import CLOCKS, ECC, Device, Finding
from gpuguard.policies.subjects import computing
from gpuguard.policies.view import RuleView, device_subject


@dataclass(frozen=True)
class HealthRule:
    """A device has a problem, is slowed down, or counts too many errors.

    The finding is about the device, since hardly ever its user is the cause.

    problems: globs; "*" is any problem that the driver reports: lost, unresponsive, reset required, ...
    throttle_reasons: globs, for the names that nvidia-smi gives to the reasons of slower clocks.
    ecc_corrected_above: more corrected memory errors than that since the driver was loaded.
    ecc_uncorrected_above: likewise, errors that could not be corrected.
    retired_pages_above: more pages of memory were given up than that.
    remapped_rows_above: more rows of memory were replaced than that.
    with_processes: an action means the processes on the device, too.

        when: {health: {problems: ["lost", "reset required", "*pending*"], ecc_uncorrected_above: 0}}
    """

    problems: tuple[str, ...] = ()
    throttle_reasons: tuple[str, ...] = ()
    ecc_corrected_above: int | None = None
    ecc_uncorrected_above: int | None = None
    retired_pages_above: int | None = None
    remapped_rows_above: int | None = None
    with_processes: bool = False

    def __post_init__(self) -> None:
        if not (self.problems or self.throttle_reasons or self._limits()):
            raise InvalidRequest("no condition is given: write problems, throttle_reasons or one of the ..._above.")

    @property
    def further_fields(self) -> frozenset[str]:
        """The groups that it judges by and that nobody else needs: 15 driver calls per device and sample."""
        slowed = {CLOCKS} if self.throttle_reasons else set()
        return frozenset(slowed | ({ECC} if self._limits() else set()))

    def check(self, view: RuleView) -> Iterator[Finding]:
        """A finding per device."""
        for device in view.snapshot.devices:
            faults = [*self._names(device), *self._counts(device)]
            if faults:
                processes = computing(device) if self.with_processes else ()
                yield Finding("health", device_subject(device), "; ".join(faults), processes)

    def _names(self, device: Device) -> Iterator[str]:
        problems = [name for name in device.problems or () if _is_one(name, self.problems)]
        slowed = [name for name in device.throttle_reasons or () if _is_one(name, self.throttle_reasons)]
        if problems:
            yield ", ".join(problems)
        if slowed:
            yield f"slowed down by {', '.join(slowed)}"

    def _counts(self, device: Device) -> Iterator[str]:
        for field, what, limit in self._limits():
            count = getattr(device, field)
            if count is not None and count > limit:
                yield f"{count} {what}, {limit} are allowed"

    def _limits(self) -> list[tuple[str, str, int]]:
        rows = (
            ("ecc_corrected_volatile", "corrected memory errors", self.ecc_corrected_above),
            ("ecc_uncorrected_volatile", "uncorrected memory errors", self.ecc_uncorrected_above),
            ("retired_pages", "retired pages", self.retired_pages_above),
            ("remapped_rows", "remapped rows", self.remapped_rows_above),
        )
        return [(field, what, limit) for field, what, limit in rows if limit is not None]


def _is_one(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
