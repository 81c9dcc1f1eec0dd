"""What users write beside each other's claims has a small file system of its own: it is bounded, and nothing is lost.

Real mounts, in a mount namespace of each test.  After a boot, with a real systemd: scripts/boot-test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from commands import SECONDS
from sources import ROOT

from gpuguard.cli import setup_room

pytestmark = pytest.mark.root

# The directory of the claims on a tmpfs, as /run is one.
BEGIN = """
import fcntl, json, os, subprocess, sys
from pathlib import Path
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import setup, setup_remove, setup_room
told = {}
path = sys.argv[1] + "/gpuguard"
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", sys.argv[1]], check=True)
setup.make_directory(path, ["GPU-1"])
claims, directory = Path(path, "claims"), lock_directory(path)
"""


def in_a_namespace(place: Path, program: str, *words: str, begin: str = BEGIN) -> dict[str, object]:
    """What *program* has told, alone with its mounts."""
    where = place / "run"
    where.mkdir()
    code = f"{begin}\n{textwrap.dedent(program)}\nprint(json.dumps(told))"
    done = subprocess.run(
        ["unshare", "-mpf", "--mount-proc", sys.executable, "-c", code, str(where), *words],
        capture_output=True, text=True, check=False, timeout=2 * SECONDS,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip(f"NOT TESTED: needs a mount namespace: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert not list(where.iterdir())
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_it_is_mounted_where_nothing_lives_and_what_is_dead_takes_no_room(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        old = os.open(claims, os.O_RDONLY)
        (claims / "claim.1.dead.json").write_text("{}")
        (claims / "folder/folder").mkdir(parents=True)
        told["why"] = setup_room.mount_now(path)
        told["before"], told["now"] = os.listdir(old), os.listdir(claims)
        told["mode of both"] = [oct(os.fstat(old).st_mode), oct(claims.stat().st_mode)]
        told["room"] = [os.statvfs(claims).f_files, os.statvfs(claims).f_blocks * 4096]
        told["mount"] = Path("/proc/self/mountinfo").read_text().splitlines()[-1].split()[5]
        """,
    )

    assert told == {
        "why": None, "before": [], "now": [], "mode of both": ["0o40755", "0o41777"],
        "room": [16384, 64 * 2**20], "mount": "rw,nosuid,nodev,noexec,relatime",
    }  # fmt: skip


@pytest.mark.parametrize("what", ["mount", "remove"])
def test_folders_in_folders_keep_nothing_from_being_taken_away(tmp_path, what):
    told = in_a_namespace(
        tmp_path,
        """
        old = os.open(claims, os.O_RDONLY)
        os.chdir(claims)
        for _ in range(3000):
            os.mkdir("a")
            os.chdir("a")
        os.chdir("/")
        if sys.argv[2] == "mount":
            told["why"] = setup_room.mount_now(path)
        else:
            setup_remove._clear(path)
            told["why"] = Path(path).exists() or None
        told["left"] = os.listdir(old)
        """,
        what,
    )

    assert told == {"why": None, "left": []}


@pytest.mark.parametrize("whose", ["claims", "claims/mine"])
def test_nobody_who_goes_on_writing_there_keeps_it_from_being_taken_away(tmp_path, whose):
    told = in_a_namespace(
        tmp_path,
        """
        place = Path(path, sys.argv[2])
        place.mkdir(exist_ok=True)
        os.chown(place, 1 if "mine" in sys.argv[2] else 0, -1)
        stands, really = os.open(place, os.O_RDONLY), os.rmdir

        def rmdir(*of, **where):
            os.seteuid(1)
            try:
                os.fchmod(stands, 0o777)
            except OSError:
                pass
            try:
                os.close(os.open("one more", os.O_CREAT, dir_fd=stands))
            except OSError as error:
                told["he"] = error.strerror
            os.seteuid(0)
            really(*of, **where)

        os.rmdir = rmdir
        setup_remove._clear(path)
        told["left"] = Path(path).exists()
        """,
        whose,
    )

    assert told["left"] is False


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("what", ["claim.1.abcd.json", "reserve.0.abcd.json"])
def test_it_is_not_mounted_over_what_lives(tmp_path, what, when):
    told = in_a_namespace(
        tmp_path,
        """
        import time
        from dataclasses import replace
        from gpuguard.queue.reservation_store import Reservation, write

        def comes(at):
            global held
            if sys.argv[2].startswith("reserve"):
                now = time.time()
                write(replace(directory, records=at), Reservation("", 0, 0, "", 1, now, now + 900, ("GPU-1",), now))
            else:
                held = open(f"{at}/{sys.argv[2]}", "w")
                fcntl.flock(held, fcntl.LOCK_EX)

        def mount(place, really=setup_room._mount):
            old = os.open(place, os.O_RDONLY)
            why = really(place)
            comes(f"/proc/self/fd/{old}")
            return why

        if sys.argv[3] == "before":
            comes(str(claims))
        else:
            setup_room._mount = mount
        told["why"] = setup_room.mount_now(path)
        told["left"] = [claims.is_mount(), oct(claims.stat().st_mode), len(os.listdir(claims))]
        """,
        what,
        when,
    )

    assert told["left"] == [False, "0o41777", 1]
    assert ("root has a reservation" if "reserve" in what else f"{what} there is held") in str(told["why"])


@pytest.mark.parametrize("fails", ["", "umount failed"])
def test_nobody_who_stands_in_the_new_one_keeps_it_over_what_lives_and_a_failure_is_said(tmp_path, fails):
    told = in_a_namespace(
        tmp_path,
        """
        seen = iter([None, "a claim came meanwhile"])
        setup_room._what_lives = lambda directory: next(seen)
        mount = setup_room._mount
        setup_room._mount = lambda place: mount(place) or os.chdir(place)
        if sys.argv[2]:
            setup_room._umount = lambda *words: sys.argv[2]
        told["why"] = setup_room.mount_now(path)
        told["mounted"] = claims.is_mount()
        """,
        fails,
    )

    why = "a claim came meanwhile"
    assert told == {"why": f"{why}, and now hidden: {fails}" if fails else why, "mounted": bool(fails)}


@pytest.mark.parametrize(("propagation", "follows"), [("slave", True), ("private", False)])
def test_it_is_not_mounted_while_a_container_would_go_on_with_the_old_directory(tmp_path, propagation, follows):
    told = in_a_namespace(
        tmp_path,
        """
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        words = ["unshare", "-m", "--propagation", sys.argv[2], "sh", "-c", "echo; exec sleep 60"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            told["why"], told["pid"] = setup_room.mount_now(path), other.pid
            points = [line.split()[4] for line in Path(f"/proc/{other.pid}/mountinfo").read_text().splitlines()]
            told["seen there"] = str(claims) in points
            other.kill()
        """,
        propagation,
    )

    assert told["seen there"] == follows
    assert told["why"] is None if follows else f"process {told['pid']} (in a container?)" in str(told["why"])


@pytest.mark.parametrize(("propagation", "done"), [("slave", True), ("private", False)])
def test_a_service_with_mounts_of_its_own_mounts_it_for_all_or_not_at_all(tmp_path, propagation, done):
    told = in_a_namespace(
        tmp_path,
        """
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        program = "import sys; from gpuguard.cli import setup_room; print(setup_room.mount_now(sys.argv[1]))"
        words = ["unshare", "-m", "--propagation", sys.argv[2], sys.executable, "-c", program, path]
        told["why"] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        told["mounted"] = claims.is_mount()
        """,
        propagation,
    )

    assert (told["mounted"], told["why"] == "None") == (done, done)


def test_what_is_just_being_written_is_left_alone_and_what_nobody_finished_is_not(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        import time
        (claims / "claim.1.abcd.json.new").touch()
        seen = []
        setup_room.try_flock = lambda *of: seen.append(of) or True
        told["why"], told["locked"] = setup_room.mount_now(path), len(seen)
        now = time.time()
        time.time = lambda: now + 3600
        told["later"] = setup_room.mount_now(path)
        """,
    )

    assert told == {"why": "claim.1.abcd.json.new there is just being written", "locked": 0, "later": None}


def test_it_goes_with_the_lock_files_and_stays_while_one_is_held(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        setup_room.mount_now(path)
        record = open(claims / "claim.1.abcd.json", "w")
        fcntl.flock(record, fcntl.LOCK_EX)
        setup_remove._clear(path)
        told["held"] = claims.is_mount()
        record.close()
        setup_remove._clear(path)
        told["free"] = Path(path).exists()
        """,
    )

    assert told == {"held": True, "free": False}


def test_lock_files_stay_where_more_files_lie_than_can_be_looked_at(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        import resource
        for number in range(200):
            (claims / str(number)).touch()
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
        with open(directory.lock_path("GPU-1")) as job:
            fcntl.flock(job, fcntl.LOCK_EX)
            setup_remove._clear(path)
            told["held lock is there"] = Path(directory.lock_path("GPU-1")).exists()
        """,
    )

    assert told == {"held lock is there": True}


@pytest.mark.parametrize("part", ["ticket", "record", "reservation"])
def test_a_file_for_which_there_is_only_half_the_room_is_not_written(tmp_path, part):
    told = in_a_namespace(
        tmp_path,
        """
        import time
        from gpuguard.claims import records
        from gpuguard.errors import ClaimError
        from gpuguard.queue import reservation_store as reservefiles, tickets

        records.MAX_BYTES = reservefiles.MAX_BYTES = 8192
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "tiny", str(claims)], check=True)
        now, long = time.time(), tuple("GPU-" + 99 * str(number % 10) for number in range(60))
        try:
            if sys.argv[2] == "ticket":
                tickets.Held(directory, {"note": 6000 * "x"})
            elif sys.argv[2] == "record":
                records.write_record(directory, {"id": "abcd", "devices": long})
            else:
                reservefiles.write(directory, reservefiles.Reservation("", 0, 0, "", 1, now, now + 900, long, now))
        except (OSError, ClaimError) as error:
            told["error"] = str(error)
        told["left"] = os.listdir(claims)
        """,
        part,
    )

    assert "No space left" in str(told.get("error")) and told["left"] == []


# Two users, and claims/ as full as bob can make it: he has all of its files, or all of its bytes.
FULL = """
import json, os, subprocess, sys
from gpuguard.claims.room import room_for_records
from users import ALICE, BOB, a_shared_machine, a_site
told = {}
FILLS = '''
import os, sys
try:
    for number in range(9999):
        with open(f"{sys.argv[1]}/mine{number}", "wb") as file:
            file.write(bytes(int(sys.argv[2])))
except OSError as error:
    print(error.strerror)
'''
"""


@pytest.mark.parametrize("size", [0, 4096], ids=["files", "bytes"])
def test_where_one_has_filled_it_others_claim_and_hear_who_has(tmp_path, size):
    told = in_a_namespace(
        tmp_path,
        """
        with a_site() as site, a_shared_machine(site, "admin", devices=2) as machine:
            options = "size=256k,nr_inodes=100,mode=1777,nosuid,nodev,noexec"
            claims = machine.directory.records
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", claims], check=True)
            beside = os.statvfs(machine.directory.path).f_bfree
            told["bob's error"] = machine.python(BOB, FILLS, claims, sys.argv[2]).strip()
            told["used"] = room_for_records(machine.directory).used
            with machine.job(ALICE, "-n", "2") as (_, devices):
                told["devices"], told["locked"] = devices, machine.locked()
                told["bob gets"] = machine(BOB, "run", "--no-wait", "--", "true").returncode
                told["in line"] = machine(BOB, "run", "--", "true").stderr
                told["who"] = machine(None, "who").stdout
            told["alice hears"] = machine(ALICE, "run", "--no-wait", "--", "true").stderr
            told["free again"] = machine.locked()
            subprocess.run(["umount", claims], check=True)
        """,
        str(size),
        begin=FULL,
    )

    has = "bin has 99 of 100 files" if size == 0 else "KiB of 256KiB there"
    assert (told["bob's error"], told["used"]) == ("No space left on device", 1.0)
    assert (told["devices"], told["locked"], told["bob gets"], told["free again"]) == ("0,1", [0, 1], 75, [])
    assert "no record in" in str(told["alice hears"]) and has in str(told["alice hears"])
    assert "no place in line can be had" in str(told["in line"]) and has in str(told["in line"])
    assert "daemon" in str(told["who"])


def test_the_unit_mounts_at_boot_alone_and_before_all_that_looks():
    lines = (ROOT / "packaging" / setup_room.NAME).read_text().splitlines()

    assert {"ConditionPathExists=!/run/gpuguard/claims", "Where=/run/gpuguard/claims", "WantedBy=local-fs.target"} < {
        *lines
    }
    assert "Before=systemd-tmpfiles-setup.service gpuguard.service" in lines
    assert setup_room.options() == "size=64m,nr_inodes=16k,mode=1777,nosuid,nodev,noexec"
