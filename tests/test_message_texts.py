"""What is said about a verdict: every fact in its place, and nothing of what users wrote does anything."""

import itertools
from dataclasses import replace
from string import Formatter

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from claimholders import a_holder
from endpoints import HOSTILE, a_message, a_verdict
from hypothesis import given
from hypothesis import strategies as st
from test_text import faults

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import probe
from gpuguard.enforcement.actions import ACTIONS
from gpuguard.enforcement.terminals import NO_TERMINAL
from gpuguard.errors import InvalidRequest
from gpuguard.history.audit_log import decoded, line_of
from gpuguard.locale.messages import all_of, dumps, sentence
from gpuguard.model import Event, Finding, Subject, Verdict
from gpuguard.notify.sender import FIRST_PAUSE, INTERVAL, LONGEST_PAUSE, MOST_PER_INTERVAL, SETTLE, Pace
from gpuguard.notify.templates import (
    LONGEST_SUBJECT,
    MOST_LINES,
    NAMES,
    WORDS,
    Template,
    Words,
    deed_text,
    joined,
    message_for,
)
from gpuguard.policies.idle import IdleRule
from gpuguard.policies.rules import RULES
from gpuguard.units import local_time
from gpuguard.watchdog import BREAKER

ADVICE = {kind.name: kind.advice for kind in (BREAKER, *(rule.kind for rule in RULES.values()))}
ALL_NAMES = "\n".join(f"{name}=${{{name}}}" for name in sorted(NAMES))


def a_node(**fields):
    return a_snapshot(a_device(3), **fields)


@pytest.mark.parametrize("language", WORDS)
def test_a_message_says_what_which_rule_where_what_comes_next_and_how_to_stop_it(language):
    words = WORDS[language]
    message = message_for(a_verdict(next_action="terminate", next_after=1800.0), a_node(), language)

    for said in ("utilization is 0%", "idle-gpus", "GPU 3", "alice", "4711", "train.py", "2h", "30m", "node1",
                 words.actions["terminate"], IdleRule.kind.advice[language]):  # fmt: skip
        assert said in message.body
    assert "idle-gpus" in message.subject
    assert "alice" in message.subject


@pytest.mark.parametrize("language", WORDS)
def test_a_warning_names_the_step_that_harms_and_its_time_of_day_whatever_comes_before_it(language):
    harm = {"next_action": "notify", "next_after": 60.0, "harm_action": "terminate", "harm_after": 90.0}
    message = message_for(a_verdict(action="warn", **harm), a_node(), language)

    assert WORDS[language].actions["terminate"] in message.body
    assert local_time(a_node().taken_at + 90.0, "%Y-%m-%d %H:%M:%S") in message.body
    assert WORDS[language].actions["notify"] not in message.body
    assert dict(message.facts)["harm_unix_seconds"] == a_node().taken_at + 90.0


@pytest.mark.parametrize(("language", "why"), [("en", "too hot; too full"), ("zh", "too hot；too full")])
def test_what_was_found_is_said_in_the_language_of_the_message_and_to_programs_in_english(language, why):
    verdict = a_verdict()
    finding = replace(verdict.finding, why=all_of(("too hot", "too full")))
    message = message_for(replace(verdict, finding=finding), a_node(), language)

    assert why in message.body
    assert dict(message.facts)["why"] == "too hot; too full"


@pytest.mark.parametrize(("outcome", "said"), [("undelivered", "too hot: 90C"), ("done", "too hot: 90C: no terminal")])
def test_the_owner_reads_why_a_policy_warns_but_not_why_no_terminal_shows_it(outcome, said):
    message = sentence("because", "{what}: {why}", what="too hot: 90C", why=NO_TERMINAL)
    event = Event(time=1.0, kind="warn", outcome=outcome, message=message, facts=(("policy", "hot"),))
    (line,), _ = decoded([dumps(line_of(event))])

    assert deed_text(line) == f"warning of policy hot: {said}"


@pytest.mark.parametrize(("facts", "offered"), [({}, True), ({"may_be_kept": False}, False)])
def test_keep_is_offered_only_where_it_helps(facts, offered):
    assert ("gpuguard keep" in message_for(replace(a_verdict(), **facts), a_node()).body) == offered


def test_a_message_about_a_claim_names_its_devices():
    claim = a_claim_record(a_device(3), a_device(5), id="c1ai", uid=7)
    finding = Finding("quota", Subject("claim", uid=7, claim="c1ai"), "holds 2 GPUs")
    snapshot = a_snapshot(a_device(3), a_device(5), claims=(claim,))

    assert "GPU 3 (NVIDIA H100 80GB HBM3), GPU 5 (" in message_for(replace(a_verdict(), finding=finding), snapshot).body


@pytest.mark.parametrize(("longest", "said"), [(86400.0, "--for 4h`"), (120.0, "--for 2m`"), (0.0, None)])
def test_keep_is_recommended_for_as_long_as_the_site_allows(longest, said):
    body = message_for(a_verdict(), a_node(), longest_keep=longest).body

    assert (said in body) if said else ("keep" not in body)


def test_the_owner_of_a_claim_without_a_process_is_told_to_release_it():
    claim = Finding("idle", Subject("claim", a_device(3).uuid, uid=7, claim="c1ai"), "idle")

    body = message_for(replace(a_verdict(), finding=claim), a_node()).body

    assert "`gpuguard release c1ai`" in body and "rocess" not in body


@pytest.mark.parametrize("language", WORDS)
def test_what_a_user_named_a_record_is_in_no_command_that_people_are_told_to_run(tmp_path, language):
    directory = lock_directory(str(tmp_path / "claims"))
    with a_holder(directory, "GPU-a", name="1f2e;$(touch pwn)`id`\nsudo sh"):
        [claim] = probe(directory, ["GPU-a"])
        finding = Finding("idle", Subject("claim", "GPU-a", uid=claim.uid, claim=claim.id), "idle")
        message = message_for(replace(a_verdict(), finding=finding), a_snapshot(claims=(claim,)), language)

    assert "`gpuguard release no-record-GPU-a`" in message.body
    assert "pwn" not in repr(message)


def test_what_is_unknown_is_left_out_instead_of_being_made_up():
    verdict = Verdict(
        policy="hot",
        finding=Finding("temperature", Subject("device", a_device(3).uuid), "91C"),
        action="notify",
        step=0,
        since=9_990.0,
    )
    message = message_for(verdict, a_node())

    assert "User" not in message.body
    assert "Processes" not in message.body
    assert "None" not in message.body + message.subject
    assert dict(message.facts)["pid"] is None
    told = dict(message_for(a_verdict(next_action="kill", next_after=30.0), a_node()).facts)
    assert (told["since_seconds"], told["next_after_seconds"], told["device_index"]) == (7200.0, 30.0, 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"next_action": "terminate", "next_after": 60.0, "enforce": False}, "only observes"), ({}, "the last step")],
)
def test_a_message_promises_nothing_that_will_not_be_done(fields, said):
    assert said in message_for(a_verdict(**fields), a_node()).body


def test_only_commands_that_exist_are_recommended():
    from gpuguard.cli import COMMANDS

    own = [text for words in WORDS.values() for text in (words.stop, words.stop_claim, words.keep, words.body)]
    said = " ".join([*own, *(text for advice in ADVICE.values() for text in advice.values())])
    named = {piece.split()[0].partition("`")[0] for piece in said.split("`gpuguard ")[1:]}

    assert named
    assert named <= set(COMMANDS)


def test_both_languages_say_the_same_things():
    english, *others = WORDS.values()

    for words in others:
        assert words.actions.keys() == english.actions.keys() == ACTIONS.keys()
        assert _blanks(words) == _blanks(english)
        assert words.body.count("$") == english.body.count("$")
    for advice in ADVICE.values():
        assert advice.keys() in (set(), WORDS.keys())
    for text in ADVICE["unclaimed"].values():
        assert "`gpuguard adopt PID`" in text, "no user need end a job for want of a claim"


@pytest.mark.parametrize("language", WORDS)
def test_the_command_that_claims_a_running_job_has_its_pid_where_one_process_is_meant(language):
    one, several = a_verdict(rule="unclaimed"), a_verdict(rule="unclaimed")
    several = replace(several, finding=replace(several.finding, processes=(a_process(1), a_process(2))))

    assert "`gpuguard adopt 4711`" in message_for(one, a_node(), language).body
    assert "`gpuguard adopt PID`" in message_for(several, a_node(), language).body


def _blanks(words: Words) -> dict[str, set[str | None]]:
    texts = {
        name: text for name, text in vars(words).items() if isinstance(text, str) and name not in ("subject", "body")
    }
    return {name: {blank for _, blank, _, _ in Formatter().parse(text) if blank} for name, text in texts.items()}


def test_an_admin_can_change_the_texts_of_one_language():
    templates = {"zh": Template("$host!", "costs $$5: ${why}\n")}

    message = message_for(a_verdict(), a_node(), "zh", templates)
    assert (message.subject, message.body) == ("node1!", "costs $5: utilization is 0%\n")
    english = message_for(a_verdict(), a_node(), "tlh", {**templates, "en": Template(subject="GPU alarm")})
    assert (english.language, english.subject, "What was seen" in english.body) == ("en", "GPU alarm", True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ({"body": "$usr"}, r"no \$usr"),
        ({"body": "${hots}"}, r"no \$hots"),
        ({"body": "5 $"}, r"write \$\$"),
        ({"body": "$(id)"}, r"write \$\$"),
        ({"body": "${host"}, r"write \$\$"),
        ({"body": "$1"}, r"write \$\$"),
        ({"body": "${}"}, r"write \$\$"),
        ({"subject": "a\nb"}, "one line"),
    ],
)
def test_a_template_that_cannot_be_filled_is_a_fault_when_it_is_made(text, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        Template(**text)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_strangers_wrote_is_text_and_nothing_more_in_every_field(hostile):
    process = a_process(command=(hostile, hostile), user=hostile, container=hostile)
    device = a_device(3, name=hostile, processes=(process,))
    texts = {"why": hostile, "policy": hostile, "rule": hostile, "action": hostile, "next_action": hostile}
    verdict = a_verdict(process, **texts, harm_action="kill", options=(("done", "terminate"),))
    snapshot = a_snapshot(device, host=hostile)
    templates = {"en": Template(ALL_NAMES.replace("\n", " "), ALL_NAMES)}
    message = message_for(verdict, snapshot, "en", templates)

    lines = message.body.split("\n")
    assert [line.partition("=")[0] for line in lines[:-1]] == sorted(NAMES), "no line was broken"
    assert faults(message.body.replace("\n", "")) == []
    assert faults(message.subject + message.line + "".join(str(value) for _, value in message.facts)) == []
    if "$" in hostile:
        assert f"why={hostile}" in lines, "not filled in a second time"


def test_a_long_command_line_does_not_make_a_long_message():
    message = message_for(a_verdict(a_process(command=("x" * 2**20,), user="u" * 5000)), a_node())

    assert len(message.body) < 3000
    assert len(message.subject) <= LONGEST_SUBJECT


def test_joined_messages_count_all_and_list_the_first_ones():
    messages = [message_for(a_verdict(a_process(user=f"u{n}")), a_node()) for n in range(40)]

    one = joined(messages, 40)
    assert one.count == 40
    assert one.subject.startswith("(40x)")
    assert "u0" in one.body
    assert f"u{MOST_LINES}" in one.body
    assert f"u{MOST_LINES + 1}" not in one.body
    assert "and 19 more" in one.body
    assert len(one.further) == MOST_LINES


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
            found.append((now, batch.count))
    return found


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


def test_a_flood_takes_no_memory_but_its_number():
    pace = Pace()
    for _ in range(10_000):
        pace.put(a_message_of(), 0.0)

    assert pace.pop_due(0.0) is None
    batch = pace.pop_due(SETTLE)
    assert batch.count == 10_000
    assert len(batch.messages) < 30
    assert len(joined(batch.messages, batch.count).body) < 10_000


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
