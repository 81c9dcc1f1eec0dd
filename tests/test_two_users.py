"""Two users who do not trust each other: what one of them does never frees, takes or hangs what is the other's."""

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest
from chances import luck
from nodes import SECONDS, eventually
from users import ALICE, BOB, DEVICES, HOG, IN_BOTH_DIRECTORIES, Machine

from gpuguard.claims.records import read_records

pytestmark = pytest.mark.root

LOOK = ("--", "sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"')
Done = CompletedProcess[str]


@IN_BOTH_DIRECTORIES
def test_a_refused_user_is_told_whose_the_devices_are_and_for_what(machine):
    with machine.job(ALICE, "-n", str(DEVICES), "--note", "night run", umask=0o077):
        refused = machine(BOB, "run", "--no-wait", "--", "true")
        explained = machine(BOB, "explain")
        seen = machine(BOB, "who")
        claims = claims_of(machine(BOB, "who", "--json"))

    assert (refused.returncode, refused.stdout) == (75, "")
    gpus = ", ".join(f"GPU {index}" for index in range(DEVICES))
    assert f"  {gpus}: claimed by {ALICE.pw_name}, " in refused.stderr and "night run" in refused.stderr
    assert (explained.returncode, explained.stdout.count(f"claimed by {ALICE.pw_name}, ")) == (1, DEVICES)
    assert ALICE.pw_name in seen.stdout and "night run" in seen.stdout
    assert {(claim["user"], claim["uid"], claim["note"]) for claim in claims} == {
        (ALICE.pw_name, ALICE.pw_uid, "night run")
    }


@pytest.mark.parametrize("options", [("--share", "--memory", "10GiB"), ("--devices", "3")], ids=["a share", "a GPU"])
def test_where_root_made_the_directory_by_running_a_job_a_user_is_refused_for_good_with_what_to_do(admin, options):
    """Only the lock files that root's job needed are there, and a user can make none."""
    place = admin.place / "made-by-a-job"
    own = {"environment": {"GPUGUARD_DIR": str(place)}}
    command = {"run": ("--", "true"), "select": (), "explain": (), "wait": ()}
    admin(None, "run", "--devices", "0", "--share", "--memory", "10GiB", "--", "true", **own)
    done = {name: admin(BOB, name, *options, *words, **own) for name, words in command.items()}
    checked = admin(BOB, "doctor", **own)
    told = {name: one.stdout + one.stderr for name, one in (*done.items(), ("doctor", checked))}

    assert {name: one.returncode for name, one in done.items()} == {"run": 125, "select": 1, "explain": 1, "wait": 1}
    assert "never start" in told["explain"] and checked.returncode == 1
    for text in told.values():
        flat = " ".join(text.split())
        assert "does not exist and cannot be made (Permission denied)" in flat
        assert f"Run `sudo gpuguard setup --dir {place}`" in flat

    assert admin(None, "setup", "--dir", str(place)).returncode == 0
    assert admin(BOB, "run", *options, "--", "true", **own).returncode == 0


@IN_BOTH_DIRECTORIES
def test_a_umask_of_077_locks_nobody_out(machine):
    with machine.job(ALICE, "-n", str(DEVICES), umask=0o077):
        pass

    with machine.job(BOB, "-n", str(DEVICES), umask=0o077) as (_, devices):
        assert devices == "0,1,2,3,4,5,6,7"
    assert machine(ALICE, "run", "--no-wait", "-n", str(DEVICES), "true").returncode == 0


VANDAL = """
import fcntl, os, signal, sys
lock, record, wrapper = sys.argv[1], sys.argv[2], int(sys.argv[3])
attempts = {"kill": lambda: os.kill(wrapper, signal.SIGTERM), "stop": lambda: os.kill(wrapper, signal.SIGSTOP)}
for path in (lock, record):
    attempts |= {
        f"unlink {path}": lambda path=path: os.unlink(path),
        f"rename {path}": lambda path=path: os.rename(path, path + ".old"),
        f"truncate {path}": lambda path=path: os.truncate(path, 0),
        f"write {path}": lambda path=path: open(path, "w").close(),
        f"append to {path}": lambda path=path: os.open(path, os.O_WRONLY | os.O_APPEND),
        f"chmod {path}": lambda path=path: os.chmod(path, 0o666),
        f"touch {path}": lambda path=path: os.utime(path, (0, 0)),
    }
for what, attempt in attempts.items():
    try:
        attempt()
        print(what)
    except PermissionError:
        pass
fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_UN)
"""


@IN_BOTH_DIRECTORIES
def test_nobody_can_end_release_or_change_the_claim_of_another_user(machine):
    with machine.job(ALICE, "--note", "mine") as (wrapper, device):
        [record] = machine.records()
        before = record.read_text()
        done = machine.python(BOB, VANDAL, str(machine.lock_path(int(device))), str(record), str(wrapper.pid))

        assert done == ""
        assert (machine.locked(), record.read_text(), wrapper.poll()) == ([int(device)], before, None)
        assert machine(BOB, "run", "--no-wait", "--devices", device, "true").returncode == 75


def test_the_id_of_a_claim_gives_nothing_to_another_user(machine):
    with machine.job(ALICE, "-n", str(DEVICES)):
        [claim] = {claim["id"] for claim in claims_of(machine(BOB, "who", "--json"))}
        inside = {"GPUGUARD_CLAIM": claim, "GPUGUARD_GPUS": ",".join(machine.uuids)}

        assert machine(BOB, "run", "--no-wait", "--", "true", environment=inside).returncode == 75
        assert machine(ALICE, "run", "--no-wait", "--", "true", environment=inside).returncode == 0


FORGER = """
import fcntl, json, os, sys
directory, name, device = sys.argv[1:]
descriptor = os.open(f"{directory}/{name}", os.O_RDWR | os.O_CREAT, 0o644)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.write(descriptor, json.dumps({"devices": [device], "note": "forged", "uid": 0, "user": "root"}).encode())
print("ready", flush=True)
import time; time.sleep(100)
"""


@pytest.mark.parametrize("uid", [ALICE.pw_uid, BOB.pw_uid, 0], ids=["alices", "bobs", "roots"])
def test_a_forged_record_makes_nobody_the_holder_of_a_device(machine, uid):
    name = f"{machine.directory.prefix}claim.{uid}.f0f0f0f0.json"
    with machine.job(ALICE, "--note", "mine") as (_, device):
        for uuid in (machine.uuids[int(device)], machine.uuids[0]):
            with machine.program(BOB, FORGER, machine.directory.records, name, uuid):
                by_root, by_alice = (claims_of(machine(user, "who", "--json")) for user in (None, ALICE))

            assert {(claim["user"], claim["note"]) for claim in by_root} == {(ALICE.pw_name, "mine")}
            assert {(claim["user"], claim["note"]) for claim in by_alice} == {(ALICE.pw_name, "mine")}


def test_a_record_with_a_second_name_is_not_believed_but_the_claim_counts(machine):
    with machine.job(ALICE, "--note", "mine") as (_, device):
        [record] = machine.records()
        os.link(record, machine.place / "claims" / "second-name")
        refused = machine(BOB, "run", "--no-wait", "--devices", device, "true")
        [claim] = claims_of(machine(None, "who", "--json"))

    assert refused.returncode == 75
    assert (claim["user"], claim["note"]) == (ALICE.pw_name, None)


def test_a_lock_without_a_record_is_shown_to_root_with_its_holder(machine):
    made = machine(ALICE, "run", "--no-wait", "--", "true")  # the lock file of the sticky directory
    assert made.returncode == 0
    with machine.program(BOB, HOG, str(machine.lock_path(7))):
        [claim] = claims_of(machine(None, "who", "--json"))
        [seen_by_alice] = claims_of(machine(ALICE, "who", "--json"))
        run = machine(ALICE, "run", "--no-wait", *LOOK)

    assert (claim["user"], seen_by_alice["user"]) == (BOB.pw_name, None)
    assert run.stdout == "6\n"


GATED = [
    (0, "run --no-wait -- true"),
    (0, "select -n 2"),
    (0, "who"),
    (0, "explain"),
    (125, "run -n 9 -- true"),  # those that are refused look twice, for the reasons
    (1, "select -n 9"),
]


@IN_BOTH_DIRECTORIES
def test_holding_the_gate_for_ever_delays_the_others_by_two_seconds_and_blocks_nobody(machine):
    assert machine(ALICE, "run", "--no-wait", "--", "true").returncode == 0  # in the sticky directory it makes the gate

    began = time.monotonic()
    with machine.program(BOB, HOG, machine.directory.lock_path("gate")):
        started = [machine.start(ALICE, *line.split()) for _, line in GATED]
        assert [process.wait(timeout=SECONDS) for process in started] == [status for status, _ in GATED]

    assert time.monotonic() - began > 2


PLANT = """
import os, socket, sys
kind, path, own, hers = sys.argv[1:]
{
    "symbolic link": lambda: os.symlink(hers, path),
    "dangling link": lambda: os.symlink(hers + ".new", path),
    "FIFO": lambda: os.mkfifo(path, 0o666),
    "hard link": lambda: (open(own, "w").close(), os.link(own, path)),
    "directory": lambda: os.mkdir(path),
    "socket": lambda: socket.socket(socket.AF_UNIX).bind(path),
    "unreadable file": lambda: os.close(os.open(path, os.O_CREAT, 0)),
}[kind]()
"""
PLANTED = ("symbolic link", "dangling link", "FIFO", "hard link", "directory", "socket", "unreadable file")
HANGS = 20  # seconds


class Answers(NamedTuple):
    run: Done
    select: Done
    who: Done
    explain: Done


@contextmanager
def a_file_of_alices(place: Path) -> Iterator[Path]:
    """A file of Alice's, and a proof that nobody has followed a link to it."""
    (place / "hers").mkdir()
    precious = place / "hers" / "precious"
    precious.write_text("precious")
    for path in (precious, precious.parent):
        os.chown(path, ALICE.pw_uid, ALICE.pw_gid)
    before = precious.stat()
    yield precious
    after = precious.stat()
    assert (precious.read_text(), after.st_mode, after.st_mtime) == ("precious", before.st_mode, before.st_mtime)
    assert os.listdir(place / "hers") == ["precious"]


def answers(machine: Machine, planted: str, path: str) -> Answers:
    """What Alice's commands do after Bob has planted something at *path*."""
    lines = (["run", "--no-wait", *LOOK], ["select"], ["who"], ["explain"])
    with a_file_of_alices(machine.place) as hers:
        machine.python(BOB, PLANT, planted, path, f"{machine.directory.records}/his", str(hers))
        return Answers(*(machine(ALICE, *line, timeout=HANGS) for line in lines))


@pytest.mark.parametrize("planted", PLANTED)
def test_something_planted_in_place_of_a_lock_file_costs_that_device_and_no_more(machine, planted):
    best = DEVICES - 1
    run, select, who, explain = answers(machine, planted, str(machine.lock_path(best)))

    assert [done.returncode for done in (run, select, who, explain)] == [0, 0, 0, 0]
    assert run.stdout == select.stdout == f"{best - 1}\n"
    assert f"GPU {best}  REFUSED" in explain.stdout


@pytest.mark.parametrize("planted", PLANTED)
def test_something_planted_in_place_of_the_gate_is_refused_with_advice(machine, planted):
    run, select, who, explain = answers(machine, planted, machine.directory.lock_path("gate"))

    assert [done.returncode for done in (run, select, who, explain)] == [125, 1, 0, 1]
    assert run.stdout == select.stdout == ""
    for said in (run.stderr, select.stderr, explain.stderr, who.stdout + who.stderr):
        assert "/gpuguard.gate" in said and ("remove it as root" in said or "gpuguard setup" in said)


@pytest.mark.parametrize("planted", PLANTED)
def test_something_planted_in_place_of_a_record_harms_nobody(machine, planted):
    name = f"{machine.directory.prefix}claim.{ALICE.pw_uid}.deadbeef.json"
    with machine.job(ALICE, "--devices", "0"):  # without a claim nobody reads records
        run, select, who, explain = answers(machine, planted, f"{machine.directory.records}/{name}")

    assert [done.returncode for done in (run, select, who, explain)] == [0, 0, 0, 0]
    assert run.stdout == select.stdout == "7\n"


def test_a_lock_file_of_another_user_is_refused_among_those_of_root(admin):
    os.chown(admin.lock_path(7), BOB.pw_uid, BOB.pw_gid)
    run, explain = admin(ALICE, "run", "--no-wait", *LOOK), admin(ALICE, "explain")
    os.chown(admin.directory.lock_path("gate"), BOB.pw_uid, BOB.pw_gid)
    without_a_gate = admin(ALICE, "run", "--no-wait", *LOOK)

    assert (run.returncode, run.stdout) == (0, "6\n")
    assert "GPU 7  REFUSED" in explain.stdout
    assert (without_a_gate.returncode, without_a_gate.stdout) == (125, "")
    assert f"/lock/gate belongs to uid {BOB.pw_uid}" in without_a_gate.stderr
    assert "remove it as root" in without_a_gate.stderr


@pytest.mark.parametrize(
    ("part", "mode", "owner", "message"),
    [
        ("", 0o777, 0, "is writable for others (mode 0777)"),
        ("/lock", 0o777, 0, "is writable for others (mode 0777)"),
        ("/lock", 0o1777, 0, "is writable for others (mode 1777)"),
        ("/claims", 0o777, 0, "is writable for others (mode 0777)"),
        ("", 0o755, BOB.pw_uid, f"belongs to uid {BOB.pw_uid}"),
        ("/lock", 0o755, BOB.pw_uid, f"belongs to uid {BOB.pw_uid}"),
        ("", 0o700, 0, "is not readable for you (mode 0700)"),
        ("/lock", 0o700, 0, "is not readable for you (mode 0700)"),
    ],
)
def test_a_directory_that_cannot_be_trusted_or_read_is_refused_with_advice(admin, part, mode, owner, message):
    path = f"{admin.claims}{part}"
    os.chmod(path, mode)
    os.chown(path, owner, owner)
    done = admin(ALICE, "run", "--no-wait", "--", "true")

    assert (done.returncode, done.stdout) == (125, "")
    assert f"{path} {message}" in done.stderr and "Run `sudo gpuguard setup`" in done.stderr


def test_where_bob_made_the_lock_file_bob_can_remove_it_and_alice_is_told(machine):
    """The limit of a directory without setup: the maker of a file may remove it.  The device still looks used."""
    assert machine(BOB, "run", "--no-wait", "--devices", "0", "--", "true").returncode == 0
    with machine.job(ALICE, "--devices", "0") as (wrapper, _):
        machine.python(BOB, "import os, sys; os.unlink(sys.argv[1])", str(machine.lock_path(0)))

        assert "started on GPU 0" in wrapper.stderr.readline()
        assert "was removed or replaced" in wrapper.stderr.readline()


def claims_of(done) -> list[dict]:
    """The claims that `who --json` printed."""
    assert done.returncode == 0, done.stderr
    return [claim for device in json.loads(done.stdout)["devices"] for claim in device["claims"]]


def claim_id(machine: Machine, user=ALICE) -> str:
    [claim] = [claim for claim in read_records(machine.directory) if claim.uid == user.pw_uid]
    return claim.id


@IN_BOTH_DIRECTORIES
def test_alice_and_root_release_alices_claim_and_bob_does_not(machine):
    for who in (ALICE, None):
        with machine.job(ALICE, "-n", "3"), machine.job(BOB, "-n", "2") as (_, his):
            name = claim_id(machine)
            refused = machine(BOB, "release", name)
            stopped = machine(BOB, "release", name, "--stop")
            before = machine.locked()
            done = machine(who, "release", name, "--reason", "tidy")

            assert (refused.returncode, stopped.returncode, len(before)) == (1, 1, 5)
            assert f"only {ALICE.pw_name} and root can do that" in refused.stderr
            assert done.returncode == 0, done.stderr
            assert sorted(map(str, machine.locked())) == sorted(his.split(","))


def test_each_user_sees_their_own_claims_and_root_all(machine):
    with machine.job(ALICE, "-n", "1"), machine.job(BOB, "-n", "1"):
        lists = [json.loads(machine(who, "release", "--json").stdout)["claims"] for who in (ALICE, BOB, None)]

    assert [{claim["user"] for claim in claims} for claims in lists] == [
        {ALICE.pw_name}, {BOB.pw_name}, {ALICE.pw_name, BOB.pw_name},
    ]  # fmt: skip


PLANT_RECORDS = """
import json, os, sys, fcntl, time
place, prefix, alice, name, uuid, lock = sys.argv[1:]
held = os.open(lock, os.O_RDONLY)
record = {"id": name, "devices": [uuid], "pid": 1, "since": 1.0, "descriptors": [held]}
for who in (alice, str(os.geteuid())):
    path = f"{place}/{prefix}claim.{who}.{name if who != alice else 'f0f0f0f0'}.json"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.write(file, json.dumps(record).encode() + b'\\n{"what": "released", "by": "root"}\\n')
    fcntl.flock(file, fcntl.LOCK_EX)
for planted in ("x", f"release.{alice}.{name}"):
    os.symlink("/etc/passwd", f"{place}/{prefix}claim.{alice}.{planted}.json")
print("planted", flush=True)
time.sleep(100)
"""


def test_hundreds_of_records_of_one_user_take_roots_release_one_sample_and_few_lines(machine):
    """Each had a sample of the driver and a search through all processes of its own."""
    place, count = Path(machine.directory.records), 300
    with ExitStack() as held, machine.job(BOB, "-n", "1"):
        for number in range(count):
            path = place / f"{machine.directory.prefix}claim.{ALICE.pw_uid}.f{number:04}.json"
            file = held.enter_context(path.open("x"))
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump({"devices": [machine.uuids[0]]}, file)
            file.flush()
            os.chown(path, ALICE.pw_uid, ALICE.pw_gid)
        done = machine(None, "release")

    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert [line.split()[1] for line in lines[1:-1]].count(ALICE.pw_name) == 20
    assert [line.split()[1] for line in lines[1:-1]].count(BOB.pw_name) == 1
    assert lines[-1] == f"and {count - 20} more of {ALICE.pw_name}"


def test_planted_records_symlinks_and_copies_of_an_id_release_nothing_of_alices(machine):
    with machine.job(ALICE, "-n", "2") as (_, hers):
        name = claim_id(machine)
        device = int(hers.split(",")[0])
        words = (
            machine.directory.records, machine.directory.prefix, str(ALICE.pw_uid), name,
            machine.uuids[device], str(machine.lock_path(device)),
        )  # fmt: skip
        with machine.program(BOB, PLANT_RECORDS, *words):
            unclear = machine(None, "release", name)
            own = machine(BOB, "release", name)  # the copy of the id
            forged = machine(None, "release", "f0f0f0f0")
            assert sorted(map(str, machine.locked())) == sorted(hers.split(",")), (own, forged, unclear)
            assert f"{ALICE.pw_name}/{name}" in unclear.stderr
            assert machine(None, "release", f"{ALICE.pw_name}.{name}").returncode == 0
            assert machine.locked() == []


def test_releaser_and_holder_are_killed_at_random_instants_and_the_claim_is_held_or_free(machine):
    chance, seen, longest = luck(machine.kind), {0: 0, 3: 0}, 0.1
    with machine.job(BOB, "-n", "2") as (_, his):
        bystander = sorted(map(int, his.split(",")))
        for turn in range(12):
            with machine.job(ALICE, "-n", "3") as (run, _):
                releaser = machine.start(ALICE, "release", claim_id(machine))
                time.sleep(chance.uniform(0, longest))
                victim = releaser if turn % 2 else run
                victim.kill()
                victim.wait()
                if victim is run:
                    releaser.wait(60)  # the job holds what it inherited, or gives it up whole
                assert eventually(lambda: len(machine.locked()) - 2 in (0, 3)), machine.locked()
                time.sleep(0.1)
                hers = [index for index in machine.locked() if index not in bystander]
                assert len(hers) in (0, 3) and set(bystander) <= set(machine.locked())
                seen[len(hers)] += 1
                if victim is releaser:
                    longest *= 2 if hers else 0.5  # some instants lie before the release and some behind it
            assert eventually(lambda: machine.locked() == bystander)

    assert min(seen.values()) >= 1, seen


def test_a_flood_of_release_requests_holds_up_nobody(machine):
    with machine.job(ALICE, "-n", "2") as (run, _), machine.job(BOB, "-n", "2") as (other, _):
        flood = [machine.start(BOB, "release", claim_id(machine), "--stop") for _ in range(6)]
        assert [process.wait(60) for process in flood] == [1] * 6
        assert (run.poll(), other.poll(), len(machine.locked())) == (None, None, 4)
        for _ in range(2000):
            os.kill(run.pid, signal.SIGURG)
        assert machine(ALICE, "release", claim_id(machine)).returncode == 0
        assert subprocess.run(["true"], check=True).returncode == 0 and run.poll() is None
