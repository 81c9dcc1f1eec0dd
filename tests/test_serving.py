"""The small web server: what it answers, whom it refuses, and that no request harms it."""

from __future__ import annotations

import gc
import ipaddress
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import parse_qs, urlsplit

import pytest
from chances import luck
from nodes import eventually

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.metrics import server as serving
from gpuguard.metrics.server import MOST_BYTES, MOST_CONNECTIONS, Page, Server, host_names, listen

FUZZED = 2400
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost:9835\r\nAccept: */*\r\n\r\n"


def a_page(path: str, query: object) -> Page:
    if path == "/metrics":
        return Page("x 1\n" * 1000, "text/plain; version=0.0.4")
    if path == "/down":
        raise BackendError("the driver is gone")
    if path == "/broken":
        raise ZeroDivisionError("secret")
    return Page(f"{path} {query}\n", status=404)


@contextmanager
def a_server(pages=a_page, limit=5.0, names=(), at="127.0.0.1:0") -> Iterator[tuple[str, int]]:
    server = Server(listen(at, exposed=False), pages, host_names(names), limit)
    server.start()
    host, _, port = server.address.rpartition(":")
    try:
        yield host.strip("[]"), int(port)
    finally:
        server.close(5.0)
    assert not any(thread.name == "gpuguard-pages" for thread in threading.enumerate())


def ask(place: tuple[str, int], request: bytes, *, half_close: bool = False) -> bytes:
    """What comes back, until the server closes."""
    with socket.create_connection(place, 20) as connection:
        got = b""
        try:
            connection.sendall(request)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                got += part
        except ConnectionError:
            pass
        return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def request(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


def test_a_page_comes_whole_and_the_connection_ends():
    with a_server() as place:
        head, _, body = ask(place, GOOD).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Content-Length: 4000" in head
    assert body == b"x 1\n" * 1000


def test_it_serves_by_ipv6_too():
    try:
        with a_server(at="[::1]:0") as place:
            assert status(ask(place, GOOD)) == 200
    except InvalidRequest as error:  # a machine without IPv6
        assert "::1" in str(error)


@pytest.mark.parametrize("target", ["/metrics", "/", "//metrics", "/metrics?a=1&b=%31&a=2", "/a/b#c", "/%41", "/a;b"])
def test_an_address_means_what_it_means_to_the_standard_library(target):
    parts = urlsplit(target)

    assert serving._place(target) == (parts.path, parse_qs(parts.query))


def test_head_is_answered_without_a_body():
    with a_server() as place:
        head, _, body = ask(place, GOOD.replace(b"GET", b"HEAD")).partition(b"\r\n\r\n")

    assert b"Content-Length: 4000" in head and body == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_nothing_but_get_and_head(method):
    with a_server() as place:
        answer = ask(place, request(f"{method} /metrics HTTP/1.1", "Host: localhost", "Content-Length: 3") + b"x=1")

    assert status(answer) == 405 and b"Allow: GET, HEAD\r\n" in answer


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9835", "[::1]:9835", "10.1.2.3", socket.gethostname(), "gpu7.lab"]
)
def test_who_asks_for_us_is_answered(host):
    with a_server(names=["gpu7.lab"]) as place:
        assert status(ask(place, request("GET /metrics HTTP/1.1", f"Host: {host}"))) == 200


@pytest.mark.parametrize(
    "headers",
    [
        ["Host: evil.example"],
        ["Host: localhost.evil.example"],
        ["Host: evil.example:127.0.0.1"],
        ["Host: 127.0.0.1.evil.example"],
        ["Host: localhost", "Host: evil.example"],
        ["Host:"],
        [],
    ],
)
def test_a_page_of_another_name_cannot_read_us(headers):
    with a_server() as place:
        assert status(ask(place, request("GET /metrics HTTP/1.1", *headers))) == 421


@pytest.mark.parametrize(
    "line",
    [
        "GET /metrics",
        "GET /metrics HTTP/2.0",
        "GET  /metrics HTTP/1.1",
        "GET http://localhost/metrics HTTP/1.1",
        "GET /\x01 HTTP/1.1",
        "GET /metrics\xff HTTP/1.1",
        "G(T /metrics HTTP/1.1",
        "GET //[ HTTP/1.1",
        "GET /metrics?" + "&".join("a=1" for _ in range(99)) + " HTTP/1.1",
    ],
)
def test_a_request_that_makes_no_sense_is_told_so(line):
    with a_server() as place:
        assert status(ask(place, request(line, "Host: localhost"))) == 400


def test_a_header_that_makes_no_sense_is_told_so():
    with a_server() as place:
        assert status(ask(place, request("GET / HTTP/1.1", "Host: localhost", "no colon"))) == 400


def test_a_request_without_end_is_cut_off():
    with a_server() as place:
        assert status(ask(place, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 2 * MOST_BYTES)) == 431


def test_a_fault_of_the_driver_is_said_and_one_of_ours_tells_nothing():
    with a_server() as place:
        down = ask(place, request("GET /down HTTP/1.1", "Host: localhost"))
        broken = ask(place, request("GET /broken HTTP/1.1", "Host: localhost"))
        after = ask(place, GOOD)

    assert status(down) == 503 and b"the driver is gone" in down
    assert status(broken) == 500 and b"secret" not in broken
    assert status(after) == 200


def test_who_says_nothing_is_cut_off_and_holds_up_nobody():
    with a_server(limit=0.5) as place, socket.create_connection(place, 10) as silent:
        silent.sendall(b"GET /metr")
        begun = time.monotonic()
        assert status(ask(place, GOOD)) == 200
        assert silent.recv(1) == b""

    assert time.monotonic() - begun < 5


def test_a_peer_that_does_not_read_is_cut_off():
    with a_server(lambda path, query: Page("x" * 50_000_000), limit=0.5) as place, socket.socket() as lazy:
        before = descriptors()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(place)
        lazy.sendall(GOOD)

        assert eventually(lambda: descriptors() > before)
        assert eventually(lambda: descriptors() <= before)


def test_more_connections_than_there_is_room_for_end_the_silent_ones():
    others = descriptors()
    with a_server(limit=60.0) as place, ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(place, 10)) for _ in range(2 * MOST_CONNECTIONS)]
        ours = descriptors() - others

        assert status(ask(place, GOOD)) == 200
        assert silent[0].recv(1) == b""
        assert (
            ours <= 3 * MOST_CONNECTIONS + 10
        )  # each end of those it has, our end of those it hung up on, and its own


def test_who_was_told_is_hung_up_on_at_once(monkeypatch):
    monkeypatch.setattr(serving, "LINGER_SECONDS", 60.0)
    with a_server(limit=60.0) as place, ExitStack() as held:
        idle = descriptors()
        connection = held.enter_context(socket.create_connection(place, 10))
        assert eventually(lambda: descriptors() == idle + 2)  # his end and ours
        connection.sendall(GOOD)
        while connection.recv(65536):
            pass

        assert eventually(lambda: descriptors() == idle + 1)


@pytest.mark.parametrize(
    "asked",
    [
        GOOD + GOOD,
        request("GET /metrics HTTP/1.1", "Host: localhost", "Content-Length: 2"),
        request("GET /metrics HTTP/1.1", "Host: localhost", "transfer-encoding: chunked"),
        request("POST /metrics HTTP/1.1", "Host: localhost"),
        request("HELO"),
    ],
)
def test_who_says_more_than_a_request_can_still_take_his_answer(monkeypatch, asked):
    monkeypatch.setattr(serving, "LINGER_SECONDS", 60.0)
    with a_server(limit=60.0) as place, socket.create_connection(place, 10) as connection:
        connection.sendall(asked)
        got = b""
        while part := connection.recv(65536):
            got += part
        connection.sendall(b"x")
        connection.sendall(b"y")  # to a connection that is closed this would be refused

        assert got.startswith(b"HTTP/1.1 ")


def test_the_time_in_which_a_page_is_made_is_taken_from_nobody():
    def slow(path: str, query: object) -> Page:
        time.sleep(1.5 if path == "/slow" else 0.0)
        return Page("here\n")

    with a_server(slow, limit=1.4) as place, ExitStack() as held:
        idle = descriptors()
        slow_one, *others = (held.enter_context(socket.create_connection(place, 10)) for _ in range(3))
        assert eventually(lambda: descriptors() == idle + 6)
        slow_one.sendall(GOOD.replace(b"/metrics", b"/slow"))
        for each in others:
            each.sendall(GOOD)

        assert all(status(each.recv(65536)) == 200 for each in (*others, slow_one))


def descriptors() -> int:
    gc.collect()  # what other tests have left to it
    return len(os.listdir("/proc/self/fd"))


def a_fuzzed_request(chance: random.Random) -> bytes:
    """A good request with something done to it, or none at all."""
    data = bytearray(GOOD)
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(0, 300))
    if kind == 1:
        for _ in range(chance.randrange(1, 9)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == 2:
        place = chance.randrange(len(data))
        data[place:place] = chance.choice(
            [b"\r\n", b"\n", b"\0", b" ", b"Host: x\r\n", b"%", b"?compat=", b"\xff" * 99]
        )
    elif kind == 3:
        del data[chance.randrange(len(data)) :]
    elif kind == 4:
        data = bytearray(GOOD.replace(b"/metrics", b"/" + chance.randbytes(9).hex().encode() + b"?a=%ff&a&=&&"))
    else:
        data = data * chance.randrange(2, 5)
    return bytes(data)


def test_two_thousand_hostile_requests_leave_nothing_behind():
    """No answer but HTTP, no descriptor, no thread, and the next good request is answered."""
    chance = luck(20261120)
    with a_server() as place:
        before, threads = descriptors(), set(threading.enumerate())
        for _ in range(FUZZED):
            answer = ask(place, a_fuzzed_request(chance), half_close=True)
            assert not answer or (answer.startswith(b"HTTP/1.1 ") and status(answer) in serving._WORDS), answer[:99]
            assert not answer or status(answer) != 500
        assert status(ask(place, GOOD)) == 200
        assert eventually(lambda: descriptors() <= before and set(threading.enumerate()) <= threads)


def test_hanging_up_at_any_moment_is_no_trouble():
    chance = luck(7)
    with a_server() as place:
        before = descriptors()
        for _ in range(300):
            with socket.create_connection(place, 10) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST, not FIN
                connection.sendall(GOOD[: chance.randrange(len(GOOD) + 1)])
        assert status(ask(place, GOOD)) == 200
        assert eventually(lambda: descriptors() <= before)


@pytest.mark.parametrize(
    "address",
    ["", "9835", ":9835", "somewhere:9835", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536", "1.2.3:1", "127.1:1",
     "0177.0.0.1:1", "2130706433:1", "1.2.3.4\0:1", "[::1]]:1", "\udc80:1"],
)  # fmt: skip
def test_an_address_that_means_nothing_is_refused_with_advice(address):
    with pytest.raises(InvalidRequest, match=r"127\.0\.0\.1:9835"):
        listen(address, exposed=True)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "[7f00::1]:0", "[::ffff:127.0.0.1]:0", "[fe80::1%lo]:0"])
def test_others_are_let_in_only_on_purpose(address):
    with pytest.raises(InvalidRequest, match="no password"):
        listen(address, exposed=False)
    try:
        listen(address, exposed=True).close()
    except InvalidRequest as error:  # a machine without IPv6, or without that address
        assert "::" in str(error) and "cannot be had" in str(error)


def test_an_address_that_is_taken_is_said():
    with a_server() as (host, port), pytest.raises(InvalidRequest, match="another port"):
        listen(f"{host}:{port}", exposed=False)


@pytest.mark.parametrize("length", [4, 16])
def test_what_is_an_address_is_what_the_standard_library_says(length):
    chance = random.Random(length)
    for _ in range(2000):
        packed = bytes(chance.choice([0, 0, 1, 127, 255]) for _ in range(length))
        text = str(ipaddress.ip_address(packed))
        broken = text.replace(chance.choice(".:"), chance.choice([".0", ":", "..", "1"]), 1)

        assert serving._numbers(text)[1] == packed
        assert serving._is_address(broken) == _is_address(broken)


def _is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def test_localhost_is_an_address():
    with listen("localhost:0", exposed=False) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
