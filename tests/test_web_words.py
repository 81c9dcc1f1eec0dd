"""The words of the page: the same in both languages, and no sentence that gpuguard writes is left in English.

They are JSON behind a line of JavaScript, so that what can be checked needs no browser.
"""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from queues import a_ticket
from sources import PACKAGE
from worlds import a_bad_day, shown

from gpuguard import device_state
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.locale.sentences import phrases
from gpuguard.model import ActionName, EventKind
from gpuguard.policies.rules import RULES
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.reasons import reservation_text, start_text
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.request import Request
from gpuguard.web.server import chinese_words

PAGE = PACKAGE / "web" / "page"
SOURCE = (PAGE / "words.js").read_text(encoding="utf-8")
WORDS: dict[str, dict[str, Any]] = json.loads(SOURCE.partition("const WORDS = ")[2].rstrip().rstrip(";"))
NOW = 1_700_000_000.0
DEVICE = a_device(0)


def untold(sentence: str) -> bool:
    """Whether a reader of Chinese gets it in English."""
    patterns = [pattern for pattern, _ in phrases(str)]
    return not all(any(re.fullmatch(pattern, part) for pattern in patterns) for part in sentence.split("; "))


def braces(words: dict[str, Any]) -> dict[str, int]:
    return {key: text.count("{}") for key, text in words.items() if isinstance(text, str)}


def test_both_languages_have_the_same_words_with_the_same_places():
    assert braces(WORDS["en"]) == braces(WORDS["zh"])
    assert len(WORDS["en"]["durations"]) == len(WORDS["zh"]["durations"])


def test_every_word_that_the_page_asks_for_is_there():
    scripts = (PAGE / "page.js").read_text(encoding="utf-8") + (PAGE / "index.html").read_text(encoding="utf-8")
    asked = set(re.findall(r'\bword\("(\w+)"', scripts)) | set(re.findall(r'data-(?:word|label)="(\w+)"', scripts))

    assert asked - WORDS["en"].keys() == set()
    assert len(asked) > 60


def test_every_state_of_a_device_has_words():
    names = {"unknown_state" if name == "unknown" else name for name in device_state.EXACT_STATES}

    assert names <= WORDS["en"].keys()
    assert (WORDS["zh"]["free"], WORDS["zh"]["idle"]) == ("空闲", "已占用但闲置")


def test_every_action_of_a_policy_is_a_kind_of_event_and_every_kind_has_a_chinese_name():
    chinese = json.loads(chinese_words().partition("WORDS.zh.log = ")[2].partition(";\n")[0])

    assert set(ACTIONS) == set(get_args(ActionName))
    assert [word for word in get_args(EventKind) if chinese[word] == word] == []


def a_position(number: int = 1, start: float | None = None, user: str = "ada", **fields: Any) -> QueuePosition:
    given = {"request": Request(), "devices": (DEVICE.uuid,), **fields}
    ticket = replace(a_ticket(id=str(number)), user=user, after=given.pop("after", None), since=NOW)
    return QueuePosition(ticket, number, start, start, **given)


def reasons_to_wait() -> list[str]:
    reservation = Reservation("r", 0, 1001, "eve", 1, NOW - 60, NOW + 3600, (DEVICE.uuid,))
    claim = partial(a_claim_record, DEVICE, user="bob")
    situations: list[tuple[list[QueuePosition], dict[str, Any]]] = [
        ([a_position(after="job 7 to end")], {}),
        ([a_position(now=True)], {}),
        ([a_position(held_back_by=reservation.key)], {"reservations": (reservation,)}),
        ([a_position(), a_position(2, held_back_by="1")], {}),
        ([a_position(request=None)], {}),
        ([a_position(devices=())], {}),
        ([a_position()], {}),
        ([a_position(), a_position(2)], {}),
        ([a_position(), a_position(2, NOW + 7200)], {}),
        ([a_position()], {"claims": (claim(),)}),
        ([a_position()], {"claims": (claim(expected=NOW - 5),)}),
        ([a_position(1, NOW + 7200)], {"claims": (claim(ends=NOW + 7200),)}),
        ([a_position(1, NOW + 3600)], {"reservations": (reservation,)}),
    ]
    texts = [reservation_text(reservation, now) for now in (NOW, NOW - 3600)]
    for positions, facts in situations:
        queue = QueueState(tuple(positions), (), a_snapshot(DEVICE), QueueFacts(**facts), NOW)
        texts.append(start_text(positions[-1], queue))
    return texts


def test_why_a_request_waits_is_told_in_chinese_too():
    reasons = reasons_to_wait()

    assert len(set(reasons)) > 12
    assert [text for text in reasons if untold(text)] == []


@pytest.mark.parametrize("name", RULES)
def test_what_a_rule_finds_is_told_in_chinese_too(name):
    found = {finding.why for rule in shown(name, RULES[name]) for finding in rule.check(a_bad_day())}

    assert found
    assert [why for why in found if untold(why)] == []


def test_why_a_device_is_in_its_state_is_told_in_chinese_too():
    crowded = a_device(1, processes=(a_process(),), processes_plausible=False)
    devices = (
        a_device(0, compute_mode="prohibited"),
        crowded,
        a_device(2, processes=None),
        a_device(3, memory_used=2**34),
    )
    reasons = [use.reason for use in device_state.uses(a_snapshot(*devices)) if use.reason]

    assert len(reasons) >= 3
    assert [reason for reason in reasons if untold(reason)] == []


def test_the_page_has_the_words_of_the_log_and_the_sentences_from_the_catalogue():
    log, sentences = re.findall(r"(?<= = |\.\.\.)(.*?)\)?;\n", chinese_words())

    assert json.loads(log)["claim lost"] == "占用丢失"
    assert dict(json.loads(sentences))["starts now"] == "现在开始"


def test_a_sentence_without_chinese_words_is_found():
    assert untold("a reason of tomorrow")
