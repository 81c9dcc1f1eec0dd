"""A sentence of a record or an answer is shown by its key, whatever its English words are, and whoever wrote it."""

import ast
import copy
import json

import pytest
from sentences_said import faults_heard
from sources import module_name, modules, tree

from gpuguard.jsonio import decode, loads
from gpuguard.locale import catalogue, translated, use_english, use_language_of_user
from gpuguard.locale.messages import (
    MESSAGE_IDS,
    MOST_LEVELS,
    Sentence,
    all_of,
    cut,
    dumps,
    nsentence,
    plain,
    sentence,
)
from gpuguard.model import Gap

WORDS = {"a.uses": "{user} 用 {what}", "a.gpus": "{number} 块 GPU", "; ": "；"}


def said(text: str) -> str:
    return translated(text, lambda key: WORDS.get(key, key))


def stored(text: str) -> str:
    """The text as it comes out of a file."""
    found: str = loads(dumps({"rows": [{"why": text}]}))["rows"][0]["why"]
    return found


def uses(user: str, number: int) -> Sentence:
    return sentence(
        "a.uses", "{user} uses {what}", user=user, what=nsentence("a.gpus", "{number} GPU", "{number} GPUs", number)
    )


def test_a_sentence_is_its_english_text_for_everything_that_takes_text():
    text = uses("bob", 2000)

    assert text == "bob uses 2,000 GPUs"
    assert f"{text}." == "bob uses 2,000 GPUs." and not isinstance(f"{text}.", Sentence)
    assert json.loads(json.dumps({"why": text})) == {"why": "bob uses 2,000 GPUs"}
    assert decode(Gap, {"device": None, "field": "x", "reason": text}).reason is text


@pytest.mark.parametrize("text", [uses("bob", 1), all_of([uses("al", 2), "and that"]), all_of(["no message"])])
def test_a_file_an_error_and_a_copy_keep_the_message_beside_the_text(text):
    for kept in (stored(text), copy.deepcopy(text), str(ValueError(text)), stored(stored(text))):
        assert kept == text
        assert said(kept) == said(text)
        assert getattr(kept, "values", None) == getattr(text, "values", None)


def test_a_sentence_is_shown_by_its_key_with_the_sentences_in_its_places():
    assert said(stored(uses("bob", 3))) == "bob 用 3 块 GPU"
    assert said(stored(all_of([uses("bob", 1), uses("al", 2)]))) == "bob 用 1 块 GPU；al 用 2 块 GPU"


def test_a_record_with_other_english_words_is_shown_in_the_same_chinese():
    earlier = Sentence("bob has got 3 GPUs", "a.uses", {"user": "bob", "what": uses("", 3).values["what"]})

    assert said(stored(earlier)) == "bob 用 3 块 GPU"


@pytest.mark.parametrize("text", ["bob uses 3 GPUs", Sentence("bob uses it", "a.later", {"user": "bob"})])
def test_a_text_without_a_key_or_with_one_of_another_version_is_shown_as_it_was_written(text):
    shown = said(stored(text))

    assert shown == text and not isinstance(shown, Sentence)


@pytest.mark.parametrize(
    "ids",
    [
        3, [], {"x": 3}, {"x": {}}, {"x": {"id": 3, "values": {}}}, {"x": {"id": "a.uses"}},
        {"x": {"id": "a.uses", "values": []}}, {"y": {"id": "a.gpus", "values": {}}},
    ],
)  # fmt: skip
def test_what_is_no_message_in_a_foreign_record_counts_for_nothing(ids):
    content = loads(json.dumps({"why": "x", MESSAGE_IDS: ids}).encode())

    assert content == {"why": "x"}
    assert said(content["why"]) == "x"


def test_the_values_of_a_foreign_record_are_texts_and_never_a_form():
    values = {"user": "{what}{0}%s{user.__class__}", "what": {"text": "y", "id": "a.uses", "values": {"user": 7}}}
    content = loads(json.dumps({"why": "x", MESSAGE_IDS: {"x": {"id": "a.uses", "values": values}}}).encode())

    assert said(content["why"]) == "{what}{0}%s{user.__class__} 用 {user} 用 {what}"


def test_sentences_in_sentences_end_after_some_levels():
    message = {"text": "deep", "id": "a.uses", "values": {"user": "al"}}
    for _ in range(2 * MOST_LEVELS):
        message = {"text": "x", "id": "a.uses", "values": {"user": "al", "what": message}}

    text = loads(json.dumps({"why": "x", MESSAGE_IDS: {"x": message}}).encode())["why"]

    assert said(text).count("al 用") == MOST_LEVELS


def test_a_sentence_that_fits_keeps_its_message_and_the_beginning_of_a_longer_one_is_a_text():
    text = uses("bob", 1)

    assert cut(text, len(text)) is text
    assert cut(text, 3) == "bob" and not isinstance(cut(text, 3), Sentence)


def test_plain_leaves_texts_alone():
    found = plain({"a": [uses("bob", 1), 7], "b": (uses("al", 1),)})

    assert found == {"a": ["bob uses 1 GPU", 7], "b": ("al uses 1 GPU",)}
    assert {type(found["a"][0]), type(found["b"][0])} == {str}


def test_a_user_of_another_language_sees_it_by_the_catalogue_and_a_program_in_english():
    text = stored(sentence("because", "{what}: {why}", what="x", why="y"))
    use_language_of_user({"LANG": "zh_CN.UTF-8", "LANGUAGE": "zh_CN"})
    try:
        assert translated(text) == catalogue("zh_CN").gettext("because").format(what="x", why="y") != text
    finally:
        use_english()
    assert translated(text) is text


WRONG = {
    "as it should be": ("claim.shared", "shared by {users}", {"users": "al"}, None),
    "of one": ("count.gpus", "{number} GPU", {"number": "1"}, None),
    "key": (
        "claim.Shared",
        "shared by {users}",
        {"users": "al"},
        "no sentence of the catalogue has the key claim.Shared",
    ),
    "words": ("claim.shared", "used by {users}", {"users": "al"}, "claim.shared has other words in the catalogue"),
    "place": ("claim.shared", "shared by {users}", {}, "a place of claim.shared has no value"),
    "value": ("claim.shared", "shared by {users}", {"users": None}, "a place of claim.shared has no value"),
}


@pytest.mark.parametrize(("key", "english", "values", "fault"), WRONG.values(), ids=WRONG)
def test_in_every_test_a_sentence_of_gpuguard_is_compared_with_the_catalogue(key, english, values, fault):
    code = "lambda *words, **values: sentence(*words, **values)"
    for module in ("gpuguard.select", "test_sentences"):
        text = eval(code, {"__name__": module, "sentence": sentence})(key, english, **values)
        heard = faults_heard()

        assert heard == ([f"{module}:1: {fault}: {text}"] if fault and module == "gpuguard.select" else [])


def texts_without_a_key(module: ast.AST) -> list[str]:
    """Reasons of gaps, findings and refusals, and messages of events, that are made as plain texts."""
    found = []
    for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
        name = (
            call.func.id
            if isinstance(call.func, ast.Name)
            else call.func.attr
            if isinstance(call.func, ast.Attribute)
            else ""
        )
        words = (
            [*call.args[RECORDED[name] :], *(key.value for key in call.keywords if key.arg in TEXTS)]
            if name in RECORDED
            else []
        )
        for word in words:
            if isinstance(word, ast.JoinedStr) or (isinstance(word, ast.Constant) and " " in str(word.value)):
                found.append(f"line {word.lineno}: {name}() gets a text without a key")
    return found


RECORDED = {"Gap": 2, "Event": 7, "Finding": 2, "Verdict": 2}  # how many arguments come before those that are texts
TEXTS = ("reason", "message", "why")


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_what_is_recorded_for_people_has_a_key(path):
    assert texts_without_a_key(tree(path)) == []


def test_a_planted_text_without_a_key_is_found():
    assert texts_without_a_key(ast.parse('Gap(uuid, "memory", f"no {x}")')) == [
        "line 1: Gap() gets a text without a key"
    ]
    assert texts_without_a_key(ast.parse('Event(time=1, message="it is gone")'))
    assert texts_without_a_key(ast.parse('Gap(uuid, "memory", sentence("a.b", "no {x}", x=x))')) == []
