"""Secrets are read where only we can read them, and show up nowhere."""

from __future__ import annotations

import os
import tempfile

import pytest
from builders import a_device, a_snapshot
from endpoints import a_mail_server, a_web_server, wait_until
from targets import PASSWORD, a_fake_apprise, a_message, a_secret, a_verdict, by_smtp

from gpuguard.errors import InvalidRequest
from gpuguard.notify.apprise import Apprise
from gpuguard.notify.hook import Hook
from gpuguard.notify.mail import Email
from gpuguard.notify.secrets import Secret
from gpuguard.notify.sender import Sender, attempt, problems
from gpuguard.notify.webhook import Webhook


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o644, 0o620])
def test_a_secret_that_others_can_read_or_write_is_not_used(mode, tmp_path):
    with a_web_server() as web:
        went_out, why = attempt(Webhook(web.url, token=a_secret(tmp_path, mode=mode)), a_message())

    assert not went_out
    assert "open to others" in why
    assert web.requests == []


@pytest.mark.root
def test_a_secret_of_another_user_is_not_used(tmp_path):
    secret = a_secret(tmp_path)
    os.chown(secret.file, 12345, 12345)

    assert "open to others" in attempt(Webhook("http://localhost:1/", token=secret), a_message())[1]


def test_a_secret_behind_a_link_or_a_fifo_is_not_used_and_does_not_hang(tmp_path):
    (tmp_path / "link").symlink_to(a_secret(tmp_path).file)
    os.mkfifo(tmp_path / "fifo", 0o400)
    (tmp_path / "first").write_text(PASSWORD)
    (tmp_path / "first").chmod(0o400)
    os.link(tmp_path / "first", tmp_path / "second")

    for name in ("link", "fifo", "second", "missing"):
        went_out, why = attempt(Webhook("http://localhost:1/", token=Secret(file=str(tmp_path / name))), a_message())
        assert not went_out
        assert f"the secret {tmp_path}/{name}" in why


def test_a_secret_of_several_lines_cannot_add_a_header(tmp_path):
    with a_web_server() as web:
        went_out, why = attempt(Webhook(web.url, token=a_secret(tmp_path, "a\r\nX-Evil: 1")), a_message())

    assert (went_out, web.requests) == (False, [])
    assert "more than one line" in why


def test_a_secret_can_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOOK_TOKEN", PASSWORD)
    with a_web_server() as web:
        assert attempt(Webhook(web.url, token=Secret(env="HOOK_TOKEN")), a_message())[0]
    assert web.requests[0][0]["Authorization"] == f"Bearer {PASSWORD}"

    monkeypatch.delenv("HOOK_TOKEN")
    assert (
        "$HOOK_TOKEN is empty or missing" in attempt(Webhook(web.url, token=Secret(env="HOOK_TOKEN")), a_message())[1]
    )


@pytest.mark.parametrize("places", [{}, {"file": "/a", "env": "B"}, {"file": "relative"}])
def test_a_secret_has_exactly_one_place(places):
    with pytest.raises(InvalidRequest):
        Secret(**places)


def test_no_secret_shows_in_any_output_representation_or_event(tmp_path, monkeypatch, capfd):
    events = []
    monkeypatch.setenv("TOKEN", PASSWORD)
    a_fake_apprise(tmp_path, monkeypatch, "False")
    with a_mail_server(password="other", answers={"QUIT": f"221 {PASSWORD}"}) as mail, a_web_server(status=500) as web:
        targets = {
            "mail": by_smtp(mail, user="u", password=Secret(env="TOKEN")),
            "web": Webhook(web.url, token=Secret(env="TOKEN")),
            "chat": Apprise(a_secret(tmp_path, f"chat://{PASSWORD}")),
            "hook": Hook(("/bin/sh", "-c", "env >&2; exit 1")),
        }
        sender = Sender(targets, events.append)
        for name in targets:
            sender.notify(name, a_verdict(), a_snapshot(a_device(3)))
        sender.stop(10)
        wait_until(lambda: len(events) == len(targets))

    shown = repr(events) + repr(targets) + repr(sender) + "".join(map(str, problems(targets)))
    assert {event.outcome for event in events} == {"given up"}
    assert PASSWORD not in shown + "".join(capfd.readouterr())
    assert mail.logins, "the secret was really used"


def test_problems_names_what_is_wrong_before_the_first_alarm(tmp_path):
    targets = {
        "fine": Hook(("/bin/true",)),
        "gone": Hook(("/nonexistent/tell",)),
        "mail": Email("root", sendmail="/nonexistent/sendmail"),
        "open": Webhook("https://example.org/", token=a_secret(tmp_path, mode=0o644)),
    }

    assert [problem.partition(":")[0] for problem in problems(targets)] == ["gone", "mail", "open"]


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "readable"),
    [
        (0, 20003, 0o440, True),  # given to the group of the daemon's user, on purpose
        (0, 20004, 0o440, False),
        (20003, 20003, 0o400, True),
        (20003, 20003, 0o440, False),  # his own: the group may be everybody's
        (0, 20003, 0o460, False),
        (0, 20003, 0o444, False),
    ],
)
def test_root_can_give_a_secret_to_the_daemons_group(owner, group, mode, readable):
    with tempfile.TemporaryDirectory(prefix="gpuguard-test-") as place:
        os.chmod(place, 0o755)
        path = f"{place}/secret"
        with open(path, "w", encoding="utf-8") as file:
            file.write(PASSWORD)
        os.chown(path, owner, group)
        os.chmod(path, mode)
        os.setresgid(-1, 20003, 0)
        os.setresuid(-1, 20003, 0)
        try:
            found = list(problems({"x": Webhook("http://localhost:1/", token=Secret(file=path))}))
        finally:
            os.setresuid(-1, 0, 0)
            os.setresgid(-1, 0, 0)

    assert (not found) == readable, found
