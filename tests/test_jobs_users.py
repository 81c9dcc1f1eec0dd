"""Jobs of several users: root cancels and holds those of all, with the rights of their user alone; others may not."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from nodes import until
from users import ALICE, BOB, Machine

from gpuguard.batch.job_records import JobStore, Source, new_record
from gpuguard.claims.directory import LockDirectory
from gpuguard.cli.jobs import owners
from gpuguard.errors import GpuguardError

pytestmark = pytest.mark.root
JOB = f"{ALICE.pw_name}/1"


class Home:
    """Where the records of ALICE's jobs lie; root does not know it but by what her dispatcher tells."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.state = machine, machine.place / "state-of-alice"
        self.state.mkdir(mode=0o700)
        os.chown(self.state, ALICE.pw_uid, ALICE.pw_gid)

    def __call__(self, *words: str) -> CompletedProcess[str]:
        return self.machine(ALICE, *words, environment={"XDG_STATE_HOME": str(self.state)})

    def task(self) -> dict[str, object]:
        [job] = json.loads(self("jobs", "--json").stdout)["jobs"]
        return dict(job["tasks"][0])

    def is_published(self) -> bool:
        return any(str(self.state) in path.read_text() for path in Path(self.machine.directory.records).glob("*jobs.*"))


@pytest.fixture
def alice(admin: Machine) -> Iterator[Home]:
    home = Home(admin)
    yield home
    home("jobs", "cancel", "1")
    until(lambda: JOB not in admin(None, "jobs", "--all").stdout)


def test_root_holds_and_cancels_what_waits_and_its_user_sees_who_did_it(alice: Home, admin: Machine) -> None:
    alice("submit", "--begin", "now+1h", "--", "true")
    until(alice.is_published)

    assert admin(None, "jobs", "hold", JOB).stdout == f"job {JOB} is held.\n"
    assert alice.task()["why"] == "held by root: gpuguard jobs unhold"
    assert admin(None, "jobs", "unhold", JOB).stdout == f"job {JOB} is not held any more.\n"
    [ended] = json.loads(admin(None, "cancel", JOB, "--json").stdout)["cancelled"]
    assert (ended["id"], ended["user"], ended["outcome"]) == (JOB, ALICE.pw_name, "ended")
    assert (alice.task()["state"], alice.task()["why"]) == ("cancelled", "cancelled by root")
    assert admin(None, "jobs", "cancel", JOB).stdout == f"job {JOB} has ended already.\n"
    assert {path.stat().st_uid for path in alice.state.rglob("*")} == {ALICE.pw_uid}


def test_root_cancels_what_runs(alice: Home, admin: Machine) -> None:
    alice("submit", "--", "sleep", "600")
    until(lambda: alice.task()["state"] == "running")

    assert admin(None, "cancel", JOB).stdout == f"job {JOB} is being ended.\n"
    ended = until(lambda: (task := alice.task())["state"] == "cancelled" and task)
    assert ended["why"] == "cancelled by root"
    assert "root" in alice("jobs", "log", "1").stdout


def test_other_users_are_refused_and_the_user_may_write_the_name_too(alice: Home, admin: Machine) -> None:
    alice("submit", "--hold", "--", "true")
    for words in (("cancel", JOB), ("jobs", "cancel", JOB), ("jobs", "hold", JOB)):
        refused = admin(BOB, *words)

        assert refused.returncode and f"only {ALICE.pw_name} and root can do that" in refused.stderr
    assert alice.task()["state"] == "waiting"
    assert alice("cancel", JOB).stdout == "job 1 is cancelled.\n"
    assert alice.task()["why"] is None


def test_root_reaches_nothing_of_its_own_through_what_a_user_has_written(admin: Machine) -> None:
    own = JobStore(str(admin.place / "jobs-of-root"))
    own.add(new_record(("true",), "{}", Source(dir=str(admin.claims))), {})
    planted = Path(admin.directory.records) / f"jobs.{ALICE.pw_uid}.0"
    waiting = {"id": 1, "tasks": 1, "gpus": 1, "submitted": 1.0, "what": "true"}
    planted.write_text(json.dumps({"jobs": [waiting], "place": own.place}))
    os.chown(planted, ALICE.pw_uid, ALICE.pw_gid)

    refused = admin(None, "jobs", "cancel", JOB)
    assert refused.returncode and "Permission denied" in refused.stderr
    assert own.read(1).events == ()


@pytest.mark.parametrize("stops", [False, True], ids=["a file that never answers", "stopped by its user"])
def test_a_record_that_never_answers_keeps_root_waiting_for_a_limited_time(
    directory: LockDirectory, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr(owners, "ANSWER_SECONDS", 0.2)
    held, asked = os.pipe()

    def act(store: JobStore, word: str, by: str | None) -> None:
        os.write(asked, b"%d" % os.getpid())
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()

    with pytest.raises(GpuguardError, match=f"{ALICE.pw_name} did not come back within 200ms"):
        owners.JobWord(ALICE.pw_uid, "1").do(act, directory)
    _pid, status = os.waitpid(int(os.read(held, 20)), 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    os.close(held)
    os.close(asked)


def test_what_alice_has_written_is_no_fault_of_the_process_that_acts_as_her(directory: LockDirectory) -> None:
    def act(store: JobStore, word: str, by: str | None) -> None:
        raise ValueError("an embedded null byte")

    with pytest.raises(GpuguardError, match="null byte"):
        owners.JobWord(ALICE.pw_uid, "1").do(act, directory)


def test_a_user_without_a_home_has_no_jobs_and_one_that_does_not_exist_is_named(admin: Machine) -> None:
    done = {word: admin(None, "jobs", "cancel", word).stderr for word in (JOB, "nosuchuser/1", "54321/1")}

    assert "there is no job 1" in done[JOB]
    assert "there is no user nosuchuser" in done["nosuchuser/1"]
    assert "there is no user 54321" in done["54321/1"]
