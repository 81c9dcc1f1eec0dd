"""A rule says on its own class all that others need to know of it, and whoever forgets to is told so.

The first tests do what CONTRIBUTING.md says under "Add a rule", and nothing else, in a copy of the package.
"""

import ast
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import pytest
from builders import a_snapshot
from daemons import a_daemon
from nodes import Gpuguard, one, start
from sources import PACKAGE, ROOT, modules, tree
from worlds import shown

from gpuguard.device_state import uses
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.fleet.answers import HostDevice
from gpuguard.jsonio import decode
from gpuguard.model import ALL_FIELDS, GROUPED_FIELDS, NVLINK, NVLINK_FLOW, PCIE, WHO_FIELDS, ActionName, Device
from gpuguard.policies.action_kinds import ACTION_KINDS, HARMFUL
from gpuguard.policies.expression import EXAMPLES, NAMES, NUMBER, TEXT, TEXTS, TRUTH, ExpressionRule, parse_expression
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.rules import RULES
from gpuguard.policies.undeclared import extremes, undeclared
from gpuguard.policies.view import device_subject, recent
from gpuguard.policy_files.keys import BreakerKeys, PolicyKeys, StepKeys
from gpuguard.units import NOT_AVAILABLE
from gpuguard.views.columns import FLEET_COLUMNS
from gpuguard.views.who import to_json

NARROW_LINK = '''
from dataclasses import dataclass

from gpuguard.model import PCIE, Finding
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import device_subject


@dataclass(frozen=True)
class NarrowLinkRule(Rule):
    """The PCIe link of a GPU has too few lanes.

    below: how many lanes it should have.

        when: {narrow_link: {below: 32}}
    """

    below: int
    kind = RuleKind("narrow_link", innocent=True, needs=RuleNeeds(frozenset({PCIE})))

    def check(self, view):
        for device in view.snapshot.devices:
            if device.pcie_width is not None and device.pcie_width < self.below:
                why = f"{device.pcie_width} lanes, {self.below} are expected"
                yield Finding("narrow_link", device_subject(device), why)
'''
POLICY = "version: 1\npolicies: [{name: link, when: {narrow_link: {below: 32}}, for: 0s, steps: [log]}]\n"
TEST = "policies: policy.yaml\ntests: [{name: none, expect_none: true}]\n"


def with_rule(place: Path, text: str = NARROW_LINK) -> Path:
    """A copy of the package with that rule and its row in RULES."""
    shutil.copytree(PACKAGE, place / "copy" / "gpuguard", ignore=shutil.ignore_patterns("__pycache__"))
    policies = place / "copy" / "gpuguard" / "policies"
    (policies / "link.py").write_text(text)
    table = (policies / "rules.py").read_text()
    table = table.replace("        MemoryRule,\n", "        MemoryRule,\n        NarrowLinkRule,\n", 1)
    table = table.replace("\nRULES", "\nfrom gpuguard.policies.link import NarrowLinkRule\n\nRULES", 1)
    (policies / "rules.py").write_text(table)
    (place / "policy.yaml").write_text(POLICY)
    return place / "copy"


def test_a_rule_by_the_book_fires_in_a_daemon(tmp_path, monkeypatch):
    copy = with_rule(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    with a_daemon(tmp_path, POLICY, cwd=copy) as daemon:
        event = daemon.until("log")[0]
        check = daemon.gpuguard("policy", "check", str(daemon.policy), cwd=copy)

    assert (event["outcome"], event["facts"]["rule"], event["message"]) == (
        "done", "narrow_link", "16 lanes, 32 are expected",
    )  # fmt: skip
    assert check.returncode == 0


SCRATCHED = '''
from dataclasses import dataclass

from gpuguard.model import ECC, Finding
from gpuguard.policies.rule import Rule, RuleKind, RuleNeeds
from gpuguard.policies.view import device_subject


@dataclass(frozen=True)
class NarrowLinkRule(Rule):
    """The die of a GPU has too many scratches.

    above: how many it may have.

        when: {scratched: {above: 5}}
    """

    above: int
    kind = RuleKind("scratched", innocent=True, needs=RuleNeeds(frozenset({ECC})))

    def check(self, view):
        for device in view.snapshot.devices:
            if device.scratches is not None and device.scratches > self.above:
                yield Finding("scratched", device_subject(device), f"{device.scratches} scratches")
'''
SCRATCHES = """    scratches: int | None = read_with(
        ECC, "", (0, 1000), metric=("scratches", "Scratches."), query=("scratches", "of the die"),
        expression=("scratches", "of the die"),
    )
    clock_graphics: int"""
SCRATCHED_POLICIES = """version: 1
policies:
  - {name: rule, when: {scratched: {above: 5}}, for: 0s, steps: [log]}
  - {name: words, when: {expression: {expr: scratches > 5}}, for: 0s, steps: [log]}
"""
SCRATCHED_TEST = """policies: policy.yaml
tests:
  - name: scratches
    every: 1m
    for: 10m
    devices: [{scratches: "_, 0 x5, 7"}]
    expect: [{at: 7m, action: log, policy: rule, device: 0}, {at: 7m, action: log, policy: words, device: 0}]
"""


def test_a_field_by_the_book_is_read_judged_shown_and_rehearsed(tmp_path, monkeypatch):
    copy = with_rule(tmp_path, SCRATCHED)
    path = copy / "gpuguard" / "model.py"
    path.write_text(path.read_text().replace("    clock_graphics: int", SCRATCHES, 1))
    (tmp_path / "policy_test.yaml").write_text(SCRATCHED_TEST)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    with a_daemon(tmp_path, SCRATCHED_POLICIES, cwd=copy) as daemon:

        def told(*words: str) -> str:
            done = daemon.gpuguard(*words, cwd=copy)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        told("sim", "set", "--device", "1", "--field", "scratches=7")
        events = daemon.until("log", 2)
        query = told("query", "--query-gpu=index,scratches", "--format=csv,noheader")
        metrics = told("metrics", "--fresh")
        told("policy", "test", str(tmp_path / "policy_test.yaml"))
        told("record", "--mask", "--every", "200ms", "--for", "1s", recording := str(tmp_path / "a.rec"))
        recorded = told(
            "query", "--backend", f"replay:{recording}", "--query-gpu=index,scratches", "--format=csv,noheader"
        )

    assert {(event["facts"]["policy"], event["facts"]["rule"]) for event in events} == {
        ("rule", "scratched"), ("words", "expression"),
    }  # fmt: skip
    assert query.splitlines()[:3] == recorded.splitlines()[:3] == ["0, [N/A]", "1, 7", "2, [N/A]"]
    assert next(line for line in metrics.splitlines() if line.startswith("gpuguard_device_scratches{")).endswith(" 7")


SALUTE = '''

@dataclass(frozen=True)
class SaluteKeys:
    """Salute."""


def _salute(verdict: Verdict, snapshot: Snapshot, context: ActionContext) -> ActionOutcome:
    return _logged(verdict, context, "done")


ACTIONS: Mapping[ActionName, Action] = {
    "salute": Action(SaluteKeys, otherwise=_salute),
'''
SALUTE_KIND = """ACTION_KINDS: Mapping[ActionName, ActionKind] = {
    "salute": ActionKind({"en": "a salute", "zh": "敬礼"}, Takes.NEW_CLAIMS),
"""
SALUTE_POLICY = POLICY.replace("narrow_link: {below: 32}", "power: {above: 1W}").replace("[log]", "[{do: salute}]")


def test_an_action_by_the_book_is_done_and_held_to_what_it_says_it_takes(tmp_path, monkeypatch):
    copy = with_rule(tmp_path)
    for name, before, after in (
        (
            "model.py",
            '    "release", "cancel", "requeue", "run_hook",',
            '    "release", "cancel", "requeue", "run_hook", "salute",',
        ),
        ("policies/action_kinds.py", "ACTION_KINDS: Mapping[ActionName, ActionKind] = {\n", SALUTE_KIND),
        ("enforcement/actions.py", "\n\nACTIONS: Mapping[ActionName, Action] = {\n", SALUTE),
    ):
        path = copy / "gpuguard" / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after, 1))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    with a_daemon(tmp_path, SALUTE_POLICY.replace("salute}", "salute, even_if_innocent: true}"), cwd=copy) as daemon:
        event = daemon.until("salute")[0]
        daemon.policy.write_text(SALUTE_POLICY)
        check = daemon.gpuguard("policy", "check", str(daemon.policy), cwd=copy)

    assert (event["outcome"], event["facts"]["policy"]) == ("done", "link")
    assert check.returncode == 1 and "even_if_innocent" in check.stdout


FAN = """DEVICE_COLUMNS = (
    DeviceColumn("FANS", "fan_speed", in_who=True, in_top_from=WIDE, width=6),
"""


def test_a_column_by_the_book_is_in_both_tables_of_devices(tmp_path, monkeypatch):
    copy = with_rule(tmp_path)
    path = copy / "gpuguard" / "views" / "columns.py"
    path.write_text(path.read_text().replace("DEVICE_COLUMNS = (\n", FAN, 1))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    gpuguard = Gpuguard(tmp_path, None, COLUMNS="130")
    start(str(tmp_path / "node"), "2xRTX4090")
    gpuguard("sim", "set", "--device", "1", "--field", "fan_speed=77%", cwd=copy)
    tables = [gpuguard(*words, cwd=copy).stdout for words in (["who"], ["top", "--once", "--mode", "compact"])]

    assert all("FANS" in table and "77%" in table for table in tables), tables


HOT = {  # a state by the book: file -> what stands there, and what stands there then
    "device_state.py": (
        ('"reserved", "asleep"]', '"reserved", "asleep", "hot"]'),
        (
            '            state = "asleep"\n',
            '            state = "asleep"\n        elif (device.temperature or 0) > 80:\n            state = "hot"\n',
        ),
    ),
    "views/who.py": (('"asleep": (N_(', '"hot": (N_("free, but hot"), "yellow"),\n    "asleep": (N_('),),
    "web/page/words.js": (('"asleep": "free, asleep"', '"hot": "free, but hot", "asleep": "free, asleep"'),),
}


def test_a_state_by_the_book_is_in_who_and_top(tmp_path, monkeypatch):
    copy = with_rule(tmp_path)
    for file, changes in HOT.items():
        path = copy / "gpuguard" / file
        text = path.read_text()
        for before, after in changes:
            assert before in text, file
            text = text.replace(before, after)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(copy))
    gpuguard = Gpuguard(tmp_path, None, COLUMNS="130")
    start(str(tmp_path / "node"), "2xRTX4090")
    gpuguard("sim", "set", "--device", "1", "--temperature", "85C", cwd=copy)

    seen = [gpuguard(*words, cwd=copy).stdout for words in (["who"], ["top", "--once"], ["who", "--json"])]
    states = [(device["state"], device["exact_state"]) for device in json.loads(seen[2])["devices"]]
    assert all("free, but hot" in text for text in seen[:2]), seen[:2]
    assert states == [("free", "free"), ("free", "hot")], "scripts know the plain state"


def test_the_columns_of_other_hosts_are_of_what_their_answers_tell():
    device = Device(**extremes(Device, 1) | {"parent_uuid": None, "processes": (), "index": 3})
    answer = to_json(a_snapshot(device), uses(a_snapshot(device)))["devices"][0]
    told = decode(HostDevice, answer).device

    assert [column.cell(told) for column in FLEET_COLUMNS] == [column.cell(device) for column in FLEET_COLUMNS]
    assert NOT_AVAILABLE not in [column.cell(told) for column in FLEET_COLUMNS]


def test_every_action_says_what_it_takes():
    assert ACTIONS.keys() == ACTION_KINDS.keys() == set(get_args(ActionName))


@pytest.mark.parametrize("command", ["check", "test"])
def test_a_rule_that_does_not_declare_what_it_needs_is_refused_with_the_reason(tmp_path, monkeypatch, command):
    copy = with_rule(tmp_path, NARROW_LINK.replace(", needs=RuleNeeds(frozenset({PCIE}))", ""))
    monkeypatch.setenv("PYTHONPATH", str(copy))
    (tmp_path / "policy_test.yaml").write_text(TEST)
    file = {"check": "policy.yaml", "test": "policy_test.yaml"}[command]

    done = Gpuguard(tmp_path, None)("policy", command, str(tmp_path / file), cwd=copy)

    assert done.returncode == {"check": 1, "test": 2}[command]
    assert "narrow_link judges by what is not read for it: pcie." in done.stdout
    assert "its class NarrowLinkRule must say in `needs`" in done.stdout


def test_every_rule_declares_what_it_judges_by():
    rules = [rule for name in RULES for rule in shown(name, RULES[name])]

    assert [(rule.kind.name, undeclared(rule)) for rule in rules if undeclared(rule)] == []
    assert all(rule.needs.fields <= rule.kind.needs.fields for rule in rules), "a recording reads what the kind names"


@pytest.mark.parametrize("name", NAMES)
def test_an_expression_declares_what_its_names_are_about(name):
    values = EXAMPLES | {NUMBER: "1", TEXT: "'x'"}
    kind = NAMES[name].type
    text = name if kind == TRUTH else f"'x' in {name}" if kind == TEXTS else f"{name} == {values[kind]}"
    rule = ExpressionRule(parse_expression(text))

    assert undeclared(rule) == ()
    assert rule.needs.host == (name in ("cpu", "host_memory", "network"))


@dataclass(frozen=True)
class Looks(Rule):
    """Looks at one thing behind three conditions, and has *said* what it needs."""

    at: str
    said: RuleNeeds = field(default_factory=RuleNeeds)
    kind = RuleKind("looks", innocent=True)

    @property
    def needs(self):
        return self.said

    def check(self, view):
        for device in view.snapshot.devices:
            if device.temperature < 40 and device.utilization > 60 and device.memory_used == 0:
                if self.at == "past of a field":
                    recent(view, device_subject(device), "memory_used", 60.0)
                else:
                    getattr(device if hasattr(device, self.at) else view, self.at)
        return ()


@pytest.mark.parametrize(
    ("at", "needs", "missing"),
    [
        *((names[-1], RuleNeeds(fields=frozenset({group})), group) for group, names in GROUPED_FIELDS.items()
          if group not in WHO_FIELDS),
        ("host", RuleNeeds(host=True), "RuleView.host"),
        ("machine", RuleNeeds(machine=()), "RuleView.machine"),
        ("scheduled", RuleNeeds(scheduler=True), "RuleView.scheduled"),
        ("gpu_seconds", RuleNeeds(gpu_seconds=(60.0,)), "RuleView.gpu_seconds"),
        ("past of a field", RuleNeeds(past=(("memory_used", 60.0),)), "RuleView.past"),
    ],
)  # fmt: skip
def test_whatever_a_rule_looks_at_must_be_declared(at, needs, missing):
    looks = Looks(at)

    assert (undeclared(looks), undeclared(replace(looks, said=needs))) == ((missing,), ())


def test_a_past_of_what_is_not_read_is_not_declared():
    assert undeclared(Looks("name", RuleNeeds(past=(("pcie_tx", 60.0),)))) == (PCIE,)


def test_the_fields_of_a_group_are_those_that_a_backend_reads_for_it(tmp_path):
    backend = start(str(tmp_path / "node"), "1xA100-80GB")
    for group in ALL_FIELDS - WHO_FIELDS & GROUPED_FIELDS.keys() - {NVLINK, NVLINK_FLOW}:  # which need a second look
        plain, more = (vars(one(backend, 0, groups)) for groups in (WHO_FIELDS, WHO_FIELDS | {group}))
        read = {name for name, value in more.items() if value is not None and plain[name] is None}

        assert read <= set(GROUPED_FIELDS.get(group, ())), group


def questions(module: ast.AST) -> list[str]:
    """The classes of rules for which an isinstance asks."""
    calls = (node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance")
    names = (name for call in calls for name in ast.walk(call.args[1]) if isinstance(name, ast.Name))
    return [name.id for name in names if name.id.endswith("Rule")]


def test_no_isinstance_asks_which_rule_it_is():
    assert [(path.name, asked) for path in modules() if (asked := questions(tree(path)))] == []
    assert questions(ast.parse("isinstance(rule, MemoryRule | view.PowerRule)")) == ["MemoryRule"]


def test_what_is_written_for_people_names_the_rules_and_actions_that_say_so_of_themselves():
    innocent = ", ".join(name for name, rule in RULES.items() if rule.kind.innocent)
    *harmful, last = (name for name in ACTIONS if name in HARMFUL)
    *protecting, least = (name for name, rule in RULES.items() if rule.kind.protects_others)
    newest = " and ".join(sorted((name for name, rule in RULES.items() if rule.kind.newest_first), reverse=True))
    page = " ".join((ROOT / "docs" / "policies.md").read_text().replace("`", "").split())
    keys = " ".join(f"{StepKeys.__doc__} {PolicyKeys.__doc__} {BreakerKeys.__doc__}".split())

    assert f"{', '.join(harmful)} or {last} in a rule about the state of a GPU ({innocent})" in page
    assert f"to {', '.join(harmful)} or {last} for the state of a GPU (rules {innocent})" in keys
    assert f"protects others: {', '.join(protecting)} or {least}" in keys
    assert f"protects others: {', '.join(protecting)} or {least}" in page
    assert f"the newest for {newest}, else" in page and f"the newest for the rules {newest}, else" in keys
