"""Mail arrives, by SMTP and by sendmail; nothing of it is anything but text, and no password gets out."""

import json
import os
import socket
import threading

import pytest
from builders import a_device, a_process, a_snapshot
from endpoints import (
    HOSTILE,
    PASSWORD,
    a_certificate,
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

from gpuguard.errors import InvalidRequest
from gpuguard.notify.sender import Sender, attempt, problems
from gpuguard.notify.targets import Apprise, Email, Hook, Secret, Webhook
from gpuguard.notify.templates import Template, message_for


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_mail_arrives_as_it_was_written(language):
    message = a_message(language)
    with a_mail_server() as server:
        target = by_smtp(server, ("{user}@example.org", "ops@example.org"), from_="gpu@example.org")
        assert attempt(target, message) == (True, "")

    (letter,) = server.letters
    assert (letter.sender, letter.recipients) == ("gpu@example.org", ["alice@example.org", "ops@example.org"])
    assert (letter.content["Subject"], letter.body) == (message.subject, message.body)
    assert letter.content["Auto-Submitted"] == "auto-generated"
    assert letter.raw.isascii()


@pytest.mark.parametrize(
    ("offers_tls", "is_trusted"),
    [(True, True), (True, False), (False, False)],
    ids=["trusted", "a certificate that is not trusted", "no starttls"],
)
def test_a_mail_goes_out_encrypted_and_logged_in_or_not_at_all(tmp_path, offers_tls, is_trusted):
    certificate, context = a_certificate(tmp_path)
    with a_mail_server(context=context if offers_tls else None, password=PASSWORD) as server:
        trust = {"ca_file": str(certificate)} if is_trusted else {}
        target = by_smtp(server, security="starttls", user="u", password=a_secret(tmp_path), **trust)
        went_out, why = attempt(target, a_message())

    assert went_out == is_trusted
    assert [letter.encrypted for letter in server.letters] == [True] * is_trusted
    assert server.logins == [f"\0u\0{PASSWORD}".encode()] * is_trusted
    assert "certificate" in why or is_trusted or not offers_tls


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"DATA": "554 \x1b[2J no"}, "the mail server answers 554"),
        ({"MAIL": "451 later"}, "the mail server answers 451"),
        ({"MAIL": "garbage"}, "the mail server"),
        ({"MAIL": "x" * 20000}, "the mail server"),
    ],
)
def test_what_a_mail_server_says_is_told_by_its_code_alone(answers, why):
    with a_mail_server(answers=answers) as server:
        assert attempt(by_smtp(server), a_message())[1].startswith(why)


def test_an_address_that_is_refused_is_named_and_the_others_get_the_mail():
    with a_mail_server() as server:
        assert attempt(by_smtp(server, ("ops@example.org", "nobody@example.org")), a_message()) == (
            True,
            "the mail server refuses nobody@example.org",
        )
        assert attempt(by_smtp(server, "nobody@example.org"), a_message())[0] is False

    assert server.letters[0].recipients == ["ops@example.org"]


@pytest.mark.parametrize("user", [None, "", "a,b", "a b@x.org", "x\nBcc: eve", "-oQ/tmp", "a@b.org>", "é"])
def test_a_user_with_an_odd_name_gets_no_mail_and_nobody_else_gets_it(user):
    with a_mail_server() as server:
        message = message_for(a_verdict(a_process(user=user)), a_snapshot(a_device(3)))
        assert attempt(by_smtp(server, "$user@example.org"), message) == (None, "there is no user to write to")

    assert server.letters == []


@pytest.mark.parametrize(("answer", "went_out"), [("550 no such user", None), ("451 later", False)])
def test_a_user_without_a_mailbox_is_not_written_to_again(answer, went_out):
    with a_mail_server(answers={"RCPT": answer}) as server:
        told = attempt(by_smtp(server, "$user@example.org"), a_message())
        assert told == (went_out, "the mail server refuses every address")
        assert attempt(by_smtp(server), a_message())[0] is False, "an admin's own address may be put right"


@pytest.mark.parametrize(
    ("to", "code", "told"),
    [
        (("ops@example.org", "root"), 0, (True, "")),
        ("$user", os.EX_NOUSER, (None, f"ends with status {os.EX_NOUSER}")),  # it is not tried again
        ("root", os.EX_NOUSER, (False, f"ends with status {os.EX_NOUSER}")),
        ("root", 75, (False, "ends with status 75")),
    ],
)
def test_sendmail_gets_the_letter_and_the_addresses_as_words_and_may_fail(tmp_path, to, code, told):
    script = f'printf "%s\\n" "$@" >{tmp_path}/words; cat >{tmp_path}/letter; exit {code}'
    target = Email(to, from_="gpu@example.org", sendmail=a_script(tmp_path / "sendmail", script))
    went_out, why = attempt(target, a_message())

    assert (went_out, why.removeprefix(f"{target.sendmail} ")) == told
    addresses = [address.replace("$user", "alice") for address in target.addresses]
    assert (tmp_path / "words").read_text().split() == ["-i", "-f", "gpu@example.org", "--", *addresses]
    assert "Subject: [gpuguard]" in (tmp_path / "letter").read_text()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_user_becomes_a_header_a_recipient_or_a_second_letter(hostile):
    process = a_process(command=(hostile,), user=hostile)
    verdict = a_verdict(process, why=hostile, policy=hostile, rule=hostile)
    templates = {"en": Template("$user $why $policy", "$why\n.\n$processes")}
    message = message_for(verdict, a_snapshot(a_device(3, name=hostile), host=hostile), "en", templates)
    with a_mail_server() as server:
        assert attempt(by_smtp(server), message)[0]

    (letter,) = server.letters
    names = {"from", "to", "subject", "date", "message-id", "auto-submitted"}
    names |= {"content-type", "content-transfer-encoding", "mime-version"}
    assert {name.lower() for name in letter.content} == names
    assert letter.recipients == ["ops@example.org"]
    assert letter.body == message.body
    assert letter.content["Subject"].strip() == message.subject.replace("=?", "= ?"), "and no encoded word is decoded"


LOGIN = {"to": "root", "user": "u", "password": Secret(env="P")}
NO_TARGETS = [
    *[
        (Email, {"to": to}, "not an address")
        for to in ("not an address", "-oQ/tmp@example.org", "a@b.org\nBcc: eve@b.org", "a@b.org,eve@b.org")
    ],
    (Email, {"to": "root", "from_": "x\ny"}, "not an address"),
    (Email, {"to": "root", "user": "u", "server": "mx"}, "password"),
    (Email, LOGIN, "needs a server"),
    (Email, LOGIN | {"server": "mx", "security": "none"}, "clear text"),
    (Email, {"to": "root", "sendmail": "sendmail"}, "starts with /"),
    (Email, {"to": "root", "server": "mx", "port": 70000}, "not a port"),
    *[
        (Webhook, {"url": url}, "^url: ")
        for url in (
            "http://example.org/x",
            "file:///etc/passwd",
            "https://",
            "https://a:b@example.org/",
            "https://example.org/a b",
            "https://example.org/\r\nX: y",
            "https://[::1/",
            "https://example.org:99999/",
            "http://127.0.0.1.example.org/",
            "http://localhost@example.org/",
        )
    ],
    *[(Hook, {"command": command}, "^command: ") for command in ((), ("tell",), ("./tell",), ("/bin/echo", "a\0b"))],
    *[(Secret, places, "secret") for places in ({}, {"file": "/a", "env": "B"}, {"file": "relative"})],
]


@pytest.mark.parametrize(("kind", "fields", "complaint"), NO_TARGETS)
def test_a_target_that_cannot_work_or_is_not_safe_is_a_fault_when_it_is_made(kind, fields, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        kind(**fields)


def test_a_webhook_gets_a_json_object(tmp_path):
    with a_web_server() as web:
        assert attempt(Webhook(web.url, token=a_secret(tmp_path)), a_message("zh")) == (True, "")

    headers, body = web.requests[0]
    told = json.loads(body)
    assert headers["Content-Type"] == "application/json"
    assert headers["Authorization"] == f"Bearer {PASSWORD}"
    assert told["text"] == a_message("zh").body
    assert told["facts"]["pid"] == 4711
    assert told["schema"] == told["count"] == 1
    assert set(told) == {"schema", "subject", "text", "count", "facts", "further"}


def test_an_address_that_is_a_secret_is_read_from_its_file_and_never_shown(tmp_path):
    with a_web_server(status=403) as web:
        assert attempt(Webhook(a_secret(tmp_path, web.url)), a_message()) == (False, "the web server answers 403")
        assert web.requests
    os.unlink(tmp_path / "secret")

    assert PASSWORD not in attempt(Webhook(a_secret(tmp_path, f"http://example.org/{PASSWORD}")), a_message())[1]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status, tmp_path):
    with a_web_server() as other, a_web_server(status=status, headers={"Location": other.url}) as web:
        assert attempt(Webhook(web.url, token=a_secret(tmp_path)), a_message()) == (
            False,
            f"the web server answers {status}",
        )

    assert other.requests == []


def test_a_certificate_that_nobody_vouches_for_is_refused_before_the_token_goes_out(tmp_path):
    certificate, context = a_certificate(tmp_path)
    with a_web_server(context=context) as web:
        url = web.url.replace("http://127.0.0.1", "https://localhost")
        went_out, why = attempt(Webhook(url, token=a_secret(tmp_path)), a_message())
        assert (went_out, "certificate" in why, web.requests) == (False, True, [])
        trusted = Webhook(url, token=Secret(file=str(tmp_path / "secret")), ca_file=str(certificate))
        assert attempt(trusted, a_message()) == (True, "")

    assert web.requests[0][0]["Authorization"] == f"Bearer {PASSWORD}"


def test_a_certificate_for_another_name_does_not_make_us_tell_the_address(tmp_path, monkeypatch):
    certificate, context = a_certificate(tmp_path)
    with a_web_server(context=context) as web:
        port = web.url.split(":")[2].split("/")[0]
        place = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", int(port)))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: place)
        target = Webhook(a_secret(tmp_path, f"https://{PASSWORD}.example.org:{port}/x"), ca_file=str(certificate))

        assert attempt(target, a_message()) == (False, "the certificate is not to be trusted: Hostname mismatch")


def test_a_message_to_this_machine_does_not_take_the_way_over_a_proxy(monkeypatch):
    with a_web_server() as web, a_web_server() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert attempt(Webhook(web.url), a_message())[0]

    assert proxy.requests == []


def test_an_endpoint_that_is_not_there_does_not_answer_or_talks_nonsense_is_told_in_words():
    with a_web_server() as web:
        gone = web.url
    with a_web_server(hold=threading.Event()) as slow, a_mail_server() as mail:  # which does not speak HTTP
        assert attempt(Webhook(slow.url, timeout=0.1), a_message()) == (False, "no answer in time")
        went_out, why = attempt(Webhook(f"http://127.0.0.1:{mail.port}/"), a_message())
    assert (went_out, "makes no sense" in why) == (False, True)
    assert attempt(Webhook(gone), a_message()) == (False, "Connection refused")


def test_http_is_taken_to_this_machine_and_where_the_admin_insists():
    assert Webhook("http://localhost:8080/x")
    assert Webhook("http://[::1]:8080/x")
    assert Webhook("http://example.org/x", insecure=True)


@pytest.mark.parametrize(
    ("text", "mode", "fault"),
    [
        *[(PASSWORD, mode, "open to others") for mode in (0o440, 0o404, 0o644, 0o620)],
        ("a\r\nX-Evil: 1", 0o400, "more than one line"),
    ],
)
def test_a_secret_that_others_can_read_or_write_or_that_could_add_a_header_is_not_used(tmp_path, text, mode, fault):
    with a_web_server() as web:
        went_out, why = attempt(Webhook(web.url, token=a_secret(tmp_path, text, mode)), a_message())

    assert (went_out, web.requests) == (False, [])
    assert fault in why


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
        until(lambda: len(events) == len(targets))

    shown = repr(events) + repr(targets) + repr(sender) + "".join(map(str, problems(targets)))
    assert {event.outcome for event in events} == {"given up"}
    assert PASSWORD not in shown + "".join(capfd.readouterr())
    assert mail.logins, "the secret was really used"


@pytest.mark.root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "readable"),
    [
        (0, 20003, 0o440, True),  # given to the group of the daemon's user, on purpose
        (0, 20004, 0o440, False),
        (20003, 20003, 0o400, True),
        (20003, 20003, 0o440, False),  # the user's own: the group may be everybody's
        (0, 20003, 0o460, False),
        (0, 20003, 0o444, False),
    ],
)
def test_root_can_give_a_secret_to_the_daemons_group(open_place, owner, group, mode, readable):
    secret = a_secret(open_place, mode=mode)
    os.chown(secret.file, owner, group)
    os.setresgid(-1, 20003, 0)
    os.setresuid(-1, 20003, 0)
    try:
        found = list(problems({"x": Webhook("http://localhost:1/", token=secret)}))
    finally:
        os.setresuid(-1, 0, 0)
        os.setresgid(-1, 0, 0)

    assert (not found) == readable, found
