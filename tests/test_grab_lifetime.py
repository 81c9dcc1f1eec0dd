"""How long the devices of grab_gpus() and claim() are ours: processes, workers, threads, blocks, claims in claims."""

import copy
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from grab_node import NAMES, a_node, claimed, indices, script, visible  # noqa: F401  (a fixture)
from nodes import Gpuguard, eventually

import gpuguard
from gpuguard import api
from gpuguard.errors import AlreadyClaimed, ImpossibleRequest, NotEnoughGpus


def program(code: str) -> subprocess.Popen[str]:
    """A program whose input and output are ours."""
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def started(code: str) -> subprocess.Popen[str]:
    """A program that has said what it has to say, and waits for its input to end."""
    process = program(f"{code}; print('ready', flush=True); import sys; sys.stdin.read()")
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def run_file(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("end", ["ends", "is killed"])
def test_the_claim_ends_with_the_process(end):
    with started("import gpuguard; gpuguard.grab_gpus(2)") as process:
        during = claimed()
        process.kill() if end == "is killed" else process.communicate()
        process.wait()

    assert (len(during), claimed()) == (2, [])


def test_a_claim_that_the_program_has_forgotten_is_kept():
    with started("import gc, gpuguard; gpuguard.grab_gpus(2); gc.collect()"):
        assert len(claimed()) == 2


def test_a_forked_worker_keeps_the_claim_when_the_parent_is_killed():
    code = """
import gpuguard, multiprocessing, os, time
gpuguard.grab_gpus(2)
worker = multiprocessing.get_context("fork").Process(target=lambda: (print(os.getpid(), flush=True), time.sleep(100)))
worker.start()
worker.join()
"""
    with program(code) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        during = claimed()
        os.kill(worker, 9)

    assert len(during) == 2
    assert eventually(lambda: claimed() == [])


@pytest.mark.parametrize(("pass_fds", "held"), [("claim.pass_fds", 1), ("()", 0)])
def test_a_child_keeps_the_claim_beyond_the_end_of_its_parent_only_with_pass_fds(pass_fds, held):
    child = "import sys; print('ready', flush=True); sys.stdin.read()"
    code = f"""
import gpuguard, os, subprocess, sys
claim = gpuguard.grab_gpus()
subprocess.Popen([sys.executable, "-c", {child!r}], pass_fds={pass_fds})
os._exit(0)
"""
    with program(code) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.wait()
        during = claimed()

    assert len(during) == held
    assert eventually(lambda: claimed() == [])


SLEEPING = "import sys; print('ready', flush=True); sys.stdin.read()"
BECOMES = "os.execvp(sys.executable, [sys.executable, '-c', code])"
STARTS = {
    "fork and exec": f"os._exit(0) if os.fork() else {BECOMES}",
    "subprocess": "subprocess.Popen([sys.executable, '-c', code])",
}


def after(statement: str) -> subprocess.Popen[str]:
    """What a program has become or left that has claimed two devices and then runs *statement*."""
    code = f"import gpuguard, os, subprocess, sys; code = {SLEEPING!r}; gpuguard.grab_gpus(2)"
    process = program(f"{code}\n{statement}\nos._exit(0)")
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_a_process_that_becomes_another_program_keeps_its_claim_and_ends_it():
    with after(BECOMES) as trainer:
        during = claimed()
        trainer.communicate()

    assert (during, claimed()) == ([2, 3], [])


@pytest.mark.parametrize("start", STARTS)
def test_a_program_that_is_started_does_not_keep_the_claim_beyond_the_end_of_its_parent(start):
    with after(STARTS[start]) as parent:
        parent.wait()
        assert eventually(lambda: claimed() == [])
        parent.communicate()


def test_a_claim_inside_of_a_program_that_the_process_has_become_is_a_part_of_its_own():
    inner = "import gpuguard; print(sorted(device.index for device in gpuguard.grab_gpus(1)))"
    become = f"os.execv(sys.executable, [sys.executable, '-c', {inner!r}])"

    assert script(f"import gpuguard, os, sys; gpuguard.grab_gpus(1); {become}").stdout == "[3]\n"


def test_released_devices_are_free_and_can_be_grabbed_again_and_the_claims_take_no_memory():
    for _ in range(3):
        assert len(gpuguard.grab_gpus(4)) == 4
        api._made[-1].claim.release()

    assert (claimed(), len(api._made)) == ([], 0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_claim_has_no_copies_that_seem_to_hold_it_and_its_devices_have(copied):
    with gpuguard.claim(2) as claim:
        with pytest.raises(TypeError, match="pickle or copy its GPUs instead"):
            copied(claim)

        assert pickle.loads(pickle.dumps(claim.devices)) == claim.devices


def test_the_same_call_again_returns_the_claim_that_the_process_has():
    first = gpuguard.grab_gpus(1)
    with gpuguard.claim(2):
        within = visible()
        again = gpuguard.grab_gpus(num_gpus=1, note="of no matter")

    assert again is first
    assert (claimed(), within, visible()) == ([3], "0,1", "3")


def test_threads_that_make_the_same_call_at_once_get_one_claim():
    barrier, claims = threading.Barrier(3), []

    def grab() -> None:
        barrier.wait()
        claims.append(gpuguard.grab_gpus(1))

    threads = [threading.Thread(target=grab) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert claims == [claims[0]] * 3 and claimed() == [3]


def test_a_forked_child_does_not_wait_for_a_call_of_its_parent():
    """A thread of the parent may be inside grab_gpus() at the fork, and does not exist in the child."""
    code = (
        "import gpuguard, os, threading\n"
        "waits = threading.Event()\n"
        "grab = lambda: gpuguard.grab_gpus(1, wait=50, on_wait=lambda missing: waits.set())\n"
        "threading.Thread(target=grab, daemon=True).start()\n"
        "waits.wait(50)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    gpuguard.grab_gpus(1, strict=False)\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "os._exit(0)\n"
    )
    with gpuguard.claim(4):
        done = script(code, GPUGUARD_CLAIM="")

    assert done.stdout == "7\n"


def test_where_cuda_runs_by_now_the_same_call_still_returns_the_claim(monkeypatch, tmp_path):
    first, device = gpuguard.grab_gpus(2), tmp_path / "nvidia-uvm"
    device.touch()
    monkeypatch.setattr(api, "CUDA_DEVICES", (str(device),))
    with device.open():
        assert gpuguard.grab_gpus(2) is first


@pytest.mark.parametrize("cuda", [True, False])
def test_a_claim_that_was_lost_is_made_anew_unless_cuda_runs_on_its_gpu(monkeypatch, cuda):
    first = gpuguard.grab_gpus(1)
    monkeypatch.setattr(first, "reassert", lost)
    monkeypatch.setattr(api, "cuda_runs", lambda: cuda)

    if cuda:
        with pytest.raises(gpuguard.ClaimLost):
            gpuguard.grab_gpus(1)
    else:
        assert gpuguard.grab_gpus(1) is not first


def lost() -> None:
    raise gpuguard.ClaimLost("the program closed the descriptor")


def test_another_request_says_what_the_process_has_already_by_which_line_and_how_to_get_more():
    first = gpuguard.grab_gpus(1)
    with pytest.raises(AlreadyClaimed) as caught:
        gpuguard.grab_gpus(2)

    assert caught.value.claim is first
    assert re.search(
        r"this process has GPU 3 since .*, by test_grab_lifetime.py:\d+: first = gpuguard", str(caught.value)
    )
    assert "release() that claim first, or add further=True" in str(caught.value)
    with pytest.warns(RuntimeWarning, match="this process has GPU 3"):
        assert gpuguard.grab_gpus(2, strict=False) is first
    assert claimed() == [3]


def test_further_devices_are_had_on_request_and_what_the_process_has_itself_is_said_when_they_are_too_few():
    first, second = gpuguard.grab_gpus(2), gpuguard.grab_gpus(2, further=True)

    assert sorted(indices(first) + indices(second)) == [0, 1, 2, 3]
    assert visible() == ",".join(map(str, indices(second)))
    with pytest.raises(NotEnoughGpus, match=r"This process itself has GPU 2, 3 since .*; GPU 0, 1 since "):
        gpuguard.grab_gpus(2, further=True)


def test_a_claim_that_was_released_from_outside_is_made_anew():
    first = gpuguard.grab_gpus(1)
    subprocess.run([sys.executable, "-m", "gpuguard", "release", first.id], capture_output=True, timeout=60, check=True)
    again = gpuguard.grab_gpus(1)

    assert (again is first, indices(again), claimed()) == (False, [3], [3])


def test_a_worker_that_is_used_again_keeps_its_devices_and_two_workers_have_different_ones():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        tasks = [pool.apply_async(grab_as_a_task) for _ in range(6)]
        found = {task.get(timeout=60) for task in tasks}

    assert len({pid for pid, _ in found}) == len(found) == len({device for _, device in found})


def grab_as_a_task() -> tuple[int, int]:
    return os.getpid(), gpuguard.grab_gpus(1, wait=None)[0].index


def test_a_refusal_shows_the_line_of_the_program_and_no_more_than_one_of_gpuguard():
    done = script("import gpuguard\ngpuguard.grab_gpus(9)\n")

    assert done.stderr.count("File ") == 2 and 'File "<string>", line 2' in done.stderr
    assert "another exception" not in done.stderr


def test_a_bound_that_the_program_sets_after_its_first_claim_holds_for_all_later_ones():
    gpuguard.grab_gpus(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"

    with pytest.raises(AlreadyClaimed):
        gpuguard.grab_gpus(1)
    assert indices(gpuguard.grab_gpus(1, further=True)) == [1]
    with pytest.raises(NotEnoughGpus, match="GPU 1: claimed by"):
        gpuguard.grab_gpus(1, further=True)


def test_a_released_claim_leaves_the_environment_as_it_was_before():
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    first = gpuguard.grab_gpus(1)
    second = gpuguard.grab_gpus(1, further=True)
    seen = [visible()]
    for claim in (second, first):
        claim.release()
        seen.append(visible())

    assert seen == ["0", "1", "0,1"]
    assert [name for name in NAMES if name in os.environ] == ["CUDA_VISIBLE_DEVICES"]


def test_what_the_program_has_set_itself_since_its_claim_stays_after_the_release():
    claim = gpuguard.grab_gpus(2)
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    claim.release()

    assert visible() == "3" and "GPUGUARD_CLAIM" not in os.environ


def test_two_threads_at_once_get_different_devices_and_leave_the_environment_as_it_was():
    found: list[int] = []
    both = threading.Barrier(2, timeout=60)

    def work() -> None:
        both.wait()
        with gpuguard.claim(2) as devices:
            found.extend(indices(devices))
            both.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found) == [0, 1, 2, 3]
    assert not [name for name in NAMES if name in os.environ]
    assert claimed() == []


def grab_in_worker(number: int) -> list[int]:
    with gpuguard.claim(number) as devices:
        return indices(devices)


def test_a_forked_worker_that_claims_takes_its_part_of_the_claim_of_its_parent():
    outer = gpuguard.grab_gpus(2, gpu_select=[0, 1])
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(grab_in_worker, (2,)) == [0, 1]
        with pytest.raises(ImpossibleRequest):
            pool.apply(grab_in_worker, (3,))

    assert indices(outer) == claimed() == [0, 1]


def test_inside_gpuguard_run_a_subset_of_its_devices_is_taken(tmp_path):
    code = "import gpuguard as g; a, b = g.grab_gpus(1), g.grab_gpus(1, further=True); print(a[0].index, b[0].index)"
    done = Gpuguard(tmp_path, None)("run", "--devices", "0,2", "--", sys.executable, "-c", code)
    too_many = Gpuguard(tmp_path, None)("run", "--devices", "0,2", "--", sys.executable, "-c", TOO_MANY)

    assert sorted(done.stdout.split()) == ["0", "2"]
    assert too_many.stdout == "outside the claim 0,2\n"


TOO_MANY = """
import gpuguard, os
try:
    gpuguard.grab_gpus(3)
except gpuguard.ImpossibleRequest as error:
    print("outside the claim" if f"outside the claim {os.environ['GPUGUARD_CLAIM']}" in str(error) else error, end=" ")
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize(("number", "error"), [(1, ZeroDivisionError), (3, NotEnoughGpus)], ids=["fails", "no begin"])
def test_a_with_block_that_fails_or_never_began_leaves_everything_as_it_was(number, error):
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    with pytest.raises(error), gpuguard.claim(number):
        assert visible() == "1"
        raise ZeroDivisionError

    assert (visible(), claimed()) == ("0,1", [])


def test_with_blocks_in_each_other_have_different_devices():
    with gpuguard.claim(1) as outer:
        with gpuguard.claim(3) as inner:
            within = visible()
        after = visible()

    assert (within, after, visible()) == ("0,1,2", "3", None)
    assert set(indices(outer)).isdisjoint(indices(inner))


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("large", [False, True], ids=["copied", "not copied"])
def test_a_program_without_standard_streams_gets_its_devices(closed, large, tmp_path):
    grown = "more = bytearray(b'1' * 2**25); " if large else ""
    code = f"{grown}import gpuguard, sys; said = str(gpuguard.grab_gpus(2)); open(sys.argv[1], 'w').write(said)"
    shell = f'exec "$0" -c "$1" "$2" {closed}'
    subprocess.run(["sh", "-c", shell, sys.executable, code, str(tmp_path / "said")], timeout=60, check=True)

    assert (tmp_path / "said").read_text().endswith(" of 2, 3>")


def test_a_program_that_waits_for_any_child_after_a_claim_finds_its_own():
    code = """
import gpuguard, os, time
gpuguard.grab_gpus(1)
if (child := os.fork()) == 0:
    time.sleep(0.2)  # longer than the worker takes to end
    os._exit(3)
print(os.wait() == (child, 3 << 8))
"""
    assert script(code).stdout == "True\n"


def test_a_program_that_closes_all_descriptors_loses_its_claim_and_none_of_its_files():
    code = """
import gpuguard, os
claim = gpuguard.grab_gpus(1)
os.closerange(3, 64)
try:
    claim.reassert()
except gpuguard.ClaimLost:
    files = [os.memfd_create("of the program") for _ in range(8)]
    claim.release()
    print([os.write(file, b"!") for file in files] == [1] * 8)
"""
    assert (script(code).stdout, claimed()) == ("True\n", [])


def test_an_interrupt_while_a_claim_is_being_made_leaves_no_device_claimed(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("gpuguard.backends.spawn.Channel.close", interrupted)
        gpuguard.grab_gpus(1)

    assert claimed() == []


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
    both, found = method.Barrier(2, timeout=60), method.Queue()
    workers = [method.Process(target=work, args=(both, found)) for _ in range(2)]
    for worker in workers:
        worker.start()
    print(sorted(found.get(timeout=60) for _ in workers))
    for worker in workers:
        worker.join()
""")
    done = run_file(tmp_path / "train.py")

    assert done.stdout == "[([2, 3], 2), ([2, 3], 3)]\n", done.stderr


def test_what_the_script_has_is_told_without_a_lock_and_given_back_by_the_script_alone(monkeypatch):
    holds = "import gpuguard, sys; print(gpuguard.grab_gpus(2).id, flush=True); sys.stdin.read()"
    with program(holds) as main:
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
for rank in ranks:
    rank.communicate()
""")
    done = run_file(tmp_path / "main.py")

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
        gpuguard.grab_gpus(1, further=True)  # where it warns
""")
    done = run_file(tmp_path / "train.py")

    assert (done.returncode, ": RuntimeWarning: the fork server" in done.stderr) == (0, warned), done.stderr
    assert ("where it warns" in done.stderr) == warned


FORERUNNERS = {
    "from multiprocessing.forkserver import main": True,
    "joblib.externals.loky.backend.popen_loky_posix": True,
    "train.py": False,
}


@pytest.mark.parametrize(("words", "is_used_again"), FORERUNNERS.items())
@pytest.mark.parametrize("others", ["", "CUDA_VISIBLE_DEVICES=3", "ended"])
def test_what_runs_already_and_is_used_again_warns_unless_it_sees_the_same_devices(words, is_used_again, others):
    environment = dict(os.environ) | dict([others.split("=")] if "=" in others else ())
    command = [sys.executable, "-c", "print(flush=True); input()", words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **pipes) as worker:
        assert worker.stdout and worker.stdout.readline()
        if others == "ended":
            worker.communicate()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            gpuguard.grab_gpus(1)

    assert [warning.filename for warning in caught] == ([__file__] if is_used_again and not others else [])


def test_a_rank_without_a_claim_around_it_claims(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert indices(gpuguard.grab_gpus(1)) == claimed() == [3]


FORKS = """
import fcntl, os, signal
import gpuguard

def forks(*words, really={module}.{name}):
    {module}.{name} = really
    if not (pid := os.fork()):
        signal.alarm(60)
        {child}
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
    return really(*words)

claim = gpuguard.grab_gpus()
{module}.{name} = forks
{parent}
"""


@pytest.mark.parametrize(
    ("module", "name", "parent", "child"),
    [
        ("os", "putenv", "gpuguard.grab_gpus(further=True)", "gpuguard.grab_gpus(0)"),
        ("fcntl", "flock", "claim.release()", "claim.release()"),
    ],
)
def test_a_child_that_is_forked_while_a_thread_claims_or_releases_can_do_both(module, name, parent, child):
    ended = script(FORKS.format(module=module, name=name, parent=parent, child=child))

    assert (ended.stdout, ended.stderr) == ("0\n", "")


LOOKS = """
import fcntl, os
import gpuguard

told, tells = os.pipe()

def forks(descriptor, operation, really=fcntl.flock):
    really(descriptor, operation)
    if operation & fcntl.LOCK_SH and not os.fork():
        os.close(tells)
        os.read(told, 1)
        os._exit(0)

gpuguard.grab_gpus(4).release()
fcntl.flock = forks
gpuguard.who()
fcntl.flock = forks.__defaults__[0]
print(len(gpuguard.grab_gpus(4)))
"""


def test_a_child_that_is_forked_while_a_thread_looks_at_the_claims_holds_no_lock():
    ended = script(LOOKS)

    assert (ended.stdout, ended.stderr) == ("4\n", "")
