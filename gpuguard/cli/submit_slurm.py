"""`gpuguard submit --via slurm`: sbatch or srun, with `gpuguard run` in front of the command.

Slurm gives whole GPUs; what else is asked of them is looked at by `gpuguard run` where the job runs, and the limits are
kept there.  Slurm's own time limit stands behind that of the job, so that it ends as its options say.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

from gpuguard.cli.run import durations_of
from gpuguard.cli.submit import inner_words, python_words
from gpuguard.cli.telling import say
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.views.text import neutralise, put

LATER_SECONDS = 90.0  # after the last signal of gpuguard's own ladder
NOT_NOW, TIMED_OUT, FAILED = "75", "124", "125"

_ADVICE = "Does `sinfo` answer here?  `gpuguard submit --print ...` shows what was asked of Slurm."


def submit(args: argparse.Namespace) -> int:
    """Submit the command of *args*.

    Returns:
        0 when it is queued; does not come back with --attach, where srun takes the place of this process.

    Raises:
        GpuguardError: Slurm is not here, or refuses.
    """
    words = command_line(args)
    if args.print:
        put([shlex.join(words)], sys.stdout)
        return 0
    if shutil.which(words[0]) is None:
        raise GpuguardError(
            f"there is no {words[0]} here: install Slurm's commands (apt install slurm-client), or log in where they "
            "are.  `gpuguard run` needs no Slurm."
        )
    if args.attach:
        sys.stdout.flush()
        os.execvpe(words[0], words, environment(args))
    try:
        done = subprocess.run(
            words, env=environment(args), capture_output=True, text=True, errors="backslashreplace", check=False
        )
    except KeyboardInterrupt:
        say("the job may be queued all the same: `squeue --me` shows it.")
        raise
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"sbatch ended with {done.returncode}"])[-1]
        raise GpuguardError(f"Slurm refuses: {re.sub('^sbatch: (error|fatal): ', '', why)}\n{_ADVICE}")
    # With a cluster behind it, and what a wrapper of the site's says before; people type it behind scancel.
    found = re.search(r"^([0-9]+)(;\S*)?\s*\Z", done.stdout, re.MULTILINE)
    if found is None:
        raise GpuguardError("sbatch does not say a number, so the job may be queued or not: `squeue --me` shows it.")
    job = found[1]
    if args.json:
        put([json.dumps({"schema": 1, "via": "slurm", "job": job})], sys.stdout)
        return 0
    put([f"Slurm job {job} is queued: `gpuguard queue` shows it, `scancel {job}` ends it."], sys.stdout)
    if said := done.stderr.strip():
        put(map(neutralise, said.splitlines()), sys.stderr)
    return 0


def command_line(args: argparse.Namespace) -> list[str]:
    """The words of sbatch or srun."""
    number = args.num_gpus or "1"
    words = ["srun" if args.attach else "sbatch", "--nodes=1", "--ntasks=1", f"--gres=gpu:{number.strip()}"]
    wait, time_limit, grace = durations_of(args)
    if time_limit is not None:
        words.append(f"--time={math.ceil((time_limit + 2 * grace + LATER_SECONDS) / 60)}")
    words.append(f"--job-name={args.name or os.path.basename(args.command[0])}")
    if args.note:
        words.append(f"--comment={args.note}")
    if args.attach and wait is not None:
        words.append(f"--immediate={max(1, math.ceil(wait))}")
    for more in args.engine_words:
        try:
            words += shlex.split(more)
        except ValueError as fault:
            raise InvalidRequest(f"--with: {more[:60]!r} cannot be split into words: {fault}.") from None
    inner = [*gpuguard(), "run", *inner_words(args), "--", *args.command]
    # exec: what Slurm sends to the job reaches gpuguard run, which passes it on.
    return [*words, *inner] if args.attach else [*words, "--parsable", f"--wrap=exec {shlex.join(inner)}"]


def gpuguard() -> list[str]:
    """The words that start this very gpuguard on another machine of the same kind."""
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "gpuguard" and os.access(program, os.X_OK):
        return [program]
    return python_words("gpuguard")


def environment(args: argparse.Namespace) -> dict[str, str]:
    """With the exit codes that srun has when the job did not start, so that they are those of `gpuguard run`."""
    return {**os.environ, "SLURM_EXIT_ERROR": FAILED, "SLURM_EXIT_IMMEDIATE": NOT_NOW if args.no_wait else TIMED_OUT}
