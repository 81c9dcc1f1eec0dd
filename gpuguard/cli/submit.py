"""Hand a command to the engine of a cluster, which runs it where and when there is room: Slurm or Ray.

gpuguard submit --via slurm -n 2 --min-free 20GiB --time-limit 4h -- python train.py     queued, as with sbatch
gpuguard submit --via slurm --attach -n 2 -- python train.py    stays, as srun: output here, exit code of the command
gpuguard submit --via slurm --with '--partition=a100' -- ...    more words for sbatch or srun
gpuguard submit --via slurm --print -n 2 -- python train.py     shows the command line, and submits nothing
gpuguard submit --via ray -n 2 -- python tune.py                through Ray's job API

The engine chooses the machine and its GPUs; there the command runs under `gpuguard run`.  Exit codes: 0 submitted, 125
not, also for wrong usage; with --attach those of `gpuguard run` (Ray: 1 for any failure).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from gpuguard.cli import EXIT_NOT_NOW, EXIT_RUN_FAILED, EXIT_TIMEOUT
from gpuguard.cli.options import JSON, add_choice_options, add_repeatable, add_table, request_of
from gpuguard.cli.run import add_limit_options, command_of, durations_of, limits_of
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.jsonio import loads
from gpuguard.locale import N_, _
from gpuguard.ray import HOW_TO_INSTALL
from gpuguard.sanitize import neutralise
from gpuguard.views.text import put

ENGINES = ("slurm", "ray")
DEVICE_OPTIONS = ("devices", "exclude", "prefer")  # they name one machine's devices, but the engine chooses the machine

# Options of `gpuguard run` that the command gets on the machine where it runs.
PASSED = (
    "num_gpus", "min_free", "min_total", "max_util", "max_memory_util", "max_processes", "max_temperature", "model",
    "mig", "allow_mig_set", "tolerance", "share", "memory", "slots", "note", "visible", "isolate", "time_limit",
    "memory_limit", "temperature_limit", "idle_limit", "checkpoint_signal", "grace", "leftover",
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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpuguard submit --via slurm|ray [options] [--] CMD [ARG ...]"
    group = parser.add_argument_group("the engine")
    group.add_argument("--via", choices=ENGINES, required=True, help="who runs it")
    group.add_argument("--attach", action="store_true", help="stay until it has ended: its output, its exit code")
    group.add_argument("--print", action="store_true", help="show what would be submitted, and submit nothing")
    more = "more words for the engine, as in '--partition=a100 --qos=night' (repeatable)"
    add_repeatable(group, ("--with", "WORDS", more), dest="engine_words")
    add_table(
        group.add_mutually_exclusive_group(),
        ("--wait", "DURATION", "with --attach: wait for a start at most so long, as in 30m"),
        ("--no-wait", None, "with --attach: exit 75 when it cannot start now"),
    )
    add_table(group, JSON)
    add_choice_options(parser)
    job = parser.add_argument_group("the job")
    job.add_argument("--name", metavar="NAME", help="of the job, as the engine lists it (default: that of the command)")
    job.add_argument("--note", metavar="TEXT", help="what it is for; everybody can read it in `gpuguard who`")
    job.add_argument("--visible", choices=("index", "uuid"), default="index", help="as in `gpuguard run`")
    job.add_argument("--isolate", action="store_true", help="as in `gpuguard run`")
    job.add_argument("--leftover", metavar="HOW", help="as in `gpuguard run`")
    add_limit_options(parser)
    parser.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    # durations_of() and limits_of() of `gpuguard run` read it; there is no --exec here.
    parser.set_defaults(exec=False)


def main(args: argparse.Namespace) -> int:
    args.command = command_of(args)
    check(args)
    return submit_to_slurm(args) if args.via == "slurm" else submit_to_ray(args)


def check(args: argparse.Namespace) -> None:
    """Refuse now what would fail on the other machine, hours later.

    Raises:
        InvalidRequest: an option cannot be understood, or makes no sense for an engine.
    """
    for name in DEVICE_OPTIONS:
        if getattr(args, name) is not None:
            raise InvalidRequest(
                _("--{name}: {via} chooses the machine and its GPUs.  Drop it, or say --model.").format(
                    name=name, via=args.via
                )
            )
    if args.mine_as_free or args.strategy != "spread":
        raise InvalidRequest(
            _("--mine-as-free and --strategy choose among GPUs, as {via} does: drop it.").format(via=args.via)
        )
    if (args.wait or args.no_wait) and not args.attach:
        raise InvalidRequest(_("--wait and --no-wait are about staying until it starts: add --attach."))
    try:
        os.getcwd()
    except OSError:
        raise InvalidRequest(_("the directory in which the command should start is gone: go to another one.")) from None
    request_of(args)
    _wait, time_limit, _grace = durations_of(args)
    limits_of(args, time_limit)


def _queued(args: argparse.Namespace, job: str, text: str) -> int:
    put([json.dumps({"schema": 1, "via": args.via, "job": job}) if args.json else text])
    return 0


def python_words(module: str, python: str = sys.executable) -> list[str]:
    """Return the words that run *module* of gpuguard with *python*, whatever lies in the directory where they run."""
    return [python, "-c", RUN_MODULE, module]


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


# --via ray: `ray job submit`, with `gpuguard run` in front of the command on the worker.  Ray keeps output and errors
# of a job in one stream.  It sends SIGTERM to end a job, and SIGKILL STOP_SECONDS later.

STOP_SECONDS = 30  # Ray's own 3 s are too short to save a state; a job under Slurm has as much as this

_RAY_ADVICE = N_(
    "RAY_API_SERVER_ADDRESS=http://head:8265 or --with '--address http://head:8265' names its "
    "dashboard; RAY_AUTH_TOKEN,\nRAY_AUTH_TOKEN_PATH or ~/.ray/auth_token its token.  `gpuguard "
    "submit --print ...` shows what it is asked for."
)


def submit_to_ray(args: argparse.Namespace) -> int:
    """Submit the command of *args*; with --attach return the exit code of `ray job submit`, 1 if the command failed.

    Raises:
        GpuguardError: Ray is not installed here, or refuses.
    """
    more = engine_words(args.engine_words)
    job = job_of(args, more)
    if args.print:
        put([shlex.join(["ray", *ray_words(job, more)])])
        return 0

    # The one of PATH, as in the user's shell, otherwise the one beside gpuguard: its virtual environment may not be
    # activated.
    program = shutil.which("ray") or shutil.which("ray", path=os.path.dirname(sys.executable))
    if program is None:
        raise InvalidRequest(_("Ray is not installed here: {how_to_install}.").format(how_to_install=_(HOW_TO_INSTALL)))
    environment = dict(os.environ)
    has_token = bool({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys())
    if has_token or (Path.home() / ".ray" / "auth_token").exists():
        environment.setdefault("RAY_AUTH_MODE", "token")  # otherwise `ray` does not send it
    name = f"raysubmit_{os.urandom(8).hex()}"  # chosen here, so that it is known when this is interrupted
    words = [program, *ray_words(job, more, "--submission-id", name, *([] if args.attach else ["--no-wait"]))]

    if args.attach:
        print_notice(_("Ray job {name}").format(name=name))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with contextlib.ExitStack() as stack:
            try:  # around Popen as well: an interrupt may come while it waits for the new process to become `ray`
                child = stack.enter_context(subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL))
                return child.wait()
            except KeyboardInterrupt:
                print_notice(_("asking Ray to end the job {name}.").format(name=name))
                address = ["--address", more.address] if more.address else []
                subprocess.run([program, "job", "stop", *address, name], env=environment, check=False)
                return 128 + signal.SIGINT

    end = _("`ray job stop {name}` ends it").format(name=name)
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except KeyboardInterrupt:
        print_notice(_("Ray may have the job all the same: {end}.").format(end=end))
        raise
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise GpuguardError(
            _("Ray refuses: {lines}\n{ray_advice}").format(
                lines=lines[-1] if lines else _("exit code {code}").format(code=done.returncode),
                ray_advice=_(_RAY_ADVICE),
            )
        )
    return _queued(
        args,
        name,
        _("Ray job {name} is queued: `ray job logs {name}` shows its output, {end}.").format(name=name, end=end),
    )


def engine_words(texts: list[str]) -> argparse.Namespace:
    """Parse the words of --with: options of `ray job submit`, and the Python that has gpuguard on the worker.

    Raises:
        InvalidRequest: a word is unknown, or its value is not a number or not JSON.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--address")
    parser.add_argument("--entrypoint-num-cpus", type=_number)
    parser.add_argument("--entrypoint-memory", type=_number)
    parser.add_argument("--entrypoint-resources", type=_json_object, default={})
    parser.add_argument("--runtime-env-json", type=_json_object, default={})
    parser.add_argument("--python", default=sys.executable)
    known = ", ".join(f"--{name.replace('_', '-')}" for name in vars(parser.parse_args([])))
    try:
        found, unknown = parser.parse_known_args([word for text in texts for word in shlex.split(text)])
        if not isinstance(found.runtime_env_json.get("env_vars", {}), dict):
            raise ValueError("env_vars of --runtime-env-json is no JSON object")
    except (argparse.ArgumentError, ValueError) as fault:
        raise InvalidRequest(
            _("--with: {fault}.  Ray is given {known}.").format(fault=str(fault).removeprefix("argument "), known=known)
        ) from None
    if unknown:
        raise InvalidRequest(
            _("--with: there is no word {unknown} for Ray, only {known}.").format(unknown=unknown[0], known=known)
        )
    return found


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 2**63:  # NaN is refused as well
        raise argparse.ArgumentTypeError(_("{text!r} is no number").format(text=text))
    return found


def _json_object(text: str) -> dict[str, object]:
    try:
        found = loads(text.encode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(_("{text!r} is no JSON object, as in '{{\"a\": 1}}'").format(text=text))
    return found


def job_of(args: argparse.Namespace, more: argparse.Namespace) -> dict[str, object]:
    """Return the arguments for submit_job() of Ray's client."""
    given = more.runtime_env_json
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), **given.get("env_vars", {})}
    job: dict[str, object] = {
        "entrypoint": entrypoint(args, more.python, "working_dir" in given),
        "entrypoint_num_gpus": int(args.num_gpus or 1),
        "entrypoint_num_cpus": more.entrypoint_num_cpus,
        "entrypoint_memory": None if more.entrypoint_memory is None else int(more.entrypoint_memory),
        "entrypoint_resources": more.entrypoint_resources,
        "runtime_env": {**given, "env_vars": environment},
        "metadata": {"job_name": args.name or os.path.basename(args.command[0])},
    }
    return {name: value for name, value in job.items() if value not in (None, {})}


def entrypoint(args: argparse.Namespace, python: str, brings: bool) -> str:
    """Return what Ray's shell runs on the worker: with *python* if it is there, otherwise with that of Ray's PATH."""
    waiting = ["--no-wait"] if args.no_wait else ["--wait", args.wait] if args.wait else []
    run = [*python_words("gpuguard")[1:], "run", *inner_words(args), *waiting, "--", *args.command]
    # The command starts in the directory that Ray brings to the worker, otherwise in this one, if it exists there.
    here = shlex.quote(os.getcwd())
    missing = shlex.quote(f"gpuguard: {os.getcwd()} is not on this node: the command starts in")
    change = "" if brings else f'cd {here} 2>/dev/null || echo {missing} "$PWD" >&2; '
    advice = "has no gpuguard on this node: pip install 'gpuguard[ray]' there, or --with '--python PATH'."
    probe = shlex.quote(f"{WITHOUT_WORKING_DIRECTORY} gpuguard")
    # With exec, the exit status that Ray sees of its child is that of gpuguard run.
    return (
        f'P={shlex.quote(python)}; [ -x "$P" ] || P=python3; "$P" -c {probe} 2>/dev/null || '
        f'{{ echo gpuguard: "$P" {shlex.quote(advice)} >&2; exit 125; }}; {change}exec "$P" {shlex.join(run)}'
    )


def ray_words(job: dict[str, object], more: argparse.Namespace, *further: str) -> list[str]:
    """Return the words that follow `ray`."""
    words = ["job", "submit", *further, *(["--address", more.address] if more.address else [])]
    for key, value in job.items():
        if key.startswith("entrypoint_"):
            words += [f"--{key.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    words += ["--runtime-env-json", json.dumps(job["runtime_env"]), "--metadata-json", json.dumps(job["metadata"])]
    return [*words, "--", "sh", "-c", str(job["entrypoint"])]


# --via slurm: sbatch or srun, with `gpuguard run` in front of the command.  Slurm gives whole GPUs; `gpuguard run`
# checks everything else that is asked of them where the job runs, and keeps the limits there.  Slurm's own time limit
# is later than the job's, so that the job ends as its options say.

LATER_SECONDS = 90.0  # after the last signal of gpuguard's own escalation

_SLURM_ADVICE = N_("Does `sinfo` answer here?  `gpuguard submit --print ...` shows what was asked of Slurm.")


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
    own = {"SLURM_EXIT_ERROR": EXIT_RUN_FAILED, "SLURM_EXIT_IMMEDIATE": EXIT_NOT_NOW if args.no_wait else EXIT_TIMEOUT}
    environment = {**os.environ, **{name: str(code) for name, code in own.items()}}
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
                sub=re.sub("^sbatch: (error|fatal): ", "", why), slurm_advice=_(_SLURM_ADVICE)
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
    return _queued(
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
