"""How each batch queue of one machine is driven: gpuguard, gflow, task-spooler, nq and submitit's local executor.

Each has the same verbs, as a user types them.  What a queue has no word for raises NotOffered.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/support"))

from nodes import eventually
from users import identity, install, interpreter

from gpuguard.procfs import processes, read_memory

SECONDS = 60.0


class NotOffered(Exception):
    """The queue has no command for that."""


@dataclass
class BatchQueue:
    """One queue on one machine, with a home of its own in *place*."""

    place: Path
    others: Path  # the environment of the others
    driver: Mapping[str, str]  # the variables by which programs find the fake driver

    user: pwd.struct_passwd | None = None  # who submits now, if that is not the user who has started us

    name: ClassVar[str]
    program: ClassVar[str]  # what must be there
    no_server: ClassVar[str] = ""  # why there is none to be killed

    def environment(self) -> dict[str, str]:
        """Return the variables of this queue's commands and of their jobs."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
        path = f"{self.others}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        user = self.user.pw_name if self.user else "root"
        return {**kept, "PATH": path, "HOME": str(self.home), "USER": user, "MARK": str(self.place), **self.driver}

    @property
    def home(self) -> Path:
        """Return the home directory of who submits now."""
        return self.place / self.user.pw_name if self.user else self.place

    def submit_as(self, user: pwd.struct_passwd, *command: str) -> str:
        """Submit a job as another user; only root can."""
        self.user = user
        try:
            self.home.mkdir(exist_ok=True)
            os.chown(self.home, user.pw_uid, user.pw_gid)
            return self.submit(*command)
        except PermissionError:
            raise NotOffered("not tried: another user cannot read its Python here") from None
        finally:
            self.user = None

    def share(self) -> None:
        """Set it up for several users, if it must be."""

    def run(self, *words: str, **variables: str) -> str:
        """Run a command to its end, and return what it prints; an error raises CalledProcessError."""
        # Into files, because a pipe would be open as long as a job of the command has it.
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
            status = subprocess.run(
                words,
                env={**self.environment(), **variables},
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                timeout=SECONDS,
                check=False,
                **identity(self.user),
            ).returncode
            said.seek(0)
            errors.seek(0)
            if status:
                raise subprocess.CalledProcessError(status, words, said.read(), errors.read())
            return said.read()

    def mine(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the processes that were started here, with their words."""
        mark = os.fsencode(f"MARK={self.place}")
        for pid, stat in processes().items():
            if stat.lives and mark in (read_memory(pid, "environ", 2**20) or b"").split(b"\0"):
                yield pid, (read_memory(pid, "cmdline", 2**16) or b"").decode(errors="replace").split("\0")

    def server(self) -> list[int]:
        """Return the pids of what decides when jobs start."""
        return []

    def kill_server(self) -> None:
        """Kill what decides when jobs start."""
        for pid in self.server():
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not self.server())

    def close(self) -> None:
        """End everything that was started here."""
        while pids := [pid for pid, _words in self.mine()]:
            for pid in pids:
                with_no_process(pid)

    # What follows is what differs.

    def start(self) -> None:
        """Start the server, if there is one to be started."""

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job for one GPU, and return its id."""
        raise NotOffered

    def sweep(self, command: str, values: Sequence[str], at_most: int) -> None:
        """Submit a job for each value of {x}, so many at a time."""
        raise NotOffered("no sweep")

    def after_ok(self, job: str, *command: str) -> str:
        """Submit a job that runs if another one succeeds."""
        raise NotOffered("no dependencies")

    def many(self, number: int) -> None:
        """Submit so many jobs that wait for GPUs."""
        for _number in range(number):
            self.submit("sleep", "600")

    def nine(self) -> str:
        """Submit a job for nine GPUs; CalledProcessError if it is refused."""
        raise NotOffered("knows no number of GPUs")

    def show(self) -> str:
        """Return the list of jobs as people see it."""
        raise NotOffered("no list")

    def state(self, job: str) -> str:
        """Return waiting, running, done (with whatever exit code), or another word of the queue's."""
        raise NotOffered("no state")

    def exit_code(self, job: str) -> int:
        """Return the exit code of a job that has ended."""
        raise NotOffered("no exit code")

    def log(self, job: str) -> str:
        """Return what a job has printed."""
        raise NotOffered("no log")

    def cancel(self, job: str) -> None:
        """End a job."""
        raise NotOffered("no cancel")

    def hold(self, *command: str) -> str:
        """Submit a job that does not start, though there are GPUs."""
        raise NotOffered("no hold")

    def edit(self, job: str, *command: str) -> None:
        """Change the command of a job that waits."""
        raise NotOffered("no edit")

    def release(self, job: str) -> None:
        """Let a held job start."""
        raise NotOffered("no hold")

    def retry(self, job: str) -> None:
        """Start a job that has ended again."""
        raise NotOffered("no retry")


def with_no_process(pid: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Gpuguard(BatchQueue):
    """This program."""

    name, program = "gpuguard", sys.executable

    def environment(self) -> dict[str, str]:
        """Return the variables, with the claims in a directory of its own."""
        own = {"GPUGUARD_BACKEND": "nvml", "GPUGUARD_DIR": f"{self.place}/claims", "XDG_STATE_HOME": f"{self.home}/s"}
        own |= {"PYTHONPATH": str(self.site)} if self.site.is_dir() else {}
        return {**super().environment(), **own, "GPUGUARD_EVENTS": f"{self.home}/events.jsonl"}

    @property
    def site(self) -> Path:
        """Return where the package lies that every user can read, if it was needed."""
        return self.place / "site"

    def share(self) -> None:
        """Set up a claim directory for all users, and a package that they can read."""
        self.site.mkdir()
        install(self.site)
        self.gpuguard("setup", "--dir", f"{self.place}/claims")

    def gpuguard(self, *words: str, **variables: str) -> str:
        """Run a command."""
        python = interpreter() if self.site.is_dir() else sys.executable
        return self.run(python, "-m", "gpuguard", *words, **variables)

    def server(self) -> list[int]:
        """Return the dispatcher, without the supervisors of running jobs that it has forked."""
        claims = json.loads(self.gpuguard("who", "--json"))["devices"]
        supervisors = {claim["pid"] for device in claims for claim in device["claims"]}
        return [pid for pid, words in self.mine() if "dispatch" in words and pid not in supervisors]

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job."""
        return self.gpuguard("submit", "--parsable", "--grace", "1s", "--", *command, **variables).strip()

    def sweep(self, command: str, values: Sequence[str], at_most: int) -> None:
        """Submit an array."""
        words = "--sweep", f"x={','.join(values)}", "--at-most", str(at_most)
        self.gpuguard("submit", *words, "--", *shlex.split(command))

    def after_ok(self, job: str, *command: str) -> str:
        """Submit a job with a dependency."""
        return self.gpuguard("submit", "--parsable", "--after-ok", job, "--", *command).strip()

    def many(self, number: int) -> None:
        """Submit an array."""
        self.gpuguard("submit", "--array", f"1-{number}", "--", "sleep", "600")

    def nine(self) -> str:
        """Submit a job for nine GPUs."""
        return self.gpuguard("submit", "-n", "9", "--", "true")

    def show(self) -> str:
        """Return the list."""
        return self.gpuguard("jobs")

    def task(self, job: str) -> dict[str, object]:
        """Return what is known of a job of one task."""
        jobs = json.loads(self.gpuguard("jobs", "--json", "--ended"))["jobs"]
        found: dict[str, object] = next(each["tasks"][0] for each in jobs if each["id"] == job)
        return found

    def state(self, job: str) -> str:
        """Return the state."""
        state = str(self.task(job)["state"])
        return "done" if state in ("completed", "failed") else state

    def exit_code(self, job: str) -> int:
        """Return the exit code."""
        return int(str(self.task(job)["exit_code"]))

    def log(self, job: str) -> str:
        """Return the log, without the lines that are marked as gpuguard's own."""
        return re.sub(r"^gpuguard: .*\n", "", self.gpuguard("jobs", "log", job), flags=re.M)

    def cancel(self, job: str) -> None:
        """Cancel a job."""
        self.gpuguard("jobs", "cancel", job)

    def hold(self, *command: str) -> str:
        """Submit a held job."""
        return self.gpuguard("submit", "--parsable", "--hold", "--", *command).strip()

    def edit(self, job: str, *command: str) -> None:
        """Change a job."""
        self.gpuguard("jobs", "update", job, "--command", shlex.join(command))

    def release(self, job: str) -> None:
        """Let a job start."""
        self.gpuguard("jobs", "unhold", job)

    def retry(self, job: str) -> None:
        """Retry a job."""
        self.gpuguard("jobs", "retry", job)


class Gflow(BatchQueue):
    """gflow, from PyPI as runqd."""

    name, program = "gflow", "gflowd"

    def environment(self) -> dict[str, str]:
        """Return the variables, with a tmux of its own."""
        return {**super().environment(), "TMUX_TMPDIR": str(self.place), "XDG_RUNTIME_DIR": str(self.place)}

    def start(self) -> None:
        """Start the daemon; the shell that its jobs get finds its programs."""
        (self.place / ".bash_profile").write_text(f"export PATH={shlex.quote(self.environment()['PATH'])}\n")
        self.run("gflowd", "start")

        def answers() -> bool:
            with suppress(subprocess.CalledProcessError):
                return "GPUS" in self.run("ginfo")
            return False

        assert eventually(answers, SECONDS)

    def server(self) -> list[int]:
        """Return the daemon."""
        return [pid for pid, words in self.mine() if "gflowd" in words]

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job."""
        return self._id(self.run("gbatch", "-g", "1", *command, **variables))

    def _id(self, said: str) -> str:
        found = re.search(r"batch job (\d+)", said)
        assert found, said
        return found[1]

    def sweep(self, command: str, values: Sequence[str], at_most: int) -> None:
        """Submit parameters."""
        words = "--param", f"x={','.join(values)}", "--max-concurrent", str(at_most)
        self.run("gbatch", "-g", "1", *words, *shlex.split(command))

    def after_ok(self, job: str, *command: str) -> str:
        """Submit a job with a dependency."""
        return self._id(self.run("gbatch", "-g", "1", "-d", job, *command))

    def many(self, number: int) -> None:
        """Submit an array."""
        self.run("gbatch", "-g", "1", "--array", f"1-{number}", "sleep", "600")

    def nine(self) -> str:
        """Submit a job for nine GPUs."""
        return self.run("gbatch", "-g", "9", "true")

    def show(self) -> str:
        """Return the list."""
        return self.run("gqueue")

    def state(self, job: str) -> str:
        """Return the state."""
        jobs = json.loads(self.run("gqueue", "-a", "-o", "json"))["jobs"]
        state = next(str(each["state"]) for each in jobs if str(each["id"]) == job)
        return {"Queued": "waiting", "Running": "running", "Finished": "done", "Failed": "done"}.get(state, state)

    def exit_code(self, job: str) -> int:
        """Return the exit code: a job has failed or not."""
        found = re.search(r"exit.?code\D*(\d+)", self.run("gjob", "show", job), re.I)
        if not found:
            raise NotOffered("failed or not, and no number")
        return int(found[1])

    def log(self, job: str) -> str:
        """Return the log."""
        return self.run("gjob", "log", job)

    def cancel(self, job: str) -> None:
        """Cancel a job."""
        self.run("gcancel", job)

    def hold(self, *command: str) -> str:
        """Submit a job that cannot start yet, and hold it: only what waits can be held."""
        job = self._id(self.run("gbatch", "-g", "1", "--begin", "now+5s", *command))
        self.run("gjob", "hold", job)
        return job

    def edit(self, job: str, *command: str) -> None:
        """Change a job."""
        self.run("gjob", "update", job, "--command", shlex.join(command))

    def release(self, job: str) -> None:
        """Let a job start."""
        self.run("gjob", "release", job)

    def retry(self, job: str) -> None:
        """Submit it once more; it gets a new id."""
        self.run("gjob", "redo", job)


class TaskSpooler(BatchQueue):
    """task-spooler, as Debian has it."""

    name, program = "task-spooler", "tsp"

    def environment(self) -> dict[str, str]:
        """Return the variables, with a server of its own for eight jobs at a time."""
        own = {"TS_SOCKET": f"{self.home}/socket", "TMPDIR": str(self.home), "TS_SLOTS": "8"}
        return {**super().environment(), **own}

    def server(self) -> list[int]:
        """Return the server: the process that the socket was made by, which no job descends from."""
        return [pid for pid, words in self.mine() if words[:1] == ["tsp"] and os.getsid(pid) == pid]

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job."""
        return self.run("tsp", *command, **variables).strip()

    def after_ok(self, job: str, *command: str) -> str:
        """Submit a job with a dependency."""
        return self.run("tsp", "-D", job, *command).strip()

    def sweep(self, command: str, values: Sequence[str], at_most: int) -> None:
        """Submit one after the other; the limit is one for all jobs."""
        raise NotOffered("no sweep; its limit is one for all jobs")

    def show(self) -> str:
        """Return the list."""
        return self.run("tsp", "-l")

    def state(self, job: str) -> str:
        """Return the state."""
        said = self.run("tsp", "-s", job).strip()
        return {"queued": "waiting", "finished": "done"}.get(said, said)

    def exit_code(self, job: str) -> int:
        """Return the exit code."""
        found = re.search(r"exit code (\d+)", self.run("tsp", "-i", job))
        return int(found[1]) if found else 0

    def log(self, job: str) -> str:
        """Return the log."""
        return self.run("tsp", "-c", job)

    def cancel(self, job: str) -> None:
        """Signal the job."""
        self.run("tsp", "-k", job)


class Nq(BatchQueue):
    """nq: each job is a process that waits for the locks of those before it."""

    name, program, no_server = "nq", "nq", "no server: each job waits as a process"

    def environment(self) -> dict[str, str]:
        """Return the variables."""
        return {**super().environment(), "NQDIR": str(self.home)}

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job, which gets the name of its file."""
        return self.run("nq", *command, **variables).strip()

    def log(self, job: str) -> str:
        """Return the log."""
        return (self.place / job).read_text()

    def state(self, job: str) -> str:
        """Return whether it has ended, by its log."""
        log = self.log(job)
        return "done" if "[exited with" in log or "[killed by" in log else "running or waiting"

    def exit_code(self, job: str) -> int:
        """Return the exit code, from the last line of the log."""
        found = re.search(r"exited with status (\d+)", self.log(job))
        assert found, self.log(job)
        return int(found[1])

    def cancel(self, job: str) -> None:
        """Signal the process that its name holds, as its page says."""
        os.kill(int(job.rpartition(".")[2]), signal.SIGTERM)


class Submitit(BatchQueue):
    """submitit with its executor for the local machine: no queue, each job starts at once."""

    name, program, no_server = "submitit", "python", "no server: each job starts at once"
    _HEAD = """
import os, submitit, sys
folder = os.environ["HOME"] + "/jobs"
ex = submitit.LocalExecutor(folder=folder)
ex.update_parameters(gpus_per_node=1)
"""

    def python(self, code: str, *words: str, **variables: str) -> str:
        """Run a program with it."""
        return self.run(f"{self.others}/bin/python", "-c", self._HEAD + code, *words, **variables).strip()

    def submit(self, *command: str, **variables: str) -> str:
        """Submit a job."""
        run = "import subprocess; print(ex.submit(subprocess.check_call, sys.argv[1:]).job_id)"
        return self.python(run, *command, **variables)

    def nine(self) -> str:
        """Submit a job for nine GPUs."""
        code = "ex.update_parameters(gpus_per_node=9); print(ex.submit(print).job_id)"
        return self.python(code)

    def many(self, number: int) -> None:
        """Start so many at once, which is no waiting."""
        raise NotOffered("no queue: all would start at once")

    def _job(self, job: str, code: str) -> str:
        return self.python(f"job = submitit.LocalJob(folder, {job!r}); {code}")

    def state(self, job: str) -> str:
        """Return the state."""
        state = self._job(job, "print(job.state)")
        return {"FINISHED": "done", "RUNNING": "running", "INTERRUPTED": "done"}.get(state, state)

    def exit_code(self, job: str) -> int:
        """Return the exit code, out of the text of the exception that result() raises."""
        said = self._job(job, "print(job.exception())")
        found = re.search(r"exit (?:code|status) (\d+)", said)
        if not found:
            raise NotOffered("an exception, and no number")
        return int(found[1])

    def log(self, job: str) -> str:
        """Return what it has printed."""
        return self._job(job, "print(job.stdout(), job.stderr())")

    def cancel(self, job: str) -> None:
        """Cancel a job."""
        self._job(job, "job.cancel()")


QUEUES: tuple[type[BatchQueue], ...] = (Gpuguard, Gflow, TaskSpooler, Nq, Submitit)


def why_missing(queue: type[BatchQueue], others: Path) -> str:
    """Return why a queue cannot be tried here, or ""."""
    if queue is Submitit and not list(others.glob("lib/python*/site-packages/submitit")):
        return "submitit is not installed"
    path = f"{others}/bin{os.pathsep}{os.environ['PATH']}"
    return "" if shutil.which(queue.program, path=path) else f"{queue.program} is not installed"
