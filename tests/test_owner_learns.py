"""The owner of a process that a policy warned, ended or slowed down learns of it without root; others do not."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokered import Brokered
from daemons import PASSWD, with_names
from endpoints import a_web_server
from nodes import GIB, eventually
from users import an_open_place

pytestmark = pytest.mark.root

POLICY = """
version: 1
mode: enforce
policies:
  - name: hogs
    when: {memory: {above: 20GiB}}
    for: 400ms
    steps: [warn, {after: 400ms, do: renice}, {after: 400ms, do: terminate}, {after: 30s, do: kill}]
"""
JOB = f"""
import os, sys, time
from gpuguard.backends import simulated
node = os.environ["GPUGUARD_BACKEND"].partition(":")[2]
simulated.use(os.environ.get("CUDA_VISIBLE_DEVICES", "0"), {40 * GIB}, 50.0, spec=node)
print("uses", flush=True)
time.sleep(600)
"""


# Asks as the client does, and shows what comes back.
ASK = """
from gpuguard.errors import GpuguardError
for words in sys.argv[1:]:
    try:
        print(exchange(directory, {"do": "events", **json.loads(words)})[0])
    except GpuguardError as error:
        print("refused:", error)
"""


class User:
    """A user with a name, who is not the system's."""

    def __init__(self, uid: int) -> None:
        self.pw_uid = self.pw_gid = uid
        self.pw_name = "somebody" if uid == 20001 else "another"


ALICE, BOB = User(20001), User(20002)


class GuardedMachine(Brokered):
    """A machine whose daemon enforces POLICY, in a place where ALICE and BOB have names."""

    def start_daemon(self, *, ready: bool = True) -> None:
        policy = self.place / "policy.yaml"
        policy.write_text(POLICY)
        policy.chmod(0o600)
        another = PASSWD.replace("somebody", "another", 1).replace("20001", "20002")
        log = str(self.place / "events.jsonl")
        words = [*with_names(self.place / "passwd", PASSWD + another), self.python_path, "-m", "gpuguard", "daemon"]
        words += ["--interval", "200ms", "--events", log, "--policy", str(policy), "--enforce"]
        environment = {name: value for name, value in self.environment.items() if name != "PYTHONPATH"}
        with (self.place / "said").open("a") as said:
            self.daemon = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stderr=said, start_new_session=True,
                cwd=self.environment["PYTHONPATH"],
            )  # fmt: skip
        assert eventually(Path(self.directory.path, "daemon.sock").exists), self.said()

    def of(self, user: User) -> dict[str, Any]:
        """How a program of *user* is started, with a home of its own."""
        home = self.place / user.pw_name
        home.mkdir(exist_ok=True)
        os.chown(home, user.pw_uid, user.pw_gid)
        return {**self._as(user, environment={"HOME": str(home)}), "start_new_session": True}  # type: ignore[arg-type]

    def says(self, user: User, *words: str) -> str:
        """What a command of *user* prints."""
        done = subprocess.run(
            self.words(*words), capture_output=True, text=True, timeout=60, check=False, **self.of(user)
        )
        assert "Traceback" not in done.stderr, done.stderr
        return str(done.stdout + done.stderr)

    @contextlib.contextmanager
    def runs(self, user: User, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A program of *user* without a terminal, and the file that takes what it prints."""
        log = self.place / f"{user.pw_name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, **self.of(user))
        try:
            yield process, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def machine(site) -> Iterator[GuardedMachine]:
    with an_open_place() as place:
        made = GuardedMachine(place, site, "everybody")
        made.begin()
        try:
            made.start_daemon()
            yield made
        finally:
            made.close()


def test_the_log_of_run_says_who_warned_slowed_down_and_ended_the_job_and_why(machine):
    with machine.runs(ALICE, *machine.words("run", "--", machine.python_path, "-c", JOB)) as (job, log):
        status, text = job.wait(60), log.read_text()

    assert status == 128 + signal.SIGTERM, text + machine.said()
    assert " warning of policy hogs: uses 40.0GiB" in text
    assert "if nothing changes: the process is asked to end (SIGTERM)." in text
    assert " policy hogs gave pid" in text
    assert " ended by policy hogs (uses 40.0GiB" in text
    assert eventually(lambda: "ended by SIGTERM within" in (machine.place / "events.jsonl").read_text())
    assert "holds no more" not in (machine.place / "events.jsonl").read_text()
    [release] = [line for line in events(machine, ALICE) if line["kind"] == "release"]
    assert release["facts"]["policy"] == "hogs" and "ended by policy hogs" in release["message"]


def test_a_message_tells_that_a_policy_ended_the_job(machine):
    with a_web_server() as web:
        words = ("run", "--quiet", "--notify", web.url, "--", machine.python_path, "-c", JOB)
        with machine.runs(ALICE, *machine.words(*words)) as (job, _):
            job.wait(60)
    message = json.loads(web.requests[-1][1])

    assert (message["facts"]["event"], message["facts"]["policy"]) == ("ended_by_policy", "hogs")
    assert message["subject"].startswith("ended by policy on ")
    assert "ended by policy hogs (uses 40.0GiB" in message["text"]


def events(machine: GuardedMachine, user: User) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = json.loads(machine.says(user, "events", "--json"))["events"]
    return shown


@pytest.mark.parametrize("start", [(), ("run", "--exec", "--")])
def test_the_owner_of_a_process_without_a_supervisor_finds_the_reason_and_nobody_else_does(machine, start):
    job = (machine.python_path, "-c", JOB)
    with machine.runs(ALICE, *(machine.words(*start) if start else ()), *job) as (process, _):
        assert process.wait(60) == -signal.SIGTERM
    seen = {user: [machine.says(user, *words) for words in VIEWS] for user in (ALICE, BOB)}

    assert all(
        f"policy hogs asked pid {process.pid} to end (SIGTERM): uses 40.0GiB" in text for text in seen[ALICE][1:]
    )
    assert re.search(r"  terminate about to +\d +somebody +.*policy hogs", seen[ALICE][0])
    assert not any("hogs" in text or f"pid {process.pid}" in text for text in seen[BOB])


VIEWS = (("events",), ("keep", "--status"), ("who",), ("explain",))


def test_no_request_tells_a_user_what_the_daemon_did_to_another_one(machine):
    with machine.runs(ALICE, machine.python_path, "-c", JOB) as (process, _):
        process.wait(60)
    forged: list[dict[str, Any]] = [
        {},
        *({"uid": uid} for uid in (20001, -1, None, "20001", [20001], True, 1e99)),
        *({name: 20001} for name in ("user", "uids", "by_uid", "since", "facts", "do ")),
    ]
    told = machine.python(BOB, ASK, *map(json.dumps, forged)).splitlines()  # type: ignore[arg-type]

    assert told[0] == "{'events': []}"
    assert len(told) == len(forged) and all(answer.startswith("refused: events has no field") for answer in told[1:])
