"""What is remembered of the pages before never shows in a page."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from builders import GIB, a_claim_record, a_device, a_process, a_snapshot
from chances import luck
from test_metrics import FULL, facts_about

from gpuguard.metrics import exposition
from gpuguard.metrics import families as metrics
from gpuguard.metrics.exposition import to_prometheus
from gpuguard.metrics.families import DEVICE_VALUES, MetricFacts, metric_families
from gpuguard.model import Gap


def some_facts(chance: random.Random) -> MetricFacts:
    """Whatever a machine may be like, of so few values that many are as they were at some page before."""

    def one_of(*values):
        return chance.choice((None, *values))

    def some_device(index: int):
        numbers = {name: one_of(0, 1, 1.0, True, 50.5, math.inf) for _, _, _, name, _ in DEVICE_VALUES}
        errors = {name: one_of(0, 1, 7) for name in FULL if name.startswith("ecc_")}
        running = (
            a_process(4711, user=one_of("eve", "a\nb"), memory_used=one_of(GIB)),
            a_process(4712, user=one_of("bob", "(others)"), kind=chance.choice(["compute", "graphics"])),
        )
        return replace(
            a_device(index),
            **numbers | errors,
            processes=one_of((), running, running[1:]),
            processes_plausible=chance.random() < 0.8,
            problems=one_of((), ("lost",), ("odd", "XID 79")),
            throttle_reasons=one_of((), ("gpu_idle",), ("hw_slowdown", "odd")),
            mig_profile=one_of("1g.10gb"),
        )

    devices = [some_device(index) for index in chance.sample(range(4), chance.randrange(1, 4))]
    claims = [a_claim_record(each, id=chance.choice(["slurm12", "x"])) for each in devices if chance.random() < 0.3]
    return facts_about(
        a_snapshot(*devices, claims=tuple(claims), gaps=(Gap(None, "claims", "odd"),) * (chance.random() < 0.1)),
        quarantined=one_of(frozenset(), frozenset({devices[0].uuid})),
        troubles=one_of(0, 1),
        waiting=one_of((), (("eve", 1.0),)),
        daemon_up=one_of(False, True),
    )


def forget() -> None:
    """Let nothing be known of the pages before."""
    for module in (metrics, exposition):
        for each in vars(module).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()


def anew(facts: MetricFacts) -> str:
    forget()
    return to_prometheus(metric_families(facts))


def pages_that_others_show_in() -> list[MetricFacts]:
    chance = luck(20261122)
    seen = [some_facts(chance) for _ in range(200)]
    forget()
    after_others = [to_prometheus(metric_families(facts)) for facts in seen]
    return [facts for facts, page in zip(seen, after_others, strict=True) if page != anew(facts)]


def test_a_page_does_not_tell_what_was_told_before():
    assert pages_that_others_show_in() == []


def test_a_family_that_remembers_too_much_is_found(monkeypatch):
    right = metrics._numbers
    first: dict[str, metrics.MetricFamily] = {}

    def wrong(name: str, *of: Any) -> metrics.MetricFamily:
        return first.setdefault(name, right(name, *of))

    monkeypatch.setattr(wrong, "cache_clear", first.clear, raising=False)
    monkeypatch.setattr(metrics, "_numbers", wrong)

    assert pages_that_others_show_in()


def test_what_did_not_change_is_not_made_anew():
    snapshot = a_snapshot(a_device(**FULL))
    before = {family.name: family for family in metric_families(facts_about(snapshot))}
    after = metric_families(facts_about(a_snapshot(a_device(**FULL | {"fan_speed": 31.0}))))

    assert {family.name for family in after if family is not before[family.name]} <= {
        "gpuguard_device_fan_speed_ratio", "gpuguard_sample_gaps",
    }  # fmt: skip
