"""Submit a command to Slurm: sbatch or srun, with `gpuguard run` in front of the command.

Slurm gives whole GPUs; `gpuguard run` checks everything else that is asked of them where the job runs, and keeps the
limits there.  Slurm's own time limit is later than the job's, so that the job ends as its options say.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

from gpuguard.cli.run import durations_of
from gpuguard.cli.submit.engine_command import inner_words, python_words, say_queued
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import EXIT_FAILED, EXIT_NOT_NOW, EXIT_TIMEOUT, GpuguardError, InvalidRequest
from gpuguard.locale import _
from gpuguard.sanitize import neutralise
from gpuguard.views.text import put

LATER_SECONDS = 90.0  # after the last signal of gpuguard's own escalation


def submit_to_slurm(args: argparse.Namespace) -> int:
    """Submit the command of *args*; with --attach it does not return, because srun replaces this process.

    Raises:
        GpuguardError: Slurm is not installed here, or refuses.
    """
    words = command_line(args)
    if args.print:
        put([shlex.join(words)])
        return 0
    if shutil.which(words[0]) is None:
        raise GpuguardError(
            _(
                "there is no {words} here: install Slurm's commands (apt install slurm-client), or log in where "
                "they are.  `gpuguard run` needs no Slurm."
            ).format(words=words[0])
        )
    # srun ends with these if the job did not start, so that the exit codes are those of `gpuguard run`.
    environment = {
        **os.environ,
        "SLURM_EXIT_ERROR": str(EXIT_FAILED),
        "SLURM_EXIT_IMMEDIATE": str(EXIT_NOT_NOW if args.no_wait else EXIT_TIMEOUT),
    }
    if args.attach:
        sys.stdout.flush()
        os.execvpe(words[0], words, environment)

    try:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, errors="backslashreplace", check=False
        )
    except KeyboardInterrupt:
        print_notice(_("the job may be queued all the same: `squeue --me` shows it."))
        raise
    if done.returncode:
        why = (
            done.stderr.strip().splitlines() or [_("sbatch ended with {returncode}").format(returncode=done.returncode)]
        )[-1]
        raise GpuguardError(
            _("Slurm refuses: {sub}\n{slurm_advice}").format(
                sub=re.sub("^sbatch: (error|fatal): ", "", why),
                slurm_advice=_(
                    "Does `sinfo` answer here?  `gpuguard submit --print ...` shows what was asked of Slurm."
                ),
            )
        )
    # A cluster may follow the number, and output of a site's wrapper may precede it.  Only the number is kept, because
    # people type it after scancel.
    found = re.search(r"^([0-9]+)(;\S*)?\s*\Z", done.stdout, re.MULTILINE)
    if found is None:
        raise GpuguardError(_("sbatch does not say a number, so the job may be queued or not: `squeue --me` shows it."))
    job = found[1]
    if not args.json:
        put(map(neutralise, done.stderr.strip().splitlines()), sys.stderr)
    return say_queued(
        args, job, _("Slurm job {job} is queued: `gpuguard queue` shows it, `scancel {job}` ends it.").format(job=job)
    )


def command_line(args: argparse.Namespace) -> list[str]:
    """Return the command line of sbatch or srun."""
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
            raise InvalidRequest(
                _("--with: {more!r} cannot be split into words: {fault}.").format(more=more[:60], fault=fault)
            ) from None
    # The job runs this very gpuguard, on another machine of the same kind.
    program = os.path.abspath(sys.argv[0])
    is_script = os.path.basename(program) == "gpuguard" and os.access(program, os.X_OK)
    run = [*([program] if is_script else python_words("gpuguard")), "run", *inner_words(args), "--", *args.command]
    # With exec, the signals that Slurm sends to the job reach gpuguard run, which passes them on.
    return [*words, *run] if args.attach else [*words, "--parsable", f"--wrap=exec {shlex.join(run)}"]
