"""No rule fails of a value: whatever a driver, /proc and the records of claims may say, one field at a time.

Who found a value of which a rule fails would be out of its reach; what then becomes of others: test_watchdog_faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from builders import a_claim_record
from worlds import CLOCK, a_bad_day, shown

from gpuguard.model import ClaimRecord, Device, Finding, GpuProcess
from gpuguard.policies.engine import evaluate
from gpuguard.policies.escalation import EngineMemory
from gpuguard.policies.policy import Policy, Scope, Step
from gpuguard.policies.rules import RULES
from gpuguard.policies.subjects import everywhere
from gpuguard.policies.view import HostUse, process_subject

NUMBERS = (0, -1, 1, 255, 65534, 2**31, 2**32 - 1, 2**50, 2**53, -(2**53))
FLOATS = (0.0, -1.0, 0.5, 1e-300, 1e300, 100.0, 2.0**53)
TEXTS = (
    "", "\ud800", "\0", "x" * 5000, "a\nb", "%s %(a)s {0} {x!r} $user $", "[!\x00-\uffff]*[", "\u0663.\u00b2", "../..",
    "9" * 5000,
)  # fmt: skip
OF_HINT = {"int": NUMBERS, "float": FLOATS + NUMBERS, "str": TEXTS, "bool": (True, False)}
EVERY_RULE = tuple(
    Policy(
        f"{name} {place} {scoped}", (rule,), hold=0.0, start_grace=10.0 * scoped, devices_at_least=1 + scoped,
        exempt=(Scope(frozenset({5}), frozenset({"g"}), ("0", "GPU"), ("A*",), frozenset({"batch"}), 1e12),) * scoped,
        steps=(Step("warn"), Step("terminate")), at_most_users=99, at_most_processes=999,
    )
    for name in RULES for place, rule in enumerate(shown(name, RULES[name])) for scoped in (0, 1)
)  # fmt: skip


def others(noun):
    """(what is other, the noun) for each field and each value that it may have."""
    for name, hint in type(noun).__annotations__.items():
        plain = hint.removesuffix(" | None")
        values = [(), *([each] for each in TEXTS)] if plain.startswith("tuple[str") else OF_HINT.get(plain, ())
        for value in (*values, *([None] if plain != hint else [])):
            value = tuple(value) if isinstance(value, list) else value
            yield f"{type(noun).__name__}.{name} = {value!r:.40}", replace(noun, **{name: value})


def worlds(kind):
    """(what is other, three looks at the bad day) for each field of one kind of noun."""
    days = [a_bad_day(CLOCK + 10.0 * look) for look in range(3)]
    first, rest = days[0].snapshot.devices[0], days[0].snapshot.devices[1:]
    noun = {Device: first, GpuProcess: first.processes[0], HostUse: HostUse()}.get(
        kind, a_claim_record(rest[0], uid=1002)
    )
    for what, other in others(noun):
        device = {Device: other, GpuProcess: replace(first, processes=(other,))}.get(kind, first)
        used = {(each.pid, each.start_time): other for each in first.processes} if kind is HostUse else {}
        claims = (other,) if kind is ClaimRecord else ()
        yield what, [_with(day, (device, *rest), claims, used) for day in days]


def _with(day, devices, claims, used):
    snapshot = replace(day.snapshot, devices=devices, claims=(*day.snapshot.claims, *claims))
    return replace(day, snapshot=snapshot, host={**day.host, **used})


def fails_of(kind, policies):
    """The first of these values at which somebody fails, or None."""
    for what, looks in worlds(kind):
        memory = EngineMemory()
        for look in looks:
            try:
                evaluate(look, policies, memory, interval=10.0)
            except Exception as error:  # noqa: BLE001  whatever it is fails the test
                return f"{what}: {error!r}"
        assert memory.standings, what
    return None


@pytest.mark.parametrize("kind", [Device, GpuProcess, ClaimRecord, HostUse])
def test_no_rule_fails_of_what_is_seen(kind):
    assert fails_of(kind, EVERY_RULE) is None


def test_a_rule_that_fails_of_a_value_is_found():
    """A fault is planted: a rule divides by what a process has."""

    @dataclass(frozen=True)
    class Dividing:
        def check(self, view):
            for device, process in everywhere(view):
                yield Finding("d", process_subject(device, process), f"{1 / (process.memory_used or 0)}", (process,))

    assert "GpuProcess.memory_used = 0: ZeroDivisionError" in fails_of(GpuProcess, [Policy("p", (Dividing(),))])
