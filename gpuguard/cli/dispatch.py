"""From the words of a command line to its exit code.

Only the module of the command that was asked for is imported, because `gpuguard run` stands before every job.
Exit codes: the job's own for `run` (else 124, 125, 126, 127, 75), for the others 0, 1 no, 2 usage, 4 no driver.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys

from gpuguard.errors import BackendError, GpuguardError, InvalidRequest, NotEnoughGpus, WaitTimeout

TYPE_CHECKING = False  # typing costs 6 ms of import
if TYPE_CHECKING:
    from typing import Any, NoReturn

COMMANDS = {
    "run": "claim GPUs, run a command on them, give them back when it ends",
    "select": "print the GPUs that `run` would choose; claims nothing",
    "explain": "say for each GPU why it is or is not eligible",
    "who": "who uses and who holds which GPU",
    "daemon": "guard the GPUs by a policy file: observe, warn, end",
    "events": "what happened: claims, releases, what the guard did or would have done",
    "keep": "ask the daemon to leave your processes alone for a time",
    "deny": "let a user make no new claims for a time (root)",
    "quarantine": "take a device out of service (root)",
    "policy": "check and explain policy files for the daemon, and show their language",
    "doctor": "check driver, lock directory and permissions, and say what to do",
    "setup": "make the lock directory /run/gpuguard for all users of this machine",
    "sim": "steer the simulated node: start, use, set, fault, show, stop",
}

# argparse's words, and what people understand
_CLEARER = {
    "expected one argument": "a value is missing (it cannot begin with a dash)",
    "ignored explicit argument": "it takes no value, but got",
}

EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NO_DRIVER = 4
EXIT_NOT_NOW = 75  # EX_TEMPFAIL of sysexits.h
EXIT_TIMEOUT = 124  # as timeout(1)
EXIT_RUN_FAILED = 125  # as env(1), timeout(1), docker run


def run_command_line(words: list[str]) -> int:
    """Run one command line; returns the exit code and never raises."""
    command = words[0] if words else ""
    try:
        status = _dispatch(command, words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader went away (`gpuguard who | head -1`): there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_NO
    except KeyboardInterrupt:
        return 130
    except GpuguardError as error:
        from gpuguard.views.text import neutralise

        print("gpuguard:", "\n".join(map(neutralise, str(error).splitlines())), file=sys.stderr)
        return exit_code(command, error)
    except Exception as error:  # the border of this process: a user gets a sentence, a developer more
        if "GPUGUARD_DEBUG" in os.environ:
            raise
        print(f"gpuguard: an error inside gpuguard: {error!r}.  GPUGUARD_DEBUG=1 shows where.", file=sys.stderr)
        return EXIT_RUN_FAILED if command == "run" else EXIT_NO


def exit_code(command: str, error: GpuguardError) -> int:
    """The exit code that tells a script what kind of *error* it was."""
    if command == "run":
        if isinstance(error, WaitTimeout):
            return EXIT_TIMEOUT
        return EXIT_NOT_NOW if type(error) is NotEnoughGpus else EXIT_RUN_FAILED
    if isinstance(error, InvalidRequest):
        return EXIT_USAGE
    return EXIT_NO_DRIVER if isinstance(error, BackendError) else EXIT_NO


class Parser(argparse.ArgumentParser):
    """An argparse parser whose faults are InvalidRequest, so that each command can choose its exit code."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's own, but each parser complains itself: for `gpuguard sim show x` that is `sim show`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._similar(unknown[0])}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """What argparse calls for every fault."""
        for before, after in _CLEARER.items():
            message = message.replace(before, after)
        raise InvalidRequest(f"{message.removeprefix('argument ').rstrip('.')}.\nSee `{self.prog} --help`.")

    def _similar(self, word: str) -> str:
        import difflib

        flags = (flag for action in self._actions for flag in action.option_strings)
        near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
        return f" (did you mean {near[0]}?)" if near else ""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """As argparse's own, which imports shutil (with lzma, bz2) to learn the width even when nobody asks for help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or 80
    except OSError:
        return 80


def build_parser(command: str) -> Parser:
    """The parser of one sub-command."""
    module = importlib.import_module(f"gpuguard.cli.{command}")
    parser = Parser(
        prog=f"gpuguard {command}",
        description=module.__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.add_options(parser)
    return parser


def _dispatch(command: str, words: list[str]) -> int:
    if command in ("-h", "--help", "help"):
        print(overview())
        return 0
    if command in ("-V", "--version"):
        from gpuguard import __version__

        print(f"gpuguard {__version__}")
        return 0
    if command not in COMMANDS:
        raise InvalidRequest(_unknown(command))
    try:
        args = build_parser(command).parse_args(words[1:])
    except SystemExit as end:  # --help
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    gc.enable()
    status: int = importlib.import_module(f"gpuguard.cli.{command}").main(args)
    return status


def overview() -> str:
    """What `gpuguard --help` prints."""
    rows = "\n".join(f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items())
    return (
        "usage: gpuguard COMMAND [options]\n\n"
        "Picks free GPUs on a shared server, claims them so that nobody else gets them, and runs the job.\n\n"
        f"{rows}\n\n"
        "  gpuguard run -n 2 -- python train.py     two free GPUs for one job\n"
        "  gpuguard who                             who holds what\n"
        "  gpuguard COMMAND --help                  all options of a command"
    )


def _unknown(command: str) -> str:
    if not command:
        return f"a command is missing.\n\n{overview()}"
    import difflib

    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean `gpuguard {near[0]}`?" if near else f"choose one of {', '.join(COMMANDS)}."
    return f"there is no command {command!r}: {hint}"
