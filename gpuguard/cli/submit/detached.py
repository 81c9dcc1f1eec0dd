"""`gpuguard submit` without an engine: a job of this machine that outlives the terminal; see gpuguard.batch."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from gpuguard.batch.dispatchers import changed
from gpuguard.batch.job_facts import open_jobs
from gpuguard.batch.job_records import MOST_TASKS, JobRecord, JobStore, Source, new_record
from gpuguard.batch.logout import outliving
from gpuguard.claims.claim import SHARE_VARIABLES
from gpuguard.cli.jobs import wait_for
from gpuguard.cli.jobs.changes import one_meant
from gpuguard.cli.jobs.words import filled, names_of_run
from gpuguard.cli.options import (
    add_repeatable,
    add_table,
    backend_of,
    directory_of,
    quantity,
    whole_number,
)
from gpuguard.cli.reserve import parse_when
from gpuguard.cli.run import absolute_backend, command_of, parsed
from gpuguard.cli.terminal import print_notice
from gpuguard.clusters.device_variables import Outer, outer_devices
from gpuguard.errors import GpuguardError, ImpossibleRequest, InvalidRequest
from gpuguard.jobs.processes import callers_variables, exec_fault, failure
from gpuguard.locale import _, translated
from gpuguard.lock import Allocator
from gpuguard.queue.settings import read_queue_settings
from gpuguard.request import Request
from gpuguard.select import not_enough
from gpuguard.units import format_count, parse_duration
from gpuguard.vendors import VENDORS
from gpuguard.views.text import put

# The session's own variables mean nothing, or something wrong, once it is over.
_OF_THE_SESSION = ("SSH_", "DBUS_", "TMUX")
_NAMES_OF_THE_SESSION = ("STY", "XAUTHORITY", "DISPLAY", "WAYLAND_DISPLAY", "WINDOWID")
_OF_THE_CLAIM = (
    "GPUGUARD_CLAIM",
    "GPUGUARD_GPUS",
    *SHARE_VARIABLES,
    *(
        name
        for vendor in VENDORS.values()
        for name in (vendor.visible, *vendor.numbering, *vendor.filters, vendor.selector)
    ),
)
_NUMBERS = re.compile(r"(?P<first>\d{1,7})(-(?P<last>\d{1,7})(:(?P<step>0*[1-9]\d{0,6}))?)?", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks: the same command several times, with other values of {names} in it")
    add_repeatable(group, ("--sweep", "NAME=A,B,...", "all combinations of these values (repeatable)"))
    add_table(
        group,
        ("--array", "0-9%2", "a task for each number, {task} in the command; at most 2 of them at a time"),
        ("--each-line", "FILE", "a task for each line, {line}; with a line of names first, one name per column"),
        ("--at-most", "N", "so many tasks at a time"),
        ("--dry-run", None, "list the commands, and submit nothing"),
    )
    group = parser.add_argument_group("when it starts")
    add_repeatable(
        group,
        ("--after", "JOB", "when that job has ended, however (repeatable)"),
        ("--after-ok", "JOB", "when that job has succeeded; if it fails, this one is skipped (repeatable)"),
    )
    add_table(
        group,
        ("--begin", "TIME", "not before 22:00, or now+2h"),
        ("--hold", None, "not before `gpuguard jobs unhold`"),
        ("--retries", "N", "start a task that fails again, so many times"),
        ("--retry-on", "CODES", "only after these exit codes, as in 1,137"),
        ("--retry-delay", "DURATION", "the first pause before that; each further one is twice as long"),
        ("--parsable", None, "print nothing but the id"),
        ("--until-done", None, "stay until the job has ended, and return its exit code"),
        (
            "--requeue",
            "N",
            "start it again when it exits with 75, or a policy asks it",
            {"nargs": "?", "const": "1"},
        ),
    )


def submit(args: argparse.Namespace) -> int:
    """Store the job, and print its id."""
    if args.dry_run:
        put(shlex.join(filled(command_of(args), task)) for task in tasks_of(args)[0])
        return 0
    record = store_job(args)
    try:
        changed(JobStore(), record.source)
    except (GpuguardError, OSError) as fault:  # the job is there, and your next command tries again
        why = fault.strerror if isinstance(fault, OSError) else translated(str(fault))
        print_notice(
            _("job {id} waits, but nothing starts it yet: {why}.  `gpuguard jobs` tries again.").format(
                id=record.id, why=str(why).rstrip(".")
            )
        )
    put([_said(record, parsable=args.parsable)])
    sys.stdout.flush()
    return wait_for(JobStore(), [record.id]) if args.until_done else 0


def store_job(args: argparse.Namespace) -> JobRecord:
    """Store the job; changed() starts a dispatcher for it.  Raises GpuguardError, OSError; then there is no job."""
    args.command = command_of(args)
    tasks, at_most = tasks_of(args)
    if job := os.environ.get("SLURM_JOB_ID"):
        raise InvalidRequest(
            _("this is inside the Slurm job {job}, which ends what is started in it: use --via slurm.").format(job=job)
        )
    outliving()
    store = JobStore()
    record = _record(args, store, tasks, at_most)
    _check_bound(args, store, len(tasks))
    return store.add(record, _environment(callers_variables()))


def _record(args: argparse.Namespace, store: JobStore, tasks: list[dict[str, str]], at_most: int | None) -> JobRecord:
    """Return the record of the job.  Raises InvalidRequest, and ImpossibleRequest if it never can run."""
    args.backend = absolute_backend(args.backend)
    args.dir = args.dir and os.path.abspath(args.dir)
    job = parsed(args)
    may_appear = args.after or args.after_ok or args.begin or args.retries
    if not may_appear and (fault := exec_fault(filled(job.command, tasks[0])[0])):
        raise InvalidRequest(failure(job.command[0], fault)[1])
    limits = _check_possible(args, job.requests)
    return new_record(
        tuple(args.command),
        json.dumps({name: getattr(args, name) for name in sorted(names_of_run() & vars(args).keys())}),
        Source(backend=args.backend, dir=args.dir),
        tasks=tuple(tasks),
        gpus=job.requests[0].num_gpus,
        within=limits.uuids,
        within_reason=limits.reason,
        note=args.note,
        git=_git(),
        at_most=at_most,
        after=_ids(store, args.after),
        after_ok=_ids(store, args.after_ok),
        begin=None if args.begin is None else parse_when(re.sub(r"^now\+", "in ", args.begin), time.time(), "--begin"),
        held=args.hold,
        retries=_count("--retries", args.retries) or 0,
        retry_on=_codes(args.retry_on),
        retry_delay=quantity("--retry-delay", args.retry_delay, parse_duration) or 0.0,
        requeue=_count("--requeue", args.requeue) or 0,
    )


def _said(record: JobRecord, *, parsable: bool) -> str:
    if parsable:
        return str(record.id)
    if len(record.tasks) == 1:
        return _("job {id}").format(id=record.id)
    return _("job {id}, {count}").format(id=record.id, count=format_count(len(record.tasks), "task"))


def _check_possible(args: argparse.Namespace, requests: Sequence[Request]) -> Outer:
    """Refuse at once what can never start, and return what CUDA_VISIBLE_DEVICES and the like leave to the job.

    Raises ImpossibleRequest, BackendError, ClaimError.
    """
    environ = _environment(os.environ)
    directory, impossible = directory_of(args, make=True), None
    with closing(backend_of(args)) as backend:
        limits = outer_devices(environ, backend.sample(frozenset()).devices)
        for request in requests:
            snapshot, choice = Allocator(backend, directory, (request,), environ=environ).preview(with_reasons=True)
            error = None if choice.devices else not_enough(snapshot, request, choice)
            if not isinstance(error, ImpossibleRequest):
                return limits
            impossible = impossible or error
    raise impossible or InvalidRequest("")


def _check_bound(args: argparse.Namespace, store: JobStore, new: int) -> None:
    """Refuse more waiting tasks than the site permits."""
    settings = read_queue_settings(directory_of(args))
    most = settings.rules.jobs.waiting
    if most is None:
        return
    waiting = sum(state.state == "waiting" for states in open_jobs(store).states.values() for state in states)
    if waiting + new > most:
        raise InvalidRequest(
            _("{waiting} of yours wait already, and with {new} more it would be over the {most} of {path}.").format(
                waiting=format_count(waiting, "task"), new=new, most=most, path=settings.path
            )
        )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job: without the session's own, and without that of an outer claim.

    The job outlives both.
    """
    left_out = _OF_THE_CLAIM if "GPUGUARD_CLAIM" in environ else ()
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_THE_SESSION) and name not in (*_NAMES_OF_THE_SESSION, *left_out)
    }


def tasks_of(args: argparse.Namespace) -> tuple[list[dict[str, str]], int | None]:
    """Return the values of each task, and how many tasks may run at the same time.  Raises InvalidRequest."""
    at_most = _count("--at-most", args.at_most, least=1)
    columns: list[list[dict[str, str]]] = []
    if args.array is not None:
        numbers, _percent, most = args.array.partition("%")
        at_most = _count("--array %", most, least=1) if most else at_most
        columns.append([{"task": str(number)} for number in _numbers(numbers)])
    for text in args.sweep:
        name, equals, values = text.partition("=")
        if not (equals and _NAME.fullmatch(name) and values):
            raise InvalidRequest(_("--sweep {text!r}: write a name and its values: lr=0.1,0.01.").format(text=text))
        columns.append([{name: value} for value in values.split(",")])
    if args.each_line is not None:
        columns.append(list(_lines(args.each_line)))
    tasks = [dict(itertools.chain(*(part.items() for part in parts))) for parts in itertools.product(*columns)]
    if not 0 < len(tasks) <= MOST_TASKS:
        raise InvalidRequest(
            _("this is {count}: a job has 1 to {most}.").format(count=format_count(len(tasks), "task"), most=MOST_TASKS)
        )
    unused = [name for name in tasks[0] if not any(f"{{{name}}}" in word for word in args.command) and name != "task"]
    if unused:
        raise InvalidRequest(
            _("nothing in the command says {{{name}}}: put it where its value belongs.").format(name=unused[0])
        )
    return tasks, at_most


def _count(option: str, text: str | None, *, least: int = 0) -> int | None:
    """Return the number of an option, or None if it was not given.  Raises InvalidRequest: it is less than *least*."""
    number = whole_number(option, text)
    if number is not None and number < least:
        raise InvalidRequest(
            _("{option} {number}: write {least} or more.").format(option=option, number=number, least=least)
        )
    return number


def _numbers(text: str) -> Iterator[int]:
    for part in text.split(","):
        found = _NUMBERS.fullmatch(part)
        if found is None:
            raise InvalidRequest(_("--array {text!r}: write numbers as in 0-9, 1,3,5 or 0-10:2.").format(text=text))
        yield from range(int(found["first"]), int(found["last"] or found["first"]) + 1, int(found["step"] or 1))


def _lines(path: str) -> Iterator[dict[str, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(_("--each-line {path}: {fault}.").format(path=path, fault=fault)) from None
    names = lines[0].split() if lines else []
    if len(names) > 1 and all(map(_NAME.fullmatch, names)):
        for line in lines[1:]:
            yield dict(zip(names, line.split(None, len(names) - 1), strict=False))
    else:
        yield from ({"line": line} for line in lines)


def _ids(store: JobStore, words: Sequence[str]) -> tuple[int, ...]:
    return tuple(one_meant(store, word)[0].id for word in words)


def _codes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    codes = text.split(",")
    if not all(re.fullmatch(r"\d{1,3}", code, re.ASCII) for code in codes):
        raise InvalidRequest(_("--retry-on {text!r}: write exit codes as in 1,137.").format(text=text))
    return tuple(map(int, codes))


def _git() -> str | None:
    """Return the commit of the working directory, with "+" behind it if files were changed, or None."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
