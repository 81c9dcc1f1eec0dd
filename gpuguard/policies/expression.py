"""Conditions that no other rule can say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from gpuguard.device_state import usable_devices
from gpuguard.model import Finding
from gpuguard.policies.expression_language import (
    BYTES,
    CELSIUS,
    NAMES,
    NAMES_OF_HOST,
    PERCENT,
    RATE,
    SECONDS,
    WATTS,
    NameSource,
    Value,
    parse_expression,
)
from gpuguard.policies.expression_language import Expression as Condition
from gpuguard.policies.view import RuleView, computing, device_subject, process_subject
from gpuguard.units import format_bytes, format_duration

_LONGEST_SHOWN = 80  # characters
_SHOWN: dict[str, Callable[[float], str]] = {
    BYTES: format_bytes, RATE: lambda number: f"{format_bytes(number)}/s", SECONDS: format_duration,
    PERCENT: lambda number: f"{number:.3g}%", CELSIUS: lambda number: f"{number:g}C",
    WATTS: lambda number: f"{number:.0f}W",
}  # fmt: skip


@dataclass(frozen=True)
class ExpressionRule:
    """A condition in a small language is true.

    expr: names, compared with amounts (30GiB, 5%, 2h, 85C, 300W, 1MB/s, 3) or texts ('alice'), by < <= > >= == != and
        by in, like, joined by and, or, not; + - * / for amounts.

    With a name about processes it is judged for each process on each device, else for each device.  What compares
    something unknown is neither true nor false.

    Names about processes are memory_used, process_utilization, run_time, user, uid, groups, executable, command,
    container, cpu, host_memory, network.  About devices: utilization, memory_utilization, device_memory_used,
    device_memory_free, device_memory_total, temperature, temperature_slowdown, power_draw, power_limit, device_index,
    model, processes, claimed, claimed_by.

        when: {expression: {expr: "memory_used > 30GiB and utilization < 5% and user not in ('bob',)"}}
    """

    expr: Annotated[Condition, parse_expression]

    @property
    def looks_at_host(self) -> bool:
        """Whether it judges by View.host."""
        return not NAMES_OF_HOST.isdisjoint(self.expr.names)

    def check(self, view: RuleView) -> Iterator[Finding]:
        """A finding per process and device, or per device."""
        for device in usable_devices(view.snapshot):
            if not self.expr.of_process:
                if self.expr.holds(place := NameSource(view, device)):
                    yield Finding("expression", device_subject(device), self._why(place))
                continue
            for process in computing(device):
                if self.expr.holds(place := NameSource(view, device, process)):
                    yield Finding("expression", process_subject(device, process), self._why(place), (process,))

    def _why(self, place: NameSource) -> str:
        facts = [f"{name} is {_shown(NAMES[name].type, NAMES[name].value(place))}" for name in self.expr.names]
        return f"{', '.join(facts)}: true is {' '.join(self.expr.text.split())}"


def _shown(kind: str, value: Value) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return _SHOWN[kind](value) if kind in _SHOWN else f"{value:g}"
    texts = [value] if isinstance(value, str) else sorted(map(str, value))
    return ", ".join(texts)[:_LONGEST_SHOWN]
