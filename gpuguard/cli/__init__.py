"""The command line, from its words to the exit code; one file per command, with add_options() and main(), or ACTIONS.

Only the module of the command that was asked for is imported, because `gpuguard run` stands before every job.
Exit codes: the job's own for `run` and `submit` (else 124, 125, 126, 127, 75: 2 could be the job's, so wrong usage is
125, as of env(1) and docker run); for the others 0, 1 no, 2 usage, 4 no driver, 124 when the time of `wait` ran out.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from gpuguard.errors import (
    EXIT_FAILED,
    EXIT_NO,
    EXIT_NO_DRIVER,
    EXIT_NOT_NOW,
    EXIT_TIMEOUT,
    EXIT_USAGE,
    BackendError,
    GpuguardError,
    InvalidRequest,
    NotEnoughGpus,
    WaitTimeout,
    shortage,
)
from gpuguard.locale import _, translated, use_english, use_language_of_user
from gpuguard.sanitize import neutralise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuguard.cli.options import Parser, SubcommandRow

COMMANDS = {
    "run": "claim GPUs, run a command on them, give them back when it ends",
    "select": "print the GPUs that `run` would choose; claims nothing",
    "explain": "say for each GPU why it is or is not eligible",
    "who": "who uses and who holds which GPU",
    "top": "watch GPUs and processes on the screen: bars, history, claims, signals",
    "queue": "who waits for GPUs, and when they start",
    "cancel": "end a request that waits, or a job",
    "reserve": "have GPUs kept for a time, and show what is reserved",
    "wait": "wait until GPUs are free, and print them",
    "web": "a page in the browser: GPUs, claims, the queue, charts",
    "daemon": "guard the GPUs by a policy file: observe, warn, end",
    "submit": "start a job that outlives the terminal, here or by Slurm or Ray",
    "jobs": "your jobs that outlive the terminal: list, log, cancel, retry",
    "slurm": "on a node of a Slurm cluster: prolog, epilog, lines for its files",
    "adopt": "claim the GPUs that a running job of yours uses",
    "metrics": "numbers for Prometheus, node_exporter, InfluxDB",
    "events": "what happened: claims, releases, what the guard did or would have done",
    "report": "who claimed, used and left idle how many GPU-hours",
    "history": "draw what GPUs did: utilization, memory, temperature, power, claims",
    "release": "release a claim under which no process computes",
    "resume": "let processes go on that a policy has paused (root)",
    "keep": "ask the daemon to leave your processes alone for a time",
    "deny": "let a user make no new claims for a time (root)",
    "quarantine": "take a GPU out of service (root)",
    "query": "one table of chosen fields, in the form of nvidia-smi --query-gpu",
    "record": "write down what happens on the GPUs, to look at it or try policies on it later",
    "schema": "print the JSON Schema of what a command prints with --json",
    "policy": "check and explain policy files for the daemon, and show their language",
    "doctor": "check driver, lock directory and permissions, and say what to do",
    "serve-ssh": "answer read-only questions over ssh alone: for the account of a fleet view",
    "setup": "make the lock directory /run/gpuguard for all users of this machine",
    "completion": "print the script that lets bash, zsh or fish complete gpuguard's words",
    "sim": "steer the simulated node: start, use, set, fault, show, stop",
}

# The names that other tools give to a command: canhazgpu, gpu-gate, genv, nvitop, task spooler, Slurm
_ELSEWHERE = {
    **dict.fromkeys(("status", "ls", "list", "ps", "usage", "info", "sinfo", "gpustat"), "who"),
    **dict.fromkeys(("lock", "shell", "activate", "attach", "claim", "srun", "salloc"), "run"),
    **dict.fromkeys(("unlock", "detach"), "release"),
    **dict.fromkeys(("scancel", "kill", "stop"), "cancel"),
    **{"squeue": "queue", "sbatch": "submit", "enforce": "daemon", "monitor": "top", "logs": "events"},
    **{"nvitop": "top", "nvtop": "top", "nvisel": "select", "free": "select", "sacct": "report"},
}

SPEAK_ENGLISH = ("completion", "daemon", "metrics", "query", "schema", "serve-ssh", "slurm", "web")  # programs read it
STARTING = ("run", "submit")  # commands whose other exit codes are the job's


def run_command_line(words: list[str]) -> int:
    """Run one command line, and return its exit code.  It never raises."""
    command = words[0] if words else ""
    try:
        status = _dispatch(command, words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone away (`gpuguard who | head -1`), so nothing more can be reported.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE  # as of any program in a pipe: 1 would be an answer
    except KeyboardInterrupt:
        return 130
    except GpuguardError as error:
        _report("\n".join(map(neutralise, translated(str(error)).splitlines())))
        return exit_code(command, error)
    except Exception as error:  # the border of this process: a user gets a sentence, a developer more
        if "GPUGUARD_DEBUG" in os.environ:
            raise
        _report(_sentence(error))
        return EXIT_FAILED if command in STARTING else EXIT_NO


def _report(text: str) -> None:
    with suppress(OSError):  # a full disk, or a closed pipe: the exit code says it
        print(f"gpuguard: {text}", file=sys.stderr, flush=True)


def _sentence(error: Exception) -> str:
    if short := shortage(error):
        return short
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = _("{file} could not be written: {error}.  Make room (see `df` and `quota`), or write elsewhere.")
        return text.format(file=error.filename or _("what this command prints"), error=error.strerror)
    return _("an error inside gpuguard: {error}.  GPUGUARD_DEBUG=1 shows where.").format(error=repr(error))


def exit_code(command: str, error: GpuguardError) -> int:
    """Return the exit code that tells a script what kind of *error* it was."""
    if isinstance(error, WaitTimeout) and command in ("run", "wait"):
        return EXIT_TIMEOUT
    if command in STARTING:
        return EXIT_NOT_NOW if type(error) is NotEnoughGpus else EXIT_FAILED
    if isinstance(error, InvalidRequest):
        return EXIT_USAGE
    return EXIT_NO_DRIVER if isinstance(error, BackendError) else EXIT_NO


def _dispatch(command: str, words: list[str]) -> int:
    if command == "help" and words[1:]:
        named = words[1:2] if words[1] in STARTING else words[1:3]  # the words of the job follow run
        return _dispatch(words[1], [*named, "--help"])
    if command in ("-h", "--help", "help"):
        print(overview())
        return 0
    if command in ("-V", "--version"):
        from gpuguard import __version__

        print(f"gpuguard {__version__}")
        return 0
    if command not in COMMANDS:
        raise InvalidRequest(_unknown(command))
    from gpuguard.cli.options import name_backend, with_joined_alternatives  # only commands need them

    parser = build_parser(command)
    try:
        args = parser.parse_args(with_joined_alternatives(parser, words[1:]))
    except SystemExit as end:  # --help
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    if command in SPEAK_ENGLISH or getattr(args, "json", False):
        use_english()
    name_backend(args)
    return subcommand(command).main(args)


def build_parser(command: str) -> Parser:
    """Return the parser of one sub-command."""
    from gpuguard.cli.options import Parser

    row = subcommand(command)
    parser = Parser(prog=f"gpuguard {command}", description=row.purpose)
    row.add_options(parser)
    return parser


def subcommand(command: str) -> SubcommandRow:
    """Return one sub-command: its help, its options and its main function."""
    if command in ("deny", "quarantine"):
        from gpuguard.cli import restrictions

        return restrictions.SUBCOMMANDS[command]
    from gpuguard.cli.options import SubcommandRow, with_actions

    module = import_module(f"gpuguard.cli.{command.replace('-', '_')}")
    if actions := getattr(module, "ACTIONS", None):  # such as `gpuguard policy check`
        return with_actions(module.__doc__ or "", actions)
    return SubcommandRow(module.__doc__ or "", module.add_options, module.main)


def overview() -> str:
    """Return the text that `gpuguard --help` prints."""
    parts = (
        _("usage: gpuguard COMMAND [options]"),
        _("Picks free GPUs on a shared server, claims them so that no other job gets them, and runs the job."),
        "\n".join(f"  {name:<10} {_(purpose)}" for name, purpose in COMMANDS.items()),
        _("""\
  gpuguard run -n 2 -- python train.py     two free GPUs for one job
  gpuguard who                             who holds what
  gpuguard COMMAND --help                  all options of a command"""),
    )
    return "\n\n".join(parts)


def _unknown(command: str) -> str:
    if not command:
        return _("a command is missing.") + f"\n\n{overview()}"
    missing = _("there is no command '{command}': ").format(command=command)
    if command.startswith("-"):
        return missing + _("options stand behind the command, as in `gpuguard run -n 2 -- CMD`.")
    import difflib  # only after a mistake

    near = [_ELSEWHERE[command]] if command in _ELSEWHERE else difflib.get_close_matches(command, COMMANDS, n=1)
    if near:
        return missing + _("did you mean `gpuguard {command}`?").format(command=near[0])
    return missing + _("choose one of {commands}.").format(commands=", ".join(COMMANDS))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command line, and end the process with its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    use_language_of_user()
    if None in (sys.stdin, sys.stdout, sys.stderr):
        _fill_standard_streams()
    status = run_command_line(words)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(status)  # at once: a thread that hangs in a driver or a mail server must not keep the command


def _fill_standard_streams() -> None:
    """Put /dev/null where a stream was closed before our start; otherwise the next file opened would be that stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # close-on-exec, so that the job finds the stream closed, just as without us
    os.close(descriptor)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
