"""Thousands of damaged policy files: none crashes the decoder, and none is accepted with another meaning than it shows.

The second opinion is shown_by(): all keys and texts as YAML's own composer gives them, with nothing of the decoder, and
with the few spellings that mean the same made equal.  Two files mean the same if, and only if, they read the same.
"""

import random
import re
from dataclasses import replace

import pytest
import yaml
from chances import luck, often
from policies import GROUPS, USERS, good, read

from gpuguard.policy_files.loader import PolicyFile

COUNT = often(10_000)

ORIGINAL = """\
version: 1
mode: observe
policies:
  - name: idle-gpus
    when: {idle: {below: 5%, cpu_below: 2%}}
    for: 2h
    start_grace: 30m
    only: {groups: [staff, students], kinds: [batch, container]}
    except: {users: [no, alice, 1005], until: 2026-12-24}
    hours: 22:00-07:30
    days: [mon, tue]
    claimed_above: 80%
    at_most: {users: 2, processes: 7}
    steps:
      - warn
      - {after: 30m, do: notify, to: ops}
      - {after: 90m, do: terminate}
      - {after: 60s, do: kill}
  - name: memory
    when: {all: [{memory: {above: 40GiB, per: user}}, {utilization: {below: 10%, per: process}}]}
    mode: enforce
    devices_at_least: 2
    cooldown: 15m
    steps: [warn, {do: checkpoint, signal: USR2, after: 5m}, {do: pause, after: 1h}]
notify:
  ops: {email: ops@example.org}
"""

WORDS = [
    "enforce", "observe", "kill", "terminate", "no", "yes", "~", "null", "true", "010", "1e3", ".nan", "22:00", "5",
    "1s", "99%", "2GiB", "{}", "[]", "''", '"5%"', "root", "alice", "0", "&a", "*a", "!!int", "<<", "?", "|", ">",
    "---",
    "...", "%YAML 1.1", "#", ": ", "- ", "\t", "\r", "\u2028", "\x85", "\x00", "\u200b", "\ufeff",
    "[" * 40, "{a: " * 20, ",",
]  # fmt: skip


def replace_word(text: str, dice: random.Random) -> str:
    place = dice.choice(list(re.finditer(r"[\w%:.-]+", text)))
    return text[: place.start()] + dice.choice(WORDS) + text[place.end() :]


def insert_word(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + dice.choice(WORDS) + text[place:]


def drop_characters(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + text[place + dice.randrange(1, 4) :]


def change_character(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + dice.choice("abz09%:{}[],-# \n'\"") + text[place + 1 :]


def repeat_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    lines.insert(dice.randrange(len(lines)), dice.choice(lines))
    return "".join(lines)


def drop_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    del lines[dice.randrange(len(lines))]
    return "".join(lines)


def indent_line(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    place = dice.randrange(len(lines))
    lines[place] = " " * dice.randrange(1, 4) + lines[place] if dice.random() < 0.5 else lines[place].removeprefix("  ")
    return "".join(lines)


def swap_words(text: str, dice: random.Random) -> str:
    words = list(re.finditer(r"[\w%:.-]+", text))
    first, second = sorted(dice.sample(range(len(words)), 2))
    a, b = words[first], words[second]
    return text[: a.start()] + b[0] + text[a.end() : b.start()] + a[0] + text[b.end() :]


def add_comment(text: str, dice: random.Random) -> str:
    lines = text.splitlines()
    place = dice.randrange(len(lines))
    lines[place] += "  # " + dice.choice(["mode: enforce", "why not", "}", "'", "张三"])
    return "\n".join(lines) + "\n"


def add_blanks(text: str, dice: random.Random) -> str:
    return dice.choice([
        text.replace(", ", ",  "), text.replace("\n", "\n\n"), text.replace("{", "{ "), re.sub(r"\r?\n", "\r\n", text),
        text + "\n\n", "\n" + text,
    ])  # fmt: skip


def quote_word(text: str, dice: random.Random) -> str:
    place = dice.choice(list(re.finditer(r"(?<=: )[\w%.-]+(?=[,}\n])", text)))
    return f"{text[: place.start()]}'{place[0]}'{text[place.end() :]}"


HARMLESS = [add_comment, add_blanks, quote_word]
HARMFUL = [
    replace_word, insert_word, drop_characters, change_character, repeat_line, drop_line, indent_line, swap_words,
]  # fmt: skip


def meaning(file: PolicyFile) -> PolicyFile:
    """What was decoded, without what belongs to the text alone."""
    return replace(file, fingerprint="", warnings=())


def shown_by(text: str) -> object:
    """What a plain YAML parser sees: mappings of texts, where a key that stands there twice leaves a trace."""
    return reading(plain(yaml.compose(text, Loader=yaml.BaseLoader)))


def plain(node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), plain(value)) for key, value in node.value]
        return dict(pairs) if len(dict(pairs)) == len(pairs) else {**dict(pairs), "twice": str(pairs)}
    return [plain(each) for each in node.value] if isinstance(node, yaml.SequenceNode) else node.value


SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
SETS = {"users", "groups", "kinds", "days"}
DEFAULTS = {  # key -> what its absence means, where it can stand in a file like the original
    "mode": "observe", "start_grace": 0.0, "cooldown": 900.0, "devices_at_least": "1", "after": 0.0, "for": 30.0,
    "signal": "USR1", "even_if_innocent": "false", "memory_above": "1GiB", "share": "80%", "window": "fixed",
}  # fmt: skip


def reading(value: object, key: str = "") -> object:
    """A value that is equal for two files that say the same; hashable."""
    if isinstance(value, dict):
        if key == "":  # a policy without a mode has the file's
            value = {"mode": "observe", **value}
            policies = value.get("policies")
            if isinstance(policies, list):
                own = [{"mode": value["mode"], **each} if isinstance(each, dict) else each for each in policies]
                value = {**value, "policies": own}
        inside = {name: reading(each, name) for name, each in value.items()}
        if key == "policies":
            inside = {"for": 30.0, **inside}
        if key == "at_most":
            inside = {"users": "3", "processes": "5", **inside}
        kept = {name: each for name, each in inside.items() if key in ("", "at_most") or DEFAULTS.get(name) != each}
        if key == "policies" and "mode" in inside:
            kept["mode"] = inside["mode"]
        return frozenset(kept.items())
    if isinstance(value, list):
        items = [reading({"do": each} if key == "steps" and isinstance(each, str) else each, key) for each in value]
        return frozenset(items) if key in SETS else tuple(items)
    text = str(value)
    if key == "users":
        return str(USERS.get(text, text))
    if parts := re.fullmatch(r"(?:[0-9.]+(?:ms|[smhdw]))+", text.strip()):
        return sum(float(n) * SECONDS[unit] for n, unit in re.findall(r"([0-9.]+)(ms|[smhdw])", parts[0]))
    quantity = re.fullmatch(r"([0-9.]+) ?([A-Za-z%]+)", text.strip())
    if key == "signal":
        return text.upper().removeprefix("SIG")
    return (float(quantity[1]), quantity[2]) if quantity else text


def damaged(number: int) -> tuple[str, bool]:
    """A damaged text, and whether all that was done to it is harmless."""
    dice = luck(number)
    harmless = number % 5 == 0
    text = ORIGINAL
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        text = dice.choice(HARMLESS if harmless else HARMFUL)(text, dice)
    return text, harmless


@pytest.fixture(scope="module")
def original() -> PolicyFile:
    return meaning(good(ORIGINAL))


def test_a_damaged_file_is_refused_or_means_what_it_shows():
    meanings: dict[object, PolicyFile] = {}
    readings: dict[str, object] = {}
    original = meaning(good(ORIGINAL))
    for number in range(COUNT):
        text, harmless = damaged(number)
        file = read(text)
        assert bool(file.policies) != bool(file.faults), f"mutation {number}: refused, or policies?\n{text}"
        if harmless:
            assert meaning(file) == original, f"mutation {number} is harmless:\n{text}"
        elif file.policies:
            shown = shown_by(text)
            assert meanings.setdefault(shown, meaning(file)) == meaning(file), f"{number} reads like another:\n{text}"
            same = readings.setdefault(repr(meaning(file)), shown)
            assert same == shown, f"{number} was taken for another\n{text}"


@pytest.mark.parametrize("text", ["---\n" + ORIGINAL, ORIGINAL + "...\n", "\ufeff" + ORIGINAL, "# why\n" + ORIGINAL])
def test_what_may_stand_around_a_document_changes_nothing(text, original):
    assert meaning(read(text)) == original


def test_both_kinds_of_damage_occur():
    texts = [damaged(number)[0] for number in range(0, 2000, 6)]
    accepted = [text for text in texts if read(text).policies]

    assert 50 < len(accepted) < len(texts) - 50


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mode: observe", "mode: enforce"), ("for: 2h", "for: 2m"), ("no, alice", "alice"), ("no, alice", "on, alice"),
        ("above: 40GiB", "above: 40GB"), ("22:00-07:30", "20:00-07:30"), ("2026-12-24", "2026-12-25"), ("[mon", "[wed"),
        ("all:", "any:"), ("do: pause", "do: resume"), ("signal: USR2", "signal: HUP"), ("[warn, ", "["),
        ("processes: 7", "processes: 8"), ("ops@example.org", "root@example.org"), ("batch, ", ""), ("1005", "1006"),
        ("after: 60s", "after: 61s"), ("below: 5%", "below: 5.5%"), (", students", ""),
        ("cooldown: 15m", "cooldown: 0s"),
    ],
)  # fmt: skip
def test_a_changed_word_is_a_changed_meaning(before, after, original):
    assert before in ORIGINAL
    assert meaning(good(ORIGINAL.replace(before, after, 1))) != original


def test_a_decoder_that_ignores_what_it_does_not_know_would_be_caught():
    text = ORIGINAL.replace("    for: 2h\n", "    for: 2h\n    unknown: 3\n")

    assert shown_by(text) != shown_by(ORIGINAL)
    assert shown_by(text.replace("unknown: 3", "for: 2h")) != shown_by(ORIGINAL)
    assert read(text).policies == ()


def test_all_bytes_are_survived():
    dice = luck(1)
    for _ in range(300):
        content = bytearray(ORIGINAL.encode())
        for _ in range(dice.randrange(1, 6)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        file = read(bytes(content))
        assert bool(file.policies) != bool(file.faults)


def test_the_names_in_it_are_those_of_the_accounts():
    assert {"alice", "no"} < USERS.keys() and {"staff", "students"} <= GROUPS.keys()
