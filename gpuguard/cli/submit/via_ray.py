"""Submit a command to Ray: `ray job submit`, with `gpuguard run` in front of the command on the worker.

Ray keeps output and errors of a job in one stream.  It sends SIGTERM to end a job, and SIGKILL STOP_SECONDS later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from gpuguard.cli.submit.engine_command import WITHOUT_WORKING_DIRECTORY, inner_words, python_words, say_queued
from gpuguard.cli.terminal import print_notice
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.jsonio import loads
from gpuguard.locale import N_, _
from gpuguard.ray import HOW_TO_INSTALL
from gpuguard.views.text import put

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
    return say_queued(
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
