"""A job behind gpuguard obeys the terminal as a bare one: real pseudo-terminals, real shells."""

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nodes import until
from proc import state
from supervised_job import Wrapped, content

pytestmark = pytest.mark.terminal

SHELLS = {"bash": ("bash", "--norc", "--noprofile", "--noediting", "-i"), "sh": ("sh", "-i")}
PROMPT = "ready> "
# Counts the signal that it is named, says so, and ends when it has seen as many as it is told.
COUNT = """
import os, signal, sys, time
name, enough, seen = sys.argv[1], int(sys.argv[2]), []
def count(*_):
    seen.append(1)
    os.write(1, b"<seen %d>" % len(seen))
signal.signal(getattr(signal, "SIG" + name), count)
os.write(1, b"<started>")
while len(seen) < enough:
    time.sleep(0.01)
time.sleep(0.3)
os.write(1, b"<total %d>" % len(seen))
"""
# Not a loop of short sleeps, because without gpuguard too a Ctrl-Z that meets dash in vfork leaves it hanging, and sh
# goes on after a Ctrl-C that its child came too late for.
SLEEP = "echo '<started>'; exec sleep 60"
# Says who it is, and ends with a status once PLACE/end is there.
WAIT = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
(place / "pids").write_text(f"{os.getppid()} {os.getpid()}")
os.write(1, b"<started>")
while not (place / "end").exists():
    time.sleep(0.01)
sys.exit(int(sys.argv[2]))
"""


class Terminal:
    """A person at a terminal."""

    def __init__(self, *shell: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
            os.execvpe(shell[0], list(shell), {**os.environ, "PS1": PROMPT, "ENV": "", "HISTFILE": ""})
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Wait for *pattern* on the screen, and forget everything up to there."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            if not select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                pytest.fail(f"{pattern!r} did not appear, but {self.shown!r}")
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found

    def begin(self, command: str) -> None:
        """Type a command line, and wait until its program says that it has started."""
        self.type(f"{command}\n")
        self.expect("<started>")

    def stop(self) -> None:
        """Stop the job, and wait for the prompt."""
        self.type("\x1a")
        self.expect("(?i)stopped")
        self.expect(PROMPT)

    def status(self) -> int:
        """$? of the last command, once its prompt is there."""
        self.expect(PROMPT)
        self.type("echo status=$?\n")
        return int(self.expect(r"status=(\d+)")[1])

    def close(self) -> None:
        """Hang up, and end what has not ended of it."""
        for _ in range(2):
            with contextlib.suppress(OSError):
                os.close(self.master)
        session = sessions(self.pid)
        for pid in [self.pid, *session]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def sessions(leader: int) -> list[int]:
    """The pids of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def states_of(terminal: Terminal, name: str) -> list[str]:
    named = [pid for pid in sessions(terminal.pid) if content(Path(f"/proc/{pid}/comm")).strip() == name]
    return [state(pid) for pid in named]


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    at = Terminal(*SHELLS[getattr(request, "param", "bash")])
    at.expect(PROMPT)
    yield at
    at.close()


both_shells = pytest.mark.parametrize("terminal", SHELLS, indirect=True)


def line(wrapped: Wrapped, *command: str, bare: bool = False, **options: object) -> str:
    """What to type: the name of a file with the command line, so that the terminal's echo shows nothing of it."""
    words = command if bare else wrapped.words(*command, **options)
    path = wrapped.place / "job"
    path.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    path.chmod(0o755)
    return str(path)


def waiting(wrapped: Wrapped, status: int = 0) -> str:
    return line(wrapped, sys.executable, "-c", WAIT, str(wrapped.place), str(status))


def pids(wrapped: Wrapped) -> tuple[int, int]:
    """Of the wrapper and of its waiting() job."""
    wrapper, job = content(wrapped.place / "pids").split()
    return int(wrapper), int(job)


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "wrapped"])
@pytest.mark.parametrize(("key", "name", "times"), [("\x03", "INT", 2), ("\x1c", "QUIT", 1), ("\x1a", "TSTP", 1)])
def test_a_key_reaches_the_job_exactly_once(terminal, wrapped, key, name, times, bare):
    terminal.begin(line(wrapped, sys.executable, "-c", COUNT, name, str(times), bare=bare))
    for number in range(times):
        terminal.type(key)
        terminal.expect(f"<seen {number + 1}>")

    assert terminal.expect(r"<total (\d+)>")[1] == str(times)
    assert terminal.status() == 0


@both_shells
@pytest.mark.parametrize(("key", "status"), [("\x03", 130), ("\x1c", 131)])
def test_a_key_that_ends_the_job_gives_the_shells_status(terminal, wrapped, key, status):
    terminal.type("ulimit -c 0\n" + line(wrapped, "sh", "-c", SLEEP) + "\n")
    terminal.expect("<started>\r")
    terminal.type(key)
    terminal.expect(r"\^.")

    assert terminal.status() == status
    until(lambda: not wrapped.is_claimed())


@pytest.mark.parametrize("interpreter", ["sh", "bash"])
def test_an_interrupt_stops_the_script_around_the_job(terminal, wrapped, tmp_path, interpreter):
    script = tmp_path / "script"
    script.write_text(f"{line(wrapped, 'sh', '-c', SLEEP)}\necho '<went' 'on>'\n")
    terminal.begin(f"{interpreter} {script}")
    terminal.type("\x03")
    terminal.expect(PROMPT)
    terminal.type("echo '<next>'\n")

    terminal.expect("<next>\r")
    assert "<went on>" not in terminal.shown
    assert not wrapped.is_claimed()


@both_shells
def test_a_stopped_job_gives_the_prompt_back_keeps_its_claim_and_goes_on_with_fg(terminal, wrapped, tmp_path):
    terminal.begin(waiting(wrapped, 5))
    for _ in range(4):
        terminal.stop()
        assert state(pids(wrapped)[1]) == "T"
        assert wrapped.is_claimed()
        terminal.type("fg\n")
        terminal.expect("/job")  # the shell names the job that it continues
        until(lambda: [state(pid) for pid in pids(wrapped)] == ["S", "S"])

    (tmp_path / "end").touch()
    assert terminal.status() == 5
    assert not wrapped.is_claimed()


def test_a_stopped_job_goes_on_in_the_background(terminal, wrapped, tmp_path):
    terminal.begin(waiting(wrapped, 7))
    terminal.stop()
    (tmp_path / "end").touch()
    terminal.type("bg; wait %1\n")
    terminal.expect("wait %1")

    assert terminal.status() == 7


def test_continuing_us_alone_continues_the_job(terminal, wrapped, tmp_path):
    terminal.begin(waiting(wrapped))
    terminal.type("\x1a")
    terminal.expect("Stopped")
    wrapper, job = pids(wrapped)
    until(lambda: state(wrapper) == "T")
    os.kill(wrapper, signal.SIGCONT)

    until(lambda: state(job) != "T")
    (tmp_path / "end").touch()


def test_a_job_that_is_paused_by_its_pid_does_not_stop_us_for_good(terminal, wrapped, tmp_path):
    terminal.begin(waiting(wrapped))
    _, job = pids(wrapped)
    os.kill(job, signal.SIGSTOP)
    until(lambda: state(job) == "T")
    os.kill(job, signal.SIGCONT)
    (tmp_path / "end").touch()

    assert terminal.status() == 0


def test_a_job_in_the_background_that_reads_is_stopped_and_reads_after_fg(terminal, wrapped):
    terminal.type(line(wrapped, "sh", "-c", 'read word; echo "<read $word>"') + " &\n")
    terminal.expect(PROMPT)
    until(lambda: {state(pid) for pid in sessions(terminal.pid) if pid != terminal.pid} == {"T"})
    terminal.type("\n")
    terminal.expect("Stopped")
    terminal.type("fg\n")
    terminal.expect("/job")
    terminal.type("hello\n")

    terminal.expect("<read hello>")
    assert terminal.status() == 0


def test_our_messages_do_not_stop_a_silent_job_in_the_background(terminal, wrapped):
    terminal.type("stty tostop\n")
    terminal.expect(PROMPT)
    terminal.type(line(wrapped, "sleep", "60", time_limit=0.5) + " & wait $!; echo status=$?\n")

    terminal.expect("the time limit is over")
    # The stand-in's own last line is written after the signals are free again, by the same process.
    assert terminal.expect(r"status=(\d+)")[1] == "124"


def test_a_shell_as_a_job_has_its_own_job_control(terminal, wrapped):
    terminal.type(line(wrapped, "bash", "--norc", "--noprofile", "--noediting", "-i") + "\n")
    terminal.expect(PROMPT)
    terminal.type("echo $GPUGUARD_CLAIM '<in''side>'\n")
    terminal.expect(r"[0-9a-f]{8} <inside>")
    terminal.type("sleep 60\n")
    until(lambda: states_of(terminal, "sleep") == ["S"])
    terminal.stop()
    terminal.type("fg\n")
    until(lambda: states_of(terminal, "sleep") == ["S"])
    terminal.type("\x03")
    terminal.expect(PROMPT)
    terminal.type("exit 9\n")
    terminal.expect("ended: ")

    assert terminal.status() == 9


def test_a_hang_up_ends_the_job_and_its_claim(terminal, wrapped, tmp_path):
    terminal.type(line(wrapped, "sh", "-c", f"echo $$ > {tmp_path}/pid; {SLEEP}") + "\n")
    terminal.expect("<started>\r")
    os.close(terminal.master)

    until(lambda: not Path(f"/proc/{content(tmp_path / 'pid').strip()}").exists())
    until(lambda: not wrapped.is_claimed())


# Where no shell stands before us: `ssh -t host gpuguard run ...`, `tmux new gpuguard run ...`, `exec gpuguard run ...`.


@pytest.fixture
def leading(wrapped: Wrapped) -> Iterator[Callable[..., Terminal]]:
    """Starts a command as the leader of the session of its terminal; bare, or behind us."""
    opened = []

    def start(*command: str, bare: bool = False) -> Terminal:
        opened.append(Terminal(line(wrapped, *command, bare=bare)))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "wrapped"])
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_hang_up_ends_the_job_of_a_session_leader(leading, wrapped, tmp_path, stopped, bare):
    terminal = leading("sh", "-c", f"echo $$ > {tmp_path}/pid; {SLEEP}", bare=bare)
    terminal.expect("<started>\r")
    job = int(content(tmp_path / "pid"))
    if stopped:
        os.kill(job, signal.SIGSTOP)
    os.close(terminal.master)

    until(lambda: not Path(f"/proc/{job}").exists() or state(job) == "Z")
    until(lambda: not wrapped.is_claimed())


@pytest.mark.parametrize("bare", [True, False], ids=["bare", "wrapped"])
@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_a_signal_of_the_terminal_reaches_the_job_of_a_session_leader_once(leading, wrapped, tmp_path, name, bare):
    seen = str(tmp_path / "seen")
    count = COUNT.replace("os.write(1, b", f"os.write(os.open({seen!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY), b")
    terminal = leading(sys.executable, "-c", count, name, "1", bare=bare)
    until(lambda: "<started>" in content(tmp_path / "seen"))
    terminal.type("\x03") if name == "INT" else os.close(terminal.master)

    until(lambda: "<total 1>" in content(tmp_path / "seen"))
    assert content(tmp_path / "seen") == "<started><seen 1><total 1>"


@pytest.mark.skipif(
    shutil.which("tmux") is None, reason="a shell's job control in tmux (no tmux: apt-get install tmux)"
)
def test_a_job_in_a_window_of_tmux_ends_with_the_server(wrapped, tmp_path):
    tmux = ("tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null")
    subprocess.run([*tmux, "new", "-d", waiting(wrapped)], check=True)
    until(lambda: content(tmp_path / "pids"))
    _, job = pids(wrapped)
    subprocess.run([*tmux, "kill-server"], check=True)

    until(lambda: not Path(f"/proc/{job}").exists())
    until(lambda: not wrapped.is_claimed())
