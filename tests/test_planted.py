"""Files that another user puts where those of this one are looked for: in directories that many can write."""

import fcntl
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import FakeNvml
from nodes import SECONDS, Gpuguard

import gpuguard as api
from gpuguard.claims.claim import Claim, JobDetails
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import read_record, read_records, record_path, write_record
from gpuguard.cli.submit.engine_command import python_words
from gpuguard.clusters.slurm_jobs import Allocation
from gpuguard.jobs import slurm_claim
from gpuguard.queue import reservations, tickets
from gpuguard.queue.calendar import Reservation

ALICE, MALLORY = 20001, 20002
JOB = Allocation("7", ALICE, ("0",))


@pytest.fixture
def directory(open_place: Path) -> LockDirectory:
    return lock_directory(f"{open_place}/claims")


def a_locked_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


PLANTS: dict[str, Callable[[Path], object]] = {
    "a record": a_locked_file,
    "a directory": lambda path: (path / "full").mkdir(parents=True),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.root
@pytest.mark.parametrize("plant", PLANTS)
def test_nobody_keeps_the_claim_of_a_slurm_job_from_being_made_or_taken_back(directory, plant):
    """The number of a job is no secret.  Slurm puts a job back whose prolog fails, and drains a node for its epilog."""
    path = Path(record_path(directory, ALICE, JOB.claim))
    planted = PLANTS[plant](path)
    os.chown(path, MALLORY, MALLORY, follow_symlinks=False)
    assert slurm_claim.claim_of_job(directory, JOB) is None
    assert slurm_claim.end_claim(directory, JOB) is None

    claim = Claim(JOB.claim, (), ())
    claim.write_record(directory, JobDetails("Slurm job 7"), owner=ALICE)
    found = slurm_claim.claim_of_job(directory, JOB)
    assert found is not None and (found.uid, found.note, claim.warning) == (ALICE, "Slurm job 7", None)
    claim.release()
    assert slurm_claim.claim_of_job(directory, JOB) is None
    if isinstance(planted, int):
        os.close(planted)


@pytest.mark.root
def test_a_record_at_the_place_of_another_users_is_nobodys(directory):
    path, descriptor = write_record(directory, {"id": "c0ffee", "devices": ["GPU-a"]}, ALICE)
    assert [claim.uid for claim in read_records(directory)] == [ALICE]
    os.chown(path, MALLORY, MALLORY)

    assert read_records(directory) == [] and read_record(directory, ALICE, "c0ffee") is None
    os.close(descriptor)


def test_nobody_learns_the_name_of_a_file_before_it_is_there(directory, monkeypatch):
    """Who knows it can make one of that name first, and then the request fails."""
    before, real = [], os.rename

    def rename(old: str, new: str) -> None:
        number = os.path.basename(new).removesuffix(".json").rpartition(".")[2]
        before.append(
            (os.path.basename(new).split(".")[0], [name for name in os.listdir(directory.records) if number in name])
        )
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    Claim("c0ffee", (), ()).write_record(directory)
    tickets.OwnTicket(directory, {"requests": [{}]}).withdraw()
    reservations.write_reservation(directory, Reservation("", 0, os.geteuid(), "", 1, 1.0, 2.0, ("GPU-a",)))

    assert dict(before[:2]) == {"claim": [], "bell": []}
    assert before[3] == ("reserve", [])


@pytest.mark.root
def test_nobody_keeps_another_user_from_being_seen_to_come_to_a_reservation(directory):
    """The file that says so had a name that everybody knows: made by another user first, it counted them as absent."""
    made = reservations.write_reservation(directory, Reservation("", 0, 0, "", 1, 1.0, 2.0**33, ("GPU-a",)))
    planted = f"{directory.records}/arrived.0.{made.key}"
    Path(planted).touch()
    os.chown(planted, MALLORY, MALLORY)

    [noted] = reservations.record_arrival(directory, [made])
    *_, arrivals = reservations.read_reservations(directory, 2.0**32)
    assert os.stat(noted).st_uid == 0 and noted != planted
    assert arrivals == {made.key: pytest.approx(os.stat(noted).st_ctime)}


@pytest.mark.parametrize("kind", ["claim", "ticket", "reserve", "arrived"])
def test_a_user_whose_lease_lets_nobody_open_a_file_ends_no_look_of_others(directory, kind):
    former = signal.signal(signal.SIGIO, lambda *_: None)  # by it the kernel asks for the lease back
    leased = a_locked_file(Path(f"{directory.records}/{kind}.{os.geteuid()}.abc.json"))
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    ignored = [*tickets.read_tickets(directory)[1], *reservations.read_reservations(directory, 0.0)[1]]

    assert read_records(directory) == []
    assert ["has a lease on it" in one.reason for one in ignored] == [True] * (kind in ("ticket", "reserve"))
    os.close(leased)
    signal.signal(signal.SIGIO, former)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with modules that leave their name in a file `seen`."""
    place = tmp_path / "planted"
    place.mkdir()
    for name in ("gpuguard", "yaml", "runpy"):
        (place / f"{name}.py").write_text(f"open({str(place / 'seen')!r}, 'a').write('{name} ')\n")
    return place


def the_job_of(gpuguard: Gpuguard, engine: str) -> str:
    """What the shell of the node runs for `gpuguard submit -- echo done`."""
    done = gpuguard("submit", "--via", engine, "--print", "-n", "1", "--", "echo", "done")
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)[-1].removeprefix("--wrap=")


def run_job(gpuguard: Gpuguard, job: str, place: Path) -> subprocess.CompletedProcess[str]:
    """The job, started by the shell in the directory *place*."""
    return subprocess.run(
        job,
        shell=True,
        cwd=place,
        env={**gpuguard.environment, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.parametrize("engine", ["slurm", "ray"])
def test_a_job_that_is_submitted_runs_no_module_that_lies_where_it_starts(engine, planted, tmp_path, fake: FakeNvml):
    gpuguard = Gpuguard(tmp_path, fake)
    job = the_job_of(gpuguard, engine)

    done = run_job(gpuguard, job, planted)

    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stderr
    assert not (planted / "seen").exists()


@pytest.mark.parametrize("module", ["gpuguard", "yaml"])
def test_without_that_care_the_planted_module_would_run(module, planted, tmp_path, fake: FakeNvml):
    """The test above could fail: with `python -m gpuguard` the same module runs as the user who submits."""
    for other in {"gpuguard", "yaml", "runpy"} - {module}:
        (planted / f"{other}.py").unlink()
    policy = tmp_path / "policy.yaml"
    policy.write_text("version: 1\n")
    program = [*python_words("gpuguard"), "policy", "check", str(policy)]
    gpuguard = Gpuguard(tmp_path, fake)

    run_job(gpuguard, shlex.join(program), planted)
    assert not (planted / "seen").exists()

    careless = [program[0], "-m", *program[3:]]
    run_job(gpuguard, shlex.join(careless), planted)
    assert (planted / "seen").read_text() == f"{module} "


def test_a_package_that_the_user_names_in_pythonpath_is_still_found(planted, tmp_path, fake: FakeNvml):
    """gpuguard may be installed for one user only, as on a cluster whose nodes share a home directory."""
    gpuguard = Gpuguard(tmp_path, fake, PYTHONPATH=str(planted))

    run_job(gpuguard, shlex.join([*python_words("gpuguard"), "--version"]), tmp_path)

    assert (planted / "seen").exists()


LOOKS = (
    "who", "top --once", "queue", "select", "explain", "doctor", "metrics", "release", "keep --list", "deny",
    "quarantine", "reserve",
)  # fmt: skip
ENDS_NOTHING = ("quarantine 0 --end", "deny nobody --end")


@pytest.mark.parametrize("command", (*LOOKS, *ENDS_NOTHING))
def test_a_command_that_looks_makes_no_directory_and_says_once_that_it_is_missing(tmp_path: Path, command: str) -> None:
    typo = tmp_path / "typo"

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(typo))(*command.split())

    assert done.stderr == f"gpuguard: nothing is claimed in {typo} (GPUGUARD_DIR): it does not exist yet.\n"
    assert done.returncode == 1 if command in ENDS_NOTHING else done.stdout
    assert not typo.exists()


@pytest.mark.parametrize("command", ["select", "explain", "release 7"])
def test_a_claim_that_the_environment_names_is_none_where_there_is_no_directory(tmp_path: Path, command: str) -> None:
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(tmp_path / "typo"), GPUGUARD_CLAIM="7", GPUGUARD_GPUS="GPU-1")

    assert "inside gpuguard" not in gpuguard(*command.split()).stderr


@pytest.mark.root
def test_after_a_boot_slurm_ends_a_job_whose_claims_nobody_has_made_a_directory_for(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1", "SLURM_JOB_GPUS": ""}

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(tmp_path / "typo"), **job)("slurm", "epilog")

    assert (done.returncode, (tmp_path / "typo").exists()) == (0, False)


def test_a_look_leaves_a_directory_of_ones_own_that_is_for_something_else_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()

    done = Gpuguard(tmp_path, None, GPUGUARD_DIR=str(home))("who")

    assert "(GPUGUARD_DIR): no claim was ever made there" in done.stderr
    assert os.listdir(home) == []


def test_a_program_that_looks_makes_none_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    where = {"backend": "simulated", "directory": str(tmp_path / "typo")}

    assert api.who(**where).claims == ()
    assert len(api.select_devices(2, **where)) == 2
    assert not (tmp_path / "typo").exists()
