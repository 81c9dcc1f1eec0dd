"""Without a descriptor, a block of the disk or an inode left: a job starts with its claim or not at all, nothing stays.

The disk is a real one, of 16 pages, in a mount namespace; which limits are tried is thrown by the dice of chances.
"""

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chances import luck
from nodes import SECONDS, Gpuguard

from gpuguard.claims.directory import lock_directory
from gpuguard.claims.records import locked_devices, read_records
from gpuguard.jobs import processes
from gpuguard.queue.tickets import read_tickets

LIMITS = sorted(luck("limits").sample(range(3, 40), 3))
JOB = ("--no-wait", "-n", "2", "--", "sh", "-c", 'echo "devices $CUDA_VISIBLE_DEVICES"')
# A full disk for the claims: every page, or every inode, is somebody else's.
FULL = """
mount -t tmpfs -o size=64k,nr_inodes=30,mode=755 small "$1" || exit 99
$2 -m gpuguard who >/dev/null || exit 98
case $3 in
blocks) dd if=/dev/zero of="$1/filler" bs=4k 2>/dev/null ;;
inodes) i=0; while touch "$1/filler$i" 2>/dev/null; do i=$((i + 1)); done ;;
esac
$2 -m gpuguard run --no-wait -n 2 -- sh -c 'echo "devices $CUDA_VISIBLE_DEVICES"'; echo "ended with $?"
rm -f "$1"/filler*
ls "$1/claims"
$2 -m gpuguard run --no-wait -n 8 -- echo all of them
"""


def nothing_stays(place: Path) -> bool:
    directory = lock_directory(str(place / "claims"))
    held = locked_devices(directory, [name for name in os.listdir(directory.locks) if name.startswith("GPU-")])
    return not held and read_records(directory) == [] and read_tickets(directory) == ([], [])


def as_it_must_be(done: subprocess.CompletedProcess[str]) -> bool:
    """The job ran with two devices, or a sentence says why not."""
    ran = "devices " in done.stdout
    return ran == (done.returncode == 0) and ran == ("," in done.stdout) and (ran or bool(done.stderr.strip()))


@pytest.mark.parametrize("limit", LIMITS)
def test_with_few_descriptors_a_job_has_its_devices_or_does_not_start(tmp_path, limit):
    gpuguard = Gpuguard(tmp_path, None)
    assert gpuguard("who").returncode == 0

    words = ("prlimit", f"--nofile={limit}:{limit}", *gpuguard.words("run", *JOB))
    options = {"capture_output": True, "text": True, "timeout": SECONDS, "stdin": subprocess.DEVNULL}
    done = subprocess.run(words, env=gpuguard.environment, **options)  # type: ignore[call-overload]
    began = "Fatal Python error: init_import_site" not in done.stderr  # of 4, Python itself needs more
    assert as_it_must_be(done) and not (began and "Traceback" in done.stderr), (limit, done)
    assert nothing_stays(tmp_path)


@pytest.mark.parametrize("said", [(0, "", ""), (0, "devices \n", ""), (125, "devices 0,1\n", "x"), (125, "", "")])
def test_a_job_without_its_devices_is_found(said):
    assert not as_it_must_be(subprocess.CompletedProcess([], *said))


@pytest.mark.root
@pytest.mark.parametrize("what", ["blocks", "inodes"])
def test_on_a_full_disk_a_job_has_its_devices_or_does_not_start(tmp_path, what):
    gpuguard = Gpuguard(tmp_path, None)
    words = ["unshare", "-m", "sh", "-c", FULL, "sh", str(tmp_path / "claims"), gpuguard.words()[0], what]
    options = {"capture_output": True, "text": True, "timeout": SECONDS, "check": False}
    done = subprocess.run(words, env=gpuguard.environment, **options)  # type: ignore[call-overload]
    if "unshare" in done.stderr or done.returncode == 99:
        pytest.skip(f"a full disk (no mount namespace: {done.stderr.strip()})")

    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    first, _, rest = done.stdout.partition("ended with ")
    assert ("," in first) == ("devices " in first) == rest.startswith("0\n"), done
    assert rest.endswith("\nall of them\n") and "claim." not in rest, done


# What is called first by that name finds no further file: the pidfd of the job, the look after it, at a time limit.
ONCE = """
import errno, os, sys
from {module} import {owner} as owner
from gpuguard.cli import main
really, failed = owner.{name}, []
def once(*words, **more):
    if failed:
        return really(*words, **more)
    failed.append(words)
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
owner.{name} = once
main(sys.argv[1:])
"""
DEAF = ("sh", "-c", "trap '' TERM; sleep 60 & wait; wait")


@pytest.mark.parametrize(
    ("module", "owner", "name", "words", "status"),
    [
        ("posixpath", "os", "pidfd_open", ("--", "sh", "-c", "exit 6"), 6),
        ("gpuguard.jobs.processes", "Drain", "wait_until_free", ("--", "sh", "-c", "exit 6"), 6),
        ("gpuguard.jobs", "processes", "descendants", ("--time-limit", "500ms", "--grace", "200ms", "--", *DEAF), 124),
        ("gpuguard.jobs", "processes", "read_stat", ("--time-limit", "500ms", "--", "sleep", "60"), 124),
    ],
)
def test_a_machine_without_files_for_a_moment_costs_a_job_neither_its_end_nor_its_status(
    tmp_path, module, owner, name, words, status
):
    gpuguard = Gpuguard(tmp_path, None)
    code = ONCE.format(module=module, owner=owner, name=name)
    command = [gpuguard.words()[0], "-c", code, "run", "--no-wait", "--quiet", *words]
    done = subprocess.run(command, env=gpuguard.environment, capture_output=True, timeout=SECONDS, check=False)

    assert done.returncode == status
    assert nothing_stays(tmp_path)


@pytest.mark.parametrize(("name", "code"), [("pipe", errno.ENFILE), ("fork", errno.EAGAIN)])
def test_a_job_for_which_there_is_no_file_or_process_for_a_moment_starts_a_moment_later(monkeypatch, name, code):
    answers, really = iter([OSError(code, os.strerror(code))]), getattr(os, name)

    def once() -> Any:
        if fault := next(answers, None):
            raise fault
        return really()

    monkeypatch.setattr(os, name, once)
    pid, report = processes.start(["true"], os.environ, (), ())
    os.close(report)

    assert os.waitpid(pid, 0) == (pid, 0)


def test_a_process_that_cannot_be_looked_at_for_want_of_a_descriptor_is_not_taken_for_gone(monkeypatch):
    """A claim was given back while what the job had left behind still computed."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(os, "open", full)

    with pytest.raises(OSError, match="Too many open files in system"):
        processes.descendants()
