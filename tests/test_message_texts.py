"""What is said about a verdict: every fact in its place, and nothing of what users wrote does anything."""

from __future__ import annotations

import itertools
import unicodedata
from dataclasses import replace
from string import Formatter

import pytest
from builders import a_device, a_process, a_snapshot
from endpoints import HOSTILE, a_message, a_verdict
from hypothesis import given
from hypothesis import strategies as st

from gpuguard.errors import InvalidRequest
from gpuguard.model import Finding, Subject, Verdict
from gpuguard.notify.sender import CAPACITY, FIRST_PAUSE, INTERVAL, LONGEST_PAUSE, MOST_PER_INTERVAL, SETTLE, Pace
from gpuguard.notify.templates import LONGEST_SUBJECT, MOST_LINES, NAMES, WORDS, Template, Words, joined, message_for

ALL_NAMES = "\n".join(f"{name}=${{{name}}}" for name in sorted(NAMES))


def a_node(**fields):
    return a_snapshot(a_device(3), **fields)


@pytest.mark.parametrize("language", WORDS)
def test_a_message_says_what_which_rule_where_what_comes_next_and_how_to_stop_it(language):
    words = WORDS[language]
    message = message_for(a_verdict(next_action="terminate", next_after=1800.0), a_node(), language)

    for said in ("utilization is 0%", "idle-gpus", "GPU 3", "alice", "4711", "train.py", "2h", "30m", "node1",
                 words.actions["terminate"], words.stop["idle"]):  # fmt: skip
        assert said in message.body
    assert "idle-gpus" in message.subject
    assert "alice" in message.subject


def test_what_is_unknown_is_left_out_instead_of_being_made_up():
    verdict = Verdict("hot", Finding("temperature", Subject("device", a_device(3).uuid), "91C"), "notify", 0, 9_990.0)
    message = message_for(verdict, a_node())

    assert "User" not in message.body
    assert "Processes" not in message.body
    assert "None" not in message.body + message.subject
    assert dict(message.facts)["pid"] is None


def test_a_policy_that_only_observes_says_that_nothing_will_be_done():
    message = message_for(a_verdict(next_action="terminate", next_after=60.0, enforce=False), a_node())

    assert "only observes" in message.body


def test_the_last_step_promises_nothing_more():
    assert "the last step" in message_for(a_verdict(), a_node()).body


def test_only_commands_that_exist_are_recommended():
    from gpuguard.cli import COMMANDS

    said = " ".join(
        text for words in WORDS.values() for text in (*words.stop.values(), words.stop_otherwise, words.body)
    )
    named = {piece.split()[0].partition("`")[0] for piece in said.split("`gpuguard ")[1:]}

    assert named
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("language", WORDS)
def test_who_computes_without_a_claim_need_not_end_his_job(language):
    assert "`gpuguard adopt PID`" in WORDS[language].stop["unclaimed"]


def test_both_languages_say_the_same_things():
    english, *others = WORDS.values()

    for words in others:
        assert words.actions.keys() == english.actions.keys()
        assert words.stop.keys() == english.stop.keys()
        assert _blanks(words) == _blanks(english)
        assert words.body.count("$") == english.body.count("$")


def _blanks(words: Words) -> dict[str, set[str | None]]:
    texts = {
        name: text for name, text in vars(words).items() if isinstance(text, str) and name not in ("subject", "body")
    }
    return {name: {blank for _, blank, _, _ in Formatter().parse(text) if blank} for name, text in texts.items()}


def test_a_language_without_words_is_english():
    assert message_for(a_verdict(), a_node(), "tlh").language == "en"


def test_an_admin_can_change_the_texts_of_one_language():
    templates = {"zh": Template("$host!", "costs $$5: ${why}\n")}

    message = message_for(a_verdict(), a_node(), "zh", templates)
    assert (message.subject, message.body) == ("node1!", "costs $5: utilization is 0%\n")
    assert "What was seen" in message_for(a_verdict(), a_node(), "en", templates).body


def test_a_text_that_is_left_out_is_our_own():
    message = message_for(a_verdict(), a_node(), "en", {"en": Template(subject="GPU alarm")})

    assert message.subject == "GPU alarm"
    assert "What was seen" in message.body


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("$usr", r"no \$usr"),
        ("${hots}", r"no \$hots"),
        ("5 $", r"write \$\$"),
        ("$(id)", r"write \$\$"),
        ("${host", r"write \$\$"),
        ("$1", r"write \$\$"),
        ("${}", r"write \$\$"),
    ],
)
def test_a_template_that_cannot_be_filled_is_a_fault_when_it_is_made(text, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        Template(body=text)


def test_a_subject_of_two_lines_is_a_fault():
    with pytest.raises(InvalidRequest, match="one line"):
        Template(subject="a\nb")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_strangers_wrote_is_text_and_nothing_more_in_every_field(hostile):
    process = a_process(command=(hostile, hostile), user=hostile, container=hostile)
    device = a_device(3, name=hostile, processes=(process,))
    verdict = a_verdict(process, why=hostile, policy=hostile, rule=hostile, action=hostile, next_action=hostile)
    snapshot = a_snapshot(device, host=hostile)
    templates = {"en": Template(ALL_NAMES.replace("\n", " "), ALL_NAMES)}
    message = message_for(verdict, snapshot, "en", templates)

    lines = message.body.split("\n")
    assert [line.partition("=")[0] for line in lines[:-1]] == sorted(NAMES), "no line was broken"
    assert harm(message.body.replace("\n", "")) == []
    assert harm(message.subject + message.line + "".join(str(value) for _, value in message.facts)) == []
    if "$" in hostile:
        assert f"why={hostile}" in lines, "not filled in a second time"


def test_a_name_that_somebody_puts_into_his_command_line_is_not_filled():
    verdict = a_verdict(a_process(command=("${host}", "$policy")), why="$policy on ${host}")
    message = message_for(verdict, a_node(), "en", {"en": Template("$why", "$processes")})

    assert message.subject == "$policy on ${host}"
    assert "${host}" in message.body
    assert "$policy" in message.body


def test_what_cannot_be_seen_in_a_template_is_written_out_too():
    assert message_for(a_verdict(), a_node(), "en", {"en": Template("a\x1b[2J", "b\u202e")}).subject == r"a\x1b[2J"


@given(st.text(st.characters(), max_size=60))
def test_no_text_at_all_breaks_a_subject(text):
    verdict = a_verdict(a_process(user=text, command=(text,)), why=text)

    assert harm(message_for(verdict, a_snapshot(a_device(3), host=text)).subject) == []


def harm(text: str) -> list[str]:
    bad = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return [character for character in text if unicodedata.category(character) in bad]


def test_the_checker_of_harm_sees_harm():
    assert harm("a\n\x1b\u202e") == ["\n", "\x1b", "\u202e"]


def test_a_long_command_line_does_not_make_a_long_message():
    message = message_for(a_verdict(a_process(command=("x" * 2**20,), user="u" * 5000)), a_node())

    assert len(message.body) < 3000
    assert len(message.subject) <= LONGEST_SUBJECT


def test_several_processes_stand_under_each_other():
    processes = tuple(a_process(pid=pid) for pid in range(100, 110))
    finding = Finding("idle", Subject("user", uid=1001, user="alice"), "idle", processes)
    body = message_for(Verdict("p", finding, "notify", 0, 9_000.0), a_node()).body

    lines = [line for line in body.split("\n") if "pid 10" in line]
    assert len({line.index("pid 10") for line in lines}) == 1
    assert "and 5 more" in body


def test_joined_messages_count_all_and_list_the_first_ones():
    messages = [message_for(a_verdict(a_process(user=f"u{n}")), a_node()) for n in range(40)]

    one = joined(messages)
    assert one.count == 40
    assert one.subject.startswith("(40x)")
    assert "u0" in one.body
    assert f"u{MOST_LINES}" in one.body
    assert f"u{MOST_LINES + 1}" not in one.body
    assert "and 19 more" in one.body
    assert len(one.further) == MOST_LINES


def test_one_message_is_joined_to_itself():
    message = message_for(a_verdict(), a_node())

    assert joined([message]) is message


def test_facts_carry_numbers_and_their_units():
    facts = dict(message_for(a_verdict(next_action="kill", next_after=30.0), a_node()).facts)

    assert facts["since_seconds"] == 7200.0
    assert facts["next_after_seconds"] == 30.0
    assert facts["device_index"] == 3
    assert facts["pid"] == 4711


# How fast messages follow each other: with a clock that only these tests move.


MESSAGE = a_message()


def a_message_of(policy="idle-gpus", user="alice"):
    return replace(MESSAGE, key=policy, user=user)


def sent(pace: Pace, start: float, seconds: int) -> list[tuple[float, int]]:
    """(when, count) of what goes out in that time, looked at every half second."""
    found = []
    for tick in range(seconds * 2):
        now = start + tick / 2
        while batch := pace.pop_due(now):
            pace.succeeded(batch, now)
            found.append((now, batch.joined().count))
    return found


def test_the_messages_of_one_moment_go_out_as_one_with_their_number():
    pace = Pace()
    for _ in range(40):
        assert pace.put(a_message_of(), 0.0)

    assert pace.pop_due(0.0) is None
    assert sent(pace, 0.0, 10) == [(SETTLE, 40)]


def test_a_policy_gets_one_message_per_minute_however_often_it_has_something_to_say():
    pace, found = Pace(), []
    for second in range(300):
        pace.put(a_message_of(), float(second))
        found += sent(pace, float(second), 1)

    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(found)]
    assert min(gaps) >= INTERVAL
    assert len(found) == 5
    assert sum(count for _, count in found) + pace.waiting[("idle-gpus", None)].count == 300


def test_all_policies_together_get_no_more_than_the_target_may():
    pace = Pace()
    for number in range(30):
        pace.put(a_message_of(f"p{number}"), 0.0)
    found = sent(pace, 0.0, 300)

    assert len(found) == 30
    for start in range(300):
        assert sum(start <= when < start + INTERVAL for when, _ in found) <= MOST_PER_INTERVAL


def test_what_is_about_one_user_is_never_joined_to_what_goes_to_another():
    personal, common = Pace(personal=True), Pace()
    for pace in (personal, common):
        for user in ("alice", "bob", "alice"):
            pace.put(a_message_of(user=user), 0.0)

    assert sorted(count for _, count in sent(common, 0.0, 2)) == [3]
    batches = [personal.pop_due(SETTLE), personal.pop_due(SETTLE)]
    assert [{message.user for message in batch.messages} for batch in batches] == [{"alice"}, {"bob"}]


def test_at_the_end_each_user_gets_his_own():
    pace = Pace(personal=True)
    for user in ("alice", "bob", None):
        for policy in ("a", "b"):
            pace.put(a_message_of(policy, user), 0.0)

    batches = pace.pop_all()
    assert [(batch.count, {message.user for message in batch.messages}) for batch in batches] == [
        (2, {"alice"}), (2, {"bob"}), (2, {None}),
    ]  # fmt: skip
    assert pace.waiting == {}


def test_a_target_that_fails_is_left_alone_for_a_time_that_doubles_up_to_a_limit():
    pace, now, pauses = Pace(), 0.0, []
    pace.put(a_message_of(), now)
    for _ in range(20):
        now += pace.wait(now) or 0.0
        batch = pace.pop_due(now)
        pace.failed(batch, now)
        pauses.append(pace.wait(now))

    assert pauses[:4] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, 8 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE


def test_nothing_is_lost_while_a_target_fails():
    pace = Pace()
    pace.put(a_message_of("a"), 0.0)
    batch = pace.pop_due(SETTLE)
    pace.put(a_message_of("a"), 2.0)
    pace.put(a_message_of("b"), 2.0)
    pace.failed(batch, 3.0)

    assert pace.pop_due(3.0 + FIRST_PAUSE - 0.1) is None
    assert [count for _, count in sent(pace, 3.0 + FIRST_PAUSE, 5)] == [1, 2]
    assert pace.pause == 0.0


def test_a_message_that_always_fails_does_not_keep_the_others_back():
    # A server that refuses one message is no target that is away; nobody can tell which it is before the next goes.
    pace, out = Pace(), []
    pace.put(a_message_of("bad"), 0.0)
    for second in range(3600):
        if second % 120 == 60:
            pace.put(a_message_of(f"good {second}"), float(second))
        if batch := pace.pop_due(float(second)):
            good = batch.key[0] != "bad"
            (pace.succeeded if good else pace.failed)(batch, float(second))
            out.append(good)

    assert out.count(True) == 30
    assert out.count(False) < 15, "and it is tried less and less often"


def test_a_message_that_never_can_go_out_is_told_once_a_minute_and_stops_nothing():
    pace, dropped = Pace(personal=True), 0
    for second in range(600):
        pace.put(a_message_of("p", None), float(second))
        if batch := pace.pop_due(float(second)):
            pace.dropped(batch, float(second))
            dropped += 1
    pace.put(a_message_of("p", "alice"), 600.0)

    assert dropped == 10
    assert ("p", "alice") in [pace.pop_due(600.0 + SETTLE).key for _ in range(2)]


def test_a_full_queue_refuses_what_is_new_and_still_counts_what_it_knows():
    pace = Pace()
    for number in range(CAPACITY):
        assert pace.put(a_message_of(f"p{number}"), 0.0)

    assert not pace.put(a_message_of("one more"), 0.0)
    assert pace.put(a_message_of("p0"), 0.0)
    assert len(pace.waiting) == CAPACITY


def test_a_flood_takes_no_memory_but_its_number():
    pace = Pace()
    for _ in range(10_000):
        pace.put(a_message_of(), 0.0)

    batch = pace.pop_due(SETTLE)
    assert batch.count == 10_000
    assert len(batch.messages) < 30
    assert len(batch.joined().body) < 10_000


def test_nothing_waits_for_nothing():
    assert Pace().wait(0.0) is None


@pytest.mark.parametrize("personal", [False, True])
@given(steps=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["u", "v"]), st.floats(0, 50), st.booleans())))
def test_whatever_happens_every_message_is_counted_once(personal, steps):
    pace, now, put, out = Pace(personal=personal), 0.0, 0, 0
    for policy, user, seconds, works in steps:
        now += seconds
        put += pace.put(a_message_of(policy, user), now)
        if batch := pace.pop_due(now):
            out += batch.count if works else 0
            (pace.succeeded if works else pace.failed)(batch, now)

    assert out + sum(batch.count for batch in pace.pop_all()) == put
