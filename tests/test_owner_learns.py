"""The owner of a process that a policy warned, ended or slowed down learns of it without root; others do not."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from broker_machine import Brokered
from chances import NUMBER, luck, often
from daemons import with_names
from endpoints import a_web_server
from nodes import GIB, eventually, until
from proc import born_with
from users import an_open_place

from gpuguard.daemon.requests import FIELDS
from gpuguard.policies.action_kinds import DISRUPTIVE

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


# Of two ranks the one that was started by the other uses too much.
TWO_RANKS = f"""
import os, time
from gpuguard.backends import simulated
node = os.environ["GPUGUARD_BACKEND"].partition(":")[2]
first, second = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
hog = os.fork() == 0
simulated.use(second if hog else first, {40 * GIB} if hog else {GIB}, 50.0, spec=node)
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
    """A machine whose daemon enforces *policy*, in a place where ALICE and BOB have names."""

    policy = POLICY
    interpreted = ("-m", "gpuguard")

    def start_daemon(self, *options: str, ready: bool = True) -> None:
        policy = self.place / "policy.yaml"
        policy.write_text(self.policy)
        policy.chmod(0o600)
        log = str(self.place / "events.jsonl")
        words = [*with_names(self.place / "passwd"), self.python_path, *self.interpreted, "daemon"]
        words += ["--interval", "200ms", "--events", log, "--policy", str(policy), "--enforce", *options]
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
    assert "if nothing changes: the process, or its whole claimed job, is asked to end (SIGTERM)." in text
    assert " policy hogs gave pid" in text
    assert " ended by policy hogs (uses 40.0GiB" in text
    assert eventually(lambda: '"outcome": "ended"' in (machine.place / "events.jsonl").read_text())
    lines = [json.loads(line) for line in (machine.place / "events.jsonl").read_text().splitlines()]
    assert [line["outcome"] for line in lines if line["kind"] == "warn"] == ["logged"]
    [about_to, ended] = [line for line in lines if line["kind"] == "terminate"]
    assert (about_to["outcome"], about_to["pid"], ended["user"]) == ("about to", ended["pid"], about_to["user"])
    assert re.fullmatch(r"ended within \ds, and its memory is back", ended["message"])
    [release] = [line for line in events(machine, ALICE) if line["kind"] == "release"]
    assert release["facts"]["policy"] == "hogs" and "ended by policy hogs" in release["message"]


def test_a_claimed_job_ends_whole_where_a_policy_finds_one_of_its_ranks(machine):
    with machine.runs(ALICE, *machine.words("run", "-n", "2", "--", machine.python_path, "-c", TWO_RANKS)) as (
        job,
        log,
    ):
        status, text = job.wait(60), log.read_text()

    assert status == 128 + signal.SIGTERM, text + machine.said()
    assert " ended by policy hogs (its job ends whole: uses 40.0GiB" in text
    lines = [json.loads(line) for line in (machine.place / "events.jsonl").read_text().splitlines()]
    ends = [line for line in lines if (line["kind"], line["outcome"]) == ("terminate", "about to")]
    assert len({line["pid"] for line in ends}) == len(ends) == 2
    assert len({line["facts"]["job"] for line in ends}) == 1


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


def test_a_daemon_that_does_not_answer_is_said_to_the_users_whose_events_it_has(machine):
    with machine.runs(ALICE, machine.python_path, "-c", JOB) as (process, _):
        process.wait(60)
    assert machine.daemon is not None
    os.kill(machine.daemon.pid, signal.SIGSTOP)
    try:
        told = {user: machine.says(user, "events") for user in (ALICE, BOB)}
    finally:
        os.kill(machine.daemon.pid, signal.SIGCONT)

    assert "what the daemon did to you is left out: no daemon answers in" in told[ALICE]
    assert "left out" not in told[BOB]


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


def a_random_message(dice: random.Random, pid: int, claim: str) -> dict[str, Any]:
    """A request of any kind with fields of any kind, mostly about ALICE."""
    kinds = [kind for kind in FIELDS if kind not in ("reload", "claims")]
    values = (20001, "20001", "somebody", 0, -1, 20002, None, [20001], pid, str(pid), claim, "all", "0", True, 1e9, "*")
    names = ("uid", "user", "claim", "device", "reason", "for_seconds", "end", "pid", "policy", "since")
    known = tuple(FIELDS[kind := dice.choice(kinds)])
    return {"do": kind, **{dice.choice(known or names): dice.choice(values) for _ in range(dice.randrange(4))}}


def test_no_random_request_tells_a_user_what_a_policy_has_against_another_one(machine):
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {JOB.strip()}"
    with machine.runs(ALICE, *machine.words("run", "--", machine.python_path, "-c", deaf)):
        assert eventually(lambda: "terminate  about to" in machine.said()), machine.said()
        [claim] = machine.claims(None)
        dice = luck("requests")
        asked = [json.dumps(a_random_message(dice, claim["pid"], claim["id"])) for _ in range(often(1200))]
        told = {user: machine.python(user, ASK, *asked) for user in (ALICE, BOB)}

    secret = re.compile(r"hogs|40\.0GiB|'user': 'somebody'")
    assert secret.search(told[ALICE])
    assert not secret.search(told[BOB])


# 30 s before a SIGKILL, and a Slurm, are left out.
IN_A_HURRY = """
import sys
from gpuguard.clusters import slurm_jobs
from gpuguard.enforcement import guard_limits
from gpuguard.policies import engine, policy
guard_limits.KILL_AFTER = engine.KILL_AFTER = policy.KILL_AFTER = 0.2
slurm_jobs.job_of, slurm_jobs.against_cancelling = lambda pids: "12", lambda *_: None
slurm_jobs.cancel = lambda job: None
from gpuguard.cli import main
main(sys.argv[1:])
"""
# Deaf to SIGTERM, so that it is there to be told; in a pid namespace, too, it has the number by which others know it.
ANY_JOB = """
import os, signal, sys, time
os.getpid = lambda: int(os.readlink("/proc/self"))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGWINCH, lambda *_: None)
what, device = sys.argv[1:]
if device == "grab":
    import gpuguard
    claim = gpuguard.grab_gpus(1)
elif device:
    os.environ["CUDA_VISIBLE_DEVICES"] = device
if what == "computes":
    from gpuguard.backends import simulated
    simulated.use(None, 40 * 2**30, 50.0, spec=os.environ["GPUGUARD_BACKEND"].partition(":")[2])
print("uses", os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
time.sleep(600)
"""
KERNEL = "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True, stdin=subprocess.PIPE)"
# How each job is started, and on which device; those without a claim take one that no other job chooses.
STARTS = {
    "setsid": ("setsid --wait", "0"),
    "cron": ("sh -c '\"$@\"' sh", "1"),
    "container": ("unshare --pid --fork setpriv --reuid=20001 --regid=20001 --clear-groups", "2"),
    "notebook": (f"PYTHON -c '{KERNEL}'", "grab"),
    "terminal": ("script -qefc", ""),
    "nohup": ("nohup PYTHON -m gpuguard run --", ""),
    "service": ("setsid --fork PYTHON -m gpuguard run --", ""),
    "exec": ("PYTHON -m gpuguard run --exec --", ""),
}
LATER = "{after: 1h, do: terminate}"
STEPS = {  # an action, and what comes with it
    "log": f"log, {LATER}",
    "warn": f"warn, {LATER}",
    "notify": f"{{do: notify, to: owner}}, {LATER}",
    "run_hook": f"{{do: run_hook, hook: script}}, {LATER}",
    "checkpoint": f"{{do: checkpoint, signal: WINCH}}, {LATER}",
    "terminate": "warn, {after: 200ms, do: terminate}, {after: 1h, do: kill}",
    "kill": "warn, {after: 200ms, do: terminate}, {after: 400ms, do: kill}",
    "pause": f"warn, {{after: 200ms, do: pause}}, {LATER}",
    "resume": f"warn, {{after: 200ms, do: pause}}, {{after: 300ms, do: resume}}, {LATER}",
    "renice": f"renice, {LATER}",
    "deny": f"deny, {LATER}",
    "quarantine": f"quarantine, {LATER}",
    "cancel": f"warn, {{after: 200ms, do: cancel}}, {LATER}",
    "release": "warn, {after: 200ms, do: release}, {after: 1h, do: log}",
}
MATRIX = """
version: 1
mode: enforce
limits: {per_minute: 100, per_hour: 100}
policies:
  - {name: hogs, for: 400ms, at_most: {users: 3, processes: 50}, when: {WHEN}, steps: [STEPS]}
notify:
  owner: {email: {to: $user@example.org, sendmail: PLACE/sendmail}}
  script: {hook: {command: [/bin/true]}}
"""
# Rule, and numbers; release is about claims under which nothing computes.
HOGS, UNUSED = ("memory", "uses 40.0GiB of GPU"), ("idle", "5%")


class Jobs(GuardedMachine):
    """A job of ALICE for each way to start one, and a guard that comes when all of them run."""

    interpreted = ("-c", IN_A_HURRY)

    def __init__(self, place: Path, site: Path, action: str) -> None:
        super().__init__(place, site, "everybody", "16xH100-80GB")
        self.action = action
        self.rule, self.numbers = UNUSED if action == "release" else HOGS
        when = "idle: {below: 5%}" if action == "release" else "memory: {above: 20GiB}"
        self.policy = MATRIX.replace("WHEN", when).replace("STEPS", STEPS[action]).replace("PLACE", str(place))
        (place / "job.py").write_text(ANY_JOB)
        (place / "sendmail").write_text(f"#!/bin/sh\ncat >> {place}/mails\n")
        (place / "sendmail").chmod(0o755)
        self.names = [name for name, (_, device) in STARTS.items() if action != "release" or not device.isdecimal()]
        self.jobs: dict[str, tuple[int, str]] = {}  # pid, device
        self.started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        super().begin()
        self.started = [
            self.start_job(name, "rests" if self.action == "release" else "computes") for name in self.names
        ]
        for name in self.names:
            found = until(partial(self.uses, name), name)
            self.jobs[name] = int(found[1]), found[2]

    def uses(self, name: str) -> re.Match[str] | None:
        return re.search(r"uses (\d+) (\d+)", self.log(name))

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    def start_job(self, name: str, what: str) -> subprocess.Popen[bytes]:
        words, device = STARTS[name]
        job = [self.python_path, str(self.place / "job.py"), what, device]
        if name == "terminal":
            job = [shlex.join(self.words("run", "--", *job)), "/dev/null"]
        line = [word.replace("PYTHON", self.python_path) for word in shlex.split(words)]
        root = {"user": 0, "group": 0} if name == "container" else {}
        with (self.place / f"{name}.log").open("wb") as out:
            return subprocess.Popen([*line, *job], stdout=out, stderr=out, **{**self.of(ALICE), **root})

    def close(self) -> None:
        for pid in {*(job.pid for job in self.started), *born_with(f"GPUGUARD_DIR={self.place}/claims")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for job in self.started:
            job.wait()
        super().close()

    def unaware(self) -> dict[str, str]:
        """The jobs whose owner does not find policy, rule, numbers and next step yet, and what is missing."""
        told = json.loads(self.says(ALICE, "keep", "--status", "--json"))
        events = [line for line in told["recent"] if line["facts"].get("policy") == "hogs"]
        return {name: missing for name in self.names if (missing := self.missing(name, events, told["standing"]))}

    def missing(self, name: str, events: list[Any], standing: list[Any]) -> str:
        pid, device = self.jobs[name]
        log = self.log(name)
        claim = (re.search(r"claim ([0-9a-f]{8})", log) or [None, None])[1]
        mine = [line for line in events if line["pid"] == pid or (line["claim"] and line["claim"] == claim)]
        deeds = [line for line in mine if self.action == line["kind"]]
        rows = [row for row in standing if row["pid"] == pid or (row["claim"] and row["claim"] == claim)]
        if claim is None and self.action == "release":  # of a notebook and of --exec: no line says which claim it is
            deeds, rows = [line for line in events if line["kind"] == "release"], standing
        if name == "terminal" and self.action in DISRUPTIVE:  # it has ten minutes more, of which the status tells
            deeds = [{**line, "message": line["why"], "facts": {"rule": line["rule"]}} for line in rows]
        if self.action in ("notify", "run_hook"):  # what becomes of messages is the administrator's
            deeds = [] if self.action == "notify" and f"40.0GiB of GPU {device}," not in self.mails() else rows
        elif not any(self.numbers in line["message"] and line["facts"]["rule"] == self.rule for line in deeds):
            return f"no event of {self.action}: {mine}"
        lasts = self.action not in ("kill", "release") or (name == "terminal" and self.action == "kill")
        if lasts and not any(row["rule"] == self.rule and self.numbers in row["why"] and row["next"] for row in rows):
            return f"no next step: {rows}"
        if name in ("terminal", "nohup", "service") and self.action in TOLD_AT_ONCE and "hogs" not in log:
            return f"nothing in its log: {log}"
        return "" if deeds else "no message"

    def mails(self) -> str:
        return (self.place / "mails").read_text() if (self.place / "mails").exists() else ""


TOLD_AT_ONCE = {"warn", "checkpoint", "terminate", "kill", "pause", "resume", "renice", "deny", "cancel", "release"}
SOME = list(STEPS) if NUMBER else ["notify", "terminate", "release"]


@pytest.mark.parametrize("action", SOME)
def test_the_owner_finds_policy_rule_numbers_and_next_step_however_the_job_was_started(site, action):
    with an_open_place() as place:
        machine = Jobs(place, site, action)
        try:
            machine.begin()
            machine.start_daemon()
            assert eventually(lambda: not machine.unaware()), machine.unaware()
        finally:
            machine.close()
