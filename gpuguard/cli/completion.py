"""Print a script that lets your shell complete commands, options, GPUs, users and claims.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from gpuguard.backends import DEFAULT_BACKEND, default_backend
from gpuguard.claims.records import read_records
from gpuguard.cli import COMMANDS, subcommand
from gpuguard.cli.options import Parser, directory_of, snapshot_source
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.model import HEALTH, MEMORY, MODEL, PROCESS_DETAILS, PROCESSES, Device, Snapshot
from gpuguard.queue.reservations import read_reservations
from gpuguard.queue.tickets import waiting_tickets
from gpuguard.sanitize import neutral_command, neutralise
from gpuguard.units import format_bytes, local_time
from gpuguard.users import read_groups
from gpuguard.vendors import VENDORS
from gpuguard.views.query import APP_FIELDS, GPU_FIELDS

Values = Iterable[tuple[str, str]]

# Shell -> where its installed script lies below the share directory of the environment: see scripts/build-completions.
SHELLS = {
    "bash": ("bash-completion/completions/gpuguard",),
    "zsh": ("zsh/site-functions/_gpuguard", "zsh/vendor-completions/_gpuguard"),  # the second one is Debian's
    "fish": ("fish/vendor_completions.d/gpuguard.fish",),
}

FILE, DIRECTORY, JOB = "file", "directory", "job"  # kinds of a value that the shells complete themselves

# The kind of a value, by the name under which argparse keeps it, unless ...
_BY_DEST = {
    **dict.fromkeys(("exclude", "prefer", "device", "devices"), "devices"),
    **dict.fromkeys(("user", "daemon_user"), "users"),
    "group": "groups",
    **dict.fromkeys(("claim", "after"), "claims"),
    "cancel": "reservations",
    "ids": "ids",
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
    "backend": (DEFAULT_BACKEND, *(vendor.backend for vendor in VENDORS.values()), "smi", "simulated"),
    "checkpoint_signal": ("USR1", "USR2", "INT", "TERM", "HUP"),
    "shell": tuple(SHELLS),
}

# The word that is completed.  The expressions of shtab itself forget --option=value.
_FISH_VALUE = "(string replace -r -- '^--[^=]*=' '' (commandline -ct))"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", nargs="?", help="bash, zsh or fish")
    # For the scripts: print the values of a kind that begin with SHELL, one per line, each explained after a tab.
    parser.add_argument("--values", metavar="KIND", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    if args.values:
        print_values(args.values, args.shell or "")
        return 0
    if args.shell not in SHELLS:
        what = f"there is no completion for {args.shell!r}" if args.shell else "for which shell"
        raise InvalidRequest(f"{what}: write `gpuguard completion bash`, zsh or fish.")
    print(script_for(args.shell), end="")
    return 0


def script_for(shell: str) -> str:
    """Return what `gpuguard completion` prints; GpuguardError if there is neither shtab nor an installed script."""
    try:
        import shtab  # from the extra [completion]
    except ImportError:
        for name in SHELLS[shell]:
            with suppress(FileNotFoundError):
                return Path(sys.prefix, "share", name).read_text(encoding="utf-8")
        raise GpuguardError(
            "shtab, which writes completion scripts, is missing: pip install 'gpuguard[completion]'."
        ) from None
    kinds: dict[str, dict[str, str | dict[str, str]]] = {
        FILE: {**shtab.FILE, "fish": f"(__fish_complete_path {_FISH_VALUE})"},
        DIRECTORY: {**shtab.DIRECTORY, "fish": f"(__fish_complete_directories {_FISH_VALUE})"},
        JOB: {"bash": "_gpuguard_job_word", "zsh": "_normal", "fish": "(_gpuguard_job)"},
    }
    kinds |= {
        name: {
            "bash": f"_gpuguard_values_{name}",
            # The space makes _arguments call it with these words, and with none of its own before them.
            "zsh": f" _gpuguard_values {name}",
            "fish": f"(_gpuguard_values {name})",
        }
        for name in VALUES
    }
    # In bash, shtab calls a function by its name, with only the word.
    by_name = [f'_gpuguard_values_{name}() {{ _gpuguard_values {name} "$1"; }}' for name in VALUES]
    parser, starters = whole_parser(), []
    for command, action in values_of(parser):
        kind = kind_of(action)
        if kind == JOB:
            starters.append(command)
        if action.dest in _FIXED:
            action.choices = _FIXED[action.dest]
        elif kind:
            action.complete = kinds[kind]  # type: ignore[attr-defined]  # where shtab looks for it
    # shtab writes commands, options and words that never change; a file beside this one adds the rest.
    added = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    if shell != "bash":
        return str(shtab.complete(parser, shell, preamble=added))
    added = "\n".join([added.replace("@STARTERS@", " ".join(starters)), *by_name])
    return f"{shtab.complete(parser, shell, preamble=added)}\ncomplete -F _gpuguard gpuguard\n"


def whole_parser() -> Parser:
    """Return one parser for `gpuguard` and all of its commands, whose parsers are otherwise made one at a time."""
    parser = Parser(prog="gpuguard")
    parser.add_argument("-V", "--version", action="store_true", help="show the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        subcommand(name).add_options(commands.add_parser(name, help=purpose))
    return parser


def values_of(parser: Parser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    """Yield all options and positional words that take a value, each with its command, such as "policy check"."""
    for action in parser.actions:
        choices = action.choices.items() if isinstance(action.choices, dict) else ()
        subparsers = [(name, value) for name, value in choices if isinstance(value, Parser)]
        for name, subparser in subparsers:
            yield from values_of(subparser, f"{command} {name}".strip())
        if not subparsers and action.nargs != 0 and action.help != argparse.SUPPRESS:
            yield command, action


def kind_of(action: argparse.Action) -> str | None:
    """Return what *action* takes: FILE, DIRECTORY, JOB, one of VALUES, or None for a word of the parser or any text."""
    if action.nargs == argparse.REMAINDER:
        return JOB
    if action.choices:
        return None
    if action.dest == "dir":
        return DIRECTORY
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return _BY_METAVAR.get(metavar) or _BY_DEST.get(action.dest)


# The rest of this file finds values that a shell offers after a TAB and that may change: devices, users, claims.
#
# The user is typing, so errors are silent, it takes TYPING_SECONDS at most, and while the daemon runs its last sample
# is used, so that the driver is left alone.  Nothing is changed.

TYPING_SECONDS = 2.0
_BEFORE_PEOPLE = 1000  # uids of services are smaller (login.defs: UID_MIN)
_NOBODY = 65534


def print_values(kind: str, word: str) -> None:
    """Print the values of *kind* that complete *word*, one per line, each explained after a tab."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, TYPING_SECONDS)
    with suppress(GpuguardError, OSError, KeyError):  # KeyError: no such kind
        print("".join(f"{line}\n" for line in completions(kind, word)), end="")


def completions(kind: str, word: str) -> Iterator[str]:
    """Yield ``"0,1\\tH100 80GB HBM3"`` for the word ``0,``.  Values that the word already names are left out."""
    values, is_list = VALUES[kind]
    before, _, last = word.rpartition(",") if is_list else ("", "", word)
    named = before.split(",")
    for value, what in values(last):
        # A word that a shell would split or execute was written to do harm.
        plain = value.isprintable() and not set(value) & set(" \\\"'`$;|&<>()*?[]{}~#!")
        if value.startswith(last) and value not in named and plain:
            yield f"{before}{',' if before else ''}{value}\t{neutralise(what)[:60]}"


def _devices(word: str) -> Values:
    """Return the devices by index, or by uuid once the user has begun to write one."""
    snapshot, by_uuid = _snapshot(), word[:1].isalpha()
    named = ((device, device.uuid if by_uuid or "?" in device.label else device.label) for device in snapshot.devices)
    return [(name, _state(device, snapshot)) for device, name in named]


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
    """Return the word of each name that distinguishes it from others: H100 of "H100 80GB HBM3"."""
    names = dict.fromkeys(device.name for device in _snapshot().devices if device.name)
    found = {next((part for part in name.split() if any(map(str.isdigit, part))), name): name for name in names}
    return found.items()


def _profiles(_: str) -> Values:
    return dict.fromkeys((device.mig_profile for device in _snapshot().devices if device.mig_profile), "").items()


def _processes(_: str) -> Values:
    """Return the user's own processes on devices, or everybody's for root."""
    uid = os.geteuid()
    found: dict[str, str] = {}
    for device in _snapshot().devices:
        for process in device.processes or ():
            if uid in (0, process.uid):
                what = f"GPU {device.label} {process.user or ''} {neutral_command(process.command, brief=True)}"
                found.setdefault(str(process.pid), what)
    return found.items()


def _users(_: str) -> Values:
    """Return users of devices, owners of claims, and the people of this machine, without asking a directory service."""
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


def _groups(_: str) -> Values:
    """Return the groups of this user; root knows which groups there are."""
    return [(name, "") for name in read_groups(os.geteuid()).values()]


def _claims(_: str) -> Values:
    """Return the user's own claims, or everybody's for root."""
    return [
        (claim.id, f"{claim.user} {claim.note or neutral_command(claim.command, brief=True)}")
        for claim in read_records(directory_of(_source()))
        if os.geteuid() in (0, claim.uid)
    ]


def _ids(word: str) -> Values:
    """Return the user's own claims and waiting requests, or everybody's for root."""
    waiting = [
        (ticket.short_id, f"{ticket.user} waits {ticket.note or ''}")
        for ticket in waiting_tickets(directory_of(_source())) or ()
        if os.geteuid() in (0, ticket.uid)
    ]
    return [*waiting, *_claims(word)]


def _reservations(_: str) -> Values:
    """Return the user's own reservations, or everybody's for root."""
    reservations, _torn, _arrived = read_reservations(directory_of(_source()), time.time())
    return [
        (kept.id, f"{kept.whose} {local_time(kept.begins, '%a %H:%M')} {kept.note or ''}")
        for kept in reservations
        if os.geteuid() in (0, kept.uid, kept.maker)
    ]


def _hosts(_: str) -> Values:
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


# Kind -> the function that returns its values, and whether several may be joined with commas.
VALUES: dict[str, tuple[Callable[[str], Values], bool]] = {
    "devices": (_devices, True),
    "uuids": (_uuids, False),
    "models": (_models, False),
    "profiles": (_profiles, False),
    "processes": (_processes, False),
    "users": (_users, False),
    "groups": (_groups, False),
    "claims": (_claims, False),
    "ids": (_ids, False),
    "reservations": (_reservations, False),
    "hosts": (_hosts, True),
    "fields": (lambda _: [(name, field.text) for name, field in GPU_FIELDS.items()], True),
    "apps": (lambda _: [(name, field.text) for name, field in APP_FIELDS.items()], True),
}


def _source() -> argparse.Namespace:
    """Return the defaults of --backend and --dir."""
    return argparse.Namespace(backend=default_backend(), dir=os.environ.get("GPUGUARD_DIR") or None, fresh=False)


def _snapshot() -> Snapshot:
    with closing(snapshot_source(_source(), {HEALTH, MEMORY, MODEL, PROCESSES, PROCESS_DETAILS})) as source:
        return source.joined(reservations=False)[0]
