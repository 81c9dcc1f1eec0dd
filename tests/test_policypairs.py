"""Policies that contradict each other are warned of; policies that only refine each other are not."""

from __future__ import annotations

import pytest
from policies import good, marked

IDLE = "{idle: {below: 5%}}"


def two(first: str, second: str, *, when: tuple[str, str] = (IDLE, IDLE), steps: tuple[str, str] | None = None) -> str:
    """A file with two policies that end processes; *first* and *second* are further keys of theirs."""
    ends = steps or ("[warn, {after: 10m, do: terminate}]",) * 2
    policies = zip("ab", when, ends, (first, second), strict=True)
    return "version: 1\npolicies:\n" + "".join(
        f"  - {{name: {name}, when: {rule}, for: 1h, steps: {each}{', ' if more else ''}{more}}}\n"
        for name, rule, each, more in policies
    )


def warnings(text: str) -> list[str]:
    """What is said, each where the text has its mark."""
    plain, places = marked(text)
    found = good(plain).warnings
    assert {(warning.line, warning.column) for warning in found} == places
    return [warning.text for warning in found]


MARKED = ("{idle: {below: 5%}}", "{idle: «{below: 5%}}")
SAME = "ends processes of the same users for idle, too: whichever is faster wins."
SOME = "ends some of the same processes for idle, too: whichever is faster wins."
NOTHING = "ends the same processes for idle after 1h10m, so this one, after 1h10m, changes nothing."


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("", "", SAME),
        ("only: {users: [alice]}", "only: {users: [alice]}", SAME),
        ("only: {users: [alice, bob]}", "only: {users: [bob, alice]}", SAME),
        ("hours: '08:00-20:00'", "hours: '18:00-22:00'", SAME),
        ("hours: '22:00-06:00'", "hours: '05:00-07:00'", SAME),
        ("days: [mon, tue]", "days: [tue, wed]", SAME),
        ("only: {users: [alice, bob]}", "only: {users: [bob, on]}", SOME),
        ("only: {devices: [0, 1]}", "only: {devices: [1, 2]}", SOME),
        ("only: {users: [alice]}", "only: {devices: [0]}", SOME),
        ("only: {groups: [students, staff], users: [bob]}", "only: {groups: [staff]}", SOME),
        ("except: {users: [alice]}", "except: {users: [alice]}", SAME),
        ("", "only: {users: [alice]}", NOTHING),
    ],
)
def test_two_policies_that_end_the_same_processes_are_one_too_many(first, second, text):
    [said] = warnings(two(first, second, when=MARKED))

    assert said == f"'a' {text}"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("only: {users: [alice]}", "only: {users: [bob]}"),
        ("only: {users: [alice], devices: [0]}", "only: {users: [alice], devices: [1]}"),
        ("only: {kinds: [interactive]}", "only: {kinds: [batch]}"),
        ("hours: '08:00-20:00'", "hours: '20:00-08:00'"),
        ("days: [mon]", "days: [tue]"),
        ("claimed_above: 50%", "claimed_above: 80%"),
        ("except: {users: [alice]}", "only: {users: [alice]}"),
        ("only: {groups: [students]}", "except: [{users: [bob]}, {groups: [students]}]"),
        ("only: {users: [alice]}", "only: {groups: [staff]}"),
        ("only: {devices: [0]}", "only: {models: ['A100*']}"),
        ("except: {groups: [staff]}", "only: {users: [alice]}"),
        ("except: {users: [alice, bob]}", "only: {groups: [staff]}"),
        ("except: {groups: [staff]}", "only: {groups: [students]}"),
        ("except: {models: ['A*']}", "only: {models: ['A100*']}"),
        ("except: {devices: [0]}", "only: {devices: [GPU-5f0e]}"),
        ("except: {devices: [0]}", "only: {models: ['A100*']}"),
        ("except: {users: [alice]}", "except: {groups: [staff]}, only: {users: [alice]}"),
    ],
)
def test_policies_that_have_nobody_for_certain_in_common_are_two(first, second):
    assert warnings(two(first, second)) == []


def test_a_stricter_policy_for_some_is_no_contradiction():
    soon = ("[warn, {after: 1h, do: terminate}]", "[warn, {after: 10m, do: terminate}]")
    assert warnings(two("", "only: {users: [alice]}", steps=soon)) == []
    assert warnings(two("", "only: {users: [alice]}", when=(IDLE, "{idle: {below: 20%}}"))) == []


@pytest.mark.parametrize(
    "first",
    [
        "hours: '08:00-20:00'", "days: [mon]", "start_grace: 5h", "devices_at_least: 4", "at_most: {users: 1}",
        "except: {kinds: [interactive]}", "except: {devices: [1]}",
    ],
)  # fmt: skip
def test_a_policy_for_some_changes_what_the_one_for_all_leaves(first):
    assert warnings(two(first, "only: {users: [alice]}")) == []
    assert warnings(two(f"{first}, only: {{users: [alice, bob]}}", "only: {users: [alice]}")) == []


@pytest.mark.parametrize(("first", "second"), [("observe", "enforce"), ("enforce", "observe")])
def test_what_only_observes_is_a_rehearsal_beside_what_ends(first, second):
    assert warnings(two(f"mode: {first}", f"mode: {second}")) == []
    assert warnings(two("", "mode: enforce")) == []  # a file observes where it does not say


def test_a_milder_policy_for_some_changes_nothing_wherever_it_stands():
    late = ("[warn, {after: 10m, do: terminate}]", "[warn, {after: 5h, do: terminate}]")
    [said] = warnings(two("", "only: {users: [alice]}", steps=late, when=MARKED))
    assert said == "'a' ends the same processes for idle after 1h10m, so this one, after 6h, changes nothing."

    [said] = warnings(two("only: {users: [alice]}", "", steps=late[::-1], when=MARKED[::-1]))
    assert said == "'b' ends the same processes for idle after 1h10m, so this one, after 6h, changes nothing."


def test_an_exemption_that_another_policy_undoes():
    assert warnings(two("except: «{users: [alice]}", "")) == ["whom this spares, 'b' ends for idle all the same."]
    assert warnings(two("", "except: «{users: [alice]}")) == ["whom this spares, 'a' ends for idle all the same."]


@pytest.mark.parametrize("spared", ["devices: [1]", "users: [bob]", "users: [bob], kinds: [batch]"])
def test_an_exemption_of_others_leaves_one_policy_too_many(spared):
    [said] = warnings(two(f"except: {{{spared}}}", "only: {users: [alice], devices: [0]}", when=MARKED))

    assert said == f"'a' {NOTHING}"


def test_of_several_exemptions_the_one_that_is_undone_is_named():
    text = two("except: [{users: [alice]}, «{groups: [staff]}]", "except: {users: [alice, bob]}")

    assert warnings(text) == ["whom this spares, 'b' ends for idle all the same."]


def test_policies_that_end_nobody_may_say_the_same_twice():
    assert warnings(two("", "", steps=("[warn]", "[{after: 1h, do: warn}]"))) == []


def test_each_rule_is_compared_with_its_like():
    assert warnings(two("", "", when=(IDLE, "{unclaimed: {}}"))) == []
    assert warnings(two("", "", when=("{any: [{unclaimed: {}}, {idle: {below: 5%}}]}", MARKED[1]))) == [f"'a' {SAME}"]


def test_rules_that_say_whom_they_mean_are_compared_with_their_equals_alone():
    python = "{command: {executables: ['/usr/bin/python']}}"
    ruby = python.replace("python", "ruby")

    assert warnings(two("", "", when=(python, ruby))) == []
    assert warnings(two("", "", when=(python, python.replace("{exe", "«{exe")))) == [
        f"'a' {SAME}".replace("idle", "command")
    ]


def test_an_exemption_that_ends_one_day_keeps_nobody_apart():
    text = two("except: {users: [alice], until: 2999-01-01}", "only: {users: [alice]}", when=MARKED)

    assert warnings(text) == [f"'a' {NOTHING}"]
