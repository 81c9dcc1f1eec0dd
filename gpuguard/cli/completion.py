"""Print a script that lets your shell complete commands, options, devices, users and claims.

eval "$(gpuguard completion bash)"                                     in ~/.bashrc
gpuguard completion zsh > ~/.zfunc/_gpuguard                           and fpath+=(~/.zfunc) before compinit
gpuguard completion fish > ~/.config/fish/completions/gpuguard.fish

The package for your system has done so already.  See docs/shell.md.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from gpuguard.errors import InvalidRequest
from gpuguard.views.shells import DIRECTORY, FILE, JOB, TEXT, WORDS, ShellCommand, ShellWord

if TYPE_CHECKING:
    from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")

# What a value is, by the name under which argparse keeps it, unless ...
_BY_DEST = {
    **dict.fromkeys(("gpus", "exclude", "prefer", "device", "devices"), "devices"),
    **dict.fromkeys(("user", "daemon_user"), "users"),
    **dict.fromkeys(("claim", "after"), "claims"),
    "cancel": "reservations",
    "hosts": "hosts",
    "pids": "processes",
    "model": "models",
    "mig": "profiles",
    "fields": "fields",
    "apps": "apps",
}
# ... the name of the value in the help says more: --device UUID is not --device D.
_BY_METAVAR = {**dict.fromkeys(("FILE", "PATH", "RECORDING"), FILE), "DIR": DIRECTORY, "UUID": "uuids"}
_FIXED = {
    "backend": ("nvml", "smi", "simulated"),
    "checkpoint_signal": ("USR1", "USR2", "INT", "TERM", "HUP"),
    "shell": SHELLS,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", help="bash, zsh or fish")
    # For the scripts: the values of a kind that begin with SHELL, one per line, what each is behind a tab.
    parser.add_argument("--values", metavar="KIND", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    if args.values:
        from gpuguard.cli import completion_values

        return completion_values.print_values(args.values, args.shell or "")
    if args.shell not in SHELLS:
        what = f"there is no completion for {args.shell!r}" if args.shell else "for which shell"
        raise InvalidRequest(f"{what}: write `gpuguard completion bash`, zsh or fish.")
    from gpuguard import __version__

    shell = importlib.import_module(f"gpuguard.views.shells.{args.shell}")
    print(shell.script(commands(), __version__), end="")
    return 0


def commands() -> list[ShellCommand]:
    """All commands, gpuguard itself first, and what each understands."""
    from gpuguard.cli import COMMANDS, build_parser

    own = (
        ShellWord(("-h", "--help"), "", "show the commands", None),
        ShellWord(("-V", "--version"), "", "show the version", None),
    )
    found = [ShellCommand((), "", own, tuple(COMMANDS.items()))]
    for name, purpose in COMMANDS.items():
        found += _commands_of((name,), purpose, build_parser(name))
    return found


def _commands_of(path: tuple[str, ...], purpose: str, parser: argparse.ArgumentParser) -> Iterator[ShellCommand]:
    words, followers = [], {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            purposes = {choice.dest: _line(choice.help) for choice in action._choices_actions}
            followers = {name: (purposes.get(name, ""), follower) for name, follower in action.choices.items()}
        elif action.help != argparse.SUPPRESS:
            words.append(_word(action))
    yield ShellCommand(path, purpose, tuple(words), tuple((name, what) for name, (what, _) in followers.items()))
    for name, (what, follower) in followers.items():
        yield from _commands_of((*path, name), what, follower)


def _word(action: argparse.Action) -> ShellWord:
    fixed = tuple(map(str, action.choices or _FIXED.get(action.dest, ())))
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.nargs == 0:
        kind = None
    elif action.nargs == argparse.REMAINDER:
        kind = JOB
    elif fixed:
        kind = WORDS
    elif action.dest == "dir":
        kind = DIRECTORY
    else:
        kind = _BY_METAVAR.get(name) or _BY_DEST.get(action.dest, TEXT)
    return ShellWord(
        tuple(action.option_strings),
        name,
        _line(action.help).replace("%%", "%"),
        kind,
        fixed,
        optional=action.nargs == "?",
        many=action.nargs in ("+", "*"),
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split())
