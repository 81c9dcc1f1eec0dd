"""The exit status of a job is the one that it has without gpuguard before it: every code, every signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Each job in a process of its own, forked from one that has imported everything: 320 of them take seconds.
MANY = """
import os, sys
from pathlib import Path
sys.path.insert(0, "{tests}")
from wrapped import FileBackend, Request, a_directory, acquire, become_subreaper, run
become_subreaper()
place = Path(sys.argv[1])
os.environ["GPUGUARD_EVENTS"] = "/dev/null"
(place / "samples").write_text("")
for script in sys.stdin.read().splitlines():
    pid = os.fork()
    if pid == 0:
        backend = FileBackend(place)
        claim = acquire(backend, Request(devices=("0",)), a_directory(place / "claims"))
        ended = run.run(["sh", "-c", script], claim, backend)
        os._exit(ended.status if ended.die_of is None else 255)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
SIGNALS = sorted(signal.valid_signals() - STOPPING)


def statuses(place: Path, scripts: list[str]) -> list[int]:
    program = MANY.format(tests=Path(__file__).parent)
    words = [sys.executable, "-c", program, str(place)]
    # Against a hang: 256 jobs take 15 s, and were seen to take more than 60 where others compute.
    done = subprocess.run(words, input="\n".join(scripts), stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [int(line) for line in done.stdout.split()]


def test_every_exit_code_comes_through(wrapped):
    assert statuses(wrapped.place, [f"exit {code}" for code in range(256)]) == list(range(256))


def test_every_signal_becomes_what_a_shell_says_of_it(wrapped):
    scripts = [f"ulimit -c 0; kill -{int(signum)} $$; exit 7" for signum in SIGNALS]
    bare = [subprocess.run(["sh", "-c", script]).returncode for script in scripts]

    assert statuses(wrapped.place, scripts) == [128 - code if code < 0 else code for code in bare]
    assert sum(code < 0 for code in bare) > 50


def test_a_program_that_does_not_exist_is_127_with_advice(wrapped):
    status, _, err = wrapped.run("nonesuch-program", "-x")

    assert status == 127
    assert "gpuguard: nonesuch-program: command not found.  Is it installed, and in PATH?\n" in err
    assert not wrapped.is_claimed()


@pytest.mark.parametrize(("program", "how"), [("train.py", "python train.py"), ("job", "./job")])
def test_a_file_of_this_directory_is_127_with_the_way_to_start_it(wrapped, tmp_path, monkeypatch, program, how):
    """A shell does not find it either, without a path before it."""
    (tmp_path / program).write_text("#!/bin/sh\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.chdir(tmp_path)

    status, _, err = wrapped.run(program)

    assert (status, f"not found in PATH, but here.  Write `gpuguard run ... -- {how}`." in err) == (127, True)


def test_a_variable_before_the_command_is_127_with_advice(wrapped):
    status, _, err = wrapped.run("NCCL_DEBUG=INFO", "true")

    assert (status, "To set a variable: env NCCL_DEBUG=INFO CMD." in err) == (127, True)


def test_an_empty_word_as_program_is_127(wrapped):
    assert wrapped.run("")[0] == 127


def test_a_file_that_is_not_executable_is_126_with_advice(wrapped, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print()")

    status, _, err = wrapped.run(str(script))

    assert status == 126
    assert f"Permission denied.  Write `gpuguard run ... -- python {script}`." in err


def test_a_script_without_a_first_line_is_126_with_advice(wrapped, tmp_path):
    script = tmp_path / "job"
    script.write_text("echo hello\n")
    script.chmod(0o755)

    status, _, err = wrapped.run(str(script))

    assert (status, "A script needs a first line such as #!/bin/sh." in err) == (126, True)


def test_a_script_whose_interpreter_is_missing_is_127_and_says_so(wrapped, tmp_path):
    script = tmp_path / "job"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    status, _, err = wrapped.run(str(script))

    assert (status, "the interpreter that its first line names does not exist" in err) == (127, True)


def test_a_directory_is_126(wrapped, tmp_path):
    assert wrapped.run(str(tmp_path))[0] == 126


def test_the_status_is_right_when_whoever_started_us_ignores_the_end_of_children(wrapped):
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    status, out, _ = wrapped.run("grep", "SigIgn", "/proc/self/status", "/no/such/file", preexec_fn=ignore)

    assert status == 2
    assert int(out.split()[1], 16) & 1 << signal.SIGCHLD - 1, "the job inherits it as without us"


def test_a_job_that_interrupts_itself_is_130(wrapped):
    # Nobody pressed Ctrl-C: whoever waits for us sees an ordinary exit.
    assert wrapped.run("sh", "-c", "kill -INT $$")[0] == 130


def test_a_job_that_dies_of_an_interrupt_sent_to_us_makes_us_die_of_it(wrapped):
    wrapper = wrapped.start("sh", "-c", "echo started; exec sleep 60")
    assert wrapper.stdout and wrapper.stdout.readline() == "started\n"
    os.kill(wrapper.pid, signal.SIGINT)
    wrapper.communicate(timeout=20)

    assert wrapper.returncode == -signal.SIGINT
    assert not wrapped.is_claimed()
