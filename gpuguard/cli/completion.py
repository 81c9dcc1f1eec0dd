"""Print a script that lets your shell complete commands, options, devices, users and claims.

eval "$(gpuguard completion bash)"                                     in ~/.bashrc
gpuguard completion zsh > ~/.zfunc/_gpuguard                           and fpath+=(~/.zfunc) before compinit
gpuguard completion fish > ~/.config/fish/completions/gpuguard.fish

The package for your system has done so already.  See docs/shell.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpuguard.cli.completion_values import VALUES, print_values
from gpuguard.errors import GpuguardError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where the installed scripts lie below the share directory of the environment: see scripts/build-completions.
SHELLS = {
    "bash": ("bash-completion/completions/gpuguard",),
    "zsh": ("zsh/site-functions/_gpuguard", "zsh/vendor-completions/_gpuguard"),  # the second one is Debian's
    "fish": ("fish/vendor_completions.d/gpuguard.fish",),
}

FILE, DIRECTORY, JOB = "file", "directory", "job"  # kinds of a value that the shells complete themselves

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
_BY_METAVAR = {**dict.fromkeys(("FILE", "PATH", "RECORDING"), FILE), "UUID": "uuids"}
_FIXED = {
    "backend": ("nvml", "smi", "simulated"),
    "checkpoint_signal": ("USR1", "USR2", "INT", "TERM", "HUP"),
    "shell": tuple(SHELLS),
}

# The generated scripts know commands, options and words that never change.  These parts add what they lack: values with
# their purpose from `gpuguard completion --values`, the words of the job, and --option=value.
_BASH_BEFORE = r"""
_gpuguard_values() {  # kind, word
    local program=${COMP_WORDS[0]/#\~/$HOME} value purpose
    local -a values=() shown=()
    type -P "$program" >/dev/null || program=gpuguard  # an alias
    while IFS=$'\t' read -r value purpose; do
        values+=("$value") shown+=("$value${purpose:+  ($purpose)}")
    done < <("$program" completion --values "$1" -- "$2" 2>/dev/null </dev/null)
    # Of several, readline inserts only what all begin with, and lists them: so they can show their purpose.
    ((${#values[@]} > 1)) && [[ $COMP_TYPE != 37 && $COMP_TYPE != 42 ]] && values=("${shown[@]}")
    ((${#values[@]} == 0)) || printf '%s\n' "${values[@]}"
}
_gpuguard_job() {  # the index of its first word
    if declare -F _comp_command_offset >/dev/null; then _comp_command_offset "$1"
    elif declare -F _command_offset >/dev/null; then _command_offset "$1"
    else
        local kind=-f
        ((COMP_CWORD == $1)) && [[ ${COMP_WORDS[COMP_CWORD]} != */* ]] && kind=-c
        mapfile -t COMPREPLY < <(compgen "$kind" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
_gpuguard_job_word() {
    _gpuguard_job "$current_action_args_start_index"
    ((${#COMPREPLY[@]} == 0)) || printf '%s\n' "${COMPREPLY[@]}"
}"""
_BASH_BEHIND = r"""
_gpuguard() {
    local -a typed=("${COMP_WORDS[@]:0:COMP_CWORD+1}")
    local i
    for ((i = 2; i < COMP_CWORD; i++)); do
        if [[ ${typed[i]} == -- && " @STARTERS@ " == *" ${typed[1]} "* ]]; then
            compopt -o filenames
            _gpuguard_job $((i + 1))
            return
        fi
    done
    # bash makes three words of --option=value.
    local -a COMP_WORDS=("${typed[0]}")
    for ((i = 1; i < ${#typed[@]}; i++)); do
        [[ ${typed[i]} == = && ${typed[i - 1]} == --* ]] || COMP_WORDS+=("${typed[i]}")
    done
    [[ ${typed[i - 1]} == = ]] && COMP_WORDS+=("")
    local COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shtab_gpuguard
}
complete -F _gpuguard gpuguard
"""
_ZSH = r"""
_gpuguard_values() {  # kind
    local line
    local -a values shown program
    program=(${(Q)~_gpuguard_typed} completion --values $1 -- "$PREFIX")
    (( $+commands[$program[1]] )) || [[ -x $program[1] ]] || program[1]=gpuguard
    for line in ${(f)"$(_call_program $1 ${(q)program[@]} 2>/dev/null </dev/null)"}; do
        values+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  -- }")
    done
    (( $#values )) || { _message -e $1 $1; return 1 }
    compadd -V $1 -l -d shown -a values
}
functions[_gpuguard_generated]=$functions[_shtab_gpuguard]
_shtab_gpuguard() {
    local _gpuguard_typed=$words[1]
    if [[ $PREFIX == --*=* ]]; then  # _arguments was told of --option value only
        words[CURRENT]=("${PREFIX%%=*}" "${PREFIX#*=}")
        compset -P 1 '*='
        (( CURRENT++ ))
    fi
    _gpuguard_generated "$@"
}"""
_FISH_VALUE = "(string replace -r -- '^--[^=]*=' '' (commandline -ct))"  # shtab's own forgets --option=value
_FISH = r"""
function _gpuguard_values  # kind
    set -l program (commandline -opc)[1]
    type -q -- $program; or set program gpuguard
    type -q -- $program; or return
    set -l word (string replace -r -- '^--[^=]*=' '' (commandline -ct))
    command $program completion --values $argv[1] -- "$word" 2>/dev/null </dev/null
end
function _gpuguard_job
    set -l words (commandline -opc)
    # Behind --, or as many words as there are that are no options of ours.
    set -l first (math (count $words) - $_shtab_gpuguard_npos + 1)
    contains -- -- $words; and set first (math (contains -i -- -- $words) + 1)
    set -l current (commandline -ct)
    if test $first -gt (count $words)
        complete -C "$current"
    else
        complete -C (string join ' ' -- (string escape -- $words[$first..-1]) "$current")
    end
end"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", help="bash, zsh or fish")
    # For the scripts: the values of a kind that begin with SHELL, one per line, what each is behind a tab.
    parser.add_argument("--values", metavar="KIND", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    if args.values:
        return print_values(args.values, args.shell or "")
    if args.shell not in SHELLS:
        what = f"there is no completion for {args.shell!r}" if args.shell else "for which shell"
        raise InvalidRequest(f"{what}: write `gpuguard completion bash`, zsh or fish.")
    print(_script(args.shell), end="")
    return 0


def _script(shell: str) -> str:
    try:
        import shtab  # of the extra [completion]
    except ImportError:
        share = Path(sys.prefix, "share")
        for path in (share / name for name in SHELLS[shell]):
            if path.exists():
                return path.read_text(encoding="utf-8")
        raise GpuguardError(
            "shtab, which writes completion scripts, is missing: pip install 'gpuguard[completion]'."
        ) from None
    parser = whole_parser()
    starters = []
    for command, action in values_of(parser):
        kind = kind_of(action)
        if kind == JOB:
            starters.append(command)
        if action.dest in _FIXED:
            action.choices = _FIXED[action.dest]
        elif kind:
            action.complete = _completers(kind)  # type: ignore[attr-defined]  # where shtab looks for it
    before = {"bash": _BASH_BEFORE + "".join(map(_bash_function, VALUES)), "zsh": _ZSH, "fish": _FISH}
    text: str = shtab.complete(parser, shell, preamble=before[shell])
    return text + "\n" + (_BASH_BEHIND.replace("@STARTERS@", " ".join(starters)) if shell == "bash" else "")


def whole_parser() -> argparse.ArgumentParser:
    """One parser for `gpuguard` and all of its commands, which else are made one at a time."""
    from gpuguard.cli import COMMANDS, command_module
    from gpuguard.cli.parser import Parser

    parser = Parser(prog="gpuguard", allow_abbrev=False)
    parser.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command_module(name).add_options(commands.add_parser(name, help=purpose, allow_abbrev=False))
    return parser


def values_of(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """All options and positional words that take a value, each with its command: "policy check"."""
    for action in parser._actions:  # argparse has no other way to list them
        if isinstance(action, argparse._SubParsersAction):
            for name, subparser in action.choices.items():
                yield from values_of(subparser, f"{command} {name}".strip())
        elif action.nargs != 0 and action.help != argparse.SUPPRESS:
            yield command, action


def kind_of(action: argparse.Action) -> str | None:
    """What the value of *action* is: FILE, DIRECTORY, JOB, one of VALUES; None: a word of the parser, or any text."""
    if action.nargs == argparse.REMAINDER:
        return JOB
    if action.choices:
        return None
    if action.dest == "dir":
        return DIRECTORY
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return _BY_METAVAR.get(metavar) or _BY_DEST.get(action.dest)


def _completers(kind: str) -> dict[str, str | dict[str, str]]:
    import shtab

    if kind == FILE:
        return {**shtab.FILE, "fish": f"(__fish_complete_path {_FISH_VALUE})"}
    if kind == DIRECTORY:
        return {**shtab.DIRECTORY, "fish": f"(__fish_complete_directories {_FISH_VALUE})"}
    if kind == JOB:
        return {"bash": "_gpuguard_job_word", "zsh": "_normal", "fish": "(_gpuguard_job)"}
    return {
        "bash": f"_gpuguard_values_{kind}",
        "zsh": f" _gpuguard_values {kind}",  # the space: with these words, and none of _arguments' own before them
        "fish": f"(_gpuguard_values {kind})",
    }


def _bash_function(kind: str) -> str:
    """shtab's bash calls a function by its name, with the word alone."""
    return f'\n_gpuguard_values_{kind}() {{ _gpuguard_values {kind} "$1"; }}'
