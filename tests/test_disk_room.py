"""What users write beside each other's claims has a small file system of its own: it is bounded, and nothing is lost.

Real mounts, in a mount namespace of each test.  After a boot, with a real systemd: scripts/boot-test.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from nodes import SECONDS
from sources import ROOT

from gpuguard.cli.setup import installation as setup_service

pytestmark = pytest.mark.root

# The directory of the claims on a tmpfs, as /run is one.
BEGIN = """
import fcntl, json, os, subprocess, sys
from pathlib import Path
from gpuguard.claims.directory import lock_directory
from gpuguard.cli import setup
from gpuguard.cli.setup import installation as setup_service
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
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"},
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip(f"a full disk (no mount namespace: {done.stderr.strip()})")
    assert done.returncode == 0, done.stderr
    assert not list(where.iterdir())
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_folders_in_folders_keep_nothing_from_being_taken_away(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        old = os.open(claims, os.O_RDONLY)
        os.chdir(claims)
        for _ in range(3000):
            os.mkdir("a")
            os.chdir("a")
        os.chdir("/")
        setup_service.clear(path)
        told["there"], told["left"] = Path(path).exists(), os.listdir(old)
        """,
    )

    assert told == {"there": False, "left": []}


@pytest.mark.parametrize("owner", ["claims", "claims/mine"])
def test_nobody_who_goes_on_writing_there_keeps_it_from_being_taken_away(tmp_path, owner):
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
        setup_service.clear(path)
        told["left"] = Path(path).exists()
        """,
        owner,
    )

    assert told["left"] is False


def test_it_goes_with_the_lock_files_and_stays_while_one_is_held(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(claims)], check=True)
        record = open(claims / "claim.1.abcd.json", "w")
        fcntl.flock(record, fcntl.LOCK_EX)
        setup_service.clear(path)
        told["held"] = claims.is_mount()
        record.close()
        setup_service.clear(path)
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
            setup_service.clear(path)
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
        from gpuguard.queue import reservations, tickets
        from gpuguard.queue.calendar import Reservation

        records.MAX_BYTES = reservations.MAX_BYTES = 8192
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=1777", "tiny", str(claims)], check=True)
        now, long = time.time(), tuple("GPU-" + 99 * str(number % 10) for number in range(60))
        try:
            if sys.argv[2] == "ticket":
                tickets.OwnTicket(directory, {"note": 6000 * "x"})
            elif sys.argv[2] == "record":
                records.write_record(directory, {"id": "abcd", "devices": long})
            else:
                wanted = Reservation("", 0, 0, "", 1, now, now + 900, long, now)
                reservations.write_reservation(directory, wanted)
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
from gpuguard.claims.disk_room import room_for_records
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
    assert "no ticket can be written" in str(told["in line"]) and has in str(told["in line"])
    assert "daemon" in str(told["who"])


KEEPS_NAMELESS = """
import os, sys, time
place = "x"
os.chdir(sys.argv[1])
os.setgroups([]); os.setgid(2); os.setuid(2)
kept = []
try:
    while True:
        kept.append(os.open(place, os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(place)
except OSError:
    print("full", flush=True)
time.sleep(600)
"""


def test_who_has_filled_it_with_files_without_a_name_is_named(tmp_path):
    told = in_a_namespace(
        tmp_path,
        """
        from gpuguard.claims.disk_room import room_for_records
        from gpuguard.daemon.upkeep import ClaimUpkeep
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=100,mode=1777", "tmpfs", claims], check=True)
        keeper = subprocess.Popen([sys.executable, "-c", sys.argv[2], claims], stdout=subprocess.PIPE)
        told["keeper"] = keeper.stdout.readline().decode()
        told["room"] = room_for_records(directory).in_words()
        ClaimUpkeep(directory, lambda *words: told.update(said=words)).look([])
        keeper.kill()
        keeper.communicate()
        subprocess.run(["umount", claims], check=True)
        subprocess.run(["umount", sys.argv[1]], check=True)
        """,
        KEEPS_NAMELESS,
    )

    assert told["keeper"] == "full\n"
    assert str(told["room"]).startswith("bin has 99 of 100 files"), told
    assert told["said"][:2] == ["claims", "no room"]


def test_the_unit_mounts_where_no_directory_is_yet_and_before_all_that_reads_it():
    lines = (ROOT / "packaging" / setup_service.MOUNT).read_text().splitlines()

    assert {"ConditionPathExists=!/run/gpuguard/claims", "Where=/run/gpuguard/claims", "WantedBy=local-fs.target"} < {
        *lines
    }
    assert "Before=systemd-tmpfiles-setup.service gpuguard.service" in lines
    assert "Options=size=64m,nr_inodes=16k,mode=1777,nosuid,nodev,noexec" in lines
