"""gpuguard release: from another terminal, politely, and never under somebody who computes."""

from __future__ import annotations

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
from claimholders import a_holder
from nodes import GIB, Gpuguard, a_user, change, eventually, start

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices, read_records

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
        run = self.gpuguard.start("run", "--no-wait", *options, "--", *command, start_new_session=True)
        try:
            assert eventually(lambda: bool(set(self.claims()) - before), 20)
            assert eventually(lambda: listening(run.pid), 20)
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
        assert done.stdout.startswith(f"released: the claim {name}, 3 devices of")
        assert "by the gpuguard run of its job" in done.stdout
        assert run.poll() is None
        assert run.stderr
        told = run.stderr.readline()
        assert "released by" in told and "somebody waits" in told and "The job goes on" in told
        assert site.claims() == []
        run.send_signal(signal.SIGTERM)  # the job may end as it likes
        assert (run.wait(20), site.free()) == (128 + signal.SIGTERM, 4)
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
def test_stop_ends_the_job_by_its_own_ladder_first(site, trap):
    job = ("sh", "-c", f"{trap} echo ready; while :; do sleep 0.1; done")
    with site.job("-n", "2", "--time-limit", "1h", "--grace", "1s", command=job) as run:
        assert run.stdout and run.stdout.readline() == "ready\n"
        [name] = site.claims()
        with a_user(site.node, str(site.uuids.index(read_records(site.directory)[0].devices[0])), GIB) as child:
            asked = site.gpuguard.start("release", name, "--stop", "--reason", "maintenance")
            status = run.wait(30)
            child.kill()
            child.wait()
            said, error = asked.communicate(timeout=60)

        assert (asked.returncode, status) == (0, 128 + (signal.SIGKILL if trap else signal.SIGTERM)), error
        assert "its job was ended" in said and site.free() == 4
        told = run.stderr.read() if run.stderr else ""
        assert "to be released by" in told and "maintenance" in told and ("SIGKILL" in told) == bool(trap)


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

        assert several.returncode == 1 and "1deaaaaa" in several.stderr and "2 claims" in several.stderr
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


def test_a_wish_that_a_run_does_not_answer_is_carried_out_from_here(site):
    with site.job("-n", "2", command=("sh", "-c", "sleep 100")) as run:
        os.kill(run.pid, signal.SIGSTOP)
        try:
            done = site.gpuguard("release", site.claims()[0])
            assert (done.returncode, site.free()) == (0, 4), done.stderr
        finally:
            os.kill(run.pid, signal.SIGCONT)
        assert run.stderr and "released by" in run.stderr.readline()
        assert site.free() == 4  # it was asked meanwhile, and takes nothing again
