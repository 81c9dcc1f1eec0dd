"""The daemon's socket: the user is the one that the kernel names, and no client can keep others from asking."""

import json
import os
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chances import THE_SAME
from daemons import ask
from guard_scene import SOMEBODY
from nodes import eventually, start
from structures import mutants
from test_daemon_requests import Requests

from gpuguard import users
from gpuguard.backends import simulated
from gpuguard.claims import daemon_client as client
from gpuguard.claims import grants
from gpuguard.claims.daemon_client import MAX_REQUEST_BYTES, SOCKET_NAME, exchange
from gpuguard.claims.directory import BROKERED, LockDirectory, lock_directory
from gpuguard.cli import run_command_line
from gpuguard.daemon import exemptions, requests, socket_server
from gpuguard.daemon.broker import Broker
from gpuguard.daemon.socket_server import MAX_CONNECTIONS, MAX_CONNECTIONS_PER_USER, Handler, SocketServer
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.jsonio import loads
from gpuguard.model import ALL_FIELDS, Subject
from gpuguard.policies.engine import PolicyStatus
from gpuguard.policy_files.loader import PolicyFile
from gpuguard.queue import broker_client
from gpuguard.queue.tickets import as_json
from gpuguard.request import Request


@pytest.fixture
def directory(tmp_path: Path) -> LockDirectory:
    # Longer than a socket's address may be.
    return lock_directory(str(tmp_path / ("d" * 120)))


def echo(uid, request):
    if "refuse" in request:
        raise InvalidRequest(request["refuse"])
    return {"uid": uid, "asked": request}


@contextmanager
def a_server(directory: LockDirectory, handle: Handler = echo) -> Iterator[LockDirectory]:
    socket_server = SocketServer(directory, handle)
    try:
        yield directory
    finally:
        socket_server.close()


@pytest.fixture
def opened(directory: LockDirectory) -> Iterator[LockDirectory]:
    with a_server(directory):
        yield directory


def connect(directory: LockDirectory) -> socket.socket:
    here = os.open(directory.path, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60.0)
    try:
        connection.connect(f"/proc/self/fd/{here}/{SOCKET_NAME}")
    except BlockingIOError:
        connection.close()
        raise
    finally:
        os.close(here)
    return connection


def said(connection: socket.socket) -> bytes:
    try:
        return connection.makefile("rb").readline()
    except ConnectionResetError:
        return b""


def test_the_reply_is_for_the_user_who_asks(opened):
    assert ask(opened, {"do": "x"}) == {"uid": os.geteuid(), "asked": {"do": "x"}}


@pytest.mark.parametrize(("words", "told"), [("not you", r"^not you$"), ("\ud800" * 650, "\ud800" * 100)])
def test_a_refusal_is_an_error_with_its_words_on_one_line(opened, words, told):
    with pytest.raises(GpuguardError, match=told):
        ask(opened, {"refuse": words})


ASK_AS_SOMEBODY = """
import os, sys
from gpuguard.claims.daemon_client import exchange
from gpuguard.claims.directory import lock_directory
directory = lock_directory(sys.argv[1])
os.setgroups([]); os.setresgid(*[int(sys.argv[2])] * 3); os.setresuid(*[int(sys.argv[2])] * 3)
print(exchange(directory, {"uid": 0})[0]["uid"])
"""


@pytest.mark.root
def test_the_user_who_asks_is_the_one_that_the_kernel_names():
    with tempfile.TemporaryDirectory(prefix="gpuguard-socket-") as place:  # pytest's own tmp_path lets no other user in
        os.chmod(place, 0o755)
        with a_server(lock_directory(f"{place}/claims")) as directory:
            mode = os.stat(f"{directory.path}/{SOCKET_NAME}").st_mode
            words = [sys.executable, "-c", ASK_AS_SOMEBODY, directory.path, str(SOMEBODY)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert done.stdout == f"{SOMEBODY}\n", done.stderr
    assert stat.S_ISSOCK(mode) and mode & 0o777 == 0o666


def test_the_socket_of_a_dead_daemon_is_replaced_and_a_closed_one_says_what_to_do(directory):
    with a_server(directory), a_server(directory, lambda uid, request: {"second": True}):
        assert ask(directory, {})["second"]

    assert not os.path.lexists(f"{directory.path}/{SOCKET_NAME}")
    with pytest.raises(GpuguardError, match=r"no daemon answers .* `gpuguard daemon"):
        ask(directory, {})


@pytest.mark.root
def test_a_socket_of_another_user_is_not_the_daemon(directory, monkeypatch):
    with socket.socket(socket.AF_UNIX) as listener, client.short_path(directory) as path:
        listener.bind(path)
        listener.listen()
        monkeypatch.setattr(client, "peer_uid", lambda connection: SOMEBODY)

        with pytest.raises(GpuguardError, match="not that of the daemon"):
            ask(directory, {})


@pytest.mark.parametrize(
    "line",
    [
        *(b"\n", b"garbage\n", b"[]\n", b"1\n", b'{"do": []}\n', b'{"do": {"keep": 1}}\n', b"\xff\xfe\n"),
        b"[" * (MAX_REQUEST_BYTES - 1) + b"\n",
        b'{"a": ' * 600 + b"\n",
        b"9" * (MAX_REQUEST_BYTES - 1) + b"\n",
        b"x" * (MAX_REQUEST_BYTES + 1),
        b"x" * (1 << 20),
    ],
    ids=lambda line: repr(line[:10]),
)
def test_garbage_gets_an_answer_and_the_next_one_is_served(opened, line):
    with connect(opened) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(line)
        answer = said(connection)

    assert not answer or json.loads(answer)["ok"] is False
    assert answer or len(line) > MAX_REQUEST_BYTES
    assert ask(opened, {})


def test_a_request_may_come_in_pieces(opened):
    with connect(opened) as connection:
        for piece in (b'{"do"', b': "x"', b"}\n"):
            connection.sendall(piece)
            time.sleep(0.02)
        assert json.loads(said(connection))["asked"] == {"do": "x"}


@pytest.fixture
def patient(opened: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> LockDirectory:
    """A server that waits much longer for a request than its clients wait for it."""
    monkeypatch.setattr(socket_server, "REQUEST_SECONDS", 600.0)
    return opened


def test_a_client_that_sends_nothing_is_sent_away(opened, monkeypatch):
    monkeypatch.setattr(socket_server, "REQUEST_SECONDS", 0.3)
    with connect(opened) as silent:
        assert said(silent) == b""


def test_a_client_that_sends_nothing_keeps_no_other_waiting(patient):
    with connect(patient):
        assert ask(patient, {})


def test_a_client_that_never_reads_keeps_no_other_waiting(patient):
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(connect(patient))
            connection.sendall(b'{"do": "' + b"x" * 4000 + b'"}\n')
        assert ask(patient, {})


def test_one_user_has_only_so_many_connections(patient):
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(patient)) for _ in range(MAX_CONNECTIONS_PER_USER + 3)]

        assert [said(connection) for connection in connections[MAX_CONNECTIONS_PER_USER:]] == [b""] * 3


def test_a_client_that_hangs_up_leaves_nothing_behind(opened):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        connect(opened).close()

    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert ask(opened, {})


def test_one_user_with_many_uids_keeps_no_other_out(patient, monkeypatch, tmp_path):
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "none"))  # that of this machine may name them
    numbers, real = iter(range(100_000, 200_000)), socket_server.peer_uid

    def uid_of(connection: socket.socket) -> int:
        return next(numbers) if threading.current_thread().name == "gpuguard-socket" else real(connection)

    monkeypatch.setattr(socket_server, "peer_uid", uid_of)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(patient)) for _ in range(MAX_CONNECTIONS)]
        assert ask(patient, {})
        assert said(silent[0]) == b""


def test_requests_of_one_user_with_many_uids_that_take_long_keep_no_other_out(directory, monkeypatch, tmp_path):
    monkeypatch.setattr(socket_server, "REQUEST_SECONDS", 600.0)
    (tmp_path / "subuid").write_text("bob:100000:65536\n")
    monkeypatch.setattr(users, "SUBUIDS", str(tmp_path / "subuid"))
    uids, real = iter(range(100_000, 100_000 + MAX_CONNECTIONS)), socket_server.peer_uid

    def uid_of(connection: socket.socket) -> int:
        is_servers = threading.current_thread().name == "gpuguard-socket"
        return next(uids, os.geteuid()) if is_servers else real(connection)

    monkeypatch.setattr(socket_server, "peer_uid", uid_of)
    done = threading.Event()
    handle = lambda uid, request: {"uid": uid, "did": request["do"] == "claim" and done.wait(120)}  # noqa: E731
    with a_server(directory, handle), ExitStack() as stack:
        connections = [stack.enter_context(connect(directory)) for _ in range(MAX_CONNECTIONS)]
        stack.callback(done.set)
        for connection in connections:
            with suppress(OSError):  # it was sent away
                connection.sendall(b'{"do": "claim"}\n')

        assert ask(directory, {"do": "keep"})["uid"] == os.geteuid()
        done.set()
        assert json.loads(said(connections[0]))["uid"] == 100_000


def is_answered(directory: LockDirectory) -> bool:
    try:
        return bool(ask(directory, {}))
    except GpuguardError:  # "busy, try again"
        return False


def test_a_client_that_never_stops_connecting_keeps_no_other_out(opened):
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with suppress(BlockingIOError), connect(opened):
                pass

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert eventually(lambda: is_answered(opened))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["claim", "release"])
def test_a_fault_of_ours_ends_one_request_and_not_the_service(directory, monkeypatch, name):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    with a_server(directory, lambda uid, request: {"sum": 1 + request["number"]}):
        with pytest.raises(GpuguardError, match="a fault inside the daemon"):
            ask(directory, {"do": name, "number": "1"})

        assert ask(directory, {"do": name, "number": 1})["sum"] == 2
    assert [fault.exc_type for fault in told] == [TypeError]


@contextmanager
def a_full_socket() -> Iterator[socket.socket]:
    """One to which was written what is not received."""
    with socket.socket() as listener, socket.socket() as ours:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        ours.connect(listener.getsockname())
        with listener.accept()[0]:
            ours.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    ours.send(bytes(65536))
            yield ours


@pytest.mark.parametrize("kernel", ["as it is", "before 6.16"])
@pytest.mark.parametrize("first", [b"", b"{", b'{"do": "x"}\n'], ids=["alone", "behind a half", "behind a request"])
def test_open_files_that_a_client_sends_hold_up_no_other(directory, monkeypatch, kernel, first):
    """A socket can let its last holder wait for days when it closes it, and that one was the thread that listens."""
    if kernel != "as it is":
        monkeypatch.setattr(socket_server, "SO_PASSRIGHTS", 0x7FFF)
    until_all_is_sent = threading.Event()
    with a_server(directory, lambda uid, request: {"waited": until_all_is_sent.wait(60)}), ExitStack() as stack:
        with connect(directory) as busy:
            busy.send(b"{}\n")
            for _ in range(MAX_CONNECTIONS_PER_USER - 1):
                lingers = stack.enter_context(a_full_socket())
                with connect(directory) as connection, suppress(PermissionError):  # of a kernel that passes none on
                    if first:
                        connection.send(first)
                    socket.send_fds(connection, [b"{"], [lingers.fileno()])
                    lingers.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
                lingers.close()
            until_all_is_sent.set()
            assert said(busy)

        assert all(ask(directory, {"do": str(number)}) for number in range(MAX_CONNECTIONS))


@pytest.mark.parametrize("slow", ["claim", "release"])
def test_what_takes_long_for_one_holds_up_no_request_for_something_else(directory, slow):
    """A user with much open can make it take seconds to release a claim, and ask for that again and again."""
    done = threading.Event()
    handle = lambda uid, request: {"did": request["do"] == slow and done.wait(60)}  # noqa: E731
    with a_server(directory, handle), ExitStack() as stack, connect(directory) as connection:
        stack.callback(done.set)
        connection.send(json.dumps({"do": slow}).encode() + b"\n")
        assert all(ask(directory, {"do": other}) for other in ("keep", *({"claim", "release"} - {slow})))
        done.set()
        assert b'"did": true' in said(connection)


STATUS = PolicyStatus("p", Subject("process", "GPU-1", 4711, 1.0, 7, user="alice"), 1.0, "warn", "terminate", 5.0, True)


class Counter:
    """A real socket server, with all that the daemon does behind it, and a simulated node of four devices."""

    def __init__(self, place: Path) -> None:
        os.chmod(place, 0o755)
        start(str(place / "node"))
        fake = Requests(str(place))
        gate = Path(fake.directory.lock_path("gate"))
        gate.touch()
        gate.chmod(BROKERED)  # by which everybody knows that the daemon gives the locks
        self.directory = lock_directory(f"{place}/claims")
        self.machine = simulated.open(str(place / "node"))
        self.snapshot = self.machine.sample(ALL_FIELDS)
        self.uuids = [device.uuid for device in self.snapshot.devices]
        fake.statuses = (STATUS,)
        broker = Broker(self.directory, lambda: simulated.open(str(place / "node")))
        self.context = replace(fake.context, directory=self.directory, broker=broker)
        self.asker = 0
        before = threading.enumerate()
        self.socket_server = SocketServer(
            self.directory, lambda uid, request: requests.handle(self.context, self.asker, request)
        )
        self.threads = [thread for thread in threading.enumerate() if thread not in before]
        self.devices = fake.uuids

    def lives(self) -> bool:
        return len(self.threads) > 1 and all(thread.is_alive() for thread in self.threads)

    def says(self, line: bytes) -> Any:
        """What is answered to the bytes of a request."""
        with connect(self.directory) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(line.replace(b"\n", b" ")[:MAX_REQUEST_BYTES] + b"\n")
            return json.loads(said(connection) or b"null")


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    monkeypatch.setattr(socket_server, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(exemptions, "MAX_CHANGES", 10**9)
    monkeypatch.setattr(broker_client, "BUSY_SECONDS", 0.0)
    monkeypatch.setattr(requests, "load_in_time", lambda path: PolicyFile(path))
    made = Counter(tmp_path)
    yield made
    made.socket_server.close()


def requests_to(counter: Counter) -> list[dict[str, Any]]:
    """One of each kind, as the clients write them."""
    answer, descriptors = exchange(counter.directory, {"do": "claim", "devices": counter.uuids[1:2], "conditions": {}})
    for descriptor in descriptors:
        os.close(descriptor)
    wanted = Request(min_free=2**20, models=("*",), max_util=90.0, mine_as_free=frozenset({0}), prefer=("0",))
    times = {"priority": 0, "time_limit_seconds": 60.0, "expected_seconds": 10.0}
    claim = {"do": "claim", "devices": counter.uuids[:1], "conditions": as_json(wanted), "inside": None, "ticket": None}
    share = as_json(Request(share=True, memory=2**30, slots=3))
    reason = {"for_seconds": 60, "reason": "why"}
    return [
        {"do": "keep", "uid": 7, "device": counter.devices[0], **reason},
        {"do": "end", "uid": 7},
        {"do": "release", "claim": answer["claim"], "uid": 0, "reason": "why"},
        {"do": "claims"},
        {"do": "status", "uid": 7},
        {"do": "events"},
        {"do": "reload"},
        {"do": "deny", "uid": 7, "end": False, **reason},
        {"do": "quarantine", "device": counter.devices[1], "end": False, **reason},
        {**claim, **times},
        {**claim, "conditions": share, "ticket": "0.x"},
        {"do": "claim", "devices": counter.uuids[1:2], "inside": answer["claim"]},
    ]


@pytest.mark.parametrize("asker", [0, SOMEBODY], ids=["root", "somebody"])
def test_every_request_gets_an_answer_and_the_next_one_is_served(counter, asker, monkeypatch):
    faults: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: faults.append(repr(told.exc_value)))
    every = requests_to(counter)
    counter.asker = asker
    assert {one["do"] for one in every} == set(requests.HANDLERS)
    for request in every:
        for where, line in mutants(request):
            answer = counter.says(line)
            assert counter.lives(), f"{request['do']}: {where} ended the door: {faults}"
            assert isinstance(answer, dict) and answer.get("ok") in (True, False), f"{request['do']}: {where}"
            assert not faults and "inside" not in answer.get("error", ""), f"{request['do']}: {where}: {faults}"


def test_a_request_that_ends_the_thread_is_found(counter, monkeypatch):
    """As it was: whatever cannot be looked up in a set, for which no answer was given any more."""
    monkeypatch.setattr(socket_server, "_decoded", as_it_was)
    monkeypatch.setattr(Counter, "says", lambda counter, line: while_it_lives(counter, line))

    with pytest.raises(AssertionError, match=r"^keep: do = \[\] ended the door"):
        test_every_request_gets_an_answer_and_the_next_one_is_served(counter, 0, monkeypatch)
    for one in counter.socket_server._clients.values():
        one.connection.close()
    counter.socket_server._listener.close()


def as_it_was(line: bytes) -> dict[str, Any] | str:
    try:
        request = loads(line)
    except ValueError:
        request = None
    return request if isinstance(request, dict) else "a request is one line with one JSON object."


def while_it_lives(counter: Counter, line: bytes) -> Any:
    with connect(counter.directory) as connection:
        connection.sendall(line[:MAX_REQUEST_BYTES] + b"\n")
        eventually(lambda: bool(select.select([connection], [], [], 0)[0]) or not counter.lives())
        return json.loads(said(connection) or b"null") if counter.lives() else None


def asks_for_a_claim(counter: Counter) -> None:
    request, taken = Request(devices=("0",)), dict[str, str]()
    claim = broker_client.request_grant(counter.snapshot, request, counter.directory, None, taken, None)
    if claim:
        assert "/" not in claim.id
        claim.release()


def command(*words: str) -> Any:
    def run(counter: Counter) -> None:
        assert run_command_line([*words, "--dir", counter.directory.path]) in (0, 1, 3)

    return run


# what is asked -> who reads the answer
CLIENTS: dict[str, list[Any]] = {
    "keep": [command("keep", "--for", "1h", "--user", "7"), command("keep", "--for", "1h", "--user", "7", "--json")],
    "end": [command("keep", "--end", "--user", "7"), command("keep", "--end", "--user", "7", "--json")],
    "status": [command("keep", "--status"), command("keep", "--status", "--json")],
    "reload": [command("daemon", "--reload")],
    "claims": [lambda counter: grants.granted(counter.directory)],
    "claim": [asks_for_a_claim],
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_wrong_answer_is_no_fault_of_whoever_asked(counter, name, monkeypatch, capsys):
    request = next(one for one in requests_to(counter) if one["do"] == name)
    answer, descriptors = exchange(counter.directory, {"do": "status"} if name == "status" else request)
    for descriptor in descriptors:
        os.close(descriptor)
    before = len(os.listdir("/proc/self/fd"))
    for where, encoded in mutants({"ok": True, **answer}, brief=THE_SAME):
        monkeypatch.setattr(socket_server, "encoded", lambda content, encoded=encoded: encoded[: 2**16] + b"\n")
        for reads in CLIENTS[name]:
            try:
                reads(counter)
            except GpuguardError:
                pass
            except Exception as error:
                raise AssertionError(f"{name}: {where}") from error
            told = capsys.readouterr().err
            assert "inside gpuguard" not in told, f"{name}: {where}: {told}"
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # the threads of the server close theirs
