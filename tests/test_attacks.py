"""What one user tries against others, and against root, on a machine that they share.

Each table of attacks is shown to work where the defence is absent: the same words of a user who is not denied start a
job, the same directory runs the planted module for a Python that looks there, the same note would harm a terminal.
"""

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from broker_machine import a_machine
from nodes import eventually, remove
from users import ALICE, BOB, HOG, an_open_place, identity, interpreter

from gpuguard.daemon import upkeep
from gpuguard.daemon.upkeep import ClaimUpkeep

pytestmark = pytest.mark.root

WAYS = {
    "as another user by name": ({"USER": ALICE.pw_name, "LOGNAME": ALICE.pw_name}, ["run", "--no-wait", "--", "true"]),
    "with a share": ({}, ["run", "--no-wait", "--share", "--memory", "1GiB", "--", "true"]),
    "by an alternative": ({}, ["run", "--no-wait", "-n", "2", "--or", "-n 1", "--", "true"]),
    "on a GPU by number": ({}, ["run", "--no-wait", "--devices", "0", "--", "true"]),
    "by a claim that does not exist": ({"GPUGUARD_CLAIM": "f0f0f0f0"}, ["run", "--no-wait", "--", "true"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_leads_past_a_denial(admin, way):
    environment, words = WAYS[way]
    assert admin(None, "deny", BOB.pw_name, "--for", "2h", "--reason", "ask me first").returncode == 0
    refused = admin(BOB, *words, environment=environment)
    with_leave = admin(ALICE, *words, environment=environment)

    assert (refused.returncode, with_leave.returncode) == (75, 0), refused.stderr + with_leave.stderr
    assert "ask me first" in refused.stderr
    assert admin.locked() == []


HOSTILE = "\x1b]0;owned\x07<script>alert(1)</script>\r\nroot: 'x' \"y\" \u202e"


@pytest.mark.parametrize("words", [["who"], ["who", "--json"], ["queue"]], ids=" ".join)
def test_a_note_harms_no_terminal_of_root(admin, words):
    with admin.job(BOB, "--note", HOSTILE):
        said = admin(None, *words).stdout

    assert any(not character.isprintable() for character in HOSTILE)
    assert [character for character in said if not character.isprintable() and character != "\n"] == []


COMMANDS = [["who"], ["queue"], ["explain"], ["select"], ["doctor"], ["events"], ["policy", "rules"]]


@pytest.fixture
def hostile_directory() -> Iterator[Path]:
    """Of bob's, with modules that leave a mark when they run, and a home with his settings."""
    with an_open_place() as place:
        for name in ("yaml", "gpuguard", "sitecustomize", "usercustomize", "json"):
            (place / f"{name}.py").write_text(f"open({str(place / 'ran')!r}, 'w')\nraise SystemExit(99)\n")
        os.chown(place, BOB.pw_uid, BOB.pw_gid)
        yield place


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_root_runs_nothing_that_lies_in_the_directory_where_it_starts(admin, hostile_directory, words):
    program = admin.place / "bin" / "gpuguard"  # as pip installs it
    program.parent.mkdir()
    program.write_text("import sys\nfrom gpuguard.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    home = {**admin.environment, "HOME": str(hostile_directory), "GPUGUARD_EVENTS": str(admin.place / "e.jsonl")}
    start = {"cwd": hostile_directory, "env": home, "capture_output": True, "text": True, "check": False}

    done = subprocess.run([interpreter(), str(program), *words], **start)
    assert done.returncode != 99 and "Traceback" not in done.stderr
    assert not (hostile_directory / "ran").exists()
    subprocess.run([interpreter(), "-c", "import yaml"], **start)
    assert (hostile_directory / "ran").exists(), "a Python that looks there runs it"


@pytest.mark.parametrize("variable", ["GPUGUARD_BACKEND=replay:", "GPUGUARD_BACKEND=smi:", "GPUGUARD_LINE="])
def test_no_variable_makes_root_print_a_file_that_only_root_can_read(admin, variable):
    secret = admin.place / "shadow"
    secret.write_text("root:$6$hash-of-root:19000:0:99999:7:::\n")
    secret.chmod(0o600)
    name, _, before = variable.partition("=")
    done = admin(None, "queue", environment={name: f"{before}{secret}"})

    assert "hash-of-root" not in done.stdout + done.stderr
    assert "hash-of-root" in secret.read_text()


@pytest.mark.parametrize("target", ["secret", "a claim of alice's"])
def test_a_record_that_is_a_link_shows_nothing_of_what_it_points_to(admin, target):
    secret = admin.place / "secret"
    secret.write_text('{"note": "hash-of-root", "devices": []}')
    secret.chmod(0o600)
    with admin.job(ALICE, "--note", "hash-of-alice") as (_, device):
        to = secret if target == "secret" else admin.records()[0]
        link = Path(admin.directory.records, f"{admin.directory.prefix}claim.{BOB.pw_uid}.f0f0f0f0.json")
        subprocess.run(["ln", "-s", str(to), str(link)], check=True, **identity(BOB))
        said = admin(None, "who", "--json").stdout

        assert "hash-of-root" not in said
        assert said.count("hash-of-alice") == 1
        assert admin.locked() == [int(device)]


def test_a_policy_file_below_a_directory_of_another_user_is_refused(admin):
    own = admin.place / "of-bob"
    own.mkdir()
    policy = own / "policy.yaml"
    policy.write_text("version: 1\npolicies:\n  - {name: p, for: 1m, when: {idle: {below: 5%}}, steps: [log]}\n")
    trusted = admin(None, "policy", "check", "--installed", str(policy))
    os.chown(own, BOB.pw_uid, BOB.pw_gid)
    refused = admin(None, "policy", "check", "--installed", str(policy))

    assert stat.S_IMODE(policy.stat().st_mode) & 0o022 == 0
    assert (trusted.returncode, refused.returncode) == (0, 1), trusted.stderr + refused.stderr


FORGE = """
import os, signal, sys, time
from gpuguard.claims.directory import lock_directory
from gpuguard.queue.tickets import OwnTicket, new_ticket, ticket_content
from gpuguard.request import Request
directory = lock_directory(os.environ["GPUGUARD_DIR"])
tickets = [OwnTicket(directory, ticket_content(new_ticket([Request(num_gpus=8)]))) for _ in range(300)]
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[1:] else time.sleep(100)
"""


@pytest.mark.parametrize(("words", "status"), [(["stopped"], 0), ([], 75)])
def test_300_tickets_of_a_stopped_process_keep_nobody_from_the_devices(admin, words, status):
    with admin.program(BOB, FORGE, *words):
        assert admin(ALICE, "run", "--no-wait", "--", "true").returncode == status


HALVES = """
import contextlib, os, socket, sys, time
kept = []
for _ in range(500):
    kept.append(client := socket.socket(socket.AF_UNIX))
    client.setblocking(False)
    with contextlib.suppress(OSError):
        client.connect(sys.argv[1])
        client.send(b'{"do": "cl')
print("ready", flush=True)
time.sleep(100)
"""


def test_500_half_requests_to_the_daemon_keep_no_other_user_out(site):
    with a_machine(site, "broker") as machine:
        with machine.running(BOB, HALVES, f"{machine.directory.path}/daemon.sock"):
            answered = machine(ALICE, "keep", "--status")
            started = machine(ALICE, "run", "--no-wait", "--", "true")

        assert (answered.returncode, started.returncode) == (0, 0), answered.stderr + started.stderr


SQUATS: dict[str, Callable[[Path, Path], object]] = {
    "nothing": lambda path, own: None,
    "a directory": lambda path, own: path.mkdir(),
    "a link to a directory of the user": lambda path, own: path.symlink_to(own),
    "a file": lambda path, own: path.touch(),
}


def processes_of(uid: int) -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, reaped or not
            found += [pid] if os.stat(f"/proc/{pid}").st_uid == uid and os.readlink(f"/proc/{pid}/exe") else []
    return found


@pytest.mark.parametrize("squat", SQUATS)
def test_what_another_user_puts_in_the_place_of_a_simulated_node_is_refused_and_not_followed(site, squat):
    user = 40_000 + os.getpid() % 20_000  # no other test's
    path, variables = Path(f"/tmp/gpuguard-sim-{user}"), {"PYTHONPATH": str(site), "GPUGUARD_BACKEND": "simulated"}
    with an_open_place() as place:
        (own := place / "own").mkdir()
        os.chown(own, user, user)
        try:
            SQUATS[squat](path, own)
            if os.path.lexists(path):
                os.chown(path, BOB.pw_uid, BOB.pw_gid, follow_symlinks=False)
            who: dict[str, Any] = {"user": user, "group": user, "extra_groups": [], "cwd": "/", "env": variables}
            done = subprocess.run([interpreter(), "-m", "gpuguard", "who"], capture_output=True, text=True, **who)
            # What reads the node may end a moment later, and would make it again.
            assert eventually(lambda: not processes_of(user))
            inside = os.listdir(path) if path.is_dir() else []
        finally:
            path.unlink() if path.is_symlink() or path.is_file() else remove(path)

        refused = "not a directory of ours alone" in done.stderr
        assert (done.returncode, refused) == ((0, False) if squat == "nothing" else (4, True)), done.stderr
        assert squat == "nothing" or (inside == [] and os.listdir(own) == [])


SHARED_HOG = HOG.replace("LOCK_EX", "LOCK_SH")


@pytest.mark.parametrize("lock", ["gate", "queue", "", "GPU"], ids=["gate", "queue", "directory", "shared"])
def test_who_keeps_a_lock_that_all_need_is_named_to_the_admin_once(admin, monkeypatch, lock):
    """It delayed every start, and no one was named."""
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "HELD_SECONDS", 0.0)
    said = list[tuple[str, str, str]]()
    watch = ClaimUpkeep(admin.directory, lambda *words: said.append(words))
    name = admin.uuids[0] if lock == "GPU" else lock
    path = admin.directory.lock_path(name) if lock else admin.directory.locks
    watch.look([])
    nothing = list(said)
    with admin.program(BOB, SHARED_HOG if lock == "GPU" else HOG, path) as keeper:
        for _ in range(3):
            watch.look([])

        assert nothing == []
        [(kind, outcome, text)] = said
        assert (kind, outcome) == ("claims", "lock kept")
        assert text.startswith(f"pid {keeper.pid} of {BOB.pw_name} keeps {path} locked")


@pytest.mark.parametrize("words", [["-n", "1"], ["--share", "--memory", "1GiB"]], ids=["whole", "share"])
def test_who_has_a_claim_keeps_no_lock_that_all_need(admin, monkeypatch, words):
    monkeypatch.setattr(upkeep, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "HELD_SECONDS", 0.0)
    said = list[tuple[str, str, str]]()
    watch = ClaimUpkeep(admin.directory, lambda *words: said.append(words))
    with admin.job(BOB, *words):
        for _ in range(3):
            watch.look([])

    assert said == []
