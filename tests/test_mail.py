"""Mail arrives, by SMTP and by sendmail; nothing of it is anything but text, and no password gets out."""

from __future__ import annotations

import os

import pytest
from builders import a_device, a_process, a_snapshot
from endpoints import a_certificate, a_mail_server
from targets import HOSTILE, PASSWORD, a_message, a_script, a_secret, a_verdict, by_smtp

from gpuguard.errors import InvalidRequest
from gpuguard.notify.mail import Email
from gpuguard.notify.secrets import Secret
from gpuguard.notify.sender import attempt
from gpuguard.notify.templates import Template, message_for


def test_a_mail_arrives_with_subject_and_text():
    with a_mail_server() as server:
        assert attempt(by_smtp(server, from_="gpu@example.org"), a_message()) == (True, "")

    (letter,) = server.letters
    assert (letter.sender, letter.recipients) == ("gpu@example.org", ["ops@example.org"])
    assert letter.content["Subject"] == a_message().subject
    assert letter.content["Auto-Submitted"] == "auto-generated"
    assert "utilization is 0%" in letter.body


def test_a_chinese_mail_arrives_as_it_was_written():
    with a_mail_server() as server:
        attempt(by_smtp(server), a_message("zh"))

    assert server.letters[0].body == a_message("zh").body
    assert server.letters[0].content["Subject"] == a_message("zh").subject
    assert server.letters[0].raw.isascii()


def test_a_mail_is_encrypted_and_logged_in(tmp_path):
    certificate, context = a_certificate(tmp_path)
    with a_mail_server(context=context, password=PASSWORD) as server:
        target = by_smtp(server, security="starttls", ca_file=str(certificate), user="u", password=a_secret(tmp_path))
        assert attempt(target, a_message()) == (True, "")

    assert server.letters[0].encrypted
    assert server.logins == [f"\0u\0{PASSWORD}".encode()]


def test_a_certificate_that_nobody_vouches_for_is_refused_before_the_password_goes_out(tmp_path):
    _, context = a_certificate(tmp_path)
    with a_mail_server(context=context, password=PASSWORD) as server:
        target = by_smtp(server, security="starttls", user="u", password=a_secret(tmp_path))
        went_out, why = attempt(target, a_message())

    assert not went_out
    assert "certificate" in why
    assert server.logins == []


def test_without_starttls_nothing_goes_out_in_clear_text(tmp_path):
    with a_mail_server(password=PASSWORD) as server:
        target = by_smtp(server, security="starttls", user="u", password=a_secret(tmp_path))
        assert not attempt(target, a_message())[0]

    assert (server.letters, server.logins) == ([], [])


def test_a_server_that_repeats_the_password_in_its_answer_does_not_make_us_repeat_it(tmp_path):
    with a_mail_server(password="another one") as server:
        target = by_smtp(server, user="u", password=a_secret(tmp_path))
        went_out, why = attempt(target, a_message())

    assert (went_out, why) == (False, "the mail server refuses user and password")


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


def test_a_mail_can_go_to_the_user_himself():
    with a_mail_server() as server:
        attempt(by_smtp(server, ("$user@example.org", "ops@example.org")), a_message())

    assert server.letters[0].recipients == ["alice@example.org", "ops@example.org"]


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


def test_sendmail_gets_the_letter_and_the_addresses_as_words(tmp_path):
    program = a_script(tmp_path / "sendmail", f'printf "%s\\n" "$@" >{tmp_path}/words; cat >{tmp_path}/letter')
    target = Email(("ops@example.org", "root"), from_="gpu@example.org", sendmail=program)

    assert attempt(target, a_message()) == (True, "")
    assert (tmp_path / "words").read_text().split() == ["-i", "-f", "gpu@example.org", "--", "ops@example.org", "root"]
    assert "Subject: [gpuguard]" in (tmp_path / "letter").read_text()


def test_a_sendmail_that_knows_no_such_user_is_not_asked_again(tmp_path):
    program = a_script(tmp_path / "sendmail", f"cat >/dev/null; exit {os.EX_NOUSER}")

    assert attempt(Email("$user", sendmail=program), a_message())[0] is None
    assert attempt(Email("root", sendmail=program), a_message())[0] is False


def test_a_sendmail_that_fails_or_is_missing_is_told(tmp_path):
    assert attempt(Email("root", sendmail=a_script(tmp_path / "s", "cat >/dev/null; exit 75")), a_message()) == (
        False,
        f"{tmp_path}/s ends with status 75",
    )
    assert attempt(Email("root", sendmail="/nonexistent/sendmail"), a_message()) == (False, "No such file or directory")


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


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"to": "not an address"}, "not an address"),
        ({"to": "-oQ/tmp@example.org"}, "not an address"),
        ({"to": "a@b.org\nBcc: eve@b.org"}, "not an address"),
        ({"to": "a@b.org,eve@b.org"}, "not an address"),
        ({"to": "root", "from_": "x\ny"}, "not an address"),
        ({"to": "root", "user": "u", "server": "mx"}, "password"),
        ({"to": "root", "user": "u", "password": Secret(env="P")}, "needs a server"),
        ({"to": "root", "user": "u", "password": Secret(env="P"), "server": "mx", "security": "none"}, "clear text"),
        ({"to": "root", "sendmail": "sendmail"}, "starts with /"),
        ({"to": "root", "server": "mx", "port": 70000}, "not a port"),
    ],
)
def test_a_mail_target_that_cannot_work_is_a_fault_when_it_is_made(fields, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        Email(**fields)
