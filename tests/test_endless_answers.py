"""Whoever answers a message without end, or a byte at a time, gets no more of our time and memory than was meant."""

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import endpoints
import pytest
from endpoints import a_certificate, a_mail_server, a_message, by_smtp

from gpuguard.errors import GpuguardError
from gpuguard.metrics.influx import InfluxClient
from gpuguard.notify.connections import MOST_BYTES
from gpuguard.notify.sender import attempt
from gpuguard.notify.targets import Email, Webhook

LONG = 200 * MOST_BYTES  # what a peer says at most, so that a test without a bound ends as well
PIECES = 400  # of a slow peer, likewise
ENDLESS = {
    "smtp": b"220-" + b"x" * 60 + b"\r\n",
    "http": b"HTTP/1.1 100 Continue\r\n\r\n",
    "headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 50 + b"X-Long: " + b"x" * 60_000 + b"\r\n",
}


@contextmanager
def a_peer(talk: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Somebody on a free port who talks, whatever is said to them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError), ExitStack() as stack:
                peer = stack.enter_context(listener.accept()[0])
                talk(stack.enter_context(context.wrap_socket(peer, server_side=True)) if context else peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join(60)
            assert not thread.is_alive()


def without_end(text: bytes) -> Callable[[socket.socket], None]:
    def talk(peer: socket.socket) -> None:
        for _ in range(LONG // len(text)):
            peer.sendall(text)

    return talk


def slowly(text: bytes) -> Callable[[socket.socket], None]:
    def talk(peer: socket.socket) -> None:
        for byte in itertools.islice(itertools.cycle(text), PIECES):
            peer.sendall(bytes([byte]))
            time.sleep(0.05)

    return talk


def once(text: bytes) -> Callable[[socket.socket], None]:
    def talk(peer: socket.socket) -> None:
        asked = b""
        while b"x=1" not in asked:
            asked += peer.recv(4096)
        peer.sendall(text)

    return talk


@pytest.mark.parametrize(
    ("talk", "timeout", "why"),
    [
        (without_end(ENDLESS["smtp"]), 60.0, "it answers without end"),  # the greeting has no last line
        (slowly(b"220-x\r\n"), 0.3, "no answer in time"),
    ],
)
def test_a_mail_server_that_talks_without_end_fills_no_memory_and_has_its_time_and_no_more(talk, timeout, why):
    with a_peer(talk) as port:
        target = Email("ops@example.org", server="127.0.0.1", port=port, security="none", timeout=timeout)
        assert attempt(target, a_message()) == (False, why)


def test_each_answer_of_a_mail_server_has_its_time(monkeypatch):
    # A server that takes a while for each of its answers is slow, and no enemy.
    answer = endpoints._answer

    def slow_answer(*what: object) -> str:
        time.sleep(1.0)
        return str(answer(*what))

    monkeypatch.setattr(endpoints, "_answer", slow_answer)
    with a_mail_server() as server:
        assert attempt(by_smtp(server, timeout=5.0), a_message()) == (True, "")


@pytest.mark.parametrize("kind", ["http", "headers"])
def test_a_web_server_that_never_comes_to_its_answer_is_given_up(kind):
    with a_peer(without_end(ENDLESS[kind])) as port:
        went_out, why = attempt(Webhook(f"http://127.0.0.1:{port}/"), a_message())

    assert not went_out
    assert why in ("it answers without end", "the answer makes no sense (HTTPException)")


@pytest.mark.parametrize(
    ("talk", "timeout", "why"),
    [
        (without_end(ENDLESS["http"]), 60.0, "it answers without end"),
        (slowly(b"HTTP/1.1 200 OK"), 0.5, "no answer in time"),
    ],
)
def test_it_is_the_same_behind_tls(tmp_path, talk, timeout, why):
    certificate, context = a_certificate(tmp_path)
    with a_peer(talk, context) as port:
        target = Webhook(f"https://localhost:{port}/", ca_file=str(certificate), timeout=timeout)
        assert attempt(target, a_message()) == (False, why)
    with a_peer(without_end(ENDLESS["smtp"]), context) as port:
        mail = Email("a@b.c", server="localhost", port=port, security="tls", ca_file=str(certificate))
        assert attempt(mail, a_message()) == (False, "it answers without end")


@pytest.mark.parametrize("before", [b"", b"x" * 290])
def test_a_server_that_repeats_the_token_does_not_make_us_repeat_it(before):
    answer = before + b"Token s3cret-and-long, was sent"
    whole = b"HTTP/1.1 401 No\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
    with a_peer(once(whole)) as port, pytest.raises(GpuguardError, match="401") as refused:
        InfluxClient(f"http://127.0.0.1:{port}/write?db=x", "s3cret-and-long").send(["a x=1"])

    assert "s3c" not in str(refused.value)


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (without_end(ENDLESS["http"]), "without end"),
        (slowly(b"HTTP/1.1 200 OK"), "timed out|in time"),
        (once(b"\0\1\2 no answer\r\n\r\n"), "answers nonsense"),
        (once(b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "answers nonsense"),
        (slowly(b"HTTP/1.1 400 Bad\r\n\r\n"), "timed out|in time"),
    ],
)
def test_what_influxdb_gets_waits_whatever_answers_there(talk, why):
    with a_peer(talk) as port:
        patience = 0.5 if "in time" in why else 60.0
        outbox = InfluxClient(f"http://127.0.0.1:{port}/write?db=x", timeout=patience)
        with pytest.raises(GpuguardError, match=why):
            outbox.send(["a x=1"])

    assert outbox.waiting == 1
