"""On a real Ray: its tasks, actors and jobs exclude people beside it, and wait for devices where those were quicker.

A head of Ray with 8 devices of a simulated node, three of which outsiders hold.  It ends by the ids of its processes,
which bear a variable of this test: `ray stop` ends whatever has the right name.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import nodes
import psutil
import pytest
from proc import free_port

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="jobs of a real Ray (no ray: scripts/test tests/test_ray_head.py)"
    ),
    pytest.mark.usefixtures("alone"),
]

TASKS = str(Path(__file__).with_name("support") / "ray_tasks.py")
MARK = "GPUGUARD_TEST_RAY"
TAKEN = ("0", "1", "2")


def found_in(said: str) -> Any:
    """What the programs in ray_tasks found; Ray may have said something before or after it."""
    [line] = [line for line in said.splitlines() if line.startswith("{")]
    return json.loads(line)


class Head:
    """A head of Ray, and what surrounds it."""

    def __init__(self, place: Path) -> None:
        self.place, self.sim = place, str(place / "sim")
        nodes.start(self.sim, "8xH100-80GB")
        port, clients = free_port(), free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "GPUGUARD_DIR": self.sim,
            "GPUGUARD_BACKEND": f"simulated:{self.sim}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(place),
            "RAY_memory_monitor_refresh_ms": "0",  # it ends tasks for the memory that others use on this machine
            MARK: secrets.token_hex(8),
        }
        self.log = open(place / "ray.log", "w+b")  # noqa: SIM115
        options = {
            "num-gpus": 8, "num-cpus": 8, "port": 0, "dashboard-host": "127.0.0.1", "dashboard-port": port,
            "min-worker-port": 0, "max-worker-port": 0, "ray-client-server-port": clients,
            "dashboard-agent-listen-port": 0, "dashboard-agent-grpc-port": 0, "metrics-export-port": 0,
            "temp-dir": place, "object-store-memory": 100_000_000, "include-dashboard": "true",
        }  # fmt: skip
        words = [f"--{name}={value}" for name, value in options.items()]
        self.child = self.start(
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words, stderr=self.log
        )

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": more.get("stderr", subprocess.PIPE)}
        return subprocess.Popen(words, env=self.environment, cwd=self.place, text=True, **{**streams, **more})

    @contextlib.contextmanager
    def running(self, *words: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        with self.start(*words, **more) as child:
            try:
                yield child
            finally:
                child.terminate()

    def answers(self) -> bool:
        assert self.child.poll() is None, Path(self.log.name).read_text()
        bearer = {"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        request = Request(f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/jobs/", headers=bearer)
        with contextlib.suppress(OSError), urlopen(request, timeout=10) as answer:  # also of 500, as long as it starts
            # Without it a program would look for any Ray of this machine.
            self.environment["RAY_ADDRESS"] = (self.place / "ray_current_cluster").read_text()
            return bool(answer.status == 200)
        return False

    def gpuguard(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpuguard", *words]
        environment = {**self.environment, **more}
        return subprocess.run(command, env=environment, cwd=self.place, capture_output=True, text=True, timeout=120)

    def tasks(self, what: str, witness: Path, *more: str) -> Any:
        """What the programs in ray_tasks answer, once Ray has all devices back."""
        with self.running(sys.executable, TASKS, what, str(witness), *more, stderr=subprocess.PIPE) as child:
            said, complaints = child.communicate(timeout=120)
        assert said, complaints
        found = found_in(said)
        assert found["back"] == 8
        return found["answer"]

    @contextlib.contextmanager
    def outsider(self, witness: Path, devices: str) -> Iterator[subprocess.Popen[str]]:
        """Somebody beside Ray who computes on these devices."""
        words = ["run", "--devices", devices, "--", sys.executable, TASKS, "hold", str(witness)]
        with self.running(sys.executable, "-m", "gpuguard", *words, stderr=subprocess.DEVNULL) as child:
            assert nodes.eventually(lambda: (witness / devices[-1]).exists())
            yield child

    def stop(self) -> None:
        """End all that came of us: our children's children, and what bears our mark, until nothing is left."""
        mark = f"{MARK}={self.environment[MARK]}".encode()
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # where Ray could not start
            # Some of them write their names over their environment.
            head = psutil.Process(self.child.pid)
            family = [head, *head.children(recursive=True)]
        while left := [*family, *(process for process in psutil.process_iter() if bears(process.pid, mark))]:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.child.poll()
            psutil.wait_procs(left, timeout=5)
            family = []
        self.child.wait()
        self.log.close()


def bears(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Ray's sockets lie 64 characters below this directory, and their names must not exceed 107: pytest's own directory
    # in a worker adds 40, and $TMPDIR may be long.
    top = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="ray-", dir=top if len(top) <= 30 else "/tmp") as place:
        head = Head(Path(place))
        try:
            assert nodes.eventually(head.answers, 180)
            yield head
        finally:
            head.stop()


@pytest.fixture
def witness(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def taken(head: Head, witness: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Outsiders on three devices, those that Ray gives first."""
    with contextlib.ExitStack() as stack:
        yield {device: stack.enter_context(head.outsider(witness, device)) for device in TAKEN}


def test_sixteen_tasks_on_eight_devices_three_of_which_outsiders_hold_all_run_and_none_meets_another(
    head: Head, taken: dict[str, subprocess.Popen[str]], witness: Path
) -> None:
    with head.running(sys.executable, TASKS, "tasks", str(witness), "16", stderr=subprocess.PIPE) as child:
        assert nodes.eventually(lambda: "Ray: train" in head.gpuguard("queue").stdout, 60)
        for outsider in taken.values():
            outsider.terminate()
        answer, complaints = child.communicate(timeout=120)

    assert len(found_in(answer)["answer"]) == 16, complaints
    assert not (witness / "overlap").exists()


def test_the_witness_sees_tasks_that_are_not_guarded(head: Head, taken: object, witness: Path) -> None:
    head.tasks("tasks", witness, "4", "--unguarded")

    assert (witness / "overlap").exists()


def test_actors_and_generators_are_guarded_as_long_as_they_live(head: Head, witness: Path) -> None:
    where, notes, visible, claim = head.tasks("others", witness)

    assert "Ray: Trainer" in notes
    assert visible != where
    assert claim
    assert not (witness / "overlap").exists()


def test_a_task_that_gives_up_says_so_and_one_that_waits_starts_when_its_device_is_free(head, witness):
    with head.outsider(witness, "0,1,2,3,4,5,6,7") as outsider:
        assert head.tasks("late", witness) == ["WaitTimeout", 1, 0]
        with head.running(sys.executable, TASKS, "tasks", str(witness), "1", stderr=subprocess.PIPE) as child:
            assert nodes.eventually(lambda: "Ray: train" in head.gpuguard("queue").stdout, 60)
            outsider.terminate()
            answer, complaints = child.communicate(timeout=120)

    assert len(found_in(answer)["answer"]) == 1, complaints


def test_a_submitted_command_runs_on_what_ray_gave_and_its_output_is_shown(head: Head, witness: Path) -> None:
    script = "pwd; echo on $CUDA_VISIBLE_DEVICES; echo words >&2; echo claim $GPUGUARD_CLAIM; exit 3"
    done = head.gpuguard("submit", "--via", "ray", "--attach", "-n", "2", "--", "sh", "-c", script)

    lines = done.stdout.splitlines()
    assert {str(head.place), "words"} <= set(lines), done.stderr
    assert next(line for line in lines if line.startswith("on ")).count(",") == 1
    assert next(line for line in lines if line.startswith("claim ")) != "claim "
    assert done.returncode == 1


def test_ctrl_c_ends_the_command_which_may_save_its_state(head: Head, witness: Path) -> None:
    script = f"trap 'touch {witness}/saved; exit 0' TERM; touch {witness}/up; while :; do sleep 0.1; done"
    words = ["submit", "--via", "ray", "--attach", "--", "sh", "-c", script]
    with head.running(sys.executable, "-m", "gpuguard", *words, stderr=subprocess.PIPE) as child:
        assert nodes.eventually((witness / "up").exists, 60)
        child.send_signal(signal.SIGINT)
        _, complaints = child.communicate(timeout=120)

    assert child.returncode == 130, complaints
    assert nodes.eventually((witness / "saved").exists, 60)
    assert nodes.eventually(lambda: not json.loads(head.gpuguard("who", "--json").stdout)["devices"][0]["claims"])


def test_without_the_token_a_submission_is_refused_in_words(head: Head) -> None:
    done = head.gpuguard("submit", "--via", "ray", "--", "true", RAY_AUTH_TOKEN="x" * 64)

    assert done.returncode == 125
    assert "Ray refuses" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
