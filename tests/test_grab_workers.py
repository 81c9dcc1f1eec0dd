"""Workers of a program that claims by grab_gpus(): those that run its lines again, and those that ran before it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from typing import Any

import pytest
from grabbing import a_node, claimed, indices, visible  # noqa: F401  (a fixture)

import gpuguard


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_run_the_lines_of_the_script_again_have_its_claim_and_can_divide_it(tmp_path, method):
    (tmp_path / "train.py").write_text(f"""
import gpuguard, multiprocessing
claim = gpuguard.grab_gpus(2, wait=None)

def work(both, found):
    both.wait()  # each while the other one lives
    with gpuguard.claim(1) as part:
        both.wait()
        found.put(([device.index for device in claim], part[0].index))

if __name__ == "__main__":
    method = multiprocessing.get_context({method!r})
    both, found = method.Barrier(2, timeout=30), method.Queue()
    workers = [method.Process(target=work, args=(both, found)) for _ in range(2)]
    for worker in workers:
        worker.start()
    print(sorted(found.get(timeout=30) for _ in workers))
    for worker in workers:
        worker.join()
""")
    words = [sys.executable, tmp_path / "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)

    assert done.stdout == "[([2, 3], 2), ([2, 3], 3)]\n", done.stderr


def test_what_the_script_has_is_told_without_a_lock_and_given_back_by_the_script_alone(monkeypatch):
    holds = "import gpuguard, sys; print(gpuguard.grab_gpus(2).id, flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", holds]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as main:
        monkeypatch.setenv("GPUGUARD_CLAIM", main.stdout.readline().strip())
        worker: dict[str, Any] = {"__name__": "__mp_main__"}
        exec("import gpuguard; claim = gpuguard.grab_gpus(2)", worker)  # as multiprocessing runs the script
        worker["claim"].release()

        assert (indices(worker["claim"]), worker["claim"].locks, visible()) == ([2, 3], (), "2,3")
        assert claimed() == [2, 3]
        main.communicate()


@pytest.mark.parametrize(("rank", "found"), [("1", ["[0, 1, 2, 3]"] * 2), ("", ["[0, 1, 2, 3]", "refused"])])
def test_ranks_that_the_script_starts_as_commands_have_its_claim(tmp_path, rank, found):
    """As the strategy "ddp" of Lightning does; other commands inside a claim exclude each other."""
    (tmp_path / "train.py").write_text("""
import gpuguard, sys
try:
    print([device.index for device in gpuguard.grab_gpus(4)], flush=True)
except gpuguard.NotEnoughGpus:
    print("refused", flush=True)
sys.stdin.readline()
""")
    (tmp_path / "main.py").write_text(f"""
import gpuguard, os, subprocess, sys
gpuguard.grab_gpus(4)
environment = {{**os.environ, **({{"LOCAL_RANK": {rank!r}}} if {rank!r} else {{}})}}
words = [sys.executable, {str(tmp_path / "train.py")!r}]
pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}}
ranks, found = [], []
for _ in range(2):
    ranks.append(subprocess.Popen(words, env=environment, **pipes))
    found.append(ranks[-1].stdout.readline())
print(*found, sep="", end="")
for each in ranks:
    each.communicate()
""")
    words = [sys.executable, tmp_path / "main.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)

    assert done.stdout.splitlines() == found, done.stderr


@pytest.mark.parametrize(("method", "warned"), [("spawn", False), ("forkserver", True)])
def test_a_claim_that_workers_of_a_fork_server_will_not_see_warns(tmp_path, method, warned):
    (tmp_path / "train.py").write_text(f"""
import gpuguard, multiprocessing, os

if __name__ == "__main__":
    method = multiprocessing.get_context({method!r})
    gpuguard.grab_gpus(1)
    for _ in range(2):
        worker = method.Process(target=os.getpid)
        worker.start()
        worker.join()
        gpuguard.grab_gpus(1)  # where it warns
""")
    words = [sys.executable, tmp_path / "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)

    assert (done.returncode, ": RuntimeWarning: the fork server" in done.stderr) == (0, warned), done.stderr
    assert ("where it warns" in done.stderr) == warned


FORERUNNERS = {
    "loky.reusable_executor": lambda pid: types.SimpleNamespace(
        _executor=types.SimpleNamespace(_processes={pid: None})
    ),
    "multiprocessing.forkserver": lambda pid: types.SimpleNamespace(
        _forkserver=types.SimpleNamespace(_forkserver_pid=pid)
    ),
}


@pytest.mark.parametrize("kind", FORERUNNERS)
@pytest.mark.parametrize("others", ["", "CUDA_VISIBLE_DEVICES=3", "ended"])
def test_what_runs_already_and_is_used_again_warns_unless_it_sees_the_same_devices(monkeypatch, kind, others):
    environment = dict(os.environ) | dict([others.split("=")] if "=" in others else ())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, env=environment) as worker:
        monkeypatch.setitem(sys.modules, kind, FORERUNNERS[kind](worker.pid))
        if others == "ended":
            worker.communicate()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gpuguard.grab_gpus(1)

    assert [each.filename for each in caught] == ([] if others else [__file__])


def test_a_rank_without_a_claim_around_it_claims(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert indices(gpuguard.grab_gpus(1)) == claimed() == [3]
