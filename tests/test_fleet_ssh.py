"""A fleet over the real ssh and a real sshd on loopback: 25 hosts of which 5 are dead, an account that is locked down.

Where sshd is missing these tests are skipped: apt-get install openssh-server.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import REFUSED
from nodes import GIB, Gpuguard, a_user
from sshd import DEAD, Fleet, a_fleet, program

from gpuguard.backends import simulated


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with a_fleet(tmp_path_factory.mktemp("fleet"), 20) as fleet:
        yield fleet


@pytest.fixture
def gpuguard(tmp_path: Path, fleet: Fleet) -> Gpuguard:
    return Gpuguard(tmp_path, None, GPUGUARD_SSH=fleet.ssh)


def ssh(fleet: Fleet, host: str, command: str) -> subprocess.CompletedProcess[str]:
    words = [*fleet.ssh.split(), host, *([command] if command else [])]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False)


def test_of_25_hosts_five_dead_ones_are_named_and_the_others_right_within_one_timeout(fleet, gpuguard):
    hosts = [*DEAD[:3], *fleet.hosts, *DEAD[3:]]
    # How fast logins are is a matter of this machine, which is all hosts; one that hangs costs the time-out on any.
    began = time.monotonic()
    gpuguard("who", "--json", "--timeout", "50s", "--hosts", ",".join(fleet.hosts[:4]))
    timeout = max(6, round(2 * 5 * (time.monotonic() - began)))
    done = gpuguard("who", "--json", "--timeout", f"{timeout}s", "--hosts", ",".join(hosts))
    content = json.loads(done.stdout)
    found = {host["host"]: host for host in content["hosts"]}

    assert done.returncode == 1
    assert (content["asked"], content["answered"], list(found)) == (25, 20, hosts)
    assert {host for host in found if found[host]["error"]} == set(DEAD)
    for host in fleet.hosts:
        there = simulated.open(fleet.node(host)).sample({"model"}).devices
        assert [device["uuid"] for device in found[host]["answer"]["devices"]] == [device.uuid for device in there]
    for host, word in {"refused": "Connection refused", "nowhere": "Could not resolve", "stranger": "denied"}.items():
        assert word in found[host]["error"]
    assert "no answer within" in found["hanging"]["error"]


def test_what_a_host_shows_is_what_happens_there(fleet, gpuguard):
    with a_user(fleet.node("sim01"), "1", 10 * GIB):
        text = gpuguard("who", "--hosts", "sim00,sim01,refused", "--timeout", "50s").stdout
        room = gpuguard("select", "-n", "2", "--hosts", "sim01,sim00,sim02", "--timeout", "50s")
        full = gpuguard("select", "-n", "9", "--hosts", "sim01,sim00", "--timeout", "50s")
        screen = gpuguard("top", "--once", "--hosts", "sim00,sim01", "--timeout", "50s").stdout

    assert "sim01: 2 GPUs: 1 free, 1 used without a claim" in text
    assert "2 of 3 hosts answered; not these:\n  refused  ssh: connect to host 127.0.0.1" in text
    assert (room.returncode, room.stdout[:6], room.stdout.count("\n"), room.stderr) == (0, "sim02 ", 1, "")
    assert (full.returncode, full.stdout) == (1, "")
    assert "gpuguard: sim00: wanted 9 GPUs, but only 1 exists." in full.stderr
    assert "2 hosts, 3 GPUs: 2 free, 1 used without a claim" in screen


@pytest.mark.parametrize("command", ["", "sh", "gpuguard run -- touch owned", "who; touch owned", "who --watch"])
def test_a_locked_down_account_refuses_in_json_whatever_is_no_view(fleet, command):
    done = ssh(fleet, "sim00", command)

    assert done.returncode == 1
    refusal = json.loads(done.stdout)
    assert refusal["refused"] == command[:200] and REFUSED[command] in refusal["reason"]
    assert refusal["answered"] == ["who", "queue", "select", "explain"]
    assert not list(fleet.place.rglob("owned"))


@pytest.mark.parametrize("command", ["/x/gpuguard who --json", "queue", "explain -n 1", "select --model 'H100*'"])
def test_a_locked_down_account_answers_views_in_json(fleet, command):
    done = ssh(fleet, "sim03", command)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1


def test_an_ordinary_account_needs_no_forced_command(fleet, gpuguard):
    python = " ".join(gpuguard.words())
    done = gpuguard("who", "--json", "--hosts", "shell", "--remote", python, "--timeout", "50s")
    missing = gpuguard("who", "--hosts", "shell", "--remote", "/no/gpuguard", "--timeout", "50s")

    assert len(json.loads(done.stdout)["hosts"][0]["answer"]["devices"]) == 20 % 8 + 1
    assert missing.returncode == 4
    assert "gpuguard is not on the PATH there" in missing.stdout


def test_what_a_configuration_runs_for_people_who_work_there_is_not_run_for_a_question(fleet, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        f"Host sim00\nPermitLocalCommand yes\nLocalCommand touch {tmp_path}/local\nRemoteCommand tmux attach\n"
        f"Host *\nInclude {fleet.config}\n"
    )
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_SSH=f"{program('ssh')} -F {config}")
    done = gpuguard("who", "--hosts", "sim00", "--timeout", "50s")

    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "local").exists()
