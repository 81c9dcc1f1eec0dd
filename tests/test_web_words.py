"""The words of the page: the same in both languages; and each sentence of a frame is there in Chinese, too.

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
from gpuguard.locale.messages import Sentence, all_of, sentence
from gpuguard.model import ActionName, EventKind
from gpuguard.policies.rules import RULES
from gpuguard.queue.backfill import QueuePosition
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.reasons import reservation_text, start_text
from gpuguard.queue.state import QueueFacts, QueueState
from gpuguard.request import Request
from gpuguard.web.feed import chinese
from gpuguard.web.server import chinese_words

PAGE = PACKAGE / "web" / "page"
SOURCE = (PAGE / "words.js").read_text(encoding="utf-8")
WORDS: dict[str, dict[str, Any]] = json.loads(SOURCE.partition("const WORDS = ")[2].rstrip().rstrip(";"))
NOW = 1_700_000_000.0
DEVICE = a_device(0)


def untold(text: str) -> bool:
    """Whether a reader of Chinese gets it in English: a sentence has its Chinese, see test_translations."""
    return not isinstance(text, Sentence)


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


def a_queue(*positions: QueuePosition, **facts: Any) -> QueueState:
    return QueueState(positions, (), a_snapshot(DEVICE), QueueFacts(**facts), NOW)


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
        texts.append(start_text(positions[-1], a_queue(*positions, **facts)))
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


def test_the_page_has_the_words_of_the_log_from_the_catalogue():
    log = chinese_words().removeprefix("WORDS.zh.log = ").removesuffix(";\n")

    assert json.loads(log)["claim lost"] == "占用丢失"


def test_a_text_that_is_no_sentence_is_found():
    assert untold("a reason of tomorrow")
    assert untold(str(Sentence("a reason", "key", {}) + "")), "what is made of one is a plain text"


SAYS = {
    "queue.starts_because": "约 {seconds} 后开始，{why}",
    "queue.by_its_limit": "{freed}（{user} 的任务到时限）",
    "queue.freed": "{gpu} 空闲时",
    "; ": "；",
    "test.kept": "{user} 要求保留 {time}（{reason}）",
}


def say(message: str) -> str:
    return SAYS.get(message, message)


def test_a_sentence_is_told_in_chinese_with_the_sentences_and_durations_in_it():
    position, claim = a_position(1, NOW + 5340), a_claim_record(DEVICE, user="bob", ends=NOW + 5340)
    text = start_text(position, a_queue(position, claims=(claim,)))

    assert text == "starts in about 1h29m, when GPU 0 is free: time limit of bob's job"
    assert chinese([text], say) == {text: "约 1小时29分后开始，GPU 0 空闲时（bob 的任务到时限）"}


def test_what_has_no_chinese_or_is_no_sentence_stays_as_it_is():
    unknown, plain = sentence("test.unknown", "since {time} on", time="2h"), "starts now"

    assert chinese([unknown, plain, None, 7], say) == {unknown: "since 2h on"}


def test_the_words_of_a_user_stay_as_they_are_though_they_look_like_ours():
    text = sentence("test.kept", "kept for {user} {time}: {reason}", user="5d", time="2h", reason="10m")
    several = all_of([text, "starts now"])

    assert chinese([text, several], say) == {
        text: "5d 要求保留 2小时（10m）",
        several: "5d 要求保留 2小时（10m）；starts now",
    }
