"""Messages go out without anybody waiting for them, and nothing that an endpoint does reaches us."""

import json
import os
import sys
import threading
from contextlib import contextmanager

import pytest
from builders import a_device, a_process, a_snapshot
from endpoints import (
    HOSTILE,
    PASSWORD,
    a_fake_apprise,
    a_mail_server,
    a_message,
    a_script,
    a_secret,
    a_verdict,
    a_web_server,
    by_smtp,
)
from nodes import until
from pages import blocks
from proc import runs
from sources import ROOT

from gpuguard.history.audit_log import line_of
from gpuguard.model import Event
from gpuguard.notify.sender import CAPACITY, DELIVER, STUCK, Sender, attempt, problems
from gpuguard.notify.targets import TARGETS, Apprise, Email, Hook, Webhook
from gpuguard.notify.templates import NAMES, Template, message_for
from gpuguard.policy_files.loader import parse
from gpuguard.views.events import EventFilter


@contextmanager
def a_sender(targets, **options):
    """A sender, and the events that it reports."""
    events: list[Event] = []
    sender = Sender(targets, events.append, **options)
    yield sender, events
    sender.stop(10)


def test_a_target_gets_its_message_in_its_own_language_from_the_admins_texts():
    with a_web_server() as web:
        targets = {"ops": Webhook(web.url, language="zh"), "dev": Webhook(web.url)}
        with a_sender(targets, templates={"zh": Template("你好 $user"), "en": Template("hello $user")}) as (
            sender,
            events,
        ):
            assert sender.notify("ops", a_verdict(), a_snapshot(a_device(3))) == "queued"
            assert sender.notify("dev", a_verdict(), a_snapshot(a_device(3))) == "queued"
            assert sender.notify("nobody", a_verdict(), a_snapshot(a_device(3))) == "no such target"
            assert sender.stop(10)

        assert sorted(json.loads(body)["subject"] for _, body in web.requests) == ["hello alice", "你好 alice"]
        assert [event.outcome for event in events] == ["sent", "sent"]


CALLS = ["<!channel>", "@everyone", "x@here", "<@U123>", '<at user_id="all">x</at>', "[log in](http://e)", "<a|b>"]
CALLS += ["https://e.example/x", "see http://e"]


@pytest.mark.parametrize("call", CALLS)
def test_what_users_write_calls_nobody_in_a_chat_and_is_no_link_there(call):
    process = a_process(command=("train.py", call), user=call)
    templates = {"en": Template("<!here> $user", "<!here> $why\n$processes\n$device\n$host")}
    verdict, snapshot = a_verdict(process, why=call), a_snapshot(a_device(3, name=call), host=call)
    with a_web_server() as web, a_mail_server() as mail:
        targets = {"chat": Webhook(web.url), "mail": by_smtp(mail)}
        with a_sender(targets, templates=templates) as (sender, _):
            for name in targets:
                sender.notify(name, verdict, snapshot)
            assert sender.stop(10)

    told = json.loads(web.requests[0][1])
    assert call not in told["text"] + told["subject"]
    assert told["text"].startswith("<!here> ") and told["subject"].startswith("<!here> "), "the admin's own words"
    assert told["facts"]["why"] == call
    assert call in mail.letters[0].body


def test_a_slow_endpoint_blocks_neither_the_caller_nor_the_other_targets():
    with (
        a_web_server(hold=threading.Event()) as slow,
        a_web_server() as quick,
        a_sender({"slow": Webhook(slow.url, timeout=60.0), "quick": Webhook(quick.url)}) as (sender, events),
    ):
        sender.send("slow", a_message())
        until(lambda: slow.requests)
        for n in range(200):
            sender.send("slow", a_message(policy=f"p{n % 20}"))
        sender.send("quick", a_message())
        until(lambda: quick.requests)
        assert not [event for event in events if dict(event.facts)["target"] == "slow"], "it has neither answered yet"
        assert not sender.stop(0.05), "nor is it given up"
        slow.hold.set()


def test_a_dead_endpoint_is_an_event_and_the_message_goes_out_when_it_lives_again(monkeypatch):
    monkeypatch.setattr("gpuguard.notify.sender.FIRST_PAUSE", 0.05)
    monkeypatch.setattr("gpuguard.notify.sender.SETTLE", 0.0)
    with a_web_server(status=503) as web, a_sender({"ops": Webhook(web.url)}) as (sender, events):
        sender.send("ops", a_message())
        until(lambda: events)
        assert events[0].outcome == "failed"
        assert events[0].message == "the web server answers 503"
        assert dict(events[0].facts) == {
            "target": "ops",
            "policy": "idle-gpus",
            "count": 1,
            "retry_after_seconds": 0.05,
        }

        web.status = 200
        until(lambda: events[-1].outcome == "sent")


def test_the_event_of_a_message_about_several_users_names_all_of_them_and_is_found_by_each():
    with a_web_server() as web, a_sender({"ops": Webhook(web.url)}) as (sender, events):
        for user in ("alice", "bob"):
            sender.send("ops", a_message(process=a_process(user=user)))
        until(lambda: events)
    [event] = events

    assert dict(event.facts)["users"] == "alice, bob" and dict(event.facts)["count"] == 2
    shown = [line_of(event) in EventFilter(users=frozenset({user})) for user in ("alice", "bob", "carol")]
    assert shown == [True, True, False]


def test_a_full_queue_refuses_at_once_and_says_so():
    with a_web_server(status=500) as web, a_sender({"ops": Webhook(web.url)}) as (sender, _):
        answers = [sender.send("ops", a_message(policy=f"p{n}")) for n in range(CAPACITY + 50)]

        assert answers[:CAPACITY] == ["queued"] * CAPACITY
        assert set(answers[CAPACITY + 1 :]) <= {"the queue is full", "queued"}
        assert "the queue is full" in answers


def test_at_the_end_everything_goes_out_in_one_message_per_recipient():
    with a_mail_server() as server:
        sender = Sender({"owner": by_smtp(server, "$user@example.org"), "ops": by_smtp(server)}, lambda event: None)
        for user in ("alice", "bob", "alice"):
            for name in ("owner", "ops"):
                message = message_for(a_verdict(a_process(user=user)), a_snapshot(a_device(3)))
                sender.send(name, message)
        assert sender.stop(10)

    bodies = {letter.recipients[0]: letter.body for letter in server.letters}
    assert sorted(bodies) == ["alice@example.org", "bob@example.org", "ops@example.org"]
    assert len(server.letters) == 3
    assert "bob" not in bodies["alice@example.org"], "what is about one user goes to no other"
    assert "2 findings" in bodies["alice@example.org"]
    assert "3 findings" in bodies["ops@example.org"]


def test_a_user_who_cannot_be_written_to_keeps_no_message_from_others():
    # Every user can run as a uid without a name, as in a user namespace; and a name may have no mailbox.
    with a_mail_server() as server, a_sender({"owner": by_smtp(server, "$user@example.org")}) as (sender, events):
        for user in (None, "nobody", "alice"):
            message = message_for(a_verdict(a_process(user=user)), a_snapshot(a_device(3)))
            assert sender.send("owner", message) == "queued"
        until(lambda: len(events) == 3)

    assert [letter.recipients for letter in server.letters] == [["alice@example.org"]]
    assert [(event.outcome, dict(event.facts)["retry_after_seconds"]) for event in events] == [
        ("given up", None), ("given up", None), ("sent", None),
    ]  # fmt: skip


def test_after_the_end_a_message_goes_out_at_once_and_no_thread_is_left():
    with a_web_server() as web:
        sender = Sender({"ops": Webhook(web.url)}, lambda event: None)
        sender.send("ops", a_message())
        assert sender.stop(10)

        assert sender.send("ops", a_message()) == "queued"
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("gpuguard-notify")])
        assert len(web.requests) == 2


def test_a_message_for_which_no_thread_can_be_started_is_told_and_goes_out_with_the_next(monkeypatch):
    """The target was silent from then on, and every message to it "queued"."""

    def full(thread):
        raise RuntimeError("can't start new thread")

    with a_web_server() as web, a_sender({"ops": Webhook(web.url)}) as (sender, _):
        with monkeypatch.context() as crowded:
            crowded.setattr(threading.Thread, "start", full)
            assert sender.send("ops", a_message()) == STUCK
        assert sender.send("ops", a_message()) == "queued"

        assert sender.stop(10)
        assert len(web.requests) == 1


def test_a_thread_that_something_unforeseen_has_ended_is_started_again(monkeypatch):
    calls = []

    def deliver(target, message):
        calls.append(message)
        if len(calls) == 1:
            raise ZeroDivisionError

    reported = []
    monkeypatch.setattr("gpuguard.notify.sender.SETTLE", 0.0)
    monkeypatch.setattr(threading, "excepthook", reported.append)
    monkeypatch.setitem(DELIVER, Hook, deliver)
    with a_sender({"ops": Hook(("/bin/true",))}) as (sender, _):
        sender.send("ops", a_message())
        until(lambda: reported)
        sender.send("ops", a_message())
        until(lambda: len(calls) == 2)


NOTIFICATIONS = (ROOT / "docs/notifications.md").read_text(encoding="utf-8")


def test_the_file_in_the_page_about_notifications_is_one_that_can_be_used():
    (block,) = (block for block in blocks(NOTIFICATIONS, "page") if block.language == "yaml")
    read = parse(block.text, "page")

    assert not read.faults
    assert {type(target) for target in read.notify.values()} == set(TARGETS.values())
    assert message_for(a_verdict(), a_snapshot(), "en", read.messages).subject == "[GPU] node1: idle-gpus"


def test_the_page_about_notifications_names_all_that_can_be_said():
    assert [name for name in NAMES if f"`${name}`" not in NOTIFICATIONS] == []
    assert [name for name, _ in a_message().facts if f"`{name}`" not in NOTIFICATIONS] == []


def test_a_hook_gets_the_message_by_environment_and_standard_input(open_place, monkeypatch):
    monkeypatch.setenv("SMTP_PASSWORD", PASSWORD)
    out = open_place / "out"
    out.mkdir()
    out.chmod(0o777)
    program = a_script(
        open_place / "hook",
        f'env >{out}/env; cat >{out}/json; printf "%s\\n" "$@" >{out}/words; id -u >{out}/uid; id -G >{out}/groups',
    )
    with _in_groups_of_root():
        assert attempt(Hook((program, "--urgent", "$(id)")), a_message()) == (True, "")

    environment = dict(line.split("=", 1) for line in (out / "env").read_text().splitlines() if "=" in line)
    assert environment["GPUGUARD_POLICY"] == "idle-gpus"
    assert environment["GPUGUARD_USER"] == "alice"
    assert PASSWORD not in (out / "env").read_text()
    assert json.loads((out / "json").read_bytes())["facts"]["pid"] == 4711
    assert (out / "words").read_text() == "--urgent\n$(id)\n"
    assert (out / "uid").read_text().strip() != "0"
    assert not {"0", "4"} & set((out / "groups").read_text().split())


@contextmanager
def _in_groups_of_root():
    """As a daemon that an administrator started by hand; nothing changes for a user who is not root."""
    if os.geteuid() != 0:
        yield
        return
    former = os.getgroups()
    os.setgroups([0, 4])
    try:
        yield
    finally:
        os.setgroups(former)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_user_is_run_or_becomes_a_word_of_a_hook(hostile, tmp_path):
    process = a_process(command=(hostile, f"; touch {tmp_path}/hit #", f"$(touch {tmp_path}/hit)"), user=hostile)
    message = message_for(a_verdict(process, why=hostile), a_snapshot(a_device(3)))

    assert attempt(Hook(("/bin/true",)), message) == (True, "")
    assert attempt(Email("root", sendmail=a_script(tmp_path / "s", "cat >/dev/null")), message) == (True, "")
    assert not (tmp_path / "hit").exists()


def test_a_hook_that_fails_hangs_or_is_missing_is_told():
    assert attempt(Hook(("/bin/false",)), a_message()) == (False, "/bin/false ends with status 1")
    assert attempt(Hook(("/bin/sleep", "60"), timeout=0.1), a_message()) == (False, "/bin/sleep was not done in time")
    assert "cannot be run: No such file" in attempt(Hook(("/nonexistent",)), a_message())[1]
    assert "/none cannot be run: No such file" in attempt(Email("root", sendmail="/none"), a_message())[1]


def test_a_hook_that_hangs_is_ended_with_all_that_it_has_started(open_place):
    told = open_place / "told"
    told.touch()
    told.chmod(0o666)
    hook = Hook(("/bin/sh", "-c", f"sleep 60 & echo $! >{told}; wait"), timeout=5.0)  # in which it begins

    assert attempt(hook, a_message()) == (False, "/bin/sh was not done in time")
    until(lambda: not runs(int(told.read_text())))


@pytest.mark.root
def test_a_hook_of_a_user_that_is_not_there_is_not_run_as_root(tmp_path):
    went_out, why = attempt(Hook(("/bin/true",), user="no-such-user"), a_message())

    assert (went_out, why) == (False, "there is no user 'no-such-user' to run a hook as")


def test_other_services_are_reached_through_apprise(tmp_path, monkeypatch, capfd):
    a_fake_apprise(tmp_path, monkeypatch)
    target = Apprise(a_secret(tmp_path, f"chat://{PASSWORD}"))

    assert attempt(target, a_message("zh")) == (True, "")
    url, said = json.loads((tmp_path / "said").read_text())
    assert (url, said["body"], said["title"]) == (f"chat://{PASSWORD}", a_message("zh").body, a_message("zh").subject)
    assert PASSWORD not in "".join(capfd.readouterr())
    assert PASSWORD not in (tmp_path / "command").read_text(), "everybody can read a command line"
    assert "apprise" not in sys.modules, "it stays outside"


@pytest.mark.parametrize(("answer", "url", "why"), [
    ("False", "chat://x", "the service did not take the message"),
    ("True", "nonsense://x", "apprise knows no service with such an address"),
    ("1 / 0", "chat://x", "apprise ends with status 1"),
    ("len(bytes(2**30)) > 0", "chat://x", "apprise ends with status 1"),  # an answer that unpacks to so much
    ("__import__('time').sleep(60)", "chat://x", "no answer in time"),
])  # fmt: skip
def test_what_goes_wrong_in_apprise_is_told_in_words(tmp_path, monkeypatch, answer, url, why):
    a_fake_apprise(tmp_path, monkeypatch, answer)
    target = Apprise(a_secret(tmp_path, url), timeout=0.5 if "sleep" in answer else 10.0)

    assert attempt(target, a_message()) == (False, why)


def test_without_apprise_one_is_told_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    target = Apprise(a_secret(tmp_path, "chat://x"))

    assert attempt(target, a_message()) == (False, "apprise is missing: pip install 'gpuguard[notify]'")
    assert list(problems({"team": target})) == ["team: apprise is missing: pip install 'gpuguard[notify]'"]


@pytest.mark.parametrize(
    ("euid", "user", "problem"),
    [
        (0, "nobody", None),
        (0, "nobody-of-that-name", "there is no user"),
        (1000, "nobody", None),
        (1000, "daemon", "only root can run a program as 'daemon'"),
    ],
)
def test_a_hook_whose_user_cannot_be_had_is_said_before_it_is_needed(monkeypatch, euid, user, problem):
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    told = list(problems({"x": Hook(("/bin/true",), user=user)}))

    assert [problem in text for text in told] == ([True] if problem else [])
