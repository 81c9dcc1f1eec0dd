"""`gpuguard submit --via ray`: Ray's job API, with `gpuguard run` in front of the command on the worker.

Ray keeps output and errors of a job in one stream, which is what --attach shows.  It knows no time to wait for a start
and sends SIGTERM to end a job, and SIGKILL STOP_SECONDS later.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys

from gpuguard.cli.ray_follow import follow
from gpuguard.cli.run import durations_of
from gpuguard.cli.submit import WITHOUT_WORKING_DIRECTORY, inner_words, python_words
from gpuguard.cli.telling import say
from gpuguard.clusters import ray_jobs
from gpuguard.errors import InvalidRequest
from gpuguard.plainjson import loads
from gpuguard.views.text import put

STOP_SECONDS = 30  # Ray's own 3 s are short for saving a state; so much has a job under Slurm

# Words of --with: those of `ray job submit`, and the Python that has gpuguard on the worker.
_WORDS = ("--address", "--entrypoint-num-cpus", "--entrypoint-memory", "--entrypoint-resources", "--runtime-env-json")


def submit(args: argparse.Namespace) -> int:
    """Submit the command of *args*; with --attach stay until it has ended.

    Raises:
        GpuguardError: Ray is not here, or refuses.
    """
    more = engine_words(args.engine_words)
    job = job_of(args, more)
    if args.print:
        put([shlex.join(printed(job, more))], sys.stdout)
        return 0
    client = ray_jobs.connect(more.address)
    name = job["submission_id"] = f"raysubmit_{os.urandom(8).hex()}"
    if args.attach:
        wait, _, _ = durations_of(args)
        return follow(client, job, wait, args.no_wait)
    try:
        client.submit(job)
    except KeyboardInterrupt:
        say(f"Ray may have the job all the same: `ray job stop {name}` ends it.")
        raise
    if args.json:
        put([json.dumps({"schema": 1, "via": "ray", "job": name})], sys.stdout)
    else:
        put([f"Ray job {name} is queued: `ray job logs {name}` shows its output, `ray job stop {name}` ends it."],
            sys.stdout)  # fmt: skip
    return 0


def engine_words(texts: list[str]) -> argparse.Namespace:
    """The words of --with.

    Raises:
        InvalidRequest: there is no such word, or its value is no JSON.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for word in _WORDS:
        parser.add_argument(word)
    parser.add_argument("--python", default=sys.executable)
    known = ", ".join((*_WORDS, "--python"))
    try:
        found, unknown = parser.parse_known_args([word for text in texts for word in shlex.split(text)])
        found.entrypoint_num_cpus = number("--entrypoint-num-cpus", found.entrypoint_num_cpus)
        found.entrypoint_memory = number("--entrypoint-memory", found.entrypoint_memory)
        found.entrypoint_resources = table("--entrypoint-resources", found.entrypoint_resources)
        found.runtime_env_json = table("--runtime-env-json", found.runtime_env_json)
        if not isinstance(found.runtime_env_json.get("env_vars", {}), dict):
            raise ValueError("env_vars of --runtime-env-json is no JSON object")
    except (argparse.ArgumentError, ValueError) as fault:
        raise InvalidRequest(f"--with: {fault}.  Ray is given {known}.") from None
    if unknown:
        raise InvalidRequest(f"--with: there is no word {unknown[0]} for Ray, only {known}.")
    return found


def number(word: str, text: str | None) -> float | None:
    """A number of *word*."""
    try:
        found = None if text is None else float(text)
        if found is not None and not 0 <= found < 2**63:
            raise ValueError
        return found
    except ValueError:
        raise InvalidRequest(f"{word} {text!r} is no number") from None


def table(word: str, text: str | None) -> dict[str, object]:
    """A JSON object of *word*."""
    try:
        found = loads((text or "{}").encode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{word} {text!r} is no JSON object, as in '{{\"a\": 1}}'")
    return found


def job_of(args: argparse.Namespace, more: argparse.Namespace) -> dict[str, object]:
    """The arguments of submit_job() of Ray's client."""
    environment = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS)}
    given = more.runtime_env_json
    job: dict[str, object] = {
        "entrypoint": entrypoint(args, more.python, "working_dir" in given),
        "entrypoint_num_gpus": int(args.num_gpus or 1),
        "entrypoint_num_cpus": more.entrypoint_num_cpus,
        "entrypoint_memory": None if more.entrypoint_memory is None else int(more.entrypoint_memory),
        "entrypoint_resources": more.entrypoint_resources,
        "runtime_env": {**given, "env_vars": {**environment, **given.get("env_vars", {})}},
        "metadata": {"job_name": args.name or os.path.basename(args.command[0])},
    }
    return {name: value for name, value in job.items() if value not in (None, {})}


def entrypoint(args: argparse.Namespace, python: str, brings: bool) -> str:
    """What Ray's shell runs on the worker: with this Python if it is there too, else with that of Ray's PATH."""
    waiting = ["--no-wait"] if args.no_wait else ["--wait", args.wait] if args.wait else []
    # A directory that Ray brings to the worker is where the command starts; else the one here, if it is there too.
    place = "." if brings else os.getcwd()
    _, *worker = python_words("gpuguard.cli.ray_worker")
    worker += [place, *inner_words(args), *waiting, "--", *args.command]
    # exec: what Ray finds out about its child is the exit status of gpuguard run.
    missing = "has no gpuguard on this node: pip install 'gpuguard[ray]' there, or --with '--python PATH'."
    probe = shlex.quote(f"{WITHOUT_WORKING_DIRECTORY} gpuguard")
    return (
        f'P={shlex.quote(python)}; [ -x "$P" ] || P=python3; "$P" -c {probe} 2>/dev/null || '
        f'{{ echo gpuguard: "$P" {shlex.quote(missing)} >&2; exit 125; }}; exec "$P" {shlex.join(worker)}'
    )


def printed(job: dict[str, object], more: argparse.Namespace) -> list[str]:
    """The same as words of `ray job submit`."""
    words = ["ray", "job", "submit"]
    if more.address:
        words += ["--address", more.address]
    for key, value in job.items():
        if key.startswith("entrypoint_"):
            words += [f"--{key.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    words += ["--runtime-env-json", json.dumps(job["runtime_env"]), "--metadata-json", json.dumps(job["metadata"])]
    return [*words, "--", "sh", "-c", str(job["entrypoint"])]
