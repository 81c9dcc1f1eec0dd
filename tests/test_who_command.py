"""`gpuguard who` on a simulated node with real processes and real locks."""

import json
import os
import signal
import subprocess
import sys

import pytest
from builders import GIB, a_claim_record, a_device, a_snapshot
from nodes import a_user, change, on_terminal, start, until
from own_claims import acquire
from test_who import DOCUMENT, documented, printed

from gpuguard import device_state
from gpuguard.backends import open_backend, simulated
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import options
from gpuguard.model import Snapshot
from gpuguard.request import Request
from gpuguard.views.who import MOST_CLAIMS, to_json, to_text

GPUGUARD = [sys.executable, "-m", "gpuguard"]
# Makes a claim, starts a job that inherits it, and is killed: the job lives on.
ABANDON = """
import os, signal, subprocess, sys
from gpuguard.backends import open_backend
from gpuguard.lock import Allocator
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import options
from gpuguard.request import Request
claim = Allocator(open_backend("simulated"), lock_directory(None, backend="simulated"), [Request()]).acquire()
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
job = subprocess.Popen(sleep, pass_fds=claim.pass_fds, stdout=subprocess.DEVNULL)
print(job.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


pytestmark = pytest.mark.usefixtures("node")


def using(devices, *words, utilization=80, pass_fds=()):
    """A process that uses 10 GiB of devices of the node."""
    return a_user(simulated.directory(), devices, 10 * GIB, utilization, *words, pass_fds=pass_fds)


def a_claim(*devices, **details):
    backend = open_backend("simulated")
    request = Request(num_gpus=len(devices), devices=devices)
    return acquire(backend, request, lock_directory(None, backend="simulated"), **details)


@pytest.fixture
def who(command):
    """The object that `gpuguard who --json OPTIONS` prints."""

    def look(*options):
        status, output, _ = command("who", "--json", *options)
        assert status == 0
        return json.loads(output)

    return look


def test_every_state_of_a_device_is_told(who):
    with a_claim("0") as used, a_claim("1") as lazy, a_claim("2"), using("0", pass_fds=used.pass_fds), using("3"):  # noqa: SIM117
        with using("1", utilization=0, pass_fds=lazy.pass_fds):
            devices = who()["devices"]

    assert [device["state"] for device in devices] == ["in_use", "idle", "claimed", "unclaimed_use"]


def test_a_process_is_joined_with_its_claim_and_described():
    with (
        a_claim("0", "2", note="sweep", command=("python", "x.py")) as claim,
        using("0", pass_fds=claim.pass_fds) as job,
    ):
        # In a process of its own: the worker that `who` starts holds all that its parent holds, until it has closed it.
        done = subprocess.run([*GPUGUARD, "who", "--json"], stdout=subprocess.PIPE, check=True)
    content = json.loads(done.stdout)

    record, process = content["devices"][0]["claims"][0], content["devices"][0]["processes"][0]
    assert (record["note"], record["command"], record["pid"]) == ("sweep", ["python", "x.py"], os.getpid())
    assert sorted(record["holders"]) == sorted([os.getpid(), job.pid])
    assert (process["pid"], process["claim"], process["uid"]) == (job.pid, claim.id, os.geteuid())
    assert (process["memory_used_bytes"], process["kind"]) == (10 << 30, "compute")
    assert process["command"][-3:] == ["0", str(10 * GIB), "80"]
    assert content["users"][0]["claimed"] == 2


def test_a_child_that_closed_the_lock_still_belongs_to_the_claim_of_its_parent(who):
    with a_claim("0") as claim, using("0") as job:
        assert job.pid not in who()["devices"][0]["claims"][0]["holders"]
        assert who()["devices"][0]["processes"][0]["claim"] == claim.id


def test_a_claim_whose_wrapper_was_killed_is_orphaned_until_its_job_ends(who):
    done = subprocess.run([sys.executable, "-c", ABANDON], stdout=subprocess.PIPE)
    job = int(done.stdout)
    try:
        claims = [claim for device in who()["devices"] for claim in device["claims"]]
        assert [claim["orphaned"] for claim in claims] == [True]
    finally:
        os.kill(job, signal.SIGKILL)
    until(lambda: not any(device["claims"] for device in who()["devices"]))


def test_a_stopped_job_says_so(who):
    with a_claim("0") as claim, using("0", pass_fds=claim.pass_fds) as job:
        assert who()["devices"][0]["claims"][0]["stopped"] is False
        job.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WNOWAIT)

        assert who()["devices"][0]["claims"][0]["stopped"] is True
        assert who()["devices"][0]["processes"][0]["stopped"] is True


def test_devices_can_be_chosen_by_index_and_by_the_beginning_of_the_uuid(who):
    uuids = [device["uuid"] for device in who()["devices"]]

    assert [device["uuid"] for device in who("--device", f"3,{uuids[1][:12]}")["devices"]] == [uuids[1], uuids[3]]


def test_a_mig_instance_is_chosen_by_the_label_that_is_shown(node, who, command):
    start(node, "1xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")
    label = command("who")[1].splitlines()[4].split()[0]

    assert [device["mig_profile"] for device in who("--device", label)["devices"]] == ["3g.20gb"]
    assert len(who("--device", "1")["devices"]) == 3


def test_what_is_shown_of_one_user_is_theirs_alone(who):
    with using("0"):
        me = who()["devices"][0]["processes"][0]["user"]
        assert [device["index"] for device in who("--user", me)["devices"]] == [0]
        assert who("--user", "nobody-of-that-name")["devices"] == []


@pytest.mark.parametrize("words", [["who"], ["top", "--once"]])
def test_a_user_who_does_not_exist_is_told_from_one_who_has_nothing(command, words):
    assert command(*words, "--user", "bin")[0] == 0
    for name, message in (
        ("nobody-of-that-name", "there is no user 'nobody-of-that-name' on this machine"),
        ("0", "--user 0: write the name, root."),
    ):
        status, _, error = command(*words, "--user", name)
        assert status == 2 and message in error


def test_devices_are_shown_when_the_claims_cannot_be_read(who, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    content = who("--dir", str(tmp_path / "open"))

    assert {device["state"] for device in content["devices"]} == {"unknown"}
    assert [gap["field"] for gap in content["gaps"] if gap["device"] is None] == ["claims"]


@pytest.mark.parametrize(("fault", "state"), [("lost", "unhealthy"), ("unlisted", "free"), ("implausible", "unknown")])
def test_a_device_that_fails_does_not_hide_the_others(node, fault, state, who):
    change(node, 1, faults=(fault,))
    content = who()

    assert [device["state"] for device in content["devices"]] == ["free", state, "free", "free"]
    assert content["devices"][1]["reason"]


def test_a_piped_watch_prints_one_object_per_look_until_ctrl_c():
    command = [*GPUGUARD, "who", "--watch", "100ms", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)

        assert process.wait(60) == 0
        assert process.stderr.read() == b""
    assert looks[0]["taken_at"] < looks[1]["taken_at"] < looks[2]["taken_at"]


def watched(term: str, mark: str, number: int) -> tuple[str, int]:
    """What a watch writes on a terminal until *mark* was there twice and it gets a signal, and its status."""
    words, environment = [*GPUGUARD, "who", "--watch", "100ms"], {**os.environ, "TERM": term}
    with on_terminal(words, environment) as (process, shown_until):
        shown_until(lambda text: text.count(mark) >= 2)
        process.send_signal(number)
        return shown_until(), process.wait(60)


@pytest.mark.terminal
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_watch_on_a_terminal_gives_the_screen_back(number, status):
    output, code = watched("xterm", "\x1b[H", number)

    assert code == status
    assert output.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    assert output.endswith("\x1b[?25h\x1b[?1049l")


@pytest.mark.terminal
def test_a_watch_where_nothing_can_be_drawn_at_a_place_writes_one_look_behind_the_other():
    output, _ = watched("dumb", "STATE", signal.SIGINT)

    assert "\x1b" not in output


COMMANDS = {kind: [kind, "--json"] for kind in ("select", "explain", "doctor")} | {"sim": ["sim", "show", "--json"]}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_document_describes_exactly_what_a_command_prints(kind, node, command):
    start(node, "1xA100-40GB+1xA100-40GB:mig=3g.20gb,3g.20gb")
    with using("0"):
        content = json.loads(command(*COMMANDS[kind])[1])

    assert content["schema"] == 1
    assert documented(kind, DOCUMENT.read_text(encoding="utf-8")) == printed(kind, content)


RECORDS = 500  # of one user, as many as are read
LONG = ("python", "\x1b" * 3900)


def flooded(records: int) -> Snapshot:
    """Eight devices that bob holds, with so many records about all of them; alice shares the first one."""
    devices = [a_device(index) for index in range(8)]
    bobs = [a_claim_record(*devices, id=f"b{each}", uid=1002, user="bob", command=LONG) for each in range(records)]
    return a_snapshot(*devices, claims=(*bobs, a_claim_record(devices[0], id="hers", uid=1001, user="alice")))


@pytest.mark.parametrize("width", [None, 100])
def test_hundreds_of_records_of_one_user_take_a_few_lines_and_hide_nobody_elses_and_the_json_has_them_all(width):
    few, many = flooded(MOST_CLAIMS), flooded(RECORDS)
    lines = to_text(many, device_state.uses(many), width=width)
    devices = to_json(many, device_state.uses(many))["devices"]

    assert len(lines) < 8 * (MOST_CLAIMS + 4)
    assert sum(f"and {RECORDS - MOST_CLAIMS} more" in line and "bob" in line for line in lines) == 8
    assert sum("hers" in line for line in lines) == 1
    assert not any(" more" in line for line in to_text(few, device_state.uses(few)))
    assert [len(device["claims"]) for device in devices][:2] == [RECORDS + 1, RECORDS]


def test_what_policies_did_to_the_user_stands_apart_from_the_tables(node, command, monkeypatch):
    monkeypatch.setattr(options, "own_deeds", lambda _: ["what policies did to you within the hour:"])

    assert command("who")[1].endswith("free\n\nwhat policies did to you within the hour:\n")
