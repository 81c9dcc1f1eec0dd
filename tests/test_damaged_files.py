"""Whole commands and a daemon beside claims, tickets and reservations of which one place is other than it should be.

Each command ends in time and with a status that is documented, nobody gets a device that is locked, and what others
wrote is read as it stands.  Many files lie there at once: one that hides another is found when it is mended.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chances import THE_SAME, luck
from daemons import DaemonUnderTest, a_daemon, ask
from nodes import Gpuguard, eventually, start
from own_claims import acquire
from structures import mutants

from gpuguard import request as requests
from gpuguard.backends.simulated import Simulated
from gpuguard.claims.claim import Claim
from gpuguard.claims.directory import LockDirectory, lock_directory, open_lock
from gpuguard.queue import reservations, tickets
from gpuguard.queue.calendar import Reservation
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import ticket_content
from gpuguard.request import Request

ME = os.geteuid()
CLAIMED, FREE = 60, 4
MOST = {"ticket": 400, "reserve": 90}  # at once: of one user no more count
UUID = "<uuid>"
NOTHING_INSIDE = "inside gpuguard"
JOB = ("sh", "-c", 'echo "$GPUGUARD_GPUS"')
WHO, QUEUE, RESERVE = ("who", "--json"), ("queue", "--json"), ("reserve",)
RUN = ("run", "--no-wait", "--", *JOB)
# Who reads that kind of file at all; a long run has them all.
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "record": (WHO, QUEUE, RUN), "ticket": (WHO, QUEUE, RUN),
    "reserve": (WHO, ("explain",), RUN, RESERVE),
}  # fmt: skip
COMMANDS: tuple[tuple[str, ...], ...] = (
    WHO, QUEUE, RESERVE, RUN, ("who",), ("select",), ("explain",), ("explain", "--json"), ("queue",),
    ("wait", "--no-wait"), ("release",), ("reserve", "--json"), ("metrics",), ("doctor",),
    ("select", "--share", "--memory", "1GiB"), ("run", "--no-wait", "--share", "--memory", "1GiB", "--", *JOB),
)  # fmt: skip
DOCUMENTED = {0, 1, 75, 124}


class Scene:
    """A node of which most devices are claimed by this process."""

    def __init__(self, place: Path) -> None:
        self.backend: Simulated = start(str(place / "node"), f"{CLAIMED + FREE}xH100-80GB")
        self.uuids = [device.uuid for device in self.backend.sample({"health"}).devices]
        self.gpuguard = Gpuguard(place, None, GPUGUARD_LINE=str(place / "none.yaml"))
        self.directory: LockDirectory = lock_directory(str(place / "claims"))
        self.claims: list[Claim] = []

    def claim(self, **wanted: Any) -> None:
        """Claim the first devices, each on its own."""
        for uuid in self.uuids[:CLAIMED]:
            way = Request(devices=(uuid,), **wanted)
            about: dict[str, Any] = {"note": "n", "command": ["python", "x"], "time_limit": 3600.0}
            self.claims.append(acquire(self.backend, way, self.directory, environ={}, **about))

    def content(self) -> Any:
        """What stands in the record of one of them."""
        descriptor = self.claims[0].pass_fds[-1]
        return json.loads(os.pread(descriptor, 8192, 0).replace(self.uuids[0].encode(), UUID.encode()))

    def free(self) -> None:
        while self.claims:
            self.claims.pop().release()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("structures"))
    yield made
    made.free()


Batch = Sequence[tuple[str, bytes]]


def batches(document: Any, most: int) -> Iterator[Batch]:
    """All mutants, so many at a time, others together each time; where all tests shall run soon, some of each place."""
    every = list(mutants(document, brief=THE_SAME))
    if THE_SAME:
        every = every[:: len(every) // most + 1]
    else:
        luck("batches").shuffle(every)
    for place in range(0, len(every), most):
        yield every[place : place + most]


def check(scene: Scene, kind: str, batch: Batch, judge: Any = lambda words, done: None) -> None:
    """All commands while *batch* is planted; a failure names the one file that does it, if one does."""
    planted = PLANTED[kind]
    for words in READERS[kind] if THE_SAME else COMMANDS:
        if fault := _fault(scene, batch, words, planted, judge):
            alone = [(name, why) for name, one in batch if (why := _fault(scene, [(name, one)], words, planted, judge))]
            raise AssertionError(f"gpuguard {' '.join(words)}: {(alone or [('together', fault)])[:3]}")


def _fault(scene: Scene, batch: Batch, words: tuple[str, ...], planted: Any, judge: Any) -> str | None:
    with planted(scene, batch):
        done = scene.gpuguard(*words)
    if done.returncode not in DOCUMENTED or NOTHING_INSIDE in done.stderr:
        return f"{done.returncode} {done.stderr[-400:]}"
    found: str | None = judge(words, done)
    return found


@contextmanager
def in_records(scene: Scene, batch: Batch) -> Iterator[None]:
    """Each in the place of the record of a claim that lives."""
    before = []
    for claim, uuid, (_, encoded) in zip(scene.claims, scene.uuids, batch, strict=False):
        descriptor = claim.pass_fds[-1]
        before.append((descriptor, os.pread(descriptor, 8192, 0)))
        _write(descriptor, encoded.replace(UUID.encode(), uuid.encode()))
    try:
        yield
    finally:
        for descriptor, content in before:
            _write(descriptor, content)


def _write(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


@contextmanager
def as_files(directory: LockDirectory, batch: Batch, kind: str) -> Iterator[None]:
    """Each a file of its own, locked; a ticket with its bell."""
    with ExitStack() as stack:
        for number, (_, encoded) in enumerate(batch):
            path = f"{directory.records}/{directory.prefix}{kind}.{ME}.{number:08x}.json"
            descriptor = os.open(f"{path}~", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            stack.callback(os.close, descriptor)  # after it is gone: a daemon sweeps what nobody holds
            os.write(descriptor, encoded)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.rename(f"{path}~", path)  # as gpuguard does it: locked from the first moment that a daemon sees it
            stack.callback(Path(path).unlink, missing_ok=True)  # the daemon removes a reservation that is over
            if kind == "ticket":
                waker = f"{directory.records}/{directory.prefix}bell.{ME}.{number:08x}"
                os.mkfifo(waker, 0o622)
                stack.callback(os.unlink, waker)
                stack.callback(os.close, os.open(waker, os.O_RDWR | os.O_NONBLOCK))
        yield


PLANTED: dict[str, Any] = {
    "record": in_records,
    "ticket": lambda scene, batch: as_files(scene.directory, batch, "ticket"),
    "reserve": lambda scene, batch: as_files(scene.directory, batch, "reserve"),
}  # fmt: skip


def only_free_ones(scene: Scene) -> Any:
    """Every device that is locked is shown as claimed, and nobody is told to take it."""

    def judge(words: tuple[str, ...], done: Any) -> str | None:
        if words == WHO:
            claimed = [bool(device["claims"]) for device in json.loads(done.stdout)["devices"]]
            wanted = [True] * CLAIMED + [False] * FREE
            return None if claimed == wanted else f"claimed are {claimed}"
        if "--share" in words or words[0] not in ("run", "select", "wait"):
            return None
        names = scene.uuids if words[0] == "run" else [str(place) for place in range(CLAIMED + FREE)]
        taken = {names.index(name) for name in done.stdout.strip().split(",")}
        return None if min(taken) >= CLAIMED else f"took {done.stdout}"

    return judge


@pytest.mark.parametrize("share", [{}, {"share": True, "memory": 2**33, "slots": 3}], ids=["alone", "shared"])
def test_a_record_stops_nobody_and_frees_no_device(scene, share):
    scene.claim(**share)
    try:
        for batch in batches(scene.content(), CLAIMED):
            check(scene, "record", batch, only_free_ones(scene))
    finally:
        scene.free()


def test_a_ticket_stops_nobody_and_hides_no_other(scene):
    ways = (
        Request(num_gpus=2, max_gpus=3, min_free=2**30, models=("H100*",), mine_as_free=frozenset({0}), devices=("0",),
                exclude=("1",), prefer=("2",), within=(scene.uuids[0],), max_util=5.0, min_free_fraction=0.5,
                max_temperature=80.0, max_processes=2),
        Request(share=True, memory=2**30, slots=3, mig="3g.40gb"),
    )  # fmt: skip
    times = {"time_limit": 60.0, "expected": 30.0, "promise": time.time() + 100}
    content = tickets.ticket_content(Ticket("x", ME, "", 0.0, ways, pid=os.getpid(), note="n", command=("a",), **times))
    sound = tickets.OwnTicket(scene.directory, content | {"note": "sound"})

    def judge(words: tuple[str, ...], done: Any) -> str | None:
        if words != QUEUE:
            return None
        (found,) = [place for place in json.loads(done.stdout)["places"] if place["id"] == sound.id]
        wanted = ["sound", 60.0, [requests.spelled(way) for way in ways]]
        return None if [found[key] for key in ("note", "time_limit_seconds", "requests")] == wanted else str(found)

    try:
        for batch in batches(content, MOST["ticket"]):
            check(scene, "ticket", batch, judge)
    finally:
        sound.withdraw()


def test_a_reservation_stops_nobody_and_hides_no_other(scene):
    now = time.time()
    wanted = Reservation("", ME, ME, "", 1, now + 9000, now + 9900, (scene.uuids[-1],), note="sound")
    sound = reservations.write_reservation(scene.directory, wanted)
    path = Path(f"{scene.directory.records}/{scene.directory.prefix}reserve.{ME}.{sound.id}.json")

    def judge(words: tuple[str, ...], done: Any) -> str | None:
        return None if words != RESERVE or "sound" in done.stdout else done.stdout

    try:
        content = json.loads(path.read_bytes()) | {"begins_unix_seconds": now - 10, "note": "n"}
        for batch in batches(content, MOST["reserve"]):
            check(scene, "reserve", batch, judge)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def believing_any_number(place: Path) -> str:
    """The path of a module that is loaded first, and has any value pass for a number."""
    (place / "planted").mkdir()
    code = "import gpuguard.jsonio as j\nj._number = lambda value, *kinds: value\n"
    (place / "planted" / "sitecustomize.py").write_text(code)
    return str(place / "planted")


def test_a_ticket_that_stops_everybody_is_found_and_named(scene, monkeypatch):
    """A fault is planted: what a ticket says is a number is believed."""
    place = Path(scene.gpuguard.environment["GPUGUARD_DIR"]).parent
    monkeypatch.setitem(scene.gpuguard.environment, "PYTHONPATH", believing_any_number(place))
    content = tickets.ticket_content(Ticket("x", ME, "", 0.0, (Request(num_gpus=2),)))
    wrong = [mutant for mutant in mutants(content, brief=True) if mutant[0].startswith("requests.0.num_gpus =")]

    with pytest.raises(AssertionError, match=r"gpuguard [^\[]*: \[\('requests.0.num_gpus = "):
        check(scene, "ticket", wrong)


NOW = time.time()
POLICY = """
version: 1
mode: enforce
policies:
  - {name: quota, for: 1s, when: {quota: {claims: 1}}, steps: [warn]}
  - {name: hogs, for: 1s, when: {memory: {above: share, per: claim}}, steps: [warn]}
  - {name: idle, for: 1s, when: {idle: {}}, steps: [warn]}
"""
RECORD = {
    "id": "c", "devices": [UUID], "pid": os.getpid(), "since": NOW - 100, "note": "n", "command": ["python", "x"],
    "ends": NOW + 1000, "expected": NOW + 500, "memory": 2**30, "slots": [f"{UUID}.slot0"], "most": 3,
    "descriptors": [5],
}  # fmt: skip
RESERVATION = {
    "schema": 1, "uid": os.geteuid(), "num_gpus": 1, "begins_unix_seconds": NOW - 10,
    "ends_unix_seconds": NOW + 1000, "devices": [UUID], "note": "n",
}  # fmt: skip
TICKET = ticket_content(Ticket("x", 0, "", 0.0, (Request(devices=("0",), models=("*",)),), pid=os.getpid(), note="n"))
KINDS: dict[str, tuple[Any, int]] = {
    "claim": (RECORD, 400), "ticket": (TICKET, 400), "reserve": (RESERVATION, 90),
}  # fmt: skip


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonUnderTest]:
    with a_daemon(tmp_path, POLICY) as one:
        yield one


def goes_on(daemon: DaemonUnderTest) -> bool:
    """Whether it looks twice more without trouble, and publishes what it saw."""
    for _ in range(2):
        before = daemon.state()["snapshot"]["clock"]
        eventually(lambda before=before: daemon.state()["snapshot"]["clock"] > before or troubled(daemon))  # type: ignore[misc]
        if troubled(daemon) or daemon.state()["snapshot"]["clock"] <= before:
            return False
    return "Traceback" not in daemon.said()


def troubled(daemon: DaemonUnderTest) -> bool:
    return any(event["outcome"] == "failed" for event in daemon.events("watchdog"))


def test_a_daemon_looks_and_answers_on(daemon):
    directory, uuid = lock_directory(str(daemon.place / "claims")), daemon.uuid(0).encode()
    every = {kind: list(batches(document, most)) for kind, (document, most) in KINDS.items()}
    lock = open_lock(directory, daemon.uuid(0))
    fcntl.flock(lock, fcntl.LOCK_EX)  # records are read while a device is locked
    for number in range(max(map(len, every.values()))):
        with ExitStack() as stack:
            planted = {kind: of_kind[number] for kind, of_kind in every.items() if number < len(of_kind)}
            for kind, batch in planted.items():
                meant = [(where, encoded.replace(UUID.encode(), uuid)) for where, encoded in batch]
                stack.enter_context(as_files(directory, meant, kind))
            ends = {kind: (batch[0][0], batch[-1][0]) for kind, batch in planted.items()}
            assert goes_on(daemon), f"{ends}: {daemon.said()}"
            assert ask(directory, {"do": "status"})
    os.close(lock)


def test_a_daemon_that_believes_any_type_is_found(tmp_path):
    """A fault is planted: what a record says is a time is believed."""
    with (
        a_daemon(tmp_path, POLICY, environment={"PYTHONPATH": believing_any_number(tmp_path)}) as daemon,
        pytest.raises(AssertionError, match="a fault inside gpuguard: TypeError"),
    ):
        test_a_daemon_looks_and_answers_on(daemon)
