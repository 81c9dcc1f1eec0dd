"""What strangers try with `gpuguard web`: nonsense, slowness, floods.  It lives on and shows nothing else."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from chances import luck
from nodes import Gpuguard, until
from proc import free_port
from web_pages import a_server, ask

pytest.importorskip("starlette", reason="NOT TESTED: needs the extra web")
pytest.importorskip("uvicorn", reason="NOT TESTED: needs the extra web")

REQUESTS = 2400
PATHS = (
    "/", "/api/now", "/api/chart?metric=memory&seconds=60", "/api/chart?metric=../../x&seconds=9e999", "*",
    "/%2e%2e/server.py", "/../../etc/passwd", "/page.js/../../server.py", "/..%2f..%2fserver.py", "//etc/passwd",
    "/%00", "/page.js%00.py", "/api/chart?seconds=-1", "/api/chart?metric=%ff%fe", "/api/" + "a" * 9000,
    "/?token=" + "b" * 300, "http://evil/", "/uPlot.LICENSE", "/__init__.py", "/\\..\\server.py",
    "/words.js?" + "&".join(f"a{at}=1" for at in range(900)),
)  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "CONNECT", "TRACE", "get", "", "G" * 5000)
HEADERS = (
    "Host: 127.0.0.1", "Host: evil.example", "Host:", "Host: 127.0.0.1\r\nHost: evil", "Content-Length: -1",
    "X: \x00", "Content-Length: 99999999", "Transfer-Encoding: chunked", "Cookie: gpuguard_token=\"\\",
    "Authorization: Bearer \xff", "Upgrade: websocket\r\nConnection: Upgrade", "Expect: 100-continue",
    "Range: bytes=0-1", "Y: " + "z" * 70000, "no colon",
)  # fmt: skip
STREAM = b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
SECRETS = (b"root:x:", b"def application", b"hmac")


@pytest.fixture(name="server")
def _server(gpuguard: Gpuguard) -> Iterator[tuple[int, psutil.Process]]:
    with a_server(gpuguard, port=free_port()) as (port, process):
        ask(port, "/api/now")
        yield port, psutil.Process(process.pid)
        assert process.poll() is None, "it crashed"
        process.terminate()
        _, said = process.communicate(timeout=20)
        assert said.count("\n") == 1, said  # its address, and no traceback


def requests(seed: int, count: int) -> Iterator[bytes]:
    chance = luck(seed)
    for _ in range(count):
        if chance.random() < 0.2:
            yield chance.randbytes(chance.randrange(1, 400))
            continue
        head = f"{chance.choice(METHODS)} {chance.choice(PATHS)} HTTP/1.{chance.randrange(3)}\r\n"
        head += "".join(f"{line}\r\n" for line in chance.sample(HEADERS, chance.randrange(4)))
        whole = (head + "\r\n").encode("latin-1")
        yield whole[: chance.randrange(len(whole))] if chance.random() < 0.2 else whole


def answer_to(port: int, request: bytes) -> bytes:
    """What came within a moment, after which this client hangs up."""
    with socket.create_connection(("127.0.0.1", port), 10) as asking:
        asking.settimeout(0.05)
        try:
            asking.sendall(request)
            return asking.recv(65536)
        except OSError:  # it hung up on us, or says nothing
            return b""


def test_thousands_of_senseless_requests_neither_crash_nor_leak_nor_escape(server):
    port, process = server
    before = process.num_fds()
    with ThreadPoolExecutor(8) as strangers:
        answers = list(strangers.map(lambda request: answer_to(port, request), requests(7, REQUESTS)))

    assert len(answers) == REQUESTS and sum(answer.startswith(b"HTTP/1.1 ") for answer in answers) > REQUESTS / 3
    assert [answer for answer in answers if any(secret in answer for secret in SECRETS)] == []
    assert [answer for answer in answers if answer.startswith(b"HTTP/1.1 500")] == []
    until(lambda: process.num_fds() <= before + 1)
    assert process.num_threads() <= 16
    assert ask(port, "/api/now")[0].status == 200


def test_a_flood_of_viewers_is_refused_beyond_the_cap_and_forgotten_when_it_ends(server):
    port, process = server
    before = process.num_fds()
    with ExitStack() as flood:
        viewers = [flood.enter_context(socket.create_connection(("127.0.0.1", port), 20)) for _ in range(240)]
        for viewer in viewers:
            viewer.sendall(STREAM)
        statuses = [viewer.recv(12)[9:] for viewer in viewers]
        assert (statuses.count(b"200"), statuses.count(b"503")) == (200, 40)
        assert ask(port, "/api/now")[0].status == 200

    until(lambda: process.num_fds() <= before + 1)
    with socket.create_connection(("127.0.0.1", port), 20) as viewer:
        viewer.sendall(STREAM)
        assert viewer.recv(12)[9:] == b"200"


def test_however_many_connections_are_silent_a_request_is_answered(server):
    port, process = server
    with ExitStack() as held:
        for _ in range(2):
            silent = [held.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(320)]
            assert ask(port, "/api/now")[0].status == 200
        assert process.num_fds() < 400
        assert connected(process.pid, silent[-1]), "the oldest make room"


@pytest.mark.parametrize(
    "body", [b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n", b"Content-Length: 9999999\r\n\r\n"]
)
def test_a_request_with_a_body_is_refused_and_hung_up_on(server, body):
    port, _ = server
    with socket.create_connection(("127.0.0.1", port), 20) as asking:
        asking.sendall(STREAM.removesuffix(b"\r\n") + body)
        pieces = [asking.recv(65536) for _ in range(5)]  # a stream would go on

    assert pieces[0].startswith(b"HTTP/1.1 400")
    assert pieces[-1] == b"", "it hung up"


def test_a_client_that_sends_nothing_or_half_a_request_is_hung_up_on(server):
    port, process = server
    before = process.num_fds()
    with ExitStack() as held:
        slow = [held.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(320)]
        for number, client in enumerate(slow[:250]):
            client.sendall((b"", b"GET / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET")[number % 3])
        until(lambda: process.num_fds() <= before + 1)  # although all of them stay

        assert ask(port, "/api/now")[0].status == 200


def test_a_viewer_that_never_reads_is_hung_up_on(tmp_path):
    gpuguard = Gpuguard(tmp_path, None)
    assert gpuguard("sim", "start", "64xH100-80GB").returncode == 0
    code = "import gpuguard.web.server as it; it.STALLED_SECONDS = 1; from gpuguard.cli import main; main()"
    gpuguard.words = lambda *words: [sys.executable, "-c", code, *words]  # type: ignore[method-assign]
    with a_server(gpuguard, port=free_port()) as (port, process), socket.socket() as viewer:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        viewer.connect(("127.0.0.1", port))
        until(lambda: connected(process.pid, viewer))
        viewer.sendall(b"GET /uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)  # 20 MiB of answers
        until(lambda: not connected(process.pid, viewer))

        assert json.loads(ask(port, "/api/now")[1])["schema"] == 1


def connected(pid: int, viewer: socket.socket) -> bool:
    own = viewer.getsockname()[1]
    connections = psutil.Process(pid).net_connections("tcp")
    return any(connection.raddr and connection.raddr.port == own for connection in connections)
