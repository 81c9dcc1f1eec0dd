"""A webhook gets one JSON object, over a way that can be trusted."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
from endpoints import a_certificate, a_mail_server, a_web_server
from targets import HOSTILE, PASSWORD, a_message, a_secret

from gpuguard.errors import InvalidRequest
from gpuguard.notify.secrets import Secret
from gpuguard.notify.sender import attempt
from gpuguard.notify.webhook import Webhook


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


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_text_stays_one_string_of_the_object(hostile):
    with a_web_server() as web:
        attempt(Webhook(web.url), a_message(why=hostile, policy=hostile))

    told = json.loads(web.requests[0][1])
    assert set(told) == {"schema", "subject", "text", "count", "facts", "further"}
    assert "\x1b" not in told["text"] + told["facts"]["why"]


def test_an_address_that_is_a_secret_is_read_from_its_file_and_never_shown(tmp_path):
    with a_web_server(status=403) as web:
        secret = a_secret(tmp_path, web.url + "/" + PASSWORD)
        went_out, why = attempt(Webhook(secret), a_message())

    assert web.requests
    assert (went_out, why) == (False, "the web server answers 403")
    secret = Secret(file=secret.file)
    os.chmod(secret.file, 0o600)
    with open(secret.file, "w") as file:
        file.write(f"http://example.org/{PASSWORD}")
    assert PASSWORD not in attempt(Webhook(secret), a_message())[1]


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


def test_an_endpoint_that_is_not_there_or_does_not_answer_is_told_in_words():
    with a_web_server() as web:
        gone = web.url
    with a_web_server(hold=threading.Event()) as slow:
        assert attempt(Webhook(slow.url, timeout=0.1), a_message()) == (False, "no answer in time")
    assert attempt(Webhook(gone), a_message()) == (False, "Connection refused")


def test_garbage_instead_of_an_answer_is_told_in_words():
    with a_mail_server() as mail:  # a mail server does not speak HTTP
        went_out, why = attempt(Webhook(f"http://127.0.0.1:{mail.port}/"), a_message())

    assert not went_out
    assert "makes no sense" in why


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/x",
        "ftp://example.org/x",
        "file:///etc/passwd",
        "https://",
        "https://a:b@example.org/",
        "https://example.org/a b",
        "https://example.org/\r\nX: y",
        "https://例子.org/",
        "https://[::1/",
        "https://example.org:99999/",
        "example.org",
        "http://127.0.0.1.example.org/",
        "http://localhost@example.org/",
    ],
)
def test_an_address_that_is_not_safe_is_a_fault_when_it_is_made(url):
    with pytest.raises(InvalidRequest):
        Webhook(url)


def test_http_is_taken_to_this_machine_and_where_the_admin_insists():
    assert Webhook("http://localhost:8080/x")
    assert Webhook("http://[::1]:8080/x")
    assert Webhook("http://example.org/x", insecure=True)
