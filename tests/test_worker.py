"""The worker that reads the devices: a driver that hangs or crashes costs one device, never the client."""

import errno
import json
import marshal
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import a_claim_record, a_device, a_process, a_snapshot
from nodes import beginning_with, change, eventually, start
from proc import runs

from gpuguard import __main__ as program
from gpuguard import cli, procfs
from gpuguard.backends import client, open_backend, spawn, worker
from gpuguard.backends.client import WorkerBackend, open_worker
from gpuguard.errors import BackendError, DriverUnresponsive, InvalidRequest
from gpuguard.model import ALL_FIELDS, MEMORY, POWER, SELECT_FIELDS, WHO_FIELDS, Device, Gap, Snapshot

SIM = [sys.executable, "-m", "gpuguard", "sim"]
# Before the code of a program: it is one of gpuguard's own commands, whose workers are forks of it.
OWN = "import sys; from gpuguard.backends import spawn, worker; spawn.start_early(sys.argv[1], worker.serve)\n"


@pytest.fixture
def node(node: str) -> str:
    """The name of its backend."""
    return f"simulated:{node}"


@pytest.fixture
def backend(node: str) -> Iterator[WorkerBackend]:
    source = WorkerBackend(node)
    yield source
    source.close()


def sim(*words: str) -> None:
    subprocess.run([*SIM, *words], check=True, capture_output=True)


def problems(source: WorkerBackend) -> dict[int, tuple[str, ...] | None]:
    return {device.index: device.problems for device in source.sample(WHO_FIELDS).devices}


def test_a_snapshot_crosses_the_border_unchanged(backend: WorkerBackend, node: str) -> None:
    fields = ALL_FIELDS - {POWER}  # energy grows with time
    here, there = open_backend(node).sample(fields), backend.sample(fields)

    assert replace(there, taken_at=here.taken_at, clock=here.clock) == here


def crossed(snapshot: Snapshot, sent: worker.SentProcesses, received: worker.SentProcesses) -> Snapshot:
    """*snapshot* at the other end of the pipe."""
    return client.unpack(marshal.loads(marshal.dumps(worker.pack(snapshot, sent))), received)


def test_a_recording_with_claims_crosses_the_border_and_its_nouns_can_be_looked_up() -> None:
    device = a_device(processes=(a_process(7, command=("a", "b")),), nvlink_links=((0, "00:01"),))
    snapshot = replace(a_snapshot(device, a_device(1)), claims=(a_claim_record(),), gaps=(Gap("GPU-1", "device", "x"),))
    there = crossed(snapshot, {}, {})

    assert (there, hash(there), repr(there)) == (snapshot, hash(snapshot), repr(snapshot))


def test_processes_that_are_as_before_do_not_cross_the_border_again_and_those_that_are_not_do() -> None:
    sent: worker.SentProcesses = {}
    received: worker.SentProcesses = {}
    one, other = a_process(7), a_process(8)
    looks = [
        [(one,), (other,)], [(one,), (other, one)], [(one,), None], [(one,), (other, one)], [(), (other,)],
        [(one,), (other,)], [(replace(one, memory_used=1),), (other,)], [(one,), (replace(other, start_time=2.0),)],
    ]  # fmt: skip
    there = []
    for lists in looks:
        snapshot = a_snapshot(*(a_device(index, processes=rows) for index, rows in enumerate(lists)))
        there.append([device.processes for device in crossed(snapshot, sent, received).devices])

    assert there == looks
    assert there[1][0] is there[0][0] and there[3][1] is there[1][1]
    assert len(marshal.dumps(worker.pack(snapshot, sent))) < len(marshal.dumps(worker.pack(snapshot, {})))


def test_a_program_from_before_an_upgrade_gets_no_field_that_it_cannot_know() -> None:
    device = Device(0, "GPU-0")

    [packed] = worker.pack(Snapshot("", "", 0.0, 0.0, (replace(device, memory_used=0),)), {})["devices"]

    assert packed == {"index": 0, "uuid": "GPU-0", "memory_used": 0, "processes": None}
    assert Device(**packed) == replace(device, memory_used=0)


def test_a_new_worker_sends_anew_what_the_one_before_it_had_sent(backend: WorkerBackend) -> None:
    with subprocess.Popen([*SIM, "use", "--device", "1", "--memory", "1GiB"], stdout=subprocess.DEVNULL) as job:
        try:
            eventually(lambda: bool(backend.sample(WHO_FIELDS).devices[1].processes))
            backend.close()
            again = backend.sample(WHO_FIELDS).devices[1].processes
            assert again and again[0].pid == job.pid
            assert backend.sample(WHO_FIELDS).devices[1].processes == again
        finally:
            job.kill()


def test_a_hanging_call_costs_one_device_which_keeps_its_uuid_and_is_not_touched_again_soon(backend: WorkerBackend):
    uuids = [device.uuid for device in backend.sample(SELECT_FIELDS).devices]
    sim("fault", "--device", "2", "hang")
    snapshot = backend.sample(WHO_FIELDS)
    sim("fault", "--device", "2", "none")
    again = backend.sample(WHO_FIELDS)

    assert again.devices[2].problems == ("unresponsive",), "it would have answered"
    assert [device.index for device in snapshot.devices if device.problems == ("unresponsive",)] == [2]
    assert [gap.reason for gap in snapshot.gaps if gap.field == "device"] == ["a driver call did not come back"]
    assert all(device.memory_used is not None for device in snapshot.devices if device.index != 2)
    assert [device.uuid for device in again.devices] == uuids


def test_a_device_that_hangs_while_it_alone_is_asked_for_comes_back_as_unresponsive(backend: WorkerBackend) -> None:
    uuid = backend.sample(SELECT_FIELDS).devices[1].uuid
    sim("fault", "--device", "1", "hang")

    (device,) = backend.sample(SELECT_FIELDS, [uuid]).devices

    assert (device.uuid, device.problems) == (uuid, ("unresponsive",))


def test_a_device_that_recovered_is_read_again(backend: WorkerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DEVICE_RETRY_SECONDS", 0.0)
    sim("fault", "--device", "1", "hang")
    hung = problems(backend)
    sim("fault", "--device", "1", "none")

    assert (hung[1], problems(backend)[1]) == (("unresponsive",), ())


BROKEN = """
from gpuguard.backends import simulated
def broken(*_):
    raise ZeroDivisionError("planted")
simulated.Simulated.sample = broken
"""
SLOW = """
import time
from gpuguard.backends import simulated
proper = simulated.Simulated._read
def slow(self, *values, **named):
    found = proper(self, *values, **named)
    if not self.skip:
        time.sleep(0.6)
    return found
simulated.Simulated._read = slow
"""


def test_a_fault_inside_the_worker_becomes_a_message(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "interpreter", beginning_with(BROKEN))
    with open_worker(node) as source, pytest.raises(BackendError, match="planted"):
        source.sample(SELECT_FIELDS)


@pytest.mark.parametrize("first", [3, 1])
def test_a_device_is_not_late_because_those_before_it_were_slow(node, monkeypatch, first):
    monkeypatch.setattr(spawn, "interpreter", beginning_with(SLOW))
    sim("fault", "--device", str(first), "hang")
    with open_worker(node) as source:
        found = problems(source)

    assert [index for index, problem in found.items() if problem] == [first]


@pytest.fixture
def silent() -> Iterator[spawn.Channel]:
    """A worker that says nothing: a process that sleeps."""
    process = subprocess.Popen(["sleep", "600"])
    requests, replies = os.pipe()
    place = os.memfd_create("place")
    channel = spawn.Channel(process, replies, requests, place, os.dup(place))
    yield channel
    process.kill()
    process.wait()
    channel.close()


@pytest.mark.parametrize(
    "marks",
    [[(index, 60.0) for index in range(5)], [(7, -1e6), (6, 1e4), (7, -1e6)], [(1, 0.0), (1, 0.0)]],
    ids=["it goes on in time", "a mark that is read half", "it goes on while it is judged"],
)
def test_only_a_device_whose_mark_stays_too_long_is_blamed(silent, monkeypatch, marks):
    begun, left = time.monotonic(), list(marks)

    def read_mark(_: int) -> spawn.Mark:
        index, later = left.pop(0) if left else (9, 0.0)
        return index, begun + later

    monkeypatch.setattr(spawn, "read_mark", read_mark)

    assert silent.overdue(0.01) == (9, begun)


def test_a_worker_that_gets_no_cpu_has_a_grace_and_no_more(silent, monkeypatch):
    monkeypatch.setattr(spawn, "STARVED_SECONDS", 0.5)
    asked: list[int] = []
    runnable = SimpleNamespace(state="R")
    monkeypatch.setattr(procfs, "stat_of", lambda pid: asked.append(pid) or runnable)
    spawn.write_mark(silent.mark, 4)
    begun = time.monotonic()
    late = silent.overdue(0.01)

    assert (late and late[0], time.monotonic() - begun >= 0.5, set(asked)) == (4, True, {silent.process.pid})


def test_an_answer_that_comes_at_the_last_moment_counts(silent: spawn.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn.write_mark(silent.mark, 0)
    runnable = SimpleNamespace(state="R")
    monkeypatch.setattr(procfs, "stat_of", lambda pid: spawn.send(silent.requests, ("ready",)) or runnable)

    assert silent.overdue(0.01) is None


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("program_is", ["", OWN])
def test_the_worker_ends_with_its_reader_however_that_ends_even_while_a_call_hangs(
    node: str, hang: bool, program_is: str
) -> None:
    if hang:
        sim("fault", "--device", "0", "hang")
    code = program_is + (
        "import sys; from gpuguard.backends.client import open_worker\n"
        "source = open_worker(sys.argv[1])\n"
        "print(source._channel.process.pid, flush=True)\n"
        "from gpuguard.backends import spawn\n"
        "spawn.send(source._channel.requests, (('memory',), None, ()))\n"
        "input()"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout
    child = int(reader.stdout.readline())
    reader.kill()
    reader.communicate()

    assert eventually(lambda: not runs(child))


def test_the_worker_holds_nothing_of_its_parent(node: str) -> None:
    held, other = os.pipe()
    os.set_inheritable(held, True)
    source = open_worker(node)
    source.sample(SELECT_FIELDS)
    assert source._channel
    pid = source._channel.process.pid
    targets = [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    pipe = os.readlink(f"/proc/self/fd/{held}")
    group = os.getpgid(pid)
    source.close()
    os.close(held)
    os.close(other)

    assert pipe not in targets
    assert group == pid


# What `gpuguard run` may hold when it starts a worker again, and what it then sees of it.
HOLDS = """
import fcntl, json, os, re, signal, sys, threading
from pathlib import Path
from gpuguard.backends import spawn, worker
from gpuguard.backends.client import open_worker
signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
locked = os.memfd_create("locked", 0)
{before}
with open_worker(sys.argv[1]) as source:
    devices = source.sample(("memory",)).devices
    pid = source._channel.process.pid
    process = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    told = {{
        "is a fork": (process / "comm").read_text() == "gpuguard-worker\\n",
        "devices": len(devices),
        "leads its session": os.getsid(pid) == pid,
        "catches SIGTERM": bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1),
        "blocks": status["SigBlk"],
        "descriptors": sorted(re.sub(r"\\d+", "", os.readlink(one)) for one in (process / "fd").iterdir()),
    }}
print(json.dumps(told | {{"is gone": not process.exists()}}))
"""


def told_of_its_worker(node: str, before: str) -> dict[str, object]:
    """What a program sees of the worker that it starts after *before*."""
    words = [sys.executable, "-W", "error", "-c", HOLDS.format(before=before), node]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_a_fork_keeps_no_more_of_its_client_than_a_fresh_interpreter(node: str) -> None:
    fork = told_of_its_worker(node, "spawn.start_early(sys.argv[1], worker.serve)")
    fresh = told_of_its_worker(node, "")

    assert (fork.pop("is a fork"), fresh.pop("is a fork")) == (True, False)
    assert fork == fresh
    assert (fork["devices"], fork["catches SIGTERM"], fork["is gone"]) == (4, False, True)


@pytest.mark.parametrize(
    "since",
    ["threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start()", "spawn.__file__ = os.__file__"],
    ids=["a thread", "an upgrade"],
)
def test_no_worker_is_a_fork_beside_a_thread_or_once_another_gpuguard_is_installed(node: str, since: str) -> None:
    before = f"spawn.start_early(sys.argv[1], worker.serve); spawn._early.clear(); {since}"

    assert told_of_its_worker(node, before)["is a fork"] is False


def test_who_looks_again_and_again_leaves_no_zombies(node: str) -> None:
    workers = []
    for _ in range(3):
        source = open_worker(node)
        source.sample(SELECT_FIELDS)
        assert source._channel
        workers.append(source._channel.process.pid)
        source.close()
        # It ends as soon as it is abandoned, and is reaped by whoever is the next to be closed.
        assert eventually(lambda: not runs(workers[-1]))

    left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert left == workers[-1:] or left == []


def test_workers_that_nobody_closes_are_reaped_when_the_program_ends(node: str) -> None:
    code = (
        "import sys; from gpuguard.backends.client import open_worker\n"
        "kept, forgotten = open_worker(sys.argv[1]), open_worker(sys.argv[1])\n"
        "kept.sample(('memory',))\n"
        "print(kept._channel.process.pid, forgotten._channel.process.pid)\n"
        "del forgotten"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code, node], capture_output=True, text=True, check=True
    )

    assert done.stderr == ""
    assert not any(Path(f"/proc/{pid}").exists() for pid in done.stdout.split())


def test_a_worker_ends_with_its_client_though_a_forked_child_lives_on_and_that_has_its_own(node: str) -> None:
    code = (
        "import os, sys; from gpuguard.backends.client import open_worker\n"
        "source = open_worker(sys.argv[1])\n"
        "source.sample(('memory',))\n"
        "worker = source._channel.process\n"
        "told, tells = os.pipe()\n"
        "if not (child := os.fork()):\n"
        "    os.close(tells)\n"
        "    devices = source.sample(('memory',)).devices\n"
        "    os.read(told, 1)\n"  # until its parent has seen the end of the worker
        "    os._exit(0 if devices else 1)\n"
        "source.close()\n"
        "worker.wait(20)\n"
        "os.close(tells)\n"
        "print(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, node], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("0\n", "")


@contextmanager
def a_worker_that_says(*replies: tuple[object, ...]) -> Iterator[None]:
    """The next worker is none, and has said this."""
    requests_read, requests = os.pipe()
    replies_read, replies_write = os.pipe()
    life, life_held = os.pipe()
    for reply in replies:
        spawn.send(replies_write, reply)
    channel = spawn.Channel(subprocess.Popen(["true"]), requests, replies_read, os.memfd_create("mark"), life_held)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "start_worker", lambda name: channel)
        yield
    channel.process.wait()
    assert os.read(life, 1) == b""  # which ends a worker
    for each in (requests_read, replies_write, life):
        os.close(each)


@pytest.mark.parametrize("told", [("ready",), ("ready", "9.9")], ids=["before it was told", "9.9"])
def test_the_guard_does_not_believe_a_worker_of_another_version(told: tuple[str, ...]) -> None:
    with (
        a_worker_that_says(told),
        pytest.raises(BackendError, match=r"was installed while.*Start it again; the guard by `systemctl restart"),
    ):
        open_worker("nvml", same_version=True).sample(SELECT_FIELDS)


def test_a_request_that_outlives_an_upgrade_leaves_out_what_it_does_not_know() -> None:
    """It has closed its worker while it slept, and starts one of the version that is there now."""
    device = {"index": 0, "uuid": "GPU-0", "memory_used": 7, "processes": None, "of_tomorrow": 1}
    packed = {**vars(a_snapshot()), "devices": [device], "gaps": [], "claims": [], "of_tomorrow": 1}
    with a_worker_that_says(("ready", "9.9"), ("snapshot", packed)):
        source = open_worker("nvml")
        [seen] = source.sample(SELECT_FIELDS).devices
        source.close()

    assert (seen.uuid, seen.memory_used, seen.name) == ("GPU-0", 7, None)


@pytest.mark.parametrize("packed", [{}, {"devices": [{"processes": None}], "recorded": False}])
def test_what_cannot_be_understood_of_another_version_is_not_believed(packed: dict[str, object]) -> None:
    with (
        a_worker_that_says(("ready", "9.9"), ("snapshot", packed)),
        open_worker("nvml") as source,
        pytest.raises(BackendError, match=r"gpuguard 9\.9 was installed"),
    ):
        source.sample(SELECT_FIELDS)


def test_a_worker_that_has_ended_before_it_is_asked_has_said_why() -> None:
    source = open_worker("nothing")
    assert source._channel
    end = os.pidfd_open(source._channel.process.pid)
    assert select.select([end], [], [], 30)[0]
    os.close(end)

    with pytest.raises(InvalidRequest, match="no backend 'nothing'"):
        source.sample(SELECT_FIELDS)


def test_a_worker_that_was_killed_between_two_requests_costs_none_of_them(node: str) -> None:
    with open_worker(node) as source:
        before = source.sample(SELECT_FIELDS)
        assert source._channel
        worker = source._channel.process
        worker.kill()
        worker.wait()

        assert source.sample(SELECT_FIELDS).devices == before.devices
        assert source._channel.process.pid != worker.pid


def test_a_worker_that_never_becomes_ready_is_given_up(silent, monkeypatch):
    monkeypatch.setattr(client, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(client, "INIT_SECONDS", 0.2)
    monkeypatch.setattr(spawn, "start_worker", lambda name: silent)
    silent.replies, held = os.pipe()  # through which nothing comes
    told: list[str] = []

    with pytest.raises(DriverUnresponsive, match="did not initialise"):
        WorkerBackend("nvml", told.append).sample(SELECT_FIELDS)
    assert len(told) == 1
    for descriptor in (silent.replies, held):
        os.close(descriptor)


def full(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_worker_that_cannot_be_started_leaves_no_descriptor_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        spawn.start_worker("simulated")

    assert os.listdir("/proc/self/fd") == before


def test_a_worker_that_cannot_be_started_again_is_a_driver_that_cannot_be_read(tmp_path, monkeypatch):
    start(str(tmp_path / "node"))
    with open_worker(f"simulated:{tmp_path / 'node'}") as source:
        assert samples(source)
        source.close()  # as when it has died
        with monkeypatch.context() as crowded:
            crowded.setattr(subprocess, "Popen", full)
            with pytest.raises(BackendError, match=r"no further process.*see `ulimit -u`"):
                source.sample({MEMORY})

        assert samples(source)


def test_a_worker_that_may_start_no_thread_does_not_blame_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = (
        'import threading\ndef full(*_):\n    raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = full"
    )
    monkeypatch.setattr(spawn, "interpreter", beginning_with(crowded))

    with open_worker("simulated") as source, pytest.raises(BackendError, match="see `ulimit -u`"):
        source.sample(SELECT_FIELDS)


@contextmanager
def a_library_that_prints(place: Path, text: bytes) -> Iterator[WorkerBackend]:
    """A source that has answered, and *text* in front of its next answer."""
    start(str(place / "node"))
    with WorkerBackend(f"simulated:{place / 'node'}") as source:
        assert source.sample({MEMORY}).devices and source._channel
        with open(f"/proc/{source._channel.process.pid}/fd/1", "wb", buffering=0) as out:
            out.write(text)
        yield source


PRINTED = (b"ok\n\x00", b"\x00", b"\x00\x00\x00\x02", b"Loading the driver ...\n", b"\x09\x00\x00\x00garbage..",
           b"\x02\x00\x00\x00((more")  # fmt: skip


@pytest.mark.parametrize("text", PRINTED)
def test_what_a_library_prints_into_the_pipe_blinds_nobody_for_long(tmp_path: Path, text: bytes) -> None:
    with a_library_that_prints(tmp_path, text) as source:
        with suppress(BackendError):
            source.sample({MEMORY})

        assert eventually(lambda: samples(source))


def samples(source: WorkerBackend) -> bool:
    try:
        # The device that was just being read is suspected of it, and left out for a while.
        return sum(device.memory_used is not None for device in source.sample({MEMORY}).devices) >= 3
    except BackendError:
        return False


@pytest.mark.parametrize("text", [b".", b"\x10\x00\x00\x00half"])
def test_a_driver_that_prints_and_then_hangs_keeps_nobody_waiting(tmp_path: Path, text: bytes) -> None:
    with a_library_that_prints(tmp_path, text) as source:
        change(str(tmp_path / "node"), 0, faults=("hang",))

        assert source.sample({MEMORY}).devices[0].problems == ("unresponsive",)


@pytest.mark.parametrize(
    ("line", "started"),
    [
        ("run --backend simulated:/x -n 2 -- true", ["simulated:/x"]),
        ("run --backend=smi true", ["smi"]),
        ("run python train.py --backend nccl", ["nvml"]),
        ("run -- python train.py --backend simulated", ["nvml"]),
        ("select --backend", ["nvml"]),
        ("who", ["nvml"]),
        ("who --dir {published}", []),
        ("who --dir {published}/own", []),
        ("who --hosts a,b", []),
        ("select -n 2 --hosts-file=here", []),
        ("events", []),
        ("", []),
    ],
)
def test_the_worker_of_a_command_is_started_before_its_modules_are_loaded(tmp_path, monkeypatch, line, started):
    for folder in (tmp_path / "daemon", tmp_path / "own"):
        folder.mkdir()
        (folder / "state.json").touch()
    names: list[str] = []
    monkeypatch.setattr(spawn, "start_early", lambda name, serve: names.append(name))
    monkeypatch.setattr(cli, "main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpuguard", *line.format(published=tmp_path).split()])
    monkeypatch.delenv("GPUGUARD_BACKEND", raising=False)
    monkeypatch.setenv("GPUGUARD_DIR", str(tmp_path / "none"))

    program.main()

    assert names == started
