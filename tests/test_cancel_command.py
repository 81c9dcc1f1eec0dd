"""`gpuguard cancel`: requests that wait and jobs are ended by their ids, once, by their owner and root alone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nodes import Gpuguard, eventually, start
from proc import runs
from users import ALICE, BOB, Machine

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices, read_records
from gpuguard.daemon import cancel as cancelling
from gpuguard.errors import ClaimError
from gpuguard.queue.priority import Ticket
from gpuguard.queue.tickets import read_tickets, waiting_tickets

# The command line, but a request that has its claim stays where it is: it has the record of that, and its ticket.
STARTING = """
import sys, time
from gpuguard.queue.waiter import WaitingRequest
def started(self, claim):
    print("starting", flush=True)
    time.sleep(600)
WaitingRequest.started = started
from gpuguard.cli import main
main(sys.argv[1:])
"""
WAITING = """
import gpuguard
try:
    gpuguard.grab_gpus(1, wait=None)
except KeyboardInterrupt:
    print("interrupted", flush=True)
input()
"""
CLAIMING = "import gpuguard, time; claim = gpuguard.grab_gpus(1); print(claim.id, flush=True); time.sleep(600)"
# A ticket of this user with the words of another one: id and pid; the lock is a child's, whose parent took it.
PLANTING = """
import json, os, sys
from gpuguard.claims.directory import try_flock, lock_directory
from gpuguard.queue.tickets import new_ticket, ticket_content, ticket_path
from gpuguard.request import Request
words, pid = sys.argv[1:]
path = ticket_path(lock_directory(os.environ["GPUGUARD_DIR"]), f"{os.geteuid()}.{words}p{pid}")
descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
try_flock(descriptor)
os.write(descriptor, json.dumps(ticket_content(new_ticket([Request()])) | {"pid": int(pid)}).encode())
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()  # until the test is over
"""


class Place:
    """A simulated node with one device, which a job has, and gpuguard on it."""

    def __init__(self, place: Path) -> None:
        self.backend = start(str(place / "node"), "1xH100-80GB")
        self.gpuguard, self.directory = Gpuguard(place, None), lock_directory(str(place / "claims"))

    @contextmanager
    def process(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """It and its children, killed at the end."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(
            words, env=self.gpuguard.environment, text=True, start_new_session=True, **pipes
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    @contextmanager
    def job(self) -> Iterator[str]:
        """The id of its claim."""
        with self.process(
            *self.gpuguard.words("run", "--quiet", "--", "sh", "-c", "echo ready; exec sleep 600")
        ) as run:
            assert run.stdout.readline() == "ready\n"
            yield self.claims()[0]

    @contextmanager
    def request(self, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A process that waits, and the id of its request."""
        with self.process(*(words or self.gpuguard.words("run", "--quiet", "--", "sleep", "600"))) as process:
            assert eventually(lambda: process.pid in [ticket.pid for ticket in self.tickets()])
            yield process, next(ticket.short_id for ticket in self.tickets() if ticket.pid == process.pid)

    def tickets(self) -> list[Ticket]:
        return read_tickets(self.directory)[0]

    def claims(self) -> list[str]:
        return [claim.id for claim in read_records(self.directory)]

    @property
    def is_free(self) -> bool:
        return not locked_devices(self.directory, [device.uuid for device in self.backend.sample(()).devices])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_request_is_shown_with_its_id_and_ends_as_by_sigterm_with_a_line_before(place: Place) -> None:
    log = Path(place.gpuguard.environment["GPUGUARD_DIR"]).parent / "job.log"
    words = place.gpuguard.words("run", "--log-file", str(log), "--", "true")
    with place.job() as job, place.request(*words) as (waiting, name):
        [queued], [shown] = place.gpuguard.json("queue")["places"], place.gpuguard.json("who")["waiting"]
        assert (queued["short_id"], shown["short_id"]) == (name, name)
        assert name in place.gpuguard("queue").stdout and name in place.gpuguard("who").stdout
        done = place.gpuguard("cancel", name[:6])

        assert (done.returncode, waiting.wait(60)) == (0, -signal.SIGTERM), done.stderr
        assert done.stdout.endswith(f"/{name} has ended.\n")
        assert (list(Path(place.directory.records).glob("*ticket.*")), place.claims()) == ([], [job])
        [event] = place.gpuguard.events("terminate")
        assert (event["outcome"], event["pid"], event["claim"]) == ("about to", waiting.pid, name)
        [event] = place.gpuguard.events("queue")
        assert (event["outcome"], event["pid"], event["message"]) == ("withdrawn", waiting.pid, "SIGTERM: true")
        assert all("SIGTERM came while it waited" in text for text in (log.read_text(), waiting.stderr.read()))


def test_a_request_keeps_its_id_when_it_starts_and_several_ids_end_what_they_can(place: Place) -> None:
    with place.job() as job, place.request() as (run, name):
        with place.request() as (other, further):
            done = place.gpuguard("cancel", job, "none", further, "--json")
            answer = json.loads(done.stdout)

            assert (done.returncode, other.wait(60)) == (1, -signal.SIGTERM)
            assert [(row["id"], row["kind"], row["outcome"]) for row in answer["cancelled"]] == [
                (job, "job", "ending"), (further, "request", "ended"),
            ]  # fmt: skip
            assert [row["id"] for row in answer["refused"]] == ["none"]
            assert "`gpuguard queue`" in answer["refused"][0]["why"]
        assert eventually(lambda: place.claims() == [name])
        assert eventually(lambda: place.gpuguard("cancel", name).returncode == 0)
        assert run.wait(60) == 128 + signal.SIGTERM
        assert eventually(lambda: place.is_free)


def test_a_stopped_request_is_ended_too(place: Place) -> None:
    with place.job(), place.request() as (waiting, name):
        waiting.send_signal(signal.SIGSTOP)

        assert place.gpuguard("cancel", name).returncode == 0
        assert waiting.wait(60) == -signal.SIGTERM


def test_a_notebook_that_waits_is_interrupted_and_lives_on(place: Place) -> None:
    with place.job(), place.request(sys.executable, "-c", WAITING) as (notebook, name):
        done = place.gpuguard("cancel", name)

        assert done.returncode == 0, done.stderr
        assert notebook.stdout.readline() == "interrupted\n"
        assert notebook.poll() is None and place.tickets() == []


def test_a_program_that_has_a_claim_is_ended_by_sigterm(place: Place) -> None:
    with place.process(sys.executable, "-c", CLAIMING) as program:
        done = place.gpuguard("cancel", program.stdout.readline().strip())

        assert (done.returncode, program.wait(60), place.is_free) == (0, -signal.SIGTERM, True), done.stderr


def test_a_request_that_is_just_starting_is_ended_once_and_leaves_no_claim(place: Place) -> None:
    words = [sys.executable, "-c", STARTING, "run", "--quiet", "--", "sh", "-c", "echo started"]
    with place.job() as job, place.request(*words) as (run, name):
        assert place.gpuguard("cancel", job).returncode == 0
        assert run.stdout.readline() == "starting\n"
        assert (place.claims(), [ticket.short_id for ticket in place.tickets()]) == ([name], [name])
        done = place.gpuguard("cancel", name)

        assert (done.returncode, run.wait(60)) == (0, -signal.SIGTERM), done.stderr
        assert (place.claims(), place.tickets(), place.is_free, run.stdout.read()) == ([], [], True, "")


def test_a_request_that_starts_while_it_is_looked_for_is_ended_as_a_job(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place.job() as job, place.request() as (run, name):
        before = waiting_tickets(place.directory)
        place.gpuguard("cancel", job)
        assert eventually(lambda: place.claims() == [name] and not place.tickets())
        assert eventually(lambda: place.gpuguard.events("claim")[-1]["claim"] == name)
        monkeypatch.setattr(cancelling, "waiting_tickets", lambda directory: before)

        assert cancelling.cancel(place.directory, name)[1] == cancelling.ENDING
        assert run.wait(60) == 128 + signal.SIGTERM
        assert eventually(lambda: place.is_free)


def test_the_pid_that_a_ticket_names_and_the_one_that_took_its_lock_prove_nothing(place: Place) -> None:
    with (
        place.process("sleep", "600") as innocent,
        place.process(sys.executable, "-c", PLANTING, "0123abcd", str(innocent.pid)) as planter,
    ):
        keeper = int(planter.stdout.readline())
        planter.wait(60)
        with pytest.raises(ClaimError, match="no process is seen that waits with the request"):
            cancelling.cancel(place.directory, "0123abcd")

        assert innocent.poll() is None and runs(keeper)
        os.kill(keeper, signal.SIGKILL)


def test_nothing_is_signalled_that_cannot_be_written_down(place: Place) -> None:
    with place.job(), place.request() as (waiting, name):
        place.gpuguard.environment["GPUGUARD_EVENTS"] = "/dev/full/events"
        done = place.gpuguard("cancel", name)

        assert done.returncode == 1 and "the log cannot be written" in done.stderr
        assert waiting.poll() is None and place.tickets()


@pytest.mark.root
@pytest.mark.parametrize(("who", "prefix"), [(ALICE, ""), (None, f"{ALICE.pw_name}/")], ids=["alice", "root"])
def test_alice_and_root_end_alices_request_and_bob_does_not_whatever_he_plants(
    admin: Machine, who: Any, prefix: str
) -> None:
    events = admin.place / "alices"
    events.touch()
    os.chown(events, ALICE.pw_uid, ALICE.pw_gid)
    code = f"import os; print(flush=True); os.execvp({sys.executable!r}, {admin.words('run', '--', 'true')!r})"
    with admin.job(BOB, "-n", "8"), admin.program(ALICE, code.replace(sys.executable, admin.python_path)) as run:
        assert eventually(lambda: bool(read_tickets(admin.directory)[0]))
        [ticket] = read_tickets(admin.directory)[0]
        with admin.program(BOB, PLANTING, ticket.short_id, str(run.pid)):
            assert eventually(lambda: len(read_tickets(admin.directory)[0]) == 2)
            refused = admin(BOB, "cancel", f"{ALICE.pw_name}/{ticket.short_id}")
            ambiguous = admin(None, "cancel", ticket.short_id)
            planted = admin(None, "cancel", f"{BOB.pw_name}/{ticket.short_id}")
            assert (refused.returncode, ambiguous.returncode, planted.returncode) == (1, 1, 1)
            assert f"only {ALICE.pw_name} and root can do that" in refused.stderr
            assert f"{BOB.pw_name}/{ticket.short_id}" in ambiguous.stderr
            assert run.poll() is None
            log = {"GPUGUARD_EVENTS": str(events)} if who else {}
            done = admin(who, "cancel", prefix + ticket.short_id, environment=log)

            assert done.returncode == 0, done.stderr
            assert run.wait(60) == -signal.SIGTERM
