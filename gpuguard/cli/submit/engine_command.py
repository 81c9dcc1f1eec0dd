"""What an engine runs where it has chosen GPUs: `gpuguard run` with the options of the job, and the command."""

from __future__ import annotations

import argparse
import json
import sys

from gpuguard.views.text import put

# Options of `gpuguard run` that the command gets on the machine where it runs.
PASSED = (
    "num_gpus", "min_free", "min_total", "max_util", "max_memory_util", "max_processes", "max_temperature", "model",
    "vendor", "mig", "allow_mig_set", "tolerance", "share", "memory", "slots", "note", "visible", "isolate",
    "time_limit", "memory_limit", "temperature_limit", "idle_limit", "checkpoint_signal", "grace", "leftover",
)  # fmt: skip
DEFAULTS = {"visible": "index"}

# `python -m MODULE`, but never with modules of the working directory: another user may have put a gpuguard.py or
# yaml.py there.  Python 3.10 has no -P, and the Python of another node may be of that version; -I would also leave out
# PYTHONPATH and the user's own site-packages, where gpuguard may be installed.  So the entry that -P leaves out is
# taken out here: the empty one that -c puts first.  Nothing is imported before that, because sys is built in.
WITHOUT_WORKING_DIRECTORY = "import sys; sys.path[:] = filter(None, sys.path); import"
RUN_MODULE = (
    f"{WITHOUT_WORKING_DIRECTORY} runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def say_queued(args: argparse.Namespace, job: str, text: str) -> int:
    """Print which *job* of the engine it is, and return the exit code."""
    put([json.dumps({"schema": 1, "via": args.via, "job": job}) if args.json else text])
    return 0


def python_words(module: str) -> list[str]:
    """Return the words that run *module* of gpuguard with this Python, whatever lies where they run."""
    return [sys.executable, "-c", RUN_MODULE, module]


def inner_words(args: argparse.Namespace) -> list[str]:
    """Return the options for `gpuguard run` on the other machine: ["--num-gpus", "2", "--min-free", "20GiB"]."""
    words: list[str] = []
    for name in PASSED:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value not in (None, False, DEFAULTS.get(name)):
            for text in value if isinstance(value, list) else [str(value)]:
                # As a word of its own, a value with a leading dash would be taken for an option.
                words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words
