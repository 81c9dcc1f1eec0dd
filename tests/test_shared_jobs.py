"""Jobs that share a device: `gpuguard run --share --memory` on a simulated node with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from nodes import GIB, Gpuguard, start, until
from users import ALICE, BOB, Machine, a_shared_machine


class Node:
    """One device, and jobs that use a part of it."""

    def __init__(self, place: Path) -> None:
        self.place = str(place / "node")
        start(self.place, "1xH100-80GB")
        self.gpuguard = Gpuguard(place, None, fast=True)

    @contextmanager
    def job(self, share: int, uses: int, *options: str, utilization: str = "10%") -> Iterator[subprocess.Popen[str]]:
        """A job with a *share* of so many GiB that *uses* some, once it does; killed at the end with what is its."""
        use = [sys.executable, "-m", "gpuguard", "sim", "use", "--memory", f"{uses}GiB", "--utilization", utilization]
        words = ("run", "--no-wait", "--share", "--memory", f"{share}GiB", *options, "--")
        wrapper = self.gpuguard.start(*words, *use, start_new_session=True)
        try:
            line = wrapper.stdout.readline()
            assert "SIMULATED: pid" in line, wrapper.stderr.read()
            yield wrapper
        finally:
            with suppress(ProcessLookupError):
                os.killpg(wrapper.pid, signal.SIGKILL)
            wrapper.wait()
            wrapper.stdout.close()
            wrapper.stderr.close()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_job_over_its_share_is_warned_once_and_lives_on_as_do_its_neighbours(node: Node) -> None:
    with node.job(10, 10) as neighbour, node.job(5, 6) as greedy:
        until(lambda: node.gpuguard.events("share"))
        time.sleep(1.0)  # five more looks: nothing else to wait for shows that nothing follows

        why = "the job uses 6.0GiB of GPU 0, 5.0GiB is allowed (--memory): its neighbours can run out of memory."
        assert [event["message"] for event in node.gpuguard.events("share")] == [
            f"{why}  --memory-limit ends such a job."
        ]
        assert (neighbour.poll(), greedy.poll()) == (None, None)


def test_a_job_whose_limit_is_its_share_is_ended_and_its_neighbours_live(node: Node) -> None:
    with node.job(10, 10) as neighbour, node.job(5, 6, "--memory-limit", "share") as greedy:
        assert greedy.wait(60) == 128 + signal.SIGTERM
        assert greedy.stderr and "5GiB is allowed (--memory-limit): SIGTERM to the job" in greedy.stderr.read()
        assert neighbour.poll() is None


def test_a_shared_job_ends_at_once_although_a_neighbour_leaves_its_memory_behind(node: Node) -> None:
    assert node.gpuguard("sim", "set", "--release-delay", "400s").returncode == 0
    with node.job(10, 10) as first:
        with node.job(10, 10):
            pass
        os.kill(first.pid, signal.SIGTERM)
        first.wait(60)


def test_the_share_of_a_killed_wrapper_lasts_as_long_as_its_job(node: Node) -> None:
    with node.job(60, 10) as wrapper:
        job = job_of(wrapper.pid)
        wrapper.kill()
        wrapper.wait()
        refused = node.gpuguard("run", "--no-wait", "--share", "--memory", "30GiB", "--", "true")
        fits = node.gpuguard("run", "--no-wait", "--share", "--memory", "5GiB", "--", "true")
        os.kill(job, signal.SIGKILL)
        alone = until(lambda: node.gpuguard("run", "--no-wait", "--", "true").returncode == 0)

    assert (refused.returncode, fits.returncode, alone) == (75, 0, True)
    assert re.search(r"only 19\.\dGiB left beside \w+ \(60\.0GiB\)", refused.stderr)


def test_the_example_of_the_docs_shares_a_gpu_that_works_hard_and_a_bound_says_what_keeps_it_out(node: Node) -> None:
    share = ("--share", "--memory", "10GiB")
    with node.job(10, 8, utilization="90%"):
        until(lambda: node.gpuguard.json("who")["devices"][0]["utilization_percent"] == 90)
        joined = node.gpuguard("run", *share, "--", "true")
        waits = node.gpuguard.start("run", *share, "--max-util", "50%", "--", "true", stderr=subprocess.DEVNULL)
        queued = until(lambda: "start unknown" in (text := node.gpuguard("queue").stdout) and text)
        waits.terminate()
        waits.communicate()

    assert joined.returncode == 0 and "GPU 0 is 90% busy" in joined.stderr
    assert "start unknown: GPU 0: utilization is 90%, more than 50% (--max-util)" in queued


def test_who_explain_and_select_show_shares_and_what_is_left(node: Node) -> None:
    with node.job(10, 4), node.job(20, 4):
        seen = node.gpuguard("who").stdout
        (device,) = json.loads(node.gpuguard("who", "--json").stdout)["devices"]
        explained = node.gpuguard("explain", "--share", "--memory", "10GiB").stdout
        facts = json.loads(node.gpuguard("explain", "--share", "--memory", "10GiB", "--slots", "4", "--json").stdout)
        selected = node.gpuguard("select", "--share", "--memory", "10GiB").stdout
        refused = node.gpuguard("select", "--share", "--memory", "55GiB")

    assert re.search(r"in use, shared: 49\.\dGiB and 6 slots left", seen)
    assert seen.count("its share") == 2
    assert sorted(claim["memory_bytes"] for claim in device["claims"]) == [10 * GIB, 20 * GIB]
    assert device["slots_left"] == 6
    assert 49 * GIB < device["share_left_bytes"] < 50 * GIB
    assert re.search(r"shared by \w+ \(\d0\.0GiB\) and \w+ \(\d0\.0GiB\): 49\.\dGiB and 6 slots left", explained)
    assert (facts["devices"][0]["slots_left"], len(facts["devices"][0]["shared_by"])) == (2, 2)
    assert (selected, refused.returncode) == ("0\n", 1)
    assert "only 49." in refused.stderr


def test_the_summary_tells_what_the_job_used_and_not_what_its_neighbours_did(node: Node) -> None:
    with node.job(10, 10, utilization="40%"), node.job(10, 3) as second:
        time.sleep(1.0)
        os.kill(second.pid, signal.SIGTERM)
        second.wait(60)
    facts = node.gpuguard.events("release")[0]["facts"]

    assert (facts["peak_memory_bytes"], facts.get("mean_utilization_percent")) == (3 * GIB, None)


def job_of(wrapper: int) -> int:
    """The child that is the job: the other one reads the devices."""
    children = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
    (job,) = (pid for pid in children if b"sim\0use" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(job)


@pytest.fixture(params=("admin", "sticky"))
def machine(request: pytest.FixtureRequest, site: Path) -> Iterator[Machine]:
    with a_shared_machine(site, request.param, 1) as made:
        yield made


SHARE = ("--share", "--memory", "30GiB")


@pytest.mark.root
def test_two_users_share_a_device_which_neither_gets_alone(machine: Machine) -> None:
    with machine.job(ALICE, *SHARE), machine.job(BOB, *SHARE) as (_, theirs):
        alone = machine(BOB, "run", "--no-wait", "--", "true")
        third = machine(ALICE, "run", "--no-wait", *SHARE, "--", "true")
        seen = json.loads(machine(BOB, "who", "--json").stdout)["devices"][0]
    afterwards = machine(BOB, "run", "--no-wait", "--", "true")

    assert (theirs, alone.returncode, third.returncode, afterwards.returncode) == ("0", 75, 75, 0)
    assert "shared by " in alone.stderr
    assert re.search(r"only 1\d\.\dGiB left", third.stderr)
    assert {claim["user"] for claim in seen["claims"]} == {ALICE.pw_name, BOB.pw_name}
