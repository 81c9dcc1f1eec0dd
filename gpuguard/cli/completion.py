"""Print a script that lets your shell complete commands, options, devices, users and claims.

eval "$(gpuguard completion bash)"                                     in ~/.bashrc
gpuguard completion zsh > ~/.zfunc/_gpuguard                           and fpath+=(~/.zfunc) before compinit
gpuguard completion fish > ~/.config/fish/completions/gpuguard.fish

The package for your system has done so already.  See docs/shell.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpuguard.backends.client import open_worker
from gpuguard.claims.directory import LockDirectory, lock_directory
from gpuguard.claims.records import read_records
from gpuguard.cli import COMMANDS, subcommand
from gpuguard.cli.options import Parser
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import HEALTH, MEMORY, MODEL, PROCESS_DETAILS, PROCESSES, Device, Snapshot
from gpuguard.queue.reservations import read_reservations
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.source import SnapshotSource
from gpuguard.units import format_bytes, local_time
from gpuguard.views.query import APP_FIELDS, GPU_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

    Values = Iterable[tuple[str, str]]

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
        print_values(args.values, args.shell or "")
        return 0
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
    kinds: dict[str, dict[str, str | dict[str, str]]] = {
        FILE: {**shtab.FILE, "fish": f"(__fish_complete_path {_FISH_VALUE})"},
        DIRECTORY: {**shtab.DIRECTORY, "fish": f"(__fish_complete_directories {_FISH_VALUE})"},
        JOB: {"bash": "_gpuguard_job_word", "zsh": "_normal", "fish": "(_gpuguard_job)"},
    }
    bash_functions = ""
    for name in VALUES:
        kinds[name] = {
            "bash": f"_gpuguard_values_{name}",
            "zsh": f" _gpuguard_values {name}",  # the space: with these words, and none of _arguments' own before them
            "fish": f"(_gpuguard_values {name})",
        }
        # shtab's bash calls a function by its name, with the word alone.
        bash_functions += f'\n_gpuguard_values_{name}() {{ _gpuguard_values {name} "$1"; }}'
    parser, starters = whole_parser(), []
    for command, action in values_of(parser):
        kind = kind_of(action)
        if kind == JOB:
            starters.append(command)
        if action.dest in _FIXED:
            action.choices = _FIXED[action.dest]
        elif kind:
            action.complete = kinds[kind]  # type: ignore[attr-defined]  # where shtab looks for it
    before = {"bash": _BASH_BEFORE + bash_functions, "zsh": _ZSH, "fish": _FISH}
    text: str = shtab.complete(parser, shell, preamble=before[shell])
    return text + "\n" + (_BASH_BEHIND.replace("@STARTERS@", " ".join(starters)) if shell == "bash" else "")


def whole_parser() -> argparse.ArgumentParser:
    """One parser for `gpuguard` and all of its commands, which else are made one at a time."""
    parser = Parser(prog="gpuguard")
    parser.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        subcommand(name).add_options(commands.add_parser(name, help=purpose))
    return parser


def values_of(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """All options and positional words that take a value, each with its command: "policy check"."""
    found: list[argparse.Action] = []

    class OptionCollector(argparse.HelpFormatter):
        """argparse lists the options of a parser to what formats its usage, and to nobody else."""

        def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
            found.extend(actions)

    usual, parser.formatter_class = parser.formatter_class, OptionCollector
    parser.format_usage()
    parser.formatter_class = usual
    for action in found:
        choices = action.choices.items() if isinstance(action.choices, dict) else ()
        subparsers = [(name, value) for name, value in choices if isinstance(value, argparse.ArgumentParser)]
        for name, subparser in subparsers:
            yield from values_of(subparser, f"{command} {name}".strip())
        if not subparsers and action.nargs != 0 and action.help != argparse.SUPPRESS:
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


# What a shell offers behind a TAB and only this moment knows: devices, users, claims.
#
# The user is typing: what goes wrong is silent, SECONDS is all it may take, and while the daemon runs its last sample
# is shown, so that the driver is left alone.  Nothing is changed.

SECONDS = 2.0
_BEFORE_PEOPLE = 1000  # uids of services are smaller (login.defs: UID_MIN)
_NOBODY = 65534


def print_values(kind: str, word: str) -> None:
    """Print the values of *kind* that complete *word*, one per line, with what each is behind a tab."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    lines: list[str] = []
    if kind in VALUES:
        with suppress(GpuguardError, OSError):
            lines = list(completions(kind, word))
    print("".join(f"{line}\n" for line in lines), end="")


def completions(kind: str, word: str) -> Iterator[str]:
    """``"0,1\\tH100 80GB HBM3"`` for the word ``0,``: what was named before is not offered again."""
    values, is_list = VALUES[kind]
    before, _, last = word.rpartition(",") if is_list else ("", "", word)
    named = before.split(",")
    for value, what in values(last):
        # A word that a shell would take apart or execute was written to do harm.
        plain = value.isprintable() and not set(value) & set(" \\\"'`$;|&<>()*?[]{}~#!")
        if value.startswith(last) and value not in named and plain:
            yield f"{before}{',' * bool(before)}{value}\t{neutralise(what)[:60]}"


def _devices(word: str) -> Values:
    """By index; by uuid once the user has begun to write one."""
    snapshot = _snapshot()
    return [
        (device.uuid if word[:1].isalpha() or "?" in device.label else device.label, _state(device, snapshot))
        for device in snapshot.devices
    ]


def _uuids(_: str) -> Values:
    snapshot = _snapshot()
    return [(device.uuid, f"{device.label} {_state(device, snapshot)}") for device in snapshot.devices]


def _state(device: Device, snapshot: Snapshot) -> str:
    users = dict.fromkeys(claim.user for claim in snapshot.claims if device.uuid in claim.devices)
    memory = f"{format_bytes(device.memory_used)}/{format_bytes(device.memory_total)}"
    held = f"claimed by {', '.join(users)}" if users else None
    barred = dict(snapshot.quarantined).get(device.uuid)
    return " ".join(filter(None, [device.mig_profile or device.name, memory, held, barred]))


def _models(_: str) -> Values:
    """The word of a name that tells it from others: H100 of "H100 80GB HBM3"."""
    names = dict.fromkeys(device.name for device in _snapshot().devices if device.name)
    found = {next((part for part in name.split() if any(map(str.isdigit, part))), name): name for name in names}
    return found.items()


def _profiles(_: str) -> Values:
    found = dict.fromkeys(device.mig_profile for device in _snapshot().devices if device.mig_profile)
    return [(profile, "") for profile in found]


def _processes(_: str) -> Values:
    """Own ones on devices, for root everybody's."""
    uid = os.geteuid()
    found: dict[str, str] = {}
    for device in _snapshot().devices:
        for process in device.processes or ():
            if uid in (0, process.uid):
                what = f"GPU {device.label} {process.user or ''} {neutral_command(process.command, brief=True)}"
                found.setdefault(str(process.pid), what)
    return found.items()


def _users(_: str) -> Values:
    """Users of devices and owners of claims, and the people of this machine; a directory service is not asked."""
    found: dict[str, str] = {}
    with suppress(GpuguardError, OSError):
        snapshot = _snapshot()
        processes = [process for device in snapshot.devices for process in device.processes or ()]
        found = dict.fromkeys([process.user for process in processes if process.user], "uses a GPU")
        found |= dict.fromkeys([claim.user for claim in snapshot.claims], "has a claim")
    with open("/etc/passwd", encoding="utf-8", errors="replace") as lines:
        for name, _password, uid, *_rest in (line.split(":") for line in lines if line.count(":") >= 6):
            if uid.isdecimal() and (uid == "0" or _BEFORE_PEOPLE <= int(uid) != _NOBODY):
                found.setdefault(name, "")
    return found.items()


def _claims(_: str) -> Values:
    """Own claims, for root everybody's."""
    uid = os.geteuid()
    return [
        (claim.id, f"{claim.user} {claim.note or neutral_command(claim.command, brief=True)}")
        for claim in read_records(_directory())
        if uid in (0, claim.uid)
    ]


def _reservations(_: str) -> Values:
    """Own reservations, for root everybody's."""
    uid = os.geteuid()
    reservations, _torn, _arrived = read_reservations(_directory(), time.time())
    return [
        (kept.id, f"{kept.user} {local_time(kept.begins, '%a %H:%M')} {kept.note or ''}")
        for kept in reservations
        if uid in (0, kept.uid, kept.maker)
    ]


def _hosts(_: str) -> Values:
    """Those that the user's ssh knows by name."""
    found: dict[str, str] = {}
    for name, begins in (("config", "host "), ("known_hosts", "")):
        with suppress(OSError), open(os.path.expanduser(f"~/.ssh/{name}"), encoding="utf-8", errors="replace") as lines:
            for line in lines:
                plain = line.replace("=", " ")  # "Host=gpu1" is allowed
                words = plain.split() if plain.lower().startswith(begins) else []
                if words and not words[0].startswith(("#", "|", "@", "[")):
                    names = words[1:] if begins else words[0].split(",")
                    found.update({host: "" for host in names if not set(host) & set("*?!")})
    return found.items()


# Each kind, and whether its values may stand behind each other with commas.
VALUES: dict[str, tuple[Callable[[str], Values], bool]] = {
    "devices": (_devices, True),
    "uuids": (_uuids, False),
    "models": (_models, False),
    "profiles": (_profiles, False),
    "processes": (_processes, False),
    "users": (_users, False),
    "claims": (_claims, False),
    "reservations": (_reservations, False),
    "hosts": (_hosts, True),
    "fields": (lambda _: [(name, field.text) for name, field in GPU_FIELDS.items()], True),
    "apps": (lambda _: [(name, field.text) for name, field in APP_FIELDS.items()], True),
}


def _backend() -> str:
    return os.environ.get("GPUGUARD_BACKEND") or "nvml"


def _directory() -> LockDirectory:
    return lock_directory(os.environ.get("GPUGUARD_DIR") or None, backend=_backend(), make=False)


def _snapshot() -> Snapshot:
    fields = {HEALTH, MEMORY, MODEL, PROCESSES, PROCESS_DETAILS}
    source = SnapshotSource(
        _backend(), lambda: open_worker(_backend()), _directory, read=lambda backend: backend.sample(fields)
    )
    try:
        return source.joined(reservations=False)[0]
    finally:
        source.close()
