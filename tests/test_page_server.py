"""The small web server: what it answers, whom it refuses, and that no request harms it."""

import gc
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest
from chances import luck
from nodes import eventually

from gpuguard.errors import BackendError, InvalidRequest
from gpuguard.metrics import http_server
from gpuguard.metrics.http_server import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    Page,
    PageServer,
    host_names,
    listening_address,
)

FUZZED = 2400
GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost:9835\r\nAccept: */*\r\n\r\n"


def a_page(path: str, query: object, accept: str) -> Page:
    if path == "/metrics":
        return Page("x 1\n" * 1000, "text/plain; version=0.0.4")
    if path == "/down":
        raise BackendError("the driver is gone")
    if path == "/broken":
        raise ZeroDivisionError("secret")
    return Page(f"{path} {query}\n", status=404)


@contextmanager
def a_server(pages=a_page, limit=5.0, names=(), at="127.0.0.1:0") -> Iterator[tuple[str, int]]:
    page_server = PageServer(listening_address(at, exposed=False), host_names(names), limit)
    page_server.start(pages)
    host, _, port = page_server.address.rpartition(":")
    try:
        yield host.strip("[]"), int(port)
    finally:
        page_server.close()


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            received += part
    return received


def ask(place: tuple[str, int], request: bytes, *, half_close: bool = False) -> bytes:
    with socket.create_connection(place, 20) as connection:
        with suppress(ConnectionError):
            connection.sendall(request)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        return rest_of(connection)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def request(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


@pytest.mark.parametrize(("method", "content"), [(b"GET", b"x 1\n" * 1000), (b"HEAD", b"")])
def test_a_page_comes_whole_and_the_connection_ends(method, content):
    with a_server() as place:
        head, _, body = ask(place, GOOD.replace(b"GET", method)).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"Content-Length: 4000" in head
    assert body == content


def test_it_serves_by_ipv6_too():
    try:
        with a_server(at="[::1]:0") as place:
            assert status(ask(place, GOOD)) == 200
    except InvalidRequest as error:  # a machine without IPv6
        assert "::1" in str(error)


@pytest.mark.parametrize(
    ("target", "given"),
    [("/x?a=1&b=%31&a=2", b"/x {'a': ['1', '2'], 'b': ['1']}"), ("/a/b#c", b"/a/b {}"), ("/%41", b"/%41 {}")],
)
def test_a_page_is_given_the_path_and_the_query(target, given):
    with a_server() as place:
        assert ask(place, request(f"GET {target} HTTP/1.1", "Host: localhost")).endswith(b"\r\n" + given + b"\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "G(T"])
def test_nothing_but_get_and_head(method):
    with a_server() as place:
        answer = ask(place, request(f"{method} /metrics HTTP/1.1", "Host: localhost", "Content-Length: 3") + b"x=1")

    assert status(answer) == 405 and b"Allow: GET, HEAD\r\n" in answer


OUR_HOSTS = ("localhost", "LOCALHOST:1", "127.0.0.1:9835", "[::1]:9835", "10.1.2.3", socket.gethostname(), "gpu7.lab")
# A page of another name must not read us.
OTHER_HOSTS = (
    ["Host: evil.example"],
    ["Host: localhost.evil.example"],
    ["Host: evil.example:127.0.0.1"],
    ["Host: 127.0.0.1.evil.example"],
    ["Host: localhost", "Host: evil.example"],
    ["Host:"],
    [],
)
NONSENSE = (
    "GET",
    "GET /metrics HTTP",
    "GET http://localhost/metrics HTTP/1.1",
    "GET /\x01 HTTP/1.1",
    "GET /metrics\xff HTTP/1.1",
    "GET /metrics?" + "&".join("a=1" for _ in range(99)) + " HTTP/1.1",
    "GET / HTTP/1.1\r\nno colon",
)
ANSWERED = {
    **{f"host {host}": (200, request("GET /metrics HTTP/1.1", f"Host: {host}")) for host in OUR_HOSTS},
    **{f"headers {headers}": (421, request("GET /metrics HTTP/1.1", *headers)) for headers in OTHER_HOSTS},
    **{f"line {line[:40]!r}": (400, request(line, "Host: localhost")) for line in NONSENSE},
    "without end": (431, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 2 * MAX_REQUEST_BYTES),
}


@pytest.mark.parametrize(("expected", "asked"), ANSWERED.values(), ids=ANSWERED)
def test_what_asks_for_us_and_makes_sense_is_answered(expected, asked):
    with a_server(names=["gpu7.lab"]) as place:
        assert status(ask(place, asked)) == expected


def test_a_fault_of_the_driver_is_said_and_one_of_ours_tells_nothing():
    with a_server() as place:
        down = ask(place, request("GET /down HTTP/1.1", "Host: localhost"))
        broken = ask(place, request("GET /broken HTTP/1.1", "Host: localhost"))
        after = ask(place, GOOD)

    assert status(down) == 503 and b"the driver is gone" in down
    assert status(broken) == 500 and b"secret" not in broken
    assert status(after) == 200


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """What the server takes for the time."""
    reading = [0.0]
    monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=lambda: reading[0]))
    return reading


def test_a_silent_client_is_cut_off_and_holds_up_no_other(now):
    with a_server(limit=5.0) as place, socket.create_connection(place, 60) as silent:
        silent.sendall(b"GET /metr")
        assert status(ask(place, GOOD)) == 200

        now[0] += 6.0
        assert silent.recv(1) == b""


def test_a_peer_that_does_not_read_is_cut_off():
    with a_server(lambda path, query, accept: Page("x" * 50_000_000), limit=0.5) as place, socket.socket() as lazy:
        before = descriptors()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(place)
        lazy.sendall(GOOD)

        assert eventually(lambda: descriptors() > before)
        assert eventually(lambda: descriptors() <= before)


def test_more_connections_than_there_is_room_for_end_the_silent_ones():
    others = descriptors()
    with a_server(limit=60.0) as place, ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(place, 10)) for _ in range(2 * MAX_CONNECTIONS)]
        ours = descriptors() - others

        assert status(ask(place, GOOD)) == 200
        assert silent[0].recv(1) == b""
        assert ours <= 3 * MAX_CONNECTIONS + 10  # each end of those it has, our end of those it hung up on, and its own


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
def test_a_client_that_sends_more_than_a_request_can_still_take_its_answer(monkeypatch, asked):
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 60.0)
    with a_server(limit=60.0) as place, socket.create_connection(place, 10) as connection:
        connection.sendall(asked)
        answer = rest_of(connection)
        connection.sendall(b"x")
        connection.sendall(b"y")  # to a connection that is closed this would be refused

        assert answer.startswith(b"HTTP/1.1 ")


def test_the_time_in_which_a_page_is_made_is_taken_from_no_client(now):
    asked, may_answer = threading.Event(), threading.Event()

    def slow(path: str, query: object, accept: str) -> Page:
        asked.set()
        assert path == "/metrics" or may_answer.wait(60)
        return Page("here\n")

    with a_server(slow, limit=5.0) as place, ExitStack() as held:
        silent, patient = (held.enter_context(socket.create_connection(place, 60)) for _ in range(2))
        patient.sendall(GOOD.replace(b"/metrics", b"/slow"))
        assert asked.wait(60)
        now[0] += 6.0
        assert silent.recv(1) == b""  # whose time is over, and it was looked for others like it

        assert status(ask(place, GOOD)) == 200
        may_answer.set()
        assert status(rest_of(patient)) == 200


def descriptors() -> int:
    gc.collect()  # what other tests have left to it
    return len(os.listdir("/proc/self/fd"))


def a_fuzzed_request(chance: random.Random) -> bytes:
    """A good request with something done to it, or noise."""
    data = bytearray(GOOD)
    kind = chance.randrange(6)
    if kind == 0:
        return chance.randbytes(chance.randrange(0, 300))
    if kind == 1:
        for _ in range(chance.randrange(1, 9)):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == 2:
        at = chance.randrange(len(data))
        data[at:at] = chance.choice([b"\r\n", b"\n", b"\0", b" ", b"Host: x\r\n", b"%", b"?compat=", b"\xff" * 99])
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
            assert not answer or (answer.startswith(b"HTTP/1.1 ") and status(answer) != 500), answer[:99]
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
        listening_address(address, exposed=True)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "[7f00::1]:0", "[::ffff:127.0.0.1]:0", "[fe80::1%lo]:0"])
def test_other_machines_are_let_in_only_on_purpose(address):
    with pytest.raises(InvalidRequest, match="no password"):
        listening_address(address, exposed=False)
    try:
        PageServer(listening_address(address, exposed=True), host_names(())).close()
    except InvalidRequest as error:  # a machine without IPv6, or without that address
        assert "::" in str(error) and "cannot be had" in str(error)


def test_an_address_that_is_taken_is_said():
    with a_server() as (host, port), pytest.raises(InvalidRequest, match="another port"):
        PageServer(listening_address(f"{host}:{port}", exposed=False), host_names(()))


def test_localhost_is_an_address():
    assert str(listening_address("localhost:0", exposed=False)[0]) == "127.0.0.1"
