"""Whether a sampler is a copy of the process that asks: only of one that has hardly begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nodes
import pytest

NVIDIA = 'os.readlink = lambda path: "/dev/nvidia0"'


@pytest.mark.parametrize(
    ("before", "may"),
    [
        ("", True),
        ("import json, logging, argparse", True),
        ("import threading; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", False),
        ("filled = bytearray(os.urandom(1024)) * 65536", False),
        ("import pynvml", False),
        (NVIDIA, False),
        ("fork = os.fork; os.fork = lambda: fork()", False),
        ("def hidden(path): raise PermissionError\nos.listdir = hidden", False),
    ],
    ids=["new", "a few modules", "a thread", "64 MiB", "the binding", "an open device", "gevent", "no /proc"],
)
def test_only_a_process_that_has_hardly_begun_is_copied(before: str, may: bool) -> None:
    code = f"import os, sys, time\n{before}\nfrom gpuguard.backends import sampler\nprint(sampler.may_be_copied())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == f"{may}\n"


@pytest.mark.parametrize("thread", [False, True])
def test_a_selection_in_python_copies_a_process_or_starts_another(tmp_path: Path, thread: bool) -> None:
    nodes.start(str(tmp_path / "node"), "4xH100-80GB")
    code = f"""
import os, threading, time
ways = []
os.register_at_fork(before=lambda: ways.append("copied"))
spawn = os.posix_spawn
os.posix_spawn = lambda *words, **options: ways.append("started") or spawn(*words, **options)
if {thread}:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
import gpuguard
print(len(gpuguard.select_devices(2, backend={f"simulated:{tmp_path}/node"!r})), *ways)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == ("2 started\n" if thread else "2 copied\n")


def test_a_debugger_that_follows_each_python_a_program_starts_does_not_follow_the_sampler(tmp_path: Path) -> None:
    """As pydevd of VS Code and PyCharm, in which a child waits until somebody attaches to it."""
    nodes.start(str(tmp_path / "node"), "4xH100-80GB")
    (tmp_path / "pydevd.py").write_text("""
import contextlib, os
follows, spawn = [True], os.posix_spawn
@contextlib.contextmanager
def skip_subprocess_arg_patch():
    follows.remove(True)
    yield
    follows.append(True)
waiting = ("/bin/sleep", ["sleep", "60"], os.environ)
os.posix_spawn = lambda *words, **more: spawn(*(waiting if follows else words), **more)
""")
    code = f"""
import pydevd, pynvml, gpuguard
print(len(gpuguard.select_devices(2, backend={f"simulated:{tmp_path}/node"!r})), pydevd.follows)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout == "2 [True]\n", done.stderr


def test_where_python_was_told_to_ignore_its_environment_the_sampler_ignores_it_too(tmp_path: Path) -> None:
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings/__init__.py").write_text(f"open({str(tmp_path / 'was here')!r}, 'w')")
    nodes.start(str(tmp_path / "node"), "4xH100-80GB")
    code = f"import gpuguard, pynvml; print(len(gpuguard.select_devices(2, backend={f'simulated:{tmp_path}/node'!r})))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-I", "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)

    assert (done.stdout, (tmp_path / "was here").exists()) == ("2\n", False)


def test_what_a_program_does_at_a_signal_its_copy_does_not(tmp_path: Path) -> None:
    nodes.start(str(tmp_path / "node"), "4xH100-80GB")
    code = f"""
import os, signal
signal.signal(signal.SIGTERM, lambda *_: open({str(tmp_path / "saved")!r}, "w"))
from gpuguard.backends.isolated import open_isolated
from gpuguard.errors import BackendError
with open_isolated({f"simulated:{tmp_path}/node"!r}, fork=True) as source:
    source.sample({{"memory"}})
    os.kill(source._channel[0], signal.SIGTERM)
    try:
        source.sample({{"memory"}})
    except BackendError:
        print("it has ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert (done.stdout, (tmp_path / "saved").exists()) == ("it has ended\n", False)


@pytest.mark.parametrize("large", [False, True])
def test_a_program_that_brings_its_own_python_is_not_started_again_as_its_sampler(tmp_path: Path, large: bool) -> None:
    """As PyInstaller makes them: sys.executable is the program, and would claim devices in its turn, without end."""
    nodes.start(str(tmp_path / "node"), "4xH100-80GB")
    code = f"""
import os, sys
sys.frozen, sys.executable, os.posix_spawn = True, "/bin/false", None
filled = bytearray(os.urandom(1024)) * 65536 * {large}
import gpuguard
try:
    print(len(gpuguard.select_devices(2, backend={f"simulated:{tmp_path}/node"!r})))
except gpuguard.BackendError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.startswith("this program brings its own Python" if large else "2\n")
