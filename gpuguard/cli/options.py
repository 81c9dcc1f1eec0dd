"""What commands share: the parser, whose faults are ours, the options of several commands, and what they open."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from gpuguard.backends import Backend, default_backend, resolved
from gpuguard.backends.client import open_worker
from gpuguard.claims.directory import LockDirectory, last_about, lock_directory
from gpuguard.cli import terminal
from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.locale import _, translated
from gpuguard.model import IDLE_TOLERANCE, SLOTS, WHO_FIELDS, Snapshot
from gpuguard.source import SnapshotSource, desktop_memory
from gpuguard.units import format_count, parse_bytes, parse_celsius, parse_percent
from gpuguard.users import user_name
from gpuguard.vendors import VENDORS
from gpuguard.views.text import wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gpuguard.notify.targets import Target
    from gpuguard.request import Request

    T = TypeVar("T")

# The words of argparse, and words that people understand
_CLEARER = {
    "expected one argument": "a value is missing (it cannot begin with a dash)",
    "ignored explicit argument": "it takes no value, but got",
}


# (command, what other tools call it; "" is a word without a dash) -> what it is called here
_ELSEWHERE = {
    ("gpuguard run", "-q"): "--quiet",
    ("gpuguard run", "--name"): "--note",
    ("gpuguard run", "-t"): "--time-limit",
    ("gpuguard run", "--time"): "--time-limit",
    ("gpuguard run", "--detach"): "`gpuguard submit`",
    ("gpuguard run", "--array"): "`gpuguard submit`",
    ("gpuguard run", "-J"): "--note",
    ("gpuguard run", "-g"): "-n",
    ("gpuguard run", "--gpu"): "-n",
    ("gpuguard run", "--ngpus"): "-n",
    ("gpuguard run", "--gres"): "-n",
    ("gpuguard run", "--mem"): "--min-free",
    ("gpuguard query", ""): "--query-gpu",
}


@dataclass(frozen=True)
class SubcommandRow:
    """A command, or a command of a command, such as `gpuguard policy check`."""

    purpose: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """argparse's formatter, in the language of the user: gpuguard/locale/README.md says where the texts come from."""

    # argparse makes one for each option, too, which would load shutil, with all compressors, to learn the width.
    def __init__(self, prog: str, width: int = 80) -> None:
        super().__init__(prog, width=width - 2)

    def add_usage(self, usage: str | None, *args: Any, **more: Any) -> None:
        """Add the usage, translated if the command states it itself."""
        super().add_usage(_(usage) if usage else usage, *args, **more)

    def start_section(self, heading: str | None) -> None:
        """Begin a group with its title, translated."""
        super().start_section(_(heading) if heading else heading)

    def add_text(self, text: str | None) -> None:
        """Add the description, which is translated paragraph by paragraph."""
        super().add_text("\n\n".join(map(_, text.rstrip().split("\n\n"))) if text else text)

    def _get_help_string(self, action: argparse.Action) -> str:
        return _(action.help) if action.help else ""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(" ".join(text.split()), width)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose faults are InvalidRequest, so that each command can choose its exit code."""

    def __init__(self, **settings: Any) -> None:
        if sys.version_info >= (3, 14):
            settings["color"] = False  # it would get into manual pages and whatever else help is written to
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **settings})

    def format_help(self) -> str:
        """Return the help, as wide as the terminal."""
        columns = os.environ.get("COLUMNS", "")
        width = (int(columns) if columns.isdecimal() else 0) or terminal.width() or 80
        self.formatter_class = partial(HelpFormatter, width=width)
        return super().format_help()

    @property
    def actions(self) -> list[argparse.Action]:
        """The options and positional words of this parser."""
        return self._actions

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but each parser reports its faults: for `gpuguard sim show x` that is `sim show`."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            import difflib  # only after a mistake

            # The dashes are left out, because all flags have them: they made --json similar to --slots.
            flags = {flag.lstrip("-"): flag for action in self.actions for flag in action.option_strings}
            word = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(word.lstrip("-"), flags, n=1)
            meant = _ELSEWHERE.get((self.prog, word if word.startswith("-") else "")) or (near and flags[near[0]])
            similar = _(" (did you mean {option}?)").format(option=meant) if meant else ""
            text = _("unrecognized arguments: {words}").format(words=" ".join(unknown))
            self.error(f"{text}{similar}{self._taken(namespace)}")
        return namespace, unknown

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"] and action.option_strings and action.nargs is None:
            raise argparse.ArgumentError(action, "expected one argument")  # argparse turns --note=-- into []
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Raise InvalidRequest.  argparse calls this for every fault."""
        for before, after in _CLEARER.items():
            message = message.replace(before, after)
        fault = message.removeprefix("argument ").rstrip(".")
        raise InvalidRequest(_("{fault}.\nSee `{command} --help`.").format(fault=fault, command=self.prog))

    def _taken(self, namespace: Any) -> str:
        """Return which option may have taken the command for its value, as in ``run --wait python -V``, or ""."""
        for action in self.actions if hasattr(namespace, "command") else ():
            value = getattr(namespace, action.dest, None) if action.nargs == "?" and action.option_strings else None
            if isinstance(value, str) and value != action.const and value[:1].isalpha():
                flag = action.option_strings[-1]
                return _(
                    ".\n'{word}' was taken for the value of {option}: write `{option} -- {word}` if it is the command"
                ).format(word=value, option=flag)
        return ""


def with_joined_alternatives(parser: Parser, words: list[str]) -> list[str]:
    """Return *words* with "=" before the value of --or, which is made of options: argparse would take it for one.

    The words of the job are left alone, with or without ``--`` before them.
    """
    if "--or" not in words:
        return words
    joined, position = [], 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        word, behind = words[position], words[position + 1 : position + 2]
        action = parser._option_string_actions.get(word)
        nargs = 0 if action is None else action.nargs
        takes = nargs is None or (nargs == "?" and not "".join(behind).startswith("-"))
        taken = words[position : position + 1 + takes]
        joined += ["=".join(taken)] if word == "--or" and behind != ["--"] else taken
        position += len(taken)
    return joined + words[position:]


def with_actions(purpose: str, actions: Mapping[str, SubcommandRow]) -> SubcommandRow:
    """Return a command that consists of commands; ``args.action`` is the one that was typed."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        add_actions(parser, actions, required=True)

    return SubcommandRow(purpose, add_options, lambda args: actions[args.action].main(args))


def add_actions(parser: argparse.ArgumentParser, actions: Mapping[str, SubcommandRow], **more: Any) -> None:
    """Add commands of a command; *more* is for argparse."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", **more)
    for name, row in actions.items():
        description = f"{row.purpose[:1].upper()}{row.purpose[1:]}."
        row.add_options(commands.add_parser(name, help=row.purpose, description=description))


_reported: set[str] = set()  # directories that were reported as missing


# An option: its spellings, the name of its value or None, its help, and where it needs them more words of argparse.
OptionRow = tuple[str, str | None, str] | tuple[str, str | None, str, dict[str, Any]]
JSON = ("--json", None, "one object for programs: see docs/json.md")
FRESH = ("--fresh", None, "ask the driver, even if the daemon did so just now")
ASCII = ("--ascii", None, "draw with ASCII characters alone")


def add_table(parser: Any, *rows: OptionRow, **more: Any) -> None:
    """Add options to a parser or a group.

    A value stays text until it is used, so that a fault can say what to write instead.
    """
    for names, metavar, text, *further in rows:
        details = {"action": "store_true"} if metavar is None else {"metavar": metavar}
        parser.add_argument(*names.split(), help=text, **{**details, **more, **(further[0] if further else {})})


def add_repeatable(parser: Any, *rows: OptionRow, **more: Any) -> None:
    """Add options that may be given several times, each a list of values."""
    add_table(parser, *rows, action="append", default=[], **more)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add --backend and --dir: which machine is read, and where its claims are."""
    group = parser.add_argument_group("where to look")
    group.add_argument(
        "--backend",
        metavar="B",
        default=default_backend(),
        help="auto, nvml, amd, intel, mthreads, smi, simulated; to look at files: smi:FILE.xml, replay:FILE; see "
        "docs/sources.md (default: $GPUGUARD_BACKEND, else auto: all vendors whose GPUs are found)",
    )
    group.add_argument(
        "--dir",
        metavar="PATH",
        type=_path,
        default=os.environ.get("GPUGUARD_DIR") or None,
        help="directory of the claims (default: $GPUGUARD_DIR, else /run/gpuguard, else /run/lock or /tmp)",
    )


def _path(text: str) -> str:
    if not text:  # --dir "$UNSET"
        raise argparse.ArgumentTypeError(_("the name of the directory is empty."))
    return text


def name_backend(args: argparse.Namespace) -> None:
    """Replace "auto" in --backend where --vendor names a vendor of which this machine has only an integrated GPU.

    Other commands would not see that GPU, so those inside the job are told the name: see `gpuguard run`.
    """
    vendor, backend = getattr(args, "vendor", None), getattr(args, "backend", "")
    if vendor and (named := resolved(backend, vendor)) != resolved(backend, None):
        args.backend = named


def backend_of(args: argparse.Namespace) -> Backend:
    """Return the backend of --backend, which runs in its own process so that a driver that hangs cannot hang us."""
    return open_worker(
        args.backend,
        on_slow=lambda text: print(f"gpuguard: {text}", file=sys.stderr),
        desktop_memory=lambda: desktop_memory(lambda: lock_directory(args.dir, backend=args.backend, make=False)),
    )


def sampled(args: argparse.Namespace, groups: Collection[str]) -> Snapshot:
    """Take one snapshot from the backend of --backend, with the fields of these *groups*."""
    with closing(backend_of(args)) as backend:
        return backend.sample(groups)


def directory_of(args: argparse.Namespace, *, make: bool = False) -> LockDirectory:
    """Return the claim directory of --backend and --dir, after a notice if it is missing and is not made."""
    directory = lock_directory(args.dir, backend=args.backend, make=make)
    if args.dir and args.dir not in _reported and directory.is_missing():
        _reported.add(args.dir)
        named_by = "GPUGUARD_DIR" if args.dir == os.environ.get("GPUGUARD_DIR") else "--dir"
        why = _("no claim was ever made there") if os.path.lexists(args.dir) else _("it does not exist yet")
        print(
            _("gpuguard: nothing is claimed in {dir} ({named_by}): {why}.").format(
                dir=args.dir, named_by=named_by, why=why
            ),
            file=sys.stderr,
        )
    return directory


def own_deeds(args: argparse.Namespace) -> list[str]:
    """Return lines for people about what policies did to this user within the hour, or [] if they did nothing."""
    try:
        directory, since = lock_directory(args.dir, backend=args.backend, make=False), time.time() - 3600
        if (last_about(directory, os.geteuid()) or 0.0) < since:
            return []
        from gpuguard.claims.daemon_client import own_events  # 20 ms, for users to whom a policy did something
        from gpuguard.views.events import deeds

        return deeds(own_events(directory, since), terminal.width())
    except GpuguardError:
        return []


def check_users(names: list[str]) -> None:
    """Refuse users that do not exist, because a misspelt name would look like a user who has nothing.

    Raises:
        InvalidRequest: no account has the name, or it is a uid whose user has a name.
    """
    if names:
        from gpuguard.yaml_files.decoder import Accounts  # over 10 ms, for --user alone

        accounts = Accounts()
        for name in names:
            uid = accounts.user(name)
            if name.isdecimal() and user_name(uid) != name:
                raise InvalidRequest(_("--user {name}: write the name, {uid}.").format(name=name, uid=user_name(uid)))


_OPTIONS = (
    ("--exclude", "LIST", "not these"),
    ("--prefer", "LIST", "these first, in this order, if they are eligible"),
    ("--min-free", "SIZE", "each has at least so much free memory, as in 20GiB"),
    ("--min-total", "SIZE", "each has at least so much memory in all"),
    ("--max-util", "PERCENT", "each is at most so busy, as in 10%%"),
    ("--max-memory-util", "PERCENT", "each moves data at most so much of the time"),
    (
        "--max-processes",
        "N",
        "share a GPU with up to N processes of others; then --min-free decides about memory, not --tolerance",
    ),
    ("--max-temperature", "TEMP", "each is at most so hot, as in 70C"),
)


def add_choice_options(parser: argparse.ArgumentParser, also: Mapping[str, Sequence[str]] | None = None) -> None:
    """Add the options that choose GPUs; *also* gives further spellings of some: ``{"--min-free": ("-f",)}``."""
    from gpuguard.request import STRATEGIES  # 2 ms, which commands that only look do not need

    group = parser.add_argument_group("which GPUs")
    rows = ((" ".join((flag, *(also or {}).get(flag, ()))), metavar, text) for flag, metavar, text in _OPTIONS)
    add_table(group, ("-n --num-gpus", "N", "how many (default: 1)"))
    add_device_options(group, "only these: indices, uuids or beginnings of uuids, as in 0,3 (without -n: all of them)")
    add_table(group, *rows)
    add_repeatable(group, ("--model", "GLOB", "the name fits, as in H100 or 'RTX*'; several: one of them fits"))
    add_vendor_option(group)
    strategies = "; ".join(f"{name}: {what}" for name, what in STRATEGIES.items())
    group.add_argument("--strategy", choices=STRATEGIES, default="spread", help=f"{strategies} (default: spread)")
    add_table(
        group,
        ("--mig", "PROFILE", "instances of this profile: 3g.40gb (MIG), cpx (AMD)"),
        ("--allow-mig-set", None, "several MIG instances will do: one process is started for each"),
        ("--mine-as-free", None, "my own processes do not make a GPU busy"),
        ("--tolerance", "SIZE", f"memory that an idle GPU may hold (default: {IDLE_TOLERANCE // 2**20}MiB)"),
    )
    add_table(
        parser.add_argument_group("sharing a GPU with others who share it too"),
        ("--share", None, "others may claim the rest of each GPU; needs --memory"),
        ("--memory", "SIZE", "my part of each GPU's memory, as in 10GiB"),
        ("--slots", "K", f"at most K jobs on each GPU, mine included (default and most: {SLOTS})"),
    )


def add_vendor_option(group: Any) -> None:
    """Add --vendor."""
    group.add_argument(
        "--vendor",
        choices=tuple(VENDORS),
        help="its vendor is this one (default: any, the same for all GPUs of a job)",
    )


def add_device_options(group: Any, text: str) -> None:
    """Add --devices and its former name --gpus, after which a number is a count in Slurm and docker."""
    spellings = group.add_mutually_exclusive_group()
    add_table(spellings, ("--devices", "LIST", text))
    add_table(
        spellings, ("--gpus", "LIST", "the same; not for one number alone"), dest="devices", type=_no_number_alone
    )


def _no_number_alone(text: str) -> str:
    number = text.strip()
    if not number.isdecimal() or len(number) > 4:
        return text
    count = format_count(int(number), "GPU") if number.strip("0") else ""
    either = _("`-n {number}` for {count}").format(number=number, count=count) if count else "`-n N` for N GPUs"
    raise argparse.ArgumentTypeError(
        _("{number} can mean a count or a GPU: write {either}, or `--devices {number}` for GPU number {number}").format(
            number=number, either=either
        )
    )


_AMOUNTS: Mapping[str, Callable[[str], Any]] = {  # fields of a request that are given by an option of that name
    "min_free": parse_bytes, "min_total": parse_bytes, "memory": parse_bytes, "max_util": parse_percent,
    "max_memory_util": parse_percent, "max_temperature": parse_celsius,
}  # fmt: skip


def request_of(args: argparse.Namespace) -> Request:
    """Return the request that the parsed options make.  An option that the command lacks counts as not given.

    Raises:
        InvalidRequest: a value cannot be understood, or two contradict each other.
    """
    from gpuguard.request import Request

    given = vars(args).get
    devices, number = selectors("--devices", args.devices), whole_number("-n", args.num_gpus)
    if devices is not None and number is not None and number > len(devices):
        raise InvalidRequest(
            _("-n {number} wants more than the {count} that --devices {devices} names.").format(
                number=number, count=len(devices), devices=args.devices
            )
        )
    exclude = selectors("--exclude", args.exclude) or ()
    if both := set(devices or ()) & set(exclude):
        raise InvalidRequest(
            _("{both} stands in --devices and in --exclude: decide for one.").format(both=", ".join(sorted(both)))
        )
    slots = whole_number("--slots", given("slots"))
    tolerance = quantity("--tolerance", given("tolerance"), parse_bytes)
    amounts: dict[str, Any] = {
        field: quantity(f"--{field.replace('_', '-')}", given(field), parse) for field, parse in _AMOUNTS.items()
    }
    return Request(
        num_gpus=number if number is not None else len(devices or "1"),
        devices=devices,
        max_processes=whole_number("--max-processes", given("max_processes")),
        models=tuple(args.model),
        vendor=given("vendor"),
        exclude=exclude,
        prefer=selectors("--prefer", given("prefer")) or (),
        strategy=given("strategy", "spread"),
        mine_as_free=frozenset((os.getuid(),)) if given("mine_as_free") else frozenset(),
        tolerance=IDLE_TOLERANCE if tolerance is None else tolerance,
        share=given("share", False),
        slots=SLOTS if slots is None else slots,
        mig=args.mig,
        allow_mig_set=given("allow_mig_set", False),
        **amounts,
    )


def whole_number(option: str, text: str | None) -> int | None:
    """Return a count, or None if the option was not given."""
    if text is not None and not re.fullmatch(r"\s*-?\d{1,9}\s*", text):
        raise InvalidRequest(
            _("{option}: {text!r} is not a whole number: write it like {option} 2.").format(
                option=option, text=text[:40]
            )
        )
    return None if text is None else int(text)


def selectors(option: str, text: str | None) -> tuple[str, ...] | None:
    """Return ("0", "3") for "0,3".  A device that is named twice is an error, because the intention is unknown."""
    if text is None:
        return None
    parts = tuple(part.strip() for part in text.split(","))
    if "" in parts:
        raise InvalidRequest(
            _("{option} {text!r} names no GPU in one place: write it like 0,3.").format(option=option, text=text)
        )
    twice = next((part for part in parts if parts.count(part) > 1), None)
    if twice is not None:
        raise InvalidRequest(
            _("{option} names GPU {twice} twice: name each GPU once.").format(option=option, twice=twice)
        )
    return parts


def quantity(option: str, text: str | None, parse: Callable[[str], T]) -> T | None:
    """Return the text as *parse* understands it, or None if the option was not given."""
    try:
        return None if text is None else parse(text)
    except InvalidRequest as fault:
        raise InvalidRequest(f"{option}: {fault}") from None


TERMINAL = "terminal"
TARGETS_IN_WORDS = (
    "a mail address (by sendmail, or smtp://SERVER/ADDRESS; mail: your own mailbox here), an https:// address, a "
    "program (its path), or a chat whose address stands in a variable (env:NAME, by the extra notify)"
)


def message_target(where: str | None) -> str | Target | None:
    """Return the target of --notify *where*; report one that will not work now, before a wait or job of hours.

    Only the words and variables of the user decide: no target of an administrator is read.
    """
    if where is None or where == TERMINAL:
        return where
    from gpuguard.notify.sender import problems  # 30 ms, for --notify alone
    from gpuguard.notify.targets import LOOPBACK, Apprise, Email, Hook, Secret, Webhook

    target: Target
    try:
        if where.startswith("env:"):
            target = Apprise(Secret(env=where[4:]))
        elif match := re.fullmatch(r"smtp://([A-Za-z0-9.-]+)(?::([0-9]{1,5}))?/([^/]+@[^/]+)", where):
            server, port, address = match.groups()
            encryption: Literal["none", "starttls"] = "none" if server in LOOPBACK else "starttls"
            target = Email((address,), server=server, port=int(port or 0), security=encryption)
        elif "://" in where:
            target = Webhook(where)
        else:
            to = user_name(os.geteuid()) if where == "mail" else where
            target = Hook((where,)) if where.startswith("/") else Email((to,))
        for problem in problems({"--notify": target}):
            server = _(": name a server, smtp://SERVER/me@example.org") if isinstance(target, Email) else ""
            why = getattr(problem, "values", {}).get("why", problem)
            raise InvalidRequest(f"{translated(why)}{server}")
    except InvalidRequest as fault:
        raise InvalidRequest(f"--notify {where}: {translated(str(fault))}") from None
    return target


def snapshot_source(args: argparse.Namespace, fields: Collection[str] = WHO_FIELDS) -> SnapshotSource:
    """Return the source of snapshots for a command that only looks: the machine of --backend and --dir."""
    source = SnapshotSource(
        args.backend, lambda: backend_of(args), lambda: directory_of(args), read=lambda backend: backend.sample(fields)
    )
    source.fresh = args.fresh
    return source


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """Add --hosts, --hosts-file, --timeout, --parallel, --remote and --ssh."""
    add_table(
        parser.add_argument_group("other hosts, over ssh: see docs/fleet.md"),
        ("--hosts", "LIST", "ask these instead, as in gpu1,alice@gpu2,gpu[03-16]"),
        ("--hosts-file", "FILE", "the same from a file, one per line; - is standard input"),
        ("--timeout", "D", "per host, from its first packet to its answer (default: 10s)"),
        ("--parallel", "N", "so many at once; fewer behind one jump host (default: 64)"),
        ("--remote", "WORDS", "gpuguard there (default: $GPUGUARD_REMOTE, else gpuguard)"),
        ("--ssh", "WORDS", "as in 'ssh -F FILE' (default: $GPUGUARD_SSH, else ssh)"),
    )


def has_hosts(args: argparse.Namespace) -> bool:
    """Return whether other hosts are asked.

    Raises:
        InvalidRequest: an option that is useful only with --hosts is given without it.
    """
    if args.hosts is not None or args.hosts_file is not None:
        return True
    for name in ("timeout", "parallel", "remote", "ssh"):
        if getattr(args, name) is not None:
            raise InvalidRequest(
                _("--{name} is about other hosts: name them with --hosts or --hosts-file.").format(name=name)
            )
    return False
