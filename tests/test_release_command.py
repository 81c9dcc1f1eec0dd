"""A claim is released from outside, by command or policy: politely, all of it, for good, and nothing else."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from builders import a_device, a_process, a_snapshot
from claimholders import BY_ROOT, GPUS, a_holder, free, is_free, release
from nodes import GIB, Gpuguard, a_user, change, eventually, start

from gpuguard import procfs
from gpuguard.claims import unlock as releasing
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import (
    FULL_BYTES,
    READ_BYTES,
    RELEASED,
    YIELD,
    ReleaseRequest,
    locked_devices,
    pending_request,
    read_records,
    read_requests,
    record_path,
    released_by,
    write_request,
)
from gpuguard.claims.unlock import computing_under, is_supervisor, lock_handle, release_locks
from gpuguard.daemon.release import SupervisorChannel
from gpuguard.errors import ClaimError
from gpuguard.lock import outer_claim
from gpuguard.model import ClaimRecord

NOTEBOOK = """
import sys
import gpuguard
claim = gpuguard.grab_gpus(2, note="a notebook")
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except gpuguard.GpuguardError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


class Site:
    """A simulated node with four devices, and gpuguard on it."""

    def __init__(self, place: Path) -> None:
        self.place, self.node = place, str(place / "node")
        self.backend = start(self.node)
        self.gpuguard = Gpuguard(place, None)
        self.directory = lock_directory(str(place / "claims"))
        self.uuids = [device.uuid for device in self.backend.sample(()).devices]

    def claims(self) -> list[str]:
        return [claim.id for claim in read_records(self.directory)]

    def free(self) -> int:
        return len(self.uuids) - len(locked_devices(self.directory, self.uuids))

    @contextmanager
    def job(self, *options: str, command: tuple[str, ...] = ("sleep", "100")) -> Iterator[subprocess.Popen[str]]:
        """A `gpuguard run` whose claim is there; ended with its job."""
        before = set(self.claims())
        run = self.gpuguard.start("run", "--no-wait", "--quiet", *options, "--", *command, start_new_session=True)
        try:
            assert eventually(lambda: bool(set(self.claims()) - before))
            assert eventually(lambda: listening(run.pid))
            yield run
        finally:
            with suppress(ProcessLookupError):  # whatever of it lives would keep the pipes open
                os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def listening(pid: int) -> bool:
    return bool(
        int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16) >> signal.SIGURG - 1 & 1
    )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_an_idle_job_gives_its_devices_up_lives_on_and_is_told(site):
    with site.job("-n", "3") as run:
        [name] = site.claims()
        done = site.gpuguard("release", name[:5], "--reason", "somebody waits")
        free = site.free()
        others = site.gpuguard("run", "--no-wait", "-n", "4", "--", "true")

        assert (done.returncode, free, others.returncode) == (0, 4, 0), done.stderr + others.stderr
        assert done.stdout.startswith(f"released: the claim {name}, 3 GPUs of")
        assert "by the gpuguard run of its job" in done.stdout
        assert run.poll() is None
        assert run.stderr
        told = run.stderr.readline()
        assert "released by" in told and "somebody waits" in told and "The job goes on" in told
        assert f"the claim {name} was released by" in (events := site.gpuguard("events").stdout) and ".;" not in events
        assert site.claims() == []
        run.send_signal(signal.SIGTERM)  # the job may end as it likes
        assert (run.wait(60), site.free()) == (128 + signal.SIGTERM, 4)
    events = map(json.loads, (site.place / "events.jsonl").read_text().splitlines())
    assert next(event["outcome"] for event in events if event["kind"] == "release") == "released"


def test_a_notebook_gives_its_devices_up_lives_on_and_learns_it(site):
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], text=True, env=site.gpuguard.environment, **pipes
    ) as notebook:
        assert notebook.stdin and notebook.stdout
        assert notebook.stdout.readline() == "ready\n"
        [name] = site.claims()
        done = site.gpuguard("release", name, "--json")
        others = site.gpuguard("run", "--no-wait", "-n", "4", "--", "true")
        print("claim.reassert()", file=notebook.stdin, flush=True)

        assert (done.returncode, others.returncode) == (0, 0), done.stderr
        answer = json.loads(done.stdout)
        assert (answer["claim"], answer["how"], len(answer["devices"])) == (name, "from here", 2)
        assert notebook.stdout.readline().startswith(f"ClaimLost: the claim {name} was released by")
        notebook.kill()


def test_a_job_that_computes_is_left_alone_and_the_answer_says_who_it_is(site):
    with site.job("-n", "2", "--visible", "uuid") as run:
        [name] = site.claims()
        [claim] = read_records(site.directory)
        index = str(site.uuids.index(claim.devices[0]))
        with a_user(site.node, index, 10 * GIB) as child:
            done = site.gpuguard("release", name)

            assert (done.returncode, done.stdout) == (1, "")
            assert f"pid {child.pid}" in done.stderr and "computes for" in done.stderr and "10.0GiB" in done.stderr
            assert "--stop" in done.stderr
            assert (site.claims(), site.free(), run.poll()) == ([name], 2, None)
            shown = site.gpuguard("release")
            assert f"pid {child.pid}" in shown.stdout and name in shown.stdout


@pytest.mark.parametrize("trap", ["", "trap '' TERM;"])
def test_stop_ends_the_job_by_its_own_steps_first(site, trap):
    job = ("sh", "-c", f"{trap} echo ready; while :; do sleep 0.1; done")
    with site.job("-n", "2", "--time-limit", "1h", "--grace", "1s" if trap else "60s", command=job) as run:
        assert run.stdout and run.stdout.readline() == "ready\n"
        [name] = site.claims()
        with a_user(site.node, str(site.uuids.index(read_records(site.directory)[0].devices[0])), GIB) as child:
            asked = site.gpuguard.start("release", name, "--stop", "--reason", "maintenance")
            status = run.wait(60)
            child.kill()
            child.wait()
            said, error = asked.communicate(timeout=60)

        assert (asked.returncode, status) == (0, 128 + (signal.SIGKILL if trap else signal.SIGTERM)), error
        assert "its job was ended" in said and site.free() == 4
        told = run.stderr.read() if run.stderr else ""
        assert "stopped by" in told and "maintenance" in told and ("SIGKILL" in told) == bool(trap)


def test_stop_says_that_it_waits_and_does_not_wait_for_a_run_that_was_killed(site):
    job = ("sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done")
    with site.job("-n", "2", "--grace", "100s", command=job) as run:
        pid = int(run.stdout.readline())
        [claim] = read_records(site.directory)
        asked = site.gpuguard.start("release", claim.id, "--stop")
        assert "ends it now" in asked.stderr.readline()
        assert "has not ended yet" in asked.stderr.readline()
        run.kill()
        _, error = asked.communicate(timeout=60)

        assert (asked.returncode, site.free()) == (1, 2)
        assert "no gpuguard run supervises" in error and f"{pid}" in error
        os.kill(pid, signal.SIGKILL)


def test_a_job_whose_run_was_killed_gives_up_what_it_inherited(site):
    with site.job("-n", "2", command=("sh", "-c", "echo $$; exec sleep 100")) as run:
        assert run.stdout
        job = int(run.stdout.readline())
        run.kill()
        run.wait()
        done = site.gpuguard("release", site.claims()[0])

        assert (done.returncode, site.free()) == (0, 4), done.stderr
        assert os.path.exists(f"/proc/{job}")
        os.kill(job, signal.SIGKILL)


def test_nothing_is_given_up_while_nobody_can_see_who_computes(site):
    with site.job("-n", "1"):
        [claim] = read_records(site.directory)
        change(site.node, site.uuids.index(claim.devices[0]), faults=("lost",))
        done = site.gpuguard("release", claim.id)

        assert done.returncode in (1, 4) and "cannot be seen" in done.stderr
        assert site.free() == 3


@pytest.mark.parametrize(
    "name",
    [
        "\x1b[2J\x1b]0;X\a\u202eid\nNEWid;$(touch pwn)`id`",  # of the terminal, and of a shell
        "--stop",
        "1f2e  root  8",  # columns of the table
        "c.a.b",
        "f" * 33,
        "",
    ],
    ids=["controls", "option", "columns", "parts", "long", "empty"],
)
def test_a_record_whose_name_is_no_id_is_none_and_its_lock_is_a_claim_without_details(site, name):
    with a_holder(site.directory, site.uuids[0], name=name):
        shown = {words: site.gpuguard(*words.split()) for words in ("release", "release 1", "who", "who --json")}

        [claim] = json.loads(shown["who --json"].stdout)["devices"][0]["claims"]
        assert (claim["id"], claim["command"]) == (f"no-record-{site.uuids[0][:12]}", None)
        text = "".join(done.stdout + done.stderr for done in shown.values())
        assert text.isascii() and text.replace("\n", "").isprintable()
        assert not name or name not in text
        assert shown["release"].stdout == "no claim is yours.\n" if os.geteuid() else "there is no claim.\n"


def test_the_claim_around_a_command_is_named_by_an_id_and_by_no_path(site):
    """A path would be opened, and what lies there removed where it is not locked."""
    victim = site.place / "claims" / "victim.json"
    victim.write_text("{}")
    Path(site.directory.records, f"claim.{os.geteuid()}.x").mkdir()

    assert outer_claim(site.directory, {"GPUGUARD_CLAIM": "x/../../victim"}) is None
    assert victim.exists()


@pytest.mark.parametrize("name", ["", "no", "../../etc/passwd", "*", "1dea1234.json", "%s", "0"])
def test_an_id_that_means_no_claim_releases_none(site, name):
    with a_holder(site.directory, site.uuids[0]):
        done = site.gpuguard("release", name)

        assert done.returncode == 1 and "no claim has an id" in done.stderr
        assert site.free() == 3


def test_the_beginning_of_an_id_must_mean_one_claim(site):
    with a_holder(site.directory, site.uuids[0], name="1deaaaaa"), a_holder(site.directory, site.uuids[1], name="1dea"):
        several = site.gpuguard("release", "1de")
        exact = site.gpuguard("release", "1dea")

        assert several.returncode == 1 and "1deaaaaa" in several.stderr and "could be" in several.stderr
        assert exact.returncode == 0 and site.claims() == ["1deaaaaa"]


def test_without_an_id_own_claims_are_shown(site):
    nothing = site.gpuguard("release")
    with a_holder(site.directory, *site.uuids[:2]):
        text, listed = site.gpuguard("release"), site.gpuguard.json("release")

    assert nothing.returncode == 0 and nothing.stdout
    assert text.stdout.startswith("CLAIM ") and "1dea1234" in text.stdout
    assert "no process computes: can be released" in text.stdout
    assert [(claim["claim"], len(claim["devices"]), claim["in_use"]) for claim in listed["claims"]] == [
        ("1dea1234", 2, None)
    ]
    assert site.gpuguard("release", "--stop").returncode == 2


def test_a_request_that_a_run_does_not_answer_is_carried_out_from_here(site):
    with site.job("-n", "2", command=("sh", "-c", "sleep 100")) as run:
        os.kill(run.pid, signal.SIGSTOP)
        try:
            done = site.gpuguard("release", site.claims()[0])
            assert (done.returncode, site.free()) == (0, 4), done.stderr
        finally:
            os.kill(run.pid, signal.SIGCONT)
        assert run.stderr and "released by" in run.stderr.readline()
        assert site.free() == 4  # it was asked meanwhile, and takes nothing again


@pytest.mark.parametrize(
    ("options", "how"), [((), "by the gpuguard run of its job"), (("--stop",), "its job was ended")]
)
def test_a_claim_that_was_asked_for_in_vain_very_often_is_still_given_up(site, options, how):
    with site.job("-n", "2"):
        [claim] = read_records(site.directory)
        record = os.open(record_path(site.directory, claim.uid, claim.id), os.O_RDWR)
        for _ in range(100):  # as by a script that tries every minute
            write_request(record, ReleaseRequest(YIELD, "root", "others wait"))
            write_request(record, ReleaseRequest("refused", "gpuguard run", "pid 4711 (python train.py) computes"))
        os.close(record)

        done = site.gpuguard("release", claim.id, *options)

        assert (done.returncode, site.free()) == (0, 4), done.stderr
        assert how in done.stdout


def test_the_request_of_another_user_is_no_answer(site, monkeypatch):
    monkeypatch.setattr("gpuguard.daemon.release.ANSWER_SECONDS", 60.0)
    with site.job("-n", "1") as run:
        [claim] = read_records(site.directory)
        record = os.open(record_path(site.directory, claim.uid, claim.id), os.O_RDWR)
        with SupervisorChannel(site.directory, claim) as supervisor, ThreadPoolExecutor(1) as threads:
            os.kill(run.pid, signal.SIGSTOP)
            answer = threads.submit(supervisor.send, ReleaseRequest(YIELD, "alice"))
            assert eventually(lambda: pending_request(record) is not None, 20)
            write_request(record, ReleaseRequest(YIELD, "root"))
            os.kill(run.pid, signal.SIGCONT)

            assert (answer.result().what, site.free()) == (RELEASED, 4)
        os.close(record)


def test_all_devices_of_a_claim_are_free_at_once_and_for_good_while_its_process_lives(directory):
    with a_holder(directory, *GPUS[:3]) as holder:
        with lock_handle(directory, holder.record()) as handle:
            held = free(directory)
            release_locks(handle, BY_ROOT)

        assert (held, free(directory)) == ([GPUS[3]], list(GPUS))
        assert holder.lives() and holder.record() is None
        assert not os.path.exists(record_path(directory, holder.uid, holder.id))
        said = holder.does("claim.reassert()")
        assert said.startswith("ClaimLost: the claim 1dea1234 was released by root") and "another user waits" in said
        assert free(directory) == list(GPUS)
        assert holder.does("claim.reassert()") == "None"  # it holds nothing any more: there is nothing to lose
        assert holder.does("claim.release()") == "None"


def test_others_keep_what_they_took_meanwhile(directory):
    with a_holder(directory, *GPUS[:2]) as holder:
        release(directory, holder.record())
        with a_holder(directory, *GPUS[:2], name="0ther") as other:
            assert "released by root" in holder.does("claim.reassert()")
            assert holder.does("claim.release()") == "None"
            assert free(directory) == list(GPUS[2:]) and other.record()


def test_a_bystanders_claim_of_the_same_user_and_even_of_the_same_process_stays(directory):
    second = (
        f"[globals().update(l2=(take_lock(directory, {GPUS[2]!r}, fcntl.LOCK_EX),)),"
        f" globals().update(c2=Claim('5ec0nd', (SimpleNamespace(uuid={GPUS[2]!r}, index=0),), l2)),"
        " c2.write_record(directory)] and None"
    )
    with a_holder(directory, GPUS[0]) as holder, a_holder(directory, GPUS[1], name="other") as bystander:
        assert holder.does(second) == "None"
        release(directory, holder.record())

        assert free(directory) == [GPUS[0], GPUS[3]]
        assert (holder.does("c2.reassert()"), bystander.does("claim.reassert()")) == ("None", "None")


def test_an_inner_claim_gives_up_its_own_locks_and_not_those_of_the_claim_around_it(directory):
    nested = f"{GPUS[0]}.nested"
    with a_holder(directory, GPUS[0]) as outer, a_holder(directory, nested, name="1dea1234.inner") as inner:
        release(directory, inner.record())

        assert is_free(directory, nested) and not is_free(directory, GPUS[0])
        assert outer.does("claim.reassert()") == "None"


def test_the_shared_lock_of_a_whole_device_stays_with_the_other_claim_of_the_process(directory):
    two = (
        "[globals().update({n: Claim(n, (SimpleNamespace(uuid=u, index=0),),"
        f" (take_lock(directory, u, fcntl.LOCK_EX), take_lock(directory, {GPUS[0]!r}, fcntl.LOCK_SH)))}})"
        " or globals()[n].write_record(directory) for n, u in (('one', 'MIG-1'), ('two', 'MIG-2'))] and None"
    )
    with a_holder(directory) as holder:
        holder.does(two)
        release(directory, ClaimRecord("one", holder.uid, "", ("MIG-1",)))

        assert (is_free(directory, "MIG-1"), is_free(directory, "MIG-2"), is_free(directory, GPUS[0])) == (
            True, False, False,
        )  # fmt: skip
        assert holder.does("two.release()") == "None"
        assert is_free(directory, GPUS[0])


@pytest.mark.parametrize("unlocked", range(4))
def test_what_a_killed_releaser_began_is_finished_by_the_claim_itself_or_by_the_next_one(directory, unlocked):
    for finish in ("claim", "releaser"):
        name = f"1dea{finish}"
        with a_holder(directory, *GPUS, name=name) as holder:
            record = holder.record()
            if (child := os.fork()) == 0:
                killed_after(unlocked, directory, record)
            os.waitpid(child, 0)
            assert len(free(directory)) == unlocked  # half: all of it is decided, and is seen to be
            if finish == "claim":
                assert "released by root" in holder.does("claim.reassert()")
            else:
                release(directory, record)

            assert free(directory) == list(GPUS) and holder.record() is None


def killed_after(unlocked: int, directory: LockDirectory, record: ClaimRecord) -> None:
    """Release, and die of SIGKILL before the next unlock."""
    left, real = [unlocked], fcntl.flock

    def flock(descriptor: Any, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        real(descriptor, operation)

    with lock_handle(directory, record) as handle:
        releasing.fcntl.flock = flock
        release_locks(handle, BY_ROOT)
    os._exit(1)


def test_nothing_is_unlocked_when_the_decision_cannot_be_written_down(directory, monkeypatch):
    def full(descriptor: int, request: ReleaseRequest) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(releasing, "write_request", full)
    with a_holder(directory, *GPUS) as holder:
        with lock_handle(directory, holder.record()) as handle, pytest.raises(OSError, match="space"):
            release_locks(handle, BY_ROOT)

        assert free(directory) == [] and holder.does("claim.reassert()") == "None"


def files_open_here() -> Counter[str]:
    """How often each file is open here; no pipes, of which the reader of locks has two once it was needed."""
    links: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            links[os.readlink(f"/proc/self/fd/{number}")] += 1
    return Counter({link: count for link, count in links.items() if not link.startswith("pipe:")})


def test_a_file_that_does_not_answer_holds_up_one_thread_and_no_request(directory, monkeypatch):
    """One of FUSE, say, whose owner never lets go whoever closes a copy of it."""
    answers, really, before = threading.Event(), releasing._is_lock, files_open_here()
    with a_holder(directory, GPUS[0]) as holder, monkeypatch.context() as patch:
        patch.setattr(procfs, "FILE_SECONDS", 0.03)
        patch.setattr(releasing, "_is_lock", lambda *some: answers.wait(60) and really(*some))
        for _ in range(3):
            with pytest.raises(ClaimError, match="does not answer"), lock_handle(directory, holder.record()):
                pass
        assert [kind for _, kind in procfs._hanging] == ["lent"]
        answers.set()
        patch.setattr(procfs, "FILE_SECONDS", 60.0)
        assert eventually(lambda: bool(releasing.in_time(os.getpid(), "lent", lambda: True)))
        release(directory, holder.record())

        assert is_free(directory, GPUS[0]), "and what came too late was given back"
    assert files_open_here() == before


def closed(*_: object) -> int:
    raise OSError(errno.EBADF, "closed")


@pytest.mark.parametrize(
    ("name", "value", "said"), [("_getfd", closed, "just ending"), ("SEARCH_SECONDS", -1.0, "Look again")]
)
def test_a_claim_whose_files_are_closed_or_not_found_in_time_lends_none(directory, monkeypatch, name, value, said):
    with a_holder(directory, GPUS[0]) as holder, pytest.raises(ClaimError, match=said):
        monkeypatch.setattr(releasing, name, value)
        with lock_handle(directory, holder.record()):
            pass


def test_a_claim_that_has_ended_lends_no_locks(directory):
    with a_holder(directory, GPUS[0]) as holder:
        record = holder.record()
    with pytest.raises(ClaimError, match="has ended"), lock_handle(directory, record):
        pass


def a_record(tmp_path: Path, behind: bytes = b"") -> int:
    path = tmp_path / "record"
    path.write_bytes(b'{"id": "x"}' + behind)
    return os.open(path, os.O_RDWR)


def test_requests_are_read_in_their_order_and_the_last_one_waits_for_its_answer(tmp_path):
    record = a_record(tmp_path)
    before = pending_request(record)
    write_request(record, ReleaseRequest(YIELD, "alice", "näher", 5.0))
    asked = pending_request(record)
    write_request(record, ReleaseRequest("refused", "gpuguard run", "pid 3 computes"))

    assert (before, asked, pending_request(record)) == (None, ReleaseRequest(YIELD, "alice", "näher", 5.0), None)
    assert [request.what for request in read_requests(record)] == ["yield", "refused"]
    assert released_by(record) is None


def test_any_number_of_requests_finds_room(tmp_path):
    record = a_record(tmp_path)
    for _ in range(1000):  # as by a script that tries every minute
        asked = write_request(record, ReleaseRequest(YIELD, "root", "others wait"))
        write_request(record, ReleaseRequest("refused", "gpuguard run", "pid 4711 (python train.py) computes"))
        assert [answer.what for answer in read_requests(record, asked)] == ["refused"]

    assert pending_request(record) is None
    assert os.fstat(record).st_size < FULL_BYTES + READ_BYTES


@pytest.mark.parametrize("length", [20_000, FULL_BYTES + 1])
def test_a_request_behind_junk_is_read(tmp_path, length):
    record = a_record(tmp_path, b"\n" + b"x" * length)
    write_request(record, ReleaseRequest(YIELD, "bob"))
    assert pending_request(record) is not None
    write_request(record, BY_ROOT)
    assert released_by(record) is not None


def test_a_decision_makes_way_for_no_request(tmp_path):
    record = a_record(tmp_path, b"x" * FULL_BYTES + b'\n{"what": "released", "by": "root"}\n')

    with pytest.raises(ClaimError, match="full"):
        write_request(record, ReleaseRequest(YIELD, "bob"))
    assert released_by(record) is not None


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        (b"\nSigCgt:\t0000000000400000\n", True),
        (b"\nSigCgt:\t0000000000200000\n", False),
        (b"\nSigCgt:\tnothing\n", False),
        (b"\nSigCgt:\n", False),
        (None, False),
    ],
    ids=["SIGURG", "another signal", "no number", "empty", "gone"],
)
def test_only_a_process_that_catches_sigurg_is_a_supervisor(monkeypatch, status, waits):
    monkeypatch.setattr(procfs, "read_proc", lambda *_: status)

    assert is_supervisor(4711) is waits


MINE = ClaimRecord("c", 1001, "alice", ("GPU-A",), pid=50, holders=(50,))


@pytest.mark.parametrize(
    ("process", "counts"),
    [
        (a_process(7, uid=1001), True),
        (a_process(7, uid=0), True),  # a container
        (a_process(7, uid=None, start_time=None), True),
        (a_process(50, uid=1002), True),  # sudo: the wrapper itself
        (a_process(7, uid=1002), False),
        (a_process(7, uid=1001, kind="graphics", memory_used=GIB), False),
    ],
)
def test_a_process_that_may_belong_to_the_claim_computes_under_it(process, counts):
    users, unknown = computing_under(MINE, a_snapshot(a_device(uuid="GPU-A", processes=(process,))), {})

    assert (bool(users), unknown) == (counts, None)


@pytest.mark.parametrize(
    "devices",
    [
        (),
        (a_device(uuid="GPU-B"),),
        (a_device(uuid="GPU-A", processes=None),),
        (a_device(uuid="GPU-A", processes_plausible=False),),
        (a_device(uuid="GPU-A"), a_device(1, uuid="MIG-1", parent_uuid="GPU-A", processes=None)),
    ],
)
def test_what_cannot_be_seen_is_unknown_and_not_nobody(devices):
    assert computing_under(MINE, a_snapshot(*devices), {})[1]
