"""gpuguard policy check, explain, rules and schema, as one types them; which policies contradict each other."""

import json
import re
from typing import Any

import pytest
import yaml
from pages import blocks
from policies import document, good, marked
from policy_page import PAGE, with_lists
from test_policyfile import EVERY_KEY

from gpuguard.enforcement.actions import ACTION_KEYS, ACTIONS
from gpuguard.enforcement.by_hand import BY_HAND
from gpuguard.notify.targets import TARGETS
from gpuguard.policies.policy import KILL_AFTER
from gpuguard.policies.rules import RULES
from gpuguard.policy_files.loader import parse
from gpuguard.views.policy import sentences
from gpuguard.views.policy_language import SECTIONS, json_schema, key_texts
from gpuguard.yaml_files.decoder import keys_of

NOUNS = {name: noun for nouns in SECTIONS.values() for name, noun in nouns.items()}
EXAMPLES = [block.text for block in blocks(PAGE.read_text(encoding="utf-8"), "policies.md") if block.language == "yaml"]


def write(tmp_path, text):
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_right_file_is_ok(gpuguard, tmp_path):
    done = gpuguard("policy", "check", path := write(tmp_path, document(more="mode: enforce")))

    assert (done.returncode, done.stdout) == (0, f"{path}: ok, 1 policy, 1 enforced.\n")


def test_a_wrong_file_shows_every_fault_with_line_column_and_advice(gpuguard, tmp_path):
    path = write(tmp_path, document(when="{idel: {below: 5%}}", more="for: 2"))
    done, explained = gpuguard("policy", "check", path), gpuguard("policy", "explain", path)

    assert (done.returncode, explained.returncode, explained.stdout) == (1, 1, "")
    assert "'idel' is no rule." in explained.stderr
    assert done.stdout.splitlines() == [
        f"{path}:4:12: 'idel' is no rule.",
        "      when: {idel: {below: 5%}}",
        "             ^",
        "  Did you mean 'idle'?",
        f"{path}:5:10: for: '2' has no unit: write a duration like '1h30m' (units: ms, s, m, h, d, w).",
        "      for: 2",
        "           ^",
        f"{path}: 2 faults.",
    ]


def test_warnings_count_only_when_asked_for(gpuguard, tmp_path):
    path = write(tmp_path, document(when="{memory: {above: 100%}}"))
    done, strict = gpuguard("policy", "check", path), gpuguard("policy", "check", "--strict", path)

    assert (done.returncode, strict.returncode) == (0, 1)
    assert f"warning: {path}:4:28: memory can never fire" in done.stdout


def test_check_speaks_json(gpuguard, tmp_path):
    done = gpuguard("policy", "check", "--json", write(tmp_path, document(more="form: 2h")))
    content = json.loads(done.stdout)

    assert (content["schema"], content["ok"], done.returncode) == (1, False, 1)
    assert (content["faults"][0]["line"], content["faults"][0]["column"]) == (5, 5)


def test_neither_the_name_of_a_file_nor_what_stands_in_it_steers_the_terminal(gpuguard, tmp_path):
    path = write(tmp_path, document(more="only: {users: [\x1b[31m]}") + "mode: '\u202e'\n")
    absent = gpuguard("policy", "check", str(tmp_path / "none\x1b[31m.yaml"))
    printed = absent.stdout + gpuguard("policy", "check", path).stdout + gpuguard("policy", "explain", path).stderr

    assert absent.returncode == 1 and "cannot be read: No such file or directory" in absent.stdout
    assert not {"\x1b", "\u202e"} & set(printed)


def test_of_a_long_line_only_the_place_is_shown(gpuguard, tmp_path):
    path = write(tmp_path, document(more=f"only: {{users: [{'root, ' * 2000}«]}}".replace("«", "no-such-user")))
    lines = gpuguard("policy", "check", path).stdout.splitlines()

    assert max(map(len, lines[1:3])) < 130
    assert lines[1][lines[2].index("^") :].startswith("no-such-user")


def test_of_very_many_faults_the_first_are_shown(gpuguard, tmp_path):
    done = gpuguard("policy", "check", write(tmp_path, "version: 1\n" + "".join(f"k{n}: 1\n" for n in range(200))))

    assert done.stdout.count(" is no key of ") == 50 - 1
    assert done.stdout.endswith(": 201 faults, the first 50 are shown.\n")


def test_explain_says_who_when_and_what(gpuguard, tmp_path):
    text = EVERY_KEY.replace("alice, 1005", "root, 1005").replace("[staff]", "[root]").replace("[no]", "[0]")
    done = gpuguard("policy", "explain", write(tmp_path, text))

    assert done.returncode == 0, done.stderr
    for line in (
        "When this holds for 2h without a break:",
        "(below: 5%)",
        "It spares users root until 2026-12-24 18:00.",
        "Processes and claims younger than 30m are innocent: the time above begins after that.",
        "It must hold on 2 GPUs of the same user at once.",
        "Only 22:00 to 07:30 on mon, tue",
        "Only while more than 80% of the GPUs are claimed.",
        "For what has just started the first step comes after 2h30m.\n  Then, counted from when it began:\n",
        "began:\n    after 2h     warn: tell the user",
        "after 2h30m  notify: send a message",
        "after 4h     terminate: ask the process to end, by SIGTERM",
        "after 4h1m   kill:",
        "At most 1 user and 2 processes are hit at once",
        "If that would be more users, none is hit",
        "each process and claim for at most 72 h in 7 days",
        "`gpuguard keep` spares no user who asks for it",
        "left alone for 15m",
        "Dry run: mode is observe",
    ):
        assert line in done.stdout


def test_explain_says_what_unclaimed_leaves_out_unless_the_file_has_it():
    left_out = "GPUs that another user has claimed are left out; `on_claimed: true` has them, too."

    assert any(left_out in line for line in sentences(good(document(when="{unclaimed: {}}"))))
    assert not any(left_out in line for line in sentences(good(document(when="{unclaimed: {on_claimed: true}}"))))


@pytest.mark.parametrize("action", ACTION_KEYS)
def test_explain_knows_every_action(action):
    needed = {"notify": "to: ops", "run_hook": "hook: tell"}.get(action, "after: 1h")
    steps = f"[warn, {{do: terminate}}, {{after: 1h, do: log}}, {{do: {action}, {needed}}}]"
    file = good(document(steps=steps, top="notify: {ops: {email: a@b.c}, tell: {hook: {command: [/bin/true]}}}"))

    assert any(f"{action}: " in line for line in sentences(file))


def test_explain_says_that_a_terminal_has_more_time_where_anybody_is_ended():
    more = "What is on a terminal, a notebook or being debugged has 10m more before it is ended or stopped."

    assert more in sentences(good(document(steps="[warn, {do: terminate}]")))
    assert more not in sentences(good(document(steps="[warn]")))


def test_rules_shows_everything_or_what_is_named(gpuguard):
    everything, idle = (gpuguard("policy", "rules", *name).stdout.splitlines() for name in ((), ("idle",)))
    unknown = gpuguard("policy", "rules", "idel")

    assert [name for name in NOUNS if name not in everything] == []
    assert all(line.isprintable() for line in everything)
    assert "idle" in idle and "memory" not in idle
    assert (unknown.returncode, "Did you mean 'idle'?" in unknown.stderr) == (2, True)


def test_rules_speaks_json(gpuguard):
    content = gpuguard.json("policy", "rules")

    assert {rule["name"] for rule in content["rules"]} == set(RULES)
    assert {action["name"] for action in content["actions"]} == set(ACTIONS)
    first = content["rules"][0]["keys"][0]
    assert (first["key"], first["written"], first["required"]) == ("above", "like 40GiB, 90% or share", True)


@pytest.mark.parametrize("name", NOUNS)
def test_every_key_has_help(name):
    keys = keys_of(NOUNS[name])[0]

    assert set(keys) - set(key_texts(NOUNS[name])) == (set(keys) if name in ("unclaimed",) and not keys else set())


def test_the_page_has_every_key_and_its_lists_are_fresh():
    page = PAGE.read_text(encoding="utf-8")
    own = [NOUNS[name] for name in ("file", "policy", "only", "except", "at_most", "interval", "step")]

    assert page == with_lists(page), "run scripts/generate"
    assert [key for noun in own for key in keys_of(noun)[0] if not re.search(rf"\b{key}\b", page)] == []
    assert [name for name in (*RULES, *ACTION_KEYS, *TARGETS) if f"- `{name}`: " not in page] == []


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_of_the_page_are_right(text):
    file = parse(text, "example")

    assert [fault.text for fault in (*file.faults, *file.warnings)] == []


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether *value* keeps to *schema*: the part of draft 2020-12 that we write."""
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    if "anyOf" in schema:
        return any(valid(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[kind]) for kind in wanted):
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(valid(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        properties, more = schema.get("properties", {}), schema["additionalProperties"]
        counted = schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value))
        needed = all(key in value for key in schema.get("required", ()))
        return counted and needed and all(
            valid(each, properties[key]) if key in properties else bool(more) and valid(each, more)
            for key, each in value.items()
        )  # fmt: skip
    return not isinstance(value, int) or value >= schema.get("minimum", value)


def as_an_editor_reads(text: str) -> Any:
    """Editors know YAML 1.2: 22:00-07:30 and 2026-12-24 are texts there."""
    return yaml.load(text, type("Editor", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {
        first: [(tag, rule) for tag, rule in rules if tag.endswith((":int", ":bool", ":null"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }}))  # fmt: skip


@pytest.mark.parametrize("text", [*EXAMPLES, EVERY_KEY, document()])
def test_the_schema_takes_what_the_decoder_takes(text):
    assert valid(as_an_editor_reads(text), json_schema())


@pytest.mark.parametrize(
    "text",
    [
        document(more="for: 2"), document(more="form: 2h"), document(when="{idel: {below: 5%}}"),
        document(steps="[warm]"),
        document(steps="[notify]"), document(steps="warn"), document(when="{}"), document(top="mode: enforc"),
        document(when="{idle: {below: 5}}"), document(when="{idle: {}}"), document(steps="[{do: warn, to: x}]"),
    ],
)  # fmt: skip
def test_the_schema_refuses_the_plainest_faults(text):
    assert not valid(as_an_editor_reads(text), json_schema())


def test_the_schema_is_printed(gpuguard):
    content = json.loads(gpuguard("policy", "schema").stdout)

    assert content["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert content == json.loads(json.dumps(json_schema()))


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
        ("only: {users: [alice, bob]}", "only: {users: [bob, alice]}", SAME),
        ("hours: '08:00-20:00'", "hours: '18:00-22:00'", SAME),
        ("hours: '22:00-06:00'", "hours: '05:00-07:00'", SAME),
        ("days: [mon, tue]", "days: [tue, wed]", SAME),
        ("only: {users: [alice, bob]}", "only: {users: [bob, on]}", SOME),
        ("only: {devices: [0, 1]}", "only: {devices: [1, 2]}", SOME),
        ("only: {users: [alice]}", "only: {devices: [0]}", SOME),
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
        ("only: {kinds: [interactive]}", "only: {kinds: [batch]}"),
        ("hours: '08:00-20:00'", "hours: '20:00-08:00'"),
        ("days: [mon]", "days: [tue]"),
        ("claimed_above: 50%", "claimed_above: 80%"),
        ("except: {users: [alice]}", "only: {users: [alice]}"),
        ("only: {groups: [students]}", "except: [{users: [bob]}, {groups: [students]}]"),
        ("only: {users: [alice]}", "only: {groups: [staff]}"),
        ("only: {devices: [0]}", "only: {models: ['A100*']}"),
        ("except: {groups: [staff]}", "only: {users: [alice]}"),
        ("except: {models: ['A*']}", "only: {models: ['A100*']}"),
        ("except: {devices: [0]}", "only: {models: ['A100*']}"),
        ("except: {users: [alice]}", "except: {groups: [staff]}, only: {users: [alice]}"),
    ],
)
def test_policies_that_have_nobody_for_certain_in_common_are_two(first, second):
    assert warnings(two(first, second)) == []


SOME_USERS = "only: {users: [alice]}"
SOON = ("[warn, {after: 1h, do: terminate}]", "[warn, {after: 10m, do: terminate}]")


@pytest.mark.parametrize(
    "text",
    [
        two("", SOME_USERS, steps=SOON),
        two("", SOME_USERS, when=(IDLE, "{idle: {below: 20%}}")),
        two("", "", steps=("[warn]", "[{after: 1h, do: warn}]")),
        two("", "", when=(IDLE, "{unclaimed: {on_claimed: true}}")),
        two("mode: observe", "mode: enforce"),
        two("mode: enforce", "mode: observe"),
        two("", "mode: enforce"),
    ],
    ids=["sooner", "stricter", "ends nobody", "another rule", "a rehearsal", "a rehearsal behind", "observes unsaid"],
)
def test_policies_that_refine_each_other_are_no_contradiction(text):
    assert warnings(text) == []


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


@pytest.mark.parametrize(("other", "turn"), [("a", 1), ("b", -1)])
def test_a_milder_policy_for_some_changes_nothing_wherever_it_stands(other, turn):
    late = ("[warn, {after: 10m, do: terminate}]", "[warn, {after: 5h, do: terminate}]")[::turn]
    [said] = warnings(two(*("", SOME_USERS)[::turn], steps=late, when=MARKED[::turn]))

    assert said == f"{other!r} ends the same processes for idle after 1h10m, so this one, after 6h, changes nothing."


def test_an_exemption_that_another_policy_undoes():
    assert warnings(two("except: «{users: [alice]}", "")) == ["whom this spares, 'b' ends for idle all the same."]
    assert warnings(two("", "except: «{users: [alice]}")) == ["whom this spares, 'a' ends for idle all the same."]


@pytest.mark.parametrize(
    "spared", ["devices: [1]", "users: [bob]", "users: [bob], kinds: [batch]", "users: [alice], until: 2999-01-01"]
)
def test_an_exemption_of_others_or_that_ends_one_day_leaves_one_policy_too_many(spared):
    [said] = warnings(two(f"except: {{{spared}}}", "only: {users: [alice], devices: [0]}", when=MARKED))

    assert said == f"'a' {NOTHING}"


def test_rules_that_say_whom_they_mean_are_compared_with_their_equals_alone():
    python = "{command: {executables: ['/usr/bin/python']}}"
    ruby = python.replace("python", "ruby")

    assert warnings(two("", "", when=(python, ruby))) == []
    assert warnings(two("", "", when=(python, python.replace("{exe", "«{exe")))) == [
        f"'a' {SAME}".replace("idle", "command")
    ]


def test_what_is_said_of_the_time_before_a_kill_is_the_time_that_is_kept():
    kept = f"{KILL_AFTER:.0f} s"

    assert kept in BY_HAND["kill"]
    assert kept in (ACTION_KEYS["kill"].__doc__ or "")


def test_rules_knows_every_key_of_a_file_and_its_advice_is_no_fault(gpuguard, tmp_path):
    assert "A key of policy: only then, local time, as in 22:00-07:30." in gpuguard("policy", "rules", "hours").stdout
    assert {line for line in gpuguard("policy", "rules", "mode").stdout.splitlines() if line and line[0] != " "} == {
        "mode (observe or enforce)"
    }

    path = tmp_path / "p.yaml"
    path.write_text("version: 1\npolicies: [{name: p, when: {idle: {below: 5%}}, days: mon-fri, steps: [warn]}]\n")
    said = gpuguard("policy", "check", str(path)).stdout + gpuguard("policy", "check", str(path)).stderr
    assert "days: 'mon-fri' is no choice: write one of mon, tue" in said
    assert "[mon-fri]" not in said
