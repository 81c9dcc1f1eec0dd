"""`gpuguard sim`: a simulated node as a user makes, steers and breaks it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from users import ALICE, BOB, SharedMachine, interpreter

from gpuguard import procfs
from gpuguard.backends import simulated
from gpuguard.model import HEALTH, MEMORY, POWER, PROCESSES, THERMAL, UTILIZATION


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUGUARD_SIM_DIR", str(tmp_path / "node"))
    return str(tmp_path / "node")


@pytest.fixture
def sim(command):
    return lambda *words: command("sim", *words)


@pytest.fixture
def a_node(place, sim):
    assert sim("start", "4xRTX4090")[0] == 0
    return place


@pytest.fixture
def devices(sim):
    """What `gpuguard sim show` says of the devices."""
    return lambda: json.loads(sim("show", "--json")[1])["devices"]


def using(*words: str, **options) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "gpuguard", "sim", "use"]
    return subprocess.Popen([*program, *words], stdout=subprocess.PIPE, text=True, **options)


def test_start_says_what_there_is_where_it_is_and_what_to_try(place, sim):
    status, said, _ = sim("start", "2xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")

    assert status == 0 and said.startswith("SIMULATED node of 3 GPUs") and place in said
    assert "Try: gpuguard run --backend simulated -n 1 -- gpuguard sim use" in said


def test_start_names_a_node_elsewhere_as_the_other_commands_must_which_steers_it(tmp_path, sim, devices, monkeypatch):
    elsewhere = f"simulated:{tmp_path}/a node"

    assert f"Try: gpuguard run --backend '{elsewhere}' -n 1 -- " in sim("start", "2xT4", "--backend", elsewhere)[1]
    monkeypatch.setenv("GPUGUARD_BACKEND", elsewhere)
    assert len(devices()) == 2


def test_a_running_node_is_replaced_only_with_force(a_node, sim, devices):
    status, _, complaint = sim("start", "2xT4")

    assert status == 1 and "`gpuguard sim stop` ends it, --force" in complaint
    assert sim("start", "2xT4", "--force")[0] == 0
    assert len(devices()) == 2


def test_start_of_the_node_that_runs_already_says_so_and_leaves_it_as_it_is(a_node, sim, devices):
    assert sim("fault", "--device", "1", "lost")[0] == 0
    status, said, complaint = sim("start", "4xRTX4090-24GB")

    assert (status, complaint) == (0, "")
    assert said.startswith(f"SIMULATED node of 4 GPUs (4xRTX4090) runs in {a_node} already\nTry: gpuguard run ")
    assert devices()[1]["faults"] == ["lost"]


@pytest.mark.parametrize("look", [("who", "--backend", "simulated"), ("doctor", "--backend", "simulated")], ids=str)
def test_the_commands_of_the_readme_may_come_in_any_order(command, look, sim, devices):
    command(*look)

    assert sim("start", "8xH100-80GB")[0] == 0
    assert command(*look)[0] == 0
    assert len(devices()) == 8


def test_the_node_of_another_user_is_not_stopped_and_that_is_said(a_node, sim, monkeypatch):
    def refuse(path):
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "unlink", refuse)
    status, said, complaint = sim("stop")

    assert (status, said) == (4, "")
    assert complaint.startswith("gpuguard: the simulated node cannot be changed: ") and "not permitted" in complaint


def test_a_damaged_node_is_replaced_with_force_and_removed_by_stop(a_node, sim):
    file = Path(a_node, "node.json")
    file.write_text("{")
    assert [sim(*words)[0] for words in (("show",), ("start", "2xT4", "--force"))] == [4, 0]
    file.write_text("{")

    assert sim("stop")[0] == 0
    assert sim("stop") == (0, f"No simulated node was in {a_node}.\n", "")


def test_use_holds_memory_until_it_is_ended_and_show_lists_it(a_node, devices):
    with using("--device", "0,1", "--memory", "10GiB", "--utilization", "90%") as child:
        assert child.stdout.readline().startswith(f"SIMULATED: pid {child.pid} uses 10.0GiB on 2 GPUs")
        busy, _, idle, _ = devices()
        child.terminate()

    assert [process["pid"] for process in busy["processes"]] == [child.pid]
    assert (busy["utilization_percent"], idle["utilization_percent"]) == (90.0, 0)
    assert devices()[0]["processes"] == []


def test_use_for_a_while_ends_by_itself(a_node, sim):
    assert sim("use", "--device", "0", "--memory", "1GiB", "--for", "10ms")[0] == 0


def test_set_moves_a_temperature_along_the_clock(a_node, sim):
    assert sim("set", "--device", "3", "--temperature", "40C..95C", "--over", "100ms")[0] == 0
    backend = simulated.open()
    deadline, seen = time.monotonic() + 60, [40.0]
    while seen[-1] != 95.0 and time.monotonic() < deadline:
        seen.append(backend.sample({THERMAL}).devices[3].temperature)

    assert seen[-1] == 95.0 and seen == sorted(seen)
    assert sim("set", "--device", "3", "--temperature", "auto")[0] == 0
    assert backend.sample({THERMAL}).devices[3].temperature == 34.0


def test_set_sets_everything_else_too(a_node, sim, devices):
    words = "set --device 1 --utilization 50% --memory 3GiB --latency 1ms --compute-mode prohibited --release-delay 3s"
    assert sim(*words.split())[0] == 0
    device: Any = simulated.open().sample({MEMORY, UTILIZATION, HEALTH, POWER, PROCESSES}).devices[1]

    assert (device.utilization, device.compute_mode, device.processes) == (50.0, "prohibited", ())
    assert device.memory_used > 3 * 2**30 and device.power_draw > 200
    assert [shown["latency_seconds"] for shown in devices()] == [0.0, 0.001, 0.0, 0.0]


def test_a_gpu_is_put_to_sleep_and_woken(a_node, sim, devices):
    assert sim("set", "--device", "1,2", "--asleep")[0] == 0
    assert [device["asleep"] for device in devices()] == [False, True, True, False]
    assert sim("show")[1].count("asleep") == 2

    assert sim("set", "--device", "1", "--no-asleep")[0] == 0
    assert [device["asleep"] for device in devices()] == [False, False, True, False]


def test_faults_come_on_top_of_each_other_and_go_together(a_node, sim, devices):
    assert sim("fault", "--device", "1,2", "unlisted")[0] == 0
    assert sim("fault", "--device", "1", "na:power_draw", "hang")[0] == 0
    assert [device["faults"] for device in devices()] == [[], ["unlisted", "hang", "na:power_draw"], ["unlisted"], []]

    assert sim("fault", "--device", "all", "none")[0] == 0
    assert [device["faults"] for device in devices()] == [[]] * 4


def test_a_mig_instance_cannot_be_broken_alone(sim, devices):
    sim("start", "1xA100-40GB:mig=3g.20gb")
    status, _, complaint = sim("fault", "--device", devices()[0]["instances"][0]["uuid"], "lost")

    assert status == 2 and "the GPU that it belongs to" in complaint


class SharedNode(SharedMachine):
    """A node of 2 GPUs that root has started for all users."""

    def __init__(self, place: Path, site: Path) -> None:
        self.place, self.python_path = place, interpreter()
        self.environment = {
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": f"{place}/home",
            "PYTHONPATH": str(site),
        }
        self.environment["GPUGUARD_BACKEND"] = f"simulated:{place}/node"
        started = self(None, "sim", "start", "--shared", "2xRTX4090", umask=0o077)
        assert f"export GPUGUARD_BACKEND=simulated:{place}/node" in started.stdout, started.stderr

    def working(self, user, *options: str):
        """A job of *user* that computes on what it has claimed."""
        use = (*self.words("sim", "use", "--memory", "5GiB", "--utilization", "90%"), "--", "sh", "-c")
        return self.job(user, *options, command=(*use, 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 100'))

    def devices(self, user) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = json.loads(self(user, "who", "--json").stdout)["devices"]
        return devices


@pytest.fixture
def shared(open_place: Path, site: Path) -> SharedNode:
    return SharedNode(open_place, site)


@pytest.mark.root
def test_users_of_a_shared_node_see_use_and_claim_the_same_devices(shared):
    with shared.working(ALICE) as (_, hers), shared.working(BOB) as (_, his):
        seen = [shared.devices(user) for user in (ALICE, BOB, None)]
        refused = shared(BOB, "run", "--no-wait", "--", "true")

        assert {hers, his} == {"0", "1"}
        assert refused.returncode == 75 and f"claimed by {ALICE.pw_name}" in refused.stderr
        for devices in seen:
            on = {process["user"]: device["index"] for device in devices for process in device["processes"]}
            assert on == {ALICE.pw_name: int(hers), BOB.pw_name: int(his)}

    assert [[device["processes"] for device in shared.devices(user)] for user in (ALICE, None)] == [[[], []]] * 2
    assert os.listdir(shared.place / "node" / "uses") == []  # root's look has removed those of the dead


@pytest.mark.root
def test_only_root_steers_a_shared_node_and_only_root_makes_one(shared):
    steered = shared(ALICE, "sim", "fault", "--device", "0", "lost")
    own = shared(ALICE, "sim", "start", "--shared", "2xT4", "--backend", f"simulated:{shared.place}/hers")

    assert (steered.returncode, own.returncode) == (4, 1)
    assert "root steers it" in steered.stderr and "only root can share" in own.stderr
    assert shared(None, "sim", "fault", "--device", "0", "lost").returncode == 0
    assert shared.devices(BOB)[0]["problems"] == ["lost"]


FORGED = """
import json, os, sys
use = {"device": sys.argv[1], "pid": int(sys.argv[2]), "start_time": float(sys.argv[3]), "utilization": 0.0,
       "memory": {"start": 2**30, "end": 2**30}, "uid": int(sys.argv[4])}
place = sys.argv[5]
for number, content in enumerate([json.dumps(use), json.dumps({**use, "pid": os.getpid(), "memory": {"start": -1e12,
                                  "end": -1e12}}), "{", "[" * 4000, json.dumps({**use, "kind": "x"})]):
    with open(f"{place}/{number}.json", "w") as file:
        file.write(content)
os.symlink("/etc/passwd", f"{place}/link.json")
os.mkfifo(f"{place}/pipe.json")
"""


@pytest.mark.root
def test_no_user_can_put_the_process_of_another_on_a_device_of_a_shared_node(shared):
    with shared.working(ALICE, "--devices", "0"):
        [process] = shared.devices(None)[0]["processes"]
        free = shared.devices(None)[1]
        facts = (str(process["pid"]), str(procfs.start_time(process["pid"])), str(ALICE.pw_uid))
        shared.python(BOB, FORGED, free["uuid"], *facts, f"{shared.place}/node/uses")

        for user in (ALICE, None):
            first, second = shared.devices(user)
            assert [seen["pid"] for seen in first["processes"]] == [process["pid"]]
            assert second["processes"] == [] and second["memory_used_bytes"] == free["memory_used_bytes"]


@pytest.mark.root
def test_a_node_of_ones_own_takes_no_claims_in_the_directory_of_all_users(shared):
    assert shared(None, "setup", "--dir", f"{shared.place}/claims").returncode == 0
    own = {"GPUGUARD_BACKEND": f"simulated:{shared.place}/hers", "GPUGUARD_DIR": f"{shared.place}/claims"}
    (shared.place / "hers").mkdir()
    os.chown(shared.place / "hers", ALICE.pw_uid, ALICE.pw_gid)
    refused = shared(ALICE, "run", "--", "true", environment=own)

    assert refused.returncode == 125
    assert "yours alone" in refused.stderr and "gpuguard sim start --shared" in refused.stderr
    assert shared(ALICE, "run", "--", "true", environment=own | {"GPUGUARD_DIR": ""}).returncode == 0
