"""What a batch queue on a shared GPU server must get right, tried on each one that is here: prints a table.

    python benchmarks/batch_peers.py --others DIR [--only gflow] [--rows cancel,server]

DIR gets an environment with gflow (runqd) and submitit from PyPI; task-spooler and nq are those of the system, if they
are installed.  All run on the same fake driver library with eight GPUs.  A cell is "yes", "no" with what was seen, or
"-" where the queue has no command for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from batch_queues import QUEUES, BatchQueue, NotOffered, why_missing
from fake_nvml import GIB, FakeNvml
from nodes import eventually, remove
from peers import last_words
from users import BOB

from gpuguard.procfs import read_memory, stat_of
from gpuguard.units import format_count

INSTALLED = ("runqd", "submitit")
SHORT, LONG = 5.0, 40.0  # seconds in which something must not happen, or must


class Wrong(Exception):
    """What was seen is not as it should be."""


def must(holds: bool, otherwise: str) -> None:
    """Raise Wrong with what is the case *otherwise*."""
    if not holds:
        raise Wrong(otherwise)


def ended(queue: BatchQueue, job: str) -> bool:
    """Wait until a job is done, with whatever exit code."""
    return eventually(lambda: queue.state(job) == "done", LONG)


def submit_and_list(queue: BatchQueue, fake: FakeNvml) -> str:
    """`submit` prints an id at once, and a list has it."""
    seconds, job = [], ""
    for _number in range(5):
        began = time.monotonic()
        job = queue.submit("sleep", "1")
        seconds.append(time.monotonic() - began)
    must(bool(job) and job in queue.show(), "not in the list")
    return f"{statistics.median(seconds):.2f} s"


def log(queue: BatchQueue, fake: FakeNvml) -> str:
    """The log is what the job has printed, and nothing else that is not marked as the queue's own."""
    job = queue.submit("sh", "-c", "echo hello; echo error >&2")
    must(ended(queue, job), f"it is {queue.state(job)}")
    text = queue.log(job)
    must("hello" in text and "error" in text, "output is missing")
    must("\x1b" not in text, "escapes and prompts of a terminal in it")
    strange = [line for line in text.splitlines() if line not in ("hello", "error")]
    must(not strange, f"also {strange[0]!r}" if strange else "")
    return ""


def exit_code(queue: BatchQueue, fake: FakeNvml) -> str:
    """The exit code of a job can be asked for afterwards."""
    job = queue.submit("sh", "-c", "exit 3")
    must(ended(queue, job), f"it is {queue.state(job)}")
    must((code := queue.exit_code(job)) == 3, f"it is {code}")
    return ""


def environment(queue: BatchQueue, fake: FakeNvml) -> str:
    """A job has the variables, the directory and the words of its submission."""
    queue.submit("sh", "-c", "pwd > said; echo $COLOUR:$1 >> said", "sh", "a 'b' $c", COLOUR="blue")
    said = queue.place / "said"
    must(eventually(lambda: said.exists() and said.read_text().count("\n") == 2, LONG), "it did not run")
    directory, words = said.read_text().splitlines()
    must(directory == str(queue.place), f"directory {directory}")
    must(words == "blue:a 'b' $c", f"it is {words!r}")
    return ""


def sweep(queue: BatchQueue, fake: FakeNvml) -> str:
    """Four values, two at a time, and the list says that the rest waits for that."""
    queue.sweep("sh -c 'touch on.{x}; sleep 4; mv on.{x} off.{x}'", ("1", "2", "3", "4"), 2)
    must(eventually(lambda: len(list(queue.place.glob("on.*"))) == 2, LONG), "two did not start")
    shown, most = queue.show(), 0
    while len(list(queue.place.glob("off.*"))) < 4:
        most = max(most, len(list(queue.place.glob("on.*"))))
        time.sleep(0.05)
    must(most == 2, f"{most} at a time")
    must("Resources" not in shown, "says that the rest waits for GPUs")
    return ""


def parent_fails(queue: BatchQueue, fake: FakeNvml) -> str:
    """What needs the success of a job that fails ends in a state that says so, and what needs that, too."""
    parent = queue.submit("sh", "-c", "sleep 2; exit 1")
    child = queue.after_ok(parent, "touch", "ran")
    grandchild = queue.after_ok(child, "touch", "ran")
    named = "skipped", "Cancelled"
    must(eventually(lambda: queue.state(grandchild) in named, LONG), f"it is {queue.state(grandchild)} for ever")
    must(queue.state(child) in named and not (queue.place / "ran").exists(), f"it is {queue.state(child)}")
    return ""


def cancel(queue: BatchQueue, fake: FakeNvml) -> str:
    """The end of a job is the end of all its processes: those that ignore SIGTERM, and of other sessions."""
    code = "trap '' TERM; echo $$ >> pids; (trap '' TERM; setsid sh -c 'echo $$ >> pids; exec sleep 100') & sleep 100"
    job = queue.submit("sh", "-c", code)
    pids = queue.place / "pids"
    must(eventually(lambda: pids.exists() and pids.read_text().count("\n") == 2, LONG), "it did not run")
    queue.cancel(job)

    def alive() -> list[str]:
        return [pid for pid in pids.read_text().split() if (stat := stat_of(int(pid))) and stat.lives]

    must(eventually(lambda: not alive(), 2 * SHORT), f"{len(alive())} of 2 processes live on")
    return ""


def change(queue: BatchQueue, fake: FakeNvml) -> str:
    """A job is held, gets another command, starts when it is released, and is tried again."""
    job = queue.hold("touch", "before")
    time.sleep(SHORT)
    must(not (queue.place / "before").exists(), "held, it starts")
    queue.edit(job, "touch", "after")
    queue.release(job)
    must(eventually((queue.place / "after").exists, LONG), "not started")
    must(ended(queue, job), f"it is {queue.state(job)}")
    (queue.place / "after").unlink()
    queue.retry(job)
    must(eventually((queue.place / "after").exists, LONG), "not tried again")
    return ""


def server(queue: BatchQueue, fake: FakeNvml) -> str:
    """kill -9 of what starts jobs loses no job, no exit code and no id; nothing is said to be fine that is not."""
    if queue.no_server:
        raise NotOffered(queue.no_server)
    runs = [queue.submit("sh", "-c", "sleep 6; exit 4") for _gpu in range(8)]
    waits = queue.submit("touch", "waited")
    must(eventually(lambda: queue.state(runs[-1]) == "running", LONG), "it did not run")
    eventually(lambda: bool(queue.server()), SHORT)
    queue.kill_server()
    with suppress(subprocess.CalledProcessError):
        must(any(job in queue.show() for job in (runs[0], waits)), "then an empty list, exit 0")
    with suppress(subprocess.CalledProcessError):
        queue.start()
    with suppress(subprocess.CalledProcessError):
        must(queue.submit("true") not in (*runs, waits), "an id is given again")
    must(eventually((queue.place / "waited").exists, LONG), "the job that waited is lost")
    must(queue.state(runs[0]) == "done", f"a job that has ended is {queue.state(runs[0])}")
    must(queue.exit_code(runs[0]) == 4, "its exit code is lost")
    return ""


def foreign(queue: BatchQueue, fake: FakeNvml) -> str:
    """A job starts on no GPU that the process of a user without a queue has just begun to use."""
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        fake.add_process(0, stranger.pid, GIB)
        queue.submit("sh", "-c", "echo $CUDA_VISIBLE_DEVICES > gpus")
        gpus = queue.place / "gpus"
        must(eventually(lambda: gpus.exists() and gpus.read_text() != "", LONG), "it did not run")
        must(bool(gpus.read_text().strip()), "jobs are told no GPU")
        must("0" not in gpus.read_text().strip().split(","), "starts on it")
    finally:
        stranger.kill()
        stranger.wait()
        fake.clear_processes(0)
    return ""


def two_users(queue: BatchQueue, fake: FakeNvml) -> str:
    """A job of another user runs as that user, and on another GPU."""
    if os.geteuid():
        raise NotOffered("not tried: only root can be two users")
    queue.share()
    queue.submit("sh", "-c", "echo $CUDA_VISIBLE_DEVICES > gpu.first; sleep 20")
    queue.submit_as(BOB, "sh", "-c", "id -u > uid; echo $CUDA_VISIBLE_DEVICES > gpu.second")
    first, second, uid = (queue.place / name for name in ("gpu.first", "gpu.second", "uid"))
    must(eventually(lambda: all(path.exists() and path.read_text() for path in (first, second, uid)), LONG), "not run")
    must(int(uid.read_text()) == BOB.pw_uid, f"it runs as uid {uid.read_text().strip()}")
    must(bool(second.read_text().strip()), "jobs are told no GPU")
    must(first.read_text() != second.read_text(), "on the same one")
    return ""


def nine(queue: BatchQueue, fake: FakeNvml) -> str:
    """Nine of eight GPUs are refused at once."""
    try:
        queue.nine()
    except subprocess.CalledProcessError:
        return ""
    raise Wrong("accepted")


def many(queue: BatchQueue, fake: FakeNvml) -> str:
    """500 jobs wait behind eight that run: seconds to submit them; processes and memory besides those of what runs."""
    queue.many(8)
    time.sleep(2 * SHORT)
    running = {pid for pid, _words in queue.mine()} - set(queue.server())
    began = time.monotonic()
    queue.many(500)
    seconds = time.monotonic() - began
    time.sleep(2 * SHORT)
    pids = [pid for pid, _words in queue.mine() if pid not in running]
    pages = [page for pid in pids if (page := read_memory(pid, "smaps_rollup", 2**16))]
    sizes = [int(found[1]) for page in pages if (found := re.search(rb"\nPss: +(\d+) kB", page))]
    return f"{seconds:.1f} s, {format_count(len(pages), 'process', 'processes')}, {sum(sizes) / 1024:.0f} MiB"


ROWS: dict[str, Callable[[BatchQueue, FakeNvml], str]] = {
    "submit": submit_and_list,
    "log": log,
    "exit code": exit_code,
    "environment": environment,
    "sweep": sweep,
    "parent fails": parent_fails,
    "cancel": cancel,
    "hold, edit, retry": change,
    "server": server,
    "foreign process": foreign,
    "two users": two_users,
    "nine of eight": nine,
    "many": many,
}


def cell(kind: type[BatchQueue], row: str, others: Path) -> str:
    """Try one thing with one queue on a machine of its own, and return what a table says of it."""
    place = Path(tempfile.mkdtemp(prefix="gpuguard-batch-"))
    place.chmod(0o777)
    with FakeNvml(place, 8) as fake:
        os.chmod(fake.path, 0o666)  # the library counts its calls in there
        library = place / "lib"
        library.mkdir()
        for name in ("libnvidia-ml.so", "libnvidia-ml.so.1"):
            shutil.copy(fake.library, library / name)
        queue = kind(place, others, {**fake.environment(), "LD_LIBRARY_PATH": str(library)})
        try:
            queue.start()
            return " ".join(filter(None, ("yes", ROWS[row](queue, fake))))
        except NotOffered as reason:
            return f"- {reason}".strip()
        except Wrong as seen:
            return f"no: {seen}"
        except subprocess.CalledProcessError as failed:
            return f"no: {last_words(failed.stderr or failed.stdout)}"
        except subprocess.TimeoutExpired as silent:
            return f"no: {silent.cmd[0]} does not come back"
        finally:
            queue.close()
            remove(place)


def table(kinds: Sequence[type[BatchQueue]], rows: Sequence[str], others: Path) -> str:
    """Return the whole table."""
    lines = [f"|  | {' | '.join(kind.name for kind in kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    for row in rows:
        cells = []
        for kind in kinds:
            cells.append(cell(kind, row, others).replace("|", "/"))
            print(f"{row}, {kind.name}: {cells[-1]}", file=sys.stderr, flush=True)
        lines.append(f"| {(ROWS[row].__doc__ or '').strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Try everything, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", type=Path, required=True, metavar="DIR", help="the environment of the others")
    parser.add_argument("--only", help="names of queues, with commas between them")
    parser.add_argument("--rows", help=f"of {', '.join(ROWS)}")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleans up
    others = args.others.absolute()
    if not (others / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(others)], check=True)
        subprocess.run([str(others / "bin" / "python"), "-m", "pip", "install", "--quiet", *INSTALLED], check=False)
    wanted = [kind for kind in QUEUES if not args.only or kind.name in args.only.split(",")]
    missing = {kind.name: why_missing(kind, others) for kind in wanted}
    here = [kind for kind in wanted if not missing[kind.name]]
    print(table(here, args.rows.split(",") if args.rows else list(ROWS), others))
    print("\n".join(f"Not tried: {name}, {why}." for name, why in missing.items() if why))
    return 0


if __name__ == "__main__":
    sys.exit(main())
